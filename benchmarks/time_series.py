"""`AutoMarkovGP`: what a step costs, a million counts, minibatches by inducing times, and the posterior beside NUTS.

Costs are processor seconds of a natural step with the gradient of all hyperparameters, on counts at equally spaced
times, with the temporary memory of the compiled step. The million counts have a periodic and a rough component, an
intercept and a covariate. NUTS samples the dense model.

    python benchmarks/time_series.py [--output results] [--figure figure.png]
    python benchmarks/time_series.py --nuts [--output results]
    python benchmarks/time_series.py --inducing [--output results]
"""

import argparse
from pathlib import Path
import time

from common import by_all_rows, by_batches, compared, counts_row, long_chains, report, slope
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
import optax
import scipy.stats

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Constant, Matern12, Matern32, Periodic
from numpyro_sgp.posteriors.markov.formulas import state_draws
from numpyro_sgp.posteriors.markov.state_space import state_space_of


def counts(t, y=None):
    """A smooth rate."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern32(lengthscale, variance) + Constant(1.0), t))
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def with_effects(t, W, y=None):
    """A smooth rate beside a level and the effects of two covariates."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern32(lengthscale, variance), t))
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + level + W @ slopes)), obs=y)


def cost(num: int, repeats: int, reduced: bool) -> dict:
    """One step of each model, or of the first."""
    rng = np.random.default_rng(0)
    t = np.arange(num)[:, None] * 0.05
    y = rng.poisson(np.exp(np.sin(t[:, 0]))).astype(float)
    found = {"times": num}
    models = {"": (counts, (t, y)), "_with_effects": (with_effects, (t, rng.normal(size=(num, 2)), y))}
    for name, (model, args) in list(models.items())[: 1 if reduced else None]:
        svi = SVI(model, sgp.AutoMarkovGP(model), sgp.NaturalGradient(0.5, optax.adam(0.01)), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), *args)
        update = jax.jit(svi.update).lower(state, *args).compile()
        seconds = []
        for _ in range(repeats + 2):
            start = time.process_time()
            state, _ = jax.block_until_ready(update(state, *args))
            seconds.append(time.process_time() - start)
        found[f"seconds{name}"] = min(seconds[2:])
        found[f"megabytes{name}"] = update.memory_analysis().temp_size_in_bytes / 1e6
    print(", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
    return found


PER_DAY = 1440


def minutes(t, hot, y=None):
    """Counts by the minute: a wave of a day, a rough component, a level, and an effect of a covariate."""
    day = Periodic(numpyro.sample("day_lengthscale", dist.LogNormal(0.0, 0.5)), 1.0, 1.0)
    lengthscale = numpyro.sample("rough_lengthscale", dist.LogNormal(0.0, 1.0))  # in days
    variance = numpyro.sample("rough_variance", dist.LogNormal(-2.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(day + Matern12(lengthscale, variance), t))
    baseline = numpyro.deterministic("baseline", f + level)
    with numpyro.plate("minute", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(baseline + effect * hot)), obs=y)


def a_million(num: int, num_steps: int, num_draws: int, figure: Path | None) -> dict:
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
    # At every 500th minute, and in three days for the figure.
    thinned, days = np.arange(0, num, 500), np.arange(num // 2, min(num // 2 + 3 * PER_DAY, num))
    rows = np.concatenate([thinned, days])
    draws = guide.sample_posterior(jax.random.key(1), params, X[rows], hot[rows], sample_shape=(num_draws,))["baseline"]
    mean, deviation = np.mean(draws, axis=0), np.std(draws, axis=0, ddof=1)
    error = mean[: len(thinned)] - truth[thinned]
    # Student's 95 % quantile, for the mean and the deviation are those of draws.
    half = scipy.stats.t.ppf(0.95, num_draws - 1) * np.sqrt(1.0 + 1.0 / num_draws)
    summaries = guide.quantiles(params, [0.05, 0.5, 0.95], X, hot)
    summaries = {name: np.asarray(value).tolist() for name, value in summaries.items() if name != "f"}
    found = {
        "counts": num, "steps": num_steps, "seconds": seconds, "cpu_seconds": cpu,
        "root_mean_squared_error": float(np.sqrt(np.mean(error**2))), "sd_of_truth": float(np.std(truth)),
        "coverage_of_90": float(np.mean(np.abs(error) < half * deviation[: len(thinned)])), "quantiles": summaries,
        "refused": int(sgp.num_refused(state)), "losses": losses,
    }  # fmt: skip
    print({key: value for key, value in found.items() if key != "losses"})
    if figure is not None:
        of_days = (each[len(thinned) :] for each in (mean, half * deviation))
        draw(figure, t[days], y[days], truth[days], np.exp(truth + 0.25 * hot)[days], *of_days)
    return found


def draw(path: Path, t, y, truth, rate, mean, half) -> None:
    """Three days of the million."""
    import matplotlib.pyplot as plt

    fig, (upper, lower) = plt.subplots(2, 1, figsize=(8, 4.6), layout="constrained", sharex=True)
    upper.plot(t, y, ".", color="0.6", markersize=1.5, label="counts")
    upper.plot(t, rate, color="C1", linewidth=0.8, label="true rate")
    upper.set(ylabel="counts a minute")
    lower.plot(t, truth, color="C1", linewidth=0.8, label="true f + level")
    lower.plot(t, mean, color="C0", linewidth=1.0, label="posterior mean")
    lower.fill_between(t, mean - half, mean + half, color="C0", alpha=0.25, linewidth=0, label="90 %")
    lower.set(xlabel="days", ylabel="f + level")
    for axes in (upper, lower):
        axes.margins(y=0.2)
        axes.legend(frameon=False, ncols=3, loc="upper right")
    fig.savefig(path, dpi=150)


def smooth_counts(t, covariate, y=None, num_data=None):
    """Counts of which many are within a lengthscale, beside a level and the effect of a covariate."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern32(lengthscale, variance), t))
    predictor = numpyro.deterministic("predictor", f + level + effect * covariate)
    with numpyro.plate("time", num_data or t.shape[0], subsample_size=t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(predictor)), obs=y)


def by_inducing_times(reduced: bool) -> dict:
    """A million counts, all at each step and in minibatches, for the same processor time."""
    num, span, most = (5000, 5.0, 3) if reduced else (1_000_000, 1000.0, None)
    rng = np.random.default_rng(2)
    t = np.sort(rng.uniform(0.0, span, num + 5000))
    # f is a draw, known at a grid of forty points in each lengthscale.
    grid = np.linspace(0.0, span, int(40 * span) + 1)
    process, interval = state_space_of(Matern32(1.0), grid.dtype, 1), jnp.diff(jnp.asarray(grid), prepend=grid[:1])
    states = state_draws(process, interval, jax.random.key(0), ())
    f = np.interp(t, grid, np.asarray(states @ process.h))
    covariate = rng.normal(size=len(t))
    predictor = f - 1.0 + 0.2 * covariate
    y = rng.poisson(np.exp(predictor)).astype(float)
    is_test = np.zeros(len(t), bool)
    is_test[rng.choice(len(t), 5000, replace=False)] = True
    train = t[~is_test, None], covariate[~is_test], y[~is_test]
    test = t[is_test, None], covariate[is_test], predictor[is_test], y[is_test]
    guide, steps = sgp.AutoMarkovGP(smooth_counts), 2 if reduced else 30
    params, seconds = by_all_rows(smooth_counts, guide, train, steps, 0.1)
    runs = [counts_row("all rows", guide, params, seconds, train, test) | {"steps": steps}]
    M, batch = (20, 1000) if reduced else (2000, 10_000)
    guide = sgp.AutoMarkovGP(smooth_counts, inducing=np.linspace(0.0, span, M))
    params, own, number = by_batches(smooth_counts, guide, train, seconds, most, 0.1, batch)
    runs.append(counts_row(f"{M} inducing times", guide, params, own, train, test) | {"steps": number})
    M = 20 if reduced else 500
    guide = sgp.AutoTSVGP(smooth_counts, np.linspace(0.0, span, M)[:, None])
    params, own, number = by_batches(smooth_counts, guide, train, seconds, most, 0.1)
    runs.append(counts_row(f"{M} inducing inputs", guide, params, own, train, test) | {"steps": number})
    return {"counts": num, "sd_of_truth": float(np.std(predictor)), "runs": runs}


def against_nuts(reduced: bool) -> list[dict]:
    """100 counts, beside long chains of the dense model."""
    rng, num = np.random.default_rng(0), 100
    t = np.sort(rng.uniform(0.0, 8.0, num))[:, None]
    # The first covariate follows time.
    W = np.stack([np.cos(t[:, 0]) + 0.2 * rng.normal(size=num), rng.normal(size=num)], axis=1)
    y = rng.poisson(np.exp(np.sin(2.0 * t[:, 0]) + 0.5 + W @ [0.3, -0.4])).astype(float)

    def exact(t, W, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        L = jnp.linalg.cholesky(Matern32(lengthscale, variance)(t, t) + 1e-6 * jnp.eye(num))
        v = numpyro.sample("v", dist.Normal().expand([num]))
        f = numpyro.deterministic("f", L @ v)
        numpyro.sample("y", dist.Poisson(jnp.exp(f + level + W @ slopes)).to_event(1), obs=y)

    table, known = [], {}
    for kind in ("AutoNormal",) if reduced else ("AutoNormal", "AutoMultivariateNormal", "fixed"):
        given = known if kind == "fixed" else {}
        fixed, dense = (numpyro.handlers.condition(each, given) for each in (with_effects, exact))
        if kind != "AutoMultivariateNormal":  # which has the same model as the one before
            theirs, r_hat, ess = long_chains(dense, t, W, y, num_samples=20 if reduced else 4000)
        known = known or {name: float(np.median(theirs[name])) for name in ("lengthscale", "variance")}
        guide = sgp.AutoMarkovGP(fixed, base=AutoMultivariateNormal if kind == "AutoMultivariateNormal" else AutoNormal)
        optim = sgp.NaturalGradient(0.5, optax.adam(optax.cosine_decay_schedule(0.05, 1500)))
        svi = SVI(fixed, guide, optim, sgp.QuadratureELBO(num_particles=1 if reduced else 4))
        steps = 20 if reduced else 1500
        params = svi.run(jax.random.key(2), steps, t, W, y, progress_bar=False).params
        draws = guide.sample_posterior(jax.random.key(3), params, t, W, sample_shape=(50 if reduced else 8000,))
        latents = ("f", "level", "slopes", *(() if given else known))
        columns = {"hyperparameters": kind, "r_hat": r_hat, "ess": ess}
        table += compared(kind, draws, theirs, latents, positive=list(known), **columns)
    return table


def main(arguments: argparse.Namespace) -> None:
    """Costs and the million, minibatches, or NUTS."""
    numpyro.enable_x64()
    if arguments.nuts or arguments.reduced:
        report("time_series_nuts", {"table": against_nuts(arguments.reduced)}, arguments.output)
    if arguments.inducing or arguments.reduced:
        report("time_series_inducing", by_inducing_times(arguments.reduced), arguments.output)
    if arguments.reduced or not (arguments.nuts or arguments.inducing):
        sizes = (200, 800) if arguments.reduced else (1000, 10_000, 100_000, 1_000_000)
        table = [cost(num, 1 if arguments.reduced else 5, arguments.reduced) for num in sizes]
        exponents = {key: slope(table, "times", key) for key in ("seconds", "megabytes")}
        print("exponents of the number of times:", exponents)
        million = a_million(*((3000, 3, 4) if arguments.reduced else (1_000_000, 100, 60)), arguments.figure)
        report("time_series", {"costs": table, "exponents": exponents, "million": million}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nuts", action="store_true", help="the comparison with NUTS in the place of costs")
    parser.add_argument("--inducing", action="store_true", help="minibatches in the place of costs")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the results as JSON")
    parser.add_argument("--figure", type=Path)
    main(parser.parse_args())
