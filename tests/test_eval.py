"""The evaluation against OLMo-core's numbers, formulas and plain loops."""

import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import golden_cases

import convert
import data
import eval as evaluation
import olmo3

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


def load_golden(config_file, weights, folder):
    """A golden's weights as the Hugging Face folder that convert reads, in float32."""
    (folder / "config.json").write_bytes(config_file.read_bytes())
    (folder / "model.safetensors").write_bytes(weights.read_bytes())
    return convert.load_hf(folder, compute_dtype="float32")


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
    with jax.set_mesh(olmo3.make_mesh(devices=jax.devices()[:1])):
        alone = olmo3.Olmo3(TINY, jax.random.key(0))
        for loss, document in zip(nats, rows.documents, strict=True):  # alone and unpadded
            scores = jax.nn.log_softmax(olmo3.logits(alone, alone(jnp.asarray(document)[None]))[0])
            picked = scores[jnp.arange(len(document) - 1), document[1:]]
            assert loss == pytest.approx(-float(picked.sum()), rel=1e-5)
    for batch_tokens in (1, 700):
        again, _ = evaluation.document_losses(model, rows, batch_tokens)
        np.testing.assert_allclose(again, nats, rtol=1e-5)
    backwards = evaluation.HeldOut(rows.labels, rows.documents[::-1], None)
    np.testing.assert_allclose(evaluation.document_losses(model, backwards)[0][::-1], nats, 1e-5)


def test_standard_error_matches_the_spread_over_resampled_documents():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 400, 14_000)
    nats = rng.normal(3, 1, len(lengths)) * (lengths - 1)
    out = evaluation.summarise_losses(nats, lengths, None)
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
