"""Small data sets, one model with every likelihood, and the dense posterior that a guide's parameters stand for."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
import oracles
from scipy.special import loggamma

import numpyro_sgp as sgp

N, M, D, BATCH, N_NEW = 7, 5, 2, 3, 4
JITTER = 1e-6
LENGTHSCALE, VARIANCE, NOISE, MEAN = np.array([0.8, 1.1]), 1.3, 0.5, 0.4


def inputs(rows, seed):
    return np.random.default_rng(seed).uniform(-1.2, 1.2, size=(rows, D))


X, Z, X_NEW = inputs(N, 0), inputs(M, 1), inputs(N_NEW, 2)


# Log-densities as the oracles want them: complex arguments allowed.


def log_bernoulli(f, y, noise):
    return -np.log(1.0 + np.exp(-(2.0 * y - 1.0) * f))


def log_poisson(f, y, noise):
    return y * f - np.exp(f) - loggamma(y + 1.0)


def log_normal(f, y, noise):
    return -0.5 * ((y - f) / noise) ** 2 - np.log(noise) - 0.5 * math.log(2 * math.pi)


def log_student_t(f, y, noise):
    constant = math.lgamma(2.0) - math.lgamma(1.5) - 0.5 * math.log(3.0 * math.pi)
    return constant - np.log(noise) - 2.0 * np.log(1.0 + ((y - f) / noise) ** 2 / 3.0)


def log_beta(f, y, noise):
    # Mean 1 / (1 + e^−f), precision 5.
    mean = 1.0 / (1.0 + np.exp(-f))
    a, b = 5.0 * mean, 5.0 * (1.0 - mean)
    return loggamma(5.0 + 0.0 * f) - loggamma(a) - loggamma(b) + (a - 1.0) * np.log(y) + (b - 1.0) * np.log(1.0 - y)


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """`distribution(f, noise)` for the model, `log_density(f, y, noise)` for the oracles, and data."""

    distribution: Callable
    log_density: Callable
    y: np.ndarray


def _beta(f, noise):
    mean = jax.nn.sigmoid(f)
    return dist.Beta(5.0 * mean, 5.0 * (1.0 - mean))


LIKELIHOODS = {
    "normal": Likelihood(dist.Normal, log_normal, np.array([0.3, -0.7, 1.9, 0.2, -1.1, 0.8, 1.4])),
    "bernoulli": Likelihood(
        lambda f, noise: dist.Bernoulli(logits=f), log_bernoulli, np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    ),
    "poisson": Likelihood(
        lambda f, noise: dist.Poisson(jnp.exp(f)), log_poisson, np.array([1.0, 0.0, 4.0, 2.0, 0.0, 1.0, 3.0])
    ),
    "student_t": Likelihood(
        lambda f, noise: dist.StudentT(3.0, f, noise), log_student_t, np.array([0.3, -0.2, 0.9, 0.6, 0.1, 0.8, 0.7])
    ),
    "student_t_with_outliers": Likelihood(
        lambda f, noise: dist.StudentT(3.0, f, noise), log_student_t, np.array([0.3, -0.2, 6.0, 0.6, 0.1, -4.0, 0.7])
    ),
    "beta": Likelihood(_beta, log_beta, np.array([0.7, 0.35, 0.9, 0.6, 0.2, 0.55, 0.8])),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A GP with trained hyperparameters under a likelihood; `traces` counts how often it is run."""

    likelihood: str = "normal"
    mean: float = MEAN
    jitter: float = JITTER
    traces: list = dataclasses.field(default_factory=list)

    def __call__(self, X, y=None, num_data=None):
        self.traces.append(None)
        dtype = X.dtype

        def positive(name, value):
            return numpyro.param(name, np.asarray(value, dtype), constraint=constraints.positive)

        kernel = sgp.kernels.SquaredExponential(positive("lengthscale", LENGTHSCALE), positive("variance", VARIANCE))
        noise = positive("noise", NOISE)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, self.mean, jitter=self.jitter))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", LIKELIHOODS[self.likelihood].distribution(f, noise), obs=y)

    @property
    def y(self):
        return LIKELIHOODS[self.likelihood].y

    def log_density(self, y, noise=NOISE):
        return lambda f: LIKELIHOODS[self.likelihood].log_density(f, y, noise)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Dense prior covariances: Kuu has the jitter, and is that of the data for a dense posterior, without jitter."""

    Kuu: np.ndarray
    Kuf: np.ndarray
    Kff: np.ndarray

    @property
    def kff(self):
        return np.diag(self.Kff)


def blocks(guide_name, X_at=X, Z=Z, X_train=X, lengthscale=LENGTHSCALE, variance=VARIANCE, jitter=JITTER):
    u, jitter = (X_train, 0.0) if guide_name == "dense" else (Z, jitter)
    Kuu = oracles.with_jitter(oracles.se(u, u, lengthscale, variance), jitter)
    return Blocks(Kuu, oracles.se(u, X_at, lengthscale, variance), oracles.se(X_at, X_at, lengthscale, variance))


def site_basis(guide_name, prior, prior_at_training=None):
    """W of the sites' φ = W u, for a guide with sites that do not move."""
    M = len(prior.Kuu)
    if guide_name == "natural":
        return np.linalg.inv(np.linalg.cholesky(prior.Kuu))
    if guide_name == "per_datum":
        return np.linalg.solve(prior.Kuu, (prior_at_training or prior).Kuf).T
    return np.eye(M)  # tied, dense


def dense_posterior(guide_name, params: dict[str, Any], prior, prior_at_training=None):
    """Mean and covariance of q(u) that the parameters of a guide stand for."""
    own = {name.removeprefix("f_auto_"): value for name, value in params.items() if name.startswith("f_auto_")}
    if guide_name in ("whitened", "unwhitened"):
        m, S_sqrt = np.asarray(own["m"]), np.tril(own["S_sqrt"])
        return (
            (m, S_sqrt @ S_sqrt.T) if guide_name == "unwhitened" else oracles.from_whitened_root(m, S_sqrt, prior.Kuu)
        )
    lambda1, Lambda2 = np.asarray(own["sites"].lambda1), np.asarray(own["sites"].Lambda2)
    Lambda2 = np.diag(Lambda2) if guide_name in ("per_datum", "dense") else Lambda2
    return oracles.from_sites(lambda1, Lambda2, prior.Kuu, site_basis(guide_name, prior, prior_at_training))


def svi_at(params, model, guide, optim, *args, loss=None, **kwargs):
    """An SVI object and its state, with the parameters of the posterior as in `params` and the others as initialised."""
    svi = SVI(model, guide, optim, sgp.QuadratureELBO() if loss is None else loss)
    state = svi.init(jax.random.key(0), *args, **kwargs)
    current = svi.optim.get_params(state.optim_state)
    own = {name: value for name, value in params.items() if name.startswith("f_auto_")}
    return svi, state._replace(optim_state=svi.optim.init({**current, **own}))


def sites_of(svi, state):
    """λ₁ and Λ₂ (its diagonal for one site a row) of the GP site."""
    sites = svi.get_params(state)["f_auto_sites"]
    return sites.lambda1, sites.Lambda2


def converged(svi, state, steps, *args):
    """The state after many updates, in one compiled loop."""
    return jax.jit(lambda state: jax.lax.fori_loop(0, steps, lambda _, s: svi.update(s, *args)[0], state))(state)
