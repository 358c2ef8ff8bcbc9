"""Kills a run with SIGKILL at random moments until it is through, and compares it with a whole one.

    python benchmarks/soak.py --kills 20

Every start is killed after a random part of the time that the whole run took, so kills fall into
imports, compilation, steps, saves and evaluations alike. Prints one JSON line: kills and where they
fell, steps done twice, and whether losses, data hashes, parameters and optimizer are bit-equal.
"""

import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from tools import checkpoints

FLAGS = [
    *("--preset", "tiny", "--model.d-model", "32", "--model.n-layers", "4"),
    *("--model.n-heads", "2", "--model.n-kv-heads", "2", "--model.d-head", "16"),
    *("--model.d-ff", "64", "--model.windows", "8", "8", "8", "None"),
    *("--data.sequence-length", "32", "--eval-documents", "60", "--sample-tokens", "0"),
    *("--save-every-steps", "10", "--eval-every-steps", "50"),
]


@dataclass(frozen=True)
class Soak:
    """How long it goes on."""

    kills: int = 20
    """Starts that are killed before the last one may finish."""
    steps: int = 200
    """Optimizer steps for each kill; a start is killed at the latest after so many rows."""
    seed: int = 0
    """Of the delays."""


def start(run_dir: Path, steps: int, cache: Path) -> subprocess.Popen:
    """Training on one CPU device."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, str(root / "train.py"), *FLAGS]
    return subprocess.Popen(
        [*command, "--run-dir", str(run_dir), "--steps", str(steps)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache)},
        stderr=subprocess.DEVNULL,
    )


def rows(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl, without half a one at the end."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def moment(run_dir: Path, n_before: int) -> str:
    """What a process was about to do when it was killed, by the last row it wrote."""
    new = rows(run_dir)[n_before:]
    if [*run_dir.glob("checkpoints/*.orbax-checkpoint-tmp")]:
        return "save"
    if not new:
        return "before the start"
    return {"start": "compile", "end": "exit"}.get(new[-1].get("event", ""), "step or evaluation")


def sums(run_dir: Path, step: int) -> dict:
    """Loss and data hash of every step, its evaluations, and the state's bits as it was saved."""
    steps = {row["step"]: (row["loss"], row["data_hash"]) for row in rows(run_dir) if "loss" in row}
    evals = {row["step"]: row["eval"] for row in rows(run_dir) if "eval" in row}
    saved = checkpoints.saved_config(run_dir / "checkpoints", step)["checksums"]
    return {"steps": steps, "evals": evals, "state": saved}


def main(soak: tyro.conf.OmitArgPrefixes[Soak]) -> int:
    """Returns 0 if nothing was lost or changed."""
    rng, moments = random.Random(soak.seed), collections.Counter()
    steps = soak.steps * soak.kills
    with tempfile.TemporaryDirectory() as name:
        whole, broken, cache = (Path(name) / part for part in ("whole", "broken", "cache"))
        assert start(whole, steps, cache).wait() == 0
        began = time.monotonic()
        assert start(Path(name) / "short", soak.steps, cache).wait() == 0
        once = time.monotonic() - began
        while moments.total() < soak.kills:
            n_before, process = len(rows(broken)), start(broken, steps, cache)
            deadline = time.monotonic() + once * rng.uniform(0.2, 1.0)
            while time.monotonic() < deadline and len(rows(broken)) < n_before + soak.steps:
                time.sleep(0.01)
            if process.poll() is not None:
                raise RuntimeError(f"ended with {process.poll()} before all kills; raise --steps")
            process.kill()
            process.wait()
            moments[moment(broken, n_before)] += 1
        code = start(broken, steps, cache).wait()
        n_rows = sum("loss" in row for row in rows(broken))
        a, b = sums(whole, steps), sums(broken, steps) if code == 0 else {}
        equal = {key: a[key] == b.get(key) for key in a}
        report = {"kills": dict(moments), "steps": steps, "steps_done_twice": n_rows - steps}
        print(json.dumps({**report, "exit_code": code, "bit_equal": equal}))
        return 0 if all(equal.values()) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
