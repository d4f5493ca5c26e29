"""Time of one natural step, alone and fused with an Adam step on hyperparameters and inducing inputs.

A minibatch of a Bernoulli classification with 8 input columns in float64. Beside each time stands that of the matrix
operations that a natural step alone cannot avoid, measured in the same process: two Cholesky factorisations of size M,
two products of a triangular inverse with the batch and one update of rank B. Each row is a process of its own with one
thread; times are CPU milliseconds, the smallest of several steps.

    python benchmarks/step_time.py [--output results] [--reduced]
"""

import argparse
import json
import os
from pathlib import Path
import subprocess
import sys
import time

import numpy as np

NUMBERS = (128, 512, 1024)
COLUMNS = 8


def smallest(run, repeats: int) -> float:
    """CPU milliseconds of the quickest of several calls after the first two."""
    times = []
    for _ in range(repeats + 2):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * min(times[2:])


def unavoidable(M: int, B: int, repeats: int) -> float:
    """Milliseconds of the operations of one natural step."""
    import jax
    import jax.numpy as jnp

    from numpyro_sgp.linalg import triangular_inverse

    @jax.jit
    def operations(K, P, Kuf, weights):
        A = triangular_inverse(jnp.linalg.cholesky(K)) @ Kuf
        T = triangular_inverse(jnp.linalg.cholesky(P)) @ A
        return T, (A * weights) @ A.T

    rng = np.random.default_rng(0)
    root = rng.normal(size=(M, M)) / np.sqrt(M)
    K = jnp.asarray(root @ root.T + np.eye(M))
    arrays = K, K, jnp.asarray(rng.normal(size=(M, B))), jnp.ones(B)
    return smallest(lambda: jax.block_until_ready(operations(*arrays)), repeats)


def child(kind: str, M: int, B: int, repeats: int) -> None:
    """Time one guide; prints JSON."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    import optax

    import numpyro_sgp as sgp

    N = 40 * B
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, COLUMNS))
    y = (np.sin(X[:, 0]) + 0.3 * rng.normal(size=N) > 0).astype(float)
    batches = [(jnp.asarray(X[i : i + B]), jnp.asarray(y[i : i + B])) for i in range(0, 10 * B, B)]
    positive = dist.constraints.positive

    def model(X, y):
        lengthscale = numpyro.param("lengthscale", jnp.full(COLUMNS, 2.0), constraint=positive)
        variance = numpyro.param("variance", 1.0, constraint=positive)
        kernel = sgp.kernels.SquaredExponential(lengthscale, variance)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", N, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    guides = {
        "whitened": lambda: sgp.AutoSVGP(model, X[:M], natural=True, learn_inducing=True),
        "tied projections": lambda: sgp.AutoTSVGP(model, X[:M], learn_inducing=True),
        "tied projections, Z fixed": lambda: sgp.AutoTSVGP(model, X[:M]),
        "tied covariances": lambda: sgp.AutoTSVGP(model, X[:M], learn_inducing=True, tie="covariance"),
    }
    result = {"unavoidable_ms": unavoidable(M, B, repeats)}
    for name, m_steps in (("natural_ms", 0), ("fused_ms", 1)):
        optim = sgp.NaturalGradient(0.1, optax.adam(1e-2), m_steps=m_steps)
        svi = numpyro.infer.SVI(model, guides[kind](), optim, sgp.QuadratureELBO())
        holder = {"state": jax.jit(svi.init)(jax.random.key(0), *batches[0]), "step": 0}
        update = jax.jit(svi.update, donate_argnums=0)

        def step(holder=holder, update=update):
            batch = batches[holder["step"] % len(batches)]
            holder["state"], holder["loss"] = jax.block_until_ready(update(holder["state"], *batch))
            holder["step"] += 1

        result[name] = smallest(step, repeats)
        result[name.replace("ms", "loss")] = float(holder["loss"])
    print(json.dumps(result))


KINDS = ("whitened", "tied projections", "tied projections, Z fixed", "tied covariances")


def measure(kind: str, M: int, B: int, repeats: int) -> dict:
    """Run `child` in a process with one thread."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = {**os.environ, **threads, "XLA_FLAGS": flags}
    numbers = [str(x) for x in (M, B, repeats)]
    command = [sys.executable, __file__, "--child", kind, "--numbers", *numbers]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        raise RuntimeError(f"{kind} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def main(arguments: argparse.Namespace) -> None:
    """Every guide and every M."""
    from common import report

    numbers, kinds, B, repeats = ((16,), KINDS[:2], 32, 2) if arguments.reduced else (NUMBERS, KINDS, 256, 12)
    table = []
    for M in numbers:
        for kind in kinds:
            row = {"guide": kind, "M": M, "B": B, **measure(kind, M, B, repeats)}
            ratio = row["natural_ms"] / row["unavoidable_ms"]
            print(
                f"M={M:5d} {kind:26s} natural step {row['natural_ms']:7.1f} ms ({ratio:4.2f} x the unavoidable)  "
                f"fused {row['fused_ms']:7.1f} ms"
            )
            table.append(row)
    report("step_time", {"threads": 1, "load": os.getloadavg(), "table": table}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, *options.numbers)
    else:
        main(options)
