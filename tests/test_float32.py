"""float32 with 512 inducing inputs, many of them equal, at extreme scales: right, or refused and counted, never wrong.

Right means close to dense float64 formulas at the same float32 numbers, with the same jitter of 1e-4. The unit roundoff
of float32 is u = 6e-8. Tolerances, in units of the prior's standard deviation or variance:

* mean, 5e-3. The jitter bounds the condition number of the root L of Kuu by (M / 1e-4)^½ = 2.3e3, and rounding errors of
  M terms add up like M^½ = 23: L⁻¹Kuf is known to 23 · 2.3e3 · u = 3e-3.
* variance, 6e-5: k − |A|² and |T|² are sums of M squares, each known to M u = 3e-5.
* loss, 1e-3 of its value, for errors of the means next to residuals y − m of one standard deviation; and what the errors of
  the variances v come to through the slopes 1 / 2σ² of N rows, 1.8 nats at a noise of a tenth of the standard deviation.
"""

import functools
import math

from grids import representative
from guides import GUIDES
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
import optax
import oracles
from problems import log_normal
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.inducing import InducingPoints
from numpyro_sgp.kernels import SquaredExponential
from numpyro_sgp.posteriors.sites import DatumSites
from numpyro_sgp.posteriors.weight_space.formulas import tempering

# Four columns: from there on distances are made of matrix products, which cancel where inputs are far from the origin.
N, M, D = 600, 512, 4
JITTER = 1e-4
RNG = np.random.default_rng(50)
X, Z = RNG.uniform(size=(N, D)), RNG.uniform(size=(M, D))
Z[128:256] = Z[:128]  # duplicates
Z[256:384] = Z[:128]  # near-duplicates, when a gap is added
X[:64] = Z[:64]  # inducing inputs among the data, twice
X[64:128] = Z[:64]  # and near them
GAP, NOISE = RNG.normal(size=(128, D)), RNG.normal(size=N)


# Factor and offset of the inputs, lengthscale in units of their width, prior variance, noise (standard deviation).
SETTINGS = {
    **{
        f"lengthscale_{lengthscale:g}-variance_{variance:g}": (1.0, 0.0, lengthscale, variance, 0.1 * variance**0.5)
        for lengthscale in (1e-3, 1.0, 1e3)
        for variance in (1e-6, 1.0, 1e6)
    },
    "inputs_of_scale_1e6": (1e6, 0.0, 1.0, 1.0, 0.1),
    # One unit of the last place is 1/16 there: a third of the lengthscale, and most inputs are equal in some column.
    "inputs_plus_1e6": (1.0, 1e6, 0.2, 1.0, 0.1),
    "inputs_of_scale_1e6_plus_1e6": (1e6, 1e6, 0.2, 1.0, 0.1),
}
# A signal a thousand times the noise that the kernel cannot follow: the errors of L⁻¹Kuf are then features to fit it with.
STRONG_SIGNAL = (1.0, 0.0, 1e3, 1e6, 1.0)
# Near-duplicates as far apart as half a lengthscale, which is a thousandth of the box that the inputs are in.
HALF_A_LENGTHSCALE = (1.0, 0.0, 1e-3, 1.0, 0.1, 5e-4 / D**0.5)
# Corners, and what is in none of them.
SOME = (
    "lengthscale_0.001-variance_1e+06",
    "lengthscale_1-variance_1",
    "lengthscale_1000-variance_1e-06",
    "inputs_plus_1e6",
)
by_setting = pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, id=name, marks=[] if name in SOME else pytest.mark.thorough)
        for name, setting in SETTINGS.items()
    ],
)


def model(X, y, lengthscale, variance, noise):
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(lengthscale, variance), X, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def problem(factor, offset, lengthscale, variance, noise, gap=1e-6):
    """Inducing inputs and the arguments of the model, as float32 numbers; `gap` from inputs to their near-duplicates."""
    X_gap, Z_gap = X.copy(), Z.copy()
    X_gap[64:128] += gap * GAP[:64]
    Z_gap[256:384] -= gap * GAP
    y = math.sqrt(variance) * np.sin(5.0 * X[:, 0]) + noise * NOISE
    values = factor * Z_gap + offset, factor * X_gap + offset, y, factor * lengthscale, variance, noise
    inducing, *args = (np.float32(value) for value in values)
    return inducing, args


@functools.cache
def blocks(setting):
    """Kuu, Kuf and Kff in float64."""
    inducing, (inputs, _, lengthscale, variance, _) = problem(*setting)
    u, x = np.float64(inducing), np.float64(inputs)
    pairs = (u, u), (u, x), (x, x)
    Kuu, Kuf, Kff = (oracles.se(a, b, np.float64(lengthscale), np.float64(variance)) for a, b in pairs)
    return oracles.with_jitter(Kuu, JITTER), Kuf, Kff


@functools.cache
def dense_optimum(setting):
    """The optimum of the bound as a loss, and the marginals there."""
    _, (_, y, _, _, noise) = problem(*setting)
    y, noise, (Kuu, Kuf, Kff) = np.float64(y), np.float64(noise), blocks(setting)
    loss = -oracles.tight_bound(Kuu, Kuf, np.diag(Kff), y, noise)
    # q(u) through the root of Kuu: forming Kuu⁻¹ would cost the oracle digits that the tolerances need.
    L = np.linalg.cholesky(Kuu)
    A = np.linalg.solve(L, Kuf)
    P = np.eye(M) + A @ A.T / noise**2
    mean, T = A.T @ np.linalg.solve(P, A @ y / noise**2), np.linalg.solve(np.linalg.cholesky(P), A)
    return loss, mean, np.diag(Kff) - np.sum(A**2, axis=0) + np.sum(T**2, axis=0)


def dense_prior(setting):
    """The loss at q(u) = p(u), and the marginals there."""
    _, (_, y, _, variance, noise) = problem(*setting)
    y, variance, noise = (np.float64(value) for value in (y, variance, noise))
    Kuu, Kuf, _ = blocks(setting)
    rest = variance - np.sum(np.linalg.solve(np.linalg.cholesky(Kuu), Kuf) ** 2, axis=0)
    loss = -np.sum(log_normal(0.0, y, noise)) + 0.5 * np.sum(
        (variance - rest) / noise**2 + np.log(1.0 + rest / noise**2)
    )
    return loss, np.zeros(N), np.full(N, variance)


def dense_whitened(setting, params):
    """Loss and marginals at the parameters of a whitened guide."""
    _, (_, y, _, _, noise) = problem(*setting)
    y, noise, (Kuu, Kuf, Kff) = np.float64(y), np.float64(noise), blocks(setting)
    own = np.float64(params["f_auto_m"]), np.tril(np.float64(params["f_auto_S_sqrt"]))
    m, S = oracles.from_whitened_root(*own, Kuu)
    mean, covariance = oracles.conditional(m, S, Kuu, Kuf, Kff)
    variance = np.diag(covariance)
    rest = np.diag(Kff) - np.sum(np.linalg.solve(np.linalg.cholesky(Kuu), Kuf) ** 2, axis=0)
    expected = log_normal(mean, y, noise) - 0.5 * (variance - rest) / noise**2 - 0.5 * np.log(1.0 + rest / noise**2)
    return oracles.gaussian_kl(m, S, Kuu) - np.sum(expected), mean, variance


def whitened_gradient(setting, m):
    """∂loss/∂m of a whitened guide: m − A (y − Aᵀm) / σ²."""
    _, (_, y, _, _, noise) = problem(*setting)
    Kuu, Kuf, _ = blocks(setting)
    A = np.linalg.solve(np.linalg.cholesky(Kuu), Kuf)
    return m - A @ (np.float64(y) - A.T @ m) / np.float64(noise) ** 2


def check_loss(setting, loss, expected, rtol=1e-3):
    variance, noise = setting[3:5]
    assert_allclose(loss, expected, rtol=rtol, atol=N * 6e-5 * variance / (2.0 * noise**2), err_msg="loss")


def check_marginals(setting, marginals, expected, variance_atol=6e-5):
    variance = setting[3]
    assert_allclose(marginals[0], expected[0], rtol=0.0, atol=5e-3 * math.sqrt(variance), err_msg="mean")
    assert_allclose(marginals[1], expected[1], rtol=0.0, atol=variance_atol * variance, err_msg="variance")


@functools.cache
def compiled(name):
    """An SVI object, its state at one setting, and a training step with the marginals after it, compiled once."""
    inducing, args = problem(*SETTINGS["lengthscale_1-variance_1"])
    guide = GUIDES[name](model, inducing)
    optim = optax.adam(1e-3) if name == "whitened" else sgp.NaturalGradient(1.0, others=optax.sgd(0.0), m_steps=0)
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_nodes=3))

    @jax.jit
    def step(state, *args):
        state, loss = svi.update(state, *args)
        q = guide.posterior(jax.random.key(0), svi.get_params(state), *args)["f"]
        return state, loss, (q.mean, q.variance)

    return svi, svi.init(jax.random.key(0), *args), step


def start(name, setting, **values):
    """SVI object, state at the prior or at given parameters, and a step that takes only the state."""
    svi, state, step = compiled(name)
    inducing, args = problem(*setting)
    params = {**svi.get_params(state), **values, "f_auto_inducing": InducingPoints(jnp.asarray(inducing))}
    if isinstance(params.get("f_auto_sites"), DatumSites):
        params["f_auto_sites"] = DatumSites.zeros((), jnp.asarray(args[0]))
    return svi, state._replace(optim_state=svi.optim.init(params)), lambda state: step(state, *args)


def check_natural_steps(name, setting):
    """Three full steps: each loss and the marginals are right, or a step is refused. Returns the count."""
    _, state, step = start(name, setting)
    state, at_prior, first = step(state)
    if int(sgp.num_refused(state)):
        assert_allclose(at_prior, np.nan)
        return 1
    check_loss(setting, at_prior, dense_prior(setting)[0])
    state, loss, marginals = step(state)
    refused = int(sgp.num_refused(state))
    if refused:
        # The sites that the first step led to are given up, for the last ones with a finite loss.
        assert_allclose(loss, np.nan)
        assert_allclose(first, np.full((2, N), np.nan))
        expected = dense_prior(setting)
    else:
        expected = dense_optimum(setting)
        check_loss(setting, loss, expected[0])
        check_marginals(setting, first, expected[1:])
    check_marginals(setting, marginals, expected[1:])
    state, loss, _ = step(state)
    check_loss(setting, loss, expected[0])
    values = jax.tree.leaves((state.optim_state[1].params, loss, marginals))
    assert {value.dtype for value in values} == {np.dtype(np.float32)}
    return refused


@by_setting
@pytest.mark.parametrize("name", representative(["natural", "tied", "per_datum"], ["tied", "per_datum"]))
def test_a_full_natural_step_in_float32_is_the_dense_optimum_and_stays_there(name, setting):
    assert check_natural_steps(name, setting) == 0


@pytest.mark.parametrize("name", ["natural", "tied", "per_datum"])
def test_a_full_natural_step_on_a_signal_too_strong_for_float32_is_right_or_refused_and_counted(name):
    check_natural_steps(name, STRONG_SIGNAL)


# |x|² + |z|² − 2xᵀz loses the distance there, so that Kuf contradicts Kuu.
@pytest.mark.parametrize("name", ["natural", "tied", "per_datum"])
def test_near_duplicates_half_a_lengthscale_apart_are_right_or_refused_and_counted(name):
    check_natural_steps(name, HALF_A_LENGTHSCALE)


@by_setting
@pytest.mark.thorough
def test_an_arbitrary_whitened_posterior_in_float32_is_right_and_so_are_those_that_gradients_lead_to(setting):
    rng = np.random.default_rng(1)
    m, S_sqrt = rng.normal(size=M), 0.5 * np.eye(M) + 0.01 * np.tril(rng.normal(size=(M, M)))
    svi, state, step = start("whitened", setting, f_auto_m=np.float32(m), f_auto_S_sqrt=np.float32(S_sqrt))
    first = state
    # The error 3e-3 of A = L⁻¹Kuf, against roots S_sqrt with entries 0.01 N(0, 1) that rotate it: 2 · 3e-3 · 0.01 · M^½.
    variance_atol = 1.4e-3
    # To first order, since this is no optimum: residuals of a standard deviation with an error of 3e-3 in all rows.
    loss_rtol = 6e-3
    for _ in range(3):
        expected = dense_whitened(setting, svi.get_params(state))
        state, loss, marginals = step(state)
        check_loss(setting, loss, expected[0], loss_rtol)
        check_marginals(setting, marginals, dense_whitened(setting, svi.get_params(state))[1:], variance_atol)
    # The first step of Adam is the sign of the gradient: right wherever that is not small.
    state, _, _ = step(first)
    moved, gradient = svi.get_params(state)["f_auto_m"] - np.float32(m), whitened_gradient(setting, m)
    large = np.abs(gradient) > 0.05 * np.max(np.abs(gradient))
    assert_allclose(np.sign(moved)[large], -np.sign(gradient)[large])


def trained(X, y):
    """Hyperparameters of a prior each, for a base guide that maximises over them."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(lengthscale, variance), X, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.exhaustive
def test_training_hyperparameters_in_float32_reaches_the_bound_of_float64():
    rng = np.random.default_rng(2)
    inputs = np.float32(np.sort(rng.uniform(0.0, 10.0, size=200)))[:, None]
    outputs = np.float32(np.sin(2.0 * inputs[:, 0]) + 0.2 * rng.normal(size=200))
    inducing = np.float32(np.linspace(0.0, 10.0, 32))[:, None]

    def fit(dtype):
        guide = GUIDES["tied"](trained, inducing.astype(dtype), base=AutoDelta)
        svi = SVI(trained, guide, sgp.NaturalGradient(0.9, others=optax.adam(0.1)), sgp.QuadratureELBO(num_nodes=3))
        result = svi.run(jax.random.key(0), 400, inputs.astype(dtype), outputs.astype(dtype), progress_bar=False)
        assert result.losses.dtype == dtype
        assert sgp.num_refused(result.state) == 0
        return np.asarray(result.losses), result.params

    in_float32, params = fit(np.float32)
    with jax.enable_x64(True):
        in_float64, _ = fit(np.float64)
    assert in_float64[-1] < in_float64[0] - 100.0
    # Both end on a slope of 1e-4 nats a step, along longer lengthscales with larger variances: 0.02 nats apart.
    assert_allclose(in_float32[-1], in_float64[-1], rtol=0.0, atol=0.1)

    lengthscale, variance, noise = (np.float64(params[f"{k}_auto_loc"]) for k in ("lengthscale", "variance", "noise"))
    u, x, kff = np.float64(inducing), np.float64(inputs), np.full(200, variance)
    Kuu = oracles.with_jitter(oracles.se(u, u, lengthscale, variance), JITTER)
    Kuf = oracles.se(u, x, lengthscale, variance)
    bound = oracles.tight_bound(Kuu, Kuf, kff, np.float64(outputs), noise)
    log_prior = sum(
        log_normal(np.log(value), location, 1.0) - np.log(value)
        for value, location in ((lengthscale, 0.0), (variance, 0.0), (noise, -1.0))
    )
    # 200 rows, each with the error M u = 2e-6 of its variance times the slope 1 / 2σ² = 11, are 5e-3 nats for one
    # product of size M; whitening, the change of basis of the sites and their posterior are some of them.
    assert_allclose(in_float32[-1], -bound - log_prior, rtol=0.0, atol=2e-2)


def waves(X):
    """Features of one column of inputs; the last is active at none of the data."""
    x = X[..., :1]
    return jnp.concatenate([jnp.ones_like(x), *(jnp.cos(k * x) for k in range(1, 6)), jnp.maximum(x - 3.5, 0.0)], -1)


@pytest.mark.parametrize("refresh", [1, 20])
@pytest.mark.parametrize("form", ["natural", "mean"])
@pytest.mark.exhaustive
def test_weights_that_the_data_settle_beyond_float32_are_trained_and_the_prior_of_the_others_stays(form, refresh):
    """N k/σ² = 2e9, two hundred times 1/ε: the sum of the prior's precision and the data's has no digit of the former."""
    n, noise = 2000, 2e-3
    inputs = np.linspace(0.0, 3.0, n)[:, None]
    Phi = np.asarray(waves(inputs), np.float64)
    w = np.random.default_rng(0).normal(size=Phi.shape[1])
    y = Phi @ w + noise * np.random.default_rng(1).normal(size=n)

    def deep(X, y=None, num_data=None):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.features.FeatureMap(lambda _, X: waves(X), ()), X))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, np.float32(noise)), obs=y)

    guide = sgp.AutoWeightSpaceGP(deep, parametrization=form, base=AutoDelta, refresh=refresh)
    others = optax.adam(optax.cosine_decay_schedule(0.05, 1500))
    optim = sgp.NaturalGradient(lambda t: 1.0 / (1.0 + t), others if form == "mean" else optax.set_to_zero())
    svi = SVI(deep, guide, optim, sgp.QuadratureELBO(num_nodes=3))
    data = np.float32(inputs), np.float32(y)
    num_steps = 1500 if form == "mean" else 60
    result = sgp.fit(svi, jax.random.key(0), data, batch_size=100, num_steps=num_steps, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert int(sgp.num_refused(result.state)) == 0

    settled = np.float32([[0.2], [1.5], [2.9]])
    q = guide.posterior(jax.random.key(0), result.params, np.concatenate([settled, [[np.float32(5.5)]]]))["f"]
    truth = np.asarray(waves(settled), np.float64) @ w
    assert_allclose(q.mean[:3], truth, atol=2e-3 if form == "natural" else 2e-2)
    assert (q.variance[:3] < 1e-5).all()
    # There the last feature is 2, its weight as uncertain as before; in float32 sums of 1 and 1e9 it would be certain.
    assert_allclose(q.variance[3], 4.0, rtol=1e-2)


def test_the_power_that_sites_are_tempered_by_is_one_until_rounding_matters_and_never_overflows():
    epsilon = 2.0**-23
    trace = np.float32([0.0, 1.0, 1e5, 0.25 / epsilon, 1.0 / epsilon, 1e9, 1e20, 1e38])
    alpha = jax.vmap(jax.value_and_grad(tempering))(jnp.asarray(trace))
    x = epsilon * np.float64(trace)
    expected = (1.0 + x**4) ** -0.25
    assert_allclose(alpha[0], expected, rtol=1e-6)
    assert_allclose(alpha[1], -epsilon * x**3 * expected**5, rtol=1e-5, atol=1e-45)
    assert (alpha[0][:3] == 1.0).all()
    assert alpha[0][3] > 0.999


def curve(noise):
    """A smooth function in one column, measured with noise that is small beside the prior's deviation."""
    rng = np.random.default_rng(8)
    inputs = np.float32(np.sort(rng.uniform(0.0, 10.0, size=(300, 1)), axis=0))
    return inputs, np.float32(np.sin(inputs[:, 0]) + noise * rng.normal(size=300)), np.float32(noise)


def of_curve(X, y, noise):
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.mark.parametrize("noise", [0.03, 0.01])
def test_the_dense_posterior_keeps_its_mean_at_small_noise(noise):
    inputs, y, noise = curve(noise)
    guide = sgp.AutoTSVGP(of_curve, None)
    svi = SVI(of_curve, guide, sgp.NaturalGradient(1.0, optax.sgd(0.0)), sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), 3, inputs, y, noise, progress_bar=False)
    K, variance = oracles.se(np.float64(inputs), np.float64(inputs), 1.0, 1.0), np.float64(noise) ** 2
    C = K + variance * np.eye(300)
    evidence = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(C)[1] + 300 * np.log(2.0 * np.pi))
    assert sgp.num_refused(result.state) == 0
    assert_allclose(-result.losses[1:], evidence, rtol=1e-3)
    deviation = np.sqrt(np.diag(K - K @ np.linalg.solve(C, K)))
    q = guide.posterior(jax.random.key(1), result.params, inputs, y, noise)["f"]
    process = sgp.process_posterior(guide, jax.random.key(1), result.params, inputs, y, noise)["f"]
    for mean in (q.mean, process.posterior(inputs).mean):
        assert np.all(np.abs(mean - K @ np.linalg.solve(C, np.float64(y))) < 0.2 * deviation)


@pytest.mark.parametrize("kind", ["tied", "natural", "per_datum", "dense"])
@pytest.mark.thorough
def test_data_that_swallow_the_prior_are_refused(kind):
    inputs, y, noise = curve(0.003)  # N · prior variance / noise variance is 3e7
    Z = np.linspace(0.0, 10.0, 50, dtype=np.float32)[:, None]
    guide = {
        "tied": lambda: sgp.AutoTSVGP(of_curve, Z),
        "natural": lambda: sgp.AutoSVGP(of_curve, Z, natural=True),
        "per_datum": lambda: sgp.AutoTSVGP(of_curve, Z, sites="per_datum"),
        "dense": lambda: sgp.AutoTSVGP(of_curve, None),
    }[kind]()
    svi = SVI(of_curve, guide, sgp.NaturalGradient(1.0, optax.sgd(0.0)), sgp.QuadratureELBO())
    update, state, losses = jax.jit(svi.update), svi.init(jax.random.key(0), inputs, y, noise), []
    for _ in range(3):
        state, loss = update(state, inputs, y, noise)
        losses.append(float(loss))
    # The prior's loss, or none: never one that is finite and off by thousands.
    assert sgp.num_refused(state) >= 1
    assert all(np.isnan(loss) or abs(loss / losses[0] - 1.0) < 1e-3 for loss in losses)


@pytest.mark.exhaustive
def test_the_gradient_with_respect_to_the_noise_of_dtc_is_that_of_float64():
    rng = np.random.default_rng(0)
    inputs = np.float32(np.sort(rng.uniform(0.0, 10.0, size=(400, 1)), axis=0))
    y, noise = np.float32(np.sin(2.0 * inputs[:, 0]) + 0.01 * rng.normal(size=400)), np.float32(0.01)
    Z = np.linspace(0.0, 10.0, 40, dtype=np.float32)[:, None]

    def log_density(log_noise):
        dtype = log_noise.dtype
        kernel = SquaredExponential(jnp.ones((), dtype))
        site = sgp.SparseGPRegression(
            kernel, inputs.astype(dtype), Z.astype(dtype), jnp.exp(log_noise), bound="dtc", jitter=JITTER
        )
        return site.log_prob(y.astype(dtype))

    found = jax.grad(log_density)(jnp.log(noise))
    with jax.enable_x64(True):
        # A sum of 400 terms w²|T|² + w² misfit² − 1, each of which is about one before the last.
        assert_allclose(found, jax.grad(log_density)(jnp.log(np.float64(noise))), atol=0.2, rtol=0.0)
