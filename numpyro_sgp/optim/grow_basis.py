"""`GrowBasis`: adds inducing inputs from the batches that another optimizer trains with."""

import dataclasses
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpyro
from numpyro.optim import _NumPyroOptim
import optax

from numpyro_sgp._internal.checks import positive
from numpyro_sgp._internal.pytrees import own_copy
from numpyro_sgp.inducing import Candidates, GrowingInducing, ProbedInducing, added
from numpyro_sgp.optim.closure import AbstractClosureOptimizer, LossFn, Params, checked, num_refused

__all__ = ["GrowBasis", "GrowBasisState"]


class GrowBasisState(NamedTuple):
    """State between steps.

    Attributes:
        inner: state of the optimizer that trains the parameters.
        bases: the growing bases by parameter; what training moved them by is in `inner`.
    """

    inner: Any
    bases: dict[str, GrowingInducing]

    @property
    def refused(self) -> Array:
        """How many steps the optimizer that trains the parameters has refused."""
        return num_refused(self.inner)


class GrowBasis(AbstractClosureOptimizer):
    """Adds inducing inputs from each batch where it leaves much of the prior variance unexplained, then goes on as is.

    For guides with `growing` inducing inputs. Each update is that of the optimizer given; the same evaluation of the
    loss chooses the rows of the batch to be added, greedily by residual prior variance, at a cost of K·M·B for K rows.
    A new inducing input leaves q(f) as it was: sites, coefficients and whitened means start at zero there. Arrays have
    the size of the capacity from the start, so nothing is compiled again; a basis that is full gives a warning, once,
    and training goes on with it. How many there are is in the parameters: `params["f_auto_inducing"].num_active`.

    Args:
        optim: optimizer of the parameters: one of this package's, of NumPyro's, or an optax transformation.
        num_new: at most so many are added to each basis in an update.
        tolerance: smallest share of the prior variance, in (0, 1), that must be unexplained at a row to be added.

    Raises:
        ValueError: a number outside its range; no growing inducing inputs among the parameters (when the state is
            made).
        TypeError: `optim` is no optimizer.

    References:
        Cheng and Boots (2017), "Variational inference for Gaussian process models with linear complexity", algorithm 1,
        where any rows of a batch are added; by residual prior variance as `greedy_variance`.

    Example:
        >>> import optax, numpyro_sgp as sgp
        >>> optim = sgp.GrowBasis(sgp.NaturalGradient(0.1, optax.adam(1e-2)), num_new=8)
    """

    def __init__(self, optim: Any, *, num_new: int = 8, tolerance: float = 0.01) -> None:
        if isinstance(optim, optax.GradientTransformation):
            optim = numpyro.optim.optax_to_numpyro(optim)
        if not isinstance(optim, _NumPyroOptim):
            msg = f"`optim` must be an optimizer for `SVI`, got {type(optim).__name__}. For example optax.adam(1e-2)."
            raise TypeError(msg)
        hint = "It is a share of the prior variance."
        checked("tolerance", tolerance, lambda share: 0.0 < share < 1.0, "lie in (0, 1)", hint)
        self.optim = optim
        self.num_new = positive("num_new", num_new, "The default is 8.")
        self.tolerance = float(tolerance)

    def init(self, params: Params) -> GrowBasisState:
        """The state before the first step; raises where no parameter is a growing basis."""
        advice = "Give the guide `inducing=functools.partial(numpyro_sgp.growing, capacity=256)`."
        bases = self._own(params, GrowingInducing, "growing inducing inputs", advice)
        offsets = {name: own_copy(basis.offset) for name, basis in bases.items()}
        return GrowBasisState(self.optim.init({**params, **offsets}), bases)

    def get_params(self, state: GrowBasisState) -> Params:
        """The current parameters."""
        params = self.optim.get_params(state.inner)
        return {**params, **{name: _moved(basis, params[name]) for name, basis in state.bases.items()}}

    def _update(self, fn: LossFn, state: GrowBasisState, *, stable: bool) -> tuple[tuple[Array, Any], GrowBasisState]:
        evaluate = self.optim.eval_and_stable_update if stable else self.optim.eval_and_update
        bases = state.bases

        def growing_fn(params: Params) -> tuple[Array, tuple[Any, dict[str, Candidates]]]:
            def at(zero: dict[str, Candidates]) -> tuple[Array, Any]:
                probed = {
                    name: ProbedInducing(_moved(basis, params[name]), zero[name], self.num_new, self.tolerance)
                    for name, basis in bases.items()
                }
                return fn({**params, **probed})

            zero = {name: Candidates.zeros(basis) for name, basis in bases.items()}
            loss, pull, aux = jax.vjp(at, zero, has_aux=True)
            return loss, (aux, lax.stop_gradient(pull(jnp.ones_like(loss))[0]))

        (loss, (aux, candidates)), inner = evaluate(growing_fn, state.inner)
        grown = {}
        for name, basis in bases.items():
            grown[name] = added(basis, candidates[name], self.num_new)
            _say_when_full(name, basis, grown[name])
        return (loss, aux), GrowBasisState(inner, grown)


def _moved(basis: GrowingInducing, offset: Array) -> GrowingInducing:
    return dataclasses.replace(basis, offset=offset)


def _say_when_full(name: str, before: GrowingInducing, after: GrowingInducing) -> None:
    capacity = after.num_inducing
    msg = (
        f"The growing basis {name!r} is full: training goes on with its {capacity} inducing inputs. If the bound still "
        "gains by more of them, give it a larger `capacity`."
    )

    def say() -> None:
        jax.debug.callback(lambda: warnings.warn(msg, UserWarning, stacklevel=2))

    lax.cond((before.num_active < capacity) & (after.num_active == capacity), say, lambda: None)
