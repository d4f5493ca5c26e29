"""`RowSparse` and `AutoQSGP` in training: what is touched, where it leads, and mistakes of users."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta
import optax
import pytest

import numpyro_sgp as sgp
from numpyro_sgp import features, kernels
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import WeightTable

RNG = np.random.default_rng(0)
N, RANK, BATCH, NOISE = 8, 60, 10, 0.3
X = RNG.uniform(-1.0, 1.0, size=(N, 2)).astype(np.float32)
Y = RNG.normal(size=N).astype(np.float32)
Z = X[:3]


def fourier(rank=RANK):
    return features.RandomFourier(kernels.SquaredExponential(0.7), rank, jax.random.key(1))


def model(X, y=None, num_data=None, likelihood=None, kernel=None):
    f = numpyro.sample("f", sgp.GaussianProcess(fourier() if kernel is None else kernel, X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE) if likelihood is None else likelihood(f), obs=y)


def svi_of(step_size=0.1, *, optim=None, loss=None, the_model=model, others=None, seed=0, refresh=10_000, **options):
    options = {"basis_batch": BATCH, **options}
    if options.get("covariance") != "chevron":
        options.setdefault("inducing", Z)
    guide = sgp.AutoQSGP(the_model, **options)
    optim = sgp.RowSparse(step_size, others, seed=seed, refresh=refresh) if optim is None else optim
    return SVI(the_model, guide, optim, sgp.QuadratureELBO() if loss is None else loss)


def table(params):
    return params["f_auto_basis"]


@pytest.fixture(scope="module")
def trained():
    """10 000 steps in single precision, with a control variate that is never computed anew."""
    svi = svi_of(control=X, refresh=10**6)
    return svi, svi.run(jax.random.key(0), 10_000, X, Y, progress_bar=False)


@pytest.mark.exhaustive
def test_the_trained_mean_is_the_ridge_solution(trained):
    svi, result = trained
    Phi, Phi_u = (np.asarray(fourier().features(at), np.float64) for at in (X, Z))
    k = kernels.SquaredExponential(0.7)
    L = np.linalg.cholesky(np.asarray(k(Z, Z), np.float64) + 1e-4 * np.eye(len(Z)))
    A = np.linalg.solve(L, np.asarray(k(Z, X), np.float64))
    # Weights of u, and of what u does not say, are independent: features of both kinds side by side.
    both = np.concatenate([A.T, Phi - A.T @ np.linalg.solve(L, Phi_u)], axis=1)
    ridge = both.T @ np.linalg.solve(both @ both.T + NOISE**2 * np.eye(N), Y)
    q = svi.guide.posterior(jax.random.key(0), result.params, X)["f"]
    assert_allclose(q.mean, both @ ridge, atol=1e-3)
    assert np.all(np.isfinite(result.losses))


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_what_is_tracked_is_its_recomputation_after_ten_thousand_steps(trained):
    _, result = trained
    inner = result.state.optim_state[1]
    a, rest = inner.tracked["f_auto_basis"]
    assert_allclose(a + rest, table(result.params).tracked(), atol=1e-4)
    assert float(jnp.max(jnp.abs(a))) > 0.1
    assert sgp.num_refused(result.state) == 0


@pytest.mark.thorough
def test_a_step_touches_the_sampled_rows_only_and_is_adagrad_with_their_gradients():
    svi = svi_of(0.1)
    state = svi.init(jax.random.key(0), X, Y)
    update = jax.jit(svi.update)
    first, _ = update(state, X, Y)
    second, _ = update(first, X, Y)
    before, after = (np.asarray(table(svi.get_params(s)).values)[:, 0] for s in (first, second))
    sums = [np.asarray(s.optim_state[1].sums["f_auto_basis"])[:, 0] for s in (first, second)]
    assert np.sum(before != 0) == BATCH
    assert_allclose(np.abs(before[before != 0]), 0.1, rtol=1e-5)  # the first step of AdaGrad is a sign
    moved = after != before
    assert np.sum(moved) == BATCH
    squares = (sums[1] - sums[0])[moved]
    assert_allclose(np.abs((after - before)[moved]), 0.1 * np.sqrt(squares / sums[1][moved]), rtol=1e-4)


@pytest.mark.exhaustive
def test_update_run_scan_and_fit_with_a_checkpoint_take_the_same_steps(tmp_path):
    svi = svi_of(control=X[:4])
    key, steps = jax.random.key(0), 6
    result = svi.run(key, steps, X, Y, progress_bar=False)
    state = svi.init(key, X, Y)
    traces = []

    @jax.jit
    def update(state, X, Y):
        traces.append(1)
        return svi.stable_update(state, X, Y)

    for _ in range(steps):
        state, _ = update(state, X, Y)
    assert len(traces) == 1
    wanted = table(result.params).values
    assert_allclose(table(svi.get_params(state)).values, wanted, rtol=1e-5, atol=1e-6)

    def fitted(num_steps, folder):
        options = {"batch_size": N, "num_steps": num_steps, "progress_bar": False}
        return sgp.fit(svi, key, (X, Y), checkpoint=sgp.Checkpoint(tmp_path / folder, every=3), **options).params

    assert_allclose(table(fitted(steps, "whole")).values, wanted, rtol=1e-5, atol=1e-6)
    fitted(3, "parts")
    np.testing.assert_array_equal(table(fitted(steps, "parts")).values, table(fitted(steps, "whole")).values)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    svi = svi_of(control=X[:4])
    state = svi.init(jax.random.key(0), X, Y)
    update = jax.jit(svi.stable_update)
    state, _ = update(state, X, Y)
    refused, loss = update(state, X, np.full_like(Y, np.nan))
    assert np.isnan(loss)
    assert sgp.num_refused(refused) == 1
    kept = state.optim_state[1]._replace(refused=refused.optim_state[1].refused)
    jax.tree.map(np.testing.assert_array_equal, refused.optim_state[1], kept)


def test_a_refresh_takes_the_kernel_as_it_is_by_then():
    def learnt(X, y=None):
        lengthscale = numpyro.param("lengthscale", 0.7, constraint=dist.constraints.positive)
        kernel = features.RandomFourier(kernels.SquaredExponential(lengthscale), RANK, jax.random.key(1))
        model(X, y, kernel=kernel)

    svi = svi_of(the_model=learnt, control=X[:4], refresh=3, others=optax.sgd(1e-3))
    update = jax.jit(svi.update)
    state = svi.init(jax.random.key(0), X, Y)
    lengthscales, held = [], []
    for _ in range(4):
        lengthscales.append(float(svi.get_params(state)["lengthscale"]))
        state, _ = update(state, X, Y)
        held.append(float(table(svi.get_params(state)).control.kernel.kernel.lengthscale))
    assert_allclose(held, [lengthscales[0]] * 2 + [lengthscales[2]] * 2, rtol=1e-6)
    a, rest = state.optim_state[1].tracked["f_auto_basis"]
    assert_allclose(a + rest, table(svi.get_params(state)).tracked(), atol=1e-5)


@pytest.mark.parametrize("covariance", ["inducing", "chevron"])
def test_neither_initialisation_nor_a_step_needs_prior_variances_with_all_features(covariance, monkeypatch):
    def only_its_shape(self, X):
        assert isinstance(X, jax.core.Tracer), "a factorisation of m features"
        return jnp.full(X.shape[:-1], jnp.nan)

    monkeypatch.setattr(features.AbstractFiniteRank, "_diagonal", only_its_shape)
    kernel = features.InducingBasis(kernels.SquaredExponential(0.7), X)
    svi = svi_of(basis_batch=4, covariance=covariance, the_model=lambda X, y=None: model(X, y, kernel=kernel))
    state = svi.init(jax.random.key(0), X, Y)
    assert np.isfinite(jax.jit(svi.update)(state, X, Y)[1])


@pytest.mark.thorough
def test_a_relevance_vector_machine_finds_few_vectors_and_predicts_as_well_without_the_others():
    n = 60
    x = np.linspace(-10.0, 10.0, n, dtype=np.float32)[:, None]
    truth = np.sinc(x[:, 0] / np.pi)
    y = truth + 0.05 * np.random.default_rng(1).normal(size=n).astype(np.float32)
    kernel = features.InducingBasis(kernels.SquaredExponential(1.5), x)

    def sinc(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.05), obs=y)

    guide = sgp.AutoQSGP(sinc, basis_batch=30, covariance="chevron", dense_columns=4, control=n, relevance=True)
    svi = SVI(sinc, guide, sgp.RowSparse(0.03), sgp.QuadratureELBO())
    params = svi.run(jax.random.key(0), 15_000, x, y, progress_bar=False).params
    # Columns of K are near copies of their neighbours.
    kept = guide.relevant_vectors(params)
    assert 3 <= len(kept.index) <= n // 3
    assert_allclose(kept.mean, table(params).values[kept.index, 0])
    rmse = [
        float(np.sqrt(np.mean((guide.posterior(jax.random.key(1), p, x)["f"].mean - truth) ** 2)))
        for p in (params, guide.pruned(params))
    ]
    assert rmse[0] < 0.05
    assert rmse[1] < 0.05


# Mistakes.


def says(*parts):
    return "(?s)" + ".*".join(re.escape(part) for part in parts)


def run_one(svi, **keywords):
    return svi.run(jax.random.key(0), 1, X, Y, progress_bar=False, **keywords)


def trained_basis(X_, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    model(X_, y, kernel=features.InducingBasis(kernels.Matern52(scale), X))


MISTAKES = {
    "more than there are": (lambda: run_one(svi_of(basis_batch=61)), ("`basis_batch` is 61", "m = 60", "at most 60")),
    "one of several": (lambda: run_one(svi_of(basis_batch=1)), ("`basis_batch` is 1", "at least 2")),
    "dense precision": (
        lambda: run_one(
            svi_of(basis_batch=3, covariance="chevron", the_model=trained_basis, base=AutoDelta),
        ),
        ("with respect to a hyperparameter", "dense prior precision", "log|S|", "inducing"),
    ),
    "not log-concave": (
        lambda: run_one(svi_of(), likelihood=lambda f: dist.StudentT(4.0, f, 1.0)),
        ("'y' is StudentT", "log-concave", "AutoSVGP"),
    ),
    "control of another likelihood": (
        lambda: run_one(svi_of(control=2), likelihood=lambda f: dist.Laplace(f, 1.0)),
        ("control variate", "not Gaussian"),
    ),
    "another loss": (lambda: run_one(svi_of(loss=TraceMeanField_ELBO())), ("QuadratureELBO",)),
    "no table": (
        lambda: run_one(SVI(model, sgp.AutoSVGP(model, Z), sgp.RowSparse(), sgp.QuadratureELBO())),
        ("no table", "AutoQSGP"),
    ),
    "step size": (lambda: sgp.RowSparse(0.0), ("`step_size` must be positive", "0.0")),
    "refresh": (lambda: sgp.RowSparse(refresh=0), ("`refresh`",)),
    "dense columns": (lambda: svi_of(dense_columns=3), ("`dense_columns=3`", "chevron")),
    "covariance": (lambda: svi_of(covariance="full"), ("`covariance` must be", "'full'")),
    "relevance": (lambda: svi_of(relevance=True), ("relevance", "chevron")),
    "site": (
        lambda: sgp.AutoQSGP(model).relevant_vectors({}, "g"),
        ("'g'", "parameters of this guide"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_what_came_and_what_to_do(mistake):
    do, parts = MISTAKES[mistake]
    with pytest.raises(ValueError, match=says(*parts)):
        do()


def test_mistakes_of_type_and_what_cannot_be_done_are_told():
    with pytest.raises(TypeError, match="optax transformation"):
        sgp.RowSparse(others=0.1)

    def batch(X, y=None):
        with numpyro.plate("class", 2):
            numpyro.sample("f", sgp.GaussianProcess(fourier(), X))

    with pytest.raises(ValueError, match="one latent for each GP site"):
        svi_of(the_model=batch).init(jax.random.key(0), X)


def test_a_plain_optimizer_on_a_long_table_is_warned_of_with_the_bytes():
    values = jax.ShapeDtypeStruct((10**8, 1), jnp.float32)
    svi = svi_of(optim=optax.sgd(0.1))

    def loss(values):
        params = svi.get_params(svi.init(jax.random.key(0), X, Y, kernel=fourier(10**4)))
        params["f_auto_basis"] = WeightTable(values, None, 1000, None)
        return svi.loss.loss(jax.random.key(0), params, model, svi.guide, X, Y, kernel=fourier(10**8))

    with pytest.warns(UserWarning, match=r"m = 100,000,000 .*3,200,000,000 bytes.*RowSparse"):
        jax.eval_shape(loss, values)


@pytest.mark.thorough
def test_hyperparameters_with_priors_are_trained_with_the_rows():
    def full(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        kernel = features.RandomFourier(kernels.SquaredExponential(lengthscale), RANK, jax.random.key(1))
        model(X, y, kernel=kernel)

    svi = svi_of(the_model=full, covariance="chevron", base=AutoDelta)
    result = svi.run(jax.random.key(0), 30, X, Y, progress_bar=False)
    draws = numpyro.infer.Predictive(full, guide=svi.guide, params=result.params, num_samples=3)(jax.random.key(1), X)
    assert draws["y"].shape == (3, N)
    assert np.all(np.isfinite(draws["y"]))
    assert sgp.num_refused(result.state) == 0
