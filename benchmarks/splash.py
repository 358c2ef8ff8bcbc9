"""Cost of splash attention by the TPU compiler's own schedule, for choosing tile sizes.

    python benchmarks/splash.py tpu7x:2x2x1 --head 128 --tiles 1024,1024,512 2048,1024,512
    python benchmarks/splash.py v5p:2x2x1 --head 256 --tiles 1024,1024,512

A tile is BLOCK_Q,BLOCK_KV,KV_COMPUTE, the same forward and backward. For each, forward and backward
of one sliding and one full layer of the 7B are compiled for an absent TPU, and the bundles of the
kernels' inner regions are read from libtpu's dump. A bundle issues in one cycle; stalls for memory
are not in it. Printed are cycles per 1024 x 1024 scores (what CHIPS of tools/aot.py holds) and
milliseconds per step at 4 sequences of 8192 a device. Every compilation is a process of its own:
libtpu reads where to dump only once. Needs the tpu extra.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CLOCK = {"tpu7x": 2.2e9, "v5p": 1.75e9}  # cycles per second; tpu7x inferred from its peak
CORES = {"tpu7x": 1, "v5p": 2}  # TensorCores that share one device's grid
LENGTH, WINDOW, WIDTH, ROWS = 8192, 4096, 4096, 4
LAYERS = {WINDOW: 24, LENGTH: 8}


def compile_kernels(topology: str, head: int, window: int, tile: list[int]) -> None:
    """Compiles forward and backward of one layer; the dump goes where LIBTPU_INIT_ARGS says."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from tools.aot import absent_devices

    devices = absent_devices(topology)
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    mask = masks.LocalMask((LENGTH, LENGTH), (window - 1, 0), 0)
    if window == LENGTH:
        mask = masks.CausalMask((LENGTH, LENGTH))
    sizes = kernel.BlockSizes(*tile, *tile, use_fused_bwd_kernel=True)

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        splash = kernel.make_splash_mha(
            masks.MultiHeadMask([mask] * (WIDTH // head)),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
        )
        return jnp.asarray(jax.vmap(splash)(q, k, v))

    def total(*qkv: jax.Array) -> jax.Array:
        y = jax.shard_map(local, in_specs=P("x"), out_specs=P("x"), check_vma=False)(*qkv)
        return jnp.sum(y.astype(jnp.float32))

    with jax.set_mesh(mesh):
        shape = (len(devices), WIDTH // head, LENGTH, head)
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
        jax.jit(jax.grad(total, (0, 1, 2))).lower(x, x, x).compile()


def inner_bundles(bundles: Path) -> tuple[int, int]:
    """Bundles of the smallest region that holds most matrix work (once per tile), and of the
    regions without any (once per row of tiles).
    """
    stem = re.sub(r"-\d\d-final_bundles\.txt$", "", bundles.name)
    utilization = next(bundles.parent.glob(f"{glob_escape(stem)}-*static-per-bundle*"))
    slots = [line.split() for line in utilization.read_text().splitlines()[4:] if line.strip()]
    matrix = [int(row[0]) for row in slots]
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    here = 0
    for line in bundles.read_text(errors="replace").splitlines():
        if address := re.match(r"\s*(0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2}\s*)?:\s", line):
            here = int(address[1], 0)
        for what, region in re.findall(r"(?<!/)(Start|End) region (\d+)", line):
            if what == "Start":
                starts.setdefault(int(region), here)
            else:
                ends[int(region)] = here
    spans = sorted(((starts[r], ends[r]) for r in starts if r in ends), key=lambda s: s[1] - s[0])
    work = {s: sum(matrix[s[0] : s[1] + 1]) for s in spans}
    inner = next(s for s in spans if work[s] > 0.5 * sum(matrix))
    idle = [s for s in spans if not work[s] and s[1] - s[0] > 60 and not inside(s, inner)]
    outer = [s for s in idle if not any(t != s and inside(s, t) for t in idle)]
    return inner[1] - inner[0] + 1, sum(s[1] - s[0] + 1 for s in set(outer))


def glob_escape(text: str) -> str:
    """A file name as a pattern that means itself; the dump's names hold brackets."""
    return re.sub(r"([\[\]?*])", r"[\1]", text)


def inside(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether span a lies within span b."""
    return b[0] <= a[0] and a[1] <= b[1]


def n_tiles(window: int, block_q: int, block_kv: int) -> int:
    """Tiles that hold at least one visible pair."""
    return sum(
        j * block_kv <= (i + 1) * block_q - 1 and i * block_q - ((j + 1) * block_kv - 1) < window
        for i in range(LENGTH // block_q)
        for j in range(LENGTH // block_kv)
    )


def measure(topology: str, head: int, tile: list[int]) -> str:
    """One line of the table."""
    kind, heads = topology.partition(":")[0], ROWS * WIDTH // head
    cycles = {"fwd": 0.0, "dkv": 0.0}
    ideal = sum(n_tiles(w, 1024, 1024) * heads * n for w, n in LAYERS.items())
    for window, layers in LAYERS.items():
        with tempfile.TemporaryDirectory() as folder:
            dump = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final.*"
            flags = f"--xla_jf_dump_to={folder} {dump}"
            child = [sys.executable, __file__, topology, f"--head={head}", f"--child={window}"]
            subprocess.run(
                [*child, "--tiles", ",".join(map(str, tile))],
                env={**os.environ, "LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"},
                check=True,
                capture_output=True,
            )
            for name in cycles:
                (path,) = Path(folder).glob(f"*splash*{name}*-[0-9][0-9]-final_bundles.txt")
                per_tile, per_row = inner_bundles(path)
                rows = LENGTH // tile[0 if name == "fwd" else 1]
                total = n_tiles(window, *tile[:2]) * per_tile + rows * per_row
                cycles[name] += total * heads * layers / CORES[kind]
    parts = ", ".join(
        f"{name} {c / ideal:.0f} cycles = {c / CLOCK[kind] * 1e3:.1f} ms"
        for name, c in cycles.items()
    )
    whole = sum(cycles.values()) / CLOCK[kind] * 1e3
    return f"{topology} head {head} tile {tile}: {parts}; {whole:.1f} ms a step"


def main() -> None:
    """Prints a line for every tile size asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("topology", help="absent TPU, such as tpu7x:2x2x1")
    parser.add_argument("--head", type=int, default=128, help="head dimension")
    parser.add_argument("--tiles", nargs="+", default=["1024,1024,512"], help="Q,KV,COMPUTE ...")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    for text in a.tiles:
        tile = [int(n) for n in text.split(",")]
        if a.child is None:
            print(measure(a.topology, a.head, tile), flush=True)
        else:
            compile_kernels(a.topology, a.head, a.child, tile)


if __name__ == "__main__":
    main()
