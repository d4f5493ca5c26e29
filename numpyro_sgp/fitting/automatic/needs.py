"""What the data say of f at some hyperparameters, and so how much of it inducing inputs have to explain."""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.fitting.automatic.placing import Placed, placed, precision_of_rows
from numpyro_sgp.guides.guide import AbstractAutoSparseGP

__all__ = ["Need", "inducing_of", "needs_of", "priors_at"]

# What inducing inputs may leave of the variance of f, in units of the variance with which a row tells it. With Gaussian
# noise ½ log(1 + x) nats a row are lost. As long as inducing inputs are few they lose no more than half a nat of all
# rows, so that hyperparameters stay where they are without them.
_UNEXPLAINED, _UNEXPLAINED_IN_ALL = 0.02, 1.0
_FEW_INDUCING, _FEW_OPERATIONS = 200, 1e9
# Another number of inducing inputs needs another program: so it is chosen for hyperparameters that still change, to
# leave a third of what they may.
_SPARE = 3.0


class Need(NamedTuple):
    """The prior of a GP site, and the share of its variance that inducing inputs may leave.

    Attributes:
        prior: the prior.
        tolerance: the share.
        of_few: the share as long as they are few.
        few: how many that is.
    """

    prior: GaussianProcess
    tolerance: float
    of_few: float
    few: int

    def is_met(self, num_inducing: int, unexplained: float) -> bool:
        """Whether so many inducing inputs leave no more than they may."""
        return unexplained <= (self.tolerance if num_inducing >= self.few else self.of_few)

    def chosen(self, rng_key: Array, most: int) -> Placed:
        """Rows as inducing inputs, `most` of them at most."""
        choose = functools.partial(placed, self.prior.kernel, self.prior.X, rng_key)
        one = choose(most=self.few, tolerance=self.of_few / _SPARE)
        if one.unexplained <= self.of_few:
            return one
        return choose(most=most, tolerance=self.tolerance / _SPARE, few=self.few)


def inducing_of(guide: AbstractAutoSparseGP, params: Mapping[str, Any]) -> dict[str, Any]:
    """Inducing variables, by GP site."""
    ending = f"_{guide.prefix}_inducing"
    return {name.removesuffix(ending): value for name, value in params.items() if name.endswith(ending)}


def priors_at(
    model: Callable,
    guide: AbstractAutoSparseGP,
    params: dict[str, Any],
    args: tuple,
    kwargs: dict[str, Any],
    rng_key: Array,
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Posterior medians of all latents, and the priors of the GP sites that belong to them."""
    values = jax.jit(lambda params, args: guide.median(params, *args, **kwargs))(params, args)
    given = handlers.substitute(handlers.seed(model, rng_key), data={**params, **values})
    trace = handlers.trace(given).get_trace(*args, **kwargs)
    fns = {name: unwrap(site["fn"]) for name, site in trace.items() if site["type"] == "sample"}
    return values, {name: fn for name, fn in fns.items() if isinstance(fn, GaussianProcess)}


def needs_of(
    model: Callable,
    values: Mapping[str, Any],
    priors: Mapping[str, GaussianProcess],
    args: tuple,
    kwargs: dict[str, Any],
    *,
    rows: int,
    most: int,
) -> dict[str, Need]:
    """What the hyperparameters of a posterior ask for, by GP site.

    Args:
        model: a model.
        values: of all its latents and parameters.
        priors: of the GP sites at these.
        args: arguments of the model.
        kwargs: keyword arguments of the model.
        rows: N, of which the arguments may have a part.
        most: M at most.
    """
    means = {site: values[site] for site in priors}
    others = {name: value for name, value in values.items() if name not in priors}
    precisions = precision_of_rows(model, others, means, args, kwargs)
    few = min(max(_FEW_INDUCING, int((_FEW_OPERATIONS / rows) ** 0.5)), most)
    allowed = np.asarray([_UNEXPLAINED, min(_UNEXPLAINED_IN_ALL / rows, _UNEXPLAINED)])
    found = {}
    for site, prior in priors.items():
        told = float(jnp.mean(precisions[site] * prior.kernel(prior.X)))
        # No number of inducing inputs leaves less than the jitter of their covariance does.
        tolerance, of_few = np.clip(allowed / max(told, 1e-12), 2.0 * prior.relative_jitter, 0.1).tolist()
        found[site] = Need(prior, tolerance, of_few, few)
    return found
