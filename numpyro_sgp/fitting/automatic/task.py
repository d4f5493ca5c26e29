"""What `fit` is asked to fit, which guide it gets, and which latents are joint with GP sites."""

from collections.abc import Callable
import dataclasses
import time
from typing import Any, NamedTuple, cast
import warnings

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
import optax

from numpyro_sgp._internal.programs import interpret
from numpyro_sgp._internal.signatures import with_num_data
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.fitting.automatic.added import added_latents
from numpyro_sgp.fitting.program import Arguments
from numpyro_sgp.guides.handlers import GivenGaussianProcesses
from numpyro_sgp.guides.members import Joint
from numpyro_sgp.guides.model_runs import first_run
from numpyro_sgp.losses.quadrature_elbo import QuadratureELBO
from numpyro_sgp.optim import NaturalGradient
from numpyro_sgp.posteriors.dual.guide import AutoTSVGP
from numpyro_sgp.posteriors.markov.family import Markov
from numpyro_sgp.posteriors.markov.guide import AutoMarkovGP

__all__ = ["Task", "effects", "few_rows", "is_over_time"]

# Where one natural step leads to the best sites, all rows are cheap up to a larger number.
_FEW, _FEW_GAUSSIAN = 300, 700


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
        most_whole: up to how many rows may be fitted without a sparse approximation.
        deadline: when to end, by `time.perf_counter`.
        over_time: whether the posterior is that of `AutoMarkovGP`, without inducing inputs.
        few: up to how many rows the posterior is dense from the start; 0 for a model that is not for that.
        base_given: whether the user has chosen `base`.
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
    over_time: bool = False
    few: int = 0
    base_given: bool = False

    def args(self, index: np.ndarray) -> tuple:
        """Arguments of the model with some of the rows."""
        part = self.data if len(index) == self.rows else jax.tree.map(lambda leaf: np.asarray(leaf[index]), self.data)
        return Arguments.positional(jax.tree.map(jnp.asarray, part))

    def keywords(self, rows: int) -> dict[str, int]:
        """Its keyword arguments with that many rows in all."""
        return with_num_data(self.model, (), {}, rows)

    def guide(self, inducing: Any, *, learn_inducing: bool = False) -> AutoTSVGP | AutoMarkovGP:
        """The guide."""
        if self.over_time:
            return AutoMarkovGP(self.model, base=self.base, joint=self.joint)
        return AutoTSVGP(self.model, inducing, base=self.base, joint=self.joint, learn_inducing=learn_inducing)

    @property
    def is_over(self) -> bool:
        """Whether the time is spent."""
        return time.perf_counter() > self.deadline


def is_over_time(task: Task, index: np.ndarray, rng_key: Array) -> bool:
    """Whether the model has one function of time, with a state-space kernel, which each row sees at its own time.

    Then smoothing is exact and cheaper than inducing inputs. It is decided by tracing a step; nothing is computed.
    """
    family = Markov(num_harmonics=0)  # so that nothing is approximated
    return _has_sites_in_rows(dataclasses.replace(task, over_time=True), index, rng_key, family.check_prior)


def few_rows(task: Task, index: np.ndarray, rng_key: Array) -> int:
    """Up to how many rows the dense posterior, `AutoTSVGP(model, None)`, is cheap; 0 for a model that is not for it.

    It takes one function at inputs that do not change, of which each row sees its own value. It is decided by tracing a
    step; nothing is computed.
    """
    if not _has_sites_in_rows(task, index, rng_key):
        return 0
    of_latents, of_params, outcomes = _inputs(task, index, rng_key)
    if of_latents or of_params:
        return 0
    return _FEW_GAUSSIAN if all(isinstance(fn, dist.Normal) for fn in outcomes) else _FEW


def has_latent_inputs(task: Task, index: np.ndarray, rng_key: Array) -> bool:
    """Whether the inputs of a GP site depend on latents, as in a GPLVM. It is decided by tracing the model."""
    return _inputs(task, index, rng_key).of_latents


class _Inputs(NamedTuple):
    """Of all GP sites.

    Attributes:
        of_latents: whether they depend on draws of latents.
        of_params: whether they depend on parameters of the model.
        outcomes: distributions of the observed sites.
    """

    of_latents: bool
    of_params: bool
    outcomes: list[Any]


def _inputs(task: Task, index: np.ndarray, rng_key: Array) -> _Inputs:
    args, kwargs = task.args(index), task.keywords(len(index))
    outcomes: list[Any] = []

    def run(key: Array, params: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        given = GivenGaussianProcesses(0.0)
        model = handlers.substitute(handlers.seed(task.model, key), data=params)
        trace = first_run(lambda: model(*args, **kwargs), given)
        samples = [site for site in trace.values() if site["type"] == "sample"]
        outcomes[:] = [unwrap(site["fn"]) for site in samples if site["is_observed"]]
        declared = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
        return declared, [prior.X for prior in given.priors.values()]

    params, _ = jax.eval_shape(lambda key: run(key, {}), rng_key)
    program = jax.make_jaxpr(lambda *free: run(*free)[1])(rng_key, params).jaxpr

    def move(of_key: bool) -> bool:
        free = [(number == 0) == of_key for number in range(len(program.invars))]
        return any(interpret(program, free, lambda _: False, lambda _, operands: any(operands)))

    return _Inputs(move(True), move(False), outcomes)


def _has_sites_in_rows(
    task: Task, index: np.ndarray, rng_key: Array, check_prior: Callable[[GaussianProcess], None] | None = None
) -> bool:
    """Whether the model has one GP site, of one latent, and a guide with a site in each row takes it."""
    args, kwargs, given = task.args(index), task.keywords(len(index)), GivenGaussianProcesses(0.0)
    svi = SVI(task.model, task.guide(None), NaturalGradient(0.5), task.loss)

    def trace(key: Array, args: tuple) -> bool:
        trace = first_run(lambda: task.model(*args, **kwargs), given)
        if len(given.priors) != 1 or any(trace[site]["fn"].batch_shape for site in given.priors):
            return False
        if check_prior is not None:
            check_prior(next(iter(given.priors.values())))
        svi.update(cast(SVIState, svi.init(key, *args, **kwargs)), *args, **cast(dict[str, Any], kwargs))
        return True

    try:
        # A warning says that only values could tell whether rows are coupled.
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            return _traced(trace, rng_key, args)
    except (TypeError, ValueError, UserWarning):  # of the guide; those of the model itself come again
        return False


def _traced(fn: Callable[..., bool], *args: Any) -> bool:
    """What a function of numbers says when it is traced."""
    said: list[bool] = []
    jax.eval_shape(lambda *args: said.append(fn(*args)), *args)
    return said[0]


def effects(task: Task, index: np.ndarray, rng_key: Array) -> Joint:
    """GP sites that are joint in "auto" with each other, or with latents that are added to them, and these latents.

    Given the others the bound has a closed form for Gaussian noise, and its curvature says how sure they are. Those are
    latents of restricted support that do more than move f, such as noise scales, and factors of a GP site, which start
    at a saddle if joint.
    """
    args, kwargs = task.args(index), task.keywords(len(index))
    guide = task.guide(_first_row)
    svi = SVI(task.model, guide, optax.set_to_zero(), task.loss)
    state = jax.eval_shape(lambda key: svi.init(key, *args, **kwargs), rng_key)
    groups = guide.joint_groups(svi.optim.get_params(state.optim_state))
    if not any(group.latents or len(group.sites) > 1 for group in groups):
        return False
    latents = {name for group in groups for name in group.latents}
    added = added_latents(lambda: task.model(*args, **kwargs), latents, rng_key)
    names: list[str] = []
    for group in groups:
        kept = [name for name in group.latents if name in added]
        names += [*group.sites, *kept] if kept or len(group.sites) > 1 else []
    return tuple(names) or False


def _first_row(kernel: Callable, X: Any, rng_key: Array) -> Array:
    del kernel, rng_key
    return X[:1]
