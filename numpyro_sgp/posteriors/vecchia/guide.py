"""The guide for functions of space with very many rows."""

from collections.abc import Callable
from typing import Any

from numpyro.infer.autoguide import AutoNormal

from numpyro_sgp._internal.checks import positive
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.guides.members import Joint
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily
from numpyro_sgp.posteriors.vecchia.family import Vecchia

__all__ = ["AutoVecchiaGP"]


class AutoVecchiaGP(AbstractAutoSparseGP):
    """Each value of f from the nearest rows, in O(N K²), to be trained with `NaturalGradient`.

    For functions of few inputs, such as those of space, that are too rough for an affordable number of inducing inputs.
    Each row has a Gaussian site t_n, as in `AutoTSVGP(model, None)`. Groups of K/2 rows share K neighbours, and the
    marginals of f in a group are conditioned on the sites of both. In KL(q ‖ p) = E[log Π t_n] − log Z, the normaliser
    Z is a product over the groups in a random order, each conditioned on the nearest rows before it. With Gaussian
    noise the loss is then the negative log likelihood of Vecchia. It is no lower bound, and exact where the neighbours
    are all rows.

    Neighbours are found once, by Euclidean distance in `X`: give its columns units in which they matter alike. Where
    outcomes are noisy, f is that of many rows, and more neighbours are needed: double them until nothing moves. Give
    all rows at every step.

    Args:
        model: a NumPyro model with `GaussianProcess` sites.
        num_neighbours: K. Predictions take the K + K/2 nearest rows.
        base: guide for the other latents: an autoguide class, or a guide. A class starts a latent at what was observed
            of it, if it is the location of an outcome, and near its prior median otherwise.
        joint: which other latents have one joint Gaussian with a GP site: "auto" for all that meet it in a term of the
            model, False for none, or a tuple of names. A step has one more mean of f for each number in them. Latents
            that a kernel depends on stay with `base`, and so do those of a guide of your own or of `AutoDelta`.
            Functions that meet in a term are one site, with the sum of their kernels.
        prefix: of the names of parameters, `{site}_{prefix}_{symbol}`.

    Raises:
        TypeError: functionals in the place of inputs.
        ValueError: `num_neighbours` that is no positive integer.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_sgp as sgp
        >>> def model(X, y=None):
        ...     level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern32(0.2), X))
        ...     numpyro.sample("y", dist.Poisson(jnp.exp(level + f)).to_event(1), obs=y)
        >>> X, y = np.random.default_rng(0).uniform(size=(2000, 2)), np.ones(2000)
        >>> guide = sgp.AutoVecchiaGP(model, num_neighbours=10)
        >>> svi = numpyro.infer.SVI(model, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
        >>> params = svi.run(jax.random.key(0), 5, X, y, progress_bar=False).params
        >>> guide.posterior(jax.random.key(1), params, X[:10] + 0.01)["f"].mean.shape
        (10,)

    References:
        Vecchia (1988), "Estimation and model identification for continuous spatial processes"; Zilber and Katzfuss
        (2021), "Vecchia-Laplace approximations of generalized Gaussian processes for big non-Gaussian spatial data";
        Guinness (2018), "Permutation and grouping methods for sharpening Gaussian process approximations".
    """

    def __init__(
        self,
        model: Callable,
        *,
        num_neighbours: int = 40,
        base: Any = AutoNormal,
        joint: Joint = "auto",
        prefix: str = "auto",
    ) -> None:
        self._vecchia = Vecchia(positive("num_neighbours", num_neighbours, "The default is 40."))
        super().__init__(model, base=base, prefix=prefix, joint=joint)

    def family(self, site: str) -> AbstractPosteriorFamily:
        del site
        return self._vecchia
