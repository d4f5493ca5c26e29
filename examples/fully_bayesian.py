"""Fifteen counts: hyperparameters by type-II maximum likelihood, with a Gaussian posterior, and sampled by NUTS.

With few data the hyperparameters are uncertain, and bands that take them as known are too narrow. The script fits the
same model three times. Then it simulates data sets and counts how many intervals hold the truth.

    python examples/fully_bayesian.py [--smoke] [--output fully_bayesian.png]
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.diagnostics import summary
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Predictive
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax

import numpyro_sgp as sgp

numpyro.enable_x64()

X = np.sort(np.random.default_rng(1).uniform(0.0, 10.0, size=(15, 1)), axis=0)
X_new = np.linspace(0.0, 10.0, 101)[:, None]
HYPERPARAMETERS = ("lengthscale", "variance")
LEVELS = np.array([0.5, 0.8, 0.9, 0.95])


def model(X, y=None):
    """Hyperparameters with priors."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.7))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.7))
    counts(X, y, lengthscale, variance)


def type_two(X, y=None):
    """Hyperparameters that maximise the marginal likelihood, or its bound."""
    lengthscale = numpyro.param("lengthscale", 1.6, constraint=dist.constraints.positive)
    variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
    counts(X, y, lengthscale, variance)


def counts(X, y, lengthscale, variance):
    """Counts y ~ Poisson(exp(f(x))); the constant kernel is an unknown level."""
    kernel = sgp.kernels.Matern52(lengthscale, variance) + sgp.kernels.Constant(0.5)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, mean=1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def fitter(model, num_steps: int, num_samples: int):
    """A compiled function from counts to draws of f(X_new) and of the hyperparameters."""
    # N is small: a dense posterior, one site for each count, and no inducing inputs.
    guide = sgp.AutoTSVGP(model, inducing=None, base=AutoMultivariateNormal)
    optim = sgp.NaturalGradient(0.5, optax.adam(optax.cosine_decay_schedule(0.03, num_steps)))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_particles=4))
    svi.init(jax.random.key(0), X, np.ones(len(X)))  # once outside of `jit`, so that the guide knows the model

    @jax.jit
    def fit(y):
        result = svi.run(jax.random.key(0), num_steps, X, y, progress_bar=False)
        draws = guide.sample_posterior(jax.random.key(1), result.params, X_new, sample_shape=(num_samples,))
        return {name: draws.get(name, result.params.get(name)) for name in (*HYPERPARAMETERS, "f")}

    return fit


def nuts(y, num_warmup: int, num_samples: int) -> dict[str, jax.Array]:
    """The same draws from the exact posterior."""
    # Inducing inputs at the data: the exact model, whitened.
    whitened = handlers.reparam(model, config={"f": sgp.InducingReparam(X)})
    options = {"num_chains": 2, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(NUTS(whitened), num_warmup=num_warmup, num_samples=num_samples, **options)
    mcmc.run(jax.random.key(2), X, y)
    samples = {name: mcmc.get_samples()[name] for name in (*HYPERPARAMETERS, "f_whitened")}
    table = summary({name: mcmc.get_samples(group_by_chain=True)[name] for name in HYPERPARAMETERS})
    print(f"NUTS: largest R-hat {max(site['r_hat'] for site in table.values()):.3f}")
    # Elsewhere f has a variance of its own given its values at the data.
    elsewhere = handlers.reparam(model, config={"f": sgp.InducingReparam(X, conditional="independent")})
    f = Predictive(elsewhere, samples, return_sites=["f"])(jax.random.key(3), X_new)["f"]
    return {**samples, "f": f}


def coverage(fit, num_sets: int) -> np.ndarray:
    """Shares of true f(X_new) inside central intervals of each level, (num_sets, levels), for simulated data sets."""
    simulate = Predictive(model, num_samples=num_sets)
    both = np.concatenate([X, X_new])
    simulated = simulate(jax.random.key(4), both)
    shares = []
    for y, f in zip(simulated["y"][:, : len(X)], simulated["f"][:, len(X) :], strict=True):
        below = np.mean(np.asarray(fit(y)["f"]) < np.asarray(f), axis=0)
        shares.append([np.mean(np.abs(below - 0.5) < 0.5 * level) for level in LEVELS])
    return np.array(shares)


def main(num_steps: int, num_samples: int, num_warmup: int, num_sets: int, output: Path) -> None:
    """Fit three times, count intervals, draw the figure."""
    y = np.random.default_rng(3).poisson(np.exp(1.0 + np.sin(X[:, 0])))
    fits = {
        "type II": fitter(type_two, num_steps, num_samples),
        "Gaussian posterior": fitter(model, num_steps, num_samples),
    }
    draws = {name: fit(y) for name, fit in fits.items()} | {"NUTS": nuts(y, num_warmup, num_samples)}
    for name, values in draws.items():
        parameters = ", ".join(
            f"{site} {values[site].mean():.2f} ± {values[site].std():.2f}" for site in HYPERPARAMETERS
        )
        print(f"{name:18s} {parameters}, average sd of f {values['f'].std(axis=0).mean():.3f}")
    shares = {name: coverage(fit, num_sets) for name, fit in fits.items()}
    for name, values in shares.items():
        error = values.std(axis=0) / np.sqrt(num_sets)
        text = ", ".join(
            f"{level:.0%}: {m:.1%} ± {e:.1%}" for level, m, e in zip(LEVELS, values.mean(axis=0), error, strict=True)
        )
        print(f"{name:18s} intervals of f hold {text}")

    colors = {"NUTS": "0.55", "Gaussian posterior": "C0", "type II": "C3"}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained", width_ratios=(1.6, 1, 1))
    for name, color in colors.items():
        low, high = np.quantile(np.exp(draws[name]["f"]), [0.05, 0.95], axis=0)
        if name == "NUTS":
            left.fill_between(X_new[:, 0], low, high, color=color, alpha=0.4, linewidth=0, label=name)
            middle.plot(draws[name]["lengthscale"], draws[name]["variance"], ".", color=color, markersize=3, alpha=0.4)
            continue
        left.plot(X_new[:, 0], low, color=color, label=name)
        left.plot(X_new[:, 0], high, color=color)
        point = {"markersize": 9, "marker": "X"}
        options = point if name == "type II" else {"markersize": 3, "marker": ".", "alpha": 0.4}
        middle.plot(draws[name]["lengthscale"], draws[name]["variance"], color=color, linestyle="", **options)
        right.plot(LEVELS, shares[name].mean(axis=0), "o-", color=color, markersize=4)
    left.plot(X[:, 0], y, "k.", label="counts")
    left.set(xlabel="x", ylabel="counts, rate with 90 % band", ylim=(-0.6, 1.2 * left.get_ylim()[1]))
    left.legend(frameon=False, fontsize="small", ncols=2, loc="upper left")
    middle.set(xscale="log", yscale="log", xlabel="lengthscale", ylabel="variance", title="hyperparameters")
    middle.minorticks_off()
    middle.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    middle.set_yticks([0.1, 0.5, 1, 2, 4], ["0.1", "0.5", "1", "2", "4"])
    right.plot([0.45, 1.0], [0.45, 1.0], color="0.6", linewidth=0.8, linestyle="--")
    right.set(xlabel="level of an interval", ylabel="share that holds f", title=f"{num_sets} data sets")
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("fully_bayesian.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 50, 20, 2, arguments.output)
    else:
        main(1000, 1000, 500, 60, arguments.output)
