"""Recovery inside a process: devices are lost or come back, or a spike is to be left behind.

An attempt at the run ends with an error; `Recovery.after` decides whether there is another, on the
devices that are alive, from the newest snapshot in host memory or checkpoint, whichever is newer.
Needs one process that sees all devices: one host, or Pathways, whose elastic manager then finds out
which slices are alive. Jobs of several processes restart instead (tools/processes.py).
"""

import functools
import importlib
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import olmo3
from tools import checkpoints
from tools.processes import MachineConfig

# What in the text of a JaxRuntimeError decides whether it may be a lost device; the first that
# occurs counts. Those that are come from pathwaysutils.elastic and from peers that close a socket.
IS_LOSS = {
    "RESOURCE_EXHAUSTED": False,  # memory is as short the next time
    "INVALID_ARGUMENT": False,
    "UNIMPLEMENTED": False,
    "DATA_LOSS": True,
    "DEADLINE_EXCEEDED": True,
    "NOT_FOUND": True,
    "UNAVAILABLE": True,
    "ABORTED": True,
    "INTERNAL": True,
}


def is_device_loss(error: BaseException) -> bool:
    """Whether an error is the runtime's word for a lost device; never true of Python's own."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return False
    return next((lost for word, lost in IS_LOSS.items() if word in str(error)), False)


def out_of_memory(config: Any) -> str:  # noqa: ANN401 - train.RunConfig
    """What the state of a run takes, and what may help."""
    n = min(len(jax.devices()), config.max_devices or len(jax.devices())) // config.replicas
    gib = 16 * olmo3.n_parameters(config.model) / n / 2**30
    return (
        f"out of memory: weights, gradients and moments alone are {gib:.2f} GiB a device; lower"
        f" --sequences-per-device (now {config.sequences_per_device}), choose --model.remat full"
        f" (now {config.model.remat}), or use more devices"
    )


class ScaleUp(RuntimeError):
    """Devices have come back: the attempt ends at a step's start, its state kept as a snapshot."""


@dataclass(frozen=True)
class Snapshot:
    """The state after a step, in host memory, and what a checkpoint would say about it."""

    step: int
    state: Any
    about: dict


class Snapshots:
    """Copies the state to host memory in the background; only what is complete is offered."""

    def __init__(self) -> None:
        self.newest: Snapshot | None = None
        self.thread = threading.Thread()
        self.error: Exception | None = None

    def take(self, step: int, state: Any, about: dict) -> None:  # noqa: ANN401 - train.TrainState
        """Starts a copy, unless one is under way; the devices hold it twice until it is done."""
        if not self.thread.is_alive():
            copy = jax.tree.map(jnp.copy, state)
            arguments = (step, copy, checkpoints.leaf_sums(copy), about)
            self.thread = threading.Thread(target=self.fetch, args=arguments, daemon=True)
            self.thread.start()

    def fetch(self, step: int, copy: Any, sums: list, about: dict) -> None:  # noqa: ANN401
        """Fetches a copy and offers it if its bits are those on the devices."""
        try:
            host = jax.tree.map(np.array, copy)
            got = [checkpoints.host_sum(x) for x in jax.tree.leaves(host)]
            if got == [int(x) for x in sums]:
                self.newest = Snapshot(step, host, about)
        except Exception as error:  # a device went while it was read: the older one stays
            self.error = error

    def wait(self) -> None:
        """Returns when no copy is under way."""
        if self.thread.is_alive():
            self.thread.join()


class Devices:
    """The devices of this process, some of which a rehearsal takes away and gives back.

    `rehearsed` are words STEP:COUNT, at the start of which step only so many remain or are back.
    """

    def __init__(self, rehearsed: tuple[str, ...] = ()):
        self.n_alive = self.n_used = len(jax.devices())
        try:
            self.planned = [(int(a), int(b)) for a, b in (word.split(":") for word in rehearsed)]
        except ValueError:
            text = f"rehearse_loss={' '.join(rehearsed)}: give STEP:DEVICES, such as 12:2 30:8"
            raise ValueError(text) from None
        if any(not 1 <= n <= self.n_alive for _, n in self.planned):
            raise ValueError(f"rehearse_loss={' '.join(rehearsed)}: there are {self.n_alive}")

    def alive(self) -> list:
        """What an attempt may use."""
        self.n_used = self.n_alive
        return jax.devices()[: self.n_alive]

    def due(self, step: int) -> bool:
        """Whether a loss or return is planned for a step, or there is more than is used."""
        return bool(self.planned and step >= self.planned[0][0]) or self.n_alive > self.n_used

    def more(self, step: int, state: Any) -> bool:  # noqa: ANN401 - train.TrainState
        """Does what is planned for a step; whether there are more devices than are used.

        Lost devices take the state with them.
        """
        while self.planned and step >= self.planned[0][0]:
            before, self.n_alive = self.n_alive, self.planned.pop(0)[1]
            if self.n_alive < before:
                for leaf in jax.tree.leaves(state):
                    leaf.delete()
                lost = f"DATA_LOSS: rehearsed loss of {before - self.n_alive} devices"
                raise jax.errors.JaxRuntimeError(lost)
        return self.n_alive > self.n_used

    def pause(self) -> None:
        """Waits for devices; in a rehearsal the next ones planned are back then."""
        time.sleep(1.0)
        if self.planned:
            self.n_alive = self.planned.pop(0)[1]


class Slices:
    """The devices of the slices that Pathways' elastic manager finds alive; it does the waiting."""

    def __init__(self, manager: Any):  # noqa: ANN401 - pathwaysutils is an extra
        self.manager = manager

    def alive(self) -> list:
        slices = self.manager.slice_to_devices
        return [d for i in sorted(self.manager.active_slice_indices) for d in slices[i]]

    def due(self, step: int) -> bool:
        return bool(self.manager.available_inactive_slices)

    def more(self, step: int, state: Any) -> bool:  # noqa: ANN401
        return bool(self.manager.available_inactive_slices)

    def pause(self) -> None:
        time.sleep(1.0)


def pathways_module() -> Any:  # noqa: ANN401 - pathwaysutils is an extra
    """pathwaysutils.elastic.manager where devices are reached through Pathways' proxy, else None.

    To be called before JAX looks for devices. initialize() also reads ENABLE_PATHWAYS_PERSISTENCE,
    with which Orbax reads and writes arrays on the workers.
    """
    if "proxy" not in os.environ.get("JAX_PLATFORMS", ""):
        return None
    try:
        pathwaysutils = importlib.import_module("pathwaysutils")
        manager = importlib.import_module("pathwaysutils.elastic.manager")
    except ImportError as error:
        text = "JAX_PLATFORMS=proxy needs pathwaysutils: pip install -e '.[pathways]'"
        raise ValueError(text) from error
    pathwaysutils.initialize()
    return manager


class Recovery:
    """What outlives an attempt: snapshots, what to leave out, and the account of what was lost."""

    def __init__(self, machine: MachineConfig, pathways: Any = None):  # noqa: ANN401
        if machine.rehearse_loss and not machine.elastic:
            raise ValueError("rehearse_loss: needs --elastic")
        if machine.elastic and jax.process_count() > 1:
            raise ValueError(
                f"elastic=True with {jax.process_count()} processes: needs one that sees all"
                " devices, on one host or Pathways; use --supervise, a JobSet or Slurm to restart"
            )
        self.elastic, self.every_steps = machine.elastic, machine.snapshot_every_steps
        self.pathways, self.scale_up = pathways, ScaleUp
        self.devices: Devices | Slices = Devices(machine.rehearse_loss)
        if self.elastic and pathways is not None:
            self.devices, self.scale_up = Slices(pathways.Manager()), pathways.ScaleUpSignalError
        self.min_devices = machine.min_devices or len(self.devices.alive())
        self.snapshots = Snapshots()
        self.rollback: checkpoints.Rollback | None = None
        self.cause, self.step, self.n_at_first = "", 0, 0
        self.lost_step, self.lost_at = 0, 0.0
        self.in_vain = self.best = 0
        self.meshes: set[tuple] = set()

    def due(self, step: int) -> bool:
        """Whether `boundary` has something to do at the start of a step."""
        return self.elastic and ((step - 1) % self.every_steps == 0 or self.devices.due(step))

    def boundary(self, step: int, state: Any, about: Callable[[int], dict]) -> None:  # noqa: ANN401
        """Called at the start of a step with the state it starts from and what describes that.

        Raises what ends the attempt: a rehearsed loss, or that there are more devices than in use.
        """
        if not self.due(step):
            return
        more = self.devices.more(step, state)
        if more:
            self.snapshots.wait()
        self.snapshots.take(step - 1, state, about(step - 1))
        if more:
            self.snapshots.wait()
            raise self.scale_up(f"there are more devices than {len(self.mesh_ids)}")

    def begin(self) -> list:
        """The devices for an attempt, once there are enough of them."""
        while len(found := self.devices.alive()) < self.min_devices:
            self.devices.pause()
        return found

    def use(self, mesh: Mesh) -> None:
        """Notes what an attempt runs on, to know whether it must compile."""
        self.mesh_ids = tuple(device.id for device in mesh.devices.flat)
        self.new_mesh = self.mesh_ids not in self.meshes
        self.meshes.add(self.mesh_ids)
        self.n_at_first = self.n_at_first or mesh.size

    def after(self, error: Exception) -> bool:
        """Whether there is recovery from what ended an attempt, and no end to it in sight.

        Three attempts in a row that got no further than those before are enough.
        """
        if isinstance(error, checkpoints.Rollback):
            self.rollback, self.snapshots.newest = error, None
        elif not self.elastic or not (isinstance(error, self.scale_up) or is_device_loss(error)):
            return False
        traceback.clear_frames(error.__traceback__)  # they hold arrays of the dead attempt
        self.snapshots.wait()
        self.in_vain = 0 if self.step > self.best else self.in_vain + 1
        self.best, self.lost_at = max(self.best, self.step), time.perf_counter()
        self.lost_step = self.step
        self.cause = str(error).partition("\n")[0]
        return self.in_vain < 3

    def account(self, first_step: int, source: str) -> dict | None:
        """A row about the recovery whose first step is done; None if that is no recovery."""
        if not self.cause:
            return None
        row = {"event": "recovery", "step": first_step, "cause": self.cause, "from": source}
        self.cause = ""
        return row | {
            "steps_lost": max(self.lost_step - first_step, 0),
            "recovery_seconds": time.perf_counter() - self.lost_at,
            "n_devices": len(self.mesh_ids),
            "recompiled": self.new_mesh,
        }

    def drive(self, attempt: Callable[[], int]) -> int:
        """Attempts a run until it ends by itself, or with an error there is no recovery from."""
        while True:
            try:
                return attempt()
            except Exception as error:
                if not self.after(error):
                    raise
                if isinstance(self.devices, Slices) and self.rollback is None:
                    raise  # to Pathways' manager, which waits for slices and tries again

    def run(self, attempt: Callable[[], int]) -> int:
        """The same; on Pathways, which slices are alive and when to try is its manager's to say.

        There a run on fewer slices uses those that come back at the start of the step after.
        """
        if not isinstance(self.devices, Slices):
            return self.drive(attempt)
        manager = self.devices.manager
        per_slice = len(next(iter(manager.slice_to_devices.values())))
        retry = manager.elastic_retry(
            minimum_slice_count=math.ceil(self.min_devices / per_slice),
            retry_policy=lambda *_: self.in_vain < 3,
        )
        return retry(functools.partial(self.drive, attempt))()
