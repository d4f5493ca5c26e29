"""Training on minibatches from host memory or disk: many steps in each dispatch, exact resumption."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
import contextlib
import dataclasses
import functools
import os
from pathlib import Path
import time
from typing import Any, cast
import warnings

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult

from numpyro_sgp._internal.checks import positive
from numpyro_sgp.fitting.averages import warn_of_averages
from numpyro_sgp.fitting.batches import Batches, checked_batch_size, checked_rows
from numpyro_sgp.fitting.callbacks import AbstractCallback, FitProgress, as_callbacks
from numpyro_sgp.fitting.checkpoint import Checkpoint, named_leaves, read_arrays, restored
from numpyro_sgp.fitting.devices import Placement
from numpyro_sgp.fitting.program import Arguments, Program, initial_state
from numpyro_sgp.guides.scales import warn_of_no_scale
from numpyro_sgp.optim import num_refused

__all__ = ["train"]

# A dispatch costs about a tenth of a millisecond; a progress bar moves ten times in a second.
_DISPATCH_SECONDS = 0.1

# A few steps are refused where a batch has an outlier or a step is too long, and training goes on.
_TOLERATED_REFUSALS = 0.1


def train(
    svi: SVI,
    rng_key: Array,
    data: Any,
    *,
    batch_size: int,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    init_state: Any = None,
    progress_bar: bool = True,
    callback: Callable[[FitProgress], bool | None] | Sequence[Callable[[FitProgress], bool | None]] | None = None,
    checkpoint: str | os.PathLike | Checkpoint | None = None,
    stable_update: bool = False,
    sharding: jax.sharding.Sharding | None = None,
) -> SVIRunResult:
    """Train on minibatches; see `fit`."""
    rows = checked_rows((rng_key, init_state), data)
    batch_size = checked_batch_size(batch_size, rows)
    num_steps = _checked_num_steps(num_steps, num_epochs, rows // batch_size)
    arguments = Arguments.of(svi, data, rows)
    placement = Placement.of(sharding, batch_size)
    batches = Batches.of(rng_key, data, rows, batch_size, placement.positions)
    callbacks = as_callbacks(callback, num_steps)
    files = checkpoint if isinstance(checkpoint, Checkpoint) or checkpoint is None else Checkpoint(checkpoint)

    leaves = jax.tree.leaves(batches.data)
    placement.check_alike(
        {
            "`rng_key`": batches.order.tolist(),
            "`batch_size`": batch_size,
            "`num_steps`": num_steps,
            "the shapes of `data`": [leaf.shape for leaf in leaves],
            "the first row of `data`": [leaf[0].tolist() for leaf in leaves],
            "the last row of `data`": [leaf[-1].tolist() for leaf in leaves],
            "when to call `callback`": [callback.every for callback in callbacks],
            "when to write a `checkpoint`": files and files.every,
        }
    )
    run = _Run(
        {"batch_size": np.asarray(batch_size), "num_data": np.asarray(rows), "rng_key": batches.order},
        callbacks,
        files,
        initial_state(svi, rng_key, init_state, arguments, batches),
        placement,
    )
    warn_of_averages(svi, run.state, batch_size, rows, num_steps)
    program = Program(svi, arguments, run.state, batches, placement, stable_update)
    warn_of_no_scale(svi, program.scales, batch_size, rows)
    run.begin(program.loss_dtype, num_steps)
    begun_at, refused_before = run.step, int(num_refused(run.state)) if program.counts_refused else 0
    with _progress(progress_bar and placement.leads, run, num_steps, program.counts_refused) as show:
        _steps(program, batches, run, num_steps, show)
    if program.counts_refused and placement.leads:
        _warn_of_refusals(int(num_refused(run.state)) - refused_before, run.step - begun_at)
    state = run.state if sharding is None else placement.own(run.state)
    return SVIRunResult(svi.get_params(state), state, jnp.asarray(run.losses[: run.step]))


def _warn_of_refusals(refused: int, steps: int) -> None:
    """Nothing that is refused is learnt, and a run without a progress bar shows no other sign of it."""
    if refused > max(_TOLERATED_REFUSALS * steps, 10):
        warnings.warn(
            f"{refused} of {steps} steps were refused, because a loss, a gradient or a parameter was not finite, or "
            "because the loss of a joint posterior jumped up. Give the optimizer a smaller `step_size`, start from an "
            "older state, or use float64. "
            "`num_refused(result.state)` counts them.",
            UserWarning,
            stacklevel=4,
        )


def _checked_num_steps(num_steps: int | None, num_epochs: int | None, steps_per_epoch: int) -> int:
    if (num_steps is None) == (num_epochs is None):
        got = "neither" if num_steps is None else f"both num_steps={num_steps} and num_epochs={num_epochs}"
        msg = f"`fit` needs either `num_steps` or `num_epochs`, got {got}. An epoch has {steps_per_epoch} steps here."
        raise ValueError(msg)
    if num_steps is not None:
        return positive("num_steps", num_steps, "Or give `num_epochs`.")
    return positive("num_epochs", num_epochs, "Or give `num_steps`.") * steps_per_epoch


@dataclasses.dataclass
class _Run:
    """What changes during a run, and what a checkpoint holds."""

    identity: dict[str, np.ndarray]
    callbacks: list[AbstractCallback]
    files: Checkpoint | None
    state: Any
    placement: Placement
    step: int = 0
    losses: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
    refused: int = 0
    stopped: bool = False  # by a callback

    def begin(self, loss_dtype: np.dtype, num_steps: int) -> None:
        """Restore the newest checkpoint where there is one."""
        self.losses = np.full(num_steps, np.nan, loss_dtype)
        newest = list(self.files.files().values())[-1:] if self.files else []
        self.placement.check_alike({"the newest checkpoint in the folder": [path.name for path in newest]})
        arrays = read_arrays(newest[0]) if newest else {}
        if newest:
            self._resume(newest[0], arrays, num_steps)
        for root, callback in self._roots():
            saved = {name.removeprefix(root): array for name, array in arrays.items() if name.startswith(root)}
            callback.begin(saved or None)
        self.state = self.placement.replicate(self.state)

    def _roots(self) -> list[tuple[str, AbstractCallback]]:
        """Where a checkpoint has the state of each callback: by class, in order."""
        names = [type(callback).__name__ for callback in self.callbacks]
        return [(f"callbacks/{name}/{names[:i].count(name)}/", self.callbacks[i]) for i, name in enumerate(names)]

    def _resume(self, path: Path, arrays: dict[str, np.ndarray], num_steps: int) -> None:
        if not {"losses", "stopped", *self.identity} <= arrays.keys():
            msg = f"{os.fspath(path)!r} is no checkpoint of `fit`. Give another folder."
            raise ValueError(msg)
        for name, value in self.identity.items():
            if not np.array_equal(arrays[name], value):
                values = "another `rng_key`" if name == "rng_key" else f"`{name}` {arrays[name]}, this run has {value}"
                msg = (
                    f"The checkpoint {os.fspath(path)!r} was written by a run with {values}. Continue with the same, "
                    "or give another folder to start anew."
                )
                raise ValueError(msg)
        losses = arrays["losses"]
        if len(losses) > num_steps:
            msg = (
                f"The checkpoint {os.fspath(path)!r} is at step {len(losses)}, beyond the {num_steps} asked for. Ask "
                "for at least as many, or give another folder to start anew."
            )
            raise ValueError(msg)
        self.state = restored(path, arrays, self.state, "state")
        self.losses[: len(losses)] = losses
        self.step = len(losses)
        # Without a callback there is nothing that could want the run stopped.
        self.stopped = bool(arrays["stopped"]) and bool(self.callbacks)

    def next_stop(self, num_steps: int) -> int:
        """The next step at which something other than a step is to be done."""
        periods = [callback.every for callback in self.callbacks] + ([self.files.every] if self.files else [])
        return min([num_steps, *((self.step // every + 1) * every for every in periods)])

    def between_steps(self, num_steps: int, params: Callable[[Any], Any], evaluate: Callable) -> None:
        """Call the callbacks that are due, then write the checkpoint if it is."""
        for callback in [callback for callback in self.callbacks if self.step % callback.every == 0]:
            state = self.placement.own(self.state)  # the run's own is donated to its next dispatch
            stop = callback(
                FitProgress(
                    self.step,
                    num_steps,
                    self.losses[self.step - callback.every : self.step].copy(),
                    state,
                    functools.partial(params, state),
                    functools.partial(evaluate, state),
                )
            )
            if self.placement.agreed(bool(stop)):
                self.stopped = True
        if self.files and (self.step % self.files.every == 0 or self.stopped or self.step == num_steps):
            if self.placement.leads:
                self.files.save(self.step, self._contents())
            self.placement.wait(f"numpyro_sgp checkpoint {self.step}")  # before any process can look for it

    def _contents(self) -> dict[str, np.ndarray]:
        remembered = {
            root + name: np.asarray(array)
            for root, callback in self._roots()
            for name, array in callback.state().items()
        }
        run = {**self.identity, "stopped": np.asarray(self.stopped), "losses": self.losses[: self.step]}
        return {**named_leaves(self.state, "state"), **run, **remembered}


class _Pace:
    """How many steps to dispatch at once: one at first, then as many as take a tenth of a second."""

    def __init__(self) -> None:
        self.steps = 1
        self._last: float | None = None  # the first dispatch compiles, and is not measured

    def finished(self, steps: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            # At most doubled: one measurement may be wrong.
            seconds = max(now - self._last, 1e-9)
            self.steps = max(1, min(2 * self.steps, int(steps * _DISPATCH_SECONDS / seconds)))
        self._last = now


def _steps(program: Program, batches: Batches, run: _Run, num_steps: int, show: Callable[[int], None]) -> None:
    """All steps of a run, with the next chunk of batches gathered while the device computes."""
    pace = _Pace()
    in_flight: list[tuple[int, int, Array, Array]] = []  # at most two dispatches: first step, number, losses, refused

    def receive(leave: int) -> None:
        while len(in_flight) > leave:
            first, number, losses, refused = in_flight.pop(0)
            run.losses[first : first + number] = np.asarray(losses)[:number]
            run.refused = int(refused)
            pace.finished(number)
            show(number)

    with ThreadPoolExecutor(1, "numpyro_sgp.fit") as thread:

        def gather(first: int) -> Any:
            count = min(program.length, num_steps - first)
            return thread.submit(batches.chunk, first, count, program.length) if count > 0 else None

        begin, end, chunk = run.step, run.step, None
        following = None if run.stopped else gather(run.step)
        while run.step < num_steps and not run.stopped:
            if run.step == end:
                begin = run.step
                chunk = program.placement.place(cast(Any, following).result())
                end = num_steps if batches.full else min(begin + program.length, num_steps)
                following = None if batches.full else gather(end)
            # Several processes dispatch alike, whatever each of them measures.
            most = program.length if program.placement.several else min(pace.steps, program.length)
            number = min(most, end - run.step, run.next_stop(num_steps) - run.step)
            at = run.step - begin
            run.state, losses, refused = program.steps(run.state, chunk, np.int32(at), np.int32(at + number))
            in_flight.append((run.step, number, losses, refused))
            pause = run.next_stop(num_steps)
            run.step += number
            receive(leave=0 if run.step == pause else 1)
            if run.step == pause:
                run.between_steps(num_steps, program.svi.get_params, program.evaluate)


@contextlib.contextmanager
def _progress(wanted: bool, run: _Run, num_steps: int, counts_refused: bool) -> Iterator[Callable[[int], None]]:
    """A function that is told of steps done."""
    import tqdm  # as NumPyro does; it is one of NumPyro's dependencies

    window = max(1, num_steps // 20)
    with tqdm.tqdm(total=num_steps, initial=run.step, disable=not wanted) as bar:

        def show(number: int) -> None:
            done = int(bar.n) + number
            recent = run.losses[max(0, done - window) : done]
            finite = recent[np.isfinite(recent)]
            average = finite.mean() if len(finite) else np.nan
            text = f"avg. loss [{done - len(recent) + 1}-{done}]: {average:.4f}"
            if len(finite) < len(recent):
                text += f", not finite: {len(recent) - len(finite)}"
            if counts_refused:
                text += f", refused: {run.refused}"
            bar.set_postfix_str(text, refresh=False)
            bar.update(number)

        yield show if wanted else lambda _: None
