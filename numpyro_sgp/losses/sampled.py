"""Expectations under marginals that are estimated from sampled basis functions."""

from collections.abc import Callable, Mapping

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_sgp._internal.curvature import is_quadratic
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.losses.concavity import check_concave, dependence
from numpyro_sgp.losses.rules import Rule
from numpyro_sgp.math.quadrature import gauss_hermite
from numpyro_sgp.posteriors.quadruply_stochastic.formulas import jackknife

__all__ = ["check_sampled", "integrate_sampled", "sampled_site"]


def sampled_site(rule: Rule, free: Mapping[str, SparsePosterior]) -> str | None:
    """The site whose marginals are estimates, where the terms of a rule depend on one."""
    names = list(free) if rule.axes is None else list(rule.axes)
    sampled = [name for name in names if free[name].moments.sampled is not None]
    if sampled and (len(names) > 1 or rule.axes is None):
        msg = f"`AutoQSGP` takes one latent for each observed site, but {list(rule.terms)} depend on {names}."
        raise ValueError(msg)
    return sampled[0] if sampled else None


def check_sampled(sites: Mapping[str, SparsePosterior], parents: frozenset[str]) -> None:
    """Raise where other GPs depend on a site whose marginals are estimates."""
    nested = sorted(name for name in parents if sites[name].moments.sampled is not None)
    if nested:
        msg = f"The GP sites {nested} of `AutoQSGP` have other GPs that depend on them. Use `AutoSVGP` for a deep GP."
        raise ValueError(msg)


def integrate_sampled(
    rule: Rule,
    name: str,
    q: SparsePosterior,
    num_nodes: int,
    terms: Callable[[Trace], dict[str, Array]],
    model_at: Callable[[Mapping[str, Array]], Trace],
) -> Array:
    """Σ of the expectations of a rule's terms: unbiased for quadratic ones, a bound for concave ones.

    Args:
        rule: the terms that depend on the site.
        name: the site.
        q: its posterior, whose marginals are estimates.
        num_nodes: Gauss-Hermite nodes for the concave terms.
        terms: the terms of the bound, by site, of a run of the model.
        model_at: the run of the model at other values of GP sites.
    """
    sampled, mean = q.moments.sampled, q.mean
    sampled.integrated.append(True)

    def at(f: Array, chosen: list[str]) -> Array:
        result = terms(model_at({name: f}))
        return jnp.asarray(sum(result[term] for term in chosen))

    def estimated(estimate: Array, chosen: list[str]) -> Array:
        offset = q.prior.prior_mean + estimate
        values = jax.vmap(lambda node: at(offset + sampled.scale * node, chosen))(nodes)
        return jnp.sum(weights * values)

    quadratic = [term for term in rule.terms if is_quadratic(lambda f, term=term: at(f, [term]), mean)]
    concave = [term for term in rule.terms if term not in quadratic]
    elbo = jnp.asarray(0.0, mean.dtype)
    if quadratic:
        # The Hessian is diagonal: its product with the variances has their products with its entries.
        slope = jax.grad(lambda f: at(f, quadratic))
        curved = jax.jvp(slope, (mean,), (sampled.excess + sampled.variance,))[1]
        elbo = elbo + at(mean, quadratic) + 0.5 * jnp.sum(curved)
    if concave:
        for term in concave:
            kind = dependence(lambda f, term=term: unwrap(model_at({name: f})[term]["fn"]), mean)
            check_concave(term, *kind, sampled.log_concave)
        if sampled.controlled:
            msg = f"A control variate is biased where a likelihood is not Gaussian, as {concave}. Leave `control` out."
            raise ValueError(msg)
        nodes, weights = (jnp.asarray(x, mean.dtype) for x in gauss_hermite(num_nodes))
        whole = estimated(q.moments.mean, concave)
        if sampled.halves is not None:
            first, second = (estimated(half, concave) for half in sampled.halves)
            whole = jackknife(whole, first, second, sampled.share)
        elbo = elbo + whole
    return elbo
