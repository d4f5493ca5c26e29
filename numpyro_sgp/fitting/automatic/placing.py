"""Where inducing inputs go and how many: greedily, until they explain enough of f for what the data say of it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_sgp.distributions.traces import scaled_log_prob
from numpyro_sgp.inducing.selection import kmeans, pivots_of, trace_error
from numpyro_sgp.kernels.functional import nodes_of

__all__ = ["Placed", "place", "placed", "precision_of_rows", "unexplained"]

# The pivoted factor has a number for each row and inducing input.
_MOST_ROWS = 10_000


class Placed(NamedTuple):
    """Inducing inputs of a GP site.

    Attributes:
        Z: inducing inputs, (M, D).
        unexplained: the share of the prior variance that they leave.
    """

    Z: Array
    unexplained: float


def _mean_of(kernel: Callable) -> Callable:
    """The mean over a batch of kernels, which is a kernel."""

    def mean(*inputs: Any) -> Array:
        K = kernel(*inputs)
        return jnp.mean(K.reshape(-1, *K.shape[K.ndim - len(inputs) :]), axis=0)

    return mean


def _some_rows(X: Any, rng_key: Array) -> np.ndarray:
    """Distinct rows."""
    rows = np.asarray(nodes_of(X))
    rows = rows.reshape(-1, rows.shape[-1])
    if len(rows) > _MOST_ROWS:
        chosen = jax.random.choice(rng_key, len(rows), (_MOST_ROWS,), replace=False)
        rows = rows[np.sort(np.asarray(chosen))]
    return np.unique(rows, axis=0)


def placed(kernel: Callable, X: Any, rng_key: Array, *, most: int, tolerance: float, few: int = 0) -> Placed:
    """Rows of X, chosen greedily until they leave a share `tolerance` of the prior variance, `most` of them at most.

    The first `few` are taken whatever they leave.
    """
    rows, one = _some_rows(X, rng_key), _mean_of(kernel)
    most = min(most, len(rows))
    pivots = pivots_of(one, rows, most, tolerance)
    if len(pivots) < few:
        pivots = pivots_of(one, rows, min(few, most), 0.0)
    candidates = [jnp.asarray(rows[pivots])]
    if len(pivots) == most < len(rows):
        # Far too few inducing inputs, greedily chosen, lie on the rim; then clusters explain more.
        candidates.append(kmeans(None, rows, rng_key, num_inducing=most))
    errors = [trace_error(one, rows, Z).relative for Z in candidates]
    best = int(np.argmin(errors))
    return Placed(candidates[best], errors[best])


def place(kernel: Callable, X: Any, rng_key: Array, *, most: int) -> Array:
    """An `inducing=` argument of guides, for hyperparameters that are still wrong: `most` rows of X, or all."""
    rows = _some_rows(X, rng_key)
    return jnp.asarray(rows) if len(rows) <= most else placed(kernel, X, rng_key, most=most, tolerance=0.0).Z


def unexplained(kernel: Callable, X: Any, inducing: Any) -> float:
    """The share of the prior variance at X that inducing variables leave, of the mean over a batch of kernels."""
    return trace_error(_mean_of(kernel), X, inducing).relative


def precision_of_rows(
    model: Callable, values: Mapping[str, Array], sites: Mapping[str, Array], args: tuple, kwargs: dict
) -> dict[str, Array]:
    """What the likelihood of each row tells of f: −∂²/∂f² of the log density, at least 0, by GP site.

    Args:
        model: a model.
        values: of the other latents.
        sites: values of the GP sites, (..., N).
        args: arguments of the model.
        kwargs: keyword arguments of the model.
    """

    def log_density(f: Mapping[str, Array]) -> Array:
        given = handlers.substitute(handlers.seed(model, jax.random.key(0)), data={**values, **f})
        trace = handlers.trace(given).get_trace(*args, **kwargs)
        found = [scaled_log_prob(site) for site in trace.values() if site["type"] == "sample" and site["is_observed"]]
        return sum((jnp.sum(each) for each in found), start=jnp.zeros(()))

    @jax.jit
    def diagonal(f: dict[str, Array]) -> dict[str, Array]:
        # Rows enter one by one, so that the sum of a row of the Hessian is its diagonal.
        ones = jax.tree.map(jnp.ones_like, f)
        curvature = jax.jvp(jax.grad(log_density), (f,), (ones,))[1]
        return cast(dict[str, Array], jax.tree.map(lambda h: jnp.maximum(-h, 0.0), curvature))

    return diagonal(dict(sites))
