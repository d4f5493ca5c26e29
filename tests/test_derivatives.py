"""Derivatives that are written out, against automatic differentiation of dense formulas that share nothing with them."""

import re

from grids import representative
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import oracles
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.math import linalg, products
from numpyro_sgp.math.marginal_likelihood import minimax_objective
from numpyro_sgp.posteriors.dual import formulas as dual_formulas
from numpyro_sgp.posteriors.dual import tied
from numpyro_sgp.posteriors.moments import whiten
from numpyro_sgp.posteriors.weight_space import formulas as weight_space_formulas

N, M, D = 7, 5, 2
SIZE = 260  # above the size at which products are split, and no multiple of a block
RNG = np.random.default_rng(0)
X, Z, Z_MOVED = RNG.normal(size=(N, D)), RNG.normal(size=(M, D)), RNG.normal(size=(M, D))
LENGTHSCALE, VARIANCE = np.array([0.9, 1.3]), 1.7
ROOT = np.tril(RNG.normal(size=(M, M)))

KUU = oracles.with_jitter(oracles.se(Z, Z, LENGTHSCALE, VARIANCE), 1e-2)
KUF = oracles.se(Z, X, LENGTHSCALE, VARIANCE)
KUV = oracles.se(Z, Z_MOVED, LENGTHSCALE, VARIANCE)
KFF = np.full(N, VARIANCE)
# At the last datum k_ii − |A_i|² is negative, as rounding can make it: there the value has 0 in its place.
KFF[-1] = 0.9995 * KUF[:, -1] @ np.linalg.solve(KUU, KUF[:, -1])
SITES = (RNG.normal(size=M), ROOT @ ROOT.T)
WEIGHTS = tuple(RNG.normal(size=shape) for shape in ((N,), (N,), (), (N, N), (M, N), (M,), (M, M)))


def symmetric(K):
    return 0.5 * (K + jnp.swapaxes(K, -1, -2))


def marginals(m, S, Kuu, Kuf, kff):
    """Mean, variance, divergence and the covariance less the prior's, of u ~ N(m, S)."""
    V = jnp.linalg.solve(Kuu, Kuf)
    explained, left = Kuf.T @ V, V.T @ S @ V
    kl = 0.5 * (jnp.trace(jnp.linalg.solve(Kuu, S)) + m @ jnp.linalg.solve(Kuu, m) - len(m))
    kl = kl + 0.5 * (jnp.linalg.slogdet(Kuu)[1] - jnp.linalg.slogdet(S)[1])
    return V.T @ m, jnp.maximum(kff - jnp.diag(explained), 0.0) + jnp.diag(left), kl, left - explained


def dense_natural(lambda1, Lambda2, A, kff):
    S = jnp.linalg.inv(jnp.eye(M) + symmetric(Lambda2))
    return marginals(S @ lambda1, S, jnp.eye(M), A, kff)


def dense_tied(lambda1, Lambda2, Kuu, Kuf, kff, Kuv=None):
    Kuu = symmetric(Kuu)
    W = jnp.eye(M) if Kuv is None else jnp.linalg.solve(Kuu, Kuv)
    linear, precision = W @ lambda1, W @ symmetric(Lambda2) @ W.T
    S = jnp.linalg.inv(jnp.linalg.inv(Kuu) + precision)
    values = marginals(S @ linear, S, Kuu, Kuf, kff)
    return *values, jnp.linalg.solve(Kuu, Kuf), linear, precision


def dense_weights(lambda1, Lambda2, Phi, s, limit=np.inf):
    """q(w) ∝ N(w | 0, diag(s)⁻¹) exp(λ₁ᵀw − ½wᵀΛ₂w), both sums tempered near the limit of tr(S⁻¹Λ₂)."""
    alpha = (1.0 + (jnp.trace(Lambda2 / s) / limit) ** 4) ** -0.25
    prior = jnp.diag(1.0 / s)
    S = jnp.linalg.inv(jnp.diag(s) + alpha * symmetric(Lambda2))
    # As a process whose inducing variables are the weights: Kuf = S⁻¹Φᵀ.
    Kuf = prior @ Phi.T
    mean, _, kl, change = marginals(alpha * S @ lambda1, S, prior, Kuf, 0.0)
    return mean, jnp.sum(Phi @ S * Phi, axis=-1), kl, change


def dense_sites(lambda1, Lambda2, K, Kxf, kff):
    """One site for each training input: q(f) by the inverse of I + WK."""
    K = symmetric(K)
    left = jnp.linalg.inv(jnp.eye(M) + Lambda2[:, None] * K)
    alpha = left @ lambda1
    explained = Kxf.T @ left @ (Lambda2[:, None] * Kxf)
    kl = 0.5 * (jnp.trace(left) - M + alpha @ K @ alpha - jnp.linalg.slogdet(left)[1])
    return Kxf.T @ alpha, kff - jnp.diag(explained), kl, -explained


def of_roots(q):
    A, T = q.covariance.A, q.covariance.T
    change = jnp.swapaxes(T, -1, -2) @ T - jnp.swapaxes(A, -1, -2) @ A
    return q.mean, q.variance, q.kl, change


def ours_natural(*arguments):
    return of_roots(dual_formulas.natural_whitened(*arguments))


def ours_dense(lambda1, Lambda2, K, Kxf, kff):
    q = dual_formulas.dual_dense(lambda1, Lambda2, symmetric(K), Kxf, kff)
    return q.mean, q.variance, q.kl, -jnp.swapaxes(q.covariance.A, -1, -2) @ q.covariance.A


def ours_weights(*arguments):
    return of_roots(weight_space_formulas.weight_space(*arguments))


def ours_tied(lambda1, Lambda2, Kuu, *rest):
    q = tied.tied(lambda1, Lambda2, symmetric(Kuu), *rest)
    return *of_roots(q.moments), q.projections(), *q.projected_sites()


BLOCKS = (3, M - 3)
MASK = np.kron(np.eye(2), np.ones((M, M)))[np.ix_(np.r_[0:3, M : 2 * M - 3], np.r_[0:3, M : 2 * M - 3])]


def ours_blocks(lambda1, Lambda2, Kuu, Kuf, kff, Kuv=None):
    q = tied.tied(lambda1, Lambda2, MASK * symmetric(Kuu), Kuf, kff, Kuv, BLOCKS)
    return *of_roots(q.moments), q.projections(), *q.projected_sites()


def dense_blocks(lambda1, Lambda2, Kuu, *rest):
    return dense_tied(lambda1, Lambda2, MASK * Kuu, *rest)


CASES = {
    "natural": (ours_natural, dense_natural, (*SITES, np.linalg.solve(np.linalg.cholesky(KUU), KUF), KFF)),
    "weights": (ours_weights, dense_weights, (*SITES, RNG.normal(size=(N, M)), RNG.uniform(0.5, 2.0, size=M))),
    "dense": (ours_dense, dense_sites, (SITES[0], np.diag(SITES[1]), KUU, KUF, KFF)),
    "projection": (ours_tied, dense_tied, (*SITES, KUU, KUF, KFF)),
    "anchored": (ours_tied, dense_tied, (*SITES, KUU, KUF, KFF, KUV)),
    "blocks": (ours_blocks, dense_blocks, (*SITES, KUU, KUF, KFF + 3.0)),
    "anchored blocks": (ours_blocks, dense_blocks, (*SITES, KUU, KUF, KFF + 3.0, KUV)),
}
every_case = pytest.mark.parametrize(("ours", "dense", "arguments"), CASES.values(), ids=CASES)


def weighted(function):
    """One number from all outputs, squared so that second derivatives see every pair."""

    def scalar(*arguments):
        values = [jnp.sum(w * value) for w, value in zip(WEIGHTS, function(*arguments), strict=False)]
        return sum(values) + 0.1 * sum(value**2 for value in values)

    return scalar


def symmetric_where_square(arrays):
    # Λ₂ and Kuu are symmetric: only symmetric changes, and the symmetric parts of gradients, mean something.
    return tuple(symmetric(x) if x.ndim >= 2 and x.shape[-1] == x.shape[-2] else x for x in arrays)


def direction(arguments, seed=1):
    rng = np.random.default_rng(seed)
    return symmetric_where_square([jnp.asarray(rng.normal(size=np.shape(x))) for x in arguments])


@every_case
@pytest.mark.usefixtures("x64")
def test_values_and_derivatives_of_first_and_second_order_are_those_of_the_dense_formulas(ours, dense, arguments):
    arguments = tuple(map(jnp.asarray, arguments))
    along, across = direction(arguments), direction(arguments, seed=2)

    def everything(function):
        scalar = weighted(function)
        gradient = jax.grad(scalar, argnums=tuple(range(len(arguments))))
        value, tangent = jax.jvp(function, arguments, along)
        _, forward_over_reverse = jax.jvp(gradient, arguments, across)
        return value, tangent, gradient(*arguments), forward_over_reverse

    function = jax.jit(lambda: everything(ours))
    reference = jax.jit(lambda: everything(dense))
    for kind, mine, theirs in zip(("value", "jvp", "vjp", "hvp"), function(), reference(), strict=True):
        if kind in ("vjp", "hvp"):
            mine, theirs = symmetric_where_square(mine), symmetric_where_square(theirs)
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            scale = np.abs(other).max()
            assert_allclose(one, other, rtol=1e-9, atol=1e-9 * scale, err_msg=f"{kind} {index}")


@pytest.mark.usefixtures("x64")
def test_gradients_are_right_where_sites_have_no_precision():
    empty = np.where(np.arange(M) % 2, np.diag(SITES[1]), 0.0)
    arguments = tuple(map(jnp.asarray, (SITES[0], empty, KUU, KUF, KFF)))
    # Without the root of the covariance that the sites explain, which has no derivative there.
    mine, theirs = (
        jax.jit(jax.grad(weighted(lambda *x, f=f: f(*x)[:3]), argnums=(0, 1, 2, 3, 4)))(*arguments)
        for f in (ours_dense, dense_sites)
    )
    for one, other in zip(*map(symmetric_where_square, (mine, theirs)), strict=True):
        assert_allclose(one, other, rtol=1e-9, atol=1e-9 * np.abs(other).max())


@pytest.mark.parametrize(
    ("case", "batched"),
    representative(
        [(case, "all") for case in ("natural", "weights", "anchored", "dense")]
        + [(case, "sites") for case in ("weights", "projection", "dense")],
        [("natural", "all"), ("weights", "sites"), ("projection", "sites"), ("dense", "sites")],
    ),
)
@pytest.mark.usefixtures("x64")
def test_gradients_of_a_batch_are_those_of_its_members(case, batched):
    ours, dense, arguments = CASES[case]
    factors = np.array([1.0, 0.7])
    axes = [0 if batched == "all" or index < 2 else None for index in range(len(arguments))]
    stacked = tuple(
        jnp.asarray(np.multiply.outer(factors, x) if axis == 0 else x) for x, axis in zip(arguments, axes, strict=True)
    )

    def scalar(function):
        def total(*arguments):
            mean, variance, kl, change = function(*arguments)[:4]
            return sum(jnp.sum(w * x) for w, x in zip(WEIGHTS, (mean, variance, kl, change), strict=False))

        return total

    argnums = tuple(range(len(arguments)))
    mine = jax.jit(jax.grad(scalar(ours), argnums))(*stacked)
    theirs = jax.jit(jax.grad(scalar(jax.vmap(dense, axes)), argnums))(*stacked)
    for one, other in zip(*map(symmetric_where_square, (mine, theirs)), strict=True):
        assert one.shape == other.shape
        assert_allclose(one, other, rtol=1e-9, atol=1e-9 * np.abs(other).max())


@pytest.mark.parametrize("case", ["natural", "weights", "anchored", "dense"])
@pytest.mark.usefixtures("x64")
def test_any_subset_of_the_arguments_can_be_differentiated(case):
    ours, _, arguments = CASES[case]
    # A rule is told which tangents are zero; leaving one out must not change what the others give.
    arguments = tuple(map(jnp.asarray, arguments))
    scalar = weighted(ours)
    together = jax.jit(jax.grad(scalar, argnums=tuple(range(len(arguments)))))(*arguments)
    alone = jax.jit(lambda: [jax.grad(scalar, argnums=index)(*arguments) for index in range(len(arguments))])()
    for one, other in zip(alone, together, strict=True):
        assert_allclose(one, other, rtol=1e-9, atol=1e-11 * np.abs(other).max())
    # An optimizer that trains the sites keeps Λ₂ symmetric.
    if alone[1].ndim == 2:
        assert_allclose(alone[1], alone[1].T, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("ours", "dense", "arguments"),
    [
        pytest.param(*case, marks=[] if name in ("natural", "weights", "anchored") else pytest.mark.thorough, id=name)
        for name, case in CASES.items()
    ],
)
def test_gradients_in_float32_are_those_of_float64_to_its_rounding(ours, dense, arguments):
    # Only the outputs that training differentiates; rounding of 6e-8 through matrices of condition 1e3.
    def scalar(*arguments):
        mean, variance, kl = ours(*arguments)[:3]
        return sum(jnp.sum(jnp.asarray(w, x.dtype) * x) for w, x in zip(WEIGHTS, (mean, variance, kl), strict=False))

    argnums = tuple(range(len(arguments)))
    single = jax.jit(jax.grad(scalar, argnums))(*(jnp.asarray(x, jnp.float32) for x in arguments))
    with jax.enable_x64(True):
        double = jax.jit(jax.grad(scalar, argnums))(*map(jnp.asarray, arguments))
    for one, other in zip(single, double, strict=True):
        assert one.dtype == jnp.float32
        assert_allclose(one, other, atol=2e-4 * np.abs(other).max())


@pytest.mark.usefixtures("x64")
def test_whitening_is_differentiated_as_its_factorisation_would_be():
    def ours(Kuu, Kuf):
        L, A = whiten(symmetric(Kuu), Kuf)
        return A, L

    def dense(Kuu, Kuf):
        L = jnp.linalg.cholesky(symmetric(Kuu))
        return jnp.linalg.solve(L, Kuf), L

    weights = RNG.normal(size=(M, N)), RNG.normal(size=(M, M))

    def scalar(function):
        return lambda *arguments: sum(jnp.sum(w * x**2) for w, x in zip(weights, function(*arguments), strict=True))

    arguments = (jnp.asarray(KUU), jnp.asarray(KUF))
    along = direction(arguments)

    def everything(function):
        gradient = jax.grad(scalar(function), (0, 1))
        second = jax.jvp(gradient, arguments, along)[1]
        return *jax.jvp(function, arguments, along)[1], *gradient(*arguments), *second

    for mine, theirs in zip(*(jax.jit(lambda f=f: everything(f))() for f in (ours, dense)), strict=True):
        assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9 * np.abs(theirs).max())


@pytest.mark.usefixtures("x64")
def test_a_failed_factorisation_is_nan_in_values_and_gradients():
    def scalar(Kuu, Kuf):
        q = tied.tied(*SITES, Kuu, Kuf, jnp.asarray(KFF)).moments
        return jnp.sum(q.mean) + jnp.sum(q.variance) + q.kl

    value, gradient = jax.jit(jax.value_and_grad(scalar, (0, 1)))(jnp.asarray(-KUU), jnp.asarray(KUF))
    assert np.isnan(value)
    assert all(np.isnan(g).any() for g in gradient)


@every_case
@pytest.mark.usefixtures("x64")
def test_a_gradient_takes_no_factorisation_beyond_those_of_the_value(ours, dense, arguments):
    def count(function):
        return len(re.findall(r"= cholesky[ \[]", str(jax.make_jaxpr(function)(*map(jnp.asarray, arguments)))))

    def loss(*arguments):
        mean, variance, kl = ours(*arguments)[:3]
        return jnp.sum(mean) + jnp.sum(variance) + kl

    assert count(loss) == count(jax.value_and_grad(loss, argnums=(2, 3))) > 0


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_tempered_sites_are_differentiated_as_the_dense_formula_is():
    limit = 1.0 / np.finfo(float).eps
    size = 0.8 * limit / np.trace(SITES[1])
    _, _, (lambda1, Lambda2, Phi, s) = CASES["weights"]
    # Linear sites of the size at which the mean is of order one.
    arguments = tuple(map(jnp.asarray, (size * lambda1, size * (Lambda2 + np.eye(M)), Phi, s)))
    scales = (size, size, 1.0, 1.0)
    along = tuple(x * scale for x, scale in zip(direction(arguments), scales, strict=True))

    def everything(function):
        scalar = weighted(lambda *values: function(*values)[:3])
        return *jax.jvp(function, arguments, along)[1][:3], *jax.grad(scalar, (0, 1, 2, 3))(*arguments)

    def dense(*arguments):
        return dense_weights(*arguments, limit)

    found, expected = (jax.jit(lambda f=f: everything(f))() for f in (ours_weights, dense))
    untempered = jax.jit(lambda: everything(dense_weights))()
    for index, (mine, theirs, other) in enumerate(zip(found, expected, untempered, strict=True)):
        mine, theirs = symmetric_where_square((mine, theirs))
        scale = np.abs(theirs).max()
        assert_allclose(mine, theirs, rtol=1e-8, atol=1e-8 * scale, err_msg=str(index))
        # The mean is a ratio of two large sums, whose common power it does not see; variance and divergence do.
        assert index not in (1, 2) or np.abs(other - theirs).max() > 1e-3 * scale


@pytest.mark.parametrize("size", [5, SIZE])
@pytest.mark.usefixtures("x64")
def test_the_whitened_minimax_objective_is_differentiated_as_its_factorisation_would_be(size):
    rng = np.random.default_rng(3)
    root, player = np.tril(rng.normal(size=(size, size))) / size**0.5, rng.normal(size=(size, size)) / size
    B, A = 0.5 * (player + player.T), rng.normal(size=(size, N)) / size**0.5
    w, residual = rng.normal(size=size), rng.normal(size=N)
    arguments = tuple(map(jnp.asarray, (w, root, B, A, residual, 0.3, 4.0, 2.2)))

    def dense(w, root, B, A, residual, noise, scale, penalty):
        root = jnp.tril(root)
        P = jnp.eye(size) + root @ root.T
        whitener = jnp.linalg.inv(jnp.linalg.cholesky(noise * P))
        F = scale * A @ A.T + noise * jnp.eye(size)
        D = jnp.eye(size) - whitener @ F @ whitener.T
        misfit, count = residual - A.T @ w, scale * N
        value = scale * misfit @ misfit / noise + w @ w + (count - size) * jnp.log(noise) + count * np.log(2.0 * np.pi)
        return 0.5 * (value + jnp.linalg.slogdet(noise * P)[1] + penalty * jnp.sum(symmetric(B) * D))

    everything = [jax.jit(jax.value_and_grad(f, argnums=tuple(range(8)))) for f in (minimax_objective, dense)]
    (value, gradient), (expected, reference) = (f(*arguments) for f in everything)
    assert_allclose(value, expected, rtol=1e-12)
    assert_array_equal(gradient[1], jnp.tril(gradient[1]))
    gradient, reference = ((*x[:2], symmetric(x[2]), *x[3:]) for x in (gradient, reference))
    for index, (mine, theirs) in enumerate(zip(gradient, reference, strict=True)):
        assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9 * np.abs(theirs).max(), err_msg=str(index))


@pytest.mark.usefixtures("x64")
def test_minimax_gradients_of_several_latents_are_those_of_each():
    rng = np.random.default_rng(4)
    root, B = np.tril(rng.normal(size=(2, M, M))), np.stack([np.eye(M), -np.eye(M)]) / 3.0
    noise, A = np.array([0.3, 0.6]), rng.normal(size=(M, N))  # the features of all latents are the same
    w, residual = rng.normal(size=(2, M)), rng.normal(size=(2, N))
    arguments = tuple(map(jnp.asarray, (w, root, B, A, residual, noise)))

    def total(w, root, B, A, residual, noise):
        return jnp.sum(minimax_objective(w, root, B, A, residual, noise, 4.0, 2.2))

    together = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3, 4, 5)))(*arguments)
    apart = jax.jit(jax.vmap(jax.grad(total, argnums=(0, 1, 2, 3, 4, 5)), in_axes=(0, 0, 0, None, 0, 0)))(*arguments)
    for index, (one, other) in enumerate(zip(together, apart, strict=True)):
        assert_allclose(one, other.sum(0) if index == 3 else other, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.exhaustive
def test_a_gradient_of_hyperparameters_of_weights_makes_one_more_matrix():
    r = 4 * products._SPLIT
    shapes = [jax.ShapeDtypeStruct(shape, np.float64) for shape in ((r,), (r, r), (1, r), (r,))]

    def loss(*arguments):
        mean, variance, kl = ours_weights(*arguments)[:3]
        return jnp.sum(mean) + jnp.sum(variance) + kl

    def flops(function):
        return jax.jit(function).lower(*shapes).compile().cost_analysis()["flops"]

    # P⁻¹ from its root: nine sixteenths of a product of matrices.
    assert flops(jax.grad(loss, argnums=(2, 3))) - flops(loss) < 0.65 * 2 * r**3
    assert flops(jax.grad(loss, argnums=1)) - flops(loss) > 0.65 * 2 * r**3


def halved_diagonal(X):
    """Half of the diagonal, as a matrix."""
    return 0.5 * X * np.eye(X.shape[-1])


@pytest.mark.usefixtures("x64")
def test_products_that_use_triangles_and_symmetry_are_the_plain_products():
    rng = np.random.default_rng(5)
    L = np.tril(rng.normal(size=(2, SIZE, SIZE)))
    W = rng.normal(size=(SIZE, SIZE))
    W = W + W.T
    U, L_t = np.swapaxes(L, -1, -2), np.swapaxes(L, -1, -2)
    assert SIZE > products._SPLIT
    plain = L @ W @ L_t
    assert_allclose(products.mirrored(products.half_congruence(L, W)), plain, rtol=1e-9, atol=1e-8)
    assert_allclose(products.mirrored(products.half_congruence_of_transposed(U, W)), plain, rtol=1e-9, atol=1e-8)
    assert_allclose(products.congruence_of_upper(U, W), U @ W @ L, rtol=1e-9, atol=1e-8)
    assert_allclose(products.gram_of_lower(jnp.asarray(L)), L_t @ L, rtol=1e-9, atol=1e-9)
    assert_allclose(products.gram_of_rows(jnp.asarray(L)), L @ L_t, rtol=1e-9, atol=1e-9)
    assert_allclose(products.symmetric_product(W, W), W @ W, rtol=1e-9, atol=1e-9)
    assert_allclose(products.symmetric_product(jnp.asarray(L @ W), L), plain, rtol=1e-9, atol=1e-8)
    B = rng.normal(size=(SIZE, N))
    assert_allclose(products.lower_product(L, B), L @ B, rtol=1e-9, atol=1e-9)
    assert_allclose(products.upper_product(U, B), U @ B, rtol=1e-9, atol=1e-9)
    assert_allclose(products.lower_product(L, B[:, :1]), L @ B[:, :1], rtol=1e-9, atol=1e-9)
    assert_allclose(
        products.half_product(L, W) + np.triu(L @ W, 1), L @ W - halved_diagonal(L @ W), rtol=1e-9, atol=1e-9
    )
    assert_allclose(products.product_of_lower(L, L[::-1]), L @ L[::-1], rtol=1e-9, atol=1e-9)
    assert_allclose(products.product_with_lower(B.T, L), B.T @ L, rtol=1e-9, atol=1e-9)
    assert_allclose(products.lower_part_of_upper_product(U, W), np.tril(U @ W), rtol=1e-9, atol=1e-9)


def test_a_large_matrix_and_its_transpose_are_added_in_blocks():
    F = np.random.default_rng(6).normal(size=(2, 2 * products._TRANSPOSED + 70, 2 * products._TRANSPOSED + 70))
    assert_array_equal(jax.jit(products.mirrored)(F), F.astype(np.float32) + np.swapaxes(F.astype(np.float32), -1, -2))


@pytest.mark.parametrize("product", [products.lower_product, products.upper_product, products.symmetric_product])
def test_a_product_with_known_zeros_or_symmetry_does_three_quarters_of_the_work(product):
    M = 2 * products._SPLIT
    compiled = jax.jit(product).lower(*2 * [jax.ShapeDtypeStruct((M, M), np.float32)]).compile()
    assert compiled.cost_analysis()["flops"] < 0.76 * 2 * M**3


@pytest.mark.parametrize("transform", [products.by_rows, products.transposed, products.mirrored])
def test_layouts_that_are_asked_for_are_not_those_of_results(transform):
    plain = {
        products.by_rows: lambda x: x,
        products.transposed: lambda x: np.swapaxes(x, -1, -2),
        products.mirrored: lambda x: x + np.swapaxes(x, -1, -2),
    }[transform]
    X = np.arange(175.0, dtype=np.float32).reshape(7, 5, 5)
    for axis in range(3):
        mapped = jax.jit(jax.vmap(transform, axis, axis))(np.moveaxis(X, 0, axis))
        # What operations read, and not what lies in memory.
        assert_array_equal(jnp.moveaxis(mapped, axis, 0) + 0.0, plain(X))
    basis = np.eye(25).reshape(25, 5, 5)
    expected = np.moveaxis(plain(basis), 0, -1).reshape(5, 5, 5, 5)
    for derivative in (jax.jacfwd(transform), jax.jacrev(transform)):
        assert_array_equal(jax.jit(derivative)(X[0]) + 0.0, expected)


@pytest.mark.usefixtures("x64")
def test_a_root_whitens_by_products_in_float64_as_by_solves_in_float32():
    rng = np.random.default_rng(6)
    K = rng.normal(size=(SIZE, 2 * SIZE))
    K = K @ K.T / SIZE
    B, W = rng.normal(size=(SIZE, N)), rng.normal(size=(SIZE, SIZE))
    W = W + W.T
    L = np.linalg.cholesky(K)
    both, unwhitened = (np.linalg.solve(root, np.linalg.solve(root, W).T) for root in (L, L.T))
    plain_b, plain_ub = np.linalg.solve(L, B), np.linalg.solve(L.T, B)

    @jax.jit
    def everything(K, b, w):
        root = linalg.root_of(K)
        assert (root.inverse is None) == (K.dtype == np.float32)
        half = products.mirrored(root.whiten_half(w))
        transpose = jax.linear_transpose(root.whiten_tangent, b)
        vectors = root.whiten(b), root.whiten_tangent(b), root.unwhiten(b), *transpose(b)
        return *vectors, half, root.unwhiten_both(w)

    for dtype, tolerance in ((np.float64, 1e-10), (np.float32, 3e-3)):
        ours = everything(*(jnp.asarray(x, dtype) for x in (K, B, W)))
        for mine, plain in zip(ours, (plain_b, plain_b, plain_ub, plain_ub, both, unwhitened), strict=True):
            assert mine.dtype == dtype
            assert_allclose(mine, plain, rtol=0.0, atol=tolerance * np.abs(plain).max())


@pytest.mark.parametrize("kernel", [sgp.kernels.Matern12, sgp.kernels.Matern32, sgp.kernels.SquaredExponential])
def test_in_few_columns_float32_has_the_gradient_of_its_value_however_wide_the_data_are(kernel):
    rng = np.random.default_rng(0)
    inputs, W = np.sort(rng.uniform(0.0, 1000.0, size=(300, 1)), axis=0), rng.normal(size=(300, 300))

    def weighted(lengthscale, dtype):
        x = jnp.asarray(inputs, dtype)
        return jnp.sum(jnp.asarray(W, dtype) * kernel(lengthscale)(x, x + dtype(0.1)))

    found = jax.grad(weighted)(np.float32(1.0), np.float32)
    with jax.enable_x64(True):
        # At the inputs as float32 has them.
        inputs = np.float64(np.float32(inputs))
        expected = jax.grad(weighted)(np.float64(1.0), np.float64)
    assert_allclose(found, expected, rtol=5e-3)
