"""Coal-mining disasters again: NUTS over 30 inducing variables against SVI with a t-SVGP guide.

One model, written once. `InducingReparam` gives NUTS a few standard normal variables instead of 333 correlated ones.
The guide gives SVI a Gaussian over the same variables. The remaining difference is mostly the error of that Gaussian.

    python examples/nuts_inducing.py [--smoke] [--output nuts_inducing.png]
"""

import argparse
from pathlib import Path
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Predictive
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax

import numpyro_sgp as sgp

numpyro.enable_x64()

NUM_BINS = 333
NAMES = ("lengthscale", "variance")


def counts_in_bins() -> tuple[np.ndarray, np.ndarray, float]:
    """Middle of each bin, number of disasters in it, and its width in years."""
    times = np.loadtxt(Path(__file__).parent / "data" / "coal.csv", skiprows=3)
    counts, edges = np.histogram(times, bins=NUM_BINS)
    return (0.5 * (edges[:-1] + edges[1:]))[:, None], counts, edges[1] - edges[0]


def model(X, y=None, width=1.0):
    """Counts y ~ Poisson(width · rate), with a Gaussian process for the logarithm of the rate in a year."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(20.0), 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    # The overall level is a part of f, by the constant kernel.
    kernel = sgp.kernels.Matern52(lengthscale, variance) + sgp.kernels.Constant(1.0)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    rate = numpyro.deterministic("rate", jnp.exp(f))
    with numpyro.plate("bins", X.shape[0]):
        numpyro.sample("y", dist.Poisson(width * rate), obs=y)


def by_nuts(X, y, width, Z, num_warmup: int, num_samples: int):
    """Draws, and seconds with compilation."""
    start = time.perf_counter()
    sparse = handlers.reparam(model, config={"f": sgp.InducingReparam(Z)})
    kernel = NUTS(sparse, target_accept_prob=0.9)
    options = {"num_chains": 2, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **options)
    mcmc.run(jax.random.key(0), X, y, width, extra_fields=("diverging", "num_steps"))
    samples = jax.block_until_ready(mcmc.get_samples())
    seconds = time.perf_counter() - start
    table = numpyro.diagnostics.summary({n: mcmc.get_samples(True)[n] for n in (*NAMES, "f_whitened")})
    worst = max(float(np.max(site["r_hat"])) for site in table.values())
    fewest = min(float(np.min(site["n_eff"])) for site in table.values())
    fields = mcmc.get_extra_fields()
    print(
        f"NUTS: {len(samples['variance'])} draws in {seconds:.1f} s, {fields['num_steps'].mean():.0f} steps for each, "
        f"{fields['diverging'].sum()} divergent; largest R-hat {worst:.3f}, fewest effective draws {fewest:.0f}"
    )
    return {name: samples[name] for name in (*NAMES, "f_whitened")}, sparse


def by_svi(X, y, width, Z, num_steps: int):
    """The guide with its parameters, and seconds with compilation."""
    start = time.perf_counter()
    guide = sgp.AutoTSVGP(model, inducing=Z, base=AutoMultivariateNormal)
    optim = sgp.NaturalGradient(0.3, others=optax.adam(optax.cosine_decay_schedule(5e-2, num_steps)))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_particles=4))
    result = jax.block_until_ready(svi.run(jax.random.key(0), num_steps, X, y, width, progress_bar=False))
    seconds = time.perf_counter() - start
    khat = sgp.diagnostics.psis_khat(jax.random.key(1), svi, result, X, y, width)
    print(f"SVI: {num_steps} steps in {seconds:.1f} s; Pareto k of its importance ratios {khat:.2f}")
    return guide, result.params


def main(num_warmup: int, num_samples: int, num_steps: int, output: Path) -> None:
    """Sample, fit, compare, draw the figure."""
    X, y, width = counts_in_bins()
    Z = np.linspace(X.min(), X.max(), 30)[:, None]
    samples, sparse = by_nuts(X, y, width, Z, num_warmup, num_samples)
    guide, params = by_svi(X, y, width, Z, num_steps)

    X_new = np.linspace(X.min(), X.max(), 200)[:, None]
    rate = Predictive(sparse, samples, return_sites=["rate"])(jax.random.key(2), X_new)["rate"]
    fitted = guide.sample_posterior(jax.random.key(3), params, X_new, sample_shape=(2 * num_samples,))
    draws = {"NUTS": {**samples, "rate": rate}, "SVI": fitted}
    for name, values in draws.items():
        moments = ", ".join(f"{site} {values[site].mean():.2f} ± {values[site].std():.2f}" for site in NAMES)
        print(f"{name:4s} {moments}")
    bands = {name: np.quantile(values["rate"], [0.05, 0.5, 0.95], axis=0) for name, values in draws.items()}
    gap = np.abs(bands["SVI"] - bands["NUTS"]).max(axis=1) / bands["NUTS"].mean()
    print("largest gap of 5 %, 50 %, 95 % quantiles, over the average rate:", ", ".join(f"{g:.1%}" for g in gap))

    figure = plt.figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.5, 1.0))
    ax = left.subplots()
    ax.fill_between(X_new[:, 0], bands["NUTS"][0], bands["NUTS"][2], color="0.55", alpha=0.4, linewidth=0)
    ax.plot(X_new[:, 0], bands["NUTS"][1], color="0.4", label="NUTS, median and 90 % band")
    for quantile, style in zip(bands["SVI"], ("--", "-", "--"), strict=True):
        ax.plot(
            X_new[:, 0], quantile, style, color="C0", linewidth=1.2, label="SVI, the same" if style == "-" else None
        )
    times = np.repeat(X[:, 0], y)
    ax.plot(times, np.full(len(times), -0.15), "|k", markersize=5, alpha=0.5, clip_on=False, label="disasters")
    ax.set(xlabel="year", ylabel="disasters per year", xlim=(X.min(), X.max()), ylim=(-0.3, None))
    ax.legend(frameon=False)
    labels = ("lengthscale (years)", "variance of log rate")
    for ax, name, label in zip(right.subplots(2, 1), NAMES, labels, strict=True):
        high = np.quantile(np.concatenate([values[name] for values in draws.values()]), 0.995)
        low = min(float(values[name].min()) for values in draws.values())
        bins = np.linspace(low, high, 41)
        ax.hist(np.asarray(draws["NUTS"][name]), bins, density=True, color="0.55", alpha=0.4)
        ax.hist(np.asarray(draws["SVI"][name]), bins, density=True, color="C0", histtype="step", linewidth=1.2)
        ax.set(xlabel=label, ylabel="density", yticks=[], xlim=(low, high))
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("nuts_inducing.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 20, 20, arguments.output)
    else:
        main(500, 500, 2000, arguments.output)
