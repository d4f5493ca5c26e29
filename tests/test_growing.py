"""Inducing inputs added while training: equal to those of a fixed basis, without a change of q, and well chosen."""

import dataclasses
from functools import partial
import warnings

from decoupled_oracle import GAMMA, arbitrary
from grids import representative
from guides import LOOSE, initial_parameters, loss_at
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
import optax
import oracles
from problems import JITTER, LENGTHSCALE, MEAN, NOISE, VARIANCE, X_NEW, D, M, Model, N, X, Z
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.inducing import Candidates, ProbedInducing, added, report_candidates
from numpyro_sgp.posteriors.decoupled.coefficients import Coefficients
from numpyro_sgp.posteriors.sites import TiedSites

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(11)
LARGE_X = RNG.uniform(-3.0, 3.0, size=(60, 1))
LARGE_Y = np.sin(2.0 * LARGE_X[:, 0]) + NOISE * RNG.normal(size=60)


def basis_of(inputs, capacity, rows=N):
    """A growing basis with some inducing inputs in it already."""
    empty = sgp.growing(None, np.zeros((rows, inputs.shape[-1])), capacity=capacity)
    number = len(inputs)
    return dataclasses.replace(
        empty, reference=empty.reference.at[:number].set(inputs), active=empty.active.at[:number].set(1.0)
    )


def padded(value, like):
    """A parameter in the larger array of another, which stays as it is where the parameter says nothing."""
    if isinstance(value, TiedSites | Coefficients):
        names = ("lambda1", "Lambda2") if isinstance(value, TiedSites) else ("values",)
        changes = {name: padded(getattr(value, name), getattr(like, name)) for name in names}
        return dataclasses.replace(like, **changes)
    if isinstance(like, sgp.GrowingInducing | sgp.InducingPoints) or not jax.tree.leaves(value):
        return like
    value, like = np.asarray(value), np.array(like)
    like[tuple(slice(size) for size in value.shape)] = value
    return like


FORMS = {
    "whitened": lambda gamma, beta: partial(sgp.AutoSVGP, inducing=beta),
    "natural": lambda gamma, beta: partial(sgp.AutoSVGP, inducing=beta, natural=True),
    **{
        kind: lambda gamma, beta, kind=kind: partial(
            sgp.AutoDecoupledGP,
            mean_inducing=gamma,
            cov_inducing=beta,
            parametrization=kind,
            natural=kind in ("full", "solve"),
        )
        for kind in ("orthogonal", "hybrid", "full", "solve")
    },
}


class Pair:
    """A guide with a fixed basis, and one with room for more, at the same posterior."""

    def __init__(self, form, model=None):
        self.model = Model() if model is None else model
        self.y = self.model.y
        self.fixed = FORMS[form](GAMMA, Z)(self.model)
        beta = Z if form in ("orthogonal", "solve") else basis_of(Z, M + 3)
        self.growing = FORMS[form](basis_of(GAMMA, len(GAMMA) + 2), beta)(self.model)
        params = arbitrary(initial_parameters(self.model, self.fixed, X, self.y))
        if form == "orthogonal":  # the units of coefficients that a growing basis has
            params["f_auto_a"] = dataclasses.replace(params["f_auto_a"], residual=None)
        like = initial_parameters(self.model, self.growing, X, self.y)
        self.params = params
        self.like = {name: padded(value, like[name]) for name, value in params.items()}

    def grown(self):
        """The parameters with more inducing inputs, in both bases."""
        params = dict(self.like)
        for name, rows in (("f_auto_inducing", X_NEW[:2]), ("f_auto_mean_inducing", X_NEW[2:3])):
            if isinstance(params.get(name), sgp.GrowingInducing):
                params[name] = added(params[name], candidates(params[name], rows), 3)
        return params


def candidates(basis, rows, scale=1.0):
    """What the derivatives are where some rows of a batch were chosen, the last with the largest score."""
    zeros = Candidates.zeros(basis)
    number = len(rows)
    return Candidates(
        scale * zeros.X.at[:number].set(rows),
        scale * zeros.score.at[:number].set(0.1 * np.arange(1, number + 1)),
        scale * jnp.ones(()),
    )


def test_what_is_not_there_covaries_with_nothing():
    kernel = sgp.kernels.SquaredExponential(jnp.asarray(LENGTHSCALE), jnp.asarray(VARIANCE))
    basis, fixed = basis_of(Z, M + 3), sgp.InducingPoints(jnp.asarray(Z))
    other = sgp.InducingPoints(jnp.asarray(GAMMA))
    for ours, expected in (
        (basis.Kuf(kernel, X), fixed.Kuf(kernel, jnp.asarray(X))),
        (basis.Kuv(kernel, other), fixed.Kuv(kernel, other)),
        (jnp.swapaxes(other.Kuv(kernel, basis), -1, -2), fixed.Kuv(kernel, other)),
    ):
        assert_allclose(ours[:M], expected, rtol=1e-14)
        assert_array_equal(ours[M:], 0.0)
    Kuu = np.asarray(basis.Kuu(kernel))
    assert_allclose(Kuu[:M, :M], fixed.Kuu(kernel), rtol=1e-14)
    assert_allclose(Kuu[M:], VARIANCE * np.eye(M + 3)[M:], rtol=1e-14)
    some = jnp.array([M, 1])
    assert_allclose(basis.take(some).Kuf(kernel, X), np.asarray(basis.Kuf(kernel, X))[[M, 1]], rtol=1e-14)


def test_empty_room_leaves_the_digits_of_inputs_far_from_the_origin():
    # Four columns and more take distances from products, about a centre that must lie among the inputs.
    rng = np.random.default_rng(0)
    Z, far = (rng.normal(size=(n, 5)).astype(np.float32) + np.float32(1e4) for n in (3, 6))
    room = np.zeros((20, 5), np.float32)
    basis = sgp.GrowingInducing(
        jnp.asarray(np.concatenate([Z, room])), jnp.zeros((23, 5), jnp.float32), jnp.asarray([1.0] * 3 + [0.0] * 20), 6
    )
    kernel = sgp.kernels.SquaredExponential(np.float32(2.0))
    for K, inputs in ((basis.Kuf(kernel, jnp.asarray(far)), far), (basis.Kuu(kernel)[:, :3], Z)):
        assert_allclose(K[:3], oracles.se(Z.astype(float), inputs.astype(float), 2.0), rtol=1e-5)
        assert_array_equal(K[3:], 0.0)


def moments_of(guide):
    @jax.jit
    def at_new(params):
        q = guide.posterior(jax.random.key(0), params, X_NEW, None)["f"]
        return q.mean, q.variance, q.covariance(), q.kl

    return at_new


@pytest.mark.parametrize("form", representative(FORMS, ["whitened", "hybrid", "full"]))
def test_unused_room_changes_nothing_and_neither_does_an_inducing_input_when_it_is_added(form):
    pair = Pair(form)
    moments = moments_of(pair.growing)
    before = moments(pair.like)
    for value, wanted in zip(before, moments_of(pair.fixed)(pair.params), strict=True):
        assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)
    grown = pair.grown()
    beta, gamma = (grown.get(f"f_auto_{symbol}") for symbol in ("inducing", "mean_inducing"))
    if isinstance(beta, sgp.GrowingInducing):
        assert_array_equal(beta.Z[M : M + 2], X_NEW[[1, 0]])
        assert int(beta.num_active) == M + 2
    if gamma is not None:
        assert int(gamma.num_active) == len(GAMMA) + 1
    for value, wanted in zip(moments(grown), before, strict=True):
        assert_allclose(value, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", representative(["whitened", "orthogonal"], ["orthogonal"]))
def test_gradients_are_those_of_the_fixed_basis_and_zero_in_unused_room(form):
    pair = Pair(form)
    fixed = jax.grad(lambda params: loss_at(params, pair.model, pair.fixed, X, pair.y))(pair.params)
    growing = jax.grad(lambda params: loss_at(params, pair.model, pair.growing, X, pair.y))(pair.like)
    for name, gradient in fixed.items():
        if name.endswith("inducing"):
            continue
        expected = jax.tree.leaves(padded(gradient, jax.tree.map(jnp.zeros_like, growing[name])))
        for value, wanted in zip(jax.tree.leaves(growing[name]), expected, strict=True):
            assert_allclose(value, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["hybrid", "solve"])
def test_a_process_knows_what_is_there(form):
    pair = Pair(form)
    process = sgp.process_posterior(pair.growing, jax.random.key(0), pair.like, X, pair.y)["f"]
    expected = pair.fixed.posterior(jax.random.key(0), pair.params, X_NEW, None)["f"]
    assert_allclose(process.posterior(X_NEW).mean, expected.mean, rtol=1e-7)
    assert_allclose(process.posterior(X_NEW).variance, expected.variance, rtol=1e-6)


@pytest.mark.exhaustive
def test_functions_know_what_is_there():
    pair = Pair("solve")
    expected = pair.fixed.posterior(jax.random.key(0), pair.params, X_NEW, None)["f"]
    functions = pair.growing.sample_functions(
        jax.random.key(1), pair.like, X, pair.y, num_samples=2000, num_features=64
    )
    centred = np.asarray(functions["f"](X_NEW)) - np.asarray(expected.mean)
    assert np.all(np.abs(centred.mean(axis=0)) < 5.0 * centred.std(axis=0) / np.sqrt(len(centred)))
    products = centred[:, :, None] * centred[:, None, :]
    error = products.std(axis=0) / np.sqrt(len(centred))
    assert np.all(np.abs(products.mean(axis=0) - expected.covariance()) < 5.0 * error)


# Which rows are chosen.


def greedy(K, explained, number, skipped_after_two=None):
    """Rows by residual variance, one by one, each with its residual when it was chosen."""
    residual, found = K - explained, []
    for step in range(number):
        share = np.diag(residual) / np.diag(K)
        share[[row for row, _ in found]] = -np.inf
        if step >= 2 and skipped_after_two is not None:
            share[skipped_after_two] = -np.inf
        row = int(np.argmax(share))
        found.append((row, share[row]))
        residual = residual - np.outer(residual[:, row], residual[row]) / residual[row, row]
    return found


def asked(bases, X, root, num_new, tolerance=1e-3, scale=1.0):
    kernel = sgp.kernels.SquaredExponential(jnp.asarray(LENGTHSCALE), jnp.asarray(VARIANCE))

    def value(zeros):
        growing = [ProbedInducing(basis, zero, num_new, tolerance) for basis, zero in zip(bases, zeros, strict=True)]
        return scale * report_candidates(growing, kernel, X, root)

    zeros = [Candidates.zeros(basis) for basis in bases]
    assert float(value(zeros)) == 0.0
    return jax.grad(value)(zeros)


def test_rows_are_chosen_greedily_by_residual_variance_first_for_one_basis_then_for_the_other():
    rows = np.random.default_rng(3).uniform(-1.2, 1.2, size=(12, D))
    beta, gamma = basis_of(Z, M + 2, len(rows)), basis_of(rows[[4]], 6, len(rows))
    K = oracles.se(rows, rows, LENGTHSCALE, VARIANCE)
    Kuu = oracles.with_jitter(oracles.se(Z, Z, LENGTHSCALE, VARIANCE), JITTER)
    root = np.linalg.solve(np.linalg.cholesky(Kuu), oracles.se(Z, rows, LENGTHSCALE, VARIANCE))
    first, second = asked([beta, gamma], rows, jnp.asarray(root), 3, scale=0.25)
    # There is room for two more in β; the row of γ that is there already is not for γ.
    wanted = greedy(K, root.T @ root, 2)
    scores = np.zeros(12)
    scores[[row for row, _ in wanted]] = [share for _, share in wanted]
    assert_allclose(first.score / first.scale, scores, rtol=1e-7, atol=1e-12)
    rest = greedy(K, root.T @ root, 5, skipped_after_two=4)[2:]
    chosen = np.argsort(-np.asarray(second.score))[:3]
    assert list(chosen) == [row for row, _ in rest]
    assert_allclose(first.scale, 0.25)
    grown = added(beta, first, 3)
    assert int(grown.num_active) == M + 2
    assert_allclose(grown.Z[M:], rows[[row for row, _ in wanted]], rtol=1e-15)


def test_rows_that_are_explained_are_not_chosen_and_neither_are_equal_ones():
    rows = np.concatenate([Z, np.full((4, D), 5.0), np.full((2, D), np.nan)])
    beta = basis_of(Z, M + 6, len(rows))
    Kuu = oracles.with_jitter(oracles.se(Z, Z, LENGTHSCALE, VARIANCE), JITTER)
    root = np.linalg.solve(np.linalg.cholesky(Kuu), oracles.se(Z, rows, LENGTHSCALE, VARIANCE))
    (found,) = asked([beta], jnp.asarray(rows[:-2]), jnp.asarray(root[:, :-2]), 6, 0.01)
    grown = added(beta, found, 6)
    assert int(grown.num_active) == M + 1
    assert_array_equal(grown.Z[M], rows[M])


def test_rows_that_are_no_numbers_are_not_added():
    basis = basis_of(Z, M + 3)
    wanted = candidates(basis, np.array([[np.nan, 1.0], [2.0, 1.0]]))
    assert_array_equal(added(basis, wanted, 3).Z[M], [2.0, 1.0])
    assert int(added(basis, wanted, 3).num_active) == M + 1
    nothing = dataclasses.replace(wanted, score=np.nan * wanted.score)
    assert int(added(basis, nothing, 3).num_active) == M


# Growing runs.


def fixed_hyperparameters():
    """A model whose hyperparameters are given, on data in one dimension; counts its traces."""
    traces = []

    def model(X, y=None, num_data=None):
        traces.append(None)
        kernel = sgp.kernels.SquaredExponential(0.7, VARIANCE)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, MEAN, jitter=JITTER))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    return model, traces


def titsias(inducing):
    Kuu = oracles.with_jitter(oracles.se(inducing, inducing, 0.7, VARIANCE), JITTER)
    Kuf = oracles.se(inducing, LARGE_X, 0.7, VARIANCE)
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    covariance = Q + NOISE**2 * np.eye(len(LARGE_X))
    r = LARGE_Y - MEAN
    log_density = -0.5 * (
        r @ np.linalg.solve(covariance, r) + np.linalg.slogdet(covariance)[1] + len(r) * np.log(2.0 * np.pi)
    )
    return log_density - 0.5 * np.sum(VARIANCE - np.diag(Q)) / NOISE**2


def test_a_growing_run_compiles_once_fills_its_basis_says_so_and_ends_at_the_optimum_of_its_inputs():
    model, traces = fixed_hyperparameters()
    guide = sgp.AutoSVGP(model, partial(sgp.growing, capacity=9), natural=True)
    svi = SVI(model, guide, sgp.GrowBasis(sgp.NaturalGradient(1.0), num_new=2), LOOSE)
    state = svi.init(jax.random.key(0), LARGE_X, LARGE_Y)
    assert int(svi.get_params(state)["f_auto_inducing"].num_active) == 0
    update = jax.jit(svi.update)
    sizes, losses, seen = [], [], None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(9):
            state, loss = update(state, LARGE_X, LARGE_Y)
            seen = len(traces) if step == 0 else seen
            sizes.append(int(svi.get_params(state)["f_auto_inducing"].num_active))
            losses.append(float(loss))
        jax.effects_barrier()
    assert len(traces) == seen
    assert sizes == [2, 4, 6, 8, 9, 9, 9, 9, 9]
    full = [str(w.message) for w in warned if "is full" in str(w.message)]
    assert len(full) == 1
    assert "'f_auto_inducing' is full: training goes on with its 9 inducing inputs" in full[0]
    inducing = np.asarray(svi.get_params(state)["f_auto_inducing"].Z)
    assert len(np.unique(inducing, axis=0)) == 9
    assert {*inducing[:, 0]} <= {*LARGE_X[:, 0]}
    # The natural step on the last inputs is a step before the loss that sees it.
    assert_allclose(-losses[-1], titsias(inducing), rtol=1e-9)
    assert losses[0] > losses[2] > losses[4] > losses[-1]
    # The inputs are those that a greedy choice from the prior takes.
    K = oracles.se(LARGE_X, LARGE_X, 0.7, VARIANCE)
    assert_allclose(inducing[0], LARGE_X[greedy(K, 0.0 * K, 1)[0][0]])


@pytest.mark.exhaustive
def test_a_run_of_plain_steps_with_particles_moves_the_inputs_that_are_there():
    model = Model()
    guide = sgp.AutoDecoupledGP(
        model,
        partial(sgp.growing, capacity=5),
        partial(sgp.growing, capacity=4),
        parametrization="hybrid",
        base=AutoDelta,
        learn_inducing=True,
    )
    optim = sgp.GrowBasis(optax.adam(1e-2), num_new=1, tolerance=1e-2)
    svi = SVI(model, guide, optim, sgp.QuadratureELBO(num_particles=2))
    state = svi.init(jax.random.key(0), X, model.y)
    update = jax.jit(svi.stable_update)
    for _ in range(3):
        state, loss = update(state, X, model.y)
        assert np.isfinite(loss)
    params = svi.get_params(state)
    beta, gamma = params["f_auto_inducing"], params["f_auto_mean_inducing"]
    assert int(beta.num_active) == 3
    assert int(gamma.num_active) == 3
    for basis in (beta, gamma):
        moved = np.any(np.asarray(basis.offset) != 0.0, axis=-1)
        # Those added in the last step have had no gradient yet; those of γ none before their coefficients moved.
        assert_array_equal(moved[2:], False)
        assert {*map(tuple, np.asarray(basis.reference)[:3])} <= {*map(tuple, X)}
    assert np.any(np.asarray(beta.offset)[0] != 0.0)
    # Different rows for the two in each step.
    assert np.all(np.any(np.asarray(beta.reference)[:3] != np.asarray(gamma.reference)[:3], axis=-1))
    assert_array_equal(np.asarray(params["f_auto_a"].values)[3:], 0.0)


@pytest.mark.exhaustive
def test_minibatches_checkpoints_and_the_count_of_refused_steps(tmp_path):
    model, _ = fixed_hyperparameters()
    guide = sgp.AutoSVGP(model, partial(sgp.growing, capacity=30), natural=True)
    svi = SVI(model, guide, sgp.GrowBasis(sgp.NaturalGradient(0.5), num_new=2), sgp.QuadratureELBO())
    data = (LARGE_X, LARGE_Y)
    fit = partial(sgp.fit, svi, jax.random.key(0), data, batch_size=20, progress_bar=False)
    whole = fit(num_steps=12)
    checkpoint = sgp.Checkpoint(tmp_path / "run", every=4)
    fit(num_steps=8, checkpoint=checkpoint)
    resumed = fit(num_steps=12, checkpoint=checkpoint)
    basis = whole.params["f_auto_inducing"]
    number = int(basis.num_active)
    assert 6 < number < 30
    residual = np.diag(oracles.se(LARGE_X, LARGE_X, 0.7, VARIANCE)) - 0.0
    inducing = np.asarray(basis.Z)[:number]
    Kuu = oracles.with_jitter(oracles.se(inducing, inducing, 0.7, VARIANCE), JITTER)
    Kuf = oracles.se(inducing, LARGE_X, 0.7, VARIANCE)
    residual = residual - np.sum(Kuf * np.linalg.solve(Kuu, Kuf), axis=0)
    # All rows were seen several times: what is left at any of them is below the tolerance.
    assert np.max(residual) / VARIANCE < 0.011
    for value, expected in zip(jax.tree.leaves(resumed.params), jax.tree.leaves(whole.params), strict=True):
        assert_array_equal(value, expected)
    assert int(sgp.num_refused(resumed.state)) == 0


# Mistakes.


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sgp.growing(None, X, capacity=0), ValueError, "`capacity` must be a positive integer, got 0"),
        (lambda: sgp.GrowBasis("adam"), TypeError, "must be an optimizer for `SVI`, got str"),
        (lambda: sgp.GrowBasis(optax.adam(1.0), num_new=0), ValueError, "`num_new` must be a positive integer"),
        (lambda: sgp.GrowBasis(optax.adam(1.0), tolerance=1.0), ValueError, r"`tolerance` must lie in \(0, 1\)"),
        (lambda: sgp.median_lengthscale(X[:, 0]), ValueError, r"must have shape \(N, D\)"),
        (lambda: sgp.median_lengthscale(X * np.nan), ValueError, "not finite"),
    ],
    ids=["capacity", "optim", "num_new", "tolerance", "vector", "nan"],
)
def test_numbers_out_of_range_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("guide", "form"),
    [
        (partial(sgp.AutoSVGP, whiten=False), "the unwhitened form"),
        (sgp.AutoTSVGP, "the sites of `AutoTSVGP`"),
        (partial(sgp.AutoTSVGP, sites="per_datum"), "the sites of `AutoTSVGP`"),
        (
            lambda model, beta: sgp.AutoDecoupledGP(model, GAMMA, beta, parametrization="full"),
            'the covariance of `parametrization="full"` with `natural=False`',
        ),
        (
            lambda model, beta: sgp.AutoDecoupledGP(model, GAMMA, beta),
            'the covariance of `parametrization="orthogonal"`',
        ),
    ],
    ids=["unwhitened", "tied", "per_datum", "full", "orthogonal"],
)
def test_posteriors_that_would_change_refuse_a_growing_basis(guide, form):
    model = Model()
    with pytest.raises(ValueError, match="Growing inducing inputs were given with " + form):
        initial_parameters(model, guide(model, partial(sgp.growing, capacity=3)), X, model.y)


def test_a_guide_without_a_growing_basis_is_told_so():
    model = Model()
    svi = SVI(model, sgp.AutoSVGP(model, Z), sgp.GrowBasis(optax.adam(1e-2)), sgp.QuadratureELBO())
    with pytest.raises(ValueError, match="found no growing inducing inputs among the parameters"):
        svi.init(jax.random.key(0), X, model.y)


def test_median_lengthscales():
    rows = np.random.default_rng(0).normal(size=(40, 3)) * [1.0, 10.0, 0.0]
    rows[:, 2] = 4.0
    expected = []
    for column in rows.T[:2]:
        distances = [abs(a - b) for i, a in enumerate(column) for b in column[:i]]
        expected.append(np.sqrt(3.0) * np.median(distances))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_allclose(sgp.median_lengthscale(rows), [*expected, 1.0])
    binary = np.repeat([0.0, 2.0], 30)[:, None]
    assert_allclose(sgp.median_lengthscale(binary), [2.0])
    assert_allclose(sgp.median_lengthscale(np.arange(10.0)[:, None], max_rows=2), [9.0])
