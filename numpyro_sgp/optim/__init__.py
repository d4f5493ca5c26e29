"""Optimizers for `numpyro.infer.SVI`, one in each module."""

from numpyro_sgp.optim.natural_gradient import NaturalGradient, NaturalGradientState, num_refused

__all__ = ["NaturalGradient", "NaturalGradientState", "num_refused"]
