"""`AutoVecchiaGP`: what a step costs, a rough field beside inducing inputs in equal time, and NUTS.

The field has counts at random places of a square, with a level and the effect of a covariate. Its lengthscale is a
thirtieth of the square, so that a thousand inducing inputs cannot follow it. NUTS samples the dense model.

    python benchmarks/spatial.py [--output results] [--figure figure.png]
    python benchmarks/spatial.py --nuts [--output results]
"""

import argparse
from pathlib import Path
import time

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
from numpyro_sgp.kernels import Matern32

LEVEL, EFFECT, LENGTHSCALE = 0.5, 0.4, 1.0 / 30.0


def counts(X, covariate, y=None, num_data=None):
    """A field, a level and the effect of a covariate."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-2.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern32(lengthscale, variance), X))
    predictor = numpyro.deterministic("predictor", f + level + effect * covariate)
    with numpyro.plate("place", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(predictor)), obs=y)


def field_at(places: np.ndarray) -> np.ndarray:
    """The field: a sum of 4000 waves with the spectrum of a Matérn-3/2 kernel, which is Student's t."""
    rng = np.random.default_rng(1)
    omega = rng.normal(size=(2, 4000)) / LENGTHSCALE / np.sqrt(rng.chisquare(3.0, 4000) / 3.0)
    phase = rng.uniform(0.0, 2.0 * np.pi, 4000)
    parts = [np.cos(part @ omega + phase).sum(axis=1) for part in np.array_split(places, 100)]
    return np.sqrt(2.0 / 4000) * np.concatenate(parts)


def data(num: int) -> tuple[np.ndarray, ...]:
    """Places, covariate, predictor and counts."""
    rng = np.random.default_rng(0)
    X, covariate = rng.uniform(size=(num, 2)), rng.normal(size=num)
    predictor = field_at(X) + LEVEL + EFFECT * covariate
    return X, covariate, predictor, rng.poisson(np.exp(predictor)).astype(float)


def cost(num: int, num_neighbours: int, repeats: int) -> dict:
    """One step."""
    X, covariate, _, y = data(num)
    guide = sgp.AutoVecchiaGP(counts, num_neighbours=num_neighbours)
    svi = SVI(counts, guide, sgp.NaturalGradient(0.5, optax.adam(0.01)), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, covariate, y)
    update = jax.jit(svi.update).lower(state, X, covariate, y).compile()
    seconds = []
    for _ in range(repeats + 1):
        start = time.process_time()
        state, _ = jax.block_until_ready(update(state, X, covariate, y))
        seconds.append(time.process_time() - start)
    memory = update.memory_analysis().temp_size_in_bytes
    found = {"rows": num, "neighbours": num_neighbours, "seconds": min(seconds[1:]), "megabytes": memory / 1e6}
    print(found, flush=True)
    return found


def equal_time(reduced: bool, figure: Path | None) -> dict:
    """The rough field, by neighbours and by inducing inputs."""
    num, num_test, steps = (400, 50, 3) if reduced else (100_000, 2000, 100)
    X, covariate, predictor, y = data(num + num_test)
    train, tested = (X[:num], covariate[:num], y[:num]), tuple(each[num:] for each in (X, covariate, predictor, y))
    grid = np.stack(np.meshgrid(*(np.linspace(0.4, 0.6, 8 if reduced else 80),) * 2), axis=-1).reshape(-1, 2)
    runs, maps = [], {}
    for neighbours in (5,) if reduced else (20, 40):
        guide = sgp.AutoVecchiaGP(counts, num_neighbours=neighbours)
        params, seconds = by_all_rows(counts, guide, train, steps, 0.1)
        runs.append(counts_row(f"{neighbours} neighbours", guide, params, seconds, train, tested))
        q = guide.posterior(jax.random.key(3), params, grid, np.zeros(len(grid)))["f"]
        maps[f"{neighbours} neighbours"] = q.mean
    limit = runs[-1]["seconds"]
    for M in (20,) if reduced else (500, 1000):
        Z = np.asarray(sgp.kmeans(None, X[: min(num, 20_000)], num_inducing=M))
        guide = sgp.AutoTSVGP(counts, Z)
        params, seconds, number = by_batches(counts, guide, train, limit, 5 if reduced else None)
        row = counts_row(f"{M} inducing inputs", guide, params, seconds, train, tested)
        runs.append(row | {"steps": number})
        q = guide.posterior(jax.random.key(3), params, grid, np.zeros(len(grid)))["f"]
        maps[f"{M} inducing inputs"] = q.mean
    if figure is not None:
        draw(figure, grid, maps)
    truth = {"mean_of_field": float(field_at(X).mean()), "variance_of_field": float(field_at(X).var())}
    truth |= {"level": LEVEL, "effect": EFFECT, "lengthscale": LENGTHSCALE, "mean_count": float(y[:num].mean())}
    print(truth)
    return {"rows": num, "steps": steps, "truth": truth, "runs": runs}


def draw(path: Path, grid: np.ndarray, maps: dict) -> None:
    """A part of the field, true and estimated."""
    import matplotlib.pyplot as plt

    side = round(np.sqrt(len(grid)))
    truth = {"truth": field_at(grid)} | maps
    wanted = ["truth", *[name for name in maps if name.startswith(("40 n", "1000", "5 n", "20 i"))]]
    fig, axes = plt.subplots(1, len(wanted), figsize=(3.2 * len(wanted), 3.3), layout="constrained")
    for ax, name in zip(axes, wanted, strict=True):
        image = ax.imshow(
            np.reshape(truth[name], (side, side)), origin="lower", extent=(0.4, 0.6, 0.4, 0.6), vmin=-2.5, vmax=2.5
        )
        ax.set(title=name, xticks=[], yticks=[])
    fig.colorbar(image, ax=axes, label="f", shrink=0.8)
    fig.savefig(path, dpi=150)


def against_nuts(reduced: bool) -> list[dict]:
    """100 counts, beside long chains of the dense model."""
    num = 40 if reduced else 100
    rng = np.random.default_rng(0)
    X, covariate = rng.uniform(size=(num, 2)), rng.normal(size=num)
    f = np.sin(6.0 * X[:, 0]) * np.cos(5.0 * X[:, 1])
    y = rng.poisson(np.exp(f + LEVEL + EFFECT * covariate)).astype(float)

    def exact(X, covariate, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-2.0, 1.0))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        L = jnp.linalg.cholesky(Matern32(lengthscale, variance)(X, X) + 1e-6 * jnp.eye(num))
        f = numpyro.deterministic("f", L @ numpyro.sample("v", dist.Normal().expand([num])))
        numpyro.sample("y", dist.Poisson(jnp.exp(f + level + effect * covariate)).to_event(1), obs=y)

    table, known = [], {}
    for kind in ("trained",) if reduced else ("trained", "fixed"):
        given = known if kind == "fixed" else {}
        model, dense = (numpyro.handlers.condition(each, given) for each in (counts, exact))
        # Correlated numbers have one mass matrix.
        together = [tuple(name for name in ("lengthscale", "variance", "level", "effect") if name not in given)]
        num_samples = 20 if reduced else 4000
        theirs, r_hat, ess = long_chains(dense, X, covariate, y, num_samples=num_samples, dense_mass=together)
        known = known or {name: float(np.median(theirs[name])) for name in ("lengthscale", "variance")}
        print(f"{kind}: NUTS with R-hat {r_hat:.4f}, smallest effective sample size {ess:.0f}", flush=True)
        for neighbours in (10,) if reduced else (10, 20, 40):
            guide = sgp.AutoVecchiaGP(model, num_neighbours=neighbours, base=AutoMultivariateNormal)
            optim = sgp.NaturalGradient(0.5, optax.adam(optax.cosine_decay_schedule(0.05, 800)))
            svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_particles=1 if reduced else 4))
            steps, shape = (10, (20,)) if reduced else (800, (4000,))
            params = svi.run(jax.random.key(2), steps, X, covariate, y, progress_bar=False).params
            draws = guide.sample_posterior(jax.random.key(3), params, X, covariate, sample_shape=shape)
            latents = ("f", "level", "effect", *(() if given else known))
            columns = {"hyperparameters": kind, "neighbours": neighbours, "r_hat": r_hat, "ess": ess}
            label = f"{kind}, {neighbours} neighbours"
            table += compared(label, draws, theirs, latents, positive=list(known), **columns)
    return table


def main(arguments: argparse.Namespace) -> None:
    """Costs and the field, or NUTS."""
    numpyro.enable_x64()
    if arguments.nuts or arguments.reduced:
        report("spatial_nuts", {"table": against_nuts(arguments.reduced)}, arguments.output)
    if not arguments.nuts:
        sizes = ((300, 5),) if arguments.reduced else ((10_000, 20), (10_000, 40), (10_000, 80), (100_000, 40))
        table = [cost(*size, 1 if arguments.reduced else 3) for size in sizes]
        report("spatial", {"costs": table, **equal_time(arguments.reduced, arguments.figure)}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nuts", action="store_true", help="the comparison with NUTS in the place of costs")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the results as JSON")
    parser.add_argument("--figure", type=Path)
    main(parser.parse_args())
