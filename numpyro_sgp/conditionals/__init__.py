"""Marginals and KL divergence of each parametrisation of a sparse posterior, as pure functions of arrays.

Notation: Kuu = L Lᵀ, A = L⁻¹Kuf, kff the prior variances; N data, M inducing variables; leading axes are a batch.
"""

from numpyro_sgp.conditionals.decoupled import (
    at_data,
    coefficient_units,
    full,
    hybrid,
    mean_at,
    mean_projected,
    norm,
    norm_by_blocks,
    norm_from_rows,
    orthogonal,
    project_orthogonal,
    residual_variance,
    solve,
)
from numpyro_sgp.conditionals.dual import (
    dual,
    dual_dense,
    dual_per_datum,
    dual_projected,
    natural_mean,
    natural_whitened,
    projected_at,
)
from numpyro_sgp.conditionals.mean_and_root import unwhitened, whitened
from numpyro_sgp.conditionals.moments import Moments, Projection, perturbed_moments, project, standard_deviation
from numpyro_sgp.conditionals.tied import Tie, Tied, tied
from numpyro_sgp.conditionals.weight_space import weight_space, weight_space_mean

__all__ = [
    "Moments",
    "Projection",
    "Tie",
    "Tied",
    "at_data",
    "coefficient_units",
    "dual",
    "dual_dense",
    "dual_per_datum",
    "dual_projected",
    "full",
    "hybrid",
    "mean_at",
    "mean_projected",
    "natural_mean",
    "natural_whitened",
    "norm",
    "norm_by_blocks",
    "norm_from_rows",
    "orthogonal",
    "perturbed_moments",
    "project",
    "project_orthogonal",
    "projected_at",
    "residual_variance",
    "solve",
    "standard_deviation",
    "tied",
    "unwhitened",
    "weight_space",
    "weight_space_mean",
    "whitened",
]
