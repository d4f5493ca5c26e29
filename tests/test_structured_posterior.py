"""A family whose Gaussian has no dense matrix: inducing values on a grid, with a Kronecker product for a covariance."""

import dataclasses

import arviz as az
import jax
from jax import Array
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
from numpyro_sgp.distributions.gaussian_process import GaussianProcess
from numpyro_sgp.distributions.sparse_posterior import SparsePosterior
from numpyro_sgp.posteriors.family import AbstractPosteriorFamily
from numpyro_sgp.posteriors.gaussian import AbstractGaussian
from numpyro_sgp.posteriors.moments import AbstractCovariance, Moments
from numpyro_sgp.posteriors.process import AbstractProcess

LENGTHSCALES, VARIANCE, JITTER = (0.5, 0.8), 1.3, 1e-12
rng = np.random.default_rng(0)
X, Y = rng.uniform(size=(20, 2)), rng.normal(size=20)
X_NEW = rng.uniform(size=(7, 2))
AXES = np.linspace(0.0, 1.0, 4), np.linspace(0.0, 1.0, 3)


def kernel():
    return sgp.kernels.SquaredExponential(lengthscale=jnp.asarray(LENGTHSCALES), variance=VARIANCE)


def model(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(kernel(), X, jitter=JITTER))
    numpyro.sample("y", dist.StudentT(4.0, f, 0.5), obs=y)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KroneckerCovariance(AbstractCovariance):
    """AᵀA and TᵀT as products, entry by entry, of one factor for each axis, (M_d, N)."""

    A: tuple[Array, Array]
    T: tuple[Array, Array]

    @property
    def num_noise(self):
        return self.T[0].shape[0] * self.T[1].shape[0]

    def given_inducing(self, Kff):
        return Kff - (self.A[0].T @ self.A[0]) * (self.A[1].T @ self.A[1])

    def of_inducing(self):
        return (self.T[0].T @ self.T[0]) * (self.T[1].T @ self.T[1])

    def variance_of_inducing(self):
        return jnp.sum(self.T[0] ** 2, axis=0) * jnp.sum(self.T[1] ** 2, axis=0)

    def deviation(self, noise):
        noise = noise.reshape(self.T[0].shape[0], -1)
        return jnp.sum(self.T[0] * (noise @ self.T[1]), axis=0)


@dataclasses.dataclass(frozen=True)
class KroneckerGaussian(AbstractGaussian):
    """q(v) = N(m, S₁S₁ᵀ ⊗ S₂S₂ᵀ), u = (L₁ ⊗ L₂) v, at the inducing inputs of a grid."""

    axes: tuple[Array, Array]
    m: Array
    S: tuple[Array, Array]

    def moments(self, kernel, X):
        factors = [type(kernel)(lengthscale=kernel.lengthscale[d], variance=jnp.sqrt(kernel.variance)) for d in (0, 1)]
        A, T = [], []
        for d, (factor, Z, S) in enumerate(zip(factors, self.axes, self.S, strict=True)):
            L = jnp.linalg.cholesky(factor(Z[:, None], Z[:, None]))
            A.append(jax.scipy.linalg.solve_triangular(L, factor(Z[:, None], X[:, d : d + 1]), lower=True))
            T.append(S.T @ A[d])
        covariance = KroneckerCovariance(tuple(A), tuple(T))
        mean = jnp.sum(A[0] * (self.m @ A[1]), axis=0)
        explained = jnp.sum(A[0] ** 2, axis=0) * jnp.sum(A[1] ** 2, axis=0)
        variance = kernel(X) - explained + covariance.variance_of_inducing()
        return Moments(mean, variance, self._kl(), covariance)

    def _kl(self):
        sizes = [S.shape[0] for S in self.S]
        log_dets = [jnp.sum(jnp.log(jnp.diagonal(S))) for S in self.S]
        log_det = sizes[1] * log_dets[0] + sizes[0] * log_dets[1]
        trace = jnp.sum(self.S[0] ** 2) * jnp.sum(self.S[1] ** 2)
        return 0.5 * (trace + jnp.sum(self.m**2) - sizes[0] * sizes[1]) - log_det

    def process(self, q):
        return KroneckerProcess(self, q.prior.kernel)


@dataclasses.dataclass(frozen=True)
class KroneckerProcess(AbstractProcess):
    gaussian: KroneckerGaussian
    kernel: sgp.kernels.SquaredExponential

    def posterior(self, X_new):
        prior = GaussianProcess(self.kernel, X_new, jitter=JITTER)
        return SparsePosterior(prior, self.gaussian.moments(self.kernel, prior.X))

    def log_ratio(self, noise):
        S1, S2 = self.gaussian.S
        v = self.gaussian.m + S1 @ noise.reshape(self.gaussian.m.shape) @ S2.T
        log_dets = [jnp.sum(jnp.log(jnp.diagonal(S))) for S in (S1, S2)]
        log_det = S2.shape[0] * log_dets[0] + S1.shape[0] * log_dets[1]
        return 0.5 * (jnp.sum(v**2) - jnp.sum(noise**2)) - log_det


@dataclasses.dataclass(frozen=True)
class Kronecker(AbstractPosteriorFamily):
    axes: tuple[np.ndarray, np.ndarray]

    def gaussian(self, param, prior, batch_shape):
        del batch_shape
        Z1, Z2 = (jnp.asarray(axis, prior.X.dtype) for axis in self.axes)
        m = param("m", jnp.zeros((len(Z1), len(Z2)), prior.X.dtype))
        S = [jnp.tril(param(f"S_sqrt{d}", jnp.eye(len(Z), dtype=Z.dtype))) for d, Z in ((1, Z1), (2, Z2))]
        return KroneckerGaussian((Z1, Z2), m, (S[0], S[1]))


def parameters():
    S = [np.eye(len(Z)) * 0.6 + 0.1 * np.tril(rng.normal(size=(len(Z),) * 2), -1) for Z in AXES]
    return rng.normal(size=(4, 3)), *S


@pytest.fixture
def both(x64):
    """The same q(u) by the family above and by `AutoSVGP` with dense matrices: (guide, SVI, parameters) each."""
    m, S1, S2 = parameters()
    Z = np.stack(np.meshgrid(*AXES, indexing="ij"), axis=-1).reshape(-1, 2)
    kronecker = sgp.AutoSparseGP(model, Kronecker(AXES))
    dense = sgp.AutoSVGP(model, Z)
    values = [
        {"f_auto_m": m, "f_auto_S_sqrt1": S1, "f_auto_S_sqrt2": S2},
        {"f_auto_inducing": sgp.InducingPoints(Z), "f_auto_m": m.ravel(), "f_auto_S_sqrt": np.kron(S1, S2)},
    ]
    found = []
    for guide, params in zip((kronecker, dense), values, strict=True):
        svi = SVI(model, guide, optax.adam(0.02), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), X, Y)
        assert params.keys() <= svi.get_params(state).keys()
        found.append((guide, svi, {**svi.get_params(state), **jax.tree.map(jnp.asarray, params)}))
    return found


@pytest.mark.thorough
def test_the_loss_and_everything_on_request_are_those_of_dense_matrices(both):
    results = []
    for guide, svi, params in both:
        q = guide.posterior(jax.random.key(0), params, X_NEW)["f"]
        process = sgp.process_posterior(guide, jax.random.key(0), params, X)["f"].posterior(X_NEW)
        loo = sgp.diagnostics.loo_cavity(jax.random.key(4), svi, params, X, Y)
        ratios = log_importance_ratios(jax.random.key(3), svi, params, X, Y, num_samples=50)
        results.append(
            {
                "loss": svi.loss.loss(jax.random.key(1), params, model, guide, X, Y),
                "mean": q.mean,
                "covariance": q.covariance(),
                "diagonal": q.variance - np.diagonal(q.covariance()),
                "draws": q.sample(jax.random.key(2), (5,)),
                "process": np.stack([process.mean, process.variance]),
                "loo": np.asarray(loo.loo_i if az.__version__.startswith("0.") else loo.elpd_i),
                "ratios": ratios,
            }
        )
    for name, value in results[0].items():
        assert_allclose(value, results[1][name], rtol=1e-6, atol=1e-7, err_msg=name)
    assert_allclose(results[0]["diagonal"], 0.0, atol=1e-9)


@pytest.mark.usefixtures("x64")
def test_training_makes_no_array_of_the_size_of_a_dense_one():
    axes = np.linspace(0.0, 30.0, 30), np.linspace(0.0, 30.0, 31)
    guide = sgp.AutoSparseGP(model, Kronecker(axes))
    svi = SVI(model, guide, optax.adam(0.05), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), X, Y)
    program = jax.make_jaxpr(svi.update)(state, X, Y).jaxpr
    largest = max(np.prod(v.aval.shape, dtype=int) for e in equations(program) for v in e.outvars)
    assert largest < len(axes[0]) * len(axes[1]) * len(X)


def test_it_trains(both):
    _, svi, _ = both[0]
    result = svi.run(jax.random.key(0), 60, X, Y, progress_bar=False)
    assert result.losses[-1] < result.losses[0] - 1.0


def test_functions_of_it_are_refused_with_what_to_do(both):
    guide, _, params = both[0]
    with pytest.raises(TypeError, match=r"dense q\(u\), got KroneckerProcess.*Draw values with"):
        guide.sample_functions(jax.random.key(0), params, X, num_samples=2)
