"""Kernels of finite rank, k(x, z) = φ(x)ᵀS⁻¹φ(z): functions f(x) = φ(x)ᵀw with weights w ~ N(0, S⁻¹).

Each is a kernel like any other, and shows `rank`, `features(X, index)` and `prior_precision(index)`; so posteriors over
the weights (`AutoWeightSpaceGP`) can be had, and only some features evaluated. Leading axes of hyperparameters are a
batch of kernels, as in `numpyro_sgp.kernels`.
"""

from numpyro_sgp.features.abstract import AbstractFiniteRank
from numpyro_sgp.features.expanded import Expanded, as_finite_rank
from numpyro_sgp.features.finite_rank import FiniteRank
from numpyro_sgp.features.hilbert_space import HilbertSpace
from numpyro_sgp.features.inducing_basis import InducingBasis
from numpyro_sgp.features.maps import FeatureMap
from numpyro_sgp.features.random_fourier import RandomFourier
from numpyro_sgp.features.weights import WeightVariables

__all__ = [
    "AbstractFiniteRank",
    "Expanded",
    "FeatureMap",
    "FiniteRank",
    "HilbertSpace",
    "InducingBasis",
    "RandomFourier",
    "WeightVariables",
    "as_finite_rank",
]
