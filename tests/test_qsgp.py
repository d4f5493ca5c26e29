"""Posteriors over the weights of very many basis functions: against dense Gaussians, by enumeration of all samples."""

import dataclasses
import functools
import itertools

from guides import initial_parameters, loss_at
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
import oracles
import pytest

import numpyro_sgp as sgp
from numpyro_sgp import features, kernels
from numpyro_sgp._internal.curvature import is_quadratic
from numpyro_sgp.losses.concavity import check_concave, dependence
from numpyro_sgp.posteriors.quadruply_stochastic import formulas
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import Change, SampledRows, WeightTable, draw_index

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(3)
N, m, M, K, P = 3, 4, 2, 2, 2
PHI, PHI_P = RNG.normal(size=(N, m)), RNG.normal(size=(P, m))
ROOT = RNG.normal(size=(m, m))
S = ROOT @ ROOT.T + np.eye(m)
MEAN = RNG.normal(size=m)
U, LOG_DIAGONAL = np.tril(RNG.normal(size=(m, K))), 0.3 * RNG.normal(size=m)
U[range(K), range(K)] = np.exp(LOG_DIAGONAL[:K])
D = np.where(np.arange(m) < K, 0.0, np.exp(LOG_DIAGONAL))
C = np.concatenate([U, np.diag(D)[:, K:]], axis=1)
NOISE, COLUMN = 0.3, RNG.normal(size=N)
SAMPLES = np.array(list(itertools.combinations(range(m), M)))


def at_all(fn, samples):
    """`fn(index)` at each sample."""
    return jax.jit(jax.vmap(fn))(jnp.asarray(samples))


def averages(tree):
    return jax.tree.map(lambda leaf: np.mean(leaf, axis=0), tree)


# The estimates.


def test_estimates_of_the_mean_and_its_square_and_their_gradients_average_to_the_dense_ones():
    weights, sample = (
        np.concatenate([MEAN[:, None], U], axis=1),
        formulas.inclusion(m, M),
    )
    L, Kpf = np.linalg.cholesky(np.array([[1.3, 0.4], [0.4, 0.9]])), RNG.normal(size=(P, N))
    cotangents = RNG.normal(size=(2, N, K + 1))

    def estimates(index):
        a = PHI_P @ weights
        w, Phi_p = jnp.asarray(weights)[index], jnp.asarray(PHI_P)[:, index]

        def at(change, controlled):
            residual = formulas.nystrom_residual(L, Kpf, Phi_p, a) if controlled else None
            return formulas.linear_and_square(jnp.asarray(PHI)[:, index], w, change, sample, residual)

        def zero(change):
            return formulas.control_variate(Phi_p, w, change, a, sample)

        def dense_gradient(fn):
            sparse = jax.grad(lambda change: fn(change))(jnp.zeros_like(w))
            return jnp.zeros_like(weights).at[index].add(sparse)

        nothing = jnp.zeros_like(w)
        return {
            controlled: (
                at(nothing, controlled),
                dense_gradient(lambda change, on=controlled: sum(map(jnp.vdot, cotangents, at(change, on)))),
            )
            for controlled in (False, True)
        }, (zero(nothing), dense_gradient(lambda change: jnp.sum(zero(change))))

    found, (control, control_gradient) = at_all(estimates, SAMPLES)
    f = PHI @ weights
    gradient = PHI.T @ (cotangents[0] + 2.0 * f * cotangents[1])
    for values, gradients in averages(found).values():
        assert_allclose(values, (f, f**2), rtol=1e-10)
        assert_allclose(gradients, gradient, rtol=1e-10)
    assert_allclose(np.mean(control, axis=0), 0.0, atol=1e-12)
    assert_allclose(np.mean(control_gradient, axis=0), 0.0, atol=1e-12)
    assert np.std(control) > 0.1


def test_variances_and_divergences_average_to_those_of_the_dense_gaussian():
    sample = formulas.inclusion(m, M)

    def estimates(index):
        Phi, u, d, rho = jnp.asarray(PHI)[:, index], jnp.asarray(U)[index], jnp.asarray(D)[index], LOG_DIAGONAL
        _, squares = formulas.linear_and_square(Phi, u, jnp.zeros_like(u), sample)
        parts = []
        mu, log_diagonal = jnp.asarray(MEAN)[index], jnp.asarray(rho)[index]
        for block in (None, jnp.asarray(S)[index][:, index]):
            mean = formulas.mean_divergence(mu, block, sample)
            parts.append(mean + formulas.chevron_divergence(u, d, log_diagonal, block, sample))
        parts.append(formulas.relevance_divergence(mu**2 + jnp.sum(u**2, axis=-1) + d**2, log_diagonal, sample))
        return formulas.chevron_variance(squares, Phi, d, sample), jnp.stack(parts)

    variance, parts = averages(at_all(estimates, SAMPLES))
    V = C @ C.T
    assert_allclose(variance, np.diag(PHI @ V @ PHI.T), rtol=1e-10)
    log_det = np.linalg.slogdet(S)[1]
    best = np.diag(1.0 / (MEAN**2 + np.diag(V)))  # of all diagonal precisions
    expected = [oracles.gaussian_kl(MEAN, V, np.linalg.inv(prior)) for prior in (np.eye(m), S, best)]
    expected[1] += 0.5 * log_det  # which no block shows
    assert_allclose(parts, expected, rtol=1e-10)


def test_the_diagonal_is_the_stationary_point_of_the_bound():
    squares = np.sum(PHI**2, axis=0)
    d = np.asarray(formulas.optimal_diagonal(squares, np.diag(S), NOISE))
    # d/dd of |Φ diag d|²/σ² + Σ s d² − 2 Σ log d
    assert_allclose(2 * d * squares / NOISE + 2 * np.diag(S) * d - 2 / d, 0.0, atol=1e-10)


def test_the_diagonal_of_a_relevance_vector_machine_is_the_minimum():
    squares, c = np.sum(PHI**2, axis=0), MEAN**2 + 0.1
    d = np.asarray(formulas.relevance_diagonal(squares, c, NOISE))

    def loss(d):  # the terms of −2 ELBO, with s at its best
        return d**2 * squares / NOISE + np.log((c + d**2) / d**2)

    assert np.all(loss(d) < np.minimum(loss(0.99 * d), loss(1.01 * d)))
    assert_allclose(formulas.relevance_diagonal(squares, 0.0 * c, NOISE), 0.0, atol=0.0)


def test_an_augmented_variance_is_that_of_a_basis_function_at_the_input():
    k, prior = COLUMN, 1.3
    v = 1.0 / (1.0 / prior + k @ k / prior**2 / NOISE)  # the weight's prior variance is 1/k(x, x)
    found = formulas.augmented_variance(np.array(0.2), prior, k @ k, NOISE)
    assert_allclose(found, 0.2 + v, rtol=1e-12)


def test_the_bounding_scale_gives_a_bound_and_the_jackknife_is_exact_for_squares():
    sample, scale = formulas.inclusion(m, M), 0.8
    nodes, weights = map(jnp.asarray, oracles.gauss_hermite(60))

    def psi(f, s):
        return jnp.sum(weights * -jnp.abs(1.0 - (f[..., None] + s[..., None] * nodes)), axis=-1)

    def estimates(index):
        Phi, u = jnp.asarray(PHI)[:, index], jnp.asarray(U)[index]
        f, _ = formulas.linear_and_square(Phi, jnp.asarray(MEAN)[index][:, None], jnp.zeros((M, 1)), sample)
        _, squares = formulas.linear_and_square(Phi, u, jnp.zeros_like(u), sample)
        v = formulas.chevron_variance(squares, Phi, jnp.asarray(D)[index], sample)
        halves = [m * Phi[:, k] * jnp.asarray(MEAN)[index][k] for k in range(M)]
        square = formulas.jackknife(f[:, 0] ** 2, halves[0] ** 2, halves[1] ** 2, M / m)
        return psi(f[:, 0], formulas.bounding_scale(v, scale)), square

    bound, square = averages(at_all(estimates, SAMPLES))
    exact = psi(jnp.asarray(PHI @ MEAN), jnp.asarray(np.sqrt(np.diag(PHI @ C @ C.T @ PHI.T))))
    assert np.all(bound < exact)
    assert_allclose(square, (PHI @ MEAN) ** 2, rtol=1e-9)


# Which rows are drawn.


@pytest.mark.parametrize("size", [1000, 40])
def test_drawn_indices_are_distinct_and_uniform(size):
    draw = jax.jit(jax.vmap(functools.partial(draw_index, size=size, number=5)))
    index = np.asarray(draw(jax.random.split(jax.random.key(0), 8000)))
    assert np.all((index >= 0) & (index < size))
    assert np.all(np.diff(np.sort(index, axis=1), axis=1) > 0)
    counts = np.bincount(index.ravel(), minlength=size)
    assert np.all(np.abs(counts - 40000 / size) < 5 * np.sqrt(40000 / size))
    # Pairs: the share of those that are neighbours, which a linear congruence gets wrong.
    near = np.mean(np.abs(index[:, 0] - index[:, 1]) <= size // 20)
    share = 2 * (size // 20) / size
    assert abs(near - share) < 5 * np.sqrt(share / 8000) + 1 / size
    assert_allclose(draw_index(jax.random.key(0), 7, 7), np.arange(7))


# What likelihoods are.


@pytest.mark.parametrize(
    ("likelihood", "expected"),
    [
        (lambda f: dist.Normal(2.0 * f[::-1] + 1.0, 0.3), "quadratic"),
        (lambda f: dist.Normal(0.0, 0.3), "quadratic"),
        (lambda f: dist.Laplace(f, 0.3), "concave"),
        (lambda f: dist.Bernoulli(logits=f - 1.0), "concave"),
        (lambda f: dist.Poisson(3.0 * jnp.exp(f / 2.0)), "concave"),
        (lambda f: dist.Poisson(jnp.exp(f) + 1.0), "unknown"),
        (lambda f: dist.Poisson(jnp.exp(f * f)), "unknown"),
        (lambda f: dist.Normal(f, jnp.exp(f)), "unknown"),
        (lambda f: dist.Normal(f**2, 1.0), "unknown"),
        (lambda f: dist.StudentT(4.0, f, 1.0), "unknown"),
        (lambda f: dist.Bernoulli(probs=jax.nn.sigmoid(f)), "unknown"),
    ],
)
def test_log_densities_are_told_apart_by_how_they_depend_on_the_latent(likelihood, expected):
    f = jnp.zeros(3)
    if is_quadratic(lambda f: likelihood(f).log_prob(1.0), f):
        found = "quadratic"
    else:
        try:
            check_concave("y", *dependence(likelihood, f), ())
        except ValueError:
            found = "unknown"
        else:
            found = "concave"
    assert found == expected
    check_concave("y", *dependence(likelihood, f), ("y",))


# The guide.

X = RNG.uniform(-1.0, 1.0, size=(5, 2))
X_NEW = RNG.uniform(-1.0, 1.0, size=(4, 2))
Z = RNG.uniform(-1.0, 1.0, size=(3, 2))
BASIS = RNG.uniform(-1.0, 1.0, size=(6, 2))
RANK, BATCH = 6, 3
Y5 = RNG.normal(size=5)
KERNELS = {
    "fourier": lambda a, b: features.RandomFourier(kernels.SquaredExponential(a, b), RANK, jax.random.key(0)),
    "inducing": lambda a, b: features.InducingBasis(kernels.SquaredExponential(a, b), BASIS),
    "inducing of fixed numbers": lambda a, b: features.InducingBasis(kernels.SquaredExponential(A, B), BASIS),
    "hilbert": lambda a, b: features.HilbertSpace(kernels.Matern52(a, b), (2, 3), (-2.0, 2.0)),
}
LIKELIHOODS = {
    "normal": lambda f, noise: dist.Normal(f, noise),
    "logistic": lambda f, noise: dist.Bernoulli(logits=3.0 * f),
    "laplace": lambda f, noise: dist.Laplace(f, noise),
    "student_t": lambda f, noise: dist.StudentT(4.0, f, noise),
}
A, B = 0.9, 1.4


@functools.cache
def model_with(name="fourier", likelihood="normal"):
    def model(X, y=None, num_data=None):
        def positive(name, value):
            return numpyro.param(name, np.asarray(value), constraint=constraints.positive)

        kernel = KERNELS[name](positive("a", A), positive("b", B))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, 0.2))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", LIKELIHOODS[likelihood](f, positive("noise", 0.5)), obs=y)

    return model


FORMS = {
    "covariance of inducing variables": {"inducing": Z},
    "with a control variate": {"inducing": Z, "control": X[:2]},
    "with the paper's": {"inducing": Z, "control": X[:2], "control_form": "paper"},
    "mean-field": {"covariance": "chevron"},
    "chevron": {"covariance": "chevron", "dense_columns": 2, "control": X[:2]},
    "relevance": {"covariance": "chevron", "dense_columns": 1, "relevance": True},
    "jackknife": {"inducing": Z, "jackknife": True},
}


def set_up(name, form, likelihood="normal", batch=BATCH):
    """Model, guide, and parameters away from the prior."""
    model = model_with(name, likelihood)
    guide = sgp.AutoQSGP(model, basis_batch=batch, **FORMS[form])
    params = initial_parameters(model, guide, X, y_of(likelihood))
    rng = np.random.default_rng(0)
    table = params["f_auto_basis"]
    values = jnp.asarray(0.5 * rng.normal(size=table.values.shape))
    params["f_auto_basis"] = WeightTable(values, table.control, table.batch, table.dense_columns)
    if "f_auto_S_sqrt" in params:
        params["f_auto_S_sqrt"] = params["f_auto_S_sqrt"] + 0.3 * np.tril(rng.normal(size=(3, 3)))
        params["f_auto_m"] = jnp.asarray(0.5 * rng.normal(size=3))
    return model, guide, params


def y_of(likelihood):
    return (Y5 > 0).astype(float) if likelihood == "logistic" else Y5


def dense_posterior(name, form, params, inputs=X):
    """Mean, covariance and divergence of the posterior that the parameters stand for."""
    kernel = KERNELS[name](float(params["a"]), float(params["b"]))
    Phi, prior = np.asarray(kernel.features(inputs)), np.asarray(kernel.prior_precision())
    values = np.asarray(params["f_auto_basis"].values)
    correlated = prior.ndim == 2
    if form != "relevance" and not correlated:
        Phi, prior = Phi / np.sqrt(prior), np.ones(RANK)
    S = prior if correlated else np.diag(prior)
    mean, kl = Phi @ values[:, 0], 0.5 * values[:, 0] @ S @ values[:, 0]
    if "f_auto_S_sqrt" in params:
        limit = np.asarray(kernel.kernel(Z, Z)) + 1e-6 * B * np.eye(3)
        Kuf, Kff = np.asarray(kernel.kernel(Z, inputs)), np.asarray(kernel.kernel(inputs, inputs))
        L, root = np.linalg.cholesky(limit), np.tril(params["f_auto_S_sqrt"])
        V = L @ root @ root.T @ L.T
        cross = np.linalg.solve(limit, Kuf)
        u = L @ np.asarray(params["f_auto_m"])
        Phi_u = np.asarray(kernel.features(Z)) / (1.0 if correlated else np.sqrt(np.asarray(kernel.prior_precision())))
        mean = cross.T @ u + (Phi - cross.T @ Phi_u) @ values[:, 0]
        covariance = Kff - Kuf.T @ cross + cross.T @ V @ cross
        return mean, covariance, kl + oracles.gaussian_kl(u, V, limit)
    k = FORMS[form].get("dense_columns", 0)
    diagonal = np.exp(values[:, 1 + k])
    root = np.diag(diagonal)
    root[:, :k] = np.tril(values[:, 1 : 1 + k], -1) + root[:, :k]
    V = root @ root.T
    if form == "relevance":
        S = np.diag(1.0 / (values[:, 0] ** 2 + np.diag(V)))
    kl = oracles.gaussian_kl(values[:, 0], V, np.linalg.inv(S))
    if form != "relevance" and correlated:
        kl += 0.5 * np.linalg.slogdet(S)[1]  # a constant, which is left out
    return mean, Phi @ V @ Phi.T, kl


def rows_at(params, index, change):
    table = params["f_auto_basis"]
    tracked = None if table.control is None else table.tracked()
    return SampledRows(table, Change(change, None), table.values[index], index, tracked, [])


@functools.cache
def enumerated(name, form, likelihood):
    """Loss and gradients with all rows of the table, and with each sample of them."""
    model, guide, params = set_up(name, form, likelihood)
    table = params["f_auto_basis"]
    hyper = {key: params[key] for key in ("a", "b", "noise") if key in params}

    def whole(values, hyper):
        moved = WeightTable(values, table.control, table.batch, table.dense_columns)
        return loss_at({**params, **hyper, "f_auto_basis": moved}, model, guide, X, y_of(likelihood))

    def sampled(index):
        def loss(change, hyper):
            rows = rows_at(params, index, change)
            return loss_at({**params, **hyper, "f_auto_basis": rows}, model, guide, X, y_of(likelihood))

        zero = jnp.zeros((len(index), table.values.shape[1]))
        value, (sparse, gradient) = jax.value_and_grad(loss, (0, 1))(zero, hyper)
        return value, jnp.zeros_like(table.values).at[index].add(sparse), gradient

    value, (gradient, hyper_gradient) = jax.jit(jax.value_and_grad(whole, (0, 1)))(table.values, hyper)
    samples = np.array(list(itertools.combinations(range(RANK), BATCH)))
    return params, (value, gradient, hyper_gradient), at_all(sampled, samples)


CASES = [
    ("fourier", "with a control variate"),
    ("fourier", "with the paper's"),
    ("fourier", "chevron"),
    ("fourier", "relevance"),
    ("inducing", "covariance of inducing variables"),
    ("inducing of fixed numbers", "chevron"),
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_with_a_gaussian_likelihood_losses_and_gradients_average_to_those_of_the_dense_bound(name, form):
    params, (value, gradient, hyper_gradient), sampled = enumerated(name, form, "normal")
    mean, covariance, kl = dense_posterior(name, form, params)
    ell = -0.5 * ((Y5 - mean - 0.2) ** 2 + np.diag(covariance)) / 0.25 - 0.5 * np.log(2 * np.pi * 0.25)
    assert_allclose(value, kl - np.sum(ell), rtol=1e-8)
    found = averages(sampled)
    assert_allclose(found[0], value, rtol=1e-8)
    assert np.std(sampled[0]) > 1e-3
    assert_allclose(found[1], gradient, rtol=1e-7, atol=1e-8)
    for key, expected in hyper_gradient.items():
        assert_allclose(found[2][key], expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("form", "likelihood"), [("covariance of inducing variables", "logistic"), ("mean-field", "laplace")]
)
@pytest.mark.thorough
def test_with_another_likelihood_the_loss_bounds_the_dense_one_and_equals_it_with_all_functions(form, likelihood):
    _, (value, _, _), sampled = enumerated("fourier", form, likelihood)
    assert np.mean(sampled[0]) > value + 1e-3
    model, guide, params = set_up("fourier", form, likelihood, batch=RANK)
    width = params["f_auto_basis"].values.shape[1]
    rows = rows_at(params, jnp.arange(RANK), jnp.zeros((RANK, width)))
    exact = loss_at({**params, "f_auto_basis": rows}, model, guide, X, y_of(likelihood))
    assert_allclose(exact, value, rtol=1e-8)


def test_the_jackknife_takes_estimates_from_the_two_halves_of_a_sample():
    index, outcomes = jnp.array([4, 0, 3, 1]), y_of("logistic")
    nodes, weights = oracles.gauss_hermite(60)
    plain, jackknifed = (
        loss_at({**params, "f_auto_basis": rows_at(params, index, jnp.zeros((4, 1)))}, model, guide, X, outcomes)
        for model, guide, params in (
            set_up("fourier", form, "logistic", batch=4) for form in ("covariance of inducing variables", "jackknife")
        )
    )
    _, _, params = set_up("fourier", "jackknife", "logistic")
    table = params["f_auto_basis"]

    def psi(index):
        values = jnp.zeros_like(table.values).at[index].set(RANK / len(index) * table.values[index])
        moved = WeightTable(values, table.control, table.batch, table.dense_columns)
        mean, covariance, _ = dense_posterior("fourier", "jackknife", {**params, "f_auto_basis": moved})
        f = mean + 0.2 + np.sqrt(np.diag(covariance)) * nodes[:, None]
        return np.sum(weights @ -np.logaddexp(0.0, 3.0 * f * (1.0 - 2.0 * outcomes)))

    correction = (1.0 - 4 / RANK) * (psi(index) - 0.5 * (psi(index[:2]) + psi(index[2:])))
    assert abs(correction) > 1e-2
    assert_allclose(plain - jackknifed, correction, rtol=2e-3)  # its quadrature has fewer nodes


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("fourier", "chevron"),
        ("inducing", "covariance of inducing variables"),
        ("inducing of fixed numbers", "chevron"),
        ("hilbert", "relevance"),
    ],
)
def test_predictions_are_those_of_the_dense_posterior_in_blocks(name, form):
    _, guide, params = set_up(name, form, batch=4)
    q = guide.posterior(jax.random.key(0), params, X_NEW)["f"]
    mean, covariance, kl = dense_posterior(name, form, params, X_NEW)
    assert_allclose(q.mean, mean + 0.2, rtol=1e-8)
    assert_allclose(q.variance, np.diag(covariance), rtol=1e-7)
    assert_allclose(q.covariance(), covariance, rtol=1e-6, atol=1e-8)
    if not name.startswith("inducing"):
        assert_allclose(q.kl, kl, rtol=1e-8)


def test_with_inducing_variables_that_are_no_function_values_the_mean_is_in_the_weights_alone():
    model, _, _ = set_up("fourier", "covariance of inducing variables")
    guide = sgp.AutoQSGP(model, basis_batch=BATCH, inducing=sgp.MultiscaleInducing.at(Z))
    params = initial_parameters(model, guide, X, Y5)
    assert "f_auto_m" not in params
    table = params["f_auto_basis"]
    weights = RNG.normal(size=table.size)
    params["f_auto_basis"] = WeightTable(jnp.asarray(weights)[:, None], table.control, table.batch, table.dense_columns)
    kernel = KERNELS["fourier"](float(params["a"]), float(params["b"]))
    Phi = np.asarray(kernel.features(X_NEW)) / np.sqrt(np.asarray(kernel.prior_precision()))
    q = guide.posterior(jax.random.key(0), params, X_NEW)["f"]
    assert_allclose(q.mean, Phi @ weights + 0.2, rtol=1e-8)
    assert_allclose(q.kl, 0.5 * weights @ weights, rtol=1e-8)


def test_inducing_inputs_in_a_box_are_function_values_as_others_are():
    model, _, _ = set_up("fourier", "covariance of inducing variables")
    guides = [
        sgp.AutoQSGP(model, basis_batch=BATCH, inducing=inducing)
        for inducing in (sgp.InducingPoints(jnp.asarray(Z)), sgp.BoundedInducingPoints.at(Z, -2.0, 2.0))
    ]
    m, weights, found = RNG.normal(size=len(Z)), RNG.normal(size=(RANK, 1)), []
    for guide in guides:
        params = initial_parameters(model, guide, X, Y5)
        table = dataclasses.replace(params["f_auto_basis"], values=jnp.asarray(weights))
        params = {**params, "f_auto_m": jnp.asarray(m), "f_auto_basis": table}
        q = guide.posterior(jax.random.key(0), params, X_NEW)["f"]
        process = sgp.process_posterior(guide, jax.random.key(0), params, X_NEW)["f"]
        found.append((q.mean, q.variance, q.kl, process.a, loss_at(params, model, guide, X, Y5)))
    for plain, bounded in zip(*found, strict=True):
        assert_allclose(bounded, plain, rtol=1e-8)


def test_a_basis_made_from_the_rows_of_the_model_is_refused_at_other_rows():
    def model(X, y=None):
        kernel = features.InducingBasis(kernels.SquaredExponential(1.0), X)
        numpyro.sample("y", dist.Normal(numpyro.sample("f", sgp.GaussianProcess(kernel, X)), 0.3), obs=y)

    guide = sgp.AutoQSGP(model, basis_batch=2)
    X = np.linspace(0.0, 1.0, 6)[:, None]
    params = initial_parameters(model, guide, X, X[:, 0])
    with pytest.raises(ValueError, match=r"m = 4 basis functions here and had 6.*fixed inputs"):
        guide.posterior(jax.random.key(0), params, X[:4])
