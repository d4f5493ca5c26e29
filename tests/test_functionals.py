"""Rows that are linear functionals of f, against dense algebra in NumPy at the inputs that they look at."""

import functools
import pickle

from guides import POSTERIORS, arbitrary_parameters, initial_parameters, loss_at
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI
import oracles
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.functionals import Derivative, Difference, Integral, Stack, WeightedSum, sums
from numpyro_sgp.kernels import (
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    RationalQuadratic,
    Select,
    SquaredExponential,
    Warp,
    White,
)

pytestmark = pytest.mark.usefixtures("x64")

R, Q, D, NOISE, JITTER = 5, 3, 2, 0.4, 1e-10
LENGTHSCALE, VARIANCE = np.array([0.8, 1.3]), 1.4
RNG = np.random.default_rng(7)
X, POINTS, OTHERS, DIRECTION = (RNG.normal(size=shape) for shape in [(R, Q, D), (R, D), (R, D), (R, D)])
WEIGHTS, y = RNG.normal(size=(R, Q)), RNG.normal(size=R)
LOWER, UPPER = POINTS, POINTS + np.exp(RNG.normal(size=(R, D)))
NODES = X.reshape(-1, D)
# Σ_q w_rq f(x_rq) as a matrix times the values at the nodes.
SUMS = np.kron(np.eye(R), np.ones(Q)) * WEIGHTS.ravel()
AREAS = WeightedSum(X, WEIGHTS)
SE = SquaredExponential(LENGTHSCALE, VARIANCE)


def dense(A, B):
    return oracles.se(A, B, LENGTHSCALE, VARIANCE)


def area_model(regions, y=None, num_data=R):
    kernel = SquaredExponential(LENGTHSCALE, VARIANCE)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, regions, lambda X: X[:, 0] ** 2, jitter=JITTER))
    with numpyro.plate("rows", num_data, subsample_size=len(regions)):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


MEAN = SUMS @ NODES[:, 0] ** 2


def joint_covariance(functional, kernel=SE):
    """The covariance of rows and of values at OTHERS, checked for the variances and for its two triangles."""
    all_of_them = jax.jit(lambda F, Z: (kernel(F), kernel(F, F), kernel(F, Z), kernel(Z, F)))
    variances, both, cross, other = all_of_them(functional, OTHERS)
    assert_allclose(np.diag(both), variances, atol=1e-12)
    assert_allclose(both, both.T, atol=1e-12)
    assert_allclose(cross.T, other, atol=1e-14)
    return cross, both


@functools.cache
def fitted():
    """A posterior of areas with inducing inputs at all nodes, which one natural step makes exact."""
    with jax.enable_x64(True):
        svi = SVI(area_model, sgp.AutoTSVGP(area_model, NODES), sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
        result = sgp.fit(svi, jax.random.key(0), (AREAS, y), batch_size=R, num_steps=2, progress_bar=False)
    return svi, result


def first_sine(X):
    return jnp.sin(X[:, 0])


# Covariances.


@pytest.mark.exhaustive
def test_covariances_of_weighted_sums_are_sums_of_those_of_values(monkeypatch):
    expected = SUMS @ dense(NODES, OTHERS), SUMS @ dense(NODES, NODES) @ SUMS.T
    for together in (sums._TOGETHER, 2 * Q * Q):  # some rows after others, too
        monkeypatch.setattr(sums, "_TOGETHER", together)
        for found, wanted in zip(joint_covariance(AREAS), expected, strict=True):
            assert_allclose(found, wanted, atol=1e-12)
        slope = jax.grad(lambda s: jnp.sum(SquaredExponential(s * LENGTHSCALE, VARIANCE)(AREAS)))(1.0)
        of_scale = lambda t: np.diag(  # noqa: E731
            SUMS @ oracles.se(NODES, NODES, (1.0 + t) * LENGTHSCALE, VARIANCE) @ SUMS.T
        ).sum()
        assert_allclose(slope, oracles.derivative(of_scale), rtol=1e-9)


def test_covariances_of_differences_are_differences_of_covariances():
    cross, both = joint_covariance(Difference(POINTS, X[:, 0]))
    Z = X[:, 0]
    assert_allclose(cross, dense(POINTS, OTHERS) - dense(Z, OTHERS), atol=1e-13)
    wanted = dense(POINTS, POINTS) - dense(POINTS, Z) - dense(Z, POINTS) + dense(Z, Z)
    assert_allclose(both, wanted, atol=1e-13)
    assert_array_equal(SE(Difference(POINTS, POINTS)), 0.0)


# g, g′ and g″ as functions of q = c Σ_d (x_d − z_d)²/ℓ_d².
PROFILES = {
    "squared exponential": (
        SquaredExponential,
        1.0,
        lambda a: np.exp(-0.5 * a**2) * np.array([[[1.0]], [[-0.5]], [[0.25]]]),
    ),
    "Matérn 5/2": (Matern52, 5.0, lambda a: np.exp(-a) * np.stack([1 + a + a**2 / 3, -(1 + a) / 6, 1 / 12 + 0 * a])),
    "Matérn 3/2": (
        Matern32,
        3.0,
        # g″ = e^−a/4a, which is multiplied by (∂q)² and so by 0 at 0
        lambda a: np.exp(-a) * np.stack([1 + a, -0.5 + 0 * a, 0.25 / np.where(a == 0, 1.0, a)]),
    ),
}


@pytest.mark.parametrize("name", PROFILES)
def test_covariances_of_derivatives_are_the_closed_forms(name):
    make, c, profile = PROFILES[name]

    def closed(A, dA, B, dB):
        difference = (A[:, None] - B) / LENGTHSCALE
        own, other = (np.sum(2 * c * difference * d / LENGTHSCALE, axis=-1) for d in (dA[:, None], dB))
        q = c * np.sum(difference**2, axis=-1)
        _, slope, curvature = VARIANCE * profile(np.sqrt(q))
        mixed = 2 * c * np.sum(dA[:, None] * dB / LENGTHSCALE**2, axis=-1)
        return slope * own, -curvature * own * other - slope * mixed

    # Two rows at one input, and one close by.
    A = np.concatenate([POINTS, POINTS[:1], POINTS[:1] + 1e-9])
    d = np.concatenate([DIRECTION, DIRECTION[1:3]])
    cross, both = joint_covariance(Derivative(A, d), make(LENGTHSCALE, VARIANCE))
    assert_allclose(cross, closed(A, d, OTHERS, d[:R])[0], atol=1e-12)
    assert_allclose(both, closed(A, d, A, d)[1], atol=1e-7 if name == "Matérn 3/2" else 1e-12)
    in_column = make(LENGTHSCALE, VARIANCE)(Derivative(A, -1))
    assert_allclose(in_column, 2 * c * VARIANCE * -profile(np.zeros((1, 1)))[1, 0, 0] / LENGTHSCALE[1] ** 2, rtol=1e-12)
    # No derivative of a hyperparameter is lost where inputs are equal: Var ∝ ℓ⁻².
    slope = jax.grad(lambda s: jnp.sum(make(s, 1.0)(Derivative(A, 0))))(1.0)
    assert_allclose(slope, -2 * jnp.sum(make(1.0, 1.0)(Derivative(A, 0))), rtol=1e-9)


def periodic(x, z):
    return np.exp(-2.0 * np.sum((np.sin(np.pi * (x - z) / 3.0) / LENGTHSCALE) ** 2))


SMOOTH = {
    "periodic": (Periodic(LENGTHSCALE, 3.0), periodic),
    "rational quadratic": (
        RationalQuadratic(LENGTHSCALE, 1.0, 0.7),
        lambda x, z: (1 + np.sum(((x - z) / LENGTHSCALE) ** 2) / 1.4) ** -0.7,
    ),
    "polynomial and linear": (
        Polynomial(3, 0.5) + Linear(LENGTHSCALE),
        lambda x, z: (0.5 * x @ z + 1) ** 3 + x @ (LENGTHSCALE * z),
    ),
    "warp, select, product": (
        Warp(SquaredExponential(1.0), lambda X: jnp.tanh(X)) * Select(Periodic(1.0, 3.0), 1) + 0.3,
        lambda x, z: (
            np.exp(-0.5 * np.sum((np.tanh(x) - np.tanh(z)) ** 2) - 2 * np.sin(np.pi * (x - z)[1] / 3.0) ** 2) + 0.3
        ),
    ),
    "not of the package": (
        lambda X, Z=None: jnp.exp(2 * jnp.sum(X**2, -1)) if Z is None else jnp.exp(2 * X @ jnp.asarray(Z).T),
        lambda x, z: np.exp(2 * x @ z),
    ),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_covariances_of_derivatives_are_finite_differences(name):
    kernel, k = SMOOTH[name]
    prior = sgp.GaussianProcess(kernel, Derivative(0.5 * POINTS[:3], DIRECTION[:3]))
    P, d = np.asarray(prior.X.X), DIRECTION
    step = 2e-2

    def cross(i, z):
        return oracles.derivative(lambda t: k(P[i] + t * d[i], z), step)

    wanted = [[cross(i, z) for z in OTHERS[:2]] for i in range(3)]
    assert_allclose(prior.kernel(prior.X, OTHERS[:2]), wanted, rtol=1e-6, atol=1e-8)
    wanted = [
        [oracles.derivative(lambda t, i=i, j=j: cross(i, P[j] + t * d[j]), step) for j in range(3)] for i in range(3)
    ]
    assert_allclose(prior.kernel(prior.X, prior.X), wanted, rtol=1e-6, atol=1e-7)
    assert_allclose(prior.variance, np.diag(wanted), rtol=1e-6, atol=1e-7)


def legendre(lower, upper, num=40):
    """Nodes (R·num^D, D) and a matrix of weights, (R, R·num^D)."""
    nodes, weights = np.polynomial.legendre.leggauss(num)
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, D)
    volumes = np.prod(upper - lower, axis=-1) / 4
    points = lower[:, None] + 0.5 * (upper - lower)[:, None] * (grid + 1)
    return points.reshape(-1, D), np.kron(np.diag(volumes), np.outer(weights, weights).ravel())


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_integrals_in_closed_form_are_those_by_many_nodes(scale):
    # Narrow boxes, too, where differences of error functions have no digits left.
    lower, upper = LOWER[:3], LOWER[:3] + scale * (UPPER - LOWER)[:3]
    points, weights = legendre(lower, upper, 24)
    boxes, unit = Integral(lower, upper), scale**D
    kernel = SE + 0.7 * SE * Select(SquaredExponential(0.6), [1]) + Select(SquaredExponential(0.9, 0.5), 0) + 0.3

    def k(A, B):
        se, product = dense(A, B), oracles.se(A[:, 1:], B[:, 1:], 0.6)
        return se + 0.7 * se * product + oracles.se(A[:, :1], B[:, :1], 0.9, 0.5) + 0.3

    cross, both = joint_covariance(boxes, kernel)
    assert_allclose(cross, weights @ k(points, OTHERS), rtol=1e-11, atol=1e-12 * unit)
    assert_allclose(both, weights @ k(points, points) @ weights.T, rtol=1e-11, atol=1e-12 * unit**2)
    two = [SquaredExponential(LENGTHSCALE), SquaredExponential(0.9 * LENGTHSCALE, 2.0)]
    batch = SquaredExponential(np.stack([LENGTHSCALE, 0.9 * LENGTHSCALE]), np.array([1.0, 2.0]))
    assert_allclose(batch(boxes, boxes), [one(boxes, boxes) for one in two], rtol=1e-13)
    # With what has other kinds of rows, through the nodes of neither.
    assert_allclose(kernel(boxes, AREAS), weights @ k(points, NODES) @ SUMS.T, rtol=1e-11, atol=1e-12 * unit)


def test_integrals_take_a_batch_of_inducing_inputs():
    boxes, Z = Integral(LOWER[:3], UPPER[:3]), RNG.normal(size=(2, 4, D))
    kernel = SE + Select(SquaredExponential(0.9, 0.5), 0) + 0.3
    assert_allclose(kernel(Z, boxes), np.stack([kernel(one, boxes) for one in Z]), rtol=1e-13)


def test_other_kernels_are_integrated_by_nodes():
    boxes, kernel = Integral(LOWER, UPPER, num_nodes=12), Matern52(1.5 * LENGTHSCALE)
    points, weights = legendre(LOWER, UPPER, 12)
    cross, both = joint_covariance(boxes, kernel)
    assert_allclose(cross, weights @ kernel(points, OTHERS), atol=1e-12)
    assert_allclose(both, weights @ kernel(points, points) @ weights.T, atol=1e-11)
    volume = np.prod(UPPER - LOWER, axis=-1)
    assert_allclose(sgp.GaussianProcess(kernel, boxes, 2.0).prior_mean, 2.0 * volume)


@pytest.mark.exhaustive
def test_rows_of_a_stack_are_those_of_its_parts_in_any_order():
    both = Stack([POINTS, Stack([Derivative(OTHERS, 0), Integral(LOWER, UPPER)])])
    size = len(both)
    index = RNG.permutation(size)[:9]

    @jax.jit
    def of_parts(parts):
        return [[SE(one, other) for other in parts] for one in parts]

    @jax.jit
    def of_rows(both, index):
        some = both[index]
        return SE(some, some), SE(some, both), SE(some), some[2:4].cross(SE, OTHERS)

    blocks = np.block([[np.asarray(block) for block in row] for row in of_parts(both.parts)])
    cross, covariance = joint_covariance(both)
    assert_allclose(covariance, blocks, atol=1e-14)
    some, with_all, variances, some_cross = of_rows(both, index)
    assert_allclose(some, blocks[np.ix_(index, index)], atol=1e-14)
    assert_allclose(with_all, blocks[index], atol=1e-14)
    assert_allclose(variances, np.diag(blocks)[index], atol=1e-14)
    assert_allclose(some_cross.T, cross[index[2:4]], atol=1e-14)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(both[:])} == {size}
    assert both[:].shape == both.shape == (size, D)
    assert_allclose(both[-3:].apply(first_sine), both.apply(first_sine)[-3:])
    assert_array_equal(both[np.arange(size) == 2].apply(first_sine), both.apply(first_sine)[2:3])


# The prior.


def test_the_prior_of_functionals_is_that_of_values_mapped():
    prior = sgp.GaussianProcess(SE, AREAS, lambda X: X[:, 0] ** 2, jitter=JITTER)
    K = oracles.with_jitter(SUMS @ dense(NODES, NODES) @ SUMS.T, JITTER)
    assert_allclose(prior.prior_mean, MEAN)
    assert_allclose(prior.log_prob(y), oracles.gaussian_log_density(y, MEAN, K), rtol=1e-9)
    draws = prior.sample(jax.random.key(0), (4000,))
    assert_allclose(np.cov(draws.T), K, atol=0.1 * K.max())
    slopes = sgp.GaussianProcess(SE, Derivative(POINTS, DIRECTION), lambda X: X[:, 0] ** 2)
    assert_allclose(slopes.prior_mean, 2 * POINTS[:, 0] * DIRECTION[:, 0])
    assert_array_equal(sgp.GaussianProcess(SE, Derivative(POINTS, 0), 3.0).prior_mean, 0.0)
    assert_array_equal(sgp.GaussianProcess(SE, AREAS, y).prior_mean, y)


# Posteriors.


def test_with_inducing_inputs_at_all_nodes_a_natural_step_reaches_the_evidence():
    svi, result = fitted()
    K = SUMS @ dense(NODES, NODES) @ SUMS.T + NOISE**2 * np.eye(R)
    evidence = oracles.gaussian_log_density(y, MEAN, K)
    assert_allclose(-result.losses[-1], evidence, rtol=1e-7)
    # What the areas say of the function, and of a slope.
    f = sgp.process_posterior(svi.guide, jax.random.key(0), result.params, AREAS)["f"]
    mean = OTHERS[:, 0] ** 2 + dense(OTHERS, NODES) @ SUMS.T @ np.linalg.solve(K, y - MEAN)
    assert_allclose(f.posterior(OTHERS).mean, mean, atol=1e-6)
    at = jax.jit(lambda X: f.posterior(X).mean)
    step = oracles.derivative(lambda t: at(OTHERS + t * DIRECTION))
    assert_allclose(f.posterior(Derivative(OTHERS, DIRECTION)).mean, step, atol=1e-8)


@pytest.mark.parametrize("name", POSTERIORS)
def test_every_posterior_takes_functionals(name):
    guide = POSTERIORS[name](area_model, NODES[::3])
    params = arbitrary_parameters(area_model, guide, AREAS, y)
    assert np.isfinite(loss_at(params, area_model, guide, AREAS, y))
    q = guide.posterior(jax.random.key(0), params, AREAS)["f"]
    assert_allclose(np.diag(q.covariance()), q.variance, atol=1e-12)
    # The rows are the sums of the values at their nodes, under the posterior, too.
    values = sgp.process_posterior(guide, jax.random.key(0), params, AREAS)["f"].posterior(NODES)
    assert_allclose(q.mean, SUMS @ values.mean, atol=1e-10)
    assert_allclose(q.covariance(), SUMS @ values.covariance() @ SUMS.T, atol=1e-10)


@pytest.mark.thorough
def test_values_given_slopes_are_those_of_dense_algebra():
    slopes = Derivative(POINTS, DIRECTION)
    data, site = Stack([OTHERS[:1], slopes]), np.append(0.3, y)

    def k(A, B):  # values and slopes by central differences
        return oracles.derivative(lambda t: dense(A + t * DIRECTION, B))

    mixed = oracles.derivative(lambda t: k(POINTS, POINTS + t * DIRECTION))
    first = OTHERS[:1]
    Kuf = np.hstack([dense(NODES, first), k(POINTS, NODES).T])
    Kff = np.block([[dense(first, first), k(POINTS, first).T], [k(POINTS, first), mixed]]) + NOISE**2 * np.eye(R + 1)
    # With a site for each row it is exact.

    def model(rows, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(SE, rows))
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = sgp.AutoTSVGP(model, None)
    svi = SVI(model, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    update = jax.jit(svi.update)
    state, _ = update(jax.jit(svi.init)(jax.random.key(0), data, site), data, site)
    q = sgp.process_posterior(guide, jax.random.key(0), svi.get_params(state), data)["f"].posterior(NODES)
    assert_allclose(-update(state, data, site)[1], oracles.gaussian_log_density(site, 0.0, Kff), rtol=1e-8)
    assert_allclose(q.mean, Kuf @ np.linalg.solve(Kff, site), atol=1e-8)
    assert_allclose(q.covariance(), dense(NODES, NODES) - Kuf @ np.linalg.solve(Kff, Kuf.T), atol=1e-8)
    # Functions drawn from it have the posterior's moments, and functionals are applied to each of them.
    params = svi.get_params(state)
    draws = guide.sample_functions(jax.random.key(1), params, data, num_samples=200, num_features=16)
    values = np.asarray(draws["f"](NODES))
    assert_allclose(values.mean(axis=0), q.mean, atol=5 * np.sqrt(np.max(q.variance) / 200))
    assert_allclose(draws["f"](AREAS), values @ SUMS.T, atol=1e-10)
    deviation = np.sqrt(guide.posterior(jax.random.key(0), params, data)["f"].variance)
    assert_allclose(draws["f"](data).std(axis=0), deviation, rtol=0.25)
    with pytest.raises(ValueError, match="one site for each of the 6 rows"):
        svi.update(state, data[:3], site[:3])
    moved = Stack([OTHERS[:1] + 1.0, slopes])
    assert np.isnan(update(state, moved, site)[1])


def test_the_collapsed_regression_is_that_of_mapped_values():
    Z = NODES[::3]
    found = sgp.SparseGPRegression(SE, AREAS, Z, NOISE, lambda X: X[:, 0] ** 2, jitter=JITTER)
    Kuu, Kuf = oracles.with_jitter(dense(Z, Z), JITTER), dense(Z, NODES) @ SUMS.T
    kff = np.diag(SUMS @ dense(NODES, NODES) @ SUMS.T)
    assert_allclose(found.log_prob(y), oracles.tight_bound(Kuu, Kuf, kff, y - MEAN, NOISE), rtol=1e-9)
    q = found.condition(y).posterior(AREAS)
    values = found.condition(y).posterior(NODES)
    assert_allclose(q.mean, SUMS @ values.mean, atol=1e-9)
    assert_allclose(q.covariance(), SUMS @ values.covariance() @ SUMS.T, atol=1e-9)
    # A guide that starts there is at the bound.
    guide = sgp.AutoTSVGP(area_model, Z, init_from=found.condition(y))
    params = initial_parameters(area_model, guide, AREAS, y)
    assert_allclose(-loss_at(params, area_model, guide, AREAS, y), found.log_prob(y), rtol=1e-7)


def test_the_whitened_model_is_exact_with_inducing_inputs_at_all_nodes():
    reparam = handlers.reparam(area_model, config={"f": sgp.InducingReparam(NODES)})
    v = RNG.normal(size=len(NODES))
    trace = handlers.trace(handlers.substitute(handlers.seed(reparam, 0), {"f_whitened": v})).get_trace(AREAS, y)
    L = np.linalg.cholesky(oracles.with_jitter(dense(NODES, NODES), JITTER))
    assert_allclose(trace["f"]["value"], MEAN + SUMS @ L @ v, atol=1e-6)


def test_an_intercept_joins_areas():
    def model(regions, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, 2.0))
        f = numpyro.sample("f", sgp.GaussianProcess(SE, regions, jitter=JITTER))
        numpyro.sample("y", dist.Normal(b + f, NOISE), obs=y)

    svi = SVI(model, sgp.AutoTSVGP(model, NODES), sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    update = jax.jit(svi.update)
    state, _ = update(jax.jit(svi.init)(jax.random.key(0), AREAS, y), AREAS, y)
    evidence = oracles.gaussian_log_density(y, 0.0, SUMS @ dense(NODES, NODES) @ SUMS.T + NOISE**2 * np.eye(R) + 4.0)
    assert_allclose(-update(state, AREAS, y)[1], evidence, rtol=1e-6)


# What surrounds a fit.


@pytest.mark.thorough
def test_functionals_are_data_of_fit_in_minibatches():
    svi, result = fitted()
    rows = Stack([POINTS, AREAS])[:]
    fit = sgp.fit(svi, jax.random.key(0), (rows, np.tile(y, 2)), batch_size=3, num_steps=4, progress_bar=False)
    assert np.isfinite(fit.losses).all()
    # The mean over batches of a bound is the bound.
    at = jax.jit(lambda X, y: loss_at(result.params, area_model, svi.guide, X, y))
    losses = [at(AREAS[np.array([i])], y[[i]]) for i in range(R)]
    assert_allclose(np.mean(losses), result.losses[-1], rtol=1e-7)


@pytest.mark.parametrize(
    "functional",
    [AREAS, Difference(POINTS, OTHERS), Derivative(POINTS, DIRECTION), Stack([POINTS, AREAS])[:7]],
    ids=lambda f: type(f).__name__,
)
def test_functionals_are_arguments_of_jit_and_can_be_pickled(functional):
    again = pickle.loads(pickle.dumps(functional))
    assert jax.tree.structure(again) == jax.tree.structure(functional)
    found, some = jax.jit(lambda rows, index: (rows.apply(first_sine), rows[index].apply(first_sine)))(
        again, np.array([2, 0])
    )
    wanted = functional.apply(first_sine)
    assert_allclose(found, wanted, atol=1e-14)
    assert_allclose(some, wanted[np.array([2, 0])], atol=1e-14)
    assert functional[::2].shape == (len(wanted[::2]), D)


@pytest.mark.thorough
def test_diagnostics_take_functionals():
    svi, result = fitted()
    loo = sgp.diagnostics.loo_cavity(jax.random.key(1), svi, result, AREAS, y)
    K = SUMS @ dense(NODES, NODES) @ SUMS.T + NOISE**2 * np.eye(R)
    precision = np.linalg.inv(K)
    variance = 1 / np.diag(precision)
    residual = precision @ (y - MEAN) * variance
    wanted = -0.5 * (residual**2 / variance + np.log(2 * np.pi * variance))
    assert_allclose(loo.elpd, wanted.sum(), rtol=1e-5)
    draws = sgp.to_arviz(jax.random.key(1), svi, result, AREAS, y, num_samples=6)
    assert draws["posterior"]["f"].shape == (1, 6, R)


def test_inducing_inputs_are_chosen_from_nodes():
    guide = sgp.AutoSVGP(area_model, lambda kernel, X, rng_key: X[::4])
    assert_array_equal(initial_parameters(area_model, guide, AREAS, y)["f_auto_inducing"].Z, NODES[::4])
    assert_array_equal(sgp.greedy_variance(SE, AREAS, num_inducing=3), sgp.greedy_variance(SE, NODES, num_inducing=3))
    Kuu, Kuf = oracles.with_jitter(dense(NODES[:4], NODES[:4]), 1e-6), dense(NODES[:4], NODES) @ SUMS.T
    kff = np.diag(SUMS @ dense(NODES, NODES) @ SUMS.T)
    wanted = np.sum(kff - np.sum(Kuf * np.linalg.solve(Kuu, Kuf), axis=0))
    assert_allclose(sgp.trace_error(SE, AREAS, NODES[:4]).total, wanted, rtol=1e-9)


def test_inducing_variables_of_their_own_lengthscales_take_functionals():
    inducing = sgp.MultiscaleInducing(NODES[:4], np.full((4, D), 0.2))
    assert_allclose(inducing.Kuf(SE, AREAS), inducing.Kuf(SE, NODES) @ SUMS.T, atol=1e-12)


@pytest.mark.thorough
def test_features_take_functionals():
    kernel = sgp.features.HilbertSpace(SE, (6, 6), (-6.0, 6.0))
    guide = sgp.AutoWeightSpaceGP(
        model := lambda X, y=None: numpyro.sample(
            "y", dist.Normal(numpyro.sample("f", sgp.GaussianProcess(kernel, X)), NOISE), obs=y
        )
    )
    params = arbitrary_parameters(model, guide, AREAS, y)
    q = guide.posterior(jax.random.key(0), params, AREAS)["f"]
    assert_allclose(q.mean, SUMS @ guide.posterior(jax.random.key(0), params, NODES)["f"].mean, atol=1e-10)


def test_close_pairs_among_others_are_no_contradiction_in_float32():
    with jax.enable_x64(False):
        rng = np.random.default_rng(0)
        A, gaps, Z = (rng.uniform(0.0, 3.0, (size, 1)).astype(np.float32) for size in (200, 200, 30))
        pairs = Difference(A, A + gaps * np.float32(10.0) ** -rng.uniform(0.0, 4.0, (200, 1)).astype(np.float32))
        site = sgp.SparseGPRegression(SquaredExponential(1.0), pairs, Z, 0.1)
        assert np.isfinite(site.condition(A[:, 0]).posterior(pairs).variance).all()
        far = np.float32(1000.0) + A
        assert (Linear()(Difference(far, far + np.float32(1e-3))) >= 0.0).all()
        assert AREAS.dtype == np.float32


# Errors.


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: WeightedSum(POINTS, WEIGHTS), r"`X` must have shape \(R, Q, D\)"),
        (lambda: WeightedSum(X, WEIGHTS[:, :2]), r"`weights` must have shape \(R, Q\) = \(5, 3\)"),
        (lambda: Difference(POINTS, OTHERS[:3]), "the same shape"),
        (lambda: Derivative(POINTS, 2), "one of the D = 2 columns"),
        (lambda: Derivative(POINTS, np.ones(3)), r"`direction` must have shape"),
        (lambda: Integral(UPPER, LOWER), "above `upper` in 5 rows"),
        (lambda: Integral(LOWER, UPPER[:, :1]), "the same shape"),
        (lambda: Integral(LOWER, UPPER, 0), "`num_nodes`"),
        (lambda: Stack([POINTS, POINTS[:, :1]]), "the same number of columns"),
        (lambda: Stack([]), "Give at least one"),
        (lambda: sgp.GaussianProcess(SE, WeightedSum(np.full_like(X, np.nan), WEIGHTS)), "contains NaN"),
        (lambda: SE(AREAS, POINTS[:, :1]), "the same number of columns"),
        (lambda: AREAS[0], "indexed by rows"),
        (lambda: Stack([POINTS, AREAS])[0, 1], "indexed by rows"),
        (lambda: Stack([POINTS, AREAS])[0], "indexed by rows"),
        (lambda: Stack([POINTS, AREAS])[:][0, 1], "indexed by rows"),
    ],
)
def test_mistakes_raise(make, match):
    with pytest.raises((ValueError, IndexError), match=match):
        make()


@pytest.mark.parametrize(
    ("kernel", "part"),
    [(Matern12(1.0), "Matern12"), (SE + White(0.1), "White"), (SE * Warp(Matern12(1.0), jnp.tanh), "Matern12")],
)
def test_what_has_no_derivative_raises(kernel, part):
    with pytest.raises(TypeError, match=f"{part} has none"):
        sgp.GaussianProcess(kernel, Derivative(POINTS, 0))
    for evaluate in (lambda d: kernel(d, POINTS), lambda d: kernel(d, d), lambda d: kernel(Stack([POINTS, d]), d)):
        with pytest.raises(TypeError, match=f"{part} has none"):
            jax.eval_shape(evaluate, Derivative(POINTS, 0))


def test_a_rough_column_beside_the_derivative_is_no_mistake():
    kernel = Select(Matern12(1.0), [1]) * Select(SquaredExponential(1.0), 0)
    assert_allclose(kernel(Derivative(POINTS, 0)), 1.0, atol=1e-12)
    with pytest.raises(TypeError, match="Matern12 has none"):
        kernel(Derivative(POINTS, 1))


def test_what_needs_inputs_says_so():
    with pytest.raises(TypeError, match="where an array of inputs is needed"):
        jnp.asarray(AREAS)
    with pytest.raises(TypeError, match="is a function of X"):
        sgp.SparseGPRegression(SE, AREAS, NODES, lambda X: X[:, 0])
    guide = sgp.AutoSVGP(area_model, lambda *args: sgp.growing(*args, capacity=4))
    with pytest.raises(TypeError, match="Growing inducing inputs are rows"):
        initial_parameters(area_model, guide, AREAS, y)
    qsgp = sgp.AutoQSGP(
        model := lambda X, y=None: numpyro.sample(
            "y", dist.Normal(numpyro.sample("f", sgp.GaussianProcess(Linear(), X)), NOISE), obs=y
        ),
        basis_batch=2,
    )
    with pytest.raises(TypeError, match="`AutoQSGP` takes inputs"):
        initial_parameters(model, qsgp, AREAS, y)
