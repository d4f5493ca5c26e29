"""What all guides share: the model is run with its GP sites replaced by sparse posteriors.

The base guide gives values to every other latent variable; then the model is run at those values, and a handler puts a
posterior in the place of each `GaussianProcess`, at the inputs and kernel of the site. So q(f) adapts to sampled
hyperparameters: q(θ) q(u | θ).
"""
