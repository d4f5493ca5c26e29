"""Functions drawn from a posterior have its mean and covariance, and are the same functions at every call."""

import functools
import pickle

from grids import representative
from guides import FACTORISED, GUIDES, POSTERIORS, arbitrary_parameters
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
import numpyro.distributions as dist
from numpyro.infer import Predictive
import oracles
import pytest

import numpyro_sgp as sgp
from numpyro_sgp import kernels
from numpyro_sgp.features.decomposition import term_features, terms
from numpyro_sgp.kernels import Matern52, SquaredExponential
from numpyro_sgp.posteriors.functions import _draw_prior, _prior_at, sample_functions
from numpyro_sgp.posteriors.process import process_posterior

pytestmark = pytest.mark.usefixtures("x64")

N, M, D, C, N_NEW, DRAWS = 7, 5, 2, 3, 4, 1500
RNG = np.random.default_rng(70)
X, Z, X_new = RNG.normal(size=(N, D)), RNG.normal(size=(M, D)), RNG.normal(size=(N_NEW, D))
y = RNG.normal(size=N)
NOISE = 0.7
each_kind = pytest.mark.parametrize("name", POSTERIORS)


def plain(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X, lambda x: x[:, 0]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@functools.cache
def made(name):
    """A guide of the plain model and its parameters."""
    guide = POSTERIORS[name](plain, Z)
    return guide, arbitrary_parameters(plain, guide, X, y)


def hierarchical(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern52(lengthscale), X, level))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def check_moments(draws, mean, covariance):
    """Mean and covariance of draws (S, N), each within five standard errors, those of the covariance measured."""
    draws = np.asarray(draws)
    S, centred = len(draws), np.asarray(draws) - mean
    assert np.all(np.abs(np.mean(centred, axis=0)) < 5 * np.std(centred, axis=0) / np.sqrt(S))
    products = centred[:, :, None] * centred[:, None, :]
    error = np.std(products, axis=0) / np.sqrt(S)
    assert np.all(np.abs(np.mean(products, axis=0) - covariance) < 5 * error + 1e-12)


# The process.


@each_kind
def test_the_process_has_the_guides_posterior_at_any_inputs(name):
    guide, params = made(name)
    process = process_posterior(guide, jax.random.key(0), params, X[:2])["f"]
    for at in (X_new, X):
        expected = guide.posterior(jax.random.key(0), params, at)["f"]
        q = process.posterior(at)
        assert_allclose(q.mean, expected.mean, rtol=1e-9)
        assert_allclose(q.variance, expected.variance, rtol=1e-8)
        assert_allclose(q.covariance(), expected.covariance(), rtol=1e-8, atol=1e-10)
        assert_allclose(q.kl, expected.kl, rtol=1e-12)


@pytest.mark.thorough
def test_the_process_goes_through_jit_vmap_and_pickle():
    guide = GUIDES["tied"](hierarchical, Z)
    params = arbitrary_parameters(hierarchical, guide, X, y)
    keys = jax.random.split(jax.random.key(0), 3)
    mapped = jax.jit(jax.vmap(lambda key: process_posterior(guide, key, params, X)["f"]))(keys)
    means = jax.vmap(lambda process: process.posterior(X_new).mean)(pickle.loads(pickle.dumps(mapped)))
    for key, mean in zip(keys, means, strict=True):
        process = process_posterior(guide, key, params, X_new)["f"]
        assert_allclose(mean, process.posterior(X_new).mean, rtol=1e-9)


def test_many_batches_are_predicted_without_a_factorisation():
    guide, params = made("whitened")
    process = process_posterior(guide, jax.random.key(0), params, X)["f"]
    program = str(jax.make_jaxpr(lambda process, X: process.posterior(X).variance)(process, X_new))
    assert "triangular_solve" in program
    assert "cholesky" not in program


# Function draws.


@each_kind
def test_function_draws_have_the_mean_and_covariance_of_the_posterior(name):
    guide, params = made(name)
    q = guide.posterior(jax.random.key(0), params, X_new)["f"]
    f = sample_functions(guide, jax.random.key(1), params, X, num_samples=DRAWS, num_features=64)["f"]
    draws = f(X_new)
    assert draws.shape == (DRAWS, N_NEW)
    assert f.num_samples == DRAWS
    assert np.max(np.abs(q.covariance() - np.diag(q.variance))) > 0.05  # there is a covariance to be found
    check_moments(draws, q.mean, q.covariance())


@pytest.mark.thorough
def test_function_draws_are_the_same_functions_at_every_call_and_differ_from_each_other():
    guide = GUIDES["tied"](hierarchical, Z)
    params = arbitrary_parameters(hierarchical, guide, X, y)
    f = sample_functions(guide, jax.random.key(1), params, X, num_samples=6)["f"]
    together = f(np.concatenate([X_new, X]))
    assert_allclose(f(X_new), together[:, :N_NEW], rtol=1e-9)
    assert_allclose(f(X), together[:, N_NEW:], rtol=1e-9)
    assert len(np.unique(np.round(together[:, 0], 6))) == 6
    again = pickle.loads(pickle.dumps(f))
    assert_array_equal(again(X_new), f(X_new))
    other_rows = sample_functions(guide, jax.random.key(1), params, X[:3], num_samples=6)["f"]
    assert_allclose(other_rows(X_new), f(X_new), rtol=1e-9)


def test_the_method_of_the_guide_is_the_function():
    guide, params = made("tied")
    by_method = guide.sample_functions(jax.random.key(1), params, X, num_samples=2)["f"]
    by_function = sample_functions(guide, jax.random.key(1), params, X, num_samples=2)["f"]
    assert_array_equal(by_method(X_new), by_function(X_new))


@pytest.mark.thorough
def test_predictive_posterior_and_function_draws_agree_when_hyperparameters_are_random():
    guide = GUIDES["tied"](hierarchical, Z)
    params = arbitrary_parameters(hierarchical, guide, X, y)
    params["lengthscale_auto_scale"] = params["level_auto_scale"] = jnp.asarray(0.5)
    drawn = sample_functions(guide, jax.random.key(1), params, X, num_samples=DRAWS, num_features=64)["f"](X_new)
    predictive = Predictive(hierarchical, guide=guide, params=params, num_samples=DRAWS, return_sites=["f"])
    predicted = predictive(jax.random.key(2), X_new)["f"]

    def moments(key):
        q = guide.posterior(key, params, X_new)["f"]
        return q.mean, q.covariance()

    means, covariances = jax.lax.map(moments, jax.random.split(jax.random.key(3), DRAWS))
    mixture = {"mean": np.mean(means, axis=0), "covariance": np.mean(covariances, axis=0) + np.cov(means.T)}
    for draws in (drawn, predicted):
        error = np.std(draws, axis=0) / np.sqrt(DRAWS) + np.std(means, axis=0) / np.sqrt(DRAWS)
        assert np.all(np.abs(np.mean(draws, axis=0) - mixture["mean"]) < 5 * error)
        centred = np.asarray(draws - np.mean(draws, axis=0))
        products = centred[:, :, None] * centred[:, None, :]
        # The mixture's covariance is itself an average over draws of θ, with a smaller error: hence √2.
        error = np.sqrt(2.0) * np.std(products, axis=0) / np.sqrt(DRAWS)
        assert np.all(np.abs(np.mean(products, axis=0) - mixture["covariance"]) < 5 * error)


def shared_kernel(X, Y=None):
    with numpyro.plate("class", C):
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
    with numpyro.plate("class", C, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=Y)


def kernel_each(X, Y=None):
    lengthscale, variance = np.array([[0.5], [1.0], [2.0]]), np.array([0.3, 1.0, 2.0])
    f = numpyro.sample("f", sgp.GaussianProcess(kernels.RationalQuadratic(lengthscale, variance), X, 0.3))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f.T, NOISE).to_event(1), obs=None if Y is None else Y.T)


@pytest.mark.parametrize(
    ("model", "name"),
    representative([(shared_kernel, "whitened"), (kernel_each, "dense")], [(kernel_each, "dense")]),
)
@pytest.mark.exhaustive
def test_latents_of_a_batch_are_drawn_independently_each_with_its_own_moments(model, name):
    guide = GUIDES[name](model, Z)
    params = arbitrary_parameters(model, guide, X, RNG.normal(size=(C, N)))
    q = guide.posterior(jax.random.key(0), params, X_new)["f"]
    draws = sample_functions(guide, jax.random.key(1), params, X, num_samples=DRAWS, num_features=16)["f"](X_new)
    assert draws.shape == (DRAWS, C, N_NEW)
    covariance = np.zeros((C, N_NEW, C, N_NEW))
    for c in range(C):
        covariance[c, :, c, :] = q.covariance()[c]
    size = C * N_NEW
    check_moments(draws.reshape(DRAWS, size), np.ravel(q.mean), covariance.reshape(size, size))


@pytest.mark.thorough
def test_two_sites_are_drawn_with_their_own_inputs():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        g = numpyro.sample("g", sgp.GaussianProcess(SquaredExponential(0.6), X[:, :1]))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + g, NOISE), obs=y)

    guide = FACTORISED["natural"](model, {"f": Z, "g": Z[:3, :1]})
    params = arbitrary_parameters(model, guide, X, y)
    functions = sample_functions(guide, jax.random.key(1), params, X, y, num_samples=DRAWS, num_features=16)
    q = guide.posterior(jax.random.key(0), params, X, y)
    check_moments(functions["g"](X[:, :1]), q["g"].mean, q["g"].covariance())
    check_moments(functions["f"](X), q["f"].mean, q["f"].covariance())
    draws = np.concatenate([functions["f"](X[:2]), functions["g"](X[:2, :1])], axis=1)
    assert np.all(np.abs(np.corrcoef(draws.T)[:2, 2:]) < 5 / np.sqrt(DRAWS))


def test_functions_are_differentiated_and_compiled_once():
    guide, params = made("tied")
    f = sample_functions(guide, jax.random.key(1), params, X, num_samples=2)["f"]
    step = 1e-5
    gradient = jax.grad(lambda x: f(x[None])[0, 0])(jnp.asarray(X_new[0]))
    moved = [(f(X_new[:1] + step * e)[0, 0] - f(X_new[:1] - step * e)[0, 0]) / (2 * step) for e in np.eye(D)]
    assert_allclose(gradient, moved, rtol=1e-6)
    traces = []

    @jax.jit
    def evaluated(f, X):
        traces.append(None)
        return f(X)

    other = sample_functions(guide, jax.random.key(2), params, X, num_samples=2)["f"]
    assert_allclose(evaluated(f, X_new), f(X_new), rtol=1e-9)
    evaluated(f, X_new + 1.0)
    assert len(traces) == 1
    assert np.all(np.asarray(other(X_new)) != np.asarray(f(X_new)))


@pytest.mark.thorough
def test_float32_draws_are_float32_and_have_the_moments():
    with jax.enable_x64(False):
        X32, Z32 = X.astype(np.float32), Z.astype(np.float32)
        guide = GUIDES["tied"](plain, Z32)
        params = arbitrary_parameters(plain, guide, X32, y.astype(np.float32))
        q = guide.posterior(jax.random.key(0), params, X_new.astype(np.float32))["f"]
        f = sample_functions(guide, jax.random.key(1), params, X32, num_samples=DRAWS, num_features=16)["f"]
        draws = f(X_new.astype(np.float32))
        assert draws.dtype == jnp.float32
        check_moments(draws, q.mean, q.covariance())


# Kernels.

KERNELS = {
    "SquaredExponential": SquaredExponential(np.array([0.8, 1.3]), 1.4),
    "Matern12": kernels.Matern12(0.9, 0.7),
    "Matern32": kernels.Matern32(np.array([0.9, 2.0])),
    "Matern52": Matern52(0.7),
    "RationalQuadratic": kernels.RationalQuadratic(0.8, 1.2, alpha=0.6),
    "Periodic": kernels.Periodic(np.array([0.9, 1.4]), np.array([1.7, 2.3]), 1.2),
    "Constant": kernels.Constant(0.4),
    "Linear": kernels.Linear(np.array([0.4, 1.5])),
    "Polynomial": kernels.Polynomial(3, np.array([0.4, 0.6]), offset=0.5),
    "sum": SquaredExponential(0.8) + kernels.Linear(0.5) + 0.3,
    "product of waves": Matern52(1.5) * kernels.Periodic(0.9, 1.7) * 1.3,
    "product with lines": kernels.Linear(np.array([0.4, 1.5])) * SquaredExponential(0.9),
    "product of sums": (SquaredExponential(0.9) + 0.4) * (kernels.Linear(0.6) + kernels.Matern12(2.0)),
    "Select": kernels.Select(Matern52(0.7), 1) * kernels.Select(kernels.Periodic(1.0, 2.0), 0),
    "Warp": kernels.Warp(SquaredExponential(0.9) + kernels.Linear(0.3), lambda X: jnp.tanh(X)),
}


@pytest.mark.parametrize(
    "name", representative(KERNELS, ["SquaredExponential", "Linear", "product of waves", "product of sums", "Select"])
)
def test_draws_of_the_prior_have_the_kernel_as_covariance_with_any_number_of_features(name):
    kernel, inputs = KERNELS[name], jnp.asarray(X)
    draw = jax.jit(jax.vmap(lambda key: _prior_at(kernel, _draw_prior(kernel, key, 8, inputs, ()), inputs)))
    check_moments(draw(jax.random.split(jax.random.key(4), 20_000)), np.zeros(N), np.asarray(kernel(X, X)))


@pytest.mark.parametrize("name", representative(["Linear", "SquaredExponential"], ["SquaredExponential"]))
def test_prior_draws_of_a_batch_of_latents_are_independent(name):
    kernel, inputs = KERNELS[name], jnp.asarray(X[:3])
    draw = jax.jit(jax.vmap(lambda key: _prior_at(kernel, _draw_prior(kernel, key, 8, inputs, (2,)), inputs)))
    K, zero = np.asarray(kernel(inputs, inputs)), np.zeros((3, 3))
    draws = draw(jax.random.split(jax.random.key(4), 20_000)).reshape(-1, 6)
    check_moments(draws, np.zeros(6), np.block([[K, zero], [zero, K]]))


@pytest.mark.parametrize("name", ["Constant", "Linear", "Polynomial"])
def test_kernels_of_finite_rank_have_exact_features(name):
    (term,) = terms(KERNELS[name])
    features = term_features(list(term), jnp.asarray(X))
    assert_allclose(features @ features.T, KERNELS[name](X, X), rtol=1e-12, atol=1e-14)


# Means, and what is refused.


def model_with(kernel=None, mean=0.0):
    def model(X, y=None):
        weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
        made = kernel(weight) if kernel is not None else Matern52(1.1)
        centre = mean(weight) if callable(mean) else mean
        f = numpyro.sample("f", sgp.GaussianProcess(made, X, centre))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    return model


def functions_of(model, num_samples=3):
    guide = GUIDES["whitened"](model, Z)
    params = arbitrary_parameters(model, guide, X, y)
    return sample_functions(guide, jax.random.key(1), params, X, num_samples=num_samples)["f"]


def test_means_follow_each_draw_of_their_parameters():
    far = np.full((1, D), 1e4)  # no data here: the posterior is the prior

    def plane(weight, X):
        return weight * X[:, 0]

    model = model_with(mean=lambda weight: jax.tree_util.Partial(plane, weight))
    guide = GUIDES["whitened"](model, Z)
    params = arbitrary_parameters(model, guide, X, y)
    slopes = sample_functions(guide, jax.random.key(1), params, X, num_samples=500)["f"](far)[:, 0] / 1e4
    error = params["weight_auto_scale"] / np.sqrt(500)
    assert abs(np.mean(slopes) - params["weight_auto_loc"]) < 5 * error
    assert abs(np.std(slopes) - params["weight_auto_scale"]) < 5 * error


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (model_with(mean=np.zeros(N)), ValueError, "prior mean given as an array of values.*as a function of X"),
        (
            model_with(lambda w: Matern52(1.0) + kernels.White(0.1)),
            TypeError,
            "kernel White has no features.*functions drawn",
        ),
        (model_with(lambda w: lambda X, Z=None: Matern52(1.0)(X, Z)), TypeError, "kernel function has no features"),
        (
            model_with(lambda w: kernels.Warp(Matern52(1.0), lambda X: w * X)),
            ValueError,
            r"'f' is a function that closes over.*jax.tree_util.Partial",
        ),
    ],
    ids=["array mean", "white noise", "unknown kernel", "closure"],
)
def test_what_has_no_function_draws_raises_and_says_what_to_do(model, error, message):
    with pytest.raises(error, match=message):
        functions_of(model)


def test_a_warp_that_shows_its_weights_is_drawn():
    def scaled(weight, X):
        return weight * X

    f = functions_of(model_with(lambda w: kernels.Warp(Matern52(1.0), jax.tree_util.Partial(scaled, w))))
    assert np.all(np.isfinite(f(X_new)))


def test_functions_are_drawn_inside_of_a_compiled_program():
    guide, params = made("dense")

    @jax.jit
    def values(params, X, y):
        return sample_functions(guide, jax.random.key(1), params, X, y, num_samples=2)["f"](X_new)

    expected = sample_functions(guide, jax.random.key(1), params, X, y, num_samples=2)["f"](X_new)
    assert_allclose(values(params, X, y), expected, rtol=1e-8)


def test_a_model_may_look_at_the_values_of_its_arguments():
    group = np.array([0, 2, 1, 1, 0, 2, 0])

    def grouped(X, group, y=None):
        with numpyro.plate("groups", len(np.unique(group))):
            level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f + level[group], NOISE), obs=y)

    guide = sgp.AutoSVGP(grouped, Z)
    params = arbitrary_parameters(grouped, guide, X, group, y)
    functions = sample_functions(guide, jax.random.key(1), params, X, group, num_samples=2)
    assert functions["f"](X_new).shape == (2, N_NEW)


def test_inputs_of_another_width_and_wrong_counts_raise():
    f = functions_of(plain)
    with pytest.raises(ValueError, match=r"`X_new` has shape .*, but this GP has inputs of 2 columns"):
        f(X_new[:, :1])
    with pytest.raises(ValueError, match=r"`X` must have shape \(N, D\)"):
        f(X_new[:, 0])
    with pytest.raises(ValueError, match="`num_samples` must be a positive integer, got 0"):
        functions_of(plain, num_samples=0)
    guide, params = made("tied")
    process = process_posterior(guide, jax.random.key(0), params, X)["f"]
    with pytest.raises(ValueError, match="but this GP has inputs of 2 columns"):
        process.posterior(X_new[:, :1])
    with pytest.raises(ValueError, match="'f_auto_sites' has no value"):
        process_posterior(guide, jax.random.key(0), {k: v for k, v in params.items() if not k.endswith("sites")}, X)


def test_a_new_posterior_is_one_family():
    guide = POSTERIORS["mean_field"](plain, Z)
    params = arbitrary_parameters(plain, guide, X, y)
    params["f_auto_log_s"] = jnp.linspace(-2.0, 0.0, len(Z))
    expected = guide.posterior(jax.random.key(0), params, X_new)["f"]
    S = np.diag(np.exp(2.0 * np.linspace(-2.0, 0.0, len(Z))))
    assert_allclose(expected.kl, oracles.gaussian_kl(np.asarray(params["f_auto_m"]), S, np.eye(len(Z))), rtol=1e-10)
    q = process_posterior(guide, jax.random.key(0), params, X)["f"].posterior(X_new)
    assert_allclose(q.mean, expected.mean, rtol=1e-9)
    assert_allclose(q.covariance(), expected.covariance(), rtol=1e-8, atol=1e-10)
    f = guide.sample_functions(jax.random.key(1), params, X, num_samples=DRAWS, num_features=64)["f"]
    check_moments(f(X_new), expected.mean, expected.covariance())


def test_predictions_of_a_family_do_not_depend_on_how_it_writes_its_inputs():
    class Rewritten(sgp.Whitened):
        def moments(self, param, prior, batch_shape):
            own = sgp.GaussianProcess(prior.kernel, prior.X * 1.0, jitter=prior.jitter)
            return super().moments(param, own, batch_shape)

    guide = sgp.AutoSparseGP(plain, Rewritten(Z))
    params = arbitrary_parameters(plain, guide, X, y)
    expected = guide.posterior(jax.random.key(0), params, X_new)["f"]
    q = process_posterior(guide, jax.random.key(0), params, X)["f"].posterior(X_new)
    assert_allclose(q.mean, expected.mean, rtol=1e-10)
    assert_allclose(q.covariance(), expected.covariance(), rtol=1e-8, atol=1e-10)


def test_a_family_without_inducing_variables_of_its_own_is_refused_by_name():
    class Combined(sgp.Whitened):
        def gaussian(self, *_):
            return None

    guide = sgp.AutoSparseGP(plain, Combined(Z))
    params = arbitrary_parameters(plain, guide, X, y)
    with pytest.raises(TypeError, match="The posterior family Combined of site 'f' has no inducing variables"):
        process_posterior(guide, jax.random.key(0), params, X)
