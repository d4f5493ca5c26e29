"""Run by test_devices.py in processes of their own: the number of devices is fixed when JAX starts."""

import argparse
import functools
import json
from pathlib import Path
import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
import optax

import numpyro_sgp as sgp

N, BATCH, M, D, R = 83, 16, 5, 2, 6
STEPS = 12
KEY = jax.random.key
RNG = np.random.default_rng(0)
X = RNG.uniform(-1.5, 1.5, (N, D))
Y = (np.sin(2.0 * X[:, 0]) + X[:, 1] + RNG.logistic(size=N) > 0).astype(float)
Z = RNG.uniform(-1.2, 1.2, (M, D))
HELD_OUT = X[:20] + 0.1, Y[:20]


def model(X, y=None, num_data=None, rank=None):
    lengthscale = numpyro.param("lengthscale", np.array([0.8, 1.1]), constraint=constraints.positive)
    kernel = sgp.kernels.SquaredExponential(lengthscale)
    if rank is not None:
        kernel = sgp.features.RandomFourier(kernel, rank, KEY(0))
    f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def with_intercept(X, y=None, num_data=None):
    intercept = numpyro.sample("intercept", dist.Normal())
    f = numpyro.sample("f", sgp.GaussianProcess(sgp.kernels.SquaredExponential(0.9), X))
    with numpyro.plate("data", num_data or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f + intercept), obs=y)


def natural():
    return sgp.NaturalGradient(0.3, others=optax.adam(1e-2))


weights = functools.partial(model, rank=R)

GUIDES = {
    "whitened": lambda: (model, sgp.AutoSVGP(model, Z), optax.adam(1e-2)),
    "natural": lambda: (model, sgp.AutoSVGP(model, Z, natural=True), natural()),
    "tied": lambda: (model, sgp.AutoTSVGP(model, Z, learn_inducing=True), natural()),
    "joint": lambda: (with_intercept, sgp.AutoTSVGP(with_intercept, Z), natural()),
    "held": lambda: (weights, sgp.AutoWeightSpaceGP(weights, refresh=2), natural()),
}


def make_svi(guide_name):
    return SVI(*GUIDES[guide_name](), sgp.QuadratureELBO())


def flat(losses, params):
    """The losses and parameters of a run as a dict of arrays, for `numpy.savez`."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {"losses": np.asarray(losses), **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}}


def run_fit(guide_name, **options):
    arguments = {"batch_size": BATCH, "num_steps": STEPS, "progress_bar": False, **options}
    return sgp.fit(make_svi(guide_name), KEY(1), arguments.pop("data", (X, Y)), **arguments)


def rows_on(devices, names=("data",), shape=(-1,)):
    mesh = Mesh(np.reshape(devices, shape), names)
    return NamedSharding(mesh, PartitionSpec(names[0]))


def run_update(guide_name, sharding=None):
    """A few `svi.update` on one batch; and the compiled text of one."""
    svi = make_svi(guide_name)
    batch = X[:BATCH], Y[:BATCH]
    state = svi.init(KEY(1), *batch, num_data=N)
    if sharding is not None:
        batch = jax.device_put(batch, sharding)
    update = jax.jit(functools.partial(svi.update, num_data=N)).lower(state, *batch).compile()
    losses = []
    for _ in range(4):
        state, loss = update(state, *batch)
        losses.append(loss)
    return flat(losses, svi.get_params(state)), update.as_text()


def collectives(text):
    """(kind, shapes) of each operation between devices in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
    found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
    return [(kind, re.findall(r"\w+\[[\d,]*\]", result)) for result, kind in found]


class Interruption(sgp.AbstractCallback):
    every = 7

    def __call__(self, progress):
        raise KeyboardInterrupt(progress.step)

    def begin(self, saved):
        pass

    def state(self):
        return {}


def interrupted(guide_name, folder, **options):
    """A run that ends at step 7, and the steps of the checkpoints it leaves."""
    checkpoint = sgp.Checkpoint(folder, every=5)
    try:
        run_fit(guide_name, checkpoint=checkpoint, callback=Interruption(), **options)
    except KeyboardInterrupt:
        return list(checkpoint.files())
    raise RuntimeError


def save(path, result):
    np.savez(path, **flat(result.losses, result.params))


def many_devices(folder):
    """One process, eight devices."""
    sharding = rows_on(jax.devices())
    report = {"devices": jax.device_count(), "collectives": {}}
    for name in ("tied", "joint", "held"):
        one, _ = run_update(name)
        many, text = run_update(name, sharding)
        report["collectives"][name] = collectives(text)
        np.savez(folder / f"update_{name}_one.npz", **one)
        np.savez(folder / f"update_{name}_many.npz", **many)
    # Four shards, each on two devices, of a mesh as `jax.make_mesh` makes it.
    grid = NamedSharding(jax.make_mesh((4, 2), ("data", "model")), PartitionSpec("data"))
    all_rows = {"data": (X[:80], Y[:80]), "batch_size": 80}
    save(folder / "fit_tied_one.npz", run_fit("tied"))
    for name, where, options in (("whitened", sharding, {}), ("natural", grid, all_rows)):
        save(folder / f"fit_{name}_one.npz", run_fit(name, **options))
        result = run_fit(name, sharding=where, **options)
        save(folder / f"fit_{name}_many.npz", result)
    report["devices of the state"] = sorted({len(leaf.sharding.device_set) for leaf in jax.tree.leaves(result.state)})
    # From eight devices to two.
    folder_of_run = folder / "checkpoints"
    report["checkpoints"] = interrupted("whitened", folder_of_run, sharding=sharding)
    report["errors"] = []
    for batch_size in (12, 81):
        try:
            run_fit("whitened", sharding=sharding, batch_size=batch_size)
        except ValueError as error:
            report["errors"].append(str(error))
    go_on = run_fit("whitened", sharding=rows_on(jax.devices()[:2]), checkpoint=folder_of_run)
    save(folder / "fit_whitened_resumed.npz", go_on)
    (folder / "report.json").write_text(json.dumps(report))


def several_processes(folder, process, processes, port):
    """One of several processes with two devices each; data in files that all of them see."""
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    # Each process has every other shard, so that what it reads of a batch is not one block.
    sharding = rows_on(sorted(jax.devices(), key=lambda device: (device.id % 2, device.id)))
    on_disk = tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("X", "y"))
    report = {"devices": jax.device_count(), "processes": jax.process_count()}
    fit = functools.partial(run_fit, sharding=sharding, data=on_disk)

    stopping = sgp.EarlyStopping(HELD_OUT, every=4)
    result = fit("tied", callback=stopping)
    save(folder / f"tied_{process}.npz", result)
    report["held out"] = stopping.losses
    report["own"] = all(leaf.is_fully_addressable for leaf in jax.tree.leaves(result.state))

    report["checkpoints"] = interrupted("whitened", folder / "checkpoints", sharding=sharding, data=on_disk)
    save(folder / f"whitened_{process}.npz", fit("whitened", checkpoint=folder / "checkpoints"))

    # The state to start from differs between the processes, and so do the answers of the callback.
    svi = make_svi("whitened")
    state = svi.init(KEY(1 if process == 0 else 2), X[: 16 - process], Y[: 16 - process], num_data=N)
    stopped = fit(
        "whitened", init_state=state, num_steps=300, callback=lambda progress: process == 0 and progress.step == 6
    )
    save(folder / f"stopped_{process}.npz", stopped)

    report["errors"] = []
    half = slice(40 * process, 40 * process + 40)
    for wrong in (
        {"data": (on_disk[0][half], on_disk[1][half])},
        {"num_steps": STEPS + process},
        {"checkpoint": folder / f"checkpoints{process or ''}"},
    ):
        try:
            fit("whitened", **wrong)
        except ValueError as error:
            report["errors"].append(str(error))
        else:
            report["errors"].append("")
    (folder / f"report_{process}.json").write_text(json.dumps(report))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--process", type=int)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    numpyro.enable_x64()
    if options.process is None:
        many_devices(options.folder)
    else:
        several_processes(options.folder, options.process, options.processes, options.port)


if __name__ == "__main__":
    main()
