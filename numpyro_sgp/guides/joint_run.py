"""The latents of a joint Gaussian with GP sites, in one run of the guide.

`guides/members.py` says which they are, and the subclasses what q(z) of them and the GP sites is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import numpyro
from numpyro import distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import AffineTransform, Transform

from numpyro_sgp._internal.eager import as_one_program
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.distributions.traces import Trace
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.guides.group import Group
from numpyro_sgp.guides.model_runs import again, log_densities, summed, transforms_of
from numpyro_sgp.math.linalg import cholesky, solve_lower
from numpyro_sgp.math.products import matmul, matvec, matvec_transposed
from numpyro_sgp.posteriors.joint.formulas import gaussian_prior
from numpyro_sgp.posteriors.joint.predictors import Rows, prior_covariance
from numpyro_sgp.posteriors.perturbation import Perturbed
from numpyro_sgp.posteriors.sites import JointSites

__all__ = ["INITIAL_SCALE", "AbstractJointRun", "Prior", "expected_reference", "reference_density"]

# The standard deviation that a latent starts with, as in NumPyro's `AutoNormal`.
INITIAL_SCALE = 0.1
# The reference in the place of a prior that is not Gaussian in the unconstrained latent.
_REFERENCE_SCALE = 3.0


class Prior(NamedTuple):
    """Of a GP site at the model's inputs.

    Attributes:
        kernel: its kernel.
        X: inputs (N, D), or functionals.
        batch_shape: one latent for each entry.
    """

    kernel: Callable
    X: Any
    batch_shape: tuple[int, ...]


class Unmixed(Transform):
    """L⁻¹x along an axis of x.

    Args:
        L: lower triangular, (K, K).
        axis: counted from the end.
    """

    domain = codomain = constraints.real  # pyright: ignore[reportAssignmentType]

    def __init__(self, L: Array, axis: int) -> None:
        self.L, self.axis = L, axis

    def __call__(self, x: Array) -> Array:
        return self._along(lambda rows: solve_lower(self.L, rows), x)

    def _inverse(self, y: Array) -> Array:
        return self._along(lambda rows: matmul(self.L, rows), y)

    def _along(self, fn: Callable[[Array], Array], x: Array) -> Array:
        moved = jnp.moveaxis(x, self.axis, 0)
        return jnp.moveaxis(fn(moved.reshape(moved.shape[0], -1)).reshape(moved.shape), 0, self.axis)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        del y, intermediates
        return jnp.broadcast_to(-jnp.mean(jnp.log(jnp.diagonal(self.L))), jnp.shape(x))  # each entry has its share


class AbstractJointRun(ABC):
    """A joint Gaussian in one run of the guide, given the hyperparameters.

    Args:
        group: its members.
        trace: a run of the model.
        model: with its arguments given.

    Attributes:
        group: its members.
        gaussian: q(z).
        transforms: from unconstrained values, by latent.
        rows: the GP sites at the model's inputs, by site.
        priors: of these.
        latents: sites of the guide for the latents, at a draw.
        effects: the effects of groups about their prior means, in their units, at the draw, (G,); or None.
    """

    gaussian: Any
    latents: dict[str, dict[str, Any]]

    def __init__(self, group: Group, trace: Trace, model: Callable[[], Any]) -> None:
        self.group = group
        self.transforms = transforms_of(trace, group.latents)
        # From the product with its scales back to the latent.
        for name, (scales, axis) in group.scaled:
            factors = [jnp.reshape(trace[each.name]["value"], each.shape) ** each.power for each in scales]
            product = functools.reduce(jnp.multiply, factors)
            self.transforms[name] = AffineTransform(0.0, 1.0 / product) if axis is None else Unmixed(product, axis)
        shapes = {name: jnp.shape(self.transforms[name].inv(trace[name]["value"])) for name in group.dense}
        ends = np.cumsum([0, *(int(np.prod(shape, dtype=int)) for shape in shapes.values())])
        spans = zip(shapes.items(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        self._places = {name: (start, stop, shape) for (name, shape), start, stop in spans}
        self.rows: dict[str, Rows] = {}
        self.priors: dict[str, Prior] = {}
        self._covariances: dict[str, Array] = {}
        self.dtype = cast(Any, unwrap(trace[group.sites[0]]["fn"])).X.dtype
        self.prior_mean, self.prior_root = self._prior_of_latents(model, trace)
        self._at = lambda values: again(model, trace, values)
        self.effect_shape, self.effects = (), None

    @abstractmethod
    def posterior(self, site: str, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> SparsePosterior:
        """q(f(X)) of a GP site, whatever the other members are.

        Where its prior mean is not linear in latents, the moments are those of its linearisation at the mean of these.
        """

    @abstractmethod
    def draw(self, site: str, q: SparsePosterior, rng_key: Array, *, joint: bool) -> Array:
        """f(X) given the draw of z: row by row, or jointly, as a term that depends on several rows needs."""

    @abstractmethod
    def log_ratio(self, site: str, batch_shape: tuple[int, ...]) -> Array:
        """The log ratio log q − log p of all members at the draw, with the first site, (...)."""

    @abstractmethod
    def given(self, site: str, q: SparsePosterior) -> SparsePosterior:
        """The process given the draw, with the log ratio of that in the place of the divergence."""

    def _prior_mean(self, site: str, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> tuple[Array, Array]:
        """The prior mean of a site at E[w] less that at the draw, (..., N), and its slopes in L⁻¹w, (P, ..., N)."""
        P = self.num_latents
        first = self.mean.shape[0] - P
        L = self.L[first:, first:]

        def at(v: Array) -> Array:
            w = self.unflattened(self.gaussian.offset + matvec(L, v))
            found = self._at({name: self.transforms[name](value) for name, value in w.items()})
            prior: Any = unwrap(found[site]["fn"])
            return prior.prior_mean_of(batch_shape)

        mean, push = jax.linearize(at, self.mean[first:])
        return mean - prior.prior_mean, jax.vmap(push)(jnp.eye(P, dtype=self.dtype))

    def check_loss(self) -> None:
        """Raise where a natural step is asked for and the terms are at draws, which do not move with what it asks."""
        if isinstance(self.gaussian.value, Perturbed):
            names = sorted((*self.group.sites, *self.group.latents))
            msg = (
                f"A natural step was asked for on the joint posterior of {names}, with a loss that sees draws of it. "
                "They do not move with what the step asks. Use the loss `numpyro_sgp.QuadratureELBO()`, or pass "
                "`joint=False` to the guide."
            )
            raise TypeError(msg)

    def _draw_latents(self) -> None:
        """A draw v of L⁻¹z."""
        self.L, self.mean, self.S_sqrt = self.gaussian.whitened()
        self.noise = jax.random.normal(cast(Array, numpyro.prng_key()), self.mean.shape, self.mean.dtype)
        self.v = self.mean + matvec(self.S_sqrt, self.noise)

    def _prior_of_latents(self, model: Callable[[], Any], trace: Trace) -> tuple[Array, Array]:
        """Prior mean of w and a root of its covariance, given the hyperparameters."""
        P = self.num_latents
        gaussian = [name for name in self.group.gaussian if name != self.group.effects]
        own = [np.arange(*self._places[name][:2]) for name in gaussian]
        index = np.concatenate(own) if own else np.zeros(0, int)
        other = np.setdiff1d(np.arange(P), index)
        offset, root = jnp.zeros(P, self.dtype), jnp.zeros((P, P), self.dtype)
        root = root.at[other, other].set(_REFERENCE_SCALE)
        if not own:
            return offset, root
        transforms = {name: self.transforms[name] for name in gaussian}

        def density(w: Array) -> Array:
            values = self.unflattened(jnp.zeros(P, self.dtype).at[index].set(w))
            found = again(model, trace, {name: transforms[name](values[name]) for name in transforms})
            unscaled = {name: {**found[name], "scale": None} for name in transforms}
            return jnp.asarray(sum(jnp.sum(each) for each in log_densities(unscaled, transforms, values).values()))

        def solved(start: Array) -> tuple[Array, Array]:
            return gaussian_prior(-jax.hessian(density)(start), jax.grad(density)(start))

        b, R = as_one_program(solved)(jnp.zeros(len(index), self.dtype))
        return offset.at[index].set(b), root.at[np.ix_(index, index)].set(R)

    def _initial(self, trace: Trace, offset: Array, rng_key: Array) -> Array:
        """Where w starts: at its prior mean, the median of draws if not Gaussian, or zero if there are no draws."""
        w = offset
        for number, name in enumerate(self.group.latents):
            if name not in self.group.gaussian and not isinstance(unwrap(trace[name]["fn"]), dist.ImproperUniform):
                start, stop, _ = self._places[name]
                draws = trace[name]["fn"].sample(jax.random.fold_in(rng_key, number), (15,))
                w = w.at[start:stop].set(self.transforms[name].inv(jnp.median(draws, axis=0)).ravel())
        return w

    def _start(self, zeros: JointSites, w: Array, K: Array, *, projected: bool) -> JointSites:
        """Sites at which w is known to a tenth, and f is at its prior."""
        P = self.num_latents
        precision = jnp.eye(P, dtype=K.dtype) / INITIAL_SCALE**2
        linear = w / INITIAL_SCALE**2
        if not projected and P:
            L = cholesky(K[-P:, -P:])
            precision, linear = matmul(L.T, L) / INITIAL_SCALE**2, matvec(L.T, linear)
        first = K.shape[0] - P
        return dataclasses.replace(
            zeros,
            lambda1=zeros.lambda1.at[first:].set(linear),
            Lambda2=zeros.Lambda2.at[first:, first:].set(precision),
        )

    @property
    def num_latents(self) -> int:
        """P, how many numbers the latents have without the effects of groups."""
        return max((stop for _, stop, _ in self._places.values()), default=0)

    def places(self, names: Collection[str]) -> np.ndarray:
        """Where the numbers of some latents are in w."""
        found = [np.arange(*self._places[name][:2]) for name in self.group.dense if name in names]
        return np.concatenate(found) if found else np.zeros(0, int)

    def unflattened(self, w: Array) -> dict[str, Array]:
        """Unconstrained values by latent, of (..., P)."""
        return {
            name: w[..., start:stop].reshape(*w.shape[:-1], *shape)
            for name, (start, stop, shape) in self._places.items()
        }

    def prior_mean_of_effects(self, w: Mapping[str, Array]) -> Array:
        """The prior mean of the effects of groups, unconstrained, given the other members."""
        assert self.group.effects is not None
        found = self._at({name: self.transforms[name](value) for name, value in w.items()})
        loc = self.transforms[self.group.effects].inv(cast(Any, unwrap(found[self.group.effects]["fn"])).loc)
        return jnp.broadcast_to(loc, self.effect_shape).astype(self.dtype)

    def values(self, w: Mapping[str, Array], effects: Array | None = None) -> dict[str, Array]:
        """Values of the latents.

        Args:
            w: unconstrained values of those whose block is dense.
            effects: the effects of groups about their prior means, in their units; None where there are none.
        """
        if self.group.effects is not None:
            assert effects is not None
            deviation = (effects.ravel() * self.gaussian.effect_unit).reshape(self.effect_shape)
            w = {**w, self.group.effects: self.prior_mean_of_effects(w) + deviation}
        return {name: self.transforms[name](w[name]) for name in self.group.latents}

    def quantiles(self, z: ArrayLike) -> dict[str, Array]:
        """Values of the latents z standard deviations above the mean, where they are unconstrained."""
        P = self.num_latents
        first = self.mean.shape[0] - P
        # The last block of K stands alone: the rows of L for w have no other entries.
        L = self.L[first:, first:]
        root = matmul(L, self.S_sqrt[first:])
        mean = self.gaussian.offset + matvec(L, self.mean[first:])
        found = self.unflattened(mean + z * jnp.sqrt(jnp.sum(root * root, axis=-1)))
        if self.group.effects is not None:
            start = self.prior_mean_of_effects(self.unflattened(mean)).ravel()
            intercept, slope, precision = self.gaussian.effects_given(self.L)
            slope_w = jax.jacobian(lambda w: self.prior_mean_of_effects(self.unflattened(w)).ravel())(mean)
            unit = self.gaussian.effect_unit
            turned = matmul(self.S_sqrt.T, (-slope * unit).at[first:].add(matmul(slope_w, L).T))
            deviation = jnp.sqrt(unit**2 / precision + jnp.sum(turned * turned, axis=0))
            effects = start + unit * (intercept - matvec_transposed(slope, self.mean)) + z * deviation
            found[self.group.effects] = effects.reshape(*effects.shape[:-1], *self.effect_shape)
        result = {name: self.transforms[name](each) for name, each in found.items()}
        for name, transform in self.transforms.items():
            if isinstance(transform, Unmixed):  # linear in several numbers
                start, stop, shape = self._places[name]
                columns = jax.vmap(transform, in_axes=-1, out_axes=-1)(root[start:stop].reshape(*shape, -1))
                deviation = jnp.sqrt(jnp.sum(columns * columns, axis=-1)).ravel()
                each = transform(mean[start:stop].reshape(shape)).ravel() + z * deviation
                result[name] = each.reshape(*each.shape[:-1], *shape)
        return result

    def _latents_at(self, model: Callable[[], Any], trace: Trace) -> dict[str, dict[str, Any]]:
        """The latents at the draw v, with the density that q(z) leaves to them.

        KL(q(z) ‖ p(u) r(w)) is the divergence of the joint posterior, r being N(b, B). What a loss adds for a latent is
        log p(w) − log r(w): nothing where the prior is Gaussian.
        """
        if not self.group.latents:
            return {}
        first = self.mean.shape[0] - self.num_latents
        w = self.gaussian.offset + matvec(self.L[first:, first:], self.v[first:])
        unconstrained = self.unflattened(w)
        values = self.values(unconstrained, self.effects)
        found, sites = again(model, trace, values), {}
        for name, value in values.items():
            fn = trace[name]["fn"]
            density = jnp.asarray(found[name]["fn"].log_prob(value))
            if name not in self.group.gaussian:
                log_det = self.transforms[name].log_abs_det_jacobian(unconstrained[name], value)
                own = reference_density(unconstrained[name])
                density = summed(own, len(fn.batch_shape)) - summed(log_det, len(fn.batch_shape))
            sites[name] = {
                "type": "sample",
                "name": name,
                "fn": dist.Delta(value, density, event_dim=len(fn.event_shape)),
                "value": value,
                "is_observed": False,
                "intermediates": [],
            }
        return sites

    def prior_covariance(self, site: str) -> Array:
        """Cov[f(X)] of the prior for each latent of a site, (C, N, N)."""
        if site not in self._covariances:
            self._covariances[site] = prior_covariance(*self.priors[site])
        return self._covariances[site]

    def _share(self, site: str, batch_shape: tuple[int, ...]) -> np.ndarray:
        """What is of all members counts once: 1 for the first latent of the first site, else 0."""
        share = np.zeros(batch_shape, dtype=self.dtype)
        share[(0,) * len(batch_shape)] = float(site == self.group.sites[0])
        return share


def reference_density(w: Array) -> Array:
    """Log r of latents whose prior is not Gaussian, entry by entry."""
    return dist.Normal(0.0, _REFERENCE_SCALE).log_prob(w)


def expected_reference(mean: Array, variance: Array) -> Array:
    """E[log r(w)] under a Gaussian, summed over its entries."""
    return jnp.sum(reference_density(mean) - 0.5 * variance / _REFERENCE_SCALE**2)
