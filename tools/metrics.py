"""metrics.jsonl, the truth about a run: written row by row, and read as an account of its time."""

import atexit
import importlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax

COLUMNS = ("start", "compile", "productive", "data", "save", "eval", "lost")


class Mirrors:
    """Copies rows of metrics.jsonl to Weights & Biases or TensorBoard; never ends or delays a run.

    A mirror that fails says so once and is dropped: the file stays the truth. The run directory
    keeps the W&B run id, so a resumed run goes on in the same place.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, config: dict):
        self.sinks: dict[str, Callable[[int, dict], Any]] = {}
        for name in names:
            self._attempt(name, lambda name=name: self._open(name, run_dir, config))

    def _attempt(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # whatever a tracker does wrong, training goes on
            self.sinks.pop(name, None)
            print(f"warning: mirror {name} dropped: {error!r}", file=sys.stderr)

    def _open(self, name: str, run_dir: Path, config: dict) -> None:
        if name == "tensorboard":
            import tensorboardX

            writer = tensorboardX.SummaryWriter(str(run_dir / "tensorboard"), flush_secs=5)
            atexit.register(writer.close)
            self.sinks[name] = lambda step, row: [
                writer.add_scalar(key, value, step) for key, value in row.items()
            ]
        elif name == "wandb":
            wandb = importlib.import_module("wandb")  # an extra
            id_file = run_dir / "wandb_run_id"
            if not id_file.exists():
                id_file.write_text(secrets.token_hex(4))
            run = wandb.init(
                id=id_file.read_text(),
                resume="allow",
                dir=run_dir,
                config=config,
                name=run_dir.name,
            )
            self.sinks[name] = lambda step, row: run.log(row, step=step)
        else:
            raise ValueError(f"there is no mirror {name!r}; there are wandb and tensorboard")

    def write(self, row: dict[str, Any]) -> None:
        """Sends the numbers of a row, those of evaluations as eval/LABEL/NAME."""
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        for label, values in row.get("eval", {}).items():
            numbers |= {f"eval/{label}/{k}": v for k, v in values.items() if not isinstance(v, str)}
        for name, sink in list(self.sinks.items()):
            if numbers:
                self._attempt(name, lambda sink=sink: sink(row["step"], numbers))


class Log:
    """Rows, appended and flushed one by one, and one line of progress on the terminal."""

    def __init__(self, folder: Path, mirrors: tuple[str, ...] = (), config: dict | None = None):
        self.first = jax.process_index() == 0  # the others compute the same and write nothing
        self.mirrors = Mirrors(mirrors if self.first else (), folder, config or {})
        path = folder / "metrics.jsonl" if self.first else Path(os.devnull)
        if path.is_file():  # a killed process may leave half a row
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.file: TextIO = path.open("a")
        self.live = sys.stderr.isatty()
        self.last_shown = 0.0

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row | {"time": round(time.time(), 3)}) + "\n")
        self.file.flush()
        if "loss" in row or "eval" in row:
            self.mirrors.write(row)

    def say(self, text: str) -> None:
        if self.first:
            print(f"\r\x1b[K{text}" if self.live else text, file=sys.stderr, flush=True)

    def progress(self, row: dict[str, Any], steps: int) -> None:
        """Shows the newest step: rewritten in place on a terminal, every ten seconds elsewhere."""
        last = row["step"] == steps
        if not self.first or not (self.live or last or time.monotonic() - self.last_shown > 10):
            return
        self.last_shown = time.monotonic()
        minutes, seconds = divmod(int((steps - row["step"]) * row["step_seconds"]), 60)
        mfu = row["mfu"] if isinstance(row["mfu"], str) else f"{row['mfu']:.1%}"
        text = (
            f"step {row['step']}/{steps}  loss {row['loss']:.4f}  grad {row['grad_norm']:.3f}"
            f"  lr {row['lr']:.2e}  {row['tokens_per_second']:,.0f} tok/s  mfu {mfu}"
            f"  eta {minutes}:{seconds:02d}" + ("  SKIPPED" if row["step_skipped"] else "")
        )
        if self.live:
            print(f"\r\x1b[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def account(rows: list[dict], kept: int | float) -> tuple[str, dict[str, float]]:
    """Which steps a start took, and its seconds by column; steps from `kept` on were done again."""
    seconds: dict[str, float] = dict.fromkeys(COLUMNS, 0.0)
    seconds["start"] = rows[0]["start_seconds"]
    for row in rows:
        if "step_seconds" in row:
            seconds["productive" if row["step"] < kept else "lost"] += row["step_seconds"]
            seconds["data"] += row["data_seconds"]
        elif "seconds" in row:
            seconds[row.get("event", "eval")] += row["seconds"]
    steps = [row["step"] for row in rows if "step_seconds" in row]
    return f"{steps[0]}-{steps[-1]}" if steps else "none", seconds


def report(folder: Path) -> Iterator[str]:
    """Where the seconds of a run went, a line for each time it was started.

    Productive are steps that counted in the end, lost those that a later start did again; data is
    the part of both that was waited for. Down is what no row covers, such as the time between two
    starts.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"report={folder}: no metrics.jsonl there; give the run_dir of a run"
        )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    starts: list[list[dict]] = []
    for row in rows:
        if row.get("event") == "start":
            starts.append([])
        if starts:
            starts[-1].append(row)
    kept, table = math.inf, []
    for part in reversed(starts):
        table.insert(0, account(part, kept))
        kept = min(kept, part[0]["step"])
    yield f"{'steps':>15}" + "".join(f"{name:>12}" for name in COLUMNS)
    for name, seconds in table:
        yield f"{name:>15}" + "".join(f"{seconds[k]:12.1f}" for k in COLUMNS)
    for row in rows:
        if row.get("event") == "recovery":
            yield (
                f"in-process recovery at step {row['step']} from {row['from']}, on"
                f" {row['n_devices']} devices: {row['steps_lost']} steps lost,"
                f" {row['recovery_seconds']:.1f} s to the next step ({row['cause']})"
            )
    if table:
        total = {k: sum(seconds[k] for _, seconds in table) for k in COLUMNS}
        wall = starts[-1][-1]["time"] - starts[0][0]["time"] + starts[0][0]["start_seconds"]
        down = wall - sum(total.values()) + total["data"]
        n_recovered = sum(row.get("event") == "recovery" for row in rows)
        yield (
            f"goodput {total['productive'] / wall:.1%} of {wall:.1f} s,"
            f" {len(starts) - 1 - n_recovered} restarts, {total['lost']:.1f} s of steps lost,"
            f" {down:.1f} s down"
        )
