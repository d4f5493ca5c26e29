"""Decoupled sparse GP: a mean over a large basis at linear cost, and a covariance over a small one."""

from numpyro_sgp.decoupled.family import Decoupled
from numpyro_sgp.decoupled.guide import AutoDecoupledGP

__all__ = ["AutoDecoupledGP", "Decoupled"]
