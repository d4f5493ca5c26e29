"""Coefficients of a mean over a basis, and what an optimizer asks of them where the basis is the data.

Where the mean basis is the training inputs, the natural step on the coefficients needs no matrix: the gradient of the
bound with respect to the function k_xγ a is g_n − a_n at row n, with g_n = ∂E_q[log p(y_n | f_n)]/∂m_n, and so
a_n ← a_n + step (g_n − a_n). The parts of that step are asked for as derivatives with respect to a `Response`, which
is zero: an ordinary gradient of an ordinary value.
"""

import dataclasses

import jax
from jax import Array

from numpyro_sgp._internal.probed import Probed

__all__ = ["Coefficients", "ProbedCoefficients", "Response"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coefficients:
    """Preconditioned coefficients a₀ of a mean basis γ; the type tells an optimizer what they are.

    Args:
        values: a₀, (..., M_γ).
        residual: share of the prior variance at γ that the covariance basis left unexplained when the guide was
            initialised; not trained, (M_γ,) or (..., M_γ), or None where the mean is not projected.
        num_projected: size of the covariance basis that the mean is orthogonal to, or 0.
        of_data: whether the rows that the guide was initialised at are all in the basis; None where their values were
            not known.
    """

    values: Array
    residual: Array | None
    num_projected: int = dataclasses.field(metadata={"static": True})
    of_data: bool | None = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Response:
    """What derivatives with respect to a zero of this form are.

    Args:
        gradient: −(N/B) Σ g_b over the rows b of the batch that are at n, in units of a₀, (..., M_γ).
        seen: how often n was seen, each of its equal rows counting for one part, (..., M_γ).
        gradient_projected: −(N/B) Σ_b A_b g_b, (..., M), or None.
        seen_projected: Σ_b A_b a_b over the batch, with a shared by equal rows, (..., M), or None.
        projected: L⁻¹K_uγ times each of the vectors to be tracked, (S, ..., M), or None.
        scale: the factor of the divergence in the loss, (...), which all of these have too.
    """

    gradient: Array
    seen: Array
    gradient_projected: Array | None
    seen_projected: Array | None
    projected: Array | None
    scale: Array


@dataclasses.dataclass(frozen=True)
class ProbedCoefficients(Probed):
    """What `DualAscent` puts in the place of coefficients.

    Args:
        value: the coefficients at which the loss is evaluated.
        zero: a response of zero, to be differentiated.
        tracked: the vectors whose projections are tracked, the first of them those coefficients, (S, ..., M_γ).
        projected: L⁻¹K_uγ times these vectors, (S, ..., M), or None where nothing is projected.
        refresh: whether to compute `projected` anew; True where hyperparameters move.
        rows_seen: receives the (static) number of rows of the batch when the loss is traced.
    """

    value: Coefficients
    zero: Response
    tracked: Array
    projected: Array | None
    refresh: Array | bool
    rows_seen: list[int]
