"""Warnings before a run: natural steps that average over too few rows, or update the posterior too rarely."""

from typing import Any
import warnings

import jax.numpy as jnp
from numpyro.infer import SVI

from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.optim import NaturalGradient
from numpyro_sgp.optim.closure import scheduled
from numpyro_sgp.posteriors.natural_parameters import AbstractSites
from numpyro_sgp.posteriors.weight_space.stale import StaleSites

__all__ = ["warn_of_averages"]

# Averages that step by ρ are worth 2B/ρ rows, and a regression with r weights on that many rows has r ρ/2B times the
# noise variance in its predictions: a tenth of it at this many rows for each weight.
_ROWS_FOR_EACH_WEIGHT = 5


def warn_of_averages(svi: SVI, state: Any, batch_size: int, rows: int, num_steps: int) -> None:
    """Warn of a posterior over weights that is averaged over few rows for its rank, or of one that is held too long.

    The first where B/ρ is less than five times the rank half-way through a run; the second where it is made anew less
    often than the sums forget what they were, 1/ρ natural steps there.

    Half-way, because a schedule may start with larger steps, or end with smaller ones.

    Args:
        svi: where the optimizer is `NaturalGradient` and the guide one of this package; nothing is said of others.
        state: before the first step.
        batch_size: B.
        rows: N; with batches of all rows there is nothing to average.
        num_steps: of the run.

    Warns:
        UserWarning: either of them.
    """
    optim, guide = svi.optim, svi.guide
    if not isinstance(optim, NaturalGradient) or not isinstance(guide, AbstractAutoSparseGP):
        return
    suffix = f"_{guide.prefix}_sites"
    found = {
        name.removesuffix(suffix): value
        for name, value in optim.get_params(state.optim_state).items()
        if isinstance(value, AbstractSites) and name.endswith(suffix)
    }
    found = {site: value for site, value in found.items() if guide.family(site).over_weights}
    if not found or not optim.e_steps or batch_size == rows:
        return
    half = state.optim_state[0] + num_steps // 2
    rate = float(scheduled(optim.step_size, jnp.asarray(half)))
    for site, value in found.items():
        _warn_of_hold(site, value.refresh if isinstance(value, StaleSites) else 1, rate)
    site, rank = max(((site, value.Lambda2.shape[-1]) for site, value in found.items()), key=lambda item: item[1])
    averaged = batch_size / rate if rate > 0.0 else float("inf")
    if averaged < (1.0 - 1e-5) * _ROWS_FOR_EACH_WEIGHT * rank:  # a schedule may compute just that in float32
        warnings.warn(
            f"The posterior over the {rank} weights of {site!r} is an average over about B/ρ = "
            f"{batch_size}/{rate:.3g} = {averaged:.0f} rows half-way through this run. Fewer than "
            f"{_ROWS_FOR_EACH_WEIGHT} for each weight leave noise in it to which the hyperparameters adapt. Give "
            f"`NaturalGradient` a `step_size` of {batch_size / (_ROWS_FOR_EACH_WEIGHT * rank):.2g} or less, or a "
            "schedule that falls to it, or take larger batches.",
            UserWarning,
            stacklevel=3,
        )


def _warn_of_hold(site: str, refresh: int, rate: float) -> None:
    if refresh * rate > 1.0 + 1e-5:
        warnings.warn(
            f"The posterior of {site!r} is made anew after {refresh} natural steps, of sums that forget within about "
            f"1/ρ = {1.0 / rate:.3g} of them half-way through this run: what the batches before said is lost. Take a "
            "smaller `refresh` of the guide, or a smaller `step_size`.",
            UserWarning,
            stacklevel=4,
        )
