"""Coal-mining disasters in Britain, 1851-1962: yearly counts with a Gaussian-process log rate, by t-SVGP.

Prints a summary of the hyperparameters' posterior and writes a figure of the rate with its 90 % band.

    python examples/quickstart.py [--smoke] [--output quickstart.png]
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
from numpyro.infer import SVI, Predictive
import optax

import numpyro_sgp as sgp


def yearly_counts() -> tuple[np.ndarray, np.ndarray]:
    """Mid-year and number of disasters, for each year."""
    times = np.loadtxt(Path(__file__).parent / "data" / "coal.csv", skiprows=3)
    first, last = int(times.min()), int(times.max())
    counts, edges = np.histogram(times, bins=np.arange(first, last + 2))
    return edges[:-1, None] + 0.5, counts


def model(X, y=None):
    """Counts y ~ Poisson(exp(f(year))): X in years, (N, 1); the lengthscale is in years too."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(20.0), 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    # The constant kernel is an unknown overall level, N(0, 1), as a part of f.
    kernel = sgp.kernels.Matern52(lengthscale, variance) + sgp.kernels.Constant(1.0)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    rate = numpyro.deterministic("rate", jnp.exp(f))
    with numpyro.plate("years", X.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def summary(draws: dict[str, jax.Array]):
    """ArviZ's table for draws of shape (draw, ...), taken as one chain; ArviZ before and after 1.0."""
    posterior = {name: np.asarray(value)[None] for name, value in draws.items()}
    if az.__version__.startswith("0."):
        return az.summary(az.from_dict(posterior=posterior), kind="stats")
    return az.summary(az.from_dict({"posterior": posterior}), kind="stats")


def main(num_steps: int, num_samples: int, output: Path) -> None:
    """Fit, summarise, draw the figure."""
    X, y = yearly_counts()
    Z = np.linspace(X.min(), X.max(), 25)[:, None]

    guide = sgp.AutoTSVGP(model, inducing=Z)
    optim = sgp.NaturalGradient(step_size=0.5, others=optax.adam(1e-2))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), num_steps, X, y, progress_bar=False)
    print(f"ELBO {-np.mean(result.losses[-100:]):.2f}, {sgp.num_refused(result.state)} steps refused")

    draws = guide.sample_posterior(jax.random.key(1), result.params, X, sample_shape=(num_samples,))
    print(summary({name: draws[name] for name in ("lengthscale", "variance")}))

    X_new = np.linspace(X.min(), X.max() + 5.0, 200)[:, None]
    predictive = Predictive(model, guide=guide, params=result.params, num_samples=num_samples, return_sites=["rate"])
    rate = predictive(jax.random.key(2), X_new)["rate"]
    low, median, high = np.quantile(rate, [0.05, 0.5, 0.95], axis=0)

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.bar(X[:, 0], y, width=0.9, color="0.82", label="disasters in the year")
    axes.fill_between(X_new[:, 0], low, high, color="C0", alpha=0.3, linewidth=0, label="rate, 90 % band")
    axes.plot(X_new[:, 0], median, color="C0", label="rate, median")
    axes.plot(Z[:, 0], np.full(len(Z), -0.12), "|", color="C3", clip_on=False, label="inducing inputs")
    axes.set(xlabel="year", ylabel="disasters per year", xlim=(X.min() - 1, X_new.max()))
    axes.legend(frameon=False)
    figure.savefig(output, dpi=150)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("quickstart.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 50, arguments.output)
    else:
        main(1500, 1000, arguments.output)
