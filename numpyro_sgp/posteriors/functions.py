"""Draws of whole functions from a posterior.

By Matheron's rule a draw of the function is a draw g of the prior corrected where it is known:

    f(x) = m_prior(x) + g(x) + k(x)ᵀ w,   w = L⁻ᵀ (v − L⁻¹(g_u + ε)),   v ~ q(v),   ε ~ N(0, jitter),

with u = L v, L Lᵀ = Kuu and k = Cov(u, f(x)). The noise ε is the one that the jitter on Kuu stands for. The prior draw
g is a sum of random Fourier features, fresh frequencies for each draw; then draws have exactly the posterior's mean and
covariance, whatever the number of features.

References:
    Wilson, Borovitskiy, Terenin, Mostowsky and Deisenroth (2020), "Efficiently sampling functions from Gaussian process
    posteriors", section 3; Rahimi and Recht (2007), "Random features for large-scale kernel machines", algorithm 1.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple, cast

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp._internal.checks import positive
from numpyro_sgp.distributions.gaussian_process import GaussianProcess, as_rows
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.features import WeightVariables
from numpyro_sgp.features.decomposition import frequencies, phases, scale_of, split, term_features, terms, width_of
from numpyro_sgp.inducing import AbstractInducing, check_new_inputs
from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.math.linalg import diagonal, solve_lower, solve_lower_transposed
from numpyro_sgp.math.products import matmul, matvec_transposed
from numpyro_sgp.posteriors.gaussian import POINTS
from numpyro_sgp.posteriors.mean_basis import AbstractMeanBasis
from numpyro_sgp.posteriors.process import Guide, ProcessPosterior, TableProcess, drawable_of

__all__ = ["FunctionDraws", "priors", "sample_functions"]


# Draws of the prior, by the terms that a kernel is expanded into.


class _TermDraw(NamedTuple):
    """Random numbers of one term: frequencies of each spectral factor, (..., F, D), and weights, (..., 2F or 1, r)."""

    frequencies: tuple[Array, ...]
    weights: Array


def _draw_prior(
    kernel: Callable, rng_key: Array, num_features: int, like: Any, batch_shape: tuple[int, ...]
) -> tuple[_TermDraw, ...]:
    draws, X = [], cast(Array, jax.ShapeDtypeStruct((1, like.shape[-1]), like.dtype))
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


def _prior_at(kernel: Callable, draw: tuple[_TermDraw, ...], X: Any) -> Array:
    """g(X) for one draw of the prior, without its mean, (..., N); zero where all is in the weights."""
    if isinstance(X, AbstractFunctional):
        return X.apply(lambda P: _prior_at(kernel, draw, P))
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
    """One function: hyperparameters, a prior draw, the weights of its correction, (..., M), and of its own basis."""

    kernel: Any
    mean_function: Any
    prior: tuple[_TermDraw, ...]
    w: Array | None
    basis_weights: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FunctionDraws:
    """Functions drawn from a posterior process: the same functions at every call, so also across calls.

    A pytree that can be an argument of `jit`, differentiated in its inputs, and pickled. Evaluation costs
    O(N_new (F + M)) a draw, F features and M inducing variables, and factorises nothing.

    Attributes:
        inducing: the inducing variables, or None where there are none.
        basis: a basis beside them, of the mean or of all of the function, or None.
        draws: what belongs to each draw, with a leading axis.
        batch_shape: one latent for each entry.
    """

    inducing: AbstractInducing | None
    basis: AbstractMeanBasis | None
    draws: Any
    batch_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def num_samples(self) -> int:
        """How many functions there are."""
        return jax.tree.leaves(self.draws)[0].shape[0]

    def __call__(self, X_new: ArrayLike | AbstractFunctional) -> Array:
        """Values of all functions, (num_samples, ..., N_new).

        Args:
            X_new: inputs of the GP site itself, (N_new, D), or functionals, which are applied to each function.

        Raises:
            ValueError: inputs that are not (N_new, D).
        """
        return _evaluate(self, as_rows(X_new))


def _values(functions: FunctionDraws, X_new: Any) -> Array:
    if isinstance(X_new, AbstractFunctional):
        return X_new.apply(lambda P: _values(functions, P))
    inducing, batch_shape = functions.inducing, functions.batch_shape

    def at(draw: _Draw) -> Array:
        if inducing is not None:
            check_new_inputs(inducing.width, X_new)
        prior = GaussianProcess(draw.kernel, X_new, draw.mean_function)
        value = prior.prior_mean + _prior_at(draw.kernel, draw.prior, prior.X)
        if inducing is not None:
            value = value + matvec_transposed(inducing.Kuf(draw.kernel, prior.X), cast(Array, draw.w))
        if functions.basis is not None:
            value = value + functions.basis.mean_at(draw.kernel, prior.X, draw.basis_weights)
        return jnp.broadcast_to(value, (*batch_shape, prior.X.shape[-2]))

    return jax.lax.map(at, functions.draws)


_evaluate = jax.jit(_values)


def _function_draw(process: ProcessPosterior | TableProcess, rng_key: Array, num_features: int, X: Array) -> _Draw:
    if isinstance(process, TableProcess):
        return _Draw(process.kernel, process.mean_function, (), None, (process.mean_weights, rng_key))
    inducing, L, R, W_sqrt = process.inducing, process.L, process.R, process.W_sqrt
    if isinstance(inducing, WeightVariables):
        epsilon = jax.random.normal(rng_key, (*process.batch_shape, inducing.num_inducing), process.a.dtype)
        v = matvec_transposed(cast(Array, R), epsilon)[..., None]
        w = process.a + solve_lower_transposed(L, v)[..., 0]
        return _Draw(process.kernel, process.mean_function, (), w, None)
    if not isinstance(inducing, POINTS):
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


def priors(
    guide: Guide, rng_key: Array, params: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, tuple[Any, Array, Array]]:
    """The kernel of each GP site, its inputs and its prior mean there, without what a posterior there costs."""

    @jax.jit
    def of(params: Mapping[str, Any]) -> dict[str, tuple[Any, Array, Array]]:
        # Arguments as the caller gave them, so that a model may look at their values, as under `SVI.run`.
        posteriors = guide.posterior(rng_key, params, *args, **kwargs)
        return {site: (q.prior.kernel, q.prior.X, q.prior.prior_mean) for site, q in posteriors.items()}

    return of(params)


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
        positive(name, value, "The default of `num_features` is 1024.")

    def processes(key: Array, params: Mapping[str, Any], args: tuple, kwargs: dict) -> dict[str, tuple[Any, Array]]:
        posteriors = guide.posterior(key, params, *args, **kwargs)
        return {site: (_drawable(guide, params, site, q), q.prior.X) for site, q in posteriors.items()}

    def draw(key: Array) -> dict[str, _Draw]:
        key_process, key_draw = jax.random.split(key)
        return {
            site: _function_draw(process, jax.random.fold_in(key_draw, number), num_features, X)
            for number, (site, (process, X)) in enumerate(processes(key_process, params, args, kwargs).items())
        }

    @jax.jit
    def shared(params: Mapping[str, Any]) -> dict[str, tuple[FunctionDraws, Array]]:
        # What all draws have in common, whatever their hyperparameters; nothing else of a process is computed here.
        # Arguments as the caller gave them, here as in each draw.
        found = processes(rng_key, params, args, kwargs)
        return {
            site: (FunctionDraws(process.inducing, process.mean_basis, None, process.batch_shape), X[:0])
            for site, (process, X) in found.items()
        }

    functions = shared(params)
    draws = jax.lax.map(draw, jax.random.split(rng_key, num_samples))
    result = {}
    for site, (common, X) in functions.items():
        result[site] = dataclasses.replace(common, draws=draws[site])
        _check_evaluation(site, result[site], X)
    return result


def _drawable(
    guide: Guide, params: Mapping[str, Any], site: str, q: SparsePosterior
) -> ProcessPosterior | TableProcess:
    """What functions are drawn from, checked."""
    process: Any = drawable_of(guide, params, site, q, drawn=True)
    if not isinstance(process, ProcessPosterior | TableProcess):
        msg = (
            f"Functions are drawn by Matheron's rule from a dense q(u), got {type(process).__name__} at the GP site "
            f"{site!r}. Draw values with `guide.posterior(...)[{site!r}].sample(key)`."
        )
        raise TypeError(msg)
    if process.mean_function is None:
        msg = (
            f"The GP site {site!r} has a prior mean given as an array of values at the model's inputs, which say "
            "nothing about other inputs. Give `mean` to `GaussianProcess` as a scalar or as a function of X."
        )
        raise ValueError(msg)
    if isinstance(process, ProcessPosterior):
        list(terms(process.kernel))  # an unknown kernel raises here
    return process


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
