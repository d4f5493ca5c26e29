"""`QuadratureELBO`: the evidence lower bound with the GP latents integrated by quadrature."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, cast

import jax
from jax import Array
import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import scale_and_mask
from numpyro.infer.elbo import ELBO
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger
from numpyro.util import _validate_model, check_model_guide_match

from numpyro_sgp._internal.checks import at_least
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import (
    Trace,
    check_kept,
    check_outcomes,
    posteriors_of,
    sample_sites,
    scaled_log_prob,
)
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.guides.handlers import GivenDeviations, is_missing_outcome
from numpyro_sgp.losses.joint import JointExpectation
from numpyro_sgp.losses.rules import Rule, rules_of
from numpyro_sgp.losses.sampled import check_sampled, integrate_sampled, sampled_site
from numpyro_sgp.losses.tight import gain
from numpyro_sgp.math.quadrature import product_grid
from numpyro_sgp.posteriors.moments import standard_deviation

__all__ = ["Particle", "QuadratureELBO"]


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


def _run_of(q: SparsePosterior) -> Any:
    """What integrates the terms of a GP site by linear predictors, if they need that."""
    return q.independent_run if q.joint_run is None else q.joint_run


def _mutable(trace: Trace) -> dict[str, Any]:
    return {name: site["value"] for name, site in trace.items() if site["type"] == "mutable"}


def _joint_runs(posteriors: Mapping[str, SparsePosterior]) -> list[Any]:
    """The runs of GP sites that are integrated by linear predictors, each once."""
    return list({id(run): run for q in posteriors.values() if (run := _run_of(q)) is not None}.values())


class _Reflect(Messenger):
    """Mirrors each GP sample at its mean: the second draw of an antithetic pair."""

    def __init__(self, sign: Array) -> None:
        self.sign = sign
        super().__init__()

    def postprocess_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and isinstance(unwrap(msg["fn"]), SparsePosterior):
            mean = unwrap(msg["fn"]).mean
            msg["value"] = mean + jnp.asarray(self.sign, mean.dtype) * (msg["value"] - mean)


class QuadratureELBO(ELBO):
    """ELBO = Σ_n E_q[log p(y_n | f_n, θ)] − KL(q(u) ‖ p(u)) − KL(q(θ) ‖ p(θ)), the expectation over f by quadrature.

    The model is run at Gauss-Hermite nodes of the marginals of f (a `vmap` of the replayed model). A term of the bound
    that depends on one GP latent for each datum uses `num_nodes` nodes, one that depends on two their product grid, and
    one that depends on more uses `num_samples` antithetic draws. A GP whose inputs or kernel depend on another GP (a
    deep GP) is integrated given draws of that one. A term that depends on several rows of a GP is integrated over
    its linear predictors, and over `num_samples` joint draws of the rows where it has more than two of them. The other
    latents are sampled as in NumPyro's `TraceMeanField_ELBO`.

    With Gaussian noise the bound is a tighter one: with d_n the variance of f_n that u leaves unexplained, it is higher
    by ½ Σ_n [d_n/σ² − log(1 + d_n/σ²)]. It has the same q(u), and less bias in the hyperparameters.

    Args:
        num_nodes: nodes along each axis; exact where log p is a polynomial of degree below 2 · num_nodes in f.
        num_particles: draws of the other latents.
        num_samples: draws of f where quadrature does not apply; even.
        bound: "tight", or "titsias" for the bound above without that gain.
        vectorize_particles: as in NumPyro's `ELBO`.

    Raises:
        ValueError: `num_nodes` or `num_samples` is not positive, or `num_samples` is odd; unknown `bound`.

    References:
        Hensman, Matthews and Ghahramani (2015), "Scalable variational Gaussian process classification", equation 19;
        Titsias (2025), "New bounds for sparse variational Gaussian processes", for the tighter bound.

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
        bound: Literal["tight", "titsias"] = "tight",
        vectorize_particles: bool | Callable = True,
    ) -> None:
        if bound not in ("tight", "titsias"):
            msg = f"`bound` must be 'tight' or 'titsias', got {bound!r}."
            raise ValueError(msg)
        self.bound = bound
        product_grid(num_nodes, 1)  # checks num_nodes
        if at_least(0, "num_samples", num_samples, "Use 8.") % 2 or num_samples == 0:
            msg = f"`num_samples` must be a positive even integer, for antithetic pairs, got {num_samples!r}. Use 8."
            raise ValueError(msg)
        self.num_nodes = num_nodes
        self.num_samples = num_samples
        super().__init__(num_particles=num_particles, vectorize_particles=vectorize_particles)

    def loss(
        self, rng_key: Array, param_map: dict[str, Any], model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> Array:
        """The negative ELBO; see `numpyro.infer.elbo.ELBO`."""
        return self._evaluated(rng_key, param_map, model, guide, args, kwargs, training=False)["loss"]

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict[str, Any], model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """The negative ELBO and the new mutable state, to train with; see `numpyro.infer.elbo.ELBO`."""
        return self._evaluated(rng_key, param_map, model, guide, args, kwargs, training=True)

    def _evaluated(
        self,
        rng_key: Array,
        param_map: dict[str, Any],
        model: Callable,
        guide: Callable,
        args: tuple,
        kwargs: dict,
        *,
        training: bool,
    ) -> dict[str, Any]:
        def particle(key: Array) -> tuple[Array, dict[str, Any] | None]:
            return Particle(self, key, param_map, model, guide, args, kwargs, training=training).elbo()

        if self.num_particles == 1:
            elbo, mutable_state = particle(rng_key)
            return {"loss": -elbo, "mutable_state": mutable_state}
        elbos, states = self.vectorize_particles_fn(particle, jax.random.split(rng_key, self.num_particles))
        # Each particle starts from the same state; one of the results goes on, as in a run with a single particle.
        mutable_state = None if states is None else jax.tree.map(lambda x: x[0], states)
        return {"loss": -jnp.mean(elbos), "mutable_state": mutable_state}


class Particle:
    """One draw of the other latents: the bound given it.

    Without `observed` it is the bound of no data; without `latent` it is the expected log likelihood alone.
    """

    def __init__(
        self,
        loss: QuadratureELBO,
        rng_key: Array,
        params: Mapping[str, Any],
        model: Callable,
        guide: Callable,
        args: tuple,
        kwargs: dict,
        *,
        training: bool = False,
        observed: bool = True,
        latent: bool = True,
    ) -> None:
        self.training, self.observed, self.latent = training, observed, latent
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

    def run_model(
        self, guide_trace: Trace, values: Mapping[str, Array], deviations: Mapping[str, Array] | None = None
    ) -> Trace:
        """The model at the values of the guide, but for some sites.

        Args:
            guide_trace: a run of the guide.
            values: of the sites.
            deviations: of GP sites from their prior means, for others.
        """
        deviations = deviations or {}
        replayed = OrderedDict((name, site) for name, site in guide_trace.items() if name not in deviations)
        for name, value in values.items():
            if name not in guide_trace:
                msg = (
                    f"The latent site {name!r} of a joint posterior has a value already, as `handlers.substitute` "
                    "around the model gives it, and the guide needs a latent. Fix it with `handlers.condition`, and "
                    "make the guide of that model."
                )
                raise ValueError(msg)
            replayed[name] = {**guide_trace[name], "value": value}
        model = handlers.seed(GivenDeviations(self.model, deviations), self.model_key)
        model = handlers.replay(model, cast(Any, replayed))
        model = handlers.substitute(model, data={**self.params, **_mutable(guide_trace)})
        return handlers.trace(model).get_trace(*self.args, **self.kwargs)

    def nested_parents(self, guide_trace: Trace) -> frozenset[str]:
        """GP sites on which the posterior of another GP site depends."""
        # Members of a joint posterior have no GP sites that depend on them.
        sites = [name for name, q in posteriors_of(guide_trace).items() if _run_of(q) is None]
        if len(sites) < 2:
            return frozenset()

        def moments(**values: Array) -> dict[str, tuple[Array, Array]]:
            trace = self.run_guide(self.guide_key, values)
            return {name: (q.mean, q.variance) for name, q in posteriors_of(trace).items()}

        depends = eval_provenance(moments, **{name: guide_trace[name]["value"] for name in sites})
        return frozenset().union(*(set(mean | variance) - {name} for name, (mean, variance) in depends.items()))

    def joint_expectations(self, guide_trace: Trace, analytic: bool) -> list[JointExpectation]:
        """The integrals over each joint posterior.

        Args:
            guide_trace: a run of the guide.
            analytic: whether a known divergence of a latent that is no member may be used.
        """
        posteriors = posteriors_of(guide_trace)
        return [
            JointExpectation(
                run,
                partial(self.run_model, guide_trace),
                {
                    name: jnp.zeros(q.shape(), q.prior.X.dtype)
                    for name, q in posteriors.items()
                    if name in run.group.sites
                },
                lambda trace, name: _latent_term(trace[name], guide_trace[name], analytic),
                self.loss.num_nodes,
                self.loss.num_samples,
                jax.random.fold_in(self.noise_key, number),
                observed=self.observed,
                latent=self.latent,
                bound=self.loss.bound,
                scale=guide_trace[run.group.sites[0]]["scale"],
            )
            for number, run in enumerate(_joint_runs(posteriors), 1)
        ]

    def elbo_given(self, guide_trace: Trace, parents: frozenset[str]) -> tuple[Array, dict[str, Any] | None]:
        everything = posteriors_of(guide_trace)
        if self.training:
            check_kept(everything, self.guide, type(self.loss).__name__)
        runs = _joint_runs(everything)
        members = {name for run in runs for name in (*run.group.sites, *run.group.latents)}
        sites = {name: q for name, q in everything.items() if name not in members}
        model_trace = self.run_model(guide_trace, {})
        check_model_guide_match(model_trace, guide_trace)
        check_outcomes(model_trace)
        _validate_model(model_trace, plate_warning="loose")
        # The analytic KL of a site is right if its parents in the model are not its children in the guide; the same
        # order of sites in both is sufficient.
        guide_order = [name for name in sample_sites(guide_trace) if name in model_trace]
        analytic = guide_order == [name for name in sample_sites(model_trace) if name in guide_trace]

        model_at = partial(self.run_model, guide_trace)
        joint = self.joint_expectations(guide_trace, analytic)
        # Missing outcomes are drawn from the likelihood by the guide, too: log p − log q is zero.
        outcomes = {name for name in sample_sites(model_trace) if model_trace[name]["is_observed"]}
        missing = {name for name in sample_sites(guide_trace) if is_missing_outcome(name, outcomes)}
        in_joint = {name for each in joint for name in each.names}

        def terms(trace: Trace) -> dict[str, Array]:
            result = {}
            for name in sample_sites(trace):
                if name in sites or name in members or name in in_joint or name in missing:
                    continue
                site = trace[name]
                if not (self.observed if site["is_observed"] else self.latent):
                    continue
                result[name] = (
                    jnp.sum(scaled_log_prob(site))
                    if site["is_observed"]
                    else _latent_term(site, guide_trace[name], analytic)
                )
            return result

        at_sample = terms(model_trace)
        elbo = 0.0  # without a dtype of its own, so that a float32 model has a float32 loss under x64
        for each in joint:
            elbo = elbo + each.value()
        for name in sites if self.latent else ():
            elbo = elbo - jnp.sum(
                scale_and_mask(
                    kl_divergence(guide_trace[name]["fn"], model_trace[name]["fn"]), guide_trace[name]["scale"]
                )
            )
        for name in sample_sites(guide_trace) if self.latent else ():
            if name not in model_trace:
                elbo = elbo - jnp.sum(scaled_log_prob(guide_trace[name]))  # auxiliary sites of the guide

        free = {name: q for name, q in sites.items() if name not in parents}
        check_sampled(sites, parents)
        rules = rules_of(guide_trace, model_trace, free, tuple(at_sample), terms, model_at) if free else []
        integrated = {name for rule in rules for name in rule.terms}
        elbo = elbo + sum(value for name, value in at_sample.items() if name not in integrated)
        for index, rule in enumerate(rules):
            sampled = sampled_site(rule, free)
            if sampled is not None:
                elbo = elbo + integrate_sampled(rule, sampled, free[sampled], self.loss.num_nodes, terms, model_at)
                continue
            elbo = elbo + self.integrate(rule, free, terms, model_at, jax.random.fold_in(self.noise_key, index))
        if free and self.loss.bound == "tight":
            elbo = elbo + gain(
                free, {name: guide_trace[name]["scale"] for name in free}, model_trace, tuple(at_sample), model_at
            )
        mutable_state = {**_mutable(guide_trace), **_mutable(model_trace)}
        return jnp.asarray(elbo), mutable_state or None

    def integrate(
        self,
        rule: Rule,
        free: Mapping[str, SparsePosterior],
        terms: Callable[[Trace], dict[str, Array]],
        model_at: Callable[[Mapping[str, Array]], Trace],
        key: Array,
    ) -> Array:
        """Σ over the rule's terms of their expectations under the marginals of f."""
        moments = {name: (q.mean, standard_deviation(q.variance)) for name, q in free.items()}
        means = {name: mean for name, (mean, _) in moments.items()}
        z, weights = rule.nodes(self.loss.num_nodes, self.loss.num_samples, means, key)

        def at(z: Mapping[str, Array]) -> Array:
            values = {name: mean + scale * z[name] for name, (mean, scale) in moments.items() if name in z}
            result = terms(model_at(values))
            return jnp.asarray(sum(result[name] for name in rule.terms))

        return jnp.sum(weights * jax.vmap(at)(z))
