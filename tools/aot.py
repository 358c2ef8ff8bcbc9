"""Reads what a TPU will do from a compiled program's HLO text: work, traffic, overlap, time.

`train.py --aot` compiles the very step that it would train with, and prints, with this.

The compiler leaves its own cycle estimate on every instruction except Pallas kernels and
collectives. Pallas kernels are priced from a table of milliseconds per call (benchmarks/splash.py
measures them from VLIW bundles), collectives by replaying the schedule: one at a time at an assumed
bandwidth, a wait costs what is still missing when it comes. Estimates of vector instructions are 2
to 20 times too high, so each is capped at the time its bytes take through HBM. The sum ranks two
programs to a few per cent; it is not a measurement: stalls, power and the host are not in it.
"""

import collections
import functools
import math
import os
import re
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import olmo3
import train
from tools import runs

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4}
BYTES |= {"s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")


@dataclass(frozen=True)
class Chip:
    """What the estimate needs to know about one JAX device."""

    clock: float
    """TensorCore cycles per second."""
    peak: float
    """Dense bfloat16 FLOP/s."""
    hbm_bandwidth: float
    """Bytes per second."""
    hbm: float
    """Bytes a program may use."""
    network: float
    """Bytes per second a device can take in, all links together; an assumption."""
    splash: dict[tuple[str, int], int]
    """Cycles of the splash kernels per tile of 1024 x 1024 scores, by kernel and head dimension;
    what benchmarks/splash.py measures.
    """


CHIPS = {  # clock of tpu7x inferred from its published peak; bandwidths from the data sheets
    "TPU7x": Chip(
        clock=2.2e9,
        peak=1153.5e12,
        hbm_bandwidth=3690e9,
        hbm=94.75 * 2**30,
        network=500e9,
        splash={("fwd", 128): 3567, ("dkv", 128): 5712, ("fwd", 256): 4481, ("dkv", 256): 6019},
    ),
    "TPU v5": Chip(
        clock=1.75e9,
        peak=459e12,
        hbm_bandwidth=2460e9,
        hbm=95.74 * 2**30,
        network=540e9,
        splash={("fwd", 128): 2428, ("dkv", 128): 4702},
    ),
}


def tiles(length: int, window: int | None) -> int:
    """Tiles of 1024 x 1024 scores that hold a visible pair: what splash computes."""
    size = math.gcd(length, 1024)
    reach = length if window is None else min(window, length)
    count = sum(
        j <= i and (i - j) * size - (size - 1) < reach
        for i in range(length // size)
        for j in range(length // size)
    )
    return max(1, count * size * size // 2**20)


@dataclass
class Instruction:
    """One line of HLO."""

    name: str
    type: str
    opcode: str
    rest: str
    """Operands and attributes."""
    operands: list[str] = field(default_factory=list)

    def attribute(self, key: str) -> str | None:
        found = re.search(rf"\b{key}=\{{?%?([\w.\-]+)", self.rest)
        return found[1] if found else None

    @functools.cached_property
    def cycles(self) -> int:
        found = re.search(r'"estimated_cycles":"?(\d+)', self.rest)
        n = int(found[1]) if found else 0
        return n if n < 2**62 else 0  # the compiler's mark for "unknown"

    @property
    def source(self) -> str:
        """Path of JAX names that this came from."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


def n_bytes(text: str, hbm_only: bool = False) -> int:
    """Bytes of every array in a type; S(1) is on-chip memory."""
    return sum(
        BYTES.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims, layout in ARRAY.findall(text)
        if not (hbm_only and "S(1)" in layout)
    )


def dimensions(text: str) -> list[int]:
    """Shape of the first array in a type."""
    found = ARRAY.search(text)
    return [int(d) for d in found[2].split(",") if d] if found else []


def split_type(text: str) -> tuple[str, str]:
    """Cuts "TYPE opcode(...)" after the type, which may be a tuple."""
    if not text.startswith("("):
        kind, _, rest = text.partition(" ")
        return kind, rest
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text[: i + 1], text[i + 2 :]
    raise ValueError(f"unbalanced type in HLO: {text[:80]}")


def closing(text: str) -> int:
    """Index of the parenthesis that closes the first one."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and c == ")":
            return i
    return len(text)


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Computations by name, each an ordered dict of instructions, and the entry's name."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        opened = re.match(r"^(ENTRY )?%?([\w.\-]+)\s*(\(.*)?\{\s*$", line)
        if current is None and opened and not line.startswith("HloModule"):
            current = computations[opened[2]] = {}
            entry = opened[2] if opened[1] else entry
            continue
        if line == "}" or line.startswith("}, execution_thread"):  # kernel metadata has braces too
            current = None
            continue
        found = re.match(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", line)
        if current is None or not found:
            continue
        type_, call = split_type(found[2])
        opcode, rest = call.split("(", 1)
        rest = "(" + rest
        operands = re.findall(r"%([\w.\-]+)", rest[: closing(rest)])
        current[found[1]] = Instruction(found[1], type_, opcode, rest, operands)
    return computations, entry


@dataclass
class Transfer:
    """One collective, as often as its loop runs it."""

    kind: str
    dtype: str
    n_bytes: int
    calls: int
    asynchronous: bool
    source: str
    issued: float = 0.0
    ready: float = 0.0
    exposed: float = 0.0
    window: float = 0.0

    @property
    def hidden(self) -> bool:
        """Whether there was enough compute between issue and wait."""
        return self.asynchronous and self.exposed <= 0.02 * max(self.ready - self.issued, 1e-12)


class Program:
    """A compiled program, walked in the order the device runs it."""

    def __init__(self, text: str, chip: Chip, n_tiles: float, d_head: int):
        self.computations, self.entry = parse(text)
        self.chip = chip
        self.kernels = {
            name: cycles * n_tiles / chip.clock
            for (name, head), cycles in chip.splash.items()
            if head == max(d_head, 128)
        }
        self.now = 0.0
        self.network_free = 0.0
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.flops: collections.Counter[str] = collections.Counter()
        self.rows: list[tuple[float, float, int, str, str, str]] = []
        self.transfers: list[Transfer] = []
        self.kinds: dict[str, str] = {}
        self.walk(self.entry, 1)

    def kind(self, computation: str) -> str:
        """A collective's opcode, or what a fused computation spends its time on."""
        if computation not in self.kinds:
            self.kinds[computation] = "vector"
            for x in self.computations.get(computation, {}).values():
                inner = x.attribute("calls") or x.attribute("to_apply")
                kind = self.kind(inner) if inner and x.opcode in ("fusion", "call") else "vector"
                if x.opcode.removesuffix("-start") in COLLECTIVES:
                    kind = x.opcode.removesuffix("-start")
                elif x.opcode in ("convolution", "dot"):
                    kind = "matmul"
                if kind != "vector" and self.kinds[computation] not in COLLECTIVES:
                    self.kinds[computation] = kind
        return self.kinds[computation]

    def matmul_flops(self, computation: str) -> int:
        """2 x multiply-adds of every dot in a computation; the TPU backend writes dots as
        convolutions whose contraction is the right operand's input-feature and spatial axes.
        """
        total = 0
        here = self.computations.get(computation, {})
        for x in here.values():
            if x.opcode == "fusion":
                total += self.matmul_flops(x.attribute("calls") or "")
            if x.opcode != "convolution":
                continue
            left, right = (dimensions(here[o].type) for o in x.operands[:2])
            labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.rest)
            assert labels is not None, x.rest
            size = re.search(r"window=\{[^}]*size=([\dx]+)", x.rest)
            window = [int(n) for n in size[1].split("x")] if size else []
            pad = re.search(r"pad=([\dx_\-]+)", x.rest)
            out = dimensions(x.type)
            flops = 2 * math.prod(out) * right[labels[2].index("i")]
            for d, n in enumerate(window):  # a spatial axis either contracts or is an outer product
                span_left, span_out = left[labels[1].index(str(d))], out[labels[3].index(str(d))]
                flops *= min(n, span_left) if not (pad and span_out > span_left) else 1
            total += flops
        return total

    def hbm_bytes(self, here: dict[str, Instruction], x: Instruction) -> int:
        """Bytes an instruction moves to and from HBM; a sliced operand counts as its slice."""
        result = n_bytes(x.type, hbm_only=True)
        inner = self.computations.get(x.attribute("calls") or "", {})
        inputs = 0
        parameters = {
            int(p.rest[1 : closing(p.rest)]): p for p in inner.values() if p.opcode == "parameter"
        }
        for i, name in enumerate(x.operands):
            size = n_bytes(here[name].type, hbm_only=True) if name in here else 0
            users = (
                [u for u in inner.values() if parameters[i].name in u.operands]
                if i in parameters
                else []
            )
            if size and users and all(u.opcode in ("dynamic-slice", "slice") for u in users):
                size = sum(n_bytes(u.type) for u in users)
            elif size and users and all(u.opcode == "dynamic-update-slice" for u in users):
                for u in users:  # written in place: only the update moves
                    result += n_bytes(inner[u.operands[1]].type) - n_bytes(u.type)
                size = 0
            inputs += size
        return inputs + max(result, 0)

    def spend(self, label: str, seconds: float, calls: int, x: Instruction, flops: int = 0) -> None:
        self.seconds[label] += seconds * calls
        self.flops[label] += flops * calls
        shape = re.sub(r"\{[^}]*\}", "", x.type)
        self.rows.append((seconds * calls, flops * calls, calls, label, shape, x.source))
        self.now += seconds

    def compute(self, here: dict[str, Instruction], x: Instruction, calls: int) -> None:
        """Prices one instruction that is no collective."""
        if x.opcode == "custom-call" and "tpu_custom_call" in x.rest:
            seconds = sum(v for k, v in self.kernels.items() if k in x.name)
            return self.spend("attention kernels", seconds, calls, x)
        if not x.cycles:
            return None
        estimate = x.cycles / self.chip.clock
        callee = x.attribute("calls") if x.opcode == "fusion" else None
        if (callee and self.kind(callee) == "matmul") or x.opcode in ("convolution", "dot"):
            return self.spend("matmul", estimate, calls, x, self.matmul_flops(callee or ""))
        moved = self.hbm_bytes(here, x) / self.chip.hbm_bandwidth
        return self.spend("vector", min(estimate, moved) if moved else estimate, calls, x)

    def collective(self, here: dict[str, Instruction], x: Instruction) -> tuple[str, str, int]:
        """Opcode, dtype and bytes that one device takes in or gives away."""
        opcode = x.opcode.removesuffix("-start")
        if opcode == "fusion":  # an all-reduce of which each device keeps its part
            whole = sum(n_bytes(here[o].type) for o in x.operands if o in here)
            return "reduce-scatter", ARRAY.findall(x.type)[0][0], whole
        inner = self.computations.get(x.attribute("to_apply") or x.attribute("calls") or "", {})
        for y in [] if opcode in COLLECTIVES else inner.values():
            if y.opcode.removesuffix("-start") in COLLECTIVES:
                return self.collective(inner, y)
        sizes = [n_bytes(here[o].type) for o in x.operands if o in here]
        full = max(n_bytes(x.type) - (sum(sizes) if "-start" in x.opcode else 0), sum(sizes))
        dtype = ARRAY.search(x.type)
        return opcode, dtype[1] if dtype else "?", full

    def issue(self, transfer: Transfer) -> None:
        """Starts a transfer behind those under way; all-reduce moves everything twice."""
        transfer.issued = self.now
        passes = 2 if transfer.kind == "all-reduce" else 1
        start = max(self.now, self.network_free)
        transfer.ready = start + passes * transfer.n_bytes / self.chip.network
        self.network_free = transfer.ready

    def wait(self, transfer: Transfer) -> None:
        """The device stands still until the transfer is there."""
        transfer.window = self.now - transfer.issued
        transfer.exposed = max(0.0, transfer.ready - self.now)
        self.seconds["exposed collectives"] += transfer.exposed * transfer.calls
        self.now += transfer.exposed

    def turns(self, loop: Instruction) -> int:
        """How often a loop runs: JAX's scans count from 0 to a constant in their condition."""
        condition = self.computations[loop.attribute("condition") or ""].values()
        limits = [
            int(x.rest[1 : closing(x.rest)])
            for x in condition
            if x.opcode == "constant" and x.type.startswith("s32[]")
        ]
        return max(limits, default=1)

    def walk(self, computation: str, calls: int) -> None:
        """Runs one computation; a loop's body is run once and counted as often as it turns."""
        here, pending = self.computations[computation], {}
        for x in here.values():
            base = re.sub(r"-(start|update|done)$", "", x.opcode)
            callee = x.attribute("to_apply") or x.attribute("calls")
            inner = self.kind(callee) if callee else ""
            if x.opcode in FREE:
                continue
            if x.opcode == "while":
                n, before = self.turns(x), self.now
                self.walk(x.attribute("body") or "", calls * n)
                self.now += (self.now - before) * (n - 1)
                self.network_free = max(self.network_free, self.now)
            elif x.opcode == "conditional":
                branches = re.search(r"branch_computations=\{([^}]*)\}", x.rest)
                names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
                cost = {n: sum(y.cycles for y in self.computations[n].values()) for n in names}
                if cost:
                    self.walk(max(cost, key=cost.__getitem__), calls)
            elif x.opcode == "call" and callee:
                self.walk(callee, calls)
            elif base in COLLECTIVES or (base in ("call", "fusion") and inner in COLLECTIVES):
                if x.opcode.endswith(("-done", "-update")):
                    pending[x.name] = transfer = pending[x.operands[0]]
                    if x.opcode.endswith("-update"):
                        self.issue(transfer)
                    else:
                        self.wait(transfer)
                    continue
                kind, dtype, size = self.collective(here, x)
                asynchronous = x.opcode.endswith("-start")
                transfer = Transfer(kind, dtype, size, calls, asynchronous, x.source)
                self.transfers.append(transfer)
                pending[x.name] = transfer
                self.issue(transfer)
                if not asynchronous:
                    self.wait(transfer)
            elif x.opcode.endswith(("-done", "-update")) and x.operands[0] in pending:
                pending[x.name] = transfer = pending[x.operands[0]]
                if x.opcode.endswith("-done"):
                    self.wait(transfer)
                else:
                    self.issue(transfer)
            else:
                self.compute(here, x, calls)

    @property
    def step_seconds(self) -> float:
        """The whole step by this reading."""
        return sum(self.seconds.values())

    def hidden_share(self) -> float:
        """Share of the collectives' bytes with enough compute between issue and wait."""
        total = sum(t.n_bytes * t.calls for t in self.transfers)
        return sum(t.n_bytes * t.calls for t in self.transfers if t.hidden) / max(total, 1)

    def traffic(self) -> dict[tuple[str, str, bool], tuple[int, int]]:
        """Calls and bytes per device by opcode, dtype and whether asynchronous."""
        table: collections.defaultdict[tuple, tuple[int, int]] = collections.defaultdict(
            lambda: (0, 0)
        )
        for t in self.transfers:
            key = (t.kind, t.dtype, t.asynchronous)
            table[key] = (table[key][0] + t.calls, table[key][1] + t.calls * t.n_bytes)
        return dict(table)

    def top(self, n: int) -> list[tuple[float, float, int, str, str, str]]:
        """The costliest instructions, those of one shape and origin together."""
        merged: dict = {}
        for seconds, flops, calls, label, shape, source in self.rows:
            tail = "/".join(source.split("/")[-2:])
            key = (label, shape, tail, "transpose" in source)
            old = merged.get(key, (0.0, 0.0, 0))
            merged[key] = (old[0] + seconds, old[1] + flops, old[2] + calls)
        rows = [(*v, k[0], k[1], k[2] + (" (backward)" if k[3] else "")) for k, v in merged.items()]
        return sorted(rows, reverse=True)[:n]


@dataclass(frozen=True)
class Step:
    """What the caller knows about the step it wants compiled."""

    mesh: Mesh
    rows: int
    """Sequences of one device, over all micro-batches."""
    micro_batches: int
    length: int
    model: Any
    """The ModelConfig."""
    flops: float
    """Model FLOPs of one device."""


def absent_devices(name: str) -> list:
    """Devices of a TPU topology that only the compiler knows; NAME*2 is two slices of it."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU host to ask
    name, _, count = name.partition("*")
    slices = {"num_slices": int(count)} if count else {}
    try:
        return list(topologies.get_topology_desc(name, platform="tpu", **slices).devices)
    except Exception as error:  # the plugin raises whatever its C++ does
        raise ValueError(
            f"aot={name}: {str(error).splitlines()[0]}; give NAME:XxYxZ such as tpu7x:4x4x4 or"
            ' v5p:2x2x1*2 (two slices), and install the compiler with pip install -e ".[tpu]"'
        ) from None


def compile_and_report(lowered: Any, step: Step, text_file: Path | None) -> int:  # noqa: ANN401
    """Compiles, prints the table, and returns 1 where the program does not fit."""
    clock, cpu = time.perf_counter(), time.process_time()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            f"does not fit: {str(error).splitlines()[0]}\nuse a leaner --model.remat than"
            f" {step.model.remat} (light, medium, full), fewer --sequences-per-device than"
            f" {step.rows // step.micro_batches}, or more devices"
        )
        return 1
    seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
    text = compiled.as_text() or ""
    if text_file is not None:
        text_file.write_text(text)
    for line in head(compiled.memory_analysis(), step, seconds, cpu_seconds):
        print(line)
    for line in estimate(text, step):
        print(line)
    return 0


def head(memory: Any, step: Step, seconds: float, cpu_seconds: float) -> Iterator[str]:  # noqa: ANN401
    """What is compiled, whether it fits, and what compiling took."""
    kind, gib = step.mesh.devices.flat[0].device_kind, 2**30
    capacity = f" of {CHIPS[kind].hbm / gib:.2f}: fits" if kind in CHIPS else ""
    yield (
        f"devices     {step.mesh.size} x {kind}, mesh {dict(step.mesh.shape)}; {step.rows}"
        f" sequences of {step.length} each in {step.micro_batches} micro-batches, remat"
        f" {step.model.remat}"
    )
    yield (
        f"HBM, GiB    state {memory.argument_size_in_bytes / gib:.2f}, temporary"
        f" {memory.temp_size_in_bytes / gib:.2f}, peak {memory.peak_memory_in_bytes / gib:.2f}"
        + capacity
    )
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    yield f"compiled    in {seconds:.0f} s, {cpu_seconds:.0f} CPU s, {host:.1f} GiB of host memory"


def estimate(text: str, step: Step) -> Iterator[str]:
    """What the program computes and moves, and how long that takes by this file's reading."""
    kind = step.mesh.devices.flat[0].device_kind
    if kind not in CHIPS:
        yield f"step        n/a: nothing is known here of {kind}"
        return
    chip = CHIPS[kind]
    calls = [tiles(step.length, window) for window in step.model.windows]
    n_tiles = sum(calls) / len(calls) * step.model.n_heads * step.rows / step.micro_batches
    program = Program(text, chip, n_tiles, step.model.d_head)
    seconds, parts = program.step_seconds, sorted(program.seconds.items(), key=lambda x: -x[1])
    yield (
        f"work        model {step.flops / 1e12:.1f} TFLOP a device; compiled"
        f" {program.flops['matmul'] / 1e12:.1f} in matmuls outside attention"
    )
    yield f"step        {seconds:.3f} s: " + ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in parts)
    yield (
        f"MFU         {step.flops / seconds / chip.peak:.1%} of {chip.peak / 1e12:.0f} TFLOP/s"
        " by the compiler's estimates; stalls are not in them"
    )
    for (opcode, dtype, asynchronous), (n, size) in sorted(program.traffic().items()):
        how = "asynchronous" if asynchronous else "synchronous"
        yield f"{opcode:11} {size / 1e9:.3f} GB of {dtype} a device in {n} {how} calls"
    yield f"overlap     {program.hidden_share():.1%} of these bytes behind compute"
    for seconds, flops, n, label, shape, source in program.top(12):
        yield (
            f"  {seconds * 1e3:7.1f} ms {flops / 1e12:7.1f} TFLOP {n:4d} x {label:9}"
            f" {shape[:48]:48} {source[-60:]}"
        )


def compile_ahead(config: train.RunConfig) -> int:
    """Compiles the step for a TPU topology that is not here and reports; 1 if it does not fit.

    Needs the `tpu` extra, which brings the compiler.
    """
    mesh = train.train_mesh(config, absent_devices(config.machine.aot))
    lr = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    state, batch = train.abstract_state(config, mesh), runs.abstract_batch(config, mesh)
    with jax.set_mesh(mesh):
        lowered = train.compiled_step.lower(config, state, batch, lr)
    length, rows = config.data.sequence_length, config.batch_instances // mesh.size
    facts = Step(
        mesh=mesh,
        rows=rows,
        micro_batches=train.micro_batches(config, mesh.size),
        length=length,
        model=config.model,
        flops=rows * length * olmo3.flops_per_token(config.model, length),
    )
    return compile_and_report(lowered, facts, config.machine.hlo)
