"""What needs a cache of keys and values: scoring requests that share a context, and sampling.

Axis letters as in olmo3.py, and

    R requests    I scored tokens before the last    A alternatives for the last
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32, Key

import data
import olmo3
from eval import Checkpoint, buckets, load_model, power_at_least, put_rows, token_scores

Cache = tuple[tuple[Float[Array, "..."], Float[Array, "..."]], ...]
"""Keys and values of every place in the window pattern, stacked like `Olmo3.blocks`."""


def empty_cache(config: olmo3.ModelConfig) -> Cache:
    """Keys and values of no tokens yet, laid out like `model.blocks`, and one row for all."""
    n_layers = config.n_layers // len(config.windows)
    none = jnp.zeros((n_layers, 1, 0, config.n_kv_heads, config.d_head), config.dtype)
    return tuple((none, none) for _ in config.windows)


def held(end: Int32[Array, ""], n_slots: int) -> Int32[Array, " T"]:
    """Which position every slot of a cache holds before position `end`; negative is none.

    Slots are used in turns, position p in slot p modulo their number, so that a layer with a window
    of W needs W of them however long the text.
    """
    return end - 1 - (end - 1 - jnp.arange(n_slots)) % max(n_slots, 1)


def extend(
    model: olmo3.Olmo3,
    cache: Cache,
    span: tuple[Int32[Array, ""], Int32[Array, ""]],
    tokens: Int32[Array, "B S"],
    n_slots: int,
) -> tuple[Float[Array, "B S D"], Cache]:
    """Final hidden states of `tokens` at positions from `span[0]` on, after what the cache holds.

    A cache of one row serves every row: it is repeated one layer at a time. Returns also the cache
    of `n_slots` positions before `span[1]`, of a window's length at most, or none for 0 slots;
    tokens from there on are padding, which nothing before them sees.
    """
    config, (start, end) = model.config, span
    positions = start + jnp.arange(tokens.shape[1])
    tables = {scaled: olmo3.rope_table(config, positions, scaled) for scaled in (False, True)}

    def view(window: int | None, n_old: int) -> tuple[Bool[Array, "1 S T"], Int32[Array, " t"]]:
        """Which of old and new keys each query sees, and which of them the new cache keeps."""
        seen = jnp.concatenate([held(start, n_old), positions])
        back = positions[:, None] - seen[None, :]
        mask = (seen >= 0) & (back >= 0)
        mask = mask if window is None else mask & (back < window)
        stay = held(end, min(window or n_slots, n_slots))
        return mask[None], jnp.where(stay < start, stay % max(n_old, 1), n_old + stay - start)

    views = [view(w, k.shape[2]) for w, (k, _) in zip(config.windows, cache, strict=True)]

    def join(old: Float[Array, "b t K H"], new: Float[Array, "B S K H"]) -> Float[Array, "B T K H"]:
        old = jnp.broadcast_to(old, (new.shape[0], *old.shape[1:]))
        return jnp.concatenate([reshard(old, jax.typeof(new).sharding.spec), new], axis=1)

    def group(x: Float[Array, "B S D"], layers: tuple) -> tuple[Float[Array, "B S D"], Cache]:
        kept = []
        places = zip(layers[0], config.windows, layers[1], views, strict=True)
        for block, window, old, (mask, stay) in places:
            q, *new = block.attn.project(x, tables[window is None], config.norm_eps)
            k, v = map(join, old, new)
            x = block.add_attention(x, olmo3.attend(q, k, v, mask), config.norm_eps)
            x = block.add_ffn(x, config.norm_eps)
            sharding = jax.typeof(k).sharding
            kept.append(tuple(y.at[:, stay].get(out_sharding=sharding) for y in (k, v)))
        return x, tuple(kept) if n_slots else ()

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
    model: olmo3.Olmo3, tokens: Int32[Array, "B S"], end: Int32[Array, ""], n_slots: int
) -> tuple[Float[Array, "B S D"], Cache]:
    """Hidden states of prompts of `end` tokens, padded on the right, and a cache of the prompts."""
    return extend(model, empty_cache(model.config), (jnp.int32(0), end), tokens, n_slots)


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
    n_inner = targets.shape[1]
    hidden, _ = extend(model, cache, (start, start), tokens, n_slots=0)
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
        cache = empty_cache(model.config)
        if prefix:
            shared = np.zeros((1, slots), np.int32)
            shared[0, :prefix] = rows[members[0]].query[:prefix]
            cache = prefill(model, jnp.asarray(shared), jnp.int32(prefix), slots)[1]
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
        span = (inputs[0], inputs[0] + 1)
        hidden, cache = extend(model, cache, span, token[:, None], n_prompt + n_new)
        return (cache, draw(hidden, inputs[1])), token

    hidden, cache = prefill(model, prompts, jnp.int32(n_prompt), n_prompt + n_new)
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
    wheels: Path = Path("~/.cache/olmo3-equinox/wheels")
    """Where dolma2's tokenizer comes from, see `tasks`."""

    def run(self) -> None:
        model, config = load_model(self.checkpoint)
        if config.vocab_size == data.EMBEDDED_VOCAB:
            ids, decode = list(self.prompt.encode()), bytes_of
        else:
            import tokenizers

            from tools import tasks

            text = tasks.read_tokenizer(self.tokenizer, self.wheels)
            encoder = tokenizers.Tokenizer.from_str(text)
            ids, decode = encoder.encode(self.prompt, add_special_tokens=False).ids, encoder.decode
        prompts, key = jnp.asarray([ids], jnp.int32), jax.random.key(self.seed)
        new = generate(model, prompts, self.tokens, key, (self.temperature, self.top_p))
        kept = itertools.takewhile(lambda i: i != config.eos_id, np.asarray(new)[0].tolist())
        print(self.prompt + decode(list(kept)))
