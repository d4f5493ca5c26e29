"""Gauss-Hermite rules for expectations under a Gaussian."""

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_sgp._internal.checks import positive

__all__ = ["gauss_hermite", "product_grid", "spherical_radial"]


def gauss_hermite(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes z and weights w with Σ_k w_k g(μ + σ z_k) = E[g(f)] for f ~ N(μ, σ²), exact for g of degree 2K − 1.

    Args:
        num_nodes: K ≥ 1.

    Returns:
        Nodes (K,) and weights (K,) in float64, the weights summing to one.

    Raises:
        ValueError: `num_nodes` is not a positive integer.

    Example:
        >>> from numpyro_sgp.math.quadrature import gauss_hermite
        >>> nodes, weights = gauss_hermite(3)
        >>> float((weights * nodes**4).sum().round(12))  # the fourth moment of a standard normal
        3.0
    """
    positive("num_nodes", num_nodes, "Twenty nodes suit most likelihoods.")
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    return nodes, weights / weights.sum()


def product_grid(num_nodes: int, dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """The tensor product of a one-dimensional rule: nodes (K^D, D) and weights (K^D,).

    Args:
        num_nodes: K, nodes along each axis.
        dimension: D ≥ 1.
    """
    nodes, weights = gauss_hermite(num_nodes)
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*[nodes] * dimension, indexing="ij")], axis=-1)
    products = np.prod([axis.ravel() for axis in np.meshgrid(*[weights] * dimension, indexing="ij")], axis=0)
    return grid, products


def spherical_radial(rng_key: Array, dimension: int, dtype: jax.typing.DTypeLike) -> tuple[Array, Array]:
    """A random rule for N(0, I): unbiased for every function, exact for polynomials of degree three.

    With a random orthogonal matrix Q and ρ from the chi distribution with D + 2 degrees of freedom, the nodes are 0 and
    ±ρ Q e_j, with the weights 1 − D/ρ² and 1/(2ρ²).

    Args:
        rng_key: a key.
        dimension: D ≥ 1.
        dtype: of nodes and weights.

    Returns:
        Nodes (2D + 1, D) and weights (2D + 1,), which sum to one; the first may be negative.

    References:
        Genz and Monahan (1998), "Stochastic integration rules for infinite regions", the rule of degree three.
    """
    key_rotation, key_radius = jax.random.split(rng_key)
    D = dimension
    Q = jax.random.orthogonal(key_rotation, D, dtype=dtype)
    squared = 2.0 * jax.random.gamma(key_radius, 0.5 * (D + 2), dtype=dtype)
    half = jnp.sqrt(squared) * Q
    nodes = jnp.concatenate([jnp.zeros((1, D), dtype), half, -half])
    weights = jnp.concatenate([(1.0 - D / squared)[None], jnp.full(2 * D, 0.5, dtype) / squared])
    return nodes, weights
