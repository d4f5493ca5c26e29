"""`InducingReparam`: a GP site through whitened inducing variables, under NUTS and under stock autoguides."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam, seed, substitute, trace
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation
from numpyro.optim import Minimize
import oracles
from problems import JITTER, LENGTHSCALE, MEAN, NOISE, VARIANCE, X_NEW, M, Model, N, X, Z, blocks
import pytest

import numpyro_sgp as sgp

CONDITIONALS = ["mean", "independent"]


def kernel():
    return sgp.kernels.SquaredExponential(LENGTHSCALE, VARIANCE)


def regression(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(kernel(), X, MEAN, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def rewritten(conditional="mean", model=regression, inducing=Z):
    return reparam(model, config={"f": sgp.InducingReparam(inducing, conditional=conditional)})


def value_of_f(model, values, X):
    return trace(seed(substitute(model, values), jax.random.key(0))).get_trace(X)["f"]["value"]


@pytest.mark.parametrize("conditional", CONDITIONALS)
@pytest.mark.usefixtures("x64")
def test_the_prior_of_f_is_the_dense_training_conditional(conditional):
    # f is linear in its standard normal variables: its covariance is J Jᵀ.
    model = rewritten(conditional)
    zeros = {"f_whitened": jnp.zeros(M), "f_residual": jnp.zeros(N)}
    assert_allclose(value_of_f(model, zeros, X), np.full(N, MEAN))
    jacobians = jax.jacobian(lambda values: value_of_f(model, values, X))(zeros)
    covariance = sum(J @ J.T for J in jacobians.values())
    prior = blocks("tied")
    Q = prior.Kuf.T @ np.linalg.solve(prior.Kuu, prior.Kuf)
    expected = Q if conditional == "mean" else Q + np.diag(prior.kff - np.diag(Q))
    assert_allclose(covariance, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_gradients_are_finite_where_the_residual_vanishes():
    def without_jitter(X):
        numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(scale), X, jitter=0.0))

    # Rows so far apart that K = I: nothing is left of any variance, exactly.
    scale, model = 1e-3, rewritten("independent", without_jitter, X)
    values = {"f_whitened": jnp.ones(N), "f_residual": jnp.ones(N)}
    assert_allclose(value_of_f(model, values, X), np.ones(N))
    gradients = jax.grad(lambda values, X: jnp.sum(value_of_f(model, values, X) ** 2), (0, 1))(values, jnp.asarray(X))
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_a_stock_autoguide_finds_the_posterior_of_the_dtc_model():
    # The posterior of v is Gaussian, so that the Laplace approximation of it is exact.
    model, y = rewritten(), Model().y
    guide = AutoLaplaceApproximation(model)
    svi = SVI(model, guide, Minimize(), Trace_ELBO())
    state, _ = svi.update(svi.init(jax.random.key(0), X, y), X, y)
    posterior = guide.get_posterior(svi.get_params(state))
    dense = sgp.SparseGPRegression(kernel(), X, Z, NOISE, MEAN, bound="dtc", jitter=JITTER).condition(y)
    assert_allclose(posterior.mean, dense.m, atol=1e-7)
    prior = blocks("tied")
    m, S = oracles.regression_posterior(prior.Kuu, prior.Kuf, y - MEAN, NOISE)
    L = np.linalg.cholesky(prior.Kuu)
    assert_allclose(posterior.mean, np.linalg.solve(L, m), atol=1e-7)
    assert_allclose(posterior.covariance_matrix, np.linalg.solve(L, np.linalg.solve(L, S).T), rtol=1e-7, atol=1e-9)


@pytest.mark.usefixtures("x64")
def test_draws_of_the_inducing_variables_predict_at_other_inputs():
    v = np.random.default_rng(0).normal(size=(6, M))
    draws = Predictive(rewritten(), {"f_whitened": v, "f": np.zeros((6, N))})(jax.random.key(0), X_NEW)
    new, L = blocks("tied", X_NEW), np.linalg.cholesky(blocks("tied").Kuu)
    assert draws["y"].shape == (6, len(X_NEW))
    f = Predictive(rewritten(), {"f_whitened": v}, return_sites=["f"])(jax.random.key(0), X_NEW)["f"]
    assert_allclose(f, MEAN + v @ np.linalg.solve(L, new.Kuf), rtol=1e-10)


@pytest.mark.parametrize("conditional", CONDITIONALS)
def test_a_plate_makes_one_latent_for_each_class(conditional):
    def classes(X, y=None):
        with numpyro.plate("class", 3):
            f = numpyro.sample("f", sgp.GaussianProcess(kernel(), X, jitter=JITTER))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    sites = trace(seed(rewritten(conditional, classes), jax.random.key(0))).get_trace(X)
    assert sites["f_whitened"]["fn"].shape() == (3, M)
    assert sites["f"]["value"].shape == (3, N)
    v = jnp.arange(3.0 * M).reshape(3, M)
    together = value_of_f(rewritten("mean", classes), {"f_whitened": v}, X)
    for index in range(3):
        alone = value_of_f(rewritten(), {"f_whitened": v[index]}, X)
        assert_allclose(together[index], alone - MEAN, rtol=1e-4, atol=1e-5)  # float32, different batching


def test_a_plate_of_as_many_entries_as_rows_warns():
    def model(X, y=None):
        with numpyro.plate("data", X.shape[0]):
            f = numpyro.sample("f", sgp.GaussianProcess(kernel(), X))
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    with pytest.warns(UserWarning, match="makes 7 latents of the GP site 'f', which has 7 rows.* before it"):
        trace(seed(rewritten(model=model), jax.random.key(0))).get_trace(X)


COUNTS_AT, COUNTS = np.linspace(-2.0, 2.0, 11)[:, None], np.array([1, 0, 2, 1, 3, 5, 8, 6, 3, 1, 2])


def sparse(X, y):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.4))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.4))
    k = sgp.kernels.SquaredExponential(lengthscale, variance) + sgp.kernels.Constant(1.0)
    f = numpyro.sample("f", sgp.GaussianProcess(k, X, jitter=1e-8))
    numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)


def exact(X, y):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.4))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.4))
    noise = numpyro.sample("noise", dist.Normal().expand([len(X)]).to_event(1))
    K = variance * jnp.exp(-0.5 * ((X - X.T) / lengthscale) ** 2) + 1.0
    f = numpyro.deterministic("f", jnp.linalg.cholesky(K + 1e-8 * jnp.eye(len(X))) @ noise)
    numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)


def summary_of_nuts(model, key):
    mcmc = MCMC(
        NUTS(model), num_warmup=500, num_samples=2000, num_chains=2, chain_method="vectorized", progress_bar=False
    )
    mcmc.run(jax.random.key(key), COUNTS_AT, COUNTS)
    samples = mcmc.get_samples(group_by_chain=True)
    kept = {name: samples[name] for name in ("lengthscale", "variance", "f")}
    return numpyro.diagnostics.summary(kept, group_by_chain=True)


@pytest.fixture(scope="module")
def summary_of_the_exact_model():
    with jax.enable_x64(True):
        return summary_of_nuts(exact, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("conditional", CONDITIONALS)
@pytest.mark.usefixtures("x64")
def test_nuts_with_inducing_inputs_at_the_data_is_nuts_on_the_exact_latent_model(
    conditional, summary_of_the_exact_model
):
    summary = summary_of_nuts(rewritten(conditional, sparse, COUNTS_AT), 0)
    for name, expected in summary_of_the_exact_model.items():
        got = summary[name]
        assert np.all(got["r_hat"] < 1.01)
        error = np.hypot(*(s[name]["std"] / np.sqrt(s[name]["n_eff"]) for s in (summary, summary_of_the_exact_model)))
        assert np.all(abs(got["mean"] - expected["mean"]) < 4.0 * error)
        assert_allclose(got["std"], expected["std"], rtol=0.15)


def test_mistakes_say_what_came_and_what_is_needed():
    with pytest.raises(TypeError, match="`inducing` must be an array or an inducing object, got a function"):
        sgp.InducingReparam(lambda kernel, X, key: X)
    with pytest.raises(ValueError, match='`conditional` must be "mean" or "independent", got \'exact\''):
        sgp.InducingReparam(Z, conditional="exact")
    with pytest.raises(ValueError, match=r"`inducing` has 1 columns, but this site's `X` has shape \(7, 2\)"):
        seed(rewritten(inducing=Z[:, :1]), jax.random.key(0))(X)
    other = reparam(regression, config={"y": sgp.InducingReparam(Z)})
    with pytest.raises(TypeError, match="was given the site 'y', a Normal"):
        seed(other, jax.random.key(0))(X)

    def observed(X):
        numpyro.sample("f", sgp.GaussianProcess(kernel(), X), obs=jnp.zeros(N))

    with pytest.raises(ValueError, match="The GP site 'f' is observed or masked"):
        seed(rewritten(model=observed), jax.random.key(0))(X)


def test_a_masked_site_is_refused_for_its_mask_would_be_lost():
    def masked(X, mask):
        numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0), X).mask(mask))

    inputs = jnp.linspace(0.0, 1.0, 4)[:, None]
    model = seed(reparam(masked, config={"f": sgp.InducingReparam(inputs[:2])}), 0)
    model(inputs, True)
    with pytest.raises(ValueError, match="'f' is observed or masked"):
        model(inputs, False)
