"""Inducing inputs on a grid: a Gaussian without a dense matrix, beside dense algebra and beside dense posteriors."""

from contextlib import nullcontext
from functools import reduce

import arviz as az
from guides import initial_parameters
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
from numpyro import distributions as dist
from numpyro.infer import SVI
import optax
from programs import equations
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics.importance import log_importance_ratios
from numpyro_sgp.kernels import Constant, Cosine, Linear, Matern12, Matern32, Periodic, Select, SquaredExponential
from numpyro_sgp.kernels.columns import factors

JITTER = 1e-12
rng = np.random.default_rng(0)
X, Y = rng.uniform(size=(20, 3)), rng.normal(size=20)
X_NEW = rng.uniform(size=(7, 3))
ONE, TWO, THREE = np.linspace(0.0, 1.0, 4), np.linspace(0.0, 1.0, 3), np.linspace(-0.1, 1.1, 2)
PLANE = rng.uniform(size=(5, 2))
# Columns, kernel and axes.
PROBLEMS = {
    "two axes": (2, SquaredExponential(np.array([0.5, 0.8]), 1.3), (ONE, TWO)),
    "three axes": (
        3,
        Select(Matern32(0.5), [0]) * Select(SquaredExponential(np.array([0.6, 0.9]), 1.3), [2, 1]),
        (ONE, TWO, THREE),
    ),
    "an axis of two columns": (3, Select(Matern32(0.7), [1, 2]) * Select(Matern12(0.5, 1.3), [0]), (ONE, PLANE)),
    "one axis": (1, Matern32(0.5, 1.3), (ONE,)),
    "a batch": (2, SquaredExponential(np.array([[0.5, 0.8], [0.7, 0.4]]), np.array([1.3, 0.6])), (ONE, TWO)),
}


def site(kernel, D, likelihood=lambda f: dist.StudentT(4.0, f, 0.5)):
    """A model with one site."""

    def model(X, y=None):
        with numpyro.plate("latents", 2) if np.ndim(kernel(X[:1, :D])) > 1 else nullcontext():
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X[:, :D], jitter=JITTER))
        numpyro.sample("y", likelihood(f), obs=y)

    return model


# Latents beside f: a level and two effects.
W = rng.normal(size=(20, 2))
NOISE, LEVEL, EFFECT = 0.5, (0.3, 2.0), 0.7


def with_effects(X, W, y=None, num_data=None):
    level = numpyro.sample("level", dist.Normal(*LEVEL))
    f = numpyro.sample("f", sgp.GaussianProcess(PROBLEMS["two axes"][1], X[:, :2], jitter=JITTER))
    effects = numpyro.sample("effects", dist.Normal(0.0, EFFECT).expand([2]).to_event(1))
    with numpyro.plate("rows", num_data or len(X), subsample_size=len(X)):
        numpyro.sample("y", dist.Normal(level + f + W @ effects, NOISE), obs=y)


def values(sizes, batch=()):
    """m, s and R of a posterior far from the prior."""
    rng = np.random.default_rng(1)
    m, s = rng.normal(size=(*batch, *sizes)), rng.uniform(0.2, 0.7, size=(*batch, *sizes))
    R = [np.eye(size) + 0.2 * rng.normal(size=(*batch, size, size)) for size in sizes]
    return {"f_auto_m": m, "f_auto_s": s, **{f"f_auto_R{number}": each for number, each in enumerate(R, start=1)}}


def dense(kernel, grid, params, X, latent=...):
    """Mean, covariance, divergence and log q(u)/p(u) of a draw by NumPy, from matrices of all inducing values."""
    Z, K = np.asarray(grid.Z), lambda *pair: np.asarray(kernel(*pair))[latent]
    m, s, *R = (np.asarray(params[f"f_auto_{name}"])[latent] for name in ("m", "s", *_roots(params)))
    L = np.linalg.cholesky(K(Z, Z) + JITTER * np.eye(len(Z)))
    A = np.linalg.solve(L, K(Z, X))
    root = reduce(np.kron, R) * s.ravel()
    S, m = root @ root.T, m.ravel()
    covariance = K(X, X) - A.T @ A + A.T @ S @ A
    kl = 0.5 * (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1])

    def log_ratio(noise):
        v = m + root @ noise
        return 0.5 * (v @ v - noise @ noise) - np.linalg.slogdet(root)[1]

    return A.T @ m, covariance, kl, log_ratio


def _roots(params):
    return sorted(name.removeprefix("f_auto_") for name in params if name.startswith("f_auto_R"))


@pytest.mark.parametrize(
    "problem", [pytest.param(p, marks=pytest.mark.thorough if p in {"three axes", "a batch"} else ()) for p in PROBLEMS]
)
@pytest.mark.usefixtures("x64")
def test_marginals_covariance_draws_and_divergence_are_those_of_dense_algebra(problem):
    D, kernel, axes = PROBLEMS[problem]
    grid, batch = sgp.InducingGrid.at(*axes), (2,) if problem == "a batch" else ()
    guide = sgp.AutoSVGP(site(kernel, D), grid)
    params = {
        **initial_parameters(guide.model, guide, X, np.broadcast_to(Y, (*batch, 20))),
        **values(grid.sizes, batch),
    }
    q = guide.posterior(jax.random.key(0), params, X_NEW)["f"]
    process = sgp.process_posterior(guide, jax.random.key(0), params, X)["f"]
    there = process.posterior(X_NEW[:, :D])
    noise = rng.normal(size=(4000, *batch, grid.num_inducing))
    explained = np.asarray(jax.vmap(q.moments.covariance.deviation)(noise))
    ratio = np.asarray(process.log_ratio(noise[0]))
    for latent in np.ndindex(*batch):
        mean, covariance, kl, log_ratio = dense(kernel, grid, params, X_NEW[:, :D], latent)
        assert_allclose(ratio[latent], log_ratio(noise[0][latent]), rtol=1e-9)
        for found in (q, there):
            assert_allclose(np.asarray(found.mean)[latent], mean, atol=1e-9)
            assert_allclose(np.asarray(found.variance)[latent], np.diag(covariance), atol=1e-9)
            assert_allclose(np.asarray(found.covariance())[latent], covariance, atol=1e-9)
            assert_allclose(np.asarray(found.kl)[latent], kl, rtol=1e-10)
        of_u = np.asarray(q.moments.covariance.of_inducing())[latent]
        draws = explained[(slice(None), *latent)]
        assert_allclose(np.cov(draws.T, bias=True), of_u, atol=0.1 * np.max(of_u))
        assert_allclose(np.asarray(q.moments.covariance.variance_of_inducing())[latent], np.diag(of_u), rtol=1e-9)


@pytest.fixture
def both(x64):
    """The same q(u) on a grid, and by `AutoSVGP` with dense matrices: (guide, SVI, parameters) each."""
    grid, model = sgp.InducingGrid.at(ONE, TWO), site(PROBLEMS["two axes"][1], 2)
    params = values(grid.sizes)
    root = np.kron(params["f_auto_R1"], params["f_auto_R2"]) * params["f_auto_s"].ravel()
    S_sqrt = np.linalg.cholesky(root @ root.T)
    found = []
    for inducing, own in (
        (grid, params),
        (grid.Z, {"f_auto_m": params["f_auto_m"].ravel(), "f_auto_S_sqrt": S_sqrt}),
    ):
        guide = sgp.AutoSVGP(model, inducing)
        svi = SVI(model, guide, optax.adam(0.02), sgp.QuadratureELBO())
        start = svi.get_params(svi.init(jax.random.key(0), X, Y))
        assert own.keys() <= start.keys()
        found.append((guide, svi, {**start, **jax.tree.map(jnp.asarray, own)}))
    return found


@pytest.mark.thorough
def test_the_loss_and_everything_on_request_are_those_of_dense_matrices(both):
    results = []
    for guide, svi, params in both:
        loo = sgp.diagnostics.loo_cavity(jax.random.key(4), svi, params, X, Y)
        results.append(
            {
                "loss": svi.loss.loss(jax.random.key(1), params, svi.model, guide, X, Y),
                "draws": guide.posterior(jax.random.key(0), params, X_NEW)["f"].sample(jax.random.key(2), (5,)),
                "loo": np.asarray(loo.loo_i if az.__version__.startswith("0.") else loo.elpd_i),
            }
        )
    for name, value in results[0].items():
        if name != "draws":
            assert_allclose(value, results[1][name], rtol=1e-7, atol=1e-8, err_msg=name)
    assert results[0]["draws"].shape == results[1]["draws"].shape
    ratios = [log_importance_ratios(jax.random.key(3), svi, params, X, Y, num_samples=4000) for _, svi, params in both]
    # Of other draws of the same posterior: means within six standard errors.
    means, errors = zip(*((np.mean(each), np.std(each) / np.sqrt(4000.0)) for each in ratios), strict=True)
    assert abs(means[0] - means[1]) < 6.0 * np.hypot(*errors)
    assert_allclose(np.std(ratios[0]), np.std(ratios[1]), rtol=0.2)


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_gradients_of_hyperparameters_and_of_the_points_are_those_of_dense_matrices():
    grid, params = sgp.InducingGrid.at(ONE, TWO), values((4, 3))

    def loss(lengthscale, variance, axes, inducing):
        model = site(SquaredExponential(lengthscale, variance), 2, lambda f: dist.Normal(f, 0.5))
        guide, here = sgp.AutoSVGP(model, inducing(axes), learn_inducing=True), inducing(axes)
        own = {**params, "f_auto_inducing": here}
        if not isinstance(here, sgp.InducingGrid):
            root = jnp.kron(params["f_auto_R1"], params["f_auto_R2"]) * params["f_auto_s"].ravel()
            S_sqrt = jnp.linalg.cholesky(root @ root.T)
            own = {"f_auto_inducing": here, "f_auto_m": params["f_auto_m"].ravel(), "f_auto_S_sqrt": S_sqrt}
        return sgp.QuadratureELBO().loss(jax.random.key(0), own, model, guide, X, Y)

    values_at = (jnp.array([0.5, 0.8]), jnp.asarray(1.3), grid.axes)
    of_grid, of_points = (
        jax.value_and_grad(loss, argnums=(0, 1, 2))(*values_at, inducing)
        for inducing in (sgp.InducingGrid, lambda axes: sgp.InducingPoints(sgp.InducingGrid(axes).Z))
    )
    for ours, theirs in zip(jax.tree.leaves(of_grid), jax.tree.leaves(of_points), strict=True):
        assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("x64")
def test_it_can_hold_the_exact_posterior_of_rows_on_the_grid():
    kernel, grid, noise = PROBLEMS["two axes"][1], sgp.InducingGrid.at(ONE, TWO), 0.3
    rows = np.asarray(grid.Z)
    y = rng.normal(size=len(rows))
    model = site(kernel, 2, lambda f: dist.Normal(f, noise))
    guide = sgp.AutoSVGP(model, grid)
    K = np.asarray(kernel(rows, rows)) + JITTER * np.eye(len(rows))
    # P = I + LᵀL/σ² has the eigenvectors of L₁ᵀL₁ and L₂ᵀL₂.
    L = [
        np.linalg.cholesky(np.exp(-0.5 * ((axis[:, None] - axis) / scale) ** 2))
        for axis, scale in ((ONE, 0.5), (TWO, 0.8))
    ]
    (d1, Q1), (d2, Q2) = (np.linalg.eigh(root.T @ root) for root in L)
    root = np.linalg.cholesky(K)
    m = np.linalg.solve(np.eye(len(rows)) + root.T @ root / noise**2, root.T @ y / noise**2)
    s = 1.0 / np.sqrt(1.0 + 1.3 * np.outer(d1, d2) / noise**2)
    own = {"f_auto_m": m.reshape(s.shape), "f_auto_s": s, "f_auto_R1": Q1, "f_auto_R2": Q2}
    params = {**initial_parameters(model, guide, rows, y), **own}
    C = K + noise**2 * np.eye(len(rows))
    evidence = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(C)[1] + len(y) * np.log(2.0 * np.pi))
    loss = sgp.QuadratureELBO().loss(jax.random.key(0), params, model, guide, rows, y)
    assert_allclose(loss, -evidence, rtol=1e-8)


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_training_makes_no_array_of_the_size_of_a_dense_one():
    grid = sgp.InducingGrid.at(np.linspace(0.0, 30.0, 30), np.linspace(0.0, 30.0, 31))
    model = site(PROBLEMS["two axes"][1], 2)
    svi = SVI(model, sgp.AutoSVGP(model, grid), optax.adam(0.05), sgp.QuadratureELBO())
    beside = SVI(with_effects, sgp.AutoSVGP(with_effects, grid), optax.adam(0.05), sgp.QuadratureELBO())
    for each, args in ((svi, (X, Y)), (beside, (X, W, Y))):
        program = jax.make_jaxpr(each.update)(each.init(jax.random.key(0), *args), *args).jaxpr
        largest = max(np.prod(v.aval.shape, dtype=int) for e in equations(program) for v in e.outvars)
        assert largest < grid.num_inducing * len(X)


@pytest.mark.parametrize("has_effects", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_it_trains_in_float32(has_effects):
    grid = sgp.InducingGrid.over(X[:, :2], (4, 3))
    model = with_effects if has_effects else site(PROBLEMS["two axes"][1], 2)
    args = [each.astype(np.float32) for each in ((X, W, Y) if has_effects else (X, Y))]
    svi = SVI(model, sgp.AutoSVGP(model, grid), optax.adam(0.05), sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), 60, *args, progress_bar=False)
    assert result.losses[-1] < result.losses[0] - 1.0
    assert {leaf.dtype for leaf in jax.tree.leaves(result.params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("sizes", [30, (30.0, 20.0), (30,), (30, 1), "ab"])
def test_a_grid_needs_a_size_for_each_column(sizes):
    with pytest.raises(ValueError, match="`sizes` must be an integer above 1 for each column of `X`, got"):
        sgp.InducingGrid.over(X[:, :2], sizes)


KERNELS = {
    "several columns": SquaredExponential(np.array([0.5, 0.8, 1.1]), 1.3),
    "one lengthscale": SquaredExponential(0.5, 1.3),
    "periodic": Periodic(np.array([0.5, 0.8, 1.1]), np.array([1.0, 2.0, 3.0]), 1.3),
    "cosine": Cosine(np.array([0.5, 0.8, 1.1]), 1.3),
    "product": Select(Linear(1.2) + Matern12(0.3), [1]) * (2.0 * Select(Matern32(0.5), [2, 0])),
    "nested": Select(Select(SquaredExponential(np.array([0.5, 0.8])), [1, 2]) * Select(Matern12(0.7), [0]), [1, 0, 2]),
    "constant": Constant(1.3) * Select(Matern12(0.7), [1]),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.usefixtures("x64")
def test_a_kernel_is_the_product_of_its_factors_and_each_looks_at_its_columns_alone(name):
    kernel, groups = KERNELS[name], ((1,), (0, 2))
    found = factors(kernel, groups, 3)
    Z = rng.uniform(size=(6, 3))
    product = np.prod([np.ones((20, 6)) if each is None else np.asarray(each(X, Z)) for each in found], axis=0)
    assert_allclose(product, kernel(X, Z), rtol=1e-12)
    for each, group in zip(found, groups, strict=True):
        if each is not None:
            moved = X.copy()
            moved[:, [column for column in range(3) if column not in group]] += 1.0
            assert_allclose(each(moved, Z), each(X, Z), rtol=1e-14)


def test_other_kernels_are_no_products_and_the_part_that_is_none_is_named():
    for kernel, name in (
        (Matern32(0.5), "Matern32"),
        (Select(Matern12(0.5), [0]) + Select(Matern12(0.5), [1]), r"Select\(Matern12, \[0\]\) \+"),
        (Select(Matern12(0.5), [0]) * Select(Matern32(0.5), [0, 1]), "Matern32$"),
    ):
        with pytest.raises(TypeError, match=name):
            factors(kernel, ((0,), (1,)), 2)


def test_a_grid_is_regular_over_the_rows_and_its_last_axis_changes_fastest():
    grid = sgp.InducingGrid.over(X[:, :2], (3, 2))
    low, high = X[:, :2].min(axis=0), X[:, :2].max(axis=0)
    expected = [[a, b] for a in (low[0], 0.5 * (low[0] + high[0]), high[0]) for b in (low[1], high[1])]
    assert_allclose(grid.Z, expected, rtol=1e-6)
    assert_allclose(grid.take(jnp.array([4, 1])).Z, np.asarray(grid.Z)[[4, 1]])
    assert (grid.num_inducing, grid.width) == (6, 2)


@pytest.mark.usefixtures("x64")
def test_what_it_cannot_do_is_refused_with_what_to_do():
    kernel, grid = PROBLEMS["two axes"][1], sgp.InducingGrid.at(ONE, TWO)
    guide = sgp.AutoSVGP(site(kernel, 2, lambda f: dist.Normal(f, 0.5)), grid)
    params = initial_parameters(guide.model, guide, X, Y)
    with pytest.raises(TypeError, match=r"neither take in rows.*`grid.Z`, to `AutoTSVGP`"):
        guide.condition(params, X_NEW, Y[:7])
    with pytest.raises(TypeError, match=r"dense q\(u\), got GridProcess.*Draw values with"):
        guide.sample_functions(jax.random.key(0), params, X, num_samples=2)
    summed = site(kernel, 2, lambda f: dist.Normal(jnp.sum(f) ** 2, 1.0))
    with pytest.raises(ValueError, match="several rows"):
        initial_parameters(summed, sgp.AutoSVGP(summed, grid), X, Y[0])


@pytest.fixture
def joint(x64):
    """Guide and parameters of a posterior far from the prior; mean and covariance of (v, ω), and what w is of ω."""
    grid = sgp.InducingGrid.at(ONE, TWO)
    guide = sgp.AutoSVGP(with_effects, grid)
    own = values(grid.sizes)
    rng = np.random.default_rng(2)
    mu, T, C = rng.normal(size=3), np.tril(0.3 * rng.normal(size=(3, 3))) + 0.5 * np.eye(3), rng.normal(size=(3, 4, 3))
    own |= {"f_auto_latents": mu, "f_auto_latents_sqrt": T, "f_auto_slopes": C}
    start = initial_parameters(with_effects, guide, X, W, Y)
    assert own.keys() <= start.keys()
    params = {**start, **jax.tree.map(jnp.asarray, own)}
    root = np.kron(own["f_auto_R1"], own["f_auto_R2"]) * own["f_auto_s"].ravel()
    moved = T.T @ C.reshape(3, -1)
    S = np.block([[root @ root.T + moved.T @ moved, moved.T @ T.T], [T @ moved, T @ T.T]])
    m = np.concatenate([own["f_auto_m"].ravel(), mu])
    return guide, params, m, S, np.diag([LEVEL[1], EFFECT, EFFECT])


def loadings(grid, rows):
    """A with f = Aᵀv + rest, and the variances of the rest."""
    kernel, Z = PROBLEMS["two axes"][1], np.asarray(grid.Z)
    L = np.linalg.cholesky(np.asarray(kernel(Z, Z)) + JITTER * np.eye(len(Z)))
    A = np.linalg.solve(L, np.asarray(kernel(Z, rows[:, :2])))
    return A, np.asarray(kernel(rows[:, :2], rows[:, :2])) - A.T @ A


def test_with_effects_beside_f_it_is_one_gaussian_as_dense_algebra_has_it(joint):
    guide, params, m, S, scales = joint
    M = len(m) - 3
    A, rest = loadings(guide.inducing, X)
    design = np.c_[np.ones(20), W] @ scales
    B = np.concatenate([A, design.T])
    seen, rest = np.diag(B.T @ S @ B), np.diag(rest)
    error = Y - B.T @ m - LEVEL[0]
    rows = -0.5 * (np.log(2.0 * np.pi * NOISE**2) + (error**2 + seen) / NOISE**2)
    kl = 0.5 * (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1])
    some = slice(0, 5)
    for bound, of_rest in (("titsias", rest / NOISE**2), ("tight", np.log1p(rest / NOISE**2))):
        loss = sgp.QuadratureELBO(bound=bound)
        each = rows - 0.5 * of_rest
        found = loss.loss(jax.random.key(0), params, with_effects, guide, X, W, Y)
        assert_allclose(found, kl - np.sum(each), rtol=1e-9)
        # On a batch, the terms of its rows count N / B times.
        batch = X[some], W[some], Y[some]
        found = loss.loss(jax.random.key(0), params, with_effects, guide, *batch, num_data=20)
        assert_allclose(found, kl - 4.0 * np.sum(each[some]), rtol=1e-9)
    # Elsewhere, whatever the effects are.
    A, rest = loadings(guide.inducing, X_NEW)
    args = X_NEW, W[:7]
    q = guide.posterior(jax.random.key(0), params, *args)["f"]
    process = sgp.process_posterior(guide, jax.random.key(0), params, *args)["f"]
    for found in (q, process.posterior(X_NEW[:, :2])):
        assert_allclose(found.mean, A.T @ m[:M], atol=1e-9)
        assert_allclose(found.covariance(), rest + A.T @ S[:M, :M] @ A, atol=1e-9)
        assert_allclose(found.variance, np.diag(rest + A.T @ S[:M, :M] @ A), atol=1e-9)
        of_u = found.moments.covariance.of_inducing()
        assert_allclose(found.moments.covariance.variance_of_inducing(), np.diag(of_u), rtol=1e-9)
    assert_allclose(q.kl, kl, rtol=1e-9)
    S_v = S[:M, :M]
    kl_v = 0.5 * (np.trace(S_v) + m[:M] @ m[:M] - M - np.linalg.slogdet(S_v)[1])
    assert_allclose(process.posterior(X_NEW[:, :2]).kl, kl_v, rtol=1e-9)
    sd = np.sqrt(np.diag(scales @ S[M:, M:] @ scales))
    low = guide.quantiles(params, [0.16], *args)
    z = -0.994457883209753
    mean = scales @ m[M:]
    assert_allclose(low["level"][0], LEVEL[0] + mean[0] + z * sd[0], rtol=1e-6)
    assert_allclose(low["effects"][0], mean[1:] + z * sd[1:], rtol=1e-6)


def test_the_log_ratio_of_a_draw_with_effects_is_that_of_dense_algebra(joint):
    guide, params, m, S, _ = joint
    M = len(m) - 3
    process = sgp.process_posterior(guide, jax.random.key(0), params, X, W)["f"]
    noise = rng.normal(size=(3, M + 3))
    # v of the process, from which its log ratio is that of N(m, S) against N(0, I).
    T, s = np.asarray(params["f_auto_latents_sqrt"]), np.asarray(params["f_auto_s"]).ravel()
    root = np.kron(params["f_auto_R1"], params["f_auto_R2"]) * s
    v = m[:M] + noise[:, :M] @ root.T + noise[:, M:] @ T.T @ np.asarray(params["f_auto_slopes"]).reshape(3, -1)
    deviation = v - m[:M]
    quadratic = np.sum(deviation * np.linalg.solve(S[:M, :M], deviation.T).T, axis=1)
    expected = 0.5 * (np.sum(v**2, axis=1) - quadratic - np.linalg.slogdet(S[:M, :M])[1])
    assert_allclose(process.log_ratio(noise), expected, rtol=1e-9)
    # Of a draw of v and the latents.
    run = guide.posterior(jax.random.key(1), params, X, W)["f"].joint_run
    z = np.concatenate([np.ravel(run.drawn), run.v])
    expected = 0.5 * (z @ z - (z - m) @ np.linalg.solve(S, z - m) - np.linalg.slogdet(S)[1])
    assert_allclose(run.log_ratio("f", ()), expected, rtol=1e-9)


@pytest.mark.exhaustive
def test_draws_with_effects_have_their_covariance_and_importance_ratios_average_to_the_bound(joint):
    guide, params, m, S, scales = joint
    A, rest = loadings(guide.inducing, X_NEW)
    draws = guide.sample_posterior(jax.random.key(1), params, X_NEW, W[:7], sample_shape=(20_000,))
    found = np.c_[draws["f"], draws["level"], draws["effects"]]
    B = np.block([[A, np.zeros((len(A), 3))], [np.zeros((3, 7)), scales]])
    expected = B.T @ S @ B
    expected[:7, :7] += np.diag(np.diag(rest))  # a likelihood of single rows needs no more
    assert_allclose(found.mean(axis=0), B.T @ m + np.r_[np.zeros(7), LEVEL[0], 0.0, 0.0], atol=0.05)
    of_rest = np.ix_(range(7), range(7))
    difference = np.cov(found.T) - expected
    difference[of_rest] = np.diag(np.diag(difference[of_rest]))
    assert np.max(np.abs(difference)) < 0.06 * np.max(expected)
    svi = SVI(with_effects, guide, optax.adam(0.1), sgp.QuadratureELBO())
    loss = sgp.QuadratureELBO(bound="titsias").loss(jax.random.key(1), params, with_effects, guide, X, W, Y)
    ratios = log_importance_ratios(jax.random.key(3), svi, params, X, W, Y, num_samples=4000)
    assert abs(np.mean(ratios) + loss) < 5.0 * np.std(ratios) / np.sqrt(4000.0)


@pytest.mark.usefixtures("x64")
def test_what_is_joint_can_be_named_and_other_sites_are_warned_of():
    grid = sgp.InducingGrid.at(ONE, TWO)
    named = sgp.AutoSVGP(with_effects, grid, joint=("f", "level"))
    params = initial_parameters(with_effects, named, X, W, Y)
    assert params["f_auto_latents"].shape == (1,)
    assert "effects_auto_loc" in params
    with pytest.raises(TypeError, match="neither take in rows"):
        named.condition(params, X_NEW, W[:7], Y[:7])

    def two(X, y=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        f, g = (numpyro.sample(name, sgp.GaussianProcess(PROBLEMS["two axes"][1], X[:, :2])) for name in "fg")
        numpyro.sample("y", dist.Normal(level + f + g, 0.5), obs=y)

    with pytest.warns(UserWarning, match="several functions with inducing inputs on a grid, in the same terms"):
        initial_parameters(two, sgp.AutoSVGP(two, grid), X, Y)
