"""Where the base guide starts: at what was observed of a latent, near the prior median elsewhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import SVI, init_to_uniform, init_to_value
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
import optax
import pytest
from scipy import stats

import numpyro_sgp as sgp

pytestmark = pytest.mark.usefixtures("x64")

DISTANCE = 0.3  # of a start from the prior median, in standard deviations; five of them is as far as it gets
N = 60
RNG = np.random.default_rng(0)
TRUE = RNG.uniform(-3.0, 3.0, N)
Y = np.sin(2.0 * TRUE) + 0.1 * RNG.normal(size=N)
MEASURED = TRUE + 0.2 * RNG.normal(size=N)
Z = np.linspace(-3.5, 3.5, 20)[:, None]


def outcome(X, y, lengthscale=1.0, noise=0.3):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale, 1.0), X))
    numpyro.sample("y", dist.Normal(f, noise).to_event(1), obs=y)


def first_params(model, *args, key=0, base=AutoNormal, **options):
    """Parameters before the first step."""
    svi = SVI(model, sgp.AutoTSVGP(model, Z, base=base, **options), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    return svi.get_params(svi.init(jax.random.key(key), *args))


def start_of(prior, key=0, joint=False):
    """Where latents of a prior start, (5000,), where they are unconstrained."""

    def model(y):
        x = numpyro.sample("x", prior.expand([5000]).to_event(1))
        outcome(jnp.zeros((N, 1)) + 1e-3 * x[0], y)

    return first_params(model, Y, key=key, joint=joint)["x_auto_loc"]


def in_a_plate(measured, y):
    with numpyro.plate("row", N):
        x = numpyro.sample("x", dist.Normal(0.0, 2.0))
        numpyro.sample("x_obs", dist.Normal(x, 0.2), obs=measured)
    lengthscale, noise = (numpyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("lengthscale", "noise"))
    outcome(x[:, None], y, lengthscale, noise)


def as_an_event(measured, y):
    x = numpyro.sample("x", dist.Normal(0.0, 2.0).expand([N, 1]).to_event(2))
    lengthscale, noise = (numpyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("lengthscale", "noise"))
    outcome(x, y, lengthscale, noise)
    numpyro.sample("x_obs", dist.StudentT(20.0, x, 0.2).to_event(2), obs=measured[:, None])


@pytest.mark.thorough
@pytest.mark.parametrize("model", [in_a_plate, pytest.param(as_an_event, marks=pytest.mark.exhaustive)])
def test_inputs_measured_with_error_start_there_and_are_known_better_after_training(model):
    guide = sgp.AutoTSVGP(model, Z)
    svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.adam(1e-2)), sgp.QuadratureELBO())
    start = svi.get_params(svi.init(jax.random.key(0), MEASURED, Y))["x_auto_loc"]
    assert_allclose(start.ravel(), MEASURED, rtol=1e-12)
    result = svi.run(jax.random.key(0), 300, MEASURED, Y, progress_bar=False)
    x = guide.median(result.params, MEASURED, Y)["x"].ravel()
    # 0.13 for 0.19; from NumPyro's random start it was 0.65.
    assert np.std(x - TRUE) < 0.8 * np.std(MEASURED - TRUE)


ROWS = np.arange(N)
FORMS = {
    "a mask": lambda x: handlers.mask(mask=ROWS >= 5)(
        lambda: numpyro.sample("m", dist.Normal(x, 0.2), obs=np.nan_to_num(MISSING))
    )(),
    "obs_mask": lambda x: numpyro.sample("m", dist.Normal(x, 0.2), obs=MISSING, obs_mask=ROWS >= 5),
    "a mask in an event": lambda x: numpyro.sample(
        "m", dist.Normal(x, 0.2).mask(ROWS >= 5).to_event(1), obs=np.where(ROWS >= 5, MEASURED, -999.0)
    ),
    "some rows, turned": lambda x: numpyro.sample("m", dist.Normal(x[:4:-1], 0.2), obs=MEASURED[:4:-1]),
    "an index": lambda x: numpyro.sample("m", dist.Normal(x[ROWS[5:]], 0.2), obs=MEASURED[5:]),
    "two of each": lambda x: numpyro.sample(
        "m", dist.Normal(x[5:], 0.2).expand([2, N - 5]), obs=MEASURED[5:] + np.array([[0.1], [-0.1]])
    ),
    "two sites": lambda x: [
        numpyro.sample(f"m{sign}", dist.Normal(x[5:], 0.2), obs=MEASURED[5:] + 0.1 * sign) for sign in (-1, 1)
    ],
    "a multivariate normal": lambda x: numpyro.sample(
        "m", dist.MultivariateNormal(x[5:, None], 0.1 * np.eye(1)), obs=MEASURED[5:, None]
    ),
    "one number, without a plate": lambda x: [
        numpyro.sample(f"m{n}", dist.Normal(x[n], 0.2), obs=MEASURED[n] + np.array([0.1, -0.1])) for n in ROWS[5:]
    ],
    "a logarithm": lambda x: numpyro.sample("m", dist.LogNormal(x[5:], 0.2), obs=np.exp(MEASURED[5:])),
}
MISSING = np.where(ROWS >= 5, MEASURED, np.nan)


@pytest.mark.parametrize("form", FORMS)
def test_what_was_observed_is_found_in_many_forms_and_the_rest_starts_near_the_median(form):
    def model(y):
        with numpyro.plate("row", N):
            x = numpyro.sample("x", dist.Normal(10.0, 2.0))
        FORMS[form](x)
        outcome(x[:, None], y)

    start = first_params(model, Y)["x_auto_loc"]
    assert_allclose(start[5:], MEASURED[5:], rtol=1e-12)
    assert_allclose(start[:5], 10.0, atol=5.0 * DISTANCE)
    assert np.all(start[:5] != 10.0)


NO_MEASUREMENTS = {
    "another location": lambda x: dist.Normal(2.0 * x, 0.2),
    "another sign": lambda x: dist.Normal(-x, 0.2),
    "a mean of two": lambda x: dist.Normal(0.5 * (x + jnp.roll(x, 1)), 0.2),
    "in their order": lambda x: dist.Normal(x[jnp.argsort(x)], 0.2),
    "a bound": lambda x: dist.Levy(x - 100.0, 0.2),
    "a rate": lambda x: dist.Exponential(jnp.exp(x)),
}


@pytest.mark.parametrize("form", NO_MEASUREMENTS)
def test_an_outcome_that_is_no_measurement_of_a_latent_says_nothing_of_its_start(form):
    def model(y):
        with numpyro.plate("row", N):
            x = numpyro.sample("x", dist.Normal(10.0, 2.0))
            numpyro.sample("m", NO_MEASUREMENTS[form](x), obs=jnp.abs(MEASURED))
        outcome(x[:, None], y)

    assert_allclose(first_params(model, Y)["x_auto_loc"], 10.0, atol=5.0 * DISTANCE)


def test_a_measurement_outside_the_support_leaves_a_latent_near_its_median():
    def model(measured, y):
        with numpyro.plate("row", N):
            x = numpyro.sample("x", dist.Uniform(-2.0, 2.5))
            numpyro.sample("x_obs", dist.Normal(x, 0.2), obs=measured)
        outcome(x[:, None], y)

    inside = (MEASURED > -2.0) & (MEASURED < 2.5)
    assert 20 < inside.sum() < N
    start = 4.5 / (1.0 + np.exp(-first_params(model, MEASURED, Y)["x_auto_loc"])) - 2.0
    assert_allclose(start[inside], MEASURED[inside], rtol=1e-10)
    assert_allclose(start[~inside], 0.25, atol=5.0 * DISTANCE)


def test_rows_of_a_subsample_are_not_repeated_for_the_others():
    def model(y):
        with numpyro.plate("row", 3 * N, subsample_size=N):
            x = numpyro.sample("x", dist.Normal(10.0, 2.0))
            numpyro.sample("x_obs", dist.Normal(x, 0.2), obs=MEASURED)
        outcome(x[:, None], y)

    assert_allclose(first_params(model, Y)["x_auto_loc"], 10.0, atol=5.0 * DISTANCE)


PRIORS = {
    "normal": (dist.Normal(3.0, 0.5), stats.norm(3.0, 0.5), None),
    "wide": (dist.Normal(3.0, 500.0), stats.norm(3.0, 500.0), None),
    "uniform": (dist.Uniform(-1.0, 4.0), stats.uniform(-1.0, 5.0), lambda p: np.log((p + 1.0) / (4.0 - p))),
    "log-normal": (dist.LogNormal(1.0, 0.7), stats.lognorm(0.7, scale=np.e), np.log),
    "half Cauchy": (dist.HalfCauchy(2.0), stats.halfcauchy(scale=2.0), np.log),
    "half normal": (dist.HalfNormal(2.0), stats.halfnorm(scale=2.0), np.log),
    "exponential": (dist.Exponential(2.0), stats.expon(scale=0.5), np.log),
    "gamma": (dist.Gamma(2.0, 3.0), stats.gamma(2.0, scale=1.0 / 3.0), np.log),
    "gamma with a peak at 0": (dist.Gamma(0.3, 3.0), stats.gamma(0.3, scale=1.0 / 3.0), np.log),
    "inverse gamma": (dist.InverseGamma(3.0, 2.0), stats.invgamma(3.0, scale=2.0), np.log),
    "beta": (dist.Beta(2.0, 5.0), stats.beta(2.0, 5.0), lambda p: np.log(p / (1.0 - p))),
    "Student": (dist.StudentT(3.0, 1.0, 2.0), stats.t(3.0, 1.0, 2.0), None),
    "truncated": (dist.TruncatedNormal(1.0, 2.0, low=0.5), stats.truncnorm(-0.25, np.inf, 1.0, 2.0), lambda x: np.log(x - 0.5)),
    "drawn": (dist.Weibull(2.0, 1.5), stats.weibull_min(1.5, scale=2.0), np.log),
}  # fmt: skip


@pytest.mark.parametrize("name", PRIORS)
def test_latents_start_about_the_prior_median_within_a_third_of_a_standard_deviation(name):
    prior, truth, unconstrained = PRIORS[name]
    unconstrained = (lambda x: x) if unconstrained is None else unconstrained
    median, above = (unconstrained(truth.ppf(q)) for q in (0.5, stats.norm.cdf(1.0)))
    spread = above - median
    w = np.asarray(start_of(prior))
    # Medians of 20 draws have standard deviations of 0.28 of one of the prior; those of gamma variables are
    # approximated to 0.04.
    drawn = name == "drawn"
    assert_allclose(w.std(), np.hypot(DISTANCE, 0.28 if drawn else 0.0) * min(spread, 1.0), rtol=0.3)
    standard_error = w.std() / np.sqrt(len(w))
    assert_allclose(w.mean(), median, atol=5.0 * standard_error + 0.07 * spread)


def test_a_scale_of_which_the_prior_knows_nothing_starts_near_one():
    # The median of this inverse gamma variable is e⁶⁹³.
    assert np.abs(start_of(dist.InverseGamma(1e-3, 1e-3))).max() < 5.0 * DISTANCE


def test_a_latent_starts_near_the_median_given_where_its_parents_start():
    def model(y):
        scale = numpyro.sample("scale", dist.LogNormal(3.0, 1.0))
        centre = numpyro.sample("centre", dist.Normal(-100.0, 1.0))
        X = numpyro.sample("x", dist.Normal(centre, 1e-3 * scale).expand([N, 1]).to_event(2))
        outcome(X, y)

    start = first_params(model, Y)
    assert_allclose(start["scale_auto_loc"], 3.0, atol=5.0 * DISTANCE)
    assert_allclose(start["x_auto_loc"], start["centre_auto_loc"], atol=5.0 * DISTANCE * 0.02)


@pytest.mark.exhaustive
def test_weights_of_a_network_start_at_a_draw_of_their_prior():
    eqx = pytest.importorskip("equinox")
    from numpyro.contrib.module import random_eqx_module

    net = eqx.nn.Linear(1, 400, key=jax.random.key(0))

    def model(y):
        scale = numpyro.sample("net_scale", dist.Normal(0.0, 1.0).expand([400]).to_event(1))
        weights = random_eqx_module("net", net, prior=dist.Normal(0.0, 2.0))
        outcome(jnp.tanh(jax.vmap(weights)(jnp.asarray(TRUE)[:, None]) + scale).mean(axis=1, keepdims=True), y)

    start = first_params(model, Y)
    # Draws have standard deviation 2, and are moved by no more than one unit.
    assert_allclose(np.std(start["net/weight_auto_loc"]), 1.0, rtol=0.2)
    assert_allclose(np.std(start["net_scale_auto_loc"]), DISTANCE, rtol=0.2)


# NumPyro asks each parameter for its shape, that of our guide without numbers too.
@pytest.mark.filterwarnings("ignore:shape requires ndarray:DeprecationWarning")
def test_latents_inside_a_scan_start_near_their_medians():
    def model(y):
        def step(x, _):
            x = numpyro.sample("x", dist.Normal(x + 1.0, 0.1))
            return x, x

        _, x = scan(step, 0.0, None, length=N)
        outcome(x[:, None], y)

    assert_allclose(first_params(model, Y)["x_auto_loc"], 1.0 + np.arange(N), atol=0.8)


@pytest.mark.thorough
def test_starts_follow_from_the_key_also_within_jit():
    svi = SVI(in_a_plate, sgp.AutoTSVGP(in_a_plate, Z), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    init = jax.jit(lambda key: svi.get_params(svi.init(key, MEASURED, Y)))
    here, again, other = (first_params(in_a_plate, MEASURED, Y, key=key) for key in (0, 0, 1))
    inside = init(jax.random.key(0))
    for name in ("x_auto_loc", "lengthscale_auto_loc"):
        assert_array_equal(here[name], again[name])
        assert_allclose(inside[name], here[name], rtol=1e-10)
    assert here["lengthscale_auto_loc"] != other["lengthscale_auto_loc"]


def test_a_guide_that_is_used_again_starts_at_the_data_of_the_new_fit():
    svi = SVI(in_a_plate, sgp.AutoTSVGP(in_a_plate, Z), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    svi.init(jax.random.key(0), MEASURED + 1.0, Y)
    params = svi.get_params(svi.init(jax.random.key(0), MEASURED, Y))
    assert_allclose(params["x_auto_loc"], MEASURED, rtol=1e-12)


@pytest.mark.exhaustive
def test_other_autoguides_start_there_too_unless_they_say_where():
    kwargs = {"joint": False}
    delta = first_params(in_a_plate, MEASURED, Y, base=AutoDelta, **kwargs)
    assert_allclose(delta["x_auto_loc"], MEASURED, rtol=1e-12)
    assert_allclose(np.log(delta["lengthscale_auto_loc"]), 0.0, atol=5.0 * DISTANCE)
    whole = first_params(in_a_plate, MEASURED, Y, base=AutoMultivariateNormal, **kwargs)["auto_loc"]
    assert sum(np.isclose(whole[:, None], MEASURED, rtol=1e-12).any(axis=0)) == N
    scaled = first_params(in_a_plate, MEASURED, Y, base=partial(AutoNormal, init_scale=0.01), **kwargs)
    assert_allclose(scaled["x_auto_loc"], MEASURED, rtol=1e-12)

    start = init_to_value(values={"x": np.full(N, 0.5)})

    class FromHalf(AutoNormal):
        def __init__(self, model, prefix):
            super().__init__(model, prefix=prefix, init_loc_fn=start)

    for base in (partial(AutoNormal, init_loc_fn=start), FromHalf, AutoNormal(in_a_plate_alone, init_loc_fn=start)):
        assert_array_equal(first_params(in_a_plate, MEASURED, Y, base=base, **kwargs)["x_auto_loc"], 0.5)
    uniform = first_params(in_a_plate, MEASURED, Y, base=partial(AutoNormal, init_loc_fn=init_to_uniform), **kwargs)
    assert np.abs(uniform["x_auto_loc"]).max() <= 2.0 < np.abs(MEASURED).max()


in_a_plate_alone = handlers.block(in_a_plate, hide=["f", "y"])


def test_a_start_with_no_density_is_left_for_others():
    def model(y):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.factor("bound", jnp.where(x > 0.8, 0.0, -jnp.inf))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        outcome(x * TRUE[:, None], y, lengthscale)

    assert first_params(model, Y)["x_auto_loc"] > 0.8


@pytest.mark.exhaustive
def test_a_model_that_is_symmetric_in_its_latents_is_learnt_from_there():
    rng = np.random.default_rng(1)
    angle = rng.uniform(-2.0, 2.0, 40)
    outcomes = np.stack([np.sin(angle), np.cos(2.0 * angle), angle, np.cos(angle)]) + 0.05 * rng.normal(size=(4, 40))

    def gplvm(Y):
        X = numpyro.sample("X", dist.Normal(0.0, 1.0).expand([40, 1]).to_event(2))
        with numpyro.plate("output", 4):
            f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(1.0, 1.0), X))
        with numpyro.plate("output", 4, dim=-2), numpyro.plate("row", 40, dim=-1):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=Y)

    def last_loss(base):
        guide = sgp.AutoTSVGP(gplvm, np.linspace(-2.0, 2.0, 9)[:, None], base=base)
        svi = SVI(gplvm, guide, sgp.NaturalGradient(0.5, optax.adam(2e-2)), sgp.QuadratureELBO())
        return np.mean(svi.run(jax.random.key(0), 500, outcomes, progress_bar=False).losses[-50:])

    # At the median all inputs are 0. From here 248, with other keys 130 to 175; from NumPyro's start 345 to 467.
    assert last_loss(AutoNormal) < 300.0 < last_loss(partial(AutoNormal, init_loc_fn=init_to_uniform))
