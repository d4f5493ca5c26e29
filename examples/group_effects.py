"""Group effects and a Gaussian process: twelve sites with a common trend, in a hierarchical model.

Each site was observed in some weeks only, so its average confuses the site with the weeks. The effects of the sites are
ordinary latents, with one joint posterior with the process. The script compares them with averages, with NUTS and with
the simulated truth.

    python examples/group_effects.py [--smoke] [--output group_effects.png]
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS, SVI, Predictive, init_to_median
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax

import numpyro_sgp as sgp

SITES, WEEKS = 12, 52.0


def trend(week: np.ndarray) -> np.ndarray:
    return 1.2 * np.sin(2.0 * np.pi * week / WEEKS) + 0.5 * np.sin(2.0 * np.pi * week / 17.0)


def centred(values: np.ndarray) -> np.ndarray:
    return values - values.mean()


def simulate() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Week, dose, site and outcome of each measurement, (N,); and the sites' true effects, (12,)."""
    rng = np.random.default_rng(3)
    true = {"intercept": centred(rng.normal(scale=0.7, size=SITES)), "slope": 0.5 + rng.normal(scale=0.3, size=SITES)}
    first = rng.permutation(np.linspace(0.0, WEEKS - 20.0, SITES))
    site = np.repeat(np.arange(SITES), rng.integers(6, 40, SITES))
    week = first[site] + rng.uniform(0.0, 20.0, len(site))
    dose = rng.normal(size=len(site))
    y = trend(week) + true["intercept"][site] + true["slope"][site] * dose + 0.5 * rng.normal(size=len(site))
    return {"week": week, "dose": dose, "site": site, "y": y}, true


def rmse(estimate, truth) -> float:
    return float(np.sqrt(np.mean((np.asarray(estimate) - truth) ** 2)))


def model(week, dose, site, y=None):
    """Outcomes level + f(week) + intercept of the site + slope of the site · dose + noise."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(8.0), 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale, variance), week[:, None]))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("intercept_scale", dist.HalfNormal(1.0))
    slope_mean = numpyro.sample("slope_mean", dist.Normal(0.0, 1.0))
    slope_scale = numpyro.sample("slope_scale", dist.HalfNormal(1.0))
    with numpyro.plate("sites", SITES):
        intercept = numpyro.sample("intercept", dist.Normal(0.0, scale))
        slope = numpyro.sample("slope", dist.Normal(slope_mean, slope_scale))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", week.shape[0]):
        numpyro.sample("y", dist.Normal(level + f + intercept[site] + slope[site] * dose, noise), obs=y)


def main(num_steps: int, num_samples: int, num_mcmc: int, output: Path) -> None:
    """Fit, run NUTS on the same model, compare the effects, draw the figure."""
    numpyro.enable_x64()
    data, true = simulate()
    Z, weeks = np.linspace(0.0, WEEKS, 20)[:, None], np.linspace(0.0, WEEKS, 200)
    new = {"week": weeks, "dose": np.zeros(200), "site": np.zeros(200, int)}

    guide = sgp.AutoTSVGP(model, inducing=Z, base=partial(AutoMultivariateNormal, init_loc_fn=init_to_median))
    # Hyperparameters are drawn at each step, so natural steps are shorter than with fixed ones.
    optim = sgp.NaturalGradient(0.1, optax.adam(optax.cosine_decay_schedule(0.02, num_steps)))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_particles=4))
    result = svi.run(jax.random.key(0), num_steps, **data, progress_bar=False)
    khat = sgp.diagnostics.psis_khat(jax.random.key(1), svi, result, **data)
    print(f"bound {-np.mean(result.losses[-200:]):.1f}, Pareto k {khat:.2f}")
    draws = {"this guide": guide.sample_posterior(jax.random.key(2), result.params, **new, sample_shape=(num_samples,))}

    sparse = reparam(model, config={"f": sgp.InducingReparam(Z)})
    mcmc = MCMC(NUTS(sparse), num_warmup=num_mcmc, num_samples=num_mcmc, progress_bar=False)
    mcmc.run(jax.random.key(3), **data)
    draws["NUTS"] = mcmc.get_samples()
    f = {"this guide": draws["this guide"]["f"]}
    f["NUTS"] = Predictive(sparse, draws["NUTS"], return_sites=["f"])(jax.random.key(4), **new)["f"]

    y = data["y"]
    average = centred(np.array([y[data["site"] == j].mean() for j in range(SITES)]))
    print(f"{'averages':10s}  intercept  error {rmse(average, true['intercept']):.2f}")
    for name, values in draws.items():
        for effect in true:
            low, high = np.quantile(values[effect], [0.05, 0.95], axis=0)
            ratio = np.mean(np.std(values[effect], axis=0) / np.std(draws["NUTS"][effect], axis=0))
            held = np.sum((low <= true[effect]) & (true[effect] <= high))
            print(
                f"{name:10s}  {effect:9s}  error {rmse(np.mean(values[effect], axis=0), true[effect]):.2f}, standard "
                f"deviations {ratio:.2f} of those of NUTS, 90 % intervals hold {held} of {SITES}"
            )

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.8), layout="constrained", width_ratios=(1.4, 1, 1))
    axes[0].plot(data["week"], y, ".", color="0.7", markersize=3, label="measurements")
    low, median, high = np.quantile(f["this guide"], [0.05, 0.5, 0.95], axis=0)
    axes[0].fill_between(weeks, low, high, color="C0", alpha=0.35, linewidth=0, label="trend, 90 %")
    axes[0].plot(weeks, median, "C0")
    for j, edge in enumerate(np.quantile(f["NUTS"], [0.05, 0.95], axis=0)):
        axes[0].plot(weeks, edge, color="C1", linewidth=0.8, label="NUTS, 90 %" if j == 0 else None)
    axes[0].plot(weeks, trend(weeks), "k--", linewidth=1, label="truth")
    axes[0].set(xlabel="week", ylabel="y", xlim=(0.0, WEEKS))
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    order, rows = np.argsort(true["intercept"]), np.arange(SITES)
    for ax, effect in zip(axes[1:], true, strict=True):
        for (name, values), color, shift in zip(draws.items(), ("C0", "C1"), (0.15, -0.15), strict=True):
            low, median, high = np.quantile(values[effect], [0.05, 0.5, 0.95], axis=0)[:, order]
            error = (median - low, high - median)
            ax.errorbar(median, rows + shift, xerr=error, fmt=".", markersize=5, color=color, label=f"{name}, 90 %")
        ax.plot(true[effect][order], rows, "k|", markersize=12, markeredgewidth=1.5, label="truth")
        ax.set(xlabel=f"{effect} of the site", yticks=rows, yticklabels=[])
    axes[1].plot(average[order], rows, "x", color="C3", markersize=5, label="average")
    axes[1].set_yticklabels([f"site {j + 1}" for j in order], fontsize=8)
    entries = axes[1].get_legend_handles_labels()
    figure.legend(*entries, loc="outside upper right", ncols=4, frameon=False, fontsize=8)
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("group_effects.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 50, 10, arguments.output)
    else:
        main(3000, 2000, 500, arguments.output)
