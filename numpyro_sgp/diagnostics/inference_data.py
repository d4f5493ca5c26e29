"""From a fitted guide to ArviZ: posterior, predictions, likelihood and densities of every draw, in one object.

The guide and the model are run as they stand, through NumPyro's handlers; only the values of the GP sites are drawn
here, so that batches of rows of one draw belong to the same function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import datetime as dt
from importlib import metadata
import inspect
import math
from types import ModuleType
from typing import Any, NamedTuple, Protocol, cast
import warnings

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI

from numpyro_sgp.distributions import SparsePosterior, log_prob_of, observed_mask, unwrap
from numpyro_sgp.linalg import cholesky, matmul, matvec, matvec_transposed
from numpyro_sgp.predict import ProcessPosterior, UnknownFamilyError, process_of
from numpyro_sgp.sites import DatumSites

__all__ = ["to_arviz"]


class Result(Protocol):
    """What `SVI.run` returns: an `SVIRunResult` is one."""

    @property
    def params(self) -> dict[str, Any]:
        """Fitted parameters."""
        ...

    @property
    def state(self) -> Any:
        """The last state, for mutable sites."""
        ...


Outputs = dict[str, dict[str, Any]]

# What one draw consists of, by the names used inside this module; only some of them become groups of their own.
_POSTERIOR, _PREDICTIVE, _LIKELIHOOD, _OBSERVED, _MASK = "posterior", "predictive", "likelihood", "observed", "mask"
_LOG_P, _LOG_Q = "log_p", "log_q"


def to_arviz(
    rng_key: Array,
    svi: SVI,
    result: Result | Mapping[str, Any],
    *model_args: Any,
    num_samples: int = 1000,
    batch_size: int | None = None,
    coords: Mapping[str, ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    **model_kwargs: Any,
) -> Any:
    """Draws from a fitted guide with all that ArviZ asks about them: a `DataTree`, or `InferenceData` before ArviZ 1.

    Groups, with one chain:

    * `posterior`: all latent variables, the GP sites at the rows of the data, and deterministic sites.
    * `posterior_predictive`: replicates of the observed sites given the draw, and sites the model leaves unobserved.
    * `log_likelihood`: log p(y_n | f_n, θ) for each datum, without the scale of plates and of `handlers.scale`.
    * `sample_stats`: `lp` = log p(y | f, θ) + log p(θ), factors included; `log_q` = log q(θ) + log q(u | θ)/p(u | θ).
      Densities of u are relative to its prior, so that they do not depend on coordinates of u. Both share the factor
      p(f | u, θ), so lp − log_q is the log importance ratio of the draw, and its mean estimates the ELBO. `log_q` is
      NaN for a dense posterior at other rows than those it was fitted to, and for posteriors that are not a Gaussian
      q(u).
    * `observed_data`, and `constant_data`: the model's array arguments that are not the values of an observed site.

    Entries of observed sites that `handlers.mask` (or a masked distribution) leaves out are absent from
    `log_likelihood`, `posterior_predictive` and `observed_data`, along a dimension `{site}_observed` that has the
    coordinates of the entries kept; so `az.loo` counts what was observed. Factors have no datum and are absent too.

    Minibatches. Give all of the data here. A model that subsamples inside a plate is run over all rows of that plate in
    batches of its own size. A model that is given its rows as arguments is run on all of them at once, in O(N³) for the
    joint draws of f; `batch_size` cuts the positional arguments into rows instead, as `fit` does, and passes the number
    of all rows as `num_data` to a model that takes it. Batches share hyperparameters and u; given these, f is drawn
    independently from batch to batch.

    Args:
        rng_key: a key.
        svi: the fitted `SVI` object; its model and guide are used.
        result: what `SVI.run` returned, or a dict of parameters.
        model_args: arguments of the model: all of the data, outcomes included.
        num_samples: number of draws.
        batch_size: rows in a batch; None for all at once, or for the batch size of the model's own plate.
        coords: coordinate values of dimensions, as in ArviZ.
        dims: names of dimensions of a variable, without chain and draw, as in ArviZ.
        model_kwargs: keyword arguments of the model; never cut into rows.

    Raises:
        ImportError: ArviZ is not installed.
        TypeError: `result` holds no parameters.
        ValueError: no site is observed; `batch_size` where arguments are not rows of equal number; names or lengths in
            `coords` and `dims` that do not fit.

    References:
        Vehtari, Gelman and Gabry (2017), "Practical Bayesian model evaluation using leave-one-out cross-validation and
        WAIC"; Yao, Vehtari, Simpson and Gelman (2018), "Yes, but did it work? Evaluating variational inference", for
        importance ratios of a variational posterior.
    """
    az = arviz_module()
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        msg = f"`num_samples` must be a positive integer, got {num_samples!r}."
        raise ValueError(msg)
    params, mutable_state = fitted_values(result)
    kwargs = {**svi.static_kwargs, **model_kwargs}
    draws = _Draws(svi.model, svi.guide, params, mutable_state, rng_key, num_samples)
    outputs = draws.over_all_rows(model_args, kwargs, batch_size)
    names = _Names(coords or {}, dims or {})
    groups = _groups(outputs, _constant(svi.model, model_args, kwargs), names)
    names.check_used()
    return _as_arviz(az, groups)


def arviz_module() -> ModuleType:
    try:
        import arviz as az
    except ImportError as error:
        error.add_note("`to_arviz` needs ArviZ: pip install 'numpyro-sgp[arviz]', or arviz itself.")
        raise
    return az


def fitted_values(result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if isinstance(result, Mapping):
        return dict(result), {}
    params = getattr(result, "params", None)
    if not isinstance(params, Mapping):
        msg = (
            f"`result` must be what `SVI.run` returns or a dict of parameters, got {type(result).__name__}. "
            "For a state write svi.get_params(state)."
        )
        raise TypeError(msg)
    return dict(params), dict(getattr(result.state, "mutable_state", None) or {})


# One draw.


class _Rows(NamedTuple):
    """Which rows a run of the model sees: all that its arguments hold, or some of a plate that subsamples."""

    plate: str | None = None
    indices: Any = None


class _Draws:
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

    def one(self, params: dict[str, Any], key: Array, batch: ArrayLike, rows: _Rows, args: tuple, kwargs: dict) -> Any:
        """One draw as `Outputs`; `batch` is the number of the batch that the rows are."""
        key_guide, key_f, key_model, key_y = jax.random.split(key, 4)
        values = {**params, **self.mutable_state}
        log_ratios: dict[str, Array] = {}

        def batch_of(site: str) -> ArrayLike:
            return batch if site in self.by_row else 0

        def substitute(msg: dict) -> Any:
            if msg["type"] == "plate" and msg["name"] == rows.plate:
                msg["args"] = (msg["args"][0], rows.indices.shape[0])
                return rows.indices
            if msg["type"] == "sample" and msg["value"] is None and isinstance(unwrap(msg["fn"]), SparsePosterior):
                name, q = msg["name"], cast(SparsePosterior, unwrap(msg["fn"]))
                site_key = jax.random.fold_in(key_f, len(log_ratios))
                f, log_ratios[name] = _draw_process(self.guide, values, name, q, site_key, batch_of(name))
                return f
            return None

        guide = handlers.substitute(handlers.seed(self.guide, key_guide), data=values)
        # Guides take a mask of False for a prediction: parameters must be given, and nothing is fitted.
        guide = handlers.mask(handlers.substitute(guide, substitute_fn=substitute), mask=False)
        with handlers.block():
            guide_trace = handlers.trace(guide).get_trace(*args, **kwargs)
        model = handlers.replay(handlers.seed(self.model, key_model), cast(Any, guide_trace))
        model = handlers.substitute(handlers.substitute(model, data=values), substitute_fn=substitute)
        with handlers.block():
            model_trace = handlers.trace(model).get_trace(*args, **kwargs)
        return _collect(guide_trace, model_trace, log_ratios, lambda site: jax.random.fold_in(key_y, batch_of(site)))

    def over_all_rows(self, args: tuple, kwargs: dict, batch_size: int | None) -> Outputs:
        """All draws for all rows, as NumPy arrays with a leading axis of draws."""
        plate = self._subsampling_plate(args, kwargs)
        N, B = plate.args if plate is not None else (num_rows(args, batch_size), batch_size)
        B = B if batch_size is None else batch_size
        if isinstance(B, bool) or (B is not None and (not isinstance(B, int) or B < 1)):
            msg = f"`batch_size` must be a positive integer or None, got {batch_size!r}."
            raise ValueError(msg)
        if plate is None and (B is None or B >= N):
            # Arguments as the caller gave them, so that a model may look at their values, as under `SVI.run`.
            draw = jax.lax.map(lambda key: self.one(self.params, key, 0, _Rows(), args, kwargs), self.keys)
            return jax.tree.map(np.asarray, draw)
        B = min(cast(int, B), N)
        if plate is not None:
            return self._by_indices(plate.name, N, B, args, kwargs)
        return self._by_arguments(N, B, args, with_num_data(self.model, args, kwargs, N))

    def _by_indices(self, plate: str, N: int, B: int, args: tuple, kwargs: dict) -> Outputs:
        fixed, dynamic = _partition((args, kwargs))

        def draw(params: dict[str, Any], data: tuple[list, Array], batch: ArrayLike, key: Array) -> Outputs:
            leaves, indices = data
            args, kwargs = fixed(leaves)
            return self.one(params, key, batch, _Rows(plate, indices), args, kwargs)

        def like(B: int) -> Any:
            return dynamic, jax.ShapeDtypeStruct((B,), jnp.asarray(0).dtype)

        return self._joined(N, B, draw, lambda rows: (dynamic, jnp.asarray(rows)), like)

    def _by_arguments(self, N: int, B: int, args: tuple, kwargs: dict) -> Outputs:
        fixed, dynamic = _partition(args)

        def draw(params: dict[str, Any], data: list, batch: ArrayLike, key: Array) -> Outputs:
            return self.one(params, key, batch, _Rows(), fixed(data), kwargs)

        def like(B: int) -> Any:
            return [jax.ShapeDtypeStruct((B, *np.shape(leaf)[1:]), jnp.result_type(leaf)) for leaf in dynamic]

        return self._joined(N, B, draw, lambda rows: [leaf[rows[0] : rows[-1] + 1] for leaf in dynamic], like)

    def _joined(self, N: int, B: int, draw: Callable, data: Callable, like: Callable) -> Outputs:
        """Outputs of batches of B rows, joined along the axes whose length follows the number of rows."""

        def shapes(B: int) -> Any:
            return jax.eval_shape(draw, self.params, like(B), 0, self.keys[0])

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
        starts = range(0, N, B)
        rows = [np.arange(B) + min(start, N - B) for start in starts]
        new = [batch_rows >= start for batch_rows, start in zip(rows, starts, strict=True)]
        parts = [
            jax.tree.map(np.asarray, draws(self.params, data(batch_rows), jnp.asarray(batch), self.keys))
            for batch, batch_rows in enumerate(rows)
        ]
        outputs: Outputs = {group: {} for group in axes}
        for group, sites in axes.items():
            for name, site_axes in sites.items():
                joined = _join(group, name, [part[group][name] for part in parts], new, site_axes)
                if joined is not None:
                    outputs[group][name] = joined
        return outputs

    def _subsampling_plate(self, args: tuple, kwargs: dict) -> "_Plate | None":
        """The plate that subsamples when the model is given all data, if there is one."""
        found: dict[str, _Plate] = {}

        def look(msg: dict) -> None:
            if msg["type"] == "plate":
                size, subsample_size = msg["args"]
                if subsample_size is not None and subsample_size < size:
                    found[msg["name"]] = _Plate(msg["name"], (size, subsample_size))

        values = {**self.params, **self.mutable_state}

        def run(key: Array) -> None:
            model = handlers.substitute(handlers.seed(self.guide, key), data=values)
            with handlers.block(), handlers.mask(mask=False), handlers.substitute(substitute_fn=look):
                model(*args, **kwargs)

        jax.eval_shape(run, self.keys[0])
        if len(found) > 1:
            msg = (
                f"The plates {sorted(found)} all subsample, so there is no one axis of rows to run through. Give the "
                "model the whole data with full plates (`subsample_size=None`), in an `SVI` object made for it."
            )
            raise ValueError(msg)
        return next(iter(found.values()), None)


class _Plate(NamedTuple):
    name: str
    args: tuple[int, int]


def _draw_process(
    guide: Any, params: dict[str, Any], site: str, q: SparsePosterior, rng_key: Array, batch: ArrayLike
) -> tuple[Array, Array]:
    """f(X) ~ q, and log q(u)/p(u) for the u it was drawn with, (...).

    f = mean + Tᵀε + residual with Cov(residual) = Kff − AᵀA: ε belongs to u and is the same in all batches.
    """
    key_u, key_f = jax.random.split(rng_key)
    X, dtype = q.prior.X, q.moments.mean.dtype
    shape = q.batch_shape + q.event_shape
    T, A = q.moments.posterior_root, q.moments.prior_root
    kernel = q.prior.kernel
    K = kernel(X, X)
    index = jnp.arange(K.shape[-1])
    K = K.at[..., index, index].set(kernel(X) * (1.0 + q.prior.relative_jitter))
    residual = cholesky(K - matmul(jnp.swapaxes(A, -1, -2), A))
    f = q.mean + matvec(residual, jax.random.normal(jax.random.fold_in(key_f, batch), shape, dtype))
    nan = jnp.full(q.batch_shape, jnp.nan, dtype)
    try:
        process = process_of(guide, params, site, q)
    except UnknownFamilyError:
        process = None
    if T is None:
        return f, nan if process is None else log_ratio_dense(params[f"{site}_{guide.prefix}_sites"], q, f)
    epsilon = jax.random.normal(key_u, (*q.batch_shape, T.shape[-2]), dtype)
    f = f + matvec_transposed(T, epsilon)
    return f, nan if process is None else log_ratio(process, epsilon)


def log_ratio(process: ProcessPosterior, epsilon: Array) -> Array:
    """The log ratio log q(v)/p(v) at v = m + Rᵀε: −½|ε|² + ½|v|² − log|R|."""
    R = cast(Array, process.R)
    m = matvec_transposed(process.L, process.a)
    v = m + matvec_transposed(R, epsilon)
    log_R = jnp.linalg.slogdet(R)[1]
    return 0.5 * (jnp.sum(v * v, axis=-1) - jnp.sum(epsilon * epsilon, axis=-1)) - log_R


def log_ratio_dense(sites: DatumSites, q: SparsePosterior, f: Array) -> Array:
    """The log ratio log q(f)/p(f) = Σ_n log t_n(f_n) − log Z, with log Z = E_q[Σ_n log t_n(f_n)] − KL."""
    if sites.X.shape != q.prior.X.shape:
        return jnp.full(q.batch_shape, jnp.nan, f.dtype)
    centred, m = f - q.prior.prior_mean, q.moments.mean
    linear = sites.lambda1 * (centred - m)
    quadratic = sites.Lambda2 * (centred * centred - q.variance - m * m)
    ratio = jnp.sum(linear - 0.5 * quadratic, axis=-1) + q.kl
    return jnp.where(jnp.all(sites.X == q.prior.X), ratio, jnp.nan)


def _collect(
    guide_trace: Mapping[str, dict],
    model_trace: Mapping[str, dict],
    log_ratios: Mapping[str, Array],
    key_of: Callable[[str], Array],
) -> Outputs:
    groups = (_POSTERIOR, _PREDICTIVE, _LIKELIHOOD, _OBSERVED, _MASK, _LOG_P, _LOG_Q)
    outputs: Outputs = {group: {} for group in groups}
    for name, site in guide_trace.items():
        if site["type"] == "sample":
            ratio = log_ratios.get(name)
            outputs[_LOG_Q][name] = log_prob_of(site["fn"], site["value"]) if ratio is None else ratio
    for number, (name, site) in enumerate(model_trace.items()):
        if site["type"] == "deterministic":
            outputs[_POSTERIOR][name] = jnp.asarray(site["value"])
        elif site["type"] != "sample":
            continue
        elif site["is_observed"]:
            _collect_observed(outputs, name, site, jax.random.fold_in(key_of(name), number))
        elif name in guide_trace:
            outputs[_POSTERIOR][name] = site["value"]
            if name not in log_ratios:
                outputs[_LOG_P][name] = log_prob_of(site["fn"], site["value"])
        else:
            outputs[_PREDICTIVE][name] = site["value"]
    return outputs


def _collect_observed(outputs: Outputs, name: str, site: dict, rng_key: Array) -> None:
    fn, value = site["fn"], jnp.asarray(site["value"])
    log_prob = log_prob_of(fn, value)
    outputs[_LOG_P][name] = log_prob
    if isinstance(unwrap(fn), dist.Unit):
        return
    outputs[_LIKELIHOOD][name] = log_prob
    outputs[_OBSERVED][name] = jnp.broadcast_to(value, log_prob.shape + fn.event_shape)
    outputs[_MASK][name] = jnp.broadcast_to(observed_mask(fn), log_prob.shape)
    whole = fn if fn.batch_shape == log_prob.shape else fn.expand(log_prob.shape)
    outputs[_PREDICTIVE][name] = whole.sample(rng_key)


# All rows, batch by batch.


def _partition(tree: Any) -> tuple[Callable[[list], Any], list]:
    """The numeric arrays of a pytree, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, Array | np.ndarray) and np.asarray(leaf).dtype.kind in "biufc" for leaf in leaves]

    def fixed(dynamic: list) -> Any:
        rest = iter(dynamic)
        return jax.tree.unflatten(structure, [next(rest) if a else x for x, a in zip(leaves, is_array, strict=True)])

    return fixed, [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]


def num_rows(args: tuple, batch_size: int | None) -> int:
    if batch_size is None:
        return 0
    _, arrays = _partition(args)
    rows = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in arrays}
    if len(rows) != 1 or 0 in rows:
        msg = (
            "`batch_size` cuts the positional arguments of the model into rows, so all their arrays need the same "
            f"number of rows; got shapes {[np.shape(leaf) for leaf in arrays]}. Pass what has no rows by keyword."
        )
        raise ValueError(msg)
    return rows.pop()


def with_num_data(model: Callable, args: tuple, kwargs: dict, N: int) -> dict:
    signature = inspect.signature(model)
    given = "num_data" in signature.bind_partial(*args).arguments or kwargs.get("num_data") is not None
    return {**kwargs, "num_data": N} if "num_data" in signature.parameters and not given else kwargs


def _join(group: str, name: str, values: list[np.ndarray], new: list[np.ndarray], axes: list[int]) -> np.ndarray | None:
    """The values of a site for all rows, from those of batches; None where that is impossible."""
    if len(axes) == 1:
        axis = axes[0] + 1  # after the draws
        return np.concatenate([np.compress(keep, v, axis=axis) for keep, v in zip(new, values, strict=True)], axis=axis)
    # Sums in another order differ by rounding; what is a function of the batch differs by more.
    if not axes and all(np.allclose(value, values[0], rtol=1e-5, equal_nan=True) for value in values):
        return values[0]
    shape = values[0].shape[1:]
    if group == _POSTERIOR:
        msg = (
            f"The site {name!r} of shape {shape} is a function of a batch, not of its rows one by one, so it cannot be "
            "put together from batches and is left out. It is there when the model is run on all rows at once."
        )
        warnings.warn(msg, stacklevel=6)
        return None
    msg = (
        f"The site {name!r} depends on the rows of a batch but has no single axis of rows (shape {shape} for a batch), "
        f"so its {group} for all rows is unknown. Run the model on all rows at once, or sample the site in the plate."
    )
    raise ValueError(msg)


# Groups and names.


class _Names:
    """Names and coordinates of dimensions."""

    def __init__(self, coords: Mapping[str, ArrayLike], dims: Mapping[str, Sequence[str]]) -> None:
        self.coords = {name: np.asarray(values) for name, values in coords.items()}
        self.dims = {name: [names] if isinstance(names, str) else list(names) for name, names in dims.items()}
        self.used: set[str] = set()

    def of(self, name: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Dimensions of a variable with their coordinates, in order."""
        given = self.dims.get(name, [])
        self.used.add(name)
        if len(given) > len(shape):
            msg = (
                f"`dims` names {given} for {name!r}, which has shape {shape} without chain and draw. "
                f"Give at most {len(shape)} names."
            )
            raise ValueError(msg)
        result = {}
        for axis, size in enumerate(shape):
            dim = given[axis] if axis < len(given) else f"{name}_dim_{axis}"
            values = self.coords.get(dim, np.arange(size))
            if values.shape != (size,):
                msg = (
                    f"`coords` has values of shape {values.shape} for {dim!r}, but that dimension of {name!r} has size "
                    f"{size}. Give one value for each entry."
                )
                raise ValueError(msg)
            result[dim] = values
        return result

    def check_used(self) -> None:
        """Raise if `dims` names something that is not a variable."""
        if set(self.dims) - self.used:
            msg = f"`dims` names {sorted(set(self.dims) - self.used)}, but the variables are {sorted(self.used)}."
            raise ValueError(msg)


class _Variable(NamedTuple):
    """A variable with its dimensions, and coordinates that belong to it."""

    dims: tuple[str, ...]
    values: np.ndarray
    coords: dict[str, tuple[tuple[str, ...], np.ndarray]]


def _variable(names: _Names, name: str, values: np.ndarray, *, draws: bool) -> _Variable:
    dims = names.of(name, values.shape[1:] if draws else values.shape)
    coords = {dim: ((dim,), at) for dim, at in dims.items()}
    return _with_draws(_Variable(tuple(dims), values, coords)) if draws else _Variable(tuple(dims), values, coords)


def _with_draws(variable: _Variable) -> _Variable:
    values = variable.values[None]
    coords = {"chain": (("chain",), np.arange(1)), "draw": (("draw",), np.arange(values.shape[1]))}
    return _Variable(("chain", "draw", *variable.dims), values, {**coords, **variable.coords})


def _observed_only(names: _Names, name: str, values: np.ndarray, keep: np.ndarray, *, draws: bool) -> _Variable:
    """The entries of a variable that were observed, along one dimension in the place of the batch's."""
    if keep.all() or not keep.ndim:
        return _variable(names, name, values, draws=draws)
    lead = int(draws)
    shape = values.shape[lead:]
    dims = names.of(name, shape)
    batch, event = list(dims)[: keep.ndim], list(dims)[keep.ndim :]
    flat = values.reshape(*values.shape[:lead], math.prod(keep.shape), *shape[keep.ndim :])
    kept = np.compress(keep.ravel(), flat, axis=lead)
    own = f"{name}_observed"
    coords = {dim: ((dim,), dims[dim]) for dim in event}
    where = {dim: dims[dim][index] for dim, index in zip(batch, np.nonzero(keep), strict=True)}
    if len(batch) == 1:
        coords[own] = ((own,), where[batch[0]])
    else:
        coords[own] = ((own,), np.arange(int(keep.sum())))
        # Not the dimension's own name: another site may have it as a dimension.
        coords.update({d if d.startswith(f"{name}_") else f"{name}_{d}": ((own,), at) for d, at in where.items()})
    variable = _Variable((own, *event), kept, coords)
    return _with_draws(variable) if draws else variable


def _groups(outputs: Outputs, constant: dict[str, np.ndarray], names: _Names) -> dict[str, dict[str, _Variable]]:
    observed = {name: value[0] for name, value in outputs[_OBSERVED].items()}
    if not observed:
        msg = (
            "No site of the model is observed, so there is nothing to judge the fit by. Pass the outcomes too, as they "
            "were given to `SVI.run`."
        )
        raise ValueError(msg)
    for name, mask in outputs[_MASK].items():
        if not np.all(mask == mask[:1]):
            msg = f"The mask of the observed site {name!r} is not the same in all draws, so that its data are not data."
            raise ValueError(msg)
    masks = {name: mask[0] for name, mask in outputs[_MASK].items()}

    def of_data(name: str, values: np.ndarray, *, draws: bool) -> _Variable:
        if name not in masks:
            return _variable(names, name, values, draws=draws)
        return _observed_only(names, name, values, masks[name], draws=draws)

    stats = {"lp": _summed(outputs[_LOG_P]), "log_q": _summed(outputs[_LOG_Q])}
    constant = {
        name: value
        for name, value in constant.items()
        if not any(_same(value, outcome) for outcome in observed.values())
    }
    groups = {
        "posterior": {n: _variable(names, n, v, draws=True) for n, v in outputs[_POSTERIOR].items()},
        "posterior_predictive": {n: of_data(n, v, draws=True) for n, v in outputs[_PREDICTIVE].items()},
        "log_likelihood": {n: of_data(n, v, draws=True) for n, v in outputs[_LIKELIHOOD].items()},
        "sample_stats": {n: _variable(names, n, v, draws=True) for n, v in stats.items()},
        "observed_data": {n: of_data(n, v, draws=False) for n, v in observed.items()},
        "constant_data": {n: _variable(names, n, v, draws=False) for n, v in constant.items()},
    }
    return {group: variables for group, variables in groups.items() if variables}


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=b.dtype.kind == "f" and a.dtype.kind == "f"))


def _summed(terms: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.asarray(sum(value.reshape(len(value), -1).sum(axis=-1) for value in terms.values()))


def _constant(model: Callable, args: tuple, kwargs: dict) -> dict[str, np.ndarray]:
    """The array arguments of the model by name; an array inside of a structure is named by its path."""
    try:
        arguments = inspect.signature(model).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        arguments = {f"arg_{number}": arg for number, arg in enumerate(args)} | kwargs
    found: dict[str, np.ndarray] = {}
    for name, path, leaf in _leaves(arguments):
        if isinstance(leaf, Array | np.ndarray | np.number | int | float) and not isinstance(leaf, bool):
            value = np.asarray(leaf)
            if value.dtype.kind in "biuf":
                found["_".join([name, *path])] = value
    return found


def _leaves(arguments: Mapping[str, Any]) -> Iterator[tuple[str, list[str], Any]]:
    for name, argument in arguments.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
            yield name, keys, leaf


def _as_arviz(az: ModuleType, groups: Mapping[str, dict[str, _Variable]]) -> Any:
    import xarray

    # The same attributes that ArviZ writes; `sample_dims` is read by ArviZ 1.
    attributes = {
        "created_at": dt.datetime.now(dt.UTC).isoformat(),
        "creation_library": "numpyro_sgp",
        "inference_library": "numpyro",
        "inference_library_version": metadata.version("numpyro"),
    }
    datasets = {}
    for group, variables in groups.items():
        coords: dict[str, Any] = {}
        for variable in variables.values():
            coords.update(variable.coords)
        data = {name: (variable.dims, variable.values) for name, variable in variables.items()}
        sampled = {} if group.endswith("_data") else {"sample_dims": ["chain", "draw"]}
        datasets[group] = xarray.Dataset(data, coords, {**attributes, **sampled})
    if az.__version__.startswith("0."):
        return az.InferenceData(**datasets)
    return xarray.DataTree.from_dict(datasets)
