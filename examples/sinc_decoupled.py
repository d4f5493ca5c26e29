"""Sinc function with 500 noisy values: few inducing inputs, many for the mean alone, and many for both.

The example of Cheng and Boots (2017), figure 1. The bases of the second model are not chosen in advance: they grow from
minibatches. Prints the error, the bound and the spread of each, and writes a figure of the three predictions.

    python examples/sinc_decoupled.py [--smoke] [--output sinc_decoupled.png]
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import substitute
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

FEW, MANY, BATCH = 10, 100, 100


def model(X, y=None, num_data=None):
    """Values y ~ N(f(x), noise²): X is (N, 1)."""
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", lambda _: sgp.median_lengthscale(X[:BATCH]), constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    noise = numpyro.param("noise", 0.3, constraint=positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale, variance), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def data(N: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Inputs in [−5, 5] and sin(πx)/(πx) with noise of standard deviation 0.2."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-5.0, 5.0, size=(N, 1)), axis=0)
    return X, np.sinc(X[:, 0]) + 0.2 * rng.normal(size=N)


def fit(model, guide, optim, X, y, num_steps: int):
    """Parameters, the bound at all data, and the posterior at a grid."""
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    result = sgp.fit(svi, jax.random.key(0), (X, y), batch_size=BATCH, num_steps=num_steps, progress_bar=False)
    bound = -float(svi.evaluate(result.state, X, y))
    grid = np.linspace(-5.5, 5.5, 300)[:, None]
    return result.params, bound, grid, guide.posterior(jax.random.key(1), result.params, grid)["f"]


def main(num_steps: int, output: Path) -> None:
    """Fit, print, draw the figure."""
    X, y = data()
    schedule = optax.exponential_decay(0.5, num_steps // 10, 0.75, end_value=0.02)
    optim = sgp.NaturalGradient(schedule, others=optax.adam(2e-2))

    # The hyperparameters are trained once, with many inducing inputs, and fixed: what differs is the basis.
    guide = sgp.AutoSVGP(model, np.linspace(-5.0, 5.0, MANY)[:, None], natural=True)
    trained = fit(model, guide, optim, X, y, num_steps)[0]
    hypers = {name: trained[name] for name in ("lengthscale", "variance", "noise")}
    print({name: round(np.asarray(value).item(), 3) for name, value in hypers.items()})
    fixed = substitute(model, data=hypers)

    grow = partial(sgp.GrowBasis, num_new=5, tolerance=1e-6)
    few, many = (np.linspace(-5.0, 5.0, number)[:, None] for number in (FEW, MANY))
    mean_basis, covariance_basis = (partial(sgp.growing, capacity=number) for number in (MANY, FEW))
    cases = {
        f"{FEW} inducing inputs": (sgp.AutoSVGP(fixed, few, natural=True), optim),
        f"{MANY} for the mean, {FEW} for the covariance": (
            sgp.AutoDecoupledGP(fixed, mean_basis, covariance_basis, parametrization="hybrid", natural=True),
            grow(optim),
        ),
        f"{MANY} inducing inputs": (sgp.AutoSVGP(fixed, many, natural=True), optim),
    }
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), sharey=True, layout="constrained")
    for panel, (title, (guide, steps)) in zip(panels, cases.items(), strict=True):
        params, bound, grid, q = fit(fixed, guide, steps, X, y, num_steps)
        x, mean, spread = grid[:, 0], np.asarray(q.mean), 2.0 * np.sqrt(q.variance)
        error = np.sqrt(np.mean((mean - np.sinc(x)) ** 2))
        print(f"{title}: error of the mean {error:.3f}, bound {bound:.1f}, 2 sd on average {spread.mean():.3f}")
        panel.plot(X[:, 0], y, ".", color="0.75", markersize=3, label="data")
        panel.fill_between(x, mean - spread, mean + spread, color="C0", alpha=0.3, linewidth=0, label="mean ± 2 sd")
        panel.plot(x, np.sinc(x), color="C3", linewidth=1.0, linestyle="--", label="truth")
        panel.plot(x, mean, color="C0", label="mean")
        for symbol, height, label in (("inducing", -0.78, "inducing inputs"), ("mean_inducing", -0.7, "of the mean")):
            basis = params.get(f"f_auto_{symbol}")
            if basis is not None:
                color = "k" if symbol == "inducing" else "C1"
                panel.plot(basis.Z[:, 0], np.full(basis.num_inducing, height), "|", color=color, label=label)
        panel.set(title=title, xlabel="x", ylim=(-0.85, 1.6))
        panel.title.set_fontsize(10)
    panels[0].set_ylabel("f(x)")
    panels[1].legend(frameon=False, fontsize=7, ncols=2, loc="upper right")
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("sinc_decoupled.png"))
    arguments = parser.parse_args()
    main(50 if arguments.smoke else 3000, arguments.output)
