"""What is compiled: how many programs before the first step, and how often a step factorises which matrices."""

from collections import Counter
import dataclasses
from pathlib import Path

import jax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
from programs import equations
import pytest
from scripts import run

import numpyro_sgp as sgp
from numpyro_sgp._internal.eager import as_one_program

CLASSES, M, B = 10, 7, 5
RNG = np.random.default_rng(0)
X, y = RNG.normal(size=(B, 2)), RNG.integers(0, CLASSES, size=B)
Z = RNG.normal(size=(M, 2))


def digits(X, y=None, num_data=100):
    lengthscale = numpyro.param("lengthscale", jnp.ones(2), constraint=dist.constraints.positive)
    with numpyro.plate("class", CLASSES):
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale), X))
    with numpyro.plate("data", num_data, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=f.T), obs=y)


GUIDES = {
    "tied, Z fixed": lambda: (sgp.AutoTSVGP(digits, Z), sgp.NaturalGradient(0.1), True),
    "tied, Z trained": lambda: (sgp.AutoTSVGP(digits, Z, learn_inducing=True), sgp.NaturalGradient(0.1), True),
    "natural": lambda: (sgp.AutoSVGP(digits, Z, natural=True), sgp.NaturalGradient(0.1), True),
    "mean and root": lambda: (sgp.AutoSVGP(digits, Z), optax.adam(0.1), False),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", GUIDES)
def test_latents_that_share_a_kernel_share_one_factor_of_Kuu(name):
    guide, optim, has_precisions = GUIDES[name]()
    svi = SVI(digits, guide, optim, sgp.QuadratureELBO(num_samples=2))
    state = svi.init(jax.random.key(0), X, y)
    jaxpr = jax.make_jaxpr(lambda state: svi.update(state, X, y))(state).jaxpr
    factorised = Counter(e.outvars[0].aval.shape for e in equations(jaxpr) if e.primitive.name == "cholesky")
    # Kuu once for all classes, and the posterior precisions of all classes at once.
    assert factorised == Counter({(M, M): 1, **({(CLASSES, M, M): 1} if has_precisions else {})})


def test_a_function_of_values_is_compiled_as_one_program_and_is_no_call_within_a_trace():
    seen = []

    @as_one_program
    def fn(pair, *, shift):
        seen.append(isinstance(pair[0], Tracer))
        return {"sum": pair[0] + pair[1] * shift}

    pair = (np.arange(3.0), np.ones(3))
    assert_array_equal(fn(pair, shift=2.0)["sum"], [2.0, 3.0, 4.0])
    assert_array_equal(fn(pair, shift=3.0)["sum"], [3.0, 4.0, 5.0])
    assert seen == [True]
    names = {e.primitive.name for e in equations(jax.make_jaxpr(lambda pair: fn(pair, shift=2.0))(pair).jaxpr)}
    assert names == {"add", "mul"}


def test_initialisation_compiles_whole_functions_and_not_each_operation(caplog):
    X = np.linspace(0.0, 1.0, 13)[:, None]

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        kernel = sgp.kernels.Matern52(lengthscale) + sgp.kernels.Constant(1.0)
        f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        numpyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)

    svi = SVI(model, sgp.AutoTSVGP(model, X[::2]), sgp.NaturalGradient(0.1), sgp.QuadratureELBO())
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        svi.init(jax.random.key(0), X, X[:, 0])
    programs = [record for record in caplog.records if record.getMessage().startswith("Finished XLA compilation")]
    # Nearly all of them are those of the base guide and of the distributions; operation by operation it would be 200.
    assert 10 < len(programs) < 120


def counts_in_time(X, y=None):
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern32(0.5), X))
    numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)


@pytest.mark.parametrize(
    "guide",
    [
        lambda: sgp.AutoTSVGP(counts_in_time, np.linspace(0.0, 1.0, 3)[:, None]),
        pytest.param(lambda: sgp.AutoTSVGP(counts_in_time, None), marks=pytest.mark.thorough),
        lambda: sgp.AutoMarkovGP(counts_in_time),
        lambda: sgp.AutoVecchiaGP(counts_in_time, num_neighbours=3),
    ],
    ids=["tied", "dense", "time", "neighbours"],
)
def test_a_second_prediction_compiles_nothing(guide, caplog):
    guide, times = guide(), np.linspace(0.0, 1.0, 9)[:, None]
    svi = SVI(counts_in_time, guide, sgp.NaturalGradient(0.5), sgp.QuadratureELBO())
    params = svi.get_params(svi.init(jax.random.key(0), times, np.ones(9)))

    def predict(rng_key):
        q = guide.posterior(rng_key, params, times + 0.05)["f"]
        return q.mean, q.covariance(), q.sample(rng_key)

    predict(jax.random.key(0))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        predict(jax.random.key(1))
    assert not [record for record in caplog.records if record.getMessage().startswith("Finished XLA compilation")]


FORMS = {
    "t-SVGP": lambda model: sgp.AutoTSVGP(model, Z),
    "t-SVGP, Z trained": lambda model: sgp.AutoTSVGP(model, Z, learn_inducing=True),
    "natural": lambda model: sgp.AutoSVGP(model, Z, natural=True),
    "mean and root": lambda model: sgp.AutoSVGP(model, Z),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FORMS)
def test_initialisation_makes_no_matrix_and_says_what_the_initial_parameters_give(name):
    shapes = []

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True, eq=False)
    class Counted(sgp.kernels.Kernel):
        of: sgp.kernels.Kernel

        def _diagonal(self, X):
            return self.of(X)

        def _matrix(self, X, Z):
            shapes.append((len(X), len(Z)))
            return self.of(X, Z)

    def model(X, y=None):
        kernel = Counted(sgp.kernels.Matern52(jnp.array([[0.8], [1.1]]), jnp.array([1.5, 0.7])))
        with numpyro.plate("latent", 2):
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X, lambda X: 0.5 * X[:, 0]))
        numpyro.sample("y", dist.Normal(f[0] + f[1], 0.1).to_event(1), obs=y)

    guide = FORMS[name](model)
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(X, y)
    assert not shapes
    q = trace["f"]["fn"]
    params = {key: site["value"] for key, site in trace.items() if site["type"] == "param"}
    wanted = guide.posterior(jax.random.key(0), params, X)["f"]
    assert shapes
    assert q.mean.shape == q.variance.shape == (2, B)
    assert_allclose(q.mean, wanted.mean, atol=1e-12)
    assert_allclose(q.variance, wanted.variance, rtol=1e-10)
    assert_allclose(q.kl, wanted.kl, atol=1e-10)
    assert_allclose(q.covariance(), wanted.covariance(), rtol=1e-5, atol=1e-8)


def test_an_argument_that_is_no_array_does_not_keep_a_function_from_being_one_program():
    seen = []

    def fn(kind, x):
        seen.append(isinstance(x, Tracer))
        return x + 1.0 if kind == "plus" else x - 1.0

    compiled = as_one_program(fn, static_argnums=0)
    assert_array_equal(compiled("plus", np.arange(2.0)), [1.0, 2.0])
    assert_array_equal(compiled("minus", np.arange(2.0)), [-1.0, 0.0])
    assert seen == [True, True]


@pytest.mark.exhaustive
def test_steps_with_a_thousand_inducing_inputs_or_weights_run():
    # In a process of its own: where it does not, it is the end of the process.
    assert run(Path(__file__).with_name("large_matrices_child.py"), "1024") == "tied True 0\nadversarial True 0\n"
