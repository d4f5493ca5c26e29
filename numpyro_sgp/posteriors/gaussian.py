"""q(u) as a Gaussian in whitened variables, and the fitted parameters that it is read from."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.inducing import AbstractInducing, BoundedInducingPoints, GrowingInducing, InducingPoints
from numpyro_sgp.math.linalg import cholesky, solve_lower
from numpyro_sgp.posteriors.decoupled.formulas import project_orthogonal
from numpyro_sgp.posteriors.mean_basis import AbstractMeanBasis
from numpyro_sgp.posteriors.moments import Moments, Projection
from numpyro_sgp.posteriors.whitened.formulas import whitened

__all__ = ["POINTS", "FittedParameters", "InducingGaussian", "MeanPart", "Parameters", "root_of_points"]

POINTS = InducingPoints | BoundedInducingPoints | GrowingInducing


class Parameters(Protocol):
    """How a posterior family declares the parameters of one site, or looks them up once they are fitted."""

    def __call__(self, symbol: str, init: Any) -> Any:
        """The value of a parameter; `init` is its first value, or a function of a key that makes it."""
        ...

    def state(self, symbol: str, init: dict[str, Array]) -> dict[str, Array]:
        """Mutable state, a dict of arrays that a loss updates."""
        ...


class FittedParameters:
    """The fitted parameters of one GP site, as `Parameters`.

    Args:
        params: fitted parameters of all sites, and mutable state.
        site: the GP site.
        prefix: of the names of parameters.
    """

    def __init__(self, params: Mapping[str, Any], site: str, prefix: str) -> None:
        self.params, self.site, self.prefix = params, site, prefix

    def __call__(self, symbol: str, init: Any = None) -> Any:
        del init
        name = f"{self.site}_{self.prefix}_{symbol}"
        if name not in self.params:
            msg = f"The parameter {name!r} is missing. Pass all fitted parameters, `result.params` of `SVI.run`."
            raise ValueError(msg)
        return self.params[name]

    state = __call__


class MeanPart(NamedTuple):
    """A part g of the mean with a basis of its own: m(x) = k_xu Kuu⁻¹m(u) + g(x) − k_xu Kuu⁻¹g(u).

    Attributes:
        basis: the functions.
        weights: their weights, as the basis takes them.
        projected: L⁻¹g(u), (..., M); None where that is nothing.
    """

    basis: AbstractMeanBasis
    weights: Any
    projected: Any


class InducingGaussian(NamedTuple):
    """q(u) through q(v) = N(m, S_sqrt S_sqrtᵀ) with u = L v, L Lᵀ = Kuu, so that the prior of v is N(0, I).

    Attributes:
        inducing: the inducing variables u.
        L: Cholesky factor of Kuu, (..., M, M).
        m: mean of v, (..., M).
        S_sqrt: triangular root of the covariance of v, (..., M, M).
        part: a part of the mean beside the inducing variables; a family with one gives `moments` itself.
    """

    inducing: AbstractInducing
    L: Array
    m: Array
    S_sqrt: Array
    part: MeanPart | None = None

    def moments(self, kernel: Callable, X: Array) -> Moments:
        """The marginals at inputs (N, D), and the divergence."""
        A = solve_lower(self.L, self.inducing.Kuf(kernel, X))
        return whitened(self.m, self.S_sqrt, A, kernel(X))


def root_of_points(
    beta: AbstractInducing, gamma: AbstractInducing, kernel: Callable, jitter: ArrayLike
) -> tuple[AbstractInducing, Array] | None:
    """Function values at β and γ as one set of inducing variables, and their root; None for other variables.

    The root whitens the values at β, and those at γ given these.
    """
    if not isinstance(beta, POINTS) or not isinstance(gamma, POINTS):
        return None
    L = cholesky(beta.Kuu(kernel), jitter)
    L_vv = project_orthogonal(beta, gamma, Projection(L, L, L, L[..., 0]), kernel, beta.Z, jitter).L
    lower = jnp.swapaxes(solve_lower(L, beta.Kuv(kernel, gamma)), -1, -2)
    upper = jnp.concatenate([L, jnp.zeros_like(jnp.swapaxes(lower, -1, -2))], axis=-1)
    whole = jnp.concatenate([upper, jnp.concatenate([lower, L_vv], axis=-1)], axis=-2)
    return _joined(beta, gamma), whole


def _joined(beta: Any, gamma: Any) -> AbstractInducing:
    """The values at the inputs of two bases, as those of one."""
    Z = jnp.concatenate([beta.Z, gamma.Z], axis=-2)
    if not any(isinstance(one, GrowingInducing) for one in (beta, gamma)):
        return InducingPoints(Z)
    active = [
        one.active if isinstance(one, GrowingInducing) else jnp.ones(one.num_inducing, Z.dtype) for one in (beta, gamma)
    ]
    return GrowingInducing(Z, jnp.zeros_like(Z), jnp.concatenate(active), 0)
