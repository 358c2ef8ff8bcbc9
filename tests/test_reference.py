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
                    got = loader.read_rows(first + batch + 1, rows)
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
