"""A posterior as a process: factorised once, evaluated anywhere.

With u = L v, L Lᵀ = Kuu, and q(v) = N(m, RᵀR), every posterior of the package has at inputs X the moments

    mean(X) = m_prior(X) + kᵀa,   Cov = Kff − AᵀA + TᵀT,   A = L⁻¹k,   T = R A,   a = L⁻ᵀm,   k = Cov(u, f(X)).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Protocol, cast

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.inducing import AbstractInducing, InducingPoints, check_new_inputs
from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.math.linalg import solve_lower
from numpyro_sgp.math.products import matmul, matvec_transposed
from numpyro_sgp.posteriors.dual.formulas import dense_weights
from numpyro_sgp.posteriors.mean_basis import AbstractMeanBasis
from numpyro_sgp.posteriors.moments import moments
from numpyro_sgp.posteriors.parameters import FittedParameters
from numpyro_sgp.posteriors.sites import DatumSites

__all__ = [
    "AbstractProcess",
    "Guide",
    "ProcessPosterior",
    "TableProcess",
    "UnknownFamilyError",
    "dense_process",
    "drawable_of",
    "prior_at",
    "process_of",
    "process_posterior",
]


class UnknownFamilyError(TypeError):
    """A posterior family is not described by a Gaussian q(u), nor by one site for each row."""


class Guide(Protocol):
    """What is asked of a guide: an `AbstractAutoSparseGP` is one."""

    prefix: str

    def family(self, site: str) -> Any:
        """The posterior family of a GP site."""
        ...

    def posterior(
        self, rng_key: Array, params: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, SparsePosterior]:
        """The posterior of each GP site at the model's inputs."""
        ...


def prior_at(
    kernel: Callable, mean_function: Any, width: int, X_new: ArrayLike | AbstractFunctional, jitter: ArrayLike
) -> GaussianProcess:
    """The prior at other inputs, (N_new, D), or at functionals.

    Args:
        kernel: the prior's kernel.
        mean_function: a number or a function; None where the prior mean was given as values.
        width: D.
        X_new: inputs, or functionals.
        jitter: relative to the mean prior variance.

    Raises:
        ValueError: inputs of another width; the prior mean was given as values at the training inputs.
    """
    if mean_function is None:
        msg = (
            "The prior mean was given as an array of values at the model's inputs, which say nothing about "
            "`X_new`. Give `mean` to `GaussianProcess` as a scalar or as a function of X."
        )
        raise ValueError(msg)
    check_new_inputs(width, X_new)
    return GaussianProcess(kernel, X_new, mean_function, jitter=cast(Any, jitter))


class AbstractProcess(ABC):
    """q(f) as a process, given one draw of the hyperparameters."""

    @abstractmethod
    def posterior(self, X_new: ArrayLike | AbstractFunctional) -> SparsePosterior:
        """q(f(X_new)) at inputs (N_new, D)."""

    @abstractmethod
    def log_ratio(self, noise: Array) -> Array:
        """The log ratio log q(u)/p(u), (...), at a draw of u by standard normal numbers, (..., num_noise)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPosterior(AbstractProcess):
    """q(f) as a process: all that does not depend on where it is evaluated is held factorised.

    Made by `process_posterior`. A pytree: it can be returned from `jit`, mapped over draws of the hyperparameters, and
    pickled. Under a dense posterior (t-VGP) u are the values at the training inputs, and A = L_B⁻¹ W½ k.

    Attributes:
        kernel: the prior's kernel.
        mean_function: the prior mean at any inputs, a number or a function; None where it was given as values.
        inducing: the inducing variables u.
        L: Cholesky factor of Kuu, or of B = I + W½KW½, (..., M, M).
        a: the mean's weights, (..., M).
        m: mean of q(v), (..., M); None for a dense posterior.
        R: root of q(v)'s covariance, S = RᵀR, (..., M, M), or (..., D, M) for one of several members of a joint
            posterior over D numbers; None for a dense posterior.
        W_sqrt: roots of the sites' precisions, (..., M); None for a sparse posterior.
        mean_basis: a basis of the mean alone, or None.
        mean_weights: its weights, as it takes them, or None.
        kl: KL(q ‖ p), with that of the mean's own basis, (...).
        jitter: relative to the mean prior variance.
        batch_shape: one latent for each entry.
    """

    kernel: Callable
    mean_function: Any
    inducing: AbstractInducing
    L: Array
    a: Array
    m: Array | None = None
    R: Array | None = None
    W_sqrt: Array | None = None
    mean_basis: AbstractMeanBasis | None = None
    mean_weights: Any = None
    kl: Array
    jitter: ArrayLike
    batch_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def prior(self, X_new: ArrayLike | AbstractFunctional) -> GaussianProcess:
        """The prior at other inputs, (N_new, D), or at functionals.

        Raises:
            ValueError: inputs of another width; the prior mean was given as values at the training inputs.
        """
        return prior_at(self.kernel, self.mean_function, self.inducing.width, X_new, self.jitter)

    def posterior(self, X_new: ArrayLike | AbstractFunctional) -> SparsePosterior:
        """q(f(X_new)): `.mean`, `.variance`, `.covariance()`, `.sample(key)`.

        Args:
            X_new: inputs, (N_new, D), or functionals of `numpyro_sgp.functionals` with N_new rows.

        Raises:
            ValueError: inputs of another width; the prior mean was given as values at the training inputs.
        """
        prior = self.prior(X_new)
        Kuf = self.inducing.Kuf(prior.kernel, prior.X)
        A = solve_lower(self.L, Kuf if self.W_sqrt is None else self.W_sqrt[..., :, None] * Kuf)
        T = None if self.R is None else matmul(self.R, A)
        mean = matvec_transposed(Kuf, self.a)
        if self.mean_basis is not None:
            mean = mean + self.mean_basis.mean_at(prior.kernel, prior.X, self.mean_weights)
        q = moments(mean, prior.kernel(prior.X), A, T, self.kl)
        return SparsePosterior(prior, q, self.batch_shape)

    def log_ratio(self, noise: Array) -> Array:
        """The log ratio log q(v)/p(v) at v = m + Rᵀε: −½|ε|² + ½|v|² − log|R|.

        Where the mean has a basis of its own, the function given v is not the prior's; the divergence of that part,
        which is what KL(q ‖ p) has beyond that of v, is the same for all v and is added.

        Raises:
            TypeError: a dense posterior, or a member of a joint one.
        """
        if self.R is None:
            msg = "`log_ratio` is that of inducing variables, and a dense posterior has no inducing variables."
            raise TypeError(msg)
        if self.R.shape[-1] != self.R.shape[-2]:
            msg = (
                "`log_ratio` is that of inducing variables with a Gaussian of their own, and these are in a joint "
                f"posterior with other latents or functions: R has shape {self.R.shape}. Train with `joint=False`."
            )
            raise TypeError(msg)
        R, m = self.R, cast(Array, self.m)
        v = m + matvec_transposed(R, noise)
        log_R = jnp.linalg.slogdet(R)[1]
        ratio = 0.5 * (jnp.sum(v * v, axis=-1) - jnp.sum(noise * noise, axis=-1)) - log_R
        if self.mean_basis is None:
            return ratio
        kl_v = 0.5 * (jnp.sum(R * R, axis=(-2, -1)) + jnp.sum(m * m, axis=-1) - R.shape[-1]) - log_R
        return ratio + self.kl - kl_v


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableProcess:
    """A posterior that is a Gaussian over the weights of a table, of which functions can be drawn.

    Attributes:
        kernel: the prior's kernel.
        mean_function: the prior mean at any inputs.
        mean_basis: makes a function of drawn weights.
        mean_weights: the numbers of its kernel of finite rank.
    """

    kernel: Callable
    mean_function: Any
    mean_basis: AbstractMeanBasis
    mean_weights: Any
    inducing = None
    batch_shape = ()


def dense_process(sites: DatumSites, q: SparsePosterior) -> ProcessPosterior:
    """The process of one site for each training row, from the posterior q at any inputs."""
    inducing = InducingPoints(sites.fixed_X)
    L, _, a, W_sqrt = dense_weights(sites.lambda1, sites.Lambda2, inducing.Kuu(q.prior.kernel))
    return ProcessPosterior(
        kernel=q.prior.kernel,
        mean_function=q.prior.mean_function,
        inducing=inducing,
        L=L,
        a=a,
        W_sqrt=W_sqrt,
        kl=q.kl,
        jitter=q.prior.relative_jitter,
        batch_shape=q.batch_shape,
    )


def drawable_of(
    guide: Guide, params: Mapping[str, Any], site: str, q: SparsePosterior, *, drawn: bool = False
) -> AbstractProcess | TableProcess:
    """What functions of a GP site are drawn from; see `process_of`.

    `drawn` is for a posterior that is joint with others: given the draw of all of them that it was made with.
    """
    family, given = guide.family(site), q.drawn if drawn else q.gaussian
    found = given.process(q) if given is not None else family.process(FittedParameters(params, site, guide.prefix), q)
    if found is None:
        raise UnknownFamilyError(_without_process(family, site))
    return found


def process_of(guide: Guide, params: Mapping[str, Any], site: str, q: SparsePosterior) -> AbstractProcess:
    """The process that the posterior `q` of a GP site belongs to.

    Args:
        guide: a sparse guide.
        params: fitted parameters.
        site: name of the GP site.
        q: what `guide.posterior` gives for it, at any inputs.

    Raises:
        UnknownFamilyError: a posterior family that is not described by inducing variables, or by one site a row.
    """
    found = drawable_of(guide, params, site, q)
    if not isinstance(found, AbstractProcess):
        raise UnknownFamilyError(_without_process(guide.family(site), site))
    return found


def _without_process(family: Any, site: str) -> str:
    return (
        f"The posterior family {type(family).__name__} of site {site!r} has no inducing variables u with a Gaussian "
        "q(u) of their own. Use the moments that `guide.posterior` gives at the inputs you want."
    )


def process_posterior(
    guide: Guide, rng_key: Array, params: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, AbstractProcess]:
    """The posterior of each GP site, factorised once, to be evaluated at many batches of inputs.

    Args:
        guide: a sparse guide.
        rng_key: draws the hyperparameters, where the base guide is random.
        params: fitted parameters.
        args: arguments of the model; the rows in them do not matter.
        kwargs: keyword arguments of the model.

    Returns:
        By site name: `.posterior(X_new)`, given one draw of the hyperparameters, and of the latents in a prior mean.

    Raises:
        TypeError: a posterior family without inducing variables.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_sgp as sgp
        >>> def model(X, y=None):
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(1.0), X))
        ...     numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> guide = sgp.AutoSVGP(model, X[::2])
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), sgp.QuadratureELBO())
        >>> params = svi.run(jax.random.key(0), 3, X, X[:, 0], progress_bar=False).params
        >>> f = sgp.process_posterior(guide, jax.random.key(1), params, X)["f"]
        >>> f.posterior(X[:3]).mean.shape, f.posterior(X[:2]).variance.shape
        ((3,), (2,))
    """
    posteriors = guide.posterior(rng_key, params, *args, **kwargs)
    return {site: process_of(guide, params, site, q) for site, q in posteriors.items()}
