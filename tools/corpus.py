"""Token files: the embedded corpus, your own text, and what a look into any of them shows."""

import csv
import functools
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from data import (
    EMBEDDED_EOS,
    EMBEDDED_VOCAB,
    DataConfig,
    check_ids,
    open_dataset,
    repeats_too_often,
)
from tools.audit import known_dataset
from tools.files import Request, atomic_path, made_once


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
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skipped  # not walked into: site-packages may be huge
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            texts[str(path.relative_to(root))] = path.read_bytes()
    if len(texts) < 500:
        raise FileNotFoundError(f"source=stdlib: no sources in {root}; name token files instead")
    places = sorted((hashlib.sha256(name.encode()).digest(), text) for name, text in texts.items())
    identity = hashlib.sha256(b"".join(place + hashlib.sha256(t).digest() for place, t in places))
    out = Path(cache).expanduser() / f"stdlib-{identity.hexdigest()[:16]}"
    paths = [out / f"part-{shard:02}.npy" for shard in range(20)]

    def make(path: Path, shard: int) -> None:
        mine = [text for place, text in places if place[-1] * 20 // 256 == shard]
        np.array([i for text in mine for i in (*text, EMBEDDED_EOS)], "<u4").tofile(path)

    for shard, path in enumerate(paths):
        made_once(path, functools.partial(make, shard=shard))
    return [str(path) for path in (paths[19:] if split == "heldout" else paths[:19])]


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
