"""What comes before the first step: import, initialisation, and compilation of the quickstart's fit.

Each repetition is a fresh process without a compile cache, on all cores that it is allowed; the smallest wall time of
each part counts, with the processor time of the same process beside it. `svi.init` is called as it is, and in other
processes as one program, by `jax.jit`. Others fit the same model in NumPyro alone: f by the Cholesky root of its
covariance at all years, `AutoNormal`, `Trace_ELBO` and Adam. Programs are those given to XLA, traces the runs of the
model to find out what it computes. `--sgp-path` times another source tree of the package, to compare two versions.

    python benchmarks/startup.py [--repeats 3] [--output results]
"""

import argparse
import json
import os
from pathlib import Path
import subprocess
import sys
import time

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart.py"
KINDS = ("eager", "compiled", "numpyro")


class Laps:
    """Wall and processor seconds of one part after the other."""

    def __init__(self) -> None:
        self.parts: dict[str, dict] = {}
        self.start()

    def start(self) -> None:
        self.last = time.perf_counter(), time.process_time()

    def note(self, part: str, **more) -> None:
        wall, cpu = time.perf_counter() - self.last[0], time.process_time() - self.last[1]
        self.parts[part] = {"wall": wall, "cpu": cpu, **more}
        self.start()


def dense_model(X, y=None):
    """That of the quickstart in NumPyro alone."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.log(20.0), 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
    r = jnp.sqrt(5.0) * jnp.abs(X - X.T) / lengthscale
    K = variance * (1.0 + r + r**2 / 3.0) * jnp.exp(-r) + 1.0
    v = numpyro.sample("v", dist.Normal().expand([len(X)]).to_event(1))
    f = jnp.linalg.cholesky(K + 1e-5 * jnp.eye(len(X))) @ v
    with numpyro.plate("years", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def child(num_steps: int, kind: str) -> None:
    """One fit, by `svi.init` as it is, as one program ("compiled"), or in NumPyro alone ("numpyro"); prints JSON."""
    laps = Laps()
    import numpyro  # noqa: F401
    import optax

    laps.note("import numpyro, optax")
    import numpyro_sgp as sgp

    laps.note("import numpyro_sgp")
    import importlib.util

    import jax
    import numpy as np
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    # ArviZ and matplotlib, which the example imports, are no part of a fit.
    specification = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    quickstart = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(quickstart)
    counts = {"programs": 0, "traces": 0}

    def count(event: str, seconds: float, **_) -> None:
        del seconds
        counts["programs"] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(count)

    def model(X, y=None):
        counts["traces"] += 1
        (dense_model if kind == "numpyro" else quickstart.model)(X, y)

    def taken() -> dict[str, int]:
        now = dict(counts)
        counts.update(programs=0, traces=0)
        return now

    X, y = quickstart.yearly_counts()
    Z = np.linspace(X.min(), X.max(), 25)[:, None]
    laps.start()
    if kind == "numpyro":
        svi = SVI(model, AutoNormal(model), optax.adam(1e-2), Trace_ELBO())
    else:
        guide = sgp.AutoTSVGP(model, inducing=Z)
        optim = sgp.NaturalGradient(step_size=0.5, others=optax.adam(1e-2))
        svi = SVI(model, guide, optim, sgp.QuadratureELBO())
    init = jax.jit(svi.init) if kind == "compiled" else svi.init
    state = init(jax.random.key(0), X, y)
    laps.note("jax.jit(svi.init)" if kind == "compiled" else "svi.init", **taken())
    traced = jax.jit(svi.update).trace(state, X, y)
    laps.note("step: trace", **taken())
    lowered = traced.lower()
    laps.note("step: lower")
    taken()
    step = lowered.compile()
    laps.note("step: compile", **taken())
    jax.block_until_ready(step(state, X, y))
    laps.note("step: run")
    parts = [name for name in laps.parts if not name.startswith("import")]
    first = {key: sum(laps.parts[name][key] for name in parts) for key in ("wall", "cpu")}
    laps.parts["first step in all, with jax.jit(svi.init)" if kind == "compiled" else "first step in all"] = first
    if kind == "eager":
        # As a user calls it, in the same process: `init` finds its small programs compiled, the loop does not.
        laps.start()
        result = svi.run(jax.random.key(0), num_steps, X, y, progress_bar=False)
        jax.block_until_ready(result.losses)
        laps.note(f"svi.run of {num_steps} steps, after that")
    if kind == "numpyro":
        of_fit = [*parts, "first step in all"]
        laps.parts = {f"NumPyro alone: {name}": laps.parts[name] for name in of_fit}
    print(json.dumps(laps.parts))


def main(arguments: argparse.Namespace) -> None:
    """The smallest of several repetitions of each part."""
    from common import report

    num_steps, repeats = (20, 1) if arguments.reduced else (1500, arguments.repeats)
    environment = dict(os.environ)
    if not arguments.reduced:
        environment = {key: value for key, value in environment.items() if "COMPILATION_CACHE" not in key}
    if arguments.sgp_path:
        environment["PYTHONPATH"] = str(arguments.sgp_path)
    command = [sys.executable, __file__, "--steps", str(num_steps), "--child"]
    found: dict[str, list] = {}
    for _ in range(repeats):
        for kind in KINDS:
            result = subprocess.run([*command, kind], capture_output=True, text=True, env=environment, check=False)
            if result.returncode:
                raise RuntimeError(f"a fit failed:\n{result.stderr}")
            for part, values in json.loads(result.stdout.splitlines()[-1]).items():
                found.setdefault(part, []).append(values)
    smallest = {part: min(values, key=lambda values: values["wall"]) for part, values in found.items()}
    for part, values in smallest.items():
        counts = "".join(f"  {values[key]:4d} {key}" for key in ("programs", "traces") if values.get(key))
        print(f"{part:56s} {values['wall']:6.2f} s wall {values['cpu']:6.2f} s CPU{counts}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    settings = {"repeats": repeats, "cores": cores, "load": os.getloadavg()[0]}
    report("startup", {**settings, "parts": smallest}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sgp-path", type=Path, help="a source tree to import numpyro_sgp from")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.steps, options.child)
    else:
        main(options)
