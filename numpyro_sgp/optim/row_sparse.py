"""`RowSparse`: updates of sampled rows of long tables, at a cost that does not depend on how long these are."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

from numpyro_sgp._internal.checks import positive
from numpyro_sgp.optim.closure import (
    AbstractRefusingOptimizer,
    LossFn,
    Params,
    StepSize,
    Trial,
    all_finite,
    checked,
    descend,
    of_type,
    probe,
    scheduled,
    transformation,
)
from numpyro_sgp.posteriors.quadruply_stochastic.weight_table import (
    Change,
    Control,
    SampledRows,
    WeightTable,
    draw_index,
    numbers_of,
    with_numbers,
)

__all__ = ["RowSparse", "RowSparseState"]

# Of the sums of squares, so that a gradient of zero gives a step of zero; far below any square that matters.
_SMALLEST_SUM = 1e-30


class RowSparseState(NamedTuple):
    """State between steps.

    Attributes:
        params: the parameters that are not tables.
        others_state: state of the transformation that trains them.
        tables: the tables.
        sums: sums of squared gradients of each entry of each table.
        tracked: by table, Φ_p w of all its weights at the inputs of its control variate, and what rounding has left of
            it, both (P, 1 + k); or None.
        refused: how many steps were refused so far.
    """

    params: Params
    others_state: Any
    tables: dict[str, WeightTable]
    sums: dict[str, Array]
    tracked: dict[str, tuple[Array, Array] | None]
    refused: Array


class _RowStep(NamedTuple):
    """A step of the sampled rows of one table: which, before and after, squared gradients, their sums, the numbers."""

    index: Array
    rows: Array
    moved: Array
    square: Array
    sums: Array
    numbers: list[Array] | None


class RowSparse(AbstractRefusingOptimizer):
    """AdaGrad on sampled rows of long tables, in place, and any optax transformation for the other parameters.

    For `AutoQSGP`. Each step draws M of the m rows without replacement, evaluates the loss with these alone, and
    updates them: w ← w − step g / √(Σ g²), the sum over the steps in which the row was drawn. Time and memory traffic
    do not depend on m where the state is updated in place: in `SVI.run(..., progress_bar=False)`, in `fit`, and in
    `jax.jit(svi.update, donate_argnums=0)`; with a progress bar `SVI.run` copies the tables in each step. A step whose
    loss, gradients or parameters are not finite is refused as a whole and counted (`num_refused`).

    Args:
        step_size: step of AdaGrad, or an optax schedule of it, in units of the whitened weights, whose prior standard
            deviation is one.
        others: optax transformation for hyperparameters and the covariance of inducing variables; Adam with 1e-3 by
            default.
        refresh: after how many steps the control variate of the guide takes the kernel as it is by then, and what it
            tracks is computed anew, at a cost of P m: against hyperparameters that move, and against rounding, which is
            compensated in between.
        seed: of the rows that are drawn.

    Raises:
        ValueError: a number outside its range; no table among the parameters (when the state is made).
        TypeError: `others` is not an optax transformation.

    References:
        Evans and Nair (2020), "Quadruply stochastic Gaussian processes", section 2 and proposition 3; Duchi, Hazan and
        Singer (2011), "Adaptive subgradient methods for online learning and stochastic optimization".

    Example:
        >>> import optax, numpyro_sgp as sgp
        >>> optim = sgp.RowSparse(step_size=0.1, others=optax.adam(1e-3))
    """

    def __init__(
        self,
        step_size: StepSize = 0.1,
        others: optax.GradientTransformation | None = None,
        *,
        refresh: int = 10_000,
        seed: int = 0,
    ) -> None:
        self.step_size = checked("step_size", step_size, lambda rate: rate > 0.0, "be positive", "The default is 0.1.")
        self.others = transformation("others", optax.adam(1e-3) if others is None else others)
        self.refresh = positive("refresh", refresh, "The default is 10000.")
        self.seed = seed

    def init(self, params: Params) -> tuple[Array, RowSparseState]:
        """The state before the first step; raises where no parameter is a table."""
        advice = "Use `AutoQSGP` as the guide, or give SVI a plain optax optimizer."
        tables = self._own(params, WeightTable, "table of weights", advice)
        others = of_type(params, WeightTable)[1]
        sums = {name: jnp.zeros_like(table.values) for name, table in tables.items()}
        tracked = {name: _tracked_at_start(table) for name, table in tables.items()}
        state = RowSparseState(others, self.others.init(others), tables, sums, tracked, jnp.zeros((), jnp.int32))
        return jnp.asarray(0), state

    def get_params(self, state: tuple[Array, RowSparseState]) -> Params:
        """The current parameters."""
        return {**state[1].params, **state[1].tables}

    def _try(self, fn: LossFn, step: Array, state: RowSparseState) -> Trial:
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        index, rows = {}, {}
        for number, (name, table) in enumerate(state.tables.items()):
            index[name] = draw_index(jax.random.fold_in(key, number), table.size, table.batch)
            rows[name] = table.at(index[name])
        integrated: dict[str, list[bool]] = {name: [] for name in rows}

        def probed(name: str, zero: Change) -> SampledRows:
            known = state.tracked[name]
            a = None if known is None else known[0] + known[1]
            return SampledRows(state.tables[name], zero, rows[name], index[name], a, _Mark(integrated[name]))

        zeros = {name: Change(jnp.zeros_like(rows[name]), _zero_numbers(table)) for name, table in state.tables.items()}
        (loss, aux), (found, grads) = probe(fn, probed, zeros, state.params)
        _check_integrated(integrated)
        params, others_state = descend(self.others, grads, state.params, state.others_state, loss)
        rate = scheduled(self.step_size, step)
        steps = {}
        for name, value in rows.items():
            gradient = found[name].rows
            square = gradient * gradient
            sums = state.sums[name].at[index[name]].get(mode="promise_in_bounds") + square
            moved = value - jnp.asarray(rate, value.dtype) * gradient / jnp.sqrt(sums + _SMALLEST_SUM)
            steps[name] = _RowStep(index[name], value, moved, square, sums, found[name].numbers)
        finite = all_finite((grads, params, [(one.moved, one.sums) for one in steps.values()]))
        return Trial(loss, aux, {"params": params, "others_state": others_state}, finite, (step, steps))

    def _keep(self, trial: Trial, accepted: Array, state: RowSparseState) -> RowSparseState:
        step, steps = trial.rest
        due = accepted & ((step + 1 - state.refused.astype(step.dtype)) % self.refresh == 0)
        tables, sums, tracked = {}, {}, {}
        for name, table in state.tables.items():
            one = steps[name]
            # A select on the rows; one on the tables would read and write all of them.
            value = jnp.where(accepted, one.moved, one.rows)
            change = jnp.where(accepted, one.square, 0.0)
            options = {"mode": "promise_in_bounds", "unique_indices": True}
            moved = dataclasses.replace(table, values=table.values.at[one.index].set(value, **options))
            sums[name] = state.sums[name].at[one.index].add(change, **options)
            followed = _followed(table, state.tracked[name], one.index, one.rows, value)
            tables[name], tracked[name] = self._refreshed(moved, followed, one.numbers, due)
        return super()._keep(trial, accepted, state)._replace(tables=tables, sums=sums, tracked=tracked)

    def _refreshed(
        self, table: WeightTable, tracked: Any, numbers: list[Array] | None, due: Array
    ) -> tuple[WeightTable, Any]:
        """The control variate with the kernel as it is now, and what it tracks computed anew, when that is due."""
        if table.control is None or numbers is None:
            return table, tracked
        *products, factor = numbers
        due &= factor > 0.0
        control, now = table.control, [number / factor for number in products]

        def anew() -> tuple[list[Array], Array, Any]:
            kernel = with_numbers(control.kernel, now, table.size)
            moved = Control.at(control.X, kernel, control.whitened, control.jitter)
            a = dataclasses.replace(table, control=moved).tracked()
            return now, moved.L, (a, jnp.zeros_like(a))

        kept = numbers_of(control.kernel, table.size), control.L, tracked
        held, L, tracked = lax.cond(due, anew, lambda: kept)
        control = dataclasses.replace(control, kernel=with_numbers(control.kernel, held, table.size), L=L)
        return dataclasses.replace(table, control=control), tracked


def _zero_numbers(table: WeightTable) -> list[Array] | None:
    if table.control is None:
        return None
    numbers = numbers_of(table.control.kernel, table.size)
    return [*(jnp.zeros_like(number) for number in numbers), jnp.zeros((), table.values.dtype)]


class _Mark:
    """A list that is compared by identity, for what may be a part of a pytree's structure."""

    def __init__(self, entries: list[bool]) -> None:
        self.entries = entries

    def append(self, entry: bool) -> None:
        self.entries.append(entry)


def _tracked_at_start(table: WeightTable) -> tuple[Array, Array] | None:
    if table.control is None:
        return None
    columns = 1 + (table.dense_columns or 0)
    nothing = jnp.zeros((table.control.X.shape[0], columns), table.values.dtype)
    # Weights that start at zero have nothing to be summed over all m of them; dense columns start at an identity.
    a = lax.cond(jnp.any(table.values != 0) | (columns > 1), table.tracked, lambda: nothing)
    return a, nothing


def _followed(table: WeightTable, tracked: Any, index: Array, before: Array, after: Array) -> Any:
    """Φ_p w after the rows have moved, summed with compensation: what is added is what the rows have moved by."""
    if tracked is None:
        return None
    assert table.control is not None
    a, rest = tracked
    moved = table.weights(after, index).linear - table.weights(before, index).linear
    added = table.control.features(index) @ moved + rest
    new = a + added
    # The part of `added` that the sum has lost; exact in either order of size (Knuth's two-sum).
    part = new - a
    return new, (a - (new - part)) + (added - part)


def _check_integrated(integrated: dict[str, list[bool]]) -> None:
    missing = sorted(name for name, marks in integrated.items() if not marks)
    if missing:
        msg = (
            f"The loss took the estimates from sampled rows of {missing} for the posterior itself, so it is no bound. "
            "Use `RowSparse` with the loss `numpyro_sgp.QuadratureELBO()`."
        )
        raise ValueError(msg)
