"""Rows that come after the training, or leave: `guide.condition` and `guide.remove`.

The posterior is the prior of the new rows. Each of them has a Gaussian site, and natural steps with a line search
minimise the bound of the new rows alone; then the sites are put into the parameters.
"""

from collections.abc import Callable, Mapping
import dataclasses
from functools import cached_property, partial
from typing import Any, NamedTuple, cast
import warnings

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp

from numpyro_sgp.guides.joint_rows import RowsRun
from numpyro_sgp.losses.quadrature_elbo import Particle, QuadratureELBO
from numpyro_sgp.optim.closure import Params, all_finite, probe
from numpyro_sgp.posteriors.conditioned import NEW_SITES, Conditioned
from numpyro_sgp.posteriors.parameters import FittedParameters
from numpyro_sgp.posteriors.perturbation import Perturbation, Perturbed
from numpyro_sgp.posteriors.sites import (
    AbstractSites,
    DatumSites,
    Earlier,
    EffectSites,
    JointSites,
    Past,
    RowSites,
    TiedSites,
)

__all__ = ["conditioned", "removed", "sites_of_rows", "with_past"]

Sites = dict[str, AbstractSites]
Directions = dict[str, Perturbation]
Evaluate = Callable[[Sites], tuple[Array, Directions]]
_NUM_STEPS_OF_PRIORS = 50  # as `condition` takes at most; one where all priors are Gaussian


def conditioned(
    guide: Any, params: Mapping[str, Any], args: tuple, kwargs: dict, num_steps: int, loss: QuadratureELBO | None
) -> Params:
    """See `AbstractAutoSparseGP.condition`."""
    rows = _Rows(guide, params, args, kwargs, "condition", loss)
    end = minimised(rows.evaluate, rows.start(), num_steps)
    if _may_go_on(end):
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
    own = rows.own()
    left = {name: rows.changed(name, value, -1.0) for name, value in own.items()}
    if rows.joint:
        end = minimised(partial(rows.evaluate, observed=False), rows.start_without(left, own), _NUM_STEPS_OF_PRIORS)
        if _may_go_on(end):
            warnings.warn(
                f"`remove` took {_NUM_STEPS_OF_PRIORS} evaluations to find the posterior that the other rows leave of "
                "latents whose priors are not Gaussian, and its steps still change it. Remove fewer rows at once.",
                UserWarning,
                stacklevel=3,
            )
        left.update({name: end.sites[name] for name in rows.joint})
    return rows.updated(left)


def sites_of_rows(
    guide: Any, params: Mapping[str, Any], args: tuple, kwargs: dict, method: str, loss: QuadratureELBO | None
) -> Params:
    """What rows that a posterior was trained on have in its sites, by parameter.

    Args:
        guide: a guide with tied sites.
        params: its parameters, whose steps have converged.
        args: arguments of the model, with these rows alone.
        kwargs: keyword arguments of the model.
        method: what needs it, for messages.
        loss: where quadrature and draws are as wanted.
    """
    rows = _Rows(guide, params, args, kwargs, method, loss)
    found = rows.own()
    empty = {name: jax.tree.map(jnp.zeros_like, value) for name, value in params.items() if _is_tied(value)}
    added = rows.updated({name: value for name, value in found.items() if name not in rows.joint}, into=empty)
    return {name: found[name] if name in rows.joint else added[name] for name in empty}


def sites_of_data(guide: Any, params: Mapping[str, Any], args: tuple, kwargs: dict, method: str) -> Params:
    """The tied sites of a posterior, without what latents have in them in the place of a prior that is not Gaussian."""
    rows = _Rows(guide, params, args, kwargs, method, None)
    data = rows.of_data
    joint = {name: _as_sites(value, data[name]) for name, value in rows.joint.items()}
    return {name: value for name, value in params.items() if _is_tied(value)} | joint


def with_past(sites: Mapping[str, Any], past: Mapping[str, Any]) -> Sites:
    """Sites that know which part of them is that of past data.

    Args:
        sites: by parameter.
        past: the part, as natural parameters.
    """
    return {name: _with_past(name, cast(Any, value), past) for name, value in sites.items()}


def _with_past(name: str, value: Any, past: Mapping[str, Any]) -> Any:
    own = past[name]
    if isinstance(own, EffectSites):
        return dataclasses.replace(value, past=_past_of_effects(own))
    linear, precision = own.lambda1, own.Lambda2
    effects = past.get(name.removesuffix("joint_sites") + "effect_sites")
    if effects is not None:
        # Observations of the effects know of z, too; the rest is that of z alone.
        of_effects = _past_of_effects(effects)
        C = of_effects.root[:, 1:]
        linear, precision = linear - C.T @ of_effects.linear, precision - C.T @ C
    return dataclasses.replace(value, past=Past.of(linear, precision))


def _past_of_effects(sites: EffectSites) -> Past:
    """One observation for each effect, (d e + Cᵀz)/√d, and none where nothing is known of it."""
    d = sites.Lambda2[:, :1]
    known = d > 0.0
    root = jnp.where(known, sites.Lambda2 / jnp.sqrt(jnp.where(known, d, 1.0)), 0.0)
    linear = jnp.where(known[:, 0], sites.lambda1 / jnp.where(known[:, 0], root[:, 0], 1.0), 0.0)
    return Past(linear, root)


def _is_tied(value: Any) -> bool:
    return isinstance(value, TiedSites)


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
        for site in posteriors:
            self._check(site, method)
        self.joint: Sites = {
            name: value
            for name, value in self.params.items()
            if isinstance(value, JointSites) and any(name.startswith(f"{site}_{guide.prefix}_") for site in joint)
        }
        self.before: Sites = dict(self.joint)
        for site, q in self.alone.items():
            self.before[self._name(site)] = DatumSites.zeros(q.batch_shape, q.prior.X)
        # By parameter of the rows: that of the latents beside them.
        self.latents_of: dict[str, str] = {}
        for site in joint:
            run = posteriors[site].joint_run
            guide.family(site).check_more_rows()
            if isinstance(run, RowsRun):
                rows, latents = (f"{site}_{guide.prefix}_{symbol}" for symbol in ("sites", "joint_sites"))
                self.latents_of[rows] = latents
                nothing = jax.tree.map(jnp.zeros_like, self.joint[latents])
                zeros = RowSites.zeros(run.num_latents, posteriors[site].prior.X)
                self.before[rows] = dataclasses.replace(zeros, earlier=Earlier(nothing, self.params[rows]))
        particle = self._particle(self.before)
        if particle.nested_parents(particle.run_guide(particle.guide_key, {})):
            msg = f"`{method}` was called for a GP on top of a GP, where new rows change both. Train on all rows."
            raise ValueError(msg)

    def _check(self, site: str, method: str) -> None:
        own = self.params.get(f"{site}_{self.guide.prefix}_sites")
        if method == "remove" and isinstance(own, DatumSites | RowSites):
            msg = (
                f"The posterior of the GP site {site!r} is made for the rows of X, with a site for each. Use "
                '`AutoTSVGP` with `sites="tied"`, or train without the rows.'
            )
            raise TypeError(msg)
        if site in self.alone and any(site in group.sites for group in self.guide.joint_groups(self.params)):
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
        data = self.of_data
        here = {name: value.natural_step(data[name], 0.0) for name, value in self.joint.items()}
        past, rows = {name: _as_sites(here[name], data[name]) for name in here}, {}
        for name, latents in self.latents_of.items():
            zeros: Any = self.before[name]
            rows[name] = dataclasses.replace(zeros, earlier=Earlier(past.pop(latents), zeros.earlier.rows))
        return {**self.before, **here, **with_past({name: here[name] for name in past}, past), **rows}

    def start_without(self, left: Sites, own: Sites) -> Sites:
        """The sites without rows; what latents have in the place of a prior is that of the posterior with them.

        Args:
            left: the sites without those of the rows.
            own: the sites of the rows.
        """
        past = {}
        for name, direction in self.of_data.items():
            data, rows = _as_sites(left[name], direction), own[name]
            past[name] = dataclasses.replace(
                data, lambda1=data.lambda1 - rows.lambda1, Lambda2=data.Lambda2 - rows.Lambda2
            )
        return {**self.before, **with_past({name: left[name] for name in past}, past)}

    @cached_property
    def of_data(self) -> Directions:
        """The sites of data in joint posteriors: without what latents have in the place of a prior."""
        if not self.joint:
            return {}
        found = self.evaluate(self.before, observed=False)[1]
        return {name: found[name] for name in self.joint}

    def own(self) -> Sites:
        """What rows that are in the posterior have in it: sums in joint posteriors, else a site for each row."""
        directions, data, result = self.evaluate(self.before)[1], self.of_data, {}
        for name, value in self.before.items():
            if name in data:
                # The natural gradient of the bound of no data is that of the sites of data less what a step would make
                # of them; the rows are what it has less with them.
                epsilon1 = data[name].epsilon1 - directions[name].epsilon1
                epsilon2 = data[name].epsilon2 - directions[name].epsilon2
                rows = dataclasses.replace(data[name], epsilon1=epsilon1, epsilon2=epsilon2)
                result[name] = _as_sites(value.natural_step(rows, 0.0), rows)
            else:
                # The sites of new rows after a step of length one are what those of rows are that are in.
                result[name] = value.natural_step(directions[name], 1.0)
        return result

    def changed(self, name: str, rows: AbstractSites, sign: float) -> AbstractSites:
        """The sites with those of rows added or taken out.

        Args:
            name: of the parameter.
            rows: their own sites.
            sign: 1 or −1.
        """
        value: Any = rows
        if name in self.joint:
            before: Any = self.joint[name]
            if before.reference is not None:
                before = before.natural_step(self.of_data[name], 0.0)
            return dataclasses.replace(
                before, lambda1=before.lambda1 + sign * value.lambda1, Lambda2=before.Lambda2 + sign * value.Lambda2
            )
        return dataclasses.replace(value, lambda1=sign * value.lambda1, Lambda2=sign * value.Lambda2)

    def updated(self, sites: Sites, into: Params | None = None) -> Params:
        """The parameters with the sites in them.

        Args:
            sites: whole sums of joint posteriors, and sites of rows to be added to the others.
            into: sums that these are added to; None for those of the posterior.
        """
        params = {**self.params, **(into or {})}
        for name in self.joint.keys() & sites.keys():
            params[name] = dataclasses.replace(cast(Any, sites[name]), past=None)
        for name in self.latents_of.keys() & sites.keys():
            params[name] = cast(RowSites, sites[name]).with_earlier()
        for site, q in self.alone.items():
            new = sites[self._name(site)]
            # The sites are those of deviations from the mean before.
            linear = new.lambda1 + new.Lambda2 * q.moments.mean
            found = self.guide.family(site).updated(
                FittedParameters(params, site, self.guide.prefix), q, linear, new.Lambda2
            )
            params.update({f"{site}_{self.guide.prefix}_{symbol}": value for symbol, value in found.items()})
        return params


def _as_sites(like: Any, direction: Perturbation) -> Any:
    """The natural parameters that a natural gradient is, as sites."""
    return dataclasses.replace(like, lambda1=direction.epsilon1, Lambda2=-2.0 * direction.epsilon2, past=None)


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


def _may_go_on(end: Minimum) -> bool:
    return not isinstance(end.converged, Tracer) and not end.converged


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
    # With float64 enabled, that of a bound which is made of float32 sites is no finer than they are.
    slack = 100.0 * max(float(jnp.finfo(x.dtype).eps) for x in (value, *(site.lambda1 for site in start.values())))

    def ended(sites: Sites, directions: Directions) -> Array:
        return jnp.stack([_is_small(directions[name], value) for name, value in sites.items()]).all()

    def goes_on(here: Minimum) -> Array:
        return ~here.converged & (here.evaluations < num_steps)

    def step(here: Minimum) -> Minimum:
        sites = {name: value.natural_step(here.directions[name], here.length) for name, value in here.sites.items()}
        value, directions = evaluate(sites)
        # Rounding may raise it where it is at its least: by that of its terms, which may cancel there more than at the
        # start.
        lower = value <= here.value + slack * (1.0 + jnp.maximum(jnp.abs(first.value), jnp.abs(here.value)))
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
