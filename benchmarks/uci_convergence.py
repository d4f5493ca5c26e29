"""Bound and NLPD along EM iterations on small sets: t-SVGP, SVGP by natural gradients, SVGP by Adam.

Figure 3 of Adam et al. (2021), in the setting of the scripts that its authors published (github.com/AaltoML/t-SVGP,
folder `experiments`): all rows in each step, Matérn-5/2 with a lengthscale for each column, Gaussian noise or a probit
link, inducing inputs that are trained from random rows, all else from 1. An iteration is E-steps on q, then M-steps of
Adam on everything else; bound and NLPD of held-out rows are noted after the E-steps. "Adam" has Adam for the E-steps
too, at the rate ρ of the natural ones. This is the schedule "in turn". "At once", which the paper does not have, takes
as many steps for an iteration, each of them on q and on everything else; Adam then has the rate of the M-steps for all.

    python benchmarks/uci_convergence.py --data airfoil.npz diabetes.npz [--folds 0 1 2 3 4] [--output results]
        [--figure curves.png]
    python benchmarks/uci_convergence.py --reduced             # seconds, simulated; what the tests run

Outputs that are integers are two classes. Seconds are of the processor, without compilation and without judging.
Runs that the output folder has are not repeated.
"""

import argparse
from pathlib import Path
import time

from common import data_set, earlier, report, spread
import jax
import jax.numpy as jnp
from jax.scipy.special import log_ndtr
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

# Iterations that are judged; E-steps, M-steps, step size ρ, rate of Adam.
FULL = {
    "M": 50,
    "iterations": [*range(1, 20), *range(20, 101, 5)],
    "regression": [8, 20, 0.8, 0.1],
    "classification": [6, 14, 0.75, 0.2],
}
REDUCED = {"M": 5, "iterations": [1, 2, 3], "regression": [2, 3, 0.8, 0.1], "classification": [2, 3, 0.75, 0.2]}
METHODS = {"t-SVGP": "C0", "natural SVGP": "C3", "Adam": "C2"}  # and colours
SCHEDULES = {"in turn": "-", "at once": ":"}  # and lines
AT = 20  # the paper's scripts end here
CLOSE = 0.01  # nats for each row


def positive(name, value):
    """A parameter with the transformation that the paper's code has."""
    return numpyro.param(name, jnp.asarray(value), constraint=constraints.softplus_positive)


def process(X):
    """The GP site."""
    lengthscale, variance = positive("lengthscale", jnp.ones(X.shape[1])), positive("variance", 1.0)
    return numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.Matern52(lengthscale, variance), X))


def regression(X, y=None):
    """Outputs with Gaussian noise."""
    f, noise = process(X), jnp.sqrt(positive("noise_variance", 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def classification(X, y=None):
    """Two classes, of which the second has probability Φ(f)."""
    f = process(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=log_ndtr(f) - log_ndtr(-f)), obs=y)


def nlpd(q, params, y):
    """Mean negative log predictive density, in closed form."""
    if "noise_variance" in params:
        log_prob = dist.Normal(q.mean, jnp.sqrt(q.variance + params["noise_variance"])).log_prob(y)
    else:
        log_prob = log_ndtr((2.0 * y - 1.0) * q.mean / jnp.sqrt(1.0 + q.variance))
    return -jnp.mean(log_prob)


def phases_of(method: str, schedule: str, model, p: dict) -> list[tuple[SVI, int]]:
    """SVI of an M-phase and of an E-phase, which have the same state, and the number of updates in each."""
    e_steps, m_steps, step_size, rate = p[model.__name__]
    at_once, period, adam = schedule == "at once", e_steps + m_steps, optax.adam(rate)

    def first_rows(kernel, X, rng_key):
        del kernel, rng_key
        return X[: p["M"]]

    if method == "t-SVGP":
        guide = sgp.AutoTSVGP(model, first_rows, learn_inducing=True)
    else:
        guide = sgp.AutoSVGP(model, first_rows, natural=method == "natural SVGP", learn_inducing=True)
    if method != "Adam":
        steps = [(1, 1)] * 2 if at_once else [(0, m_steps), (e_steps, 0)]
        optims = [sgp.NaturalGradient(step_size, adam, e_steps=e, m_steps=m) for e, m in steps]
        numbers = [0, period] if at_once else [1, 1]
    else:
        in_turn = {
            "q": optax.conditionally_mask(optax.adam(step_size), lambda step: step % period < e_steps),
            "rest": optax.conditionally_mask(adam, lambda step: step % period >= e_steps),
        }
        q = ("f_auto_m", "f_auto_S_sqrt")
        label = lambda params: {name: "q" if name in q else "rest" for name in params}  # noqa: E731
        optims = [adam if at_once else optax.multi_transform(in_turn, label)] * 2
        numbers = [0, period] if at_once else [m_steps, e_steps]
    # Three nodes are exact with Gaussian noise.
    loss = sgp.QuadratureELBO(3 if model is regression else 20, bound="titsias")
    return [(SVI(model, guide, optim, loss), number) for optim, number in zip(optims, numbers, strict=True)]


class Programs:
    """What a run needs, compiled: start, M-phase, E-phase, judgement."""

    def __init__(self, method: str, schedule: str, model, p: dict, data: tuple) -> None:
        X, y, *_ = data
        key = jax.random.key(0)
        phases = phases_of(method, schedule, model, p)
        svi = phases[-1][0]
        for each, _ in phases:
            state = jax.eval_shape(each.init, key, X, y)  # (each SVI keeps the constraints that it finds)

        def repeated(svi: SVI, number: int):
            return lambda state, X, y: jax.lax.fori_loop(0, number, lambda _, s: svi.update(s, X, y)[0], state)

        def judge(state, X, y, X_test, y_test):
            params = svi.get_params(state)
            q = svi.guide.posterior(key, params, X_test)["f"]
            return -svi.evaluate(state, X, y), nlpd(q, params, y_test)

        self.natural = method != "Adam"
        self.start = jax.jit(lambda X, y: svi.init(key, X, y)).lower(X, y).compile()
        self.phases = [jax.jit(repeated(*each)).lower(state, X, y).compile() for each in phases]
        self.judge = jax.jit(judge).lower(state, *data).compile()

    def run(self, data: tuple, iterations: list[int]) -> dict:
        """Bound, NLPD and processor seconds after some iterations, and how many steps were refused."""
        X, y, *_ = data
        found: dict = {"rows": len(X), "bound": [], "nlpd": [], "seconds": []}
        state, seconds = jax.block_until_ready(self.start(X, y)), 0.0
        for iteration in range(1, iterations[-1] + 1):
            start = time.process_time()
            for phase in self.phases[0 if iteration > 1 else 1 :]:
                state = phase(state, X, y)
            jax.block_until_ready(state)
            seconds += time.process_time() - start
            if iteration in iterations:
                for name, value in zip(("bound", "nlpd", "seconds"), (*self.judge(state, *data), seconds), strict=True):
                    found[name].append(round(float(value), 4))
        return {**found, "refused": int(sgp.num_refused(state))} if self.natural else found


def problem(path: Path | None, fold: int) -> tuple:
    """The model, and training and test data; training rows are shuffled."""
    if path is None:
        rng = np.random.default_rng(fold)
        X, X_test = rng.normal(size=(2, 30, 2))
        model, y, y_test = regression, np.sin(X[:, 0]), np.sin(X_test[:, 0])
    else:
        with np.load(path) as file:
            model = regression if file["y"].dtype.kind == "f" else classification
        X, y, X_test, y_test = data_set(path, fold)
    order = np.random.default_rng(fold).permutation(len(X))
    return model, tuple(map(jnp.asarray, (X[order], y[order], X_test, y_test)))


def table(runs: dict, iterations: list[int]) -> list[dict]:
    """Of each set, method and schedule: bound and NLPD after `AT` iterations; when the bound is close to the best."""
    rows, at = [], iterations.index(min(AT, iterations[-1]))
    for name, curves in runs.items():
        folds = next(iter(curves.values()))
        best = {fold: max(max(found[fold]["bound"]) for found in curves.values()) for fold in folds}
        for key, found in curves.items():
            schedule, reached = key.split(", ")[1], []
            for fold, one in found.items():
                close = np.flatnonzero(best[fold] - np.array(one["bound"]) <= CLOSE * one["rows"])
                reached.append((iterations[close[0]], one["seconds"][close[0]]) if len(close) else (np.inf, np.inf))
            row: dict = {"data": name, "run": key, "refused": sum(one.get("refused", 0) for one in found.values())}
            for measure, sign in (("bound", 1.0), ("nlpd", -1.0)):
                values = {fold: sign * one[measure][at] for fold, one in found.items()}
                row[measure] = spread([sign * value for value in values.values()])
                # The same schedule, fold by fold.
                for other in METHODS:
                    rival = curves.get(f"{other}, {schedule}", {})
                    ahead = sum(sign * rival[fold][measure][at] < values[fold] for fold in rival)
                    row[f"folds with better {measure} than {other}"] = ahead
            # Medians over folds, None where fewer than half of them come close.
            for measure, value in zip(("iterations", "seconds"), np.median(reached, axis=0), strict=True):
                row[f"median {measure} until close"] = float(value) if np.isfinite(value) else None
            # Between two iterations that are kept, in nats for 100 rows.
            falls = [-100.0 * min(np.diff(one["bound"][at:]), default=0.0) / one["rows"] for one in found.values()]
            row["largest fall of the bound later"] = round(float(max(0.0, *falls)), 1)
            row["folds with a fall of 10"] = sum(bool(fall > 10.0) for fall in falls)
            rows.append(row)
            print(row)
    return rows


def figure(runs: dict, iterations: list[int], path: Path) -> None:
    """Means over folds: a row for each set, negative bound and NLPD against iterations and against seconds."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(
        len(runs), 4, figsize=(10.0, 1.75 * len(runs) + 0.6), layout="constrained", squeeze=False, sharex="col"
    )
    labels = {"bound": "negative bound", "nlpd": "NLPD"}
    for row, (name, curves) in zip(axes, runs.items(), strict=True):
        for ax, (measure, against) in zip(row, ((m, x) for m in labels for x in ("iteration", "CPU s")), strict=True):
            shown = []
            for key, folds in curves.items():
                method, schedule = key.split(", ")
                mean = {k: np.mean([fold[k] for fold in folds.values()], axis=0) for k in (measure, "seconds")}
                y = -mean["bound"] if measure == "bound" else mean["nlpd"]
                x = iterations if against == "iteration" else mean["seconds"]
                ax.semilogx(x, y, SCHEDULES[schedule], color=METHODS[method], linewidth=1.2, label=key)
                shown.append(y)
            low, high = np.min(shown), np.max([y[min(2, len(y) - 1) :] for y in shown[:2]])
            ax.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
            ax.set_title(f"{name}, {labels[measure]}", fontsize=9)
            ax.tick_params(labelsize=8)
            ax.xaxis.set_major_formatter("{x:g}")
    for ax, label in zip(axes[-1], ("iteration", "CPU s") * 2, strict=True):
        ax.set_xlabel(label, fontsize=9)
    axes[0, 0].figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=8)
    plt.savefig(path, dpi=120)
    print(f"figure written to {path}")


def main(arguments: argparse.Namespace) -> None:
    """Every method on every set and fold, the table and the figure."""
    numpyro.enable_x64()
    p = REDUCED if arguments.reduced else FULL
    result: dict = {"settings": p, "runs": earlier("uci_convergence", p, arguments.output)}
    keys = [f"{method}, {schedule}" for schedule in SCHEDULES for method in METHODS]
    if arguments.reduced:
        keys, arguments.folds = keys[::2], [0]
    for path in arguments.data or ([None] if arguments.reduced else []):
        name = "simulated" if path is None else path.stem
        curves = result["runs"].setdefault(name, {})
        for key in keys:
            programs: dict = {}  # by model and shapes, which folds share
            done = curves.setdefault(key, {})
            for fold in arguments.folds:
                if str(fold) in done:
                    continue
                model, data = problem(path, fold)
                shapes = (model, *(each.shape for each in data))
                programs[shapes] = programs.get(shapes) or Programs(*key.split(", "), model, p, data)
                found = done[str(fold)] = programs[shapes].run(data, p["iterations"])
                print(name, key, fold, *(f"{found[k][-1]:.4g}" for k in ("bound", "nlpd", "seconds")), flush=True)
        report("uci_convergence", result, arguments.output)
    result["table"] = table(result["runs"], p["iterations"])
    report("uci_convergence", result, arguments.output)
    if arguments.figure is not None:
        figure(result["runs"], p["iterations"], arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument(
        "--data", type=Path, nargs="*", help="npz files with X, y and, where there are folds, test_mask"
    )
    parser.add_argument("--folds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="file for the figure")
    main(parser.parse_args())
