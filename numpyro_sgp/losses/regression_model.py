"""Read a model as a regression with one GP and one noise scale, or raise with the reason why it is none."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp
from numpyro import distributions as dist
from numpyro import handlers

from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace, posteriors_of
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.posteriors.moments import roots_of
from numpyro_sgp.posteriors.process import Guide

__all__ = ["Regression", "read_regression"]


class Regression(NamedTuple):
    """The parts of a regression model at a minibatch.

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
        return roots_of(self.q.moments).A

    def objective(self, loss: Array) -> Array:
        """Minus the evidence of all latents, or a bound on it, as the value of the loss."""
        return self.weight * jnp.sum(loss) - self.log_prior

    def parameter(self, guide: Guide, symbol: str) -> Any:
        """The value of one of the site's parameters."""
        return self.guide_trace[f"{self.site}_{guide.prefix}_{symbol}"]["value"]


def read_regression(
    rng_key: Array,
    params: Mapping[str, Any],
    model: Callable,
    guide: Guide,
    args: tuple,
    kwargs: dict,
    loss: str,
    parametrization: str | None,
) -> Regression:
    """Run guide and model, and return the parts of the regression; raises if it is none."""
    key_model, key_guide = jax.random.split(rng_key)
    seeded = handlers.substitute(handlers.seed(cast(Any, guide), key_guide), data=dict(params))
    guide_trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    posteriors = posteriors_of(guide_trace)
    if len(posteriors) != 1:
        msg = f"`{loss}` is for models with one GP site, got {sorted(posteriors)}. Use `QuadratureELBO`."
        raise ValueError(msg)
    ((site, q),) = posteriors.items()
    family = guide.family(site)
    if parametrization is not None and getattr(family, "parametrization", None) != parametrization:
        msg = f'`{loss}` needs the guide `AutoWeightSpaceGP(model, parametrization="{parametrization}")`, got {family}.'
        raise TypeError(msg)
    drawn = sorted(
        name
        for name, found in guide_trace.items()
        if found["type"] == "sample" and name != site and not isinstance(unwrap(found["fn"]), dist.Delta)
    )
    if drawn:
        msg = f"`{loss}` needs point estimates, but the guide draws {drawn}. Pass `base=AutoDelta`."
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
    program = jax.make_jaxpr(lambda f: cast(Any, unwrap(run(f)[name]["fn"])).loc)(mean).jaxpr
    if len(program.outvars) != 1 or program.outvars[0] is not program.invars[0]:
        msg = (
            f"`{loss}` needs `Normal(f, noise)` with the values f of the GP site as they are, but the mean of {name!r} "
            "is computed from them. Put scales and shifts into the kernel and the prior mean, or use `QuadratureELBO`."
        )
        raise ValueError(msg)
    noise = jnp.asarray(normal.scale, mean.dtype)
    if noise.ndim and noise.shape[-1] != 1:
        msg = f"`{loss}` needs one noise scale for all rows, got shape {noise.shape}. Use `QuadratureELBO`."
        raise ValueError(msg)
    residual = model_trace[name]["value"] - q.prior.prior_mean
    batch = jnp.broadcast_shapes(residual.shape[:-1], noise.shape[:-1] if noise.ndim else (), q.batch_shape)
    if batch != q.batch_shape:
        msg = (
            f"`{loss}` needs one outcome at each row for each latent, got outcomes of batch shape {batch} for "
            f"latents of {q.batch_shape}. Use `QuadratureELBO`."
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
    return Regression(
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
        msg = f"`{loss}` needs one observed site, got {observed}. Use `QuadratureELBO` where there are several."
        raise ValueError(msg)
    (name,) = observed
    normal = unwrap(trace[name]["fn"])
    if not isinstance(normal, dist.Normal):
        msg = f"`{loss}` needs a normal likelihood, got {type(normal).__name__} at {name!r}. Use `QuadratureELBO`."
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
