"""Mean and covariance at a grid of inducing inputs, for any optimizer."""

from collections.abc import Callable
import dataclasses
from typing import Any, NoReturn

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.inducing import InducingGrid
from numpyro_sgp.kernels.columns import NotAProductError, factors, named
from numpyro_sgp.kernels.functional import AbstractFunctional
from numpyro_sgp.math.linalg import cholesky, solve_lower
from numpyro_sgp.math.products import matmul
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily, at_prior, inducing_param, is_initial
from numpyro_sgp.posteriors.gaussian import AbstractGaussian
from numpyro_sgp.posteriors.kronecker.formulas import deviation_of, grid_moments, in_units_of_root, log_root
from numpyro_sgp.posteriors.moments import Moments
from numpyro_sgp.posteriors.parameters import FittedParameters, Parameters
from numpyro_sgp.posteriors.process import AbstractProcess, prior_at

__all__ = ["GridGaussian", "Kronecker"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Grid:
    """A grid with the factors of the kernel and their roots.

    Attributes:
        inducing: the grid.
        kernels: for each axis, of all columns.
        L: Cholesky factors at the points of each axis, (..., M_d, M_d).
    """

    inducing: InducingGrid
    kernels: tuple[Callable, ...]
    L: tuple[Array, ...]

    @classmethod
    def of(cls, inducing: InducingGrid, kernel: Callable, jitter: ArrayLike) -> "_Grid":
        kernels = _factors(inducing, kernel)
        points = [inducing.axis_inputs(number) for number in range(len(kernels))]
        L = tuple(cholesky(factor(Z, Z), jitter) for factor, Z in zip(kernels, points, strict=True))
        return cls(inducing, kernels, L)

    def whitened(self, X: Array) -> tuple[Array, ...]:
        """L_d⁻¹k_d at the rows of X, for each axis, (..., M_d, N)."""
        return tuple(
            solve_lower(L, factor(self.inducing.axis_inputs(number), X))
            for number, (factor, L) in enumerate(zip(self.kernels, self.L, strict=True))
        )


def _factors(inducing: InducingGrid, kernel: Callable) -> tuple[Callable, ...]:
    try:
        found = factors(kernel, inducing.groups, inducing.width)
    except NotAProductError as error:
        msg = (
            f"An `InducingGrid` needs a kernel that is a product of one kernel for each axis, of the columns "
            f"{' and '.join(str(list(group)) for group in inducing.groups)}. In {named(kernel, inducing.width)}, "
            f"{error.args[0]} is none. A product is `Select(Matern32(...), {list(inducing.groups[0])}) * "
            f"Select(Matern32(...), {list(inducing.groups[-1])})`; any kernel goes with `inducing=grid.Z`."
        )
        raise TypeError(msg) from None
    if None in found:
        number = found.index(None)
        msg = (
            f"The kernel {named(kernel, inducing.width)} does not depend on axis {number} of the `InducingGrid`. "
            "Leave this axis out, and the column out of `X`."
        )
        raise TypeError(msg)
    return tuple(factor for factor in found if factor is not None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GridGaussian(AbstractGaussian):
    """q(v) = N(m, R diag(s²) Rᵀ + TᵀT), R = R₁ ⊗ R₂ ⊗ …, u = (L₁ ⊗ L₂ ⊗ …) v.

    Attributes:
        grid: the grid, whose kernel is the prior's.
        m: (..., M₁, M₂, …).
        s: (..., M₁, M₂, …).
        R: of each axis, (..., M_d, M_d).
        T: what other latents move, (P, M₁, M₂, …); None where there are none.
    """

    grid: _Grid
    m: Array
    s: Array
    R: tuple[Array, ...]
    T: Array | None = None

    def moments(self, kernel: Callable, X: Array) -> Moments:
        return grid_moments(self.m, self.s, self.R, self.grid.whitened(X), kernel(X), self.T)

    def process(self, q: SparsePosterior) -> "GridProcess":
        prior = q.prior
        return GridProcess(self, prior.kernel, prior.mean_function, prior.relative_jitter, q.batch_shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GridProcess(AbstractProcess):
    """q(f) as a process, from inducing values at a grid; the other fields are those of `ProcessPosterior`."""

    gaussian: GridGaussian
    kernel: Callable
    mean_function: Any
    jitter: ArrayLike
    batch_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def posterior(self, X_new: ArrayLike | AbstractFunctional) -> SparsePosterior:
        prior = prior_at(self.kernel, self.mean_function, self.gaussian.grid.inducing.width, X_new, self.jitter)
        return SparsePosterior(prior, self.gaussian.moments(prior.kernel, prior.X), self.batch_shape)

    def log_ratio(self, noise: Array) -> Array:
        q = self.gaussian
        axes, sizes = tuple(range(-len(q.R), 0)), q.grid.inducing.sizes
        own, of_latents = jnp.split(noise, [q.grid.inducing.num_inducing], axis=-1)
        v = q.m + deviation_of(own.reshape(*own.shape[:-1], *sizes), q.s, q.R)
        if q.T is None:
            squares = jnp.sum(own * own, axis=-1)
        else:
            v = v + jnp.tensordot(of_latents, q.T, axes=1)
            # x = (R diag(s))⁻¹(v − m), and xᵀ(I + YᵀY)⁻¹x without a matrix of M × M.
            Y = in_units_of_root(q.T, q.s, q.R)
            x = own + matmul(of_latents, Y)
            projected = matmul(x, Y.mT)
            inner = jnp.linalg.solve(jnp.eye(len(Y), dtype=Y.dtype) + matmul(Y, Y.mT), projected[..., None])[..., 0]
            squares = jnp.sum(x * x, axis=-1) - jnp.sum(projected * inner, axis=-1)
        return 0.5 * (jnp.sum(v * v, axis=axes) - squares) - log_root(q.s, q.R, q.T)


@dataclasses.dataclass(frozen=True)
class Kronecker(AbstractPosteriorFamily):
    """q(v) = N(m, R diag(s²) Rᵀ), R = R₁ ⊗ R₂ ⊗ …, at an `InducingGrid`; starts at the prior.

    u = (L₁ ⊗ L₂ ⊗ …) v with L_d L_dᵀ the covariance of axis d. m and s have one number for each inducing value, and
    the R_d are free matrices. Latents w in a joint posterior have a Gaussian of their own, and m is a linear function
    of w.

    Args:
        inducing: the grid.
        learn_inducing: whether to train its points.
    """

    inducing: InducingGrid
    learn_inducing: bool = False

    @property
    def joins(self) -> str:
        return "grid"

    @property
    def couples_rows(self) -> bool:
        return False  # what integrates such terms needs dense roots of the covariance

    def gaussian(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> GridGaussian:
        inducing, m, s, R = self._parameters(param, prior, batch_shape)
        return GridGaussian(_Grid.of(inducing, prior.kernel, prior.relative_jitter), m, s, R)

    def moments(self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]) -> Moments:
        inducing, m, s, R = self._parameters(param, prior, batch_shape)
        if is_initial(param, "m", "s"):
            _factors(inducing, prior.kernel)
            return at_prior(prior.kernel, prior.X)
        grid = _Grid.of(inducing, prior.kernel, prior.relative_jitter)
        return GridGaussian(grid, m, s, R).moments(prior.kernel, prior.X)

    def updated(self, fitted: FittedParameters, q: SparsePosterior, linear: Array, precision: Array) -> dict[str, Any]:
        del fitted, q, linear, precision
        self.check_more_rows()

    def check_more_rows(self) -> NoReturn:
        """Raise, as new rows cannot be taken in."""
        msg = (
            "A posterior on an `InducingGrid` can neither take in rows after its training nor give them back. Train on "
            "all rows, or give the grid as inducing inputs (M, D), `grid.Z`, to `AutoTSVGP` or `AutoSVGP`."
        )
        raise TypeError(msg)

    def _parameters(
        self, param: Parameters, prior: GaussianProcess, batch_shape: tuple[int, ...]
    ) -> tuple[InducingGrid, Array, Array, tuple[Array, ...]]:
        if isinstance(prior.X, AbstractFunctional):
            msg = (
                f"An `InducingGrid` was given for a site of functionals, {type(prior.X).__name__}, whose covariance "
                "with a grid is no product. Give inducing inputs (M, D)."
            )
            raise TypeError(msg)
        inducing = inducing_param(param, self.inducing, prior, self.learn_inducing, takes_grids=True)
        assert isinstance(inducing, InducingGrid)
        shape, dtype = (*batch_shape, *inducing.sizes), prior.X.dtype
        m, s = param("m", jnp.zeros(shape, dtype)), param("s", jnp.ones(shape, dtype))
        R = tuple(
            param(f"R{number}", jnp.broadcast_to(jnp.eye(size, dtype=dtype), (*batch_shape, size, size)))
            for number, size in enumerate(inducing.sizes, start=1)
        )
        return inducing, m, s, R
