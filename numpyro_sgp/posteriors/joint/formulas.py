"""One Gaussian over the inducing values of several GPs and over other latents, by its linear predictors.

Let z = (u₁, …, u_K, w − b) with the prior N(0, K), K = blockdiag(Kuu₁, …, Kuu_K, B). A linear predictor η of f and w
has the prior covariance k = Cov(z, η) with z and the prior variance k_ηη. Given z it has the mean kᵀK⁻¹z and the
variance k_ηη − kᵀK⁻¹k. So the formulas of sparse posteriors hold with η in the place of f: z are its inducing
variables.
"""

from collections.abc import Mapping
import dataclasses
import itertools
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.inducing import AbstractInducing
from numpyro_sgp.math.linalg import solve_lower
from numpyro_sgp.math.products import matmul, matvec
from numpyro_sgp.posteriors.dual.formulas import natural_mean_and_root, natural_whitened
from numpyro_sgp.posteriors.dual.tied import tied, tied_mean_and_root
from numpyro_sgp.posteriors.joint.effects import Eliminated, Loading, eliminated
from numpyro_sgp.posteriors.joint.predictors import (
    AbstractJointGaussian,
    Columns,
    Rows,
    floored,
    perturbed_covariance,
    shared_effect,
)
from numpyro_sgp.posteriors.moments import joined, roots_of, whiten
from numpyro_sgp.posteriors.perturbation import Perturbed, perturb_kl, perturb_marginals

__all__ = ["JointGaussian", "gaussian_prior", "stacked"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JointGaussian(AbstractJointGaussian):
    """q(z) = N(0, K) times sites, in one of two parametrisations.

    Attributes:
        value: natural parameters above those of the prior, (D,) and (D, D), perturbed or not.
        K: prior covariance of z, (D, D).
        Kuv: Cov(z, z') with the variables that the sites refer to, (D, D); None where these are the same.
        inducing: the inducing variables by site.
        effects: sites of the effects of groups, perturbed or not; None where all members are in z.
        effect_unit: what the effects are multiples of, (G,): their prior standard deviations where sites stay fixed in
            whitened variables, else 1.
        effect_variance: prior variances in these units, (G,).
        offset: b, the prior mean of w, (P,).
        root: R with R Rᵀ = B, the prior covariance of w, (P, P).
        spans: where each site begins in z, with its number of latents and of inducing variables.
        projected: whether sites stay fixed in z, rather than in whitened variables, while hyperparameters move.
        frozen: whether the moments have no derivative but that of what z leaves unexplained.
    """

    value: Any
    K: Array
    Kuv: Array | None
    inducing: dict[str, AbstractInducing]
    effects: Any
    effect_unit: Array
    effect_variance: Array
    offset: Array
    root: Array
    spans: dict[str, tuple[int, int, int]] = dataclasses.field(metadata={"static": True})
    projected: bool = dataclasses.field(metadata={"static": True})
    frozen: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def size(self) -> int:
        return self.K.shape[0]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Sizes of the blocks of K: one for each latent of each site, and one for w."""
        sizes = [M for _, C, M in self.spans.values() for _ in range(C)]
        return (*sizes, *((self.num_latents,) if self.num_latents else ()))

    def without_effects(self) -> Eliminated | None:
        """The sites of q(z), effects integrated out."""
        if self.effects is None:
            return None
        K, Kuv = (self.K, self.Kuv) if self.projected else (None, None)
        return eliminated(value_of(self.value), value_of(self.effects), self.effect_variance, K, Kuv)

    @as_one_program
    def posterior(self, k: Array, variance: Array, loading: Loading | None = None) -> tuple[Columns, Array]:
        sites, rest, num_rows = value_of(self.value), self.without_effects(), variance.shape[0]
        if loading is None:
            loading = Loading(jnp.zeros_like(variance), jnp.zeros(num_rows, int))
        columns, more = self._past()
        loading = Loading(*(joined(*pair) for pair in zip(loading, more, strict=True)))
        E = loading.index.shape[0]
        lambda1, Lambda2 = (sites.lambda1, sites.Lambda2) if rest is None else (rest.lambda1, rest.Lambda2)
        moved = None  # the sites re-expressed at the current inducing variables
        if self.projected:
            k = joined(k, matmul(self.K, columns))
            variance = joined(variance, jnp.sum(columns * k[:, num_rows:], axis=0))
            if rest is not None:
                k, variance = rest.loaded(k, variance, loading)
            q = tied(lambda1, Lambda2, self.K, k, variance, self.Kuv, self.blocks)
            found, h = q.moments, jax.lax.stop_gradient(q).projections()
            perturbed = [each for each in (self.value, self.effects) if isinstance(each, Perturbed)]
            if any(each.zero.transported is not None for each in perturbed):
                moved = jax.lax.stop_gradient(q).projected_sites()
        else:
            ends = np.cumsum([0, *self.blocks]).tolist()
            parts = [slice(*pair) for pair in itertools.pairwise(ends)]
            A = jnp.concatenate([whiten(self.K[part, part], k[part])[1] for part in parts])
            A, variance = joined(A, columns), joined(variance, jnp.sum(columns * columns, axis=0))
            if rest is not None:
                A, variance = rest.loaded(A, variance, loading)
            found, h = natural_whitened(lambda1, Lambda2, A, variance), A
        (mean, variance, kl), roots = found[:3], roots_of(found)
        A, T = roots.A, roots.T
        assert T is not None
        if rest is not None:
            c, g = loading
            share = c / rest.precision[g]
            kl = kl + rest.divergence(self.effect_variance, mean[E:], T[:, E:])
            mean, variance, T = mean[:E] + share * rest.linear[g], variance[:E], T[:, :E]
            A, h = A[:, :E] + share * A[:, E:][:, g], h[:, :E] + share * rest.C[:, g]
        h, unperturbed = jax.lax.stop_gradient(h), variance
        if isinstance(self.value, Perturbed):
            mean, variance, kl = self._perturbed(mean, variance, kl, h, loading, moved, rest)
        found = Columns(mean, variance, A, T, h, *loading, unperturbed)
        if self.frozen:
            explained = self._explained(found, found)
            fixed_mean, fixed = jax.lax.stop_gradient((mean, explained))
            found = found._replace(mean=fixed_mean, variance=fixed + (variance - explained))
        if num_rows == E:
            return found, kl
        past_rows = found.take(num_rows, E, (E - num_rows,))
        explained = self.explained(past_rows, past_rows) + (past_rows.variance - past_rows.unperturbed)
        kl = kl - self._expected_past(past_rows.mean, explained)
        return found.take(0, num_rows, (num_rows,)), kl

    def _past(self) -> tuple[Array, Loading]:
        """The linear functions of past sites, those with an effect last: vectors in z, (D, E), and the effects."""
        past, effects = value_of(self.value).past, value_of(self.effects)
        columns = jnp.zeros((self.size, 0), self.K.dtype) if past is None else past.columns()
        none = Loading(jnp.zeros(columns.shape[-1], columns.dtype), jnp.zeros(columns.shape[-1], int))
        if past is None or effects is None:
            return columns, none
        root = effects.past.root
        own = Loading(root[:, 0], jnp.arange(root.shape[0]))
        return joined(columns, root[:, 1:].T), Loading(*(joined(*pair) for pair in zip(none, own, strict=True)))

    def _expected_past(self, mean: Array, variance: Array) -> Array:
        """E[log t(z, e)] of past sites."""
        past, effects = value_of(self.value).past, value_of(self.effects)
        own = past.columns().shape[-1]
        result = past.expected(mean[:own], variance[:own])
        if effects is None:
            return result
        return result + effects.past.linear @ mean[own:] - 0.5 * jnp.sum(mean[own:] ** 2 + variance[own:])

    def _perturbed(
        self,
        mean: Array,
        variance: Array,
        kl: Array,
        h: Array,
        loading: Loading,
        moved: tuple[Array, Array] | None,
        rest: Eliminated | None,
    ) -> tuple[Array, Array, Array]:
        """The moments as functions of a perturbation of the expectation parameters; values unchanged at zero."""
        sites, effects = value_of(self.value), value_of(self.effects)
        rest = jax.lax.stop_gradient(rest)
        if moved is not None:
            lambda1, Lambda2 = moved if rest is None else rest.restored(*moved)
            sites = dataclasses.replace(sites, lambda1=lambda1, Lambda2=Lambda2, reference=self.inducing)
        kl = perturb_kl(self.value.zero, sites, kl)
        extra = None
        if rest is not None:
            if moved is not None:
                both = jnp.concatenate([effects.Lambda2[:, :1], rest.C.T], axis=-1)
                effects = dataclasses.replace(effects, Lambda2=both, reference=self.inducing)
            kl = perturb_kl(self.effects.zero, effects, kl)
            (c, g), zero = jax.lax.stop_gradient(loading), self.effects.zero
            quadratic = c * c * zero.epsilon2[g, 0] + c * jnp.sum(h * zero.epsilon2[g, 1:].T, axis=0)
            extra = c * zero.epsilon1[g], quadratic
        return *perturb_marginals(self.value, h, mean, variance, extra=extra), kl

    def explained(self, one: Columns, other: Columns) -> Array:
        result = self._explained(one, other)
        return jax.lax.stop_gradient(result) if self.frozen else result

    def _explained(self, one: Columns, other: Columns) -> Array:
        result = jnp.sum(one.T * other.T, axis=0)
        if self.effects is None:
            return result
        precision = 1.0 / self.effect_variance + value_of(self.effects).Lambda2[:, 0]
        return result + shared_effect(one, other) / precision[one.index]

    def covariance(self, one: Columns, other: Columns, prior: ArrayLike, *, perturbed: bool = True) -> Array:
        result = jnp.asarray(prior) - jnp.sum(one.A * other.A, axis=0) + self.explained(one, other)
        return result + self.perturbation_of_covariance(one, other) if perturbed else result

    def perturbation_of_covariance(self, one: Columns, other: Columns) -> Array:
        if not isinstance(self.value, Perturbed):
            return jnp.zeros((), one.mean.dtype)
        effects = None if self.effects is None else self.effects.zero
        return perturbed_covariance(self.value.zero, effects, one, other)

    def floored(self, perturbation: Array) -> Array:
        return floored(self.value, perturbation)

    def whitened(self) -> tuple[Array, Array, Array]:
        """L with L Lᵀ = K, and mean (D,) and root (D, D) of the covariance of L⁻¹z."""
        sites, rest = value_of(self.value), self.without_effects()
        lambda1, Lambda2 = (sites.lambda1, sites.Lambda2) if rest is None else (rest.lambda1, rest.Lambda2)
        if self.projected:
            return tied_mean_and_root(lambda1, Lambda2, self.K, self.Kuv, self.blocks)
        L, _ = whiten(self.K, self.K[:, :0])
        return L, *natural_mean_and_root(lambda1, Lambda2)

    def effects_given(self, L: Array) -> tuple[Array, Array, Array]:
        """The effects given v = L⁻¹z, in their units: E[e_g] = intercept_g − slope_gᵀv, and their precision.

        Returns:
            The intercepts, (G,), the slopes, (D, G), and the precisions, (G,).
        """
        rest = self.without_effects()
        assert rest is not None
        slope = solve_lower(L, rest.V) if self.projected else rest.C
        return rest.linear / rest.precision, slope / rest.precision, rest.precision

    def of_site(self, site: str, rows: Rows) -> Array:
        """The columns of f at all rows of a site's latents, (D, C N)."""
        start, C, M = self.spans[site]
        N = rows.Kuf.shape[-1]
        own = jnp.eye(C, dtype=rows.Kuf.dtype)[:, None, :, None] * rows.Kuf[:, :, None, :]
        own = own.reshape(C * M, C * N)
        return jnp.zeros((self.K.shape[0], C * N), own.dtype).at[start : start + C * M].set(own)


def gaussian_prior(precision: Array, linear: Array) -> tuple[Array, Array]:
    """Mean b = Q⁻¹l and a root R of the covariance, R Rᵀ = Q⁻¹, of a density ∝ exp(lᵀw − ½ wᵀQw).

    Args:
        precision: Q, (P, P).
        linear: l, (P,).
    """
    _, inverse = whiten(precision, jnp.eye(precision.shape[0], dtype=precision.dtype))
    return matvec(inverse.T, matvec(inverse, linear)), inverse.T


def stacked(
    blocks: Mapping[str, Array], batch_shapes: Mapping[str, tuple[int, ...]], root: Array
) -> tuple[Array, dict[str, tuple[int, int, int]]]:
    """The prior covariance of z, and where each site begins in it.

    Args:
        blocks: Kuu by site, (..., M, M).
        batch_shapes: of the sites; each latent has inducing variables of its own.
        root: of the prior covariance of w.
    """
    covariances, spans, start = [], {}, 0
    for site, block in blocks.items():
        M, C = block.shape[-1], math.prod(batch_shapes[site])
        covariances += list(jnp.broadcast_to(block, (*batch_shapes[site], M, M)).reshape(C, M, M))
        spans[site] = (start, C, M)
        start += C * M
    return jax.scipy.linalg.block_diag(*covariances, matmul(root, root.T)), spans
