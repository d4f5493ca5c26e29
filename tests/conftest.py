"""Settings and fixtures for all tests."""

import gc
import os
from pathlib import Path
import shutil
import tempfile

import pytest

# Most of the time goes into compiling small programs. They are compiled with less effort, and those that test processes
# have in common once: the cache lives as long as this run. JAX reads these settings when it is imported.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
OWN_CACHE = not IS_WORKER and "JAX_COMPILATION_CACHE_DIR" not in os.environ
if not IS_WORKER:
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
    if OWN_CACHE:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="numpyro_sgp_compiled_")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # Two test processes share the cores: libraries with a thread for each core would wait for one another.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MPLBACKEND", "Agg")

import jax  # noqa: E402

import numpyro_sgp  # noqa: E402, F401

# Tracing makes so many objects that looking for garbage as often as Python does takes a twelfth of the tests' time.
gc.set_threshold(200_000, 20, 100)

from variants import KEPT  # noqa: E402

_ARRAYS_AFTER_IMPORT = len(jax.live_arrays())


def pytest_collection_modifyitems(config, items):
    variants = {}
    for item in items:
        file, name = item.path.stem.removeprefix("test_"), item.name.split("[")[0].removeprefix("test_")
        kept = KEPT.get(file, {}).get(name)
        if kept is not None:
            variant = item.callspec.id.replace("\\\\", "\\").encode().decode("unicode_escape")
            variants.setdefault(file, {}).setdefault(name, set()).add(variant)
            if variant not in kept:
                item.add_marker(pytest.mark.exhaustive)
    if any("::" in arg for arg in config.args):
        return  # not all variants are here
    for file, found in variants.items():
        for name, kept in KEPT[file].items():
            if not kept <= found.get(name, set()):
                raise pytest.UsageError(f"tests/variants.py names {sorted(kept)} of {file}, {name}: no such variants.")


def pytest_unconfigure():
    if OWN_CACHE:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def no_array_at_import():
    # An array made at import would fix the device and the dtype before the user can choose them.
    assert _ARRAYS_AFTER_IMPORT == 0, f"`import numpyro_sgp` made {_ARRAYS_AFTER_IMPORT} arrays"


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Compiled programs go when there are many: each maps memory, and Linux gives a process 65530 such regions.

    Beyond these JAX ends the process with a segmentation fault, wherever it compiles or reads from its cache next. A
    module takes up to 30000.
    """
    yield
    regions = Path("/proc/self/maps")
    if regions.exists() and regions.read_bytes().count(b"\n") > 20000:
        jax.clear_caches()


@pytest.fixture
def x64():
    """float64 for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_promotion():
    """No implicit promotion of dtype or rank, for one test of modules without NumPyro (which relies on both)."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
