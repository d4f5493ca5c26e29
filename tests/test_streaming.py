"""`Streaming`: batches that are seen once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import pytest

import numpyro_sgp as sgp

pytestmark = pytest.mark.usefixtures("x64")

N, M, NOISE = 36, 6, 0.3
rng = np.random.default_rng(0)
X = rng.uniform(-2.0, 2.0, (N, 1))
GROUP = rng.integers(0, 4, N)
y = np.sin(2.0 * X[:, 0]) + NOISE * rng.normal(size=N)
Z = np.linspace(-2.0, 2.0, M)[:, None]
X_NEW = np.linspace(-2.2, 2.2, 9)[:, None]
BATCHES = [slice(0, 12), slice(12, 24), slice(24, 36)]


def fixed(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(0.9), X, mean=0.2))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def learned(X, y=None, num_data=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def effects(X, group, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(0.9), X))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + level + effect[group], NOISE), obs=y)


def svi_of(model, Z=Z, others=None, base=AutoDelta, **options):
    guide = sgp.AutoTSVGP(model, Z, base=base, **options)
    others = optax.set_to_zero() if others is None else others
    return SVI(model, guide, sgp.NaturalGradient(1.0, others), sgp.QuadratureELBO())


def streamed(svi, args, batches=BATCHES, **options):
    stream = sgp.Streaming(svi, **{"move_inducing": False, "num_steps": 2} | options)
    state = stream.init(jax.random.key(0), *(each[batches[0]] for each in args))
    for batch in batches:
        state, losses = stream.update(state, *(each[batch] for each in args))
    return stream, state, losses


def matern52(X, Z, lengthscale=0.9):
    r = np.sqrt(5.0) * np.abs(X - Z.T) / lengthscale
    return (1.0 + r + r**2 / 3.0) * np.exp(-r)


def sparse_posterior(X, y, Z, weights=None):
    """Mean and variance of f(X_NEW) under the optimal q(u), rows counted with weights."""
    W = np.ones(len(y)) if weights is None else weights
    Kuu = matern52(Z, Z) + 1e-6 * np.eye(len(Z))
    Kuf, Kus = matern52(Z, X), matern52(Z, X_NEW)
    S = Kuu + (Kuf * W / NOISE**2) @ Kuf.T
    mean = 0.2 + Kus.T @ np.linalg.solve(S, Kuf @ (W * (y - 0.2) / NOISE**2))
    explained = np.sum(Kus * np.linalg.solve(Kuu, Kus), axis=0) - np.sum(Kus * np.linalg.solve(S, Kus), axis=0)
    return mean, 1.0 - explained


def at_new(svi, params):
    f = svi.guide.posterior(jax.random.key(0), params, X_NEW)["f"]
    return f.mean, f.variance


@pytest.mark.parametrize("memory", [0, pytest.param(5, marks=pytest.mark.thorough), 100])
def test_with_gaussian_noise_the_stream_ends_at_the_posterior_of_all_rows(memory):
    svi = svi_of(fixed)
    stream, state, _ = streamed(svi, (X, y), memory=memory)
    np.testing.assert_allclose(at_new(svi, stream.get_params(state)), sparse_posterior(X, y, Z), atol=1e-8)
    assert int(state.num_seen) == N
    assert len(state.memory[1]) == min(memory, N)
    # Each row in the memory is one of the stream, with its outcome.
    for row, outcome in zip(*state.memory, strict=True):
        (place,) = np.flatnonzero(X[:, 0] == row[0])
        assert y[place] == outcome


def test_a_discount_counts_rows_less_with_every_batch():
    svi = svi_of(fixed)
    stream, state, _ = streamed(svi, (X, y), memory=0, discount=0.6)
    weights = np.repeat([0.36, 0.6, 1.0], 12)
    np.testing.assert_allclose(at_new(svi, stream.get_params(state)), sparse_posterior(X, y, Z, weights), atol=1e-8)


@pytest.mark.exhaustive
def test_a_discount_is_in_the_sites_before_the_steps_and_in_the_age_of_the_memory():
    svi = svi_of(fixed)
    _, state, _ = streamed(svi, (X, y), BATCHES[:2], memory=0, discount=0.6)
    half = SVI(fixed, svi.guide, sgp.NaturalGradient(0.5, optax.set_to_zero()), sgp.QuadratureELBO())
    half.init(jax.random.key(0), X[:12], y[:12])
    stream = sgp.Streaming(half, memory=0, discount=0.6, num_steps=1, move_inducing=False)
    state, _ = stream.update(state, X[24:], y[24:])
    weights = np.repeat([0.36, 0.6, 0.5], 12)
    np.testing.assert_allclose(at_new(svi, stream.get_params(state)), sparse_posterior(X, y, Z, weights), atol=1e-8)

    stream, before, _ = streamed(svi, (X, y), BATCHES[:2], memory=8, discount=0.6)
    after, _ = stream.update(before, X[24:], y[24:])
    stayed = np.isin(after.memory[1], before.memory[1])
    assert stayed.any()
    assert np.isin(np.asarray(after.keys)[stayed], 0.6 * np.asarray(before.keys)).all()


@pytest.mark.thorough
def test_with_a_memory_of_everything_a_step_is_that_of_the_batch_with_all_rows():
    svi = svi_of(learned, others=optax.sgd(1e-3))
    stream, state, _ = streamed(svi, (X, y), BATCHES[:2], memory=N)
    batch = svi.init(jax.random.key(1), X, y, init_params=stream.get_params(state), num_data=N)
    batch, loss = svi.update(batch, X, y, num_data=N)
    state, losses = stream.update(state, X[24:], y[24:], num_steps=1)
    np.testing.assert_allclose(losses, [loss], rtol=1e-10)
    expected, found = svi.get_params(batch), stream.get_params(state)
    for name in ("auto_lengthscale_loc", "lengthscale_auto_loc", "noise_auto_loc"):
        if name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-9)
    np.testing.assert_allclose(at_new(svi, found), at_new(svi, expected), atol=1e-8)


@pytest.mark.exhaustive
def test_the_memory_stands_for_what_the_past_does_not_know_of():
    """The gradient is that of the past, the rows, and −½ w Σ_m {[(y_m − m_m)² + T_m²]/σ² + log(1 + r_m/σ²)} at fixed m and T."""
    svi = svi_of(learned, others=optax.sgd(1e-3))
    stream, state, _ = streamed(svi, (X, y), BATCHES[:2], memory=6)
    params = stream.get_params(state)
    ell, noise = (float(svi.guide.median(params)[name]) for name in ("lengthscale", "noise"))
    rows, outcomes = (np.asarray(each) for each in state.memory)
    q = svi.guide.posterior(jax.random.key(0), params, rows)["f"]
    Kuf = matern52(Z, rows, ell)
    A = np.linalg.solve(np.linalg.cholesky(matern52(Z, Z, ell) + 1e-6 * np.eye(M)), Kuf)
    unexplained = 1.0 - np.sum(A * A, axis=0)

    def rest(theta):
        ell, noise = theta
        K = jnp.asarray(matern52_jax(Z, Z, ell)) + 1e-6 * jnp.eye(M)
        k = matern52_jax(Z, rows, ell)
        r = 1.0 - jnp.sum(k * jnp.linalg.solve(K, k), axis=0)
        square = (outcomes - q.mean) ** 2 + (q.variance - unexplained)
        return jnp.sum(-jnp.log(noise) - 0.5 * square / noise**2 - 0.5 * jnp.log(1.0 + r / noise**2))

    weight = 24 / 6 - 1.0
    expected = weight * np.asarray(jax.grad(rest)(jnp.asarray([ell, noise])))

    def step(memory_weight):
        raw = svi.optim.get_params(state.svi_state.optim_state)
        given = (*jax.tree.map(lambda old, new: jnp.concatenate([old, new]), state.memory, (X[24:], y[24:])),)
        moved, _ = stream._train(
            state.svi_state, raw, state.past, given, jnp.asarray(memory_weight), kept=6, num_steps=1, kwargs=()
        )
        return svi.optim.get_params(moved.optim_state)

    with_rest, without = step(weight), step(0.0)
    names = [next(n for n in with_rest if latent in n) for latent in ("lengthscale", "noise")]
    # Steps on logarithms.
    found = np.array([float(with_rest[name] - without[name]) for name in names]) / 1e-3
    np.testing.assert_allclose(found, expected * [ell, noise], rtol=1e-6)


def matern52_jax(X, Z, lengthscale):
    r = jnp.sqrt(5.0) * jnp.abs(X - Z.T) / lengthscale
    return (1.0 + r + r**2 / 3.0) * jnp.exp(-r)


@pytest.mark.parametrize("fewest", [64, 2], ids=["dense", "eliminated"])
@pytest.mark.exhaustive
def test_effects_of_groups_are_carried_with_the_past(fewest, monkeypatch):
    monkeypatch.setattr("numpyro_sgp.guides.group._FEWEST_EFFECTS", fewest)
    svi = svi_of(effects, base=AutoNormal)
    stream, state, _ = streamed(svi, (X, GROUP, y), memory=4)
    other = svi_of(effects, base=AutoNormal)
    batch = other.run(jax.random.key(0), 2, X, GROUP, y, progress_bar=False).params
    groups = np.zeros(len(X_NEW), int)
    for probability in (0.5, 0.9):
        found = svi.guide.quantiles(stream.get_params(state), probability, X_NEW, groups)
        expected = other.guide.quantiles(batch, probability, X_NEW, groups)
        assert found.keys() == expected.keys() == {"f", "level", "effect"}
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=1e-8)


@pytest.mark.parametrize("model", [fixed, pytest.param(effects, marks=pytest.mark.exhaustive)], ids=["alone", "joint"])
def test_inducing_inputs_that_are_added_leave_the_posterior_as_it_was(model):
    args = (X, y) if model is fixed else (X, GROUP, y)
    svi = svi_of(model, base=AutoNormal)
    stream, state, _ = streamed(svi, args, BATCHES[:2], memory=0)
    params = stream.get_params(state)
    more = sgp.InducingPoints(jnp.concatenate([Z[:3], np.array([[0.13]]), Z[3:], np.array([[2.5]])]))
    inducing = {"f_auto_inducing": more}
    moved, past = stream._move(params, state.past, inducing, tuple(each[24:] for each in args), kwargs=())
    assert moved["f_auto_inducing"].num_inducing == M + 2
    new = (X_NEW,) if model is fixed else (X_NEW, np.zeros(len(X_NEW), int))
    before, after = (svi.guide.quantiles(p, jnp.asarray([0.1, 0.5]), *new) for p in (params, moved))
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, atol=1e-6)
    # And so does a state whose past is all there is.
    assert jax.tree.map(jnp.shape, past).keys() == state.past.keys()


def test_sites_at_inducing_inputs_that_are_dropped_are_functions_of_the_others():
    svi = svi_of(fixed)
    stream, state, _ = streamed(svi, (X, y), BATCHES[:2], memory=0)
    params = stream.get_params(state)
    fewer = sgp.InducingPoints(jnp.asarray(np.delete(Z, 2, axis=0)))
    moved, past = stream._move(params, state.past, {"f_auto_inducing": fewer}, (X[24:], y[24:]), kwargs=())
    K = matern52(fewer.Z, fewer.Z) + 1e-6 * np.eye(M - 1)
    B = np.insert(np.eye(M - 1), 2, matern52(Z[2:3], np.asarray(fewer.Z)) @ np.linalg.inv(K), axis=0)
    for sites, before in ((moved["f_auto_sites"], params), (past["f_auto_sites"], state.past)):
        old = before["f_auto_sites"]
        np.testing.assert_allclose(sites.lambda1, B.T @ old.lambda1, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(sites.Lambda2, B.T @ old.Lambda2 @ B, rtol=1e-7, atol=1e-9)


@pytest.mark.thorough
def test_inducing_inputs_follow_the_data_and_grow_in_number():
    order = np.argsort(X[:, 0])
    svi = svi_of(fixed, Z=X[order[:4]])
    stream = sgp.Streaming(svi, memory=4, num_steps=2, max_inducing=10, tolerance=1e-3)
    parts = np.split(order, 3)
    state, numbers = stream.init(jax.random.key(0), X[parts[0]], y[parts[0]]), []
    for part in parts:
        state, _ = stream.update(state, X[part], y[part])
        inducing = stream.get_params(state)["f_auto_inducing"].Z
        numbers.append(len(inducing))
    assert 4 <= numbers[0] < numbers[-1] <= 10
    assert inducing.min() < -1.0 < 1.0 < inducing.max()
    # Close to the dense posterior, which has an inducing input for each row.
    mean, variance = at_new(svi, stream.get_params(state))
    expected, dense_variance = sparse_posterior(X, y, X)
    np.testing.assert_allclose(mean, expected, atol=0.15)
    np.testing.assert_allclose(variance, dense_variance, atol=0.1)


def test_a_fixed_number_of_inducing_inputs_moves_with_the_data():
    order = np.argsort(X[:, 0])
    svi = svi_of(fixed, Z=X[order[:12:2]])
    stream, state, _ = streamed(svi, (X[order], y[order]), memory=0, move_inducing=True)
    inducing = stream.get_params(state)["f_auto_inducing"].Z
    assert inducing.shape == (6, 1)
    assert inducing.min() < -1.0 < 1.0 < inducing.max()


def test_inducing_inputs_are_centres_of_all_rows_while_the_memory_holds_these():
    svi = svi_of(fixed, Z=np.linspace(-9.0, -8.0, M)[:, None])
    stream, state, _ = streamed(svi, (X, y), BATCHES[:2], memory=12, move_inducing=True)
    inducing = np.asarray(stream.get_params(state)["f_auto_inducing"].Z)
    nearest = np.argmin(np.abs(X[:24] - inducing.T), axis=1)
    np.testing.assert_allclose(inducing[:, 0], [X[:24, 0][nearest == m].mean() for m in range(M)], rtol=1e-12)
    np.testing.assert_allclose(at_new(svi, stream.get_params(state)), sparse_posterior(X[:24], y[:24], inducing))
    # Then rows have left, and at most the share of the batch in all rows is new.
    state, _ = stream.update(state, X[24:], y[24:])
    later = np.asarray(stream.get_params(state)["f_auto_inducing"].Z)
    assert M - np.ceil(M * (len(X) - 24) / len(X)) <= np.isin(later, inducing).sum()


@pytest.mark.exhaustive
def test_fitted_parameters_go_on_as_the_past():
    svi = svi_of(fixed)
    fitted = svi.run(jax.random.key(0), 1, X[:12], y[:12], progress_bar=False).params
    stream = sgp.Streaming(svi, memory=3, num_steps=2, move_inducing=False)
    state = stream.init(jax.random.key(0), X[12:24], y[12:24], init_params=fitted)
    for batch in BATCHES[1:]:
        state, _ = stream.update(state, X[batch], y[batch])
    np.testing.assert_allclose(at_new(svi, stream.get_params(state)), sparse_posterior(X, y, Z), atol=1e-8)


@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    svi = svi_of(learned, others=optax.adam(0.05))
    stream, state, _ = streamed(svi, (X, y), BATCHES[:2], memory=8, move_inducing=True)
    sgp.save_checkpoint(tmp_path / "state.npz", state)
    other = sgp.Streaming(svi_of(learned, others=optax.adam(0.05)), memory=8, num_steps=2)
    fresh = other.init(jax.random.key(5), X[:12], y[:12])
    with pytest.raises(ValueError, match="does not fit"):
        sgp.load_checkpoint(tmp_path / "state.npz", fresh)
    loaded = sgp.load_checkpoint(tmp_path / "state.npz", fresh, any_size=True)
    ends = [each.update(s, X[24:], y[24:])[0] for each, s in ((stream, state), (other, loaded))]
    first, second = (jax.tree.leaves(each.get_params(end)) for each, end in zip((stream, other), ends, strict=True))
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, two)


def test_no_batch_after_the_memory_is_full_traces_the_model_again():
    runs = []

    def counted(X, y=None):
        runs.append(X.shape)
        fixed(X, y)

    svi = svi_of(counted)
    stream, state, _ = streamed(svi, (X, y), memory=6, move_inducing=True)
    before = len(runs)
    state, _ = stream.update(state, X[:12], y[:12])
    assert len(runs) == before


@pytest.mark.parametrize("memory", [2, pytest.param(256, id="all stay")])
def test_rows_that_are_no_numbers_raise_and_leave_the_state(memory):
    svi = svi_of(fixed)
    stream, state, _ = streamed(svi, (X, y), BATCHES[:2], memory=memory)
    bad = y[24:].copy()
    bad[3] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        stream.update(state, X[24:], bad)
    state, _ = stream.update(state, X[24:], y[24:])
    np.testing.assert_allclose(at_new(svi, stream.get_params(state)), sparse_posterior(X, y, Z), atol=1e-8)


def test_what_is_not_for_streams_raises():
    with pytest.raises(TypeError, match="AutoTSVGP"):
        sgp.Streaming(SVI(fixed, sgp.AutoTSVGP(fixed, Z), optax.adam(0.1), sgp.QuadratureELBO()))
    with pytest.raises(TypeError, match="QuadratureELBO"):
        sgp.Streaming(SVI(fixed, sgp.AutoTSVGP(fixed, Z), sgp.NaturalGradient(), numpyro.infer.Trace_ELBO()))
    for option in ({"discount": 0.0}, {"max_inducing": -5}, {"max_inducing": 2.5}, {"tolerance": 7.0}):
        with pytest.raises(ValueError, match=f"`{next(iter(option))}`"):
            sgp.Streaming(svi_of(fixed), **option)
    with pytest.raises(TypeError, match="learn_inducing"):
        sgp.Streaming(svi_of(fixed, learn_inducing=True)).init(jax.random.key(0), X, y)
    with pytest.raises(TypeError, match="tied"):
        sgp.Streaming(svi_of(fixed, sites="per_datum")).init(jax.random.key(0), X, y)
    stream = sgp.Streaming(svi_of(fixed))
    with pytest.raises(ValueError, match="one row for each datum"):
        stream.update(stream.init(jax.random.key(0), X, y), X, y[:3])


def test_the_past_is_not_in_the_parameters_for_the_guide():
    svi = svi_of(fixed)
    stream, state, _ = streamed(svi, (X, y), memory=2)
    sites = stream.get_params(state)["f_auto_sites"]
    assert sites.past is None
    assert svi.get_params(state.svi_state)["f_auto_sites"].past is not None
    assert dataclasses.is_dataclass(sites)
