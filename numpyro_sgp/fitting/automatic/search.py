"""The search for hyperparameters and inducing inputs: L-BFGS on the best bound of some rows."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import time
from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions.transforms import biject_to
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
import optax

from numpyro_sgp._internal.signatures import with_num_data
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.traces import scaled_log_prob
from numpyro_sgp.distributions.wrappers import is_real, unwrap
from numpyro_sgp.fitting.automatic.placing import place, placed, precision_of_rows, unexplained
from numpyro_sgp.fitting.automatic.profile import Profile
from numpyro_sgp.fitting.program import Arguments
from numpyro_sgp.guides.handlers import GivenGaussianProcesses
from numpyro_sgp.guides.members import Joint
from numpyro_sgp.guides.model_runs import again, first_run
from numpyro_sgp.losses.quadrature_elbo import QuadratureELBO
from numpyro_sgp.posteriors.dual.guide import AutoTSVGP

__all__ = ["NEGLIGIBLE", "Search", "Task", "effects", "inducing_of", "priors_at"]

# Nats a row: what gains less was the last of its kind.
NEGLIGIBLE = 1e-3
# What inducing inputs may leave of the variance of f, in units of the variance with which a row tells it. With Gaussian
# noise ½ log(1 + x) nats a row are lost. As long as inducing inputs are few they lose no more than half a nat of all
# rows, so that hyperparameters stay where they are without them.
_UNEXPLAINED, _UNEXPLAINED_IN_ALL = 0.02, 1.0
_FEW_INDUCING, _FEW_OPERATIONS = 200, 1e9
# The first search has so many, as its hyperparameters are still wrong; so few rows may all be inducing inputs.
_FIRST, _FEW = 100, 300
# Another number of inducing inputs needs another program: so it is chosen for hyperparameters that still change, to
# leave a third of what they may, and only where they are many more.
_SPARE, _MORE = 3.0, 1.3
_STARTS = 3
_MOST_CHOICES = 4
# L-BFGS is asked after so many iterations whether they were worth it: with inducing inputs to train it hardly ends.
_ITERATIONS, _MOST_ROUNDS = 100, 5
# Standard deviations of latents, unconstrained, while their means are searched for.
_NARROW = 1e-6
# The curvature needs two gradients for each entry of a latent.
_MOST_CURVATURES = 100


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be fitted.

    Attributes:
        model: the model.
        data: as in `fit`.
        rows: N.
        loss: the loss.
        base: guide for the latents outside of the joint posterior.
        joint: members of the joint posterior.
        inducing: the user's inducing inputs, or None.
        learn_inducing: whether to train them, or None.
        most_inducing: M, or its upper limit.
        number_given: whether M is what the user asked for.
        most_whole: up to how many rows may all be inducing inputs.
        deadline: when to end, by `time.perf_counter`.
    """

    model: Callable
    data: Any
    rows: int
    loss: QuadratureELBO
    base: Any
    joint: Joint
    inducing: Any
    learn_inducing: bool | None
    most_inducing: int
    number_given: bool
    most_whole: int
    deadline: float

    def args(self, index: np.ndarray) -> tuple:
        """Arguments of the model with some of the rows."""
        part = self.data if len(index) == self.rows else jax.tree.map(lambda leaf: np.asarray(leaf[index]), self.data)
        return Arguments.positional(jax.tree.map(jnp.asarray, part))

    def keywords(self, rows: int) -> dict[str, int]:
        """Its keyword arguments with that many rows in all."""
        return with_num_data(self.model, (), {}, rows)

    def guide(self, inducing: Any) -> AutoTSVGP:
        """The guide."""
        return AutoTSVGP(self.model, inducing, base=self.base, joint=self.joint)

    @property
    def is_over(self) -> bool:
        """Whether the time is spent."""
        return time.perf_counter() > self.deadline


class _Need(NamedTuple):
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
        return unexplained <= (self.tolerance if num_inducing >= self.few else self.of_few)


def inducing_of(guide: AutoTSVGP, params: Mapping[str, Any]) -> dict[str, Any]:
    """Inducing variables, by GP site."""
    ending = f"_{guide.prefix}_inducing"
    return {name.removesuffix(ending): value for name, value in params.items() if name.endswith(ending)}


def priors_at(
    model: Callable, guide: AutoTSVGP, params: dict[str, Any], args: tuple, kwargs: dict[str, Any], rng_key: Array
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Posterior medians of all latents, and the priors of the GP sites that belong to them."""
    values = jax.jit(lambda params, args: guide.median(params, *args, **kwargs))(params, args)
    given = handlers.substitute(handlers.seed(model, rng_key), data={**params, **values})
    trace = handlers.trace(given).get_trace(*args, **kwargs)
    return values, {site: unwrap(trace[site]["fn"]) for site in inducing_of(guide, params)}


def effects(task: Task, index: np.ndarray, rng_key: Array) -> Joint:
    """GP sites and the latents that are joint in "auto" and are added to them in the terms of the model.

    Given the others the bound has a closed form for Gaussian noise, and its curvature says how sure they are. Those are
    latents of restricted support, such as noise scales, and factors of a GP site, which start at a saddle if joint.
    """
    args, kwargs = task.args(index), task.keywords(len(index))
    guide = task.guide(_first_row)
    svi = SVI(task.model, guide, optax.set_to_zero(), task.loss)
    state = jax.eval_shape(lambda key: svi.init(key, *args, **kwargs), rng_key)
    groups = guide.joint_groups(svi.optim.get_params(state.optim_state))
    if not any(group.latents for group in groups):
        return False
    added = _added(lambda: task.model(*args, **kwargs))
    names: list[str] = []
    for group in groups:
        kept = [name for name in group.latents if name in added]
        names += [*group.sites, *kept] if kept else []
    return tuple(names) or False


def _added(model: Callable[[], Any]) -> set[str]:
    """Latents on the real line that the terms depend on where all GP sites are zero."""

    @jax.jit
    def slopes() -> dict[str, Array]:
        given = GivenGaussianProcesses(0.0)
        trace = first_run(model, given)
        latents = {name: site for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]}
        w = {name: site["value"] for name, site in latents.items() if is_real(site["fn"].support)}

        def log_density(w: dict[str, Array]) -> Array:
            sites = [site for site in again(model, trace, w).values() if site["type"] == "sample"]
            return sum((jnp.sum(scaled_log_prob(site)) for site in sites if site["is_observed"]), jnp.zeros(()))

        gradients = jax.grad(log_density)({name: value for name, value in w.items() if name not in given.priors})
        return {name: jnp.max(jnp.abs(gradient)) for name, gradient in gradients.items()}

    return {name for name, slope in slopes().items() if slope > 0.0}


def _first_row(kernel: Callable, X: Any, rng_key: Array) -> Array:
    del kernel, rng_key
    return X[:1]


class Search:
    """L-BFGS on the best bound of some rows, while inducing inputs are chosen again as hyperparameters settle.

    Args:
        task: what is to be fitted.
        index: the rows.
        rng_key: a key.
        guide: a guide that has been run before, or None.
        init_params: its hyperparameters.

    Attributes:
        guide: the guide.
        profile: the bound at its inducing inputs.
        deterministic: whether the loss depends on no random numbers; where it does, nothing is searched.
        enough: whether the inducing inputs explain as much as is wanted.
        value: the loss.
        converged: whether the search ended by itself.
    """

    def __init__(
        self,
        task: Task,
        index: np.ndarray,
        rng_key: Array,
        guide: AutoTSVGP | None = None,
        init_params: dict[str, Any] | None = None,
    ) -> None:
        self.task, self.rng_key, self.rows = task, rng_key, len(index)
        self.args, self.kwargs = task.args(index), task.keywords(len(index))
        self.value, self.enough, self.converged = np.inf, task.inducing is not None, False
        number = len(index) if len(index) <= _FEW or task.number_given else _FIRST
        first = functools.partial(place, most=min(number, task.most_inducing))
        given = first if task.inducing is None else task.inducing
        self._begin(task.guide(given) if guide is None else guide, init_params)
        self.deterministic = self.profile.is_deterministic(jax.random.fold_in(rng_key, 1))

    def _begin(self, guide: AutoTSVGP, init_params: dict[str, Any] | None) -> None:
        self.guide, task = guide, self.task
        self.profile = Profile(task.model, guide, task.loss, self.rng_key, self.args, self.kwargs, init_params)
        if self.scales:
            narrow = self._unconstrained_scale(jnp.asarray(_NARROW, float))
            values = self.profile.unconstrained
            self.profile.move({name: jnp.full_like(values[name], narrow) for name in self.scales})

    def _unconstrained_scale(self, scale: Array) -> Array:
        return biject_to(cast(AutoNormal, self.guide.base).scale_constraint).inv(scale)

    @property
    def scales(self) -> list[str]:
        """Parameters that hold standard deviations of latents."""
        ending = f"_{self.guide.prefix}_scale"
        names = [name for name in self.profile.unconstrained if name.endswith(ending)]
        return names if isinstance(self.guide.base, AutoNormal) else []

    @property
    def inducing(self) -> dict[str, Any]:
        """Inducing variables, by GP site."""
        return inducing_of(self.guide, self.profile.params)

    @property
    def num_inducing(self) -> int:
        """The largest M."""
        return max(each.num_inducing for each in self.inducing.values())

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """All parameters that do not belong to q(u)."""
        names = self.profile.others - {f"{site}_{self.guide.prefix}_inducing" for site in self.inducing}
        return {name: value for name, value in self.profile.params.items() if name in names}

    def run(self) -> None:
        """Search, and choose inducing inputs as often as that helps; train them where they are too few."""
        if not self.deterministic:
            return
        start = self.hyperparameters
        self._minimise_from_several_starts()
        if self.task.inducing is None:
            for _ in range(_MOST_CHOICES):
                before = self.value
                if self.task.is_over or not self._choose():
                    break
                self._minimise()
                if before - self.value < NEGLIGIBLE * self.rows:
                    break
            if self._may_take_all:
                self._search_with_all_rows(start)
        if self.learns and not self.task.is_over:
            self._begin(self.guide.with_inducing(self.inducing, learn_inducing=True), self.hyperparameters)
            self._minimise()

    @property
    def _may_take_all(self) -> bool:
        """Whether the best sites take one step, and all rows are few enough to be inducing inputs."""
        few = self.num_inducing < self.rows == self.task.rows <= self.task.most_whole
        return few and bool(self.profile.exact)

    def _search_with_all_rows(self, start: dict[str, Any]) -> None:
        """Begin anew with every row as an inducing input, and keep that if it is better by more than nothing.

        A rough function needs many inducing inputs, so that with few of them a smoother one with more noise has the
        higher bound, wherever the search starts.
        """
        best = self.guide, self.profile, self.value, self.enough, self.converged
        priors = {site: need.prior for site, need in self._needs().items()}
        every = {site: place(p.kernel, p.X, self.rng_key, most=self.rows) for site, p in priors.items()}
        self._begin(self.guide.with_inducing(every), start)
        first, found = self.profile.state, best[1].unconstrained
        ends = []
        for moved in ({name: found[name] for name in self._locations}, self._alike()):
            if self.task.is_over:
                break
            self.profile.state = first
            self.profile.move(moved)
            self._minimise()
            ends.append((self.value, self.converged, self.profile.state))
        if not ends or min(ends, key=lambda end: end[0])[0] > best[2] - NEGLIGIBLE * self.rows:
            self.guide, self.profile, self.value, self.enough, self.converged = best
            return
        self.value, self.converged, self.profile.state = min(ends, key=lambda end: end[0])
        self.enough = True

    @property
    def _locations(self) -> list[str]:
        """Parameters that hold where latents are."""
        return [name for name in self.profile.unconstrained if name.endswith(f"_{self.guide.prefix}_loc")]

    def _alike(self) -> dict[str, Array]:
        """Where latents of restricted support are, entries that are near one another as their mean.

        Lengthscales of columns that start at different values end at a lower bound more often than those that start
        alike.
        """
        sites, values, found = cast(Any, self.guide.base).prototype_trace, self.profile.unconstrained, {}
        for name in self._locations:
            value, site = values[name], sites[name.removesuffix(f"_{self.guide.prefix}_loc")]
            if not is_real(site["fn"].support) and jnp.std(value) < 1.0:
                found[name] = jnp.full_like(value, jnp.mean(value))
        return found

    @property
    def learns(self) -> bool:
        """Whether the inducing inputs are to be trained."""
        return not self.enough if self.task.learn_inducing is None else self.task.learn_inducing

    def _minimise(self) -> None:
        fixed = set(self.scales)
        if not self.guide.learns_inducing:
            fixed |= {f"{site}_{self.guide.prefix}_inducing" for site in self.inducing}
        self.value = np.inf
        for _ in range(_MOST_ROUNDS):
            before = self.value
            self.value, ended = self.profile.minimise(fixed, _ITERATIONS, self.task.deadline)
            self.converged = ended or before - self.value < NEGLIGIBLE * self.rows
            if self.converged or self.task.is_over:
                break

    def _minimise_from_several_starts(self) -> None:
        """The best end of searches from the start and from places around it: long lengthscales often lead astray."""
        start = self.profile.state
        values, names = self.profile.unconstrained, self._locations
        ends = []
        for number in range(_STARTS if names else 1):
            self.profile.state = start
            key = jax.random.fold_in(self.rng_key, number)
            moved = {} if number else self._alike()
            for index, name in enumerate(names if number else []):
                signs = jax.random.rademacher(jax.random.fold_in(key, index), jnp.shape(values[name]))
                moved[name] = values[name] + signs.astype(values[name].dtype)
            self.profile.move(moved)
            self._minimise()
            ends.append((self.value, self.converged, self.profile.state))
            if self.task.is_over:
                break
        self.value, self.converged, self.profile.state = min(ends, key=lambda end: end[0])

    def _needs(self) -> dict[str, _Need]:
        """What the hyperparameters found so far ask for, by GP site."""
        params, model = self.profile.params, self.task.model
        values, priors = priors_at(model, self.guide, params, self.args, self.kwargs, self.rng_key)
        means = {site: values.pop(site) for site in priors}
        precisions = precision_of_rows(model, {**params, **values}, means, self.args, self.kwargs)
        found = {}
        for site, prior in priors.items():
            told = float(jnp.mean(precisions[site] * prior.kernel(prior.X)))
            allowed = np.asarray([_UNEXPLAINED, min(_UNEXPLAINED_IN_ALL / self.task.rows, _UNEXPLAINED)])
            few = max(_FEW_INDUCING, int((_FEW_OPERATIONS / self.task.rows) ** 0.5))
            # No number of inducing inputs leaves less than the jitter of their covariance does.
            tolerance, of_few = np.clip(allowed / max(told, 1e-12), 2.0 * prior.relative_jitter, 0.1).tolist()
            found[site] = _Need(prior, tolerance, of_few, min(few, self.task.most_inducing))
        return found

    def chosen(self, needs: dict[str, _Need] | None = None) -> dict[str, Array]:
        """Inducing inputs for the hyperparameters found so far; `enough` says whether they are."""
        needs = self._needs() if needs is None else needs
        found = {}
        for number, (site, need) in enumerate(needs.items()):
            key, most = jax.random.fold_in(self.rng_key, number), self.task.most_inducing
            choose = functools.partial(placed, need.prior.kernel, need.prior.X, key)
            if self.task.number_given:
                found[site] = choose(most=most, tolerance=0.0)
                continue
            one = choose(most=need.few, tolerance=need.of_few / _SPARE)
            if one.unexplained > need.of_few:
                one = choose(most=most, tolerance=need.tolerance / _SPARE, few=need.few)
            found[site] = one
        self.enough = all(need.is_met(len(found[site].Z), found[site].unexplained) for site, need in needs.items())
        return {site: each.Z for site, each in found.items()}

    def _choose(self) -> bool:
        """Take other inducing inputs where these do not explain enough; False where there are no better ones."""
        needs, before = self._needs(), self.inducing
        errors = {site: unexplained(need.prior.kernel, need.prior.X, before[site]) for site, need in needs.items()}
        self.enough = all(need.is_met(before[site].num_inducing, errors[site]) for site, need in needs.items())
        if self.enough:
            return False
        chosen = self.chosen(needs)
        if any(len(Z) > _MORE * before[site].num_inducing for site, Z in chosen.items()):
            self._begin(self.guide.with_inducing(chosen), self.hyperparameters)
            return True
        state = self.profile.state
        moved = {site: dataclasses.replace(old, Z=_as_many(chosen[site], old.Z)) for site, old in before.items()}
        self.profile.move({f"{site}_{self.guide.prefix}_inducing": value for site, value in moved.items()})
        if self.profile.evaluate({})[0] < self.value:
            return True
        self.profile.state = state
        return False

    def widen(self) -> bool:
        """Give latents outside of the joint posterior the standard deviations that the curvature of the bound says.

        For a Gaussian posterior these are the best ones of independent Gaussians. False where there are too many.
        """
        if not self.scales:
            return True
        locations = [name.removesuffix("_scale") + "_loc" for name in self.scales]
        values = self.profile.unconstrained
        if sum(np.size(values[name]) for name in locations) > _MOST_CURVATURES:
            return False
        curvature = self.profile.curvature(locations)
        widths = {}
        for scale, location in zip(self.scales, locations, strict=True):
            h = curvature[location]
            # Where the bound is flat, or not at its maximum, half a unit is as good as any.
            sd = np.where(h > 1e-4, 1.0 / np.sqrt(np.maximum(h, 1e-4)), 0.5)
            widths[scale] = self._unconstrained_scale(jnp.asarray(sd, values[location].dtype))
        self.profile.move(widths)
        return True


def _as_many(Z: Array, like: Array) -> Array:
    """Inducing inputs, with the first rows of others after them where they are fewer."""
    Z = Z[: len(like)]
    return jnp.concatenate([Z, like[: len(like) - len(Z)]])
