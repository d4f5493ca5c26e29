"""Functions of time: the state-space form of kernels, smoothing, and `AutoMarkovGP` beside the dense posterior."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
import optax
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Constant, Cosine, Linear, Matern12, Matern32, Matern52, Periodic
from numpyro_sgp.posteriors.markov.formulas import smoothed
from numpyro_sgp.posteriors.markov.state_space import state_space_of
from numpyro_sgp.posteriors.markov.timeline import Timeline

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
N = 40
TIMES = RNG.permutation(np.r_[np.sort(RNG.uniform(0.0, 5.0, N - 3)), 2.0, 2.0, 9.0])[:, None]
KERNELS = {
    "Matérn 1/2": Matern12(0.7, 1.3),
    "Matérn 3/2": Matern32(0.7, 1.3),
    "Matérn 5/2": Matern52(0.7, 1.3),
    "cosine": Cosine(1.1, 0.6),
    "periodic": Periodic(1.2, 1.7, 0.8),
    "sum": Matern32(0.7, 1.3) + Constant(2.0),
    "product": Matern52(3.0, 1.1) * Cosine(1.1, 0.6),
    "quasi-periodic and rough": Matern32(3.0) * Periodic(1.2, 1.7) + 0.3 * Matern12(0.3),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def covariance(kernel, times, others=None):
    """By each kernel's own formula, which are tested elsewhere."""
    others = times if others is None else others
    return np.asarray(kernel(np.reshape(times, (-1, 1)), np.reshape(others, (-1, 1))))


def dense(K, linear, precision):
    """Mean, covariance and log Z of N(0, K) Π exp(λ₁f − ½wf²)."""
    root = np.sqrt(precision)
    B = np.eye(len(K)) + root[:, None] * K * root
    S = K - K @ (root[:, None] * np.linalg.solve(B, root[:, None] * K))
    return S @ linear, S, 0.5 * linear @ S @ linear - 0.5 * np.linalg.slogdet(B)[1]


@each_kernel
def test_states_have_the_covariance_of_the_kernel_and_noise_fills_what_is_forgotten(kernel):
    model = state_space_of(kernel, jnp.float64, num_harmonics=14)
    lags = np.r_[0.0, 1e-6, 1e-3, 0.05, 0.3, 0.7 / np.sqrt(5.0), 1.0, 4.0, 40.0]
    A, P, Q = (np.asarray(each) for each in (model.transition(lags), model.covariance, model.noise(jnp.asarray(lags))))
    assert_allclose(model.h @ A @ P @ model.h, covariance(kernel, lags, [0.0])[:, 0], rtol=0.0, atol=1e-13)
    assert_allclose(Q, P - A @ P @ A.swapaxes(-1, -2), rtol=0.0, atol=1e-13)
    B = np.asarray(model.noise_root(jnp.asarray(lags)))
    assert_allclose(B @ B.swapaxes(-1, -2), Q, rtol=0.0, atol=1e-13)
    assert_allclose(model.root @ model.root.T, P, rtol=0.0, atol=1e-14)


def test_noise_over_a_short_time_is_no_difference_of_large_numbers():
    # The integral of the driving noise over a time δ that is short: 16/3 λ⁵ δ⁵/20 of the first number of the state.
    model, delta = state_space_of(Matern52(1.0), jnp.float32, 1), np.float32(1e-3)
    rate = np.sqrt(5.0)
    noise = model.noise(jnp.full(1, delta))[0]
    assert noise.dtype == np.float32
    assert_allclose(noise[0, 0], 16.0 / 3.0 * (rate * delta) ** 5 / 20.0, rtol=0.01)


@pytest.mark.parametrize("parallel", [False, True])
@each_kernel
def test_smoothing_is_the_dense_posterior(kernel, parallel):
    times = np.sort(TIMES[:, 0])
    linear, precision = RNG.normal(size=(2, N)), RNG.uniform(0.0, 5.0, (2, N))
    precision[:, [3, 20]] = 0.0
    model = state_space_of(kernel, jnp.float64, num_harmonics=14)
    interval = jnp.asarray(np.diff(times, prepend=-7.0))  # that of the first time is not used
    q = jax.jit(partial(smoothed, parallel=parallel))(model, interval, jnp.asarray(linear), jnp.asarray(precision))
    K = covariance(kernel, times)
    for n in range(2):
        mean, S, log_z = dense(K, linear[n], precision[n])
        assert_allclose(q.mean[n], mean, rtol=0.0, atol=1e-11)
        assert_allclose(q.variance[n], np.diag(S), rtol=0.0, atol=1e-11)
        assert_allclose(q.log_normaliser[n], log_z, rtol=0.0, atol=1e-11)
        divergence = linear[n] @ mean - 0.5 * precision[n] @ (mean**2 + np.diag(S)) - log_z
        assert_allclose(q.divergence(linear, precision)[n], divergence, rtol=0.0, atol=1e-10)


def model(t, y=None, outcome="Poisson", kernel=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    kernel = Matern32(lengthscale, variance) + Constant(1.0) if kernel is None else kernel
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, t, mean=0.3))
    likelihood = {
        "Poisson": lambda: dist.Poisson(jnp.exp(f)),
        "Bernoulli": lambda: dist.Bernoulli(logits=f),
        "Student": lambda: dist.StudentT(3.0, f, 0.5),  # not log-concave
        "Gaussian": lambda: dist.Normal(f, 0.5),
    }[outcome]()
    with numpyro.plate("time", t.shape[0]):
        numpyro.sample("y", likelihood, obs=y)


COUNTS = RNG.poisson(np.exp(np.sin(2.0 * TIMES[:, 0]))).astype(float)


def trained(guide, model, *args, num_steps=15, step_size=0.7, **kwargs):
    svi = SVI(model, guide, sgp.NaturalGradient(step_size, optax.adam(0.05)), sgp.QuadratureELBO(20))
    result = svi.run(jax.random.key(0), num_steps, *args, progress_bar=False, **kwargs)
    assert sgp.num_refused(result.state) == 0
    return result


@pytest.mark.parametrize(
    "outcome",
    [
        "Poisson",
        pytest.param("Student", marks=pytest.mark.thorough),
        pytest.param("Bernoulli", marks=pytest.mark.thorough),
        pytest.param("Gaussian", marks=pytest.mark.thorough),
    ],
)
def test_training_and_predictions_are_those_of_the_dense_posterior(outcome):
    y = np.minimum(COUNTS, 1.0) if outcome == "Bernoulli" else COUNTS
    options = {"outcome": outcome, "num_steps": 15}
    guides = sgp.AutoMarkovGP(model, base=AutoDelta), sgp.AutoTSVGP(model, None, base=AutoDelta)
    new = np.linspace(-1.0, 10.0, 23)[::-1, None]
    results = [trained(guide, model, TIMES, y, **options) for guide in guides]
    markov, dense = (
        guide.posterior(jax.random.key(1), result.params, new)["f"]
        for guide, result in zip(guides, results, strict=True)
    )
    assert_allclose(*(result.losses for result in results), rtol=0.0, atol=1e-9)
    assert_allclose(markov.mean, dense.mean, rtol=0.0, atol=1e-9)
    assert_allclose(markov.variance, dense.variance, rtol=0.0, atol=1e-9)
    assert_allclose(markov.covariance(), dense.covariance(), rtol=0.0, atol=1e-9)
    for name in ("lengthscale_auto_loc", "variance_auto_loc"):
        assert_allclose(*(result.params[name] for result in results), rtol=1e-9)


@pytest.mark.exhaustive
def test_hyperparameters_of_each_part_of_a_kernel_have_the_gradient_of_the_dense_bound():
    def kernel(w):
        return Matern12(w[0], w[1]) * Periodic(w[2], w[3]) + Matern52(w[4]) * Cosine(w[5], w[6]) + Constant(w[7])

    precision, linear = RNG.uniform(0.1, 2.0, N), RNG.normal(size=N)
    times = np.sort(TIMES[:, 0])
    weights = RNG.normal(size=(2, N))

    def by_smoothing(w, parallel):
        interval = jnp.asarray(np.diff(times, prepend=times[0]))
        space = state_space_of(kernel(w), jnp.float64, num_harmonics=6)
        q = smoothed(space, interval, jnp.asarray(linear), jnp.asarray(precision), parallel=parallel)
        return weights[0] @ q.mean + weights[1] @ q.variance + q.divergence(linear, precision)

    def by_matrices(w):
        K = kernel(w)(times[:, None], times[:, None])
        S = K - K @ jnp.linalg.solve(jnp.diag(1.0 / precision) + K, K)
        mean = S @ linear
        log_z = 0.5 * linear @ mean - 0.5 * jnp.linalg.slogdet(jnp.eye(N) + precision[:, None] * K)[1]
        sites = linear @ mean - 0.5 * precision @ (mean**2 + jnp.diag(S))
        return weights[0] @ mean + weights[1] @ jnp.diag(S) + sites - log_z

    w = jnp.asarray([2.0, 1.3, 3.0, 1.7, 0.8, 1.1, 0.4, 0.9])
    expected = jax.grad(by_matrices)(w)
    for parallel in (False, True):
        assert_allclose(jax.grad(by_smoothing)(w, parallel), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kernel",
    [*(pytest.param(kernel, marks=pytest.mark.thorough) for kernel in (Matern12, Matern32)), Matern52],
)
def test_gradients_hold_where_one_form_of_the_noise_follows_the_other_and_where_times_are_equal(kernel):
    # The forms of the noise meet where Δ √(2ν) / ℓ is one.
    lengthscale, linear, precision = float(np.sqrt(kernel.degrees)), RNG.normal(size=6), np.full(6, 2.0)

    def log_normaliser(lengthscale, times):
        space = state_space_of(kernel(lengthscale), jnp.float64, 1)
        q = smoothed(space, jnp.diff(times, prepend=times[:1]), jnp.asarray(linear), jnp.asarray(precision))
        return q.log_normaliser

    def exact(lengthscale, times):
        K = kernel(lengthscale)(times[:, None], times[:, None])
        S = jnp.linalg.solve(jnp.eye(6) + precision * K, K)
        return 0.5 * linear @ S @ linear - 0.5 * jnp.linalg.slogdet(jnp.eye(6) + precision * K)[1]

    regular = jnp.arange(6.0)
    assert_allclose(jax.grad(log_normaliser)(lengthscale, regular), jax.grad(exact)(lengthscale, regular), rtol=1e-9)
    # From above, since the times stay in order there.
    repeated, later = jnp.asarray([0.0, 1.0, 1.0, 2.0, 3.0, 4.0]), jnp.asarray([0.0, 0.0, 1e-6, 0.0, 0.0, 0.0])
    slope = (exact(lengthscale, repeated + later) - exact(lengthscale, repeated)) / 1e-6
    assert_allclose(jax.grad(log_normaliser, 1)(lengthscale, repeated)[2], slope, atol=1e-4)


@pytest.mark.exhaustive
def test_several_functions_with_hyperparameters_of_their_own():
    def several(t, y=None):
        kernel = Matern32(jnp.asarray([[0.5], [2.0]]), jnp.asarray([1.0, 0.3]))
        with numpyro.plate("output", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, t))
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(2), obs=y)

    y = RNG.normal(size=(2, N))
    guide = sgp.AutoMarkovGP(several)
    result = trained(guide, several, TIMES, y, num_steps=1, step_size=1.0)
    q = guide.posterior(jax.random.key(1), result.params, TIMES)["f"]
    for n, kernel in enumerate((Matern32(0.5), Matern32(2.0, 0.3))):
        mean, S, _ = dense(covariance(kernel, TIMES), y[n] / 0.25, np.full(N, 4.0))
        assert_allclose(q.mean[n], mean, atol=1e-9)
        assert_allclose(q.covariance()[n], S, atol=1e-9)


@pytest.mark.exhaustive
def test_masked_outcomes_say_nothing():
    def masked(t, y, seen):
        f = numpyro.sample("f", sgp.GaussianProcess(Matern32(0.7), t))
        with numpyro.plate("time", len(t)), numpyro.handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    seen = RNG.random(N) < 0.6
    guide = sgp.AutoMarkovGP(masked)
    result = trained(guide, masked, TIMES, COUNTS, seen, num_steps=1, step_size=1.0)
    q = guide.posterior(jax.random.key(1), result.params, TIMES, COUNTS, seen)["f"]
    mean, S, _ = dense(covariance(Matern32(0.7), TIMES), 4.0 * COUNTS * seen, 4.0 * seen)
    assert_allclose(q.mean, mean, atol=1e-9)
    assert_allclose(q.variance, np.diag(S), atol=1e-9)


@pytest.mark.exhaustive
def test_draws_have_the_posterior_covariance():
    guide = sgp.AutoMarkovGP(model, base=AutoDelta)
    params = trained(guide, model, TIMES, COUNTS).params
    q = guide.posterior(jax.random.key(1), params, np.asarray([[2.0], [0.1], [9.5], [2.01]]))["f"]
    draws = np.asarray(q.sample(jax.random.key(2), (20_000,)))
    scale = np.sqrt(np.asarray(q.variance))
    assert_allclose(draws.mean(axis=0) / scale, q.mean / scale, atol=0.04)
    assert_allclose(np.cov(draws.T) / np.outer(scale, scale), q.covariance() / np.outer(scale, scale), atol=0.04)
    many = guide.sample_posterior(jax.random.key(3), params, TIMES, sample_shape=(3,))
    assert many["f"].shape == (3, N)
    assert np.all(np.isfinite(many["f"]))


@pytest.mark.exhaustive
def test_draws_of_products_and_of_several_functions():
    kernel = Matern52(jnp.asarray([[0.5], [2.0]])) * Cosine(3.0) + Constant(0.5)

    def several(t, y=None):
        with numpyro.plate("output", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, t))
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(2), obs=y)

    guide = sgp.AutoMarkovGP(several)
    params = trained(guide, several, TIMES, RNG.normal(size=(2, N)), num_steps=1, step_size=1.0).params
    q = guide.posterior(jax.random.key(1), params, np.asarray([[2.0], [0.1], [12.0]]))["f"]
    draws, scale = np.asarray(q.sample(jax.random.key(2), (20_000,))), np.sqrt(np.asarray(q.variance))
    for n in range(2):
        outer = np.outer(scale[n], scale[n])
        assert_allclose(draws[:, n].mean(axis=0) / scale[n], q.mean[n] / scale[n], atol=0.04)
        assert_allclose(np.cov(draws[:, n].T) / outer, q.covariance()[n] / outer, atol=0.04)


def test_draws_where_a_site_has_a_negative_precision_are_nan():
    ones, order = jnp.ones(3), jnp.arange(3)
    line = Timeline(state_space_of(Matern32(1.0), jnp.float64, 1), ones, order, order, parallel=False)

    def draws(precision):
        return line.covariance(ones, precision).draw_deviations(jax.random.key(0), (2, 3))

    assert np.all(np.isfinite(draws(ones)))
    assert np.any(np.isnan(draws(jnp.asarray([1.0, -0.1, 1.0]))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_new_times_may_have_another_dtype(dtype):
    guide = sgp.AutoMarkovGP(model, base=AutoDelta)
    params = trained(guide, model, TIMES.astype(dtype), COUNTS).params
    ours, same = (guide.posterior(jax.random.key(1), params, TIMES.astype(d))["f"] for d in (np.float32, np.float64))
    assert_allclose(ours.mean, same.mean, atol=1e-4)


@pytest.mark.exhaustive
def test_new_outcomes_are_taken_in_as_if_they_had_been_there():
    guide = sgp.AutoMarkovGP(partial(model, outcome="Gaussian"), base=AutoDelta)
    first, late = TIMES[:25], TIMES[25:]
    params = trained(guide, partial(model, outcome="Gaussian"), first, COUNTS[:25], num_steps=1, step_size=1.0).params
    fixed = {name: value for name, value in params.items() if name.endswith("_loc")}
    params = guide.condition(params, late, COUNTS[25:])
    q = guide.posterior(jax.random.key(1), params, TIMES)["f"]
    kernel = Matern32(float(fixed["lengthscale_auto_loc"]), float(fixed["variance_auto_loc"])) + Constant(1.0)
    mean, S, _ = dense(covariance(kernel, TIMES), 4.0 * (COUNTS - 0.3), np.full(N, 4.0))
    # The first sites are those of the hyperparameters before the first step of Adam, and of Gaussian noise: the same.
    assert_allclose(q.mean, mean + 0.3, atol=1e-7)
    assert_allclose(q.variance, np.diag(S), atol=1e-7)


@pytest.mark.thorough
def test_diagnostics_and_arviz_take_it():
    guide = sgp.AutoMarkovGP(model, base=AutoDelta)
    svi = SVI(model, guide, sgp.NaturalGradient(0.7, optax.adam(0.01)), sgp.QuadratureELBO(20))
    result = svi.run(jax.random.key(0), 30, TIMES, COUNTS, progress_bar=False)
    khat = sgp.diagnostics.psis_khat(jax.random.key(1), svi, result.params, TIMES, COUNTS, num_samples=500)
    assert khat < 0.7
    dense_guide = sgp.AutoTSVGP(model, None, base=AutoDelta)
    dense_svi = SVI(model, dense_guide, sgp.NaturalGradient(0.7, optax.adam(0.01)), sgp.QuadratureELBO(20))
    own, other = (
        sgp.diagnostics.loo_cavity(jax.random.key(1), each, result.params, TIMES, COUNTS) for each in (svi, dense_svi)
    )
    pointwise = "elpd_i" if hasattr(own, "elpd_i") else "loo_i"  # of ArviZ 1, and before
    assert_allclose(getattr(own, pointwise), getattr(other, pointwise), rtol=1e-7)


@pytest.mark.parametrize(
    ("kernel", "mean_interval", "outcome", "units", "relative", "parallel"),
    [
        (Matern52(1.5) + Constant(1.0), 1e-3, 1e4, 50.0, 0.05, False),
        pytest.param(Matern52(1.5) + Constant(1.0), 1e-3, 1e4, 50.0, 0.05, True, marks=pytest.mark.exhaustive),
        pytest.param(Matern32(0.3) + Constant(1.0), 3e-2, 1e6, 15.0, 0.2, False, marks=pytest.mark.thorough),
        pytest.param(Matern32(0.3) + Matern52(2.0), 1e-3, 1e4, 50.0, 0.005, False, marks=pytest.mark.exhaustive),
        # 14 numbers, all but dependent over a thousandth of a period.
        pytest.param(Matern32(3.0) * Periodic(1.0, 1.0), 1e-3, 1e4, 1000.0, 0.3, False, marks=pytest.mark.exhaustive),
    ],
    ids=["level, close", "level, close, scans", "level, precise", "sum, close", "product, close"],
)
def test_float32_holds_over_many_close_times_and_precise_outcomes(
    kernel, mean_interval, outcome, units, relative, parallel
):
    rng, many = np.random.default_rng(3), 1_000 if parallel else 5_000
    times = np.cumsum(rng.exponential(mean_interval, many))
    times = np.asarray(times - times[0], np.float32).astype(float)
    precision = np.where(rng.random(many) < 0.5, outcome, 0.0)
    gap = many // 25
    unseen = np.r_[:gap, 10 * gap : 11 * gap, many - gap : many]
    precision[unseen] = 0.0
    linear = precision * np.sin(times)

    def found(dtype):
        def means_and_variances(stretch):
            model = state_space_of(kernel, dtype, 3)
            interval = stretch * jnp.asarray(np.diff(times, prepend=times[0]), dtype)
            sites = jnp.asarray(linear, dtype), jnp.asarray(precision, dtype)
            q = smoothed(model, interval, *sites, parallel=parallel)
            return q.mean, q.variance

        values = jax.jvp(jax.jit(means_and_variances), (jnp.ones((), dtype),), (jnp.ones((), dtype),))
        return [np.asarray(each, float) for pair in values for each in pair]

    assert state_space_of(kernel, jnp.float32, 3).covariance.dtype == jnp.float32
    mean, variance, _, change = found(jnp.float32)
    exact_mean, exact_variance, _, exact_change = found(jnp.float64)
    # In posterior standard deviations, and in units of roundoff of a prior variance that is 1 or 2.
    assert np.max(np.abs(mean - exact_mean) / np.sqrt(exact_variance)) < 0.01
    assert np.max(np.abs(variance - exact_variance)) < units * np.finfo(np.float32).eps * 2.0
    # Where there are outcomes, variances are down to a millionth of the prior's.
    seen = np.setdiff1d(np.arange(many), unseen)
    assert_allclose(variance[seen], exact_variance[seen], rtol=relative)
    assert_allclose(change[unseen], exact_change[unseen], rtol=0.02, atol=2e-3)


@pytest.mark.exhaustive
def test_a_step_has_no_matrix_of_all_times_and_memory_in_proportion_to_them():
    sizes = {}
    for many in (10_000, 40_000):
        t = jnp.linspace(0.0, 10.0, many)[:, None]
        svi = SVI(model, sgp.AutoMarkovGP(model), sgp.NaturalGradient(0.5, optax.adam(0.01)), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), t, jnp.ones(many))
        compiled = jax.jit(svi.update).lower(state, t, jnp.ones(many)).compile()
        sizes[many] = compiled.memory_analysis().temp_size_in_bytes / many
    # In units of the numbers of one time.
    assert sizes[40_000] < 1.1 * sizes[10_000]
    assert sizes[40_000] < 8 * 1000


@pytest.mark.thorough
def test_steps_are_traced_once():
    count = []

    def counted(t, y):
        count.append(None)
        model(t, y)

    svi = SVI(counted, sgp.AutoMarkovGP(counted), sgp.NaturalGradient(0.5, optax.adam(0.01)), sgp.QuadratureELBO())
    state, update = svi.init(jax.random.key(0), TIMES, COUNTS), jax.jit(svi.update)
    state, _ = update(state, TIMES, COUNTS)
    after_first = len(count)
    for _ in range(2):
        state, _ = update(state, TIMES, COUNTS)
    assert len(count) == after_first


@pytest.mark.thorough
def test_rows_of_other_times_are_refused_in_training():
    svi = SVI(model, sgp.AutoMarkovGP(model), sgp.NaturalGradient(0.5, optax.adam(0.01)), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), TIMES, COUNTS)
    state, _ = jax.jit(svi.update)(state, TIMES[::-1], COUNTS)
    assert sgp.num_refused(state) == 1
    with pytest.raises(ValueError, match="all rows at every step"):
        svi.update(state, TIMES[1:], COUNTS[1:])


@pytest.mark.parametrize(
    ("kernel", "X", "error", "message"),
    [
        (Linear(1.0), TIMES, TypeError, "Linear has no state-space form"),
        (
            sgp.kernels.SquaredExponential(1.0) + Constant(1.0),
            TIMES,
            TypeError,
            "SquaredExponential has no state-space",
        ),
        (Matern32(1.0), np.c_[TIMES, TIMES], ValueError, "to be times"),
        (Matern32(1.0), sgp.functionals.Derivative(TIMES, 0), ValueError, "to be times"),
    ],
    ids=["linear", "in a sum", "columns", "functionals"],
)
def test_what_has_no_state_space_form_is_refused(kernel, X, error, message):
    def other(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    svi = SVI(other, sgp.AutoMarkovGP(other), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    with pytest.raises(error, match=message):
        svi.init(jax.random.key(0), X, COUNTS)


@pytest.mark.parametrize("number", [0, 2.5, True])
def test_a_number_of_waves_that_is_no_positive_integer_is_refused(number):
    with pytest.raises(ValueError, match=f"`num_harmonics` must be a positive integer, got {number}. The default is 8"):
        sgp.AutoMarkovGP(model, num_harmonics=number)


def test_waves_of_a_periodic_kernel_share_its_variance():
    lags = np.linspace(0.0, 2.0, 9)
    for num, error in ((1, 2.0), (3, 0.5), (12, 1e-6)):
        space = state_space_of(Periodic(0.5, 2.0, 3.0), jnp.float64, num)
        found = space.h @ np.asarray(space.transition(lags) @ space.covariance) @ space.h
        assert_allclose(found[0], 3.0, rtol=1e-12)
        assert_allclose(found, covariance(Periodic(0.5, 2.0, 3.0), lags, [0.0])[:, 0], atol=error)


@pytest.mark.parametrize("kernel", [partial(Cosine, 1.1), partial(Periodic, 1.2, 1.7), Constant])
def test_roots_of_waves_have_the_gradient_of_a_standard_deviation(kernel):
    def total(variance):
        return jnp.sum(state_space_of(kernel(variance), jnp.float64, 3).root)

    assert_allclose(jax.grad(total)(1.3), total(1.3) / 2.6, rtol=1e-12)


def test_a_cosine_is_a_wave():
    X = RNG.normal(size=(4, 2))
    K = Cosine(jnp.asarray([2.0, 3.0]), 1.5)(X, X)
    lag = X[:, None] - X[None]
    assert_allclose(K, 1.5 * np.cos(np.pi * lag[..., 0]) * np.cos(2.0 * np.pi / 3.0 * lag[..., 1]), rtol=1e-12)
    assert_array_equal(Cosine(2.0, 1.5)(X), np.full(4, 1.5))
