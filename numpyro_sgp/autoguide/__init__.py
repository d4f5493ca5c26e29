"""The guide that runs the model with its GP sites replaced by sparse posteriors.

The base guide gives values to every other latent variable; then the model itself is run at those values, and a handler
puts a posterior in the place of each `GaussianProcess`, at the site's own inputs and kernel. So q(f) adapts to sampled
hyperparameters: q(θ) q(u | θ). This module knows messages and nothing of parametrisations.
"""

from numpyro_sgp.autoguide.guide import AbstractAutoSparseGP, AutoSparseGP

__all__ = ["AbstractAutoSparseGP", "AutoSparseGP"]
