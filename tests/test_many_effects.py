"""Effects of groups beside GPs, eliminated one by one: against dense algebra, and against the dense block."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO
import optax
import pytest

import numpyro_sgp as sgp

pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(0)
N, G = 30, 18
X = np.sort(RNG.uniform(0.0, 6.0, N))[:, None]
Z = np.linspace(0.0, 6.0, 6)[:, None]
GROUP = RNG.integers(0, G - 3, N)  # some groups have no rows
SIZE = RNG.uniform(0.5, 1.5, N)
EFFECTS = 0.5 * RNG.normal(size=G)
COUNTS = RNG.poisson(np.exp(0.3 + np.sin(X[:, 0]) + EFFECTS[GROUP]))
REALS = np.sin(X[:, 0]) + SIZE * EFFECTS[GROUP] + 0.3 * RNG.normal(size=N)
KERNEL = sgp.kernels.Matern32(1.0, 1.2)
SE = sgp.kernels.SquaredExponential
FORMS = {
    "tied": lambda model, Z: sgp.AutoTSVGP(model, Z),
    "natural": lambda model, Z: sgp.AutoSVGP(model, Z, natural=True),
    "trained": lambda model, Z: sgp.AutoTSVGP(model, Z, learn_inducing=True),
}


@pytest.fixture(autouse=True)
def few_effects_are_many(monkeypatch):
    monkeypatch.setattr("numpyro_sgp.guides.group._FEWEST_EFFECTS", 16)


def gp(kernel, **options):
    return sgp.GaussianProcess(kernel, X, jitter=1e-10, **options)


def gaussian(y=REALS):
    mean = numpyro.sample("mean", dist.Normal(0.5, 1.0))
    with numpyro.plate("groups", G):
        e = numpyro.sample("e", dist.Normal(mean, 0.6))
    f = numpyro.sample("f", gp(KERNEL))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f + SIZE * e[GROUP], 0.3), obs=y)


def poisson(y=COUNTS):
    """A learned scale, non-centred, beside an intercept and a learned lengthscale."""
    a, scale = numpyro.sample("a", dist.Normal(0.0, 1.0)), numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", G):
        e = numpyro.sample("e", dist.Normal(0.3, 1.0))
    f = numpyro.sample("f", gp(SE(numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5)))))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(a + f + SIZE * (scale * e)[GROUP])), obs=y)


def two_predictors(y=REALS):
    """The effects in both of them, and latents with nodes of their own."""
    with numpyro.plate("groups", G):
        e = numpyro.sample("e", dist.Normal(0.1, 0.6))
    f, g = numpyro.sample("f", gp(SE(1.0))), numpyro.sample("g", gp(SE(2.0, 0.3)))
    df, skew = numpyro.sample("df", dist.Gamma(3.0, 1.0)), numpyro.sample("skew", dist.HalfNormal(0.5))
    of_row = e[GROUP]
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.StudentT(2.0 + df, f + of_row + skew, jnp.exp(g + 0.3 * of_row)), obs=y)


def fitted(model, guide, steps, rho):
    svi = SVI(model, guide, sgp.NaturalGradient(rho, optax.adam(3e-2)), sgp.QuadratureELBO(8))
    return svi, svi.run(jax.random.key(0), steps, progress_bar=False)


def as_dense_block(monkeypatch):
    monkeypatch.setattr("numpyro_sgp.guides.group._FEWEST_EFFECTS", 10**6)


def exact():
    """The posterior of (f, mean, e), and the evidence."""
    H = SIZE[:, None] * np.eye(G)[GROUP]
    B = np.concatenate([np.ones((1, G + 1)), np.concatenate([np.ones((G, 1)), np.ones((G, G)) + 0.36 * np.eye(G)], 1)])
    K = np.asarray(KERNEL(X, X))
    prior = np.block([[K, np.zeros((N, G + 1))], [np.zeros((G + 1, N)), B]])
    J = np.concatenate([np.eye(N), np.zeros((N, 1)), H], axis=1)
    C = J @ prior @ J.T + 0.09 * np.eye(N)
    residual = REALS - 0.5 * H.sum(axis=1)
    mean = prior @ J.T @ np.linalg.solve(C, residual) + np.concatenate([np.zeros(N), np.full(G + 1, 0.5)])
    evidence = -0.5 * (residual @ np.linalg.solve(C, residual) + np.linalg.slogdet(2.0 * np.pi * C)[1])
    return mean, prior - prior @ J.T @ np.linalg.solve(C, J @ prior), evidence


@pytest.mark.parametrize("form", ["tied", pytest.param("natural", marks=pytest.mark.thorough)])
@pytest.mark.thorough
def test_one_full_step_reaches_the_exact_posterior_of_all_effects(form):
    guide = FORMS[form](gaussian, X)
    _, result = fitted(gaussian, guide, 2, 1.0)
    (group,) = result.params["auto_latents"].groups
    assert (group.latents, group.effects) == (("mean", "e"), "e")
    mean, covariance, evidence = exact()
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(-result.losses[1], evidence, rtol=0.0, atol=1e-6)
    q = guide.posterior(jax.random.key(1), result.params)["f"]
    np.testing.assert_allclose(q.mean, mean[:N], atol=1e-6)
    np.testing.assert_allclose(q.covariance(), covariance[:N, :N], atol=1e-6)
    high = guide.quantiles(result.params, jax.scipy.special.ndtr(1.0), y=REALS)
    found = np.concatenate([high["mean"][None], high["e"]])
    np.testing.assert_allclose(found, (mean + sd)[N:], atol=1e-6)
    draws = guide.sample_posterior(jax.random.key(2), result.params, sample_shape=(20000,))
    together = np.concatenate([draws["f"], draws["mean"][:, None], draws["e"]], axis=1)
    np.testing.assert_allclose((together.mean(0) - mean) / sd, 0.0, atol=0.04)
    np.testing.assert_allclose((np.cov(together.T) - covariance) / np.outer(sd, sd), 0.0, atol=0.05)


@pytest.mark.parametrize(
    ("model", "form"),
    [
        pytest.param(poisson, "tied", marks=pytest.mark.thorough),
        pytest.param(poisson, "natural", marks=pytest.mark.thorough),
        pytest.param(poisson, "trained", marks=pytest.mark.thorough),
        pytest.param(two_predictors, "tied", marks=pytest.mark.thorough),
        pytest.param(two_predictors, "natural", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.exhaustive
def test_training_takes_the_steps_of_the_dense_block(model, form, monkeypatch):
    ends = []
    for _ in range(2):
        guide = FORMS[form](model, Z)
        _, result = fitted(model, guide, 5, 0.3)
        assert (result.params["auto_latents"].groups[0].effects is None) == bool(ends)
        q = guide.posterior(jax.random.key(1), result.params)["f"]
        quantiles = guide.quantiles(result.params, 0.9, y=REALS if model is two_predictors else COUNTS)
        ends.append([result.losses, q.mean, q.variance, *(quantiles[name] for name in sorted(quantiles))])
        as_dense_block(monkeypatch)
    assert np.isfinite(ends[0][0]).all()
    for eliminated, dense in zip(*ends, strict=True):
        np.testing.assert_allclose(eliminated, dense, rtol=1e-8, atol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["tied", pytest.param("natural", marks=pytest.mark.thorough)])
def test_quadrature_is_what_draws_estimate(form):
    guide = FORMS[form](two_predictors, Z)
    svi = SVI(two_predictors, guide, optax.adam(0.1), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0)))
    rng = np.random.default_rng(1)
    A = rng.normal(size=(G + 14, G + 14))
    A[:G, :G] = np.diag(np.diag(A[:G, :G]))  # so that A Aᵀ has the pattern of the sites
    A[:G, G:] = 0.0
    whole = A @ A.T / 10.0
    for name, value in params.items():
        if name.endswith("joint_sites"):
            moved = {"lambda1": value.lambda1 + rng.normal(size=14), "Lambda2": value.Lambda2 + whole[G:, G:]}
            params[name] = dataclasses.replace(value, **moved)
        elif name.endswith("effect_sites"):
            both = np.concatenate([np.diag(whole[:G, :G])[:, None], whole[:G, G:]], axis=1)
            params[name] = dataclasses.replace(
                value, lambda1=jnp.asarray(rng.normal(size=G)), Lambda2=value.Lambda2 + both
            )
    loss = sgp.QuadratureELBO(30).loss(jax.random.key(0), params, two_predictors, guide)
    estimate = TraceMeanField_ELBO(num_particles=1000)
    draws = jax.lax.map(
        lambda key: estimate.loss(key, params, two_predictors, guide), jax.random.split(jax.random.key(1), 40)
    )
    error = jnp.std(draws) / np.sqrt(40.0)
    assert error < 0.5
    assert abs(loss - jnp.mean(draws)) < 4.0 * error


@pytest.mark.thorough
def test_importance_ratios_are_the_evidence_where_the_posterior_is_exact():
    svi, result = fitted(gaussian, FORMS["tied"](gaussian, X), 3, 1.0)
    _, _, evidence = exact()
    data = sgp.to_arviz(jax.random.key(3), svi, result, y=REALS, num_samples=20)
    stats = data["sample_stats"]
    # The posterior is exact: every ratio is the evidence.
    np.testing.assert_allclose(np.asarray(stats["lp"]) - np.asarray(stats["log_q"]), evidence, atol=5e-3)


@pytest.mark.thorough
def test_thousands_of_effects_are_joint():
    rng = np.random.default_rng(2)
    size, groups = 6000, 2000
    x, group = rng.uniform(0.0, 6.0, size)[:, None], rng.integers(0, groups, size)
    truth = 0.7 * rng.normal(size=groups)
    y = np.sin(x[:, 0]) + truth[group] + 0.3 * rng.normal(size=size)

    def model():
        with numpyro.plate("groups", groups):
            e = numpyro.sample("e", dist.Normal(0.0, 0.7))
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, x))
        with numpyro.plate("data", size):
            numpyro.sample("y", dist.Normal(f + e[group], 0.3), obs=y)

    guide = sgp.AutoTSVGP(model, np.linspace(0.0, 6.0, 20)[:, None])
    _, result = fitted(model, guide, 2, 1.0)
    draws = guide.sample_posterior(jax.random.key(2), result.params, sample_shape=(200,))["e"]
    z = (draws.mean(0) - truth) / draws.std(0)
    np.testing.assert_allclose(np.sqrt(np.mean(z * z)), 1.0, atol=0.06)


@pytest.mark.exhaustive
def test_effects_of_two_groups_in_one_row_stay_in_the_dense_block():
    def model():
        e = numpyro.sample("e", dist.Normal().expand([G]).to_event(1))
        f = numpyro.sample("f", gp(SE(1.0)))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(f + e[GROUP] - e[GROUP[::-1]])), obs=COUNTS)

    guide = sgp.AutoTSVGP(model, Z)
    _, result = fitted(model, guide, 1, 0.5)
    (group,) = result.params["auto_latents"].groups
    assert group.effects is None
