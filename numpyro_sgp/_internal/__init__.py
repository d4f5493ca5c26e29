"""What is not about Gaussian processes: pytrees, compilation, checks of arguments, dependence of outputs on inputs."""
