"""Rows that come after the training, or leave: `guide.condition` and `guide.remove`.

The posterior is the prior of the new rows. Each of them has a Gaussian site, and natural steps with a line search
minimise the bound of the new rows alone; then the sites are put into the parameters.
"""

from collections.abc import Callable, Mapping
import dataclasses
from functools import partial
from typing import Any, NamedTuple, cast
import warnings

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp

from numpyro_sgp.losses.quadrature_elbo import Particle, QuadratureELBO
from numpyro_sgp.optim.closure import Params, all_finite, probe
from numpyro_sgp.posteriors.conditioned import NEW_SITES, Conditioned
from numpyro_sgp.posteriors.natural_parameters import (
    AbstractSites,
    DatumSites,
    EffectSites,
    JointSites,
    Past,
    Perturbation,
    Perturbed,
)
from numpyro_sgp.posteriors.parameters import FittedParameters

__all__ = ["conditioned", "removed"]

Sites = dict[str, AbstractSites]
Directions = dict[str, Perturbation]
Evaluate = Callable[[Sites], tuple[Array, Directions]]


def conditioned(
    guide: Any, params: Mapping[str, Any], args: tuple, kwargs: dict, num_steps: int, loss: QuadratureELBO | None
) -> Params:
    """See `AbstractAutoSparseGP.condition`."""
    rows = _Rows(guide, params, args, kwargs, "condition", loss)
    end = minimised(rows.evaluate, rows.start(), num_steps)
    if not isinstance(end.converged, Tracer) and not end.converged:
        warnings.warn(
            f"`condition` took {num_steps} evaluations and its steps still change the posterior of the new rows. Give "
            "more `num_steps`, or fewer rows at once.",
            UserWarning,
            stacklevel=3,
        )
    return rows.updated(end.sites)


def removed(guide: Any, params: Mapping[str, Any], args: tuple, kwargs: dict, loss: QuadratureELBO | None) -> Params:
    """See `AbstractAutoSparseGP.remove`."""
    rows = _Rows(guide, params, args, kwargs, "remove", loss)
    return rows.updated(rows.without(rows.evaluate(rows.before)[1]))


class _Rows:
    """The bound of some rows as a function of sites: those of rows under a posterior of its own, or of a joint one."""

    def __init__(
        self,
        guide: Any,
        params: Mapping[str, Any],
        args: tuple,
        kwargs: dict,
        method: str,
        loss: QuadratureELBO | None,
    ) -> None:
        self.guide, self.params, self.args, self.kwargs = guide, dict(params), args, kwargs
        self.loss = QuadratureELBO() if loss is None else loss
        values = guide.medians_of_base(params, args, kwargs, method)
        posteriors = guide.posteriors_at(params, values, args, kwargs)
        self.at_values = guide.at_latents(values, Conditioned)
        joint = {name for name, q in posteriors.items() if q.joint_run is not None}
        self.alone = {name: q for name, q in posteriors.items() if name not in joint}
        for site in self.alone:
            self._check(site, method)
        self.joint: Sites = {
            name: value
            for name, value in self.params.items()
            if isinstance(value, JointSites) and any(name.startswith(f"{site}_{guide.prefix}_") for site in joint)
        }
        zeros = {self._name(site): DatumSites.zeros(q.batch_shape, q.prior.X) for site, q in self.alone.items()}
        self.before: Sites = {**self.joint, **zeros}
        particle = self._particle(self.before)
        if particle.nested_parents(particle.run_guide(particle.guide_key, {})):
            msg = f"`{method}` was called for a GP on top of a GP, where new rows change both. Train on all rows."
            raise ValueError(msg)

    def _check(self, site: str, method: str) -> None:
        own = self.params.get(f"{site}_{self.guide.prefix}_sites")
        if method == "remove" and isinstance(own, DatumSites):
            msg = (
                f"The posterior of the GP site {site!r} is made for the rows of X, with a site for each. Use "
                '`AutoTSVGP` with `sites="tied"`, or train without the rows.'
            )
            raise TypeError(msg)
        if any(site in group.sites for group in self.guide.joint_groups(self.params)):
            msg = (
                f"Terms of the model depend on several rows of the GP site {site!r}, and `{method}` needs one Gaussian "
                "of all that they depend on. Use `AutoTSVGP` or `AutoSVGP(natural=True)`."
            )
            raise TypeError(msg)

    def _name(self, site: str) -> str:
        return f"{site}_{self.guide.prefix}_{NEW_SITES}"

    def _particle(self, sites: Mapping[str, Any], *, observed: bool = True) -> Particle:
        params = {**self.params, **sites}
        model, guide = self.guide.model, self.at_values
        return Particle(self.loss, jax.random.key(0), params, model, guide, self.args, self.kwargs, observed=observed)

    def evaluate(self, sites: Sites, *, observed: bool = True) -> tuple[Array, Directions]:
        """The bound of the rows, negated, and its natural gradient; without `observed` that of no data."""

        def fn(params: Params) -> tuple[Array, None]:
            return -self._particle(params, observed=observed).elbo()[0], None

        zeros = {name: value.perturbation(for_step=True, floor=0.0) for name, value in sites.items()}
        (value, _), (found, _) = probe(fn, lambda name, zero: Perturbed(sites[name], zero), zeros, {})
        return value, {name: direction.of_unit_scale(sites[name]) for name, direction in found.items()}

    def start(self) -> Sites:
        """The sites before the rows, with what of them is of data marked as past."""
        if not self.joint:
            return self.before
        # The rest is what latents have in the place of a prior that is not Gaussian.
        _, data = self.evaluate(self.before, observed=False)
        return {name: _with_past(self.before, name, data) for name in self.joint} | {
            name: value for name, value in self.before.items() if name not in self.joint
        }

    def without(self, directions: Directions) -> Sites:
        """The sites without those of the rows, from the natural gradient with them."""
        result = {}
        data = self.evaluate(self.before, observed=False)[1] if self.joint else {}
        for name, value in self.before.items():
            own = directions[name]
            if name in data:
                # λ − (data − rows) with λ − ∂loss/∂ε in the place of each.
                own = dataclasses.replace(
                    own,
                    epsilon1=data[name].epsilon1 - own.epsilon1,
                    epsilon2=data[name].epsilon2 - own.epsilon2,
                )
                result[name] = value.natural_step(own, 1.0)
            else:
                # With a step of length one sites of new rows would be what they are of those that are in.
                result[name] = value.natural_step(own, -1.0)
        return result

    def updated(self, sites: Sites) -> Params:
        """The parameters with the sites in them."""
        params = dict(self.params)
        for name in self.joint:
            params[name] = dataclasses.replace(cast(Any, sites[name]), past=None)
        for site, q in self.alone.items():
            new = sites[self._name(site)]
            # The sites are those of deviations from the mean before.
            linear = new.lambda1 + new.Lambda2 * q.moments.mean
            fitted = FittedParameters(self.params, site, self.guide.prefix)
            found = self.guide.family(site).updated(fitted, q, linear, new.Lambda2)
            params.update({f"{site}_{self.guide.prefix}_{symbol}": value for symbol, value in found.items()})
        return params


def _with_past(before: Sites, name: str, directions: Directions) -> AbstractSites:
    """Sites at the current inducing variables, with those of data as their past.

    Args:
        before: the sites.
        name: of a parameter of a joint posterior.
        directions: the natural gradient of the bound of no data, which is the sites of data.
    """
    value: Any = before[name].natural_step(directions[name], 0.0)
    linear, precision = directions[name].epsilon1, -2.0 * directions[name].epsilon2
    if isinstance(value, EffectSites):
        # One observation for each effect: (d e + Cᵀz)/√d.
        d = precision[:, :1]
        known = d > 0.0
        root = jnp.where(known, precision / jnp.sqrt(jnp.where(known, d, 1.0)), 0.0)
        own = jnp.where(known[:, 0], linear / jnp.where(known[:, 0], root[:, 0], 1.0), 0.0)
        return dataclasses.replace(value, past=Past(own, root))
    effects = name.removesuffix("joint_sites") + "effect_sites"
    if effects in before:
        past: Any = cast(Any, _with_past(before, effects, directions)).past
        C = past.root[:, 1:]
        linear, precision = linear - C.T @ past.linear, precision - C.T @ C
    return dataclasses.replace(value, past=Past.of(linear, precision))


class Minimum(NamedTuple):
    """Where natural steps ended.

    Attributes:
        sites: the last that were accepted.
        directions: the natural gradient there.
        value: of the bound there, negated.
        length: of the next step.
        evaluations: how many there were.
        converged: whether a full step changes nothing any more.
    """

    sites: Sites
    directions: Directions
    value: Array
    length: Array
    evaluations: Array
    converged: Array


def minimised(evaluate: Evaluate, start: Sites, num_steps: int) -> Minimum:
    """Natural steps, each of which lowers the value: full ones, or as long as it takes.

    Args:
        evaluate: value and natural gradient at sites.
        start: where it begins; NaN in the result if the value is not finite there.
        num_steps: the most evaluations.
    """
    value, directions = evaluate(start)
    dtype = value.dtype
    finite = jnp.isfinite(value)
    start = jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.inexact) else x, start)
    slack = 100.0 * jnp.finfo(dtype).eps

    def ended(sites: Sites, directions: Directions) -> Array:
        return jnp.stack([_is_small(directions[name], value) for name, value in sites.items()]).all()

    def goes_on(here: Minimum) -> Array:
        return ~here.converged & (here.evaluations < num_steps)

    def step(here: Minimum) -> Minimum:
        sites = {name: value.natural_step(here.directions[name], here.length) for name, value in here.sites.items()}
        value, directions = evaluate(sites)
        # Rounding may raise it where it is at its least.
        lower = value <= here.value + slack * (1.0 + jnp.abs(here.value))
        accepted = lower & all_finite((sites, directions))
        there = sites, directions, value, jnp.minimum(2.0 * here.length, 1.0), ended(sites, directions)
        stay = here.sites, here.directions, here.value, 0.5 * here.length, here.converged
        chosen = jax.tree.map(partial(jnp.where, accepted), there, stay)
        sites, directions, value, length, converged = chosen
        return Minimum(sites, directions, value, length, here.evaluations + 1, converged)

    first = Minimum(start, directions, value, jnp.ones((), dtype), jnp.asarray(1), ended(start, directions) | ~finite)
    return jax.lax.while_loop(goes_on, step, first)


def _is_small(direction: Perturbation, sites: AbstractSites) -> Array:
    """Whether a full step changes sites by no more than rounding makes of them."""
    changes = (direction.epsilon1, sites.lambda1), (2.0 * direction.epsilon2, sites.Lambda2)
    tolerance = jnp.finfo(sites.lambda1.dtype).eps ** 0.6
    small = [jnp.max(jnp.abs(d)) <= tolerance * jnp.max(jnp.abs(value)) for d, value in changes]
    return jnp.stack(small).all()
