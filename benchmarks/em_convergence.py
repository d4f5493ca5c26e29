"""How fast does EM converge with each form of the sites?

Binary classification; E-steps are natural steps on the sites, M-steps are Adam on lengthscales, variance and (where
trained) inducing inputs. Compared: sites kept for each datum; their sums ("tied"); and natural-gradient
whitened SVGP, which keeps q(v).

    python benchmarks/em_convergence.py                        # banana, full batch
    python benchmarks/em_convergence.py --data magic.npz       # and 5000 rows of a larger set, also by minibatches
    python benchmarks/em_convergence.py --reduced              # seconds; what the tests run
"""

import argparse
from pathlib import Path

from common import banana, data_set, report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

SCHEDULES = {  # e_steps, m_steps, step size ρ, learning rate of Adam
    "#E=4 #M=4 ρ=0.7 lr=0.1": (4, 4, 0.7, 0.1),
    "#E=1 #M=15 ρ=1 lr=0.1": (1, 15, 1.0, 0.1),
    "#E=1 #M=1 ρ=0.5 lr=0.05": (1, 1, 0.5, 0.05),
}


def model(X, y=None, num_data=None):
    """Bernoulli outcomes of a GP with a squared-exponential kernel; hyperparameters by type-II maximum likelihood."""
    lengthscale = numpyro.param("lengthscale", jnp.ones(X.shape[1]), constraint=constraints.positive)
    variance = numpyro.param("variance", 1.0, constraint=constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale, variance), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def guides(Z: np.ndarray, learn_inducing: bool) -> dict[str, sgp.AutoSVGP | sgp.AutoTSVGP]:
    """The forms compared."""
    options = {"learn_inducing": learn_inducing}
    return {
        "per datum": sgp.AutoTSVGP(model, Z, sites="per_datum", **options),
        "tied": sgp.AutoTSVGP(model, Z, **options),
        "whitened SVGP": sgp.AutoSVGP(model, Z, natural=True, **options),
    }


def full_batch(guide, schedule: tuple, X, y, iterations: int) -> list[float]:
    """The bound before each EM iteration, and after the last."""
    e_steps, m_steps, step_size, rate = schedule
    optim = sgp.NaturalGradient(step_size, optax.adam(rate), e_steps=e_steps, m_steps=m_steps)
    svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    state = jax.jit(svi.init)(jax.random.key(0), X, y)
    update, bounds = jax.jit(svi.update), []
    for _ in range(iterations + 1):
        state, loss = update(state, X, y)
        bounds.append(-float(loss))
    return bounds


def minibatches(guide, X, y, steps: int, batch: int, step_size: float, every: int) -> list[float]:
    """The full bound after every few minibatch steps of one natural and one Adam step each."""
    svi = SVI(model, guide, sgp.NaturalGradient(step_size, optax.adam(0.01)), sgp.QuadratureELBO())
    N = len(X)
    state = svi.init(jax.random.key(0), X[:batch], y[:batch], num_data=N)

    @jax.jit
    def run(state, X, y, indices):
        return jax.lax.scan(lambda s, i: svi.update(s, X[i], y[i], num_data=N), state, indices)[0]

    # Sites from minibatches are sums over all data, so the bound on the whole set is a plain evaluation.
    evaluate = jax.jit(lambda state, X, y: svi.evaluate(state, X, y, num_data=N))
    rng = np.random.default_rng(0)
    bounds = []
    for _ in range(steps // every):
        indices = np.stack([rng.choice(N, batch, replace=False) for _ in range(every)])
        state = run(state, X, y, indices)
        bounds.append(-float(evaluate(state, X, y)))
    return bounds


def table(rows: dict[str, dict[str, list[float]]], at: tuple[int, ...]) -> None:
    """Bounds after a few numbers of iterations, one row a schedule."""
    for setting, curves in rows.items():
        print(setting)
        for name, bounds in curves.items():
            values = " / ".join(f"{bounds[min(i, len(bounds) - 1)]:10.2f}" for i in at)
            print(f"    {name:18s} {values}")


STYLES = {"per datum": "C0-", "tied": "C1--", "whitened SVGP": "C3-."}


def figure(result: dict, path: Path) -> None:
    """Distance to the best bound of each panel, against iterations: a row for Z fixed, a row for Z trained."""
    import matplotlib.pyplot as plt

    panels = [("banana", key, curves, "EM iteration", 0) for key, curves in result["banana"].items()]
    large = result.get("large")
    if large:
        panels += [(large["name"], key, curves, "EM iteration", 0) for key, curves in large["full"].items()]
        label = f"minibatch steps / {large['every']}"
        panels += [(large["name"], key, curves, label, 1) for key, curves in large["minibatch"].items()]
    rows = [[p for p in panels if p[1].startswith(setting)] for setting in ("Z fixed", "Z trained")]
    rows = [row for row in rows if row]
    columns = max(map(len, rows))
    _, axes = plt.subplots(
        len(rows), columns, figsize=(2.4 * columns, 2.5 * len(rows)), layout="constrained", squeeze=False
    )
    for ax, (name, setting, curves, label, start) in zip(axes.flat, (p for row in rows for p in row), strict=True):
        best = max(max(bounds) for bounds in curves.values())
        for form, bounds in curves.items():
            x = np.arange(start, start + len(bounds))
            ax.semilogy(x, np.maximum(best - np.array(bounds), 1e-3), STYLES[form], label=form)
        ax.set_title(f"{name}, {setting.replace(', ', chr(10), 1)}", fontsize=9)
        ax.set_xlabel(label)
    for ax in axes[:, 0]:
        ax.set_ylabel("nats below the best")
    axes.flat[0].legend(fontsize=8, frameon=False)
    plt.savefig(path, dpi=120)
    print(f"figure written to {path}")


def main(arguments: argparse.Namespace) -> None:
    """Run the comparison."""
    jax.config.update("jax_enable_x64", True)
    X, y = banana()
    iterations, M = (3, 10) if arguments.reduced else (60, 50)
    if arguments.reduced:
        X, y = X[::8], y[::8]
    Z = X[np.random.default_rng(0).choice(len(X), M, replace=False)]
    result: dict = {"banana": {}}
    schedules = dict(list(SCHEDULES.items())[-1:]) if arguments.reduced else SCHEDULES
    for learn in (True,) if arguments.reduced else (False, True):
        for label, schedule in schedules.items():
            curves = {name: full_batch(g, schedule, X, y, iterations) for name, g in guides(Z, learn).items()}
            result["banana"][f"Z {'trained' if learn else 'fixed'}, {label}"] = curves
    print(f"banana, N={len(X)}, M={M}: bound after 8 / 16 / 60 EM iterations")
    table(result["banana"], (8, 16, 60))
    if arguments.data is not None:
        X, y, _, _ = data_set(arguments.data)
        M, every = 100, 50
        rows = np.random.default_rng(1).permutation(len(X))[: arguments.rows]
        X, y = X[rows], y[rows]
        Z = X[np.random.default_rng(0).choice(len(X), M, replace=False)]
        large: dict = {"name": arguments.data.stem, "every": every, "full": {}, "minibatch": {}}
        for learn in (False, True):
            setting = f"Z {'trained' if learn else 'fixed'}"
            for label in ("#E=4 #M=4 ρ=0.7 lr=0.1",):
                large["full"][f"{setting}, {label}"] = {
                    name: full_batch(g, SCHEDULES[label], X, y, 15) for name, g in guides(Z, learn).items()
                }
            for step_size in (0.1,):
                large["minibatch"][f"{setting}, B=256 ρ={step_size} lr=0.01"] = {
                    name: minibatches(g, X, y, 1000, 256, step_size, every)
                    for name, g in guides(Z, learn).items()
                    if name != "per datum"
                }
        result["large"] = large
        print(f"{large['name']}, N={len(X)}, M={M}, full batch: bound after 4 / 8 / 15 EM iterations")
        table(large["full"], (4, 8, 15))
        print(f"{large['name']}, minibatches: full bound after 250 / 500 / 1000 steps")
        table(large["minibatch"], (4, 9, 19))
    report("em_convergence", result, arguments.output)
    if arguments.figure is not None:
        figure(result, arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--data", type=Path, help="an .npz with X, y in {0, 1} and test_mask")
    parser.add_argument("--rows", type=int, default=5000, help="rows of the larger set to use")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="where to write the figure")
    main(parser.parse_args())
