"""Reading traces of models and guides."""

from collections.abc import Iterable, Mapping
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.distributions.util import scale_and_mask

from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.wrappers import entry_mask, unwrap

__all__ = [
    "Trace",
    "check_kept",
    "check_outcomes",
    "entry_weights",
    "posteriors_of",
    "rows_of_each",
    "sample_sites",
    "scaled_log_prob",
]

Trace = dict[str, dict[str, Any]]


def posteriors_of(trace: Trace) -> dict[str, SparsePosterior]:
    """The sparse posteriors among the sites of a guide."""
    found = {name: unwrap(site["fn"]) for name, site in trace.items() if site["type"] == "sample"}
    return {name: q for name, q in found.items() if isinstance(q, SparsePosterior)}


def sample_sites(trace: Trace) -> list[str]:
    """Names of the sample sites, in their order."""
    return [name for name, site in trace.items() if site["type"] == "sample"]


def scaled_log_prob(site: dict[str, Any]) -> Array:
    """The log density of a site at its value, scaled and masked."""
    if site["intermediates"]:
        log_prob = site["fn"].log_prob(site["value"], site["intermediates"])
    else:
        log_prob = site["fn"].log_prob(site["value"])
    return scale_and_mask(log_prob, site["scale"])


def entry_weights(site: Mapping[str, Any]) -> Array:
    """How often each entry of a site counts: what its log density is scaled by, 0 where it is masked."""
    fn = site["fn"]
    weights = jnp.asarray(scale_and_mask(jnp.ones(fn.batch_shape), site["scale"]))
    return weights.reshape(*weights.shape, *(1,) * fn.event_dim) * entry_mask(fn)


def rows_of_each(trace: Trace, name: str) -> float:
    """How many rows of all data each row of a site stands for: N/B in the plates that hold a minibatch."""
    plates = [trace[frame.name]["args"] for frame in trace[name]["cond_indep_stack"] if frame.name in trace]
    return float(np.prod([size / subsample for size, subsample in plates if subsample not in (None, size)]))


def check_kept(sites: Iterable[str], guide: Any, loss: str) -> None:
    """Raise where only another loss can train the posterior of a site."""
    family = getattr(guide, "family", None)
    if not callable(family):
        return
    for site in sites:
        kept_by = getattr(family(site), "kept_by", None)
        if kept_by is not None:
            msg = (
                f"The covariance of {site!r} is in an average that `{kept_by}` keeps, and would stay as it is under "
                f"`{loss}`. Train with that loss, or take another `parametrization` of the guide."
            )
            raise TypeError(msg)


def check_outcomes(trace: Trace) -> None:
    """Raise where outcomes and their distribution broadcast to a shape that neither of them has."""
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        value, entries = np.shape(site["value"]), site["fn"].shape()
        try:
            both = np.broadcast_shapes(value, entries)
        except ValueError:
            continue  # the density says so itself
        if both not in (value, entries):
            column = value == (*entries, 1)
            advice = "For a column of outcomes use y[:, 0]." if column else "Give both the same order of axes."
            msg = (
                f"The outcomes of {name!r} have shape {value} and its distribution has {entries}: together that is a "
                f"table {both} of all pairs, where one number for each entry is needed. {advice}"
            )
            raise ValueError(msg)
