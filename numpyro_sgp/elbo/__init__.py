"""The evidence lower bound with the GP latents integrated: by which rule, and from what a trace says."""

from numpyro_sgp.elbo.quadrature_elbo import Particle, QuadratureELBO
from numpyro_sgp.elbo.rules import Rule, rules_of
from numpyro_sgp.elbo.traces import Trace, posteriors_of, scaled_log_prob

__all__ = ["Particle", "QuadratureELBO", "Rule", "Trace", "posteriors_of", "rules_of", "scaled_log_prob"]
