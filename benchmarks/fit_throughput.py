"""What minibatches, progress and callbacks cost: `fit` against a bare compiled loop over batches already on the device.

Both take the same steps on the same batches. The bare loop is one `lax.scan` of `svi.update` over all batches, gathered
and moved beforehand, which no data larger than the device's memory would allow; `fit` gathers from host memory (or from
a file, `numpy.memmap`) while it runs. Neither time includes compilation. The two alternate, and the fastest of each
counts: on a shared machine the rest is other people's load. Processor time is given beside wall time for the same
reason. With one core (`taskset -c 0`) gathering has no core of its own, which is the worst case.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
import tempfile
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
from numpyro_sgp.fitting import AbstractCallback, FitProgress, fit
from numpyro_sgp.fitting.batches import Batches


def model(X, y=None, num_data=None):
    lengthscale = numpyro.param("lengthscale", jnp.ones(X.shape[1], X.dtype), constraint=dist.constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


GUIDES = {
    "AutoSVGP, Adam": lambda Z: (sgp.AutoSVGP(model, Z), optax.adam(1e-2)),
    "AutoTSVGP, NaturalGradient": lambda Z: (sgp.AutoTSVGP(model, Z), sgp.NaturalGradient(0.1)),
}


def data_set(N: int, D: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, D))
    return X, (np.sin(X.sum(1)) + 0.3 * rng.normal(size=N) > 0).astype(float)


def now() -> np.ndarray:
    """Wall and processor time, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


class Bare:
    """One scan of `svi.update` over batches on the device."""

    def __init__(self, svi: SVI, data: tuple, batch_size: int, num_steps: int) -> None:
        N = len(data[0])
        batches = Batches.of(jax.random.key(0), data, N, batch_size)
        self.batches = jax.device_put(batches.chunk(0, num_steps, num_steps))
        first = jax.tree.map(lambda x: x[0], self.batches)
        # A copy of each leaf, so that all may be donated.
        self.state = jax.tree.map(jnp.copy, svi.init(jax.random.key(0), *first, num_data=N))

        def run(state, batches):
            return jax.lax.scan(lambda state, batch: svi.update(state, *batch, num_data=N), state, batches)

        self.run = jax.jit(run, donate_argnums=0).lower(self.state, self.batches).compile()

    def seconds(self) -> np.ndarray:
        start = now()
        self.state, losses = self.run(self.state, self.batches)
        losses.block_until_ready()
        return now() - start


class Clock(AbstractCallback):
    """Notes the time at multiples of `every` steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.times: list[np.ndarray] = []

    def __call__(self, progress: FitProgress) -> None:
        del progress
        self.times.append(now())

    def begin(self, saved: Mapping[str, np.ndarray] | None) -> None:
        del saved
        self.times = []

    def state(self) -> dict[str, np.ndarray]:
        return {}


def fit_seconds(svi: SVI, data: tuple, batch_size: int, num_steps: int) -> np.ndarray:
    """Wall and processor time of `num_steps` steps of `fit`, after as many for compilation and to find its pace."""
    clock = Clock(num_steps)
    fit(svi, jax.random.key(0), data, batch_size=batch_size, num_steps=2 * num_steps, callback=clock)
    return clock.times[1] - clock.times[0]


def pair(values: np.ndarray) -> str:
    return f"{values[0]:.4f} / {values[1]:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reduced", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    options = parser.parse_args()
    numpyro.enable_x64()
    N, D, repeats = (2000, 8, 1) if options.reduced else (200_000, 8, 4)
    # (M, B, steps): where the loop around the steps costs most, and the usual sizes.
    sizes = [(5, 20, 200)] if options.reduced else [(16, 64, 5000), (64, 256, 1000), (256, 256, 200)]
    data = data_set(N, D)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("X.npy", "y.npy")]
        for file, array in zip(files, data, strict=True):
            np.save(file, array)
        on_disk = tuple(np.load(file, mmap_mode="r") for file in files)
        print("ms a step, and ratios to the bare loop, of wall / processor time")
        print("guide                        M     B   bare loop        fit, memory                  fit, memmap")
        for name, make in GUIDES.items():
            for M, batch_size, num_steps in sizes:
                guide, optim = make(data[0][:M])
                svi = SVI(model, guide, optim, sgp.QuadratureELBO())
                bare = Bare(svi, data, batch_size, num_steps)
                times = {"bare": [], "memory": [], "memmap": []}
                for _ in range(repeats):
                    times["bare"].append(bare.seconds())
                    times["memory"].append(fit_seconds(svi, data, batch_size, num_steps))
                    times["bare"].append(bare.seconds())
                    times["memmap"].append(fit_seconds(svi, on_disk, batch_size, num_steps))
                ms = {kind: 1e3 * np.min(seconds, axis=0) / num_steps for kind, seconds in times.items()}
                ratio = {kind: ms[kind] / ms["bare"] for kind in ("memory", "memmap")}
                row = f"{name:27s}{M:4d}{batch_size:6d}   {pair(ms['bare'])}"
                print(row, *(f"   {pair(ms[kind])}  {pair(ratio[kind])}" for kind in ratio), flush=True)
                entry = {"guide": name, "M": M, "B": batch_size, "steps": num_steps}
                for quantity, values in (("ms", ms), ("ratio", ratio)):
                    entry[quantity] = {kind: {"wall": value[0], "cpu": value[1]} for kind, value in values.items()}
                results.append(entry)
    report("fit_throughput", {"N": N, "D": D, "steps": results}, options.output)


if __name__ == "__main__":
    main()
