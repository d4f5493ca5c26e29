"""`fit`: the steps it takes are those of SVI on the rows of a permutation, whatever interrupts them; checkpoints."""

from collections import Counter
import functools
from pathlib import Path
import sys
import tracemalloc

from grids import representative
from guides import GUIDES, optimizer
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
from problems import BATCH, LIKELIHOODS, Model, N, X, Z
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.fitting import AbstractCallback, Checkpoint, EarlyStopping, fit, load_checkpoint, save_checkpoint
from numpyro_sgp.fitting import batches as batches_module
from numpyro_sgp.fitting.batches import Batches, native
from numpyro_sgp.fitting.program import Program

training_module = sys.modules["numpyro_sgp.fitting.training"]
KEY = jax.random.key(7)
Y = LIKELIHOODS["normal"].y
quiet_fit = functools.partial(fit, progress_bar=False)


def linear(X, y=None, num_data=None):
    w = numpyro.sample("w", dist.Normal(0.0, jnp.ones(X.shape[1])).to_event(1))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def linear_svi(optim=None, model=linear):
    return SVI(model, AutoNormal(linear), optax.adam(1e-2) if optim is None else optim, Trace_ELBO())


def gp_svi(guide_name, model=None):
    model = Model() if model is None else model
    return SVI(model, GUIDES[guide_name](model, Z), optimizer(guide_name, 0.1), sgp.QuadratureELBO())


class Remembering(AbstractCallback):
    """A callback whose state has names and dtypes that need care in a file."""

    def __init__(self, every):
        self.every, self.steps, self.saved = every, [], "never begun"

    def __call__(self, progress):
        self.steps.append(progress.step)

    def begin(self, saved):
        self.saved = saved

    def state(self):
        return {"gp/ls~1": np.asarray(self.steps), "half": np.ones((2, 2), np.float16)}

    @property
    def steps_at_6(self):
        return [step for step in self.steps if step <= 6]


def rows_of_steps(steps, rows=N, batch_size=BATCH, key=KEY):
    batches = Batches.of(key, (np.zeros(rows),), rows, batch_size)
    return [batches.indices(step) for step in range(steps)]


def assert_equal_results(result, expected):
    for found, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
        assert_array_equal(found, wanted)


class RunInterruptedError(Exception):
    pass


def interrupt_at(step):
    class Interruption(AbstractCallback):
        every = step

        def __call__(self, progress):
            raise RunInterruptedError(progress.step)

        def begin(self, saved):
            pass

        def state(self):
            return {}

    return Interruption()


# The steps


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("guide_name", representative(["whitened", "tied", "per_datum"], ["tied"]))
def test_full_batches_are_svi_run(guide_name):
    result = quiet_fit(gp_svi(guide_name), KEY, (X, Y), batch_size=N, num_steps=12)
    expected = gp_svi(guide_name).run(KEY, 12, X, Y, num_data=N, progress_bar=False)
    assert_allclose(result.losses, expected.losses, rtol=1e-12)
    for found, wanted in zip(jax.tree.leaves(result.params), jax.tree.leaves(expected.params), strict=True):
        assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("guide_name", representative(["whitened", "tied"], ["tied"]))
def test_minibatches_are_updates_on_the_rows_of_permutations(guide_name):
    steps = 7
    result = quiet_fit(gp_svi(guide_name), KEY, (X, Y), batch_size=BATCH, num_steps=steps)
    svi, losses = gp_svi(guide_name), []
    rows = rows_of_steps(steps)
    state = svi.init(KEY, X[rows[0]], Y[rows[0]], num_data=N)
    update = jax.jit(functools.partial(svi.update, num_data=N))
    for taken in rows:
        state, loss = update(state, X[taken], Y[taken])
        losses.append(loss)
    assert_allclose(result.losses, losses, rtol=1e-10)
    assert_array_equal(jax.random.key_data(result.state.rng_key), jax.random.key_data(state.rng_key))


@pytest.mark.parametrize(
    "optim",
    [numpyro.optim.Adam(1e-2), optax.chain(optax.clip(10.0), optax.adam(optax.cosine_decay_schedule(1e-1, 50)))],
    ids=["numpyro", "optax_schedule"],
)
def test_any_optimizer_of_svi_takes_the_same_steps_as_in_svi_run(optim):
    result = quiet_fit(linear_svi(optim), KEY, (np.float32(X), np.float32(Y)), batch_size=N, num_steps=50)
    expected = linear_svi(optim).run(KEY, 50, np.float32(X), np.float32(Y), num_data=N, progress_bar=False)
    # The same float32 operations in another loop: differences of rounding only.
    assert_allclose(result.losses, expected.losses, rtol=1e-5)
    assert result.losses.dtype == expected.losses.dtype


def test_an_epoch_has_no_row_twice_and_each_leaves_out_other_rows():
    epochs = np.reshape(rows_of_steps(2 * 200), (200, 2 * BATCH))
    assert all(len(set(epoch)) == 2 * BATCH for epoch in epochs)
    left_out = Counter(({*range(N)} - set(epoch)).pop() for epoch in epochs)
    # Each row is left out 200/7 times, up to five standard deviations.
    assert all(abs(left_out[row] - 200 / N) < 5 * np.sqrt(200 / N * (1 - 1 / N)) for row in range(N))
    assert len({tuple(epoch) for epoch in epochs}) > 150


def test_rows_of_a_step_depend_only_on_key_and_step():
    forward = rows_of_steps(20)
    batches = Batches.of(KEY, (np.zeros(N),), N, BATCH)
    for step in reversed(range(20)):
        assert_array_equal(batches.indices(step), forward[step])
    assert not np.array_equal(rows_of_steps(20, key=jax.random.key(8)), forward)


def test_the_order_of_rows_is_the_same_in_all_versions():
    # Written down, so that a checkpoint of today continues with the same rows after an update of JAX or NumPy.
    batches = Batches((np.zeros(N),), (np.dtype("f4"),), N, BATCH, np.array([1, 2, 3, 4], np.uint32))
    assert_array_equal([batches.indices(step) for step in range(4)], ORDER)


ORDER = [[2, 4, 1], [0, 3, 5], [3, 6, 0], [5, 2, 1]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("guide_name", ["whitened", "per_datum"])
def test_how_steps_fall_into_dispatches_cannot_change_a_result(guide_name, monkeypatch):
    # Sites of a dense posterior hold the data twice in the state, which is donated.
    batch_size = N if guide_name == "per_datum" else BATCH
    run = functools.partial(quiet_fit, rng_key=KEY, data=(X, Y), batch_size=batch_size, num_steps=23)
    monkeypatch.setattr(training_module, "_DISPATCH_SECONDS", 0.0)
    one_by_one = run(gp_svi(guide_name))
    monkeypatch.setattr(training_module, "_DISPATCH_SECONDS", 1e6)
    assert_equal_results(run(gp_svi(guide_name)), one_by_one)
    monkeypatch.setattr(batches_module, "_CHUNK_STEPS", 5)
    assert_equal_results(run(gp_svi(guide_name)), one_by_one)


def test_one_program_serves_a_run_and_the_model_is_traced_no_more_for_more_steps(monkeypatch):
    programs = []

    class Recorded(Program):
        def __init__(self, *args):
            super().__init__(*args)
            programs.append(self)

    monkeypatch.setattr(training_module, "Program", Recorded)
    monkeypatch.setattr(batches_module, "_CHUNK_STEPS", 4)
    traces = []
    for num_steps in (1, 23):
        model = Model()
        quiet_fit(gp_svi("tied", model), KEY, (X, Y), batch_size=BATCH, num_steps=num_steps, callback=lambda _: None)
        traces.append(len(model.traces))
    assert traces[0] == traces[1]
    assert [program.steps._cache_size() for program in programs] == [1, 1]


@pytest.mark.parametrize("x64", [False, True])
def test_data_have_the_precision_of_the_calling_thread(x64):
    seen = []

    def model(X, y, num_data=None):
        seen.append(X.dtype)
        linear(X, y, num_data)

    with jax.enable_x64(x64):
        quiet_fit(linear_svi(model=model), KEY, (X.astype("f8"), Y.astype("f8")), batch_size=BATCH, num_steps=9)
    assert set(seen) == {np.dtype("f8" if x64 else "f4")}


def test_a_memmap_gives_what_an_array_gives_and_is_not_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(batches_module, "_CHUNK_BYTES", 2**20)
    rows, columns = 256, 2**15  # 32 MiB in float32, of which a step takes one part in 128
    file = np.lib.format.open_memmap(tmp_path / "X.npy", "w+", "f4", (rows, columns))
    file[:, :2] = np.random.default_rng(0).normal(size=(rows, 2))
    file.flush()
    y = np.asarray(file[:, 0])

    def first_columns(X, y=None, num_data=None):
        linear(X[:, :2], y, num_data)

    svi = SVI(first_columns, AutoNormal(first_columns), optax.adam(1e-2), Trace_ELBO())
    on_disk = np.load(tmp_path / "X.npy", mmap_mode="r")
    tracemalloc.start()
    result = quiet_fit(svi, KEY, (on_disk, y), batch_size=2, num_steps=200)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < file.nbytes / 2
    assert_equal_results(result, quiet_fit(svi, KEY, (np.asarray(on_disk), y), batch_size=2, num_steps=200))


def test_mutable_state_is_carried_from_step_to_step():
    def model(X, y=None, num_data=None):
        counter = numpyro.primitives.mutable("steps", {"done": jnp.asarray(0.0)})
        counter["done"] = counter["done"] + 1.0
        linear(X, y, num_data)

    svi = SVI(model, AutoNormal(model), optax.adam(1e-2), Trace_ELBO())
    seen = []
    result = quiet_fit(
        svi, KEY, (X, Y), batch_size=BATCH, num_steps=9, callback=lambda p: seen.append(p.evaluate((X, Y)))
    )
    start = svi.init(KEY, X, Y, num_data=N).mutable_state["steps"]["done"]
    assert_allclose(result.state.mutable_state["steps"]["done"], start + 9.0)
    assert np.isfinite(seen).all()


def test_a_run_continues_from_the_state_of_an_earlier_one_which_stays_usable():
    svi = linear_svi()
    first = quiet_fit(svi, KEY, (X, Y), batch_size=BATCH, num_steps=5)
    second = quiet_fit(linear_svi(), jax.random.key(1), (X, Y), batch_size=BATCH, num_steps=6, init_state=first.state)
    assert_allclose(second.state.optim_state[0], 11)
    assert_allclose(first.state.optim_state[0], 5)
    svi.update(first.state, X, Y)


def test_epochs_are_counted_in_whole_batches():
    result = quiet_fit(linear_svi(), KEY, (X, Y), batch_size=BATCH, num_epochs=5)
    assert result.losses.shape == (5 * (N // BATCH),)


def test_stable_update_leaves_out_steps_that_are_not_finite():
    y = np.where(np.arange(N) == 3, np.nan, Y)
    result = quiet_fit(linear_svi(), KEY, (X, y), batch_size=BATCH, num_steps=40, stable_update=True)
    bad = [3 in rows for rows in rows_of_steps(40)]
    assert_array_equal(np.isnan(result.losses), bad)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))


# Arguments of the model


def test_the_data_become_arguments_and_the_number_of_rows_goes_where_it_is_taken():
    calls = []

    def record(*args, **kwargs):
        calls.append((args, kwargs))
        numpyro.param("a", 0.0)
        numpyro.factor("term", jnp.zeros(()))

    def guide(*args, **kwargs):
        numpyro.param("a", 0.0)

    def run(model, data, **static):
        calls.clear()
        svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(), **static)
        quiet_fit(svi, KEY, data, batch_size=BATCH, num_steps=1)
        args, kwargs = calls[-1]
        return jax.tree.map(jnp.shape, args), kwargs

    x, y = (BATCH, X.shape[1]), (BATCH,)
    assert run(lambda X, y: record(X, y), (X, Y)) == ((x, y), {})
    assert run(lambda X, y, num_data: record(X, y, num_data=num_data), [X, Y]) == ((x, y), {"num_data": N})
    assert run(lambda X, mask, y: record(X, mask, y), (X, None, Y)) == ((x, None, y), {})
    assert run(lambda batch: record(batch), {"X": X, "y": Y}) == (({"X": x, "y": y},), {})
    assert run(lambda X: record(X), X) == ((x,), {})
    assert run(record, (X,)) == ((x,), {"num_data": N})
    assert run(functools.partial(record, num_data=9), (X,)) == ((x,), {"num_data": 9})
    assert run(lambda X, num_data: record(X, num_data=num_data), (X,), num_data=8) == ((x,), {"num_data": 8})


def unscaled(X, y=None, N=None):
    linear(X, y, N)


def scaled_by_hand(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, jnp.ones(X.shape[1])).to_event(1))
    with handlers.scale(scale=N / X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def prior_scaled_down(X, y=None):
    with handlers.scale(scale=X.shape[0] / N):
        w = numpyro.sample("w", dist.Normal(0.0, jnp.ones(X.shape[1])).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def as_a_factor(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, jnp.ones(X.shape[1])).to_event(1))
    numpyro.factor("y", N / X.shape[0] * dist.Normal(X @ w, 0.5).log_prob(y).sum())


def without_a_prior(X, y=None):
    w = numpyro.param("w", jnp.zeros(X.shape[1]))
    numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def test_a_likelihood_of_batches_that_is_not_scaled_to_all_rows_warns():
    with pytest.warns(UserWarning, match=r"batch of 3 rows to all 7: .*\['y'\].*`num_data`, which `fit` passes"):
        quiet_fit(linear_svi(model=unscaled), KEY, (X, Y), batch_size=BATCH, num_steps=1)
    model = Model()
    guide = sgp.AutoTSVGP(lambda X, y=None: model(X, y), Z)
    svi = SVI(guide.model, guide, sgp.NaturalGradient(0.1, optax.sgd(0.0)), sgp.QuadratureELBO())
    with pytest.warns(UserWarning, match="No plate of the model scales"):
        quiet_fit(svi, KEY, (X, Y), batch_size=BATCH, num_steps=1)


@pytest.mark.parametrize("model", [scaled_by_hand, prior_scaled_down, as_a_factor, without_a_prior])
def test_a_likelihood_that_is_scaled_in_another_way_or_needs_no_scale_does_not_warn(model):
    svi = SVI(model, AutoNormal(model), optax.adam(1e-2), Trace_ELBO())
    quiet_fit(svi, KEY, (X, Y), batch_size=BATCH, num_steps=1)


def test_a_model_that_knows_the_number_of_rows_and_batches_of_all_rows_do_not_warn():
    known = functools.partial(unscaled, N=N)
    quiet_fit(linear_svi(model=known), KEY, (X, Y), batch_size=BATCH, num_steps=1)
    quiet_fit(linear_svi(model=unscaled), KEY, (X, Y), batch_size=N, num_steps=1)


def bad_calls():
    def call(**changes):
        arguments = {"svi": linear_svi(), "rng_key": KEY, "data": (X, Y), "batch_size": BATCH, "num_steps": 3}
        return lambda: quiet_fit(**{**arguments, **changes})

    def traced(x):
        return quiet_fit(linear_svi(), KEY, (x, Y), batch_size=BATCH, num_steps=3).losses

    def in_jit(x):
        return x + quiet_fit(linear_svi(), KEY, (X, Y), batch_size=BATCH, num_steps=3).losses[0]

    missing = {"batch_size": BATCH, "num_steps": None}
    return {
        "rows": (ValueError, r"same number of rows, .*got \{'data\[0\]': 7, 'data\[1\]': 6\}", call(data=(X, Y[:6]))),
        "no_data": (ValueError, r"at least one, got \{\}", call(data=())),
        "no_rows": (ValueError, "at least one", call(data=(X[:0], Y[:0]))),
        "a_number": (TypeError, r"`data\[1\]` is a float .* Convert", call(data=(X, 0.5))),
        "a_scalar": (TypeError, r"`data\[1\]` is a ndarray .* shape \(\)", call(data=(X, np.zeros(())))),
        "texts": (TypeError, r"`data\[1\]` is a ndarray of dtype <U1", call(data=(X, np.array(["a"] * N)))),
        "batch_size_0": (ValueError, "`batch_size` must be a positive integer, got 0", call(batch_size=0)),
        "batch_size_float": (ValueError, "`batch_size` must be a positive integer, got 2.0", call(batch_size=2.0)),
        "batch_size_8": (ValueError, "`batch_size` is 8, and `data` has 7 rows. Use at most 7", call(batch_size=8)),
        "neither": (ValueError, "either `num_steps` or `num_epochs`, got neither. An epoch has 2", call(**missing)),
        "both": (ValueError, "got both num_steps=3 and num_epochs=1", call(num_epochs=1)),
        "num_steps": (ValueError, "`num_steps` must be a positive integer, got -1", call(num_steps=-1)),
        "num_epochs": (ValueError, "`num_epochs` must be a positive", call(num_steps=None, num_epochs=0)),
        "arguments": (
            TypeError,
            r"gives the model 4 positional argument.*\(X, y=None, num_data=None\)",
            call(data=(X,) * 4),
        ),
        "guide": (
            TypeError,
            r"gives the guide 2 positional argument.*and `num_data`.*\(X, y\)",
            call(svi=SVI(linear, lambda X, y: None, optax.adam(1e-2), Trace_ELBO())),
        ),
        "traced": (TypeError, "outside `jit`", lambda: jax.jit(traced)(X)),
        "in_jit": (TypeError, "outside `jit`", lambda: jax.jit(in_jit)(1.0)),
        "callback": (
            TypeError,
            "`callback` must be a function .* got <class .*EarlyStopping",
            call(callback=EarlyStopping),
        ),
        "patience": (ValueError, "`patience` must be a positive", lambda: EarlyStopping(X, patience=0)),
        "every": (ValueError, "`every` must be a positive integer, got 0", lambda: Checkpoint("a", every=0)),
        "keep": (ValueError, "`keep` must be a positive integer, got 0", lambda: Checkpoint("a", keep=0)),
        "masked": (TypeError, r"`data\[1\]` is a masked array.*handlers.mask", call(data=(X, np.ma.array(Y)))),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_a_mistake_is_answered_with_what_came_and_what_to_do(name):
    error, match, call = bad_calls()[name]
    with pytest.raises(error, match=match):
        call()


def test_an_error_of_the_thread_that_gathers_rows_reaches_the_caller(monkeypatch):
    chunk = Batches.chunk

    def fails_later(self, first, count, length):
        if first > 0:
            raise OSError("the disk is gone")
        return chunk(self, first, count, length)

    monkeypatch.setattr(Batches, "chunk", fails_later)
    monkeypatch.setattr(batches_module, "_CHUNK_STEPS", 4)
    with pytest.raises(OSError, match="the disk is gone"):
        quiet_fit(linear_svi(), KEY, (X, Y), batch_size=BATCH, num_steps=20)


# Callbacks and the progress bar


def test_callbacks_see_every_loss_once_and_may_keep_what_they_see():
    seen = []
    svi = linear_svi()
    result = quiet_fit(svi, KEY, (X, Y), batch_size=BATCH, num_steps=250, callback=seen.append)
    assert [progress.step for progress in seen] == list(range(2, 251, 2))
    assert_array_equal(np.concatenate([progress.losses for progress in seen]), result.losses)
    assert_equal_results(seen[-1].params(), result.params)
    # The state at step 2 is that of a run of two steps, although its successors have been overwritten since.
    assert_equal_results(seen[0].state, quiet_fit(svi, KEY, (X, Y), batch_size=BATCH, num_steps=2).state)


def test_a_callback_that_returns_true_stops_the_run():
    result = quiet_fit(linear_svi(), KEY, (X, Y), batch_size=BATCH, num_steps=100, callback=lambda p: p.step == 7)
    assert result.losses.shape == (7,)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("guide_name", representative(["whitened", "tied"], ["tied"]))
def test_a_callback_evaluates_held_out_data_on_the_scale_of_the_training_data(guide_name):
    svi, values = gp_svi(guide_name), []

    def evaluate(progress):
        held_out = [progress.evaluate((X[rows], Y[rows])) for rows in ([0, 1], [2, 3], [4, 5])]
        values.append((np.mean(held_out), progress.evaluate((X[:6], Y[:6])), progress.state))

    quiet_fit(svi, KEY, (X, Y), batch_size=BATCH, num_steps=2, callback=evaluate)
    for of_parts, of_all, state in values:
        assert_allclose(of_parts, of_all, rtol=1e-10)
        assert_allclose(of_all, svi.evaluate(state, X[:6], Y[:6], num_data=N), rtol=1e-10)


def test_early_stopping_waits_for_its_patience_and_no_longer():
    losses = iter([5.0, 4.0, 4.5, 3.95, 3.9, np.nan, 1.0])
    stopping = EarlyStopping(X, every=10, patience=3, min_improvement=0.2)

    class Progress:
        evaluate = staticmethod(lambda data: next(losses))

    assert [stopping(Progress()) for _ in range(5)] == [False, False, False, False, True]
    stopping.begin(None)
    assert [stopping(Progress()) for _ in range(2)] == [False, False]


def test_early_stopping_ends_a_run_that_does_not_improve():
    stopping = EarlyStopping((X, Y), every=10, patience=2)
    result = quiet_fit(linear_svi(optax.sgd(0.0)), KEY, (X, Y), batch_size=BATCH, num_steps=1000, callback=stopping)
    assert result.losses.shape == (30,)  # an improvement on nothing, then two that are none
    assert len(set(stopping.losses)) == 1  # the same random numbers each time


def test_the_progress_bar_shows_average_loss_time_left_and_refused_steps(capfd):
    y = np.where(np.arange(N) == 3, np.nan, Y)
    result = fit(gp_svi("tied"), KEY, (X, y), batch_size=BATCH, num_steps=20)
    shown = capfd.readouterr().err.split("\r")[-1]
    finite = result.losses[-1:][np.isfinite(result.losses[-1:])]
    average = finite.mean() if len(finite) else np.nan
    refused = sgp.num_refused(result.state)
    assert refused > 0
    assert "20/20" in shown
    assert "<00:00" in shown
    assert f"avg. loss [20-20]: {average:.4f}" in shown
    assert f"refused: {refused}" in shown


def test_a_run_that_refuses_many_steps_says_so_when_it_ends_and_counts_its_own_only():
    y = np.where(np.arange(N) == 3, np.nan, Y)  # one batch of an epoch cannot be evaluated, and the step after it is
    svi = gp_svi("tied")
    with pytest.warns(UserWarning, match=r"of 60 steps were refused, because .* `num_refused\(result.state\)` counts"):
        stalled = quiet_fit(svi, KEY, (X, y), batch_size=BATCH, num_steps=60)
    assert sgp.num_refused(stalled.state) > 10
    # The state goes on counting; of these steps none is refused, and a warning would be an error.
    after = quiet_fit(svi, KEY, (X, Y), batch_size=BATCH, num_steps=60, init_state=stalled.state)
    assert sgp.num_refused(after.state) == sgp.num_refused(stalled.state)


def test_without_progress_bar_nothing_is_printed(capfd):
    quiet_fit(linear_svi(), KEY, (X, Y), batch_size=BATCH, num_steps=3)
    assert capfd.readouterr() == ("", "")


# Resuming


@pytest.mark.parametrize("guide_name", representative(["whitened", "tied"], ["tied"]))
def test_a_resumed_run_is_an_uninterrupted_one_bit_for_bit(guide_name, tmp_path):
    run = functools.partial(quiet_fit, rng_key=KEY, data=(X, Y), batch_size=BATCH, num_steps=31)
    checkpoint = Checkpoint(tmp_path / "run", every=4)
    for step in (3, 18):
        with pytest.raises(RunInterruptedError):
            run(gp_svi(guide_name), checkpoint=checkpoint, callback=interrupt_at(step))
    assert list(checkpoint.files()) == [12, 16]
    expected = run(gp_svi(guide_name))
    assert_equal_results(run(gp_svi(guide_name), checkpoint=checkpoint), expected)
    # Once more: everything is done, and the result is read.
    assert_equal_results(run(gp_svi(guide_name), checkpoint=tmp_path / "run"), expected)


def test_a_run_is_lengthened_by_asking_for_more_steps(tmp_path):
    run = functools.partial(quiet_fit, rng_key=KEY, data=(X, Y), batch_size=BATCH)
    run(linear_svi(), num_steps=5, checkpoint=tmp_path)
    assert_equal_results(run(linear_svi(), num_steps=12, checkpoint=tmp_path), run(linear_svi(), num_steps=12))


def test_early_stopping_survives_an_interruption(tmp_path):
    def run(*others, **options):
        stopping = EarlyStopping((X, Y), every=10, patience=4, min_improvement=1e9)
        optim = optax.adam(1e-2)
        result = quiet_fit(
            linear_svi(optim), KEY, (X, Y), batch_size=BATCH, num_steps=200, callback=[stopping, *others], **options
        )
        return result, stopping.losses

    checkpoint = Checkpoint(tmp_path, every=15)
    with pytest.raises(RunInterruptedError):
        run(interrupt_at(31), checkpoint=checkpoint)
    expected, losses = run()
    assert len(losses) == 5
    result, resumed_losses = run(checkpoint=checkpoint)
    assert_equal_results(result, expected)
    assert resumed_losses == losses
    # A stopped run stays stopped, unless it is asked to go on without callbacks.
    assert_equal_results(run(checkpoint=checkpoint)[0], expected)
    go_on = quiet_fit(linear_svi(), KEY, (X, Y), batch_size=BATCH, num_steps=60, checkpoint=checkpoint)
    assert go_on.losses.shape == (60,)


def test_callbacks_are_resumed_with_what_they_remember_whatever_others_there_are(tmp_path):
    checkpoint = Checkpoint(tmp_path, every=np.int64(2))
    run = functools.partial(quiet_fit, rng_key=KEY, data=(X, Y), batch_size=BATCH, checkpoint=checkpoint)
    first, second = Remembering(2), Remembering(3)
    run(linear_svi(), num_steps=6, callback=[first, second])
    assert first.saved is second.saved is None
    again, third, new = Remembering(2), Remembering(3), Remembering(4)
    run(linear_svi(), num_steps=10, callback=[lambda _: None, again, third, new])
    for resumed, wanted in ((again, first), (third, second)):
        assert sorted(resumed.saved) == ["gp/ls~1", "half"]
        assert_array_equal(resumed.saved["gp/ls~1"], wanted.steps_at_6)
        assert resumed.saved["half"].dtype == np.float16
    assert new.saved is None


def test_data_in_another_byte_order_are_the_same_data():
    swapped = X.astype(X.dtype.newbyteorder(">")), Y.astype(Y.dtype.newbyteorder(">"))
    stopping = EarlyStopping(swapped, every=2)
    found = quiet_fit(linear_svi(), KEY, swapped, batch_size=BATCH, num_steps=4, callback=stopping)
    assert_equal_results(found, quiet_fit(linear_svi(), KEY, (X, Y), batch_size=BATCH, num_steps=4))
    assert np.all(np.isfinite(stopping.losses))
    full, like = (Batches.of(KEY, data, N, N).first() for data in (swapped, (X, Y)))
    assert_equal_results(full, like)
    for dtype in (np.dtype("<f4"), np.dtype(">f4"), np.dtype(">i8"), jnp.dtype("bfloat16")):
        assert native(dtype).isnative
        assert native(dtype).isbuiltin > 0  # as those are that NumPy makes, which files are written with


def test_old_checkpoints_and_what_a_killed_run_left_are_removed(tmp_path):
    (tmp_path / ".step-000000003.npz.123.unfinished").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint = Checkpoint(tmp_path, every=2, keep=3)
    quiet_fit(linear_svi(), KEY, (X, Y), batch_size=BATCH, num_steps=11, checkpoint=checkpoint)
    steps = {f"step-{step:09d}.npz" for step in (8, 10, 11)}
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", *steps}


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory):
    """The arguments of a run, and the folder with its checkpoint."""
    folder = tmp_path_factory.mktemp("five_steps")
    arguments = {"svi": linear_svi(), "rng_key": KEY, "data": (X, Y), "batch_size": BATCH, "num_steps": 5}
    quiet_fit(**arguments, checkpoint=folder)
    return arguments, folder


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rng_key": jax.random.key(8)}, "another `rng_key`"),
        ({"batch_size": 2}, "`batch_size` 3, this run has 2"),
        ({"data": (X[:6], Y[:6])}, "`num_data` 7, this run has 6"),
        ({"num_steps": 4}, "is at step 5, beyond the 4 asked for"),
        ({"svi": linear_svi(optax.sgd(1e-2))}, "does not fit the state"),
        ({"data": (X[:, :1], Y)}, r"is float32\[2\], needed is float32\[1\]"),
    ],
    ids=["key", "batch_size", "rows", "fewer_steps", "optimizer", "columns"],
)
def test_a_checkpoint_of_another_run_is_refused_with_its_name(changes, match, five_steps):
    arguments, folder = five_steps
    with pytest.raises(ValueError, match=match) as error:
        quiet_fit(**{**arguments, "svi": linear_svi(), **changes}, checkpoint=folder)
    assert "step-000000005.npz" in str(error.value)
    assert "another folder" in str(error.value) or "another path" in str(error.value)


# Files


def assorted():
    return {
        "typed": jax.random.key(1),
        "rbg": jax.random.key(2, impl="rbg"),
        "keys": jax.random.split(jax.random.key(3), (2, 3)),
        "raw": jax.random.PRNGKey(4),
        "half": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "nothing": jnp.zeros((0, 2)),
        "special": jnp.array([np.nan, np.inf, -0.0, 1e-45], jnp.float32),
        "flags": (jnp.array(True), None, [np.arange(3, dtype=np.int8)]),
        "complex": np.array(1 + 2j),
        "a/b~c": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "numbers": (3, 0.1, True),
        "state": SVIState_of_a_fit(),
    }


@functools.cache
def SVIState_of_a_fit():
    return quiet_fit(gp_svi("tied"), KEY, (X, Y), batch_size=BATCH, num_steps=2).state


def bits(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(leaf)), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
    return str(np.asarray(leaf).dtype), np.shape(leaf), np.asarray(leaf).tobytes()


def test_a_state_comes_back_bit_for_bit(tmp_path):
    tree = assorted()
    save_checkpoint(tmp_path / "a.npz", tree)
    like = jax.tree.map(
        lambda leaf: (
            leaf
            if isinstance(leaf, bool | int | float)
            else jnp.zeros_like(leaf)
            if not isinstance(leaf, np.ndarray)
            else np.zeros_like(leaf)
        ),
        tree,
    )
    back = load_checkpoint(tmp_path / "a.npz", like)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for found, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert bits(found) == bits(wanted)
        assert isinstance(found, jax.Array) == isinstance(wanted, jax.Array)


def test_the_file_is_what_its_documentation_says(tmp_path):
    path = tmp_path / "a.npz"
    save_checkpoint(path, assorted())
    with np.load(path, allow_pickle=False) as file:
        assert_array_equal(file["['a/b~c']"], np.arange(6.0).reshape(2, 3))
        assert_array_equal(file["['typed']"], [0, 1])
        assert file["['state'].optim_state[1].params['f_auto_sites'].Lambda2"].dtype == np.float32
    save_checkpoint(tmp_path / "b.npz", assorted())
    assert path.read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_truncated_or_damaged_file_is_refused_and_never_misread(tmp_path):
    path, damaged = tmp_path / "a.npz", tmp_path / "damaged.npz"
    tree = {"a": np.arange(25.0), "key": jax.random.key(0)}
    save_checkpoint(path, tree)
    content = path.read_bytes()
    for length in range(len(content)):
        damaged.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"(?s)damaged.npz' is no checkpoint, or is damaged .* Delete it"):
            load_checkpoint(damaged, tree)
    arrays = [tree["a"].tobytes(), np.asarray(jax.random.key_data(tree["key"])).tobytes()]
    starts = [content.index(each) for each in arrays]
    numbers = {place for start, each in zip(starts, arrays, strict=True) for place in range(start, start + len(each))}
    accepted = 0
    for place in range(len(content)):
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            back = load_checkpoint(damaged, tree)
        except ValueError as error:
            assert "damaged.npz" in str(error)  # noqa: PT017
        else:  # a date or an attribute in the archive
            accepted += 1
            assert place not in numbers
            assert_array_equal(back["a"], tree["a"])
            assert_array_equal(jax.random.key_data(back["key"]), jax.random.key_data(tree["key"]))
    assert accepted < 0.2 * len(content)


def test_a_foreign_file_is_refused_with_a_sentence(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"\x89HDF\r\n\x1a\n")
    with pytest.raises(ValueError, match=r"(?s)a.npz' is no checkpoint.* Delete it"):
        load_checkpoint(path, {})
    np.savez(path, a=np.zeros(3))
    with pytest.raises(ValueError, match=r"a.npz' does not fit .* a is not needed"):
        load_checkpoint(path, {})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_checkpoint(tmp_path / "nowhere.npz", {})


def test_nothing_from_a_file_is_executed(tmp_path):
    class Malicious:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    path = tmp_path / "a.npz"
    np.savez(path, **{"['a']": np.array([Malicious()])})
    with pytest.raises(ValueError, match=r"a\.npz"):
        load_checkpoint(path, {"a": np.zeros(1)})
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("like", "match"),
    [
        ({"a": np.zeros(4), "b": np.zeros(2)}, r"\['a'\] is float64\[3\], needed is float64\[4\]"),
        ({"a": np.zeros(3, "f4"), "b": np.zeros(2)}, r"needed is float32\[3\].* and precision"),
        ({"a": np.zeros(3)}, r"\['b'\] is not needed"),
        ({"a": np.zeros(3), "c": np.zeros(2)}, r"\['b'\] is not needed; \['c'\] is missing"),
    ],
    ids=["shape", "dtype", "extra", "names"],
)
def test_a_state_of_another_kind_is_refused(like, match, tmp_path):
    save_checkpoint(tmp_path / "a.npz", {"a": np.zeros(3), "b": np.zeros(2)})
    with pytest.raises(ValueError, match=match):
        load_checkpoint(tmp_path / "a.npz", like)


@pytest.mark.parametrize(
    ("tree", "error", "match"),
    [
        ({"a": "text"}, TypeError, r"got str at \['a'\]"),
        ({"a": np.array([None])}, TypeError, r"got ndarray at \['a'\]"),
    ],
    ids=["text", "object"],
)
def test_what_cannot_be_kept_is_refused_and_leaves_the_old_file(tree, error, match, tmp_path):
    path = tmp_path / "a.npz"
    save_checkpoint(path, {"a": np.zeros(3)})
    before = path.read_bytes()
    with pytest.raises(error, match=match):
        save_checkpoint(path, tree)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_at_any_point_of_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    save_checkpoint(path, {"a": np.zeros(3)})
    before = path.read_bytes()
    for module, name in ((np, "savez"), (training_module.os, "fsync"), (Path, "replace")):

        def fails(*args, **kwargs):
            raise OSError("no space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(module, name, fails)
            with pytest.raises(OSError, match="no space left"):
                save_checkpoint(path, {"a": np.ones(3)})
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]
