"""Eight fake CPU devices, strict dtype promotion, one explicit mesh, and where the goldens are."""

import os
import tempfile
from pathlib import Path

# Tests, and the processes they start, compile the same small steps: once in a session. JAX reads
# this when it is imported; the workers of pytest-xdist inherit it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compilations = tempfile.TemporaryDirectory(prefix="olmo3-compilations-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compilations.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

# A third of a compilation is LLVM's last touches, which small programs do not repay. A run of the
# full goldens has them, and whoever sets flags decides.
if not {"OLMO3_GOLDENS", "XLA_FLAGS"} & os.environ.keys():
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=1"

import jax
import pytest
from jax.sharding import AxisType

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

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
