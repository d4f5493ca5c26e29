"""Counts over areas: 45 districts of different size, and the relative risk at each place.

Each district has a count of cases, the count that its population would lead one to expect, and a covariate. The log
relative risk of a district is the average of a Gaussian process over its people: `WeightedSum`. The script compares the
posterior with NUTS on the dense model, and a map of single places with the simulated truth.

    python examples/area_counts.py [--smoke] [--output area_counts.png]
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.diagnostics import summary
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS, SVI, init_to_median
from numpyro.infer.reparam import Reparam
import optax

import numpyro_sgp as sgp
from numpyro_sgp.functionals import WeightedSum

CELLS, SIDE, DISTRICTS = 20, 20.0, 45  # cells of 1 km², and the side of the map in km
TRUTH = {"intercept": 0.1, "slope": 0.3}
LENGTHSCALE = 4.0  # in km; fixed, so that long chains of the dense model are quick


class Districts(NamedTuple):
    """The map: places of the cells, (400, 2); the district of each; shares of its people, (45, 400)."""

    cells: np.ndarray
    district: np.ndarray
    shares: np.ndarray

    def areas(self) -> WeightedSum:
        """Averages over the people of each district; a small one repeats a cell with weight zero."""
        own = [np.flatnonzero(self.district == r) for r in range(DISTRICTS)]
        index = np.stack([np.resize(cells, max(map(len, own))) for cells in own])
        first = np.arange(index.shape[1]) < np.array([len(cells) for cells in own])[:, None]
        return WeightedSum(self.cells[index], np.where(first, np.take_along_axis(self.shares, index, axis=1), 0.0))


def log_risk(X: np.ndarray) -> np.ndarray:
    """The simulated log relative risk at places X: higher along a river, and around a factory."""
    river = np.exp(-0.5 * ((X[..., 1] - 6.0 - 3.0 * np.sin(X[..., 0] / 4.0)) / 2.5) ** 2)
    factory = np.exp(-0.5 * np.sum((X - np.array([14.0, 14.5])) ** 2, axis=-1) / 3.0**2)
    return 0.8 * river + 1.1 * factory - 0.5


def simulate() -> tuple[Districts, dict[str, np.ndarray]]:
    """Districts are small where many people live. Expected counts are 7 to 71."""
    rng = np.random.default_rng(2)
    ticks = (np.arange(CELLS) + 0.5) * SIDE / CELLS
    cells = np.stack(np.meshgrid(ticks, ticks), axis=-1).reshape(-1, 2)
    towns = np.array([[5.0, 5.0], [15.0, 7.0], [10.0, 15.0]])
    people = 0.15 + np.exp(-0.5 * ((cells[:, None] - towns) ** 2).sum(-1) / 3.0**2).sum(-1)
    people *= rng.gamma(10.0, 0.1, len(cells))
    centres = cells[rng.choice(len(cells), DISTRICTS, replace=False, p=people / people.sum())]
    district = np.argmin(((cells[:, None] - centres) ** 2).sum(-1), axis=1)
    shares = people * (district == np.arange(DISTRICTS)[:, None])
    expected = 1500.0 * shares.sum(1) / people.sum()
    shares = shares / shares.sum(1, keepdims=True)
    deprivation = shares @ (0.1 * (cells[:, 0] - 10.0)) + 0.7 * rng.normal(size=DISTRICTS)
    mean = np.exp(TRUTH["intercept"] + TRUTH["slope"] * deprivation + shares @ log_risk(cells))
    y = rng.poisson(expected * mean)
    return Districts(cells, district, shares), {"expected": expected, "deprivation": deprivation, "y": y}


def model(areas, expected, deprivation, y=None):
    """Counts with the mean expected · exp(intercept + slope · deprivation + average of f)."""
    variance = numpyro.sample("variance", dist.LogNormal(np.log(0.3), 0.5))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(LENGTHSCALE, variance), areas))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("districts", areas.shape[0]):
        numpyro.sample("y", dist.Poisson(expected * jnp.exp(intercept + slope * deprivation + f)), obs=y)


class Dense(Reparam):
    """f = σ_f L v, L Lᵀ = W K Wᵀ over all cells: the exact prior in a form that NUTS samples well."""

    def __init__(self, places: Districts) -> None:
        self.cells, self.W = places.cells, places.shares
        K = np.asarray(sgp.kernels.Matern52(LENGTHSCALE)(self.cells, self.cells))
        self.cross, self.L = self.W @ K, np.linalg.cholesky(self.W @ K @ self.W.T)

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[None, Any]:  # noqa: ARG002 - what NumPyro calls it with
        v = numpyro.sample(f"{name}_v", dist.Normal().expand(fn.event_shape).to_event(1))
        return None, jnp.sqrt(fn.kernel.variance) * (self.L @ v)

    def at_cells(self, f: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """Draws of f at the cells, each independent of the others, given draws of the averages, (S, 45)."""
        A = np.linalg.solve(self.L, self.cross)
        mean = f @ np.linalg.solve(self.L.T, A)
        noise = np.random.default_rng(0).normal(size=mean.shape)
        return mean + np.sqrt(variance[:, None] * np.maximum(1.0 - (A**2).sum(0), 0.0)) * noise


def compared(values: np.ndarray, exact: np.ndarray) -> str:
    error = np.abs(values.mean(0) - exact.mean(0)) / exact.std(0)
    ratio = values.std(0) / exact.std(0)
    return (
        f"means within {np.max(error):.2f} sd of those of NUTS, sds {np.min(ratio):.2f} to {np.max(ratio):.2f} of them"
    )


def by_nuts(dense: Dense, areas: WeightedSum, data: dict[str, np.ndarray], num_mcmc: int) -> dict[str, Any]:
    """Draws of four chains of the dense model."""
    kernel = NUTS(reparam(model, config={"f": dense}), init_strategy=init_to_median)
    options = {"num_warmup": num_mcmc // 2, "num_samples": num_mcmc, "num_chains": 4, "chain_method": "sequential"}
    mcmc = MCMC(kernel, **options, progress_bar=False)
    mcmc.run(jax.random.key(3), areas, **data)
    found = summary(mcmc.get_samples(group_by_chain=True)).values()
    print(
        f"NUTS: R-hat at most {max(np.max(each['r_hat']) for each in found):.3f}, effective sample sizes at least "
        f"{min(np.min(each['n_eff']) for each in found):.0f}"
    )
    return {name: np.asarray(value) for name, value in mcmc.get_samples().items()}


def main(num_steps: int, num_samples: int, num_mcmc: int, output: Path) -> None:
    """Fit, predict at all cells, run NUTS on the dense model, draw the maps."""
    numpyro.enable_x64()
    places, data = simulate()
    areas, X = places.areas(), places.cells
    truth = TRUTH["intercept"] + log_risk(X)

    inducing = sgp.kmeans(None, X, num_inducing=100)
    guide = sgp.AutoTSVGP(model, inducing)
    # The variance is drawn at each step, so natural steps are shorter than with a fixed one.
    optim = sgp.NaturalGradient(0.1, optax.adam(optax.cosine_decay_schedule(0.02, num_steps)))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_particles=4))
    result = svi.run(jax.random.key(0), num_steps, areas, **data, progress_bar=False)
    print(f"{DISTRICTS} districts, {data['y'].sum()} cases; bound {-np.mean(result.losses[-num_steps // 5 :]):.1f}")
    # The same model with points in the place of areas. Draws are joint, so that averages of them are right, too.
    arguments = X, np.ones(len(X)), np.zeros(len(X))
    draws = guide.sample_posterior(jax.random.key(1), result.params, *arguments, sample_shape=(num_samples,))
    draws = {name: np.asarray(value) for name, value in draws.items()}
    fine = {"this guide": draws["intercept"][:, None] + draws["f"]}
    draws["f"] = draws["f"] @ places.shares.T

    dense = Dense(places)
    exact = by_nuts(dense, areas, data, num_mcmc)
    fine["NUTS"] = exact["intercept"][:, None] + dense.at_cells(exact["f"], exact["variance"])
    for name in ("intercept", "slope", "variance", "f"):
        print(f"{name:11s} {compared(draws[name], exact[name])}")
    print(f"{'map':11s} {compared(fine['this guide'], fine['NUTS'])}")
    low, high = np.quantile(fine["this guide"], [0.05, 0.95], axis=0)
    by_cell = np.log((data["y"] + 0.5) / data["expected"])[places.district]
    print(
        f"error at the cells {rmse(fine['this guide'].mean(0), truth):.2f}, of NUTS "
        f"{rmse(fine['NUTS'].mean(0), truth):.2f}, of the counts themselves {rmse(by_cell, truth):.2f}; "
        f"90 % intervals hold {np.mean((low <= truth) & (truth <= high)):.0%}"
    )
    draw(places, by_cell, truth, fine, draws, exact, output)


def rmse(estimate: np.ndarray, truth: np.ndarray) -> float:
    return float(np.sqrt(np.mean((estimate - truth) ** 2)))


def draw(places, by_cell, truth, fine, draws, exact, output: Path) -> None:
    """Maps of counts, truth, posterior and its standard deviation; intercept and slope beside NUTS."""
    figure, axes = plt.subplots(2, 3, figsize=(10, 6.2), layout="constrained")
    mean, sd = fine["this guide"].mean(0), fine["this guide"].std(0)
    maps = {
        "counts over expected counts": by_cell,
        "simulated risk": truth,
        "posterior mean": mean,
        "posterior standard deviation": sd,
    }
    borders = places.district.reshape(CELLS, CELLS)
    for ax, (title, values) in zip(axes.flat, maps.items(), strict=False):
        scale = {"cmap": "magma", "vmin": 0.0} if values is sd else {"cmap": "RdBu_r", "vmin": -1.3, "vmax": 1.3}
        pixels = np.reshape(values, (CELLS, CELLS))
        image = ax.imshow(pixels, origin="lower", extent=(0, SIDE, 0, SIDE), **scale)
        for axis in (0, 1):
            for i, j in np.argwhere(np.diff(borders, axis=axis)):
                line = ([j, j + 1], [i + 1, i + 1]) if axis == 0 else ([j + 1, j + 1], [i, i + 1])
                ax.plot(*line, color="w" if values is sd else "k", linewidth=0.5)
        ax.set(xlim=(0, SIDE), ylim=(0, SIDE), xticks=range(0, 21, 5), yticks=range(0, 21, 5))
        ax.set_title(title, fontsize="medium")
        if values is mean:
            figure.colorbar(image, ax=axes[0], shrink=0.9, label="log relative risk")
        elif values is sd:
            figure.colorbar(image, ax=ax, shrink=0.9, label="sd of the log risk", location="bottom")
    for latent, value in TRUTH.items():
        for name, values, color in (("this guide", draws, "C0"), ("NUTS", exact, "C1")):
            options = {"bins": 60, "density": True, "histtype": "step", "color": color}
            axes[1, 1].hist(np.asarray(values[latent]), **options, label=name if latent == "slope" else None)
        axes[1, 1].axvline(value, color="k", linewidth=0.8, label="simulated" if latent == "slope" else None)
    axes[1, 1].text(-0.2, 2.2, "intercept", ha="right", fontsize=8)
    axes[1, 1].text(0.5, 2.2, "slope", fontsize=8)
    axes[1, 1].set(xlim=(-0.8, 1.5), yticks=[], title="intercept and slope")
    axes[1, 1].legend(frameon=False, fontsize=8)
    axes[1, 2].plot(fine["NUTS"].mean(0), mean, ".", markersize=2, label="mean")
    axes[1, 2].plot(fine["NUTS"].std(0), sd, ".", markersize=2, label="standard deviation")
    axes[1, 2].axline((0, 0), slope=1, color="k", linewidth=0.8)
    axes[1, 2].set(xlabel="NUTS", ylabel="this guide", title="log risk at the cells")
    axes[1, 2].legend(frameon=False, fontsize=8)
    for ax in axes[1, 1:]:
        ax.title.set_fontsize("medium")
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("area_counts.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 20, 10, arguments.output)
    else:
        main(1000, 2000, 2000, arguments.output)
