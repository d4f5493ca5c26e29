"""`Streaming`: a posterior that sees batches of data once, in order.

The sites of rows that have gone by are kept as sums, so memory and time of a batch do not grow with the stream. Three
things would make the sums wrong, and each has its answer: inducing inputs that move (the sums are projected on the new
ones), hyperparameters that move (a small memory of past rows, whose sites are computed anew), and data that drift (the
sums are discounted).
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_sgp._internal.checks import at_least, num_rows, positive
from numpyro_sgp._internal.signatures import with_num_data
from numpyro_sgp.fitting.moved_inducing import can_move, projected, projection, rung
from numpyro_sgp.guides.conditioning import sites_of_data, sites_of_rows, with_past
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.inducing import InducingPoints, kmeans
from numpyro_sgp.inducing.selection import pivots_of
from numpyro_sgp.losses.quadrature_elbo import Particle, QuadratureELBO
from numpyro_sgp.optim import NaturalGradient
from numpyro_sgp.optim.closure import all_finite
from numpyro_sgp.posteriors.sites import AbstractSites, TiedSites

__all__ = ["Streaming", "StreamingState"]

Rows = tuple[Any, ...]
Sites = dict[str, TiedSites]


class StreamingState(NamedTuple):
    """What a stream is known by between batches; a pytree of arrays.

    Attributes:
        svi_state: of the `SVI` object.
        past: sites of the rows that are not in the memory, by parameter.
        memory: arguments of the model for the rows in the memory.
        keys: a random number for each of them; the rows with the largest stay, (m,).
        num_seen: how many rows there have been.
        rng_key: a key.
    """

    svi_state: SVIState
    past: Sites
    memory: Rows
    keys: Array
    num_seen: Array
    rng_key: Array


class Streaming:
    """Trains a posterior on batches that come once, in order, with bounded memory and time for each.

    In each batch the rows at hand are those of the batch and of the memory. With the sites t of all others as pseudo
    observations of u, steps of the `SVI` object maximise

        Σ_n E_q[log p(y_n | f_n)] + E_q[log t(u)] − KL(q(u) ‖ p(u)) − KL(q(θ) ‖ p(θ)) + w Σ_m E[log p(y_m | f_m)].

    Then rows leave, and their sites are added to t. The last term is a sum over the memory, which stands for all past
    rows by its weight w. It has a derivative with respect to what u leaves unexplained of f, and to parameters of the
    likelihood, which t does not know of. A memory as large as the stream makes each batch a fit to all rows.

    Args:
        svi: with a guide whose GP sites have tied sites, `AutoTSVGP(model, inducing)`, and `NaturalGradient`.
        memory: how many past rows are kept, a uniform sample of all that there have been. While it fills, each batch
            meets another number of rows and compiles anew.
        num_steps: steps of the `SVI` object for each batch.
        move_inducing: whether inducing inputs follow the data. While all rows are in the memory they are the centres
            of these (`kmeans`). Later, from those there are, and some centres of the rows of a batch, those stay that
            explain most (`greedy_variance`). Inducing variables of another kind, those of functionals, and those of
            several latents with kernels of their own stay where they are.
        max_inducing: the most of them. There are more where the data go, and fewer where they are not needed any more;
            each change compiles anew. None keeps their number.
        tolerance: the share of the prior variance at inducing inputs and new rows, in (0, 1), that may stay
            unexplained, beyond which there are more of them.
        discount: in (0, 1], the factor of past sites with each batch, for data that drift.

    Raises:
        TypeError: `svi` has another optimizer or loss, or a guide whose sites are not tied, or whose inducing inputs
            the optimizer trains.
        ValueError: a number outside its range.

    References:
        Bui, Nguyen and Turner (2017), "Streaming sparse Gaussian process approximations", for the sites as pseudo
        observations; Chang, Verma, John, Solin and Khan (2023), "Memory-based dual Gaussian processes for sequential
        learning", for the memory, which is chosen by leverage there.
    """

    def __init__(
        self,
        svi: SVI,
        *,
        memory: int = 256,
        num_steps: int = 20,
        move_inducing: bool = True,
        max_inducing: int | None = None,
        tolerance: float = 1e-3,
        discount: float = 1.0,
    ) -> None:
        if not isinstance(svi.optim, NaturalGradient) or not isinstance(svi.guide, AbstractAutoSparseGP):
            msg = (
                f"`Streaming` needs a guide with tied sites and `NaturalGradient`, got {type(svi.guide).__name__} and "
                f"{type(svi.optim).__name__}. Use `AutoTSVGP(model, inducing)` and `NaturalGradient()`."
            )
            raise TypeError(msg)
        if not isinstance(svi.loss, QuadratureELBO):
            msg = f"`Streaming` needs `QuadratureELBO` as the loss, got {type(svi.loss).__name__}."
            raise TypeError(msg)
        if not 0.0 < discount <= 1.0:
            msg = f"`discount` must lie in (0, 1], got {discount!r}. 1 forgets nothing."
            raise ValueError(msg)
        if not 0.0 < tolerance < 1.0:
            msg = f"`tolerance` must lie in (0, 1), a share of the prior variance, got {tolerance!r}. Try 1e-3."
            raise ValueError(msg)
        if max_inducing is not None:
            max_inducing = positive("max_inducing", max_inducing, "None keeps the number of inducing inputs.")
        self.svi = svi
        self.memory = at_least(0, "memory", memory, "The default is 256.")
        self.num_steps = positive("num_steps", num_steps, "The default is 20.")
        self.move_inducing = move_inducing
        self.max_inducing = max_inducing
        self.tolerance = tolerance
        self.discount = discount
        self._train = jax.jit(self._trained, static_argnames=("kept", "num_steps", "kwargs"))
        self._look = jax.jit(self._kernels, static_argnames="kwargs")
        self._move = jax.jit(self._moved, static_argnames="kwargs")
        self._forget = jax.jit(self._forgotten, static_argnames="kwargs")

    def init(
        self, rng_key: Array, *args: Any, init_params: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> StreamingState:
        """The state before the first batch, which is not trained on here.

        Args:
            rng_key: a key.
            args: arguments of the model, as in `update`.
            init_params: fitted parameters to go on from; the rows they were fitted to are past.
            kwargs: keyword arguments of the model.
        """
        key, own = jax.random.split(rng_key)
        given = self._kwargs(args, tuple(kwargs.items()))
        svi_state = self.svi.init(key, *args, init_params=init_params, **given)
        params = self.svi.get_params(svi_state)
        sites = {name: value for name, value in params.items() if isinstance(value, AbstractSites)}
        for name, value in sites.items():
            self._check_sites(name, value)
        past = jax.tree.map(jnp.zeros_like, cast(Sites, sites))
        if init_params is not None:
            past = sites_of_data(self.svi.guide, params, args, given, "Streaming")
        raw = self.svi.optim.get_params(svi_state.optim_state)
        optim_state = self.svi.optim.init({**raw, **with_past({name: raw[name] for name in past}, past)})
        svi_state = svi_state._replace(optim_state=optim_state)
        memory = jax.tree.map(lambda x: jnp.asarray(x)[:0], args)
        return StreamingState(svi_state, past, memory, jnp.zeros(0), jnp.asarray(0), own)

    def _check_sites(self, name: str, value: AbstractSites) -> None:
        if not isinstance(value, TiedSites) or value.reference is not None:
            msg = (
                f"`Streaming` needs sites that are sums over the data, at inducing inputs which it moves itself. The "
                f'parameter {name!r} is another. Use `AutoTSVGP` with `sites="tied"` and `learn_inducing=False`.'
            )
            raise TypeError(msg)

    def get_params(self, state: StreamingState) -> dict[str, Any]:
        """The parameters so far, for the guide."""
        params = self.svi.get_params(state.svi_state)
        return {
            name: dataclasses.replace(value, past=None) if isinstance(value, TiedSites) else value
            for name, value in params.items()
        }

    def update(
        self, state: StreamingState, *args: Any, num_steps: int | None = None, **kwargs: Any
    ) -> tuple[StreamingState, Array]:
        """Train on a batch, and let go of it.

        Args:
            state: before the batch.
            args: arguments of the model: arrays with a row for each datum of the batch, or None. A model that has an
                argument `num_data` is given the number of rows at hand.
            num_steps: of this batch; the first may need more, while hyperparameters are far off.
            kwargs: keyword arguments of the model; hashable.

        Returns:
            The new state, and the loss of each step.

        Raises:
            ValueError: arguments with different numbers of rows; no step with a finite loss, or rows whose sites are
                not finite, as of outcomes that are NaN. The state before the batch is as it was.
        """
        batch, seen = _num_rows(args), int(state.num_seen)
        rows = jax.tree.map(lambda old, new: jnp.concatenate([old, jnp.asarray(new)]), state.memory, args)
        kept = _num_rows(rows) - batch
        given = tuple(sorted(kwargs.items()))
        key_keys, key_inducing, rng_key = jax.random.split(state.rng_key, 3)
        keys, past = state.keys, state.past
        params = self.svi.optim.get_params(state.svi_state.optim_state)
        if self.discount < 1.0:
            forgotten = {name: _scaled(value, self.discount - 1.0) for name, value in past.items()}
            params = {**params, **{name: _sum(params[name], value) for name, value in forgotten.items()}}
            past = {name: _scaled(value, self.discount) for name, value in past.items()}
            keys = keys * self.discount
        params, past = self._adapted(params, past, rows, batch, seen, key_inducing, given)
        weight = jnp.asarray(seen / kept - 1.0 if kept else 0.0)
        svi_state, losses = self._train(
            state.svi_state, params, past, rows, weight, kept=kept, num_steps=num_steps or self.num_steps, kwargs=given
        )
        _check_finite(jnp.isfinite(losses).any())
        keys = jnp.concatenate([keys, jax.random.uniform(key_keys, (batch,), keys.dtype)])
        order = np.argsort(-np.asarray(keys), kind="stable")
        stay, leave = np.sort(order[: self.memory]), np.sort(order[self.memory :])
        if len(leave):
            params = self.get_params(state._replace(svi_state=svi_state))
            past = self._forget(params, past, jax.tree.map(lambda x: x[leave], rows), kwargs=given)
            _check_finite(all_finite(past))
        memory = jax.tree.map(lambda x: x[stay], rows)
        return StreamingState(svi_state, past, memory, keys[stay], state.num_seen + batch, rng_key), losses

    def _kwargs(self, rows: Rows, given: tuple) -> dict[str, Any]:
        return with_num_data(self.svi.model, rows, dict(given), _num_rows(rows))

    def _trained(
        self,
        svi_state: SVIState,
        params: dict[str, Any],
        past: Sites,
        rows: Rows,
        weight: Array,
        *,
        kept: int,
        num_steps: int,
        kwargs: tuple,
    ) -> tuple[SVIState, Array]:
        """Steps of the optimizer on the rows at hand and the past."""
        svi, optim = self.svi, cast(NaturalGradient, self.svi.optim)
        loss, memory = cast(QuadratureELBO, svi.loss), jax.tree.map(lambda x: x[:kept], rows)
        step, before = svi_state.optim_state
        _, state = optim.init({**params, **with_past({name: params[name] for name in past}, past)})
        state = state._replace(others_state=_like(before.others_state, state.others_state), refused=before.refused)

        def update(carry: Any, key: Array) -> tuple[Any, Array]:
            def fn(values: dict[str, Any]) -> tuple[Array, None]:
                values = self._constrained(values)

                def bound(guide: Any, args: Rows, **parts: bool) -> Array:
                    given = self._kwargs(args, kwargs)
                    return Particle(loss, key, values, svi.model, guide, args, given, **parts).elbo()[0]

                value = bound(svi.guide, rows)
                if kept:
                    rest = bound(svi.guide.frozen(), memory, latent=False)
                    value = value + weight.astype(rest.dtype) * rest
                return -value, None

            (value, _), carry = optim.eval_and_update(fn, carry)
            return carry, value

        rng_key, own = jax.random.split(svi_state.rng_key)
        optim_state, losses = jax.lax.scan(update, (step, state), jax.random.split(own, num_steps))
        return SVIState(optim_state, None, rng_key), losses

    def _constrained(self, params: dict[str, Any]) -> dict[str, Any]:
        assert self.svi.constrain_fn is not None
        return self.svi.constrain_fn(params)

    def _posteriors(self, params: Mapping[str, Any], rows: Rows, kwargs: tuple) -> dict[str, Any]:
        guide, given = self.svi.guide, self._kwargs(rows, kwargs)
        values = guide.medians_of_base(params, rows, given, "Streaming")
        return guide.posteriors_at(params, values, rows, given)

    def _kernels(self, params: dict[str, Any], rows: Rows, *, kwargs: tuple) -> dict[str, Any]:
        """Kernel and inputs of each GP site."""
        posteriors = self._posteriors(params, rows, kwargs)
        return {site: (q.prior.kernel, q.prior.X) for site, q in posteriors.items()}

    def _adapted(
        self,
        params: dict[str, Any],
        past: Sites,
        rows: Rows,
        batch: int,
        seen: int,
        rng_key: Array,
        kwargs: tuple,
    ) -> tuple[dict[str, Any], Sites]:
        """Inducing inputs for where the data are now, and the sites at these."""
        # At first they are what the guide was given, unless there may be more.
        if not self.move_inducing or (seen == 0 and self.max_inducing is None):
            return params, past
        sites = self._look(self._constrained(params), rows, kwargs=kwargs)
        all_here = not any(np.any(x) for x in jax.tree.leaves(past))
        moved = {}
        for site, (kernel, X) in sites.items():
            name = f"{site}_{self.svi.guide.prefix}_inducing"
            if not can_move(params[name], X, jax.eval_shape(kernel, X)):
                continue
            Z, M = np.asarray(params[name].Z), params[name].num_inducing
            most = self.max_inducing or M
            # As many as their share in all rows: the sample is then one of all rows.
            new, share = (np.asarray(X), 1.0) if all_here else (np.asarray(X)[-batch:], batch / (seen + batch))
            number = min(len(np.unique(new, axis=0)), int(np.ceil(most * share)))
            found = np.asarray(kmeans(None, new, rng_key, num_inducing=number))
            # Sums that are projected lose a little. Where there are none yet, all may move.
            together = found if all_here and number == most else np.concatenate([Z, found])
            if self.max_inducing is not None:
                needed = len(pivots_of(kernel, together, min(most, len(together)), self.tolerance))
                M = rung(M, needed, most, len(together))
            chosen = pivots_of(kernel, together, M, 0.0)
            # Where these explain everything, the others are as good as any.
            rest = np.setdiff1d(np.arange(len(together)), chosen)
            chosen = np.concatenate([chosen, rest[: M - len(chosen)]])
            moved[name] = InducingPoints(jnp.asarray(together[np.sort(chosen)]))
        if not moved:
            return params, past
        return self._move(params, past, moved, rows, kwargs=kwargs)

    def _moved(
        self, params: dict[str, Any], past: Sites, inducing: dict[str, InducingPoints], rows: Rows, *, kwargs: tuple
    ) -> tuple[dict[str, Any], Sites]:
        """The sites as functions of E[u | u′], for inducing inputs that have moved from u to u′."""
        guide = self.svi.guide
        posteriors = self._posteriors(self._constrained(params), rows, kwargs)
        maps, groups = {}, guide.joint_groups(params)
        for site, q in posteriors.items():
            name = f"{site}_{guide.prefix}_inducing"
            if name in inducing:
                B = projection(params[name], inducing[name], q.prior.kernel, q.prior.relative_jitter)
                maps[site] = jnp.broadcast_to(B, (*q.batch_shape, *B.shape[-2:]))
        result, before = {**params, **inducing}, past
        past = dict(past)
        for site, B in maps.items():
            name = f"{site}_{guide.prefix}_sites"
            if name in past:
                result[name], past[name] = (projected(value, B) for value in (params[name], before[name]))
        for group in groups:
            spans = {site: posteriors[site].joint_run.gaussian.spans[site] for site in group.sites}
            size = sum(C * M for _, C, M in spans.values())
            name = f"{group.sites[0]}_{guide.prefix}_joint_sites"
            P = params[name].lambda1.shape[-1] - size
            blocks = [
                block
                for site, (_, C, M) in spans.items()
                for block in (maps[site].reshape(C, M, -1) if site in maps else jnp.broadcast_to(jnp.eye(M), (C, M, M)))
            ]
            B = jax.scipy.linalg.block_diag(*blocks, jnp.eye(P)) if P else jax.scipy.linalg.block_diag(*blocks)
            for symbol in ("joint_sites", "effect_sites"):
                name = f"{group.sites[0]}_{guide.prefix}_{symbol}"
                if name in past:
                    result[name], past[name] = (projected(value, B) for value in (params[name], before[name]))
        return result, past

    def _forgotten(self, params: dict[str, Any], past: Sites, rows: Rows, *, kwargs: tuple) -> Sites:
        """The past sites with those of rows that leave."""
        given = self._kwargs(rows, kwargs)
        found = sites_of_rows(self.svi.guide, params, rows, given, "Streaming", cast(QuadratureELBO, self.svi.loss))
        return {name: _sum(value, found[name]) for name, value in past.items()}


def _num_rows(args: Rows) -> int:
    """How many rows the arguments of the model have."""
    return num_rows(
        jax.tree.leaves(args),
        "`Streaming` needs arguments with one row for each datum of the batch",
        "Bind the others to the model, `functools.partial(model, W=W)`, or give what is no array by keyword.",
        least=0,
    )


def _like(old: Any, new: Any) -> Any:
    """The old state of a transformation, zeros of the new shapes where those have changed."""
    return jax.tree.map(lambda a, b: a if jnp.shape(a) == jnp.shape(b) else b, old, new)


def _check_finite(is_finite: Array) -> None:
    if not is_finite:
        msg = (
            "The losses of this batch, or the sites of some of its rows, are not finite. Look for NaN in it, and go on "
            "from the state before it."
        )
        raise ValueError(msg)


def _scaled(sites: TiedSites, factor: float) -> TiedSites:
    return dataclasses.replace(sites, lambda1=factor * sites.lambda1, Lambda2=factor * sites.Lambda2)


def _sum(one: TiedSites, other: TiedSites) -> TiedSites:
    return dataclasses.replace(one, lambda1=one.lambda1 + other.lambda1, Lambda2=one.Lambda2 + other.Lambda2)
