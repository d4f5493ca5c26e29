"""What a fitted guide is worth: ArviZ, and numbers that need no other package."""

from numpyro_sgp.diagnostics.inference_data import to_arviz

__all__ = ["to_arviz"]
