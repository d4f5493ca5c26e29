"""Check that each term of the model depends on one row of f, as integration by marginals requires."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
import warnings

import jax
from jax import Array
from jax.core import Tracer, eval_jaxpr
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers

from numpyro_sgp._internal.row_dependence import Dependence, row_dependence
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import scaled_log_prob
from numpyro_sgp.guides.handlers import Alone

__all__ = ["check_rows_apart"]

Trace = dict[str, dict[str, Any]]

# A term that couples a single pair of rows is seen where the halves part them, as every second does: missed in 1/256.
_NUM_HALVES = 8
# Far above the rounding of float32 where a gradient is a sum over many data, and far below 1 / √N, what a mean over N
# rows changes. Without such sums the gradients of terms that look at one row each are the same to the last bit.
_TOLERANCE = 1e-4


def check_rows_apart(model: Callable[[], Any], trace: Trace, sites: Mapping[str, SparsePosterior]) -> None:
    """Raise where a term of the model depends on several rows of one latent at once.

    Most programs of terms show that each entry depends on one row, or is a sum over rows. Where one does not, numbers
    decide: the gradient of the log density at a row of f must stay as it is while other rows move. Within `jax.jit`
    there are no numbers, and a warning says so. The inputs of another GP (a deep GP) are no terms.

    Args:
        model: with its arguments given.
        trace: a run of the guide, with values for all latents, plates and parameters of the model.
        sites: the GP sites in it.

    Raises:
        ValueError: the rows of a site are coupled.

    Warns:
        UserWarning: the rows of a site may be coupled, and there are no numbers to tell.
    """
    if not set(sites) <= set(trace):
        return
    start = {name: trace[name]["value"] for name in sites}

    def entries(f: Mapping[str, Any]) -> dict[str, Array]:
        return _entries(model, trace, {**start, **f})

    several = [name for name in sites if jnp.shape(start[name])[-1] > 1]
    unsure = {name: _coupled_terms(entries, name, start[name]) for name in several}
    unsure = {name: terms for name, terms in unsure.items() if terms}
    if not unsure:
        return
    leaves = jax.tree.leaves([site["value"] for site in trace.values()] + [q.moments.variance for q in sites.values()])
    if not all(_is_at_hand(leaf) for leaf in leaves):
        for name, terms in unsure.items():
            warnings.warn(_unsure(name, terms), UserWarning, stacklevel=2)
        return
    for name, terms in unsure.items():
        scale = np.sqrt(np.maximum(np.asarray(sites[name].moments.variance), 0.0))

        def couples(chosen: Sequence[str], name: str = name, scale: np.ndarray = scale) -> bool:
            def total(f: Array) -> Array:
                found = entries({name: f})
                return jnp.asarray(sum(jnp.sum(found[term]) for term in chosen))

            gradient = _gradient(total, np.asarray(start[name]))
            return gradient is not None and _couples(gradient, np.asarray(start[name]), scale)

        if couples(terms):
            raise ValueError(_message(name, [term for term in terms if couples([term])] or terms))


def _is_at_hand(leaf: Any) -> bool:
    return not isinstance(leaf, Tracer) and (not isinstance(leaf, Array) or leaf.is_fully_addressable)


def _entries(model: Callable[[], Any], trace: Trace, f: Mapping[str, Any]) -> dict[str, Array]:
    """Log densities of all sites but the GPs, entry by entry, at the values of a trace and at f."""
    # A model may change its mutable state in place: it gets a copy.
    given = {
        name: jax.tree.map(lambda x: x, site["value"])
        for name, site in trace.items()
        if site["type"] in ("param", "mutable")
    }
    replayed: Any = {name: {**site, "value": f[name]} if name in f else site for name, site in trace.items()}
    given_model = handlers.substitute(handlers.seed(handlers.replay(model, replayed), rng_seed=0), data=given)
    # What NumPyro says of outcomes out of their support, it says where a loss asks for their density.
    with Alone(), numpyro.validation_enabled(False):
        found = handlers.trace(given_model).get_trace()
        samples = {name: site for name, site in found.items() if site["type"] == "sample" and name not in f}
        return {name: jnp.asarray(scaled_log_prob(site)) for name, site in samples.items()}


def _coupled_terms(entries: Callable[[Mapping[str, Any]], dict[str, Array]], name: str, start: Any) -> list[str]:
    """The terms that may depend on several rows of a site at once, as far as their program shows."""
    found = row_dependence(lambda f: entries({name: f}), jnp.asarray(start))
    return [term for term, kind in found.items() if kind is Dependence.COUPLED]


def _gradient(fn: Callable[[Array], Array], like: np.ndarray) -> Callable[[np.ndarray], np.ndarray] | None:
    """The gradient of `fn` as one compiled program; None where it has none, or not from numbers alone."""
    try:
        program = jax.make_jaxpr(jax.grad(fn))(like)
    except (TypeError, ValueError, NotImplementedError):
        return None  # a mistake in the model, or a loop without a reverse: the loss says so, or gets along
    if not all(_is_at_hand(leaf) for leaf in program.consts):
        return None
    # The data are arguments of the program: closed over, they would be folded while it is compiled.
    compiled = jax.jit(lambda consts, f: eval_jaxpr(program.jaxpr, consts, f)[0])
    return lambda f: np.asarray(compiled(program.consts, f))


def _couples(gradient: Callable[[np.ndarray], np.ndarray], f: np.ndarray, scale: np.ndarray) -> bool:
    """Whether the gradient at rows of a latent moves with other rows of the same latent.

    One latent moves at a time: a term may look at one row of one latent and at another row of another.
    """
    rng = np.random.default_rng(0)
    before = gradient(f)
    for latent in np.ndindex(f.shape[:-1]):
        for _ in range(_NUM_HALVES):
            half = rng.uniform(size=f.shape[-1]) < 0.5
            moved = f.copy()
            moved[latent] = np.where(half, f + scale * rng.normal(size=f.shape), f)[latent]
            after = gradient(moved)
            known = np.isfinite(before) & np.isfinite(after)
            if not known.any():
                continue
            old, new = (np.where(known, each, 0.0).astype(float) for each in (before, after))
            size = np.sqrt(np.mean(np.square(old[known])))
            if np.any((np.abs(new - old) > _TOLERANCE * (np.abs(old) + size))[latent] & ~half):
                return True
    return False


def _unsure(site: str, terms: list[str]) -> str:
    return (
        f"The terms {terms} may depend on several rows of the GP site {site!r} at once, and then the loss is no bound. "
        "Values decide that, and there are none under `jax.jit`. Call `svi.init` once without `jit` to find out."
    )


def _message(site: str, terms: list[str]) -> str:
    return (
        f"The terms {terms} depend on several rows of the GP site {site!r} at once: on their differences or averages, "
        "say, or through correlated noise. Sparse guides integrate f row by row, so each entry of a term may depend on "
        "one row of each latent, else the loss is no bound. Use NUTS on the model as it stands, or on "
        f"`handlers.reparam(model, config={{{site!r}: InducingReparam(Z)}})`, which takes a guide of NumPyro as well."
    )
