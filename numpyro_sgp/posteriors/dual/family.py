"""`Dual`: which posterior family the options of `AutoTSVGP` ask for."""

from typing import Literal

from numpyro_sgp.distributions.sparse_regression import RegressionPosterior
from numpyro_sgp.posteriors.dual.dense import Dense
from numpyro_sgp.posteriors.dual.sparse import SparseDual
from numpyro_sgp.posteriors.family import Inducing

__all__ = ["Dual", "Sites"]

Sites = Literal["tied", "per_datum"]


def Dual(
    inducing: Inducing | None,
    sites: Sites = "tied",
    learn_inducing: bool = False,
    init_from: RegressionPosterior | None = None,
) -> SparseDual | Dense:
    """The posterior family of `AutoTSVGP`: the prior times Gaussian sites, which stay fixed while the prior moves.

    Args:
        inducing: inducing inputs (M, D), an inducing object, or `(kernel, X, rng_key)` to one; None for the dense
            posterior (t-VGP), which has one site for each row of X.
        sites: "tied" keeps two sums over the data, (M,) and (M, M); "per_datum" keeps every site, (N,) and (N,).
        learn_inducing: whether to train the inducing inputs.
        init_from: the optimum of a regression with the same inducing variables, to start at in place of the prior.

    Raises:
        ValueError: unknown `sites`.
    """
    if sites not in ("tied", "per_datum"):
        msg = f"`sites` must be 'tied' or 'per_datum', got {sites!r}. The default is 'tied'."
        raise ValueError(msg)
    return Dense(init_from) if inducing is None else SparseDual(inducing, sites, learn_inducing, init_from)
