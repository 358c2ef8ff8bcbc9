"""Numbers made by the reference implementations; OLMO3_GOLDENS=DIR runs every case found in DIR."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import golden_cases
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import data

# Data: order, fingerprint, resume, filter, packing. All exact.


def order_config(case: Path, setting: str) -> tuple[dict, data.DataConfig]:
    """The description of a data_order case and its settings as a config."""
    facts = json.loads((case / "data_order.json").read_text())
    tokenizer = facts["tokenizer"]
    config = data.DataConfig(
        source=str(case / "manifest.txt"),
        sequence_length=facts["sequence_length"],
        max_target_sequence_length=facts["settings"][setting]["max_target_sequence_length"],
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
