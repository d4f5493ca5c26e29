"""150 steps on MNIST beside GPflow: the comparison of Adam et al. (2021), Figure 4.

The setting is that of `mnist.py`: ten latents, 100 inducing inputs, batches of 200, and one natural step of 0.03 and
one step of Adam of 0.02 in each iteration, with 32 draws of the ten latents at each row. GPflow's SVGP is whitened, as
in the paper. Each library is a process of its own on one core, one after the other, and starts from the same inducing
inputs and hyperparameters. The clock starts after the first ten iterations, so compilation is not in it.

    python benchmarks/mnist_peers.py --data mnist.npz --gpflow PYTHON [--seeds 0 1] [--output results]
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

if "--child" in sys.argv and hasattr(os, "sched_setaffinity"):
    # XLA's pool has a thread for each core that it sees: one core, before it looks.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

CLASSES, WARM_UP, STEP_SIZE, LEARNING_RATE = 10, 10, 0.03, 0.02


def ours(family: str):
    """Tied sites or whitened natural parameters."""

    def run(p: dict, iterations: int, draws: int) -> tuple:
        import jax
        import mnist
        import numpyro
        from numpyro.infer import SVI
        import optax

        import numpyro_sgp as sgp

        numpyro.enable_x64()
        guides = {
            "t-SVGP": lambda: sgp.AutoTSVGP(mnist.model, p["Z"], learn_inducing=True),
            "whitened": lambda: sgp.AutoSVGP(mnist.model, p["Z"], natural=True, learn_inducing=True),
        }
        guide = guides[family]()
        optim = sgp.NaturalGradient(STEP_SIZE, optax.adam(LEARNING_RATE))
        svi = SVI(mnist.model, guide, optim, sgp.QuadratureELBO(num_samples=draws))
        args = p["X"][0], p["y"][0], int(p["N"])
        holder = [svi.init(jax.random.key(0), *args)]
        update = jax.jit(svi.update, static_argnums=3, donate_argnums=0)

        def step(i: int) -> None:
            holder[0], _ = jax.block_until_ready(update(holder[0], p["X"][i], p["y"][i], int(p["N"])))

        def moments(X: np.ndarray) -> tuple:
            params = svi.get_params(holder[0])
            q = sgp.process_posterior(guide, jax.random.key(0), params, *args)["f"].posterior(X / 255.0)
            return np.asarray(q.mean).T, np.asarray(q.variance).T

        return timed(step, iterations), moments, {"numpyro_sgp": sgp.__version__, "jax": jax.__version__}

    return run


def gpflow(p: dict, iterations: int, draws: int) -> tuple:
    """SVGP with natural gradients; both steps are in one compiled function."""
    import gpflow
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    kernel = gpflow.kernels.Matern52(lengthscales=np.ones(p["Z"].shape[1]))
    likelihood = gpflow.likelihoods.Softmax(CLASSES)
    likelihood.num_monte_carlo_points = draws
    model = gpflow.models.SVGP(kernel, likelihood, p["Z"].copy(), num_latent_gps=CLASSES, num_data=int(p["N"]))
    gpflow.set_trainable(model.q_mu, False)
    gpflow.set_trainable(model.q_sqrt, False)
    natural, adam = gpflow.optimizers.NaturalGradient(gamma=STEP_SIZE), tf.keras.optimizers.Adam(LEARNING_RATE)
    adam.build(model.trainable_variables)

    @tf.function
    def both(batch):
        natural.minimize(lambda: model.training_loss(batch), [(model.q_mu, model.q_sqrt)])
        with tf.GradientTape() as tape:
            loss = model.training_loss(batch)
        variables = model.trainable_variables
        adam.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def step(i: int) -> None:
        both((tf.constant(p["X"][i] / 255.0), tf.constant(p["y"][i].astype(np.int64)[:, None]))).numpy()

    def moments(X: np.ndarray) -> tuple:
        return tuple(each.numpy() for each in model.predict_f(tf.constant(X / 255.0)))

    versions = {"gpflow": gpflow.__version__, "tensorflow": tf.__version__}
    return timed(step, iterations), moments, versions


def timed(step, iterations: int) -> dict:
    """Seconds of 150 iterations, from those after the first ones."""
    for i in range(iterations):
        if i == min(WARM_UP, iterations - 1):
            start = time.process_time(), time.perf_counter()
        step(i)
    count = iterations - min(WARM_UP, iterations - 1)
    taken = time.process_time() - start[0], time.perf_counter() - start[1]
    return {name: 150 * seconds / count for name, seconds in zip(("cpu_150", "wall_150"), taken, strict=True)}


def scores(moments, X: np.ndarray, y: np.ndarray) -> dict:
    """NLPD and accuracy, with 200 draws of the latents at each row."""
    rng, logs, right = np.random.default_rng(0), 0.0, 0
    for rows in np.array_split(np.arange(len(X)), -(-len(X) // 1000)):
        mean, variance = moments(X[rows])
        f = mean + np.sqrt(variance) * rng.normal(size=(200, *mean.shape))
        weights = np.exp(f - f.max(axis=-1, keepdims=True))
        probabilities = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=0)
        logs += np.sum(np.log(probabilities[np.arange(len(rows)), y[rows]]))
        right += np.sum(probabilities.argmax(axis=1) == y[rows])
    return {"nlpd": float(-logs / len(X)), "accuracy": float(right / len(X))}


LIBRARIES = {"numpyro_sgp t-SVGP": ours("t-SVGP"), "numpyro_sgp whitened": ours("whitened"), "GPflow": gpflow}


def child(library: str, path: Path, draws: int) -> None:
    """One run; prints JSON."""
    with np.load(path) as file:
        p = dict(file)
    times, moments, versions = LIBRARIES[library](p, len(p["X"]), draws)
    print(json.dumps({"library": library, **times, **scores(moments, p["X_test"], p["y_test"]), "versions": versions}))


def main(arguments: argparse.Namespace) -> None:
    """Every seed and library."""
    from common import report
    from mnist import digits

    M, B, draws, iterations = (10, 50, 8, 12) if arguments.reduced else (100, 200, 32, 150)
    pythons = {"numpyro_sgp t-SVGP": sys.executable, "numpyro_sgp whitened": sys.executable}
    if arguments.gpflow:
        pythons["GPflow"] = arguments.gpflow
    if arguments.reduced:
        pythons = {"numpyro_sgp t-SVGP": sys.executable}
    runs = []
    for seed in arguments.seeds:
        X, y, X_test, y_test = digits(arguments.data, seed)
        rows = np.random.default_rng(seed).integers(len(X), size=(iterations, B))
        p = {"X": X[rows], "y": y[rows], "X_test": X_test, "y_test": y_test, "Z": X[:M] / 255.0, "N": len(X)}
        for library, python in pythons.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "problem.npz"
                np.savez(path, **p)
                command = [python, __file__, "--child", library, "--problem", str(path), "--draws", str(draws)]
                threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
                environment = {**os.environ, **threads, "TF_CPP_MIN_LOG_LEVEL": "3"}
                result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if result.returncode:
                raise RuntimeError(f"{library} failed:\n{result.stderr}")
            runs.append({"seed": seed, **json.loads(result.stdout.splitlines()[-1])})
            shown = ", ".join(f"{key} {runs[-1][key]:.4g}" for key in ("cpu_150", "wall_150", "nlpd", "accuracy"))
            print(f"seed {seed} {library:22s} {shown}", flush=True)
    settings = {"M": M, "B": B, "draws": draws, "iterations": iterations}
    report("mnist_peers", {"settings": settings, "runs": runs}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the digits as .npz with X, y and test_mask")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="of rows and batches")
    parser.add_argument("--gpflow", help="interpreter with GPflow")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--child", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--problem", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--draws", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.problem, options.draws)
    elif options.reduced or options.data is not None:
        main(options)
    else:
        parser.error("`--data` is needed; without it there is only `--reduced`.")
