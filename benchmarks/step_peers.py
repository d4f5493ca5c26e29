"""Time and memory of one training step on a minibatch: numpyro_sgp beside GPflow, GPyTorch, GPJax and plain NumPyro.

A step is a natural step on q and an Adam step on lengthscales, variance and inducing inputs: Bernoulli likelihood with
logits, 8 input columns, batches of 256, float64, a jitter of 1e-6, 20 quadrature nodes. All libraries start at the same
q, hyperparameters and inducing inputs and take the same batches; q is compared by the bound of the first batch before
and after a natural step alone, and tied sites and whitened natural parameters must give the same number. Plain NumPyro
is what one writes without a sparse-GP package: whitened inducing variables in the model, `AutoMultivariateNormal`,
`Trace_ELBO` and Adam on everything, without a natural step.

Each library is a process of its own with one thread. All are started first, then take a few steps in turn, several
times round, so that load of the machine hits all alike. Peers run under the interpreters given, and only if one is:

    python benchmarks/step_peers.py --gpflow-python ../peers/bin/python --gpytorch-python ../peers/bin/python \
        --gpjax-python ../gpjax/bin/python [--numbers 64 128] [--output results] [--figure speed.png]

With `--numbers`, the rows of other M that the result file holds are kept.
"""

import argparse
from collections.abc import Callable
import ctypes
import json
import os
from pathlib import Path
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np

if "--child" in sys.argv and hasattr(os, "sched_setaffinity"):
    # XLA's pool has a thread for each core that it sees, whatever it is told: one core for all, before it looks.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

NUMBERS = (64, 128, 256, 512, 1024)
COLUMNS, NUM_BATCHES, STEP_SIZE, LEARNING_RATE, JITTER = 8, 40, 0.1, 1e-2, 1e-6
WARM_UP = 4


class Subject(NamedTuple):
    """A library set up on the problem.

    Attributes:
        step: one training step on the batch of the given index; returns when it is done.
        natural: a natural step alone, on the first batch; None where there is none.
        bound: the bound of the first batch.
        versions: of the library and what it runs on.
    """

    step: Callable[[int], None]
    natural: Callable[[], None] | None
    bound: Callable[[], float]
    versions: dict[str, str]


def problem(M: int, B: int) -> dict[str, np.ndarray]:
    """Batches (NUM_BATCHES, B, ...), and inducing inputs that are rows of other batches than the first ones."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(NUM_BATCHES * B, COLUMNS))
    y = (np.sin(2.0 * X[:, 0]) + X[:, 1] + 0.3 * rng.normal(size=len(X)) > 0).astype(float)
    Z = np.ascontiguousarray(X[::-1][:M])
    return {"X": X.reshape(NUM_BATCHES, B, COLUMNS), "y": y.reshape(NUM_BATCHES, B), "Z": Z}


def num_data(p: dict[str, np.ndarray]) -> int:
    return p["y"].size


def ours(family: str) -> Callable[[dict], Subject]:
    """numpyro_sgp with whitened natural parameters or tied sites."""

    def setup(p: dict) -> Subject:
        import jax

        jax.config.update("jax_enable_x64", True)
        import jax.numpy as jnp
        import numpyro
        import numpyro.distributions as dist
        import optax

        import numpyro_sgp as sgp

        X, y, Z = (jnp.asarray(p[name]) for name in ("X", "y", "Z"))
        N, positive = num_data(p), dist.constraints.positive

        def model(X, y):
            lengthscale = numpyro.param("lengthscale", jnp.full(COLUMNS, 2.0), constraint=positive)
            variance = numpyro.param("variance", 1.0, constraint=positive)
            kernel = sgp.kernels.SquaredExponential(lengthscale, variance)
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, jitter=JITTER))
            with numpyro.plate("data", N, subsample_size=X.shape[0]):
                numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

        guide = {
            "whitened": lambda: sgp.AutoSVGP(model, Z, natural=True, learn_inducing=True),
            "t-SVGP": lambda: sgp.AutoTSVGP(model, Z, learn_inducing=True),
            "t-SVGP, Z fixed": lambda: sgp.AutoTSVGP(model, Z),
        }[family]()

        def svi_with(m_steps: int):
            optim = sgp.NaturalGradient(STEP_SIZE, optax.adam(LEARNING_RATE), m_steps=m_steps)
            return numpyro.infer.SVI(model, guide, optim, sgp.QuadratureELBO(num_nodes=20))

        svi, svi_natural = svi_with(1), svi_with(0)
        svi_natural.init(jax.random.key(0), X[0], y[0])
        # A copy of each leaf, so that all may be donated.
        holder = {"state": jax.tree.map(jnp.copy, svi.init(jax.random.key(0), X[0], y[0]))}
        update = jax.jit(svi.update, donate_argnums=0)
        update_q, evaluate = jax.jit(svi_natural.update), jax.jit(svi.evaluate)

        def step(i: int) -> None:
            holder["state"], loss = update(holder["state"], X[i], y[i])
            jax.block_until_ready((holder["state"], loss))

        def natural() -> None:
            holder["state"], _ = update_q(holder["state"], X[0], y[0])
            holder["state"] = jax.tree.map(jnp.copy, holder["state"])

        def bound() -> float:
            return -float(evaluate(holder["state"], X[0], y[0]))

        versions = {"numpyro_sgp": sgp.__version__, "jax": jax.__version__, "numpyro": numpyro.__version__}
        return Subject(step, natural, bound, versions)

    return setup


def plain_numpyro(p: dict) -> Subject:
    """Whitened inducing variables written by hand: v ~ N(0, I), f | v drawn in the model, all trained by Adam."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoMultivariateNormal
    import optax

    X, y, Z = (jnp.asarray(p[name]) for name in ("X", "y", "Z"))
    N, M, positive = num_data(p), len(p["Z"]), dist.constraints.positive

    def covariance(X, Z, lengthscale, variance):
        X, Z = X / lengthscale, Z / lengthscale
        r2 = jnp.sum(X * X, axis=1)[:, None] + jnp.sum(Z * Z, axis=1) - 2.0 * X @ Z.T
        return variance * jnp.exp(-0.5 * jnp.maximum(r2, 0.0))

    def model(X, y):
        lengthscale = numpyro.param("lengthscale", jnp.full(COLUMNS, 2.0), constraint=positive)
        variance = numpyro.param("variance", 1.0, constraint=positive)
        inducing = numpyro.param("Z", Z)
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([M]).to_event(1))
        L = jnp.linalg.cholesky(covariance(inducing, inducing, lengthscale, variance) + JITTER * jnp.eye(M))
        A = jax.scipy.linalg.solve_triangular(L, covariance(inducing, X, lengthscale, variance), lower=True)
        residual = jnp.maximum(variance - jnp.sum(A * A, axis=0), 0.0) + 1e-12
        f = A.T @ v + jnp.sqrt(residual) * jax.random.normal(numpyro.prng_key(), (X.shape[0],))
        with numpyro.plate("data", N, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    start = numpyro.infer.init_to_value(values={"v": jnp.zeros(M)})
    guide = AutoMultivariateNormal(model, init_loc_fn=start, init_scale=1.0)
    svi = SVI(model, guide, optax.adam(LEARNING_RATE), Trace_ELBO())
    holder = {"state": jax.tree.map(jnp.copy, svi.init(jax.random.key(0), X[0], y[0]))}
    update = jax.jit(svi.update, donate_argnums=0)
    svi_many = SVI(model, guide, optax.adam(LEARNING_RATE), Trace_ELBO(num_particles=200))
    svi_many.init(jax.random.key(0), X[0], y[0])
    evaluate = jax.jit(svi_many.evaluate)

    def step(i: int) -> None:
        holder["state"], loss = update(holder["state"], X[i], y[i])
        jax.block_until_ready((holder["state"], loss))

    def bound() -> float:
        return -float(evaluate(holder["state"], X[0], y[0]))

    return Subject(step, None, bound, {"numpyro": numpyro.__version__, "jax": jax.__version__})


def gpflow(p: dict) -> Subject:
    """SVGP, whitened; `NaturalGradient` on q, then Adam on the rest, in one compiled function."""
    import gpflow
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    gpflow.config.set_default_jitter(JITTER)
    X, y, Z = p["X"], p["y"][..., None], p["Z"]
    kernel = gpflow.kernels.SquaredExponential(variance=1.0, lengthscales=np.full(COLUMNS, 2.0))
    likelihood = gpflow.likelihoods.Bernoulli(invlink=tf.sigmoid)
    model = gpflow.models.SVGP(kernel, likelihood, Z.copy(), whiten=True, num_data=num_data(p))
    q = [(model.q_mu, model.q_sqrt)]
    gpflow.set_trainable(model.q_mu, False)
    gpflow.set_trainable(model.q_sqrt, False)
    natural_gradient = gpflow.optimizers.NaturalGradient(gamma=STEP_SIZE)
    adam = tf.keras.optimizers.Adam(LEARNING_RATE)
    adam.build(model.trainable_variables)
    batches = [(tf.constant(a), tf.constant(b)) for a, b in zip(X, y, strict=True)]

    @tf.function
    def natural_step(batch):
        natural_gradient.minimize(lambda: model.training_loss(batch), q)

    @tf.function
    def both(batch):
        natural_gradient.minimize(lambda: model.training_loss(batch), q)
        with tf.GradientTape() as tape:
            loss = model.training_loss(batch)
        variables = model.trainable_variables
        adam.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    evaluate = tf.function(model.elbo)

    def step(i: int) -> None:
        both(batches[i]).numpy()

    versions = {"gpflow": gpflow.__version__, "tensorflow": tf.__version__}
    return Subject(step, lambda: natural_step(batches[0]), lambda: float(evaluate(batches[0])), versions)


def gpytorch(distribution: str) -> Callable[[dict], Subject]:
    """`VariationalStrategy` with natural parameters, or their triangular root; NGD and Adam from one backward pass."""

    def setup(p: dict) -> Subject:
        import gpytorch
        import torch

        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        X, y, Z = (torch.tensor(p[name]) for name in ("X", "y", "Z"))
        N = num_data(p)

        class Bernoulli(gpytorch.likelihoods._OneDimensionalLikelihood):
            def forward(self, function_samples, *args, **kwargs):
                del args, kwargs
                return torch.distributions.Bernoulli(logits=function_samples)

        class Model(gpytorch.models.ApproximateGP):
            def __init__(self):
                q = getattr(gpytorch.variational, distribution)(len(Z), mean_init_std=0.0)
                strategy = gpytorch.variational.VariationalStrategy(self, Z.clone(), q, jitter_val=JITTER)
                super().__init__(strategy)
                self.mean_module = gpytorch.means.ZeroMean()
                self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=COLUMNS))
                self.covar_module.outputscale = 1.0
                self.covar_module.base_kernel.lengthscale = torch.full((COLUMNS,), 2.0)

            def forward(self, x):
                return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

        model, likelihood = Model().train(), Bernoulli().train()
        elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=N)
        ngd = gpytorch.optim.NGD(model.variational_parameters(), num_data=N, lr=STEP_SIZE)
        adam = torch.optim.Adam(model.hyperparameters(), lr=LEARNING_RATE)

        def loss(i: int):
            with gpytorch.settings.num_gauss_hermite_locs(20), gpytorch.settings.max_cholesky_size(10_000):
                return -elbo(model(X[i]), y[i])

        def gradients(i: int) -> None:
            ngd.zero_grad()
            adam.zero_grad()
            loss(i).backward()

        def step(i: int) -> None:
            gradients(i)
            ngd.step()
            adam.step()

        def natural() -> None:
            gradients(0)
            ngd.step()

        def bound() -> float:
            with torch.no_grad():
                return -N * float(loss(0))

        return Subject(step, natural, bound, {"gpytorch": gpytorch.__version__, "torch": torch.__version__})

    return setup


def gpjax(family: str) -> Callable[[dict], Subject]:
    """The step of `fit_natgrads`, compiled, on the given batches."""

    def setup(p: dict) -> Subject:
        import jax

        jax.config.update("jax_enable_x64", True)
        import equinox as eqx
        import gpjax as gpx
        from gpjax.natural_gradients import natural_gradient_step, partition_variational
        import jax.numpy as jnp
        import numpyro.distributions as dist
        import optax

        class Bernoulli(gpx.likelihoods.Bernoulli):
            def link_function(self, f):
                return dist.Bernoulli(logits=f)

        X, y, Z = (jnp.asarray(p[name]) for name in ("X", "y", "Z"))
        N = num_data(p)
        kernel = gpx.kernels.RBF(lengthscale=jnp.full(COLUMNS, 2.0), variance=1.0)
        prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=kernel, jitter=JITTER)
        posterior = prior * Bernoulli()
        q = getattr(gpx.variational_families, family)(model=posterior, inducing_inputs=Z)
        elbo = gpx.objectives.dual_elbo if family == "DualVariationalGaussian" else gpx.objectives.elbo
        optim = optax.adam(LEARNING_RATE)
        q, rest = partition_variational(q)
        holder = {"q": q, "rest": rest, "adam": optim.init(eqx.filter(rest, eqx.is_array))}

        def data(X, y):
            return gpx.Dataset(X=X, y=y[:, None], n_total=N)

        def loss(model, batch):
            return -elbo(model, batch)

        def natural_step(q, rest, X, y):
            return natural_gradient_step(q, rest, data(X, y), loss, jnp.asarray(STEP_SIZE))

        @eqx.filter_jit(donate="all-except-first")
        def both(batch, q, rest, adam):
            q, value = natural_step(q, rest, *batch)
            gradients = eqx.filter_grad(lambda rest: loss(eqx.combine(q, rest), data(*batch)))(rest)
            updates, adam = optim.update(gradients, adam, eqx.filter(rest, eqx.is_array))
            return q, eqx.apply_updates(rest, updates), adam, value

        only_natural = eqx.filter_jit(natural_step)
        evaluate = eqx.filter_jit(lambda q, rest, X, y: elbo(eqx.combine(q, rest), data(X, y)))

        def step(i: int) -> None:
            result = both((X[i], y[i]), holder["q"], holder["rest"], holder["adam"])
            holder["q"], holder["rest"], holder["adam"], _ = jax.block_until_ready(result)

        def natural() -> None:
            holder["q"], _ = only_natural(holder["q"], holder["rest"], X[0], y[0])

        def bound() -> float:
            return float(evaluate(holder["q"], holder["rest"], X[0], y[0]))

        return Subject(step, natural, bound, {"gpjax": gpx.__version__, "jax": jax.__version__})

    return setup


# Name, how to set it up, and the option that gives its interpreter (None: the one that runs this script).
SUBJECTS: dict[str, tuple[Callable[[dict], Subject], str | None]] = {
    "numpyro_sgp whitened": (ours("whitened"), None),
    "numpyro_sgp t-SVGP": (ours("t-SVGP"), None),
    "numpyro_sgp t-SVGP, Z fixed": (ours("t-SVGP, Z fixed"), None),
    "plain NumPyro": (plain_numpyro, None),
    "GPflow": (gpflow, "gpflow"),
    "GPyTorch natural": (gpytorch("NaturalVariationalDistribution"), "gpytorch"),
    "GPyTorch triangular": (gpytorch("TrilNaturalVariationalDistribution"), "gpytorch"),
    "GPJax whitened": (gpjax("WhitenedVariationalGaussian"), "gpjax"),
    "GPJax dual": (gpjax("DualVariationalGaussian"), "gpjax"),
}
PACKAGES = {"gpflow": "gpflow", "gpytorch": "gpytorch", "gpjax": "gpjax"}
PEERS = tuple(name for name, (_, option) in SUBJECTS.items() if option)


def megabytes(field: str) -> float:
    """A field of the process's status, VmRSS (now) or VmHWM (highest)."""
    text = Path("/proc/self/status").read_text("ascii")
    return int(text.split(field + ":")[1].split()[0]) / 1024


def trimmed() -> float:
    """Memory in use after what is free was given back, MB; the highest mark starts anew from here."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return megabytes("VmRSS")


def child(name: str, path: Path) -> None:
    """Set up one library, then answer a request at a time: a number of steps to take, or 0 for the end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    with np.load(path) as file:
        p = dict(file)
    setup, option = SUBJECTS[name]
    __import__(PACKAGES[option] if option else "numpyro_sgp")
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    subject = setup(p)
    bounds = {"bound_start": subject.bound()}
    if subject.natural is not None:
        subject.natural()
        bounds["bound_natural"] = subject.bound()
    position = WARM_UP
    for i in range(WARM_UP):  # GPJax compiles its step again for what the first ones return
        subject.step(i)
    before = trimmed()
    answer({**bounds, "versions": subject.versions})
    while count := int(sys.stdin.readline()):
        cpu, wall = [], []
        for _ in range(count):
            start = time.process_time(), time.perf_counter()
            subject.step(position % NUM_BATCHES)
            cpu.append(1e3 * (time.process_time() - start[0]))
            wall.append(1e3 * (time.perf_counter() - start[1]))
            position += 1
        answer({"cpu_ms": cpu, "wall_ms": wall})
    highest = megabytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    memory = {"memory_mb": max(peak, highest) - imported, "memory_steps_mb": highest - before}
    answer({**memory, "bound_end": subject.bound(), "steps": position})


class Process:
    """A library in a process of its own, with one thread."""

    def __init__(self, name: str, python: str, path: Path) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
        environment = {**os.environ, **threads, "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [python, str(Path(__file__).resolve()), "--child", name, "--problem", str(path)]
        self.name, self.errors = name, tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, env=environment
        )

    def read(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"{self.name} failed:\n{self.errors.read()}")
        return json.loads(line)

    def ask(self, count: int) -> dict[str, Any]:
        """Have it take steps, or end with 0."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def measure(M: int, B: int, pythons: dict[str, str], rounds: int, count: int) -> list[dict]:
    """One row for each library at one M."""
    processes: list[Process] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "problem.npz"
            np.savez(path, **problem(M, B))
            rows = {}
            for name, python in pythons.items():  # one after the other: compilation takes all of a core
                processes.append(Process(name, python, path))
                rows[name] = {"library": name, "M": M, "B": B, "cpu": [], "wall": [], **processes[-1].read()}
            for _ in range(rounds):
                for process in processes:
                    times = process.ask(count)
                    rows[process.name]["cpu"] += times["cpu_ms"]
                    rows[process.name]["wall"] += times["wall_ms"]
            for process in processes:
                rows[process.name] |= process.ask(0)
    finally:
        for process in processes:
            process.close()
    for row in rows.values():
        for clock in ("cpu", "wall"):
            times = row.pop(clock)
            row[f"{clock}_ms"], row[f"{clock}_ms_median"] = min(times), float(np.median(times))
        row["load"] = os.getloadavg()
    return list(rows.values())


def compare(rows: list[dict]) -> None:
    """Add the relative differences of the bounds to those of our whitened natural parameters."""
    own = rows[0]
    for row in rows:
        for name in ("bound_start", "bound_natural"):
            row[f"{name}_difference"] = (row[name] - own[name]) / abs(own[name]) if name in row else None


def check_same_work(rows: list[dict]) -> None:
    """Raise where libraries that take the same natural step do not agree about the bound."""
    for row in rows:
        # Plain NumPyro samples its bound. GPyTorch's triangular root takes a step of its own, which is only recorded.
        sampled, other = "plain NumPyro" in row["library"], "triangular" in row["library"]
        tolerance = {"bound_start": 1e-1 if sampled else 1e-6, "bound_natural": np.inf if other else 1e-6}
        for name, largest in tolerance.items():
            difference = row[f"{name}_difference"]
            if difference is not None and not abs(difference) < largest:
                raise RuntimeError(f"{row['library']}, M={row['M']}: {name} is {row[name]}, of ours {rows[0][name]}")


def draw(table: list[dict], path: Path) -> None:
    """CPU time of a step against M."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    styles = {
        "numpyro_sgp whitened": ("C0", "o", "-"),
        "numpyro_sgp t-SVGP": ("C3", "o", "-"),
        "numpyro_sgp t-SVGP, Z fixed": ("C3", "o", ":"),
        "plain NumPyro": ("0.5", "x", "--"),
        "GPflow": ("C1", "s", "-"),
        "GPyTorch natural": ("C2", "^", "-"),
        "GPyTorch triangular": ("C2", "^", ":"),
        "GPJax whitened": ("C4", "D", "-"),
        "GPJax dual": ("C4", "D", ":"),
    }
    figure, axes = plt.subplots(figsize=(7.0, 4.5), layout="constrained")
    for name, (colour, marker, line) in styles.items():
        points = sorted((row["M"], row["cpu_ms"]) for row in table if row["library"] == name)
        if points:
            axes.loglog(*zip(*points, strict=True), color=colour, marker=marker, ls=line, ms=5, label=name)
    numbers = sorted({row["M"] for row in table})
    axes.set_xticks(numbers, [str(M) for M in numbers])
    axes.minorticks_off()
    axes.set_xlabel("inducing inputs M")
    axes.set_ylabel("CPU time of a step, ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
    print(f"figure written to {path}")


def main(arguments: argparse.Namespace) -> None:
    """Every M, every library."""
    from common import report

    given = {option: getattr(arguments, f"{option}_python") for option in PACKAGES}
    missing = [option for option, python in given.items() if python is None]
    if missing:
        print(f"not measured, because no interpreter is given: {', '.join(missing)}")
    for option, python in given.items():
        if python is None:
            continue
        found = subprocess.run(
            [python, "-c", f"import {PACKAGES[option]}"], capture_output=True, text=True, check=False
        )
        if found.returncode:
            raise RuntimeError(f"--{option}-python {python} has no {PACKAGES[option]}:\n{found.stderr}")
    pythons = {
        name: sys.executable if option is None else given[option]
        for name, (_, option) in SUBJECTS.items()
        if option not in missing and not (arguments.reduced and "t-SVGP" in name)
    }
    kept: list[dict] = []
    if arguments.reduced:
        sizes = {8: (1, 2)}
    else:
        every = {64: (6, 6), 128: (6, 6), 256: (6, 4), 512: (5, 3), 1024: (4, 2)}
        sizes = {M: every[M] for M in arguments.numbers or NUMBERS}
        previous = arguments.output / "step_peers.json" if arguments.output else None
        if arguments.numbers and previous is not None and previous.exists():
            kept = [row for row in json.loads(previous.read_text())["table"] if row["M"] not in sizes]
    table = []
    for M, (rounds, count) in sizes.items():
        rows = measure(M, 32 if arguments.reduced else 256, pythons, rounds, count)
        compare(rows)
        own = rows[0]["cpu_ms"]
        for row in rows:
            difference = row["bound_natural_difference"]
            print(
                f"M={M:5d} {row['library']:28s} CPU {row['cpu_ms']:7.1f} (median {row['cpu_ms_median']:7.1f}) ms "
                f"({row['cpu_ms'] / own:5.2f} x)  wall {row['wall_ms']:7.1f} ms  memory {row['memory_mb']:6.0f} MB, "
                f"in steps {row['memory_steps_mb']:5.0f} MB  bound {row['bound_start']:.4f} -> "
                + (f"{row['bound_natural']:.4f} ({difference:.0e})" if difference is not None else "no natural step")
                + f" -> {row['bound_end']:.1f} after {row['steps']} steps",
                flush=True,
            )
        check_same_work(rows)
        table += rows
    table = sorted(kept + table, key=lambda row: row["M"])
    report("step_peers", {"threads": 1, "table": table}, arguments.output)
    if arguments.figure:
        draw(table, arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in PACKAGES:
        parser.add_argument(f"--{option}-python", help=f"interpreter with {PACKAGES[option]}")
    parser.add_argument("--numbers", type=int, nargs="*", choices=NUMBERS, help="values of M; all if not given")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="file for the figure")
    parser.add_argument("--child", choices=SUBJECTS, help=argparse.SUPPRESS)
    parser.add_argument("--problem", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.problem)
    else:
        main(options)
