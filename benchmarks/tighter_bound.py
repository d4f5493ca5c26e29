"""What does an M-step see? The bound as a function of a hyperparameter after an E-step at its old value.

Toy classification in one dimension, ten inducing inputs; the E-step is run to its optimum at θ_old, then θ moves while
the sites (t-SVGP), q(v) (whitened SVGP) or q(u) (unwhitened SVGP) stay fixed. Left: the bound, as in Figure 1 of Adam
et al. (2021). Right: the θ that maximises it against θ_old, as in their Figure 2: the flatter, the faster EM converges.

    python benchmarks/tighter_bound.py [--reduced] [--figure tighter_bound.png] [--output results]
"""

import argparse
from pathlib import Path

from common import report
import jax
import jax.numpy as jnp
import numpy as np

from numpyro_sgp.inducing import InducingPoints
from numpyro_sgp.kernels import SquaredExponential
from numpyro_sgp.math.linalg import cholesky, triangular_inverse
from numpyro_sgp.math.quadrature import gauss_hermite
from numpyro_sgp.posteriors.dual.formulas import natural_whitened
from numpyro_sgp.posteriors.moments import project
from numpyro_sgp.posteriors.whitened.formulas import unwhitened, whitened

FORMS = ("t-SVGP", "whitened SVGP", "unwhitened SVGP")


def toy(N: int = 100) -> tuple[jax.Array, jax.Array]:
    """Binary labels of a noisy sine."""
    rng = np.random.default_rng(1)
    x = np.sort(rng.uniform(0.0, 1.0, N))
    y = np.sin(10.0 * x) + 0.6 * rng.normal(size=N) > 0.0
    return jnp.asarray(x[:, None]), jnp.asarray(y, float)


def blocks(theta, X, Z):
    """Prior blocks with variance θ and a fixed lengthscale."""
    return project(InducingPoints(Z), SquaredExponential(0.15, theta), X, 1e-8)


def expected_log_likelihood(mean, variance, y):
    """Σ_n E_q[log σ(±f_n)] by quadrature."""
    nodes, weights = gauss_hermite(32)
    f = mean + jnp.sqrt(variance) * jnp.asarray(nodes)[:, None]
    return jnp.sum(jnp.asarray(weights)[:, None] * (y * jax.nn.log_sigmoid(f) + (1.0 - y) * jax.nn.log_sigmoid(-f)))


def e_step(theta, X, Z, y, iterations: int = 150):
    """Whitened natural parameters at the optimum of the bound, by natural steps of half length."""
    _, _, A, kff = blocks(theta, X, Z)
    M = Z.shape[0]

    def body(_, sites):
        q = natural_whitened(*sites, A, kff)
        a, b = jax.grad(expected_log_likelihood, argnums=(0, 1))(q.mean, q.variance, y)
        beta = -2.0 * b
        target = (A @ (a + beta * q.mean), (A * beta) @ A.T)
        return jax.tree.map(lambda old, new: 0.5 * (old + new), sites, target)

    return jax.lax.fori_loop(0, iterations, body, (jnp.zeros(M), jnp.zeros((M, M))))


def frozen(theta, X, Z, y):
    """What each form keeps while θ moves, made at the optimum for θ."""
    L = blocks(theta, X, Z).L
    lambda1, Lambda2 = e_step(theta, X, Z, y)
    inverse = triangular_inverse(cholesky(jnp.eye(len(Z)) + Lambda2))
    m, S_sqrt = inverse.T @ (inverse @ lambda1), inverse.T
    L_inverse = triangular_inverse(L)
    return {
        "t-SVGP": (L_inverse.T @ lambda1, L_inverse.T @ Lambda2 @ L_inverse),
        "whitened SVGP": (m, jnp.linalg.cholesky(S_sqrt @ S_sqrt.T)),
        "unwhitened SVGP": (L @ m, jnp.linalg.cholesky(L @ S_sqrt @ S_sqrt.T @ L.T)),
    }


def bound(form: str, kept, theta, X, Z, y):
    """The ELBO at θ with what the form keeps."""
    L, _, A, kff = blocks(theta, X, Z)
    if form == "t-SVGP":
        lambda1, Lambda2 = kept
        q = natural_whitened(L.T @ lambda1, L.T @ Lambda2 @ L, A, kff)
    elif form == "whitened SVGP":
        q = whitened(*kept, A, kff)
    else:
        q = unwhitened(*kept, L, A, kff)
    return expected_log_likelihood(q.mean, q.variance, y) - q.kl


def main(arguments: argparse.Namespace) -> None:
    """Bounds on a grid of θ, and the map from θ_old to the θ that an M-step finds."""
    jax.config.update("jax_enable_x64", True)
    X, y = toy()
    Z = jnp.linspace(0.0, 1.0, 10)[:, None]
    thetas = jnp.logspace(-0.5, 2.5, 7 if arguments.reduced else 61)
    old = jnp.asarray(3.0)
    frozen_at = jax.jit(lambda theta: frozen(theta, X, Z, y))
    curves, maps, em = {}, {}, {}
    best = jax.jit(jax.vmap(lambda t: bound("t-SVGP", frozen(t, X, Z, y)["t-SVGP"], t, X, Z, y)))(thetas)
    olds = thetas[:: 3 if arguments.reduced else 2]
    everything = jax.vmap(frozen_at)(olds)
    for form in FORMS:
        evaluate = jax.jit(jax.vmap(lambda kept, t, form=form: bound(form, kept, t, X, Z, y), in_axes=(None, 0)))
        curves[form] = evaluate(frozen_at(old)[form], thetas)
        grid = jax.vmap(lambda kept, run=evaluate: run(kept, thetas))(everything[form])
        maps[form] = thetas[jnp.argmax(jnp.where(jnp.isnan(grid), -jnp.inf, grid), axis=1)]
        gap = np.asarray(best - curves[form])
        steps = [old]
        for _ in range(4):
            grid = evaluate(frozen_at(steps[-1])[form], thetas)
            steps.append(thetas[jnp.argmax(grid)])
        em[form] = [float(s) for s in steps]
        path = " -> ".join(f"{s:.3g}" for s in em[form])
        print(
            f"{form:16s} gap to the optimum over θ in [{float(thetas[0]):.2g}, {float(thetas[-1]):.3g}]: "
            f"median {np.median(gap):8.3f}, largest {gap.max():9.3f} nats; EM from θ={float(old):.2g}: {path}"
        )
    result = {
        "theta": thetas.tolist(),
        "optimum": best.tolist(),
        "bounds": {form: np.asarray(curve).tolist() for form, curve in curves.items()},
        "theta_old": olds.tolist(),
        "theta_new": {form: np.asarray(value).tolist() for form, value in maps.items()},
        "em": em,
    }
    report("tighter_bound", result, arguments.output)
    if arguments.figure is not None:
        figure(result, float(old), arguments.figure)


def figure(result: dict, old: float, path: Path) -> None:
    """The two panels."""
    import matplotlib.pyplot as plt

    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.semilogx(result["theta"], result["optimum"], "k:", label="E-step at every θ")
    for style, form in zip(("C0-", "C3-.", "C1--"), FORMS, strict=True):
        left.semilogx(result["theta"], result["bounds"][form], style, label=form)
        right.loglog(result["theta_old"], result["theta_new"][form], style, label=form)
    top = max(result["optimum"])
    left.axvline(old, color="0.8", zorder=0)
    left.set(ylim=(top - 25.0, top + 2.0), xlabel="kernel variance θ", ylabel="bound (nats)")
    right.loglog(result["theta"], result["theta"], color="0.8", zorder=0)
    right.legend(*left.get_legend_handles_labels(), frameon=False, fontsize=8, loc="upper left")
    right.set(xlabel="θ of the E-step", ylabel="θ found by the M-step")
    plt.savefig(path, dpi=120)
    print(f"figure written to {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="where to write the figure")
    main(parser.parse_args())
