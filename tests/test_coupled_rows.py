"""Terms that depend on several rows of a GP site: averages, preferences, correlated noise, softmax, recursions."""

from grids import representative
from guides import LOOSE
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
from numpyro import distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO
import optax
import oracles
import pytest
import scipy.stats

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics.importance import log_importance_ratios
from numpyro_sgp.posteriors.joint import predictors

pytestmark = pytest.mark.usefixtures("x64")

N, LENGTHSCALE, NOISE = 9, 0.6, 0.3
rng = np.random.default_rng(0)
X = np.linspace(0.0, 2.0, N)[:, None]
K = oracles.se(X, X, LENGTHSCALE, 1.0)
AVERAGES = rng.uniform(size=(5, N)) / N
HOME, AWAY = rng.integers(0, N, size=(2, 20))
WON = rng.uniform(size=20) < 0.5
NEIGHBOURS = NOISE**2 * 0.6 ** np.abs(np.subtract.outer(np.arange(N), np.arange(N)))
Y, COUNTS = rng.normal(size=N), rng.integers(0, 5, size=N)


def gp(X, scale=1.0):
    return sgp.GaussianProcess(sgp.kernels.SquaredExponential(LENGTHSCALE, scale), X, jitter=1e-10)


def averages(f):
    numpyro.sample("y", dist.Normal(AVERAGES @ f, NOISE), obs=Y[:5])


def differences(f):
    numpyro.sample("y", dist.Normal(f[HOME] - f[AWAY], NOISE), obs=np.resize(Y, 20))


def cumulative(f):
    numpyro.sample("y", dist.Normal(jnp.cumsum(f), NOISE), obs=Y)


def correlated(f):
    numpyro.sample("y", dist.MultivariateNormal(f, NEIGHBOURS), obs=Y)


def quadratic(f):
    # Written so that its program shows no linear predictor.
    root = jnp.linalg.inv(jnp.linalg.cholesky(NEIGHBOURS))
    numpyro.factor("y", -0.5 * jnp.sum(jax.lax.map(lambda row: (row @ (f - Y)) ** 2, root)))


DIFFERENCES = np.zeros((20, N))
np.add.at(DIFFERENCES, (np.arange(20), HOME), 1.0)
np.add.at(DIFFERENCES, (np.arange(20), AWAY), -1.0)
# By id: the likelihood, and the Gaussian observation (matrix, noise, values) that it is.
GAUSSIAN = {
    "averages": (averages, (AVERAGES, NOISE**2 * np.eye(5), Y[:5])),
    "differences": (differences, (DIFFERENCES, NOISE**2 * np.eye(20), np.resize(Y, 20))),
    "cumulative": (cumulative, (np.tri(N), NOISE**2 * np.eye(N), Y)),
    "correlated": (correlated, (np.eye(N), NEIGHBOURS, Y)),
    "quadratic": (quadratic, (np.eye(N), NEIGHBOURS, Y)),
}


def preferences(f):
    numpyro.sample("y", dist.Bernoulli(logits=f[HOME] - f[AWAY]), obs=WON.astype(float))


def softmax(f):
    numpyro.sample("y", dist.Multinomial(int(COUNTS.sum()), logits=f), obs=COUNTS)


def recursion(f):
    _, state = jax.lax.scan(lambda state, row: (jnp.tanh(0.8 * state + row),) * 2, 0.0, f)
    numpyro.sample("y", dist.Normal(state, NOISE), obs=np.tanh(Y))


NONLINEAR = {"preferences": preferences, "softmax": softmax, "recursion": recursion}
GUIDES = {
    "tied": lambda model: sgp.AutoTSVGP(model, X),
    "natural": lambda model: sgp.AutoSVGP(model, X, natural=True),
    "not joint": lambda model: sgp.AutoTSVGP(model, X, joint=False),
    "whitened": lambda model: sgp.AutoSVGP(model, X),
    "unwhitened": lambda model: sgp.AutoSVGP(model, X, whiten=False),
    "decoupled": lambda model: sgp.AutoDecoupledGP(model, X, X[::3]),
}
IS_SAMPLED = "ignore:The term 'y' depends on:UserWarning"


def model_with(likelihood):
    def model(X):
        likelihood(numpyro.sample("f", gp(X)))

    return model


def dense(likelihood, prior=K):
    """Posterior mean and covariance, and the log evidence, of a Gaussian observation."""
    A, R, y = GAUSSIAN[likelihood][1]
    S = A @ prior @ A.T + R
    gain = np.linalg.solve(S, A @ prior).T
    evidence = scipy.stats.multivariate_normal(np.zeros(len(y)), S).logpdf(y)
    if likelihood == "quadratic":
        evidence += 0.5 * np.linalg.slogdet(2.0 * np.pi * R)[1]
    return gain @ y, prior - gain @ A @ prior, evidence


def once_each(first, second, kept):
    """All pairs, those that are not kept marked thorough."""
    pairs = [(a, b) for a in first for b in second]
    return [pytest.param(*pair, marks=[] if pair in kept else pytest.mark.thorough) for pair in pairs]


@pytest.mark.filterwarnings(IS_SAMPLED)
@pytest.mark.parametrize(
    ("name", "kind"),
    once_each(
        GAUSSIAN,
        ["tied", "natural", "not joint"],
        [
            *((name, "tied") for name in GAUSSIAN if name != "averages"),
            ("averages", "natural"),
            ("averages", "not joint"),
        ],
    ),
)
def test_one_full_step_reaches_the_exact_posterior_of_gaussian_observations(name, kind):
    model = model_with(GAUSSIAN[name][0])
    guide = GUIDES[kind](model)
    svi = SVI(model, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    state, _ = svi.update(svi.init(jax.random.key(0), X), X)
    mean, covariance, evidence = dense(name)
    q = guide.posterior(jax.random.key(0), svi.get_params(state), X)["f"]
    assert_allclose(q.mean, mean, atol=1e-6)
    assert_allclose(q.covariance(), covariance, atol=1e-6)
    assert_allclose(svi.evaluate(state, X), -evidence, rtol=1e-6)


@pytest.mark.parametrize("kind", representative(["tied", "whitened"], ["tied"]))
@pytest.mark.thorough
def test_sites_in_one_average_and_an_intercept_are_as_in_the_dense_model(kind):
    def model(X):
        f, g = numpyro.sample("f", gp(X)), numpyro.sample("g", gp(X, 0.5))
        a = numpyro.sample("a", dist.Normal(0.0, 2.0)) if kind == "tied" else 0.0
        averages(f + g[::-1] + a)

    def total(prior):
        return prior + 0.5 * prior[::-1, ::-1] + (4.0 if kind == "tied" else 0.0)

    guide = GUIDES[kind](model)
    optimizer = sgp.NaturalGradient(1.0) if kind == "tied" else optax.adam(optax.cosine_decay_schedule(0.1, 800))
    svi = SVI(model, guide, optimizer, sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X)
    state, _ = svi.update(state, X)
    if kind == "whitened":  # f and g are independent in the posterior
        state, _ = jax.lax.scan(lambda state, _: svi.update(state, X), state, length=800)
        L = np.linalg.cholesky(K + 1e-12 * np.eye(N))
        A = AVERAGES @ np.concatenate([L, np.sqrt(0.5) * L[::-1]], axis=1) / NOISE
        precision = np.eye(2 * N) + A.T @ A
        both, f, g = (np.linalg.slogdet(P)[1] for P in (precision, precision[:N, :N], precision[N:, N:]))
        assert 0.5 * (f + g - both) > 0.1
        expected = 0.5 * (f + g - both) - dense("averages", total(K))[2]
        assert_allclose(svi.evaluate(state, X), expected, atol=1e-3)
        return
    assert_allclose(svi.evaluate(state, X), -dense("averages", total(K))[2], rtol=1e-6)


def moved(svi, guide, seed=1):
    """Parameters away from the prior, by steps towards other data."""
    params = svi.get_params(svi.init(jax.random.key(0), X))
    noise = np.random.default_rng(seed)

    def away(value):
        value = np.asarray(value)
        step = 0.15 * noise.normal(size=value.shape)
        if value.ndim == 2:
            step = np.tril(step) if guide in ("whitened", "unwhitened", "decoupled") else 0.3 * step @ step.T
        return jnp.asarray(value + step)

    inducing = {name for name in params if name.endswith("inducing")}
    return {name: value if name in inducing else jax.tree.map(away, value) for name, value in params.items()}


@pytest.mark.filterwarnings(IS_SAMPLED)
@pytest.mark.parametrize(
    ("name", "kind"),
    once_each(
        NONLINEAR,
        ["tied", "natural", "whitened", "decoupled"],
        [*((name, "tied") for name in NONLINEAR), ("softmax", "whitened"), ("preferences", "decoupled")],
    ),
)
def test_the_loss_is_the_expectation_under_joint_draws(name, kind):
    model = model_with(NONLINEAR[name])
    guide = GUIDES[kind](model)
    svi = SVI(model, guide, optax.sgd(0.0), sgp.QuadratureELBO(num_samples=64))
    params = moved(svi, kind)
    q = guide.posterior(jax.random.key(0), params, X)["f"]
    draws = np.random.default_rng(2).multivariate_normal(q.mean, q.covariance(), size=20_000)

    def log_likelihood(f):
        with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
            NONLINEAR[name](f)
        return jnp.sum(trace["y"]["fn"].log_prob(trace["y"]["value"]))

    values = jax.lax.map(log_likelihood, jnp.asarray(draws), batch_size=1000)
    expected, error = np.mean(values) - np.sum(q.kl), np.std(values) / np.sqrt(len(draws))
    losses = jax.lax.map(
        lambda key: svi.loss.loss(key, params, model, guide, X), jax.random.split(jax.random.key(3), 20)
    )
    assert_allclose(-np.mean(losses), expected, atol=4.0 * (error + np.std(losses) / np.sqrt(20)))


@pytest.mark.parametrize("kind", ["tied", "whitened"])
@pytest.mark.exhaustive
def test_draws_of_another_loss_are_joint_over_the_rows(kind):
    model = model_with(cumulative)
    guide = sgp.AutoTSVGP(model, X[:1]) if kind == "tied" else sgp.AutoSVGP(model, X[:1])
    svi = SVI(model, guide, optax.sgd(0.0), LOOSE)
    params = moved(svi, kind)
    exact = svi.loss.loss(jax.random.key(0), params, model, guide, X)
    drawn = TraceMeanField_ELBO(num_particles=4000).loss(jax.random.key(1), params, model, guide, X)
    assert_allclose(drawn, exact, rtol=0.05)


@pytest.mark.parametrize("kind", [pytest.param("tied", marks=pytest.mark.thorough), "whitened"])
def test_importance_ratios_are_the_evidence_where_the_posterior_is_exact(kind):
    model = model_with(averages)
    guide = GUIDES[kind](model)
    mean, covariance, evidence = dense("averages")
    optimizer = sgp.NaturalGradient(1.0) if kind == "tied" else optax.sgd(0.0)
    svi = SVI(model, guide, optimizer, sgp.QuadratureELBO())
    state, _ = svi.update(svi.init(jax.random.key(0), X), X)
    params = svi.get_params(state)
    if kind == "whitened":
        L = np.linalg.cholesky(K + 1e-10 * np.eye(N))
        whitened = np.linalg.solve(L, np.linalg.solve(L, covariance + 1e-11 * np.eye(N)).T)
        params = {
            **params,
            "f_auto_m": jnp.asarray(np.linalg.solve(L, mean)),
            "f_auto_S_sqrt": jnp.asarray(np.linalg.cholesky(0.5 * (whitened + whitened.T))),
        }
    ratios = log_importance_ratios(jax.random.key(1), svi, params, X, num_samples=30)
    assert_allclose(ratios, evidence, atol=2e-4)


# A gradient does not show these.
HIDDEN = {
    "stopped": lambda f: f - jax.lax.stop_gradient(jnp.mean(f)),
    "compared": lambda f: jnp.where(f > f[2], f, 0.0),
    "rounded": lambda f: f * jnp.round(jnp.mean(f)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_derivatives_do_not_show_is_seen(name):
    model = model_with(lambda f: numpyro.sample("y", dist.Normal(HIDDEN[name](f), NOISE), obs=Y))
    guide = GUIDES["tied"](model)
    svi = SVI(model, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    (group,) = guide.joint_groups(svi.get_params(svi.init(jax.random.key(0), X)))
    assert group.coupled == (("y", "f"),)


def test_initial_parameters_do_not_skip_the_check():
    model = model_with(averages)
    guide = sgp.AutoTSVGP(model, X[::2], sites="per_datum")
    other = sgp.AutoTSVGP(
        model_with(lambda f: numpyro.sample("y", dist.Normal(f, 1.0), obs=Y)), X[::2], sites="per_datum"
    )
    svis = [SVI(each.model, each, sgp.NaturalGradient(1.0), sgp.QuadratureELBO()) for each in (other, guide)]
    params = svis[0].get_params(svis[0].init(jax.random.key(0), X))
    del params["auto_latents"]
    with pytest.raises(ValueError, match="several rows"):
        svis[1].init(jax.random.key(0), X, init_params=params)


@pytest.mark.exhaustive
def test_a_term_that_is_sampled_is_said_once_with_its_cost():
    model = model_with(softmax)
    svi = SVI(model, GUIDES["whitened"](model), optax.adam(0.1), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X)
    with pytest.warns(UserWarning, match=r"'y' depends on 10 numbers of \['f'\] at once.*8 draws and O\(10³\)"):
        svi.update(state, X)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["tied", pytest.param("whitened", marks=pytest.mark.thorough)])
def test_a_posterior_does_not_need_the_data_of_the_terms(kind):
    def model(X, times=None):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        rate = jnp.exp(a + numpyro.sample("f", gp(X)))
        numpyro.factor("survival", jnp.log(rate) - rate * times)

    guide = GUIDES[kind](model) if kind == "tied" else sgp.AutoSVGP(model, X, joint=False)
    svi = SVI(model, guide, optax.adam(0.01), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, np.exp(Y)))
    q = guide.posterior(jax.random.key(1), params, X[:3])["f"]
    assert q.mean.shape == (3,)
    process = sgp.process_posterior(guide, jax.random.key(1), params, X[:3])["f"].posterior(X[:3])
    assert_allclose(process.mean, q.mean, atol=1e-8)
    assert guide.sample_functions(jax.random.key(1), params, X[:3], num_samples=2)["f"](X).shape == (2, N)
    assert set(guide.median(params, X[:3])) == {"a", "f"}


@pytest.mark.thorough
@pytest.mark.filterwarnings(IS_SAMPLED)
@pytest.mark.parametrize("floor", [0.0, None])
def test_the_direction_of_a_term_that_is_not_concave_has_a_floor(floor):
    model = model_with(recursion)
    svi = SVI(model, GUIDES["tied"](model), sgp.NaturalGradient(0.2, floor=floor), sgp.QuadratureELBO())
    state, _ = svi.update(svi.init(jax.random.key(0), X), X)
    (sites,) = [value for name, value in svi.get_params(state).items() if name.endswith("sites")]
    smallest = np.linalg.eigvalsh(sites.Lambda2).min()
    assert smallest < -1e-3 if floor is None else smallest > -1e-8


# Each entry looks at two rows, or three.
FEW_ROWS = {
    "differences": lambda f: f[HOME] - 0.5 * f[AWAY],
    "of a reference": lambda f: f - f[3],
    "neighbours": lambda f: 2.0 * f[1:-1] - f[:-2] - f[2:],
}


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("name", FEW_ROWS)
@pytest.mark.thorough
def test_predictors_of_few_rows_need_no_matrix_of_all_rows(name, compiled, monkeypatch):
    monkeypatch.setattr(predictors, "_MOST_COEFFICIENTS", 0)
    outcomes = np.resize(Y, np.shape(FEW_ROWS[name](jnp.zeros(N))))

    def model(X, outcomes):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a + FEW_ROWS[name](numpyro.sample("f", gp(X))), NOISE), obs=outcomes)

    svi = SVI(model, GUIDES["tied"](model), sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, outcomes)
    state, _ = jax.jit(svi.update)(state, X, outcomes) if compiled else svi.update(state, X, outcomes)
    A = np.asarray(jax.jacobian(FEW_ROWS[name])(jnp.zeros(N)))
    S = A @ K @ A.T + 1.0 + NOISE**2 * np.eye(len(outcomes))
    evidence = scipy.stats.multivariate_normal(np.zeros(len(outcomes)), S).logpdf(outcomes)
    assert_allclose(svi.evaluate(state, X, outcomes), -evidence, rtol=1e-6)


@pytest.mark.exhaustive
def test_the_variance_of_few_rows_of_several_latents_is_that_of_the_dense_prior():
    def model(X):
        with numpyro.plate("latents", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(KERNELS, X, jitter=1e-10))
        numpyro.sample("y", dist.Normal(f[0, HOME] - 2.0 * f[0, AWAY] + f[1, AWAY], NOISE), obs=np.resize(Y, 20))

    KERNELS = sgp.kernels.SquaredExponential(jnp.asarray([[LENGTHSCALE], [0.3]]), jnp.asarray([1.0, 0.7]))
    guide = sgp.AutoTSVGP(model, X)
    svi = SVI(model, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    state, _ = svi.update(svi.init(jax.random.key(0), X), X)
    first, second = np.eye(N)[HOME] - 2.0 * np.eye(N)[AWAY], np.eye(N)[AWAY]
    S = first @ K @ first.T + 0.7 * second @ oracles.se(X, X, 0.3, 1.0) @ second.T + NOISE**2 * np.eye(20)
    evidence = scipy.stats.multivariate_normal(np.zeros(20), S).logpdf(np.resize(Y, 20))
    assert_allclose(svi.evaluate(state, X), -evidence, rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(IS_SAMPLED)
@pytest.mark.parametrize("kind", ["tied", pytest.param("whitened", marks=pytest.mark.thorough)])
def test_rows_of_which_few_inducing_variables_know_nearly_all_can_be_drawn(kind):
    many = np.linspace(0.0, 3.0, 30)[:, None]

    def model(X):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(LENGTHSCALE), X))
        numpyro.sample("y", dist.Multinomial(60, logits=f), obs=np.full(30, 2))

    guide = sgp.AutoTSVGP(model, many[::2]) if kind == "tied" else sgp.AutoSVGP(model, many[::2])
    svi = SVI(model, guide, optax.sgd(0.0), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0), many))
    assert np.isfinite(log_importance_ratios(jax.random.key(1), svi, params, many, num_samples=5)).all()


@pytest.mark.thorough
def test_parameters_of_a_model_of_single_rows_are_refused_by_one_of_several():
    def model(X, averaged):
        f = numpyro.sample("f", gp(X))
        numpyro.sample("y", dist.Normal(AVERAGES @ f if averaged else f[:5], NOISE), obs=Y[:5])

    guide = GUIDES["tied"](model)
    svi = SVI(model, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    state, _ = svi.update(svi.init(jax.random.key(0), X, False), X, False)
    params = svi.get_params(state)
    for fresh in (guide, GUIDES["tied"](model)):
        with pytest.raises(ValueError, match=r"\['y'\] depend on several rows of the GP site 'f'.*of another model"):
            svi.loss.loss(jax.random.key(0), params, model, fresh, X, True)
        svi.loss.loss(jax.random.key(0), params, model, fresh, X, False)
