"""What functionals of a Gaussian process cost as rows.

CPU milliseconds of a training step of a Poisson regression, with trained lengthscales. First, R averages of Q points
each (`WeightedSum`) beside R·Q rows and beside R rows. Then the same averages as a term `A @ f` of the model, which the
guide finds by itself, beside `WeightedSum`; both have the same bound. All models of a size take turns; the smallest of
several steps counts; each size is a process of its own with one thread.

    python benchmarks/functionals.py [--output results] [--reduced]
"""

import argparse
from collections.abc import Callable
import json
import os
from pathlib import Path
import subprocess
import sys
import time
from typing import Any

if "--child" in sys.argv and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

from common import report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI

import numpyro_sgp as sgp
from numpyro_sgp.functionals import WeightedSum

D = 2
LOSS = sgp.QuadratureELBO()


def model(inputs: Any, y: np.ndarray, average: Callable = lambda f: f) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([D]).to_event(1))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale), inputs))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(average(f))), obs=y)


def matrix_model(X: np.ndarray, y: np.ndarray, A: np.ndarray) -> None:
    model(X, y, lambda f: A @ f)


def areas(R: int, Q: int) -> tuple[WeightedSum, np.ndarray]:
    """R averages of Q points around random places, and a count of each."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0.0, 6.0, (R, 1, D)) + rng.uniform(-0.5, 0.5, (R, Q, D))
    rows = WeightedSum(X, np.full((R, Q), 1.0 / Q))
    return rows, rng.poisson(np.exp(np.sin(X).sum(-1).mean(-1)))


def inducing(M: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(0.0, 6.0, (M, D))


def started(fn: Callable, M: int, *data: Any) -> list[Any]:
    svi = SVI(fn, sgp.AutoTSVGP(fn, inducing(M)), sgp.NaturalGradient(0.1), LOSS)
    state = jax.jit(svi.init)(jax.random.key(0), *data)
    return [jax.jit(svi.update, donate_argnums=0), state, data, [], svi]


def milliseconds(runs: dict[str, list[Any]], repeats: int) -> dict[str, float]:
    """The smallest CPU time of a step of each, in turn."""
    for _ in range(repeats + 2):
        for run in runs.values():
            start = time.process_time()
            state, loss = run[0](run[1], *run[2])
            loss.block_until_ready()
            run[1] = state
            run[3].append(time.process_time() - start)
    return {name: 1e3 * min(run[3][2:]) for name, run in runs.items()}


def as_rows(R: int, Q: int, M: int, repeats: int) -> dict[str, float]:
    rows, y = areas(R, Q)
    runs = {
        "functionals": started(model, M, rows, y),
        "all_points": started(model, M, rows.nodes, np.repeat(y, Q)),
        "one_point": started(model, M, rows.X[:, 0], y),
    }
    return milliseconds(runs, repeats)


def as_term(R: int, Q: int, M: int, repeats: int) -> dict[str, float]:
    rows, y = areas(R, Q)
    A = np.repeat(np.eye(R), Q, axis=1) / Q
    runs = {"functionals": started(model, M, rows, y), "term": started(matrix_model, M, rows.nodes, y, A)}
    (*_, ours), (*_, other) = runs.values()
    # (Of the term: they say that it depends on several rows, which those of the functionals do not.)
    params, key = other.get_params(runs["term"][1]), jax.random.key(2)
    bounds = [
        float(jax.jit(lambda svi=svi, data=data: LOSS.loss(key, params, svi.model, svi.guide, *data))())
        for svi, data in ((ours, (rows, y)), (other, (rows.nodes, y, A)))
    ]
    return {**milliseconds(runs, repeats), "difference_of_bounds": abs(bounds[0] - bounds[1])}


MEASURED = {"rows": as_rows, "term": as_term}


def measured(kind: str, sizes: list[tuple[int, int, int]], repeats: int) -> list[dict]:
    table = []
    for R, Q, M in sizes:
        command = [sys.executable, __file__, "--child", json.dumps([kind, R, Q, M, repeats])]
        settings = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        output = subprocess.run(command, env=settings, capture_output=True, text=True, check=True).stdout
        row = {"rows": R, "points": Q, "inducing": M, **json.loads(output.splitlines()[-1])}
        row["ratio"] = row["functionals"] / row["all_points"] if kind == "rows" else row["term"] / row["functionals"]
        table.append(row)
        print(f"{kind}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--reduced", action="store_true", help="one small size of each")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    numpyro.enable_x64()
    if arguments.child:
        kind, *numbers = json.loads(arguments.child)
        print(json.dumps(MEASURED[kind](*numbers)))
        raise SystemExit
    reduced = arguments.reduced
    repeats = 2 if reduced else 10
    sizes = {
        "rows": [(R, Q, M) for M in (128, 512) for R, Q in ((100, 10), (1000, 10), (100, 100))],
        "term": [(R, Q, M) for M in (128, 512) for R, Q in ((30, 10), (100, 10))],
    }
    if reduced:
        sizes = {kind: [(10, 3, 16)] for kind in sizes}
    tables = {kind: measured(kind, sizes[kind], repeats) for kind in sizes}
    report("functionals", tables, arguments.output)
