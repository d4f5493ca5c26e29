"""Tied sites whose inducing inputs are trained: they refer to a reference, and move with the inducing inputs."""

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
from numpyro_sgp.inducing import InducingPoints
from numpyro_sgp.kernels import SquaredExponential
from numpyro_sgp.math.linalg import with_jitter
from numpyro_sgp.posteriors.dual.formulas import dual_per_datum
from numpyro_sgp.posteriors.dual.tied import shared_covariance, tied
from numpyro_sgp.posteriors.moments import project
from numpyro_sgp.posteriors.sites import TiedSites

N, M, JITTER = 40, 6, 1e-6
KERNEL = SquaredExponential(0.7, 1.3)

pytestmark = pytest.mark.usefixtures("x64")


def data():
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-2.0, 2.0, N))[:, None]
    return X, (np.sin(3.0 * X[:, 0]) + 0.5 * rng.normal(size=N) > 0.0).astype(float)


def random_sites():
    rng = np.random.default_rng(1)
    root = rng.normal(size=(M, M))
    return jnp.asarray(rng.normal(size=M)), jnp.asarray(root @ root.T)


def moments_at(Z, reference, lambda1, Lambda2, X):
    u = InducingPoints(Z)
    Kuv = None if reference is None else shared_covariance(u, InducingPoints(reference), KERNEL, JITTER)
    q = tied(lambda1, Lambda2, with_jitter(u.Kuu(KERNEL), JITTER), u.Kuf(KERNEL, X), KERNEL(X), Kuv)
    return q.moments, q.projected_sites()


def test_sites_moved_to_the_current_inducing_inputs_are_the_same_posterior():
    X, _ = data()
    reference = jnp.linspace(-2.0, 2.0, M)[:, None]
    Z = reference + 0.1
    q, moved = moments_at(Z, reference, *random_sites(), X)
    again, _ = moments_at(Z, Z, *moved, X)
    for before, after in zip(q[:3], again[:3], strict=True):
        assert_allclose(after, before, rtol=1e-7, atol=1e-9)


def test_an_anchor_at_the_inducing_inputs_changes_nothing():
    X, _ = data()
    Z = jnp.linspace(-2.0, 2.0, M)[:, None]
    lambda1, Lambda2 = random_sites()
    q, moved = moments_at(Z, Z, lambda1, Lambda2, X)
    plain, _ = moments_at(Z, None, lambda1, Lambda2, X)
    for before, after in zip(plain[:3], q[:3], strict=True):
        assert_allclose(after, before, rtol=1e-9)
    assert_allclose(moved[0], lambda1, rtol=1e-8)
    assert_allclose(moved[1], Lambda2, rtol=1e-8, atol=1e-8)


def test_transported_sums_are_per_datum_sites_seen_through_the_reference():
    # Sites at the rows of X, summed at the reference, are sites of the process at the reference: where the reference determines
    # f(X) (as many reference inputs as data) moving Z away from it loses nothing.
    X = jnp.asarray(data()[0][:: N // M][:M])
    Z = X + 0.05
    rng = np.random.default_rng(2)
    g, beta = jnp.asarray(rng.normal(size=M)), jnp.asarray(rng.uniform(0.5, 2.0, M))
    q, _ = moments_at(Z, X, g, jnp.diag(beta), X)
    _, _, A, kff = project(InducingPoints(Z), KERNEL, X, JITTER)
    expected = dual_per_datum(g, beta, A, A, kff)
    assert_allclose(q.mean, expected.mean, rtol=1e-4, atol=1e-6)  # the jitter is 1e-6 of the prior's variance
    assert_allclose(q.variance, expected.variance, rtol=1e-4)


def model(X, y):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def bounds(guide, steps=40):
    X, y = data()
    svi = SVI(model, guide, sgp.NaturalGradient(0.7, optax.adam(0.05), e_steps=2), sgp.QuadratureELBO())
    state, losses = svi.init(jax.random.key(0), X, y), []
    update = jax.jit(svi.update)
    for _ in range(steps):
        state, loss = update(state, X, y)
        losses.append(float(loss))
    assert update._cache_size() == 1
    return -np.array(losses), svi.get_params(state)


@pytest.mark.thorough
def test_tied_sites_follow_per_datum_sites_while_inducing_inputs_move():
    Z = np.linspace(-0.5, 0.5, M)[:, None]  # a bad start: the inputs have to travel
    sums, params = bounds(sgp.AutoTSVGP(model, Z, learn_inducing=True))
    exact, _ = bounds(sgp.AutoTSVGP(model, Z, sites="per_datum", learn_inducing=True))
    assert np.abs(params["f_auto_inducing"].Z - Z).max() > 0.2
    assert isinstance(params["f_auto_sites"], TiedSites)
    assert exact[-1] > exact[0] + 1.0
    assert np.abs(sums - exact)[1:].max() < 0.1
