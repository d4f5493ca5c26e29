"""A curve that is known to rise: values and slopes of one function in one Gaussian process.

Fifteen noisy measurements of a response, none of them in the middle of the doses. That the response rises with the dose
is a probit likelihood of its slope at 20 virtual doses (Riihimäki and Vehtari, 2010). Rows of values and rows of slopes
make one site. The script compares the curve with that of values alone, and both with NUTS on the dense model.

    python examples/gradients.py [--smoke] [--softness 0.2] [--output gradients.png]
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.diagnostics import summary
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.reparam import Reparam

import numpyro_sgp as sgp
from numpyro_sgp.functionals import Derivative, Stack

numpyro.enable_x64()

TOP, NOISE = 10.0, 0.4  # the highest dose, and the noise of a response
GRID = np.linspace(0.0, TOP, 81)[:, None]
KERNEL = sgp.kernels.SquaredExponential(2.0, 2.0)


def response(dose):
    return 3.0 * dose**3 / (4.0**3 + dose**3)


def simulate() -> tuple[np.ndarray, np.ndarray]:
    """Doses, (15, 1), and responses, (15,)."""
    rng = np.random.default_rng(1)
    dose = np.sort(np.append(rng.uniform(0.0, 4.0, 8), rng.uniform(7.0, TOP, 7)))
    return dose[:, None], response(dose) + NOISE * rng.normal(size=15)


def model(rows, num_slopes: int, softness: float, y=None):
    """Values of f at the doses come first, then `num_slopes` slopes; further rows are for prediction."""
    level = numpyro.sample("level", dist.Normal(1.5, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, rows))
    if y is None:
        return
    N = len(y)
    numpyro.sample("y", dist.Normal(level + f[:N], NOISE), obs=y)
    if num_slopes:
        numpyro.factor("rises", norm.logcdf(f[N : N + num_slopes] / softness))  # Φ(f′/ν): the slope is positive


class NonCentred(Reparam):
    """f = L v with K = L Lᵀ: the same dense prior, easier for NUTS. L is computed once."""

    def __call__(self, name, fn, obs):
        del obs
        with jax.ensure_compile_time_eval():
            K = fn.kernel(fn.X, fn.X)
            L = jnp.linalg.cholesky(K + fn.relative_jitter * jnp.mean(jnp.diag(K)) * jnp.eye(len(K)))
        return None, L @ numpyro.sample(f"{name}_v", dist.Normal(0.0, 1.0).expand(K.shape[:1]).to_event(1))


def analyse(name: str, dose, y, slopes: np.ndarray, softness: float, effort: tuple[int, int, int]):
    """Draws of the curve on a grid and of its slope there, by the guide and by NUTS."""
    num_steps, num_samples, num_mcmc = effort
    virtual = [Derivative(slopes, 0)] if len(slopes) else []
    known = len(slopes), softness
    new = Stack([GRID, Derivative(GRID, 0)])

    guide = sgp.AutoTSVGP(model, inducing=np.linspace(0.0, TOP, 12)[:, None])
    svi = SVI(model, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    params = svi.run(jax.random.key(0), num_steps, Stack([dose, *virtual]), *known, y, progress_bar=False).params
    ours = guide.sample_posterior(jax.random.key(1), params, new, *known, sample_shape=(num_samples,))

    # The dense model has the grid among its rows: rows that no term looks at.
    dense = reparam(model, config={"f": NonCentred()})
    options = {"num_chains": 2, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(NUTS(dense), num_warmup=num_mcmc // 2, num_samples=num_mcmc, **options)
    mcmc.run(jax.random.key(2), Stack([dose, *virtual, new]), *known, y)
    chains = mcmc.get_samples(group_by_chain=True)
    table = summary({site: np.asarray(chains[site]) for site in ("level", "f")}).values()
    rhat, size = (choose([choose(row[key]) for row in table]) for key, choose in (("r_hat", np.max), ("n_eff", np.min)))
    print(f"{name}: NUTS, {2 * num_mcmc} draws: largest R-hat {rhat:.3f}, smallest effective sample size {size:.0f}")
    reference = mcmc.get_samples()

    results = []
    for draws in (ours, reference):
        f = np.asarray(draws["f"])[:, -2 * len(GRID) :]
        results.append({"curve": np.asarray(draws["level"])[:, None] + f[:, : len(GRID)], "slope": f[:, len(GRID) :]})
    for kind in ("curve", "slope"):
        (mean, sd), (other, other_sd) = ((np.mean(each[kind], 0), np.std(each[kind], 0)) for each in results)
        print(
            f"  {kind}: means at most {np.max(np.abs(mean - other) / other_sd):.2f} standard deviations from NUTS, "
            f"standard deviations {np.min(sd / other_sd):.2f} to {np.max(sd / other_sd):.2f} of those of NUTS"
        )
    curve, gap = results[0]["curve"], (GRID[:, 0] > 4.0) & (GRID[:, 0] < 7.0)
    error, sd = np.sqrt(np.mean((curve.mean(0) - response(GRID[:, 0])) ** 2)), curve[:, gap].std(0).mean()
    print(f"  error of the curve {error:.2f}, average standard deviation in the gap {sd:.2f}")
    return results


def main(softness: float, effort: tuple[int, int, int], output: Path) -> None:
    """Both models, and the figure."""
    dose, y = simulate()
    virtual = np.linspace(0.0, TOP, 20)[:, None]
    fits = {
        "values only": analyse("values only", dose, y, virtual[:0], softness, effort),
        "values and signs of slopes": analyse("rising", dose, y, virtual, softness, effort),
    }
    x = GRID[:, 0]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.7), layout="constrained", sharex=True)
    for ax, (title, (ours, reference)) in zip(axes, fits.items(), strict=False):
        low, median, high = np.quantile(ours["curve"], [0.05, 0.5, 0.95], axis=0)
        ax.fill_between(x, low, high, color="C0", alpha=0.35, linewidth=0, label="90 %")
        ax.plot(x, median, "C0", label="median")
        for j, edge in enumerate(np.quantile(reference["curve"], [0.05, 0.95], axis=0)):
            ax.plot(x, edge, "C1", linewidth=0.9, label="NUTS, 90 %" if j == 0 else None)
        ax.plot(x, response(x), "k--", linewidth=1, label="truth")
        ax.plot(dose[:, 0], y, "k.", markersize=5, label="measurements")
        ax.set(title=title, xlabel="dose", ylabel="response", xlim=(0.0, TOP), ylim=(-1.5, 6.0))
    axes[0].legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
    for (title, (ours, _)), color in zip(fits.items(), ("0.55", "C2"), strict=True):
        low, high = np.quantile(ours["slope"], [0.05, 0.95], axis=0)
        axes[2].fill_between(x, low, high, color=color, alpha=0.4, linewidth=0, label=f"{title}, 90 %")
    axes[2].plot(x, np.gradient(response(x), x), "k--", linewidth=1, label="truth")
    axes[2].plot(virtual[:, 0], np.zeros(len(virtual)), "C3|", markersize=7, label="virtual doses")
    axes[2].set(title="slope", xlabel="dose", ylabel="response per unit of dose")
    axes[2].set_ylim(None, 1.8 * axes[2].get_ylim()[1])
    axes[2].legend(frameon=False, fontsize=9, loc="upper right")
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--softness", type=float, default=0.2, help="ν of Φ(f′/ν), in units of the slope")
    parser.add_argument("--output", type=Path, default=Path("gradients.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main(arguments.softness, (5, 20, 5), arguments.output)
    else:
        main(arguments.softness, (100, 8000, 2000), arguments.output)
