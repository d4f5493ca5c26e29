"""Rows that come after the training, or leave it (`condition`, `remove`), against dense linear algebra."""

import dataclasses
import functools

from guides import GUIDES, LOOSE, ONE_SITE_A_ROW, OnBasis, initial_parameters, mean_field
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, init_to_value
from numpyro.infer.autoguide import AutoDelta
import optax
import oracles
from problems import LIKELIHOODS, converged
import pytest
from scipy.stats import norm

import numpyro_sgp as sgp
from numpyro_sgp.guides import conditioning
from numpyro_sgp.guides.conditioning import with_past
from numpyro_sgp.posteriors.sites import JointSites, TiedSites

pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(0)
# More inducing inputs than rows in the second batch, and fewer than in the first.
N, FIRST, D, M, N_NEW = 14, 10, 2, 5, 3
X, Z, X_NEW = (RNG.uniform(-1.2, 1.2, size=(rows, D)) for rows in (N, M, N_NEW))
NOISE = RNG.uniform(0.2, 0.6, size=N)
REALS, OTHERS = RNG.normal(size=(2, N)) + np.sin(2.0 * X[:, 0])
COUNTS = RNG.poisson(np.exp(0.3 + X[:, 0])).astype(float)
LABELS = (OTHERS > 0.0).astype(float)
LENGTHSCALE, VARIANCE, MEAN, JITTER = 0.9, 1.3, 0.4, 1e-6
HEAD, TAIL = slice(None, FIRST), slice(FIRST, None)
HALVES = slice(None, N // 2), slice(N // 2, None)  # of one shape, so that one program does for both
KERNEL = sgp.kernels.SquaredExponential
RTOL = 1e-8


def gp(X, lengthscale=LENGTHSCALE, mean=MEAN):
    kernel = KERNEL(jnp.asarray(lengthscale, X.dtype), jnp.asarray(VARIANCE, X.dtype))
    return sgp.GaussianProcess(kernel, X, mean, jitter=JITTER)


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """Gaussian noise that differs from row to row; `traces` counts how often the model is run."""

    traces: list = dataclasses.field(default_factory=list)

    def __call__(self, X, noise=1.0, y=None):
        self.traces.append(None)
        f = numpyro.sample("f", gp(X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)


def poisson(X, y=None):
    f = numpyro.sample("f", gp(X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def bernoulli(X, y=None):
    f = numpyro.sample("f", gp(X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def with_a_lengthscale(X, noise=1.0, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(np.log(LENGTHSCALE), 1.0))
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL(lengthscale, VARIANCE), X, MEAN, jitter=JITTER))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def two_latents(X, noise=1.0, y=None):
    with numpyro.plate("latents", 2):
        f = numpyro.sample("f", gp(X))
    with numpyro.plate("outcomes", 2, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


ALL_GUIDES = {
    **GUIDES,
    "trained_inducing": functools.partial(GUIDES["tied"], learn_inducing=True),
    "weights": lambda model, Z, **options: sgp.AutoWeightSpaceGP(OnBasis(model, Z), **options),
}
SITE_A_ROW = ("per_datum", "dense")
# Taking rows out adds to sums, or changes a root.
LOSES_ROWS = ("tied", "whitened")
# The two forms with a site for each row take in others in the same way, and inducing inputs that move have a test below.
each_guide = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.thorough) if n in ("per_datum", "trained_inducing") else n for n in ALL_GUIDES],
)


def started(model, guide, *args):
    """As `initial_parameters`, compiled: sooner where a model has many sites."""
    svi = SVI(model, guide, optax.sgd(0.0), sgp.QuadratureELBO())
    return svi.get_params(jax.jit(svi.init)(jax.random.key(0), *args))


def at_prior(name, model, *args):
    """A guide, and its parameters before any data: sites of rows are those of one row, and say nothing."""
    guide = ALL_GUIDES[name](model, Z)
    return guide, initial_parameters(model, guide, *args)


@functools.cache
def regressing(name):
    """The same for Gaussian noise, and `condition` compiled: tests share it."""
    guide, params = at_prior(name, Gaussian(), *rows_of(slice(0, 1), X, NOISE, REALS))
    return guide, params, jax.jit(guide.condition)


@functools.cache
def counting(name):
    """The same for counts."""
    guide, params = at_prior(name, poisson, *rows_of(slice(0, 1), X, COUNTS))
    return guide, params, jax.jit(guide.condition)


def rows_of(select, *arrays):
    return tuple(array[..., select, :] if array is X else array[..., select] for array in arrays)


def prior_blocks(rows=slice(None), X_at=X_NEW):
    """Kuu with jitter, Kuf at rows of the data, Kun and Knn at other inputs."""
    Kuu = oracles.with_jitter(oracles.se(Z, Z, LENGTHSCALE, VARIANCE), JITTER)
    inputs = X[rows]
    return tuple([Kuu] + [oracles.se(*pair, LENGTHSCALE, VARIANCE) for pair in ((Z, inputs), (Z, X_at), (X_at, X_at))])


def dense_regression(name, y, rows=slice(None)):
    """Mean and covariance of f(X_NEW) given rows with Gaussian noise, by dense algebra."""
    Kuu, Kuf, Kun, Knn = prior_blocks(rows)
    residual, noise = y[rows] - MEAN, NOISE[rows]
    if name in ("dense", "weights"):
        Kff, Kfn = (oracles.se(X[rows], other, LENGTHSCALE, VARIANCE) for other in (X[rows], X_NEW))
        if name == "weights":
            Kff, Kfn, Knn = (a.T @ np.linalg.solve(Kuu, b) for a, b in ((Kuf, Kuf), (Kuf, Kun), (Kun, Kun)))
        V = np.linalg.solve(Kff + np.diag(noise**2), Kfn)
        mean, covariance = V.T @ residual, Knn - V.T @ Kfn
    else:
        mean, covariance = oracles.conditional(*oracles.regression_posterior(Kuu, Kuf, residual, noise), Kuu, Kun, Knn)
    return mean + MEAN, covariance


@functools.partial(jax.jit, static_argnums=0)
def moments_of(guide, params, *args):
    q = guide.posterior(jax.random.key(1), params, *(args or (X_NEW,)))["f"]
    return q.mean, q.covariance()


def assert_same(actual, wanted, rtol=RTOL, atol=RTOL):
    for pair in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(*pair, rtol=rtol, atol=atol)


# Gaussian noise.


@each_guide
def test_conditioning_on_one_half_then_the_other_is_the_posterior_of_all_rows_in_any_order(name):
    guide, params, condition = regressing(name)
    selected = (HEAD, TAIL) if name == "tied" else HALVES
    halves = [rows_of(half, X, NOISE, REALS) for half in selected]
    first = condition(params, *halves[0])
    assert_same(moments_of(guide, first), dense_regression(name, REALS, selected[0]))
    both = condition(first, *halves[1])
    assert_same(moments_of(guide, both), dense_regression(name, REALS))
    if name == "tied":
        other = condition(condition(params, *halves[1]), *halves[0])
        assert_same(moments_of(guide, other), dense_regression(name, REALS))
    if name in LOSES_ROWS:
        # Removing rows gives the posterior of the others, and undoes what they did.
        remove = jax.jit(guide.remove)
        assert_same(moments_of(guide, remove(both, *halves[1])), moments_of(guide, first))
        if name == "tied":
            assert_same(moments_of(guide, remove(both, *halves[0])), dense_regression(name, REALS, TAIL))


@pytest.mark.thorough
@each_guide
def test_the_order_of_rows_does_not_matter_and_any_of_them_can_leave(name):
    guide, params, condition = regressing(name)
    for half in (TAIL, HEAD):
        params = condition(params, *rows_of(half, X, NOISE, REALS))
    assert_same(moments_of(guide, params), dense_regression(name, REALS))
    if name not in SITE_A_ROW:
        for half, others in ((TAIL, HEAD), (HEAD, TAIL)):
            left = jax.jit(guide.remove)(params, *rows_of(half, X, NOISE, REALS))
            assert_same(moments_of(guide, left), dense_regression(name, REALS, others))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [n if n == "whitened" else pytest.param(n, marks=pytest.mark.thorough) for n in ALL_GUIDES if n != "weights"],
)
def test_each_of_several_latents_is_conditioned_on_its_own_outcomes(name):
    y = np.stack([REALS, OTHERS])
    guide, params = at_prior(name, two_latents, *rows_of(slice(0, 1), X, NOISE, y))
    condition = jax.jit(guide.condition)
    for half in HALVES:
        params = condition(params, *rows_of(half, X, NOISE, y))
    wanted = [dense_regression(name, own) for own in y]
    assert_same(moments_of(guide, params), [np.stack(each) for each in zip(*wanted, strict=True)])


def sum_of_two(X, noise=1.0, y=None):
    f = numpyro.sample("f", gp(X))
    g = numpyro.sample("g", gp(X, 0.4, 0.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f + g, noise), obs=y)


@pytest.mark.thorough
def test_sites_that_are_independent_take_the_best_product_of_gaussians_together():
    guide, params = at_prior("whitened", sum_of_two, *rows_of(HEAD, X, NOISE, REALS))
    condition = jax.jit(functools.partial(guide.condition, num_steps=500))
    after = condition(params, *rows_of(slice(None), X, NOISE, REALS))
    Kuu, V = [], []
    for lengthscale in (LENGTHSCALE, 0.4):
        Kuu.append(oracles.with_jitter(oracles.se(Z, Z, lengthscale, VARIANCE), JITTER))
        V.append(np.linalg.solve(Kuu[-1], oracles.se(Z, X, lengthscale, VARIANCE)))
    P = [np.linalg.inv(K) + (v / NOISE**2) @ v.T for K, v in zip(Kuu, V, strict=True)]
    # The means are those of the joint posterior, the precisions its diagonal blocks.
    across = (V[0] / NOISE**2) @ V[1].T
    residual = (REALS - MEAN) / NOISE**2
    m = np.linalg.solve(np.block([[P[0], across], [across.T, P[1]]]), np.concatenate([v @ residual for v in V]))
    q = guide.posterior(jax.random.key(1), after, X_NEW)
    for i, (site, lengthscale, mean) in enumerate((("f", LENGTHSCALE, MEAN), ("g", 0.4, 0.0))):
        Kun, Knn = (oracles.se(other, X_NEW, lengthscale, VARIANCE) for other in (Z, X_NEW))
        own = oracles.conditional(m[i * M : (i + 1) * M], np.linalg.inv(P[i]), Kuu[i], Kun, Knn)
        # Steps that take turns stop short of the optimum by more than the last of them.
        assert_same((q[site].mean, q[site].covariance()), (own[0] + mean, own[1]), rtol=1e-7, atol=1e-7)


@pytest.mark.thorough
def test_other_latents_stay_at_their_point_estimates():
    start = init_to_value(values={"lengthscale": LENGTHSCALE})
    guide = sgp.AutoTSVGP(with_a_lengthscale, Z, base=functools.partial(AutoDelta, init_loc_fn=start))
    params = initial_parameters(with_a_lengthscale, guide, *rows_of(HEAD, X, NOISE, REALS))
    np.testing.assert_allclose(guide.median(params)["lengthscale"], LENGTHSCALE, rtol=1e-12)
    after = jax.jit(guide.condition)(params, *rows_of(slice(None), X, NOISE, REALS))
    assert_same(moments_of(guide, after), dense_regression("tied", REALS))
    np.testing.assert_allclose(guide.median(after)["lengthscale"], LENGTHSCALE, rtol=1e-12)


@pytest.mark.thorough
def test_sites_at_inducing_inputs_that_have_moved_are_projected_before_rows_are_added():
    guide, params = at_prior("trained_inducing", Gaussian(), *rows_of(HEAD, X, NOISE, REALS))
    params = jax.jit(guide.condition)(params, *rows_of(HEAD, X, NOISE, REALS))
    lambda1, Lambda2 = (np.asarray(each) for each in (params["f_auto_sites"].lambda1, params["f_auto_sites"].Lambda2))
    moved = Z + 0.2 * RNG.normal(size=Z.shape)
    params["f_auto_inducing"] = dataclasses.replace(params["f_auto_inducing"], Z=jnp.asarray(moved))
    before = moments_of(guide, params)
    Kuu = oracles.with_jitter(oracles.se(moved, moved, LENGTHSCALE, VARIANCE), JITTER)
    Kuv, Kuf, Kun = (oracles.se(moved, other, LENGTHSCALE, VARIANCE) for other in (Z, X[TAIL], X_NEW))
    Knn = oracles.se(X_NEW, X_NEW, LENGTHSCALE, VARIANCE)
    # The noise that jitter stands for moves along with them.
    Kuv = Kuv + JITTER * VARIANCE * np.eye(M)
    m, S = oracles.from_sites(lambda1, Lambda2, Kuu, np.linalg.solve(Kuu, Kuv).T)
    mean, covariance = oracles.conditional(m, S, Kuu, Kun, Knn)
    assert_same(before, (mean + MEAN, covariance), atol=1e-7)
    V = np.linalg.solve(Kuu, Kuf)
    S_after = np.linalg.inv(np.linalg.inv(S) + (V / NOISE[TAIL] ** 2) @ V.T)
    m_after = S_after @ (np.linalg.solve(S, m) + V @ ((REALS[TAIL] - MEAN) / NOISE[TAIL] ** 2))
    mean, covariance = oracles.conditional(m_after, S_after, Kuu, Kun, Knn)
    after = jax.jit(guide.condition)(params, *rows_of(TAIL, X, NOISE, REALS))
    assert_same(moments_of(guide, after), (mean + MEAN, covariance), atol=1e-7)


# Other likelihoods.


OUTCOMES = {
    "poisson": (poisson, COUNTS, LIKELIHOODS["poisson"].log_density),
    "bernoulli": (bernoulli, LABELS, LIKELIHOODS["bernoulli"].log_density),
}


def dense_conditioned(m0, S0, Kuu, Kuf, kff, y, log_density):
    """The Gaussian q(u) that minimises −Σ_n E_q[log p(y_n | f_n)] + KL(q ‖ N(m0, S0)), over means and roots."""
    V = np.linalg.solve(Kuu, Kuf)
    before = V.T @ m0 + MEAN
    variance = kff - np.sum(V * Kuf, axis=0) + np.sum(V * (S0 @ V), axis=0)
    # Deviations from m0 have a prior without a mean.
    blocks = S0, S0 @ V, variance
    ((m, S),), _ = oracles.optimal_posterior(lambda deviation: log_density(deviation + before, y, None), [blocks])
    return m0 + m, S


def dense_outcomes(name, likelihood, *batches):
    """Mean and covariance of f(X_NEW) after batches of outcomes."""
    _, y, log_density = OUTCOMES[likelihood]
    u = X if name == "dense" else Z
    Kuu = oracles.se(u, u, LENGTHSCALE, VARIANCE)
    Kuu = Kuu + 1e-12 * np.eye(len(u)) if name == "dense" else oracles.with_jitter(Kuu, JITTER)
    m, S = np.zeros(len(u)), Kuu
    Kun, Knn = (oracles.se(other, X_NEW, LENGTHSCALE, VARIANCE) for other in (u, X_NEW))
    for batch in batches:
        Kuf = oracles.se(u, X[batch], LENGTHSCALE, VARIANCE)
        kff = np.full(Kuf.shape[1], VARIANCE)
        if name == "weights":
            kff = np.sum(Kuf * np.linalg.solve(Kuu, Kuf), axis=0)
        m, S = dense_conditioned(m, S, Kuu, Kuf, kff, y[batch], log_density)
    mean, covariance = oracles.conditional(m, S, Kuu, Kun, Knn)
    if name == "weights":
        covariance = covariance - Knn + Kun.T @ np.linalg.solve(Kuu, Kun)
    return mean + MEAN, covariance


# One with sums, one with a root, and one whose u are the values of f.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("likelihood", "name"),
    [
        (likelihood, name)
        if (likelihood, name) in (("poisson", "tied"), ("poisson", "dense"), ("bernoulli", "whitened"))
        else pytest.param(likelihood, name, marks=pytest.mark.thorough)
        for likelihood in OUTCOMES
        for name in ALL_GUIDES
        if likelihood == "poisson" or name in ("tied", "whitened", "dense")
    ],
)
def test_the_result_is_the_gaussian_that_minimises_the_bound_of_the_new_rows(name, likelihood):
    model, y, _ = OUTCOMES[likelihood]
    if likelihood == "poisson":
        guide, params, condition = counting(name)
    else:
        guide, params = at_prior(name, model, *rows_of(slice(0, 1), X, y))
        condition = jax.jit(guide.condition)
    selected = (HEAD, TAIL) if name == "tied" else HALVES
    first = condition(params, *rows_of(selected[0], X, y))
    both = condition(first, *rows_of(selected[1], X, y))
    # Steps end where a full one changes sites by 4e-10 of the largest.
    assert_same(moments_of(guide, both), dense_outcomes(name, likelihood, *selected), rtol=1e-7, atol=1e-7)
    if name not in SITE_A_ROW:
        back = jax.jit(guide.remove)(both, *rows_of(selected[1], X, y))
        assert_same(moments_of(guide, back), moments_of(guide, first), rtol=1e-7, atol=1e-7)


@pytest.fixture
def minima(monkeypatch):
    """Where the steps of `condition` stand after each evaluation."""
    found = []

    def one_by_one(evaluate, start, num_steps):
        compiled = jax.jit(functools.partial(minimised, evaluate, start))
        found.extend(compiled(number) for number in range(1, num_steps + 1))
        return found[-1]

    minimised = conditioning.minimised
    monkeypatch.setattr(conditioning, "minimised", one_by_one)
    return found


@pytest.mark.thorough
# Whether rounding looks like a rise depends on the outcome: at each of these it would, were the slack that of the value.
@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("dense", 1e5),
        *[pytest.param(*case, marks=pytest.mark.thorough) for case in (("dense", 1e4), ("tied", 3e4), ("tied", 5e5))],
    ],
)
def test_an_outcome_that_nobody_believed_in_is_reached_downhill_and_without_a_warning(name, outcome, minima):
    guide, params, _ = counting(name)
    after = guide.condition(params, Z[:1], np.array([outcome]))
    (mean,), ((variance,),) = moments_of(guide, after, Z[:1])
    # What u explains of the prior variance k of f, and what not: all of it where u are the values of f.
    k_u = oracles.se(Z, Z[:1], LENGTHSCALE, VARIANCE)[:, 0]
    Kuu = oracles.with_jitter(oracles.se(Z, Z, LENGTHSCALE, VARIANCE), JITTER)
    k = VARIANCE if name == "dense" else k_u @ np.linalg.solve(Kuu, k_u)
    # y − exp(m + v/2) = (m − m₀)/k and 1/s = 1/k + exp(m + v/2), where quadrature has no error: v is small.
    rate = np.exp(mean + 0.5 * variance)
    np.testing.assert_allclose(outcome - rate, (mean - MEAN) / k, rtol=1e-3)
    np.testing.assert_allclose(variance - (VARIANCE - k), 1.0 / (1.0 / k + rate), rtol=1e-6)
    # Steps that overflow are not taken: what is, is finite and lower, but for the rounding of its terms.
    values = np.array([each.value for each in minima])
    assert np.all(np.isfinite(values))
    assert np.all(np.diff(values) <= 1e-13 * values[0])
    assert np.all([np.all(np.isfinite(leaf)) for each in minima for leaf in jax.tree.leaves(each.sites)])
    assert minima[-1].converged
    assert minima[-1].evaluations < len(minima)


# Joint posteriors.

GROUP = RNG.integers(0, 4, N)
GROUPED = REALS + RNG.normal(size=4)[GROUP]
COEFFICIENT = 2.0  # prior standard deviation of a
JOINT = {"tied": GUIDES["tied"], "natural": GUIDES["natural"]}
# Members whose u are projected, and in another test those whose u are whitened.
each_joint = pytest.mark.parametrize("name", ["tied", pytest.param("natural", marks=pytest.mark.thorough)])
NEW_GROUPS = np.array([3, 0, 2])


# Each in one test, and in the other where all tests run.
eliminated_by_default, kept_by_default = (
    pytest.mark.parametrize(
        "eliminated",
        [
            pytest.param(v, id=i, marks=pytest.mark.thorough if v == other else ())
            for v, i in ((False, "all"), (True, "eliminated"))
        ],
        indirect=True,
    )
    for other in (False, True)
)


@pytest.fixture
def eliminated(request, monkeypatch):
    """Whether the effects of the groups are integrated out of the others."""
    if request.param:
        monkeypatch.setattr("numpyro_sgp.guides.group._FEWEST_EFFECTS", 2)
    return request.param


def predictor(X, group):
    f = numpyro.sample("f", gp(X))
    a = numpyro.sample("a", dist.Normal(0.3, COEFFICIENT))
    with numpyro.plate("groups", 4):
        effects = numpyro.sample("effects", dist.Normal(0.0, 0.8))
    return f + a + effects[group]


def grouped(X, group, noise=1.0, y=None):
    eta = predictor(X, group)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(eta, noise), obs=y)


def with_a_scale(X, group, y=None, inside=True):
    eta = predictor(X, group)
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", X.shape[0]), handlers.mask(mask=inside):
        numpyro.sample("y", dist.Normal(eta, scale), obs=y)


def dense_joint(y, rows=slice(None)):
    """Means and standard deviations of f(X_NEW), a and effects given rows with Gaussian noise."""
    Kuu, Kuf, Kun, Knn = prior_blocks(rows)
    return dense_joint_of(y[rows], np.linalg.solve(Kuu, Kuf), GROUP[rows], NOISE[rows], Kuu, Kun, Knn)


def dense_joint_of(y, V, group, noise, Kuu, Kun, Knn):
    """The same where rows see Vᵀu of f."""
    H = np.concatenate([V.T, np.ones((len(y), 1)), np.eye(4)[group]], axis=1)
    prior_mean = np.concatenate([np.zeros(M), [0.3], np.zeros(4)])
    B = np.diag([COEFFICIENT**2, *[0.8**2] * 4])
    K = np.block([[Kuu, np.zeros((M, 5))], [np.zeros((5, M)), B]])
    S = np.linalg.inv(np.linalg.inv(K) + (H.T / noise**2) @ H)
    m = prior_mean + S @ H.T @ ((y - MEAN - H @ prior_mean) / noise**2)
    mean, covariance = oracles.conditional(m[:M], S[:M, :M], Kuu, Kun, Knn)
    return np.concatenate([mean + MEAN, m[M:]]), np.sqrt(np.concatenate([np.diag(covariance), np.diag(S)[M:]]))


@functools.partial(jax.jit, static_argnums=(0, 2))
def summary(guide, params, *names):
    """Means and standard deviations of f(X_NEW), a and effects, and whatever else, one after the other."""
    upper = guide.quantiles(params, norm.cdf(1.0), X_NEW, NEW_GROUPS)
    middle = guide.median(params, X_NEW, NEW_GROUPS)
    each = [jnp.concatenate([jnp.ravel(v[name]) for name in ("f", "a", "effects", *names)]) for v in (middle, upper)]
    return each[0], each[1] - each[0]


def joint_at_prior(model, guide, *args):
    """Parameters at the prior, where all priors are Gaussian: training starts away from it, at sites that say little."""

    def without_data(sites):
        zeros = {symbol: jnp.zeros_like(getattr(sites, symbol)) for symbol in ("lambda1", "Lambda2")}
        return dataclasses.replace(sites, **zeros)

    params = started(model, guide, *args)
    return {k: without_data(v) if isinstance(v, JointSites) else v for k, v in params.items()}


@each_joint
@eliminated_by_default
@pytest.mark.thorough
def test_all_members_of_a_joint_posterior_are_conditioned_together(name, eliminated):
    rows = [rows_of(half, X, GROUP, NOISE, GROUPED) for half in HALVES]
    guide = JOINT[name](grouped, Z)
    params = joint_at_prior(grouped, guide, *rows[0])
    # An effect has a parameter of its own where it is eliminated.
    assert ("f_auto_effect_sites" in params) == eliminated
    condition, remove = jax.jit(guide.condition), jax.jit(guide.remove)
    first = condition(params, *rows[0])
    assert_same(summary(guide, first), dense_joint(GROUPED, HALVES[0]))
    both = condition(first, *rows[1])
    assert_same(summary(guide, both), dense_joint(GROUPED))
    assert_same(summary(guide, remove(both, *rows[0])), dense_joint(GROUPED, HALVES[1]))


@pytest.mark.exhaustive
@eliminated_by_default
def test_joint_sites_at_inducing_inputs_that_have_moved_are_projected_before_rows_are_added(eliminated):
    guide = sgp.AutoTSVGP(grouped, Z, learn_inducing=True)
    rows = [rows_of(half, X, GROUP, NOISE, GROUPED) for half in (HEAD, TAIL)]
    condition, remove = jax.jit(guide.condition), jax.jit(guide.remove)
    params = condition(joint_at_prior(grouped, guide, *rows[0]), *rows[0])
    assert_same(summary(guide, params), dense_joint(GROUPED, HEAD))
    moved = Z + 0.2 * np.random.default_rng(3).normal(size=Z.shape)
    params["f_auto_inducing"] = dataclasses.replace(params["f_auto_inducing"], Z=jnp.asarray(moved))
    Kzz, Kzf, _, Knn = prior_blocks(HEAD)
    Kuu = oracles.with_jitter(oracles.se(moved, moved, LENGTHSCALE, VARIANCE), JITTER)
    Kuz, Kuf, Kun = (oracles.se(moved, other, LENGTHSCALE, VARIANCE) for other in (Z, X[TAIL], X_NEW))
    # Old rows see what u says of the inducing variables they came in by; the noise that jitter stands for moves along.
    old = np.linalg.solve(Kuu, Kuz + JITTER * VARIANCE * np.eye(M)) @ np.linalg.solve(Kzz, Kzf)
    both = np.concatenate([old, np.linalg.solve(Kuu, Kuf)], axis=1)
    before = dense_joint_of(GROUPED[HEAD], old, GROUP[HEAD], NOISE[HEAD], Kuu, Kun, Knn)
    assert_same(summary(guide, params), before, atol=1e-7)
    after = condition(params, *rows[1])
    assert_same(summary(guide, after), dense_joint_of(GROUPED, both, GROUP, NOISE, Kuu, Kun, Knn), atol=1e-7)
    assert_same(summary(guide, remove(after, *rows[1])), before, atol=1e-7)


def trained(model, guide, steps, *args, loss=None):
    loss = sgp.QuadratureELBO() if loss is None else loss
    svi = SVI(model, guide, sgp.NaturalGradient(0.7, optax.set_to_zero()), loss)
    state = jax.jit(svi.init)(jax.random.key(0), *args)
    return svi.get_params(converged(svi, state, steps, *args))


@pytest.mark.parametrize("name", ["natural", pytest.param("tied", marks=pytest.mark.thorough)])
@kept_by_default
@pytest.mark.exhaustive
def test_the_prior_of_a_noise_scale_counts_once(name, eliminated):
    guide = JOINT[name](with_a_scale, Z)
    rows = [rows_of(half, X, GROUP, GROUPED) for half in (HEAD, TAIL)]
    # With the tighter bound data can know less than nothing of a scale in some direction, which is cut off: 1e-5 here.
    params = trained(with_a_scale, guide, 100, *rows[0], loss=LOOSE)
    before = summary(guide, params, "scale")
    condition, remove = jax.jit(guide.condition), jax.jit(guide.remove)
    outside = np.zeros(N - FIRST, bool)
    # Training ends where its steps end, which the first number of the tolerance is for.
    assert_same(summary(guide, condition(params, *rows[1], outside), "scale"), before, rtol=1e-7, atol=1e-7)
    assert_same(summary(guide, remove(params, *rows[1], outside), "scale"), before)
    after = condition(params, *rows[1], ~outside)
    assert np.max(np.abs(summary(guide, after, "scale")[0] - before[0])) > 0.05
    assert_same(summary(guide, remove(after, *rows[1], ~outside), "scale"), before, rtol=1e-7, atol=1e-7)


@pytest.mark.exhaustive
def test_with_the_tighter_bound_a_noise_scale_comes_back_but_for_what_is_cut_off():
    guide = JOINT["tied"](with_a_scale, Z)
    rows = [rows_of(half, X, GROUP, GROUPED) for half in (HEAD, TAIL)]
    params = trained(with_a_scale, guide, 100, *rows[0])
    again = guide.remove(guide.condition(params, *rows[1]), *rows[1])
    # A precision of −1e-4 beside 200.
    assert_same(summary(guide, again, "scale"), summary(guide, params, "scale"), rtol=1e-3, atol=1e-4)


# JAX.


@pytest.mark.thorough
def test_it_is_a_pure_function_that_compiles_once():
    guide, before, condition = regressing("tied")
    params = guide.condition(before, *rows_of(HEAD, X, NOISE, REALS))
    # Nothing is changed in place.
    assert before["f_auto_sites"].lambda1.tolist() == [0.0] * M
    compiled = condition(before, *rows_of(HEAD, X, NOISE, REALS))
    for pair in zip(jax.tree.leaves(params), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-10, atol=1e-10)
    runs = len(guide.model.traces)
    condition(params, *rows_of(HEAD, X, NOISE, OTHERS))
    assert len(guide.model.traces) == runs


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["tied", pytest.param("dense", marks=pytest.mark.thorough)])
def test_outcomes_side_by_side_are_as_one_by_one_however_many_steps_each_takes(name):
    guide, params, condition = counting(name)
    outcomes = np.stack([COUNTS[HEAD], 0.0 * COUNTS[HEAD], 500.0 + COUNTS[HEAD]])
    mapped = jax.jit(jax.vmap(lambda y: guide.condition(params, X[HEAD], y)["f_auto_sites"]))(outcomes)
    for index, y in enumerate(outcomes):
        alone = condition(params, X[HEAD], y)["f_auto_sites"]
        for pair in zip(jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(pair[0][index], pair[1], rtol=1e-8, atol=1e-8)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [n if n == "tied" else pytest.param(n, marks=pytest.mark.thorough) for n in ALL_GUIDES]
)
def test_float32_stays_float32_and_is_close_to_dense_float64(name):
    # With float64 enabled, so that whatever had it would make the result float64.
    inputs, outcomes = X.astype(np.float32), COUNTS.astype(np.float32)
    guide = ALL_GUIDES[name](poisson, Z.astype(np.float32))
    params = started(poisson, guide, inputs[:1], outcomes[:1])
    after = jax.jit(guide.condition)(params, inputs, outcomes)
    ends = [after] if name in ONE_SITE_A_ROW else [after, guide.remove(after, inputs, outcomes)]
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(ends) if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    assert dtypes == {np.dtype(np.float32)}
    found = moments_of(guide, after, X_NEW.astype(np.float32))
    # Steps end where a full one changes sites by 7e-5 of the largest.
    assert_same(found, dense_outcomes(name, "poisson", slice(None)), rtol=1e-4, atol=1e-4)


# What is refused.


def on_top(X, y=None):
    f = numpyro.sample("f", gp(X))
    g = numpyro.sample("g", gp(jnp.stack([f, f], axis=-1)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(g, 0.3), obs=y)


def differences(X, y=None):
    f = numpyro.sample("f", gp(X))
    with numpyro.plate("data", X.shape[0] - 1):
        numpyro.sample("y", dist.Normal(f[1:] - f[:-1], 0.3), obs=None if y is None else y[1:])


def own_base(X, noise=1.0, y=None):
    numpyro.sample("lengthscale", dist.Delta(LENGTHSCALE))


REFUSED = {
    "GP on a GP": (on_top, GUIDES["tied"], ValueError, "was called for a GP on top of a GP"),
    "several rows": (differences, GUIDES["whitened"], TypeError, "depend on several rows of the GP site 'f'"),
    "two bases": (
        lambda X, y=None: Gaussian()(X, 1.0, y),
        lambda model, Z: sgp.AutoDecoupledGP(model, Z, Z),
        TypeError,
        "`OrthogonalDecoupled` cannot take in rows after its training",
    ),
    "a family without a rule": (
        lambda X, y=None: Gaussian()(X, 1.0, y),
        mean_field,
        TypeError,
        "`MeanField` cannot take in rows after its training",
    ),
    "own base": (
        lambda X, y=None: with_a_lengthscale(X, 1.0, y),
        lambda model, Z: sgp.AutoTSVGP(model, Z, base=lambda X, y=None: own_base(X)),
        TypeError,
        "a base guide of your own has none",
    ),
}


@pytest.mark.parametrize("method", ["condition", pytest.param("remove", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.thorough) if c == "two bases" else c for c in REFUSED]
)
def test_what_has_no_gaussian_to_condition_is_refused(case, method):
    model, make, error, message = REFUSED[case]
    guide = make(model, Z)
    params = started(model, guide, X, REALS)
    with pytest.raises(error, match=message):
        getattr(guide, method)(params, X, REALS)


@pytest.mark.parametrize("name", SITE_A_ROW)
def test_a_posterior_made_for_its_rows_does_not_lose_them(name):
    guide, params = at_prior(name, Gaussian(), *rows_of(HEAD, X, NOISE, REALS))
    with pytest.raises(TypeError, match="is made for the rows of X, with a site for each"):
        guide.remove(params, *rows_of(HEAD, X, NOISE, REALS))


@pytest.mark.thorough
def test_it_warns_where_steps_have_not_converged():
    guide, params, _ = counting("tied")
    with pytest.warns(UserWarning, match="`condition` took 3 evaluations and its steps still change the posterior"):
        guide.condition(params, *rows_of(HEAD, X, COUNTS), num_steps=3)


@pytest.mark.exhaustive
def test_removing_rows_warns_where_priors_have_not_settled(monkeypatch):
    guide = JOINT["tied"](with_a_scale, Z)
    rows = [rows_of(half, X, GROUP, GROUPED) for half in (slice(None), TAIL)]
    params = trained(with_a_scale, guide, 100, *rows[0])
    guide.remove(params, *rows[1])
    monkeypatch.setattr(conditioning, "_NUM_STEPS_OF_PRIORS", 2)
    with pytest.warns(UserWarning, match="`remove` took 2 evaluations to find the posterior"):
        guide.remove(params, *rows[1])


def refuses_or_makes_nan(guide, method, params, *rows):
    """NaN in the last of the rows' arrays is refused where it has a value, else all that is known becomes NaN."""
    rows = (*rows[:-1], np.where(np.arange(FIRST) == 4, np.nan, rows[-1]))
    with pytest.raises(ValueError, match="1 entries that are NaN"):
        getattr(guide, method)(params, *rows)
    return jax.jit(getattr(guide, method))(params, *rows)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, method) if name == "tied" else pytest.param(name, method, marks=pytest.mark.thorough)
        for name in ALL_GUIDES
        for method in ("condition", "remove")
        if not (name in SITE_A_ROW and method == "remove")
    ],
)
def test_outcomes_that_are_nan_are_not_passed_over(name, method):
    rows = rows_of(HEAD, X, NOISE, REALS)
    guide, params = at_prior(name, Gaussian(), *rows)
    after = refuses_or_makes_nan(guide, method, params, *rows)
    assert np.all(np.isnan(moments_of(guide, after)[0]))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["condition", "remove"])
def test_outcomes_that_are_nan_are_not_passed_over_by_a_joint_posterior(method):
    rows = rows_of(HEAD, X, GROUP, NOISE, GROUPED)
    guide = GUIDES["tied"](grouped, Z)
    params = initial_parameters(grouped, guide, *rows)
    after = refuses_or_makes_nan(guide, method, params, *rows)
    assert np.all(np.isnan(after["f_auto_joint_sites"].lambda1))


# Data that are past.


def trained_lengthscale(X, noise=1.0, y=None):
    lengthscale = numpyro.param("lengthscale", LENGTHSCALE)
    f = numpyro.sample("f", gp(X, jnp.asarray(lengthscale)))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def dense_bound_with_past(lengthscale, lambda1, Lambda2, linear, precision):
    """−Σ_n E_q[log p(y_n | f_n)] + KL(q ‖ p) − E_q[log t(u)] with q(u) ∝ p(u) exp(λ₁ᵀu − ½uᵀΛ₂u)."""

    def k(a, b):
        difference = (a[:, None] - b[None]) / lengthscale
        return VARIANCE * jnp.exp(-0.5 * jnp.sum(difference**2, axis=-1))

    Kuu, Kuf = k(Z, Z) + JITTER * VARIANCE * jnp.eye(M), k(Z, X[TAIL])
    S = jnp.linalg.inv(jnp.linalg.inv(Kuu) + Lambda2)
    m, V = S @ lambda1, jnp.linalg.solve(Kuu, Kuf)
    variance = VARIANCE - jnp.sum(V * Kuf, axis=0) + jnp.sum(V * (S @ V), axis=0)
    noise = NOISE[TAIL]
    ell = -0.5 * ((REALS[TAIL] - MEAN - V.T @ m) ** 2 + variance) / noise**2 - jnp.log(noise * np.sqrt(2.0 * np.pi))
    kl = 0.5 * (jnp.trace(jnp.linalg.solve(Kuu, S)) + m @ jnp.linalg.solve(Kuu, m) - M)
    kl = kl + 0.5 * (jnp.linalg.slogdet(Kuu)[1] - jnp.linalg.slogdet(S)[1])
    return -jnp.sum(ell) + kl - (linear @ m - 0.5 * (m @ precision @ m + jnp.trace(precision @ S)))


def random_sites(seed):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(M, M - 1))
    return rng.normal(size=M), root @ root.T  # one direction of which nothing is known


@pytest.mark.parametrize("name", ["tied", pytest.param("trained_inducing", marks=pytest.mark.thorough)])
@pytest.mark.thorough
def test_past_sites_count_with_the_divergence(name):
    guide, params = at_prior(name, trained_lengthscale, *rows_of(TAIL, X, NOISE, REALS))
    (lambda1, Lambda2), past = random_sites(1), random_sites(2)
    reference = params["f_auto_sites"].reference
    sites = {"f_auto_sites": TiedSites(jnp.asarray(lambda1), jnp.asarray(Lambda2), reference)}
    params |= with_past(sites, {"f_auto_sites": TiedSites(*map(jnp.asarray, past))})

    def loss(lengthscale):
        own = params | {"lengthscale": lengthscale}
        rows = rows_of(TAIL, X, NOISE, REALS)
        return LOOSE.loss(jax.random.key(0), own, trained_lengthscale, guide, *rows)

    value, gradient = jax.jit(jax.value_and_grad(loss))(0.7)
    wanted, slope = jax.jit(jax.value_and_grad(dense_bound_with_past))(0.7, lambda1, Lambda2, *past)
    np.testing.assert_allclose(value, wanted, rtol=1e-9)
    np.testing.assert_allclose(gradient, slope, rtol=1e-7)


@pytest.mark.parametrize("name", ["tied", pytest.param("trained_inducing", marks=pytest.mark.thorough)])
def test_one_full_step_with_past_sites_is_the_posterior_of_all_rows(name):
    guide, params = at_prior(name, Gaussian(), *rows_of(HEAD, X, NOISE, REALS))
    before = guide.condition(params, *rows_of(HEAD, X, NOISE, REALS))
    sites = {"f_auto_sites": before["f_auto_sites"]}
    optim = sgp.NaturalGradient(1.0, optax.set_to_zero())
    svi = SVI(guide.model, guide, optim, sgp.QuadratureELBO())
    state = jax.jit(svi.init)(jax.random.key(0), *rows_of(TAIL, X, NOISE, REALS))
    state = state._replace(optim_state=svi.optim.init({**params, **with_past(sites, sites)}))
    state, _ = jax.jit(svi.update)(state, *rows_of(TAIL, X, NOISE, REALS))
    assert_same(moments_of(guide, svi.get_params(state)), dense_regression("tied", REALS))
