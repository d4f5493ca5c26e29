"""A spatial field: negative binomial counts of plants at 1500 sites, a part of the map not yet surveyed.

A Gaussian process over the plane is the logarithm of the expected count, next to an effect of the soil and a negative
binomial likelihood. Sites without a count stay in the model, masked; the forecast of their total needs joint draws.

    python examples/spatial_field.py [--smoke] [--output spatial_field.png]
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from matplotlib.patches import Rectangle
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, init_to_median
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax
from scipy.special import logsumexp

import numpyro_sgp as sgp

numpyro.enable_x64()

SIDE = 10.0  # of the map, in km
UNSURVEYED = (4.5, 8.5, 3.0, 7.0)  # west, east, south, north
TRUTH = {"lengthscale": 1.5, "variance": 1.0, "slope": 0.5, "concentration": 3.0}


def model(X, soil, y=None, observed=True):
    """Counts y at places X, (N, 2) in km, with a covariate `soil`, (N,); only those `observed` inform the posterior."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    # The overall level is a part of f, by the constant kernel.
    kernel = sgp.kernels.Matern52(lengthscale, variance) + sgp.kernels.Constant(4.0)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    mean = numpyro.deterministic("mean", jnp.exp(slope * soil + f))
    with numpyro.plate("sites", X.shape[0]), handlers.mask(mask=observed):
        numpyro.sample("y", dist.NegativeBinomial2(mean, concentration), obs=y)


def simulate(num_sites: int, grid: np.ndarray):
    """Places, soil, counts and the field at the grid: a draw of the model itself, from the exact prior."""
    rng = np.random.default_rng(1)
    X = rng.uniform(0.0, SIDE, size=(num_sites, 2))
    soil = rng.normal(size=num_sites)
    kernel = sgp.kernels.Matern52(TRUTH["lengthscale"], TRUTH["variance"])
    f = sgp.GaussianProcess(kernel, np.concatenate([X, grid]), mean=1.2).sample(jax.random.key(3))
    mean = jnp.exp(TRUTH["slope"] * soil + f[:num_sites])
    y = dist.NegativeBinomial2(mean, TRUTH["concentration"]).sample(jax.random.key(4))
    west, east, south, north = UNSURVEYED
    inside = (X[:, 0] > west) & (X[:, 0] < east) & (X[:, 1] > south) & (X[:, 1] < north)
    lost = ~inside & (rng.uniform(size=num_sites) < 0.1)  # a few forms went missing everywhere
    return X, soil, np.asarray(y), inside, lost, np.asarray(f[num_sites:])


def log_score(y: np.ndarray, mean: np.ndarray, concentration: np.ndarray) -> float:
    """Average over counts of log p(y), the draws in the leading axis mixed."""
    log_prob = np.asarray(dist.NegativeBinomial2(mean, concentration[:, None]).log_prob(y))
    return float((logsumexp(log_prob, axis=0) - np.log(len(mean))).mean())


def main(num_sites: int, num_inducing: int, num_steps: int, num_samples: int, side: int, output: Path) -> None:
    """Fit, predict the sites without counts, draw the maps."""
    ticks = (np.arange(side) + 0.5) * SIDE / side
    grid = np.stack(np.meshgrid(ticks, ticks), axis=-1).reshape(-1, 2)
    X, soil, y, inside, lost, truth = simulate(num_sites, grid)
    observed = ~inside & ~lost

    inducing = partial(sgp.kmeans, num_inducing=num_inducing)
    base = partial(AutoMultivariateNormal, init_loc_fn=init_to_median)
    guide = sgp.AutoTSVGP(model, inducing=inducing, base=base)
    optim = sgp.NaturalGradient(step_size=0.5, others=optax.adam(optax.cosine_decay_schedule(5e-2, num_steps)))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    # The values of masked entries do not matter; these are zeros.
    result = svi.run(
        jax.random.key(0), num_steps, X, soil, np.where(observed, y, 0), jnp.asarray(observed), progress_bar=False
    )
    print(f"{observed.sum()} counts; ELBO {-np.mean(result.losses[-50:]):.1f}")

    # `Predictive` draws f at all sites jointly, so that sums over sites have the right spread.
    hidden = inside | lost
    sites = ["mean", "y", *TRUTH]
    predictive = Predictive(model, guide=guide, params=result.params, num_samples=num_samples, return_sites=sites)
    draws = {name: np.asarray(value) for name, value in predictive(jax.random.key(1), X[hidden], soil[hidden]).items()}
    for name, value in TRUTH.items():
        print(f"{name:13s} {draws[name].mean():.2f} ± {draws[name].std():.2f}, simulated with {value}")
    constant = np.full((1, 1), y[observed].mean()), np.array([dispersion(y[observed])])
    for name, rows in (("lost here and there", lost[hidden]), ("in the unsurveyed square", inside[hidden])):
        counts, replicates = y[hidden][rows], draws["y"][:, rows]
        low, high = np.quantile(replicates, [0.05, 0.95], axis=0)
        score = log_score(counts, draws["mean"][:, rows], draws["concentration"])
        print(
            f"{rows.sum()} counts {name}: log score {score:.2f}, without the model {log_score(counts, *constant):.2f}; "
            f"90 % intervals hold {np.mean((low <= counts) & (counts <= high)):.0%}"
        )
    # Shuffled over draws at each site: the sum of independent predictions of the sites.
    shuffled = np.random.default_rng(0).permuted(replicates, axis=0)
    for name, values in (("joint draws", replicates), ("independent draws", shuffled)):
        low, high = np.quantile(values.sum(axis=1), [0.05, 0.95])
        print(f"total of the square, 90 % interval by {name}: {low:.0f} to {high:.0f}; it was {counts.sum()}")

    def moments(key):
        f = guide.posterior(key, result.params, grid, np.zeros(len(grid)))["f"]
        return f.mean, f.variance

    # Each key is a draw of the hyperparameters; given these, the moments of f are known.
    means, variances = jax.lax.map(moments, jax.random.split(jax.random.key(5), 20))
    sd = np.sqrt(variances.mean(axis=0) + means.var(axis=0))
    maps = {"simulated": truth, "posterior mean": means.mean(axis=0), "posterior standard deviation": sd}
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.0), layout="constrained", sharey=True)
    west, east, south, north = UNSURVEYED
    for ax, (title, values) in zip(axes, maps.items(), strict=True):
        last = values is sd
        scale = {"cmap": "magma", "vmin": 0.0} if last else {"vmin": truth.min(), "vmax": truth.max()}
        extent = {"origin": "lower", "extent": (0, SIDE, 0, SIDE), "interpolation": "bilinear"}
        image = ax.imshow(np.reshape(values, (side, side)), **extent, **scale)
        color = "k" if last else "w"
        ax.add_patch(Rectangle((west, south), east - west, north - south, fill=False, linestyle="--", edgecolor=color))
        ax.set(xlabel="east (km)", xlim=(0, SIDE), ylim=(0, SIDE), xticks=range(0, 11, 2))
        ax.set_title(title, fontsize="medium")
        if ax is not axes[0]:
            label = "sd of the log rate" if last else "log rate"
            figure.colorbar(image, ax=ax if last else axes[:2], shrink=0.95, label=label)
    axes[0].set_ylabel("north (km)")
    axes[2].plot(*X[observed].T, ".", color="w", markersize=1.2)
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


def dispersion(y: np.ndarray) -> float:
    """The concentration of a negative binomial with the mean and variance of y."""
    return y.mean() ** 2 / (y.var() - y.mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("spatial_field.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(300, 40, 20, 50, 20, arguments.output)
    else:
        main(1500, 200, 600, 1000, 60, arguments.output)
