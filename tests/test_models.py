"""Which models a sparse guide accepts: every feature of NumPyro states an equality that must survive the guide."""

import functools
import itertools

from grids import representative
from guides import (
    FACTORISED,
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
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from numpyro.primitives import mutable
import optax
import pytest
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Matern52, SquaredExponential, Warp

pytestmark = pytest.mark.usefixtures("x64")

N, M, D, C, BATCH = 7, 5, 2, 3, 3
RNG = np.random.default_rng(20)
X, Z = RNG.normal(size=(N, D)), RNG.normal(size=(M, D))
y, Y = RNG.normal(size=N), RNG.normal(size=(C, N))
counts = RNG.poisson(2.0, size=N)
group = np.array([0, 1, 2, 0, 1, 2, 2])
observed = np.array([True, True, False, True, False, True, True])
NOISE = 0.7
BATCHES = np.array(list(itertools.combinations(range(N), BATCH)))

each_kind = pytest.mark.parametrize("name", KINDS)
# Two guides with nothing in common but the site: mean and root with any optimizer, and natural parameters.
two_guides = pytest.mark.parametrize("name", representative(["whitened", "tied"], ["tied"]))


def gp(name, X, kernel=None, mean=0.0):
    kernel = Matern52(1.1, 0.8) if kernel is None else kernel
    return numpyro.sample(name, sgp.GaussianProcess(kernel, X, mean))


def gaussian(X, y=None, num_data=None):
    f = gp("f", X)
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def gaussian_ell(y, mean, variance, noise=NOISE):
    """Σ_n E[log N(y_n | f_n, σ²)] for f_n ~ N(m_n, v_n), in closed form."""
    return np.sum(stats.norm.logpdf(y, mean, noise) - 0.5 * np.asarray(variance) / noise**2)


def posterior_at(params, guide, *args, **kwargs):
    return guide.posterior(jax.random.key(9), params, *args, **kwargs)


def per_latent(params, c):
    """Parameters of a guide with one latent: entry c of those of a guide with C."""

    def entry(name, value):
        return value if name.endswith("latents") else jax.tree.map(lambda x: x[c] if x.shape[0] == C else x, value)

    return {name: entry(name, value) for name, value in params.items()}


# Latents under plates and batches of kernels.


@each_kind
def test_independent_latents_under_a_plate_give_the_sum_of_single_latent_bounds(name):
    def together(X, Y):
        with numpyro.plate("class", C):
            f = gp("f", X)
        with numpyro.plate("class", C, dim=-2), numpyro.plate("data", N, dim=-1):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=Y)

    params = arbitrary_parameters(together, guide := GUIDES[name](together, Z), X, Y)
    alone = GUIDES[name](gaussian, Z)
    parts = [loss_at(per_latent(params, c), gaussian, alone, X, Y[c]) for c in range(C)]
    assert_allclose(loss_at(params, together, guide, X, Y), sum(parts), rtol=1e-10)


def test_as_many_classes_as_rows_are_classes():
    square = np.outer(np.linspace(0.5, 1.5, N), y)

    def together(X, Y):
        with numpyro.plate("class", N):
            f = gp("f", X)
        with numpyro.plate("class", N, dim=-2), numpyro.plate("data", N, dim=-1):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=Y)

    guide, alone = GUIDES["tied"](together, Z), GUIDES["tied"](gaussian, Z)
    start = initial_parameters(gaussian, alone, X, y)
    expected = sum(loss_at(start, gaussian, alone, X, outcomes) for outcomes in square)
    params = initial_parameters(together, guide, X, square)
    assert_allclose(loss_at(params, together, guide, X, square), expected, rtol=1e-10)


@each_kind
@pytest.mark.thorough
def test_a_batch_of_kernels_gives_the_sum_of_the_bounds_of_each_kernel(name):
    lengthscales, variances = np.array([[0.5], [1.0], [2.0]]), np.array([0.3, 1.0, 2.0])

    def together(X, Y):
        f = gp("f", X, Matern52(lengthscales, variances))  # the kernel's batch alone makes C latents
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f.T, NOISE).to_event(1), obs=Y.T)

    def alone(X, y, c):
        f = gp("f", X, Matern52(lengthscales[c], variances[c]))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = GUIDES[name](together, Z)
    params = arbitrary_parameters(together, guide, X, Y)
    single = GUIDES[name](alone, Z)
    posterior = posterior_at(params, guide, X, Y)["f"]
    for c in range(C):
        q = posterior_at(per_latent(params, c), single, X, Y[c], c)["f"]
        assert_allclose(posterior.mean[c], q.mean, rtol=1e-10)
        assert_allclose(posterior.variance[c], q.variance, rtol=1e-10)
        assert_allclose(posterior.covariance()[c], q.covariance(), rtol=1e-10, atol=1e-12)
        assert_allclose(posterior.kl[c], q.kl, rtol=1e-10)


@pytest.mark.parametrize("name", MINIBATCH)
def test_inducing_inputs_of_each_latent_give_the_sum_of_their_bounds(name):
    own = np.random.default_rng(1).normal(size=(C, M, D))

    def together(X, Y):
        with numpyro.plate("class", C):
            f = gp("f", X)
        with numpyro.plate("class", C, dim=-2), numpyro.plate("data", N, dim=-1):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=Y)

    params = arbitrary_parameters(together, guide := GUIDES[name](together, own), X, Y)
    parts = [loss_at(per_latent(params, c), gaussian, GUIDES[name](gaussian, own[c]), X, Y[c]) for c in range(C)]
    assert_allclose(loss_at(params, together, guide, X, Y), sum(parts), rtol=1e-10)


# Several GP sites, several observed sites.


def two_sites(X, Y):
    f, g = gp("f", X), gp("g", X[:, :1], SquaredExponential(0.6))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y0", dist.Normal(f, NOISE), obs=Y[0])
        numpyro.sample("y1", dist.Normal(g, NOISE), obs=Y[1])


def only_g(X, y):
    g = gp("g", X[:, :1], SquaredExponential(0.6))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y1", dist.Normal(g, NOISE), obs=y)


@each_kind
def test_two_sites_with_their_own_outputs_give_the_sum_of_two_bounds(name):
    inducing = {"f": Z, "g": Z[:3, :1]}
    guide = GUIDES[name](two_sites, inducing)
    params = arbitrary_parameters(two_sites, guide, X, Y)
    first = loss_at(params, gaussian, GUIDES[name](gaussian, Z), X, Y[0])
    second = loss_at(params, only_g, GUIDES[name](only_g, {"g": Z[:3, :1]}), X, Y[1])
    assert_allclose(loss_at(params, two_sites, guide, X, Y), first + second, rtol=1e-10)


FAMILIES = {
    "whitened and dual": {"f": sgp.Whitened(Z), "g": sgp.Dual(Z[:3, :1])},
    "unwhitened and natural": {"f": sgp.Unwhitened(Z), "g": sgp.NaturalWhitened(Z[:3, :1])},
    "per datum and dense": {"f": sgp.Dual(Z, sites="per_datum"), "g": sgp.Dual(None)},
}


@pytest.mark.parametrize("families", FAMILIES.values(), ids=FAMILIES)
def test_each_site_has_the_family_that_the_dict_says(families):
    guide = sgp.AutoSparseGP(two_sites, families)
    params = arbitrary_parameters(two_sites, guide, X, Y)
    first = loss_at(params, gaussian, sgp.AutoSparseGP(gaussian, families["f"]), X, Y[0])
    second = loss_at(params, only_g, sgp.AutoSparseGP(only_g, {"g": families["g"]}), X, Y[1])
    assert_allclose(loss_at(params, two_sites, guide, X, Y), first + second, rtol=1e-10)


@two_guides
def test_the_sum_of_two_sites_in_one_likelihood_is_integrated_exactly(name):
    def model(X, y):
        f, g = gp("f", X), gp("g", X[:, :1], SquaredExponential(0.6))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + g, NOISE), obs=y)

    guide = FACTORISED[name](model, {"f": Z, "g": Z[:3, :1]})
    params = arbitrary_parameters(model, guide, X, y)
    q = posterior_at(params, guide, X, y)
    ell = gaussian_ell(y, q["f"].mean + q["g"].mean, q["f"].variance + q["g"].variance)
    assert_allclose(loss_at(params, model, guide, X, y, loss=LOOSE), q["f"].kl + q["g"].kl - ell, rtol=1e-10)


@two_guides
def test_each_observed_site_adds_its_own_expectation(name):
    def model(X, y=None, counts=None):
        f = gp("f", X)
        with numpyro.plate("data", N):
            if y is not None:
                numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
            if counts is not None:
                numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)

    guide = GUIDES[name](model, Z)
    params = arbitrary_parameters(model, guide, X, y, counts)
    kl = posterior_at(params, guide, X)["f"].kl
    both = loss_at(params, model, guide, X, y, counts, loss=LOOSE)
    only_y, only_counts = (
        loss_at(params, model, guide, X, y, loss=LOOSE),
        loss_at(params, model, guide, X, None, counts, loss=LOOSE),
    )
    assert_allclose(both, only_y + only_counts - kl, rtol=1e-10)


# Other latent variables and the guides they are given.


def with_other_latents(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.4))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    with numpyro.plate("group", C):
        effect = numpyro.sample("effect", dist.Normal(0.0, 0.5))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    f = gp("f", X, Matern52(lengthscale))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + intercept + effect[group], noise), obs=y)


def log_prior(noise, intercept, effect, lengthscale):
    return (
        stats.lognorm.logpdf(noise, 0.4, scale=np.exp(-0.5))
        + stats.norm.logpdf(intercept, 0.0, 2.0)
        + stats.norm.logpdf(effect, 0.0, 0.5).sum()
        + stats.lognorm.logpdf(lengthscale, 0.5)
    )


OTHER_LATENTS = ("noise", "intercept", "effect", "lengthscale")


@two_guides
@pytest.mark.exhaustive
def test_with_point_estimates_of_other_latents_the_bound_is_the_closed_form(name):
    guide = GUIDES[name](with_other_latents, Z, base=AutoDelta)
    params = arbitrary_parameters(with_other_latents, guide, X, y)
    values = {site: np.asarray(params[f"{site}_auto_loc"]) for site in OTHER_LATENTS}
    q = posterior_at(params, guide, X, y)["f"]
    ell = gaussian_ell(y, q.mean + values["intercept"] + values["effect"][group], q.variance, values["noise"])
    assert_allclose(
        loss_at(params, with_other_latents, guide, X, y, loss=LOOSE), q.kl - ell - log_prior(**values), rtol=1e-10
    )


def test_with_narrow_normals_of_other_latents_the_bound_is_the_closed_form():
    scale, known = 1e-8, {"noise": 0.6, "lengthscale": 1.3}
    # NumPyro knows the divergence between normals; that of the two positive latents it would sample.
    model = handlers.condition(with_other_latents, data={site: jnp.asarray(value) for site, value in known.items()})
    guide = FACTORISED["tied"](model, Z, base=functools.partial(AutoNormal, init_scale=scale))
    params = arbitrary_parameters(model, guide, X, y)
    loc = {site: np.asarray(params[f"{site}_auto_loc"]) for site in ("intercept", "effect")}
    kl = sum(
        np.sum(np.log(sd / scale) + (scale**2 + loc[site] ** 2) / (2 * sd**2) - 0.5)
        for site, sd in {"intercept": 2.0, "effect": 0.5}.items()
    )
    q = posterior_at(params, guide, X, y)["f"]
    ell = gaussian_ell(y, q.mean + loc["intercept"] + loc["effect"][group], q.variance, known["noise"])
    given = stats.lognorm.logpdf(0.6, 0.4, scale=np.exp(-0.5)) + stats.lognorm.logpdf(1.3, 0.5)
    # The draws of θ differ from their means by 1e-8, and so does the bound, times its gradient.
    assert_allclose(loss_at(params, model, guide, X, y, loss=LOOSE), q.kl + kl - ell - given, rtol=1e-6)


def user_guide(X, y=None):
    for site in OTHER_LATENTS:
        constraint = dist.constraints.positive if site in ("noise", "lengthscale") else dist.constraints.real
        init = jnp.full((C,), 0.4) if site == "effect" else jnp.asarray(0.4)
        with numpyro.plate("group", C) if site == "effect" else handlers.block(hide=[]):
            loc = numpyro.param(f"{site}_auto_loc", init, constraint=constraint)
            numpyro.sample(site, dist.Delta(loc))


def test_a_guide_function_of_the_user_is_a_base_like_the_autoguide_it_imitates():
    by_function = GUIDES["tied"](with_other_latents, Z, base=user_guide)
    by_class = GUIDES["tied"](with_other_latents, Z, base=AutoDelta)
    params = arbitrary_parameters(with_other_latents, by_function, X, y)
    assert_allclose(params["noise_auto_loc"], 0.4)
    assert_allclose(
        loss_at(params, with_other_latents, by_function, X, y),
        loss_at(params, with_other_latents, by_class, X, y),
        rtol=1e-12,
    )


@pytest.mark.exhaustive
def test_an_autoguide_made_by_the_user_is_a_base_like_its_class():
    made = AutoNormal(handlers.block(with_other_latents, hide=["f"]))
    by_instance = FACTORISED["tied"](with_other_latents, Z, base=made)
    by_class = FACTORISED["tied"](with_other_latents, Z, base=AutoNormal)
    params = arbitrary_parameters(with_other_latents, by_class, X, y)
    again = initial_parameters(with_other_latents, by_instance, X, y)
    assert set(again) == set(params)
    assert_allclose(
        loss_at(params, with_other_latents, by_instance, X, y),
        loss_at(params, with_other_latents, by_class, X, y),
        rtol=1e-12,
    )


partial_normal = functools.partial(AutoNormal, init_scale=0.02)


@pytest.mark.parametrize(
    "base",
    representative([AutoDelta, AutoMultivariateNormal, partial_normal, user_guide], [user_guide]),
    ids=["AutoDelta", "AutoMultivariateNormal", "partial", "function"],
)
@pytest.mark.thorough
def test_training_with_any_base_lowers_the_loss_and_refuses_nothing(base):
    guide = GUIDES["tied"](with_other_latents, Z, base=base)
    svi = SVI(with_other_latents, guide, optimizer("tied"), sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), 40, X, y, progress_bar=False)
    assert np.mean(result.losses[-5:]) < np.mean(result.losses[:5]) - 1.0
    assert sgp.num_refused(result.state) == 0


def type_two(X, y=None):
    lengthscale = numpyro.param("lengthscale", 0.9, constraint=dist.constraints.positive)
    noise = numpyro.param("noise", 0.3, constraint=dist.constraints.positive)
    f = gp("f", X, Matern52(lengthscale))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.thorough
@two_guides
def test_parameters_of_the_model_are_trained_as_hyperparameters(name):
    guide = GUIDES[name](type_two, Z)
    svi = SVI(type_two, guide, optimizer(name, learning_rate=0.05), LOOSE)
    state = svi.init(jax.random.key(0), X, y)
    assert_allclose(svi.get_params(state)["lengthscale"], 0.9, rtol=1e-12)
    first = svi.evaluate(state, X, y)
    for _ in range(4):
        state, _ = svi.update(state, X, y)
    params = svi.get_params(state)
    assert svi.evaluate(state, X, y) < first
    q = posterior_at(params, guide, X)["f"]
    assert_allclose(svi.evaluate(state, X, y), q.kl - gaussian_ell(y, q.mean, q.variance, params["noise"]), rtol=1e-10)
    # Adam's first steps move every parameter that has a gradient; q started at the prior, where σ has one.
    assert abs(params["noise"] - 0.3) > 0.02


@two_guides
def test_a_warped_kernel_is_its_base_kernel_at_warped_inputs(name):
    weights = np.random.default_rng(4).normal(size=(D, 3))

    def warped(X, y):
        w = numpyro.param("w", jnp.asarray(weights))
        f = gp("f", X, Warp(Matern52(1.1, 0.8), lambda x: jnp.tanh(x @ w)))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = GUIDES[name](warped, Z)
    params = arbitrary_parameters(warped, guide, X, y)
    features = np.tanh(X @ weights), np.tanh(Z @ weights)
    plain = GUIDES[name](gaussian, features[1])
    at_features = {**params, **initial_parameters(gaussian, plain, features[0], y)}
    for site in params:
        if site.endswith(("_m", "_S_sqrt")):
            at_features[site] = params[site]
        if site.endswith("_sites"):
            start = at_features[site]
            at_features[site] = type(start)(params[site].lambda1, params[site].Lambda2, *jax.tree.leaves(start)[2:])
    assert_allclose(
        loss_at(params, warped, guide, X, y), loss_at(at_features, gaussian, plain, features[0], y), rtol=1e-10
    )


@pytest.mark.exhaustive
@two_guides
def test_the_network_of_a_warped_kernel_is_trained(name):
    def warped(X, y=None):
        w = numpyro.param("w", 0.5 * jnp.ones((D, 3)))
        f = gp("f", X, Warp(Matern52(1.1), lambda x: jnp.tanh(x @ w) @ jnp.array([[1.0], [2.0], [3.0]])))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = GUIDES[name](warped, Z)
    svi = SVI(warped, guide, optimizer(name), sgp.QuadratureELBO())
    params = arbitrary_parameters(warped, guide, X, y)
    state = svi.init(jax.random.key(0), X, y, init_params=params)
    before = svi.evaluate(state, X, y)
    for _ in range(3):
        state, _ = svi.update(state, X, y)
    assert svi.evaluate(state, X, y) < before
    moved = np.abs(svi.get_params(state)["w"] - 0.5)
    assert np.all(moved > 1e-3), moved


# Masks, missing outputs, scales, subsamples.


def masked(X, y, mask):
    f = gp("f", X)
    with numpyro.plate("data", X.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@each_kind
def test_masked_outputs_count_as_dropped_rows(name):
    with_missing = np.where(observed, y, np.nan)
    guide = GUIDES[name](masked, Z)
    params = arbitrary_parameters(masked, guide, X, with_missing, observed)
    dropped = loss_at(params, gaussian, GUIDES[name](gaussian, Z), X[observed], y[observed])
    assert_allclose(loss_at(params, masked, guide, X, with_missing, observed), dropped, rtol=1e-10)


@pytest.mark.parametrize("name", MINIBATCH)
def test_a_training_step_with_masked_outputs_is_the_step_with_rows_dropped(name):
    def step(model, *args):
        svi = SVI(model, GUIDES[name](model, Z), optimizer(name), sgp.QuadratureELBO())
        state, loss = svi.update(svi.init(jax.random.key(0), *args), *args)
        return loss, svi.get_params(state)

    loss, params = step(masked, X, np.where(observed, y, np.nan), observed)
    expected_loss, expected = step(gaussian, X[observed], y[observed])
    assert_allclose(loss, expected_loss, rtol=1e-10)
    for site in expected:
        for got, want in zip(jax.tree.leaves(params[site]), jax.tree.leaves(expected[site]), strict=True):
            assert_allclose(got, want, rtol=1e-8, atol=1e-10, err_msg=site)


@pytest.mark.parametrize("name", ONE_SITE_A_ROW)
def test_sites_of_masked_rows_stay_empty(name):
    args = X, np.where(observed, y, np.nan), observed
    svi = SVI(masked, GUIDES[name](masked, Z), sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    state, _ = svi.update(svi.init(jax.random.key(0), *args), *args)
    sites = svi.get_params(state)["f_auto_sites"]
    # A Gaussian likelihood's own site: precision 1/σ² and λ₁ = y/σ², none where there is no output.
    assert_allclose(sites.Lambda2, observed / NOISE**2, rtol=1e-10)
    assert_allclose(sites.lambda1, np.where(observed, y, 0.0) / NOISE**2, rtol=1e-10)
    assert sgp.num_refused(state) == 0


@two_guides
def test_what_obs_mask_leaves_out_is_not_in_the_bound(name):
    def model(X, y):
        f = gp("f", X)
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y, obs_mask=observed)

    def masked(X, y):
        f = gp("f", X)
        with numpyro.plate("data", N), handlers.mask(mask=observed):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = GUIDES[name](model, Z)
    given = np.where(observed, y, np.nan)
    params = arbitrary_parameters(model, guide, X, given)
    assert not any("unobserved" in parameter for parameter in params)
    expected = loss_at(params, masked, GUIDES[name](masked, Z), X, given)
    assert_allclose(loss_at(params, model, guide, X, given), expected, rtol=1e-10)


@each_kind
def test_scaling_the_likelihood_is_replicating_the_data(name):
    def scaled(X, y):
        f = gp("f", X)
        with numpyro.plate("data", N), handlers.scale(scale=3.0):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = GUIDES[name](scaled, Z)
    params = arbitrary_parameters(scaled, guide, X, y)
    replicated = loss_at(params, gaussian, GUIDES[name](gaussian, Z), np.tile(X, (3, 1)), np.tile(y, 3))
    assert_allclose(loss_at(params, scaled, guide, X, y), replicated, rtol=1e-10)


@two_guides
def test_scaling_the_whole_model_scales_the_bound(name):
    guide = GUIDES[name](gaussian, Z)
    params = arbitrary_parameters(gaussian, guide, X, y)
    scaled = handlers.scale(gaussian, scale=3.0)
    loss = loss_at(params, scaled, GUIDES[name](scaled, Z), X, y)
    assert_allclose(loss, 3.0 * loss_at(params, gaussian, guide, X, y), rtol=1e-10)


@pytest.mark.parametrize("name", MINIBATCH)
def test_the_mean_over_all_external_minibatches_is_the_full_loss(name):
    guide = GUIDES[name](gaussian, Z)
    params = arbitrary_parameters(gaussian, guide, X, y)
    of_batch = jax.jit(
        jax.vmap(lambda rows: loss_at(params, gaussian, guide, jnp.asarray(X)[rows], jnp.asarray(y)[rows], N))
    )
    assert_allclose(np.mean(of_batch(BATCHES)), loss_at(params, gaussian, guide, X, y), rtol=1e-10)


def subsampling(X, y=None, batch=BATCH):
    f = gp("f", X)
    with numpyro.plate("data", X.shape[0], subsample_size=batch):
        f_batch = numpyro.subsample(f, event_dim=0)
        y_batch = None if y is None else numpyro.subsample(jnp.asarray(y), event_dim=0)
        numpyro.sample("y", dist.Normal(f_batch, NOISE), obs=y_batch)


@each_kind
def test_the_mean_over_all_subsamples_inside_the_model_is_the_full_loss(name):
    params = arbitrary_parameters(gaussian, full := GUIDES[name](gaussian, Z), X, y)

    def of_batch(rows):
        model = handlers.substitute(subsampling, data={"data": rows})
        return loss_at(params, model, GUIDES[name](model, Z), X, y)

    losses = jax.jit(jax.vmap(of_batch))(BATCHES)
    assert np.std(losses) > 0.1
    assert_allclose(np.mean(losses), loss_at(params, gaussian, full, X, y), rtol=1e-10)


@two_guides
def test_guide_and_model_see_the_same_random_subsample(name):
    guide = GUIDES[name](subsampling, Z)
    params = arbitrary_parameters(subsampling, guide, X, y)

    def of_batch(rows):
        model = handlers.substitute(subsampling, data={"data": rows})
        return loss_at(params, model, GUIDES[name](model, Z), X, y)

    possible = jax.jit(jax.vmap(of_batch))(BATCHES)
    drawn = jax.vmap(lambda key: sgp.QuadratureELBO().loss(key, params, subsampling, guide, X, y))(
        jax.random.split(jax.random.key(3), 40)
    )
    distance = np.min(np.abs(drawn[:, None] - possible[None]), axis=1)
    assert_allclose(distance, 0.0, atol=1e-9)
    assert len(np.unique(np.round(drawn, 8))) > 15  # 40 draws of 35 subsets: the expected number is 24


@pytest.mark.parametrize("model", [gaussian, subsampling], ids=["external", "inside"])
def test_training_on_minibatches_comes_close_to_the_optimum(model):
    # The optimum for fixed hyperparameters: one full natural step on a Gaussian likelihood.
    guide = GUIDES["tied"](gaussian, Z)
    exact = SVI(gaussian, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    state, start = exact.update(exact.init(jax.random.key(0), X, y), X, y)
    optimum = exact.evaluate(state, X, y)

    schedule = optax.linear_schedule(0.2, 0.01, 150)
    svi = SVI(model, GUIDES["tied"](model, Z), sgp.NaturalGradient(schedule), sgp.QuadratureELBO())
    if model is subsampling:
        result = svi.run(jax.random.key(1), 200, X, y, progress_bar=False)
        state = result.state
    else:
        rows = jax.random.choice(jax.random.key(2), len(BATCHES), (200,))
        batches = jnp.asarray(X)[BATCHES[rows]], jnp.asarray(y)[BATCHES[rows]]
        first = svi.init(jax.random.key(1), X[:BATCH], y[:BATCH], N)
        state, _ = jax.lax.scan(lambda s, batch: svi.update(s, *batch, N), first, batches)
    reached = loss_at(svi.get_params(state), gaussian, guide, X, y)
    assert sgp.num_refused(state) == 0
    assert optimum <= reached < optimum + 0.05 * (start - optimum)


def local_latents(X, y=None, batch=BATCH):
    f = gp("f", X)
    with numpyro.plate("data", X.shape[0], subsample_size=batch):
        offset = numpyro.sample("offset", dist.Normal(0.0, 0.3))
        f_batch = numpyro.subsample(f, event_dim=0)
        y_batch = None if y is None else numpyro.subsample(jnp.asarray(y), event_dim=0)
        numpyro.sample("y", dist.Normal(f_batch + offset, NOISE), obs=y_batch)


@two_guides
def test_the_mean_over_all_subsamples_with_local_latents_is_the_full_loss(name):
    guide = GUIDES[name](local_latents, Z, base=AutoDelta)
    params = arbitrary_parameters(local_latents, guide, X, y)
    params["offset_auto_loc"] = offset = 0.3 * np.random.default_rng(2).normal(size=N)

    def of_batch(rows):
        model = handlers.substitute(local_latents, data={"data": rows})
        return loss_at(params, model, handlers.substitute(guide, data={"data": rows}), X, y, loss=LOOSE)

    losses = jax.vmap(of_batch)(BATCHES)
    q = posterior_at(params, guide, X, y)["f"]
    full = q.kl - gaussian_ell(y, q.mean + offset, q.variance) - stats.norm.logpdf(offset, 0.0, 0.3).sum()
    assert_allclose(np.mean(losses), full, rtol=1e-10)


@two_guides
def test_local_latents_under_a_subsampled_plate_are_trained(name):
    guide = GUIDES[name](local_latents, Z, base=AutoNormal)
    svi = SVI(local_latents, guide, optimizer(name, step_size=0.2, learning_rate=0.05), sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), 100, X, y, progress_bar=False)
    assert result.params["offset_auto_loc"].shape == (N,)
    assert np.mean(result.losses[-30:]) < np.mean(result.losses[:30])
    # The rows' residuals and their offsets go the same way.
    q = posterior_at(result.params, guide, X, y)["f"]
    assert np.corrcoef(result.params["offset_auto_loc"], y - q.mean)[0, 1] > 0.8


# Mutable state, deterministic sites, handlers around the model, prior means.


def counting(X, y=None):
    state = mutable("counter", {"value": jnp.asarray(0.0)})
    f = gp("f", X, mean=state["value"])
    state["value"] = state["value"] + 1.0
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@pytest.mark.parametrize("name", ["whitened", "tied", "dense"])
def test_mutable_state_advances_once_a_step_and_the_gp_sees_its_current_value(name):
    frozen = optax.sgd(0.0)
    optim = sgp.NaturalGradient(1e-12, others=frozen) if name in NATURAL else frozen
    svi = SVI(counting, guide := GUIDES[name](counting, Z), optim, sgp.QuadratureELBO())
    params = arbitrary_parameters(counting, guide, X, y)
    state = svi.init(jax.random.key(0), X, y, init_params=params)
    plain = GUIDES[name](gaussian, Z)
    for step in range(3):
        assert state.mutable_state["counter"]["value"] == step
        state, loss = svi.update(state, X, y)
        # A prior mean of c is the same as outputs lower by c.
        assert_allclose(loss, loss_at(params, gaussian, plain, X, y - step), rtol=1e-8)


OBJECTIVES = {
    "one particle": (counting, {}),
    "three particles": (counting, {"num_particles": 3}),
    "two sites": (None, {}),
    "nested": (None, {"num_samples": 2}),
}


@pytest.mark.parametrize("case", representative(OBJECTIVES, ["two sites"]))
def test_mutable_state_survives_a_run(case):
    def two(X, y=None):
        counting(X, y)
        gp("g", X)

    def nested(X, y=None):
        h = gp("h", X)
        counting(h[:, None], y)

    model = {"two sites": two, "nested": nested}.get(case, counting)
    inducing = {"f": Z[:, :1], "h": Z} if case == "nested" else Z
    svi = SVI(model, GUIDES["tied"](model, inducing), optimizer("tied"), sgp.QuadratureELBO(**OBJECTIVES[case][1]))
    result = svi.run(jax.random.key(0), 4, X, y, progress_bar=False)
    assert_allclose(result.state.mutable_state["counter"]["value"], 4.0)


@two_guides
def test_deterministic_sites_leave_the_loss_alone_and_follow_the_draws(name):
    def model(X, y=None):
        f = gp("f", X)
        rate = numpyro.deterministic("rate", jnp.exp(f))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.log(rate), NOISE), obs=y)

    guide = GUIDES[name](model, Z)
    params = arbitrary_parameters(model, guide, X, y)
    assert_allclose(
        loss_at(params, model, guide, X, y), loss_at(params, gaussian, GUIDES[name](gaussian, Z), X, y), rtol=1e-10
    )
    draw = guide.sample_posterior(jax.random.key(0), params, X)
    assert_allclose(draw["rate"], np.exp(draw["f"]), rtol=1e-12)
    predictive = Predictive(model, guide=guide, params=params, num_samples=3, return_sites=["f", "rate"])
    predicted = predictive(jax.random.key(1), X[:4])
    assert_allclose(predicted["rate"], np.exp(predicted["f"]), rtol=1e-12)


@two_guides
def test_a_prior_mean_shifts_outputs_and_posterior(name):
    offset = RNG.normal(size=N)
    plain = GUIDES[name](gaussian, Z)
    params = arbitrary_parameters(gaussian, plain, X, y)

    for mean, value in ((offset, offset), (lambda x: jnp.sin(x[:, 0]), np.sin(X[:, 0])), (1.5, 1.5)):

        def model(X, y, mean=mean):
            f = gp("f", X, mean=mean)
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

        guide = GUIDES[name](model, Z)
        loss = loss_at(params, gaussian, plain, X, y)
        assert_allclose(loss_at(params, model, guide, X, y + value), loss, rtol=1e-10)
        shifted, q = posterior_at(params, guide, X, y)["f"], posterior_at(params, plain, X, y)["f"]
        assert_allclose(shifted.mean, q.mean + value, rtol=1e-10)
        assert_allclose(shifted.variance, q.variance, rtol=1e-12)


@two_guides
def test_conditioning_a_latent_adds_its_log_density(name):
    def given(X, y=None, noise=NOISE):
        f = gp("f", X)
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    def model(X, y=None):
        given(X, y, numpyro.sample("noise", dist.LogNormal(0.0, 1.0)))

    conditioned = handlers.condition(model, data={"noise": jnp.asarray(0.4)})
    guide = GUIDES[name](conditioned, Z)
    params = arbitrary_parameters(conditioned, guide, X, y)
    expected = loss_at(params, given, GUIDES[name](given, Z), X, y, noise=0.4) - stats.lognorm.logpdf(0.4, 1.0)
    assert_allclose(loss_at(params, conditioned, guide, X, y), expected, rtol=1e-10)


@two_guides
def test_an_observed_gp_site_keeps_its_exact_density(name):
    f_given = RNG.normal(size=N)

    def model(X, y=None):
        f, g = gp("f", X), gp("g", X, SquaredExponential(0.8))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + g, NOISE), obs=y)

    conditioned = handlers.condition(model, data={"g": jnp.asarray(f_given)})
    guide = GUIDES[name](conditioned, {"f": Z})
    params = arbitrary_parameters(conditioned, guide, X, y)
    r2 = np.sum((X[:, None] - X[None]) ** 2, axis=-1) / 0.8**2
    K = np.exp(-0.5 * r2) + 1e-6 * np.eye(N)  # the default jitter in float64
    density = stats.multivariate_normal.logpdf(f_given, np.zeros(N), K)
    expected = loss_at(params, gaussian, GUIDES[name](gaussian, Z), X, y - f_given) - density
    assert_allclose(loss_at(params, conditioned, guide, X, y), expected, rtol=1e-8)
    assert set(guide.posterior(jax.random.key(0), params, X)) == {"f"}


@two_guides
def test_scoping_the_model_only_renames(name):
    scoped = handlers.scope(with_other_latents, prefix="inner")
    guide = GUIDES[name](scoped, {"inner/f": Z}, base=AutoDelta)
    params = arbitrary_parameters(scoped, guide, X, y)
    plain = GUIDES[name](with_other_latents, {"f": Z}, base=AutoDelta)
    renamed = {site.removeprefix("inner/"): value for site, value in params.items()}
    start = initial_parameters(with_other_latents, plain, X, y)
    assert set(renamed) == set(start)
    renamed["auto_latents"] = start["auto_latents"]  # holds the sites' names
    assert_allclose(loss_at(params, scoped, guide, X, y), loss_at(renamed, with_other_latents, plain, X, y), rtol=1e-12)


@two_guides
@pytest.mark.exhaustive
def test_two_scopes_one_of_them_nested_have_functions_at_their_own_parameters(name):
    def model(X, y=None):
        with handlers.scope(prefix="one"):
            gaussian(X, y)
        with handlers.scope(prefix="two"), handlers.scope(prefix="inner"):
            gaussian(X, y)

    guide = GUIDES[name](model, {"one/f": Z, "two/inner/f": Z[::2]})
    params = arbitrary_parameters(model, guide, X, y)
    process = sgp.process_posterior(guide, jax.random.key(0), params, X)
    for site, q in posterior_at(params, guide, X, y).items():
        assert f"{site}_auto_inducing" in params
        assert_allclose(process[site].posterior(X).mean, q.mean, rtol=1e-10)
    functions = guide.sample_functions(jax.random.key(0), params, X, num_samples=2)
    assert functions["two/inner/f"](X[:BATCH]).shape == (2, BATCH)


# Control flow.


def state_space(X, y=None):
    f = gp("f", X)

    def step(h, at):
        f_t, y_t = at
        h = numpyro.sample("h", dist.Normal(0.5 * h, 0.3))
        numpyro.sample("y", dist.Normal(h + f_t, NOISE), obs=y_t)
        return h, None

    scan(step, 0.0, (f, y))


# NumPyro asks all that a handler gives a model for its shape before each `scan`, parameters that are pytrees too.
given_parameters = pytest.mark.filterwarnings("ignore:shape requires ndarray:DeprecationWarning")


@given_parameters
@two_guides
def test_latents_of_a_scan_beside_a_gp_have_their_density_given_the_one_before(name):
    def given(X, y, h):
        f = gp("f", X)
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + h, NOISE), obs=y)

    guide = GUIDES[name](state_space, Z, base=AutoDelta)
    params = arbitrary_parameters(state_space, guide, X, y)
    h = np.random.default_rng(3).normal(size=N)
    params["h_auto_loc"] = jnp.asarray(h)
    log_prior = np.sum(stats.norm.logpdf(h, np.append(0.0, 0.5 * h[:-1]), 0.3))
    expected = loss_at(params, given, GUIDES[name](given, Z), X, y, h, loss=LOOSE) - log_prior
    assert_allclose(loss_at(params, state_space, guide, X, y, loss=LOOSE), expected, rtol=1e-10)
    afresh = GUIDES[name](state_space, Z, base=AutoDelta)
    predicted = Predictive(state_space, guide=afresh, params=params, num_samples=2)(jax.random.key(1), X)
    assert predicted["y"].shape == (2, N)
    assert_array_equal(guide.sample_posterior(jax.random.key(0), params, X, y)["h"], h)


@given_parameters
def test_a_scan_goes_on_after_its_data_from_the_prior():
    guide = GUIDES["tied"](state_space, Z, base=AutoDelta)
    params = initial_parameters(state_space, guide, X, y)
    later = guide.sample_posterior(jax.random.key(0), params, np.concatenate([X, X[:BATCH]]))
    assert later["h"].shape == (N + BATCH,)
    assert_array_equal(later["h"][:N], params["h_auto_loc"])


# A GP on top of a GP.


def deep(X, y=None):
    h = gp("h", X, SquaredExponential(1.0), mean=lambda x: x[:, 0])
    f = gp("f", h[:, None], Matern52(0.7))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.2), obs=y)


def test_the_inner_function_of_a_deep_gp_is_drawn_jointly_where_its_level_does_not_matter():
    x = np.array([[0.3], [0.3 + 1e-9], [0.7], [0.9]])

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.5), X))
        g = numpyro.sample("g", sgp.GaussianProcess(SquaredExponential(1.0), (f - jnp.mean(f))[:, None]))
        numpyro.sample("y", dist.Normal(g, 0.1).to_event(1), obs=y)

    guide = sgp.AutoSVGP(model, {"f": x[1:], "g": np.linspace(-1.0, 1.0, 3)[:, None]})
    params = initial_parameters(model, guide, x, np.zeros(4))
    inner = guide.posterior(jax.random.key(0), params, x)["g"].prior.X
    assert_allclose(inner[0], inner[1], atol=0.05)  # the jitter of the draw is 1e-3


@two_guides
@pytest.mark.thorough
def test_a_two_layer_deep_gp_trains_and_predicts_its_data(name):
    rng = np.random.default_rng(5)
    inputs = np.linspace(-2.0, 2.0, 12)[:, None]
    outputs = np.sign(inputs[:, 0]) + 0.1 * rng.normal(size=12)
    Z = np.linspace(-2.0, 2.0, 6)[:, None]
    guide = GUIDES[name](deep, {"h": Z, "f": Z})
    svi = SVI(deep, guide, optimizer(name, step_size=0.2, learning_rate=0.05), sgp.QuadratureELBO(num_samples=4))
    result = svi.run(jax.random.key(0), 150, inputs, outputs, progress_bar=False)
    assert np.mean(result.losses[-20:]) < 0.2 * np.mean(result.losses[:5])
    predictive = Predictive(deep, guide=guide, params=result.params, num_samples=200, return_sites=["f"])
    predicted = np.mean(predictive(jax.random.key(1), np.array([[-1.5], [1.4], [1.6]]))["f"], axis=0)
    assert_allclose(predicted, [-1.0, 1.0, 1.0], atol=0.5)


# Particles and the ways SVI is driven.


@pytest.mark.exhaustive
def test_the_loss_of_several_particles_is_the_mean_over_their_keys():
    guide = GUIDES["tied"](with_other_latents, Z)
    params = arbitrary_parameters(with_other_latents, guide, X, y)

    def single(key):
        return loss_at(params, with_other_latents, guide, X, y, key=key)

    key = jax.random.key(4)
    singles = jax.lax.map(single, jax.random.split(key, 3))
    assert np.std(singles) > 0.01
    for vectorize in (True, False):
        several = sgp.QuadratureELBO(num_particles=3, vectorize_particles=vectorize)
        loss = jax.jit(lambda key, loss=several.loss: loss(key, params, with_other_latents, guide, X, y))(key)
        assert_allclose(loss, np.mean(singles), rtol=1e-10)


@pytest.fixture(scope="module")
def plain_run():
    with jax.enable_x64(True):
        svi = SVI(type_two, GUIDES["tied"](type_two, Z), optimizer("tied"), sgp.QuadratureELBO())
        yield svi, svi.run(jax.random.key(0), 6, X, y, progress_bar=False)


@pytest.mark.exhaustive
def test_stable_update_changes_no_number(plain_run):
    svi, result = plain_run
    stable = svi.run(jax.random.key(0), 6, X, y, progress_bar=False, stable_update=True)
    assert_allclose(stable.losses, result.losses, rtol=1e-10)
    assert_allclose(stable.params["lengthscale"], result.params["lengthscale"], rtol=1e-10)


@pytest.mark.thorough
def test_a_run_continued_from_its_state_is_the_longer_run(plain_run):
    svi, result = plain_run
    first = svi.run(jax.random.key(0), 2, X, y, progress_bar=False)
    second = svi.run(jax.random.key(1), 4, X, y, progress_bar=False, init_state=first.state)
    assert_allclose(np.concatenate([first.losses, second.losses]), result.losses, rtol=1e-10)
    assert_allclose(second.params["f_auto_sites"].Lambda2, result.params["f_auto_sites"].Lambda2, rtol=1e-9)


@pytest.mark.thorough
def test_updates_one_by_one_and_a_compiled_init_are_the_run(plain_run):
    svi, result = plain_run
    state = jax.jit(svi.init)(jax.random.key(0), X, y)
    for expected in result.losses:
        assert_allclose(svi.evaluate(state, X, y), expected, rtol=1e-9)
        state, loss = svi.update(state, X, y)
        assert_allclose(loss, expected, rtol=1e-9)


LIKELIHOODS = {
    "Bernoulli": (lambda f: dist.Bernoulli(logits=f), (y > 0).astype(int)),
    "Poisson": (lambda f: dist.Poisson(jnp.exp(f)), counts),
    "Student-t": (lambda f: dist.StudentT(4.0, f, 0.3), y),
}


@pytest.mark.parametrize(
    ("name", "likelihood"),
    # Each of them somewhere.
    representative(zip(NATURAL, itertools.cycle(LIKELIHOODS), strict=False), [("tied", "Poisson")]),
)
def test_a_healthy_run_refuses_nothing_and_lowers_the_loss(name, likelihood):
    distribution, outputs = LIKELIHOODS[likelihood]

    def model(X, y=None):
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=dist.constraints.positive)
        f = gp("f", X, Matern52(lengthscale))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", distribution(f), obs=y)

    guide = GUIDES[name](model, Z)
    svi = SVI(model, guide, optimizer(name), sgp.QuadratureELBO())
    state, losses = svi.init(jax.random.key(0), X, outputs), []
    for _ in range(4):
        state, loss = svi.update(state, X, outputs)
        losses.append(loss)
    assert sgp.num_refused(state) == 0
    assert np.all(np.diff(losses) < 0.0), losses


def test_a_schedule_gives_each_step_its_size():
    sizes = (1.0, 0.25, 0.5)

    def run(step_size):
        svi = SVI(gaussian, GUIDES["tied"](gaussian, Z), sgp.NaturalGradient(step_size), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), X, y)
        for _ in sizes:
            # Moving the sites back to zero makes each step start from the prior: λ is then ρ times its target.
            state, _ = svi.update(state, X, y)
            yield svi.get_params(state)["f_auto_sites"].lambda1
            params = {**state.optim_state[1].params, **initial_parameters(gaussian, svi.guide, X, y)}
            inner = state.optim_state[1]._replace(params=params, accepted=(params, state.optim_state[1].others_state))
            state = state._replace(optim_state=(state.optim_state[0], inner))

    target = next(run(1.0))
    schedule = optax.join_schedules([optax.constant_schedule(size) for size in sizes], [1, 2])
    for size, lambda1 in zip(sizes, run(schedule), strict=True):
        assert_allclose(lambda1, size * target, rtol=1e-10)


def test_a_constant_schedule_is_the_constant(plain_run):
    _, result = plain_run
    svi = SVI(
        type_two, GUIDES["tied"](type_two, Z), optimizer("tied", optax.constant_schedule(0.5)), sgp.QuadratureELBO()
    )
    state = svi.init(jax.random.key(0), X, y)
    update = jax.jit(svi.update)
    for expected in result.losses:
        state, loss = update(state, X, y)
        assert_allclose(loss, expected, rtol=1e-9)


def test_inducing_inputs_may_be_chosen_by_a_function_of_kernel_inputs_and_key():
    def choose(kernel, X, rng_key):
        order = jnp.argsort(kernel(X[:1], X)[0])  # farthest from the first row first
        return X[order[:M]] + 0.0 * jax.random.uniform(rng_key)

    guide = GUIDES["tied"](gaussian, choose)
    params = initial_parameters(gaussian, guide, X, y)
    distance = np.linalg.norm(X - X[0], axis=1)
    assert_array_equal(params["f_auto_inducing"].Z, X[np.argsort(-distance)[:M]])
