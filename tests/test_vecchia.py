"""`AutoVecchiaGP`: neighbours, moments given the nearest rows, and the posterior beside dense ones."""

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive
from numpyro.infer.autoguide import AutoDelta
import optax
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Constant, Matern32
from numpyro_sgp.posteriors.vecchia.formulas import moments_given, normaliser_of
from numpyro_sgp.posteriors.vecchia.neighbours import nearest, nearest_before, neighbourhoods

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
N = 60
X = RNG.uniform(0.0, 3.0, (N, 2))
X[3] = X[4]
COUNTS = RNG.poisson(np.exp(0.5 + np.sin(2.0 * X[:, 0]) * np.cos(X[:, 1]))).astype(float)
NEW = RNG.uniform(-1.0, 4.0, (9, 2))
KERNEL = Matern32(0.8, 1.3)


def sets(rows):
    return [set(row[row >= 0].tolist()) for row in np.asarray(rows)]


@pytest.mark.parametrize("traced", [False, True], ids=["on the host", "under jit"])
def test_neighbours_are_the_nearest_rows_and_the_nearest_before(traced):
    rows = np.random.default_rng(1).normal(size=(300, 2))
    distance = np.linalg.norm(rows[:, None] - rows, axis=-1)
    of_all, before = ((lambda X: nearest(X, X, 7)), (lambda X: nearest_before(X, 7)))
    near, (order, found) = (jax.jit(fn)(rows) if traced else fn(rows) for fn in (of_all, before))
    assert sets(near) == sets(np.argsort(distance, axis=1)[:, :7])
    order = np.asarray(order)
    assert_array_equal(np.sort(order), np.arange(300))
    for place, row in enumerate(order):
        earlier = order[:place]
        assert sets(found)[row] == set(earlier[np.argsort(distance[row, earlier])[:7]].tolist())


@pytest.mark.parametrize("traced", [False, True], ids=["on the host", "under jit"])
def test_groups_hold_rows_that_are_near_each_other_and_know_the_rows_near_them(traced):
    rows, size, num = np.random.default_rng(1).normal(size=(300, 2)), 8, 12

    def find(X):
        return neighbourhoods(X, num, size).indices

    members, near, before = (np.asarray(part) for part in (jax.jit(find)(rows) if traced else find(rows)))
    groups = sets(members)
    assert sorted(row for group in groups for row in group) == list(range(300))
    assert all(size // 2 <= len(group) <= size for group in groups)
    assert np.mean([np.ptp(rows[list(group)], axis=0).max() for group in groups]) < 0.3 * np.ptp(rows, axis=0).max()
    rank, of_row = np.random.default_rng(0).permutation(len(groups)), np.zeros(300, int)
    for number, group in enumerate(groups):
        of_row[list(group)] = number
    for number, group in enumerate(groups):
        distance = np.linalg.norm(rows - rows[list(group)].mean(axis=0), axis=1)
        others = np.flatnonzero(of_row != number)
        assert sets(near)[number] == set(others[np.argsort(distance[others])[:num]].tolist())
        earlier = np.flatnonzero(rank[of_row] < rank[number])
        assert sets(before)[number] == set(earlier[np.argsort(distance[earlier])[:num]].tolist())


def test_few_rows_have_few_neighbours():
    assert sets(nearest(X[:3], NEW, 5)) == [{0, 1, 2}] * len(NEW)
    assert_array_equal(nearest(X[:0], NEW[:2], 2), np.full((2, 2), -1))


@pytest.mark.exhaustive
def test_inputs_that_are_no_numbers_are_seen_in_the_posterior():
    guide = sgp.AutoVecchiaGP(with_effects, joint=False)
    svi = SVI(with_effects, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    params = svi.run(jax.random.key(0), 1, X, COUNTS, progress_bar=False).params
    mean = jax.jit(lambda X: guide.posterior(jax.random.key(1), params, X)["f"].mean)
    assert_array_equal(np.isnan(mean(np.where(np.arange(9)[:, None] == 2, np.nan, NEW))), np.arange(9) == 2)
    missing = np.where(np.arange(N)[:, None] == 5, np.nan, X)
    assert (np.asarray(nearest(missing, NEW, 3))[:, 0] == 5).all()
    assert (np.asarray(nearest_before(missing, 3)[1])[:, 0] == 5).all()
    _, near, before = neighbourhoods(missing, 3, 2).indices
    assert (np.asarray(near)[:, 0] == 5).all()
    assert (np.asarray(before)[:, 0] == 5).all()


def of_any(fn):
    """With K + B + Bᵀ in the place of K: a covariance is symmetric."""
    return lambda K, B, *others: fn(K + B + B.T, *others)


def test_moments_given_rows_are_those_of_regression_on_them_and_so_are_their_derivatives():
    K, k = np.asarray(KERNEL(X[:6], X[:6])), np.asarray(KERNEL(X[:6], NEW[:2]))
    w, linear, prior = RNG.uniform(0.2, 3.0, 6), RNG.normal(size=(3, 6)), np.full(2, 1.3)
    mean, variance = moments_given(K, k, prior, linear, w)
    gain = np.linalg.solve(K + np.diag(1.0 / w), k)
    assert_allclose(mean, (linear / w) @ gain, rtol=1e-12)
    assert_allclose(variance, prior - np.sum(k * gain, axis=0), rtol=1e-12)
    given = np.zeros((6, 6)), k, prior, linear, w
    check_grads(lambda *args: of_any(moments_given)(K, *args), given, order=1, modes=("fwd", "rev"), rtol=1e-6)
    # A site that says nothing may stand beside the others.
    rest = np.arange(6) != 2
    silent = moments_given(K, k, prior, np.where(rest, linear, 0.0), np.where(rest, w, 0.0))
    without = moments_given(K[rest][:, rest], k[rest], prior, linear[:, rest], w[rest])
    assert_allclose(silent[0], without[0], rtol=1e-12)
    assert_allclose(silent[1], without[1], rtol=1e-12)


def test_the_normaliser_is_that_of_the_sites_and_so_is_its_derivative():
    K, w, linear = np.asarray(KERNEL(X[10:16], X[10:16])), RNG.uniform(0.2, 3.0, 6), RNG.normal(size=(3, 6))
    log_z, products = normaliser_of(K, linear, w)
    S = np.linalg.inv(np.linalg.inv(K) + np.diag(w))
    assert_allclose(log_z, -0.5 * np.linalg.slogdet(np.eye(6) + K * w)[1], rtol=1e-10)
    assert_allclose(products, linear @ S @ linear.T, rtol=1e-9)
    given = np.zeros((6, 6)), linear, w
    check_grads(lambda *args: of_any(normaliser_of)(K, *args), given, order=1, modes=("fwd", "rev"), rtol=1e-6)


def counts(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", sgp.GaussianProcess(Matern32(lengthscale, 1.3) + Constant(1.0), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def trained(guide, model, num_steps=15, loss=None):
    optim = sgp.NaturalGradient(0.7, optax.adam(0.05))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO() if loss is None else loss)
    result = svi.run(jax.random.key(0), num_steps, X, COUNTS, progress_bar=False)
    assert sgp.num_refused(result.state) == 0
    return svi, result


@pytest.mark.thorough
def test_with_all_rows_as_neighbours_it_is_the_dense_posterior():
    guides = sgp.AutoVecchiaGP(counts, num_neighbours=N, base=AutoDelta), sgp.AutoTSVGP(counts, None, base=AutoDelta)
    runs = [trained(guide, counts) for guide in guides]
    (_, own), (_, other) = runs
    assert_allclose(own.losses, other.losses, rtol=1e-11)
    assert_allclose(own.params["lengthscale_auto_loc"], other.params["lengthscale_auto_loc"], rtol=1e-9)
    q, dense = (g.posterior(jax.random.key(1), r.params, NEW)["f"] for g, r in zip(guides, (own, other), strict=True))
    assert_allclose([q.mean, q.variance], [dense.mean, dense.variance], atol=1e-10)
    assert_allclose(q.covariance(), dense.covariance(), atol=1e-6)  # known values have a variance of 1e-8
    draws = q.sample(jax.random.key(2), (10_000,))
    assert_allclose(np.cov(draws.T), dense.covariance(), atol=0.06)
    loo = [
        sgp.diagnostics.loo_cavity(jax.random.key(1), svi, result.params, X, COUNTS, var_name="y")
        for svi, result in runs
    ]
    pointwise = "elpd_i" if hasattr(loo[0], "elpd_i") else "loo_i"  # of ArviZ 1, and before
    assert_allclose(*(getattr(each, pointwise) for each in loo), rtol=1e-7)


def test_gaussian_noise_has_the_likelihood_of_vecchia():
    def noisy(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X, mean=0.4))
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)

    guide = sgp.AutoVecchiaGP(noisy, num_neighbours=6)
    svi = SVI(noisy, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), 2, X, COUNTS, progress_bar=False)
    members, _, before = (np.asarray(part) for part in neighbourhoods(X, 6, 3).indices)
    S, y = np.asarray(KERNEL(X, X)) + 0.25 * np.eye(N), COUNTS - 0.4

    def log_density(rows):
        return -0.5 * (y[rows] @ np.linalg.solve(S[np.ix_(rows, rows)], y[rows]) + log_determinant(rows))

    def log_determinant(rows):
        return np.linalg.slogdet(2.0 * np.pi * S[np.ix_(rows, rows)])[1]

    total = 0.0
    for own, others in zip(members, before, strict=True):
        rows = others[others >= 0]
        total += log_density(np.r_[rows, own[own >= 0]]) - (log_density(rows) if len(rows) else 0.0)
    assert_allclose(-result.losses[-1], total, rtol=1e-11)
    q = guide.posterior(jax.random.key(1), result.params, NEW)["f"]
    near = np.asarray(nearest(X, NEW, 9))
    k = np.asarray(KERNEL(X, NEW))
    for n, rows in enumerate(near):
        gain = np.linalg.solve(S[np.ix_(rows, rows)], k[rows, n])
        assert_allclose(q.mean[n], 0.4 + y[rows] @ gain, rtol=1e-10)
        assert_allclose(q.variance[n], 1.3 - gain @ k[rows, n], rtol=1e-9)


def test_no_rows_are_predicted_as_none():
    def noisy(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)

    guide = sgp.AutoVecchiaGP(noisy, num_neighbours=6)
    svi = SVI(noisy, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, COUNTS))
    assert guide.posterior(jax.random.key(1), params, NEW[:0])["f"].covariance().shape == (0, 0)
    draws = Predictive(noisy, guide=guide, params=params, num_samples=3)(jax.random.key(1), NEW[:0])
    assert draws["y"].shape == (3, 0)


def with_effects(X, y=None):
    level = numpyro.sample("level", dist.Normal(0.3, 2.0))
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 0.5))
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X, jitter=1e-11))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(f + level), concentration), obs=y)


@pytest.mark.exhaustive
def test_new_outcomes_beside_joint_latents_are_refused():
    guide = sgp.AutoVecchiaGP(with_effects, num_neighbours=5)
    svi = SVI(with_effects, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, COUNTS))
    with pytest.raises(TypeError, match="joint=False"):
        guide.condition(params, NEW, COUNTS[: len(NEW)])


@pytest.mark.exhaustive
def test_latents_beside_f_have_the_joint_posterior_of_inducing_inputs_in_all_rows():
    keep = np.arange(N) != 3  # which is where another is
    found = []
    for guide in (sgp.AutoVecchiaGP(with_effects, num_neighbours=N), sgp.AutoTSVGP(with_effects, X[keep])):
        svi = SVI(with_effects, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
        result = svi.run(jax.random.key(0), 20, X[keep], COUNTS[keep], progress_bar=False)
        q = guide.posterior(jax.random.key(1), result.params, NEW)["f"]
        found.append((result.losses, q.mean, q.variance, guide.quantiles(result.params, 0.8, X[keep], COUNTS[keep])))
    (losses, *own, quantiles), (other_losses, *other, other_quantiles) = found
    assert_allclose(losses, other_losses, rtol=1e-8)
    assert_allclose(own, other, atol=1e-7)
    for name, value in quantiles.items():
        assert_allclose(value, other_quantiles[name], atol=1e-7, err_msg=name)


@pytest.mark.exhaustive
def test_more_neighbours_come_closer_to_the_dense_posterior():
    _, result = trained(guide := sgp.AutoTSVGP(counts, None, base=AutoDelta), counts)
    dense = guide.posterior(jax.random.key(1), result.params, X)["f"]
    errors = []
    for num in (5, 30):
        guide = sgp.AutoVecchiaGP(counts, num_neighbours=num, base=AutoDelta)
        q = guide.posterior(jax.random.key(1), trained(guide, counts)[1].params, X)["f"]
        errors.append(float(np.max(np.abs(q.mean - dense.mean) / np.sqrt(dense.variance))))
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.3


@pytest.mark.exhaustive
def test_several_functions_with_hyperparameters_of_their_own():
    kernel = Matern32(jnp.asarray([0.5, 1.5]), jnp.asarray([1.0, 2.0]))

    def two(X, y=None):
        with numpyro.plate("functions", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        numpyro.sample("y", dist.Normal(f[0] * f[1], 0.5).to_event(1), obs=y)

    found = []
    for guide in (sgp.AutoVecchiaGP(two, num_neighbours=N, joint=False), sgp.AutoTSVGP(two, None)):
        svi = SVI(two, guide, sgp.NaturalGradient(0.3), sgp.QuadratureELBO())
        result = svi.run(jax.random.key(0), 5, X, COUNTS, progress_bar=False)
        found.append((result.losses, guide.posterior(jax.random.key(1), result.params, NEW)["f"]))
    (losses, q), (other_losses, dense) = found
    assert_allclose(losses, other_losses, rtol=1e-10)
    assert_allclose([q.mean, q.variance], [dense.mean, dense.variance], atol=1e-9)
    assert_allclose(q.covariance(), dense.covariance(), atol=1e-6)


@pytest.mark.thorough
def test_new_outcomes_are_taken_in_as_if_they_had_been_there():
    def noisy(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)

    guide = sgp.AutoVecchiaGP(noisy, num_neighbours=N)
    svi = SVI(noisy, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    params = svi.run(jax.random.key(0), 1, X[:40], COUNTS[:40], progress_bar=False).params
    params = guide.condition(params, X[40:], COUNTS[40:])
    q = guide.posterior(jax.random.key(1), params, NEW)["f"]
    gain = np.linalg.solve(np.asarray(KERNEL(X, X)) + 0.25 * np.eye(N), np.asarray(KERNEL(X, NEW)))
    assert_allclose(q.mean, COUNTS @ gain, atol=1e-8)


@pytest.mark.exhaustive
def test_a_step_has_no_matrix_of_all_rows():
    sizes = {}
    for many in (2000, 8000):
        rows = np.random.default_rng(0).uniform(size=(many, 2))
        svi = SVI(counts, sgp.AutoVecchiaGP(counts, num_neighbours=8), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), rows, np.ones(many))
        update = jax.jit(svi.update).lower(state, rows, np.ones(many)).compile()
        sizes[many] = update.memory_analysis().temp_size_in_bytes
    assert sizes[8000] < 6 * sizes[2000]
    assert sizes[8000] < 8 * 8000 * 2000


@pytest.mark.thorough
def test_rows_in_another_order_are_refused_in_training():
    svi = SVI(counts, sgp.AutoVecchiaGP(counts), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, COUNTS)
    state, _ = jax.jit(svi.update)(state, X[::-1], COUNTS)
    assert sgp.num_refused(state) == 1
    with pytest.raises(ValueError, match="all rows at every step"):
        svi.update(state, X[1:], COUNTS[1:])


def test_mistakes_are_refused():
    for number in (0, 2.5):
        with pytest.raises(ValueError, match=f"`num_neighbours` must be a positive integer, got {number}."):
            sgp.AutoVecchiaGP(counts, num_neighbours=number)

    def slopes(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, sgp.functionals.Derivative(X, 0)))
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(1), obs=y)

    svi = SVI(slopes, sgp.AutoVecchiaGP(slopes), sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    with pytest.raises(TypeError, match="Derivative"):
        svi.init(jax.random.key(0), X, COUNTS)
