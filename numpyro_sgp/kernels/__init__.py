"""Kernels: covariance functions as JAX pytrees.

A kernel is any pytree with the calling convention of tinygp: `k(X)` is the diagonal, (..., N), and `k(X, Z)` the
matrix, (..., N, M). The classes here and every tinygp kernel are kernels, and the two can be added and multiplied.

Shapes. Inputs are (N, D), with leading axes for a batch of input sets. Hyperparameters with leading axes are a batch of
kernels; all batches broadcast.

* One number for each kernel (`variance`, `alpha`, `offset`) has the shape of the batch.
* One number for each input column (`lengthscale`, `period`, the `variance` of `Linear` and `Polynomial`) is a scalar or
  (D,) for one kernel, and batch + (1,) or batch + (D,) for a batch: C isotropic kernels have `lengthscale` (C, 1).

Values follow the promoted dtype of inputs and hyperparameters; a Python float adapts to the inputs.
"""

from numpyro_sgp.kernels.algebra import Constant, Kernel, Product, Sum
from numpyro_sgp.kernels.inputs import Select, Warp
from numpyro_sgp.kernels.periodic import Cosine, Periodic
from numpyro_sgp.kernels.polynomial import Linear, Polynomial
from numpyro_sgp.kernels.stationary import (
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
    SquaredExponential,
    Stationary,
)
from numpyro_sgp.kernels.white import White

__all__ = [
    "Constant",
    "Cosine",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "Select",
    "SquaredExponential",
    "Stationary",
    "Sum",
    "Warp",
    "White",
]
