"""Kernel functions at chosen inputs as features."""

from collections.abc import Callable
import dataclasses
from typing import Any, cast, final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp.features.abstract import AbstractFiniteRank
from numpyro_sgp.inducing import AbstractInducing, as_inducing, check_width
from numpyro_sgp.kernels import Kernel
from numpyro_sgp.kernels.algebra import kink_of
from numpyro_sgp.kernels.arrays import as_inputs
from numpyro_sgp.math.linalg import default_jitter, with_jitter

__all__ = ["InducingBasis"]


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class InducingBasis(AbstractFiniteRank):
    """k(x, z) = k₀(x, Z) k₀(Z, Z)⁻¹ k₀(Z, z): the features k₀(x, Z), whose weights have the precision Kuu = k₀(Z, Z).

    The prior of the subset of regressors: what inducing inputs cannot explain has variance zero.

    Args:
        kernel: k₀, any kernel.
        Z: inducing inputs (r, D), or an inducing object.
        jitter: added to the diagonal of Kuu, relative to its mean; None for the default of the dtype.

    References:
        Quiñonero-Candela and Rasmussen (2005), "A unifying view of sparse approximate Gaussian process regression",
        section 5; Evans and Nair (2020), "Quadruply stochastic Gaussian processes".
    """

    kernel: Callable
    Z: AbstractInducing | ArrayLike
    jitter: float | None = None
    correlated_weights = True

    def __post_init__(self) -> None:
        # A transformation may put a placeholder here, which is left as it is.
        if isinstance(self.Z, Array | np.ndarray | list | tuple):
            object.__setattr__(self, "Z", as_inducing(self.Z, "Z"))

    def _kink(self, column: int | None, D: int) -> Kernel | None:
        return kink_of(self.kernel, column, D)

    @property
    def _inducing(self) -> AbstractInducing:
        return cast(AbstractInducing, self.Z)

    @property
    def rank(self) -> int:
        """The number of features, r."""
        return self._inducing.num_inducing

    def features(self, X: ArrayLike, index: ArrayLike | None = None) -> Array:
        X = as_inputs(X, "X")
        check_width(self._inducing, X, "Z")
        inducing = self._inducing if index is None else self._inducing.take(jnp.asarray(index))
        return inducing.Kuf(self.kernel, X).mT

    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        """Kuu with its jitter, (..., r, r), or the rows and columns at `index`, (..., K, K)."""
        inducing = self._inducing if index is None else self._inducing.take(jnp.asarray(index))
        Kuu = inducing.Kuu(self.kernel)
        if index is None:
            return with_jitter(Kuu, self._relative_jitter(Kuu.dtype))
        # An index may occur twice: the jitter belongs to the variable, as its variance does.
        shift = self._relative_jitter(Kuu.dtype) * jnp.mean(self._inducing.Kuu_diagonal(self.kernel), axis=-1)
        same = jnp.asarray(index)[:, None] == jnp.asarray(index)[None, :]
        return Kuu + jnp.where(same, shift[..., None, None], 0.0)

    def _relative_jitter(self, dtype: Any) -> Any:
        return default_jitter(dtype) if self.jitter is None else self.jitter
