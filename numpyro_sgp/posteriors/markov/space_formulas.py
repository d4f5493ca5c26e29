"""Smoothing of Gaussian sites on functions of time and place, in blocks of rows.

With a kernel Σ_p k_t(t, t′) k_s(s, s′), of which one product is written here, places Z of which the covariance is
k_s(Z, Z) = L Lᵀ, and a(s) = L⁻¹k_s(Z, s),

    f(t, s) = Σ_j a_j(s) g_j(t) + r(t, s),        g_j independent processes of time with the kernel k_t,

and r has the prior's covariance k_t (k_s − aᵀa). The state of all g_j is a vector x with transitions A ⊗ I and
covariance P ⊗ I, and row n has its site exp(λ₁ₙ pₙ − ½ wₙ pₙ²) on the projection pₙ = (h ⊗ a(sₙ))ᵀx(tₙ).

Rows are in the order of time, and B of them are a block. Given the state x at the end of the block before, the
projections are p = H x + ε, and the state at its end is x⁺ = A x + e, with S_ε = Var(ε) and U = Cov(e, ε). With x ~
N(m, P), S = H P Hᵀ + S_ε, Φ = A P Hᵀ + U, F = (I + W S)⁻¹, W = diag(w) and Ω = F W,

    filter:    u = F (λ₁ − W H m),   m⁺ = A m + Φ u,   P⁺ = A P Aᵀ + Q − Φ Ω Φᵀ
    smoother:  g = Aᵀg⁺ − Hᵀ(u + Ω Φᵀg⁺),   G = (A − Φ Ω H)ᵀ G⁺ (A − Φ Ω H) + Hᵀ Ω H
    marginals: E p = H m + S u − FᵀΦᵀg⁺,   Cov p = S F − FᵀΦᵀG⁺Φ F

which are the formulas of one row where B = 1.

References:
    Hamelijnck, Wilkinson, Loppi, Solin and Damoulas (2021), "Spatio-temporal variational Gaussian processes", for the
    sparse posterior; they have one site at each time, Σ wₙ aₙaₙᵀ, where there is one for each row here.
"""

from collections.abc import Sequence
import dataclasses

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_sgp.math.linalg import diagonal
from numpyro_sgp.math.products import matmul, matvec, matvec_transposed
from numpyro_sgp.posteriors.markov.formulas import Smoothed, two_passes
from numpyro_sgp.posteriors.markov.state_space import AbstractStateSpace

__all__ = ["SpaceTimeTerm", "prior_covariance", "prior_draws", "prior_variance", "smoothed_in_blocks"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpaceTimeTerm:
    """One product of a kernel of time and a kernel of place, at N rows.

    Attributes:
        time: the process of time, with d numbers.
        a: a(sₙ), (..., M, N).
    """

    time: AbstractStateSpace
    a: Array

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """That of the covariance of its state."""
        return jnp.broadcast_shapes(self.time.covariance.shape[:-2], self.a.shape[:-2])


Terms = Sequence[SpaceTimeTerm]

# Measured on a CPU with 80 numbers in a state: a tenth of the time of blocks of one row, and that of 32.
_BLOCK = 16


def _h(term: SpaceTimeTerm) -> Array:
    return jnp.asarray(term.time.h, term.a.dtype)


def _spread(X: Array, M: int) -> Array:
    """X ⊗ I, (..., d M, d M)."""
    d, eye = X.shape[-1], jnp.eye(M, dtype=X.dtype)
    return (X[..., :, None, :, None] * eye[:, None, :]).reshape(*X.shape[:-2], d * M, d * M)


def _diagonal_blocks(parts: Sequence[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    batch = jnp.broadcast_shapes(*(part.shape[:-2] for part in parts))
    sizes = [part.shape[-1] for part in parts]
    rows = []
    for i, part in enumerate(parts):
        part = jnp.broadcast_to(part, (*batch, *part.shape[-2:]))
        blanks = [jnp.zeros((*batch, sizes[i], size), part.dtype) for size in sizes]
        rows.append(jnp.concatenate([*blanks[:i], part, *blanks[i + 1 :]], axis=-1))
    return jnp.concatenate(rows, axis=-2)


def _moved(As: Sequence[Array], sizes: Sequence[int], X: Array) -> Array:
    """The block-diagonal matrix of A ⊗ I times X, (..., n, k), without making it.

    Args:
        As: A of each term, (..., d, d).
        sizes: M of each term.
        X: of which the rows are those of a state.
    """
    parts, start = [], 0
    for A, M in zip(As, sizes, strict=True):
        d = A.shape[-1]
        part = X[..., start : start + d * M, :]
        moved = matmul(A, part.reshape(*part.shape[:-2], d, -1))
        parts.append(moved.reshape(*moved.shape[:-2], d * M, X.shape[-1]))
        start += d * M
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Block:
    """The projections of a block and the state at its end, given that before it.

    Attributes:
        As: A of each term, (..., d, d).
        Qs: Q of each term, (..., d, d).
        H: (..., B, n).
        S: S_ε, (..., B, B).
        U: (..., n, B).
    """

    As: list[Array]
    Qs: list[Array]
    H: Array
    S: Array
    U: Array


def _block(models: Sequence[AbstractStateSpace], interval: Array, a: Sequence[Array]) -> _Block:
    """Of rows whose intervals from the row before are known, (B,)."""
    passed = jnp.cumsum(interval)
    B = len(interval)
    # From one row to a later one.
    lag = jnp.where(jnp.arange(B)[:, None] < jnp.arange(B), passed - passed[:, None], 0.0)
    As, Qs, H, S, U = [], [], [], [], []
    for model, a_s in zip(models, a, strict=True):
        h = jnp.asarray(model.h, a_s.dtype)
        A, Q = model.transition(passed), model.noise(passed)
        Qh = jnp.sum(Q * h, axis=-1)  # Cov(x, hᵀx) of the time of each row given that of the start, (..., B, d)
        seen = jnp.sum(h[:, None] * A, axis=-2)  # hᵀA, (..., B, d)
        between = model.transition(lag.ravel())
        between = jnp.sum(h[:, None] * between, axis=-2)
        between = between.reshape(*between.shape[:-2], B, B, -1)
        upper = jnp.sum(between * Qh[..., :, None, :], axis=-1)
        upper = jnp.triu(upper)
        both = upper + jnp.triu(upper, 1).mT
        to_end = jnp.sum(model.transition(passed[-1] - passed) * Qh[..., None, :], axis=-1)  # (..., B, d)
        across = a_s.mT  # (..., B, M)
        H.append((seen[..., :, None] * across[..., None, :]).reshape(*_batch(seen, across), B, -1))
        U.append((to_end[..., :, None] * across[..., None, :]).reshape(*_batch(seen, across), B, -1))
        S.append(both * matmul(across, a_s))
        As.append(A[..., -1, :, :])
        Qs.append(Q[..., -1, :, :])
    H, U = (_side_by_side(parts) for parts in (H, U))
    return _Block(As, Qs, H, sum(S[1:], start=S[0]), U.mT)


def _batch(x: Array, y: Array) -> tuple[int, ...]:
    return jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])


def _side_by_side(parts: Sequence[Array]) -> Array:
    batch = jnp.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return jnp.concatenate([jnp.broadcast_to(part, (*batch, part.shape[-1])) for part in parts], axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Update:
    """What the filter leaves for the smoother: of the block alone E p and Cov p = S F; u, F, Ω and Φ."""

    As: list[Array]
    H: Array
    mean: Array
    V: Array
    u: Array
    F: Array
    Omega: Array
    Phi: Array


def _log_determinant(X: Array, V: Array) -> Array:
    """Log|I + W S|; NaN where sites of negative precision leave no Gaussian, as the variances say."""
    sign, value = jnp.linalg.slogdet(X)
    is_gaussian = (sign > 0.0) & jnp.all(diagonal(V) >= 0.0, axis=-1)
    return jnp.where(is_gaussian, value, jnp.nan)


def _backward(sizes: Sequence[int], state: tuple, update: _Update) -> tuple[tuple, tuple[Array, Array]]:
    """Before a block g and G, and the marginals in it."""
    g, G = state
    Phi_t, A_t = update.Phi.mT, [A.mT for A in update.As]
    Phi_g, G_Phi = matvec(Phi_t, g), matmul(G, update.Phi)
    seen = matmul(Phi_t, G_Phi)  # ΦᵀGΦ
    mean = update.mean - matvec_transposed(update.F, Phi_g)
    own = diagonal(update.V)
    variance = own - jnp.sum(update.F * matmul(seen, update.F), axis=-2)
    # (Rows that no site sees, and those of places where a(s) = 0, may have none.)
    variance = jnp.maximum(variance, jnp.finfo(own.dtype).eps * own)
    g = _moved(A_t, sizes, g[..., None])[..., 0] - matvec_transposed(update.H, update.u + matvec(update.Omega, Phi_g))
    # With C = A − ΦΩH, CᵀGC + HᵀΩH = AᵀGA + K H + (K H)ᵀ.
    half = 0.5 * (update.Omega + matmul(update.Omega, matmul(seen, update.Omega)))
    K = matmul(update.H.mT, half) - matmul(_moved(A_t, sizes, G_Phi), update.Omega)
    KH = matmul(K, update.H)
    G = _moved(A_t, sizes, _moved(A_t, sizes, G).mT) + KH + KH.mT
    return (g, 0.5 * (G + G.mT)), (mean, variance)


def smoothed_in_blocks(
    terms: Terms, interval: Array, lambda1: Array, precision: Array, *, block: int = _BLOCK
) -> Smoothed:
    """Marginals of the projections of all rows, and log Z of their sites, in O(N n²) for n numbers in a state.

    Args:
        terms: products of kernels; their leading axes are those of the sites, or broadcast to them.
        interval: from the row before, (N,); that of the first row is not used.
        lambda1: λ₁, (..., N).
        precision: w, (..., N).
        block: B, how many rows are treated at once.
    """
    N, sizes = interval.shape[0], [term.a.shape[-2] for term in terms]
    B = max(min(block, N), 1)
    K = -(-N // B)
    models = [term.time for term in terms]
    # Covariances do not depend on λ₁.
    of_covariance = jnp.broadcast_shapes(*(term.batch_shape for term in terms), precision.shape[:-1])
    batch = jnp.broadcast_shapes(of_covariance, lambda1.shape[:-1])
    of_covariance = (1,) * (len(batch) - len(of_covariance)) + of_covariance
    lambda1 = jnp.broadcast_to(lambda1, (*batch, N))
    w = jnp.broadcast_to(precision, (*of_covariance, N))
    P = _diagonal_blocks([_spread(term.time.covariance, M) for term, M in zip(terms, sizes, strict=True)])
    n, dtype = P.shape[-1], P.dtype
    P = jnp.broadcast_to(P, (*of_covariance, n, n))
    m = jnp.zeros((*batch, n), dtype)

    def in_blocks(x: Array) -> Array:
        """(..., N) as (K, ..., B), with rows of zeros at the end."""
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, K * B - N)])
        return jnp.moveaxis(x.reshape(*x.shape[:-1], K, B), -2, 0)

    rows = (interval.at[0].set(0.0), lambda1, w, *(term.a for term in terms))
    rows = tuple(in_blocks(each) for each in rows)

    def forward(state: tuple, known: tuple) -> tuple[tuple, tuple[_Update, Array]]:
        m, P = state
        interval, lambda1, w, *a = known
        given = _block(models, interval, a)
        H = jnp.broadcast_to(given.H, (*of_covariance, B, n))
        PH = matmul(P, H.mT)
        S, mean = matmul(H, PH) + given.S, matvec(H, m)
        S = 0.5 * (S + S.mT)
        X = jnp.eye(B, dtype=dtype) + w[..., :, None] * S
        F = jnp.linalg.inv(X)
        V, Omega = matmul(S, F), F * w[..., None, :]
        V, Omega = (0.5 * (each + each.mT) for each in (V, Omega))
        left = lambda1 - w * mean
        u, Phi = matvec(F, left), _moved(given.As, sizes, PH) + given.U
        log_z = 0.5 * jnp.sum(left * matvec(V, left), axis=-1) - 0.5 * _log_determinant(X, V)
        log_z = log_z + jnp.sum(mean * (lambda1 - 0.5 * w * mean), axis=-1)
        m = _moved(given.As, sizes, m[..., None])[..., 0] + matvec(Phi, u)
        P = _moved(given.As, sizes, _moved(given.As, sizes, P).mT)
        P = P + _diagonal_blocks([_spread(Q, M) for Q, M in zip(given.Qs, sizes, strict=True)])
        P = P - matmul(matmul(Phi, Omega), Phi.mT)
        P = 0.5 * (P + P.mT)
        return (m, P), (_Update(given.As, H, mean + matvec(V, left), V, u, F, Omega, Phi), log_z)

    found, log_z = two_passes((m, P), rows, forward, lambda state, update: _backward(sizes, state, update))
    mean, variance = (jnp.moveaxis(x, 0, -2) for x in found)
    mean, variance = (x.reshape(*x.shape[:-2], K * B)[..., :N] for x in (mean, variance))
    return Smoothed(mean, variance, log_z)


def prior_covariance(terms: Terms, times: Array) -> Array:
    """Covariance of the projections of R rows under the prior, (..., R, R).

    Args:
        terms: products of kernels, at the rows.
        times: (R,).
    """
    lag = jnp.abs(times[:, None] - times)
    found = []
    for term in terms:
        h, A = _h(term), term.time.transition(lag.ravel())
        k = jnp.sum(h[:, None] * A * jnp.sum(term.time.covariance * h, axis=-1)[..., None, None, :], axis=(-2, -1))
        found.append(k.reshape(*k.shape[:-1], *lag.shape) * matmul(term.a.mT, term.a))
    return sum(found[1:], start=found[0])


def prior_variance(time: AbstractStateSpace, dtype: jax.typing.DTypeLike) -> Array:
    """k_t(t, t), (...)."""
    h = jnp.asarray(time.h, dtype)
    return jnp.sum(h[:, None] * time.covariance * h, axis=(-2, -1))


def prior_draws(terms: Terms, interval: Array, rng_key: Array, batch: tuple[int, ...]) -> Array:
    """Draws of the projections of all rows under the prior, (..., N).

    Args:
        terms: products of kernels.
        interval: from the row before, (N,).
        rng_key: a key.
        batch: axes in front.
    """
    interval = interval.at[0].set(0.0)
    total = jnp.zeros((), terms[0].a.dtype)
    for number, term in enumerate(terms):
        model, M, dtype = term.time, term.a.shape[-2], term.a.dtype
        of_start, of_steps = jax.random.split(jax.random.fold_in(rng_key, number))
        h, root = _h(term), model.root
        x = matmul(root, jax.random.normal(of_start, (*batch, root.shape[-1], M), dtype))
        A, B = (jnp.moveaxis(each, -3, 0) for each in (model.transition(interval), model.noise_root(interval)))

        def step(x: Array, known: tuple, h: Array = h, shape: tuple = (*batch, B.shape[-1], M)) -> tuple[Array, Array]:
            A, B, a, key = known
            x = matmul(A, x) + matmul(B, jax.random.normal(key, shape, x.dtype))
            return x, jnp.sum(jnp.sum(h[:, None] * x, axis=-2) * a, axis=-1)

        known = A, B, jnp.moveaxis(term.a, -1, 0), jax.random.split(of_steps, len(interval))
        total = total + jnp.moveaxis(lax.scan(step, x, known)[1], 0, -1)
    return total
