"""The recipe: presets, schedule, optimizer, sharded step, loop.

    python train.py                      the `tiny` preset on the embedded corpus, on a laptop
    python train.py --preset stage1      OLMo 3 7B pre-training, on a pod
    python train.py --preset stage1 --help    that preset's own values, every field a flag
    python train.py --report RUN_DIR     where the run's time went, and its restarts

Axes as in olmo3.py; A counts the micro-batches of gradient accumulation.

A run directory holds config.json, metrics.jsonl (the truth about the run: a row per step, appended)
and checkpoints/. Exit codes: 0 done or already done, 1 run-time failure, 2 the configuration or
input is at fault (said in one line before anything is compiled), 75 stopped by SIGTERM or SIGINT
with everything saved: the same command goes on. A second signal ends at once, with 128 + signal.

Sources: OLMo-core src/scripts/official/OLMo3/OLMo-3-1025-7B-pretrain-{1,2}.py and -midtraining.py
for the numbers, src/olmo_core/optim and train_module.py for the arithmetic.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import math
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float32, Int32, Key

import data
import olmo3
from tools import checkpoints, elastic, processes
from tools.checkpoints import restore_model
from tools.metrics import Log, report
from tools.processes import MachineConfig, Wish, strongest


@dataclass(frozen=True)
class Phase:
    """One stretch of the learning-rate schedule; its shape is a function of the step alone."""

    first_step: int
    """Step at which it takes over."""
    shape: Literal["cosine", "half_cosine", "linear"]
    """Decay; half_cosine is the second half of a cosine that began `warmup_steps` ago."""
    warmup_steps: int
    """Linear rise from zero over this many steps from step 0, not from `first_step`."""
    horizon_steps: int
    """Step at which the decay ends, warm-up included; a run may stop before."""
    final_fraction: float
    """Rate at the horizon as a share of the peak."""


@dataclass(frozen=True)
class OptimConfig:
    """SkipStepAdamW and its schedule (OLMo-core optim/adamw.py:254, scheduler.py)."""

    lr: float = 3e-4
    """Peak learning rate."""
    phases: tuple[Phase, ...] = (Phase(1, "cosine", 2000, 1_192_093, 0.1),)
    """The schedule; each phase holds from its first step to the next one's."""
    beta1: float = 0.9
    """Decay of the first moment per step."""
    beta2: float = 0.95
    """Decay of the second moment per step."""
    eps: float = 1e-8
    """Added to the root of the corrected second moment."""
    weight_decay: float = 0.1
    """Decoupled, times the learning rate; on everything but the input embedding (spec 4.1)."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm."""
    z_loss: float = 1e-5
    """Weight of the mean squared log-normaliser."""
    skip_window: int = 128
    """Steps that the mean and deviation of the spike test look back on."""
    skip_sigmas: float = 6.0
    """A step whose loss or gradient norm lies further above the mean is not taken."""
    initial_count: int = 0
    """Adam's counter before the first update; 1 in reference runs that saved step 0 (spec 4.5)."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, gradients and moments; anything but float32 needs accept_damage."""
    accept_damage: bool = False
    """Lets a demonstration run with bfloat16 state."""

    def __post_init__(self) -> None:
        if self.state_dtype != "float32" and not self.accept_damage:
            raise ValueError(
                f"state_dtype={self.state_dtype}: updates vanish in bfloat16 weights and moments"
                " (+0.93 loss after 1000 steps in the published run); keep float32, or see the"
                " damage with --optim.accept-damage"
            )
        if not self.phases or self.phases[0].first_step != 1:
            raise ValueError("phases: the first phase must have first_step=1, the first update")
        for p in self.phases:
            if p.warmup_steps >= p.horizon_steps:
                raise ValueError(
                    f"warmup_steps={p.warmup_steps} leaves nothing of"
                    f" horizon_steps={p.horizon_steps}; shorten the warm-up or move the horizon"
                )


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    run_dir: Path
    """Where everything the run writes goes."""
    model: olmo3.ModelConfig
    optim: OptimConfig
    data: data.DataConfig
    steps: int
    """The run stops after this optimizer step; schedules keep their own horizon."""
    batch_instances: int
    """Sequences of one optimizer step over all devices."""
    epochs: int | None = None
    """Or after so many epochs of the data, whatever number of steps that is."""
    sequences_per_device: int = 4
    """Most sequences a device holds at a time; accumulation makes up the rest of the batch."""
    replicas: int = 1
    """Copies of the sharded state, one per slice of a multi-slice job."""
    max_devices: int | None = None
    """Use only the first so many devices."""
    seed: int = 0
    """Of the weights."""
    heldout: str = ""
    """Token files to evaluate on, spelt like data.source; empty is none, but stdlib has its own."""
    eval_every_steps: int = 10_000
    """Steps between evaluations; the last step is always evaluated."""
    eval_documents: int = 10_000
    """Most held-out documents of one evaluation."""
    save_every_steps: int = 1000
    """Steps between checkpoints; the last step is always saved."""
    save_every_minutes: float = 60.0
    """And at the first step after so many minutes without one."""
    keep_last: int = 3
    """Newest checkpoints that are kept."""
    keep_every_steps: int | None = None
    """Checkpoints at multiples of this are kept for good."""
    resume: Literal["auto", "none"] = "auto"
    """Go on from the newest checkpoint in run_dir, or start anew in an unused run_dir."""
    allow_data_change: bool = False
    """Goes on from a checkpoint with other data, seed or batch size; the order then differs."""
    init: Path | None = None
    """Checkpoint whose weights, and Adam moments if it has them, the run starts from."""
    max_nonfinite_steps: int = 5
    """So many steps in a row without a finite loss and gradient end the run."""
    rollback_on_spike: int = 0
    """After so many skipped steps in a row, goes back, leaving out their batches; 0 never does."""
    machine: tyro.conf.OmitArgPrefixes[MachineConfig] = field(default_factory=MachineConfig)
    """Topology, processes, profile."""
    mirrors: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Trackers that get a copy of metrics.jsonl; extras of the same names install them."""
    sample_tokens: int = 0
    """Tokens to print from the trained model at the end; byte vocabularies only."""

    def __post_init__(self) -> None:
        if self.data.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"data.vocab_size={self.data.vocab_size} does not fit model.vocab_size="
                f"{self.model.vocab_size}; pad the model's vocabulary up to a multiple of 128"
            )
        counts = ("steps", "batch_instances", "sequences_per_device", "keep_last")
        for name in (*counts, "save_every_steps", "eval_every_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


OLMO3_7B = olmo3.ModelConfig(
    vocab_size=100_352,  # dolma2's 100,278 ids padded to a multiple of 128 (data/tokenizer.py:77)
    tokenizer_size=100_278,
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    d_head=128,
    d_ff=11_008,
    windows=(4096, 4096, 4096, None),  # nn/transformer/config.py:980
    rope_theta=500_000.0,
    norm_eps=1e-6,
    init_std=0.02,
    remat="light",
)

OLMO_MIX = data.DataConfig(
    source="OLMo-mix-0625-official.txt",
    base="https://olmo-data.org",
    sequence_length=8192,
    seed=34_521,
)

BYTES = data.DataConfig(
    source="stdlib", sequence_length=128, tokenizer="bytes", vocab_size=258, eos_id=256, pad_id=257
)

STAGE1 = RunConfig(
    run_dir=Path("runs/stage1"),
    model=OLMO3_7B,
    optim=OptimConfig(
        lr=3e-4,
        phases=(  # pretrain-1.py:86 (5T-token cosine), then pretrain-2.py from step 596,047 (7T)
            Phase(1, "cosine", warmup_steps=2000, horizon_steps=1_192_093, final_fraction=0.1),
            Phase(596_048, "half_cosine", 597_046, horizon_steps=1_668_931, final_fraction=0.1),
        ),
        initial_count=1,
    ),
    data=OLMO_MIX,
    steps=1_413_814,  # one epoch
    batch_instances=512,  # 4,194,304 tokens
    sequences_per_device=2,  # two micro-batches on 128 devices: room for the traffic to overlap
    eval_every_steps=10_000,
    save_every_steps=1000,
)

PRESETS: dict[str, tuple[str, RunConfig]] = {
    "tiny": (
        "2.7 M parameters on the Python library's own source, a minute and a half on two cores.",
        RunConfig(
            run_dir=Path("runs/tiny"),
            model=olmo3.ModelConfig(
                vocab_size=384,
                tokenizer_size=258,
                d_model=160,
                n_layers=8,
                n_heads=5,
                n_kv_heads=5,
                d_head=32,
                d_ff=448,
                windows=(32, 32, 32, None),
                remat="none",
                loss_chunk=128,
            ),
            optim=OptimConfig(lr=4e-3, phases=(Phase(1, "cosine", 30, 300, 0.1),)),
            data=BYTES,
            steps=300,
            batch_instances=8,
            sequences_per_device=8,
            eval_every_steps=100,
            eval_documents=64,
            save_every_steps=100,
            sample_tokens=200,
        ),
    ),
    "190m": (
        "The official 190M, Chinchilla-optimal (scripts/train/OLMo3/OLMo-3-190M.py).",
        RunConfig(
            run_dir=Path("runs/190m"),
            model=olmo3.ModelConfig(
                d_model=768, n_layers=12, n_heads=12, n_kv_heads=12, d_head=64, d_ff=3072
            ),
            optim=OptimConfig(
                lr=3e-4, phases=(Phase(1, "cosine", 2000, 7262, 0.1),), initial_count=1
            ),
            data=dataclasses.replace(OLMO_MIX, filter_repetitions=True),
            steps=7262,  # 20 tokens for each of 190,354,176 non-embedding parameters
            batch_instances=64,  # 524,288 tokens
        ),
    ),
    "7b-smoke": (
        "The 7B's width at 4 layers on the embedded corpus: 20 steps to try a machine.",
        RunConfig(
            run_dir=Path("runs/7b-smoke"),
            model=dataclasses.replace(OLMO3_7B, n_layers=4),
            optim=OptimConfig(lr=3e-4, phases=(Phase(1, "cosine", 10, 1000, 0.1),)),
            data=dataclasses.replace(BYTES, sequence_length=2048),
            steps=20,
            batch_instances=32,
            eval_documents=32,
        ),
    ),
    "stage1": ("OLMo 3 7B pre-training, 5.93 T tokens, as AI2 ran it in two parts.", STAGE1),
    "stage1-single-cosine": (
        "stage1 with the one cosine of the MaxText reproduction (run_olmo3_7b_stage1.sh).",
        dataclasses.replace(
            STAGE1,
            run_dir=Path("runs/stage1-single-cosine"),
            optim=dataclasses.replace(
                STAGE1.optim, phases=(Phase(1, "cosine", 2000, 1_414_078, 0.1),)
            ),
        ),
    ),
    "stage1-wide-heads": (
        "An experiment, another model: stage1 with 16 heads of 256, same size and FLOPs, for TPUs.",
        dataclasses.replace(
            STAGE1,
            run_dir=Path("runs/stage1-wide-heads"),
            model=dataclasses.replace(OLMO3_7B, n_heads=16, n_kv_heads=16, d_head=256),
        ),
    ),
    "stage2": (
        "OLMo 3 7B mid-training, 100 B tokens, linear to zero; start it with --init STAGE1.",
        RunConfig(
            run_dir=Path("runs/stage2"),
            model=OLMO3_7B,
            optim=OptimConfig(  # OLMo-3-1025-7B-midtraining.py
                lr=0.00020712352850360292,
                phases=(Phase(1, "linear", 0, horizon_steps=47_684, final_fraction=0.0),),
            ),
            data=dataclasses.replace(
                OLMO_MIX, source="OLMo-midtraining-mix-0625-100B.txt", seed=1337
            ),
            steps=47_684,
            batch_instances=256,  # 2,097,152 tokens
            sequences_per_device=2,
        ),
    ),
}

LIBTPU_FLAGS = {  # by the name of the TPU's generation
    # Without it every weight on a torus of 4 x 4 x 4 or more is gathered by a synchronous
    # all-reduce of zeros: twice the bytes, and nothing overlaps (0.31 s of a 2.4 s step).
    "tpu7x": (
        "--xla_tpu_prefer_async_allgather_to_allreduce=true",
        # Matmuls may use all 64 MiB of VMEM instead of half: 44.5 ms a layer instead of 54.1.
        "--xla_tpu_scoped_vmem_limit_kib=65536",
    ),
    "v5p": ("--xla_tpu_scoped_vmem_limit_kib=65536",),  # 93.8 ms a layer; 97.8 at half, 123.5 unset
}

PEAK_FLOPS = {  # dense bfloat16 per JAX device, from the vendors' data sheets
    "TPU v4": 275e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153.5e12,  # half a chip
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA B200": 2250e12,
}


def learning_rate(optim: OptimConfig, step: int) -> float:
    """Rate of update `step`, counted from 1, in float64 (OLMo-core optim/scheduler.py:380-558)."""
    phase = [p for p in optim.phases if p.first_step <= max(step, 1)][-1]
    warmup, horizon = phase.warmup_steps, phase.horizon_steps
    final = phase.final_fraction * optim.lr
    peak = final + (optim.lr - final) / 2 if phase.shape == "half_cosine" else optim.lr
    if step < warmup:
        return peak * step / warmup
    if step >= horizon:
        return final
    elapsed, decay = step - warmup, horizon - warmup
    if phase.shape == "linear":
        return optim.lr - (optim.lr - final) * (elapsed / decay)
    turn = elapsed / decay if phase.shape == "cosine" else (elapsed + decay) / (2 * decay)
    return final + (optim.lr - final) * (1 + math.cos(math.pi * turn)) / 2


class SkipStepState(NamedTuple):
    """What the spike test remembers, around the state of the optimizer it guards."""

    inner: optax.OptState
    losses: Float32[Array, " W"]
    grad_norms: Float32[Array, " W"]
    n_seen: Int32[Array, ""]  # finite steps ever recorded; the windows are ring buffers
    n_nonfinite: Int32[Array, ""]  # steps in a row that were not finite


def is_spike(
    history: Float32[Array, " W"],
    n_seen: Int32[Array, ""],
    value: Float32[Array, ""],
    sigmas: float,
) -> Bool[Array, ""]:
    """Whether a value lies too far above the recorded ones (OLMo-core
    optim/skip_step_optimizer.py:59).

    The deviation is the unbiased one, the value itself is not part of it, and there is no verdict
    before half a window is full. A spike smaller than 1e-4 is none: a constant history has no
    deviation.
    """
    window = history.shape[0]
    seen = jnp.arange(window) < n_seen
    n = jnp.maximum(jnp.minimum(n_seen, window), 2).astype(jnp.float32)
    mean = jnp.sum(jnp.where(seen, history, 0.0)) / n
    square = jnp.sum(jnp.where(seen, jnp.square(history - mean), 0.0))
    spread = jnp.maximum(sigmas * jnp.sqrt(square / (n - 1)), 1e-4)
    return (n_seen >= max(2, window // 2) - 1) & (value - mean > spread)


def skip_steps(
    inner: optax.GradientTransformation, window: int, sigmas: float
) -> optax.GradientTransformationExtraArgs:
    """Guards an optimizer: a spiking or non-finite step changes neither parameters nor inner state.

    `update` needs `loss` and `grad_norm` (before clipping) of the step. Skipped spikes enter the
    history, as in the reference; values that are not finite never do, which the reference lacks
    (spec T13).
    """

    def init(params: Any) -> SkipStepState:  # noqa: ANN401 - any tree of arrays
        zeros = jnp.zeros(window, jnp.float32, out_sharding=P(None))
        zero = jnp.zeros((), jnp.int32, out_sharding=P())
        return SkipStepState(inner.init(params), zeros, zeros, zero, zero)

    def update(
        updates: Any,  # noqa: ANN401 - any tree of arrays
        state: SkipStepState,
        params: Any = None,  # noqa: ANN401
        *,
        loss: Float32[Array, ""],
        grad_norm: Float32[Array, ""],
    ) -> tuple[Any, SkipStepState]:
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        spike = is_spike(state.losses, state.n_seen, loss, sigmas)
        spike |= is_spike(state.grad_norms, state.n_seen, grad_norm, sigmas)
        take = finite & ~spike
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an int32 power
            updates, new_inner = inner.update(updates, state.inner, params)
        updates = jax.tree.map(lambda u: jnp.where(take, u, jnp.zeros_like(u)), updates)
        new_inner = jax.tree.map(lambda n, o: jnp.where(take, n, o), new_inner, state.inner)
        slot = state.n_seen % window
        losses = jnp.where(finite, state.losses.at[slot].set(loss), state.losses)
        norms = jnp.where(finite, state.grad_norms.at[slot].set(grad_norm), state.grad_norms)
        n_nonfinite = jnp.where(finite, 0, state.n_nonfinite + 1)
        n_seen = state.n_seen + finite.astype(jnp.int32)
        return updates, SkipStepState(new_inner, losses, norms, n_seen, n_nonfinite)

    # optax's protocol knows neither named extras nor the state's own type.
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def decay_mask(model: olmo3.Olmo3) -> olmo3.Olmo3:
    """True where weight decay applies: everything but the input embedding, gains too (spec T5)."""
    return eqx.tree_at(lambda m: m.embed, jax.tree.map(lambda _: True, model), False)


def make_optimizer(optim: OptimConfig) -> optax.GradientTransformationExtraArgs:
    """SkipStepAdamW (OLMo-core optim/adamw.py:50), to be scaled by minus the learning rate.

    `update` takes the step's loss and grad_norm.
    """
    adam_w = optax.chain(
        optax.scale_by_adam(optim.beta1, optim.beta2, optim.eps),
        optax.add_decayed_weights(optim.weight_decay, decay_mask),
    )
    return skip_steps(adam_w, optim.skip_window, optim.skip_sigmas)


class TrainState(eqx.Module):
    """Everything that training changes; what is in it is what a checkpoint holds."""

    model: olmo3.Olmo3
    optimizer: SkipStepState
    step: Int32[Array, ""]  # updates so far, which is also the number of batches consumed


def start_state(config: RunConfig, model: olmo3.Olmo3) -> TrainState:
    """The state before the first update of a run that starts from these weights."""
    model = jax.tree.map(lambda x: x.astype(config.optim.state_dtype), model)
    optimizer: Any = make_optimizer(config.optim).init(cast(Any, model))
    count = jnp.full((), config.optim.initial_count, jnp.int32, out_sharding=P())
    optimizer = optimizer._replace(inner=optax.tree.set(optimizer.inner, count=count))
    for leaf in jax.tree.leaves((model, optimizer)):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != jnp.float32:
            assert config.optim.accept_damage, f"state leaf of {leaf.dtype}, must be float32"
    return TrainState(model, optimizer, jnp.zeros((), jnp.int32, out_sharding=P()))


def init_state(config: RunConfig, key: Key[Array, ""]) -> TrainState:
    """The state of a run that starts from random weights."""
    return start_state(config, olmo3.Olmo3(config.model, key))


class Sums(NamedTuple):
    """Totals over target positions, never means: those are taken once, at the end."""

    ce: Float32[Array, ""]
    z: Float32[Array, ""]


def loss_sums(
    model: olmo3.Olmo3, batch: data.DeviceBatch, z_weight: float
) -> tuple[Float32[Array, ""], Sums]:
    """Loss of one micro-batch [B, S], summed over its targets."""
    hidden = model(batch.tokens, batch.segments)
    loss, sums = olmo3.summed_loss(model, hidden, batch.targets, z_weight)
    return loss, Sums(*sums)


def batch_gradients(
    model: olmo3.Olmo3, batch: data.DeviceBatch, z_weight: float
) -> tuple[olmo3.Olmo3, Sums]:
    """Sums of gradients and losses over all micro-batches of a global batch [A, B, S]."""
    gradient = jax.grad(loss_sums, has_aux=True)
    first = jax.tree.map(lambda x: x[0], batch)
    if batch.tokens.shape[0] == 1:
        return gradient(model, first, z_weight)

    def add(carry: tuple[olmo3.Olmo3, Sums], micro: data.DeviceBatch) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, carry, gradient(model, micro, z_weight)), None

    zero = jnp.zeros((), jnp.float32, out_sharding=P())
    carry = (jax.tree.map(jnp.zeros_like, model), Sums(zero, zero))
    return jax.lax.scan(add, carry, batch)[0]


def divisor(targets: Int32[Array, "A B S"]) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """Number of targets, and what the loss is divided by.

    A row without targets was rejected by the repetition filter; the reference then counts all its S
    positions, which dilutes the loss instead of renormalising it (train_module.py:353, spec T8).
    """
    per_row = jnp.sum(targets >= 0, axis=-1, dtype=jnp.int32)
    counted = jnp.where(per_row == 0, targets.shape[-1], per_row)
    return jnp.sum(per_row), jnp.sum(counted)


def train_step(
    config: RunConfig, state: TrainState, batch: data.DeviceBatch, lr: Float32[Array, ""]
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step; this function, and no other, is what is compiled and run."""
    optim = config.optim
    grads, sums = batch_gradients(state.model, batch, optim.z_loss)
    n_targets, n_counted = divisor(batch.targets)
    scale = 1.0 / n_counted.astype(jnp.float32)
    grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
    ce, z_loss = sums.ce * scale, optim.z_loss * sums.z * scale
    with jax.named_scope("optimizer"):
        grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        clip = jnp.minimum(1.0, optim.clip_norm / (grad_norm + 1e-6))  # train_module.py:611
        grads = jax.tree.map(lambda g: g * clip.astype(g.dtype), grads)
        # A batch without a single target teaches nothing and must not enter the spike window.
        guarded_loss = jnp.where(n_targets > 0, ce, jnp.nan)
        optimizer: Any
        update = cast(Any, make_optimizer(optim).update)
        updates, optimizer = update(
            grads, state.optimizer, state.model, loss=guarded_loss, grad_norm=grad_norm
        )
        updates = jax.tree.map(lambda u: -lr.astype(u.dtype) * u, updates)
        model = optax.apply_updates(cast(Any, state.model), updates)
    count, previous = (optax.tree.get(o.inner, "count") for o in (optimizer, state.optimizer))
    metrics = {
        "loss": ce + z_loss,
        "ce": ce,
        "z_loss": z_loss,
        "grad_norm": grad_norm,
        "step_skipped": (count == previous).astype(jnp.int32),
        "n_nonfinite": optimizer.n_nonfinite,
        "data_hash": data.instance_hash(batch.instances),
    }
    return TrainState(cast(olmo3.Olmo3, model), optimizer, state.step + 1), metrics


def micro_batches(config: RunConfig, n_devices: int) -> int:
    """Accumulation steps: the fewest with at most `sequences_per_device` on a device at a time."""
    if config.batch_instances % n_devices:
        fit = max(n for n in range(1, n_devices) if config.batch_instances % n == 0)
        raise ValueError(
            f"batch_instances={config.batch_instances} does not divide over {n_devices} devices;"
            f" use a multiple of {n_devices}, or --max-devices {fit}"
        )
    per_device = config.batch_instances // n_devices
    most = min(per_device, config.sequences_per_device)
    return per_device // max(n for n in range(1, most + 1) if per_device % n == 0)


def train_mesh(config: RunConfig, devices: list | None = None) -> Mesh:
    """The mesh of a run; raises ValueError where the model or batch does not divide over it."""
    devices = (jax.devices() if devices is None else devices)[: config.max_devices]
    if len(devices) % config.replicas:
        raise ValueError(
            f"replicas={config.replicas} does not divide {len(devices)} devices; use a divisor"
        )
    shards = len(devices) // config.replicas
    for name in ("d_model", "vocab_size"):
        if getattr(config.model, name) % shards:
            raise ValueError(
                f"model.{name}={getattr(config.model, name)} does not divide over {shards} shards;"
                " raise --replicas or lower --max-devices"
            )
    micro_batches(config, len(devices))
    return olmo3.make_mesh(config.replicas, devices=devices)


def abstract_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without its memory."""
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: init_state(config, jax.random.key(0)))
        return checkpoints.on_mesh(shapes, mesh)


def initial_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """Random weights, or those of `config.init` with its Adam moments if it has any.

    As in the reference's stage transitions (spec T18), moments and their counter carry over; step,
    data position and the spike window start afresh.
    """
    if config.init is None:
        return jax.jit(functools.partial(init_state, config))(jax.random.key(config.seed))
    folder, step = checkpoints.find_checkpoint(config.init)
    state = jax.jit(functools.partial(start_state, config))(restore_model(config.init, mesh))
    if not (folder / str(step) / "optimizer").is_dir():
        return state
    want = abstract_state(config, mesh)
    with checkpoints.open_checkpoints(folder) as manager:
        pair = (want.optimizer, want.step)
        optimizer, _ = checkpoints.restore_item(manager, step, "optimizer", pair)
    checkpoints.verify(folder, step, optimizer, ".optimizer")
    return eqx.tree_at(lambda s: s.optimizer.inner, state, optimizer.inner)


# One function for all runs and attempts of a process: a mesh that was in use needs no compilation.
compiled_step = jax.jit(train_step, static_argnums=0, donate_argnums=1)


def loop(run: Any, log: Log, state: TrainState) -> tuple[TrainState, bool]:  # noqa: ANN401 - a Run
    """Trains a prepared run (tools/runs.py) to its last step, or until told to stop.

    Returns the state, and whether it was told.
    """
    config, first = run.config, run.first_step
    wish, pending, run.saved_at = Wish.NOTHING, None, time.monotonic()
    sharding = NamedSharding(run.mesh, P(None, ("data", "fsdp")))
    reader = data.Stream(run.loader, sharding, run.accumulation, first, config.steps)
    with contextlib.closing(reader) as stream:
        for step in range(first, config.steps + 1):
            run.hourglass.turn(f"step {step}")
            run.recovery.step = step
            if pending is None:
                run.recovery.boundary(step, state, run.about)
            run.trace(step - first)
            if step == first:
                run.compile(log, state)  # while the readers make the order and read ahead
            batch, lr = stream.get(step), learning_rate(config.optim, step)
            state, metrics = compiled_step(config, state, batch, jnp.float32(lr))
            if run.watch is not None:
                run.watch.step = step
            overdue = time.monotonic() - run.saved_at > 60 * config.save_every_minutes
            mine = Wish.STOP if run.signals.number else Wish.SAVE if overdue else Wish.NOTHING
            # The row of the step before is written while this one runs.
            wish = run.finish(log, pending, stream.data_seconds) if pending else Wish.NOTHING
            pending = (step, lr, metrics, strongest(run.mesh, mine))
            save_due, eval_due = (
                step == config.steps or step % every == 0
                for every in (config.save_every_steps, config.eval_every_steps)
            )
            due = save_due or eval_due or run.recovery.due(step + 1)
            if not (due or wish or step == first):
                continue
            wish, pending = max(wish, run.finish(log, pending, stream.data_seconds)), None
            if save_due or wish:
                run.save(log, step, state)
            run.hourglass.turn(f"evaluation at step {step}")
            if eval_due and wish < Wish.STOP and not run.evaluate(log, step, state):
                wish = Wish.STOP
                run.save(log, step, state)
            if wish == Wish.STOP:
                break
            run.clock = time.perf_counter()
    run.hourglass.turn(f"saving to {run.store.folder}")
    run.store.check(wait=True)
    run.trace(-1)
    return state, wish == Wish.STOP


def parse(arguments: list[str]) -> RunConfig:
    """Reads `--preset NAME` and then any field of that preset.

    Raises ValueError for an unknown preset, SystemExit(2) from tyro for everything else.
    """
    name, rest = "tiny", []
    words = iter(arguments)
    for word in words:
        if word == "--preset":
            name = next(words, "")
        elif word.startswith("--preset="):
            name = word.removeprefix("--preset=")
        else:
            rest.append(word)
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        raise ValueError(
            f"preset={name}: there are {', '.join(PRESETS)}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    presets = "\n".join(f"  {key:22}{text}" for key, (text, _) in PRESETS.items())
    description = f"{PRESETS[name][0]}\n\nPresets, chosen with --preset NAME:\n{presets}"
    return tyro.cli(RunConfig, default=PRESETS[name][1], args=rest, description=description)


def main(arguments: list[str]) -> int:
    """Returns the exit code that the file's docstring describes.

    One process of many that fails ends at once: the barrier at exit would wait for peers that wait
    for this process.
    """
    watch, code, config = None, 1, PRESETS["tiny"][1]
    try:
        if arguments[:1] == ["--report"]:
            print(*report(Path(*arguments[1:])), sep="\n")
            return 0
        config = parse(arguments)
        processes.set_libtpu_flags(config.machine, LIBTPU_FLAGS)
        if config.machine.aot:
            return importlib.import_module("tools.aot").compile_ahead(config)
        if config.machine.supervise:
            return processes.supervise(processes.Job.of(config, arguments))
        from tools import runs

        pathways = elastic.pathways_module()
        watch = processes.join(config.machine)
        code = runs.start(config, watch, pathways)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except jax.errors.JaxRuntimeError as error:
        traceback.print_exc()
        short = "RESOURCE_EXHAUSTED" in str(error)
        print(f"error: {elastic.out_of_memory(config) if short else error}", file=sys.stderr)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
    if watch is not None and code not in (1, 2):
        watch.close()
    elif watch is not None:
        watch.thread.join(0.6)  # it may know who was the first to end
        os._exit(code)
    return code


if __name__ == "__main__":
    # Under the name by which tools/runs.py knows it.
    code = importlib.import_module("train").main(sys.argv[1:])
    if code == 1:
        sys.stdout.flush()
        os._exit(1)  # threads of Orbax may wait for a save that failed, for twenty minutes
    sys.exit(code)
