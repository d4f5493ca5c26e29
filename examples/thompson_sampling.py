"""Minimise a function of two inputs by Thompson sampling: evaluate it where draws of the posterior are least.

`sample_functions` draws whole functions from the posterior, which are minimised by gradient descent like any other.
Four draws give four different inputs to evaluate at once. The arrays have room for all evaluations from the start, and
a mask says which have been made, so that every round runs the same compiled program.

    python examples/thompson_sampling.py [--smoke] [--output thompson_sampling.png]
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

numpyro.enable_x64()

START, BATCH = 8, 4  # evaluations at random first, then so many in a round
NOISE = 2.0
LEAST = 0.397887


def branin(X):
    """Branin's function, scaled to the unit square; three minima of equal depth."""
    a, b = 15.0 * X[..., 0] - 5.0, 15.0 * X[..., 1]
    ridge = b - 5.1 / (4.0 * np.pi**2) * a**2 + 5.0 / np.pi * a - 6.0
    return ridge**2 + 10.0 * (1.0 - 1.0 / (8.0 * np.pi)) * jnp.cos(a) + 10.0


def model(X, y=None, made=True):
    """Regression on those rows that were `made`, outcomes of about unit scale."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.5).expand([2]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.5, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-3.0, 0.5))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale, variance), X))
    with numpyro.plate("evaluations", X.shape[0]), handlers.mask(mask=made):
        numpyro.sample("y", dist.Normal(level + f, noise), obs=y)


def minimisers(functions: sgp.FunctionDraws, rng_key, num_starts: int, num_steps: int):
    """Where each function is least in the unit square, (S, 2): the best of many descents."""
    S = functions.num_samples

    def own(Z):
        """Function s at its own inputs, Z of shape (S, num_starts, 2) in logits."""
        values = functions(jax.nn.sigmoid(Z).reshape(-1, 2)).reshape(S, S, num_starts)
        return values[jnp.arange(S), jnp.arange(S)]

    # Inputs go through a sigmoid to stay inside. The gradient of the sum is the gradient of each descent.
    Z = jax.scipy.special.logit(jax.random.uniform(rng_key, (S, num_starts, 2), minval=0.02, maxval=0.98))
    adam = optax.adam(0.1)

    def step(_, carry):
        Z, state = carry
        updates, state = adam.update(jax.grad(lambda Z: own(Z).sum())(Z), state)
        return optax.apply_updates(Z, updates), state

    Z, _ = jax.lax.fori_loop(0, num_steps, step, (Z, adam.init(Z)))
    return jax.nn.sigmoid(Z[jnp.arange(S), own(Z).argmin(axis=1)])


def make_round(num_fit: int, num_starts: int, num_descent: int, num_features: int):
    """A compiled round: from the guide's state and the evaluations so far to the next inputs."""
    side = np.linspace(0.0, 1.0, 8)
    Z = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    guide = sgp.AutoTSVGP(model, inducing=Z)
    svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.adam(2e-2)), sgp.QuadratureELBO())

    @jax.jit
    def one_round(state, X, y, made, rng_key):
        # The guide goes on from where it was: its sites are the evaluations it has seen.
        scale = jnp.std(y, where=made)
        outcomes = (y - jnp.mean(y, where=made)) / scale
        state = jax.lax.fori_loop(0, num_fit, lambda _, state: svi.update(state, X, outcomes, made=made)[0], state)
        key_draw, key_start = jax.random.split(rng_key)
        options = {"num_samples": BATCH, "num_features": num_features}
        functions = guide.sample_functions(key_draw, svi.get_params(state), X, **options)["f"]
        return state, functions, minimisers(functions, key_start, num_starts, num_descent)

    return svi, one_round


def optimise(svi: SVI, one_round, num_rounds: int, seed: int):
    """Inputs in the order of their evaluation, (N, 2), and the functions drawn in the last round."""
    rng = np.random.default_rng(seed)
    size = START + BATCH * num_rounds
    X, y, made = rng.uniform(size=(size, 2)), np.zeros(size), np.arange(size) < START
    y[:START] = branin(X[:START]) + NOISE * rng.normal(size=START)
    state = svi.init(jax.random.key(seed), X, y, made=made)
    functions = None
    for number in range(num_rounds):
        key = jax.random.fold_in(jax.random.key(seed), number)
        state, functions, X_next = one_round(state, X, y, made, key)
        rows = slice(START + BATCH * number, START + BATCH * (number + 1))
        X[rows], made[rows] = X_next, True
        y[rows] = branin(X[rows]) + NOISE * rng.normal(size=BATCH)
    return X, functions


def regret(X: np.ndarray) -> np.ndarray:
    """How far the best input so far is from the minimum."""
    return np.minimum.accumulate(np.asarray(branin(X))) - LEAST


def main(num_rounds: int, num_runs: int, effort: tuple[int, int, int, int], output: Path) -> None:
    """Optimise from several starts, compare with random search, draw the figure."""
    svi, one_round = make_round(*effort)
    runs = [optimise(svi, one_round, num_rounds, seed) for seed in range(num_runs)]
    size = START + BATCH * num_rounds
    rng = np.random.default_rng(100)
    curves = {
        "Thompson sampling": np.array([regret(X) for X, _ in runs]),
        "random search": np.array([regret(rng.uniform(size=(size, 2))) for _ in range(20 * num_runs)]),
    }
    for name, curve in curves.items():
        low, median, high = np.quantile(curve[:, -1], [0.1, 0.5, 0.9])
        print(f"{name:18s} regret after {size} evaluations: median {median:.3f}, 80 % between {low:.3f} and {high:.3f}")

    X, functions = runs[0]
    ticks = np.linspace(0.0, 1.0, 80)
    grid = np.stack(np.meshgrid(ticks, ticks), axis=-1)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.5, 3.5), layout="constrained")
    levels = np.geomspace(LEAST, 320.0, 14)
    left.contourf(ticks, ticks, branin(grid), levels=levels, norm="log", cmap="Blues_r")
    dots = {"marker": "o", "linestyle": "", "markersize": 4, "markeredgecolor": "k", "markeredgewidth": 0.5}
    left.plot(*X[:START].T, color="w", label="at random", clip_on=False, **dots)
    left.plot(*X[START:].T, color="C1", label="by draws", clip_on=False, **dots)
    left.set(xlabel="input 1", ylabel="input 2", title="evaluations on the function", aspect="equal")
    left.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2), columnspacing=1.0)
    draws = np.asarray(functions(grid.reshape(-1, 2))).reshape(BATCH, 80, 80)
    for number, values in enumerate(draws):
        color = f"C{number}"
        middle.contour(
            ticks, ticks, values, levels=np.quantile(values, [0.05, 0.15]), colors=color, linewidths=0.8, linestyles="-"
        )
        middle.plot(*X[-BATCH + number], color=color, **dots | {"marker": "*", "markersize": 11}, clip_on=False)
    middle.set(
        xlabel="input 1", ylabel="input 2", title="four draws, last round", aspect="equal", xlim=(0, 1), ylim=(0, 1)
    )
    for (name, curve), color in zip(curves.items(), ("C1", "0.5"), strict=True):
        low, median, high = np.quantile(curve, [0.1, 0.5, 0.9], axis=0)
        evaluations = np.arange(1, size + 1)
        right.fill_between(evaluations, low, high, color=color, alpha=0.25, linewidth=0)
        right.plot(evaluations, median, color=color, label=name)
    right.axvline(START, color="0.7", linewidth=0.8, linestyle="--")
    right.set(xlabel="evaluations", ylabel="regret", yscale="log", title=f"median and 80 %, {num_runs} runs")
    right.legend(frameon=False)
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("thompson_sampling.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(2, 2, (5, 8, 5, 64), arguments.output)
    else:
        main(14, 8, (150, 40, 60, 512), arguments.output)
