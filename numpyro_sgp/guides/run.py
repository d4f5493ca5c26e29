"""A run of the guide: a base guide for other latents, then the model with its GP sites swapped for posteriors."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
import copy
import dataclasses
from typing import Any, Self

import jax
from jax import Array
from jax.core import Tracer
import numpy as np
import numpyro
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.infer.autoguide import AutoGuide

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.guides.base import BaseGuide
from numpyro_sgp.guides.coupled_terms import refuse_new, unsure_terms
from numpyro_sgp.guides.group import Group
from numpyro_sgp.guides.handlers import (
    GivenGaussianProcesses,
    ImproperAtZero,
    ModelForBase,
    SwapGaussianProcesses,
    is_missing_outcome,
    until,
)
from numpyro_sgp.guides.independent import IndependentRun
from numpyro_sgp.guides.joint_grid import GridRun
from numpyro_sgp.guides.joint_inducing import InducingRun
from numpyro_sgp.guides.joint_rows import RowsRun
from numpyro_sgp.guides.joint_run import AbstractJointRun
from numpyro_sgp.guides.members import Joint, checked_joint, find_groups
from numpyro_sgp.guides.model_runs import first_run
from numpyro_sgp.guides.parameters import SiteParameters, parameter, with_candidates
from numpyro_sgp.posteriors.decoupled.coefficients import ProbedCoefficients
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, AbstractRowFamily
from numpyro_sgp.posteriors.kronecker.family import Kronecker
from numpyro_sgp.posteriors.moments import frozen

__all__ = ["AbstractGuideRun"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Latents:
    """What a guide remembers of the model: a parameter without numbers.

    Attributes:
        names: of the latent variables.
        sites: names of the GP sites.
        groups: which of both are joint.
        unsure: terms, with a GP site, that may depend on several rows of it.
    """

    names: tuple[str, ...]
    sites: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    unsure: tuple[tuple[str, str], ...] = ()

    @property
    def joint(self) -> frozenset[str]:
        """Those that have a joint posterior with GP sites, which the base guide leaves alone."""
        return frozenset(name for group in self.groups for name in group.latents)


def _check_tracked(base_trace: dict[str, dict], trace: dict[str, dict]) -> None:
    """Raise if an optimizer tracks what depends on hyperparameters, and these are drawn anew in each step."""
    params = [site["value"] for site in trace.values() if site["type"] == "param"]
    if not any(isinstance(value, ProbedCoefficients) and value.refresh is not True for value in params):
        return
    drawn = sorted(name for name, site in base_trace.items() if _is_drawn(site))
    if drawn:
        msg = (
            f"`DualAscent` tracks a projection that moves with the hyperparameters, and the base guide draws {drawn} "
            "anew in each step. Pass `refresh=1` to compute it in each step, or fix them, by `base=AutoDelta` or "
            "`handlers.substitute` around the model."
        )
        raise ValueError(msg)


def _unchanged(family: AbstractPosteriorFamily) -> AbstractPosteriorFamily:
    return family


def _is_drawn(site: dict) -> bool:
    return site["type"] == "sample" and not site["is_observed"] and not isinstance(unwrap(site["fn"]), dist.Delta)


def _form_of(args: tuple, kwargs: dict) -> str:
    """Structure of arguments, shapes and types of arrays, and values that a program may branch on."""

    def form(leaf: Any) -> str:
        if isinstance(leaf, Array | np.ndarray):
            return f"{leaf.shape} {leaf.dtype}"
        return "float" if isinstance(leaf, float) else repr(leaf)

    leaves, structure = jax.tree.flatten((args, kwargs))
    return f"{structure} {[form(leaf) for leaf in leaves]}"


def _no_posterior(site: str, *_: Any) -> SparsePosterior:
    msg = f"The GP site {site!r} was to have a value already. Please report this."
    raise RuntimeError(msg)


class AbstractGuideRun(AutoGuide):
    """Runs a base guide, then the model with its GP sites swapped; subclasses say which posterior a site gets."""

    def __init__(self, model: Callable, *, base: Any, prefix: str, joint: Joint = False) -> None:
        if not callable(model):
            msg = f"`model` must be a callable with NumPyro primitives, got {type(model).__name__}. Pass the function."
            raise TypeError(msg)
        super().__init__(model, prefix=prefix)
        self._base = BaseGuide(base, model, prefix)
        self.joint = checked_joint(joint)
        self._checked: set[str] = set()  # forms of arguments with which the model's terms have been checked
        self._wrapped: Callable[[AbstractPosteriorFamily], AbstractPosteriorFamily] = _unchanged
        self._frozen = False

    def with_joint(self, joint: Joint) -> Self:
        """The same guide, not yet run, with other members of its joint posterior.

        Args:
            joint: "auto", False or a tuple of names of sites.
        """
        guide = copy.copy(self)
        guide._base = self._base.anew()
        guide.joint = checked_joint(joint)
        guide._checked = set()
        return guide

    @property
    def base(self) -> Any:
        """The guide for the latents outside of joint posteriors."""
        return self._base.guide

    @abstractmethod
    def family(self, site: str) -> AbstractPosteriorFamily:
        """The posterior family of a GP site."""

    def check_sites(self, sites: set[str]) -> None:
        """Raise if the guide was given names that are no GP sites of the model."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        predicting = numpyro.get_mask() is False
        try:
            trace, sites = self._run_model(*self._prepared(predicting, args, kwargs), predicting, args, kwargs)
            if not predicting:
                self._check_rows(trace, sites, args, kwargs)
        except jax.errors.UnexpectedTracerError as error:
            error.add_note(
                "A kernel is a function: it cannot hold a network that changes when it is called, as one with batch "
                "normalisation or dropout does. Use layer normalisation."
            )
            raise
        except TypeError as error:
            if "'NoneType' and 'int'" in str(error):
                error.add_note(
                    "If a plate has the size None: it needs N, the number of rows of the whole data set. Pass it to "
                    "the model (`num_data=N`)."
                )
            raise
        return {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}

    def _run_base(self, predicting: bool, args: tuple, kwargs: dict) -> tuple[dict[str, dict], tuple[Group, ...]]:
        if not self._base.is_auto:
            base_trace = self._base.run(None, predicting, args, kwargs)
            return base_trace, self._latents(predicting, args, kwargs, base_trace).groups
        found = self._latents(predicting, args, kwargs)
        names = tuple(name for name in found.names if name not in found.joint)
        return self._base.run(names, predicting, args, kwargs) if names else {}, found.groups

    def _latents(
        self, predicting: bool, args: tuple, kwargs: dict, base_trace: Mapping[str, dict] | None = None
    ) -> Latents:
        """Which latents there are, and which are joint: found where the data are given, and remembered."""

        def find(rng_key: Array) -> Latents:
            del rng_key
            self._base.forget_start()
            self._checked.add(_form_of(args, kwargs))
            # Not the model that the base guide sees, which leaves out members once they are known.
            with handlers.block(), handlers.trace() as trace, ImproperAtZero():
                ModelForBase(self.model)(*args, **kwargs)
            sites = [site for site in trace.values() if site["type"] == "sample"]
            outcomes = {site["name"] for site in sites if site["is_observed"]}
            latents = [site["name"] for site in sites if not site["is_observed"]]
            names = tuple(name for name in latents if not is_missing_outcome(name, outcomes))
            candidates = names if self._base.shares_latents else ()
            given = {name: site["value"] for name, site in (base_trace or {}).items() if site["type"] == "sample"}
            found = find_groups(self._with(args, kwargs), self.joint, candidates, self.family, given)
            return Latents(names, *found)

        return parameter(f"{self.prefix}_latents", find, predicting)

    def _check_rows(self, trace: Mapping[str, dict], sites: Collection[str], args: tuple, kwargs: dict) -> None:
        """Raise where the model's terms depend on rows as they did not when the guide was first run.

        Once for each form of the arguments: the program of a model depends on nothing else.
        """
        form = _form_of(args, kwargs)
        if form not in self._checked and set(sites) <= set(trace):
            refuse_new(
                unsure_terms(self._with(args, kwargs), dict(trace), sites), self._latents(False, args, kwargs).unsure
            )
            self._checked.add(form)

    def _prepared(self, predicting: bool, args: tuple, kwargs: dict) -> tuple[dict[str, dict], dict[str, Any]]:
        return self._joint_runs(*self._run_base(predicting, args, kwargs), predicting, args, kwargs)

    def _joint_runs(
        self, base_trace: dict[str, dict], groups: tuple[Group, ...], predicting: bool, args: tuple, kwargs: dict
    ) -> tuple[dict[str, dict], dict[str, Any]]:
        """The joint posteriors given the base guide's values, by GP site, and these values with those drawn."""
        runs: dict[str, Any] = {}
        for group in groups:
            if self.family(group.sites[0]).joins is None:
                runs.update(dict.fromkeys(group.sites, IndependentRun(group)))
        groups = tuple(group for group in groups if group.sites[0] not in runs)
        if not groups:
            return base_trace, runs
        given, swap = GivenGaussianProcesses(0.0), SwapGaussianProcesses(base_trace, _no_posterior, True)
        # No term is needed for that.
        model = until([name for group in groups for name in (*group.sites, *group.latents)], self._with(args, kwargs))
        trace = first_run(model, swap, given)
        base_trace = dict(base_trace)
        for group in groups:
            family = self.family(group.sites[0])
            run: AbstractJointRun
            if isinstance(family, AbstractRowFamily):
                run = RowsRun(group, trace, model, family, self.prefix, predicting)
            elif isinstance(family, Kronecker):
                run = GridRun(group, trace, model, family, self.prefix, predicting)
            else:
                run = InducingRun(group, trace, model, self.family, self.prefix, predicting, frozen=self._frozen)
            base_trace.update(run.latents)
            runs.update(dict.fromkeys(group.sites, run))
        return base_trace, runs

    def _run_model(
        self,
        base_trace: dict[str, dict],
        runs: dict[str, Any],
        predicting: bool,
        args: tuple,
        kwargs: dict,
        *,
        joint: bool = True,
        only: Collection[str] = (),
    ) -> tuple[dict[str, dict], dict[str, SparsePosterior]]:
        """The sites of the guide, and the posteriors among them; `only` names GP sites if nothing else is needed."""

        def posterior(site: str, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> SparsePosterior:
            try:
                run = runs.get(site)
                if isinstance(run, AbstractJointRun):
                    return run.posterior(site, prior, batch_shape)
                param = SiteParameters(site, self.prefix, predicting, probed=not self._frozen)
                moments = self._wrapped(self.family(site)).moments(param, prior, batch_shape)
                moments = frozen(moments) if self._frozen else moments
                if param.growing:
                    moments = with_candidates(param.growing, moments, prior)
            except (TypeError, ValueError) as error:
                error.add_note(f"This was at the GP site {site!r}.")
                raise
            q = SparsePosterior(prior, moments, batch_shape, joint=predicting or run is not None)
            if run is not None:
                run.add(site, q)
                q.independent_run = run
            return q

        swap = SwapGaussianProcesses(base_trace, posterior, predicting, joint=joint)
        with handlers.trace() as trace, handlers.block(hide_fn=swap.hides), swap:
            until(only, self._with(args, kwargs))()
        if not swap.gp_sites:
            msg = (
                "The model has no `GaussianProcess` site to approximate. Write "
                '`f = numpyro.sample("f", numpyro_sgp.GaussianProcess(kernel, X))` in it, or use another guide.'
            )
            raise ValueError(msg)
        self.check_sites(set(swap.gp_sites))
        _check_tracked(base_trace, trace)
        return trace, swap.gp_sites

    def _with(self, args: tuple, kwargs: dict) -> Callable[[], Any]:
        return lambda: self.model(*args, **kwargs)

    def _is_chained(self, base_trace: dict[str, dict], sites: Collection[str], args: tuple, kwargs: dict) -> bool:
        """Whether the prior of a GP site depends on values of another one, as in a deep GP, or may do so."""

        def priors(value: float, spread: float) -> dict[str, list]:
            given, swap = GivenGaussianProcesses(value, spread), SwapGaussianProcesses(base_trace, _no_posterior, True)
            with handlers.block(hide_fn=swap.hides), swap, given:
                until(sites, self._with(args, kwargs))()
            return {name: jax.tree.leaves(prior) for name, prior in given.priors.items()}

        first = priors(0.5, 0.0)
        if len(first) < 2:
            return False
        leaves = [leaf for leaves in first.values() for leaf in leaves]
        # Neither its level nor its scale is that of the first: inputs may be f less its mean, say.
        others = [leaf for leaves in priors(1.0, 0.3).values() for leaf in leaves]
        # What is no number may close over anything, and what is traced has no value yet.
        if any(callable(leaf) or isinstance(leaf, Tracer) for leaf in leaves):
            return True
        return not all(np.array_equal(*pair) for pair in zip(leaves, others, strict=True))

    def _conditioned(self, rng_key: Array, params: Mapping[str, Any]) -> Callable[[Callable], Any]:
        """A context that gives parameters and randomness, and draws jointly."""

        def run(fn: Callable) -> Any:
            values = handlers.substitute(data=dict(params))
            with handlers.block(), handlers.seed(rng_seed=rng_key), values, handlers.mask(mask=False):
                return fn()

        return run

    def joint_groups(self, params: Mapping[str, Any]) -> tuple[Group, ...]:
        """The groups of GP sites and latents with a joint posterior, from fitted parameters."""
        return self._known(params).groups

    def _known(self, params: Mapping[str, Any]) -> Latents:
        return params.get(f"{self.prefix}_latents", Latents(()))

    def posteriors_at(
        self, params: Mapping[str, Any], values: Mapping[str, Array], args: tuple, kwargs: dict
    ) -> dict[str, SparsePosterior]:
        """The posterior of each GP site at the model's inputs, with the latents of the base guide at given values."""
        base_trace = {
            name: {"type": "sample", "fn": numpyro.distributions.Delta(value), "value": value, "intermediates": []}
            for name, value in values.items()
        }
        run = self._conditioned(jax.random.key(0), params)
        groups = self._known(params).groups

        def posteriors() -> dict[str, SparsePosterior]:
            given = self._joint_runs(base_trace, groups, True, args, kwargs)
            return self._run_model(*given, True, args, kwargs, only=self._known(params).sites)[1]

        return run(posteriors)

    def at_latents(
        self, values: Mapping[str, Array], wrapped: Callable[[AbstractPosteriorFamily], AbstractPosteriorFamily]
    ) -> Self:
        """This guide with the latents of the base guide at fixed values, and other posteriors made of its own."""
        guide = copy.copy(self)
        guide._base, guide._wrapped = self._base.fixed(values), wrapped
        return guide

    def frozen(self) -> Self:
        """This guide with moments that have no derivative but that of what the inducing variables leave unexplained."""
        guide = copy.copy(self)
        guide._frozen = True
        return guide

    def medians_of_base(self, params: Mapping[str, Any], args: tuple, kwargs: dict, method: str) -> dict[str, Array]:
        """Posterior medians of the latents of the base guide, for a method that holds them there."""
        if not self._base.is_auto:
            msg = (
                f"`{method}` holds the other latents at their medians, and a base guide of your own has none. Use an "
                "autoguide as `base`, such as `AutoNormal` or `AutoDelta`."
            )
            raise TypeError(msg)
        return self._base_summary(params, args, kwargs, "median")

    def _base_summary(self, params: Mapping[str, Any], args: tuple, kwargs: dict, method: str, *extra: Any) -> dict:
        if not self._base.is_auto:
            msg = (
                f"`{method}` needs a base guide that has one, got a {type(self.base).__name__}. Use `sample_posterior`."
            )
            raise TypeError(msg)
        known = self._known(params)
        if f"{self.prefix}_latents" in params and not set(known.names) - known.joint:
            return {}
        if self._base.sites is None:
            # A guide made afresh: one run tells the base guide the shapes of its sites.
            try:
                self._conditioned(jax.random.key(0), params)(lambda: self._run_base(True, args, kwargs))
            except TypeError as error:
                error.add_note(f"A guide that has not been run yet needs the model's arguments in `{method}` too.")
                raise
        return self._base.summary(params, method, *extra)
