"""Kernels of finite rank against dense algebra, the kernels they approximate, and NumPyro's Hilbert-space formulas."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.contrib.hsgp import laplacian, spectral_densities
import oracles
import pytest

import numpyro_sgp as sgp
from numpyro_sgp import features, kernels
from numpyro_sgp.features.finite_rank import precision_matrix, whitened_features

pytestmark = pytest.mark.usefixtures("x64")

N, M, D = 7, 5, 2
RNG = np.random.default_rng(3)
X, Z = RNG.uniform(-1.0, 1.0, size=(N, D)), RNG.uniform(-1.0, 1.0, size=(M, D))
W = RNG.normal(size=(D, 4))
KEY = jax.random.key(7)
LENGTHSCALE = np.array([0.7, 1.2])


def network(params, X):
    return jnp.tanh(X @ params["W"] + params["b"])


def sine(X):
    return jnp.sin(X)


NETWORK = {"W": W, "b": np.arange(4.0)}
KERNELS = {
    "map": lambda: features.FeatureMap(network, NETWORK, variance=np.array([0.5, 1.0, 2.0, 0.3])),
    "map, one variance": lambda: features.FeatureMap(
        lambda X: jnp.concatenate([X, X**2], axis=-1), variance=0.4, size=4
    ),
    "fourier": lambda: features.RandomFourier(kernels.Matern32(LENGTHSCALE, 1.7), 6, KEY),
    "fourier of a product": lambda: features.RandomFourier(
        2.0 * kernels.SquaredExponential(0.9) * kernels.Select(kernels.Periodic(1.1, 2.0), 0), 6, KEY
    ),
    "inducing": lambda: features.InducingBasis(kernels.SquaredExponential(LENGTHSCALE, 1.3), Z),
    "hilbert": lambda: features.HilbertSpace(kernels.Matern52(LENGTHSCALE, 1.3), (3, 2), (-2.0, (2.0, 2.5))),
    "expanded": lambda: features.Expanded(kernels.Linear() * kernels.Constant(0.3) + kernels.Polynomial(2)),
    "expanded, a sum": lambda: features.Expanded(
        kernels.Sum(features.RandomFourier(kernels.Matern52(0.8), 4, KEY), kernels.Warp(kernels.Linear(), sine))
    ),
}


@functools.cache
def made(name):
    return KERNELS[name]()  # in float64, which is not yet when the module is read


each_kernel = pytest.mark.parametrize("name", KERNELS)


INDEX = np.array([3, 0, 3])


def everything(kernel, X, Z):
    Phi = kernel.features(X)
    return {
        "Phi": Phi,
        "Psi": kernel.features(Z),
        "S": precision_matrix(kernel, Phi.shape[-1]),
        "K": kernel(X, Z),
        "variances": kernel(X),
        "gram": kernel(X, X),
        "whitened": whitened_features(kernel, X) @ whitened_features(kernel, Z).T,
        "Phi at index": kernel.features(X, INDEX),
        "S at index": kernel.prior_precision(INDEX),
        "stacked": kernel(jnp.stack([X, 2.0 * X]), Z),
    }


@functools.cache
def values(name):
    # Random numbers take long to compile: where they are drawn, that is one program for all of these values.
    run = everything if "fourier" in name or "sum" in name else jax.jit(everything)
    found = run(made(name), jnp.asarray(X), jnp.asarray(Z))
    return {key: np.asarray(value) for key, value in found.items()}


@each_kernel
def test_a_kernel_is_the_product_of_its_features_with_the_prior_covariance_of_their_weights(name):
    v = values(name)
    expected = v["Phi"] @ np.linalg.solve(v["S"], v["Psi"].T)
    assert_allclose(v["K"], expected, rtol=1e-8)
    assert_allclose(v["variances"], np.diag(v["Phi"] @ np.linalg.solve(v["S"], v["Phi"].T)), rtol=1e-9)
    assert_allclose(v["gram"], v["Phi"] @ np.linalg.solve(v["S"], v["Phi"].T), rtol=1e-7, atol=1e-10)
    assert_allclose(v["whitened"], expected, rtol=1e-8)
    assert isinstance(made(name), features.FiniteRank)


@each_kernel
def test_features_and_precision_at_an_index_are_those_entries_of_all(name):
    v = values(name)
    assert_allclose(v["Phi at index"], v["Phi"][:, INDEX], rtol=1e-12)
    expected = v["S"][np.ix_(INDEX, INDEX)] if name == "inducing" else np.diag(v["S"])[INDEX]
    assert_allclose(v["S at index"], expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["map, one variance", "fourier", "inducing", "hilbert"])
def test_the_rank_is_the_number_of_features(name):
    assert made(name).rank == values(name)["Phi"].shape[-1]


@each_kernel
def test_a_batch_of_inputs_is_taken_and_a_pickled_kernel_is_the_same(name):
    v = values(name)
    assert v["stacked"].shape == (2, N, M)
    assert_allclose(v["stacked"][0], v["K"], rtol=1e-10)
    if name != "map, one variance":  # a lambda is not pickled
        again = pickle.loads(pickle.dumps(made(name)))
        for ours, expected in zip(jax.tree.leaves(again), jax.tree.leaves(made(name)), strict=True):
            assert_array_equal(ours, expected)
        assert_allclose(again(X[:2], Z), v["K"][:2], rtol=1e-10)


BATCH = np.array([[0.7, 1.2], [0.4, 0.9], [2.0, 1.0]]), np.array([1.7, 0.6, 1.0])


@pytest.mark.parametrize(
    "make",
    [
        lambda ls, v: features.RandomFourier(kernels.Matern32(ls, v) * kernels.Constant(v), 6, KEY),
        lambda ls, v: features.InducingBasis(kernels.SquaredExponential(ls, v), Z),
        lambda ls, v: features.HilbertSpace(kernels.Constant(v) * kernels.Matern12(ls, v), (3, 2), (-2.0, 2.0)),
        lambda ls, v: features.Expanded(kernels.Linear(ls) + kernels.Constant(v)),
    ],
    ids=["fourier", "inducing", "hilbert", "expanded"],
)
def test_a_batch_of_hyperparameters_is_a_batch_of_kernels(make):
    def both(lengthscales, variances):
        batch = make(lengthscales, variances)
        single = [make(lengthscales[c], variances[c]) for c in range(3)]
        return (batch(X, Z), batch(X)), [(kernel(X, Z), kernel(X)) for kernel in single]

    ours, expected = both(*BATCH)
    assert ours[0].shape == (3, N, M)
    for c in range(3):
        for one, other in zip(ours, expected[c], strict=True):
            assert_allclose(one[c], other, rtol=1e-10)


# Random Fourier features.


@pytest.mark.parametrize(
    "kernel",
    [
        kernels.SquaredExponential(LENGTHSCALE, 1.3),
        kernels.Matern12(0.8),
        kernels.RationalQuadratic(0.8, 1.2, 0.7),
        kernels.Periodic(0.9, 2.0) * kernels.Warp(kernels.Matern32(2.0, 0.5), jnp.sin),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_random_features_have_the_kernel_as_their_mean_and_its_variance_exactly(kernel):
    def drawn(key):
        made = features.RandomFourier(kernel, 8, key)
        return made(X, Z), made(X)

    K, variances = jax.jit(jax.vmap(drawn))(jax.random.split(jax.random.key(1), 3000))
    error = np.std(K, axis=0) / np.sqrt(len(K))
    assert np.all(np.abs(np.mean(K, axis=0) - kernel(X, Z)) < 5 * error)
    assert_allclose(variances, np.broadcast_to(kernel(X), variances.shape), rtol=1e-12)


def test_a_few_of_very_many_random_features_need_no_table_of_frequencies():
    rank = 10**9
    kernel = features.RandomFourier(kernels.Matern32(LENGTHSCALE), rank, KEY)
    index = np.array([5, 4, rank - 1, rank - 2])
    Phi = np.asarray(jax.jit(lambda index: kernel.features(X, index))(index))
    assert kernel.prior_precision(index).shape == (4,)
    # A cosine and a sine of one phase each, at the scale of all of them.
    assert_allclose(Phi[:, ::2] ** 2 + Phi[:, 1::2] ** 2, np.full((N, 2), 2.0 / rank), rtol=1e-9)
    assert np.all(np.abs(Phi[:, 0] - Phi[:, 2]) > 0)


def test_the_frequencies_are_those_of_the_key_at_any_lengthscale():
    def Phi(lengthscale, key=KEY, X=X):
        return features.RandomFourier(kernels.Matern32(lengthscale), 6, key).features(X)

    assert_allclose(Phi(0.5), Phi(1.0, X=X / 0.5), rtol=1e-10)
    assert np.max(np.abs(Phi(0.5) - Phi(0.5, jax.random.key(8)))) > 0.1
    ours = jax.jacfwd(Phi)(0.5)
    assert_allclose(ours, oracles.derivative(lambda t: np.asarray(Phi(0.5 + t)), 1e-3), rtol=1e-8, atol=1e-9)


# Hilbert spaces.


DENSITIES = {
    "SquaredExponential": lambda w, ls: spectral_densities.spectral_density_squared_exponential(D, w, 1.3, ls),
    "Matern12": lambda w, ls: spectral_densities.spectral_density_matern(D, 0.5, w, 1.3, ls),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_hilbert_space_features_are_those_of_numpyro(name):
    centre, half = np.array([0.2, -0.1]), np.array([1.5, 2.0])
    kernel = features.HilbertSpace(getattr(kernels, name)(LENGTHSCALE, 1.3), (3, 4), (centre - half, centre + half))
    Phi = laplacian.eigenfunctions(jnp.asarray(X - centre), list(half), [3, 4])
    omega = laplacian.sqrt_eigenvalues(list(half), [3, 4], D).T
    density = jax.vmap(lambda w: DENSITIES[name](w, LENGTHSCALE))(omega)
    assert_allclose(kernel(X, X), (Phi * density) @ Phi.T, rtol=1e-9)
    order = np.argsort(-np.asarray(density))
    assert_allclose(np.sort(kernel.prior_precision()), 1.0 / density[order], rtol=1e-10)


def test_inputs_on_the_sides_of_the_box_are_inside_and_those_beyond_raise():
    box = features.HilbertSpace(kernels.Matern32(1.0), (3, 2), (-2.1, (2.1, 0.7)))
    sides = np.array([[-2.1, -2.1], [2.1, 0.7]])
    for X_inside in (sides, sides.astype(np.float32)):
        assert_allclose(box.features(X_inside), 0.0, atol=1e-6)
    with pytest.raises(ValueError, match=r"reaches from \[-2.1, -2.1\] to .*wider bounds"):
        box.features(sides + np.array([[0.0, 0.0], [0.0, 0.1]]))


@pytest.mark.parametrize(
    ("kernel", "tolerance"),
    [
        (kernels.SquaredExponential(np.array([0.6, 0.8]), 1.3), 1e-6),
        (2.0 * kernels.SquaredExponential(0.7) + kernels.Matern52(0.9), 5e-3),
    ],
)
def test_in_a_large_box_with_many_sines_it_is_the_kernel(kernel, tolerance):
    approximation = features.HilbertSpace(kernel, (40, 40), (-4.0, 4.0))
    assert_allclose(jax.jit(approximation)(X, Z), kernel(X, Z), atol=tolerance)


def test_weights_beyond_the_reach_of_the_spectral_density_are_zero_with_finite_derivatives():
    @jax.jit
    def variance(lengthscale):
        return jnp.sum(features.HilbertSpace(kernels.SquaredExponential(lengthscale), 60, (-2.0, 2.0))(X[:, :1]))

    assert np.isfinite(variance(5.0))
    assert_allclose(jax.grad(variance)(3.0), oracles.derivative(lambda t: variance(3.0 + t)), rtol=1e-7)


# Inducing bases.


def test_an_inducing_basis_is_the_subset_of_regressors():
    kernel = features.InducingBasis(kernels.SquaredExponential(LENGTHSCALE, 1.3), Z, jitter=1e-6)
    Kuu = oracles.with_jitter(oracles.se(Z, Z, LENGTHSCALE, 1.3), 1e-6)
    Kuf = oracles.se(Z, X, LENGTHSCALE, 1.3)
    assert_allclose(kernel(X, X), Kuf.T @ np.linalg.solve(Kuu, Kuf), rtol=1e-7)


# Precision.


@pytest.mark.parametrize("name", ["map", "fourier", "inducing", "hilbert"])
def test_values_keep_the_dtype_of_the_inputs_and_are_of_the_same_kernel(name):
    def narrow(leaf):
        return leaf.astype(np.float32) if np.ndim(leaf) and leaf.dtype == float else leaf

    kernel = jax.tree.map(narrow, made(name))
    X32, Z32 = X.astype(np.float32), Z.astype(np.float32)
    K = jax.jit(lambda kernel: kernel(X32, Z32))(kernel)
    assert K.dtype == np.float32
    assert_allclose(K, values(name)["K"], rtol=2e-3, atol=1e-3)  # 6e-8 times a condition of Kuu of 1e4; jitter 1e-4


# Mistakes.


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: features.RandomFourier(kernels.Matern32(1.0), 5, KEY), ValueError, "`rank` must be even"),
        (
            lambda: features.RandomFourier(kernels.Matern32(1.0), 0, KEY),
            ValueError,
            "`rank` must be a positive integer",
        ),
        (
            lambda: features.RandomFourier(kernels.Matern32(1.0) + kernels.Matern12(1.0), 4, KEY)(X),
            ValueError,
            "takes one product of stationary kernels, got a sum of 2",
        ),
        (lambda: features.RandomFourier(kernels.Linear(), 4, KEY)(X), TypeError, r"spectral density, got \['Linear'\]"),
        (lambda: features.RandomFourier(kernels.White(1.0), 4, KEY)(X), TypeError, "White"),
        (lambda: features.HilbertSpace(kernels.Matern32(1.0), 4, (-1.0, 1.0))(X), ValueError, "one number of freq"),
        (
            lambda: jax.jit(lambda side: features.HilbertSpace(kernels.Matern32(1.0), 4, (-side, side))(X))(2.0),
            TypeError,
            "`bounds` are computed inside the model",
        ),
        (lambda: features.RandomFourier(kernels.Matern32(1.0), 4, 0)(X, X), TypeError, "must be one key, got 0"),
        (lambda: features.HilbertSpace(kernels.Matern32(1.0), (4, 0), (-1.0, 1.0)), ValueError, "positive integer"),
        (lambda: features.HilbertSpace(kernels.Matern32(1.0), (4, 4), (1.0, -1.0)), ValueError, "lower and upper"),
        (
            lambda: features.HilbertSpace(kernels.Matern32(1.0), (4, 4), ((0.0, 0.0, 0.0), 1.0)),
            ValueError,
            "`num_basis` has 2 entries",
        ),
        (
            lambda: features.HilbertSpace(kernels.RationalQuadratic(1.0), (4, 4), (-1.0, 1.0))(X),
            TypeError,
            "RationalQuadratic has no `spectral_density`",
        ),
        (lambda: features.HilbertSpace(kernels.Linear(), (4, 4), (-1.0, 1.0))(X), TypeError, "got Linear"),
        (lambda: features.InducingBasis(kernels.Matern32(1.0), Z[:, 0]), ValueError, "`Z` must have shape"),
        (lambda: features.InducingBasis(kernels.Matern32(1.0), Z[:, :1])(X), ValueError, "`Z` has 1 columns"),
        (lambda: features.FeatureMap(lambda X: X[0])(X), ValueError, "`fn` must map inputs"),
        (lambda: features.FeatureMap(lambda X: X, size=3)(X), ValueError, "returned 2 features a row, but `size` is 3"),
        (lambda: features.FeatureMap(lambda X: X).rank, ValueError, "Pass `size=`"),
        (lambda: features.FeatureMap(lambda X: X).features(X[:, 0]), ValueError, r"`X` must have shape \(N, D\)"),
        (
            lambda: features.as_finite_rank(kernels.Linear() + kernels.Matern32(1.0)),
            TypeError,
            "Matern32 has no features",
        ),
        (lambda: features.as_finite_rank(kernels.White(1.0)), TypeError, "The kernel White has no features"),
        (
            lambda: features.RandomFourier(kernels.Cosine(1.0), 4, jax.random.key(0)).features(X),
            TypeError,
            "^The kernel Cosine has no features.*Known are those of the Matérn kernels",
        ),
    ],
)
def test_mistakes_are_explained(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_stationary_kernel_of_ones_own_has_random_features_once_it_says_how_to_draw_them():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Own(kernels.Stationary):
        lengthscale: float = 0.8
        variance: float = 1.1

        def correlation(self, r2):
            return jnp.exp(-0.5 * r2)

        def frequencies(self, rng_key, num, D, batch_shape, dtype):
            return jax.random.normal(rng_key, (*batch_shape, num, D), dtype)

    K = features.RandomFourier(Own(), 20_000, KEY)(X, Z)
    assert_allclose(K, kernels.SquaredExponential(0.8, 1.1)(X, Z), atol=5 / np.sqrt(10_000))
    with pytest.raises(TypeError, match="Own has no `spectral_density`"):
        features.HilbertSpace(Own(), (2, 2), (-1.0, 1.0))(X)


def test_a_feature_map_takes_part_in_the_model_as_any_kernel():
    prior = sgp.GaussianProcess(made("map") + kernels.Matern32(1.0), X)
    expected = np.asarray(made("map")(X, X) + kernels.Matern32(1.0)(X, X))
    y = RNG.normal(size=N)
    covariance = oracles.with_jitter(expected, 1e-6)
    assert_allclose(prior.log_prob(y), oracles.gaussian_log_density(y, 0.0, covariance), rtol=1e-9)
