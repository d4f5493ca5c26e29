"""A posterior as a process: factorised once, evaluated anywhere.

With u = L v, L Lᵀ = Kuu, and q(v) = N(m, RᵀR), every posterior of the package has at inputs X the moments

    mean(X) = m_prior(X) + kᵀa,   Cov = Kff − AᵀA + TᵀT,   A = L⁻¹k,   T = R A,   a = L⁻ᵀm,   k = Cov(u, f(X)).
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple, Protocol, cast

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro import handlers

from numpyro_sgp.conditionals import Moments, Projection, coefficient_units, dense_weights, project_orthogonal
from numpyro_sgp.conditionals.moments import moments
from numpyro_sgp.distributions import GaussianProcess, SparsePosterior
from numpyro_sgp.features import WeightVariables, as_finite_rank
from numpyro_sgp.finite_rank import has_correlated_weights
from numpyro_sgp.inducing import (
    AbstractInducing,
    BoundedInducingPoints,
    GrowingInducing,
    InducingPoints,
    check_new_inputs,
)
from numpyro_sgp.linalg import (
    cholesky,
    diagonal,
    matmul,
    matvec,
    matvec_transposed,
    solve_lower,
    solve_lower_transposed,
)
from numpyro_sgp.mean_basis import AbstractMeanBasis, InducingMean, TableMean
from numpyro_sgp.sites import DatumSites
from numpyro_sgp.tables import Table, limit_of, numbers_of

__all__ = ["POINTS", "Guide", "ProcessPosterior", "UnknownFamilyError", "joined", "process_of", "process_posterior"]


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


@jax.tree_util.register_static
class _WithVariables(AbstractInducing):
    """Inducing variables, and whitened variables v in the place of function values: their covariance is given."""

    def __init__(self, inducing: AbstractInducing, prior: GaussianProcess, covariance: Array) -> None:
        self.inducing = inducing
        self.prior = prior
        self.covariance = covariance

    @property
    def num_inducing(self) -> int:
        return self.inducing.num_inducing

    @property
    def width(self) -> int:
        return self.inducing.width

    def Kuu(self, kernel: Callable) -> Array:
        return self.inducing.Kuu(kernel)

    def Kuu_diagonal(self, kernel: Callable) -> Array:
        return self.inducing.Kuu_diagonal(kernel)

    def take(self, index: Array) -> AbstractInducing:
        return _WithVariables(self.inducing.take(index), self.prior, jnp.take(self.covariance, index, axis=-2))

    def Kuf(self, kernel: Callable, X: Array) -> Array:
        return self.covariance if X is self.prior.X else self.inducing.Kuf(kernel, X)

    def Kuv(self, kernel: Callable, other: AbstractInducing) -> Array:
        return self.inducing.Kuv(kernel, other.inducing if isinstance(other, _WithVariables) else other)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProcessPosterior:
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
        R: root of q(v)'s covariance, S = RᵀR, (..., M, M); None for a dense posterior.
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
    m: Array | None
    R: Array | None
    W_sqrt: Array | None
    mean_basis: AbstractMeanBasis | None
    mean_weights: Any
    kl: Array
    jitter: ArrayLike
    batch_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def prior(self, X_new: ArrayLike) -> GaussianProcess:
        """The prior at other inputs, (N_new, D).

        Raises:
            ValueError: inputs of another width; the prior mean was given as values at the training inputs.
        """
        if self.mean_function is None:
            msg = (
                "The prior mean was given as an array of values at the model's inputs, which say nothing about "
                "`X_new`. Give `mean` to `GaussianProcess` as a scalar or as a function of X."
            )
            raise ValueError(msg)
        check_new_inputs(self.inducing.width, X_new)
        return GaussianProcess(self.kernel, X_new, self.mean_function, jitter=cast(Any, self.jitter))

    def posterior(self, X_new: ArrayLike) -> SparsePosterior:
        """q(f(X_new)): `.mean`, `.variance`, `.covariance()`, `.sample(key)`.

        Args:
            X_new: inputs, (N_new, D).

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


class _Reader:
    """Gives a family the fitted values of one site, and remembers which it asked for."""

    def __init__(self, params: Mapping[str, Any], site: str, prefix: str) -> None:
        self.params, self.site, self.prefix = params, site, prefix
        self.seen: dict[str, Any] = {}
        self.replace: Callable[[str, Any], Any] | None = None

    def __call__(self, symbol: str, init: Any) -> Any:
        del init
        name = f"{self.site}_{self.prefix}_{symbol}"
        if name not in self.params:
            msg = f"The parameter {name!r} is missing. Pass all fitted parameters, `result.params` of `SVI.run`."
            raise ValueError(msg)
        self.seen[symbol] = self.params[name]
        value = self.params[name]
        return value if self.replace is None else self.replace(symbol, value)

    state = __call__


def process_of(guide: Guide, params: Mapping[str, Any], site: str, q: SparsePosterior) -> ProcessPosterior:
    """The process that the posterior `q` of a GP site belongs to.

    Args:
        guide: a sparse guide.
        params: fitted parameters.
        site: name of the GP site.
        q: what `guide.posterior` gives for it, at any inputs.

    Raises:
        UnknownFamilyError: a posterior family that is not described by inducing variables, or by one site a row.
    """
    kernel, jitter = q.prior.kernel, q.prior.relative_jitter
    family, read = guide.family(site), _Reader(params, site, guide.prefix)
    if not family.has_process:
        raise UnknownFamilyError(_without_process(family, site))
    table = params.get(f"{site}_{guide.prefix}_basis")
    if isinstance(table, Table):
        return _with_table(family, read, q, table)
    inducing = params.get(f"{site}_{guide.prefix}_inducing")
    gamma = params.get(f"{site}_{guide.prefix}_mean_inducing")
    coefficients = params.get(f"{site}_{guide.prefix}_a")
    if family.over_weights:
        basis = _Basis.of_weights(kernel, q.prior.X)
    else:
        basis = _Basis.of(inducing, None if coefficients is not None else gamma, kernel, jitter)
    M = 1 if basis is None else basis.inducing.num_inducing
    at_kernel = _WhitenedWeights(kernel, basis.L) if family.over_weights and basis is not None else kernel
    at_variables = GaussianProcess(at_kernel, jnp.zeros((M, q.prior.X.shape[-1]), q.prior.X.dtype), jitter=jitter)

    def replace(symbol: str, value: Any) -> Any:
        if basis is None or not isinstance(value, AbstractInducing):
            return value
        return _WithVariables(value, at_variables, basis.covariance(symbol, value, kernel))

    read.replace = replace
    with handlers.mask(mask=False):  # a prediction: nothing is estimated
        found: Moments = family.moments(read, at_variables, q.batch_shape)
    seen = read.seen
    shared = {"kernel": kernel, "mean_function": q.prior.mean_function, "kl": q.kl, "jitter": jitter}
    if set(seen) == {"sites"} and isinstance(seen["sites"], DatumSites):
        return _dense(seen["sites"], q.batch_shape, shared)
    if basis is None or found.posterior_root is None:
        raise UnknownFamilyError(_without_process(family, site))
    m = jnp.broadcast_to(found.mean, (*q.batch_shape, M))
    own, weights = m, None
    if coefficients is not None and gamma is not None:
        # m(x) = k_xu Kuu⁻¹m(u) + (k_xγ − k_xu Kuu⁻¹K_uγ)b, whatever of the second part the family has in m(u).
        weights = coefficients.values * coefficient_units(coefficients, gamma, kernel)
        own = m - matvec(solve_lower(basis.L, basis.inducing.Kuv(kernel, gamma)), weights)
    return ProcessPosterior(
        inducing=basis.inducing,
        L=basis.L,
        a=solve_lower_transposed(basis.L, own[..., None])[..., 0],
        m=m,
        R=found.posterior_root,
        W_sqrt=None,
        mean_basis=None if weights is None else InducingMean(cast(AbstractInducing, gamma)),
        mean_weights=weights,
        batch_shape=q.batch_shape,
        **shared,
    )


def _with_table(family: Any, read: _Reader, q: SparsePosterior, table: Table) -> ProcessPosterior:
    """The mean in the weights of a table and in values u, whose covariance is that under the kernel of its features."""
    prior = q.prior
    kernel = limit_of(prior.kernel)
    limit = GaussianProcess(kernel, prior.X, jitter=cast(Any, prior.relative_jitter))
    inducing, m, S_sqrt = family.inducing_posterior(read, limit)
    L = cholesky(inducing.Kuu(kernel), prior.relative_jitter)
    basis = TableMean(prior.kernel, table, prior.X.shape[-1], whiten=not family.relevance)
    numbers, own = numbers_of(prior.kernel, table.size), m
    if isinstance(inducing, InducingPoints):
        # The weights say what u does not: their function less its interpolation from u.
        own = m - solve_lower(L, basis.mean_at(kernel, inducing.Z, numbers)[:, None])[:, 0]
    return ProcessPosterior(
        kernel=kernel,
        mean_function=prior.mean_function,
        inducing=inducing,
        L=L,
        a=solve_lower_transposed(L, own[:, None])[:, 0],
        m=m,
        R=S_sqrt.T,
        W_sqrt=None,
        mean_basis=basis,
        mean_weights=numbers,
        kl=q.kl,
        jitter=prior.relative_jitter,
        batch_shape=q.batch_shape,
    )


def _without_process(family: Any, site: str) -> str:
    return (
        f"The posterior family {type(family).__name__} of site {site!r} has no inducing variables u with a Gaussian "
        "q(u) of their own. Use the moments that `guide.posterior` gives at the inputs you want."
    )


class _Basis(NamedTuple):
    """The variables that a posterior is Gaussian in: u = f(β), or u and f(γ) where q has a block for either.

    Attributes:
        inducing: the variables.
        L: Cholesky factor of their covariance.
        num_first: how many of them are u.
    """

    inducing: AbstractInducing
    L: Array
    num_first: int

    @classmethod
    def of(cls, beta: Any, gamma: Any, kernel: Callable, jitter: ArrayLike) -> "_Basis | None":
        if not isinstance(beta, AbstractInducing):
            return None
        L = cholesky(beta.Kuu(kernel), jitter)
        if gamma is None:
            return cls(beta, L, beta.num_inducing)
        if not isinstance(beta, POINTS) or not isinstance(gamma, POINTS):
            return None
        L_vv = project_orthogonal(beta, gamma, Projection(L, L, L, L[..., 0]), kernel, beta.Z, jitter).L
        lower = jnp.swapaxes(solve_lower(L, beta.Kuv(kernel, gamma)), -1, -2)
        joint = joined(beta, gamma)
        upper = jnp.concatenate([L, jnp.zeros_like(jnp.swapaxes(lower, -1, -2))], axis=-1)
        return cls(joint, jnp.concatenate([upper, jnp.concatenate([lower, L_vv], axis=-1)], axis=-2), L.shape[-1])

    @classmethod
    def of_weights(cls, kernel: Callable, X: Array) -> "_Basis":
        finite = as_finite_rank(kernel)
        rank = jax.eval_shape(finite.features, X).shape[-1]
        variables = WeightVariables(rank, X.shape[-1])
        return cls(variables, cholesky(variables.Kuu(kernel).astype(X.dtype)), rank)

    def covariance(self, symbol: str, inducing: AbstractInducing, kernel: Callable) -> Array:
        """Covariance of one basis, by the symbol of its parameter, with the whitened variables."""
        if symbol == "inducing":
            return self.L[..., : self.num_first, :]
        if self.inducing.num_inducing > self.num_first:
            return self.L[..., self.num_first :, :]
        return jnp.swapaxes(solve_lower(self.L, self.inducing.Kuv(kernel, inducing)), -1, -2)


POINTS = InducingPoints | BoundedInducingPoints | GrowingInducing


def joined(beta: Any, gamma: Any) -> AbstractInducing:
    """The values at the inputs of two bases, as those of one."""
    Z = jnp.concatenate([beta.Z, gamma.Z], axis=-2)
    active = [
        one.active if isinstance(one, GrowingInducing) else jnp.ones(one.num_inducing, Z.dtype) for one in (beta, gamma)
    ]
    if not any(isinstance(one, GrowingInducing) for one in (beta, gamma)):
        return InducingPoints(Z)
    return GrowingInducing(Z, jnp.zeros_like(Z), jnp.concatenate(active), 0)


class _WhitenedWeights:
    """A kernel whose process, at as many inputs as it has weights w, is v = L_Sᵀw: the posterior there is q(v)."""

    def __init__(self, kernel: Callable, L: Array) -> None:
        self.correlated_weights = has_correlated_weights(as_finite_rank(kernel))
        self.L = L

    def __call__(self, X: Array, Z: Array | None = None) -> Array:
        batch, M = self.L.shape[:-2], self.L.shape[-1]
        return (
            jnp.ones((*batch, M), X.dtype) if Z is None else jnp.broadcast_to(jnp.eye(M, dtype=X.dtype), self.L.shape)
        )

    def features(self, X: Array, index: Array | None = None) -> Array:
        del X, index
        return jnp.swapaxes(self.L, -1, -2)

    def prior_precision(self, index: Array | None = None) -> Array:
        del index
        return matmul(self.L, jnp.swapaxes(self.L, -1, -2)) if self.correlated_weights else diagonal(self.L) ** 2


def _dense(sites: DatumSites, batch_shape: tuple[int, ...], shared: dict[str, Any]) -> ProcessPosterior:
    inducing = InducingPoints(sites.fixed_X)
    K = inducing.Kuu(shared["kernel"])
    L, _, a, W_sqrt = dense_weights(sites.lambda1, sites.Lambda2, K)
    return ProcessPosterior(
        inducing=inducing,
        L=L,
        a=a,
        m=None,
        R=None,
        W_sqrt=W_sqrt,
        mean_basis=None,
        mean_weights=None,
        batch_shape=batch_shape,
        **shared,
    )


def process_posterior(
    guide: Guide, rng_key: Array, params: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, ProcessPosterior]:
    """The posterior of each GP site, factorised once, to be evaluated at many batches of inputs.

    Args:
        guide: a sparse guide.
        rng_key: draws the hyperparameters, where the base guide is random.
        params: fitted parameters.
        args: arguments of the model; the rows in them do not matter.
        kwargs: keyword arguments of the model.

    Returns:
        By site name: `.posterior(X_new)`, given one draw of the hyperparameters.

    Raises:
        TypeError: a posterior family without inducing variables.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> import numpyro_sgp as sgp
        >>> from numpyro_sgp.process import process_posterior
        >>> def model(X, y=None):
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(1.0), X))
        ...     numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
        >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
        >>> guide = sgp.AutoSVGP(model, X[::2])
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), sgp.QuadratureELBO())
        >>> params = svi.run(jax.random.key(0), 3, X, X[:, 0], progress_bar=False).params
        >>> f = process_posterior(guide, jax.random.key(1), params, X)["f"]
        >>> f.posterior(X[:3]).mean.shape, f.posterior(X[:2]).variance.shape
        ((3,), (2,))
    """
    posteriors = guide.posterior(rng_key, params, *args, **kwargs)
    return {site: process_of(guide, params, site, q) for site, q in posteriors.items()}
