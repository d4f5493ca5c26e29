"""Collapsed bound of GP regression: the same work in numpyro_sgp, GPflow and GPyTorch, values and times side by side.

One evaluation is the bound and its gradient with respect to lengthscales, variance, noise and inducing inputs, with all
rows, in float64, without jitter, each library in a process of its own with one thread. Times are CPU milliseconds, the
smallest of several evaluations after the first. Peers run under the interpreters given, and only if one is:

    python benchmarks/regression_peers.py --peers ../peers/bin/python --data kin40k.npz elevators.npz [--output results]
"""

import argparse
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time

import numpy as np

NUMBERS = (128, 512, 1024)


def problem(data: Path | None, M: int, rows: int | None) -> dict:
    """Rows, inducing inputs (random rows) and hyperparameters at which the bound is evaluated."""
    if data is None:
        rng = np.random.default_rng(0)
        X = rng.uniform(-2.0, 2.0, size=(rows or 2000, 4))
        y = np.sin(2.0 * X).sum(1) + 0.1 * rng.normal(size=len(X))
    else:
        from common import data_set

        X, y = data_set(data)[:2]
    chosen = np.random.default_rng(1).permutation(len(X))
    X, y = X[chosen[:rows]], y[chosen[:rows]]
    X, first = np.unique(X, axis=0, return_index=True)  # equal rows would make Kuu singular without jitter
    y = y[first]
    Z = X[np.random.default_rng(2).permutation(len(X))[:M]]
    return {"X": X, "y": y, "Z": Z, "lengthscale": np.full(X.shape[1], 0.3 * X.shape[1] ** 0.5), "noise": 0.3}


def ours(p: dict):
    """The function to be timed, and versions."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp

    import numpyro_sgp as sgp

    def negative(lengthscale, variance, noise, Z, X, y):
        kernel = sgp.kernels.SquaredExponential(lengthscale, variance)
        return -sgp.SparseGPRegression(kernel, X, Z, noise, bound="titsias", jitter=0.0).log_prob(y)  # theirs

    step = jax.jit(jax.value_and_grad(negative, argnums=(0, 1, 2, 3)))
    arrays = [jnp.asarray(x, float) for x in (p["lengthscale"], 1.0, p["noise"], p["Z"], p["X"], p["y"])]
    versions = {"jax": jax.__version__, "numpyro_sgp": sgp.__version__}
    return lambda: -float(jax.block_until_ready(step(*arrays))[0]), versions


def gpflow(p: dict):
    """The function to be timed, and versions."""
    import gpflow
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    gpflow.config.set_default_jitter(0.0)
    kernel = gpflow.kernels.SquaredExponential(variance=1.0, lengthscales=p["lengthscale"])
    model = gpflow.models.SGPR(
        (p["X"], p["y"][:, None]), kernel, inducing_variable=p["Z"], noise_variance=float(p["noise"]) ** 2
    )

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = model.training_loss()
        return loss, tape.gradient(loss, model.trainable_variables)

    def run():
        loss, gradients = step()
        for gradient in gradients:
            tf.convert_to_tensor(gradient).numpy()
        return -float(loss)

    return run, {"gpflow": gpflow.__version__, "tensorflow": tf.__version__}


def gpytorch(p: dict):
    """The function to be timed, and versions."""
    import gpytorch
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    X, y, Z = (torch.tensor(p[name]) for name in ("X", "y", "Z"))

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(X, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=X.shape[1]))
            base.outputscale, base.base_kernel.lengthscale = 1.0, torch.tensor(p["lengthscale"])
            self.covar_module = gpytorch.kernels.InducingPointKernel(base, Z.clone(), likelihood)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = float(p["noise"]) ** 2
    model = Model(likelihood).train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

    def run():
        model.zero_grad()
        with gpytorch.settings.max_cholesky_size(10_000), gpytorch.settings.cholesky_jitter(0.0, 0.0):
            loss = -mll(model(X), y) * len(y)
            loss.backward()
        return -float(loss)

    return run, {"gpytorch": gpytorch.__version__, "torch": torch.__version__}


LIBRARIES = {"numpyro_sgp": ours, "gpflow": gpflow, "gpytorch": gpytorch}


def child(library: str, path: Path, repeats: int) -> None:
    """Time one library on the problem in `path`; prints JSON."""
    with np.load(path) as file:
        run, versions = LIBRARIES[library](dict(file))
    value, times = run(), []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    print(json.dumps({"value": value, "ms": 1e3 * min(times), "versions": versions}))


def measure(library: str, python: str, path: Path, repeats: int) -> dict:
    """Run `child` under an interpreter, with one thread."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    environment = {**os.environ, **threads, "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [python, __file__, "--child", library, "--problem", str(path), "--repeats", str(repeats)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        raise RuntimeError(f"{library} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def main(arguments: argparse.Namespace) -> None:
    """Every data set, every M, every library."""
    from common import report

    numbers, rows, repeats = ((16,), 200, 2) if arguments.reduced else (NUMBERS, None, 5)
    libraries = {"numpyro_sgp": sys.executable}
    if arguments.peers:
        libraries |= dict.fromkeys(("gpflow", "gpytorch"), arguments.peers)
    table = []
    for data in arguments.data or [None]:
        name = "synthetic" if data is None else data.stem
        for M in numbers:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "problem.npz"
                np.savez(path, **problem(data, M, rows))
                measured = {lib: measure(lib, python, path, repeats) for lib, python in libraries.items()}
            own = measured["numpyro_sgp"]
            for library, result in measured.items():
                difference = abs(result["value"] - own["value"]) / abs(own["value"])
                ratio = result["ms"] / own["ms"]
                print(
                    f"{name:12s} M={M:5d} {library:12s} {result['ms']:10.1f} ms  ({ratio:5.2f} x)  "
                    f"bound {result['value']:.6f}  relative difference {difference:.1e}"
                )
                table.append({"set": name, "M": M, "library": library, "relative_difference": difference, **result})
    report("regression_peers", {"table": table}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="data sets as .npz with X, y and test_mask")
    parser.add_argument("--peers", help="interpreter with GPflow and GPyTorch")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--child", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--problem", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.problem, options.repeats)
    else:
        main(options)
