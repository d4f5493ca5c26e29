"""A basis function at each training row: Figure 2 and Table 3 of Evans and Nair (2020).

The features are k(x, xₙ) of all N training rows xₙ, so that the mean can become that of the exact GP. As in the paper,
the squared exponential kernel and the noise are those of an exact GP on 1000 random rows, and stay as they are; the
covariance of the weights is diagonal (QSGP-0), the control variate has rank 200, and the predictive variance is the
augmented one of proposition 4. The diagonal is the best one, in closed form (proposition 1). RMSE and mean negative log
probability (MNLP) are of outputs scaled by the training standard deviation; those of the exact GP on the 1000 rows are
there too. Results are added to those that the output folder has.

Without data it is Figure 2: the standard deviation on 20 values of the sinc function, of the exact GP and of QSGP with
a diagonal and a dense covariance, each with and without augmentation.

    python benchmarks/qsgp_all_rows.py --figure qsgp_augmented.png
    python benchmarks/qsgp_all_rows.py --data kin40k.npz [--folds 0 1] [--steps 1000] [--output results]
"""

import argparse
from pathlib import Path
import time

from common import add_run, earlier, report, spread
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
from qsgp_tables import model_of, problem

import numpyro_sgp as sgp

FULL = {"first": 1000, "basis_batch": 3000, "batch": 3000, "control": 200}
REDUCED = {"first": 40, "basis_batch": 40, "batch": 40, "control": 10}
# RMSE and MNLP of QSGP-0 and of SVGP.
PAPER = {"kin40k": {"QSGP-0": (0.154, -0.348), "SVGP": (0.171, -0.089)}}


def observed(kernel, noise, X, y=None, num_data=None):
    """Outputs with Gaussian noise."""
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def scores(mean, variance, y) -> dict[str, float]:
    """RMSE and MNLP."""
    error, variance = np.asarray(mean, float) - y, np.asarray(variance, float)
    mnlp = 0.5 * np.mean(error**2 / variance + np.log(2.0 * np.pi * variance))
    return {"rmse": float(np.sqrt(np.mean(error**2))), "mnlp": float(mnlp)}


def qsgp(kernel, noise: float, X, y, settings: dict, *, dense_columns: int, step_size: float, steps: int):
    """A trained QSGP with a basis function at each row: guide, result of `fit`."""

    def model(X_, y=None, num_data=None):
        observed(sgp.features.InducingBasis(kernel, X), noise, X_, y, num_data)

    options = {"basis_batch": min(settings["basis_batch"], len(X)), "control": settings["control"]}
    guide = sgp.AutoQSGP(model, covariance="chevron", dense_columns=dense_columns, **options)
    optim = sgp.RowSparse(optax.cosine_decay_schedule(step_size, steps))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_nodes=3))  # the logarithm of a normal density is a quadratic
    batch = min(settings["batch"], len(X))
    return guide, sgp.fit(svi, jax.random.key(1), (X, y), batch_size=batch, num_steps=steps, progress_bar=False)


def run(data: tuple, settings: dict) -> dict:
    """Scores of one fold."""
    X, y, X_test, y_test = data
    key = jax.random.key(0)
    first = np.random.default_rng(0).permutation(len(X))[: settings["first"]]
    start = sgp.fit(model_of(None), key, (X[first].astype(float), y[first].astype(float)), progress_bar=False)
    hyper = {name: np.asarray(start.params[name], X.dtype) for name in ("lengthscale", "variance", "noise")}
    noise = float(hyper["noise"])
    q = start.guide.posterior(key, start.params, X_test.astype(float))["f"]
    found = {"exact GP on the first rows": scores(q.mean, q.variance + noise**2, y_test)}

    kernel = sgp.kernels.SquaredExponential(jnp.asarray(hyper["lengthscale"]), jnp.asarray(hyper["variance"]))
    options = {"step_size": settings["step_size"], "steps": settings["steps"]}
    clock = time.process_time()
    guide, result = qsgp(kernel, noise, X, y, settings, dense_columns=0, **options)
    jax.block_until_ready(result.losses)
    cpu = time.process_time() - clock
    params = guide.with_optimal_diagonal(key, result.params, X, noise_scale=noise)
    mean = guide.posterior(key, params, X_test)["f"].mean
    v = guide.augmented_variance(key, params, X_test, X, noise_scale=noise)
    refused = int(sgp.num_refused(result.state))
    found["QSGP-0"] = {**scores(mean, v + noise**2, y_test), "noise": noise, "cpu": cpu, "refused": refused}
    return found


def sinc(reduced: bool, path: Path | None) -> dict:
    """Standard deviations of Figure 2, and the figure."""
    numpyro.enable_x64()
    n, noise, key = 20, 0.1, jax.random.key(0)
    x = np.sort(np.random.default_rng(0).uniform(-5.0, 5.0, n))[:, None]
    y = np.sinc(x[:, 0]) + noise * np.random.default_rng(1).normal(size=n)
    at = np.linspace(-9.0, 9.0, 181)[:, None]
    kernel = sgp.kernels.SquaredExponential(jnp.asarray(0.8), jnp.asarray(0.3))
    K = np.asarray(kernel(x, x)) + noise**2 * np.eye(n)
    k = np.asarray(kernel(at, x))
    exact_mean, prior = k @ np.linalg.solve(K, y), 0.3
    exact = np.sqrt(prior - np.sum(k * np.linalg.solve(K, k.T).T, axis=1))
    sds, means = {"exact GP": exact}, {"exact GP": exact_mean}
    settings = {"basis_batch": n, "batch": n, "control": None}
    for name, columns in {"diagonal": 0, "dense": n - 1}.items():
        steps = 50 if reduced else 20_000
        guide, result = qsgp(kernel, noise, x, y, settings, dense_columns=columns, step_size=0.3, steps=steps)
        params = guide.with_optimal_diagonal(key, result.params, x, noise_scale=noise)
        q = guide.posterior(key, params, at)["f"]
        means[name], sds[name] = np.asarray(q.mean), np.sqrt(np.asarray(q.variance))
        sds[f"{name}, augmented"] = np.sqrt(guide.augmented_variance(key, params, at, x, noise_scale=noise))
    inside = np.abs(at[:, 0]) < np.max(np.abs(x))
    table = {
        name: {"at the data": float(np.mean(sd[inside] / exact[inside])), "far away": float(sd[0] / exact[0])}
        for name, sd in sds.items()
    }
    for name, row in table.items():
        print(f"{name:<20} sd over that of the exact GP:", *(f"{where} {value:.3f}" for where, value in row.items()))
    error = {name: float(np.max(np.abs(mean - exact_mean))) for name, mean in means.items()}
    print("largest distance from the exact mean", error)
    if path is not None:
        figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.0), layout="constrained", sharey=True)
        for ax, form in zip(axes, ("diagonal", "dense"), strict=True):
            ax.plot(x[:, 0], y, "k.", markersize=4)
            ax.plot(at[:, 0], means[form], "C0")
            for name, style in {"exact GP": "k-", form: "C3--", f"{form}, augmented": "C0-"}.items():
                for sign in (-1.0, 1.0):
                    ax.plot(
                        at[:, 0], means[form] + sign * sds[name], style, linewidth=1, label=name if sign > 0 else None
                    )
            ax.set(xlabel="x", ylim=(-0.7, 1.7), title=f"{form} covariance")
            ax.legend(frameon=False, fontsize="small", ncols=3, loc="upper center")
        figure.savefig(path, dpi=120)
        print(f"figure written to {path}")
    return {"standard deviations": table, "means": error}


def main(arguments: argparse.Namespace) -> None:
    """The figure, or the table for each data set and fold."""
    numpyro.enable_x64()  # for the GP on the first rows; the others are float32
    settings = {**(REDUCED if arguments.reduced else FULL), "steps": arguments.steps, "step_size": arguments.step_size}
    if arguments.reduced or not arguments.data:
        result = sinc(arguments.reduced, arguments.figure)
        report("qsgp_augmented", result, arguments.output)
        if not arguments.reduced:
            return
        settings["steps"] = 5
    for path in arguments.data or [None]:
        name = "sines" if path is None else path.stem
        for fold in arguments.folds:
            runs = earlier("qsgp_all_rows", settings, arguments.output)
            if str(fold) not in runs.get(name, {}):
                found = run(problem(path, fold), settings)
                print(f"{name} fold {fold}", found, flush=True)
                result = {"settings": settings, "paper": PAPER}
                runs = add_run("qsgp_all_rows", result, name, fold, found, arguments.output)
        folds = runs.get(name, {}).values()
        for method in ("exact GP on the first rows", "QSGP-0") if folds else ():
            cells = (f"{key} {spread([fold[method][key] for fold in folds])}" for key in ("rmse", "mnlp"))
            print(f"  {method:<28}", *cells, "paper", PAPER.get(name, {}).get(method, "-"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="sets as .npz with X, y and test_mask")
    parser.add_argument("--folds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-size", type=float, default=1.0)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="path of Figure 2")
    main(parser.parse_args())
