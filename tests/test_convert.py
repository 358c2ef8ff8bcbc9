"""Conversion: names, layouts, spellings of the configuration, bad input, check, and average.

Weights come from the safetensors library and from goldens, never from the code under test.
"""

import contextlib
import dataclasses
import io
import json
import math
import pickle
import shutil
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import GOLDENS, golden_cases
from safetensors.numpy import load_file, save_file

import convert
import olmo3
import train
from tools import checkpoints, distcp, leaves, parity, runs, shards

BF16 = np.dtype(jnp.bfloat16)
HF = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "sliding_window": 16,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "tie_word_embeddings": False,
    "eos_token_id": 249,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.2079441541679836,
}


def hf_shapes(hf):
    """Names and (out, in) shapes of a Hugging Face folder, written out (spec 8.2)."""
    d, f, v = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    head = d // hf["num_attention_heads"]
    kv = head * hf["num_key_value_heads"]
    shapes = {"model.embed_tokens": (v, d), "model.norm": (d,), "lm_head": (v, d)}
    for i in range(hf["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj": (d, d),
            f"{layer}.self_attn.k_proj": (kv, d),
            f"{layer}.self_attn.v_proj": (kv, d),
            f"{layer}.self_attn.o_proj": (d, d),
            f"{layer}.self_attn.q_norm": (d,),
            f"{layer}.self_attn.k_norm": (kv,),
            f"{layer}.mlp.gate_proj": (f, d),
            f"{layer}.mlp.up_proj": (f, d),
            f"{layer}.mlp.down_proj": (d, f),
            f"{layer}.post_attention_layernorm": (d,),
            f"{layer}.post_feedforward_layernorm": (d,),
        }
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def random_tensors(hf, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    return {
        name: ((len(shape) == 1) + 0.2 * rng.standard_normal(shape)).astype(dtype)
        for name, shape in hf_shapes(hf).items()
    }


def write_folder(folder, hf, tensors, shards=1):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        part = dict(list(tensors.items())[i::shards])
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def source(tmp_path):
    """A folder with float32 weights, 4 layers and 250 tokens, and its tensors."""
    tensors = random_tensors(HF)
    return write_folder(tmp_path / "source", HF, tensors), tensors


def run(*arguments):
    return convert.main([str(a) for a in arguments])


def read_all(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def same(a, b):
    return bool((np.asarray(a) == np.asarray(b)).all())


def mean_kl(a, b):
    a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
    return parity.divergence(a, b, np.zeros(len(a), np.int32))[0].mean()


def final_logits(model, tokens):
    hidden = jax.jit(lambda m, t: olmo3.logits(m, m(t)))
    return np.asarray(hidden(model, jnp.asarray(tokens, jnp.int32)))


# Names and layouts, against transformers' own numbers.


@pytest.mark.parametrize("spelling", ["config.json", "config_flat.json"])
@pytest.mark.parametrize("case", golden_cases("hf/tiny_*"), ids=lambda p: p.name)
def test_converted_checkpoint_gives_the_logits_of_transformers(case, spelling, tmp_path, mesh):
    shutil.copytree(case, tmp_path / "hf")
    shutil.copy(case / spelling, tmp_path / "hf" / "config.json")
    assert run("from-hf", tmp_path / "hf", tmp_path / "ours", "--no-check") == 0
    model = train.restore_model(tmp_path / "ours", mesh, compute_dtype="float32", remat="none")
    golden = np.load(case / "golden.npz")
    got = final_logits(model, golden["input_ids"])[..., : golden["logits"].shape[-1]]
    np.testing.assert_allclose(got, golden["logits"], atol=1e-5, rtol=0)  # noise floor 2.6e-6
    assert mean_kl(golden["logits"], got) < 1e-9


@pytest.mark.parametrize("case", golden_cases("hf/tiny_*"), ids=lambda p: p.name)
def test_bfloat16_compute_stays_close_to_transformers_in_float32(case):
    golden = np.load(case / "golden.npz")
    got = final_logits(convert.load_hf(case, remat="none"), golden["input_ids"])
    assert (
        mean_kl(golden["logits"], got) < 1.5e-3
    )  # the published bar; activations are rounded at every step


def test_yarn_leaves_sliding_layers_alone_whatever_transformers_once_did(monkeypatch):
    case = GOLDENS / "hf" / "tiny_yarn"
    config = convert.config_from_hf(json.loads((case / "config.json").read_text()))
    plain = dataclasses.replace(config, yarn=None)
    sliding = olmo3.inverse_frequencies(config, scaled=False)
    assert (sliding == olmo3.inverse_frequencies(plain, scaled=True)).all()
    golden = np.load(case / "golden.npz")
    table = olmo3.rope_table
    monkeypatch.setattr(olmo3, "rope_table", lambda c, p, scaled: table(c, p, True))
    wrong = final_logits(
        convert.load_hf(case, compute_dtype="float32", loss_chunk=7), golden["input_ids"]
    )
    assert np.abs(wrong - golden["logits"]).max() > 0.1  # transformers 5.0 to 5.12


def test_stacked_checkpoint_and_memory_hold_the_same_bits(source, tmp_path, mesh):
    assert run("from-hf", source[0], tmp_path / "ours", "--no-check") == 0
    stored = train.restore_model(tmp_path / "ours", mesh)
    assert jax.tree.all(jax.tree.map(same, stored, convert.load_hf(source[0])))
    w = source[1]["model.layers.2.mlp.gate_proj.weight"]
    assert (np.asarray(stored.blocks[2].ffn.w_gate[0]) == w.T).all()


@pytest.mark.parametrize("optimizer", [False, True])
def test_files_describe_themselves_as_orbax_own_do(source, tmp_path, mesh, optimizer, monkeypatch):
    monkeypatch.setattr(convert, "BLOCK", 32 * 7)  # chunks that do not divide the tables
    flags = ("--no-check", *["--with-optimizer"] * optimizer)
    assert run("from-hf", source[0], tmp_path / "ours", *flags) == 0
    with jax.set_mesh(
        olmo3.make_mesh(devices=jax.devices()[:1])
    ):  # shards have the shape of arrays
        model: Any = convert.load_hf(source[0])
        state = train.make_optimizer(train.OptimConfig()).init(model), jnp.zeros((), jnp.int32)
    trees = {"model": model} | ({"optimizer": state} if optimizer else {})
    assert {p.name for p in (tmp_path / "ours/0").iterdir() if p.is_dir()} == {*trees, "config"}
    for item, tree in trees.items():
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "orbax" / item, tree)
        ours, theirs = (
            json.loads((folder / item / "_METADATA").read_text())
            for folder in (tmp_path / "ours/0", tmp_path / "orbax")
        )
        assert ours == theirs
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / "ours/0" / item, tree)
        assert jax.tree.all(jax.tree.map(same, restored, tree))


def test_training_starts_from_a_converted_checkpoint_and_its_adam_state(source, tmp_path, mesh):
    assert run("from-hf", source[0], tmp_path / "ours", "--no-check", "--with-optimizer") == 0
    tiny = train.PRESETS["tiny"][1]
    model = shards.open_hf(source[0]).config
    tokens = dataclasses.replace(tiny.data, source="x.bin", vocab_size=250, eos_id=1, pad_id=2)
    config = dataclasses.replace(tiny, model=model, data=tokens, init=tmp_path / "ours")
    state = train.initial_state(config, mesh)
    stored = np.asarray(state.model.unembed)[:250]
    assert (stored == source[1]["lm_head.weight"]).all()
    assert all(float(abs(x).max()) == 0 for x in jax.tree.leaves(state.optimizer))


def test_checkpoint_of_a_run_exports_with_its_token_ids(tmp_path, mesh):
    small = {"vocab_size": 384, "d_model": 32, "n_layers": 4, "d_ff": 48, "d_head": 8, "n_heads": 4}
    tiny = train.PRESETS["tiny"][1]
    model = dataclasses.replace(tiny.model, n_kv_heads=2, **small)
    config = dataclasses.replace(tiny, model=model, run_dir=tmp_path / "run")
    state = jax.jit(lambda key: train.init_state(config, key))(jax.random.key(1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(runs.config_json(config)))
    items = ocp.args.Composite(
        model=ocp.args.StandardSave(state.model),
        config=ocp.args.JsonSave(runs.config_json(config)),
    )
    with checkpoints.open_checkpoints(tmp_path / "run" / "checkpoints", config) as manager:
        manager.save(7, args=items)
    assert run("to-hf", tmp_path / "run", tmp_path / "hf", "--dtype", "fp32") == 0
    hf = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (hf["eos_token_id"], hf["pad_token_id"], hf["vocab_size"]) == (256, 257, 258)
    assert hf["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    got = read_all(tmp_path / "hf")
    assert (got["lm_head.weight"] == np.asarray(state.model.unembed)[:258]).all()
    w_k = np.asarray(state.model.blocks[1].attn.w_k[0])
    assert (got["model.layers.1.self_attn.k_proj.weight"] == w_k.reshape(32, 16).T).all()


# Round trips.


@pytest.mark.parametrize("shards", [1, 3])
def test_float32_round_trip_is_bit_exact(source, tmp_path, shards, monkeypatch):
    monkeypatch.setattr(convert, "BLOCK", 32 * 7)  # tables move in blocks that do not divide them
    folder = write_folder(tmp_path / "in", HF, source[1], shards)
    assert run("from-hf", folder, tmp_path / "ours", "--no-check") == 0
    assert run("to-hf", tmp_path / "ours", tmp_path / "out", "--dtype", "fp32", "--no-check") == 0
    back = read_all(tmp_path / "out")
    assert set(back) == set(source[1])
    assert all(
        (back[name] == x).all() and back[name].dtype == np.float32 for name, x in source[1].items()
    )
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"


def test_bfloat16_export_rounds_once_and_is_idempotent(source, tmp_path):
    assert run("to-hf", source[0], tmp_path / "one", "--no-check") == 0
    assert run("from-hf", tmp_path / "one", tmp_path / "ours", "--no-check") == 0
    assert run("to-hf", tmp_path / "ours", tmp_path / "two", "--no-check") == 0
    one, two = read_all(tmp_path / "one"), read_all(tmp_path / "two")
    for name, x in source[1].items():
        assert one[name].dtype == BF16
        assert (one[name].view(np.uint16) == x.astype(BF16).view(np.uint16)).all()
        assert (one[name].view(np.uint16) == two[name].view(np.uint16)).all()


def test_float16_weights_are_read_exactly(tmp_path):
    tensors = random_tensors(HF, dtype="float16")
    source = shards.open_hf(write_folder(tmp_path / "in", HF, tensors))
    w = tensors["model.layers.1.mlp.up_proj.weight"]
    assert source.dtype == "float16"
    assert (source.read("layers.1.ffn.w_up") == w.astype(np.float32).T).all()


def test_export_is_cut_at_the_size_limit_and_indexed(source, tmp_path):
    limit = 40_000
    arguments = ("--dtype", "fp32", "--max-shard-bytes", limit, "--no-check")
    assert run("to-hf", source[0], tmp_path / "out", *arguments) == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    numbers = {f: sum(x.nbytes for x in load_file(f).values()) for f in files}
    assert max(numbers.values()) <= limit
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(numbers.values())
    for file in files:
        assert {n for n, f in index["weight_map"].items() if f == file.name} == set(load_file(file))
    assert run("check", source[0], tmp_path / "out") == 0


def test_tokenizer_files_travel_when_there_are_any(source, tmp_path):
    (source[0] / "tokenizer_config.json").write_text('{"a": 1}')
    (source[0] / "generation_config.json").write_text('{"eos_token_id": [249, 3]}')
    assert run("from-hf", source[0], tmp_path / "ours", "--no-check") == 0
    assert run("to-hf", tmp_path / "ours", tmp_path / "out", "--no-check") == 0
    assert (tmp_path / "out/tokenizer_config.json").read_text() == '{"a": 1}'
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [
        249,
        3,
    ]
    hf = json.loads((tmp_path / "out/config.json").read_text())
    assert (hf["eos_token_id"], hf["max_position_embeddings"]) == (249, 64)


# Vocabulary padding.


def test_padding_rows_are_the_mean_documented_and_cut_on_the_way_back(source, tmp_path, mesh):
    assert run("from-hf", source[0], tmp_path / "ours", "--no-check") == 0
    model = train.restore_model(tmp_path / "ours", mesh)
    saved = json.loads((tmp_path / "ours/0/config/config.json").read_text())
    assert saved["converted"]["padding_rows"] == [250, 256]
    for name, ours in (("lm_head", model.unembed), ("model.embed_tokens", model.embed)):
        rows = source[1][f"{name}.weight"].astype(np.float64)
        np.testing.assert_allclose(np.asarray(ours)[250:], np.tile(rows.mean(0), (6, 1)), atol=1e-7)


def test_padding_has_at_most_its_share_of_the_probability(source):
    head = shards.open_hf(source[0]).read("unembed").astype(np.float64)
    hidden = (
        np.random.default_rng(0).standard_normal((500, 32)) * np.geomspace(1e-3, 1e3, 500)[:, None]
    )
    logits = hidden @ head.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    assert (p[:, 250:].sum(1) / p.sum(1)).max() <= 6 / 256 + 1e-6


# Every spelling of the configuration.


def without(hf, *keys):
    return {k: v for k, v in hf.items() if k not in keys}


THETA = {"rope_theta": 500000.0}
FLAT = without(HF, "rope_theta")
SPELLINGS = {
    "top": HF | {"rope_scaling": YARN},
    "legacy type": HF | {"rope_scaling": without(YARN, "rope_type") | {"type": "yarn"}},
    "defaults left out": HF
    | {"rope_scaling": without(YARN, "beta_fast", "beta_slow", "attention_factor")},
    "flat parameters": FLAT | {"rope_parameters": YARN | THETA},
    "flat parameters, theta on top": HF | {"rope_parameters": YARN},
    "by kind": FLAT
    | {
        "rope_parameters": {
            "full_attention": YARN | THETA,
            "sliding_attention": {"rope_type": "default"} | THETA,
        }
    },
    "both": HF | {"rope_scaling": YARN, "rope_parameters": {"full_attention": YARN | THETA}},
    "no layer_types": without(HF, "layer_types") | {"rope_scaling": YARN},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_all_spellings_are_one_configuration(name):
    config = convert.config_from_hf(SPELLINGS[name])
    assert config.yarn == olmo3.YarnConfig()
    assert config.rope_theta == 500000.0
    assert config.windows == (16, 16, 16, None)


@pytest.mark.parametrize(
    "nothing", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}]
)
def test_stage_one_has_plain_rope_whatever_its_context_length(nothing):
    config = convert.config_from_hf(HF | nothing | {"max_position_embeddings": 65536})
    assert config.yarn is None


def test_published_configurations_are_the_presets():
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    released = HF | {
        "vocab_size": 100278,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "layer_types": kinds * 8,
        "rope_scaling": None,
    }
    assert convert.config_from_hf(released) == olmo3.ModelConfig()
    long = convert.config_from_hf(released | {"rope_scaling": YARN})
    assert long == olmo3.ModelConfig(yarn=olmo3.YarnConfig())
    grouped = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    grouped |= {"num_attention_heads": 40, "num_key_value_heads": 8, "layer_types": kinds * 16}
    big = convert.config_from_hf(released | grouped)
    assert olmo3.n_parameters(big) == 32_234_279_936  # spec 1.4
    assert convert.tensors(big)["layers.63.attn.k_norm"].theirs == (1024,)


def test_two_layers_may_be_one_of_each_kind():
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    assert convert.config_from_hf(HF | kinds).windows == (16, None)
    full = {"layer_types": ["full_attention"] * 4, "sliding_window": None}
    assert convert.config_from_hf(HF | full).windows == (None,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "YaRN or no scaling"),
        ({"rope_scaling": without(YARN, "original_max_position_embeddings")}, "YaRN needs"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "mscale"),
        ({"rope_scaling": YARN | {"truncate": False}}, "truncate"),
        ({"rope_parameters": {"sliding_attention": YARN | THETA}}, "does not scale sliding"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 4.0}}, "contradict"),
        ({"num_hidden_layers": 6, "layer_types": None}, "num_hidden_layers=6"),
        ({"layer_types": ["full_attention"] * 3}, "num_hidden_layers=4"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"sliding_window": None}, "sliding_window=null"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"model_type": "olmo2"}, "model_type='olmo2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
    ],
    ids=str,
)
def test_ambiguous_configuration_is_refused_with_the_reason(
    source, tmp_path, capsys, change, reason
):
    (source[0] / "config.json").write_text(json.dumps(HF | change))
    assert run("from-hf", source[0], tmp_path / "out") == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_fault_of_a_configuration_is_listed(source, tmp_path, capsys):
    wrong = {"rope_theta": None, "sliding_window": None}
    (source[0] / "config.json").write_text(json.dumps(HF | wrong))
    assert run("from-hf", source[0], tmp_path / "out") == 2
    assert [line[:6] for line in capsys.readouterr().err.splitlines()] == ["error:"] * 2


@pytest.mark.parametrize("theta", [500000.0, 10000.0])
@pytest.mark.parametrize("yarn", [None, olmo3.YarnConfig()])
def test_exported_rope_is_where_both_generations_of_transformers_look(theta, yarn):
    config = dataclasses.replace(convert.config_from_hf(HF), rope_theta=theta, yarn=yarn)
    hf = convert.config_to_hf(config, {}, "bfloat16")
    assert hf["rope_theta"] == theta
    assert (hf["rope_scaling"] or {}).get("factor") == (yarn and 8.0)
    assert ("rope_parameters" in hf) == (theta != 500000.0)
    assert hf["max_position_embeddings"] == (65536 if yarn else 8192)
    assert convert.config_from_hf(hf) == config


# Bad weights: exit 2, every fault with its line, nothing left behind.


def change_tensors(source, change):
    save_file(change(dict(source[1])), source[0] / "model.safetensors")


Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.2.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (lambda t: without(t, Q, NORM), [f"{Q}: missing", f"{NORM}: missing"]),
        (lambda t: t | {"model.extra": t[Q]}, ["model.extra: unexpected"]),
        (
            lambda t: {k.replace("model.", "transformer."): v for k, v in t.items()},
            [f"{Q}: missing", "transformer.norm.weight: unexpected"],
        ),
        (lambda t: t | {NORM: t[NORM][:8]}, [f"{NORM}", "(8,)", "(32,)"]),
        (lambda t: t | {Q: t[Q].astype(np.int8)}, [f"{Q}: dtype I8"]),
        (lambda t: t | {Q: t[Q].astype(np.float64)}, [f"{Q}: dtype F64"]),
        (lambda t: without(t, "lm_head.weight"), ["lm_head.weight: missing"]),
        (lambda t: t | {Q: t[Q] * np.float32(np.nan), NORM: t[NORM] / np.float32(0)}, [Q, NORM]),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_bad_tensors_are_all_named(source, tmp_path, capsys, change, reasons):
    change_tensors(source, change)
    assert run("from-hf", source[0], tmp_path / "out") == 2
    lines = capsys.readouterr().err
    assert all(reason in lines for reason in reasons)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_tied_embeddings_are_refused_and_a_missing_head_is_never_tied(
    source, tmp_path, tied, has_head
):
    (source[0] / "config.json").write_text(json.dumps(HF | {"tie_word_embeddings": tied}))
    change_tensors(source, lambda t: t if has_head else without(t, "lm_head.weight"))
    expected = 0 if has_head and not tied else 2
    assert run("from-hf", source[0], tmp_path / "out", "--no-check") == expected


def rewrite_header(file, change):
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    text = json.dumps(change(json.loads(data[8 : 8 + n]))).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + n :])


def shift(header):
    name = max(header, key=lambda n: header[n].get("data_offsets", [0])[0])
    header[name]["data_offsets"] = [o - 4 for o in header[name]["data_offsets"]]
    return header


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-100]), "its header promises"),
        (lambda f: f.write_bytes(f.read_bytes() + b"x"), "its header promises"),
        (lambda f: f.write_bytes(b"\xff" * 6), "its header needs"),
        (lambda f: f.write_bytes(b"\x02" + b"\0" * 7 + b"{x"), "no JSON"),
        (lambda f: rewrite_header(f, shift), "overlaps the tensor before"),
    ],
)
def test_damaged_safetensors_are_refused_before_reading(source, tmp_path, capsys, damage, reason):
    damage(source[0] / "model.safetensors")
    assert run("from-hf", source[0], tmp_path / "out") == 2
    assert reason in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_none_is_named(source, tmp_path, capsys, name):
    (source[0] / name).write_text("{")
    assert run("from-hf", source[0], tmp_path / "out") == 2
    assert f"{name}: not JSON" in capsys.readouterr().err


def test_index_must_name_the_files_that_are_there(source, tmp_path, capsys):
    folder = write_folder(tmp_path / "sharded", HF, source[1], shards=3)
    (folder / "model-00002-of-00003.safetensors").rename(folder / "stray.safetensors")
    assert run("from-hf", folder, tmp_path / "out") == 2
    lines = capsys.readouterr().err
    assert "model-00002-of-00003.safetensors, which is not there" in lines
    assert "stray.safetensors: not in the index" in lines
    (folder / "model.safetensors.index.json").unlink()
    assert run("from-hf", folder, tmp_path / "out") == 2
    assert "no model.safetensors.index.json" in capsys.readouterr().err


def test_a_tensor_in_two_shards_or_in_another_than_promised_is_refused(source, tmp_path, capsys):
    folder = write_folder(tmp_path / "sharded", HF, source[1], shards=2)
    one, two = (load_file(f) for f in sorted(folder.glob("*.safetensors")))
    name = next(iter(one))
    save_file(two | {name: one[name]}, folder / "model-00002-of-00002.safetensors")
    assert run("from-hf", folder, tmp_path / "out") == 2
    assert f"{name} is in" in capsys.readouterr().err
    save_file(without(one, name), folder / "model-00001-of-00002.safetensors")
    assert run("from-hf", folder, tmp_path / "out") == 2
    assert f"{name} is not in model-00001" in capsys.readouterr().err


def test_existing_output_missing_input_and_other_formats_exit_2(source, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert run("from-hf", source[0], tmp_path / "out") == 2
    assert run("from-hf", tmp_path / "nowhere", tmp_path / "new") == 2
    (source[0] / "model.safetensors").rename(source[0] / "pytorch_model.bin")
    assert run("from-hf", source[0], tmp_path / "new") == 2
    assert run("to-hf", tmp_path / "nowhere", tmp_path / "new") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    for word, line in zip(
        ["exists", "no such folder", "no *.safetensors", "no checkpoint"], lines, strict=True
    ):
        assert word in line


def test_hub_id_without_the_library_says_which_extra_has_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    arguments = ("--revision", "stage1-step1000")
    assert run("from-hf", "allenai/Olmo-3-1025-7B", tmp_path / "out", *arguments) == 2
    assert "pip install -e '.[hub]'" in capsys.readouterr().err


def test_hub_id_is_fetched_at_its_revision_without_other_formats(source, tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **rest):
        asked.update(rest, repo_id=repo_id)
        return str(source[0])

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    arguments = ("--revision", "stage1-step1000", "--no-check")
    assert run("from-hf", "allenai/Olmo-3-1025-7B", tmp_path / "out", *arguments) == 0
    assert (asked["repo_id"], asked["revision"]) == ("allenai/Olmo-3-1025-7B", "stage1-step1000")
    names = ["config.json", "model-00001-of-00003.safetensors", "tokenizer.json", "merges.txt"]
    others = ["pytorch_model.bin", "consolidated.00.pth", "README.md"]
    taken = [n for n in names + others if any(map(Path(n).match, asked["allow_patterns"]))]
    assert taken == names
    saved = checkpoints.saved_config(tmp_path / "out", 0)["converted"]
    assert (saved["from"], saved["revision"]) == ("allenai/Olmo-3-1025-7B", "stage1-step1000")


def test_a_changed_number_of_a_converted_checkpoint_is_noticed(source, tmp_path, mesh):
    assert run("from-hf", source[0], tmp_path / "ours", "--no-check", "--with-optimizer") == 0
    sums = checkpoints.saved_config(tmp_path / "ours", 0)["checksums"]
    assert len(sums) == 3 * (3 + 4 * 11) + 6  # weights and moments; count, step, spike window
    store = leaves.open_store(tmp_path / "ours" / "0" / "model")
    array = leaves.open_array(store, "blocks.1.ffn.w_up")
    array[0, 3, 5].write(np.float32(0.1)).result()
    with pytest.raises(RuntimeError, match=r"blocks\[1\]\.ffn\.w_up is damaged"):
        train.restore_model(tmp_path / "ours", mesh)


def test_an_interrupted_conversion_leaves_nothing(source, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(parity, "verify_written", stop)
    with pytest.raises(KeyboardInterrupt):
        run("from-hf", source[0], tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


# The check.


def swapped(tensors, layer=2):
    names = [f"model.layers.{layer}.self_attn.{x}_proj.weight" for x in "qk"]
    return tensors | {names[0]: tensors[names[1]], names[1]: tensors[names[0]]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swapped_query_and_key_are_found_at_their_block(source, tmp_path, capsys, dtype):
    other = write_folder(tmp_path / "other", HF, swapped(source[1]))
    assert run("check", source[0], other, "--dtype", dtype) == 1
    assert "block 2 is the first to drift" in capsys.readouterr().err


def test_a_swap_in_a_trained_model_is_far_beyond_rounding_it(tmp_path):
    trained = GOLDENS / "train_fp32"
    hf = json.loads((trained / "config.json").read_text())
    tensors = load_file(trained / "weights_step300.safetensors")
    rounded = {n: x.astype(BF16) for n, x in tensors.items()}
    cases = {"a": tensors, "rounded": rounded, "swapped": swapped(tensors, layer=5)}
    sources = {n: shards.open_hf(write_folder(tmp_path / n, hf, t)) for n, t in cases.items()}
    tokens = parity.check_tokens(sources["a"].config, None, 2, 512)
    assert parity.compare(sources["a"], sources["rounded"], tokens).failures("bfloat16") == []
    report = parity.compare(sources["a"], sources["swapped"], tokens)
    assert "block 5 is the first to drift" in report.failures("bfloat16")[0]


def test_a_conversion_that_went_wrong_is_noticed_and_removed(source, tmp_path, capsys, monkeypatch):
    stream, other = convert.stream, {"layers.1.attn.w_q": "layers.1.attn.w_k"}

    def wrong(source, use):
        return stream(source._replace(read=lambda n, r: source.read(other.get(n, n), r)), use)

    monkeypatch.setattr(convert, "stream", wrong)
    assert run("from-hf", source[0], tmp_path / "out") == 1
    assert "block 1 is the first to drift" in capsys.readouterr().err
    assert run("to-hf", source[0], tmp_path / "out") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_check_runs_the_whole_model_as_the_forward_pass_does(source):
    other = write_folder(source[0].parent / "other", HF, random_tensors(HF, seed=1))
    one, two = shards.open_hf(source[0]), shards.open_hf(other)
    tokens = parity.check_tokens(one.config, None, 2, 48)
    report = parity.compare(one, two, tokens)
    a, b = (
        final_logits(convert.load_hf(f, compute_dtype="float32"), tokens)[..., :250].astype(
            np.float64
        )
        for f in (source[0], other)
    )
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (a, b))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    np.testing.assert_allclose(report.kl_mean, kl.mean(), rtol=1e-4)
    np.testing.assert_allclose(report.kl_max, kl.max(), rtol=1e-4)
    np.testing.assert_allclose(report.max_logit, np.abs(a - b).max(), rtol=1e-4)
    assert report.n_same == (a.argmax(-1) == b.argmax(-1)).sum()
    ratios = []
    for row in range(2):
        loss = [0.0, 0.0]
        for t in range(47):
            loss[0] -= log_p[row, t, tokens[row, t + 1]] / 47
            loss[1] -= log_q[row, t, tokens[row, t + 1]] / 47
        ratios.append(math.exp(loss[1] - loss[0]))
    np.testing.assert_allclose(
        report.perplexity, max(ratios, key=lambda r: abs(math.log(r))), rtol=1e-4
    )


def test_rounding_to_bfloat16_passes_its_limits_and_not_those_of_float32(source, tmp_path, capsys):
    assert run("to-hf", source[0], tmp_path / "out") == 0
    assert run("check", source[0], tmp_path / "out") == 0
    assert run("check", source[0], tmp_path / "out", "--dtype", "float32") == 1
    assert "limits of bfloat16" in capsys.readouterr().out


def test_models_that_differ_only_in_their_configuration_do_not_pass(source, tmp_path, capsys):
    other = write_folder(
        tmp_path / "other", HF | {"rope_theta": 10000.0, "sliding_window": 8}, source[1]
    )
    assert run("check", source[0], other) == 1
    lines = capsys.readouterr().err
    assert "rope_theta=500000.0 in A, 10000.0 in B" in lines
    assert "windows=" in lines
    assert "block 0 is the first to drift" in lines


def test_check_reads_token_files_and_refuses_bad_ones(source, tmp_path, capsys):
    np.arange(200, dtype="<u4").tofile(tmp_path / "good.bin")
    arguments = ("check", source[0], source[0], "--shape", "2", "64", "--tokens")
    assert run(*arguments, tmp_path / "good.bin") == 0
    assert "2 x 64 tokens" in capsys.readouterr().out
    np.full(128, 250, "<u4").tofile(tmp_path / "beyond.bin")
    np.arange(63, dtype="<u4").tofile(tmp_path / "short.bin")
    assert run(*arguments, tmp_path / "beyond.bin") == 2
    assert run(*arguments, tmp_path / "short.bin") == 2


def test_interval_is_wilson_s():
    report = parity.Report([], [0.0], 0.0, 0.0, 0.0, 8, 10, 1.0)
    np.testing.assert_allclose(report.interval(), (0.4901625, 0.9433178), atol=2e-5)


def test_a_divergence_of_1e_9_is_seen():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((4, 1000)).astype(np.float32)
    b = (a + 4e-5 * rng.standard_normal(a.shape)).astype(np.float32)
    kl = parity.divergence(a, b, np.zeros(4, np.int32))[0]
    p = np.exp(a.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    d = b.astype(np.float64) - a
    variance = (p * d**2).sum(1) - (p * d).sum(1) ** 2
    np.testing.assert_allclose(kl, variance / 2, rtol=1e-3)


# Averages and descriptions.


def test_average_is_the_mean_of_the_weights(tmp_path, mesh):
    tensors = [random_tensors(HF, seed) for seed in range(3)]
    folders = [write_folder(tmp_path / f"m{i}", HF, t) for i, t in enumerate(tensors)]
    assert run("average", *folders, "--out", tmp_path / "mean") == 0
    model = train.restore_model(tmp_path / "mean", mesh)
    name = "model.layers.3.mlp.down_proj.weight"
    mean = np.mean([t[name].astype(np.float64) for t in tensors], axis=0).astype(np.float32)
    assert (np.asarray(model.blocks[3].ffn.w_down[0]) == mean).all()


def test_average_of_different_vocabularies_is_refused(source, tmp_path, capsys):
    hf = HF | {"vocab_size": 300}
    other = write_folder(tmp_path / "other", hf, random_tensors(hf))
    assert run("average", source[0], other, "--out", tmp_path / "mean") == 2
    assert "tokenizer_size=250 in A, 300 in B" in capsys.readouterr().err


def test_average_of_one_or_of_different_models_is_refused(source, tmp_path, capsys):
    other = write_folder(tmp_path / "other", HF | {"rope_theta": 10000.0}, source[1])
    assert run("average", source[0], "--out", tmp_path / "mean") == 2
    assert run("average", source[0], other, "--out", tmp_path / "mean") == 2
    assert "rope_theta" in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


def test_info_counts_and_measures_every_tensor(source, capsys):
    assert run("info", source[0]) == 0
    out = capsys.readouterr().out
    assert f"{olmo3.n_parameters(shards.open_hf(source[0]).config):,}" in out
    norm = np.linalg.norm(source[1]["model.layers.3.mlp.up_proj.weight"])
    row = next(line for line in out.splitlines() if line.startswith("    3"))
    assert f"{norm:.4g}" in row


# Against transformers itself, where it is installed.


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", golden_cases("hf/tiny_*"), ids=lambda p: p.name)
@pytest.mark.parametrize("theta", [500000.0, 10000.0])
def test_transformers_loads_the_export_and_gives_its_logits(case, theta, tmp_path, recwarn):
    torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[torch]'")
    source = shards.open_hf(case)
    source = source._replace(config=dataclasses.replace(source.config, rope_theta=theta))
    shards.write_hf(tmp_path, source, "float32", 200_000)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(found.values())
    assert [str(w.message) for w in recwarn if "lmo" in str(w.message)] == []
    ids = np.load(case / "golden.npz")["input_ids"]
    with torch.no_grad():
        theirs = model(torch.tensor(ids)).logits.numpy()
    ours = convert.load_hf(tmp_path, compute_dtype="float32", remat="none")
    np.testing.assert_allclose(final_logits(ours, ids), theirs, atol=1e-5, rtol=0)


# OLMo-core's own checkpoints: tests/goldens/distcp/make.py had torch write one, in two processes.

CORE_NAMES = {  # spec 8.2
    "attention.w_q": "self_attn.q_proj",
    "attention.w_k": "self_attn.k_proj",
    "attention.w_v": "self_attn.v_proj",
    "attention.w_out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "post_attention_layernorm",
    "feed_forward_norm": "post_feedforward_layernorm",
}


def distcp_number(key, shape):
    """What make.py wrote under a key."""
    n = int.from_bytes(key.encode()[-7:], "little") % 1000 + len(key)
    return np.arange(n, n + math.prod(shape), dtype=np.float32).reshape(shape) / np.float32(1024)


def distcp_as_hf(tmp_path, kind):
    """A Hugging Face folder with the numbers of make.py, all rows of the padded vocabulary."""
    hf = json.loads((GOLDENS / "distcp" / "config.json").read_text()) | {"vocab_size": 128}
    shapes = hf_shapes(hf | {"num_key_value_heads": hf["num_attention_heads"]})
    names = {
        "embeddings": "model.embed_tokens",
        "lm_head.norm": "model.norm",
        "lm_head.w_out": "lm_head",
    }
    for i in range(4):
        names |= {f"blocks.{i}.{a}": f"model.layers.{i}.{b}" for a, b in CORE_NAMES.items()}
    tensors = {
        f"{b}.weight": distcp_number(kind.format(f"{a}.weight"), shapes[f"{b}.weight"])
        for a, b in names.items()
    }
    return convert.load_hf(write_folder(tmp_path, hf, tensors))


def test_olmo_core_checkpoint_arrives_with_its_adam_state_and_step(tmp_path, mesh):
    folder = GOLDENS / "distcp"
    arguments = (folder / "step9", tmp_path / "ours", "--config", folder / "config.json")
    assert run("from-core", *arguments) == 0
    kinds = {"w": "model.{}", "m": "optim.state.{}.exp_avg", "v": "optim.state.{}.exp_avg_sq"}
    want = {k: distcp_as_hf(tmp_path / k, kind) for k, kind in kinds.items()}
    tiny = train.PRESETS["tiny"][1]
    model = leaves.open_checkpoint(tmp_path / "ours").config
    assert (model.tokenizer_size, model.vocab_size) == (100, 128)
    tokens = dataclasses.replace(tiny.data, source="x.bin", vocab_size=100, eos_id=1, pad_id=2)
    config = dataclasses.replace(tiny, model=model, data=tokens)
    want_state = train.abstract_state(config, mesh)
    items = ocp.args.Composite(
        model=ocp.args.StandardRestore(want_state.model),
        optimizer=ocp.args.StandardRestore((want_state.optimizer, want_state.step)),
    )
    with checkpoints.open_checkpoints(tmp_path / "ours") as manager:
        restored: Any = manager.restore(9, args=items)
    optimizer, step = restored["optimizer"]
    adam = optimizer.inner[0]
    assert (int(step), int(adam.count)) == (9, 10)
    for got, kind in ((restored["model"], "w"), (adam.mu, "m"), (adam.nu, "v")):
        assert all(map(same, jax.tree.leaves(got), jax.tree.leaves(want[kind])))
    started: Any = train.initial_state(dataclasses.replace(config, init=tmp_path / "ours"), mesh)
    assert int(started.optimizer.inner[0].count) == 10


def test_place_in_the_data_is_read_from_what_olmo_core_s_trainer_saved(tmp_path):
    folder = GOLDENS / "distcp"
    arguments = (folder / "step9", tmp_path / "ours", "--config", folder / "config.json")
    assert run("from-core", *arguments, "--no-check") == 0
    saved = checkpoints.saved_config(tmp_path / "ours", 9)
    want = {"fingerprint": "0123abcd", "seed": 34521, "sequence_length": 32, "batch_instances": 4}
    assert saved["cursor"] == want | {"step": 9, "epoch": 2, "batches": 3}
    assert saved["tokens_seen"] == 9 * 4 * 32


def core_tensors(model):
    """A model's numbers under OLMo-core's names and in its layouts; four layers."""
    tensors = {
        "embeddings": model.embed,
        "lm_head.norm": model.norm,
        "lm_head.w_out": model.unembed,
    }
    for i, block in enumerate(model.blocks):
        b = jax.tree.map(lambda x: np.asarray(x)[0], block)
        d, attn, ffn = b.attn_norm.size, b.attn, b.ffn
        layer = {"w_q": attn.w_q.reshape(d, -1).T, "w_k": attn.w_k.reshape(d, -1).T}
        layer |= {"w_v": attn.w_v.reshape(d, -1).T, "w_out": attn.w_o.reshape(d, -1)}
        layer |= {"q_norm": attn.q_norm.reshape(-1), "k_norm": attn.k_norm.reshape(-1)}
        tensors |= {f"blocks.{i}.attention.{n}": w for n, w in layer.items()}
        layer = {"feed_forward.w1": ffn.w_gate.T, "feed_forward.w2": ffn.w_down}
        layer |= {"feed_forward.w3": ffn.w_up.T, "attention_norm": b.attn_norm}
        layer |= {"feed_forward_norm": b.ffn_norm}
        tensors |= {f"blocks.{i}.{n}": w for n, w in layer.items()}
    return {f"{name}.weight": np.asarray(x) for name, x in tensors.items()}


@contextlib.contextmanager
def torch_by_name():
    """Classes that a pickle knows by the names of torch's, which is not there."""
    kinds = {
        "torch": ["FloatStorage"],
        "torch._utils": ["_rebuild_tensor_v2"],
        "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
        "torch.distributed.checkpoint.metadata": [
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata")
        ],
    }
    found = types.SimpleNamespace()
    with pytest.MonkeyPatch.context() as patch:
        for module, names in kinds.items():
            body = {"__module__": module, "__hash__": object.__hash__}
            classes = {name: type(name, (types.SimpleNamespace,), body) for name in names}
            patch.setitem(sys.modules, module, types.SimpleNamespace(**classes))
            vars(found).update(classes)
        yield found


def torch_saved(value, torch_s):
    """What torch.save makes of a dict of numbers or of one array."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            is_storage = isinstance(obj, torch_s.FloatStorage)
            return ("storage", torch_s.FloatStorage, "0", "cpu", 0) if is_storage else None

        def reducer_override(self, obj):
            if not isinstance(obj, np.ndarray):
                return NotImplemented
            stride = tuple(n // 4 for n in obj.strides)
            arguments = (torch_s.FloatStorage(), 0, obj.shape, stride, False, {})
            return torch_s._rebuild_tensor_v2, arguments

    text, out = io.BytesIO(), io.BytesIO()
    Pickler(text, protocol=2).dump(value)
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", text.getvalue())
        if isinstance(value, np.ndarray):
            archive.writestr("archive/data/0", value.tobytes())
    return out.getvalue()


def write_distcp(folder, tensors, torch_s):
    """Writes tensors as two processes of torch.distributed do, each the half of the rows."""
    folder.mkdir(parents=True)
    described, stored, ends = {}, {}, [0, 0]
    files = [folder / "__0_0.distcp", folder / "__1_0.distcp"]
    for key, x in tensors.items():
        cuts = np.array_split(np.arange(len(x)), 2) if x.ndim else [[0]]
        chunks = []
        for i, rows in enumerate(cuts):
            part = np.ascontiguousarray(x[rows[0] : rows[-1] + 1]) if x.ndim else x
            start = (int(rows[0]), *[0] * (x.ndim - 1))[: x.ndim]
            data = torch_saved(part, torch_s)
            with files[i].open("ab") as f:
                f.write(data)
            chunks.append(torch_s.ChunkStorageMetadata(offsets=start, sizes=part.shape))
            place = {"relative_path": files[i].name, "offset": ends[i], "length": len(data)}
            index = torch_s.MetadataIndex(fqn=key, offset=start, index=i)
            stored[index] = torch_s._StorageInfo(**place)
            ends[i] += len(data)
        described[key] = torch_s.TensorStorageMetadata(chunks=chunks)
    about = torch_s.Metadata(state_dict_metadata=described, storage_data=stored)
    (folder / ".metadata").write_bytes(pickle.dumps(about, protocol=2))


def test_a_run_of_olmo_core_goes_on_bit_for_bit(tmp_path):
    ids = np.random.default_rng(0).integers(0, 250, 3000).astype("<u4")
    ids.tofile(tmp_path / "a.npy")
    flags = ["--preset", "tiny", "--model.d-model", "32", "--model.n-layers", "4"]
    flags += [
        "--model.d-ff",
        "64",
        "--model.n-heads",
        "2",
        "--model.n-kv-heads",
        "1",
        "--model.d-head",
        "16",
    ]
    flags += ["--model.windows", "8", "8", "8", "None", "--data.sequence-length", "32"]
    flags += ["--data.source", str(tmp_path / "a.npy"), "--sample-tokens", "0"]
    flags += ["--max-devices", "1", "--save-every-steps", "2", "--steps", "4"]
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    assert train.main([*flags, "--run-dir", str(theirs)]) == 0

    config = train.parse(flags)
    want = train.abstract_state(config, olmo3.make_mesh(devices=jax.devices()[:1]))
    with checkpoints.open_checkpoints(theirs / "checkpoints") as manager:
        halfway: Any = checkpoints.restore(manager, want, 2)
        end: Any = checkpoints.restore(manager, want, 4)
    adam = halfway.optimizer.inner[0]
    kinds = {"model.{}": halfway.model, "optim.state.{}.exp_avg": adam.mu}
    kinds["optim.state.{}.exp_avg_sq"] = adam.nu
    tensors = {k.format(n): x for k, m in kinds.items() for n, x in core_tensors(m).items()}
    tensors["optim.state.embeddings.weight.step"] = np.array(adam.count, np.float32)
    cursor = checkpoints.saved_config(theirs / "checkpoints", 2)["cursor"]
    loader = {"dataset_fingerprint": cursor["fingerprint"], "seed": cursor["seed"], "epoch": 1}
    loader |= {"batches_processed": 2, "tokens_processed": 2 * 8 * 32, "sequence_length": 32}
    trainer = {"global_step": 2, "global_train_tokens_seen": 512, "data_loader": loader}
    (tmp_path / "step2" / "train").mkdir(parents=True)
    with torch_by_name() as torch_s:
        write_distcp(tmp_path / "step2" / "model_and_optim", tensors, torch_s)
        (tmp_path / "step2" / "train" / "rank0.pt").write_bytes(torch_saved(trainer, torch_s))
    hf = convert.config_to_hf(config.model, {}, "float32")
    (tmp_path / "config.json").write_text(json.dumps(hf))

    arguments = ("--config", tmp_path / "config.json", "--no-check")
    assert run("from-core", tmp_path / "step2", ours / "checkpoints", *arguments) == 0
    assert train.main([*flags, "--run-dir", str(ours)]) == 0
    lines = [(path / "metrics.jsonl").read_text().splitlines() for path in (theirs, ours)]
    rows = [{row["step"]: row for row in map(json.loads, x) if "ce" in row} for x in lines]
    assert list(rows[1]) == [3, 4]
    for name in ("loss", "grad_norm", "lr", "data_hash", "tokens_seen"):
        assert [rows[1][s][name] for s in (3, 4)] == [rows[0][s][name] for s in (3, 4)]
    with checkpoints.open_checkpoints(ours / "checkpoints") as manager:
        got: Any = checkpoints.restore(manager, want, 4)
    for a, b in ((got.model, end.model), (got.optimizer.inner, end.optimizer.inner)):
        assert jax.tree.all(jax.tree.map(same, a, b))


def test_a_checkpoint_without_its_place_in_the_data_is_not_resumed(source, tmp_path, capsys):
    assert run("from-hf", source[0], tmp_path / "run" / "checkpoints", "--no-check") == 0
    assert train.main(["--preset", "tiny", "--run-dir", str(tmp_path / "run")]) == 2
    assert "start from it with --init" in capsys.readouterr().err


def test_damaged_olmo_core_checkpoints_exit_2(tmp_path, capsys):
    shutil.copytree(GOLDENS / "distcp", tmp_path / "core")
    arguments = (
        tmp_path / "core/step9",
        tmp_path / "out",
        "--config",
        tmp_path / "core/config.json",
    )
    file = tmp_path / "core/step9/model_and_optim/__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    assert run("from-core", *arguments) == 2
    assert "__1_0.distcp" in capsys.readouterr().err
    hf = json.loads((tmp_path / "core/config.json").read_text())
    (tmp_path / "core/config.json").write_text(json.dumps(hf | {"intermediate_size": 32}))
    shutil.copy(GOLDENS / "distcp/step9/model_and_optim/__1_0.distcp", file)
    assert run("from-core", *arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 12  # three matrices of four layers
    assert not (tmp_path / "out").exists()


def test_a_pickle_cannot_run_anything(tmp_path):
    (tmp_path / ".metadata").write_bytes(
        b"cos\nsystem\n(S'touch " + bytes(tmp_path / "x") + b"'\ntR."
    )
    with pytest.raises(AttributeError):
        distcp.list_chunks(tmp_path)
    assert not (tmp_path / "x").exists()
