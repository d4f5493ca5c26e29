"""`QuadratureELBO`: the evidence lower bound with the GP latents integrated by quadrature."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import scale_and_mask
from numpyro.infer.elbo import ELBO
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger
from numpyro.util import _validate_model, check_model_guide_match

from numpyro_sgp.checks import at_least
from numpyro_sgp.concavity import check_concave, dependence, is_quadratic
from numpyro_sgp.conditionals import jackknife, standard_deviation
from numpyro_sgp.distributions import SparsePosterior, unwrap
from numpyro_sgp.pairing import axes_of
from numpyro_sgp.quadrature import gauss_hermite, product_grid

__all__ = ["Particle", "QuadratureELBO", "Trace", "posteriors_of", "scaled_log_prob"]

Trace = dict[str, dict[str, Any]]


class Rule(NamedTuple):
    """How the GP sites move together while some terms of the bound are integrated: f = m + √v z.

    Attributes:
        axes: for each GP site an integer array of its batch shape: which axis of the product grid moves each latent;
            None for random draws.
        terms: names of the sites whose expectations this rule gives.
    """

    axes: dict[str, np.ndarray] | None
    terms: tuple[str, ...]


def scaled_log_prob(site: dict[str, Any]) -> Array:
    """The log density of a site at its value, scaled and masked."""
    if site["intermediates"]:
        log_prob = site["fn"].log_prob(site["value"], site["intermediates"])
    else:
        log_prob = site["fn"].log_prob(site["value"])
    return scale_and_mask(log_prob, site["scale"])


def _check_outcomes(trace: Trace) -> None:
    """Raise where outcomes and their distribution are broadcast to a table that neither of them is."""
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        value, entries = np.shape(site["value"]), site["fn"].shape()
        try:
            both = np.broadcast_shapes(value, entries)
        except ValueError:
            continue  # the density says so itself
        if both not in (value, entries):
            column = value == (*entries, 1)
            advice = "For a column of outcomes use y[:, 0]." if column else "Give both the same order of axes."
            msg = (
                f"The outcomes of {name!r} have shape {value} and its distribution has {entries}: together that is a "
                f"table {both} of all pairs, where one number for each entry is needed. {advice}"
            )
            raise ValueError(msg)


def _latent_term(model_site: dict[str, Any], guide_site: dict[str, Any], analytic: bool) -> Array:
    """−KL(q ‖ p) where it is known and may be used, else log p − log q at the sample."""
    if analytic:
        try:
            kl = kl_divergence(guide_site["fn"], model_site["fn"])
        except NotImplementedError:
            pass
        else:
            return -jnp.sum(scale_and_mask(kl, guide_site["scale"]))
    return jnp.sum(scaled_log_prob(model_site)) - jnp.sum(scaled_log_prob(guide_site))


def _sample_sites(trace: Trace) -> list[str]:
    return [name for name, site in trace.items() if site["type"] == "sample"]


def _mutable(trace: Trace) -> dict[str, Any]:
    return {name: site["value"] for name, site in trace.items() if site["type"] == "mutable"}


class _Reflect(Messenger):
    """Mirrors each GP sample at its mean: the second draw of an antithetic pair."""

    def __init__(self, sign: Array) -> None:
        self.sign = sign
        super().__init__()

    def postprocess_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and isinstance(unwrap(msg["fn"]), SparsePosterior):
            mean = unwrap(msg["fn"]).mean
            msg["value"] = mean + self.sign * (msg["value"] - mean)


class QuadratureELBO(ELBO):
    """ELBO = Σ_n E_q[log p(y_n | f_n, θ)] − KL(q(u) ‖ p(u)) − KL(q(θ) ‖ p(θ)), the expectation over f by quadrature.

    The model is run at Gauss-Hermite nodes of the marginals of f (a `vmap` of the replayed model). A term of the bound
    that depends on one GP latent for each datum uses `num_nodes` nodes, one that depends on two their product grid, and
    one that depends on more uses `num_samples` antithetic draws. A GP whose inputs or kernel depend on another GP (a
    deep GP) is integrated given draws of that one. The likelihood must factorise over the rows of X given f, which the
    guides check in `SVI.init`; the other latents are sampled as in NumPyro's `TraceMeanField_ELBO`.

    Args:
        num_nodes: nodes along each axis; exact where log p is a polynomial of degree below 2 · num_nodes in f.
        num_particles: draws of the other latents.
        num_samples: draws of f where quadrature does not apply; even.
        vectorize_particles: as in NumPyro's `ELBO`.

    Raises:
        ValueError: `num_nodes` or `num_samples` is not positive, or `num_samples` is odd.

    References:
        Hensman, Matthews and Ghahramani (2015), "Scalable variational Gaussian process classification", equation 19.

    Example:
        >>> import numpyro_sgp as sgp
        >>> loss = sgp.QuadratureELBO(num_nodes=20)
    """

    def __init__(
        self,
        num_nodes: int = 20,
        num_particles: int = 1,
        num_samples: int = 8,
        *,
        vectorize_particles: bool | Callable = True,
    ) -> None:
        product_grid(num_nodes, 1)  # checks num_nodes
        if at_least(0, "num_samples", num_samples, "Use 8.") % 2 or num_samples == 0:
            msg = f"`num_samples` must be a positive even integer, for antithetic pairs, got {num_samples!r}. Use 8."
            raise ValueError(msg)
        self.num_nodes = num_nodes
        self.num_samples = num_samples
        super().__init__(num_particles=num_particles, vectorize_particles=vectorize_particles)

    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: dict[str, Any],
        model: Callable,
        guide: Callable,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The negative ELBO and the new mutable state; see `numpyro.infer.elbo.ELBO`."""

        def particle(key: Array) -> tuple[Array, dict[str, Any] | None]:
            return Particle(self, key, param_map, model, guide, args, kwargs).elbo()

        if self.num_particles == 1:
            elbo, mutable_state = particle(rng_key)
            return {"loss": -elbo, "mutable_state": mutable_state}
        elbos, states = self.vectorize_particles_fn(particle, jax.random.split(rng_key, self.num_particles))
        # Each particle starts from the same state; one of the results goes on, as in a run with a single particle.
        mutable_state = None if states is None else jax.tree.map(lambda x: x[0], states)
        return {"loss": -jnp.mean(elbos), "mutable_state": mutable_state}


class Particle:
    """One draw of the other latents: the bound given it."""

    def __init__(
        self,
        loss: QuadratureELBO,
        rng_key: Array,
        params: Mapping[str, Any],
        model: Callable,
        guide: Callable,
        args: tuple,
        kwargs: dict,
    ) -> None:
        self.loss, self.params, self.model, self.guide = loss, dict(params), model, guide
        self.args, self.kwargs = args, kwargs
        self.model_key, self.guide_key, self.noise_key = jax.random.split(rng_key, 3)

    def elbo(self) -> tuple[Array, dict[str, Any] | None]:
        guide_trace = self.run_guide(self.guide_key, {})
        parents = self.nested_parents(guide_trace)
        if not parents:
            return self.elbo_given(guide_trace, parents)
        pairs = self.loss.num_samples // 2
        keys = jnp.repeat(jax.random.split(self.guide_key, pairs), 2, axis=0)
        signs = jnp.tile(jnp.asarray([1.0, -1.0]), pairs)

        def draw(key: Array, sign: Array) -> tuple[Array, dict[str, Any] | None]:
            with _Reflect(sign):
                trace = self.run_guide(key, {})
            return self.elbo_given(trace, parents)

        elbos, states = jax.vmap(draw)(keys, signs)
        return jnp.mean(elbos), None if states is None else jax.tree.map(lambda x: x[0], states)

    def run_guide(self, key: Array, values: Mapping[str, Array]) -> Trace:
        guide = handlers.substitute(handlers.seed(self.guide, key), data={**self.params, **values})
        return handlers.trace(guide).get_trace(*self.args, **self.kwargs)

    def run_model(self, guide_trace: Trace, values: Mapping[str, Array]) -> Trace:
        replayed = OrderedDict(guide_trace)
        for name, value in values.items():
            replayed[name] = {**guide_trace[name], "value": value}
        model = handlers.replay(handlers.seed(self.model, self.model_key), cast(Any, replayed))
        model = handlers.substitute(model, data={**self.params, **_mutable(guide_trace)})
        return handlers.trace(model).get_trace(*self.args, **self.kwargs)

    def nested_parents(self, guide_trace: Trace) -> frozenset[str]:
        """GP sites on which the posterior of another GP site depends."""
        sites = posteriors_of(guide_trace)
        if len(sites) < 2:
            return frozenset()

        def moments(**values: Array) -> dict[str, tuple[Array, Array]]:
            trace = self.run_guide(self.guide_key, values)
            return {name: (q.mean, q.variance) for name, q in posteriors_of(trace).items()}

        depends = eval_provenance(moments, **{name: guide_trace[name]["value"] for name in sites})
        return frozenset().union(*(set(mean | variance) - {name} for name, (mean, variance) in depends.items()))

    def elbo_given(self, guide_trace: Trace, parents: frozenset[str]) -> tuple[Array, dict[str, Any] | None]:
        sites = posteriors_of(guide_trace)
        model_trace = self.run_model(guide_trace, {})
        check_model_guide_match(model_trace, guide_trace)
        _check_outcomes(model_trace)
        _validate_model(model_trace, plate_warning="loose")
        # The analytic KL of a site is right if its parents in the model are not its children in the guide; the same
        # order of sites in both is sufficient.
        guide_order = [name for name in _sample_sites(guide_trace) if name in model_trace]
        analytic = guide_order == [name for name in _sample_sites(model_trace) if name in guide_trace]

        def terms(trace: Trace) -> dict[str, Array]:
            result = {}
            for name in _sample_sites(trace):
                if name in sites:
                    continue
                site = trace[name]
                result[name] = (
                    jnp.sum(scaled_log_prob(site))
                    if site["is_observed"]
                    else _latent_term(site, guide_trace[name], analytic)
                )
            return result

        at_sample = terms(model_trace)
        elbo = 0.0  # without a dtype of its own, so that a float32 model has a float32 loss under x64
        for name in sites:
            elbo = elbo - jnp.sum(
                scale_and_mask(
                    kl_divergence(guide_trace[name]["fn"], model_trace[name]["fn"]), guide_trace[name]["scale"]
                )
            )
        for name in _sample_sites(guide_trace):
            if name not in model_trace:
                elbo = elbo - jnp.sum(scaled_log_prob(guide_trace[name]))  # auxiliary sites of the guide

        free = {name: q for name, q in sites.items() if name not in parents}
        _check_sampled(sites, parents)
        rules = self.rules(guide_trace, model_trace, free, terms, at_sample)
        integrated = {name for rule in rules for name in rule.terms}
        elbo = elbo + sum(value for name, value in at_sample.items() if name not in integrated)
        for index, rule in enumerate(rules):
            sampled = _sampled_site(rule, free)
            if sampled is not None:
                elbo = elbo + self.integrate_sampled(rule, sampled, free[sampled], guide_trace, terms)
                continue
            elbo = elbo + self.integrate(rule, free, guide_trace, terms, jax.random.fold_in(self.noise_key, index))
        mutable_state = {**_mutable(guide_trace), **_mutable(model_trace)}
        return jnp.asarray(elbo), mutable_state or None

    def rules(
        self,
        guide_trace: Trace,
        model_trace: Trace,
        free: Mapping[str, SparsePosterior],
        terms: Callable[[Trace], dict[str, Array]],
        at_sample: Mapping[str, Array],
    ) -> list[Rule]:
        """Group the terms of the bound by the latents they depend on."""
        if len(free) == 1 and all(not q.batch_shape for q in free.values()):
            (name,) = free  # the common case needs no analysis: one latent, and a term without it is constant
            return [Rule({name: np.zeros((), int)}, tuple(at_sample))]
        depends = eval_provenance(
            lambda **values: terms(self.run_model(guide_trace, values)),
            **{name: guide_trace[name]["value"] for name in free},
        )
        paired = {
            name: _paired(
                guide_trace[name],
                {term: model_trace[term] for term, parents in depends.items() if name in parents},
                lambda f, name=name: self.run_model(guide_trace, {name: f}),
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

    def integrate(
        self,
        rule: Rule,
        free: Mapping[str, SparsePosterior],
        guide_trace: Trace,
        terms: Callable[[Trace], dict[str, Array]],
        key: Array,
    ) -> Array:
        """Σ over the rule's terms of their expectations under the marginals of f."""
        moments = {name: (q.mean, standard_deviation(q.variance)) for name, q in free.items()}
        z, weights = self.nodes(rule, {name: mean for name, (mean, _) in moments.items()}, key)

        def at(z: Mapping[str, Array]) -> Array:
            values = {name: mean + scale * z[name] for name, (mean, scale) in moments.items() if name in z}
            result = terms(self.run_model(guide_trace, values))
            return jnp.asarray(sum(result[name] for name in rule.terms))

        return jnp.sum(weights * jax.vmap(at)(z))

    def integrate_sampled(
        self, rule: Rule, name: str, q: SparsePosterior, guide_trace: Trace, terms: Callable[[Trace], dict[str, Array]]
    ) -> Array:
        """The same where the marginals of f are estimates: unbiased for quadratic terms, a bound for concave ones."""
        sampled, mean = q.moments.sampled, q.mean
        sampled.integrated.append(True)

        def traced(f: Array) -> Trace:
            return self.run_model(guide_trace, {name: f})

        def at(f: Array, chosen: list[str]) -> Array:
            result = terms(traced(f))
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
                kind = dependence(lambda f, term=term: unwrap(traced(f)[term]["fn"]), mean)
                check_concave(term, *kind, sampled.log_concave)
            if sampled.controlled:
                msg = (
                    f"The guide has a control variate, but the likelihood of {concave} is not Gaussian, where its "
                    "gradient would be biased. Leave `control` out."
                )
                raise ValueError(msg)
            nodes, weights = (jnp.asarray(x, mean.dtype) for x in gauss_hermite(self.loss.num_nodes))
            whole = estimated(q.moments.mean, concave)
            if sampled.halves is not None:
                first, second = (estimated(half, concave) for half in sampled.halves)
                whole = jackknife(whole, first, second, sampled.share)
            elbo = elbo + whole
        return elbo

    def nodes(self, rule: Rule, means: Mapping[str, Array], key: Array) -> tuple[dict[str, Array], Array]:
        """Where the latents are evaluated, in standard deviations from their means, (K, ...), and the weights, (K,)."""
        dtype = next(iter(means.values())).dtype
        if rule.axes is None:
            half = self.loss.num_samples // 2
            draws = {
                name: jax.random.normal(jax.random.fold_in(key, index), (half, *mean.shape), mean.dtype)
                for index, (name, mean) in enumerate(means.items())
            }
            weights = jnp.full(2 * half, 0.5 / half, dtype)
            return {name: jnp.concatenate([value, -value]) for name, value in draws.items()}, weights
        dimension = 1 + max(int(axis.max(initial=0)) for axis in rule.axes.values())
        grid, weights = product_grid(self.loss.num_nodes, dimension)
        z = {name: jnp.asarray(grid[:, axis][..., None], dtype) for name, axis in rule.axes.items()}
        return z, jnp.asarray(weights, dtype)


def _sampled_site(rule: Rule, free: Mapping[str, SparsePosterior]) -> str | None:
    """The site whose marginals are estimates, where the terms of a rule depend on one."""
    names = list(free) if rule.axes is None else list(rule.axes)
    sampled = [name for name in names if free[name].moments.sampled is not None]
    if sampled and (len(names) > 1 or rule.axes is None):
        msg = (
            f"The terms {list(rule.terms)} depend on several GP latents, {names}, of which {sampled} are estimated "
            "from sampled basis functions. `AutoQSGP` takes one latent for each observed site. Use another guide."
        )
        raise ValueError(msg)
    return sampled[0] if sampled else None


def _check_sampled(sites: Mapping[str, SparsePosterior], parents: frozenset[str]) -> None:
    nested = sorted(name for name in parents if sites[name].moments.sampled is not None)
    if nested:
        msg = (
            f"The GP site(s) {nested} are estimated from sampled basis functions, and other GPs depend on them. Use "
            "another guide for a deep GP: `AutoSVGP`, or `AutoSparseGP` with a family for each site."
        )
        raise ValueError(msg)


def posteriors_of(trace: Trace) -> dict[str, SparsePosterior]:
    """The sparse posteriors among the sites of a guide."""
    found = {name: unwrap(site["fn"]) for name, site in trace.items() if site["type"] == "sample"}
    return {name: q for name, q in found.items() if isinstance(q, SparsePosterior)}


def _paired(
    site: dict[str, Any], terms: Mapping[str, dict[str, Any]], trace_at: Callable[[Array], Trace]
) -> dict[str, set[int]]:
    """By term, which batch axes of a GP site, counted from the back, pair latents with entries of the term.

    A plate around both says which entry would belong to which latent. The program says whether no other latent has a
    part in it: where outputs mix latents, as in a linear model of coregionalisation, others have.
    """
    value, batch_ndim = site["value"], jnp.ndim(site["value"]) - site["fn"].event_dim
    paired: dict[str, set[int]] = {term: set() for term in terms}
    for frame in site["cond_indep_stack"]:
        within = {
            term: next((other.dim for other in model_site["cond_indep_stack"] if other.name == frame.name), None)
            for term, model_site in terms.items()
        }
        within = {term: dim for term, dim in within.items() if dim is not None}
        if frame.size == 1 or not within:
            continue

        # A divergence has the parameters of the same distribution for its entries as the density has.
        def entries(f: Array, chosen: list[str]) -> dict[str, Array]:
            trace = trace_at(f)
            return {term: jnp.asarray(scaled_log_prob(trace[term])) for term in chosen}

        at = functools.partial(entries, chosen=list(within))
        shapes, found = jax.eval_shape(at, value), axes_of(at, value, batch_ndim + frame.dim)
        for term, dim in within.items():
            if found[term] in (None, len(shapes[term].shape) + dim):
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
