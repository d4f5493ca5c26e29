"""Which GP sites and latents get one joint Gaussian.

The model is run once with its GP sites at zero and its latents at a draw of the prior. The traced program tells which
latents each term depends on; `guides/group.py` reads from it what a group is made of.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
from typing import Any
import warnings

from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro import handlers

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.traces import Trace
from numpyro_sgp.distributions.wrappers import is_positive, is_triangular, unwrap
from numpyro_sgp.guides.coupled_terms import Coupled, coupled_terms, refuse
from numpyro_sgp.guides.group import Group, effects_of, group_of, program_of
from numpyro_sgp.guides.handlers import GivenGaussianProcesses
from numpyro_sgp.guides.model_runs import first_run
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily

__all__ = ["Joint", "checked_joint", "find_groups"]

Joint = bool | str | tuple[str, ...]

# Latents that are many beside the inducing variables make a step slower: their block is dense.
_MOST_LATENTS = 1000
# Joint posteriors of one GP site and one latent of it, and what they have.
_OF_ONE_SITE = {"rows": "a site in each row", "grid": "inducing inputs on a grid"}


def checked_joint(joint: Any) -> Joint:
    """The argument `joint` of a guide, names as a tuple."""
    if joint is False or joint == "auto":
        return joint
    if isinstance(joint, tuple | list) and joint and all(isinstance(name, str) for name in joint):
        return tuple(joint)
    msg = f'`joint` must be "auto", False or a tuple of names of sites, got {joint!r}. "auto" is the default.'
    raise ValueError(msg)


def _is_eligible(name: str, trace: Trace) -> bool:
    site = trace[name]
    fn, support = site["fn"], site["fn"].support
    if site.get("_control_flow_done") or site["infer"].get("is_auxiliary") or support is None or support.is_discrete:
        return False
    if isinstance(fn, dist.MaskedDistribution) or isinstance(unwrap(fn), dist.Delta):
        return False
    sizes = {msg["name"]: msg["args"][0] for msg in trace.values() if msg["type"] == "plate"}
    return all(sizes.get(frame.name, frame.size) == frame.size for frame in site["cond_indep_stack"])


def find_groups(
    model: Callable[[], Any],
    joint: Joint,
    candidates: Collection[str],
    family: Callable[[str], AbstractPosteriorFamily],
    values: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[Group, ...], tuple[tuple[str, str], ...]]:
    """The GP sites, the groups of GP sites and latents that meet in terms of the model, and the terms in doubt.

    A term is in doubt, with a GP site, if its program does not show that it depends on one row of the site.

    A term that depends on several rows of a GP site needs their covariance: such sites make a group by themselves, too.

    Args:
        model: the model, with its arguments given.
        joint: what the user asked for.
        candidates: the latents that may be members.
        family: the posterior family of a GP site.
        values: of latents, where the base guide has some; draws of the prior elsewhere.

    Raises:
        ValueError: names in `joint` that cannot be joint; terms that depend on several rows of a site whose posterior
            is integrated row by row.

    Warns:
        UserWarning: latents that are left out; terms that may depend on several rows of such a site.
    """
    trace = first_run(model, handlers.substitute(data=dict(values)), GivenGaussianProcesses(0.0))
    found = _coupled(model, trace)
    coupled = found.terms
    unsure = tuple((term, site) for site, names in found.unsure.items() for term in names)
    samples = {name: site for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]}
    gps = [name for name, site in samples.items() if isinstance(unwrap(site["fn"]), GaussianProcess)]
    alone = joint is False or (not any(name in trace for name in candidates) and len(gps) < 2)
    if (alone and not coupled) or any(samples[name].get("_control_flow_done") for name in gps):
        return tuple(gps), (), unsure
    refuse(found, [name for name in coupled if not family(name).couples_rows])
    coupled = {name: terms for name, terms in coupled.items() if family(name).couples_rows}
    latents = [name for name in samples if name not in gps and _is_eligible(name, trace)]
    latents = [name for name in latents if name in candidates and joint is not False]
    program = program_of(model, trace, gps, latents)
    depends = {name: program.depends[number] for name, number in program.outputs.items()}
    terms = {name: found for name, found in depends.items() if name.startswith("term ")}
    # A latent whose prior depends on several rows of a site at once.
    terms |= {f"prior {name}": frozenset({site}) for site, names in coupled.items() for name in names}
    of_gps = {name: [depends[f"gp {name} {number}"] for number in range(4)] for name in gps}
    # A prior mean is added to f: its latents are those of the terms of f.
    parents = frozenset().union(*(found for inputs, _, *kernel in of_gps.values() for found in (inputs, *kernel)))
    parents |= frozenset().union(*(mean.intersection(gps) for _, mean, *_ in of_gps.values()))
    kinds = {name: family(name).joins for name in gps}
    members = [name for name in gps if name not in parents and not frozenset().union(*of_gps[name]).intersection(gps)]
    able = [name for name in members if kinds[name] is not None]
    inside = [name for name in latents if name not in parents and not depends[f"prior {name}"].intersection(gps)]
    if joint == "auto":
        _warn_of_families(terms, [name for name in members if kinds[name] is None], inside, family)
    supports = {name: trace[name]["fn"].support for name in inside}
    factors = {name: is_triangular(each) for name, each in supports.items() if is_triangular(each) or is_positive(each)}
    named = None if joint in ("auto", False) else _checked_names(joint, able, inside, terms, gps)
    if named is not None:
        able, inside = [name for name in able if name in named], [name for name in inside if name in named]
    groups = []
    for sites, others in _components(terms, able, inside) if joint is not False else ():
        group = group_of(program, depends, sites, others, inside, latents, factors)
        others_beside = _in_terms_with(sites, terms).intersection(gps) - set(able)
        batch_shape = samples[sites[0]]["fn"].batch_shape
        if not _has_one_form(group, kinds, others_beside, batch_shape, is_named=named is not None):
            continue
        if kinds[sites[0]] not in _OF_ONE_SITE:
            group = dataclasses.replace(group, effects=effects_of(program, depends, trace, group))
        size = sum(int(np.size(trace[name]["value"])) for name in group.dense)
        if size > _MOST_LATENTS and named is None:
            warnings.warn(_too_many(group, size), UserWarning, stacklevel=2)
            continue
        if len(group.sites) + len(group.latents) > 1:
            groups.append(group)
    taken = {site for group in groups for site in group.sites}
    free = [name for name in members if name not in taken and family(name).couples_rows]
    for sites, _ in _components(terms, free, []):
        beside = _in_terms_with(sites, terms).intersection(gps)
        if coupled.keys() & set(sites) and beside == set(sites) and len({kinds[site] for site in sites}) == 1:
            groups.append(Group(tuple(sites), (), ()))
    taken = {site for group in groups for site in group.sites}
    refuse(found, [name for name in coupled if name not in taken])
    own = [tuple((term, site) for site in group.sites for term in coupled.get(site, ())) for group in groups]
    made = tuple(dataclasses.replace(group, coupled=each) for group, each in zip(groups, own, strict=True))
    return tuple(gps), made, unsure


def _coupled(model: Callable[[], Any], trace: Trace) -> Coupled:
    """Terms that depend on several rows of a GP site at once."""
    gps = {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and isinstance(unwrap(site["fn"]), GaussianProcess)
    }
    if any(site.get("_control_flow_done") for site in gps.values()):
        return Coupled({}, False, {})

    def scale_of(name: str) -> Array:
        return jnp.sqrt(jnp.maximum(unwrap(gps[name]["fn"]).variance, 0.0))

    return coupled_terms(model, trace, gps, scale_of)


def _checked_names(
    joint: Joint, able: list[str], inside: list[str], terms: Mapping[str, frozenset[str]], gps: list[str]
) -> frozenset[str]:
    assert isinstance(joint, tuple)
    named = frozenset(joint)
    unknown = sorted(named - set(able) - set(inside))
    if unknown:
        msg = (
            f"`joint` names {unknown}, which cannot be in a joint Gaussian with the GP sites. Those that can are "
            f"{sorted([*able, *inside])}: continuous latents that no kernel depends on."
        )
        raise ValueError(msg)
    for term, found in terms.items():
        beside = sorted(found.intersection(gps) - named)
        if beside and found & named:
            msg = f"`joint` leaves out {beside}, on which the term {term[5:]!r} depends too. Name all of its GP sites."
            raise ValueError(msg)
    return named


def _warn_of_families(
    terms: Mapping[str, frozenset[str]],
    unable: list[str],
    inside: list[str],
    family: Callable[[str], AbstractPosteriorFamily],
) -> None:
    for name in unable:
        found = sorted({latent for term in terms.values() if name in term for latent in term.intersection(inside)})
        if found:
            msg = (
                f"The posterior of the GP site {name!r}, {type(family(name)).__name__}, takes it to be independent "
                f"of {found}, which meet it in terms of the model: the intervals of both are too narrow. Use tied "
                "sites or natural parameters of inducing inputs (M, D), or pass `joint=False` if this is meant."
            )
            warnings.warn(msg, UserWarning, stacklevel=2)


def _several(group: Group, what: str) -> str:
    return (
        f"The GP sites {list(group.sites)} are several functions with {what}, in the same terms, and their "
        f"posteriors are independent of each other and of {list(group.latents)}: the intervals of all are too narrow. "
        "Write one site, with the sum of their kernels, or pass `joint=False` if this is meant."
    )


def _too_many(group: Group, size: int) -> str:
    return (
        f"The latents {list(group.dense)} have {size} numbers, too many for a joint Gaussian with the GP sites "
        f"{list(group.sites)}: the posterior takes them to be independent of these, and its intervals are too narrow. "
        "Name the members that matter most with `joint=(...)`."
    )


def _components(
    terms: Mapping[str, frozenset[str]], able: list[str], inside: list[str]
) -> Iterator[tuple[list[str], set[str]]]:
    """GP sites that share terms, directly or through others and through latents, and the latents in these terms."""
    left = [set(found) & {*able, *inside} for found in terms.values() if found & set(able)]
    while left:
        component = left.pop(0)
        while touching := [one for one in left if one & component]:
            component = component.union(*touching)
            left = [one for one in left if one not in touching]
        yield [name for name in able if name in component], component & set(inside)


def _in_terms_with(sites: Collection[str], terms: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """All that meets some GP sites in terms."""
    return frozenset().union(*(found for found in terms.values() if found.intersection(sites)))


def _has_one_form(
    group: Group,
    kinds: Mapping[str, str | None],
    others_beside: frozenset[str],
    batch_shape: tuple[int, ...],
    *,
    is_named: bool,
) -> bool:
    """Whether the posteriors of a group can be one Gaussian.

    Args:
        group: the group.
        kinds: how sites of each GP site are held.
        others_beside: GP sites in its terms that cannot be in it.
        batch_shape: of its first GP site.
        is_named: whether the user asked for it, so that it raises.
    """
    if others_beside or len({kinds[site] for site in group.sites}) > 1:
        if is_named:
            msg = (
                f"`joint` names the GP sites {list(group.sites)}, whose posterior families hold their parameters "
                "in different ways. Give them one family."
            )
            raise ValueError(msg)
        return False
    kind = kinds[group.sites[0]]
    if kind in _OF_ONE_SITE and (len(group.sites) > 1 or batch_shape):
        message = _several(group, _OF_ONE_SITE[kind])
        if is_named:
            raise ValueError(message)
        if group.latents:
            warnings.warn(message, UserWarning, stacklevel=3)
        return False
    return True
