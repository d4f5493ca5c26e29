"""The method of Cheng and Boots (2017) as they ran it, on public data, beside SVGP, SOLVE and a GP on some of the rows.

`SVDGP` is their algorithm 1 with their settings (section 4, appendix C): the parametrisation "full", inducing variables
with lengthscales of their own (`MultiscaleInducing`, their generalised SE-ARD kernel) that start at rows of the
minibatches, 128 more in each until the mean has all of its own, Adam on everything with the step size
γ₀ / (1 + 0.1 √t), and the γ₀ out of 0.1, 0.01 and 0.001 with the best bound after 100 steps. Smaller than theirs are
the basis of the mean (2048, not 16384) and the number of steps (1000, not 2000); the divergence of the mean is
estimated from 128 of its rows. SVGP and SOLVE get the CPU time that it takes, without that of the search for γ₀. `GPR`
is an exact GP on 1024 rows drawn at random, as in the paper, after 300 steps of Adam on the marginal likelihood; its
bound is that of its posterior for all training rows.

    python benchmarks/decoupled_paper.py --data kin40k.npz bike.npz elevators.npz [--folds 0 1] [--output results]

Runs are added to those that the output folder has already. `nmse` is the mean squared error on the test rows over the
variance of their outputs. `--summary` prints means and standard deviations over the folds.
"""

import argparse
import dataclasses
from pathlib import Path
import time

from common import add_run, earlier, spread
from decoupled_quality import Clock, judged, model, problem
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

# Inducing inputs of the SVGP, of each half of SOLVE, and of the mean and the covariance of SVDGP; how many are new in a
# minibatch; rows of the exact GP and its steps.
FULL = {"M": 512, "solve": 320, "mean": 2048, "covariance": 128, "new": 128, "batch": 1024, "steps": 1000}
FULL |= {"rows": 1024, "exact": 300}
REDUCED = {"M": 16, "solve": 10, "mean": 40, "covariance": 8, "new": 8, "batch": 64, "steps": 10}
REDUCED |= {"rows": 50, "exact": 10}
RATES, TRIAL = (0.1, 0.01, 0.001), 100
LOSS = sgp.QuadratureELBO(num_nodes=3)  # the Gaussian's logarithm is a quadratic in f: three nodes are exact


def trained(guide, optim, data, batch: int, steps: int, start: dict | None = None) -> tuple[dict, float]:
    """Parameters after some steps, and their CPU seconds."""
    X, y = data
    svi = SVI(model, guide, optim, LOSS)
    state = svi.init(jax.random.key(0), X[:batch], y[:batch], num_data=len(X), init_params=start)
    state, _, seconds = Clock().run(svi, state, data, batch, None, steps, 0)
    return svi.get_params(state), seconds


def growing(size: int, new: int) -> optax.GradientTransformation:
    """Coefficients stay at zero, as if their inducing variables were not there, until the minibatch of these comes.

    In the place of `GrowBasis`, which takes the rows that are explained worst, and knows no lengthscales of their own.
    """

    def update(updates, count, _=None):
        there, a = jnp.arange(size) < new * (count + 1), updates["f_auto_a"]
        a = dataclasses.replace(a, values=jnp.where(there, a.values, 0.0))
        return {**updates, "f_auto_a": a}, count + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)


def svdgp(data, p: dict, batch: int) -> tuple:
    """Algorithm 1: the guide, and a function from γ₀ and a number of steps to parameters and seconds."""
    X, y = data
    N, new, rng = len(X), p["new"], np.random.default_rng(0)
    # The minibatches that `Clock.run` is going to take.
    each = N // batch
    epochs = -(-p["mean"] // (each * new))
    batches = np.concatenate([rng.permutation(N)[: each * batch].reshape(each, batch) for _ in range(epochs)])
    alpha, beta = X[batches[:, :new].reshape(-1)[: p["mean"]]], X[batches[0, : p["covariance"]]]
    guide = sgp.AutoDecoupledGP(
        model,
        sgp.MultiscaleInducing.at(alpha),
        sgp.MultiscaleInducing.at(beta),
        parametrization="full",
        learn_inducing=True,
        kl_rows=new,
    )
    first = batches[0]
    start = {"lengthscale": sgp.median_lengthscale(X[first]).astype(X.dtype), "noise": y[first].std()}

    def run(rate: float, steps: int) -> tuple[dict, float]:
        adam = optax.adam(lambda t: rate / (1.0 + 0.1 * jnp.sqrt(t)))
        return trained(guide, optax.chain(growing(len(alpha), new), adam), data, batch, steps, start)

    return guide, run


def gpr(X, y, steps: int) -> tuple:
    """The exact posterior of some rows as a guide, its parameters, the number of steps and their CPU seconds."""
    D, optim = X.shape[1], optax.adam(optax.cosine_decay_schedule(0.05, steps))

    def prior(theta):
        return sgp.kernels.SquaredExponential(jnp.exp(theta[:D]), jnp.exp(theta[D])), jnp.exp(theta[D + 1])

    def loss(theta, X, y):
        kernel, noise = prior(theta)
        return -dist.MultivariateNormal(0.0, kernel(X, X) + noise**2 * jnp.eye(len(X))).log_prob(y)

    @jax.jit
    def update(theta, state, X, y):
        updates, state = optim.update(jax.grad(loss)(theta, X, y), state)
        return optax.apply_updates(theta, updates), state

    theta = jnp.log(jnp.array([*np.full(D, D**0.5), 1.0, 0.3]))  # as in `model`
    state = optim.init(theta)
    jax.block_until_ready(update(theta, state, X, y))  # compiled, and thrown away
    before = time.process_time()
    for _ in range(steps):
        theta, state = jax.block_until_ready(update(theta, state, X, y))
    seconds = time.process_time() - before
    kernel, noise = prior(theta)
    guide = sgp.AutoSVGP(model, X, init_from=sgp.SparseGPRegression(kernel, X, X, noise).condition(y))
    hypers = {"lengthscale": kernel.lengthscale, "variance": kernel.variance, "noise": noise}
    svi = SVI(model, guide, optax.sgd(0.0), LOSS)
    return guide, svi.get_params(svi.init(jax.random.key(0), X, y, init_params=hypers)), steps, seconds


def runs(data, test, p: dict) -> dict[str, dict]:
    """Every method on one fold."""
    X, table = data[0], {}
    batch = min(p["batch"], len(X))
    order = np.random.default_rng(0).permutation(len(X))

    def note(name, guide, params, steps, seconds, data, test, **more):
        row = {"steps": steps, "seconds": seconds, **judged(guide, params, data, test), **more}
        table[name] = {**row, "nmse": float(row["rmse"] ** 2 / np.var(test[1]))}
        print(f"  {name:<8}", *(f"{key} {value:10.4f}" for key, value in table[name].items()), flush=True)

    guide, run = svdgp(data, p, batch)
    trials = {rate: run(rate, min(TRIAL, p["steps"])) for rate in RATES}
    bounds = {rate: judged(guide, params, data, test)["elbo"] for rate, (params, _) in trials.items()}
    print("  bounds after the trials", bounds, flush=True)
    rate = max(RATES, key=lambda rate: np.nan_to_num(bounds[rate], nan=-np.inf))
    search = sum(spent for _, spent in trials.values())
    params, seconds = run(rate, p["steps"])
    note("SVDGP", guide, params, p["steps"], seconds, data, test, rate=rate, search=search)

    halves = X[order[p["solve"] : 2 * p["solve"]]], X[order[: p["solve"]]]
    options = {"natural": True, "learn_inducing": True}
    for name, guide in (
        ("SVGP", sgp.AutoSVGP(model, X[order[: p["M"]]], **options)),
        ("SOLVE", sgp.AutoDecoupledGP(model, *halves, parametrization="solve", **options)),
    ):

        def scheduled(steps):
            adam = optax.adam(optax.cosine_decay_schedule(0.05, steps))
            return sgp.NaturalGradient(optax.linear_schedule(0.1, 0.02, steps), adam)

        # How many steps fit into the time is found first, since schedules need it.
        _, trial = trained(guide, scheduled(1000), data, batch, 16)
        steps = max(int(seconds / trial * 16), 1)
        params, spent = trained(guide, scheduled(steps), data, batch, steps)
        note(name, guide, params, steps, spent, data, test)

    with jax.enable_x64(True):
        data, test = (tuple(part.astype(np.float64) for part in parts) for parts in (data, test))
        guide, *found = gpr(*(part[order[: p["rows"]]] for part in data), p["exact"])
        note("GPR", guide, *found, data, test)
    return table


def summary(every: dict) -> None:
    """Mean and standard deviation over folds of each quantity."""
    for data, folds in every.items():
        print(f"{data}, {len(folds)} folds")
        for name in next(iter(folds.values())):
            keys = ("nmse", "rmse", "nlpd", "elbo", "steps", "seconds")
            print(f"  {name:<8}", *(f"{key} {spread([fold[name][key] for fold in folds.values()])}" for key in keys))


def main(arguments: argparse.Namespace) -> None:
    """One table for each data set and fold, and their means."""
    p, name = REDUCED if arguments.reduced else FULL, "decoupled_paper"
    if arguments.summary:
        summary(earlier(name, p, arguments.output))
        return
    for path in arguments.data or [None]:
        data_name = "simulated" if path is None else path.stem
        for fold in arguments.folds:
            print(f"{data_name}, fold {fold}")
            found = runs(*problem(path, fold, np.float32), p)
            result = {"settings": p, "dtype": "float32; GPR float64"}
            add_run(name, result, data_name, fold, found, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="small and simulated, to see that everything runs")
    parser.add_argument("--data", type=Path, nargs="*", help="npz files with X, y and test_mask")
    parser.add_argument("--folds", type=int, nargs="*", default=[0])
    parser.add_argument("--summary", action="store_true", help="print means over the folds of an earlier result")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    main(parser.parse_args())
