"""Inducing inputs on a grid: a smooth field of counts beside other posteriors in equal time, and NUTS.

The field has counts at random places of a square, whose exposures are known. Its kernel is squared exponential, with a
lengthscale of a twenty-fifth of the square, so that a thousand inducing inputs are too few. Grids have the
hyperparameters of a fit to a twenty-fifth of the square, whose time counts; the others train theirs. NUTS samples the
dense model.

    python benchmarks/inducing_grid.py [--output results]
    python benchmarks/inducing_grid.py --nuts [--output results]
"""

import argparse
from pathlib import Path

from common import by_all_rows, by_batches, compared, counts_row, long_chains, report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax

import numpyro_sgp as sgp
from numpyro_sgp.kernels import SquaredExponential

LENGTHSCALE = 1.0 / 25.0


def counts(X, exposure, y=None, num_data=None):
    """A field, and the logarithms of exposures."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-2.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(lengthscale, variance), X))
    predictor = numpyro.deterministic("predictor", f + exposure)
    with numpyro.plate("place", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(predictor)), obs=y)


def data(num: int) -> tuple[np.ndarray, ...]:
    """Places, logarithms of exposures, predictor and counts; the field is a sum of 4000 waves."""
    rng = np.random.default_rng(0)
    X, exposure = rng.uniform(size=(num, 2)), rng.normal(0.5, 0.5, size=num)
    omega, phase = rng.normal(size=(2, 4000)) / LENGTHSCALE, rng.uniform(0.0, 2.0 * np.pi, 4000)
    parts = [np.cos(part @ omega + phase).sum(axis=1) for part in np.array_split(X, 100)]
    predictor = np.sqrt(2.0 / 4000) * np.concatenate(parts) + exposure
    return X, exposure, predictor, rng.poisson(np.exp(predictor)).astype(float)


def equal_time(reduced: bool) -> dict:
    """The field by grids, by inducing inputs and by neighbours."""
    num, num_test, steps = (400, 50, 5) if reduced else (100_000, 2000, 8000)
    X, exposure, predictor, y = data(num + num_test)
    train, tested = (X[:num], exposure[:num], y[:num]), tuple(each[num:] for each in (X, exposure, predictor, y))
    runs = []
    inside = np.all(np.abs(X[:num] - 0.5) < (0.5 if reduced else 0.1), axis=1)
    part = tuple(each[inside] for each in train)
    guide = sgp.AutoTSVGP(counts, np.asarray(sgp.kmeans(None, part[0], num_inducing=10 if reduced else 200)))
    params, before, _ = by_batches(counts, guide, part, np.inf, 5 if reduced else 400)
    medians = guide.median(params, *(each[:10] for each in part))
    known = {name: medians[name] for name in ("lengthscale", "variance")}
    print({name: float(value) for name, value in known.items()}, f"{before:.0f} s", flush=True)
    given = numpyro.handlers.condition(counts, known)
    for side in (4,) if reduced else (32, 64, 96):
        guide = sgp.AutoSVGP(given, sgp.InducingGrid.over(train[0], (side, side)))
        optim = optax.adam(optax.cosine_decay_schedule(0.03, steps, 0.001))
        params, seconds, number = by_batches(given, guide, train, np.inf, steps, optim=optim)
        row = counts_row(f"grid of {side} × {side}", guide, params, before + seconds, train, tested)
        row |= {name: float(value) for name, value in known.items()}
        runs.append(row | {"inducing": side**2, "steps": number})
    limit = runs[-1]["seconds"]
    for M in (20,) if reduced else (500, 1000):
        guide = sgp.AutoTSVGP(counts, np.asarray(sgp.kmeans(None, X[: min(num, 20_000)], num_inducing=M)))
        params, seconds, number = by_batches(counts, guide, train, limit, 5 if reduced else None)
        row = counts_row(f"{M} inducing inputs", guide, params, seconds, train, tested)
        runs.append(row | {"inducing": M, "steps": number})
    for neighbours, most in ((5, 3),) if reduced else ((20, 100), (40, 60)):
        guide = sgp.AutoVecchiaGP(counts, num_neighbours=neighbours)
        params, seconds = by_all_rows(counts, guide, train, most, 0.1)
        row = counts_row(f"{neighbours} neighbours", guide, params, seconds, train, tested)
        runs.append(row | {"steps": most})
    return {"rows": num, "lengthscale": LENGTHSCALE, "mean_count": float(y[:num].mean()), "runs": runs}


def with_effects(X, exposure, covariate, y=None):
    """A field beside a level and the effect of a covariate."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    counts(X, exposure + level + effect * covariate, y)


def against_nuts(reduced: bool) -> list[dict]:
    """100 counts, beside long chains of the dense model: hyperparameters trained, fixed, and fixed beside effects."""
    num = 40 if reduced else 100
    rng = np.random.default_rng(0)
    X, exposure = rng.uniform(size=(num, 2)), rng.normal(0.5, 0.5, size=num)
    f = np.sin(6.0 * X[:, 0]) * np.cos(5.0 * X[:, 1])
    y = rng.poisson(np.exp(f + exposure)).astype(float)
    covariate = X[:, 0] + 0.5 * rng.normal(size=num)  # follows the field in part
    y_of_effects = rng.poisson(np.exp(f + exposure + 0.4 * covariate)).astype(float)

    def exact(X, exposure, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-2.0, 1.0))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        L = jnp.linalg.cholesky(SquaredExponential(lengthscale, variance)(X, X) + 1e-6 * jnp.eye(num))
        f = numpyro.deterministic("f", L @ numpyro.sample("v", dist.Normal().expand([num])))
        numpyro.sample("y", dist.Poisson(jnp.exp(f + exposure)).to_event(1), obs=y)

    def exact_with_effects(X, exposure, covariate, y):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        exact(X, exposure + level + effect * covariate, y)

    table, known = [], {}
    for kind in ("trained", "fixed, with effects") if reduced else ("trained", "fixed", "fixed, with effects"):
        given, has_effects = ({} if kind == "trained" else known), kind.endswith("effects")
        pair = (with_effects, exact_with_effects) if has_effects else (counts, exact)
        model, dense = (numpyro.handlers.condition(each, given) for each in pair)
        args = (X, exposure, covariate, y_of_effects) if has_effects else (X, exposure, y)
        own = ("level", "effect") if has_effects else () if given else ("lengthscale", "variance")
        num_samples = 20 if reduced else 10_000
        theirs, r_hat, ess = long_chains(dense, *args, num_samples=num_samples, dense_mass=[own] if own else False)
        known = known or {name: float(np.median(theirs[name])) for name in ("lengthscale", "variance")}
        print(f"{kind}: NUTS with R-hat {r_hat:.4f}, smallest effective sample size {ess:.0f}", flush=True)
        for side in (4,) if reduced else (5, 8, 12):
            steps, shape = (10, (20,)) if reduced else (4000, (4000,))
            grid = sgp.InducingGrid.over(X, (side, side))
            guide = sgp.AutoSVGP(model, grid, base=AutoMultivariateNormal)
            optim = optax.adam(optax.cosine_decay_schedule(0.03, steps))
            svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_particles=1 if reduced or given else 4))
            params = svi.run(jax.random.key(2), steps, *args, progress_bar=False).params
            draws = guide.sample_posterior(jax.random.key(3), params, *args[:-1], sample_shape=shape)
            columns = {"hyperparameters": kind, "side": side, "r_hat": r_hat, "ess": ess}
            label = f"{kind}, grid of {side} × {side}"
            table += compared(label, draws, theirs, ("f", *own), positive=list(known), **columns)
    return table


def main(arguments: argparse.Namespace) -> None:
    """The field, or NUTS."""
    numpyro.enable_x64()
    if arguments.nuts or arguments.reduced:
        report("inducing_grid_nuts", {"table": against_nuts(arguments.reduced)}, arguments.output)
    if not arguments.nuts:
        report("inducing_grid", equal_time(arguments.reduced), arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nuts", action="store_true", help="the comparison with NUTS in the place of the field")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the results as JSON")
    main(parser.parse_args())
