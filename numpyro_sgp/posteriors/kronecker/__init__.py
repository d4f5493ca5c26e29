"""Inducing variables on a grid: prior and posterior covariance are products of small matrices, one for each axis."""
