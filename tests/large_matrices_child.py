"""Run by test_programs.py: steps with so many inducing inputs, or weights, that XLA of JAX 0.10 could end the process."""

import os
import sys

# The programs are those that users run: not the ones that are compiled in less time for tests.
os.environ.pop("XLA_FLAGS", None)

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta
import optax

import numpyro_sgp as sgp

SIZE = int(sys.argv[1])
rng = np.random.default_rng(0)
X, W = rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(3, SIZE)).astype(np.float32)
Z = rng.normal(size=(SIZE, 3)).astype(np.float32)


def model(features, X, y=None):
    kernel = (
        sgp.features.FeatureMap(lambda W, X: jnp.tanh(X @ W), W, 1.0 / SIZE) if features else sgp.kernels.Matern52(1.0)
    )
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", 100, subsample_size=len(X)):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def with_points(*arguments):
    model(False, *arguments)


def with_features(*arguments):
    model(True, *arguments)


adam, elbo = optax.adam(1e-2), sgp.QuadratureELBO(num_nodes=3)
players = sgp.DescentAscent(adam, optax.sgd(1e-3))
cases = {
    "tied": (with_points, sgp.AutoTSVGP(with_points, Z, learn_inducing=True), sgp.NaturalGradient(0.1, adam), elbo),
    "adversarial": (
        with_features,
        sgp.AutoWeightSpaceGP(with_features, parametrization="adversarial", base=AutoDelta),
        players,
        sgp.MinimaxMarginalLikelihood(),
    ),
}
for name, (function, guide, optim, loss) in cases.items():
    svi = SVI(function, guide, optim, loss)
    state = svi.init(jax.random.key(0), X, X[:, 0])
    for _ in range(2):
        state, value = jax.jit(svi.update)(state, X, X[:, 0])
    print(name, np.isfinite(value), sgp.num_refused(state))
