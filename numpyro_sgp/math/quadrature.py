"""Gauss-Hermite rules for expectations under a Gaussian."""

import numpy as np

from numpyro_sgp._internal.checks import positive

__all__ = ["gauss_hermite", "product_grid"]


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
