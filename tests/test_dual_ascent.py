"""`DualAscent` against dense algebra: its steps, its fixed points, its projections, and what it refuses."""

import itertools
import pickle

from decoupled_oracle import (
    Dense,
    arbitrary,
    blocks_of,
    coefficients,
    decoupled_bound,
    dense_bound,
    dense_posterior,
    explained,
)
from grids import representative
from guides import LOOSE, initial_parameters
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import oracles
from problems import JITTER, LENGTHSCALE, MEAN, NOISE, VARIANCE, X_NEW, Model, N, X, Z
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.inducing import find_rows
from numpyro_sgp.posteriors.decoupled import formulas as decoupled_formulas
from numpyro_sgp.posteriors.decoupled.coefficients import Coefficients

pytestmark = pytest.mark.usefixtures("x64")

kinds = pytest.mark.parametrize("kind", representative(["orthogonal", "full"], ["orthogonal"]))


# Where rows are.


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [1, 3])
def test_rows_are_found_with_how_many_are_equal(dtype, columns):
    rng = np.random.default_rng(0)
    # Few values, so that many rows are equal, and numbers whose low bits are all zero.
    rows = rng.integers(-2, 3, size=(200, columns)).astype(dtype)
    rows[0] = -0.0
    queries = rng.integers(-3, 3, size=(50, columns)).astype(dtype)
    found = jax.jit(find_rows)(rows, queries)
    equal = np.all(rows[None] == queries[:, None], axis=-1)
    assert 0 < np.sum(~equal.any(axis=1)) < 50
    assert_array_equal(found.index, np.where(equal.any(axis=1), equal.argmax(axis=1), -1))
    assert_array_equal(found.count, equal.sum(axis=1))


def test_each_of_many_distinct_rows_is_found_where_it_stands():
    rows = np.random.default_rng(1).normal(size=(20_000, 2)).astype(np.float32)
    order = np.random.default_rng(2).permutation(len(rows))
    found = find_rows(jnp.asarray(rows), jnp.asarray(rows[order]))
    assert_array_equal(found.index, order)
    assert_array_equal(found.count, np.ones(len(rows)))


# Steps.


def start(kind, likelihood, natural=False, seed=0):
    model = Model(likelihood)
    guide = sgp.AutoDecoupledGP(model, X, Z, parametrization=kind, natural=natural)
    return model, guide, arbitrary(initial_parameters(model, guide, X, model.y), seed)


def dense(kind):
    return Dense(gamma=X, kind=kind)


def state_at(model, guide, params, optim, *args, **kwargs):
    svi = SVI(model, guide, optim, LOOSE)
    return svi, svi.init(jax.random.key(0), *args, init_params=params, **kwargs)


def gradients(kind, params, model, y):
    """g_n, the derivatives of the expected log-likelihood with respect to the marginal means."""
    mean, covariance = dense(kind).conditional(dense_posterior(kind, params, dense(kind)))
    by_mean, _ = oracles.expectation_gradients(model.log_density(y), [mean + MEAN], [np.diag(covariance)])
    return by_mean[0]


def own(params):
    return {name.removeprefix("f_auto_"): value for name, value in params.items() if name.startswith("f_auto_")}


def with_coefficients(kind, params, a):
    """Parameters with the coefficients a."""
    unit = coefficients(kind, own({**params, "f_auto_a": ones(params["f_auto_a"])}), dense(kind))
    return {**params, "f_auto_a": replaced(params["f_auto_a"], a / unit)}


def replaced(value, values):
    return Coefficients(jnp.asarray(values), value.residual, value.num_projected, value.of_data)


def ones(value):
    return replaced(value, np.ones(value.values.shape))


@pytest.mark.parametrize(
    ("kind", "natural"),
    representative(itertools.product(["orthogonal", "full"], [False, True]), [("orthogonal", True), ("full", False)]),
)
def test_steps_are_nesterov_s_with_the_dense_gradient(kind, natural):
    model, guide, params = start(kind, "poisson", natural)
    optim = sgp.DualAscent(step_size=0.1, momentum=0.7, averaging=None)
    svi, state = state_at(model, guide, params, optim, X, model.y)
    update = jax.jit(svi.update)
    ahead = coefficients(kind, own(params), dense(kind))
    velocity = np.zeros(N)
    for _ in range(3):
        state, loss = update(state, X, model.y)
        here = with_coefficients(kind, params, ahead)
        q_h = dense_posterior(kind, here, dense(kind))
        assert_allclose(-loss, dense_bound(model, q_h, dense(kind), model.y), rtol=1e-8)
        direction = gradients(kind, here, model, model.y) - ahead
        velocity = 0.7 * velocity + 0.1 * direction
        a = ahead + 0.1 * direction
        ahead = a + 0.7 * velocity
        assert_allclose(coefficients(kind, own(svi.get_params(state)), dense(kind)), a, rtol=1e-7)
    others = {name: value for name, value in svi.get_params(state).items() if name != "f_auto_a"}
    for name, value in others.items():
        jax.tree.map(assert_array_equal, value, params[name])


@pytest.mark.thorough
@kinds
def test_losses_and_steps_on_minibatches_average_to_those_on_all_rows(kind):
    model, guide, params = start(kind, "normal")
    optim = sgp.DualAscent(step_size=0.2, momentum=0.0, averaging=None)

    svi, state = state_at(model, guide, params, optim, X, model.y)

    @jax.jit
    def step(rows):
        new, loss = svi.update(state, jnp.asarray(X)[rows], jnp.asarray(model.y)[rows], num_data=N)
        return loss, svi.get_params(new)["f_auto_a"].values - params["f_auto_a"].values

    loss, moved = step(np.arange(N))
    # Batches of one and of six rows: each row in one of the first and in six of the second.
    for batches in ([[n] for n in range(N)], [np.delete(np.arange(N), n) for n in range(N)]):
        results = [step(np.asarray(rows)) for rows in batches]
        assert_allclose(np.mean([result[0] for result in results]), loss, rtol=1e-10)
        share = len(batches[0]) / N
        assert_allclose(np.mean([result[1] for result in results], axis=0), share * moved, rtol=1e-8, atol=1e-12)
        outside = np.setdiff1d(np.arange(N), batches[0])
        assert_array_equal(results[0][1][outside], np.zeros(len(outside)))


@pytest.mark.parametrize(
    ("kind", "likelihood"),
    representative(
        itertools.product(["orthogonal", "full"], ["normal", "bernoulli", "poisson"]),
        [("full", "normal"), ("orthogonal", "bernoulli"), ("full", "poisson")],
    ),
)
def test_it_ends_where_each_coefficient_is_the_gradient_at_its_row(kind, likelihood):
    model, guide, params = start(kind, likelihood)
    params = with_coefficients(kind, params, np.zeros(N))
    svi, state = state_at(model, guide, params, sgp.DualAscent(0.04, averaging=None), X, model.y)
    state, _ = jax.lax.scan(lambda s, _: svi.update(s, X, model.y), state, length=3000)
    params = svi.get_params(state)
    expected = gradients(kind, params, model, model.y)
    assert_allclose(coefficients(kind, own(params), dense(kind)), expected, rtol=1e-6, atol=1e-8)
    assert sgp.num_refused(state) == 0


def regression(X, y=None, num_data=None):
    kernel = sgp.kernels.SquaredExponential(jnp.asarray(LENGTHSCALE), VARIANCE)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, MEAN, jitter=JITTER))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@pytest.mark.exhaustive
def test_with_an_optimal_covariance_it_ends_at_the_collapsed_decoupled_bound():
    y = Model().y
    sparse = sgp.AutoSVGP(regression, Z, natural=True)
    natural = SVI(regression, sparse, sgp.NaturalGradient(1.0, optax.set_to_zero()), LOOSE)
    fitted = natural.run(jax.random.key(0), 2, X, y, progress_bar=False).params
    guide = sgp.AutoDecoupledGP(regression, X, Z, natural=True)
    svi = SVI(regression, guide, sgp.DualAscent(0.1, averaging=None), LOOSE)
    result = svi.run(jax.random.key(1), 3000, X, y, init_params=fitted, progress_bar=False)
    # The mean over β is Titsias' and stays; the rest of the mean is fitted to what it leaves.
    residual = y - MEAN - natural_mean(fitted, y)
    Q = explained(*blocks_of(Z))
    K = oracles.se(X, X, LENGTHSCALE, VARIANCE)
    expected = np.linalg.solve(K - Q + NOISE**2 * np.eye(N), residual)
    a = coefficients("orthogonal", own(result.params), dense("orthogonal"))
    assert_allclose(a, expected, rtol=1e-6)
    # Fitting the two in turn ends at the optimum of both.
    natural = SVI(regression, guide, sgp.NaturalGradient(1.0, optax.set_to_zero()), LOOSE)

    @jax.jit
    def in_turn(params):
        for each, steps in ((natural, 1), (svi, 300)):
            state = each.init(jax.random.key(0), X, y, init_params=params)
            state, _ = jax.lax.scan(lambda s, _, each=each: each.update(s, X, y), state, length=steps)
            params = each.get_params(state)
        return params

    params = result.params
    for _ in range(30):
        params = in_turn(params)
    svi = SVI(regression, guide, optax.sgd(0.0), LOOSE)
    state = svi.init(jax.random.key(0), X, y, init_params=params)
    assert_allclose(-svi.evaluate(state, X, y), decoupled_bound(K, Q), rtol=1e-6)


def natural_mean(params, y):
    del y
    Kuu, Kuf = blocks_of(Z)
    A = np.linalg.solve(np.linalg.cholesky(Kuu), Kuf)
    sites = params["f_auto_sites"]
    return A.T @ np.linalg.solve(np.eye(len(Z)) + sites.Lambda2, sites.lambda1)


@pytest.mark.thorough
def test_equal_rows_with_different_outcomes_share_a_coefficient():
    twice = np.concatenate([X, X[:3]])
    y = np.concatenate([Model().y, [1.0, -1.0, 0.5]])
    guide = sgp.AutoDecoupledGP(regression, twice, None, parametrization="full")
    svi = SVI(regression, guide, sgp.DualAscent(0.03, averaging=None), sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), 5000, twice, y, progress_bar=False)
    K, K_new = (oracles.se(twice, inputs, LENGTHSCALE, VARIANCE) for inputs in (twice, X_NEW))
    expected = K_new.T @ np.linalg.solve(K + NOISE**2 * np.eye(len(y)), y - MEAN)
    q = guide.posterior(jax.random.key(1), result.params, X_NEW)["f"]
    assert_allclose(q.mean - MEAN, expected, rtol=1e-7)
    assert_array_equal(result.params["f_auto_a"].values[N:], np.zeros(3))
    # The divergence counts it once.
    a = np.asarray(result.params["f_auto_a"].values) / np.sqrt(VARIANCE * 1.01)
    K_data = oracles.se(twice, twice, LENGTHSCALE, VARIANCE)
    error = y - MEAN - K_data @ a
    ell = -0.5 * np.sum(error**2 + VARIANCE) / NOISE**2 - 0.5 * len(y) * np.log(2.0 * np.pi * NOISE**2)
    assert_allclose(-result.losses[-1], ell - 0.5 * a @ K_data @ a, rtol=1e-7)
    # A batch with one of two equal rows moves their coefficient by a half of its decay.
    svi, state = state_at(regression, guide, result.params, sgp.DualAscent(0.2, momentum=0.0, averaging=None), twice, y)
    step = jax.jit(lambda X, y: svi.get_params(svi.update(state, X, y, num_data=N + 3)[0])["f_auto_a"].values)
    moves = [step(twice[n : n + 1], y[n : n + 1]) - result.params["f_auto_a"].values for n in range(N + 3)]
    assert_allclose(np.sum(moves, axis=0), np.zeros(len(y)), atol=1e-7)
    assert np.max(np.abs(moves[0])) > 1e-2


# Projections.


@pytest.mark.thorough
def test_tracked_projections_are_those_of_the_coefficients():
    data = np.concatenate([X, X[2:4]])  # two rows stand twice
    y, total = np.concatenate([Model().y, [0.5, -1.0]]), N + 2
    guide = sgp.AutoDecoupledGP(regression, data, Z)
    rows = np.random.default_rng(0).permuted(np.tile(np.arange(total), (200, 1)), axis=1)[:, :3]

    def run(refresh):
        optim = sgp.DualAscent(0.05, refresh=refresh, averaging=None)
        svi = SVI(regression, guide, optim, sgp.QuadratureELBO())
        params = arbitrary(initial_parameters(regression, guide, data, y))
        state = svi.init(jax.random.key(0), data, y, init_params=params)
        update = jax.jit(lambda s, rows: svi.update(s, jnp.asarray(data)[rows], jnp.asarray(y)[rows], num_data=total))
        losses = []
        for batch in rows:
            state, loss = update(state, batch)
            losses.append(loss)
        return state, losses

    tracked, losses = run(10_000)
    anew, expected = run(1)
    assert_allclose(losses, expected, rtol=1e-9)
    vectors = tracked.optim_state[1].vectors["f_auto_a"]
    unit = np.sqrt(VARIANCE * (tracked.optim_state[1].params["f_auto_a"].residual + 1e-2))
    oracle = Dense(gamma=data, kind="orthogonal")
    for vector, projected in zip((vectors.ahead, vectors.velocity), vectors.projected, strict=True):
        assert_allclose(projected, np.linalg.solve(oracle.L, oracle.Kug @ (vector / unit)), rtol=1e-9)
    assert_allclose(vectors.ahead, anew.optim_state[1].vectors["f_auto_a"].ahead, rtol=1e-9)


@pytest.mark.thorough
def test_blocks_of_the_kernel_matrix_change_nothing(monkeypatch):
    model, guide, params = start("orthogonal", "poisson")
    losses = []
    for entries in (2**25, 2 * N):
        monkeypatch.setattr(decoupled_formulas, "_MOST_ENTRIES", entries)
        svi, state = state_at(model, guide, params, sgp.DualAscent(0.1), X, model.y)
        state, first = svi.update(state, X, model.y)
        losses.append([first, svi.update(state, X, model.y)[1]])
    assert_allclose(losses[0], losses[1], rtol=1e-12)


# Other parameters.


def with_lengthscale(X, y=None):
    lengthscale = numpyro.param("lengthscale", jnp.asarray(LENGTHSCALE))
    kernel = sgp.kernels.SquaredExponential(lengthscale, VARIANCE)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, MEAN, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@pytest.mark.thorough
@kinds
def test_others_descend_the_gradient_of_the_dense_bound_at_the_coefficients(kind):
    y = Model().y
    guide = sgp.AutoDecoupledGP(with_lengthscale, X, Z, parametrization=kind)
    params = arbitrary(initial_parameters(with_lengthscale, guide, X, y))
    optim = sgp.DualAscent(0.1, others=optax.sgd(1.0))
    svi, state = state_at(with_lengthscale, guide, params, optim, X, y)
    moved = svi.get_params(svi.update(state, X, y)[0])["lengthscale"] - LENGTHSCALE

    def bound(d, h):
        lengthscale = LENGTHSCALE + h * np.eye(len(LENGTHSCALE))[d]
        at = Dense(gamma=X, lengthscale=lengthscale, kind=kind)
        return dense_bound(Model(), dense_posterior(kind, params, at), at, y)

    # Central differences of the fourth order.
    h = 1e-3
    expected = [
        (8 * (bound(d, h) - bound(d, -h)) - (bound(d, 2 * h) - bound(d, -2 * h))) / (12 * h)
        for d in range(len(LENGTHSCALE))
    ]
    assert_allclose(moved, expected, rtol=1e-6)


def with_noise(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.exhaustive
def test_hyperparameters_that_are_drawn_need_fresh_projections():
    y = Model().y
    guide = sgp.AutoDecoupledGP(with_noise, X, Z)
    svi = SVI(with_noise, guide, sgp.DualAscent(0.01), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, y)
    with pytest.raises(ValueError, match=r"draws \['lengthscale', 'noise'\].*refresh=1"):
        svi.update(state, X, y)
    for base, refresh in ((AutoDelta, 10), (AutoNormal, 1)):
        guide = sgp.AutoDecoupledGP(with_noise, X, Z, base=base)
        svi = SVI(with_noise, guide, sgp.DualAscent(0.01, refresh=refresh), sgp.QuadratureELBO())
        losses = svi.run(jax.random.key(0), 200, X, y, progress_bar=False).losses
        assert np.mean(losses[-50:]) < np.mean(losses[:10])


# As an optimizer.


@pytest.mark.thorough
def test_predictions_use_the_average_of_the_coefficients():
    model, guide, params = start("orthogonal", "normal")
    trajectories = {}
    for averaging in (None, 0.4):
        svi, state = state_at(model, guide, params, sgp.DualAscent(0.2, averaging=averaging), X, model.y)
        trajectories[averaging] = []
        for _ in range(6):
            state, _ = svi.update(state, X, model.y)
            trajectories[averaging].append(np.asarray(svi.get_params(state)["f_auto_a"].values))
    average = trajectories[None][0]
    for count, value in enumerate(trajectories[None][1:], 2):
        average = average + max(1.0 / count, 0.4) * (value - average)
    assert_allclose(trajectories[0.4][-1], average, rtol=1e-12)


@pytest.mark.exhaustive
def test_a_run_traces_once_and_float32_stays_float32():
    traces = []

    def model(X, y=None):
        traces.append(None)
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    with jax.enable_x64(False):
        single, y, beta = (jnp.asarray(value, jnp.float32) for value in (X, Model().y, Z))
        guide = sgp.AutoDecoupledGP(model, single, beta)
        svi = SVI(model, guide, sgp.DualAscent(0.1), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), single, y)
        update = jax.jit(svi.update)
        state, loss = update(state, single, y)
        count = len(traces)
        for _ in range(3):
            state, loss = update(state, single, y)
        assert len(traces) == count
        assert np.isfinite(loss)
        leaves = (loss, *jax.tree.leaves(state.optim_state[1].vectors))
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


@pytest.mark.thorough
def test_a_plate_of_latents_has_coefficients_each():
    labels = np.arange(N) % 3

    def model(X, y=None):
        with numpyro.plate("class", 3):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)

    guide = sgp.AutoDecoupledGP(model, X, Z)
    svi = SVI(model, guide, sgp.DualAscent(0.1), sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), 200, X, labels, progress_bar=False)
    assert result.params["f_auto_a"].values.shape == (3, N)
    assert np.mean(result.losses[-20:]) < result.losses[0] - 0.1
    # Probabilities sum to one, so the gradients with respect to the three means do to zero.
    assert_allclose(np.sum(result.params["f_auto_a"].values, axis=0), np.zeros(N), atol=0.05)


def test_a_row_that_is_not_in_the_basis_is_refused_and_counted():
    y = Model().y
    guide = sgp.AutoDecoupledGP(regression, X, Z)
    svi = SVI(regression, guide, sgp.DualAscent(0.1), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, y)
    moved, loss = jax.jit(svi.stable_update)(state, X + 1e-12, y)
    assert np.isnan(loss)
    assert sgp.num_refused(moved) == 1
    jax.tree.map(assert_array_equal, svi.get_params(moved), svi.get_params(state))
    state, loss = jax.jit(svi.stable_update)(moved, X, y)
    assert np.isfinite(loss)
    assert sgp.num_refused(pickle.loads(pickle.dumps(state.optim_state))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step_size": 0.0}, r"`step_size` must lie in \(0, 1\], got 0.0"),
        ({"step_size": 2.0}, "dual_step_size"),
        ({"momentum": 1.0}, r"`momentum` must lie in \[0, 1\)"),
        ({"averaging": 0.0}, "`averaging` must lie in .* or be None"),
        ({"refresh": 0}, "`refresh` must be a positive integer"),
    ],
)
def test_numbers_outside_their_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sgp.DualAscent(**arguments)


def test_others_that_are_no_transformation_are_refused():
    with pytest.raises(TypeError, match="`others` must be an optax transformation, got float"):
        sgp.DualAscent(0.1, 1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sgp.AutoDecoupledGP(regression, X[1:], Z), "lacks rows of the X"),
        (lambda: sgp.AutoDecoupledGP(regression, X + 1e-9, Z), "same scaling"),
        (lambda: sgp.AutoSVGP(regression, Z), "no coefficients of a mean among the parameters"),
        (lambda: sgp.AutoDecoupledGP(regression, X, Z, parametrization="solve"), "no coefficients"),
        (
            lambda: sgp.AutoDecoupledGP(regression, X, Z, parametrization="hybrid"),
            "'orthogonal' or 'full', got .*hybrid",
        ),
    ],
)
def test_a_guide_without_the_data_as_its_mean_basis_is_refused(make, message):
    svi = SVI(regression, make(), sgp.DualAscent(0.1), sgp.QuadratureELBO())
    with pytest.raises(ValueError, match=message):
        svi.update(svi.init(jax.random.key(0), X, Model().y), X, Model().y)


# The step size.


@kinds
def test_the_step_size_is_that_of_the_largest_eigenvalue(kind):
    guide = sgp.AutoDecoupledGP(regression, X, Z, parametrization=kind)
    params = initial_parameters(regression, guide, X, Model().y)
    found = guide.dual_step_size(jax.random.key(0), params, X, batch_size=5, curvature=1.0 / NOISE**2)["f"]
    K = oracles.se(X, X, LENGTHSCALE, VARIANCE)
    K = K - explained(*blocks_of(Z)) if kind == "orthogonal" else K
    largest = np.linalg.eigvalsh(K)[-1]
    stable = 1.3 * N / (5 * (1.0 + largest / NOISE**2))
    assert_allclose(found, min(stable, 0.1 * NOISE**2 / np.max(np.diag(K)), 1.0), rtol=1e-6)
    # What bounds it depends on the batch.
    of_one = guide.dual_step_size(jax.random.key(0), params, X, batch_size=1, curvature=1e-3)["f"]
    assert of_one == 1.0
    of_many = guide.dual_step_size(jax.random.key(0), params, X, batch_size=10_000, curvature=1.0)["f"]
    assert_allclose(of_many, 1.3 * N / (10_000 * (1.0 + largest)), rtol=1e-6)


@pytest.mark.thorough
@kinds
def test_the_step_size_knows_a_row_of_the_data_that_lies_by_itself(kind, monkeypatch):
    monkeypatch.setattr(decoupled_formulas, "_MOST_ENTRIES", 2 * len(Z))  # two rows at a time
    far = np.concatenate([X, 100.0 + X[:1]])
    guide = sgp.AutoDecoupledGP(regression, far, X if kind == "orthogonal" else Z, parametrization=kind)
    params = initial_parameters(regression, guide, X, Model().y)
    found = guide.dual_step_size(jax.random.key(0), params, X, batch_size=1, curvature=1.0)["f"]
    assert_allclose(found, 0.1 / VARIANCE, rtol=1e-6)


def test_a_step_size_needs_positive_numbers():
    guide = sgp.AutoDecoupledGP(regression, X, Z)
    params = initial_parameters(regression, guide, X, Model().y)
    with pytest.raises(ValueError, match="must be positive"):
        guide.dual_step_size(jax.random.key(0), params, X, batch_size=5, curvature=0.0)
