"""Compiles the recipes for absent TPUs and prints what the compiler says beside MaxText's programs.

    python benchmarks/aot.py                      every row; about four minutes of two cores each
    python benchmarks/aot.py --only tpu7x v5p     those whose name begins so

Each row is `python train.py --aot ...` in a process of its own. MaxText's figures are of its source
of 2026-08-22 with its own stage-1 recipe, 4 sequences a device on 128 devices, compiled and read
the same way with libtpu 0.0.46 (ours: the libtpu of the environment). Needs the tpu extra.
"""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """A program to compile, or what is known of a peer's."""

    name: str
    flags: str = ""
    step: str = "n/a"
    """Seconds by the compiler's estimates, vector work capped at HBM time."""
    peak: str = "n/a"
    """GiB of HBM a device."""
    matmul: str = "n/a"
    """TFLOP in matmuls outside attention, a device and step; 1354 are needed for stage 1."""
    hidden: str = "n/a"
    """Share of the collectives' bytes behind compute."""
    compiled: str = "n/a"
    """CPU seconds."""


ROWS = (
    Row("tpu7x:4x4x4", "--preset stage1 --aot tpu7x:4x4x4"),
    Row("  MaxText", "", "2.705", "91.9", "1600", "almost none", "485"),
    Row(
        "tpu7x:4x4x4 lean",
        "--preset stage1 --aot tpu7x:4x4x4 --sequences-per-device 4 --model.remat full",
    ),
    Row("tpu7x:4x4x4 wide heads", "--preset stage1-wide-heads --aot tpu7x:4x4x4"),
    Row("  MaxText", "", "2.313", "91.8", "1600", "almost none", "n/a"),
    Row("tpu7x:4x4x4 two slices", "--preset stage1 --aot tpu7x:4x4x4*2 --replicas 2"),
    Row("v5p:4x4x8", "--preset stage1 --aot v5p:4x4x8"),
    Row("v5p:4x4x8 four copies", "--preset stage1 --aot v5p:4x4x8 --replicas 4"),
    Row("  MaxText", "", "5.032", "93.9", "1724", "almost none", "593"),
    Row("v5p:4x4x8 stage 2", "--preset stage2 --aot v5p:4x4x8 --replicas 4"),
    Row("v5p:8x8x8", "--preset stage1 --aot v5p:8x8x8 --replicas 8"),
)


def compile_row(row: Row) -> Row:
    """The row with what `train.py --aot` printed; n/a where it printed nothing of the kind."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [sys.executable, "train.py", *row.flags.split()]
    text = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stdout

    def found(pattern: str) -> str:
        match = re.search(pattern, text)
        return match[1] if match else "n/a"

    return Row(
        row.name,
        row.flags,
        found(r"step +([\d.]+) s"),
        found(r"peak ([\d.]+)"),
        found(r"compiled ([\d.]+) in matmuls"),
        found(r"overlap +([\d.]+ ?%)"),
        found(r"(\d+) CPU s"),
    )


def main() -> None:
    """Prints the table row by row as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names")
    wanted = tuple(parser.parse_args().only)
    line = "{:24} {:>8} {:>10} {:>14} {:>13} {:>10}"
    print(line.format("", "step, s", "peak, GiB", "matmul, TFLOP", "hidden", "CPU s"), flush=True)
    shown = False
    for row in ROWS:
        shown = row.name.startswith(wanted) if row.flags else shown
        if shown:
            row = compile_row(row) if row.flags else row
            values = (row.step, row.peak, row.matmul, row.hidden, row.compiled)
            print(line.format(row.name, *values), flush=True)


if __name__ == "__main__":
    main()
