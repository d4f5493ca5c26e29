"""Quadruply stochastic GPs: posteriors over the weights of ten million basis functions, a few of them in a step."""

from numpyro_sgp.qsgp.family import QuadruplyStochastic
from numpyro_sgp.qsgp.guide import AutoQSGP, RelevantVectors

__all__ = ["AutoQSGP", "QuadruplyStochastic", "RelevantVectors"]
