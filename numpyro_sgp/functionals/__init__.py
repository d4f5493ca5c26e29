"""Linear functionals of a function as rows of a GP site: sums, differences, derivatives, integrals.

A functional stands in the place of the inputs X, as in `GaussianProcess(kernel, WeightedSum(X, weights))`, which is a
site with R rows ℓ_r f. A site needs Cov(f(z_m), ℓ_r f) and Var(ℓ_r f), and Cov(ℓ_r f, ℓ_s f) for joint draws:
`functional.cross(kernel, Z)`, `.variance(kernel)` and `.covariance(kernel, other)`. The inducing variables are function
values as ever. A functional has a `shape` (R, D), is indexed by rows, and is a pytree whose arrays have the rows first:
it is an argument of `jit`, and data of `fit`.
"""

from numpyro_sgp.functionals.derivative import Derivative
from numpyro_sgp.functionals.integral import Integral
from numpyro_sgp.functionals.stack import Stack
from numpyro_sgp.functionals.sums import Difference, WeightedSum
from numpyro_sgp.kernels.functional import AbstractFunctional

__all__ = ["AbstractFunctional", "Derivative", "Difference", "Integral", "Stack", "WeightedSum"]
