"""How fast data.py reads, next to other loaders where they are installed.

    python benchmarks/data.py [local] [filter] [http] [memory] [peers] [tokenize] [scale] [audit]

Prints one line per figure. Token files are made in a temporary folder and deleted. A batch is what
training gets: int32 tokens, targets and ids on the device, each id checked against the vocabulary.
"""

import gzip
import json
import os
import resource
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
from tools import audit, corpus

LENGTH, BATCH = 8192, 128


def make_files(folder: Path, n_files: int = 8, n_instances: int = 4096) -> data.DataConfig:
    """Random tokens with dolma2's ids and an EOS in a thousand; 1 GiB by default."""
    rng = np.random.default_rng(0)
    for i in range(n_files):
        ids = rng.integers(0, 100_256, LENGTH * n_instances // n_files, np.uint32)
        ids[::1000] = 100_257
        ids.tofile(folder / f"part-{i}.npy")
    return data.DataConfig(source=str(folder / "*.npy"), cache=str(folder / "cache"))


def stream_batches(config: data.DataConfig, n_steps: int, batch: int = BATCH) -> Iterator[float]:
    """Streams steps onto one device; yields the seconds waited in each."""
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    loader = data.Loader(data.open_dataset(config), config, batch)
    sharding = NamedSharding(mesh, P(None, ("data", "fsdp")))
    stream = data.Stream(loader, sharding, 1, 1, n_steps)
    for step in range(1, n_steps + 1):
        jax.block_until_ready(stream.get(step))
        yield stream.data_seconds
    stream.close()


def speed(config: data.DataConfig, n_steps: int, batch: int = BATCH) -> tuple[float, float]:
    """Bytes of tokens a second, and a second of CPU time, after a warm-up of a tenth.

    The second is what a machine that does other work at the same time can still be measured by.
    """
    steps = stream_batches(config, n_steps, batch)
    for _ in range(n_steps // 10):
        next(steps)
    started, cpu = time.perf_counter(), time.process_time()
    n_bytes = sum(batch for _ in steps) * LENGTH * 4
    return n_bytes / (time.perf_counter() - started), n_bytes / (time.process_time() - cpu)


def local(folder: Path) -> None:
    """Files in the page cache, onto the device."""
    wall, cpu = speed(make_files(folder), 300)
    print(f"local: {wall / 1e9:.2f} GB/s, {cpu / 1e9:.2f} GB per second of CPU")


def filter_(folder: Path) -> None:
    """The exact repetition filter, on one thread and in the stream."""
    config = make_files(folder)
    dataset = data.open_dataset(config)
    rows = dataset.read(np.arange(512, dtype=np.uint32)).tokens
    started = time.process_time()
    for row in rows:
        data.repeats_too_often(row)
    print(f"filter: {len(rows) / (time.process_time() - started):,.0f} instances/s/core")
    config = data.dataclasses.replace(config, filter_repetitions=True)
    wall, cpu = (rate / LENGTH / 4 for rate in speed(config, 200))
    print(f"filter: {wall:,.0f} instances/s streamed, {cpu:,.0f} per second of CPU")


class RangeServer(socketserver.StreamRequestHandler):
    """Serves byte ranges of files under the working directory, after FIRST_BYTE_SECONDS.

    It reads requests by itself: the parser of http.server takes longer than the reader measured.
    """

    disable_nagle_algorithm = True

    def handle(self) -> None:
        seconds = float(os.environ["FIRST_BYTE_SECONDS"])
        while request := self.rfile.readline():
            method, path, _ = request.decode().split()
            headers = {}
            while line := self.rfile.readline().decode().strip():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            size, body = os.path.getsize("." + path), b""
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n"
            if method == "GET":
                time.sleep(seconds)
                start, end = map(int, headers["range"].removeprefix("bytes=").split("-"))
                with open("." + path, "rb", buffering=0) as file:
                    body = os.pread(file.fileno(), end + 1 - start, start)
                head = (
                    f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(body)}\r\n"
                    f"Content-Range: bytes {start}-{end}/{size}\r\n\r\n"
                )
            self.wfile.write(head.encode() + body)


def serve() -> None:
    """Runs the server and prints its port."""
    socketserver.ThreadingTCPServer.request_queue_size = 256
    socketserver.ThreadingTCPServer.daemon_threads = True
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), RangeServer)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def http(folder: Path) -> None:
    """Ranges of 32 KiB from a server on this machine, which shares its cores."""
    make_files(folder, 8, 1024)
    for seconds in (0.0, 0.02):
        environment = os.environ | {"FIRST_BYTE_SECONDS": str(seconds)}
        command = [sys.executable, __file__, "serve"]
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE)
        assert server.stdout is not None
        port = int(server.stdout.readline())
        names = (f"http://127.0.0.1:{port}/part-{i}.npy" for i in range(8))
        config = data.DataConfig(source=",".join(names), cache=str(folder))
        n_bytes, _ = speed(config, 200)
        print(f"http: {n_bytes / 1e6:.0f} MB/s with {seconds * 1000:.0f} ms of added latency")
        server.terminate()
        server.wait()


def memory(folder: Path) -> None:
    """Peak resident memory as batches go by."""
    config = make_files(folder, 2, 512)
    peaks = {}
    for step, _ in enumerate(stream_batches(config, 10_000, 8), 1):
        if step in (100, 1000, 10_000):
            peaks[step] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("memory:", ", ".join(f"{v:.0f} MiB after {k:,} batches" for k, v in peaks.items()))


def peers(folder: Path) -> None:
    """The same batches from a shuffled Grain pipeline, and from OLMo-core's loader."""
    make_files(folder)
    paths = sorted(folder.glob("*.npy"))
    ours, _ = speed(data.DataConfig(source=str(folder / "*.npy"), cache=str(folder)), 300)
    try:
        import grain.python as grain  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        print("peers: grain is not installed")
    else:
        files = [np.memmap(path, np.uint32, "r").reshape(-1, LENGTH) for path in paths]

        class Instances:
            def __len__(self) -> int:
                return sum(len(file) for file in files)

            def __getitem__(self, index: int) -> dict[str, np.ndarray]:
                file, row = divmod(int(index), len(files[0]))
                ids = np.array(files[file][row])
                assert ids.max() < 100_278
                tokens = ids.astype(np.int32)
                return {"tokens": tokens, "targets": np.append(tokens[1:], np.int32(-1))}

        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2 * BATCH)
        source = grain.MapDataset.source(Instances()).shuffle(0).repeat().to_iter_dataset(options)
        batches = iter(source.batch(BATCH))
        for _ in range(10):
            next(batches)
        started, n = time.perf_counter(), 100
        for _ in range(n):
            jax.block_until_ready(jax.device_put(next(batches)))
        theirs = n * BATCH * LENGTH * 4 / (time.perf_counter() - started)
        print(f"peers: grain {theirs / 1e9:.2f} GB/s, data.py {ours / theirs:.1f} times that")
    try:
        import olmo_core.data as core  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        print("peers: olmo_core is not installed")
    else:
        dataset = core.NumpyFSLDatasetConfig(
            paths=[str(path) for path in paths],
            sequence_length=LENGTH,
            tokenizer=core.TokenizerConfig.dolma2(),
            work_dir=str(folder),
        ).build()
        loader = core.NumpyDataLoaderConfig(
            global_batch_size=BATCH * LENGTH, seed=0, num_workers=0, num_threads=2
        ).build(dataset)
        loader.reshuffle(1)
        batches = iter(loader)
        next(batches)
        started, n = time.perf_counter(), 30
        for _ in range(n):
            next(batches)
        theirs = n * BATCH * LENGTH * 4 / (time.perf_counter() - started)
        print(f"peers: olmo_core {theirs / 1e9:.2f} GB/s, data.py {ours / theirs:.1f} times that")


def tokenize(folder: Path) -> None:
    """Python's own sources as jsonl, with the tokenizer.json that TOKENIZER names."""
    texts = [p.read_text(errors="replace") for p in Path(os.__file__).parent.glob("*.py")]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    for i in range(2):
        (folder / f"{i}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for workers in (1, 2):
        sources = tuple(folder / f"{i}.jsonl.gz" for i in range(workers))
        out = folder / f"out-{workers}"
        job = corpus.Tokenize(sources, Path(os.environ["TOKENIZER"]), out, workers=workers)
        print(f"tokenize, {workers} workers: ", end="", flush=True)
        corpus.tokenize(job)


def stage1_sizes(n_files: int) -> np.ndarray:
    """Bytes of files that hold stage 1's 723,873,279 instances between them."""
    counts = np.full(n_files, 723_873_279 // n_files)
    counts[: 723_873_279 % n_files] += 1
    return counts * LENGTH * 4


def scale(folder: Path) -> None:
    """The order of stage 1, 723,873,279 instances in 1016 files: made, then found again."""
    config = data.DataConfig(cache=str(folder))
    names = [f"{i}.npy" for i in range(1016)]
    for what in ("made", "found again"):
        started = time.perf_counter()
        dataset = data.make_dataset(config, data.Files(), names, stage1_sizes(1016))
        ids = data.Loader(dataset, config, 512).instance_ids(1)
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(f"scale: {what} in {seconds:.2f} s, peak {peak:.2f} GB, first ids {ids[:3]}")


def audit_(folder: Path) -> None:
    """The audit of two epochs of the manifest that MANIFEST names, at stage 1's size."""
    config = data.DataConfig(source=os.environ["MANIFEST"], base="https://olmo-data.org")
    paths = data.list_files(config)
    audit.write_index(folder / "i.json", config, paths, stage1_sizes(len(paths)))
    started = time.perf_counter()
    program = [sys.executable, str(Path(data.__file__)), "audit", "--index", str(folder / "i.json")]
    options = ["--batch", "512", "--processes", "1,2,8,32", "--epochs", "2"]
    code = subprocess.run([*program, *options, "--cache", str(folder)]).returncode
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    seconds = time.perf_counter() - started
    print(f"audit: {len(paths)} files, exit {code}, {seconds:.0f} s, peak {peak:.1f} GB")


if __name__ == "__main__":
    parts = (local, filter_, http, memory, peers, tokenize, scale, audit_)
    figures = {f.__name__.rstrip("_"): f for f in parts}
    if sys.argv[1:] == ["serve"]:
        threading.stack_size(256 * 1024)
        serve()
    for name in sys.argv[1:] or ("local", "filter", "http", "memory", "peers"):
        with tempfile.TemporaryDirectory() as temporary:
            figures[name](Path(temporary))
