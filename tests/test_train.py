"""The step, the optimizer, the command line and the run, small and on eight fake devices."""

import dataclasses
import functools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import data
import olmo3
import train
from tools import checkpoints, runs
from tools.processes import free_port

# A run that compiles and steps in seconds; every test that trains starts from these flags.
SMALL = [
    *("--preset", "tiny", "--model.d-model", "32", "--model.n-layers", "4"),
    *("--model.n-heads", "2", "--model.n-kv-heads", "2", "--model.d-head", "16"),
    *("--model.d-ff", "64", "--model.windows", "8", "None"),
    *("--data.sequence-length", "32", "--sequences-per-device", "2", "--eval-documents", "8"),
    *("--sample-tokens", "0", "--eval-every-steps", "1000"),
]
# One that is the same on any devices: in float32, with rows for sixteen.
WIDE = [
    *SMALL,
    *("--model.compute-dtype", "float32", "--batch-instances", "16", "--model.windows", "8"),
]


def small(**changes):
    return dataclasses.replace(train.parse(SMALL), **changes)


def rows_of(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in lines if "loss" in row}


def token_files(folder, n_tokens=3000, vocab=250):
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).integers(0, vocab, n_tokens, dtype=np.uint32)
    ids.astype("<u4").tofile(folder / "a.npy")
    return str(folder / "a.npy")


def final_state(path, step):
    with checkpoints.open_checkpoints(path / "checkpoints") as manager:
        config = small()
        mesh = olmo3.make_mesh(devices=jax.devices()[:1])
        state = checkpoints.restore(manager, train.abstract_state(config, mesh), step)
        return jax.tree.map(np.asarray, state)


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


# The sharded, accumulated step.


@functools.cache
def one_step(n_devices, accumulation):
    """Metrics and parameters after a step on rows with very unequal numbers of targets."""
    config = small(batch_instances=8)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, compute_dtype="float32")
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 250, (8, 32)).astype(np.int32)
    targets = np.roll(tokens, -1, axis=1)
    for row in range(8):
        targets[row, 1 + 4 * row :] = -1
    mesh = olmo3.make_mesh(2 if n_devices == 8 else 1, devices=jax.devices()[:n_devices])
    with jax.set_mesh(mesh):
        state = jax.jit(functools.partial(train.init_state, config))(jax.random.key(0))
        sharding = NamedSharding(mesh, P(None, ("data", "fsdp")))

        def put(x):
            return jax.device_put(x.reshape(accumulation, -1, *x.shape[1:]), sharding)

        ids = np.arange(8, dtype=np.uint32)
        batch = data.DeviceBatch(put(tokens), put(targets), None, put(ids))
        step = jax.jit(functools.partial(train.train_step, config))
        state, metrics = step(state, batch, jnp.float32(3e-5))
        gradient = optax.tree.get(state.optimizer.inner, "mu")
        return jax.tree.map(np.asarray, (metrics, state.model, gradient))


@pytest.mark.parametrize(
    ("n_devices", "accumulation"), [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (8, 1)]
)
def test_accumulation_and_devices_change_no_number(n_devices, accumulation):
    want_metrics, want_model, want_gradient = one_step(1, 1)
    metrics, model, gradient = one_step(n_devices, accumulation)
    for name in ("loss", "ce", "z_loss", "grad_norm"):
        assert metrics[name] == pytest.approx(want_metrics[name], rel=1e-6), name
    assert (metrics["data_hash"] == want_metrics["data_hash"]).all()
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(want_gradient), strict=True):
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()  # sums in another order
    # Adam divides by the gradient's size, so entries near its eps turn rounding into a share of lr.
    for got, want in zip(jax.tree.leaves(model), jax.tree.leaves(want_model), strict=True):
        assert np.abs(got - want).max() <= 1e-6


def test_gradient_and_moments_are_float32_and_sharded_like_their_parameter(mesh):
    state = jax.eval_shape(functools.partial(train.init_state, small()), jax.random.key(0))
    types = {str(x.dtype) for x in jax.tree.leaves(state)}
    assert types == {"float32", "int32"}
    for name in ("mu", "nu"):
        moments = optax.tree.get(state.optimizer.inner, name)
        same = jax.tree.map(lambda m, p: m.sharding == p.sharding, moments, state.model)
        assert jax.tree.all(same)
    assert state.model.blocks[0].ffn.w_up.sharding.spec == P(None, "fsdp", None)


# The optimizer.


def update_many(optimizer, params, gradients, losses, norms, lr=1e-2):
    @jax.jit
    def run(params):
        def step(carry, xs):
            params, state = carry
            g, loss, norm = xs
            updates, state = optimizer.update({"w": g}, state, params, loss=loss, grad_norm=norm)
            updates = jax.tree.map(lambda u: -jnp.float32(lr) * u, updates)
            return (optax.apply_updates(params, updates), state), state.inner

        carry = (params, optimizer.init(params))
        return jax.lax.scan(step, carry, (gradients, losses, norms))

    return run(params)


def guarded_adamw(window=128):
    inner = optax.chain(optax.scale_by_adam(0.9, 0.95, 1e-8), optax.add_decayed_weights(0.1))
    return train.skip_steps(inner, window, 6.0)


def test_optimizer_equals_adamw_when_nothing_is_skipped(getkey):
    params = {"w": jax.random.normal(getkey(), (5,))}
    gradients = jax.random.normal(getkey(), (50, 5))
    calm = jnp.ones(50)
    (got, _), _ = update_many(guarded_adamw(), params, gradients, calm, calm)
    reference = optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1)
    want: Any = params
    state = reference.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for g in gradients:
            updates, state = reference.update({"w": g}, state, want)
            want = optax.apply_updates(want, updates)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6)


def test_successive_gradients_give_the_parameters_that_olmo_core_gives():
    gradients = jnp.array([[0.1], [-0.2], [0.3]])
    one = jnp.ones(3)
    seen = []
    for n in (1, 2, 3):
        (params, _), _ = update_many(
            guarded_adamw(), {"w": jnp.ones(1)}, gradients[:n], one[:n], one[:n], 1e-3
        )
        seen.append(float(params["w"][0]))
    want = [0.9988999963, 0.9991634488, 0.9987250566]  # spec 12
    assert seen == pytest.approx(want, abs=2.4e-7)  # four units in the last place


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize("where", ["loss", "norm"])
def test_bad_step_changes_nothing_and_only_finite_values_enter_the_window(bad, where, getkey):
    params = {"w": jax.random.normal(getkey(), (5,))}
    gradients = jax.random.normal(getkey(), (80, 5)).at[70].set(bad)
    calm = 3 + 0.1 * jax.random.normal(getkey(), (2, 80))
    losses, norms = calm.at[0 if where == "loss" else 1, 70].set(bad)
    (_, state), history = update_many(guarded_adamw(), params, gradients, losses, norms)
    count = optax.tree.get(history, "count")
    assert np.diff(np.asarray(count)).tolist() == [1] * 69 + [0] + [1] * 9
    for name in ("mu", "nu"):
        moment = np.asarray(optax.tree.get(history, name)["w"])
        assert (moment[70] == moment[69]).all()
        assert np.isfinite(moment).all()
    assert int(state.n_seen) == (80 if np.isfinite(bad) else 79)
    assert int(state.n_nonfinite) == 0


def test_constant_history_makes_no_spike_of_rounding():
    params, n = {"w": jnp.ones(1)}, 100
    noise = jnp.float32(2.5) + jnp.where(jnp.arange(n) == 90, 2e-6, 0.0)
    (_, state), _ = update_many(guarded_adamw(), params, jnp.ones((n, 1)), noise, noise)
    assert int(optax.tree.get(state.inner, "count")) == n


def test_weight_decay_spares_the_input_embedding_and_nothing_else():
    config = small()
    state = jax.jit(functools.partial(train.init_state, config))(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, state.model)
    one = jnp.ones(())
    updates, _ = jax.jit(train.make_optimizer(config.optim).update)(
        zeros, state.optimizer, state.model, loss=one, grad_norm=one
    )
    weights = jax.tree_util.tree_leaves_with_path(state.model)
    for (path, p), u in zip(weights, jax.tree.leaves(updates), strict=True):
        want = 0.0 if jax.tree_util.keystr(path) == ".embed" else 0.1
        np.testing.assert_allclose(u, want * p, rtol=1e-6, atol=1e-12)


def test_batch_without_targets_updates_nothing(mesh):
    config = small(batch_instances=8)
    state = jax.jit(functools.partial(train.init_state, config))(jax.random.key(0))
    sharding = NamedSharding(mesh, P(None, ("data", "fsdp")))
    put = functools.partial(jax.device_put, device=sharding)
    none = np.full((1, 8, 32), -1, np.int32)
    batch = data.DeviceBatch(put(none * 0), put(none), None, put(np.zeros((1, 8), np.uint32)))
    step = jax.jit(functools.partial(train.train_step, config))
    after, metrics = step(state, batch, jnp.float32(1e-3))
    assert float(metrics["loss"]) == 0.0
    assert int(metrics["step_skipped"]) == 1
    assert equal(after.model, state.model)
    assert int(after.optimizer.n_seen) == 0


def test_rejected_rows_count_all_their_positions_in_the_divisor():
    # Spec 12: ids [[0,1,2,3],[4,5,6,7]] with the second row masked divide by 3 + 4.
    targets = jnp.array([[[1, 2, 3, -1], [-1, -1, -1, -1]]], jnp.int32)
    assert [int(n) for n in train.divisor(targets)] == [3, 7]


# Schedules and presets.


def test_stage1_schedule_has_the_published_corners():
    optim = train.PRESETS["stage1"][1].optim
    used = {  # spec 5.2, column "used"
        1: 1.5e-07,
        1000: 1.5e-04,
        2000: 3.0e-04,
        10_000: 2.9996989729310015e-04,
        596_047: 1.6535619271678472e-04,
        597_045: 1.6499972363938454e-04,
        597_046: 1.65e-04,
        597_047: 1.6499980216394097e-04,
        1_000_000: 8.98340769244571e-05,
        1_413_814: 3.93252716718148e-05,
    }
    for step, want in used.items():
        assert train.learning_rate(optim, step) == pytest.approx(want, rel=1e-14), step


def test_stage2_schedule_falls_to_exactly_zero():
    optim = train.PRESETS["stage2"][1].optim
    assert train.learning_rate(optim, 1) == pytest.approx(2.071191848342693e-04, rel=1e-14)
    assert train.learning_rate(optim, 47_684) == 0.0


@pytest.mark.parametrize("name", ["stage1", "stage2"])
def test_official_recipes_hold_the_published_numbers(name):
    config = train.PRESETS[name][1]
    assert olmo3.n_parameters(config.model) == 7_298_617_344
    tokens = config.batch_instances * config.data.sequence_length
    assert tokens == {"stage1": 4_194_304, "stage2": 2_097_152}[name]
    assert config.steps == {"stage1": 1_413_814, "stage2": math.ceil(1e11 / 2**21)}[name]
    assert config.data.seed == {"stage1": 34_521, "stage2": 1337}[name]


# The command line.


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--preset", "stagw1"], "did you mean stage1"),
        (["--preset"], "preset="),
        ([*SMALL, "--batch-instances", "6"], "batch_instances=6 does not divide over 8 devices"),
        ([*SMALL, "--optim.state-dtype", "bfloat16"], "+0.93"),
        ([*SMALL, "--init", "nowhere"], "nowhere: no checkpoint"),
        ([*SMALL, "--data.source", "none.npy"], "none.npy"),
        ([*SMALL, "--model.n-layers", "5"], "n_layers=5"),
        ([*SMALL, "--steps", "0"], "steps=0"),
        ([*SMALL, "--learning-rat", "1"], "learning-rat"),
        ([*SMALL, "--replicas", "3"], "replicas=3"),
    ],
)
def test_user_errors_exit_2_and_say_field_and_value(flags, words, tmp_path, capsys):
    try:
        code = train.main([*flags, "--run-dir", str(tmp_path / "run")])
    except SystemExit as error:  # tyro's own
        code = error.code
    assert code == 2
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert words in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_help_of_a_preset_shows_its_own_values(capsys):
    with pytest.raises(SystemExit) as exit_info:
        train.main(["--preset", "stage2", "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert "0.00020712352850360292" in text
    assert "stage1-single-cosine" in text


def test_accumulation_is_the_fewest_micro_batches_that_fit():
    config = small(batch_instances=24, sequences_per_device=4)
    assert [train.micro_batches(config, n) for n in (1, 2, 3, 4, 6, 8, 12, 24)] == [
        6, 3, 2, 2, 1, 1, 1, 1,
    ]  # fmt: skip


# Whole runs.


@pytest.mark.slow
def test_run_learns_resumes_bit_for_bit_across_an_epoch_and_then_has_nothing_to_do(
    tmp_path, capsys, caplog
):
    source = token_files(tmp_path / "data")  # 93 instances: 11 batches of 8, so step 12 is epoch 2
    flags = [*SMALL, "--data.source", source, "--max-devices", "1", "--save-every-steps", "5"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with jax.log_compiles():
        assert train.main([*flags, "--steps", "15", "--run-dir", str(whole)]) == 0
    assert caplog.text.count("Compiling jit(train_step)") == 1  # ahead of the first batch
    assert train.main([*flags, "--steps", "10", "--run-dir", str(broken)]) == 0
    assert train.main([*flags, "--steps", "15", "--run-dir", str(broken)]) == 0
    a, b = rows_of(whole), rows_of(broken)
    assert list(a) == list(b) == list(range(1, 16))
    for step in a:
        for name in ("loss", "ce", "z_loss", "grad_norm", "lr", "data_hash", "tokens_seen"):
            assert a[step][name] == b[step][name], (step, name)
    assert len({row["data_hash"] for row in a.values()}) == 15
    assert equal(final_state(whole, 15), final_state(broken, 15))
    assert a[15]["loss"] < a[1]["loss"]
    assert a[15]["mfu"] == "n/a"
    capsys.readouterr()
    assert train.main([*flags, "--steps", "15", "--run-dir", str(whole)]) == 0
    assert "already at step 15 of 15, nothing to do" in capsys.readouterr().err
    assert {p.name for p in (whole / "checkpoints").iterdir()} == {"5", "10", "15"}


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
    """Losses of 24 steps on eight devices, and its folder as it was behind step 4."""
    path = tmp_path_factory.mktemp("on_eight")
    flags = [*WIDE, "--run-dir", str(path / "run")]
    assert train.main([*flags, "--steps", "4"]) == 0
    shutil.copytree(path / "run", path / "start")
    assert train.main([*flags, "--steps", "24"]) == 0
    return path


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1", "2", "4", "2x4", "16", "2 processes"])
def test_any_devices_continue_a_run_with_the_same_losses(mesh, on_eight, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(on_eight / "start", run)
    flags = [*WIDE, "--run-dir", str(run), "--steps", "24"]
    if mesh in ("16", "2 processes"):
        n = 2 if mesh == "2 processes" else 1
        count = f"--xla_force_host_platform_device_count={16 // n // n}"
        xla_flags = f"{os.environ.get('XLA_FLAGS', '')} {count}"
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags}
        flags += f"--coordinator 127.0.0.1:{free_port()} --n-processes {n}".split() if n > 1 else []
        command = [sys.executable, "train.py", *flags]
        each = [[*command, "--process-id", str(i)] for i in range(n)]
        root = Path(train.__file__).parent
        jobs = [subprocess.Popen(c, env=env, cwd=root, stderr=subprocess.PIPE) for c in each]
        error = b"".join(job.communicate()[1] for job in jobs).decode()
        assert [job.returncode for job in jobs] == [0] * n, error
    else:
        more = ["--replicas", "2"] if mesh == "2x4" else ["--max-devices", mesh]
        assert train.main([*flags, *more]) == 0
        error = capsys.readouterr().err
    shape, split = {
        "1": ("'data': 1, 'fsdp': 1", "8 x 1 devices x 2"),
        "2": ("'data': 1, 'fsdp': 2", "4 x 2 devices x 2"),
        "4": ("'data': 1, 'fsdp': 4", "2 x 4 devices x 2"),
        "2x4": ("'data': 2, 'fsdp': 4", "1 x 8 devices x 2"),
        "16": ("'data': 1, 'fsdp': 16", "1 x 16 devices x 1"),
        "2 processes": ("'data': 1, 'fsdp': 8", "1 x 8 devices x 2"),
    }[mesh]
    assert f"mesh {{{shape}}}, batch 16 = {split}; step 5 to 24" in error
    got, want = rows_of(run), rows_of(on_eight / "run")
    assert list(got) == list(want) == list(range(1, 25))
    for step, row in want.items():
        assert got[step]["loss"] == pytest.approx(row["loss"], abs=1e-5)
        assert got[step]["data_hash"] == row["data_hash"]


@pytest.mark.slow
def test_a_run_of_two_epochs_ends_with_the_second_one(tmp_path, capsys):  # A11
    source = token_files(tmp_path / "data", 1300)  # 40 instances: 5 batches of 8
    flags = [*SMALL, "--data.source", source, "--max-devices", "1", "--run-dir", str(tmp_path)]
    assert train.main([*flags, "--epochs", "2", "--save-every-steps", "4"]) == 0
    assert list(rows_of(tmp_path)) == list(range(1, 11))
    assert "5 steps will repeat data" in capsys.readouterr().err
    assert train.main([*flags, "--epochs", "2"]) == 0
    assert "already at step 10 of 10, nothing to do" in capsys.readouterr().err


@pytest.mark.slow
def test_loss_that_never_is_finite_ends_the_run_naming_step_and_batch(tmp_path):
    flags = [*SMALL, "--max-devices", "1", "--steps", "9", "--run-dir", str(tmp_path)]
    run = runs.Run(train.parse([*flags, "--max-nonfinite-steps", "3"]))
    with pytest.raises(
        RuntimeError, match=r"not finite for 3 steps up to step 3 \(data_hash=\w+\)"
    ):
        runs.Run(
            dataclasses.replace(
                run.config, model=dataclasses.replace(run.config.model, init_std=float("nan"))
            )
        ).train()
    assert not any(p.name.isdigit() for p in (tmp_path / "checkpoints").glob("*"))


def test_resume_refuses_another_model_and_reports_other_changes():
    config = small()
    saved = runs.config_json(config)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=128))
    with pytest.raises(ValueError, match=r"model.d_ff: 64 -> 128"):
        checkpoints.check_same_run(saved, runs.config_json(other))
    other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=1.0))
    assert checkpoints.check_same_run(saved, runs.config_json(other)) == ["optim.lr: 0.004 -> 1.0"]


def test_devices_that_get_other_rows_than_the_order_says_stop_the_run(tmp_path, monkeypatch):
    honest = data.Loader.read

    def sharded_twice(self, step, rows):  # the reader runs ahead, as if a second sampler had run
        return honest(self, 2 * step, rows)

    monkeypatch.setattr(data.Loader, "read", sharded_twice)
    run = runs.Run(train.parse([*SMALL, "--steps", "3", "--run-dir", str(tmp_path)]))
    with pytest.raises(RuntimeError, match=r"data_hash=.* at step 1, but the order says"):
        run.train()


def test_paths_of_checkpoints_are_found_and_refused_by_name(tmp_path):
    (tmp_path / "checkpoints" / "12" / "model").mkdir(parents=True)
    (tmp_path / "checkpoints" / "30.orbax-checkpoint-tmp" / "model").mkdir(parents=True)
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "12"):
        assert checkpoints.find_checkpoint(path) == (tmp_path / "checkpoints", 12)
    with pytest.raises(FileNotFoundError, match="no checkpoint there"):
        checkpoints.find_checkpoint(Path("nowhere"))


@pytest.mark.slow
def test_evaluation_in_the_loop_changes_no_loss_and_warns_of_trained_data(tmp_path, capsys):
    source = token_files(tmp_path / "data")
    ids = np.fromfile(source, "<u4")
    ids[::20] = 256  # documents, so that there is something to evaluate
    ids.tofile(source)
    flags = [*SMALL, "--data.source", source, "--max-devices", "1", "--steps", "6"]
    plain, evaluated = tmp_path / "plain", tmp_path / "evaluated"
    assert train.main([*flags, "--run-dir", str(plain)]) == 0
    assert "not held out" not in capsys.readouterr().err
    watched = ["--heldout", source, "--eval-every-steps", "2", "--run-dir", str(evaluated)]
    assert train.main([*flags, *watched]) == 0
    assert f"{source} is in the training data: not held out" in capsys.readouterr().err
    a, b = rows_of(plain), rows_of(evaluated)
    assert [r["loss"] for r in a.values()] == [r["loss"] for r in b.values()]
    assert [r["data_hash"] for r in a.values()] == [r["data_hash"] for r in b.values()]
    assert equal(final_state(plain, 6), final_state(evaluated, 6))
    lines = [json.loads(x) for x in (evaluated / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines if "eval" in row] == [2, 4, 6]
