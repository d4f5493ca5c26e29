"""Deep kernels learnt on small batches: negative log marginal likelihood per row and RMSE, method by method.

The setting of Shoham and Avron (2025), tables 2 to 5: a network of two layers of 128 rectified linear units; its
outputs are the features ("linear"), or go through 1000 random features of a squared exponential kernel ("gaussian").
Every method has the same number of epochs, the same start, and Adam at a rate that falls along a cosine, from the one
of `--rates` with which the method has the best marginal likelihood on the first fold (the paper chose it likewise);
natural gradients have the better of two step sizes too. That likelihood is the one of all training rows at the
hyperparameters, exactly; as in the paper, a run is judged where it was best, at one of `--checks` equal distances,
all of which are kept. RMSE is that of the exact posterior there, in units of the standard deviation of the outputs;
SVGP, with as many inducing inputs as a batch has rows, predicts by its own posterior, and its likelihood is that of its
kernel, for "gaussian" through the same random features. To compare with the paper, whose outputs keep their units, add
the logarithm of that standard deviation, which is kept as well.

`--optimizer adadelta` takes the paper's optimizer instead, at a constant rate.

With "held" a method's q is made anew each time that as many rows as `HELD` were seen, and not in each step.

Each kernel, number of epochs and optimizer has a file of its own. Runs that the one in `--output` already has are not
repeated: sets, folds and methods can be added one by one. The figure is that of both measures along the runs of the
first fold.

    python benchmarks/finite_rank_tables.py --data kin40k.npz bike.npz [--folds 0 1 2 3 4] [--epochs 50]
        [--kernel gaussian] [--batches 32] [--output results] [--figure curves.png]
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import time

from common import data_set, earlier, report, spread
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
import optax

import numpyro_sgp as sgp

FULL = {"width": 128, "rank": 1000, "batches": {"linear": [32, 128], "gaussian": [16, 64]}}
REDUCED = {"width": 8, "rank": 20, "batches": {"linear": [16], "gaussian": [16]}}
# Rows for each weight in the averages of sites. Where they make the mean too, noise of a batch is noise of the mean.
WINDOWS = {"natural gradient": [5.0, 25.0], "natural gradient, held": [5.0, 25.0]}
# Rows of the batches for which q is held where it is not made anew in each step.
HELD = 640
METHODS = ["natural gradient", "mean and natural precision", "compositional", "minimax", "batch evidence", "SVGP"]
METHODS += ["natural gradient, held", "mean and natural precision, held"]
REDUCED_METHODS = {"linear": METHODS[1:4], "gaussian": METHODS[5:7]}


def network(weights, X):
    """Two layers of rectified linear units."""
    for W, b in weights:
        X = jax.nn.relu(X @ W + b)
    return X


def start_of_network(key, D: int, width: int, dtype):
    """Weights at the scale at which rectified linear units keep the size of what they are given."""
    keys = jax.random.split(key, 2)
    sizes = [(D, width), (width, width)]
    return [
        (jax.random.normal(k, size, dtype) * (2.0 / size[0]) ** 0.5, jnp.zeros(size[1], dtype))
        for k, size in zip(keys, sizes, strict=True)
    ]


def make_model(kind: str, p: dict, D: int, dtype, *, infinite: bool):
    """Regression with a deep kernel; `infinite` for the squared exponential kernel itself."""
    first = start_of_network(jax.random.key(0), D, p["width"], dtype)

    def model(X, y=None, num_data=None):
        def positive(name, value):
            return numpyro.param(name, jnp.asarray(value, dtype), constraint=dist.constraints.positive)

        weights = numpyro.param("network", first)
        variance, noise = positive("variance", 1.0 / p["width"] if kind == "linear" else 1.0), positive("noise", 0.5)
        if kind == "linear":
            kernel = sgp.features.FeatureMap(network, weights, variance)
        else:
            inner = sgp.kernels.SquaredExponential(positive("lengthscale", p["width"] ** 0.5), variance)
            kernel = sgp.kernels.Warp(inner, jax.tree_util.Partial(network, weights))
            if not infinite:
                kernel = sgp.features.RandomFourier(kernel, p["rank"], jax.random.key(1))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    return model


def whitened(kind: str, p: dict, params, X):
    """Features of weights with variance one."""
    if kind == "linear":
        return jnp.sqrt(params["variance"]) * network(params["network"], X)
    inner = sgp.kernels.SquaredExponential(params["lengthscale"], params["variance"])
    kernel = sgp.kernels.Warp(inner, jax.tree_util.Partial(network, params["network"]))
    kernel = sgp.features.RandomFourier(kernel, p["rank"], jax.random.key(1))
    return jnp.sqrt(params["variance"]) * kernel.features(X)


def judged(features, params, data, test) -> tuple[float, float]:
    """−log p(y) a row of the training data, and the RMSE of the exact posterior; sums in double precision."""

    def chunks(X):
        return (np.asarray(features(params, part), np.float64) for part in np.array_split(X, -(-len(X) // 4096)))

    X, y = data
    noise = float(params["noise"]) ** 2
    parts = np.array_split(y.astype(float), -(-len(X) // 4096))
    gram: np.ndarray | float = 0.0
    product: np.ndarray | float = 0.0
    for Phi, rows in zip(chunks(X), parts, strict=True):
        gram, product = gram + Phi.T @ Phi, product + Phi.T @ rows
    r, N = len(product), len(y)
    L = np.linalg.cholesky(gram + noise * np.eye(r))
    w = np.linalg.solve(L.T, np.linalg.solve(L, product))
    misfit = sum(np.sum((rows - Phi @ w) ** 2) for Phi, rows in zip(chunks(X), parts, strict=True))
    value = misfit / noise + w @ w + 2.0 * np.sum(np.log(np.diag(L))) + (N - r) * np.log(noise) + N * np.log(2 * np.pi)
    error = np.concatenate([Phi @ w for Phi in chunks(test[0])]) - test[1]
    return float(0.5 * value / N), float(np.sqrt(np.mean(error**2)))


def refresh_of(method: str, batch: int) -> int:
    """Steps after which q is made anew."""
    return max(HELD // batch, 1) if method.endswith(", held") else 1


def svi_of(method: str, kind: str, p: dict, data, batch: int, steps: int, rate: float, window: float) -> SVI:
    """Model, guide, optimizer and loss of a method."""
    X, dtype = data[0], data[0].dtype
    model = make_model(kind, p, X.shape[1], dtype, infinite=method == "SVGP")
    rank = batch if method == "SVGP" else p["width"] if kind == "linear" else p["rank"]

    def rho(t):
        # A plain mean at first, then averages over some rows for each weight: what is older has other features.
        return jnp.maximum(1.0 / (1.0 + t), min(batch / (window * rank), 1.0))

    if p.get("optimizer") == "adadelta":
        others = optax.adadelta(rate)
    else:
        others = optax.adam(optax.cosine_decay_schedule(rate, steps))
    # Until q has seen twenty rows for each weight it is near the prior, and features would shrink from its variance;
    # those of a network, that is, since cosines cannot.
    wait = int(20 * rank / batch) if kind == "linear" else 0
    # By a mask, so that Adam begins then: its averages of gradients that were zero would make its first steps longer.
    waiting = optax.conditionally_mask(others, lambda t: t >= wait)
    elbo = sgp.QuadratureELBO(num_nodes=3)  # exact: the logarithm of a normal density is a quadratic

    def weights(parametrization, **options):
        return sgp.AutoWeightSpaceGP(model, parametrization=parametrization, base=AutoDelta, **options)

    forms = {"natural gradient": "natural", "mean and natural precision": "mean"}
    form = forms.get(method.removesuffix(", held"))
    if form is not None:
        return SVI(model, weights(form, refresh=refresh_of(method, batch)), sgp.NaturalGradient(rho, waiting), elbo)
    if method == "compositional":
        return SVI(model, weights("averaged"), others, sgp.CompositionalMarginalLikelihood(lambda t: (1.0 + t) ** -0.5))
    if method == "minimax":
        players = sgp.DescentAscent(others, optax.sgd(optax.cosine_decay_schedule(1e-3, steps)))
        scale = float(np.sqrt(len(X)))
        return SVI(model, weights("adversarial", root_scale=scale), players, sgp.MinimaxMarginalLikelihood())
    if method == "batch evidence":
        return SVI(model, weights("natural"), others, sgp.BatchMarginalLikelihood())
    Z = X[np.random.default_rng(0).permutation(len(X))[:batch]]
    guide = sgp.AutoSVGP(model, Z, natural=True, learn_inducing=True, base=AutoDelta)
    return SVI(model, guide, sgp.NaturalGradient(rho, others), elbo)


def run(method: str, kind: str, p: dict, data, test, batch: int, epochs: int, checks: int, choice: dict) -> dict:
    """One fit: the curve of both measures, and where the likelihood was best."""
    X, y = data
    steps = max(epochs * len(X) // batch // checks, 1)
    svi = svi_of(method, kind, p, data, batch, steps * checks, **choice)
    state = svi.init(jax.random.key(0), X[:batch], y[:batch], num_data=len(X))
    rows_X, rows_y = jnp.asarray(X), jnp.asarray(y)

    @jax.jit
    def some_steps(state, key, X, y):
        def step(state, key):
            rows = jax.random.randint(key, (batch,), 0, len(X))
            return svi.update(state, X[rows], y[rows], num_data=len(X))[0], None

        return jax.lax.scan(step, state, jax.random.split(key, steps))[0]

    features = jax.jit(lambda params, X: whitened(kind, p, params, X))
    curve = []
    seconds = 0.0
    for check in range(checks):
        started = time.process_time()
        state = jax.block_until_ready(some_steps(state, jax.random.key(check), rows_X, rows_y))
        seconds += time.process_time() - started
        params = {**svi.get_params(state), **(state.mutable_state or {})}
        nlml, rmse = judged(features, params, data, test)
        if method == "SVGP":
            with numpyro.validation_enabled(False):  # in single precision the last step may lead to what is not finite
                process = sgp.process_posterior(svi.guide, jax.random.key(0), params, X[:10], y[:10])["f"]
            parts = np.array_split(test[0], 1 + len(test[0]) // 2048)
            mean = np.concatenate([process.posterior(part).mean for part in parts])
            rmse = float(np.sqrt(np.mean((mean - test[1]) ** 2)))
        curve.append({"nlml": nlml, "rmse": rmse})
    best = curve[int(np.argmin([ranked(entry) for entry in curve]))]
    refused = 0 if method in ("compositional", "batch evidence") else int(sgp.num_refused(state))
    kept = {**choice, "refresh": refresh_of(method, batch), "steps": steps * checks, "refused": refused}
    return {**best, **kept, "cpu_seconds": seconds, "curve": curve}


def ranked(entry: dict) -> float:
    """The likelihood to compare by: infinite where it or a prediction is not finite."""
    return entry["nlml"] if np.isfinite([entry["nlml"], entry["rmse"]]).all() else np.inf


def best_run(choices: list[dict], run_with: Callable[[dict], dict]) -> dict:
    """The run with the best likelihood of those with several choices, and what the others had."""
    found = [run_with(choice) for choice in choices]
    compared = [{**choice, "nlml": entry["nlml"]} for choice, entry in zip(choices, found, strict=True)]
    return {**found[int(np.argmin([ranked(entry) for entry in found]))], "compared": compared}


def log_scale(path: Path | None, fold: int) -> float:
    """The logarithm of the standard deviation that the outputs were divided by."""
    if path is None:
        return 0.0
    with np.load(path, allow_pickle=False) as file:
        return float(np.log(file["y"][~file["test_mask"][:, fold]].std()))


def problem(path: Path | None, fold: int) -> tuple:
    """Training and test data in single precision."""
    if path is None:
        rng = np.random.default_rng(fold)
        X = rng.uniform(-2.0, 2.0, size=(400, 3))
        y = np.sin(2.0 * X).sum(1) + 0.1 * rng.normal(size=len(X))
        parts = X[:300], y[:300], X[300:], y[300:]
    else:
        parts = data_set(path, fold)
    X, y, X_test, y_test = (part.astype(np.float32) for part in parts)
    return (X, y), (X_test, y_test)


def figure(result: dict, path: Path) -> None:
    """Both measures along the runs of the first fold and the first batch size: a column for each data set."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tables = list(dict.fromkeys(key.rpartition("/")[0] for key in result["runs"]))
    cells = [cell for cell in tables if cell.rpartition("/")[2] == tables[0].rpartition("/")[2]]
    panel, axes = plt.subplots(
        2, len(cells), figsize=(1.4 + 2.3 * len(cells), 4.6), layout="constrained", squeeze=False, sharex="col"
    )
    for column, cell in zip(axes.T, cells, strict=True):
        for number, method in enumerate(METHODS):
            folds = result["runs"].get(f"{cell}/{method}")
            if not folds:
                continue
            curve = next(iter(folds.values()))["curve"]
            for ax, measure in zip(column, ("nlml", "rmse"), strict=True):
                epochs = result["settings"]["epochs"] * np.arange(1, 1 + len(curve)) / len(curve)
                ax.plot(epochs, [entry[measure] for entry in curve], ".-", color=f"C{number}", label=method)
        # With no features at all it is 1.42; what is worse than that leaves the picture.
        seen = [y for line in column[0].get_lines() for y in line.get_ydata() if y < 1.5]
        if seen:
            column[0].set_ylim(min(seen) - 0.05 * np.ptp(seen), max(seen) + 0.05 * np.ptp(seen))
        name, kind, batch = cell.split("/")
        column[0].set_title(f"{name}, {kind}, B = {batch}", fontsize=9)
        column[1].set_xlabel("epochs")
        for ax in column:
            ax.ticklabel_format(axis="y", useOffset=False)
    axes[0, 0].set_ylabel("−log p(y) a row")
    axes[1, 0].set_ylabel("RMSE on held-out rows")
    handles = {label: handle for ax in axes[0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    panel.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    panel.savefig(path, dpi=110)
    print(f"figure written to {path}")


def main(arguments: argparse.Namespace) -> None:
    """The tables of a kernel: one for each data set and batch size."""
    if arguments.reduced:
        tables(arguments, "gaussian", REDUCED, 2, 2)
        result = tables(arguments, "linear", REDUCED, 2, 2)
    else:
        sizes = FULL if arguments.optimizer == "adam" else {**FULL, "optimizer": arguments.optimizer}
        result = tables(arguments, arguments.kernel, sizes, arguments.epochs, arguments.checks)
    if arguments.figure is not None:
        figure(result, arguments.figure)


def tables(arguments: argparse.Namespace, kind: str, p: dict, epochs: int, checks: int) -> dict:
    """What is not at hand is run; the file is written after each run."""
    name = f"finite_rank_tables_{kind}_{epochs}" + (f"_{p['optimizer']}" if "optimizer" in p else "")
    settings = {**p, "epochs": epochs, "dtype": "float32", "rates": arguments.rates, "checks": checks}
    result: dict = {"settings": settings, "runs": earlier(name, settings, arguments.output)}
    methods = REDUCED_METHODS[kind] if arguments.reduced else arguments.methods
    for path in arguments.data or [None]:
        data_set = "simulated" if path is None else path.stem
        for batch in arguments.batches or p["batches"][kind]:
            print(f"{data_set}, {kind}, batches of {batch}")
            for method in methods:
                runs = result["runs"].setdefault(f"{data_set}/{kind}/{batch}/{method}", {})
                for fold in arguments.folds:
                    if str(fold) in runs:
                        continue
                    data, test = problem(path, fold)
                    first = next(iter(runs.values()), None)
                    choices = [
                        {"rate": rate, "window": window}
                        for rate in (arguments.rates if first is None else [first["rate"]])
                        for window in (WINDOWS.get(method, [5.0]) if first is None else [first["window"]])
                    ]
                    found = best_run(choices, partial(run, method, kind, p, data, test, batch, epochs, checks))
                    runs[str(fold)] = {"log_scale": log_scale(path, fold), **found}
                    report(name, result, arguments.output)
                for measure in ("nlml", "rmse"):
                    line = spread([found[measure] for found in runs.values()])
                    print(f"  {method:<26} {measure} {line}", flush=True)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="small and simulated, to see that everything runs")
    parser.add_argument("--data", type=Path, nargs="*", help="npz files with X, y and test_mask")
    parser.add_argument("--folds", type=int, nargs="*", default=[0])
    parser.add_argument("--kernel", choices=["linear", "gaussian"], default="linear")
    parser.add_argument("--batches", type=int, nargs="*", help="sizes of batches, for those of the paper's tables")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--checks", type=int, default=10, help="how often a run is judged")
    parser.add_argument("--rates", type=float, nargs="*", default=[3e-3, 1e-2], help="one to be chosen")
    parser.add_argument("--optimizer", choices=["adam", "adadelta"], default="adam")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="file for the figure")
    main(parser.parse_args())
