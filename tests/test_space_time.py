"""`AutoMarkovGP` with `space`: functions of time and place beside dense algebra and inducing inputs at all their pairs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Constant, Matern12, Matern32, Matern52, Select, SquaredExponential
from numpyro_sgp.posteriors.markov.separable import separated
from numpyro_sgp.posteriors.markov.space_formulas import SpaceTimeTerm, prior_covariance, smoothed_in_blocks
from numpyro_sgp.posteriors.markov.state_space import state_space_of

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
# Rows off any grid, in any order, some at one time, one of them twice.
TIMES = np.r_[RNG.uniform(0.0, 4.0, 11), [1.5, 1.5, 1.5], [2.5, 2.5]]
N = len(TIMES)
X = np.c_[TIMES, RNG.uniform(0.0, 2.0, (N, 2))]
X[-1] = X[-2]
X = RNG.permutation(X)
Z = RNG.uniform(0.0, 2.0, (4, 2))
PAIRS = np.array([[t, *z] for t in np.unique(TIMES) for z in Z])
COVARIATE = RNG.normal(size=N)
COUNTS = RNG.poisson(np.exp(0.4 + np.sin(X[:, 0]) * np.cos(X[:, 1]))).astype(float)
NEW = np.c_[[-1.0, 1.5, 2.2, 9.0, 2.2], RNG.uniform(0.0, 2.0, (5, 2))]
NEW[1, 1:] = Z[2]


def kernel_of(lengthscale=0.8, across=1.1):
    return Select(SquaredExponential(across), [1, 2]) * Select(Matern32(lengthscale, 1.3) + Constant(0.4), [0])


def gram(kernel, one, other=None):
    return np.asarray(kernel(jnp.asarray(one), jnp.asarray(one if other is None else other)))


def normal(X, y=None, kernel=None):
    kernel = kernel_of() if kernel is None else kernel
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, mean=0.3, jitter=0.0))
    numpyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)


def counts(X, y=None, jitter=0.0):
    lengthscale = numpyro.param("lengthscale", 0.8, constraint=dist.constraints.positive)
    across = numpyro.param("across", 1.1, constraint=dist.constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(kernel_of(lengthscale, across), X, mean=0.3, jitter=jitter))
    with numpyro.plate("row", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def trained(guide, model, *args, num_steps=5, step_size=0.7, bound="tight", **kwargs):
    """Its hyperparameters stay where they start."""
    loss = sgp.QuadratureELBO(20, bound=bound)
    svi = SVI(model, guide, sgp.NaturalGradient(step_size, optax.sgd(0.0)), loss)
    result = svi.run(jax.random.key(0), num_steps, *args, progress_bar=False, **kwargs)
    assert sgp.num_refused(result.state) == 0
    return svi, result


def test_smoothing_of_blocks_is_the_dense_posterior_whatever_their_size():
    times = np.sort(TIMES)
    a, across = RNG.normal(size=(3, N)), RNG.normal(size=(1, N))
    kernels = Matern52(0.7, 1.3) + Constant(0.5), Matern12(2.0)
    terms = [
        SpaceTimeTerm(state_space_of(kernel, jnp.float64, 1), jnp.asarray(each))
        for kernel, each in zip(kernels, (a, across), strict=True)
    ]
    K = sum(gram(kernel, times[:, None]) * (each.T @ each) for kernel, each in zip(kernels, (a, across), strict=True))
    assert_allclose(prior_covariance(terms, jnp.asarray(times)), K, atol=1e-13)
    w, linear = RNG.uniform(0.0, 5.0, N), RNG.normal(size=(2, N))
    w[[3, 7]] = 0.0
    S = K @ np.linalg.inv(np.eye(N) + w[:, None] * K)
    log_z = 0.5 * np.sum(linear * (linear @ S), axis=1) - 0.5 * np.linalg.slogdet(np.eye(N) + w[:, None] * K)[1]
    interval = jnp.asarray(np.diff(times, prepend=-7.0))  # that of the first row is not used
    for block in (1, 5, 32):
        q = jax.jit(partial(smoothed_in_blocks, block=block))(terms, interval, jnp.asarray(linear), jnp.asarray(w))
        assert_allclose(q.mean, linear @ S, atol=1e-12)
        assert_allclose(q.variance[0], np.diag(S), atol=1e-12)
        assert_allclose(q.log_normaliser, log_z, atol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bound", ["tight", pytest.param("titsias", marks=pytest.mark.exhaustive)])
def test_one_step_is_the_sparse_posterior_with_inducing_values_at_all_pairs(bound):
    y, noise = RNG.normal(size=N), 0.25
    guide = sgp.AutoMarkovGP(normal, space=Z)
    _, result = trained(guide, normal, X, y, num_steps=2, step_size=1.0, bound=bound)
    kernel = kernel_of()
    Kuu, Kuf, Kff = gram(kernel, PAIRS), gram(kernel, PAIRS, X), gram(kernel, X)
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    S, left, rest = Q + noise * np.eye(N), y - 0.3, np.diag(Kff - Q)
    evidence = -0.5 * (left @ np.linalg.solve(S, left) + np.linalg.slogdet(2.0 * np.pi * S)[1])
    loss = 0.5 * np.sum(rest / noise if bound == "titsias" else np.log1p(rest / noise))
    assert_allclose(-result.losses[-1], evidence - loss, rtol=1e-9)
    for rows in (X, NEW):
        q = guide.posterior(jax.random.key(1), result.params, rows)["f"]
        Kuy, Kyy = gram(kernel, PAIRS, rows), gram(kernel, rows)
        cross = Kuy.T @ np.linalg.solve(Kuu, Kuf)
        mean, covariance = 0.3 + cross @ np.linalg.solve(S, left), Kyy - cross @ np.linalg.solve(S, cross.T)
        assert_allclose(q.mean, mean, atol=1e-9)
        assert_allclose(q.variance, np.diag(covariance), atol=1e-9)
        assert_allclose(q.covariance(), covariance, atol=1e-9)


@pytest.mark.thorough
def test_with_all_places_it_is_the_exact_posterior():
    y, places = RNG.normal(size=N), np.unique(X[:, 1:], axis=0)
    guide = sgp.AutoMarkovGP(normal, space=places)
    kernel = Select(Matern32(0.9), [1, 2]) * Select(Matern52(0.8, 1.3), [0])
    _, result = trained(guide, normal, X, y, num_steps=2, step_size=1.0, kernel=kernel)
    K = gram(kernel, X)
    S, left = K + 0.25 * np.eye(N), y - 0.3
    evidence = -0.5 * (left @ np.linalg.solve(S, left) + np.linalg.slogdet(2.0 * np.pi * S)[1])
    assert_allclose(-result.losses[-1], evidence, rtol=1e-9)
    q = guide.posterior(jax.random.key(1), result.params, X, kernel=kernel)["f"]
    assert_allclose(q.mean, 0.3 + K @ np.linalg.solve(S, left), atol=1e-9)
    assert_allclose(q.covariance(), K - K @ np.linalg.solve(S, K), atol=1e-9)


@pytest.fixture(scope="module")
def runs():
    with jax.enable_x64(True):
        guides = sgp.AutoMarkovGP(counts, space=Z), sgp.AutoTSVGP(counts, PAIRS, sites="per_datum")
        return [(guide, *trained(guide, counts, X, COUNTS)) for guide in guides]


@pytest.mark.thorough
def test_counts_have_the_posterior_of_inducing_inputs_at_all_pairs(runs):
    (guide, _, own), (dense, _, other) = runs
    assert_allclose(own.losses, other.losses, rtol=1e-9)
    q, exact = (
        guide.posterior(jax.random.key(1), own.params, NEW)["f"],
        dense.posterior(jax.random.key(1), other.params, NEW)["f"],
    )
    assert_allclose(q.mean, exact.mean, atol=1e-8)
    assert_allclose(q.variance, exact.variance, atol=1e-8)
    assert_allclose(q.covariance(), exact.covariance(), atol=1e-8)


@pytest.mark.thorough
def test_hyperparameters_have_the_gradient_of_the_dense_bound(runs):
    found = []
    for _, svi, result in runs:

        def loss(values, svi=svi, params=result.params):
            params = {**params, "lengthscale": values[0], "across": values[1]}
            return svi.loss.loss(jax.random.key(0), params, svi.model, svi.guide, X, COUNTS)

        found.append(jax.jit(jax.value_and_grad(loss))(jnp.asarray([0.8, 1.1])))
    (value, gradient), (exact, exact_gradient) = found
    assert_allclose(value, exact, rtol=1e-9)
    assert_allclose(gradient, exact_gradient, rtol=1e-8)


def with_effects(X, covariate, y=None, outcome="Poisson"):
    level = numpyro.sample("level", dist.Normal(0.3, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.5))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel_of(), X, jitter=1e-12))
    predictor = numpyro.deterministic("predictor", 2.0 * f + level + slope * covariate)
    with numpyro.plate("row", X.shape[0]):
        numpyro.sample(
            "y", dist.Poisson(jnp.exp(predictor)) if outcome == "Poisson" else dist.Normal(predictor, 0.4), obs=y
        )


def noise_with_f(X, covariate, y=None):
    """Two predictors with f in each row."""
    level = numpyro.sample("level", dist.Normal(0.3, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 0.5))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel_of(), X, jitter=1e-12))
    with numpyro.plate("row", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + level, jnp.exp(0.3 * f + slope * covariate)), obs=y)


JOINT = {
    "counts": (with_effects, COUNTS),
    "Gaussian": (partial(with_effects, outcome="Gaussian"), COUNTS),
    "two predictors": (noise_with_f, COUNTS),
}


def fits(name):
    """Guide, run, losses, and the moments of f at new rows, with places and with inducing inputs at all pairs."""
    model, y = JOINT[name]
    for guide in (sgp.AutoMarkovGP(model, space=Z), sgp.AutoTSVGP(model, PAIRS)):
        svi, result = trained(guide, model, X, COVARIATE, y, num_steps=40, step_size=0.5)
        q = guide.posterior(jax.random.key(1), result.params, NEW, COVARIATE[:5])["f"]
        yield guide, svi, result, q


@pytest.mark.exhaustive
def test_counts_with_latents_beside_f_have_the_joint_posterior_of_inducing_inputs_at_all_pairs():
    (_, _, own, q), (_, _, other, exact) = fits("counts")
    assert_allclose(own.losses, other.losses, rtol=1e-8)
    assert_allclose([q.mean, q.variance], [exact.mean, exact.variance], atol=1e-8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", JOINT)
def test_latents_beside_f_have_the_joint_posterior_of_inducing_inputs_at_all_pairs(name):
    found = []
    for guide, svi, result, q in fits(name):
        quantiles = guide.quantiles(result.params, 0.8, X, COVARIATE)
        loo = sgp.diagnostics.loo_cavity(jax.random.key(1), svi, result.params, X, COVARIATE, JOINT[name][1])
        pointwise = "elpd_i" if hasattr(loo, "elpd_i") else "loo_i"  # of ArviZ 1, and before
        found.append((result.losses, [q.mean, q.variance], q.covariance(), quantiles, getattr(loo, pointwise)))
    (losses, moments, covariance, quantiles, loo), exact = found
    assert_allclose(losses, exact[0], rtol=1e-8)
    assert_allclose(moments, exact[1], atol=1e-8)
    assert_allclose(covariance, exact[2], atol=1e-8)
    for latent in ("level", "slope"):
        assert_allclose(quantiles[latent], exact[3][latent], atol=1e-8)
    assert_allclose(loo, exact[4], atol=1e-7)


@pytest.mark.exhaustive
def test_draws_have_the_posterior_covariance(runs):
    guide, _, result = runs[0]
    # Without jitter none of them may be at a place, where nothing is left to be drawn.
    q = guide.posterior(jax.random.key(1), result.params, np.delete(NEW, 1, axis=0))["f"]
    draws, sd = np.asarray(q.sample(jax.random.key(2), (2_000,))), np.sqrt(np.asarray(q.variance))
    # Five standard errors.
    assert np.max(np.abs(draws.mean(axis=0) - q.mean) / sd) < 5.0 / np.sqrt(2_000)
    assert np.max(np.abs(np.cov(draws.T) - q.covariance()) / np.outer(sd, sd)) < 5.0 * np.sqrt(2.0 / 2_000)


@pytest.mark.exhaustive
def test_draws_beside_latents_have_the_joint_covariance():
    found = []
    for guide in (sgp.AutoMarkovGP(with_effects, space=Z), sgp.AutoTSVGP(with_effects, PAIRS)):
        _, result = trained(guide, with_effects, X, COVARIATE, COUNTS, num_steps=20)
        draws = guide.sample_posterior(jax.random.key(1), result.params, NEW, COVARIATE[:5], sample_shape=(5_000,))
        found.append(np.c_[draws["f"], draws["level"], draws["slope"], draws["predictor"]])
    own, exact = found
    sd = exact.std(axis=0)
    assert np.max(np.abs(own.mean(axis=0) - exact.mean(axis=0)) / sd) < 0.1
    assert np.max(np.abs(np.cov(own.T) - np.cov(exact.T)) / np.outer(sd, sd)) < 0.15


@pytest.mark.thorough
def test_new_outcomes_are_taken_in_as_if_they_had_been_there():
    first, late, y = X[:10], X[10:], RNG.normal(size=N)
    guide = sgp.AutoMarkovGP(normal, space=Z)
    _, early = trained(guide, normal, first, y[:10], num_steps=2, step_size=1.0)
    _, whole = trained(sgp.AutoMarkovGP(normal, space=Z), normal, X, y, num_steps=2, step_size=1.0)
    params = guide.condition(early.params, late, y[10:])
    q, exact = (guide.posterior(jax.random.key(1), each, NEW)["f"] for each in (params, whole.params))
    assert_allclose(q.mean, exact.mean, atol=1e-7)
    assert_allclose(q.variance, exact.variance, atol=1e-7)


@pytest.mark.exhaustive
def test_diagnostics_are_those_of_inducing_inputs_at_all_pairs():
    pointwise, found, model = [], [], partial(counts, jitter=1e-10)
    for guide in (sgp.AutoMarkovGP(model, space=Z), sgp.AutoTSVGP(model, PAIRS)):
        svi, result = trained(guide, model, X, COUNTS, num_steps=60)
        loo = sgp.diagnostics.loo_cavity(jax.random.key(1), svi, result.params, X, COUNTS)
        pointwise.append(getattr(loo, "elpd_i" if hasattr(loo, "elpd_i") else "loo_i"))  # of ArviZ 1, and before
        assert sgp.diagnostics.psis_khat(jax.random.key(1), svi, result.params, X, COUNTS, num_samples=500) < 0.7
        stats = sgp.to_arviz(jax.random.key(1), svi, result, X, COUNTS, num_samples=300)["sample_stats"]
        found.append((np.asarray(stats["lp"] - stats["log_q"]), -float(result.losses[-1])))
    assert_allclose(*pointwise, rtol=1e-6)
    # log p − log q has the bound as its mean.
    for ratio, elbo in found:
        assert abs(ratio.mean() - elbo) < 4.0 * ratio.std() / np.sqrt(ratio.size) + 1e-3
    assert_allclose(found[0][0].std(), found[1][0].std(), rtol=0.3)


@pytest.mark.exhaustive
def test_sums_of_products_have_the_places_of_each():
    """The sum of independent functions, each with inducing values of its own at all pairs."""
    trend, map_of, both = Select(Matern32(2.0), [0]), Select(Matern32(0.9), [1, 2]), kernel_of()
    kernel, y = 0.5 * (both + trend) + map_of, RNG.normal(size=N)
    guide = sgp.AutoMarkovGP(normal, space=Z)
    _, result = trained(guide, normal, X, y, num_steps=2, step_size=1.0, bound="titsias", kernel=kernel)
    # What inducing values at all pairs explain of each function; none is left of one of time alone.
    Q = 0.5 * gram(trend, X)
    for each, factor in ((both, 0.5), (map_of, 1.0)):
        points = np.c_[np.zeros(len(Z)), Z] if each is map_of else PAIRS
        Kuf = factor * gram(each, points, X)
        Q = Q + Kuf.T @ np.linalg.solve(factor * gram(each, points), Kuf)
    S, left = Q + 0.25 * np.eye(N), y - 0.3
    evidence = -0.5 * (left @ np.linalg.solve(S, left) + np.linalg.slogdet(2.0 * np.pi * S)[1])
    K = gram(kernel, X)
    assert_allclose(-result.losses[-1], evidence - 2.0 * np.sum(np.diag(K - Q)), rtol=1e-9)
    q = guide.posterior(jax.random.key(1), result.params, X, kernel=kernel)["f"]
    assert_allclose(q.mean, 0.3 + Q @ np.linalg.solve(S, left), atol=1e-9)
    assert_allclose(q.covariance(), K - Q @ np.linalg.solve(S, Q), atol=1e-9)


@pytest.mark.parametrize(
    ("kernel", "column"),
    [
        (Select(Matern32(1.0), [0]) * Select(Matern32(1.0), [1]), 0),  # both could be
        (Select(Matern32(1.0), [-1]) * Select(SquaredExponential(1.0), [0]), 1),
        (2.0 * (Select(SquaredExponential(1.0), slice(0, 2)) * Select(Select(Matern12(1.0), [1]), [0, 2])), 2),
    ],
)
def test_the_time_is_the_column_of_a_state_space_form(kernel, column):
    D = 3 if column == 2 else 2
    found = separated(kernel, D, jnp.float64, 8)
    assert found.column == column
    assert len(found.terms) == 1
    assert found.with_time(jnp.ones((4, D - 1))).sum(axis=0).tolist() == [0.0 if d == column else 4.0 for d in range(D)]


@pytest.mark.exhaustive
def test_several_functions_with_hyperparameters_of_their_own():
    kernel = Select(Matern32(jnp.asarray([[0.5], [2.0]])), [0]) * Select(Matern52(1.0, jnp.asarray([1.0, 0.3])), [1, 2])

    def several(X, y=None):
        with numpyro.plate("output", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, jitter=0.0))
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(2), obs=y)

    y = RNG.normal(size=(2, N))
    guide = sgp.AutoMarkovGP(several, space=np.unique(X[:, 1:], axis=0))
    _, result = trained(guide, several, X, y, num_steps=1, step_size=1.0)
    q = guide.posterior(jax.random.key(1), result.params, X)["f"]
    for n, K in enumerate(gram(kernel, X)):
        S = np.linalg.inv(K + 0.25 * np.eye(N))
        assert_allclose(q.mean[n], K @ S @ y[n], atol=1e-9)
        assert_allclose(q.covariance()[n], K - K @ S @ K, atol=1e-9)


PAIR = Select(Matern32(1.0), [0]) * Select(Matern32(1.0), [1, 2])


@pytest.mark.parametrize(
    ("kernel", "rows", "places", "error", "message"),
    [
        (Matern32(1.0), X, Z, TypeError, "got Matern32 of 3 columns.*Select"),
        (
            Select(SquaredExponential(1.0), [0]) * Select(SquaredExponential(1.0), [1, 2]),
            X,
            Z,
            TypeError,
            "state-space",
        ),
        (PAIR + Select(Matern32(1.0), [0, 1]), X, Z, TypeError, "column 0 together with others"),
        (PAIR, X, Z[:, :1], ValueError, "one column more"),
        (PAIR, sgp.functionals.Derivative(X, 0), Z, ValueError, "one column more"),
    ],
    ids=["no product", "no state space", "columns together", "width", "functionals"],
)
def test_kernels_and_inputs_that_are_not_of_time_and_place_are_refused(kernel, rows, places, error, message):
    def other(X, y):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        numpyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=y)

    svi = SVI(other, sgp.AutoMarkovGP(other, space=places), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    with pytest.raises(error, match=message):
        svi.init(jax.random.key(0), rows, COUNTS)


def test_places_are_a_matrix_and_associative_scans_have_none():
    with pytest.raises(ValueError, match="`space` must have shape"):
        sgp.AutoMarkovGP(counts, space=Z[:, 0])
    with pytest.raises(ValueError, match="functions of time alone"):
        sgp.AutoMarkovGP(counts, space=Z, parallel=True)


@pytest.mark.exhaustive
def test_other_rows_are_refused_in_training():
    svi = SVI(counts, sgp.AutoMarkovGP(counts, space=Z), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, COUNTS)
    state, _ = jax.jit(svi.update)(state, X[::-1], COUNTS)
    assert sgp.num_refused(state) == 1
    with pytest.raises(ValueError, match="all rows at every step"):
        svi.update(state, X[1:], COUNTS[1:])


@pytest.mark.exhaustive
def test_memory_is_that_of_the_rows_and_of_a_root_of_their_number_of_states():
    sizes = {}
    for many in (4_000, 16_000):
        rows = jnp.asarray(np.c_[np.linspace(0.0, 10.0, many), RNG.uniform(0.0, 2.0, (many, 2))])
        svi = SVI(counts, sgp.AutoMarkovGP(counts, space=Z), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), rows, jnp.ones(many))
        compiled = jax.jit(svi.update).lower(state, rows, jnp.ones(many)).compile()
        sizes[many] = compiled.memory_analysis().temp_size_in_bytes / many
    assert sizes[16_000] < 1.1 * sizes[4_000]
