"""Quadruply stochastic GP (QSGP): the weights of up to ten million basis functions, sampled in each step."""
