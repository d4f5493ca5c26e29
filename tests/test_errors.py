"""Mistakes of users: each error names the argument, says what came, what is needed and what to do."""

import re

from guides import initial_parameters, loss_at
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.kernels import Matern52, Select, SquaredExponential

pytestmark = pytest.mark.usefixtures("x64")

N, M, D = 7, 5, 2
RNG = np.random.default_rng(30)
X, Z, y = RNG.normal(size=(N, D)), RNG.normal(size=(M, D)), RNG.normal(size=N)
KERNEL = Matern52(1.0)
GRID = sgp.InducingGrid.over(X, (3, 2))


def model(X, y=None, num_data=N):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with numpyro.plate("data", num_data, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.7), obs=y)


def with_noise(X, y=None, num_data=N):
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with numpyro.plate("data", num_data, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def two_widths(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    g = numpyro.sample("g", sgp.GaussianProcess(KERNEL, X[:, :1]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + g, 0.7), obs=y)


def in_columns(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    numpyro.sample("y", dist.Normal(f[:, None], 0.7), obs=y)


def one_column(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(Select(KERNEL, [0]), X))
    numpyro.sample("y", dist.Normal(f, 0.7), obs=y)


def of_differences(X, y=None):
    rows = sgp.functionals.Difference(X, X + 1.0)
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(1.0), rows))
    numpyro.sample("y", dist.Normal(f, 0.7), obs=y)


def without_gp(X, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(intercept, 0.7), obs=y)


def with_level(X, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + level, 0.7), obs=y)


def gp_inside_a_subsampled_plate(X, y=None):
    with numpyro.plate("data", 100, subsample_size=X.shape[0]):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.sample("y", dist.Normal(f, 0.7), obs=y)


def gp_inside_the_plate_of_its_rows(X, y=None):
    with numpyro.plate("data", X.shape[0]):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.sample("y", dist.Normal(f, 0.7), obs=y)


def gp_inside_a_scan(X, y=None):
    def step(_, y):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        return _, numpyro.sample("y", dist.Normal(f, 0.7).to_event(1), obs=y)

    scan(step, None, y[None])


def latent_inside_cond(X, y=None):
    def branch(scale):
        return lambda _: numpyro.sample("noise", dist.HalfNormal(scale))

    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    noise = cond(True, branch(1.0), branch(2.0), None)
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def scan_over_the_batch(X, y=None):
    def step(_, f):
        numpyro.sample("h", dist.Normal(f, 0.7))
        return _, None

    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    scan(step, None, f)
    numpyro.sample("y", dist.Normal(f, 0.7).to_event(1), obs=y)


def start(model, guide, *args, optim=None, loss=None, **kwargs):
    optim = optax.adam(1e-2) if optim is None else optim
    svi = SVI(model, guide, optim, sgp.QuadratureELBO() if loss is None else loss)
    return svi, svi.init(jax.random.key(0), *args, **kwargs)


def step(*args, **kwargs):
    svi, state = start(*args, **kwargs)
    data = list(args[2:])
    return svi.update(state, *data)


def with_nan(A):
    return np.where(np.arange(A.size).reshape(A.shape) == 3, np.nan, A)


def says(*parts):
    """A pattern that holds all parts, in this order."""
    return "(?s)" + ".*".join(re.escape(part) for part in parts)


TSVGP, SVGP = sgp.AutoTSVGP, sgp.AutoSVGP


def per_datum_at_other_shape():
    svi, state = start(model, TSVGP(model, Z, sites="per_datum"), X, y, optim=sgp.NaturalGradient())
    svi.update(state, X[:3], y[:3])


def dense_at_other_shape():
    svi, state = start(model, TSVGP(model, None), X, y, optim=sgp.NaturalGradient())
    svi.update(state, X[:3], y[:3])


def predict_at_other_width(guide):
    guide.posterior(jax.random.key(0), initial_parameters(model, guide, X, y), X[:, :1])


def predict_without_parameters(missing):
    guide = TSVGP(with_noise, Z)
    params = initial_parameters(with_noise, guide, X, y)
    del params[missing]
    Predictive(with_noise, guide=guide, params=params, num_samples=2)(jax.random.key(0), X)


# By id: what the user does, the error's type, and the parts of its message: the argument, what came, what to do.
MISTAKES = {
    # Inputs of the prior.
    "kernel without its hyperparameters": (
        lambda: sgp.GaussianProcess(sgp.kernels.Matern52, X),
        TypeError,
        ("`kernel`", "the class Matern52", "hyperparameters"),
    ),
    "kernel whose k(X) is the matrix": (
        lambda: sgp.GaussianProcess(lambda X, Z=None: X @ (X if Z is None else Z).T, X),
        ValueError,
        ("`kernel`", "(..., N)", "diagonal"),
    ),
    "column of outcomes for a prior": (
        lambda: sgp.GaussianProcess(KERNEL, X).log_prob(y[:, None]),
        ValueError,
        ("number for each row", f"({len(y)}, 1)", "y[:, 0]"),
    ),
    "column of outcomes for a regression": (
        lambda: sgp.SparseGPRegression(KERNEL, X, Z, 0.1).log_prob(y[:, None]),
        ValueError,
        ("number for each row", f"({len(y)}, 1)", "y[:, 0]"),
    ),
    "column of outcomes": (
        lambda: step(model, TSVGP(model, Z), X, y[:, None], optim=sgp.NaturalGradient()),
        ValueError,
        ("'y'", "(7, 1)", "(7,)", "table (7, 7)", "y[:, 0]"),
    ),
    "outcomes for a column of latents": (
        lambda: step(in_columns, TSVGP(in_columns, Z), X, y, optim=sgp.NaturalGradient()),
        ValueError,
        ("'y'", "(7,)", "(7, 1)", "table (7, 7)", "same order of axes"),
    ),
    "log ratio of one member of a joint posterior": (
        lambda: sgp.process_posterior(
            guide := TSVGP(with_level, Z), jax.random.key(0), initial_parameters(with_level, guide, X, y), X
        )["f"].log_ratio(jnp.zeros(M)),
        TypeError,
        ("`log_ratio`", "a joint posterior with other latents", "(6, 5)", "`joint=False`"),
    ),
    "log ratio of a dense posterior": (
        lambda: sgp.process_posterior(
            guide := TSVGP(model, None), jax.random.key(0), initial_parameters(model, guide, X, y), X
        )["f"].log_ratio(jnp.zeros(N)),
        TypeError,
        ("`log_ratio`", "dense posterior", "no inducing variables"),
    ),
    "quantiles of point estimates": (
        lambda: (guide := TSVGP(with_noise, Z, base=AutoDelta)).quantiles(
            initial_parameters(with_noise, guide, X, y), [0.5], X
        ),
        NotImplementedError,
        ("AutoDelta", "`quantiles`", "`sample_posterior`"),
    ),
    "X of one dimension": (
        lambda: sgp.GaussianProcess(KERNEL, X[:, 0]),
        ValueError,
        ("`X`", "(N, D)", "got (7,)", "X[:, None]"),
    ),
    "X of one dimension in a model": (
        lambda: step(model, TSVGP(model, Z), X[:, 0], y),
        ValueError,
        ("`X`", "(N, D)", "got (7,)", "X[:, None]"),
    ),
    "NaN in X": (
        lambda: sgp.GaussianProcess(KERNEL, with_nan(X)),
        ValueError,
        ("`X`", "(7, 2)", "NaN in 1 rows", "Drop or impute"),
    ),
    "NaN in X in a model": (
        lambda: step(model, TSVGP(model, Z), with_nan(X), y),
        ValueError,
        ("`X`", "NaN in 1 rows", "Drop or impute"),
    ),
    "kernel not callable": (
        lambda: sgp.GaussianProcess(1.0, X),
        TypeError,
        ("`kernel`", "k(X, Z)", "got float", "numpyro_sgp.kernels"),
    ),
    "mean of wrong length": (
        lambda: sgp.GaussianProcess(KERNEL, X, np.zeros(5)),
        ValueError,
        ("`mean`", "(7,)", "got (5,)", "for each row of X"),
    ),
    "mean with a column axis": (
        lambda: sgp.GaussianProcess(KERNEL, X, np.zeros((N, 1))),
        ValueError,
        ("`mean`", "(7,)", "got (7, 1)", "Squeeze"),
    ),
    "mean function of wrong shape": (
        lambda: sgp.GaussianProcess(KERNEL, X, lambda x: x),
        ValueError,
        ("`mean(X)`", "(7,)", "got (7, 2)", "Squeeze"),
    ),
    "negative jitter": (
        lambda: sgp.GaussianProcess(KERNEL, X, jitter=-1e-6),
        ValueError,
        ("`jitter`", "negative", "got -1e-06", "default"),
    ),
    # Inducing inputs.
    "inducing of one dimension": (
        lambda: step(model, TSVGP(model, Z[:, 0]), X, y),
        ValueError,
        ("`inducing`", "(M, D)", "got (5,)", "Z[:, None]"),
    ),
    "no inducing inputs": (
        lambda: step(model, SVGP(model, None), X, y),
        TypeError,
        ("`inducing`", "(M, D)", "got None", "`AutoTSVGP(model, None)`"),
    ),
    "name of a method in the place of inducing inputs": (
        lambda: step(model, SVGP(model, "kmeans"), X, y),
        TypeError,
        ("`inducing`", "(M, D)", "got 'kmeans'"),
    ),
    "inducing without rows": (
        lambda: step(model, TSVGP(model, Z[:0]), X, y),
        ValueError,
        ("`inducing`", "M ≥ 1", "got (0, 2)"),
    ),
    "inducing of another width": (
        lambda: step(model, TSVGP(model, Z[:, :1]), X, y),
        ValueError,
        ("`inducing` has 1 columns", "`X` has shape (7, 2)", "with 2 columns"),
    ),
    "inducing made by a function, of another width": (
        lambda: step(model, SVGP(model, lambda kernel, X, key: X[:, :1]), X, y),
        ValueError,
        ("`inducing` has 1 columns", "`X` has shape (7, 2)", "with 2 columns"),
    ),
    "NaN in inducing": (
        lambda: step(model, TSVGP(model, with_nan(Z)), X, y),
        ValueError,
        ("`inducing`", "(5, 2)", "NaN", "Drop or impute"),
    ),
    "two sites share an inducing object of different widths": (
        lambda: step(two_widths, TSVGP(two_widths, sgp.InducingPoints(jnp.asarray(Z))), X, y),
        ValueError,
        ("`inducing` has 2 columns", "`X` has shape (7, 1)", "dict by site", "GP site 'g'"),
    ),
    "dict of inducing lacks a site": (
        lambda: step(two_widths, TSVGP(two_widths, {"f": Z}), X, y),
        ValueError,
        ("`inducing`", "['f']", "GP site 'g'", "Add one"),
    ),
    "dict of inducing names an unknown site": (
        lambda: step(model, SVGP(model, {"f": Z, "h": Z}), X, y),
        ValueError,
        ("`inducing`", "['h']", "['f']", "Rename"),
    ),
    "dict of inducing times names an unknown site": (
        lambda: step(model, sgp.AutoMarkovGP(model, inducing={"f": Z[:, 0], "h": Z[:, 0]}), X[:, :1], y),
        ValueError,
        ("`inducing`", "['h']", "['f']", "Rename"),
    ),
    **{
        f"no floor on sites whose roots are taken, {name}": (
            lambda of=of, make=make: step(of, make(of), X, y, optim=sgp.NaturalGradient(floor=None)),
            ValueError,
            (f"`{family}` takes roots", "`floor` of 0 or more", "got None", "Leave `floor` out"),
        )
        for name, of, make, family in (
            ("dense", model, lambda model: TSVGP(model, None), "Dense"),
            ("dense beside a level", with_level, lambda model: TSVGP(model, None), "Dense"),
            ("neighbours", model, lambda model: sgp.AutoVecchiaGP(model, num_neighbours=3), "Vecchia"),
        )
    },
    "dict of families lacks a site": (
        lambda: step(two_widths, sgp.AutoSparseGP(two_widths, {"f": sgp.Dual(Z)}), X, y),
        ValueError,
        ("`families`", "['f']", "GP site 'g'", "Add one"),
    ),
    "dict of families names an unknown site": (
        lambda: step(model, sgp.AutoSparseGP(model, {"f": sgp.Dual(Z), "h": sgp.Dual(Z)}), X, y),
        ValueError,
        ("`families`", "['h']", "['f']", "Rename"),
    ),
    "families that are arrays": (
        lambda: sgp.AutoSparseGP(model, {"f": Z}),
        TypeError,
        ("`families`", "got ndarray", "numpyro_sgp.Dual(Z)"),
    ),
    # The model.
    "model is not callable": (lambda: TSVGP(3, Z), TypeError, ("`model`", "callable", "got int", "Pass the function")),
    "model without a GP site": (
        lambda: step(without_gp, TSVGP(without_gp, Z), X, y),
        ValueError,
        ("no `GaussianProcess` site", "numpyro.sample"),
    ),
    "N missing": (
        lambda: step(model, TSVGP(model, Z), X, y, None),
        TypeError,
        ("plate", "size None", "needs N", "num_data=N"),
    ),
    "N smaller than the batch": (
        lambda: step(model, TSVGP(model, Z), X, y, 3),
        ValueError,
        ("'data' has size 3", "subsample of 7 rows", "whole data set", "num_data"),
    ),
    "N smaller than the batch, guide of the user": (
        lambda: step(model, TSVGP(model, Z, base=lambda *args: None), X, y, 3),
        ValueError,
        ("'data' has size 3", "subsample of 7 rows", "whole data set", "num_data"),
    ),
    "GP site inside a subsampled plate": (
        lambda: step(gp_inside_a_subsampled_plate, TSVGP(gp_inside_a_subsampled_plate, Z), X, y),
        ValueError,
        ("GP site 'f'", "plate 'data'", "subsamples 7 of 100", "before the plate"),
    ),
    "GP site inside the plate of its rows": (
        lambda: step(gp_inside_the_plate_of_its_rows, TSVGP(gp_inside_the_plate_of_its_rows, Z), X, y),
        ValueError,
        ("GP site 'f'", "plate 'data'", "7 latents", "before the plate"),
    ),
    "GP site inside a scan": (
        lambda: step(gp_inside_a_scan, TSVGP(gp_inside_a_scan, Z), X, y),
        ValueError,
        ("GP site 'f'", "inside `scan`", "Sample it before"),
    ),
    "latent inside cond": (
        lambda: step(latent_inside_cond, TSVGP(latent_inside_cond, Z), X, y),
        ValueError,
        ("latent site 'noise'", "inside `cond`", "jnp.where"),
    ),
    # The base guide.
    "base guide leaves a latent of a scan without a value": (
        lambda: step(scan_over_the_batch, TSVGP(scan_over_the_batch, Z, base=lambda *args: None), X, y),
        ValueError,
        ("base guide", "'h'", "samples []", "`AutoNormal`"),
    ),
    "base guide leaves a latent without a value": (
        lambda: step(with_noise, TSVGP(with_noise, Z, base=lambda *args: None), X, y),
        ValueError,
        ("base guide", "latent site 'noise'", "it samples []", "Sample it in your guide", "`AutoNormal`"),
    ),
    "base is no guide": (
        lambda: TSVGP(model, Z, base=3),
        TypeError,
        ("`base`", "autoguide class", "got int", "`AutoNormal`"),
    ),
    "base is a class of something else": (
        lambda: TSVGP(model, Z, base=dict),
        TypeError,
        ("`base`", "autoguide class", "got the class dict", "`AutoNormal`"),
    ),
    "median of a base that is a function": (
        lambda: TSVGP(model, Z, base=lambda *args: None).median({}),
        TypeError,
        ("`median`", "got a function", "`sample_posterior`"),
    ),
    "median of a guide not yet run, without the model's arguments": (
        lambda: TSVGP(with_noise, Z, joint=False).median(
            initial_parameters(with_noise, TSVGP(with_noise, Z, joint=False), X, y)
        ),
        TypeError,
        ("'X'", "not been run yet", "model's arguments", "`median`"),
    ),
    # Options of guides.
    "natural without whiten": (
        lambda: SVGP(model, Z, natural=True, whiten=False),
        ValueError,
        ("`natural=True`", "`whiten=False`", "`whiten=True`"),
    ),
    "grid with natural parameters": (
        lambda: start(model, SVGP(model, GRID, natural=True), X, y, optim=sgp.NaturalGradient()),
        ValueError,
        ("`natural=True`", "`InducingGrid`", "Leave it out", "`inducing=grid.Z`"),
    ),
    "grid for another guide": (
        lambda: start(model, TSVGP(model, GRID), X, y, optim=sgp.NaturalGradient()),
        TypeError,
        ("`inducing`", "`InducingGrid`", "`AutoSVGP(model, grid)`", "`grid.Z`"),
    ),
    "grid from a function": (
        lambda: start(one_column, SVGP(one_column, lambda kernel, X, rng_key: GRID), X, y),
        TypeError,
        ("`InducingGrid`", "not from a function", "`grid.Z`"),
    ),
    "names in joint without natural": (
        lambda: SVGP(model, Z, joint=("f", "noise")),
        ValueError,
        ("`joint=('f', 'noise')`", "`natural=True`", "`AutoTSVGP`"),
    ),
    "grid and a kernel that is no product": (
        lambda: start(model, SVGP(model, GRID), X, y),
        TypeError,
        ("`InducingGrid`", "[0] and [1]", "In Matern52", "`Select(Matern32(...), [0]) * Select(Matern32(...), [1])`"),
    ),
    "grid with an axis that the kernel does not look at": (
        lambda: start(one_column, SVGP(one_column, GRID), X, y),
        TypeError,
        ("Select(Matern52, [0])", "axis 1", "`InducingGrid`", "Leave this axis out"),
    ),
    "grid of sizes for other columns": (
        lambda: sgp.InducingGrid.over(X, (3,)),
        ValueError,
        ("`sizes`", "each column of `X`", "(3,)", "(7, 2)"),
    ),
    "grid over a constant column": (
        lambda: sgp.InducingGrid.over(np.c_[X[:, 0], np.ones(7)], (3, 2)),
        ValueError,
        ("Columns [1]", "constant", "Drop them"),
    ),
    "grid for functionals": (
        lambda: start(of_differences, SVGP(of_differences, GRID), X, y),
        TypeError,
        ("`InducingGrid`", "functionals", "inducing inputs (M, D)"),
    ),
    "unknown sites": (
        lambda: TSVGP(model, Z, sites="per-datum"),
        ValueError,
        ("`sites`", "per_datum", "got 'per-datum'", "'tied'"),
    ),
    "one site a row, a minibatch of another shape": (
        per_datum_at_other_shape,
        ValueError,
        ('`sites="per_datum"`', "7 rows", "shape (3, 2)", "numpyro.subsample", '"tied"'),
    ),
    "one site a row, dense, a minibatch of another shape": (
        dense_at_other_shape,
        ValueError,
        ("7 rows", "shape (3, 2)", "Give all rows", "inducing inputs takes minibatches"),
    ),
    # Losses.
    "draws for natural steps on a joint posterior": (
        lambda: step(with_level, TSVGP(with_level, Z), X, y, loss=TraceMeanField_ELBO(), optim=sgp.NaturalGradient()),
        TypeError,
        ("['f', 'level']", "draws", "QuadratureELBO", "joint=False"),
    ),
    "Trace_ELBO": (
        lambda: step(model, TSVGP(model, Z), X, y, loss=Trace_ELBO(), optim=sgp.NaturalGradient()),
        NotImplementedError,
        ("log q(f)", "`Trace_ELBO`", "wrong", "QuadratureELBO", "TraceMeanField_ELBO", "MCMC", "`Predictive`"),
    ),
    "num_samples odd": (
        lambda: sgp.QuadratureELBO(num_samples=3),
        ValueError,
        ("`num_samples`", "positive even", "got 3", "Use 8"),
    ),
    "num_samples zero": (
        lambda: sgp.QuadratureELBO(num_samples=0),
        ValueError,
        ("`num_samples`", "positive even", "got 0", "Use 8"),
    ),
    "num_nodes zero": (
        lambda: sgp.QuadratureELBO(num_nodes=0),
        ValueError,
        ("`num_nodes`", "positive integer", "got 0", "Twenty"),
    ),
    "num_nodes not an integer": (
        lambda: sgp.QuadratureELBO(num_nodes=2.5),
        ValueError,
        ("`num_nodes`", "positive integer", "got 2.5"),
    ),
    # The optimizer.
    "natural gradient without sites": (
        lambda: step(model, SVGP(model, Z), X, y, optim=sgp.NaturalGradient()),
        ValueError,
        ("`NaturalGradient`", "no sites", "f_auto_S_sqrt", "`AutoTSVGP`", "natural=True"),
    ),
    "others from NumPyro": (
        lambda: sgp.NaturalGradient(others=numpyro.optim.Adam(1e-2)),
        TypeError,
        ("`others`", "optax transformation", "got Adam", "optax.adam(1e-2)"),
    ),
    "negative e_steps": (
        lambda: sgp.NaturalGradient(e_steps=-1),
        ValueError,
        ("`e_steps`", "non-negative integer", "got -1"),
    ),
    "fractional m_steps": (
        lambda: sgp.NaturalGradient(m_steps=1.5),
        ValueError,
        ("`m_steps`", "non-negative integer", "got 1.5"),
    ),
    "no steps at all": (
        lambda: sgp.NaturalGradient(e_steps=0, m_steps=0),
        ValueError,
        ("`e_steps` and `m_steps` are both 0", "1 of each"),
    ),
    "refusals of another optimizer": (
        lambda: sgp.num_refused(start(model, SVGP(model, Z), X, y)[1]),
        TypeError,
        ("`state`", "`NaturalGradient`", "`result.state`"),
    ),
    # Prediction.
    "prediction at inputs of another width": (
        lambda: predict_at_other_width(TSVGP(model, Z)),
        ValueError,
        ("`inducing` has 2 columns", "`X` has shape (7, 1)"),
    ),
    "prediction at inputs of another width, dense": (
        lambda: predict_at_other_width(TSVGP(model, None)),
        ValueError,
        ("(7, 2)", "(7, 1)", "same D"),
    ),
    "prediction without the sites": (
        lambda: predict_without_parameters("f_auto_joint_sites"),
        ValueError,
        ("parameter 'f_auto_joint_sites'", "`result.params`"),
    ),
    "prediction without the names of the latents": (
        lambda: predict_without_parameters("auto_latents"),
        ValueError,
        ("parameter 'auto_latents'", "`result.params`"),
    ),
    "posterior without any parameters": (
        lambda: SVGP(model, Z).posterior(jax.random.key(0), {}, X),
        ValueError,
        ("parameter", "no value", "`result.params`"),
    ),
}


# NumPyro's `replay` asks every value of the guide's trace for a shape before each `scan`, parameters too.
@pytest.mark.filterwarnings("ignore:shape requires ndarray:DeprecationWarning")
@pytest.mark.parametrize(("mistake", "error", "parts"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_raises_and_the_message_says_what_to_do(mistake, error, parts):
    with pytest.raises(error, match=says(*parts)):
        mistake()


def above_one(step):
    return 2.0 + 0.0 * step  # a number of JAX, which the message has as a number


STEP_SIZES = [0.0, -0.1, 1.5, np.nan, "0.5", None, optax.constant_schedule(2.0), above_one]


@pytest.mark.parametrize(
    "step_size", STEP_SIZES, ids=["zero", "negative", "above one", "NaN", "text", "None", "schedule", "array"]
)
def test_a_step_size_outside_the_unit_interval_raises(step_size):
    got = 2.0 if callable(step_size) else step_size
    with pytest.raises(ValueError, match=says("`step_size`", "(0, 1]", f"got {got!r}", "full step")):
        sgp.NaturalGradient(step_size)


@pytest.mark.parametrize("optim", [sgp.NaturalGradient, sgp.DualAscent, sgp.RowSparse])
def test_a_schedule_of_step_sizes_may_begin_at_zero(optim):
    warm_up = optax.linear_schedule(0.0, 0.5, 100)
    assert optim(warm_up).step_size is warm_up


@pytest.mark.filterwarnings("ignore:Found vars in model but not guide:UserWarning")
def test_a_member_of_a_joint_posterior_is_fixed_by_condition_and_not_by_substitute():
    given, fixed = (handler(with_noise, {"noise": 0.3}) for handler in (handlers.substitute, handlers.condition))
    parts = "latent site 'noise'", "joint posterior", "a value already", "`handlers.substitute`", "`handlers.condition`"
    with pytest.raises(ValueError, match=says(*parts)):
        step(given, TSVGP(given, Z), X, y, optim=sgp.NaturalGradient())
    step(fixed, TSVGP(fixed, Z), X, y, optim=sgp.NaturalGradient())


@pytest.mark.parametrize("base", [AutoNormal, AutoDelta])
def test_a_base_guide_that_leaves_one_of_two_latents_is_told_which(base):
    def model(X, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with_noise(X, None if y is None else y - slope * X[:, 0])

    def only_noise(X, y=None):
        numpyro.sample("noise", dist.LogNormal(0.0, 1.0))

    with pytest.raises(ValueError, match=says("latent site 'slope'", "it samples ['noise']")):
        step(model, TSVGP(model, Z, base=base(only_noise)), X, y)


@pytest.mark.parametrize("inducing", [Z, None], ids=["per_datum", "dense"])
def test_other_rows_of_X_for_sites_of_rows_are_refused_and_counted(inducing):
    guide = TSVGP(model, inducing, sites="per_datum")
    svi, state = start(model, guide, X, y, optim=sgp.NaturalGradient(0.5))
    update = jax.jit(svi.update)
    state, _ = update(state, X, y)
    fitted = svi.get_params(state)
    state, _ = update(state, X, y)  # finds the loss at `fitted` finite: the place that refusals go back to
    other = X.copy()
    other[-1, 0] += 1e-6
    for refusals in (1, 2):
        state, loss = update(state, other, y)
        assert np.isnan(loss)
        assert sgp.num_refused(state) == refusals
    kept = svi.get_params(state)
    for got, want in zip(jax.tree.leaves(kept), jax.tree.leaves(fitted), strict=True):
        assert_allclose(got, want, rtol=0.0, atol=0.0)
    # The rows in another order are other rows too; the right ones are taken again.
    state, loss = update(state, X[::-1], y)
    assert np.isnan(loss)
    state, loss = update(state, X, y)
    assert_allclose(loss, loss_at(fitted, model, guide, X, y), rtol=1e-10)
    assert sgp.num_refused(state) == 3


def test_a_refused_step_under_stable_update_reports_NaN_and_keeps_the_parameters():
    svi, state = start(model, TSVGP(model, Z), X, y, optim=sgp.NaturalGradient(0.5))
    stable_update = jax.jit(svi.stable_update)
    state, _ = stable_update(state, X, y)
    fitted = svi.get_params(state)
    state, _ = stable_update(state, X, y)  # finds the loss at `fitted` finite: the place that refusals go back to
    state, loss = stable_update(state, X, with_nan(y))
    assert np.isnan(loss)
    assert sgp.num_refused(state) == 1
    for got, want in zip(jax.tree.leaves(svi.get_params(state)), jax.tree.leaves(fitted), strict=True):
        assert_allclose(got, want, rtol=0.0, atol=0.0)


def test_NaN_in_X_is_refused_where_it_cannot_be_seen_at_trace_time():
    svi, state = start(model, TSVGP(model, Z), X, y, optim=sgp.NaturalGradient(0.5))
    state, loss = jax.jit(svi.update)(state, with_nan(X), y)
    assert np.isnan(loss)
    assert sgp.num_refused(state) == 1
