"""Variance of the estimates of |Φμ|²/σ² and of their gradients against the rank of the control variate: Figure 1 of
Evans and Nair (2020), with the estimators of this package beside the paper's.

kin40k, m = 10000 random Fourier features of a squared exponential kernel, μ a draw from the prior, M = B = 500. "paper"
has two independent sets of M basis functions and equation 3 as the control variate; "U-statistic" one set of M and the
same control variate; "Nyström" one set, and estimates only what interpolation from the inputs of the control variate
leaves over. Variances are over repetitions, relative to those of "paper" without a control variate.

    python benchmarks/qsgp_variance.py --data kin40k.npz [--lengthscale 2.0] [--repetitions 300] [--output results]
    python benchmarks/qsgp_variance.py --result results/qsgp_variance.json --figure qsgp_variance.png
"""

import argparse
from functools import partial
import json
from pathlib import Path

from common import data_set, report
import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp import features, kernels
from numpyro_sgp.math.linalg import cholesky
from numpyro_sgp.posteriors.quadruply_stochastic import formulas as quadruply_stochastic_formulas
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import draw_index

METHODS = ("paper", "U-statistic", "Nyström")


@partial(jax.jit, static_argnames=("method", "M", "B", "P"))
def estimate(key, kernel, X, X_p, L, mu, a, *, method, M, B, P):
    """One estimate of Σ_n (Φμ)_n² and its gradient, dense, (m,)."""
    n, m = len(X), len(mu)
    keys = jax.random.split(key, 3)
    rows = jax.random.randint(keys[0], (B,), 0, n)
    i = draw_index(keys[1], m, M)
    sample = quadruply_stochastic_formulas.inclusion(m, M)
    if method == "paper":
        j = draw_index(keys[2], m, M)
        Phi_i, Phi_j, p_i, p_j = (kernel.features(at, index) for at in (X[rows], X_p) for index in (i, j))

        def loss(d_i, d_j):
            def product(left, right):
                return jnp.sum((left @ (mu[i] + d_i)) * (right @ (mu[j] + d_j))) * (m / M) ** 2

            value = n / B * product(Phi_i, Phi_j)
            if not P:
                return value
            exact = jnp.sum(a * a) + m / M * jnp.sum(a * (p_i @ d_i + p_j @ d_j))
            return value + n / P * (exact - product(p_i, p_j))

        value, (g_i, g_j) = jax.value_and_grad(loss, (0, 1))(jnp.zeros(M), jnp.zeros(M))
        return value, jnp.zeros(m).at[i].add(g_i).at[j].add(g_j)
    Phi, Phi_p = kernel.features(X[rows], i), kernel.features(X_p, i)

    def loss(change):
        w, d = mu[i][:, None], change[:, None]
        residual = None
        if P and method == "Nyström":
            residual = quadruply_stochastic_formulas.nystrom_residual(L, kernel.kernel(X_p, X[rows]), Phi_p, a[:, None])
        _, squares = quadruply_stochastic_formulas.linear_and_square(Phi, w, d, sample, residual)
        extra = 0.0
        if P and method == "U-statistic":
            extra = quadruply_stochastic_formulas.control_variate(Phi_p, w, d, a[:, None], sample)[0]
        return n / B * jnp.sum(squares + extra)

    value, gradient = jax.value_and_grad(loss)(jnp.zeros(M))
    return value, jnp.zeros(m).at[i].add(gradient)


def variance(repetitions: int, *arguments, **options) -> tuple[float, float]:
    """Of the value, and of the gradient, summed over its entries."""
    values, total, squares = [], 0.0, 0.0
    for key in jax.random.split(jax.random.key(1), repetitions):
        value, gradient = estimate(key, *arguments, **options)
        values.append(float(value))
        total, squares = total + gradient, squares + float(jnp.sum(gradient * gradient))
    mean = total / repetitions
    return float(np.var(values)), squares / repetitions - float(jnp.sum(mean * mean))


def figure(rows: list[dict], path: Path) -> None:
    """Variances of values and of gradients against the rank."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panel, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharex=True)
    for ax, quantity in zip(axes, ("value", "gradient"), strict=True):
        for method in METHODS:
            found = [row for row in rows if row["method"] == method]
            ax.plot([row["rank"] for row in found], [row[quantity] for row in found], "o-", label=method)
        ax.set_xscale("symlog", linthresh=30)
        ax.set_yscale("log")
        ax.set(xlabel="rank of the control variate", title=f"variance of the {quantity}")
    axes[0].set_ylabel("relative to the paper's at rank 0")
    axes[1].legend(frameon=False)
    panel.savefig(path, dpi=110)
    print(f"figure written to {path}")


def main(arguments: argparse.Namespace) -> None:
    """Each method at each rank."""
    if arguments.result is not None:
        figure(json.loads(arguments.result.read_text("utf-8"))["rows"], arguments.figure)
        return
    if arguments.reduced:
        X = np.random.default_rng(0).normal(size=(300, 3))
        m, M, B, ranks, repetitions = 400, 50, 40, [20], 20
    else:
        X = np.concatenate(data_set(arguments.data)[::2])
        m, M, B, ranks, repetitions = 10_000, 500, 500, arguments.ranks, arguments.repetitions
    X = jnp.asarray(X, jnp.float32)
    kernel = features.RandomFourier(kernels.SquaredExponential(arguments.lengthscale), m, jax.random.key(0))
    mu = jax.random.normal(jax.random.key(2), (m,))
    order = np.random.default_rng(3).permutation(len(X))
    rows, first = [], None
    for rank in ranks:
        X_p = X[order[: max(rank, 1)]]
        L = cholesky(kernel.kernel(X_p, X_p), 1e-4)
        a = kernel.features(X_p) @ mu
        for method in METHODS:
            found = variance(repetitions, kernel, X, X_p, L, mu, a, method=method, M=M, B=B, P=rank)
            first = found if first is None else first
            rows.append({"rank": rank, "method": method, "value": found[0] / first[0], "gradient": found[1] / first[1]})
            print(
                "rank {rank:5d} {method:12s} value {value:.2e} gradient {gradient:.2e}".format(**rows[-1]), flush=True
            )
    report(
        "qsgp_variance", {"lengthscale": arguments.lengthscale, "m": m, "M": M, "B": B, "rows": rows}, arguments.output
    )
    if arguments.figure is not None:
        figure(rows, arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="kin40k as .npz with X, y and test_mask")
    parser.add_argument("--lengthscale", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, nargs="*", default=[0, 30, 100, 300, 1000])
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="file for the figure")
    parser.add_argument("--result", type=Path, help="draw the figure of an earlier result, and measure nothing")
    options = parser.parse_args()
    if options.result is not None and options.figure is None:
        parser.error("`--result` is for a figure: say where it goes with `--figure`.")
    if not options.reduced and options.data is None and options.result is None:
        parser.error("`--data` is needed; without it there is only `--reduced`.")
    main(options)
