"""`MultiscaleInducing` against inner products of Gaussians, and in the guides that take inducing variables."""

from functools import partial

from guides import GUIDES, arbitrary_parameters, loss_at
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
from numpyro_sgp.kernels import Matern32, SquaredExponential

pytestmark = pytest.mark.usefixtures("x64")

N, M, D = 7, 4, 2
RNG = np.random.default_rng(90)
X, Z, A = RNG.normal(size=(N, D)), RNG.normal(size=(M, D)), 0.8 * RNG.normal(size=(M, D))
LENGTHSCALE, VARIANCE = np.array([0.7, 1.4]), 1.7
KERNEL = SquaredExponential(LENGTHSCALE, VARIANCE)


def inner_products(Z, widths, Z_other, widths_other):
    """∫ ψ_m ψ_n for Gaussians ψ of norm one and standard deviation l/√2, by the trapezoidal rule, column by column."""
    product = np.full((len(Z), len(Z_other)), VARIANCE)
    grid = np.linspace(-40.0, 40.0, 16_001)
    for d in range(Z.shape[1]):
        psi, psi_other = (
            (2.0 / (np.pi * w[:, d, None] ** 2)) ** 0.25 * np.exp(-(((grid - z[:, d, None]) / w[:, d, None]) ** 2))
            for z, w in ((Z, widths), (Z_other, widths_other))
        )
        product *= (psi @ psi_other.T) * (grid[1] - grid[0])
    return product


def widths(a):
    return LENGTHSCALE * np.exp(a)


def test_covariances_are_inner_products_of_gaussians_of_their_own_widths():
    u = sgp.MultiscaleInducing(jnp.asarray(Z), jnp.asarray(A))
    plain = np.broadcast_to(LENGTHSCALE, X.shape)
    assert_allclose(u.Kuu(KERNEL), inner_products(Z, widths(A), Z, widths(A)), rtol=1e-10)
    assert_allclose(u.Kuf(KERNEL, X), inner_products(Z, widths(A), X, plain), rtol=1e-10)
    assert_allclose(u.Kuu_diagonal(KERNEL), np.full(M, VARIANCE), rtol=1e-12)
    other = sgp.MultiscaleInducing(jnp.asarray(Z[:3] + 0.5), jnp.asarray(-A[:3]))
    assert_allclose(u.Kuv(KERNEL, other), inner_products(Z, widths(A), Z[:3] + 0.5, widths(-A[:3])), rtol=1e-10)
    points = sgp.InducingPoints(jnp.asarray(X))
    assert_allclose(u.Kuv(KERNEL, points), u.Kuf(KERNEL, X), rtol=1e-12)
    assert_allclose(points.Kuv(KERNEL, u), u.Kuf(KERNEL, X).T, rtol=1e-12)
    grid = sgp.InducingGrid.over(X, (3, 2))
    assert_allclose(u.Kuv(KERNEL, grid), u.Kuf(KERNEL, grid.Z), rtol=1e-12)
    assert_allclose(u.take(jnp.array([2, 0])).Kuf(KERNEL, X), u.Kuf(KERNEL, X)[jnp.array([2, 0])], rtol=1e-12)


def test_without_scales_they_are_function_values():
    u, points = sgp.MultiscaleInducing.at(Z), sgp.InducingPoints(jnp.asarray(Z))
    assert_allclose(u.Kuu(KERNEL), points.Kuu(KERNEL), rtol=1e-12)
    assert_allclose(u.Kuf(KERNEL, X), points.Kuf(KERNEL, X), rtol=1e-12)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_they_and_the_function_have_one_positive_semi_definite_covariance(spread):
    u = sgp.MultiscaleInducing(jnp.asarray(Z), jnp.asarray(spread * RNG.normal(size=(M, D))))
    Kuf = u.Kuf(KERNEL, X)
    joint = np.block([[u.Kuu(KERNEL), Kuf], [Kuf.T, KERNEL(X, X)]])
    assert np.linalg.eigvalsh(joint)[0] > -1e-12


@pytest.mark.thorough
def test_they_go_with_a_growing_basis_in_training_and_in_predictions():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    bases = partial(sgp.growing, capacity=20), sgp.MultiscaleInducing(Z, A)
    guide = sgp.AutoDecoupledGP(model, *bases, parametrization="full")
    svi = SVI(model, guide, sgp.GrowBasis(optax.adam(0.1)), sgp.QuadratureELBO())
    params = svi.run(jax.random.key(0), 3, X, np.sin(X[:, 0]), progress_bar=False).params
    process = sgp.process_posterior(guide, jax.random.key(0), params, X)["f"]
    assert_allclose(process.posterior(X).mean, guide.posterior(jax.random.key(0), params, X)["f"].mean, rtol=1e-8)


def test_a_batch_of_kernels_has_a_covariance_each():
    u = sgp.MultiscaleInducing(jnp.asarray(Z), jnp.asarray(A))
    batch = SquaredExponential(np.array([[0.7, 1.4], [1.0, 2.0], [0.3, 0.4]]), np.array([1.0, 2.0, 3.0]))
    for c in range(3):
        one = SquaredExponential(batch.lengthscale[c], batch.variance[c])
        assert_allclose(u.Kuu(batch)[c], u.Kuu(one), rtol=1e-12)
        assert_allclose(u.Kuf(batch, X)[c], u.Kuf(one, X), rtol=1e-12)
        assert_allclose(u.Kuu_diagonal(batch)[c], u.Kuu_diagonal(one), rtol=1e-12)


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(LENGTHSCALE, VARIANCE), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.2), obs=y)


Y = np.sin(2.0 * X[:, 0]) + X[:, 1]
TAKES_THEM = {**{name: GUIDES[name] for name in ("whitened", "unwhitened", "natural", "tied")}}
TAKES_THEM["decoupled"] = lambda model, Z, **options: sgp.AutoDecoupledGP(model, X, Z, **options)


@pytest.mark.parametrize("name", TAKES_THEM)
def test_every_guide_with_inducing_variables_takes_them(name):
    points = TAKES_THEM[name](model, Z)
    params = arbitrary_parameters(model, points, X, Y)
    for guide in (points, TAKES_THEM[name](model, sgp.MultiscaleInducing.at(Z))):
        mine = {**params, "f_auto_inducing": sgp.MultiscaleInducing.at(Z)} if guide is not points else params
        loss = loss_at(mine, model, guide, X, Y)
        assert_allclose(loss, loss_at(params, model, points, X, Y), rtol=1e-9)


@pytest.mark.exhaustive
def test_training_the_scales_improves_the_bound_where_inducing_inputs_are_few():
    x = np.linspace(-3.0, 3.0, 60)[:, None]
    y = np.sin(2.0 * x[:, 0])

    def smooth(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.5), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    bounds = {}
    for name, start in (("points", x[5::10]), ("multiscale", sgp.MultiscaleInducing.at(x[5::10]))):
        guide = sgp.AutoSVGP(smooth, start, natural=True, learn_inducing=True)
        svi = SVI(
            smooth, guide, sgp.NaturalGradient(1.0, optax.adam(2e-2)), sgp.QuadratureELBO(num_nodes=3, bound="titsias")
        )
        result = svi.run(jax.random.key(0), 500, x, y, progress_bar=False)
        assert sgp.num_refused(result.state) == 0
        bounds[name] = -result.losses[-1]
    assert bounds["multiscale"] > bounds["points"] + 5.0


@pytest.mark.parametrize("kernel", [Matern32(1.0), SquaredExponential(1.0) + SquaredExponential(2.0)])
def test_other_kernels_are_refused(kernel):
    u = sgp.MultiscaleInducing.at(Z)
    for call in (lambda: u.Kuu(kernel), lambda: u.Kuf(kernel, X), lambda: u.Kuu_diagonal(kernel)):
        with pytest.raises(TypeError, match=r"needs a `SquaredExponential`, got (Matern32|Sum)"):
            call()
