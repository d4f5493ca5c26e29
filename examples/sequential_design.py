"""Find where a rate is highest, by counts at four inputs at a time: expected improvement with fantasies.

The first input of a batch has the largest expected improvement. Before the second is chosen, the first one's count is
not known. So the posterior is conditioned on many counts that it may be (fantasies), and the improvement that is
expected after them decides; likewise for the third and the fourth. Then the real counts come, and the posterior is
conditioned on them, too. Hyperparameters are fitted again every few rounds only.

    python examples/sequential_design.py [--smoke] [--output sequential_design.png]
"""

import argparse
from functools import partial
from pathlib import Path
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
import optax

import numpyro_sgp as sgp

numpyro.enable_x64()

START, BATCH = 12, 4  # counts at random inputs first, then so many in a round
SIDE = np.linspace(0.0, 1.0, 21)
CANDIDATES = np.stack(np.meshgrid(SIDE, SIDE), axis=-1).reshape(-1, 2)


def log_rate(X):
    """Two hills on a slope; the higher one is narrow. The highest rate is about 45."""
    high = 2.4 * np.exp(-(((X[..., 0] - 0.78) / 0.18) ** 2) - ((X[..., 1] - 0.73) / 0.18) ** 2)
    low = 0.9 * np.exp(-(((X[..., 0] - 0.25) / 0.3) ** 2) - ((X[..., 1] - 0.3) / 0.3) ** 2)
    return 1.0 + 0.5 * X[..., 0] + high + low


def model(X, y=None):
    """Poisson counts."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.5, 0.5).expand([2]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.5, 0.5))
    level = numpyro.sample("level", dist.Normal(1.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale, variance), X, mean=level))
    with numpyro.plate("counts", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


inducing = np.stack(np.meshgrid(np.linspace(0.0, 1.0, 11), np.linspace(0.0, 1.0, 11)), axis=-1).reshape(-1, 2)
guide = sgp.AutoTSVGP(model, inducing=inducing, base=AutoDelta)
svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.adam(2e-2)), sgp.QuadratureELBO())
condition = jax.jit(guide.condition)


@partial(jax.jit, static_argnames="num_steps")
def fit(rng_key, X, y, num_steps, params=None):
    """Fitted parameters; compiled once for each number of counts."""
    return svi.run(rng_key, num_steps, X, y, progress_bar=False, init_params=params).params


def posterior(params):
    """Mean and standard deviation of the log rate at the candidates."""
    f = guide.posterior(jax.random.key(0), params, CANDIDATES)["f"]
    return f.mean, jnp.sqrt(f.variance)


def expected_improvement(params):
    """E[max(rate − best, 0)] at each candidate, for a log-normal rate; the best is the highest posterior median."""
    mean, sd = posterior(params)
    best = mean.max()
    far = (mean - best) / sd
    cdf = jax.scipy.stats.norm.cdf
    return jnp.exp(mean + 0.5 * sd**2) * cdf(far + sd) - jnp.exp(best) * cdf(far)


def make_choice(num_fantasies: int):
    """A compiled function from parameters to the next batch, (BATCH, 2)."""
    candidates = jnp.asarray(CANDIDATES)

    @jax.jit
    def choose(params, rng_key):
        # A fantasy has sites of its own; all else is the same in each.
        axes = {name: 0 if name == "f_auto_sites" else None for name in params}
        condition_each = jax.vmap(guide.condition, (axes, None, 0), axes)
        sites = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_fantasies, *x.shape)), params["f_auto_sites"])
        fantasies = {**params, "f_auto_sites": sites}
        chosen = [candidates[expected_improvement(params).argmax()][None]]
        while len(chosen) < BATCH:
            key_f, key_y, rng_key = jax.random.split(rng_key, 3)
            draw = jax.vmap(lambda key, p: guide.posterior(key, p, chosen[-1])["f"].sample(key), (0, axes))
            f = draw(jax.random.split(key_f, num_fantasies), fantasies)
            counts = jax.random.poisson(key_y, jnp.exp(f)).astype(f.dtype)
            fantasies = condition_each(fantasies, chosen[-1], counts)
            improvement = jax.vmap(expected_improvement, (axes,))(fantasies).mean(axis=0)
            chosen.append(candidates[improvement.argmax()][None])
        return jnp.concatenate(chosen)

    return choose


def search(choose, num_rounds: int, num_steps: int, every: int, seed: int):
    """Inputs in their order, the parameters at the end, and the seconds of rounds without a fit."""
    rng = np.random.default_rng(seed)
    X = CANDIDATES[rng.choice(len(CANDIDATES), START, replace=False)]
    y = rng.poisson(np.exp(log_rate(X))).astype(float)
    params = fit(jax.random.key(seed), X, y, num_steps)
    seconds = []
    for number in range(num_rounds):
        start = time.perf_counter()
        X_new = np.asarray(choose(params, jax.random.key(number)))
        y_new = rng.poisson(np.exp(log_rate(X_new))).astype(float)
        params = jax.block_until_ready(condition(params, X_new, y_new))
        seconds.append(time.perf_counter() - start)
        X, y = np.concatenate([X, X_new]), np.concatenate([y, y_new])
        if (number + 1) % every == 0:
            params = fit(jax.random.key(seed), X, y, num_steps, params)
    return X, params, seconds[1:]


def best_rate(X: np.ndarray) -> np.ndarray:
    """The highest rate at the inputs so far."""
    return np.maximum.accumulate(np.exp(log_rate(X)))


def main(num_rounds: int, num_steps: int, num_fantasies: int, every: int, num_runs: int, output: Path) -> None:
    """Search from several starts, compare with random inputs, draw the figure."""
    choose = make_choice(num_fantasies)
    runs = [search(choose, num_rounds, num_steps, every, seed) for seed in range(num_runs)]
    rng, size = np.random.default_rng(100), START + BATCH * num_rounds
    ours = np.array([best_rate(X) for X, _, _ in runs])
    random = np.array([best_rate(CANDIDATES[rng.choice(len(CANDIDATES), size, replace=False)]) for _ in range(200)])
    print(f"highest rate of all candidates {np.exp(log_rate(CANDIDATES)).max():.1f}")
    for name, curves in (("expected improvement", ours), ("random inputs", random)):
        low, median = np.quantile(curves[:, -1], [0.1, 0.5])
        print(f"{name:20s} best rate after {size} counts: median {median:.1f}, 10 % below {low:.1f}")
    milliseconds = 1e3 * np.median([each for _, _, seconds in runs for each in seconds])
    print(f"a round, of {num_fantasies} fantasies for {BATCH - 1} inputs and the real counts: {milliseconds:.0f} ms")

    X, params, _ = runs[0]
    figure, axes = plt.subplots(1, 3, figsize=(10.0, 3.2), layout="constrained")
    truth, fitted = np.exp(log_rate(CANDIDATES)), np.exp(np.asarray(posterior(params)[0]))
    for ax, values, title in ((axes[0], truth, "true rate"), (axes[1], fitted, "median of the rate, and counts")):
        shown = ax.pcolormesh(SIDE, SIDE, values.reshape(21, 21), vmin=0.0, vmax=truth.max(), cmap="Blues")
        ax.set(title=title, xlabel="input 1", aspect="equal")
    axes[0].set_ylabel("input 2")
    figure.colorbar(shown, ax=axes[1])
    for rows, colour, name in ((X[:START], "w", "at random"), (X[START:], "C1", "chosen")):
        dots = axes[1].scatter(*rows.T, color=colour, s=14, edgecolors="k", linewidths=0.4, label=name)
        dots.set_clip_on(False)
    axes[1].legend(fontsize="small", loc="upper left")
    for curves, colour, name in ((random, "0.5", "random"), (ours, "C1", "improvement")):
        low, median, high = np.quantile(curves, [0.1, 0.5, 0.9], axis=0)
        axes[2].fill_between(np.arange(1, size + 1), low, high, color=colour, alpha=0.25, linewidth=0.0)
        axes[2].plot(np.arange(1, size + 1), median, color=colour, label=name)
    axes[2].axvline(START, color="k", linestyle="--", linewidth=0.8)
    axes[2].set(xlabel="counts", ylabel="highest rate so far", title="search", ylim=(0.0, 1.05 * truth.max()))
    axes[2].legend(frameon=False, fontsize="small", loc="lower right")
    figure.savefig(output, dpi=120)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two rounds, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("sequential_design.png"))
    arguments = parser.parse_args()
    effort = (2, 20, 4, 2, 1) if arguments.smoke else (10, 200, 16, 5, 20)
    main(*effort, arguments.output)
