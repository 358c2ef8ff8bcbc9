"""Eight fake CPU devices, strict dtype promotion, one explicit mesh, and where the goldens are."""

import os
import tempfile
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Many tests compile the same small step; within one session it is compiled once.
compilations = tempfile.TemporaryDirectory(prefix="olmo3-compilations-")
jax.config.update("jax_compilation_cache_dir", compilations.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

GOLDENS = Path(os.environ.get("OLMO3_GOLDENS", Path(__file__).parent / "goldens"))


def golden_cases(pattern: str) -> list[Path]:
    """Every folder or file of the goldens that matches `pattern`, in order."""
    return sorted(GOLDENS.glob(pattern))


@pytest.fixture(scope="session", autouse=True)
def mesh():
    """The mesh every test runs under unless it sets its own: 2 replicas of 4 shards."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def getkey():
    """A function that returns a new PRNG key at each call."""
    key = jax.random.key(0)

    def next_key():
        nonlocal key
        key, out = jax.random.split(key)
        return out

    return next_key
