"""Draws of a fitted guide at all rows: values, predictions, densities and likelihoods, as arrays by site.

The guide and the model are run as they stand, through NumPyro's handlers; only the values of the GP sites are drawn
here, so that batches of rows of one draw belong to the same function.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast
import warnings

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from numpyro import handlers
import numpyro.distributions as dist

from numpyro_sgp._internal.checks import num_rows, positive
from numpyro_sgp._internal.pytrees import split_arrays
from numpyro_sgp._internal.signatures import with_num_data
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import posteriors_of
from numpyro_sgp.distributions.wrappers import log_prob_of, observed_mask, unwrap
from numpyro_sgp.guides.handlers import KeysBySite
from numpyro_sgp.kernels.functional import same_rows
from numpyro_sgp.math.linalg import cholesky
from numpyro_sgp.math.products import matvec
from numpyro_sgp.posteriors.moments import Parts
from numpyro_sgp.posteriors.process import UnknownFamilyError, process_of
from numpyro_sgp.posteriors.sites import DatumSites

__all__ = [
    "LIKELIHOOD",
    "LOG_P",
    "LOG_Q",
    "MASK",
    "OBSERVED",
    "POSTERIOR",
    "PREDICTIVE",
    "Draws",
    "Outputs",
    "fitted_values",
    "log_ratio_of_sites",
    "rows_to_cut",
]


Outputs = dict[str, dict[str, Any]]


# What one draw consists of: groups of ArviZ, and what others are made of.
POSTERIOR, PREDICTIVE, LIKELIHOOD, OBSERVED = "posterior", "posterior_predictive", "log_likelihood", "observed_data"
MASK, LOG_P, LOG_Q = "mask", "log_p", "log_q"


def fitted_values(result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and mutable state of what `SVI.run` returns, or of a dict of parameters."""
    if isinstance(result, Mapping):
        return dict(result), {}
    if not isinstance(getattr(result, "params", None), Mapping):
        msg = f"`result` must be what `SVI.run` returns or a dict of parameters, got {type(result).__name__}."
        raise TypeError(msg)
    return dict(result.params), dict(getattr(result.state, "mutable_state", None) or {})


class Draws:
    """Draws of everything, for some rows; the same rng_key gives the same hyperparameters and u for any rows."""

    def __init__(
        self,
        model: Callable,
        guide: Any,
        params: dict[str, Any],
        mutable_state: dict[str, Any],
        rng_key: Array,
        num_samples: int,
    ) -> None:
        self.model, self.guide = model, guide
        self.params, self.mutable_state = params, mutable_state
        self.keys = jax.random.split(rng_key, num_samples)
        # Names of sites with an axis of rows: their randomness is fresh in each batch, that of others is shared.
        self.by_row: frozenset[str] = frozenset()

    def one(
        self,
        params: dict[str, Any],
        key: Array,
        batch: ArrayLike,
        args: tuple,
        kwargs: dict,
        plate: str | None = None,
        rows: Any = None,
    ) -> Outputs:
        """One draw for the batch of that number, of all rows in the arguments or of some rows of a plate."""
        key_guide, key_f, key_model, key_y = jax.random.split(key, 4)
        values = {**params, **self.mutable_state}
        log_ratios: dict[str, Array] = {}

        def batch_of(site: str) -> ArrayLike:
            return batch if site in self.by_row else 0

        def substitute(msg: dict) -> Any:
            if msg["type"] == "plate" and msg["name"] == plate:
                msg["args"] = (msg["args"][0], rows.shape[0])
                return rows
            if msg["type"] == "sample" and msg["value"] is None and isinstance(unwrap(msg["fn"]), SparsePosterior):
                name, q = msg["name"], cast(SparsePosterior, unwrap(msg["fn"]))
                site_key = jax.random.fold_in(key_f, len(log_ratios))
                f, log_ratios[name] = _draw_process(self.guide, values, name, q, site_key, batch_of(name))
                return f
            return None

        def seeded(fn: Callable, rng_key: Array) -> Callable:
            by_row = KeysBySite(jax.random.fold_in(rng_key, batch), self.by_row)

            def run(*args: Any, **kwargs: Any) -> Any:
                with handlers.seed(rng_seed=rng_key), by_row:
                    return fn(*args, **kwargs)

            return run

        guide = handlers.substitute(seeded(self.guide, key_guide), data=values)
        # Guides take a mask of False for a prediction: parameters must be given, and nothing is fitted.
        guide = handlers.mask(handlers.substitute(guide, substitute_fn=substitute), mask=False)
        with handlers.block():
            guide_trace = handlers.trace(guide).get_trace(*args, **kwargs)
        for name, q in posteriors_of(guide_trace).items():
            if q.joint_run is not None:
                log_ratios[name] = q.joint_run.log_ratio(name, q.batch_shape)
        model = handlers.replay(seeded(self.model, key_model), cast(Any, guide_trace))
        model = handlers.substitute(handlers.substitute(model, data=values), substitute_fn=substitute)
        with handlers.block():
            model_trace = handlers.trace(model).get_trace(*args, **kwargs)
        return _collect(guide_trace, model_trace, log_ratios, lambda site: jax.random.fold_in(key_y, batch_of(site)))

    def over_all_rows(self, args: tuple, kwargs: dict, batch_size: int | None) -> Outputs:
        """All draws for all rows, as NumPy arrays with a leading axis of draws."""
        plate, N, B = self._subsampling_plate(args, kwargs) or (None, rows_to_cut(args, batch_size), batch_size)
        if batch_size is not None:
            B = positive("batch_size", batch_size, "None is for all rows at once.")
        if plate is None and (B is None or B >= N):
            # Arguments as the caller gave them, so that a model may look at their values, as under `SVI.run`.
            draws = jax.lax.map(lambda key: self.one(self.params, key, 0, args, kwargs), self.keys)
            return jax.tree.map(np.asarray, draws)
        B = min(cast(int, B), N)
        fixed, arrays = split_arrays((args, kwargs) if plate else (args, {}))
        kwargs = kwargs if plate else with_num_data(self.model, args, kwargs, N)

        def draw(params: dict[str, Any], data: tuple[list, Any], batch: ArrayLike, key: Array) -> Outputs:
            args, arrays_by_keyword = fixed(data[0])
            return self.one(params, key, batch, args, {**kwargs, **arrays_by_keyword}, plate, data[1])

        def cut(rows: np.ndarray) -> tuple[list, Any]:
            return (arrays, jnp.asarray(rows)) if plate else ([leaf[rows[0] : rows[-1] + 1] for leaf in arrays], None)

        return self._joined(N, B, draw, cut)

    def _joined(self, N: int, B: int, draw: Callable, data: Callable) -> Outputs:
        """Outputs of batches of B rows, joined along the axes whose length follows the number of rows."""

        def shapes(B: int) -> Any:
            return jax.eval_shape(draw, self.params, data(np.arange(B)), 0, self.keys[0])

        axes = jax.tree.map(
            lambda a, b: [axis for axis, (i, j) in enumerate(zip(a.shape, b.shape, strict=True)) if i != j],
            shapes(B),
            shapes(B + 1 if B < N else B - 1),
        )
        self.by_row = frozenset(name for sites in axes.values() for name, site_axes in sites.items() if site_axes)

        @jax.jit
        def draws(params: dict[str, Any], data: Any, batch: Array, keys: Array) -> Outputs:
            return jax.lax.map(lambda key: draw(params, data, batch, key), keys)

        # The last batch is a whole one too, so that nothing is compiled again: it repeats rows, which are dropped.
        parts, new = [], []
        for batch, start in enumerate(range(0, N, B)):
            rows = np.arange(B) + min(start, N - B)
            part = draws(self.params, data(rows), jnp.asarray(batch), self.keys)
            parts.append(jax.tree.map(np.asarray, part))
            new.append(rows >= start)
        outputs: Outputs = {group: {} for group in axes}
        for group, sites in axes.items():
            for name, site_axes in sites.items():
                joined = _join(group, name, [part[group][name] for part in parts], new, site_axes)
                if joined is not None:
                    outputs[group][name] = joined
        return outputs

    def _subsampling_plate(self, args: tuple, kwargs: dict) -> tuple[str, int, int] | None:
        """Name, size and subsample size of the plate that subsamples when the model is given all data, if any."""
        found: dict[str, tuple[str, int, int]] = {}

        def look(msg: dict) -> None:
            if msg["type"] == "plate":
                size, subsample_size = msg["args"]
                if subsample_size is not None and subsample_size < size:
                    found[msg["name"]] = msg["name"], size, subsample_size

        def run(key: Array) -> None:
            values = {**self.params, **self.mutable_state}
            guide = handlers.substitute(handlers.seed(self.guide, key), data=values)
            with handlers.block(), handlers.mask(mask=False), handlers.substitute(substitute_fn=look):
                guide(*args, **kwargs)

        jax.eval_shape(run, self.keys[0])
        if len(found) > 1:
            msg = (
                f"The plates {sorted(found)} all subsample, so there is no one axis of rows to run through. Give the "
                "model the whole data with full plates (`subsample_size=None`), in an `SVI` object made for it."
            )
            raise ValueError(msg)
        return next(iter(found.values()), None)


def _draw_process(
    guide: Any, params: dict[str, Any], site: str, q: SparsePosterior, rng_key: Array, batch: ArrayLike
) -> tuple[Array, Array]:
    """f(X) ~ q, and log q(u)/p(u) for the u it was drawn with, (...).

    f = E[f | u] + a residual of covariance Cov(f | u): the draw of u is the same in all batches.
    """
    key_u, key_f = jax.random.split(rng_key)
    covariance, dtype = q.moments.covariance, q.moments.mean.dtype
    assert covariance is not None
    shape = q.batch_shape + q.event_shape
    parts = covariance.draw_parts(jax.random.fold_in(key_f, batch), shape, of_inducing=key_u)
    if parts is not None:
        f = q.mean + parts.explained
        return f + parts.rest, log_ratio_of_sites(params[f"{site}_{guide.prefix}_sites"], q, f, parts)
    residual = cholesky(q.covariance_given_inducing(q.prior.relative_jitter))
    f = q.mean + matvec(residual, jax.random.normal(jax.random.fold_in(key_f, batch), shape, dtype))
    nan = jnp.full(q.batch_shape, jnp.nan, dtype)
    try:
        process = process_of(guide, params, site, q)
    except UnknownFamilyError:
        process = None
    if covariance.num_noise is None:
        return f, nan if process is None else log_ratio_of_sites(params[f"{site}_{guide.prefix}_sites"], q, f)
    noise = jax.random.normal(key_u, (*q.batch_shape, covariance.num_noise), dtype)
    return f + covariance.deviation(noise), nan if process is None else process.log_ratio(noise)


def log_ratio_of_sites(sites: DatumSites, q: SparsePosterior, f: Array, parts: Parts | None = None) -> Array:
    """The log ratio log q(f)/p(f) = Σ_n log t_n(f_n) − log Z, with log Z = E_q[Σ_n log t_n(f_n)] − KL.

    With f the part that the sites see, of a draw of `parts`.
    """
    if parts is not None and parts.log_sites is not None:
        assert parts.log_normaliser is not None
        return parts.log_sites - parts.log_normaliser
    if sites.X.shape != q.prior.X.shape:
        return jnp.full(q.batch_shape, jnp.nan, f.dtype)
    centred, m = f - q.prior.prior_mean, q.moments.mean
    linear = sites.lambda1 * (centred - m)
    rest = None if q.moments.covariance is None else q.moments.covariance.unexplained(q.kernel(q.prior.X))
    variance = q.variance if rest is None else q.variance - rest
    quadratic = sites.Lambda2 * (centred * centred - variance - m * m)
    ratio = jnp.sum(linear - 0.5 * quadratic, axis=-1) + q.kl
    return jnp.where(same_rows(sites.X, q.prior.X), ratio, jnp.nan)


def _collect(
    guide_trace: Mapping[str, dict],
    model_trace: Mapping[str, dict],
    log_ratios: Mapping[str, Array],
    key_of: Callable[[str], Array],
) -> Outputs:
    groups = (POSTERIOR, PREDICTIVE, LIKELIHOOD, OBSERVED, MASK, LOG_P, LOG_Q)
    outputs: Outputs = {group: {} for group in groups}
    for name, site in guide_trace.items():
        if site["type"] == "sample":
            ratio = log_ratios.get(name)
            outputs[LOG_Q][name] = log_prob_of(site["fn"], site["value"]) if ratio is None else ratio
    for number, (name, site) in enumerate(model_trace.items()):
        if site["type"] == "deterministic":
            outputs[POSTERIOR][name] = jnp.asarray(site["value"])
        elif site["type"] != "sample":
            continue
        elif site["is_observed"]:
            _collect_observed(outputs, name, site, jax.random.fold_in(key_of(name), number))
        elif name in guide_trace:
            outputs[POSTERIOR][name] = site["value"]
            if name not in log_ratios:
                outputs[LOG_P][name] = log_prob_of(site["fn"], site["value"])
        else:
            outputs[PREDICTIVE][name] = site["value"]
    return outputs


def _collect_observed(outputs: Outputs, name: str, site: dict, rng_key: Array) -> None:
    fn, value = site["fn"], jnp.asarray(site["value"])
    log_prob = log_prob_of(fn, value)
    outputs[LOG_P][name] = log_prob
    if isinstance(unwrap(fn), dist.Unit):
        return
    outputs[LIKELIHOOD][name] = log_prob
    outputs[OBSERVED][name] = jnp.broadcast_to(value, log_prob.shape + fn.event_shape)
    outputs[MASK][name] = jnp.broadcast_to(observed_mask(fn), log_prob.shape)
    whole = fn if fn.batch_shape == log_prob.shape else fn.expand(log_prob.shape)
    outputs[PREDICTIVE][name] = whole.sample(rng_key)


def rows_to_cut(args: tuple, batch_size: int | None) -> int:
    """N, the number of rows of the arrays among the arguments; 0 where no batches are needed."""
    if batch_size is None:
        return 0
    return num_rows(
        split_arrays(args)[1],
        "`batch_size` cuts the positional arguments of the model into rows, so all their arrays need the same number "
        "of rows",
        "Pass the data by position, and what has no rows by keyword.",
    )


def _join(group: str, name: str, values: list[np.ndarray], new: list[np.ndarray], axes: list[int]) -> np.ndarray | None:
    """The values of a site for all rows, from those of batches; None where that is impossible."""
    if len(axes) == 1:
        axis = axes[0] + 1  # after the draws
        return np.concatenate([np.compress(keep, v, axis=axis) for keep, v in zip(new, values, strict=True)], axis=axis)
    # Sums in another order differ by rounding; what is a function of the batch differs by more.
    if not axes and all(np.allclose(value, values[0], rtol=1e-5, equal_nan=True) for value in values):
        return values[0]
    shape = values[0].shape[1:]
    if group == POSTERIOR:
        msg = (
            f"The site {name!r} of shape {shape} is a function of a batch, not of its rows one by one, and is left "
            "out. Run the model on all rows at once to get it."
        )
        warnings.warn(msg, stacklevel=5)
        return None
    msg = (
        f"The site {name!r} depends on the rows of a batch but has no single axis of rows (shape {shape} for a batch), "
        f"so its {group} for all rows is unknown. Run the model on all rows at once, or sample the site in the plate."
    )
    raise ValueError(msg)
