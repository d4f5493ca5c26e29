"""The Laplace approximation at the mode of a bound, moved to the mean by the skewness that the bound has about it."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from numpyro_sgp.fitting.automatic.profile import Profile

__all__ = ["Laplace", "laplace_approximation", "laplace_covariance", "moments_along", "num_evaluations"]

# If the curvature is less, a posterior is flat.
_FLAT = 1e-4
# Deviations of latents, and their opposites, at which a Laplace approximation is held against the bound.
# Some excess is that of sites that do not follow a noise scale, say; its limit is in nats, and for each entry.
_CHECKS, _MOST_EXCESS, _MOST_EXCESS_EACH = 4, 5.0, 3.0
# In standard deviations: how far from the mode the bound says how skewed a posterior is, and how far the mean may be.
# Farther out a density falls at least as one of this precision, where it is one at the mode.
_AT, _FARTHEST, _LEAST_CURVATURE = 2.0, 2.0, 0.25
# A density is higher at its mean than a Gaussian is there, for the mean is on its longer side; or lower by so little.
_MOST_BELOW = 0.1


class Laplace(NamedTuple):
    """An approximation of the posterior of latents, unconstrained.

    Attributes:
        sd: the best standard deviations of independent Gaussians, (D,).
        covariance: of one Gaussian, (D, D). None for a single latent, and where the bound is far lower within it than
            within a Gaussian posterior, or its curvature is not that of a maximum.
        is_gaussian: whether the bound is as high within independent Gaussians as its curvature says.
    """

    sd: np.ndarray
    covariance: np.ndarray | None
    is_gaussian: bool


def num_evaluations(D: int) -> int:
    """How many evaluations of the bound `laplace_approximation` takes of D numbers, but for the few at the mode."""
    return 2 * (2 * D + _CHECKS)


def laplace_approximation(profile: Profile, names: Sequence[str]) -> Laplace:
    """A Gaussian by the curvature of the bound, and by its skewness where there is a covariance, or one number only.

    The profile moves from the mode to the mean.

    Args:
        profile: the bound, at its mode.
        names: of the parameters that hold where the latents are; the entries of the first come first.
    """
    curvature = profile.curvature(names)
    covariance, h = laplace_covariance(curvature), np.diag(curvature)
    # Where the bound is flat, or not at its maximum, half a unit is as good as any.
    sd = np.where(h > _FLAT, 1.0 / np.sqrt(np.maximum(h, _FLAT)), 0.5)
    most = max(_MOST_EXCESS, _MOST_EXCESS_EACH * len(sd))
    is_gaussian = _excess(profile, names, curvature, np.diag(sd)) < most
    # Along a ridge, as that of a factor of f and the variance of f, q(f) does not follow.
    if covariance is not None and not _excess(profile, names, curvature, np.linalg.cholesky(covariance)) < most:
        covariance = None
    if is_gaussian and covariance is not None:
        covariance = _move_to_mean(profile, names, covariance)
    elif is_gaussian and len(sd) == 1:
        sd = np.sqrt(_move_to_mean(profile, names, np.diag(sd**2))[0])
    return Laplace(sd, covariance, is_gaussian)


def laplace_covariance(curvature: np.ndarray) -> np.ndarray | None:
    """Of several latents; None where the curvature is not that of a maximum beyond its rounding."""
    H = 0.5 * (curvature + curvature.T)
    if len(H) < 2 or not np.isfinite(H).all():
        return None
    resolved = max(_FLAT, np.max(np.abs(curvature - curvature.T)))
    return np.linalg.inv(H) if np.linalg.eigvalsh(H)[0] > resolved else None


def _excess(profile: Profile, names: Sequence[str], curvature: np.ndarray, root: np.ndarray) -> float:
    """How much more the bound falls within standard deviations of the latents than its curvature says, in nats.

    The sites stay as they are there. For a Gaussian it is zero: the signs of deviations do not matter.

    Args:
        profile: the bound.
        names: of the parameters.
        curvature: of the bound.
        root: of the covariance of the latents.
    """
    rng = np.random.default_rng(0)
    flat, unravel = ravel_pytree([profile.unconstrained[name] for name in names])
    at_mode, found = profile.value_beside({}), []
    for signs in rng.choice([-1.0, 1.0], (_CHECKS, len(root))):
        x, both = root @ signs, []
        for each in (x, -x):
            moved = unravel(flat + jnp.asarray(each, flat.dtype))
            both.append(profile.value_beside(dict(zip(names, moved, strict=True))))
        found.append(np.mean(both) - at_mode - 0.5 * x @ curvature @ x)
    return float(np.mean(found))


def _move_to_mean(profile: Profile, names: Sequence[str], covariance: np.ndarray) -> np.ndarray:
    """Move latents from the mode to the mean; returns their covariance, which is that at the mode where they stay.

    Along each principal axis of the covariance, the bound and its slope on both sides of the mode say what the
    moments are; INLA has the bound alone (Martins, Simpson, Lindgren and Rue, 2013). Where the slope along another
    axis is the same on both sides, the mean moves along that one, too. That is of first order: where it leads to a
    place of lower density than a Gaussian has there, as with many latents of wide posteriors, it is left out.

    Args:
        profile: the bound.
        names: of the parameters.
        covariance: by the curvature at the mode.
    """
    value, _ = profile.evaluate({})
    at_mode, (flat, unravel) = profile.state, ravel_pytree([profile.unconstrained[name] for name in names])
    variances, axes = np.linalg.eigh(covariance)
    directions = np.sqrt(variances)[:, None] * axes.T
    losses, slopes = profile.on_both_sides(names, _AT * directions)
    slopes = slopes @ directions.T
    falls, own = losses - value, np.diagonal(slopes, axis1=0, axis2=2).T * [1.0, -1.0]
    means, sds = np.transpose([moments_along(*each) for each in zip(falls, own, strict=True)])
    # Half of d³ log p / dz_i dz_j², of standardised coordinates, (j, i).
    thirds = -0.5 * np.sum(slopes, axis=1) / _AT**2
    thirds = np.where(np.isfinite(thirds), thirds, 0.0)
    np.fill_diagonal(thirds, 0.0)
    for shift, most in ((means + np.sum(thirds, axis=0), _MOST_BELOW), (means, np.inf)):
        shift = np.clip(shift, -_FARTHEST, _FARTHEST)
        moved = unravel(flat + jnp.asarray(shift @ directions, flat.dtype))
        reached, _ = profile.evaluate(dict(zip(names, moved, strict=True)))
        if np.isfinite(reached) and reached - value <= 0.5 * shift @ shift + most:
            return (directions.T * sds**2) @ directions
        profile.state = at_mode
    return covariance


def moments_along(falls: np.ndarray, slopes: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of a density of one number, which has its mode at zero and a curvature of one there.

    Args:
        falls: of the logarithm of the density, from the mode to plus and minus `_AT`, (2,).
        slopes: of the fall there, in the direction away from the mode.
    """
    u = np.linspace(0.0, 12.0, 2401)
    above, below = (_fall(u, *side) for side in zip(falls, slopes, strict=True))
    t, p = np.r_[-u[:0:-1], u], np.exp(-np.r_[below[:0:-1], above])
    mean = p @ t / p.sum()
    return float(mean), float(np.sqrt(p @ (t - mean) ** 2 / p.sum()))


def _fall(u: np.ndarray, fall: float, slope: float) -> np.ndarray:
    """A quartic up to `_AT` and a parabola beyond; one parabola where these do not rise all the way.

    Args:
        u: distances from the mode.
        fall: at `_AT`.
        slope: there.
    """
    if not (np.isfinite(fall) and np.isfinite(slope) and fall > 0.0):
        return 0.5 * u**2
    more, steeper = fall - 0.5 * _AT**2, slope - _AT
    quartic = (steeper * _AT - 3.0 * more) / _AT**4
    cubic = more / _AT**3 - quartic * _AT
    curvature = max(1.0 + 6.0 * cubic * _AT + 12.0 * quartic * _AT**2, _LEAST_CURVATURE)
    beyond = fall + slope * (u - _AT) + 0.5 * curvature * (u - _AT) ** 2
    found = np.where(u < _AT, u**2 * (0.5 + cubic * u + quartic * u**2), beyond)
    if np.all(np.diff(found) >= 0.0):
        return found
    return max(fall / _AT**2, 0.5 * _LEAST_CURVATURE) * u**2
