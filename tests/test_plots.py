"""Figures show the numbers they are of."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import plot_band, plot_hyperparameters, plot_inducing, plot_training

pytestmark = pytest.mark.usefixtures("x64")

X = np.array([[0.5], [-1.0], [2.0], [0.0]])
Z = np.array([[-1.0], [1.0]])
y = np.array([1.0, 0.0, 3.0, 1.0])


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3).expand([1]).to_event(1))
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.fixture(scope="module")
def fit():
    with jax.enable_x64(True):
        guide = sgp.AutoTSVGP(model, Z)
        svi = SVI(model, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
        return svi, svi.run(jax.random.key(0), 30, X, y, progress_bar=False)


@pytest.mark.thorough
def test_bands_are_the_quantiles_in_the_order_of_the_inputs(fit):
    svi, result = fit
    q = svi.guide.posterior(jax.random.key(1), result.params, X)["f"]
    ax = plot_band(q, transform=jnp.exp, levels=(0.5, 0.9), label="rate")
    (line,) = ax.lines
    order = np.argsort(X[:, 0])
    mean, sd = np.asarray(q.mean)[order], np.sqrt(np.asarray(q.variance))[order]
    assert_allclose(line.get_xdata(), X[order, 0])
    assert_allclose(line.get_ydata(), np.exp(mean))
    assert line.get_label() == "rate"
    # The wider band first, so that the narrower one lies on it.
    for band, level in zip(ax.collections, (0.9, 0.5), strict=True):
        heights = band.get_paths()[0].vertices[:, 1]
        z = stats.norm.ppf(0.5 + 0.5 * level)
        assert_allclose(heights.max(), np.exp(mean + z * sd).max())
        assert_allclose(heights.min(), np.exp(mean - z * sd).min())


def test_inducing_inputs_lie_where_they_are(fit):
    _, result = fit
    data, ticks = plot_inducing(result.params["f_auto_inducing"], X, y).lines
    assert_allclose(np.column_stack(data.get_data()), np.column_stack([X[:, 0], y]))
    assert_allclose(ticks.get_xdata(), Z[:, 0])
    rng = np.random.default_rng(0)
    inputs, inducing = rng.normal(size=(6, 3)), rng.normal(size=(2, 3))
    points, crosses = plot_inducing(inducing, inputs, columns=(2, 0)).collections
    assert_allclose(points.get_offsets(), inputs[:, [2, 0]])
    assert_allclose(crosses.get_offsets(), inducing[:, [2, 0]])


def test_training_shows_the_bound_its_median_and_what_was_not_finite(fit):
    _, result = fit
    losses = np.array(result.losses)
    losses[[4, 7]] = np.nan
    ax = plot_training(result._replace(losses=losses), window=3)
    course, median, ticks = ax.lines
    assert_allclose(course.get_ydata(), -losses)
    assert_allclose(median.get_ydata()[:2], [np.median(-losses[:3]), np.median(-losses[1:4])])
    assert_allclose(median.get_xdata()[:2], [3, 4])
    assert_allclose(ticks.get_xdata(), [5, 8])
    assert ax.get_title() == "0 of 30 steps refused"
    svi = SVI(model, sgp.AutoSVGP(model, Z), optax.adam(0.1), sgp.QuadratureELBO())
    assert not plot_training(svi.run(jax.random.key(0), 3, X, y, progress_bar=False)).get_title()


def test_hyperparameters_are_shown_in_pairs(fit):
    svi, result = fit
    data = sgp.to_arviz(jax.random.key(1), svi, result, X, y, num_samples=20)
    alone = plot_hyperparameters(data, scale={"lengthscale": "log"})
    assert len(alone.axes) == 5**2  # f has four entries, lengthscale one
    rng = np.random.default_rng(0)
    draws = {"a": rng.lognormal(size=50), "b": rng.normal(size=(50, 2)), "f": rng.normal(size=(50, 9))}
    figure = plot_hyperparameters(draws, scale={"a": "log"})
    axes = np.reshape(figure.axes, (3, 3))
    assert [ax.get_xlabel() for ax in axes[2]] == ["a", "b[0]", "b[1]"]
    assert_allclose(axes[2, 0].lines[0].get_data(), [draws["a"], draws["b"][:, 1]])
    assert axes[2, 0].get_xscale() == "log"
    assert sum(bar.get_height() for bar in axes[0, 0].patches) == 50
    assert not axes[0, 1].axison


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot_hyperparameters({"a": np.zeros(3)}, ["b"]), r"\['b'\], but the variables are \['a'\]"),
        (lambda: plot_hyperparameters({"f": np.zeros((3, 9))}), "Give `var_names`"),
        (lambda: plot_inducing(Z, np.zeros((3, 2))), r"`X` has shape \(3, 2\)"),
    ],
)
def test_what_cannot_be_drawn_raises_and_says_why(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_a_band_is_of_one_latent_at_levels_that_are_probabilities(fit):
    svi, result = fit
    q = svi.guide.posterior(jax.random.key(1), result.params, X)["f"]
    with pytest.raises(ValueError, match="between 0 and 1"):
        plot_band(q, levels=(90.0,))
    batch = sgp.SparsePosterior(q.prior, q.moments, (3,))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        plot_band(batch)
