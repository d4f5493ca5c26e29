"""Fixtures for all tests."""

import gc
from pathlib import Path

import jax
import pytest

import numpyro_sgp  # noqa: F401

# Tracing makes so many objects that looking for garbage as often as Python does takes a twelfth of the tests' time.
gc.set_threshold(200_000, 20, 100)

_ARRAYS_AFTER_IMPORT = len(jax.live_arrays())


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
