"""Seconds from import to a given quality: GP regression on minibatches, numpyro_sgp beside GPflow.

A squared-exponential kernel with a lengthscale for each column, Gaussian noise, and M inducing inputs that are trained.
All runs start from the same inducing inputs (random rows) and hyperparameters, each in a process of its own with one
thread, one after the other. GPflow takes natural-gradient and Adam steps on batches of 256; what it has at the end is
the target. The clock starts when a process does, so imports and compilation count; it stands still while a process
writes down its parameters, which are judged afterwards, by the same NumPy code for all: the bound on all training data
(ELBO, of the outputs in units of their standard deviation), and RMSE and negative log predictive density on the test
fold. GPflow runs under the interpreter given, and only if one is; without it the last point of the run of ours with
GPflow's settings is the target.

    python benchmarks/time_to_quality.py --data kin40k.npz --gpflow-python ../peers/bin/python [--output results]
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

SAME = "AutoSVGP, GPflow's settings"
# Guide, rows of a batch, steps, first and last ρ, largest learning rate of Adam, closed form of q at the end.
VARIANTS = {
    SAME: ("svgp", 256, 2000, (0.1, 0.1), 0.01, False),
    "AutoSVGP, schedules": ("svgp", 512, 800, (0.1, 0.02), 0.05, False),
    "AutoTSVGP, schedules": ("tsvgp", 512, 800, (0.1, 0.02), 0.05, False),
    "AutoSVGP, schedules, closed form at the end": ("svgp", 512, 400, (0.1, 0.05), 0.05, True),
}
FULL = "SparseGPRegression, all rows, L-BFGS"
GPFLOW = "GPflow"
START = {"variance": 1.0, "noise": 0.3}
JITTER = 1e-6


class Clock:
    """Wall and processor seconds of this process since its start, without what happens in `pause`."""

    def __init__(self, started: float) -> None:
        self.started = np.array([started, 0.0])

    def seconds(self) -> np.ndarray:
        return np.array([time.time(), time.process_time()]) - self.started

    def pause(self, before: np.ndarray) -> None:
        """Take back what has gone by since `before`, a value of `seconds`."""
        self.started = self.started + (self.seconds() - before)


class Notes:
    """Snapshots of a run: the parameters and when they were reached."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock, self.number = folder, clock, 0

    def write(self, step: int, snapshot) -> None:
        """`snapshot()` gives lengthscale, variance, noise, Z, and mean and root of q(v), S = RᵀR."""
        seconds = self.clock.seconds()
        np.savez(self.folder / f"{self.number:04d}.npz", step=step, seconds=seconds, **snapshot())
        self.number += 1
        self.clock.pause(seconds)


def gpflow(p: dict, notes: Notes, name: str, reduced: bool) -> dict[str, str]:
    """Natural-gradient and Adam steps, both in one compiled function; returns versions."""
    import gpflow
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    gpflow.config.set_default_jitter(JITTER)
    X, y = p["X"], p["y"][:, None]
    kernel = gpflow.kernels.SquaredExponential(variance=START["variance"], lengthscales=p["lengthscale"])
    likelihood = gpflow.likelihoods.Gaussian(START["noise"] ** 2)
    model = gpflow.models.SVGP(kernel, likelihood, p["Z"], num_data=len(X), whiten=True)
    gpflow.set_trainable(model.q_mu, False)
    gpflow.set_trainable(model.q_sqrt, False)
    del name
    _, B, num_steps, (rho, _), rate, _ = VARIANTS[SAME]
    B, num_steps = (min(B, len(X)), 8) if reduced else (B, num_steps)
    natural, adam = gpflow.optimizers.NaturalGradient(gamma=rho), tf.optimizers.Adam(rate)

    @tf.function
    def step(batch):
        def loss():
            return model.training_loss(batch)

        natural.minimize(loss, [(model.q_mu, model.q_sqrt)])
        parameters = model.trainable_variables
        with tf.GradientTape() as tape:
            value = loss()
        adam.apply_gradients(zip(tape.gradient(value, parameters), parameters, strict=True))

    def snapshot():
        return {
            "lengthscale": kernel.lengthscales.numpy(),
            "variance": kernel.variance.numpy(),
            "noise": likelihood.variance.numpy() ** 0.5,
            "Z": model.inducing_variable.Z.numpy(),
            "m": model.q_mu.numpy()[:, 0],
            "R": model.q_sqrt.numpy()[0].T,
            "jitter": JITTER,
        }

    rng = np.random.default_rng(0)
    order, at = rng.permutation(len(X)), 0
    for i in range(num_steps):
        if at + B > len(X):
            order, at = rng.permutation(len(X)), 0
        rows = order[at : at + B]
        at += B
        step((tf.constant(X[rows]), tf.constant(y[rows])))
        if (i + 1) % max(1, num_steps // 16) == 0:
            notes.write(i + 1, snapshot)
    return {"gpflow": gpflow.__version__, "tensorflow": tf.__version__}


def ours(p: dict, notes: Notes, name: str, reduced: bool) -> dict[str, str]:
    """`fit` with natural-gradient and Adam steps from one evaluation of the loss; returns versions."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI
    import optax

    import numpyro_sgp as sgp

    numpyro.enable_x64()
    form, B, num_steps, (first, last), largest, closed = VARIANTS[name]
    every = num_steps // 16
    if name == SAME:
        num_steps = int(p["same_steps"])
    B, num_steps, every = (min(B, len(p["X"])), 8, 1) if reduced else (B, num_steps, every)
    positive = dist.constraints.positive

    def kernel_and_noise():
        lengthscale = numpyro.param("lengthscale", jnp.asarray(p["lengthscale"]), constraint=positive)
        variance = numpyro.param("variance", START["variance"], constraint=positive)
        noise = numpyro.param("noise", START["noise"], constraint=positive)
        return sgp.kernels.SquaredExponential(lengthscale, variance), noise

    def model(X, y, num_data):
        kernel, noise = kernel_and_noise()
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, jitter=JITTER))
        with numpyro.plate("data", num_data, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    if form == "tsvgp":
        guide = sgp.AutoTSVGP(model, p["Z"], learn_inducing=True)
    else:
        guide = sgp.AutoSVGP(model, p["Z"], natural=True, learn_inducing=True)
    rho, rate = first, largest
    if name != SAME:
        rho, rate = optax.linear_schedule(first, last, num_steps), optax.cosine_decay_schedule(largest, num_steps)
    # The Gaussian's logarithm is a quadratic in f: three nodes are exact.
    svi = SVI(
        model, guide, sgp.NaturalGradient(rho, optax.adam(rate)), sgp.QuadratureELBO(num_nodes=3, bound="titsias")
    )

    def described(params, m, R) -> dict:
        values = {name: np.asarray(params[name]) for name in ("lengthscale", "variance", "noise")}
        jitter = JITTER * values["variance"]  # ours is relative to the prior variance
        return {**values, "Z": np.asarray(params["f_auto_inducing"].Z), "m": m, "R": R, "jitter": jitter}

    def snapshot(params) -> dict:
        q = sgp.process_posterior(guide, jax.random.key(0), params, p["X"][:1], p["y"][:1], 1)["f"]
        return described(params, np.asarray(q.L.T @ q.a), np.asarray(q.R))

    def note(progress: sgp.FitProgress) -> None:
        notes.write(progress.step, lambda: snapshot(progress.params()))

    result = sgp.fit(
        svi,
        jax.random.key(0),
        (p["X"], p["y"]),
        batch_size=B,
        num_steps=num_steps,
        progress_bar=False,
        callback=Every(every, note) if not closed else None,
    )
    if closed:

        @jax.jit
        def best(params):
            kernel = sgp.kernels.SquaredExponential(params["lengthscale"], params["variance"])
            site = sgp.SparseGPRegression(kernel, p["X"], params["f_auto_inducing"], params["noise"], jitter=JITTER)
            q = site.condition(p["y"])
            return q.m, q.L_B

        m, L_B = jax.block_until_ready(best(result.params))
        notes.write(num_steps, lambda: described(result.params, np.asarray(m), np.linalg.inv(L_B)))
    return {"jax": jax.__version__, "numpyro": numpyro.__version__, "numpyro_sgp": sgp.__version__}


def full(p: dict, notes: Notes, name: str, reduced: bool) -> dict[str, str]:
    """The collapsed bound on all rows by SciPy's L-BFGS-B; returns versions."""
    del name
    import jax
    import jax.numpy as jnp
    import scipy.optimize

    import numpyro_sgp as sgp

    jax.config.update("jax_enable_x64", True)
    X, y = jnp.asarray(p["X"]), jnp.asarray(p["y"])
    logs = np.log(np.concatenate([p["lengthscale"], [START["variance"], START["noise"]]]))

    def parts(x):
        D = X.shape[1]
        values = jnp.exp(x[: D + 2])
        return values[:D], values[D], values[D + 1], x[D + 2 :].reshape(p["Z"].shape)

    def site(x):
        lengthscale, variance, noise, Z = parts(x)
        kernel = sgp.kernels.SquaredExponential(lengthscale, variance)
        return sgp.SparseGPRegression(kernel, X, Z, noise, bound="titsias", jitter=JITTER)  # as the others have

    def posterior(x):
        q = site(x).condition(y)
        return q.m, q.L_B

    step = jax.jit(jax.value_and_grad(lambda x: -site(x).log_prob(y)))
    posterior, taken = jax.jit(posterior), []

    def snapshot(x) -> dict:
        lengthscale, variance, noise, Z = map(np.asarray, parts(x))
        m, L_B = posterior(x)
        values = {"lengthscale": lengthscale, "variance": variance, "noise": noise, "Z": Z}
        return {**values, "m": np.asarray(m), "R": np.linalg.inv(L_B), "jitter": JITTER * variance}

    def callback(x) -> None:
        taken.append(None)
        if len(taken) % 4 == 0 or reduced:
            notes.write(len(taken), lambda: snapshot(x))

    def objective(x) -> tuple[float, np.ndarray]:
        value, gradient = step(x)
        return float(value), np.asarray(gradient)

    start = np.concatenate([logs, p["Z"].ravel()])
    options = {"maxiter": 2 if reduced else 40}
    scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B", callback=callback, options=options)
    return {"jax": jax.__version__, "scipy": scipy.__version__, "numpyro_sgp": sgp.__version__}


class Every:
    """Makes a callback of a function that is called each `every` steps; a class of `fit` once that is imported."""

    def __new__(cls, every: int, fn):
        import numpyro_sgp as sgp

        class Callback(sgp.AbstractCallback):
            def __init__(self) -> None:
                self.every = every

            def __call__(self, progress) -> None:
                fn(progress)

            def begin(self, saved) -> None:
                del saved

            def state(self) -> dict:
                return {}

        return Callback()


def child(name: str, folder: Path, started: float, reduced: bool) -> None:
    """One run; prints versions as JSON."""
    with np.load(folder / "problem.npz") as file:
        p = dict(file)
    notes = Notes(folder / "notes", Clock(started))
    run = {FULL: full, GPFLOW: gpflow}.get(name, ours)
    print(json.dumps(run(p, notes, name, reduced)))


def correlations(X: np.ndarray, Z: np.ndarray, note: dict) -> np.ndarray:
    """The kernel between rows of X and Z, (N, M)."""
    X, Z = X / note["lengthscale"], Z / note["lengthscale"]
    r2 = np.sum(X * X, 1)[:, None] + np.sum(Z * Z, 1) - 2.0 * X @ Z.T
    return note["variance"] * np.exp(-0.5 * np.maximum(r2, 0.0))


def judged(note: dict, p: dict, test: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Bound on the training data, RMSE and negative log predictive density on the test data."""
    from scipy.linalg import solve_triangular

    Z, m, R, noise = note["Z"], note["m"], note["R"], float(note["noise"])
    M = len(Z)
    L = np.linalg.cholesky(correlations(Z, Z, note) + note["jitter"] * np.eye(M))

    def marginals(X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        means, variances = [], []
        for rows in np.array_split(np.arange(len(X)), -(-len(X) // 4000)):
            A = solve_triangular(L, correlations(X[rows], Z, note).T, lower=True)
            means.append(A.T @ m)
            variances.append(note["variance"] - np.sum(A * A, 0) + np.sum((R @ A) ** 2, 0))
        return np.concatenate(means), np.concatenate(variances)

    mean, variance = marginals(p["X"])
    ell = -0.5 * np.sum(np.log(2.0 * np.pi * noise**2) + ((p["y"] - mean) ** 2 + variance) / noise**2)
    kl = 0.5 * (np.sum(R * R) + m @ m - M - 2.0 * np.linalg.slogdet(R)[1])
    mean, variance = marginals(test[0])
    error, variance = test[1] - mean, variance + noise**2
    return {
        "elbo": float(ell - kl),
        "rmse": float(np.sqrt(np.mean(error**2))),
        "nlpd": float(np.mean(0.5 * (np.log(2.0 * np.pi * variance) + error**2 / variance))),
    }


def measure(name: str, python: str, p: dict, test: tuple, reduced: bool) -> dict:
    """Run `child` in a process with one thread, then judge what it wrote down."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    environment = {**os.environ, **threads, "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if not reduced:
        environment = {key: value for key, value in environment.items() if not key.startswith("JAX_COMPILATION_CACHE")}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "problem.npz", **p)
        (Path(folder) / "notes").mkdir()
        command = [python, __file__, "--child", name, "--folder", folder, "--started", repr(time.time())]
        command += ["--reduced"] if reduced else []
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if result.returncode:
            raise RuntimeError(f"{name} failed:\n{result.stderr}")
        curve = []
        for path in sorted((Path(folder) / "notes").iterdir()):
            with np.load(path) as file:
                note = dict(file)
            wall, cpu = note["seconds"].tolist()
            curve.append({"step": int(note["step"]), "wall": wall, "cpu": cpu, **judged(note, p, test)})
    return {"versions": json.loads(result.stdout.splitlines()[-1]), "curve": curve}


def reached(curve: list[dict], target: dict) -> dict | None:
    """The first point that is at least as good as the target in everything."""
    for point in curve:
        if point["elbo"] >= target["elbo"] and point["rmse"] <= target["rmse"] and point["nlpd"] <= target["nlpd"]:
            return point
    return None


def figure(results: dict, target: dict, clock: str, path: Path) -> None:
    """ELBO, RMSE and negative log predictive density against seconds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    labels = {"elbo": "ELBO, all training data", "rmse": "test RMSE", "nlpd": "test NLPD"}
    panels, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for ax, (quantity, label) in zip(axes, labels.items(), strict=True):
        values = []
        for name, result in results.items():
            seconds, value = (np.array([point[key] for point in result["curve"]]) for key in (clock, quantity))
            style = "--" if name == GPFLOW else "-"
            ax.plot(seconds, value, style, marker=".", markersize=4, label=name)
            values.append(value)
        ax.axhline(target[quantity], color="0.6", linewidth=0.8)
        ax.set(xscale="log", xlabel=f"{clock} seconds from import on", title=label)
        ax.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
        # The first moments are far off the scale of what matters.
        low, high = (np.min if quantity == "elbo" else np.max)([v[len(v) // 4] for v in values]), target[quantity]
        best = (np.max if quantity == "elbo" else np.min)(np.concatenate(values))
        margin = 0.05 * abs(best - low)
        ends = sorted((low, best, high))
        ax.set_ylim(ends[0] - margin, ends[-1] + margin)
    panels.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    plt.savefig(path, dpi=110)
    print(f"figure written to {path}")


def problem(data: Path | None, M: int) -> tuple[dict, tuple]:
    """Training data with a start, and test data."""
    if data is None:
        rng = np.random.default_rng(0)
        X = rng.uniform(-2.0, 2.0, size=(600, 3))
        y = np.sin(2.0 * X).sum(1) + 0.1 * rng.normal(size=len(X))
        X, y, X_test, y_test = X[:500], y[:500], X[500:], y[500:]
    else:
        from common import data_set

        X, y, X_test, y_test = data_set(data)
    Z = X[np.random.default_rng(0).permutation(len(X))[:M]]
    return {"X": X, "y": y, "Z": Z, "lengthscale": np.full(X.shape[1], X.shape[1] ** 0.5)}, (X_test, y_test)


def main(arguments: argparse.Namespace) -> None:
    """Every run, the table and the figure."""
    from common import report

    reduced, M = arguments.reduced, 16 if arguments.reduced else 512
    p, test = problem(arguments.data, M)
    p["same_steps"] = arguments.same_steps
    names = ["AutoTSVGP, schedules", FULL] if reduced else [*VARIANTS, FULL]
    runs = dict.fromkeys(names, sys.executable)
    if arguments.gpflow_python:
        runs = {GPFLOW: arguments.gpflow_python, **runs}
    elif arguments.known is None:
        print("GPflow is missing: no `--gpflow-python` was given, so only numpyro_sgp runs.")
    if arguments.only:
        runs = {name: python for name, python in runs.items() if name in arguments.only}
    name = "synthetic" if arguments.data is None else arguments.data.stem
    print(f"{name}: N={len(p['X'])}, test {len(test[0])}, D={p['X'].shape[1]}, M={M}, one thread")
    results = json.loads(arguments.known.read_text("utf-8"))["runs"] if arguments.known else {}
    for run, python in runs.items():
        if run in results:
            continue
        load = os.getloadavg()[0]
        results[run] = {"load": load, **measure(run, python, p, test, reduced)}
        last = results[run]["curve"][-1]
        ends = f"ELBO {last['elbo']:9.1f}  RMSE {last['rmse']:.4f}  NLPD {last['nlpd']:7.4f}"
        print(
            f"{run:46s} {last['step']:5d} steps {last['wall']:7.1f} s wall {last['cpu']:7.1f} s CPU  {ends}", flush=True
        )
    target_of = GPFLOW if GPFLOW in results else next(iter(results))
    target = results[target_of]["curve"][-1]
    print(f"until ELBO, RMSE and NLPD are those of {target_of} at its end:")
    for run, result in results.items():
        point = result["reached"] = reached(result["curve"], target)
        if point is None:
            print(f"{run:46s} not reached")
            continue
        result["ratio"] = {key: point[key] / target[key] for key in ("wall", "cpu")}
        seconds = f"{point['wall']:7.1f} s wall ({result['ratio']['wall']:.2f})  {point['cpu']:7.1f} s CPU"
        print(f"{run:46s} {point['step']:5d} steps {seconds} ({result['ratio']['cpu']:.2f})")
    settings = {"set": name, "N": len(p["X"]), "M": M, "threads": 1, "target": target_of}
    report("time_to_quality", {**settings, "runs": results}, arguments.output)
    if arguments.figure is not None:
        figure(results, target, arguments.clock, arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a regression set as .npz with X, y and test_mask")
    parser.add_argument("--gpflow-python", help="interpreter with GPflow")
    parser.add_argument(
        "--same-steps",
        type=int,
        default=2000,
        help="steps of ours with GPflow's settings, which are constant: a shorter run is the beginning of a longer one",
    )
    parser.add_argument("--only", nargs="*", help="names of the runs to do")
    parser.add_argument("--known", type=Path, help="a result of an earlier call, whose runs are kept and not repeated")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="where to write the figure")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="the seconds of the figure")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.folder, options.started, options.reduced)
    else:
        main(options)
