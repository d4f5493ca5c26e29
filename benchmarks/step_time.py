"""Time of one natural step, alone and fused with an Adam step on hyperparameters and inducing inputs.

A minibatch of a Bernoulli classification with 8 input columns in float64. Beside each time stands that of the matrix
operations that a natural step alone cannot avoid: two kernel matrices, two Cholesky factorisations of size M, two
products of a triangular inverse with the batch and one update of rank B. Tied sites are besides sums in a basis of
their own, and a second reference adds the change of basis and back. Each row is a process of its own with one thread,
where steps and references take turns, so that load of the machine hits all alike; times are CPU milliseconds, the
smallest of several.

    python benchmarks/step_time.py [--output results] [--reduced]
"""

import argparse
from collections.abc import Callable
import json
import os
from pathlib import Path
import subprocess
import sys
import time

import numpy as np

if "--child" in sys.argv and hasattr(os, "sched_setaffinity"):
    # XLA's pool has a thread for each core that it sees, whatever it is told: one core for all, before it looks.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

NUMBERS = (128, 512, 1024)
COLUMNS = 8


def smallest(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """CPU milliseconds of the quickest call of each, called in turn, after two that do not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 2):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: 1e3 * min(values[2:]) for name, values in times.items()}


def unavoidable(kind: str, M: int, B: int) -> dict[str, Callable[[], None]]:
    """The operations of one natural step, without and with the change of basis of tied sites."""
    import jax
    import jax.numpy as jnp

    from numpyro_sgp.math.linalg import root_of
    from numpyro_sgp.math.products import congruence_of_upper, lower_product, matmul, symmetric_product, transposed

    def kernel(X, Z):
        squares = jnp.sum(X * X, axis=1)[:, None] + jnp.sum(Z * Z, axis=1)
        return jnp.exp(matmul(X, Z.T) - 0.5 * squares)

    def operations(Z, X, P, weights):
        K, Kuf = kernel(Z, Z) + jnp.eye(M), kernel(Z, X)
        A = lower_product(root_of(K).inverse, Kuf)
        T = lower_product(root_of(P).inverse, A)
        return T, (A * weights) @ A.T

    def operations_tied(Z, X, P, weights):
        # The sites whitened, λ̃ and Λ̃ = L_u Λ₂ L_uᵀ; where Z moves, expressed at the current Z. P stands for Λ₂ as well.
        K, Kuf = kernel(Z, Z) + jnp.eye(M), kernel(Z, X)
        root = root_of(K)
        A, back = lower_product(root.inverse, Kuf), None
        if kind == "tied projections":
            Lu = lower_product(root.inverse, K)
            Lambda = symmetric_product(matmul(Lu, P), Lu)
            back = root.unwhiten_both(Lambda)
        else:
            Lambda = congruence_of_upper(transposed(root.L), P)
        T = lower_product(root_of(jnp.eye(M) + Lambda).inverse, A)
        vectors = root.unwhiten(A)
        return T, (vectors * weights) @ vectors.T, back

    rng = np.random.default_rng(0)
    root = rng.normal(size=(M, M)) / np.sqrt(M)
    P = jnp.asarray(root @ root.T + np.eye(M))
    Z, X = (jnp.asarray(rng.normal(size=(rows, COLUMNS)) / COLUMNS**0.5) for rows in (M, B))
    arrays = Z, X, P, jnp.ones(B)
    functions = {"unavoidable_ms": operations}
    if kind != "whitened":
        functions["unavoidable_with_basis_ms"] = operations_tied

    def timed(function: Callable) -> Callable[[], None]:
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*arrays))

    return {name: timed(function) for name, function in functions.items()}


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
    }
    runs, holders = unavoidable(kind, M, B), {}
    for name, m_steps in (("natural", 0), ("fused", 1)):
        optim = sgp.NaturalGradient(0.1, optax.adam(1e-2), m_steps=m_steps)
        svi = numpyro.infer.SVI(model, guides[kind](), optim, sgp.QuadratureELBO())
        # A copy of each leaf, so that all may be donated.
        state = jax.tree.map(jnp.copy, svi.init(jax.random.key(0), *batches[0]))
        holder = holders[name] = {"state": state, "step": 0}
        update = jax.jit(svi.update, donate_argnums=0)

        def step(holder=holder, update=update):
            batch = batches[holder["step"] % len(batches)]
            holder["state"], holder["loss"] = jax.block_until_ready(update(holder["state"], *batch))
            holder["step"] += 1

        runs[f"{name}_ms"] = step
    times = smallest(runs, repeats)
    print(json.dumps({**times, **{f"{name}_loss": float(holder["loss"]) for name, holder in holders.items()}}))


KINDS = ("whitened", "tied projections", "tied projections, Z fixed")


def measure(kind: str, M: int, B: int, repeats: int) -> dict:
    """Run `child` in a process with one thread."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
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

    numbers, kinds, B, repeats = ((16,), KINDS[1:2], 32, 2) if arguments.reduced else (NUMBERS, KINDS, 256, 12)
    table = []
    for M in numbers:
        for kind in kinds:
            row = {"guide": kind, "M": M, "B": B, **measure(kind, M, B, repeats)}
            references = [row[name] for name in ("unavoidable_ms", "unavoidable_with_basis_ms") if name in row]
            ratios = ", ".join(f"{row['natural_ms'] / reference:4.2f} x" for reference in references)
            print(
                f"M={M:5d} {kind:26s} natural {row['natural_ms']:7.1f} ms ({ratios})  fused {row['fused_ms']:7.1f} ms"
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
