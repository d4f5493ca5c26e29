"""`InducingReparam`: a GP site written through whitened inducing variables, for NUTS and for any other guide."""

from typing import Any, Literal
import warnings

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpyro
import numpyro.distributions as dist
from numpyro.infer.reparam import Reparam

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.inducing import AbstractInducing, as_inducing, check_width
from numpyro_sgp.math.products import matvec_transposed
from numpyro_sgp.posteriors.moments import project

__all__ = ["InducingReparam"]


class InducingReparam(Reparam):
    """f = mean + Aᵀv with v ~ N(0, I) and A = L⁻¹Kuf: M whitened variables in the place of N function values.

    For `numpyro.handlers.reparam(model, config={"f": InducingReparam(Z)})`. The site `f` becomes deterministic, and
    `f_whitened` (M,) is what NUTS or a stock autoguide sees. With Z = X it is the exact model, whitened.

    Args:
        inducing: inducing inputs (M, D), or an inducing object.
        conditional: "mean" takes f as its mean given v, the deterministic training conditional; "independent" adds
            √(k_ii − A_iᵀA_i) ε_i with a latent `f_residual` (N,), so that the marginal prior variances are exact (the
            fully independent training conditional).

    Raises:
        TypeError: the site is not a `GaussianProcess`, or `inducing` is a function.
        ValueError: the site is observed or masked; inducing inputs of another width than X; unknown `conditional`.

    Warns:
        UserWarning: a plate around the site is as large as the site has rows, and may be that of the rows.

    References:
        Hensman, Matthews, Filippone and Ghahramani (2015), "MCMC for variationally sparse Gaussian processes": the
        whitened inducing variables; Quiñonero-Candela and Rasmussen (2005), "A unifying view of sparse approximate
        Gaussian process regression": the two conditionals.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro import handlers
        >>> import numpyro_sgp as sgp
        >>> Z = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> config = {"f": sgp.InducingReparam(Z)}  # handlers.reparam(model, config=config)
    """

    def __init__(
        self, inducing: ArrayLike | AbstractInducing, *, conditional: Literal["mean", "independent"] = "mean"
    ) -> None:
        if callable(inducing):
            msg = (
                "`inducing` must be an array or an inducing object, got a function. Call it before, at the inputs and "
                "a typical kernel."
            )
            raise TypeError(msg)
        if conditional not in ("mean", "independent"):
            msg = f'`conditional` must be "mean" or "independent", got {conditional!r}. The default is "mean".'
            raise ValueError(msg)
        self.inducing = as_inducing(inducing)
        self.conditional = conditional

    def __call__(self, name: str, fn: Any, obs: Array | None) -> tuple[None, Array]:
        """The new sites `{name}_whitened` (and `{name}_residual`), and the value of f."""
        prior = unwrap(fn)
        if not isinstance(prior, GaussianProcess):
            msg = (
                f"`InducingReparam` was given the site {name!r}, a {type(prior).__name__}. It rewrites "
                "`GaussianProcess` sites: name one of them in `config`."
            )
            raise TypeError(msg)
        if obs is not None or (isinstance(fn, dist.MaskedDistribution) and fn._mask is not True):
            msg = (
                f"The GP site {name!r} is observed or masked. Observe it through a likelihood, or condition with "
                "`SparseGPRegression`; mask the likelihood."
            )
            raise ValueError(msg)
        check_width(self.inducing, prior.X)
        # Plates have expanded the site before this handler sees it: its whole shape but the last axis is a batch.
        batch_shape, N = fn.shape()[:-1], prior.event_shape[0]
        _warn_of_rows(name, batch_shape, prior.batch_shape, N)
        blocks = project(self.inducing, prior.kernel, prior.X, prior.relative_jitter)
        v = _standard_normal(f"{name}_whitened", batch_shape, self.inducing.num_inducing, blocks.A)
        f = prior.prior_mean + matvec_transposed(blocks.A, v)
        if self.conditional == "independent":
            variance = jnp.maximum(blocks.kff - jnp.sum(blocks.A * blocks.A, axis=-2), 0.0)
            # √ has no derivative at zero, where the residual does not count either.
            positive = variance > 0.0
            scale = jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1.0)), 0.0)
            f = f + scale * _standard_normal(f"{name}_residual", batch_shape, N, blocks.A)
        return None, f


def _warn_of_rows(name: str, batch_shape: tuple[int, ...], own: tuple[int, ...], N: int) -> None:
    """Warn where a plate around the site may be one of its rows: the sizes are all that is known here."""
    for axis in range(-len(batch_shape), 0):
        if batch_shape[axis] == N > 1 and (len(own) < -axis or own[axis] == 1):
            msg = (
                f"A plate of size {N} makes {N} latents of the GP site {name!r}, which has {N} rows. If the plate is "
                "that of the rows, sample the site before it: a GP is one random function, not one for each row."
            )
            warnings.warn(msg, stacklevel=2)


def _standard_normal(name: str, batch_shape: tuple[int, ...], size: int, like: Array) -> Array:
    zeros = jnp.zeros((*batch_shape, size), like.dtype)
    return jnp.asarray(numpyro.sample(name, dist.Normal(zeros, 1.0).to_event(1)))
