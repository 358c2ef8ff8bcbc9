"""Token files to sharded batches, in OLMo-core's order, every instance exactly once an epoch.

    manifest -> files -> instances -> one global order -> batch of step k -> rows of this process

A global batch is a pure function of (manifest, seed, step). Sharding happens in one place,
`Stream`, which reads the rows that this process's devices hold and nothing else. Run as a script,
it indexes, audits, checks, shows and makes token files: `python data.py --help` (tools/audit.py,
tools/corpus.py). tools/files.py fetches bytes, tools/packing.py packs documents.

Axes: A accumulation micro-steps, B instances of a (micro-)batch, S positions of an instance,
R documents or pieces of them.
Sources: "spec 6.x" is OLMo-core after 2.5.0, `src/olmo_core/data/`: mixes/__init__.py (manifests),
numpy_dataset.py (instances, fingerprint), data_loader.py (order), utils.py (filter).
"""

import contextlib
import dataclasses
import glob
import hashlib
import json
import math
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax
import numpy as np
import tyro
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int32, Int64, Integer, UInt, UInt32

from tools.files import Files, Request, made_once


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
    """A multiple of sequence_length keeps that many tokens together in the shuffle. None is
    sequence_length, as AI2's scripts set it; 0 is OLMo-core's null, with another fingerprint.
    """
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
        from tools.corpus import embedded_corpus

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
    sizes = files.sizes(paths)
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
        longest = config.max_target_sequence_length
        longest = config.sequence_length if longest is None else longest or None
        fields |= {"max_target_sequence_length": longest, "bos_token_id": config.bos_id}
    else:
        fields |= {"long_doc_strategy": config.long_documents, "bos_token_id": config.bos_id}
        fields["sequence_length"] = config.sequence_length
        if config.pack_group > 1:
            fields["source_group_size"] = config.pack_group
    digest = hashlib.sha256(f"class=Numpy{'Packed' * config.packed}FSLDataset".encode())
    digest.update("".join(f"{name}={value}," for name, value in fields.items()).encode())
    for path, size in zip(paths, sizes.tolist(), strict=True):
        digest.update(f"path={path.rsplit('/', 1)[-1]},size={size},".encode())
    return digest.hexdigest()


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
    """Finds a wrong dtype, vocabulary, BOS or server before training: reads a little of all files.

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
        if start == 0 and ids.size and config.bos_id not in (None, ids[0]):
            raise ValueError(f"{path}: begins with id {ids[0]}, set bos_id={config.bos_id} anew")
        if config.dtype == "uint16" and ids.size > 8 and np.mean(ids == 0) > 0.4:
            warnings.warn(f"{path}: mostly zeros as uint16; is it dtype=uint32?", stacklevel=2)


class Packing(NamedTuple):
    """Which spans of which files make up each packed instance."""

    firsts: Int64[np.ndarray, " N+1"]
    """Where the spans of each instance begin in the columns below, and their number."""
    files: Int32[np.ndarray, " R"]
    starts: Int64[np.ndarray, " R"]
    lengths: Int32[np.ndarray, " R"]


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
        raw = tokens.view(dtype) if dtype.itemsize == 4 else np.empty(tokens.shape, dtype)
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
        if raw.max(initial=0) >= config.vocab_size:
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
        from tools.packing import pack_files

        def make(path: Path) -> None:
            with path.open("wb") as file:
                np.savez(file, *pack_files(files, paths, sizes, config))

        cached = Path(config.cache).expanduser() / f"packing-{identity[:16]}.npz"
        with np.load(made_once(cached, make)) as columns:
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
    indexed = read_index(config)[2] if config.source.endswith(".json") else None
    asked = [i for i, path in enumerate(paths) if indexed is None or "://" not in path]
    here = [paths[i] for i in asked]
    sizes = measure(files, here, config)
    sample(files, here, sizes, config)
    if indexed is None:
        return make_dataset(config, files, paths, sizes)
    for path, new, old in zip(here, sizes, indexed[asked], strict=True):
        if new != old:
            raise ValueError(f"{path}: {new} bytes, index {config.source} has {old}; index again")
    return make_dataset(config, files, paths, indexed)


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
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in names)
    changes = [f"{name}: {a} -> {b}" for name, a, b in pairs if a != b]
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
        n, chunk, seed = self.dataset.n_instances, self.dataset.chunk, self.config.seed + epoch
        with self.lock:
            if epoch in self.orders:
                return self.orders[epoch]
            if n < 1 << 20:
                order = shuffled(n, chunk, seed)
            else:
                name = f"order-{self.dataset.fingerprint[:16]}-n{n}-chunk{chunk}-seed{seed}.u4"

                def make(path: Path) -> None:
                    print(f"shuffling {n:,} instances, once per host and epoch", file=sys.stderr)
                    shuffled(n, chunk, seed).astype("<u4", copy=False).tofile(path)

                path = Path(self.config.cache).expanduser() / name
                made_once(path, make, n // chunk * chunk * 4)
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

    def repeats(self, last_step: int) -> int:
        """Steps up to `last_step` that lie behind the first epoch, so that they repeat data."""
        fresh = self.batches_per_epoch * (self.start.epoch == 1) - self.start.batches
        return max(last_step - self.start.step - max(fresh, 0), 0)

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


def main() -> None:
    """Runs one command; what the user can mend exits 2, what failed on the way exits 1."""
    from tools import audit, corpus

    commands = (audit.index, audit.audit, audit.order, corpus.check, corpus.show, corpus.tokenize)
    try:
        tyro.extras.subcommand_cli_from_dict({f.__name__: f for f in commands}, description=__doc__)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError | FileNotFoundError) else 1)


if __name__ == "__main__":
    main()
