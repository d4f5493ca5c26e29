"""Every parametrisation against dense Gaussians: marginals, divergence, and the covariance that its roots give."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import oracles
import pytest

from numpyro_sgp.math.linalg import solve_lower, solve_lower_transposed, triangular_inverse
from numpyro_sgp.posteriors.dual import formulas as dual_formulas
from numpyro_sgp.posteriors.whitened import formulas as whitened_formulas

pytestmark = pytest.mark.usefixtures("x64")

N, M, D, JITTER = 7, 5, 2, 1e-6
RNG = np.random.default_rng(0)
X, Z, X_SITES = RNG.normal(size=(N, D)), RNG.normal(size=(M, D)), RNG.normal(size=(9, D))
LENGTHSCALE, VARIANCE = np.array([0.9, 1.3]), 1.7

KUU = oracles.with_jitter(oracles.se(Z, Z, LENGTHSCALE, VARIANCE), JITTER)
KUF, KFF = oracles.se(Z, X, LENGTHSCALE, VARIANCE), oracles.se(X, X, LENGTHSCALE, VARIANCE)
KUS = oracles.se(Z, X_SITES, LENGTHSCALE, VARIANCE)
L = np.linalg.cholesky(KUU)
A, A_SITES = np.linalg.solve(L, KUF), np.linalg.solve(L, KUS)
KFF_DIAGONAL = np.diag(KFF)

M_VECTOR = RNG.normal(size=M)
ROOT = np.tril(RNG.normal(size=(M, M)))
LAMBDA1 = RNG.normal(size=M)
LAMBDA2 = ROOT @ ROOT.T
SITE1, SITE2 = RNG.normal(size=9), RNG.uniform(0.1, 3.0, size=9)


def from_precision(linear, precision):
    """Mean and covariance of u under N(0, Kuu) times exp(linear·u − ½ u·precision·u)."""
    S = np.linalg.inv(np.linalg.inv(KUU) + precision)
    return S @ linear, S


def cases():
    K_inverse, L_inverse = np.linalg.inv(KUU), np.linalg.inv(L)
    return {
        "whitened": (
            whitened_formulas.whitened,
            (M_VECTOR, ROOT, A, KFF_DIAGONAL),
            (L @ M_VECTOR, L @ ROOT @ ROOT.T @ L.T),
        ),
        "unwhitened": (whitened_formulas.unwhitened, (M_VECTOR, ROOT, L, A, KFF_DIAGONAL), (M_VECTOR, ROOT @ ROOT.T)),
        "natural_whitened": (
            dual_formulas.natural_whitened,
            (LAMBDA1, LAMBDA2, A, KFF_DIAGONAL),
            from_precision(L_inverse.T @ LAMBDA1, L_inverse.T @ LAMBDA2 @ L_inverse),
        ),
        "dual_per_datum": (
            dual_formulas.dual_per_datum,
            (SITE1, SITE2, A_SITES, A, KFF_DIAGONAL),
            from_precision(K_inverse @ KUS @ SITE1, K_inverse @ (KUS * SITE2) @ KUS.T @ K_inverse),
        ),
    }


every_case = pytest.mark.parametrize(("function", "arguments", "q_u"), cases().values(), ids=cases())


@every_case
def test_marginals_and_divergence_are_those_of_the_dense_gaussian(function, arguments, q_u):
    q = function(*map(jnp.asarray, arguments))
    mean, covariance = oracles.conditional(*q_u, KUU, KUF, KFF)
    assert_allclose(q.mean, mean, rtol=1e-8, atol=1e-9)
    assert_allclose(q.variance, np.diag(covariance), rtol=1e-8, atol=1e-9)
    assert_allclose(q.kl, oracles.gaussian_kl(*q_u, KUU), rtol=1e-8)
    roots = KFF - q.covariance.A.T @ q.covariance.A + q.covariance.T.T @ q.covariance.T
    assert_allclose(roots, covariance, rtol=1e-7, atol=1e-8)


@every_case
def test_a_batch_of_posteriors_shares_the_blocks_of_the_prior(function, arguments, q_u):
    first = [jnp.stack([x, 0.5 * x, 0.25 * x]) for x in map(jnp.asarray, arguments[:2])]
    batch = function(*first, *map(jnp.asarray, arguments[2:]))
    for index, factor in enumerate((1.0, 0.5, 0.25)):
        single = function(*(factor * jnp.asarray(x) for x in arguments[:2]), *map(jnp.asarray, arguments[2:]))
        for ours, one in zip(batch[:3], single[:3], strict=True):
            assert_allclose(ours[index], one, rtol=1e-10, atol=1e-12)


@every_case
def test_a_batch_of_priors_gives_one_posterior_after_another(function, arguments, q_u):
    # Any numbers with |A_i|² below k_ii will do, scaled together.
    factors = (1.0, 0.5, 0.25)
    batch = function(*(jnp.stack([factor * x for factor in factors]) for x in map(jnp.asarray, arguments)))
    for index, factor in enumerate(factors):
        single = function(*(factor * jnp.asarray(x) for x in arguments))
        for ours, one in zip(jax.tree.leaves(batch), jax.tree.leaves(single), strict=True):
            assert_allclose(ours[index], one, rtol=1e-10, atol=1e-12)


@every_case
@pytest.mark.usefixtures("strict_promotion")
def test_float32_stays_float32_without_implicit_promotion(function, arguments, q_u):
    q = function(*(jnp.asarray(x, np.float32) for x in arguments))
    assert {value.dtype for value in jax.tree.leaves(q)} == {np.dtype(np.float32)}
    mean, covariance = oracles.conditional(*q_u, KUU, KUF, KFF)
    # Rounding of 6e-8 through Kuu of condition 1e2 and sites of precision 1e2.
    assert_allclose(q.mean, mean, atol=1e-3)
    assert_allclose(q.variance, np.diag(covariance), atol=1e-3)


def test_the_divergence_from_the_prior_is_zero_at_the_prior():
    zero, zeros = jnp.zeros(M), jnp.zeros((M, M))
    at_prior = {
        "whitened": whitened_formulas.whitened(zero, jnp.eye(M), jnp.asarray(A), jnp.asarray(KFF_DIAGONAL)),
        "unwhitened": whitened_formulas.unwhitened(zero, *map(jnp.asarray, (L, L, A, KFF_DIAGONAL))),
        "natural": dual_formulas.natural_whitened(zero, zeros, jnp.asarray(A), jnp.asarray(KFF_DIAGONAL)),
    }
    for name, q in at_prior.items():
        assert_allclose(q.kl, 0.0, atol=1e-9, err_msg=name)
        assert_allclose(q.mean, 0.0, atol=1e-12, err_msg=name)
        assert_allclose(q.variance, KFF_DIAGONAL, rtol=1e-9, err_msg=name)


def test_the_dense_posterior_is_that_of_gaussian_sites_at_every_datum():
    K, Ks = oracles.se(X_SITES, X_SITES, LENGTHSCALE, VARIANCE), oracles.se(X_SITES, X, LENGTHSCALE, VARIANCE)
    q = dual_formulas.dual_dense(*map(jnp.asarray, (SITE1, SITE2, K, Ks, KFF_DIAGONAL)))
    # Sites are the likelihood of pseudo-observations with noise 1/λ₂: plain GP regression.
    C = K + np.diag(1.0 / SITE2)
    mean = Ks.T @ np.linalg.solve(C, SITE1 / SITE2)
    covariance = KFF - Ks.T @ np.linalg.solve(C, Ks)
    assert_allclose(q.mean, mean, rtol=1e-9)
    assert_allclose(q.variance, np.diag(covariance), rtol=1e-8)
    assert_allclose(KFF - q.covariance.A.T @ q.covariance.A, covariance, rtol=1e-7, atol=1e-9)
    S = K - K @ np.linalg.solve(C, K)
    noise = 1e-10 * np.eye(9)  # K alone is nearly singular in NumPy's inverse
    assert_allclose(q.kl, oracles.gaussian_kl(S @ SITE1, S + noise, K + noise), rtol=1e-4)


@every_case
def test_gradients_are_those_of_finite_differences(function, arguments, q_u):
    weights = RNG.normal(size=(2, N))

    def scalar(t):
        moved = [jnp.asarray(x) * (1.0 + t * 0.1 * (i + 1)) for i, x in enumerate(arguments)]
        q = function(*moved)
        return jnp.sum(weights[0] * q.mean) + jnp.sum(weights[1] * q.variance) + q.kl

    h = 1e-5
    numerical = (scalar(h) - scalar(-h)) / (2.0 * h)
    assert_allclose(jax.grad(scalar)(0.0), numerical, rtol=1e-6)


@pytest.mark.parametrize("size", [5, 64, 70, 200])
def test_the_blocked_triangular_inverse_inverts(size):
    T = np.tril(np.random.default_rng(size).normal(size=(2, size, size))) / np.sqrt(size) + 2.0 * np.eye(size)
    identity = np.broadcast_to(np.eye(size), T.shape)
    assert_allclose(triangular_inverse(jnp.asarray(T)) @ T, identity, atol=1e-10)


@pytest.mark.parametrize("solve", [solve_lower, solve_lower_transposed])
def test_triangular_solves_broadcast_their_batches(solve):
    rng = np.random.default_rng(3)
    T, B = np.tril(rng.normal(size=(M, M))) + 3.0 * np.eye(M), rng.normal(size=(3, M, N))
    dense = T if solve is solve_lower else T.T
    assert_allclose(solve(jnp.asarray(T), jnp.asarray(B)), np.linalg.solve(dense, B), rtol=1e-10)
    batch = jnp.broadcast_to(jnp.asarray(T), (3, M, M))
    assert_allclose(solve(batch, jnp.asarray(B[0])), np.stack([np.linalg.solve(dense, B[0])] * 3), rtol=1e-10)
    single = T.astype(np.float32), B.astype(np.float32)
    for factor, right in ((single[0], B), (T, single[1])):
        found = solve(jnp.asarray(factor), jnp.asarray(right))
        assert found.dtype == np.float64
        assert_allclose(found, solve(jnp.asarray(factor, float), jnp.asarray(right, float)), rtol=1e-14)
    assert solve(*map(jnp.asarray, single)).dtype == np.float32
