"""Natural steps: their direction, their fixed points, their floor, their schedules and their refusals."""

import dataclasses
from functools import partial
import re
import warnings

from grids import representative
from guides import GUIDES, NATURAL, ONE_SITE_A_ROW, arbitrary_parameters, initial_parameters, loss_at
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import oracles
from problems import (
    JITTER,
    LENGTHSCALE,
    MEAN,
    VARIANCE,
    X_NEW,
    M,
    Model,
    N,
    X,
    Z,
    blocks,
    converged,
    dense_posterior,
    site_basis,
    sites_of,
    svi_at,
)
import pytest
from scipy.optimize import minimize

import numpyro_sgp as sgp
from numpyro_sgp.posteriors.perturbation import Perturbation, Perturbed, perturb_kl, perturb_marginals
from numpyro_sgp.posteriors.sites import DatumSites, TiedSites

TIED = ["natural", "tied"]
frozen = optax.set_to_zero()


def set_up(name, likelihood, seed=0, **options):
    model = Model(likelihood)
    guide = GUIDES[name](model, Z, **options)
    return model, guide, model.y, arbitrary_parameters(model, guide, X, model.y, seed=seed)


# The fixed point is the optimum.


def fitted(name, likelihood, steps, *options, **more):
    """Model, guide, SVI object, state and bound after many natural steps at fixed hyperparameters."""
    model = Model(likelihood)
    guide = GUIDES[name](model, Z)
    svi = SVI(model, guide, sgp.NaturalGradient(*options, frozen, m_steps=0, **more), sgp.QuadratureELBO())
    state = converged(svi, svi.init(jax.random.key(0), X, model.y), steps, X, model.y)
    return model, guide, svi, state, -svi.evaluate(state, X, model.y)


@pytest.mark.parametrize(
    ("name", "likelihood"),
    representative(
        [
            *[(name, "poisson") for name in NATURAL],
            *[(name, likelihood) for name in ("tied", "dense") for likelihood in ("bernoulli", "student_t", "beta")],
        ],
        [
            ("natural", "poisson"),
            ("per_datum", "poisson"),
            ("dense", "student_t"),
            ("tied", "beta"),
        ],
    ),
)
@pytest.mark.usefixtures("x64")
def test_the_fixed_point_is_the_optimum_of_the_dense_bound_and_below_the_evidence(name, likelihood):
    model, guide, svi, state, reached = fitted(name, likelihood, 80, 0.8)
    prior, log_density = blocks(name), model.log_density(model.y)
    [(m, S)], bound = oracles.optimal_posterior(log_density, [(prior.Kuu, prior.Kuf, prior.kff)], MEAN)
    assert_allclose(reached, bound, rtol=1e-9)
    new = blocks(name, X_NEW)
    mean, covariance = oracles.conditional(m, S, new.Kuu, new.Kuf, new.Kff)
    q = guide.posterior(jax.random.key(1), svi.get_params(state), X_NEW)["f"]
    assert_allclose(q.mean, mean + MEAN, rtol=1e-9)
    assert_allclose(q.variance, np.diag(covariance), rtol=1e-9)
    own = blocks(name)
    mean, covariance = oracles.conditional(m, S, own.Kuu, own.Kuf, own.Kff)
    evidence, standard_error = oracles.log_evidence(log_density, own.Kff, mean + MEAN, covariance, MEAN)
    assert standard_error < 0.02
    assert bound < evidence + 5.0 * standard_error
    assert sgp.num_refused(state) == 0


@pytest.mark.parametrize("name", [name for name in NATURAL if name != "dense"])
@pytest.mark.usefixtures("x64")
def test_without_a_floor_the_fixed_point_is_the_optimum_for_outliers_too(name):
    likelihood = "student_t_with_outliers"
    model, _, _, _, reached = fitted(name, likelihood, 300, 0.3, floor=None)
    prior, log_density = blocks(name), model.log_density(model.y)
    [(m, S)], bound = oracles.optimal_posterior(log_density, [(prior.Kuu, prior.Kuf, prior.kff)], MEAN)
    mean, covariance = oracles.conditional(m, S, prior.Kuu, prior.Kuf, prior.Kff)
    _, by_variance = oracles.expectation_gradients(log_density, [mean + MEAN], [np.diag(covariance)])
    assert max(by_variance[0]) > 0.0  # some precision is negative at the optimum
    assert_allclose(reached, bound, rtol=1e-9)


def two_classes(X, y=None):
    kernel = sgp.kernels.SquaredExponential(jnp.asarray(LENGTHSCALE), VARIANCE)
    with numpyro.plate("class", 2):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


@pytest.mark.parametrize("name", ["natural", "tied", "per_datum", "dense"])
@pytest.mark.usefixtures("x64")
def test_the_fixed_point_of_two_latents_for_each_datum_is_the_optimum_of_the_dense_bound(name):
    y = np.array([0, 1, 1, 0, 1, 1, 0])

    def log_density(f, g):
        return np.where(y == 0, f, g) - np.log(np.exp(f) + np.exp(g))

    guide = GUIDES[name](two_classes, Z)
    loss = sgp.QuadratureELBO(num_nodes=10)
    svi = SVI(two_classes, guide, sgp.NaturalGradient(0.8, frozen, m_steps=0), loss)
    state = converged(svi, svi.init(jax.random.key(0), X, y), 80, X, y)
    prior = blocks(name)
    posteriors, bound = oracles.optimal_posterior(log_density, [(prior.Kuu, prior.Kuf, prior.kff)] * 2, num_nodes=10)
    assert_allclose(-svi.evaluate(state, X, y), bound, rtol=1e-9)
    new = blocks(name, X_NEW)
    means = [oracles.conditional(m, S, new.Kuu, new.Kuf, new.Kff)[0] for m, S in posteriors]
    q = guide.posterior(jax.random.key(1), svi.get_params(state), X_NEW)["f"]
    assert_allclose(q.mean, means, rtol=1e-9, atol=1e-12)


def three_classes(X, y=None):
    kernel = sgp.kernels.SquaredExponential(jnp.asarray(LENGTHSCALE), VARIANCE)
    with numpyro.plate("class", 3):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_the_fixed_point_of_three_classes_is_the_optimum_of_the_same_sampled_bound():
    # One key for all evaluations: the draws, and so the bound, are the same for both guides. A sampled bound has
    # sampled precisions, some of them negative: with a floor the fixed point would be another one.
    y, key = np.array([0, 1, 2, 0, 1, 2, 2]), jax.random.key(5)
    loss = sgp.QuadratureELBO(num_samples=16)
    guide = GUIDES["tied"](three_classes, Z)
    optim = sgp.NaturalGradient(0.5, frozen, m_steps=0, floor=None)

    def objective(params):
        return loss.loss(key, params, three_classes, guide, X, y), None

    state = optim.init(initial_parameters(three_classes, guide, X, y))
    state = jax.jit(lambda s: jax.lax.fori_loop(0, 150, lambda _, s: optim.eval_and_update(objective, s)[1], s))(state)
    params = optim.get_params(state)

    whitened = GUIDES["whitened"](three_classes, Z)
    start = initial_parameters(three_classes, whitened, X, y)
    lower = np.tril_indices(M)

    def unpack(x):
        S_sqrt = jnp.zeros((3, M, M)).at[:, *lower].set(x[3 * M :].reshape(3, -1))
        return {**start, "f_auto_m": x[: 3 * M].reshape(3, M), "f_auto_S_sqrt": S_sqrt}

    @jax.jit
    @jax.value_and_grad
    def negative(x):
        return loss.loss(key, unpack(x), three_classes, whitened, X, y)

    x = np.concatenate([np.zeros(3 * M), np.tile(np.eye(M)[lower], 3)])
    best = minimize(
        lambda x: [np.asarray(v, float) for v in negative(x)], x, jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    assert_allclose(objective(params)[0], best.fun, rtol=1e-9)
    q = guide.posterior(key, params, X_NEW)["f"]
    expected = whitened.posterior(key, unpack(best.x), X_NEW)["f"]
    assert_allclose(q.mean, expected.mean, rtol=1e-6, atol=1e-7)  # what BFGS reaches


# The direction.


def direction_of(name, params, model, guide, X, y, num_data, **options):
    """∂loss/∂ε₁ and ∂loss/∂ε₂, from the sites before and after a step."""
    rate = 0.25
    svi, state = svi_at(params, model, guide, sgp.NaturalGradient(rate, frozen, **options), X, y, num_data)
    lambda1, Lambda2 = sites_of(svi, state)
    new_lambda1, new_Lambda2 = sites_of(svi, jax.jit(lambda *args: svi.update(*args, num_data))(state, X, y)[0])
    return (lambda1 - new_lambda1) / rate, (new_Lambda2 - Lambda2) / (2.0 * rate)


def symmetric(rng, M):
    root = rng.normal(size=(M, M))
    return 0.5 * (root + root.T)


@pytest.mark.parametrize("name", TIED)
@pytest.mark.usefixtures("x64")
def test_the_direction_is_the_gradient_with_respect_to_expectation_parameters(name):
    model, guide, y, params = set_up(name, "student_t_with_outliers")
    rows, scale = slice(0, 3), N / 3
    direction1, direction2 = direction_of(name, params, model, guide, X[rows], y[rows], N, floor=None)
    prior = blocks(name, X[rows])
    m, S = dense_posterior(name, params, prior)
    W = site_basis(name, prior)
    eta1, eta2 = W @ m, W @ (S + np.outer(m, m)) @ W.T
    rng = np.random.default_rng(0)
    move1, move2 = rng.normal(size=M), symmetric(rng, M)
    size = 0.02 * np.min(np.linalg.eigvalsh(W @ S @ W.T))  # stays inside the expectation parameters of Gaussians

    def loss(t):
        first, second = eta1 + t * size * move1, eta2 + t * size * move2
        m, S = np.linalg.solve(W, first), np.linalg.solve(W, np.linalg.solve(W, second - np.outer(first, first)).T)
        log_density = model.log_density(y[rows])
        return -oracles.elbo(log_density, m, S, prior.Kuu, prior.Kuf, prior.Kff, MEAN, scale)

    expected = oracles.derivative(loss, 0.2) / size
    assert_allclose(np.sum(direction1 * move1) + np.sum(direction2 * move2), expected, rtol=1e-7)


@pytest.mark.parametrize("name", TIED)
@pytest.mark.usefixtures("x64")
def test_the_direction_is_the_inverse_fisher_matrix_times_the_gradient(name):
    M = 2
    model = Model("student_t_with_outliers")
    guide, y = GUIDES[name](model, Z[:M]), model.y
    params = arbitrary_parameters(model, guide, X, y)
    direction1, direction2 = direction_of(name, params, model, guide, X, y, N, floor=None)
    prior = blocks(name, Z=Z[:M])
    W = site_basis(name, prior)
    sites = params["f_auto_sites"]

    def moved(t):
        # Natural parameters (λ₁, −½Λ₂), the off-diagonal entry of the second counted once.
        extra = np.array([[t[2], t[3] / 2], [t[3] / 2, t[4]]])
        return oracles.from_sites(sites.lambda1 + t[:M], sites.Lambda2 - 2.0 * extra, prior.Kuu, W)

    def loss(t):
        return -oracles.elbo(model.log_density(y), *moved(t), prior.Kuu, prior.Kuf, prior.Kff, MEAN)

    def expectation(t):
        m, S = moved(t)
        first, second = W @ m, W @ (S + np.outer(m, m)) @ W.T
        return np.array([*first, second[0, 0], second[0, 1], second[1, 1]])

    units = 0.05 * np.eye(5)
    gradient = np.array([oracles.derivative(lambda t, unit=unit: loss(t * unit), 0.1) for unit in units])
    # The Fisher matrix is the Jacobian of the expectation parameters.
    fisher = np.array([oracles.derivative(lambda t, unit=unit: expectation(t * unit), 0.1) for unit in units])
    expected = np.linalg.solve(fisher, gradient)
    got = [*direction1, direction2[0, 0], direction2[0, 1] + direction2[1, 0], direction2[1, 1]]
    assert_allclose(got, expected, rtol=1e-7)


def target(name, model, y, params, floor):
    """Σ_i a_i (α_i + β_i m_i) and Σ_i a_i β_i a_iᵀ with β floored, and the unfloored β."""
    prior = blocks(name)
    m, S = dense_posterior(name, params, prior)
    mean, covariance = oracles.conditional(m, S, prior.Kuu, prior.Kuf, prior.Kff)
    [alpha], [by_variance] = oracles.expectation_gradients(model.log_density(y), [mean + MEAN], [np.diag(covariance)])
    beta = -2.0 * by_variance
    floored = beta if floor is None else np.maximum(beta, floor)
    g1 = alpha + floored * mean  # of the centred process
    if name in ONE_SITE_A_ROW:
        return g1, floored, beta
    a = np.linalg.solve(site_basis(name, prior).T, np.linalg.solve(prior.Kuu, prior.Kuf))
    return a @ g1, (a * floored) @ a.T, beta


@pytest.mark.parametrize(
    ("name", "floor"), [*[(name, 0.3) for name in NATURAL], *[("tied", floor) for floor in (None, 0.0)]]
)
@pytest.mark.usefixtures("x64")
def test_a_step_moves_to_the_targets_of_floored_precisions(name, floor):
    model, guide, y, params = set_up(name, "student_t_with_outliers")
    svi, state = svi_at(params, model, guide, sgp.NaturalGradient(0.4, frozen, floor=floor), X, y)
    old1, old2 = sites_of(svi, state)
    new1, new2 = sites_of(svi, jax.jit(svi.update)(state, X, y)[0])
    target1, target2, beta = target(name, model, y, params, floor)
    assert np.min(beta) < 0.0 < 0.3 < np.max(beta)
    assert_allclose(new1, 0.6 * old1 + 0.4 * target1, rtol=1e-8)
    assert_allclose(new2, 0.6 * old2 + 0.4 * target2, rtol=1e-8, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_the_floor_keeps_tied_precisions_positive_semi_definite():
    model, guide, y, _ = set_up("tied", "student_t_with_outliers")
    svi, state = svi_at({}, model, guide, sgp.NaturalGradient(1.0, frozen, e_steps=20, m_steps=0), X, y)
    state, _ = jax.jit(svi.update)(state, X, y)
    Lambda2 = sites_of(svi, state)[1]
    assert np.min(np.linalg.eigvalsh(Lambda2)) > -1e-10 * np.max(Lambda2)
    assert sgp.num_refused(state) == 0


@pytest.mark.usefixtures("x64")
def test_a_step_after_the_inducing_inputs_have_moved_starts_from_the_same_posterior_there():
    # ρ = 0.4 between the old sites, functions of u' at the reference, and targets at u; both re-expressed in u.
    model, guide, y, params = set_up("tied", "poisson", learn_inducing=True)
    moved = Z + 0.2 * np.random.default_rng(1).normal(size=Z.shape)
    params = {**params, "f_auto_inducing": sgp.InducingPoints(jnp.asarray(moved))}
    svi, state = svi_at(params, model, guide, sgp.NaturalGradient(0.4, frozen), X, y)
    new = svi.get_params(jax.jit(svi.update)(state, X, y)[0])["f_auto_sites"]
    prior, old = blocks("tied", Z=moved), params["f_auto_sites"]
    shared = oracles.se(Z, moved, LENGTHSCALE, VARIANCE) + JITTER * VARIANCE * np.eye(M)
    W = np.linalg.solve(prior.Kuu, shared.T).T
    m, S = oracles.from_sites(old.lambda1, old.Lambda2, prior.Kuu, W)
    mean, covariance = oracles.conditional(m, S, prior.Kuu, prior.Kuf, prior.Kff)
    [alpha], [by_variance] = oracles.expectation_gradients(model.log_density(y), [mean + MEAN], [np.diag(covariance)])
    a = np.linalg.solve(prior.Kuu, prior.Kuf)
    assert_allclose(new.lambda1, 0.6 * W.T @ old.lambda1 + 0.4 * a @ (alpha - 2.0 * by_variance * mean), rtol=1e-8)
    assert_allclose(new.Lambda2, 0.6 * W.T @ old.Lambda2 @ W + 0.4 * (a * -2.0 * by_variance) @ a.T, rtol=1e-8)
    assert_allclose(new.reference.Z, moved, rtol=0.0)


# The perturbation.


def random_sites(kind, rng):
    if kind == "tied":
        return TiedSites(rng.normal(size=(3, M)), np.stack([symmetric(rng, M) for _ in range(3)]))
    return DatumSites(rng.normal(size=(3, N)), rng.normal(size=(3, N)), X)


@pytest.mark.parametrize("kind", ["tied", "per_datum"])
@pytest.mark.usefixtures("x64")
def test_derivatives_at_zero_are_those_of_a_finite_perturbation(kind):
    rng = np.random.default_rng(0)
    sites, zero = random_sites(kind, rng), random_sites(kind, rng)
    mean, variance = rng.normal(size=(3, N)), np.square(rng.normal(size=(3, N)))
    kl, a = rng.normal(size=3), rng.normal(size=(3, M, N)) if kind == "tied" else None

    def package(epsilon1, epsilon2):
        perturbation = Perturbation(epsilon1, epsilon2)
        moments = perturb_marginals(Perturbed(sites, perturbation), a, mean, variance)
        return *moments, perturb_kl(perturbation, sites, kl)

    def explicit(epsilon1, epsilon2):
        if a is None:
            delta_mean, quadratic = epsilon1, epsilon2
            trace = jnp.sum(sites.Lambda2 * epsilon2, axis=-1)
        else:
            delta_mean = jnp.einsum("bmn,bm->bn", a, epsilon1)
            quadratic = jnp.einsum("bmn,bmk,bkn->bn", a, epsilon2, a)
            trace = jnp.einsum("bmk,bkm->b", sites.Lambda2, epsilon2)
        delta_variance = quadratic - 2.0 * mean * delta_mean
        delta_kl = jnp.sum(sites.lambda1 * epsilon1, axis=-1) - 0.5 * trace
        return mean + delta_mean, variance + delta_variance, kl + delta_kl

    at = (jnp.zeros_like(zero.lambda1), jnp.zeros_like(zero.Lambda2))
    for got, expected in zip(package(*at), explicit(*at), strict=True):
        assert_allclose(got, expected, rtol=0.0)
    for differentiate in (jax.jacrev, jax.jacfwd):
        got, expected = (jax.jit(differentiate(fn, argnums=(0, 1)))(*at) for fn in (package, explicit))
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("x64")
def test_the_perturbation_is_the_first_order_change_of_the_dense_posterior():
    rng = np.random.default_rng(0)
    prior = blocks("tied")
    lambda1, root = rng.normal(size=M), rng.normal(size=(M, M))
    m, S = oracles.from_sites(lambda1, root @ root.T, prior.Kuu, np.eye(M))
    sites = TiedSites(jnp.asarray(lambda1), jnp.asarray(root @ root.T))
    move1, move2 = rng.normal(size=M), symmetric(rng, M)
    size = 0.02 * np.min(np.linalg.eigvalsh(S))

    def exact(t):
        first, second = m + t * size * move1, S + np.outer(m, m) + t * size * move2
        covariance = second - np.outer(first, first)
        mean, variance = oracles.conditional(first, covariance, prior.Kuu, prior.Kuf, prior.Kff)
        return np.array([*mean, *np.diag(variance), oracles.gaussian_kl(first, covariance, prior.Kuu)])

    mean, covariance = oracles.conditional(m, S, prior.Kuu, prior.Kuf, prior.Kff)
    a = jnp.asarray(np.linalg.solve(prior.Kuu, prior.Kuf))

    def package(t):
        perturbation = Perturbation(t * move1, t * move2)
        moments = perturb_marginals(Perturbed(sites, perturbation), a, jnp.asarray(mean), jnp.diag(covariance))
        return jnp.concatenate([*moments, perturb_kl(perturbation, sites, jnp.zeros(()))[None]])

    expected = oracles.derivative(exact, 0.2) / size
    assert_allclose(jax.jacfwd(package)(0.0), expected, rtol=1e-6, atol=1e-6 * np.max(np.abs(expected)))


# Schedules.


@pytest.mark.usefixtures("x64")
def test_the_step_size_schedule_is_used_one_value_for_each_update():
    # With a Gaussian likelihood the targets stay where they are: steps of 1 / (k + 2) average them with the start.
    model, guide, y, params = set_up("tied", "normal")
    svi, state = svi_at(params, model, guide, sgp.NaturalGradient(lambda k: 1.0 / (k + 2.0), frozen), X, y)
    old1, old2 = sites_of(svi, state)
    target1, target2, _ = target("tied", model, y, params, None)
    update = jax.jit(svi.update)
    for k in range(3):
        state, _ = update(state, X, y)
        weight = 1.0 / (k + 2.0)  # Π_j (1 − 1 / (j + 2))
        new1, new2 = sites_of(svi, state)
        assert_allclose(new1, weight * old1 + (1.0 - weight) * target1, rtol=1e-8)
        assert_allclose(new2, weight * old2 + (1.0 - weight) * target2, rtol=1e-8)


@pytest.mark.parametrize("steps", [(2, 3), (2, 0), (0, 2)])
@pytest.mark.usefixtures("x64")
@pytest.mark.exhaustive
def test_a_schedule_of_steps_is_the_loop_written_out(steps):
    model, guide, y, params = set_up("tied", "student_t_with_outliers")
    rate, others = 0.3, optax.adam(1e-2)
    svi, state = svi_at(
        params, model, guide, sgp.NaturalGradient(rate, others, e_steps=steps[0], m_steps=steps[1]), X, y
    )
    values = {key: v for key, v in svi.optim.get_params(state.optim_state).items() if key != "f_auto_sites"}
    trained = {key: values[key] for key in ("lengthscale", "noise", "variance")}
    first = jax.jit(svi.evaluate)(state, X, y)
    update = jax.jit(svi.update)
    for _ in range(2):
        state, loss = update(state, X, y)
    got, (got1, got2) = svi.optim.get_params(state.optim_state), sites_of(svi, state)

    sites = params["f_auto_sites"]
    adam = others.init(trained)

    def log_bound(trained, sites):
        constrained = {key: jnp.exp(value) for key, value in trained.items()}
        return loss_at({**params, **constrained, "f_auto_sites": sites}, model, guide, X, y)

    gradient = jax.jit(jax.grad(log_bound))
    for _ in range(2):
        for _ in range(steps[0]):
            current = {key: np.exp(value) for key, value in trained.items()}
            prior = blocks("tied", lengthscale=current["lengthscale"], variance=current["variance"])
            m, S = oracles.from_sites(sites.lambda1, sites.Lambda2, prior.Kuu, np.eye(M))
            mean, covariance = oracles.conditional(m, S, prior.Kuu, prior.Kuf, prior.Kff)
            [alpha], [by_variance] = oracles.expectation_gradients(
                model.log_density(y, current["noise"]), [mean + MEAN], [np.diag(covariance)]
            )
            beta, a = np.maximum(-2.0 * by_variance, 0.0), np.linalg.solve(prior.Kuu, prior.Kuf)
            sites = TiedSites(
                0.7 * sites.lambda1 + 0.3 * a @ (alpha + beta * mean), 0.7 * sites.Lambda2 + 0.3 * (a * beta) @ a.T
            )
        for _ in range(steps[1]):
            updates, adam = others.update(gradient(trained, sites), adam)
            trained = optax.apply_updates(trained, updates)
    assert_allclose(got1, sites.lambda1, rtol=1e-8)
    assert_allclose(got2, sites.Lambda2, rtol=1e-8, atol=1e-10)
    for key, value in trained.items():
        assert_allclose(got[key], value, rtol=1e-8, atol=1e-10)
    assert loss < first


# A plain optimizer.

ADVICE = "natural parameters .* trained by their gradient.*`NaturalGradient"


@pytest.mark.parametrize("name", [*representative(NATURAL, ["tied"]), "whitened"])
@pytest.mark.usefixtures("x64")
def test_natural_parameters_under_a_plain_optimizer_warn_once_and_only_they(name):
    model, guide, y, _ = set_up(name, "poisson")
    svi = SVI(model, guide, optax.adam(1e-2), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        update = jax.jit(svi.update)
        state, _ = update(state, X, y)
        update(state, X, y)
        guide.posterior(jax.random.key(0), svi.get_params(state), X)
    assert len(caught) == (0 if name == "whitened" else 1)
    assert all(re.search(ADVICE, str(each.message)) for each in caught)


@pytest.mark.parametrize("options", [{}, {"e_steps": 2, "m_steps": 2}, {"in_turn": True}])
def test_natural_gradients_do_not_warn(options):
    model, guide, y, _ = set_up("tied", "poisson")
    svi = SVI(model, guide, sgp.NaturalGradient(0.5, **options), sgp.QuadratureELBO())
    jax.jit(svi.update)(svi.init(jax.random.key(0), X, y), X, y)


@pytest.mark.filterwarnings("ignore:The natural parameters:UserWarning")
@pytest.mark.usefixtures("x64")
@pytest.mark.thorough
def test_the_gradient_of_natural_parameters_is_the_true_one_in_both_modes_and_has_a_hessian():
    model, guide, y, params = set_up("tied", "poisson")
    start = jnp.asarray(params["f_auto_sites"].lambda1)

    def loss(lambda1):
        sites = dataclasses.replace(params["f_auto_sites"], lambda1=lambda1)
        return loss_at({**params, "f_auto_sites": sites}, model, guide, X, y)

    gradient = jax.jit(jax.grad(loss))
    steps = 1e-5 * np.eye(len(start))
    assert_allclose(gradient(start), [(loss(start + step) - loss(start - step)) / 2e-5 for step in steps], rtol=1e-6)
    assert_allclose(jax.jacfwd(loss)(start), gradient(start), rtol=1e-10)
    hessian = [(gradient(start + step) - gradient(start - step)) / 2e-5 for step in steps]
    assert_allclose(jax.hessian(loss)(start), hessian, rtol=1e-5, atol=1e-6)


# Refusals.


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_allclose(x, y, rtol=0.0)


@pytest.mark.parametrize("name", representative(["natural", "tied", "dense"], ["tied"]))
@pytest.mark.usefixtures("x64")
def test_a_batch_with_nan_is_refused_and_later_steps_go_on(name):
    model, guide, y, _ = set_up(name, "poisson")
    svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.sgd(1e-3)), sgp.QuadratureELBO())
    update = jax.jit(svi.update)
    state = svi.init(jax.random.key(0), X, y)
    broken = np.where(np.arange(N) == 2, np.nan, y)
    before, _ = update(state, X, y)
    state, loss = update(before, X, broken)
    assert not np.isfinite(loss)
    assert sgp.num_refused(state) == 1
    # The loss here may be what a bad step led to, so it goes back to where the loss was last finite: the start.
    same(svi.get_params(state), svi.get_params(svi.init(jax.random.key(0), X, y)))
    state, _ = update(state, X, broken)
    assert sgp.num_refused(state) == 2
    losses = []
    for _ in range(40):
        state, loss = update(state, X, y)
        losses.append(loss)
    assert sgp.num_refused(state) == 2
    assert np.all(np.isfinite(losses))
    prior = blocks(name)
    [_], bound = oracles.optimal_posterior(model.log_density(y), [(prior.Kuu, prior.Kuf, prior.kff)], MEAN)
    assert losses[-1] < -bound + 1e-3  # the optimum at the first hyperparameters, which have improved since


@pytest.mark.usefixtures("x64")
def test_a_refused_step_halves_the_next_one_and_a_success_restores_it():
    model, guide, y, _ = set_up("tied", "normal")
    svi, state = svi_at({}, model, guide, sgp.NaturalGradient(1.0, frozen), X, y)
    broken = np.where(np.arange(N) == 2, np.nan, y)
    target1, target2, _ = target("tied", model, y, svi.get_params(state), None)
    update = jax.jit(svi.update)
    state, _ = update(state, X, broken)
    for weight in (0.5, 1.0):
        state, _ = jax.jit(svi.update)(state, X, y)
        new1, new2 = sites_of(svi, state)
        assert_allclose(new1, weight * target1, rtol=1e-8)
        assert_allclose(new2, weight * target2, rtol=1e-8)


def log_two_modes(f, y):
    return np.log(np.exp(-0.5 * ((y - f) / 0.6) ** 2) + np.exp(-0.5 * ((y + f) / 0.6) ** 2))


def two_modes(X, y=None):
    kernel = sgp.kernels.SquaredExponential(jnp.asarray(LENGTHSCALE), VARIANCE)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, MEAN, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.factor("y", jnp.logaddexp(-0.5 * ((y - f) / 0.6) ** 2, -0.5 * ((y + f) / 0.6) ** 2))


@pytest.mark.usefixtures("x64")
def test_steps_that_leave_the_cone_are_refused_until_the_optimum_is_reached():
    # |f| is observed: around f = 0 the likelihood is strongly convex, and half a step from the prior makes Kuu⁻¹ + Λ₂
    # indefinite.
    y = np.array([3.0, 2.6, 3.4, 3.1, 2.7, 2.9, 3.2])
    guide = GUIDES["tied"](two_modes, Z)
    svi = SVI(two_modes, guide, sgp.NaturalGradient(0.5, frozen, floor=None), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, y)
    update, losses = jax.jit(svi.update), []
    for _ in range(100):
        state, loss = update(state, X, y)
        losses.append(loss)
    prior = blocks("tied")
    own = [(prior.Kuu, prior.Kuf, prior.kff)]
    [_], bound = oracles.optimal_posterior(partial(log_two_modes, y=y), own, MEAN, start=2.0)
    # More than one refusal in a row: the first ones are of steps from the prior, of half the length each time.
    assert sgp.num_refused(state) > 1
    assert np.all(np.isnan(losses[1:4:2]))
    assert_allclose(losses[0:5:2], losses[0], rtol=0.0)
    assert_allclose(losses[-1], -bound, rtol=1e-8)


@pytest.mark.usefixtures("x64")
def test_a_stable_update_reports_a_refused_step_as_nan():
    model, guide, y, _ = set_up("tied", "poisson")
    # One step of the others that ends at infinity: the loss is finite here, the step is not.
    svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.sgd(np.inf)), sgp.QuadratureELBO())
    start = svi.init(jax.random.key(0), X, y)
    state, loss = jax.jit(svi.stable_update)(start, X, y)
    assert np.isnan(loss)
    assert sgp.num_refused(state) == 1
    same(svi.get_params(state), svi.get_params(start))
    state, loss = jax.jit(svi.update)(start, X, y)
    assert np.isfinite(loss)
    assert sgp.num_refused(state) == 1
    same(svi.get_params(state), svi.get_params(start))


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_a_stable_run_is_the_run_where_nothing_is_refused():
    losses = []
    for stable in (False, True):
        model, guide, y, _ = set_up("tied", "poisson")
        svi = SVI(model, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
        losses.append(svi.run(jax.random.key(0), 5, X, y, progress_bar=False, stable_update=stable).losses)
    assert_allclose(losses[0], losses[1], rtol=1e-12)
