"""Distances by matrix products, and profiles of them, with derivatives that are finite where inputs coincide."""

import math

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgp.math.products import matmul

__all__ = ["equal_rows", "exponential", "exponential_linear", "exponential_quadratic", "squared_distance"]

# Up to this width the sum of squared differences is one fused loop as fast as the matrix product, and free of
# cancellation (measured on a CPU at 1000 × 1000: equal at D = 2, twice slower at D = 8).
_DIRECT_WIDTH = 3


# Columns compared in one pass over the (N, M) table of equal rows: trades compile time for memory traffic, no more.
_COLUMNS_PER_PASS = 8


def squared_distance(X: Array, Z: Array) -> Array:
    """|x_n − z_m|², (..., N, M), never negative and exactly zero for equal rows."""
    D = X.shape[-1]
    if D > _DIRECT_WIDTH:
        return _by_products(X, Z)
    columns = (jnp.square(X[..., :, None, d] - Z[..., None, :, d]) for d in range(D))
    return sum(columns, start=next(columns))


@jax.custom_jvp
def _by_products(X: Array, Z: Array) -> Array:
    D = X.shape[-1]
    norms = jnp.sum(X * X, axis=-1)[..., :, None] + jnp.sum(Z * Z, axis=-1)[..., None, :]
    r2 = norms - 2.0 * matmul(X, jnp.matrix_transpose(Z))
    # Rounding leaves equal rows at up to 0.7 √D ε (|x|² + |z|²), measured for D = 4 to 3000: below three times that is
    # zero. Without it the square root in a Matérn-1/2 kernel turns 1e-7 into 3e-4.
    rounding = 2.0 * math.sqrt(D) * float(jnp.finfo(r2.dtype).eps)
    return jnp.where(r2 <= rounding * norms, 0.0, r2)


@_by_products.defjvp
def _by_products_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (X, Z), (dX, dZ) = primals, tangents
    # d|x − z|² = 2 (x − z)ᵀ(dx − dz), whatever rounding did to the value: products again, and no (N, M, D) array.
    own = jnp.sum(X * dX, axis=-1)[..., :, None] + jnp.sum(Z * dZ, axis=-1)[..., None, :]
    cross = matmul(X, jnp.matrix_transpose(dZ)) + matmul(dX, jnp.matrix_transpose(Z))
    return _by_products(X, Z), 2.0 * (own - cross)


# Matérn profiles as functions of q = a², a = √(2ν) r, with their derivatives d/dq. Autodiff through √q has an infinite
# factor at q = 0 that the true derivatives of the smooth profiles do not have.


@jax.custom_jvp
def exponential(q: Array) -> Array:
    """e^(−a), the profile of Matérn-1/2."""
    return jnp.exp(-jnp.sqrt(q))


@exponential.defjvp
def _exponential_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (q,), (dq,) = primals, tangents
    value = exponential(q)
    # d/dq e^(−a) = −e^(−a) / 2a. At q = 0, the kink, it is defined as 0, the mean of the two one-sided slopes in x.
    zero = q == 0.0
    slope = jnp.where(zero, 0.0, -0.5 * value / jnp.sqrt(jnp.where(zero, 1.0, q)))
    return value, slope * dq


@jax.custom_jvp
def exponential_linear(q: Array) -> Array:
    """(1 + a) e^(−a), the profile of Matérn-3/2."""
    a = jnp.sqrt(q)
    return (1.0 + a) * jnp.exp(-a)


@exponential_linear.defjvp
def _exponential_linear_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (q,), (dq,) = primals, tangents
    # d/dq (1 + a) e^(−a) = −½ e^(−a)
    return exponential_linear(q), -0.5 * exponential(q) * dq


@jax.custom_jvp
def exponential_quadratic(q: Array) -> Array:
    """(1 + a + a²/3) e^(−a), the profile of Matérn-5/2."""
    a = jnp.sqrt(q)
    return (1.0 + a + q / 3.0) * jnp.exp(-a)


@exponential_quadratic.defjvp
def _exponential_quadratic_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (q,), (dq,) = primals, tangents
    # d/dq (1 + a + a²/3) e^(−a) = −(1 + a) e^(−a) / 6
    return exponential_quadratic(q), (-1.0 / 6.0) * exponential_linear(q) * dq


def equal_rows(X: Array, Z: Array) -> Array:
    """Which rows of X are equal to which of Z, (..., N, M)."""
    batch = jnp.broadcast_shapes(X.shape[:-2], Z.shape[:-2])

    def compare(equal: Array, columns: tuple[Array, Array]) -> tuple[Array, None]:
        x, z = columns
        return equal & (x[..., :, None] == z[..., None, :]), None

    start = jnp.ones((*batch, X.shape[-2], Z.shape[-2]), bool)
    columns = (jnp.moveaxis(X, -1, 0), jnp.moveaxis(Z, -1, 0))
    equal, _ = lax.scan(compare, start, columns, unroll=min(_COLUMNS_PER_PASS, X.shape[-1]))
    return equal
