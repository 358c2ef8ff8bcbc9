"""Held-out loss, divergence, tasks, sampling, and the comparison of runs.

Whatever scores text works on token ids, batches rows of similar length in a handful of compiled
shapes, and runs on the mesh in force with the rows split over it. Training state is never touched.

Axis letters: B rows of a batch, S positions of a row, V padded vocabulary, R documents.

Sources: "spec 7" is OLMo-core after 2.5.0, eval/lm_evaluator.py.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float32, Float64, Int32, Int64

import data
import olmo3


class HeldOut(NamedTuple):
    """Documents to measure the loss on, one per row, in the order of their files."""

    labels: tuple[str, ...]
    """What each document counts under."""
    documents: tuple[Int32[np.ndarray, " n"], ...]
    """The first tokens of each, as many as fit."""
    n_bytes: Int64[np.ndarray, " R"] | None
    """Bytes of the text that each document's targets stand for; EOS stands for none."""


def put_rows(x: Int32[np.ndarray, "B ..."]) -> Int32[Array, "B ..."]:
    """Splits the rows of a host array over every device of the mesh in force."""
    spec = P(("data", "fsdp"), *[None] * (x.ndim - 1))
    sharding = NamedSharding(jax.sharding.get_mesh(), spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def buckets(
    lengths: Sequence[int], batch_tokens: int, shortest: int = 128
) -> Iterator[tuple[int, int, list[int]]]:
    """Groups rows by length: yields rows per batch, padded length, and the indices of one batch.

    Padded lengths are powers of two, so a pass compiles a handful of shapes whatever the data; a
    batch holds about `batch_tokens` and divides over the mesh. Only lengths decide the order.
    """
    n_devices = jax.sharding.get_mesh().size
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(max(shortest, 1 << (length - 1).bit_length()), []).append(index)
    for width, group in sorted(groups.items()):
        rows = min(max(batch_tokens // width, 1), len(group))
        rows = -(-rows // n_devices) * n_devices
        for start in range(0, len(group), rows):
            yield rows, width, group[start : start + rows]


def embedded_token_bytes(vocab_size: int) -> Int64[np.ndarray, " V"]:
    """Bytes of every id of the byte vocabulary: one below 256, none for EOS and PAD."""
    return (np.arange(vocab_size) < 256).astype(np.int64)


def prepare_heldout(
    paths_by_label: Mapping[str, Sequence[str | os.PathLike]],
    config: data.DataConfig,
    token_bytes: Int64[np.ndarray, " V"] | None = None,
    prefix_id: int | None = None,
) -> HeldOut:
    """Reads the first `sequence_length` tokens of every document of token files, as spec 7 does.

    `prefix_id` goes before every document that does not begin with it; OLMo 3 trains with none.
    """
    labels, kept, n_bytes = [], [], []
    if token_bytes is None and config.source == "stdlib":
        token_bytes = embedded_token_bytes(config.vocab_size)
    for label, paths in paths_by_label.items():
        for document in data.documents([str(path) for path in paths], config):
            if prefix_id is not None and document[0] != prefix_id:
                document = np.append(np.int32(prefix_id), document)
            labels.append(label)
            kept.append(document[: config.sequence_length])
            if token_bytes is not None:
                n_bytes.append(int(token_bytes[kept[-1][1:]].sum()))
    if not kept:
        raise ValueError(
            f"data={dict(paths_by_label)} holds no document: none ends with eos_id={config.eos_id}"
        )
    sizes = np.array(n_bytes, np.int64) if token_bytes is not None else None
    return HeldOut(tuple(labels), tuple(kept), sizes)


def shared_files(train: Sequence[str], heldout: Sequence[str]) -> list[str]:
    """The held-out files that are also trained on: the same file, or equal size and first MiB."""

    def start_of(path: str) -> bytes:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(1 << 20)).digest()

    by_size: dict[int, list[str]] = {}
    for path in train:
        by_size.setdefault(os.path.getsize(path), []).append(path)
    return [
        path
        for path in heldout
        if any(
            os.path.samefile(path, other) or start_of(path) == start_of(other)
            for other in by_size.get(os.path.getsize(path), [])
        )
    ]


@eqx.filter_jit
def row_losses(
    model: olmo3.Olmo3, tokens: Int32[Array, "B S"], targets: Int32[Array, "B S"]
) -> Float32[Array, " B"]:
    """Summed cross-entropy of every row in nats, over the padded vocabulary, on every device."""
    ce, _ = olmo3.token_losses(model, model(tokens), targets)
    return reshard(ce.sum(axis=1), P(None))


def document_losses(
    model: olmo3.Olmo3, rows: HeldOut, batch_tokens: int = 32_768, max_batches: int | None = None
) -> tuple[Float64[np.ndarray, " R"], int]:
    """Summed cross-entropy of each document, NaN beyond `max_batches`, and how many shapes it took.

    Every pass starts at the first document; rows of weight zero fill the last batch of a shape.
    """
    losses, shapes = np.full(len(rows.documents), np.nan), set()
    lengths = [len(document) for document in rows.documents]
    for n_done, (n_rows, width, group) in enumerate(buckets(lengths, batch_tokens)):
        if n_done == max_batches:
            break
        tokens = np.zeros((n_rows, width), np.int32)
        targets = np.full((n_rows, width), -1, np.int32)
        for row, index in enumerate(group):
            document = rows.documents[index]
            tokens[row, : len(document)] = document
            targets[row, : len(document) - 1] = document[1:]
        losses[group] = np.asarray(row_losses(model, put_rows(tokens), put_rows(targets)))[
            : len(group)
        ]
        shapes.add((n_rows, width))
    return losses, len(shapes)


def summarise_losses(
    nats: Float64[np.ndarray, " R"],
    lengths: Int64[np.ndarray, " R"],
    n_bytes: Int64[np.ndarray, " R"] | None,
) -> dict[str, float]:
    """Means of documents' losses with closed-form standard errors, documents being independent.

    `ce` divides by the targets, one fewer than a document has tokens. `ce_olmo_core` divides by the
    tokens, which is what OLMo-core publishes: there the last position of every document counts as a
    zero (spec 7). `ce_document` is the mean of the documents' own means.
    """
    targets = lengths - 1
    scored = targets > 0
    n = max(int(scored.sum()), 1)
    ce = nats.sum() / max(targets.sum(), 1)
    own = nats[scored] / targets[scored]
    spread = n / max(n - 1, 1)
    core = nats.sum() / lengths.sum()
    out = {
        "ce": ce,
        "ce_se": math.sqrt(spread * ((nats - ce * targets) ** 2).sum()) / max(targets.sum(), 1),
        "ppl": math.exp(min(ce, 700.0)),
        "ce_olmo_core": core,
        "ppl_olmo_core": math.exp(min(core, 700.0)),
        "ce_document": own.mean() if len(own) else 0.0,
        "ce_document_se": own.std(ddof=1) / math.sqrt(n) if len(own) > 1 else 0.0,
        "n_tokens": int(targets.sum()),
        "n_documents": len(nats),
    }
    if n_bytes is not None and n_bytes.sum():
        out["bits_per_byte"] = nats.sum() / math.log(2) / n_bytes.sum()
        out["n_bytes"] = int(n_bytes.sum())
    return {key: value if isinstance(value, int) else float(value) for key, value in out.items()}


def evaluate_loss(
    model: olmo3.Olmo3, rows: HeldOut, batch_tokens: int = 32_768, max_batches: int | None = None
) -> dict[str, dict[str, float]]:
    """The losses of `rows` per label and, as "pooled", together; call it under the model's mesh."""
    nats, n_shapes = document_losses(model, rows, batch_tokens, max_batches)
    lengths = np.array([len(document) for document in rows.documents])
    labels, done = np.array(rows.labels), ~np.isnan(nats)
    out = {}
    for label in [*dict.fromkeys(rows.labels), "pooled"]:
        which = done & ((labels == label) | (label == "pooled"))
        if which.any():
            n_bytes = None if rows.n_bytes is None else rows.n_bytes[which]
            out[label] = summarise_losses(nats[which], lengths[which], n_bytes)
    out["pooled"]["n_shapes"] = n_shapes
    return out
