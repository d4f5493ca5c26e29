"""The parameters and mutable state that a posterior family declares for its site."""

from collections.abc import Iterator
import contextlib
import dataclasses
from functools import partial
from typing import Any, cast
import warnings

import jax
from jax import Array
import numpyro
from numpyro.primitives import _PYRO_STACK, mutable

from numpyro_sgp._internal.probed import value_of
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.guides.handlers import SwapGaussianProcesses
from numpyro_sgp.inducing import ProbedInducing, report_candidates
from numpyro_sgp.posteriors.moments import Moments, roots_of
from numpyro_sgp.posteriors.sites import AbstractSites

__all__ = ["SiteParameters", "parameter", "with_candidates"]


def parameter(name: str, init: Any, predicting: bool) -> Any:
    """A parameter; a prediction must be given its value, since at its initial value it would be that of the prior."""

    def missing(rng_key: Array) -> Any:
        del rng_key
        msg = (
            f"The parameter {name!r} has no value to predict with. Pass all fitted parameters, `result.params` of "
            "`SVI.run` or `svi.get_params(state)`, of a guide with the same `prefix` and the same names of sites."
        )
        raise ValueError(msg)

    return numpyro.param(name, missing if predicting else init)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _natural(name: str, lambda1: Array) -> Array:
    """The natural parameter as it is, with a warning where it is differentiated.

    `NaturalGradient` differentiates a perturbation in its place, and predictions have no need to.
    """
    del name
    return lambda1


@_natural.defjvp
def _natural_jvp(name: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    msg = (
        f"The natural parameters {name!r} are trained by their gradient, as by a plain optimizer: that is correct, but "
        "slow. Pass `NaturalGradient(step_size=0.5, others=optax.adam(1e-2))` to `SVI` in its place, or take "
        "`AutoSVGP(model, inducing)`, which has a mean and a root for plain optimizers."
    )
    warnings.warn(msg, UserWarning, stacklevel=2)
    return primals[0], tangents[0]


@contextlib.contextmanager
def _past_the_model() -> Iterator[None]:
    """Messages meet the handlers around the model only.

    Those within it have done to the site's name what they do: a scope would prefix a parameter named after it again.
    """
    swaps = [number for number, handler in enumerate(_PYRO_STACK) if isinstance(handler, SwapGaussianProcesses)]
    end = swaps[-1] + 1 if swaps else len(_PYRO_STACK)
    inner = _PYRO_STACK[end:]
    del _PYRO_STACK[end:]
    try:
        yield
    finally:
        _PYRO_STACK.extend(inner)


class SiteParameters:
    """What a family declares the parameters of one site with, and its mutable state.

    Attributes:
        growing: the parameters that are growing bases.
        initial: symbols of the parameters that had no value yet and were given their initial one.
        probed: whether an optimizer gets what it asks for beside the gradient of a parameter.
    """

    def __init__(self, site: str, prefix: str, predicting: bool, *, probed: bool = True) -> None:
        self.site, self.prefix, self.predicting, self.probed = site, prefix, predicting, probed
        self.growing: list[ProbedInducing] = []
        self.initial: set[str] = set()

    def __call__(self, symbol: str, init: Any) -> Any:
        def start(rng_key: Array) -> Any:
            self.initial.add(symbol)
            return init(rng_key) if callable(init) else init

        name = f"{self.site}_{self.prefix}_{symbol}"
        with _past_the_model():
            value = parameter(name, start, self.predicting)
        if isinstance(value, AbstractSites) and self.probed and not self.predicting:
            return dataclasses.replace(value, lambda1=_natural(name, value.lambda1))
        if not isinstance(value, ProbedInducing):
            return value if self.probed else value_of(value)
        self.growing.append(value)
        return value.value

    def state(self, symbol: str, init: dict[str, Array]) -> dict[str, Array]:
        """Mutable state; a prediction must be given it, as it must be given parameters."""
        name = f"{self.site}_{self.prefix}_{symbol}"
        with _past_the_model():
            value: Any = mutable(name, cast(Any, None if self.predicting else init))
        if value is None:
            msg = (
                f"The state {name!r} has no value to predict with. Pass it with the fitted parameters: "
                "`{**result.params, **result.state.mutable_state}` of `SVI.run`."
            )
            raise ValueError(msg)
        return value


def with_candidates(growing: list[ProbedInducing], q: Moments, prior: GaussianProcess) -> Moments:
    """The moments as functions of the candidates of growing bases, the one of the covariance first."""
    zero = report_candidates(growing, prior.kernel, prior.X, roots_of(q).A)
    # Once for the site, however many latents it has.
    first = (0,) * q.kl.ndim
    return q._replace(kl=q.kl.at[first].add(zero) if first else q.kl + zero)
