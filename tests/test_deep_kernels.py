"""Networks inside kernels: Equinox, Flax NNX and NumPyro's helpers for them, trained by the M-step."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.features import FeatureMap

pytestmark = pytest.mark.usefixtures("x64")

N, BATCH = 60, 12
RNG = np.random.default_rng(5)
X = RNG.uniform(-2.0, 2.0, size=(N, 2))
Y = np.sin(3.0 * X[:, 0]) * X[:, 1] + 0.1 * RNG.normal(size=N)


def regression(kernel_of):
    def model(X, y=None, num_data=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernel_of(), X))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    return model


def equinox_module():
    eqx = pytest.importorskip("equinox")
    return eqx.nn.MLP(2, 5, 8, 1, activation=jnp.tanh, key=jax.random.key(0))


def nnx_module():
    nnx = pytest.importorskip("flax.nnx")

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(2, 8, rngs=rngs, param_dtype=jnp.float64)
            self.second = nnx.Linear(8, 5, rngs=rngs, param_dtype=jnp.float64)

        def __call__(self, X):
            return self.second(jnp.tanh(self.first(X)))

    return Network(nnx.Rngs(0))


def by_rows(net, X):
    return jax.vmap(net)(X)


def equinox_with_priors():
    from numpyro.contrib.module import random_eqx_module

    net = equinox_module()
    return lambda: FeatureMap(by_rows, random_eqx_module("net", net, prior=dist.Normal(0.0, 1.0)))


def nnx_kernel():
    from numpyro.contrib.module import nnx_module as registered

    net = nnx_module()
    return lambda: FeatureMap(registered("net", net))


def nnx_with_priors():
    from numpyro.contrib.module import random_nnx_module

    net = nnx_module()
    return lambda: FeatureMap(random_nnx_module("net", net, prior=dist.Normal(0.0, 1.0)))


CASES = {
    "equinox with priors": (equinox_with_priors, AutoNormal),
    "nnx": (nnx_kernel, AutoDelta),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_network_in_a_kernel_is_trained_on_small_batches_and_predicts(name):
    kernel_of, base = CASES[name]
    model = regression(kernel_of())
    guide = sgp.AutoWeightSpaceGP(model, base=base)
    svi = SVI(model, guide, sgp.NaturalGradient(0.1, optax.adam(0.01)), sgp.QuadratureELBO(num_nodes=3))
    state = svi.init(jax.random.key(0), X[:BATCH], Y[:BATCH], num_data=N)
    start = svi.get_params(state)

    @jax.jit
    def run(state):
        def step(state, key):
            rows = jax.random.choice(key, N, (BATCH,), replace=False)
            return svi.update(state, jnp.asarray(X)[rows], jnp.asarray(Y)[rows], num_data=N)

        return jax.lax.scan(step, state, jax.random.split(jax.random.key(1), 900))

    state, losses = run(state)
    params = svi.get_params(state)
    assert sgp.num_refused(state) == 0
    assert np.mean(losses[-30:]) < np.mean(losses[:10]) - 20.0
    weights = [key for key in params if key.startswith("net")]
    moved = jax.tree.map(
        lambda a, b: np.max(np.abs(a - b)), {k: params[k] for k in weights}, {k: start[k] for k in weights}
    )
    # Where weights are sampled, their first values stay.
    assert sum(change > 1e-3 for change in jax.tree.leaves(moved)) >= 3
    q = guide.posterior(jax.random.key(2), params, X)["f"]
    assert np.sqrt(np.mean((q.mean - Y) ** 2)) < 0.8 * np.std(Y)
    f = guide.sample_functions(jax.random.key(3), params, X, num_samples=50)["f"](X[:4])
    if base is AutoDelta:
        assert_allclose(np.mean(f, axis=0), q.mean[:4], atol=5 * np.max(np.sqrt(q.variance)) / np.sqrt(50))
    else:
        assert np.ptp(np.asarray(f), axis=0).min() > 1e-2


@pytest.mark.thorough
def test_names_of_networks_go_into_arviz_with_dots():
    pytest.importorskip("arviz")
    model = regression(nnx_with_priors())
    guide = sgp.AutoWeightSpaceGP(model)
    svi = SVI(model, guide, sgp.NaturalGradient(0.5, optax.adam(0.01)), sgp.QuadratureELBO(num_nodes=3))
    state = svi.init(jax.random.key(0), X, Y)
    tree = sgp.to_arviz(jax.random.key(1), svi, svi.get_params(state), X, Y, num_samples=3)
    found = tree["posterior"]["net.first.kernel"]
    assert found.shape == (1, 3, 2, 8)
    assert not any("/" in str(name) for name in (*tree["posterior"].variables, *found.dims))


def test_a_network_that_changes_when_it_is_called_is_told():
    nnx = pytest.importorskip("flax.nnx")
    from numpyro.contrib.module import nnx_module as registered

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(2, 4, rngs=rngs, param_dtype=jnp.float64)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, X):
            return self.dropout(self.layer(X))

    net = Network(nnx.Rngs(0))
    model = regression(lambda: FeatureMap(registered("net", net)))
    svi = SVI(model, sgp.AutoWeightSpaceGP(model), sgp.NaturalGradient(0.5), sgp.QuadratureELBO(num_nodes=3))
    with pytest.raises(jax.errors.UnexpectedTracerError) as told:
        svi.init(jax.random.key(0), X, Y)
    assert any("network that changes when it is called" in note for note in told.value.__notes__)
