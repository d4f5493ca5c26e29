"""Decoupled posteriors beside SVGP at equal time: regression on minibatches, RMSE, NLPD and the bound.

A squared-exponential kernel with a lengthscale for each column and Gaussian noise, both trained, as are the inducing
inputs of the covariance; the data are scaled to unit standard deviation. SVGP takes natural-gradient and Adam steps for
a number of steps; the CPU time that it takes, from the first compiled step on, is what every other posterior gets:
`SVGP, longer` the same again, `SOLVE` two Gaussian blocks of fewer inducing inputs each, `orthogonal` four times as
many inputs in the mean, all of them trained from the start for twice that time. `SVGP, then DualAscent` freezes the
SVGP and refines its mean over all training inputs; `..., in turn` does that for half of the time, then takes natural
steps on the covariance block and trains the noise with that mean, and refines again.

    python benchmarks/decoupled_quality.py --data kin40k.npz bike.npz [--folds 0 1] [--inducing 512] [--steps 800]
        [--refined-only] [--output results]

Runs are added to those that the output folder has already, and what is trained from the start there is not trained
again. `time` is in units of the SVGP's own seconds, in the same process. `--summary` prints means and standard
deviations over the folds.
"""

import argparse
from pathlib import Path
import time

from common import add_run, data_set, earlier, spread
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

FULL = {"M": 512, "batch": 512, "steps": 800, "solve": 320, "mean": 2048, "dtype": np.float32}
FULL["joint"] = ["SVGP, longer", "SOLVE", "orthogonal"]  # trained as a whole, from the start, in the same time
REDUCED = {"M": 16, "batch": 64, "steps": 10, "solve": 10, "mean": 40, "dtype": np.float32, "joint": ["orthogonal"]}


def model(X, y=None, num_data=None):
    """Gaussian regression with trained hyperparameters."""
    D = X.shape[1]
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", jnp.full(D, D**0.5, X.dtype), constraint=positive)
    variance = numpyro.param("variance", jnp.asarray(1.0, X.dtype), constraint=positive)
    noise = numpyro.param("noise", jnp.asarray(0.3, X.dtype), constraint=positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale, variance), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


class Clock:
    """CPU seconds, without compilation and without judging."""

    def __init__(self) -> None:
        self.spent = 0.0

    def run(self, svi, state, data, batch: int, seconds: float | None, steps: int | None, key: int) -> tuple:
        """Steps on shuffled minibatches, until the seconds or the steps are over: state, steps, seconds."""
        X, y = data
        N = len(X)
        update = jax.jit(lambda state, X, y: svi.update(state, X, y, num_data=N))
        jax.block_until_ready(update(state, X[:batch], y[:batch]))  # compiled, and thrown away
        rng, order, at, taken = np.random.default_rng(key), np.arange(0), 0, 0
        before = time.process_time()
        while (taken < steps) if steps is not None else (time.process_time() - before < seconds):
            if at + batch > len(order):
                order, at = rng.permutation(N), 0
            rows = order[at : at + batch]
            at += batch
            state, loss = update(state, X[rows], y[rows])
            taken += 1
            if taken % 8 == 0 or steps is None:
                jax.block_until_ready(loss)
        jax.block_until_ready(state)
        self.spent = time.process_time() - before
        return state, taken, self.spent


def judged(guide, params, data, test) -> dict[str, float]:
    """The bound on all training data, and RMSE and negative log predictive density on the test data."""
    process = sgp.process_posterior(guide, jax.random.key(0), params, data[0][:10], data[1][:10])["f"]
    marginals = jax.jit(lambda process, X: (process.posterior(X).mean, process.posterior(X).variance))

    def at(X):
        parts = [marginals(process, rows) for rows in np.array_split(X, -(-len(X) // 2000))]
        return (np.concatenate([np.asarray(part[i], float) for part in parts]) for i in range(2))

    noise = float(params["noise"])
    mean, variance = at(data[0])
    ell = -0.5 * np.sum(np.log(2 * np.pi * noise**2) + ((data[1] - mean) ** 2 + variance) / noise**2)
    mean, variance = at(test[0])
    error, variance = test[1] - mean, variance + noise**2
    return {
        "elbo": float(ell - np.sum(process.kl)),
        "rmse": float(np.sqrt(np.mean(error**2))),
        "nlpd": float(np.mean(0.5 * (np.log(2 * np.pi * variance) + error**2 / variance))),
    }


def runs(data, test, p: dict, before: dict[str, dict]) -> dict[str, dict]:
    """Every posterior on one fold; those of `before` that are trained from the start are taken from there."""
    X, y = data
    N, batch = len(X), min(p["batch"], len(X))
    order = np.random.default_rng(0).permutation(N)
    Z, clock, table = X[order[: p["M"]]], Clock(), {}
    loss = sgp.QuadratureELBO(num_nodes=3)  # the Gaussian's logarithm is a quadratic in f: three nodes are exact

    def started(guide, optim, init_params=None):
        svi = SVI(model, guide, optim, loss)
        return svi, svi.init(jax.random.key(0), X[:batch], y[:batch], num_data=N, init_params=init_params)

    def scheduled(steps, rho=(0.1, 0.02), rate=0.05):
        return sgp.NaturalGradient(
            optax.linear_schedule(*rho, steps), optax.adam(optax.cosine_decay_schedule(rate, steps))
        )

    def note(name, guide, params, steps, seconds):
        first = table["SVGP"]["seconds"] if table else seconds
        spent = {"steps": steps, "seconds": seconds, "time": seconds / first}
        table[name] = {**spent, **judged(guide, params, data, test)}
        print(f"  {name:<28}", *(f"{key} {value:10.4f}" for key, value in table[name].items()), flush=True)

    svgp = sgp.AutoSVGP(model, Z, natural=True, learn_inducing=True)
    svi, state = started(svgp, scheduled(p["steps"]))
    state, steps, seconds = clock.run(svi, state, data, batch, None, p["steps"], 0)
    fitted = svi.get_params(state)
    note("SVGP", svgp, fitted, steps, seconds)

    def jointly(name, guide):
        # How many steps fit into the time is found first, since schedules need it.
        svi, state = started(guide, scheduled(1000))
        _, _, trial = clock.run(svi, state, data, batch, None, 8, 1)
        steps = max(int(2.0 * seconds / (trial / 8)), 1)
        svi, state = started(guide, scheduled(steps))
        state, steps, spent = clock.run(svi, state, data, batch, None, steps, 0)
        note(name, guide, svi.get_params(state), steps, spent)

    some = order[p["M"] : p["M"] + p["mean"]]
    options = {"natural": True, "learn_inducing": True}
    halves = X[order[p["solve"] : 2 * p["solve"]]], X[order[: p["solve"]]]
    joint = {
        "SVGP, longer": svgp,
        "SOLVE": sgp.AutoDecoupledGP(model, *halves, parametrization="solve", **options),
        "orthogonal": sgp.AutoDecoupledGP(model, X[some], Z, kl_rows=batch, **options),
    }
    for name in p["joint"]:
        if name in before:
            table[name] = before[name]
        else:
            jointly(name, joint[name])

    guide = sgp.AutoDecoupledGP(model, X, fitted["f_auto_inducing"], natural=True, kl_rows=batch)
    svi, state = started(guide, optax.sgd(0.0), fitted)
    params = svi.get_params(state)
    curvature = float(fitted["noise"]) ** -2
    size = guide.dual_step_size(jax.random.key(0), params, X[order[:2000]], batch_size=batch, curvature=curvature)["f"]
    dual = sgp.DualAscent(size)
    svi, state = started(guide, dual, params)
    state, steps, spent = clock.run(svi, state, data, batch, seconds, None, 2)
    note("SVGP, then DualAscent", guide, svi.get_params(state), p["steps"] + steps, seconds + spent)

    # Half of the time again for the mean, and for the covariance and the noise with that mean, in turn.
    svi, state = started(guide, dual, params)
    state, steps, spent = clock.run(svi, state, data, batch, 0.5 * seconds, None, 2)
    params, taken = svi.get_params(state), p["steps"] + steps
    noise = optax.multi_transform(
        {"noise": optax.adam(0.05), "kept": optax.set_to_zero()},
        lambda params: {name: "noise" if name == "noise" else "kept" for name in params},
    )
    svi, state = started(guide, sgp.NaturalGradient(optax.linear_schedule(0.1, 0.02, 60), noise), params)
    state, steps, more = clock.run(svi, state, data, batch, 0.15 * seconds, None, 3)
    params = svi.get_params(state)
    # Less noise, more curvature.
    smaller = size * min(float(params["noise"] / fitted["noise"]) ** 2, 1.0)
    svi, state = started(guide, sgp.DualAscent(smaller), params)
    state, others, last = clock.run(svi, state, data, batch, 0.35 * seconds, None, 4)
    note("..., in turn", guide, svi.get_params(state), taken + steps + others, seconds + spent + more + last)
    table["..., in turn"]["dual step size"] = size
    return table


def problem(path: Path | None, fold: int, dtype) -> tuple:
    """Training and test data."""
    if path is None:
        rng = np.random.default_rng(fold)
        X = rng.uniform(-2.0, 2.0, size=(500, 3))
        y = np.sin(2.0 * X).sum(1) + 0.1 * rng.normal(size=len(X))
        parts = X[:400], y[:400], X[400:], y[400:]
    else:
        parts = data_set(path, fold)
    X, y, X_test, y_test = (part.astype(dtype) for part in parts)
    return (X, y), (X_test, y_test)


def summary(every: dict) -> None:
    """Mean and standard deviation over folds of each quantity."""
    for data, folds in every.items():
        names = next(iter(folds.values()))
        print(f"{data}, {len(folds)} folds")
        for name in names:
            cells = []
            for key in ("rmse", "nlpd", "elbo", "time"):
                cells.append(f"{key} {spread([fold[name][key] for fold in folds.values()])}")
            print(f"  {name:<28}", *cells)


def main(arguments: argparse.Namespace) -> None:
    """One table for each data set and fold, and their means."""
    p = REDUCED if arguments.reduced else FULL
    if arguments.inducing is not None:
        M = arguments.inducing
        p = {**p, "M": M, "solve": 5 * M // 8, "mean": 4 * M}
    if arguments.steps is not None:
        p = {**p, "steps": arguments.steps}
    if arguments.refined_only:
        p = {**p, "joint": []}
    settings = {key: value for key, value in p.items() if key != "dtype"}
    result = {"settings": settings, "dtype": "float32"}
    file_name = "decoupled_quality" if arguments.inducing is None else f"decoupled_quality_{arguments.inducing}"
    if arguments.steps is not None:
        file_name += f"_{arguments.steps}_steps"
    if arguments.summary:
        summary(earlier(file_name, settings, arguments.output))
        return
    for path in arguments.data or [None]:
        name = "simulated" if path is None else path.stem
        for fold in arguments.folds:
            print(f"{name}, fold {fold}")
            data, test = problem(path, fold, p["dtype"])
            before = earlier(file_name, settings, arguments.output)
            found = runs(data, test, p, before.get(name, {}).get(str(fold), {}))
            add_run(file_name, result, name, fold, found, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="small and simulated, to see that everything runs")
    parser.add_argument("--data", type=Path, nargs="*", help="npz files with X, y and test_mask")
    parser.add_argument("--folds", type=int, nargs="*", default=[0])
    parser.add_argument("--inducing", type=int, help="M, with 5M/8 twice for SOLVE and 4M for the mean; 512")
    parser.add_argument("--steps", type=int, help="of the SVGP; 800")
    parser.add_argument("--refined-only", action="store_true", help="leave out what is trained from the start")
    parser.add_argument("--summary", action="store_true", help="print means over the folds of an earlier result")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    main(parser.parse_args())
