"""To ArviZ: what is in the groups is what the draws imply, and ArviZ's own numbers are right on it, in both versions."""

import builtins
import functools
import importlib.util
import math

import arviz as az
from grids import representative
from guides import GUIDES, LOOSE, MINIBATCH, POSTERIORS, arbitrary_parameters, optimizer
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.primitives import mutable
import optax
import pytest
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp import features
from numpyro_sgp.diagnostics.inference_data import to_arviz
from numpyro_sgp.kernels import Matern52, SquaredExponential

pytestmark = pytest.mark.usefixtures("x64")

OLD = az.__version__.startswith("0.")
N, M, D, C, BATCH, DRAWS = 7, 5, 2, 4, 3, 400
RNG = np.random.default_rng(60)
X, Z = RNG.normal(size=(N, D)), RNG.normal(size=(M, D))
y, Y = RNG.normal(size=N), RNG.normal(size=(C, N))
counts = RNG.poisson(2.0, size=N)
observed = np.array([True, True, False, True, False, True, True])
NOISE = 0.7
each_kind = pytest.mark.parametrize("name", POSTERIORS)


def gaussian(X, y=None, num_data=None):
    f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X, lambda x: x[:, 0]))
    numpyro.deterministic("rate", jnp.exp(f))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def hierarchical(X, y=None, num_data=None):
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.4))
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern52(lengthscale), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def svi_of(model, guide):
    return SVI(model, guide, optax.sgd(0.0), sgp.QuadratureELBO())


def arbitrary(model, guide, *args, num_samples=DRAWS, key=1, params=None, **kwargs):
    """A conversion at arbitrary parameters, and these parameters."""
    to_guide = {k: v for k, v in kwargs.items() if k not in ("batch_size", "dims", "coords")}
    params = arbitrary_parameters(model, guide, *args, **to_guide) if params is None else params
    data = to_arviz(jax.random.key(key), svi_of(model, guide), params, *args, num_samples=num_samples, **kwargs)
    return data, params


@functools.cache
def converted(name):
    """Guide, conversion and parameters, for what is checked of every guide."""
    guide = POSTERIORS[name](gaussian, Z)
    return guide, *arbitrary(gaussian, guide, X, y, num_samples=2000)


def values(data, group, name):
    """A variable without the chain."""
    array = data[group][name].values
    return array[0] if data[group][name].dims[:1] == ("chain",) else array


def elpd(loo):
    return loo.elpd_loo if OLD else loo.elpd


def pointwise(loo):
    return np.asarray(loo.loo_i if OLD else loo.elpd_i)


def check_moments(draws, mean, covariance):
    """Mean and covariance of normal draws (S, N), each within five standard errors."""
    S, variance = len(draws), np.diagonal(covariance)
    assert np.all(np.abs(np.mean(draws, axis=0) - mean) < 5 * np.sqrt(variance / S))
    error = np.sqrt((np.outer(variance, variance) + np.square(covariance)) / S)
    assert np.all(np.abs(np.cov(draws, rowvar=False) - covariance) < 5 * error)


def groups_of(data):
    return set(data.groups()) if OLD else set(data.children)


# Leave-one-out.

N_LOO = 12
X_LOO = np.linspace(-2.0, 2.0, N_LOO)[:, None]
y_loo = np.sin(X_LOO[:, 0]) + NOISE * np.random.default_rng(0).normal(size=N_LOO)


def se(X, lengthscale, variance):
    return variance * np.exp(-0.5 * np.square((X[:, None, 0] - X[None, :, 0]) / lengthscale))


def exact_leave_one_out(K, y, noise):
    """For each datum the mean and variance of f given the others, by solving N times; and log p(y_n | y_−n)."""
    result = []
    for n in range(len(y)):
        rest = np.arange(len(y)) != n
        weights = np.linalg.solve(K[np.ix_(rest, rest)] + noise**2 * np.eye(len(y) - 1), K[rest, n])
        m, v = weights @ y[rest], K[n, n] - weights @ K[rest, n]
        result.append((m, v, stats.norm.logpdf(y[n], m, np.sqrt(v + noise**2))))
    return np.array(result).T


def regression(lengthscale):
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(lengthscale, 1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    return model


def exact_fit(model, guide):
    """A natural step of size one on a Gaussian likelihood is the exact posterior."""
    svi = SVI(model, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    return svi, svi.run(jax.random.key(0), 2, X_LOO, y_loo, progress_bar=False)


@pytest.fixture(scope="module")
def exact_posterior():
    with jax.enable_x64(True):
        model = regression(1.5)
        svi, result = exact_fit(model, sgp.AutoTSVGP(model, None))
        yield svi, result, to_arviz(jax.random.key(1), svi, result, X_LOO, y_loo, num_samples=4000)


def standard_error(m, v, y, noise, draws):
    """Of log mean 1/p(y_n | f_n) over draws of f_n ~ N(m, v), from E exp(t (y − f)²) in closed form."""

    def log_moment(t):
        return -0.5 * np.log1p(-2 * t * v) + t * (y - m) ** 2 / (1 - 2 * t * v)

    relative = np.exp(log_moment(1 / noise**2) - 2 * log_moment(0.5 / noise**2)) - 1.0
    return np.sqrt(relative / draws)


def test_loo_of_an_exact_posterior_is_exact_leave_one_out(exact_posterior):
    data = exact_posterior[-1]
    K = se(X_LOO, 1.5, 1.0)
    _, _, exact = exact_leave_one_out(K, y_loo, NOISE)
    full = K @ np.linalg.solve(K + NOISE**2 * np.eye(N_LOO), np.column_stack([y_loo, K]))
    m, v = full[:, 0], np.diag(K - full[:, 1:])
    assert np.all(v < 0.4 * NOISE**2)  # the weights have a variance, which the standard error needs
    loo = az.loo(data, pointwise=True)
    error = standard_error(m, v, y_loo, NOISE, 4000)
    assert np.all(error < 0.03)
    assert np.all(np.abs(pointwise(loo) - exact) < 5 * error)
    # The errors of the points go together at worst.
    assert abs(elpd(loo) - np.sum(exact)) < 5 * np.sum(error)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_compare_prefers_the_model_with_the_better_leave_one_out_density(exact_posterior):
    rough = regression(0.05)
    svi, result = exact_fit(rough, sgp.AutoTSVGP(rough, None))
    worse = to_arviz(jax.random.key(1), svi, result, X_LOO, y_loo, num_samples=1000)
    table = az.compare({"rough": worse, "smooth": exact_posterior[-1]})
    assert list(table.index) == ["smooth", "rough"]
    densities = [np.sum(exact_leave_one_out(se(X_LOO, ell, 1.0), y_loo, NOISE)[2]) for ell in (1.5, 0.05)]
    # With 0.05 each datum is alone: importance sampling is at its limit, but the difference is large.
    assert densities[0] - densities[1] > 1.0


# Densities.


def test_the_importance_ratio_of_an_exact_posterior_is_the_evidence_at_every_draw(exact_posterior):
    stats_group = exact_posterior[-1]["sample_stats"]
    ratio = (stats_group["lp"] - stats_group["log_q"]).values
    evidence = stats.multivariate_normal.logpdf(y_loo, np.zeros(N_LOO), se(X_LOO, 1.5, 1.0) + NOISE**2 * np.eye(N_LOO))
    assert np.std(values(exact_posterior[-1], "sample_stats", "lp")) > 1.0
    # f is drawn with the default jitter of 1e-6, which the density of the sites does not have.
    assert_allclose(ratio, evidence, atol=1e-5)


@each_kind
def test_the_mean_importance_ratio_is_the_bound(name):
    guide, data, params = converted(name)
    ratio = values(data, "sample_stats", "lp") - values(data, "sample_stats", "log_q")
    bound = -LOOSE.loss(jax.random.key(0), params, gaussian, guide, X, y)
    assert abs(np.mean(ratio) - bound) < 5 * np.std(ratio) / math.sqrt(2000)
    kl = guide.posterior(jax.random.key(0), params, X)["f"].kl
    log_q = values(data, "sample_stats", "log_q")
    assert abs(np.mean(log_q) - kl) < 5 * np.std(log_q) / math.sqrt(2000)


@pytest.mark.parametrize("base", representative([AutoNormal, AutoMultivariateNormal], [AutoNormal]))
@pytest.mark.thorough
def test_densities_of_hyperparameters_are_those_of_prior_and_guide(base):
    data, params = arbitrary(hierarchical, GUIDES["whitened"](hierarchical, Z, base=base), X, y)
    posterior = {site: values(data, "posterior", site) for site in ("noise", "lengthscale", "f")}
    log_p = stats.lognorm.logpdf(posterior["noise"], 0.4, scale=math.exp(-0.5))
    log_p = log_p + stats.lognorm.logpdf(posterior["lengthscale"], 0.5)
    log_p = log_p + stats.norm.logpdf(y, posterior["f"], posterior["noise"][:, None]).sum(axis=1)
    assert_allclose(values(data, "sample_stats", "lp"), log_p, rtol=1e-9)
    logs = np.log([posterior["noise"], posterior["lengthscale"]])
    if base is AutoNormal:
        loc, scale = ([params[f"{site}_auto_{p}"] for site in ("noise", "lengthscale")] for p in ("loc", "scale"))
        log_theta = stats.norm.logpdf(logs.T, loc, scale).sum(axis=1) - logs.sum(axis=0)
    else:
        root = params["auto_scale_tril"]
        log_theta = stats.multivariate_normal.logpdf(logs.T, params["auto_loc"], root @ root.T) - logs.sum(axis=0)
    # What is left is log q(v)/p(v) of a whitened q, whose parameters do not know θ.
    rest = values(data, "sample_stats", "log_q") - log_theta
    m, S_sqrt = params["f_auto_m"], np.tril(params["f_auto_S_sqrt"])
    kl = 0.5 * (np.sum(S_sqrt**2) + m @ m - M) - np.sum(np.log(np.abs(np.diag(S_sqrt))))
    assert abs(np.mean(rest) - kl) < 5 * np.std(rest) / math.sqrt(DRAWS)
    log_S = np.linalg.slogdet(S_sqrt)[1]
    assert np.all(rest > -0.5 * stats.chi2.ppf(1 - 1e-9, M) - log_S)  # −½|ε|² − log|S½| + ½|v|²


@pytest.mark.thorough
def test_log_q_of_a_dense_posterior_at_other_rows_is_unknown():
    guide = GUIDES["dense"](gaussian, Z)
    params = arbitrary_parameters(gaussian, guide, X, y)
    for rows in (slice(0, 4), slice(None, None, -1)):
        data, _ = arbitrary(gaussian, guide, X[rows], y[rows], params=params, num_samples=5)
        assert np.all(np.isnan(values(data, "sample_stats", "log_q")))
        assert np.all(np.isfinite(values(data, "sample_stats", "lp")))


# Groups.


@pytest.fixture(scope="module")
def fitted():
    with jax.enable_x64(True):
        guide = sgp.AutoTSVGP(hierarchical, X_LOO[::2])
        optim = sgp.NaturalGradient(0.5, others=optax.adam(1e-2))
        svi = SVI(hierarchical, guide, optim, sgp.QuadratureELBO())
        result = svi.run(jax.random.key(0), 50, X_LOO, y_loo, progress_bar=False)
        yield to_arviz(jax.random.key(1), svi, result, X_LOO, y_loo, num_samples=200), result.params


@each_kind
def test_groups_hold_what_each_draw_implies(name):
    guide, data, params = converted(name)
    assert groups_of(data) == {
        "posterior",
        "posterior_predictive",
        "log_likelihood",
        "sample_stats",
        "observed_data",
        "constant_data",
    }
    f, q = values(data, "posterior", "f"), guide.posterior(jax.random.key(0), params, X)["f"]
    check_moments(f, q.mean, q.covariance())
    check_moments(values(data, "posterior_predictive", "y"), q.mean, q.covariance() + NOISE**2 * np.eye(N))
    assert_allclose(values(data, "posterior", "rate"), np.exp(f), rtol=1e-10)
    assert_allclose(values(data, "log_likelihood", "y"), stats.norm.logpdf(y, f, NOISE), rtol=1e-10)
    assert_array_equal(values(data, "observed_data", "y"), y)
    assert list(data["constant_data"].data_vars) == ["X"]
    assert_array_equal(values(data, "constant_data", "X"), X)
    assert data["posterior"]["f"].dims == ("chain", "draw", "f_dim_0")
    assert dict(data["posterior"].sizes) == {"chain": 1, "draw": 2000, "f_dim_0": N, "rate_dim_0": N}
    assert all(isinstance(v.values, np.ndarray) for v in data["posterior"].data_vars.values())


@pytest.mark.thorough
def test_a_fresh_guide_with_params_alone_gives_the_same_draws_for_the_same_key(fitted):
    data, params = fitted
    fresh = svi_of(hierarchical, sgp.AutoTSVGP(hierarchical, X_LOO[::2]))
    again = to_arviz(jax.random.key(1), fresh, dict(params), X_LOO, y_loo, num_samples=200)
    for group in groups_of(data):
        for name in data[group].data_vars:
            assert_allclose(again[group][name].values, data[group][name].values, rtol=1e-8)
    other = to_arviz(jax.random.key(2), fresh, params, X_LOO, y_loo, num_samples=200)
    assert np.all(values(other, "posterior", "lengthscale") != values(data, "posterior", "lengthscale"))


def test_given_names_and_coordinates_are_used_in_every_group():
    stations = [f"s{n}" for n in range(N)]
    names = {"dims": {"y": ["station"], "f": ["station"], "X": ["station", "axis"]}}
    coords = {"station": stations, "axis": ["east", "north"]}
    data, _ = arbitrary(gaussian, GUIDES["tied"](gaussian, Z), X, y, num_samples=4, coords=coords, **names)
    for group, name in (("posterior", "f"), ("log_likelihood", "y"), ("posterior_predictive", "y")):
        assert data[group][name].dims == ("chain", "draw", "station")
        assert list(data[group]["station"].values) == stations
    assert data["observed_data"]["y"].dims == ("station",)
    assert data["constant_data"]["X"].dims == ("station", "axis")
    assert float(data["constant_data"]["X"].sel(station="s2", axis="north")) == X[2, 1]


def test_latents_under_a_plate_and_vector_outcomes_have_one_likelihood_for_each_datum():
    def model(X, Y):
        with numpyro.plate("class", C):
            f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("Y", dist.Normal(f.T, NOISE).to_event(1), obs=Y)

    data, _ = arbitrary(model, GUIDES["tied"](model, Z), X, Y.T, num_samples=20)
    f = values(data, "posterior", "f")
    assert f.shape == (20, C, N)
    expected = stats.norm.logpdf(Y.T, np.swapaxes(f, 1, 2), NOISE).sum(axis=-1)
    assert_allclose(values(data, "log_likelihood", "Y"), expected, rtol=1e-10)
    assert values(data, "posterior_predictive", "Y").shape == (20, N, C)
    assert data["observed_data"]["Y"].dims == data["posterior_predictive"]["Y"].dims[2:]


# Draws at arbitrary parameters are not a posterior: ArviZ says that the weights are uneven.
@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
@pytest.mark.thorough
def test_several_outcomes_factors_and_predictions_each_have_their_place():
    def model(X, y, counts):
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        numpyro.factor("penalty", -0.5 * jnp.sum(f**2))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
            numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)

    data, _ = arbitrary(model, GUIDES["tied"](model, Z), X, y, counts, num_samples=500)
    f = values(data, "posterior", "f")
    assert set(data["log_likelihood"].data_vars) == set(data["observed_data"].data_vars) == {"y", "counts"}
    assert list(data["constant_data"].data_vars) == ["X"]
    log_y, log_counts = stats.norm.logpdf(y, f, NOISE), stats.poisson.logpmf(counts, np.exp(f))
    assert_allclose(values(data, "log_likelihood", "counts"), log_counts, rtol=1e-9)
    lp = log_y.sum(axis=1) + log_counts.sum(axis=1) - 0.5 * np.sum(f**2, axis=1)
    assert_allclose(values(data, "sample_stats", "lp"), lp, rtol=1e-9)
    assert len(pointwise(az.loo(data, var_name="y", pointwise=True))) == N
    # An outcome that is not given is a prediction, and no part of the densities.
    only_y, _ = arbitrary(
        model,
        guide := GUIDES["tied"](model, Z),
        X,
        y,
        None,
        params=arbitrary_parameters(model, guide, X, y, counts),
        num_samples=20,
    )
    assert set(only_y["log_likelihood"].data_vars) == {"y"}
    assert set(only_y["posterior_predictive"].data_vars) == {"y", "counts"}
    assert "counts" not in only_y["posterior"].data_vars


# Masks.


def masked(X, y, observed):
    f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
    with numpyro.plate("data", X.shape[0]), handlers.mask(mask=observed):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("z", dist.Normal(f, 1.0), obs=jnp.ones(X.shape[0]))


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_masked_entries_are_absent_and_the_others_keep_their_coordinates():
    with_nan = np.where(observed, y, np.nan)
    names = {"dims": {"y": ["station"], "z": ["station"]}, "coords": {"station": 10 * np.arange(N)}}
    data, _ = arbitrary(masked, GUIDES["tied"](masked, Z), X, with_nan, observed, num_samples=300, **names)
    f = values(data, "posterior", "f")
    assert_allclose(
        values(data, "log_likelihood", "y"), stats.norm.logpdf(y[observed], f[:, observed], NOISE), rtol=1e-9
    )
    for group in ("log_likelihood", "posterior_predictive", "observed_data"):
        assert_array_equal(data[group]["y_observed"].values, 10 * np.flatnonzero(observed))
        assert data[group]["y"].dims[-1:] == ("y_observed",)
        assert data[group]["z"].dims[-1:] == ("station",)
    assert_array_equal(values(data, "observed_data", "y"), y[observed])
    loo = az.loo(data, var_name="y", pointwise=True)
    assert len(pointwise(loo)) == observed.sum()
    assert np.isfinite(elpd(loo))


@pytest.mark.thorough
def test_what_stands_at_a_masked_entry_does_not_matter_and_the_densities_are_those_without_it():
    def dropped(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        with numpyro.plate("data", int(observed.sum())):
            numpyro.sample("y", dist.Normal(f[np.flatnonzero(observed)], NOISE), obs=y)
        with numpyro.plate("all", X.shape[0]):
            numpyro.sample("z", dist.Normal(f, 1.0), obs=jnp.ones(X.shape[0]))

    guide = GUIDES["whitened"](masked, Z)
    params = arbitrary_parameters(masked, guide, X, y, observed)
    with_nan, with_number = (
        arbitrary(masked, guide, X, np.where(observed, y, filler), observed, params=params, num_samples=5)[0]
        for filler in (np.nan, 99.0)
    )
    without, _ = arbitrary(dropped, GUIDES["whitened"](dropped, Z), X, y[observed], params=params, num_samples=5)
    for data in (with_number, without):
        for group in ("log_likelihood", "sample_stats"):
            for name in with_nan[group].data_vars:
                assert_allclose(data[group][name].values, with_nan[group][name].values, rtol=1e-10)


def test_a_table_with_missing_entries_becomes_a_list_of_the_observed_ones():
    present = np.random.default_rng(8).uniform(size=(C, N)) < 0.6

    def model(X, Y):
        with numpyro.plate("class", C):
            f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        with numpyro.plate("output", C, dim=-2), numpyro.plate("data", X.shape[0]):
            numpyro.sample("Y", dist.Normal(f, NOISE).mask(jnp.asarray(present)), obs=Y)

    data, _ = arbitrary(model, GUIDES["tied"](model, Z), X, Y, num_samples=20)
    rows, columns = np.nonzero(present)
    f = values(data, "posterior", "f")
    assert_allclose(values(data, "log_likelihood", "Y"), stats.norm.logpdf(Y[present], f[:, present], NOISE), rtol=1e-9)
    assert_array_equal(data["log_likelihood"]["Y_dim_0"].values, rows)
    assert_array_equal(data["log_likelihood"]["Y_dim_1"].values, columns)


# Minibatches.


def subsampled(X, y):
    data = numpyro.plate("data", X.shape[0], subsample_size=BATCH)
    with data:
        X_batch, y_batch = numpyro.subsample(X, event_dim=1), numpyro.subsample(y, event_dim=0)
    f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X_batch, lambda x: x[:, 0]))
    numpyro.deterministic("rate", jnp.exp(f))
    with data:
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y_batch)


def check_batches(data, guide, params, model, args):
    """All rows in order; within a batch the covariance is exact, between batches it is that of u."""
    q = guide.posterior(jax.random.key(0), params, *args)["f"]
    f = values(data, "posterior", "f")
    T = np.asarray(q.moments.covariance.T)
    batch = np.arange(N) // BATCH
    # The last batch is filled up with rows of the one before, which keep the values they had.
    within = batch[:, None] == batch[None, :]
    check_moments(f, q.mean, np.where(within, q.covariance(), T.T @ T))
    assert np.max(np.abs(np.where(within, 0.0, T.T @ T))) > 0.1
    assert_allclose(values(data, "log_likelihood", "y"), stats.norm.logpdf(y, f, NOISE), rtol=1e-10)
    assert_allclose(values(data, "posterior", "rate"), np.exp(f), rtol=1e-10)
    assert_array_equal(values(data, "observed_data", "y"), y)
    check_moments(
        values(data, "posterior_predictive", "y"),
        q.mean,
        np.where(within, q.covariance(), T.T @ T) + NOISE**2 * np.eye(N),
    )
    ratio = values(data, "sample_stats", "lp") - values(data, "sample_stats", "log_q")
    bound = -LOOSE.loss(jax.random.key(0), params, gaussian, guide, X, y)
    assert abs(np.mean(ratio) - bound) < 5 * np.std(ratio) / math.sqrt(len(ratio))


@pytest.mark.parametrize("name", ["whitened", "tied"])
def test_rows_given_as_arguments_are_run_in_batches_with_one_function_for_all(name):
    assert name in MINIBATCH
    guide = GUIDES[name](gaussian, Z)
    data, params = arbitrary(gaussian, guide, X, y, num_samples=2000, batch_size=BATCH)
    check_batches(data, guide, params, gaussian, (X,))


def test_a_plate_that_subsamples_is_run_over_all_of_its_rows():
    whole = GUIDES["whitened"](gaussian, Z)
    params = arbitrary_parameters(gaussian, whole, X, y)
    data, _ = arbitrary(subsampled, GUIDES["whitened"](subsampled, Z), X, y, params=params, num_samples=2000)
    check_batches(data, whole, params, gaussian, (X,))
    assert_array_equal(values(data, "constant_data", "X"), X)


def assert_rows_are_independent(noise):
    correlations = np.corrcoef(noise, rowvar=False)
    assert np.abs(correlations - np.eye(N)).max() < 5.0 / math.sqrt(len(noise))


@pytest.mark.thorough
@pytest.mark.parametrize("own_guide", [False, True])
def test_latents_of_rows_are_drawn_anew_in_each_batch_and_others_are_not(own_guide):
    def model(X, y):
        level = numpyro.sample("level", dist.Normal())
        data = numpyro.plate("data", N, subsample_size=BATCH)
        with data:
            X_batch, y_batch = numpyro.subsample(X, event_dim=1), numpyro.subsample(y, event_dim=0)
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X_batch))
        with data:
            offset = numpyro.sample("offset", dist.Normal())
            numpyro.sample("y", dist.Normal(f + level + offset, NOISE), obs=y_batch)

    def base(X, y):
        numpyro.sample("level", dist.Normal(0.3, 0.2))
        with numpyro.plate("data", N, subsample_size=BATCH):
            numpyro.sample("offset", dist.Normal(-0.5, 0.4))

    guide = sgp.AutoSVGP(model, Z, base=base if own_guide else AutoNormal)
    data, _ = arbitrary(model, guide, jnp.asarray(X), jnp.asarray(y), num_samples=2000)
    assert values(data, "posterior", "level").shape == (2000,)
    offset = values(data, "posterior", "offset")
    assert_rows_are_independent(offset)
    if own_guide:
        assert_allclose(offset.mean(0), -0.5, atol=0.05)
        assert_allclose(offset.std(0), 0.4, atol=0.05)


def test_outcomes_to_be_predicted_are_drawn_anew_in_each_batch():
    def model(X, y, again=None, num_data=None):
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)
            numpyro.sample("again", dist.Normal(f, NOISE), obs=again)

    guide = GUIDES["whitened"](model, Z)
    params = arbitrary_parameters(model, guide, X, y, y)
    data, _ = arbitrary(model, guide, X, y, params=params, num_samples=2000, batch_size=BATCH)
    for outcome in ("y", "again"):
        assert_rows_are_independent(values(data, "posterior_predictive", outcome) - values(data, "posterior", "f"))


@pytest.mark.thorough
def test_hyperparameters_are_the_same_in_all_batches_and_the_same_as_without():
    guide = GUIDES["tied"](hierarchical, Z)
    params = arbitrary_parameters(hierarchical, guide, X, y)
    whole, batches = (
        arbitrary(hierarchical, guide, X, y, params=params, num_samples=50, batch_size=B)[0] for B in (None, 4)
    )
    for site in ("noise", "lengthscale"):
        assert values(batches, "posterior", site).shape == (50,)
        assert_allclose(values(batches, "posterior", site), values(whole, "posterior", site), rtol=1e-12)
    expected = stats.norm.logpdf(y, values(batches, "posterior", "f"), values(batches, "posterior", "noise")[:, None])
    assert_allclose(values(batches, "log_likelihood", "y"), expected, rtol=1e-9)
    assert_allclose(values(batches, "sample_stats", "log_q"), values(whole, "sample_stats", "log_q"), rtol=1e-8)


def test_the_number_of_all_rows_reaches_a_model_that_takes_it_and_masks_are_cut_too():
    seen = []

    def model(X, y, observed, num_data=None):
        seen.append((num_data, X.shape[0]))
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]), handlers.mask(mask=observed):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = GUIDES["tied"](model, Z)
    params = arbitrary_parameters(model, guide, X, y, observed)
    seen.clear()
    data, _ = arbitrary(model, guide, X, y, observed, params=params, num_samples=3, batch_size=BATCH)
    assert {rows for _, rows in seen} == {BATCH, BATCH + 1, N}  # N to look for plates that subsample
    assert {num_data for num_data, rows in seen if rows <= BATCH} == {N}
    assert_array_equal(data["observed_data"]["y_observed"].values, np.flatnonzero(observed))
    f = values(data, "posterior", "f")[:, observed]
    assert_allclose(values(data, "log_likelihood", "y"), stats.norm.logpdf(y[observed], f, NOISE), rtol=1e-9)


@pytest.mark.thorough
def test_the_number_of_all_rows_reaches_a_model_of_all_keywords_as_in_fit():
    seen = []

    def model(X, y, **options):
        seen.append(options.get("num_data"))
        gaussian(X, y, **options)

    guide = GUIDES["tied"](model, Z)
    params = arbitrary_parameters(model, guide, X, y)
    seen.clear()
    arbitrary(model, guide, X, y, params=params, num_samples=3, batch_size=BATCH)
    assert set(seen[1:]) == {N}  # the first run looks for plates that subsample


@pytest.mark.thorough
def test_a_site_at_all_inputs_whose_likelihood_is_subsampled_keeps_one_value_for_all_batches():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X, lambda x: x[:, 0]))
        with numpyro.plate("data", X.shape[0], subsample_size=BATCH):
            f_batch, y_batch = numpyro.subsample(f, event_dim=0), numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(f_batch, NOISE), obs=y_batch)

    guide = GUIDES["per_datum"](model, Z)
    data, params = arbitrary(model, guide, jnp.asarray(X), jnp.asarray(y), num_samples=2000)
    f, q = values(data, "posterior", "f"), guide.posterior(jax.random.key(0), params, X, y)["f"]
    check_moments(f, q.mean, q.covariance())
    assert_allclose(values(data, "log_likelihood", "y"), stats.norm.logpdf(y, f, NOISE), rtol=1e-10)


@pytest.mark.exhaustive
def test_a_function_of_a_whole_batch_is_left_out_with_a_warning():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        numpyro.deterministic("largest", jnp.max(f))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    guide = GUIDES["tied"](model, Z)
    whole, params = arbitrary(model, guide, X, y, num_samples=3)
    assert_array_equal(values(whole, "posterior", "largest"), values(whole, "posterior", "f").max(axis=1))
    with pytest.warns(UserWarning, match="'largest'.*function of a batch"):
        batches, _ = arbitrary(model, guide, X, y, params=params, num_samples=3, batch_size=BATCH)
    assert set(batches["posterior"].data_vars) == {"f"}


# Other models.


@pytest.mark.thorough
def test_a_gp_on_a_gp_is_drawn_from_the_inner_draw():
    def deep(X, y):
        inner = numpyro.sample("inner", sgp.GaussianProcess(SquaredExponential(1.0), X))
        outer = numpyro.sample("outer", sgp.GaussianProcess(SquaredExponential(1.0), inner[:, None]))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(outer, NOISE), obs=y)

    guide = GUIDES["whitened"](deep, {"inner": Z, "outer": Z[:, :1]})
    data, params = arbitrary(deep, guide, X, y, num_samples=300)
    inner, outer = values(data, "posterior", "inner"), values(data, "posterior", "outer")
    alone = GUIDES["whitened"](lambda x: numpyro.sample("outer", sgp.GaussianProcess(SquaredExponential(1.0), x)), Z)
    params = {**params, "auto_latents": params["auto_latents"]}

    def standardised(x, f):
        q = alone.posterior(jax.random.key(0), params, x[:, None])["outer"]
        return jnp.linalg.solve(jnp.linalg.cholesky(q.covariance() + 1e-6 * jnp.eye(N)), f - q.mean)

    check_moments(np.asarray(jax.vmap(standardised)(inner, outer)), np.zeros(N), np.eye(N))


@pytest.mark.exhaustive
def test_mutable_state_of_the_fit_is_used():
    def model(X, y):
        state = mutable("state", {"shift": jnp.zeros(())})
        state["shift"] = state["shift"] + 1.0
        shift = numpyro.deterministic("shift", state["shift"])
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + shift, NOISE), obs=y)

    svi = SVI(model, GUIDES["tied"](model, Z), optimizer("tied"), sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), 3, X, y, progress_bar=False)
    last = float(result.state.mutable_state["state"]["shift"])
    assert last >= 3.0
    data = to_arviz(jax.random.key(1), svi, result, X, y, num_samples=2)
    assert_array_equal(values(data, "posterior", "shift"), last + 1.0)


def test_a_model_may_look_at_its_data():
    def model(X, y):
        with_data = ~np.isnan(y)  # needs numbers, not tracers, as `SVI.run` gives them
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        with numpyro.plate("data", N), handlers.mask(mask=with_data):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    data, _ = arbitrary(model, GUIDES["tied"](model, Z), X, np.where(observed, y, np.nan), num_samples=2)
    assert_array_equal(data["observed_data"]["y_observed"].values, np.flatnonzero(observed))


@pytest.mark.exhaustive
def test_float32_stays_and_is_finite():
    with jax.enable_x64(False):
        X32, y32 = X.astype(np.float32), y.astype(np.float32)
        data, _ = arbitrary(gaussian, GUIDES["tied"](gaussian, X32), X32, y32, num_samples=50)
    for group in ("posterior", "log_likelihood", "sample_stats", "posterior_predictive"):
        for name, variable in data[group].data_vars.items():
            assert variable.dtype == np.float32, name
            assert np.all(np.isfinite(variable.values)), name


# ArviZ's own functions.


# Third-party plotting code warns of its own affairs.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["plot_forest", "plot_dist", "plot_posterior", "plot_ppc", "plot_ppc_dist", "plot_khat"]
)
@pytest.mark.thorough
def test_arviz_draws_its_figures(fitted, name):
    fitted, _ = fitted
    from matplotlib import pyplot as plt

    if not hasattr(az, name):
        pytest.skip(f"no {name} in ArviZ {az.__version__}")
    if name == "plot_khat":
        az.plot_khat(az.loo(fitted, pointwise=True))
    elif name == "plot_dist" and OLD:
        az.plot_dist(fitted["posterior"]["noise"])
    elif "ppc" in name:
        getattr(az, name)(fitted)
    else:
        getattr(az, name)(fitted, var_names=["noise", "lengthscale"])
    assert plt.get_fignums()
    plt.close("all")


@pytest.mark.filterwarnings("ignore")
def test_summary_and_loo_pit_are_those_of_the_draws(fitted):
    fitted, _ = fitted
    table = az.summary(fitted, kind="stats", round_to="none")
    assert set(table.index) == {"noise", "lengthscale", *(f"f[{n}]" for n in range(N_LOO))}
    assert_allclose(float(table.loc["noise", "mean"]), values(fitted, "posterior", "noise").mean(), rtol=1e-10)
    assert np.all(np.isfinite(az.ess(fitted)["f"].values))
    pit = az.loo_pit(fitted, y="y") if OLD else az.loo_pit(fitted)["y"].values
    assert np.shape(pit) == (N_LOO,)
    # Draws of the predictive distribution, weighted: the rank of y among them.
    weighted = np.mean(values(fitted, "posterior_predictive", "y") <= y_loo, axis=0)
    assert np.all(np.abs(pit - weighted) < 0.4)


@pytest.mark.filterwarnings("ignore")
def test_what_is_saved_is_what_is_loaded(fitted, tmp_path):
    fitted, _ = fitted
    if not any(importlib.util.find_spec(name) for name in ("h5netcdf", "netCDF4")):
        pytest.skip("neither h5netcdf nor netCDF4 is installed")
    path = str(tmp_path / "fit.nc")
    fitted.to_netcdf(path)
    loaded = az.from_netcdf(path)
    assert groups_of(loaded) == groups_of(fitted)
    for group in groups_of(fitted):
        for name in fitted[group].data_vars:
            assert_array_equal(loaded[group][name].values, fitted[group][name].values)
    assert elpd(az.loo(loaded)) == elpd(az.loo(fitted))


# Mistakes.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "`num_samples` must be a positive integer, got 0"),
        ({"batch_size": 0}, "`batch_size` must be a positive integer, got 0"),
    ],
)
def test_wrong_options_raise_and_say_what_to_do(options, message):
    guide = GUIDES["whitened"](gaussian, Z)
    params = arbitrary_parameters(gaussian, guide, X, y)
    with pytest.raises(ValueError, match=message):
        to_arviz(jax.random.key(0), svi_of(gaussian, guide), params, X, y, **{"num_samples": 2, **options})


def test_missing_outcomes_unequal_rows_and_wrong_results_raise_and_say_what_to_do():
    guide = GUIDES["whitened"](gaussian, Z)
    params = arbitrary_parameters(gaussian, guide, X, y)
    svi, key = svi_of(gaussian, guide), jax.random.key(0)
    with pytest.raises(ValueError, match=r"No site of the model is observed.*Pass the outcomes"):
        to_arviz(key, svi, params, X, num_samples=2)
    with pytest.raises(ValueError, match=r"same number of rows; got shapes .*Pass the data by position"):
        to_arviz(key, svi, params, X, y[:-1], num_samples=2, batch_size=3)
    with pytest.raises(TypeError, match="or a dict of parameters, got list"):
        to_arviz(key, svi, [params], X, y, num_samples=2)
    with pytest.raises(ValueError, match="'f_auto_m' has no value to predict with"):
        to_arviz(key, svi, {k: v for k, v in params.items() if k != "f_auto_m"}, X, y, num_samples=2)


def test_two_plates_that_subsample_are_refused():
    def model(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(Matern52(1.1, 0.8), X))
        with numpyro.plate("data", N, subsample_size=3):
            numpyro.sample("y", dist.Normal(numpyro.subsample(f, event_dim=0), NOISE), obs=y[:3])
        with numpyro.plate("more", N, subsample_size=4):
            numpyro.sample("z", dist.Normal(numpyro.subsample(f, event_dim=0), NOISE), obs=y[:4])

    guide = GUIDES["whitened"](model, Z)
    params = arbitrary_parameters(model, guide, X, y)
    with pytest.raises(ValueError, match="plates \\['data', 'more'\\] all subsample"):
        to_arviz(jax.random.key(0), svi_of(model, guide), params, X, y, num_samples=2)


def test_without_arviz_the_error_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "arviz":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError) as caught:
        to_arviz(jax.random.key(0), svi_of(gaussian, None), {}, X, y)
    assert "pip install 'numpyro-sgp[arviz]'" in str(caught.value)


@pytest.mark.parametrize("form", ["chevron", "inducing"])
@pytest.mark.exhaustive
def test_draws_of_sampled_basis_functions_have_the_covariance_of_the_posterior(form):
    kernel = features.RandomFourier(SquaredExponential(0.7), 20, jax.random.key(5))

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    own = {"inducing": Z} if form == "inducing" else {"covariance": "chevron", "dense_columns": 20}
    guide = sgp.AutoQSGP(model, basis_batch=20, **own)
    svi = SVI(model, guide, sgp.RowSparse(0.3, optax.adam(3e-2)), sgp.QuadratureELBO(num_nodes=3))
    result = svi.run(jax.random.key(0), 100, X, y, progress_bar=False)
    q = guide.posterior(jax.random.key(0), result.params, X)["f"]
    assert (q.variance < 0.7).any()  # the prior's is 1
    data = to_arviz(jax.random.key(1), svi, result, X, y, num_samples=2000)
    assert_allclose(values(data, "posterior", "f").var(0), q.variance, rtol=0.2)
