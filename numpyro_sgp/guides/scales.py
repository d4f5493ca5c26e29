"""Check that a model scales the likelihood of a minibatch to all rows."""

import warnings

from jax.core import Tracer
import numpy as np
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.elbo import ELBO
from numpyro.primitives import Messenger

from numpyro_sgp.distributions.wrappers import unwrap

__all__ = ["Scales", "warn_of_no_scale"]


class Scales(Messenger):
    """Records observed, latent and scaled sites of a model and a guide.

    Attributes:
        observed: names of the observed sites.
        latent: whether there is a latent variable, to whose prior the likelihood is compared.
        own: whether a site has a scale, by a plate or `handlers.scale`, or is a factor, which may hold one.
    """

    def __init__(self) -> None:
        self.observed: set[str] = set()
        self.latent = self.own = False
        super().__init__()

    def postprocess_message(self, msg: dict) -> None:
        if msg["type"] != "sample":
            return
        scale = msg["scale"]
        self.own |= not (scale is None or (not isinstance(scale, Tracer) and bool(np.all(np.asarray(scale) == 1.0))))
        if not msg["is_observed"]:
            self.latent |= not msg["infer"].get("is_auxiliary")
        elif isinstance(unwrap(msg["fn"]), dist.Unit):
            self.own = True
        else:
            self.observed.add(msg["name"])


def warn_of_no_scale(svi: SVI, scales: Scales, batch_size: int, rows: int) -> None:
    """Warn if the loss is an ELBO and the likelihood of a minibatch of B of N rows is not scaled to all rows."""
    if batch_size == rows or not isinstance(svi.loss, ELBO):
        return
    if scales.latent and scales.observed and not scales.own:
        warnings.warn(
            f"No plate of the model scales a batch of {batch_size} rows to all {rows}: the likelihood of "
            f"{sorted(scales.observed)} counts for {batch_size} rows, and the prior in full. Give the model an "
            "argument `num_data`, which `fit` passes, and write "
            '`numpyro.plate("data", num_data, subsample_size=X.shape[0])`.',
            UserWarning,
            stacklevel=4,
        )
