"""Hyperparameters from batches of ten: how far each method ends from the maximum of the evidence.

500 rows, twenty features (random waves with trained lengthscales and variance), a trained noise; every method takes
the same number of steps on batches of ten, each row once in an epoch, with Adam at a rate that falls to zero along a
cosine, from the same start. What is shown is −2 log p(y) at the hyperparameters it ends at, less its minimum, found by
L-BFGS on all rows: for three seeds of the batches, at the rate of three that was best for another seed. `--long` takes
four times as many steps: what then remains is bias.

    python benchmarks/finite_rank_toy.py [--reduced] [--long] [--output results] [--figure finite_rank_toy.png]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
import time
import warnings

from common import report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
import optax
from scipy.optimize import minimize

import numpyro_sgp as sgp
from numpyro_sgp.math.marginal_likelihood import log_evidence

N, D, RANK, BATCH = 500, 3, 20, 10
RATES = [0.03, 0.01, 0.003]
START = {"lengthscale": np.full(D, 2.0), "variance": np.array(0.3), "noise": np.array(1.0)}


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, outputs, and the frequencies of the features."""
    rng = np.random.default_rng(0)
    X, omega = rng.uniform(-1.5, 1.5, size=(N, D)), rng.normal(size=(D, RANK // 2))
    truth = features({"lengthscale": np.array([0.7, 1.0, 1.6])}, omega, X)
    return X, np.asarray(truth @ rng.normal(size=RANK)) + 0.2 * rng.normal(size=N), omega


def features(params, omega, X):
    """Cosines and sines at trained lengthscales."""
    phase = X / params["lengthscale"] @ omega
    return jnp.sqrt(2.0 / RANK) * jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], axis=-1)


def make_model(omega):
    """Regression with a kernel of rank twenty."""

    def model(X, y):
        theta = {
            name: numpyro.param(name, jnp.asarray(value), constraint=dist.constraints.positive)
            for name, value in START.items()
        }
        kernel = sgp.features.FeatureMap(
            lambda p, X: features(p, omega, X), {"lengthscale": theta["lengthscale"]}, theta["variance"]
        )
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", N, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, theta["noise"]), obs=y)

    return model


def exact(omega, X, y) -> Callable:
    """−2 log p(y) as a function of the logarithms of all hyperparameters, in the order of `START`."""

    def value(log):
        lengthscale, variance, noise = jnp.exp(log[:D]), jnp.exp(log[D]), jnp.exp(log[D + 1])
        A = jnp.sqrt(variance) * features({"lengthscale": lengthscale}, omega, X).T
        return -2.0 * log_evidence(A, jnp.asarray(y), noise**2)

    return value


def methods(steps: int, rate: float) -> dict[str, tuple]:
    """Parametrisation of the guide, its options, optimizer and loss, by name."""
    adam = optax.adam(optax.cosine_decay_schedule(rate, steps))
    averaged = sgp.CompositionalMarginalLikelihood
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is the comparison with what is warned of
        printed = sgp.MinimaxMarginalLikelihood("printed")
    scale = {"root_scale": 50.0}
    natural = sgp.NaturalGradient(lambda t: 0.5 * (1.0 + t) ** -0.5, adam)
    ascent = optax.sgd(optax.cosine_decay_schedule(0.003, steps))
    players = sgp.DescentAscent(adam, ascent)
    elbo = sgp.QuadratureELBO(num_nodes=3)
    return {
        "batch evidence (BSGD)": ("natural", {}, adam, sgp.BatchMarginalLikelihood()),
        "compositional, b = 0.9 as printed": ("averaged", {}, adam, averaged(0.9)),
        "compositional, b = 0.1": ("averaged", {}, adam, averaged(0.1)),
        "compositional, b = t^-1/2": ("averaged", {}, adam, averaged(lambda t: (1.0 + t) ** -0.5)),
        "minimax as printed, mu = 1": ("adversarial", scale, players, printed),
        "minimax, whitened": ("adversarial", scale, players, sgp.MinimaxMarginalLikelihood()),
        "joint: mean and root": ("root", scale, adam, elbo),
        "natural gradient": ("natural", {}, natural, elbo),
    }


def run(name: str, model, X, y, steps: int, rate: float, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """Hyperparameters at the end, and CPU microseconds of a step."""
    kind, options, optim, loss = methods(steps, rate)[name]
    guide = sgp.AutoWeightSpaceGP(model, parametrization=kind, base=AutoDelta, **options)
    svi = SVI(model, guide, optim, loss)
    state = svi.init(jax.random.key(0), X[:BATCH], y[:BATCH])
    X, y = jnp.asarray(X), jnp.asarray(y)

    @jax.jit
    def run_steps(state, batches):
        def step(state, rows):
            return svi.update(state, X[rows], y[rows])[0], None

        return jax.lax.scan(step, state, batches)[0]

    rng, epochs = np.random.default_rng(seed), -(-steps * BATCH // N)
    batches = np.concatenate([rng.permutation(N).reshape(-1, BATCH) for _ in range(epochs)])[:steps]
    compiled = run_steps.lower(state, batches).compile()
    before = time.process_time()
    state = jax.block_until_ready(compiled(state, batches))
    spent = time.process_time() - before
    params = svi.get_params(state)
    return {key: np.asarray(params[key]) for key in START}, 1e6 * spent / steps


def figure(result: dict, path: Path) -> None:
    """Excess of each method, a point for each seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(result["methods"].items())[::-1]
    panel, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for at, (_, row) in enumerate(rows):
        ax.plot(np.maximum(row["excess"], 1e-4), [at] * len(row["excess"]), "o", color="C0", alpha=0.7)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_xscale("log")
    ax.set_xlabel("−2 log p(y) less its minimum")
    ax.grid(axis="x", alpha=0.3)
    panel.savefig(path, dpi=110)
    print(f"figure written to {path}")


def main(arguments: argparse.Namespace) -> None:
    """One row for each method."""
    numpyro.enable_x64()
    steps, seeds = (300, 1) if arguments.reduced else (80_000 if arguments.long else 20_000, 3)
    X, y, omega = data()
    model, value = make_model(omega), exact(omega, X, y)
    start = np.log(np.concatenate([np.ravel(START[name]) for name in START]))
    with_gradient = jax.jit(jax.value_and_grad(value))
    best = minimize(
        with_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-14, "gtol": 1e-8}
    )
    result = {"N": N, "rank": RANK, "batch": BATCH, "steps": steps, "minimum": float(best.fun), "methods": {}}
    result["start"] = float(value(start) - best.fun)
    print(f"minimum {best.fun:.4f} at {np.exp(best.x).round(3)}, start {result['start']:.1f} above")
    names = list(methods(steps, RATES[0]))
    for name in names[::3] if arguments.reduced else names:

        def excess_of(rate: float, seed: int, name: str = name) -> tuple[float, float]:
            theta, spent = run(name, model, X, y, steps, rate, seed)
            log = np.log(np.concatenate([np.ravel(theta[key]) for key in START]))
            found = float(value(log) - best.fun)
            return found if np.isfinite(found) else np.inf, spent

        by_rate = {rate: excess_of(rate, 0) for rate in (RATES[:1] if arguments.reduced else RATES)}
        rate = min(by_rate, key=lambda rate: by_rate[rate][0])
        runs = [excess_of(rate, seed) for seed in range(1, 1 + seeds)]
        excess, microseconds = [found for found, _ in runs], min(spent for _, spent in runs)
        result["methods"][name] = {
            "rate": rate,
            "excess": excess,
            "mean": float(np.mean(excess)),
            "excess of the first seed by rate": {str(rate): found for rate, (found, _) in by_rate.items()},
            "microseconds": microseconds,
        }
        print(
            f"  {name:<36} {np.mean(excess):9.4f}  {np.round(excess, 4)}  rate {rate}  {microseconds:7.1f} us",
            flush=True,
        )
        report("finite_rank_toy", result, arguments.output)
    if arguments.figure is not None:
        figure(result, arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="few steps, to see that everything runs")
    parser.add_argument("--long", action="store_true", help="four times as many steps")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="file for the figure")
    main(parser.parse_args())
