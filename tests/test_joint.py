"""Joint posteriors of GP sites and other latents, against dense linear algebra and Monte Carlo."""

import dataclasses
from functools import partial
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.posteriors.perturbation import Perturbed

pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(0)
N = 24
X = np.sort(RNG.uniform(0.0, 6.0, N))[:, None]
W = np.stack([X[:, 0] - 3.0, RNG.normal(size=N)], axis=1)
GROUP = RNG.integers(0, 3, N)
COUNTS = RNG.poisson(np.exp(0.3 + np.sin(X[:, 0]) + W @ [0.1, 0.3]))
REALS = 0.5 + np.sin(X[:, 0]) + W @ [0.1, 0.4] + 0.3 * RNG.normal(size=N)
Z = np.linspace(0.0, 6.0, 7)[:, None]
KERNEL = sgp.kernels.Matern32(1.0, 1.2)
SE = sgp.kernels.SquaredExponential
FORMS = {
    "tied": sgp.AutoTSVGP,
    "natural": lambda model, inducing, **options: sgp.AutoSVGP(model, inducing, natural=True, **options),
}

# The exact posterior is shown in both forms; what follows from it, in one, and in the other where all tests run.
MISSING = [("real", "auto"), ("real", False), ("count", False)]
each_form = pytest.mark.parametrize("form", ["tied", pytest.param("natural", marks=pytest.mark.thorough)])


def gp(kernel, x=X, **options):
    return sgp.GaussianProcess(kernel, x, jitter=1e-10, **options)


def coefficients():
    a = numpyro.sample("a", dist.Normal(1.0, 3.0))
    b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    return a, b


def gaussian(y=REALS):
    a, b = coefficients()
    f = numpyro.sample("f", gp(KERNEL))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(a + f + W @ b, 0.3), obs=y)


def poisson(y=COUNTS):
    a, b = coefficients()
    f = numpyro.sample("f", gp(KERNEL))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(a + f + W @ b)), obs=y)


def everything(y=REALS):
    """Two GPs, two predictors for each datum, effects with a mean of their own, two latents in no predictor."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", 3):
        effects = numpyro.sample("effects", dist.Normal(mean, 0.7))
    c = numpyro.sample("c", dist.Normal(-1.0, 0.5))
    f = numpyro.sample("f", gp(SE(1.0)))
    g = numpyro.sample("g", gp(SE(2.0, 0.3)))
    low = numpyro.sample("low", dist.Gamma(3.0, 1.0))
    skew = numpyro.sample("skew", dist.HalfNormal(0.5))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.StudentT(2.0 + low, f + effects[GROUP] + skew, jnp.exp(g + c)), obs=y)


def fitted(model, guide, steps, rho=1.0, loss=None, **options):
    svi = SVI(model, guide, sgp.NaturalGradient(rho, optax.adam(1e-2), **options), loss or sgp.QuadratureELBO())
    return svi, svi.run(jax.random.key(0), steps, progress_bar=False)


def arbitrary(model, guide, seed=0):
    """Parameters at which nothing is special."""
    svi = SVI(model, guide, optax.adam(0.1), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0)))
    rng = np.random.default_rng(seed)
    for name, value in params.items():
        if name.endswith("joint_sites"):
            D = value.lambda1.size
            A = rng.normal(size=(D, D))
            params[name] = dataclasses.replace(
                value, lambda1=value.lambda1 + rng.normal(size=D), Lambda2=value.Lambda2 + A @ A.T / D
            )
    return params


def dense():
    """The exact posterior of (f, a, b) and the evidence of `gaussian`."""
    H = np.concatenate([np.ones((N, 1)), W], axis=1)
    B, b0 = np.diag([9.0, 4.0, 4.0]), np.array([1.0, 0.0, 0.0])
    K = np.asarray(KERNEL(X, X))
    C = K + H @ B @ H.T + 0.09 * np.eye(N)
    residual = REALS - H @ b0
    evidence = -0.5 * (residual @ np.linalg.solve(C, residual) + np.linalg.slogdet(2.0 * np.pi * C)[1])
    J = np.concatenate([K, B @ H.T])
    prior = np.block([[K, np.zeros((N, 3))], [np.zeros((3, N)), B]])
    mean = J @ np.linalg.solve(C, residual) + np.concatenate([np.zeros(N), b0])
    return mean, prior - J @ np.linalg.solve(C, J.T), evidence


# The mathematics.


@pytest.mark.parametrize("form", FORMS)
def test_one_full_step_reaches_the_exact_joint_posterior_and_its_bound_is_the_evidence(form):
    guide = FORMS[form](gaussian, X)
    _, result = fitted(gaussian, guide, 2)
    mean, covariance, evidence = dense()
    np.testing.assert_allclose(-result.losses[1], evidence, rtol=0.0, atol=1e-6)
    q = guide.posterior(jax.random.key(1), result.params)["f"]
    np.testing.assert_allclose(q.mean, mean[:N], atol=1e-6)
    np.testing.assert_allclose(q.covariance(), covariance[:N, :N], atol=1e-6)
    draws = guide.sample_posterior(jax.random.key(2), result.params, sample_shape=(20000,))
    together = np.concatenate([draws["f"], draws["a"][:, None], draws["b"]], axis=1)
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((together.mean(0) - mean) / sd, 0.0, atol=0.04)
    np.testing.assert_allclose((np.cov(together.T) - covariance) / np.outer(sd, sd), 0.0, atol=0.05)


@each_form
def test_effects_beside_a_gp_have_the_bound_of_the_gp_with_the_summed_kernel(form):
    _, result = fitted(poisson, FORMS[form](poisson, X), 30)
    effects = sgp.kernels.Constant(9.0) + sgp.kernels.Linear(4.0)

    def summed(y=COUNTS):
        kernel = sgp.kernels.Select(KERNEL, [0]) + sgp.kernels.Select(effects, [1, 2])
        eta = numpyro.sample("eta", gp(kernel, np.concatenate([X, W], axis=1), mean=1.0))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)

    _, exact = fitted(summed, sgp.AutoTSVGP(summed, None), 30)
    np.testing.assert_allclose(result.losses[-1], exact.losses[-1], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("joint", ["auto", False])
def test_latents_with_an_improper_prior_are_those_of_least_squares(joint):
    def model(y=REALS):
        a = numpyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))
        b = numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), (2,)))
        f = numpyro.sample("f", gp(KERNEL))
        numpyro.sample("y", dist.Normal(a + f + W @ b, 0.3).to_event(1), obs=y)

    guide = sgp.AutoTSVGP(model, X, joint=joint)
    _, result = fitted(model, guide, 3)
    if joint is False:
        assert np.all(np.isfinite(result.losses))
        return
    H = np.concatenate([np.ones((N, 1)), W], axis=1)
    whitened = np.linalg.solve(np.asarray(KERNEL(X, X)) + 0.09 * np.eye(N), H)
    covariance = np.linalg.inv(H.T @ whitened)
    mean, sd = covariance @ whitened.T @ REALS, np.sqrt(np.diag(covariance))
    found = guide.quantiles(result.params, [0.158655, 0.5, 0.841345], REALS)
    low, median, high = np.concatenate([found["a"][:, None], found["b"]], axis=1)
    np.testing.assert_allclose(median, mean, atol=1e-5)
    np.testing.assert_allclose((high - low) / 2.0, sd, rtol=1e-4)


@each_form
@pytest.mark.thorough
def test_no_rows_are_predicted_as_none(form):
    def model(X, y=None):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", gp(KERNEL, X).expand([2]))
        numpyro.sample("y", dist.Normal(a + f, 0.3).to_event(2), obs=y)

    guide = FORMS[form](model, Z)
    svi = SVI(model, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, np.stack([REALS, -REALS])))
    assert guide.posterior(jax.random.key(1), params, X[:0])["f"].mean.shape == (2, 0)
    draws = Predictive(model, guide=guide, params=params, num_samples=3)(jax.random.key(1), X[:0])
    assert draws["y"].shape == (3, 2, 0)


def in_mean(mean, y=REALS, noise=0.3):
    """`gaussian`, with a latent and coefficients in the prior mean of f or beside it."""
    a, b = coefficients()
    f = numpyro.sample("f", gp(KERNEL, mean=a + W @ b if mean else 0.0))
    f = f if mean else a + f + W @ b
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


OF_ROWS = {
    "dense": lambda model, _: sgp.AutoTSVGP(model, None),
    "markov": lambda model, _: sgp.AutoMarkovGP(model),
    "vecchia": lambda model, _: sgp.AutoVecchiaGP(model, num_neighbours=N - 1),
}


@pytest.mark.parametrize(
    "form",
    [
        "tied",
        pytest.param("natural", marks=pytest.mark.exhaustive),
        pytest.param("dense", marks=pytest.mark.exhaustive),
        pytest.param("markov", marks=pytest.mark.thorough),
        pytest.param("vecchia", marks=pytest.mark.exhaustive),
    ],
)
def test_latents_of_a_prior_mean_are_exact(form):
    guides = [(FORMS | OF_ROWS)[form](partial(in_mean, mean), X) for mean in (True, False)]
    _, result = fitted(guides[0].model, guides[0], 2)
    mean, covariance, evidence = dense()
    np.testing.assert_allclose(-result.losses[1], evidence, rtol=0.0, atol=1e-5)
    # The same parameters are those of the model that adds them to f.
    losses = [sgp.QuadratureELBO().loss(jax.random.key(0), result.params, each.model, each) for each in guides]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-10)
    added = np.concatenate([np.eye(N), np.ones((N, 1)), W], axis=1)
    mean, covariance = added @ mean, added @ covariance @ added.T
    q = guides[0].posterior(jax.random.key(1), result.params)["f"]
    np.testing.assert_allclose(q.mean, mean, atol=1e-5)
    np.testing.assert_allclose(q.variance, np.diag(covariance), rtol=1e-5)
    np.testing.assert_allclose(q.covariance(), covariance, atol=5e-5)
    draws = guides[0].sample_posterior(jax.random.key(2), result.params, sample_shape=(4000,))
    own = draws["f"] - draws["a"][:, None] - draws["b"] @ W.T  # with the latents that they belong to
    np.testing.assert_allclose(own.std(0), np.sqrt(np.diag(dense()[1])[:N]), rtol=0.06)
    np.testing.assert_allclose(draws["f"].std(0), np.sqrt(q.variance), rtol=0.06)


@pytest.mark.exhaustive
def test_latents_of_a_prior_mean_beside_a_grid():
    guide = sgp.AutoSVGP(partial(in_mean, True), sgp.InducingGrid.at(np.linspace(-0.5, 6.5, 20)))
    svi = SVI(guide.model, guide, optax.adam(0.05), sgp.QuadratureELBO())
    params = svi.run(jax.random.key(0), 300, progress_bar=False).params
    q = guide.posterior(jax.random.key(1), params)["f"]
    draws = guide.sample_posterior(jax.random.key(2), params, sample_shape=(20000,))["f"]
    np.testing.assert_allclose((draws.mean(0) - q.mean) / np.sqrt(q.variance), 0.0, atol=0.04)
    sd = np.sqrt(np.diag(q.covariance()))
    np.testing.assert_allclose(np.sqrt(q.variance) / sd, 1.0, rtol=1e-6)
    np.testing.assert_allclose((np.cov(draws.T) - q.covariance()) / np.outer(sd, sd), 0.0, atol=0.05)


@pytest.mark.exhaustive
def test_a_prior_mean_that_is_not_linear_in_latents():
    def model(mean, y=COUNTS):
        a, rate = numpyro.sample("a", dist.Normal(1.0, 1.0)), numpyro.sample("rate", dist.LogNormal(-1.0, 0.5))
        curve = a * jnp.exp(-rate * X[:, 0])
        f = numpyro.sample("f", gp(SE(1.0, 0.3), mean=curve if mean else 0.0))
        f = f if mean else f + curve
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    guides = [sgp.AutoTSVGP(partial(model, mean), Z) for mean in (True, False)]
    params = arbitrary(guides[0].model, guides[0])
    losses = [sgp.QuadratureELBO().loss(jax.random.key(0), params, each.model, each) for each in guides]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-10)
    draws = [each.sample_posterior(jax.random.key(2), params, sample_shape=(3,)) for each in guides]
    curves = np.asarray([a * np.exp(-rate * X[:, 0]) for a, rate in zip(draws[1]["a"], draws[1]["rate"], strict=True)])
    np.testing.assert_allclose(draws[0]["f"], draws[1]["f"] + curves, rtol=1e-10)


def with_trend(X=X, y=REALS):
    a, b = numpyro.sample("a", dist.Normal(1.0, 3.0)), numpyro.sample("b", dist.Normal(0.0, 1.0))
    mean = jax.tree_util.Partial(lambda a, b, x: a + b * x[:, 0], a, b)
    f = numpyro.sample("f", gp(SE(1.0), X, mean=mean))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["tied", pytest.param("natural", marks=pytest.mark.exhaustive)])
def test_processes_and_functions_with_latents_in_the_prior_mean(form):
    guide = FORMS[form](with_trend, Z)
    _, result = fitted(with_trend, guide, 2)
    new = np.linspace(-1.0, 7.0, 9)[:, None]
    q = guide.posterior(jax.random.key(1), result.params, new, None)["f"]
    keys = jax.random.split(jax.random.key(2), 4000)

    def given(key):
        at = sgp.process_posterior(guide, key, result.params)["f"].posterior(new)
        return at.mean, at.variance

    means, variances = jax.vmap(given)(keys)
    np.testing.assert_allclose(means.mean(0), q.mean, atol=0.05)
    np.testing.assert_allclose(means.var(0) + variances.mean(0), q.variance, rtol=0.08)
    assert variances.mean(0)[-1] < 0.6 * q.variance[-1]  # far from the data the latents matter
    functions = guide.sample_functions(jax.random.key(3), result.params, num_samples=4000)["f"](new)
    np.testing.assert_allclose((functions.mean(0) - q.mean) / np.sqrt(q.variance), 0.0, atol=0.08)
    np.testing.assert_allclose(functions.std(0), np.sqrt(q.variance), rtol=0.08)
    stock = TraceMeanField_ELBO(num_particles=2000)
    losses = [each.loss(jax.random.key(4), result.params, with_trend, guide) for each in (sgp.QuadratureELBO(), stock)]
    np.testing.assert_allclose(losses[0], losses[1], atol=1.0)


@pytest.mark.thorough
def test_rows_that_come_later_move_a_prior_mean_and_leave_again():
    guide = sgp.AutoTSVGP(with_trend, Z)
    _, result = fitted(with_trend, guide, 2)
    before = guide.posterior(jax.random.key(1), result.params)["f"]
    more = guide.condition(result.params, X[:3], before.mean[:3] + 0.5)
    assert np.all(guide.posterior(jax.random.key(1), more)["f"].mean[:3] > before.mean[:3])
    less = guide.remove(more, X[:3], before.mean[:3] + 0.5)
    np.testing.assert_allclose(guide.posterior(jax.random.key(1), less)["f"].mean, before.mean, atol=1e-5)


@pytest.mark.exhaustive
def test_effects_of_groups_in_a_prior_mean():
    group = np.arange(N) % 70

    def model(mean):
        e = numpyro.sample("e", dist.Normal(0.0, 0.5).expand([70]).to_event(1))
        f = numpyro.sample("f", gp(KERNEL, mean=e[group] if mean else 0.0))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f if mean else f + e[group], 0.3), obs=REALS)

    losses = []
    for mean, effects in ((True, None), (False, "e")):
        guide = sgp.AutoTSVGP(partial(model, mean), X)
        _, result = fitted(guide.model, guide, 2)
        assert result.params["auto_latents"].groups[0].effects == effects
        losses.append(result.losses[-1])
    np.testing.assert_allclose(*losses, rtol=1e-7)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_quadrature_is_what_draws_of_all_members_estimate(form):
    guide = FORMS[form](everything, Z)
    params = arbitrary(everything, guide)
    loss = sgp.QuadratureELBO(30).loss(jax.random.key(0), params, everything, guide)
    estimate = TraceMeanField_ELBO(num_particles=1000)
    draws = jax.lax.map(
        lambda key: estimate.loss(key, params, everything, guide), jax.random.split(jax.random.key(1), 40)
    )
    error = jnp.std(draws) / np.sqrt(40.0)
    assert error < 0.5
    assert abs(loss - jnp.mean(draws)) < 4.0 * error


@each_form
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The natural parameters:UserWarning")
def test_the_direction_of_a_step_is_the_gradient_with_respect_to_expectation_parameters(form):
    guide = FORMS[form](everything, Z)
    params = arbitrary(everything, guide)
    name = next(name for name in params if name.endswith("joint_sites"))
    sites, loss = params[name], sgp.QuadratureELBO(8)

    def at(value):
        return loss.loss(jax.random.key(0), {**params, name: value}, everything, guide)

    epsilon = sites.perturbation(for_step=False)
    direction = jax.grad(lambda epsilon: at(Perturbed(sites, epsilon)))(epsilon)
    np.testing.assert_allclose(direction.epsilon2, direction.epsilon2.T, atol=1e-10)
    gradient = jax.grad(at)(sites)
    K = jnp.eye(sites.lambda1.size)
    if form == "tied":
        sd = [0.7, 0.7, 0.7]
        effects = np.ones((4, 4)) + np.diag([0.0, *np.square(sd)])
        blocks = [np.asarray(k(Z, Z)) * (1.0 + 1e-10 * np.eye(len(Z))) for k in (SE(1.0), SE(2.0, 0.3))]
        K = jax.scipy.linalg.block_diag(*blocks, effects, 0.25, 9.0, 9.0)

    def expectations(lambda1, Lambda2):
        S = jnp.linalg.inv(jnp.linalg.inv(K) + 0.5 * (Lambda2 + Lambda2.T))
        return S @ lambda1, S + jnp.outer(S @ lambda1, S @ lambda1)

    _, pull = jax.vjp(expectations, sites.lambda1, sites.Lambda2)
    by_linear, by_precision = pull((direction.epsilon1, direction.epsilon2))
    scale = np.abs(gradient.lambda1).max()
    np.testing.assert_allclose(by_linear / scale, gradient.lambda1 / scale, atol=1e-5)
    symmetric = 0.5 * (gradient.Lambda2 + gradient.Lambda2.T)
    scale = np.abs(symmetric).max()
    np.testing.assert_allclose(by_precision / scale, symmetric / scale, atol=1e-5)


@pytest.mark.exhaustive
def test_a_factorised_posterior_is_too_narrow_and_its_bound_lower():
    both = [fitted(poisson, sgp.AutoTSVGP(poisson, Z, joint=joint), 200, 0.5) for joint in ("auto", False)]
    joint, factorised = (np.mean(result.losses[-50:]) for _, result in both)
    assert joint < factorised - 1.0
    sds = [
        svi.guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(2000,))["a"].std()
        for svi, result in both
    ]
    assert sds[1] < 0.6 * sds[0]


@pytest.mark.thorough
def test_the_gain_of_a_joint_posterior_is_the_difference_of_the_bounds():
    guide = sgp.AutoTSVGP(poisson, Z, joint=False)
    svi = SVI(poisson, guide, sgp.NaturalGradient(0.5, optax.adam(0.05)), sgp.QuadratureELBO())
    gain = sgp.diagnostics.joint_gain(jax.random.key(0), svi, num_steps=150)
    _, joint = fitted(poisson, sgp.AutoTSVGP(poisson, Z), 20)
    result = svi.run(jax.random.key(0), 150, progress_bar=False)
    assert gain.nats > 1.0
    np.testing.assert_allclose(gain.nats, np.mean(result.losses[-15:]) - joint.losses[-1], atol=0.05)
    assert guide.joint is False


def test_nothing_is_gained_where_nothing_is_joint():
    def model():
        f = numpyro.sample("f", gp(KERNEL))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=COUNTS)

    svi = SVI(model, sgp.AutoTSVGP(model, Z), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    with pytest.raises(ValueError, match="nothing to gain"):
        sgp.diagnostics.joint_gain(jax.random.key(0), svi, num_steps=10)
    svi = SVI(poisson, AutoNormal(poisson), optax.adam(0.1), sgp.QuadratureELBO())
    with pytest.raises(TypeError, match="needs a guide of numpyro_sgp, got a AutoNormal"):
        sgp.diagnostics.joint_gain(jax.random.key(0), svi, num_steps=10)


@pytest.mark.thorough
def test_centred_effects_follow_their_scale():
    """q(b | τ) is that of the prior at τ and the sites, whatever τ the sites were found at."""
    y = RNG.normal(size=N)

    def model(tau=None):
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0), obs=tau)
        with numpyro.plate("groups", 3):
            b = numpyro.sample("b", dist.Normal(0.0, tau))
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + b[GROUP], 0.5), obs=y)

    guide = sgp.AutoTSVGP(model, X)
    svi = SVI(model, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    params = svi.run(jax.random.key(0), 3, 0.3, progress_bar=False).params
    draws = guide.sample_posterior(jax.random.key(1), params, 2.0, sample_shape=(20000,))["b"]
    H = np.eye(3)[GROUP]
    C = np.asarray(KERNEL(X, X)) + 0.25 * np.eye(N)
    P = H.T @ np.linalg.solve(C, H) + np.eye(3) / 4.0
    np.testing.assert_allclose(draws.mean(0), np.linalg.solve(P, H.T @ np.linalg.solve(C, y)), atol=0.03)
    np.testing.assert_allclose(np.cov(draws.T), np.linalg.inv(P), atol=0.03)


def scales_of(group):
    return {name: {scale.name: scale.power for scale in scaling.scales} for name, scaling in group.scaled}


def effects_written(centred):
    def model(y=COUNTS):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 3):
            b = numpyro.sample("b", dist.Normal(0.0, tau if centred else 1.0))
        effect = numpyro.deterministic("effect", b if centred else tau * b)
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(f + effect[GROUP])), obs=y)

    return model


@pytest.mark.exhaustive
def test_effects_times_their_scale_have_the_posterior_of_centred_ones():
    ends = []
    for centred in (True, False):
        model = effects_written(centred)
        guide = sgp.AutoTSVGP(model, Z)
        svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.adam(0.02)), sgp.QuadratureELBO())
        result = svi.run(jax.random.key(0), 20, progress_bar=False)
        (group,) = result.params["auto_latents"].groups
        assert group.latents == ("b",)
        assert scales_of(group) == ({} if centred else {"b": {"tau": 1.0}})
        draws = guide.sample_posterior(jax.random.key(1), result.params, y=None, sample_shape=(5,))
        estimate = TraceMeanField_ELBO(num_particles=4000).loss(jax.random.key(1), result.params, model, guide)
        ends.append((result.losses, draws["effect"], draws["f"], estimate))
    for centred, other in zip(*ends, strict=True):
        np.testing.assert_allclose(centred, other, rtol=1e-8, atol=1e-8)


def test_a_factor_of_either_sign_is_no_scale():
    # Quantiles of b would be those of the product in the opposite order.
    def model(y=REALS):
        s = numpyro.sample("s", dist.Normal(-2.0, 0.5))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + s * b * W[:, 1], 0.3), obs=y)

    guide = sgp.AutoTSVGP(model, Z)
    svi = SVI(model, guide, optax.adam(0.1), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0)))
    (group,) = guide.joint_groups(params)
    assert group.scaled == ()
    low, high = guide.quantiles(params, [0.1, 0.9], y=None)["b"]
    assert low < high


@pytest.mark.thorough
def test_a_positive_factor_in_any_form_is_a_scale():
    def model(scale):
        s = numpyro.sample("s", scale)
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + W @ (s * b), 0.3), obs=REALS)

    scales = [
        dist.HalfNormal(1.0),
        dist.Uniform(jnp.asarray(0.0), 2.0),
        dist.LogNormal(0.0, 1.0).expand([1]).to_event(1),
    ]
    for scale, found in zip([*scales, dist.Uniform(-1.0, 2.0)], [{"b": {"s": 1.0}}] * 3 + [{}], strict=True):
        trace = handlers.trace(handlers.seed(sgp.AutoTSVGP(model, Z), 0)).get_trace(scale)
        assert scales_of(trace["auto_latents"]["value"].groups[0]) == found


def varying(written):
    """Coefficients of two covariates in each of three groups, written with scales."""

    def model(y=REALS):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        t = numpyro.sample("t", dist.HalfNormal(1.0).expand([2]).to_event(1))
        u = numpyro.sample("u", dist.HalfNormal(1.0).expand([3]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + written(s, t, u, b), 0.3), obs=y)

    return model


def in_groups(b):
    return jnp.sum(W * b[GROUP], axis=-1)


WRITTEN_WITH_SCALES = {
    "one": (lambda s, t, u, b: in_groups(s * b), {"s": 1.0}),
    "each column": (lambda s, t, u, b: in_groups(b * t), {"t": 1.0}),
    "each row": (lambda s, t, u, b: in_groups(u[:, None] * b), {"u": 1.0}),
    "horseshoe": (lambda s, t, u, b: in_groups(b * t * s), {"s": 1.0, "t": 1.0}),
    "rows and columns": (lambda s, t, u, b: in_groups(jnp.outer(u, t) * b), {"t": 1.0, "u": 1.0}),
    "one, late": (lambda s, t, u, b: s * in_groups(b), {"s": 1.0}),
    "variances": (lambda s, t, u, b: in_groups(jnp.sqrt(2.0 * t) * b), {"t": 0.5}),
    "precisions": (lambda s, t, u, b: in_groups(b / jnp.sqrt(t)), {"t": -0.5}),
    "of precisions": (lambda s, t, u, b: in_groups(jax.lax.rsqrt(t) * b), {"t": -0.5}),
    "squares": (lambda s, t, u, b: in_groups(s**2 / t * b), {"s": 2.0, "t": -1.0}),
    "two products": (lambda s, t, u, b: in_groups(s * b) + in_groups(t * b), {}),
    "otherwise, too": (lambda s, t, u, b: in_groups(t * b) + t[0], {}),
    "a sum": (lambda s, t, u, b: in_groups((s + t) * b), {}),
    "a sign": (lambda s, t, u, b: in_groups(-t * b), {}),
    "a scale of sums": (lambda s, t, u, b: in_groups(b).sum() * W @ t, {}),
    "in other places": (lambda s, t, u, b: in_groups((u * b.T).T), {}),
}


@pytest.mark.parametrize("name", WRITTEN_WITH_SCALES)
@pytest.mark.thorough
def test_scales_are_found_in_products_only(name):
    written, found = WRITTEN_WITH_SCALES[name]
    model = varying(written)
    trace = handlers.trace(handlers.seed(sgp.AutoTSVGP(model, Z), 0)).get_trace()
    (group,) = trace["auto_latents"]["value"].groups
    assert scales_of(group) == ({"b": found} if found else {})
    assert set(group.latents).isdisjoint(found)


@pytest.mark.thorough
def test_a_number_that_is_spread_over_several_scales_is_no_product_of_its_own_shape():
    def model():
        t = numpyro.sample("t", dist.HalfNormal(1.0).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + W @ (t * b), 0.3), obs=REALS)

    trace = handlers.trace(handlers.seed(sgp.AutoTSVGP(model, Z), 0)).get_trace()
    (group,) = trace["auto_latents"]["value"].groups
    assert group.scaled == ()


@pytest.mark.thorough
@pytest.mark.parametrize("joint", ["auto", ("f", "b")])
def test_coefficients_have_the_exact_posterior_given_scales_of_several_shapes(joint):
    model = varying(lambda s, t, u, b: in_groups(jnp.sqrt(s) * u[:, None] * b / t))
    guide = sgp.AutoTSVGP(model, X, joint=joint)
    svi = SVI(model, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0))
    params = svi.get_params(state)
    for name in "stu":  # known scales
        params[f"{name}_auto_scale"] = jnp.full_like(params[f"{name}_auto_scale"], 1e-9)
    params = svi.run(jax.random.key(0), 3, init_params=params, progress_bar=False).params
    assert guide.joint_groups(params)[0].scaled
    scales = guide.median(params, y=None)
    draws = guide.sample_posterior(jax.random.key(1), params, y=None, sample_shape=(20000,))
    sd = np.sqrt(scales["s"]) * np.ones((3, 2)) * np.asarray(scales["u"])[:, None] / np.asarray(scales["t"])
    H = np.zeros((N, 3, 2))
    H[np.arange(N), GROUP] = W
    A = H.reshape(N, 6) * sd.ravel()
    C = np.asarray(KERNEL(X, X)) + 0.09 * np.eye(N)
    P = A.T @ np.linalg.solve(C, A) + np.eye(6)
    mean = np.linalg.solve(P, A.T @ np.linalg.solve(C, REALS))
    b = draws["b"].reshape(-1, 6)
    np.testing.assert_allclose(b.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(np.cov(b.T), np.linalg.inv(P), atol=0.03)


MIXED = {
    "rows": (lambda t, L, z: z @ (t[:, None] * L).T, (3, 2)),
    "columns": (lambda t, L, z: ((t[:, None] * L) @ z).T, (2, 3)),
    "einsum": (lambda t, L, z: jnp.einsum("ij,gj->gi", t[:, None] * L, z), (3, 2)),
    "turned": (lambda t, L, z: ((t[:, None] * L) @ z.T).T, (3, 2)),
    "scaled later": (lambda t, L, z: t * (z @ L.T), (3, 2)),
    "scaled and turned": (lambda t, L, z: (t[:, None] * (L @ z)).T, (2, 3)),
    "scaled across": (lambda t, L, z: jnp.diag(t) @ (z @ L.T)[:2], (3, 2)),
    "upper": (lambda t, L, z: z @ (t[:, None] * L), (3, 2)),
    "weighted before": (lambda t, L, z: (z * W[:3]) @ (t[:, None] * L).T, (3, 2)),
    "twice": (lambda t, L, z: z @ (t[:, None] * L).T + z, (3, 2)),
}


def correlated(name):
    """Correlated coefficients of two covariates in each of three groups, from independent numbers."""
    written, shape = MIXED[name]

    def model(y=REALS):
        t = numpyro.sample("t", dist.HalfNormal(1.0).expand([2]).to_event(1))
        L = numpyro.sample("L", dist.LKJCholesky(2, 1.0))
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand(shape).to_event(2))
        b = numpyro.deterministic("b", written(t, L, z))
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f + in_groups(b), 0.5), obs=y)

    return model


@pytest.mark.thorough
@pytest.mark.parametrize("name", MIXED)
def test_a_triangular_matrix_is_a_scale_where_it_is_one(name):
    trace = handlers.trace(handlers.seed(sgp.AutoTSVGP(correlated(name), Z), 0)).get_trace()
    (group,) = trace["auto_latents"]["value"].groups
    found = {"scaled across": {"L"}, "upper": set(), "twice": set(), "weighted before": set()}.get(name, {"L", "t"})
    assert set(scales_of(group).get("z", {})) == found
    assert set(group.latents) == {"z", "t", "L"} - found


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["rows", "columns", "turned", "scaled later", "scaled and turned"])
def test_correlated_coefficients_have_the_exact_posterior_given_their_scales(name):
    model = correlated(name)
    guide = sgp.AutoTSVGP(model, X)
    svi = SVI(model, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0)))
    params["t_auto_loc"], params["L_auto_loc"] = jnp.log(jnp.array([0.5, 1.5])), jnp.array([-0.8])
    for each in "tL":  # known scales
        params[f"{each}_auto_scale"] = jnp.full_like(params[f"{each}_auto_scale"], 1e-9)
    params = svi.run(jax.random.key(0), 3, init_params=params, progress_bar=False).params
    scales = guide.median(params, y=None)
    root = np.asarray(scales["t"])[:, None] * np.asarray(scales["L"])
    H = np.zeros((N, 3, 2))
    H[np.arange(N), GROUP] = W
    A = H.reshape(N, 6)
    C = np.asarray(KERNEL(X, X)) + 0.25 * np.eye(N)
    P = A.T @ np.linalg.solve(C, A) + np.kron(np.eye(3), np.linalg.inv(root @ root.T))
    mean, covariance = np.linalg.solve(P, A.T @ np.linalg.solve(C, REALS)), np.linalg.inv(P)
    draws = guide.sample_posterior(jax.random.key(1), params, y=None, sample_shape=(20000,))
    b = draws["b"].reshape(-1, 6)
    np.testing.assert_allclose(b.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(np.cov(b.T), covariance, atol=0.04)
    low, high = guide.quantiles(params, [0.15865525393145707, 0.8413447460685429], y=None)["z"]
    unmixed = np.kron(np.eye(3), np.linalg.inv(root))
    sd = np.sqrt(np.diag(unmixed @ covariance @ unmixed.T)).reshape(3, 2)
    middle = (unmixed @ mean).reshape(3, 2)
    sd, middle = (sd.T, middle.T) if MIXED[name][1] == (2, 3) else (sd, middle)
    np.testing.assert_allclose(high - low, 2.0 * sd, rtol=1e-4)
    np.testing.assert_allclose(0.5 * (high + low), middle, atol=1e-4)


def test_a_full_step_that_goes_far_too_far_is_refused_and_training_goes_on():
    # Towards counts of hundreds the first step leads to a loss of 1e58, from where there is no way back.
    def model():
        a = numpyro.sample("a", dist.Normal(0.0, 3.0))
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(a + f)), obs=np.round(100.0 * np.exp(np.sin(X[:, 0]))))

    _, result = fitted(model, sgp.AutoTSVGP(model, Z), 25)
    assert 0 < sgp.num_refused(result.state) < 12
    assert result.losses[1] > 1e20
    assert result.losses[-1] < 0.1 * result.losses[0]


@pytest.mark.thorough
def test_what_is_refused_does_not_depend_on_the_units_of_the_outcomes():
    # On minibatches the loss is now above zero, now below it, and rises by more than it is large.
    def refused(unit):
        def model(X, y=None, num_data=None):
            a = numpyro.sample("a", dist.Normal(0.0, 1.0))
            f = numpyro.sample("f", sgp.GaussianProcess(SE(1.0), X))
            with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
                numpyro.sample("y", dist.Normal(unit * (a + f), unit * 0.24), obs=y)

        rng = np.random.default_rng(0)
        x = rng.uniform(0.0, 6.0, (1000, 1))
        y = unit * (np.sin(x[:, 0]) + 0.24 * rng.normal(size=len(x)))
        svi = SVI(model, sgp.AutoTSVGP(model, Z), sgp.NaturalGradient(0.1), sgp.QuadratureELBO())
        result = sgp.fit(svi, jax.random.key(0), (x, y), batch_size=20, num_steps=200, progress_bar=False)
        return int(sgp.num_refused(result.state))

    assert refused(1.0) == refused(100.0) <= 4


@pytest.mark.parametrize("kind", ["noise", "elsewhere"])
@pytest.mark.exhaustive
def test_a_scale_that_terms_know_otherwise_stays_a_member(kind):
    def model():
        tau = numpyro.sample("tau", dist.HalfNormal(1.0).expand([1]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        f = numpyro.sample("f", gp(KERNEL))
        eta = f + (tau * b)[GROUP] + (b[GROUP] if kind == "elsewhere" else 0.0)
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(eta, tau[0] if kind == "noise" else 0.3), obs=REALS)

    trace = handlers.trace(handlers.seed(sgp.AutoTSVGP(model, Z), 0)).get_trace()
    (group,) = trace["auto_latents"]["value"].groups
    assert group.latents == ("tau", "b")
    assert group.scaled == ()


def of_classes(written):
    """Three classes, the last of which has the logit zero."""

    def model():
        f, g = numpyro.sample("f", gp(KERNEL)), numpyro.sample("g", gp(SE(2.0)))
        with numpyro.plate("data", N):
            written(f, g)

    return model


def with_a_reference_class(f, g):
    numpyro.sample("y", dist.Categorical(logits=jnp.stack([f, g, jnp.zeros_like(f)], axis=-1)), obs=GROUP)


def counts_of_classes(f, g):
    logits = jnp.stack([f, g, jnp.zeros_like(f)], axis=-1)
    numpyro.sample("y", dist.Multinomial(1, logits=logits), obs=np.eye(3)[GROUP])


def of_two_predictors(f, g):
    chosen = jnp.where(GROUP == 0, jnp.exp(f), jnp.where(GROUP == 1, jnp.exp(g), 1.0))
    numpyro.factor("y", jnp.log(chosen / (1.0 + jnp.exp(f) + jnp.exp(g))))


@pytest.mark.thorough
@pytest.mark.parametrize("written", [with_a_reference_class, counts_of_classes])
def test_a_reference_class_needs_no_predictor_and_no_draws(written):
    exact, guide = of_classes(of_two_predictors), sgp.AutoTSVGP(of_classes(of_two_predictors), Z)
    params = (
        SVI(exact, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
        .run(jax.random.key(0), 20, progress_bar=False)
        .params
    )
    wanted = sgp.QuadratureELBO().loss(jax.random.key(1), params, exact, guide)
    model = of_classes(written)
    other = sgp.AutoTSVGP(model, Z)
    np.testing.assert_allclose(sgp.QuadratureELBO().loss(jax.random.key(1), params, model, other), wanted, rtol=1e-10)


MIXTURES = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])


@pytest.mark.exhaustive
def test_a_predictor_without_variance_is_drawn_as_it_is():
    def mixed(f, g):
        # Four numbers of two functions, of which one is fixed and one a sum.
        h = jnp.stack([f, g, jnp.zeros_like(f)], axis=-1) @ MIXTURES
        chosen = jnp.take_along_axis(h, GROUP[:, None], axis=-1)[:, 0]
        norm = jnp.log(jnp.sum(jnp.exp(h[:, :3]), axis=-1)) + jnp.log(1.0 + 0.5 * jnp.exp(h[:, 3]))
        numpyro.factor("y", chosen - norm)

    model, exact = of_classes(mixed), of_classes(lambda f, g: numpyro.factor("y", mixed_density(f, g)))
    guide, other = sgp.AutoTSVGP(model, Z), sgp.AutoTSVGP(exact, Z)
    params = (
        SVI(exact, other, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
        .run(jax.random.key(0), 20, progress_bar=False)
        .params
    )
    wanted = sgp.QuadratureELBO().loss(jax.random.key(1), params, exact, other)
    drawn = sgp.QuadratureELBO(num_samples=4000).loss(jax.random.key(1), params, model, guide)
    np.testing.assert_allclose(drawn, wanted, rtol=1e-3)


def mixed_density(f, g):
    chosen = jnp.where(GROUP == 0, jnp.exp(f), jnp.where(GROUP == 1, jnp.exp(g), 1.0))
    return jnp.log(chosen / (1.0 + jnp.exp(f) + jnp.exp(g)) / (1.0 + 0.5 * jnp.exp(f) * jnp.exp(g)))


# Which latents are members.


def with_kernel_latents():
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.1))
    a = numpyro.sample("a", dist.Normal())
    f = numpyro.sample("f", sgp.GaussianProcess(SE(scale), X))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(f + a)), obs=COUNTS)


def two_that_do_not_meet():
    f, g = (numpyro.sample(name, sgp.GaussianProcess(SE(1.0), X)) for name in "fg")
    a = numpyro.sample("a", dist.Normal())
    numpyro.sample("y", dist.Poisson(jnp.exp(f + a)).to_event(1), obs=COUNTS)
    numpyro.sample("z", dist.Poisson(jnp.exp(g)).to_event(1), obs=COUNTS)


def deep():
    f = numpyro.sample("f", sgp.GaussianProcess(SE(1.0), X))
    g = numpyro.sample("g", sgp.GaussianProcess(SE(1.0), f[:, None]))
    a = numpyro.sample("a", dist.Normal())
    numpyro.sample("y", dist.Poisson(jnp.exp(g + a)).to_event(1), obs=COUNTS)


def of_rows():
    f = numpyro.sample("f", sgp.GaussianProcess(SE(1.0), X))
    a = numpyro.sample("a", dist.Normal())
    with numpyro.plate("data", 100, subsample_size=N):
        e = numpyro.sample("e", dist.Normal())
        numpyro.sample("y", dist.Poisson(jnp.exp(f + a + e)), obs=COUNTS)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (poisson, [(("f",), ("a", "b"), ("a", "b"))]),
        (everything, [(("f", "g"), ("mean", "effects", "c", "low", "skew"), ("mean", "effects", "c"))]),
        (with_kernel_latents, [(("f",), ("a",), ("a",))]),
        (two_that_do_not_meet, [(("f",), ("a",), ("a",))]),
        (of_rows, [(("f",), ("a",), ("a",))]),
    ],
)
def test_members_are_what_meets_in_a_term(model, expected):
    inducing = {"f": Z, "g": Z} if model in (everything, two_that_do_not_meet) else Z
    for base, groups in ((AutoNormal, expected), (AutoDelta, [])):
        if base is AutoDelta and model is everything:
            groups = [(("f", "g"), (), ())]
        guide = sgp.AutoTSVGP(model, inducing, base=base)
        trace = handlers.trace(handlers.seed(guide, 0)).get_trace()
        found = trace["auto_latents"]["value"].groups
        assert [(each.sites, each.latents, each.gaussian) for each in found] == groups


@pytest.mark.exhaustive
def test_a_gp_inside_a_gp_is_not_joint_and_latents_stay_with_the_base_guide():
    guide = sgp.AutoTSVGP(deep, {"f": Z, "g": np.linspace(-2.0, 2.0, 5)[:, None]})
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace()
    assert trace["auto_latents"]["value"].groups == ()
    assert np.isfinite(fitted(deep, guide, 3, 0.1)[1].losses).all()


def test_a_latent_around_a_gp_is_not_joint():
    def model():
        f = numpyro.sample("f", sgp.GaussianProcess(SE(1.0), X))
        around = numpyro.sample("around", dist.Normal(f, 0.1).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(f + around)).to_event(1), obs=COUNTS)

    trace = handlers.trace(handlers.seed(sgp.AutoTSVGP(model, Z), 0)).get_trace()
    assert trace["auto_latents"]["value"].groups == ()


def test_gps_of_one_term_are_joint_together_or_not_at_all():
    def model():
        f, g = (numpyro.sample(name, sgp.GaussianProcess(SE(1.0), X)) for name in "fg")
        numpyro.sample("y", dist.Poisson(jnp.exp(f + g)).to_event(1), obs=COUNTS)

    guide = sgp.AutoSparseGP(model, {"f": sgp.Dual(Z), "g": sgp.Whitened(Z)})
    assert handlers.trace(handlers.seed(guide, 0)).get_trace()["auto_latents"]["value"].groups == ()


@pytest.mark.thorough
def test_the_structure_is_found_within_jit_too():
    guide = sgp.AutoTSVGP(everything, Z)
    svi = SVI(everything, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    groups = svi.get_params(jax.jit(svi.init)(jax.random.key(0)))["auto_latents"].groups
    assert groups == svi.get_params(svi.init(jax.random.key(0)))["auto_latents"].groups


def test_a_guide_is_initialised_again_with_the_same_members():
    guide = sgp.AutoTSVGP(with_kernel_latents, Z)
    svi = SVI(with_kernel_latents, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    first, second = (svi.get_params(svi.init(jax.random.key(seed))) for seed in (0, 1))
    assert first["auto_latents"] == second["auto_latents"]
    assert first.keys() == second.keys()


@pytest.mark.exhaustive
def test_names_choose_members():
    guide = sgp.AutoTSVGP(poisson, Z, joint=("f", "a"))
    _, result = fitted(poisson, guide, 3, 0.5)
    assert [each.latents for each in result.params["auto_latents"].groups] == [("a",)]
    assert set(guide.sample_posterior(jax.random.key(0), result.params)) >= {"a", "b", "f"}


@pytest.mark.parametrize(
    ("joint", "message"),
    [
        (("f", "scale"), r"names \['scale'\], which cannot be"),
        (("f", "nothing"), r"names \['nothing'\], which cannot be"),
        ("f", 'must be "auto", False or a tuple'),
        (True, 'must be "auto", False or a tuple'),
    ],
)
def test_mistakes_in_joint_raise(joint, message):
    with pytest.raises(ValueError, match=message):
        handlers.seed(sgp.AutoTSVGP(with_kernel_latents, Z, joint=joint), 0)()


def test_gps_of_one_term_are_members_together():
    with pytest.raises(ValueError, match=r"leaves out \['g'\]"):
        handlers.seed(sgp.AutoTSVGP(everything, Z, joint=("f", "c")), 0)()


def test_many_latents_are_left_to_the_base_guide_with_a_warning():
    def model():
        b = numpyro.sample("b", dist.Normal().expand([1001]).to_event(1))
        f = numpyro.sample("f", sgp.GaussianProcess(SE(1.0), X))
        numpyro.sample("y", dist.Poisson(jnp.exp(f + np.eye(N, 1001) @ b)).to_event(1), obs=COUNTS)

    with pytest.warns(UserWarning, match="1001 numbers, too many"):
        trace = handlers.trace(handlers.seed(sgp.AutoTSVGP(model, Z), 0)).get_trace()
    assert trace["auto_latents"]["value"].groups == ()


def test_sites_that_cannot_be_joint_are_warned_of():
    with pytest.warns(UserWarning, match=r"independent of \['a', 'b'\].*joint=False"):
        handlers.seed(sgp.AutoTSVGP(poisson, Z, sites="per_datum"), 0)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handlers.seed(sgp.AutoTSVGP(poisson, Z, joint=False, sites="per_datum"), 0)()


def test_a_latent_of_a_prior_mean_is_joint_where_one_of_the_terms_would_be():
    def model(where):
        a = numpyro.sample("a", dist.Normal())
        kernel = SE(jnp.exp(a) if where == "kernel" else 1.0)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, mean=a))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=COUNTS)

    def groups(where="mean", **options):
        trace = handlers.trace(handlers.seed(sgp.AutoTSVGP(model, Z, **options), 0)).get_trace(where)
        return trace["auto_latents"]["value"]

    (group,) = groups().groups
    assert (group.latents, group.means) == (("a",), ("f",))
    for options in ({"where": "kernel"}, {"joint": False}, {"base": AutoDelta}):
        assert groups(**options).groups == ()
    with pytest.warns(UserWarning, match=r"independent of \['a'\].*joint=False"):
        groups(sites="per_datum")


# Working with one.


@pytest.fixture(scope="module")
def summed():
    with jax.enable_x64(True):

        def model(y=COUNTS):
            f = numpyro.sample("f", sgp.GaussianProcess(SE(1.0), X))
            g = numpyro.sample("g", sgp.GaussianProcess(SE(1.0), W[:, 1:]))
            a = numpyro.sample("a", dist.Normal(0.0, 2.0))
            with numpyro.plate("data", N):
                numpyro.sample("y", dist.Poisson(jnp.exp(f + g + a)), obs=y)

        guide = sgp.AutoTSVGP(model, {"f": Z, "g": np.linspace(-2.0, 2.0, 6)[:, None]})
        svi, result = fitted(model, guide, 30, 0.5)
        return model, svi, result


@pytest.mark.exhaustive
def test_drawn_functions_of_several_sites_go_together(summed):
    _, svi, result = summed
    functions = svi.guide.sample_functions(jax.random.key(1), result.params, num_samples=3000)
    drawn = functions["f"](X) + functions["g"](W[:, 1:])
    draws = svi.guide.sample_posterior(jax.random.key(2), result.params, sample_shape=(3000,))
    expected = draws["f"] + draws["g"]
    alone = np.sqrt(np.var(draws["f"], axis=0) + np.var(draws["g"], axis=0))
    np.testing.assert_allclose(drawn.std(0) / expected.std(0), 1.0, atol=0.08)
    assert np.mean(expected.std(0) / alone) < 0.95  # they are correlated, or this would show nothing


def test_medians_and_quantiles_are_those_of_draws(summed):
    _, svi, result = summed
    draws = svi.guide.sample_posterior(jax.random.key(2), result.params, sample_shape=(4000,))
    medians = svi.guide.median(result.params, y=COUNTS)
    np.testing.assert_allclose(medians["a"], np.median(draws["a"]), atol=0.05)
    low, high = svi.guide.quantiles(result.params, jnp.asarray([0.1, 0.9]), y=COUNTS)["a"]
    np.testing.assert_allclose([low, high], np.quantile(draws["a"], [0.1, 0.9]), atol=0.06)
    with pytest.raises(ValueError, match="without the model's arguments"):
        svi.guide.median(result.params)


@pytest.mark.thorough
def test_importance_ratios_have_the_bound_as_their_mean(summed):
    _, svi, result = summed
    data = sgp.to_arviz(jax.random.key(3), svi, result, y=COUNTS, num_samples=2000)
    stats = data["sample_stats"]
    ratios = np.asarray(stats["lp"]) - np.asarray(stats["log_q"])
    np.testing.assert_allclose(ratios.mean(), -result.losses[-1], atol=5.0 * ratios.std() / np.sqrt(2000.0))
    assert sgp.diagnostics.psis_khat(jax.random.key(4), svi, result, y=COUNTS) < 0.7


def test_a_fresh_guide_predicts_from_parameters_alone(summed):
    model, svi, result = summed
    params = pickle.loads(pickle.dumps(result.params))
    fresh = sgp.AutoTSVGP(model, {"f": Z, "g": np.linspace(-2.0, 2.0, 6)[:, None]})
    samples = [
        Predictive(model, guide=guide, params=params, num_samples=5)(jax.random.key(5), None)["y"]
        for guide in (fresh, svi.guide)
    ]
    np.testing.assert_array_equal(*samples)


@pytest.mark.thorough
def test_minibatches_ask_for_the_whole_direction_on_average():
    def model(x, w, y, num_data=N):
        a, b = coefficients()
        f = numpyro.sample("f", gp(KERNEL, x))
        with numpyro.plate("data", num_data, subsample_size=len(x)):
            numpyro.sample("y", dist.Poisson(jnp.exp(a + f + w @ b)), obs=y)

    svi = SVI(model, sgp.AutoTSVGP(model, Z), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, W, COUNTS)

    def after(rows):
        new, _ = svi.update(state, X[rows], W[rows], COUNTS[rows])
        return svi.get_params(new)["f_auto_joint_sites"]

    whole, *parts = (after(np.asarray(rows)) for rows in (range(N), *np.arange(N).reshape(3, -1)))
    mean = jax.tree.map(lambda *each: sum(each) / 3.0, *parts)
    np.testing.assert_allclose(mean.Lambda2, whole.Lambda2, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(mean.lambda1, whole.lambda1, rtol=1e-8, atol=1e-8)


@pytest.mark.filterwarnings("ignore:Currently, SVI with")  # NumPyro knows no discrete sites that a guide draws
@pytest.mark.parametrize(
    ("likelihood", "joint"),
    [("count", "auto"), *(pytest.param(*each, marks=pytest.mark.thorough) for each in MISSING)],
)
@pytest.mark.thorough
def test_missing_outcomes_are_left_out_of_the_bound_and_drawn_at_prediction(likelihood, joint):
    seen = jnp.asarray(np.arange(N) % 4 > 0)
    y = COUNTS if likelihood == "count" else np.where(seen, REALS, np.nan)

    def term(eta):
        return dist.Poisson(jnp.exp(eta)) if likelihood == "count" else dist.Normal(eta, 0.3)

    def with_obs_mask(y=y):
        a = numpyro.sample("a", dist.Normal())
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N):
            numpyro.sample("y", term(a + f), obs=y, obs_mask=seen if y is not None else None)

    def with_mask(y=y):
        a = numpyro.sample("a", dist.Normal())
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N), handlers.mask(mask=seen):
            numpyro.sample("y", term(a + f), obs=y)

    ends = [fitted(model, sgp.AutoTSVGP(model, Z, joint=joint), 5, 0.5)[1] for model in (with_obs_mask, with_mask)]
    assert ends[0].params["auto_latents"].names == ("a",)
    if joint:
        np.testing.assert_allclose(ends[0].losses, ends[1].losses, rtol=1e-10)
    guide = sgp.AutoTSVGP(with_obs_mask, Z, joint=joint)
    drawn = Predictive(with_obs_mask, guide=guide, params=ends[0].params, num_samples=200)(jax.random.key(0))["y"]
    assert np.all(np.var(drawn[:, seen], axis=0) < 1e-20)
    assert np.all(np.var(drawn[:, ~seen], axis=0) > 0.0)


def test_an_outcome_that_is_no_number_raises():
    def model():
        f = numpyro.sample("f", gp(KERNEL))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=np.where(np.arange(N) < 2, np.nan, REALS))

    with pytest.raises(ValueError, match=r"'y' have 2 entries that are NaN.*handlers\.mask.*obs_mask"):
        fitted(model, sgp.AutoTSVGP(model, Z), 1)


@pytest.mark.exhaustive
def test_a_loss_times_a_factor_has_the_same_steps():
    scaled = handlers.scale(everything, scale=0.01)
    ends = [
        fitted(model, sgp.AutoTSVGP(model, Z), 4, 0.5)[1].params["f_auto_joint_sites"] for model in (everything, scaled)
    ]
    np.testing.assert_allclose(ends[0].Lambda2, ends[1].Lambda2, rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
def test_inducing_inputs_can_be_trained():
    guide = sgp.AutoTSVGP(poisson, Z[::2], learn_inducing=True)
    _, result = fitted(poisson, guide, 200, 0.5)
    fixed = fitted(poisson, sgp.AutoTSVGP(poisson, Z[::2]), 50, 0.5)[1]
    assert np.abs(result.params["f_auto_inducing"].Z - Z[::2]).max() > 0.05
    assert result.losses[-1] < fixed.losses[-1]


@pytest.mark.exhaustive
def test_float32_stays_float32():
    with jax.enable_x64(False):

        def model():
            b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
            s = numpyro.sample("s", dist.HalfNormal(1.0))
            f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, jnp.asarray(X, jnp.float32)))
            with numpyro.plate("data", N):
                mean = f + jnp.asarray(W, jnp.float32) @ b
                numpyro.sample("y", dist.Normal(mean, s), obs=jnp.asarray(REALS, jnp.float32))

        guide = sgp.AutoTSVGP(model, jnp.asarray(Z, jnp.float32))
        _, result = fitted(model, guide, 30, 0.5)
        assert result.losses.dtype == jnp.float32
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(result.params))
        assert np.isfinite(result.losses).all()


@pytest.mark.exhaustive
def test_outcomes_of_several_classes_are_drawn():
    labels = RNG.integers(0, 3, N)

    def model():
        with numpyro.plate("class", 3):
            f = numpyro.sample("f", sgp.GaussianProcess(SE(1.0), X))
            a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Categorical(logits=(f + a[:, None]).T), obs=labels)

    guide = sgp.AutoTSVGP(model, Z)
    params = arbitrary(model, guide)
    draws = jax.vmap(lambda key: sgp.QuadratureELBO(num_samples=64).loss(key, params, model, guide))(
        jax.random.split(jax.random.key(0), 50)
    )
    estimate = TraceMeanField_ELBO(num_particles=20000).loss(jax.random.key(1), params, model, guide)
    assert abs(draws.mean() - estimate) < 0.05
