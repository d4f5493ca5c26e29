"""Properties that hold for any shape, dtype and hyperparameters, on examples drawn by hypothesis."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
from numpy.testing import assert_allclose
import oracles
import pytest

from numpyro_sgp.inducing import InducingPoints
from numpyro_sgp.kernels import Matern32, Matern52, SquaredExponential
from numpyro_sgp.math.linalg import with_jitter
from numpyro_sgp.math.marginal_likelihood import collapsed_bound
from numpyro_sgp.posteriors.dual.formulas import natural_whitened
from numpyro_sgp.posteriors.dual.tied import tied
from numpyro_sgp.posteriors.moments import project

JITTER = 1e-3
# Few shapes, each compiled once for each dtype: N, M, D and the latents of a batch.
SHAPES = [(1, 4, 1, ()), (6, 1, 2, ()), (7, 4, 5, (2,))]
any_problem = given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([np.float32, np.float64]),
    lengthscale=st.floats(1e-2, 1e2),
    variance=st.floats(1e-3, 1e3),
)
bounded = settings(max_examples=40, deadline=None, derandomize=True)


@jax.jit
def evaluate(X, Z, lambda1, Lambda2, lengthscale, variance, y, noise_variance, rows, points):
    kernel = SquaredExponential(lengthscale, variance)
    blocks = project(InducingPoints(Z), kernel, X, JITTER)

    def through(Z, X, lambda1, Lambda2):
        u = InducingPoints(Z)
        return tied(lambda1, Lambda2, with_jitter(u.Kuu(kernel), JITTER), u.Kuf(kernel, X), kernel(X))

    shuffled = Lambda2[..., points, :][..., :, points]
    return {
        "kernels": [(k(X, X), k(X)) for k in (kernel, *(k(lengthscale, variance) for k in (Matern32, Matern52)))],
        "natural": natural_whitened(lambda1, Lambda2, blocks.A, blocks.kff),
        "tied": through(Z, X, lambda1, Lambda2).moments,
        "rows moved": through(Z, X[rows], lambda1, Lambda2).moments,
        "Z moved": through(Z[points], X, lambda1[..., points], shuffled).moments,
        "bound": collapsed_bound(
            with_jitter(InducingPoints(Z).Kuu(kernel), JITTER), blocks.Kuf, blocks.kff, y, noise_variance, "tight"
        ),
    }


def solved(seed, shape, dtype, lengthscale, variance):
    """A random problem, float64 and with Z, X as the dtype has them, and everything about it that the package says."""
    N, M, D, batch = shape
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(*batch, M, M))
    # Sites of the size that data with a tenth of the prior's standard deviation as noise give.
    lambda1 = rng.normal(size=(*batch, M)) / np.sqrt(variance)
    problem = {
        "X": rng.uniform(-1.0, 1.0, size=(N, D)),
        "Z": rng.uniform(-1.0, 1.0, size=(M, D)),
        "lambda1": lambda1,
        "Lambda2": root @ np.swapaxes(root, -1, -2) / variance,
        "lengthscale": np.asarray(lengthscale),
        "variance": np.asarray(variance),
        "y": np.sqrt(variance) * rng.normal(size=N),
        "noise_variance": np.full(N, 0.3 * variance),
    }
    problem = {name: value.astype(dtype) for name, value in problem.items()}
    rows, points = rng.permutation(N), rng.permutation(M)
    with jax.enable_x64(dtype is np.float64):
        found = jax.tree.map(np.float64, evaluate(**problem, rows=rows, points=points))
    return {name: value.astype(float) for name, value in problem.items()}, found, rows


def tolerances(dtype, problem):
    """Absolute ones for means and for variances: rounding through Kuu, of which the jitter bounds the condition."""
    relative = 1e-3 if dtype is np.float32 else 1e-9
    size = 1.0 + np.linalg.norm(problem["lambda1"]) * np.sqrt(problem["variance"])
    return relative * size * np.sqrt(problem["variance"]), relative * problem["variance"]


@pytest.mark.thorough
@any_problem
@bounded
def test_kernels_are_positive_semi_definite_and_agree_with_their_diagonal(seed, shape, dtype, lengthscale, variance):
    _, found, _ = solved(seed, shape, dtype, lengthscale, variance)
    tolerance = 100 * np.finfo(dtype).eps * variance
    for K, diagonal in found["kernels"]:
        assert_allclose(np.diag(K), diagonal, rtol=0.0, atol=tolerance)
        assert np.linalg.eigvalsh(K).min() > -tolerance


@any_problem
@bounded
def test_moments_are_those_of_dense_algebra_with_positive_variance_and_divergence(
    seed, shape, dtype, lengthscale, variance
):
    problem, found, _ = solved(seed, shape, dtype, lengthscale, variance)
    X, Z, theta = problem["X"], problem["Z"], (problem["lengthscale"], problem["variance"])
    Kuu, Kuf = oracles.with_jitter(oracles.se(Z, Z, *theta), JITTER), oracles.se(Z, X, *theta)
    L, identity = np.linalg.cholesky(Kuu), np.eye(len(Z))
    for mean_and_more, basis in ((found["natural"], np.linalg.inv(L)), (found["tied"], identity)):
        assert (mean_and_more.variance > 0.0).all()
        mean_error, variance_error = tolerances(dtype, problem)
        for latent in np.ndindex(problem["lambda1"].shape[:-1]):
            m, S = oracles.from_sites(problem["lambda1"][latent], problem["Lambda2"][latent], Kuu, basis)
            mean, covariance = oracles.conditional(m, S, Kuu, Kuf, oracles.se(X, X, *theta))
            assert_allclose(mean_and_more.mean[latent], mean, rtol=0.0, atol=mean_error)
            assert_allclose(mean_and_more.variance[latent], np.diag(covariance), rtol=0.0, atol=variance_error)
            kl = oracles.gaussian_kl(m, S, Kuu)
            assert_allclose(mean_and_more.kl[latent], kl, rtol=1e-3 if dtype is np.float32 else 1e-8, atol=1e-4)
            assert mean_and_more.kl[latent] > -1e-4


@any_problem
@bounded
def test_the_order_of_rows_and_of_inducing_inputs_does_not_matter(seed, shape, dtype, lengthscale, variance):
    problem, found, rows = solved(seed, shape, dtype, lengthscale, variance)
    mean_error, variance_error = tolerances(dtype, problem)
    for name, order in (("rows moved", rows), ("Z moved", np.arange(len(rows)))):
        assert_allclose(found[name].mean, found["tied"].mean[..., order], rtol=0.0, atol=mean_error)
        assert_allclose(found[name].variance, found["tied"].variance[..., order], rtol=0.0, atol=variance_error)
        assert_allclose(found[name].kl, found["tied"].kl, rtol=1e-3 if dtype is np.float32 else 1e-8, atol=1e-4)


@any_problem
@bounded
def test_the_collapsed_bound_is_below_the_evidence(seed, shape, dtype, lengthscale, variance):
    problem, found, _ = solved(seed, shape, dtype, lengthscale, variance)
    K = oracles.se(problem["X"], problem["X"], problem["lengthscale"], problem["variance"])
    evidence = oracles.gaussian_log_density(problem["y"], 0.0 * problem["y"], K + np.diag(problem["noise_variance"]))
    tolerance = (1e-3 if dtype is np.float32 else 1e-8) * (1.0 + abs(evidence))
    assert found["bound"] < evidence + tolerance
