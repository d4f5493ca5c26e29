"""The two bounds for Gaussian noise, "tight" and "titsias": what training ends with, and the time of a step.

Each data set is fitted with few inducing inputs by both bounds: L-BFGS on the collapsed bound of all rows, over
lengthscales, variance, noise and a constant mean. Measured are the noise, RMSE and the mean negative log predictive
density (NLPD) of test rows. The time is that of a natural-gradient step of `QuadratureELBO` with Gaussian noise.

    python benchmarks/gaussian_bound.py --data airfoil.npz energy.npz kin40k.npz [--output results]
    python benchmarks/gaussian_bound.py --costs [--output results]
"""

import argparse
from pathlib import Path
import time

from common import data_set, earlier, report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
import optax
import scipy.optimize

import numpyro_sgp as sgp

BOUNDS = ("titsias", "tight")


def fitted(data: tuple[np.ndarray, ...], Z: np.ndarray, bound: str, num_iterations: int) -> dict[str, float]:
    """What training by a bound ends with."""
    X, y, X_test, y_test = map(jnp.asarray, data)
    D = X.shape[1]

    def site(theta: jax.Array, X: jax.Array) -> sgp.SparseGPRegression:
        kernel = sgp.kernels.Matern52(jnp.exp(theta[:D]), jnp.exp(theta[D]))
        return sgp.SparseGPRegression(kernel, X, Z, jnp.exp(theta[D + 1]), theta[D + 2], bound=bound)

    step = jax.jit(jax.value_and_grad(lambda theta, X, y: -site(theta, X).log_prob(y)))
    start = np.concatenate([np.full(D, 0.5 * np.log(D)), [0.0, np.log(0.5), 0.0]])
    options = {"maxiter": num_iterations}
    found = scipy.optimize.minimize(lambda t: step(t, X, y), start, jac=True, method="L-BFGS-B", options=options)
    q = site(found.x, X).condition(y).marginals(X_test)
    noise = float(np.exp(found.x[D + 1]))
    variance = q.variance + noise**2
    nlpd = 0.5 * jnp.log(2.0 * jnp.pi * variance) + 0.5 * (y_test - q.mean) ** 2 / variance
    rmse = jnp.sqrt(jnp.mean((y_test - q.mean) ** 2))
    return {"bound": -float(found.fun) / len(y), "noise": noise, "rmse": float(rmse), "nlpd": float(jnp.mean(nlpd))}


def quality(folds: list[tuple[np.ndarray, ...]], numbers: list[int], num_iterations: int) -> list[dict]:
    """A data set with each number of inducing inputs: means over folds."""
    table = []
    for M in numbers:
        row: dict = {"rows": len(folds[0][0]), "M": M}
        for bound in BOUNDS:
            found = []
            for data in folds:
                Z = np.asarray(sgp.kmeans(None, data[0], num_inducing=min(M, len(data[0]) // 2)))
                found.append(fitted(data, Z, bound, num_iterations))
            row[bound] = {name: float(np.mean([each[name] for each in found])) for name in found[0]}
        table.append(row)
        print(M, *({name: round(value, 4) for name, value in row[b].items()} for b in BOUNDS), flush=True)
    return table


def costs(*, reduced: bool) -> list[dict]:
    """Milliseconds of a step with each bound, in turn, the least of them."""
    rng, D, table = np.random.default_rng(0), 8, []
    for M, B in ((8, 10),) if reduced else ((128, 1000), (512, 256)):
        X, Z = rng.uniform(-1.0, 1.0, (B, D)), rng.uniform(-1.0, 1.0, (M, D))
        y = np.sin(3.0 * X[:, 0]) + 0.1 * rng.normal(size=B)

        def model(X, y=None):
            lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([D]).to_event(1))
            noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale), X))
            with numpyro.plate("data", 10_000, subsample_size=X.shape[0]):
                numpyro.sample("y", dist.Normal(f, noise), obs=y)

        steps = {}
        for bound in BOUNDS:
            guide = sgp.AutoTSVGP(model, Z, base=AutoDelta)
            loss = sgp.QuadratureELBO(num_nodes=2, bound=bound)
            svi = SVI(model, guide, sgp.NaturalGradient(0.1, optax.adam(1e-3)), loss)
            state, update = jax.jit(svi.init)(jax.random.key(0), X, y), jax.jit(svi.update)
            state, _ = jax.block_until_ready(update(state, X, y))
            steps[bound] = (update, state, [])
        for _ in range(2 if reduced else 30):
            for update, state, times in steps.values():
                start = time.perf_counter()
                jax.block_until_ready(update(state, X, y))
                times.append(1e3 * (time.perf_counter() - start))
        row = {"M": M, "B": B, **{bound: min(times) for bound, (_, _, times) in steps.items()}}
        table.append(row)
        print({name: round(value, 2) for name, value in row.items()}, flush=True)
    return table


def main(arguments: argparse.Namespace) -> None:
    """Quality of data sets, or the costs."""
    numpyro.enable_x64()
    reduced, folds = arguments.reduced, arguments.folds
    sets = {path.stem: [data_set(path, fold) for fold in range(folds)] for path in arguments.data}
    if reduced:
        X, X_test = np.random.default_rng(0).normal(size=(2, 30, 2))
        sets = {"synthetic": [(X, np.sin(X[:, 0]), X_test, np.sin(X_test[:, 0]))]}
    if arguments.costs or reduced:
        report("gaussian_bound_steps", {"table": costs(reduced=reduced)}, arguments.output)
    runs = earlier("gaussian_bound", {"folds": folds}, arguments.output) if sets else {}
    for name, data in sets.items():
        print(name)
        runs[name] = quality(data, [8] if reduced else [50, 200], 3 if reduced else 200)
        report("gaussian_bound", {"settings": {"folds": folds}, "runs": runs}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="data sets as .npz with X, y and test_mask")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--costs", action="store_true", help="the times of steps")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    main(parser.parse_args())
