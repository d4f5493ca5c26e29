"""Which terms of the model depend on several rows of f at once."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array
from jax.core import Tracer, eval_jaxpr
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers

from numpyro_sgp._internal.row_dependence import Dependence, row_dependence
from numpyro_sgp.distributions.traces import Trace, scaled_log_prob
from numpyro_sgp.guides.handlers import Alone

__all__ = ["Coupled", "coupled_terms", "refuse", "refuse_new", "unsure_terms"]


# A term that couples a single pair of rows is seen where the halves part them, as every second does: missed in 1/256.
_NUM_HALVES = 8
# Far above the rounding of float32 where a gradient is a sum over many data, and far below 1 / √N, what a mean over N
# rows changes. Without such sums the gradients of terms that look at one row each are the same to the last bit.
_TOLERANCE = 1e-4


class Coupled(NamedTuple):
    """The terms that depend on several rows of a GP site at once.

    Attributes:
        terms: their names, by GP site; sites without any are left out.
        is_known: whether values have confirmed it, which do not exist within `jax.jit`.
        unsure: terms of which the program alone does not show that they depend on one row, by GP site.
    """

    terms: dict[str, list[str]]
    is_known: bool
    unsure: dict[str, list[str]]


def coupled_terms(
    model: Callable[[], Any], trace: Trace, sites: Collection[str], scale_of: Callable[[str], Array]
) -> Coupled:
    """Which terms of the model depend on several rows of one latent at once.

    Most programs of terms show that each entry depends on one row, or is a sum over rows. Where one does not, numbers
    decide: the log density must be a sum of functions of one row each. Within `jax.jit` there are no numbers, and such
    a term counts as coupled. The inputs of another GP (a deep GP) are no terms.

    Args:
        model: with its arguments given.
        trace: a run of it, with values for all latents, plates and parameters.
        sites: the GP sites in it.
        scale_of: prior standard deviations of a site, (..., N): for a kernel of many features they cost more than a
            step, so they are asked for where numbers decide.
    """
    start = {name: trace[name]["value"] for name in sites}

    def entries(f: Mapping[str, Any]) -> dict[str, Array]:
        return _entries(model, trace, {**start, **f})

    unsure = unsure_terms(model, trace, sites)
    if not unsure:
        return Coupled({}, False, {})
    scales = {name: scale_of(name) for name in unsure}
    leaves = jax.tree.leaves([site["value"] for site in trace.values()] + list(scales.values()))
    if not all(_is_at_hand(leaf) for leaf in leaves):
        return Coupled(unsure, False, unsure)
    found = {}
    for name, terms in unsure.items():
        f = np.asarray(start[name])
        scale = np.broadcast_to(np.asarray(scales[name]), f.shape)

        def couples(chosen: Sequence[str], name: str = name, f: np.ndarray = f, scale: np.ndarray = scale) -> bool:
            def each(f: Array) -> list[Array]:
                result = entries({name: f})
                return [result[term] for term in chosen]

            gradient = _compiled(jax.grad(lambda f: jnp.asarray(sum(jnp.sum(value) for value in each(f)))), f)
            if gradient is not None and _gradients_couple(lambda f: np.asarray(gradient(f)), f, scale):
                return True
            values = _compiled(each, f)
            return values is not None and _values_couple(lambda f: [np.asarray(x) for x in values(f)], f, scale)

        if couples(terms):
            found[name] = [term for term in terms if couples([term])] or terms
    return Coupled(found, True, unsure)


def unsure_terms(model: Callable[[], Any], trace: Trace, sites: Collection[str]) -> dict[str, list[str]]:
    """The terms of which the program does not show that they depend on one row of a site, by GP site."""
    start = {name: trace[name]["value"] for name in sites}

    def entries(f: Mapping[str, Any]) -> dict[str, Array]:
        return _entries(model, trace, {**start, **f})

    several = [name for name in sites if jnp.shape(start[name])[-1] > 1]
    unsure = {name: _unsure_terms(entries, name, start[name]) for name in several}
    return {name: terms for name, terms in unsure.items() if terms}


def refuse(found: Coupled, sites: Collection[str]) -> None:
    """Raise where terms couple the rows of sites whose posteriors are integrated row by row, or warn if they may.

    Raises:
        ValueError: the rows of a site are coupled.

    Warns:
        UserWarning: the rows of a site may be coupled, and there are no numbers to tell.
    """
    for name, terms in found.terms.items():
        if name not in sites:
            continue
        if found.is_known:
            raise ValueError(_message(name, terms))
        warnings.warn(_unsure(name, terms), UserWarning, stacklevel=2)


def refuse_new(unsure: Mapping[str, list[str]], known: Collection[tuple[str, str]]) -> None:
    """Raise where a term may depend on several rows and did not when the guide was first run."""
    for name, terms in unsure.items():
        new = [term for term in terms if (term, name) not in known]
        if new:
            msg = (
                f"The terms {new} depend on several rows of the GP site {name!r}, and did not when the guide was first "
                "run: these parameters are of another model. Call `svi.init` for this one."
            )
            raise ValueError(msg)


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


def _unsure_terms(entries: Callable[[Mapping[str, Any]], dict[str, Array]], name: str, start: Any) -> list[str]:
    """The terms that may depend on several rows of a site at once, as far as their program shows."""
    found = row_dependence(lambda f: entries({name: f}), jnp.asarray(start))
    return [term for term, kind in found.items() if kind is Dependence.COUPLED]


def _compiled(fn: Callable[[Array], Any], like: np.ndarray) -> Callable[[np.ndarray], Any] | None:
    """A function as one compiled program; None where it has none, or not from numbers alone."""
    try:
        program, shape = jax.make_jaxpr(fn, return_shape=True)(like)
    except (TypeError, ValueError, NotImplementedError):
        return None  # a mistake in the model, or a loop without a reverse: the loss says so, or gets along
    if not all(_is_at_hand(leaf) for leaf in program.consts):
        return None
    # The data are arguments of the program: closed over, they would be folded while it is compiled.
    compiled = jax.jit(lambda consts, f: eval_jaxpr(program.jaxpr, consts, f))
    structure = jax.tree.structure(shape)
    return lambda f: structure.unflatten(compiled(program.consts, f))


def _gradients_couple(gradient: Callable[[np.ndarray], np.ndarray], f: np.ndarray, scale: np.ndarray) -> bool:
    """Whether the gradient at rows of a latent moves with other rows of the same latent.

    One latent moves at a time: a term may look at one row of one latent and at another row of another.
    """
    rng = np.random.default_rng(0)
    before = gradient(f)
    size = np.sqrt(np.mean(np.square(before[np.isfinite(before)].astype(float)))) if np.isfinite(before).any() else 0.0
    for latent in np.ndindex(f.shape[:-1]):
        for _ in range(_NUM_HALVES):
            half = rng.uniform(size=f.shape[-1]) < 0.5
            row, push = f[latent], scale[latent] * rng.normal(size=f.shape[-1])
            moved = f.copy()
            moved[latent] = np.where(half, row + push, row)
            after = gradient(moved)
            known = np.isfinite(before[latent]) & np.isfinite(after[latent])
            old, new = (np.where(known, each[latent], 0.0).astype(float) for each in (before, after))
            if np.any((np.abs(new - old) > _TOLERANCE * (np.abs(old) + size)) & ~half):
                return True
    return False


def _values_couple(values: Callable[[np.ndarray], list[np.ndarray]], f: np.ndarray, scale: np.ndarray) -> bool:
    """Whether entries are no sums of functions of one row each, which no `stop_gradient` or rounding can hide.

    For such a sum the change by two halves of the rows together is that by the one and by the other.
    """
    rng = np.random.default_rng(0)
    others = (f + scale * rng.normal(size=f.shape)).astype(f.dtype)
    for latent in np.ndindex(f.shape[:-1]):
        for _ in range(_NUM_HALVES):
            half = rng.uniform(size=f.shape[-1]) < 0.5
            start, end = (f[latent] + scale[latent] * rng.normal(size=f.shape[-1]) for _ in range(2))
            points, moved = [], others.copy()
            for first, second in ((start, start), (end, end), (end, start), (start, end)):
                moved[latent] = np.where(half, first, second)
                points.append(values(moved.copy()))
            for a, b, c, d in zip(*points, strict=True):
                known = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & np.isfinite(d)
                a, b, c, d = (np.where(known, each, 0.0).astype(float) for each in (a, b, c, d))
                size = np.abs(a) + np.abs(b) + np.abs(c) + np.abs(d)
                size = np.maximum(size, np.mean(size))
                if np.any(np.abs(a + b - c - d) > _TOLERANCE * size):
                    return True
    return False


def _unsure(site: str, terms: list[str]) -> str:
    return (
        f"The terms {terms} may depend on several rows of the GP site {site!r} at once, and then the loss is no bound. "
        "Values decide that, and there are none under `jax.jit`. Call `svi.init` once without `jit` to find out, or "
        "use a guide that takes such terms, as `AutoTSVGP` with inducing inputs."
    )


def _message(site: str, terms: list[str]) -> str:
    return (
        f"The terms {terms} depend on several rows of the GP site {site!r} at once, and its posterior is integrated "
        "row by row. Use `AutoTSVGP` with inducing inputs, or `AutoSVGP`; or NUTS on "
        f"`handlers.reparam(model, config={{{site!r}: InducingReparam(Z)}})`."
    )
