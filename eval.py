"""Held-out loss, divergence, tasks, sampling, and the comparison of runs.

Whatever scores text works on token ids, batches rows of similar length in a handful of compiled
shapes, and runs on the mesh in force with the rows split over it. Training state is never touched.

Axis letters: as in olmo3.py (B rows, S query and T key positions, C loss chunk, L K H D V), and

    R documents or requests    I scored tokens before the last    A alternatives for the last

Sources: "spec 7" is OLMo-core after 2.5.0, eval/lm_evaluator.py.
"""

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32, Int64, Shaped

import data
import olmo3

Cache = tuple[tuple[Float[Array, "..."], Float[Array, "..."]], ...]
"""Keys and values of every place in the window pattern, stacked like `Olmo3.blocks`."""


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


def power_at_least(base: int, n: int) -> int:
    """The smallest power of `base` that is not below `n`."""
    power = 1
    while power < n:
        power *= base
    return power


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
        groups.setdefault(max(shortest, power_at_least(2, length)), []).append(index)
    for width, group in sorted(groups.items()):
        rows = min(max(batch_tokens // width, 1), power_at_least(4, len(group)))
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


def over_chunks(
    function: Callable, config: olmo3.ModelConfig, *arrays: Shaped[Array, "B S ..."]
) -> tuple[Shaped[Array, "B S"], ...]:
    """Maps `function` over chunks of positions, so that each device holds few logits at a time.

    At most `loss_chunk` positions in all, since rows here are many and short.
    """
    n_rows, n_positions = arrays[0].shape[:2]
    rows_per_device = -(-n_rows // jax.sharding.get_abstract_mesh().size)
    chunk = min(max(config.loss_chunk // rows_per_device, 1), n_positions)

    def split(x: Shaped[Array, "B S ..."]) -> Shaped[Array, "n B C ..."]:
        padding = [(0, 0), (0, -n_positions % chunk)] + [(0, 0)] * (x.ndim - 2)
        return rearrange(jnp.pad(x, padding), "B (n C) ... -> n B C ...", C=chunk)

    chunks = jax.lax.map(lambda xs: function(*xs), tuple(split(x) for x in arrays))
    return tuple(rearrange(x, "n B C -> B (n C)")[:, :n_positions] for x in chunks)


def token_scores(
    model: olmo3.Olmo3, hidden: Float[Array, "B S D"], targets: Int32[Array, "B S"]
) -> tuple[Float32[Array, "B S"], Bool[Array, "B S"]]:
    """Log-probability of every target, and whether it is the most likely token.

    Over the padded vocabulary, as in training and in OLMo-core; 0 and True where it is negative.
    """

    def chunk_scores(hidden: Float[Array, "B C D"], targets: Int32[Array, "B C"]) -> tuple:
        scores = olmo3.logits(model, hidden)
        picked = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        log_prob = picked - jax.nn.logsumexp(scores, axis=-1)
        none = targets < 0
        return jnp.where(none, 0.0, log_prob), none | (picked >= scores.max(axis=-1))

    return over_chunks(chunk_scores, model.config, hidden, targets)


@eqx.filter_jit
def row_losses(
    model: olmo3.Olmo3, tokens: Int32[Array, "B S"], targets: Int32[Array, "B S"]
) -> Float32[Array, " B"]:
    """Summed cross-entropy of every row in nats, on every device."""
    log_probs, _ = token_scores(model, model(tokens), targets)
    return reshard(-log_probs.sum(axis=1), P(None))


def document_losses(
    model: olmo3.Olmo3, rows: HeldOut, batch_tokens: int = 32_768, max_batches: int | None = None
) -> tuple[Float64[np.ndarray, " R"], int]:
    """Summed cross-entropy of each document, NaN beyond `max_batches`, and how many shapes it took.

    Every pass starts at the first document; rows of weight zero fill the last batch of a shape.
    """
    losses, shapes = np.full(len(rows.documents), np.nan), set()
    lengths = [len(document) for document in rows.documents]
    for n_rows, width, group in itertools.islice(buckets(lengths, batch_tokens), max_batches):
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


def empty_cache(config: olmo3.ModelConfig, n_rows: int, n_slots: int) -> Cache:
    """Keys and values of no tokens yet, laid out like `model.blocks`; the slot is the position."""
    n_layers = config.n_layers // len(config.windows)
    shape = (n_layers, n_rows, n_slots, config.n_kv_heads, config.d_head)
    zeros = jnp.zeros(shape, config.dtype)
    return tuple((zeros, zeros) for _ in config.windows)


def extend(
    model: olmo3.Olmo3,
    cache: Cache,
    start: Int32[Array, ""],
    tokens: Int32[Array, "B S"],
    keep: bool,
) -> tuple[Float[Array, "B S D"], Cache]:
    """Final hidden states of `tokens` at positions from `start` on, after what the cache holds.

    A cache of one row serves every row: it is repeated one layer at a time. Slots from `start` on
    are overwritten or lie ahead of every query, so what they hold never matters; a window masks
    what is too far back, exactly as in `olmo3.forward`. With `keep`, returns the new cache too.
    """
    config = model.config
    positions = start + jnp.arange(tokens.shape[1])
    tables = {scaled: olmo3.rope_table(config, positions, scaled) for scaled in (False, True)}
    back = positions[:, None] - jnp.arange(cache[0][0].shape[2])[None, :]
    masks = {w: ((back >= 0) & (back < (w or back.shape[1])))[None] for w in config.windows}

    def write(
        old: Float[Array, "b T K H"], new: Float[Array, "B S K H"]
    ) -> Float[Array, "B T K H"]:
        old = jnp.broadcast_to(old, (new.shape[0], *old.shape[1:]))
        old = reshard(old, jax.typeof(new).sharding.spec)
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)

    def group(x: Float[Array, "B S D"], layers: tuple) -> tuple[Float[Array, "B S D"], Cache]:
        kept = []
        for block, window, (k_old, v_old) in zip(layers[0], config.windows, layers[1], strict=True):
            q, k, v = block.attn.project(x, tables[window is None], config.norm_eps)
            k, v = write(k_old, k), write(v_old, v)
            x = block.add_attention(x, olmo3.attend(q, k, v, masks[window]), config.norm_eps)
            x = block.add_ffn(x, config.norm_eps)
            kept.append((k, v))
        return x, tuple(kept) if keep else ()

    x, cache = jax.lax.scan(group, olmo3.embed_tokens(model, tokens), (model.blocks, cache))
    return olmo3.rms_norm(x, model.norm, config.norm_eps), cache


class Request(NamedTuple):
    """How likely is `continuation` after `context`? Token ids, as they go into the model."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Row(NamedTuple):
    """What one pass over a query answers: all requests that differ in their last token alone."""

    query: tuple[int, ...]
    """Context and continuation without its last token."""
    n_context: int
    """Tokens of the query that are context; each later one is scored, and then `last`."""
    last: list[int]
    """The last tokens of the requests."""
    requests: list[int]
    """Which request each of them is."""


def make_rows(
    requests: Sequence[Request], max_length: int, overlong: str
) -> tuple[list[Row], int, int]:
    """Merges requests into rows; returns also how many were cut on the left, and how many skipped.

    The logits at i - 1 score the token at position i, so the last token is never fed, and a cut
    moves the scored positions with the tokens. A continuation is never cut.
    """
    rows: dict[tuple, Row] = {}
    n_cut = n_skipped = 0
    for index, (context, continuation) in enumerate(requests):
        query = (*context, *continuation[:-1])
        if not context or not continuation or len(continuation) > max_length:
            raise ValueError(
                f"request {index}: {len(context)} tokens of context, {len(continuation)} of "
                f"continuation; both need one, and the second must fit max_length={max_length}"
            )
        if len(query) > max_length:
            if overlong == "error":
                raise ValueError(
                    f"request {index} has {len(query)} tokens, above max_length={max_length};"
                    " raise it, or choose overlong=left (cuts context) or overlong=skip"
                )
            if overlong == "skip":
                n_skipped += 1
                continue
            n_cut += 1
            query = query[-max_length:]
        n_context = len(query) - len(continuation) + 1
        row = rows.setdefault((query, n_context), Row(query, n_context, [], []))
        row.last.append(continuation[-1])
        row.requests.append(index)
    return list(rows.values()), n_cut, n_skipped


def plan_prefixes(rows: Sequence[Row], call_tokens: int = 256) -> list[tuple[int, list[int]]]:
    """Which rows share the computation of a common prefix: (its length, the rows) of every group.

    Rows in lexicographic order join the group before them while that saves tokens, a device call
    being worth `call_tokens`. What shares too little ends up in one group without a prefix.
    """

    def common(a: Row, b: Row) -> int:
        limit = min(a.n_context, b.n_context) - 1  # the last context token predicts, so it is fed
        differ = (i for i, (x, y) in enumerate(zip(a.query, b.query, strict=False)) if x != y)
        return min(limit, next(differ, limit))

    order = sorted(range(len(rows)), key=lambda i: rows[i].query)
    groups = [(0, order[:1])]
    for before, index in itertools.pairwise(order):
        shared, (prefix, group) = common(rows[before], rows[index]), groups[-1]
        joined = min(shared, prefix) if len(group) > 1 else shared
        if len(group) * joined + call_tokens >= (len(group) - 1) * prefix and joined > 0:
            groups[-1] = (joined, [*group, index])
        else:
            groups.append((0, [index]))
    worth = [(p, group) for p, group in groups if (len(group) - 1) * p > call_tokens]
    rest = [i for p, group in groups if (len(group) - 1) * p <= call_tokens for i in group]
    return ([(0, sorted(rest))] if rest else []) + worth


@eqx.filter_jit
def prefill(
    model: olmo3.Olmo3, tokens: Int32[Array, "B S"], n_slots: int
) -> tuple[Float[Array, "B S D"], Cache]:
    """Hidden states of prompts and a cache of `n_slots` that holds their keys and values."""
    cache = empty_cache(model.config, tokens.shape[0], n_slots)
    return extend(model, cache, jnp.int32(0), tokens, keep=True)


@eqx.filter_jit
def score_rows(
    model: olmo3.Olmo3,
    cache: Cache,
    start: Int32[Array, ""],
    rows: tuple[Int32[Array, "B S"], Int32[Array, " B"], Int32[Array, "B I"], Int32[Array, "B A"]],
) -> tuple[Float32[Array, "B I"], Float32[Array, "B A"], Bool[Array, "B A"]]:
    """Scores rows of (tokens, position of the last one, inner targets, alternatives at the end).

    The inner targets are those of the I positions before the last, -1 where there is none.

    Returns:
        inner: log-probability of every inner target; they are summed on the host, in float64.
        outer: that of each alternative for the token after the last position.
        greedy: whether greedy decoding would have produced exactly those.
    """
    tokens, ends, targets, last = rows
    n_new, n_inner = tokens.shape[1], targets.shape[1]
    cache = jax.tree.map(lambda x: jnp.pad(x, [(0, 0)] * 2 + [(0, n_new)] + [(0, 0)] * 2), cache)
    hidden, _ = extend(model, cache, start, tokens, keep=False)
    at = jnp.maximum(ends[:, None] - n_inner + jnp.arange(n_inner + 1), 0)
    hidden = jax.vmap(lambda row, index: row[index])(hidden, at)
    inner, inner_top = token_scores(model, hidden[:, :-1], targets)
    scores = jax.nn.log_softmax(olmo3.logits(model, hidden[:, -1:])[:, 0], axis=-1)
    outer = jax.vmap(lambda row, index: row[index])(scores, last)
    greedy = inner_top.all(axis=1, keepdims=True) & (outer >= scores.max(axis=-1, keepdims=True))
    return reshard((inner, outer, greedy), P(None, None))


class Scores(NamedTuple):
    """Answers to requests, in their order; NaN where a request was skipped."""

    log_probs: Float64[np.ndarray, " R"]
    greedy: Bool[np.ndarray, " R"]
    report: dict[str, int]
    """What it took: rows, tokens computed and without sharing, shapes compiled, requests cut."""


def score(
    model: olmo3.Olmo3,
    requests: Sequence[Request],
    max_length: int = 8192,
    overlong: Literal["error", "skip", "left"] = "error",
    batch_tokens: int = 32_768,
) -> Scores:
    """Summed log-probability of every continuation; call it under the model's mesh.

    Requests that differ in the last token alone are one row, rows with a long common prefix compute
    it once, and rows of similar length are batched. Nothing is kept between calls.
    """
    rows, n_cut, n_skipped = make_rows(requests, max_length, overlong)
    results, shapes, n_tokens = [], set(), 0
    for prefix, members in plan_prefixes(rows):
        slots = max(power_at_least(2, prefix), 128) if prefix else 0
        cache = empty_cache(model.config, 1, 0)
        if prefix:
            shared = np.zeros((1, slots), np.int32)
            shared[0, :prefix] = rows[members[0]].query[:prefix]
            cache = prefill(model, jnp.asarray(shared), slots)[1]
        lengths = [len(rows[i].query) - prefix for i in members]
        for n_rows, width, batch in buckets(lengths, batch_tokens, shortest=16):
            group = [rows[members[i]] for i in batch]
            n_last = power_at_least(4, max(len(row.last) for row in group))
            n_inner = power_at_least(4, max(len(row.query) - row.n_context for row in group))
            tokens, ends = np.zeros((n_rows, width), np.int32), np.zeros(n_rows, np.int32)
            targets, last = (np.full((n_rows, n), -1, np.int32) for n in (n_inner, n_last))
            for i, row in enumerate(group):
                new, inner = row.query[prefix:], row.query[row.n_context :]
                tokens[i, : len(new)], ends[i] = new, len(new) - 1
                targets[i, n_inner - len(inner) :] = inner
                last[i, : len(row.last)] = row.last
            inputs = (put_rows(tokens), put_rows(ends), put_rows(targets), put_rows(last))
            results.append((group, score_rows(model, cache, jnp.int32(prefix), inputs)))
            shapes.add((n_rows, width, slots, n_inner, n_last))
        n_tokens += prefix + sum(lengths)
    log_probs, greedy = np.full(len(requests), np.nan), np.zeros(len(requests), bool)
    for group, scored in results:
        for row, inner, outer, top in zip(group, *map(np.asarray, scored), strict=False):
            log_probs[row.requests] = inner.sum(dtype=np.float64) + outer[: len(row.last)]
            greedy[row.requests] = top[: len(row.last)]
    report = {"n_requests": len(requests), "n_rows": len(rows), "n_shapes": len(shapes)}
    report |= {"n_tokens": n_tokens, "n_cut": n_cut, "n_skipped": n_skipped}
    report["n_tokens_unshared"] = sum(len(r.context) + len(r.continuation) - 1 for r in requests)
    return Scores(log_probs, greedy, report)
