"""Warnings before a run: natural steps that average over too few rows, or update the posterior too rarely."""

from typing import Any
import warnings

import jax.numpy as jnp
from numpyro.infer import SVI

from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.optim import NaturalGradient
from numpyro_sgp.optim.closure import scheduled
from numpyro_sgp.posteriors.sites import AbstractSites, PairSites
from numpyro_sgp.posteriors.weight_space.stale import StaleSites

__all__ = ["warn_of_averages"]

# Averages that step by ρ are worth 2B/ρ rows, and a regression with r weights on that many rows has r ρ/2B times the
# noise variance in its predictions: a tenth of it at this many rows for each weight.
_ROWS_FOR_EACH = 5


def warn_of_averages(svi: SVI, state: Any, batch_size: int, rows: int, num_steps: int) -> None:
    """Warn of a posterior that is averaged over few rows for its size, or of one that is held too long.

    The first: B/ρ is less than five times the number of weights, or of states at inducing times. The second: the
    posterior is updated less often than the sums forget what they were, which takes 1/ρ natural steps. ρ is the step
    size half-way through the run, because a schedule may start with larger steps, or end with smaller ones. With
    batches of all rows nothing is averaged.
    """
    optim, guide = svi.optim, svi.guide
    if not isinstance(optim, NaturalGradient) or not isinstance(guide, AbstractAutoSparseGP):
        return
    if not optim.e_steps or batch_size == rows:
        return
    step = jnp.asarray(state.optim_state[0] + num_steps // 2)
    rate = float(scheduled(optim.step_size, step)) * (1.0 - 1e-5)  # a schedule may compute just the limit in float32
    suffix = f"_{guide.prefix}_sites"
    for name, value in optim.get_params(state.optim_state).items():
        site = name.removesuffix(suffix)
        if not isinstance(value, AbstractSites) or site == name:
            continue
        if isinstance(value, PairSites):
            size, numbers = value.Z.shape[-1] * value.lambda1.shape[-1] // 2, "numbers of the states"
        elif guide.family(site).over_weights:
            size, numbers = value.Lambda2.shape[-1], "weights"
        else:
            continue
        if isinstance(value, StaleSites) and value.refresh * rate > 1.0:
            warnings.warn(
                f"The posterior of {site!r} is updated after {value.refresh} natural steps, but its sums forget within "
                f"about 1/ρ = {1.0 / rate:.3g} of them half-way through this run. Take a smaller `refresh` of the "
                "guide, or a smaller `step_size`.",
                UserWarning,
                stacklevel=4,
            )
        if batch_size < rate * _ROWS_FOR_EACH * size:
            warnings.warn(
                f"The posterior over the {size} {numbers} of {site!r} is an average over about B/ρ = "
                f"{batch_size}/{rate:.3g} = {batch_size / rate:.0f} rows half-way through this run. Fewer than "
                f"{_ROWS_FOR_EACH} for each leave noise in it, to which the hyperparameters adapt and which can grow. "
                f"Give `NaturalGradient` a `step_size` of {batch_size / (_ROWS_FOR_EACH * size):.2g} or less, or a "
                "schedule that falls to it, or take larger batches.",
                UserWarning,
                stacklevel=4,
            )
