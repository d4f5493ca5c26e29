"""Hyperparameters with a posterior: q(θ) q(u | θ) against long NUTS runs of the exact model, and against type II."""

from guides import LOOSE
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal
import optax
import oracles
import pytest
from scipy import stats
from scipy.optimize import minimize
from scipy.special import gammaln

import numpyro_sgp as sgp

pytestmark = pytest.mark.usefixtures("x64")

X = np.linspace(-2.0, 2.0, 11)[:, None]
Y = np.array([1, 0, 2, 1, 3, 5, 8, 6, 3, 1, 2])


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.4))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.4))
    kernel = sgp.kernels.SquaredExponential(lengthscale, variance) + sgp.kernels.Constant(1.0)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def standardised(X, y):
    """The same model with f = root · noise, which NUTS explores much faster."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.4))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.4))
    noise = numpyro.sample("noise", dist.Normal().expand([X.shape[0]]).to_event(1))
    K = variance * jnp.exp(-0.5 * ((X - X.T) / lengthscale) ** 2) + 1.0
    f = numpyro.deterministic("f", jnp.linalg.cholesky(K + 1e-8 * jnp.eye(X.shape[0])) @ noise)
    numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize("inducing", [pytest.param(None, marks=pytest.mark.exhaustive), X], ids=["dense", "Z=X"])
def test_sampled_hyperparameters_have_the_posterior_that_nuts_finds(inducing):
    mcmc = MCMC(NUTS(standardised), num_warmup=500, num_samples=8000, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    exact = mcmc.get_samples()
    summary = numpyro.diagnostics.summary(exact, group_by_chain=False)

    options = {} if inducing is None else {"sites": "per_datum"}
    guide = sgp.AutoTSVGP(model, inducing, base=AutoMultivariateNormal, **options)
    optim = sgp.NaturalGradient(
        optax.exponential_decay(0.3, 1500, 0.1), optax.adam(optax.cosine_decay_schedule(0.02, 3000))
    )
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_particles=8))
    result = svi.run(jax.random.key(1), 3000, X, Y, progress_bar=False)
    assert int(sgp.num_refused(result.state)) == 0
    draws = guide.sample_posterior(jax.random.key(2), result.params, X, sample_shape=(8000,))

    for name in ("lengthscale", "variance", "f"):
        value = np.log(exact[name]) if name != "f" else exact[name]
        ours = np.log(draws[name]) if name != "f" else draws[name]
        sd = value.std(axis=0)
        # Monte-Carlo errors of both means, from NUTS's effective sample size and the 8000 independent draws.
        error = sd * np.sqrt(1.0 / np.minimum(summary[name]["n_eff"], 8000) + 1.0 / 8000)
        difference = np.abs(value.mean(axis=0) - ours.mean(axis=0))
        assert np.all(difference < 0.1 * sd + 3.0 * error), (name, difference / sd)
        assert_allclose(ours.std(axis=0), sd, rtol=0.15)


def gaussian(X, y=None):
    lengthscale = numpyro.param("lengthscale", 0.5, constraint=constraints.positive)
    noise = numpyro.param("noise", 0.5, constraint=constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.thorough
def test_type_two_hyperparameters_reach_the_optimum_of_the_dense_collapsed_bound():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2.0, 2.0, (30, 1))
    y = np.sin(2.0 * X[:, 0]) + 0.3 * rng.normal(size=30)
    Z = np.linspace(-2.0, 2.0, 6)[:, None]

    def negative_bound(log_theta):
        lengthscale, noise = np.exp(log_theta)
        k = lambda a, b: np.exp(-0.5 * ((a - b.T) / lengthscale) ** 2)  # noqa: E731
        Kuf = k(Z, X)
        Q = Kuf.T @ np.linalg.solve(k(Z, Z) + 1e-6 * np.eye(6), Kuf)
        C = Q + noise**2 * np.eye(30)
        fit = y @ np.linalg.solve(C, y) + np.linalg.slogdet(C)[1] + 30 * np.log(2.0 * np.pi)
        return 0.5 * fit + 0.5 * (30 - np.trace(Q)) / noise**2

    best = minimize(negative_bound, np.log([0.5, 0.5]), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12})
    guide = sgp.AutoTSVGP(gaussian, Z)
    optim = sgp.NaturalGradient(1.0, optax.adam(optax.cosine_decay_schedule(0.05, 1500)))
    result = SVI(gaussian, guide, optim, LOOSE).run(jax.random.key(0), 1500, X, y, progress_bar=False)
    found = np.array([result.params["lengthscale"], result.params["noise"]])
    assert_allclose(np.log(found), best.x, atol=1e-4)  # Adam's last steps are of that size
    assert_allclose(result.losses[-1], best.fun, rtol=1e-8)


@pytest.mark.thorough
def test_point_estimates_of_sampled_hyperparameters_reach_the_optimum_of_the_dense_bound_and_the_prior():
    Z = np.linspace(-2.0, 2.0, 5)[:, None]

    def negative(log_theta):
        lengthscale, variance = np.exp(log_theta)
        covariance = lambda A, B: oracles.se(A, B, lengthscale, variance) + 1.0  # noqa: E731
        Kuu = oracles.with_jitter(covariance(Z, Z), 1e-6)
        own = [(Kuu, covariance(Z, X), np.full(len(X), variance + 1.0))]
        bound = oracles.optimal_posterior(lambda f: Y * f - np.exp(f) - gammaln(Y + 1.0), own)[1]
        # The estimate is a point, so its prior density is that of the hyperparameter itself, not of its logarithm.
        return -bound - np.sum(stats.lognorm.logpdf([lengthscale, variance], 0.4))

    differences = {"finite_diff_rel_step": 1e-3, "gtol": 1e-6}
    best = minimize(negative, [-0.1, 0.1], method="BFGS", jac="3-point", options=differences)
    guide = sgp.AutoTSVGP(model, Z, base=AutoDelta)
    optim = sgp.NaturalGradient(1.0, optax.adam(optax.cosine_decay_schedule(0.05, 800)))
    result = SVI(model, guide, optim, sgp.QuadratureELBO()).run(jax.random.key(0), 800, X, Y, progress_bar=False)
    found = np.array([result.params["lengthscale_auto_loc"], result.params["variance_auto_loc"]])
    assert_allclose(np.log(found), best.x, atol=1e-4)  # Adam's last steps are of that size
    assert_allclose(result.losses[-1], best.fun, rtol=1e-8)
