"""Sparse variational GP (SVGP): q(u) by mean and root, or by natural parameters of the whitened variables."""
