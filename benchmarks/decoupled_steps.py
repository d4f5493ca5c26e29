"""CPU time of a step of a decoupled posterior against the size of its mean basis: a straight line.

Squared-exponential kernel, Bernoulli likelihood, D = 8, M_β = 128, batches of 256, the divergence of the mean from 256
sampled rows. Each size is timed for `NaturalGradient` on the covariance with Adam on the coefficients, and for
`DualAscent`, whose basis is the data. The exponent is the slope of a line through the last three sizes in logarithms.

    python benchmarks/decoupled_steps.py [--reduced] [--output results] [--figure decoupled_steps.png]
"""

import argparse
from pathlib import Path
import time

from common import report
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

D, BATCH = 8, 256


def model(X, y=None, num_data=None):
    """Bernoulli outcomes with a latent function of D inputs."""
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(jnp.full(D, 2.0)), X))
    with numpyro.plate("data", num_data, subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


OPTIMIZERS = {
    "NaturalGradient, sampled rows": lambda: sgp.NaturalGradient(0.1, optax.adam(1e-2)),
    "DualAscent": lambda: sgp.DualAscent(1e-3),
}


def milliseconds(name: str, M_gamma: int, M_beta: int, repeats: int) -> float:
    """CPU milliseconds of a step: the least of several repeats."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(M_gamma, D))
    y = (rng.uniform(size=M_gamma) < 0.5).astype(float)
    guide = sgp.AutoDecoupledGP(model, X, X[:M_beta], natural=True, kl_rows=BATCH)
    svi = SVI(model, guide, OPTIMIZERS[name](), sgp.QuadratureELBO())
    batch = (jnp.asarray(X[:BATCH]), jnp.asarray(y[:BATCH]))
    state = svi.init(jax.random.key(0), *batch, num_data=M_gamma)
    update = jax.jit(svi.update, static_argnames="num_data")
    state, _ = update(state, *batch, num_data=M_gamma)
    times = []
    for _ in range(repeats):
        jax.block_until_ready(state)
        before = time.process_time()
        state, loss = update(state, *batch, num_data=M_gamma)
        jax.block_until_ready(loss)
        times.append(time.process_time() - before)
    return 1e3 * min(times)


def figure(result: dict, path: Path) -> None:
    """Milliseconds against the size of the mean basis."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panel, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, row in result["steps"].items():
        ax.loglog(result["sizes"], row["milliseconds"], "o-", label=f"{name}: exponent {row['exponent']:.2f}")
    sizes = np.asarray(result["sizes"][-2:], float)
    top = max(row["milliseconds"][-1] for row in result["steps"].values())
    ax.loglog(sizes, 1.6 * top * sizes / sizes[-1], color="0.6", linestyle="--", label="linear")
    ax.set(xlabel="size of the mean basis", ylabel="CPU milliseconds a step")
    ax.legend(frameon=False)
    panel.savefig(path, dpi=110)
    print(f"figure written to {path}")


def main(arguments: argparse.Namespace) -> None:
    """The table, and the figure where one is wanted."""
    numpyro.enable_x64()
    sizes, M_beta, repeats = [1000, 3000, 10_000, 30_000, 100_000], 128, 12
    if arguments.reduced:
        sizes, M_beta, repeats = [500, 1000], 16, 3
    result = {"sizes": sizes, "M_beta": M_beta, "batch": BATCH, "steps": {}}
    for name in OPTIMIZERS:
        times = [milliseconds(name, size, M_beta, repeats) for size in sizes]
        exponent = float(np.polyfit(np.log(sizes[-3:]), np.log(times[-3:]), 1)[0])
        result["steps"][name] = {"milliseconds": times, "exponent": exponent}
        print(f"{name}: exponent {exponent:.2f}")
        for size, value in zip(sizes, times, strict=True):
            print(f"  {size:>7}: {value:8.2f} ms")
    report("decoupled_steps", result, arguments.output)
    if arguments.figure is not None:
        figure(result, arguments.figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--figure", type=Path, help="file for the figure")
    main(parser.parse_args())
