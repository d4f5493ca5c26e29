"""`QuadruplyStochastic`: which posterior family the options of `AutoQSGP` ask for."""

from typing import Literal

from jax.typing import ArrayLike

from numpyro_sgp.posteriors.family import Inducing
from numpyro_sgp.posteriors.quadruply_stochastic.abstract import AbstractQuadruplyStochastic, ControlForm
from numpyro_sgp.posteriors.quadruply_stochastic.inducing_covariance import WithInducingCovariance
from numpyro_sgp.posteriors.quadruply_stochastic.weight_covariance import RelevanceVectorMachine, WithChevronCovariance

__all__ = ["Covariance", "QuadruplyStochastic"]

Covariance = Literal["inducing", "chevron"]


def QuadruplyStochastic(
    basis_batch: int = 1000,
    dense_columns: int = 0,
    covariance: Covariance = "inducing",
    inducing: Inducing | None = None,
    control: int | ArrayLike | None = None,
    control_form: ControlForm = "nystrom",
    relevance: bool = False,
    jackknife: bool = False,
    log_concave: tuple[str, ...] = (),
) -> AbstractQuadruplyStochastic:
    """The posterior family of `AutoQSGP`: q(f) with its mean in the weights of a kernel of finite rank, of any rank.

    Args:
        basis_batch: how many basis functions a step samples.
        dense_columns: k, dense columns of the root of a chevron covariance; 0 is a diagonal one.
        covariance: "inducing", of function values at inducing inputs, or "chevron", of the weights.
        inducing: array (M, D), object or callable; None takes some rows of X.
        control: inputs (P, D) of a control variate for the mean, or how many rows of the first X to take.
        control_form: "nystrom" or "paper".
        relevance: a prior precision for each weight, the one of the largest bound, with a chevron covariance.
        jackknife: remove the bias of order 1/M of a likelihood that is not Gaussian.
        log_concave: names of observed sites with a log-concave likelihood that is not recognised as such.

    See `AutoQSGP` for more on each.
    """
    if control_form not in ("nystrom", "paper"):
        msg = f'`control_form` must be "nystrom" or "paper", got {control_form!r}. The former has less variance.'
        raise ValueError(msg)
    if covariance not in ("inducing", "chevron"):
        msg = f'`covariance` must be "inducing" or "chevron", got {covariance!r}. The default is "inducing".'
        raise ValueError(msg)
    if covariance == "chevron":
        if inducing is not None:
            msg = "A chevron covariance has no `inducing` inputs. Leave `inducing` out, or leave out `covariance`."
            raise ValueError(msg)
        of_weights = RelevanceVectorMachine if relevance else WithChevronCovariance
        return of_weights(basis_batch, dense_columns, control, control_form, jackknife, log_concave)
    if dense_columns or relevance:
        msg = (
            f"`dense_columns={dense_columns}` and `relevance={relevance}` belong to a covariance of the weights. Pass "
            '`covariance="chevron"`, or leave them out.'
        )
        raise ValueError(msg)
    return WithInducingCovariance(basis_batch, inducing, control, control_form, jackknife, log_concave)
