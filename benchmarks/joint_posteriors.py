"""Joint posteriors of Gaussian processes and other latents, against NUTS on the dense model, and what a step costs.

For each model: means of all latents and of f, in posterior standard deviations of NUTS, and standard deviations as
ratios to those of NUTS, for the default guide and for `joint=False`. Kernels are fixed, so that NUTS can run on the
dense model for long. Then CPU milliseconds of a step with and without the joint form, for several numbers of inducing
inputs and of effects, the smallest of several; each row is a process of its own with one thread.

    python benchmarks/joint_posteriors.py [--output results] [--figure marginals.png] [--reduced]
"""

import argparse
import json
import os
from pathlib import Path
import subprocess
import sys
import time

if "--child" in sys.argv and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

from common import report
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.diagnostics import summary
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS, SVI, init_to_median
from numpyro.infer.reparam import LocScaleReparam, Reparam
import optax

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Matern52, SquaredExponential

N = 80
RNG = np.random.default_rng(1)
X = np.sort(RNG.uniform(0.0, 6.0, N))[:, None]
W = RNG.normal(size=(N, 2))
FOLLOWS = np.stack([X[:, 0] - 3.0 + 0.1 * RNG.normal(size=N), W[:, 1]], axis=1)
GROUP, SCHOOL = RNG.integers(0, 8, N), RNG.integers(0, 6, N)
OF_GROUP, OF_SCHOOL = RNG.normal(size=8), 0.7 * RNG.normal(size=6)
TREND = np.sin(X[:, 0])
MIXING = np.array([[1.0, 0.0], [0.7, 0.5], [-0.5, 1.0]])
Z = np.linspace(0.0, 6.0, 20)[:, None]


def gp(name, kernel, x=X):
    return numpyro.sample(name, sgp.GaussianProcess(kernel, x))


def coefficients():
    return numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def poisson_with_effects(y):
    a, b = numpyro.sample("a", dist.Normal(0.0, 2.0)), coefficients()
    f = gp("f", SquaredExponential(1.0))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(a + f + FOLLOWS @ b)), obs=y)


def crossed_random_effects(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 8):
        b = numpyro.sample("b", dist.Normal(0.0, scale))
    with numpyro.plate("schools", 6):
        c = numpyro.sample("c", dist.Normal(0.0, 0.7))
    f = gp("f", Matern52(1.5, 1.5))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Bernoulli(logits=f + b[GROUP] + c[SCHOOL]), obs=y)


def nested_effects(y):
    mean, scale = numpyro.sample("mean", dist.Normal(0.0, 1.0)), numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("groups", 8):
        b = numpyro.sample("b", dist.Normal(mean, scale))
    f = gp("f", Matern52(1.5, 1.5))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + b[GROUP])), obs=y)


def non_centred_effects(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 8):
        r = numpyro.sample("r", dist.Normal(0.0, 1.0))
    f = gp("f", Matern52(1.5, 1.5))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Bernoulli(logits=f + scale * r[GROUP]), obs=y)


def additive_processes(y):
    f, g = gp("f", SquaredExponential(0.7)), gp("g", SquaredExponential(0.7), W[:, :1])
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + g + a)), obs=y)


def heteroskedastic(y):
    f, g = gp("f", SquaredExponential(1.0)), gp("g", SquaredExponential(2.0, 0.5))
    a, c = numpyro.sample("a", dist.Normal(0.0, 1.0)), numpyro.sample("c", dist.Normal(-1.0, 1.0))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(a + f, jnp.exp(c + g)), obs=y)


def student_t(y):
    f, b = gp("f", SquaredExponential(1.0)), coefficients()
    scale, df = numpyro.sample("scale", dist.HalfNormal(1.0)), numpyro.sample("df", dist.Gamma(4.0, 1.0))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.StudentT(df, f + W @ b, scale), obs=y)


def ordinal(y):
    f, b = gp("f", SquaredExponential(1.0)), coefficients()
    increasing = dist.transforms.OrderedTransform()
    start = dist.Normal(0.0, 1.5).expand([3]).to_event(1)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(start, increasing))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.OrderedLogistic(f + W @ b, cuts), obs=y)


def negative_binomial(y):
    f, a = gp("f", SquaredExponential(1.0)), numpyro.sample("a", dist.Normal(0.0, 2.0))
    dispersion = numpyro.sample("dispersion", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(a + f), dispersion), obs=y)


def coregionalisation(y):
    with numpyro.plate("latent", 2):
        f = gp("f", SquaredExponential(1.0))
    with numpyro.plate("intercepts", 3):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(MIXING @ f + a[:, None])), obs=y)


def gaussian_noise(y):
    f, a = gp("f", SquaredExponential(1.0)), numpyro.sample("a", dist.Normal(0.0, 2.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(a + f, scale), obs=y)


def many_groups(y):
    mean, scale = numpyro.sample("mean", dist.Normal(0.0, 1.0)), numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("groups", 30):
        b = numpyro.sample("b", dist.Normal(mean, scale))
    f = gp("f", Matern52(1.5, 1.5))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + b[SMALL_GROUP])), obs=y)


def trend_as_prior_mean(y):
    a, b = numpyro.sample("a", dist.Normal(0.0, 2.0)), numpyro.sample("b", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(1.0), X, mean=a + b * (X[:, 0] - 3.0)))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def logistic(eta):
    return 1.0 / (1.0 + np.exp(-eta))


OUTCOMES = {
    poisson_with_effects: RNG.poisson(np.exp(0.5 + TREND + FOLLOWS @ [0.1, 0.4])),
    crossed_random_effects: RNG.binomial(1, logistic(2.0 * TREND + OF_GROUP[GROUP] + OF_SCHOOL[SCHOOL])),
    nested_effects: RNG.poisson(np.exp(TREND + 0.5 * OF_GROUP[GROUP] + 0.5)),
    non_centred_effects: RNG.binomial(1, logistic(2.0 * TREND + OF_GROUP[GROUP])),
    additive_processes: RNG.poisson(np.exp(0.5 + TREND + np.tanh(W[:, 0]))),
    heteroskedastic: TREND + np.exp(-2.0 + 0.3 * X[:, 0]) * RNG.normal(size=N),
    student_t: TREND + W @ [0.3, -0.3] + 0.3 * RNG.standard_t(3.0, size=N),
    ordinal: np.digitize(2.0 * TREND + W @ [0.5, -0.5] + RNG.logistic(size=N), [-1.0, 0.0, 1.5]),
    negative_binomial: RNG.poisson(np.exp(1.0 + TREND) * RNG.gamma(2.0, 0.5, size=N)),
    coregionalisation: RNG.poisson(np.exp(MIXING @ np.stack([TREND, np.cos(X[:, 0])]) + 0.3)),
    gaussian_noise: 1.0 + TREND + 0.3 * RNG.normal(size=N),
}
SMALL_GROUP, OF_SMALL_GROUP = RNG.integers(0, 30, N), RNG.normal(size=30)
OUTCOMES[many_groups] = RNG.poisson(np.exp(TREND + 0.5 * OF_SMALL_GROUP[SMALL_GROUP] + 0.5))
OUTCOMES[trend_as_prior_mean] = RNG.poisson(np.exp(TREND + 0.2 * X[:, 0]))
INDUCING = {
    additive_processes: {"f": Z, "g": np.linspace(-2.5, 2.5, 20)[:, None]},
    heteroskedastic: {"f": Z, "g": Z},
}


class Whitened(Reparam):
    """f = m + L v with v ~ N(0, I): the dense prior in a form that NUTS samples well."""

    def __call__(self, name, fn, obs):  # noqa: ARG002 - what NumPyro calls it with
        v = numpyro.sample(f"{name}_v", dist.Normal().expand([*fn.batch_shape, *fn.event_shape]).to_event(1))
        prior = fn
        while not isinstance(prior, sgp.GaussianProcess):
            prior = prior.base_dist
        K = prior.kernel(prior.X, prior.X)
        L = jnp.linalg.cholesky(K + prior.relative_jitter * jnp.eye(K.shape[-1]))
        return None, prior.prior_mean + jnp.einsum("...ij,...j->...i", L, v)


def by_nuts(model, y, num_samples):
    # Long chains of the dense model, non-centred so that they mix.
    config = {"f": Whitened(), "g": Whitened()}
    config |= {"b": LocScaleReparam(0)} if model in (crossed_random_effects, nested_effects, many_groups) else {}
    kernel = NUTS(reparam(model, config=config), target_accept_prob=0.9, init_strategy=init_to_median)
    options = {"num_warmup": num_samples, "num_samples": num_samples, "num_chains": 4}
    mcmc = MCMC(kernel, **options, chain_method="sequential", progress_bar=False)
    mcmc.run(jax.random.key(1), y)
    chains = {
        name: values
        for name, values in mcmc.get_samples(group_by_chain=True).items()
        if not name.endswith(("_v", "_decentered"))
    }
    found = summary(chains)
    worst = max(float(np.max(each["r_hat"])) for each in found.values())
    least = min(float(np.min(each["n_eff"])) for each in found.values())
    return {name: np.asarray(values).reshape(-1, *values.shape[2:]) for name, values in chains.items()}, worst, least


def by_guide(model, y, num_steps, num_samples, joint):
    guide = sgp.AutoTSVGP(model, INDUCING.get(model, Z), joint=joint)
    steps = optax.exponential_decay(0.5, max(num_steps // 6, 1), 0.6, end_value=0.01)
    others = optax.adam(optax.cosine_decay_schedule(0.02, num_steps))
    svi = SVI(model, guide, sgp.NaturalGradient(steps, others), sgp.QuadratureELBO())
    start = time.perf_counter()
    result = svi.run(jax.random.key(0), num_steps, y, progress_bar=False)
    seconds = time.perf_counter() - start
    draws = guide.sample_posterior(jax.random.key(2), result.params, y, sample_shape=(num_samples,))
    refused = int(sgp.optim.num_refused(result.state.optim_state))
    return draws, float(np.mean(result.losses[-num_steps // 5 :])), refused, seconds


def compared(draws, exact):
    """By latent: errors of means in standard deviations, and ratios of standard deviations, least and largest."""
    found = {}
    for name, values in exact.items():
        sd = values.std(0)
        error, ratio = np.abs(draws[name].mean(0) - values.mean(0)) / sd, draws[name].std(0) / sd
        found[name] = {"error": float(error.max()), "least": float(ratio.min()), "largest": float(ratio.max())}
    return found


def quality(num_steps: int, num_samples: int, names: list[str] | None) -> tuple[dict, dict]:
    results, kept = {}, {}
    for model, y in OUTCOMES.items():
        name = model.__name__
        if names and name not in names:
            continue
        exact, r_hat, least = by_nuts(model, y, num_samples)
        results[name] = {"r_hat": r_hat, "ess": least}
        print(f"{name}: NUTS R-hat {r_hat:.3f}, effective sample size {least:.0f}")
        for label, joint in (("joint", "auto"), ("factorised", False)):
            draws, loss, refused, seconds = by_guide(model, y, num_steps, 2 * num_samples, joint)
            latents = compared(draws, exact)
            results[name][label] = {"loss": loss, "refused": refused, "seconds": seconds, "latents": latents}
            cells = ", ".join(
                f"{latent} {each['error']:.2f} [{each['least']:.2f}, {each['largest']:.2f}]"
                for latent, each in latents.items()
            )
            print(f"  {label:10} ELBO {-loss:8.2f}, refused {refused}: {cells}", flush=True)
            kept[name, label] = draws
        kept[name, "NUTS"] = exact
    return results, kept


def figure(kept: dict, path: Path) -> None:
    """Marginals of the Poisson regression: intercept, both coefficients, and the band of f."""
    name = "poisson_with_effects"
    styles = {"NUTS": ("0.6", "-"), "joint": ("C0", "-"), "factorised": ("C1", "--")}
    labels = {"NUTS": "NUTS", "joint": "default", "factorised": "joint=False"}
    fig, axes = plt.subplots(1, 4, figsize=(12.0, 2.8), layout="constrained")
    titles = ["intercept", "coefficient that follows x", "independent coefficient", "standard deviation of f"]
    for label, (colour, line) in styles.items():
        draws = kept[name, label]
        for axis, values in zip(axes, (draws["a"], draws["b"][:, 0], draws["b"][:, 1]), strict=False):
            values = np.asarray(values)
            grid = np.linspace(values.mean() - 4 * values.std(), values.mean() + 4 * values.std(), 200)
            width = 1.06 * values.std() * len(values) ** -0.2
            density = (
                np.mean(np.exp(-0.5 * ((grid[:, None] - values) / width) ** 2), axis=1) / width / np.sqrt(2 * np.pi)
            )
            axis.plot(grid, density, color=colour, linestyle=line, linewidth=2.0, label=labels[label])
        axes[3].plot(X[:, 0], np.std(np.asarray(draws["f"]), axis=0), color=colour, linestyle=line, linewidth=2.0)
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0.0)
    for axis in axes[:3]:
        axis.set_yticks([])
    axes[3].set_xlabel("x")
    axes[0].legend(frameon=False, fontsize=9)
    fig.savefig(path, dpi=150)
    print(f"figure written to {path}")


def cost(M: int, P: int, grouped: bool, repeats: int) -> dict[str, float]:
    """CPU milliseconds of a step of the joint and the factorised form, in turn.

    Args:
        M: inducing inputs.
        P: coefficients of covariates, or groups.
        grouped: whether each row has the effect of one group, or covariates with coefficients.
        repeats: steps that are timed.
    """
    rng = np.random.default_rng(0)
    B = 1000
    x = rng.uniform(size=(B, 4))
    w = rng.integers(0, P, B) if grouped else rng.normal(size=(B, P))
    y = rng.poisson(np.exp(np.sin(3.0 * x[:, 0]) + 0.1 * (w % 3 if grouped else w[:, 0])))

    def model(x, w, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([4]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([P]).to_event(1))
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(lengthscale), x))
        with numpyro.plate("data", 10 * B, subsample_size=B):
            numpyro.sample("y", dist.Poisson(jnp.exp(f + (b[w] if grouped else w @ b))), obs=y)

    runs = {}
    for label, joint in (("joint", "auto"), ("factorised", False)):
        guide = sgp.AutoTSVGP(model, rng.uniform(size=(M, 4)), joint=joint)
        svi = SVI(model, guide, sgp.NaturalGradient(0.1), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), x, w, y)
        step = jax.jit(svi.update, donate_argnums=0)
        runs[label] = [step, step(state, x, w, y)[0], []]
    for _ in range(repeats + 2):
        for run in runs.values():
            start = time.process_time()
            state, loss = run[0](run[1], x, w, y)
            loss.block_until_ready()
            run[1] = state
            run[2].append(time.process_time() - start)
    return {label: 1e3 * min(times[2:]) for label, (_, _, times) in runs.items()}


def costs(sizes, repeats: int) -> list[dict]:
    rows = []
    for M, P, grouped in sizes:
        command = [sys.executable, __file__, "--child", json.dumps([M, P, grouped, repeats])]
        settings = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        output = subprocess.run(command, env=settings, capture_output=True, text=True, check=True).stdout
        row = {"inducing": M, "effects": P, "grouped": grouped, **json.loads(output.splitlines()[-1])}
        row["ratio"] = row["joint"] / row["factorised"]
        rows.append(row)
        kind = "groups" if grouped else "coefficients"
        print(
            f"M = {M}, {P} {kind}: {row['joint']:.1f} ms joint, {row['factorised']:.1f} ms factorised, "
            f"ratio {row['ratio']:.2f}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="file for the figure of marginals")
    parser.add_argument("--models", nargs="*", help="names of models; all by default")
    parser.add_argument("--reduced", action="store_true", help="half a minute: one model, short chains, one size")
    parser.add_argument("--costs", action="store_true", help="only the time of steps")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    numpyro.enable_x64()
    if arguments.child:
        print(json.dumps(cost(*json.loads(arguments.child))))
        raise SystemExit
    reduced = arguments.reduced
    chosen = ["poisson_with_effects"] if reduced else arguments.models
    settings = {"num_steps": 30 if reduced else 400, "num_samples": 20 if reduced else 2000}
    models, draws = ({}, {}) if arguments.costs else quality(**settings, names=chosen)
    if arguments.figure:
        figure(draws, arguments.figure)
    if models:
        if arguments.models and arguments.output:  # added to those that are there
            kept = json.loads((arguments.output / "joint_posteriors.json").read_text("utf-8"))
            models = {**kept["models"], **models}
        report("joint_posteriors", {"settings": settings, "models": models}, arguments.output)
        if arguments.models:
            raise SystemExit
    sizes = [(M, P, False) for M in (128, 512) for P in (3, 30, 300)]
    sizes += [(M, P, True) for M in (128, 512) for P in (300, 3000)]
    sizes = [(16, 20, True)] if reduced else sizes
    times = costs(sizes, 2 if reduced else 20)
    report("joint_steps", {"costs": times}, arguments.output)
