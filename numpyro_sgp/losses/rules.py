"""Choose quadrature nodes for the terms of a bound: one axis for each latent that an entry of a term depends on."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.ops.provenance import eval_provenance

from numpyro_sgp._internal.axis_dependence import axes_of
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace, scaled_log_prob
from numpyro_sgp.math.quadrature import product_grid

__all__ = ["Rule", "rules_of"]


class Rule(NamedTuple):
    """How the GP sites move together while some terms of the bound are integrated: f = m + √v z.

    Attributes:
        axes: for each GP site an integer array of its batch shape: which axis of the product grid moves each latent;
            None for random draws.
        terms: names of the sites whose expectations this rule gives.
    """

    axes: dict[str, np.ndarray] | None
    terms: tuple[str, ...]

    def nodes(
        self, num_nodes: int, num_samples: int, means: Mapping[str, Array], rng_key: Array
    ) -> tuple[dict[str, Array], Array]:
        """Where the latents are evaluated, in standard deviations from their means, (K, ...), and the weights, (K,).

        Args:
            num_nodes: nodes along each axis of the grid.
            num_samples: random draws in its place, antithetic pairs.
            means: of the GP sites that are integrated, for their shapes.
            rng_key: for the draws.
        """
        dtype = next(iter(means.values())).dtype
        if self.axes is None:
            half = num_samples // 2
            draws = {
                name: jax.random.normal(jax.random.fold_in(rng_key, index), (half, *mean.shape), mean.dtype)
                for index, (name, mean) in enumerate(means.items())
            }
            weights = jnp.full(2 * half, 0.5 / half, dtype)
            return {name: jnp.concatenate([value, -value]) for name, value in draws.items()}, weights
        dimension = 1 + max(int(axis.max(initial=0)) for axis in self.axes.values())
        grid, weights = product_grid(num_nodes, dimension)
        z = {name: jnp.asarray(grid[:, axis][..., None], dtype) for name, axis in self.axes.items()}
        return z, jnp.asarray(weights, dtype)


def rules_of(
    guide_trace: Trace,
    model_trace: Trace,
    free: Mapping[str, SparsePosterior],
    names: tuple[str, ...],
    terms: Callable[[Trace], dict[str, Array]],
    model_at: Callable[[Mapping[str, Array]], Trace],
) -> list[Rule]:
    """Group the terms of a bound by the latents that an entry of them depends on.

    Args:
        guide_trace: a run of the guide.
        model_trace: the run of the model that belongs to it.
        free: the GP sites that are to be integrated.
        names: the sites that have terms.
        terms: the terms of the bound, by site, of a run of the model.
        model_at: the run of the model at other values of GP sites.
    """
    if len(free) == 1 and all(not q.batch_shape for q in free.values()):
        (site,) = free  # the common case needs no analysis: one latent, and a term without it is constant
        return [Rule({site: np.zeros((), int)}, names)]
    depends = eval_provenance(
        lambda **values: terms(model_at(values)),
        **{name: guide_trace[name]["value"] for name in free},
    )
    paired = {
        name: _paired(
            guide_trace[name],
            {term: model_trace[term] for term, parents in depends.items() if name in parents},
            lambda f, name=name: model_at({name: f}),
        )
        for name in free
    }
    groups: dict[Any, tuple[dict[str, np.ndarray] | None, list[str]]] = {}
    for term, parents in depends.items():
        if not parents:
            continue
        axes = _axes({name: (free[name].batch_shape, paired[name][term]) for name in sorted(parents)})
        key = None if axes is None else tuple((name, axis.tobytes()) for name, axis in axes.items())
        groups.setdefault(key, (axes, []))[1].append(term)
    return [Rule(axes, tuple(names)) for axes, names in groups.values()]


def _paired(
    site: dict[str, Any], terms: Mapping[str, dict[str, Any]], trace_at: Callable[[Array], Trace]
) -> dict[str, set[int]]:
    """By term, which batch axes of a GP site, counted from the back, pair latents with entries of the term.

    A plate around both says which entry would belong to which latent. The program says whether no other latent has a
    part in it: where outputs mix latents, as in a linear model of coregionalisation, others have.
    """

    # A divergence has the parameters of the same distribution for its entries as the density has.
    def entries(f: Array, chosen: list[str]) -> dict[str, Array]:
        trace = trace_at(f)
        return {term: jnp.asarray(scaled_log_prob(trace[term])) for term in chosen}

    paired: dict[str, set[int]] = {term: set() for term in terms}
    for frame in site["cond_indep_stack"]:
        within = {
            term: next((other.dim for other in model_site["cond_indep_stack"] if other.name == frame.name), None)
            for term, model_site in terms.items()
        }
        within = {term: dim for term, dim in within.items() if dim is not None}
        if frame.size == 1 or not within:
            continue
        axis = frame.dim - site["fn"].event_dim
        found = axes_of(partial(entries, chosen=list(within)), site["value"], axis)
        for term, dim in within.items():
            if found[term] in (None, dim):
                paired[term].add(frame.dim)
    return paired


def _axes(latents: Mapping[str, tuple[tuple[int, ...], set[int]]]) -> dict[str, np.ndarray] | None:
    """Give each latent that one entry of a term depends on an axis of a product grid; None for more than two.

    Along a batch axis that pairs them with the entries of the term, the latents of a GP site can share an axis. Along
    any other one each entry may depend on all latents.

    Args:
        latents: by GP site its batch shape, and which of its axes, counted from the back, are paired.
    """
    axes, used = {}, 0
    for name, (batch_shape, paired) in latents.items():
        own = tuple(1 if dim - len(batch_shape) in paired else size for dim, size in enumerate(batch_shape))
        count = int(np.prod(own, dtype=int))
        axes[name] = np.broadcast_to(used + np.arange(count).reshape(own), batch_shape)
        used += count
    return axes if used <= 2 else None
