"""A posterior as a process: factorised once, evaluated anywhere; and draws of whole functions from it.

With u = L v, L Lᵀ = Kuu, and q(v) = N(m, RᵀR), every posterior of the package has at inputs X the moments

    mean(X) = m_prior(X) + kᵀa,   Cov = Kff − AᵀA + TᵀT,   A = L⁻¹k,   T = R A,   a = L⁻ᵀm,   k = Cov(u, f(X)),

and by Matheron's rule a draw of the function is a draw g of the prior corrected where it is known:

    f(x) = m_prior(x) + g(x) + k(x)ᵀ w,   w = L⁻ᵀ (v − L⁻¹(g_u + ε)),   v ~ q(v),   ε ~ N(0, jitter).

The noise ε is the one that the jitter on Kuu stands for. The prior draw g is a sum of random Fourier features, fresh
frequencies for each draw; then draws have exactly the posterior's mean and covariance, whatever the number of features.

References:
    Wilson, Borovitskiy, Terenin, Mostowsky and Deisenroth (2020), "Efficiently sampling functions from Gaussian process
    posteriors", section 3; Rahimi and Recht (2007), "Random features for large-scale kernel machines", algorithm 1.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple, Protocol, cast

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.conditionals import Moments, Projection, coefficient_units, mean_at, project_orthogonal
from numpyro_sgp.conditionals.moments import moments
from numpyro_sgp.distributions import GaussianProcess, SparsePosterior
from numpyro_sgp.expansion import frequencies, phases, scale_of, split, term_features, terms, width_of
from numpyro_sgp.features import WeightVariables, as_finite_rank
from numpyro_sgp.finite_rank import has_correlated_weights
from numpyro_sgp.inducing import AbstractInducing, BoundedInducingPoints, GrowingInducing, InducingPoints, check_width
from numpyro_sgp.linalg import (
    cholesky,
    diagonal,
    matmul,
    matvec,
    matvec_transposed,
    solve_lower,
    solve_lower_transposed,
)
from numpyro_sgp.sites import DatumSites

__all__ = ["FunctionDraws", "ProcessPosterior", "process_posterior", "sample_functions"]


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


# The posterior, factorised.


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
        return self.inducing.take(index)

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
        R: root of q(v)'s covariance, S = RᵀR, (..., M, M); None for a dense posterior.
        W_sqrt: roots of the sites' precisions, (..., M); None for a sparse posterior.
        mean_inducing: a basis γ of the mean alone, or None.
        mean_weights: its coefficients, (..., M_γ), or None.
        kl: KL(q(u) ‖ p(u)), (...).
        jitter: relative to the mean prior variance.
        batch_shape: one latent for each entry.
    """

    kernel: Callable
    mean_function: Any
    inducing: AbstractInducing
    L: Array
    a: Array
    R: Array | None
    W_sqrt: Array | None
    mean_inducing: AbstractInducing | None
    mean_weights: Array | None
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
        prior = GaussianProcess(self.kernel, X_new, self.mean_function, jitter=cast(Any, self.jitter))
        if self.inducing.width != prior.X.shape[-1]:
            msg = (
                f"`X_new` has shape {prior.X.shape}, but this GP has inputs of {self.inducing.width} columns. "
                "Give the inputs of the GP site itself, (N_new, D)."
            )
            raise ValueError(msg)
        return prior

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
        if self.mean_inducing is not None:
            assert self.mean_weights is not None
            mean = mean + mean_at(prior.kernel, prior.X, self.mean_inducing, self.mean_weights)
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
    found: Moments = family.moments(read, at_variables, q.batch_shape)
    seen = read.seen
    shared = {"kernel": kernel, "mean_function": q.prior.mean_function, "kl": q.kl, "jitter": jitter}
    if set(seen) == {"sites"} and isinstance(seen["sites"], DatumSites):
        return _dense(seen["sites"], q.batch_shape, shared)
    if basis is None or found.posterior_root is None:
        msg = (
            f"The posterior family {type(family).__name__} of site {site!r} has no inducing variables u with a "
            "Gaussian q(u) of their own. Use the moments that `guide.posterior` gives at the inputs you want."
        )
        raise UnknownFamilyError(msg)
    m, weights = jnp.broadcast_to(found.mean, (*q.batch_shape, M)), None
    if coefficients is not None and gamma is not None:
        # m(x) = k_xu Kuu⁻¹m(u) + (k_xγ − k_xu Kuu⁻¹K_uγ)b, whatever of the second part the family has in m(u).
        weights = coefficients.values * coefficient_units(coefficients, gamma, kernel)
        m = m - matvec(solve_lower(basis.L, basis.inducing.Kuv(kernel, gamma)), weights)
    return ProcessPosterior(
        inducing=basis.inducing,
        L=basis.L,
        a=solve_lower_transposed(basis.L, m[..., None])[..., 0],
        R=found.posterior_root,
        W_sqrt=None,
        mean_inducing=None if weights is None else gamma,
        mean_weights=weights,
        batch_shape=q.batch_shape,
        **shared,
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
        if not isinstance(beta, _POINTS) or not isinstance(gamma, _POINTS):
            return None
        L_vv = project_orthogonal(beta, gamma, Projection(L, L, L, L[..., 0]), kernel, beta.Z, jitter).L
        lower = jnp.swapaxes(solve_lower(L, beta.Kuv(kernel, gamma)), -1, -2)
        joint = _joined(beta, gamma)
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


_POINTS = InducingPoints | BoundedInducingPoints | GrowingInducing


def _joined(beta: Any, gamma: Any) -> AbstractInducing:
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
    W_sqrt = jnp.sqrt(sites.Lambda2)
    L = cholesky(jnp.eye(K.shape[-1], dtype=K.dtype) + W_sqrt[..., :, None] * K * W_sqrt[..., None, :])
    half = solve_lower(L, (W_sqrt * matvec(K, sites.lambda1))[..., None])
    # α = λ₁ − W½B⁻¹W½Kλ₁, the weights of `dual_dense`.
    a = sites.lambda1 - W_sqrt * solve_lower_transposed(L, half)[..., 0]
    return ProcessPosterior(
        inducing=inducing,
        L=L,
        a=a,
        R=None,
        W_sqrt=W_sqrt,
        mean_inducing=None,
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
        >>> from numpyro_sgp.predict import process_posterior
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


# Draws of the prior, by the terms that a kernel is expanded into.


class _TermDraw(NamedTuple):
    """Random numbers of one term: frequencies of each spectral factor, (..., F, D), and weights, (..., 2F or 1, r)."""

    frequencies: tuple[Array, ...]
    weights: Array


def _draw_prior(
    kernel: Callable, rng_key: Array, num_features: int, X: Array, batch_shape: tuple[int, ...]
) -> tuple[_TermDraw, ...]:
    draws = []
    for number, term in enumerate(terms(kernel)):
        key_weights, *keys = jax.random.split(jax.random.fold_in(rng_key, number), 1 + len(term))
        spectral, finite = split(term)
        rank = jax.eval_shape(lambda X, finite=finite: term_features(finite, X), X).shape[-1]
        num = max(num_features // 2, 1)
        omega = tuple(
            frequencies(factor.kernel, key, num, width_of(factor, X), batch_shape, X.dtype)
            for factor, key in zip(spectral, keys, strict=False)
        )
        rows = 2 * num if spectral else 1
        weights = jax.random.normal(key_weights, (*batch_shape, rows, rank), X.dtype)
        draws.append(_TermDraw(omega, weights))
    return tuple(draws)


def _prior_at(kernel: Callable, draw: tuple[_TermDraw, ...], X: Array) -> Array:
    """g(X) for one draw of the prior, without its mean, (..., N); zero where all is in the weights."""
    total = 0.0
    if not draw:
        return jnp.zeros(X.shape[-2], X.dtype)
    for term, (omegas, weights) in zip(terms(kernel), draw, strict=True):
        spectral, finite = split(term)
        features = term_features(finite, X)
        if not spectral:
            total = total + jnp.sum(features * weights, axis=-1)
            continue
        phase, amplitude = 0.0, 1.0
        for factor, omega in zip(spectral, omegas, strict=True):
            phase = phase + phases(factor, X, omega)
            amplitude = amplitude * scale_of(factor)
        # A cosine and a sine of each phase: their squares sum to one, so the variance is exact for each draw.
        waves = jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], axis=-1)
        value = jnp.sum(features * matmul(waves, weights), axis=-1)
        total = total + amplitude * math.sqrt(2.0 / waves.shape[-1]) * value
    return jnp.asarray(total)


# Draws of the posterior.


class _Draw(NamedTuple):
    """One function: hyperparameters, a prior draw, the weights of its correction, (..., M), and of a mean basis."""

    kernel: Any
    mean_function: Any
    prior: tuple[_TermDraw, ...]
    w: Array
    mean_weights: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FunctionDraws:
    """Functions drawn from a posterior process: the same functions at every call, so also across calls.

    A pytree that can be an argument of `jit`, differentiated in its inputs, and pickled. Evaluation costs
    O(N_new (F + M)) a draw, F features and M inducing variables, and factorises nothing.

    Attributes:
        inducing: the inducing variables.
        mean_inducing: a basis of the mean alone, or None.
        draws: what belongs to each draw, with a leading axis.
        batch_shape: one latent for each entry.
    """

    inducing: AbstractInducing
    mean_inducing: AbstractInducing | None
    draws: Any
    batch_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def num_samples(self) -> int:
        """How many functions there are."""
        return self.draws.w.shape[0]

    def __call__(self, X_new: ArrayLike) -> Array:
        """Values of all functions, (num_samples, ..., N_new).

        Args:
            X_new: inputs of the GP site itself, (N_new, D).

        Raises:
            ValueError: inputs that are not (N_new, D).
        """
        return _evaluate(self, jnp.asarray(X_new))


def _values(functions: FunctionDraws, X_new: Array) -> Array:
    inducing, batch_shape = functions.inducing, functions.batch_shape

    def at(draw: _Draw) -> Array:
        prior = GaussianProcess(draw.kernel, X_new, draw.mean_function)
        check_width(inducing, prior.X)
        correction = matvec_transposed(inducing.Kuf(draw.kernel, prior.X), draw.w)
        if functions.mean_inducing is not None:
            correction = correction + mean_at(draw.kernel, prior.X, functions.mean_inducing, draw.mean_weights)
        value = prior.prior_mean + _prior_at(draw.kernel, draw.prior, prior.X) + correction
        return jnp.broadcast_to(value, (*batch_shape, prior.X.shape[-2]))

    return jax.lax.map(at, functions.draws)


_evaluate = jax.jit(_values)


def _function_draw(process: ProcessPosterior, rng_key: Array, num_features: int, X: Array) -> _Draw:
    inducing, L, R, W_sqrt = process.inducing, process.L, process.R, process.W_sqrt
    if isinstance(inducing, WeightVariables):
        epsilon = jax.random.normal(rng_key, (*process.batch_shape, inducing.num_inducing), process.a.dtype)
        v = matvec_transposed(cast(Array, R), epsilon)[..., None]
        w = process.a + solve_lower_transposed(L, v)[..., 0]
        return _Draw(process.kernel, process.mean_function, (), w, None)
    if not isinstance(inducing, _POINTS):
        msg = (
            f"Functions are drawn given function values at inducing inputs, got {type(inducing).__name__}. "
            "Use `InducingPoints`, or draw values with `guide.posterior(...)[site].sample(key)`."
        )
        raise TypeError(msg)
    key_prior, key_noise, key_v = jax.random.split(rng_key, 3)
    shape = (*process.batch_shape, inducing.num_inducing)
    prior = _draw_prior(process.kernel, key_prior, num_features, X, process.batch_shape)
    g = _prior_at(process.kernel, prior, inducing.Z)
    noise = jax.random.normal(key_noise, shape, g.dtype)
    if W_sqrt is None:
        scale = process.jitter * jnp.mean(diagonal(inducing.Kuu(process.kernel)), axis=-1)
        v_prior = solve_lower(L, (g + jnp.sqrt(scale)[..., None] * noise)[..., None])
        epsilon = jax.random.normal(key_v, shape, g.dtype)
        # a carries the mean of v.
        v = matvec_transposed(cast(Array, R), epsilon)[..., None]
        w = process.a + solve_lower_transposed(L, v - v_prior)[..., 0]
        return _Draw(process.kernel, process.mean_function, prior, w, process.mean_weights)
    v_prior = solve_lower(L, (W_sqrt * g + noise)[..., None])
    w = process.a - W_sqrt * solve_lower_transposed(L, v_prior)[..., 0]
    return _Draw(process.kernel, process.mean_function, prior, w, None)


def sample_functions(
    guide: Guide,
    rng_key: Array,
    params: Mapping[str, Any],
    *args: Any,
    num_samples: int,
    num_features: int = 1024,
    **kwargs: Any,
) -> dict[str, FunctionDraws]:
    """Functions drawn from the posterior of each GP site, consistent across calls.

    Each function has its own draw of the hyperparameters from the base guide, its own draw of u, and its own random
    features of the prior: mean and covariance over draws are those of the posterior, while the shape of a single
    function far from the data is that of `num_features` random waves. Kernels: the stationary ones, `Periodic`,
    `Constant`, `Linear`, `Polynomial`, their sums and products, and `Warp` and `Select` of them.

    Args:
        guide: a sparse guide.
        rng_key: a key.
        params: fitted parameters.
        args: arguments of the model; the rows in them do not matter.
        num_samples: S, the number of functions.
        num_features: random Fourier features of each term of the kernel; more make single functions closer to a GP.
        kwargs: keyword arguments of the model.

    Returns:
        By site name f with `f(X_new)` of shape (S, ..., N_new), X_new inputs of that site, (N_new, D). Entry s of all
        sites has the same hyperparameters.

    Raises:
        TypeError: a kernel without a known spectral density; a posterior family without inducing variables.
        ValueError: a prior mean given as an array; a kernel or mean that closes over values of the model's run.

    References:
        Wilson et al. (2020), "Efficiently sampling functions from Gaussian process posteriors", equations 12 and 13.
    """
    for name, value in (("num_samples", num_samples), ("num_features", num_features)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            msg = f"`{name}` must be a positive integer, got {value!r}."
            raise ValueError(msg)

    def processes(key: Array) -> dict[str, tuple[ProcessPosterior, Array]]:
        posteriors = guide.posterior(key, params, *args, **kwargs)
        for q in posteriors.values():
            list(terms(q.prior.kernel))  # an unknown kernel raises here
        return {site: (process_of(guide, params, site, q), q.prior.X) for site, q in posteriors.items()}

    def draw(key: Array) -> dict[str, _Draw]:
        key_process, key_draw = jax.random.split(key)
        return {
            site: _function_draw(process, jax.random.fold_in(key_draw, number), num_features, X)
            for number, (site, (process, X)) in enumerate(processes(key_process).items())
        }

    like = jax.eval_shape(processes, rng_key)
    for site, (process, _) in like.items():
        if process.mean_function is None:
            msg = (
                f"The GP site {site!r} has a prior mean given as an array of values at the model's inputs, which say "
                "nothing about other inputs. Give `mean` to `GaussianProcess` as a scalar or as a function of X."
            )
            raise ValueError(msg)
    draws = jax.lax.map(draw, jax.random.split(rng_key, num_samples))
    result = {}
    for site, (process, X) in like.items():
        inducing, gamma = (params.get(f"{site}_{guide.prefix}_{symbol}") for symbol in ("inducing", "mean_inducing"))
        if isinstance(process.inducing, WeightVariables):
            inducing = process.inducing
        elif inducing is None:
            inducing = InducingPoints(params[f"{site}_{guide.prefix}_sites"].X)
        elif gamma is not None and process.mean_weights is None:
            inducing, gamma = _joined(inducing, gamma), None
        result[site] = FunctionDraws(inducing, gamma, draws[site], process.batch_shape)
        _check_evaluation(site, result[site], X)
    return result


def _check_evaluation(site: str, functions: FunctionDraws, X: Any) -> None:
    try:
        closed_over = jax.make_jaxpr(_values)(functions, jax.ShapeDtypeStruct((1, X.shape[-1]), X.dtype)).consts
        # Tracing takes whatever a function closes over; only using it tells whether its own trace is over.
        jax.tree.map(lambda value: value + 0 if isinstance(value, Tracer) else value, closed_over)
    except jax.errors.UnexpectedTracerError as error:
        msg = (
            f"The kernel or the prior mean of the GP site {site!r} is a function that closes over values of the "
            "model's run (a sampled weight, say), which are gone when the run is over. Show them to JAX: "
            "`jax.tree_util.Partial(fn, weights)` in the place of `lambda X: fn(weights, X)`."
        )
        raise ValueError(msg) from error
