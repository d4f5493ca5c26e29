"""Which latents are added to GP sites, as intercepts, coefficients and effects of groups are."""

from collections.abc import Callable, Collection
import functools
from typing import Any, cast

import jax
from jax import Array
import jax.numpy as jnp
from numpyro import handlers

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.traces import Trace, scaled_log_prob
from numpyro_sgp.distributions.wrappers import is_real, unwrap
from numpyro_sgp.guides.handlers import GivenGaussianProcesses
from numpyro_sgp.guides.model_runs import again, first_run
from numpyro_sgp.guides.starts import starting_values

__all__ = ["added_latents"]


def added_latents(model: Callable[[], Any], latents: Collection[str], rng_key: Array) -> set[str]:
    """Those of some latents that are added to GP sites, and the means of their priors.

    A latent on the real line is if the terms depend on it where all GP sites are zero, or if a prior mean does. Any
    other one must move a GP site in all terms that have it, or another such latent in its prior.

    Args:
        model: with its arguments given.
        latents: names of continuous latents.
        rng_key: of values near the prior medians.
    """
    start = _start(model, rng_key)
    found = _with_slopes(model, latents, start)
    targets: set[str] | None = None
    while (targets is None or targets) and (left := set(latents) - found):
        moving = _moving(model, left, found if targets is None else targets, start)
        targets, found = moving, found | moving
    return found


def _start(model: Callable[[], Any], rng_key: Array) -> dict[str, Array]:
    """Values of the latents near their prior medians."""

    def without_processes() -> None:
        with GivenGaussianProcesses(0.0):
            model()

    return starting_values(without_processes, {}, rng_key)


def _run(model: Callable[[], Any], start: dict[str, Array]) -> tuple[Trace, dict[str, GaussianProcess]]:
    """A run of the model with GP sites at zero and latents at given values, and its GP sites."""
    given = GivenGaussianProcesses(0.0)
    return first_run(model, handlers.substitute(data=start), given), given.priors


def _with_slopes(model: Callable[[], Any], latents: Collection[str], start: dict[str, Array]) -> set[str]:
    """Latents on the real line that the terms depend on where all GP sites are zero, or that a prior mean does."""

    @jax.jit
    def depends(start: dict[str, Array]) -> dict[str, Array]:
        trace, priors = _run(model, start)
        w = {name: trace[name]["value"] for name in latents if is_real(trace[name]["fn"].support)}

        def log_density(w: dict[str, Array]) -> Array:
            sites = {name: site for name, site in again(model, trace, w).items() if site["type"] == "sample"}
            means = [cast(Any, unwrap(sites[name]["fn"])).prior_mean for name in priors]
            terms = [scaled_log_prob(site) for site in sites.values() if site["is_observed"]]
            # (A trend about the mean of its rows has the sum zero.)
            terms += [mean * jnp.arange(1.0, 1.0 + mean.shape[-1]) for mean in means]
            return sum((jnp.sum(term) for term in terms), jnp.zeros(()))

        # (Where one is not finite, there is one.)
        return {name: jnp.any(gradient != 0.0) for name, gradient in jax.grad(log_density)(w).items()}

    return {name for name, each in depends(start).items() if each}


def _moving(
    model: Callable[[], Any], latents: Collection[str], targets: Collection[str], start: dict[str, Array]
) -> set[str]:
    """Those of some latents that move a GP site in the terms, or a target in its prior, and do nothing else there.

    That is, ∂log p/∂w = c ∂log p/∂f in each term, with the same c at any f.
    """

    @jax.jit
    def facts(start: dict[str, Array]) -> dict[str, Array]:
        trace, priors = _run(model, start)
        own = {name: trace[name]["value"] for name in (*latents, *targets)}

        def log_densities(values: dict[str, Array]) -> dict[str, Array]:
            f = {name: values[name] for name in priors}
            run = again(model, trace, {name: values[name] for name in own}, f)
            samples = {name: site for name, site in run.items() if site["type"] == "sample" and name not in priors}
            return {name: jnp.ravel(scaled_log_prob(site)) for name, site in samples.items()}

        observed = [name for name, site in trace.items() if site["type"] == "sample" and site["is_observed"]]

        def slopes(frequency: Array) -> dict[str, dict[str, Array]]:
            """Along two directions of each, where f and the targets are somewhere."""
            values = {name: _wave(trace[name]["value"], frequency) for name in priors}
            values = {**own, **values, **{name: own[name] + _wave(own[name], frequency) for name in targets}}

            def slope(name: str, direction: Array) -> dict[str, Array]:
                found = jax.jvp(lambda x: log_densities({**values, name: x}), (values[name],), (direction,))[1]
                return {**found, "terms": jnp.concatenate([found[term] for term in observed])}

            ways = {name: jnp.stack([jnp.ones_like(value), _wave(value, 0.5)]) for name, value in values.items()}
            return {name: jax.vmap(functools.partial(slope, name))(each) for name, each in ways.items()}

        found = jax.vmap(slopes)(jnp.asarray([0.7, 1.3]))  # (places, directions, terms)

        def moves(name: str, target: str) -> list[Array]:
            site = "terms" if target in priors else target
            first, second = found[name][site], found[target][site]
            return [_alike(first[0, n] * second[1, m], first[1, n] * second[0, m]) for n in range(2) for m in range(2)]

        every = (*priors, *targets)
        return {name: jnp.any(jnp.stack([x for target in every for x in moves(name, target)])) for name in latents}

    return {name for name, each in facts(start).items() if each}


def _wave(like: Array, frequency: float | Array) -> Array:
    """Some array of the same shape."""
    return jnp.cos(frequency * jnp.arange(jnp.size(like))).astype(like.dtype).reshape(jnp.shape(like))


def _alike(x: Array, y: Array) -> Array:
    """Whether two arrays are the same but for rounding, and not zero."""
    size = jnp.max(jnp.abs(x) + jnp.abs(y))
    return (size > 0.0) & (jnp.max(jnp.abs(x - y)) <= jnp.sqrt(jnp.finfo(x.dtype).eps) * size)
