"""Optimizers for `numpyro.infer.SVI`, one in each module."""

from numpyro_sgp.optim.closure import num_refused
from numpyro_sgp.optim.descent_ascent import DescentAscent, DescentAscentState
from numpyro_sgp.optim.dual_ascent import DualAscent, DualAscentState
from numpyro_sgp.optim.grow_basis import GrowBasis, GrowBasisState
from numpyro_sgp.optim.natural_gradient import NaturalGradient, NaturalGradientState
from numpyro_sgp.optim.row_sparse import RowSparse, RowSparseState

__all__ = [
    "DescentAscent",
    "DescentAscentState",
    "DualAscent",
    "DualAscentState",
    "GrowBasis",
    "GrowBasisState",
    "NaturalGradient",
    "NaturalGradientState",
    "RowSparse",
    "RowSparseState",
    "num_refused",
]
