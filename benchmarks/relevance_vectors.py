"""How many of 500 vectors a relevance vector machine keeps on the sinc function: Figure 3 of Evans and Nair (2020).

500 noisy values of sin(x)/x and a basis function at each of them, the columns of their kernel matrix. The setting is
the paper's: a chevron covariance with 10 dense columns, a control variate of rank 250, 250 basis functions and 100 rows
in a step. The paper gives neither the kernel nor the noise: here a squared exponential of lengthscale 2, and 0.1.
Beside it the updates of Tipping (2001) on dense matrices, with the same kernel, noise and threshold.

    python benchmarks/relevance_vectors.py --output results --figure relevance_vectors.png
"""

import argparse
from pathlib import Path
import time

from common import report
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI

import numpyro_sgp as sgp

NOISE, LENGTHSCALE, THRESHOLD = 0.1, 2.0, 1e4
FULL = {"n": 500, "columns": 10, "control": 250, "batch": 250, "rows": 100, "steps": 40_000}
REDUCED = {"n": 40, "columns": 2, "control": 20, "batch": 20, "rows": 20, "steps": 100}


def dense(K: np.ndarray, y: np.ndarray, iterations: int) -> tuple[np.ndarray, np.ndarray]:
    """Which weights s ← (1 − s Σ_kk)/μ_k² keeps, and their posterior means."""
    left, s = np.arange(len(y)), np.ones(len(y))
    for _ in range(iterations):
        Phi = K[:, left]
        root = np.linalg.cholesky(Phi.T @ Phi / NOISE**2 + np.diag(s))
        inverse = np.linalg.solve(root, np.eye(len(left)))
        mean, variance = inverse.T @ (inverse @ (Phi.T @ y)) / NOISE**2, np.sum(inverse**2, axis=0)
        s = np.maximum(1.0 - s * variance, 1e-12) / mean**2
        keep = s < 1e9  # far above the threshold: such weights do not come back
        left, s, mean = left[keep], s[keep], mean[keep]
    small = s < THRESHOLD
    return left[small], mean[small]


def main(arguments: argparse.Namespace) -> None:
    """Train, count what is kept, and draw."""
    numpyro.enable_x64()
    settings = REDUCED if arguments.reduced else FULL
    n = settings["n"]
    rng = np.random.default_rng(1)
    # In random order: the dense columns start at the first basis functions.
    x = rng.permutation(np.linspace(-10.0, 10.0, n))[:, None]
    truth = np.sinc(x[:, 0] / np.pi)
    y = truth + NOISE * rng.normal(size=n)
    kernel = sgp.features.InducingBasis(sgp.kernels.SquaredExponential(LENGTHSCALE), x)

    def model(X, y=None, num_data=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = sgp.AutoQSGP(
        model,
        basis_batch=settings["batch"],
        covariance="chevron",
        dense_columns=settings["columns"],
        control=settings["control"],
        relevance=True,
    )
    svi = SVI(model, guide, sgp.RowSparse(0.03), sgp.QuadratureELBO())
    start = time.perf_counter()
    params = sgp.fit(
        svi,
        jax.random.key(0),
        (x, y),
        batch_size=settings["rows"],
        num_steps=settings["steps"],
        progress_bar=False,
    ).params
    seconds = time.perf_counter() - start
    kept = guide.relevant_vectors(params, threshold=THRESHOLD)
    pruned = guide.posterior(jax.random.key(0), guide.pruned(params, threshold=THRESHOLD), x)["f"]
    mean, sd = np.asarray(pruned.mean), np.sqrt(np.asarray(pruned.variance) + NOISE**2)

    def rmse(f: np.ndarray) -> float:
        return float(np.sqrt(np.mean((f - truth) ** 2)))

    K = np.asarray(kernel.kernel(x, x))
    index, weights = dense(K, y, 50 if arguments.reduced else 2000)
    other = K[:, index] @ weights
    exact = K @ np.linalg.solve(K + NOISE**2 * np.eye(n), y)
    strong = int(np.sum(kept.precision < THRESHOLD / 10.0))
    first = int(np.sum(kept.index < settings["columns"]))
    result = {
        "n": n,
        "kept": len(kept.index),
        "kept_at_a_tenth_of_the_threshold": strong,
        "kept_of_the_first": first,
        "rmse": rmse(mean),
        "seconds": seconds,
        "dense_updates": {"kept": len(index), "rmse": rmse(other)},
        "exact_gp_rmse": rmse(exact),
    }
    print(f"kept {len(kept.index)} of {n} ({strong} below a tenth of the threshold), error {result['rmse']:.4f}")
    print(f"of the first {settings['columns']}, where the dense columns start: {first}")
    print(f"dense updates: kept {len(index)}, error {rmse(other):.4f}; exact GP: error {rmse(exact):.4f}")
    report("relevance_vectors", {"settings": settings, **result}, arguments.output)
    if arguments.figure:
        figure, ax = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
        order = np.argsort(x[:, 0])
        ax.plot(x[:, 0], y, ".", color="0.6", markersize=3, label="data and basis functions")
        ax.plot(x[order, 0], mean[order], "C0", label="posterior mean, pruned")
        low, high = (mean - sd)[order], (mean + sd)[order]
        ax.fill_between(x[order, 0], low, high, color="C0", alpha=0.2, linewidth=0, label="one standard deviation")
        ax.plot(x[kept.index, 0], y[kept.index], "ko", markersize=5, label="relevance vectors")
        ax.set(xlabel="x", ylabel="y")
        ax.legend(frameon=False, fontsize="small")
        figure.savefig(arguments.figure, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reduced", action="store_true", help="40 vectors, 100 steps")
    parser.add_argument("--output", type=Path, help="folder for the results")
    parser.add_argument("--figure", type=Path, help="path of the figure")
    main(parser.parse_args())
