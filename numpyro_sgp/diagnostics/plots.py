"""Figures of a fit: bands, inducing inputs, training curves, hyperparameters. They need matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.typing import ArrayLike
import numpy as np

from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.inducing import (
    AbstractInducing,
    AbstractPoints,
    GrowingInducing,
    as_inducing,
)
from numpyro_sgp.optim import num_refused

__all__ = ["plot_band", "plot_hyperparameters", "plot_inducing", "plot_training"]


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained")[1]


def plot_band(
    posterior: SparsePosterior,
    *,
    transform: Callable[[Any], Any] | None = None,
    levels: Sequence[float] = (0.9, 0.5),
    column: int = 0,
    color: str = "C0",
    label: str | None = None,
    ax: Any = None,
) -> Any:
    """The median of f against one input column, with central intervals.

    Args:
        posterior: of one latent at inputs to be drawn at, from `guide.posterior` or `ProcessPosterior.posterior`.
        transform: an increasing function of f to show in its place, such as `jnp.exp`: quantiles go through it.
        levels: probabilities of the intervals, in (0, 1).
        column: which column of the inputs.
        color: of line and bands.
        label: for a legend.
        ax: axes of matplotlib; by default new ones.

    Returns:
        The axes.

    Raises:
        ValueError: a batch of latents, or a level outside (0, 1).
    """
    if posterior.batch_shape:
        msg = (
            f"`posterior` has latents of shape {posterior.batch_shape}, and a band is of one. Plot mean and quantiles "
            "of each with your own axes."
        )
        raise ValueError(msg)
    if not all(0.0 < level < 1.0 for level in levels):
        msg = f"`levels` must be probabilities between 0 and 1, got {levels!r}. For example (0.9, 0.5)."
        raise ValueError(msg)
    ax = _axes(ax)
    x = np.asarray(posterior.prior.X)[:, column]
    order = np.argsort(x, kind="stable")

    def at(probability: float) -> np.ndarray:
        value = posterior.quantile(probability)
        return np.asarray(value if transform is None else transform(value))[order]

    for level in sorted(levels, reverse=True):
        lower, upper = at(0.5 - 0.5 * level), at(0.5 + 0.5 * level)
        ax.fill_between(x[order], lower, upper, color=color, alpha=0.25, linewidth=0)
    ax.plot(x[order], at(0.5), color=color, label=label)
    return ax


def plot_inducing(
    inducing: ArrayLike | AbstractInducing,
    X: ArrayLike,
    y: ArrayLike | None = None,
    *,
    columns: tuple[int, int] = (0, 1),
    ax: Any = None,
) -> Any:
    """Inducing inputs over the data: ticks below y for inputs of one column, crosses over two columns otherwise.

    Args:
        inducing: inducing inputs (M, D), or an inducing object with inputs `Z`, as in `result.params`.
        X: inputs of the data, (N, D).
        y: outcomes, (N,): the height of points where D = 1, their colour otherwise.
        columns: which two columns, where D > 1.
        ax: axes of matplotlib; by default new ones.

    Returns:
        The axes.

    Raises:
        TypeError: inducing variables that are not values at inputs.
        ValueError: inputs of another width.
    """
    inducing, X = as_inducing(inducing), np.asarray(X)
    if not isinstance(inducing, AbstractPoints | GrowingInducing):
        msg = f"`inducing` must have inputs `Z` to be drawn, got {type(inducing).__name__}."
        raise TypeError(msg)
    Z = np.asarray(inducing.Z)
    if isinstance(inducing, GrowingInducing):
        Z = Z[: int(inducing.num_active)]
    if X.ndim != 2 or X.shape[-1] != Z.shape[-1]:
        msg = f"`X` has shape {X.shape}, and the inducing inputs {Z.shape}. Give both with the same columns."
        raise ValueError(msg)
    ax = _axes(ax)
    if X.shape[-1] == 1:
        height = np.zeros(len(X)) if y is None else np.asarray(y)
        ax.plot(X[:, 0], height, ".", color="0.5", markersize=4, label="data")
        # In the coordinates of the axes' height: below the data whatever their scale.
        low = {"transform": ax.get_xaxis_transform(), "label": "inducing inputs"}
        ax.plot(Z[:, 0], np.full(len(Z), 0.02), "|", color="C3", markersize=10, **low)
        ax.set(xlabel="x", ylabel="" if y is None else "y")
        return ax
    first, second = columns
    ax.scatter(X[:, first], X[:, second], s=8, c="0.6" if y is None else np.asarray(y), alpha=0.6, label="data")
    ax.scatter(Z[:, first], Z[:, second], s=40, c="C3", marker="x", label="inducing inputs")
    ax.set(xlabel=f"column {first}", ylabel=f"column {second}")
    return ax


def plot_training(result: Any, *, window: int | None = None, ax: Any = None) -> Any:
    """The ELBO at each step with its running median, and the steps whose loss was not finite as ticks above.

    Args:
        result: what `SVI.run` or `fit` returned.
        window: steps of the running median; a fiftieth of all by default.
        ax: axes of matplotlib; by default new ones.

    Returns:
        The axes; their title says how many steps were refused, where the optimizer counts them.
    """
    elbo = -np.asarray(result.losses, float)
    window = max(1, len(elbo) // 50) if window is None else window
    steps, finite = np.arange(1, len(elbo) + 1), np.isfinite(elbo)
    ax = _axes(ax)
    ax.plot(steps, np.where(finite, elbo, np.nan), color="C0", alpha=0.35, linewidth=0.8)
    windows = np.lib.stride_tricks.sliding_window_view(np.where(finite, elbo, np.nan), window)
    medians = np.full(len(windows), np.nan)
    known = np.isfinite(windows).any(axis=1)
    medians[known] = np.nanmedian(windows[known], axis=1)
    ax.plot(np.arange(window, len(elbo) + 1), medians, color="C0")
    top = {"markersize": 8, "transform": ax.get_xaxis_transform()}
    ax.plot(steps[~finite], np.full((~finite).sum(), 0.98), "|", color="C3", **top)
    if finite.any():
        # The first steps may be far below: what is of interest is where it went.
        late = elbo[finite][len(elbo[finite]) // 10 :]
        low, high = np.quantile(late, [0.01, 1.0])
        margin = 0.05 * (high - low) + 1e-9 * abs(high)
        ax.set_ylim(low - margin, high + margin)
    ax.set(xlabel="step", ylabel="ELBO")
    try:
        refused = int(num_refused(result.state))
    except TypeError:  # another optimizer, which does not count
        return ax
    ax.set_title(f"{refused} of {len(elbo)} steps refused", fontsize="medium")
    return ax


def plot_hyperparameters(
    draws: Any, var_names: Sequence[str] | None = None, *, scale: Mapping[str, str] | None = None
) -> Any:
    """Pairs of hyperparameters: histograms on the diagonal, draws below it.

    Args:
        draws: what `to_arviz` returned, or a dict of draws (S, ...) as from `guide.sample_posterior`.
        var_names: which; by default all variables with at most four entries.
        scale: "log" for those that are to be shown so.

    Returns:
        The figure.

    Raises:
        ValueError: names that are not among the variables, or nothing to show.
    """
    import matplotlib.pyplot as plt

    if isinstance(draws, Mapping) and "posterior" not in draws:
        values = {name: np.asarray(value) for name, value in draws.items()}
    else:
        posterior = draws["posterior"]
        values = {str(name): posterior[name].values[0] for name in posterior.data_vars}
    if var_names is None:
        var_names = [name for name, value in values.items() if value[0].size <= 4]
    if unknown := set(var_names) - set(values):
        msg = f"`var_names` has {sorted(unknown)}, but the variables are {sorted(values)}."
        raise ValueError(msg)
    if not var_names:
        msg = "There is no variable with at most four entries. Give `var_names`."
        raise ValueError(msg)
    logarithmic = {name for name, kind in (scale or {}).items() if kind == "log"}
    columns: dict[str, tuple[np.ndarray, bool]] = {}
    for name in var_names:
        flat = values[name].reshape(len(values[name]), -1)
        labels = [name] if flat.shape[1] == 1 else [f"{name}[{i}]" for i in range(flat.shape[1])]
        columns.update({label: (x, name in logarithmic) for label, x in zip(labels, flat.T, strict=True)})
    size = len(columns)
    figure, axes = plt.subplots(size, size, figsize=(2.2 * size, 2.0 * size), squeeze=False, layout="constrained")
    for i, (row, (y, y_log)) in enumerate(columns.items()):
        for j, (column, (x, x_log)) in enumerate(columns.items()):
            ax = axes[i, j]
            if j > i:
                ax.set_axis_off()
                continue
            if x_log:
                ax.set_xscale("log")
            if i == j:
                ax.hist(x, (np.geomspace if x_log else np.linspace)(x.min(), x.max(), 31), color="C0", alpha=0.6)
                ax.set_yticks([])
            else:
                ax.plot(x, y, ".", color="C0", markersize=2, alpha=0.4)
                if y_log:
                    ax.set_yscale("log")
            ax.set_xlabel(column if i == size - 1 else "")
            ax.set_ylabel(row if j == 0 < i else "")
            ax.tick_params(labelbottom=i == size - 1, labelleft=j == 0 or i == j)
    return figure
