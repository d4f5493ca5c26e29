"""`psis_khat`: whether q(u, θ) is close to the posterior that it approximates."""

from collections.abc import Mapping
import importlib
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult

from numpyro_sgp._internal.checks import at_least, positive
from numpyro_sgp._internal.pytrees import split_arrays
from numpyro_sgp._internal.signatures import with_num_data
from numpyro_sgp.diagnostics.inference_data import arviz_module
from numpyro_sgp.diagnostics.outputs import fitted_values, log_ratio_of_sites, rows_to_cut
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace
from numpyro_sgp.distributions.wrappers import log_prob_of, unwrap
from numpyro_sgp.guides.group import Group
from numpyro_sgp.guides.independent import IndependentRun
from numpyro_sgp.losses.quadrature_elbo import Particle, QuadratureELBO
from numpyro_sgp.posteriors.process import process_of

__all__ = ["LEAST_DRAWS", "log_importance_ratios", "pareto_smoothed", "psis_khat", "subsampled"]

# A Pareto distribution is fitted to the largest fifth of the draws: ArviZ refuses fewer than five, and with five its
# estimate of k is not a number.
LEAST_DRAWS = 30

# Ratios that an exact posterior has the same for all draws differ by rounding: measured up to 6 ε of their size, for 20
# and 1500 rows in float64 and float32.
_ROUNDING = 20.0


def psis_khat(
    rng_key: Array,
    svi: SVI,
    result: SVIRunResult | Mapping[str, Any],
    *model_args: Any,
    num_samples: int = 1000,
    batch_size: int | None = None,
    **model_kwargs: Any,
) -> float:
    """The Pareto k̂ of a sparse guide: below 0.7 its posterior can be trusted.

    The shape of the tail of the importance ratios of draws from q(u, θ),

        log r = Σ_n E_{p(f_n | u, θ)}[log p(y_n | f_n, θ)] + log p(u, θ) − log q(u, θ).

    Its target is the best posterior over inducing variables and hyperparameters, ∝ p(u, θ) exp Σ_n E[log p(y_n | f_n)],
    so it judges whether q(u, θ) has the right form and has converged; what the inducing inputs leave out it does not
    see: for that look at `trace_error`. With inducing inputs at the data, and for a dense posterior, the target is the
    exact posterior. The mean of log r estimates the ELBO. Where q is the target itself, as after natural steps with a
    Gaussian likelihood and fixed hyperparameters, all ratios are the same: there is no tail, and k̂ is 0.

    Args:
        rng_key: a key.
        svi: the fitted `SVI` object; its model and guide are used.
        result: what `SVI.run` returned, or a dict of parameters.
        model_args: arguments of the model: all of the data.
        num_samples: number of draws; at least 30.
        batch_size: rows of a batch, as in `to_arviz`; None for all rows at once.
        model_kwargs: keyword arguments of the model.

    Raises:
        ImportError: ArviZ is not installed.
        TypeError: a posterior family without a Gaussian q(u) of its own.
        ValueError: fewer than 30 draws; a GP on top of a GP, whose ratio has no closed form; a model that subsamples by
            itself.

    References:
        Yao, Vehtari, Simpson and Gelman (2018), "Yes, but did it work? Evaluating variational inference", section 2;
        Titsias (2009), "Variational learning of inducing variables in sparse Gaussian processes", for the target.
    """
    az = arviz_module()
    at_least(LEAST_DRAWS, "num_samples", num_samples, "The tail is a fifth of them; the default is 1000.")
    sizes = {"num_samples": num_samples, "batch_size": batch_size}
    ratios = log_importance_ratios(rng_key, svi, result, *model_args, **sizes, **model_kwargs)
    return float(pareto_smoothed(az, np.asarray(ratios))[1])


def pareto_smoothed(az: Any, log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Smoothed and normalised log weights, (..., S), and k̂, (...), of log ratios, (..., S).

    Ratios that are the same for all draws up to rounding have no tail: their k̂ is 0, where ArviZ gives NaN or infinity
    or raises.
    """
    S = log_ratios.shape[-1]
    rows = log_ratios.reshape(-1, S)
    size = np.maximum(np.max(np.abs(rows), axis=-1), 1.0)
    varies = ~(np.ptp(rows, axis=-1) <= _ROUNDING * np.finfo(rows.dtype).eps * size)  # NaN too
    weights, khat = np.full(rows.shape, -np.log(S)), np.zeros(len(rows))
    if varies.any():
        if az.__version__.startswith("0."):
            smoothed = az.psislw(np.array(rows[varies]))
        else:
            smoothed = importlib.import_module("arviz_stats.base").array_stats.psislw(-rows[varies])  # of ArviZ 1
        weights[varies], khat[varies] = smoothed
    return weights.reshape(log_ratios.shape), khat.reshape(log_ratios.shape[:-1])


def log_importance_ratios(
    rng_key: Array,
    svi: SVI,
    result: SVIRunResult | Mapping[str, Any],
    *model_args: Any,
    num_samples: int = 1000,
    batch_size: int | None = None,
    **model_kwargs: Any,
) -> Array:
    """The log ratios log r of draws from q(u, θ), (num_samples,); see `psis_khat`."""
    params, mutable_state = fitted_values(result)
    ratios = _Ratios(svi, {**params, **mutable_state})
    kwargs = {**svi.static_kwargs, **model_kwargs}
    keys = jax.random.split(rng_key, num_samples)
    if batch_size is None:
        ratios.check(model_args, kwargs, 0, 0)
        return jax.lax.map(lambda key: ratios.one(key, model_args, kwargs), keys)
    N = rows_to_cut(model_args, positive("batch_size", batch_size, "None is for all rows at once."))
    B = min(batch_size, N)
    kwargs = with_num_data(svi.model, model_args, kwargs, N)
    fixed, leaves = split_arrays(model_args)
    ratios.check(fixed([leaf[:B] for leaf in leaves]), kwargs, N, B)

    @jax.jit
    def of_batch(keys: Array, batch: list[Array]) -> Array:
        return jax.lax.map(lambda key: ratios.one(key, fixed(batch), kwargs), keys)

    # A batch of B rows scales its likelihood by N/B, and the rest is the same for all batches: B/N weighs them.
    batches = [[jnp.asarray(leaf[start : start + B]) for leaf in leaves] for start in range(0, N, B)]
    parts = [len(batch[0]) / N * of_batch(keys, batch) for batch in batches]
    return jnp.sum(jnp.stack(parts), axis=0)


def subsampled(trace: Trace) -> set[tuple[int, int]]:
    """(size, subsample size) of the plates that subsample."""
    plates = [site["args"] for site in trace.values() if site["type"] == "plate"]
    return {tuple(size) for size in plates if size[1] is not None and size[1] != size[0]}


class _Ratios:
    """Log importance ratios, one draw at a time."""

    def __init__(self, svi: SVI, values: dict[str, Any]) -> None:
        self.model, self.guide, self.values = svi.model, svi.guide, values
        self.loss = svi.loss if isinstance(svi.loss, QuadratureELBO) else QuadratureELBO()

    def _particle(self, key: Array, args: tuple, kwargs: dict) -> Particle:
        # Guides take a mask of False for a prediction: parameters must be given, and nothing is fitted.
        guide = handlers.mask(self.guide, mask=False)
        return Particle(self.loss, key, self.values, self.model, guide, args, kwargs)

    def one(self, key: Array, args: tuple, kwargs: dict) -> Array:
        """The log ratio at the draw of (u, θ) that belongs to a key, whatever the rows in the arguments are."""
        key, key_u = jax.random.split(key)
        particle = self._particle(key, args, kwargs)
        trace = particle.run_guide(particle.guide_key, {})
        values, log_q = {}, jnp.zeros(())
        groups = [group for group in self.guide.joint_groups(self.values) if group.coupled]
        runs = {
            site: run
            for group in groups
            for run in [IndependentRun(Group(group.sites, (), (), coupled=group.coupled))]
            for site in group.sites
        }
        for number, (name, site) in enumerate(list(trace.items())):
            q = unwrap(site["fn"]) if site["type"] == "sample" else None
            if isinstance(q, SparsePosterior):
                given = self._given(name, q, jax.random.fold_in(key_u, number))
                if name in runs:
                    runs[name].add(name, given)
                    given.independent_run = runs[name]
                trace[name] = {**site, "fn": given, "value": given.mean}
            elif q is not None:
                density = log_prob_of(site["fn"], site["value"])
                log_q = log_q + jnp.sum(density if site["scale"] is None else site["scale"] * density)
                values[name] = trace.pop(name)["value"]
        # Hyperparameters count by log p(θ) − log q(θ) at the draw, not by their divergence: the model observes them.
        particle.model = handlers.condition(particle.model, data=values)
        return particle.elbo_given(trace, frozenset())[0] - log_q

    def _given(self, site: str, q: SparsePosterior, rng_key: Array) -> SparsePosterior:
        """The process given a draw of u, with log q(u)/p(u) in the place of the divergence."""
        if q.joint_run is not None:
            return q.joint_run.given(site, q)
        covariance = q.moments.covariance
        assert covariance is not None
        if covariance.num_noise is None:  # the values at X are u
            # Or what the sites see of these.
            parts = covariance.draw_parts(rng_key, q.batch_shape + q.event_shape)
            f = q.sample(rng_key) - q.prior.prior_mean if parts is None else q.moments.mean + parts.explained
            rest = covariance.unexplained(q.kernel(q.prior.X))
            variance = jnp.zeros_like(f) if rest is None else rest
            sites = self.values[f"{site}_{self.guide.prefix}_sites"]
            ratio = log_ratio_of_sites(sites, q, f + q.prior.prior_mean, parts)
            given = q.moments._replace(mean=f, variance=variance, kl=ratio)
        else:
            process = process_of(self.guide, self.values, site, q)
            noise = jax.random.normal(rng_key, (*q.batch_shape, covariance.num_noise), q.mean.dtype)
            given = q.moments.given(noise, process.log_ratio(noise))
        return SparsePosterior(q.prior, given, q.batch_shape)

    def check(self, args: tuple, kwargs: dict, num_rows: int, batch_size: int) -> None:
        """Raise where the ratio cannot be formed."""

        def look(key: Array) -> None:
            particle = self._particle(key, args, kwargs)
            trace = particle.run_guide(particle.guide_key, {})
            if particle.nested_parents(trace):
                msg = (
                    "A GP on top of a GP has no closed form of the importance ratio. Use `sample_stats` of `to_arviz`."
                )
                raise ValueError(msg)
            sizes = subsampled(particle.run_model(trace, {}))
            wanted = {(num_rows, batch_size)} if batch_size < num_rows else set()
            if sizes != wanted:
                msg = (
                    f"The model has plates that take {sorted(sizes)} of their (size, subsample size). Pass all rows as "
                    "arguments; with `batch_size`, to a model whose plate has size `num_data`."
                )
                raise ValueError(msg)

        jax.eval_shape(look, jax.random.key(0))
