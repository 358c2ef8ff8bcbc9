"""A run around the recipe's loop: where it starts, what it records and saves, how it ends.

train.py has the loop itself; metrics.jsonl, checkpoints and recovery have files beside this one.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

import data
import eval as evaluation
import olmo3
import train
from tools import checkpoints, elastic, processes, scoring
from tools.metrics import Log


def config_json(config: train.RunConfig) -> dict:
    """The configuration as JSON holds it: paths are strings, tuples are lists."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def remaining_mesh(config: train.RunConfig, devices: list, n_at_first: int) -> Mesh:
    """The mesh on the most of the remaining devices that the batch divides over.

    Whole copies of the state go first; when less than one is left, its shards grow.
    """
    shards = n_at_first // config.replicas
    for n in range(len(devices), 0, -1):
        with contextlib.suppress(ValueError):
            fewer = dataclasses.replace(config, replicas=max(1, n // shards))
            return train.train_mesh(fewer, devices[:n])
    raise ValueError(f"batch_instances={config.batch_instances} does not divide over any devices")


def abstract_batch(config: train.RunConfig, mesh: Mesh) -> data.DeviceBatch:
    """Shapes, dtypes and shardings of a global batch."""
    accumulation = train.micro_batches(config, mesh.size)
    rows = (accumulation, config.batch_instances // accumulation)
    sharding = NamedSharding(mesh, P(None, ("data", "fsdp")))

    def array(shape: tuple[int, ...], dtype: Any) -> Any:  # noqa: ANN401 - shapes pose as arrays
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    tokens = array((*rows, config.data.sequence_length), jnp.int32)
    segments = tokens if config.data.packed else None
    return data.DeviceBatch(tokens, tokens, segments, array(rows, jnp.uint32))


class Run:
    """A prepared run: everything the user could have got wrong has been checked."""

    def __init__(
        self,
        config: train.RunConfig,
        watch: processes.Watch | None = None,
        signals: processes.Signals | None = None,
        recovery: elastic.Recovery | None = None,
    ):
        self.config, self.watch, self.signals = config, watch, signals or processes.Signals()
        self.begun = self.clock = time.perf_counter()
        self.tracing, self.n_skipped = False, 0
        self.hourglass = processes.Hourglass(config.machine.step_timeout)
        self.recovery = recovery or elastic.Recovery(config.machine)
        devices = self.recovery.begin()
        if self.recovery.cause:
            self.mesh = remaining_mesh(config, devices, self.recovery.n_at_first)
        else:
            self.mesh = train.train_mesh(config, devices)
        self.recovery.use(self.mesh)
        self.accumulation = train.micro_batches(config, self.mesh.size)
        self.dataset = data.open_dataset(config.data)
        self.heldout = self.prepare_heldout()
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self.store = checkpoints.Store(config.run_dir / "checkpoints", config)
        self.choose()
        if config.resume == "none" and self.first_step > 1:
            raise ValueError(
                f"resume=none, but {config.run_dir} has a checkpoint at step"
                f" {self.first_step - 1}; use a new --run-dir or remove the old one"
            )
        if config.init is not None:
            saved = checkpoints.saved_config(*checkpoints.find_checkpoint(config.init))
            checkpoints.check_same_weights(saved, config_json(config))
        self.peak_flops = train.PEAK_FLOPS.get(self.mesh.devices.flat[0].device_kind)
        length = config.data.sequence_length
        self.batch_tokens = config.batch_instances * length
        self.step_flops = self.batch_tokens * olmo3.flops_per_token(config.model, length)

    def choose(self) -> None:
        """Puts the run behind the newest checkpoint or snapshot that can be used, or at its start.

        After a spike that is one before it, and the batches up to its end are left out.
        """
        config, snapshot, back = self.config, self.recovery.snapshots.newest, self.recovery.rollback
        if back is not None:
            late = [step for step in self.store.manager.all_steps() if step > back.good]
            self.store.unusable |= dict.fromkeys(late, back)
        step, about = self.store.newest()
        self.source = "checkpoint" if step else "the start"
        if snapshot is not None and snapshot.step >= step:
            step, about, self.source = snapshot.step, snapshot.about, "snapshot"
        self.first_step, self.changes, cursor, self.tokens_before = step + 1, [], None, 0
        if about and "cursor" not in about:
            text = f"{self.store.folder}: checkpoint {step} was converted without its place in the"
            raise ValueError(f"{text} data; use another --run-dir and start from it with --init")
        if about:
            self.tokens_before = about["tokens_seen"]
            self.changes = checkpoints.check_same_run(about, config_json(config))
            cursor = data.Cursor(**about["cursor"])
        loader = functools.partial(data.Loader, self.dataset, config.data, config.batch_instances)
        self.loader = loader(cursor, config.allow_data_change)
        if config.epochs is not None:
            at, n = self.loader.start, self.loader.batches_per_epoch
            left = (config.epochs - at.epoch + 1) * n - at.batches
            self.config = dataclasses.replace(config, steps=at.step + max(left, 0))
        if back is not None:
            cursor = self.loader.cursor(step)
            batches = cursor.batches + back.bad - step
            self.loader = loader(dataclasses.replace(cursor, batches=batches))

    def recover(self, log: Log) -> train.TrainState:
        """The state to start from: of the newest snapshot or checkpoint that can be loaded, if any.

        Only then are checkpoints that cannot be used put aside.
        """
        state, want = None, train.abstract_state(self.config, self.mesh)
        if self.source == "snapshot":
            host = cast(elastic.Snapshot, self.recovery.snapshots.newest).state
            return jax.tree.map(lambda x, w: jax.device_put(x.copy(), w.sharding), host, want)
        while state is None and self.first_step > 1:
            state = self.store.load(want, self.first_step - 1)
            if state is None:
                self.choose()
        for step, why, path in self.store.put_aside():
            log.write({"event": "put aside", "step": step, "error": why})
            log.say(
                f"warning: checkpoint {step} cannot be used ({why:.300}); going on from"
                f" {self.first_step - 1}; it is kept as {path}"
            )
        self.recovery.rollback = None
        return train.initial_state(self.config, self.mesh) if state is None else state

    def prepare_heldout(self) -> evaluation.HeldOut | None:
        """The documents that evaluations measure, or None where there are none to be had."""
        config = self.config
        if config.heldout:
            source = dataclasses.replace(config.data, source=config.heldout)
            paths = data.list_files(source, "heldout")
        elif config.data.source == "stdlib":
            paths = data.list_files(config.data, "heldout")
        else:
            return None
        local = [path for path in self.dataset.paths if Path(path).exists()]
        for path in evaluation.shared_files(local, paths):
            print(f"warning: {path} is in the training data: not held out", file=sys.stderr)
        rows = evaluation.prepare_heldout({"heldout": paths}, config.data)
        return rows.first(config.eval_documents)

    def tokens_seen(self, step: int) -> int:
        """Tokens of all batches up to a step, also where the batch size changed on the way."""
        return self.tokens_before + (step - self.first_step + 1) * self.batch_tokens

    def about(self, step: int) -> dict:
        """What a checkpoint says of itself: configuration and place in the data."""
        cursor = dataclasses.asdict(self.loader.cursor(step))
        return config_json(self.config) | {"cursor": cursor, "tokens_seen": self.tokens_seen(step)}

    def record(
        self, log: Log, step: int, lr: float, metrics: dict[str, Array], times: dict
    ) -> None:
        """Writes the row of a step, shows it, and ends the attempt if the step gives reason to."""
        config, value = self.config, {k: v.item() for k, v in metrics.items() if v.ndim == 0}
        data_hash = data.format_hash(metrics["data_hash"])
        expected = data.format_hash(data.instance_hash(self.loader.instance_ids(step)))
        flops = self.step_flops / times["step_seconds"] / self.mesh.size
        row = {
            "step": step,
            **{k: value[k] for k in ("loss", "ce", "z_loss", "grad_norm")},
            "lr": lr,
            "step_skipped": value["step_skipped"],
            "tokens_seen": self.tokens_seen(step),
            "tokens_per_second": self.batch_tokens / times["step_seconds"],
            "mfu": flops / self.peak_flops if self.peak_flops else "n/a",
            "data_hash": data_hash,
            **times,
        }
        log.write(row)
        log.progress(row, config.steps)
        if data_hash != expected:
            raise RuntimeError(
                f"data_hash={data_hash} at step {step}, but the order says {expected}: the devices"
                " got other instances than this step's; the loader is at fault"
            )
        self.n_skipped = self.n_skipped + 1 if row["step_skipped"] else 0
        if 0 < config.rollback_on_spike <= self.n_skipped:
            raise checkpoints.Rollback(step - self.n_skipped, step)
        if value["n_nonfinite"] >= config.max_nonfinite_steps:
            raise RuntimeError(
                f"loss or gradient norm not finite for {value['n_nonfinite']} steps up to step"
                f" {step} (data_hash={data_hash}); no update was taken in them: go on from the last"
                " checkpoint with a lower --optim.lr, or look at the batch with data.py"
            )

    def evaluate(self, log: Log, step: int, state: train.TrainState) -> bool:
        """Measures the held-out loss and records it; False where a signal broke it off.

        Processes together finish it: they must all run the same programs.
        """
        if self.heldout is None:
            return True
        began = time.perf_counter()
        try:
            self.signals.interruptible = jax.process_count() == 1
            if self.signals.interruptible and self.signals.number:
                return False
            losses = evaluation.evaluate_loss(state.model, self.heldout)
        except KeyboardInterrupt:
            return False
        finally:
            self.signals.interruptible = False
        log.write({"step": step, "eval": losses, "seconds": time.perf_counter() - began})
        pooled = losses["pooled"]
        log.say(
            f"step {step}: held-out loss {pooled['ce']:.4f} ± {pooled['ce_se']:.4f} nats/token over"
            f" {pooled['n_tokens']:,} tokens"
        )
        return True

    def evaluation_missing(self) -> bool:
        """Whether the run ended between the newest checkpoint and the evaluation due there."""
        step, path = self.first_step - 1, self.config.run_dir / "metrics.jsonl"
        due = step and (step % self.config.eval_every_steps == 0 or step == self.config.steps)
        if not due or self.heldout is None or not path.exists():
            return False
        with path.open() as rows:
            return not any(row.startswith(f'{{"step": {step}, "eval"') for row in rows)

    def compile(self, log: Log, state: train.TrainState) -> None:
        """Compiles the step, which the first call of `train.compiled_step` then finds."""
        began = time.perf_counter()
        batch = abstract_batch(self.config, self.mesh)
        train.compiled_step.lower(self.config, state, batch, jnp.float32(0)).compile()
        self.clock = time.perf_counter()
        seconds = self.clock - began
        log.write({"event": "compile", "step": self.first_step, "seconds": seconds})

    def save(self, log: Log, step: int, state: train.TrainState) -> None:
        """Starts to save a step, unless it is saved; waits for the save before to be complete."""
        began = time.perf_counter()
        self.hourglass.turn(f"saving step {step} to {self.store.folder}")
        if self.store.save(state, step, self.about(step)):
            self.saved_at = time.monotonic()
            log.write({"event": "save", "step": step, "seconds": time.perf_counter() - began})

    def finish(self, log: Log, done: tuple[int, float, dict, Array | np.int32], wait: float) -> int:
        """Waits for a step and writes its row; returns what the processes wished behind it."""
        step, lr, metrics, wish = done
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        times = {"step_seconds": now - self.clock, "data_seconds": wait}
        self.clock = now
        self.record(log, step, lr, metrics, times)
        if row := self.recovery.account(self.first_step, self.source):
            log.write(row)
        self.store.check()
        return int(wish)

    def trace(self, done: int) -> None:
        """Starts the profile behind the second step of this process and stops it in time."""
        first, last = 2, 2 + self.config.machine.profile
        if first < last and done == first:
            jax.profiler.start_trace(self.config.run_dir / "profile")
            self.tracing = True
        elif self.tracing and (done == last or done < 0):
            jax.profiler.stop_trace()
            self.tracing = False

    def train(self) -> int:
        """Runs to the end, or to a signal; returns the exit code.

        A second call has nothing to do and says so.
        """
        config = self.config
        log = Log(config.run_dir, config.mirrors, config_json(config))
        with log, self.store.manager, jax.set_mesh(self.mesh), contextlib.closing(self.hourglass):
            missing, last = self.evaluation_missing(), self.first_step - 1
            if last >= config.steps and not missing:
                log.say(f"already at step {last} of {config.steps}, nothing to do")
                return 0
            self.hourglass.turn(f"starting behind step {last}")
            state = self.recover(log)
            last, about = self.first_step - 1, self.about(self.first_step - 1)
            if log.first:
                checkpoints.write_json(config.run_dir / "config.json", about)
            log.write(
                {"event": "start", "step": self.first_step, "changes": self.changes}
                | {
                    "start_seconds": time.perf_counter() - self.begun,
                    "leftovers": self.store.n_leftovers,
                }
                | {"cursor": about["cursor"], "n_devices": self.mesh.size, "from": self.source}
            )
            for line in self.describe():
                log.say(line)
            if missing and not self.evaluate(log, last, state):
                stopped = True
            else:
                self.clock = time.perf_counter()
                state, stopped = train.loop(self, log, state)
            log.write({"event": "end", "signal": self.signals.number if stopped else 0})
            if stopped:
                log.say("saved and stopped; the same command goes on")
                return processes.STOPPED
            if config.sample_tokens:
                text = scoring.sample_bytes(state.model, "def ", config.sample_tokens)
                log.say(f"sample of the trained model:\n{text}")
            return 0

    def describe(self) -> Iterator[str]:
        """What is about to run, and what differs from the run it continues."""
        config = self.config
        per_device = config.batch_instances // self.mesh.size // self.accumulation
        yield (
            f"{config.run_dir}: {olmo3.n_parameters(config.model):,} parameters,"
            f" {self.dataset.n_instances:,} instances of {config.data.sequence_length} tokens,"
            f" {self.loader.batches_per_epoch:,} batches an epoch"
        )
        yield (
            f"mesh {dict(self.mesh.shape)}, batch {config.batch_instances} = {self.accumulation}"
            f" x {self.mesh.size} devices x {per_device}; step {self.first_step} to {config.steps}"
        )
        if repeats := self.loader.repeats(config.steps):
            lacking = repeats * config.batch_instances
            yield f"{repeats:,} steps will repeat data: an epoch lacks {lacking:,} instances"
        if self.store.n_leftovers:
            yield f"removed what {self.store.n_leftovers} unfinished saves had left"
        yield from (f"changed since the checkpoint: {change}" for change in self.changes)
        if self.recovery.cause:
            yield f"recovered from {self.source}: {self.recovery.cause}"
        elif self.first_step == 1:
            yield f"compiling; first step from {config.init or f'seed {config.seed}'}"


def start(config: train.RunConfig, watch: processes.Watch | None, pathways: Any = None) -> int:  # noqa: ANN401
    """Runs what is left of a run, with all the recovery there is inside a process.

    Returns the exit code.
    """
    recovery = elastic.Recovery(config.machine, pathways)

    def attempt() -> int:
        run = Run(config, watch, signals, recovery)
        try:
            return run.train()
        except Exception as error:
            if isinstance(error, (RuntimeError, recovery.scale_up)):
                raise
            traceback.print_exc()  # not one of ours: where it rose is of interest
            raise RuntimeError(str(error)) from error  # and no longer the user's fault

    with processes.Signals() as signals:
        return recovery.run(attempt)
