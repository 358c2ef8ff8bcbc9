"""Time, peak memory and fidelity of converting a checkpoint the size of the 7B.

    python benchmarks/convert.py --folder SCRATCH            needs 75 GB of disk, 2.5 GB of memory
    python benchmarks/convert.py --folder SCRATCH --layers 4

Makes a Hugging Face folder of random bfloat16 weights in several shards, converts it there and back
with the command line, each command in its own process, and compares the bytes of the round trip
with the source. Beside each stands a plain program that reads and writes as many bytes, numbers
being twice as long in our checkpoint. Every timing starts with a cold cache and ends with a sync.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent


def tensor_shapes(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the released 7B with `layers` layers (spec 8.2)."""
    d, f, v = 4096, 11_008, 100_278
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens", (v, d))]
    for i in range(layers):
        attention = [(f"self_attn.{x}_proj", (d, d)) for x in "qkvo"]
        norms = ("self_attn.q_norm", "self_attn.k_norm")
        norms += ("post_attention_layernorm", "post_feedforward_layernorm")
        mlp = [("mlp.gate_proj", (f, d)), ("mlp.up_proj", (f, d)), ("mlp.down_proj", (d, f))]
        for name, shape in [*attention, *mlp, *((n, (d,)) for n in norms)]:
            shapes.append((f"model.layers.{i}.{name}", shape))
    return [*shapes, ("model.norm", (d,)), ("lm_head", (v, d))]


def make_source(folder: Path, layers: int, shard_bytes: int = 5 * 10**9) -> None:
    """Writes the folder, one tensor in memory at a time."""
    folder.mkdir(parents=True)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = {
        "model_type": "olmo3",
        "vocab_size": 100_278,
        "hidden_size": 4096,
        "rms_norm_eps": 1e-6,
    }
    config |= {"intermediate_size": 11_008, "num_hidden_layers": layers, "num_attention_heads": 32}
    config |= {"sliding_window": 4096, "layer_types": kinds * (layers // 4), "rope_theta": 5e5}
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in tensor_shapes(layers):
        n_bytes = 2 * int(np.prod(shape))
        if size + n_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((f"{name}.weight", shape))
        size += n_bytes
    rng, weights = np.random.default_rng(0), {}
    for i, shard in enumerate(shards, 1):
        file = folder / f"model-{i:05}-of-{len(shards):05}.safetensors"
        header, end = {}, 0
        for name, shape in shard:
            start, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            weights[name] = file.name
        text = json.dumps(header).encode()
        with file.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for _, shape in shard:
                x = rng.standard_normal(shape, np.float32) * np.float32(0.02)
                (x + np.float32(len(shape) == 1)).astype(ml_dtypes.bfloat16).tofile(out)
    index = {"metadata": {}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def size_of(folder: Path) -> float:
    """Gigabytes of all files below a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e9


def numbers_hash(folder: Path) -> str:
    """One hash of every tensor's bytes, whatever files they lie in."""
    parts = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as f:
            n = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(n))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                f.seek(8 + n + start)
                digest = hashlib.blake2b()
                while start < end:
                    digest.update(chunk := f.read(min(2**26, end - start)))
                    start += len(chunk)
                parts[name] = digest.hexdigest()
    return hashlib.blake2b(json.dumps(sorted(parts.items())).encode()).hexdigest()


def forget(folder: Path) -> None:
    """Drops a folder's pages from the cache, so that reading is from disk."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(label: str, command: list[str], reads: Path) -> float:
    """Runs a command from a cold cache; prints and returns seconds until all is on disk."""
    forget(reads)
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    seconds = time.perf_counter() - start
    cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9
    print(f"{label:22} {seconds:7.1f} s, {cpu:7.1f} CPU s, peak RSS {peak:5.2f} GB", flush=True)
    if status:
        sys.exit(f"{label} failed")
    return seconds


def main(folder: Path, layers: int = 32) -> None:
    """Measures the conversion of a model with the 7B's widths.

    Args:
        folder: Where some 75 GB may be written; removed afterwards.
        layers: 32 is the 7B; fewer are quicker, as memory does not depend on them.
    """
    source, ours, back = folder / "source", folder / "ours", folder / "back"
    convert = [sys.executable, "convert.py"]
    try:
        # In a process of its own: a child's peak counts its parent's pages from before the exec.
        making = multiprocessing.Process(target=make_source, args=(source, layers))
        making.start()
        making.join()
        print(
            f"source: {size_of(source):.2f} GB in {len(list(source.glob('*.safetensors')))} shards"
        )
        files, plain = f"{source}/*.safetensors", folder / "plain"
        twice = ["sh", "-c", f"cat {files} {files} > {plain}"]
        pace = measure("cat SOURCE SOURCE", twice, source)
        plain.unlink()
        command = [*convert, "from-hf", str(source), str(ours), "--no-check"]
        seconds = measure("from-hf --no-check", command, source)
        print(f"{seconds / pace:.2f} times as long; {size_of(ours):.2f} GB compressed")
        pace = measure("cat SOURCE", ["sh", "-c", f"cat {files} > {plain}"], source)
        plain.unlink()
        command = [*convert, "to-hf", str(ours), str(back), "--no-check"]
        seconds = measure("to-hf --no-check", command, ours)
        print(f"{seconds / pace:.2f} times as long")
        print("round trip bit-exact:", numbers_hash(source) == numbers_hash(back))
        shutil.rmtree(back)
        shape = ("--shape", "2", "64", "--dtype", "float32")
        measure("check, 2 x 64 tokens", [*convert, "check", str(source), str(ours), *shape], ours)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
