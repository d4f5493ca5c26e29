"""A function with a site in each row and latents beside it, over time and dense: one Gaussian over both."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Constant, Linear, Matern32, Select
from numpyro_sgp.posteriors.joint.by_rows import markers

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
N = 40
TIMES = RNG.permutation(np.r_[np.sort(RNG.uniform(0.0, 5.0, N - 3)), 2.0, 2.0, 9.0])[:, None]
# The first covariate follows time, the second does not.
W = np.c_[np.sin(2.0 * TIMES[:, 0]) + 0.2 * RNG.normal(size=N), RNG.normal(size=N)]
COUNTS = RNG.poisson(np.exp(0.5 * np.sin(2.0 * TIMES[:, 0]) + 0.7 + W @ [0.2, -0.4])).astype(float)
NEW = np.linspace(-1.0, 10.0, 7)[:, None], RNG.normal(size=(7, 2))


def function_of(t, lengthscale=0.7, **options):
    return numpyro.sample("f", sgp.GaussianProcess(Matern32(lengthscale, 1.3), t, **options))


def effects():
    level = numpyro.sample("level", dist.Normal(0.3, 2.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
    return level, slopes


def gaussian(t, W, y=None):
    level, slopes = effects()
    f = function_of(t, mean=lambda t: 0.1 * t[:, 0])
    numpyro.sample("y", dist.Normal(2.0 * f + level + W @ slopes, 0.4).to_event(1), obs=y)


def counts(t, W, y=None):
    level, slopes = effects()
    f = function_of(t, numpyro.param("lengthscale", 0.8, constraint=dist.constraints.positive))
    predictor = numpyro.deterministic("predictor", f + level + W @ slopes)
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(predictor)), obs=y)


def counts_by_one_kernel(t, W, y=None):
    """The same predictor as one GP, whose kernel has the effects."""
    lengthscale = numpyro.param("lengthscale", 0.8, constraint=dist.constraints.positive)
    kernel = Select(Matern32(lengthscale, 1.3), [0]) + Constant(4.0) + Select(Linear(2.25), [1, 2])
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, jnp.concatenate([t, W], axis=1), mean=0.3))
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def trained(guide, model, y=COUNTS, num_steps=40, step_size=0.7):
    """Its hyperparameters stay where they start."""
    svi = SVI(model, guide, sgp.NaturalGradient(step_size, optax.sgd(0.0)), sgp.QuadratureELBO(20))
    result = svi.run(jax.random.key(0), num_steps, TIMES, W, y, progress_bar=False)
    assert sgp.num_refused(result.state) == 0
    return svi, result


def dense(model):
    return sgp.AutoTSVGP(model, None)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [sgp.AutoMarkovGP, dense], ids=["time", "dense"])
def test_one_step_is_the_exact_posterior_for_gaussian_noise(kind):
    y = RNG.normal(size=N) + 0.7 + W @ [0.5, -1.0]
    guide = kind(gaussian)
    _, result = trained(guide, gaussian, y, num_steps=2, step_size=1.0)
    q = guide.posterior(jax.random.key(0), result.params, TIMES, W)["f"]
    # z = (f, level, slopes), and y = J z + noise.
    K, noise = np.asarray(Matern32(0.7, 1.3)(TIMES, TIMES)), 0.16
    prior = np.zeros((N + 3, N + 3))
    prior[:N, :N], prior[N:, N:] = K, np.diag([4.0, 2.25, 2.25])
    mean = np.r_[0.1 * TIMES[:, 0], 0.3, 0.0, 0.0]
    J = np.c_[2.0 * np.eye(N), np.ones(N), W]
    S = J @ prior @ J.T + noise * np.eye(N)
    gain = np.linalg.solve(S, J @ prior).T
    mean, covariance, residual = mean + gain @ (y - J @ mean), prior - gain @ J @ prior, y - J @ mean
    evidence = -0.5 * (residual @ np.linalg.solve(S, residual) + np.linalg.slogdet(2.0 * np.pi * S)[1])
    assert_allclose(-result.losses[-1], evidence, rtol=1e-12)
    assert_allclose(q.mean, mean[:N], atol=1e-11)
    assert_allclose(q.variance, np.diag(covariance)[:N], atol=1e-11)
    assert_allclose(q.covariance(), covariance[:N, :N], atol=1e-11)
    if kind is sgp.AutoMarkovGP:
        parallel = kind(gaussian, parallel=True).posterior(jax.random.key(0), result.params, TIMES, W)["f"]
        assert_allclose([parallel.mean, parallel.variance], [q.mean, q.variance], atol=1e-11)
        assert_allclose(parallel.kl, q.kl, rtol=1e-11)
    above = guide.quantiles(result.params, 0.8413447460685429, TIMES, W)  # one standard deviation
    sd = np.sqrt(np.diag(covariance))
    assert_allclose(np.r_[above["level"], above["slopes"]], (mean + sd)[N:], atol=1e-10)
    samples = q.sample(jax.random.key(2), (5_000,))
    assert np.max(np.abs(np.cov(samples.T) - q.covariance()) / np.outer(sd[:N], sd[:N])) < 0.1
    draws = guide.sample_posterior(jax.random.key(1), result.params, TIMES, W, sample_shape=(5_000,))
    z = np.concatenate([draws["f"], draws["level"][:, None], draws["slopes"]], axis=1)
    assert np.max(np.abs(np.cov(z.T) - covariance) / np.outer(sd, sd)) < 0.1
    assert np.max(np.abs(z.mean(0) - mean) / sd) < 0.07


@pytest.fixture(
    scope="module", params=[sgp.AutoMarkovGP, pytest.param(dense, marks=pytest.mark.thorough)], ids=["time", "dense"]
)
def runs(request):
    with jax.enable_x64(True):
        pairs = (counts, request.param(counts)), (counts_by_one_kernel, dense(counts_by_one_kernel))
        return [(guide, *trained(guide, model)) for model, guide in pairs]


def test_bound_and_its_gradient_are_those_of_one_kernel_with_the_effects(runs):
    found = []
    for _, svi, result in runs:

        def loss(lengthscale, svi=svi, params=result.params):
            params = {**params, "lengthscale": lengthscale}
            return svi.loss.loss(jax.random.key(0), params, svi.model, svi.guide, TIMES, W, COUNTS)

        found.append(jax.jit(jax.value_and_grad(loss))(0.8))
    assert_allclose(*found, rtol=1e-9)


def test_predictions_are_those_of_one_kernel_with_the_effects(runs):
    (guide, _, own), (one_kernel, _, other) = runs
    q = one_kernel.posterior(jax.random.key(1), other.params, *NEW)["f"]
    draws = guide.sample_posterior(jax.random.key(1), own.params, *NEW, sample_shape=(5_000,))["predictor"]
    sd = np.sqrt(q.variance)
    assert np.max(np.abs(draws.mean(0) - q.mean) / sd) < 0.07
    assert np.max(np.abs(np.cov(draws.T) - q.covariance()) / np.outer(sd, sd)) < 0.1


@pytest.mark.exhaustive
def test_functions_are_drawn_from_the_dense_posterior_given_draws_of_the_effects():
    guide = dense(counts)
    _, result = trained(guide, counts, num_steps=15)
    q = guide.posterior(jax.random.key(1), result.params, *NEW)["f"]
    f = guide.sample_functions(jax.random.key(2), result.params, *NEW, num_samples=3000, num_features=64)["f"](NEW[0])
    sd = np.sqrt(q.variance)
    assert np.max(np.abs(f.mean(0) - q.mean) / sd) < 0.07
    assert np.max(np.abs(np.cov(f.T) - q.covariance()) / np.outer(sd, sd)) < 0.1
    with pytest.raises(TypeError, match="no inducing variables u with a Gaussian"):
        sgp.process_posterior(guide, jax.random.key(1), result.params, *NEW)


@pytest.mark.exhaustive
def test_diagnostics_are_those_of_one_kernel_with_the_effects(runs):
    found = []
    for _, svi, result in runs:
        loo = sgp.diagnostics.loo_cavity(jax.random.key(1), svi, result.params, TIMES, W, COUNTS)
        khat = sgp.diagnostics.psis_khat(jax.random.key(1), svi, result.params, TIMES, W, COUNTS, num_samples=500)
        stats = sgp.to_arviz(jax.random.key(1), svi, result, TIMES, W, COUNTS, num_samples=300)["sample_stats"]
        assert khat < 0.7
        found.append((loo, np.asarray(stats["lp"] - stats["log_q"])))
    pointwise = "elpd_i" if hasattr(found[0][0], "elpd_i") else "loo_i"  # of ArviZ 1, and before
    assert_allclose(*(getattr(loo, pointwise) for loo, _ in found), rtol=1e-6)
    # log p − log q has the bound as its mean, and the same spread.
    for (_, ratio), (_, _, result) in zip(found, runs, strict=True):
        assert abs(ratio.mean() + result.losses[-1]) < 4.0 * ratio.std() / np.sqrt(ratio.size) + 1e-3
    assert_allclose(found[0][1].std(), found[1][1].std(), rtol=0.3)


def dispersion(t, W, y=None):
    level, slopes = effects()
    f = function_of(t, jitter=1e-11)
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 0.5))
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(f + level + W @ slopes), concentration), obs=y)


def noise_with_covariates(t, W, y=None):
    level, slopes = effects()
    f = function_of(t, jitter=1e-11)
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Normal(f + level, jnp.exp(W @ slopes)), obs=y)


def scaled(t, W, y=None):
    level = numpyro.sample("level", dist.Normal(0.3, 2.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    f = function_of(t, jitter=1e-11)
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(scale * f + level)), obs=y)


def two_outcomes(t, W, y=None):
    level = numpyro.sample("level", dist.Normal(0.3, 2.0))
    slope = numpyro.sample("slope", dist.Normal(level, 1.0))
    f = function_of(t, jitter=1e-11)
    numpyro.sample("z", dist.Normal(2.0 * f - slope, 0.5).to_event(1), obs=None if y is None else y - 1.0)
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + level)), obs=y)


def groups(t, W, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("group", 9):
        effect = numpyro.sample("effect", dist.Normal(0.0, scale))
    f = function_of(t, jitter=1e-11)
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + effect[jnp.arange(t.shape[0]) % 9])), obs=y)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [dispersion, two_outcomes, noise_with_covariates, scaled, groups])
def test_every_model_has_the_joint_posterior_over_inducing_inputs_at_all_times(model):
    keep = np.arange(N) != int(np.flatnonzero(TIMES[:, 0] == 2.0)[0])  # inducing inputs that are distinct
    times, covariates, y = TIMES[keep], W[keep], COUNTS[keep]
    found = []
    for guide in (sgp.AutoMarkovGP(model), sgp.AutoTSVGP(model, times)):
        svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.adam(0.02)), sgp.QuadratureELBO(20))
        result = svi.run(jax.random.key(0), 20, times, covariates, y, progress_bar=False)
        new = guide.posterior(jax.random.key(1), result.params, *NEW)["f"]
        found.append((result.losses, new.mean, new.variance, guide.quantiles(result.params, 0.8, times, covariates)))
    (losses, *own, quantiles), (other_losses, *other, other_quantiles) = found
    assert_allclose(losses, other_losses, rtol=1e-8)
    assert_allclose(own, other, atol=1e-7)
    for name, value in quantiles.items():
        assert_allclose(value, other_quantiles[name], atol=1e-7, err_msg=name)


@pytest.mark.exhaustive
def test_independent_effects_can_be_asked_for():
    guide = sgp.AutoMarkovGP(counts, joint=False)
    _, result = trained(guide, counts)
    assert not guide.joint_groups(result.params)
    assert "level_auto_loc" in result.params


@pytest.mark.thorough
def test_rows_of_other_times_are_refused():
    guide = sgp.AutoMarkovGP(counts)
    svi = SVI(counts, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), TIMES, W, COUNTS)
    state, _ = jax.jit(svi.update)(state, TIMES[::-1], W, COUNTS)
    assert sgp.num_refused(state) == 1
    with pytest.raises(ValueError, match="Give all rows at every step"):
        svi.update(state, TIMES[:20], W[:20], COUNTS[:20])


FIRST = np.arange(N) < 25  # the other rows come later


def of_the_first(guide, model, y, **options):
    svi = SVI(model, guide, sgp.NaturalGradient(options.get("step_size", 0.7), optax.sgd(0.0)), sgp.QuadratureELBO(20))
    return svi.run(
        jax.random.key(0), options.get("num_steps", 40), TIMES[FIRST], W[FIRST], y[FIRST], progress_bar=False
    ).params


def after_the_others(guide, model, y, **options):
    params = of_the_first(guide, model, y, **options)
    return guide.condition(params, TIMES[~FIRST], W[~FIRST], y[~FIRST], loss=sgp.QuadratureELBO(20))


def summary(guide, params):
    q, latents = guide.posterior(jax.random.key(0), params, *NEW)["f"], guide.quantiles(params, [0.1, 0.6], *NEW)
    return {"mean": q.mean, "variance": q.variance} | {name: latents[name] for name in latents if name != "f"}


def assert_same(one, other, atol):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert_allclose(value, other[name], atol=atol, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [sgp.AutoMarkovGP, dense], ids=["time", "dense"])
def test_rows_that_come_later_end_at_the_posterior_of_all_rows_for_gaussian_noise(kind):
    y, guide, options = RNG.normal(size=N) + 0.7 + W @ [0.5, -1.0], kind(gaussian), {"num_steps": 2, "step_size": 1.0}
    _, whole = trained(guide, gaussian, y, **options)
    assert_same(summary(guide, after_the_others(guide, gaussian, y, **options)), summary(guide, whole.params), 1e-10)


def precise_counts(t, W, y=None):
    """Counts, with a latent whose prior is not Gaussian, and almost no jitter."""
    level, slopes = effects()
    height = numpyro.sample("height", dist.Gumbel(0.0, 0.5))
    f = function_of(t, jitter=1e-12)
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + level + W @ slopes + height * (W[:, 0] > 0.0))), obs=y)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [sgp.AutoMarkovGP, dense], ids=["time", "dense"])
def test_counts_that_come_later_are_taken_in_as_by_inducing_inputs_at_all_times(kind):
    def found(guide):
        params = after_the_others(guide, precise_counts, COUNTS)
        assert "height_auto_loc" not in params
        return summary(guide, params)

    inducing = sgp.AutoTSVGP(precise_counts, np.unique(TIMES, axis=0))
    assert_same(found(kind(precise_counts)), found(inducing), 1e-7)


def test_rows_with_sites_of_their_own_are_not_removed():
    guide = sgp.AutoMarkovGP(counts)
    svi = SVI(counts, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO(20))
    params = svi.get_params(svi.init(jax.random.key(0), TIMES, W, COUNTS))
    with pytest.raises(TypeError, match='`sites="tied"`'):
        guide.remove(params, *NEW, np.ones(7))


def two_functions(t, W, y=None):
    level = numpyro.sample("level", dist.Normal(0.3, 2.0))
    f = function_of(t)
    g = numpyro.sample("g", sgp.GaussianProcess(Matern32(3.0), t))
    numpyro.sample("y", dist.Normal(f + g + level, 0.4).to_event(1), obs=y)


def test_several_functions_in_a_term_stay_independent_and_say_so():
    run = SVI(two_functions, sgp.AutoMarkovGP(two_functions), optax.adam(0.1), sgp.QuadratureELBO()).init
    with pytest.warns(UserWarning, match="the sum of their kernels"):
        run(jax.random.key(0), TIMES, W, COUNTS)
    guide = sgp.AutoMarkovGP(two_functions, joint=("f", "g", "level"))
    with pytest.raises(ValueError, match="the sum of their kernels"):
        SVI(two_functions, guide, optax.adam(0.1), sgp.QuadratureELBO()).init(jax.random.key(0), TIMES, W, COUNTS)


def test_rows_whose_numbers_float32_cannot_tell_apart_are_refused():
    markers(np.ones(2**21, np.float32))
    with pytest.raises(ValueError, match="up to 2097152 rows in float32, got 2097153"):
        markers(np.ones(2**21 + 1, np.float32))
