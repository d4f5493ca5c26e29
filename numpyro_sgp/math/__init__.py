"""Linear algebra, quadrature and bounds of the marginal likelihood, as functions of arrays; no NumPyro."""
