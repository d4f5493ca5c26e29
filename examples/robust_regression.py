"""Regression with outliers: Student-t noise against Gaussian noise, on data simulated from a known function.

One measurement in six is displaced by five to twelve times the noise. The two models differ in one line; the posterior
of the function is compared with the truth, and the predictions by leaving one out.

    python examples/robust_regression.py [--smoke] [--output robust_regression.png]
"""

import argparse
from pathlib import Path

import arviz as az
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

NOISE = 0.2


def truth(x: np.ndarray) -> np.ndarray:
    return np.sin(2.0 * x) + 0.4 * x


def simulate(N: int = 150) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs (N, 1), outcomes, and which of them are outliers."""
    rng = np.random.default_rng(4)
    x = np.sort(rng.uniform(-3.0, 3.0, N))
    outlier = rng.uniform(size=N) < 1 / 6
    shift = rng.choice([-1.0, 1.0], N) * rng.uniform(1.0, 2.5, N)
    return x[:, None], truth(x) + NOISE * rng.normal(size=N) + outlier * shift, outlier


def latent(X):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    return numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale, variance), X))


def gaussian(X, y=None):
    f, noise = latent(X), numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def student_t(X, y=None):
    f, noise = latent(X), numpyro.sample("noise", dist.HalfNormal(1.0))
    freedom = numpyro.sample("freedom", dist.Gamma(2.0, 0.1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(freedom, f, noise), obs=y)


def main(num_steps: int, num_samples: int, output: Path) -> None:
    """Fit both models, compare them with each other and with the truth, draw the figure."""
    numpyro.enable_x64()
    X, y, outlier = simulate()
    Z, X_new = np.linspace(-3.0, 3.0, 20)[:, None], np.linspace(-3.0, 3.0, 200)[:, None]
    x, f_true = X_new[:, 0], truth(X_new[:, 0])
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained", sharey=True)
    loo = {}
    for ax, color, (name, model) in zip(
        axes, ("C3", "C0"), {"Gaussian noise": gaussian, "Student-t noise": student_t}.items(), strict=True
    ):
        guide = sgp.AutoTSVGP(model, inducing=Z)
        # Student-t is not log-concave: the site of an outlier has a negative precision, which the default `floor=0`
        # would lift to zero, so that the fixed point would not be the optimum of the bound.
        optim = sgp.NaturalGradient(step_size=0.3, others=optax.adam(0.01), floor=None)
        svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_nodes=40))
        result = svi.run(jax.random.key(0), num_steps, X, y, progress_bar=False)
        data = sgp.to_arviz(jax.random.key(1), svi, result, X, y, num_samples=num_samples)
        loo[name] = az.loo(data, pointwise=True)

        draws = guide.sample_posterior(jax.random.key(2), result.params, X_new, sample_shape=(num_samples,))
        low, high = np.quantile(draws["f"], [0.05, 0.95], axis=0)
        mean = np.mean(draws["f"], axis=0)
        print(
            f"{name}: bound {-np.mean(result.losses[-100:]):.1f}, {sgp.num_refused(result.state)} steps refused; "
            f"noise {np.mean(draws['noise']):.2f} ± {np.std(draws['noise']):.2f} (truth {NOISE})\n"
            f"    root mean square error of f {np.sqrt(np.mean((mean - f_true) ** 2)):.3f}, "
            f"90 % band of width {np.mean(high - low):.2f} holds {np.mean((low <= f_true) & (f_true <= high)):.0%}"
        )
        ax.plot(X[~outlier, 0], y[~outlier], ".", color="0.45", markersize=4, label="measurements")
        ax.plot(X[outlier, 0], y[outlier], "x", color="0.45", markersize=4, label="displaced ones")
        ax.fill_between(x, low, high, color=color, alpha=0.35, linewidth=0, label="90 % of f")
        ax.plot(x, mean, color=color)
        ax.plot(x, f_true, "k--", linewidth=1, label="truth")
        ax.set(title=name, xlabel="x", xlim=(-3.0, 3.0))
    axes[0].set_ylabel("y")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    print(az.compare(loo)[["elpd_diff", "dse"]])
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("robust_regression.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 50, arguments.output)
    else:
        main(1500, 2000, arguments.output)
