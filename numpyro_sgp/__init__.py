"""Sparse Gaussian processes inside any NumPyro model.

The model says what is believed, the guide how it is approximated.
"""

from importlib.metadata import PackageNotFoundError, version

from numpyro_sgp import diagnostics as diagnostics
from numpyro_sgp import features as features
from numpyro_sgp import kernels as kernels
from numpyro_sgp.autoguide import AutoSparseGP
from numpyro_sgp.decoupled import AutoDecoupledGP, Decoupled
from numpyro_sgp.diagnostics.inference_data import to_arviz
from numpyro_sgp.distributions import GaussianProcess, SparsePosterior
from numpyro_sgp.elbo import QuadratureELBO
from numpyro_sgp.fitting import (
    AbstractCallback,
    Checkpoint,
    EarlyStopping,
    FitProgress,
    fit,
    load_checkpoint,
    save_checkpoint,
)
from numpyro_sgp.inducing import (
    BoundedInducingPoints,
    GrowingInducing,
    InducingPoints,
    MultiscaleInducing,
    greedy_variance,
    growing,
    kmeans,
    median_lengthscale,
    subset,
    suggest_num_inducing,
    trace_error,
)
from numpyro_sgp.marginal_losses import (
    BatchMarginalLikelihood,
    CompositionalMarginalLikelihood,
    MinimaxMarginalLikelihood,
)
from numpyro_sgp.optim import DescentAscent, DualAscent, GrowBasis, NaturalGradient, RowSparse, num_refused
from numpyro_sgp.predict import FunctionDraws
from numpyro_sgp.process import ProcessPosterior, process_posterior
from numpyro_sgp.qsgp import AutoQSGP, QuadruplyStochastic, RelevantVectors
from numpyro_sgp.regression import RegressionPosterior, SparseGPRegression
from numpyro_sgp.reparam import InducingReparam
from numpyro_sgp.svgp import AutoSVGP, NaturalWhitened, Unwhitened, Whitened
from numpyro_sgp.tsvgp import AutoTSVGP, Dual
from numpyro_sgp.weightspace import AutoWeightSpaceGP, WeightSpace

try:
    __version__ = version("numpyro-sgp")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0.0.0"

__all__ = [
    "AbstractCallback",
    "AutoDecoupledGP",
    "AutoQSGP",
    "AutoSVGP",
    "AutoSparseGP",
    "AutoTSVGP",
    "AutoWeightSpaceGP",
    "BatchMarginalLikelihood",
    "BoundedInducingPoints",
    "Checkpoint",
    "CompositionalMarginalLikelihood",
    "Decoupled",
    "DescentAscent",
    "Dual",
    "DualAscent",
    "EarlyStopping",
    "FitProgress",
    "FunctionDraws",
    "GaussianProcess",
    "GrowBasis",
    "GrowingInducing",
    "InducingPoints",
    "InducingReparam",
    "MinimaxMarginalLikelihood",
    "MultiscaleInducing",
    "NaturalGradient",
    "NaturalWhitened",
    "ProcessPosterior",
    "QuadratureELBO",
    "QuadruplyStochastic",
    "RegressionPosterior",
    "RelevantVectors",
    "RowSparse",
    "SparseGPRegression",
    "SparsePosterior",
    "Unwhitened",
    "WeightSpace",
    "Whitened",
    "diagnostics",
    "features",
    "fit",
    "greedy_variance",
    "growing",
    "kernels",
    "kmeans",
    "load_checkpoint",
    "median_lengthscale",
    "num_refused",
    "process_posterior",
    "save_checkpoint",
    "subset",
    "suggest_num_inducing",
    "to_arviz",
    "trace_error",
]
