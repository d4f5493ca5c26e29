"""The marginal likelihood of regression with kernels of finite rank as losses for `SVI`, on batches.

Each is minus the log evidence of `marginal_likelihood.py` in a form that batches can estimate, less the log density of
the other latents at their point estimates (type-II maximum a posteriori).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast
import warnings

import jax
from jax import Array
import jax.numpy as jnp
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.infer.elbo import ELBO

from numpyro_sgp.adversary import adversary_of
from numpyro_sgp.autoguide import AbstractAutoSparseGP
from numpyro_sgp.distributions import SparsePosterior, unwrap
from numpyro_sgp.elbo import posteriors_of
from numpyro_sgp.linalg import matmul
from numpyro_sgp.marginal_likelihood import (
    batch_matrix,
    dense_log_evidence,
    evidence_bound,
    log_evidence,
    minimax_objective,
)
from numpyro_sgp.weightspace import WeightSpace

__all__ = ["BatchMarginalLikelihood", "CompositionalMarginalLikelihood", "MinimaxMarginalLikelihood"]

Trace = dict[str, dict[str, Any]]


class _Regression(NamedTuple):
    """What a batch of a regression model says.

    Attributes:
        site: name of the GP site.
        q: its posterior in the guide.
        residual: observations less the prior mean, (..., B).
        noise: noise variance, (...).
        scale: N/B.
        weight: what the whole model is scaled by.
        log_prior: log density of the other latents at their point estimates.
        guide_trace: all that the guide said.
        mutable_state: of guide and model.
    """

    site: str
    q: SparsePosterior
    residual: Array
    noise: Array
    scale: Any
    weight: Any
    log_prior: Any
    guide_trace: Trace
    mutable_state: dict[str, Any]

    @property
    def A(self) -> Array:
        """Features of independent weights with variance one, (..., r, B)."""
        return self.q.moments.prior_root

    def objective(self, loss: Array) -> Array:
        """Minus the evidence of all latents, or a bound on it, as the value of the loss."""
        return self.weight * jnp.sum(loss) - self.log_prior

    def parameter(self, guide: AbstractAutoSparseGP, symbol: str) -> Any:
        """The value of one of the site's parameters."""
        return self.guide_trace[f"{self.site}_{guide.prefix}_{symbol}"]["value"]


def _read(
    rng_key: Array,
    params: Mapping[str, Any],
    model: Callable,
    guide: AbstractAutoSparseGP,
    args: tuple,
    kwargs: dict,
    loss: str,
    parametrization: str | None,
) -> _Regression:
    """Run guide and model, and take the regression apart; raises where it is none."""
    key_model, key_guide = jax.random.split(rng_key)
    seeded = handlers.substitute(handlers.seed(guide, key_guide), data=dict(params))
    guide_trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    posteriors = posteriors_of(guide_trace)
    if len(posteriors) != 1:
        msg = f"`{loss}` is for models with one GP site, got {sorted(posteriors)}. Use `QuadratureELBO`."
        raise ValueError(msg)
    ((site, q),) = posteriors.items()
    family = guide.family(site)
    if parametrization is not None and getattr(family, "parametrization", None) != parametrization:
        msg = (
            f'`{loss}` needs the guide `AutoWeightSpaceGP(model, parametrization="{parametrization}")`, got {family} '
            f"at {site!r}."
        )
        raise TypeError(msg)
    drawn = sorted(
        name
        for name, found in guide_trace.items()
        if found["type"] == "sample" and name != site and not isinstance(unwrap(found["fn"]), dist.Delta)
    )
    if drawn:
        msg = (
            f"`{loss}` is for point estimates of the hyperparameters, but the guide draws {drawn}. Pass "
            "`base=AutoDelta`, or use `QuadratureELBO`."
        )
        raise ValueError(msg)
    mutable = {name: found["value"] for name, found in guide_trace.items() if found["type"] == "mutable"}

    def run(value: Array) -> Trace:
        replayed = {**guide_trace, site: {**guide_trace[site], "value": value}}
        given = handlers.substitute(
            handlers.replay(handlers.seed(model, key_model), cast(Any, replayed)), data={**params, **mutable}
        )
        return handlers.trace(given).get_trace(*args, **kwargs)

    mean = q.mean
    model_trace = run(mean)
    observed = [name for name, found in model_trace.items() if found["type"] == "sample" and found["is_observed"]]
    name, normal = _only_normal(model_trace, observed, loss)
    _check_location(lambda f: cast(Any, unwrap(run(f)[name]["fn"])).loc, mean, name, loss)
    noise = jnp.asarray(normal.scale, mean.dtype)
    if noise.ndim and noise.shape[-1] != 1:
        msg = (
            f"`{loss}` needs one noise scale for all rows, got scales of shape {noise.shape} at {name!r}. Use "
            "`QuadratureELBO`, which takes one for each."
        )
        raise ValueError(msg)
    residual = model_trace[name]["value"] - q.prior.prior_mean
    batch = jnp.broadcast_shapes(residual.shape[:-1], noise.shape[:-1] if noise.ndim else (), q.batch_shape)
    if batch != q.batch_shape:
        msg = (
            f"`{loss}` needs one outcome at each row for each latent: the latents of {site!r} have batch shape "
            f"{q.batch_shape}, the outcomes {name!r} {batch}. Use `QuadratureELBO`, which takes several."
        )
        raise ValueError(msg)
    # A scale of the whole model, as of a bound for each row, scales the process too; what is left is N/B.
    of_process = model_trace[site]["scale"]
    weight: Any = 1.0 if of_process is None else of_process
    scale: Any = 1.0 if model_trace[name]["scale"] is None else model_trace[name]["scale"]
    log_prior: Any = 0.0
    for other, found in model_trace.items():
        if found["type"] == "sample" and not found["is_observed"] and other != site:
            value = jnp.sum(found["fn"].log_prob(found["value"]))
            log_prior = log_prior + (value if found["scale"] is None else found["scale"] * value)
    return _Regression(
        site,
        q,
        residual.astype(mean.dtype),
        (noise[..., 0] if noise.ndim else noise) ** 2,
        scale / weight,
        weight,
        log_prior,
        guide_trace,
        {**mutable, **{n: found["value"] for n, found in model_trace.items() if found["type"] == "mutable"}},
    )


def _only_normal(trace: Trace, observed: list[str], loss: str) -> tuple[str, Any]:
    if len(observed) != 1:
        msg = (
            f"`{loss}` needs one observed site, a normal likelihood, got {observed}. Pass the observations to the "
            "model, and use `QuadratureELBO` where there are several."
        )
        raise ValueError(msg)
    (name,) = observed
    normal = unwrap(trace[name]["fn"])
    if not isinstance(normal, dist.Normal):
        msg = (
            f"`{loss}` needs a normal likelihood, got {type(normal).__name__} at {name!r}. Use `QuadratureELBO` with "
            "`NaturalGradient`, which takes any."
        )
        raise TypeError(msg)
    if _is_masked(trace[name]["fn"]):
        msg = f"`{loss}` does not take masked observations, as those of {name!r}. Leave them out of the data."
        raise ValueError(msg)
    return name, normal


def _is_masked(fn: Any) -> bool:
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution):
        if isinstance(fn, dist.MaskedDistribution):
            return True
        fn = fn.base_dist
    return False


def _check_location(location: Callable[[Array], Array], f: Array, name: str, loss: str) -> None:
    """Raise unless the mean of the likelihood is f itself: seen in the program, not in values."""
    program = jax.make_jaxpr(location)(f).jaxpr
    if len(program.outvars) != 1 or program.outvars[0] is not program.invars[0]:
        msg = (
            f"`{loss}` needs `Normal(f, noise)` with the values f of the GP site as they are, but the mean of {name!r} "
            "is computed from them. Put scales and shifts into the kernel and the prior mean, or use `QuadratureELBO`."
        )
        raise ValueError(msg)


class _MarginalLikelihood(ELBO):
    """What the losses share: a value and its gradient in one pass, one particle."""

    parametrization: str | None = None

    def __init__(self, num_particles: int) -> None:
        if num_particles != 1:
            msg = (
                f"`num_particles` must be 1, got {num_particles!r}: nothing is drawn here, and each particle would "
                "keep a state of its own. Leave it out."
            )
            raise ValueError(msg)
        super().__init__(num_particles=1)

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict[str, Any], model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """The loss and the new mutable state; see `numpyro.infer.elbo.ELBO`."""
        name = type(self).__name__
        if not isinstance(guide, AbstractAutoSparseGP):
            msg = f"`{name}` needs a sparse guide, such as `AutoWeightSpaceGP`, got {type(guide).__name__}."
            raise TypeError(msg)

        def read(params: dict[str, Any]) -> _Regression:
            return _read(rng_key, params, model, guide, args, kwargs, name, self.parametrization)

        loss, state = self._evaluate(read, param_map, guide)
        return {"loss": loss, "mutable_state": state or None}

    def _evaluate(
        self, read: Callable[[dict[str, Any]], _Regression], params: dict[str, Any], guide: AbstractAutoSparseGP
    ) -> tuple[Array, dict[str, Any]]:
        raise NotImplementedError


class CompositionalMarginalLikelihood(_MarginalLikelihood):
    """Stochastic compositional gradients of the marginal likelihood: log|F| through an average F̃ of F over batches.

    F = AAᵀ + σ²I is the matrix of all data, and F̃ ← (1 − b) F̃ + b F_batch after each step. The value is an unbiased
    estimate of `evidence_bound`, an upper bound of minus the log evidence, at the F̃ before the step, and its gradient
    is the direction of the paper. F̃ is mutable state: pass `{**result.params, **result.state.mutable_state}` where
    parameters are asked for. A step whose loss, gradient or matrix is not finite leaves it as it is.

    For the guide `AutoWeightSpaceGP(model, parametrization="averaged", base=AutoDelta)` with any optimizer, and a
    normal likelihood. `QuadratureELBO` with `NaturalGradient` does the same with exact steps for the weights, and takes
    any likelihood.

    Args:
        decay: b in (0, 1], or a function of the number of the step, from 1 on. The paper's 0.9 is close to no average,
            and its steps are then biased on small batches.
        num_particles: 1.

    Raises:
        ValueError: `decay` outside (0, 1]; more than one particle; a model that is no regression with one GP and one
            noise scale, or hyperparameters that the guide draws (when it is evaluated).
        TypeError: another guide, or another likelihood than the normal (likewise).

    References:
        Shoham and Avron (2025), "Unbiased stochastic optimization for Gaussian processes on finite dimensional RKHS",
        section 3.2, with the scale N/B in both steps; Wang, Fang and Liu (2017), "Stochastic compositional gradient
        descent".
    """

    parametrization = "averaged"

    def __init__(self, decay: float | Callable[[Array], Any] = 0.05, num_particles: int = 1) -> None:
        first = decay(jnp.asarray(1)) if callable(decay) else decay
        try:
            in_range = bool(0.0 < first <= 1.0)
        except (TypeError, ValueError):
            in_range = False
        if not in_range:
            msg = f"`decay` must lie in (0, 1], got {first!r}. 0.05 is a good start, or `lambda t: t ** -0.5`."
            raise ValueError(msg)
        self.decay = decay
        super().__init__(num_particles)

    def _evaluate(
        self, read: Callable[[dict[str, Any]], _Regression], params: dict[str, Any], guide: AbstractAutoSparseGP
    ) -> tuple[Array, dict[str, Any]]:
        names: list[str] = []

        def value(params: dict[str, Any]) -> tuple[Array, tuple[dict[str, Any], dict[str, Any]]]:
            data = read(params)
            names[:] = [f"{data.site}_{guide.prefix}_average"]
            state, A, noise, scale = data.mutable_state[names[0]], data.A, data.noise, data.scale
            F = jnp.broadcast_to(batch_matrix(A, noise, scale), state["F"].shape)
            # Before the first average there is none: a multiple of the identity of the right size.
            isotropic = jnp.mean(jnp.diagonal(F, axis1=-2, axis2=-1), axis=-1)[..., None, None] * jnp.eye(A.shape[-2])
            average = jnp.where(state["step"] == 0, isotropic.astype(F.dtype), state["F"])
            average = jax.lax.stop_gradient(average)
            loss = evidence_bound(data.parameter(guide, "m"), average, A, data.residual, noise, scale)
            b = jnp.asarray(self.decay(state["step"] + 1) if callable(self.decay) else self.decay, F.dtype)
            new = {
                "F": (1.0 - b) * average + b * F,
                "noise": jnp.broadcast_to(noise, state["noise"].shape),
                "step": state["step"] + 1,
            }
            return data.objective(loss), (new, data.mutable_state)

        # The gradient is taken here, so that it is known before the state is decided on; what is returned has this
        # value and this gradient.
        leaves, structure = jax.tree.flatten(params)
        moving = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]

        def of_moving(values: list[Array]) -> tuple[Array, tuple[dict[str, Any], dict[str, Any]]]:
            rest = iter(values)
            return value(structure.unflatten(next(rest) if m else x for x, m in zip(leaves, moving, strict=True)))

        at = [leaf for leaf, m in zip(leaves, moving, strict=True) if m]
        (loss, (new, mutable)), gradient = jax.value_and_grad(of_moving, has_aux=True)(jax.lax.stop_gradient(at))
        finite = [jnp.isfinite(x).all() for x in (loss, *gradient, new["F"], new["noise"])]
        accepted = jnp.stack(finite).all()
        old = mutable[names[0]]
        kept = jax.tree.map(lambda new, old: jnp.where(accepted, new, old).astype(old.dtype), new, old)
        return _with_gradient(loss, gradient, at), {**mutable, names[0]: jax.lax.stop_gradient(kept)}


@jax.custom_jvp
def _with_gradient(value: Array, gradient: list[Array], at: list[Array]) -> Array:
    """A value whose gradient with respect to `at` is known."""
    del gradient, at
    return value


@_with_gradient.defjvp
def _with_gradient_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    value, gradient, _ = primals
    pairs = zip(gradient, tangents[2], strict=True)
    # Parameters of several precisions have gradients of as many.
    return value, sum((jnp.sum(g * dx).astype(value.dtype) for g, dx in pairs), start=jnp.zeros_like(value))


class MinimaxMarginalLikelihood(_MarginalLikelihood):
    """The marginal likelihood as a minimax problem: a matrix in the place of F, held to it by a player that maximises.

    The value is an unbiased estimate of ½ Ψ on batches; see `minimax_objective`. For the guide
    `AutoWeightSpaceGP(model, parametrization="adversarial", base=AutoDelta)`, the optimizer `DescentAscent`, and a
    normal likelihood. Any other optimizer leaves the maximising player where it starts, which with the default penalty
    is the bound that `parametrization="root"` has.

    Args:
        form: "whitened", the Frobenius norm of I − L⁻¹F L⁻ᵀ, whose minimum is that of the evidence when the penalty is
            √r or more; or "printed", that of Ã − F over that of Ã, which needs the condition number of F in that norm,
            r or more, and is badly conditioned there.
        penalty: μ; None for 1.2 √r ("whitened") and 1 ("printed", as the paper has it).
        num_particles: 1.

    Raises:
        ValueError: an unknown form; a penalty that is not positive; more than one particle; a model that is no
            regression with one GP and one noise scale, or hyperparameters that the guide draws (when it is evaluated).
        TypeError: another guide, or another likelihood than the normal (likewise).

    Warns:
        UserWarning: the printed form; a penalty below √r.

    References:
        Shoham and Avron (2025), "Unbiased stochastic optimization for Gaussian processes on finite dimensional RKHS",
        section 3.1; corrects its penalty, which is exact only for large μ.
    """

    parametrization = "adversarial"

    def __init__(
        self,
        form: Literal["whitened", "printed"] = "whitened",
        penalty: float | None = None,
        num_particles: int = 1,
    ) -> None:
        if form not in ("whitened", "printed"):
            msg = f"`form` must be 'whitened' or 'printed', got {form!r}. The default is 'whitened'."
            raise ValueError(msg)
        if penalty is not None and not penalty > 0.0:
            msg = f"`penalty` must be positive, got {penalty!r}. Leave it out for 1.2 times the root of the rank."
            raise ValueError(msg)
        if form == "printed":
            warnings.warn(
                "The printed penalty has its minimum at that of the evidence only for μ ≥ |F| |F⁻¹|, which is the rank "
                f"or more; here μ = {1.0 if penalty is None else penalty}. Below that it solves another problem. Use "
                'form="whitened".',
                UserWarning,
                stacklevel=2,
            )
        self.form = form
        self.penalty = penalty
        super().__init__(num_particles)

    def _evaluate(
        self, read: Callable[[dict[str, Any]], _Regression], params: dict[str, Any], guide: AbstractAutoSparseGP
    ) -> tuple[Array, dict[str, Any]]:
        data = read(params)
        scale = cast(WeightSpace, guide.family(data.site)).root_scale
        A, R = data.A, scale * jnp.tril(data.parameter(guide, "R"))
        r = A.shape[-2]
        penalty = (1.2 * r**0.5 if self.form == "whitened" else 1.0) if self.penalty is None else self.penalty
        if self.form == "whitened" and penalty < r**0.5:
            warnings.warn(
                f"μ = {penalty} is below the root of the rank, √{r} = {r**0.5:.3g}: the minimum is then not that of "
                "the evidence. Leave `penalty` out for 1.2 √r.",
                UserWarning,
                stacklevel=2,
            )
        P = jnp.eye(r, dtype=R.dtype) + matmul(R, jnp.swapaxes(R, -1, -2))
        B = adversary_of(data.parameter(guide, "B"))
        m = data.parameter(guide, "m")
        loss = minimax_objective(m, P, B, A, data.residual, data.noise, data.scale, penalty, self.form)
        return data.objective(loss), data.mutable_state


class BatchMarginalLikelihood(_MarginalLikelihood):
    """N/B times minus the log evidence of a batch alone: exact on all data, biased on batches, as a baseline.

    For a sparse guide with `base=AutoDelta`, any optimizer, and a normal likelihood; only hyperparameters are trained.
    Then let the guide's posterior follow, with hyperparameters fixed: `NaturalGradient(…, optax.set_to_zero())`.

    Args:
        num_particles: 1.

    Raises:
        ValueError: more than one particle; a model that is no regression with one GP and one noise scale, or
            hyperparameters that the guide draws (when it is evaluated).
        TypeError: no sparse guide, or another likelihood than the normal (likewise).

    References:
        Chen, Zheng, Al Kontar and Raskutti (2020), "Stochastic gradient descent in correlated settings: a study on
        Gaussian processes".
    """

    def __init__(self, num_particles: int = 1) -> None:
        super().__init__(num_particles)

    def _evaluate(
        self, read: Callable[[dict[str, Any]], _Regression], params: dict[str, Any], guide: AbstractAutoSparseGP
    ) -> tuple[Array, dict[str, Any]]:
        data = read(params)
        prior = data.q.prior
        if guide.family(data.site).over_weights:
            evidence = log_evidence(data.A, data.residual, data.noise)
        else:
            evidence = dense_log_evidence(prior.kernel(prior.X, prior.X), data.residual, data.noise)
        batch_shape = data.q.batch_shape
        return data.objective(-data.scale * jnp.broadcast_to(evidence, batch_shape)), data.mutable_state
