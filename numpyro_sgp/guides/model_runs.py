"""Runs of the model at given values of its sites, and the densities of latents where they are unconstrained."""

from collections.abc import Callable, Collection, Mapping
import contextlib
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import scale_and_mask, sum_rightmost
from numpyro.primitives import Messenger

from numpyro_sgp.distributions.traces import Trace, scaled_log_prob
from numpyro_sgp.guides.handlers import Alone, CheckedPlates, GivenDeviations, ImproperAtZero, UnchangedState

__all__ = ["again", "first_run", "log_densities", "summed", "transforms_of"]


def first_run(model: Callable[[], Any], *inner: Messenger) -> Trace:
    """A run of the model that nobody outside sees, with parameters from outside and draws of the prior elsewhere.

    Args:
        model: with its arguments given.
        inner: handlers inside, which give values.
    """
    hidden = handlers.block(hide_fn=lambda msg: msg["type"] in ("sample", "deterministic", "plate"))
    with numpyro.validation_enabled(False), contextlib.ExitStack() as stack:
        stack.enter_context(hidden)
        stack.enter_context(UnchangedState())
        trace = stack.enter_context(handlers.trace())
        stack.enter_context(handlers.seed(rng_seed=0))
        stack.enter_context(CheckedPlates())
        stack.enter_context(ImproperAtZero())
        for handler in inner:
            stack.enter_context(handler)
        model()
    return trace


def again(
    model: Callable[[], Any], trace: Trace, values: Mapping[str, Any], deviations: Mapping[str, Array] | None = None
) -> Trace:
    """The same run at other values of some sites.

    Args:
        model: with its arguments given.
        trace: the run.
        values: of the sites.
        deviations: of GP sites from their prior means, for others.
    """
    deviations = deviations or {}
    given = {
        name: jax.tree.map(lambda x: x, site["value"])
        for name, site in trace.items()
        if site["type"] in ("param", "mutable")
    }
    replayed: Any = {
        name: {**site, "value": values[name]} if name in values else site
        for name, site in trace.items()
        if site["type"] != "deterministic" and name not in deviations
    }
    run = handlers.replay(GivenDeviations(model, deviations), replayed)
    run = handlers.substitute(handlers.seed(run, rng_seed=0), data=given)
    with Alone(), numpyro.validation_enabled(False):
        return handlers.trace(run).get_trace()


def transforms_of(trace: Trace, latents: Collection[str]) -> dict[str, Any]:
    """From unconstrained values to those of each latent."""
    return {name: biject_to(trace[name]["fn"].support) for name in latents}


def log_densities(trace: Trace, transforms: Mapping[str, Any], w: Mapping[str, Array]) -> dict[str, Array]:
    """Log densities of latents in unconstrained space, entry by entry of their batch shape."""
    found = {}
    for name, transform in transforms.items():
        value = transform(w[name])
        log_prob = scaled_log_prob(trace[name])
        log_det = summed(transform.log_abs_det_jacobian(w[name], value), jnp.ndim(log_prob))
        found[name] = log_prob + scale_and_mask(log_det, trace[name]["scale"])
    return found


def summed(x: Array, batch_ndim: int) -> Array:
    """The sum over the event axes of a log density, which has so many batch axes."""
    return sum_rightmost(x, max(jnp.ndim(x) - batch_ndim, 0))
