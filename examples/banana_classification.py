"""Two classes in the plane (the banana set): t-SVGP and natural-gradient SVGP.

Draws the posterior probability of a class, the bound that each guide sees in an M-step against the kernel's variance,
and the bound over EM iterations (after Adam et al., 2021).

    python examples/banana_classification.py [--smoke] [--output banana_classification.png]
"""

import argparse
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

STYLES = {"t-SVGP": "C0-", "natural SVGP": "C3-."}


def banana() -> tuple[np.ndarray, np.ndarray]:
    """400 points of the plane and their classes, 0 or 1."""
    table = np.loadtxt(Path(__file__).parent / "data" / "banana.csv", delimiter=",", skiprows=3)
    return table[:, :2], table[:, 2].astype(int)


def model(X, y=None):
    """Classes y ~ Bernoulli(logits=f(x)); hyperparameters by the largest bound."""
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", jnp.ones(2), constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def em(guide, num_iterations: int, X, y):
    """Each iteration a full natural step and fifteen steps of Adam; the losses are the bound before each of them."""
    optim = sgp.NaturalGradient(step_size=1.0, others=optax.adam(0.1), e_steps=1, m_steps=15)
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    return svi, svi.run(jax.random.key(0), num_iterations, X, y, progress_bar=False)


def profile(guide, lengthscale, variances, at: float, e_steps: int, X, y):
    """The bound at each variance: with what the guide keeps since an E-step `at` one of them, and after its own."""
    svi = SVI(model, guide, sgp.NaturalGradient(0.5, e_steps=e_steps, m_steps=0), sgp.QuadratureELBO())

    @jax.jit
    def bounds(X, y):
        def after_e_step(variance):
            start = {"lengthscale": lengthscale, "variance": variance}
            state = svi.init(jax.random.key(0), X, y, init_params=start)
            return svi.get_params(svi.update(state, X, y)[0])

        def bound(params, variance):
            return -svi.loss.loss(jax.random.key(0), {**params, "variance": variance}, model, guide, X, y)

        kept = after_e_step(at)
        own = jax.lax.map(lambda variance: bound(after_e_step(variance), variance), variances)
        return jax.lax.map(lambda variance: bound(kept, variance), variances), own

    return (np.asarray(value) for value in bounds(X, y))


def main(num_iterations: int, e_steps: int, num_samples: int, resolution: int, output: Path) -> None:
    """Fit by both guides, judge one of them by leaving one out, draw the figure."""
    numpyro.enable_x64()
    X, y = banana()
    Z = sgp.kmeans(None, X, num_inducing=40)
    guides = {"t-SVGP": sgp.AutoTSVGP(model, Z), "natural SVGP": sgp.AutoSVGP(model, Z, natural=True)}
    fits = {name: em(guide, num_iterations, X, y) for name, guide in guides.items()}
    bounds = {name: -np.asarray(result.losses) for name, (_, result) in fits.items()}
    for name, bound in bounds.items():
        reached = ", ".join(f"{bound[i]:.2f}" for i in (2, 4, 8, num_iterations - 1) if i < num_iterations)
        print(f"{name:13s} bound after 2, 4, 8 and all {num_iterations - 1} EM iterations: {reached}")

    svi, result = fits["t-SVGP"]
    data = sgp.to_arviz(jax.random.key(1), svi, result, X, y, num_samples=num_samples)
    print(az.loo(data))
    print("Without importance weights, by leaving each datum's Gaussian site out of the posterior:")
    print(sgp.diagnostics.loo_cavity(jax.random.key(2), svi, result, X, y))

    figure, (plane, middle, right) = plt.subplots(
        1, 3, figsize=(10.5, 3.6), layout="constrained", width_ratios=(1.25, 1, 1)
    )
    margin = 0.3
    x1, x2 = (np.linspace(X[:, d].min() - margin, X[:, d].max() + margin, resolution) for d in range(2))
    grid = np.stack(np.meshgrid(x1, x2), axis=-1).reshape(-1, 2)
    f = sgp.process_posterior(guides["t-SVGP"], jax.random.key(3), result.params, X, y)["f"].posterior(grid)
    probability = np.asarray(f.expectation(jax.nn.sigmoid)).reshape(resolution, resolution)
    image = plane.contourf(x1, x2, probability, np.linspace(0.0, 1.0, 21), cmap="RdBu_r", alpha=0.5)
    lines = plane.contour(x1, x2, probability, [0.1, 0.5, 0.9], colors="0.2", linewidths=(0.8, 1.6, 0.8))
    for label, color, marker in ((0, "C0", "o"), (1, "C3", "s")):
        plane.plot(*X[y == label].T, marker, color=color, markersize=2.5, alpha=0.8)
    plane.plot(*Z.T, "k+", markersize=7, label="inducing inputs")
    plane.set(xlabel="$x_1$", ylabel="$x_2$")
    plane.legend(frameon=True, framealpha=0.8, edgecolor="none", loc="lower right", fontsize=8)
    figure.colorbar(image, ax=plane, label="probability of the second class", ticks=np.linspace(0.0, 1.0, 6)).add_lines(
        lines
    )

    lengthscale, fitted = result.params["lengthscale"], float(result.params["variance"])
    variances, at = np.geomspace(2.0, 8.0 * fitted, resolution), 10.0
    for name, guide in guides.items():
        frozen, best = profile(guide, lengthscale, variances, at, e_steps, X, y)
        middle.semilogx(variances, frozen, STYLES[name], label=name)
        gap = best - frozen
        print(
            f"{name:13s} below the best bound at each variance: median {np.median(gap):.2f}, most {gap.max():.1f} nats"
        )
    middle.semilogx(variances, best, "k:", label="with an E-step at each variance")
    middle.axvline(at, color="0.8", zorder=0)
    middle.annotate("E-step", (at, 0.03), xycoords=("data", "axes fraction"), rotation=90, ha="right", color="0.5")
    middle.set(xlabel="variance of the kernel", ylabel="bound (nats)", ylim=(best.max() - 30.0, best.max() + 2.0))
    figure.legend(*middle.get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)

    top = max(bound.max() for bound in bounds.values())
    for name, bound in bounds.items():
        right.semilogy(np.arange(len(bound)), np.maximum(top - bound, 1e-6), STYLES[name])
    right.set(xlabel="EM iterations", ylabel="bound below the best (nats)", ylim=(1e-2, None))
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("banana_classification.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(4, 2, 50, 25, arguments.output)
    else:
        main(26, 60, 2000, 100, arguments.output)
