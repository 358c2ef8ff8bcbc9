"""Every token once, from wherever it lies, the same for any process count, and nothing silent."""

import dataclasses
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.parse
import zipfile
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import data
from tools import audit, corpus, files, packing

EOS, PAD = 990, 991


@pytest.fixture
def write(tmp_path):
    """Writes a token file and returns its path."""

    def write(name, ids, dtype="<u4"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        np.asarray(ids, dtype).tofile(path)
        return str(path)

    return write


def settings(source, **changes):
    fields: dict[str, Any] = {
        "sequence_length": 4,
        "vocab_size": 1000,
        "eos_id": EOS,
        "pad_id": PAD,
        "seed": 7,
    }
    return data.DataConfig(source=source, **fields | changes)


def loader_of(source, batch=8, resume=None, allow=False, **changes):
    config = settings(source, **changes)
    return data.Loader(data.open_dataset(config), config, batch, resume, allow)


def command(monkeypatch, capsys, *arguments):
    """Exit code, output and error of `python data.py`."""
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, arguments)])
    try:
        data.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


FLAGS = ("--sequence-length", 4, "--vocab-size", 1000, "--eos-id", EOS, "--pad-id", PAD)


# Leaf functions against a formula or a loop.


def test_instance_hash_is_the_sum_of_two_mixes_and_counts_repeats():
    def mix(i, first, second):
        x = (i + 1) * first % 2**32
        x = (x ^ x >> 15) * second % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE3D % 2**32
        return x ^ x >> 16

    ids = np.array([0, 5, 2**32 - 1, 5, 723_873_278], np.uint32)
    a, b = 0x9E3779B1, 0x85EBCA77
    want = [sum(mix(i, *k) for i in ids.tolist()) % 2**32 for k in ((a, b), (b, a))]
    assert data.instance_hash(ids).tolist() == want
    assert data.instance_hash(ids[::-1].copy()).tolist() == want
    assert data.instance_hash(np.unique(ids)).tolist() != want
    assert jax.jit(data.instance_hash)(jnp.asarray(ids)).tolist() == want
    assert data.format_hash(np.array([1, 0xABC], np.uint32)) == "0000000100000abc"


@pytest.mark.parametrize("seed", range(3))
def test_repetition_filter_agrees_with_counting_repeats_one_by_one(seed):
    rng = random.Random(seed)

    def slow(row, periods, count):
        return any(
            all(
                row[i + k] == row[i]
                for i in range(start, start + period)
                for k in range(0, count * period, period)
            )
            for period in range(periods[0], periods[1] + 1)
            if period <= len(row) // 3
            for start in range(len(row) - count * period + 1)
        )

    hits = 0
    for _ in range(200):
        row = [rng.randrange(2) for _ in range(rng.randrange(3, 40))]
        want = slow(row, (1, 3), 5)
        hits += want
        assert data.repeats_too_often(np.array(row), (1, 3), 5) == want
    assert 20 < hits < 180


@pytest.mark.parametrize("seed", range(3))
def test_packing_agrees_with_a_search_over_all_instances(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, 150)
    room, want, turn = [], [], []
    for document in sorted(range(150), key=lambda d: -lengths[d]):
        fits = [i for i in range(len(room)) if room[i] >= lengths[document]]
        if not fits:
            room.append(40)
            want.append([])
            turn.append(0)
        best = min(fits, key=lambda i: (room[i], turn[i])) if fits else len(room) - 1
        room[best] -= lengths[document]
        turn[best] = 1 + max(turn)
        want[best].append(document)
    assert packing.pack(lengths, 40) == want
    assert packing.pack(np.array([16, 3, 9, 5, 14, 7, 2, 11, 4, 6]), 16) == [  # spec 12
        [0],
        [4, 6],
        [7, 3],
        [2, 5],
        [9, 8, 1],
    ]


def test_shuffle_has_the_values_of_the_specification():
    want = [15, 1, 3, 2, 17, 6, 0, 11, 12, 5, 13, 16, 9, 18, 7, 8, 10, 14, 4, 19]
    assert data.shuffled(20, 1, 34522).tolist() == want
    assert data.shuffled(10**6, 1, 34522)[-3:].tolist() == [13754, 778807, 99091]


def test_targets_and_segments_agree_with_a_loop(write):
    path = write("a.npy", [5, 6, EOS, 7, EOS, 8, 9, 1, 2, EOS, 3])
    rows = {}
    for instance in range(2):
        batch = data.open_dataset(
            settings(path, packed=True, sequence_length=6, pack_seed=None)
        ).read(np.array([instance], np.uint32))
        assert batch.segments is not None
        rows[instance] = [x[0].tolist() for x in (batch.tokens, batch.targets, batch.segments)]
    assert rows[0] == [[8, 9, 1, 2, EOS, PAD], [9, 1, 2, EOS, -1, -1], [0, 0, 0, 0, 0, 1]]
    assert rows[1] == [[5, 6, EOS, 7, EOS, PAD], [6, EOS, 7, EOS, -1, -1], [0, 0, 0, 1, 1, 2]]
    plain = data.open_dataset(settings(path)).read(np.array([1], np.uint32))
    assert plain.tokens.tolist() == [[EOS, 8, 9, 1]]
    assert plain.targets.tolist() == [[8, 9, 1, -1]]
    assert plain.segments is None


def test_filtered_instance_keeps_its_tokens_and_loses_its_targets(write):
    path = write("a.npy", [*range(100), *[1, 2] * 50])
    batch = data.open_dataset(settings(path, sequence_length=100, filter_repetitions=True)).read(
        np.array([0, 1], np.uint32)
    )
    assert batch.tokens[1].tolist() == [1, 2] * 50
    assert (batch.targets[0, :-1] == np.arange(1, 100)).all()
    assert (batch.targets[1] == -1).all()


def test_uint16_files_read_as_uint32_ones_do(write):
    ids = np.random.default_rng(0).integers(0, 900, 64)
    wide, narrow = write("a.npy", ids), write("b.npy", ids, "<u2")
    a = loader_of(wide).read(2, np.arange(8))
    b = loader_of(narrow, dtype="uint16").read(2, np.arange(8))
    assert (a.tokens == b.tokens).all()
    assert (a.targets == b.targets).all()


# The embedded corpus.


def test_embedded_corpus_is_made_once_and_split_by_document(tmp_path):
    config = data.DataConfig(
        cache=str(tmp_path), vocab_size=258, eos_id=256, pad_id=257, sequence_length=256
    )
    started = time.perf_counter()
    train, heldout = data.list_files(config), data.list_files(config, "heldout")
    assert time.perf_counter() - started < 20
    texts = [[bytes(d[:-1].tolist()) for d in data.documents(p, config)] for p in (train, heldout)]
    share = sum(map(len, texts[1])) / sum(map(len, texts[0] + texts[1]))
    assert 0.01 < share < 0.15
    assert len(texts[0] + texts[1]) > 500
    assert not set(texts[0]) & set(texts[1]) - {b""}
    assert Path(os.__file__).read_bytes() in texts[0] + texts[1]
    stamps = [Path(p).stat().st_mtime_ns for p in train + heldout]
    data.open_dataset(config)
    assert [Path(p).stat().st_mtime_ns for p in train + heldout] == stamps
    assert not list(tmp_path.rglob("*.tmp"))


def test_embedded_corpus_refuses_the_ids_of_another_tokenizer():
    with pytest.raises(ValueError, match=r"eos_id=100257.*source=stdlib"):
        data.open_dataset(data.DataConfig())


# Field reports A: order, sharding, resume.


@pytest.mark.parametrize("n_processes", [1, 2, 4, 8])
def test_rows_of_all_processes_are_each_instance_once(write, n_processes):  # A1, A10
    loader = loader_of(write("a.bin", np.arange(400) % 900))
    seen = Counter()
    for step in range(1, loader.batches_per_epoch + 1):
        parts = [
            loader.ids(np.array([step]), rows)[0].tolist()
            for rows in np.split(np.arange(8), n_processes)
        ]
        together = [i for part in parts for i in part]
        assert together == loader.instance_ids(step).tolist()
        seen.update(together)
    assert set(seen.values()) == {1}
    assert len(seen) == loader.batches_per_epoch * 8 == 96


def test_order_command_prints_the_same_instances_for_every_process_count(
    write, monkeypatch, capsys
):
    path = write("a.bin", np.arange(400) % 900)
    steps = {}
    for count in (1, 2, 8):
        code, out, _ = command(
            *(monkeypatch, capsys, "order", "--source", path, *FLAGS, "--batch", 8),
            *("--steps", 12, "--processes", count),
        )
        assert code == 0
        lines = [line for line in out.splitlines() if line.startswith("  process")]
        assert len(lines) == 12 * count
        steps[count] = " ".join(line.split(": ")[1] for line in lines)
    assert steps[1] == steps[2] == steps[8]
    assert len(set(steps[1].split())) == 96


def test_next_epoch_follows_by_itself_with_a_new_order(write):  # A11
    loader = loader_of(write("a.npy", np.arange(400) % 900))
    n = loader.batches_per_epoch
    tail = np.concatenate([loader.instance_ids(n + k) for k in (1, 2, 3)])
    assert tail.tolist() == loader.order(2)[:24].tolist()
    assert loader.order(2).tolist() != loader.order(1).tolist()


@pytest.mark.parametrize("step", [0, 1, 11, 12, 13, 24, 30])
def test_resumed_loader_goes_on_with_the_same_instances(write, step):
    path = write("a.npy", np.arange(400) % 900)
    whole = loader_of(path)
    again = loader_of(path, resume=whole.cursor(step))
    for k in range(step + 1, step + 20):
        assert again.instance_ids(k).tolist() == whole.instance_ids(k).tolist()
    assert again.cursor(step + 5) == whole.cursor(step + 5)


def test_another_batch_size_goes_on_at_the_same_token(write):
    path = write("a.npy", np.arange(400) % 900)
    old = loader_of(path, 8)
    with pytest.raises(ValueError, match="batch_instances: 8 -> 4"):
        loader_of(path, 4, resume=old.cursor(5))
    new = loader_of(path, 4, resume=old.cursor(5), allow=True)
    halves = [*new.instance_ids(6), *new.instance_ids(7)]
    assert halves == old.instance_ids(6).tolist()
    uneven = loader_of(path, 3, resume=old.cursor(5), allow=True)  # 40 instances are 13 batches
    assert uneven.instance_ids(6).tolist() == uneven.order(1)[39:42].tolist()


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"seed": 8}, "seed: 7 -> 8"), ({"sequence_length": 8}, "sequence_length: 4 -> 8")],
)
def test_resume_refuses_another_order_unless_told(write, changes, name):
    path = write("a.npy", np.arange(400) % 900)
    cursor = loader_of(path).cursor(3)
    with pytest.raises(ValueError, match=name):
        loader_of(path, resume=cursor, **changes)
    with pytest.warns(UserWarning, match="order will differ"):
        assert loader_of(path, resume=cursor, allow=True, **changes).start.step == 3


def test_resume_refuses_changed_files_and_names_both_fingerprints(write):  # A6
    path = write("a.npy", np.arange(400) % 900)
    cursor = loader_of(path).cursor(3)
    write("a.npy", np.arange(401) % 900)
    with pytest.raises(ValueError, match=f"fingerprint: {cursor.fingerprint} -> "):
        loader_of(path, resume=cursor)
    with pytest.warns(UserWarning, match="order will differ") as warned:
        assert loader_of(path, resume=cursor, allow=True).start.step == 3
    assert len(warned) == 1


def test_large_orders_are_cached_by_identity_and_memory_mapped(tmp_path, monkeypatch):
    def make(*sizes):
        config = settings("none", cache=str(tmp_path))
        paths = [f"f{i}.npy" for i in range(len(sizes))]
        dataset = data.make_dataset(config, data.Files(), paths, np.array(sizes) * 16)
        return data.Loader(dataset, config, 8)

    loader = make(1_200_000)
    want = data.shuffled(1_200_000, 1, 8)
    assert (loader.order(1) == want).all()
    assert isinstance(loader.order(1).base, np.memmap)
    monkeypatch.setattr(data, "shuffled", lambda *_: pytest.fail("made again"))
    assert (make(1_200_000).order(1) == want).all()
    with pytest.raises(pytest.fail.Exception):  # as many instances in other files
        make(600_000, 600_000).order(1)
    [file] = tmp_path.glob("order-*.u4")
    with file.open("ab") as torn:
        torn.truncate(1000)
    with pytest.raises(pytest.fail.Exception):
        make(1_200_000).order(1)


def test_a_cached_file_is_made_by_one_process_and_awaited_by_the_others(tmp_path):
    program = """if True:
        import sys, time
        from pathlib import Path
        from tools import files

        def make(path):
            with Path(sys.argv[2]).open("a") as log:
                log.write("made ")
            time.sleep(1)
            path.write_text("whole")

        print(files.made_once(Path(sys.argv[1]), make).read_text())
    """
    command = [sys.executable, "-c", program, str(tmp_path / "x"), str(tmp_path / "log")]
    root = Path(data.__file__).parent
    started = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate()[0] for process in started] == [b"whole\n"] * 3
    assert (tmp_path / "log").read_text() == "made "


def test_steps_that_repeat_data_are_counted_before_the_run(write):  # A8
    files = ",".join(write(f"{i}.npy", np.arange(40)) for i in range(3))  # 30 instances
    loader = loader_of(files, 7)  # 4 batches an epoch
    assert [loader.repeats(last) for last in (3, 4, 5, 9)] == [0, 0, 1, 5]
    assert loader_of(files, 7, resume=loader.cursor(3)).repeats(5) == 1
    assert loader_of(files, 7, resume=loader.cursor(6)).repeats(9) == 3


# Field reports B: token files.


def test_empty_file_is_named_and_can_be_accepted(write):  # B1
    a, b = write("a.npy", np.arange(40)), write("b.npy", [])
    with pytest.raises(ValueError, match=r"1 of 2 token files empty.*skip_empty.*b\.npy"):
        data.open_dataset(settings(f"{a},{b}"))
    assert data.open_dataset(settings(f"{a},{b}", skip_empty=True)).n_instances == 10


def test_torn_file_is_named_with_its_size(write):  # B2
    path = write("b.npy", np.arange(4097), "u1")
    with pytest.raises(ValueError, match=r"b\.npy: 4097 bytes is not a multiple of 4 \(uint32\)"):
        data.open_dataset(settings(path))


def test_wrong_dtype_is_found_both_ways_before_training(write):  # B3
    ids = np.random.default_rng(0).integers(1, 900, 4000)
    with pytest.raises(ValueError, match=r"id \d+ at token 0 .*did you mean dtype=uint16"):
        data.open_dataset(settings(write("a.npy", ids, "<u2")))
    with pytest.warns(UserWarning, match="is it dtype=uint32"):
        data.open_dataset(settings(write("b.npy", ids, "<u4"), dtype="uint16"))


def test_id_out_of_range_in_the_middle_is_found_when_read(write):
    ids = np.arange(40_000) % 900
    ids[12_345] = 1000
    loader = loader_of(write("a.npy", ids))
    [bad] = [k for k in range(1, loader.batches_per_epoch + 1) if 3086 in loader.instance_ids(k)]
    with pytest.raises(ValueError, match=r"a\.npy: id 1000 at token 12345 is not below"):
        loader.read(bad, np.arange(8))


def test_file_shorter_than_its_index_is_refused(write, tmp_path, monkeypatch, capsys):  # B5
    path = write("a.npy", np.arange(400) % 900)
    index = tmp_path / "i.json"
    assert command(monkeypatch, capsys, "index", "--manifest", path, *FLAGS, "--out", index)[0] == 0
    assert data.open_dataset(settings(str(index))).n_instances == 100
    assert json.loads(index.read_text())["first_ids"] == list(range(8))
    write("a.npy", np.arange(396) % 900)
    with pytest.raises(ValueError, match=r"a\.npy: 1584 bytes, index .* has 1600; index again"):
        data.open_dataset(settings(str(index)))


def test_too_few_instances_for_a_batch_is_said_with_both_numbers(write):  # B6
    with pytest.raises(ValueError, match=r"dataset has 3 instances of 4 .* global batch needs 8"):
        loader_of(write("a.npy", np.arange(12)))


def test_instances_behind_two_to_the_thirty_one_tokens_are_read_where_they_are(tmp_path):  # B9
    path = tmp_path / "big.npy"
    at = 2**31 + 4 * 1234
    with path.open("wb") as file:
        file.truncate(2**33 + 2**20)
        file.seek(at * 4)
        file.write(np.array([11, 12, 13, 14], "<u4").tobytes())
    dataset = data.open_dataset(settings(str(path)))
    assert dataset.read(np.array([at // 4], np.uint32)).tokens.tolist() == [[11, 12, 13, 14]]


def test_missing_files_are_counted_and_named_at_once(
    write, tmp_path, monkeypatch, capsys
):  # B10, B11
    write("x/a.npy", np.arange(40))
    manifest = tmp_path / "m.txt"
    rows = ["# a mix", "", "l,x/a.npy", *(f"l,x/{{TOKENIZER}}/{i}.npy" for i in range(7))]
    manifest.write_text("\n".join(rows))
    code, _, err = command(
        monkeypatch, capsys, "index", "--manifest", manifest, *FLAGS, "--out", tmp_path / "i.json"
    )
    assert code == 2
    assert "7 of 8 token files missing" in err
    assert f"{tmp_path}/x/allenai/dolma2-tokenizer/4.npy" in err
    assert "5.npy" not in err
    assert not (tmp_path / "i.json").exists()


def test_check_warns_without_eos_and_refuses_mixed_beginnings(
    write, monkeypatch, capsys
):  # B12, B13
    ids = np.random.default_rng(0).integers(1, 900, 1_100_000)
    code, out, err = command(
        monkeypatch, capsys, "check", "--source", write("a.npy", ids), *FLAGS, "--filtered", 10
    )
    assert code == 0
    assert "1,100,000  1-899  0" in out
    assert "no eos_id=990 in 1,100,000 tokens" in err
    ids[::10], ids[1::10] = EOS, 5
    files = f"{write('b.npy', ids)},{write('c.npy', np.where(np.arange(len(ids)) % 10, ids, 990))}"
    code, out, _ = command(monkeypatch, capsys, "check", "--source", files, *FLAGS)
    assert code == 0
    assert out.count("110,000  10.0  5") == 2
    plain = np.random.default_rng(1).integers(1, 900, 10_000)
    plain[::10] = EOS
    mixed = f"{files},{write('d.npy', plain)}"
    code, _, err = command(monkeypatch, capsys, "check", "--source", mixed, *FLAGS)
    assert code == 2
    assert "documents begin differently" in err


def test_check_prints_the_share_of_filtered_instances(write, monkeypatch, capsys):
    rows = np.random.default_rng(0).integers(1, 900, (20, 128))
    rows[:5] = np.tile([1, 2], 64)
    code, out, _ = command(
        *(monkeypatch, capsys, "check", "--source", write("a.npy", rows), "--sequence-length", 128),
        *FLAGS[2:],
    )
    assert code == 0
    assert "25.00%" in out


def test_files_that_begin_without_the_configured_bos_are_refused(write, tmp_path):  # B12
    a, b = write("a.npy", [5, *range(39)]), write("b.npy", range(40))
    assert data.open_dataset(settings(a, bos_id=5)).n_instances == 10
    with pytest.raises(ValueError, match=r"b\.npy: begins with id 0.*bos_id=5"):
        data.open_dataset(settings(f"{a},{b}", bos_id=5))


# Manifests and indexes.


def test_published_manifests_get_their_tokenizer_folder():
    dolma2 = "allenai/dolma2-tokenizer"
    folders = {
        "OLMo-mix-0625-official": "allenai/dolma3-tokenizer",
        "OLMo-mix-0625": dolma2,
        "OLMo-mix-0625-150Bsample": dolma2,
        "OLMo-midtraining-mix-0925-ingredient2-100B": "allenai/dolma3-tokenizer",
        "OLMo-longmino-mix-0625": "allenai/dolma3-tokenizer",
        "v3-small-ppl-validation": "dolma2-tokenizer",
        "mine": dolma2,
    }
    for name, folder in folders.items():
        assert data.tokenizer_folder(f"mixes/{name}.txt", dolma2) == folder
        assert data.tokenizer_folder(f"mixes/{name}.txt", "other") == "other"


def test_manifest_paths_start_at_the_base_or_beside_the_manifest(tmp_path):
    manifest = tmp_path / "m.txt"
    manifest.write_text("label,a/b.npy\n")
    assert data.list_files(settings(str(manifest))) == [f"{tmp_path}/a/b.npy"]
    for base in ("https://olmo-data.org", "gs://ai2-llm/", "s3://ai2-llm"):
        [path] = data.list_files(settings(str(manifest), base=base))
        assert path == f"{base.rstrip('/')}/a/b.npy"
    manifest.write_text("no comma\n")
    with pytest.raises(ValueError, match="'no comma' is not a `label,path` line"):
        data.list_files(settings(str(manifest)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("sequence_length", 8), ("dtype", "uint16"), ("tokenizer", "x"), ("eos_id", 1), ("bos_id", 2)],
)
def test_index_of_another_configuration_is_refused_by_field(write, tmp_path, name, value):  # A7
    path, index = write("a.npy", np.arange(400) % 900), tmp_path / "i.json"
    config = settings(path)
    audit.write_index(index, config, [path], np.array([1600]))
    with pytest.raises(ValueError, match=f"{name}={value}, but index"):
        data.open_dataset(settings(str(index), **{name: value}))


def test_foreign_and_damaged_indexes_are_refused(write, tmp_path):
    path, index = write("a.npy", np.arange(400) % 900), tmp_path / "i.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match="is no sound index"):
        data.open_dataset(settings(str(index)))
    audit.write_index(index, settings(path), [path], np.array([1600]))
    index.write_text(index.read_text().replace("1600", "1604"))
    with pytest.raises(ValueError, match="is no sound index"):
        data.open_dataset(settings(str(index)))


def test_identity_is_that_of_the_published_scripts_unless_told_otherwise():
    paths, sizes = ["x/a.npy", "b.npy"], np.array([4000, 4004])

    def identity(**changes):
        return data.fingerprint(data.DataConfig(**changes), paths, sizes)

    fields = (
        "class=NumpyFSLDatasetvocab_size=100278,pad_token_id=100277,eos_token_id=100257,"
        "dtype=<class 'numpy.uint32'>,max_target_sequence_length=8192,bos_token_id=None,"
        "path=a.npy,size=4000,path=b.npy,size=4004,"
    )
    assert identity() == hashlib.sha256(fields.encode()).hexdigest()
    assert identity(max_target_sequence_length=8192) == identity()
    assert identity(max_target_sequence_length=0) != identity()
    assert identity(sequence_length=4096) != identity()


def test_config_refuses_lengths_and_ids_that_cannot_be():
    for changes, text in (
        ({"max_target_sequence_length": 6}, "max_target_sequence_length=6"),
        ({"eos_id": 1000}, "vocab_size=1000"),
        ({"dtype": "uint16", "vocab_size": 70_000}, "dtype=uint16"),
    ):
        with pytest.raises(ValueError, match=text):
            settings("a.npy", **changes)


# Onto the devices.


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_devices_hold_the_batch_for_any_mesh_and_accumulation(write, shape, accumulation):
    loader = loader_of(write("a.npy", np.arange(1600) % 900), 16)
    devices = jax.devices()[: shape[0] * shape[1]]
    names, kinds = ("data", "fsdp"), (AxisType.Explicit,) * 2
    mesh = jax.make_mesh(shape, names, axis_types=kinds, devices=devices)
    stream = data.Stream(loader, NamedSharding(mesh, P(None, names)), accumulation, 1, 30)
    for step in range(1, 31):
        batch, want = stream.get(step), loader.read(step, np.arange(16))
        assert batch.tokens.shape == (accumulation, 16 // accumulation, 4)
        assert np.asarray(batch.tokens).reshape(16, 4).tolist() == want.tokens.tolist()
        assert np.asarray(batch.targets).reshape(16, 4).tolist() == want.targets.tolist()
        assert np.asarray(batch.instances).reshape(-1).tolist() == want.instances.tolist()
        assert batch.tokens.sharding == NamedSharding(mesh, P(None, names))
    stream.close()


def test_stream_reads_only_the_rows_of_its_own_devices(write, mesh):
    asked = []

    class Watched(data.Loader):
        def read(self, step, rows):
            asked.append(rows.tolist())
            return super().read(step, rows)

    config = settings(write("a.npy", np.arange(1600) % 900))
    loader = Watched(data.open_dataset(config), config, 16)

    class Half(NamedSharding):  # as if the other half of the devices were another process's
        def addressable_devices_indices_map(self, global_shape):
            whole = super().addressable_devices_indices_map(global_shape)
            return dict(list(whole.items())[:4])

    stream = data.Stream(loader, NamedSharding(mesh, P(None, ("data", "fsdp"))), 1, 1, 1)
    stream.get(1)
    stream.sharding = Half(mesh, P(None, ("data", "fsdp")))
    with pytest.raises(Exception, match=r".*"):  # the batch cannot be put together, but was read
        stream._load(1)
    stream.close()
    assert sorted(asked[0]) == list(range(16))
    assert sorted(asked[1]) == list(range(8))


def test_stream_is_bounded_raises_what_readers_raise_and_joins(write, mesh):
    ids = np.arange(40_000) % 900
    ids[12_345] = 1000
    loader = loader_of(write("a.npy", ids), 800, read_ahead=2)
    [bad] = [k for k in range(1, 13) if 3086 in loader.instance_ids(k)]
    stream = data.Stream(loader, NamedSharding(mesh, P(None, ("data", "fsdp"))), 1, 1, 1000)
    for step in range(1, bad):
        stream.get(step)
        assert len(stream.pending) <= 2
    with pytest.raises(ValueError, match="id 1000 at token 12345"):
        stream.get(bad)
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("data")]


# The audit.


class ShardedTwice(data.Loader):
    """The published fault: the sampler already deals steps out to hosts, and rows are cut again."""

    process, n_processes = 0, 1

    def ids(self, steps, rows):
        return super().ids((steps - 1) * self.n_processes + self.process + 1, rows)


def test_audit_proves_the_order_and_finds_double_sharding(write):
    config = settings(write("a.npy", np.arange(4000) % 900))
    dataset = data.open_dataset(config)

    def make(process, n, resume):
        return data.Loader(dataset, config, 32, resume)

    def make_faulty(process, n, resume):
        loader = ShardedTwice(dataset, config, 32, resume)
        loader.process, loader.n_processes = process, n
        return loader

    fault, proof = audit.audit_order(make, [1, 2, 8, 32], 2)
    assert fault is None
    assert "each of 2 epochs of 31 steps visits 992 of 1,000" in proof
    fault, _ = audit.audit_order(make_faulty, [1, 2], 1)
    assert fault is not None
    assert fault.startswith("step 1, 2 processes: row 16 is instance")


def test_audit_finds_an_instance_that_comes_twice(write):
    config = settings(write("a.npy", np.arange(4000) % 900))
    dataset = data.open_dataset(config)

    class Replays(data.Loader):
        def ids(self, steps, rows):
            return super().ids(np.where(steps == 20, 3, steps), rows)

    fault, _ = audit.audit_order(lambda *_: Replays(dataset, config, 32), [1], 1)
    assert fault is not None
    assert fault.startswith("step 20: instance")


def test_live_hash_of_the_devices_shows_double_sharding(write, mesh):
    config = settings(write("a.npy", np.arange(4000) % 900))
    dataset = data.open_dataset(config)
    honest = data.Loader(dataset, config, 32)
    total = np.zeros(2, np.uint32)
    for process in range(2):  # two hosts, each with half of the rows of what it takes for step 3
        loader = ShardedTwice(dataset, config, 32)
        loader.process, loader.n_processes = process, 2
        batch = loader.read(3, np.split(np.arange(32), 2)[process])
        total += data.instance_hash(batch.instances)
    assert total.tolist() != data.instance_hash(honest.instance_ids(3)).tolist()
    loader = ShardedTwice(dataset, config, 32)
    loader.n_processes = 2
    stream = data.Stream(loader, NamedSharding(mesh, P(None, ("data", "fsdp"))), 1, 3, 3)
    lanes = jax.jit(data.instance_hash)(stream.get(3).instances)
    stream.close()
    assert lanes.tolist() != data.instance_hash(honest.instance_ids(3)).tolist()


def test_audit_of_a_run_finds_the_step_that_repeats(write, tmp_path, monkeypatch, capsys):  # A2
    config = settings(write("a.npy", np.arange(400) % 900))
    dataset = data.open_dataset(config)
    loader = data.Loader(dataset, config, 8)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(
        json.dumps(
            {
                "data": dataclasses.asdict(config),
                "batch_instances": 8,
                "fingerprint": dataset.fingerprint,
            }
        )
    )

    def log(*steps):
        lines = [{"event": "start"} if k is None else row(*k) for k in steps]
        (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"st')

    def row(step, consumed):
        ids = loader.instance_ids(consumed)
        return {"step": step, "data_hash": data.format_hash(data.instance_hash(ids))}

    honest = [(k, k) for k in range(1, 15)]
    log(None, *honest[:6], None, *honest[4:])
    code, out, _ = command(monkeypatch, capsys, "audit", "--run", run)
    assert (code, out) == (0, "ok: 14 steps up to 14 consumed the batches of the order\n")
    log(None, *honest[:6], None, (7, 6), (8, 7))  # a batch again after each restart (A2)
    code, out, _ = command(monkeypatch, capsys, "audit", "--run", run)
    assert code == 1
    assert out.startswith("step 7: data_hash")
    assert "it is the batch of step 6 again" in out
    log(None, *honest[:3], *honest[8:])
    code, out, _ = command(monkeypatch, capsys, "audit", "--run", run)
    assert (code, out) == (1, "step 9 follows step 3 without a restart\n")


def test_audit_of_a_run_follows_a_change_of_batch_size(write, tmp_path):
    config = settings(write("a.npy", np.arange(400) % 900))
    dataset = data.open_dataset(config)
    first = data.Loader(dataset, config, 8)
    second = data.Loader(dataset, config, 4, first.cursor(3), allow_data_change=True)
    saved = {"data": dataclasses.asdict(config), "batch_instances": 8}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    rows: list[dict[str, Any]] = [{"event": "start"}]
    for step in range(1, 8):
        if step == 4:
            rows.append({"event": "start", "cursor": dataclasses.asdict(second.start)})
        ids = (first if step < 4 else second).instance_ids(step)
        rows.append({"step": step, "data_hash": data.format_hash(data.instance_hash(ids))})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert audit.audit_run(tmp_path)[0] is None


# Remote files.


class Server(ThreadingHTTPServer):
    """Serves the files of a folder, by range unless told otherwise, with faults by request.

    Plainly, and under the addresses of the JSON interface of Google's storage.
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.fault, self.ranges, self.n_requests = folder, lambda n: None, True, 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # clients that went away are part of the tests


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server: Any = self.server
        with server.lock:
            server.n_requests += 1
            fault = server.fault(server.n_requests)
        name = urllib.parse.unquote(self.path.partition("?")[0])
        path = server.folder / name.removeprefix("/storage/v1/b/bucket/o").lstrip("/")
        if fault in (403, 503) or not path.is_file():
            self.send_response(fault or 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body, wanted = path.read_bytes(), self.headers.get("Range")
        if fault == "reset":
            self.connection.shutdown(2)
            self.close_connection = True
            return
        if fault == "slow":
            time.sleep(1.5)
        if wanted and server.ranges:
            start, end = wanted.removeprefix("bytes=").split("-")
            if int(start) >= len(body):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            size, body = len(body), body[int(start) : int(end) + 1]
            if fault == "short":
                body = body[: len(body) // 2]
            span = f"bytes {start}-{int(start) + len(body) - 1}/{size}"
            self.send_header("Content-Range", span)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if fault == "torn" else body)
            self.close_connection = fault == "torn"


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def remote_manifest(tmp_path, write, n_files=3):
    rng = np.random.default_rng(0)
    for i in range(n_files):
        write(f"files/{i}.npy", rng.integers(0, 900, 1000 + i))
    manifest = tmp_path / "m.txt"
    manifest.write_text("".join(f"l,files/{i}.npy\n" for i in range(n_files)))
    return manifest


def test_remote_files_give_the_batches_of_local_ones_through_every_fault(
    write, tmp_path, server, mesh
):
    manifest = remote_manifest(tmp_path, write)
    local = loader_of(str(manifest), 16)
    remote = loader_of(str(manifest), 16, base=server.url)
    assert remote.dataset.fingerprint == local.dataset.fingerprint
    files = data.Files(timeout_seconds=0.75)
    remote.dataset = dataclasses.replace(remote.dataset, files=files)
    faults = {3: "reset", 5: 503, 7: "torn", 11: "slow", 13: "short"}
    server.fault = lambda n: next((f for k, f in faults.items() if n % 37 == k), None)
    stream = data.Stream(remote, NamedSharding(mesh, P(None, ("data", "fsdp"))), 1, 1, 20)
    for step in range(1, 21):
        batch, want = stream.get(step), local.read(step, np.arange(16))
        assert np.asarray(batch.tokens)[0].tolist() == want.tokens.tolist()
    stream.close()
    assert server.n_requests > 350


def test_reading_gives_up_after_its_tries_naming_url_and_status(write, tmp_path, server):
    manifest = remote_manifest(tmp_path, write)
    dataset = data.open_dataset(settings(str(manifest), base=server.url))
    dataset = dataclasses.replace(dataset, files=data.Files(tries=3))
    server.fault, before = lambda n: 503, server.n_requests
    with pytest.raises(OSError, match=rf"{server.url}/files/0.npy at byte 16: failed 3.*503"):
        dataset.read(np.array([1], np.uint32))
    assert server.n_requests >= before + 3


def test_what_cannot_get_better_is_not_tried_again(write, tmp_path, server):
    manifest = remote_manifest(tmp_path, write)
    config = settings(str(manifest), base=server.url)
    dataset = data.open_dataset(config)
    server.fault, before = lambda n: 403, server.n_requests
    with pytest.raises(OSError, match="PERMISSION_DENIED"):
        dataset.read(np.array([1], np.uint32))
    with pytest.raises(OSError, match=r"asking for its size failed.*403"):
        data.Files().size(f"{server.url}/files/0.npy")
    assert server.n_requests == before + 2
    server.fault, server.ranges = lambda n: None, False
    with pytest.raises(OSError, match=r"files/0\.npy at byte 16.*ignored by server"):
        dataset.read(np.array([1], np.uint32))


def test_missing_remote_files_are_listed_like_local_ones(write, tmp_path, server):
    manifest = remote_manifest(tmp_path, write)
    (tmp_path / "files" / "1.npy").unlink()
    with pytest.raises(FileNotFoundError, match=f"1 of 3 .*missing.*{server.url}/files/1.npy"):
        data.open_dataset(settings(str(manifest), base=server.url))


def test_index_makes_the_start_independent_of_the_server(
    write, tmp_path, server, monkeypatch, capsys
):
    manifest, index = remote_manifest(tmp_path, write), tmp_path / "i.json"
    arguments = ("index", "--manifest", manifest, "--base", server.url, *FLAGS, "--out", index)
    code, out, _ = command(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "3 files, 3,003 tokens" in out
    before = server.n_requests
    dataset = data.open_dataset(settings(str(index)))
    assert server.n_requests == before
    assert dataset.fingerprint == data.open_dataset(settings(str(manifest))).fingerprint
    code, out, _ = command(monkeypatch, capsys, "audit", "--index", index, "--batch", 8,
                           "--processes", "1,2,4", "--epochs", 2)  # fmt: skip
    assert code == 0
    assert "ok: each of 2 epochs" in out
    assert server.n_requests == before


def test_packed_remote_files_use_the_table_of_documents(write, tmp_path, server):
    ids = np.random.default_rng(0).integers(0, 900, 400)
    ends = np.array([30, 35, 99, 150, 151, 300, 390])
    ids[ends] = EOS
    write("a.npy", ids)
    starts = [0, *(ends[:-1] + 1).tolist()]
    table = "".join(f"{a},{b + 1},x\n" for a, b in zip(starts, ends.tolist(), strict=True))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(table.encode()))
    changes = {"packed": True, "sequence_length": 128, "cache": str(tmp_path)}
    local = data.open_dataset(settings(str(tmp_path / "a.npy"), **changes))
    remote = data.open_dataset(settings(f"{server.url}/a.npy", **changes))
    every = np.arange(local.n_instances, dtype=np.uint32)
    assert (local.read(every).tokens == remote.read(every).tokens).all()


def test_google_storage_gives_the_batches_of_local_files_through_faults(
    write, tmp_path, server, monkeypatch
):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    manifest = remote_manifest(tmp_path, write)
    local = loader_of(str(manifest), 16)
    remote = loader_of(str(manifest), 16, base="gs://bucket")
    assert remote.dataset.sizes.tolist() == local.dataset.sizes.tolist()
    server.fault = lambda n: {3: "reset", 5: 503, 7: "torn", 13: "short"}.get(n % 37)
    for step in range(1, 11):
        got, want = (x.read(step, np.arange(16)) for x in (remote, local))
        assert (got.tokens == want.tokens).all()
    server.fault = lambda n: None
    assert data.Files().size("gs://bucket/files/9.npy") == -1


def test_s3_server_gives_the_batches_of_local_files(write, tmp_path, monkeypatch):
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    manifest = remote_manifest(tmp_path, write)
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    client = None
    try:
        _, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        for i in range(3):
            body = (tmp_path / f"files/{i}.npy").read_bytes()
            client.put_object(Bucket="bucket", Key=f"files/{i}.npy", Body=body)
        local = loader_of(str(manifest), 16)
        remote = loader_of(str(manifest), 16, base="s3://bucket")
        assert remote.dataset.sizes.tolist() == local.dataset.sizes.tolist()
        for step in (1, 2, 3):
            got, want = (x.read(step, np.arange(16)) for x in (remote, local))
            assert (got.tokens == want.tokens).all()
        assert data.Files().size("s3://bucket/files/9.npy") == -1
        monkeypatch.setattr(files.re, "search", lambda *_: None)  # a server that names no size
        assert data.Files().size("s3://bucket/files/1.npy") == 4004
    finally:
        if client is not None:
            client.close()
        server.stop()


# Making token files.


@pytest.fixture
def tiny_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 3}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_tokenize_is_ordered_resumable_and_readable(tiny_tokenizer, tmp_path, monkeypatch, capsys):
    zstandard = pytest.importorskip("zstandard")
    lines = [json.dumps({"text": "one two three " * k}) for k in range(1, 9)]
    body = ("\n".join(lines) + "\n").encode()
    (tmp_path / "a.jsonl").write_bytes(body)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(body))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(body))
    (tmp_path / "d.txt").write_text("two four")
    sources = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.txt")]

    def run(out, workers):
        return command(
            *(monkeypatch, capsys, "tokenize", "--tokenizer", tiny_tokenizer, "--out", out),
            *("--eos-id", 10, "--bos-id", 9, "--shard-tokens", 40, "--workers", workers, *sources),
        )

    code, out, _ = run(tmp_path / "one", 1)
    assert code == 0
    assert "376 tokens" in out  # 3 * (3 * 36 + 2 * 8) + 4
    want = {p.name: p.read_bytes() for p in (tmp_path / "one").glob("*.npy")}
    assert len(want) == 10
    assert run(tmp_path / "two", 2)[0] == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "two").glob("*.npy")} == want
    (tmp_path / "two" / "part-00001.json").unlink()
    (tmp_path / "two" / "part-00001-0001.npy").unlink()
    stamp = (tmp_path / "two" / "part-00000-0000.npy").stat().st_mtime_ns
    assert run(tmp_path / "two", 1)[0] == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "two").glob("*.npy")} == want
    assert (tmp_path / "two" / "part-00000-0000.npy").stat().st_mtime_ns == stamp

    config = data.DataConfig(
        source=str(tmp_path / "one" / "manifest.txt"),
        sequence_length=4,
        vocab_size=11,
        eos_id=10,
        pad_id=0,
        bos_id=9,
    )
    paths = data.list_files(config)
    documents = [d.tolist() for d in data.documents(paths, config)]
    assert documents == [[9, *[1, 2, 3] * k, 10] for k in range(1, 9)] * 3 + [[9, 2, 0, 10]]
    with gzip.open(paths[0].replace(".npy", ".csv.gz"), "rt") as table:
        assert table.read().split()[:2] == ["0,5", "5,13"]
    note = json.loads((tmp_path / "one" / "part-00003.json").read_text())
    assert note["first_ids"] == [9, 2, 0, 10]
    code, out, _ = command(
        *(monkeypatch, capsys, "show", "--source", config.source, "--sequence-length", 4),
        *("--vocab-size", 11, "--eos-id", 10, "--pad-id", 0, "--bos-id", 9),
        *("--instance", 0, "--decoder", tiny_tokenizer),
    )
    assert code == 0
    assert "part-00000-0000.npy: tokens 0 to 4\none two three" in out


def test_tokenize_names_the_line_without_text(tiny_tokenizer, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    code, _, err = command(
        *(monkeypatch, capsys, "tokenize", "--tokenizer", tiny_tokenizer, tmp_path / "a.jsonl"),
        *("--out", tmp_path / "out"),
    )
    assert code == 2
    assert "a.jsonl:2: no JSON object with a text field" in err
    assert not (tmp_path / "out" / "manifest.txt").exists()


# What AI2 publishes, from PyPI.


def wheel(name, version):
    """A wheel from OLMO3_WHEELS or PyPI, kept for the next time; the test is skipped without."""
    folder = Path(os.environ.get("OLMO3_WHEELS", "~/.cache/olmo3-equinox/wheels")).expanduser()
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)) and "OLMO3_WHEELS" not in os.environ:
        ask = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"{name}=={version}"]
        try:
            subprocess.run([*ask, "-d", folder], check=True, timeout=120, capture_output=True)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"{name} {version} is not to be had: {type(error).__name__}")
    found = list(folder.glob(pattern))
    if not found:
        pytest.skip(f"{name} {version} is not in OLMO3_WHEELS")
    return zipfile.ZipFile(found[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "n_files"),
    [
        ("OLMo-mix-0625-official", 1016),
        ("OLMo-midtraining-mix-0625-100B", 11_933),
        ("OLMo-longmino-mix-0625", 998),
    ],
)
def test_audit_passes_on_the_published_mixes(mix, n_files, tmp_path, monkeypatch, capsys):
    manifest = tmp_path / f"{mix}.txt"
    with wheel("ai2-olmo-core", "3.0.0") as archive:
        manifest.write_bytes(archive.read(f"olmo_core/data/mixes/{mix}.txt"))
    config = data.DataConfig(source=str(manifest), base="https://olmo-data.org")
    paths = data.list_files(config)
    assert len(paths) == n_files
    assert all(p.startswith("https://olmo-data.org/") and "{" not in p for p in paths)
    assert all("/allenai/dolma3-tokenizer/" in p for p in paths)
    sizes = np.random.default_rng(0).integers(1, 2**22, n_files) * 4  # simulated
    audit.write_index(tmp_path / "i.json", config, paths, sizes)
    code, out, _ = command(
        monkeypatch, capsys, "audit", "--index", tmp_path / "i.json", "--batch", 512,
        "--processes", "1,2,8,32", "--epochs", 2,
    )  # fmt: skip
    assert code == 0
    assert out.startswith("ok: each of 2 epochs")


@pytest.mark.slow
def test_dolma2_tokenizer_makes_files_that_decode_to_the_text(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tokenizers")
    tokenizer = tmp_path / "dolma2.json"
    with wheel("ai2-olmo", "0.6.0") as archive:
        tokenizer.write_bytes(archive.read("olmo_data/tokenizers/allenai_dolma2.json"))
    text = Path(random.__file__).read_text()
    (tmp_path / "a.txt").write_text(text)
    arguments = ("--tokenizer", tokenizer, "--out", tmp_path / "out", tmp_path / "a.txt")
    assert command(monkeypatch, capsys, "tokenize", *arguments)[0] == 0
    config = data.DataConfig(source=str(tmp_path / "out" / "manifest.txt"))
    [document] = data.documents(data.list_files(config), config)
    assert document[-1] == 100_257
    assert corpus.load_tokenizer(tokenizer).decode(document[:-1].tolist()) == text
    assert 3 < len(text) / len(document) < 6
