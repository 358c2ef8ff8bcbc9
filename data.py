"""Token files to sharded batches, in OLMo-core's order, every instance exactly once an epoch.

    manifest -> files -> instances -> one global order -> batch of step k -> rows of this process

A global batch is a pure function of (manifest, seed, step). Sharding happens in one place,
`Stream`, which reads the rows that this process's devices hold and nothing else.

Axes: A accumulation micro-steps, B instances of a (micro-)batch, S positions of an instance.
Sources: "spec 6.x" is OLMo-core after 2.5.0, `src/olmo_core/data/`: mixes/__init__.py (manifests),
numpy_dataset.py (instances, fingerprint), data_loader.py (order), utils.py (filter, packing).
"""

import contextlib
import glob
import hashlib
import os
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int32, Int64, Integer, UInt, UInt32


@dataclass(frozen=True)
class DataConfig:
    """Which tokens, cut how, in which order."""

    source: str = "stdlib"
    """Manifest (.txt), index (.json), glob, list with commas, or `stdlib`, the embedded corpus."""
    base: str = ""
    """Where manifest paths start: folder, https://, gs:// or s3://; empty is the manifest's own."""
    sequence_length: int = 8192
    """Tokens of an instance."""
    max_target_sequence_length: int | None = None
    """A multiple of sequence_length keeps that many tokens together in the shuffle."""
    seed: int = 34521
    """Epoch e is shuffled with seed + e."""
    tokenizer: str = "allenai/dolma2-tokenizer"
    """Identifier: what {TOKENIZER} in a manifest becomes, and what the index records."""
    vocab_size: int = 100_278
    """Ids the tokenizer can produce; a larger id in a file is an error."""
    eos_id: int = 100_257
    """Ends every document."""
    pad_id: int = 100_277
    """Fills packed instances; never a target."""
    bos_id: int | None = None
    """Begins every document, if the tokenizer has one."""
    dtype: Literal["uint16", "uint32"] = "uint32"
    """Little-endian type of the headerless token files."""
    filter_repetitions: bool = False
    """Takes instances with 32 repeats of a pattern of 1 to 13 tokens out of the loss."""
    packed: bool = False
    """Packs whole documents into instances, best fit first, and masks attention between them."""
    skip_empty: bool = False
    """Accepts files without a single token."""
    read_ahead: int = 3
    """Batches read before the training loop asks for them."""
    cache: str = "~/.cache/olmo3-equinox"
    """Folder of the embedded corpus and of permutations."""

    def __post_init__(self) -> None:
        longest = self.max_target_sequence_length or self.sequence_length
        if self.sequence_length < 2 or longest % self.sequence_length:
            raise ValueError(
                f"max_target_sequence_length={longest} is not a multiple of "
                f"sequence_length={self.sequence_length}, which must be at least 2"
            )
        if not 0 <= self.eos_id < self.vocab_size or not 0 <= self.pad_id < self.vocab_size:
            raise ValueError(
                f"eos_id={self.eos_id} and pad_id={self.pad_id} must be below "
                f"vocab_size={self.vocab_size}"
            )
        if self.dtype == "uint16" and self.vocab_size > 65_536:
            raise ValueError(
                f"dtype=uint16 cannot hold the ids of vocab_size={self.vocab_size}; use uint32"
            )


class Batch(NamedTuple):
    """Rows of a global batch in host memory.

    A target is the next token, or -1 where there is none to learn: the last position, padding, and
    whole rows that the repetition filter rejects. Segments number the documents of an instance.
    """

    tokens: Int32[np.ndarray, "B S"]
    targets: Int32[np.ndarray, "B S"]
    segments: Int32[np.ndarray, "B S"] | None
    instances: UInt32[np.ndarray, " B"]


class DeviceBatch(NamedTuple):
    """A global batch on the devices, cut into A micro-batches of consecutive rows."""

    tokens: Int32[Array, "A B S"]
    targets: Int32[Array, "A B S"]
    segments: Int32[Array, "A B S"] | None
    instances: UInt32[Array, "A B"]


EMBEDDED_EOS, EMBEDDED_PAD, EMBEDDED_VOCAB = 256, 257, 258  # after the 256 byte values


def instance_hash(ids: UInt32[Array | np.ndarray, "*lead"]) -> UInt32[Array | np.ndarray, "2"]:
    """Hash of a multiset of instance ids: equal for any order and any split over hosts and steps.

    Two wrapping sums of differently mixed ids; sums, because with xor a row seen twice would
    vanish. Operators only, so it runs on numpy arrays and inside jit alike.
    """
    mix = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)
    x = (ids[..., None] + np.uint32(1)) * mix
    x = (x ^ (x >> np.uint32(15))) * mix[::-1]
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE3D)
    return (x ^ (x >> np.uint32(16))).sum(axis=tuple(range(ids.ndim)), dtype=np.uint32)


def format_hash(lanes: UInt32[Array | np.ndarray, "2"]) -> str:
    """The 16 hexadecimal digits that logs carry as `data_hash`."""
    high, low = np.asarray(lanes).tolist()
    return f"{high:08x}{low:08x}"


def repeats_too_often(
    tokens: Integer[np.ndarray, " S"], periods: tuple[int, int] = (1, 13), count: int = 32
) -> bool:
    """Whether a pattern of `periods` tokens occurs `count` times in a row (spec 6.5, exact).

    `count` repeats of period p are a run of at least (count - 1) * p positions equal to the one p
    before, so it is enough to look for two mismatches that far apart.
    """
    for period in range(periods[0], min(periods[1], len(tokens) // 3) + 1):
        same = len(tokens) - period
        mismatches = np.flatnonzero(tokens[period:] != tokens[:-period])
        runs = np.diff(mismatches, prepend=-1, append=same) - 1
        if runs.max() >= (count - 1) * period:
            return True
    return False


def shuffled(n: int, chunk: int, seed: int) -> UInt32[np.ndarray, " N"]:
    """OLMo-core's order of `n` instances for one epoch; chunks of neighbours stay together.

    Spec 6.3. The trailing n % chunk instances are dropped, as there.
    """
    order = np.arange(n // chunk, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed)).shuffle(order)
    if chunk == 1:
        return order
    return (order[:, None] * np.uint32(chunk) + np.arange(chunk, dtype=np.uint32)).reshape(-1)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary neighbour of `path` that takes its name once the body has succeeded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def embedded_documents() -> dict[str, bytes]:
    """The standard library's sources, without its tests, and Python's own help texts, by name."""
    from pydoc_data import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    documents = {f"help/{name}": text.encode() for name, text in topics.topics.items()}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not skipped & set(name.parts):
            documents[str(name)] = path.read_bytes()
    if sum(map(len, documents.values())) < 1_000_000:
        raise FileNotFoundError(
            f"{root}: no standard library sources here for source=stdlib; name token files instead"
        )
    return documents


def embedded_corpus(cache: str) -> dict[str, list[Path]]:
    """Token files of the embedded corpus by split, made at first use and kept under `cache`.

    A document is its bytes and an EOS. A hash of its name decides where it goes, so 5 % are held
    out whatever else is installed, and domains mix because the order within files is by hash too.
    The folder's name is a hash of all names and contents, so another Python gets another folder.
    """
    documents = embedded_documents()
    places = {hashlib.sha256(name.encode()).digest(): name for name in documents}
    identity = hashlib.sha256()
    for place in sorted(places):
        identity.update(place + hashlib.sha256(documents[places[place]]).digest())
    folder = Path(cache).expanduser() / f"stdlib-{identity.hexdigest()[:16]}"
    files: dict[str, list[Path]] = {"train": [], "heldout": []}
    for shard in range(20):
        path = folder / f"part-{shard:02}.npy"
        files["heldout" if shard == 19 else "train"].append(path)
        if path.exists():
            continue
        ids = [
            np.append(np.frombuffer(documents[places[place]], np.uint8).astype("<u4"), EMBEDDED_EOS)
            for place in sorted(places)
            if place[-1] * 20 // 256 == shard
        ]
        with atomic_path(path) as temporary:
            np.concatenate(ids).astype("<u4").tofile(temporary)
    return files


def tokenizer_folder(manifest: str, tokenizer: str) -> str:
    """What {TOKENIZER} stands for in a published manifest (spec 6.1)."""
    stem = Path(manifest).stem.lower().replace("_", "-")
    if tokenizer == "allenai/dolma2-tokenizer":
        if stem in ("v3-small-ppl-validation", "code-fresh"):
            return "dolma2-tokenizer"
        if stem.startswith(("olmo-mix-0625", "olmo-mix-0925", "olmo-midtraining", "olmo-longmino")):
            return "allenai/dolma3-tokenizer"
    return tokenizer


def read_manifest(config: DataConfig) -> list[str]:
    """The files of a manifest of `label,path` lines, in its order, as full paths or URLs."""
    lines = Path(config.source).read_text(encoding="utf-8").splitlines()
    rows = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    bad = [row for row in rows if "," not in row]
    if bad:
        raise ValueError(f"{config.source}: {bad[0]!r} is not a `label,path` line")
    base = config.base or str(Path(config.source).parent)
    folder = tokenizer_folder(config.source, config.tokenizer)
    paths = [row.split(",", 1)[1].strip().replace("{TOKENIZER}", folder) for row in rows]
    return [f"{base.rstrip('/')}/{path}" for path in paths]


def list_files(config: DataConfig, split: str) -> list[str]:
    """The token files that `source` names, in order."""
    if config.source == "stdlib":
        wanted = (EMBEDDED_EOS, EMBEDDED_PAD, EMBEDDED_VOCAB, "uint32")
        if (config.eos_id, config.pad_id, config.vocab_size, config.dtype) != wanted:
            raise ValueError(
                f"source=stdlib holds bytes: eos_id={config.eos_id}, pad_id={config.pad_id}, "
                f"vocab_size={config.vocab_size}, dtype={config.dtype} must be {wanted}"
            )
        return [str(path) for path in embedded_corpus(config.cache)[split]]
    if split == "heldout":
        raise ValueError(f"source={config.source} has no held-out files; only stdlib does")
    if config.source.endswith(".txt"):
        if not Path(config.source).is_file():
            raise FileNotFoundError(f"source={config.source}: no such manifest")
        return read_manifest(config)
    paths: list[str] = []
    for part in filter(None, config.source.split(",")):
        found = sorted(glob.glob(os.path.expanduser(part), recursive=True))
        paths += found or [part]
    return paths


def file_sizes(paths: Sequence[str]) -> Int64[np.ndarray, " F"]:
    """Bytes of every file; all that are missing are reported at once, never skipped."""
    sizes = np.array([os.path.getsize(p) if os.path.isfile(p) else -1 for p in paths], np.int64)
    missing = [path for path, size in zip(paths, sizes, strict=True) if size < 0]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(paths)} token files missing, first {missing[:5]}; "
            "check source and base, nothing is trained on a part of a mix"
        )
    return sizes


def check_sizes(paths: Sequence[str], sizes: Int64[np.ndarray, " F"], config: DataConfig) -> None:
    """Refuses empty and torn files, and a manifest without any."""
    width = np.dtype(config.dtype).itemsize
    if not len(paths):
        raise ValueError(f"source={config.source} names no token file")
    for path, size in zip(paths, sizes.tolist(), strict=True):
        if size == 0 and not config.skip_empty:
            raise ValueError(f"{path}: 0 bytes, an empty token file; remove it or set skip_empty")
        if size % width:
            raise ValueError(
                f"{path}: {size} bytes is not a multiple of {width} ({config.dtype}); "
                "truncated download or wrong dtype?"
            )


def fingerprint(config: DataConfig, paths: Sequence[str], sizes: Int64[np.ndarray, " F"]) -> str:
    """OLMo-core's identity of a dataset, digit for digit (spec 6.4): no folders, no order seed."""
    fields = {
        "vocab_size": config.vocab_size,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "dtype": f"<class 'numpy.{config.dtype}'>",
        "max_target_sequence_length": config.max_target_sequence_length,
        "bos_token_id": config.bos_id,
    }
    digest = hashlib.sha256(b"class=NumpyFSLDataset")
    digest.update("".join(f"{name}={value}," for name, value in fields.items()).encode())
    for path, size in zip(paths, sizes.tolist(), strict=True):
        digest.update(f"path={path.rsplit('/', 1)[-1]},size={size},".encode())
    return digest.hexdigest()


def read_bytes(path: str, start: int, out: UInt[np.ndarray, "..."]) -> None:
    """Fills `out` with the bytes of a file from `start` on; a short read is an error."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = os.preadv(descriptor, [out.data], start)
    finally:
        os.close(descriptor)
    if done != out.nbytes:
        raise OSError(f"{path}: {done} of {out.nbytes} bytes at {start}; the file was truncated")


def check_ids(ids: UInt[np.ndarray, " n"], path: str, start: int, config: DataConfig) -> None:
    """Refuses ids that the tokenizer cannot have produced; `start` is the offset in tokens."""
    if ids.size and int(ids.max()) >= config.vocab_size:
        where = int(np.argmax(ids >= config.vocab_size))
        hint = "; did you mean dtype=uint16?" if config.dtype == "uint32" else ""
        raise ValueError(
            f"{path}: id {ids[where]} at token {start + where} is not below "
            f"vocab_size={config.vocab_size}{hint}"
        )


@dataclass(frozen=True)
class Dataset:
    """The instances of a list of token files: each is `sequence_length` tokens of one file."""

    config: DataConfig
    paths: tuple[str, ...]
    sizes: Int64[np.ndarray, " F"]
    """Bytes of each file."""
    firsts: Int64[np.ndarray, " F+1"]
    """Number of instances before each file, and in all."""
    fingerprint: str

    @property
    def n_instances(self) -> int:
        return int(self.firsts[-1])

    @property
    def chunk(self) -> int:
        """Neighbouring instances that stay together in the shuffle."""
        config = self.config
        return (config.max_target_sequence_length or config.sequence_length) // (
            config.sequence_length
        )

    def locate(self, instance: int) -> tuple[str, int]:
        """The file of an instance and the instance's first token in it."""
        file = int(np.searchsorted(self.firsts, instance, side="right")) - 1
        return self.paths[file], (instance - int(self.firsts[file])) * self.config.sequence_length

    def read(self, instances: UInt32[np.ndarray, " B"]) -> Batch:
        """Reads instances, checks every id, and makes the targets."""
        config = self.config
        dtype = np.dtype(config.dtype).newbyteorder("<")
        tokens = np.empty((len(instances), config.sequence_length), np.int32)
        raw = tokens.view(dtype) if dtype.itemsize == 4 else np.empty(tokens.shape, dtype)
        targets = np.empty_like(tokens)
        for row, instance in enumerate(instances.tolist()):
            path, start = self.locate(instance)
            read_bytes(path, start * dtype.itemsize, raw[row])
            check_ids(raw[row], path, start, config)
            tokens[row] = raw[row]
            targets[row, :-1] = tokens[row, 1:]
            targets[row, -1] = -1
            if config.filter_repetitions and repeats_too_often(tokens[row]):
                targets[row] = -1
        return Batch(tokens, targets, None, instances)


def open_dataset(config: DataConfig, split: Literal["train", "heldout"] = "train") -> Dataset:
    """Finds, sizes and samples every file; whatever is wrong with them is said here.

    Raises ValueError or FileNotFoundError with one line that names file and numbers.
    """
    paths = list_files(config, split)
    sizes = file_sizes(paths)
    check_sizes(paths, sizes, config)
    longest = config.max_target_sequence_length or config.sequence_length
    tokens = sizes // np.dtype(config.dtype).itemsize
    counts = tokens // longest * (longest // config.sequence_length)
    firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    if firsts[-1] > 2**32:
        raise ValueError(f"{firsts[-1]} instances do not fit OLMo-core's uint32 order")
    for path, count in zip(paths, tokens.tolist(), strict=True):
        sample_file(path, count, config)
    return Dataset(config, tuple(paths), sizes, firsts, fingerprint(config, paths, sizes))


def sample_file(path: str, n_tokens: int, config: DataConfig) -> None:
    """Checks blocks at the start, middle and end of a file for ids that give away a wrong dtype."""
    dtype = np.dtype(config.dtype).newbyteorder("<")
    for start in sorted({0, n_tokens // 2, max(n_tokens - 1024, 0)}):
        ids = np.empty(min(1024, n_tokens - start), dtype)
        read_bytes(path, start * dtype.itemsize, ids)
        check_ids(ids, path, start, config)


class Loader:
    """The batch of every step: a pure function of the dataset, the seed and the step."""

    def __init__(self, dataset: Dataset, config: DataConfig, batch_instances: int):
        self.dataset, self.config, self.batch_instances = dataset, config, batch_instances
        n = dataset.n_instances // dataset.chunk * dataset.chunk
        self.batches_per_epoch = n // batch_instances
        if not self.batches_per_epoch:
            raise ValueError(
                f"dataset has {n} instances of {config.sequence_length} tokens, global batch needs "
                f"{batch_instances}; add data, or lower the batch or sequence_length"
            )
        self.orders: dict[int, UInt32[np.ndarray, " N"]] = {}
        self.lock = threading.Lock()

    def order(self, epoch: int) -> UInt32[np.ndarray, " N"]:
        """The permutation of an epoch, counted from 1: memory-mapped from the cache if it is large.

        At the scale of stage 1 it is 2.9 GB, made once per host and shared by its processes. Its
        name carries the dataset's identity, which OLMo-core's own cache lacks.
        """
        with self.lock:
            if epoch not in self.orders:
                self.orders = {e: o for e, o in self.orders.items() if e >= epoch - 1}
                self.orders[epoch] = self._make_order(epoch)
            return self.orders[epoch]

    def _make_order(self, epoch: int) -> UInt32[np.ndarray, " N"]:
        n, chunk = self.dataset.n_instances, self.dataset.chunk
        seed = self.config.seed + epoch
        if n < 1 << 20:
            return shuffled(n, chunk, seed)
        name = f"order-{self.dataset.fingerprint[:16]}-n{n}-chunk{chunk}-seed{seed}.u4"
        path = Path(self.config.cache).expanduser() / name
        if not path.exists() or path.stat().st_size != n // chunk * chunk * 4:
            with atomic_path(path) as temporary:
                shuffled(n, chunk, seed).astype("<u4", copy=False).tofile(temporary)
        return np.asarray(np.memmap(path, np.dtype("<u4"), "r"))

    def instance_ids(self, step: int) -> UInt32[np.ndarray, " B"]:
        """Ids of the whole global batch of a step, counted from 1, in OLMo-core's order."""
        epoch, batch = divmod(step - 1, self.batches_per_epoch)
        start = batch * self.batch_instances
        return np.array(self.order(epoch + 1)[start : start + self.batch_instances])

    def read_rows(self, step: int, rows: Int64[np.ndarray, " B"]) -> Batch:
        """The given rows of the global batch of a step."""
        return self.dataset.read(self.instance_ids(step)[rows])

    def read(self, step: int, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` of the global batch of a step."""
        return self.read_rows(step, np.arange(start, stop))


class Stream:
    """Reads ahead of the training loop and puts each global batch on the devices.

    The only place where data is sharded: the sharding says which rows this process's devices hold,
    and those are read. At most `read_ahead` batches exist beyond the one in use.
    """

    def __init__(
        self,
        loader: Loader,
        sharding: NamedSharding,
        accumulation: int,
        first_step: int,
        last_step: int,
    ):
        self.loader, self.sharding, self.accumulation = loader, sharding, accumulation
        self.next_step, self.last_step = first_step, last_step
        self.data_seconds = 0.0
        """Seconds that the last `get` waited."""
        if loader.batch_instances % accumulation:
            raise ValueError(
                f"global batch of {loader.batch_instances} instances does not divide into "
                f"{accumulation} micro-batches"
            )
        self.pool = ThreadPoolExecutor(loader.config.read_ahead, thread_name_prefix="data")
        self.pending: dict[int, Future[DeviceBatch]] = {}
        self._submit()

    def _submit(self) -> None:
        while (
            len(self.pending) < self.loader.config.read_ahead and self.next_step <= self.last_step
        ):
            self.pending[self.next_step] = self.pool.submit(self._load, self.next_step)
            self.next_step += 1

    def _load(self, step: int) -> DeviceBatch:
        config, count = self.loader.config, self.accumulation
        n_rows = self.loader.batch_instances // count
        shape = (count, n_rows, config.sequence_length)
        index_map = self.sharding.addressable_devices_indices_map(shape)
        shards = sorted({index[1].indices(n_rows)[:2] for index in index_map.values() if index})
        columns = [np.arange(start, stop) for start, stop in shards]
        rows = [np.arange(count)[:, None] * n_rows + column for column in columns]
        batch = self.loader.read_rows(step, np.concatenate([r.reshape(-1) for r in rows]))
        splits = np.cumsum([r.size for r in rows])[:-1]

        def put(field: np.ndarray) -> Array:
            parts = dict(zip(shards, np.split(field, splits), strict=True))

            def local(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                return parts[index[1].indices(n_rows)[:2]].reshape(count, -1, *field.shape[1:])

            shape = (count, n_rows, *field.shape[1:])
            return jax.make_array_from_callback(shape, self.sharding, local)

        segments = None if batch.segments is None else put(batch.segments)
        return DeviceBatch(put(batch.tokens), put(batch.targets), segments, put(batch.instances))

    def get(self, step: int) -> DeviceBatch:
        """The batch of the next step, in order; errors of the reading threads rise here."""
        started = time.perf_counter()
        batch = self.pending.pop(step).result()
        self._submit()
        self.data_seconds = time.perf_counter() - started
        return batch

    def close(self) -> None:
        """Stops reading and joins the threads."""
        self.pool.shutdown(wait=True, cancel_futures=True)


def documents(paths: Sequence[str], config: DataConfig) -> Iterator[Int32[np.ndarray, " n"]]:
    """The documents of token files: spans that end with EOS; a tail without one is dropped."""
    dtype = np.dtype(config.dtype).newbyteorder("<")
    for path in paths:
        ids = np.fromfile(path, dtype)
        check_ids(ids, path, 0, config)
        start = 0
        for end in (np.flatnonzero(ids == config.eos_id) + 1).tolist():
            yield ids[start:end].astype(np.int32)
            start = end
