"""What a pod relies on: kernels, fused loss, recomputation, the compiled step, many processes."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kubernetes_validate
import numpy as np
import pytest
import yaml
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import olmo3
import train
from tools import processes

TINY = olmo3.ModelConfig(
    vocab_size=384,
    tokenizer_size=300,
    d_model=64,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    d_head=16,
    d_ff=96,
    windows=(8, None),
    compute_dtype="float32",
    remat="none",
    loss_chunk=16,
)


def rows(x):
    """An array split over the mesh by its first axis."""
    mesh = jax.sharding.get_mesh()
    return jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"))))


def heads(getkey, n_heads, n_kv_heads, d_head, length):
    """Random queries (already scaled by 1 / sqrt(H)), keys and values of 8 rows."""
    shapes = [(8, length, n, d_head) for n in (n_heads, n_kv_heads, n_kv_heads)]
    q, k, v = (rows(jax.random.normal(getkey(), shape)) for shape in shapes)
    return q * d_head**-0.5, k, v


@pytest.mark.slow
@pytest.mark.parametrize("d_head", [128, 256])
@pytest.mark.parametrize("window", [None, 96])
@pytest.mark.parametrize("packed", [False, True])
def test_splash_equals_xla_attention_forward_and_backward(getkey, d_head, window, packed):
    q, k, v = heads(getkey, 2, 1, d_head, 256)
    segments = rows(jnp.repeat(jnp.arange(8, dtype=jnp.int32), 32)[None] * jnp.ones((8, 1), int))
    segments = segments.astype(jnp.int32) // 3 if packed else None
    weight = rows(jax.random.normal(getkey(), q.shape))

    def run(backend, scale):
        config = dataclasses.replace(TINY, attention=backend)

        def value(q, k, v):
            y = olmo3.attention(config, (q * scale, k, v), window, segments)
            return jnp.sum(y * weight), y

        return jax.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))(q, k, v)

    (_, got), got_grads = run("splash", 1.0)
    (_, want), want_grads = run("xla", d_head**0.5)
    np.testing.assert_allclose(got, want, atol=2e-5)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5 * float(jnp.abs(b).max()))


def test_rotation_by_permutation_equals_complex_multiplication(getkey):
    x = np.asarray(jax.random.normal(getkey(), (1, 3, 5, 16)))
    angles = np.asarray(jax.random.normal(getkey(), (5, 8)))
    got = jax.jit(olmo3.rotate)(x, (np.cos(angles), np.sin(angles)))
    want = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles)
    np.testing.assert_allclose(got, np.concatenate([want.real, want.imag], -1), atol=1e-6)


def test_fused_loss_and_its_gradients_equal_those_of_whole_logits(getkey):
    model = jax.jit(lambda: olmo3.Olmo3(TINY, jax.random.key(0)))()
    hidden = rows(jax.random.normal(getkey(), (8, 40, 64)))
    targets = rows(jax.random.randint(getkey(), (8, 40), -1, 300, jnp.int32))

    def plain(unembed, hidden):
        scores = jnp.einsum("BSD,VD->BSV", hidden, olmo3.gather(unembed, jnp.dtype("float32")))
        normaliser = jax.nn.logsumexp(scores, axis=-1)
        chosen = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        seen = (targets >= 0).astype(jnp.float32)
        return jnp.sum((normaliser - chosen + 0.1 * normaliser**2) * seen)

    def fused(unembed, hidden):
        result: Any = olmo3.loss_of_head(unembed, hidden, targets, 0.1, 16)
        return result[0]

    want, value = (
        jax.jit(jax.value_and_grad(function, (0, 1)))(model.unembed, hidden)
        for function in (plain, fused)
    )
    np.testing.assert_allclose(value[0], want[0], rtol=1e-6)
    for a, b in zip(value[1], want[1], strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("remat", ["light", "medium", "full"])
def test_recomputation_changes_no_gradient(getkey, remat):
    tokens = rows(jax.random.randint(getkey(), (8, 32), 0, 300, jnp.int32))

    def gradients(config):
        model = jax.jit(lambda: olmo3.Olmo3(config, jax.random.key(0)))()

        def loss(model):
            return olmo3.summed_loss(model, model(tokens), tokens, 1e-5)[0]

        return jax.tree.leaves(jax.jit(jax.grad(loss))(model))

    for a, b in zip(
        gradients(dataclasses.replace(TINY, remat=remat)), gradients(TINY), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()))


def free_port():
    """A port with a free one behind it, for the coordinator and the watch."""
    while True:
        with socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", 0))
            try:
                b.bind(("127.0.0.1", a.getsockname()[1] + 1))
            except OSError:
                continue
            return a.getsockname()[1]


SMALL_RUN = [  # in float32 at a rate near the recipe's, where rounding does not grow
    *("--model.d-model", "64", "--model.n-layers", "2", "--model.d-ff", "96"),
    *("--model.n-heads", "2", "--model.n-kv-heads", "2", "--model.windows", "16"),
    *("--model.compute-dtype", "float32", "--optim.lr", "1e-3"),
    *("--data.sequence-length", "64", "--batch-instances", "8", "--steps", "6"),
    *("--optim.phases.0.warmup-steps", "2", "--eval-every-steps", "100"),
    *("--eval-documents", "4", "--sample-tokens", "0"),
]


def start(run_dir, port, process, n_processes, *more, devices=1):
    """A training process on CPU with its own devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "train.py", "--run-dir", str(run_dir), *SMALL_RUN, *more]
        + (f"--coordinator 127.0.0.1:{port} --n-processes {n_processes}".split() if port else [])
        + (f"--process-id {process}".split() if port else []),
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=Path(__file__).parent.parent,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(run_dir):
    """Training losses by step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.slow
def test_four_processes_together_repeat_the_losses_of_one(tmp_path):  # two: test_train.py
    port = free_port()
    runs = [start(tmp_path / "many", port, i, 4) for i in range(4)]
    errors = [run.communicate(timeout=300)[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, errors
    alone = start(tmp_path / "one", 0, 0, 1, devices=4)
    error = alone.communicate(timeout=300)[1]
    assert alone.returncode == 0, error
    got, want = losses(tmp_path / "many"), losses(tmp_path / "one")
    assert list(got) == list(want) == list(range(1, 7))
    np.testing.assert_allclose(list(got.values()), list(want.values()), atol=1e-5)


@pytest.mark.slow
def test_a_process_that_never_starts_is_named_and_ends_the_others(tmp_path):
    port = free_port()
    runs = [start(tmp_path, port, i, 3, "--process-timeout", "12") for i in (0, 2)]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [1, 1], errors
    assert all("process [1] of 3 did not start in 12 s" in error for error in errors), errors


@pytest.mark.slow
def test_a_process_that_hangs_is_named_and_ends_the_others(tmp_path):
    port = free_port()
    more = ("--steps", "100000", "--process-timeout", "8", "--save-every-steps", "100000")
    runs = [start(tmp_path, port, i, 2, *more) for i in range(2)]
    while not (tmp_path / "metrics.jsonl").exists() or len(losses(tmp_path)) < 3:
        assert all(run.poll() is None for run in runs), [run.communicate()[1] for run in runs]
        time.sleep(0.5)
    runs[1].send_signal(signal.SIGSTOP)
    error = runs[0].communicate(timeout=120)[1]
    runs[1].kill()
    runs[1].communicate()
    assert runs[0].returncode == 1, error
    said = r"process \[1\] of 2 (did not get past step \d+ in|was not heard of for) 8 s"
    assert re.search(said, error), error


def test_the_first_to_fail_is_named_however_the_others_end(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(processes.Watch, "tell", lambda _: None)

    def watch():
        return processes.Watch("127.0.0.1", free_port(), 1, 3, timeout=10.0)

    one = watch()
    assert [one.judge(i, 0) for i in range(3)] == [""] * 3
    clock[0] = 9.0
    assert [one.judge(i, 5) for i in (0, 2)] == ["", ""]
    clock[0] = 11.0  # nothing of process 1 since 0, and process 2 is now ahead of nobody
    assert one.judge(0, 5) == "process [1] of 3 was not heard of for 10 s"
    one.gone.add(2)
    assert one.judge(0, 5) == "process [1] of 3 was not heard of for 10 s"
    two = watch()
    assert [two.judge(i, 7) for i in range(3)] == [""] * 3
    clock[0] = 20.0
    assert [two.judge(i, 8) for i in (0, 2)] + [two.judge(1, 7)] == ["", "", ""]
    clock[0] = 22.0
    verdict = "process [1] of 3 did not get past step 7 in 10 s"
    assert [two.judge(i, 8) for i in (0, 2)] == [verdict] * 2


DEPLOY = Path(__file__).parent.parent / "deploy"


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("jobset-*.yaml")), ids=lambda p: p.stem)
def test_manifest_fits_kubernetes_schema_its_topology_and_the_command_line(path):
    jobset = yaml.safe_load(path.read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    for replicated in jobset["spec"]["replicatedJobs"]:
        spec = replicated["template"]["spec"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
        pod = spec["template"]["spec"]
        chips = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
        container = pod["containers"][0]
        per_host = int(container["resources"]["limits"]["google.com/tpu"])
        assert spec["parallelism"] * per_host == np.prod([int(n) for n in chips])
        config = train.parse(container["args"])
        assert config.replicas == replicated["replicas"]
        assert config.run_dir.parts[1] == "bucket"


def test_container_file_copies_what_exists():
    copies = re.findall(r"^COPY (.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    root = DEPLOY.parent
    assert all(list(root.glob(name)) for names in copies for name in names.split())


def test_tpu_vm_script_parses():
    assert subprocess.run(["bash", "-n", DEPLOY / "tpu_vm.sh"]).returncode == 0


@pytest.mark.slow
def test_tiny_step_compiles_for_an_absent_tpu_in_under_a_minute(tmp_path):
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the tpu extra")
    text = tmp_path / "step.hlo"
    command = [sys.executable, "train.py", "--preset", "tiny", "--aot", "v5p:2x2x1"]
    run = subprocess.run(
        [*command, "--hlo", str(text)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        cwd=DEPLOY.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    report = dict(line.split(maxsplit=1) for line in run.stdout.splitlines() if line[:1] != " ")
    assert report["devices"].startswith("4 x TPU v5, mesh {'data': 1, 'fsdp': 4}; 2 sequences")
    assert report["HBM,"].endswith("fits")
    compiled = re.search(r"(\d+) CPU s", report["compiled"])
    assert compiled is not None
    assert float(compiled[1]) < 60
    moved = re.findall(r"^(all-gather|reduce-scatter) +\S+ GB of (\w+)", run.stdout, re.MULTILINE)
    assert ("all-gather", "bf16") in moved
    assert ("all-gather", "f32") not in moved
    assert ("reduce-scatter", "f32") in moved
    assert ("reduce-scatter", "bf16") not in moved
    kernels = set(re.findall(r"splash_mha_(fwd|dkv)", text.read_text()))
    assert kernels == {"fwd", "dkv"}


def test_flags_of_a_generation_come_before_those_of_the_user(monkeypatch, capsys):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--first=1")
    machine = train.MachineConfig(aot="tpu7x:4x4x4", xla_flags="--last=2")
    processes.set_libtpu_flags(machine, train.LIBTPU_FLAGS)
    flags = os.environ["LIBTPU_INIT_ARGS"].split()
    assert flags == ["--first=1", *train.LIBTPU_FLAGS["tpu7x"], "--last=2"]
    assert " ".join(flags[1:]) in capsys.readouterr().err


def test_wide_heads_have_the_size_and_the_flops_of_the_7b_and_are_another_model():
    plain, wide = (train.PRESETS[name][1] for name in ("stage1", "stage1-wide-heads"))
    assert olmo3.n_parameters(wide.model) == olmo3.n_parameters(plain.model)
    counts = [olmo3.flops_per_token(c.model, c.data.sequence_length) for c in (plain, wide)]
    assert counts[0] == counts[1]
    assert wide.model != plain.model
    assert "another model" in train.PRESETS["stage1-wide-heads"][0]
