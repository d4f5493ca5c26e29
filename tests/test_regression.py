"""`SparseGPRegression`: the collapsed bounds against dense formulas, the optimal q(u), guides started there, MCMC."""

from guides import GUIDES, NATURAL, optimizer
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, SVI, Predictive, init_to_value
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.util import log_density
from numpyro.optim import Minimize
import optax
import oracles
import problems
from problems import JITTER, LENGTHSCALE, MEAN, NOISE, VARIANCE, X_NEW, D, M, Model, N, X, Z, blocks, converged
import pytest
from scipy.optimize import minimize

import numpyro_sgp as sgp

Y = Model().y
ONE_FOR_EACH_ROW = np.linspace(0.3, 0.9, N)
EVIDENCE = {
    "tight": oracles.tight_bound,
    "titsias": oracles.titsias_bound,
    "dtc": oracles.dtc_evidence,
    "fitc": oracles.fitc_evidence,
}


def kernel(lengthscale=LENGTHSCALE, variance=VARIANCE):
    return sgp.kernels.SquaredExponential(lengthscale, variance)


def site(noise_scale=NOISE, bound="tight", mean=MEAN, inducing=Z, **options):
    return sgp.SparseGPRegression(kernel(), X, inducing, noise_scale, mean, bound=bound, jitter=JITTER, **options)


def linear_mean(X):
    return 0.5 * X[..., 0] - 0.2


# The bounds.


@pytest.mark.parametrize("noise_scale", [NOISE, ONE_FOR_EACH_ROW], ids=["one", "one_a_row"])
@pytest.mark.parametrize("mean", [MEAN, linear_mean], ids=["constant", "function"])
@pytest.mark.parametrize("bound", EVIDENCE)
@pytest.mark.usefixtures("x64")
def test_the_log_density_is_the_dense_bound(bound, mean, noise_scale):
    prior = blocks("tied")
    residual = Y - (mean(X) if callable(mean) else mean)
    expected = EVIDENCE[bound](prior.Kuu, prior.Kuf, prior.kff, residual, noise_scale)
    assert_allclose(site(noise_scale, bound, mean).log_prob(Y), expected, rtol=1e-12)


def inside_a_plate_of_the_rows(y):
    with numpyro.plate("data", N):
        numpyro.sample("y", site(), obs=y)


def inside_a_subsampled_plate(y):
    with numpyro.plate("data", 10 * N, subsample_size=N):
        numpyro.sample("y", site(), obs=y)


def under_a_mask_of_rows(y):
    with handlers.mask(mask=np.arange(N) > 2):
        numpyro.sample("y", site(), obs=y)


def masked_inside_a_plate(y):
    with numpyro.plate("data", N), handlers.mask(mask=np.arange(N) > 2):
        numpyro.sample("y", site(), obs=y)


@pytest.mark.parametrize(
    "model", [inside_a_plate_of_the_rows, inside_a_subsampled_plate, under_a_mask_of_rows, masked_inside_a_plate]
)
def test_a_density_that_would_count_all_rows_once_for_each_of_them_raises(model):
    with pytest.raises(ValueError, match=r"size 7 around .* 7 times\. .* outside the plate .* drop rows"):
        log_density(handlers.seed(model, 0), (Y,), {}, {})


@pytest.mark.usefixtures("x64")
def test_tasks_in_a_plate_with_a_mask_have_the_sum_of_their_densities():
    tasks = 2
    outcomes, keep = np.outer(np.linspace(0.5, 1.5, tasks), Y), np.arange(tasks) > 0

    def model(outcomes):
        with numpyro.plate("task", tasks), handlers.mask(mask=keep):
            numpyro.sample("y", site(), obs=outcomes)

    expected = sum(site().log_prob(y) for y in outcomes[keep])
    assert_allclose(log_density(model, (outcomes,), {}, {})[0], expected, rtol=1e-10)


@pytest.mark.usefixtures("x64")
def test_with_inducing_inputs_at_the_data_every_bound_is_the_evidence():
    K = oracles.se(X, X, LENGTHSCALE, VARIANCE)
    evidence = oracles.gp_regression(K, K, K, Y - MEAN, NOISE)[2]
    for bound in EVIDENCE:
        exact = sgp.SparseGPRegression(kernel(), X, X, NOISE, MEAN, bound=bound, jitter=1e-13)
        assert_allclose(exact.log_prob(Y), evidence, rtol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("noise_scale", [0.05, NOISE, 3.0, ONE_FOR_EACH_ROW], ids=["low", "some", "high", "one_a_row"])
def test_bounds_are_below_the_evidence_and_each_above_the_looser_one(noise_scale):
    K = oracles.se(X, X, LENGTHSCALE, VARIANCE)
    rng = np.random.default_rng(0)
    for outcomes in [Y, *rng.normal(size=(50, N))]:
        evidence = oracles.gaussian_log_density(outcomes - MEAN, 0.0, K + np.diag(np.broadcast_to(noise_scale**2, N)))
        titsias, tight = (site(noise_scale, bound).log_prob(outcomes) for bound in ("titsias", "tight"))
        assert titsias < tight < evidence
    # The default is the best of them, and approximations of the model are no bounds.
    assert sgp.SparseGPRegression(kernel(), X, Z, NOISE).bound == "tight"
    assert tight < site(noise_scale, "dtc").log_prob(outcomes)


@pytest.mark.parametrize("bound", EVIDENCE)
@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_the_dense_bound(bound):
    rng = np.random.default_rng(3)
    start = {"lengthscale": LENGTHSCALE, "variance": VARIANCE, "noise": ONE_FOR_EACH_ROW, "Z": Z, "mean": MEAN}
    direction = jax.tree.map(lambda x: 0.05 * rng.normal(size=np.shape(x)), start)

    def value(p):
        k = sgp.kernels.SquaredExponential(p["lengthscale"], p["variance"])
        return sgp.SparseGPRegression(k, X, p["Z"], p["noise"], p["mean"], bound=bound, jitter=JITTER).log_prob(Y)

    def dense(t):
        p = {name: start[name] + t * direction[name] for name in start}
        at = blocks("tied", Z=p["Z"], lengthscale=p["lengthscale"], variance=p["variance"])
        return EVIDENCE[bound](at.Kuu, at.Kuf, at.kff, Y - p["mean"], p["noise"])

    got = jax.jvp(value, (start,), (jax.tree.map(jnp.asarray, direction),))[1]
    assert_allclose(got, oracles.derivative(dense, step=0.1), rtol=1e-7)
    gradient = jax.grad(value)(start)
    along = sum(np.sum(gradient[name] * direction[name]) for name in start)
    assert_allclose(along, got, rtol=1e-10)


def test_float32_keeps_its_digits_where_the_noise_is_small():
    # w y² − |c|² would lose log10(1e4 · 60) ≈ 6 of the 7 digits here.
    rng = np.random.default_rng(0)
    inputs = np.sort(rng.uniform(0.0, 10.0, size=(60, 1)), axis=0).astype(np.float32)
    y = np.sin(inputs[:, 0]) + 1e-2 * rng.normal(size=60).astype(np.float32)
    at, jitter = inputs[::3], 1e-4
    got = sgp.SparseGPRegression(sgp.kernels.SquaredExponential(1.5), inputs, at, 1e-2, jitter=jitter).log_prob(y)
    assert got.dtype == np.float32
    wide, wide_at = inputs.astype(float), at.astype(float)
    Kuu = oracles.with_jitter(oracles.se(wide_at, wide_at, 1.5), jitter)
    expected = oracles.tight_bound(Kuu, oracles.se(wide_at, wide, 1.5), np.ones(60), y.astype(float), 1e-2)
    # A residual of 1e-2 known to 1e-7 · 1e1 (rounding of A in 20 sums), squared, over σ²: 1e-3 of each of 60 terms.
    assert_allclose(got, expected, atol=0.1)


@pytest.mark.usefixtures("x64")
def test_a_batch_of_latents_is_each_of_them():
    variances, noises = np.array([[0.7], [1.3], [2.0]]), np.array([[0.5], [0.4], [0.3]])
    batch = sgp.SparseGPRegression(
        sgp.kernels.SquaredExponential(LENGTHSCALE, variances[:, 0]), X, Z, noises, jitter=JITTER
    )
    assert batch.batch_shape == (3,)
    y = np.random.default_rng(0).normal(size=(3, N))
    q = batch.condition(y).marginals(X_NEW)
    draws = batch.sample(jax.random.key(0), (2,))
    assert draws.shape == (2, 3, N)
    for index in range(3):
        one = sgp.SparseGPRegression(kernel(variance=variances[index, 0]), X, Z, noises[index, 0], jitter=JITTER)
        assert_allclose(batch.log_prob(y)[index], one.log_prob(y[index]), rtol=1e-12)
        expected = one.condition(y[index]).marginals(X_NEW)
        assert_allclose(q.mean[index], expected.mean, rtol=1e-10)
        assert_allclose(q.variance[index], expected.variance, rtol=1e-10)


@pytest.mark.parametrize("bound", EVIDENCE)
@pytest.mark.usefixtures("x64")
def test_draws_have_the_mean_and_covariance_of_the_model_behind_the_bound(bound):
    prior = blocks("tied")
    Q = prior.Kuf.T @ np.linalg.solve(prior.Kuu, prior.Kuf)
    K = {"tight": prior.Kff, "titsias": prior.Kff, "dtc": Q, "fitc": Q + np.diag(prior.kff - np.diag(Q))}[bound]
    covariance = K + np.diag(ONE_FOR_EACH_ROW**2)
    distribution = site(ONE_FOR_EACH_ROW, bound)
    n = 20_000
    draws = np.asarray(distribution.sample(jax.random.key(0), (n,)))
    centred = draws - MEAN
    products = centred[:, :, None] * centred[:, None, :]
    assert np.all(abs(centred.mean(0)) < 5.0 * np.sqrt(np.diag(covariance) / n))
    assert np.all(abs(products.mean(0) - covariance) < 5.0 * products.std(0) / np.sqrt(n))
    assert_allclose(distribution.variance, np.diag(covariance), rtol=1e-10)
    assert_allclose(distribution.mean, np.full(N, MEAN))


# The optimal posterior.


@pytest.mark.parametrize("bound", ["tight", "fitc"])
@pytest.mark.usefixtures("x64")
def test_the_optimal_posterior_is_the_dense_one(bound):
    prior, new = blocks("tied"), blocks("tied", X_NEW)
    noise = ONE_FOR_EACH_ROW
    if bound == "fitc":
        noise = np.sqrt(noise**2 + prior.kff - np.sum(prior.Kuf * np.linalg.solve(prior.Kuu, prior.Kuf), axis=0))
    m, S = oracles.regression_posterior(prior.Kuu, prior.Kuf, Y - linear_mean(X), noise)
    mean, covariance = oracles.conditional(m, S, new.Kuu, new.Kuf, new.Kff)
    # Through `jit`: the posterior is a pytree.
    q = jax.jit(lambda y: site(ONE_FOR_EACH_ROW, bound, linear_mean).condition(y))(Y)
    assert_allclose(q.L @ q.m, m, rtol=1e-8)
    marginals = q.marginals(X_NEW)
    assert_allclose(marginals.mean, mean + linear_mean(X_NEW), rtol=1e-9)
    assert_allclose(marginals.variance, np.diag(covariance), rtol=1e-9)
    assert_allclose(q.covariance(X_NEW), covariance, rtol=1e-9, atol=1e-12)
    assert_allclose(q.posterior(X_NEW).kl, oracles.gaussian_kl(m, S, prior.Kuu), rtol=1e-8)
    n = 20_000
    draws = np.asarray(q.sample(jax.random.key(0), X_NEW, (n,))) - mean - linear_mean(X_NEW)
    products = draws[:, :, None] * draws[:, None, :]
    assert np.all(abs(draws.mean(0)) < 5.0 * np.sqrt(np.diag(covariance) / n))
    # The jitter of the draws, 1e-6 of the prior's variance, is far below the standard error.
    assert np.all(abs(products.mean(0) - covariance) < 5.0 * products.std(0) / np.sqrt(n))


@pytest.mark.parametrize("name", NATURAL)
@pytest.mark.usefixtures("x64")
def test_the_optimal_posterior_is_one_natural_step_of_every_guide(name):
    model = Model()
    guide = GUIDES[name](model, Z)
    svi = SVI(model, guide, sgp.NaturalGradient(1.0, optax.set_to_zero(), m_steps=0), sgp.QuadratureELBO())
    state = converged(svi, svi.init(jax.random.key(0), X, Y), 1, X, Y)
    step = guide.posterior(jax.random.key(0), svi.get_params(state), X_NEW)["f"]
    if name == "dense":
        optimum = sgp.SparseGPRegression(kernel(), X, X, NOISE, MEAN, jitter=1e-13).condition(Y)
    else:
        optimum = site().condition(Y)
    assert_allclose(step.mean, optimum.marginals(X_NEW).mean, rtol=1e-8)
    assert_allclose(step.variance, optimum.marginals(X_NEW).variance, rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "learn_inducing"),
    [*((name, False) for name in GUIDES), *((name, True) for name in GUIDES if name != "dense")],
)
@pytest.mark.usefixtures("x64")
def test_every_guide_started_from_the_optimum_has_the_bound_at_once(name, learn_inducing):
    regression = sgp.SparseGPRegression(kernel(), X, X, NOISE, MEAN, jitter=1e-13) if name == "dense" else site()
    model = Model()
    options = {} if name == "dense" else {"learn_inducing": learn_inducing}
    guide = GUIDES[name](model, Z, init_from=regression.condition(Y), **options)
    svi = SVI(model, guide, optimizer(name), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, Y)
    assert_allclose(-svi.evaluate(state, X, Y), regression.log_prob(Y), rtol=1e-9)


@pytest.mark.usefixtures("x64")
def test_a_dict_starts_the_sites_it_names_and_leaves_the_others_at_the_prior():
    def two(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel(), X, MEAN, jitter=JITTER))
        g = numpyro.sample("g", sgp.GaussianProcess(kernel(), X, jitter=JITTER))
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)).to_event(1), obs=y)

    guide = sgp.AutoSVGP(two, Z, init_from={"f": site().condition(Y)})
    svi = SVI(two, guide, optax.sgd(0.1), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    q = guide.posterior(jax.random.key(0), params, X_NEW)
    assert_allclose(q["f"].mean, site().condition(Y).marginals(X_NEW).mean, rtol=1e-9)
    assert_allclose(q["g"].mean, np.zeros(len(X_NEW)))
    wrong = SVI(two, sgp.AutoSVGP(two, Z, init_from={"h": site().condition(Y)}), optax.sgd(0.1), sgp.QuadratureELBO())
    with pytest.raises(ValueError, match=r"`init_from` names \['h'\]"):
        wrong.init(jax.random.key(0), X, Y)


@pytest.mark.usefixtures("x64")
def test_a_model_can_predict_from_its_own_regression():
    def model(X, y, X_new=None):
        regression = site()
        numpyro.sample("y", regression, obs=y)
        if X_new is not None:
            numpyro.sample("f_new", regression.condition(y).posterior(X_new))

    draws = Predictive(model, num_samples=4000)(jax.random.key(0), X, Y, X_NEW)["f_new"]
    mean, variance = site().condition(Y).marginals(X_NEW)
    assert np.all(abs(np.mean(draws, axis=0) - mean) < 5.0 * np.sqrt(variance / 4000))


# Inference over hyperparameters.


@pytest.mark.exhaustive
@pytest.mark.usefixtures("x64")
def test_type_ii_maximum_likelihood_with_auto_delta_is_the_optimum_of_the_dense_bound():
    inputs, at = problems.inputs(40, 5), problems.inputs(8, 6)
    y = np.sin(2.0 * inputs[:, 0]) + inputs[:, 1] + 0.3 * np.random.default_rng(7).normal(size=40)

    def model(X, y):
        # Flat priors of the logarithms: what AutoDelta maximises is the bound itself.
        prior = dist.ImproperUniform(constraints.real, (), ())
        lengthscale, variance, noise = (
            jnp.exp(numpyro.sample(f"log_{name}", prior)) for name in ("lengthscale", "variance", "noise")
        )
        k = sgp.kernels.SquaredExponential(lengthscale, variance)
        numpyro.sample("y", sgp.SparseGPRegression(k, X, at, noise, jitter=JITTER), obs=y)

    def negative_dense_bound(log_parameters):
        lengthscale, variance, noise = np.exp(log_parameters)
        prior = blocks("tied", inputs, at, lengthscale=np.full(D, lengthscale), variance=variance)
        return -oracles.tight_bound(prior.Kuu, prior.Kuf, prior.kff, y, noise)

    start = init_to_value(values=dict.fromkeys(("log_lengthscale", "log_variance", "log_noise"), jnp.asarray(0.0)))
    guide = AutoDelta(model, init_loc_fn=start)
    svi = SVI(model, guide, Minimize(), numpyro.infer.Trace_ELBO())
    state = svi.init(jax.random.key(0), inputs, y)
    update = jax.jit(svi.update)
    for _ in range(2):  # a restart of BFGS clears what its line search left
        state, _ = update(state, inputs, y)
    found = guide.median(svi.get_params(state))
    got = [found[f"log_{name}"] for name in ("lengthscale", "variance", "noise")]
    options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 2000}
    oracle = minimize(negative_dense_bound, np.array(got) + 0.1, method="Nelder-Mead", options=options)
    assert_allclose(-svi.evaluate(state, inputs, y), -oracle.fun, rtol=1e-10)
    assert_allclose(got, oracle.x, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("x64")
def test_nuts_with_inducing_inputs_at_the_data_is_nuts_on_the_exact_marginal_likelihood():
    rng = np.random.default_rng(0)
    inputs = np.sort(rng.uniform(-2.0, 2.0, size=(15, 1)), axis=0)
    y = np.sin(2.0 * inputs[:, 0]) + 0.3 * rng.normal(size=15)

    def hyperparameters():
        names = ("lengthscale", "variance", "noise")
        return [numpyro.sample(name, dist.LogNormal(0.0, 0.5)) for name in names]

    def sparse(X, y):
        lengthscale, variance, noise = hyperparameters()
        k = sgp.kernels.SquaredExponential(lengthscale, variance)
        numpyro.sample("y", sgp.SparseGPRegression(k, X, inputs, noise, jitter=1e-9), obs=y)

    def exact(X, y):
        lengthscale, variance, noise = hyperparameters()
        K = variance * jnp.exp(-0.5 * ((X - X.T) / lengthscale) ** 2)
        numpyro.sample("y", dist.MultivariateNormal(0.0, K + noise**2 * jnp.eye(len(X))), obs=y)

    summaries = []
    for model, seed in ((sparse, 0), (exact, 1)):
        # Posteriors of scales are skewed: standard deviations of 3000 draws are still a fifth apart.
        mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=20_000, progress_bar=False)
        mcmc.run(jax.random.key(seed), inputs, y)
        summaries.append(numpyro.diagnostics.summary(mcmc.get_samples(), group_by_chain=False))
    for name, exact_summary in summaries[1].items():
        sparse_summary = summaries[0][name]
        assert sparse_summary["r_hat"] < 1.01
        error = np.hypot(*(s[name]["std"] / np.sqrt(s[name]["n_eff"]) for s in summaries))
        assert abs(sparse_summary["mean"] - exact_summary["mean"]) < 4.0 * error
        assert_allclose(sparse_summary["std"], exact_summary["std"], rtol=0.15)


# Mistakes.


@pytest.mark.usefixtures("x64")
def test_mistakes_say_what_came_and_what_is_needed():
    with pytest.raises(ValueError, match=r"`bound` must be one of .*'vfe'"):
        site(bound="vfe")
    with pytest.raises(ValueError, match=r"`inducing` has 1 columns, but this site's `X` has shape \(7, 2\)"):
        site(inducing=Z[:, :1])
    with pytest.raises(ValueError, match=r"`noise_scale` must be a scalar.*got shape \(3,\)"):
        site(noise_scale=np.ones(3))
    with pytest.raises(ValueError, match=r"\(..., 7\), a number for each row of `X`.*got\s+\(4,\)"):
        site().condition(np.ones(4))
    with pytest.raises(ValueError, match="noise_scale"):
        site(noise_scale=-1.0, validate_args=True)
    with pytest.raises(ValueError, match=r"prior mean was given as values of shape \(7,\)"):
        site(mean=np.zeros(N)).condition(Y).marginals(X_NEW)
    with pytest.raises(ValueError, match=r"`X_new` has shape \(.*, 1\), but this GP has inputs of 2 columns"):
        site().condition(Y).posterior(X_NEW[:, :1])


@pytest.mark.parametrize("inducing", [Z + 0.1, Z[:-1]], ids=["values", "shape"])
@pytest.mark.usefixtures("x64")
def test_a_start_at_other_inducing_inputs_is_refused(inducing):
    model = Model()
    guide = sgp.AutoSVGP(model, inducing, init_from=site().condition(Y))
    with pytest.raises(ValueError, match="`init_from` was conditioned at other inducing variables"):
        SVI(model, guide, optax.sgd(0.1), sgp.QuadratureELBO()).init(jax.random.key(0), X, Y)


@pytest.mark.parametrize(("name", "inducing"), [("dense", None), ("per_datum", Z)])
@pytest.mark.usefixtures("x64")
def test_a_start_at_other_rows_is_refused_or_not_a_number_under_jit(name, inducing):
    model = Model()
    guide = sgp.AutoTSVGP(model, inducing, sites="per_datum", init_from=site().condition(Y))
    svi = SVI(model, guide, optimizer(name), sgp.QuadratureELBO())
    with pytest.raises(ValueError, match="`init_from` was conditioned at other rows of X"):
        svi.init(jax.random.key(0), X + 0.1, Y)
    state = jax.jit(svi.init)(jax.random.key(0), jnp.asarray(X + 0.1), Y)
    assert np.all(np.isnan(svi.get_params(state)["f_auto_sites"].lambda1))
    state = jax.jit(svi.init)(jax.random.key(0), jnp.asarray(X), Y)
    assert np.all(np.isfinite(svi.get_params(state)["f_auto_sites"].lambda1))
    assert M < N
