"""Where a base guide starts: at what was observed of a latent, near the prior median elsewhere.

The weights of a network with priors are the exception: they start at a draw of them.
"""

from collections.abc import Callable, Collection, Mapping
import math
from typing import Any, cast

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.special import polygamma
import numpy as np
import numpyro
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import AffineTransform, ExpTransform, PowerTransform
from numpyro.infer.initialization import init_to_uniform

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp._internal.linear_predictors import traced
from numpyro_sgp.distributions.traces import Trace
from numpyro_sgp.distributions.wrappers import entry_mask, is_real, unwrap
from numpyro_sgp.guides.handlers import GivenGaussianProcesses, UnchangedState
from numpyro_sgp.guides.model_runs import again, first_run

__all__ = ["observed_values", "starting_values"]

# In prior standard deviations, or in units of the unconstrained latent where these are wider; that of the median of 15
# draws, which is NumPyro's `init_to_median`. At the median itself latents may be all alike, or zero, where the gradient
# of a model that is symmetric in them (a GPLVM, factors and loadings) is zero but for rounding.
_DISTANCE = 0.3
# A network whose weights are all small learns nothing at first, and its prior then wins.
_DISTANCE_OF_WEIGHTS = 1.0
_OF_NETWORK = "$params"  # in the name of a network's parameter
# A positive latent, say, whose logarithm has a larger standard deviation has no scale that the prior knows.
_VAGUE = 20.0
# Medians without a formula are those of draws: fewer for a latent with many numbers.
_MOST_DRAWS, _FEWEST_DRAWS, _MOST_NUMBERS = 1001, 15, 100_000

_WITH_QUANTILES = (
    dist.Cauchy,
    dist.Exponential,
    dist.Gumbel,
    dist.HalfCauchy,
    dist.HalfNormal,
    dist.Laplace,
    dist.Logistic,
    dist.Normal,
    dist.Uniform,
)
_TRUNCATED = (
    dist.LeftTruncatedDistribution,
    dist.RightTruncatedDistribution,
    dist.TwoSidedTruncatedDistribution,
)
# They keep the order of numbers, or reverse it.
_MONOTONE = (AffineTransform, ExpTransform, PowerTransform)


def starting_values(model: Callable[[], Any], given: Mapping[str, Array], rng_key: Array) -> dict[str, Array]:
    """Where the continuous latents of a model start: near their prior medians, given those of their parents.

    Args:
        model: with its arguments given, and no GP sites to be sampled.
        given: values of latents, by name. Where they are NaN, or outside the support, the prior counts.
        rng_key: moves each number away from its median, by 0.3 prior standard deviations or so.
    """

    # One program, with parameters at their initial values: nothing of it is to be seen outside.
    def run(rng_key: Array) -> dict[str, Array]:
        networks: list[str] = []

        def near_median(site: dict[str, Any]) -> Any:
            if site["type"] == "param" and site["name"].endswith(_OF_NETWORK):
                networks.append(f"{site['name'].removesuffix(_OF_NETWORK)}/")
            if not _is_continuous(site) or site["value"] is not None:
                return None
            # `random_flax_module` and the like prefix the names of weights with that of their network.
            is_weight = site["name"].startswith(tuple(networks))
            return _near_median(site, given, _DISTANCE_OF_WEIGHTS if is_weight else _DISTANCE)

        start = handlers.substitute(substitute_fn=near_median)
        with numpyro.validation_enabled(False), handlers.block(), UnchangedState(), handlers.trace() as trace, start:
            handlers.seed(model, rng_seed=rng_key)()
        return {name: site["value"] for name, site in trace.items() if _is_continuous(site)}

    return as_one_program(run)(rng_key)


def _is_continuous(site: Mapping[str, Any]) -> bool:
    """Whether a site is a continuous latent."""
    if site["type"] != "sample" or site["is_observed"]:
        return False
    support = site["fn"].support
    return support is not None and not support.is_discrete


def _near_median(site: dict[str, Any], given: Mapping[str, Array], distance: float) -> Any:
    fn = site["fn"]
    of_prior, of_noise = jax.random.split(site["kwargs"]["rng_key"])
    shape = (*site["kwargs"].get("sample_shape", ()), *fn.shape())
    try:
        transform = cast(Any, biject_to(fn.support))
        median, spread = _of_prior(fn, transform, shape, of_prior)
    except NotImplementedError:  # an improper prior, or a support without a transform, of which NumPyro says more
        return init_to_uniform(site)
    noise = jax.random.normal(of_noise, jnp.shape(median), jnp.result_type(median))
    w = median + distance * jnp.minimum(spread, 1.0) * noise
    if site["name"] in given:
        observed = transform.inv(given[site["name"]])
        w = jnp.where(jnp.isfinite(observed), observed, w)
    return transform(w)


def _of_prior(fn: Any, transform: Any, shape: tuple[int, ...], rng_key: Array) -> tuple[Array, Array]:
    """Median and standard deviation of each number of a latent where it is unconstrained."""
    median, above = (_quantile(unwrap(fn), z) for z in (0.0, 1.0))
    if median is not None and above is not None:
        median, above = (transform.inv(jnp.broadcast_to(each, shape)) for each in (median, above))
        spread = jnp.abs(above - median)
    else:
        num_draws = min(max(_FEWEST_DRAWS, _MOST_NUMBERS // max(math.prod(shape), 1)), _MOST_DRAWS)
        sample_shape = shape[: len(shape) - len(fn.shape())]
        draws = transform.inv(fn.sample(rng_key, (num_draws, *sample_shape)))
        median, spread = jnp.median(draws, axis=0), jnp.std(draws, axis=0)
    return (median if is_real(fn.support) else jnp.where(spread < _VAGUE, median, 0.0)), spread


def _quantile(fn: Any, z: float) -> Any:
    """Where a univariate distribution is as a Gaussian z standard deviations above its median, or below it.

    None where there is no formula, and a number is to be drawn: that of a gamma variable takes long to compile.
    """
    if isinstance(fn, dist.TransformedDistribution) and all(isinstance(each, _MONOTONE) for each in fn.transforms):
        value = _quantile(unwrap(fn.base_dist), z)
        for each in fn.transforms if value is not None else ():
            value = each(value)
        return value
    match fn:
        case dist.Gamma(concentration=a, rate=rate):
            return jnp.exp(_of_logarithm(z, a)) / cast(Any, rate)
        case dist.Beta(concentration1=a, concentration0=b):
            return jax.nn.sigmoid(_of_logarithm(z, a, b))
        case dist.StudentT(loc=loc, scale=scale):
            return cast(Any, loc) + z * cast(Any, scale)
    untruncated = fn.base_dist if isinstance(fn, _TRUNCATED) else fn
    return fn.icdf(jax.scipy.stats.norm.cdf(z)) if isinstance(untruncated, _WITH_QUANTILES) else None


def _of_logarithm(z: float, concentration: Any, other: Any = None) -> Any:
    """Where the logarithm of a gamma variable, or of the ratio of two, is z standard deviations above its median.

    From its cumulants, by the first terms of the Cornish-Fisher expansion: within 0.04 standard deviations.
    """
    signs = ((jnp.asarray(concentration), 1.0),) + (() if other is None else ((jnp.asarray(other), -1.0),))
    mean, third = (sum(sign * polygamma(order, a) for a, sign in signs) for order in (0, 2))
    variance = sum(polygamma(1, a) for a, _ in signs)
    return mean - third / (6.0 * variance) + z * jnp.sqrt(variance)


def observed_values(model: Callable[[], Any], latents: Collection[str]) -> dict[str, Array]:
    """What was observed of latents that are the location of an observed site, as that of a measurement with error.

    The location may have the latent's numbers in any order and more than once, or some of them.

    Args:
        model: with its arguments given.
        latents: names of latents that are no GP sites.

    Returns:
        By latent its mean observation, NaN where a number was not observed.
    """
    trace = first_run(model, GivenGaussianProcesses(0.0))
    whole = {name: jnp.asarray(trace[name]["value"]) for name in latents if name in trace and _is_whole(name, trace)}
    measured = {name: found for name, site in trace.items() if (found := _measurement(site)) is not None}
    if not whole or not measured:
        return {}

    def locations(values: dict[str, Array]) -> dict[str, Array]:
        found = again(model, trace, values)
        return {
            name: jnp.broadcast_to(_inner(found[name]["fn"]).loc, value.shape) for name, (value, _) in measured.items()
        }

    program = traced(locations, whole)
    totals: dict[str, list[tuple[Array, Array]]] = {}
    for name, (value, counts) in measured.items():
        latent = program.copied(name)
        if latent is None:
            continue

        def copies(x: Array, latent: str = latent, name: str = name) -> Array:
            return program.evaluate([program.outputs[name]], {latent: x})[0]

        def total(value: Array, counts: Array, copies: Callable = copies, start: Array = whole[latent]) -> Any:
            _, pull = jax.vjp(copies, start)
            return tuple(pull(each.astype(start.dtype))[0] for each in (jnp.where(counts, value, 0.0), counts))

        totals.setdefault(latent, []).append(as_one_program(total)(value, counts))
    sums = {name: jax.tree.map(lambda *each: sum(each), *found) for name, found in totals.items()}
    return {name: total / count for name, (total, count) in sums.items()}  # 0 / 0 is NaN


def _is_whole(name: str, trace: Trace) -> bool:
    """Whether a continuous latent has all its numbers in each run of the model."""
    site = trace[name]
    if site.get("_control_flow_done") or not _is_continuous(site):
        return False
    sizes = {msg["name"]: msg["args"][0] for msg in trace.values() if msg["type"] == "plate"}
    return all(sizes.get(frame.name, frame.size) == frame.size for frame in site["cond_indep_stack"])


def _inner(fn: Any) -> Any:
    """The distribution under monotone transforms, as the Normal of a LogNormal."""
    fn = unwrap(fn)
    while isinstance(fn, dist.TransformedDistribution):
        fn = unwrap(fn.base_dist)
    return fn


def _measurement(site: dict[str, Any]) -> tuple[Array, Array] | None:
    """Outcomes in units of the location of their distribution, and which of them count; None where it has none."""
    if site["type"] != "sample" or not site["is_observed"] or site.get("_control_flow_done"):
        return None
    fn, value = unwrap(site["fn"]), jnp.asarray(site["value"])
    while isinstance(fn, dist.TransformedDistribution):
        if not all(isinstance(each, _MONOTONE) for each in fn.transforms):
            return None
        for each in reversed(fn.transforms):
            value = jnp.asarray(each.inv(value))
        fn = unwrap(fn.base_dist)
    if "loc" not in fn.arg_constraints or not is_real(fn.support):
        return None
    try:
        shape = np.broadcast_shapes(value.shape, site["fn"].shape())
    except ValueError:
        return None  # the density says so itself
    value = jnp.broadcast_to(value, shape)
    return value, entry_mask(site["fn"]) & jnp.isfinite(value)
