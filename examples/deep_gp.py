"""A two-layer deep GP on a function with steps, against a single GP.

A stationary process has one lengthscale everywhere: it must either smooth the steps or ripple between them. In the deep
GP the values of an inner process are the inputs of the outer one, so the inner one can be steep where the steps are.

    python examples/deep_gp.py [--smoke] [--output deep_gp.png]
"""

import argparse
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
from scipy.special import logsumexp
from scipy.stats import norm

import numpyro_sgp as sgp


def truth(x: np.ndarray) -> np.ndarray:
    """Three plateaus."""
    return np.select([x < -1.0, x < 0.8], [-1.0, 1.0], 0.0)


def simulate(N: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(-3.0, 3.0, N))
    return x[:, None], truth(x) + 0.1 * rng.normal(size=N)


def layer(name: str, X, mean=0.0):
    """A process with its own lengthscale and variance."""
    lengthscale = numpyro.sample(f"{name}_lengthscale", dist.LogNormal(0.0, 0.5))
    variance = numpyro.sample(f"{name}_variance", dist.LogNormal(0.0, 0.5))
    kernel = sgp.kernels.SquaredExponential(lengthscale, variance)
    return numpyro.sample(name, sgp.GaussianProcess(kernel, X, mean=mean))


def outcomes(f, y):
    noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    with numpyro.plate("data", f.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def single(X, y=None):
    outcomes(layer("f", X), y)


def deep(X, y=None):
    """f(h(x)): the inner process h has the mean x, so that a layer that has nothing to do changes nothing."""
    inner = layer("inner", X, mean=lambda X: X[:, 0])
    outcomes(layer("f", inner[:, None]), y)


def main(num_steps: int, num_samples: int, output: Path) -> None:
    """Fit both models, score them on held-out data, draw the figure."""
    numpyro.enable_x64()
    X, y = simulate(120, seed=0)
    X_test, y_test = simulate(500, seed=1)
    X_new = np.linspace(-3.0, 3.0, 400)[:, None]
    x = X_new[:, 0]
    Z = np.linspace(-3.0, 3.0, 25)[:, None]
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    fits = {
        "single layer": (single, sgp.AutoTSVGP(single, Z), sgp.NaturalGradient(0.5, optax.adam(0.02))),
        # The bound of a deep GP is estimated by draws of the inner layer, so its gradient is noisy: mean and root of
        # q(u) by Adam with a decreasing rate.
        "two layers": (deep, sgp.AutoSVGP(deep, Z), optax.adam(optax.cosine_decay_schedule(0.02, num_steps))),
    }
    for ax, (name, (model, guide, optim)) in zip(axes, fits.items(), strict=False):
        svi = SVI(model, guide, optim, sgp.QuadratureELBO())
        result = svi.run(jax.random.key(0), num_steps, X, y, progress_bar=False)
        test = guide.sample_posterior(jax.random.key(1), result.params, X_test, sample_shape=(num_samples,))
        log_densities = norm.logpdf(y_test, test["f"], test["noise"][:, None])
        nlpd = -np.mean(logsumexp(log_densities, axis=0) - np.log(num_samples))
        error = np.sqrt(np.mean((np.mean(test["f"], axis=0) - truth(X_test[:, 0])) ** 2))
        print(
            f"{name}: bound {-np.mean(result.losses[-200:]):.1f}; noise {np.mean(test['noise']):.3f} (truth 0.1)\n"
            f"    held out: negative log predictive density {nlpd:.3f}, root mean square error of f {error:.3f}"
        )
        draws = guide.sample_posterior(jax.random.key(2), result.params, X_new, sample_shape=(num_samples,))
        low, median, high = np.quantile(draws["f"], [0.05, 0.5, 0.95], axis=0)
        ax.plot(X[:, 0], y, ".", color="0.45", markersize=4)
        ax.fill_between(x, low, high, color="C0", alpha=0.35, linewidth=0, label="90 % of f")
        ax.plot(x, median, "C0")
        ax.plot(x, truth(x), "k--", linewidth=1, label="truth")
        ax.set(title=name, xlabel="x", ylabel="y", ylim=(-1.7, 1.7))
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    low, median, high = np.quantile(draws["inner"], [0.05, 0.5, 0.95], axis=0)
    axes[2].fill_between(x, low, high, color="C1", alpha=0.35, linewidth=0, label="90 %")
    axes[2].plot(x, median, "C1")
    axes[2].plot(x, x, color="0.7", linewidth=1, label="prior mean")
    axes[2].set(title="inner of the two layers", xlabel="x", ylabel="h(x)")
    axes[2].legend(frameon=False, fontsize=8)
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("deep_gp.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 50, arguments.output)
    else:
        main(4000, 1000, arguments.output)
