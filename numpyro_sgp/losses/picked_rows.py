"""Prior variances of linear predictors that pick a few rows of a GP site, as a difference of two rows does.

No covariance matrix of all rows is needed, and no matrix of the linear map.
"""

from collections.abc import Mapping
import itertools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.linear_predictors import Program
from numpyro_sgp._internal.row_dependence import Dependence, row_dependence
from numpyro_sgp.guides.joint_run import Prior

__all__ = ["picked_variance"]

# Pairs of rows of each latent are evaluated for each entry.
_MOST_PICKS = 8


def picked_variance(program: Program, root: int, site: str, inputs: Mapping[str, Any], prior: Prior) -> Array | None:
    """Var(Σ_k c_k f(x_k)) of each entry of a predictor, or None where entries look at many rows.

    Args:
        program: the terms of a model.
        root: number of the predictor.
        site: the GP site.
        inputs: where its coefficients are evaluated.
        prior: of the site.
    """
    batch_shape, f = prior.batch_shape, inputs[site]
    variables = program.picked(root, site)
    picks = [(number, latent) for number in variables for latent in range(max(f[..., 0].size, 1))]
    if not isinstance(prior.X, Array) or prior.X.ndim != 2 or len(picks) > _MOST_PICKS:
        return None
    values = dict(zip(variables, program.evaluate(variables, inputs), strict=True))

    def by(number: int) -> Any:
        return lambda x: program.evaluate([root], inputs, {**values, number: x.reshape(values[number].shape)})[0]

    if any(row_dependence(by(number), values[number].ravel()) > Dependence.ONE for number in variables):
        return None
    N = f.shape[-1]
    coefficients, rows = [], []
    for number, latent in picks:

        def push(row: Array, number: int = number, latent: int = latent) -> Array:
            tangent = jnp.zeros((f[..., 0].size, N), f.dtype).at[latent].set(row).reshape(f.shape)
            along = jax.jvp(lambda f: program.evaluate([number], {**inputs, site: f})[0], (f,), (tangent,))[1]
            return jax.jvp(by(number), (values[number].ravel(),), (along.ravel(),))[1]

        c = push(jnp.ones(N, f.dtype))
        # One row in each entry: its number is what the coefficient multiplies.
        numbered = push(jnp.arange(N, dtype=f.dtype)) / jnp.where(c == 0.0, 1.0, c)
        coefficients.append(c)
        rows.append(jnp.rint(jax.lax.stop_gradient(numbered)).astype(int))

    def covariance(x: Array, z: Array, latent: int) -> Array:
        k = prior.kernel(x[None], z[None])[..., 0, 0]
        return jnp.broadcast_to(k, batch_shape).ravel()[latent]

    variances = jnp.broadcast_to(prior.kernel(prior.X), (*batch_shape, N)).reshape(-1, N)
    total = jnp.zeros_like(coefficients[0])
    for (one, (_, latent)), (other, (_, second)) in itertools.product(enumerate(picks), repeat=2):
        if latent != second:
            continue
        if one == other:
            k = variances[latent][rows[one]]
        else:
            pairs = prior.X[rows[one].ravel()], prior.X[rows[other].ravel()]
            k = jax.vmap(lambda x, z, latent=latent: covariance(x, z, latent))(*pairs).reshape(rows[one].shape)
        total = total + coefficients[one] * coefficients[other] * k
    return jnp.maximum(total, 0.0)
