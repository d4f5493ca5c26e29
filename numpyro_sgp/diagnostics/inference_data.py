"""`to_arviz`: posterior, predictions, likelihoods and densities of a fitted guide as an ArviZ object."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import datetime as dt
from importlib import metadata
import inspect
import math
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.typing import ArrayLike
import numpy as np
from numpyro.infer import SVI

from numpyro_sgp._internal.checks import positive
from numpyro_sgp.diagnostics.outputs import (
    LIKELIHOOD,
    LOG_P,
    LOG_Q,
    MASK,
    OBSERVED,
    POSTERIOR,
    PREDICTIVE,
    Draws,
    Outputs,
    Result,
    fitted_values,
)

__all__ = ["arviz_module", "to_arviz"]


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
    """Draws from a fitted guide as an ArviZ object: a `DataTree`, or `InferenceData` before ArviZ 1.

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

    Names have dots where sites have slashes, as in `net/layer.kernel` of NumPyro's helpers for networks: slashes divide
    groups there.

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
        TypeError: `svi` is no `SVI` object; `result` holds no parameters.
        ValueError: no site is observed; `batch_size` where arguments are not rows of equal number; names or lengths in
            `coords` and `dims` that do not fit.

    References:
        Vehtari, Gelman and Gabry (2017), "Practical Bayesian model evaluation using leave-one-out cross-validation and
        WAIC"; Yao, Vehtari, Simpson and Gelman (2018), "Yes, but did it work? Evaluating variational inference", for
        importance ratios of a variational posterior.
    """
    az = arviz_module()
    positive("num_samples", num_samples, "The default is 1000 draws.")
    if not isinstance(svi, SVI):
        msg = (
            f"`svi` must be the `SVI` object of the fit, got {type(svi).__name__}. It holds the model, the guide and "
            "the arguments that stay the same: to_arviz(rng_key, svi, result, ...)."
        )
        raise TypeError(msg)
    params, mutable_state = fitted_values(result)
    kwargs = {**svi.static_kwargs, **model_kwargs}
    draws = Draws(svi.model, svi.guide, params, mutable_state, rng_key, num_samples)
    outputs = draws.over_all_rows(model_args, kwargs, batch_size)
    names = _Names(coords or {}, dims or {})
    groups = _groups(outputs, _constant(svi.model, model_args, kwargs), names)
    names.check_used()
    return _as_arviz(az, groups)


def arviz_module() -> ModuleType:
    """Import ArviZ, or raise with what to install."""
    try:
        import arviz as az
    except ImportError as error:
        error.add_note("This needs ArviZ: pip install 'numpyro-sgp[arviz]', or arviz itself.")
        raise
    return az


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
    observed = {name: value[0] for name, value in outputs[OBSERVED].items()}
    if not observed:
        msg = (
            "No site of the model is observed, so there is nothing to judge the fit by. Pass the outcomes too, as they "
            "were given to `SVI.run`."
        )
        raise ValueError(msg)
    for name, mask in outputs[MASK].items():
        if not np.all(mask == mask[:1]):
            msg = f"The mask of the observed site {name!r} is not the same in all draws, so that its data are not data."
            raise ValueError(msg)
    masks = {name: mask[0] for name, mask in outputs[MASK].items()}

    def of_data(name: str, values: np.ndarray, *, draws: bool) -> _Variable:
        if name not in masks:
            return _variable(names, name, values, draws=draws)
        return _observed_only(names, name, values, masks[name], draws=draws)

    stats = {"lp": _summed(outputs[LOG_P]), "log_q": _summed(outputs[LOG_Q])}
    constant = {
        name: value
        for name, value in constant.items()
        if not any(_same(value, outcome) for outcome in observed.values())
    }
    groups = {
        "posterior": {n: _variable(names, n, v, draws=True) for n, v in outputs[POSTERIOR].items()},
        "posterior_predictive": {n: of_data(n, v, draws=True) for n, v in outputs[PREDICTIVE].items()},
        "log_likelihood": {n: of_data(n, v, draws=True) for n, v in outputs[LIKELIHOOD].items()},
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


def _without_slashes(variables: Mapping[str, tuple]) -> dict[str, tuple]:
    """Variables and their dimensions with dots for slashes, which divide NumPyro's scopes, and groups of a file."""
    renamed = {
        name.replace("/", "."): (tuple(dim.replace("/", ".") for dim in dims), values)
        for name, (dims, values) in variables.items()
    }
    if len(renamed) < len(variables):
        msg = f"Of the names {sorted(variables)} two are the same with dots for slashes. Rename one of the sites."
        raise ValueError(msg)
    return renamed


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
        data, coords = _without_slashes(data), _without_slashes(coords)
        sampled = {} if group.endswith("_data") else {"sample_dims": ["chain", "draw"]}
        datasets[group] = xarray.Dataset(data, coords, {**attributes, **sampled})
    if az.__version__.startswith("0."):
        return az.InferenceData(**datasets)
    return xarray.DataTree.from_dict(datasets)
