"""`to_arviz`: posterior, predictions, likelihoods and densities of a fitted guide as an ArviZ object."""

from collections.abc import Callable, Mapping, Sequence
import inspect
from types import ModuleType
from typing import Any

import jax
from jax import Array
from jax.typing import ArrayLike
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult

from numpyro_sgp._internal.checks import positive
from numpyro_sgp.diagnostics.outputs import LOG_P, LOG_Q, MASK, Draws, fitted_values

__all__ = ["arviz_module", "to_arviz"]


def to_arviz(
    rng_key: Array,
    svi: SVI,
    result: SVIRunResult | Mapping[str, Any],
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
        TypeError: `result` holds no parameters.
        ValueError: no site is observed; `batch_size` where arguments are not rows of equal number; `coords` of another
            length than their dimension.

    References:
        Vehtari, Gelman and Gabry (2017), "Practical Bayesian model evaluation using leave-one-out cross-validation and
        WAIC"; Yao, Vehtari, Simpson and Gelman (2018), "Yes, but did it work? Evaluating variational inference", for
        importance ratios of a variational posterior.
    """
    az = arviz_module()
    positive("num_samples", num_samples, "The default is 1000 draws.")
    params, mutable_state = fitted_values(result)
    kwargs = {**svi.static_kwargs, **model_kwargs}
    draws = Draws(svi.model, svi.guide, params, mutable_state, rng_key, num_samples)
    outputs = draws.over_all_rows(model_args, kwargs, batch_size)
    # Slashes divide groups in ArviZ, and scopes in NumPyro.
    groups = {group: {_dotted(name): value for name, value in sites.items()} for group, sites in outputs.items()}
    masks = {name: mask[0] for name, mask in groups.pop(MASK).items()}
    if not masks:
        msg = (
            "No site of the model is observed, so there is nothing to judge the fit by. Pass the outcomes too, as they "
            "were given to `SVI.run`."
        )
        raise ValueError(msg)
    groups["sample_stats"] = {"lp": _summed(groups.pop(LOG_P)), "log_q": _summed(groups.pop(LOG_Q))}
    groups["observed_data"] = {name: value[0] for name, value in groups["observed_data"].items()}
    groups["constant_data"] = {
        name: value
        for name, value in _constant(svi.model, model_args, kwargs).items()
        if not any(_same(value, outcome) for outcome in groups["observed_data"].values())
    }
    named = {_dotted(name): list(axes) for name, axes in (dims or {}).items()}
    return _as_arviz(az, groups, masks, {name: np.asarray(at) for name, at in (coords or {}).items()}, named)


def arviz_module() -> ModuleType:
    """Import ArviZ, or raise with what to install."""
    try:
        import arviz as az
    except ImportError as error:
        msg = "This needs ArviZ. Install it with `pip install 'numpyro-sgp[arviz]'`."
        raise ImportError(msg) from error
    return az


def _dotted(name: str) -> str:
    return name.replace("/", ".")


def _as_arviz(
    az: ModuleType,
    groups: dict[str, dict[str, np.ndarray]],
    masks: Mapping[str, np.ndarray],
    coords: dict[str, np.ndarray],
    dims: dict[str, list[str]],
) -> Any:
    """The groups as ArviZ's object, of masked sites only the entries that were observed."""
    of_entries: dict[str, tuple[str, np.ndarray]] = {}  # coordinates along the dimensions of observed entries
    for name, mask in masks.items():
        if mask.all() or not mask.ndim:
            continue
        given = [*dims.get(name, []), *(f"{name}_dim_{axis}" for axis in range(len(dims.get(name, [])), mask.ndim))]
        batch, own = given[: mask.ndim], f"{name}_observed"
        kept = dict(zip(batch, np.nonzero(mask), strict=True))
        at = [coords[dim][index] if dim in coords else index for dim, index in kept.items()]
        if len(batch) == 1:
            coords[own] = at[0]
        else:  # not the dimension's own name: another site may have it as a dimension
            labels = [dim if dim.startswith(f"{name}_") else f"{name}_{dim}" for dim in batch]
            of_entries.update({label: (own, values) for label, values in zip(labels, at, strict=True)})
        dims[name] = [own, *given[mask.ndim :]]
        for group in ("posterior_predictive", "log_likelihood"):
            groups[group][name] = groups[group][name][:, mask]
        groups["observed_data"][name] = groups["observed_data"][name][mask]
    # One chain.
    data = {
        group: sites if group.endswith("_data") else {name: value[None] for name, value in sites.items()}
        for group, sites in groups.items()
        if sites
    }
    if az.__version__.startswith("0."):
        found = az.from_dict(**data, coords=coords, dims=dims)
    else:
        found = az.from_dict(data, coords=coords, dims=dims)
    for group in data:
        here = {label: at for label, at in of_entries.items() if at[0] in found[group].dims}
        found[group].coords.update(here)
    return found


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
    return {
        _dotted(jax.tree_util.keystr(path, simple=True, separator="_")): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(dict(arguments))
        if isinstance(leaf, Array | np.ndarray | np.number | int | float)
        and not isinstance(leaf, bool)
        and np.asarray(leaf).dtype.kind in "biuf"
    }
