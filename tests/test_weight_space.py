"""Posteriors over the weights of kernels of finite rank: against dense Gaussians, the evidence, and t-SVGP."""

import dataclasses
import functools
import itertools
import pickle
import warnings

from grids import representative
from guides import initial_parameters, loss_at
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
import optax
import oracles
from problems import LIKELIHOODS, MEAN, NOISE, X_NEW, N, X, converged
import pytest
from scipy.optimize import minimize
from scipy.special import gammaln

import numpyro_sgp as sgp
from numpyro_sgp import features, kernels
from numpyro_sgp.features.finite_rank import precision_matrix
from numpyro_sgp.fitting.averages import warn_of_averages
from numpyro_sgp.posteriors.sites import TiedSites
from numpyro_sgp.posteriors.weight_space import formulas as weight_space_formulas
from numpyro_sgp.posteriors.weight_space.stale import StaleSites

pytestmark = pytest.mark.usefixtures("x64")

frozen = optax.set_to_zero()
RNG = np.random.default_rng(11)
Z = RNG.uniform(-1.0, 1.0, size=(4, 2))
W = RNG.normal(size=(2, 4))


def network(params, X):
    return jnp.tanh(X @ params)


# Kernels of two hyperparameters: one moves the features, the other the prior of the weights (and the features of
# `inducing`).
KERNELS = {
    "map": lambda a, b: features.FeatureMap(network, a * W, variance=b),
    "hilbert": lambda a, b: features.HilbertSpace(kernels.Matern52(a, b), (2, 3), (-2.0, 2.0)),
    "fourier": lambda a, b: features.RandomFourier(kernels.SquaredExponential(a, b), 4, jax.random.key(0)),
    "inducing": lambda a, b: features.InducingBasis(kernels.SquaredExponential(a, b), Z),
    "expanded": lambda a, b: b * kernels.Linear(a) + kernels.Constant(0.3),
}
A, B = 0.9, 1.4
FORMS = ["natural", "mean", "root", "natural, held", "mean, held"]
HELD = 3
# Each mean once, and a posterior that is held.
some_forms = pytest.mark.parametrize("form", representative(FORMS, ["natural", "root", "mean, held"]))


@functools.cache
def model_with(name, likelihood="normal", a=A, b=B):
    """A GP with trained hyperparameters under a likelihood, on minibatches where `num_data` is given."""

    def model(X, y=None, num_data=None):
        def positive(name, value):
            return numpyro.param(name, np.asarray(value), constraint=constraints.positive)

        kernel = KERNELS[name](positive("a", a), positive("b", b))
        noise = positive("noise", NOISE)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, MEAN))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", LIKELIHOODS[likelihood].distribution(f, noise), obs=y)

    return model


def y_of(likelihood="normal"):
    return LIKELIHOODS[likelihood].y


def guide_of(model, form):
    parametrization, _, held = form.partition(", ")
    return sgp.AutoWeightSpaceGP(model, parametrization=parametrization, refresh=HELD if held else 1)


def held_sites(m, Lambda2, *, with_mean):
    """A posterior of whitened weights that is held, and sums that are not those it was made of."""
    P = np.eye(len(m)) + Lambda2
    L = np.linalg.cholesky(P)
    divergence = 0.5 * (np.trace(np.linalg.inv(P)) - len(m) + np.linalg.slogdet(P)[1])
    mean = m if with_mean else np.zeros(0)
    arrays = (RNG.normal(size=mean.shape), 2.0 * Lambda2, mean, np.linalg.inv(L), np.asarray(divergence))
    return StaleSites(*map(jnp.asarray, arrays), jnp.asarray(1.0), jnp.asarray(1.0 * HELD), HELD)


@functools.cache
def set_up(name, form, likelihood="normal"):
    """Model, guide, and parameters away from the prior."""
    model = model_with(name, likelihood)
    guide = guide_of(model, form)
    params = initial_parameters(model, guide, X, y_of(likelihood))
    r = rank(name)
    root = RNG.normal(size=(r, r))
    if form.endswith(", held"):
        own = {"f_auto_sites": held_sites(RNG.normal(size=r), root @ root.T, with_mean=form.startswith("natural"))}
        if form.startswith("mean"):
            own["f_auto_m"] = RNG.normal(size=r)
    elif form == "root":
        own = {"f_auto_m": RNG.normal(size=r), "f_auto_R": root}
    elif form == "mean":
        sites = TiedSites(jnp.zeros(0), jnp.asarray(root @ root.T))
        own = {"f_auto_m": RNG.normal(size=r), "f_auto_sites": sites}
    else:
        own = {"f_auto_sites": TiedSites(jnp.asarray(RNG.normal(size=r)), jnp.asarray(root @ root.T))}
    assert own.keys() <= params.keys()
    return model, guide, {**params, **own}


def parts(name, inputs=X, a=A, b=B):
    """Features and prior covariance of the weights, dense."""
    kernel = features.as_finite_rank(KERNELS[name](a, b))
    Phi = np.asarray(kernel.features(inputs))
    return Phi, np.asarray(precision_matrix(kernel, Phi.shape[-1]))


def rank(name):
    return parts(name)[0].shape[-1]


def dense_posterior(name, params, a=A, b=B):
    """Mean and covariance of q(w) that the parameters stand for."""
    _, S = parts(name, a=a, b=b)
    L = np.linalg.cholesky(S)
    if "f_auto_R" in params:
        R = np.tril(params["f_auto_R"])
        covariance = np.linalg.inv(L @ (np.eye(len(S)) + R @ R.T) @ L.T)
        return np.linalg.solve(L.T, params["f_auto_m"]), covariance
    if isinstance(params["f_auto_sites"], StaleSites):  # of the whitened weights
        root = np.linalg.solve(L.T, np.asarray(params["f_auto_sites"].root).T)
        return np.linalg.solve(L.T, params.get("f_auto_m", params["f_auto_sites"].m)), root @ root.T
    lambda1, Lambda2 = np.asarray(params["f_auto_sites"].lambda1), np.asarray(params["f_auto_sites"].Lambda2)
    if "f_auto_m" in params:
        if name == "inducing":  # sites of the whitened weights
            Lambda2 = L @ Lambda2 @ L.T
        return np.linalg.solve(L.T, params["f_auto_m"]), np.linalg.inv(S + Lambda2)
    if name == "inducing":  # sites of u = S w
        lambda1, Lambda2 = S @ lambda1, S @ Lambda2 @ S
    covariance = np.linalg.inv(S + Lambda2)
    return covariance @ lambda1, 0.5 * (covariance + covariance.T)


def dense_bound(name, params, likelihood="normal", a=A, b=B):
    (Phi, S), (m, V) = parts(name, a=a, b=b), dense_posterior(name, params, a, b)
    log_density = functools.partial(LIKELIHOODS[likelihood].log_density, y=y_of(likelihood), noise=NOISE)
    variances = np.einsum("ni,ij,nj->n", Phi, V, Phi)
    ell = oracles.expected_log_density(log_density, [Phi @ m + MEAN], [variances])
    return np.sum(ell) - oracles.gaussian_kl(m, V, np.linalg.inv(S))


def log_evidence(name, a=A, b=B, noise=NOISE):
    Phi, S = parts(name, a=a, b=b)
    K = Phi @ np.linalg.solve(S, Phi.T)
    return oracles.gaussian_log_density(y_of(), MEAN, K + noise**2 * np.eye(N))


# The pure functions.


def test_moments_are_those_of_the_dense_gaussian_over_the_weights():
    r = 4
    Phi, s, root, vector = (
        RNG.normal(size=(N, r)),
        np.array([0.3, 1.0, 2.0, 0.7]),
        RNG.normal(size=(r, r)),
        RNG.normal(size=r),
    )
    V = np.linalg.inv(np.diag(s) + root @ root.T)
    by_sites = weight_space_formulas.weight_space(*map(jnp.asarray, (vector, root @ root.T, Phi, s)))
    by_mean = weight_space_formulas.weight_space_mean(*map(jnp.asarray, (vector, root @ root.T, Phi, s)))
    for q, m in ((by_sites, V @ vector), (by_mean, vector)):
        assert_allclose(q.mean, Phi @ m, rtol=1e-10)
        assert_allclose(q.variance, np.diag(Phi @ V @ Phi.T), rtol=1e-10)
        assert_allclose(q.kl, oracles.gaussian_kl(m, V, np.diag(1 / s)), rtol=1e-10)
        covariance = Phi @ (Phi / s).T - q.covariance.A.T @ q.covariance.A + q.covariance.T.T @ q.covariance.T
        assert_allclose(covariance, Phi @ V @ Phi.T, rtol=1e-9, atol=1e-10)


# The guide.


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "natural") for name in KERNELS), *itertools.product(("map", "inducing"), FORMS[1:])],
)
def test_the_loss_and_its_gradients_are_those_of_minus_the_dense_bound(name, form):
    likelihood = "student_t"
    model, guide, params = set_up(name, form, likelihood)
    hyper = {key: params[key] for key in ("a", "b")}
    loss = jax.jit(jax.value_and_grad(lambda hyper: loss_at({**params, **hyper}, model, guide, X, y_of(likelihood))))
    value, gradient = loss(hyper)
    assert_allclose(value, -dense_bound(name, params, likelihood), rtol=1e-8)
    for key in ("a", "b"):
        expected = oracles.derivative(
            lambda t, key=key: -dense_bound(name, params, likelihood, A + t * (key == "a"), B + t * (key == "b"))
        )
        assert_allclose(gradient[key], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hilbert", "natural"),
        ("inducing", "natural"),
        ("hilbert", "mean"),
        ("inducing", "root"),
        ("hilbert", "natural, held"),
        ("inducing", "mean, held"),
    ],
)
def test_the_posterior_the_process_and_drawn_functions_agree_at_new_inputs_after_pickling_too(name, form):
    _, guide, params = set_up(name, form)
    params = pickle.loads(pickle.dumps(params))
    Phi = parts(name, X_NEW)[0]
    m, V = dense_posterior(name, params)
    mean, covariance = Phi @ m + MEAN, Phi @ V @ Phi.T
    key = jax.random.key(1)
    for q in (
        guide.posterior(key, params, X_NEW)["f"],
        sgp.process_posterior(guide, key, params, X[:1])["f"].posterior(X_NEW),
    ):
        assert_allclose(q.mean, mean, rtol=1e-8)
        assert_allclose(q.variance, np.diag(covariance), rtol=1e-7)
        assert_allclose(q.covariance(), covariance, rtol=1e-7, atol=1e-7)
    if form == "root":
        return
    f = guide.sample_functions(key, params, X, num_samples=3000)["f"]
    draws = np.asarray(f(X_NEW))
    assert_allclose(f(X_NEW[:2]), draws[:, :2], rtol=1e-9)
    centred = draws - mean
    assert np.all(np.abs(np.mean(centred, axis=0)) < 5 * np.std(centred, axis=0) / np.sqrt(len(draws)))
    products = centred[:, :, None] * centred[:, None, :]
    assert np.all(np.abs(np.mean(products, axis=0) - covariance) < 5 * np.std(products, axis=0) / np.sqrt(len(draws)))


@pytest.mark.parametrize("name", ["expanded", "inducing"])
def test_one_full_natural_step_on_a_gaussian_likelihood_is_the_evidence(name):
    model, guide, params = set_up(name, "natural")
    new = stepped(model, guide, params, 1.0, X, y_of())
    assert_allclose(-loss_at(new, model, guide, X, y_of()), log_evidence(name), rtol=1e-9)


def stepped(model, guide, params, step_size, *args, steps=1, others=frozen, **kwargs):
    svi = SVI(model, guide, sgp.NaturalGradient(step_size, others), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), *args, **kwargs)
    own = {name: value for name, value in params.items() if name.startswith("f_auto_")}
    state = state._replace(optim_state=svi.optim.init({**svi.optim.get_params(state.optim_state), **own}))
    state, _ = jax.jit(lambda state: jax.lax.scan(lambda s, _: svi.update(s, *args, **kwargs), state, length=steps))(
        state
    )
    assert sgp.num_refused(state) == 0
    return svi.get_params(state)


def test_it_is_t_svgp_where_inducing_inputs_span_the_features():
    likelihood = "poisson"
    model, y = model_with("expanded", likelihood), y_of("poisson")
    # Rank three: any three inputs in general position span it. The jitter is t-SVGP's own.
    guides = sgp.AutoWeightSpaceGP(model), sgp.AutoTSVGP(model, X[:3])
    bounds = []
    for guide in guides:
        params = stepped(model, guide, {}, 0.5, X, y, steps=8)
        bounds.append(loss_at(params, model, guide, X, y))
    assert_allclose(bounds[0], bounds[1], rtol=1e-5)
    start = loss_at(initial_parameters(model, guides[0], X, y), model, guides[0], X, y)
    assert start - bounds[0] > 1.0


def test_minibatch_steps_are_the_recursion_of_stochastic_compositional_gradient_descent():
    name, rho = "hilbert", 0.3
    model, guide, params = set_up(name, "natural")
    Phi, S = parts(name)
    batches = [np.array([0, 3]), np.array([5, 1]), np.array([6, 2])]
    sites = params["f_auto_sites"]
    F = NOISE**2 * (S + np.asarray(sites.Lambda2))
    c = NOISE**2 * np.asarray(sites.lambda1)
    svi = SVI(model, guide, sgp.NaturalGradient(rho, frozen), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X[:2], y_of()[:2], num_data=N)
    state = state._replace(
        optim_state=svi.optim.init({**svi.optim.get_params(state.optim_state), "f_auto_sites": sites})
    )
    update = jax.jit(lambda state, X, y: svi.update(state, X, y, num_data=N))
    for rows in batches:
        state, _ = update(state, X[rows], y_of()[rows])
        F = (1 - rho) * F + rho * (N / 2 * Phi[rows].T @ Phi[rows] + NOISE**2 * S)
        c = (1 - rho) * c + rho * N / 2 * Phi[rows].T @ (y_of()[rows] - MEAN)
    sites = svi.get_params(state)["f_auto_sites"]
    assert_allclose(NOISE**2 * (S + sites.Lambda2), F, rtol=1e-9, atol=1e-10)
    assert_allclose(NOISE**2 * sites.lambda1, c, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", ["natural, held", "mean, held"])
def test_a_posterior_is_held_while_sums_collect_what_the_next_one_is_made_of(form):
    name, rho, outcomes = "hilbert", 0.3, y_of("poisson")
    batches = [np.array(rows) for rows in ([0, 3], [5, 1], [6, 2], [3, 5], [2, 4], [1, 0], [4, 6])]

    def model(X, y=None, num_data=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNELS[name](A, B), X, MEAN))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    guide = guide_of(model, form)
    svi = SVI(model, guide, sgp.NaturalGradient(rho, frozen), sgp.QuadratureELBO(num_nodes=30))
    state = svi.init(jax.random.key(0), X[:2], outcomes[:2], num_data=N)
    Phi, S = parts(name)
    Phi = Phi @ np.linalg.inv(np.linalg.cholesky(S)).T  # of whitened weights
    r = Phi.shape[1]
    own_mean = RNG.normal(size=r)
    if form.startswith("mean"):
        state = state._replace(
            optim_state=svi.optim.init({**svi.optim.get_params(state.optim_state), "f_auto_m": jnp.asarray(own_mean)})
        )
    m, V = (own_mean if form.startswith("mean") else np.zeros(r)), np.eye(r)
    lambda1, Lambda2 = np.zeros(r), np.zeros((r, r))
    update = jax.jit(lambda state, X, y: svi.update(state, X, y, num_data=N))
    for number, rows in enumerate(batches, 1):
        state, loss = update(state, X[rows], outcomes[rows])
        mean, variance = Phi[rows] @ m + MEAN, np.einsum("ni,ij,nj->n", Phi[rows], V, Phi[rows])
        beta = np.exp(mean + 0.5 * variance)  # of E log Poisson(y | exp f) = y m − exp(m + v/2) − log y!
        ell = outcomes[rows] * mean - beta - gammaln(outcomes[rows] + 1.0)
        assert_allclose(loss, oracles.gaussian_kl(m, V, np.eye(r)) - N / 2 * np.sum(ell), rtol=1e-8)
        target = outcomes[rows] - beta + beta * (mean - MEAN)
        lambda1 = (1 - rho) * lambda1 + rho * N / 2 * Phi[rows].T @ target
        Lambda2 = (1 - rho) * Lambda2 + rho * N / 2 * (Phi[rows].T * beta) @ Phi[rows]
        if number in (1, 3, 6):  # held for one step, for two, and then for three
            V = np.linalg.inv(np.eye(r) + Lambda2)
            m = own_mean if form.startswith("mean") else V @ lambda1
    assert sgp.num_refused(state) == 0
    q = guide.posterior(jax.random.key(1), svi.get_params(state), X, num_data=N)["f"]
    assert_allclose(q.mean, Phi @ m + MEAN, rtol=1e-8)
    assert_allclose(q.covariance(), Phi @ V @ Phi.T, rtol=1e-7, atol=1e-9)


def test_a_run_that_ends_while_a_posterior_is_held_goes_on_bit_for_bit(tmp_path):
    model = model_with("hilbert")

    def run(num_steps, **options):
        svi = SVI(
            model, guide_of(model, "mean, held"), sgp.NaturalGradient(0.06, optax.adam(1e-2)), sgp.QuadratureELBO()
        )
        options = {"batch_size": 2, "num_steps": num_steps, "progress_bar": False, **options}
        return sgp.fit(svi, jax.random.key(0), (X, y_of()), **options)

    assert 7 % HELD == 1
    run(7, checkpoint=tmp_path)
    resumed, whole = run(11, checkpoint=tmp_path), run(11)
    assert_array_equal(resumed.losses, whole.losses)
    for name, value in whole.params.items():
        jax.tree.map(assert_array_equal, resumed.params[name], value)


def test_at_first_a_posterior_is_held_for_one_step_and_then_twice_as_long_each_time():
    sites, made = StaleSites.zeros((), 2, float, 6, with_mean=True), []
    for number in range(1, 32):
        sites = sites.natural_step(sites.perturbation(for_step=False), 0.5)
        made += [number] if sites.age == 0.0 else []
    assert made == [1, 3, 7, 13, 19, 25, 31]


@pytest.mark.parametrize("length", [1.0, 0.3])
def test_a_posterior_is_made_that_part_of_the_way_from_the_one_held_to_that_of_the_sums(length):
    r, m, root = 4, RNG.normal(size=4), RNG.normal(size=(4, 4))
    sites = dataclasses.replace(held_sites(m, root @ root.T, with_mean=True), age=jnp.asarray(HELD - 1.0))
    new = sites.natural_step(sites.perturbation(for_step=False), 0.5, length)  # zeros are no step of the sums
    held, whole = np.eye(r) + root @ root.T, np.eye(r) + np.asarray(sites.Lambda2)
    P, lambda1 = held + length * (whole - held), held @ m + length * (np.asarray(sites.lambda1) - held @ m)
    V = np.linalg.inv(P)
    assert_allclose(new.m, V @ lambda1, rtol=1e-9)
    assert_allclose(new.root.T @ new.root, V, rtol=1e-9)
    kl = oracles.gaussian_kl(V @ lambda1, V, np.eye(r))
    assert_allclose(new.divergence + 0.5 * np.sum(np.square(new.m)), kl, rtol=1e-9)
    assert new.age == 0.0


def test_a_posterior_at_which_the_loss_is_not_finite_is_made_of_the_sums_by_shorter_steps():
    # Half of the way to the targets from the prior, some rates are negative.
    rng = np.random.default_rng(0)
    inputs = rng.uniform(-1.0, 1.0, (40, 1))
    counts = np.tile(rng.poisson(1.5 + np.sin(3.0 * inputs[:, 0])), 10)
    inputs = np.tile(inputs, (10, 1))

    def model(X, y=None):
        kernel = features.HilbertSpace(kernels.SquaredExponential(0.5, 0.25), (4,), (-2.0, 2.0))
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, 5.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(f, validate_args=False), obs=y)

    ends = []
    for refresh in (1, 4):
        guide = sgp.AutoWeightSpaceGP(model, refresh=refresh)
        svi = SVI(model, guide, sgp.NaturalGradient(0.5, frozen), sgp.QuadratureELBO(num_nodes=8))
        state = svi.init(jax.random.key(0), inputs, counts)
        state, losses = jax.jit(
            lambda state, svi=svi: jax.lax.scan(lambda s, _: svi.update(s, inputs, counts), state, length=120)
        )(state)
        assert 0 < sgp.num_refused(state) < 20
        assert np.isnan(losses).any()
        ends.append(losses[-1])
        if refresh > 1:
            # A loss that is not finite takes back the step before, too, and neither counts for a refresh.
            assert svi.get_params(state)["f_auto_sites"].age == (120 - 2 * sgp.num_refused(state) - 3) % refresh
    assert_allclose(ends[1], ends[0], rtol=1e-6)
    assert losses[0] - ends[1] > 100.0


@pytest.mark.exhaustive
def test_several_natural_steps_of_two_posteriors_that_are_held_lead_where_those_of_one_do():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNELS["hilbert"](A, B), X))
        g = numpyro.sample("g", sgp.GaussianProcess(KERNELS["inducing"](A, B), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + g, NOISE), obs=y)

    bounds = []
    for refresh, options in (
        (1, {"in_turn": True}),
        (3, {"e_steps": 2}),
        (3, {"e_steps": 2, "m_steps": 2, "in_turn": True}),
    ):
        guide = sgp.AutoWeightSpaceGP(model, refresh=refresh)
        optim = sgp.NaturalGradient(0.5, frozen, **options)
        svi = SVI(model, guide, optim, sgp.QuadratureELBO())
        state = converged(svi, svi.init(jax.random.key(0), X, y_of()), 150 * refresh, X, y_of())
        assert sgp.num_refused(state) == 0
        bounds.append(svi.evaluate(state, X, y_of()))
    assert_allclose(bounds[1:], bounds[0], rtol=1e-8)


def test_nothing_is_factorised_in_the_steps_between():
    def outside_of_branches(program):
        for equation in program.eqns:
            yield equation.primitive.name
            if equation.primitive.name == "cond":
                continue
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from outside_of_branches(inner)

    factorisations = {}
    for form in ("natural", "natural, held", "mean, held"):
        model = model_with("map")
        svi = SVI(model, guide_of(model, form), sgp.NaturalGradient(0.3, optax.adam(1e-2)), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), X, y_of())
        program = jax.make_jaxpr(svi.update)(state, X, y_of()).jaxpr
        factorisations[form] = list(outside_of_branches(program)).count("cholesky")
    assert factorisations == {"natural": 1, "natural, held": 0, "mean, held": 0}


@pytest.mark.parametrize("name", ["hilbert", "inducing"])
def test_sums_beside_a_mean_of_its_own_take_the_same_steps_and_leave_the_mean_alone(name):
    model, guide, params = set_up(name, "mean", "poisson")
    other = set_up(name, "natural", "poisson")[1]
    y = y_of("poisson")
    # The same q(w) by natural parameters; those of correlated weights are kept in other bases.
    _, S = parts(name)
    m, V = dense_posterior(name, params)
    sites = m @ np.linalg.inv(V), np.linalg.inv(V) - S
    if name == "inducing":
        sites = np.linalg.solve(S, sites[0]), np.linalg.solve(S, np.linalg.solve(S, sites[1]).T)
    same = {**params, "f_auto_sites": TiedSites(*map(jnp.asarray, sites))}
    del same["f_auto_m"]
    ours, natural = (stepped(model, g, p, 0.3, X, y) for g, p in ((guide, params), (other, same)))
    assert_allclose(ours["f_auto_m"], params["f_auto_m"], rtol=1e-12)
    precisions = [np.linalg.inv(dense_posterior(name, p)[1]) for p in (ours, natural)]
    assert_allclose(precisions[0], precisions[1], rtol=1e-7, atol=1e-8)
    assert np.max(np.abs(precisions[0] - np.linalg.inv(V))) > 0.1


@some_forms
def test_a_row_whose_features_all_vanish_has_a_gradient_and_its_step_is_taken(form):
    rows, y = np.concatenate([X, np.zeros((1, 2))]), np.append(y_of(), 0.4)

    def model(X, y=None):
        kernel = features.FeatureMap(network, numpyro.param("weights", W), 1.3)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = guide_of(model, form)
    r, params = 4, initial_parameters(model, guide, rows, y)
    m, root = RNG.normal(size=r), np.tril(RNG.normal(size=(r, r)))
    P = np.eye(r) / 1.3 + root @ root.T
    if form.endswith(", held"):
        sites = held_sites(m / 1.3**0.5, 1.3 * root @ root.T, with_mean=form.startswith("natural"))
        own = {"f_auto_sites": sites} | ({"f_auto_m": m / 1.3**0.5} if form.startswith("mean") else {})
    elif form == "root":  # of the whitened weights
        own = {"f_auto_m": m / 1.3**0.5, "f_auto_R": 1.3**0.5 * root}
    elif form == "mean":
        own = {"f_auto_m": m / 1.3**0.5, "f_auto_sites": TiedSites(jnp.zeros(0), jnp.asarray(root @ root.T))}
    else:
        own = {"f_auto_sites": TiedSites(jnp.asarray(P @ m), jnp.asarray(root @ root.T))}
    params, V = {**params, **own}, np.linalg.inv(P)

    def minus_bound(weights):
        Phi = network(weights, rows)
        misfit = jnp.sum((y - Phi @ m) ** 2) + jnp.sum(Phi @ V * Phi)
        log_normaliser = 0.5 * len(rows) * np.log(2 * np.pi * NOISE**2)
        return 0.5 * misfit / NOISE**2 + log_normaliser + oracles.gaussian_kl(m, V, 1.3 * np.eye(r))

    assert_allclose(network(W, rows)[-1], 0.0)
    ours = jax.value_and_grad(lambda w: loss_at({**params, "weights": w}, model, guide, rows, y))(jnp.asarray(W))
    dense = jax.value_and_grad(minus_bound)(jnp.asarray(W))
    assert_allclose(ours[0], dense[0], rtol=1e-9)
    assert_allclose(ours[1], dense[1], rtol=1e-8)
    if form != "root":
        stepped(model, guide, params, 0.5, rows, y, others=optax.sgd(1e-3))


@some_forms
def test_losses_and_gradients_of_batches_average_to_those_of_all_data(form):
    model, guide, params = set_up("map", form, "student_t")
    y = y_of("student_t")
    hyper = {key: params[key] for key in ("a", "b", "noise")}

    def loss(hyper, X, y):
        return loss_at({**params, **hyper}, model, guide, X, y, num_data=N)

    rows = np.array(list(itertools.combinations(range(N), 2)))
    full = jax.jit(jax.value_and_grad(loss))(hyper, X, y)
    batches = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0, 0)))(hyper, X[rows], y[rows])
    for ours, expected in zip(jax.tree.leaves(batches), jax.tree.leaves(full), strict=True):
        assert np.ptp(np.asarray(ours)) > 1e-3
        assert_allclose(np.mean(ours, axis=0), expected, rtol=1e-9)


@functools.cache
def best_evidence():
    """The maximum over both hyperparameters and the noise, by quasi-Newton steps on the dense evidence."""

    def negative(log):
        return -log_evidence("hilbert", *np.exp(log))

    found = minimize(
        negative, np.log([A, B, NOISE]), method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-11, "maxiter": 4000}
    )
    return -found.fun


@some_forms
def test_training_on_all_data_reaches_the_maximum_of_the_evidence(form):
    model, guide, _ = set_up("hilbert", form)
    optim = (
        sgp.NaturalGradient(1.0, optax.adam(optax.cosine_decay_schedule(0.1, 800)))
        if form != "root"
        else numpyro.optim.Minimize()
    )
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_nodes=3))
    state = svi.init(jax.random.key(0), X, y_of())
    state = converged(svi, state, 800 if form != "root" else 4, X, y_of())
    # Steps in turn creep along the ridge between variance and lengthscale; quasi-Newton steps on both do not.
    atol = 1e-3 if form != "root" else 1e-6
    assert_allclose(-svi.evaluate(state, X, y_of()), best_evidence(), rtol=0, atol=atol)
    assert best_evidence() > log_evidence("hilbert") + 0.5


# Plates.


@pytest.mark.parametrize("refresh", [1, 2])
def test_a_plate_of_latents_has_weights_for_each(refresh):
    C = 3
    Y = RNG.normal(size=(C, N))

    def model(X, Y=None):
        with numpyro.plate("class", C):
            f = numpyro.sample("f", sgp.GaussianProcess(KERNELS["fourier"](A, B), X))
        with numpyro.plate("class", C, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=Y)

    guide = sgp.AutoWeightSpaceGP(model, refresh=refresh)
    params = stepped(model, guide, {}, 1.0, X, Y, steps=refresh)
    Phi, S = parts("fourier")
    covariance = Phi @ np.linalg.solve(S, Phi.T) + NOISE**2 * np.eye(N)
    expected = sum(oracles.gaussian_log_density(row, 0.0, covariance) for row in Y)
    assert_allclose(-loss_at(params, model, guide, X, Y), expected, rtol=1e-9)
    assert_allclose(
        sgp.process_posterior(guide, jax.random.key(0), params, X)["f"].posterior(X_NEW).mean,
        guide.posterior(jax.random.key(0), params, X_NEW)["f"].mean,
        rtol=1e-8,
    )


# Mistakes.


def with_kernel(kernel):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    return model


def test_a_kernel_without_features_is_named_with_what_to_use():
    model = with_kernel(kernels.Matern32(1.0))
    with pytest.raises(TypeError, match=r"Matern32 has no features.*RandomFourier") as error:
        initial_parameters(model, sgp.AutoWeightSpaceGP(model), X, y_of())
    assert "site 'f'" in error.value.__notes__[0]


def test_a_rank_that_does_not_fit_into_memory_is_refused_before_anything_is_allocated():
    model = with_kernel(features.RandomFourier(kernels.Matern32(1.0), 1_000_000, jax.random.key(0)))
    with pytest.raises(ValueError, match=r"rank r = 1000000.*8,000,000,000,000 bytes each"):
        initial_parameters(model, sgp.AutoWeightSpaceGP(model), X, y_of())


def test_an_unknown_parametrisation_is_refused():
    with pytest.raises(ValueError, match="`parametrization` must be one of"):
        sgp.AutoWeightSpaceGP(with_kernel(kernels.Linear()), parametrization="nautral")


@pytest.mark.filterwarnings("ignore:The natural parameters:UserWarning")  # of a plain optimizer, as the error
def test_a_posterior_is_held_only_where_it_is_made_of_sums_that_stay_positive():
    model = with_kernel(kernels.Linear())
    with pytest.raises(ValueError, match=r"`refresh` is for 'natural' and 'mean', got 5 with 'root'"):
        sgp.AutoWeightSpaceGP(model, parametrization="root", refresh=5)
    with pytest.raises(ValueError, match="`refresh` must be a positive integer, got 0"):
        sgp.AutoWeightSpaceGP(model, refresh=0)
    svi = SVI(model, sgp.AutoWeightSpaceGP(model, refresh=5), sgp.NaturalGradient(floor=None), sgp.QuadratureELBO())
    with pytest.raises(ValueError, match="needs a `floor` of 0 or more, got None"):
        svi.init(jax.random.key(0), X, y_of())
    for parametrization in ("natural", "mean"):
        guide = sgp.AutoWeightSpaceGP(model, parametrization=parametrization, refresh=5)
        svi = SVI(model, guide, optax.adam(1e-2), sgp.QuadratureELBO())
        with pytest.raises(TypeError, match=r"Use `NaturalGradient`, or leave out `refresh` of"):
            svi.update(svi.init(jax.random.key(0), X, y_of()), X, y_of())


@pytest.mark.parametrize("form", ["natural", "mean"])
def test_parameters_of_a_guide_with_another_refresh_are_refused(form):
    model = model_with("map")
    held, plain = guide_of(model, f"{form}, held"), guide_of(model, form)
    for guide, other, message in ((held, plain, "`refresh=3`.*`refresh=1`"), (plain, held, "`refresh=1`.*`refresh=3`")):
        params = initial_parameters(model, guide, X, y_of())
        with pytest.raises(ValueError, match=f"those of a guide with {message}"):
            other.posterior(jax.random.key(0), params, X)


def test_fit_warns_of_natural_steps_that_average_over_few_rows_for_the_rank():
    model = model_with("expanded")  # of rank 3

    @functools.cache
    def start(guide):
        return SVI(model, guide, sgp.NaturalGradient(), sgp.QuadratureELBO()).init(jax.random.key(0), X, y_of())

    def said(guide, step_size, batch_size, num_steps):
        svi, state = SVI(model, guide, sgp.NaturalGradient(step_size), sgp.QuadratureELBO()), start(guide)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_averages(svi, state, batch_size, N, num_steps)
        return [str(warning.message) for warning in caught]

    weights, inducing = sgp.AutoWeightSpaceGP(model), sgp.AutoTSVGP(model, X[:3])
    (message,) = said(weights, 0.5, 2, 9)
    for part in ("the 3 weights of 'f'", "B/ρ = 2/0.5 = 4 rows", "`step_size` of 0.13 or less"):
        assert part in message
    assert said(weights, 0.13, 2, 9) == []  # 15.4 rows
    with_mean = sgp.AutoWeightSpaceGP(model, parametrization="mean")
    assert "the 3 weights of 'f'" in said(with_mean, 0.5, 2, 9)[0]
    assert said(weights, 0.5, N, 9) == []  # all rows are no batch
    assert said(inducing, 0.5, 2, 9) == []

    # A schedule counts where it is half-way through.
    def schedule(t):
        return 1.0 / (1.0 + t)

    assert "2/0.2 = 10 rows" in said(weights, schedule, 2, 9)[0]
    assert said(weights, schedule, 2, 20) == []

    # A posterior that is held is to be made anew before its sums have forgotten what they were.
    held = sgp.AutoWeightSpaceGP(model, refresh=8)
    assert said(held, 0.12, 2, 8) == []
    assert "within about 1/ρ = 7.69 of them" in said(held, 0.13, 2, 8)[0]
    assert said(held, 0.13, N, 8) == []

    svi = SVI(model, weights, sgp.NaturalGradient(0.5, frozen), sgp.QuadratureELBO())
    with pytest.warns(UserWarning, match="Fewer than 5 for each") as caught:
        sgp.fit(svi, jax.random.key(0), (X, y_of()), batch_size=2, num_steps=1, progress_bar=False)
    assert caught[0].filename == __file__
