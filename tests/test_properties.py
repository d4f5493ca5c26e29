"""Properties that hold for any shape, dtype and hyperparameters, on examples drawn by hypothesis."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import oracles

from numpyro_sgp.conditionals import natural_whitened, project
from numpyro_sgp.inducing import InducingPoints
from numpyro_sgp.kernels import Matern32, Matern52, SquaredExponential

KERNELS = {"se": SquaredExponential, "matern32": Matern32, "matern52": Matern52}
bounded = settings(max_examples=12, deadline=None, derandomize=True)
problems = given(
    seed=st.integers(0, 10**6),
    N=st.sampled_from([1, 5]),
    M=st.sampled_from([1, 4]),
    D=st.sampled_from([1, 3]),
    dtype=st.sampled_from([np.float32, np.float64]),
    lengthscale=st.floats(1e-2, 1e2),
    variance=st.floats(1e-3, 1e3),
)


def drawn(seed, N, M, D, dtype, lengthscale, variance):
    rng = np.random.default_rng(seed)
    X, Z = (rng.uniform(-1.0, 1.0, size=(rows, D)).astype(dtype) for rows in (N, M))
    root = rng.normal(size=(M, M))
    return X, Z, rng.normal(size=M).astype(dtype), (root @ root.T).astype(dtype), dtype(lengthscale), dtype(variance)


@problems
@bounded
def test_kernels_are_positive_semi_definite_and_agree_with_their_diagonal(seed, N, M, D, dtype, lengthscale, variance):
    with jax.enable_x64(dtype is np.float64):
        X, _, _, _, lengthscale, variance = drawn(seed, N, M, D, dtype, lengthscale, variance)
        for kernel in KERNELS.values():
            k = kernel(lengthscale, variance)
            K = np.float64(k(X, X))
            tolerance = 100 * np.finfo(dtype).eps * float(variance)
            assert_allclose(np.diag(K), k(X), rtol=0.0, atol=tolerance)
            assert np.linalg.eigvalsh(K).min() > -tolerance


@problems
@bounded
def test_natural_moments_agree_with_dense_algebra_with_positive_variances_and_divergence(
    seed, N, M, D, dtype, lengthscale, variance
):
    with jax.enable_x64(dtype is np.float64):
        X, Z, lambda1, Lambda2, lengthscale, variance = drawn(seed, N, M, D, dtype, lengthscale, variance)
        kernel = SquaredExponential(lengthscale, variance)
        blocks = project(InducingPoints(jnp.asarray(Z)), kernel, jnp.asarray(X), 1e-3)
        q = natural_whitened(jnp.asarray(lambda1), jnp.asarray(Lambda2), blocks.A, blocks.kff)
        order = np.random.default_rng(seed).permutation(N)
        permuted = natural_whitened(jnp.asarray(lambda1), jnp.asarray(Lambda2), blocks.A[:, order], blocks.kff[order])
    assert (np.asarray(q.variance) > 0.0).all()
    tolerance = 1e-3 if dtype is np.float32 else 1e-10
    assert q.kl > -tolerance
    X, Z, theta = np.float64(X), np.float64(Z), (np.float64(lengthscale), np.float64(variance))
    Kuu = oracles.with_jitter(oracles.se(Z, Z, *theta), 1e-3)
    P = np.linalg.inv(np.eye(M) + np.float64(Lambda2))
    L = np.linalg.cholesky(Kuu)
    m, S = L @ P @ np.float64(lambda1), L @ P @ L.T
    mean, covariance = oracles.conditional(m, S, Kuu, oracles.se(Z, X, *theta), oracles.se(X, X, *theta))
    # In units of the prior and of the whitened mean.
    size = 1.0 + np.linalg.norm(P @ np.float64(lambda1))
    assert_allclose(q.mean, mean, rtol=0.0, atol=tolerance * size * np.sqrt(theta[1]))
    assert_allclose(q.variance, np.diag(covariance), rtol=0.0, atol=tolerance * theta[1])
    assert_allclose(permuted.mean, np.asarray(q.mean)[order], rtol=0.0, atol=tolerance * size * np.sqrt(theta[1]))
    assert_allclose(permuted.variance, np.asarray(q.variance)[order], rtol=0.0, atol=tolerance * theta[1])
