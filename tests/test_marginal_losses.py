"""Losses for the marginal likelihood of finite-rank kernels: identities, bias, saddle points, state between steps."""

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
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import oracles
import pytest
from scipy.optimize import minimize

import numpyro_sgp as sgp
from numpyro_sgp import features, kernels
from numpyro_sgp.math.marginal_likelihood import evidence_bound, log_evidence, minimax_objective
from numpyro_sgp.posteriors.weight_space.adversary import Adversary, ProbedAdversary, adversary_of

pytestmark = pytest.mark.usefixtures("x64")

N, R, BATCH, NOISE, SCALE = 8, 3, 2, 0.4, 4.0
RNG = np.random.default_rng(21)
X = RNG.uniform(-1.0, 1.0, size=(N, 2))
Y = np.sin(2.0 * X[:, 0]) + 0.3 * RNG.normal(size=N)
W = RNG.normal(size=(2, R))
BATCHES = np.array(list(itertools.combinations(range(N), BATCH)))

# The pure functions: A is (r, N).

A, RESIDUAL, S2 = np.tanh(X @ W).T, Y - 0.2, NOISE**2
F = A @ A.T + S2 * np.eye(R)
BEST = np.linalg.solve(F, A @ RESIDUAL)
OTHER = RNG.normal(size=R)
ROOT = RNG.normal(size=(R, R))
F_OTHER = ROOT @ ROOT.T + 0.5 * np.eye(R)
EVIDENCE = oracles.gaussian_log_density(RESIDUAL, 0.0, A.T @ A + S2 * np.eye(N))


def arrays(*values):
    return [jnp.asarray(value) for value in values]


def test_the_objective_with_any_matrix_is_minus_the_bound_of_its_posterior_and_tight_at_the_best():
    m, V = OTHER, S2 * np.linalg.inv(F_OTHER)
    variances = np.einsum("rn,rs,sn->n", A, V, A)
    density = -0.5 * ((RESIDUAL - A.T @ m) ** 2 + variances) / S2 - 0.5 * np.log(2 * np.pi * S2)
    bound = np.sum(density) - oracles.gaussian_kl(m, 0.5 * (V + V.T), np.eye(R))
    ours = evidence_bound(*arrays(m, F_OTHER, A, RESIDUAL, S2), 1.0)
    assert_allclose(ours, -bound, rtol=1e-12)
    assert_allclose(evidence_bound(*arrays(BEST, F, A, RESIDUAL, S2), 1.0), -EVIDENCE, rtol=1e-10)
    assert ours > -EVIDENCE + 0.1


@pytest.mark.parametrize("rows", [2, N])
def test_the_evidence_is_that_of_the_dense_gaussian_by_either_factorisation(rows):
    K = A.T[:rows] @ A[:, :rows] + S2 * np.eye(rows)
    expected = oracles.gaussian_log_density(RESIDUAL[:rows], 0.0, K)
    assert_allclose(log_evidence(*arrays(A[:, :rows], RESIDUAL[:rows], S2)), expected, rtol=1e-10)


P_ROOT, B = np.linalg.cholesky(F_OTHER / S2), 0.2 * (ROOT + ROOT.T) / np.linalg.norm(ROOT)
OBJECTIVES = {
    "bound": lambda A, y, scale: evidence_bound(*arrays(OTHER, F_OTHER), A, y, jnp.asarray(S2), scale),
    "whitened": lambda A, y, scale: minimax_objective(*arrays(OTHER, P_ROOT, B), A, y, jnp.asarray(S2), scale, 2.1),
    "printed": lambda A, y, scale: minimax_objective(
        *arrays(OTHER, P_ROOT, B), A, y, jnp.asarray(S2), scale, 2.1, "printed"
    ),
    "batch": lambda A, y, scale: -scale * log_evidence(A, y, jnp.asarray(S2)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_and_gradients_of_batches_average_to_those_of_all_data_but_for_the_batch_evidence(name):
    def at(A, rows, scale):
        value, gradient = jax.value_and_grad(
            lambda A: OBJECTIVES[name](A[:, rows], jnp.asarray(RESIDUAL)[rows], scale)
        )(A)
        return value, gradient

    exact = at(jnp.asarray(A), np.arange(N), 1.0)
    estimates = jax.vmap(lambda rows: at(jnp.asarray(A), rows, SCALE))(BATCHES)
    biases = [np.max(np.abs(np.mean(e, axis=0) - x)) for e, x in zip(estimates, exact, strict=True)]
    if name == "batch":
        assert min(biases) > 0.1
    else:
        assert max(biases) < 1e-10


def saddle(P, penalty, form):
    """The objective with the best B: a norm."""

    def objective(B, penalty):
        root = np.linalg.cholesky(P - np.eye(R))
        return minimax_objective(*arrays(BEST, root), B, *arrays(A, RESIDUAL, S2), 1.0, penalty, form)

    B = jax.grad(objective)(jnp.zeros((R, R)), 2.0 / penalty) * penalty
    return float(objective(B / max(1e-300, np.linalg.norm(B)), penalty))


def test_the_whitened_saddle_is_the_evidence_if_and_only_if_the_penalty_reaches_the_root_of_the_rank():
    best = F / S2
    assert_allclose(saddle(best, 3.0, "whitened"), -EVIDENCE, rtol=1e-10)
    directions = [D + D.T for D in RNG.normal(size=(12, R, R))] + [best, -best]
    for t in (1e-4, 0.03):  # with 0.1 some are no I + R Rᵀ
        around = [saddle(best + t * D, 1.01 * np.sqrt(R), "whitened") for D in directions]
        assert min(around) > -EVIDENCE
        below = saddle(best - t * best, 0.9 * np.sqrt(R), "whitened")
        assert below < -EVIDENCE - 1e-5


def test_the_printed_saddle_needs_a_penalty_of_the_condition_of_the_matrix():
    best, threshold = F / S2, np.linalg.norm(F) * np.linalg.norm(np.linalg.inv(F))
    assert threshold > 2.0 * R
    # The direction in which log|A| falls fastest.
    D = -np.linalg.inv(F)
    assert saddle(best + 1e-3 * D, 1.05 * threshold, "printed") > -EVIDENCE
    for penalty in (1.0, 0.95 * threshold):
        assert saddle(best + 1e-3 * D, penalty, "printed") < -EVIDENCE - 1e-6


# In SVI.


def network(weights, X):
    return jnp.tanh(X @ weights)


def positive(name, value):
    return numpyro.param(name, jnp.asarray(value), constraint=constraints.positive)


def trained(X, y=None, num_data=None):
    """Hyperparameters to be trained: the variance of the weights, the noise, a slope with a prior."""
    slope = numpyro.sample("slope", dist.LogNormal(0.0, 0.5))
    kernel = features.FeatureMap(network, slope * W, variance=positive("variance", 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, 0.2))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, positive("noise", NOISE)), obs=y)


def fixed(X, y=None, num_data=None):
    f = numpyro.sample("f", sgp.GaussianProcess(features.FeatureMap(network, W), X, 0.2))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def guide_of(model, parametrization, **options):
    return sgp.AutoWeightSpaceGP(model, parametrization=parametrization, base=AutoDelta, **options)


@functools.cache
def best_posterior_density():
    """The maximum of log p(y | θ) + log p(θ)."""

    def negative(log):
        slope, variance, noise = np.exp(log)
        Phi = np.tanh(X @ (slope * W))
        density = oracles.gaussian_log_density(Y, 0.2, variance * Phi @ Phi.T + noise**2 * np.eye(N))
        return -density + 0.5 * (log[0] / 0.5) ** 2 + log[0] + np.log(0.5) + 0.5 * np.log(2 * np.pi)

    options = {"xatol": 1e-8, "fatol": 1e-12, "maxiter": 4000}
    return -minimize(negative, np.zeros(3), method="Nelder-Mead", options=options).fun


ROUTES = {
    "averaged": (lambda: optax.adam(0.03), lambda: sgp.CompositionalMarginalLikelihood(1.0)),
    "adversarial": (
        lambda: sgp.DescentAscent(optax.adam(optax.cosine_decay_schedule(0.02, 4000)), optax.sgd(0.02)),
        lambda: sgp.MinimaxMarginalLikelihood(),
    ),
    "natural": (lambda: optax.adam(0.03), lambda: sgp.BatchMarginalLikelihood()),
}


@pytest.mark.parametrize("route", ROUTES)
def test_on_all_data_each_loss_leads_to_the_maximum_of_the_evidence(route):
    optim, loss = (make() for make in ROUTES[route])
    guide = guide_of(trained, route)
    svi = SVI(trained, guide, optim, loss)
    result = svi.run(jax.random.key(0), 4000, X, Y, progress_bar=False)
    params = {**result.params, **(result.state.mutable_state or {})}
    reached = loss_at(params, trained, guide, X, Y, loss=sgp.BatchMarginalLikelihood())
    # Descent against ascent spirals in, at the rate of the ascent's steps.
    atol = 1e-2 if route == "adversarial" else 1e-4
    assert_allclose(reached, -best_posterior_density(), rtol=0, atol=atol)
    # The start is farther away than that.
    assert svi.evaluate(svi.init(jax.random.key(0), X, Y), X, Y) > -best_posterior_density() + 0.05


def test_the_compositional_loss_keeps_the_average_of_the_paper_and_descends_along_its_direction():
    decay, rate, steps = 0.3, 0.01, 4
    model, guide = fixed, guide_of(fixed, "averaged")
    svi = SVI(model, guide, optax.sgd(rate), sgp.CompositionalMarginalLikelihood(lambda t: decay / t))
    state = svi.init(jax.random.key(0), X[:BATCH], Y[:BATCH], num_data=N)
    update = jax.jit(lambda state, X, y: svi.update(state, X, y, num_data=N))
    w = np.zeros(R)
    for t, rows in enumerate(BATCHES[[0, 9, 17, 25]], start=1):
        A_b = np.tanh(X[rows] @ W).T
        F_b = SCALE * A_b @ A_b.T + S2 * np.eye(R)
        if t == 1:
            average = np.mean(np.diag(F_b)) * np.eye(R)
        misfit = RESIDUAL[rows] - A_b.T @ w
        g = SCALE * misfit @ misfit / S2 + w @ w + (N - R) * np.log(S2) + N * np.log(2 * np.pi)
        expected = 0.5 * (g + np.trace(np.linalg.solve(average, F_b)) + np.linalg.slogdet(average)[1] - R)
        w = w - rate * (w - SCALE * A_b @ misfit / S2)
        average = (1 - decay / t) * average + decay / t * F_b
        state, loss = update(state, X[rows], Y[rows])
        assert_allclose(loss, expected, rtol=1e-10)
    assert t == steps
    assert_allclose(svi.get_params(state)["f_auto_m"], w, rtol=1e-10)
    assert_allclose(state.mutable_state["f_auto_average"]["F"], average, rtol=1e-10)
    # The posterior is N(w, σ²F̃⁻¹), and needs the state.
    values = {**svi.get_params(state), **state.mutable_state}
    q = guide.posterior(jax.random.key(0), values, X)["f"]
    assert_allclose(q.mean, A.T @ w + 0.2, rtol=1e-10)
    assert_allclose(q.variance, np.diag(A.T @ np.linalg.solve(average, A)) * S2, rtol=1e-9)
    process = sgp.process_posterior(guide, jax.random.key(0), values, X)["f"]
    assert_allclose(process.posterior(X).variance, q.variance, rtol=1e-8)
    with pytest.raises(ValueError, match=r"'f_auto_average' has no value.*mutable_state"):
        guide.posterior(jax.random.key(0), svi.get_params(state), X)


def test_the_average_survives_a_run():
    svi = SVI(fixed, guide_of(fixed, "averaged"), optax.adam(0.05), sgp.CompositionalMarginalLikelihood(0.5))
    result = svi.run(jax.random.key(0), 60, X, Y, progress_bar=False, stable_update=True)
    average = result.state.mutable_state["f_auto_average"]
    assert average["step"] == 60
    assert_allclose(average["F"], F, rtol=1e-9)
    assert_allclose(average["noise"], S2, rtol=1e-12)
    # and is found where the posterior is judged
    data = sgp.to_arviz(jax.random.key(1), svi, result, X, Y, num_samples=2)
    assert np.isfinite(data["posterior"]["f"]).all()


def test_a_rejected_step_leaves_parameters_and_average_as_they_were():
    svi = SVI(fixed, guide_of(fixed, "averaged"), optax.adam(0.05), sgp.CompositionalMarginalLikelihood(0.5))
    before, _ = svi.update(svi.init(jax.random.key(0), X, Y), X, Y)
    after, loss = jax.jit(svi.stable_update)(before, X, np.where(np.arange(N) == 3, np.nan, Y))
    assert np.isnan(loss)
    for ours, expected in zip(
        jax.tree.leaves((after.mutable_state, svi.get_params(after))),
        jax.tree.leaves((before.mutable_state, svi.get_params(before))),
        strict=True,
    ):
        assert_allclose(ours, expected, rtol=0)


def test_the_gradient_of_the_compositional_loss_is_that_of_its_value():
    guide = guide_of(trained, "averaged")
    svi = SVI(trained, guide, optax.sgd(0.0), sgp.CompositionalMarginalLikelihood(0.5))
    state = svi.init(jax.random.key(0), X, Y)
    state, _ = svi.update(state, X, Y)
    params = {**svi.get_params(state), "f_auto_m": jnp.asarray(OTHER)}
    loss = svi.loss

    def at(moved):
        values = {**params, **moved, **state.mutable_state}
        return loss.loss_with_mutable_state(jax.random.key(0), values, trained, guide, X, Y)["loss"]

    moved = {key: params[key] for key in ("noise", "variance", "slope_auto_loc")}
    gradient = jax.jit(jax.grad(at))(moved)
    value = jax.jit(at)
    for key in moved:
        expected = oracles.derivative(lambda t, key=key: float(value({**moved, key: moved[key] + t})), 1e-2)
        assert_allclose(gradient[key], expected, rtol=1e-6)


# The optimizer.


def test_an_adversary_ascends_within_its_ball_and_stays_symmetric():
    adversary = Adversary(jnp.asarray(5.0 * ROOT)).projected()
    assert_allclose(np.linalg.norm(adversary.matrix), 1.0, rtol=1e-12)
    assert_allclose(adversary.matrix, adversary.matrix.T, rtol=1e-12)
    svi = SVI(
        fixed,
        guide_of(fixed, "adversarial"),
        sgp.DescentAscent(optax.sgd(0.0), optax.sgd(0.1)),
        sgp.MinimaxMarginalLikelihood(),
    )
    state = svi.init(jax.random.key(0), X, Y)
    losses = []
    for _ in range(6):
        state, loss = jax.jit(svi.update)(state, X, Y)
        losses.append(loss)
    assert np.all(np.diff(losses) > -1e-12)
    assert losses[-1] > losses[0] + 1.0
    assert np.linalg.norm(svi.get_params(state)["f_auto_B"].matrix) <= 1.0 + 1e-12


def test_another_optimizer_leaves_the_adversary_alone():
    guide = guide_of(fixed, "adversarial")
    params = initial_parameters(fixed, guide, X, Y)

    def loss(B):
        return loss_at({**params, "f_auto_B": B}, fixed, guide, X, Y, loss=sgp.MinimaxMarginalLikelihood())

    assert_allclose(jax.grad(loss)(params["f_auto_B"]).matrix, 0.0, atol=0)
    B = params["f_auto_B"]
    zero = jax.tree.map(jnp.zeros_like, B)
    assert np.any(jax.grad(lambda zero: jnp.sum(adversary_of(ProbedAdversary(B, zero))))(zero).matrix)


def test_a_step_that_is_not_finite_is_refused_and_counted():
    svi = SVI(
        fixed,
        guide_of(fixed, "adversarial"),
        sgp.DescentAscent(optax.adam(0.1), optax.sgd(0.1)),
        sgp.MinimaxMarginalLikelihood(),
    )
    before = svi.init(jax.random.key(0), X, Y)
    after, loss = jax.jit(svi.stable_update)(before, X, np.full(N, np.nan))
    assert np.isnan(loss)
    assert sgp.num_refused(after) == 1
    for ours, expected in zip(
        jax.tree.leaves(svi.get_params(after)), jax.tree.leaves(svi.get_params(before)), strict=True
    ):
        assert_allclose(ours, expected, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0.1, optax.sgd(0.1)), TypeError, "`descent` must be an optax transformation, got float"),
        ((optax.sgd(0.1), None), TypeError, "`ascent` must be an optax transformation, got NoneType"),
    ],
)
def test_descent_ascent_takes_optax_transformations(arguments, error, message):
    with pytest.raises(error, match=message):
        sgp.DescentAscent(*arguments)


def test_descent_ascent_needs_something_to_maximise():
    svi = SVI(fixed, guide_of(fixed, "root"), sgp.DescentAscent(optax.sgd(0.1), optax.sgd(0.1)), sgp.QuadratureELBO())
    with pytest.raises(ValueError, match="found no matrix to maximise over"):
        svi.init(jax.random.key(0), X, Y)


# Other guides, batches of one.


def test_the_batch_loss_takes_any_kernel_with_any_sparse_guide():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernels.SquaredExponential(0.7, 1.2), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = sgp.AutoSVGP(model, X[:3])
    params = initial_parameters(model, guide, X, Y)
    expected = oracles.gaussian_log_density(Y, 0.0, oracles.se(X, X, 0.7, 1.2) + S2 * np.eye(N))
    assert_allclose(-loss_at(params, model, guide, X, Y, loss=sgp.BatchMarginalLikelihood()), expected, rtol=1e-8)


@pytest.mark.parametrize("route", ROUTES)
def test_batches_of_one_row_are_taken(route):
    optim, loss = (make() for make in ROUTES[route])
    svi = SVI(trained, guide_of(trained, route), optim, loss)
    state = svi.init(jax.random.key(0), X[:1], Y[:1], num_data=N)
    update = jax.jit(lambda state, X, y: svi.update(state, X, y, num_data=N))
    for n in range(3):
        state, value = update(state, X[n : n + 1], Y[n : n + 1])
        assert np.isfinite(value)


@pytest.mark.exhaustive
def test_latents_of_a_plate_have_matrices_of_their_own():
    C = 2
    Y2 = np.stack([Y, -2.0 * Y])

    def model(X, Y=None):
        with numpyro.plate("class", C):
            f = numpyro.sample("f", sgp.GaussianProcess(features.FeatureMap(network, W), X))
        with numpyro.plate("class", C, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=Y)

    expected = sum(oracles.gaussian_log_density(row, 0.0, A.T @ A + S2 * np.eye(N)) for row in Y2)
    for route in ROUTES:
        guide, loss = guide_of(model, route), ROUTES[route][1]()
        svi = SVI(model, guide, optax.sgd(0.0), loss)
        state = svi.init(jax.random.key(0), X, Y2)
        params = svi.get_params(state)
        if route == "averaged":
            params = {**params, "f_auto_m": jnp.asarray(np.linalg.solve(F, A @ Y2.T).T)}
            average = {"F": jnp.stack([F, F]), "noise": jnp.full(C, S2), "step": jnp.asarray(1, jnp.int32)}
            params["f_auto_average"] = average
        elif route == "adversarial":
            L = np.linalg.cholesky(F / S2 - np.eye(R) + 1e-14 * np.eye(R))
            params = {**params, "f_auto_m": jnp.asarray(np.linalg.solve(F, A @ Y2.T).T), "f_auto_R": jnp.stack([L, L])}
        value = loss.loss_with_mutable_state(jax.random.key(0), params, model, guide, X, Y2)["loss"]
        assert_allclose(-value, expected, rtol=1e-8)


LOSSES = {
    "averaged": sgp.CompositionalMarginalLikelihood,
    "adversarial": sgp.MinimaxMarginalLikelihood,
    "natural": sgp.BatchMarginalLikelihood,
}


def with_gradient(form, model, X, Y, **keywords):
    """Loss and gradient at the start of a guide."""
    guide = guide_of(model, form)
    svi = SVI(model, guide, optax.sgd(0.1), LOSSES[form]())
    state = svi.init(jax.random.key(0), X, Y, **keywords)
    params = {name: value for name, value in svi.get_params(state).items() if not isinstance(value, Adversary)}
    rest = {**svi.get_params(state), **(state.mutable_state or {})}
    moving = {name: value for name, value in params.items() if isinstance(value, jax.Array)}

    def loss(moving):
        given = {**rest, **moving}
        return svi.loss.loss_with_mutable_state(jax.random.key(0), given, model, guide, X, Y, **keywords)["loss"]

    return jax.value_and_grad(loss)(moving)


@pytest.mark.parametrize("form", LOSSES)
@pytest.mark.exhaustive
def test_a_scale_of_the_whole_model_scales_the_loss(form):
    rows = slice(0, 3)
    plain = with_gradient(form, trained, X[rows], Y[rows], num_data=N)
    scaled = with_gradient(form, numpyro.handlers.scale(trained, scale=0.1), X[rows], Y[rows], num_data=N)
    jax.tree.map(lambda found, wanted: assert_allclose(found, 0.1 * wanted, rtol=1e-10, atol=1e-12), scaled, plain)


@pytest.mark.parametrize("form", LOSSES)
@pytest.mark.exhaustive
def test_rows_in_single_precision_go_with_parameters_in_double_precision(form):
    def mixed(X, y=None):
        kernel = features.FeatureMap(network, W.astype(np.float32), variance=positive("variance", 1.3))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, 0.2))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    loss, gradient = with_gradient(form, mixed, X.astype(np.float32), Y.astype(np.float32))
    wanted, wanted_gradient = with_gradient(form, mixed, X, Y)
    assert_allclose(loss, wanted, rtol=1e-5)
    assert gradient["variance"].dtype == jnp.float64
    assert_allclose(gradient["variance"], wanted_gradient["variance"], rtol=1e-4)


# Mistakes.


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sgp.CompositionalMarginalLikelihood(0.0), ValueError, r"`decay` must lie in \(0, 1\], got 0.0"),
        (lambda: sgp.CompositionalMarginalLikelihood(lambda t: 2.0), ValueError, "`decay` must lie"),
        (lambda: sgp.CompositionalMarginalLikelihood(num_particles=2), ValueError, "`num_particles` must be 1, got 2"),
        (lambda: sgp.MinimaxMarginalLikelihood("whitend"), ValueError, "`form` must be 'whitened' or 'printed'"),
        (lambda: sgp.MinimaxMarginalLikelihood(penalty=-1.0), ValueError, "`penalty` must be positive"),
        (lambda: sgp.MinimaxMarginalLikelihood(num_particles=3), ValueError, "`num_particles` must be 1"),
        (lambda: sgp.BatchMarginalLikelihood(num_particles=3), ValueError, "`num_particles` must be 1"),
    ],
)
def test_mistakes_in_a_loss_raise_when_it_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_penalties_below_their_thresholds_are_warned_of():
    with pytest.warns(UserWarning, match="printed penalty"):
        sgp.MinimaxMarginalLikelihood("printed")
    loss, guide = sgp.MinimaxMarginalLikelihood(penalty=1.5), guide_of(fixed, "adversarial")
    params = initial_parameters(fixed, guide, X, Y)
    with pytest.warns(UserWarning, match=r"μ = 1.5 is below the root of the rank, √3"):
        loss_at(params, fixed, guide, X, Y, loss=loss)


def variant(likelihood=lambda f, X: dist.Normal(f, NOISE), other=False, masked=False):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(features.FeatureMap(network, W), X))
        if other:
            g = numpyro.sample("g", sgp.GaussianProcess(features.FeatureMap(network, W), X))
            f = f + g
        with numpyro.plate("data", X.shape[0]), numpyro.handlers.mask(mask=X[:, 0] > 0 if masked else True):
            numpyro.sample("y", likelihood(f, X), obs=y)

    return model


def replicated(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(features.FeatureMap(network, W), X))
    with numpyro.plate("replicate", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=None if y is None else jnp.stack([y, y]))


def with_drawn_noise(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(features.FeatureMap(network, W), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.parametrize(
    ("model", "guide", "error", "message"),
    [
        (variant(lambda f, X: dist.StudentT(3.0, f, NOISE)), {}, TypeError, "normal likelihood, got StudentT"),
        (variant(lambda f, X: dist.Normal(2.0 * f, NOISE)), {}, ValueError, "mean of 'y' is computed from them"),
        (variant(lambda f, X: dist.Normal(f, 1.0 + X[:, 0] ** 2)), {}, ValueError, "one noise scale for all rows"),
        (variant(other=True), {}, ValueError, r"models with one GP site, got \['f', 'g'\]"),
        (variant(masked=True), {}, ValueError, "does not take masked observations"),
        (replicated, {}, ValueError, r"batch shape \(2,\) for latents of \(\)"),
        (with_drawn_noise, {"base": AutoNormal}, ValueError, r"the guide draws \['noise'\]"),
        (variant(), {"parametrization": "natural"}, TypeError, 'parametrization="averaged"'),
    ],
)
def test_mistakes_in_model_and_guide_are_explained(model, guide, error, message):
    guide = sgp.AutoWeightSpaceGP(model, **{"parametrization": "averaged", "base": AutoDelta, **guide})
    svi = SVI(model, guide, optax.sgd(0.1), sgp.CompositionalMarginalLikelihood())
    state = svi.init(jax.random.key(0), X, Y)
    params = {**svi.get_params(state), **(state.mutable_state or {})}
    with pytest.raises(error, match=message):
        svi.loss.loss_with_mutable_state(jax.random.key(0), params, model, guide, X, Y)


def test_an_average_that_another_loss_keeps_is_not_trained_by_quadrature_but_judged():
    guide, elbo = guide_of(fixed, "averaged"), sgp.QuadratureELBO(num_nodes=3)
    svi = SVI(fixed, guide, optax.adam(0.05), elbo)
    state = svi.init(jax.random.key(0), X, Y)
    with pytest.raises(TypeError, match=r"covariance of 'f' is in an average that `CompositionalMarginalLikelihood`"):
        svi.update(state, X, Y)
    average = {"F": jnp.asarray(F), "noise": jnp.asarray(S2), "step": jnp.asarray(1, jnp.int32)}
    params = {"f_auto_m": jnp.asarray(BEST), "f_auto_average": average}
    assert_allclose(elbo.loss(jax.random.key(0), params, fixed, guide, X, Y), -EVIDENCE, rtol=1e-10)


def test_a_guide_that_is_not_sparse_is_refused():
    with pytest.raises(TypeError, match=r"needs a sparse guide.*got AutoDelta"):
        sgp.BatchMarginalLikelihood().loss(jax.random.key(0), {}, fixed, AutoDelta(fixed), X, Y)
