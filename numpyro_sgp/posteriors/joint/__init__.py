"""One Gaussian over the inducing variables of several GP sites and over other latents of the model."""
