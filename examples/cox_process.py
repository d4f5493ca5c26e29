"""Events in time and points in the plane: log-Gaussian Cox processes without a grid of counts.

The events and the nodes of a quadrature rule are rows of one Gaussian process. The log likelihood of a point process is
the sum of log λ over the events less the integral of λ, so each row has a term of its own. The script fits the dates of
191 coal-mining disasters and a simulated pattern in the unit square, and compares both with NUTS on the dense model.

    python examples/cox_process.py [--smoke] [--output cox_process.png]
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.diagnostics import summary
import numpyro.distributions as dist
from numpyro.handlers import block, reparam, substitute
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.reparam import Reparam
import optax

import numpyro_sgp as sgp

numpyro.enable_x64()


class Points(NamedTuple):
    """Events and nodes as rows: where they are, (N, D); 1 for an event; the weight of a node in the integral, (N,)."""

    X: np.ndarray
    event: np.ndarray
    weight: np.ndarray


def points(events: np.ndarray, lower: float, upper: float, num_nodes: int) -> Points:
    """Events, and a product rule of Gauss-Legendre nodes in the box with the same sides in each column."""
    D = events.shape[1]
    node, weight = np.polynomial.legendre.leggauss(num_nodes)
    node, weight = lower + 0.5 * (node + 1.0) * (upper - lower), 0.5 * (upper - lower) * weight
    nodes = np.stack(np.meshgrid(*D * [node], indexing="ij"), axis=-1).reshape(-1, D)
    weights = np.prod(np.stack(np.meshgrid(*D * [weight], indexing="ij"), axis=-1), axis=-1).ravel()
    N, Q = len(events), len(nodes)
    return Points(np.concatenate([events, nodes]), np.repeat([1.0, 0.0], [N, Q]), np.append(np.zeros(N), weights))


def model(points: Points, scale: float, level: float):
    """Rate λ = exp(a + f): `scale` is a guess of the lengthscale, and `level` one of log λ."""
    lengthscale = numpyro.param("lengthscale", scale, constraint=dist.constraints.positive)
    variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
    a = numpyro.sample("a", dist.Normal(level, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale, variance), points.X))
    log_rate = numpyro.deterministic("log_rate", a + f)
    with numpyro.plate("points", points.X.shape[0]):
        numpyro.factor("likelihood", points.event * log_rate - points.weight * jnp.exp(log_rate))


class NonCentred(Reparam):
    """f = L v with K = L Lᵀ: the same dense prior, easier for NUTS. L is computed once."""

    def __call__(self, name, fn, obs):
        del obs
        with jax.ensure_compile_time_eval():
            K = fn.kernel(fn.X, fn.X)
            L = jnp.linalg.cholesky(K + fn.relative_jitter * jnp.mean(jnp.diag(K)) * jnp.eye(len(K)))
        return None, L @ numpyro.sample(f"{name}_v", dist.Normal(0.0, 1.0).expand(K.shape[:1]).to_event(1))


def fit(model, Z: np.ndarray, num_steps: int, *data):
    """The guide and its parameters: f and a have a joint Gaussian; hyperparameters maximise the bound."""
    guide = sgp.AutoTSVGP(model, inducing=Z)
    optim = sgp.NaturalGradient(0.5, optax.adam(0.03))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), num_steps, *data, progress_bar=False)
    return guide, result.params


def simulate(seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A pattern in the unit square, (N, 2); a grid, (961, 2), and the true rate there. By thinning, with f exact."""
    rng = np.random.default_rng(seed)
    bound = 2000.0
    side = np.linspace(0.0, 1.0, 31)
    grid = np.stack(np.meshgrid(side, side, indexing="ij"), axis=-1).reshape(-1, 2)
    candidates = rng.uniform(size=(rng.poisson(bound), 2))
    X = np.concatenate([candidates, grid])
    K = np.asarray(sgp.kernels.Matern52(0.2, 1.0)(X, X))
    rate = 300.0 * np.exp(np.linalg.cholesky(K + 1e-8 * np.eye(len(X))) @ rng.normal(size=len(X)))
    assert rate.max() < bound
    kept = rng.uniform(size=len(candidates)) < rate[: len(candidates)] / bound
    return candidates[kept], grid, rate[len(candidates) :]


def moments(values) -> tuple[np.ndarray, np.ndarray]:
    return np.mean(values, axis=0), np.std(values, axis=0)


def analyse(name: str, events, lower: float, upper: float, num_nodes: int, side: int, scale: float, effort):
    """Fit, double the nodes, run NUTS, compare. Returns a function that draws rates, the rows, and NUTS's rates."""
    num_steps, num_samples, num_mcmc = effort
    D = events.shape[1]
    rows = points(events, lower, upper, num_nodes)
    data = scale, np.log(len(events) / (upper - lower) ** D)
    Z = np.stack(np.meshgrid(*D * [np.linspace(lower, upper, side)]), axis=-1).reshape(-1, D)
    _, params = fit(model, Z, num_steps, rows, *data)
    hyper = {site: params[site] for site in ("lengthscale", "variance")}
    # Substituted, and hidden from SVI, which would go on training them.
    known = block(substitute(model, hyper), hide=list(hyper))

    def predictor(nodes):
        """Fit, and return a function for draws at rows. One key for all, so that differences are not of the draws."""
        guide, params = fit(known, Z, num_steps, nodes, *data)
        options = {"sample_shape": (num_samples,)}
        return lambda new: guide.sample_posterior(jax.random.key(1), params, new, *data, **options)

    predict = predictor(rows)
    ours, twice = predict(rows), predictor(points(events, lower, upper, 2 * num_nodes))(rows)
    (mean, sd), (mean_twice, sd_twice) = moments(ours["log_rate"]), moments(twice["log_rate"])
    print(
        f"{name}: {len(events)} events, {len(rows.X) - len(events)} nodes, {len(Z)} inducing inputs, lengthscale "
        f"{hyper['lengthscale']:.3g}, variance {hyper['variance']:.2f}\n  twice the nodes change the rate by up to "
        f"{100 * np.max(np.abs(np.expm1(mean_twice - mean))):.3f} % and standard deviations by up to "
        f"{100 * np.max(np.abs(sd_twice / sd - 1.0)):.3f} %"
    )

    dense = reparam(known, config={"f": NonCentred()})
    options = {"num_chains": 2, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(NUTS(dense), num_warmup=num_mcmc // 2, num_samples=num_mcmc, **options)
    mcmc.run(jax.random.key(2), rows, *data)
    chains = mcmc.get_samples(group_by_chain=True)
    table = summary({site: np.asarray(chains[site]) for site in ("a", "log_rate")}).values()
    rhat, size = (choose([choose(row[key]) for row in table]) for key, choose in (("r_hat", np.max), ("n_eff", np.min)))
    print(f"  NUTS, {2 * num_mcmc} draws: largest R-hat {rhat:.3f}, smallest effective sample size {size:.0f}")
    reference = mcmc.get_samples()
    for site in ("a", "log_rate"):
        (mean, sd), (other, other_sd) = moments(ours[site]), moments(reference[site])
        shift, ratio = np.abs(mean - other) / other_sd, np.atleast_1d(sd / other_sd)
        print(
            f"  {site:8s} means at most {np.max(shift):.2f} standard deviations from NUTS, standard deviations "
            f"{ratio.min():.2f} to {ratio.max():.2f} of those of NUTS"
        )

    def rate(X):
        """Draws at inputs that are neither events nor nodes."""
        return np.exp(predict(Points(X, np.zeros(len(X)), np.zeros(len(X))))["log_rate"])

    return rate, rows, np.exp(np.asarray(reference["log_rate"]))


def main(effort: tuple[int, int, int], output: Path) -> None:
    """Both examples, and the figure."""
    dates = np.loadtxt(Path(__file__).parent / "data" / "coal.csv", skiprows=3)[:, None]
    first, last = float(dates.min()), float(dates.max())
    rate, rows, reference = analyse("disasters", dates, first, last, 50, 25, 20.0, effort)
    years = np.linspace(first, last, 200)
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", width_ratios=(1.5, 1, 1))
    low, median, high = np.quantile(rate(years[:, None]), [0.05, 0.5, 0.95], axis=0)
    axes[0].fill_between(years, low, high, color="C0", alpha=0.35, linewidth=0, label="rate, 90 %")
    axes[0].plot(years, median, color="C0", label="rate, median")
    order = np.argsort(rows.X[:, 0])
    for j, edge in enumerate(np.quantile(reference[:, order], [0.05, 0.95], axis=0)):
        axes[0].plot(rows.X[order, 0], edge, "C1", linewidth=0.9, label="NUTS, 90 %" if j == 0 else None)
    axes[0].plot(dates[:, 0], np.full(len(dates), 0.1), "k|", markersize=8, markeredgewidth=0.6, label="disasters")
    axes[0].set(xlabel="year", ylabel="disasters per year", xlim=(first, last), ylim=(0.0, None))
    axes[0].legend(frameon=False)

    events, grid, truth = simulate()
    rate, _, _ = analyse("pattern", events, 0.0, 1.0, 16, 10, 0.3, effort)
    low, median, high = np.quantile(rate(grid), [0.05, 0.5, 0.95], axis=0)
    print(
        f"  log rate on a grid: correlation with the truth {np.corrcoef(np.log(median), np.log(truth))[0, 1]:.2f}, "
        f"90 % intervals hold {100 * np.mean((low < truth) & (truth < high)):.0f} %"
    )
    levels = np.arange(0.0, max(truth.max(), median.max()) + 100.0, 100.0)
    side = np.linspace(0.0, 1.0, 31)
    for ax, values, title in zip(axes[1:], (truth, median), ("true rate, and the points", "median rate"), strict=True):
        image = ax.contourf(side, side, values.reshape(31, 31).T, levels=levels, cmap="Blues")
        ax.set(title=title, aspect="equal", xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
    axes[1].plot(*events.T, "k.", markersize=3, clip_on=False)
    figure.colorbar(image, ax=axes[1:], shrink=0.8, label="points per unit of area")
    figure.savefig(output, dpi=110)
    print(f"figure written to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    parser.add_argument("--output", type=Path, default=Path("cox_process.png"))
    arguments = parser.parse_args()
    if arguments.smoke:
        main((5, 20, 5), arguments.output)
    else:
        main((150, 8000, 3000), arguments.output)
