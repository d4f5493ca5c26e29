"""Posteriors over tables of weights as processes: draws of functions, and closed forms, against dense Gaussians."""

import dataclasses

from grids import representative
import guides
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
import oracles
import pytest
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp import features, kernels

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(5)
N, RANK, DRAWS, NOISE, COLUMNS = 6, 22, 20_000, 0.3, 2
X, X_NEW, Z = RNG.uniform(-1.0, 1.0, size=(N, 2)), RNG.uniform(-2.0, 2.0, size=(4, 2)), RNG.normal(size=(3, 2))
Y = RNG.normal(size=N)
LENGTHSCALE, VARIANCE = 0.8, 1.4


def initial_parameters(guide):
    return dict(guides.initial_parameters(guide.model, guide, X, Y))


def kernel():
    return kernels.SquaredExponential(LENGTHSCALE, VARIANCE)


def model(X, y=None):
    scale = numpyro.param("scale", LENGTHSCALE)
    finite = features.RandomFourier(kernels.SquaredExponential(scale, VARIANCE), RANK, jax.random.key(1))
    f = numpyro.sample("f", sgp.GaussianProcess(finite, X, lambda X: 0.5 * X[:, 0]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def with_random_values(guide):
    """Parameters of a posterior that is far from the prior."""
    params = initial_parameters(guide)
    table = params["f_auto_basis"]
    values = 0.4 * RNG.normal(size=table.values.shape)
    params = guide._with_values(params, "f", table, jnp.asarray(values))
    if "f_auto_S_sqrt" in params:
        params["f_auto_S_sqrt"] = jnp.asarray(np.tril(0.5 * RNG.normal(size=(3, 3)) + np.eye(3)))
        params["f_auto_m"] = jnp.asarray(RNG.normal(size=3))
    return params


def whitened_features(X):
    finite = features.RandomFourier(kernel(), RANK, jax.random.key(1))
    return np.asarray(finite.features(X)) / np.sqrt(np.asarray(finite.prior_precision(np.arange(RANK))))


def dense(params, form, X):
    """Mean and covariance of q(f(X))."""
    values = np.asarray(params["f_auto_basis"].values)
    Phi = whitened_features(X)
    mean = 0.5 * X[:, 0] + Phi @ values[:, 0]
    if form == "inducing":
        K, Kuf, Kuu = (np.asarray(kernel()(*pair)) for pair in ((X, X), (Z, X), (Z, Z)))
        A = np.linalg.solve(np.linalg.cholesky(Kuu), Kuf)
        S_sqrt = np.asarray(params["f_auto_S_sqrt"])
        rest = Phi - A.T @ np.linalg.solve(np.linalg.cholesky(Kuu), whitened_features(Z))
        mean = 0.5 * X[:, 0] + A.T @ np.asarray(params["f_auto_m"]) + rest @ values[:, 0]
        return mean, K + A.T @ (S_sqrt @ S_sqrt.T - np.eye(3)) @ A
    C = np.diag(np.exp(values[:, 1 + COLUMNS]))
    C[:, :COLUMNS] = np.tril(values[:, 1 : 1 + COLUMNS], -1) + C[:, :COLUMNS]
    return mean, Phi @ C @ C.T @ Phi.T


def guide_of(form):
    options = {"inducing": Z} if form == "inducing" else {"covariance": "chevron", "dense_columns": COLUMNS}
    if form == "relevance":
        options["relevance"] = True
    return sgp.AutoQSGP(model, basis_batch=4, **options)


@pytest.mark.parametrize("form", representative(["inducing", "chevron"], ["chevron"]))
def test_functions_have_the_mean_and_covariance_of_the_dense_gaussian_and_stay_the_same(form):
    guide = guide_of(form)
    params = with_random_values(guide)
    f = guide.sample_functions(jax.random.key(2), params, X, num_samples=DRAWS, num_features=16)["f"]
    draws = np.asarray(f(X_NEW))
    mean, covariance = dense(params, form, X_NEW)
    deviation = np.sqrt(np.diag(covariance))
    assert_allclose(draws.mean(0), mean, atol=5 * np.max(deviation) / np.sqrt(DRAWS))
    products = np.outer(deviation, deviation)
    assert_allclose(np.cov(draws.T) / products, covariance / products, atol=5 * np.sqrt(2 / DRAWS))
    assert f.num_samples == DRAWS
    few = guide.sample_functions(jax.random.key(2), params, X[:2], num_samples=3)["f"]
    assert_allclose(few(X_NEW)[:, 1:3], few(X_NEW[1:3]), rtol=1e-10)
    with pytest.raises(ValueError, match="columns"):
        few(X_NEW[:, :1])


def test_functions_follow_the_draw_of_the_hyperparameters():
    def sampled(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        finite = features.RandomFourier(kernels.SquaredExponential(scale, VARIANCE), RANK, jax.random.key(1))
        f = numpyro.sample("f", sgp.GaussianProcess(finite, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = sgp.AutoQSGP(sampled, basis_batch=4, covariance="chevron")
    params = with_random_values(guide)
    values = np.asarray(params["f_auto_basis"].values).copy()
    values[:, 1] = -40.0  # no variance: a draw is φ(x)ᵀμ with its own lengthscale
    params = guide._with_values(params, "f", params["f_auto_basis"], jnp.asarray(values))
    f = guide.sample_functions(jax.random.key(2), params, X, num_samples=3)["f"]
    scales = np.asarray(f.draws.basis_weights[0][0])
    assert np.unique(scales).size == 3
    for scale, draw in zip(scales, f(X_NEW), strict=True):
        finite = features.RandomFourier(kernels.SquaredExponential(scale, VARIANCE), RANK, jax.random.key(1))
        Phi = np.asarray(finite.features(X_NEW)) / np.sqrt(np.asarray(finite.prior_precision(np.arange(RANK))))
        assert_allclose(draw, Phi @ values[:, 0], rtol=1e-8)


def test_functions_are_drawn_inside_of_a_compiled_program():
    guide = guide_of("chevron")
    params = with_random_values(guide)

    def values(params, X):
        return guide.sample_functions(jax.random.key(2), params, X, num_samples=2)["f"](X_NEW)

    assert_allclose(jax.jit(values)(params, X), values(params, X), rtol=1e-8)


def test_a_process_with_its_mean_in_a_table_is_evaluated_anywhere_and_knows_its_divergence():
    guide = guide_of("inducing")
    params = with_random_values(guide)
    process = sgp.process_posterior(guide, jax.random.key(0), params, X)["f"]
    found = process.posterior(X_NEW)
    mean, covariance = dense(params, "inducing", X_NEW)
    assert_allclose(found.mean, mean, rtol=1e-5)  # the jitter
    assert_allclose(found.covariance(), covariance, rtol=1e-5, atol=1e-6)
    S_sqrt = np.asarray(params["f_auto_S_sqrt"])
    weights = np.asarray(params["f_auto_basis"].values)[:, 0]
    m = np.asarray(params["f_auto_m"])
    kl = oracles.gaussian_kl(m, S_sqrt @ S_sqrt.T, np.eye(3)) + 0.5 * weights @ weights
    assert_allclose(process.kl, kl, rtol=1e-8)


@pytest.mark.parametrize("parametrization", representative([None, "orthogonal", "hybrid", "solve"], [None, "hybrid"]))
def test_log_ratios_are_those_of_the_inducing_variables_with_the_divergence_of_the_rest(parametrization):
    # A mean with a basis of its own is no function of u, and yet a part of the divergence.
    def simple(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel(), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    if parametrization is None:
        guide = guide_of("inducing")
        params = with_random_values(guide)
    else:
        guide = sgp.AutoDecoupledGP(simple, X[:4], Z, parametrization=parametrization)
        params = initial_parameters(guide)
        for name, value in params.items():
            if name.endswith(("_m", "_S_sqrt")):
                params[name] = value + 0.3 * RNG.normal(size=value.shape)
            elif name.endswith("_a"):
                params[name] = dataclasses.replace(value, values=jnp.asarray(RNG.normal(size=4)))
    process = sgp.process_posterior(guide, jax.random.key(0), params, X)["f"]
    at = np.asarray(process.inducing.Z)
    u = guide.posterior(jax.random.key(0), params, at)["f"]
    L = np.linalg.cholesky(np.asarray(kernel()(at, at)) + 1e-6 * VARIANCE * np.eye(len(at)))
    # Of the mean, what is in a table is no part of u.
    m = np.asarray(params["f_auto_m"]) if parametrization is None else np.linalg.solve(L, np.asarray(u.mean))
    R = np.asarray(process.R)
    S, one = R.T @ R, np.eye(len(at))
    epsilon = RNG.normal(size=(5, len(at)))
    v = m + epsilon @ R
    log_q, log_p = (stats.multivariate_normal(*q).logpdf(v) for q in ((m, S), (0 * m, one)))
    rest = np.asarray(process.kl) - oracles.gaussian_kl(m, S, one)
    assert (abs(rest) > 0.01) == (parametrization != "solve")  # what its own basis adds
    assert_allclose([process.log_ratio(e) for e in jnp.asarray(epsilon)], log_q - log_p + rest, rtol=1e-3, atol=1e-3)


def bound(params, relevance):
    """The evidence lower bound with Gaussian noise, dense."""
    values = np.asarray(params["f_auto_basis"].values)
    mean, covariance = dense(params, "chevron", X)
    C = np.diag(np.exp(values[:, 1 + COLUMNS]))
    C[:, :COLUMNS] = np.tril(values[:, 1 : 1 + COLUMNS], -1) + C[:, :COLUMNS]
    prior = np.eye(RANK)
    if relevance:
        scale = np.sqrt(np.asarray(features.RandomFourier(kernel(), RANK, jax.random.key(1)).prior_precision()))
        mean = 0.5 * X[:, 0] + (mean - 0.5 * X[:, 0]) * scale[0]
        covariance, prior = covariance * scale[0] ** 2, np.diag(values[:, 0] ** 2 + np.sum(C**2, axis=1))
    kl = oracles.gaussian_kl(values[:, 0], C @ C.T, prior)
    return -0.5 * np.sum((Y - mean) ** 2 + np.diag(covariance)) / NOISE**2 - kl


@pytest.mark.parametrize("relevance", [False, True])
def test_the_optimal_diagonal_maximises_the_bound_and_leaves_the_dense_columns(relevance):
    guide = guide_of("relevance" if relevance else "chevron")
    before = with_random_values(guide)
    after = guide.with_optimal_diagonal(jax.random.key(0), before, X, noise_scale=NOISE)
    values, old = (np.asarray(params["f_auto_basis"].values) for params in (after, before))
    if not relevance:
        d = np.sqrt(NOISE**2 / (np.sum(whitened_features(X) ** 2, axis=0) + NOISE**2))
        assert_allclose(np.exp(values[COLUMNS:, 1 + COLUMNS]), d[COLUMNS:], rtol=1e-8)
    assert_allclose(values[:COLUMNS], old[:COLUMNS], rtol=0)
    assert_allclose(values[:, : 1 + COLUMNS], old[:, : 1 + COLUMNS], rtol=0)
    best = bound(after, relevance)
    for k in (COLUMNS, RANK - 1):
        for change in (-0.05, 0.05):
            moved = values.copy()
            moved[k, 1 + COLUMNS] += change
            assert bound(guide._with_values(after, "f", after["f_auto_basis"], jnp.asarray(moved)), relevance) < best


@pytest.mark.parametrize("relevance", [False, True])
def test_a_mean_of_given_values_has_the_smallest_weights(relevance):
    guide = sgp.AutoQSGP(model, basis_batch=5, covariance="chevron", dense_columns=1, relevance=relevance)
    before = with_random_values(guide)
    wanted = np.linspace(-1.0, 1.0, len(X_NEW))
    after = guide.with_mean(jax.random.key(0), before, wanted, X_NEW)
    assert_allclose(guide.posterior(jax.random.key(0), after, X_NEW)["f"].mean, wanted, rtol=1e-4)
    old, new = (np.asarray(params["f_auto_basis"].values) for params in (before, after))
    assert_allclose(new[:, 1:], old[:, 1:], rtol=0)
    finite = features.RandomFourier(kernel(), RANK, jax.random.key(1))
    Phi, S = whitened_features(X_NEW), np.ones(RANK)
    if relevance:
        C = np.diag(np.exp(old[:, 2]))
        C[1:, 0] = old[1:, 1]
        Phi, S = np.asarray(finite.features(X_NEW)), 1.0 / (old[:, 0] ** 2 + np.sum(C**2, axis=1))
    # S w of the smallest weights is a combination of the rows of Φ, and they alone give the values.
    residual = wanted - 0.5 * X_NEW[:, 0]
    G = Phi / S @ Phi.T
    dual = np.linalg.solve(G + 1e-6 * np.mean(np.diag(G)) * np.eye(len(G)), residual)
    assert_allclose(new[:, 0], Phi.T @ dual / S, rtol=1e-6, atol=1e-10)


def test_a_mean_of_given_values_is_found_in_single_precision_at_many_inputs_that_are_nearly_the_same():
    guide = guide_of("chevron")
    many = (np.tile(X_NEW, (700, 1)) + 1e-4 * RNG.normal(size=(2800, 2))).astype(np.float32)
    values = np.tile(RNG.normal(size=4), 700).astype(np.float32)
    params = guides.initial_parameters(model, guide, many[:8], values[:8])
    assert params["f_auto_basis"].values.dtype == np.float32
    params = guide.with_mean(jax.random.key(0), params, values, many)
    found = guide.posterior(jax.random.key(0), params, many)["f"].mean
    assert np.sqrt(np.mean((found - values) ** 2)) < 0.01


@pytest.mark.parametrize(
    ("natural", "in_a_box"), [(False, False), (True, False), pytest.param(False, True, marks=pytest.mark.thorough)]
)
def test_it_starts_at_the_posterior_of_an_svgp(natural, in_a_box):
    def dense_model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel(), X, lambda X: 0.5 * X[:, 0]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    inducing = sgp.BoundedInducingPoints.at(Z + 0.1, -5.0, 5.0) if in_a_box else Z + 0.1
    svgp = sgp.AutoSVGP(dense_model, inducing, natural=natural)
    found = guides.arbitrary_parameters(dense_model, svgp, X, Y)
    process = sgp.process_posterior(svgp, jax.random.key(0), found, X)["f"]
    guide = guide_of("inducing")
    params = guide.with_posterior(with_random_values(guide), process)
    q, wanted = (g.posterior(jax.random.key(0), p, X_NEW)["f"] for g, p in ((guide, params), (svgp, found)))
    assert_allclose(q.mean, wanted.mean, rtol=1e-6)
    assert_allclose(q.covariance(), wanted.covariance(), rtol=1e-6, atol=1e-8)
    assert_allclose(q.kl, wanted.kl, rtol=1e-6)
    root = np.asarray(params["f_auto_S_sqrt"])
    assert_allclose(root, np.linalg.cholesky(root @ root.T), rtol=1e-8, atol=1e-10)


def machine(X_, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(features.InducingBasis(kernel(), jnp.asarray(X)), X_))
    with numpyro.plate("data", X_.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def test_the_optimal_diagonal_of_weights_with_a_dense_precision_has_its_diagonal():
    guide = sgp.AutoQSGP(machine, basis_batch=4, covariance="chevron")
    params = guide.with_optimal_diagonal(jax.random.key(0), with_random_values(guide), X, noise_scale=NOISE)
    K = np.asarray(kernel()(X, X))
    d = np.sqrt(NOISE**2 / (np.sum(K**2, axis=0) + NOISE**2 * VARIANCE))
    assert_allclose(np.exp(params["f_auto_basis"].values[:, 1]), d, rtol=1e-5)
    with pytest.raises(ValueError, match="dense prior precision"):
        guide.with_mean(jax.random.key(0), params, Y, X)


def test_an_augmented_variance_is_the_priors_far_from_the_data():
    guide = sgp.AutoQSGP(machine, basis_batch=4, covariance="chevron", relevance=True)
    params = with_random_values(guide)
    at = np.concatenate([X_NEW, [[50.0, 50.0]]])
    q = guide.posterior(jax.random.key(0), params, at)["f"]
    found = guide.augmented_variance(jax.random.key(0), params, at, X, noise_scale=NOISE)
    k = np.asarray(kernel()(at, X))
    wanted = np.asarray(q.variance) + NOISE**2 * VARIANCE**2 / (np.sum(k**2, axis=1) + NOISE**2 * VARIANCE)
    assert_allclose(found, wanted, rtol=1e-8)
    assert_allclose([q.variance[-1], found[-1]], [0.0, VARIANCE], atol=1e-12)


def test_mistakes_are_told():
    guide = guide_of("inducing")
    params = initial_parameters(guide)
    with pytest.raises(ValueError, match="needs a covariance of the weights"):
        guide.with_optimal_diagonal(jax.random.key(0), params, X, noise_scale=NOISE)
    process = sgp.process_posterior(guide, jax.random.key(0), params, X)["f"]
    with pytest.raises(ValueError, match="no weights for a GP site 'g'"):
        guide.with_posterior(params, process, site="g")
    with pytest.raises(ValueError, match="at inducing inputs"):
        guide.with_posterior(params, process)
    with pytest.raises(ValueError, match="needs a covariance of the weights"):
        guide.with_mean(jax.random.key(0), params, Y, X)
    guide = guide_of("chevron")
    params = initial_parameters(guide)
    with pytest.raises(ValueError, match=r"6 values.*Pass fewer"):
        guide.with_mean(jax.random.key(0), params, np.full(6, np.nan), X)
    with pytest.raises(ValueError, match="needs a covariance of inducing variables"):
        guide.with_posterior(params, process)
    with pytest.raises(ValueError, match=r"\(4, 1\).*2 columns"):
        guide.augmented_variance(jax.random.key(0), params, X_NEW[:, :1], X, noise_scale=NOISE)
    with pytest.raises(TypeError, match=r"guide\.posterior"):
        sgp.process_posterior(guide, jax.random.key(0), params, X)


def test_a_mean_is_given_to_a_model_that_looks_at_the_values_of_its_arguments():
    group = np.array([0, 2, 1, 1, 0, 2])
    inputs, values = np.linspace(-1.0, 1.0, 12).reshape(6, 2), np.arange(6.0)

    def means(count):
        def model(X, group, y=None):
            with numpyro.plate("groups", count(group)):
                level = numpyro.sample("level", dist.Normal(0.0, 1.0))
            kernel = sgp.features.RandomFourier(sgp.kernels.SquaredExponential(1.0), 40, jax.random.key(0))
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", dist.Normal(f + level[group], 0.3), obs=y)

        guide = sgp.AutoQSGP(model, basis_batch=4, covariance="chevron")
        params = guides.initial_parameters(model, guide, inputs, group, values)
        return guide.with_mean(jax.random.key(0), params, values, inputs, group)["f_auto_basis"].values[:, 0]

    found = means(lambda group: len(np.unique(group)))
    assert np.abs(found).max() > 0.0
    assert_allclose(found, means(lambda group: 3), rtol=1e-12)
