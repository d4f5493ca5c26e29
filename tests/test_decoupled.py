"""Decoupled posteriors against dense Gaussians over both bases together, and against each other where they coincide."""

import dataclasses
import itertools
import pickle

from decoupled_oracle import (
    GAMMA,
    M_GAMMA,
    Dense,
    Y,
    arbitrary,
    blocks_of,
    coefficients,
    covariance_block,
    decoupled_bound,
    dense_bound,
    dense_posterior,
    explained,
    from_whitened_sites,
)
from grids import representative
from guides import LOOSE, initial_parameters, loss_at
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import oracles
from problems import JITTER, LENGTHSCALE, MEAN, NOISE, VARIANCE, X_NEW, D, M, Model, N, X, Z, converged
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.posteriors import moments
from numpyro_sgp.posteriors.decoupled import formulas as decoupled_formulas
from numpyro_sgp.posteriors.dual import formulas as dual_formulas
from numpyro_sgp.posteriors.sites import TiedSites
from numpyro_sgp.posteriors.whitened import formulas as whitened_formulas

pytestmark = pytest.mark.usefixtures("x64")

frozen = optax.set_to_zero()

# Every way to hold a decoupled posterior.
FORMS = [(kind, natural) for kind in ("orthogonal", "hybrid", "full", "solve") for natural in (False, True)]
IDS = [f"{kind}-{'natural' if natural else 'root'}" for kind, natural in FORMS]
every_form = pytest.mark.parametrize(("kind", "natural"), FORMS, ids=IDS)
# Each mean once, and each covariance with two of them.
SOME_FORMS = [("orthogonal", True), ("hybrid", False), ("full", False), ("solve", True)]
some_forms = pytest.mark.parametrize(("kind", "natural"), representative(FORMS, SOME_FORMS), ids=IDS)
with_inducing_variables = pytest.mark.parametrize(
    ("kind", "natural"), representative([form for form in FORMS if form[0] != "full"], SOME_FORMS[:2] + SOME_FORMS[3:])
)
natural_forms = pytest.mark.parametrize("kind", ["orthogonal", "hybrid", "full", "solve"])


def make(kind, natural, model, gamma=GAMMA, beta=Z, **options):
    return sgp.AutoDecoupledGP(model, gamma, beta, parametrization=kind, natural=natural, **options)


def set_up(kind, natural, likelihood="normal", **options):
    model = Model(likelihood)
    guide = make(kind, natural, model, **options)
    return model, guide, model.y, arbitrary(initial_parameters(model, guide, X, model.y))


# The pure functions.


RNG = np.random.default_rng(0)
VECTOR, ROOT, A_GAMMA = RNG.normal(size=M), np.tril(RNG.normal(size=(M, M))), RNG.normal(size=M_GAMMA)
VECTOR_V, ROOT_V = RNG.normal(size=M_GAMMA), np.tril(RNG.normal(size=(M_GAMMA, M_GAMMA)))
DENSE = Dense(jitter=0.0)
KUF, KGF = np.split(DENSE.Khf(X), [M])
FUNCTION, T = A_GAMMA @ KGF, np.linalg.solve(DENSE.L, DENSE.Kug @ A_GAMMA)
A, KFF = np.linalg.solve(DENSE.L, KUF), np.full(N, VARIANCE)


def pure(kind, natural):
    """Moments, and the dense Gaussian over h."""
    blocks = (jnp.asarray(A), jnp.asarray(KFF))
    make_block = dual_formulas.natural_whitened if natural else whitened_formulas.whitened
    second = ROOT @ ROOT.T if natural else ROOT
    m, S = from_whitened_sites(VECTOR, second) if natural else (VECTOR, ROOT @ ROOT.T)
    q = make_block(jnp.asarray(VECTOR), jnp.asarray(second), *blocks)
    if kind == "orthogonal":
        squared = decoupled_formulas.norm(A_GAMMA, DENSE.Kgg, T)
        ours = decoupled_formulas.orthogonal(q, FUNCTION, T, squared)
    elif kind == "hybrid":
        squared = decoupled_formulas.norm(A_GAMMA, DENSE.Kgg, None)
        ours = decoupled_formulas.hybrid(q, jnp.asarray(m), FUNCTION, T, squared)
    else:
        L_C = np.linalg.cholesky(DENSE.C)
        A_v = np.linalg.solve(L_C, KGF - DENSE.P[M:] @ KUF)
        q_v = whitened_formulas.whitened(*map(jnp.asarray, (VECTOR_V, ROOT_V, A_v, KFF)))
        ours = decoupled_formulas.solve(q, q_v, jnp.asarray(KFF))
        embed = np.concatenate([np.zeros((M, M_GAMMA)), L_C])
        covariance = DENSE.P @ (DENSE.L @ S @ DENSE.L.T) @ DENSE.P.T + embed @ ROOT_V @ ROOT_V.T @ embed.T
        return ours, (DENSE.P @ DENSE.L @ m + embed @ VECTOR_V, covariance)
    mean, covariance = DENSE.whitened(m, S)
    return ours, (mean + DENSE.shift(kind, A_GAMMA), covariance)


@with_inducing_variables
def test_marginals_and_divergence_are_those_of_the_dense_gaussian_over_both_bases(kind, natural):
    q, q_h = pure(kind, natural)
    mean, covariance = DENSE.conditional(q_h)
    assert_allclose(q.mean, mean, rtol=1e-8, atol=1e-9)
    assert_allclose(q.variance, np.diag(covariance), rtol=1e-8)
    assert_allclose(q.kl, oracles.gaussian_kl(*q_h, DENSE.Khh), rtol=1e-8)
    roots = oracles.se(X, X, LENGTHSCALE, VARIANCE) - q.covariance.A.T @ q.covariance.A
    if q.covariance.T is not None:
        roots = roots + q.covariance.T.T @ q.covariance.T
    assert_allclose(roots, covariance, rtol=1e-8, atol=1e-9)


def test_hybrid_and_orthogonal_describe_the_same_posterior_with_the_mean_shifted():
    blocks = jnp.asarray(A), jnp.asarray(KFF)
    first = whitened_formulas.whitened(jnp.asarray(VECTOR), jnp.asarray(ROOT), *blocks)
    first = decoupled_formulas.orthogonal(first, FUNCTION, T, decoupled_formulas.norm(A_GAMMA, DENSE.Kgg, T))
    m = jnp.asarray(VECTOR - T)
    second = whitened_formulas.whitened(m, jnp.asarray(ROOT), *blocks)
    second = decoupled_formulas.hybrid(second, m, FUNCTION, T, decoupled_formulas.norm(A_GAMMA, DENSE.Kgg, None))
    for ours, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert_allclose(ours, other, rtol=1e-9, atol=1e-10)


def test_full_with_one_basis_for_mean_and_covariance_is_the_sparse_variational_posterior():
    m = jnp.asarray(VECTOR)
    q = dual_formulas.natural_whitened(jnp.zeros(M), *map(jnp.asarray, (ROOT @ ROOT.T, A, KFF)))
    q = q._replace(mean=A.T @ m, kl=q.kl + 0.5 * m @ m)
    S_sqrt = np.linalg.cholesky(np.linalg.inv(np.eye(M) + ROOT @ ROOT.T))
    svgp = whitened_formulas.whitened(*map(jnp.asarray, (VECTOR, S_sqrt, A, KFF)))
    for ours, other in zip(q[:3], svgp[:3], strict=True):
        assert_allclose(ours, other, rtol=1e-8)


# The squared norm from some of its rows.


def norms(values, index, projected):
    """The exact squared norm and its estimate from the rows at `index`, as functions of everything they depend on."""
    kernel = sgp.kernels.SquaredExponential(values["lengthscale"], values["variance"])
    beta, gamma = sgp.InducingPoints(values["beta"]), sgp.InducingPoints(values["gamma"])
    a, span = values["a"], None
    t = None
    if projected:
        L = moments.project(beta, kernel, gamma.Z, JITTER).L
        t, fixed = decoupled_formulas.mean_projected(kernel, L, beta, gamma, jnp.stack([a, jax.lax.stop_gradient(a)]))
        span = decoupled_formulas.Span(beta, L, fixed)
    if index is None:
        return decoupled_formulas.norm(a, gamma.Kuu(kernel), t)
    return decoupled_formulas.norm_from_rows(a, index, kernel, gamma, span)


VALUES = {"a": A_GAMMA, "beta": Z, "gamma": GAMMA, "lengthscale": LENGTHSCALE, "variance": np.asarray(VARIANCE)}
SUBSETS = np.array(list(itertools.combinations(range(M_GAMMA), 2)))


@pytest.mark.parametrize("projected", representative([False, True], [False]))
@pytest.mark.thorough
def test_the_estimate_from_rows_averages_to_the_norm_and_its_gradients_to_those_of_the_norm(projected):
    values = {name: jnp.asarray(value) for name, value in VALUES.items()}
    exact = jax.value_and_grad(norms)(values, None, projected)
    estimates = jax.vmap(lambda index: jax.value_and_grad(norms)(values, index, projected))(jnp.asarray(SUBSETS))
    for ours, expected in zip(jax.tree.leaves(estimates), jax.tree.leaves(exact), strict=True):
        assert np.ptp(np.asarray(ours), axis=0).max() > 1e-3 or not np.any(expected)  # one estimate is not another
        assert_allclose(np.mean(ours, axis=0), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
def test_only_the_coefficients_of_sampled_rows_have_a_gradient():
    values = {name: jnp.asarray(value) for name, value in VALUES.items()}
    gradient = jax.grad(norms)(values, jnp.array([0, 2]), True)["a"]
    assert_allclose(gradient, M_GAMMA / 2 * 2.0 * (DENSE.C @ A_GAMMA) * [1, 0, 1, 0], rtol=1e-4)  # C without jitter


@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_the_norm_by_blocks_of_rows_is_the_norm(size):
    for given in (None, jnp.stack([jnp.asarray(T), 2.0 * jnp.asarray(T)])):
        a = jnp.stack([jnp.asarray(A_GAMMA), 2.0 * jnp.asarray(A_GAMMA)])
        ours = decoupled_formulas.norm_by_blocks(a, lambda index: jnp.asarray(DENSE.Kgg)[index], size, given)
        assert_allclose(ours, decoupled_formulas.norm(a, jnp.asarray(DENSE.Kgg), given), rtol=1e-10)


@pytest.mark.parametrize("kind", representative(["orthogonal", "full"], ["full"]))
@pytest.mark.exhaustive
def test_the_loss_with_sampled_rows_takes_the_values_of_the_subsets_and_predictions_are_exact(kind):
    model, exact, y, params = set_up(kind, False)
    guide = make(kind, False, model, kl_rows=3)
    losses = jax.vmap(lambda key: loss_at(params, model, guide, X, y, key=key))(jax.random.split(jax.random.key(3), 60))
    distinct = np.unique(np.round(losses, 10))
    assert len(distinct) == M_GAMMA  # subsets of three
    assert_allclose(np.mean(distinct), loss_at(params, model, exact, X, y), rtol=1e-8)
    key = jax.random.key(1)
    assert_allclose(guide.posterior(key, params, X)["f"].kl, exact.posterior(key, params, X)["f"].kl, rtol=1e-10)
    draws = Predictive(model, guide=guide, params=params, num_samples=3)(key, X_NEW)
    assert draws["y"].shape == (3, len(X_NEW))
    assert np.isfinite(draws["y"]).all()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Nugget:
    """A kernel whose variances are more than its covariances at equal inputs."""

    def __call__(self, X, other=None):
        kernel = sgp.kernels.SquaredExponential(0.9)
        return kernel(X) + 0.5 if other is None else kernel(X, other)


@pytest.mark.thorough
def test_rows_and_blocks_know_the_variances_of_a_kernel():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(Nugget(), X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    exact = make("orthogonal", False, model)
    params = arbitrary(initial_parameters(model, exact, X, Y))
    guide = make("orthogonal", False, model, kl_rows=M_GAMMA - 1)
    expected = loss_at(params, model, exact, X, Y)
    losses = jax.vmap(lambda key: loss_at(params, model, guide, X, Y, key=key))(jax.random.split(jax.random.key(3), 60))
    assert_allclose(np.mean(np.unique(np.round(losses, 10))), expected, rtol=1e-8)
    key = jax.random.key(1)
    assert_allclose(guide.posterior(key, params, X)["f"].kl, exact.posterior(key, params, X)["f"].kl, rtol=1e-10)


# The guide.


@pytest.mark.parametrize("likelihood", ["normal", "student_t"])
@every_form
def test_the_loss_is_minus_the_dense_bound(kind, natural, likelihood):
    model, guide, y, params = set_up(kind, natural, likelihood)
    dense = Dense(kind=kind)
    q_h = dense_posterior(kind, params, dense)
    assert_allclose(loss_at(params, model, guide, X, y, loss=LOOSE), -dense_bound(model, q_h, dense, y), rtol=1e-8)


@pytest.mark.parametrize("kind", ["orthogonal", "hybrid", "full", "solve"])
def test_at_no_rows_there_are_no_marginals(kind):
    _, guide, _, params = set_up(kind, False)

    def marginals():
        q = guide.posterior(jax.random.key(1), params, X_NEW[:0])["f"]
        return q.mean, q.variance

    assert [each.shape for each in jax.eval_shape(marginals)] == [(0,), (0,)]


@some_forms
def test_the_posterior_at_new_inputs_is_the_dense_conditional_after_pickling_too(kind, natural):
    _, guide, _, params = set_up(kind, natural)
    guide, params = pickle.loads(pickle.dumps((guide, params)))
    dense = Dense(kind=kind)
    q_h = dense_posterior(kind, params, dense)
    mean, covariance = dense.conditional(q_h, X_NEW)
    q = guide.posterior(jax.random.key(1), params, X_NEW)["f"]
    assert_allclose(q.mean, mean + MEAN, rtol=1e-7)
    assert_allclose(q.variance, np.diag(covariance), rtol=1e-7)
    assert_allclose(q.covariance(), covariance, rtol=1e-7, atol=1e-7)
    assert_allclose(q.kl, oracles.gaussian_kl(*q_h, dense.Khh), rtol=1e-7)
    num = 20_000
    draws = q.sample(jax.random.key(2), (num,))
    error = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / num)
    assert np.all(np.abs(np.cov(draws.T) - covariance) < 5.0 * error + 2.0 * JITTER)
    assert np.all(np.abs(np.mean(draws, axis=0) - q.mean) < 5.0 * np.sqrt(np.diag(covariance) / num))


@some_forms
def test_a_guide_starts_at_or_near_the_prior(kind, natural):
    model = Model()
    guide = make(kind, natural, model)
    q = guide.posterior(jax.random.key(1), initial_parameters(model, guide, X, model.y), X)["f"]
    near = kind == "full" and not natural  # B = 0 would be a stationary point
    assert_allclose(q.kl, 0.0, atol=1e-3 if near else 1e-10)
    assert_allclose(q.variance, VARIANCE, rtol=1e-2 if near else 1e-10)


@pytest.mark.thorough
@some_forms
def test_the_gradient_of_hyperparameters_is_that_of_the_dense_bound(kind, natural):
    model, guide, y, params = set_up(kind, natural, "student_t")

    def dense(lengthscale, variance):
        prior = Dense(lengthscale=lengthscale, variance=variance, kind=kind)
        return -dense_bound(model, dense_posterior(kind, params, prior), prior, y)

    theta = {key: params[key] for key in ("lengthscale", "variance")}
    gradient = jax.grad(lambda theta: loss_at({**params, **theta}, model, guide, X, y))(theta)
    expected = oracles.derivative(lambda t: dense(LENGTHSCALE + t * np.array([0.0, 1.0]), VARIANCE))
    assert_allclose(gradient["lengthscale"][1], expected, rtol=1e-7)
    expected = oracles.derivative(lambda t: dense(LENGTHSCALE, VARIANCE + t))
    assert_allclose(gradient["variance"], expected, rtol=1e-7)


@with_inducing_variables
def test_without_a_mean_basis_it_is_the_sparse_variational_posterior_exactly(kind, natural):
    model = Model("poisson")
    svgp = sgp.AutoSVGP(model, Z, natural=natural)
    params = arbitrary(initial_parameters(model, svgp, X, model.y))
    guide = make(kind, natural, model, gamma=None)
    assert initial_parameters(model, guide, X, model.y).keys() == params.keys()
    optim = sgp.NaturalGradient(0.5) if natural else optax.adam(1e-2)
    ends = []
    for each in (guide, svgp):
        svi = SVI(model, each, optim, sgp.QuadratureELBO())
        result = svi.run(jax.random.key(0), 3, X, model.y, init_params=params, progress_bar=False)
        ends.append((result.losses, result.params))
    for ours, expected in zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True):
        assert_allclose(ours, expected, rtol=1e-12)


@with_inducing_variables
def test_it_starts_where_a_fitted_sparse_variational_posterior_ended(kind, natural):
    model = Model("poisson")
    svgp = sgp.AutoSVGP(model, Z, natural=natural)
    params = arbitrary(initial_parameters(model, svgp, X, model.y))
    svi = SVI(model, make(kind, natural, model), optax.sgd(0.0), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, model.y, init_params=params)
    assert_allclose(svi.evaluate(state, X, model.y), loss_at(params, model, svgp, X, model.y), rtol=1e-10)


# A Gaussian likelihood with fixed hyperparameters, where the optimum is known.


def regression(X, y=None):
    kernel = sgp.kernels.SquaredExponential(jnp.asarray(LENGTHSCALE), VARIANCE)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, MEAN, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def solve_bound(dense):
    """The optimum over two Gaussian blocks: the mean of both, each block's own log-determinant."""
    A_u = np.linalg.solve(dense.L, dense.Khf(X)[:M])
    L_C = np.linalg.cholesky(dense.C)
    A_v = np.linalg.solve(L_C, dense.Khf(X)[M:] - dense.P[M:] @ dense.Khf(X)[:M])
    log_determinants = sum(np.linalg.slogdet(np.eye(len(a)) + a @ a.T / NOISE**2)[1] for a in (A_u, A_v))
    Q, r = A_u.T @ A_u + A_v.T @ A_v, Y - MEAN
    quadratic = r @ np.linalg.solve(Q + NOISE**2 * np.eye(N), r)
    trace = np.sum(VARIANCE - np.diag(Q)) / NOISE**2
    return -0.5 * (quadratic + log_determinants + N * np.log(2.0 * np.pi * NOISE**2) + trace)


def optimum(kind):
    dense = Dense(kind=kind)
    if kind == "solve":
        return solve_bound(dense)
    Q_beta = explained(*blocks_of(Z))
    Kaa, Kaf = (dense.Kgg, dense.Khf(X)[M:]) if kind == "full" else (dense.Khh, dense.Khf(X))
    return decoupled_bound(explained(Kaa, Kaf), Q_beta)


def minimised(guide, optim=None):
    """SVI at the end of a quasi-Newton minimisation."""
    svi = SVI(regression, guide, optim or numpyro.optim.Minimize(), sgp.QuadratureELBO(3, bound="titsias"))
    state = svi.init(jax.random.key(0), X, Y)
    for _ in range(3):  # a line search gives up early; a restart goes on
        state, _ = jax.jit(svi.update)(state, X, Y)
    return svi, state


@pytest.mark.parametrize("kind", representative(["orthogonal", "hybrid", "full", "solve"], ["orthogonal", "full"]))
@pytest.mark.thorough
def test_training_reaches_the_collapsed_decoupled_bound(kind):
    svi, state = minimised(make(kind, False, regression))
    assert_allclose(-svi.evaluate(state, X, Y), optimum(kind), rtol=1e-7)


def test_the_orthogonal_optimum_lies_between_titsias_bounds_with_the_covariance_basis_and_with_both():
    both = oracles.titsias_bound(*blocks_of(np.concatenate([Z, GAMMA])), KFF, Y - MEAN, NOISE)
    alone = oracles.titsias_bound(*blocks_of(Z), KFF, Y - MEAN, NOISE)
    assert alone + 1e-3 < optimum("orthogonal") < both - 1e-3
    assert optimum("orthogonal") < optimum("solve") < both


@pytest.mark.exhaustive
def test_without_a_covariance_basis_the_mean_is_kernel_ridge_regression():
    guide = make("full", False, regression, gamma=X, beta=None)
    svi, state = minimised(guide)
    q = guide.posterior(jax.random.key(1), svi.get_params(state), X_NEW)["f"]
    K, K_new = (oracles.se(X, inputs, LENGTHSCALE, VARIANCE) for inputs in (X, X_NEW))
    assert_allclose(q.mean - MEAN, K_new.T @ np.linalg.solve(K + NOISE**2 * np.eye(N), Y - MEAN), rtol=1e-5)
    assert_allclose(q.covariance(), oracles.se(X_NEW, X_NEW, LENGTHSCALE, VARIANCE), rtol=1e-12)
    expected = decoupled_bound(K, np.zeros((N, N)))
    assert_allclose(-svi.evaluate(state, X, Y), expected, rtol=1e-8)


# Natural steps.


def gradients(kind, params, dense, model, y):
    """α_n and β_n, the derivatives of the expected log-likelihood at the marginals of the whole posterior."""
    mean, covariance = dense.conditional(dense_posterior(kind, params, dense))
    alpha, by_variance = oracles.expectation_gradients(model.log_density(y), [mean + MEAN], [np.diag(covariance)])
    return alpha[0], -2.0 * by_variance[0]


def step(model, guide, params, optim, y):
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, y)
    state = state._replace(optim_state=svi.optim.init({**svi.optim.get_params(state.optim_state), **own_of(params)}))
    state, _ = jax.jit(svi.update)(state, X, y)
    assert sgp.num_refused(state) == 0
    return svi.get_params(state)


def own_of(params):
    return {name: value for name, value in params.items() if name.startswith("f_auto_")}


@natural_forms
def test_a_full_natural_step_leads_to_the_targets_at_the_dense_gradients_with_the_block_s_own_mean(kind):
    model, guide, y, params = set_up(kind, True, "student_t")
    new = step(model, guide, params, sgp.NaturalGradient(1.0, frozen, floor=None), y)
    dense = Dense(kind=kind)
    alpha, beta = gradients(kind, params, dense, model, y)
    Kuf = dense.Khf(X)[:M]
    A = np.linalg.solve(dense.L, Kuf)
    if kind == "full":
        own_mean, shift = np.zeros(N), None
    else:
        own_mean = A.T @ covariance_block({"sites": params["f_auto_sites"]})[0]
        a = None if kind == "solve" else coefficients(kind, {k[7:]: v for k, v in params.items()}, dense)
        shift = np.linalg.solve(dense.L, dense.Kug @ a) if kind == "hybrid" else 0.0
    assert_allclose(new["f_auto_sites"].Lambda2, (A * beta) @ A.T, rtol=1e-7, atol=1e-8)
    if kind != "full":
        assert_allclose(new["f_auto_sites"].lambda1, A @ (alpha + beta * own_mean) - shift, rtol=1e-7, atol=1e-8)
    if kind == "solve":
        A_v = np.linalg.solve(np.linalg.cholesky(dense.C), dense.Khf(X)[M:] - dense.P[M:] @ Kuf)
        own_mean = A_v.T @ covariance_block({"mean_sites": params["f_auto_mean_sites"]}, "mean_")[0]
        assert_allclose(new["f_auto_mean_sites"].Lambda2, (A_v * beta) @ A_v.T, rtol=1e-7, atol=1e-8)
        expected = A_v @ (alpha + beta * own_mean)
        assert_allclose(new["f_auto_mean_sites"].lambda1, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", representative(["orthogonal", "hybrid"], ["orthogonal"]))
def test_one_natural_step_at_the_optimal_coefficients_is_the_collapsed_bound_from_any_start(kind):
    svi, state = minimised(make(kind, False, regression))
    a = svi.get_params(state)["f_auto_a"]
    guide = make(kind, True, regression)
    params = arbitrary(initial_parameters(regression, guide, X, Y))
    new = step(regression, guide, {**params, "f_auto_a": a}, sgp.NaturalGradient(1.0, frozen), Y)
    assert_allclose(-loss_at(new, regression, guide, X, Y, loss=LOOSE), optimum(kind), rtol=1e-7)


@pytest.mark.parametrize(
    "kind", representative(["orthogonal", "full"], ["orthogonal"])
)  # hybrid is too badly conditioned for Adam
def test_natural_steps_with_adam_on_the_coefficients_reach_the_optimum(kind):
    guide = make(kind, True, regression)
    others = optax.adam(optax.exponential_decay(0.1, 100, 0.6))
    svi = SVI(regression, guide, sgp.NaturalGradient(0.5, others), sgp.QuadratureELBO(num_nodes=3, bound="titsias"))
    state = converged(svi, svi.init(jax.random.key(0), X, Y), 1500, X, Y)
    assert_allclose(-svi.evaluate(state, X, Y), optimum(kind), rtol=1e-4)


@pytest.mark.exhaustive
def test_natural_steps_on_both_blocks_reach_the_optimum_together_and_faster_in_turn():
    guide, gap = make("solve", True, regression), {}
    for name, optim, steps in (
        ("together", sgp.NaturalGradient(0.5, frozen), 20),
        ("long", sgp.NaturalGradient(0.5, frozen), 600),
        ("in turn", sgp.NaturalGradient(1.0, frozen, in_turn=True), 20),
        ("in turn, long", sgp.NaturalGradient(1.0, frozen, in_turn=True, m_steps=0), 300),
    ):
        svi = SVI(regression, guide, optim, sgp.QuadratureELBO(num_nodes=3, bound="titsias"))
        state = converged(svi, svi.init(jax.random.key(0), X, Y), steps, X, Y)
        gap[name] = optimum("solve") + svi.evaluate(state, X, Y)
        assert sgp.num_refused(state) == 0
    assert 0.0 < gap["in turn"] < 0.5 * gap["together"]
    assert_allclose([gap["long"], gap["in turn, long"]], 0.0, atol=1e-7)


@pytest.mark.exhaustive
def test_steps_in_turn_are_steps_one_block_after_the_other():
    guide = make("solve", True, regression)
    params = arbitrary(initial_parameters(regression, guide, X, Y))
    in_turn = step(regression, guide, params, sgp.NaturalGradient(0.7, frozen, in_turn=True), Y)
    own = own_of(params)
    names = [name for name in own if isinstance(own[name], TiedSites)]
    for name in sorted(names):  # as a dict of parameters comes out of a traced function
        moved = step(regression, guide, own, sgp.NaturalGradient(0.7, frozen), Y)[name]
        own = {**own, name: moved}
    for name in names:
        for ours, expected in zip(jax.tree.leaves(in_turn[name]), jax.tree.leaves(own[name]), strict=True):
            assert_allclose(ours, expected, rtol=1e-9)


# Models.


@some_forms
@pytest.mark.thorough
def test_a_batch_of_kernels_gives_each_latent_s_posterior(kind, natural):
    lengthscales, variances = np.array([[0.5], [1.0], [2.0]]), np.array([0.3, 1.0, 2.0])
    C = len(variances)

    def model(X, y, c=slice(None)):
        kernel = sgp.kernels.SquaredExponential(lengthscales[c], variances[c])
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f.T if f.ndim > 1 else f, NOISE).to_event(f.ndim - 1), obs=y)

    outcomes = RNG.normal(size=(N, C))
    guide = make(kind, natural, model, **({} if kind == "solve" else {"kl_rows": M_GAMMA}))
    params = arbitrary(initial_parameters(model, guide, X, outcomes))
    q = guide.posterior(jax.random.key(0), params, X, outcomes)["f"]
    process = sgp.process_posterior(guide, jax.random.key(0), params, X, outcomes)["f"]
    assert_allclose(process.posterior(X).mean, q.mean, rtol=1e-7)
    for c in range(C):
        single = {
            name: value if name.endswith(("latents", "inducing")) else jax.tree.map(lambda x, c=c: x[c], value)
            for name, value in params.items()
        }
        alone = guide.posterior(jax.random.key(0), single, X, outcomes[:, c], c)["f"]
        assert_allclose(q.mean[c], alone.mean, rtol=1e-9)
        assert_allclose(q.covariance()[c], alone.covariance(), rtol=1e-9, atol=1e-11)
        assert_allclose(q.kl[c], alone.kl, rtol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "kl_rows"), [("orthogonal", 2), ("solve", None)])
def test_two_sites_a_plate_and_sampled_hyperparameters_train_and_predict(kind, kl_rows):
    def model(X, y=None, num_data=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("class", 3):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern52(0.7), X[:, :1]))
        with (
            numpyro.plate("outputs", 3, dim=-2),
            numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]),
        ):
            numpyro.sample("y", dist.Normal(f, jnp.exp(0.1 * g)), obs=y)

    outcomes = RNG.normal(size=(3, N))
    bases = {"f": GAMMA, "g": GAMMA[:3, :1]}, {"f": Z, "g": Z[:2, :1]}
    guide = sgp.AutoDecoupledGP(model, *bases, parametrization=kind, natural=True, kl_rows=kl_rows, base=AutoNormal)
    svi = SVI(model, guide, sgp.NaturalGradient(0.2), sgp.QuadratureELBO(num_nodes=5))
    result = svi.run(jax.random.key(0), 30, X[:3], outcomes[:, :3], N, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert sgp.num_refused(result.state) == 0
    draws = Predictive(model, guide=guide, params=result.params, num_samples=5)(jax.random.key(1), X_NEW)
    assert draws["y"].shape == (5, 3, len(X_NEW))
    again = guide.sample_posterior(jax.random.key(1), result.params, X_NEW, sample_shape=(5,))
    assert again["f"].shape == (5, 3, len(X_NEW))
    assert np.isfinite(again["f"]).all()


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "natural"), representative(SOME_FORMS, SOME_FORMS[:2]))
def test_losses_and_updates_on_minibatches_average_to_those_on_all_rows(kind, natural):
    model, guide, y, params = set_up(kind, natural, "student_t")
    optim = sgp.NaturalGradient(0.3, optax.sgd(1e-3)) if natural else optax.sgd(1e-3)
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, y)
    current = {**svi.optim.get_params(state.optim_state), **own_of(params)}
    state = state._replace(optim_state=svi.optim.init(current))

    def update(X, y):
        new, loss = svi.update(state, X, y, N)
        return loss, {k: v for k, v in svi.optim.get_params(new.optim_state).items() if k != "auto_latents"}

    batches = np.array(list(itertools.combinations(range(N), 3)))
    losses, steps = jax.jit(
        lambda: jax.lax.map(lambda rows: update(jnp.asarray(X)[rows], jnp.asarray(y)[rows]), batches)
    )()
    full = jax.jit(update)(X, y)
    average = jax.tree.map(lambda x: np.mean(x, axis=0), (losses, steps))
    for got, expected in zip(jax.tree.leaves(average), jax.tree.leaves(full), strict=True):
        assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "natural"), [("full", False), ("solve", True)])
@pytest.mark.exhaustive
def test_float32_stays_float32(kind, natural):
    model = Model(jitter=1e-4)
    X32, y32, Z32, gamma32 = (jnp.asarray(value, np.float32) for value in (X, model.y, Z, GAMMA))
    guide = make(kind, natural, model, gamma=gamma32, beta=Z32)
    optim = sgp.NaturalGradient(0.5, optax.adam(1e-2)) if natural else optax.adam(1e-2)
    result = SVI(model, guide, optim, sgp.QuadratureELBO()).run(jax.random.key(0), 3, X32, y32, progress_bar=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(result.params)} == {np.dtype(np.float32)}
    assert result.losses.dtype == np.float32
    lengthscale, variance, noise = (np.asarray(result.params[k], float) for k in ("lengthscale", "variance", "noise"))
    dense = Dense(lengthscale=lengthscale, variance=variance, jitter=1e-4, kind=kind)
    bound = dense_bound(model, dense_posterior(kind, result.params, dense), dense, model.y, noise)
    # The rounding of float32, 6e-8, through covariances of condition 1e3.
    assert_allclose(loss_at(result.params, model, guide, X32, y32, loss=LOOSE), -bound, rtol=2e-5)


@pytest.mark.thorough
def test_trained_bases_have_the_gradient_of_the_dense_bound():
    model, guide, y, params = set_up("orthogonal", False, "student_t", learn_inducing=True)
    rng = np.random.default_rng(4)
    directions = rng.normal(size=Z.shape), rng.normal(size=GAMMA.shape)

    def loss(t):
        bases = (sgp.InducingPoints(z + t * d) for z, d in zip((Z, GAMMA), directions, strict=True))
        inducing = dict(zip(("f_auto_inducing", "f_auto_mean_inducing"), bases, strict=True))
        return loss_at({**params, **inducing}, model, guide, X, y)

    def dense(t):
        prior = Dense(Z + t * directions[0], GAMMA + t * directions[1])
        return -dense_bound(model, dense_posterior("orthogonal", params, prior), prior, y)

    assert_allclose(jax.grad(loss)(0.0), oracles.derivative(dense, 2e-3), rtol=1e-7)


def test_bases_that_are_not_trained_and_the_preconditioner_have_no_gradient():
    model, guide, y, params = set_up("orthogonal", False)
    fixed = ("f_auto_inducing", "f_auto_mean_inducing", "f_auto_a")
    gradient = jax.grad(lambda moved: loss_at({**params, **moved}, model, guide, X, y))({k: params[k] for k in fixed})
    a = gradient.pop("f_auto_a")
    assert np.all(np.abs(a.values) > 1e-6)
    for leaf in jax.tree.leaves((gradient, a.residual)):
        assert_allclose(leaf, 0.0, atol=0.0)


def test_the_preconditioner_is_the_share_of_variance_that_the_covariance_basis_leaves():
    params = initial_parameters(regression, make("orthogonal", False, regression), X, Y)
    assert_allclose(params["f_auto_a"].residual, np.diag(Dense().C) / VARIANCE, rtol=1e-8)


def test_a_regression_starts_the_covariance_block():
    kernel = sgp.kernels.SquaredExponential(jnp.asarray(LENGTHSCALE), VARIANCE)
    site = sgp.SparseGPRegression(kernel, X, Z, NOISE, MEAN, jitter=JITTER)
    for natural in (False, True):
        guide = make("orthogonal", natural, regression, init_from=site.condition(Y))
        params = initial_parameters(regression, guide, X, Y)
        expected = oracles.titsias_bound(*blocks_of(Z), KFF, Y - MEAN, NOISE)
        assert_allclose(-loss_at(params, regression, guide, X, Y, loss=LOOSE), expected, rtol=1e-7)


# Mistakes, and advice.


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((GAMMA, Z), {"parametrization": "orthogonl"}, "`parametrization` must be one of"),
        ((None, Z), {"parametrization": "full"}, "`mean_inducing=None` was given with"),
        ((GAMMA, None), {}, "`cov_inducing=None` was given with `parametrization='orthogonal'`"),
        ((GAMMA, None), {"parametrization": "solve"}, "needs a covariance basis"),
        ((GAMMA, None), {"parametrization": "full", "natural": True}, "`cov_inducing=None` was given with `natural"),
        ((GAMMA, Z), {"kl_rows": 0}, "`kl_rows` must be a positive integer, got 0"),
        ((GAMMA, Z), {"kl_rows": 2.5}, "`kl_rows` must be a positive integer"),
        ((GAMMA, Z), {"parametrization": "solve", "kl_rows": 3}, "factorises the matrix"),
    ],
)
def test_mistakes_in_the_options_raise_when_the_guide_is_made(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        sgp.AutoDecoupledGP(regression, *arguments, **options)


@pytest.mark.parametrize(
    ("bases", "message"),
    [
        ((GAMMA[:, :1], Z), "`mean_inducing` has 1 columns"),
        ((GAMMA, Z[:, :1]), "`cov_inducing` has 1 columns"),
        ((GAMMA[:, 0], Z), "`mean_inducing` must have shape"),
        ((GAMMA, Z[:0]), "`cov_inducing` must have shape"),
        ((GAMMA, np.full((3, D), np.nan)), "`cov_inducing` of shape .* contains NaN"),
        (({"f": GAMMA, "h": GAMMA}, Z), "`mean_inducing` names"),
        ((GAMMA, {"h": Z}), "`cov_inducing` has entries for"),
    ],
)
def test_mistakes_in_the_bases_raise_when_the_guide_is_first_run(bases, message):
    with pytest.raises(ValueError, match=message):
        initial_parameters(regression, sgp.AutoDecoupledGP(regression, *bases), X, Y)


def test_a_regression_cannot_start_the_full_parametrisation():
    site = sgp.SparseGPRegression(sgp.kernels.SquaredExponential(1.0), X, Z, NOISE)
    with pytest.raises(ValueError, match="no basis in common"):
        make("full", False, regression, init_from=site.condition(Y))


def with_trained_lengthscale(X, y=None, lengthscale=0.2):
    lengthscale = numpyro.param("lengthscale", lengthscale)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def with_sampled_noise(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.2), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def with_fixed_hyperparameters(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.2), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


MANY = np.random.default_rng(8).uniform(-1.0, 1.0, size=(60, D))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model", representative([with_trained_lengthscale, with_sampled_noise], [with_trained_lengthscale])
)
def test_a_small_covariance_basis_under_trained_hyperparameters_is_warned_of_at_initialisation(model):
    guide = make("orthogonal", True, model, base=AutoDelta)
    svi = SVI(model, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    with pytest.warns(UserWarning, match=r"5 inducing inputs for 60 rows .* unexplained"):
        state = svi.init(jax.random.key(0), MANY, MANY[:, 0])
    jax.jit(svi.update)(state, MANY, MANY[:, 0])  # a warning is an error here


@pytest.mark.parametrize(
    ("model", "options", "arguments"),
    [
        (with_fixed_hyperparameters, {}, ()),
        (with_trained_lengthscale, {"kind": "solve"}, ()),
        (with_trained_lengthscale, {}, (3.0,)),  # five inducing inputs explain a smooth function
        (with_trained_lengthscale, {"gamma": MANY}, ()),  # the data, for `DualAscent`
    ],
)
def test_no_warning_where_nothing_is_lost(model, options, arguments):
    guide = make(**{"kind": "orthogonal", "natural": False, "model": model, **options})
    initial_parameters(model, guide, MANY, MANY[:, 0], *arguments)


# As a process.


@pytest.mark.parametrize("kind", ["orthogonal", "hybrid", "full"])
def test_a_large_mean_basis_is_worked_through_in_blocks(kind, monkeypatch):
    _, guide, _, params = set_up(kind, True)
    monkeypatch.setattr(decoupled_formulas, "_MOST_ENTRIES", 2**20)
    together = guide.posterior(jax.random.key(0), params, X)["f"]
    monkeypatch.setattr(decoupled_formulas, "_MOST_ENTRIES", 2 * N)  # two of the basis at a time
    assert_allclose(guide.posterior(jax.random.key(0), params, X)["f"].mean, together.mean, rtol=1e-10)
    q = sgp.process_posterior(guide, jax.random.key(0), params, X[:2])["f"].posterior(X)
    assert_allclose(q.mean, together.mean, rtol=1e-8)


@some_forms
def test_the_process_and_its_draws_have_the_posterior_at_any_inputs(kind, natural):
    _, guide, _, params = set_up(kind, natural)
    expected = guide.posterior(jax.random.key(0), params, X_NEW)["f"]
    q = sgp.process_posterior(guide, jax.random.key(0), params, X)["f"].posterior(X_NEW)
    assert_allclose(q.mean, expected.mean, rtol=1e-8)
    assert_allclose(q.covariance(), expected.covariance(), rtol=1e-7, atol=1e-9)
    functions = guide.sample_functions(jax.random.key(1), params, X, num_samples=2000, num_features=64)["f"]
    draws = np.asarray(functions(X_NEW))
    centred = draws - np.asarray(expected.mean)
    assert np.all(np.abs(np.mean(centred, axis=0)) < 5 * np.std(centred, axis=0) / np.sqrt(len(draws)))
    products = centred[:, :, None] * centred[:, None, :]
    error = np.std(products, axis=0) / np.sqrt(len(draws))
    assert np.all(np.abs(np.mean(products, axis=0) - expected.covariance()) < 5 * error)


def test_a_covariance_without_inducing_variables_makes_no_process():
    guide = make("full", False, Model(), beta=None)
    params = initial_parameters(guide.model, guide, X, Y)
    with pytest.raises(TypeError, match="Decoupled of site 'f' has no inducing variables u with a Gaussian"):
        sgp.process_posterior(guide, jax.random.key(0), params, X)
