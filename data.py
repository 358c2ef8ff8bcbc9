"""Token files to sharded batches, in OLMo-core's order, every instance exactly once an epoch.

    manifest -> files -> instances -> one global order -> batch of step k -> rows of this process

A global batch is a pure function of (manifest, seed, step). Sharding happens in one place,
`Stream`, which reads the rows that this process's devices hold and nothing else. Run as a script,
it indexes, audits, checks, shows and makes token files: `python data.py --help`.

Axes: A accumulation micro-steps, B instances of a (micro-)batch, S positions of an instance,
R documents or pieces of them.
Sources: "spec 6.x" is OLMo-core after 2.5.0, `src/olmo_core/data/`: mixes/__init__.py (manifests),
numpy_dataset.py (instances, fingerprint), data_loader.py (order), utils.py (filter, packing).
"""

import contextlib
import csv
import dataclasses
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
import tensorstore as ts
import tyro
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int32, Int64, Integer, UInt, UInt8, UInt32


@dataclass(frozen=True)
class DataConfig:
    """Which tokens, cut how, in which order."""

    source: Annotated[str, tyro.conf.arg(aliases=["--manifest", "--index"])] = "stdlib"
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
    pack_group: int = 8
    """Neighbouring files that are packed together."""
    pack_seed: int | None = 123
    """Permutes the files before they are grouped for packing; none keeps the manifest's order."""
    long_documents: Literal["truncate", "fragment"] = "truncate"
    """What packing does with documents above sequence_length."""
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
                f"max_target_sequence_length={longest} must be a multiple of "
                f"sequence_length={self.sequence_length}, which must be at least 2"
            )
        vocab_size, most = self.vocab_size, 2 ** (8 * np.dtype(self.dtype).itemsize)
        if not 0 <= max(self.eos_id, self.pad_id) < vocab_size <= most:
            raise ValueError(
                f"eos_id={self.eos_id} and pad_id={self.pad_id} must be below {vocab_size=}, and "
                f"that at most the {most} ids of dtype={self.dtype}"
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
    before, so mismatches that far apart decide. Most periods are ruled out by an eighth of a run.
    """

    def longest_run(same: Bool[np.ndarray, " n"]) -> int:
        edges = np.flatnonzero(~same)
        return int(np.diff(edges, prepend=-1, append=len(same)).max()) - 1

    for period in range(periods[0], min(periods[1], len(tokens) // 3) + 1):
        run, later, earlier = (count - 1) * period, tokens[period:], tokens[:-period]
        step = max(run // 8, 1)  # a run of that length holds so many of every step-th position
        likely = longest_run(later[::step] == earlier[::step]) >= run // step
        if likely and longest_run(later == earlier) >= run:
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


def pack(lengths: Int64[np.ndarray, " R"], capacity: int) -> list[list[int]]:
    """Puts documents into as few instances as best-fit-decreasing does (spec 6.6).

    Longest first, each into the instance with the least room that suffices, among equals the one
    that got this room first. Returns the documents of each instance. Equal lengths keep their
    order: the reference sorts them unstably, so there it depends on the machine (spec T25).
    """
    instances: list[list[int]] = []
    by_room: defaultdict[int, deque[int]] = defaultdict(deque)
    rooms = 0  # bit r is set while some instance has room for exactly r more tokens
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            instance = by_room[room].popleft()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, instance = capacity, len(instances)
            instances.append([])
        instances[instance].append(document)
        if room > length:
            by_room[room - length].append(instance)
            rooms |= 1 << room - length
    return instances


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


def embedded_corpus(cache: str, split: str) -> list[str]:
    """Token files of the embedded corpus, made at first use and kept under `cache`.

    Its documents are the standard library's sources, without tests, and Python's own help texts,
    as bytes. A hash of a document's name decides where it goes: 5 % are held out, and domains mix.
    The folder is named by a hash of all of them, so another Python has another one.
    """
    from pydoc_data import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    texts = {f"help/{name}": text.encode() for name, text in topics.topics.items()}
    for path in root.rglob("*.py"):
        if not skipped & set(path.relative_to(root).parts):
            texts[str(path.relative_to(root))] = path.read_bytes()
    if len(texts) < 500:
        raise FileNotFoundError(f"source=stdlib: no sources in {root}; name token files instead")
    places = sorted((hashlib.sha256(name.encode()).digest(), text) for name, text in texts.items())
    identity = hashlib.sha256(b"".join(place + hashlib.sha256(t).digest() for place, t in places))
    folder = Path(cache).expanduser() / f"stdlib-{identity.hexdigest()[:16]}"
    paths = [folder / f"part-{shard:02}.npy" for shard in range(20)]
    for shard, path in enumerate(paths):
        if not path.exists():
            ids: list[int] = []
            for place, text in places:
                if place[-1] * 20 // 256 == shard:
                    ids += [*text, EMBEDDED_EOS]
            with atomic_path(path) as temporary:
                np.array(ids, "<u4").tofile(temporary)
    return [str(path) for path in (paths[19:] if split == "heldout" else paths[:19])]


class Request(NamedTuple):
    """Bytes of a file that are wanted from `start` on, as many as `out` holds."""

    path: str
    start: int
    out: UInt[np.ndarray, "..."]


class Files:
    """Byte ranges of files wherever they are: preadv on this machine, else TensorStore.

    S3-compatible servers elsewhere than at Amazon are found through AWS_ENDPOINT_URL.
    """

    def __init__(self, tries: int = 8, timeout_seconds: float = 30.0, concurrency: int = 64):
        self.tries, self.timeout_seconds, self.concurrency = tries, timeout_seconds, concurrency
        self.stores: dict[str, ts.KvStore] = {}

    def _store(self, url: str) -> tuple[ts.KvStore, str]:
        scheme, rest = url.split("://", 1)
        host, _, key = rest.partition("/")
        root = f"{scheme}://{host}/"
        if root not in self.stores:
            # Retrying is ours alone, so that a stalled or short answer is retried like any other.
            once = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
            drivers = ("http", "s3", "gcs")
            context = {f"{d}_request_concurrency": {"limit": self.concurrency} for d in drivers}
            context |= {f"{driver}_request_retries": once for driver in drivers}
            spec: str | dict = root
            if scheme == "s3" and (endpoint := os.environ.get("AWS_ENDPOINT_URL")):
                region = os.environ.get("AWS_REGION", "us-east-1")
                spec = {"driver": "s3", "bucket": host, "endpoint": endpoint, "aws_region": region}
            self.stores[root] = ts.KvStore.open(spec, context=ts.Context(context)).result()
        return self.stores[root], key

    def _attempts(self) -> Iterator[int]:
        """Counts tries, after pauses that double, with jitter so that hosts do not come in step."""
        for attempt in range(self.tries):
            if attempt:
                time.sleep(random.uniform(0.5, 1.0) * min(0.1 * 2**attempt, 10.0))
            yield attempt

    def read(self, requests: Sequence[Request], final: tuple[str, ...] = ()) -> None:
        """Fills every request or raises OSError; never leaves a short read behind.

        Remote ranges are in flight together, and what fails is asked for again, unless the error
        is final: then no repetition can help.
        """
        final += ("FAILED_PRECONDITION", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT")
        waiting, error, attempts = [], "", self._attempts()
        for request in requests:
            if "://" in request.path:
                waiting.append(request)
            else:
                read_local(request)
        while waiting:
            if next(attempts, None) is None:
                where = f"{waiting[0].path} at byte {waiting[0].start}"
                raise OSError(f"{where}: failed {self.tries} times, at last {error}")
            deadline, flights = time.monotonic() + self.timeout_seconds, []
            for path, start, out in waiting:
                store, key = self._store(path)
                flights.append(store.read(key, byte_range=slice(start, start + out.nbytes)))
            asked, waiting = waiting, []
            for request, flight in zip(asked, flights, strict=True):
                try:
                    result = flight.result(timeout=max(deadline - time.monotonic(), 0.001))
                    if result.state == "missing":
                        raise FileNotFoundError(f"{request.path}: no such file")
                    # A memoryview takes no other number of bytes, where numpy might broadcast.
                    request.out.reshape(-1).view(np.uint8).data[:] = result.value
                except (ValueError, TimeoutError) as failure:
                    flight.cancel()
                    error = str(failure) or f"no answer in {self.timeout_seconds} s"
                    waiting.append(request)
                    if error.startswith(final):
                        raise OSError(f"{request.path} at byte {request.start}: {error}") from None

    def size(self, path: str) -> int:
        """Bytes of a file, -1 if there is none."""
        if "://" not in path:
            return os.path.getsize(path) if os.path.isfile(path) else -1
        if not path.startswith("http"):
            return self._probe(path)
        error = ""
        for _ in self._attempts():
            request = urllib.request.Request(path, method="HEAD")
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_seconds) as answer:
                    return int(answer.headers["Content-Length"])
            except OSError as failure:
                error = str(failure)
                if isinstance(failure, urllib.error.HTTPError):
                    failure.close()
                    if failure.code in (404, 410):
                        return -1
                    if failure.code < 500 and failure.code not in (408, 429):
                        break
        raise OSError(f"{path}: asking for its size failed, at last {error}")

    def _probe(self, url: str) -> int:
        """Size where TensorStore tells none: a refusal may name it, else bisection finds it."""
        low, high, middle = 0, 1 << 44, (1 << 44) - 1
        while low < high:
            try:
                self.read([Request(url, middle, np.empty(1, np.uint8))], ("OUT_OF_RANGE",))
                low = middle + 1
            except FileNotFoundError:
                return -1
            except OSError as failure:
                if "OUT_OF_RANGE" not in str(failure):
                    raise
                if told := re.search(r"<ActualObjectSize>(\d+)", str(failure)):
                    return int(told[1])
                high = middle
            middle = (low + high) // 2
        return low

    def whole(self, path: str) -> UInt8[np.ndarray, " bytes"]:
        """All bytes of a file."""
        out, step = np.empty(max(self.size(path), 0), np.uint8), 1 << 24
        self.read([Request(path, i, out[i : i + step]) for i in range(0, max(len(out), 1), step)])
        return out


def read_local(request: Request) -> None:
    """Reads from a file on this machine."""
    path, start, out = request
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = os.preadv(descriptor, [out.data], start) if out.nbytes else 0
    finally:
        os.close(descriptor)
    if done != out.nbytes:
        raise OSError(f"{path} at byte {start}: {done} of {out.nbytes} bytes; was it truncated?")


def tokenizer_folder(manifest: str, tokenizer: str) -> str:
    """What {TOKENIZER} stands for in a published manifest (spec 6.1)."""
    validation = ("v3-small-ppl-validation", "c4-ppl-validation", "code-fresh-ppl-validation")
    official = ("OLMo-mix-0625-official", "OLMo-mix-0925-official")
    later = ("OLMo-midtraining-mix-0", "OLMo-longmino-mix-0")
    stem = Path(manifest).stem
    if tokenizer == "allenai/dolma2-tokenizer":
        if stem in validation:
            return "dolma2-tokenizer"
        if stem in official or stem.startswith(later):
            return "allenai/dolma3-tokenizer"
    return tokenizer


def read_manifest(config: DataConfig) -> list[str]:
    """The files of a manifest of `label,path` lines, in its order, as full paths or URLs."""
    lines = Path(config.source).read_text(encoding="utf-8").splitlines()
    rows = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for row in rows:
        if "," not in row:
            raise ValueError(f"source={config.source}: {row!r} is not a `label,path` line")
    base = config.base or str(Path(config.source).parent)
    folder = tokenizer_folder(config.source, config.tokenizer)
    paths = [row.split(",", 1)[1].strip().replace("{TOKENIZER}", folder) for row in rows]
    return [f"{base.rstrip('/')}/{path}" for path in paths]


def list_files(config: DataConfig, split: str = "train") -> list[str]:
    """The token files that `source` names, in dataset order; only stdlib has a split of its own."""
    source = config.source
    if source == "stdlib":
        wanted = (EMBEDDED_EOS, EMBEDDED_PAD, EMBEDDED_VOCAB, "uint32")
        if (config.eos_id, config.pad_id, config.vocab_size, config.dtype) != wanted:
            raise ValueError(
                f"eos_id={config.eos_id}, pad_id={config.pad_id}, vocab_size={config.vocab_size}, "
                f"dtype={config.dtype} must be {wanted} for source=stdlib, which is bytes; set "
                "them, or name other token files"
            )
        return embedded_corpus(config.cache, split)
    if source.endswith((".json", ".txt")) and not Path(source).is_file():
        raise FileNotFoundError(f"source={source}: no such index or manifest")
    if source.endswith(".json"):
        return read_index(config)[1]
    if source.endswith(".txt"):
        paths = read_manifest(config)
    else:
        parts = [os.path.expanduser(part) for part in source.split(",") if part]
        paths = [p for part in parts for p in sorted(glob.glob(part, recursive=True)) or [part]]
    if not paths:
        raise ValueError(f"source={source} names no token file; expected a manifest or a glob")
    if config.packed and config.pack_seed is not None:
        random.Random(config.pack_seed).shuffle(paths)  # numpy_dataset.py:2465
    return paths


def measure(files: Files, paths: Sequence[str], config: DataConfig) -> Int64[np.ndarray, " F"]:
    """Bytes of every file; whatever is missing, empty or torn is reported, never left out."""
    sizes = np.empty(len(paths), np.int64)
    with ThreadPoolExecutor(files.concurrency) as pool:
        remote = any("://" in path for path in paths)
        for i, size in enumerate((pool.map if remote else map)(files.size, paths)):
            sizes[i] = size
            if remote and (i % 100 == 99 or i + 1 == len(paths)) and sys.stderr.isatty():
                print(f"\rsized {i + 1:,} of {len(paths):,} files", end="", file=sys.stderr)
    for bad, what, error in (
        (sizes < 0, "missing; check source and base, nothing runs on a part", FileNotFoundError),
        (sizes == 0, "empty; remove them or set skip_empty", ValueError),
    ):
        names = [path for path, is_bad in zip(paths, bad, strict=True) if is_bad]
        if names and not (config.skip_empty and error is ValueError):
            raise error(f"{len(names)} of {len(paths)} token files {what}: {', '.join(names[:5])}")
    width = np.dtype(config.dtype).itemsize
    torn = [f"{paths[i]}: {sizes[i]} bytes" for i in np.flatnonzero(sizes % width).tolist()]
    if torn:
        raise ValueError(
            f"{', '.join(torn[:5])} is not a multiple of {width} ({config.dtype}), "
            f"{len(torn)} of {len(paths)} files; truncated download or wrong dtype?"
        )
    return sizes


def fingerprint(config: DataConfig, paths: Sequence[str], sizes: Int64[np.ndarray, " F"]) -> str:
    """OLMo-core's identity of a dataset, digit for digit (spec 6.4): no folders, no order seed."""
    fields: dict[str, object] = {
        "vocab_size": config.vocab_size,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "dtype": f"<class 'numpy.{config.dtype}'>",
    }
    if not config.packed:
        fields["max_target_sequence_length"] = config.max_target_sequence_length
        fields["bos_token_id"] = config.bos_id
    else:
        fields["long_doc_strategy"] = config.long_documents
        fields["bos_token_id"] = config.bos_id
        fields["sequence_length"] = config.sequence_length
        if config.pack_group > 1:
            fields["source_group_size"] = config.pack_group
    digest = hashlib.sha256(f"class=Numpy{'Packed' * config.packed}FSLDataset".encode())
    digest.update("".join(f"{name}={value}," for name, value in fields.items()).encode())
    for path, size in zip(paths, sizes.tolist(), strict=True):
        digest.update(f"path={path.rsplit('/', 1)[-1]},size={size},".encode())
    return digest.hexdigest()


INDEX_FIELDS = (
    *("sequence_length", "max_target_sequence_length", "tokenizer", "vocab_size", "eos_id"),
    *("pad_id", "bos_id", "dtype", "packed", "pack_group", "pack_seed", "long_documents"),
)


def write_index(
    out: Path, config: DataConfig, paths: Sequence[str], sizes: Int64[np.ndarray, " F"]
) -> None:
    """Writes what there is to know about token files without asking for them again."""
    index = {
        "format": "olmo3-equinox data index 1",
        "fingerprint": fingerprint(config, paths, sizes),
        "config": {name: getattr(config, name) for name in INDEX_FIELDS},
        "files": list(zip(paths, sizes.tolist(), strict=True)),
    }
    with atomic_path(out) as temporary:
        temporary.write_text(json.dumps(index, indent=0))


def read_index(
    config: DataConfig, follow: bool = False
) -> tuple[DataConfig, list[str], Int64[np.ndarray, " F"]]:
    """Configuration, paths and sizes of an index; refuses one made for another configuration.

    With `follow`, fields left at their defaults take the values of the index.
    """
    with contextlib.suppress(json.JSONDecodeError):
        index, default = json.loads(Path(config.source).read_text(encoding="utf-8")), DataConfig()
        if index.get("format") == "olmo3-equinox data index 1":
            for name, old in index["config"].items():
                if old == (new := getattr(config, name)):
                    continue
                if not follow or new != getattr(default, name):
                    raise ValueError(f"{name}={new}, but index {config.source} has {old}")
            config = dataclasses.replace(config, **index["config"])
            paths = [path for path, _ in index["files"]]
            sizes = np.array([size for _, size in index["files"]], np.int64)
            if fingerprint(config, paths, sizes) == index["fingerprint"]:
                return config, paths, sizes
    raise ValueError(f"source={config.source} is no sound index; make one with data.py index")


def check_ids(ids: UInt[np.ndarray, " n"], path: str, start: int, config: DataConfig) -> None:
    """Refuses ids that the tokenizer cannot have produced; `start` is the offset in bytes."""
    if ids.size and int(ids.max()) >= config.vocab_size:
        where = int(np.argmax(ids >= config.vocab_size))
        hint = "; did you mean dtype=uint16?" if config.dtype == "uint32" else ""
        raise ValueError(
            f"{path}: id {ids[where]} at token {start // ids.itemsize + where} is not below "
            f"vocab_size={config.vocab_size}{hint}"
        )


def sample(
    files: Files, paths: Sequence[str], sizes: Int64[np.ndarray, " F"], config: DataConfig
) -> None:
    """Finds a wrong dtype, vocabulary or server before training, by reading a little of all files.

    Local ones at the start, middle and end, remote ones at the start.
    """
    dtype = np.dtype(config.dtype).newbyteorder("<")
    requests = []
    for path, size in zip(paths, sizes.tolist(), strict=True):
        n = size // dtype.itemsize
        for start in [0] if "://" in path else sorted({0, n // 2, max(n - 1024, 0)}):
            out = np.empty(min(1024, n - start), dtype)
            requests.append(Request(path, start * dtype.itemsize, out))
    files.read([request for request in requests if request.out.size])
    for path, start, ids in requests:
        check_ids(ids, path, start, config)
        if config.dtype == "uint16" and ids.size > 8 and np.mean(ids == 0) > 0.4:
            warnings.warn(f"{path}: mostly zeros as uint16; is it dtype=uint32?", stacklevel=2)


def document_spans(
    files: Files, path: str, size: int, config: DataConfig
) -> Int64[np.ndarray, "R 2"]:
    """First and past-the-last token of every document of a file.

    Local files are scanned for EOS, and a tail without one is no document. For remote files the
    sibling .csv.gz says where documents are, as for the reference (spec 6.6).
    """
    if "://" in path:
        table = gzip.decompress(files.whole(path.removesuffix(".npy") + ".csv.gz").data)
        rows = [row[:2] for row in csv.reader(io.StringIO(table.decode()))]
        return np.array(rows, np.int64).reshape(-1, 2)
    if not size:
        return np.empty((0, 2), np.int64)
    ids = np.memmap(path, np.dtype(config.dtype).newbyteorder("<"), "r")
    ends = np.flatnonzero(ids == config.eos_id) + 1
    return np.stack([np.concatenate([[0], ends[:-1]]), ends], 1).astype(np.int64)[: len(ends)]


class Packing(NamedTuple):
    """Which spans of which files make up each packed instance."""

    firsts: Int64[np.ndarray, " N+1"]
    """Where the spans of each instance begin in the columns below, and their number."""
    files: Int32[np.ndarray, " R"]
    starts: Int64[np.ndarray, " R"]
    lengths: Int32[np.ndarray, " R"]


def pack_files(
    files: Files, paths: Sequence[str], sizes: Int64[np.ndarray, " F"], config: DataConfig
) -> Packing:
    """Packs the documents of each group of neighbouring files (spec 6.6)."""
    limit = config.sequence_length
    counts, columns = [np.zeros(1, np.int64)], []
    for first in range(0, len(paths), config.pack_group):
        spans = []
        for file in range(first, min(first + config.pack_group, len(paths))):
            edges = document_spans(files, paths[file], int(sizes[file]), config)
            start, length = edges[:, 0], edges[:, 1] - edges[:, 0]
            if config.long_documents == "fragment":
                pieces = -(-length // limit)
                piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
                start = np.repeat(start, pieces) + piece * limit
                length = np.repeat(length, pieces) - piece * limit
            length = np.minimum(length, limit)
            spans.append(np.stack([np.full_like(start, file), start, length]))
        spans = np.concatenate(spans, 1)
        instances = pack(spans[2], limit)
        counts.append(np.array([len(instance) for instance in instances], np.int64))
        columns.append(spans[:, [span for instance in instances for span in instance]])
    files_, starts, lengths = np.concatenate(columns, 1)
    firsts = np.cumsum(np.concatenate(counts))
    return Packing(firsts, files_.astype(np.int32), starts, lengths.astype(np.int32))


def aligned_empty(shape: tuple[int, ...]) -> Int32[np.ndarray, "..."]:
    """Memory on a 64-byte boundary, which JAX takes over on CPU devices instead of copying it."""
    out = np.empty(4 * math.prod(shape) + 64, np.uint8)
    start = -out.ctypes.data % 64
    return out[start : start + len(out) - 64].view(np.int32).reshape(shape)


@dataclass(frozen=True)
class Dataset:
    """The instances of token files: `sequence_length` tokens of one, or packed documents."""

    config: DataConfig
    files: Files
    paths: tuple[str, ...]
    sizes: Int64[np.ndarray, " F"]
    """Bytes of each file."""
    firsts: Int64[np.ndarray, " F+1"]
    """Number of instances before each file, and in all; packed instances have no file."""
    packing: Packing | None
    fingerprint: str

    @property
    def n_instances(self) -> int:
        return int(self.firsts[-1]) if self.packing is None else len(self.packing.firsts) - 1

    @property
    def chunk(self) -> int:
        """Neighbouring instances that stay together in the shuffle."""
        longest = self.config.max_target_sequence_length or self.config.sequence_length
        return 1 if self.config.packed else longest // self.config.sequence_length

    def spans(self, instance: int) -> list[tuple[int, int, int]]:
        """File, first token and number of tokens of each piece of an instance."""
        length = self.config.sequence_length
        if self.packing is None:
            file = int(self.firsts.searchsorted(instance, "right")) - 1
            return [(file, (instance - int(self.firsts[file])) * length, length)]
        firsts, *columns = self.packing
        here = slice(firsts[instance], firsts[instance + 1])
        return list(zip(*(column[here].tolist() for column in columns), strict=True))

    def read(self, instances: UInt32[np.ndarray, " B"]) -> Batch:
        """Reads instances, checks every id, and makes targets and segments."""
        config = self.config
        dtype = np.dtype(config.dtype).newbyteorder("<")
        tokens, targets = aligned_empty((2, len(instances), config.sequence_length))
        raw = tokens.view(dtype) if dtype.itemsize == 4 else tokens.astype(dtype)
        requests, lengths = [], []
        for row, instance in enumerate(instances.tolist()):
            end = 0
            for file, start, count in self.spans(instance):
                out = raw[row, end : end + count]
                requests.append(Request(self.paths[file], start * dtype.itemsize, out))
                end += count
            raw[row, end:] = config.pad_id
            lengths.append(end)
        self.files.read(requests)
        for path, start, ids in requests:
            check_ids(ids, path, start, config)
        if dtype.itemsize != 4:
            tokens[:] = raw
        targets[:, :-1] = tokens[:, 1:]
        for row, length in enumerate(lengths):
            rejected = config.filter_repetitions and repeats_too_often(tokens[row])
            targets[row, 0 if rejected else length - 1 :] = -1
        if not config.packed:
            return Batch(tokens, targets, None, instances)
        ends = tokens == config.eos_id
        return Batch(tokens, targets, np.cumsum(ends, 1, np.int32) - ends, instances)


def make_dataset(
    config: DataConfig, files: Files, paths: Sequence[str], sizes: Int64[np.ndarray, " F"]
) -> Dataset:
    """The instances of files whose sizes are known; only packing looks into them."""
    longest = config.max_target_sequence_length or config.sequence_length
    counts = sizes // np.dtype(config.dtype).itemsize // longest
    counts = np.concatenate([np.zeros(1, np.int64), counts * (longest // config.sequence_length)])
    identity, packing = fingerprint(config, paths, sizes), None
    if config.packed:
        cached = Path(config.cache).expanduser() / f"packing-{identity[:16]}.npz"
        if not cached.exists():
            with atomic_path(cached) as temporary, temporary.open("wb") as file:
                np.savez(file, *pack_files(files, paths, sizes, config))
        with np.load(cached) as columns:
            packing = Packing(*(columns[name] for name in columns.files))
    dataset = Dataset(config, files, tuple(paths), sizes, np.cumsum(counts), packing, identity)
    if dataset.n_instances > 2**32:
        raise ValueError(f"{dataset.n_instances} instances do not fit OLMo-core's uint32 order")
    return dataset


def open_dataset(config: DataConfig, split: Literal["train", "heldout"] = "train") -> Dataset:
    """Finds, sizes and samples every file; whatever is wrong with them is said here.

    With an index, remote files are taken to be as it says and local ones are compared with it.
    Raises ValueError or OSError with one line that names file and numbers.
    """
    files, paths = Files(), list_files(config, split)
    if not config.source.endswith(".json"):
        sizes = measure(files, paths, config)
        sample(files, paths, sizes, config)
        return make_dataset(config, files, paths, sizes)
    sizes = read_index(config)[2]
    local = [i for i, path in enumerate(paths) if "://" not in path]
    here = [paths[i] for i in local]
    for path, new, old in zip(here, measure(files, here, config), sizes[local], strict=True):
        if new != old:
            raise ValueError(f"{path}: {new} bytes, index {config.source} has {old}; index again")
    sample(files, here, sizes[local], config)
    return make_dataset(config, files, paths, sizes)


@dataclass(frozen=True)
class Cursor:
    """Where a run stands in its data, and in which; a checkpoint keeps it."""

    fingerprint: str
    seed: int
    sequence_length: int
    batch_instances: int
    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 1
    batches: int = 0
    """Batches of `batch_instances` consumed in this epoch."""


def resumed(old: Cursor, new: Cursor, allow_data_change: bool) -> Cursor:
    """The position of `old` in the data of `new`.

    Another batch size goes on at the same token, rounded down to a batch (spec 6.4). Anything that
    changes the order is refused unless allowed, and then said.
    """
    names = ("fingerprint", "seed", "sequence_length", "batch_instances")
    changes = [
        f"{name}: {getattr(old, name)} -> {getattr(new, name)}"
        for name in names
        if getattr(old, name) != getattr(new, name)
    ]
    if changes and not allow_data_change:
        raise ValueError(
            f"data changed since the checkpoint ({'; '.join(changes)}); restore it, or set "
            "allow_data_change to go on in another order"
        )
    if [change for change in changes if not change.startswith("batch_instances")]:
        warnings.warn(f"order will differ from here on: {'; '.join(changes)}", stacklevel=3)
    tokens = old.batches * old.batch_instances * old.sequence_length
    batches = tokens // (new.batch_instances * new.sequence_length)
    return dataclasses.replace(new, step=old.step, epoch=old.epoch, batches=batches)


class Loader:
    """The batch of every step: a pure function of the dataset, the seed and the step."""

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        batch_instances: int,
        resume: Cursor | None = None,
        allow_data_change: bool = False,
    ):
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
        now = Cursor(dataset.fingerprint, config.seed, config.sequence_length, batch_instances)
        self.start = now if resume is None else resumed(resume, now, allow_data_change)

    def order(self, epoch: int) -> UInt32[np.ndarray, " N"]:
        """The permutation of an epoch, counted from 1: memory-mapped from the cache if it is large.

        At the scale of stage 1 it is 2.9 GB, made once per host and shared by its processes. Its
        name carries the dataset's identity, which OLMo-core's own cache lacks (spec T19).
        """
        n, chunk = self.dataset.n_instances, self.dataset.chunk
        seed = self.config.seed + epoch
        with self.lock:
            if epoch in self.orders:
                return self.orders[epoch]
            if n < 1 << 20:
                order = shuffled(n, chunk, seed)
            else:
                name = f"order-{self.dataset.fingerprint[:16]}-n{n}-chunk{chunk}-seed{seed}.u4"
                path = Path(self.config.cache).expanduser() / name
                if not path.exists() or path.stat().st_size != n // chunk * chunk * 4:
                    with atomic_path(path) as temporary:
                        shuffled(n, chunk, seed).astype("<u4", copy=False).tofile(temporary)
                order = np.asarray(np.memmap(path, np.dtype("<u4"), "r"))
            self.orders.pop(epoch - 2, None)
            self.orders[epoch] = order
            return order

    def ids(
        self, steps: Int64[np.ndarray, " K"], rows: Int64[np.ndarray, " B"]
    ) -> UInt32[np.ndarray, "K B"]:
        """Instances of the given rows of the global batches of steps, counted from 1."""
        batches = self.start.batches + steps - self.start.step - 1
        epochs, batches = np.divmod(batches, self.batches_per_epoch)
        out = np.empty((len(steps), len(rows)), np.uint32)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places = batches[here, None] * self.batch_instances + rows
            out[here] = self.order(self.start.epoch + epoch)[places]
        return out

    def instance_ids(self, step: int) -> UInt32[np.ndarray, " B"]:
        """Ids of the whole global batch of a step, in OLMo-core's order."""
        return self.ids(np.array([step]), np.arange(self.batch_instances))[0]

    def read(self, step: int, rows: Int64[np.ndarray, " B"]) -> Batch:
        """The given rows of the global batch of a step."""
        return self.dataset.read(self.ids(np.array([step]), rows)[0])

    def cursor(self, step: int) -> Cursor:
        """What to keep so that another process goes on behind `step`."""
        taken = self.start.batches + step - self.start.step
        epochs, last = divmod(max(taken - 1, 0), self.batches_per_epoch)
        batches = last + 1 if taken else 0
        epoch = self.start.epoch + epochs
        return dataclasses.replace(self.start, step=step, epoch=epoch, batches=batches)


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
        ahead = self.loader.config.read_ahead
        while len(self.pending) < ahead and self.next_step <= self.last_step:
            self.pending[self.next_step] = self.pool.submit(self._load, self.next_step)
            self.next_step += 1

    def _load(self, step: int) -> DeviceBatch:
        config, count = self.loader.config, self.accumulation
        n_rows = self.loader.batch_instances // count
        shape = (count, n_rows, config.sequence_length)
        index_map = self.sharding.addressable_devices_indices_map(shape)
        shards = sorted({index[1].indices(n_rows)[:2] for index in index_map.values() if index})
        micro = np.arange(count)[:, None] * n_rows
        rows = [(micro + np.arange(start, stop)).reshape(-1) for start, stop in shards]
        batch = self.loader.read(step, np.concatenate(rows))
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
    files, dtype = Files(), np.dtype(config.dtype).newbyteorder("<")
    for path in paths:
        ids = files.whole(path).view(dtype)
        check_ids(ids, path, 0, config)
        start = 0
        for end in (np.flatnonzero(ids == config.eos_id) + 1).tolist():
            yield ids[start:end].astype(np.int32)
            start = end


def index(config: tyro.conf.OmitArgPrefixes[DataConfig], out: Path) -> None:
    """Sizes every file of a manifest, wherever it lies, and writes an index to `out`."""
    files, paths = Files(), list_files(config)
    sizes = measure(files, paths, config)
    sample(files, paths, sizes, config)
    write_index(out, config, paths, sizes)
    tokens = int(sizes.sum()) // np.dtype(config.dtype).itemsize
    print(f"{out}: {len(paths):,} files, {tokens:,} tokens")


def known_dataset(config: DataConfig) -> Dataset:
    """A dataset without a look at its files if it comes from an index, and as that was made."""
    if not config.source.endswith(".json"):
        return open_dataset(config)
    config, paths, sizes = read_index(config, follow=True)
    return make_dataset(config, Files(), paths, sizes)


def order(
    config: tyro.conf.OmitArgPrefixes[DataConfig],
    batch: int,
    step: int = 1,
    steps: int = 1,
    processes: str = "1",
) -> None:
    """Prints the instances of steps, a line for each process, and the hash of each step.

    Args:
        batch: Instances of a global batch.
        step: First step to print, from 1.
        steps: How many steps.
        processes: Process counts, such as 1,8.
    """
    dataset = known_dataset(config)
    loader = Loader(dataset, dataset.config, batch)
    for number in range(step, step + steps):
        ids = loader.instance_ids(number)
        print(f"step {number} data_hash {format_hash(instance_hash(ids))}")
        for n in process_counts(processes, batch):
            for process, rows in enumerate(np.split(np.arange(batch), n)):
                mine = loader.ids(np.array([number]), rows)[0]
                print(f"  process {process} of {n}: {' '.join(map(str, mine))}")


def process_counts(text: str, batch: int) -> list[int]:
    """The numbers of a comma-separated list that a batch divides over."""
    counts = [int(part) for part in text.split(",")]
    for n in counts:
        if n < 1 or batch % n:
            raise ValueError(f"processes={n} does not divide batch={batch}; choose a divisor")
    return counts


def audit(
    config: tyro.conf.OmitArgPrefixes[DataConfig],
    batch: int = 512,
    processes: str = "1,2,8,32",
    epochs: int = 1,
    run: Path | None = None,
) -> None:
    """Proves the order on an index, without its tokens, or checks what a run consumed.

    Args:
        batch: Instances of a global batch.
        processes: Process counts to compare, such as 1,8.
        epochs: Epochs to walk through.
        run: A run directory, whose logged data_hash of every step is compared with the order.
    """
    if run is not None:
        fault, proof = audit_run(run)
    else:
        dataset = known_dataset(config)
        counts, orders = process_counts(processes, batch), {}

        def make(process: int, n: int, resume: Cursor | None) -> Loader:
            loader = Loader(dataset, dataset.config, batch, resume)
            loader.orders = orders  # or the same 2.9 GB would be mapped dozens of times
            return loader

        fault, proof = audit_order(make, counts, epochs)
    print(fault or proof)
    if fault:
        sys.exit(1)


def audit_order(
    make: Callable[[int, int, Cursor | None], Loader], processes: Sequence[int], epochs: int
) -> tuple[str | None, str]:
    """The first counterexample to an exact order, or none, and what was looked at.

    `make(process, n_processes, cursor)` gives the loader of one process. Every epoch must visit
    every instance once, the rows of any number of processes must be those of one process, and
    loaders that resume, with any process count, must go on with the same instances.
    """
    one = make(0, 1, None)
    batch, per_epoch, n = one.batch_instances, one.batches_per_epoch, one.dataset.n_instances
    last, every = epochs * per_epoch, np.arange(batch)

    def loaders(resume: Cursor | None) -> dict[int, list[tuple[Loader, np.ndarray]]]:
        rows = {p: enumerate(np.split(every, p)) for p in processes}
        return {p: [(make(i, p, resume), mine) for i, mine in rows[p]] for p in processes}

    def compare(steps: np.ndarray, ids: np.ndarray, split: dict) -> str | None:
        for p, parts in split.items():
            got = np.concatenate([loader.ids(steps, mine) for loader, mine in parts], 1)
            for k, row in np.argwhere(got != ids)[:1].tolist():
                there = f"instance {got[k, row]}, with one process it is {ids[k, row]}"
                return f"step {steps[k]}, {p} processes: row {row} is {there}"
        return None

    whole, block = loaders(None), max((1 << 21) // batch, 1)
    for first in range(1, last + 1, per_epoch):
        seen = np.zeros(n, bool)
        for start in range(first, first + per_epoch, block):
            steps = np.arange(start, min(start + block, first + per_epoch))
            ids = one.ids(steps, every)
            flat = np.sort(ids, axis=None)
            twice = np.concatenate([flat[seen[flat]], flat[1:][flat[1:] == flat[:-1]]])
            if twice.size:
                step = int(steps[np.flatnonzero((ids == twice[0]).any(1))[-1]])
                return f"step {step}: instance {twice[0]} a second time in one epoch", ""
            seen[flat] = True
            if fault := compare(steps, ids, whole):
                return fault, ""
    for step in sorted({1, per_epoch, *random.Random(0).choices(range(1, last + 1), k=4)}):
        steps = np.arange(step + 1, step + 3)
        if fault := compare(steps, one.ids(steps, every), loaders(one.cursor(step))):
            return f"after resuming at step {step}: {fault}", ""
    return None, (
        f"ok: each of {epochs} epochs of {per_epoch:,} steps visits {per_epoch * batch:,} of {n:,} "
        f"instances once (the rest fill no batch), alike for {list(processes)} processes"
    )


def audit_run(run: Path) -> tuple[str | None, str]:
    """Compares every data_hash in a run's metrics.jsonl with the order of its config.json."""
    saved = json.loads((run / "config.json").read_text())
    dataset = open_dataset(DataConfig(**saved["data"]))
    loader = Loader(dataset, dataset.config, saved["batch_instances"])
    if saved.get("fingerprint", dataset.fingerprint) != dataset.fingerprint:
        return f"{run}: the files are not those of the run: {dataset.fingerprint}", ""
    steps, previous = {}, None
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # a run that is killed may leave half a line
            continue
        if "cursor" in row:
            cursor = Cursor(**row["cursor"])
            loader = Loader(dataset, dataset.config, cursor.batch_instances, cursor)
        if row.get("event") == "start":
            previous = None
        if "data_hash" not in row:
            continue
        step, got = row["step"], row["data_hash"]
        if previous is not None and step != previous + 1:
            return f"step {step} follows step {previous} without a restart", ""
        want = format_hash(instance_hash(loader.instance_ids(step)))
        if got != want:
            earlier = f"; it is the batch of step {steps[got]} again" if got in steps else ""
            return f"step {step}: data_hash {got} in the log, {want} in the order{earlier}", ""
        steps[got], previous = step, step
    return None, f"ok: {len(steps):,} steps up to {previous} consumed the batches of the order"


def check(config: tyro.conf.OmitArgPrefixes[DataConfig], filtered: int = 1000) -> None:
    """Prints tokens, ids, documents and repetitions of every file, and warns of what looks wrong.

    Args:
        filtered: Instances of each file that the repetition filter looks at.
    """
    dataset = open_dataset(config)
    dtype, length = np.dtype(config.dtype).newbyteorder("<"), config.sequence_length
    print("tokens  ids  documents  mean length  first id  filtered  file")
    openings = {}
    for path, size in zip(dataset.paths, dataset.sizes.tolist(), strict=True):
        n, lowest, highest, ends, opening = size // dtype.itemsize, config.vocab_size, 0, 0, "-"
        for start in range(0, n, 1 << 22):
            ids = np.empty(min(1 << 22, n - start), dtype)
            dataset.files.read([Request(path, start * dtype.itemsize, ids)])
            check_ids(ids, path, start * dtype.itemsize, config)
            lowest, highest = min(lowest, int(ids.min())), max(highest, int(ids.max()))
            ends += int(np.count_nonzero(ids == config.eos_id))
            if start == 0:
                values, counts = np.unique(ids[1:][ids[:-1] == config.eos_id], return_counts=True)
                if counts.sum() > 8 and counts.max() > 0.95 * counts.sum():
                    opening = str(values[counts.argmax()])
        rows = np.unique(np.linspace(0, n // length - 1, filtered).astype(np.int64))
        row, bad = np.empty(length, dtype), 0
        for place in rows[rows >= 0].tolist():
            dataset.files.read([Request(path, place * length * dtype.itemsize, row)])
            bad += repeats_too_often(row)
        share = bad / max(len(rows), 1)
        print(f"{n:,}  {lowest}-{highest}  {ends:,}  {n / max(ends, 1):,.1f}", end="  ")
        print(f"{opening}  {share:.2%}  {path}")
        openings[opening] = path
        if not ends and n > 1_000_000:
            print(f"warning: {path}: no eos_id={config.eos_id} in {n:,} tokens", file=sys.stderr)
    bos = "-" if config.bos_id is None else str(config.bos_id)
    if set(openings) - {bos}:
        print(f"warning: documents begin alike, bos_id={bos}: {openings}", file=sys.stderr)
    if len(openings) > 1:
        raise ValueError(f"documents begin differently, with and without BOS? {openings}")


def show(
    config: tyro.conf.OmitArgPrefixes[DataConfig], instance: int, decoder: Path | None = None
) -> None:
    """Prints where an instance comes from and what it says.

    Args:
        instance: Its id.
        decoder: A tokenizer.json; without it, ids are printed, and bytes for a byte vocabulary.
    """
    dataset = known_dataset(config)
    if not 0 <= instance < dataset.n_instances:
        raise ValueError(f"instance={instance} is not below {dataset.n_instances} instances")
    for file, start, count in dataset.spans(instance):
        print(f"{dataset.paths[file]}: tokens {start:,} to {start + count:,}")
    ids = dataset.read(np.array([instance], np.uint32)).tokens[0].tolist()
    if decoder is not None:
        print(load_tokenizer(decoder).decode(ids, skip_special_tokens=False))
    elif config.vocab_size == EMBEDDED_VOCAB:
        print(bytes(i if i < 256 else 10 for i in ids).decode(errors="replace"))
    else:
        print(*ids)


def load_tokenizer(path: Path) -> Any:  # noqa: ANN401 - of an optional package
    """Reads a tokenizer.json."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ValueError("tokenizers is not installed; pip install -e '.[text]'") from None
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer={path}: no such file")
    return tokenizers.Tokenizer.from_file(str(path))


@dataclass(frozen=True)
class Tokenize:
    """Makes token files out of text: an EOS ends every document, and a manifest lists the files."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """jsonl with a `text` field, or txt with one document, also .gz or .zst."""
    tokenizer: Path
    """A tokenizer.json."""
    out: Path
    """Folder for part-*.npy, their .csv.gz of document offsets, and manifest.txt."""
    eos_id: int = 100_257
    """Ends every document."""
    bos_id: int | None = None
    """Begins every document."""
    shard_tokens: int = 1 << 28
    """A file is closed by the first document that fills it so far."""
    workers: int = 1
    """Processes; each takes whole input files."""


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a text or jsonl file."""
    suffixes = [suffix for suffix in path.suffixes if suffix in (".jsonl", ".txt", ".gz", ".zst")]
    if suffixes[-1:] == [".zst"]:
        import zstandard

        stream = io.TextIOWrapper(zstandard.open(path, "rb"), encoding="utf-8")
    else:
        stream = (gzip.open if suffixes[-1:] == [".gz"] else open)(path, "rt", encoding="utf-8")
    with stream:
        if suffixes[:1] == [".txt"]:
            yield stream.read()
        for number, line in enumerate(stream, 1) if suffixes[:1] == [".jsonl"] else ():
            try:
                yield json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}:{number}: no JSON object with a text field") from None


def tokenize_file(job: Tokenize, number: int) -> dict:
    """Turns one input file into token files; what is finished is not done again.

    The description, part-N.json, is written last and says of what it was made, so a file without
    one is made again from its start, and the result does not depend on workers or interruptions.
    """
    path, tokenizer = job.files[number], load_tokenizer(job.tokenizer)
    made_of = {
        "text": [path.name, path.stat().st_size],
        "tokenizer": hashlib.sha256(job.tokenizer.read_bytes()).hexdigest(),
        **{name: getattr(job, name) for name in ("eos_id", "bos_id", "shard_tokens")},
    }
    note = job.out / f"part-{number:05}.json"
    if note.exists() and (old := json.loads(note.read_text()))["made_of"] == made_of:
        return old
    bos = [] if job.bos_id is None else [job.bos_id]
    shards, spans, ids, first = [], [], [], None

    def close() -> None:
        name = job.out / f"part-{number:05}-{len(shards):04}"
        with atomic_path(name.with_suffix(".csv.gz")) as temporary, gzip.open(temporary, "wt") as f:
            csv.writer(f).writerows(spans)
        with atomic_path(name.with_suffix(".npy")) as temporary:
            np.concatenate(ids).tofile(temporary)
        shards.append([f"{name.name}.npy", spans[-1][1], len(spans)])
        spans.clear()
        ids.clear()

    texts = read_texts(path)
    while batch := list(itertools.islice(texts, 256)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            document = np.array([*bos, *encoding.ids, job.eos_id], "<u4")
            start = spans[-1][1] if spans else 0
            first = document[:8].tolist() if first is None else first
            spans.append((start, start + len(document)))
            ids.append(document)
            if spans[-1][1] >= job.shard_tokens:
                close()
    if spans:
        close()
    done = {"made_of": made_of, "first_ids": first, "files": shards}
    with atomic_path(note) as temporary:
        temporary.write_text(json.dumps(done))
    return done


def tokenize(job: tyro.conf.OmitArgPrefixes[Tokenize]) -> None:
    """Makes token files out of text: an EOS ends every document, and a manifest lists the files."""
    load_tokenizer(job.tokenizer)
    missing = [str(path) for path in job.files if not path.is_file()]
    if missing or not job.files:
        raise FileNotFoundError(f"files: {len(missing)} of {len(job.files)} missing: {missing[:5]}")
    spawn = multiprocessing.get_context("spawn")
    one_thread = ("TOKENIZERS_PARALLELISM", "false")
    started, work = time.perf_counter(), functools.partial(tokenize_file, job)
    with ProcessPoolExecutor(job.workers, spawn, os.putenv, one_thread) as pool:
        done = list(pool.map(work, range(len(job.files))))
    lines = [f"{d['made_of']['text'][0]},{file}\n" for d in done for file, _, _ in d["files"]]
    with atomic_path(job.out / "manifest.txt") as temporary:
        temporary.write_text("".join(lines))
    tokens = sum(count for d in done for _, count, _ in d["files"])
    speed = tokens / (time.perf_counter() - started)
    print(f"{job.out / 'manifest.txt'}: {tokens:,} tokens, {speed:,.0f} a second")


def main() -> None:
    """Runs one command; what the user can mend exits 2, what failed on the way exits 1."""
    commands = (index, audit, order, check, show, tokenize)
    try:
        tyro.extras.subcommand_cli_from_dict({f.__name__: f for f in commands}, description=__doc__)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError | FileNotFoundError) else 1)


if __name__ == "__main__":
    main()
