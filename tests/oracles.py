"""Dense float64 formulas in NumPy and SciPy: what the package must agree with. Nothing here is imported from it.

A likelihood is a function `log_density(f)`, or `log_density(f, g)` of two latents, that returns one value for each datum
and can be evaluated at complex arguments: its derivatives are taken by a complex step.
"""

import math

import numpy as np
from scipy.linalg import cholesky, solve_triangular
from scipy.optimize import minimize, root


def se(X, Z, lengthscale, variance=1.0):
    """Squared-exponential kernel matrix, (N, M)."""
    difference = (X[:, None, :] - Z[None, :, :]) / np.asarray(lengthscale)
    return variance * np.exp(-0.5 * np.sum(difference**2, axis=-1))


def with_jitter(K, jitter):
    """K + jitter · mean(diag K) · I."""
    return K + jitter * np.mean(np.diag(K)) * np.eye(len(K))


def derivative(fn, step=1e-2):
    """d fn / dt at t = 0 by the central difference of order eight: for smooth fn of scale one its error is 1e-13."""
    coefficients = {1: 4 / 5, 2: -1 / 5, 3: 4 / 105, 4: -1 / 280}
    return sum(c * (fn(k * step) - fn(-k * step)) for k, c in coefficients.items()) / step


# Gaussian algebra.


def gaussian_log_density(y, mean, covariance):
    """log N(y | mean, covariance)."""
    L = cholesky(covariance, lower=True)
    residual = solve_triangular(L, y - mean, lower=True)
    return -0.5 * residual @ residual - np.sum(np.log(np.diag(L))) - 0.5 * len(y) * math.log(2 * math.pi)


def gaussian_kl(m, S, K):
    """KL(N(m, S) ‖ N(0, K)) of dense Gaussians."""
    log_determinants = np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1]
    return 0.5 * (np.trace(np.linalg.solve(K, S)) + m @ np.linalg.solve(K, m) - len(m) + log_determinants)


def conditional(m, S, Kuu, Kuf, Kff):
    """Mean and covariance of ∫ p(f | u) N(u | m, S) du."""
    V = np.linalg.solve(Kuu, Kuf)
    return V.T @ m, Kff - V.T @ Kuf + V.T @ S @ V


def from_whitened_root(m, S_sqrt, Kuu):
    """Mean and covariance of u = L v for v ~ N(m, S_sqrt S_sqrtᵀ)."""
    L = cholesky(Kuu, lower=True)
    return L @ m, L @ S_sqrt @ S_sqrt.T @ L.T


def from_sites(lambda1, Lambda2, Kuu, W):
    """Mean and covariance of q(u) ∝ N(u | 0, Kuu) exp(λ₁ᵀφ − ½ φᵀΛ₂φ) with φ = W u."""
    S = np.linalg.solve(np.eye(len(Kuu)) + Kuu @ W.T @ Lambda2 @ W, Kuu)
    S = 0.5 * (S + S.T)
    return S @ W.T @ lambda1, S


# Gaussian likelihood.


def titsias_bound(Kuu, Kuf, kff, residual, noise):
    """log N(y − mean | 0, Qff + σ²I) − tr(Kff − Qff) / 2σ² (Titsias 2009, equation 9), σ a number or one a row."""
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    return dtc_evidence(Kuu, Kuf, kff, residual, noise) - 0.5 * np.sum((kff - np.diag(Q)) / noise**2)


def tight_bound(Kuu, Kuf, kff, residual, noise):
    """log N(y − mean | 0, Qff + σ²I) − ½ Σ_n log(1 + (k_nn − q_nn)/σ²) (Titsias 2025), σ a number or one a row."""
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    return dtc_evidence(Kuu, Kuf, kff, residual, noise) - 0.5 * np.sum(np.log(1.0 + (kff - np.diag(Q)) / noise**2))


def dtc_evidence(Kuu, Kuf, kff, residual, noise):
    """log N(y − mean | 0, Qff + diag σ²)."""
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    return gaussian_log_density(residual, 0.0, Q + np.diag(np.broadcast_to(noise**2, len(residual))))


def fitc_evidence(Kuu, Kuf, kff, residual, noise):
    """log N(y − mean | 0, Qff + diag(kff − qff) + diag σ²)."""
    q = np.sum(Kuf * np.linalg.solve(Kuu, Kuf), axis=0)
    return dtc_evidence(Kuu, Kuf, kff, residual, np.sqrt(noise**2 + kff - q))


def regression_posterior(Kuu, Kuf, residual, noise):
    """Mean and covariance of q(u) ∝ N(u | 0, Kuu) Π_n N(y_n | k_nuᵀKuu⁻¹u, σ_n²)."""
    V = np.linalg.solve(Kuu, Kuf)
    S = np.linalg.inv(np.linalg.inv(Kuu) + (V / noise**2) @ V.T)
    return S @ V @ (residual / noise**2), S


def gp_regression(K, K_new, K_new_new, residual, noise):
    """Mean and covariance of f(X_new) given y, and log p(y)."""
    Ky = K + noise**2 * np.eye(len(K))
    V = np.linalg.solve(Ky, K_new)
    return V.T @ residual, K_new_new - V.T @ K_new, gaussian_log_density(residual, 0.0, Ky)


# Any likelihood.


def gauss_hermite(num_nodes):
    """Nodes and weights under a standard normal."""
    nodes, weights = np.polynomial.hermite.hermgauss(num_nodes)
    return math.sqrt(2.0) * nodes, weights / math.sqrt(math.pi)


def _grid(num_nodes, dimension):
    """Nodes of each axis, (K^D, 1), and weights, (K^D, 1)."""
    nodes, weights = gauss_hermite(num_nodes)
    axes = [axis.reshape(-1, 1) for axis in np.meshgrid(*[nodes] * dimension, indexing="ij")]
    products = np.ones(1)
    for _ in range(dimension):
        products = np.outer(products, weights).ravel()
    return axes, products[:, None]


def partial_derivative(log_density, values, index):
    """∂ log_density / ∂ f_index, by a complex step."""
    step = 1e-30
    moved = [value + (1j * step if i == index else 0.0) for i, value in enumerate(values)]
    return np.imag(log_density(*moved)) / step


def expected_log_density(log_density, means, variances, num_nodes=20):
    """E[log_density(f, …)] for each datum, with one independent Gaussian for each latent, by a product grid."""
    z, weights = _grid(num_nodes, len(means))
    values = [mean + np.sqrt(variance) * axis for mean, variance, axis in zip(means, variances, z, strict=True)]
    return np.sum(weights * log_density(*values), axis=0)


def expectation_gradients(log_density, means, variances, num_nodes=20):
    """∂/∂mean and ∂/∂variance of `expected_log_density`, for each latent."""
    z, weights = _grid(num_nodes, len(means))
    values = [mean + np.sqrt(variance) * axis for mean, variance, axis in zip(means, variances, z, strict=True)]
    scores = [partial_derivative(log_density, values, index) for index in range(len(means))]
    alpha = [np.sum(weights * score, axis=0) for score in scores]
    by_variance = [
        np.sum(weights * score * axis, axis=0) / (2.0 * np.sqrt(variance))
        for score, axis, variance in zip(scores, z, variances, strict=True)
    ]
    return alpha, by_variance


def elbo(log_density, m, S, Kuu, Kuf, Kff, prior_mean=0.0, scale=1.0, num_nodes=20):
    """scale · Σ_n E_q[log_density(f_n)] − KL(N(m, S) ‖ N(0, Kuu)) for one latent."""
    mean, covariance = conditional(m, S, Kuu, Kuf, Kff)
    ell = expected_log_density(log_density, [mean + prior_mean], [np.diag(covariance)], num_nodes)
    return scale * np.sum(ell) - gaussian_kl(m, S, Kuu)


def optimal_posterior(log_density, blocks, prior_mean=0.0, num_nodes=20, start=0.0):
    """The best dense Gaussian q(u) of each latent: ([(m, S), …], bound), by quasi-Newton steps on mean and root.

    Args:
        log_density: the likelihood, a function of as many latents as there are blocks.
        blocks: for each latent (Kuu, Kuf, kff).
        prior_mean: of every latent.
        num_nodes: of the quadrature rule along each axis.
        start: mean of u to start from, for a bound with several optima.
    """
    roots = [cholesky(Kuu, lower=True) for Kuu, _, _ in blocks]
    bases = [solve_triangular(L, Kuf, lower=True) for L, (_, Kuf, _) in zip(roots, blocks, strict=True)]
    M = len(roots[0])
    lower = np.tril_indices(M)
    size = M + len(lower[0])

    def unpack(x):
        for row in x.reshape(len(blocks), size):
            C = np.zeros((M, M))
            C[lower] = row[M:]
            yield row[:M], C

    def negative(x):
        q = list(unpack(x))
        means = [A.T @ m + prior_mean for (m, _), A in zip(q, bases, strict=True)]
        variances = [
            kff - np.sum(A**2, axis=0) + np.sum((C.T @ A) ** 2, axis=0)
            for (_, C), A, (_, _, kff) in zip(q, bases, blocks, strict=True)
        ]
        value = np.sum(expected_log_density(log_density, means, variances, num_nodes))
        alpha, by_variance = expectation_gradients(log_density, means, variances, num_nodes)
        gradient = []
        for (m, C), A, a, b in zip(q, bases, alpha, by_variance, strict=True):
            value -= 0.5 * (np.sum(C**2) + m @ m - M) - np.sum(np.log(np.abs(np.diag(C))))
            slope = 2.0 * (A * b) @ A.T @ C - C + np.diag(1.0 / np.diag(C))
            gradient += [A @ a - m, slope[lower]]
        return -value, -np.concatenate(gradient)

    means = [solve_triangular(L, np.full(M, start), lower=True) for L in roots]
    x = np.concatenate([np.concatenate([mean, np.eye(M)[lower]]) for mean in means])
    x = minimize(negative, x, jac=True, method="BFGS", options={"gtol": 1e-8, "maxiter": 2000}).x
    # A line search stops at the rounding of the value, which is blind to steps of 1e-8: the last digits are Newton's.
    x = root(lambda x: negative(x)[1], x, method="hybr", options={"xtol": 1e-14}).x
    posteriors = [(L @ m, L @ C @ C.T @ L.T) for L, (m, C) in zip(roots, unpack(x), strict=True)]
    return posteriors, -negative(x)[0]


def log_evidence(log_density, K, mean, covariance, prior_mean=0.0, num_samples=100_000, seed=0):
    """log ∫ Π_n p(y_n | f_n) N(f | prior mean, K) df and its standard error, by importance sampling.

    The proposal is a multivariate Student-t with five degrees of freedom at the given mean and covariance.
    """
    rng = np.random.default_rng(seed)
    dof, N = 5.0, len(K)
    L = cholesky(covariance, lower=True)
    z = rng.normal(size=(num_samples, N)) / np.sqrt(rng.chisquare(dof, size=(num_samples, 1)) / dof)
    f = mean + z @ L.T
    constant = math.lgamma((dof + N) / 2) - math.lgamma(dof / 2) - 0.5 * N * math.log(dof * math.pi)
    log_proposal = constant - np.sum(np.log(np.diag(L))) - 0.5 * (dof + N) * np.log1p(np.sum(z**2, axis=1) / dof)
    L_K = cholesky(K, lower=True)
    residual = solve_triangular(L_K, (f - prior_mean).T, lower=True)
    log_prior = -0.5 * np.sum(residual**2, axis=0) - np.sum(np.log(np.diag(L_K))) - 0.5 * N * math.log(2 * math.pi)
    log_weights = np.sum(log_density(f), axis=1) + log_prior - log_proposal
    largest = np.max(log_weights)
    weights = np.exp(log_weights - largest)
    standard_error = np.std(weights) / np.mean(weights) / math.sqrt(num_samples)
    return largest + math.log(np.mean(weights)), standard_error
