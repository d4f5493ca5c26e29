"""The guide for the latents outside of joint posteriors: made of a class or given, where it starts, what it says."""

from collections.abc import Callable, Mapping
import functools
from typing import Any, cast

from jax import Array
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.infer.autoguide import AutoContinuous, AutoDelta, AutoGuide
from numpyro.infer.initialization import init_to_median, init_to_uniform, init_to_value

from numpyro_sgp.guides.handlers import HiddenSamples, ModelForBase
from numpyro_sgp.guides.starts import observed_values, starting_values

__all__ = ["BaseGuide", "packed_index"]


def packed_index(base: AutoContinuous) -> dict[str, Array]:
    """Where the unconstrained entries of each latent are in the one vector of a base guide that has been run."""
    return cast(dict[str, Array], base._unpack_latent(jnp.arange(base.latent_dim)))


class BaseGuide:
    """A base guide, and what it is run with.

    Args:
        base: an autoguide class, or a guide.
        model: the model.
        prefix: of the names of its parameters.

    Attributes:
        guide: the guide.
        shares_latents: whether its latents may be members of a joint posterior: a guide that the user has made keeps
            them, and point estimates were asked for with `AutoDelta`.
    """

    def __init__(self, base: Any, model: Callable, prefix: str) -> None:
        self._given, self._model, self._prefix = base, model, prefix
        self._seen = ModelForBase(model)
        self.guide: Any = _made(base, self._seen, prefix)
        self.shares_latents = self.guide is not base and not isinstance(self.guide, AutoDelta)
        self._chooses_start = self.guide is not base and not _has_start(base, self.guide)
        self._starts_at_data = False

    def anew(self) -> "BaseGuide":
        """The same, not yet run."""
        return BaseGuide(self._given, self._model, self._prefix)

    @property
    def is_auto(self) -> bool:
        """Whether it is an autoguide, which finds latents by itself."""
        return isinstance(self.guide, AutoGuide)

    @property
    def sites(self) -> Mapping[str, dict] | None:
        """Sites of the model as an autoguide has found them; None before its first run."""
        return self.guide.prototype_trace

    def forget_start(self) -> None:
        """Start at the data of the next run, where it had started at those of an earlier one."""
        if self._starts_at_data:
            self.guide.prototype_trace = None

    def run(self, names: tuple[str, ...] | None, predicting: bool, args: tuple, kwargs: dict) -> dict[str, dict]:
        """Its sites.

        Args:
            names: of the latents that are its own; None for all.
            predicting: whether parameters are given, and nothing is fitted.
            args: arguments of the model.
            kwargs: keyword arguments of the model.
        """
        first = names is not None and self.sites is None
        if names is not None and first:
            self._seen.latents = names
            if self._chooses_start and not predicting:
                self.guide.init_loc_fn = init_to_value(values=self._start(names, args, kwargs))

        # The base guide's samples are shown by the model's run, in the model's order; the rest passes through.
        # Autoguides leave the Jacobians out of their densities under a mask of False, which they inspect; diagnostics
        # need them.
        def hides(msg: dict) -> bool:
            if msg["type"] == "sample":
                return not msg["infer"].get("is_auxiliary")
            return predicting and msg["type"] == "inspect"

        with HiddenSamples(hide_fn=hides), handlers.trace() as trace:
            try:
                if first and predicting:
                    # It looks for its latents with random numbers of its own, so that draws are those of later runs.
                    with handlers.block(), handlers.seed(rng_seed=0):
                        self.guide(*args, **kwargs)
                self.guide(*args, **kwargs)
            except RuntimeError as error:
                # The model's density is zero at the start: NumPyro may try others.
                found_none = "valid initial parameters" in str(error)
                if not (found_none and first and self._chooses_start and self.sites is None):
                    raise
                self.guide.init_loc_fn = init_to_uniform
                self.guide(*args, **kwargs)
        if names is None:
            return trace
        # An autoguide first run without outcomes takes them for latent variables: they are the model's to draw.
        return {name: site for name, site in trace.items() if site["type"] != "sample" or name in names}

    def _start(self, names: tuple[str, ...], args: tuple, kwargs: dict) -> dict[str, Array]:
        """Where its latents start."""
        observed = observed_values(lambda: self._model(*args, **kwargs), names)
        self._starts_at_data = bool(observed)
        return starting_values(lambda: self._seen(*args, **kwargs), observed, cast(Array, numpyro.prng_key()))

    def summary(self, params: Mapping[str, Any], method: str, *extra: Any) -> dict[str, Array]:
        """What its method "median" or "quantiles" says of the latents, after its first run."""
        try:
            values = getattr(self.guide, method)(params, *extra)
        except NotImplementedError as error:
            msg = f"A base guide of type {type(self.guide).__name__} has no `{method}`. Use `sample_posterior`."
            raise NotImplementedError(msg) from error
        # The base guide sees GP sites that are zero, and so do deterministic sites there.
        sites = self.sites
        assert sites is not None
        latents = {name: value for name, value in values.items() if sites[name]["type"] == "sample"}
        if not extra:
            return latents
        # Some base guides have a leading axis for a single probability, others have none.
        own = {name: value.shape[value.ndim - np.ndim(sites[name]["value"]) :] for name, value in latents.items()}
        return {name: jnp.reshape(value, np.shape(extra[0]) + own[name]) for name, value in latents.items()}

    def fixed(self, values: Mapping[str, Array]) -> "BaseGuide":
        """A base guide whose latents have these values."""
        sites = self.sites or {}

        def base(*args: Any, **kwargs: Any) -> None:
            del args, kwargs
            for name, value in values.items():
                numpyro.sample(name, dist.Delta(value, event_dim=sites[name]["fn"].event_dim))

        return BaseGuide(base, self._model, self._prefix)


def _made(base: Any, model: Callable, prefix: str) -> Any:
    factory = base.func if isinstance(base, functools.partial) else base
    if isinstance(factory, type) and issubclass(factory, AutoGuide):
        return base(model, prefix=prefix)
    if callable(base) and not isinstance(factory, type):
        return base
    got = f"the class {factory.__name__}" if isinstance(factory, type) else type(base).__name__
    msg = f"`base` must be an autoguide class or a guide, got {got}. `AutoNormal` is the default."
    raise TypeError(msg)


def _has_start(base: Any, made: Any) -> bool:
    """Whether the autoguide class that was given says where latents start, by an argument or in its own code."""
    own = made.init_loc_fn not in (init_to_uniform, init_to_median)  # NumPyro's defaults
    return own or "init_loc_fn" in getattr(base, "keywords", {})
