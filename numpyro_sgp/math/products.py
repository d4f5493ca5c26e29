"""Matrix products: at full precision, and without what is zero or known of triangular and symmetric matrices.

All products ask for the highest precision, because float32 products on GPUs are otherwise rounded to ten mantissa bits
(TF32).
"""

from functools import partial
import itertools

from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp

__all__ = [
    "by_rows",
    "congruence_of_upper",
    "gram_of_lower",
    "gram_of_rows",
    "half_congruence",
    "half_congruence_of_transposed",
    "half_product",
    "halved",
    "lower_part_of_upper_product",
    "lower_product",
    "lower_product_of_transposed",
    "matmul",
    "matvec",
    "matvec_transposed",
    "mirrored",
    "product_of_lower",
    "product_with_lower",
    "symmetric_product",
    "transposed",
    "upper_product",
]

matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def matvec(A: Array, x: Array) -> Array:
    """A x for A, (..., M, N), and x, (..., N)."""
    return matmul(A, x[..., None])[..., 0]


def matvec_transposed(A: Array, x: Array) -> Array:
    """Aᵀ x for A, (..., M, N), and x, (..., M)."""
    return matmul(x[..., None, :], A)[..., 0, :]


def by_rows(X: Array) -> Array:
    """X, (..., M, N), laid out by rows in memory.

    A factorisation on a CPU asks for columns, and XLA would pass that on to what its argument is made of and what is
    made of its result, where products and sums then copy or read against the grain.
    """
    # JAX gives a result of a compiled function the layout that the function ends with asking for, also where `vmap`
    # has moved its axes, and operations then read it wrongly (0.10, 0.12). Behind the barrier it does not see the wish.
    return lax.optimization_barrier(with_layout_constraint(jnp.asarray(X), Layout(tuple(range(jnp.ndim(X))))))


def transposed(X: Array) -> Array:
    """Xᵀ as an array of its own, (..., N, M) of (..., M, N).

    XLA would otherwise fold the transpose into a product, and on a CPU products with a transposed left factor take
    twice as long.
    """
    return by_rows(by_rows(X).mT)


def halved(G: Array) -> Array:
    """Φ(G): the lower triangle with its diagonal halved, so that G = Φ(G) + Φ(G)ᵀ for symmetric G, (..., M, M)."""
    M = G.shape[-1]
    weights = jnp.tril(jnp.ones((M, M), G.dtype)) - 0.5 * jnp.eye(M, dtype=G.dtype)
    # A choice, not a product: above the diagonal NaN stays out, as it does in a factorisation.
    return jnp.where(weights > 0.0, weights * G, 0.0)


# Below this size the two halves of a triangular matrix are not worth their own products.
_SPLIT = 256

# Up to this size a sum of a matrix and its transpose is one loop. On CPUs, XLA of JAX 0.10 and 0.11 may unroll such a
# loop where it is fused with what is around it: from about 900 rows on, it then overflows the stack of its thread.
_TRANSPOSED = 512


def _split(M: int) -> int:
    return 64 * -(-(M // 2) // 64)


def _strips(M: int) -> list[slice]:
    """Rows of a triangular matrix by quarters: what is zero beside each strip is left out of its product."""
    size = max(128, 64 * -(-M // 256))
    return [slice(start, min(start + size, M)) for start in range(0, M, size)]


def mirrored(F: Array) -> Array:
    """F + Fᵀ, (..., M, M)."""
    M = F.shape[-1]
    if M <= _TRANSPOSED:
        return by_rows(F + F.mT)
    cuts = [*range(0, M, _TRANSPOSED), M]
    spans = [slice(*span) for span in itertools.pairwise(cuts)]
    lower = {
        (i, j): F[..., rows, columns] + F[..., columns, rows].mT
        for i, rows in enumerate(spans)
        for j, columns in enumerate(spans[: i + 1])
    }

    def block(i: int, j: int) -> Array:
        return lower[i, j] if i >= j else lower[j, i].mT

    indices = range(len(spans))
    return jnp.concatenate([jnp.concatenate([block(i, j) for j in indices], axis=-1) for i in indices], axis=-2)


def _assemble(upper_left: Array, lower_left: Array, lower_right: Array) -> Array:
    """[[upper_left, 0], [lower_left, lower_right]] of blocks whose batch axes broadcast."""
    batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in (upper_left, lower_left, lower_right)))
    zeros = jnp.zeros((*batch, upper_left.shape[-2], lower_right.shape[-1]), lower_left.dtype)
    blocks = (upper_left, zeros, lower_left, lower_right)
    blocks = [jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in blocks]
    return jnp.concatenate([jnp.concatenate(blocks[:2], axis=-1), jnp.concatenate(blocks[2:], axis=-1)], axis=-2)


def _half_congruence(A: Array, C: Array, D: Array, W: Array) -> Array:
    """Φ(X W Xᵀ) for X = [[A, 0], [C, D]] and symmetric W: nine of the sixteen products of half the size."""
    h = A.shape[-1]
    W11, W12, W21, W22 = W[..., :h, :h], W[..., :h, h:], W[..., h:, :h], W[..., h:, h:]
    A_t, C_t, D_t = (x.mT for x in (A, C, D))
    left = matmul(C, W11) + matmul(D, W21)
    right = matmul(C, W12) + matmul(D, W22)
    return _assemble(
        halved(matmul(matmul(A, W11), A_t)), matmul(left, A_t), halved(matmul(left, C_t) + matmul(right, D_t))
    )


def half_congruence(X: Array, W: Array) -> Array:
    """Φ(X W Xᵀ) for lower triangular X and symmetric W, (..., M, M)."""
    M = X.shape[-1]
    if M < _SPLIT:
        return halved(matmul(X, matmul(W, X.mT)))
    h = _split(M)
    return _half_congruence(X[..., :h, :h], X[..., h:, :h], X[..., h:, h:], W)


def half_congruence_of_transposed(U: Array, W: Array) -> Array:
    """Φ(Uᵀ W U) for upper triangular U, (..., M, M): as a linear map of W, one whose transpose is quick."""
    M = U.shape[-1]
    if M < _SPLIT:
        return halved(matmul(U.mT, matmul(W, U)))
    h = _split(M)
    A, C, D = (x.mT for x in (U[..., :h, :h], U[..., :h, h:], U[..., h:, h:]))
    return _half_congruence(A, C, D, W)


def congruence_of_upper(U: Array, W: Array) -> Array:
    """U W Uᵀ for upper triangular U and symmetric W, (..., M, M)."""
    M = U.shape[-1]
    U_t = U.mT
    if M < _SPLIT:
        return matmul(U, matmul(W, U_t))
    h = _split(M)
    A, C, D = U[..., :h, :h], U[..., :h, h:], U[..., h:, h:]
    A_t, C_t, D_t = (x.mT for x in (A, C, D))
    W11, W12, W21, W22 = W[..., :h, :h], W[..., :h, h:], W[..., h:, :h], W[..., h:, h:]
    upper = matmul(W11, A_t) + matmul(W12, C_t)
    lower = matmul(W21, A_t) + matmul(W22, C_t)
    return mirrored(
        _assemble(halved(matmul(A, upper) + matmul(C, lower)), matmul(D, lower), halved(matmul(D, matmul(W22, D_t))))
    )


def gram_of_lower(X: Array) -> Array:
    """Xᵀ X for lower triangular X, (..., M, M)."""
    return mirrored(_half_gram_of_columns(X, transposed(X)))


def _half_gram_of_columns(X: Array, U: Array) -> Array:
    """Φ(U X) for lower triangular X and U = Xᵀ."""
    M = X.shape[-1]
    if M < _SPLIT:
        return halved(matmul(U, X))
    h = _split(M)
    C, D, C_t, D_t = X[..., h:, :h], X[..., h:, h:], U[..., :h, h:], U[..., h:, h:]
    upper_left = _half_gram_of_columns(X[..., :h, :h], U[..., :h, :h]) + half_product(C_t, C)
    return _assemble(upper_left, upper_product(D_t, C), _half_gram_of_columns(D, D_t))


def gram_of_rows(X: Array) -> Array:
    """X Xᵀ for lower triangular X, (..., M, M)."""
    return mirrored(_half_gram_of_rows(X))


def _half_gram_of_rows(X: Array) -> Array:
    M, X_t = X.shape[-1], X.mT
    if M < _SPLIT:
        return halved(matmul(X, X_t))
    h = _split(M)
    A, C, D = X[..., :h, :h], X[..., h:, :h], X[..., h:, h:]
    C_t = C.mT
    below = _product_with_upper(C, A.mT)
    return _assemble(_half_gram_of_rows(A), below, half_product(C, C_t) + _half_gram_of_rows(D))


def half_product(X: Array, Y: Array) -> Array:
    """Φ(X Y), (..., M, M): what is above the diagonal is not computed, but in small blocks."""
    M = X.shape[-2]
    if M < _SPLIT:
        return halved(matmul(X, Y))
    h = _split(M)
    below = matmul(X[..., h:, :], Y[..., :, :h])
    return _assemble(half_product(X[..., :h, :], Y[..., :, :h]), below, half_product(X[..., h:, :], Y[..., :, h:]))


def symmetric_product(X: Array, Y: Array) -> Array:
    """X Yᵀ where it is known to be symmetric, (..., M, M): only its lower half is computed, and mirrored."""
    return mirrored(_half_product_of_rows(X, Y))


def _half_product_of_rows(X: Array, Y: Array) -> Array:
    """Φ(X Yᵀ), (..., M, M)."""
    M = X.shape[-2]
    if M < _SPLIT:
        return halved(matmul(X, Y.mT))
    h = _split(M)
    below = matmul(X[..., h:, :], Y[..., :h, :].mT)
    upper, lower = (_half_product_of_rows(X[..., rows, :], Y[..., rows, :]) for rows in (slice(h), slice(h, M)))
    return _assemble(upper, below, lower)


def product_of_lower(X: Array, Y: Array) -> Array:
    """X Y for lower triangular X and Y, (..., M, M), which is lower triangular."""
    M = X.shape[-1]
    if M < _SPLIT:
        return matmul(X, Y)
    h = _split(M)
    A, C, D = X[..., :h, :h], X[..., h:, :h], X[..., h:, h:]
    E, F, G = Y[..., :h, :h], Y[..., h:, :h], Y[..., h:, h:]
    return _assemble(product_of_lower(A, E), product_with_lower(C, E) + lower_product(D, F), product_of_lower(D, G))


def product_with_lower(B: Array, X: Array) -> Array:
    """B X for lower triangular X, (..., M, M), and B, (..., N, M)."""
    M = X.shape[-1]
    if M < _SPLIT:
        return matmul(B, X)
    h = _split(M)
    left = product_with_lower(B[..., :h], X[..., :h, :h]) + matmul(B[..., h:], X[..., h:, :h])
    return jnp.concatenate([left, product_with_lower(B[..., h:], X[..., h:, h:])], axis=-1)


def lower_part_of_upper_product(U: Array, B: Array) -> Array:
    """The lower triangle, with its diagonal, of U B for upper triangular U, (..., M, M), and B, (..., M, M)."""
    M = U.shape[-1]
    if M < _SPLIT:
        return jnp.tril(matmul(U, B))
    h = _split(M)
    A, C, D = U[..., :h, :h], U[..., :h, h:], U[..., h:, h:]
    upper, lower = B[..., :h, :h], B[..., h:, :h]
    return _assemble(
        lower_part_of_upper_product(A, upper) + jnp.tril(matmul(C, lower)),
        upper_product(D, lower),
        lower_part_of_upper_product(D, B[..., h:, h:]),
    )


def lower_product(X: Array, B: Array) -> Array:
    """X B for lower triangular X, (..., M, M), and B, (..., M, N)."""
    M = X.shape[-1]
    if M < _SPLIT or B.shape[-1] == 1:
        return matmul(X, B)
    parts = [matmul(X[..., rows, : rows.stop], B[..., : rows.stop, :]) for rows in _strips(M)]
    return jnp.concatenate(parts, axis=-2)


def upper_product(U: Array, B: Array) -> Array:
    """U B for upper triangular U, (..., M, M), and B, (..., M, N)."""
    M = U.shape[-1]
    if M < _SPLIT or B.shape[-1] == 1:
        return matmul(U, B)
    parts = [matmul(U[..., rows, rows.start :], B[..., rows.start :, :]) for rows in _strips(M)]
    return jnp.concatenate(parts, axis=-2)


def _product_with_upper(B: Array, U: Array) -> Array:
    """B U for upper triangular U, (..., M, M), and B, (..., N, M)."""
    M = U.shape[-1]
    if M < _SPLIT:
        return matmul(B, U)
    h = _split(M)
    return jnp.concatenate([matmul(B[..., :h], U[..., :h, :h]), matmul(B, U[..., :, h:])], axis=-1)


def lower_product_of_transposed(U: Array, B: Array) -> Array:
    """Uᵀ B for upper triangular U: as a linear map of B, one whose transpose is quick."""
    # JAX transposes a product with the cotangent as its left factor, which must not be contracted over its first axis.
    M, B_t = U.shape[-1], transposed(B)
    if M < _SPLIT:
        return transposed(matmul(B_t, U))
    strips = _strips(M)
    parts = zip(jnp.split(B_t, [rows.start for rows in strips[1:]], axis=-1), strips, strict=True)
    products = (_behind(rows.start, matmul(part, U[..., rows, rows.start :])) for part, rows in parts)
    return transposed(sum(products, start=next(products)))


def _behind(columns: int, B: Array) -> Array:
    """[0, B] with so many columns of zeros."""
    return jnp.pad(B, [(0, 0)] * (B.ndim - 1) + [(columns, 0)])
