"""`AutoMarkovGP` with `space`: functions of time and place beside dense algebra and inducing inputs at all their pairs."""

from functools import partial

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
from numpyro_sgp.kernels import Constant, Matern12, Matern32, Matern52, Select, SquaredExponential
from numpyro_sgp.posteriors.markov.separable import separated
from numpyro_sgp.posteriors.markov.space_formulas import SpaceTimeTerm, prior_covariance, smoothed_in_blocks
from numpyro_sgp.posteriors.markov.state_space import state_space_of

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("x64")]

RNG = np.random.default_rng(0)
# Rows off any grid, in any order, some at one time, one of them twice.
TIMES = np.r_[RNG.uniform(0.0, 4.0, 11), [1.5, 1.5, 1.5], [2.5, 2.5]]
N = len(TIMES)
X = np.c_[TIMES, RNG.uniform(0.0, 2.0, (N, 2))]
X[-1] = X[-2]
X = RNG.permutation(X)
Z = RNG.uniform(0.0, 2.0, (4, 2))
PAIRS = np.array([[t, *z] for t in np.unique(TIMES) for z in Z])
COVARIATE = RNG.normal(size=N)
COUNTS = RNG.poisson(np.exp(0.4 + np.sin(X[:, 0]) * np.cos(X[:, 1]))).astype(float)
NEW = np.c_[[-1.0, 1.5, 2.2, 9.0, 2.2], RNG.uniform(0.0, 2.0, (5, 2))]
NEW[1, 1:] = Z[2]


def kernel_of(lengthscale=0.8, across=1.1):
    return Select(SquaredExponential(across), [1, 2]) * Select(Matern32(lengthscale, 1.3) + Constant(0.4), [0])


def gram(kernel, one, other=None):
    return np.asarray(kernel(jnp.asarray(one), jnp.asarray(one if other is None else other)))


def normal(X, y=None, kernel=None):
    kernel = kernel_of() if kernel is None else kernel
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, mean=0.3, jitter=0.0))
    numpyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)


def counts(X, y=None):
    lengthscale = numpyro.param("lengthscale", 0.8, constraint=dist.constraints.positive)
    across = numpyro.param("across", 1.1, constraint=dist.constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel_of(lengthscale, across), X, mean=0.3, jitter=0.0))
    with numpyro.plate("row", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def trained(guide, model, *args, num_steps=5, step_size=0.7, bound="tight", **kwargs):
    """Its hyperparameters stay where they start."""
    loss = sgp.QuadratureELBO(20, bound=bound)
    svi = SVI(model, guide, sgp.NaturalGradient(step_size, optax.sgd(0.0)), loss)
    result = svi.run(jax.random.key(0), num_steps, *args, progress_bar=False, **kwargs)
    assert sgp.num_refused(result.state) == 0
    return svi, result


def test_smoothing_of_blocks_is_the_dense_posterior_whatever_their_size():
    times = np.sort(TIMES)
    a, across = RNG.normal(size=(3, N)), RNG.normal(size=(1, N))
    kernels = Matern52(0.7, 1.3) + Constant(0.5), Matern12(2.0)
    terms = [
        SpaceTimeTerm(state_space_of(kernel, jnp.float64, 1), jnp.asarray(each))
        for kernel, each in zip(kernels, (a, across), strict=True)
    ]
    K = sum(
        gram(kernel, times[:, None]) * (each.T @ each) for kernel, each in zip(kernels, (a, across), strict=True)
    )
    assert_allclose(prior_covariance(terms, jnp.asarray(times)), K, atol=1e-13)
    w, linear = RNG.uniform(0.0, 5.0, N), RNG.normal(size=(2, N))
    w[[3, 7]] = 0.0
    S = K @ np.linalg.inv(np.eye(N) + w[:, None] * K)
    log_z = 0.5 * np.sum(linear * (linear @ S), axis=1) - 0.5 * np.linalg.slogdet(np.eye(N) + w[:, None] * K)[1]
    interval = jnp.asarray(np.diff(times, prepend=-7.0))  # that of the first row is not used
    for block in (1, 5, 32):
        q = jax.jit(partial(smoothed_in_blocks, block=block))(terms, interval, jnp.asarray(linear), jnp.asarray(w))
        assert_allclose(q.mean, linear @ S, atol=1e-12)
        assert_allclose(q.variance[0], np.diag(S), atol=1e-12)
        assert_allclose(q.log_normaliser, log_z, atol=1e-12)


@pytest.mark.parametrize("bound", ["tight", "titsias"])
def test_one_step_is_the_sparse_posterior_with_inducing_values_at_all_pairs(bound):
    y, noise = RNG.normal(size=N), 0.25
    guide = sgp.AutoMarkovGP(normal, space=Z)
    _, result = trained(guide, normal, X, y, num_steps=2, step_size=1.0, bound=bound)
    kernel = kernel_of()
    Kuu, Kuf, Kff = gram(kernel, PAIRS), gram(kernel, PAIRS, X), gram(kernel, X)
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    S, left, rest = Q + noise * np.eye(N), y - 0.3, np.diag(Kff - Q)
    evidence = -0.5 * (left @ np.linalg.solve(S, left) + np.linalg.slogdet(2.0 * np.pi * S)[1])
    loss = 0.5 * np.sum(rest / noise if bound == "titsias" else np.log1p(rest / noise))
    assert_allclose(-result.losses[-1], evidence - loss, rtol=1e-9)
    for rows in (X, NEW):
        q = guide.posterior(jax.random.key(1), result.params, rows)["f"]
        Kuy, Kyy = gram(kernel, PAIRS, rows), gram(kernel, rows)
        cross = Kuy.T @ np.linalg.solve(Kuu, Kuf)
        mean, covariance = 0.3 + cross @ np.linalg.solve(S, left), Kyy - cross @ np.linalg.solve(S, cross.T)
        assert_allclose(q.mean, mean, atol=1e-9)
        assert_allclose(q.variance, np.diag(covariance), atol=1e-9)
        assert_allclose(q.covariance(), covariance, atol=1e-9)


def test_with_all_places_it_is_the_exact_posterior():
    y, places = RNG.normal(size=N), np.unique(X[:, 1:], axis=0)
    guide = sgp.AutoMarkovGP(normal, space=places)
    kernel = Select(Matern32(0.9), [1, 2]) * Select(Matern52(0.8, 1.3), [0])
    _, result = trained(guide, normal, X, y, num_steps=2, step_size=1.0, kernel=kernel)
    K = gram(kernel, X)
    S, left = K + 0.25 * np.eye(N), y - 0.3
    evidence = -0.5 * (left @ np.linalg.solve(S, left) + np.linalg.slogdet(2.0 * np.pi * S)[1])
    assert_allclose(-result.losses[-1], evidence, rtol=1e-9)
    q = guide.posterior(jax.random.key(1), result.params, X, kernel=kernel)["f"]
    assert_allclose(q.mean, 0.3 + K @ np.linalg.solve(S, left), atol=1e-9)
    assert_allclose(q.covariance(), K - K @ np.linalg.solve(S, K), atol=1e-9)


@pytest.fixture(scope="module")
def runs():
    with jax.enable_x64(True):
        guides = sgp.AutoMarkovGP(counts, space=Z), sgp.AutoTSVGP(counts, PAIRS)
        return [(guide, *trained(guide, counts, X, COUNTS)) for guide in guides]


def test_counts_have_the_posterior_of_inducing_inputs_at_all_pairs(runs):
    (guide, _, own), (dense, _, other) = runs
    assert_allclose(own.losses, other.losses, rtol=1e-9)
    q, exact = guide.posterior(jax.random.key(1), own.params, NEW)["f"], dense.posterior(jax.random.key(1), other.params, NEW)["f"]
    assert_allclose(q.mean, exact.mean, atol=1e-8)
    assert_allclose(q.variance, exact.variance, atol=1e-8)
    assert_allclose(q.covariance(), exact.covariance(), atol=1e-8)


def test_hyperparameters_have_the_gradient_of_the_dense_bound(runs):
    found = []
    for _, svi, result in runs:

        def loss(values, svi=svi, params=result.params):
            params = {**params, "lengthscale": values[0], "across": values[1]}
            return svi.loss.loss(jax.random.key(0), params, svi.model, svi.guide, X, COUNTS)

        found.append(jax.jit(jax.value_and_grad(loss))(jnp.asarray([0.8, 1.1])))
    (value, gradient), (exact, exact_gradient) = found
    assert_allclose(value, exact, rtol=1e-9)
    assert_allclose(gradient, exact_gradient, rtol=1e-8)
