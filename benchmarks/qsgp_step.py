"""What a step of `AutoQSGP` with `RowSparse` costs as the basis and the data grow: it should not grow with either.

Steps of `SVI.update` inside one compiled loop whose state is donated, as in `fit`: M basis functions of m and B rows of
N, which are drawn on the device. The mean is in the weights of random Fourier features, the covariance that of inducing
variables. Milliseconds are the least of some repetitions, in wall time and in CPU time. Memory is what the process has
had at most beyond that of the first size, where the kernel says it (`/proc/self/status`), each size in a process of its
own; beside it the bytes of the table and of its accumulators.

    python benchmarks/qsgp_step.py [--sizes 10000 100000 1000000 10000000] [--output results]
"""

import argparse
import json
from pathlib import Path
import subprocess
import sys
import time

from common import report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

COLUMNS = 8


def peak_memory() -> int | None:
    """The most memory that this process has had, in bytes."""
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    lines = path.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def one(m: int, n: int, M: int, B: int, P: int, steps: int, repetitions: int) -> dict:
    """Milliseconds of a step, and memory."""

    def model(X, y=None):
        lengthscale = numpyro.param("lengthscale", 2.0, constraint=dist.constraints.positive)
        kernel = sgp.kernels.SquaredExponential(lengthscale)
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.features.RandomFourier(kernel, m, jax.random.key(0)), X))
        with numpyro.plate("data", n, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    rng = np.random.default_rng(0)
    first = rng.normal(size=(B, COLUMNS)).astype(np.float32)
    guide = sgp.AutoQSGP(model, basis_batch=M, inducing=first[: B // 5], control=first[:P] if P else None)
    svi = SVI(model, guide, sgp.RowSparse(0.1, optax.adam(1e-3)), sgp.QuadratureELBO())

    def loop(state, X, y):
        def step(_, carry):
            state, loss = carry
            rows = jax.random.randint(jax.random.fold_in(state.rng_key, 1), (B,), 0, n)
            state, new = svi.update(state, X[rows], y[rows])
            return state, loss + new

        return jax.lax.fori_loop(0, steps, step, (state, jnp.zeros(())))

    compiled = jax.jit(loop, donate_argnums=0)
    X, y = (jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in ((n, COLUMNS), n))
    state = svi.init(jax.random.key(0), first, first[:, 0])
    state = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
    table = svi.get_params(state)["f_auto_basis"].values.nbytes
    state, _ = jax.block_until_ready(compiled(state, X, y))
    seconds = []
    for _ in range(repetitions):
        start = np.array([time.perf_counter(), time.process_time()])
        state, loss = jax.block_until_ready(compiled(state, X, y))
        seconds.append((np.array([time.perf_counter(), time.process_time()]) - start) / steps)
    assert np.isfinite(loss)
    wall, cpu = 1e3 * np.min(seconds, axis=0)
    return {
        "m": m,
        "n": n,
        "M": M,
        "B": B,
        "P": P,
        "wall_ms": float(wall),
        "cpu_ms": float(cpu),
        "table_bytes": int(table),
        "data_bytes": int(X.nbytes + y.nbytes),
        "peak_bytes": peak_memory(),
    }


def main(arguments: argparse.Namespace) -> None:
    """A process for each size."""
    if arguments.one is not None:
        print("one", json.dumps(one(*arguments.one)))
        return
    sizes = [2000, 8000] if arguments.reduced else arguments.sizes
    M, B, P, steps, repetitions = (50, 40, 0, 3, 1) if arguments.reduced else (1000, 500, arguments.control, 20, 3)
    plan = [(m, sizes[0]) for m in sizes] + ([] if arguments.reduced else [(sizes[0], n) for n in sizes[1:]])
    rows = []
    for m, n in plan:
        if arguments.reduced:
            rows.append(one(m, n, M, B, P, steps, repetitions))
        else:
            command = [sys.executable, __file__, "--one", *map(str, (m, n, M, B, P, steps, repetitions))]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows.append(json.loads(next(line[4:] for line in output.splitlines() if line.startswith("one "))))
        row = rows[-1]
        beyond = None if row["peak_bytes"] is None else (row["peak_bytes"] - (rows[0]["peak_bytes"] or 0)) / 2**20
        print(
            f"m={m:9,} n={n:9,}  {row['wall_ms']:7.2f} ms wall {row['cpu_ms']:7.2f} ms CPU; table and accumulators "
            f"{2 * row['table_bytes'] / 2**20:6.1f} MiB, data {row['data_bytes'] / 2**20:6.1f} MiB, "
            f"peak above the first {'-' if beyond is None else f'{beyond:6.1f}'} MiB",
            flush=True,
        )
    report("qsgp_step", {"rows": rows}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10**4, 10**5, 10**6, 10**7], help="of m, and of n")
    parser.add_argument("--control", type=int, default=0, help="inputs of a control variate")
    parser.add_argument("--one", type=int, nargs=7, help=argparse.SUPPRESS)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    main(parser.parse_args())
