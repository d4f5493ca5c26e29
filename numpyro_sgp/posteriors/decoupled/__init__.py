"""Decoupled sparse GP: a mean over a large basis at linear cost, and a covariance over a small one."""
