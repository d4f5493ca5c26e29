"""Functions of time by their states at inducing times: `AutoMarkovGP(inducing=...)` beside dense algebra of the states."""

from functools import partial
import warnings

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
from numpyro_sgp.fitting.averages import warn_of_averages
from numpyro_sgp.kernels import Constant, Cosine, Matern12, Matern32, Matern52, Periodic, SquaredExponential
from numpyro_sgp.posteriors.markov.pair_formulas import smoothed_pairs
from numpyro_sgp.posteriors.markov.pair_timeline import PairCovariance, PairTimeline
from numpyro_sgp.posteriors.markov.state_space import state_space_of

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
N = 40
TIMES = RNG.permutation(np.r_[np.sort(RNG.uniform(0.0, 5.0, N - 4)), 2.0, 2.0, -0.6, 6.0])[:, None]
Z = np.r_[0.3, 1.0, 1.001, 2.0, 3.1, 4.2, 5.0]
NEW = np.linspace(-1.0, 7.0, 9)[:, None]
KERNELS = {
    "Matérn 1/2": Matern12(0.7, 1.3),
    "Matérn 3/2": Matern32(0.7, 1.3),
    "Matérn 5/2": Matern52(0.7, 1.3),
    "cosine": Cosine(1.1, 0.6),
    "sum": Matern32(0.7, 1.3) + Constant(2.0),
    "product": Matern52(3.0, 1.1) * Matern52(1.0, 0.6),
    "quasi-periodic and rough": Matern32(3.0) * Periodic(1.2, 1.7) + 0.3 * Matern12(0.3),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def state_covariances(kernel, times=TIMES[:, 0], Z=Z):
    """Cov(u, u), Cov(u, f) and the prior variance, u being the states at Z one after the other."""
    model = state_space_of(kernel, jnp.float64, 8)
    h, P = np.asarray(model.h), np.asarray(model.covariance)

    def between(s, t):
        A = np.asarray(model.transition(jnp.asarray([abs(s - t)]))[0])
        return A @ P if s >= t else P @ A.T

    Kuu = np.block([[between(s, t) for t in Z] for s in Z])
    return Kuu, np.stack([np.concatenate([between(z, t) @ h for z in Z]) for t in times], axis=1), h @ P @ h


def projections(kernel, line):
    """What pairs say of the rows, as weights of all states, (N, M d)."""
    d = state_space_of(kernel, jnp.float64, 8).covariance.shape[-1]
    weights = np.zeros((len(line.times), len(line.Z) * d))
    for n, (pair, a) in enumerate(zip(line.seen.pair, line.seen.a, strict=True)):
        weights[n, int(pair) * d : (int(pair) + 2) * d] = a
    return weights, d


def line_of(kernel, times=TIMES[:, 0]):
    return PairTimeline.of(state_space_of(kernel, jnp.float64, 8), jnp.asarray(Z), jnp.asarray(times))


def sites_of(line, linear, precision):
    """The sums over the rows of each pair."""
    pair, a = np.asarray(line.seen.pair), np.asarray(line.seen.a)
    lambda1, Lambda2 = (np.zeros((len(Z) - 1, *shape)) for shape in (a.shape[-1:], 2 * a.shape[-1:]))
    np.add.at(lambda1, pair, linear[:, None] * a)
    np.add.at(Lambda2, pair, precision[:, None, None] * a[:, :, None] * a[:, None, :])
    return jnp.asarray(lambda1), jnp.asarray(Lambda2)


@each_kernel
def test_a_value_between_two_inducing_times_is_known_from_their_states_alone(kernel):
    line = line_of(kernel)
    (Kuu, Kuf, kff), (weights, _) = state_covariances(kernel), projections(kernel, line)
    assert_allclose(weights @ Kuu, Kuf.T, atol=1e-12)
    assert_allclose(kff - np.sum(weights.T * Kuf, axis=0), line.seen.rest, atol=1e-12)
    assert np.all(line.seen.rest >= 0.0)


@each_kernel
def test_smoothing_of_pairs_is_the_dense_posterior_of_all_states(kernel):
    line, (Kuu, _, _) = line_of(kernel), state_covariances(kernel)
    weights, d = projections(kernel, line)
    linear, precision = RNG.normal(size=(2, N)), RNG.uniform(0.0, 5.0, N)
    precision[:5] = 0.0
    lambda1 = jnp.stack([sites_of(line, each, precision)[0] for each in linear])
    q = jax.jit(smoothed_pairs)(line.model, jnp.diff(line.Z), lambda1, sites_of(line, linear[0], precision)[1])
    W = np.eye(len(Kuu)) + weights.T @ (precision[:, None] * weights) @ Kuu
    S = Kuu @ np.linalg.inv(W)
    means = linear @ weights @ S
    log_z = 0.5 * np.sum(means * (linear @ weights), axis=1) - 0.5 * np.linalg.slogdet(W)[1]
    for j in range(len(Z) - 1):
        pair = slice(j * d, (j + 2) * d)
        assert_allclose(q.mean[:, j], means[:, pair], atol=1e-11)
        assert_allclose(q.covariance[0, j], S[pair, pair], atol=1e-11)
    assert_allclose(q.log_normaliser, log_z, atol=1e-11)


@pytest.mark.exhaustive
def test_covariances_and_draws_are_those_of_dense_algebra():
    kernel = Matern52(0.7, 1.3) + Constant(2.0)
    times = np.r_[-0.6, 0.5, 0.7, 1.5, 2.0, 6.0]
    (Kuu, Kuf, _), train = state_covariances(kernel, times), line_of(kernel)
    linear, precision = RNG.normal(size=N), RNG.uniform(0.0, 5.0, N)
    lambda1, Lambda2 = sites_of(train, linear, precision)
    weights, _ = projections(kernel, train)
    S = Kuu @ np.linalg.inv(np.eye(len(Kuu)) + weights.T @ (precision[:, None] * weights) @ Kuu)
    line = line_of(kernel, times)
    A, covariance = projections(kernel, line)[0], PairCovariance(line, lambda1, Lambda2)
    K = np.asarray(kernel(times[:, None], times[:, None]))
    explained, rest = A @ S @ A.T, K - A @ Kuf
    assert_allclose(covariance.of_inducing(), explained, atol=1e-12)
    assert_allclose(covariance.given_inducing(K), rest, atol=1e-12)
    assert_allclose(covariance.variance_of_inducing(), np.diag(explained), atol=1e-12)
    parts = covariance.draw_parts(jax.random.key(0), (20_000, len(times)))
    sd = np.sqrt(np.diag(explained + rest))
    for draws, exact in ((parts.explained, explained), (parts.rest, rest)):
        assert np.max(np.abs(np.cov(draws.T) - exact) / np.outer(sd, sd)) < 0.04
        assert np.max(np.abs(np.mean(draws, axis=0)) / sd) < 0.03
    # E[log sites] − log Z is the divergence.
    kl = covariance.moments().kl
    ratio = parts.log_sites - parts.log_normaliser
    assert abs(np.mean(ratio) - kl) < 5.0 * np.std(ratio) / np.sqrt(len(ratio))
    # The states are the same for all rows that one key draws.
    one, other = (
        PairCovariance(line_of(kernel, rows), lambda1, Lambda2).draw_parts(
            jax.random.key(number), (len(rows),), of_inducing=jax.random.key(5)
        )
        for number, rows in enumerate((times, times[2:]))
    )
    assert_allclose(one.explained[2:], other.explained, atol=1e-12)
    assert np.max(np.abs(one.rest[2:] - other.rest)) > 0.01


def test_draws_where_a_site_has_a_negative_precision_are_nan():
    line = line_of(Matern32(0.7))
    lambda1, Lambda2 = sites_of(line, np.zeros(N), np.ones(N))
    assert np.all(np.isfinite(PairCovariance(line, lambda1, Lambda2).draw_deviations(jax.random.key(0), (N,))))
    Lambda2 = Lambda2.at[3].add(-0.5 * Lambda2[3] - 0.1 * np.eye(4))
    assert np.any(np.isnan(PairCovariance(line, lambda1, Lambda2).draw_deviations(jax.random.key(0), (N,))))


W = np.c_[np.ones(N), np.sin(2.0 * TIMES[:, 0]) + 0.2 * RNG.normal(size=N)]
Y = np.sin(2.0 * TIMES[:, 0]) + W @ [0.7, -0.5] + 0.4 * RNG.normal(size=N)
COUNTS = RNG.poisson(np.exp(0.5 * Y)).astype(float)
NOISE = 0.16


def gaussian(t, W=None, y=None, num_data=None):
    kernel = Matern32(numpyro.param("lengthscale", 0.8, constraint=dist.constraints.positive), 1.3)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, t, mean=0.3))
    if W is not None:
        slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
        f = 2.0 * f + W @ slopes
    with numpyro.plate("time", num_data or t.shape[0], subsample_size=t.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.4), obs=y)


def counts(t, W=None, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(Matern32(0.8, 1.3), t))
    if W is not None:
        f = f + W @ numpyro.sample("slopes", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def fitted(model, *args, num_steps=2, step_size=1.0, inducing=Z, **options):
    """Its hyperparameters stay where they start."""
    guide = sgp.AutoMarkovGP(model, inducing=inducing)
    svi = SVI(model, guide, sgp.NaturalGradient(step_size, optax.sgd(0.0)), sgp.QuadratureELBO(20))
    result = svi.run(jax.random.key(0), num_steps, *args, progress_bar=False, **options)
    assert sgp.num_refused(result.state) == 0
    return guide, svi, result


def bound_of_states(lengthscale, W, tight=False):
    """The bound of Titsias with the states as inducing variables, the slopes being integrated; and its posterior."""
    Kuu, Kuf, kff = state_covariances(Matern32(float(lengthscale), 1.3))
    X, coefficient = (np.zeros((N, 2)), 1.0) if W is None else (W, 2.0)
    prior = np.block([[Kuu, np.zeros((len(Kuu), 2))], [np.zeros((2, len(Kuu))), 2.25 * np.eye(2)]])
    J = np.c_[coefficient * np.linalg.solve(Kuu, Kuf).T, X]
    S, residual = J @ prior @ J.T + NOISE * np.eye(N), Y - 0.3 * coefficient
    rest = coefficient**2 * (kff - np.sum(Kuf * np.linalg.solve(Kuu, Kuf), axis=0)) / NOISE
    gain = np.linalg.solve(S, J @ prior).T
    evidence = -0.5 * (residual @ np.linalg.solve(S, residual) + np.linalg.slogdet(2.0 * np.pi * S)[1])
    lost = 0.5 * np.sum(np.log1p(rest)) if tight else 0.5 * np.sum(rest)
    return evidence - lost, gain @ residual, prior - gain @ J @ prior


@pytest.mark.parametrize(
    "covariates", [None, pytest.param(W, marks=pytest.mark.thorough)], ids=["f alone", "with effects"]
)
def test_one_step_is_the_best_posterior_of_the_states_for_gaussian_noise(covariates):
    args = (TIMES, covariates, Y)
    guide, svi, result = fitted(gaussian, *args)
    bound, mean, covariance = bound_of_states(0.8, covariates)
    assert_allclose(-result.losses[-1], bound_of_states(0.8, covariates, tight=True)[0], rtol=1e-11)
    loss = sgp.QuadratureELBO(20, bound="titsias")
    found = loss.loss(jax.random.key(0), result.params, svi.model, svi.guide, *args)
    assert_allclose(-found, bound, rtol=1e-11)
    new = np.ones((len(NEW), 2))
    q = guide.posterior(jax.random.key(0), result.params, NEW, None if covariates is None else new)["f"]
    Kuu, Kuf, kff = state_covariances(Matern32(0.8, 1.3), NEW[:, 0])
    A = np.linalg.solve(Kuu, Kuf)
    S = covariance[: len(Kuu), : len(Kuu)]
    assert_allclose(q.mean, 0.3 + A.T @ mean[: len(Kuu)], atol=1e-10)
    assert_allclose(q.variance, kff - np.sum(A * Kuf, axis=0) + np.sum(A * (S @ A), axis=0), atol=1e-10)
    K = np.asarray(Matern32(0.8, 1.3)(NEW, NEW))
    assert_allclose(q.covariance(), K - A.T @ Kuf + A.T @ S @ A, atol=1e-10)
    if covariates is not None:
        above = guide.quantiles(result.params, 0.8413447460685429, *args)["slopes"]  # one standard deviation
        assert_allclose(above, (mean + np.sqrt(np.diag(covariance)))[-2:], atol=1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("covariates", [None, W], ids=["f alone", "with effects"])
def test_hyperparameters_have_the_gradient_of_the_dense_bound(covariates):
    _, svi, result = fitted(gaussian, TIMES, covariates, Y)

    def loss(lengthscale):
        params = {**result.params, "lengthscale": lengthscale}
        return svi.loss.loss(jax.random.key(0), params, svi.model, svi.guide, TIMES, covariates, Y)

    # At the best posterior the gradient is that of the bound which is the largest in it.
    step = 1e-5
    above, below = (bound_of_states(0.8 + change, covariates, tight=True)[0] for change in (step, -step))
    exact = (above - below) / (2.0 * step)
    assert_allclose(-jax.jit(jax.grad(loss))(0.8), exact, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "covariates", [None, pytest.param(W, marks=pytest.mark.exhaustive)], ids=["f alone", "with effects"]
)
def test_steps_on_minibatches_average_to_the_step_on_all_rows(covariates):
    guide = sgp.AutoMarkovGP(gaussian, inducing=Z)
    svi = SVI(gaussian, guide, sgp.NaturalGradient(0.3, optax.sgd(0.0)), sgp.QuadratureELBO(20))

    @partial(jax.jit, static_argnames="num_data")
    def step(state, *args, num_data):
        state, loss = svi.update(state, *args, num_data=num_data)
        params = svi.get_params(state)
        return [params[name] for name in sorted(params) if name.endswith("sites")], loss, state

    start = svi.init(jax.random.key(0), TIMES, covariates, Y)
    *_, start = step(start, TIMES, covariates, Y, num_data=N)
    whole = step(start, TIMES, covariates, Y, num_data=N)[:2]
    batches = np.split(RNG.permutation(N), 4)
    parts = [
        step(start, TIMES[rows], None if covariates is None else covariates[rows], Y[rows], num_data=N)[:2]
        for rows in batches
    ]
    for each, *others in zip(jax.tree.leaves(whole), *(jax.tree.leaves(part) for part in parts), strict=True):
        assert_allclose(each, np.mean(others, axis=0), atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "covariates", [None, pytest.param(W, marks=pytest.mark.exhaustive)], ids=["f alone", "with effects"]
)
def test_with_all_times_it_is_the_posterior_with_a_site_in_each_row(covariates):
    args, options = (TIMES, covariates, COUNTS), {"num_steps": 20, "step_size": 0.7}
    guide, _, pairs = fitted(counts, *args, inducing=TIMES, **options)
    whole = sgp.AutoMarkovGP(counts)
    svi = SVI(counts, whole, sgp.NaturalGradient(0.7, optax.sgd(0.0)), sgp.QuadratureELBO(20))
    rows = svi.run(jax.random.key(0), 20, *args, progress_bar=False)
    assert_allclose(pairs.losses, rows.losses, rtol=1e-10)
    new = NEW, None if covariates is None else np.ones((len(NEW), 2))
    ours, theirs = (
        each.posterior(jax.random.key(1), result.params, *new)["f"] for each, result in ((guide, pairs), (whole, rows))
    )
    for name in ("mean", "variance"):
        assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-10)
    assert_allclose(ours.covariance(), theirs.covariance(), atol=1e-10)
    if covariates is not None:
        for level in (0.1, 0.6):
            assert_allclose(
                guide.quantiles(pairs.params, level, *args)["slopes"],
                whole.quantiles(rows.params, level, *args)["slopes"],
                atol=1e-10,
            )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "covariates", [pytest.param(None, marks=pytest.mark.exhaustive), W], ids=["f alone", "with effects"]
)
def test_importance_ratios_are_constant_where_the_posterior_is_exact(covariates):
    _, svi, result = fitted(gaussian, TIMES, covariates, Y, inducing=TIMES)
    khat = sgp.diagnostics.psis_khat(jax.random.key(1), svi, result.params, TIMES, covariates, Y, num_samples=200)
    assert khat < 0.7
    idata = sgp.to_arviz(jax.random.key(1), svi, result.params, TIMES, covariates, Y, num_samples=50)
    ratio = np.asarray(idata["sample_stats"]["lp"] - idata["sample_stats"]["log_q"])
    assert np.ptp(ratio) < 1e-8


@pytest.mark.exhaustive
def test_new_outcomes_are_taken_in_as_if_they_had_been_there():
    guide, _, first = fitted(gaussian, TIMES[:25], None, Y[:25])
    _, _, whole = fitted(gaussian, TIMES, None, Y)
    params = guide.condition(first.params, TIMES[25:], None, Y[25:])
    ours, theirs = (guide.posterior(jax.random.key(0), each, NEW)["f"] for each in (params, whole.params))
    assert_allclose(ours.mean, theirs.mean, atol=1e-10)
    assert_allclose(ours.variance, theirs.variance, atol=1e-10)
    left = guide.remove(params, TIMES[25:], None, Y[25:])
    before, after = (guide.posterior(jax.random.key(0), each, NEW)["f"].mean for each in (first.params, left))
    assert_allclose(after, before, atol=1e-9)


@pytest.mark.exhaustive
def test_several_functions_with_hyperparameters_of_their_own():
    kernel = Matern52(jnp.asarray([[0.5], [2.0]])) + Constant(0.5)

    def several(t, y=None):
        with numpyro.plate("output", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, t))
        numpyro.sample("y", dist.Normal(f, 0.4).to_event(2), obs=y)

    y = RNG.normal(size=(2, N))
    guide, _, result = fitted(several, TIMES, y)
    q = guide.posterior(jax.random.key(0), result.params, NEW)["f"]
    draws = np.asarray(q.sample(jax.random.key(2), (20_000,)))
    for n, lengthscale in enumerate((0.5, 2.0)):
        own = Matern52(lengthscale) + Constant(0.5)
        (Kuu, Kuf, _), (_, K_new, kff) = state_covariances(own), state_covariances(own, NEW[:, 0])
        A = np.linalg.lstsq(Kuu, Kuf, rcond=1e-13)[0]
        S = Kuf.T @ A + NOISE * np.eye(N)
        gain = np.linalg.solve(S, A.T @ K_new).T
        assert_allclose(q.mean[n], gain @ y[n], atol=1e-8)
        assert_allclose(q.variance[n], kff - np.sum(gain * (K_new.T @ A), axis=1), atol=1e-8)
        sd = np.sqrt(q.variance[n])
        assert np.max(np.abs(np.cov(draws[:, n].T) - q.covariance()[n]) / np.outer(sd, sd)) < 0.04


@pytest.mark.parametrize(
    ("kernel", "units"),
    [
        pytest.param(Matern52(1.5) + Constant(1.0), 1000.0, marks=pytest.mark.thorough),
        pytest.param(Matern32(0.3) + Matern52(2.0), 1000.0, marks=pytest.mark.exhaustive),
        pytest.param(Matern32(3.0) * Periodic(1.0, 1.0), 2000.0, marks=pytest.mark.exhaustive),
    ],
    ids=["level", "sum", "product"],
)
def test_float32_holds_over_close_inducing_times_and_precise_outcomes(kernel, units):
    rng, many = np.random.default_rng(3), 10_000
    times, Z = (
        np.float32(each).astype(float) for each in (np.sort(rng.uniform(0.0, 20.0, many)), np.linspace(0, 20, 800))
    )
    y, precision = np.sin(times), np.where((times > 5.0) & (np.abs(times - 10.0) > 1.0) & (times < 15.0), 1e4, 0.0)

    def found(dtype):
        model = state_space_of(kernel, dtype, 3)
        line = PairTimeline.of(model, jnp.asarray(Z, dtype), jnp.asarray(times, dtype))
        pair, a = np.asarray(line.seen.pair), np.asarray(line.seen.a, float)
        lambda1, Lambda2 = (np.zeros((len(Z) - 1, *shape)) for shape in (a.shape[-1:], 2 * a.shape[-1:]))
        np.add.at(lambda1, pair, (precision * y)[:, None] * a)
        np.add.at(Lambda2, pair, precision[:, None, None] * a[:, :, None] * a[:, None, :])
        q = PairCovariance(line, jnp.asarray(lambda1, dtype), jnp.asarray(Lambda2, dtype)).moments()
        assert q.variance.dtype == dtype
        return np.asarray(q.mean, float), np.asarray(q.variance, float)

    (mean, variance), (exact_mean, exact_variance) = found(jnp.float32), found(jnp.float64)
    assert np.max(np.abs(mean - exact_mean) / np.sqrt(exact_variance)) < 0.1
    # Each is what precise outcomes leave of a prior variance of 1 or 2, near or far from them.
    assert np.max(np.abs(variance - exact_variance)) < units * np.finfo(np.float32).eps


@pytest.mark.thorough
def test_sites_of_negative_precision_and_second_derivatives_are_those_of_dense_algebra():
    kernel, rng = Matern32(0.7, 1.3) + Constant(2.0), np.random.default_rng(4)
    linear, precision = rng.normal(size=N), rng.uniform(-0.3, 0.6, N)
    lambda1, Lambda2 = sites_of(line_of(kernel), linear, precision)
    assert np.min(np.linalg.eigvalsh(Lambda2)) < -0.01
    row = int(np.argmin(TIMES))

    def variance(log_lengthscale):
        model = state_space_of(Matern32(0.7 * jnp.exp(log_lengthscale), 1.3) + Constant(2.0), jnp.float64, 8)
        line = PairTimeline.of(model, jnp.asarray(Z), jnp.asarray(TIMES[:, 0]))
        return PairCovariance(line, lambda1, Lambda2).moments().variance[row]

    def dense_variance(log_lengthscale):
        # In states whose derivatives are in units of the rate, as those of the sites.
        kernel = Matern32(0.7 * np.exp(log_lengthscale), 1.3) + Constant(2.0)
        line, Kuu = line_of(kernel), state_covariances(kernel)[0]
        d, size = 3, len(Kuu)
        Lambda = np.zeros((size, size))
        for j in range(len(Z) - 1):
            pair = slice(j * d, (j + 2) * d)
            Lambda[pair, pair] += Lambda2[j]
        S = Kuu @ np.linalg.inv(np.eye(size) + Lambda @ Kuu)
        weights = projections(kernel, line)[0][row]
        return weights @ S @ weights + float(line.seen.rest[row])

    step = 1e-3
    before, here, after = (dense_variance(each) for each in (-step, 0.0, step))

    def slope(log_lengthscale):
        return jax.jvp(variance, (log_lengthscale,), (1.0,))

    (value, first), (_, second) = jax.jit(lambda x: jax.jvp(slope, (x,), (1.0,)))(0.0)
    assert_allclose(value, here, rtol=1e-10)
    assert_allclose(first, (after - before) / (2.0 * step), rtol=1e-5)
    assert_allclose(second, (after - 2.0 * here + before) / step**2, rtol=1e-4)


@pytest.mark.exhaustive
def test_a_step_has_no_matrix_of_all_times_and_is_traced_once():
    sizes, count = {}, []

    def counted(t, y, num_data):
        count.append(None)
        gaussian(t, None, y, num_data)

    for M in (1_000, 4_000):
        guide = sgp.AutoMarkovGP(counted, inducing=np.linspace(0.0, 5.0, M))
        svi = SVI(counted, guide, sgp.NaturalGradient(0.1, optax.sgd(0.0)), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), TIMES, Y, num_data=N)
        update = jax.jit(svi.update, static_argnames="num_data")
        sizes[M] = update.lower(state, TIMES, Y, num_data=N).compile().memory_analysis().temp_size_in_bytes / M
        state, _ = update(state, TIMES, Y, num_data=N)
        after_first = len(count)
        for rows in np.split(RNG.permutation(N), 2):
            state, _ = update(state, TIMES[rows], Y[rows], num_data=N)
        assert len(count) > after_first  # another number of rows
        after_first = len(count)
        for rows in np.split(RNG.permutation(N), 2):
            state, _ = update(state, TIMES[rows], Y[rows], num_data=N)
        assert len(count) == after_first
    assert sizes[4_000] < 1.1 * sizes[1_000]


def test_fit_warns_of_steps_that_average_over_few_rows_for_the_states():
    svi = SVI(gaussian, sgp.AutoMarkovGP(gaussian, inducing=Z), sgp.NaturalGradient(0.1), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), TIMES, None, Y)
    # Two numbers at each of seven times.
    with pytest.warns(
        UserWarning, match="the 14 numbers of the states of 'f' is an average over about B/ρ = 6/0.1 = 60"
    ):
        warn_of_averages(svi, state, 6, N, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_averages(svi, state, 8, N, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inducing": Z, "space": np.zeros((2, 1))}, "there is `space`"),
        ({"inducing": Z, "parallel": True}, "there is `parallel=True`"),
    ],
)
def test_options_that_exclude_one_another_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sgp.AutoMarkovGP(gaussian, **options)


@pytest.mark.parametrize(
    ("inducing", "message"),
    [
        (np.zeros(1), r"two times or more, \(M,\) or \(M, 1\), got shape \(1, 1\)"),
        (sgp.InducingPoints(jnp.zeros((5, 2))), r"got shape \(5, 2\)"),
        (sgp.BoundedInducingPoints.at(jnp.zeros((5, 1)), 0.0, 1.0), "got BoundedInducingPoints"),
    ],
)
def test_what_are_no_inducing_times_is_refused(inducing, message):
    svi = SVI(gaussian, sgp.AutoMarkovGP(gaussian, inducing=inducing), optax.adam(0.1), sgp.QuadratureELBO())
    with pytest.raises(ValueError, match=message):
        svi.init(jax.random.key(0), TIMES, None, Y)


def test_a_kernel_without_states_is_refused():
    def smooth(t):
        numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(1.0), t))

    svi = SVI(smooth, sgp.AutoMarkovGP(smooth, inducing=Z), optax.adam(0.1), sgp.QuadratureELBO())
    with pytest.raises(TypeError, match="no state-space form"):
        svi.init(jax.random.key(0), TIMES)


@pytest.mark.thorough
def test_rows_that_come_later_beside_effects_are_refused():
    guide = sgp.AutoMarkovGP(gaussian, inducing=Z)
    svi = SVI(gaussian, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0), TIMES, W, Y))
    with pytest.raises(TypeError, match="inducing times and other latents"):
        guide.condition(params, TIMES, W, Y)
