"""Decompose a kernel into a sum of terms, each a product of factors with known features or frequencies.

A factor is either spectral, k(x, z) = σ² E cos(ωᵀ(x − z)), or of finite rank, k(x, z) = φ(x)ᵀφ(z). Products of spectral
factors add their phases, since frequencies are symmetric: E cos(p + q) = E cos p · E cos q for independent p and q.
"""

from collections.abc import Callable, Iterator
import itertools
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.features.finite_rank import FiniteRank, whitened_features
from numpyro_sgp.kernels import Constant, Linear, Periodic, Polynomial, Product, Select, Stationary, Sum, Warp
from numpyro_sgp.math.products import matmul

__all__ = ["Factor", "frequencies", "phases", "scale_of", "split", "term_features", "terms", "width_of"]


class Factor(NamedTuple):
    """An elementary kernel and the map from the GP's inputs to its own."""

    kernel: Any
    inputs: Callable[[Array], Array]


_FINITE = (Constant, Linear, Polynomial)


def _is_spectral(kernel: Any) -> bool:
    return isinstance(kernel, Periodic) or (isinstance(kernel, Stationary) and kernel.draws_frequencies)


def terms(kernel: Any, inputs: Callable[[Array], Array] = lambda X: X) -> Iterator[tuple[Factor, ...]]:
    """The terms of a kernel, each a tuple of factors.

    Args:
        kernel: a kernel.
        inputs: maps the GP's inputs to those of the kernel.

    Raises:
        TypeError: a kernel of which neither frequencies nor features are known.
    """
    if isinstance(kernel, Sum):
        yield from terms(kernel.left, inputs)
        yield from terms(kernel.right, inputs)
    elif isinstance(kernel, Product):
        for left, right in itertools.product(terms(kernel.left, inputs), terms(kernel.right, inputs)):
            yield (*left, *right)
    elif isinstance(kernel, Warp):
        yield from terms(kernel.kernel, lambda X: kernel._features(inputs(X)))
    elif isinstance(kernel, Select):
        yield from terms(kernel.kernel, lambda X: kernel._columns(inputs(X)))
    elif _is_spectral(kernel) or isinstance(kernel, (*_FINITE, FiniteRank)):
        yield (Factor(kernel, inputs),)
    else:
        msg = (
            f"The kernel {type(kernel).__name__} has no features: neither a spectral density that frequencies are "
            "drawn from, nor a finite rank. Known are those of the Matérn kernels, SquaredExponential, "
            "RationalQuadratic, Constant, Linear, Periodic, Polynomial, their Sum and Product, Warp and Select of "
            "them, and kernels of `numpyro_sgp.features`. Use one of these. Without features there are no functions "
            "drawn from a GP, but values at given inputs: `guide.posterior(rng_key, params, ...)[site].sample(key)`."
        )
        raise TypeError(msg)


def _column(value: ArrayLike, axes: int) -> Array:
    value = jnp.asarray(value)
    return value.reshape(value.shape + (1,) * axes) if value.ndim else value


def _spectral_inputs(factor: Factor, X: Array) -> Array:
    """The inputs in which the factor is a function of differences with lengthscale one, (..., N, D)."""
    kernel, X = factor.kernel, factor.inputs(X)
    lengthscale = jnp.expand_dims(jnp.asarray(kernel.lengthscale), -2) if jnp.ndim(kernel.lengthscale) else None
    scale = kernel.lengthscale if lengthscale is None else lengthscale
    if isinstance(kernel, Stationary):
        return X / scale
    period = jnp.expand_dims(jnp.asarray(kernel.period), -2) if jnp.ndim(kernel.period) else kernel.period
    theta = 2.0 * math.pi * X / period
    return jnp.concatenate([jnp.cos(theta) / scale, jnp.sin(theta) / scale], axis=-1)


def width_of(factor: Factor, X: Array) -> int:
    """In how many dimensions the frequencies of a spectral factor live, at inputs like X."""
    return jax.eval_shape(lambda X: _spectral_inputs(factor, X), X).shape[-1]


def frequencies(
    kernel: Any, rng_key: Array, num: int, D: int, batch_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> Array:
    """Draws from the spectral density of a spectral factor's kernel at lengthscale one, (*batch_shape, num, D).

    Args:
        kernel: of a spectral factor.
        rng_key: a key.
        num: how many.
        D: what `width_of` says.
        batch_shape: of the kernels, or of what they broadcast to.
        dtype: of the draws.
    """
    if isinstance(kernel, Stationary):
        return kernel.frequencies(rng_key, num, D, batch_shape, dtype)
    return jax.random.normal(rng_key, (*batch_shape, num, D), dtype)


def phases(factor: Factor, X: Array, omega: Array) -> Array:
    """ωᵀx in units of lengthscales, (..., N, F), for frequencies (..., F, D)."""
    return matmul(_spectral_inputs(factor, X), omega.mT)


def scale_of(factor: Factor) -> Array:
    """σ of a spectral factor, (..., 1)."""
    return jnp.sqrt(_column(factor.kernel.variance, 1))


def _finite_features(factor: Factor, X: Array) -> Array:
    """φ(X) with k = φφᵀ, (..., N, r)."""
    kernel, X = factor.kernel, factor.inputs(X)
    if isinstance(kernel, FiniteRank):
        return whitened_features(kernel, X)
    if isinstance(kernel, Constant):
        return jnp.sqrt(kernel(X))[..., None]
    scale = jnp.sqrt(jnp.asarray(kernel.variance))
    linear = X * (jnp.expand_dims(scale, -2) if scale.ndim else scale)
    if isinstance(kernel, Linear):
        return linear
    offset = jnp.sqrt(jnp.asarray(kernel.offset))
    ones = jnp.ones((*linear.shape[:-1], 1), linear.dtype) * _column(offset, 2)
    batch = jnp.broadcast_shapes(linear.shape[:-1], ones.shape[:-1])
    columns = jnp.concatenate([jnp.broadcast_to(x, (*batch, x.shape[-1])) for x in (linear, ones)], axis=-1)
    features = []
    for index in itertools.combinations_with_replacement(range(columns.shape[-1]), kernel.degree):
        # The multinomial theorem: (Σ_d c_d)^p = Σ p! / Π_d n_d! · Π_d c_d^n_d.
        count = math.factorial(kernel.degree) / math.prod(math.factorial(index.count(d)) for d in set(index))
        features.append(math.sqrt(count) * jnp.prod(columns[..., list(index)], axis=-1))
    return jnp.stack(features, axis=-1)


def split(term: tuple[Factor, ...]) -> tuple[list[Factor], list[Factor]]:
    """The spectral factors of a term, and those of finite rank."""
    spectral = [factor for factor in term if _is_spectral(factor.kernel)]
    return spectral, [factor for factor in term if not _is_spectral(factor.kernel)]


def term_features(finite: list[Factor], X: Array) -> Array:
    """Products of the finite-rank factors' features, (..., N, r), of rank one where there are none."""
    product = jnp.ones((X.shape[-2], 1), X.dtype)
    for factor in finite:
        features = _finite_features(factor, X)
        product = product[..., :, None] * features[..., None, :]
        product = product.reshape(*product.shape[:-2], -1)
    return product
