"""Numbers made by the reference implementations; OLMO3_GOLDENS=DIR runs every case found in DIR."""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import golden_cases
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import safe_open

import convert
import data
import olmo3
import train

# Data: order, fingerprint, resume, filter, packing. All exact.


def order_config(case: Path, setting: str) -> tuple[dict, data.DataConfig]:
    """The description of a data_order case and its settings as a config."""
    facts = json.loads((case / "data_order.json").read_text())
    tokenizer = facts["tokenizer"]
    config = data.DataConfig(
        source=str(case / "manifest.txt"),
        sequence_length=facts["sequence_length"],
        max_target_sequence_length=facts["settings"][setting]["max_target_sequence_length"] or 0,
        seed=facts["seed"],
        vocab_size=tokenizer["vocab_size"],
        eos_id=tokenizer["eos_token_id"],
        pad_id=tokenizer["pad_token_id"],
        bos_id=tokenizer["bos_token_id"],
        dtype=facts["dtype"],
        skip_empty=True,
    )
    return facts, config


def order_cases() -> list[tuple[Path, str]]:
    return [
        (path.parent, setting)
        for path in golden_cases("**/data_order.json")
        for setting in json.loads(path.read_text())["settings"]
    ]


@pytest.mark.parametrize(("case", "setting"), order_cases())
def test_dataset_has_the_instances_and_the_fingerprint_of_olmo_core(case, setting):
    facts, config = order_config(case, setting)
    want = facts["settings"][setting]
    dataset = data.open_dataset(config)
    loader = data.Loader(dataset, config, facts["instances_per_batch"])
    spans = list(zip(dataset.firsts[:-1].tolist(), dataset.firsts[1:].tolist(), strict=True))
    assert dataset.n_instances == want["num_instances"]
    assert spans == [tuple(span) for span in want["file_instance_offsets"]]
    assert dataset.chunk == want["chunk_size"]
    assert loader.batches_per_epoch == want["batches_per_epoch"]
    assert dataset.fingerprint == want["fingerprint"]


@pytest.mark.parametrize(("case", "setting"), order_cases())
def test_order_and_tokens_equal_olmo_core_for_every_epoch_and_rank(case, setting):
    facts, config = order_config(case, setting)
    loader = data.Loader(data.open_dataset(config), config, facts["instances_per_batch"])
    seen = 0
    with np.load(case / "orders.npz") as arrays:
        for name in arrays.files:
            prefix, epoch, *rest = name.split(".")
            if prefix != setting:
                continue
            epoch, want = int(epoch.removeprefix("epoch")), arrays[name]
            first = (epoch - 1) * loader.batches_per_epoch
            if rest == ["global_indices"]:
                assert loader.order(epoch).tolist() == want.tolist()
            else:
                world, rank = (int("".join(filter(str.isdigit, part))) for part in rest[:2])
                for batch, row in enumerate(want):
                    # A reference rank takes every world-th row (spec 6.3); ours take blocks.
                    rows = np.arange(rank, loader.batch_instances, world)
                    got = loader.read(first + batch + 1, rows)
                    have = got.instances if rest[2] == "index" else got.tokens[:, : row.shape[-1]]
                    assert have.tolist() == row.tolist()
            seen += 1
    assert seen


@pytest.mark.parametrize("path", golden_cases("**/decisions_?.json"), ids=lambda p: p.stem)
def test_repetition_filter_decides_as_olmo_core_on_every_row(path):
    facts = json.loads(path.read_text())
    tokens = np.fromfile(path.with_name(f"tokens_{path.stem[-1]}.npy"), "<u4")
    rows = tokens.reshape(facts["n"], facts["sequence_length"])
    for name, kept in facts["decisions"].items():
        longest, shortest, count = (
            int("".join(filter(str.isdigit, part))) for part in name.split("_")
        )
        got = [not data.repeats_too_often(row, (shortest, longest), count) for row in rows]
        assert got == kept, name


def packing_cases():
    """Every `NAME.json` of a packing folder, with its arrays beside it and its files in tokens/."""
    return [p for p in golden_cases("packing/*/*.json") if p.with_suffix(".npz").exists()]


def packed_loader(path, cache):
    """The dataset of a packing case, and whether documents of equal length leave its order open."""
    facts, settings = (found := json.loads(path.read_text())), found["settings"]
    config = data.DataConfig(
        source=str(path.parent / "tokens" / "*.npy"),
        sequence_length=facts["sequence_length"],
        seed=facts["loader"]["seed"],
        vocab_size=500,
        eos_id=497,
        pad_id=499,
        filter_repetitions="instance_filter_config" in settings,
        packed=True,
        pack_group=facts["source_group_size"],
        pack_seed=settings.get("source_permutation_seed"),
        long_documents=facts["long_doc_strategy"],
        cache=str(cache),
    )
    dataset = data.open_dataset(config)
    assert dataset.packing is not None
    groups = dataset.packing.files // config.pack_group
    lengths = list(zip(groups.tolist(), dataset.packing.lengths.tolist(), strict=True))
    loader = data.Loader(dataset, config, facts["loader"]["instances_per_batch"])
    return facts, loader, len(set(lengths)) < len(lengths)


@pytest.mark.parametrize("path", packing_cases(), ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_packing_equals_olmo_core(path, tmp_path):
    facts, loader, ties = packed_loader(path, tmp_path)
    dataset, wanted = loader.dataset, np.load(path.with_suffix(".npz"))
    assert [Path(p).name for p in dataset.paths] == facts["source_files_in_order_used"]
    assert dataset.fingerprint == facts["fingerprint"]
    assert dataset.n_instances == facts["n_instances"]
    assert loader.batches_per_epoch == facts["loader"]["batches_per_epoch"]
    for batch, ids in enumerate(wanted["batch_index_epoch1"]):
        assert loader.instance_ids(batch + 1).tolist() == ids.tolist()
    batch = dataset.read(np.arange(dataset.n_instances, dtype=np.uint32))
    assert batch.segments is not None
    lengths = [np.unique(row, return_counts=True)[1].tolist() for row in batch.segments]
    if ties:  # the reference sorts unstably, so equal lengths come in an order of its machine
        sizes = [[n for _, _, n in dataset.spans(i)] for i in range(dataset.n_instances)]
        masks = wanted["label_mask"].sum(1)
        assert [sum(s) for s in sizes] == masks.tolist()
        assert (batch.targets >= 0).sum() == (wanted["labels"] >= 0).sum()
        assert [len(n) for n in lengths] == [len(n) for n in facts["doc_lens"]]
        assert lengths == facts["doc_lens"]
        return
    assert lengths == facts["doc_lens"]
    assert (batch.tokens == wanted["input_ids"]).all()
    labels = np.where(wanted["labels"] == -100, -1, wanted["labels"])  # without the filter
    if "instance_mask" in wanted:
        labels[~wanted["instance_mask"]] = -1
    assert (batch.targets == labels).all()


def packed_model_cases():
    return [path.parent for path in golden_cases("packing/*/model_*/logits.npz")]


@pytest.mark.parametrize("case", packed_model_cases(), ids=lambda p: f"{p.parent.name}.{p.name}")
def test_attention_within_documents_gives_the_logits_and_loss_of_olmo_core(case, tmp_path):
    facts = json.loads((case / "result.json").read_text())
    path = next(p for p in packing_cases() if p.parent == case.parent and "group" in p.stem)
    _, loader, _ = packed_loader(path, tmp_path)
    wanted = np.load(case / "logits.npz")
    batch = loader.dataset.read(np.array(facts["instances"], np.uint32))
    segments = batch.segments
    mesh = case_mesh(len(batch.tokens))
    with jax.set_mesh(mesh):
        model = convert.load_hf(case, compute_dtype="float32")
        tokens, targets = on_devices(batch.tokens, mesh), on_devices(batch.targets, mesh)
        hidden = jax.jit(lambda m: m(tokens, on_devices(segments, mesh)))(model)
        logits = np.asarray(jax.jit(olmo3.logits)(model, hidden))
        _, (ce, squares) = jax.jit(olmo3.summed_loss, static_argnums=3)(model, hidden, targets, 0.0)
    for row, instance in enumerate(wanted["instances"].tolist()):
        mine = facts["instances"].index(instance)
        assert (batch.tokens[mine] == wanted["input_ids"][row]).all()
        assert np.abs(logits[mine] - wanted["logits"][row]).max() <= 2e-5
    n = (batch.targets >= 0).sum()
    assert n == facts["n_targets"]
    assert abs(float(ce) / n - facts["ce_loss"]) <= 1e-5
    z_loss = facts["z_loss_multiplier"] * float(squares) / n
    assert abs(z_loss - facts["z_loss"]) <= 1e-8


@pytest.mark.parametrize(("case", "setting"), order_cases())
def test_global_batch_on_devices_is_the_reference_batch(case, setting, mesh, tmp_path):
    facts, config = order_config(case, setting)
    loader = data.Loader(data.open_dataset(config), config, facts["instances_per_batch"])
    sharding = NamedSharding(mesh, P(None, ("data", "fsdp")))
    if loader.batch_instances % mesh.size:
        pytest.skip(f"{loader.batch_instances} instances do not divide over {mesh.size} devices")
    stream = data.Stream(loader, sharding, 1, 1, 3)
    for step in (1, 2, 3):
        batch = stream.get(step)
        ids = loader.instance_ids(step)
        assert np.asarray(batch.instances).reshape(-1).tolist() == ids.tolist()
        lanes = jax.jit(data.instance_hash)(batch.instances)
        assert data.format_hash(lanes) == data.format_hash(data.instance_hash(ids))
    stream.close()


# Model: Hugging Face Olmo3, float32.

HF_NAMES = {  # written out here so that the converter's own table is not what it is tested with
    "self_attn.q_proj": lambda b: b.attn.w_q,
    "self_attn.k_proj": lambda b: b.attn.w_k,
    "self_attn.v_proj": lambda b: b.attn.w_v,
    "self_attn.o_proj": lambda b: b.attn.w_o,
    "self_attn.q_norm": lambda b: b.attn.q_norm,
    "self_attn.k_norm": lambda b: b.attn.k_norm,
    "mlp.gate_proj": lambda b: b.ffn.w_gate,
    "mlp.up_proj": lambda b: b.ffn.w_up,
    "mlp.down_proj": lambda b: b.ffn.w_down,
    "post_attention_layernorm": lambda b: b.attn_norm,
    "post_feedforward_layernorm": lambda b: b.ffn_norm,
}
OUT_FIRST = ("self_attn.o_proj", "mlp.down_proj")


def under_hf_names(model):
    """A tree shaped like the model as Hugging Face names and layouts it."""
    named = {
        "model.embed_tokens.weight": np.asarray(model.embed),
        "model.norm.weight": np.asarray(model.norm),
        "lm_head.weight": np.asarray(model.unembed),
    }
    for layer in range(model.config.n_layers):
        index, place = divmod(layer, len(model.config.windows))
        for name, leaf in HF_NAMES.items():
            x = np.asarray(leaf(model.blocks[place])[index])
            if "norm" in name:
                x = x.reshape(-1)
            else:
                x = x.reshape(x.shape[0], -1)
                x = x if name in OUT_FIRST else x.T
            named[f"model.layers.{layer}.{name}.weight"] = x
    return named


def model_from_hf_names(config, named):
    """The inverse of `under_hf_names`, on the mesh in force."""
    shapes = jax.eval_shape(lambda: olmo3.Olmo3(config, jax.random.key(0)))
    mesh, period = jax.sharding.get_mesh(), len(config.windows)

    def put(value, like):
        sharding = NamedSharding(mesh, like.sharding.spec)
        return jax.device_put(np.ascontiguousarray(value).reshape(like.shape), sharding)

    def stack(place, name, like):
        layers = [f"model.layers.{i}.{name}.weight" for i in range(place, config.n_layers, period)]
        transposed = "norm" not in name and name not in OUT_FIRST
        return put(np.stack([named[x].T if transposed else named[x] for x in layers]), like)

    outer = {"embed": "model.embed_tokens", "norm": "model.norm", "unembed": "lm_head"}
    model = shapes
    for field, name in outer.items():
        leaf = put(named[f"{name}.weight"], getattr(shapes, field))
        model = eqx.tree_at(lambda m, f=field: getattr(m, f), model, leaf)
    for place in range(period):
        for name, leaf in HF_NAMES.items():
            value = stack(place, name, leaf(shapes.blocks[place]))
            model = eqx.tree_at(lambda m, p=place, g=leaf: g(m.blocks[p]), model, value)
    return model


def read_tensors(path):
    with safe_open(path, "flax") as file:
        return {name: np.asarray(file.get_tensor(name), np.float32) for name in file.keys()}  # noqa: SIM118


def case_mesh(n_rows):
    """Two devices where the rows divide over them, so that every golden also tests the sharding."""
    return olmo3.make_mesh(devices=jax.devices()[: 2 if n_rows % 2 == 0 else 1])


def on_devices(rows, mesh):
    return jax.device_put(jnp.asarray(rows, jnp.int32), NamedSharding(mesh, P(("data", "fsdp"))))


def shifted(tokens):
    return np.concatenate([tokens[:, 1:], np.full_like(tokens[:, :1], -1)], axis=1)


def hf_cases():
    return [path.parent for path in golden_cases("hf/*/golden.npz")]


@pytest.mark.parametrize("case", hf_cases(), ids=lambda p: p.name)
def test_logits_and_every_layer_equal_hugging_face(case):
    golden, hidden = np.load(case / "golden.npz"), np.load(case / "hidden.npz")["hidden_states"]
    tokens = golden["input_ids"].astype(np.int32)
    mesh = case_mesh(len(tokens))
    with jax.set_mesh(mesh):
        model = convert.load_hf(case, compute_dtype="float32")
        forward = jax.jit(functools.partial(olmo3.forward, keep_states=True))
        final, states = forward(model, on_devices(tokens, mesh))
        logits = np.asarray(jax.jit(olmo3.logits)(model, final))
        final, states = jax.tree.map(np.asarray, (final, states))
    assert np.abs(logits - golden["logits"]).max() <= 1e-5
    assert np.abs(final - hidden[-1]).max() <= 1e-5
    period = len(states)
    for layer in range(model.config.n_layers - 1):
        got = states[layer % period][layer // period]
        want = hidden[layer + 1]  # entries reach ten, where float32 steps by 1e-6
        assert np.abs(got - want).max() <= 1e-5 * max(1.0, np.abs(want).max()), layer


@pytest.mark.parametrize("case", hf_cases(), ids=lambda p: p.name)
def test_all_gradients_equal_hugging_face(case):
    golden, wanted = np.load(case / "golden.npz"), np.load(case / "grads.npz")
    tokens = golden["input_ids"].astype(np.int32)
    mesh = case_mesh(len(tokens))
    with jax.set_mesh(mesh):
        model = convert.load_hf(case, compute_dtype="float32")
        rows, targets = on_devices(tokens, mesh), on_devices(shifted(tokens), mesh)

        @jax.jit
        @jax.value_and_grad
        def loss(model):
            n_targets = (targets >= 0).sum(dtype=jnp.float32)
            return olmo3.summed_loss(model, model(rows), targets, 0.0)[0] / n_targets

        value, gradient = loss(model)
        got = under_hf_names(gradient)
    assert abs(float(value) - float(golden["loss"])) <= 1e-5
    assert set(got) == set(wanted.files)
    for name in wanted.files:
        error = np.abs(got[name] - wanted[name]).max()
        assert error <= 2e-5 * np.abs(wanted[name]).max(), name


@pytest.mark.parametrize("case", hf_cases(), ids=lambda p: p.name)
def test_rotary_frequencies_equal_hugging_face(case):
    wanted = np.load(case / "rope.npz")
    config = convert.config_from_hf(json.loads((case / "config.json").read_text()))
    for scaled, kind in ((False, "sliding"), (True, "full")):
        got = olmo3.inverse_frequencies(config, scaled)
        scale = olmo3.rope_table(config, jnp.zeros(1, jnp.int32), scaled)[0][0, 0]
        np.testing.assert_allclose(got, wanted[f"{kind}_attention_inv_freq"], rtol=2e-7)
        np.testing.assert_allclose(scale, wanted[f"{kind}_attention_scale"], rtol=1e-7)


# Training: OLMo-core's own runs from the same weights and files.


def train_case(case, **model_overrides):
    """The configuration of a recorded run and its start weights."""
    facts = json.loads((case / "settings.json").read_text())
    manifest = case / "manifest.txt"
    manifest = manifest if manifest.exists() else case.parent / "train_fp32" / "manifest.txt"
    tokenizer, schedule, optimizer = facts["tokenizer"], facts["schedule"], facts["optimizer"]
    model = convert.config_from_hf(json.loads((case / "config.json").read_text()))
    config = train.RunConfig(
        run_dir=Path("unused"),
        model=dataclasses.replace(model, **{"compute_dtype": "float32", **model_overrides}),
        optim=train.OptimConfig(
            lr=facts["peak_lr"],
            phases=(
                train.Phase(
                    1, "cosine", schedule["warmup_steps"], schedule["t_max"], schedule["alpha_f"]
                ),
            ),
            beta1=optimizer["betas"][0],
            beta2=optimizer["betas"][1],
            eps=optimizer["eps"],
            weight_decay=optimizer["weight_decay"],
            clip_norm=facts["max_grad_norm"],
            z_loss=facts["z_loss_multiplier"],
            skip_window=optimizer["rolling_interval_length"],
            skip_sigmas=float(optimizer["sigma_factor"]),
            initial_count=optimizer["state_t_at_start"],
        ),
        data=data.DataConfig(
            source=str(manifest),
            sequence_length=facts["sequence_length"],
            max_target_sequence_length=facts["max_target_sequence_length"] or 0,
            seed=facts["data_seed"],
            vocab_size=tokenizer["vocab_size"],
            eos_id=tokenizer["eos_token_id"],
            pad_id=tokenizer["pad_token_id"],
            bos_id=tokenizer["bos_token_id"],
        ),
        steps=facts["steps"],
        batch_instances=facts["global_batch_instances"],
    )
    return config, read_tensors(case / "init.safetensors")


def run_recorded(config, tensors, batches, watch=()):
    """Trains on [steps, B, S] tokens; returns a table of metrics and the watched states."""
    mesh = case_mesh(batches.shape[1] // 2)  # two micro-batches, as the recorded runs had
    table, kept = {}, {}
    with jax.set_mesh(mesh):
        model = model_from_hf_names(config.model, tensors)
        state = jax.jit(functools.partial(train.start_state, config))(model)
        step_function = jax.jit(functools.partial(train.train_step, config))
        for step, rows in enumerate(batches.astype(np.int32), 1):
            halves = rows.reshape(2, -1, rows.shape[-1])
            targets = np.stack([shifted(half) for half in halves])
            sharding = NamedSharding(mesh, P(None, ("data", "fsdp")))
            ids = np.zeros(halves.shape[:2], np.uint32)
            put = functools.partial(jax.device_put, device=sharding)
            batch = data.DeviceBatch(put(halves), put(targets), None, put(ids))
            lr = train.learning_rate(config.optim, step)
            state, metrics = step_function(state, batch, jnp.float32(lr))
            row = {k: float(v) for k, v in metrics.items() if v.ndim == 0}
            row |= {"lr": lr, "count": int(optax.tree.get(state.optimizer.inner, "count"))}
            for name, value in row.items():
                table.setdefault(name, []).append(value)
            if step in watch:
                kept[step] = jax.tree.map(np.asarray, state)
    return {name: np.array(column) for name, column in table.items()}, kept


def l2(x):
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def adam(state):
    return (
        optax.tree.get(state.optimizer.inner, "mu"),
        optax.tree.get(state.optimizer.inner, "nu"),
    )


def train_cases():
    return [p.parent for p in golden_cases("train_fp32*/per_step.npz")]


def trusted_steps(case, n_steps):
    """Training from the real init at this width is chaotic after 40 steps (goldens README 1b)."""
    return min(n_steps, 40) if "default_init" in case.name else n_steps


@pytest.mark.slow
@pytest.mark.parametrize("case", train_cases(), ids=lambda p: p.name)
def test_float32_run_follows_olmo_core_at_every_step(case):
    config, tensors = train_case(case)
    golden = np.load(case / "per_step.npz")
    n = trusted_steps(case, config.steps)
    loader = data.Loader(data.open_dataset(config.data), config.data, config.batch_instances)
    batches = [loader.read(step, np.arange(config.batch_instances)) for step in range(1, n + 1)]
    ids = np.stack([b.instances for b in batches])
    tokens = np.stack([b.tokens for b in batches])
    assert ids.tolist() == golden["instance_index"][:n].tolist()
    assert tokens.tolist() == golden["input_ids"][:n].tolist()
    stats_file = case / "param_stats.json"
    stats = json.loads(stats_file.read_text()) if stats_file.exists() else {}
    got, states = run_recorded(config, tensors, tokens, {1, n, *map(int, stats)})

    np.testing.assert_allclose(got["lr"], golden["lr"][:n], rtol=1e-14)
    assert np.abs(got["ce"] - golden["ce_loss"][:n]).max() <= 1e-5
    assert np.abs(got["z_loss"] - golden["z_loss"][:n]).max() <= 1e-6
    np.testing.assert_allclose(got["grad_norm"], golden["grad_norm"][:n], rtol=1e-4)
    assert got["step_skipped"].tolist() == golden["skipped"][:n].tolist()
    assert got["count"].tolist() == golden["t_after"][:n].tolist()

    if n < config.steps:  # moments of the chaotic run are comparable after its first step only
        stats = {step: wanted for step, wanted in stats.items() if int(step) <= 1}
    for step, wanted in stats.items():
        if step == "0":
            continue
        state = states[int(step)]
        weights, moments = under_hf_names(state.model), [under_hf_names(m) for m in adam(state)]
        sampled = {}  # kind -> what we have and what is wanted at the recorded places of all leaves
        for name, want in wanted.items():
            trees = {"weight": weights[name], "m": moments[0][name], "v": moments[1][name]}
            for kind, value in trees.items():
                entry = want[kind]
                norm = entry["l2"] if isinstance(entry, dict) else entry
                assert l2(value) == pytest.approx(norm, rel=1e-5), (step, name, kind)
                if f"{kind}_samples" in want:
                    ours, theirs = sampled.setdefault(kind, ([], []))
                    ours.extend(value.reshape(-1)[want["sample_index"]].tolist())
                    theirs.extend(want[f"{kind}_samples"])
        for kind, (ours, theirs) in sampled.items():
            assert l2(np.subtract(ours, theirs)) <= 1e-5 * l2(theirs), (step, kind)
    for file, step in (("weights_step1", 1), (f"weights_step{config.steps}", config.steps)):
        path = case / f"{file}.safetensors"
        if path.exists() and step in states:
            got_weights = under_hf_names(states[step].model)
            for name, want in read_tensors(path).items():
                assert l2(got_weights[name] - want) <= 1e-5 * l2(want), (step, name)


def grad_cases():
    return [p.parent for p in golden_cases("train_fp32*/grads_step1.safetensors")]


@pytest.mark.parametrize("case", grad_cases(), ids=lambda p: p.name)
def test_first_gradient_equals_olmo_core(case):
    config, tensors = train_case(case)
    rows = np.load(case / "per_step.npz")["input_ids"][0].astype(np.int32)
    mesh = case_mesh(len(rows))
    with jax.set_mesh(mesh):
        model = model_from_hf_names(config.model, tensors)
        put = functools.partial(
            jax.device_put, device=NamedSharding(mesh, P(None, ("data", "fsdp")))
        )
        ids = np.zeros((1, len(rows)), np.uint32)
        batch = data.DeviceBatch(put(rows[None]), put(shifted(rows)[None]), None, put(ids))
        gradient = functools.partial(train.batch_gradients, z_weight=config.optim.z_loss)
        sums, _ = jax.jit(gradient)(model, batch)
        got = under_hf_names(sums)
    n_targets = rows.shape[0] * (rows.shape[1] - 1)
    for name, want in read_tensors(case / "grads_step1.safetensors").items():
        assert l2(got[name] / n_targets - want) <= 1e-5 * l2(want), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [p.parent for p in golden_cases("train_fp32*/variant_t1.npz")], ids=lambda p: p.name
)
def test_counter_that_starts_at_one_follows_the_run_that_saved_step_zero(case):
    config, tensors = train_case(case)
    golden = np.load(case / "variant_t1.npz")
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, initial_count=1))
    tokens = np.load(case / "per_step.npz")["input_ids"][: len(golden["step"])]
    got, _ = run_recorded(config, tensors, tokens)
    assert np.abs(got["ce"] - golden["ce_loss"]).max() <= 1e-5
    assert got["count"].tolist() == golden["t_after"].tolist()


@pytest.mark.parametrize("path", golden_cases("**/decisions.npz"), ids=lambda p: p.parent.name)
def test_skip_decisions_equal_olmo_core(path):
    golden, facts = np.load(path), json.loads(path.with_suffix(".json").read_text())
    window, sigmas = facts["rolling_interval_length"], float(facts["sigma_factor"])
    optimizer = train.skip_steps(optax.with_extra_args_support(optax.identity()), window, sigmas)

    def decide(state, xs):
        loss, grad_norm = xs
        one = jnp.ones((), jnp.float32)
        updates, state = optimizer.update(one, state, one, loss=loss, grad_norm=grad_norm)
        return state, updates == 0

    @jax.jit
    def decide_all(losses, norms):
        return jax.lax.scan(decide, optimizer.init(jnp.ones(())), (losses, norms))[1]

    for losses, norms, want in zip(*(golden[k] for k in golden.files), strict=True):
        assert np.asarray(decide_all(losses, norms)).astype(int).tolist() == want.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("path", golden_cases("skip*/run_*.npz"), ids=lambda p: p.stem)
def test_skipped_steps_equal_olmo_core_and_touch_nothing(path):
    golden, facts = np.load(path), json.loads(path.with_suffix(".json").read_text())
    weights = path.parent / facts["initial_weights"]
    config, _ = train_case(weights.parent)
    phase = train.Phase(1, "cosine", facts["warmup_steps"], facts["t_max"], facts["alpha_f"])
    optim = dataclasses.replace(config.optim, lr=facts["peak_lr"], phases=(phase,), initial_count=0)
    config = dataclasses.replace(config, optim=optim)
    skipped = facts["skipped_steps"]
    watch = {s for step in skipped for s in (step - 1, step)}
    got, states = run_recorded(config, read_tensors(weights), golden["input_ids"], watch)
    assert (np.flatnonzero(got["step_skipped"]) + 1).tolist() == skipped
    assert got["step_skipped"].tolist() == golden["skipped"].tolist()
    assert np.abs(got["ce"] - golden["ce_loss"]).max() <= 1e-5
    np.testing.assert_allclose(got["grad_norm"], golden["grad_norm"], rtol=1e-4)
    for step in skipped:
        before, after = ((states[s].model, states[s].optimizer.inner) for s in (step - 1, step))
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, after)), step


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", golden_cases("train_bf16*/mixed_2proc.npz"), ids=lambda p: p.parent.name
)
def test_mixed_precision_run_stays_within_the_reference_s_own_divergence(path):
    golden = np.load(path)
    case = path.parents[1] / "train_fp32"
    config, tensors = train_case(case, compute_dtype="bfloat16")
    n = len(golden["step"]) if "OLMO3_GOLDENS" in os.environ else 100  # a test run's share
    golden = {name: golden[name][:n] for name in ("ce_loss", "grad_norm")}
    tokens = np.load(case / "per_step.npz")["input_ids"][:n]
    got, _ = run_recorded(config, tensors, tokens)
    difference = got["ce"] - golden["ce_loss"]
    # The recorded splits share torch's kernels, hence one forward pass to the bit. Other kernels do
    # not: five spellings of the same attention in torch 2.13 differ from the record at step 1 by
    # -5.1e-4 to +3.6e-4. What two kernels and two splits may differ by is the sum, which a run in
    # float32 exceeds (1.49e-3). Seen: 4.2e-4 to 8.6e-4 over JAX 0.10 and 0.12 on AVX-512 and SSE.
    kernels = 5.1e-4
    splits = [
        facts["against_mixed_2proc"]["ce_abs_max_up_to"]
        for facts in json.loads((path.parent / "summary.json").read_text()).values()
        if isinstance(facts, dict) and "against_mixed_2proc" in facts
    ]
    assert abs(difference[0]) <= kernels
    assert np.abs(difference[:10]).max() <= kernels + max(s["10"] for s in splits)
    assert np.abs(difference).max() <= 5e-3
    assert abs(difference[-50:].mean()) <= 2e-3
    np.testing.assert_allclose(got["grad_norm"], golden["grad_norm"], rtol=3.2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", golden_cases("train_bf16*/pure_bf16.npz"), ids=lambda p: p.parent.name
)
def test_bfloat16_state_does_the_damage_the_reference_shows(path):
    golden = np.load(path)
    case = path.parents[1] / "train_fp32"
    config, tensors = train_case(case, compute_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"state_dtype=bfloat16.*\+0\.93"):
        dataclasses.replace(config.optim, state_dtype="bfloat16")
    optim = dataclasses.replace(config.optim, state_dtype="bfloat16", accept_damage=True)
    recorded = np.load(case / "per_step.npz")
    n = len(golden["step"])
    got, states = run_recorded(
        dataclasses.replace(config, optim=optim), tensors, recorded["input_ids"][:n], {n}
    )
    floats = jax.tree.leaves((states[n].model, adam(states[n])))
    assert {str(x.dtype) for x in floats} == {"bfloat16"}
    float32 = recorded["ce_loss"][n - 50 : n]
    damage, wanted = (ce[-50:].mean() - float32.mean() for ce in (got["ce"], golden["ce_loss"]))
    assert damage == pytest.approx(wanted, abs=0.015)
    assert damage > 0.02


# Schedules.


@pytest.mark.parametrize("path", golden_cases("**/schedules.json"), ids=lambda p: p.parent.name)
def test_learning_rates_equal_olmo_core_to_two_units_in_the_last_place(path):
    shapes: dict[str, Any] = {"Cos": "cosine", "HalfCos": "half_cosine", "Linear": "linear"}
    for name, facts in json.loads(path.read_text()).items():
        shape = shapes[facts["cls"].removesuffix("WithWarmup")]
        phase = train.Phase(1, shape, facts["warmup_steps"], facts["t_max"], facts["alpha_f"])
        optim = train.OptimConfig(lr=facts["peak_lr"], phases=(phase,))
        for step, want in zip(facts["steps"], facts["lr"], strict=True):
            got = train.learning_rate(optim, step)
            assert got == pytest.approx(float(want), rel=1e-15, abs=0.0), (name, step)
