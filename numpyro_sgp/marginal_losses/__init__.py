"""The marginal likelihood of regression with kernels of finite rank as losses for `SVI`, on batches."""

from numpyro_sgp.marginal_losses.losses import (
    BatchMarginalLikelihood,
    CompositionalMarginalLikelihood,
    MinimaxMarginalLikelihood,
)

__all__ = ["BatchMarginalLikelihood", "CompositionalMarginalLikelihood", "MinimaxMarginalLikelihood"]
