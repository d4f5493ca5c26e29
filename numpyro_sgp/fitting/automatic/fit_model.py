"""`fit_model`: a sample of the rows or all of them is searched, then minibatches where all are too many."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import time
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.svi import SVIRunResult, SVIState
import optax

from numpyro_sgp._internal.checks import positive
from numpyro_sgp.fitting.automatic.budget import BATCH, parsed_budget
from numpyro_sgp.fitting.automatic.needs import inducing_of, priors_at
from numpyro_sgp.fitting.automatic.placing import unexplained
from numpyro_sgp.fitting.automatic.report import FitReport, FitResult, evidence_of, khat_of
from numpyro_sgp.fitting.automatic.search import NEGLIGIBLE, Search
from numpyro_sgp.fitting.automatic.task import Task, effects, few_rows, is_over_time
from numpyro_sgp.fitting.batches import checked_batch_size, checked_rows
from numpyro_sgp.fitting.training import train
from numpyro_sgp.guides.members import Joint
from numpyro_sgp.losses.quadrature_elbo import QuadratureELBO
from numpyro_sgp.optim import NaturalGradient
from numpyro_sgp.posteriors.family import Inducing

__all__ = ["fit_model"]

# A larger data set is first seen through a sample of its rows, and then as a whole if that takes at most this many
# operations N M²: about a second on a core.
_SAMPLE, _MOST_OPERATIONS = 2000, 2e9
# A function of more times than these is smoothed; more than those are first seen through a part of them.
_MANY_TIMES, _PART_OF_TIMES = 2000, 10_000
# The share of a time budget that goes to the search on a sample, where training on all rows follows.
_SHARE_OF_SEARCH = 0.35
# Steps of the first cycle and of the longest.
_FIRST_CYCLE, _LONGEST_CYCLE = 500, 4000
# Where step sizes start in a cycle: of Adam, and ρ. At its end the sites are averages over so many epochs, or steps.
_RATE, _RHO = 0.03, 0.3
_LAST_EPOCHS, _MOST_LAST_STEPS = 5, 200
# Batches on which the bound is compared between cycles.
_COMPARED = 20


def fit_model(
    model: Callable,
    rng_key: Array,
    data: Any,
    *,
    budget: str | float | Sequence[str | float] | None,
    num_inducing: int | None,
    inducing: Inducing | Mapping[str, Inducing] | None,
    learn_inducing: bool | None,
    base: Any,
    joint: Joint | None,
    loss: QuadratureELBO | None,
    batch_size: int | None,
    num_steps: int | None,
    progress_bar: bool,
) -> FitResult:
    """Choose inducing inputs, optimizer and schedule for a model, and fit it; see `fit`."""
    started, allowed = time.perf_counter(), parsed_budget(budget)
    rows = checked_rows((rng_key,), data)
    if num_inducing is not None:
        num_inducing = positive("num_inducing", num_inducing, "None lets `fit` choose.")
    if batch_size is not None:
        batch_size = checked_batch_size(batch_size, rows)
    task = Task(
        model=model,
        data=data,
        rows=rows,
        loss=QuadratureELBO() if loss is None else loss,
        base=AutoNormal if base is None else base,
        joint="auto" if joint is None else joint,
        inducing=inducing,
        learn_inducing=learn_inducing,
        most_inducing=num_inducing or allowed.most_inducing(),
        number_given=num_inducing is not None,
        most_whole=allowed.most_whole() if num_inducing is None else 0,
        deadline=started + allowed.seconds,
        base_given=base is not None,
    )
    key_search, key_train = jax.random.split(jax.random.fold_in(rng_key, 1))
    every, some = np.arange(rows), np.sort(np.random.default_rng(0).permutation(rows)[:_SAMPLE])
    free = num_inducing is None and inducing is None and learn_inducing is None and batch_size is None
    if free and rows > _MANY_TIMES and is_over_time(task, every[: min(rows, _PART_OF_TIMES)], key_search):
        task = dataclasses.replace(task, over_time=True)
        return _smoothed(task, joint is None, key_search, key_train, num_steps, started, progress_bar)
    # Without `num_data` a model does not know that it sees a part.
    whole = not task.keywords(rows) or (rows <= _SAMPLE if batch_size is None else batch_size == rows)
    if joint is None:
        task = dataclasses.replace(task, joint=effects(task, every if whole else some, key_search))
    if free and whole and rows <= task.most_whole:
        task = dataclasses.replace(task, few=few_rows(task, every, key_search))
    first = task if whole else dataclasses.replace(task, deadline=started + _SHARE_OF_SEARCH * allowed.seconds)
    search = Search(first, every if whole else some, key_search)
    search.run()
    search.task = task
    if not whole and batch_size is None and search.profile.exact and search.enough:
        M = search.num_inducing
        if rows * M**2 <= _MOST_OPERATIONS and allowed.allows(M, rows):
            guide = search.sparse_guide.with_inducing(search.inducing)
            search = Search(task, every, key_search, guide, search.hyperparameters)
            search.run()
            whole = True
    if whole and search.deterministic and num_steps is None and search.widen():
        return _searched(search, key_train, started)
    if batch_size is None:
        batch_size = rows if whole else min(BATCH, rows)
    return _trained(search, key_train, batch_size, num_steps, started, progress_bar)


def _smoothed(
    task: Task,
    choose_joint: bool,
    key_search: Array,
    key_train: Array,
    num_steps: int | None,
    started: float,
    progress_bar: bool,
) -> FitResult:
    """A function of time: hyperparameters from some of the times that follow one another, then from all."""
    every = np.arange(task.rows)
    some = every[: min(task.rows, _PART_OF_TIMES)]
    if choose_joint:
        task = dataclasses.replace(task, joint=effects(task, some, key_search))
    search = Search(task, some, key_search)
    search.run()
    if len(some) < task.rows:
        search = Search(task, every, key_search, search.guide, search.hyperparameters)
        search.run()
    if search.deterministic and num_steps is None and search.widen():
        return _searched(search, key_train, started)
    return _trained(search, key_train, task.rows, num_steps, started, progress_bar)


def _searched(search: Search, rng_key: Array, started: float) -> FitResult:
    """The end of a search as that of an ordinary optimizer."""
    profile, task, guide, params = search.profile, search.task, search.guide, search.profile.unconstrained
    correlated = search.covariance is not None and not task.base_given
    if correlated:
        learns = bool(search.inducing) and search.sparse_guide.learns_inducing
        guide = dataclasses.replace(task, base=AutoMultivariateNormal).guide(
            search.inducing or None, learn_inducing=learns
        )
    svi = SVI(task.model, guide, NaturalGradient(0.5, optax.adam(0.1 * _RATE)), task.loss)
    if correlated:
        params, search.guide = search.correlate(svi), guide
    else:
        svi.constrain_fn = profile.svi.constrain_fn
    state = SVIState(svi.optim.init(params), profile.state.mutable_state, rng_key)
    form = "smoothed over time, " if search.task.over_time else "" if search.inducing else "dense posterior, "
    method = f"all at once, {form}L-BFGS with {profile.evaluations} evaluations"
    return _result(search, svi, state, jnp.asarray([search.value]), method, search.converged, started, searched=True)


def _trained(
    search: Search, rng_key: Array, batch_size: int, num_steps: int | None, started: float, progress_bar: bool
) -> FitResult:
    """Natural steps and Adam on batches: cycles of falling step sizes, each twice as long, while the bound rises."""
    task, keywords, start = search.task, search.task.keywords(search.task.rows), None
    inducing = search.inducing if task.inducing is None else task.inducing
    if search.deterministic:
        search.widen()
        # All rows say more than the sample.
        shrink = (search.rows / task.rows) ** 0.5
        start = search.hyperparameters
        start = {name: shrink * value if name in search.scales else value for name, value in start.items()}
        inducing = search.chosen() if task.inducing is None and search.inducing else task.inducing
    if search.inducing:
        # Those that explain a sample leave more of a rougher function that all rows ask for.
        learns = search.learns or (batch_size < task.rows and task.inducing is None and task.learn_inducing is None)
        search.guide = search.sparse_guide.with_inducing(inducing, learn_inducing=learns)
    guide = search.guide
    last_rho = max(batch_size / (_LAST_EPOCHS * task.rows), 1.0 / _MOST_LAST_STEPS)

    def cycle(length: int) -> SVI:
        rho = optax.cosine_decay_schedule(_RHO, length, min(1.0, last_rho / _RHO))
        optim = NaturalGradient(rho, optax.adam(optax.cosine_decay_schedule(_RATE, length)))
        return SVI(task.model, guide, optim, task.loss)

    length = num_steps or _FIRST_CYCLE
    svi = cycle(length)

    def init(key: Array, params: dict[str, Any] | None, args: tuple) -> SVIState:
        return svi.init(key, *args, init_params=params, **keywords)

    batch = task.args(np.arange(batch_size))
    state = init(rng_key, None, batch) if start is None else jax.jit(init)(rng_key, start, batch)

    @jax.jit
    def loss_of(params: dict[str, Any], args: tuple) -> Array:
        return task.loss.loss(rng_key, params, task.model, guide, *args, **keywords)

    def loss_after(run: SVIRunResult) -> float:
        """Of the same rows and with the same random numbers after each cycle."""
        params = {**run.params, **(run.state.mutable_state or {})}
        return float(np.mean([loss_of(params, task.args(rows)) for rows in compared]))

    order = np.random.default_rng(0).permutation(task.rows)
    batches = order[: len(order) // batch_size * batch_size].reshape(-1, batch_size)
    compared = np.sort(batches[:_COMPARED], axis=1)
    total, reached = 0, np.inf
    while True:
        begun = time.perf_counter()
        run = train(
            svi,
            jax.random.fold_in(rng_key, total),
            task.data,
            batch_size=batch_size,
            num_steps=length,
            init_state=state,
            progress_bar=progress_bar,
            callback=lambda _: task.is_over,
        )
        state, total = run.state, total + len(run.losses)
        loss = np.inf if num_steps else loss_after(run)
        converged = reached - loss < NEGLIGIBLE * task.rows
        left = (task.deadline - time.perf_counter()) * len(run.losses) / (time.perf_counter() - begun)
        length = 2 * length
        if num_steps or converged or length > _LONGEST_CYCLE or left < 0.2 * _FIRST_CYCLE:
            method = f"batches of {batch_size}, {total} steps"
            return _result(search, svi, state, run.losses, method, converged, started, searched=False)
        reached, length = loss, int(min(length, 0.9 * left))
        following = cycle(length)
        following.constrain_fn = svi.constrain_fn
        params = svi.optim.get_params(state.optim_state)
        svi, state = following, SVIState(following.optim.init(params), state.mutable_state, state.rng_key)


def _result(
    search: Search, svi: SVI, state: Any, losses: Array, method: str, converged: bool, started: float, *, searched: bool
) -> FitResult:
    task, guide, params = search.task, search.guide, svi.get_params(state)
    inducing, values, priors = inducing_of(guide, params), {}, {}
    if not task.over_time:
        values, priors = priors_at(task.model, guide, params, search.args, search.kwargs, search.rng_key)
    evidence = khat = None
    if search.rows == task.rows and len(priors) == 1 and not any(g.latents for g in guide.joint_groups(params)):
        ((site, prior),) = priors.items()
        given = {**params, **{name: value for name, value in values.items() if name != site}}
        evidence = evidence_of(task.model, given, site, prior, inducing.get(site), search.args, search.kwargs)
    if evidence is None and priors and search.rows == task.rows and search.deterministic and not task.is_over:
        given = {**params, **(state.mutable_state or {})}
        khat = khat_of(search.rng_key, svi, given, values, priors, search.args, search.kwargs)
    chosen = () if task.base_given else search.latents
    report = FitReport(
        num_rows=task.rows,
        method=method,
        num_inducing={site: value.num_inducing for site, value in inducing.items()},
        unexplained={site: unexplained(priors[site].kernel, priors[site].X, Z) for site, Z in inducing.items()},
        enough=search.enough or all(each.num_inducing >= task.rows for each in inducing.values()),
        converged=converged,
        evidence=evidence,
        khat=khat,
        joint=tuple((*group.sites, *group.latents) for group in guide.joint_groups(params)),
        laplace=chosen if searched else (),
        independent=() if searched else chosen,
        seconds=time.perf_counter() - started,
    )
    return FitResult(guide, params, state, losses, svi, report)
