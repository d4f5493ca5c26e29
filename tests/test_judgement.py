"""Importance ratios, leave-one-out densities and calibration, against closed forms and against fitting again."""

from functools import cache, partial
from pathlib import Path

import arviz as az
from grids import representative
from guides import OnBasis
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, init_to_value
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal
from numpyro.infer.calibration import vsbc_diagnostic
from numpyro.primitives import Messenger
import optax
import oracles
import pytest
from scipy import stats

import numpyro_sgp as sgp
from numpyro_sgp.diagnostics import calibration, loo_cavity, psis_khat
from numpyro_sgp.diagnostics.importance import log_importance_ratios, pareto_smoothed
from numpyro_sgp.kernels import Linear, SquaredExponential

pytestmark = pytest.mark.usefixtures("x64")

OLD = az.__version__.startswith("0.")
N, M, NOISE, JITTER = 14, 5, 0.6, 1e-8
RNG = np.random.default_rng(11)
X = np.sort(RNG.uniform(-2.0, 2.0, size=(N, 1)), axis=0)
Z = np.linspace(-2.0, 2.0, M)[:, None]
y = np.sin(2.0 * X[:, 0]) + NOISE * RNG.normal(size=N)
counts = RNG.poisson(np.exp(np.sin(2.0 * X[:, 0]) + 0.5))
ELPD, POINTWISE, P = ("elpd_loo", "loo_i", "p_loo") if OLD else ("elpd", "elpd_i", "p")


def model_of(likelihood, lengthscale=0.8, mean=0.3):
    def model(X, y=None, num_data=None, keep=None):
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(lengthscale), X, mean, jitter=JITTER))
        mask = handlers.mask(mask=True if keep is None else keep)
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]), mask:
            numpyro.sample("y", likelihood(f), obs=y)

    return model


normal = model_of(lambda f: dist.Normal(f, NOISE))
poisson = model_of(lambda f: dist.Poisson(jnp.exp(f)))


def fitted(model, guide, *args, steps=2, step_size=1.0, **kwargs):
    svi = SVI(model, guide, sgp.NaturalGradient(step_size), sgp.QuadratureELBO())
    return svi, svi.run(jax.random.key(0), steps, *args, progress_bar=False, **kwargs)


def pointwise(loo):
    return np.asarray(loo[POINTWISE])


GUIDES = {
    "natural": lambda model: sgp.AutoSVGP(model, Z, natural=True),
    "tied": lambda model: sgp.AutoTSVGP(model, Z),
    "dense": lambda model: sgp.AutoTSVGP(model, None),
    "weights": lambda model: sgp.AutoWeightSpaceGP(OnBasis(model, Z)),
}


def prior_blocks(name):
    u = X if name == "dense" else Z
    Kuu = oracles.with_jitter(oracles.se(u, u, 0.8), 0.0 if name == "dense" else JITTER)
    Kuf = oracles.se(u, X, 0.8)
    # A kernel of finite rank leaves nothing unexplained.
    return Kuu, Kuf, np.sum(Kuf * np.linalg.solve(Kuu, Kuf), axis=0) if name == "weights" else np.ones(N)


# Leave-one-out by cavities.


def without(K, n, y=y, noise=NOISE):
    """Mean and variance of f_n given all other data, of a GP."""
    rest = np.arange(N) != n
    weights = np.linalg.solve(K[np.ix_(rest, rest)] + noise**2 * np.eye(N - 1), K[rest, n])
    return weights @ y[rest], K[n, n] - weights @ K[rest, n]


def left_out(name, n, noise=NOISE):
    """Mean and variance of f_n under the collapsed posterior of all other data."""
    Kuu, Kuf, kff = prior_blocks(name)
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    if name == "dense":
        Q = oracles.se(X, X, 0.8)
    m, v = without(Q, n, y - 0.3, noise)
    return 0.3 + m, v + kff[n] - Q[n, n]


@pytest.mark.parametrize("name", GUIDES)
def test_cavities_of_a_gaussian_likelihood_are_exact_leave_one_out(name):
    svi, result = fitted(normal, GUIDES[name](normal), X, y)
    loo = loo_cavity(jax.random.key(1), svi, result, X, y, num_samples=3)
    moments = [left_out(name, n) for n in range(N)]
    exact = [stats.norm.logpdf(y[n], m, np.sqrt(v + NOISE**2)) for n, (m, v) in enumerate(moments)]
    assert_allclose(pointwise(loo), exact, atol=2e-5)
    assert_allclose(loo[ELPD], np.sum(exact), atol=1e-4)
    assert_allclose(loo["se"], np.sqrt(N * np.var(exact)), rtol=1e-4)
    q = svi.guide.posterior(jax.random.key(0), result.params, X)["f"]
    in_sample = stats.norm.logpdf(y, q.mean, np.sqrt(q.variance + NOISE**2)).sum()
    assert_allclose(loo[P], in_sample - np.sum(exact), rtol=1e-3)


@pytest.mark.parametrize("noise", [0.3, 0.01])
@pytest.mark.parametrize("name", representative(["natural", "dense"], ["dense"]))
def test_leave_one_out_is_exact_where_the_likelihood_is_much_narrower_than_the_cavity_or_the_posterior(name, noise):
    model = model_of(lambda f: dist.Normal(f, noise))
    svi, result = fitted(model, GUIDES[name](model), X, y)
    loo = loo_cavity(jax.random.key(1), svi, result, X, y, num_samples=2)
    moments = [left_out(name, n, noise) for n in range(N)]
    exact = [stats.norm.logpdf(y[n], m, np.sqrt(v + noise**2)) for n, (m, v) in enumerate(moments)]
    assert_allclose(pointwise(loo), exact, rtol=1e-8)
    q = svi.guide.posterior(jax.random.key(0), result.params, X)["f"]
    in_sample = stats.norm.logpdf(y, q.mean, np.sqrt(q.variance + noise**2)).sum()
    assert_allclose(loo[P], in_sample - np.sum(exact), rtol=1e-8)


def test_far_from_all_other_data_the_cavity_is_the_prior():
    far, outcomes = 100.0 * np.arange(5)[:, None], np.array([0, 3, 30, 300, 1000])

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.8, 4.0), X, 2.0))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    svi, result = fitted(model, sgp.AutoTSVGP(model, None), far, outcomes, steps=200, step_size=0.3)
    loo = loo_cavity(jax.random.key(1), svi, result, far, outcomes, num_samples=2)
    f = np.linspace(-20.0, 20.0, 400_001)
    density = stats.poisson.pmf(outcomes[:, None], np.exp(f)) * stats.norm.pdf(f, 2.0, 2.0)
    # 32 nodes for an integrand that is not constant: 5e-8.
    assert_allclose(pointwise(loo), np.log(density.sum(axis=1) * (f[1] - f[0])), rtol=1e-6)


def test_a_row_where_f_is_known_has_its_density_there():
    inputs = np.arange(5.0)[:, None]  # at 0 a linear function is 0

    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(Linear(1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    svi, result = fitted(model, sgp.AutoTSVGP(model, None), inputs, y[:5])
    loo = loo_cavity(jax.random.key(1), svi, result, inputs, y[:5], num_samples=2)
    precision = np.linalg.inv(inputs @ inputs.T + NOISE**2 * np.eye(5))
    scale = 1.0 / np.sqrt(np.diag(precision))
    exact = stats.norm.logpdf(y[:5], y[:5] - scale**2 * (precision @ y[:5]), scale)
    assert_allclose(pointwise(loo), exact, rtol=1e-8)


@pytest.mark.parametrize("name", ["natural", "dense"])
def test_cavities_of_counts_are_close_to_fitting_without_each_datum(name):
    # keep is an argument, so that all fits share one program.
    everything = np.ones(N, bool)
    guide = GUIDES[name](poisson)
    svi, result = fitted(poisson, guide, X, counts, keep=everything, steps=25)
    loo = loo_cavity(jax.random.key(1), svi, result, X, counts, keep=everything, num_samples=2)

    @jax.jit
    def refitted(keep):
        state = svi.init(jax.random.key(0), X, counts, keep=keep)
        step = lambda _, state: svi.update(state, X, counts, keep=keep)[0]  # noqa: E731
        params = svi.get_params(jax.lax.fori_loop(0, 25, step, state))
        q = guide.posterior(jax.random.key(0), params, X)["f"]
        return q.mean, q.variance

    x, w = np.polynomial.hermite_e.hermegauss(40)
    exact = []
    for n in range(N):
        m, v = (np.asarray(moment)[n] for moment in refitted(everything & (np.arange(N) != n)))
        exact.append(np.log(w @ stats.poisson.pmf(counts[n], np.exp(m + np.sqrt(v) * x)) / w.sum()))
    errors = np.abs(pointwise(loo) - exact)
    # Few counts, so that a site moves noticeably when one of them is left out.
    assert errors.max() < 0.1, errors
    assert errors.mean() < 0.03


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_cavities_of_banana_are_within_a_twentieth_of_a_nat_of_fitting_again():
    table = np.loadtxt(Path(__file__).parents[1] / "examples" / "data" / "banana.csv", delimiter=",", skiprows=3)
    X, y = table[:, :2], table[:, 2]
    rows = np.arange(0, len(y), 20)

    def model(X, y=None, keep=None):
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.7, 4.0), X))
        with numpyro.plate("data", X.shape[0]), handlers.mask(mask=True if keep is None else keep):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    everything = np.ones(len(y), bool)
    guide = sgp.AutoTSVGP(model, X[::8])
    svi, result = fitted(model, guide, X, y, keep=everything, steps=15)
    loo = pointwise(loo_cavity(jax.random.key(1), svi, result, X, y, num_samples=2))

    @jax.jit
    def refitted(state, n):
        keep = jnp.arange(len(y)) != n
        state = jax.lax.fori_loop(0, 8, lambda _, state: svi.update(state, X, y, keep=keep)[0], state)
        q = guide.posterior(jax.random.key(0), svi.get_params(state), jnp.asarray(X)[n][None])["f"]
        return q.mean[0], q.variance[0]

    x, w = np.polynomial.hermite_e.hermegauss(40)
    errors = []
    for n in rows:
        m, v = map(np.asarray, refitted(result.state, n))
        right = 1.0 / (1.0 + np.exp(-(2.0 * y[n] - 1.0) * (m + np.sqrt(v) * x)))
        errors.append(abs(loo[n] - np.log(w @ right / w.sum())))
    assert max(errors) < 0.05, errors


@pytest.mark.thorough
def test_draws_of_the_hyperparameters_are_weighted_as_if_the_datum_had_not_been_seen():
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-0.2, 0.3))
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(lengthscale), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    # Sites of a Gaussian likelihood do not depend on the kernel, so q(f | θ) is exact, and θ has a grid.
    grid = np.linspace(-1.8, 1.4, 300)
    kernels = [oracles.se(X, X, np.exp(log_lengthscale)) for log_lengthscale in grid]
    evidence = [oracles.gaussian_log_density(y, np.zeros(N), K + NOISE**2 * np.eye(N)) for K in kernels]
    log_joint = np.array(evidence) + stats.norm.logpdf(grid, -0.2, 0.3)
    density = np.array([[stats.norm.logpdf(y[n], *moments(K, n)) for n in range(N)] for K in kernels])
    posterior = np.exp(log_joint - np.logaddexp.reduce(log_joint))
    # p(θ | y_−n) ∝ p(θ | y) / p(y_n | θ, y_−n)
    exact = -np.log(posterior @ np.exp(-density))
    svi, result = fitted(model, sgp.AutoTSVGP(model, None), X, y)
    loc = posterior @ grid
    scale = np.sqrt(posterior @ (grid - loc) ** 2)
    params = {**result.params, "lengthscale_auto_loc": jnp.asarray(loc), "lengthscale_auto_scale": jnp.asarray(scale)}
    loo = loo_cavity(jax.random.key(1), svi, params, X, y, num_samples=1000)
    at_the_mean = density[np.argmin(np.abs(grid - loc))]
    assert np.asarray(loo["pareto_k"]).max() < 0.7
    assert np.abs(pointwise(loo) - exact).max() < 0.01
    assert np.abs(at_the_mean - exact).max() > 0.03


def moments(K, n):
    m, v = without(K, n)
    return m, np.sqrt(v + NOISE**2)


def two_latents(X, y=None, noise=NOISE):
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.8), X, jitter=JITTER))
    g = numpyro.sample("g", sgp.GaussianProcess(SquaredExponential(1.5), X, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + g, noise), obs=y)


def three_latents(X, y=None, noise=NOISE):
    with numpyro.plate("latent", 3, dim=-1):
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.8), X, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f.sum(0), noise), obs=y)


@pytest.mark.parametrize("noise", [NOISE, 0.05])
@pytest.mark.parametrize("model", [two_latents, three_latents], ids=["product grid", "draws"])
@pytest.mark.exhaustive
def test_each_latent_of_a_datum_has_its_own_cavity(model, noise):
    model = partial(model, noise=noise)
    svi, result = fitted(model, sgp.AutoTSVGP(model, Z, joint=False), X, y, steps=30, step_size=0.5)
    loo = loo_cavity(jax.random.key(1), svi, result, X, y, num_samples=2)
    means, variances = [], []
    for q in svi.guide.posterior(jax.random.key(0), result.params, X).values():
        m = np.reshape(q.mean, (-1, N))
        s = np.broadcast_to(np.sum(np.square(q.moments.covariance.T), axis=-2), q.mean.shape).reshape(-1, N)
        cavity = 1.0 / (1.0 / s - 1.0 / noise**2)
        means.append((m, cavity))
        variances.append(1.0 - np.sum(np.square(q.moments.covariance.A), axis=-2) + cavity)
    gradient = (y - sum(m.sum(0) for m, _ in means)) / noise**2  # of the log density, the same for all latents
    mean = sum((m - cavity * gradient).sum(0) for m, cavity in means)
    variance = noise**2 + sum(v.sum(0) for v in variances)
    assert_allclose(pointwise(loo), stats.norm.logpdf(y, mean, np.sqrt(variance)), atol=1e-6)


@pytest.mark.thorough
def test_outputs_with_a_latent_each_are_left_out_one_by_one_and_masked_ones_are_absent():
    Y, keep = np.stack([y, y[::-1]]), np.ones((2, N), bool)
    keep[1, 3:6] = False

    def model(X, Y=None):
        with numpyro.plate("output", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.8), X, 0.3, jitter=JITTER))
        outputs, data = numpyro.plate("output", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1)
        with outputs, data, handlers.mask(mask=jnp.asarray(keep)):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=Y)

    svi, result = fitted(model, sgp.AutoTSVGP(model, Z), X, Y)
    together = pointwise(loo_cavity(jax.random.key(1), svi, result, X, Y, num_samples=2))
    separate = []
    for outcomes, kept in zip(Y, keep, strict=True):
        alone = fitted(normal, sgp.AutoTSVGP(normal, Z), X, outcomes, keep=kept)
        separate.append(pointwise(loo_cavity(jax.random.key(1), *alone, X, outcomes, keep=kept, num_samples=2)))
    assert [len(part) for part in separate] == [N, N - 3]
    assert_allclose(together, np.concatenate(separate), atol=1e-8)


OTHER_BASES = {
    **{
        kind: lambda model, kind=kind: sgp.AutoDecoupledGP(model, X[::2], Z, parametrization=kind)
        for kind in ("orthogonal", "hybrid", "full", "solve")
    },
    "weights": lambda model: sgp.AutoQSGP(OnBasis(model, Z), basis_batch=M, inducing=Z),
    "chevron": lambda model: sgp.AutoQSGP(OnBasis(model, Z), basis_batch=M, covariance="chevron", relevance=True),
}


@pytest.mark.parametrize("name", OTHER_BASES)
@pytest.mark.exhaustive
def test_posteriors_whose_mean_has_a_basis_of_its_own_are_refused(name):
    svi = SVI(normal, OTHER_BASES[name](normal), optax.sgd(0.0), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y))
    with pytest.raises(ValueError, match=r"not those of one Gaussian\. Use `az\.loo`"):
        loo_cavity(jax.random.key(1), svi, params, X, y, num_samples=2)


def test_a_decoupled_posterior_without_a_mean_basis_is_that_of_its_one_basis():
    guide = sgp.AutoDecoupledGP(normal, None, Z, natural=True)
    loo = loo_cavity(jax.random.key(1), *fitted(normal, guide, X, y), X, y, num_samples=2)
    moments = [left_out("natural", n) for n in range(N)]
    exact = [stats.norm.logpdf(y[n], m, np.sqrt(v + NOISE**2)) for n, (m, v) in enumerate(moments)]
    assert_allclose(pointwise(loo), exact, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_few_draws_are_enough_only_where_the_hyperparameters_are_fixed():
    svi, result = fitted(hierarchical, sgp.AutoTSVGP(hierarchical, None), X, counts, steps=5)
    for fn in (loo_cavity, psis_khat):
        with pytest.raises(ValueError, match="`num_samples` must be an integer of at least 30, got 29"):
            fn(jax.random.key(1), svi, result, X, counts, num_samples=29)
    assert np.isfinite(psis_khat(jax.random.key(1), svi, result, X, counts, num_samples=30))
    loo = loo_cavity(jax.random.key(1), svi, result, X, counts, num_samples=30)
    assert np.all(np.isfinite(loo["pareto_k"]))


@pytest.mark.filterwarnings("ignore")  # ArviZ's own
def test_compare_takes_the_result_and_prefers_the_better_lengthscale():
    results = {}
    for lengthscale in (0.8, 0.05):
        model = model_of(lambda f: dist.Normal(f, NOISE), lengthscale)
        svi, result = fitted(model, sgp.AutoTSVGP(model, None), X, y)
        results[str(lengthscale)] = loo_cavity(jax.random.key(1), svi, result, X, y, num_samples=2)
    table = az.compare(results)
    assert list(table.index) == ["0.8", "0.05"]
    assert "log" in str(results["0.8"])


def test_a_site_that_is_not_in_the_posterior_is_reported_and_has_no_density():
    svi = SVI(normal, sgp.AutoSVGP(normal, Z), optax.sgd(0.0), sgp.QuadratureELBO())
    result = svi.run(jax.random.key(0), 1, X, y, progress_bar=False)
    with pytest.warns(UserWarning, match="has not converged"):
        loo = loo_cavity(jax.random.key(1), svi, result, X, y, num_samples=2)
    assert np.isnan(pointwise(loo)).any()
    assert np.isnan(loo[ELPD])
    assert loo["warning"]


# Importance ratios.


def titsias(y, name):
    Kuu, Kuf, kff = prior_blocks(name)
    if name == "dense":
        return oracles.gaussian_log_density(y - 0.3, np.zeros(N), Kuu + NOISE**2 * np.eye(N))
    return oracles.titsias_bound(Kuu, Kuf, kff, y - 0.3, NOISE)


@pytest.mark.parametrize("name", GUIDES)
def test_the_ratio_of_the_best_posterior_is_the_bound_at_every_draw(name):
    svi, result = fitted(normal, GUIDES[name](normal), X, y)
    ratios = log_importance_ratios(jax.random.key(1), svi, result, X, y, num_samples=20)
    assert_allclose(ratios, titsias(y, name), atol=1e-5)


@pytest.mark.thorough
def test_batches_of_rows_have_the_ratios_of_all_rows():
    svi, result = fitted(poisson, sgp.AutoTSVGP(poisson, Z), X, counts, steps=5)
    whole = log_importance_ratios(jax.random.key(1), svi, result, X, counts, num_samples=5)
    for batch_size in (4, 7, N):
        parts = log_importance_ratios(jax.random.key(1), svi, result, X, counts, num_samples=5, batch_size=batch_size)
        assert_allclose(parts, whole, atol=1e-9)


def test_arguments_that_are_no_arrays_are_the_same_in_all_batches():
    def model(X, y, noise, num_data=None):
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.8), X))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    svi, result = fitted(model, sgp.AutoTSVGP(model, Z), X, y, NOISE, steps=3)
    whole = log_importance_ratios(jax.random.key(1), svi, result, X, y, NOISE, num_samples=5)
    parts = log_importance_ratios(jax.random.key(1), svi, result, X, y, NOISE, num_samples=5, batch_size=4)
    assert_allclose(parts, whole, atol=1e-9)


def hierarchical(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.exhaustive
def test_the_mean_ratio_is_the_bound_with_random_hyperparameters_too():
    model = handlers.scale(hierarchical, scale=0.3)
    # The Jacobian of log θ is part of q(θ): its mean is about 0.9 there.
    base = partial(AutoMultivariateNormal, init_loc_fn=init_to_value(values={"lengthscale": 0.4}))
    svi, result = fitted(model, sgp.AutoTSVGP(model, Z, base=base), X, counts, steps=20)
    ratios = np.asarray(log_importance_ratios(jax.random.key(1), svi, result, X, counts, num_samples=2000))
    loss = sgp.QuadratureELBO(num_particles=2000).loss
    bound = -loss(jax.random.key(2), result.params, model, svi.guide, X, counts)
    error = 2.0 * ratios.std() / np.sqrt(len(ratios))
    assert error < 0.1
    assert abs(ratios.mean() - bound) < 5 * error


def test_khat_tells_a_right_posterior_from_a_broken_one():
    svi, result = fitted(poisson, sgp.AutoTSVGP(poisson, Z), X, counts, steps=20)
    assert psis_khat(jax.random.key(1), svi, result, X, counts) < 0.7
    sites = result.params["f_auto_sites"]
    # Ten times the precision that the data give: the tails of the posterior are missed.
    broken = {**result.params, "f_auto_sites": type(sites)(10.0 * sites.lambda1, 10.0 * sites.Lambda2, sites.reference)}
    assert psis_khat(jax.random.key(1), svi, broken, X, counts) > 0.7


def test_khat_of_an_exact_posterior_is_zero():
    # All ratios are the same up to rounding, of which ArviZ makes NaN, infinity or an error.
    svi, result = fitted(normal, sgp.AutoTSVGP(normal, Z), X, y, steps=3)
    assert psis_khat(jax.random.key(1), svi, result, X, y) == 0.0


@pytest.mark.thorough
def test_cavities_of_a_datum_that_no_hyperparameter_moves():
    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(lengthscale), X, jitter=JITTER))
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    far = np.concatenate([X, [[1e4]]])
    outcomes = np.append(y, 0.7)
    svi, result = fitted(model, sgp.AutoTSVGP(model, np.append(Z, [[1e4]], axis=0)), far, outcomes, steps=5)
    loo = loo_cavity(jax.random.key(1), svi, result, far, outcomes, num_samples=50)
    assert loo["pareto_k"].values[-1] == 0.0
    assert_allclose(pointwise(loo)[-1], stats.norm.logpdf(0.7, 0.0, np.sqrt(1.0 + NOISE**2)), rtol=1e-6)


def test_ratios_that_are_the_same_have_even_weights_beside_others():
    other = np.random.default_rng(0).normal(size=200)
    for same in (np.full(200, -9.137), -3220.0 * (1.0 + 1e-15 * other)):
        weights, khat = pareto_smoothed(az, np.stack([same, other]))
        assert_allclose(weights[0], -np.log(200), rtol=1e-12)
        assert khat[0] == 0.0
        assert np.isfinite(khat[1])
        assert khat[1] != 0.0
    assert not pareto_smoothed(az, np.where(np.arange(200) == 3, np.nan, other))[1] < 0.7


@pytest.mark.exhaustive
def test_point_estimates_count_by_their_prior_density():
    guide = sgp.AutoTSVGP(hierarchical, Z, base=AutoDelta)
    svi, result = fitted(hierarchical, guide, X, counts, steps=20)
    ratios = log_importance_ratios(jax.random.key(1), svi, result, X, counts, num_samples=2000)
    bound = -sgp.QuadratureELBO().loss(jax.random.key(2), result.params, hierarchical, guide, X, counts)
    assert abs(np.mean(ratios) - bound) < 5 * np.std(ratios) / np.sqrt(2000)


# Calibration.


def predictions(scale, draws=2000, rows=1500):
    """Outcomes N(0, 1), and draws of N(0, scale²) that should predict them, in the form of `to_arviz`."""
    rng = np.random.default_rng(3)

    class Group(dict):
        data_vars = property(lambda self: self.keys())

    class Values:
        def __init__(self, values):
            self.values = values

    return {
        "observed_data": Group(y=Values(rng.normal(size=rows))),
        "posterior_predictive": Group(y=Values(scale * rng.normal(size=(1, draws, rows)))),
    }


@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
def test_coverage_transforms_and_widths_are_those_of_the_distributions(scale):
    c = calibration(predictions(scale), levels=(0.5, 0.9))
    z = stats.norm.ppf([0.75, 0.95]) * scale
    expected = 2.0 * stats.norm.cdf(z) - 1.0
    assert np.all(np.abs(c.coverage - expected) < 5 * np.sqrt(expected * (1 - expected) / 1500) + 0.005)
    assert_allclose(c.width, 2.0 * z, rtol=0.02)
    assert_allclose(c.sd, scale, rtol=0.01)
    assert_allclose(c.standard_error, np.sqrt(np.array([0.25, 0.09]) / 1500))
    uniform = stats.kstest(c.pit, lambda u: stats.norm.cdf(scale * stats.norm.ppf(u))).pvalue
    assert uniform > 1e-3
    if scale != 1.0:
        assert stats.kstest(c.pit, "uniform").pvalue < 1e-6


def test_transforms_of_counts_are_randomised_to_be_uniform():
    rng = np.random.default_rng(4)
    data = predictions(1.0)
    data["observed_data"]["y"].values = rng.poisson(1.0, size=1500)
    data["posterior_predictive"]["y"].values = rng.poisson(1.0, size=(1, 2000, 1500))
    c = calibration(data)
    assert stats.kstest(c.pit, "uniform").pvalue > 1e-3
    assert np.all(c.coverage >= c.levels - 4 * c.standard_error)


@pytest.mark.thorough
@pytest.mark.parametrize("likelihood", representative(["normal", "poisson", "bernoulli"], ["normal", "poisson"]))
def test_intervals_cover_what_was_simulated(likelihood):
    # New outcomes of new functions, given the model they come from: 90 % intervals hold 90 % of them.
    simulations, held_out = 60, np.linspace(-1.9, 1.9, 5)[:, None]
    distribution = {
        "normal": lambda f: dist.Normal(f, NOISE),
        "poisson": lambda f: dist.Poisson(jnp.exp(f)),
        "bernoulli": lambda f: dist.Bernoulli(logits=f),
    }[likelihood]
    model = model_of(distribution, mean=0.5)
    guide = sgp.AutoTSVGP(model, np.linspace(-2.0, 2.0, 9)[:, None])
    svi = SVI(model, guide, sgp.NaturalGradient(1.0), sgp.QuadratureELBO())
    inputs = jnp.concatenate([X, held_out])
    svi.init(jax.random.key(0), X, y)

    @jax.jit
    def simulate(key):
        key_f, key_y, key_q, key_new = jax.random.split(key, 4)
        f = 0.5 + jnp.linalg.cholesky(oracle_kernel(inputs)) @ jax.random.normal(key_f, (len(inputs),))
        outcomes = distribution(f).sample(key_y).astype(float)
        state = svi.init(jax.random.key(0), X, outcomes[:N])
        step = lambda _, state: svi.update(state, X, outcomes[:N])[0]  # noqa: E731
        params = svi.get_params(jax.lax.fori_loop(0, 15, step, state))
        q = guide.posterior(jax.random.key(0), params, held_out)["f"]
        draws = q.mean + jnp.sqrt(q.variance) * jax.random.normal(key_q, (4000, len(held_out)))
        return f[N:], outcomes[N:], draws, distribution(draws).sample(key_new)

    f, outcomes, f_draws, y_draws = jax.lax.map(simulate, jax.random.split(jax.random.key(7), simulations))
    for truth, draws in ((f, f_draws), (outcomes, y_draws)):
        share, level = (
            np.mean(truth[:, None, :] > draws, axis=1) + 0.5 * np.mean(truth[:, None, :] == draws, axis=1),
            0.9,
        )
        covered = np.abs(share - 0.5) <= 0.5 * level
        # Five inputs of one function are not independent: the standard error is that over functions.
        error = covered.mean(axis=1).std() / np.sqrt(simulations)
        discrete = likelihood != "normal" and draws is y_draws
        assert covered.mean() > level - 4 * error
        assert discrete or covered.mean() < level + 4 * error


def oracle_kernel(inputs):
    squared = jnp.square(inputs[:, None, 0] - inputs[None, :, 0])
    return jnp.exp(-0.5 * squared / 0.8**2) + 1e-8 * jnp.eye(len(inputs))


# NumPyro's variational simulation-based calibration.


def with_effect(X, y=None):
    effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.8), X, jitter=JITTER))
    group = jnp.where(jnp.arange(X.shape[0]) % 2 == 0, 1.0, -1.0)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + effect * group, NOISE), obs=y)


class Distorted(Messenger):
    """What is drawn from a guide, moved by `shift` standard deviations, and `scale` times as wide."""

    def __init__(self, shift, scale):
        self.shift, self.scale = shift, scale
        super().__init__()

    def process_message(self, msg):
        if msg["type"] == "sample" and not msg["is_observed"]:
            q = msg["fn"]
            value = q.sample(numpyro.prng_key()) if msg["value"] is None else msg["value"]
            msg["value"] = q.mean + self.scale * (value - q.mean) + self.shift * jnp.sqrt(q.variance)


@pytest.mark.parametrize(
    ("shift", "scale", "symmetric", "uniform"),
    [(0.0, 1.0, True, True), (1.0, 1.0, False, False), (0.0, 0.25, True, False)],
    ids=["right", "shifted", "too narrow"],
)
@pytest.mark.exhaustive
def test_vsbc_sees_a_shift_and_its_probabilities_a_wrong_width_in_gps_and_other_latents(
    shift, scale, symmetric, uniform
):
    inputs = np.linspace(-2.0, 2.0, 24)[:, None]
    fitted_guide = sgp.AutoTSVGP(with_effect, np.linspace(-2.0, 2.0, 9)[:, None], joint=False)

    def guide(X, y=None):
        if numpyro.get_mask() is not False:
            return fitted_guide(X, y)
        with Distorted(shift, scale):  # drawing, after the fit
            return fitted_guide(X, y)

    result = vsbc_diagnostic(
        jax.random.PRNGKey(1),
        with_effect,
        guide,
        sgp.NaturalGradient(1.0, optax.adam(optax.cosine_decay_schedule(0.1, 80))),
        sgp.QuadratureELBO(),
        inputs,
        observed_sites=["y"],
        num_simulations=100,
        num_svi_steps=80,
        num_samples=200,
    )
    assert result.param_names == ("effect", "f")
    # NumPyro's test compares p with 1 − p, so it is about bias. That p is uniform is about the width too.
    for site, p in result.probabilities.items():
        bias = np.reshape(result.ks_pvalues[site], -1)
        width = np.array([stats.kstest(entry, "uniform").pvalue for entry in p.reshape(100, -1).T])
        for pvalues, right in ((bias, symmetric), (width, uniform)):
            assert pvalues.min() > 1e-3 / len(pvalues) if right else pvalues.max() < 1e-3, (site, pvalues)


# Mistakes.


def deep(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.8), X))
    g = numpyro.sample("g", sgp.GaussianProcess(SquaredExponential(0.8), f[:, None]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(g, NOISE), obs=y)


def replicated(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.8), X))
    with numpyro.plate("replicate", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


scaled = handlers.scale(normal, scale=0.5)
# Datum n depends on another row, and on the latents of other outputs at its own row.
swapped = model_of(lambda f: dist.Normal(f[..., np.r_[: N - 2, N - 1, N - 2]], NOISE))


def mixed(X, y=None):
    with numpyro.plate("output", 2):
        f = numpyro.sample("f", sgp.GaussianProcess(SquaredExponential(0.8), X))
    with numpyro.plate("output", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(jnp.array([[1.0, 0.5], [0.0, 1.0]]) @ f, NOISE), obs=y)


twice = np.stack([y, y])


@cache
def begun(model):
    guide = sgp.AutoTSVGP(model, {"f": Z, "g": Z} if model is deep else Z)
    svi = SVI(model, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    full = (X, twice) if model in (replicated, mixed) else (X, y)
    return svi, svi.get_params(svi.init(jax.random.key(0), *full))


@pytest.mark.parametrize(
    ("fn", "model", "args", "options", "message"),
    [
        (loo_cavity, normal, (X[:4], y[:4]), {"num_data": N}, "plates take some of its rows"),
        (loo_cavity, scaled, (X, y), {}, "'y' is scaled"),
        (psis_khat, normal, (X, y), {"batch_size": 0}, "`batch_size` must be a positive integer"),
        (loo_cavity, deep, (X, y), {}, "GP on top of a GP"),
        (loo_cavity, replicated, (X, twice), {}, r"shape \(2, 14\)"),
        (loo_cavity, swapped, (X, y), {}, "some data depend on other rows"),
        (loo_cavity, mixed, (X, twice), {}, "some data depend on other rows"),
        (loo_cavity, three_latents, (X, y), {"num_draws": 4}, "`num_draws` must be at least 6"),
        (loo_cavity, normal, (X, y), {"var_name": "z"}, r"one of the observed sites \['y'\]"),
        (loo_cavity, normal, (X,), {}, r"one of the observed sites \[\]"),
        (psis_khat, deep, (X, y), {}, "no closed form"),
        (psis_khat, normal, (X[:4], y[:4]), {"num_data": N}, r"4 of 14 rows|take \[\(14, 4\)\]"),
        (psis_khat, normal, (X, y), {"num_samples": 1}, "at least 30"),
    ],
)
def test_a_mistake_raises_and_the_message_says_what_to_do(fn, model, args, options, message):
    svi, params = begun(model)
    with pytest.raises(ValueError, match=message):
        fn(jax.random.key(0), svi, params, *args, **options)


@pytest.mark.thorough
def test_calibration_names_the_outcomes_and_checks_its_levels():
    svi, result = fitted(normal, sgp.AutoTSVGP(normal, Z), X, y)
    data = sgp.to_arviz(jax.random.key(1), svi, result, X, y, num_samples=50)
    assert calibration(data).pit.shape == (N,)
    with pytest.raises(ValueError, match=r"one of the outcomes \['y'\]"):
        calibration(data, "z")
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibration(data, levels=(90.0,))
