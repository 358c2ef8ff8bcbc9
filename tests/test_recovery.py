"""What happens when things break: damage on disk, signals, kills, full disks, hung steps."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from test_pod import free_port, start
from test_train import SMALL, equal, final_state, rows_of, small

import olmo3
import train
from tools import checkpoints, metrics

ROOT = Path(__file__).parent.parent
FLAGS = [*SMALL, "--max-devices", "1", "--save-every-steps", "4", "--steps", "12"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 12 steps that nothing happened to, with checkpoints 4, 8 and 12."""
    path = tmp_path_factory.mktemp("finished") / "run"
    assert train.main([*FLAGS, "--run-dir", str(path)]) == 0
    return path


@pytest.fixture
def broken(finished, tmp_path):
    """A copy of it to damage; longer runs go on from it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def losses(path):
    return {step: row["loss"] for step, row in rows_of(path).items()}


def largest_file(folder):
    return max(folder.glob("**/d/*"), key=lambda path: path.stat().st_size)


def overwrite(path, change):
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def flip_bit(folder):
    overwrite(largest_file(folder / "model"), lambda b: b.__setitem__(len(b) // 2, b[-9] ^ 1))


def zeros(folder):
    middle = largest_file(folder / "optimizer").stat().st_size // 2
    overwrite(
        largest_file(folder / "optimizer"),
        lambda b: b.__setitem__(slice(middle, middle + 1024), bytes(1024)),
    )


def truncate(folder):
    os.truncate(largest_file(folder / "model"), 1000)


def empty_config(folder):
    (folder / "config" / "config.json").write_text("")


def lose_optimizer(folder):
    shutil.rmtree(folder / "optimizer")


def lose_manifest(folder):
    (folder / "model" / "manifest.ocdbt").unlink()


@pytest.mark.parametrize("n_devices", [1, 2, 8])
def test_any_flipped_bit_changes_a_leafs_sum_and_no_mesh_does(n_devices, getkey):
    mesh = olmo3.make_mesh(devices=jax.devices()[:n_devices])
    x = jax.random.normal(getkey(), (16, 24))
    with jax.set_mesh(mesh):
        got = checkpoints.checksums(
            {"a": jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp")))}
        )
    bits = np.asarray(x).view(np.uint32)
    weights = 2 * np.arange(x.size, dtype=np.uint32).reshape(x.shape) + 1
    assert got == {"['a']": int((bits * weights).sum(dtype=np.uint32))}


def test_leftovers_of_dead_saves_are_counted_and_removed_and_other_folders_kept(broken):
    folder = broken / "checkpoints"
    for name in ("16.orbax-checkpoint-tmp", "20.orbax-checkpoint-tmp", "mine"):
        shutil.copytree(folder / "12", folder / name)
    assert train.main([*FLAGS, "--steps", "13", "--run-dir", str(broken)]) == 0
    assert {path.name for path in folder.iterdir()} == {"8", "12", "13", "mine"}
    starts = [row for row in events(broken) if row.get("event") == "start"]
    assert [row["leftovers"] for row in starts] == [0, 2]


def test_first_start_beside_a_dead_save_says_so_and_the_last_step_is_always_saved(tmp_path, capsys):
    (tmp_path / "checkpoints" / "12.orbax-checkpoint-tmp").mkdir(parents=True)
    flags = [*FLAGS, "--steps", "7", "--save-every-steps", "5", "--run-dir", str(tmp_path)]
    assert train.main(flags) == 0
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"5", "7"}
    assert "removed what 1 unfinished saves had left" in capsys.readouterr().err


def events(path):
    """All rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_report_counts_every_second_once_and_steps_done_twice_as_lost(tmp_path, capsys):
    def step(number, time):
        return {"step": number, "step_seconds": 2.0, "data_seconds": 0.5, "time": time}

    rows = [
        {"event": "start", "step": 1, "start_seconds": 4.0, "time": 104.0},
        {"event": "compile", "step": 1, "seconds": 3.0, "time": 107.0},
        *(step(k, 107.0 + 2 * k) for k in (1, 2, 3)),
        {"event": "start", "step": 2, "start_seconds": 5.0, "time": 120.0},
        *(step(k, 120.0 + 2 * (k - 1)) for k in (2, 3)),
        {"event": "save", "step": 3, "seconds": 1.0, "time": 125.0},
        {"step": 3, "eval": {}, "seconds": 2.0, "time": 127.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train.main(["--report", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["1-3", "4.0", "3.0", "2.0", "1.5", "0.0", "0.0", "4.0"]
    assert lines[2] == ["2-3", "5.0", "0.0", "4.0", "1.0", "1.0", "2.0", "0.0"]
    # 27 s of wall time: 9 starting, 3 compiling, 6 productive, 1 saving, 2 evaluating, 4 lost.
    said = "goodput 22.2% of 27.0 s, 1 restarts, 4.0 s of steps lost, 2.0 s down"
    assert " ".join(lines[3]) == said


def test_half_a_row_that_a_killed_run_left_is_removed(broken):
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    with metrics.Log(broken) as log:
        log.write({"event": "test"})
    assert events(broken)[-1]["event"] == "test"


def test_state_without_a_leaf_is_refused_by_name(broken):
    mesh = olmo3.make_mesh(devices=jax.devices()[:1])
    with checkpoints.open_checkpoints(broken / "checkpoints") as manager:
        path = broken / "checkpoints" / "12" / "optimizer" / "_METADATA"
        saved = json.loads(path.read_text())
        lost = next(key for key in saved["tree_metadata"] if "'nu'" in key and "w_up" in key)
        del saved["tree_metadata"][lost]
        path.write_text(json.dumps(saved))
        with pytest.raises(ValueError, match="w_up"):
            checkpoints.restore(manager, train.abstract_state(small(), mesh), 12)


# Other processes, because what happens to them ends them.


def launch(run_dir, *more, cache=None, limit=None):
    """train.py with one CPU device; its stderr is a pipe."""
    command = [sys.executable, str(ROOT / "train.py"), *FLAGS, "--run-dir", str(run_dir), *more]
    if limit:
        command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *command]
    cache = str(cache or jax.config.values["jax_compilation_cache_dir"])
    env = {
        **os.environ,
        **{"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache},
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def outcome(process):
    """Exit code and stderr of a process, when it has ended."""
    error = process.communicate()[1]
    return process.returncode, error


def wait_for(process, path, text):
    """Returns when a file has a text in it."""
    while not (path.exists() and text in path.read_text()):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@pytest.mark.slow
def test_damaged_checkpoints_are_reported_put_aside_and_the_newest_whole_one_used(finished, broken):
    damages = [flip_bit, zeros, truncate, empty_config, lose_optimizer, lose_manifest]
    for step, damage in enumerate(damages, 13):
        shutil.copytree(broken / "checkpoints" / "12", broken / "checkpoints" / str(step))
        damage(broken / "checkpoints" / str(step))
    code, error = outcome(launch(broken, "--steps", "20"))
    assert code == 0, error
    for step in range(13, 19):
        assert f"warning: checkpoint {step} cannot be used" in error
    assert "going on from 12" in error
    names = {path.name.partition("-")[0] for path in (broken / "checkpoints").iterdir()}
    kept = {"12", "16", "20"}  # 16 was saved again under the number of a damaged one
    assert names == kept | {f"{step}.damaged" for step in range(13, 19)}
    assert equal(final_state(broken, 12), final_state(finished, 12))
    assert list(losses(broken)) == list(range(1, 21))


@pytest.mark.slow
def test_run_whose_checkpoints_are_all_damaged_ends_and_touches_nothing(broken):
    for step in (4, 8, 12):
        truncate(broken / "checkpoints" / str(step))
    before = {path: path.stat().st_size for path in broken.glob("checkpoints/**/*")}
    code, error = outcome(launch(broken, "--steps", "13"))
    assert code == 1
    assert "no checkpoint can be loaded (12: " in error
    assert {path: path.stat().st_size for path in broken.glob("checkpoints/**/*")} == before


@pytest.mark.slow
def test_full_disk_ends_the_run_naming_path_and_errno_and_keeps_the_last_checkpoint(tmp_path):
    run = tmp_path / "run"
    assert outcome(launch(run, "--steps", "4"))[0] == 0
    # A file size limit of 64 KiB fails writes just as a full disk does, for any user.
    code, error = outcome(launch(run, limit=64))
    assert code == 1, error
    assert f"{run}/checkpoints: saving failed" in error
    assert "File too large" in error
    assert "[4] are intact" in error
    code, error = outcome(launch(run))
    assert code == 0, error
    assert [row["leftovers"] for row in events(run) if row.get("event") == "start"][-1] == 1


@pytest.mark.slow
def test_folder_that_cannot_be_written_any_more_ends_the_run_naming_path_and_errno(tmp_path):
    run = tmp_path / "run"
    process = launch(run, "--steps", "100000", "--save-every-steps", "100")
    wait_for(process, run / "metrics.jsonl", '"event": "save"')
    while not (run / "checkpoints" / "100").exists():
        time.sleep(0.01)
    (run / "checkpoints").rename(run / "kept")
    (run / "checkpoints").write_text("in the way")  # root may write to read-only folders, not here
    code, error = outcome(process)
    assert code == 1
    assert f"error: {run}/checkpoints: saving failed" in error
    assert "Errno 20" in error or "Not a directory" in error
    (run / "checkpoints").unlink()
    (run / "kept").rename(run / "checkpoints")
    code, error = outcome(launch(run, "--steps", "104"))
    assert code == 0, error


@pytest.mark.slow
def test_store_that_hangs_ends_the_run_naming_the_path(tmp_path):
    program = (
        "import sys, time, train\n"
        "from tools import checkpoints\n"
        "checkpoints.save = lambda *_: time.sleep(60)\n"
        "train.main(sys.argv[1:])"
    )
    flags = [*FLAGS, "--run-dir", str(tmp_path), "--step-timeout", "15"]
    command = [sys.executable, "-c", program, *flags]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    end = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert end.returncode == 1
    text = f"error: process 0 did not finish in 15 s: saving step 4 to {tmp_path}/checkpoints"
    assert text in end.stderr


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["compile", "step", "save", "eval"])
def test_signal_saves_and_stops_and_the_run_goes_on_bit_for_bit(moment, finished, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    more = ["--eval-every-steps", "6", "--eval-documents", "60"]
    cache = tmp_path / "cache" if moment == "compile" else None
    process = launch(run, *more, cache=cache)
    text = {"compile": '"start"', "step": '"step": 2', "save": '"step": 4', "eval": '"step": 6'}
    wait_for(process, log, text[moment])
    process.send_signal(signal.SIGTERM if moment != "step" else signal.SIGINT)
    code, error = outcome(process)
    assert code == 75, error
    assert "saved and stopped" in error
    code, error = outcome(launch(run, *more))
    assert code == 0, error
    assert equal(final_state(run, 12), final_state(finished, 12))
    evaluated = {row["step"] for row in events(run) if "eval" in row}
    assert evaluated == {6, 12}
    assert losses(run) == losses(finished)


@pytest.mark.slow
def test_signal_to_one_of_two_processes_makes_both_save_the_same_step(tmp_path):
    port, more = free_port(), ("--steps", "100000", "--save-every-steps", "100000")
    processes = [start(tmp_path, port, i, 2, *more) for i in range(2)]
    wait_for(processes[0], tmp_path / "metrics.jsonl", '"step": 3')
    processes[1].send_signal(signal.SIGTERM)
    ends = [outcome(process) for process in processes]
    assert [code for code, _ in ends] == [75, 75], ends
    saves = [row["step"] for row in events(tmp_path) if row.get("event") == "save"]
    assert len(saves) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(saves[0])]


@pytest.mark.slow
def test_second_signal_ends_at_once_even_while_compiling(tmp_path):
    process = launch(tmp_path / "run", cache=tmp_path / "cache")
    wait_for(process, tmp_path / "run" / "metrics.jsonl", '"start"')
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert outcome(process)[0] == 128 + signal.SIGTERM
    assert time.monotonic() - began < 1


@pytest.mark.slow
def test_step_that_hangs_prints_all_stacks_and_ends_the_run(tmp_path):
    process = launch(tmp_path / "run", "--step-timeout", "0.3", cache=tmp_path / "cache")
    code, error = outcome(process)
    assert code == 1
    assert "error: process 0 did not finish in 0.3 s: " in error
    assert "train.py" in error


@pytest.mark.slow
def test_killed_twice_at_random_moments_the_run_ends_bit_for_bit_the_same():
    soak = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--kills", "2", "--steps", "40"]
    report = json.loads(subprocess.run(soak, check=True, stdout=subprocess.PIPE).stdout)
    assert sum(report["kills"].values()) == 2
    assert report["bit_equal"] == {"steps": True, "evals": True, "state": True}
