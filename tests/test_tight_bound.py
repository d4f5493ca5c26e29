"""The bound that is tighter for Gaussian noise: against dense algebra, and where it must not be."""

from guides import GUIDES, arbitrary_parameters, loss_at
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import oracles
from problems import JITTER, LENGTHSCALE, MEAN, NOISE, VARIANCE, Model, N, X, Z, blocks
import pytest
from scipy.optimize import minimize_scalar

import numpyro_sgp as sgp

pytestmark = pytest.mark.usefixtures("x64")

Y = Model().y
LOOSE, TIGHT = sgp.QuadratureELBO(bound="titsias"), sgp.QuadratureELBO()
EACH = np.linspace(0.3, 0.9, N)
ROWS = np.array([0, 0, 3, 5, 5, 5, 1, 2])  # of X, for observations of the same rows
WEIGHTS = np.array([[1.0, -0.5], [0.2, 2.0], [0.7, 0.1]])
KEPT = np.arange(N) % 3 > 0
PRIOR = blocks("tied")
REST = PRIOR.kff - np.sum(PRIOR.Kuf * np.linalg.solve(PRIOR.Kuu, PRIOR.Kuf), axis=0)


def site(name="f", X=X, batch=()):
    gp = sgp.GaussianProcess(sgp.kernels.SquaredExponential(LENGTHSCALE, VARIANCE), X, MEAN, jitter=JITTER)
    return numpyro.sample(name, gp.expand(batch) if batch else gp)


def observed(f, noise, name="y", y=Y):
    numpyro.sample(name, dist.Normal(f, noise), obs=y)


def plain():
    f = site()
    with numpyro.plate("data", N):
        observed(f, NOISE)


def scaled_and_shifted():
    f = site()
    with numpyro.plate("data", N):
        observed(1.0 - 2.0 * f / EACH, EACH)


def a_subsample():
    f = site()
    with numpyro.plate("data", 5 * N, subsample_size=N):
        observed(f, NOISE)


def masked():
    f = site()
    with numpyro.plate("data", N), handlers.mask(mask=KEPT):
        observed(f, NOISE)


def masked_in_an_event():
    numpyro.sample("y", dist.Normal(site(), NOISE).mask(KEPT).to_event(1), obs=np.where(KEPT, Y, np.nan))


def weighted(weight):
    def model(size=N):
        f = site()
        with numpyro.plate("data", size, subsample_size=N), handlers.scale(scale=weight):
            observed(f, NOISE)

    return model


def log_normal():
    numpyro.sample("y", dist.LogNormal(site(), NOISE).to_event(1), obs=np.exp(Y))


def the_same_rows():
    observed(site()[ROWS], 0.2, y=np.linspace(-1.0, 1.0, len(ROWS)))


def two_terms():
    f = site()
    observed(f, NOISE)
    observed(2.0 * f, EACH, "z")


def mixed():
    """Three outputs of two latents."""
    f = site(batch=(2,))
    numpyro.sample("y", dist.Normal(WEIGHTS @ f, np.array([[0.5], [0.2], [0.9]])), obs=np.outer([1.0, -0.5, 0.3], Y))


def two_sites():
    f, g = site(), site("g")
    observed(f - 3.0 * g, NOISE)


# The model, and x = d/σ² of each entry, with how often it counts.
GAUSSIAN = {
    "plain": (plain, REST / NOISE**2, 1.0),
    "scaled and shifted": (scaled_and_shifted, 4.0 * REST / EACH**4, 1.0),
    "a subsample": (a_subsample, REST / NOISE**2, 5.0),
    "masked": (masked, REST / NOISE**2, 1.0 * KEPT),
    "masked in an event": (masked_in_an_event, REST / NOISE**2, 1.0 * KEPT),
    "weights below one": (weighted(0.25), 0.25 * REST / NOISE**2, 1.0),
    "weights above one": (weighted(3.0), REST / NOISE**2, 3.0),
    "a weighted subsample": (lambda: weighted(0.25)(5 * N), 0.25 * REST / NOISE**2, 5.0),
    "a model that is scaled": (handlers.scale(plain, scale=0.25), REST / NOISE**2, 0.25),
    "log-normal": (log_normal, REST / NOISE**2, 1.0),
    "the same rows": (the_same_rows, REST[ROWS] / 0.2**2, 1.0),
    "two terms": (two_terms, np.array([REST / NOISE**2, 4.0 * REST / EACH**2]), 1.0),
    "mixed": (mixed, np.sum(WEIGHTS**2, axis=1)[:, None] * REST / np.array([[0.5], [0.2], [0.9]]) ** 2, 1.0),
    "two sites": (two_sites, 10.0 * REST / NOISE**2, 1.0),
}


def both(model, guide, params, *args):
    return tuple(-loss_at(params, model, guide, *args, loss=loss) for loss in (LOOSE, TIGHT))


def guide_of(name, model):
    return GUIDES[name](model, Z, joint=False) if name in ("natural", "tied") else GUIDES[name](model, Z)


@pytest.mark.parametrize("name", ["whitened", pytest.param("tied", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("model", "x", "count"), GAUSSIAN.values(), ids=GAUSSIAN)
def test_the_gain_is_that_of_dense_algebra_whatever_the_posterior(model, x, count, name):
    guide = guide_of(name, model)
    loose, tight = both(model, guide, arbitrary_parameters(model, guide))
    assert_allclose(tight - loose, 0.5 * np.sum(count * (x - np.log(1.0 + x))), rtol=1e-9)


def counts():
    numpyro.sample("y", dist.Poisson(jnp.exp(site())), obs=abs(np.round(Y)))


def counts_beside():
    f = site()
    observed(f, NOISE)
    numpyro.sample("z", dist.Poisson(jnp.exp(f)), obs=abs(np.round(Y)))


def noise_of_f():
    f = site()
    observed(0.0, jnp.exp(f))


def squared():
    observed(site() ** 2, NOISE)


def noise_of_another():
    f, g = site(), site("g")
    observed(f, jnp.exp(g))


def counts_of_a_difference():
    f, g = site(), site("g")
    observed(f, NOISE)
    numpyro.sample("z", dist.Poisson(jnp.exp(f - g)), obs=abs(np.round(Y)))


@pytest.mark.parametrize(
    "model", [counts, counts_beside, noise_of_f, squared, noise_of_another, counts_of_a_difference]
)
def test_there_is_none_where_a_term_of_the_site_is_not_gaussian_in_it(model):
    guide = guide_of("whitened", model)
    loose, tight = both(model, guide, arbitrary_parameters(model, guide))
    assert tight == loose


def test_another_site_with_counts_takes_nothing_from_one_with_gaussian_noise():
    def model():
        observed(site(), NOISE)
        numpyro.sample("z", dist.Poisson(jnp.exp(site("g"))), obs=abs(np.round(Y)))

    guide = guide_of("whitened", model)
    loose, tight = both(model, guide, arbitrary_parameters(model, guide))
    x = REST / NOISE**2
    assert_allclose(tight - loose, 0.5 * np.sum(x - np.log(1.0 + x)), rtol=1e-9)


def test_a_dense_posterior_has_nothing_to_gain():
    guide = GUIDES["dense"](plain, Z)
    loose, tight = both(plain, guide, arbitrary_parameters(plain, guide))
    assert_allclose(tight, loose, rtol=1e-12)


# With other latents in one Gaussian.

GROUP = np.array([0, 1, 0, 1, 1, 0, 0])


@pytest.mark.parametrize("name", ["tied", "natural"])
@pytest.mark.thorough
def test_a_joint_posterior_reaches_the_tighter_bound_of_all_its_members(name):
    def model():
        f = site()
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        effect = numpyro.sample("effect", dist.Normal(0.0, 0.7).expand([2]).to_event(1))
        observed(2.0 * (f + level + effect[GROUP]), EACH)

    svi = SVI(model, GUIDES[name](model, Z), sgp.NaturalGradient(1.0, optax.set_to_zero()), TIGHT)
    bound = -svi.run(jax.random.key(0), 3, progress_bar=False).losses[-1]
    Q = PRIOR.Kuf.T @ np.linalg.solve(PRIOR.Kuu, PRIOR.Kuf)
    shared = 4.0 * (4.0 + 0.49 * (GROUP[:, None] == GROUP))
    noise = np.diag(EACH**2)
    expected = oracles.gaussian_log_density(Y, np.full(N, 2.0 * MEAN), 4.0 * Q + shared + noise)
    expected -= 0.5 * np.sum(np.log(1.0 + 4.0 * REST / EACH**2))
    assert_allclose(bound, expected, rtol=1e-9)
    assert bound < oracles.gaussian_log_density(Y, np.full(N, 2.0 * MEAN), 4.0 * PRIOR.Kff + shared + noise)


@pytest.mark.exhaustive
def test_a_noise_scale_with_nodes_has_the_gain_at_each_of_them():
    def model(X):
        f = site(X=X)
        noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.4))
        with numpyro.plate("data", 3 * N, subsample_size=N):
            observed(f, noise)

    guide = GUIDES["tied"](model, Z)
    svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.set_to_zero()), TIGHT)
    params = svi.run(jax.random.key(0), 30, X, progress_bar=False).params
    loose, tight = both(model, guide, params, X)
    median, upper = np.log(guide.quantiles(params, [0.5, 0.8413447460685429], X)["noise"])
    nodes, weights = oracles.gauss_hermite(20)
    x = REST / np.exp(median + (upper - median) * nodes[:, None]) ** 2
    assert_allclose(tight - loose, 1.5 * weights @ np.sum(x - np.log(1.0 + x), axis=1), rtol=1e-5)


@pytest.mark.exhaustive
def test_latents_beside_counts_have_no_gain():
    def model():
        f = site()
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        observed(f + level, NOISE)
        numpyro.sample("z", dist.Poisson(jnp.exp(f + level)), obs=abs(np.round(Y)))

    guide = GUIDES["tied"](model, Z)
    params = SVI(model, guide, sgp.NaturalGradient(), TIGHT).run(jax.random.key(0), 3, progress_bar=False).params
    loose, tight = both(model, guide, params)
    assert tight == loose


# What the bound is for.


@pytest.mark.parametrize("seed", range(5))
def test_it_is_between_the_looser_bound_and_the_evidence(seed):
    """Of observations of the same rows, of sums and with noise of their own."""
    rng = np.random.default_rng(seed)
    y, noise = rng.normal(size=len(ROWS)), np.exp(rng.normal(size=len(ROWS)) - 1.0)
    slope = rng.normal(size=len(ROWS))

    def model():
        observed(slope * site()[ROWS], noise, y=y)

    ends = []
    for loss in (LOOSE, TIGHT):
        svi = SVI(model, guide_of("natural", model), sgp.NaturalGradient(1.0, optax.set_to_zero()), loss)
        ends.append(-svi.run(jax.random.key(0), 3, progress_bar=False).losses[-1])
    K = PRIOR.Kff[np.ix_(ROWS, ROWS)] * np.outer(slope, slope)
    evidence = oracles.gaussian_log_density(y, slope * MEAN, K + np.diag(noise**2))
    assert ends[0] < ends[1] < evidence


def test_a_weighted_likelihood_is_between_the_looser_bound_and_the_weighted_evidence():
    weight, noise, y = 0.1, 0.05, np.full(N, MEAN)

    def model():
        f = site()
        with handlers.scale(scale=weight):
            observed(f, noise, y=y)

    ends = []
    for loss in (LOOSE, TIGHT):
        svi = SVI(model, guide_of("natural", model), sgp.NaturalGradient(1.0, optax.set_to_zero()), loss)
        ends.append(-svi.run(jax.random.key(0), 3, progress_bar=False).losses[-1])
    # N(y | f, σ²)^w is N(y | f, σ²/w) times a constant.
    constant = N * 0.5 * np.log(2.0 * np.pi * noise**2 * (2.0 * np.pi * noise**2) ** -weight / weight)
    evidence = constant + oracles.gaussian_log_density(y, y, PRIOR.Kff + noise**2 / weight * np.eye(N))
    assert ends[0] < ends[1] < evidence


@pytest.mark.thorough
@pytest.mark.parametrize("weight", [0.25, 3.0])
def test_a_joint_posterior_gains_by_weights_what_another_one_does(weight):
    def model():
        f = site()
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        with numpyro.plate("data", 5 * N, subsample_size=N), handlers.scale(scale=weight):
            observed(f + level, NOISE)

    guide = GUIDES["tied"](model, Z)
    params = SVI(model, guide, sgp.NaturalGradient(), TIGHT).run(jax.random.key(0), 3, progress_bar=False).params
    loose, tight = both(model, guide, params)
    x = min(weight, 1.0) * REST / NOISE**2
    assert_allclose(tight - loose, 2.5 * max(weight, 1.0) * np.sum(x - np.log(1.0 + x)), rtol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("joint", [False, pytest.param("auto", marks=pytest.mark.exhaustive)])
def test_natural_steps_are_the_same_and_gradients_are_those_of_the_value(joint):
    def model(X):
        lengthscale = numpyro.param("lengthscale", 0.8)
        noise = numpyro.param("noise", 0.5)
        kernel = sgp.kernels.SquaredExponential(lengthscale, VARIANCE)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, jitter=JITTER))
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        observed(f + level, noise)

    guide = GUIDES["tied"](model, Z, joint=joint)
    sites = []
    for loss in (LOOSE, TIGHT):
        svi = SVI(model, guide, sgp.NaturalGradient(0.6, optax.set_to_zero()), loss)
        params = svi.run(jax.random.key(0), 2, X, progress_bar=False).params
        sites.append(next(value for name, value in params.items() if name.endswith("sites")))
    assert_allclose(sites[0].Lambda2, sites[1].Lambda2, rtol=1e-9, atol=1e-9)
    assert_allclose(sites[0].lambda1, sites[1].lambda1, rtol=1e-9, atol=1e-9)

    def loss_of(theta):
        return loss_at({**params, **theta}, model, guide, X, loss=TIGHT)

    theta = {"lengthscale": jnp.asarray(0.8), "noise": jnp.asarray(0.5)}
    found = jax.grad(loss_of)(theta)
    for name, value in theta.items():
        step = 1e-5
        difference = loss_of({**theta, name: value + step}) - loss_of({**theta, name: value - step})
        assert_allclose(found[name], difference / (2.0 * step), rtol=1e-6)


def test_the_noise_that_is_found_is_closer_to_that_of_the_evidence():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (60, 1))
    kernel, few = sgp.kernels.Matern12(1.0), np.linspace(-2.0, 2.0, 15)[:, None]
    y = np.linalg.cholesky(kernel(X, X)) @ rng.normal(size=60) + 0.3 * rng.normal(size=60)

    def best(bound, inducing):
        @jax.jit
        def negative(log_noise):
            return -sgp.SparseGPRegression(kernel, X, inducing, jnp.exp(log_noise), bound=bound).log_prob(y)

        return minimize_scalar(negative, bounds=(-4.0, 1.0), method="bounded").x

    exact = best("titsias", X)
    assert exact < best("tight", few) < best("titsias", few) - 0.02


def test_float32_stays_float32():
    # With float64 enabled, so that whatever had it would make the result float64.
    X32, y32 = X.astype(np.float32), Y.astype(np.float32)

    def model(X, y):
        kernel = sgp.kernels.SquaredExponential(np.float32(0.8), np.float32(VARIANCE))
        observed(numpyro.sample("f", sgp.GaussianProcess(kernel, X)), np.float32(NOISE), y=y)

    guide = GUIDES["tied"](model, Z.astype(np.float32))
    svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.set_to_zero()), TIGHT)
    assert svi.run(jax.random.key(0), 2, X32, y32, progress_bar=False).losses.dtype == np.float32


def test_an_unknown_bound_raises():
    with pytest.raises(ValueError, match="`bound` must be 'tight' or 'titsias', got 'loose'"):
        sgp.QuadratureELBO(bound="loose")
