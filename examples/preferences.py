"""Preferences: the utility of 60 drinks, from comparisons of two and from choices among four.

A drink has two features, and its utility is a Gaussian process of them. A comparison depends on a difference of two
utilities. It is written in the model, and then as a functional; both have the same bound. A choice among four depends
on four utilities at once, by a softmax. The script compares all with NUTS and with the simulated truth.

    python examples/preferences.py [--smoke] [--output preferences.png]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
import textwrap
from typing import Any
import warnings

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
from numpyro_sgp.functionals import Difference

DRINKS, PAIRS, SETS, OPTIONS = 60, 400, 200, 4
LENGTHSCALE = 0.25  # fixed, so that long chains of the dense model are quick


def utility(X: np.ndarray) -> np.ndarray:
    """The simulated utility of sweetness and strength, each from 0 to 1: two tastes, one more common."""
    first = np.exp(-0.5 * ((X - np.array([0.3, 0.7])) ** 2).sum(-1) / 0.2**2)
    second = np.exp(-0.5 * ((X - np.array([0.8, 0.3])) ** 2).sum(-1) / 0.15**2)
    return 3.0 * first + 2.0 * second


def simulate() -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Drinks, (60, 2); comparisons of two; choices among four."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(DRINKS, 2))

    def chosen(sets: np.ndarray) -> np.ndarray:
        return np.argmax(utility(X)[sets] + rng.gumbel(size=sets.shape), axis=1)

    pairs = np.stack([rng.choice(DRINKS, 2, replace=False) for _ in range(PAIRS)])
    sets = np.stack([rng.choice(DRINKS, OPTIONS, replace=False) for _ in range(SETS)])
    won = (chosen(pairs) == 0).astype(float)
    return X, {"first": pairs[:, 0], "second": pairs[:, 1], "won": won}, {"sets": sets, "choice": chosen(sets)}


def gaussian_process(inputs: Any) -> Any:
    variance = numpyro.sample("variance", dist.LogNormal(np.log(2.0), 0.5))
    return numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(LENGTHSCALE, variance), inputs))


def comparisons(X, first, second, won=None):
    """Which of two drinks is preferred."""
    f = gaussian_process(X)
    with numpyro.plate("pairs", len(first)):
        numpyro.sample("won", dist.Bernoulli(logits=f[first] - f[second]), obs=won)


def comparisons_as_rows(pairs, won=None):
    """The same, with a difference in the place of each input."""
    f = gaussian_process(pairs)
    with numpyro.plate("pairs", len(pairs)):
        numpyro.sample("won", dist.Bernoulli(logits=f), obs=won)


def choices(X, sets, choice=None):
    """Which of four drinks is chosen."""
    f = gaussian_process(X)
    with numpyro.plate("sets", len(sets)):
        numpyro.sample("choice", dist.Categorical(logits=f[sets]), obs=choice)


def fit(model: Callable, Z: np.ndarray, num_steps: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A guide and its parameters; what the package says about the model is printed."""
    guide = sgp.AutoTSVGP(model, Z)
    # The variance is drawn at each step, so natural steps are shorter than with a fixed one.
    optim = sgp.NaturalGradient(0.1, optax.adam(optax.cosine_decay_schedule(0.02, num_steps)))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_particles=4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = svi.run(jax.random.key(0), num_steps, *args, **kwargs, progress_bar=False)
    last = result.losses[-num_steps // 5 :]
    print(f"{model.__name__}: bound {-np.mean(last):.1f}, from step to step ± {np.std(last):.1f}")
    for warning in caught:
        print(textwrap.fill(f"warning: {warning.message}", 100, initial_indent="  ", subsequent_indent="    "))
    return guide, result.params


class Dense(Reparam):
    """f = σ_f L v, L Lᵀ = K: the exact prior in a form that NUTS samples well."""

    def __init__(self, X: np.ndarray) -> None:
        K = np.asarray(sgp.kernels.SquaredExponential(LENGTHSCALE)(X, X))
        self.L = np.linalg.cholesky(K + 1e-8 * np.eye(len(X)))

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[None, Any]:  # noqa: ARG002 - what NumPyro calls it with
        v = numpyro.sample(f"{name}_v", dist.Normal().expand(fn.event_shape).to_event(1))
        return None, jnp.sqrt(fn.kernel.variance) * (self.L @ v)


def by_nuts(model: Callable, X: np.ndarray, num_mcmc: int, **data: np.ndarray) -> dict[str, Any]:
    """Draws of four chains of the dense model."""
    kernel = NUTS(reparam(model, config={"f": Dense(X)}), init_strategy=init_to_median)
    options = {"num_warmup": num_mcmc // 2, "num_samples": num_mcmc, "num_chains": 4, "chain_method": "sequential"}
    mcmc = MCMC(kernel, **options, progress_bar=False)
    mcmc.run(jax.random.key(3), X, **data)
    found = summary(mcmc.get_samples(group_by_chain=True)).values()
    print(
        f"  NUTS: R-hat at most {max(np.max(each['r_hat']) for each in found):.3f}, effective sample sizes at least "
        f"{min(np.min(each['n_eff']) for each in found):.0f}"
    )
    return mcmc.get_samples()


def centred(values: Any) -> np.ndarray:
    """Choices do not depend on the level of the utilities."""
    values = np.asarray(values)
    return values - values.mean(axis=-1, keepdims=True)


def compared(values: np.ndarray, exact: np.ndarray) -> str:
    error = np.abs(values.mean(0) - exact.mean(0)) / exact.std(0)
    ratio = values.std(0) / exact.std(0)
    return (
        f"means within {np.max(error):.2f} sd of those of NUTS, sds {np.min(ratio):.2f} to {np.max(ratio):.2f} of them"
    )


def main(num_steps: int, num_samples: int, num_mcmc: int, side: int, output: Path) -> None:
    """Fit the three models, run NUTS on two of them, compare, draw the figure."""
    numpyro.enable_x64()
    X, pairs, sets = simulate()
    Z = np.asarray(sgp.kmeans(None, X, num_inducing=40))
    ticks = (np.arange(side) + 0.5) / side
    grid = np.stack(np.meshgrid(ticks, ticks), axis=-1).reshape(-1, 2)
    truth = centred(utility(X))

    fitted = {}
    for model, data in ((comparisons, pairs), (choices, sets)):
        guide, params = fit(model, Z, num_steps, X, **data)
        nothing = [None] * (len(data) - 1)  # `guide.posterior` does not look at the terms
        f = guide.posterior(jax.random.key(1), params, grid, *nothing)["f"]
        draws = guide.sample_posterior(jax.random.key(2), params, X, **data, sample_shape=(num_samples,))
        exact = by_nuts(model, X, num_mcmc, **data)
        values, of_nuts = centred(draws["f"]), centred(exact["f"])
        print(f"  utilities    {compared(values, of_nuts)}")
        print(f"  variance     {compared(np.asarray(draws['variance']), np.asarray(exact['variance']))}")
        low, high = np.quantile(values, [0.05, 0.95], axis=0)
        print(
            f"  error {np.sqrt(np.mean((values.mean(0) - truth) ** 2)):.2f}, of NUTS "
            f"{np.sqrt(np.mean((of_nuts.mean(0) - truth) ** 2)):.2f}; 90 % intervals hold "
            f"{np.sum((low <= truth) & (truth <= high))} of {DRINKS}"
        )
        fitted[model] = guide, params, np.asarray(f.mean), values, of_nuts

    guide, params, *_ = fitted[comparisons]
    rows = Difference(X[pairs["first"]], X[pairs["second"]])
    other, _ = fit(comparisons_as_rows, Z, num_steps, rows, won=pairs["won"])
    loss, key = sgp.QuadratureELBO(), jax.random.key(4)
    by_index = -loss.loss(key, params, comparisons, guide, X, **pairs)
    by_rows = -loss.loss(key, params, comparisons_as_rows, other, rows, pairs["won"])
    print(f"bounds at the same parameters: {by_index:.6f} and {by_rows:.6f}")
    draw(X, truth, grid, fitted, output)


def draw(X, truth, grid, fitted, output: Path) -> None:
    """Maps of utility over both features; utilities of the drinks by this guide, by NUTS and as simulated."""
    side = round(np.sqrt(len(grid)))
    figure = plt.figure(figsize=(10, 6.2), layout="constrained")
    *axes, intervals = figure.subplot_mosaic("ABC;DDD", height_ratios=(1.2, 1)).values()
    maps = {"simulated": utility(grid)}
    maps |= {
        f"from {len_} {model.__name__}": fitted[model][2] for model, len_ in ((comparisons, PAIRS), (choices, SETS))
    }
    for ax, (title, values) in zip(axes, maps.items(), strict=False):
        pixels = np.reshape(centred(values), (side, side))
        image = ax.imshow(pixels, origin="lower", extent=(0, 1, 0, 1), vmin=-1.2, vmax=2.8)
        ax.plot(*X.T, ".", color="w", markersize=3)
        ax.set(xlabel="sweetness", title=title, xlim=(0, 1), ylim=(0, 1))
        ax.title.set_fontsize("medium")
    axes[0].set_ylabel("strength")
    figure.colorbar(image, ax=axes, shrink=0.9, label="utility, centred")
    order, places = np.argsort(truth), np.arange(len(truth))
    _, _, _, values, exact = fitted[choices]
    for name, each, color, shift in (("this guide", values, "C0", -0.2), ("NUTS", exact, "C1", 0.2)):
        low, median, high = np.quantile(each, [0.05, 0.5, 0.95], axis=0)[:, order]
        error = (median - low, high - median)
        intervals.errorbar(places + shift, median, yerr=error, fmt=".", color=color, label=name)
    intervals.plot(places, truth[order], "k_", markersize=9, label="simulated")
    intervals.set(xlabel="drink, in order of utility", ylabel="utility, centred", xlim=(-1, len(places)))
    intervals.set_title("90 % intervals, from choices", fontsize="medium")
    intervals.legend(frameon=False, fontsize=8)
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("preferences.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(20, 50, 10, 10, arguments.output)
    else:
        main(600, 4000, 1000, 40, arguments.output)
