"""What a model holds: the Gaussian-process site, the sparse regression, and the posterior that guides put there."""

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.reparam import InducingReparam
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.sparse_regression import RegressionPosterior, SparseGPRegression

__all__ = ["GaussianProcess", "InducingReparam", "RegressionPosterior", "SparseGPRegression", "SparsePosterior"]
