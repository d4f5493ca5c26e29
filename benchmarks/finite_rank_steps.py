"""Time of a step against the size of the batch B and the number of features r, beside the complexity of the paper.

Regression with r features of 8 input columns in float32. For r features a step of each method costs O(r³ + B r²); the
evidence of a batch, O(B³ + B² r), and SVGP with B inducing inputs, O(B³ + B² r) as well (Shoham and Avron 2025, table
1); a step in which the posterior of the weights is held ("held"), O(B r²). The exponent found between the two largest
sizes stands beside the one that this says for sizes that dominate. All methods of a size take turns in one process of
one thread; times are CPU milliseconds, the smallest of several, and the load of the machine is kept with them.

    python benchmarks/finite_rank_steps.py [--reduced] [--repeats 5] [--output results] [--figure steps.png]
"""

import argparse
import os
from pathlib import Path
import time

if hasattr(os, "sched_setaffinity"):
    # XLA's pool has a thread for each core that it sees, whatever it is told: one core, before it looks.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

from common import report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
import optax

import numpyro_sgp as sgp

COLUMNS = 8
FULL = {"r": [64, 128, 250, 500, 1000], "B": [16, 64, 256], "fixed": {"r": 128, "B": 32}}
REDUCED = {"r": [8, 16], "B": [4], "fixed": {"r": 8, "B": 4}}


def features(weights, X):
    """One layer."""
    return jnp.tanh(X @ weights)


def svi_of(method: str, r: int, B: int) -> SVI:
    """Model, guide, optimizer and loss."""
    rng = np.random.default_rng(0)
    first = jnp.asarray(rng.normal(size=(COLUMNS, r)) / COLUMNS**0.5, jnp.float32)

    def model(X, y):
        def positive(name, value):
            return numpyro.param(name, jnp.float32(value), constraint=dist.constraints.positive)

        kernel = sgp.features.FeatureMap(features, numpyro.param("weights", first), positive("variance", 1.0 / r))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", 100_000, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, positive("noise", 0.5)), obs=y)

    def weights(parametrization, **options):
        return sgp.AutoWeightSpaceGP(model, parametrization=parametrization, base=AutoDelta, **options)

    adam, elbo = optax.adam(1e-3), sgp.QuadratureELBO(num_nodes=3)
    if method == "SVGP":
        Z = rng.normal(size=(B, COLUMNS)).astype(np.float32)
        guide = sgp.AutoSVGP(model, Z, natural=True, learn_inducing=True, base=AutoDelta)
        return SVI(model, guide, sgp.NaturalGradient(0.1, adam), elbo)
    if method == "minimax":
        players = sgp.DescentAscent(adam, optax.sgd(1e-3))
        return SVI(model, weights("adversarial"), players, sgp.MinimaxMarginalLikelihood())
    return {
        "natural gradient": lambda: SVI(model, weights("natural"), sgp.NaturalGradient(0.01, adam), elbo),
        # A step between two that make q anew, which it is not given the time for here.
        "held": lambda: SVI(model, weights("natural", refresh=10**6), sgp.NaturalGradient(0.01, adam), elbo),
        "compositional": lambda: SVI(model, weights("averaged"), adam, sgp.CompositionalMarginalLikelihood()),
        "batch evidence": lambda: SVI(model, weights("natural"), adam, sgp.BatchMarginalLikelihood()),
    }[method]()


# How the time of a step grows with r, and with B, once that size dominates.
METHODS = {
    "natural gradient": (3, 1),
    "held": (2, 1),
    "compositional": (3, 1),
    "minimax": (3, 1),
    "batch evidence": (1, 3),
    "SVGP": (1, 3),
}


def milliseconds(methods: list[str], r: int, B: int, repeats: int) -> dict[str, float]:
    """The quickest step of each method, of `repeats` in turn after two that do not count."""
    rng = np.random.default_rng(1)
    X = jnp.asarray(rng.normal(size=(B, COLUMNS)), jnp.float32)
    y = jnp.asarray(np.sin(X[:, 0]) + 0.3 * rng.normal(size=B), jnp.float32)
    steps, states, times = {}, {}, {name: [] for name in methods}
    for name in methods:
        svi = svi_of(name, r, B)
        steps[name], states[name] = jax.jit(svi.update), svi.init(jax.random.key(0), X, y)
    for _ in range(repeats + 2):
        for name, step in steps.items():
            start = time.process_time()
            states[name], _ = jax.block_until_ready(step(states[name], X, y))
            times[name].append(1e3 * (time.process_time() - start))
    return {name: min(values[2:]) for name, values in times.items()}


def figure(result: dict, path: Path) -> None:
    """Time against each size, the other held."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panel, axes = plt.subplots(1, 2, figsize=(7.6, 3.2), layout="constrained", sharey=True)
    for ax, size, other in zip(axes, ("r", "B"), ("B", "r"), strict=True):
        rows = result["times"][size]
        for number, name in enumerate(name for name in METHODS if name in rows[0]):
            ax.loglog([row[size] for row in rows], [row[name] for row in rows], "o-", color=f"C{number}", label=name)
        label = "features r" if size == "r" else "rows in a batch, B"
        ax.set(xlabel=label, title=f"{other} = {result['sizes']['fixed'][other]}")
        ax.set_xticks([row[size] for row in rows], [str(row[size]) for row in rows])
        ax.set_xticks([], minor=True)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("CPU milliseconds of a step")
    axes[0].legend(frameon=False, fontsize=8)
    panel.savefig(path, dpi=110)
    print(f"figure written to {path}")


def main(arguments: argparse.Namespace) -> None:
    """Two rows of sizes."""
    sizes = REDUCED if arguments.reduced else FULL
    methods = ["natural gradient", "held", "SVGP"] if arguments.reduced else list(METHODS)
    result: dict = {"sizes": sizes, "repeats": arguments.repeats, "load": [], "times": {}, "exponents": {}}
    for size in ("r", "B"):
        rows = result["times"][size] = []
        for value in sizes[size]:
            at = {**sizes["fixed"], size: value}
            rows.append({**at, **milliseconds(methods, at["r"], at["B"], arguments.repeats)})
            result["load"].append(os.getloadavg()[0])
            listed = "  ".join(f"{name} {rows[-1][name]:.2f}" for name in methods)
            print(f"r = {at['r']:4d}, B = {at['B']:4d}, ms:  {listed}", flush=True)
        if len(rows) < 2:
            continue
        ratio = np.log(rows[-1][size] / rows[-2][size])
        found = {name: float(np.log(rows[-1][name] / rows[-2][name]) / ratio) for name in methods}
        result["exponents"][size] = found
        for name in methods:
            said = METHODS[name][size == "B"]
            print(f"  {name:<18} grows as {size}^{found[name]:.2f} between the two largest; the table: {size}^{said}")
    print(f"load of the machine: {result['load']}")
    report("finite_rank_steps", result, arguments.output)
    if arguments.figure is not None:
        figure(result, arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="file for the figure")
    main(parser.parse_args())
