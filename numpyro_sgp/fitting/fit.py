"""`fit`: train a guide on minibatches, or choose everything for a model and fit it."""

from collections.abc import Callable, Mapping, Sequence
import inspect
import os
from typing import Any, overload

import jax
from jax import Array
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.svi import SVIRunResult

from numpyro_sgp.fitting.automatic import FitResult, fit_model
from numpyro_sgp.fitting.callbacks import FitProgress
from numpyro_sgp.fitting.checkpoint import Checkpoint
from numpyro_sgp.fitting.training import train
from numpyro_sgp.guides.members import Joint
from numpyro_sgp.losses.quadrature_elbo import QuadratureELBO
from numpyro_sgp.posteriors.family import Inducing

__all__ = ["fit"]

Callback = Callable[[FitProgress], bool | None]


@overload
def fit(
    svi: SVI,
    rng_key: Array,
    data: Any,
    *,
    batch_size: int,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    init_state: Any = None,
    progress_bar: bool = True,
    callback: Callback | Sequence[Callback] | None = None,
    checkpoint: str | os.PathLike | Checkpoint | None = None,
    stable_update: bool = False,
    sharding: jax.sharding.Sharding | None = None,
) -> SVIRunResult: ...


@overload
def fit(
    svi: Callable,
    rng_key: Array,
    data: Any,
    *,
    budget: str | float | Sequence[str | float] | None = None,
    num_inducing: int | None = None,
    inducing: Inducing | Mapping[str, Inducing] | None = None,
    learn_inducing: bool | None = None,
    base: Any = AutoNormal,
    joint: Joint | None = None,
    loss: QuadratureELBO | None = None,
    batch_size: int | None = None,
    num_steps: int | None = None,
    progress_bar: bool = True,
) -> FitResult: ...


def fit(
    svi: SVI | Callable,
    rng_key: Array,
    data: Any,
    *,
    batch_size: int | None = None,
    num_steps: int | None = None,
    progress_bar: bool = True,
    num_epochs: int | None = None,
    init_state: Any = None,
    callback: Callback | Sequence[Callback] | None = None,
    checkpoint: str | os.PathLike | Checkpoint | None = None,
    stable_update: bool = False,
    sharding: jax.sharding.Sharding | None = None,
    budget: str | float | Sequence[str | float] | None = None,
    num_inducing: int | None = None,
    inducing: Inducing | Mapping[str, Inducing] | None = None,
    learn_inducing: bool | None = None,
    base: Any = None,
    joint: Joint | None = None,
    loss: QuadratureELBO | None = None,
) -> SVIRunResult | FitResult:
    """Fit a model and choose everything that was not given; or train an `SVI` on minibatches.

    **A model**: `fit(model, rng_key, data)`. The guide is `AutoTSVGP`. Inducing inputs are chosen greedily, and again
    as the hyperparameters settle, as many as the data need: what they leave of the variance of f is to be a fiftieth of
    the variance with which a row tells it. If all rows are seen at once, L-BFGS maximises the bound with q(u) at its
    best, and latents outside of the joint posterior get a Laplace approximation, with the curvature there and moved
    from the mode to the mean, if the bound agrees. If not, cycles of natural steps and Adam on minibatches, each twice
    as long as the one before, train inducing inputs too and end where the bound no longer rises. In the place of
    inducing inputs, unless options of these or a `batch_size` are given, one function of few rows has the dense
    posterior, `AutoTSVGP(model, None)` (up to 300; with Gaussian noise up to 2000), and one of more than 2000 times is
    smoothed by `AutoMarkovGP` if that takes its kernel exactly. Nothing is standardised: the model's priors should fit
    the units of the data.

    **An `SVI`**: `fit(svi, rng_key, data, batch_size=...)`. Each epoch visits N // batch_size batches without
    replacement, in a fresh random order; the rows that are left over where batch_size does not divide N are others in
    each epoch. With batch_size = N every step takes all rows in their order, and the result is that of `SVI.run`.

    The model's plate scales a batch to all rows, by its `num_data`. A model without that argument sees all rows.

    Args:
        svi: a model, or an `SVI`: model, guide, optimizer and loss; schedules of step sizes belong to the optimizer.
        rng_key: a key, for the start and the order of the rows.
        data: a pytree of arrays with N rows each, `numpy.ndarray` or `numpy.memmap`; a memmap is read batch by batch.
            A tuple or list gives the model a positional argument for each entry (None where that is the entry),
            anything else is one argument. A model that has an argument `num_data` gets N there, as a Python integer.
        batch_size: rows of a batch, B; N for all rows at once.
        num_steps: number of steps; those before a checkpoint that is resumed count.
        progress_bar: whether to show progress, time left, average loss and refused steps, where the optimizer
            counts them.
        num_epochs: of an `SVI`: in the place of `num_steps`, number of epochs.
        init_state: of an `SVI`: an `SVIState` to start from, such as `result.state` of an earlier run; it is copied.
        callback: of an `SVI`: called between steps with a `FitProgress`; True stops the run. A function is called about
            a hundred times in a run, an `AbstractCallback` such as `EarlyStopping` at multiples of its `every`; or a
            list.
        checkpoint: of an `SVI`: a folder, or a `Checkpoint`. If it holds a checkpoint of this run, that is resumed and
            the result is that of a run without interruption, bit for bit on the same machine and versions; if not, the
            run starts anew (from `init_state` where that is given). A run that a callback stopped goes on only without
            callbacks.
        stable_update: of an `SVI`: as in `SVI.run`, leave out steps whose loss or gradient is not finite, for any
            optimizer.
        sharding: of an `SVI`: how the rows of a batch are laid over devices, a `NamedSharding` such as
            `NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))`; the state is on each of them. If the
            devices are those of several processes, all call `fit` alike, with all N rows, of which each reads those of
            its own devices; the first writes checkpoints, all need to see its folder, and the answers of its callbacks
            count. Results are those of one device to rounding.
        budget: of a model: a time to stay within, such as 90 (seconds) or "2 min", a memory, such as "4 GB", or both;
            they limit the number of inducing inputs and of steps. Compilation comes on top of the time.
        num_inducing: of a model: M, for each GP site.
        inducing: of a model: inducing inputs, as for `AutoTSVGP`.
        learn_inducing: of a model: whether to train them. None for those that `fit` has chosen, on minibatches or where
            they are too few.
        base: of a model: guide for the latents outside of the joint posterior. None for `AutoMultivariateNormal` if all
            rows are seen at once, and else for `AutoNormal`.
        joint: of a model: as for `AutoTSVGP`; None for "auto", but for latents that do more than move a GP site, which
            go to `base`, such as noise scales.
        loss: of a model: a `QuadratureELBO`; None for the default.

    Returns:
        For a model a `FitResult` with `guide`, `params`, `svi` and a `report`. For an `SVI` constrained parameters,
        last state, and the loss of every step, (num_steps,) or fewer where a callback stopped.

    Raises:
        ValueError: the entries of `data` have different numbers of rows, or none; `batch_size` is not in 1 … N, or no
            multiple of the number of devices; both or none of `num_steps` and `num_epochs`; a checkpoint that cannot be
            read or is of another run; processes that call `fit` differently; a `budget` that is not understood.
        TypeError: `data` has entries that are not arrays; the model cannot take the arguments; `fit` is traced;
            `sharding` is not a `NamedSharding`; options of an `SVI` for a model, or the reverse.

    Warns:
        UserWarning: no plate of the model scales a batch to all rows; natural steps on minibatches that average a
            posterior over weights over few rows for its rank, or less long than it is held (`refresh`); more than a
            tenth of the steps were refused.

    References:
        Burt, Rasmussen and van der Wilk (2020), "Convergence of sparse variational inference in Gaussian processes
        regression", for choosing inducing inputs again; Ober, Artemev, Wagenländer, Grobins and van der
        Wilk (2024), "Recommendations for baselines and benchmarking approximate Gaussian processes".

    Example:
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist, optax, numpyro_sgp as sgp
        >>> from numpyro.infer import SVI
        >>> def model(X, y=None, num_data=None):
        ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal())
        ...     f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern32(lengthscale), X))
        ...     with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
        >>> X = np.linspace(0.0, 1.0, 200)[:, None]
        >>> data = (X, np.sin(6.0 * X[:, 0]))
        >>> result = sgp.fit(model, jax.random.key(0), data)
        >>> result.report.converged
        True

        The same model with a guide and an optimizer of your own:

        >>> svi = SVI(model, sgp.AutoSVGP(model, X[::20]), optax.adam(1e-2), sgp.QuadratureELBO())
        >>> result = sgp.fit(svi, jax.random.key(0), data, batch_size=50, num_epochs=2, progress_bar=False)
        >>> result.losses.shape
        (8,)
    """
    both: dict[str, Any] = {"num_steps": num_steps, "progress_bar": progress_bar}
    of_svi: dict[str, Any] = {
        "num_epochs": num_epochs,
        "init_state": init_state,
        "callback": callback,
        "checkpoint": checkpoint,
        "stable_update": stable_update,
        "sharding": sharding,
    }
    of_model: dict[str, Any] = {
        "budget": budget,
        "num_inducing": num_inducing,
        "inducing": inducing,
        "learn_inducing": learn_inducing,
        "base": base,
        "joint": joint,
        "loss": loss,
    }
    if isinstance(svi, SVI):
        _refuse(of_model, "an `SVI`", "They belong to its guide and loss, or to `fit(model, ...)`.")
        if batch_size is None:
            msg = "`fit` needs a `batch_size` for an `SVI`. Usual values are 100 to 1000; the number of rows takes all."
            raise ValueError(msg)
        return train(svi, rng_key, data, batch_size=batch_size, **both, **of_svi)
    _refuse(of_svi, "a model", "Make an `SVI` with a guide and an optimizer, and pass that.")
    if not callable(svi):
        msg = f"`fit` needs a model or an `SVI`, got {type(svi).__name__}. Pass the function with NumPyro primitives."
        raise TypeError(msg)
    return fit_model(svi, rng_key, data, batch_size=batch_size, **both, **of_model)


def _refuse(options: Mapping[str, Any], what: str, advice: str) -> None:
    defaults = inspect.signature(fit).parameters
    given = [f"`{name}`" for name, value in options.items() if value is not defaults[name].default]
    if given:
        msg = f"`fit` was given {what}, which does not go with {', '.join(given)}. {advice}"
        raise TypeError(msg)
