"""What is known of an order without its tokens: its index, any step, a proof, a run against it."""

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tyro
from jaxtyping import Int64

from data import (
    Cursor,
    DataConfig,
    Dataset,
    Loader,
    fingerprint,
    format_hash,
    instance_hash,
    list_files,
    make_dataset,
    measure,
    open_dataset,
    read_index,
    sample,
)
from tools.files import Files, Request, atomic_path

INDEX_FIELDS = (
    *("sequence_length", "max_target_sequence_length", "tokenizer", "vocab_size", "eos_id"),
    *("pad_id", "bos_id", "dtype", "packed", "pack_group", "pack_seed", "long_documents"),
)


def write_index(
    out: Path,
    config: DataConfig,
    paths: Sequence[str],
    sizes: Int64[np.ndarray, " F"],
    first_ids: Sequence[int] = (),
) -> None:
    """Writes what there is to know about token files without asking for them again."""
    index = {
        "format": "olmo3-equinox data index 1",
        "fingerprint": fingerprint(config, paths, sizes),
        "config": {name: getattr(config, name) for name in INDEX_FIELDS},
        "first_ids": list(first_ids),  # whether there is a BOS, and which
        "files": list(zip(paths, sizes.tolist(), strict=True)),
    }
    with atomic_path(out) as temporary:
        temporary.write_text(json.dumps(index, indent=0))


def index(config: tyro.conf.OmitArgPrefixes[DataConfig], out: Path) -> None:
    """Sizes every file of a manifest, wherever it lies, and writes an index to `out`."""
    files, paths = Files(), list_files(config)
    sizes = measure(files, paths, config)
    sample(files, paths, sizes, config)
    first = np.empty(min(8, int(sizes[0]) // np.dtype(config.dtype).itemsize), config.dtype)
    files.read([Request(paths[0], 0, first)])
    write_index(out, config, paths, sizes, first.tolist())
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
