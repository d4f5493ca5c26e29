"""The whitened variables that a posterior is Gaussian in, and q(v) read off a family's moments there.

With u = L v, L Lᵀ = Kuu, a family whose covariance with u is L at "inputs" v has there A = I: its mean is that of q(v),
and its root T is R with Cov(v) = RᵀR. So q(v) follows from the moments alone, however a family parametrises it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro import handlers

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.features import WeightVariables, as_finite_rank
from numpyro_sgp.features.finite_rank import has_correlated_weights
from numpyro_sgp.inducing import AbstractInducing, BoundedInducingPoints, GrowingInducing, InducingPoints
from numpyro_sgp.math.linalg import cholesky, diagonal, matmul, solve_lower
from numpyro_sgp.posteriors.decoupled.formulas import project_orthogonal
from numpyro_sgp.posteriors.moments import Projection

__all__ = ["POINTS", "Fitted", "Variables"]

POINTS = InducingPoints | BoundedInducingPoints | GrowingInducing


class Fitted:
    """The fitted values of one GP site, in the place of what a family declares them with.

    Args:
        params: fitted parameters of all sites.
        site: the GP site.
        prefix: of the names of parameters.
        replaced: the inducing variables to give in the place of some, by the symbol of their parameter.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        site: str,
        prefix: str,
        replaced: Callable[[str, AbstractInducing], AbstractInducing] | None = None,
    ) -> None:
        self.params, self.site, self.prefix, self.replaced = params, site, prefix, replaced

    def __call__(self, symbol: str, init: Any = None) -> Any:
        del init
        name = f"{self.site}_{self.prefix}_{symbol}"
        if name not in self.params:
            msg = f"The parameter {name!r} is missing. Pass all fitted parameters, `result.params` of `SVI.run`."
            raise ValueError(msg)
        value = self.params[name]
        return self.replaced(symbol, value) if self.replaced and isinstance(value, AbstractInducing) else value

    state = __call__

    def with_inducing(self, replaced: Callable[[str, AbstractInducing], AbstractInducing]) -> "Fitted":
        """The same values, with other inducing variables in the place of those there are."""
        return Fitted(self.params, self.site, self.prefix, replaced)


class Variables(NamedTuple):
    """The variables that a posterior is Gaussian in: u = f(β), u and f(γ) where q has a block for either, or weights.

    Attributes:
        inducing: the variables.
        L: Cholesky factor of their covariance.
        num_first: how many of them are u.
        kernel: of the process that they belong to.
        kernel_at: the kernel that a family sees at these variables.
    """

    inducing: AbstractInducing
    L: Array
    num_first: int
    kernel: Callable
    kernel_at: Callable

    @classmethod
    def of(cls, beta: AbstractInducing, kernel: Callable, jitter: ArrayLike) -> "Variables":
        """One set of inducing variables."""
        return cls(beta, cholesky(beta.Kuu(kernel), jitter), beta.num_inducing, kernel, kernel)

    @classmethod
    def of_two(
        cls, beta: AbstractInducing, gamma: AbstractInducing, kernel: Callable, jitter: ArrayLike
    ) -> "Variables | None":
        """Function values at β and, whitened given these, at γ; None for other variables."""
        if not isinstance(beta, POINTS) or not isinstance(gamma, POINTS):
            return None
        L = cholesky(beta.Kuu(kernel), jitter)
        L_vv = project_orthogonal(beta, gamma, Projection(L, L, L, L[..., 0]), kernel, beta.Z, jitter).L
        lower = jnp.swapaxes(solve_lower(L, beta.Kuv(kernel, gamma)), -1, -2)
        upper = jnp.concatenate([L, jnp.zeros_like(jnp.swapaxes(lower, -1, -2))], axis=-1)
        whole = jnp.concatenate([upper, jnp.concatenate([lower, L_vv], axis=-1)], axis=-2)
        return cls(_joined(beta, gamma), whole, L.shape[-1], kernel, kernel)

    @classmethod
    def of_weights(cls, kernel: Callable, X: Array) -> "Variables":
        """The weights of a kernel of finite rank."""
        rank = jax.eval_shape(as_finite_rank(kernel).features, X).shape[-1]
        weights = WeightVariables(rank, X.shape[-1])
        L = cholesky(weights.Kuu(kernel).astype(X.dtype))
        return cls(weights, L, rank, kernel, _WhitenedWeights(kernel, L))

    def gaussian(
        self,
        moments: Callable[[Callable, GaussianProcess, tuple[int, ...]], Any],
        fitted: Fitted,
        q: SparsePosterior,
    ) -> tuple[Array, Array] | None:
        """Mean and root of q(v), m and R with Cov(v) = RᵀR; None where the covariance has no root of its own.

        Args:
            moments: those of a family.
            fitted: its fitted values.
            q: the posterior at any inputs.
        """
        M, prior = self.inducing.num_inducing, q.prior
        at = GaussianProcess(
            self.kernel_at, jnp.zeros((M, prior.X.shape[-1]), prior.X.dtype), jitter=prior.relative_jitter
        )
        here = fitted.with_inducing(lambda symbol, value: _WithVariables(value, at, self._covariance(symbol, value)))
        with handlers.mask(mask=False):  # a prediction: nothing is estimated
            found = moments(here, at, q.batch_shape)
        if found.posterior_root is None:
            return None
        return jnp.broadcast_to(found.mean, (*q.batch_shape, M)), found.posterior_root

    def _covariance(self, symbol: str, inducing: AbstractInducing) -> Array:
        """Covariance of one basis, by the symbol of its parameter, with the whitened variables."""
        if symbol == "inducing":
            return self.L[..., : self.num_first, :]
        if self.inducing.num_inducing > self.num_first:
            return self.L[..., self.num_first :, :]
        return jnp.swapaxes(solve_lower(self.L, self.inducing.Kuv(self.kernel, inducing)), -1, -2)


def _joined(beta: Any, gamma: Any) -> AbstractInducing:
    """The values at the inputs of two bases, as those of one."""
    Z = jnp.concatenate([beta.Z, gamma.Z], axis=-2)
    active = [
        one.active if isinstance(one, GrowingInducing) else jnp.ones(one.num_inducing, Z.dtype) for one in (beta, gamma)
    ]
    if not any(isinstance(one, GrowingInducing) for one in (beta, gamma)):
        return InducingPoints(Z)
    return GrowingInducing(Z, jnp.zeros_like(Z), jnp.concatenate(active), 0)


@jax.tree_util.register_static
class _WithVariables(AbstractInducing):
    """Inducing variables, and whitened variables v in the place of function values: their covariance is given."""

    def __init__(self, inducing: AbstractInducing, prior: GaussianProcess, covariance: Array) -> None:
        self.inducing = inducing
        self.prior = prior
        self.covariance = covariance

    @property
    def num_inducing(self) -> int:
        return self.inducing.num_inducing

    @property
    def width(self) -> int:
        return self.inducing.width

    def Kuu(self, kernel: Callable) -> Array:
        return self.inducing.Kuu(kernel)

    def Kuu_diagonal(self, kernel: Callable) -> Array:
        return self.inducing.Kuu_diagonal(kernel)

    def take(self, index: Array) -> AbstractInducing:
        return _WithVariables(self.inducing.take(index), self.prior, jnp.take(self.covariance, index, axis=-2))

    def Kuf(self, kernel: Callable, X: Array) -> Array:
        return self.covariance if X is self.prior.X else self.inducing.Kuf(kernel, X)

    def Kuv(self, kernel: Callable, other: AbstractInducing) -> Array:
        return self.inducing.Kuv(kernel, other.inducing if isinstance(other, _WithVariables) else other)


class _WhitenedWeights:
    """A kernel whose process, at as many inputs as it has weights w, is v = L_Sᵀw: the posterior there is q(v)."""

    def __init__(self, kernel: Callable, L: Array) -> None:
        self.correlated_weights = has_correlated_weights(as_finite_rank(kernel))
        self.L = L

    def __call__(self, X: Array, Z: Array | None = None) -> Array:
        batch, M = self.L.shape[:-2], self.L.shape[-1]
        return (
            jnp.ones((*batch, M), X.dtype) if Z is None else jnp.broadcast_to(jnp.eye(M, dtype=X.dtype), self.L.shape)
        )

    def features(self, X: Array, index: Array | None = None) -> Array:
        del X, index
        return jnp.swapaxes(self.L, -1, -2)

    def prior_precision(self, index: Array | None = None) -> Array:
        del index
        return matmul(self.L, jnp.swapaxes(self.L, -1, -2)) if self.correlated_weights else diagonal(self.L) ** 2
