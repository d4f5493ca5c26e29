"""Several devices: the steps are those of one device to rounding, and only sums over the rows travel between devices."""

import json
import os
from pathlib import Path
import socket
import subprocess
import sys

from devices_child import BATCH, KEY, STEPS, N, R, X, Y, Z, make_svi
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
import pytest

import numpyro_sgp as sgp
from numpyro_sgp.fitting.batches import Batches

CHILD = Path(__file__).with_name("devices_child.py")


def start(folder, devices, *arguments):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "error", str(CHILD), str(folder), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(children):
    try:
        outputs = [child.communicate(timeout=600)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == 0, output


def assert_same_run(found, expected):
    """Equal but for the order in which rows are added up."""
    with np.load(found) as found, np.load(expected) as expected:
        assert sorted(found.files) == sorted(expected.files)
        for name in expected.files:
            assert_allclose(found[name], expected[name], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """What one process with eight devices wrote, beside the same runs on one of them."""
    folder = tmp_path_factory.mktemp("eight")
    finish([start(folder, 8)])
    return folder


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What two processes with two devices each wrote."""
    folder = tmp_path_factory.mktemp("two")
    np.save(folder / "X.npy", X)
    np.save(folder / "y.npy", Y)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    finish([start(folder, 2, "--process", process, "--processes", 2, "--port", port) for process in range(2)])
    return folder


def report(folder, name="report"):
    return json.loads((folder / f"{name}.json").read_text())


# One process, eight devices


@pytest.mark.parametrize("guide_name", ["tied", "joint", "held"])
@pytest.mark.thorough
def test_updates_on_eight_devices_are_those_on_one(eight, guide_name):
    assert report(eight)["devices"] == 8
    assert_same_run(eight / f"update_{guide_name}_many.npz", eight / f"update_{guide_name}_one.npz")


@pytest.mark.thorough
@pytest.mark.parametrize("guide_name", ["whitened", "natural"])
def test_fit_on_eight_devices_is_that_on_one(eight, guide_name):
    assert_same_run(eight / f"fit_{guide_name}_many.npz", eight / f"fit_{guide_name}_one.npz")


@pytest.mark.thorough
@pytest.mark.parametrize("guide_name", ["tied", "joint", "held"])
def test_between_devices_only_sums_over_rows_travel(eight, guide_name):
    collectives = report(eight)["collectives"][guide_name]
    assert collectives
    assert {kind for kind, _ in collectives} == {"all-reduce"}
    # No axis of B rows, nor of the B/8 of one device: M or R, D, 1, the number of parameters and the 20 quadrature nodes.
    sizes = {
        int(size)
        for _, shapes in collectives
        for shape in shapes
        for size in shape[:-1].split("[")[1].split(",")
        if size
    }
    assert sizes <= {{"held": R, "joint": len(Z) + 1}.get(guide_name, len(Z)), Z.shape[1], 1, 20}


@pytest.mark.thorough
def test_a_result_is_on_one_device_and_goes_with_arrays_on_any(eight):
    assert report(eight)["devices of the state"] == [1]


@pytest.mark.thorough
def test_a_run_goes_on_from_its_checkpoint_on_another_number_of_devices(eight):
    assert report(eight)["checkpoints"] == [5]
    assert_same_run(eight / "fit_whitened_resumed.npz", eight / "fit_whitened_one.npz")


# Two processes


@pytest.mark.thorough
@pytest.mark.parametrize("guide_name", ["whitened", "tied"])
@pytest.mark.exhaustive
def test_fit_in_two_processes_is_that_in_one_also_from_a_checkpoint(two_processes, eight, guide_name):
    for process in range(2):
        found = report(two_processes, f"report_{process}")
        assert (found["devices"], found["processes"], found["checkpoints"]) == (4, 2, [5])
        assert_same_run(two_processes / f"{guide_name}_{process}.npz", eight / f"fit_{guide_name}_one.npz")


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_callbacks_of_each_process_evaluate_on_their_own(two_processes):
    first, second = (report(two_processes, f"report_{process}") for process in range(2))
    assert first["own"]
    assert second["own"]
    assert len(first["held out"]) == STEPS // 4
    assert first["held out"] == second["held out"]


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_the_first_process_decides_what_to_start_from_and_when_to_stop(two_processes, eight):
    with np.load(eight / "fit_whitened_one.npz") as one:
        for process in range(2):
            with np.load(two_processes / f"stopped_{process}.npz") as stopped:
                assert_allclose(stopped["losses"], one["losses"][:6], rtol=1e-10)


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_processes_that_call_fit_differently_are_told_what_differs(two_processes):
    for process in range(2):
        data, num_steps, checkpoint = report(two_processes, f"report_{process}")["errors"]
        assert f"In process {process}, the first row of `data`: [[" in data
        assert f"`num_steps`: {STEPS + process}." in num_steps
        newest = "[]" if process else f"['step-{STEPS:09d}.npz']"
        assert f"the newest checkpoint in the folder: {newest}" in checkpoint


# What does not need several devices


def one_device():
    return NamedSharding(Mesh(jax.devices()[:1], ("data",)), PartitionSpec("data"))


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_a_mesh_of_one_device_gives_the_same_result():
    run = [
        sgp.fit(make_svi("whitened"), KEY(1), (X, Y), batch_size=BATCH, num_steps=5, progress_bar=False, sharding=where)
        for where in (None, one_device())
    ]
    for found, wanted in zip(jax.tree.leaves(run[1].params), jax.tree.leaves(run[0].params), strict=True):
        assert_array_equal(found, wanted)
        assert not found.committed


def test_only_the_rows_of_a_process_are_gathered():
    positions = np.array([1, 2, 7])
    every, own = (Batches.of(KEY(0), (X, Y), N, BATCH, where) for where in (None, positions))
    for step in (0, 5):
        for whole, part in zip(every.chunk(step, 3, 4), own.chunk(step, 3, 4), strict=True):
            assert part.shape[:2] == (4, 3)
            assert_array_equal(part[:3], whole[:3, positions])
    full = Batches.of(KEY(0), (X, Y), N, N, positions)
    assert_array_equal(full.chunk(0, 1, 1)[0][0], full.first()[0][positions])


@pytest.mark.parametrize(
    ("sharding", "error", "match"),
    [
        ("data", TypeError, "must be a `NamedSharding` on a mesh of devices, got 'data'"),
        (lambda: SingleDeviceSharding(jax.devices()[0]), TypeError, "Use NamedSharding"),
        (lambda: one_device().update(spec=PartitionSpec()), ValueError, "only the first axis of a batch"),
        (lambda: one_device().update(spec=PartitionSpec(None, "data")), ValueError, "its rows"),
    ],
)
def test_a_sharding_that_does_not_lay_out_rows_is_refused(sharding, error, match):
    sharding = sharding() if callable(sharding) else sharding
    with pytest.raises(error, match=match):
        sgp.fit(make_svi("whitened"), KEY(1), (X, Y), batch_size=BATCH, num_steps=1, sharding=sharding)


@pytest.mark.thorough
def test_a_batch_that_the_devices_cannot_share_evenly_is_refused(eight):
    for batch_size, message in zip((12, 81), report(eight)["errors"], strict=True):
        assert message.startswith(f"`batch_size` is {batch_size}, and `sharding` splits the rows of a batch over 8")
        assert message.endswith("Use a multiple of 8.")
