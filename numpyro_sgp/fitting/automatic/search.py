"""The search for hyperparameters and inducing inputs: L-BFGS on the best bound of some rows."""

import dataclasses
import functools
import time
from typing import Any, cast

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.distributions.transforms import biject_to
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuide, AutoNormal

from numpyro_sgp.distributions.wrappers import is_real
from numpyro_sgp.fitting.automatic.laplace import laplace_approximation, num_evaluations
from numpyro_sgp.fitting.automatic.needs import Need, inducing_of, needs_of, priors_at
from numpyro_sgp.fitting.automatic.placing import place, placed, unexplained
from numpyro_sgp.fitting.automatic.profile import Profile
from numpyro_sgp.fitting.automatic.task import Task, has_latent_inputs
from numpyro_sgp.guides.base import packed_index
from numpyro_sgp.guides.joint_run import INITIAL_SCALE
from numpyro_sgp.posteriors.dual.guide import AutoTSVGP
from numpyro_sgp.posteriors.markov.guide import AutoMarkovGP

__all__ = ["NEGLIGIBLE", "Search"]

# Nats a row: what gains less was the last of its kind.
NEGLIGIBLE = 1e-3
# The first search has so many, as its hyperparameters are still wrong; so few rows may all be inducing inputs.
_FIRST, _FEW = 100, 300
# Another number of inducing inputs needs another program: so it is taken only where they are many more.
_MORE = 1.3
_STARTS = 3
_MOST_CHOICES = 4
# L-BFGS is asked after so many iterations whether they were worth it: with inducing inputs to train it hardly ends.
_ITERATIONS, _MOST_ROUNDS = 100, 5
# Standard deviations of latents, unconstrained, while their means are searched for.
_NARROW = 1e-6
# So many latents at most get a Laplace approximation, whose cost grows with them.
_MOST_ENTRIES = 100


class Search:
    """L-BFGS on the best bound of some rows, while inducing inputs are chosen again as hyperparameters settle.

    Args:
        task: what is to be fitted.
        index: the rows.
        rng_key: a key.
        guide: a guide that has been run before, or None.
        init_params: its hyperparameters, from which alone the search starts.

    Attributes:
        guide: the guide.
        profile: the bound at its inducing inputs.
        deterministic: whether the loss depends on no random numbers; where it does, nothing is searched.
        enough: whether the inducing inputs explain as much as is wanted.
        value: the loss.
        converged: whether the search ended by itself.
        covariance: of the latents outside of the joint posterior, in the order of `scales`, once `widen` has found it.
    """

    def __init__(
        self,
        task: Task,
        index: np.ndarray,
        rng_key: Array,
        guide: AutoTSVGP | AutoMarkovGP | None = None,
        init_params: dict[str, Any] | None = None,
    ) -> None:
        self.task, self.rng_key, self.rows = task, rng_key, len(index)
        self._goes_on = init_params is not None
        self.args, self.kwargs = task.args(index), task.keywords(len(index))
        self.value, self.converged = np.inf, False
        self.covariance: np.ndarray | None = None
        self._is_gaussian: bool | None = None  # what `widen` has found
        number = len(index) if len(index) <= _FEW or task.number_given else _FIRST
        first = functools.partial(place, most=min(number, task.most_inducing))
        given = first if task.inducing is None else task.inducing
        if len(index) == task.rows <= min(task.few, task.most_whole):
            given = None
        self._begin(task.guide(given) if guide is None else guide, init_params)
        self.enough = task.inducing is not None or not self.inducing
        # A number for each row: a mode of latent inputs fits rows one by one, and leads far from their posterior.
        many = self._num_entries >= self.rows and has_latent_inputs(task, index, rng_key)
        self.deterministic = not many and self.profile.is_deterministic(jax.random.fold_in(rng_key, 1))

    @property
    def latents(self) -> tuple[str, ...]:
        """Those outside of the joint posterior that the search had independent Gaussians for."""
        ending = f"_{self.guide.prefix}_scale"
        return tuple(name.removesuffix(ending) for name in self.profile.unconstrained if name.endswith(ending))

    def _begin(self, guide: AutoTSVGP | AutoMarkovGP, init_params: dict[str, Any] | None) -> None:
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
    def sparse_guide(self) -> AutoTSVGP:
        """The guide, where there are inducing inputs."""
        return cast(AutoTSVGP, self.guide)

    @property
    def inducing(self) -> dict[str, Any]:
        """Inducing variables, by GP site."""
        return inducing_of(self.guide, self.profile.params)

    @property
    def num_inducing(self) -> int:
        """The largest M."""
        return max((each.num_inducing for each in self.inducing.values()), default=0)

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
        if self._goes_on:
            self._minimise()
        else:
            self._minimise_from_several_starts()
        if self.task.inducing is None and self.inducing:
            for _ in range(_MOST_CHOICES):
                before = self.value
                if self._is_over() or not self._choose():
                    break
                self._minimise()
                if before - self.value < NEGLIGIBLE * self.rows:
                    break
            if self._may_take_all:
                self._search_with_all_rows(start)
        if self.learns and self.inducing and not self._is_over():
            self._begin(self.sparse_guide.with_inducing(self.inducing, learn_inducing=True), self.hyperparameters)
            self._minimise()

    @property
    def _may_take_all(self) -> bool:
        """Whether the best sites take one step, all rows are few enough to be inducing inputs, and there is time."""
        few = self.num_inducing < self.rows == self.task.rows <= self.task.most_whole
        return few and bool(self.profile.exact) and not self._is_over()

    def _search_with_all_rows(self, start: dict[str, Any]) -> None:
        """Begin anew without a sparse approximation, and keep that if it is better by more than nothing.

        That is the dense posterior, or where the model is not for it every row as an inducing input.

        A rough function needs many inducing inputs, so that with few of them a smoother one with more noise has the
        higher bound, wherever the search starts.
        """
        best = self.guide, self.profile, self.value, self.enough, self.converged
        every = None
        if not self.task.few:
            of_data = self.profile.params, self.args, self.kwargs
            _, priors = priors_at(self.task.model, self.guide, *of_data, self.rng_key)
            every = {site: place(p.kernel, p.X, self.rng_key, most=self.rows) for site, p in priors.items()}
        self._begin(self.sparse_guide.with_inducing(every), start)
        found = best[1].unconstrained
        self._minimise_from([{name: found[name] for name in self._locations}, self._alike()])
        if self.value > best[2] - NEGLIGIBLE * self.rows:
            self.guide, self.profile, self.value, self.enough, self.converged = best
        else:
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
        base = self.guide.base
        if not isinstance(base, AutoGuide):
            return {}
        sites, values, found = cast(Any, base).prototype_trace, self.profile.unconstrained, {}
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
        if self.inducing and not self.sparse_guide.learns_inducing:
            fixed |= {f"{site}_{self.guide.prefix}_inducing" for site in self.inducing}
        self.value = np.inf
        for _ in range(_MOST_ROUNDS):
            before = self.value
            self.value, ended = self.profile.minimise(fixed, _ITERATIONS, self._is_over)
            self.converged = ended or before - self.value < NEGLIGIBLE * self.rows
            if self.converged or self._is_over():
                break

    def _minimise_from_several_starts(self) -> None:
        """From the start and from places around it: long lengthscales often lead astray."""
        values, names = self.profile.unconstrained, self._locations
        starts = [self._alike()]
        for number in range(1, _STARTS if names else 1):
            key = jax.random.fold_in(self.rng_key, number)
            moved = {}
            for index, name in enumerate(names):
                signs = jax.random.rademacher(jax.random.fold_in(key, index), jnp.shape(values[name]))
                moved[name] = values[name] + signs.astype(values[name].dtype)
            starts.append(moved)
        self._minimise_from(starts)

    def _minimise_from(self, starts: list[dict[str, Array]]) -> None:
        """The best end of searches that start with some of the parameters moved; those for which there is time."""
        start, ends = self.profile.state, []
        for moved in starts:
            self.profile.state = start
            self.profile.move(moved)
            self._minimise()
            ends.append((self.value, self.converged, self.profile.state))
            if self._is_over():
                break
        self.value, self.converged, self.profile.state = min(ends, key=lambda end: end[0])

    def _needs(self) -> dict[str, Need]:
        """What the hyperparameters found so far ask for, by GP site."""
        task, params, data = self.task, self.profile.params, (self.args, self.kwargs)
        values, priors = priors_at(task.model, self.guide, params, *data, self.rng_key)
        return needs_of(task.model, {**params, **values}, priors, *data, rows=task.rows, most=task.most_inducing)

    def chosen(self, needs: dict[str, Need] | None = None) -> dict[str, Array]:
        """Inducing inputs for the hyperparameters found so far; `enough` says whether they are."""
        needs = self._needs() if needs is None else needs
        found, most = {}, self.task.most_inducing
        for number, (site, need) in enumerate(needs.items()):
            key = jax.random.fold_in(self.rng_key, number)
            if self.task.number_given:
                found[site] = placed(need.prior.kernel, need.prior.X, key, most=most, tolerance=0.0)
            else:
                found[site] = need.chosen(key, most)
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
            self._begin(self.sparse_guide.with_inducing(chosen), self.hyperparameters)
            return True
        state = self.profile.state
        moved = {site: dataclasses.replace(old, Z=_as_many(chosen[site], old.Z)) for site, old in before.items()}
        self.profile.move({f"{site}_{self.guide.prefix}_inducing": value for site, value in moved.items()})
        if self.profile.evaluate({})[0] < self.value:
            return True
        self.profile.state = state
        return False

    def _is_over(self) -> bool:
        """Whether there is time for nothing but the Laplace approximation."""
        number = num_evaluations(self._num_entries) if 0 < self._num_entries <= _MOST_ENTRIES else 0
        return time.perf_counter() + number * self.profile.seconds > self.task.deadline

    @property
    def _num_entries(self) -> int:
        """How many numbers the latents outside of the joint posterior have."""
        values = self.profile.unconstrained
        return sum(np.size(values[name]) for name in self.scales)

    def widen(self) -> bool:
        """Give latents outside of the joint posterior their Laplace approximation, and its `covariance`.

        False where the bound does not agree, and where they are too many, which get the same standard deviation.
        """
        if self._is_gaussian is None:
            self._is_gaussian = self._widened()
        return self._is_gaussian

    def _widened(self) -> bool:
        if not self.scales:
            return True
        if self._num_entries > _MOST_ENTRIES:
            values, scale = self.profile.unconstrained, self._unconstrained_scale(jnp.asarray(INITIAL_SCALE))
            self.profile.move({name: jnp.full_like(values[name], scale) for name in self.scales})
            return False
        sd, self.covariance, is_gaussian = laplace_approximation(self.profile, self._of_scales)
        flat, unravel = ravel_pytree([self.profile.unconstrained[name] for name in self._of_scales])
        widths = [self._unconstrained_scale(each) for each in unravel(jnp.asarray(sd, flat.dtype))]
        self.profile.move(dict(zip(self.scales, widths, strict=True)))
        return is_gaussian

    def correlate(self, svi: SVI) -> dict[str, Array]:
        """Give latents outside of the joint posterior the Laplace approximation with `covariance`.

        Args:
            svi: with a guide whose base is `AutoMultivariateNormal`; it has not been run.

        Returns:
            Its unconstrained parameters.
        """
        # Traced, so that it finds the latents and the constraints; nothing is computed.
        jax.eval_shape(lambda key, args: svi.init(key, *args, **self.kwargs), self.rng_key, self.args)
        names, before, index = self._of_scales, self.profile.unconstrained, packed_index(svi.guide.base)
        latents = [name.removesuffix(f"_{self.guide.prefix}_loc") for name in names]
        order = np.concatenate([np.ravel(index[latent]) for latent in latents])
        loc, covariance = np.zeros(len(order)), np.zeros((len(order), len(order)))
        loc[order] = ravel_pytree([before[name] for name in names])[0]
        covariance[np.ix_(order, order)] = self.covariance
        dtype = before[names[0]].dtype
        L = jnp.asarray(np.linalg.cholesky(covariance), dtype)
        params = {name: value for name, value in before.items() if name not in {*names, *self.scales}}
        params[f"{self.guide.prefix}_loc"] = jnp.asarray(loc, dtype)
        params[f"{self.guide.prefix}_scale_tril"] = biject_to(svi.guide.base.scale_tril_constraint).inv(L)
        return params

    @property
    def _of_scales(self) -> list[str]:
        """Where those latents are whose standard deviations are `scales`."""
        return [name.removesuffix("_scale") + "_loc" for name in self.scales]


def _as_many(Z: Array, like: Array) -> Array:
    """Inducing inputs, with the first rows of others after them where they are fewer."""
    Z = Z[: len(like)]
    return jnp.concatenate([Z, like[: len(like) - len(Z)]])
