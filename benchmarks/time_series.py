"""`AutoMarkovGP`: what a step costs, a million counts, and the posterior beside NUTS.

Costs are processor seconds of a natural step with the gradient of all hyperparameters, on counts at equally spaced
times, with the temporary memory of the compiled step. The million counts have a periodic and a rough component, an
intercept and a covariate. NUTS samples the dense model.

    python benchmarks/time_series.py [--output results] [--figure figure.png]
    python benchmarks/time_series.py --nuts [--output results]
"""

import argparse
from pathlib import Path
import time

from common import long_chains, report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Constant, Matern12, Matern32, Periodic


def counts(t, y=None):
    """A smooth rate."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern32(lengthscale, variance) + Constant(1.0), t))
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def cost(num: int, repeats: int) -> dict:
    """One step."""
    rng = np.random.default_rng(0)
    t = np.arange(num)[:, None] * 0.05
    y = rng.poisson(np.exp(np.sin(t[:, 0]))).astype(float)
    svi = SVI(counts, sgp.AutoMarkovGP(counts), sgp.NaturalGradient(0.5, optax.adam(0.01)), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), t, y)
    update = jax.jit(svi.update).lower(state, t, y).compile()
    seconds = []
    for _ in range(repeats + 2):
        start = time.process_time()
        state, _ = jax.block_until_ready(update(state, t, y))
        seconds.append(time.process_time() - start)
    memory = update.memory_analysis().temp_size_in_bytes
    found = {"times": num, "seconds": min(seconds[2:]), "megabytes": memory / 1e6}
    print(f"{num} times: {found['seconds']:.4f} s, {found['megabytes']:.1f} MB", flush=True)
    return found


def slope(table: list[dict], key: str) -> float:
    """Exponent of the number of times in a column, from a straight line through the logarithms."""
    sizes, values = (np.log([row[name] for row in table]) for name in ("times", key))
    return float(np.polyfit(sizes, values, 1)[0])


PER_DAY = 1440


def minutes(t, hot, y=None):
    """Counts by the minute: a wave of a day, a rough component, an intercept, and an effect of a covariate."""
    day = Periodic(numpyro.sample("day_lengthscale", dist.LogNormal(0.0, 0.5)), 1.0, 1.0)
    lengthscale = numpyro.sample("rough_lengthscale", dist.LogNormal(0.0, 1.0))  # in days
    variance = numpyro.sample("rough_variance", dist.LogNormal(-2.0, 1.0))
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(day + Matern12(lengthscale, variance) + Constant(1.0), t))
    with numpyro.plate("minute", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + effect * hot)), obs=y)


def a_million(num: int, num_steps: int, figure: Path | None) -> dict:
    """Fit counts of a known rate, and say how near the posterior is to it."""
    rng = np.random.default_rng(1)
    t = np.arange(num) / PER_DAY
    decay, sd = np.exp(-1.0 / PER_DAY / 0.5), 0.4
    rough = np.empty(num)
    rough[0] = sd * rng.normal()
    pushes = sd * np.sqrt(1.0 - decay**2) * rng.normal(size=num)
    for n in range(1, num):
        rough[n] = decay * rough[n - 1] + pushes[n]
    truth = 0.5 + 0.8 * np.sin(2.0 * np.pi * t) + 0.3 * np.cos(4.0 * np.pi * t) + rough
    hot = np.repeat(rng.random(num // 60 + 1) < 0.3, 60)[:num].astype(float)
    y = rng.poisson(np.exp(truth + 0.25 * hot)).astype(float)
    X = t[:, None]
    guide = sgp.AutoMarkovGP(minutes, num_harmonics=3)
    optim = sgp.NaturalGradient(
        optax.linear_schedule(1.0, 0.5, 10), optax.adam(optax.cosine_decay_schedule(0.1, num_steps))
    )
    svi = SVI(minutes, guide, optim, sgp.QuadratureELBO(10))
    start, cpu = time.perf_counter(), time.process_time()
    state = svi.init(jax.random.key(0), X, hot, y)
    update, losses = jax.jit(svi.update, donate_argnums=0), []
    for number in range(num_steps):
        state, loss = update(state, X, hot, y)
        losses.append(float(loss))
        if number % 10 == 0:
            print(f"step {number}: loss {loss / num:.5f} a count, {time.perf_counter() - start:.0f} s", flush=True)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    params = svi.get_params(state)
    q = guide.posterior(jax.random.key(1), params, X, hot)["f"]
    mean, deviation = np.asarray(q.mean), np.sqrt(np.asarray(q.variance))
    z = (truth - mean) / deviation
    medians = {name: float(value) for name, value in guide.median(params).items()}
    found = {
        "counts": num, "steps": num_steps, "seconds": seconds, "cpu_seconds": cpu,
        "root_mean_squared_error": float(np.sqrt(np.mean((mean - truth) ** 2))), "sd_of_truth": float(np.std(truth)),
        "coverage_of_90": float(np.mean(np.abs(z) < 1.645)), "medians": medians,
        "refused": int(sgp.num_refused(state)), "losses": losses,
    }  # fmt: skip
    print({key: value for key, value in found.items() if key != "losses"})
    if figure is not None:
        draw(figure, t, y, truth, mean, deviation, hot, 0.25)
    return found


def draw(path: Path, t, y, truth, mean, deviation, hot, effect) -> None:
    """Three days of the million."""
    import matplotlib.pyplot as plt

    num = len(t)
    rows = slice(num // 2, min(num // 2 + 3 * PER_DAY, num))
    fig, (upper, lower) = plt.subplots(2, 1, figsize=(8, 4.6), layout="constrained", sharex=True)
    upper.plot(t[rows], y[rows], ".", color="0.6", markersize=1.5, label="counts")
    upper.plot(t[rows], np.exp(truth + effect * hot)[rows], color="C1", linewidth=0.8, label="true rate")
    upper.set(ylabel="counts a minute")
    lower.plot(t[rows], truth[rows], color="C1", linewidth=0.8, label="true f")
    lower.plot(t[rows], mean[rows], color="C0", linewidth=1.0, label="posterior mean")
    band = (mean - 1.645 * deviation)[rows], (mean + 1.645 * deviation)[rows]
    lower.fill_between(t[rows], *band, color="C0", alpha=0.25, linewidth=0, label="90 %")
    lower.set(xlabel="days", ylabel="f")
    for axes in (upper, lower):
        axes.margins(y=0.2)
        axes.legend(frameon=False, ncols=3, loc="upper right")
    fig.savefig(path, dpi=150)


def against_nuts(reduced: bool) -> list[dict]:
    """100 counts, beside long chains of the dense model."""
    rng, num = np.random.default_rng(0), 100
    t = np.sort(rng.uniform(0.0, 8.0, num))[:, None]
    y = rng.poisson(np.exp(np.sin(2.0 * t[:, 0]) + 0.5)).astype(float)

    def exact(t, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        K = (Matern32(lengthscale, variance) + Constant(1.0))(t, t) + 1e-6 * jnp.eye(num)
        f = numpyro.deterministic("f", jnp.linalg.cholesky(K) @ numpyro.sample("v", dist.Normal().expand([num])))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)

    table, known = [], {}
    for base in ("trained", "fixed"):
        fixed, dense = (numpyro.handlers.condition(each, known) for each in (counts, exact))
        theirs, r_hat, ess = long_chains(dense, t, y, num_samples=20 if reduced else 4000)
        known = known or {name: float(np.median(theirs[name])) for name in ("lengthscale", "variance")}
        guide = sgp.AutoMarkovGP(fixed)
        optim = sgp.NaturalGradient(0.5, optax.adam(optax.cosine_decay_schedule(0.05, 1500)))
        svi = SVI(fixed, guide, optim, sgp.QuadratureELBO(num_particles=4))
        steps = 20 if reduced else 1500
        params = svi.run(jax.random.key(2), steps, t, y, progress_bar=False).params
        draws = guide.sample_posterior(jax.random.key(3), params, t, sample_shape=(50 if reduced else 8000,))
        for latent in ("f",) if base == "fixed" else ("f", "lengthscale", "variance"):
            own, other = (np.asarray(each[latent]) for each in (draws, theirs))
            if latent != "f":
                own, other = np.log(own), np.log(other)
            sd = other.std(axis=0)
            error, ratio = np.abs(own.mean(axis=0) - other.mean(axis=0)) / sd, own.std(axis=0) / sd
            row = {"hyperparameters": base, "latent": latent, "error": float(np.max(error))}
            row |= {"least": float(np.min(ratio)), "largest": float(np.max(ratio))}
            table.append(row | {"r_hat": r_hat, "ess": ess})
            print(f"{base} {latent}: mean within {row['error']:.2f} sd, sds {row['least']:.3f} to {row['largest']:.3f}")
    return table


def main(arguments: argparse.Namespace) -> None:
    """Costs and the million, or NUTS."""
    numpyro.enable_x64()
    if arguments.nuts or arguments.reduced:
        report("time_series_nuts", {"table": against_nuts(arguments.reduced)}, arguments.output)
    if not arguments.nuts:
        sizes = (200, 800) if arguments.reduced else (1000, 10_000, 100_000, 1_000_000)
        table = [cost(num, 1 if arguments.reduced else 5) for num in sizes]
        exponents = {key: slope(table, key) for key in ("seconds", "megabytes")}
        print("exponents of the number of times:", exponents)
        million = a_million(*((3000, 3) if arguments.reduced else (1_000_000, 100)), arguments.figure)
        report("time_series", {"costs": table, "exponents": exponents, "million": million}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nuts", action="store_true", help="the comparison with NUTS in the place of costs")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the results as JSON")
    parser.add_argument("--figure", type=Path)
    main(parser.parse_args())
