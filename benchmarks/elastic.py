"""Loses devices and gets them back, many times in one process, against a run without losses.

    python benchmarks/elastic.py --losses 100
    python benchmarks/elastic.py --figure       throughput after 8 -> 2 devices, on a larger model

Prints one JSON line. Losses happen at random steps and leave 1 to 7 of eight fake CPU devices; at a
later random step all are back. Losses are compared to an unbroken run on eight devices; beside that
stands how far an unbroken run on four is from it. The figure gives tokens/s of the same two cores
before and after: what work costs with three quarters of the devices gone, apart from their share.
"""

import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import tyro

import train

SMALL = [
    *("--preset", "tiny", "--model.d-model", "32", "--model.n-layers", "4"),
    *("--model.n-heads", "2", "--model.n-kv-heads", "2", "--model.d-head", "16"),
    *("--model.d-ff", "64", "--model.windows", "8", "8", "8", "None"),
    *("--data.sequence-length", "32", "--eval-documents", "8", "--sample-tokens", "0"),
    *("--model.compute-dtype", "float32", "--sequences-per-device", "2"),
    *("--optim.lr", "2e-4"),  # at tiny's rate rounding grows to 0.1 within 60 steps on any mesh
    *("--eval-every-steps", "100000", "--save-every-steps", "100000"),
]
LARGE = [
    *("--preset", "tiny", "--model.d-model", "512", "--model.n-layers", "4"),
    *("--model.n-heads", "8", "--model.n-kv-heads", "8", "--model.d-head", "64"),
    *("--model.d-ff", "1408", "--data.sequence-length", "256", "--batch-instances", "16"),
    *("--sequences-per-device", "2", "--eval-documents", "8", "--sample-tokens", "0"),
    *("--eval-every-steps", "100000", "--save-every-steps", "100000"),
]


@dataclass(frozen=True)
class Drill:
    """How long it goes on."""

    losses: int = 100
    """Losses, each followed by the return of all devices."""
    every_steps: int = 5
    """Steps between snapshots."""
    seed: int = 0
    """Of the steps and counts."""
    figure: bool = False
    """Measures throughput after 8 -> 2 devices instead."""


def rows(run_dir: Path) -> list[dict]:
    """All rows of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def drill(config: Drill, folder: Path) -> dict:
    """Many losses in one run, against a run without any."""
    rng, plan, step = random.Random(config.seed), [], 3
    for _ in range(config.losses):
        plan.append(f"{step}:{rng.randint(1, 7)}")
        step += rng.randint(1, 9)
        plan.append(f"{step}:8")
        step += rng.randint(1, 9)
    flags = [*SMALL, "--steps", str(step), "--run-dir"]
    assert train.main([*flags, str(folder / "whole")]) == 0
    assert train.main([*flags, str(folder / "on four"), "--max-devices", "4"]) == 0
    more = ["--elastic", "--min-devices", "1", "--snapshot-every-steps", str(config.every_steps)]
    code = train.main([*flags, str(folder / "broken"), *more, "--rehearse-loss", *plan])
    want, got, four = (
        {row["step"]: row for row in rows(folder / name) if "loss" in row}
        for name in ("whole", "broken", "on four")
    )
    recoveries = [row for row in rows(folder / "broken") if row.get("event") == "recovery"]
    losses = [row for row in recoveries if row["cause"].startswith("DATA_LOSS")]
    known = [row["recovery_seconds"] for row in losses if not row["recompiled"]]
    return {
        "exit_code": code,
        "steps": step,
        "losses": len(losses),
        "returns": len(recoveries) - len(losses),
        "most_steps_lost": max(row["steps_lost"] for row in losses),
        "mean_steps_lost": statistics.mean(row["steps_lost"] for row in losses),
        "median_seconds_to_next_step": statistics.median(known) if known else "n/a",
        "recompilations": sum(row["recompiled"] for row in recoveries),
        "controller_restarts": 0 if code == 0 else "n/a",
        "largest_loss_difference": max(abs(got[k]["loss"] - want[k]["loss"]) for k in want),
        "the_same_on_four_devices": max(abs(four[k]["loss"] - want[k]["loss"]) for k in want),
        "data_hashes_equal": all(got[k]["data_hash"] == want[k]["data_hash"] for k in want),
    }


def figure(folder: Path) -> dict:
    """Tokens per second of the machine on 8 devices, and on 2 after the others are lost."""
    flags = [*LARGE, "--steps", "28", "--run-dir", str(folder / "run")]
    more = ["--elastic", "--min-devices", "1", "--snapshot-every-steps", "7"]
    assert train.main([*flags, *more, "--rehearse-loss", "15:2"]) == 0
    seen = [row for row in rows(folder / "run") if "loss" in row or "n_devices" in row]
    n_devices, speeds = 0, {8: [], 2: []}
    for row in seen:
        n_devices = row.get("n_devices", n_devices)
        if "loss" in row:
            speeds[n_devices].append(row["tokens_per_second"])
    before, after = (statistics.median(speeds[n][2:]) for n in (8, 2))  # behind compilation
    return {"tokens_per_second_on_8": before, "on_2": after, "per_core_kept": after / before}


def main(config: tyro.conf.OmitArgPrefixes[Drill]) -> None:
    """Prints one JSON line."""
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(figure(Path(name)) if config.figure else drill(config, Path(name))))


if __name__ == "__main__":
    tyro.cli(main)
