"""`QuadratureELBO` against dense quadrature and Monte Carlo: one latent, two, many, several sites, a GP on a GP."""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.primitives import mutable
import optax
import oracles
import pytest
from scipy import stats
from scipy.special import log_softmax

import numpyro_sgp as sgp
from numpyro_sgp._internal.axis_dependence import MIXED, axes_of
from numpyro_sgp._internal.curvature import Shape, shapes_of
from numpyro_sgp._internal.linear_predictors import traced
from numpyro_sgp._internal.row_dependence import Dependence, row_dependence
from numpyro_sgp.math.quadrature import gauss_hermite, product_grid

pytestmark = pytest.mark.usefixtures("x64")

N, M = 7, 5
RNG = np.random.default_rng(0)
X, Z = np.sort(RNG.uniform(-2.0, 2.0, (N, 1)), axis=0), np.linspace(-2.0, 2.0, M)[:, None]
Y = RNG.normal(size=N)
KERNEL = sgp.kernels.SquaredExponential(0.9, 1.4)


def random_posterior(svi, seed, *args):
    """Parameters of whitened posteriors away from the prior."""
    rng = np.random.default_rng(seed)
    params = svi.get_params(svi.init(jax.random.key(0), *args))
    for name, value in params.items():
        if name.endswith("_m"):
            params[name] = jnp.asarray(0.7 * rng.normal(size=value.shape))
        if name.endswith("_S_sqrt"):
            params[name] = 0.6 * value + jnp.tril(jnp.asarray(0.2 * rng.normal(size=value.shape)))
    return params


def setup(model, seed=1, args=(X, Y)):
    guide = sgp.AutoSVGP(model, Z)
    svi = SVI(model, guide, optax.adam(1e-2), sgp.QuadratureELBO())
    params = random_posterior(svi, seed, *args)
    return guide, params, guide.posterior(jax.random.key(0), params, *args)


def elbo(loss, model, guide, params, *args, key=0):
    return -float(jax.jit(lambda key: loss.loss(key, params, model, guide, *args))(jax.random.key(key)))


def one_latent(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X, mean=0.3))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f, 0.5), obs=y)


def test_rules_integrate_polynomials_up_to_their_degree():
    nodes, weights = gauss_hermite(6)
    for power, moment in ((0, 1.0), (1, 0.0), (2, 1.0), (4, 3.0), (10, 945.0)):
        assert_allclose(np.sum(weights * nodes**power), moment, atol=1e-9 * max(moment, 1.0))
    grid, weights = product_grid(5, 2)
    assert_allclose(np.sum(weights * grid[:, 0] ** 2 * grid[:, 1] ** 4), 3.0, rtol=1e-12)


def test_one_latent_is_integrated_as_dense_quadrature_does():
    guide, params, q = setup(one_latent)
    q = q["f"]
    log_density = lambda f: stats.t.logpdf((Y - f) / 0.5, 4.0) - np.log(0.5)  # noqa: E731
    nodes, weights = np.polynomial.hermite.hermgauss(20)
    f = np.asarray(q.mean) + np.sqrt(2.0 * np.asarray(q.variance)) * nodes[:, None]
    expected = np.sum(weights[:, None] * log_density(f)) / np.sqrt(np.pi) - float(q.kl)
    assert_allclose(elbo(sgp.QuadratureELBO(), one_latent, guide, params, X, Y), expected, rtol=1e-10)
    by_posterior = q.expectation(lambda f: dist.StudentT(4.0, f, 0.5).log_prob(Y)).sum() - q.kl
    assert_allclose(by_posterior, expected, rtol=1e-10)


def test_trace_mean_field_agrees_in_expectation_and_trace_elbo_is_refused():
    guide, params, _ = setup(one_latent)
    exact = elbo(sgp.QuadratureELBO(), one_latent, guide, params, X, Y)
    keys = jax.random.split(jax.random.key(3), 4000)
    loss = TraceMeanField_ELBO()
    draws = -np.asarray(jax.jit(jax.vmap(lambda k: loss.loss(k, params, one_latent, guide, X, Y)))(keys))
    assert abs(draws.mean() - exact) < 5.0 * draws.std() / np.sqrt(len(draws))
    with pytest.raises(NotImplementedError, match=r"QuadratureELBO.*TraceMeanField_ELBO"):
        elbo(Trace_ELBO(), one_latent, guide, params, X, Y)


def two_latents(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern52(1.5, 0.5), X, mean=-0.5))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=y)


def test_two_latents_for_each_datum_are_integrated_on_a_product_grid():
    guide, params, q = setup(two_latents)
    # In closed form over f: E[log N(y | f, e^g)] = −g − ½ ((y − m)² + v) e^(−2g) − ½ log 2π, and E[e^(−2g)] likewise.
    m, v = np.asarray(q["f"].mean), np.asarray(q["f"].variance)
    mean, variance = np.asarray(q["g"].mean), np.asarray(q["g"].variance)
    precision = np.exp(-2.0 * mean + 2.0 * variance)
    expected = np.sum(-mean - 0.5 * ((Y - m) ** 2 + v) * precision - 0.5 * np.log(2.0 * np.pi))
    expected -= float(q["f"].kl) + float(q["g"].kl)
    assert_allclose(elbo(sgp.QuadratureELBO(32), two_latents, guide, params, X, Y), expected, rtol=1e-9)


def several_sites(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    g = numpyro.sample("g", sgp.GaussianProcess(sgp.kernels.Matern52(1.5, 0.5), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.4), obs=y)
        numpyro.sample("count", dist.Poisson(jnp.exp(g)), obs=None if y is None else jnp.round(y**2))
        numpyro.sample("sum", dist.Normal(f + g, 0.7), obs=y)


def test_each_observed_site_is_integrated_over_the_latents_it_depends_on():
    guide, params, q = setup(several_sites)
    f, g = (tuple(np.asarray(x) for x in (q[name].mean, q[name].variance)) for name in ("f", "g"))
    gaussian = lambda m, v, s: np.sum(stats.norm.logpdf(Y, m, s) - 0.5 * v / s**2)  # noqa: E731
    counts = np.round(Y**2)
    expected = gaussian(*f, 0.4) + gaussian(f[0] + g[0], f[1] + g[1], 0.7)
    expected += np.sum(stats.poisson.logpmf(counts, np.exp(g[0])) - np.exp(g[0]) * np.expm1(0.5 * g[1]))
    expected -= float(q["f"].kl) + float(q["g"].kl)
    assert_allclose(
        elbo(sgp.QuadratureELBO(32, bound="titsias"), several_sites, guide, params, X, Y), expected, rtol=1e-9
    )


def paired_outputs(X, y=None):
    output = numpyro.plate("output", 3, dim=-2)
    with output:
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with output, numpyro.plate("data", X.shape[0], dim=-1):
        numpyro.sample("y", dist.StudentT(4.0, f[:, 0], 0.5), obs=y)


def test_latents_paired_with_outputs_by_a_plate_need_one_axis_only():
    Y3 = np.stack([Y, 2.0 * Y, -Y])
    guide, params, q = setup(paired_outputs, args=(X, Y3))
    q = q["f"]
    nodes, weights = np.polynomial.hermite.hermgauss(20)
    mean, sd = np.asarray(q.mean)[:, 0], np.sqrt(np.asarray(q.variance))[:, 0]
    f = mean + np.sqrt(2.0) * sd * nodes[:, None, None]
    log_density = stats.t.logpdf((Y3 - f) / 0.5, 4.0) - np.log(0.5)
    expected = np.sum(weights[:, None, None] * log_density) / np.sqrt(np.pi) - float(q.kl.sum())
    found = elbo(sgp.QuadratureELBO(), paired_outputs, guide, params, X, Y3)
    assert_allclose(found, expected, rtol=1e-10)


SQUARE = np.array([[1.0, 0.8], [-0.5, 1.0]])
ROTATION = np.array([[1.0, 0.8, 0.0], [-0.5, 1.0, 0.3], [0.2, 0.0, 1.0]])


def mixed_in_one_plate(X, y=None, mixing=SQUARE):
    task = numpyro.plate("task", len(mixing))
    with task:
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    mixed = jnp.asarray(mixing) @ f
    with task:
        numpyro.sample("y", dist.Normal(mixed, 0.3).to_event(1), obs=y)


@pytest.mark.parametrize("traced", [False, True], ids=["constant", "argument"])
def test_latents_that_are_mixed_within_their_plate_are_not_taken_for_paired(traced):
    Y2 = np.stack([Y, 2.0 * Y])
    args = (X, Y2, SQUARE) if traced else (X, Y2)
    guide, params, q = setup(mixed_in_one_plate, args=args)
    mean, variance = np.asarray(q["f"].mean), np.asarray(q["f"].variance)
    expected = np.sum(stats.norm.logpdf(Y2, SQUARE @ mean, 0.3) - 0.5 * (SQUARE**2 @ variance) / 0.09)
    expected -= float(q["f"].kl.sum())
    loss = sgp.QuadratureELBO(num_nodes=3, bound="titsias")
    value = jax.jit(lambda *args: loss.loss(jax.random.key(0), params, mixed_in_one_plate, guide, *args))(*args)
    assert_allclose(-float(value), expected, rtol=1e-10)


def test_three_latents_mixed_within_their_plate_are_sampled_without_bias():
    Y3 = np.stack([Y, 2.0 * Y, -Y])
    args = (X, Y3, ROTATION)
    guide, params, q = setup(mixed_in_one_plate, args=args)
    mean, variance = np.asarray(q["f"].mean), np.asarray(q["f"].variance)
    expected = np.sum(stats.norm.logpdf(Y3, ROTATION @ mean, 0.3) - 0.5 * (ROTATION**2 @ variance) / 0.09)
    expected -= float(q["f"].kl.sum())
    loss = sgp.QuadratureELBO(num_samples=4)
    keys = jax.random.split(jax.random.key(1), 1000)
    draws = -np.asarray(jax.jit(jax.vmap(lambda k: loss.loss(k, params, mixed_in_one_plate, guide, *args)))(keys))
    assert abs(draws.mean() - expected) < 5.0 * draws.std() / np.sqrt(len(draws))


# Programs of f, (2, 3, 7), by id: where the axis of three is in the result, counted from the back.
PROGRAMS = {
    "elementwise": (lambda f: jnp.where(f > 0.0, jnp.exp(f), 2.0 * f), -2),
    "transposed": (lambda f: jnp.moveaxis(f, 1, 2), -1),
    "indexed": (lambda f: f[0], -2),
    "gathered": (lambda f: f[..., np.array([0, 2, 2])], -2),
    "picked": (lambda f: jnp.take_along_axis(f, jnp.zeros((2, 3, 1), int), axis=2)[..., 0], -1),
    "reduced beside": (lambda f: jax.nn.logsumexp(f, axis=0), -2),
    "scaled by a column": (lambda f: f * jnp.arange(3.0)[:, None], -2),
    "multiplied beside": (lambda f: f @ np.ones((7, 4)), -2),
    "multiplied from the left": (lambda f: jnp.einsum("ij,jkl->ikl", np.ones((5, 2)), f), -2),
    "products of each": (lambda f: jnp.einsum("ijk,ljk->jil", f, f), -3),
    "reshaped": (lambda f: f.reshape(2, 3, 7, 1), -3),
    "flattened beside": (lambda f: jnp.moveaxis(f, 1, 0).reshape(3, 14), -2),
    "summed up beside": (lambda f: jnp.cumsum(f, axis=2), -2),
    "a constant": (lambda f: jnp.zeros(3), None),
    "reduced": (lambda f: f.sum(1), MIXED),
    "mixed": (lambda f: jnp.einsum("ij,kjl->kil", ROTATION, f), MIXED),
    "flattened": (lambda f: f.reshape(6, 7), MIXED),
    "reversed": (lambda f: f[:, ::-1], MIXED),
    "summed up": (lambda f: jnp.cumsum(f, axis=1), MIXED),
    "permuted": (lambda f: f[:, np.array([1, 2, 0])], MIXED),
    "shifted": (lambda f: jnp.roll(f, 1, axis=1), MIXED),
    "sorted": (lambda f: jnp.sort(f, axis=1), MIXED),
    "centred": (lambda f: f - f.mean(1, keepdims=True), MIXED),
    "of two axes": (lambda f: f[0, :, :3] + f[0, :, :3].T, MIXED),
    "outer product": (lambda f: jnp.einsum("ijk,ilk->ijl", f, f), MIXED),
    "a loop": (lambda f: jax.lax.scan(lambda carry, x: (carry + x, carry), f[:, 0], jnp.moveaxis(f, 1, 0))[1], MIXED),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_axis_of_the_latents_is_followed_through_a_program(name):
    fn, expected = PROGRAMS[name]
    f = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, 7)))
    assert axes_of(fn, f, -2) == expected
    # Where an axis is named, the derivatives say so too.
    if expected:
        derivatives = np.moveaxis(np.asarray(jax.jacobian(fn)(f)), (expected - 3, -2), (0, 1))
        assert_allclose(derivatives[~np.eye(3, dtype=bool)], 0.0, atol=0.0)


def classes(X, y=None):
    with numpyro.plate("class", 3):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


def test_more_than_two_latents_are_sampled_without_bias():
    labels = RNG.integers(0, 3, N)
    guide, params, q = setup(classes, args=(X, labels))
    grid, weights = product_grid(24, 3)
    mean, sd = np.asarray(q["f"].mean), np.sqrt(np.asarray(q["f"].variance))
    f = mean + sd * grid[:, :, None]  # (nodes, class, N)
    log_density = np.take_along_axis(log_softmax(f, axis=1), labels[None, None], axis=1)[:, 0]
    expected = np.sum(weights[:, None] * log_density) - float(q["f"].kl.sum())
    loss = sgp.QuadratureELBO(num_samples=4)
    keys = jax.random.split(jax.random.key(1), 3000)
    draws = -np.asarray(jax.jit(jax.vmap(lambda k: loss.loss(k, params, classes, guide, X, labels)))(keys))
    assert abs(draws.mean() - expected) < 5.0 * draws.std() / np.sqrt(len(draws))
    assert draws.std() > 0.0


def deep(X, y=None):
    inner = numpyro.sample("inner", sgp.GaussianProcess(KERNEL, X, mean=lambda X: X[:, 0]))
    outer = numpyro.sample("outer", sgp.GaussianProcess(KERNEL, inner[:, None]))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(outer, 0.3), obs=y)


def test_a_gp_on_a_gp_is_integrated_given_draws_of_the_inner_one():
    guide, params, q = setup(deep)
    inner = q["inner"]
    rng = np.random.default_rng(5)
    Kuu = oracles.with_jitter(oracles.se(Z, Z, 0.9, 1.4), 1e-6)
    S_sqrt, m = np.tril(np.asarray(params["outer_auto_S_sqrt"])), np.asarray(params["outer_auto_m"])
    m_u, S_u = oracles.from_whitened_root(m, S_sqrt, Kuu)
    values = []
    for _ in range(4000):
        h = np.asarray(inner.mean) + np.sqrt(np.asarray(inner.variance)) * rng.normal(size=N)
        Kuf, Kff = oracles.se(Z, h[:, None], 0.9, 1.4), oracles.se(h[:, None], h[:, None], 0.9, 1.4)
        mean, covariance = oracles.conditional(m_u, S_u, Kuu, Kuf, Kff)
        values.append(np.sum(stats.norm.logpdf(Y, mean, 0.3) - 0.5 * np.diag(covariance) / 0.09))
    values = np.array(values) - float(inner.kl) - float(q["outer"].kl)
    loss = sgp.QuadratureELBO(num_samples=4, bound="titsias")
    keys = jax.random.split(jax.random.key(2), 1000)
    draws = -np.asarray(jax.jit(jax.vmap(lambda k: loss.loss(k, params, deep, guide, X, Y)))(keys))
    error = np.sqrt(draws.var() / len(draws) + values.var() / len(values))
    assert abs(draws.mean() - values.mean()) < 5.0 * error


def test_a_gp_on_a_gp_keeps_float32_beside_float64():
    seen, x, z = [], np.float32(X), np.float32(Z)

    def narrow(X, y=None):
        kernel = sgp.kernels.SquaredExponential(np.float32(0.9))
        inner = numpyro.sample("inner", sgp.GaussianProcess(kernel, X))
        outer = numpyro.sample("outer", sgp.GaussianProcess(kernel, inner[:, None]))
        seen.extend([inner.dtype, outer.dtype])
        numpyro.sample("y", dist.Normal(outer, np.float32(0.3)), obs=y)

    svi = SVI(narrow, sgp.AutoSVGP(narrow, z), optax.adam(0.01), sgp.QuadratureELBO())
    jax.eval_shape(svi.update, svi.init(jax.random.key(0), x, np.float32(Y)), x, np.float32(Y))
    assert set(seen) == {np.dtype(np.float32)}


def test_several_particles_are_an_average():
    def sampled(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, scale), obs=y)

    guide, params, _ = setup(sampled)
    one, many = sgp.QuadratureELBO(), sgp.QuadratureELBO(num_particles=3)
    keys = jax.random.split(jax.random.key(7), 3)
    singles = [one.loss(key, params, sampled, guide, X, Y) for key in keys]
    assert_allclose(many.loss(jax.random.key(7), params, sampled, guide, X, Y), np.mean(singles), rtol=1e-10)


HOME, AWAY = np.array([0, 3, 5, 1]), np.array([1, 2, 4, 6])
MEANS = np.kron(np.eye(2), np.ones(3) / 3.0) @ np.eye(6, N)
NEIGHBOURS = np.eye(N) + 0.3 * np.eye(N, k=1) + 0.3 * np.eye(N, k=-1)
GROUP, AGAIN = np.array([0, 2, 1, 1, 0, 2, 2]), np.array([3, 3, 0, 6, 2, 2, 2, 5])
PICKS = np.eye(N)[AGAIN]
MIXING = np.array([[1.0, 0.8, -0.3], [-0.5, 1.0, 0.2], [0.1, 0.4, 0.9], [0.7, -0.6, 0.5]])
SEEN = np.arange(N) != 3


def observed(name, fn, shape):
    numpyro.sample(name, fn, obs=np.ones(shape, int))


def recurrent(f):
    state = jax.lax.scan(lambda state, value: 2 * (0.5 * state + value,), 0.0, f)[1]
    numpyro.sample("term", dist.Normal(state, 0.3), obs=Y)


def state_of_the_mean(f):
    state = numpyro.sample("term", dist.Normal(jnp.mean(f), 1.0))
    numpyro.sample("y", dist.Normal(f + state, 0.3), obs=Y)


def beside_another_term(f):
    numpyro.sample("y", dist.Normal(f, 0.3), obs=Y)
    numpyro.sample("term", dist.Normal(MEANS @ f, 0.2), obs=np.ones(2))


# By id: the latents, and the sites whose entries look at several rows of one latent.
COUPLED = {
    "preferences": ((), lambda f: observed("term", dist.Bernoulli(logits=f[HOME] - f[AWAY]), 4)),
    "one pair": ((), lambda f: observed("term", dist.Bernoulli(logits=f[2] - f[5]), ())),
    "averages": ((), beside_another_term),
    "correlated noise": ((), lambda f: numpyro.sample("term", dist.MultivariateNormal(f, NEIGHBOURS), obs=Y)),
    "centred": ((), lambda f: numpyro.sample("term", dist.Normal(f - f.mean(), 0.2), obs=Y)),
    "kinks": ((), lambda f: numpyro.factor("term", -jnp.abs(f[1:] - f[:-1]).sum())),
    "sorted": ((), lambda f: numpyro.sample("term", dist.Normal(jnp.sort(f), 0.2), obs=np.sort(Y))),
    "recurrent": ((), recurrent),
    "a latent variable of the mean": ((), state_of_the_mean),
    "centred, of three": ((3,), lambda f: observed("term", dist.Poisson(jnp.exp(f - f.mean(-1)[:, None])), (3, N))),
}


def masked(f):
    with numpyro.plate("data", N), numpyro.handlers.mask(mask=SEEN):
        numpyro.sample("y", dist.StudentT(4.0, f, 0.3), obs=np.where(SEEN, Y, np.nan))


def subsampled(f):
    with numpyro.plate("data", N, subsample_size=4):
        numpyro.sample("y", dist.Poisson(jnp.exp(numpyro.subsample(f, 0))), obs=jnp.ones(4))


def of_other_rows(f):
    g = numpyro.sample("g", sgp.GaussianProcess(KERNEL, X[:3]))
    observed("y", dist.Bernoulli(logits=f + g[GROUP]), N)


def heteroskedastic(f):
    g = numpyro.sample("g", sgp.GaussianProcess(KERNEL, X))
    numpyro.sample("y", dist.Normal(f, jnp.exp(g)), obs=Y)


def centred_inputs(f):
    g = numpyro.sample("g", sgp.GaussianProcess(KERNEL, (f - f.mean())[:, None]))
    numpyro.sample("y", dist.Normal(g, 0.3), obs=Y)


def stable_logarithm(f):
    shift = f.max()
    numpyro.factor("y", -jnp.sum(jnp.log(jnp.exp(f - shift) + jnp.exp(-shift)) + shift))


# By id: the latents, and sites whose entries look at one row of each latent, or are linear.
SEPARATE = {
    "rows picked by a matrix": ((), lambda f: observed("y", dist.Bernoulli(logits=PICKS @ f), len(AGAIN))),
    "rows repeated": ((), lambda f: observed("y", dist.Poisson(jnp.exp(f[AGAIN])), len(AGAIN))),
    "replicates": ((), lambda f: observed("y", dist.Bernoulli(logits=f[:, None]).expand([N, 4]), (N, 4))),
    "one latent a group": ((3,), lambda f: observed("y", dist.Poisson(jnp.exp(f[GROUP, np.arange(N)])), N)),
    "two latents at two rows": ((3,), lambda f: observed("y", dist.Bernoulli(logits=f[0, HOME] - f[1, AWAY]), 4)),
    "mixed latents": ((3,), lambda f: observed("y", dist.Poisson(jnp.exp(MIXING @ f)), (4, N))),
    "softmax": ((3,), lambda f: numpyro.sample("y", dist.Categorical(logits=f.T), obs=GROUP)),
    "correlated outputs": (
        (2,),
        lambda f: observed("y", dist.MultivariateNormal(f.T, np.array([[1.0, 0.4], [0.4, 1.0]])), (N, 2)),
    ),
    "noise as a matrix": ((), lambda f: numpyro.sample("y", dist.MultivariateNormal(f, 0.1 * np.eye(N)), obs=Y)),
    "NaN behind a mask": ((), masked),
    "subsampled": ((), subsampled),
    "another GP at other rows": ((), of_other_rows),
    "heteroskedastic": ((), heteroskedastic),
    "deep": ((), centred_inputs),
    "sums over rows": ((), lambda f: numpyro.factor("y", -jnp.sum(jnp.tanh(f) ** 2) + 3.0 * jnp.mean(f))),
    "stable logarithm": ((), stable_logarithm),
    "out of support": ((), lambda f: numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=np.full(N, 0.5))),
    "overflow": ((), lambda f: observed("y", dist.Poisson(jnp.exp(f + 800.0)), N)),
}


def start_at(latents, likelihood, init=lambda svi: svi.init, **options):
    """The groups of the guide after its start, of a posterior that is integrated row by row with `sites`."""

    def model():
        fn = sgp.GaussianProcess(KERNEL, X)
        likelihood(numpyro.sample("f", fn.expand(latents) if latents else fn))

    kind = sgp.AutoTSVGP if options else sgp.AutoSVGP
    guide = kind(model, lambda kernel, X, key: X[:2], **options)
    svi = SVI(model, guide, optax.adam(1e-2), sgp.QuadratureELBO())
    return guide.joint_groups(svi.get_params(init(svi)(jax.random.key(0))))


@pytest.mark.parametrize("name", COUPLED)
def test_a_term_that_couples_rows_is_refused_and_named_where_rows_have_sites_of_their_own(name):
    with pytest.raises(ValueError, match=r"\['term'\].* several rows of the GP site 'f'.*InducingReparam"):
        start_at(*COUPLED[name], sites="per_datum")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", COUPLED)
def test_a_term_that_couples_rows_is_known_to_do_so(name, compiled):
    (group,) = start_at(*COUPLED[name], init=lambda svi: jax.jit(svi.init) if compiled else svi.init)
    assert group.coupled == (("term", "f"),)


@pytest.mark.parametrize("name", SEPARATE)
def test_terms_that_look_at_one_row_of_each_latent_are_taken(name):
    assert start_at(*SEPARATE[name], sites="per_datum") == ()


def test_coupled_rows_are_seen_in_float32_and_among_many_rows():
    many = np.linspace(0.0, 3.0, 20_000, dtype=np.float32)[:, None]

    def model(centre):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, many))
        numpyro.sample("y", dist.Normal(f - (f.mean() if centre else 0.0), 0.2), obs=np.sin(many[:, 0]))

    with jax.enable_x64(False):
        guide = sgp.AutoTSVGP(model, many[::4000], sites="per_datum")
        svi = SVI(model, guide, sgp.NaturalGradient(0.1), sgp.QuadratureELBO())
        svi.init(jax.random.key(0), False)
        with pytest.raises(ValueError, match="several rows"):
            svi.init(jax.random.key(0), True)


def test_the_rows_of_a_model_that_changes_its_state_in_place_are_compared():
    def model(centre):
        state = mutable("state", {"runs": jnp.asarray(0.0)})
        state["runs"] = state["runs"] + 1.0
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        state["last"] = f[0]
        numpyro.sample("y", dist.Normal(f - (f.mean() if centre else 0.0), 0.2), obs=Y)

    guide = sgp.AutoTSVGP(model, X[:2], sites="per_datum")
    svi = SVI(model, guide, sgp.NaturalGradient(0.1), sgp.QuadratureELBO())
    state = svi.init(jax.random.key(0), False)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state.mutable_state))
    svi.update(state, False)
    with pytest.raises(ValueError, match="several rows"):
        svi.init(jax.random.key(0), True)


@pytest.mark.parametrize("name", COUPLED)
def test_within_a_compiled_start_terms_that_may_couple_rows_are_warned_of(name):
    with pytest.warns(UserWarning, match=r"\['term'\] may depend on several rows of the GP site 'f'.*without `jit`"):
        start_at(*COUPLED[name], init=lambda svi: jax.jit(svi.init), sites="per_datum")


# Only values show that these look at one row of each latent.
SHOWN_BY_VALUES = {"rows picked by a matrix", "noise as a matrix", "stable logarithm", "two latents at two rows"}


@pytest.mark.parametrize("name", sorted(set(SEPARATE) - SHOWN_BY_VALUES))
def test_the_program_of_terms_shows_that_they_look_at_one_row_within_a_compiled_start_too(name):
    # A warning would be an error.
    start_at(*SEPARATE[name], init=lambda svi: jax.jit(svi.init), sites="per_datum")


INDEX = np.array([4, 0, 0, 2])


def scanned(step):
    return lambda f: jax.lax.scan(step, 0.0, f)


# Functions of the rows that couple them, and functions that do not: structure alone tells, whatever the numbers.
COUPLING = {
    "difference": lambda f: (f[1:] - f[:-1]) ** 2,
    "product of neighbours": lambda f: f[1:] * f[:-1],
    "picked pair": lambda f: jnp.exp(f[INDEX] - f[INDEX[::-1]]),
    "mean": lambda f: (f - jnp.mean(f)) ** 2,
    "mean without a gradient": lambda f: (f - jax.lax.stop_gradient(jnp.mean(f))) ** 2,
    "mean, rounded": lambda f: f * jnp.round(jnp.mean(f)),
    "compared with a row": lambda f: jnp.where(f > f[2], f, 0.0),
    "rank": lambda f: jnp.argsort(f),
    "sorted": lambda f: jnp.sort(f),
    "largest": lambda f: jnp.max(f),
    "index of the largest": lambda f: jnp.argmax(f) + 0.0,
    "row of the largest": lambda f: jnp.arange(7.0)[jnp.argmax(f)],
    "softmax": jax.nn.softmax,
    "log of a sum": lambda f: jax.nn.logsumexp(f),
    "norm": lambda f: jnp.sqrt(jnp.sum(f**2)),
    "cumulative": lambda f: jnp.cumsum(f) ** 2,
    "cumulative largest": lambda f: jax.lax.cummax(f),
    "matrix": lambda f: jnp.exp(jnp.ones((3, 7)) @ f),
    "quadratic form": lambda f: f @ jnp.ones((7, 7)) @ f,
    "outer": lambda f: f[:, None] * f[None, :],
    "determinant": lambda f: jnp.linalg.slogdet(jnp.eye(7) + jnp.diag(f) + 0.1 * f[:, None])[1],
    "convolved": lambda f: jnp.tanh(jnp.convolve(f, jnp.ones(3))),
    "scan": scanned(lambda state, row: (jnp.tanh(state + row), state)),
    "scan of products": scanned(lambda state, row: (row, row * state)),
    "loop": lambda f: jax.lax.fori_loop(0, 3, lambda i, x: x * f[i], 1.0),
    "branch": lambda f: jax.lax.cond(f[0] > 0.0, lambda x: x, lambda x: -x, f),
    "reversed": lambda f: f * f[::-1],
    "rolled": lambda f: jnp.sin(f - jnp.roll(f, 1)),
    "folded": lambda f: jnp.prod(f[:6].reshape(2, 3), axis=0),
    "scattered": lambda f: jnp.zeros(3).at[jnp.array([0, 0, 1, 1, 2, 2, 2])].add(f) ** 2,
    "within jit": lambda f: jax.jit(lambda a, b: a * b)(f[0], f[1]),
    "truncated": lambda f: jnp.sum(f).astype(int) + 0.0,
}
UNCOUPLED = {
    "elementwise": lambda f: jnp.exp(f) * jnp.sin(f) + f**3,
    "picked": lambda f: (lambda index: jnp.tanh(f[index]) * f[index] ** 2)(jnp.asarray(INDEX)),
    "a row on each right-hand side": lambda f: solve_triangular(np.tri(2), jnp.stack([f, f]), lower=True) ** 2,
    "a row": lambda f: f[3] ** 2,
    "sum": lambda f: jnp.sum(jnp.exp(f)) - 3.0 * jnp.mean(f),
    "linear": lambda f: jnp.ones((3, 7)) @ f / 2.0 - jnp.cumsum(f)[:3],
    "branches by data": lambda f: jnp.where(jnp.arange(7) > 3, f, f[::-1]) ** 2,
    "joined": lambda f: jnp.exp(jnp.concatenate([f, f[:2], jnp.zeros(2)])),
    "scattered": lambda f: jnp.zeros(3).at[jnp.array([0, 0, 1, 1, 2, 2, 2])].add(jnp.exp(f)),
    "scan": scanned(lambda total, row: (total + row**2, jnp.exp(row))),
    "scan that remembers": scanned(lambda last, row: (row, jnp.exp(last))),
    "branch by data": lambda f: jax.lax.cond(jnp.asarray(True), lambda x: x, lambda x: -x, f) ** 2,
    "within jit": lambda f: jax.jit(lambda a, b: a * b)(f, f),
}


@pytest.mark.parametrize("name", COUPLING)
def test_a_program_that_couples_rows_is_never_taken_for_one_that_does_not(name):
    found = row_dependence(COUPLING[name], jnp.linspace(-1.0, 1.0, 7))
    assert Dependence.COUPLED in jax.tree.leaves(found)


@pytest.mark.parametrize("name", UNCOUPLED)
def test_a_program_whose_entries_look_at_one_row_or_add_them_is_seen_to_be_one(name):
    found = row_dependence(UNCOUPLED[name], jnp.linspace(-1.0, 1.0, 7))
    assert Dependence.COUPLED not in jax.tree.leaves(found)


def test_a_conversion_to_integers_is_not_linear():
    f = jnp.linspace(-1.0, 1.0, 7)
    for kind, shape in (("float32", Shape.AFFINE), ("int32", Shape.OTHER)):
        assert shapes_of(lambda f, kind=kind: 2.0 * f.astype(kind).astype(f.dtype), f) is shape
        program = traced(lambda given, kind=kind: {"term": 2.0 * given["f"].astype(kind).astype(f.dtype)}, {"f": f})
        assert program.is_affine("term", {"f"}) is (shape is Shape.AFFINE)


def test_a_linear_term_of_all_rows_is_integrated_exactly():
    def model(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(KERNEL, X))
        numpyro.sample("y", dist.Normal(f, 0.4), obs=y)
        numpyro.factor("slope", 1.7 * jnp.mean(f) - jnp.cumsum(f)[2])

    guide, params, q = setup(model)
    mean, variance = np.asarray(q["f"].mean), np.asarray(q["f"].variance)
    expected = np.sum(stats.norm.logpdf(Y, mean, 0.4) - 0.5 * variance / 0.16) - float(q["f"].kl)
    expected += 1.7 * mean.mean() - mean[:3].sum()
    assert_allclose(elbo(sgp.QuadratureELBO(4), model, guide, params, X, Y), expected, rtol=1e-10)
