"""A deep kernel: a kernel on the features of a small network.

Compares it with the same GP without the network, on held-out data, for two functions: one with a jump and a lengthscale
that changes, and one drawn from the plain kernel, where the network cannot help.

    python examples/deep_kernel.py [--smoke] [--output deep_kernel.png]
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import plot_band

numpyro.enable_x64()

WIDTHS = (1, 32, 32, 2)
NOISE = 0.15


def initial_weights(rng_key):
    """Weights and biases of each layer: a pytree, which `numpyro.param` takes as it is."""
    keys = jax.random.split(rng_key, len(WIDTHS) - 1)
    return [
        (jax.random.normal(key, (rows, columns)) / jnp.sqrt(rows), jnp.zeros(columns))
        for key, rows, columns in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]


def network(weights, X):
    """Features, (N, 2), of inputs, (N, 1)."""
    *hidden, (W, b) = weights
    for W_hidden, b_hidden in hidden:
        X = jnp.tanh(X @ W_hidden + b_hidden)
    return X @ W + b


def model(X, y=None, deep=True):
    """Regression; with `deep` the kernel is that of the network's features."""
    variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
    noise = numpyro.param("noise", 0.3, constraint=dist.constraints.positive)
    if deep:
        weights = numpyro.param("network", initial_weights)
        # The last layer scales the features, so they need no lengthscale. `Partial` shows the weights to JAX.
        kernel = sgp.kernels.Warp(sgp.kernels.Matern52(1.0, variance), jax.tree_util.Partial(network, weights))
    else:
        lengthscale = numpyro.param("lengthscale", 0.3, constraint=dist.constraints.positive)
        kernel = sgp.kernels.Matern52(lengthscale, variance)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def jump(X):
    """Slow on the left, a jump, then ever faster on the right."""
    x = X[:, 0]
    return np.where(x < 0.0, 0.5 * np.sin(2.0 * x) - 1.0, 1.0 + 0.6 * np.sin(14.0 * x**2))


def smooth(X):
    """A draw from the plain kernel."""
    kernel = sgp.kernels.Matern52(0.3, 1.0)
    return np.asarray(sgp.GaussianProcess(kernel, X).sample(jax.random.key(11)))


def score(q, noise, y):
    """Average negative log density of y."""
    return -stats.norm.logpdf(y, q.mean, np.sqrt(np.asarray(q.variance) + noise**2)).mean()


def fitted(deep: bool, num_steps: int):
    """A compiled function from data to parameters and final bound, and the guide."""
    conditional = partial(model, deep=deep)
    guide = sgp.AutoTSVGP(conditional, inducing=np.linspace(-1.5, 1.5, 40)[:, None])
    # The weights start slowly: before the sites have converged, their gradient is not useful.
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, num_steps // 10, num_steps)
    svi = SVI(conditional, guide, sgp.NaturalGradient(0.5, others=optax.adam(schedule)), sgp.QuadratureELBO())
    run = jax.jit(lambda key, X, y: svi.run(key, num_steps, X, y, progress_bar=False))
    return guide, run


def main(num_steps: int, num_rows: int, num_sets: int, output: Path) -> None:
    """Fit both kernels to both functions, draw the jump."""
    fits = {name: fitted(name == "deep", num_steps) for name in ("plain", "deep")}
    grid = np.linspace(-1.5, 1.5, 401)[:, None]
    shown = {}
    for function in (jump, smooth):
        scores = {name: [] for name in fits}
        for number in range(num_sets):
            rng = np.random.default_rng(number)
            X = rng.uniform(-1.5, 1.5, size=(num_rows + 500, 1))
            y = function(X) + NOISE * rng.normal(size=len(X))
            training, held_out = (X[:num_rows], y[:num_rows]), (X[num_rows:], y[num_rows:])
            for name, (guide, run) in fits.items():
                params = run(jax.random.key(number), *training).params
                q = guide.posterior(jax.random.key(0), params, held_out[0])["f"]
                scores[name].append(score(q, params["noise"], held_out[1]))
                if function is jump and number == 0:
                    shown[name] = guide.posterior(jax.random.key(0), params, grid)["f"], params
                    shown["data"] = training
        for name, values in scores.items():
            listed = " ".join(f"{value:6.3f}" for value in values)
            print(f"{function.__name__:6s} {name:5s} held-out negative log density, by data set: {listed}")
    print(f"were the function known: {0.5 * np.log(2.0 * np.pi * np.e * NOISE**2):.3f}")

    figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained", width_ratios=(1.3, 1.3, 1.0))
    for ax, name, color in zip(axes, ("plain", "deep"), ("C1", "C0"), strict=False):
        ax.plot(*shown["data"], ".", color="0.7", markersize=3, label="data")
        plot_band(shown[name][0], levels=(0.9,), color=color, ax=ax)
        ax.plot(grid[:, 0], jump(grid), "k", linewidth=0.7, label="truth")
        ax.set(xlabel="x", ylabel="y", title=f"{name} kernel, 90 % band of f", ylim=(-2.3, 2.3))
    axes[0].legend(frameon=False, loc="lower right")
    features = np.asarray(network(shown["deep"][1]["network"], grid))
    for number in range(features.shape[1]):
        axes[2].plot(
            grid[:, 0], features[:, number] - features[0, number], color=f"C{number + 2}", label=f"feature {number + 1}"
        )
    axes[2].set(xlabel="x", ylabel="change from the left, in lengthscales", title="what the network does")
    axes[2].legend(frameon=False)
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("deep_kernel.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 60, 1, arguments.output)
    else:
        main(2000, 300, 6, arguments.output)
