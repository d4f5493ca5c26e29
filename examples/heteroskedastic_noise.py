"""Noise that changes with the input: two Gaussian processes, one for the mean and one for the logarithm of the noise.

Head acceleration in a simulated motorcycle accident (Silverman, 1985): quiet for 14 ms, noisy from then on. Compared
with constant noise by leave-one-out densities and by the coverage of 90 % intervals in either part.

    python examples/heteroskedastic_noise.py [--smoke] [--output heteroskedastic_noise.png]
"""

import argparse
from functools import partial
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, init_to_median
from numpyro.infer.autoguide import AutoNormal
import optax

import numpyro_sgp as sgp

QUIET = 14.0  # ms after the impact, until the head moves


def mcycle() -> tuple[np.ndarray, np.ndarray]:
    """Time in ms, (133, 1), and acceleration in g."""
    table = np.loadtxt(Path(__file__).parent / "data" / "mcycle.csv", delimiter=",", skiprows=4)
    return table[:, :1], table[:, 1]


def mean_process(X):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(5.0), 0.5))
    amplitude = numpyro.sample("amplitude", dist.LogNormal(jnp.log(50.0), 0.5))
    return numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale, amplitude**2), X))


def heteroskedastic(X, y=None):
    """Acceleration y ~ N(f(t), exp(level + g(t))²)."""
    f = mean_process(X)
    level = numpyro.sample("level", dist.Normal(jnp.log(20.0), 1.0))
    noise_lengthscale = numpyro.sample("noise_lengthscale", dist.LogNormal(jnp.log(10.0), 0.5))
    noise_amplitude = numpyro.sample("noise_amplitude", dist.LogNormal(0.0, 0.5))
    kernel = sgp.kernels.Matern52(noise_lengthscale, noise_amplitude**2)
    g = numpyro.sample("g", sgp.GaussianProcess(kernel, X))
    noise = numpyro.deterministic("noise", jnp.exp(level + g))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def homoskedastic(X, y=None):
    f = mean_process(X)
    noise = numpyro.sample("noise", dist.LogNormal(jnp.log(20.0), 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def main(num_steps: int, num_samples: int, output: Path) -> None:
    """Fit both models, compare them, draw the figure."""
    numpyro.enable_x64()
    X, y = mcycle()
    Z = np.linspace(X.min(), X.max(), 30)[:, None]
    X_new = np.linspace(X.min(), X.max(), 300)[:, None]
    models = {"constant noise": homoskedastic, "two processes": heteroskedastic}
    loo, predicted = {}, {}
    for name, model in models.items():
        # A dict would give f and g different inducing inputs; the noise changes as quickly as the mean here.
        # Hyperparameters start at the median of their prior: a process of large variance for the logarithm of the noise
        # would have a bound of −1e11 at the start.
        guide = sgp.AutoTSVGP(model, inducing=Z, base=partial(AutoNormal, init_loc_fn=init_to_median))
        svi = SVI(model, guide, sgp.NaturalGradient(0.3, optax.adam(0.01)), sgp.QuadratureELBO())
        result = svi.run(jax.random.key(0), num_steps, X, y, progress_bar=False)
        print(f"{name}: bound {-np.mean(result.losses[-100:]):.1f}, {sgp.num_refused(result.state)} steps refused")
        data = sgp.to_arviz(jax.random.key(1), svi, result, X, y, num_samples=num_samples)
        loo[name] = az.loo(data, pointwise=True)
        low, high = np.quantile(data["posterior_predictive"]["y"].values[0], [0.05, 0.95], axis=0)
        for part, rows in (("before", X[:, 0] < QUIET), ("after", X[:, 0] >= QUIET)):
            held = np.mean((low <= y)[rows] & (y <= high)[rows])
            print(f"    90 % intervals {part} {QUIET:g} ms: {np.mean((high - low)[rows]):.0f} g wide, hold {held:.0%}")
        predictive = Predictive(
            model, guide=guide, params=result.params, num_samples=num_samples, return_sites=["f", "noise", "y"]
        )
        predicted[name] = predictive(jax.random.key(2), X_new)
    print(az.compare(loo)[["elpd_diff", "dse"]])

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(1.5, 1))
    t = X_new[:, 0]
    low, high = np.quantile(predicted["constant noise"]["y"], [0.05, 0.95], axis=0)
    left.plot(t, low, "C3--", linewidth=1, label="90 % of y, constant noise")
    left.plot(t, high, "C3--", linewidth=1)
    draws = predicted["two processes"]
    low, high = np.quantile(draws["y"], [0.05, 0.95], axis=0)
    left.fill_between(t, low, high, color="C0", alpha=0.2, linewidth=0, label="90 % of y, two processes")
    low, median, high = np.quantile(draws["f"], [0.05, 0.5, 0.95], axis=0)
    left.fill_between(t, low, high, color="C0", alpha=0.45, linewidth=0, label="90 % of f")
    left.plot(t, median, "C0")
    left.plot(X[:, 0], y, "k.", markersize=4)
    left.set(xlabel="time after the impact (ms)", ylabel="acceleration (g)", xlim=(t[0], t[-1]))
    left.legend(frameon=False, fontsize=8, loc="lower right")

    low, median, high = np.quantile(draws["noise"], [0.05, 0.5, 0.95], axis=0)
    right.fill_between(t, low, high, color="C0", alpha=0.3, linewidth=0)
    right.semilogy(t, median, "C0", label="two processes, 90 %")
    low, median, high = np.quantile(predicted["constant noise"]["noise"], [0.05, 0.5, 0.95])
    right.axhspan(low, high, color="C3", alpha=0.25, linewidth=0)
    right.axhline(median, color="C3", linestyle="--", label="constant noise, 90 %")
    right.set(xlabel="time after the impact (ms)", ylabel="standard deviation of the noise (g)", xlim=(t[0], t[-1]))
    right.legend(frameon=False, loc="lower right")
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("heteroskedastic_noise.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 50, arguments.output)
    else:
        main(1500, 2000, arguments.output)
