"""`fit(model, key, data)` without a setting: test scores and time on data sets, beside GPflow, and beside NUTS.

The model is a GP with a Matérn-5/2 kernel, a lengthscale for each column and Gaussian noise, or Bernoulli outcomes for
classes. GPflow's SVGP has its usual settings: inducing inputs from k-means, 256 at most, that are trained; natural
steps of 0.1 on q and Adam of 0.01 on the rest, on batches of 256, 3000 of each. Scores are those of test rows: mean
negative log predictive density (NLPD), and root mean squared error in units of the outcome's standard deviation, or
for classes the error rate. Those of `fit` are averaged over 64 draws of the hyperparameters. Regressions of up to 2000
rows are beside the dense GP at the best mode of its exact posterior density from three starts. Each fit is a process of
its own, whose processor time counts from its start to the last parameter, imports and compilation included.

    python benchmarks/automatic_fit.py --data yacht.npz magic.npz --folds 0 1 --gpflow PYTHON --output results
    python benchmarks/automatic_fit.py --data kin40k.npz --budget 140 --output results
    python benchmarks/automatic_fit.py --data yacht.npz --by-hand --output results
    python benchmarks/automatic_fit.py --data yacht.npz --chains --output results
    python benchmarks/automatic_fit.py --nuts --output results
    python benchmarks/automatic_fit.py --nuts "correlated effects" --output results
    python benchmarks/automatic_fit.py --output results  # means of what is there

With `--budget` there is `fit` alone, with so many seconds, and with `--by-hand` t-SVGP with six settings: trained
inducing inputs from k-means or, of up to 1000 rows, none; Adam of 0.01 or 0.03 that falls to zero; hyperparameters at
their mode or with Gaussians. It takes 1500 steps with all rows, or 5000 with batches of 1000. Each has a file of its
own. With `--chains` there is NUTS, in the place of `fit`.
`--nuts` compares `fit` with NUTS on its own models, all or those that are named; the others stay in the result.
`--as-gpflow` has the model of GPflow, in a file of its own: a probit link for classes, and as nothing there has a
prior, wide priors on all hyperparameters.
"""

import argparse
from collections.abc import Callable
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time

import numpy as np

# Of hyperparameters.
DRAWS = 64


def scores(mean: np.ndarray, variance: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Of a mixture of Gaussian predictions of outcomes, (S, N)."""
    log_density = -0.5 * np.log(2.0 * np.pi * variance) - 0.5 * (y - mean) ** 2 / variance
    nlpd = -np.mean(np.logaddexp.reduce(log_density, axis=0) - np.log(len(mean)))
    return {"nlpd": float(nlpd), "error": float(np.sqrt(np.mean((y - mean.mean(axis=0)) ** 2)))}


def class_scores(p: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Of probabilities of the class 1."""
    nlpd = -np.mean(np.log(np.where(y == 1.0, p, 1.0 - p)))
    return {"nlpd": float(nlpd), "error": float(np.mean((p > 0.5) != (y == 1.0)))}


def priors(D: int, as_gpflow: bool) -> dict[str, tuple[float, float]]:
    """Means and standard deviations of the logarithms of hyperparameters."""
    if as_gpflow:
        # Lengthscales as Hvarfner, Hellsten and Nardi (2024) have them for unit cubes.
        return {
            "lengthscale": (2.0**0.5 + 0.5 * float(np.log(D)), 3.0**0.5),
            "variance": (0.0, 3.0),
            "noise": (-1.0, 3.0),
        }
    return {"lengthscale": (1.0, 1.0), "variance": (0.0, 1.0), "noise": (-1.0, 1.0)}


def logits_of(f, as_gpflow: bool):
    """Of the class 1: f, or with a probit link log Phi(f) - log Phi(-f)."""
    from jax.scipy.special import log_ndtr

    return log_ndtr(f) - log_ndtr(-f) if as_gpflow else f


def model_of(D: int, binary: bool, as_gpflow: bool) -> Callable:
    """The model, with its hyperparameters."""
    import numpyro
    import numpyro.distributions as dist

    import numpyro_sgp as sgp

    prior = {name: dist.LogNormal(*of_logarithm) for name, of_logarithm in priors(D, as_gpflow).items()}

    def model(X, y=None, num_data=None):
        lengthscale = numpyro.sample("lengthscale", prior["lengthscale"].expand([D]).to_event(1))
        variance = numpyro.sample("variance", prior["variance"])
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale, variance), X))
        noise = None if binary else numpyro.sample("noise", prior["noise"])
        outcome = dist.Bernoulli(logits=logits_of(f, as_gpflow)) if noise is None else dist.Normal(f, noise)
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", outcome, obs=y)

    return model


def predictions(guide, params: dict, p: dict, binary: bool, reduced: bool) -> dict[str, float]:
    """Scores of test rows, averaged over draws of the hyperparameters where these have a posterior."""
    import jax

    X_test = jax.numpy.asarray(p["X_test"])
    scales = {name: value for name, value in params.items() if name.endswith(("_auto_scale", "auto_scale_tril"))}

    def predicted(rng_key: jax.Array) -> tuple[jax.Array, ...]:
        """Given a draw of the hyperparameters, where the base guide is put without any spread."""
        drawn = dict(params)
        for number, (name, scale) in enumerate(scales.items()):
            loc, joint = name.removesuffix("_tril").removesuffix("scale") + "loc", name.endswith("_tril")
            noise = jax.random.normal(jax.random.fold_in(rng_key, number), drawn[loc].shape)
            drawn[loc] += scale @ noise if joint else scale * noise
            drawn[name] = 1e-12 * scale
        q = guide.posterior(rng_key, drawn, X_test)["f"]
        if binary:
            return (q.expectation(lambda f: jax.nn.sigmoid(logits_of(f, bool(p["as_gpflow"])))),)
        return q.mean, q.variance + guide.median(drawn, X_test)["noise"] ** 2

    draws = jax.random.split(jax.random.key(1), 3 if reduced else DRAWS if scales else 1)
    found = [np.asarray(each) for each in jax.lax.map(predicted, draws)]
    return class_scores(found[0].mean(axis=0), p["y_test"]) if binary else scores(*found, p["y_test"])


def ours(p: dict, binary: bool, reduced: bool) -> dict:
    """A fit without a setting."""
    import jax
    import numpyro

    import numpyro_sgp as sgp

    numpyro.enable_x64()
    options = {"num_inducing": 5, "num_steps": 5} if reduced else {"budget": float(p["budget"]) or None}
    model = model_of(p["X"].shape[1], binary, bool(p["as_gpflow"]))
    result = sgp.fit(model, jax.random.key(0), (p["X"], p["y"]), progress_bar=False, **options)
    seconds = time.process_time()
    report = result.report
    print(report, file=sys.stderr)
    chosen = {"M": report.num_inducing.get("f", len(p["X"])), "method": report.method, "converged": report.converged}
    return {**predictions(result.guide, result.params, p, binary, reduced), "seconds": seconds, **chosen}


def by_hand(p: dict, binary: bool, reduced: bool) -> dict:
    """t-SVGP with settings that one would choose and try: the number of inducing inputs, the rate, the base guide."""
    import jax
    import numpyro
    from numpyro.infer import SVI
    from numpyro.infer.autoguide import AutoDelta, AutoNormal
    import optax

    import numpyro_sgp as sgp

    numpyro.enable_x64()
    X, y = (jax.numpy.asarray(p[name]) for name in ("X", "y"))
    N, model = len(X), model_of(X.shape[1], binary, bool(p["as_gpflow"]))
    M, rate, mode = int(p["M"]), float(p["rate"]), bool(p["mode"])
    steps, B = (1500, N) if N <= _MOST_ROWS_AT_ONCE else (5000, 1000)
    steps = 5 if reduced else steps
    inducing = sgp.kmeans(None, X, num_inducing=M) if M < N else None
    guide = sgp.AutoTSVGP(model, inducing, learn_inducing=M < N, base=AutoDelta if mode else AutoNormal)
    natural = optax.linear_schedule(*((0.5, 0.1) if B == N else (0.1, 0.02)), steps)
    optim = sgp.NaturalGradient(natural, optax.adam(optax.cosine_decay_schedule(rate, steps)))
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    key = jax.random.key(0)

    @jax.jit
    def trained(X, y):
        def step(number, state):
            if B == N:
                return svi.update(state, X, y, num_data=N)[0]
            rows = jax.random.choice(jax.random.fold_in(key, number), N, (B,), replace=False)
            return svi.update(state, X[rows], y[rows], num_data=N)[0]

        return jax.lax.fori_loop(0, steps, step, svi.init(key, X[:B], y[:B], num_data=N))

    params = svi.get_params(jax.block_until_ready(trained(X, y)))
    seconds = time.process_time()
    return {**predictions(guide, params, p, binary, reduced), "seconds": seconds, "M": min(M, N)}


def dense(p: dict, binary: bool, reduced: bool) -> dict:
    """A GP of all rows, its hyperparameters at the mode of the same posterior density, by L-BFGS from three starts."""
    import jax
    from jax.scipy.linalg import cho_solve, solve_triangular
    from jax.scipy.stats import norm
    import scipy.optimize

    assert not binary
    jax.config.update("jax_enable_x64", True)
    X, y, X_test = (np.asarray(p[name]) for name in ("X", "y", "X_test"))
    D = X.shape[1]
    prior = priors(D, bool(p["as_gpflow"]))
    means, sds = np.array([prior["lengthscale"]] * D + [prior["variance"], prior["noise"]]).T

    def covariance(w, A, B):
        A, B = A / jax.numpy.exp(w[:D]), B / jax.numpy.exp(w[:D])
        squares = jax.numpy.sum(A**2, 1)[:, None] + jax.numpy.sum(B**2, 1) - 2.0 * A @ B.T
        r = jax.numpy.sqrt(5.0 * jax.numpy.maximum(squares, 1e-20))
        return jax.numpy.exp(w[D]) * (1.0 + r + r**2 / 3.0) * jax.numpy.exp(-r)

    def root(w, X):
        return jax.numpy.linalg.cholesky(
            covariance(w, X, X) + jax.numpy.exp(2.0 * w[-1]) * jax.numpy.eye(len(X)), symmetrize_input=False
        )

    def negative_log_density(w, X, y):
        L = root(w, X)
        white = solve_triangular(L, y, lower=True)
        evidence = -0.5 * white @ white - jax.numpy.sum(jax.numpy.log(jax.numpy.diag(L)))
        return -(evidence + jax.numpy.sum(norm.logpdf(w, means, sds)))

    value_and_gradient = jax.jit(jax.value_and_grad(negative_log_density))

    def objective(w):
        value, gradient = value_and_gradient(w, X, y)
        return (float(value), np.asarray(gradient)) if np.isfinite(value) else (1e100, np.zeros(len(w)))

    modes = [
        scipy.optimize.minimize(
            objective, means + np.r_[np.full(D, shift), 0.0, 0.0], jac=True, options={"maxiter": 2 if reduced else 500}
        )
        for shift in (-1.0, 0.0, 1.0)
    ]
    w = min(modes, key=lambda mode: mode.fun).x
    seconds = time.process_time()
    L, K = root(w, X), covariance(w, X_test, X)
    mean = K @ cho_solve((L, True), y)
    variance = np.exp(w[D]) - np.sum(np.asarray(solve_triangular(L, K.T, lower=True)) ** 2, axis=0)
    variance = variance + np.exp(2.0 * w[-1])
    return {**scores(np.asarray(mean)[None], variance[None], p["y_test"]), "seconds": seconds, "M": len(X)}


def nuts(p: dict, binary: bool, reduced: bool) -> dict:
    """Long chains of the dense model, at the training and test inputs."""
    from common import long_chains
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    import numpyro_sgp as sgp

    numpyro.enable_x64()
    N, every, y = len(p["X"]), jnp.concatenate([p["X"], p["X_test"]]), jnp.asarray(p["y"])
    D = every.shape[1]
    prior = {name: dist.LogNormal(*of_logarithm) for name, of_logarithm in priors(D, bool(p["as_gpflow"])).items()}

    def model():
        lengthscale = numpyro.sample("lengthscale", prior["lengthscale"].expand([D]).to_event(1))
        variance = numpyro.sample("variance", prior["variance"])
        K = sgp.kernels.Matern52(lengthscale, variance)(every, every)
        if binary:
            L = jnp.linalg.cholesky(K + 1e-8 * variance * jnp.eye(len(every)))
            f = L @ numpyro.sample("v", dist.Normal().expand([len(every)]).to_event(1))
            logits = logits_of(f, bool(p["as_gpflow"]))
            numpyro.sample("y", dist.Bernoulli(logits=logits[:N]), obs=y)
            numpyro.deterministic("p", jax.nn.sigmoid(logits[N:]))
            return
        noise = numpyro.sample("noise", prior["noise"])
        C = K[:N, :N] + noise**2 * jnp.eye(N)
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(N), C), obs=y)
        W = jnp.linalg.solve(C, K[:N, N:])
        numpyro.deterministic("mean", W.T @ y)
        numpyro.deterministic("variance_of_y", jnp.diag(K)[N:] - jnp.sum(W * K[:N, N:], axis=0) + noise**2)

    draws, r_hat, ess = long_chains(model, num_samples=20 if reduced else 1000, dense_mass=not binary)
    seconds = time.process_time()
    if binary:
        found = class_scores(np.asarray(draws["p"]).mean(axis=0), p["y_test"])
    else:
        found = scores(np.asarray(draws["mean"]), np.asarray(draws["variance_of_y"]), p["y_test"])
    return {**found, "seconds": seconds, "M": N, "r_hat": r_hat, "ess": ess}


def gpflow(p: dict, binary: bool, reduced: bool) -> dict:
    """SVGP with its usual settings; where a natural step is not finite, anew with Adam for all parameters."""
    import gpflow
    import tensorflow as tf

    X, y, rng, B = p["X"], p["y"][:, None], np.random.default_rng(0), min(256, len(p["X"]))

    def trained(with_natural_steps: bool) -> gpflow.models.SVGP:
        kernel = gpflow.kernels.Matern52(lengthscales=np.ones(X.shape[1]))
        likelihood = gpflow.likelihoods.Bernoulli(gpflow.likelihoods.utils.inv_probit) if binary else None
        likelihood = gpflow.likelihoods.Gaussian(0.1) if likelihood is None else likelihood
        model = gpflow.models.SVGP(kernel, likelihood, p["Z"].copy(), num_data=len(X))
        gpflow.set_trainable(model.q_mu, not with_natural_steps)
        gpflow.set_trainable(model.q_sqrt, not with_natural_steps)
        natural, adam = gpflow.optimizers.NaturalGradient(gamma=0.1), tf.optimizers.Adam(0.01)

        @tf.function
        def step(batch):
            if with_natural_steps:
                natural.minimize(lambda: model.training_loss(batch), [(model.q_mu, model.q_sqrt)])
            parameters = model.trainable_variables
            with tf.GradientTape() as tape:
                value = model.training_loss(batch)
            adam.apply_gradients(zip(tape.gradient(value, parameters), parameters, strict=True))

        for _ in range(5 if reduced else 3000):
            rows = rng.choice(len(X), B, replace=False)
            step((tf.constant(X[rows]), tf.constant(y[rows])))
        return model

    steps = "natural steps and Adam"
    try:
        model = trained(with_natural_steps=True)
    except tf.errors.InvalidArgumentError as error:
        steps = "Adam"
        print(f"a natural step failed: {error}", file=sys.stderr)
        model = trained(with_natural_steps=False)
    seconds = time.process_time()
    if binary:
        found = class_scores(model.predict_y(p["X_test"])[0].numpy()[:, 0], p["y_test"])
    else:
        found = scores(*(each.numpy().T for each in model.predict_y(p["X_test"])), p["y_test"])
    versions = {"gpflow": gpflow.__version__, "tensorflow": tf.__version__}
    return {**found, "seconds": seconds, "M": len(p["Z"]), "steps": steps, "versions": versions}


def against_nuts(reduced: bool, names: list[str]) -> list[dict]:
    """Posteriors of `fit` beside long chains of the dense model, for some of the models; all if none is named."""
    from common import beside, long_chains
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    import numpyro_sgp as sgp

    rng, N = np.random.default_rng(0), 80
    X, group = np.sort(rng.uniform(-2.0, 2.0, (N, 1)), axis=0), rng.integers(0, 5, N)
    f = np.sin(3.0 * X[:, 0])
    problems = {
        "regression": (X, f + 0.3 * rng.normal(size=N)),
        "counts with effects": (X, rng.poisson(np.exp(f + rng.normal(size=5)[group] + 0.5)).astype(float)),
    }
    columns = rng.uniform(-2.0, 2.0, (N, 2))
    trend = np.sin(columns[:, 0]) + 0.5 * columns[:, 1]
    problems["two columns"] = (columns, trend + 0.1 * rng.normal(size=N))
    ordered = np.searchsorted([-1.0, 0.0, 1.0], f + rng.logistic(size=N))
    problems["ordered outcomes"] = (X, ordered)
    effects = 1.0 + 0.7 * rng.normal(size=5)
    problems["effects about a mean"] = (X, f + effects[group] + 0.3 * rng.normal(size=N))
    problems["counts with a bounded level"] = (X, rng.poisson(np.exp(f + 1.0)).astype(float))
    slopes = rng.normal(size=(8, 2)) @ np.linalg.cholesky(np.array([[0.5, 0.3], [0.3, 0.4]])).T
    of_eight, covariate = rng.integers(0, 8, N), rng.normal(size=N)
    varying = f + slopes[of_eight, 0] + slopes[of_eight, 1] * covariate
    problems["correlated effects"] = (X, varying + 0.3 * rng.normal(size=N))
    coefficients = np.array([1.5, -1.0, 0.0, 0.0, 0.0, 0.0])
    several = rng.normal(size=(N, 6))
    problems["horseshoe"] = (X, f + several @ coefficients + 0.3 * rng.normal(size=N))

    def kernel_of(D: int):
        if D == 1:
            return sgp.kernels.Matern52(numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5)))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
        return sgp.kernels.Matern52(lengthscale, numpyro.sample("variance", dist.LogNormal(0.0, 1.0)))

    def likelihood_of(name: str, f, group):
        """Of the outcomes, with what is beside f."""
        if name == "ordered outcomes":
            prior = dist.TransformedDistribution(dist.Normal(0.0, 2.0).expand([3]), dist.transforms.OrderedTransform())
            return dist.OrderedLogistic(f, numpyro.sample("cut points", prior))
        if name == "counts with a bounded level":
            return dist.Poisson(jnp.exp(f + numpyro.sample("level", dist.Uniform(-3.0, 3.0))))
        if name == "counts with effects":
            level = numpyro.sample("level", dist.Normal(0.0, 2.0))
            with numpyro.plate("groups", 5):
                effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
            return dist.Poisson(jnp.exp(f + level + effect[group]))
        if name == "correlated effects":
            spread = numpyro.sample("spread", dist.HalfNormal(1.0).expand([2]).to_event(1))
            root = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
            with numpyro.plate("groups", 8):
                z = numpyro.sample("z", dist.Normal().expand([2]).to_event(1))
            effect = numpyro.deterministic("effect", z @ (spread[:, None] * root).T)
            f = f + effect[of_eight, 0] + effect[of_eight, 1] * covariate
        if name == "horseshoe":
            overall = numpyro.sample("spread", dist.HalfCauchy(0.3))
            each = numpyro.sample("each", dist.HalfCauchy(1.0).expand([6]).to_event(1))
            z = numpyro.sample("z", dist.Normal().expand([6]).to_event(1))
            f = f + several @ numpyro.deterministic("coefficient", overall * each * z)
        if name == "effects about a mean":
            middle = numpyro.sample("middle", dist.Normal(0.0, 2.0))
            spread = numpyro.sample("spread", dist.HalfNormal())
            with numpyro.plate("groups", 5):
                f = f + numpyro.sample("effect", dist.Normal(middle, spread))[group]
        return dist.Normal(f, numpyro.sample("noise", dist.LogNormal(-1.0, 0.5)))

    def model(X, group, y=None, *, name: str, dense: bool):
        kernel = kernel_of(X.shape[1])
        if dense and name == "two columns":  # hyperparameters alone: f is integrated
            C = kernel(X, X) + numpyro.sample("noise", dist.LogNormal(-1.0, 0.5)) ** 2 * jnp.eye(N)
            numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(N), C), obs=y)
            return
        if dense:
            L = jnp.linalg.cholesky(kernel(X, X) + 1e-6 * jnp.eye(N))
            f = numpyro.deterministic("f", L @ numpyro.sample("v", dist.Normal().expand([N])))
        else:
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        likelihood = likelihood_of(name, f, group)
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihood, obs=y)

    table = []
    unknown = set(names) - problems.keys()
    if unknown:
        raise SystemExit(f"unknown models {sorted(unknown)}; there are {list(problems)}")
    for name in ["counts with effects"] if reduced else names or list(problems):
        X, y = problems[name]
        num_samples = 20 if reduced else 4000
        exact, r_hat, ess = long_chains(model, X, group, y, name=name, dense=True, num_samples=num_samples)

        def without_root(X, group, y=None, name=name):
            return model(X, group, y, name=name, dense=False)

        steps = 5 if reduced else None
        result = sgp.fit(without_root, jax.random.key(1), (X, group, y), num_steps=steps, progress_bar=False)
        draws = result.guide.sample_posterior(
            jax.random.key(2), result.params, X, group, sample_shape=(50 if reduced else 8000,)
        )
        if name == "correlated effects":
            for found in (draws, exact):
                found["correlation"] = found["correlation"][:, 1, 0]
        for latent in sorted(exact.keys() - {"each", "v", "z"}):
            row = {"model": name, "latent": latent, "r_hat": r_hat, "ess": ess}
            row |= beside(
                draws[latent], exact[latent], positive=latent in ("lengthscale", "noise", "spread", "variance")
            )
            table.append(row)
            print(
                f"{name:27s} {latent:12s} mean within {row['error']:.2f} sd, "
                f"sds {row['least']:.3f} to {row['largest']:.3f} (R-hat {r_hat:.4f}, ESS {ess:.0f})",
                flush=True,
            )
    return table


LIBRARIES = {"numpyro_sgp": ours, "dense": dense, "gpflow": gpflow, "by_hand": by_hand, "nuts": nuts}
_MOST_DENSE_ROWS, _MOST_ROWS_AT_ONCE = 2000, 1000


def settings_by_hand(N: int) -> dict[str, dict]:
    """What one would try: few or many inducing inputs, low or high rates, hyperparameters at their mode or spread."""
    numbers = (min(128, N // 2), N) if N <= _MOST_ROWS_AT_ONCE else (256, 512)
    found = {}
    for M in numbers:
        for rate, base in ((0.01, "mode"), (0.01, "spread"), (0.03, "spread")):
            name = f"M = {'N' if M == N else M}, rate = {rate}, {base}"
            found[name] = {"M": M, "rate": rate, "mode": base == "mode"}
    return found


def trials(arguments: argparse.Namespace, N: int, binary: bool) -> list[tuple[str, str, dict]]:
    """What is run on each fold: which of `LIBRARIES`, its name in the result, and its settings."""
    by_hand = [("by_hand", name, options) for name, options in settings_by_hand(N).items()]
    fit, exact, chains, peer = ([(name, name, {})] for name in ("numpyro_sgp", "dense", "nuts", "gpflow"))
    if arguments.reduced:
        return fit + exact + chains + by_hand[:1]
    if arguments.by_hand:
        return by_hand
    if arguments.chains:
        return chains
    if arguments.budget:
        return fit
    return fit + (exact if not binary and N <= _MOST_DENSE_ROWS else []) + (peer if arguments.gpflow else [])


def child(library: str, path: Path, reduced: bool) -> None:
    """One fit; prints JSON."""
    with np.load(path) as file:
        p = dict(file)
    print(json.dumps(LIBRARIES[library](p, bool(p.pop("binary")), reduced)))


def measured(library: str, python: str, path: Path, reduced: bool) -> dict:
    """One fit, in a process of its own."""
    command = [python, __file__, "--child", library, "--problem", str(path), *(["--reduced"] if reduced else [])]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if not reduced:
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        raise RuntimeError(f"{library} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def summary(runs: dict) -> None:
    """Means over the folds of each set and library, and in how many folds `fit` has the lower NLPD."""
    for name, run in runs.items():
        for title in (title for title, folds in run.items() if isinstance(folds, dict)):
            found = [each for each in run[title].values() if "failed" not in each]
            means = []
            for key in ("nlpd", "error", "seconds"):
                values = [each[key] for each in found if each.get(key) is not None]
                means.append(f"{key} {np.mean(values):.3f}" if values else "")
            print(f"{name:14s} {title:12s} {len(found)} folds: {', '.join(means)}")
    for peer in ("gpflow", "dense"):
        gaps = {
            name: [
                run["numpyro_sgp"][fold]["nlpd"] - found["nlpd"]
                for fold, found in run[peer].items()
                if "nlpd" in found and fold in run["numpyro_sgp"]
            ]
            for name, run in runs.items()
            if run.get("numpyro_sgp") and run.get(peer)
        }
        of_folds = [gap for of_set in gaps.values() for gap in of_set]
        if of_folds:
            ahead = sum(np.mean(of_set) < 0.0 for of_set in gaps.values())
            print(
                f"fit is ahead of {peer} on {ahead} of {len(gaps)} sets and in {sum(np.less(of_folds, 0.0))} of "
                f"{len(of_folds)} folds, at most {max(of_folds):.3f} behind"
            )


def main(arguments: argparse.Namespace) -> None:
    """Every data set, fold and library."""
    from common import data_set, earlier, earlier_table, report
    import numpyro

    import numpyro_sgp as sgp

    numpyro.enable_x64()
    result, settings = "automatic_fit", {}
    if arguments.budget:
        result, settings = "automatic_fit_budget", {"budget": arguments.budget}
    if arguments.by_hand:
        result = "automatic_fit_by_hand"
    if arguments.as_gpflow:
        result, settings = "automatic_fit_as_gpflow", {"as_gpflow": True}
    runs = earlier(result, settings, arguments.output)
    sets = {path.stem: {fold: data_set(path, fold) for fold in arguments.folds} for path in arguments.data}
    if arguments.reduced:
        rng = np.random.default_rng(0)
        X = rng.uniform(-2.0, 2.0, (60, 2))
        y = np.sin(3.0 * X[:, 0]) + 0.1 * rng.normal(size=60)
        sets = {"synthetic": {0: (X[:50], y[:50], X[50:], y[50:])}}
    for name, folds in sets.items():
        for fold, (X, y, X_test, y_test) in folds.items():
            binary = bool(np.isin(y, (0.0, 1.0)).all())
            Z = np.asarray(sgp.kmeans(None, X, num_inducing=min(256, len(X) // 2)))
            run = runs.setdefault(name, {"rows": len(X), "columns": X.shape[1], "binary": binary})
            for library, title, options in trials(arguments, len(X), binary):
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "problem.npz"
                    python = arguments.gpflow if library == "gpflow" else sys.executable
                    of_rows = {"X": X, "y": y, "X_test": X_test, "y_test": y_test, "Z": Z}
                    problem = {"binary": binary, "as_gpflow": arguments.as_gpflow, "budget": arguments.budget or 0.0}
                    np.savez(path, **of_rows, **problem, **options)
                    try:
                        found = measured(library, python, path, arguments.reduced)
                    except RuntimeError as error:
                        if library != "gpflow":
                            raise
                        found = {"failed": str(error).splitlines()[-1]}
                run.setdefault(title, {})[str(fold)] = found
                report(result, {"settings": settings, "runs": runs}, arguments.output)
                if "failed" in found:
                    print(f"{name} {fold} {title}: {found['failed']}", flush=True)
                    continue
                text = (
                    f"NLPD {found['nlpd']:.4f}, error {found['error']:.4f}, {found['seconds']:.0f} s, M = {found['M']}"
                )
                print(f"{name} {fold} {title}: {text}", flush=True)
    summary(runs)
    if arguments.nuts is not None or arguments.reduced:
        table = against_nuts(arguments.reduced, arguments.nuts or [])
        before = earlier_table("automatic_fit_nuts", arguments.output) if arguments.nuts else []
        again = {row["model"] for row in table}
        table = [row for row in before if row["model"] not in again] + table
        report("automatic_fit_nuts", {"table": table}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="data sets as .npz with X, y and test_mask")
    parser.add_argument("--folds", type=int, nargs="*", default=[0], help="which folds of each")
    parser.add_argument("--gpflow", help="interpreter with GPflow")
    parser.add_argument("--by-hand", action="store_true", help="guides with settings, in place of `fit`")
    parser.add_argument("--budget", type=float, help="seconds for `fit`")
    parser.add_argument("--as-gpflow", action="store_true", help="GPflow's model: probit link, wide priors")
    parser.add_argument("--chains", action="store_true", help="NUTS on the data sets, in place of `fit`")
    parser.add_argument("--nuts", nargs="*", help="a comparison with NUTS on models of its own, all or those named")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the results as JSON")
    parser.add_argument("--child", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--problem", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.problem, options.reduced)
    else:
        main(options)
