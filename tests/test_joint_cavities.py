"""Leave-one-out densities under joint posteriors, against dense linear algebra and against fitting again."""

from functools import partial
import warnings

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import loo_cavity

pytestmark = pytest.mark.usefixtures("x64")
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


@pytest.fixture(autouse=True)
def few_effects_are_many(monkeypatch):
    monkeypatch.setattr("numpyro_sgp.guides.group._FEWEST_EFFECTS", 16)


def gp(kernel, x):
    return sgp.GaussianProcess(kernel, x, jitter=1e-10)


def gaussian(y=REALS):
    """Two GPs, coefficients, and effects of groups with a mean of their own."""
    b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(0.5, 1.0))
    with numpyro.plate("groups", G):
        e = numpyro.sample("e", dist.Normal(mean, 0.6))
    f, g = numpyro.sample("f", gp(KERNEL, X)), numpyro.sample("g", gp(OTHER, T))
    with numpyro.plate("data", N):
        numpyro.sample("y", dist.Normal(mean + f + g + W @ b + SIZE * e[GROUP], NOISE), obs=y)


def heteroskedastic(keep=None):
    """Mean and logarithm of the noise share an intercept, so that they are correlated under the posterior."""
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
    svi = SVI(model, sgp.AutoTSVGP(model, inducing), sgp.NaturalGradient(rho, optax.adam(1e-2)), sgp.QuadratureELBO())
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


@pytest.mark.parametrize("form", ["eliminated", pytest.param("dense block", marks=pytest.mark.exhaustive)])
@pytest.mark.thorough
def test_sums_of_gps_and_effects_have_the_densities_of_dense_algebra(form, monkeypatch):
    if form == "dense block":
        monkeypatch.setattr("numpyro_sgp.guides.group._FEWEST_EFFECTS", 10**6)
    svi, result = fitted(gaussian, {"f": X, "g": T}, 2, 1.0)
    assert result.params["auto_latents"].groups[0].effects == ("e" if form == "eliminated" else None)
    found, khat = pointwise(svi, result, num_samples=2)
    H = np.concatenate([W, 1.0 + SIZE[:, None], SIZE[:, None] * np.eye(G)[GROUP]], axis=1)
    C = np.asarray(KERNEL(X, X)) + np.asarray(OTHER(T, T)) + NOISE**2 * np.eye(N)
    C = C + H @ np.diag([4.0, 4.0, 1.0, *[0.36] * G]) @ H.T
    np.testing.assert_allclose(found, exact(C, REALS - 0.5 * (1.0 + SIZE)), atol=1e-6)
    assert np.all(khat == 0.0)
    assert 1 in np.bincount(GROUP)


EVERYTHING = np.ones(N, bool)


def errors(svi, result, log_density, found):
    """How far densities of some data are from those of fits without each of them, which draws estimate."""

    @jax.jit
    def without(n):
        keep = jnp.arange(N) != n
        step = lambda _, state: svi.update(state, keep=keep)[0]  # noqa: E731
        params = svi.get_params(jax.lax.fori_loop(0, 40, step, result.state))
        draws = svi.guide.sample_posterior(jax.random.key(2), params, keep=keep, sample_shape=(20000,))
        return jax.nn.logsumexp(log_density(draws, n)) - jnp.log(20000.0)

    return np.abs(found[list(ROWS)] - [without(n) for n in ROWS])


@pytest.mark.exhaustive
def test_two_predictors_of_each_datum_are_close_to_fitting_again():
    def log_density(draws, n):
        scale = jnp.exp(draws["g"][:, n] + 0.5 * draws["a"] - 1.0)
        return dist.Normal(draws["f"][:, n] + draws["a"], scale).log_prob(jnp.asarray(REALS)[n])

    svi, result = fitted(heteroskedastic, {"f": Z, "g": Z}, 40, 0.5, keep=EVERYTHING)
    found, khat = pointwise(svi, result, keep=EVERYTHING, num_samples=2)
    # Few data: sites move noticeably when one of them is left out.
    assert errors(svi, result, log_density, found).max() < 0.05
    assert np.all(khat == 0.0)


@pytest.mark.exhaustive
def test_counts_of_groups_are_close_to_fitting_again():
    def log_density(draws, n):
        eta = draws["a"] + draws["f"][:, n] + draws["e"][:, jnp.asarray(GROUP)[n]]
        return dist.Poisson(jnp.exp(eta)).log_prob(jnp.asarray(COUNTS)[n])

    svi, result = fitted(poisson, Z, 40, 0.5, keep=EVERYTHING)
    assert result.params["auto_latents"].groups[0].effects == "e"
    found, khat = pointwise(svi, result, keep=EVERYTHING, num_samples=2)
    assert errors(svi, result, log_density, found).max() < 0.03
    assert np.all(khat == 0.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("again", [False, True])
def test_a_scale_is_drawn_and_its_draws_are_weighted(again):
    def log_density(draws, n):
        return dist.StudentT(4.0, draws["f"][:, n] + draws["a"], draws["scale"]).log_prob(jnp.asarray(REALS)[n])

    svi, result = fitted(student, Z, 40, 0.5, keep=EVERYTHING)
    found, khat = pointwise(svi, result, keep=EVERYTHING)
    assert np.all(np.isfinite(found))
    assert np.all((khat > 0.0) & (khat < 0.5))
    if again:
        assert errors(svi, result, log_density, found).max() < 0.04


@pytest.mark.exhaustive
def test_data_that_share_a_predictor_are_left_out_one_by_one():
    both = np.stack([REALS, REALS[::-1]])

    def model():
        a = numpyro.sample("a", dist.Normal())
        f = numpyro.sample("f", gp(KERNEL, X))
        with numpyro.plate("replicates", 2, dim=-2), numpyro.plate("data", N, dim=-1):
            numpyro.sample("y", dist.Normal(a + f, NOISE), obs=both)

    found, _ = pointwise(*fitted(model, X, 2, 1.0), num_samples=2)
    C = np.kron(np.ones((2, 2)), np.asarray(KERNEL(X, X)) + 1.0) + NOISE**2 * np.eye(2 * N)
    np.testing.assert_allclose(found, exact(C, both.ravel()), atol=1e-6)


@pytest.mark.exhaustive
def test_a_process_may_be_in_the_noise_of_all_outputs():
    both = np.stack([REALS, REALS[::-1]])

    def model(alike):
        a = numpyro.sample("a", dist.Normal())
        with numpyro.plate("outputs", 2):
            f = numpyro.sample("f", gp(KERNEL, X))
        g = numpyro.sample("g", gp(sgp.kernels.SquaredExponential(2.0, 0.3), X))
        with numpyro.plate("outputs", 2, dim=-2), numpyro.plate("data", N, dim=-1):
            scale = jnp.exp(g - 1.0)
            # The same numbers, with a predictor for each output.
            scale = jnp.exp(jnp.stack([g, g]) - 1.0) if alike else scale
            numpyro.sample("y", dist.Normal(a + f, scale), obs=both)

    ends = []
    for alike in (False, True):
        svi, result = fitted(partial(model, alike), {"f": Z, "g": Z}, 20, 0.5)
        ends.append(pointwise(svi, result, num_samples=2)[0])
    np.testing.assert_allclose(*ends, atol=1e-6)


@pytest.mark.thorough
def test_data_that_depend_on_other_rows_have_no_cavities():
    def model():
        a = numpyro.sample("a", dist.Normal())
        f = numpyro.sample("f", gp(KERNEL, X))
        numpyro.sample("y", dist.Normal(a + f, NOISE).to_event(1), obs=REALS)

    svi, result = fitted(model, Z, 1, 0.5)
    with pytest.raises(ValueError, match=r"shape \(\).*the rows \(24,\).*one row each"):
        loo_cavity(jax.random.key(1), svi, result)
