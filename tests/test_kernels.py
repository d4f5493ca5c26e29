"""Kernels against pointwise formulas in float64 NumPy, and the promises of their interface."""

import math
import pickle
import subprocess
import sys

from grids import representative
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

from numpyro_sgp.kernels import (
    Constant,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    Product,
    RationalQuadratic,
    Select,
    SquaredExponential,
    Sum,
    Warp,
    White,
)

N, M, D, BATCH = 7, 5, 2, 3
STATIONARY = [SquaredExponential, Matern12, Matern32, Matern52, RationalQuadratic]
SMOOTH = [SquaredExponential, Matern32, Matern52, RationalQuadratic]


def inputs(rows, width=D, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(dtype)


# The oracle: one pair of points at a time, in float64 NumPy.


def distance(x, z, lengthscale):
    return math.sqrt(sum((x_d - z_d) ** 2 / l_d**2 for x_d, z_d, l_d in zip(x, z, full(lengthscale, x), strict=True)))


def full(value, x):
    return np.broadcast_to(np.asarray(value, np.float64), x.shape)


def se(x, z, lengthscale, variance):
    return variance * math.exp(-(distance(x, z, lengthscale) ** 2) / 2)


def matern12(x, z, lengthscale, variance):
    return variance * math.exp(-distance(x, z, lengthscale))


def matern32(x, z, lengthscale, variance):
    a = math.sqrt(3) * distance(x, z, lengthscale)
    return variance * (1 + a) * math.exp(-a)


def matern52(x, z, lengthscale, variance):
    a = math.sqrt(5) * distance(x, z, lengthscale)
    return variance * (1 + a + a**2 / 3) * math.exp(-a)


def rational_quadratic(x, z, lengthscale, variance, alpha=1.0):
    return variance * (1 + distance(x, z, lengthscale) ** 2 / (2 * alpha)) ** -alpha


def periodic(x, z, lengthscale, period, variance):
    terms = (np.sin(np.pi * (x - z) / full(period, x)) / full(lengthscale, x)) ** 2
    return variance * math.exp(-2 * terms.sum())


def linear(x, z, variance):
    return sum(v * x_d * z_d for v, x_d, z_d in zip(full(variance, x), x, z, strict=True))


def polynomial(x, z, degree, variance, offset):
    return (linear(x, z, variance) + offset) ** degree


def constant(x, z, variance):
    return variance


def white(x, z, variance):
    return variance if all(x_d == z_d for x_d, z_d in zip(x, z, strict=True)) else 0.0


def pairs(function, X, Z, *args):
    X, Z = np.asarray(X, np.float64), np.asarray(Z, np.float64)
    return np.array([[function(x, z, *args) for z in Z] for x in X])


ARD = np.array([0.7, 1.9])
# (kernel class, oracle, positional arguments of both)
CASES = {
    "se": (SquaredExponential, se, (0.8, 1.7)),
    "se-ard": (SquaredExponential, se, (ARD, 1.7)),
    "matern12": (Matern12, matern12, (0.8, 1.7)),
    "matern12-ard": (Matern12, matern12, (ARD, 1.7)),
    "matern32": (Matern32, matern32, (0.8, 1.7)),
    "matern32-ard": (Matern32, matern32, (ARD, 1.7)),
    "matern52": (Matern52, matern52, (0.8, 1.7)),
    "matern52-ard": (Matern52, matern52, (ARD, 1.7)),
    "rational-quadratic": (RationalQuadratic, rational_quadratic, (0.8, 1.7, 0.6)),
    "rational-quadratic-ard": (RationalQuadratic, rational_quadratic, (ARD, 1.7, 2.5)),
    "periodic": (Periodic, periodic, (0.8, 1.3, 1.7)),
    "periodic-ard": (Periodic, periodic, (ARD, np.array([1.3, 2.1]), 1.7)),
    "linear": (Linear, linear, (1.7,)),
    "linear-ard": (Linear, linear, (ARD,)),
    "polynomial": (Polynomial, polynomial, (3, 0.7, 1.2)),
    "polynomial-ard": (Polynomial, polynomial, (2, ARD, 0.0)),
    "constant": (Constant, constant, (1.7,)),
    "white": (White, white, (1.7,)),
}
every_case = pytest.mark.parametrize(("kernel", "oracle", "args"), CASES.values(), ids=CASES)


@pytest.mark.usefixtures("x64", "strict_promotion")
@every_case
def test_matrix_is_the_formula_at_each_pair(kernel, oracle, args):
    X, Z = inputs(N), np.concatenate([inputs(M - 2, seed=1), inputs(N)[:2]])
    assert_allclose(kernel(*args)(X, Z), pairs(oracle, X, Z, *args), rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("x64", "strict_promotion")
@every_case
def test_diagonal_is_the_diagonal_of_the_matrix(kernel, oracle, args):
    X = inputs(N)
    assert_allclose(kernel(*args)(X), np.diagonal(pairs(oracle, X, X, *args)), rtol=1e-13)
    assert_allclose(kernel(*args)(X), jnp.diagonal(kernel(*args)(X, X)), rtol=1e-13)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("width", [3, 4, 40])
@pytest.mark.parametrize(
    ("kernel", "oracle"),
    [(SquaredExponential, se), (Matern12, matern12), (Matern32, matern32), (Matern52, matern52)],
    ids=lambda value: value.__name__,
)
def test_formula_holds_at_any_width(kernel, oracle, width):
    # Widths on both sides of the switch from differences to products.
    X, Z = inputs(N, width), np.concatenate([inputs(M, width, seed=1), inputs(N, width)[:1]])
    lengthscale = np.linspace(0.6, 1.4, width) * math.sqrt(width)
    # Cancellation in |x|² + |z|² − 2xᵀz costs √D ε |x|², and the root of Matérn-1/2 is far from 0 but at equal rows.
    assert_allclose(kernel(lengthscale, 1.7)(X, Z), pairs(oracle, X, Z, lengthscale, 1.7), rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kernel", STATIONARY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [2, 9])
def test_equal_rows_have_exactly_the_variance_of_the_diagonal(kernel, dtype, width):
    X = inputs(N, width, dtype=dtype) * 10
    k = kernel(np.asarray(0.3, dtype), np.asarray(1.7, dtype))
    assert_array_equal(k(X), np.full(N, 1.7, dtype))
    assert_array_equal(jnp.diagonal(k(X, np.concatenate([X, X]))), np.full(N, 1.7, dtype))


@pytest.mark.usefixtures("x64")
def test_rational_quadratic_tends_to_squared_exponential():
    X, Z = inputs(N), inputs(M, seed=1)
    # The difference is r⁴ / 8α of the value.
    assert_allclose(RationalQuadratic(0.8, 1.7, 1e10)(X, Z), SquaredExponential(0.8, 1.7)(X, Z), rtol=2e-8)


@pytest.mark.usefixtures("x64")
def test_periodic_kernel_repeats_after_each_period():
    X, Z, period = inputs(N), inputs(M, seed=1), np.array([1.3, 2.1])
    k = Periodic(0.8, period, 1.7)
    assert_allclose(k(X + 4 * period, Z), k(X, Z), rtol=1e-13)


# Batches


def batches():
    rng = np.random.default_rng(3)

    def positive(*shape):
        return rng.uniform(0.5, 2.0, shape)

    stationary = {
        f"{kernel.__name__}-{name}": (kernel, fields)
        for kernel in STATIONARY
        for name, fields in {
            "variance": {"variance": positive(BATCH), "lengthscale": positive(D)},
            "isotropic": {"variance": 1.3, "lengthscale": positive(BATCH, 1)},
            "ard": {"variance": positive(BATCH), "lengthscale": positive(BATCH, D)},
        }.items()
    }
    return stationary | {
        "alpha": (RationalQuadratic, {"lengthscale": 0.8, "alpha": positive(BATCH)}),
        "period": (Periodic, {"lengthscale": 0.8, "period": positive(BATCH, 1)}),
        "periodic": (
            Periodic,
            {"lengthscale": positive(BATCH, D), "period": positive(D), "variance": positive(BATCH)},
        ),
        "linear": (Linear, {"variance": positive(BATCH, 1)}),
        "linear-ard": (Linear, {"variance": positive(BATCH, D)}),
        "polynomial": (
            lambda variance, offset: Polynomial(2, variance, offset),
            {"variance": positive(D), "offset": positive(BATCH)},
        ),
        "constant": (Constant, {"variance": positive(BATCH)}),
        "white": (White, {"variance": positive(BATCH)}),
    }


BATCHES = batches()


@pytest.mark.usefixtures("x64", "strict_promotion")
@pytest.mark.parametrize(("kernel", "fields"), BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("batched_inputs", [False, True])
def test_batch_is_the_loop_over_its_members(kernel, fields, batched_inputs):
    X, Z = inputs(N), inputs(M, seed=1)
    members = [
        kernel(**{name: value[i] if np.shape(value)[:1] == (BATCH,) else value for name, value in fields.items()})
        for i in range(BATCH)
    ]
    Xs = np.stack([X + i for i in range(BATCH)]) if batched_inputs else [X] * BATCH
    K = kernel(**fields)(Xs if batched_inputs else X, Z)
    diagonal = kernel(**fields)(Xs if batched_inputs else X)
    assert_allclose(K, np.stack([member(X, Z) for member, X in zip(members, Xs, strict=True)]), rtol=1e-12)
    assert_allclose(diagonal, np.stack([member(X) for member, X in zip(members, Xs, strict=True)]), rtol=1e-12)


@pytest.mark.usefixtures("x64", "strict_promotion")
@every_case
def test_second_argument_may_carry_the_batch(kernel, oracle, args):
    X, Zs = inputs(N), np.stack([inputs(M, seed=seed) for seed in range(BATCH)])
    expected = np.stack([pairs(oracle, X, Z, *args) for Z in Zs])
    assert_allclose(kernel(*args)(X, Zs), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("x64", "strict_promotion")
def test_batches_of_the_parts_of_a_sum_and_a_product_broadcast():
    X, Z = inputs(N), inputs(M, seed=1)
    variances, lengthscales = np.array([0.5, 1.0, 2.0]), np.array([[0.4], [0.9]])
    left, right = Matern32(0.7, variances), SquaredExponential(lengthscales[:, None], 1.3)
    a = np.stack([pairs(matern32, X, Z, 0.7, v) for v in variances])[None]
    b = np.stack([pairs(se, X, Z, lengthscale, 1.3) for lengthscale in lengthscales])[:, None]
    assert_allclose((left + right)(X, Z), a + b, rtol=1e-12)
    assert_allclose((left * right)(X, Z), a * b, rtol=1e-12)
    assert (left + right)(X).shape == (left * right)(X).shape == (2, 3, N)


# Sums, products, features, columns


@pytest.mark.usefixtures("x64", "strict_promotion")
def test_operators_add_and_multiply_values():
    X, Z = inputs(N), inputs(M, seed=1)
    a, b = SquaredExponential(0.8, 1.7), Linear(0.6)
    A, B = pairs(se, X, Z, 0.8, 1.7), pairs(linear, X, Z, 0.6)
    assert_allclose((a + b)(X, Z), A + B, rtol=1e-12)
    assert_allclose((a * b)(X, Z), A * B, rtol=1e-12)
    assert_allclose((2.0 * a + b * 3 + 0.1)(X, Z), 2 * A + 3 * B + 0.1, rtol=1e-12)
    assert_allclose(sum([a, b])(X, Z), A + B, rtol=1e-12)
    assert_allclose((a + b)(X), 1.7 + 0.6 * (X**2).sum(axis=1), rtol=1e-12)
    assert_allclose((a * b)(X), 1.7 * 0.6 * (X**2).sum(axis=1), rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("number", [2, 2.0, np.float64(2.0), np.array(2.0), np.array([2.0, 3.0, 4.0])], ids=repr)
@pytest.mark.parametrize("convert", [lambda number: number, jnp.asarray], ids=["python", "jax"])
def test_numbers_on_either_side_are_constants(number, convert):
    X, Z, number = inputs(N), inputs(M, seed=1), convert(number)
    K, factor = pairs(se, X, Z, 0.8, 1.7), np.asarray(number)[..., None, None]
    k = SquaredExponential(0.8, 1.7)
    for product in (number * k, k * number):
        assert_allclose(product(X, Z), K * factor, rtol=1e-12)
    for total in (number + k, k + number):
        assert_allclose(total(X, Z), K + factor, rtol=1e-12)


@pytest.mark.parametrize("other", ["2", None, [1.0]])
def test_operators_refuse_what_is_neither_number_nor_kernel(other):
    with pytest.raises(TypeError, match="unsupported operand"):
        SquaredExponential(1.0) + other
    with pytest.raises(TypeError, match=r"unsupported operand|can't multiply"):
        other * SquaredExponential(1.0)


@pytest.mark.usefixtures("x64")
def test_a_plain_callable_adds_on_either_side():
    X, Z = inputs(N), inputs(M, seed=1)

    def one(X, Z=None):
        return jnp.ones(X.shape[0]) if Z is None else jnp.ones((X.shape[0], Z.shape[0]))

    K = pairs(se, X, Z, 0.8, 1.0)
    for kernel in (one + SquaredExponential(0.8), SquaredExponential(0.8) + one):
        assert isinstance(kernel, Sum)
        assert_allclose(kernel(X, Z), K + 1, rtol=1e-12)
        assert_allclose(kernel(X), np.full(N, 2.0), rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_tinygp_kernels_take_part_in_sums_products_warps_and_selections():
    tinygp = pytest.importorskip("tinygp")
    X, Z = inputs(N), inputs(M, seed=1)
    foreign = tinygp.kernels.Exp(scale=0.9, distance=tinygp.kernels.distance.L2Distance())
    ours = SquaredExponential(0.8, 1.7)
    A, B = pairs(se, X, Z, 0.8, 1.7), pairs(matern12, X, Z, 0.9, 1.0)
    for kernel in (ours + foreign, Sum(foreign, ours)):
        assert_allclose(kernel(X, Z), A + B, rtol=1e-12)
        assert_allclose(kernel(X), np.full(N, 2.7), rtol=1e-12)
    for kernel in (ours * foreign, Product(foreign, ours)):
        assert_allclose(jax.jit(lambda kernel: kernel(X, Z))(kernel), A * B, rtol=1e-12)
    assert_allclose(Warp(foreign, lambda X: 2 * X)(X, Z), pairs(matern12, 2 * X, 2 * Z, 0.9, 1.0), rtol=1e-12)
    assert_allclose(Select(foreign, 1)(X, Z), pairs(matern12, X[:, 1:], Z[:, 1:], 0.9, 1.0), rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_values_equal_those_of_tinygp():
    tinygp = pytest.importorskip("tinygp")
    X, Z = inputs(N), inputs(M, seed=1)
    euclidean = tinygp.kernels.distance.L2Distance()
    twins = [
        (SquaredExponential(0.8), tinygp.kernels.ExpSquared(scale=0.8, distance=euclidean)),
        (Matern12(0.8), tinygp.kernels.Exp(scale=0.8, distance=euclidean)),
        (Matern32(0.8), tinygp.kernels.Matern32(scale=0.8, distance=euclidean)),
        (Matern52(0.8), tinygp.kernels.Matern52(scale=0.8, distance=euclidean)),
        (RationalQuadratic(0.8, alpha=0.6), tinygp.kernels.RationalQuadratic(scale=0.8, alpha=0.6, distance=euclidean)),
        (Linear(), tinygp.kernels.DotProduct()),
        (Polynomial(3, 1 / 0.8**2, 0.7**2), tinygp.kernels.Polynomial(order=3, scale=0.8, sigma=0.7)),
        (Constant(1.7), tinygp.kernels.Constant(1.7)),
    ]
    for ours, theirs in twins:
        assert_allclose(ours(X, Z), theirs(X, Z), rtol=1e-12)
        assert_allclose(ours(X), theirs(X), rtol=1e-12)
    # One column: tinygp's periodic kernel has sin² of the norm, ours the sum of sin² over columns.
    theirs = tinygp.kernels.ExpSineSquared(scale=1.3, gamma=2 / 0.8**2)
    assert_allclose(Periodic(0.8, 1.3)(X[:, :1], Z[:, :1]), theirs(X[:, :1], Z[:, :1]), rtol=1e-12)


@pytest.mark.usefixtures("x64", "strict_promotion")
@pytest.mark.parametrize("dims", [(2, 0), [2, 0], np.array([2, 0]), (-1, -3)], ids=repr)
def test_select_is_the_kernel_on_those_columns(dims):
    X, Z = inputs(N, 3), inputs(M, 3, seed=1)
    k = Select(SquaredExponential(ARD, 1.7), dims)
    assert_allclose(k(X, Z), pairs(se, X[:, [2, 0]], Z[:, [2, 0]], ARD, 1.7), rtol=1e-12)
    assert_allclose(k(X), np.full(N, 1.7))


@pytest.mark.usefixtures("x64")
def test_select_takes_a_slice_or_one_column():
    X, Z = inputs(N, 3), inputs(M, 3, seed=1)
    expected = pairs(matern32, X[:, 1:], Z[:, 1:], 0.8, 1.0)
    assert_allclose(Select(Matern32(0.8), slice(1, None))(X, Z), expected, rtol=1e-12)
    assert_allclose(Select(Matern32(0.8), 1)(X, Z), pairs(matern32, X[:, 1:2], Z[:, 1:2], 0.8, 1.0), rtol=1e-12)
    assert hash(jax.tree.structure(Select(Matern32(0.8), slice(1, None)))) is not None  # `jit` needs it


def test_a_slice_and_its_triple_are_different_selections():
    triple, cut = (jax.tree.structure(Select(Matern32(0.8), dims)) for dims in ((0, 2, 1), slice(0, 2, 1)))
    assert triple != cut


@pytest.mark.usefixtures("x64", "strict_promotion")
def test_warp_is_the_kernel_of_the_features():
    X, Z, W = inputs(N), inputs(M, seed=1), inputs(D, 4, seed=2)
    k = Warp(SquaredExponential(0.8, 1.7), lambda X: jnp.tanh(X @ W))
    assert_allclose(k(X, Z), pairs(se, np.tanh(X @ W), np.tanh(Z @ W), 0.8, 1.7), rtol=1e-12)
    assert_allclose(k(X), np.full(N, 1.7))
    assert_allclose(k(np.stack([X, X + 1]), Z), np.stack([k(X, Z), k(X + 1, Z)]), rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_warp_by_a_closure_over_traced_values_has_their_gradient():
    X, Z, W = inputs(N), inputs(M, seed=1), inputs(D, 4, seed=2)

    def total(W, consume):
        return consume(Warp(SquaredExponential(0.8), lambda X: jnp.tanh(X @ W)))

    expected = jax.grad(lambda W: SquaredExponential(0.8)(jnp.tanh(X @ W), jnp.tanh(Z @ W)).sum())(W)
    consumers = {
        "call": lambda k: k(X, Z).sum(),
        "jit": lambda k: jax.jit(lambda k: k(X, Z).sum())(k),
        "vmap": lambda k: jax.vmap(lambda k, x: k(x[None], Z).sum(), in_axes=(None, 0))(k, X).sum(),
        "scan": lambda k: jax.lax.scan(lambda k, x: (k, k(x[None], Z).sum()), k, X)[1].sum(),
    }
    for consume in consumers.values():
        gradient = jax.jit(jax.grad(lambda W, consume=consume: total(W, consume)))
        assert_allclose(gradient(W), expected, rtol=1e-10)
    for _ in range(2):  # without an outer `jit` the closure is a new object with a new trace each time
        assert_allclose(jax.grad(lambda W: total(W, consumers["jit"]))(W), expected, rtol=1e-10)


@pytest.mark.usefixtures("x64")
def test_warp_by_a_pytree_shows_its_arrays_and_is_not_compiled_again():
    X, Z = inputs(N), inputs(M, seed=1)

    def features(weights, X):
        return jnp.tanh(X @ weights["W"]) * weights["scale"]

    def kernel(seed):
        weights = {"W": inputs(D, 4, seed=seed), "scale": 2.0}
        return Warp(SquaredExponential(0.8), jax.tree_util.Partial(features, weights))

    traces = []

    @jax.jit
    def total(k):
        traces.append(None)
        return k(X, Z).sum()

    for seed in (2, 3):
        F, G = (2.0 * np.tanh(inputs @ kernel(seed).fn.arrays.args[0]["W"]) for inputs in (X, Z))
        assert_allclose(total(kernel(seed)), pairs(se, F, G, 0.8, 1.0).sum(), rtol=1e-12)
    assert len(traces) == 1
    gradient = jax.grad(total)(kernel(2))
    assert [leaf.shape for leaf in jax.tree.leaves(gradient)] == [(), (), (D, 4), ()]


@pytest.mark.usefixtures("x64")
def test_warp_by_a_module_with_functions_among_its_leaves_crosses_jit():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        weight: jax.Array
        activation: object

        def __call__(self, X):
            return self.activation(X @ self.weight)

    X, Z, W = inputs(N), inputs(M, seed=1), inputs(D, 4, seed=2)
    k = Warp(SquaredExponential(0.8), Net(jnp.asarray(W), jnp.tanh))
    expected = pairs(se, np.tanh(X @ W), np.tanh(Z @ W), 0.8, 1.0)
    assert_allclose(jax.jit(lambda k: k(X, Z))(k), expected, rtol=1e-12)
    stacked = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * BATCH), k)
    axes = jax.tree.map(lambda _: 0, stacked)
    assert_allclose(jax.vmap(lambda k: k(X, Z), in_axes=(axes,))(stacked), [expected] * BATCH, rtol=1e-12)


def test_warps_by_the_same_function_have_equal_structure_and_others_not():
    def same(X):
        return X

    class Net:
        def apply(self, X):
            return X

        def __eq__(self, other):
            raise AssertionError

        __hash__ = None

    net = Net()
    structures = [jax.tree.structure(Warp(Matern12(1.0), fn)) for fn in (same, same, lambda X: X, net.apply, net.apply)]
    assert structures[0] == structures[1] != structures[2]
    assert structures[3] == structures[4]
    assert hash(structures[0]) == hash(structures[1])


# Positive semi-definite, gradients, precision


def squash(X):
    return jnp.tanh(X)


def many_kernels():
    stationary = [kernel(0.8, 1.7) for kernel in STATIONARY]
    rest = [Periodic(0.8, 1.3), Linear(ARD), Polynomial(3, 0.7, 1.2), Constant(1.7), White(1.7)]
    combined = [
        Matern32(0.8) * Linear() + 0.1,
        Warp(Matern52(0.8), squash),
        Select(Matern12(0.8), (1,)),
    ]
    return [*stationary, *rest, *combined]


every_kernel = pytest.mark.parametrize("kernel", many_kernels(), ids=lambda kernel: type(kernel).__name__)


@pytest.mark.usefixtures("x64")
@every_kernel
def test_matrix_of_points_with_duplicates_is_positive_semidefinite(kernel):
    X = np.concatenate([inputs(40), inputs(40)[:7]])
    K = np.asarray(kernel(X, X))
    assert_allclose(K, K.T, rtol=1e-12, atol=1e-14)
    eigenvalues = np.linalg.eigvalsh(K)
    assert_allclose(np.minimum(eigenvalues, 0.0), 0.0, atol=1e-13 * eigenvalues[-1])


@pytest.mark.usefixtures("x64")
@every_kernel
@pytest.mark.parametrize("dtype", representative([np.float32, np.float64], [np.float32]))
@pytest.mark.parametrize("width", representative([2, 5], [2]))
def test_gradients_at_coincident_points_are_finite(kernel, dtype, width):
    if width == 1:
        kernel = {Linear: Linear(0.7), Select: Select(Matern12(0.8), (0,))}.get(type(kernel), kernel)
    if width == 5 and isinstance(kernel, Linear):
        kernel = Linear(0.7)
    kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), kernel)
    X = np.concatenate([inputs(M, width, dtype=dtype)] * 2)

    def total(kernel, X, Z):
        return kernel(X, Z).sum() + kernel(X).sum()

    for gradient in jax.tree.leaves(jax.jit(jax.grad(total, argnums=(0, 1, 2)))(kernel, X, X)):
        assert gradient.dtype == dtype
        assert_array_equal(jnp.isfinite(gradient), True)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kernel", SMOOTH)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", representative([1, 2, 5], [2]))
def test_second_derivatives_at_coincident_points_are_finite(kernel, dtype, width):
    X = np.concatenate([inputs(2, width, dtype=dtype)] * 2)
    parameters = (jnp.asarray(0.8, dtype), jnp.asarray(1.7, dtype), X, X)

    def total(lengthscale, variance, X, Z):
        return kernel(lengthscale, variance)(X, Z).sum()

    # The Hessian times ones: a NaN in any of its entries is one in the product.
    gradient = jax.grad(total, argnums=(0, 1, 2, 3))
    _, second = jax.jit(lambda *x: jax.jvp(gradient, x, jax.tree.map(jnp.ones_like, x)))(*parameters)
    for leaf in second:
        assert_array_equal(jnp.isfinite(leaf), True)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize(
    ("kernel", "curvature"),
    # −d²k/dx² at r = 0 for ℓ = σ_f² = 1: −2 g'(0)
    [(SquaredExponential, 1.0), (Matern32, 3.0), (Matern52, 5.0 / 3.0), (RationalQuadratic, 1.0)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_prior_variance_of_the_slope_is_right_at_distance_zero(kernel, curvature, width):
    # Cov(∂f/∂x, ∂f/∂z) at x = z, the covariance of a GP's derivative; other rows keep the centre away from x.
    Z, lengthscale = inputs(M, width), np.linspace(0.7, 1.4, width)

    def covariance(x, z):
        return kernel(lengthscale, 1.7)(x[None], jnp.asarray(Z).at[0].set(z))[0, 0]

    second = jax.jit(jax.jacfwd(jax.jacrev(covariance, argnums=0), argnums=1))(Z[0], Z[0])
    assert_allclose(second, 1.7 * curvature * np.diag(lengthscale**-2.0), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("kernel", "oracle", "args"),
    [case for case in CASES.values() if case[0] is not White],  # which is not continuous
    ids=[name for name in CASES if name != "white"],
)
def test_gradient_of_the_matrix_is_its_finite_difference(kernel, oracle, args):
    X, Z = inputs(N), inputs(M, seed=1)
    Z[0] = X[0] + 1e-3
    static, numbers = (args[:1], args[1:]) if kernel is Polynomial else ((), args)
    weights = inputs(N, M, seed=4)
    values, unravel = jax.flatten_util.ravel_pytree((tuple(np.asarray(a, np.float64) for a in numbers), X, Z))

    def total(values):
        numbers, X, Z = unravel(values)
        return jnp.sum(weights * kernel(*static, *numbers)(X, Z))

    def oracle_total(values):
        numbers, X, Z = jax.tree.map(np.asarray, unravel(jnp.asarray(values)))
        return np.sum(weights * pairs(oracle, X, Z, *static, *numbers))

    step, unit = 1e-6, np.eye(len(values))
    differences = [(oracle_total(values + step * e) - oracle_total(values - step * e)) / (2 * step) for e in unit]
    # Central differences of step h: h² k''' / 6 + ε/h, with k''' up to 1e3 where Matérn-1/2 is 1e-3 from its kink.
    assert_allclose(jax.jit(jax.grad(total))(values), differences, rtol=2e-7, atol=2e-8)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kernel", STATIONARY)
@pytest.mark.parametrize("width", [2, 5])
def test_gradient_is_zero_at_distance_zero(kernel, width):
    # All of k(x_n, x_n) is flat in ℓ and in x; for Matérn-1/2 that is the definition at its kink.
    X = inputs(N, width) * 10

    def diagonal(lengthscale, X, Z):
        return jnp.trace(kernel(lengthscale)(X, Z))

    for gradient in jax.jit(jax.grad(diagonal, argnums=(0, 1, 2)))(0.8, X, X):
        # 2 (x − z) is a difference of products; ε |x|/ℓ² is what rounding leaves of it.
        assert_allclose(gradient, 0.0, atol=1e-11)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kernel", [Matern32, Matern52])
def test_gradient_with_respect_to_lengthscale_is_continuous_at_distance_zero(kernel):
    def slope(distance):
        X, Z = np.zeros((1, 1)), np.full((1, 1), distance)
        return jax.grad(lambda lengthscale: kernel(lengthscale)(X, Z)[0, 0])(0.8)

    assert_allclose(slope(0.0), 0.0, atol=0.0)
    # dk/dℓ = c r²/ℓ + O(r³), r = 1e-6 / 0.8, with c = 3 and 5/3
    expected = {Matern32: 3.0, Matern52: 5.0 / 3.0}[kernel] * (1e-6 / 0.8) ** 2 / 0.8
    assert_allclose(slope(1e-6), expected, rtol=1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("width", [2, 6])
@pytest.mark.parametrize(
    ("kernel", "oracle"),
    [(SquaredExponential, se), (Matern12, matern12), (Matern32, matern32), (Matern52, matern52)],
    ids=lambda value: value.__name__,
)
def test_float32_inputs_far_from_the_origin_keep_their_distances(kernel, oracle, width):
    X = (inputs(N, width) * 5 + 1e6).astype(np.float32)
    Z = (inputs(M, width, seed=1) * 5 + 1e6).astype(np.float32)
    K = kernel(np.float32(10.0), np.float32(1.7))(X, Z)
    assert K.dtype == np.float32
    # float32: ten roundings of 6e-8 in a distance of order one.
    assert_allclose(K, pairs(oracle, X, Z, 10.0, 1.7), rtol=2e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("width", [2, 6])
def test_a_row_far_away_leaves_the_digits_of_the_others(width):
    # A column that is constant but for rounding, scaled by its standard deviation, gives rows like this one.
    X, Z = inputs(N, width).astype(np.float32), inputs(M, width, seed=1).astype(np.float32)
    X[0, 0] = 1e17
    kernel = SquaredExponential(np.float32(1.3))
    expected = pairs(se, X, Z, 1.3, 1.0)
    assert_allclose(kernel(X, Z), expected, rtol=2e-6)
    assert_allclose(kernel(Z, X), expected.T, rtol=2e-6)
    assert_allclose(kernel(X, X), pairs(se, X, X, 1.3, 1.0), rtol=2e-6)


@pytest.mark.usefixtures("x64")
def test_float32_periodic_kernel_far_from_the_origin_keeps_its_phase():
    X, Z = ((inputs(n, 2, seed=n) * 5 + 1e6).astype(np.float32) for n in (N, M))
    K = Periodic(np.float32(1.1), np.float32(7.0), np.float32(1.7))(X, Z)
    # float32: angles up to 2π · 2 with rounding 5e-7, in an exponent of slope up to 4.
    assert_allclose(K, pairs(periodic, X, Z, 1.1, 7.0, 1.7), rtol=5e-6)


# dtype, transformations, trees


@pytest.mark.usefixtures("x64", "strict_promotion")
@every_kernel
@pytest.mark.parametrize("dtype", representative([np.float32, np.float64], [np.float32]))
def test_python_float_hyperparameters_follow_the_dtype_of_the_inputs(kernel, dtype):
    if isinstance(kernel, Linear):
        kernel = Linear(0.7)
    X, Z = inputs(N, dtype=dtype), inputs(M, seed=1, dtype=dtype)
    assert kernel(X).dtype == kernel(X, Z).dtype == dtype
    assert jax.jit(kernel.__class__.__call__)(kernel, X, Z).dtype == dtype
    assert jax.jit(lambda kernel, X: kernel(X))(kernel, X).dtype == dtype


@pytest.mark.usefixtures("x64")
@every_kernel
def test_float64_hyperparameters_promote_float32_inputs(kernel):
    kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), kernel)
    X, Z = inputs(N, dtype=np.float32), inputs(M, seed=1, dtype=np.float32)
    assert kernel(X).dtype == kernel(X, Z).dtype == np.float64


@pytest.mark.usefixtures("x64")
def test_integer_inputs_become_floats():
    X = np.arange(2 * N).reshape(N, 2)
    assert_allclose(SquaredExponential(3.0)(X, X[:M]), pairs(se, X, X[:M], 3.0, 1.0), rtol=1e-12)
    assert_allclose(White(3.0)(X, X[:M]), pairs(white, X, X[:M], 3.0), rtol=1e-12)


@pytest.mark.usefixtures("x64")
@every_kernel
def test_jit_does_not_change_values(kernel):
    X, Z = inputs(N), inputs(M, seed=1)
    assert_allclose(jax.jit(lambda kernel, X: kernel(X))(kernel, X), kernel(X), rtol=1e-12)
    K = jax.jit(lambda kernel, X, Z: kernel(X, Z))(kernel, X, Z)
    assert_allclose(K, kernel(X, Z), rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("x64")
@every_kernel
def test_flattening_and_building_again_gives_the_same_kernel(kernel):
    X, Z = inputs(N), inputs(M, seed=1)
    leaves, structure = jax.tree.flatten(kernel)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(kernel)
    assert jax.tree.structure(again) == structure
    assert_array_equal(again(X, Z), kernel(X, Z))
    assert_array_equal(pickle.loads(pickle.dumps(kernel))(X, Z), kernel(X, Z))


@every_kernel
def test_structure_survives_placeholders(kernel):
    # NumPyro, `vmap` and `eval_shape` put None, objects and shapes in place of arrays: no constructor may look at them.
    structure = jax.tree.structure(kernel)
    for placeholder in (object(), jax.ShapeDtypeStruct((), jnp.float32), 0):
        assert jax.tree.structure(jax.tree.map(lambda _, p=placeholder: p, kernel)) == structure
    jax.tree.map(lambda _: None, kernel)


@pytest.mark.usefixtures("x64")
def test_vmap_over_a_tree_of_kernels_is_the_batch():
    X, Z = inputs(N), inputs(M, seed=1)
    lengthscale, variance = np.array([0.5, 0.9, 1.3]), np.array([1.0, 2.0, 3.0])
    mapped = jax.vmap(lambda kernel: kernel(X, Z))(Matern52(lengthscale, variance))
    assert_allclose(mapped, Matern52(lengthscale[:, None], variance)(X, Z), rtol=1e-12)


# NaN and White


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in many_kernels() if not isinstance(kernel, Constant | Select | Linear)],
    ids=lambda kernel: type(kernel).__name__,
)
def test_nan_in_a_row_passes_through_to_its_row_and_no_other(kernel, width):
    X, Z = inputs(N, width), inputs(M, width, seed=1)
    X[2, 0], Z[1, -1] = np.nan, np.nan
    expected = np.zeros((N, M), bool)
    expected[2], expected[:, 1] = True, True
    assert_array_equal(np.isnan(kernel(X, Z)), expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kernel", STATIONARY)
@pytest.mark.parametrize("width", [2, 5])
def test_nan_in_a_hyperparameter_passes_through_with_its_gradient(kernel, width):
    X, Z = inputs(N, width), inputs(M, width, seed=1)
    for arguments in ((math.nan, 1.0), (0.8, math.nan)):
        assert_array_equal(jnp.isnan(kernel(*arguments)(X, Z)), True)
    assert_array_equal(jnp.isnan(jax.grad(lambda lengthscale: kernel(lengthscale)(X, Z).sum())(math.nan)), True)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("width", [1, 2, 19])
def test_white_is_the_variance_at_equal_rows_only(width):
    X = inputs(N, width)
    Z = np.concatenate([X[[3, 3]], X[:3]])
    Z[3, -1] = np.nextafter(Z[3, -1], 9.0)  # equal in all columns but the last
    expected = pairs(white, X, Z, 1.7)
    assert expected.sum() == 4 * 1.7
    assert_array_equal(White(1.7)(X, Z), expected)
    assert_array_equal(White(1.7)(X), np.full(N, 1.7))


def test_no_array_over_all_pairs_and_columns_is_made():
    X, Z = jnp.zeros((70, 9)), jnp.zeros((50, 9))

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            for variable in equation.outvars:
                yield math.prod(variable.aval.shape)
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)

    for kernel in [*many_kernels()[:7], *many_kernels()[8:]]:
        kernel = Linear() if isinstance(kernel, Linear) else kernel
        jaxpr = jax.make_jaxpr(jax.grad(lambda X, Z, kernel=kernel: kernel(X, Z).sum(), argnums=(0, 1)))(X, Z)
        assert max(sizes(jaxpr.jaxpr)) <= 70 * 50


# Errors


@pytest.mark.parametrize(
    "kernel", [SquaredExponential(1.0), Constant(1.0), Linear(), White(1.0) + Periodic(1.0, 1.0)], ids=str
)
def test_one_dimensional_inputs_are_refused(kernel):
    with pytest.raises(ValueError, match=r"`X` must have shape \(N, D\), got \(7,\). For one input use X\[:, None\]"):
        kernel(jnp.zeros(7))
    with pytest.raises(ValueError, match=r"`Z` must have shape \(N, D\), got \(5,\). For one input use Z\[:, None\]"):
        kernel(jnp.zeros((7, 1)), jnp.zeros(5))


def test_inputs_of_different_width_are_refused():
    with pytest.raises(ValueError, match=r"same number of columns, got shapes \(7, 2\) and \(5, 3\)"):
        Matern32(1.0)(jnp.zeros((7, 2)), jnp.zeros((5, 3)))


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (SquaredExponential(np.ones(3)), "lengthscale"),
        (Periodic(np.ones(3), 1.0), "lengthscale"),
        (Periodic(1.0, np.ones(3)), "period"),
        (Linear(np.ones(3)), "variance"),
        (Polynomial(2, np.ones(3)), "variance"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_hyperparameters_of_another_width_are_refused(kernel, name):
    match = rf"`{name}` has shape \(3,\), but its last axis must be 1 or D = 2.*C isotropic kernels need shape \(C, 1\)"
    with pytest.raises(ValueError, match=match):
        kernel(jnp.zeros((7, 2)))
    with pytest.raises(ValueError, match=match):
        jax.jit(kernel)(jnp.zeros((7, 2)), jnp.zeros((5, 2)))


@pytest.mark.parametrize("degree", [0, -1, 1.5, True])
def test_polynomial_degree_must_be_a_positive_integer(degree):
    with pytest.raises(ValueError, match="`degree` must be a positive Python integer, got"):
        Polynomial(degree)


@pytest.mark.parametrize("dims", [(2,), (-3,), (0, 5), (), slice(2, 1)], ids=repr)
def test_select_refuses_columns_out_of_range(dims):
    with pytest.raises(ValueError, match=r"`dims` must name at least one of the D = 2 columns"):
        Select(Matern32(1.0), dims)(jnp.zeros((7, 2)))


@pytest.mark.parametrize("dims", [(0.5,), "ab", (True, False), 1.0], ids=repr)
def test_select_refuses_dims_that_are_not_integers(dims):
    with pytest.raises(TypeError, match=r"`dims` must be column numbers|as an integer"):
        Select(Matern32(1.0), dims)


@pytest.mark.parametrize(
    "fn",
    [lambda X: X[:, 0], lambda X: X.sum(), lambda X: X.T],
    ids=["vector", "scalar", "transposed"],
)
def test_warp_refuses_features_without_a_row_for_each_input(fn):
    with pytest.raises(ValueError, match=r"`fn` must map inputs \(N, D\) to features \(N, D'\).*jax.vmap"):
        Warp(Matern32(1.0), fn)(jnp.zeros((7, 2)))


def test_abstract_kernels_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Kernel()


def test_importing_makes_no_array():
    code = "import jax, numpyro_sgp.kernels; assert not jax.live_arrays(); assert not jax.config.jax_enable_x64"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
