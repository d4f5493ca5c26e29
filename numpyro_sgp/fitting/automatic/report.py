"""What `fit` returns for a model: the guide, its parameters, and a report of what was done."""

from collections.abc import Callable, Mapping
import dataclasses
import importlib.util
from typing import Any, NamedTuple, cast

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.infer import SVI

from numpyro_sgp.diagnostics.importance import psis_khat
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_regression import SparseGPRegression
from numpyro_sgp.distributions.traces import Trace
from numpyro_sgp.distributions.wrappers import unwrap
from numpyro_sgp.fitting.automatic.needs import inducing_of
from numpyro_sgp.guides.guide import AbstractAutoSparseGP
from numpyro_sgp.losses.tight import gaussian_of
from numpyro_sgp.posteriors.dual.guide import AutoTSVGP
from numpyro_sgp.posteriors.markov.guide import AutoMarkovGP

__all__ = ["Evidence", "FitReport", "FitResult", "evidence_of", "khat_of"]

# An upper bound reads the whole covariance matrix, this many numbers of it for a second or two.
_MOST_ENTRIES = 4e8
_ITERATIONS = 10
# Draws for the Pareto k, each of at most so many operations N M²: ten seconds for all of them.
_DRAWS, _MOST_OPERATIONS = 500, 5e7
# Above this the importance ratios have no mean that draws can find.
_GOOD_KHAT = 0.7


class Evidence(NamedTuple):
    """Bounds of the log evidence of a regression, in nats, at the medians of its hyperparameters; equal if exact."""

    lower: float
    upper: float


@dataclasses.dataclass(frozen=True)
class FitReport:
    """What `fit` did with a model; `print` shows it.

    Attributes:
        num_rows: N.
        method: how the bound was maximised.
        num_inducing: M, by GP site; none of one whose posterior is dense or smoothed.
        unexplained: by GP site, the share of the prior variance at the data that the inducing inputs leave.
        enough: whether that is as little as was wanted; if not, more inducing inputs would help.
        converged: whether training ended because the bound no longer rose.
        evidence: bounds of the log evidence, of a regression with one GP and Gaussian noise.
        khat: the Pareto k̂ of other models (`diagnostics.psis_khat`): below 0.7 the posterior is close to the best one.
            None without ArviZ, of more than a few hundred rows, and where the bound needs random numbers.
        joint: GP sites and latents that have one joint posterior, for each such group.
        laplace: latents with a Laplace approximation, moved from the mode to the mean.
        independent: latents with independent Gaussians, which steps have trained.
        seconds: wall time.
    """

    num_rows: int
    method: str
    num_inducing: dict[str, int]
    unexplained: dict[str, float]
    enough: bool
    converged: bool
    evidence: Evidence | None
    khat: float | None
    joint: tuple[tuple[str, ...], ...]
    laplace: tuple[str, ...]
    independent: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.num_rows} rows, {self.method}, {self.seconds:.1f} s"]
        lines += [
            f"{site}: {M} inducing inputs leave {100.0 * self.unexplained[site]:.2g} % of the prior variance"
            for site, M in self.num_inducing.items()
        ]
        if not self.enough:
            lines[-1] += "; more of them (`num_inducing`) would explain more"
        if self.evidence is not None:
            lower, upper = self.evidence
            bounds = f"between {lower:.6g} and {upper:.6g}: at most {(upper - lower) / self.num_rows:.2g} nats a row"
            lines.append(f"log evidence {bounds} are lost" if lower < upper else f"log evidence {lower:.6g}, exact")
        if self.khat is not None:
            is_close = "close" if self.khat < _GOOD_KHAT else "not close"
            lines.append(f"Pareto k {self.khat:.2f}: {is_close} to the posterior")
        lines += [f"joint posterior of {', '.join(names)}" for names in self.joint]
        if self.laplace:
            lines.append(f"Laplace approximation of {', '.join(self.laplace)}")
        if self.independent:
            lines.append(f"independent Gaussians for {', '.join(self.independent)}")
        lines.append("converged" if self.converged else "stopped before the bound had settled")
        return "\n".join(lines)


class FitResult(NamedTuple):
    """A fitted model.

    Attributes:
        guide: the guide that was chosen.
        params: its constrained parameters.
        state: the last `SVIState`, from which `fit(result.svi, ..., init_state=result.state)` goes on.
        losses: those of the last run of training; with L-BFGS the last one.
        svi: model, guide, optimizer and loss.
        report: what was done.
    """

    guide: AutoTSVGP | AutoMarkovGP
    params: dict[str, Any]
    state: Any
    losses: Array
    svi: SVI
    report: FitReport


def evidence_of(
    model: Callable,
    values: Mapping[str, Any],
    site: str,
    prior: GaussianProcess,
    inducing: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
) -> Evidence | None:
    """Bounds of the log evidence at given values of the other latents; None for a model that is no such regression.

    Args:
        model: a model.
        values: of all latents and parameters but the GP site.
        site: the GP site.
        prior: its distribution.
        inducing: its inducing variables; None for the exact evidence.
        args: arguments of the model, with all rows.
        kwargs: keyword arguments of the model.
    """
    N = prior.event_shape[0]
    if prior.batch_shape or N**2 > _MOST_ENTRIES:
        return None

    def run(f: Array) -> Trace:
        given = handlers.substitute(handlers.seed(model, jax.random.key(0)), data={**values, site: f})
        return handlers.trace(given).get_trace(*args, **kwargs)

    zero = jnp.zeros(N, prior.X.dtype)
    other = jax.random.normal(jax.random.key(0), (N,), zero.dtype)
    first, second = run(zero), run(other)
    observed = [name for name, found in first.items() if found["type"] == "sample" and found["is_observed"]]
    if len(observed) != 1 or not isinstance(unwrap(first[observed[0]]["fn"]), dist.Normal):
        return None
    at_zero, at_other = (gaussian_of(trace, observed[0]) for trace in (first, second))
    if at_zero is None or at_other is None or at_zero.loc.shape != (N,):
        return None
    same = np.allclose(at_other.loc - at_zero.loc, other, rtol=1e-4, atol=1e-4)
    if not (
        same and np.array_equal(at_zero.scale, at_other.scale) and bool(jnp.all(at_zero.weight * at_zero.rows == 1.0))
    ):
        return None
    mean = prior.prior_mean + at_zero.loc

    @jax.jit
    def bounds(kernel: Any, X: Any, inducing: Any, scale: Array, mean: Array, y: Array) -> tuple[Array, Array]:
        if inducing is None:
            dense = dist.MultivariateNormal(mean, kernel(X, X) + jnp.diag(jnp.broadcast_to(scale, y.shape) ** 2))
            return (dense.log_prob(y),) * 2
        regression = SparseGPRegression(kernel, X, inducing, scale, mean, jitter=prior.jitter)
        return regression.log_prob(y), regression.upper_bound(y, num_iterations=_ITERATIONS)

    y = jnp.asarray(first[observed[0]]["value"])
    lower, upper = bounds(prior.kernel, prior.X, inducing, at_zero.scale, mean, y)
    return Evidence(float(lower), float(upper))


def khat_of(
    rng_key: Array,
    svi: SVI,
    params: Mapping[str, Any],
    values: Mapping[str, Any],
    priors: Mapping[str, GaussianProcess],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> float | None:
    """The Pareto k̂ of a posterior; None without ArviZ, and where its draws take too long.

    Args:
        rng_key: a key.
        svi: model and guide.
        params: those of the guide, and mutable state.
        values: of all latents, for their sizes.
        priors: of the GP sites.
        args: arguments of the model, with all rows.
        kwargs: keyword arguments of the model.
    """
    guide = cast(AbstractAutoSparseGP, svi.guide)
    found = inducing_of(guide, params)
    sizes = {
        site: np.prod(prior.batch_shape) * (found[site].num_inducing if site in found else prior.event_shape[0])
        for site, prior in priors.items()
    }
    effects = sum(np.size(values[name]) for group in guide.joint_groups(params) for name in group.latents)
    N = max(prior.event_shape[0] for prior in priors.values())
    if N * (sum(sizes.values()) + effects) ** 2 > _MOST_OPERATIONS or importlib.util.find_spec("arviz") is None:
        return None
    return psis_khat(rng_key, svi, params, *args, num_samples=_DRAWS, **kwargs)
