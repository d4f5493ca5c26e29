"""What a fit may take: time and memory, and how many inducing inputs these allow."""

from collections.abc import Sequence
from numbers import Real
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["BATCH", "Budget", "parsed_budget"]

# Rows of a batch.
BATCH = 1000
_SECONDS = {"s": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_BYTES = {"MB": 1e6, "GB": 1e9}
# More inducing inputs make a step slow, and rarely a fit much better.
_NUMBERS = (48, 64, 96, 128, 192, 256, 384, 512)
# So few rows may do without a sparse approximation, as what needs many inducing inputs is not seen with fewer.
_MOST_WHOLE = 2000
# Steps that there should be time for.
_STEPS = 1000


class Budget(NamedTuple):
    """Seconds and bytes."""

    seconds: float = np.inf
    memory: float = np.inf

    def allows(self, M: int, B: int) -> bool:
        """Whether the arrays of a step on B rows fit: copies of (M, M) and (M, B), in float64."""
        return self.memory >= 8.0 * (24 * M**2 + 12 * M * B)

    def most_inducing(self) -> int:
        """The largest number of inducing inputs that leaves time for a thousand steps."""
        numbers = [M for M in _NUMBERS if self.allows(M, BATCH)]
        if np.isfinite(self.seconds):
            rate = _operations_a_second()
            numbers = [M for M in numbers if _STEPS * (6 * M**2 * BATCH + 6 * M**3) / rate < 0.5 * self.seconds]
        return max(numbers, default=_NUMBERS[0])

    def most_whole(self) -> int:
        """Up to how many rows may do without; none where there is no time for the usual number of inducing inputs."""
        numbers = range(_MOST_WHOLE, 0, -_MOST_WHOLE // 20) if self.most_inducing() == _NUMBERS[-1] else ()
        return next((N for N in numbers if self.allows(N, N)), 0)


def parsed_budget(budget: str | float | Sequence[str | float] | None) -> Budget:
    """A budget from 90, "90 s", "1.5 min", "2 hours", "4 GB", or several of these."""
    result = Budget()
    several = [] if budget is None else list(budget) if isinstance(budget, list | tuple) else [budget]
    for each in several:
        number, unit = _number_and_unit(each)
        seconds = _SECONDS.get(unit, _SECONDS.get(unit.removesuffix("s")))
        if number > 0.0 and seconds is not None:
            result = result._replace(seconds=number * seconds)
        elif number > 0.0 and unit in _BYTES:
            result = result._replace(memory=number * _BYTES[unit])
        else:
            msg = (
                f'`budget` must be a time, such as 90 (seconds) or "2 min", or a memory, such as "4 GB", got {each!r}.'
            )
            raise ValueError(msg)
    return result


def _number_and_unit(budget: Any) -> tuple[float, str]:
    """A number is one of seconds; 0 where there is none."""
    if isinstance(budget, Real) and not isinstance(budget, bool):
        return float(budget), "s"
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]+)\s*", budget) if isinstance(budget, str) else None
    return (float(found[1]), found[2]) if found else (0.0, "")


def _operations_a_second() -> float:
    """Of a matrix product, on this machine."""
    A, repeats = jnp.ones((512, 512)), 4
    product = jax.jit(lambda A: A @ A)
    jax.block_until_ready(product(A))
    start = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(product(A))
    return repeats * 2.0 * len(A) ** 3 / (time.perf_counter() - start)
