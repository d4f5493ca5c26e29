"""Features given by a function: networks, deep kernels."""

from collections.abc import Callable
import dataclasses
from typing import Any, final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.pytrees import PytreeFunction
from numpyro_sgp.features.abstract import AbstractFiniteRank, at
from numpyro_sgp.kernels.arrays import as_inputs
from numpyro_sgp.kernels.inputs import map_rows

__all__ = ["FeatureMap"]


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FeatureMap(AbstractFiniteRank):
    """k(x, z) = σ² φ(x)ᵀφ(z) for any features φ: a Bayesian last layer when φ is a network.

    >>> import jax.numpy as jnp
    >>> from numpyro_sgp.features import FeatureMap
    >>> kernel = FeatureMap(lambda X: jnp.concatenate([jnp.ones_like(X), X, X**2], axis=-1))
    >>> X = jnp.ones((7, 1))
    >>> kernel.features(X).shape, kernel(X, X[:5]).shape
    ((7, 3), (7, 5))

    Args:
        fn: φ for all rows at once, (N, D) -> (N, r), or `fn(params, X)` where `params` are given. A function may close
            over sampled or traced values; what is in `params` is a part of the kernel, and outlives the model's run.
        params: first argument of `fn`, any pytree; None for `fn(X)`. They become a part of `fn`.
        variance: σ², prior variance of the weights: a number for all or one for each, (r,); batch + (1,) or (r,).
        size: r, where it is asked for before the features were evaluated (`rank`).

    Raises:
        ValueError: `fn` does not return N rows, or not `size` columns.
    """

    fn: Callable
    params: Any = None
    variance: ArrayLike = 1.0
    size: int | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        fn, params = self.fn, self.params
        if params is not None and callable(fn) and not isinstance(fn, PytreeFunction):
            # One callable that shows its arrays, whatever else is among the parameters (a module has functions, too).
            fn, params = jax.tree_util.Partial(fn, params), None
        object.__setattr__(self, "fn", PytreeFunction.of(fn))
        object.__setattr__(self, "params", params)
        if self.size is not None:
            positive("size", self.size, "It is the number of columns that `fn` returns.")

    @property
    def rank(self) -> int:
        """The number of features, r."""
        if self.size is None:
            msg = "The rank of this `FeatureMap` is what `fn` returns. Pass `size=` where it is needed before that."
            raise ValueError(msg)
        return self.size

    def features(self, X: ArrayLike, index: ArrayLike | None = None) -> Array:
        Phi = map_rows(self.fn, as_inputs(X, "X"))
        if self.size is not None and Phi.shape[-1] != self.size:
            msg = f"`fn` returned {Phi.shape[-1]} features a row, but `size` is {self.size}. Make them agree."
            raise ValueError(msg)
        return at(Phi, index)

    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        S = 1.0 / jnp.asarray(self.variance)
        S = S if S.ndim else S[None]
        if index is None:
            return S if self.size is None else jnp.broadcast_to(S, (*S.shape[:-1], self.size))
        if S.shape[-1] == 1:
            return jnp.broadcast_to(S, (*S.shape[:-1], *jnp.shape(index)))
        return at(S, index)
