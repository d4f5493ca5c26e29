"""`fit` of a model: hyperparameters about the mode of the exact evidence; its choices and its certificate."""

import dataclasses
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import oracles
import pytest
from scipy.optimize import minimize, rosen, rosen_der
from scipy.special import digamma, polygamma
from scipy.stats import norm

import numpyro_sgp as sgp
from numpyro_sgp.distributions import sparse_regression
from numpyro_sgp.fitting.automatic import budget as budget_module
from numpyro_sgp.fitting.automatic import laplace as laplace_module
from numpyro_sgp.fitting.automatic import profile as profile_module
from numpyro_sgp.fitting.automatic import search as search_module
from numpyro_sgp.fitting.automatic.budget import Budget, parsed_budget
from numpyro_sgp.fitting.automatic.laplace import laplace_covariance, moments_along
from numpyro_sgp.fitting.automatic.placing import placed, precision_of_rows, unexplained
from numpyro_sgp.fitting.automatic.profile import Profile
from numpyro_sgp.fitting.automatic.report import evidence_of, khat_of
from numpyro_sgp.fitting.automatic.search import Search
from numpyro_sgp.fitting.automatic.task import Task, effects, few_rows, has_latent_inputs, is_over_time

module = sys.modules["numpyro_sgp.fitting.automatic.fit_model"]  # the attribute is the function
pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
N = 40
X = np.sort(RNG.uniform(-2.0, 2.0, (N, 1)), axis=0)
F = np.sin(3.0 * X[:, 0])
Y = F + 0.2 * RNG.normal(size=N)
COUNTS = RNG.poisson(np.exp(F + 1.0)).astype(float)
GROUP = RNG.integers(0, 4, N)


@pytest.fixture(autouse=True)
def without_khat(monkeypatch):
    """Draws take seconds; a test of the Pareto k puts them back."""
    monkeypatch.setattr(module, "khat_of", lambda *_: None)


def regression(X, y=None, num_data=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def counts(X, group, y=None, num_data=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0.0, spread))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + level + effect[group])), obs=y)


def evidence(z, X=X, y=Y):
    """Log density of y and log θ, of the exact GP."""
    lengthscale, noise = np.exp(z)
    covariance = oracles.se(X, X, lengthscale) + noise**2 * np.eye(len(X))
    return oracles.gaussian_log_density(y, np.zeros(len(X)), covariance) - 0.5 * z[0] ** 2 - 0.5 * (z[1] + 1.0) ** 2


def covariance_at(evidence, mode):
    """Inverse of the curvature of a log density at its mode."""

    def second(a, b):
        return oracles.derivative(lambda t: oracles.derivative(lambda s: evidence(mode + s * a + t * b)))

    curvature = [[second(a, b) for a in np.eye(len(mode))] for b in np.eye(len(mode))]
    return -np.linalg.inv(curvature)


def moments_of_sides(evidence, mode):
    """Mean and covariance by a density's values and slopes on both sides of its mode, along axes of its curvature.

    It is a quartic between and a parabola beyond. Where it is skewed along one axis as another coordinate changes, the
    mean is that of the third order.
    """
    mean, covariance = np.copy(mode), np.zeros((len(mode), len(mode)))
    variances, axes = np.linalg.eigh(covariance_at(evidence, mode))
    directions, t = np.sqrt(variances)[:, None] * axes.T, np.linspace(-30.0, 30.0, 60_001)
    for index, direction in enumerate(directions):
        log_p = np.zeros_like(t)
        ends = [mode - 2.0 * direction, mode + 2.0 * direction]
        for sign, end in zip((-1.0, 1.0), ends, strict=True):
            value = evidence(end) - evidence(mode)
            slope = oracles.derivative(lambda s, at=(end, sign * direction): evidence(at[0] + s * at[1]))
            more = np.linalg.solve([[8.0, 16.0], [12.0, 32.0]], [value + 2.0, slope + 2.0])
            inside = np.polynomial.Polynomial([0.0, 0.0, -0.5, *more])
            precision = max(-inside.deriv(2)(2.0), 0.25)
            u = np.abs(t)
            side = np.where(u < 2.0, inside(u), value + slope * (u - 2.0) - 0.5 * precision * (u - 2.0) ** 2)
            log_p = np.where(sign * t > 0.0, side, log_p)
        p = np.exp(log_p)
        p /= p.sum()
        mean += p @ t * direction
        covariance += (p @ t**2 - (p @ t) ** 2) * np.outer(direction, direction)
        for other in np.delete(directions, index, axis=0):  # at the mode there is no slope
            slopes = [oracles.derivative(lambda s, at=(end, other): evidence(at[0] + s * at[1])) for end in ends]
            mean += 0.5 * sum(slopes) / 2.0**2 * other
    return mean, covariance


def moments_on_grid(evidence, mean, covariance):
    """Mean and covariance of a density of two numbers, by its values within five standard deviations."""
    sds = np.sqrt(np.diag(covariance))
    grid = np.stack(np.meshgrid(*(m + sd * np.linspace(-5.0, 5.0, 41) for m, sd in zip(mean, sds, strict=True))), -1)
    grid = grid.reshape(-1, 2)
    log_p = np.asarray([evidence(z) for z in grid])
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p @ grid
    return mean, (grid - mean).T * p @ (grid - mean)


def test_hyperparameters_of_a_regression_have_the_moments_of_the_exact_evidence():
    result = sgp.fit(regression, KEY, (X, Y))
    best = minimize(lambda z: -evidence(z), np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-10})
    expected_mean, expected = moments_of_sides(evidence, best.x)
    median = result.guide.median(result.params, X)
    assert_allclose(np.log([median["lengthscale"], median["noise"]]), expected_mean, atol=1e-3)
    L = result.params["auto_scale_tril"]
    assert_allclose(L @ L.T, expected, rtol=1e-2, atol=1e-5)
    # They are nearer to those of the density than the mode and the curvature are.
    exact_mean, exact = moments_on_grid(evidence, expected_mean, expected)
    sds = np.sqrt(np.diag(exact))
    assert np.all(np.abs(expected_mean - exact_mean) < 0.05 * sds)
    assert np.any(np.abs(best.x - exact_mean) > 0.3 * sds)
    assert_allclose(np.sqrt(np.diag(expected)), sds, rtol=0.03)
    assert covariance_at(evidence, best.x)[0, 0] ** 0.5 < 0.9 * sds[0]
    report = result.report
    at = np.log([median["lengthscale"], median["noise"]])
    likelihood = evidence(at) + 0.5 * at[0] ** 2 + 0.5 * (at[1] + 1.0) ** 2
    assert_allclose([report.evidence.lower, report.evidence.upper], likelihood, atol=1e-5)
    assert report.converged
    assert report.num_inducing == {}
    assert "dense posterior" in str(report)
    assert "exact" in str(report)
    assert "Laplace approximation of lengthscale, noise" in str(report)
    assert report.joint == report.independent == ()
    # q(f) is the exact posterior at the medians.
    covariance = oracles.se(X, X, float(median["lengthscale"]))
    mean = covariance @ np.linalg.solve(covariance + float(median["noise"]) ** 2 * np.eye(N), Y)
    assert_allclose(median["f"], mean, atol=1e-3)
    # The result is one of SVI: it can be trained further.
    more = sgp.fit(result.svi, KEY, (X, Y), batch_size=N, num_steps=2, init_state=result.state, progress_bar=False)
    assert more.losses.shape == (2,)
    assert np.isfinite(more.losses).all()


@pytest.mark.thorough
def test_as_many_inducing_inputs_as_rows_lose_what_their_jitter_adds():
    result = sgp.fit(regression, KEY, (X, Y), num_inducing=N)
    median = result.guide.median(result.params, X)
    at = np.log([median["lengthscale"], median["noise"]])
    likelihood = evidence(at) + 0.5 * at[0] ** 2 + 0.5 * (at[1] + 1.0) ** 2
    bounds = result.report.evidence
    assert likelihood - 0.01 < bounds.lower < likelihood < bounds.upper + 1e-6
    assert "log evidence between" in str(result.report)


def test_a_model_without_bounds_of_the_evidence_has_a_pareto_k(monkeypatch):
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    monkeypatch.setattr(module, "khat_of", khat_of)
    result = sgp.fit(model, KEY, (X, COUNTS))
    assert result.report.evidence is None
    assert result.report.khat < 0.7
    assert f"Pareto k {result.report.khat:.2f}: close to the posterior" in str(result.report)
    prior = sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), X)
    loc, scale = (result.params[f"lengthscale_auto_{name}"] for name in ("loc", "scale"))
    elsewhere = {**result.params, "lengthscale_auto_loc": loc + 8.0 * scale}
    khat = khat_of(KEY, result.svi, elsewhere, {}, {"f": prior}, (X, COUNTS), {})
    assert khat > 0.7
    assert "not close to the posterior" in str(dataclasses.replace(result.report, khat=khat))
    # Its draws would take a minute of 700 rows.
    many = sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), np.zeros((700, 1)))
    assert khat_of(KEY, result.svi, result.params, {}, {"f": many}, (X, COUNTS), {}) is None


@pytest.mark.thorough
def test_a_count_model_has_its_effects_in_the_joint_posterior_and_ends_where_no_gradient_is_left(
    monkeypatch,
):
    monkeypatch.setattr(module, "khat_of", khat_of)
    result = sgp.fit(counts, KEY, (X, GROUP, COUNTS))
    (group,) = result.guide.joint_groups(result.params)
    assert set(group.latents) == {"level", "effect"}
    assert result.report.converged
    assert result.report.evidence is None
    assert result.report.khat < 0.7
    assert "joint posterior of f, " in str(result.report)
    assert set(result.report.laplace) == {"lengthscale", "spread"}
    median, upper = (
        result.guide.median(result.params, X, GROUP),
        result.guide.quantiles(result.params, 0.8413447460685429, X, GROUP),
    )
    assert np.all(upper["effect"] > median["effect"])
    # A fit from another start, by steps, is no better.
    guide = sgp.AutoTSVGP(counts, X)
    svi = SVI(
        counts,
        guide,
        sgp.NaturalGradient(0.5, optax.adam(optax.cosine_decay_schedule(0.05, 1000))),
        sgp.QuadratureELBO(),
    )
    other = svi.run(KEY, 1000, X, GROUP, COUNTS, progress_bar=False)
    theirs = guide.median(other.params, X, GROUP)
    assert_allclose(median["f"], theirs["f"], atol=0.15)
    assert_allclose(median["effect"], theirs["effect"], atol=0.15)


@pytest.mark.thorough
def test_the_profile_has_the_best_sites_at_given_hyperparameters():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.5, 4.0), X, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    profile = Profile(model, sgp.AutoTSVGP(model, X[::4]), sgp.QuadratureELBO(), KEY, (X, COUNTS), {}, None)
    svi = SVI(model, sgp.AutoTSVGP(model, X[::4]), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    best = svi.run(KEY, 200, X, COUNTS, progress_bar=False).losses[-1]
    assert_allclose(profile.evaluate({})[0], best, rtol=1e-8)
    assert not profile.exact


@pytest.mark.parametrize("over_time", [True, False], ids=["time", "groups"])
@pytest.mark.exhaustive
def test_the_best_sites_of_a_joint_posterior_are_found_from_those_of_far_other_hyperparameters(over_time):
    def model(X, group, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern32(1.0), X))
        with numpyro.plate("groups", 4):
            effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + effect[group], noise), obs=y)

    joint = ("f", "effect")
    guide = sgp.AutoMarkovGP(model, joint=joint) if over_time else sgp.AutoTSVGP(model, X[::4], joint=joint)
    profile = Profile(model, guide, sgp.QuadratureELBO(), KEY, (X, GROUP, Y), {}, None)
    profile.move({"noise_auto_scale": jnp.asarray(np.log(1e-6))})
    at = {scale: {"noise_auto_loc": jnp.asarray(np.log(scale))} for scale in (0.005, 0.3)}
    expected = profile.evaluate(at[0.3])[0]
    assert profile.evaluate(at[0.005])[0] > expected + 1000.0
    assert_allclose(profile.evaluate(at[0.3])[0], expected, rtol=1e-6)


def two_columns(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    lengthscale = jnp.stack(
        [numpyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("lengthscale", "lengthscale2")]
    )
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.exhaustive
def test_hyperparameters_that_are_correlated_have_these_moments():
    rng = np.random.default_rng(4)
    X = rng.uniform(-2.0, 2.0, (N, 2))
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.1 * rng.normal(size=N)
    result = sgp.fit(two_columns, KEY, (X, y))

    def evidence(z):
        K = np.exp(z[0]) * oracles.se(X / np.exp(z[1:3]), X / np.exp(z[1:3]), 1.0) + np.exp(2.0 * z[3]) * np.eye(N)
        prior = -0.5 * np.sum(z[:3] ** 2) - 0.5 * (z[3] + 1.0) ** 2
        return oracles.gaussian_log_density(y, np.zeros(N), K) + prior

    of_base = result.guide.quantiles(result.params, norm.cdf([-1.0, 0.0, 1.0]), X)
    names = ("variance", "lengthscale", "lengthscale2", "noise")  # parameters of these are in another order
    low, median, high = np.log(np.column_stack([of_base[name] for name in names]))
    mode = minimize(lambda z: -evidence(z), median, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-9}).x
    mean, expected = moments_of_sides(evidence, mode)
    sds = np.sqrt(np.diag(expected))
    assert_allclose(median, mean, atol=0.01)
    assert np.max(np.abs(mean - mode) / sds) > 0.1
    assert_allclose(high - median, sds, rtol=0.01)
    assert_allclose(median - low, sds, rtol=0.01)
    draws = result.guide.base.sample_posterior(KEY, result.params, sample_shape=(20_000,))
    logs = np.log(np.column_stack([draws[name] for name in names]))
    assert_allclose(np.corrcoef(logs.T), expected / sds / sds[:, None], atol=0.03)
    assert np.max(np.abs(expected / sds / sds[:, None] - np.eye(4))) > 0.5  # or it would say little
    with jax.enable_x64(False):
        single = sgp.fit(two_columns, KEY, (X.astype(np.float32), y.astype(np.float32)))
        of_base = single.guide.quantiles(single.params, norm.cdf([-1.0, 0.0, 1.0]), X)
    assert single.params["auto_scale_tril"].dtype == np.float32
    low, _, high = np.log(np.column_stack([of_base[name] for name in names]))
    assert_allclose(0.5 * (high - low), sds, rtol=0.1)


def test_a_posterior_that_is_no_gaussian_is_not_taken_for_one():
    def level(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 5.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(1.0), X, mean=level))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    # f follows a level that is its prior mean, so the bound has a far greater curvature than the evidence.
    for model, is_gaussian in ((regression, True), (level, False)):
        common = {"data": (X, Y), "rows": N, "loss": sgp.QuadratureELBO(), "base": AutoNormal, "joint": False}
        choices = {"inducing": None, "learn_inducing": None, "most_inducing": 10, "number_given": False}
        task = Task(model=model, **common, **choices, most_whole=N, deadline=np.inf, few=N)
        search = Search(task, np.arange(N), KEY)
        search.run()
        evaluations = [search.profile.evaluations]
        for _ in range(2):
            assert search.widen() == is_gaussian
            evaluations.append(search.profile.evaluations)
        # Once, and by the program of the search.
        assert evaluations[0] < evaluations[1] == evaluations[2]
        assert search.profile._step._cache_size() == 1


@pytest.mark.thorough
def test_correlations_along_a_ridge_of_the_bound_are_left_out():
    def mixtures(X, y=None):
        with numpyro.plate("latents", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), X))
        W = numpyro.sample("W", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal((W @ f).T, 0.6).to_event(1), obs=y)

    # A rotation of the latents is one of W, but q(f) does not turn with it.
    waves = np.stack([np.sin(2.0 * X[:, 0]), np.cos(1.3 * X[:, 0])], axis=1)
    several = waves @ [[1.0, 0.5, 1.0], [0.3, -1.0, 0.8]] + 0.6 * np.random.default_rng(0).normal(size=(N, 3))
    loss = sgp.QuadratureELBO(num_nodes=3)
    for model, y, is_correlated in ((regression, Y, True), (mixtures, several, False)):
        task = Task(model, (X, y), N, loss, AutoNormal, False, None, None, 10, False, 0, np.inf)
        search = Search(task, np.arange(N), KEY)
        search.run()
        assert search.widen()
        assert (search.covariance is not None) == is_correlated


@pytest.mark.thorough
def test_far_outcomes_and_a_curvature_between_slow_steps():
    def noisy(X, y=None):
        level = numpyro.sample("level", dist.Normal(np.log(20.0), 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(0.5, 50.0**2), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern52(1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, jnp.exp(level + g)), obs=y)

    y = np.where(X[:, 0] < 0.0, 0.0, 1.0) * 200.0 * Y
    guide = sgp.AutoTSVGP(noisy, X[::2], joint=("f", "g"))
    profile = Profile(noisy, guide, sgp.QuadratureELBO(), KEY, (X, y), {}, None)
    profile.move({"level_auto_scale": jnp.asarray(np.log(1e-6))})
    assert np.isfinite(profile.evaluate({})[0])
    profile.minimise({"level_auto_scale"}, 50, lambda: False)
    name = "level_auto_loc"
    start, values = profile.unconstrained[name], []
    for shift in (-0.2, 0.2, 0.0):
        values.append(profile.evaluate({name: start + shift}, slopes=[name], max_change=1e-5)[0])
    assert_allclose(profile.curvature([name]), (values[0] + values[1] - 2.0 * values[2]) / 0.04, rtol=0.02)


@pytest.mark.thorough
def test_a_single_hyperparameter_has_the_moments_of_the_exact_evidence():
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    result = sgp.fit(model, KEY, (X, Y))
    grid = np.linspace(-2.0, 1.0, 2001)
    log_p = np.asarray([evidence([z, np.log(0.2)]) for z in grid])
    mode, p = grid[np.argmax(log_p)], np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p @ grid
    expected, variance = moments_of_sides(lambda z: evidence([z[0], np.log(0.2)]), np.asarray([mode]))
    sd = variance[0, 0] ** 0.5
    assert_allclose(result.params["lengthscale_auto_loc"], expected[0], atol=1e-3)
    assert_allclose(result.params["lengthscale_auto_scale"], sd, rtol=1e-2)
    assert abs(expected[0] - mean) < 0.05 * sd
    assert abs(mode - mean) > 0.3 * sd
    assert_allclose(sd, np.sqrt(p @ (grid - mean) ** 2), rtol=0.03)


def test_skewed_densities_have_their_moments():
    # z = log(g) for a gamma distributed g: log p = a z - exp(z), with mode log(a) and curvature a.
    for a, tolerance in ((1.5, 0.05), (4.0, 0.02), (50.0, 0.01)):
        sd, sides = a**-0.5, np.asarray([2.0, -2.0])
        falls = a * (np.exp(sides * sd) - 1.0 - sides * sd)
        slopes = np.sign(sides) * a * sd * (np.exp(sides * sd) - 1.0)
        mean, ratio = moments_along(falls, slopes)
        exact_mean, exact_sd = digamma(a) - np.log(a), polygamma(1, a) ** 0.5
        assert abs(mean * sd - exact_mean) < tolerance * exact_sd
        assert_allclose(ratio * sd, exact_sd, rtol=tolerance)
    # A side that is as high as the mode, or not finite, says nothing.
    for falls, slopes in (([-1.0, np.inf], [1.0, 2.0]), ([2.0, 2.0], [2.0, 2.0]), ([2.0, np.nan], [np.nan, 2.0])):
        assert_allclose(moments_along(np.asarray(falls), np.asarray(slopes)), [0.0, 1.0], atol=1e-6)
    # A wall leaves the other side; one that is flat has twice its standard deviation.
    for falls, slopes, expected in (([1e8, 2.0], [1.0, 2.0], -1.0), ([1e-6, 2.0], [-1.0, 2.0], 2.0 - 1.0)):
        mean = moments_along(np.asarray(falls), np.asarray(slopes))[0]
        assert_allclose(mean, expected * np.sqrt(2.0 / np.pi), atol=0.01)


class Density:
    """What `_move_to_mean` takes of a `Profile`, for a density of independent standard Gaussians but for `fall`."""

    def __init__(self, fall, D):
        self.fall, self.unconstrained, self.state = fall, {"z": jnp.zeros(D)}, np.zeros(D)

    def evaluate(self, others):
        self.state = np.asarray(others.get("z", self.state), float)
        return 0.5 * self.state @ self.state + float(self.fall(self.state)), {}

    def on_both_sides(self, _, directions):
        ends = np.stack([directions, -directions], axis=1)
        both = jax.vmap(jax.vmap(jax.value_and_grad(lambda z: 0.5 * z @ z + self.fall(z))))(jnp.asarray(ends))
        return tuple(np.asarray(each) for each in both)


def test_the_mean_moves_by_terms_of_first_order_only_where_these_are_small():
    def small(z):
        return 0.05 * z[0] * jnp.sum(z[1:] ** 2)

    density = Density(small, 4)
    laplace_module._move_to_mean(density, ["z"], np.eye(4))
    assert_allclose(density.state, [-0.15, 0.0, 0.0, 0.0], atol=1e-6)  # -½ Σ_j d³ / dz_0 dz_j², and that is 0.1

    def large(z):
        return 0.5 * z[0] * jnp.sum(z[1:] ** 2) + z[0] ** 4

    density = Density(large, 5)
    laplace_module._move_to_mean(density, ["z"], np.eye(5))
    assert_allclose(density.state, np.zeros(5), atol=1e-6)  # at -2 it is lower than a Gaussian by 16 nats


def test_a_covariance_needs_a_curvature_that_is_that_of_a_maximum():
    H = np.asarray([[2.0, 1.0], [1.0, 3.0]])
    assert_allclose(laplace_covariance(H), np.linalg.inv(H))
    skew = np.asarray([[0.0, 1.0], [-1.0, 0.0]])
    assert laplace_covariance(H + 0.6 * skew) is not None
    assert laplace_covariance(H + 0.8 * skew) is None  # its least eigenvalue is 1.38
    assert laplace_covariance(np.diag([1.0, -1.0])) is None
    assert laplace_covariance(np.diag([1.0, np.nan])) is None
    assert laplace_covariance(np.eye(1)) is None


@pytest.mark.exhaustive
def test_minibatches_come_close_to_all_rows(monkeypatch):
    rng = np.random.default_rng(1)
    X = rng.uniform(-2.0, 2.0, (600, 1))
    y = np.sin(3.0 * X[:, 0]) + 0.2 * rng.normal(size=600)
    whole = sgp.fit(regression, KEY, (X, y))
    monkeypatch.setattr(module, "_SAMPLE", 200)
    parts = sgp.fit(regression, KEY, (X, y), batch_size=100, progress_bar=False)
    assert "batches of 100" in parts.report.method
    medians = [each.guide.median(each.params, X) for each in (whole, parts)]
    # The sites are averages over several epochs: over a single one, f would be within 0.02.
    assert_allclose(medians[1]["noise"], medians[0]["noise"], rtol=0.01)
    assert_allclose(medians[1]["f"], medians[0]["f"], atol=0.01)
    bands = [each.guide.quantiles(each.params, [0.16, 0.84], X)["noise"] for each in (whole, parts)]
    assert_allclose(np.log(bands[1][1] / bands[1][0]), np.log(bands[0][1] / bands[0][0]), rtol=0.5)
    monkeypatch.setattr(module, "_MOST_OPERATIONS", np.inf)
    again = sgp.fit(regression, KEY, (X, y))  # a sample first, and then all rows
    assert "all at once" in again.report.method
    assert_allclose(again.guide.median(again.params, X)["noise"], medians[0]["noise"], rtol=1e-2)


@pytest.mark.thorough
def test_all_rows_are_searched_once_from_where_a_sample_of_them_leads(monkeypatch):
    searched, several = [], search_module.Search._minimise_from

    def from_starts(search, starts):
        searched.append(search.rows)
        several(search, starts)

    monkeypatch.setattr(module, "_SAMPLE", 20)
    monkeypatch.setattr(budget_module, "_MOST_WHOLE", 20)
    monkeypatch.setattr(search_module.Search, "_minimise_from", from_starts)
    result = sgp.fit(regression, KEY, (X, Y))
    assert searched == [20]
    assert "all at once" in result.report.method
    assert result.report.converged
    monkeypatch.setattr(module, "_SAMPLE", N)
    whole = sgp.fit(regression, KEY, (X, Y))
    found, wanted = (each.guide.median(each.params, X) for each in (result, whole))
    # Those chosen for a sample may lose up to half a nat, and the lengthscale then is a little longer.
    for name in ("lengthscale", "noise"):
        assert_allclose(found[name], wanted[name], rtol=0.1)
    assert_allclose(found["f"], wanted["f"], atol=0.02)


@pytest.mark.thorough
def test_minibatches_train_inducing_inputs_that_a_sample_has_chosen(monkeypatch):
    monkeypatch.setattr(module, "_SAMPLE", 20)
    for trained, options in ((True, {}), (False, {"learn_inducing": False}), (False, {"inducing": X[::8]})):
        result = sgp.fit(regression, KEY, (X, Y), batch_size=10, num_steps=3, progress_bar=False, **options)
        assert result.guide.learns_inducing is trained
        rows = {tuple(row) for row in X}
        kept = all(tuple(row) in rows for row in np.asarray(result.params["f_auto_inducing"].Z))
        assert kept is not trained


@pytest.mark.thorough
def test_what_is_given_is_kept():
    Z = X[::4]
    result = sgp.fit(regression, KEY, (X, Y), inducing=Z, base=AutoDelta, joint=False)
    assert_array_equal(result.params["f_auto_inducing"].Z, Z)
    assert "auto_scale_tril" not in result.params
    assert "noise_auto_scale" not in result.params
    independent = sgp.fit(regression, KEY, (X, Y), base=AutoNormal)
    assert type(independent.guide.base) is AutoNormal
    trained = sgp.fit(regression, KEY, (X, Y), num_inducing=7, learn_inducing=True, num_steps=30, progress_bar=False)
    assert trained.report.num_inducing == {"f": 7}
    assert "independent Gaussians for lengthscale, noise" in str(trained.report)
    assert trained.report.laplace == ()
    assert trained.losses.shape == (30,)
    rows = {tuple(row) for row in X}
    assert any(tuple(row) not in rows for row in np.asarray(trained.params["f_auto_inducing"].Z))


@pytest.mark.thorough
def test_a_model_without_num_data_sees_all_rows_and_one_with_random_numbers_takes_steps(monkeypatch):
    def deep(X, y=None):
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), X))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), g[:, None]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    monkeypatch.setattr(module, "_FIRST_CYCLE", 40)
    monkeypatch.setattr(module, "_LONGEST_CYCLE", 40)
    result = sgp.fit(deep, KEY, (X, Y), progress_bar=False)
    assert result.report.method == f"batches of {N}, 40 steps"
    assert result.report.num_inducing == {"f": N, "g": N}
    assert result.report.enough  # although they are trained
    assert "would explain more" not in str(result.report)


def test_budgets_are_parsed_and_limit_the_number_of_inducing_inputs():
    assert parsed_budget(None) == Budget()
    for number in (90, np.int64(90), np.float32(90.0)):
        assert parsed_budget(number) == Budget(seconds=90.0)
    assert parsed_budget([1e-7, "4 GB"]) == Budget(1e-7, 4e9)
    assert parsed_budget("1.5 min") == Budget(seconds=90.0)
    assert parsed_budget(["2 hours", "4 GB"]) == Budget(7200.0, 4e9)
    assert Budget().most_inducing() == 512
    assert Budget(memory=3e7).most_inducing() < 512
    assert Budget(seconds=1e-3).most_inducing() == 48
    assert Budget().most_whole() == 2000
    assert Budget(memory=2e8).most_whole() == 800  # 36 arrays of (800, 800) numbers
    assert Budget(memory=3e7).most_whole() == Budget(seconds=1e-3).most_whole() == 0
    for wrong in ("soon", "3 days", -1.0, "0 s", "1.2.3 s", ". s", True, np.nan, [None], {90}):
        with pytest.raises(ValueError, match="`budget` must be a time"):
            parsed_budget(wrong)


def test_a_start_without_a_finite_bound_raises():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1e-200), obs=y)

    with pytest.raises(ValueError, match="not finite where the fit starts"):
        sgp.fit(model, KEY, (X[:10], Y[:10]))


@pytest.mark.thorough
def test_a_model_without_hyperparameters_has_its_exact_posterior():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    result = sgp.fit(model, KEY, (X, Y))
    K = oracles.se(X, X, 0.5)
    C = K + 0.04 * np.eye(N)
    assert_allclose(result.report.evidence, oracles.gaussian_log_density(Y, np.zeros(N), C), rtol=1e-9)
    q = result.guide.posterior(KEY, result.params, X)["f"]
    assert_allclose(q.mean, K @ np.linalg.solve(C, Y), atol=1e-8)
    assert_allclose(q.variance, np.diag(K - K @ np.linalg.solve(C, K)), atol=1e-8)


def test_a_budget_leaves_most_of_its_time_to_the_batches(monkeypatch):
    deadlines = []

    class Searched:
        deterministic, enough, profile = False, False, SimpleNamespace(exact=False)

        def __init__(self, task, *args):
            del args
            self.task = task
            deadlines.append(task.deadline)

        def run(self):
            pass

    monkeypatch.setattr(module, "Search", Searched)
    monkeypatch.setattr(module, "_trained", lambda search, *args: deadlines.append(search.task.deadline))
    start = time.perf_counter()
    for rows in (2500, N):  # the sample is not all rows, and it is
        data = np.zeros((rows, 1)), np.zeros(rows)
        sgp.fit(regression, KEY, data, budget=1e6, num_inducing=5, num_steps=5, joint=False)
    assert_allclose(np.subtract(deadlines, start), [0.35e6, 1e6, 1e6, 1e6], rtol=1e-3)


def test_a_search_leaves_time_for_the_curvature(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    for each in (profile_module, search_module):
        monkeypatch.setattr(each, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    common = {"data": (X, Y), "rows": N, "loss": sgp.QuadratureELBO(), "base": AutoNormal, "joint": False}
    choices = {"inducing": X[::4], "learn_inducing": None, "most_inducing": 10, "number_given": False}
    task = Task(model=regression, **common, **choices, most_whole=0, deadline=np.inf)
    search = Search(task, np.arange(N), KEY)
    step, names, ends = search.profile._step, ("lengthscale_auto_loc", "noise_auto_loc"), []

    def slow_step(*args):
        clock.now += 1.0
        return step(*args)

    search.profile._step = slow_step
    search.profile.evaluate({})
    assert search.profile.seconds == 1.0

    def valley(others):
        clock.now += 1.0
        z = np.asarray([others[name] for name in names])
        return rosen(z), {**jax.tree.map(jnp.zeros_like, others), **dict(zip(names, rosen_der(z), strict=True))}

    monkeypatch.setattr(search.profile, "evaluate", valley)
    checks = 2.0 * laplace_module._CHECKS
    for _ in range(2):
        start, search.task = clock.now, dataclasses.replace(task, deadline=clock.now + 19.0 + checks)
        search._minimise()
        assert not search.converged
        ends.append(clock.now - start)
        search.profile.seconds = 0.0
    # Two latents have two curvatures and are skewed along two axes, of two evaluations each, as has each draw of a check.
    assert 11.0 < ends[0] < 15.0
    assert 19.0 < ends[1] - checks < 24.0


@pytest.mark.thorough
def test_a_budget_that_is_spent_ends_the_fit():
    report = sgp.fit(regression, KEY, (X, Y), budget=1e-3).report
    assert not report.converged
    assert "stopped before" in str(report)


def test_options_of_the_other_kind_are_refused():
    svi = SVI(regression, sgp.AutoTSVGP(regression, X), sgp.NaturalGradient(), sgp.QuadratureELBO())
    with pytest.raises(TypeError, match="an `SVI`, which does not go with `budget`"):
        sgp.fit(svi, KEY, (X, Y), batch_size=10, num_steps=1, budget=3.0)
    with pytest.raises(TypeError, match="an `SVI`, which does not go with `learn_inducing`, `joint`"):
        sgp.fit(svi, KEY, (X, Y), batch_size=10, num_steps=1, learn_inducing=False, joint=False)
    with pytest.raises(TypeError, match="a model, which does not go with `callback`, `stable_update`"):
        sgp.fit(regression, KEY, (X, Y), callback=[], stable_update=True)
    for each in (svi, regression):
        with pytest.raises(ValueError, match=f"`batch_size` is {N + 1}, and `data` has {N} rows"):
            sgp.fit(each, KEY, (X, Y), batch_size=N + 1, num_steps=1)
    with pytest.raises(TypeError, match="a model, which does not go with `num_epochs`"):
        sgp.fit(regression, KEY, (X, Y), num_epochs=3)
    with pytest.raises(ValueError, match="needs a `batch_size` for an `SVI`"):
        sgp.fit(svi, KEY, (X, Y), num_steps=1)
    with pytest.raises(TypeError, match="needs a model or an `SVI`, got int"):
        sgp.fit(3, KEY, (X, Y))


@pytest.mark.parametrize("rows", [N, pytest.param(23, marks=pytest.mark.exhaustive)])
@pytest.mark.thorough
def test_the_upper_bound_lies_above_the_evidence_and_reaches_it(rows, monkeypatch):
    monkeypatch.setattr(sparse_regression, "_BLOCK", 10)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        X = rng.uniform(-2.0, 2.0, (rows, 2))
        y = rng.normal(size=rows)
        scale = rng.uniform(0.1, 0.5, rows)
        K = oracles.se(X, X, 0.8)
        exact = oracles.gaussian_log_density(y, np.full(rows, 0.3), K + np.diag(scale**2))
        kernel = sgp.kernels.SquaredExponential(0.8)
        site = sgp.SparseGPRegression(kernel, X, X[:8], scale, 0.3)
        bounds = [float(site.upper_bound(y, num_iterations=number)) for number in (0, 1, 5, 100)]
        assert np.all(np.diff(bounds) <= 1e-9)
        assert bounds[-1] >= exact
        # Titsias (2014), equation 4 in the place of conjugate gradients.
        Q = K[:, :8] @ np.linalg.solve(oracles.with_jitter(K[:8, :8], 1e-6), K[:8])
        inner = Q + np.diag(scale**2) + np.trace(K - Q) * np.eye(rows)
        r = y - 0.3
        determinant = np.linalg.slogdet(Q + np.diag(scale**2))[1]
        theirs = -0.5 * (rows * np.log(2 * np.pi) + determinant + r @ np.linalg.solve(inner, r))
        assert bounds[0] <= theirs + 1e-8
        # What is left at the end is the determinant's share.
        quadratic = r @ np.linalg.solve(K + np.diag(scale**2), r)
        assert_allclose(bounds[-1], -0.5 * (rows * np.log(2 * np.pi) + determinant + quadratic), rtol=1e-8)
    with pytest.raises(ValueError, match="is for one latent"):
        sgp.SparseGPRegression(sgp.kernels.SquaredExponential(jnp.ones((2, 1))), X, X[:3], 0.1).upper_bound(y)


def test_inducing_inputs_are_as_many_as_the_tolerance_asks_for():
    kernel = sgp.kernels.SquaredExponential(0.5)
    found = placed(kernel, X, KEY, most=N, tolerance=1e-3)
    assert unexplained(kernel, X, found.Z) <= 1e-3
    assert unexplained(kernel, X, found.Z[:-1]) > 1e-3
    few = placed(kernel, X, KEY, most=5, tolerance=1e-3)
    assert len(few.Z) == 5
    K, Kuu, Kuf = oracles.se(X, X, 0.5), oracles.se(few.Z, few.Z, 0.5), oracles.se(few.Z, X, 0.5)
    left = 1.0 - np.trace(Kuf.T @ np.linalg.solve(oracles.with_jitter(Kuu, 1e-6), Kuf)) / np.trace(K)
    assert_allclose(few.unexplained, left, rtol=1e-6)


def test_what_a_row_tells_is_the_curvature_of_its_density():
    f = {"f": jnp.asarray(F)}
    values = {"lengthscale": 1.0, "spread": 1.0, "level": 0.5, "effect": jnp.arange(4) / 4.0}
    told = precision_of_rows(counts, values, f, (X, GROUP, COUNTS), {})["f"]
    assert_allclose(told, np.exp(F + 0.5 + GROUP / 4.0), rtol=1e-10)
    gaussian = precision_of_rows(regression, {"lengthscale": 1.0, "noise": 0.5}, f, (X, Y), {})["f"]
    assert_allclose(gaussian, np.full(N, 4.0), rtol=1e-10)


def test_bounds_of_the_evidence_are_those_of_the_regression_in_the_model_and_none_elsewhere():
    kernel = sgp.kernels.SquaredExponential(0.5)
    prior = sgp.GaussianProcess(kernel, X, 0.3)
    scales = np.linspace(0.1, 0.3, N)

    def bounds(likelihood):
        def model(y):
            f = numpyro.sample("f", prior)
            numpyro.sample("y", likelihood(f), obs=y)

        return evidence_of(model, {}, "f", prior, sgp.InducingPoints(jnp.asarray(X)), (Y,), {})

    found = bounds(lambda f: dist.Normal(1.0 + f, scales))
    exact = oracles.gaussian_log_density(Y, np.full(N, 1.3), oracles.se(X, X, 0.5) + np.diag(scales**2))
    assert_allclose(found, [exact, exact], atol=1e-2)
    assert found.lower <= exact <= found.upper
    assert bounds(lambda f: dist.Normal(2.0 * f, scales)) is None
    assert bounds(lambda f: dist.Normal(f, jnp.exp(f))) is None
    assert bounds(lambda f: dist.Normal(f, scales).mask(X[:, 0] > 0.0)) is None
    assert bounds(lambda f: dist.StudentT(3.0, f, scales)) is None


def sampled(name, prior):
    return numpyro.sample(name, prior)


def process(name="f", **kwargs):
    return numpyro.sample(name, sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), X, **kwargs))


def trend_and_factor():
    weight, slope = sampled("weight", dist.Normal()), sampled("slope", dist.Normal())
    noise, level = sampled("noise", dist.HalfNormal()), sampled("level", dist.Normal())
    return dist.Normal(weight * process(mean=level) + slope * X[:, 0], noise), Y


def effects_about_a_mean():
    top, spread = sampled("top", dist.Normal()), sampled("spread", dist.HalfNormal())
    middle = sampled("middle", dist.Normal(top, 1.0))
    with numpyro.plate("groups", 4):
        effect = sampled("effect", dist.Normal(middle, spread))
    return dist.Poisson(jnp.exp(process() + effect[GROUP])), COUNTS


def wide_priors():
    # Draws of them overflow in the exponential.
    level, slope = sampled("level", dist.Normal(0.0, 1000.0)), sampled("slope", dist.Normal(0.0, 100.0))
    return dist.Poisson(jnp.exp(process() + level + slope * (50.0 + X[:, 0]))), COUNTS


def bounded_level_and_noise_process():
    level = sampled("level", dist.Uniform(-1.0, 1.0))
    return dist.Normal(process() + level, jnp.exp(process("g"))), Y


def positive_curve_and_inflation():
    top, half, gate = (sampled(name, dist.LogNormal()) for name in ("top", "half", "gate"))
    curve = top * (X[:, 0] + 2.0) / (half + X[:, 0] + 2.0)
    return dist.ZeroInflatedPoisson(gate / (1.0 + gate), jnp.exp(process() + curve)), COUNTS


def cut_points():
    ordered = dist.TransformedDistribution(dist.Normal().expand([3]), dist.transforms.OrderedTransform())
    return dist.OrderedLogistic(process(), sampled("cuts", ordered)), np.minimum(COUNTS, 3).astype(int)


def scales():
    amplitude, scale = sampled("amplitude", dist.HalfNormal()), sampled("scale", dist.HalfNormal())
    effect = sampled("effect", dist.Normal().expand([4]).to_event(1))
    return dist.NegativeBinomial2(jnp.exp(amplitude * process() + scale * effect[GROUP]), amplitude + 1.0), COUNTS


@pytest.mark.parametrize(
    ("terms", "joint"),
    [
        pytest.param(trend_and_factor, {"f", "slope", "level"}, marks=pytest.mark.thorough),
        (effects_about_a_mean, {"f", "effect", "middle", "top"}),
        (wide_priors, {"f", "level", "slope"}),
        (bounded_level_and_noise_process, {"f", "g", "level"}),
        pytest.param(positive_curve_and_inflation, {"f", "top", "half"}, marks=pytest.mark.thorough),
        (cut_points, {"f", "cuts"}),
        (scales, {"f", "effect"}),
    ],
)
def test_what_is_added_to_a_process_is_joint_and_factors_and_scales_are_not(terms, joint):
    def model(X, y=None):
        likelihood, outcomes = terms()
        numpyro.sample("y", likelihood, obs=outcomes)

    task = Task(model, (X, Y), N, sgp.QuadratureELBO(), AutoNormal, "auto", None, None, 10, False, 0, np.inf)
    assert set(effects(task, np.arange(N), KEY)) == joint


@pytest.mark.thorough
def test_effects_about_an_unknown_mean_have_the_exact_posterior():
    def model(X, group, y=None):
        middle = numpyro.sample("middle", dist.Normal())
        with numpyro.plate("groups", 4):
            effect = numpyro.sample("effect", dist.Normal(middle, 0.7))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + effect[group], 0.3), obs=y)

    result = sgp.fit(model, KEY, (X, GROUP, Y))
    draws = result.guide.sample_posterior(KEY, result.params, X, GROUP, sample_shape=(20_000,))
    # Of (middle, effects, f), and of the outcomes, before them.
    prior = np.zeros((5 + N, 5 + N))
    prior[:5, :5], prior[5:, 5:] = 1.0, oracles.se(X, X, 0.5)
    prior[1:5, 1:5] += 0.49 * np.eye(4)
    H = np.concatenate([np.zeros((N, 1)), np.eye(4)[GROUP], np.eye(N)], axis=1)
    gain = prior @ H.T @ np.linalg.inv(H @ prior @ H.T + 0.09 * np.eye(N))
    mean, sd = gain @ Y, np.sqrt(np.diag(prior - gain @ H @ prior))
    found = np.concatenate([draws["middle"][:, None], draws["effect"], draws["f"]], axis=1)
    assert_allclose(found.mean(axis=0), mean, atol=4.0 * np.max(sd) / np.sqrt(20_000))
    assert_allclose(found.std(axis=0), sd, rtol=0.03)


@pytest.mark.thorough
def test_a_bounded_level_has_nearly_the_exact_posterior():
    def model(X, y=None):
        level = numpyro.sample("level", dist.Uniform(-3.0, 3.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(level + f, 0.3), obs=y)

    result = sgp.fit(model, KEY, (X, Y))
    draws = result.guide.sample_posterior(KEY, result.params, X, sample_shape=(4000,))
    levels, covariance = np.linspace(-3.0, 3.0, 999), oracles.se(X, X, 0.5) + 0.09 * np.eye(N)
    density = [oracles.gaussian_log_density(Y, np.full(N, level), covariance) for level in levels]
    weights = np.exp(density - np.max(density)) / np.sum(np.exp(density - np.max(density)))
    mean = weights @ levels
    sd = np.sqrt(weights @ (levels - mean) ** 2)
    assert abs(np.mean(draws["level"]) - mean) < 0.2 * sd
    # A Gaussian of the unbounded value is somewhat narrower. Apart from f it would have a tenth.
    assert 0.75 * sd < np.std(draws["level"]) < 1.1 * sd


@pytest.mark.thorough
def test_several_functions_in_a_term_are_joint():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.5), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.SquaredExponential(2.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + g, 0.3), obs=y)

    result = sgp.fit(model, KEY, (X, Y))
    C = oracles.se(X, X, 0.5) + oracles.se(X, X, 2.0) + 0.09 * np.eye(N)
    assert_allclose(-result.losses[-1], oracles.gaussian_log_density(Y, np.zeros(N), C), atol=0.01)
    median = result.guide.median(result.params, X)
    assert_allclose(median["g"], oracles.se(X, X, 2.0) @ np.linalg.solve(C, Y), atol=1e-3)


def over_time(X, trend, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern12(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + slope * trend, noise), obs=y)


@pytest.mark.thorough
def test_a_function_of_many_times_is_smoothed_and_has_hyperparameters_of_the_exact_evidence(monkeypatch):
    monkeypatch.setattr(module, "_MANY_TIMES", 10)
    monkeypatch.setattr(module, "_PART_OF_TIMES", 25)
    trend = RNG.normal(size=N)
    y = Y + 0.5 * trend
    result = sgp.fit(over_time, KEY, (X, trend, y))
    assert isinstance(result.guide, sgp.AutoMarkovGP)
    assert "smoothed over time" in result.report.method
    assert result.report.converged

    def covariance(lengthscale):
        return np.exp(-np.abs(X - X.T) / lengthscale)

    def evidence(z):
        C = covariance(np.exp(z[0])) + 4.0 * np.outer(trend, trend) + np.exp(2.0 * z[1]) * np.eye(N)
        return oracles.gaussian_log_density(y, np.zeros(N), C) - 0.5 * z[0] ** 2 - 0.5 * (z[1] + 1.0) ** 2

    best = minimize(lambda z: -evidence(z), np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-10})
    median = result.guide.median(result.params, X, trend)
    mean, _ = moments_of_sides(evidence, best.x)
    assert_allclose([median["lengthscale"], median["noise"]], np.exp(mean), rtol=5e-3)
    C = covariance(median["lengthscale"]) + 4.0 * np.outer(trend, trend) + float(median["noise"]) ** 2 * np.eye(N)
    assert_allclose(median["slope"], 4.0 * trend @ np.linalg.solve(C, y), atol=1e-4)
    assert_allclose(median["f"], covariance(median["lengthscale"]) @ np.linalg.solve(C, y), atol=1e-4)


def test_one_function_of_time_with_a_state_space_and_rows_of_their_own_is_smoothed():
    kernel = sgp.kernels.Matern32(1.0)

    def smooth(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), X))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)

    def two(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        g = numpyro.sample("g", sgp.GaussianProcess(kernel, X))
        numpyro.sample("y", dist.Poisson(jnp.exp(f + g)).to_event(1), obs=y)

    def changes(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        numpyro.sample("y", dist.Normal(jnp.diff(f), 1.0).to_event(1), obs=None if y is None else y[1:])

    def once(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)

    def found(model, X):
        data = (X, COUNTS)
        task = Task(model, data, N, sgp.QuadratureELBO(), AutoNormal, "auto", None, None, 10, False, 0, np.inf)
        return is_over_time(task, np.arange(N), KEY)

    assert [found(model, X) for model in (once, smooth, two, changes)] == [True, False, False, False]
    assert not found(once, np.concatenate([X, X], axis=1))
    kernel = kernel * sgp.kernels.Periodic(1.0, 1.0)  # has an approximate form only
    assert not found(once, X)


def test_one_function_at_fixed_inputs_whose_rows_have_terms_of_their_own_may_be_dense():
    def process(name, X, **options):
        return numpyro.sample(name, sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), X, **options))

    def standardised(X, y=None):
        numpyro.sample("y", dist.Poisson(jnp.exp(process("f", (X - X.mean()) / X.std()))).to_event(1), obs=y)

    def at_latent_inputs(X, y=None):
        z = numpyro.sample("z", dist.Normal(X, 0.1).to_event(2))
        numpyro.sample("y", dist.Poisson(jnp.exp(process("f", z))).to_event(1), obs=y)

    def at_trained_inputs(X, y=None):
        numpyro.sample("y", dist.Poisson(jnp.exp(process("f", numpyro.param("z", X)))).to_event(1), obs=y)

    def two(X, y=None):
        numpyro.sample("y", dist.Poisson(jnp.exp(process("f", X) + process("g", X))).to_event(1), obs=y)

    def several(X, y=None):
        with numpyro.plate("outputs", 2, dim=-1):
            f = process("f", X)
        numpyro.sample("y", dist.Poisson(jnp.exp(f.sum(0))).to_event(1), obs=y)

    def changes(X, y=None):
        f = process("f", X)
        numpyro.sample("y", dist.Normal(jnp.diff(f), 1.0).to_event(1), obs=None if y is None else y[1:])

    def task(model):
        return Task(model, (X, COUNTS), N, sgp.QuadratureELBO(), AutoNormal, "auto", None, None, 10, False, 0, np.inf)

    def found(model):
        return few_rows(task(model), np.arange(N), KEY)

    assert found(regression) > found(standardised) > 0
    models = at_latent_inputs, at_trained_inputs, two, several, changes
    assert [found(model) for model in models] == [0, 0, 0, 0, 0]
    models = at_latent_inputs, at_trained_inputs, regression
    assert [has_latent_inputs(task(model), np.arange(N), KEY) for model in models] == [True, False, False]
    assert not Search(task(at_latent_inputs), np.arange(N), KEY).deterministic


def test_latents_too_many_for_their_curvatures_start_with_the_standard_deviation_of_training(monkeypatch):
    monkeypatch.setattr(search_module, "_MOST_ENTRIES", 1)
    task = Task(regression, (X, Y), N, sgp.QuadratureELBO(), AutoNormal, False, None, None, 10, False, 0, np.inf)
    search = Search(task, np.arange(N), KEY)
    assert search.deterministic
    assert not search.widen()
    assert [search.profile.params[name] for name in search.scales] == pytest.approx([0.1, 0.1])


@pytest.mark.exhaustive
def test_a_function_of_time_has_inducing_inputs_where_these_are_asked_for_and_takes_steps_if_need_be(monkeypatch):
    monkeypatch.setattr(module, "_MANY_TIMES", 10)
    data = (X, RNG.normal(size=N), Y)
    assert isinstance(sgp.fit(over_time, KEY, data, num_inducing=3, budget=1).guide, sgp.AutoTSVGP)
    result = sgp.fit(over_time, KEY, data, num_steps=20, progress_bar=False)
    assert isinstance(result.guide, sgp.AutoMarkovGP)
    assert result.report.method == f"batches of {N}, 20 steps"
    assert result.losses[-1] < result.losses[0]


@pytest.mark.exhaustive
def test_few_rows_have_a_dense_posterior_where_a_rough_function_needs_it():
    rng, rows = np.random.default_rng(0), 320
    X = rng.uniform(0.0, 1.0, (rows, 2))
    C = np.asarray(sgp.kernels.Matern52(0.12)(X, X)) + 0.03**2 * np.eye(rows)
    y = np.linalg.cholesky(C) @ rng.normal(size=rows)

    def rough(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    result = sgp.fit(rough, KEY, (X, y))
    assert result.report.num_inducing == {}
    # 17 nats are lost with the 261 inducing inputs that are chosen for fewer.
    truth = oracles.gaussian_log_density(y, np.zeros(rows), C)
    assert truth - 2.0 < result.report.evidence.lower < truth + 5.0
