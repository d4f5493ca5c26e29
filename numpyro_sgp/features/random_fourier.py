"""Random Fourier features of stationary kernels, their products and sums."""

from collections.abc import Callable
import dataclasses
from functools import partial
import math
from typing import Any, final

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.features.abstract import AbstractFiniteRank
from numpyro_sgp.features.decomposition import Factor, frequencies, phases, scale_of, split, terms, width_of
from numpyro_sgp.kernels import Constant
from numpyro_sgp.kernels.arrays import as_inputs

__all__ = ["RandomFourier"]


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RandomFourier(AbstractFiniteRank):
    """Random Fourier features of a kernel, φ = √(2/r) (cos ω₁ᵀx, sin ω₁ᵀx, cos ω₂ᵀx, …), ω from its spectral density.

    The variance of the kernel is that of the weights. Frequencies are not stored: pair p is drawn from the key folded
    with p whenever it is asked for, so features at some indices cost what those cost, whatever the rank. A batch of
    kernels shares its standard draws, which each of them scales by its lengthscale (of rational quadratic kernels each
    has its own).

    >>> import jax, jax.numpy as jnp
    >>> from numpyro_sgp.features import RandomFourier
    >>> from numpyro_sgp.kernels import Matern52
    >>> kernel = RandomFourier(Matern52(0.5), rank=10_000_000, rng_key=jax.random.key(0))
    >>> kernel.features(jnp.ones((7, 2)), index=jnp.array([3, 9_999_999])).shape
    (7, 2)

    Args:
        kernel: a stationary kernel or `Periodic`, products of them and of constants, and `Warp` and `Select` of these;
            a kernel of one's own derives from `Stationary` and has `frequencies`.
        rank: r, even.
        rng_key: a key: it is a part of the kernel.

    Raises:
        ValueError: an odd rank; a sum of kernels (when the features are evaluated).
        TypeError: a kernel without frequencies, or `rng_key` that is no key (likewise).

    References:
        Rahimi and Recht (2007), "Random features for large-scale kernel machines", algorithm 1, with a cosine and a
        sine for each frequency; their squares sum to one, so the variance is exact at any rank.
    """

    kernel: Callable
    rank: int = dataclasses.field(metadata={"static": True})
    rng_key: Array
    key_type: Any = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    def __post_init__(self) -> None:
        positive("rank", self.rank, "Use an even number, a cosine and a sine for each frequency.")
        if self.rank % 2:
            msg = f"`rank` must be even, a cosine and a sine for each frequency, got {self.rank}."
            raise ValueError(msg)
        # Kept as plain numbers, which can be pickled and go wherever arrays go.
        key = self.rng_key
        if isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            object.__setattr__(self, "key_type", jax.random.key_impl(key))
            object.__setattr__(self, "rng_key", jax.random.key_data(key))

    def _factors(self) -> tuple[list[Factor], list[Factor]]:
        """The spectral factors, and the constants."""
        expanded = list(terms(self.kernel))
        if len(expanded) > 1:
            msg = (
                f"`RandomFourier` takes one product of stationary kernels, got a sum of {len(expanded)}. Give each "
                "summand features of its own and add them: RandomFourier(k1, …) + RandomFourier(k2, …)."
            )
            raise ValueError(msg)
        spectral, finite = split(expanded[0])
        other = [type(factor.kernel).__name__ for factor in finite if not isinstance(factor.kernel, Constant)]
        if other or not spectral:
            msg = (
                f"`RandomFourier` needs a kernel with a spectral density, got {other or ['Constant']}. A kernel of "
                "finite rank has features already, and can be added to one of `RandomFourier`."
            )
            raise TypeError(msg)
        return spectral, finite

    def features(self, X: ArrayLike, index: ArrayLike | None = None) -> Array:
        X = as_inputs(X, "X")
        if jnp.ndim(self.rng_key) != 1:
            msg = f"`rng_key` must be one key, got {self.rng_key!r}. For example jax.random.key(0)."
            raise TypeError(msg)
        spectral, _ = self._factors()
        pairs = jnp.arange(self.rank // 2) if index is None else jnp.asarray(index) // 2
        widths = tuple(width_of(factor, X) for factor in spectral)
        omegas = _frequencies_of([factor.kernel for factor in spectral], self.rng_key, pairs, widths, self.key_type)
        phase: Any = 0.0
        for factor, omega in zip(spectral, omegas, strict=True):
            phase = phase + phases(factor, X, omega.astype(X.dtype))
        scale = math.sqrt(2.0 / self.rank)
        if index is not None:
            return scale * jnp.where(jnp.asarray(index) % 2 == 0, jnp.cos(phase), jnp.sin(phase))
        waves = jnp.stack([jnp.cos(phase), jnp.sin(phase)], axis=-1)
        return scale * waves.reshape(*phase.shape[:-1], self.rank)

    def prior_precision(self, index: ArrayLike | None = None) -> Array:
        spectral, constants = self._factors()
        variance: Any = 1.0
        for factor in spectral:
            variance = variance * scale_of(factor) ** 2
        for factor in constants:
            value = jnp.asarray(factor.kernel.variance)
            variance = variance * (value[..., None] if value.ndim else value)
        S = 1.0 / jnp.asarray(variance)
        size = self.rank if index is None else len(jnp.asarray(index))
        return jnp.broadcast_to(S, (*S.shape[:-1], size))


@partial(as_one_program, static_argnums=(3, 4))
def _frequencies_of(
    spectral: list[Any], key_data: Array, pairs: Array, widths: tuple[int, ...], key_type: Any
) -> list[Array]:
    """The frequencies of some pairs of features for each spectral kernel of a product, (…, F, D).

    In single precision whatever the inputs have: another precision would draw other numbers, and be another kernel.
    """
    key = jax.random.wrap_key_data(key_data, impl=key_type)

    def draw(pair: Array) -> list[Array]:
        keys = jax.random.split(jax.random.fold_in(key, pair), len(spectral))
        return [
            frequencies(kernel, k, 1, D, (), jnp.float32) for kernel, k, D in zip(spectral, keys, widths, strict=True)
        ]

    # (F, …, 1, D) to (…, F, D)
    return [jnp.moveaxis(omega, 0, -2)[..., 0, :, :] for omega in jax.vmap(draw)(pairs)]
