"""`calibration`: whether the uncertainty of predictions has the right size."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Calibration", "calibration"]


class Calibration(NamedTuple):
    """How predictions compare with outcomes.

    Attributes:
        pit: probability integral transforms, (N,): uniform where predictions are calibrated.
        levels: probabilities of the central intervals, (L,).
        coverage: the share of outcomes in the intervals, (L,).
        standard_error: of the coverage, were it the level, (L,).
        width: average width of the intervals, in units of the outcomes, (L,); the narrower, the sharper.
        sd: average standard deviation of the predictions.
    """

    pit: np.ndarray
    levels: np.ndarray
    coverage: np.ndarray
    standard_error: np.ndarray
    width: np.ndarray
    sd: float


def calibration(
    data: Any, var_name: str | None = None, *, levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95), seed: int = 0
) -> Calibration:
    """Probability integral transforms, coverage of central intervals and sharpness of the posterior predictive.

    For the rows in `data`: those of the fit, or held-out ones where `to_arviz` was given these. PIT values of discrete
    outcomes are randomised, u ~ U(P(y_rep < y), P(y_rep ≤ y)), which makes them uniform too; intervals of discrete
    outcomes include their ends, so they cover more than their level where an end has much probability.

    Args:
        data: what `to_arviz` returned.
        var_name: the observed site; needed where there are several.
        levels: probabilities of the intervals, in (0, 1).
        seed: of the randomisation.

    Raises:
        ValueError: no outcome of that name, or a level outside (0, 1).

    References:
        Gneiting, Balabdaoui and Raftery (2007), "Probabilistic forecasts, calibration and sharpness", sections 2 and 3;
        Czado, Gneiting and Held (2009), "Predictive model assessment for count data", for randomised transforms.
    """
    names = [name for name in data["observed_data"].data_vars if name in data["posterior_predictive"].data_vars]
    if var_name is None and len(names) == 1:
        var_name = names[0]
    if var_name not in names:
        msg = f"`var_name` must name one of the outcomes {names}, got {var_name!r}."
        raise ValueError(msg)
    at = np.asarray(levels, float)
    if at.ndim != 1 or not np.all((at > 0.0) & (at < 1.0)):
        msg = f"`levels` must be probabilities between 0 and 1, got {levels!r}. For example (0.5, 0.9)."
        raise ValueError(msg)
    y = np.ravel(data["observed_data"][var_name].values)
    draws = data["posterior_predictive"][var_name].values.reshape(-1, y.size)
    below, ties = np.mean(draws < y, axis=0), np.mean(draws == y, axis=0)
    pit = below + np.random.default_rng(seed).uniform(size=y.size) * ties
    # Where a quantile falls between two draws the outer one is taken, so that discrete outcomes stay so.
    lower = np.quantile(draws, 0.5 - 0.5 * at, axis=0, method="lower")
    upper = np.quantile(draws, 0.5 + 0.5 * at, axis=0, method="higher")
    coverage = np.mean((lower <= y) & (y <= upper), axis=1)
    width, sd = np.mean(upper - lower, axis=1), float(np.mean(np.std(draws.astype(float), axis=0)))
    return Calibration(pit, at, coverage, np.sqrt(at * (1.0 - at) / y.size), width, sd)
