"""Which GP sites and latents get one joint Gaussian, and that Gaussian in a run of the guide.

The model is run once with its GP sites at zero and its latents at a draw of the prior. The traced program tells which
latents each term depends on, and which priors are Gaussian. In each run of the guide the priors of the GP sites and of
the latents, given the hyperparameters, make the prior of z, and the sites make q(z) of it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import dataclasses
from typing import Any, cast
import warnings

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import AffineTransform
from numpyro.distributions.util import scale_and_mask, sum_rightmost
from numpyro.primitives import Messenger

from numpyro_sgp._internal.predictors import Program, traced
from numpyro_sgp._internal.probed import value_of
from numpyro_sgp._internal.pytrees import own_copy
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace, scaled_log_prob
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.guides.handlers import Alone, CheckedPlates, GivenGaussianProcesses
from numpyro_sgp.guides.parameters import SiteParameters
from numpyro_sgp.math.linalg import cholesky, matmul, matvec, matvec_transposed, solve_lower, with_jitter
from numpyro_sgp.posteriors.dual.tied import shared_covariance
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, inducing_param, refuse_growing
from numpyro_sgp.posteriors.gaussian import InducingGaussian
from numpyro_sgp.posteriors.joint.formulas import JointGaussian, Rows, gaussian_prior, stacked
from numpyro_sgp.posteriors.moments import Moments, moments
from numpyro_sgp.posteriors.natural_parameters import JointSites

__all__ = [
    "Group",
    "Joint",
    "JointRun",
    "again",
    "checked_joint",
    "expected_reference",
    "find_groups",
    "first_run",
    "log_densities",
]

Joint = bool | str | tuple[str, ...]

# Gaussian where they are unconstrained.
_GAUSSIAN = (dist.Normal, dist.MultivariateNormal, dist.LogNormal)
# Latents that are many beside the inducing variables make a step slower: their block is dense.
_MOST_LATENTS = 1000
# The standard deviation that a latent starts with, as in NumPyro's `AutoNormal`.
_INITIAL_SCALE = 0.1
# The reference in the place of a prior that is not Gaussian in the unconstrained latent.
_REFERENCE_SCALE = 3.0


def checked_joint(joint: Any) -> Joint:
    """The argument `joint` of a guide, names as a tuple."""
    if joint is False or joint == "auto":
        return joint
    if isinstance(joint, tuple | list) and joint and all(isinstance(name, str) for name in joint):
        return tuple(joint)
    msg = f'`joint` must be "auto", False or a tuple of names of sites, got {joint!r}. "auto" is the default.'
    raise ValueError(msg)


@dataclasses.dataclass(frozen=True)
class Group:
    """GP sites and latents with one joint Gaussian.

    Attributes:
        sites: the GP sites.
        latents: the other latents, in the order of the model.
        gaussian: those of them whose prior is jointly Gaussian where they are unconstrained, given the hyperparameters.
        scaled: those that the model multiplies by another latent, each with that scale. Their product is the member, as
            if the effects had been written centred, and the scale is left to the base guide.
    """

    sites: tuple[str, ...]
    latents: tuple[str, ...]
    gaussian: tuple[str, ...]
    scaled: tuple[tuple[str, str], ...] = ()


# Runs of the model at given values.


def first_run(model: Callable[[], Any], *inner: Messenger) -> Trace:
    """A run of the model that nobody outside sees, with parameters from outside and draws of the prior elsewhere.

    Args:
        model: with its arguments given.
        inner: handlers inside, which give values.
    """
    hidden = handlers.block(hide_fn=lambda msg: msg["type"] in ("sample", "deterministic", "plate"))
    with numpyro.validation_enabled(False), contextlib.ExitStack() as stack:
        stack.enter_context(hidden)
        trace = stack.enter_context(handlers.trace())
        stack.enter_context(handlers.seed(rng_seed=0))
        stack.enter_context(CheckedPlates())
        for handler in inner:
            stack.enter_context(handler)
        model()
    return trace


def again(model: Callable[[], Any], trace: Trace, values: Mapping[str, Any]) -> Trace:
    """The same run at other values of some sites."""
    given = {
        name: jax.tree.map(lambda x: x, site["value"])
        for name, site in trace.items()
        if site["type"] in ("param", "mutable")
    }
    replayed: Any = {
        name: {**site, "value": values[name]} if name in values else site
        for name, site in trace.items()
        if site["type"] != "deterministic"
    }
    run = handlers.substitute(handlers.seed(handlers.replay(model, replayed), rng_seed=0), data=given)
    with Alone(), numpyro.validation_enabled(False):
        return handlers.trace(run).get_trace()


def transforms_of(trace: Trace, latents: Collection[str]) -> dict[str, Any]:
    """From unconstrained values to those of each latent."""
    return {name: biject_to(trace[name]["fn"].support) for name in latents}


def log_densities(trace: Trace, transforms: Mapping[str, Any], w: Mapping[str, Array]) -> dict[str, Array]:
    """Log densities of latents in unconstrained space, entry by entry of their batch shape."""
    found = {}
    for name, transform in transforms.items():
        value = transform(w[name])
        log_prob = scaled_log_prob(trace[name])
        log_det = _summed(transform.log_abs_det_jacobian(w[name], value), jnp.ndim(log_prob))
        found[name] = log_prob + scale_and_mask(log_det, trace[name]["scale"])
    return found


# What is joint.


def _is_eligible(name: str, trace: Trace) -> bool:
    site = trace[name]
    fn, support = site["fn"], site["fn"].support
    if site.get("_control_flow_done") or site["infer"].get("is_auxiliary") or support is None or support.is_discrete:
        return False
    if isinstance(fn, dist.MaskedDistribution) or isinstance(unwrap(fn), dist.Delta):
        return False
    sizes = {msg["name"]: msg["args"][0] for msg in trace.values() if msg["type"] == "plate"}
    return all(sizes.get(frame.name, frame.size) == frame.size for frame in site["cond_indep_stack"])


def _program(model: Callable[[], Any], trace: Trace, gps: list[str], latents: list[str]) -> Program:
    """Terms ("term"), priors ("prior") and kernels and means of GP sites ("gp") as functions of f and w."""
    transforms = transforms_of(trace, latents)
    start = {name: jnp.asarray(trace[name]["value"]) for name in gps}
    start |= {name: jnp.asarray(transforms[name].inv(trace[name]["value"])) for name in latents}

    def run(values: dict[str, Array]) -> dict[str, Array]:
        w = {name: values[name] for name in latents}
        constrained = {name: transforms[name](value) for name, value in w.items()}
        found = again(model, trace, {**{name: values[name] for name in gps}, **constrained})
        result = {f"prior {name}": value for name, value in log_densities(found, transforms, w).items()}
        result |= {f"value {name}": jnp.asarray(value) for name, value in constrained.items()}
        for name in latents:
            fn: Any = unwrap(found[name]["fn"])
            if isinstance(fn, _GAUSSIAN):
                scale = fn.scale_tril if isinstance(fn, dist.MultivariateNormal) else fn.scale
                result |= {f"loc {name}": jnp.asarray(fn.loc), f"scale {name}": jnp.asarray(scale)}
        for name in gps:
            gp: Any = unwrap(found[name]["fn"])
            parts = (gp.X, gp.prior_mean, gp.kernel(gp.X), gp.kernel(gp.X[:1], gp.X))
            result |= {f"gp {name} {number}": jnp.asarray(part) for number, part in enumerate(parts)}
        for name, site in found.items():
            if site["type"] == "sample" and site["is_observed"]:
                result[f"term {name}"] = jnp.asarray(scaled_log_prob(site))
        return result

    return traced(run, start)


def find_groups(
    model: Callable[[], Any],
    joint: Joint,
    candidates: Collection[str],
    family: Callable[[str], AbstractPosteriorFamily],
) -> tuple[Group, ...]:
    """The groups of GP sites and latents that meet in terms of the model.

    Args:
        model: the model, with its arguments given.
        joint: what the user asked for.
        candidates: the latents that may be members.
        family: the posterior family of a GP site.

    Raises:
        ValueError: names in `joint` that cannot be joint.
    """
    if joint is False:
        return ()
    trace = first_run(model, GivenGaussianProcesses(0.0))
    if not any(name in trace for name in candidates) and _count_of_gps(trace) < 2:
        return ()
    samples = {name: site for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]}
    gps = [name for name, site in samples.items() if isinstance(unwrap(site["fn"]), GaussianProcess)]
    if not gps or any(site.get("_control_flow_done") for name, site in samples.items() if name in gps):
        return ()
    latents = [name for name in samples if name not in gps and _is_eligible(name, trace)]
    latents = [name for name in latents if name in candidates]
    program = _program(model, trace, gps, latents)
    depends = {name: program.depends[number] for name, number in program.outputs.items()}
    terms = {name: found for name, found in depends.items() if name.startswith("term ")}
    of_gps = {name: [depends[f"gp {name} {number}"] for number in range(4)] for name in gps}
    parents = frozenset().union(*(found for parts in of_gps.values() for found in parts))
    kinds = {name: family(name).joins for name in gps}
    members = [name for name in gps if name not in parents and not frozenset().union(*of_gps[name]).intersection(gps)]
    able = [name for name in members if kinds[name] is not None]
    inside = [name for name in latents if name not in parents and not depends[f"prior {name}"].intersection(gps)]
    if joint == "auto":
        _warn_of_families(terms, [name for name in members if kinds[name] is None], inside, family)
    named = None if joint == "auto" else _checked_names(joint, able, inside, terms, gps)
    if named is not None:
        able, inside = [name for name in able if name in named], [name for name in inside if name in named]
    groups = []
    for sites, found in _components(terms, able, inside):
        group = _group(program, depends, sites, found, inside, latents)
        beside = frozenset().union(*(term for term in terms.values() if term.intersection(sites))).intersection(gps)
        if beside - set(able) or len({kinds[site] for site in group.sites}) > 1:
            if named is not None:
                msg = (
                    f"`joint` names the GP sites {list(group.sites)}, whose posterior families hold their parameters "
                    "in different ways. Give them one family."
                )
                raise ValueError(msg)
            continue
        size = sum(int(np.size(trace[name]["value"])) for name in group.latents)
        if size > _MOST_LATENTS and named is None:
            warnings.warn(_too_many(group, size), UserWarning, stacklevel=2)
            continue
        if len(group.sites) + len(group.latents) > 1:
            groups.append(group)
    return tuple(groups)


def _count_of_gps(trace: Trace) -> int:
    return sum(isinstance(unwrap(site["fn"]), GaussianProcess) for site in trace.values() if site["type"] == "sample")


def _checked_names(
    joint: Joint, able: list[str], inside: list[str], terms: Mapping[str, frozenset[str]], gps: list[str]
) -> frozenset[str]:
    assert isinstance(joint, tuple)
    named = frozenset(joint)
    unknown = sorted(named - set(able) - set(inside))
    if unknown:
        msg = (
            f"`joint` names {unknown}, which cannot be in a joint Gaussian with the GP sites. Those that can are "
            f"{sorted([*able, *inside])}: continuous latents that no kernel depends on."
        )
        raise ValueError(msg)
    for term, found in terms.items():
        beside = sorted(found.intersection(gps) - named)
        if beside and found & named:
            msg = f"`joint` leaves out {beside}, on which the term {term[5:]!r} depends too. Name all of its GP sites."
            raise ValueError(msg)
    return named


def _warn_of_families(
    terms: Mapping[str, frozenset[str]],
    unable: list[str],
    inside: list[str],
    family: Callable[[str], AbstractPosteriorFamily],
) -> None:
    for name in unable:
        found = sorted({latent for term in terms.values() if name in term for latent in term.intersection(inside)})
        if found:
            msg = (
                f"The posterior of the GP site {name!r}, {type(family(name)).__name__}, takes it to be independent "
                f"of {found}, which meet it in terms of the model: the intervals of both are too narrow. Use tied "
                "sites or natural parameters, or pass `joint=False` if this is meant."
            )
            warnings.warn(msg, UserWarning, stacklevel=2)


def _too_many(group: Group, size: int) -> str:
    return (
        f"The latents {list(group.latents)} have {size} numbers, too many for a joint Gaussian with the GP sites "
        f"{list(group.sites)}: the posterior takes them to be independent of these, and its intervals are too narrow. "
        "Name the members that matter most with `joint=(...)`."
    )


def _components(
    terms: Mapping[str, frozenset[str]], able: list[str], inside: list[str]
) -> Iterator[tuple[list[str], set[str]]]:
    """GP sites that share terms, directly or through others and through latents, and the latents in these terms."""
    left = [set(found) & {*able, *inside} for found in terms.values() if found & set(able)]
    while left:
        component = left.pop(0)
        while touching := [one for one in left if one & component]:
            component = component.union(*touching)
            left = [one for one in left if one not in touching]
        yield [name for name in able if name in component], component & set(inside)


def _group(
    program: Program,
    depends: Mapping[str, frozenset[str]],
    sites: list[str],
    found: set[str],
    inside: list[str],
    latents: list[str],
) -> Group:
    """Adds the latents that the prior means of others are made of, as the mean of group effects."""
    while True:
        parents = {
            parent
            for name in found
            for parent in (depends[f"prior {name}"] & set(inside)) - found
            if _is_gaussian(program, name, [name, parent]) and _is_gaussian(program, parent, [name, parent])
        }
        if not parents:
            break
        found = found | parents
    names = [name for name in latents if name in found]
    gaussian = [name for name in names if _is_gaussian(program, name, names)]
    while closed := [name for name in gaussian if (depends[f"prior {name}"] & found) - set(gaussian)]:
        gaussian = [name for name in gaussian if name not in closed]
    scaled = _scaled(program, names, gaussian)
    left = {scale for _, scale in scaled}
    names, gaussian = ([name for name in each if name not in left] for each in (names, gaussian))
    return Group(tuple(sites), tuple(names), tuple(gaussian), scaled)


def _scaled(program: Program, names: list[str], gaussian: list[str]) -> tuple[tuple[str, str], ...]:
    """The Gaussian latents that all terms know times another one only, where no term knows that one otherwise."""
    terms = [output for output in program.outputs if output.startswith("term ")]
    values = {program.origin(program.outputs[f"value {name}"]): name for name in names}
    found = {}
    for name in gaussian:
        factor, products = program.factor(name, terms)
        if factor in values and values[factor] != name:
            found[name] = values[factor], products
    known = program.depends_given({number: frozenset({name}) for name, each in found.items() for number in each[1]})
    seen = frozenset().union(*(known[term] for term in terms)) | frozenset(
        parent for name in names for parent in program.depends[program.outputs[f"prior {name}"]] - {name}
    )
    return tuple((name, scale) for name, (scale, _) in found.items() if scale not in seen)


def _is_gaussian(program: Program, name: str, variable: list[str]) -> bool:
    """Whether the prior of a latent is Gaussian with a mean that is affine in some latents, and a fixed covariance."""
    if f"loc {name}" not in program.outputs:
        return False
    if program.depends[program.outputs[f"scale {name}"]] & set(variable):
        return False
    return program.is_affine(f"loc {name}", variable)


# The joint Gaussian in a run of the guide.


class JointRun:
    """A joint Gaussian in one run of the guide, given the hyperparameters.

    Attributes:
        group: its members.
        gaussian: q(z).
        transforms: from unconstrained values, by latent.
        rows: the GP sites at the model's inputs, by site.
        latents: sites of the guide for the latents, at a draw.
    """

    def __init__(
        self,
        group: Group,
        trace: Trace,
        model: Callable[[], Any],
        family: Callable[[str], AbstractPosteriorFamily],
        prefix: str,
        predicting: bool,
    ) -> None:
        self.group = group
        self.transforms = transforms_of(trace, group.latents)
        # From the product with its scale back to the latent.
        for name, scale in group.scaled:
            self.transforms[name] = AffineTransform(0.0, 1.0 / jnp.reshape(trace[scale]["value"], ()))
        shapes = {name: jnp.shape(self.transforms[name].inv(trace[name]["value"])) for name in group.latents}
        ends = np.cumsum([0, *(int(np.prod(shape, dtype=int)) for shape in shapes.values())])
        spans = zip(shapes.items(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        self._places = {name: (start, stop, shape) for (name, shape), start, stop in spans}
        self.rows: dict[str, Rows] = {}
        priors: dict[str, Any] = {name: unwrap(trace[name]["fn"]) for name in group.sites}
        inducing, Kuu, moves = {}, {}, False
        for name, prior in priors.items():
            own: Any = family(name)
            param = SiteParameters(name, prefix, predicting)
            try:
                inducing[name] = inducing_param(param, own.inducing, prior, own.learn_inducing)
                refuse_growing(inducing[name], "a joint posterior")
            except (TypeError, ValueError) as error:
                error.add_note(f"This was at the GP site {name!r}.")
                raise
            Kuu[name] = with_jitter(inducing[name].Kuu(prior.kernel), prior.relative_jitter)
            moves |= own.learn_inducing
        self.dtype = priors[group.sites[0]].X.dtype
        projected = family(group.sites[0]).joins == "projected"
        offset, root = self._prior_of_latents(model, trace)
        batch_shapes = {name: trace[name]["fn"].batch_shape for name in group.sites}
        K, spans = stacked(Kuu, batch_shapes, root)

        def start(rng_key: Array) -> JointSites:
            reference: Any = own_copy(inducing) if moves and projected else None
            zeros = JointSites.zeros((), K.shape[0], K.dtype, reference)
            return self._start(zeros, self._initial(trace, offset, rng_key) - offset, K, projected)

        param = SiteParameters(group.sites[0], prefix, predicting)
        value = param("joint_sites", start)
        self.is_initial = bool(param.initial)
        references, Kuv = value_of(value).reference, None
        if references is not None:
            shared = {
                name: shared_covariance(inducing[name], references[name], prior.kernel, prior.relative_jitter)
                for name, prior in priors.items()
            }
            Kuv, _ = stacked(shared, batch_shapes, root)
        self.gaussian = JointGaussian(value, K, Kuv, inducing, offset, root, spans, projected)
        self.L, self.mean, self.S_sqrt = self.gaussian.whitened()
        self.noise = jax.random.normal(cast(Array, numpyro.prng_key()), self.mean.shape, self.mean.dtype)
        self.v = self.mean + matvec(self.S_sqrt, self.noise)
        self.latents = self._latents_at(model, trace)

    def _prior_of_latents(self, model: Callable[[], Any], trace: Trace) -> tuple[Array, Array]:
        """Prior mean of w and a root of its covariance, given the hyperparameters."""
        P = self.num_latents
        own = [np.arange(*self._places[name][:2]) for name in self.group.gaussian]
        index = np.concatenate(own) if own else np.zeros(0, int)
        other = np.setdiff1d(np.arange(P), index)
        offset, root = jnp.zeros(P, self.dtype), jnp.zeros((P, P), self.dtype)
        root = root.at[other, other].set(_REFERENCE_SCALE)
        if not own:
            return offset, root
        transforms = {name: self.transforms[name] for name in self.group.gaussian}

        def density(w: Array) -> Array:
            values = self.unflattened(jnp.zeros(P, self.dtype).at[index].set(w))
            found = again(model, trace, {name: transforms[name](values[name]) for name in transforms})
            unscaled = {name: {**found[name], "scale": None} for name in transforms}
            return jnp.asarray(sum(jnp.sum(each) for each in log_densities(unscaled, transforms, values).values()))

        start = jnp.zeros(len(index), self.dtype)
        b, R = gaussian_prior(-jax.hessian(density)(start), jax.grad(density)(start))
        return offset.at[index].set(b), root.at[np.ix_(index, index)].set(R)

    def _initial(self, trace: Trace, offset: Array, rng_key: Array) -> Array:
        """Where w starts: at its prior mean, or the median of draws from a prior that is not Gaussian."""
        w = offset
        for number, (name, (start, stop, _)) in enumerate(self._places.items()):
            if name not in self.group.gaussian:
                draws = trace[name]["fn"].sample(jax.random.fold_in(rng_key, number), (15,))
                w = w.at[start:stop].set(self.transforms[name].inv(jnp.median(draws, axis=0)).ravel())
        return w

    def _start(self, zeros: JointSites, w: Array, K: Array, projected: bool) -> JointSites:
        """Sites at which w is known to a tenth, and f is at its prior."""
        P = self.num_latents
        precision = jnp.eye(P, dtype=K.dtype) / _INITIAL_SCALE**2
        linear = w / _INITIAL_SCALE**2
        if not projected and P:
            L = cholesky(K[-P:, -P:])
            precision, linear = matmul(L.T, L) / _INITIAL_SCALE**2, matvec(L.T, linear)
        first = K.shape[0] - P
        return dataclasses.replace(
            zeros,
            lambda1=zeros.lambda1.at[first:].set(linear),
            Lambda2=zeros.Lambda2.at[first:, first:].set(precision),
        )

    @property
    def num_latents(self) -> int:
        """How many numbers the latents have."""
        return max((stop for _, stop, _ in self._places.values()), default=0)

    def places(self, names: Collection[str]) -> np.ndarray:
        """Where the numbers of some latents are in w."""
        found = [np.arange(*self._places[name][:2]) for name in self.group.latents if name in names]
        return np.concatenate(found) if found else np.zeros(0, int)

    def unflattened(self, w: Array) -> dict[str, Array]:
        """Unconstrained values by latent, of (..., P)."""
        return {
            name: w[..., start:stop].reshape(*w.shape[:-1], *shape)
            for name, (start, stop, shape) in self._places.items()
        }

    def values(self, w: Array) -> dict[str, Array]:
        """Values of the latents."""
        return {name: self.transforms[name](each) for name, each in self.unflattened(w).items()}

    def marginals(self) -> tuple[Array, Array]:
        """Means and standard deviations of w, (P,)."""
        P = self.num_latents
        first = self.mean.shape[0] - P
        # The last block of K stands alone: the rows of L for w have no other entries.
        L = self.L[first:, first:]
        root = matmul(L, self.S_sqrt[first:])
        mean = self.gaussian.offset + matvec(L, self.mean[first:])
        return mean, jnp.sqrt(jnp.sum(root * root, axis=-1))

    def _latents_at(self, model: Callable[[], Any], trace: Trace) -> dict[str, dict[str, Any]]:
        """The latents at the draw v, with the density that q(z) leaves to them.

        KL(q(z) ‖ p(u) r(w)) is the divergence of the joint posterior, r being N(b, B). What a loss adds for a latent is
        log p(w) − log r(w): nothing where the prior is Gaussian.
        """
        if not self.group.latents:
            return {}
        first = self.mean.shape[0] - self.num_latents
        w = self.gaussian.offset + matvec(self.L[first:, first:], self.v[first:])
        unconstrained, values = self.unflattened(w), self.values(w)
        found, sites = again(model, trace, values), {}
        for name, value in values.items():
            fn = trace[name]["fn"]
            density = jnp.asarray(found[name]["fn"].log_prob(value))
            if name not in self.group.gaussian:
                log_det = self.transforms[name].log_abs_det_jacobian(unconstrained[name], value)
                own = reference_density(unconstrained[name])
                density = _summed(own, len(fn.batch_shape)) - _summed(log_det, len(fn.batch_shape))
            sites[name] = {
                "type": "sample",
                "name": name,
                "fn": dist.Delta(value, density, event_dim=len(fn.event_shape)),
                "value": value,
                "is_observed": False,
                "intermediates": [],
            }
        return sites

    def posterior(self, site: str, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> SparsePosterior:
        """q(f(X)) of a GP site, whatever the other members are."""
        start, C, M = self.gaussian.spans[site]
        N = prior.event_shape[0]
        Kuf = jnp.broadcast_to(self.gaussian.inducing[site].Kuf(prior.kernel, prior.X), (*batch_shape, M, N))
        kff = jnp.broadcast_to(prior.kernel(prior.X), (*batch_shape, N))
        rows = self.rows[site] = Rows(Kuf.reshape(C, M, N), kff.reshape(C, N))
        found, kl = self.gaussian.posterior(self.gaussian.of_site(site, rows), rows.kff.ravel())
        own = slice(start, start + C * M)
        A = self._of_each(found.A[own].reshape(C, M, C, N)).reshape(*batch_shape, M, N)
        T = jnp.moveaxis(found.T.reshape(-1, C, N), 0, -2).reshape(*batch_shape, -1, N)
        share = self._share(site, batch_shape)
        shape = (*batch_shape, N)
        q = SparsePosterior(
            prior, Moments(found.mean.reshape(shape), found.variance.reshape(shape), kl * share, A, T), batch_shape
        )
        L = self._of_each(self.L[own, own].reshape(C, M, C, M)).reshape(*batch_shape, M, M)
        inducing = self.gaussian.inducing[site]
        q.joint_run = self
        m, v = (each[own].reshape(*batch_shape, M) for each in (self.mean, self.v))
        root = self.S_sqrt[own].reshape(*batch_shape, M, -1)
        q.gaussian = InducingGaussian(inducing, L, m, root)
        q.drawn = InducingGaussian(inducing, L, v, jnp.zeros_like(L))
        return q

    def draw(self, q: SparsePosterior, rng_key: Array, *, joint: bool) -> Array:
        """f(X) given the draw of z: row by row, or jointly in O(N³)."""
        given = self.given(self.group.sites[0], q)
        return SparsePosterior(q.prior, given.moments, q.batch_shape, joint=joint).sample(rng_key)

    def log_ratio(self, site: str, batch_shape: tuple[int, ...]) -> Array:
        """The log ratio log q(z) − log p(u) − log r(w) at the draw, with the first site for all members, (...)."""
        # v = L⁻¹z
        ratio = 0.5 * jnp.sum(self.v**2 - self.noise**2) - jnp.linalg.slogdet(self.S_sqrt)[1]
        return ratio * self._share(site, batch_shape)

    def _share(self, site: str, batch_shape: tuple[int, ...]) -> np.ndarray:
        """What is of all members counts once: 1 for the first latent of the first site, else 0."""
        share = np.zeros(batch_shape, dtype=self.dtype)
        share[(0,) * len(batch_shape)] = float(site == self.group.sites[0])
        return share

    def given(self, site: str, q: SparsePosterior) -> SparsePosterior:
        """The process given the draw of z, with the log ratio of that in the place of the divergence."""
        A, ratio = q.moments.prior_root, self.log_ratio(site, q.batch_shape)
        mean = matvec_transposed(A, q.drawn.m)
        return SparsePosterior(
            q.prior, moments(mean, q.prior.kernel(q.prior.X), A, None, ratio), q.batch_shape, joint=False
        )

    def given_latents(self, site: str, q: SparsePosterior) -> SparsePosterior:
        """q(f) of a single GP given the draw of the latents."""
        start, C, M = self.gaussian.spans[site]
        assert C == 1
        P = self.num_latents
        if not P:
            return SparsePosterior(q.prior, q.moments, q.batch_shape, joint=False)
        u, w = self.S_sqrt[start : start + M], self.S_sqrt[-P:]
        root = cholesky(matmul(w, w.T))
        gain = solve_lower(root, matmul(w, u.T))
        moved = solve_lower(root, (self.v[-P:] - self.mean[-P:])[:, None])[:, 0]
        S = cholesky(matmul(u, u.T) - matmul(gain.T, gain), 10.0 * float(jnp.finfo(u.dtype).eps))
        m = self.mean[start : start + M] + matvec(gain.T, moved)
        A = q.moments.prior_root
        T = matmul(S.T, A)
        given = moments(matvec_transposed(A, m), q.prior.kernel(q.prior.X), A, T, q.kl)
        return SparsePosterior(q.prior, given, q.batch_shape, joint=False)

    @staticmethod
    def _of_each(x: Array) -> Array:
        """The blocks of a latent with itself, (C, M, N) of (C, M, C, N)."""
        index = np.arange(x.shape[0])
        return x[index, :, index]


def reference_density(w: Array) -> Array:
    """Log r of latents whose prior is not Gaussian, entry by entry."""
    return dist.Normal(0.0, _REFERENCE_SCALE).log_prob(w)


def expected_reference(mean: Array, variance: Array) -> Array:
    """E[log r(w)] under a Gaussian, summed over its entries."""
    return jnp.sum(reference_density(mean) - 0.5 * variance / _REFERENCE_SCALE**2)


def _summed(x: Array, batch_ndim: int) -> Array:
    return sum_rightmost(x, max(jnp.ndim(x) - batch_ndim, 0))
