"""Recovery inside a process, restarts of processes, and leaving a spike behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train import SMALL, WIDE, rows_of, token_files

import data
import train
from tools import checkpoints, elastic, processes, runs

ROOT = Path(__file__).parent.parent
ONE_DEVICE = "--xla_force_host_platform_device_count=1"
ELASTIC = [*WIDE, "--elastic", "--snapshot-every-steps", "5", "--min-devices", "1"]


def events(path, name):
    """The rows of a run's metrics.jsonl about one kind of event."""
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row.get("event") == name]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of 24 steps on eight devices that nothing happened to."""
    path = tmp_path_factory.mktemp("unbroken") / "run"
    assert train.main([*WIDE, "--steps", "24", "--run-dir", str(path)]) == 0
    return path


def check_same_curve(path, unbroken):
    got, want = rows_of(path), rows_of(unbroken)
    assert list(got) == list(want)
    for step, row in want.items():
        assert got[step]["loss"] == pytest.approx(row["loss"], abs=1e-5)
        assert got[step]["data_hash"] == row["data_hash"]


@pytest.mark.slow
def test_losing_six_of_eight_devices_and_getting_them_back_keeps_the_curve(
    unbroken, tmp_path, capsys
):
    flags = [*ELASTIC, "--steps", "24", "--run-dir", str(tmp_path)]
    assert train.main([*flags, "--rehearse-loss", "9:2", "15:8", "18:1", "20:8"]) == 0
    check_same_curve(tmp_path, unbroken)
    lost, back, again, home = events(tmp_path, "recovery")
    assert [row["n_devices"] for row in (lost, back, again, home)] == [2, 8, 1, 8]
    assert [row["from"] for row in (lost, back, again, home)] == ["snapshot"] * 4
    # Snapshots are behind steps 5, 10, 14 (made for the return) and 15.
    assert [row["steps_lost"] for row in (lost, back, again, home)] == [3, 0, 2, 0]
    assert [row["step"] for row in (lost, back, again, home)] == [6, 15, 16, 20]
    assert [row["recompiled"] for row in (lost, back, again, home)] == [True, False, True, False]
    assert train.main(["--report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "in-process recovery at step 6 from snapshot, on 2 devices: 3 steps lost" in text
    assert " 0 restarts," in text


@pytest.mark.slow
def test_a_run_that_needs_all_devices_waits_until_they_are_back(unbroken, tmp_path):
    flags = [*WIDE, "--elastic", "--snapshot-every-steps", "5", "--steps", "24"]
    assert train.main([*flags, "--rehearse-loss", "9:2", "10:8", "--run-dir", str(tmp_path)]) == 0
    check_same_curve(tmp_path, unbroken)
    (row,) = events(tmp_path, "recovery")
    assert (row["n_devices"], row["steps_lost"], row["recompiled"]) == (8, 3, False)
    assert row["recovery_seconds"] >= 1


@pytest.mark.slow
def test_a_checkpoint_newer_than_the_snapshot_is_used(unbroken, tmp_path):
    flags = [*ELASTIC, "--steps", "24", "--save-every-steps", "3", "--run-dir", str(tmp_path)]
    assert train.main([*flags, "--rehearse-loss", "10:4"]) == 0
    check_same_curve(tmp_path, unbroken)
    (row,) = events(tmp_path, "recovery")
    assert (row["from"], row["step"], row["steps_lost"]) == ("checkpoint", 10, 0)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("DATA_LOSS: slice 1 is gone", True),
        ("UNAVAILABLE: Socket closed", True),
        ("DEADLINE_EXCEEDED: barrier", True),
        ("INTERNAL: RET_CHECK failure", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes; INTERNAL", False),
        ("INVALID_ARGUMENT: shapes", False),
        ("UNIMPLEMENTED: DATA_LOSS", False),
        ("something else", False),
    ],
)
def test_only_the_runtimes_words_for_lost_devices_are_device_losses(text, lost):
    assert elastic.is_device_loss(jax.errors.JaxRuntimeError(text)) is lost
    assert not elastic.is_device_loss(RuntimeError(text))
    assert not elastic.is_device_loss(ValueError(text))


def failing_step(monkeypatch, text):
    """Makes every step fail with an error of the runtime; returns the list of tries."""
    tries = []

    def fail(*_):
        tries.append(1)
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(train, "compiled_step", fail)
    monkeypatch.setattr(runs.Run, "compile", lambda *_: None)
    return tries


def test_too_little_memory_is_never_tried_again_and_says_what_may_help(
    tmp_path, monkeypatch, capsys
):
    tries = failing_step(monkeypatch, "RESOURCE_EXHAUSTED: Out of memory")
    assert train.main([*ELASTIC, "--run-dir", str(tmp_path)]) == 1
    assert len(tries) == 1
    error = capsys.readouterr().err
    assert "out of memory: weights, gradients and moments" in error
    for way_out in ("--sequences-per-device (now 2)", "--model.remat full", "more devices"):
        assert way_out in error


def test_a_loss_that_repeats_without_progress_ends_the_run(tmp_path, monkeypatch, capsys):
    tries = failing_step(monkeypatch, "DATA_LOSS: again")
    assert train.main([*ELASTIC, "--run-dir", str(tmp_path)]) == 1
    assert len(tries) == 4
    assert "error: DATA_LOSS: again" in capsys.readouterr().err


def test_without_elastic_a_lost_device_ends_the_run(tmp_path, monkeypatch):
    tries = failing_step(monkeypatch, "DATA_LOSS: slice 1 is gone")
    assert train.main([*WIDE, "--run-dir", str(tmp_path)]) == 1
    assert len(tries) == 1


def test_a_snapshot_that_differs_from_the_devices_is_not_offered(mesh, monkeypatch):
    state = {"a": jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))}
    snapshots = elastic.Snapshots()
    snapshots.take(4, state, {"tokens_seen": 4})
    snapshots.wait()
    assert snapshots.newest is not None
    np.testing.assert_array_equal(snapshots.newest.state["a"], np.arange(8.0))
    monkeypatch.setattr(checkpoints, "host_sum", lambda _: 0)
    snapshots.take(5, state, {})
    snapshots.wait()
    assert snapshots.newest.step == 4


def test_host_and_devices_sum_bits_alike(getkey):
    x = jax.random.normal(getkey(), (7, 5))
    (want,) = checkpoints.leaf_sums([x])
    assert checkpoints.host_sum(np.asarray(x)) == int(want)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rehearse-loss", "4:2"], "rehearse_loss: needs --elastic"),
        (["--elastic", "--rehearse-loss", "4"], "give STEP:DEVICES"),
        (["--elastic", "--rehearse-loss", "4:9"], "rehearse_loss=4:9: there are 8"),
        (["--elastic", "--snapshot-every-steps", "0"], "snapshot_every_steps=0"),
    ],
)
def test_mistakes_in_recovery_flags_exit_2(flags, words, tmp_path, capsys):
    try:
        code = train.main([*SMALL, *flags, "--run-dir", str(tmp_path)])
    except SystemExit as error:  # tyro's own
        code = error.code
    assert code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.slow
def test_pathways_manager_finds_the_slices_and_scales_up_again(unbroken, tmp_path, monkeypatch):
    reason = "Pathways' elastic manager comes with the pathways extra"
    manager = pytest.importorskip("pathwaysutils.elastic.manager", reason=reason)
    alive = {0, 1}
    halves = {i: jax.devices()[4 * i : 4 * i + 4] for i in (0, 1)}
    patch = monkeypatch.setattr
    patch(manager.elastic, "get_slice_to_devices", lambda _: halves)
    patch(manager.elastic, "get_active_slice_indices", lambda *_, **__: frozenset(alive))
    patch(manager.elastic, "wait_for_slices", lambda **_: frozenset(alive))
    patch(manager.Manager, "start_monitoring", lambda *_: None)
    honest, seen = train.compiled_step, []

    def step(config, state, batch, lr):
        seen.append(int(state.step) + 1)
        if seen[-1] == 9 and len(alive) == 2:
            alive.discard(1)
            raise jax.errors.JaxRuntimeError("DATA_LOSS: slice 1 is gone")
        if seen[-1] == 15:
            alive.add(1)
        return honest(config, state, batch, lr)

    patch(train, "compiled_step", step)
    patch(runs.Run, "compile", lambda *_: None)
    patch(
        elastic.Slices,
        "more",
        lambda self, *_: bool(alive - self.manager.active_slice_indices),
    )
    patch(elastic.Slices, "due", lambda self, _: bool(alive - self.manager.active_slice_indices))
    flags = [*ELASTIC, "--min-devices", "4", "--steps", "24", "--run-dir", str(tmp_path)]
    assert runs.start(train.parse(flags), None, manager) == 0
    check_same_curve(tmp_path, unbroken)
    lost, back = events(tmp_path, "recovery")
    assert (lost["n_devices"], lost["steps_lost"]) == (4, 3)
    assert (back["n_devices"], back["steps_lost"], back["step"]) == (8, 0, 16)


@pytest.mark.slow
def test_a_spike_is_rolled_back_and_its_batches_left_out(tmp_path):
    source = Path(token_files(tmp_path / "data", 32 * 400))
    ids = np.full((400, 32), 7, "<u4")  # easy to learn, but for the batch of one step
    flags = [*SMALL, "--data.source", str(source), "--optim.skip-window", "12"]
    flags += ["--optim.skip-sigmas", "3", "--save-every-steps", "5", "--steps", "40"]
    flags += ["--max-devices", "1"]
    config = train.parse(flags)
    dataset = data.open_dataset(config.data)
    loader = data.Loader(dataset, config.data, config.batch_instances)
    ids[loader.instance_ids(33)] = np.random.default_rng(0).integers(0, 250, (8, 32))
    ids.tofile(source)
    run = tmp_path / "run"
    assert train.main([*flags, "--rollback-on-spike", "1", "--run-dir", str(run)]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [*range(1, 34), *range(31, 41)]
    assert [row["step"] for row in steps if row["step_skipped"]] == [33]
    want = [data.format_hash(data.instance_hash(loader.instance_ids(k))) for k in range(34, 44)]
    assert [row["data_hash"] for row in steps[-10:]] == want
    (recovery,) = events(run, "recovery")
    assert recovery["cause"] == "steps 33 to 33 were skipped"
    audit = [sys.executable, "data.py", "audit", "--run", str(run)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    text = subprocess.run(
        audit, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert text.startswith("ok: ")


def launch(run_dir, *more, env=()):
    """train.py on one CPU device a process, with what it prints in a file."""
    with (run_dir / "stderr").open("a") as file:
        return subprocess.Popen(
            [sys.executable, "train.py", *WIDE, "--run-dir", str(run_dir), *more],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {ONE_DEVICE}",
                "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"],
                **dict(env),
            },
            cwd=ROOT,
            stderr=file,
        )


def last_step(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return max((row["step"] for row in rows if "loss" in row), default=0)


@pytest.mark.slow
def test_supervised_processes_survive_kills_and_finish_with_the_unbroken_curve(unbroken, tmp_path):
    more = ("--steps", "24", "--save-every-steps", "4", "--supervise", "4")
    run = launch(tmp_path, *more)
    down = []
    for kill_at in (2, 9):
        while last_step(tmp_path) < kill_at:
            assert run.poll() is None, (tmp_path / "stderr").read_text()
            time.sleep(0.02)
        children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True)
        pids = [int(word) for word in children.stdout.split()]
        os.kill(pids[-1], signal.SIGKILL)
        began = time.monotonic()
        while any(alive(pid) for pid in pids):
            time.sleep(0.01)
        down.append(time.monotonic() - began)
    assert run.wait() == 0, (tmp_path / "stderr").read_text()
    check_same_curve(tmp_path, unbroken)
    assert max(down) < 1.5  # one second, and a loaded machine
    restarts = events(tmp_path, "restart")
    assert [row["n_restarts"] for row in restarts] == [1, 2]
    assert [row["n_processes"] for row in restarts] == [2, 2]
    assert all(-signal.SIGKILL in row["exit_codes"] for row in restarts)


def alive(pid):
    """Whether a process runs; one that only waits to be asked for its exit code does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def job(tmp_path, program, n=2, max_restarts=3):
    command = [sys.executable, "-c", program, str(tmp_path)]
    return processes.Job(command, n, lambda _: True, tmp_path, max_restarts)


def test_supervisor_stops_at_the_users_error_and_gives_up_without_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(processes.time, "sleep", lambda _: None)
    count = "import sys, pathlib; open(pathlib.Path(sys.argv[1]) / 'starts', 'a').write('x')\n"
    assert processes.supervise(job(tmp_path, count + "sys.exit(2)")) == 2
    assert (tmp_path / "starts").read_text() == "xx"
    assert processes.supervise(job(tmp_path, count + "sys.exit(1)")) == 1
    assert (tmp_path / "starts").read_text() == "x" * (2 + 2 * 3)
    assert processes.supervise(job(tmp_path, count)) == 0


@pytest.mark.slow
def test_processes_that_slurm_started_find_each_other_and_a_dead_one_is_named(tmp_path):
    def slurm(rank):
        return {
            **{"SLURM_JOB_ID": str(processes.free_port()), "SLURM_STEP_NODELIST": "localhost"},
            **{"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        }

    job_id = slurm(0)["SLURM_JOB_ID"]
    more = ("--steps", "100000", "--save-every-steps", "100000")
    runs = [
        launch(tmp_path, *more, env={**slurm(i), "SLURM_JOB_ID": job_id}.items()) for i in (0, 1)
    ]
    while last_step(tmp_path) < 3:
        assert all(run.poll() is None for run in runs), (tmp_path / "stderr").read_text()
        time.sleep(0.05)
    runs[1].kill()
    assert runs[1].wait() == -signal.SIGKILL
    assert runs[0].wait(timeout=20) == 1
    assert "process [1] of 2 ended in step" in (tmp_path / "stderr").read_text()
