"""An additive model of counts: two smooth effects, and an effect of rain that changes over the years.

Daily bicycle hires, y ~ Poisson(exp(level + f1(season) + f2(temperature) + β(time) · rain)). They are simulated, so
the estimates can be compared with the truth. The three processes are three sample statements.

    python examples/additive_effects.py [--smoke] [--output additive_effects.png]
"""

import argparse
from functools import partial
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, init_to_median
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax

import numpyro_sgp as sgp
from numpyro_sgp.kernels import SquaredExponential

YEARS = 4.0
GRIDS = {"season": np.linspace(0.0, 1.0, 100), "temperature": np.linspace(-5.0, 30.0, 100)}
GRIDS["time"] = np.linspace(0.0, YEARS, 100)


def season_effect(s: np.ndarray) -> np.ndarray:
    return 0.35 * np.cos(2.0 * np.pi * (s - 0.45)) - 0.25 * np.exp(-0.5 * ((s - 0.62) / 0.06) ** 2)


def temperature_effect(c: np.ndarray) -> np.ndarray:
    return 0.9 * np.tanh((c - 8.0) / 8.0) - 0.6 / (1.0 + np.exp(-(c - 26.0) / 1.5))


def rain_effect(t: np.ndarray) -> np.ndarray:
    """Of 10 mm; smaller since the network of shelters was built."""
    return -0.7 + 0.45 / (1.0 + np.exp(-(t - 2.2) * 5.0))


TRUTH = {"season": season_effect, "temperature": temperature_effect, "time": rain_effect}


def simulate(N: int) -> tuple[np.ndarray, ...]:
    """Season (share of a year), temperature (°C), time (years), rain (in 10 mm) and counts, each (N,)."""
    rng = np.random.default_rng(0)
    time = np.sort(rng.uniform(0.0, YEARS, N))
    season = time % 1.0
    temperature = 12.0 - 9.0 * np.cos(2.0 * np.pi * (season - 0.05)) + rng.normal(scale=4.0, size=N)
    rain = rng.gamma(0.6, 0.7, N) * (rng.uniform(size=N) < 0.5)
    effect = season_effect(season) + temperature_effect(temperature) + rain_effect(time) * rain
    return season, temperature, time, rain, rng.poisson(np.exp(3.0 + effect))


def process(name: str, x, kernel):
    """A smooth function of one variable; `kernel` takes a lengthscale in ranges of the variable, and a variance."""
    lengthscale = numpyro.sample(f"{name}_lengthscale", dist.LogNormal(jnp.log(0.3), 0.5))
    variance = numpyro.sample(f"{name}_variance", dist.LogNormal(-1.0, 1.0))
    return numpyro.sample(name, sgp.GaussianProcess(kernel(lengthscale, variance), x[:, None]))


def model(season, temperature, time, rain, y=None, *, varying=True):
    """Counts y; `varying=False` is the simpler model, in which rain has the same effect at all times."""
    level = numpyro.sample("level", dist.Normal(3.0, 1.0))
    f1 = process("season", season, lambda scale, variance: sgp.kernels.Periodic(3.0 * scale, 1.0, variance))
    f2 = process("temperature", temperature, lambda scale, variance: SquaredExponential(35.0 * scale, variance))
    mean = numpyro.sample("rain", dist.Normal(0.0, 1.0))
    if varying:
        change = process("time", time, lambda scale, variance: SquaredExponential(YEARS * scale, variance))
        beta = numpyro.deterministic("beta", mean + change)
    else:
        beta = mean
    with numpyro.plate("data", season.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + f1 + f2 + beta * rain)), obs=y)


def main(N: int, num_steps: int, num_samples: int, output: Path) -> None:
    """Fit the model and the simpler one, compare them, draw the effects."""
    numpyro.enable_x64()
    data = simulate(N)
    inducing = {name: np.linspace(grid[0], grid[-1], 20)[:, None] for name, grid in GRIDS.items()}
    loo, fits = {}, {}
    for name, varying in {"rain varies": True, "rain constant": False}.items():
        fitted = partial(model, varying=varying)
        guide = sgp.AutoTSVGP(
            fitted,
            inducing={site: Z for site, Z in inducing.items() if varying or site != "time"},
            base=partial(AutoMultivariateNormal, init_loc_fn=init_to_median),
        )
        optim = sgp.NaturalGradient(0.1, optax.adam(optax.cosine_decay_schedule(0.02, num_steps)))
        svi = SVI(fitted, guide, optim, sgp.QuadratureELBO())
        result = svi.run(jax.random.key(0), num_steps, *data, progress_bar=False)
        print(f"{name}: bound {-np.mean(result.losses[-200:]):.1f}, {sgp.num_refused(result.state)} steps refused")
        loo[name] = az.loo(
            sgp.to_arviz(jax.random.key(1), svi, result, *data, num_samples=num_samples, batch_size=100), pointwise=True
        )
        fits[name] = guide, result.params
    print(az.compare(loo)[["elpd_diff", "dse"]])

    guide, params = fits["rain varies"]
    draws = guide.sample_posterior(
        jax.random.key(2), params, *GRIDS.values(), np.zeros(100), sample_shape=(num_samples,)
    )
    effects = {"season": draws["season"], "temperature": draws["temperature"], "time": draws["beta"]}
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    labels = ("season (share of a year)", "temperature (°C)", "time (years)")
    for ax, color, label, (name, values) in zip(axes, ("C0", "C1", "C2"), labels, effects.items(), strict=True):
        grid, true = GRIDS[name], TRUTH[name](GRIDS[name])
        if name != "time":  # a constant may be in either of them or in the level: each is compared around its mean
            values, true = values - values.mean(axis=1, keepdims=True), true - true.mean()
        low, median, high = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
        held = np.mean((low <= true) & (true <= high))
        error = np.sqrt(np.mean((median - true) ** 2))
        print(
            f"{name}: root mean square error {error:.3f}, 90 % band of width {np.mean(high - low):.2f} holds {held:.0%}"
        )
        ax.fill_between(grid, low, high, color=color, alpha=0.35, linewidth=0, label="90 %")
        ax.plot(grid, median, color=color)
        ax.plot(grid, true, "k--", linewidth=1, label="truth")
        observed = data[list(GRIDS).index(name)]
        ax.plot(
            observed,
            np.zeros(len(observed)),
            "|",
            color="0.4",
            markersize=6,
            alpha=0.3,
            clip_on=True,
            transform=ax.get_xaxis_transform(),
        )
        ax.set(xlabel=label, xlim=(grid[0], grid[-1]))
    for ax, name in zip(axes, ("season", "temperature", "10 mm of rain"), strict=True):
        ax.set_ylabel(f"effect of {name} on the log rate")
    draws = fits["rain constant"][0].sample_posterior(
        jax.random.key(3), fits["rain constant"][1], *GRIDS.values(), np.zeros(100), sample_shape=(num_samples,)
    )
    low, high = np.quantile(draws["rain"], [0.05, 0.95])
    axes[2].axhspan(low, high, color="C3", alpha=0.25, linewidth=0, label="constant effect, 90 %")
    for ax in axes[[0, 2]]:
        ax.legend(frameon=False, fontsize=8, loc="best")
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("additive_effects.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(100, 10, 50, arguments.output)
    else:
        main(700, 2000, 1000, arguments.output)
