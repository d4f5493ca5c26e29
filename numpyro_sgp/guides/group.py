"""What the traced program of a model says of a group of GP sites and latents.

Which priors are Gaussian, which latents are known times a scale only, and which are effects of groups that can be
eliminated. `guides/members.py` says which GP sites and latents make a group.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from numpyro import distributions as dist

from numpyro_sgp._internal.linear_predictors import Program, traced
from numpyro_sgp._internal.row_dependence import Dependence, row_dependence
from numpyro_sgp._internal.scaling import Scaling, scaling_of
from numpyro_sgp.distributions.traces import Trace, scaled_log_prob
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.guides.model_runs import again, log_densities, transforms_of

__all__ = ["Group", "effects_of", "group_of", "program_of"]

# Gaussian where they are unconstrained.
_GAUSSIAN = (dist.Normal, dist.MultivariateNormal, dist.LogNormal)
# Effects of groups of which each row has one are eliminated one by one, which pays from here on.
_FEWEST_EFFECTS, _MOST_EFFECTS = 64, 100_000


@dataclasses.dataclass(frozen=True)
class Group:
    """GP sites and latents with one joint Gaussian.

    Attributes:
        sites: the GP sites.
        latents: the other latents, in the order of the model.
        gaussian: those of them whose prior is jointly Gaussian where they are unconstrained, given the hyperparameters.
        scaled: those that the model multiplies by other latents, each with these. The product is the member, as if the
            effects had been written centred, and the scales are left to the base guide.
        effects: the one of the latents of which each row of the data looks at one number, with a block of its own.
        coupled: terms that depend on several rows of a GP site at once, each with that site.
        means: the sites whose prior means depend on the latents.
    """

    sites: tuple[str, ...]
    latents: tuple[str, ...]
    gaussian: tuple[str, ...]
    scaled: tuple[tuple[str, Scaling], ...] = ()
    effects: str | None = None
    coupled: tuple[tuple[str, str], ...] = ()
    means: tuple[str, ...] = ()

    @property
    def dense(self) -> tuple[str, ...]:
        """The latents whose block is dense."""
        return tuple(name for name in self.latents if name != self.effects)


def program_of(model: Callable[[], Any], trace: Trace, gps: list[str], latents: list[str]) -> Program:
    """Terms ("term"), priors ("prior") and kernels and means of GP sites ("gp") as functions of f and w.

    The inputs f are values less the prior mean.
    """
    transforms = transforms_of(trace, latents)
    start = {name: jnp.asarray(trace[name]["value"]) for name in gps}
    start |= {name: jnp.asarray(transforms[name].inv(trace[name]["value"])) for name in latents}

    def run(values: dict[str, Array]) -> dict[str, Array]:
        w = {name: values[name] for name in latents}
        constrained = {name: transforms[name](value) for name, value in w.items()}
        found = again(model, trace, constrained, {name: values[name] for name in gps})
        result = {f"prior {name}": value for name, value in log_densities(found, transforms, w).items()}
        result |= {f"value {name}": jnp.asarray(value) for name, value in constrained.items()}
        for name in latents:
            fn: Any = unwrap(found[name]["fn"])
            if isinstance(fn, _GAUSSIAN):
                scale = fn.scale_tril if isinstance(fn, dist.MultivariateNormal) else fn.scale
                result |= {f"loc {name}": jnp.asarray(fn.loc), f"scale {name}": jnp.asarray(scale)}
        for name in gps:
            gp: Any = unwrap(found[name]["fn"])
            inputs = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(gp.X)])
            parts = (inputs, gp.prior_mean, gp.kernel(gp.X), gp.kernel(gp.X[:1], gp.X))
            result |= {f"gp {name} {number}": jnp.asarray(part) for number, part in enumerate(parts)}
        for name, site in found.items():
            if site["type"] == "sample" and site["is_observed"]:
                result[f"term {name}"] = jnp.asarray(scaled_log_prob(site))
        return result

    return traced(run, start)


def group_of(
    program: Program,
    depends: Mapping[str, frozenset[str]],
    sites: list[str],
    found: set[str],
    inside: list[str],
    latents: list[str],
    factors: Mapping[str, bool],
) -> Group:
    """GP sites and latents, with those that the prior means of others are made of, as the mean of group effects.

    Args:
        program: of the model.
        depends: what its outputs depend on.
        sites: the GP sites.
        found: the latents that meet them in terms.
        inside: the latents that may be members.
        latents: all of them, in the order of the model.
        factors: those that may be scales of members, and whether each is a lower triangular matrix.
    """
    while True:
        parents = {
            parent
            for name in found
            for parent in (depends[f"prior {name}"] & set(inside)) - found
            if _is_gaussian(program, name, [name, parent]) and _is_gaussian(program, parent, [name, parent])
        }
        if not parents:
            break
        found = found | parents
    names = [name for name in latents if name in found]
    gaussian = [name for name in names if _is_gaussian(program, name, names)]
    while closed := [name for name in gaussian if (depends[f"prior {name}"] & found) - set(gaussian)]:
        gaussian = [name for name in gaussian if name not in closed]
    scaled = _scaled(program, names, gaussian, factors)
    left = {scale.name for _, scaling in scaled for scale in scaling.scales}
    names, gaussian = ([name for name in each if name not in left] for each in (names, gaussian))
    means = tuple(site for site in sites if depends[f"gp {site} 1"].intersection(names))
    return Group(tuple(sites), tuple(names), tuple(gaussian), scaled, means=means)


def effects_of(program: Program, depends: Mapping[str, frozenset[str]], trace: Trace, group: Group) -> str | None:
    """The largest latent with independent normal numbers of which each row of the data looks at one."""

    def apart(number: int, name: str) -> Dependence:
        def of(e: Array) -> Array:
            start = program.starts[name]
            return program.evaluate([number], {**program.starts, name: e.reshape(start.shape)})[0]

        return row_dependence(of, program.starts[name].ravel())

    def is_apart(name: str) -> bool:
        if any(name in depends[f"gp {site} 1"] for site in group.sites):
            return False
        for term, found in depends.items():
            if name not in found or term == f"prior {name}" or not term.startswith(("term ", "prior ")):
                continue
            if term.startswith("prior "):
                return False
            roots = program.roots(term, [*group.sites, *group.latents])
            if apart(program.outputs[term], name) is Dependence.COUPLED:
                return False
            if any(apart(root, name) > Dependence.ONE for root in roots):
                return False
        return True

    sizes = {name: program.starts[name].size for name in group.gaussian}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        fn = unwrap(trace[name]["fn"])
        if _FEWEST_EFFECTS <= sizes[name] <= _MOST_EFFECTS and isinstance(fn, dist.Normal) and is_apart(name):
            return name
    return None


def _scaled(
    program: Program, names: list[str], gaussian: list[str], factors: Mapping[str, bool]
) -> tuple[tuple[str, Scaling], ...]:
    """The Gaussian latents that all terms know times factors only, where no term knows these otherwise."""
    terms = [output for output in program.outputs if output.startswith("term ")]
    values = {program.origin(program.outputs[f"value {name}"]): name for name in factors}
    triangular = {name for name, is_triangular in factors.items() if is_triangular}
    found, products = {}, {}
    for name in gaussian:
        scaling, numbers = scaling_of(program, name, values, triangular, terms) if name not in factors else (None, ())
        if scaling is not None:
            found[name] = scaling
            products.update(dict.fromkeys(numbers, frozenset({name})))
    known = program.depends_given(products)
    seen = frozenset().union(*(known[term] for term in terms)) | frozenset(
        parent for name in names for parent in program.depends[program.outputs[f"prior {name}"]] - {name}
    )
    return tuple(
        (name, scaling) for name, scaling in found.items() if seen.isdisjoint(each.name for each in scaling.scales)
    )


def _is_gaussian(program: Program, name: str, variable: list[str]) -> bool:
    """Whether the prior of a latent is Gaussian with a mean that is affine in some latents, and a fixed covariance."""
    if f"loc {name}" not in program.outputs:
        return False
    if program.depends[program.outputs[f"scale {name}"]] & set(variable):
        return False
    return program.is_affine(f"loc {name}", variable)
