"""What all optimizers that evaluate the loss have in common: states that can be donated, and steps that are refused."""

from functools import partial

from grids import representative
import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

import numpyro_sgp as sgp
from numpyro_sgp import features, kernels
from numpyro_sgp.posteriors.weight_space.adversary import Adversary

RNG = np.random.default_rng(3)
X, Z = RNG.uniform(-2.0, 2.0, size=(12, 1)).astype(np.float32), np.linspace(-2, 2, 4, dtype=np.float32)[:, None]
Y = np.sin(2.0 * X[:, 0]).astype(np.float32)
HUGE = np.float32(1e24)


def model(X, y=None, rank=None):
    noise = numpyro.param("noise", 0.3, constraint=dist.constraints.positive)
    kernel = kernels.SquaredExponential(1.0)
    if rank is not None:
        kernel = features.RandomFourier(kernel, rank, jax.random.key(1))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def svi_of(kind):
    adam, loss, own = optax.adam(1e-2), sgp.QuadratureELBO(num_nodes=3), model
    if kind in ("per_datum", "dense"):
        guide = sgp.AutoTSVGP(own, None if kind == "dense" else Z, sites="per_datum")
        optim = sgp.NaturalGradient(0.1, adam)
    elif kind == "natural":
        guide, optim = sgp.AutoTSVGP(own, Z, learn_inducing=True), sgp.NaturalGradient(0.1, adam)
    elif kind == "growing":
        inducing = partial(sgp.growing, capacity=6)
        guide, optim = sgp.AutoSVGP(own, inducing, natural=True), sgp.GrowBasis(sgp.NaturalGradient(0.1, adam))
    elif kind == "dual":
        guide, optim = sgp.AutoDecoupledGP(own, X, Z), sgp.DualAscent(1e-3, adam)
    else:
        own = partial(model, rank=20)
        if kind == "held":
            guide, optim = sgp.AutoWeightSpaceGP(own, refresh=2), sgp.NaturalGradient(0.1, adam)
        elif kind == "rows":
            guide, optim = sgp.AutoQSGP(own, basis_batch=8, inducing=Z), sgp.RowSparse(0.1, adam)
        else:
            guide = sgp.AutoWeightSpaceGP(own, parametrization="adversarial")
            optim, loss = sgp.DescentAscent(adam, optax.adam(1e-2)), sgp.MinimaxMarginalLikelihood()
    return SVI(own, guide, optim, loss)


KINDS = ["natural", "growing", "dual", "rows", "adversarial"]


@pytest.mark.parametrize("kind", representative([*KINDS, "per_datum", "dense", "held"], ["dual", "growing"]))
@pytest.mark.thorough
def test_a_fresh_state_can_be_donated(kind):
    svi = svi_of(kind)
    wanted, loss = jax.jit(svi.update)(svi.init(jax.random.key(0), X, Y), X, Y)
    found, again = jax.jit(svi.update, donate_argnums=0)(svi.init(jax.random.key(0), X, Y), X, Y)
    assert_allclose(again, loss, rtol=1e-6)
    found, again = jax.jit(svi.update, donate_argnums=0)(found, X, Y)
    assert_allclose(again, jax.jit(svi.update)(wanted, X, Y)[1], rtol=1e-5)


@pytest.mark.exhaustive
def test_what_the_caller_gave_outlives_a_donated_state():
    inducing, inputs = jnp.asarray(Z), jnp.asarray(X)
    for guide in (sgp.AutoTSVGP(model, inducing), sgp.AutoTSVGP(model, inducing, sites="per_datum")):
        svi = SVI(model, guide, sgp.NaturalGradient(0.1, optax.adam(1e-2)), sgp.QuadratureELBO(num_nodes=3))
        jax.jit(svi.update, donate_argnums=0)(svi.init(jax.random.key(0), inputs, Y), inputs, Y)
        assert not inducing.is_deleted()
        assert not inputs.is_deleted()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_whose_square_overflows_is_refused_and_training_goes_on(kind):
    svi = svi_of(kind)
    update = jax.jit(svi.update)
    state, _ = update(svi.init(jax.random.key(0), X, Y), X, Y)
    # One outcome far away: loss and gradients are numbers, and the squares of the gradients are none.
    scale = {"natural": 1e-12, "growing": 1e-12, "dual": 1e-12, "rows": 1e-6, "adversarial": 1e-12}[kind]
    outlier = np.where(np.arange(len(Y)) == 0, HUGE * np.float32(scale), Y)
    before = sgp.num_refused(state)
    state, loss = update(state, X, outlier)
    assert np.isfinite(loss)
    assert sgp.num_refused(state) == before + 1
    finite = jax.tree.map(lambda x: bool(jnp.all(jnp.isfinite(x))), state.optim_state)
    assert all(jax.tree.leaves(finite))
    start = svi.get_params(state)["noise"]
    for _ in range(20):
        state, loss = update(state, X, Y)
    assert abs(svi.get_params(state)["noise"] - start) > 1e-3
    assert sgp.num_refused(state) == before + 1


def test_a_transformation_that_starts_at_infinity_is_no_reason_to_refuse():
    plateau = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=2, accumulation_size=5))
    svi = SVI(model, sgp.AutoTSVGP(model, Z), sgp.NaturalGradient(0.1, plateau), sgp.QuadratureELBO(num_nodes=3))
    state = svi.init(jax.random.key(0), X, Y)
    assert not all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(state.optim_state[1].others_state))
    for _ in range(3):
        state, _ = jax.jit(svi.update)(state, X, Y)
    assert sgp.num_refused(state) == 0


def test_a_gradient_that_is_no_number_is_refused_though_it_would_be_clipped():
    optim = sgp.DescentAscent(optax.chain(optax.clip(1.0), optax.sgd(0.1)), optax.sgd(0.1))
    state = optim.init({"p": jnp.zeros(()), "B": Adversary(-jnp.eye(2))})
    (loss, _), after = optim.eval_and_update(lambda params: (jnp.sqrt(params["p"]), None), state)
    assert loss == 0.0
    assert after[1].refused == 1
    assert optim.get_params(after)["p"] == 0.0


@pytest.mark.parametrize("refusals", [1, 3])
def test_projections_of_the_data_are_computed_by_the_first_step_that_is_accepted(refusals):
    own = partial(model, rank=None)
    svi = SVI(own, sgp.AutoDecoupledGP(own, X, Z), sgp.DualAscent(0.005), sgp.QuadratureELBO(num_nodes=3))
    update = jax.jit(svi.update)
    state = svi.init(jax.random.key(0), X, Y)
    for _ in range(50):
        state, _ = update(state, X, Y)
    params = svi.get_params(state)
    assert np.any(np.asarray(params["f_auto_a"].values) != 0.0)
    wanted = svi.init(jax.random.key(0), X, Y, init_params=params)
    state = svi.init(jax.random.key(0), X, Y, init_params=params)
    for _ in range(refusals):
        state, _ = update(state, X, np.full_like(Y, np.nan))
    assert sgp.num_refused(state) == refusals
    for _ in range(5):
        (wanted, loss), (state, found) = update(wanted, X, Y), update(state, X, Y)
        assert_allclose(found, loss, rtol=1e-5)
    a, b = (svi.get_params(s)["f_auto_a"].values for s in (wanted, state))
    assert_allclose(a, b, rtol=1e-5)


def by_random_features(X, y=None):
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=dist.constraints.positive)
    kernel = features.RandomFourier(kernels.SquaredExponential(lengthscale), 20, jax.random.key(1))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def test_refused_steps_do_not_put_off_the_refresh_of_a_control_variate():
    own = by_random_features
    guide = sgp.AutoQSGP(own, basis_batch=8, inducing=Z, control=X[:4])
    svi = SVI(own, guide, sgp.RowSparse(0.1, optax.sgd(1e-3), refresh=3), sgp.QuadratureELBO(num_nodes=3))
    update = jax.jit(svi.update)

    def refreshed(outcomes):
        """Whether the control variate has taken the kernel as it is, after each step."""
        state, found = svi.init(jax.random.key(0), X, Y), []
        held = 1.0
        for y in outcomes:
            state, _ = update(state, X, y)
            now = float(svi.get_params(state)["f_auto_basis"].control.kernel.kernel.lengthscale)
            found.append(now != held)
            held = now
        return found

    bad = np.full_like(Y, np.nan)
    assert refreshed([Y] * 6) == [False, False, True, False, False, True]
    assert refreshed([Y, bad, Y, Y, bad, Y, Y, Y]) == [False, False, False, True, False, False, False, True]


def with_outliers(X, y=None):
    lengthscale = numpyro.param("lengthscale", 1.0, constraint=dist.constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(kernels.SquaredExponential(lengthscale), X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(3.0, f, 0.1), obs=y)


SCALED = {
    "tied": (
        with_outliers,
        lambda m, X: sgp.AutoTSVGP(m, X[::3], learn_inducing=True),
        partial(sgp.NaturalGradient, 0.6),
    ),
    "per datum": (
        with_outliers,
        lambda m, X: sgp.AutoTSVGP(m, X[::3], sites="per_datum"),
        partial(sgp.NaturalGradient, 0.6),
    ),
    "dense": (with_outliers, lambda m, X: sgp.AutoTSVGP(m, None), partial(sgp.NaturalGradient, 0.6)),
    "natural": (with_outliers, lambda m, X: sgp.AutoSVGP(m, X[::3], natural=True), partial(sgp.NaturalGradient, 0.6)),
    "weights": (by_random_features, lambda m, X: sgp.AutoWeightSpaceGP(m), partial(sgp.NaturalGradient, 0.6)),
    "held": (by_random_features, lambda m, X: sgp.AutoWeightSpaceGP(m, refresh=3), partial(sgp.NaturalGradient, 0.6)),
    "coefficients": (model, lambda m, X: sgp.AutoDecoupledGP(m, X, X[::3]), partial(sgp.DualAscent, 0.1)),
    "table": (
        by_random_features,
        lambda m, X: sgp.AutoQSGP(m, basis_batch=8, inducing=X[::3], control=X[:4]),
        partial(sgp.RowSparse, 0.1, refresh=2),
    ),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", representative(SCALED, ["tied", "dense"]))
def test_steps_are_those_of_the_loss_without_its_scale(kind):
    own, make, optimizer = SCALED[kind]
    X64 = X.astype(float)
    y = np.where(np.arange(len(Y)) == 5, 4.0, Y).astype(float)
    ends = {}
    for scale in (1.0, 0.3):
        scaled = own if scale == 1.0 else numpyro.handlers.scale(own, scale=scale)
        optim = optimizer(others=optax.sgd(1e-3 / scale))
        svi = SVI(scaled, make(scaled, X64), optim, sgp.QuadratureELBO())
        update, state = jax.jit(svi.update), svi.init(jax.random.key(0), X64, y)
        for _ in range(7):
            state, loss = update(state, X64, y)
        assert sgp.num_refused(state) == 0
        ends[scale] = svi.get_params(state), loss / scale
    jax.tree.map(partial(assert_allclose, rtol=1e-6, atol=1e-8), ends[0.3], ends[1.0])


@pytest.mark.usefixtures("x64")
@pytest.mark.exhaustive
def test_sites_of_a_latent_that_is_masked_stay_and_those_of_others_move_with_the_inducing_inputs():
    inputs, outcomes = X.astype(float), np.stack([Y, -Y]).astype(float)

    def one(X, y=None):
        f = numpyro.sample("f", sgp.GaussianProcess(kernels.SquaredExponential(1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    def two(X, y=None):
        with numpyro.plate("latent", 2), numpyro.handlers.mask(mask=np.array([False, True])):
            f = numpyro.sample("f", sgp.GaussianProcess(kernels.SquaredExponential(1.0), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(f[1], 0.3), obs=y)

    ends = []
    for own in (one, two):
        guide = sgp.AutoTSVGP(own, inputs[::3], learn_inducing=True)
        svi = SVI(own, guide, sgp.NaturalGradient(0.5, optax.sgd(1e-3)), sgp.QuadratureELBO())
        update, state = jax.jit(svi.update), svi.init(jax.random.key(0), inputs, outcomes[1])
        for _ in range(5):
            state, _ = update(state, inputs, outcomes[1])
        ends.append(svi.get_params(state)["f_auto_sites"])
    assert np.any(ends[0].lambda1 != 0.0)
    assert_allclose(ends[1].lambda1[1], ends[0].lambda1, rtol=1e-9)
    assert_allclose(ends[1].Lambda2[1], ends[0].Lambda2, rtol=1e-9, atol=1e-12)
    assert_allclose(ends[1].reference.Z, ends[0].reference.Z, rtol=1e-12)
    assert np.all(ends[1].lambda1[0] == 0.0)
