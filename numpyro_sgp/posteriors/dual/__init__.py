"""Dual parametrisation (t-SVGP): q(u) is the prior times Gaussian sites."""
