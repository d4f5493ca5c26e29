"""Callbacks of `fit`, and early stopping."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from numpyro_sgp._internal.checks import positive

__all__ = ["AbstractCallback", "EarlyStopping", "FitProgress", "as_callbacks"]


class FitProgress(NamedTuple):
    """The state of a run, as a callback sees it.

    Attributes:
        step: how many steps are done.
        num_steps: how many the run has.
        losses: those of the steps since the last call, (every,).
        state: a copy of the `SVIState`, which may be kept.
        params: function without arguments that gives the constrained parameters.
        evaluate: function of data like those of `fit`, with at most N rows, that gives the loss at them, scaled to all
            N rows of the training data; with the same random numbers at every call.
    """

    step: int
    num_steps: int
    losses: np.ndarray
    state: Any
    params: Callable[[], dict[str, Any]]
    evaluate: Callable[[Any], float]


class AbstractCallback(ABC):
    """A callback: `fit` calls it at each multiple of `every` steps, and checkpoints include its state.

    Attributes:
        every: steps from one call to the next.
    """

    every: int

    @abstractmethod
    def __call__(self, progress: FitProgress) -> bool | None:
        """Look at the run; return True to stop it."""

    @abstractmethod
    def begin(self, saved: Mapping[str, np.ndarray] | None) -> None:
        """Called once before the first step, with what `state` returned last where a checkpoint is resumed, else None.

        Callbacks of one class are told apart by their order. Where the run that wrote the checkpoint had no such
        callback, or `state` returned nothing, this gets None too.
        """

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """All that later calls depend on, as arrays by name."""


class EarlyStopping(AbstractCallback):
    """Stops a run when the loss at held-out data has not improved for some time.

    The loss is that of the whole held-out data at once, scaled like a minibatch: −(N/N_held Σ_n E_q[log p(y_n | f_n)] −
    KL), so that it compares with the training losses. The state that `fit` returns is the last one.

    Args:
        data: held-out data, with the structure of the data of `fit` and at most as many rows.
        every: steps between evaluations.
        patience: the run stops at this many evaluations in a row without improvement.
        min_improvement: a smaller decrease of the loss is none.

    Attributes:
        losses: the losses at the held-out data so far, one for each evaluation.

    Raises:
        ValueError: `every` or `patience` below 1.

    Example:
        >>> import numpy as np, numpyro_sgp as sgp
        >>> callback = sgp.EarlyStopping((np.zeros((10, 2)), np.zeros(10)), every=200, patience=3)
    """

    def __init__(self, data: Any, *, every: int = 100, patience: int = 5, min_improvement: float = 0.0) -> None:
        self.data = data
        self.every = positive("every", every, "The default is 100 steps.")
        self.patience = positive("patience", patience, "The default is 5 evaluations.")
        self.min_improvement = min_improvement
        self.losses: list[float] = []

    def __call__(self, progress: FitProgress) -> bool:
        self.losses.append(progress.evaluate(self.data))
        best, since = np.inf, 0
        for loss in self.losses:
            best, since = (loss, 0) if loss < best - self.min_improvement else (best, since + 1)
        return since >= self.patience

    def begin(self, saved: Mapping[str, np.ndarray] | None) -> None:
        self.losses = [] if saved is None else saved["losses"].tolist()

    def state(self) -> dict[str, np.ndarray]:
        return {"losses": np.asarray(self.losses, float)}


class FunctionCallback(AbstractCallback):
    """A plain function as a callback without state."""

    def __init__(self, fn: Callable[[FitProgress], bool | None], every: int) -> None:
        self.fn = fn
        self.every = every

    def __call__(self, progress: FitProgress) -> bool | None:
        return self.fn(progress)

    def begin(self, saved: Mapping[str, np.ndarray] | None) -> None:
        del saved

    def state(self) -> dict[str, np.ndarray]:
        return {}


def as_callbacks(callback: Any, num_steps: int) -> list[AbstractCallback]:
    """The argument `callback` as a list; a plain function is called about a hundred times in a run."""
    given = callback if isinstance(callback, list | tuple) else [] if callback is None else [callback]
    for one in given:
        if not callable(one) or isinstance(one, type):
            msg = f"`callback` must be a function of a `FitProgress`, an `AbstractCallback`, or a list, got {one!r}."
            raise TypeError(msg)
    every = max(1, num_steps // 100)
    return [one if isinstance(one, AbstractCallback) else FunctionCallback(one, every) for one in given]
