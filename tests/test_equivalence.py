"""Every guide against dense Gaussian algebra, and against the others where they must coincide."""

from functools import partial
import itertools
from pathlib import Path
import pickle

from grids import representative
from guides import (
    GUIDES,
    KINDS,
    LOOSE,
    MINIBATCH,
    NATURAL,
    ONE_SITE_A_ROW,
    arbitrary_parameters,
    initial_parameters,
    loss_at,
    optimizer,
)
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
from problems import (
    JITTER,
    LENGTHSCALE,
    MEAN,
    N_NEW,
    NOISE,
    VARIANCE,
    X_NEW,
    D,
    M,
    Model,
    N,
    X,
    Z,
    blocks,
    converged,
    dense_posterior,
    sites_of,
    svi_at,
)
import pytest

import numpyro_sgp as sgp

every_guide = pytest.mark.parametrize("name", GUIDES)
some_guides = pytest.mark.parametrize("name", representative(GUIDES, KINDS))
natural_guides = pytest.mark.parametrize("name", NATURAL)
some_natural_guides = pytest.mark.parametrize("name", representative(NATURAL, ["natural", "tied", "dense"]))
frozen = optax.set_to_zero()


def set_up(name, likelihood="normal", seed=0, **options):
    """Model, guide, data and arbitrary parameters."""
    model = Model(likelihood)
    guide = GUIDES[name](model, Z, **options)
    return model, guide, model.y, arbitrary_parameters(model, guide, X, model.y, seed=seed)


def titsias(name):
    prior = blocks(name)
    return oracles.titsias_bound(prior.Kuu, prior.Kuf, prior.kff, Model().y - MEAN, NOISE)


# Each guide is the dense Gaussian that its parameters stand for.


@every_guide
@pytest.mark.usefixtures("x64")
def test_the_posterior_at_new_inputs_is_the_dense_conditional(name):
    _model, guide, _, params = set_up(name)
    prior = blocks(name, X_NEW)
    m, S = dense_posterior(name, params, prior, blocks(name))
    mean, covariance = oracles.conditional(m, S, prior.Kuu, prior.Kuf, prior.Kff)
    q = guide.posterior(jax.random.key(1), params, X_NEW)["f"]
    assert_allclose(q.mean, mean + MEAN, rtol=1e-8)
    assert_allclose(q.variance, np.diag(covariance), rtol=1e-8)
    assert_allclose(q.covariance(), covariance, rtol=1e-8, atol=1e-8)
    assert_allclose(q.kl, oracles.gaussian_kl(m, S, prior.Kuu), rtol=1e-8)


@pytest.mark.parametrize("likelihood", ["normal", "poisson", "student_t"])
@every_guide
@pytest.mark.usefixtures("x64")
def test_the_loss_is_minus_the_dense_bound(name, likelihood):
    model, guide, y, params = set_up(name, likelihood)
    prior = blocks(name)
    m, S = dense_posterior(name, params, prior)
    bound = oracles.elbo(model.log_density(y), m, S, prior.Kuu, prior.Kuf, prior.Kff, MEAN)
    assert_allclose(loss_at(params, model, guide, X, y, loss=LOOSE), -bound, rtol=1e-8)


@some_guides
@pytest.mark.usefixtures("x64")
def test_a_guide_starts_at_the_prior(name):
    model = Model("poisson")
    guide = GUIDES[name](model, Z)
    params = initial_parameters(model, guide, X, model.y)
    q = guide.posterior(jax.random.key(1), params, X)["f"]
    expected = oracles.expected_log_density(model.log_density(model.y), [np.full(N, MEAN)], [np.full(N, VARIANCE)])
    assert_allclose(q.kl, 0.0, atol=1e-12)
    assert_allclose(q.covariance(), oracles.se(X, X, LENGTHSCALE, VARIANCE), atol=1e-12)
    assert_allclose(loss_at(params, model, guide, X, model.y), -np.sum(expected), rtol=1e-10)


@every_guide
@pytest.mark.usefixtures("x64")
def test_the_bound_is_below_the_evidence_from_anywhere(name):
    model, guide, y, _ = set_up(name)
    K = oracles.se(X, X, LENGTHSCALE, VARIANCE)
    evidence = oracles.gp_regression(K, K, K, y - MEAN, NOISE)[2]
    for seed in range(5):
        params = arbitrary_parameters(model, guide, X, y, seed=seed)
        q = guide.posterior(jax.random.key(1), params, X)["f"]
        assert q.kl > 0.0
        assert -loss_at(params, model, guide, X, y) < evidence


# One natural step on a Gaussian likelihood.


@natural_guides
@pytest.mark.usefixtures("x64")
def test_one_natural_step_on_a_gaussian_likelihood_is_titsias_from_any_start(name):
    model, guide, y, _ = set_up(name)
    optim, update = sgp.NaturalGradient(1.0, frozen), None
    for seed in range(3):
        params = arbitrary_parameters(model, guide, X, y, seed=seed)
        svi, state = svi_at(params, model, guide, optim, X, y, loss=LOOSE)
        update, losses = update or jax.jit(svi.update), []
        for _ in range(3):
            before = state
            state, loss = update(state, X, y)
            losses.append(loss)
        assert_allclose(losses[1:], -titsias(name), rtol=1e-8)
        for old, new in zip(sites_of(svi, before), sites_of(svi, state), strict=True):
            assert_allclose(new, old, rtol=1e-8, atol=1e-8)
        assert sgp.num_refused(state) == 0


@pytest.mark.usefixtures("x64")
def test_the_dense_posterior_after_one_step_is_gp_regression():
    model, guide, y, params = set_up("dense")
    svi, state = svi_at(params, model, guide, sgp.NaturalGradient(1.0, frozen), X, y)
    state, _ = jax.jit(svi.update)(state, X, y)
    K, K_new = oracles.se(X, X, LENGTHSCALE, VARIANCE), oracles.se(X, X_NEW, LENGTHSCALE, VARIANCE)
    K_new_new = oracles.se(X_NEW, X_NEW, LENGTHSCALE, VARIANCE)
    mean, covariance, evidence = oracles.gp_regression(K, K_new, K_new_new, y - MEAN, NOISE)
    q = guide.posterior(jax.random.key(1), svi.get_params(state), X_NEW)["f"]
    assert_allclose(svi.evaluate(state, X, y), -evidence, rtol=1e-8)
    assert_allclose(q.mean, mean + MEAN, rtol=1e-8)
    assert_allclose(q.covariance(), covariance, rtol=1e-8, atol=1e-10)


# Inducing inputs at the data: every guide is GP regression.


def at_optimum_of_z_equal_x(name, model, guide, y, jitter):
    """Parameters of the optimum, by one natural step or, for means and roots, by the dense solution."""
    params = initial_parameters(model, guide, X, y)
    if name in NATURAL:
        svi, state = svi_at(params, model, guide, sgp.NaturalGradient(1.0, frozen), X, y)
        return svi.get_params(jax.jit(svi.update)(state, X, y)[0])
    K = oracles.with_jitter(oracles.se(X, X, LENGTHSCALE, VARIANCE), jitter)
    m, S, _ = oracles.gp_regression(K, K, K, y - MEAN, NOISE)
    L = np.linalg.cholesky(K)
    if name == "whitened":
        m, S = np.linalg.solve(L, m), np.linalg.solve(L, np.linalg.solve(L, S).T)
    return {**params, "f_auto_m": m, "f_auto_S_sqrt": np.linalg.cholesky(S)}


@some_guides
@pytest.mark.usefixtures("x64")
def test_with_inducing_inputs_at_the_data_every_guide_is_gp_regression(name):
    jitter = 1e-10
    model = Model(jitter=jitter)
    guide, y = GUIDES[name](model, X), Model().y
    params = at_optimum_of_z_equal_x(name, model, guide, y, jitter)
    K, K_new = oracles.se(X, X, LENGTHSCALE, VARIANCE), oracles.se(X, X_NEW, LENGTHSCALE, VARIANCE)
    K_new_new = oracles.se(X_NEW, X_NEW, LENGTHSCALE, VARIANCE)
    assert_allclose(-loss_at(params, model, guide, X, y), oracles.gp_regression(K, K, K, y - MEAN, NOISE)[2], rtol=1e-8)
    for inputs, cross, own in ((X, K, K), (X_NEW, K_new, K_new_new)):
        mean, covariance, _ = oracles.gp_regression(K, cross, own, y - MEAN, NOISE)
        q = guide.posterior(jax.random.key(1), params, inputs)["f"]
        assert_allclose(q.mean, mean + MEAN, rtol=1e-8)
        assert_allclose(q.variance, np.diag(covariance), rtol=1e-8)
        assert_allclose(q.covariance(), covariance, rtol=1e-8, atol=1e-8)


# Gradients of hyperparameters.


def dense_loss(name, params, y, lengthscale, variance, noise, Z=Z):
    model = Model("student_t")
    prior = blocks(name, Z=Z, lengthscale=lengthscale, variance=variance)
    m, S = dense_posterior(name, params, prior)
    return -oracles.elbo(model.log_density(y, noise), m, S, prior.Kuu, prior.Kuf, prior.Kff, MEAN)


@some_guides
@pytest.mark.usefixtures("x64")
def test_the_gradient_of_hyperparameters_is_that_of_the_dense_bound_with_the_posterior_parameters_fixed(name):
    model, guide, y, params = set_up(name, "student_t")
    theta = {key: params[key] for key in ("lengthscale", "variance", "noise")}
    gradient = jax.grad(lambda theta: loss_at({**params, **theta}, model, guide, X, y))(theta)
    dense = partial(dense_loss, name, params, y)
    for index, unit in enumerate(np.eye(2)):
        expected = oracles.derivative(lambda t, unit=unit: dense(LENGTHSCALE + t * unit, VARIANCE, NOISE))
        assert_allclose(gradient["lengthscale"][index], expected, rtol=1e-8)
    assert_allclose(
        gradient["variance"], oracles.derivative(lambda t: dense(LENGTHSCALE, VARIANCE + t, NOISE)), rtol=1e-8
    )
    assert_allclose(gradient["noise"], oracles.derivative(lambda t: dense(LENGTHSCALE, VARIANCE, NOISE + t)), rtol=1e-8)


@some_natural_guides
@pytest.mark.usefixtures("x64")
def test_an_update_moves_hyperparameters_along_the_gradient_at_the_old_sites(name):
    model, guide, y, params = set_up(name, "student_t")
    rate = 1e-3
    svi, state = svi_at(params, model, guide, sgp.NaturalGradient(0.5, optax.sgd(rate)), X, y)
    old = svi.optim.get_params(state.optim_state)
    new = svi.optim.get_params(jax.jit(svi.update)(state, X, y)[0].optim_state)
    dense = partial(dense_loss, name, params, y)
    # Positive parameters are trained by their logarithm.
    slope = oracles.derivative(lambda t: dense(LENGTHSCALE, VARIANCE * np.exp(t), NOISE))
    assert_allclose((old["variance"] - new["variance"]) / rate, slope, rtol=1e-8)
    slope = oracles.derivative(lambda t: dense(LENGTHSCALE * np.exp([0.0, t]), VARIANCE, NOISE))
    assert_allclose((old["lengthscale"][1] - new["lengthscale"][1]) / rate, slope, rtol=1e-8)


@pytest.mark.parametrize("name", [name for name in GUIDES if name != "dense"])
@pytest.mark.usefixtures("x64")
def test_the_gradient_of_trained_inducing_inputs_is_that_of_the_dense_bound(name):
    model, guide, y, params = set_up(name, "student_t", learn_inducing=True)
    direction = np.random.default_rng(3).normal(size=(M, D))

    def loss(t):
        inducing = sgp.InducingPoints(jnp.asarray(Z) + t * direction)
        return loss_at({**params, "f_auto_inducing": inducing}, model, guide, X, y)

    def dense(t):
        moved = Z + t * direction
        if name != "tied":
            return dense_loss(name, params, y, LENGTHSCALE, VARIANCE, NOISE, moved)
        # Sites of functions at the reference, whose jitter moves along.
        prior = blocks(name, Z=moved)
        shared = oracles.se(Z, moved, LENGTHSCALE, VARIANCE) + JITTER * VARIANCE * np.eye(M)
        sites = params["f_auto_sites"]
        m, S = oracles.from_sites(sites.lambda1, sites.Lambda2, prior.Kuu, shared @ np.linalg.inv(prior.Kuu))
        return -oracles.elbo(model.log_density(y), m, S, prior.Kuu, prior.Kuf, prior.Kff, MEAN)

    assert_allclose(loss(0.0), dense(0.0), rtol=1e-8)
    assert_allclose(jax.grad(loss)(0.0), oracles.derivative(dense, 2e-3), rtol=1e-8)


@pytest.mark.parametrize("name", ["unwhitened", "per_datum"])
@pytest.mark.usefixtures("x64")
def test_fixed_inducing_inputs_have_no_gradient(name):
    model, guide, y, params = set_up(name)
    gradient = jax.grad(lambda inducing: loss_at({**params, "f_auto_inducing": inducing}, model, guide, X, y))(
        params["f_auto_inducing"]
    )
    assert_allclose(gradient.Z, 0.0, atol=0.0)


# The M-step of t-SVGP (Adam et al. 2021, equations 14 and 15).


def bernoulli_optimum(name, steps=60):
    """Parameters after full natural steps to convergence at fixed hyperparameters."""
    model, guide, y, params = set_up(name, "bernoulli")
    svi, state = svi_at(params, model, guide, sgp.NaturalGradient(1.0, frozen, m_steps=0), X, y)
    return model, guide, y, svi.get_params(converged(svi, state, steps, X, y))


@some_natural_guides
@pytest.mark.usefixtures("x64")
def test_at_the_optimum_of_the_e_step_the_gradient_of_hyperparameters_is_that_at_fixed_q_u(name):
    model, guide, y, params = bernoulli_optimum(name)
    prior = blocks(name)
    m, S = dense_posterior(name, params, prior)

    def fixed_q(lengthscale, variance):
        prior = blocks(name, lengthscale=lengthscale, variance=variance)
        return -oracles.elbo(model.log_density(y), m, S, prior.Kuu, prior.Kuf, prior.Kff, MEAN)

    theta = {key: params[key] for key in ("lengthscale", "variance")}
    gradient = jax.grad(lambda theta: loss_at({**params, **theta}, model, guide, X, y))(theta)
    expected = oracles.derivative(lambda t: fixed_q(LENGTHSCALE + t * np.array([0.0, 1.0]), VARIANCE))
    assert_allclose(gradient["lengthscale"][1], expected, rtol=1e-7)  # q(u) is optimal to 1e-8
    expected = oracles.derivative(lambda t: fixed_q(LENGTHSCALE, VARIANCE + t))
    assert_allclose(gradient["variance"], expected, rtol=1e-7)


def banana(rows):
    path = Path(__file__).parents[1] / "examples" / "data" / "banana.csv"
    table = np.loadtxt(path, delimiter=",", skiprows=3, max_rows=rows)
    return table[:, :2], table[:, 2]


def classification(X, y=None, num_data=None):
    lengthscale = numpyro.param("lengthscale", 0.5)
    variance = numpyro.param("variance", 1.5)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


@pytest.mark.usefixtures("x64")
@pytest.mark.exhaustive
def test_away_from_the_hyperparameters_of_the_e_step_fixed_sites_give_the_tighter_bound():
    # Figure 1 of Adam et al. (2021): per-datum and projected sites above q(v) fixed, and that above q(u) fixed.
    X, y = banana(60)
    Z = X[::6]
    bounds = {}
    for name in ("per_datum", "tied", "natural"):
        guide = GUIDES[name](classification, Z)
        svi = SVI(classification, guide, sgp.NaturalGradient(1.0, frozen, m_steps=0), sgp.QuadratureELBO())
        state = converged(svi, svi.init(jax.random.key(0), X, y), 30, X, y)
        bounds[name] = (guide, svi.get_params(state))
    Kuu = oracles.with_jitter(oracles.se(Z, Z, 0.5, 1.5), 1e-6)
    W = np.linalg.inv(np.linalg.cholesky(Kuu))  # of whitened sites
    m, S = oracles.from_sites(*map(np.asarray, sites_of(svi, state)), Kuu, W)
    unwhitened = GUIDES["unwhitened"](classification, Z)
    start = initial_parameters(classification, unwhitened, X, y)
    bounds["unwhitened"] = (unwhitened, {**start, "f_auto_m": m, "f_auto_S_sqrt": np.linalg.cholesky(S)})

    factors = np.array([0.6, 0.8, 1.0, 1.25, 1.6, 2.0])

    def bound(guide, params):
        def at(factor):
            return -loss_at({**params, "lengthscale": 0.5 * factor}, classification, guide, X, y)

        return np.asarray(jax.jit(jax.vmap(at))(factors))

    per_datum, tied, natural, unwhitened = (bound(*value) for value in bounds.values())
    assert_allclose([bound[2] for bound in (per_datum, tied, unwhitened)], natural[2], rtol=1e-8)
    away = factors != 1.0
    assert np.all(per_datum[away] > natural[away])
    assert np.all(tied[away] > natural[away])
    assert np.all(natural[away] > unwhitened[away])


# Minibatches, by enumeration.


def batches(kind):
    if kind == "disjoint":
        return [np.array(rows) for rows in ((0, 1, 2), (3, 4, 5))], 6
    return [np.array(rows) for rows in itertools.combinations(range(N), 3)], N


@pytest.mark.parametrize(
    ("name", "kind"),
    representative(
        [*[(name, "subsets") for name in MINIBATCH], ("whitened", "disjoint"), ("tied", "disjoint")],
        [("whitened", "subsets"), ("natural", "subsets"), ("tied", "disjoint")],
    ),
)
@pytest.mark.usefixtures("x64")
def test_losses_and_updates_on_minibatches_average_to_those_on_all_rows(name, kind):
    rows, size = batches(kind)
    model = Model("student_t_with_outliers")  # the floor of a step is active in it
    guide, X_all, y_all = GUIDES[name](model, Z), X[:size], model.y[:size]
    params = arbitrary_parameters(model, guide, X_all, y_all)
    optim = sgp.NaturalGradient(0.3, optax.sgd(1e-3)) if name in NATURAL else optax.sgd(1e-3)
    svi, state = svi_at(params, model, guide, optim, X_all, y_all)

    @jax.jit
    def step(X, y):
        new, loss = svi.update(state, X, y, size)
        return loss, {
            key: value for key, value in svi.optim.get_params(new.optim_state).items() if key != "auto_latents"
        }

    steps = [step(X_all[batch], y_all[batch]) for batch in rows]
    average = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *steps)
    full = step(X_all, y_all)
    for got, expected in zip(jax.tree.leaves(average), jax.tree.leaves(full), strict=True):
        assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


def subsampling(X, y=None, batch_size=None):
    kernel = sgp.kernels.SquaredExponential(jnp.asarray(LENGTHSCALE), VARIANCE)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, MEAN, jitter=JITTER))
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size):
        f_batch = numpyro.subsample(f, event_dim=0)
        y_batch = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.StudentT(3.0, f_batch, NOISE), obs=y_batch)


@pytest.mark.parametrize("name", representative([*ONE_SITE_A_ROW, "tied", "natural"], ["per_datum", "natural"]))
@pytest.mark.usefixtures("x64")
def test_natural_steps_on_rows_subsampled_in_the_model_average_to_those_on_all_rows(name):
    y = jnp.asarray(Model("student_t_with_outliers").y)
    params = arbitrary_parameters(subsampling, GUIDES[name](subsampling, Z), X, y)

    def step(rows, batch_size):
        model = subsampling if rows is None else handlers.substitute(subsampling, data={"data": rows})
        guide = GUIDES[name](model, Z)
        svi, state = svi_at(params, model, guide, sgp.NaturalGradient(0.3, frozen), X, y, batch_size)
        new, loss = svi.update(state, X, y, batch_size)
        return loss, sites_of(svi, new)

    losses, steps = jax.lax.map(lambda rows: step(rows, 3), np.stack(batches("subsets")[0]))
    full, (lambda1, Lambda2) = step(None, None)
    assert_allclose(np.mean(losses), full, rtol=1e-10)
    assert_allclose(np.mean(steps[0], axis=0), lambda1, rtol=1e-10)
    assert_allclose(np.mean(steps[1], axis=0), Lambda2, rtol=1e-10)


# Compilation, dtypes, storage.


@pytest.mark.parametrize("name", ["whitened", pytest.param("tied", marks=pytest.mark.exhaustive)])
@pytest.mark.usefixtures("x64")
def test_a_compiled_update_is_the_uncompiled_one_and_is_not_traced_again(name):
    model, guide, y, params = set_up(name, "poisson")
    svi, state = svi_at(params, model, guide, optimizer(name), X, y)
    update = jax.jit(svi.update)
    uncompiled, compiled = svi.update(state, X, y), update(state, X, y)
    assert_allclose(compiled[1], uncompiled[1], rtol=1e-12)
    for got, expected in zip(
        jax.tree.leaves(svi.get_params(compiled[0])), jax.tree.leaves(svi.get_params(uncompiled[0])), strict=True
    ):
        assert_allclose(got, expected, rtol=1e-8, atol=1e-12)
    traces, state = len(model.traces), compiled[0]
    for _ in range(3):
        state, _ = update(state, X, y)
    assert len(model.traces) == traces


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["whitened", "per_datum"])
@pytest.mark.usefixtures("x64")
def test_a_long_run_traces_the_model_no_more_often_than_a_short_one(name):
    def traces(steps):
        model, guide, y, _ = set_up(name, "poisson")
        svi = SVI(model, guide, optimizer(name), sgp.QuadratureELBO())
        before = len(model.traces)
        svi.run(jax.random.key(0), steps, X, y, progress_bar=False)
        return len(model.traces) - before

    assert traces(20) == traces(2)


@pytest.mark.parametrize(
    ("name", "enabled"),
    representative([*((name, False) for name in KINDS), ("tied", True)], [("whitened", False), ("tied", True)]),
)
def test_a_float32_fit_stays_float32_and_its_loss_is_the_dense_bound(name, enabled):
    model = Model("normal", jitter=1e-4)
    optim = sgp.NaturalGradient(0.5, optax.sgd(1e-2)) if name in NATURAL else optax.sgd(1e-2)
    with jax.enable_x64(enabled):
        X32, y32, Z32 = (jnp.asarray(value, np.float32) for value in (X, model.y, Z))
        guide = GUIDES[name](model, Z32)
        svi = SVI(model, guide, optim, LOOSE)
        update = jax.jit(svi.update)
        state, first = update(svi.init(jax.random.key(0), X32, y32), X32, y32)
        params = svi.get_params(state)
        _, loss = update(state, X32, y32)
        q = guide.posterior(jax.random.key(1), params, X32)["f"]
        values = (*jax.tree.leaves(params), first, loss, q.mean, q.variance, q.kl)
        assert {value.dtype for value in values} == {np.dtype(np.float32)}
    lengthscale, variance, noise = (np.asarray(params[key], float) for key in ("lengthscale", "variance", "noise"))
    prior = blocks(name, lengthscale=lengthscale, variance=variance, jitter=1e-4)
    m, S = dense_posterior(name, params, prior)
    log_density = model.log_density(model.y, noise)
    bound = oracles.elbo(log_density, m, S, prior.Kuu, prior.Kuf, prior.Kff, MEAN)
    # Kuu has condition 8, and 450 at the data: the rounding of float32, 6e-8, grows to less than 1e-5 of the loss.
    assert_allclose(loss, -bound, rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("x64")
def test_a_pickled_guide_and_parameters_predict_the_same_at_another_number_of_rows(name):
    _model, guide, _y, params = set_up(name)
    copy, copied_params = pickle.loads(pickle.dumps((guide, params)))
    expected, q = (g.posterior(jax.random.key(1), p, X_NEW)["f"] for g, p in ((guide, params), (copy, copied_params)))
    assert q.mean.shape == (N_NEW,)
    assert_allclose(q.mean, expected.mean, rtol=0.0)
    assert_allclose(q.covariance(), expected.covariance(), rtol=0.0)
    draws = copy.sample_posterior(jax.random.key(2), copied_params, X_NEW, sample_shape=(3,))
    assert draws["f"].shape == (3, N_NEW)
