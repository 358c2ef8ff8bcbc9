"""Whole documents into instances, best fit first, as OLMo-core's third stage has them.

R documents or pieces of them; sources: "spec 6.6" is OLMo-core after 2.5.0, `data/utils.py`
and `numpy_dataset.py`.
"""

import csv
import gzip
import io
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from data import DataConfig, Packing
from tools.files import Files


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
