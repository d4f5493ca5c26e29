"""Test errors of `AutoQSGP` beside SVGP: Table 2 of Evans and Nair (2020).

m random Fourier features of a squared exponential kernel with a lengthscale for each column. SVGP with 512 inducing
inputs is trained first, by natural gradients and Adam. All others start from it, at its hyperparameters, which train on
at a small rate. "inducing" starts at its posterior, and weights add to the mean what the 512 inducing variables cannot
say (`with_posterior`). "mean-field" and "chevron" have a covariance of the weights, the latter with 100 dense columns,
and start at the mean of SVGP at its inducing inputs and some rows of the data (`with_mean`). RMSE and mean negative log
probability (MNLP) are of outputs scaled by the training standard deviation; those of the mean where the weights start
are there too.

Runs are added to those that the output folder has already. `--summary` prints means over the folds.

    python benchmarks/qsgp_tables.py --data kin40k.npz [--folds 0 1] [--steps 1500] [--output results]
"""

import argparse
import dataclasses
from pathlib import Path
import time

from common import add_run, data_set, earlier, spread
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

METHODS = ("svgp", "mean-field", "chevron", "inducing")
# RMSE and MNLP, m = 10⁵, M = 10⁴, B = 500, 10⁵ steps.
PAPER = {
    "kin40k": {"mean-field": (0.174, 0.135), "chevron": (0.175, 0.139), "svgp": (0.247, 0.055)},
    "keggdirected": {"mean-field": (0.135, -0.821), "chevron": (0.135, -0.794), "svgp": (0.124, -0.953)},
}


def model_of(rank: int | None):
    """A GP with trained hyperparameters; with random Fourier features where a rank is given."""

    def model(X, y=None, num_data=None):
        positive = dist.constraints.positive
        lengthscale = numpyro.param("lengthscale", jnp.full(X.shape[1], X.shape[1] ** 0.5), constraint=positive)
        variance = numpyro.param("variance", 1.0, constraint=positive)
        noise = numpyro.param("noise", 0.3, constraint=positive)
        kernel = sgp.kernels.SquaredExponential(lengthscale, variance)
        if rank is not None:
            kernel = sgp.features.RandomFourier(kernel, rank, jax.random.key(0))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    return model


def scores(guide, params, X, y) -> tuple[float, float]:
    """RMSE and MNLP."""
    noise = float(params["noise"])
    squares, logs = 0.0, 0.0
    for rows in np.array_split(np.arange(len(X)), -(-len(X) // 2000)):
        q = guide.posterior(jax.random.key(0), params, X[rows])["f"]
        v = np.asarray(q.variance) + noise**2
        error = np.asarray(q.mean) - y[rows]
        squares += np.sum(error**2)
        logs += np.sum(0.5 * (error**2 / v + np.log(2 * np.pi * v)))
    return float(np.sqrt(squares / len(y))), float(logs / len(y))


def trained_svgp(data: tuple, settings: dict):
    """SVGP with its inducing inputs trained: guide, model, optimizer, batch."""
    X, steps, M = data[0], settings["svgp_steps"], settings["num_inducing"]
    model = model_of(None)
    inducing = sgp.kmeans(None, X[: 20 * M], jax.random.key(0), num_inducing=M)
    guide = sgp.AutoSVGP(model, inducing, natural=True, learn_inducing=True)
    rate = optax.cosine_decay_schedule(0.05, steps)
    return guide, model, sgp.NaturalGradient(optax.linear_schedule(0.1, 0.02, steps), optax.adam(rate)), 512


def quadruply(method: str, before: dict, settings: dict):
    """A QSGP: guide, model, optimizer, batch."""
    model, steps = model_of(settings["rank"]), settings["steps"]
    form = {"covariance": "chevron", "dense_columns": settings["dense_columns"] if method == "chevron" else 0}
    if method == "inducing":
        form = {"inducing": before["f_auto_inducing"].Z}
    guide = sgp.AutoQSGP(model, basis_batch=settings["basis_batch"], control=settings["control"], **form)
    step_size = optax.exponential_decay(settings["step_size"], steps, 0.02)
    return guide, model, sgp.RowSparse(step_size, optax.adam(optax.exponential_decay(1e-4, steps, 0.1))), 500


def started(method: str, guide, svi: SVI, first: tuple, data: tuple, before: dict, settings: dict):
    """The state at the hyperparameters and the posterior of SVGP, or at its mean where the covariance is of weights."""
    start = {name: before[name] for name in ("lengthscale", "variance", "noise")}
    params = svi.get_params(svi.init(jax.random.key(0), *first, init_params=start))
    if method == "inducing":
        process = sgp.process_posterior(before["guide"], jax.random.key(0), before["params"], data[0][:2])["f"]
        return svi.init(jax.random.key(0), *first, init_params=guide.with_posterior(params, process))
    if "weights" not in before:
        X, Z = data[0], np.asarray(before["f_auto_inducing"].Z)
        rows = np.random.default_rng(0).permutation(len(X))[: settings["start_rows"]]
        X_at = np.concatenate([Z, X[rows]])
        mean = before["guide"].posterior(jax.random.key(0), before["params"], X_at)["f"].mean
        before["weights"] = guide.with_mean(jax.random.key(0), params, mean, X_at)["f_auto_basis"].values[:, 0]
    table = params["f_auto_basis"]
    table = dataclasses.replace(table, values=table.values.at[:, 0].set(before["weights"]))
    return svi.init(jax.random.key(0), *first, init_params={**params, "f_auto_basis": table})


def run(method: str, data: tuple, before: dict, settings: dict) -> dict:
    """Scores of one method; what others start from is put into `before` by SVGP."""
    X, y, X_test, y_test = data
    build = trained_svgp(data, settings) if method == "svgp" else quadruply(method, before, settings)
    guide, model, optim, batch = build
    batch = min(batch, len(X))
    first = X[:batch], y[:batch], len(X)
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_nodes=3))
    clock = np.array([time.perf_counter(), time.process_time()])
    if method == "svgp":
        steps, state, start = settings["svgp_steps"], svi.init(jax.random.key(0), *first), {}
    else:
        steps, state = settings["steps"], started(method, guide, svi, first, data, before, settings)
        start = {"rmse at start": scores(guide, svi.get_params(state), X_test, y_test)[0]}
    result = sgp.fit(
        svi, jax.random.key(1), (X, y), batch_size=batch, num_steps=steps, init_state=state, progress_bar=False
    )
    jax.block_until_ready(result.losses)
    wall, cpu = np.array([time.perf_counter(), time.process_time()]) - clock
    rmse, mnlp = scores(guide, result.params, X_test, y_test)
    if method == "svgp":
        before.update(result.params, guide=guide, params=result.params)
    found = {"rmse": rmse, "mnlp": mnlp, **start, "noise": float(result.params["noise"])}
    return {**found, "wall": float(wall), "cpu": float(cpu), "refused": int(sgp.num_refused(result.state))}


def main(arguments: argparse.Namespace) -> None:
    """Each method on each fold of each data set."""
    settings = {
        "steps": arguments.steps,
        "svgp_steps": arguments.svgp_steps,
        "rank": arguments.rank,
        "basis_batch": arguments.basis_batch,
        "num_inducing": 512,
        "dense_columns": 100,
        "control": arguments.control,
        "step_size": arguments.step_size,
        "start_rows": arguments.start_rows,
    }
    sets: list[tuple[str, Path | None]] = [(path.stem, path) for path in arguments.data]
    methods, folds = arguments.methods, arguments.folds
    if arguments.reduced:
        settings.update(steps=5, svgp_steps=5, rank=200, basis_batch=40, num_inducing=8)
        settings.update(dense_columns=2, control=10, start_rows=20)
        sets, folds, methods = [("sines", None)], [0], ["svgp", "inducing"]
    if arguments.summary:
        summary(earlier("qsgp_tables", settings, arguments.output))
        return
    for name, path in sets:
        for fold in folds:
            kept = earlier("qsgp_tables", settings, arguments.output).get(name, {}).get(str(fold), {})
            if set(methods) <= set(kept):
                continue
            data = problem(path, fold)
            svgp: dict = {}
            for method in METHODS:
                # SVGP is where the others start, so it is trained again for one that is missing.
                if method != "svgp" and (method not in methods or method in kept):
                    continue
                kept[method] = run(method, data, svgp, settings)
                cells = (f"{key} {value:.4g}" for key, value in kept[method].items())
                print(f"{name:12s} fold {fold} {method:10s}", *cells, flush=True)
                add_run("qsgp_tables", {"settings": settings}, name, fold, kept, arguments.output)


def problem(path: Path | None, fold: int) -> tuple[np.ndarray, ...]:
    """Training and test data in single precision."""
    if path is not None:
        return tuple(part.astype(np.float32) for part in data_set(path, fold))
    rng = np.random.default_rng(fold)
    X = rng.normal(size=(240, 2))
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=240)
    return tuple(part.astype(np.float32) for part in (X[:200], y[:200], X[200:], y[200:]))


def summary(every: dict) -> None:
    """Mean and standard deviation over folds of each method, beside the paper's."""
    for name, folds in every.items():
        print(f"{name}, {len(folds)} folds")
        for method in METHODS:
            found = [fold[method] for fold in folds.values() if method in fold]
            if found:
                cells = ((key, [row[key] for row in found]) for key in ("rmse", "mnlp", "cpu"))
                line = (f"{key} {spread(values)}" for key, values in cells)
                print(f"  {method:<12}", *line, "paper", PAPER.get(name, {}).get(method, "-"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="sets as .npz with X, y and test_mask")
    parser.add_argument("--folds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--svgp-steps", type=int, default=1500)
    parser.add_argument("--rank", type=int, default=100_000)
    parser.add_argument("--basis-batch", type=int, default=1000)
    parser.add_argument("--control", type=int, default=500, help="inputs of the control variate")
    parser.add_argument("--step-size", type=float, default=0.1)
    parser.add_argument("--start-rows", type=int, default=3500, help="of the data, at which the mean starts as SVGP's")
    parser.add_argument("--summary", action="store_true", help="print means over the folds of an earlier result")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    options = parser.parse_args()
    if not (options.reduced or options.summary or options.data):
        parser.error("`--data` is needed; without it there is only `--reduced`.")
    main(options)
