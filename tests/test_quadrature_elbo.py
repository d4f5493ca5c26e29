"""`QuadratureELBO` against dense quadrature and Monte Carlo: one latent, two, many, several sites, a GP on a GP."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
import optax
import oracles
import pytest
from scipy import stats
from scipy.special import log_softmax

import numpyro_sgp as sgp
from numpyro_sgp.quadrature import gauss_hermite, product_grid

pytestmark = pytest.mark.usefixtures("x64")

N, M = 7, 5
RNG = np.random.default_rng(0)
X, Z = np.sort(RNG.uniform(-2.0, 2.0, (N, 1)), axis=0), np.linspace(-2.0, 2.0, M)[:, None]
Y = RNG.normal(size=N)
KERNEL = sgp.kernels.SquaredExponential(0.9, 1.4)


def random_posterior(svi, seed, *args):
    """Parameters of whitened posteriors away from the prior."""
    rng = np.random.default_rng(seed)
    params = svi.get_params(svi.init(jax.random.key(0), *args))
    for name, value in params.items():
        if name.endswith("_m"):
            params[name] = jnp.asarray(0.7 * rng.normal(size=value.shape))
        if name.endswith("_S_sqrt"):
            params[name] = 0.6 * value + jnp.tril(jnp.asarray(0.2 * rng.normal(size=value.shape)))
    return params


def setup(model, seed=1, args=(X, Y)):
    guide = sgp.AutoSVGP(model, Z)
    svi = SVI(model, guide, optax.adam(1e-2), sgp.QuadratureELBO())
    params = random_posterior(svi, seed, *args)
    return guide, params, guide.posterior(jax.random.key(0), params, *args)


def elbo(loss, model, guide, params, *args, key=0):
    return -float(jax.jit(lambda key: loss.loss(key, params, model, guide, *args))(jax.random.key(key)))


def one_latent(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X, mean=0.3))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f, 0.5), obs=y)


@pytest.mark.once
def test_rules_integrate_polynomials_up_to_their_degree():
    nodes, weights = gauss_hermite(6)
    for power, moment in ((0, 1.0), (1, 0.0), (2, 1.0), (4, 3.0), (10, 945.0)):
        assert_allclose(np.sum(weights * nodes**power), moment, atol=1e-9 * max(moment, 1.0))
    grid, weights = product_grid(5, 2)
    assert_allclose(np.sum(weights * grid[:, 0] ** 2 * grid[:, 1] ** 4), 3.0, rtol=1e-12)


@pytest.mark.once
def test_one_latent_is_integrated_as_dense_quadrature_does():
    guide, params, q = setup(one_latent)
    q = q["f"]
    log_density = lambda f: stats.t.logpdf((Y - f) / 0.5, 4.0) - np.log(0.5)  # noqa: E731
    nodes, weights = np.polynomial.hermite.hermgauss(20)
    f = np.asarray(q.mean) + np.sqrt(2.0 * np.asarray(q.variance)) * nodes[:, None]
    expected = np.sum(weights[:, None] * log_density(f)) / np.sqrt(np.pi) - float(q.kl)
    assert_allclose(elbo(sgp.QuadratureELBO(), one_latent, guide, params, X, Y), expected, rtol=1e-10)
    by_posterior = q.expectation(lambda f: dist.StudentT(4.0, f, 0.5).log_prob(Y)).sum() - q.kl
    assert_allclose(by_posterior, expected, rtol=1e-10)


@pytest.mark.once
def test_trace_mean_field_agrees_in_expectation_and_trace_elbo_is_refused():
    guide, params, _ = setup(one_latent)
    exact = elbo(sgp.QuadratureELBO(), one_latent, guide, params, X, Y)
    keys = jax.random.split(jax.random.key(3), 4000)
    loss = TraceMeanField_ELBO()
    draws = -np.asarray(jax.jit(jax.vmap(lambda k: loss.loss(k, params, one_latent, guide, X, Y)))(keys))
    assert abs(draws.mean() - exact) < 5.0 * draws.std() / np.sqrt(len(draws))
    with pytest.raises(NotImplementedError, match=r"QuadratureELBO.*TraceMeanField_ELBO"):
        elbo(Trace_ELBO(), one_latent, guide, params, X, Y)


def two_latents(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern52(1.5, 0.5), X, mean=-0.5))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


@pytest.mark.once
def test_two_latents_for_each_datum_are_integrated_on_a_product_grid():
    guide, params, q = setup(two_latents)
    # In closed form over f: E[log N(y | f, e^g)] = −g − ½ ((y − m)² + v) e^(−2g) − ½ log 2π, and E[e^(−2g)] likewise.
    m, v = np.asarray(q["f"].mean), np.asarray(q["f"].variance)
    mean, variance = np.asarray(q["g"].mean), np.asarray(q["g"].variance)
    precision = np.exp(-2.0 * mean + 2.0 * variance)
    expected = np.sum(-mean - 0.5 * ((Y - m) ** 2 + v) * precision - 0.5 * np.log(2.0 * np.pi))
    expected -= float(q["f"].kl) + float(q["g"].kl)
    assert_allclose(elbo(sgp.QuadratureELBO(32), two_latents, guide, params, X, Y), expected, rtol=1e-9)


def several_sites(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern52(1.5, 0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.4), obs=y)
        numpyro.sample("count", dist.Poisson(jnp.exp(g)), obs=None if y is None else jnp.round(y**2))
        numpyro.sample("sum", dist.Normal(f + g, 0.7), obs=y)


@pytest.mark.once
def test_each_observed_site_is_integrated_over_the_latents_it_depends_on():
    guide, params, q = setup(several_sites)
    f, g = (tuple(np.asarray(x) for x in (q[name].mean, q[name].variance)) for name in ("f", "g"))
    gaussian = lambda m, v, s: np.sum(stats.norm.logpdf(Y, m, s) - 0.5 * v / s**2)  # noqa: E731
    counts = np.round(Y**2)
    expected = gaussian(*f, 0.4) + gaussian(f[0] + g[0], f[1] + g[1], 0.7)
    expected += np.sum(stats.poisson.logpmf(counts, np.exp(g[0])) - np.exp(g[0]) * np.expm1(0.5 * g[1]))
    expected -= float(q["f"].kl) + float(q["g"].kl)
    assert_allclose(elbo(sgp.QuadratureELBO(32), several_sites, guide, params, X, Y), expected, rtol=1e-9)


def paired_outputs(X, y=None):
    output = numpyro.plate("output", 3, dim=-2)
    with output:
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with output, numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.StudentT(4.0, f[:, 0], 0.5), obs=y)


@pytest.mark.once
def test_latents_paired_with_outputs_by_a_plate_need_one_axis_only():
    Y3 = np.stack([Y, 2.0 * Y, -Y])
    guide, params, q = setup(paired_outputs, args=(X, Y3))
    q = q["f"]
    nodes, weights = np.polynomial.hermite.hermgauss(20)
    mean, sd = np.asarray(q.mean)[:, 0], np.sqrt(np.asarray(q.variance))[:, 0]
    f = mean + np.sqrt(2.0) * sd * nodes[:, None, None]
    log_density = stats.t.logpdf((Y3 - f) / 0.5, 4.0) - np.log(0.5)
    expected = np.sum(weights[:, None, None] * log_density) / np.sqrt(np.pi) - float(q.kl.sum())
    found = elbo(sgp.QuadratureELBO(), paired_outputs, guide, params, X, Y3)
    assert_allclose(found, expected, rtol=1e-10)


def classes(X, y=None):
    with numpyro.plate("class", 3):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


@pytest.mark.once
def test_more_than_two_latents_are_sampled_without_bias():
    labels = RNG.integers(0, 3, N)
    guide, params, q = setup(classes, args=(X, labels))
    grid, weights = product_grid(24, 3)
    mean, sd = np.asarray(q["f"].mean), np.sqrt(np.asarray(q["f"].variance))
    f = mean + sd * grid[:, :, None]  # (nodes, class, N)
    log_density = np.take_along_axis(log_softmax(f, axis=1), labels[None, None], axis=1)[:, 0]
    expected = np.sum(weights[:, None] * log_density) - float(q["f"].kl.sum())
    loss = sgp.QuadratureELBO(num_samples=4)
    keys = jax.random.split(jax.random.key(1), 3000)
    draws = -np.asarray(jax.jit(jax.vmap(lambda k: loss.loss(k, params, classes, guide, X, labels)))(keys))
    assert abs(draws.mean() - expected) < 5.0 * draws.std() / np.sqrt(len(draws))
    assert draws.std() > 0.0


def deep(X, y=None):
    inner = numpyro.sample("inner", sgp.GaussianProcess(KERNEL, X, mean=lambda X: X[:, 0]))
    outer = numpyro.sample("outer", sgp.GaussianProcess(KERNEL, inner[:, None]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(outer, 0.3), obs=y)


@pytest.mark.once
def test_a_gp_on_a_gp_is_integrated_given_draws_of_the_inner_one():
    guide, params, q = setup(deep)
    inner = q["inner"]
    rng = np.random.default_rng(5)
    Kuu = oracles.with_jitter(oracles.se(Z, Z, 0.9, 1.4), 1e-6)
    S_sqrt, m = np.tril(np.asarray(params["outer_auto_S_sqrt"])), np.asarray(params["outer_auto_m"])
    m_u, S_u = oracles.from_whitened_root(m, S_sqrt, Kuu)
    values = []
    for _ in range(4000):
        h = np.asarray(inner.mean) + np.sqrt(np.asarray(inner.variance)) * rng.normal(size=N)
        Kuf, Kff = oracles.se(Z, h[:, None], 0.9, 1.4), oracles.se(h[:, None], h[:, None], 0.9, 1.4)
        mean, covariance = oracles.conditional(m_u, S_u, Kuu, Kuf, Kff)
        values.append(np.sum(stats.norm.logpdf(Y, mean, 0.3) - 0.5 * np.diag(covariance) / 0.09))
    values = np.array(values) - float(inner.kl) - float(q["outer"].kl)
    loss = sgp.QuadratureELBO(num_samples=4)
    keys = jax.random.split(jax.random.key(2), 1000)
    draws = -np.asarray(jax.jit(jax.vmap(lambda k: loss.loss(k, params, deep, guide, X, Y)))(keys))
    error = np.sqrt(draws.var() / len(draws) + values.var() / len(values))
    assert abs(draws.mean() - values.mean()) < 5.0 * error


@pytest.mark.once
def test_several_particles_are_an_average():
    def sampled(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, scale), obs=y)

    guide, params, _ = setup(sampled)
    one, many = sgp.QuadratureELBO(), sgp.QuadratureELBO(num_particles=3)
    keys = jax.random.split(jax.random.key(7), 3)
    singles = [one.loss(key, params, sampled, guide, X, Y) for key in keys]
    assert_allclose(many.loss(jax.random.key(7), params, sampled, guide, X, Y), np.mean(singles), rtol=1e-10)
