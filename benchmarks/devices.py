"""Weak scaling: the time of a training step on more and more devices with the same number of rows on each.

With the rows of a batch laid over the devices, the part of a step that grows with the batch (Kuf, its whitening, the
moments, the quadrature, and their gradients) is done for each row on one device; the part that does not (factorising
Kuu and all that is M×M) is done by each device alike. The latter is measured as a step at the smallest batch, one row
for each device, and taken off: what is left is the `batch part`. Its efficiency is the time on one device over that on
n devices, 1 if devices do not hinder each other. The sums of M×M numbers over devices belong to the `fixed part`.

Devices are virtual ones of the CPU, on as many cores. Where there are more of them than cores the efficiency cannot be
more than cores / devices, which is printed beside it, and says nothing about the package. Each number of devices is a
process of its own, because JAX fixes the number when it starts.
"""

import argparse
import functools
import json
import os
from pathlib import Path
import subprocess
import sys
import time

if "--measure" in sys.argv and hasattr(os, "sched_setaffinity"):
    # A core for each device, before XLA looks how many there are: its pool of threads has one for each that it sees.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[sys.argv.index("--measure") + 1])])

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

D = 8
GUIDES = {
    "AutoSVGP, Adam": lambda Z: (sgp.AutoSVGP(model, Z), optax.adam(1e-3)),
    "AutoTSVGP, NaturalGradient": lambda Z: (
        sgp.AutoTSVGP(model, Z),
        sgp.NaturalGradient(0.1, others=optax.adam(1e-3)),
    ),
}


def model(X, y=None, num_data=None):
    lengthscale = numpyro.param("lengthscale", 2.0 * jnp.ones(D), constraint=constraints.positive)
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(lengthscale), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


class Step:
    """A compiled step on a batch that lies on all devices."""

    def __init__(self, guide_name: str, M: int, batch_size: int) -> None:
        rng = np.random.default_rng(0)
        Z = rng.normal(size=(M, D))
        X = rng.normal(size=(batch_size, D))
        y = (np.sin(X.sum(1)) + 0.3 * rng.normal(size=batch_size) > 0).astype(float)
        mesh = Mesh(jax.devices(), ("data",))
        self.batch = jax.device_put((X, y), NamedSharding(mesh, PartitionSpec("data")))
        svi = SVI(model, *GUIDES[guide_name](Z), sgp.QuadratureELBO())
        state = svi.init(jax.random.key(0), X[:100], y[:100], num_data=10 * batch_size)
        self.state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
        update = functools.partial(svi.update, num_data=10 * batch_size)
        self.update = jax.jit(update).lower(self.state, *self.batch).compile()

    def seconds(self, steps: int) -> np.ndarray:
        """Wall and processor time of a step."""
        start = np.array([time.perf_counter(), time.process_time()])
        for _ in range(steps):
            self.state, loss = self.update(self.state, *self.batch)
        loss.block_until_ready()
        return (np.array([time.perf_counter(), time.process_time()]) - start) / steps


def measure(guides: list[str], rows: int, M: int, steps: int, repeats: int) -> None:
    """Print, as JSON, what a step takes on the devices of this process."""
    numpyro.enable_x64()
    found = {}
    for name in guides:
        whole, fixed = Step(name, M, rows * jax.device_count()), Step(name, M, jax.device_count())
        times: list = [(whole.seconds(steps), fixed.seconds(steps)) for _ in range(repeats + 1)][1:]
        # The fastest: on a shared machine the rest is other people's load.
        found[name] = np.min(times, axis=0).tolist()
    print(json.dumps(found))


def on_devices(devices: int, options: list[str]) -> dict:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--measure", str(devices), *options]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reduced", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, default=4096, help="rows on each device")
    parser.add_argument("--inducing", type=int, default=128, help="M")
    parser.add_argument("--guides", nargs="+", choices=GUIDES, default=list(GUIDES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--measure", type=int, help="measure here, where there are so many devices")
    options = parser.parse_args()
    if options.reduced:
        options.devices, options.rows, options.inducing, options.steps, options.repeats = [1, 2], 16, 5, 2, 1
        options.guides = options.guides[:1]
    if options.measure is not None:
        if jax.device_count() != options.measure:
            raise SystemExit(f"There are {jax.device_count()} devices, not {options.measure}.")
        measure(options.guides, options.rows, options.inducing, options.steps, options.repeats)
        return
    from common import report  # it looks at the device, which the measuring processes do themselves

    sizes = {name: getattr(options, name) for name in ("rows", "inducing", "steps", "repeats")}
    arguments = [*(f"--{name}={value}" for name, value in sizes.items()), "--guides", *options.guides]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print(f"{cores} cores; ms a step, wall; efficiency of the batch part, and the most that the cores allow")
    print("guide                        devices   whole   fixed part   batch part   efficiency   cores allow")
    one: dict[str, float] = {}
    results = []
    for devices in options.devices:
        for name, (whole, fixed) in on_devices(devices, arguments).items():
            batch_part = whole[0] - fixed[0]
            efficiency = one.setdefault(name, batch_part) / batch_part
            allowed = min(1.0, cores / devices)
            print(
                f"{name:29s}{devices:7d}{1e3 * whole[0]:8.1f}{1e3 * fixed[0]:13.2f}{1e3 * batch_part:13.1f}"
                f"{efficiency:13.2f}{allowed:14.2f}",
                flush=True,
            )
            entry = {"guide": name, "devices": devices, "efficiency": efficiency, "efficiency_cores_allow": allowed}
            for part, (wall, cpu) in (("whole", whole), ("fixed", fixed)):
                entry[f"{part}_ms"] = {"wall": 1e3 * wall, "cpu": 1e3 * cpu}
            results.append(entry)
    report("devices", {"cores": cores, "D": D, **sizes, "steps_on_devices": results}, options.output)


if __name__ == "__main__":
    main()
