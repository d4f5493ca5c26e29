"""`AutoMarkovGP` with places: what a step costs, a long field beside inducing inputs in equal processor time, and NUTS.

The field has counts at 100 places, each hour, and is rough in time: its lengthscale is a hundredth of the time, so that
a thousand inducing inputs, which have to fill time and space, cannot follow it. NUTS samples the dense model.

    python benchmarks/space_time.py [--output results] [--figure figure.png]
    python benchmarks/space_time.py --nuts [--output results]
"""

import argparse
from pathlib import Path
import time

from common import by_all_rows, by_batches, compared, counts_row, long_chains, report, slope
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Matern32, Matern52, Select

LEVEL, EFFECT, HOURS, DISTANCE = 0.5, 0.4, 10.0, 0.5


def kernel_of(hours, distance, variance):
    """Of time in column 0 and place in the others."""
    return Select(Matern32(hours, variance), [0]) * Select(Matern52(distance), [1, 2])


def counts(X, covariate, y=None, num_data=None):
    """A field, a level and the effect of a covariate."""
    hours = numpyro.sample("hours", dist.LogNormal(2.0, 1.0))
    distance = numpyro.sample("distance", dist.LogNormal(-1.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel_of(hours, distance, variance), X))
    predictor = numpyro.deterministic("predictor", f + level + effect * covariate)
    with numpyro.plate("report", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(predictor)), obs=y)


def data(num_times: int, num_places: int) -> tuple[np.ndarray, ...]:
    """Rows, covariate, f and counts at all times and places: draws of the process, exact in time and in space."""
    rng = np.random.default_rng(0)
    places = rng.uniform(size=(num_places, 2))
    root = np.linalg.cholesky(np.asarray(Matern52(DISTANCE)(places, places)) + 1e-8 * np.eye(num_places))
    # Matérn-3/2 in time, by its state: f and its derivative divided by the rate.
    rate = np.sqrt(3.0) / HOURS
    A = np.exp(-rate) * np.array([[1.0 + rate, rate], [-rate, 1.0 - rate]])
    noise = np.linalg.cholesky(np.eye(2) - A @ A.T)
    state, fields = rng.normal(size=(2, num_places)), np.empty((num_times, num_places))
    for n in range(num_times):
        fields[n] = state[0] @ root.T
        state = A @ state + noise @ rng.normal(size=(2, num_places))
    X = np.concatenate([np.repeat(np.arange(num_times), num_places)[:, None], np.tile(places, (num_times, 1))], axis=1)
    covariate, f = rng.normal(size=len(X)), fields.ravel()
    return X.astype(float), covariate, f, rng.poisson(np.exp(f + LEVEL + EFFECT * covariate)).astype(float)


def cost(num_times: int, num_places: int, M: int, repeats: int) -> dict:
    """One step."""
    X, covariate, _, y = data(num_times, num_places)
    guide = sgp.AutoMarkovGP(counts, space=sgp.kmeans(None, X[:num_places, 1:], num_inducing=M))
    svi = SVI(counts, guide, sgp.NaturalGradient(0.5, optax.adam(0.01)), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, covariate, y)
    update = jax.jit(svi.update).lower(state, X, covariate, y).compile()
    seconds = []
    for _ in range(repeats + 1):
        start = time.process_time()
        state, _ = jax.block_until_ready(update(state, X, covariate, y))
        seconds.append(time.process_time() - start)
    found = {"times": num_times, "rows": len(X), "places": M, "seconds": min(seconds[1:])}
    found["megabytes"] = update.memory_analysis().temp_size_in_bytes / 1e6
    print(found, flush=True)
    return found


def equal_time(reduced: bool, figure: Path | None) -> dict:
    """The long field, by places and by inducing inputs."""
    num_times, num_places, steps, num_test = (12, 8, 3, 10) if reduced else (1100, 100, 30, 1000)
    X, covariate, f, y = data(num_times, num_places)
    rng = np.random.default_rng(1)
    held_out = np.zeros(len(X), bool)
    held_out[rng.permutation(len(X))[: len(X) // 11]] = True
    train = X[~held_out], covariate[~held_out], y[~held_out]
    index = np.flatnonzero(held_out)[:: max(held_out.sum() // num_test, 1)][:num_test]
    test = tuple(each[index] for each in (X, covariate, f + LEVEL + EFFECT * covariate, y))
    line = X[:num_places, 1:].mean(axis=0)
    nearest = int(np.argmin(np.sum((X[:num_places, 1:] - line) ** 2, axis=1)))
    rows = np.arange(num_times)[: 5 if reduced else 150] * num_places + nearest
    runs, curves = [], {}
    for M in (3,) if reduced else (30, 50):
        guide = sgp.AutoMarkovGP(counts, space=sgp.kmeans(None, X[:num_places, 1:], num_inducing=M))
        params, seconds = by_all_rows(counts, guide, train, steps, 0.2)
        name = f"{M} places"
        runs.append(counts_row(name, guide, params, seconds, train, test) | {"steps": steps})
        curves[name] = _curve(guide, params, X[rows])
    limit = runs[-1]["seconds"]
    for M in (20,) if reduced else (500, 1000):
        units = np.array([HOURS, DISTANCE, DISTANCE])  # so that k-means sees the lengthscales
        sample = train[0][rng.permutation(len(train[0]))[:20_000]] / units
        Z = np.asarray(sgp.kmeans(None, sample, num_inducing=M)) * units
        guide = sgp.AutoTSVGP(counts, Z)
        params, seconds, number = by_batches(counts, guide, train, limit, 5 if reduced else None)
        name = f"{M} inducing inputs"
        runs.append(counts_row(name, guide, params, seconds, train, test) | {"steps": number})
        curves[name] = _curve(guide, params, X[rows])
    if figure is not None:
        draw(figure, X[rows, 0], f[rows], curves)
    truth = {"level": LEVEL, "effect": EFFECT, "hours": HOURS, "distance": DISTANCE, "variance": 1.0}
    truth |= {"mean_of_field": float(f.mean()), "mean_count": float(y.mean())}
    print(truth)
    return {"rows": len(train[0]), "times": num_times, "truth": truth, "runs": runs}


def _curve(guide, params, rows) -> tuple[np.ndarray, np.ndarray]:
    q = guide.posterior(jax.random.key(3), params, rows, np.zeros(len(rows)))["f"]
    return np.asarray(q.mean), np.sqrt(np.asarray(q.variance))


def draw(path: Path, hours: np.ndarray, truth: np.ndarray, curves: dict) -> None:
    """The field at one place, true and estimated."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 1, figsize=(8, 4.6), layout="constrained", sharex=True, sharey=True)
    for ax, name in zip(axes, list(curves)[:: max(len(curves) - 1, 1)][:2], strict=True):
        mean, deviation = curves[name]
        ax.plot(hours, truth, color="C1", linewidth=0.8, label="true f")
        ax.plot(hours, mean, color="C0", linewidth=1.0, label=name)
        half = 1.645 * deviation
        ax.fill_between(hours, mean - half, mean + half, color="C0", alpha=0.25, linewidth=0, label="90 %")
        ax.margins(y=0.2)
        ax.set(ylabel="f at one place")
        ax.legend(frameon=False, ncols=3, loc="upper right")
    axes[-1].set(xlabel="hours")
    fig.savefig(path, dpi=150)


def against_nuts(reduced: bool) -> list[dict]:
    """100 counts at five places, all hyperparameters fixed, beside long chains of the dense model."""
    num_times, num_places = (6, 4) if reduced else (20, 5)
    X, covariate, _, y = data(num_times, num_places)
    given = {"hours": HOURS, "distance": DISTANCE, "variance": 1.0}

    def exact(X, covariate, y):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        L = jnp.linalg.cholesky(kernel_of(*given.values())(X, X) + 1e-6 * jnp.eye(len(X)))
        f = numpyro.deterministic("f", L @ numpyro.sample("v", dist.Normal().expand([len(X)])))
        numpyro.sample("y", dist.Poisson(jnp.exp(f + level + effect * covariate)).to_event(1), obs=y)

    options = {"num_samples": 20 if reduced else 4000, "dense_mass": [("level", "effect")]}
    theirs, r_hat, ess = long_chains(exact, X, covariate, y, **options)
    print(f"NUTS with R-hat {r_hat:.4f}, smallest effective sample size {ess:.0f}", flush=True)
    table, model = [], numpyro.handlers.condition(counts, given)
    for M in (2,) if reduced else (3, 5):
        Z = X[:num_places, 1:] if num_places == M else sgp.kmeans(None, X[:num_places, 1:], num_inducing=M)
        guide = sgp.AutoMarkovGP(model, space=Z)
        svi = SVI(model, guide, sgp.NaturalGradient(0.7), sgp.QuadratureELBO())
        params = svi.run(jax.random.key(2), 5 if reduced else 60, X, covariate, y, progress_bar=False).params
        shape = (20,) if reduced else (4000,)
        draws = guide.sample_posterior(jax.random.key(3), params, X, covariate, sample_shape=shape)
        columns = {"places": M, "of": num_places, "r_hat": r_hat, "ess": ess}
        table += compared(f"{M} places", draws, theirs, ("f", "level", "effect"), **columns)
    return table


def main(arguments: argparse.Namespace) -> None:
    """Costs and the long field, or NUTS."""
    numpyro.enable_x64()
    if arguments.nuts or arguments.reduced:
        report("space_time_nuts", {"table": against_nuts(arguments.reduced)}, arguments.output)
    if not arguments.nuts:
        sizes = ((5, 6, 2), (10, 6, 2)) if arguments.reduced else ((30, 100, 40), (100, 100, 40), (300, 100, 40))
        table = [cost(*size, 1 if arguments.reduced else 3) for size in sizes]
        exponents = {key: slope(table, "times", key) for key in ("seconds", "megabytes")}
        print("exponents of the number of times:", exponents)
        result = {"costs": table, "exponents": exponents, **equal_time(arguments.reduced, arguments.figure)}
        report("space_time", result, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nuts", action="store_true", help="the comparison with NUTS in the place of costs")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the results as JSON")
    parser.add_argument("--figure", type=Path)
    main(parser.parse_args())
