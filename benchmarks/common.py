"""What the benchmark scripts share: versions and device, data sets, results as JSON."""

from collections.abc import Callable, Sequence
import json
import os
from pathlib import Path
import platform
import subprocess
import time
from typing import Any

import jax
from jax.typing import ArrayLike
import numpy as np
import numpyro
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS, SVI
import optax
from scipy.special import gammaln

import numpyro_sgp

HERE = Path(__file__).resolve().parent


def environment() -> dict[str, str]:
    """Versions, device, cores and threads (`OMP_NUM_THREADS`), to be printed and kept with every result."""
    return {
        "numpyro_sgp": numpyro_sgp.__version__,
        "revision": revision(),
        "jax": jax.__version__,
        "numpyro": numpyro.__version__,
        "optax": optax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
    }


def revision() -> str:
    """Which commit of the tree these scripts are in, and whether it has been changed since; empty outside of one."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation of some runs; of a single one, its value."""
    deviation = f" ± {np.std(values, ddof=1):.2g}" if len(values) > 1 else ""
    return f"{np.mean(values):.4g}{deviation}"


def report(name: str, result: dict, folder: Path | None) -> None:
    """Print the environment; write the result as JSON where a folder is given."""
    result = {"environment": environment(), **result}
    print(json.dumps(result["environment"]))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"result written to {path}")


def earlier(name: str, settings: dict, folder: Path | None) -> dict:
    """The `runs` of a result that `report` has written, to be added to; an error where its settings are others."""
    path = folder and folder / f"{name}.json"
    if path is None or not path.exists():
        return {}
    before = json.loads(path.read_text("utf-8"))
    if before["settings"] != settings:
        raise SystemExit(f"{path} was made with other settings: {before['settings']}. Move it away.")
    return before["runs"]


def earlier_table(name: str, folder: Path | None) -> list[dict]:
    """The rows of the table of a result that `report` has written, each with the revision that it is of."""
    path = folder and folder / f"{name}.json"
    if path is None or not path.exists():
        return []
    before = json.loads(path.read_text("utf-8"))
    return [{"revision": before["environment"]["revision"], **row} for row in before["table"]]


def add_run(name: str, result: dict, data: str, fold: int, found: Any, folder: Path | None) -> dict:
    """Add what was found on a fold to the result that is there by now: another process may have written meanwhile."""
    runs = earlier(name, result["settings"], folder)
    runs.setdefault(data, {})[str(fold)] = found
    report(name, {**result, "runs": runs}, folder)
    return runs


def long_chains(
    model: Callable, *args, num_samples: int = 4000, dense_mass: Any = False, **kwargs
) -> tuple[dict[str, jax.Array], float, float]:
    """2 × `num_samples` draws by NUTS, the largest R-hat and the smallest effective sample size of all entries."""
    options = {"num_warmup": min(num_samples, 1000), "num_samples": num_samples, "num_chains": 2}
    kernel = NUTS(model, dense_mass=dense_mass, max_tree_depth=10 if num_samples > 100 else 2)  # few: a reduced run
    chains = MCMC(kernel, **options, chain_method="sequential", progress_bar=False)
    chains.run(jax.random.key(0), *args, **kwargs)
    found = summary(chains.get_samples(group_by_chain=True)).values()
    # (Entries of a Cholesky factor may be constant: these have none.)
    r_hat, ess = max(np.nanmax(v["r_hat"]) for v in found), min(np.nanmin(v["n_eff"]) for v in found)
    return chains.get_samples(), float(r_hat), float(ess)


def beside(own: ArrayLike, exact: ArrayLike, *, positive: bool = False) -> dict[str, float]:
    """Largest error of means, in standard deviations, and least, largest and mean ratio of standard deviations.

    Args:
        own: draws, (S, ...).
        exact: draws of long chains, (S, ...).
        positive: whether logarithms are compared.
    """
    own, exact = (np.log(np.asarray(each)) if positive else np.asarray(each) for each in (own, exact))
    sd = exact.std(axis=0)
    error, ratio = np.abs(own.mean(axis=0) - exact.mean(axis=0)) / sd, own.std(axis=0) / sd
    found = {"error": np.max(error), "least": np.min(ratio), "largest": np.max(ratio), "mean_ratio": np.mean(ratio)}
    return {name: float(value) for name, value in found.items()}


def compared(
    label: str, own: dict, exact: dict, latents: Sequence[str], *, positive: Sequence[str] = (), **columns: Any
) -> list[dict]:
    """Rows of a table beside long chains, one for each latent; they are printed.

    Args:
        label: what is printed before the name of the latent.
        own: draws by latent.
        exact: draws of long chains.
        latents: names.
        positive: those of which logarithms are compared.
        columns: other columns of the rows.
    """
    table = []
    for latent in latents:
        row = {**columns, "latent": latent, **beside(own[latent], exact[latent], positive=latent in positive)}
        table.append(row)
        text = f"mean within {row['error']:.2f} sd, sds {row['least']:.3f} to {row['largest']:.3f}"
        print(f"{label}, {latent}: {text}", flush=True)
    return table


def slope(table: Sequence[dict], size: str, key: str) -> float:
    """Exponent of a size in a column, from a straight line through the logarithms."""
    sizes, values = (np.log([row[name] for row in table]) for name in (size, key))
    return float(np.polyfit(sizes, values, 1)[0])


def by_all_rows(model: Callable, guide: Any, train: Sequence[np.ndarray], steps: int, learning_rate: float):
    """Parameters after steps on all rows, and the processor time.

    Args:
        model: of the rows.
        guide: with a site in each row.
        train: the rows.
        steps: their number.
        learning_rate: of the hyperparameters, at first.
    """
    optim = numpyro_sgp.NaturalGradient(0.7, optax.adam(optax.cosine_decay_schedule(learning_rate, steps)))
    svi = SVI(model, guide, optim, numpyro_sgp.QuadratureELBO(10))
    start = time.process_time()
    state = svi.init(jax.random.key(0), *train)
    update = jax.jit(svi.update, donate_argnums=0)
    for _ in range(steps):
        state, loss = update(state, *train)
    loss.block_until_ready()
    return svi.get_params(state), time.process_time() - start


def by_batches(
    model: Callable,
    guide: Any,
    train: Sequence[np.ndarray],
    seconds: float,
    most: int | None,
    step_size: float = 0.5,
    batch: int = 1000,
    optim: Any = None,
):
    """Parameters after steps on batches of rows for some processor time; that time, and the steps.

    Args:
        model: with rows and `num_data`.
        guide: with inducing inputs.
        train: the rows.
        seconds: when to end.
        most: the most steps, in a reduced run.
        step_size: of natural steps, at first; it falls to a tenth over 200 steps.
        batch: how many rows a step has.
        optim: another optimizer.
    """
    num, rng = len(train[0]), np.random.default_rng(0)
    if optim is None:
        optim = numpyro_sgp.NaturalGradient(optax.linear_schedule(step_size, 0.1 * step_size, 200), optax.adam(0.03))
    svi = SVI(model, guide, optim, numpyro_sgp.QuadratureELBO(10))
    start, number, batch = time.process_time(), 0, min(num, batch)
    state = svi.init(jax.random.key(0), *(each[:batch] for each in train), num_data=num)
    update = jax.jit(lambda state, rows: svi.update(state, *rows, num_data=num), donate_argnums=0)
    while time.process_time() - start < seconds and number != most:
        picked = rng.integers(0, num, batch)
        state, loss = update(state, tuple(each[picked] for each in train))
        loss.block_until_ready()
        number += 1
    return svi.get_params(state), time.process_time() - start, number


def counts_row(name: str, guide: Any, params: dict, seconds: float, train: Any, test: Any) -> dict:
    """A posterior of counts: its time, scores of test rows from draws of all latents, and what it says of these.

    Args:
        name: of the posterior.
        guide: of a model with a site `predictor`.
        params: fitted.
        seconds: how long that took.
        train: inputs, of which the number does not matter.
        test: X, covariate, true predictor and counts.
    """
    X, covariate, predictor, y = test
    draws = guide.sample_posterior(jax.random.key(5), params, X, covariate, sample_shape=(60,))
    eta = np.asarray(draws["predictor"])
    logs = y * eta - np.exp(eta) - gammaln(y + 1.0)
    low, high = np.quantile(eta, [0.05, 0.95], axis=0)
    summaries = guide.quantiles(params, [0.05, 0.5, 0.95], *(each[:10] for each in train))
    row = {
        "posterior": name,
        "seconds": seconds,
        "nlpd": float(-np.mean(np.log(np.mean(np.exp(logs), axis=0)))),
        "rmse": float(np.sqrt(np.mean((eta.mean(axis=0) - predictor) ** 2))),
        "coverage_of_90": float(np.mean((low < predictor) & (predictor < high))),
        **{name: np.asarray(value).tolist() for name, value in summaries.items() if name != "f"},
    }
    print(row, flush=True)
    return row


def banana() -> tuple[np.ndarray, np.ndarray]:
    """The 400 training points of the banana classification set: X (400, 2), y in {0, 1}."""
    table = np.loadtxt(HERE.parent / "examples" / "data" / "banana.csv", delimiter=",", skiprows=3)
    return table[:, :2], table[:, 2]


def data_set(path: Path, fold: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training and test parts of a data set.

    It is a `.npz` with arrays `X`, `y` and, where folds are published, `test_mask`, or a `.dat` of the KEEL repository
    with two classes, of which the second in alphabetical order is 1. Folds that are not published are tenths of a
    permutation. Inputs, and outputs that are floating point, are scaled by the training mean and standard deviation.
    """
    published = None
    if path.suffix == ".dat":
        table = np.loadtxt(path, delimiter=",", comments="@", dtype=str)
        X, y = table[:, :-1].astype(float), np.unique(np.char.strip(table[:, -1]), return_inverse=True)[1]
    else:
        with np.load(path, allow_pickle=False) as file:
            X, y, published = file["X"].astype(float), file["y"], file.get("test_mask")
    if published is None:
        test = np.isin(np.arange(len(y)), np.array_split(np.random.default_rng(0).permutation(len(y)), 10)[fold])
    else:
        test = published[:, fold]
    centre, scale = X[~test].mean(0), X[~test].std(0)
    # A column that is constant in training has a deviation of nothing but rounding.
    X = (X - centre) / np.where(scale > 1e-9 * np.abs(centre), scale, 1.0)
    if y.dtype.kind == "f":
        y = (y - y[~test].mean()) / y[~test].std()
    y = y.astype(float)
    return X[~test], y[~test], X[test], y[test]
