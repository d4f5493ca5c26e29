"""How many of 10⁵ steps are refused, and is the end finite?

Minibatches through `fit`, with everything trained: tied sites by natural steps, and lengthscales, variance, the scale
of the likelihood and the inducing inputs by Adam, both from one evaluation of the loss. Each case is run in float32 and
in float64, at the steps that the documentation recommends and at hostile ones. A refused step is one that
`NaturalGradient` took back since the loss or the new parameters were not finite; the bound is that of all rows.

    python benchmarks/long_run.py                              # synthetic data, 10⁵ steps a case
    python benchmarks/long_run.py --data kin40k.npz magic.npz  # and cases on files: y in {0, 1} is classification
    python benchmarks/long_run.py --reduced                    # seconds; what the tests run
"""

import argparse
from collections.abc import Callable
import dataclasses
import json
from pathlib import Path
import time

from common import data_set, report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp
from numpyro_sgp.fitting import AbstractCallback, FitProgress

SEGMENTS = 20
LIKELIHOODS: dict[str, Callable] = {
    "Normal": dist.Normal,
    "Student-t": lambda f, scale: dist.StudentT(4.0, f, scale),
    "Bernoulli": lambda f, _: dist.Bernoulli(logits=f),
    "Poisson": lambda f, _: dist.Poisson(jnp.exp(f)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One run: a likelihood, data, ρ, and the learning rate of Adam; both may be schedules."""

    likelihood: str
    data: Callable[[], tuple[np.ndarray, np.ndarray]]
    step_size: float | Callable = 0.1
    rate: float | Callable = 0.01

    def model(self, X, y=None, num_data=None):
        """Everything is trained: type-II maximum likelihood."""

        def positive(name: str, value: float, shape: tuple[int, ...] = ()):
            return numpyro.param(name, jnp.full(shape, value, X.dtype), constraint=constraints.positive)

        kernel = sgp.kernels.SquaredExponential(positive("lengthscale", 1.0, X.shape[1:]), positive("variance", 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        # A scale that the likelihood has no use for stays where it starts.
        likelihood = LIKELIHOODS[self.likelihood](f, positive("scale", 0.3))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", likelihood, obs=y)


def surface(likelihood: str, N: int = 4000, outliers: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Two inputs and an outcome of a smooth function of them; one row in a hundred may be an outlier of that size."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, size=(N, 2))
    f = np.sin(2.0 * X[:, 0]) * np.cos(X[:, 1]) + 0.5 * X[:, 1]
    if likelihood == "Bernoulli":
        return X, (rng.uniform(size=N) < 1.0 / (1.0 + np.exp(-3.0 * f))).astype(float)
    y = rng.poisson(np.exp(f)).astype(float) if likelihood == "Poisson" else f + 0.3 * rng.normal(size=N)
    if outliers:
        rows = rng.choice(N, N // 100, replace=False)
        y[rows] = outliers if likelihood == "Poisson" else outliers * rng.choice([-1.0, 1.0], len(rows))
    return X, y


def episodes(calm: float, hostile: float, num_steps: int) -> Callable:
    """Twenty episodes, each a hundredth of the run long, at another value."""
    period, length = max(num_steps // SEGMENTS, 1), max(num_steps // 100, 1)
    # The middle of each period, so that the run neither starts nor ends with one.
    return lambda step: jnp.where((step + period // 2) % period < length, hostile, calm)


def synthetic(num_steps: int) -> dict[str, Case]:
    """Cases on the surface."""
    return {
        "Normal": Case("Normal", lambda: surface("Normal")),
        "Normal, ρ=1": Case("Normal", lambda: surface("Normal"), step_size=1.0),
        "Normal, lr=0.1": Case("Normal", lambda: surface("Normal"), rate=0.1),
        "Normal, outliers of 1e6": Case("Normal", lambda: surface("Normal", outliers=1e6)),
        "Student-t, outliers of 1e6": Case("Student-t", lambda: surface("Student-t", outliers=1e6)),
        "Bernoulli": Case("Bernoulli", lambda: surface("Bernoulli")),
        "Poisson, outliers of 1e5": Case("Poisson", lambda: surface("Poisson", outliers=1e5)),
        "Poisson, episodes of ρ=1, lr=0.3": Case(
            "Poisson", lambda: surface("Poisson"), episodes(0.1, 1.0, num_steps), episodes(0.01, 0.3, num_steps)
        ),
    }


def from_file(path: Path) -> Case:
    X, y, _, _ = data_set(path)
    return Case("Bernoulli" if set(np.unique(y)) <= {0.0, 1.0} else "Normal", lambda: (X, y))


class Watch(AbstractCallback):
    """The bound on all rows and the number of refused steps, a few times in a run."""

    def __init__(self, every: int, data: tuple) -> None:
        self.every = every
        self.data = data
        self.bounds: list[float] = []
        self.refused: list[int] = []

    def __call__(self, progress: FitProgress) -> None:
        self.bounds.append(-progress.evaluate(self.data))
        self.refused.append(int(sgp.num_refused(progress.state)))

    def begin(self, saved: object) -> None:
        assert saved is None  # these runs have no checkpoints

    def state(self) -> dict[str, np.ndarray]:
        return {}


def run(case: Case, dtype: type, num_steps: int, M: int, batch: int) -> dict:
    """Fit and summarise one case."""
    with jax.enable_x64(dtype is np.float64):
        X, y = (value.astype(dtype) for value in case.data())
        Z = X[np.random.default_rng(1).choice(len(X), M, replace=False)]
        optim = sgp.NaturalGradient(case.step_size, optax.adam(case.rate))
        guide = sgp.AutoTSVGP(case.model, Z, learn_inducing=True)
        svi = SVI(case.model, guide, optim, sgp.QuadratureELBO())
        watch = Watch(max(num_steps // SEGMENTS, 1), (X, y))
        state = svi.init(jax.random.key(0), X[:batch], y[:batch], num_data=len(X))
        start = -float(jax.jit(svi.evaluate, static_argnames="num_data")(state, X, y, num_data=len(X)))
        began = time.perf_counter()
        result = sgp.fit(
            svi,
            jax.random.key(0),
            (X, y),
            batch_size=batch,
            num_steps=num_steps,
            init_state=state,
            progress_bar=False,
            callback=watch,
        )
        seconds = time.perf_counter() - began
        refused = int(sgp.num_refused(result.state))
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.params)]
        kept = {name: np.asarray(result.params[name]).tolist() for name in ("lengthscale", "variance", "scale")}
    assert all(leaf.dtype == dtype for leaf in leaves)
    bounds = watch.bounds
    return {
        "N": len(X),
        "steps": num_steps,
        "refused": refused,
        "rate of refused steps": refused / num_steps,
        "refused in each twentieth": np.diff([0, *watch.refused]).tolist(),
        "parameters finite at the end": all(bool(np.isfinite(leaf).all()) for leaf in leaves),
        "losses not finite": int(np.sum(~np.isfinite(result.losses))),
        "bound": {"start": start, "middle": bounds[(len(bounds) - 1) // 2], "end": bounds[-1]},
        "bound at each twentieth": bounds,
        "hyperparameters": kept,
        "seconds": round(seconds, 1),
    }


def main(arguments: argparse.Namespace) -> None:
    """Run the cases."""
    num_steps, M, batch = (40, 8, 32) if arguments.reduced else (arguments.steps, 64, 64)
    cases = {**synthetic(num_steps), **{path.stem: from_file(path) for path in arguments.data}}
    names = ["Poisson, episodes of ρ=1, lr=0.3"] if arguments.reduced else arguments.cases
    unknown = set(names or ()) - set(cases)
    if unknown:
        msg = f"--cases names {sorted(unknown)}; the cases are {sorted(cases)}."
        raise SystemExit(msg)
    result: dict = {"M": M, "batch": batch, "cases": earlier(arguments.output, M, batch)}
    print(f"{num_steps} steps, M={M}, batches of {batch}: refused, end, and the bound at start / middle / end")
    for dtype in ["float32"] if arguments.reduced else arguments.dtypes:
        for name in names or cases:
            row = run(cases[name], np.dtype(dtype).type, num_steps, M, batch)
            result["cases"].setdefault(name, {})[dtype] = row
            bounds = " / ".join(f"{value:.6g}" for value in row["bound"].values())
            end = "finite" if row["parameters finite at the end"] else "NOT FINITE"
            print(
                f"{name:34s} {dtype}: {row['refused']:6d} ({100 * row['rate of refused steps']:.3f} %), "
                f"{end}, {bounds}  ({row['seconds']} s)",
                flush=True,
            )
            report("long_run", result, arguments.output)  # after each run, which takes minutes


def earlier(folder: Path | None, M: int, batch: int) -> dict:
    """Cases that the result file holds already and that this run does not repeat."""
    path = None if folder is None else folder / "long_run.json"
    if path is None or not path.exists():
        return {}
    result = json.loads(path.read_text())
    return result["cases"] if (result["M"], result["batch"]) == (M, batch) else {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help=".npz files with X, y and test_mask")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of each case")
    parser.add_argument("--cases", nargs="*", help="names of the cases to run; all without it")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "float64"], choices=["float32", "float64"])
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    main(parser.parse_args())
