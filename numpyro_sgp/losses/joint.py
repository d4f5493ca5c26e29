"""Expectations of the model's terms under a joint Gaussian over GP sites and other latents.

A term depends on f and on most latents through a few linear predictors, which are Gaussian: they are integrated by
quadrature, row by row. Latents that enter in another way (a scale, a degree of freedom, cut points) are integrated by
nodes of their own, and the predictors given each of these.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.linear_predictors import Program, traced
from numpyro_sgp.distributions.traces import Trace, scaled_log_prob
from numpyro_sgp.guides.handlers import is_missing_outcome
from numpyro_sgp.guides.joint_run import AbstractJointRun, expected_reference
from numpyro_sgp.guides.model_runs import log_densities
from numpyro_sgp.losses.expected_terms import Conditional, expected
from numpyro_sgp.losses.predictor_moments import Known, LatentMoments, PredictorMoments, no_effects
from numpyro_sgp.losses.terms import Term, Terms
from numpyro_sgp.losses.tight import Gaussian, gain_of_entries, gaussian_of
from numpyro_sgp.math.quadrature import product_grid, spherical_radial
from numpyro_sgp.posteriors.joint.predictors import Columns

__all__ = ["JointExpectation", "Predictors"]

# Nodes for one latent that is not in a linear predictor, for each of two, and the most latents that have nodes.
_NODES_OF_ONE, _NODES_OF_TWO, _MOST_WITH_NODES = 8, 5, 32


class Predictors(NamedTuple):
    """The linear predictors of a term.

    Attributes:
        num_roots: how many variables of the program they are in; 0 where the term depends on nodes alone.
        num_nodes: how many numbers have nodes of their own.
        dtype: of these.
        at: the predictors given these, as a function of standard normal numbers, (num_nodes,).
    """

    num_roots: int
    num_nodes: int
    dtype: Any
    at: Callable[[Array], Conditional]


class JointExpectation:
    """Σ of the expectations of all terms that depend on the members of one joint Gaussian, and its divergence.

    Args:
        run: the joint Gaussian in a run of the guide.
        model_at: the run of the model at values of latents and deviations of GP sites from their prior means.
        model_trace: a run of the model.
        zeros: by GP site, of the shape and dtype of f at the model's inputs, (..., N).
        latent_term: log p − log q of a latent that is no member, of a run of the model.
        num_nodes: Gauss-Hermite nodes of one linear predictor.
        num_samples: draws where quadrature does not apply.
        rng_key: a key.
        observed: whether the terms of observed sites count.
        latent: whether the divergence, and the terms of latents, count.
        bound: "tight", or "titsias" without the gain of Gaussian terms.
        scale: the factor that the divergence has in the loss; None for 1.
    """

    def __init__(
        self,
        run: AbstractJointRun,
        model_at: Callable[[Mapping[str, Array], Mapping[str, Array]], Trace],
        zeros: Mapping[str, Array],
        latent_term: Callable[[Trace, str], Array],
        num_nodes: int,
        num_samples: int,
        rng_key: Array,
        *,
        observed: bool = True,
        latent: bool = True,
        bound: str = "tight",
        scale: ArrayLike | None = None,
    ) -> None:
        self.run, self.num_nodes, self.num_samples, self.rng_key = run, num_nodes, num_samples, rng_key
        self.latent, self.scale = latent, scale
        group, latents = run.group, run.group.latents
        own = [name for name in latents if name not in group.gaussian]

        def terms(values: dict[str, Array]) -> dict[str, Array]:
            w = {name: values[name] for name in group.dense}
            constrained = run.values(w, None if group.effects is None else values[group.effects])
            trace = model_at(constrained, {name: values[name] for name in group.sites})
            result = log_densities(trace, {name: run.transforms[name] for name in own}, w) if latent else {}
            sites = {name: site for name, site in trace.items() if site["type"] == "sample"}
            outcomes = {name for name, site in sites.items() if site["is_observed"]}
            for name, site in sites.items():
                counts = observed if site["is_observed"] else latent
                if counts and name not in (*group.sites, *latents) and not is_missing_outcome(name, outcomes):
                    result[name] = scaled_log_prob(site) if site["is_observed"] else latent_term(trace, name)
                    gaussian = gaussian_of(trace, name) if bound == "tight" else None
                    if gaussian is not None:
                        result.update(zip(_parts_of(name), gaussian, strict=True))
            return {name: jnp.asarray(value) for name, value in result.items()}

        start = {**zeros, **run.unflattened(run.gaussian.offset), **no_effects(run)}
        self.program: Program = traced(terms, start)
        self.terms = Terms(run, self.program)
        self.moments = PredictorMoments(run, self.program, zeros)
        members = {*group.sites, *latents}
        described = {part for name in self.program.outputs for part in _parts_of(name)}
        self.names = [
            name
            for name, number in self.program.outputs.items()
            if name not in described and self.program.depends[number] & members
        ]
        self.own = own

    def value(self) -> Array:
        """Σ E[log p(term)] + E[log p(w) − log r(w)] − KL(q(z) ‖ p(u) r(w)), r being the prior's stand-in."""
        run = self.run
        gaussian = run.gaussian
        terms = [self.terms.term(name) for name in self.names]
        gaussian_noise = {term.name for term in terms if self._is_gaussian(term)}
        # A GP site has one q(f | u) for all its terms.
        kept = {site for term in terms if term.name not in gaussian_noise for site in term.sites}
        tight = {term.name for term in terms if term.name in gaussian_noise and not kept.intersection(term.sites)}
        for term in terms:
            count = sum(root.count for root in term.roots)
            if count > 2 and any((term.name, site) in run.group.coupled for site in term.sites):
                warnings.warn(_sampled(term, count, self.num_samples), UserWarning, stacklevel=2)
        latents, known, kl = self.moments.of(terms, self.own)
        result = -kl if self.latent else jnp.zeros_like(kl)
        if self.own and self.latent:
            index = run.places(self.own)
            own = latents.at(index)
            # (Without the floor that the variances of predictors have: what it takes back is in the terms, too.)
            variance = gaussian.covariance(own, own, jnp.diagonal(gaussian.root @ gaussian.root.T)[index])
            result = result - expected_reference(gaussian.offset[index] + own.mean, variance)
        result = jnp.asarray(result if self.scale is None else self.scale * result)
        for number, term in enumerate(terms):
            key = jax.random.fold_in(self.rng_key, number)
            result = result + self._integrate(term, known[number], latents, key, tight=term.name in tight)
        return result

    def _is_gaussian(self, term: Term) -> bool:
        """Whether its entries are Gaussian in a linear predictor of GP sites each."""
        program, (loc, *others) = self.program, _parts_of(term.name)
        moving = (*term.sites, *term.linear)
        if not term.sites or loc not in program.outputs or not program.is_affine(loc, moving):
            return False
        fixed = not any(program.depends[program.outputs[each]].intersection(moving) for each in others)
        return fixed and len(term.roots) == term.roots[0].count == 1

    def predictors(self, name: str) -> Predictors:
        """The linear predictors of a term, to be integrated by the caller.

        Args:
            name: of the term.
        """
        term = self.terms.term(name)
        latents, (known,), _ = self.moments.of([term], self.own)
        index, offset = self.run.places(term.nodes), self.run.gaussian.offset
        if not len(index):
            return Predictors(
                len(term.roots), 0, offset.dtype, lambda _: self.moments.conditional(term, known, None, offset)
            )
        own, L = self.moments.root_of(index, latents)

        def at(xi: Array) -> Conditional:
            return self.moments.conditional(term, known, (own, L, xi), offset.at[index].add(own.mean + L @ xi))

        return Predictors(len(term.roots), len(index), offset.dtype, at)

    def _integrate(self, term: Term, known: Known, latents: LatentMoments, rng_key: Array, *, tight: bool) -> Array:
        run, gaussian = self.run, self.run.gaussian
        index = run.places(term.nodes)
        key_nodes, key_rows = jax.random.split(rng_key)
        if not len(index):
            return self._given_nodes(term, known, None, gaussian.offset, key_rows, tight=tight)
        own, L = self.moments.root_of(index, latents)
        nodes, weights = self._nodes(len(index), key_nodes, L.dtype)

        def at(node: Array) -> Array:
            w = gaussian.offset.at[index].add(own.mean + L @ node)
            return self._given_nodes(term, known, (own, L, node), w, key_rows, tight=tight)

        return jnp.sum(weights * jax.vmap(at)(nodes))

    def _nodes(self, dimension: int, rng_key: Array, dtype: Any) -> tuple[Array, Array]:
        if dimension <= 2:
            grid = product_grid(_NODES_OF_ONE if dimension == 1 else _NODES_OF_TWO, dimension)
            return jnp.asarray(grid[0], dtype), jnp.asarray(grid[1], dtype)
        if dimension <= _MOST_WITH_NODES:
            return spherical_radial(rng_key, dimension, dtype)
        half = jax.random.normal(rng_key, (self.num_samples // 2, dimension), dtype)
        return jnp.concatenate([half, -half]), jnp.full(self.num_samples, 1.0 / self.num_samples, dtype)

    def _given_nodes(
        self,
        term: Term,
        known: Known,
        node: tuple[Columns, Array, Array] | None,
        w: Array,
        rng_key: Array,
        *,
        tight: bool,
    ) -> Array:
        """The expectation over the linear predictors, given the latents that have nodes."""
        known = {root.number: self.moments.predictor(term, root, known, w) for root in term.roots}
        given = self.moments.conditional(term, known, node, w)
        result = expected(given, self.num_nodes, self.num_samples, rng_key)
        return result + self._gain(term, known, w) if tight else result

    def _gain(self, term: Term, known: Known, w: Array) -> Array:
        """What the bound gains where q(f | u) is not the prior's, given the latents that have nodes."""
        (root,), program = term.roots, self.program
        predictor, columns = self.moments.predictor(term, root, known, w)
        if not columns.T.shape[0]:  # u are the values of f at the training inputs: nothing is left unexplained
            return jnp.zeros((), columns.mean.dtype)
        rest = self.run.gaussian.unexplained(predictor.prior_covariance(predictor), columns)
        inputs = self.moments.inputs(term, w)
        numbers = [program.outputs[part] for part in _parts_of(term.name)]

        def loc(value: Array) -> Array:
            return jnp.asarray(program.evaluate(numbers[:1], inputs, {root.number: value})[0])

        # An entry depends on one row of the predictor.
        along = [jax.jvp(loc, (predictor.value,), (t,))[1] for t in (jnp.ones_like(rest), jnp.maximum(rest, 0.0))]
        gaussian = Gaussian(*program.evaluate(numbers, inputs, {root.number: predictor.value}))
        return gain_of_entries(along[0] * along[1], gaussian, self.scale)


def _parts_of(term: str) -> tuple[str, ...]:
    """Names of what describes the Gaussian likelihood of a term."""
    return tuple(f"{term}/{part}" for part in Gaussian._fields)


def _sampled(term: Term, count: int, num_samples: int) -> str:
    return (
        f"The term {term.name!r} depends on {count} numbers of {list(term.sites)} at once, in a nonlinear way. They "
        f"are drawn jointly: {num_samples} draws and O({count}³) operations in each step. Raise `num_samples` of "
        "`QuadratureELBO` if the loss is noisy."
    )
