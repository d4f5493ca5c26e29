"""The dense Gaussian over both bases of a decoupled posterior, and what the parameters of a guide stand for in it."""

import dataclasses

import numpy as np
import oracles
from problems import JITTER, LENGTHSCALE, MEAN, NOISE, VARIANCE, Model, N, X, Z

from numpyro_sgp.posteriors.decoupled.coefficients import Coefficients
from numpyro_sgp.posteriors.sites import TiedSites

M_GAMMA, Y = 4, Model().y
GAMMA = np.random.default_rng(5).uniform(-1.2, 1.2, size=(M_GAMMA, X.shape[1]))


class Dense:
    """Prior covariance of h, and what the letters of the formulas mean in it."""

    def __init__(self, beta=Z, gamma=GAMMA, lengthscale=LENGTHSCALE, variance=VARIANCE, jitter=JITTER, kind=None):
        h = np.concatenate([beta, gamma])
        self.inputs, self.M, self.hypers = h, len(beta), (lengthscale, variance)
        self.Khh = oracles.se(h, h, lengthscale, variance)
        noise = np.full(len(h), jitter * variance)
        if kind != "solve":
            noise[self.M :] = 0.0  # of the second Gaussian block only
        self.Khh += np.diag(noise)
        self.Kuu, self.Kug = self.Khh[: self.M, : self.M], self.Khh[: self.M, self.M :]
        self.Kgg = self.Khh[self.M :, self.M :]
        self.L = np.linalg.cholesky(self.Kuu)
        self.P = np.linalg.solve(self.Kuu, self.Khh[: self.M]).T  # E[h | u] = P u
        self.C = self.Kgg - self.P[self.M :] @ self.Kug

    def Khf(self, inputs):
        return oracles.se(self.inputs, inputs, *self.hypers)

    def around(self, m, S):
        """Mean and covariance of h where u is N(m, S) and the rest is the prior given u."""
        residual = self.Khh - self.P @ self.Kuu @ self.P.T
        return self.P @ m, residual + self.P @ S @ self.P.T

    def whitened(self, m, S):
        return self.around(self.L @ m, self.L @ S @ self.L.T)

    def shift(self, kind, a):
        """What the coefficients add to the mean of h."""
        if kind == "orthogonal":
            return np.concatenate([np.zeros(self.M), self.C @ a])
        return self.Khh[:, self.M :] @ a if self.Khh is self.Kgg else np.concatenate([self.Kug, self.Kgg]) @ a

    def conditional(self, q_h, inputs=X):
        Kff = oracles.se(inputs, inputs, *self.hypers)
        return oracles.conditional(*q_h, self.Khh, self.Khf(inputs), Kff)


def from_whitened_sites(lambda1, Lambda2):
    S = np.linalg.inv(np.eye(len(Lambda2)) + Lambda2)
    return S @ lambda1, S


def covariance_block(own, prefix=""):
    """Whitened mean and covariance that the parameters of a block stand for."""
    if f"{prefix}sites" in own:
        sites = own[f"{prefix}sites"]
        return from_whitened_sites(np.asarray(sites.lambda1), np.asarray(sites.Lambda2))
    S_sqrt = np.tril(own[f"{prefix}S_sqrt"])
    return np.asarray(own[f"{prefix}m"]), S_sqrt @ S_sqrt.T


def coefficients(kind, own, dense, residual=None):
    """The coefficients a that a0 stands for."""
    variance = dense.hypers[1]
    share = 1.0 if kind != "orthogonal" else np.asarray(own["a"].residual) if residual is None else residual
    return np.asarray(own["a"].values) / np.sqrt(variance * (share + 1e-2))


def dense_posterior(kind, params, dense):
    """Mean and covariance of h that the parameters of a guide stand for."""
    own = {name.removeprefix("f_auto_"): value for name, value in params.items() if name.startswith("f_auto_")}
    if kind == "full":
        a = coefficients(kind, own, dense)
        root = np.tril(own["B_sqrt"]) if "B_sqrt" in own else None
        B = root @ root.T if root is not None else np.asarray(own["sites"].Lambda2)
        L_inverse = np.linalg.inv(dense.L)
        precision = np.linalg.inv(dense.Kuu) + L_inverse.T @ B @ L_inverse
        covariance = dense.around(np.zeros(dense.M), np.linalg.inv(precision))[1]
        return dense.shift(kind, a), covariance
    mean, covariance = dense.whitened(*covariance_block(own))
    if kind != "solve":
        return mean + dense.shift(kind, coefficients(kind, own, dense)), covariance
    m_v, S_v = covariance_block(own, "mean_")
    L_C = np.linalg.cholesky(dense.C)
    embed = np.concatenate([np.zeros((dense.M, len(L_C))), L_C])
    u_alone = dense.P @ (dense.L @ covariance_block(own)[1] @ dense.L.T) @ dense.P.T
    return mean + embed @ m_v, u_alone + embed @ S_v @ embed.T


def arbitrary(params, seed=0):
    """Parameters of the posterior at an arbitrary place."""
    rng = np.random.default_rng(seed)

    def moved(name, value):
        symbol = name.removeprefix("f_auto_")
        if isinstance(value, TiedSites):
            root = 0.5 * rng.normal(size=value.Lambda2.shape)
            return TiedSites(rng.normal(size=value.lambda1.shape), root @ np.swapaxes(root, -1, -2))
        if isinstance(value, Coefficients):
            return dataclasses.replace(value, values=rng.normal(size=value.values.shape))
        if symbol in ("m", "mean_m"):
            return rng.normal(size=value.shape)
        if symbol in ("S_sqrt", "mean_S_sqrt", "B_sqrt"):
            return value + 0.3 * np.tril(rng.normal(size=value.shape))
        return value

    return {name: moved(name, value) for name, value in params.items()}


def dense_bound(model, q_h, dense, y, noise=NOISE):
    Kff = oracles.se(X, X, *dense.hypers)
    return oracles.elbo(model.log_density(y, noise), *q_h, dense.Khh, dense.Khf(X), Kff, MEAN)


def blocks_of(inputs, data=X):
    return (
        oracles.with_jitter(oracles.se(inputs, inputs, LENGTHSCALE, VARIANCE), JITTER),
        oracles.se(inputs, data, LENGTHSCALE, VARIANCE),
    )


def explained(Kuu, Kuf):
    return Kuf.T @ np.linalg.solve(Kuu, Kuf)


def decoupled_bound(Q_mean, Q_covariance):
    """−½ rᵀ(Q_m + σ²)⁻¹r − ½ log|Q_c + σ²| − ½ N log 2π − tr(K − Q_c) / 2σ²."""
    r, noise = Y - MEAN, NOISE**2 * np.eye(N)
    quadratic = r @ np.linalg.solve(Q_mean + noise, r)
    log_determinant = np.linalg.slogdet(Q_covariance + noise)[1]
    trace = np.sum(VARIANCE - np.diag(Q_covariance)) / NOISE**2
    return -0.5 * (quadratic + log_determinant + N * np.log(2.0 * np.pi) + trace)
