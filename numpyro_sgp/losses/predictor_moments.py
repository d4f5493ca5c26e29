"""Moments of the linear predictors of a model's terms under a joint Gaussian.

Those of all terms come from one factorisation. Predictors whose coefficients move with latents that have nodes are
looked at again at each node.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._internal.linear_predictors import Program
from numpyro_sgp.guides.joint_run import AbstractJointRun
from numpyro_sgp.losses.expected_terms import Conditional
from numpyro_sgp.losses.picked_rows import picked_variance
from numpyro_sgp.losses.terms import Root, Term
from numpyro_sgp.math.linalg import cholesky, solve_lower
from numpyro_sgp.posteriors.joint.effects import Loading
from numpyro_sgp.posteriors.joint.predictors import Columns, Predictor

__all__ = ["Known", "LatentMoments", "PredictorMoments", "no_effects"]


class LatentMoments(NamedTuple):
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
Known = dict[int, tuple[Predictor, Columns]]


def _flat(predictor: Predictor, variance: Array) -> tuple[Array, ...]:
    """What `JointGaussian.posterior` asks for, of a predictor of any shape."""
    c, index = predictor.loading
    return predictor.k.reshape(predictor.k.shape[0], -1), variance.ravel(), c.ravel(), index.ravel()


def no_effects(run: AbstractJointRun) -> dict[str, Array]:
    """Effects of groups at zero, where they have a block of their own."""
    effects = run.group.effects
    return {} if effects is None else {effects: jnp.zeros(run.effect_shape, run.dtype)}


class PredictorMoments:
    """Moments of latents and linear predictors.

    Args:
        run: the joint Gaussian in a run of the guide.
        program: the terms of the model as functions of its members.
        zeros: values of the GP sites at the model's inputs, which are those of f less its prior mean.
    """

    def __init__(self, run: AbstractJointRun, program: Program, zeros: Mapping[str, Array]) -> None:
        self.run, self.program, self.zeros = run, program, zeros

    def of(self, terms: list[Term], own: list[str]) -> tuple[LatentMoments, list[Known], Array]:
        """Moments of the latents that have nodes and of the predictors that do not move with them, and the divergence.

        All of them share one factorisation.
        """
        run = self.run
        gaussian = run.gaussian
        needed = run.places({*own, *(name for term in terms for name in term.nodes)})
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
        latents = LatentMoments(needed, columns.take(0, int(ends[1]), (int(ends[1]),)))
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
            inputs = {site: f[site].reshape(self.zeros[site].shape) for site in term.sites} | run.unflattened(w)
            if effects is not None:
                inputs[effects] = e.reshape(run.effect_shape)
            return self.program.evaluate([root.number], inputs)[0]

        f = {site: self.zeros[site].reshape(shapes[site]) for site in term.sites}
        moving = np.zeros(run.num_latents)
        moving[run.places(term.linear)] = 1.0
        rows = {site: run.rows[site] for site in term.sites}
        has_effects = effects in self.program.depends[root.number]
        covariances, variances = {}, {}
        inputs = self.inputs(term, w)
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

    def root_of(self, index: np.ndarray, latents: LatentMoments) -> tuple[Columns, Array]:
        """Moments of the latents at some places in w, and a root of their covariance."""
        gaussian, own = self.run.gaussian, latents.at(index)
        prior = (gaussian.root @ gaussian.root.T)[np.ix_(index, index)]
        first, second = (Columns(*(jnp.expand_dims(each, each.ndim - 1 + axis) for each in own)) for axis in (1, 0))
        covariance = gaussian.covariance(first, second, prior)
        own_index = jnp.arange(len(index))
        return own, cholesky(covariance.at[own_index, own_index].set(own.variance))

    def inputs(self, term: Term, w: Array) -> dict[str, Array]:
        return {site: self.zeros[site] for site in term.sites} | self.run.unflattened(w) | no_effects(self.run)

    def predictor(self, term: Term, root: Root, known: Known, w: Array) -> tuple[Predictor, Columns]:
        """A linear predictor and its moments."""
        if root.number in known:
            return known[root.number]
        predictor = self._predictor(term, root, w)
        variance = predictor.prior_covariance(predictor)
        k, flat, *loading = _flat(predictor, variance)
        columns, _ = self.run.gaussian.posterior(k, flat, Loading(*loading))
        return predictor, columns.take(0, variance.size, root.shape)

    def conditional(
        self,
        term: Term,
        known: Known,
        node: tuple[Columns, Array, Array] | None,
        w: Array,
    ) -> Conditional:
        """The linear predictors given the latents that have nodes."""
        gaussian, program = self.run.gaussian, self.program
        inputs = self.inputs(term, w)
        found = {root.number: self.predictor(term, root, known, w) for root in term.roots}
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
        found: Known,
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


def _together(roots: Sequence[Root], rows: tuple[int, ...], values: Mapping[int, Array]) -> Array:
    """What there is of each predictor, by number of its root, side by side for each row: (..., rows, F)."""
    parts = [root.arranged(values[root.number], len(rows)) for root in roots]
    shapes = [(*part.shape[: -len(rows) - 1], *rows, part.shape[-1]) for part in parts]
    return jnp.concatenate([jnp.broadcast_to(*pair) for pair in zip(parts, shapes, strict=True)], axis=-1)


def _joined(blocks: list[list[Array]]) -> Array:
    """Blocks of covariances side by side, (rows, F, F)."""
    shape = np.broadcast_shapes(*(block.shape[:-2] for row in blocks for block in row))
    blocks = [[jnp.broadcast_to(block, (*shape, *block.shape[-2:])) for block in row] for row in blocks]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in blocks], axis=-2)
