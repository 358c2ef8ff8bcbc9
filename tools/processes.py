"""Several processes as one job: joining, failing together by name, signals, and restarts.

JAX's own heartbeat only sees processes that die, notices after a minute, and aborts without a name.
Surviving a dead peer inside a process is not dependable, so every process ends when one does, and
whoever started them starts them again: `train.py --supervise`, a JobSet, Slurm.
"""

import faulthandler
import json
import math
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

STOPPED = os.EX_TEMPFAIL  # exit code 75


@dataclass(frozen=True)
class MachineConfig:
    """Where the step runs and what happens when that breaks; none of it changes a number."""

    aot: str = ""
    """Compiles the step for an absent TPU topology, such as tpu7x:4x4x4 or 2 slices,
    tpu7x:4x4x4*2, and reports.
    """
    hlo: Path | None = None
    """Where --aot writes the compiled program."""
    xla_flags: str = ""
    """libtpu flags behind those of LIBTPU_FLAGS, which they override."""
    coordinator: str = ""
    """host:port of process 0; empty asks TPU pod, GKE or Slurm, or runs alone."""
    n_processes: int = 1
    """Processes that share the mesh, with --coordinator."""
    process_id: int = 0
    """Which of them this is."""
    process_timeout: float = 600.0
    """Seconds after which a process that is missing, or steps behind, ends all of them."""
    step_timeout: float = 1800.0
    """Seconds after which a step, save or evaluation counts as hung: prints all stacks, exits 1."""
    supervise: int = 0
    """Runs so many processes on this host, and starts them again when one fails."""
    max_restarts: int = 10
    """Failures in a row without a new checkpoint after which --supervise gives up."""
    elastic: bool = False
    """Survives lost devices inside the process, on Pathways or one host."""
    min_devices: int = 0
    """Waits for so many before it goes on; 0 is as many as at the start."""
    snapshot_every_steps: int = 10
    """Steps between --elastic's copies of the state in host memory."""
    rehearse_loss: tuple[str, ...] = ()
    """STEP:DEVICES words: takes devices away, or gives them back, at the start of these steps."""
    profile: int = 0
    """Steps to trace for xprof, from the third step on."""

    def __post_init__(self) -> None:
        if self.snapshot_every_steps < 1:
            raise ValueError(f"snapshot_every_steps={self.snapshot_every_steps} must be at least 1")


def set_libtpu_flags(machine: MachineConfig, table: dict[str, tuple[str, ...]]) -> None:
    """Puts a generation's flags and the user's behind those in LIBTPU_INIT_ARGS; the last wins.

    Must run before JAX touches a device. The generation is the topology's to compile for, or what
    the TPU host says it is.
    """
    kind = machine.aot or os.environ.get("TPU_ACCELERATOR_TYPE", "")
    flags = table.get(kind.partition(":")[0].partition("-")[0], ())
    words = [os.environ.get("LIBTPU_INIT_ARGS", ""), *flags, machine.xla_flags]
    if any(words[1:]):
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(filter(None, words))
        print(f"libtpu flags: {' '.join(filter(None, words[1:]))}", file=sys.stderr)


def free_port() -> int:
    """A port nobody listens on, whose successor is free as well."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port


class Watch:
    """Ends every process with a message that names the culprit when one is missing, stuck or gone.

    Each process tells process 0 a few times a second which step it has started; in synchronous
    training all of them wait for the slowest, so the one with the smallest step, or the one that
    says nothing any more, is the one that hangs. Process 0 listens on `port`.
    """

    DONE = 2**62

    def __init__(self, host: str, port: int, process: int, n_processes: int, timeout: float):
        self.address, self.process, self.n_processes = (host, port), process, n_processes
        self.timeout, self.step, self.begun = timeout, 0, time.monotonic()
        # What each process said last: its step, since when it is there, and when it said so.
        self.seen: dict[int, tuple[int, float, float]] = {}
        self.gone: set[int] = set()
        self.verdict = ""
        if process == 0:
            watch = self

            class Handler(socketserver.StreamRequestHandler):
                def handle(self) -> None:
                    watch.listen(self)

            server = socketserver.ThreadingTCPServer(("", port), Handler)
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()
        self.thread = threading.Thread(target=self.tell, daemon=True)
        self.thread.start()

    def listen(self, stream: socketserver.StreamRequestHandler) -> None:
        """Hears one process out; a connection that ends before its process is done names it."""
        process = step = -1
        try:
            for line in stream.rfile:
                process, step = (int(word) for word in line.split())
                stream.wfile.write(f"{self.judge(process, step)}\n".encode())
        except OSError:
            pass
        if process >= 0 and step != self.DONE:
            self.gone.add(process)

    def judge(self, process: int, step: int) -> str:
        """Notes where a process is; returns what is wrong with any of them, or nothing.

        The first verdict stands: those who hear it end, and are not the ones to name.
        """
        now = time.monotonic()
        since = self.seen[process][1] if self.seen.get(process, (-1,))[0] == step else now
        self.seen[process] = (step, since, now)
        self.verdict = self.verdict or self.fault(now)
        return self.verdict

    def fault(self, now: float) -> str:
        """What is wrong now."""
        limit, n = self.timeout, self.n_processes
        if self.gone:
            last = max(self.seen[i][0] for i in self.gone)
            return f"process {sorted(self.gone)} of {n} ended in step {last}"
        missing = [i for i in range(n) if i not in self.seen]
        if missing:
            late = now - self.begun > limit
            return f"process {missing} of {n} did not start in {limit:g} s" if late else ""
        if silent := [i for i, (s, _, h) in self.seen.items() if s < self.DONE and now - h > limit]:
            return f"process {silent} of {n} was not heard of for {limit:g} s"
        slowest, fastest = min(self.seen.values())[0], max(self.seen.values())[0]
        limit *= 10 if slowest == 0 else 1  # not yet at a step: compiling takes its time
        stuck = [i for i, (s, t, _) in self.seen.items() if s == slowest and now - t > limit]
        if slowest < fastest and stuck:
            return f"process {stuck} of {n} did not get past step {slowest} in {limit:g} s"
        return ""

    def tell(self) -> None:
        """Reports until the end, and ends the process when told so."""
        try:
            verdict = self.converse()
        except OSError as error:
            verdict = f"process 0 of {self.n_processes} is gone ({error})"
        if verdict:
            print(f"error: {verdict}; see --process-timeout", file=sys.stderr, flush=True)
            if self.process == 0:
                time.sleep(0.6)  # until the others have heard it too
            os._exit(1)  # the main thread may hang in a collective that never ends

    def converse(self) -> str:
        """Talks to process 0; returns what it finds wrong."""
        with self.connect() as connection, connection.makefile("rw") as stream:
            while True:
                step = self.step
                stream.write(f"{self.process} {step}\n")
                stream.flush()
                answer = stream.readline()
                if not answer and step != self.DONE:
                    raise OSError("connection closed")
                if answer.strip() or step == self.DONE:
                    return answer.strip()
                time.sleep(0.2)

    def connect(self) -> socket.socket:
        """Reaches process 0, which may start later than this one."""
        while True:
            try:
                return socket.create_connection(self.address, self.timeout)
            except OSError:
                if time.monotonic() - self.begun > self.timeout:
                    raise
                time.sleep(0.2)

    def close(self) -> None:
        """Says that this process is done; process 0, whose service the others need, leaves last."""
        if self.process != 0:
            jax.distributed.shutdown()
        self.step = self.DONE
        self.thread.join()
        while self.process == 0 and min(self.seen.values())[0] < self.DONE:
            time.sleep(0.1)
        if self.process == 0:
            jax.distributed.shutdown()


def join(machine: MachineConfig) -> Watch | None:
    """Makes this process part of a larger job where there is one; before JAX looks for devices.

    With --coordinator by hand, on localhost or anywhere; on TPU pods, GKE and Slurm JAX finds the
    others itself. An error in one process ends it at once, and Watch ends the others.
    """
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    sizes = [os.environ.get(k, "1") for k in ("MEGASCALE_NUM_SLICES", "SLURM_NTASKS")]
    limit = machine.process_timeout
    if not machine.coordinator and len(hosts) == 1 and all(int(n) == 1 for n in sizes):
        return None
    jax.config.update("jax_enable_recoverability", True)  # no barrier of the living for the dead
    if machine.coordinator:
        host, _, port = machine.coordinator.rpartition(":")
        watch = Watch(host, int(port) + 1, machine.process_id, machine.n_processes, limit)
        jax.distributed.initialize(
            machine.coordinator,
            machine.n_processes,
            machine.process_id,
            initialization_timeout=int(limit) + 60,  # Watch speaks first
        )
        return watch
    try:
        jax.distributed.initialize(initialization_timeout=int(limit))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(f"not all processes started in {limit:g} s ({error})") from error
    if jax.process_count() == 1:
        return None
    ip = socket.inet_aton(socket.gethostbyname(socket.gethostname()))
    mine = np.array([*ip, free_port()], np.int32)
    *ip, port = multihost_utils.broadcast_one_to_all(mine).tolist()
    host = socket.inet_ntoa(bytes(ip))
    return Watch(host, port, jax.process_index(), jax.process_count(), limit)


class Wish:
    """What a process wants to happen after a step; of several the largest counts."""

    NOTHING, SAVE, STOP = 0, 1, 2


def strongest(mesh: Mesh, wish: int) -> Array | np.int32:
    """The largest of all processes' wishes, computed behind the step and not waited for."""
    if jax.process_count() == 1:
        return np.int32(wish)
    sharding = NamedSharding(mesh, P(("data", "fsdp")))
    mine = np.full(1, wish, np.int32)
    return jnp.max(jax.make_array_from_callback((mesh.size,), sharding, lambda _: mine))


class Hourglass:
    """Ends the process with all stacks, its number and what it did, unless turned in time."""

    def __init__(self, seconds: float):
        self.seconds, self.timer = seconds, threading.Timer(0, print)

    def turn(self, doing: str) -> None:
        """Starts the time again."""
        self.close()
        self.timer = threading.Timer(self.seconds, self.end, [doing])
        self.timer.daemon = True
        self.timer.start()
        # Where no Python thread can run any more, C still does.
        faulthandler.dump_traceback_later(self.seconds + 10, exit=True, file=2)

    def end(self, doing: str) -> None:
        """Runs in the thread whose time is up."""
        text = f"process {jax.process_index()} did not finish in {self.seconds:g} s: {doing}"
        print(f"error: {text}; see --step-timeout", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=2)
        os._exit(1)

    def close(self) -> None:
        """Nothing is awaited any more."""
        self.timer.cancel()
        faulthandler.cancel_dump_traceback_later()


class Signals:
    """SIGTERM and SIGINT as a wish to stop: the first is noted, the second ends the process.

    A thread reads what C writes of each signal, as Python's own handlers wait for XLA to return.
    """

    number = 0
    """The first signal, or 0."""
    interruptible = False
    """Whether the first may break off what the main thread does, with KeyboardInterrupt."""

    def __enter__(self) -> "Signals":
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.old = {n: signal.signal(n, self.handle) for n in (signal.SIGTERM, signal.SIGINT)}
        signal.set_wakeup_fd(self.writer)
        threading.Thread(target=self.listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self.writer)

    def handle(self, number: int, _: object) -> None:
        """Runs in the main thread, at some time after `listen` saw the signal or before."""
        self.number = self.number or number
        if self.interruptible:
            raise KeyboardInterrupt

    def listen(self) -> None:
        """Notes signals as they come, until the pipe is closed."""
        n_seen = 0
        while number := int.from_bytes(os.read(self.reader, 1)):
            n_seen += number in self.old
            if n_seen > 1:
                os._exit(128 + number)
            if n_seen:
                self.number = number
                text = f"{signal.Signals(number).name}: saving, then stopping; again stops at once"
                print(text, file=sys.stderr, flush=True)
        os.close(self.reader)


@dataclass(frozen=True)
class Job:
    """Processes on this host that train together, to be started until they are done."""

    command: Sequence[str]
    n_processes: int
    fits: Callable[[int], bool]
    """Whether the global batch and the weights divide over so many processes."""
    run_dir: Path
    max_restarts: int
    """Failures in a row without a new checkpoint after which it is given up."""

    @staticmethod
    def of(config: Any, arguments: Sequence[str]) -> "Job":  # noqa: ANN401 - train.RunConfig
        """The job that a supervising train.py was asked for with these arguments."""
        sizes = (config.batch_instances, config.model.d_model, config.model.vocab_size)
        command = [sys.executable, sys.argv[0], *arguments, "--supervise", "0"]

        def fits(n: int) -> bool:
            return all(size % n == 0 for size in sizes)

        machine = config.machine
        return Job(command, machine.supervise, fits, config.run_dir, machine.max_restarts)

    def start(self, n: int) -> list[subprocess.Popen]:
        """Starts n processes with a coordinator of their own."""
        flags = f"--coordinator 127.0.0.1:{free_port()} --n-processes {n} --process-id".split()
        commands = ([*self.command, *flags, str(i)] for i in range(n))
        return [subprocess.Popen(command, start_new_session=True) for command in commands]

    def newest(self) -> int:
        """The newest checkpoint's step, -1 before there is one."""
        names = (path.name for path in (self.run_dir / "checkpoints").glob("*"))
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def note(self, row: dict) -> None:
        """Adds a row to the metrics, where a killed process may have left half a one."""
        path = self.run_dir / "metrics.jsonl"
        if path.is_file():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        with path.open("a") as file:
            file.write(json.dumps(row | {"time": round(time.time(), 3)}) + "\n")


def wait_for(jobs: Sequence[subprocess.Popen], signals: Signals) -> list[int]:
    """Passes a signal on to all processes, and returns their exit codes.

    Those still there 20 seconds after the first failure are ended, with -SIGTERM or their own code.
    """
    told, deadline = False, math.inf
    while any(job.poll() is None for job in jobs):
        time.sleep(0.05)
        if signals.number and not told:
            told = True
            for job in jobs:
                job.send_signal(signals.number)
        if deadline == math.inf and any(job.returncode not in (None, 0, STOPPED) for job in jobs):
            deadline = time.monotonic() + 20
        if time.monotonic() > deadline:
            for job in jobs:
                job.send_signal(signal.SIGTERM)  # the second at the latest ends it at once
            time.sleep(1)
    return [job.returncode for job in jobs]


def supervise(job: Job) -> int:
    """Runs a job and starts it again until it is done; returns its exit code.

    Processes that were killed count as lost machines: the next start does without them, on the most
    processes that fit; the start after that has them back. Exit code 2, the user's error, is not
    tried again. Pauses between starts double from one second to a minute while no checkpoint is
    written.
    """
    n, n_restarts, in_vain, newest = job.n_processes, 0, 0, job.newest()
    with Signals() as signals:
        while True:
            began = time.monotonic()
            codes = wait_for(job.start(n), signals)
            worst = 2 if 2 in codes else max(codes, key=abs)
            if worst in (0, 2) or signals.number:
                return worst if worst in (0, 2, STOPPED) else 1
            in_vain = 0 if job.newest() > newest else in_vain + 1
            newest, n_restarts = job.newest(), n_restarts + 1
            if in_vain >= job.max_restarts:
                print(f"error: failed {in_vain} times without a new checkpoint", file=sys.stderr)
                return 1
            alive = max(1, job.n_processes - codes.count(-signal.SIGKILL))
            n = next(k for k in range(alive, 0, -1) if job.fits(k))
            row = {"event": "restart", "n_restarts": n_restarts, "exit_codes": codes}
            if job.run_dir.is_dir():
                job.note(row | {"n_processes": n, "ran_seconds": time.monotonic() - began})
            text = f"restart {n_restarts} on {n} of {job.n_processes} processes after {codes}"
            print(text, file=sys.stderr, flush=True)
            time.sleep(min(60.0, 2.0**in_vain))
