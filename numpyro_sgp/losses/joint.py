"""Expectations of the model's terms under a joint Gaussian over GP sites and other latents.

A term depends on f and on most latents through a few linear predictors, which are Gaussian: they are integrated by
quadrature, row by row. Latents that enter in another way (a scale, a degree of freedom, cut points) are integrated by
nodes of their own, and the predictors given each of these.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.predictors import Program, traced
from numpyro_sgp.distributions.traces import Trace, scaled_log_prob
from numpyro_sgp.guides.handlers import is_missing_outcome
from numpyro_sgp.guides.joint import JointRun, expected_reference
from numpyro_sgp.guides.model_runs import log_densities
from numpyro_sgp.losses.picked_rows import picked_variance
from numpyro_sgp.losses.predictors import Conditional, expected
from numpyro_sgp.losses.terms import Root, Term, Terms
from numpyro_sgp.losses.tight import Gaussian, gain_of_entries, gaussian_of
from numpyro_sgp.math.linalg import cholesky, solve_lower
from numpyro_sgp.math.quadrature import product_grid, spherical_radial
from numpyro_sgp.posteriors.joint.effects import Loading
from numpyro_sgp.posteriors.joint.predictors import Columns, Predictor

__all__ = ["JointExpectation", "Predictors"]

# Nodes for one latent that is not in a linear predictor, for each of two, and the most latents that have nodes.
_NODES_OF_ONE, _NODES_OF_TWO, _MOST_WITH_NODES = 8, 5, 32


class _Latents(NamedTuple):
    """The moments of some numbers of w.

    Attributes:
        places: where they are in w.
        columns: their moments.
    """

    places: np.ndarray
    columns: Columns

    def at(self, index: np.ndarray) -> Columns:
        """Those at some places in w."""
        return Columns(*(each[..., np.searchsorted(self.places, index)] for each in self.columns))


# Predictors that do not move with nodes and their moments, by number of the root.
_Known = dict[int, tuple[Predictor, Columns]]


def _flat(predictor: Predictor, variance: Array) -> tuple[Array, ...]:
    """What `JointGaussian.posterior` asks for, of a predictor of any shape."""
    c, index = predictor.loading
    return predictor.k.reshape(predictor.k.shape[0], -1), variance.ravel(), c.ravel(), index.ravel()


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
        model_at: the run of the model at values of its members.
        model_trace: a run of the model.
        means: E[f] of the prior at the model's inputs, by GP site.
        latent_term: log p − log q of a latent that is no member, of a run of the model.
        num_nodes: Gauss-Hermite nodes of one linear predictor.
        num_samples: draws where quadrature does not apply.
        rng_key: a key.
        observed: whether the terms of observed sites count.
        latent: whether the divergence, and the terms of latents, count.
        bound: "tight", or "titsias" without the gain of Gaussian terms.
    """

    def __init__(
        self,
        run: JointRun,
        model_at: Callable[[Mapping[str, Array]], Trace],
        means: Mapping[str, Array],
        latent_term: Callable[[Trace, str], Array],
        num_nodes: int,
        num_samples: int,
        rng_key: Array,
        *,
        observed: bool = True,
        latent: bool = True,
        bound: str = "tight",
    ) -> None:
        self.run, self.num_nodes, self.num_samples, self.rng_key = run, num_nodes, num_samples, rng_key
        self.means, self.latent = means, latent
        group, latents = run.group, run.group.latents
        own = [name for name in latents if name not in group.gaussian]

        def terms(values: dict[str, Array]) -> dict[str, Array]:
            w = {name: values[name] for name in group.dense}
            constrained = run.values(w, None if group.effects is None else values[group.effects])
            trace = model_at({**{name: values[name] for name in group.sites}, **constrained})
            result = log_densities(trace, {name: run.transforms[name] for name in own}, w) if latent else {}
            sites = {name: site for name, site in trace.items() if site["type"] == "sample"}
            outcomes = {name for name, site in sites.items() if site["is_observed"]}
            for name, site in sites.items():
                counts = observed if site["is_observed"] else latent
                if counts and name not in (*group.sites, *latents) and not is_missing_outcome(name, outcomes):
                    result[name] = scaled_log_prob(site) if site["is_observed"] else latent_term(trace, name)
                    gaussian = gaussian_of(site) if bound == "tight" else None
                    if gaussian is not None:
                        result.update(zip(_parts_of(name), gaussian, strict=True))
            return {name: jnp.asarray(value) for name, value in result.items()}

        start = {**means, **run.unflattened(run.gaussian.offset), **self._no_effects()}
        self.program: Program = traced(terms, start)
        self.terms = Terms(run, self.program)
        members = {*group.sites, *latents}
        described = {part for name in self.program.outputs for part in _parts_of(name)}
        self.names = [
            name
            for name, number in self.program.outputs.items()
            if name not in described and self.program.depends[number] & members
        ]
        self.own = own

    def _no_effects(self) -> dict[str, Array]:
        effects = self.run.group.effects
        return {} if effects is None else {effects: jnp.zeros(self.run.effect_shape, self.run.dtype)}

    def value(self, scale: ArrayLike | None) -> Array:
        """Σ E[log p(term)] + E[log p(w) − log r(w)] − KL(q(z) ‖ p(u) r(w)), r being the prior's stand-in.

        Args:
            scale: the factor that the divergence has in the loss; None for 1.
        """
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
        latents, known, kl = self._moments(terms)
        result = -kl if self.latent else jnp.zeros_like(kl)
        if self.own and self.latent:
            index = run.places(self.own)
            own = latents.at(index)
            # (Without the floor that the variances of predictors have: what it takes back is in the terms, too.)
            variance = gaussian.covariance(own, own, jnp.diagonal(gaussian.root @ gaussian.root.T)[index])
            result = result - expected_reference(gaussian.offset[index] + own.mean, variance)
        result = jnp.asarray(result if scale is None else scale * result)
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
        latents, (known,), _ = self._moments([term])
        index, offset = self.run.places(term.nodes), self.run.gaussian.offset
        if not len(index):
            return Predictors(len(term.roots), 0, offset.dtype, lambda _: self._conditional(term, known, None, offset))
        own, L = self._own(index, latents)

        def at(xi: Array) -> Conditional:
            return self._conditional(term, known, (own, L, xi), offset.at[index].add(own.mean + L @ xi))

        return Predictors(len(term.roots), len(index), offset.dtype, at)

    def _moments(self, terms: list[Term]) -> tuple[_Latents, list[_Known], Array]:
        """Moments of the latents that have nodes and of the predictors that do not move with them, and the divergence.

        All of them share one factorisation.
        """
        run = self.run
        gaussian = run.gaussian
        needed = run.places({*self.own, *(name for term in terms for name in term.nodes)})
        k, variance = gaussian.of_latents()
        none = Loading(jnp.zeros(len(needed), variance.dtype), jnp.zeros(len(needed), int))
        asked: list[tuple[Array, ...]] = [(k[:, needed], variance[needed], *none)]
        fixed: dict[tuple[str, int], tuple[Predictor, int]] = {}
        for term in terms:
            for root in term.roots:
                if not self.program.depends[root.number] & set(term.nodes):
                    predictor = self._predictor(term, root, gaussian.offset)
                    fixed[term.name, root.number] = predictor, len(asked)
                    variance = predictor.prior_covariance(predictor)
                    asked.append(_flat(predictor, variance))
        ends = np.cumsum([0, *(each[1].shape[0] for each in asked)])
        # (Rows may lie on several devices: one array of them stays as it is.)
        filled = [each for each in asked if each[1].size] if len(asked) > 1 else asked
        k, variance, *loading = (
            filled[0] if len(filled) == 1 else (jnp.concatenate(parts, axis=-1) for parts in zip(*filled, strict=True))
        )
        columns, kl = gaussian.posterior(k, variance, Loading(*loading))
        latents = _Latents(needed, columns.take(0, int(ends[1]), (int(ends[1]),)))
        known = [
            {
                root.number: (predictor, columns.take(int(ends[place]), int(ends[place + 1]), root.shape))
                for root in term.roots
                if (term.name, root.number) in fixed
                for predictor, place in [fixed[term.name, root.number]]
            }
            for term in terms
        ]
        return latents, known, kl

    def _predictor(self, term: Term, root: Root, w: Array) -> Predictor:
        """A linear predictor with the latents that have nodes at their values in w."""
        run = self.run
        shapes = {site: (run.gaussian.spans[site][1], -1) for site in term.sites}

        effects = run.group.effects

        def of(f: dict[str, Array], w: Array, e: Array) -> Array:
            inputs = {site: f[site].reshape(self.means[site].shape) for site in term.sites} | run.unflattened(w)
            if effects is not None:
                inputs[effects] = e.reshape(run.effect_shape)
            return self.program.evaluate([root.number], inputs)[0]

        f = {site: self.means[site].reshape(shapes[site]) for site in term.sites}
        moving = np.zeros(run.num_latents)
        moving[run.places(term.linear)] = 1.0
        rows = {site: run.rows[site] for site in term.sites}
        has_effects = effects in self.program.depends[root.number]
        covariances, variances = {}, {}
        inputs = self._inputs(term, w)
        for site in term.sites:
            if (term.name, site) not in run.group.coupled:
                continue
            variance = None
            if len(term.roots) == root.count == 1:
                variance = picked_variance(self.program, root.number, site, inputs, run.priors[site])
            if variance is None:
                covariances[site] = run.prior_covariance(site)
            else:
                variances[site] = variance
        return run.gaussian.of_predictor(
            of,
            (f, w),
            rows,
            jnp.asarray(moving, w.dtype),
            has_effects=has_effects,
            covariances=covariances,
            variances=variances,
        )

    def _integrate(self, term: Term, known: _Known, latents: _Latents, rng_key: Array, *, tight: bool) -> Array:
        run, gaussian = self.run, self.run.gaussian
        index = run.places(term.nodes)
        key_nodes, key_rows = jax.random.split(rng_key)
        if not len(index):
            return self._given_nodes(term, known, None, gaussian.offset, key_rows, tight=tight)
        own, L = self._own(index, latents)
        nodes, weights = self._nodes(len(index), key_nodes, L.dtype)

        def at(node: Array) -> Array:
            w = gaussian.offset.at[index].add(own.mean + L @ node)
            return self._given_nodes(term, known, (own, L, node), w, key_rows, tight=tight)

        return jnp.sum(weights * jax.vmap(at)(nodes))

    def _own(self, index: np.ndarray, latents: _Latents) -> tuple[Columns, Array]:
        """Moments of the latents at some places in w, and a root of their covariance."""
        gaussian, own = self.run.gaussian, latents.at(index)
        prior = (gaussian.root @ gaussian.root.T)[np.ix_(index, index)]
        first, second = (Columns(*(jnp.expand_dims(each, each.ndim - 1 + axis) for each in own)) for axis in (1, 0))
        covariance = gaussian.covariance(first, second, prior)
        own_index = jnp.arange(len(index))
        return own, cholesky(covariance.at[own_index, own_index].set(own.variance))

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
        known: _Known,
        node: tuple[Columns, Array, Array] | None,
        w: Array,
        rng_key: Array,
        *,
        tight: bool,
    ) -> Array:
        """The expectation over the linear predictors, given the latents that have nodes."""
        known = {root.number: self._found(term, root, known, w) for root in term.roots}
        given = self._conditional(term, known, node, w)
        result = expected(given, self.num_nodes, self.num_samples, rng_key)
        return result + self._gain(term, known, w) if tight else result

    def _gain(self, term: Term, known: _Known, w: Array) -> Array:
        """What the bound gains where q(f | u) is not the prior's, given the latents that have nodes."""
        (root,), program = term.roots, self.program
        predictor, columns = self._found(term, root, known, w)
        if not columns.T.shape[0]:  # u are the values of f at the training inputs: nothing is left unexplained
            return jnp.zeros((), columns.mean.dtype)
        rest = predictor.prior_covariance(predictor) - jnp.sum(columns.A * columns.A, axis=0)
        inputs = self._inputs(term, w)
        numbers = [program.outputs[part] for part in _parts_of(term.name)]

        def loc(value: Array) -> Array:
            return jnp.asarray(program.evaluate(numbers[:1], inputs, {root.number: value})[0])

        # An entry depends on one row of the predictor.
        along = [jax.jvp(loc, (predictor.value,), (t,))[1] for t in (jnp.ones_like(rest), jnp.maximum(rest, 0.0))]
        gaussian = Gaussian(*program.evaluate(numbers, inputs, {root.number: predictor.value}))
        return gain_of_entries(along[0] * along[1], gaussian)

    def _inputs(self, term: Term, w: Array) -> dict[str, Array]:
        return {site: self.means[site] for site in term.sites} | self.run.unflattened(w) | self._no_effects()

    def _found(self, term: Term, root: Root, known: _Known, w: Array) -> tuple[Predictor, Columns]:
        """A linear predictor and its moments."""
        if root.number in known:
            return known[root.number]
        predictor = self._predictor(term, root, w)
        variance = predictor.prior_covariance(predictor)
        k, flat, *loading = _flat(predictor, variance)
        columns, _ = self.run.gaussian.posterior(k, flat, Loading(*loading))
        return predictor, columns.take(0, variance.size, root.shape)

    def _conditional(
        self,
        term: Term,
        known: _Known,
        node: tuple[Columns, Array, Array] | None,
        w: Array,
    ) -> Conditional:
        """The linear predictors given the latents that have nodes."""
        gaussian, program = self.run.gaussian, self.program
        inputs = self._inputs(term, w)
        found = {root.number: self._found(term, root, known, w) for root in term.roots}
        ndim = max((len(root.rows) for root in term.roots), default=0)
        gains, means = {}, {}
        for root in term.roots:
            predictor, columns = found[root.number]
            means[root.number] = predictor.value + columns.mean
            if node is not None:
                own, L, xi = node
                between = Columns(*(each.reshape(*each.shape, *(1,) * len(root.shape)) for each in own))
                across = Columns(*(jnp.expand_dims(each, each.ndim - len(root.shape)) for each in columns))
                # The prior covariance is that of what the predictor shares with these latents: Aᵀ A of both.
                C = gaussian.covariance(between, across, jnp.sum(between.A * across.A, axis=0))
                gain = solve_lower(L, C.reshape(C.shape[0], -1)).reshape(C.shape)
                gains[root.number] = gain
                means[root.number] = means[root.number] + jnp.tensordot(xi, gain, axes=1)

        def log_density(z: Array) -> Array:
            given, start = {}, 0
            for root in term.roots:
                part = z[..., start : start + root.count]
                shape = (1,) * (ndim - len(root.rows)) + root.row_shape
                part = part[tuple(slice(None) if size > 1 else slice(0, 1) for size in shape)]
                given[root.number] = means[root.number] + root.restored(part)
                start += root.count
            return jnp.asarray(program.evaluate([program.outputs[term.name]], inputs, given)[0])

        if not term.roots:
            mean, none = jnp.zeros(0, w.dtype), jnp.zeros((0, 0), w.dtype)
            return Conditional(mean, none, lambda: none, log_density, 0, mean)
        covariance = self._covariances(term, found, gains, ndim)
        rows = covariance.shape[:-2]

        together = partial(_together, term.roots, rows)
        scale = {
            n: predictor.prior_covariance(predictor) + columns.variance for n, (predictor, columns) in found.items()
        }
        return Conditional(
            together(means),
            covariance,
            lambda: self._explained(term, found, gains, rows),
            log_density,
            ndim - min(len(root.rows) for root in term.roots),
            jax.lax.stop_gradient(together(scale)),
        )

    def _explained(
        self,
        term: Term,
        found: _Known,
        gains: Mapping[int, Array],
        rows: tuple[int, ...],
    ) -> Array:
        """What of these covariances z and the effects of groups explain, (rows, F, F)."""
        together = partial(_together, term.roots, rows)
        fields = zip(*(found[root.number][1] for root in term.roots), strict=True)
        numbers = [root.number for root in term.roots]
        columns = Columns(*(together(dict(zip(numbers, field, strict=True))) for field in fields))
        first, second = (Columns(*(jnp.expand_dims(each, axis) for each in columns)) for axis in (-1, -2))
        explained = self.run.gaussian.explained(first, second)
        if gains:
            gain = together(gains)
            explained = explained - jnp.sum(gain[..., None] * gain[..., None, :], axis=0)
        return explained

    def _covariances(
        self,
        term: Term,
        found: Mapping[int, tuple[Predictor, Columns]],
        gains: Mapping[int, Array],
        ndim: int,
    ) -> Array:
        """Cov of the numbers that an entry of the term looks at, (rows, F, F)."""
        gaussian = self.run.gaussian
        if len(term.roots) == 1 and term.roots[0].count == 1:
            (root,) = term.roots
            variance = found[root.number][1].variance
            if root.number in gains:
                variance = variance - jnp.sum(gains[root.number] ** 2, axis=0)
            return root.arranged(variance, ndim)[..., None]

        def spread(x: Array, root: Root, place: int) -> Array:
            return jnp.expand_dims(root.arranged(x, ndim), -1 - place)

        sampled = sum(root.count for root in term.roots) > 2
        rows, perturbations = [], []
        for one in term.roots:
            row, moved = [], []
            for other in term.roots:
                (p, c), (p2, c2) = found[one.number], found[other.number]
                first = Columns(*(spread(each, one, 0) for each in c))
                second = Columns(*(spread(each, other, 1) for each in c2))
                prior = jnp.asarray(
                    sum(
                        jnp.einsum(
                            "p...f,p...g->...fg",
                            one.arranged(a, ndim),
                            other.arranged(b, ndim),
                            precision=jax.lax.Precision.HIGHEST,
                        )
                        for (a, _), (_, b) in zip(p.parts, p2.parts, strict=True)
                    )
                )
                block = gaussian.covariance(first, second, prior, perturbed=not sampled)
                if sampled:
                    moved.append(jnp.broadcast_to(gaussian.perturbation_of_covariance(first, second), block.shape))
                if one is other:
                    # Two numbers have a floor on the precision of a datum each, more have one for all together.
                    own = jnp.arange(one.count)
                    variance = c.unperturbed if sampled else c.variance
                    block = block.at[..., own, own].set(one.arranged(variance, ndim))
                if gains:
                    both = spread(gains[one.number], one, 0) * spread(gains[other.number], other, 1)
                    block = block - jnp.sum(both, axis=0)
                row.append(block)
            rows.append(row)
            perturbations.append(moved)
        covariance = _joined(rows)
        return covariance + gaussian.floored(_joined(perturbations)) if sampled else covariance


def _parts_of(term: str) -> tuple[str, str, str]:
    """Names of what describes the Gaussian likelihood of a term."""
    return f"{term}/loc", f"{term}/scale", f"{term}/weight"


def _together(roots: Sequence[Root], rows: tuple[int, ...], values: Mapping[int, Array]) -> Array:
    """What there is of each predictor, by number of its root, side by side for each row: (..., rows, F)."""
    parts = [root.arranged(values[root.number], len(rows)) for root in roots]
    shapes = [(*part.shape[: -len(rows) - 1], *rows, part.shape[-1]) for part in parts]
    return jnp.concatenate([jnp.broadcast_to(*pair) for pair in zip(parts, shapes, strict=True)], axis=-1)


def _sampled(term: Term, count: int, num_samples: int) -> str:
    return (
        f"The term {term.name!r} depends on {count} numbers of {list(term.sites)} at once, in a nonlinear way. They "
        f"are drawn jointly: {num_samples} draws and O({count}³) operations in each step. Raise `num_samples` of "
        "`QuadratureELBO` if the loss is noisy."
    )


def _joined(blocks: list[list[Array]]) -> Array:
    """Blocks of covariances side by side, (rows, F, F)."""
    shape = np.broadcast_shapes(*(block.shape[:-2] for row in blocks for block in row))
    blocks = [[jnp.broadcast_to(block, (*shape, *block.shape[-2:])) for block in row] for row in blocks]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in blocks], axis=-2)
