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
    python benchmarks/automatic_fit.py --nuts --output results

With `--budget` there is `fit` alone, with so many seconds, and the result has a file of its own.
"""

import argparse
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


def ours(p: dict, binary: bool, reduced: bool) -> dict:
    """A fit without a setting."""
    import jax
    import numpyro
    import numpyro.distributions as dist

    import numpyro_sgp as sgp

    numpyro.enable_x64()
    D = p["X"].shape[1]

    def model(X, y=None, num_data=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 1.0).expand([D]).to_event(1))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale, variance), X))
        noise = None if binary else numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f) if noise is None else dist.Normal(f, noise), obs=y)

    options = {"num_inducing": 5, "num_steps": 5} if reduced else {"budget": float(p["budget"]) or None}
    result = sgp.fit(model, jax.random.key(0), (p["X"], p["y"]), progress_bar=False, **options)
    seconds = time.process_time()
    report = result.report
    print(report, file=sys.stderr)
    params, guide, X_test = result.params, result.guide, jax.numpy.asarray(p["X_test"])
    scales = {name: value for name, value in params.items() if name.endswith("_auto_scale")}

    def predicted(rng_key: jax.Array) -> tuple[jax.Array, ...]:
        """Given a draw of the hyperparameters, where the base guide is put without any spread."""
        drawn = dict(params)
        for number, (name, scale) in enumerate(scales.items()):
            loc = name.removesuffix("scale") + "loc"
            drawn[loc] += scale * jax.random.normal(jax.random.fold_in(rng_key, number), scale.shape)
            drawn[name] = 1e-12 * scale
        q = guide.posterior(rng_key, drawn, X_test)["f"]
        if binary:
            return (q.expectation(jax.nn.sigmoid),)
        return q.mean, q.variance + guide.median(drawn, X_test)["noise"] ** 2

    draws = jax.random.split(jax.random.key(1), 3 if reduced else DRAWS)
    found = [np.asarray(each) for each in jax.lax.map(predicted, draws)]
    found = class_scores(found[0].mean(axis=0), p["y_test"]) if binary else scores(*found, p["y_test"])
    chosen = {"M": report.num_inducing.get("f", len(p["X"])), "method": report.method, "converged": report.converged}
    return {**found, "seconds": seconds, **chosen}


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
    means = np.r_[np.ones(D), 0.0, -1.0]  # of the logarithms of lengthscales, variance and noise

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
        return -(evidence + jax.numpy.sum(norm.logpdf(w, means)))

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


def gpflow(p: dict, binary: bool, reduced: bool) -> dict:
    """SVGP with its usual settings."""
    import gpflow
    import tensorflow as tf

    X, y = p["X"], p["y"][:, None]
    kernel = gpflow.kernels.Matern52(lengthscales=np.ones(X.shape[1]))
    likelihood = gpflow.likelihoods.Bernoulli(gpflow.likelihoods.utils.inv_probit) if binary else None
    likelihood = gpflow.likelihoods.Gaussian(0.1) if likelihood is None else likelihood
    model = gpflow.models.SVGP(kernel, likelihood, p["Z"], num_data=len(X))
    gpflow.set_trainable(model.q_mu, False)
    gpflow.set_trainable(model.q_sqrt, False)
    natural, adam = gpflow.optimizers.NaturalGradient(gamma=0.1), tf.optimizers.Adam(0.01)

    @tf.function
    def step(batch):
        natural.minimize(lambda: model.training_loss(batch), [(model.q_mu, model.q_sqrt)])
        parameters = model.trainable_variables
        with tf.GradientTape() as tape:
            value = model.training_loss(batch)
        adam.apply_gradients(zip(tape.gradient(value, parameters), parameters, strict=True))

    rng, B = np.random.default_rng(0), min(256, len(X))
    for _ in range(5 if reduced else 3000):
        rows = rng.choice(len(X), B, replace=False)
        step((tf.constant(X[rows]), tf.constant(y[rows])))
    seconds = time.process_time()
    if binary:
        found = class_scores(model.predict_y(p["X_test"])[0].numpy()[:, 0], p["y_test"])
    else:
        found = scores(*(each.numpy().T for each in model.predict_y(p["X_test"])), p["y_test"])
    versions = {"gpflow": gpflow.__version__, "tensorflow": tf.__version__}
    return {**found, "seconds": seconds, "M": len(p["Z"]), "versions": versions}


def against_nuts(reduced: bool) -> list[dict]:
    """Posteriors of `fit` beside long chains of the dense model: a regression, and counts with effects of groups."""
    from common import beside, long_chains
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    import numpyro_sgp as sgp

    rng, N = np.random.default_rng(0), 80
    X, group = np.sort(rng.uniform(-2.0, 2.0, (N, 1)), axis=0), rng.integers(0, 5, N)
    f = np.sin(3.0 * X[:, 0])
    outcomes = {
        "regression": f + 0.3 * rng.normal(size=N),
        "counts with effects": rng.poisson(np.exp(f + rng.normal(size=5)[group] + 0.5)).astype(float),
    }

    def model(X, group, y=None, *, counts: bool, dense: bool):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        kernel = sgp.kernels.Matern52(lengthscale)
        if dense:
            L = jnp.linalg.cholesky(kernel(X, X) + 1e-6 * jnp.eye(N))
            f = numpyro.deterministic("f", L @ numpyro.sample("v", dist.Normal().expand([N])))
        else:
            f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
        if counts:
            level = numpyro.sample("level", dist.Normal(0.0, 2.0))
            with numpyro.plate("groups", 5):
                effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        else:
            noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        with numpyro.plate("data", N):
            likelihood = dist.Poisson(jnp.exp(f + level + effect[group])) if counts else dist.Normal(f, noise)
            numpyro.sample("y", likelihood, obs=y)

    table = []
    for name, y in list(outcomes.items())[1 if reduced else 0 :]:
        counts = name != "regression"
        num_samples = 20 if reduced else 4000
        exact, r_hat, ess = long_chains(model, X, group, y, counts=counts, dense=True, num_samples=num_samples)

        def both(X, group, y=None, counts=counts):
            return model(X, group, y, counts=counts, dense=False)

        steps = 5 if reduced else None
        result = sgp.fit(both, jax.random.key(1), (X, group, y), num_steps=steps, progress_bar=False)
        draws = result.guide.sample_posterior(
            jax.random.key(2), result.params, X, group, sample_shape=(50 if reduced else 8000,)
        )
        for latent in sorted(exact.keys() - {"v"}):
            row = {"model": name, "latent": latent, "r_hat": r_hat, "ess": ess}
            row |= beside(draws[latent], exact[latent], positive=latent in ("lengthscale", "noise"))
            table.append(row)
            print(
                f"{name:20s} {latent:12s} mean within {row['error']:.2f} sd, "
                f"sds {row['least']:.3f} to {row['largest']:.3f} (R-hat {r_hat:.4f}, ESS {ess:.0f})",
                flush=True,
            )
    return table


LIBRARIES = {"numpyro_sgp": ours, "dense": dense, "gpflow": gpflow}
_MOST_DENSE_ROWS = 2000


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


def main(arguments: argparse.Namespace) -> None:
    """Every data set, fold and library."""
    from common import earlier, npz, report
    import numpyro

    import numpyro_sgp as sgp

    numpyro.enable_x64()
    libraries = {
        "numpyro_sgp": sys.executable,
        "dense": sys.executable,
        **({"gpflow": arguments.gpflow} if arguments.gpflow else {}),
    }
    result, settings = "automatic_fit", {}
    if arguments.budget:
        result, settings = "automatic_fit_budget", {"budget": arguments.budget}
        libraries = {"numpyro_sgp": sys.executable}
    runs = earlier(result, settings, arguments.output)
    sets = {path.stem: {fold: npz(path, fold) for fold in arguments.folds} for path in arguments.data}
    if arguments.reduced:
        rng = np.random.default_rng(0)
        X = rng.uniform(-2.0, 2.0, (60, 2))
        y = np.sin(3.0 * X[:, 0]) + 0.1 * rng.normal(size=60)
        sets = {"synthetic": {0: (X[:50], y[:50], X[50:], y[50:])}}
    for name, folds in sets.items():
        for fold, (X, y, X_test, y_test) in folds.items():
            binary = bool(np.isin(y, (0.0, 1.0)).all())
            Z = np.asarray(sgp.kmeans(None, X, num_inducing=min(256, len(X) // 2)))
            for library, python in libraries.items():
                if library == "dense" and (binary or len(X) > _MOST_DENSE_ROWS):
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "problem.npz"
                    of_rows = {"X": X, "y": y, "X_test": X_test, "y_test": y_test, "Z": Z}
                    np.savez(path, **of_rows, binary=binary, budget=arguments.budget or 0.0)
                    try:
                        found = measured(library, python, path, arguments.reduced)
                    except RuntimeError as error:
                        if library == "numpyro_sgp":
                            raise
                        found = {"failed": str(error).splitlines()[-1]}
                run = runs.setdefault(name, {"rows": len(X), "columns": X.shape[1], "binary": binary})
                run.setdefault(library, {})[str(fold)] = found
                if "failed" in found:
                    print(f"{name} {fold} {library}: {found['failed']}", flush=True)
                    continue
                text = (
                    f"NLPD {found['nlpd']:.4f}, error {found['error']:.4f}, {found['seconds']:.0f} s, M = {found['M']}"
                )
                print(f"{name} {fold} {library}: {text}", flush=True)
        report(result, {"settings": settings, "runs": runs}, arguments.output)
    if arguments.nuts or arguments.reduced:
        report("automatic_fit_nuts", {"table": against_nuts(arguments.reduced)}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="data sets as .npz with X, y and test_mask")
    parser.add_argument("--folds", type=int, nargs="*", default=[0], help="which folds of each")
    parser.add_argument("--gpflow", help="interpreter with GPflow")
    parser.add_argument("--budget", type=float, help="seconds for `fit`")
    parser.add_argument("--nuts", action="store_true", help="a comparison with NUTS, too")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the results as JSON")
    parser.add_argument("--child", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--problem", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.problem, options.reduced)
    else:
        main(options)
