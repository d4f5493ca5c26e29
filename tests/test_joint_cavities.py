"""Leave-one-out densities under joint posteriors, against dense linear algebra and against fitting again."""

import warnings

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import loo_cavity

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.once]
RNG = np.random.default_rng(3)
N, G = 24, 18
X = np.sort(RNG.uniform(0.0, 6.0, N))[:, None]
T = RNG.uniform(-1.0, 1.0, N)[:, None]
W = np.stack([X[:, 0] - 3.0, RNG.normal(size=N)], axis=1)
GROUP = np.append(RNG.integers(0, G - 4, N - 1), G - 4)  # one group has one row, and others have none
SIZE = RNG.uniform(0.5, 1.5, N)
EFFECTS = 0.6 * RNG.normal(size=G)
Z = np.linspace(0.0, 6.0, 7)[:, None]
KERNEL, OTHER = sgp.kernels.Matern32(1.0, 1.2), sgp.kernels.SquaredExponential(0.7, 0.5)
REALS = 0.5 + np.sin(X[:, 0]) + W @ [0.1, 0.4] + SIZE * EFFECTS[GROUP] + 0.3 * RNG.normal(size=N)
COUNTS = RNG.poisson(np.exp(0.7 + np.sin(X[:, 0]) + EFFECTS[GROUP]))
NOISE = 0.3
ROWS = (0, 7, N - 1)
POINTWISE = "loo_i" if az.__version__.startswith("0.") else "elpd_i"


def gp(kernel, x):
    return sgp.GaussianProcess(kernel, x, jitter=1e-10)


def additive(y=REALS):
    """Two GPs, an intercept and coefficients."""
    a = numpyro.sample("a", dist.Normal(1.0, 3.0))
    b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    f, g = numpyro.sample("f", gp(KERNEL, X)), numpyro.sample("g", gp(OTHER, T))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(a + f + g + W @ b, NOISE), obs=y)


def grouped(y=REALS):
    """Effects of groups beside two GPs, with a mean of their own."""
    mean = numpyro.sample("mean", dist.Normal(0.5, 1.0))
    with numpyro.plate("groups", G):
        e = numpyro.sample("e", dist.Normal(mean, 0.6))
    f, g = numpyro.sample("f", gp(KERNEL, X)), numpyro.sample("g", gp(OTHER, T))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(f + g + SIZE * e[GROUP], NOISE), obs=y)


def heteroskedastic(keep=None):
    """The mean and the logarithm of the noise share an effect, so that they are correlated under the posterior."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    f, g = numpyro.sample("f", gp(KERNEL, X)), numpyro.sample("g", gp(sgp.kernels.SquaredExponential(2.0, 0.3), X))
    with numpyro.plate("data", N), handlers.mask(mask=True if keep is None else keep):
        numpyro.sample("y", dist.Normal(f + a, jnp.exp(g + 0.5 * a - 1.0)), obs=REALS)


def poisson(keep=None):
    """Effects of groups, eliminated."""
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", G):
        e = numpyro.sample("e", dist.Normal(0.0, 0.6))
    f = numpyro.sample("f", gp(KERNEL, X))
    with numpyro.plate("data", N), handlers.mask(mask=True if keep is None else keep):
        numpyro.sample("y", dist.Poisson(jnp.exp(a + f + e[GROUP])), obs=COUNTS)


def student(keep=None):
    """A scale with nodes of its own."""
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", gp(KERNEL, X))
    with numpyro.plate("data", N), handlers.mask(mask=True if keep is None else keep):
        numpyro.sample("y", dist.StudentT(4.0, f + a, scale), obs=REALS)


def fitted(model, inducing, steps, rho, **kwargs):
    svi = SVI(
        model, sgp.AutoTSVGP(model, inducing), sgp.NaturalGradient(rho, optax.adam(1e-2)), sgp.QuadratureELBO()
    )
    return svi, svi.run(jax.random.key(0), steps, progress_bar=False, **kwargs)


def pointwise(svi, result, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loo = loo_cavity(jax.random.key(1), svi, result, **kwargs)
    return np.asarray(loo[POINTWISE]), np.asarray(loo["pareto_k"])


def exact(C, residual):
    """Leave-one-out densities of N(0, C)."""
    inverse = np.linalg.inv(C)
    variance = 1.0 / np.diag(inverse)
    return stats.norm.logpdf(variance * (inverse @ residual), 0.0, np.sqrt(variance))


def covariance():
    return np.asarray(KERNEL(X, X)) + np.asarray(OTHER(T, T)) + NOISE**2 * np.eye(N)


def test_sums_of_gps_and_effects_have_the_densities_of_dense_algebra():
    found, khat = pointwise(*fitted(additive, {"f": X, "g": T}, 2, 1.0), num_samples=2)
    H = np.concatenate([np.ones((N, 1)), W], axis=1)
    dense = exact(covariance() + H @ np.diag([9.0, 4.0, 4.0]) @ H.T, REALS - H @ [1.0, 0.0, 0.0])
    np.testing.assert_allclose(found, dense, atol=1e-6)
    assert np.all(khat == 0.0)


def test_eliminated_effects_have_the_densities_of_dense_algebra():
    svi, result = fitted(grouped, {"f": X, "g": T}, 2, 1.0)
    assert result.params["auto_latents"].groups[0].effects == "e"
    found, khat = pointwise(svi, result, num_samples=2)
    H = SIZE[:, None] * np.eye(G)[GROUP]
    B = np.ones((G, G)) + 0.36 * np.eye(G)
    np.testing.assert_allclose(found, exact(covariance() + H @ B @ H.T, REALS - 0.5 * SIZE), atol=1e-6)
    assert np.all(khat == 0.0)
