"""Marginals and KL divergence of each parametrisation of a sparse posterior, as pure functions of arrays.

Notation: Kuu = L Lᵀ, A = L⁻¹Kuf, kff the prior variances; N data, M inducing variables; leading axes are a batch.
"""

from numpyro_sgp.conditionals.dual import (
    dual,
    dual_dense,
    dual_per_datum,
    dual_projected,
    natural_whitened,
    projected_at,
)
from numpyro_sgp.conditionals.mean_and_root import unwhitened, whitened
from numpyro_sgp.conditionals.moments import Moments, Projection, perturbed_moments, project
from numpyro_sgp.conditionals.tied import Tie, Tied, tied

__all__ = [
    "Moments",
    "Projection",
    "Tie",
    "Tied",
    "dual",
    "dual_dense",
    "dual_per_datum",
    "dual_projected",
    "natural_whitened",
    "perturbed_moments",
    "project",
    "projected_at",
    "tied",
    "unwhitened",
    "whitened",
]
