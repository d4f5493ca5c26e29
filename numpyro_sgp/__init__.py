"""Sparse Gaussian processes inside any NumPyro model.

The model says what is believed, the guide how it is approximated.
"""

from importlib.metadata import PackageNotFoundError, version

from numpyro_sgp import diagnostics as diagnostics
from numpyro_sgp import features as features
from numpyro_sgp import functionals as functionals
from numpyro_sgp import kernels as kernels
from numpyro_sgp.diagnostics.inference_data import to_arviz
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.reparam import InducingReparam
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.sparse_regression import RegressionPosterior, SparseGPRegression
from numpyro_sgp.fitting import (
    AbstractCallback,
    Checkpoint,
    EarlyStopping,
    FitProgress,
    FitReport,
    FitResult,
    Streaming,
    StreamingState,
    fit,
    load_checkpoint,
    save_checkpoint,
)
from numpyro_sgp.guides.guide import AutoSparseGP
from numpyro_sgp.inducing import (
    BoundedInducingPoints,
    GrowingInducing,
    InducingGrid,
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
from numpyro_sgp.losses.marginal_likelihood import (
    BatchMarginalLikelihood,
    CompositionalMarginalLikelihood,
    MinimaxMarginalLikelihood,
)
from numpyro_sgp.losses.quadrature_elbo import QuadratureELBO
from numpyro_sgp.optim import DescentAscent, DualAscent, GrowBasis, NaturalGradient, RowSparse, num_refused
from numpyro_sgp.posteriors.decoupled.family import Decoupled
from numpyro_sgp.posteriors.decoupled.guide import AutoDecoupledGP
from numpyro_sgp.posteriors.dual.family import Dual
from numpyro_sgp.posteriors.dual.guide import AutoTSVGP
from numpyro_sgp.posteriors.functions import FunctionDraws
from numpyro_sgp.posteriors.kronecker.family import Kronecker
from numpyro_sgp.posteriors.markov.family import Markov
from numpyro_sgp.posteriors.markov.guide import AutoMarkovGP
from numpyro_sgp.posteriors.markov.pair_family import SparseMarkov
from numpyro_sgp.posteriors.process import ProcessPosterior, process_posterior
from numpyro_sgp.posteriors.quadruply_stochastic.family import QuadruplyStochastic
from numpyro_sgp.posteriors.quadruply_stochastic.guide import AutoQSGP, RelevantVectors
from numpyro_sgp.posteriors.vecchia.family import Vecchia
from numpyro_sgp.posteriors.vecchia.guide import AutoVecchiaGP
from numpyro_sgp.posteriors.weight_space.guide import AutoWeightSpaceGP, WeightSpace
from numpyro_sgp.posteriors.whitened.guide import AutoSVGP, NaturalWhitened, Unwhitened, Whitened

try:
    __version__ = version("numpyro-sgp")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0.0.0"

__all__ = [
    "AbstractCallback",
    "AutoDecoupledGP",
    "AutoMarkovGP",
    "AutoQSGP",
    "AutoSVGP",
    "AutoSparseGP",
    "AutoTSVGP",
    "AutoVecchiaGP",
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
    "FitReport",
    "FitResult",
    "FunctionDraws",
    "GaussianProcess",
    "GrowBasis",
    "GrowingInducing",
    "InducingGrid",
    "InducingPoints",
    "InducingReparam",
    "Kronecker",
    "Markov",
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
    "SparseMarkov",
    "SparsePosterior",
    "Streaming",
    "StreamingState",
    "Unwhitened",
    "Vecchia",
    "WeightSpace",
    "Whitened",
    "diagnostics",
    "features",
    "fit",
    "functionals",
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
