"""`joint_gain`: what a posterior loses that takes GP sites and the other latents to be independent."""

from typing import Any, NamedTuple

from jax import Array
import numpy as np
from numpyro.infer import SVI

from numpyro_sgp._internal.checks import at_least
from numpyro_sgp.guides.guide import AbstractAutoSparseGP

__all__ = ["JointGain", "joint_gain"]


class JointGain(NamedTuple):
    """How much higher the bound is with a joint posterior.

    Attributes:
        nats: the difference of the two bounds.
        standard_error: of `nats`, from the steps that it averages.
    """

    nats: float
    standard_error: float


def joint_gain(rng_key: Array, svi: SVI, *model_args: Any, num_steps: int = 1000, **model_kwargs: Any) -> JointGain:
    """How much the bound rises where GP sites and the latents beside them have one joint Gaussian.

    The guide is fitted twice to the rows that are given, with `joint="auto"` and with `joint=False`, by the optimizer
    and the loss of `svi`. The bounds are averages over the last tenth of the steps. A large gain says that intervals of
    the factorised posterior are too narrow. Give a subset of the rows if a fit takes long.

    Args:
        rng_key: a key.
        svi: an `SVI` with a sparse guide; it need not be fitted.
        model_args: arguments of the model, at a subset of its rows.
        num_steps: of each of the two fits.
        model_kwargs: keyword arguments of the model.

    Raises:
        TypeError: the guide is not one of this package.
        ValueError: the guide takes nothing in the model to be joint.
    """
    num_steps = at_least(10, "num_steps", num_steps, "The default is 1000.")
    if not isinstance(svi.guide, AbstractAutoSparseGP):
        msg = f"`joint_gain` needs a guide of numpyro_sgp, got a {type(svi.guide).__name__}. For example AutoTSVGP."
        raise TypeError(msg)
    bounds = []
    for joint in ("auto", False):
        guide = svi.guide.with_joint(joint)
        fit = SVI(svi.model, guide, svi.optim, svi.loss, **svi.static_kwargs)
        result = fit.run(rng_key, num_steps, *model_args, progress_bar=False, **model_kwargs)
        groups = guide.joint_groups(result.params)
        if joint == "auto" and not any(len(group.sites) + len(group.latents) > 1 for group in groups):
            msg = (
                "This guide takes no GP site of the model to be joint with another latent or GP site: with it there is "
                "nothing to gain. If the model has latents beside f, try AutoTSVGP or AutoSVGP(natural=True)."
            )
            raise ValueError(msg)
        bounds.append(-np.asarray(result.losses[-(num_steps // 10) :]))
    nats = np.mean(bounds[0]) - np.mean(bounds[1])
    errors = [np.std(each) / np.sqrt(len(each)) for each in bounds]
    return JointGain(float(nats), float(np.hypot(*errors)))
