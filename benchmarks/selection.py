"""Where to put inducing inputs: time to choose them, and the collapsed bound and trace error they reach.

For each data set the hyperparameters are trained once (random inducing inputs, a part of the rows); then each selection
chooses M inputs among all rows at those hyperparameters, and the bound is evaluated with all rows. Times are CPU
seconds of the second call, so that compilation is left out.

    python benchmarks/selection.py [--data kin40k.npz elevators.npz] [--reduced] [--figure file.png] [--output results]
"""

import argparse
from functools import partial
from pathlib import Path
import time

from common import data_set, report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
import optax

import numpyro_sgp as sgp

SELECTIONS = {"greedy variance": sgp.greedy_variance, "k-means": sgp.kmeans, "random rows": sgp.subset}


def hyperparameters(X, y, steps):
    """Type-II estimates of an SE-ARD kernel and the noise, on a part of the rows."""
    Z = sgp.subset(None, X, jax.random.key(0), num_inducing=min(256, len(X) // 2))

    def model(X, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 1.0).expand([X.shape[1]]).to_event(1))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        kernel = sgp.kernels.SquaredExponential(lengthscale, variance)
        numpyro.sample("y", sgp.SparseGPRegression(kernel, X, Z, noise), obs=y)

    guide = AutoDelta(model)
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
    result = svi.run(jax.random.key(1), steps, jnp.asarray(X), jnp.asarray(y), progress_bar=False)
    return guide.median(result.params)


@jax.jit
def bound(kernel, X, y, Z, noise):
    """The collapsed bound with all rows."""
    return sgp.SparseGPRegression(kernel, X, Z, noise).log_prob(y)


def measure(X, y, numbers, steps):
    """For each M and selection: CPU seconds, bound for each row, trace error."""
    rows = np.random.default_rng(0).permutation(len(X))[:5000]
    found = hyperparameters(X[rows], y[rows], steps)
    kernel = sgp.kernels.SquaredExponential(found["lengthscale"], found["variance"])
    table = []
    for M in numbers:
        for name, select in SELECTIONS.items():
            choose = partial(select, kernel, X, jax.random.key(2), num_inducing=M)
            if name == "greedy variance":
                choose()
            start = time.process_time()
            Z = jax.block_until_ready(choose())
            seconds = time.process_time() - start
            value = float(bound(kernel, X, y, Z, found["noise"])) / len(X)
            error = sgp.trace_error(kernel, X, Z)
            table.append({"M": M, "selection": name, "seconds": seconds, "bound": value, "trace_error": error.relative})
            print(f"  M={M:5d} {name:16s} {seconds:8.2f} s  bound/N {value:9.4f}  tr(K−Q)/tr K {error.relative:.4f}")
    return {"hyperparameters": jax.tree.map(lambda x: np.asarray(x).tolist(), found), "table": table}


def main(arguments: argparse.Namespace) -> None:
    """Every data set, every M, every selection."""
    jax.config.update("jax_enable_x64", True)
    sets = {path.stem: data_set(path)[:2] for path in arguments.data}
    if not sets:
        X = np.random.default_rng(0).uniform(-2.0, 2.0, size=(200 if arguments.reduced else 5000, 3))
        sets = {"synthetic": (X, np.sin(2.0 * X).sum(1) + 0.1 * np.random.default_rng(1).normal(size=len(X)))}
    numbers, steps = ((8, 16), 5) if arguments.reduced else ((128, 256, 512, 1024), 300)
    result = {}
    for name, (X, y) in sets.items():
        print(f"{name}: {X.shape[0]} rows, {X.shape[1]} columns")
        result[name] = measure(X, y, numbers, steps)
    report("selection", {"sets": result}, arguments.output)
    if arguments.figure is not None:
        figure(result, arguments.figure)


def figure(result: dict, path: Path) -> None:
    """Bound against M, and against the time to choose."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(len(result), 2, figsize=(9, 3.2 * len(result)), layout="constrained", squeeze=False)
    for (name, measured), (left, right) in zip(result.items(), axes, strict=True):
        for style, selection in zip(("C0o-", "C3s--", "C1^-."), SELECTIONS, strict=True):
            rows = [row for row in measured["table"] if row["selection"] == selection]
            left.plot([row["M"] for row in rows], [row["bound"] for row in rows], style, label=selection)
            right.loglog([row["M"] for row in rows], [max(row["seconds"], 1e-3) for row in rows], style)
        left.set(xlabel="M", ylabel="bound for each row (nats)", title=name, xscale="log")
        right.set(xlabel="M", ylabel="time to choose (CPU s)", title=name)
        numbers = sorted({row["M"] for row in measured["table"]})
        for axis in (left, right):
            axis.set_xticks(numbers, [str(M) for M in numbers])
            axis.minorticks_off()
        left.legend(frameon=False, fontsize=8)
    plt.savefig(path, dpi=120)
    print(f"figure written to {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="data sets as .npz with X, y and test_mask")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="where to write the figure")
    main(parser.parse_args())
