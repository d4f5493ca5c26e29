"""Where inducing inputs are put: selection against dense linear algebra, the trace error, inputs kept in a box."""

from functools import partial

from guides import GUIDES
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
from numpyro.infer import SVI
import optax
import oracles
from problems import D, Model
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.inducing import BoundedInducingPoints, InducingPoints, as_inducing, selection

LENGTHSCALE, VARIANCE = np.array([0.7, 1.4]), 1.7
ROWS = np.random.default_rng(0).normal(size=(60, D)) * np.array([1.0, 3.0])
SELECTIONS = {"greedy": sgp.greedy_variance, "kmeans": sgp.kmeans, "subset": sgp.subset}


def kernel(lengthscale=LENGTHSCALE):
    return sgp.kernels.SquaredExponential(lengthscale, VARIANCE)


def trace_of_residual(Z, X=ROWS, jitter=0.0):
    Kuu = oracles.with_jitter(oracles.se(Z, Z, LENGTHSCALE, VARIANCE), jitter)
    Kuf = oracles.se(Z, X, LENGTHSCALE, VARIANCE)
    return VARIANCE * len(X) - np.sum(Kuf * np.linalg.solve(Kuu, Kuf))


def is_a_row_of(Z, X):
    return all(np.any(np.all(z == X, axis=1)) for z in np.asarray(Z))


# Greedy conditional variance.


@pytest.mark.usefixtures("x64")
def test_greedy_rows_are_those_of_the_dense_conditional_variance():
    K = oracles.se(ROWS, ROWS, LENGTHSCALE, VARIANCE)
    chosen = []
    for _ in range(40):
        variance = np.diag(K).copy()
        if chosen:
            Kuf = K[chosen]
            variance -= np.sum(Kuf * np.linalg.solve(K[np.ix_(chosen, chosen)], Kuf), axis=0)
            variance[chosen] = -1.0
        chosen.append(int(np.argmax(variance)))
    # More rows than a block of the factor has.
    assert_allclose(sgp.greedy_variance(kernel(), ROWS, num_inducing=40), ROWS[chosen])


@pytest.mark.usefixtures("x64")
@pytest.mark.exhaustive
def test_greedy_rows_explain_more_one_by_one_and_more_than_random_rows_once_they_cover_the_data():
    X = np.random.default_rng(1).uniform(-1.2, 1.2, size=(200, D))
    numbers = (1, 2, 5, 10, 20, 40)
    traces = [trace_of_residual(sgp.greedy_variance(kernel(), X, num_inducing=m), X) for m in numbers]
    assert np.all(np.diff(traces) < 0.0)
    for m, trace in zip(numbers[4:], traces[4:], strict=True):  # enough to cover the data
        keys = jax.random.split(jax.random.key(0), 10)
        assert trace < min(trace_of_residual(sgp.subset(None, X, key, num_inducing=m), X) for key in keys)


@pytest.mark.parametrize("name", SELECTIONS)
def test_duplicates_are_chosen_once_and_too_many_are_refused(name):
    repeated = np.concatenate([ROWS[:8]] * 5)
    select = partial(SELECTIONS[name], kernel(), repeated, jax.random.key(0))
    Z = np.asarray(select(num_inducing=8))
    assert len(np.unique(Z, axis=0)) == 8
    with pytest.raises(ValueError, match="`num_inducing` is 9, but X has only 8 distinct rows"):
        select(num_inducing=9)
    with pytest.raises(ValueError, match="`num_inducing` is 41, but X has 40 rows"):
        select(num_inducing=41)
    with pytest.raises(ValueError, match="`num_inducing` must be a positive integer, got 0"):
        select(num_inducing=0)


def test_rows_that_the_kernel_cannot_tell_apart_are_filled_up_with_a_warning():
    with pytest.warns(UserWarning, match=r"explain all rows of X up to rounding.*random rows"):
        Z = sgp.greedy_variance(kernel(100.0), ROWS, jax.random.key(0), num_inducing=30)
    assert len(np.unique(Z, axis=0)) == 30
    assert is_a_row_of(Z, ROWS.astype(np.float32))


def test_a_batch_of_kernels_is_refused():
    with pytest.raises(ValueError, match="`kernel` must be one kernel, got variances of shape"):
        sgp.greedy_variance(kernel(np.ones((3, 1))), ROWS, num_inducing=4)
    with pytest.raises(ValueError, match="`kernel` must be one kernel, got variances of shape"):
        sgp.trace_error(kernel(np.ones((3, 1))), ROWS, ROWS[:4])


# How many.


@pytest.mark.usefixtures("x64")
def test_the_suggested_number_is_the_smallest_that_meets_the_tolerance():
    suggestion = sgp.suggest_num_inducing(kernel(), ROWS, tolerance=0.05)
    Z, total = np.asarray(suggestion.inducing), VARIANCE * len(ROWS)
    assert len(Z) == suggestion.num_inducing
    assert trace_of_residual(Z) <= 0.05 * total < trace_of_residual(Z[:-1])
    expected = [trace_of_residual(Z[: m + 1]) / total for m in range(len(Z))]
    assert_allclose(suggestion.relative_errors, expected, rtol=1e-9)
    with pytest.raises(ValueError, match=r"3 inducing inputs leave .* Raise `max_num_inducing`"):
        sgp.suggest_num_inducing(kernel(), ROWS, tolerance=0.05, max_num_inducing=3)
    with pytest.raises(ValueError, match=r"`tolerance` must lie in \(0, 1\).*got 2"):
        sgp.suggest_num_inducing(kernel(), ROWS, tolerance=2.0)


@pytest.mark.parametrize("chunk", [7, 100])
@pytest.mark.usefixtures("x64")
def test_the_trace_error_is_dense_whatever_the_chunk(chunk, monkeypatch):
    monkeypatch.setattr(selection, "_CHUNK", chunk)
    Z = ROWS[::9] + 0.1
    error = sgp.trace_error(kernel(), ROWS, Z, jitter=1e-6)
    Kuu = oracles.with_jitter(oracles.se(Z, Z, LENGTHSCALE, VARIANCE), 1e-6)
    Kuf = oracles.se(Z, ROWS, LENGTHSCALE, VARIANCE)
    unexplained = VARIANCE - np.sum(Kuf * np.linalg.solve(Kuu, Kuf), axis=0)
    assert_allclose(error, [unexplained.sum(), unexplained.sum() / (VARIANCE * 60), unexplained.max()], rtol=1e-9)


# k-means and random rows.


@pytest.mark.usefixtures("x64")
def test_kmeans_centres_are_the_means_of_the_rows_nearest_to_them():
    centres = np.asarray(sgp.kmeans(None, ROWS, jax.random.key(0), num_inducing=6, num_iterations=50))
    scaled, scaled_centres = ROWS / ROWS.std(0), centres / ROWS.std(0)
    nearest = np.argmin(np.sum((scaled[:, None] - scaled_centres) ** 2, axis=-1), axis=1)
    assert_allclose(scaled_centres, [scaled[nearest == i].mean(0) for i in range(6)], rtol=1e-10, atol=1e-12)


def test_kmeans_of_a_part_of_the_rows_and_of_constant_columns_is_finite():
    X = np.column_stack([ROWS, np.full(len(ROWS), 3.0)])
    Z = np.asarray(sgp.kmeans(None, X, num_inducing=5, num_rows=30))
    assert_allclose(Z[:, -1], 3.0)
    assert np.all(np.isfinite(Z))


def test_a_subset_is_distinct_rows_and_another_key_takes_others():
    first, again, second = (sgp.subset(None, ROWS, jax.random.key(k), num_inducing=10) for k in (0, 0, 1))
    assert is_a_row_of(first, ROWS.astype(np.float32))
    assert len(np.unique(first, axis=0)) == 10
    assert_allclose(first, again)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_memory_map_gives_what_the_array_gives(name, tmp_path):
    np.save(tmp_path / "X.npy", ROWS)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    select = partial(SELECTIONS[name], kernel(), rng_key=jax.random.key(0), num_inducing=6)
    assert_allclose(select(X=mapped), select(X=ROWS))


def test_a_traced_input_is_refused():
    with pytest.raises(TypeError, match="`X` is being traced"):
        jax.jit(lambda X: sgp.kmeans(None, X, num_inducing=3))(ROWS)
    with pytest.raises(ValueError, match=r"`X` must have shape \(N, D\), got \(60,\)"):
        sgp.subset(None, ROWS[:, 0], num_inducing=3)


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_guide_runs_the_selection_at_initialisation(name):
    model = Model()
    X = np.random.default_rng(1).uniform(-1.2, 1.2, size=(20, D))
    guide = sgp.AutoSVGP(model, partial(SELECTIONS[name], num_inducing=4))
    svi = SVI(model, guide, optax.sgd(0.1), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, np.zeros(20)))
    assert params["f_auto_inducing"].Z.shape == (4, D)
    assert len(np.unique(params["f_auto_inducing"].Z, axis=0)) == 4


# Inputs in a box.


@pytest.mark.parametrize("name", ["whitened", "natural", "tied", "per_datum"])
def test_trained_inducing_inputs_stay_in_their_box(name):
    model = Model()
    X = np.random.default_rng(1).uniform(0.0, 1.0, size=(20, D))
    corners = np.array([[0.0, 0.0], [1.0, 1.0], [0.4, 0.6], [0.0, 1.0]])
    box = sgp.BoundedInducingPoints.at(corners, 0.0, [1.0, 1.0])
    assert_allclose(box.Z, np.clip(corners, 1e-3, 1.0 - 1e-3), rtol=1e-4)
    guide = GUIDES[name](model, box, learn_inducing=True)
    optim = optax.adam(1.0)
    svi = SVI(model, guide, optim if name == "whitened" else sgp.NaturalGradient(0.5, optim), sgp.QuadratureELBO())
    y = np.sin(5.0 * X[:, 0])
    state, update = svi.init(jax.random.key(0), X, y), jax.jit(svi.update)
    for _ in range(10):
        state, loss = update(state, X, y)
    moved = svi.get_params(state)["f_auto_inducing"].Z
    assert np.isfinite(loss)
    assert np.max(abs(moved - corners)) > 0.1
    assert np.all((moved >= 0.0) & (moved <= 1.0))


@pytest.mark.usefixtures("x64")
def test_a_box_of_inducing_inputs_has_the_covariances_of_its_points():
    Z, others, X = ROWS[:5], ROWS[5:9], ROWS[10:17]
    box, points = sgp.BoundedInducingPoints.at(Z, -20.0, 20.0), InducingPoints(jnp.asarray(Z))
    other = InducingPoints(jnp.asarray(others))
    assert_allclose(box.Kuu(kernel()), points.Kuu(kernel()), rtol=1e-10)
    assert_allclose(box.Kuf(kernel(), X), points.Kuf(kernel(), X), rtol=1e-10)
    assert_allclose(box.Kuv(kernel(), other), points.Kuv(kernel(), other), rtol=1e-10)
    assert_allclose(other.Kuv(kernel(), box), points.Kuv(kernel(), other).T, rtol=1e-10)


def test_a_box_without_extent_or_without_its_inputs_is_refused():
    with pytest.raises(ValueError, match="`lower` must be smaller than `upper`"):
        sgp.BoundedInducingPoints.at(ROWS, 1.0, [2.0, 1.0])
    with pytest.raises(ValueError, match="inducing inputs lie outside of the box"):
        sgp.BoundedInducingPoints.at(ROWS, -0.5, 0.5)


def test_inputs_that_are_not_numbers_are_told_and_nan_is_never_lost():
    broken = np.where(np.arange(len(ROWS))[:, None] == 3, np.nan, ROWS)
    for choose in (
        lambda: sgp.suggest_num_inducing(kernel(), broken),
        lambda: sgp.greedy_variance(kernel(), broken, num_inducing=5),
    ):
        with pytest.raises(ValueError, match="`X` has entries that are not finite"):
            choose()
    # Kuu of equal rows without jitter has no factor.
    error = sgp.trace_error(kernel(), ROWS, np.repeat(ROWS[:2], 5, 0), jitter=0.0)
    assert np.isnan([error.total, error.relative, error.largest]).all()
    with pytest.raises(ValueError, match="`max_num_inducing` must be a positive integer"):
        sgp.suggest_num_inducing(kernel(), ROWS, max_num_inducing=0)
    for nothing, got in ((sgp.kernels.Linear(), "0"), (sgp.kernels.Linear(jnp.nan), "nan")):
        with pytest.raises(ValueError, match=f"positive prior variance at some row of `X`, got at most {got}"):
            sgp.suggest_num_inducing(nothing, np.zeros((4, 1)))


def test_whole_numbers_are_inputs_and_inducing_inputs_too():
    whole = np.arange(10)[:, None]
    found = sgp.trace_error(sgp.kernels.SquaredExponential(3.0), whole, whole[::3])
    wanted = sgp.trace_error(
        sgp.kernels.SquaredExponential(3.0), whole.astype(np.float32), whole[::3].astype(np.float32)
    )
    assert_allclose(found, wanted, rtol=1e-5)
    made = as_inducing(InducingPoints(whole))
    assert jnp.issubdtype(made.Z.dtype, jnp.floating)
    with pytest.raises(ValueError, match="inducing"):
        as_inducing(InducingPoints(np.full((3, 1), np.nan)))


@pytest.mark.usefixtures("x64")
def test_a_box_has_the_dtype_of_its_inputs():
    box = BoundedInducingPoints.at(np.linspace(0.0, 0.1, 5, dtype=np.float32)[:, None], 0.0, 0.1)
    assert_allclose(box.Z[:, 0], np.linspace(0.0, 0.1, 5), atol=2e-4)
