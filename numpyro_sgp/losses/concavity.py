"""Check that a likelihood is log-concave in a latent.

An estimate of f from sampled basis functions can be used in a bound only where the log density is quadratic or concave.
"""

from collections.abc import Callable, Collection
from typing import Any

from jax import Array
import numpyro.distributions as dist

from numpyro_sgp._internal.curvature import Shape, shapes_of

__all__ = ["check_concave", "dependence"]

# By distribution: which of its parameters may depend on f, and how, for its log-density to be concave in f.
_CONCAVE: dict[type, dict[str, Shape]] = {
    dist.Normal: {"loc": Shape.AFFINE},
    dist.Laplace: {"loc": Shape.AFFINE},
    dist.Logistic: {"loc": Shape.AFFINE},
    dist.Gumbel: {"loc": Shape.AFFINE},
    dist.BernoulliLogits: {"logits": Shape.AFFINE},
    dist.BinomialLogits: {"logits": Shape.AFFINE},
    dist.Poisson: {"rate": Shape.EXPONENTIAL},
    dist.Exponential: {"rate": Shape.EXPONENTIAL},
    dist.Gamma: {"rate": Shape.EXPONENTIAL},
}


def _parameters(site_fn: dist.Distribution) -> dict[str, Any]:
    return {name: getattr(site_fn, name) for name in site_fn.arg_constraints if name in vars(site_fn)}


def dependence(site_fn_at: Callable[[Array], dist.Distribution], f: Array) -> tuple[type, dict[str, Shape]]:
    """The distribution of a site, and how its parameters depend on f, those that do not left out."""
    seen: list[type] = []

    def parameters(f: Array) -> dict[str, Any]:
        fn = site_fn_at(f)
        seen.append(type(fn))
        return _parameters(fn)

    found = shapes_of(parameters, f)
    return seen[-1], {name: shape for name, shape in found.items() if shape is not Shape.CONSTANT}


def check_concave(site: str, kind: type, found: dict[str, Shape], declared: Collection[str]) -> None:
    """Raise where a log-density is not known to be concave in f.

    Args:
        site: the observed site.
        kind: its distribution.
        found: how its parameters depend on f.
        declared: sites that the user says are log-concave.

    Raises:
        ValueError: the likelihood is not log-concave, or not known to be.
    """
    if site in declared:
        return
    needed = _CONCAVE.get(kind)
    if needed is not None and all(needed.get(name) is shape for name, shape in found.items()):
        return
    msg = (
        f"The likelihood of {site!r} is {kind.__name__}, not known to be log-concave in f. An estimate of f "
        f"needs that. Use `logits=` and affine locations, pass `log_concave=({site!r},)`, or use `AutoSVGP`."
    )
    raise ValueError(msg)
