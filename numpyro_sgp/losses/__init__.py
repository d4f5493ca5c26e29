"""Losses for `SVI`: the bound with f integrated by quadrature, and marginal likelihoods of finite-rank kernels."""

from numpyro_sgp.losses.marginal_likelihood import (
    BatchMarginalLikelihood,
    CompositionalMarginalLikelihood,
    MinimaxMarginalLikelihood,
)
from numpyro_sgp.losses.quadrature_elbo import QuadratureELBO

__all__ = [
    "BatchMarginalLikelihood",
    "CompositionalMarginalLikelihood",
    "MinimaxMarginalLikelihood",
    "QuadratureELBO",
]
