"""Prediction: draws have the moments of the posterior, at any inputs, in any process, from the parameters alone."""

from pathlib import Path
import pickle
import subprocess
import sys

from grids import representative
from guides import FACTORISED, GUIDES, POSTERIORS, arbitrary_parameters, initial_parameters, loss_at, optimizer
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
import pytest
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.distributions.wrappers import rewrap
from numpyro_sgp.kernels import Matern52

pytestmark = pytest.mark.usefixtures("x64")

N, M, D, N_NEW, DRAWS = 7, 5, 2, 4, 2000
RNG = np.random.default_rng(40)
X, Z, X_new = RNG.normal(size=(N, D)), RNG.normal(size=(M, D)), RNG.normal(size=(N_NEW, D))
y, counts = RNG.normal(size=N), RNG.poisson(2.0, size=N)
NOISE = 0.7
each_kind = pytest.mark.parametrize("name", POSTERIORS)


def plain(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X, lambda x: x[:, 0]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def continuous(X, y=None):
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.4))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern52(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def discrete(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(-1.0, 0.4))
    intercept = numpyro.sample("intercept", dist.Normal(0.5, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, variance), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + intercept)), obs=y)


def given(X, noise, lengthscale):
    """The continuous model at known hyperparameters."""
    f = numpyro.sample("f", sgp.GaussianProcess(Matern52(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise))


OUTPUTS = {"continuous": y, "discrete": counts}
MODELS = {"continuous": continuous, "discrete": discrete}
BASES = {"AutoNormal": AutoNormal, "AutoDelta": AutoDelta, "AutoMultivariateNormal": AutoMultivariateNormal}


def check_moments(draws, mean, covariance):
    """Mean and covariance of normal draws (S, N), each within five standard errors of the ones they were drawn from."""
    S, variance = len(draws), np.diagonal(covariance)
    assert np.all(np.abs(np.mean(draws, axis=0) - mean) < 5 * np.sqrt(variance / S))
    error = np.sqrt((np.outer(variance, variance) + np.square(covariance)) / S)
    assert np.all(np.abs(np.cov(draws, rowvar=False) - covariance) < 5 * error)


# Draws against moments.


def two_functions(X, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(-1.0, 0.4))
    f, g = (numpyro.sample(name, sgp.GaussianProcess(Matern52(1.1, variance), X)) for name in "fg")
    numpyro.sample("y", dist.Normal(f * g, NOISE).to_event(1), obs=y)


def layers(X, y=None):
    h = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
    g = numpyro.sample("g", sgp.GaussianProcess(Matern52(1.1, 0.8), jnp.stack([h, X[:, 1]], axis=1)))
    numpyro.sample("y", dist.Normal(g, NOISE).to_event(1), obs=y)


def fed_by_a_parameter(X, y=None):
    weight = numpyro.param("weight", 0.0)
    h = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
    g = numpyro.sample("g", sgp.GaussianProcess(Matern52(1.1, 0.8), X + weight * h[:, None]))
    numpyro.sample("y", dist.Normal(g, NOISE).to_event(1), obs=y)


def in_a_closure(X, y=None):
    h = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))

    def kernel(X, Z=None):
        return Matern52(1.1, 1.0 + jnp.mean(h) ** 2)(X, Z)

    g = numpyro.sample("g", sgp.GaussianProcess(kernel, X))
    numpyro.sample("y", dist.Normal(g, NOISE).to_event(1), obs=y)


@pytest.mark.parametrize("model", [continuous, two_functions, layers, fed_by_a_parameter, in_a_closure])
def test_the_posterior_makes_a_square_matrix_only_for_a_gp_that_takes_values_of_another(model, monkeypatch):
    guide = sgp.AutoSVGP(model, Z)
    params = initial_parameters(model, guide, X, y)
    if model is fed_by_a_parameter:
        params["weight"] = jnp.ones(())  # what counts is the fitted value

    def square(q):
        pytest.fail(f"the covariance of {q.event_shape[0]} values")

    monkeypatch.setattr(sgp.SparsePosterior, "covariance", square)
    if model in (layers, fed_by_a_parameter, in_a_closure):
        with pytest.raises(pytest.fail.Exception, match="4 values"):
            guide.posterior(jax.random.key(0), params, X_new)
    else:
        q = guide.posterior(jax.random.key(0), params, X_new)["f"]
        assert q.mean.shape == (N_NEW,)
        assert q.joint


@each_kind
def test_predictive_draws_at_new_inputs_have_the_moments_of_the_posterior(name):
    guide = POSTERIORS[name](plain, Z)
    params = arbitrary_parameters(plain, guide, X, y)
    q = guide.posterior(jax.random.key(0), params, X_new)["f"]
    predictive = Predictive(plain, guide=guide, params=params, num_samples=DRAWS, return_sites=["f", "y"])
    draws = predictive(jax.random.key(1), X_new)
    assert np.max(np.abs(q.covariance() - np.diag(q.variance))) > 0.05  # there is a covariance to be found
    check_moments(draws["f"], q.mean, q.covariance())
    check_moments(draws["y"], q.mean, q.covariance() + NOISE**2 * np.eye(N_NEW))


@each_kind
def test_the_posterior_at_some_inputs_is_a_block_of_that_at_more(name):
    guide = POSTERIORS[name](plain, Z)
    params = arbitrary_parameters(plain, guide, X, y)
    at_more = guide.posterior(jax.random.key(0), params, np.concatenate([X_new, X]))["f"]
    at_some = guide.posterior(jax.random.key(0), params, X_new)["f"]
    covariance = at_some.covariance()
    assert_allclose(at_more.mean[:N_NEW], at_some.mean, rtol=1e-9)
    assert_allclose(at_more.covariance()[:N_NEW, :N_NEW], covariance, rtol=1e-8, atol=1e-12)
    assert_allclose(np.diagonal(covariance), at_some.variance, rtol=1e-9)
    assert_allclose(covariance, covariance.T, rtol=1e-12)
    assert np.linalg.eigvalsh(covariance).min() > -1e-9
    assert_allclose(at_more.kl, at_some.kl, rtol=1e-12)


@pytest.mark.parametrize("name", representative(POSTERIORS, ["whitened", "tied"]))
def test_parameters_in_float32_predict_at_inputs_in_float64(name):
    guide = POSTERIORS[name](plain, Z.astype(np.float32))
    params = arbitrary_parameters(plain, guide, X.astype(np.float32), y.astype(np.float32))
    single = guide.posterior(jax.random.key(0), params, X_new)["f"]
    assert single.mean.dtype == single.variance.dtype == np.float64
    wide = jax.tree.map(lambda x: x.astype(float) if x.dtype == np.float32 else x, params)
    q = guide.posterior(jax.random.key(0), wide, X_new)["f"]
    # The rounding of float32, 6e-8, through covariances of condition 1e2.
    assert_allclose(single.mean, q.mean, rtol=1e-4, atol=1e-5)
    assert_allclose(single.variance, q.variance, rtol=1e-4, atol=1e-5)
    draws = Predictive(plain, guide=guide, params=params, num_samples=2)(jax.random.key(1), X_new)
    assert draws["y"].dtype == np.float64


@pytest.mark.parametrize("name", ["whitened", "per_datum"])
def test_joint_draws_have_the_posterior_covariance_whatever_their_sample_shape(name):
    guide = GUIDES[name](plain, Z)
    params = arbitrary_parameters(plain, guide, X, y)
    q = guide.posterior(jax.random.key(0), params, X_new)["f"]
    draws = guide.sample_posterior(jax.random.key(1), params, X_new, sample_shape=(DRAWS // 2, 2))["f"]
    assert draws.shape == (DRAWS // 2, 2, N_NEW)
    check_moments(draws.reshape(-1, N_NEW), q.mean, q.covariance())
    few = guide.sample_posterior(jax.random.key(2), params, X_new, sample_shape=(3, 2))["f"]
    assert len(np.unique(np.round(few[..., 0], 9))) == 6  # each has its own key
    one = guide.sample_posterior(jax.random.key(2), params, X_new)["f"]
    again = guide.sample_posterior(jax.random.key(2), params, X_new, sample_shape=())["f"]
    assert_allclose(one, again, rtol=1e-12)
    assert np.all(np.abs(one - q.mean) < 6 * np.sqrt(q.variance))


def test_draws_of_f_go_with_the_draws_of_the_hyperparameters():
    guide = FACTORISED["tied"](continuous, Z)
    params = arbitrary_parameters(continuous, guide, X, y)
    params["lengthscale_auto_scale"] = jnp.asarray(1.0)
    draws = guide.sample_posterior(jax.random.key(1), params, X_new, sample_shape=(DRAWS,))
    # Standardised by the posterior at their own lengthscale, all draws are standard normal.
    plain_params = {site: params[site] for site in ("f_auto_inducing", "f_auto_sites")}
    plain_params["auto_latents"] = initial_parameters(given, FACTORISED["tied"](given, Z), X, 0.5, 1.0)["auto_latents"]
    conditional = FACTORISED["tied"](given, Z)

    def standardised(f, lengthscale):
        q = conditional.posterior(jax.random.key(0), plain_params, X_new, 0.5, lengthscale)["f"]
        return jnp.linalg.solve(jnp.linalg.cholesky(q.covariance() + 1e-6 * jnp.eye(N_NEW)), f - q.mean)

    z = jax.jit(jax.vmap(standardised))(draws["f"], draws["lengthscale"])
    check_moments(z, np.zeros(N_NEW), np.eye(N_NEW))
    logs = np.log(draws["lengthscale"])
    assert abs(np.mean(logs) - params["lengthscale_auto_loc"]) < 5 / np.sqrt(DRAWS)
    assert abs(np.std(logs) - 1.0) < 5 / np.sqrt(2 * DRAWS)


# Medians and quantiles.


@each_kind
def test_median_and_quantiles_are_the_closed_form(name):
    levels = np.array([0.05, 0.5, 0.9])
    guide = FACTORISED[name](continuous, Z)
    params = arbitrary_parameters(continuous, guide, X, y)
    loc = {site: params[f"{site}_auto_loc"] for site in ("noise", "lengthscale")}
    scale = {site: params[f"{site}_auto_scale"] for site in loc}

    median, quantiles = guide.median(params), guide.quantiles(params, levels)
    assert set(median) == set(quantiles) == set(loc)
    for site in loc:
        assert_allclose(median[site], np.exp(loc[site]), rtol=1e-10)
        expected = stats.lognorm.ppf(levels, scale[site], scale=np.exp(loc[site]))
        assert_allclose(quantiles[site], expected, rtol=1e-8)

    median, quantiles = guide.median(params, X_new), guide.quantiles(params, levels, X_new)
    at_medians = handlers.condition(continuous, data={site: median[site] for site in loc})
    q = FACTORISED[name](at_medians, Z).posterior(jax.random.key(0), params, X_new)["f"]
    assert_allclose(median["f"], q.mean, rtol=1e-10)
    assert_allclose(quantiles["f"], stats.norm.ppf(levels[:, None], q.mean, np.sqrt(q.variance)), rtol=1e-8)
    assert_allclose(quantiles["noise"][1], median["noise"], rtol=1e-10)


@pytest.mark.parametrize("base", representative([AutoNormal, AutoMultivariateNormal], [AutoNormal]))
@pytest.mark.thorough
def test_medians_of_what_depends_on_the_gp_are_not_given_as_if_it_were_zero(base):
    def with_rate(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(0.0, 0.5))
        weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(1.0), X))
        rate = numpyro.deterministic("rate", jnp.exp(1.5 + f))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(rate + weights[0], noise), obs=y)

    guide = sgp.AutoTSVGP(with_rate, Z, base=base, joint=False)
    params = arbitrary_parameters(with_rate, guide, X, y)
    for fitted in (guide, sgp.AutoTSVGP(with_rate, Z, base=base, joint=False)):
        assert set(fitted.median(params, X_new)) == {"noise", "weights", "f"}
        single, levels = fitted.quantiles(params, 0.9, X_new), fitted.quantiles(params, [0.5, 0.9], X_new)
        shapes = {name: value.shape for name, value in single.items()}
        assert shapes == {"noise": (), "weights": (2,), "f": (len(X_new),)}
        for name, value in levels.items():
            assert_allclose(value[1], single[name], rtol=1e-10)
    assert set(guide.median(params)) == set(guide.quantiles(params, [0.5])) == {"noise", "weights"}


def test_median_and_quantiles_without_other_latents_are_those_of_the_gp():
    guide = GUIDES["tied"](plain, Z)
    params = arbitrary_parameters(plain, guide, X, y)
    q = guide.posterior(jax.random.key(0), params, X_new)["f"]
    assert guide.median(params) == {}
    assert guide.quantiles(params, 0.5) == {}
    assert_allclose(guide.median(params, X_new)["f"], q.mean, rtol=1e-12)
    assert_allclose(guide.quantiles(params, 0.975, X_new)["f"], q.mean + 1.959963985 * np.sqrt(q.variance), rtol=1e-8)


@pytest.mark.parametrize("base", [AutoDelta, AutoMultivariateNormal])
def test_the_median_of_other_bases_is_their_own(base):
    guide = FACTORISED["tied"](continuous, Z, base=base)
    params = arbitrary_parameters(continuous, guide, X, y)
    median = guide.median(params, X_new)
    if base is AutoDelta:
        expected = [params["lengthscale_auto_loc"], params["noise_auto_loc"]]
    else:
        expected = np.exp(params["auto_loc"])
    assert_allclose(sorted([median["lengthscale"], median["noise"]]), sorted(expected), rtol=1e-10)
    at_medians = handlers.condition(continuous, data={site: median[site] for site in ("noise", "lengthscale")})
    q = FACTORISED["tied"](at_medians, Z).posterior(jax.random.key(0), params, X_new)["f"]
    assert_allclose(median["f"], q.mean, rtol=1e-10)


# New processes, pickles, reuse.


CASES = {
    **{f"{base} continuous": ("tied", base, "continuous") for base in BASES},
    "AutoNormal discrete": ("whitened", "AutoNormal", "discrete"),
}


def guide_of(case):
    name, base, kind = CASES[case]
    return MODELS[kind], GUIDES[name](MODELS[kind], Z, base=BASES[base])


def predictions(model, guide, params):
    """Numbers that a guide gives without outputs, from its parameters."""
    key = jax.random.key(7)
    median = guide.median(params, X_new)
    sites = [*median, "y"]
    predictive = Predictive(model, guide=guide, params=params, num_samples=3, parallel=True, return_sites=sites)
    draws = predictive(key, X_new)
    q = guide.posterior(key, params, X_new)["f"]
    joint = guide.sample_posterior(key, params, X_new)
    numbers = {"draws": draws, "posterior": (q.mean, q.variance), "median": median, "joint": joint}
    return jax.tree.map(np.asarray, numbers)


PREDICT = """
import pickle, sys
sys.path[:0] = sys.argv[3:]
import jax
import test_prediction as tests
with jax.enable_x64(True):
    with open(sys.argv[1], "rb") as file:
        params = pickle.load(file)
    result = {case: tests.predictions(*tests.guide_of(case), params[case]) for case in params}
with open(sys.argv[2], "wb") as file:
    pickle.dump(result, file)
"""


@pytest.fixture(scope="module")
def in_a_new_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process")
    with jax.enable_x64(True):
        here, params = {}, {}
        for case in CASES:
            model, guide = guide_of(case)
            params[case] = jax.tree.map(np.asarray, arbitrary_parameters(model, guide, X, OUTPUTS[CASES[case][2]]))
            here[case] = predictions(model, guide, params[case])
    (folder / "params.pickle").write_bytes(pickle.dumps(params))
    paths = [str(folder / "params.pickle"), str(folder / "result.pickle")]
    modules = [str(Path(__file__).parent), str(Path(sgp.__file__).parents[1])]
    run = subprocess.run([sys.executable, "-c", PREDICT, *paths, *modules], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return here, pickle.loads((folder / "result.pickle").read_bytes())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.exhaustive
def test_a_guide_built_in_a_new_process_predicts_the_same_from_params_alone(case, in_a_new_process):
    here, there = (result[case] for result in in_a_new_process)
    assert set(here["draws"]) == set(there["draws"]) >= {"f", "y"}
    for path, value in jax.tree_util.tree_leaves_with_path(here):
        other = dict(jax.tree_util.tree_leaves_with_path(there))[path]
        assert_allclose(other, value, rtol=1e-10, err_msg=jax.tree_util.keystr(path))
    # Outcomes are predicted by the likelihood, not by the base guide.
    y_draws, f_draws = there["draws"]["y"], there["draws"]["f"]
    assert y_draws.shape == f_draws.shape == (3, N_NEW)
    if CASES[case][2] == "continuous":
        residual = (y_draws - f_draws) / there["draws"]["noise"][:, None]
        assert np.all(np.abs(residual) < 5.0)
    else:
        assert np.issubdtype(y_draws.dtype, np.integer)


@pytest.mark.thorough
def test_an_autoguide_of_the_user_predicts_outcomes_by_the_likelihood_in_a_fresh_guide():
    def fresh():
        return FACTORISED["tied"](continuous, Z, base=AutoNormal(handlers.block(continuous, hide=["f"])))

    params = arbitrary_parameters(continuous, used := fresh(), X, y)
    sites = ["noise", "lengthscale", "f", "y"]
    predicted = [
        Predictive(continuous, guide=guide, params=params, num_samples=4, return_sites=sites)(jax.random.key(0), X_new)
        for guide in (used, fresh())
    ]
    residual = (predicted[1]["y"] - predicted[1]["f"]) / predicted[1]["noise"][:, None]
    assert np.all(np.abs(residual) < 5.0)
    assert len(np.unique(np.round(residual, 9))) == residual.size
    for draws in predicted:
        assert np.all(np.abs(np.log(draws["noise"]) - params["noise_auto_loc"]) < 5 * params["noise_auto_scale"])


def test_a_guide_that_was_not_run_before_draws_what_one_that_was_draws():
    guide = sgp.AutoSVGP(continuous, Z)
    params = arbitrary_parameters(continuous, guide, X, y)
    key = jax.random.key(3)
    known = guide.posterior(key, params, X_new)["f"].mean
    for _ in range(2):
        assert_allclose(sgp.AutoSVGP(continuous, Z).posterior(key, params, X_new)["f"].mean, known)
    first, second = (guide.posterior(each, params, X_new)["f"].mean for each in jax.random.split(key))
    assert np.max(np.abs(first - second)) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("name", representative(["tied", "dense"], ["tied"]))
def test_a_pickled_guide_predicts_the_same_after_a_run(name):
    guide = GUIDES[name](continuous, Z)
    svi = SVI(continuous, guide, optimizer(name), sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), 5, X, y, progress_bar=False)
    again = pickle.loads(pickle.dumps(guide))
    expected = predictions(continuous, guide, result.params)
    for path, value in jax.tree_util.tree_leaves_with_path(predictions(continuous, again, result.params)):
        assert_allclose(value, dict(jax.tree_util.tree_leaves_with_path(expected))[path], rtol=1e-12)
    # Parameters pickle too, sites included.
    params = pickle.loads(pickle.dumps(result.params))
    q, kept = (guide.posterior(jax.random.key(0), p, X_new)["f"] for p in (result.params, params))
    assert_allclose(kept.mean, q.mean, rtol=0.0)


def test_predicting_elsewhere_does_not_change_what_a_guide_trains_on():
    guide = GUIDES["per_datum"](continuous, Z)
    params = arbitrary_parameters(continuous, guide, X, y)
    before = loss_at(params, continuous, guide, X, y)
    first = guide.posterior(jax.random.key(0), params, X_new)["f"].mean
    Predictive(continuous, guide=guide, params=params, num_samples=2)(jax.random.key(0), X_new[:2])
    assert_allclose(loss_at(params, continuous, guide, X, y), before, rtol=1e-12)
    assert_allclose(guide.posterior(jax.random.key(0), params, X_new)["f"].mean, first, rtol=1e-12)


@pytest.mark.exhaustive
def test_a_compiled_init_leaves_no_tracer_where_prediction_meets_it():
    guide = FACTORISED["tied"](continuous, Z)
    svi = SVI(continuous, guide, optimizer("tied"), sgp.QuadratureELBO())
    params = svi.get_params(jax.jit(svi.init)(jax.random.key(0), X, y))
    here = predictions(continuous, guide, params)
    assert_allclose(here["median"]["noise"], np.exp(params["noise_auto_loc"]), rtol=1e-12)
    afresh = predictions(continuous, FACTORISED["tied"](continuous, Z), params)
    for path, value in jax.tree_util.tree_leaves_with_path(afresh):
        assert_allclose(dict(jax.tree_util.tree_leaves_with_path(here))[path], value, rtol=1e-12)


@pytest.mark.thorough
def test_no_tracer_leaks_from_a_step_or_a_posterior():
    guide = GUIDES["tied"](plain, Z)
    svi = SVI(plain, guide, optimizer("tied"), sgp.QuadratureELBO(num_nodes=2))
    state = svi.init(jax.random.key(0), X, y)
    params = svi.get_params(state)
    with jax.checking_leaks():
        _, loss = jax.jit(svi.update)(state, X, y)
        mean = jax.jit(lambda X: guide.posterior(jax.random.key(0), params, X)["f"].mean)(X_new)
    assert_allclose(loss, loss_at(params, plain, guide, X, y), rtol=1e-10)
    assert_allclose(mean, X_new[:, 0], rtol=1e-10)  # the start is the prior


@pytest.mark.exhaustive
def test_keys_of_either_kind_are_taken():
    def deep(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.8), X))
        g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.8), f[:, None]))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(g, 0.3), obs=y)

    X, key = np.linspace(0.0, 1.0, 5)[:, None], jax.random.PRNGKey(0)
    guide = sgp.AutoSVGP(deep, {"f": X[::2], "g": X[::2]}, natural=True)
    svi = SVI(deep, guide, sgp.NaturalGradient(0.1), sgp.QuadratureELBO(num_samples=4))
    state = svi.init(key, X, X[:, 0])
    state, loss = jax.jit(svi.update)(state, X, X[:, 0])
    assert np.isfinite(loss)
    draws = guide.sample_posterior(key, svi.get_params(state), X, sample_shape=(3, 2))
    assert draws["f"].shape == (3, 2, 5)


@pytest.mark.exhaustive
def test_gp_sites_of_two_dtypes_take_natural_steps_together():
    with jax.enable_x64(True):

        def model(X, y):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.8), X))
            h = numpyro.sample("h", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.8), X.astype(np.float32)))
            with numpyro.plate("data", X.shape[0]):
                numpyro.sample("y", dist.Normal(f + h, 0.3), obs=y)

        X = np.linspace(0.0, 1.0, 5)[:, None]
        guide = sgp.AutoTSVGP(model, {"f": X[::2], "h": X[::2].astype(np.float32)})
        svi = SVI(model, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO(num_nodes=3))
        state, losses = svi.init(jax.random.key(0), X, X[:, 0]), []
        for _ in range(3):
            state, loss = svi.update(state, X, X[:, 0])
            losses.append(loss)
        assert losses[2] < losses[1] < losses[0]


def test_an_expansion_around_a_mask_keeps_the_axes_that_became_events():
    kernels = sgp.kernels.SquaredExponential(jnp.array([[0.3], [0.5], [0.7]]))
    prior = sgp.GaussianProcess(kernels, np.linspace(0.0, 1.0, 4)[:, None])
    shapes = []

    def replace(inner, batch_shape):
        shapes.append(batch_shape)
        return inner.expand(batch_shape)

    for expand, batch in (((3,), (3, 3)), ((5, 2), (5, 2, 3))):
        again = rewrap(prior.to_event(1).mask(jnp.array(True)).expand(expand), replace)
        assert again.shape() == (*expand, 3, 4)
        assert shapes.pop() == batch
