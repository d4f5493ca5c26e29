"""Losses that estimate the negative log marginal likelihood from minibatches.

Each is less the log density of the other latents at their point estimates (type-II maximum a posteriori).
"""

from collections.abc import Callable
from typing import Any, Literal, cast
import warnings

import jax
from jax import Array
import jax.numpy as jnp
from numpyro.infer.elbo import ELBO

from numpyro_sgp.losses.regression_model import Regression, read_regression
from numpyro_sgp.math.marginal_likelihood import (
    batch_matrix,
    dense_log_evidence,
    evidence_bound,
    log_evidence,
    minimax_objective,
)
from numpyro_sgp.posteriors.process import Guide
from numpyro_sgp.posteriors.sites import AbstractSites
from numpyro_sgp.posteriors.weight_space.adversary import adversary_of
from numpyro_sgp.posteriors.weight_space.families import AdversarialWeights

__all__ = ["BatchMarginalLikelihood", "CompositionalMarginalLikelihood", "MinimaxMarginalLikelihood"]


class _MarginalLikelihood(ELBO):
    """What the losses share: a value and its gradient in one pass, one particle."""

    parametrization: str | None = None

    def __init__(self, num_particles: int = 1) -> None:
        if num_particles != 1:
            msg = f"`num_particles` must be 1, got {num_particles!r}: nothing is drawn here. Leave it out."
            raise ValueError(msg)
        super().__init__(num_particles=1)

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict[str, Any], model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """The loss and the new mutable state; see `numpyro.infer.elbo.ELBO`."""
        name = type(self).__name__
        if not callable(getattr(guide, "family", None)):
            msg = f"`{name}` needs a sparse guide, such as `AutoWeightSpaceGP`, got {type(guide).__name__}."
            raise TypeError(msg)

        # The loss does not depend on natural parameters, whose gradient is zero: no reason for the guide to warn.
        param_map = {
            name: jax.lax.stop_gradient(value) if isinstance(value, AbstractSites) else value
            for name, value in param_map.items()
        }
        data = read_regression(rng_key, param_map, model, cast(Any, guide), args, kwargs, name, self.parametrization)
        loss, state = self._evaluate(data, cast(Any, guide))
        return {"loss": loss, "mutable_state": state or None}

    def _evaluate(self, data: Regression, guide: Guide) -> tuple[Array, dict[str, Any]]:
        raise NotImplementedError


class CompositionalMarginalLikelihood(_MarginalLikelihood):
    """Stochastic compositional gradients of the marginal likelihood: log|F| through an average F̃ of F over batches.

    F = AAᵀ + σ²I is the matrix of all data, and F̃ ← (1 − b) F̃ + b F_batch after each step. The value is an unbiased
    estimate of `evidence_bound`, an upper bound of minus the log evidence, at the F̃ before the step, and its gradient
    is the direction of the paper. F̃ is mutable state: pass `{**result.params, **result.state.mutable_state}` where
    parameters are asked for. A step whose loss or matrix is not finite leaves it as it is.

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
        if not 0.0 < first <= 1.0:
            msg = f"`decay` must lie in (0, 1], got {first!r}. 0.05 is a good start, or `lambda t: t ** -0.5`."
            raise ValueError(msg)
        self.decay = decay
        super().__init__(num_particles)

    def _evaluate(self, data: Regression, guide: Guide) -> tuple[Array, dict[str, Any]]:
        name = f"{data.site}_{guide.prefix}_average"
        old, A, noise, scale = data.mutable_state[name], data.A, data.noise, data.scale
        F = jnp.broadcast_to(batch_matrix(A, noise, scale), old["F"].shape)
        # Before the first average there is none: a multiple of the identity of the right size.
        isotropic = jnp.mean(jnp.diagonal(F, axis1=-2, axis2=-1), axis=-1)[..., None, None] * jnp.eye(A.shape[-2])
        average = jax.lax.stop_gradient(jnp.where(old["step"] == 0, isotropic.astype(F.dtype), old["F"]))
        loss = data.objective(evidence_bound(data.parameter(guide, "m"), average, A, data.residual, noise, scale))
        b = jnp.asarray(self.decay(old["step"] + 1) if callable(self.decay) else self.decay, F.dtype)
        new = {
            "F": (1.0 - b) * average + b * F,
            "noise": jnp.broadcast_to(noise, old["noise"].shape),
            "step": old["step"] + 1,
        }
        accepted = jnp.isfinite(loss) & jnp.isfinite(new["F"]).all() & jnp.isfinite(new["noise"]).all()
        kept = jax.tree.map(lambda new, old: jnp.where(accepted, new, old).astype(old.dtype), new, old)
        return loss, {**data.mutable_state, name: jax.lax.stop_gradient(kept)}


class MinimaxMarginalLikelihood(_MarginalLikelihood):
    """The marginal likelihood as a minimax problem: a matrix in the place of F, held to it by a player that maximises.

    The value is an unbiased estimate of ½ Ψ on batches; see `minimax_objective`. For the guide
    `AutoWeightSpaceGP(model, parametrization="adversarial", base=AutoDelta)`, the optimizer `DescentAscent`, and a
    normal likelihood. Any other optimizer leaves the maximising player where it starts: with the default form and
    penalty that is the bound of `parametrization="root"`.

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
                "The printed penalty has its minimum at that of the evidence only for μ ≥ |F| |F⁻¹|, the rank or more. "
                f'Here μ = {1.0 if penalty is None else penalty}. Use form="whitened".',
                UserWarning,
                stacklevel=2,
            )
        self.form = form
        self.penalty = penalty
        super().__init__(num_particles)

    def _evaluate(self, data: Regression, guide: Guide) -> tuple[Array, dict[str, Any]]:
        scale = cast(AdversarialWeights, guide.family(data.site)).root_scale
        A, R = data.A, scale * jnp.tril(data.parameter(guide, "R"))
        r = A.shape[-2]
        penalty = (1.2 * r**0.5 if self.form == "whitened" else 1.0) if self.penalty is None else self.penalty
        if self.form == "whitened" and penalty < r**0.5:
            warnings.warn(
                f"μ = {penalty} is below the root of the rank, √{r} = {r**0.5:.3g}, so the minimum is not that of the "
                "evidence. Leave `penalty` out.",
                UserWarning,
                stacklevel=2,
            )
        B = adversary_of(data.parameter(guide, "B"))
        m = data.parameter(guide, "m")
        loss = minimax_objective(m, R, B, A, data.residual, data.noise, data.scale, penalty, self.form)
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

    def _evaluate(self, data: Regression, guide: Guide) -> tuple[Array, dict[str, Any]]:
        prior = data.q.prior
        if guide.family(data.site).over_weights:
            evidence = log_evidence(data.A, data.residual, data.noise)
        else:
            evidence = dense_log_evidence(prior.kernel(prior.X, prior.X), data.residual, data.noise)
        batch_shape = data.q.batch_shape
        return data.objective(-data.scale * jnp.broadcast_to(evidence, batch_shape)), data.mutable_state
