"""One Gaussian over a function with a site in each row and over other latents, by their linear predictors.

Let w have the prior N(0, B), and let the sites be exp(λ₁ᵀf − ½ fᵀdiag(p) f − fᵀCᵀw + lᵀw − ½ wᵀΛw), as those of
predictors η_n = a_n f_n + c_nᵀw are. Given w they are sites of f alone, with λ₁ − Cᵀw. So with m and Σ the mean and
covariance of f at w = 0, and G = C Σ, which is one more mean of f for each number in w,

    f | w ~ N(m − Gᵀw, Σ),        q(w) ∝ N(0, B) exp((l − C Σ λ₁)ᵀw − ½ wᵀ(Λ − C Σ Cᵀ)w).

The sums l and Λ over the rows are those of linear regression on the covariates, and what is taken from them is what f
can explain of these.

Instead of f in its rows, the sites may be of other values that know of it, as states of a process do: then m, Σ and G
are those of these values, and f at a row is a linear function of them.

Where rows came after others, the sites of these belong to the prior: q is as above, by all sites, and the divergence
KL(q ‖ q_before) has E[log t] of the new ones alone, with log Z of all but for a constant.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.math.linalg import solve_lower, solve_lower_transposed
from numpyro_sgp.math.products import matmul, matvec, matvec_transposed
from numpyro_sgp.posteriors.dual.formulas import natural_mean_and_root
from numpyro_sgp.posteriors.joint.effects import Loading
from numpyro_sgp.posteriors.joint.predictors import (
    AbstractJointGaussian,
    Columns,
    Rows,
    floored,
    perturbed_covariance,
    shared_effect,
)
from numpyro_sgp.posteriors.moments import AbstractDenseCovariance, whiten
from numpyro_sgp.posteriors.perturbation import Perturbation, Perturbed, perturb_kl, perturb_marginals
from numpyro_sgp.posteriors.sites import DatumSites, JointSites, PairSites, RowSites

__all__ = [
    "AbstractRows",
    "AbstractSiteRows",
    "GivenLatents",
    "GivenSeveral",
    "JointByRows",
    "JointCovariance",
    "expected_sites",
    "markers",
]


class GivenSeveral(NamedTuple):
    """What sites with several λ₁ and one p say, λ₁ being the rows of R.

    Attributes:
        mean: R Σ, (1 + P, N).
        variance: diag(Σ), (N,); of the part of f that the sites see.
        products: R Σ Rᵀ, (1 + P, 1 + P).
        log_normaliser: log Z at λ₁ = 0, −½ log|I + K diag(p)|, ().
    """

    mean: Array
    variance: Array
    products: Array
    log_normaliser: Array


@dataclasses.dataclass(frozen=True)
class GivenLatents:
    """What sites of f, and between f and w, say.

    Attributes:
        mean: m in the first row and G in the others, at the rows that are asked for, (1 + P, N).
        variance: Var(f | w), (N,), of the part of f that the sites see.
        products: those of the rows of R with the covariance Σ of what the sites are of, R having λ₁ and C, (1 + P,
            1 + P).
        log_normaliser: log Z at λ₁ = 0, ().
        expected: E[log sites] without that of earlier rows, from mean and root of the covariance of w.
    """

    mean: Array
    variance: Array
    products: Array
    log_normaliser: Array
    expected: Callable[[Array, Array], Array]

    @classmethod
    def nothing(cls, prior_variance: Array, num_latents: int) -> "GivenLatents":
        """Of sites that are zero."""
        m = jnp.zeros((1 + num_latents, prior_variance.shape[0]), prior_variance.dtype)
        products = jnp.zeros((1 + num_latents,) * 2, m.dtype)
        zero = products[0, 0]

        def expected(w: Array, T: Array) -> Array:
            del w, T
            return zero

        return cls(m, prior_variance, products, zero, expected)


class AbstractSiteRows(ABC):
    """A process with its sites, at the rows that are asked for."""

    @property
    def unexplained(self) -> Array | None:
        """What the rows leave of the variances of f where the sites see only a part of it, (N_rows,); else None."""
        return None

    @abstractmethod
    def given_latents(self, sites: Any) -> GivenLatents:
        """What sites of f and between f and w say."""

    @abstractmethod
    def covariance_given_latents(self, sites: Any) -> AbstractDenseCovariance:
        """Cov(f | w) between the rows that are asked for, from sites of f given w."""

    def at_rows(self, zero: Perturbation) -> Perturbation:
        """A perturbation of the sites as one of sites of the rows that are asked for."""
        return zero


class AbstractRows(AbstractSiteRows):
    """A process at the rows of its sites and those that are asked for, in an order of its own.

    Attributes:
        order: where each row is among those of the sites, as they were given, and those asked for after them, (N,).
        rows: where in that order those are that are asked for, (N_rows,).
    """

    order: Array
    rows: Array

    def in_order(self, *values: Array) -> tuple[Array, ...]:
        """Values in the rows of sites as they were given, (..., N_sites), in the order of the process, 0 elsewhere."""
        missing = self.order.shape[0] - values[0].shape[-1]
        padded = (jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, missing)]) for value in values)
        return tuple(value[..., self.order] for value in padded)

    def given_latents(self, sites: RowSites) -> GivenLatents:
        own, both = sites.lambda1.shape[0], sites.with_earlier()
        lambda1, p, C = both.lambda1, both.Lambda2[:, 0], both.Lambda2[:, 1:].T
        is_own = jnp.arange(lambda1.shape[0]) >= lambda1.shape[0] - own
        lambda1, p, C, is_own = self.in_order(lambda1, p, C, is_own)
        R = jnp.concatenate([lambda1[None], C])
        known = self.given_several(R, p)

        def expected(w: Array, T: Array) -> Array:
            own, own_p = (jnp.where(is_own, x, 0.0) for x in (R, p))
            return expected_sites(own, own_p[:, None, None], known.mean, known.variance[:, None, None], w, T)

        mean, variance = known.mean[:, self.rows], known.variance[self.rows]
        return GivenLatents(mean, variance, known.products, known.log_normaliser, expected)

    def covariance_given_latents(self, sites: DatumSites) -> AbstractDenseCovariance:
        return self.covariance(*self.in_order(sites.lambda1, sites.Lambda2))

    @abstractmethod
    def given_several(self, lambda1: Array, precision: Array) -> GivenSeveral:
        """What sites say in all rows, in the order of the process: λ₁, (1 + P, N), and p, (N,)."""

    @abstractmethod
    def covariance(self, lambda1: Array, precision: Array) -> AbstractDenseCovariance:
        """The covariance between the rows that are asked for."""


def expected_sites(R: Array, precision: Array, mean: Array, variance: Array, w: Array, T: Array) -> Array:
    """E[log sites] of what they are of, f say, and latents.

    Args:
        R: λ₁ and C, (1 + P, N), of J groups of K numbers side by side, N = J K.
        precision: within the groups, (J, K, K).
        mean: E[f | w = 0] and G, (1 + P, N).
        variance: Cov(f | w) within the groups, (J, K, K).
        w: E[w], (P,).
        T: a root of its covariance, T Tᵀ, (P, P).
    """
    lambda1, C, G = R[0], R[1:], mean[1:]
    turned = matmul(T.T, G)
    f = mean[0] - matvec_transposed(G, w)
    crossed = f * w[:, None] - matmul(T, turned)
    parts = jnp.concatenate([f[None], turned]).reshape(-1, *precision.shape[:-1])
    second = variance + jnp.sum(parts[..., :, None] * parts[..., None, :], axis=0)
    return jnp.sum(lambda1 * f) - 0.5 * jnp.sum(precision * second) - jnp.sum(C * crossed)


def markers(kff: Array) -> Rows:
    """What the columns of a predictor say of f: the coefficient of its row, and that times the number of the row.

    Args:
        kff: prior variances, (N,).

    Raises:
        ValueError: rows so many that their numbers are not exact after two products.
    """
    most = round(0.25 / float(jnp.finfo(kff.dtype).eps))
    if kff.shape[-1] > most:
        msg = (
            f"A posterior that is joint with other latents takes up to {most} rows in {kff.dtype}, got "
            f"{kff.shape[-1]}. Call `numpyro.enable_x64()` and give `X` in float64, or pass `joint=False`."
        )
        raise ValueError(msg)
    numbers = jnp.arange(kff.shape[-1], dtype=kff.dtype)
    return Rows(jnp.stack([jnp.ones_like(numbers), numbers])[None], kff[None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JointCovariance(AbstractDenseCovariance):
    """Cov(f) = Cov(f | w) + Cov(E[f | w]).

    Attributes:
        given_latents: Cov(f | w).
        T: a root of the other term, (P, N).
    """

    given_latents: AbstractDenseCovariance
    T: Array

    @property
    def sees_all(self) -> bool:
        return self.given_latents.sees_all

    def given_inducing(self, Kff: Array) -> Array:
        K = self.given_latents.given_inducing(Kff)
        return K + self._of_latents() if self.sees_all else K

    def of_inducing(self) -> Array | None:
        K = self.given_latents.of_inducing()
        return None if K is None else K + self._of_latents()

    def _of_latents(self) -> Array:
        return matmul(self.T.T, self.T)

    def draw_deviations(self, rng_key: Array, shape: tuple[int, ...]) -> Array:
        of_w, of_f = jax.random.split(rng_key)
        rest = self.given_latents.draw_deviations(of_f, shape)
        noise = jax.random.normal(of_w, (*shape[:-1], self.T.shape[0]), self.T.dtype)
        return rest + matmul(noise, self.T)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JointByRows(AbstractJointGaussian):
    """q(f, w), by what is known of f at the rows of the model.

    Attributes:
        value: sites of w, (P,) and (P, P), perturbed or not; None where mean and covariance are not held by sites.
        sites: those of f and between the two, perturbed or not; or None.
        zero: the perturbation of these as one of sites of the rows; None where there is none.
        L: Cholesky factor of B, (P, P).
        mean: E[v], v = L⁻¹w, (P,).
        S_sqrt: a root of its covariance, (P, P).
        f: mean and variance of f given w = 0 at the rows, (N,), of the part of it that the sites see.
        rest: the variance of the other part, (N,).
        G: LᵀG, so that E[f | w] = m − (LᵀG)ᵀv, (P, N).
        kl: the divergence.
        log_z: log Z of all sites, or None.
        offset: prior mean of w, which is centred above, (P,).
        root: R with R Rᵀ = B, (P, P).
        effect_variance: of effects of groups: there are none, (0,).
        spans: where the site begins.
    """

    value: JointSites | Perturbed | None
    sites: RowSites | PairSites | Perturbed | None
    zero: Perturbation | None
    L: Array
    mean: Array
    S_sqrt: Array
    f: tuple[Array, Array]
    rest: Array
    G: Array
    kl: Array
    log_z: Array | None
    offset: Array
    root: Array
    effect_variance: Array
    spans: dict[str, tuple[int, int, int]] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(
        cls,
        value: JointSites | Perturbed,
        sites: RowSites | PairSites | Perturbed,
        line: AbstractSiteRows | None,
        prior_variance: Array,
        offset: Array,
        root: Array,
        site: str,
    ) -> "JointByRows":
        """From sites.

        Args:
            value: sites of w, with the earlier ones.
            sites: those of f and between the two.
            line: f at the rows, the earlier ones too; None for sites of f that are zero.
            prior_variance: of f at the rows, (N,).
            offset: prior mean of w, (P,).
            root: of its prior covariance, (P, P).
            site: name of the GP site.
        """
        of_w, of_f = value_of(value), value_of(sites)
        L, _ = whiten(matmul(root, root.T), root[:, :0])
        new, linear, precision = _without_earlier(of_w, of_f), of_w.lambda1, of_w.Lambda2
        known = GivenLatents.nothing(prior_variance, len(offset)) if line is None else line.given_latents(of_f)
        products = known.products
        linear, precision = linear - products[0, 1:], precision - products[1:, 1:]
        of_v = matvec(L.T, linear)
        mean, S_sqrt = natural_mean_and_root(of_v, matmul(matmul(L.T, 0.5 * (precision + precision.T)), L))
        log_z = known.log_normaliser + 0.5 * products[0, 0]
        log_z = log_z + 0.5 * of_v @ mean + jnp.sum(jnp.log(jnp.diagonal(S_sqrt)))
        # E[log sites] of the rows that are not earlier ones.
        w, T = matvec(L, mean), matmul(L, S_sqrt)
        own = new.lambda1 @ w - 0.5 * (w @ matvec(new.Lambda2, w) + jnp.sum(T * matmul(new.Lambda2, T)))
        kl = known.expected(w, T) + own - log_z
        f, G = (known.mean[0], known.variance), matmul(L.T, known.mean[1:])
        rest = None if line is None else line.unexplained
        rest = jnp.zeros_like(f[1]) if rest is None else rest
        none, spans, zero = jnp.zeros(0, offset.dtype), {site: (0, 1, 2)}, None
        if isinstance(sites, Perturbed):
            assert line is not None
            zero = line.at_rows(sites.zero)
        return cls(value, sites, zero, L, mean, S_sqrt, f, rest, G, kl, log_z, offset, root, none, spans)

    @property
    def size(self) -> int:
        return 2 + self.num_latents

    def whitened(self) -> tuple[Array, Array, Array]:
        """L with L Lᵀ = B, and mean (P,) and root (P, P) of the covariance of L⁻¹w."""
        return self.L, self.mean, self.S_sqrt

    def given(self, v: Array) -> Array:
        """E[f | w] at the rows, w = L v: (N,)."""
        return self.f[0] - matvec_transposed(self.G, v)

    def posterior(self, k: Array, variance: Array, loading: Loading | None = None) -> tuple[Columns, Array]:
        del variance, loading  # `rest` is known, and there are no effects beside w
        a = k[0]
        row = jnp.rint(jax.lax.stop_gradient(k[1] / jnp.where(a == 0.0, 1.0, a))).astype(int)
        A = solve_lower(self.L, k[2:])
        h = jax.lax.stop_gradient(solve_lower_transposed(self.L, A))
        d = A - a * self.G[:, row]
        mean = a * self.f[0][row] + matvec_transposed(d, self.mean)
        T = matmul(self.S_sqrt.T, d)
        variance = a * a * (self.f[1] + self.rest)[row] + jnp.sum(T * T, axis=0)
        kl, unperturbed = self.kl, variance
        if isinstance(self.value, Perturbed):
            assert isinstance(self.sites, Perturbed)
            assert self.zero is not None
            kl = perturb_kl(self.value.zero, _without_earlier(self.value.value, self.sites.value), kl)
            kl = perturb_kl(self.sites.zero, self.sites.value, kl)
            c, zero = jax.lax.stop_gradient(a), self.zero
            quadratic = c * c * zero.epsilon2[row, 0] + c * jnp.sum(h * zero.epsilon2[row, 1:].T, axis=0)
            extra = c * zero.epsilon1[row], quadratic
            mean, variance = perturb_marginals(self.value, h, mean, variance, extra=extra)
        return Columns(mean, variance, A, T, h, a, row, unperturbed), kl

    def explained(self, one: Columns, other: Columns) -> Array:
        return jnp.sum(one.T * other.T, axis=0) + shared_effect(one, other) * self.f[1][one.index]

    def unexplained(self, prior: Array, columns: Columns) -> Array:
        del prior
        return columns.coefficient**2 * self.rest[columns.index]

    def covariance(self, one: Columns, other: Columns, prior: ArrayLike, *, perturbed: bool = True) -> Array:
        del prior  # of f, of which `rest` is what is not explained
        result = self.explained(one, other) + shared_effect(one, other) * self.rest[one.index]
        return result + self.perturbation_of_covariance(one, other) if perturbed else result

    def perturbation_of_covariance(self, one: Columns, other: Columns) -> Array:
        if not isinstance(self.value, Perturbed):
            return jnp.zeros((), one.mean.dtype)
        assert self.zero is not None
        return perturbed_covariance(self.value.zero, self.zero, one, other)

    def floored(self, perturbation: Array) -> Array:
        return floored(self.value, perturbation)


def _without_earlier(of_w: Any, of_f: Any) -> Any:
    """The sites of w without what they have of earlier data."""
    if of_f.earlier is None:
        return of_w
    known = of_f.earlier.latents
    return dataclasses.replace(of_w, lambda1=of_w.lambda1 - known.lambda1, Lambda2=of_w.Lambda2 - known.Lambda2)
