"""Runs side by side: curves, each surface of evaluation against its noise floor, a page to show."""

import csv
import html
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from jaxtyping import Float64, Int64

POOLED = "held-out loss, pooled"
"""The surface that shows whether a run learns what it was not trained on."""


class Curves(NamedTuple):
    """What a run, or somebody else's curve, recorded."""

    name: str
    steps: dict[int, dict[str, Any]]
    """Rows of training by step."""
    evals: dict[int, dict[str, tuple[float, float]]]
    """By step, the value of every evaluation surface and its standard error."""
    config: dict[str, Any]
    """Settings by dotted name."""


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:  # noqa: ANN401 - JSON
    """The leaves of nested dictionaries by dotted name."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return out


def read_run(folder: Path) -> Curves:
    """Reads metrics.jsonl, and evals.jsonl where `--record` added to it, of a run directory.

    A run that restarted at step k has gone through the steps from k on twice; the last time counts.
    """
    if not (folder / "metrics.jsonl").is_file():
        raise FileNotFoundError(f"{folder}: no metrics.jsonl there; give the run_dir of a run")
    steps, evals = {}, {}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    if (folder / "evals.jsonl").exists():
        lines += (folder / "evals.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        if row.get("event") == "start":
            steps = {k: v for k, v in steps.items() if k < row["step"]}
            evals = {k: v for k, v in evals.items() if k < row["step"]}
        elif "eval" in row:
            only_label = len(row["eval"]) == 2 and "pooled" in row["eval"]
            for name, values in row["eval"].items():
                if only_label and name != "pooled":
                    continue  # says what pooled says
                key = values.get("primary", "ce")
                surface = name if "primary" in values else f"held-out loss, {name}"
                value = (values[key], values.get(f"{key}_se", 0.0))
                evals.setdefault(row["step"], {})[surface] = value
        elif "ce" in row:
            steps[row["step"]] = row
    config = folder / "config.json"
    settings = flatten(json.loads(config.read_text())) if config.exists() else {}
    return Curves(folder.name, steps, evals, settings)


def read_reference(path: Path) -> Curves:
    """Reads a curve exported from a Weights & Biases panel as CSV: a step column, then the series.

    AI2's runs are public: on the run's page choose the panel train/CE loss, its menu, Export CSV.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [n for n in (rows[0] if rows else {}) if not n.endswith(("__MIN", "__MAX"))]
    step = next((n for n in names if "step" in n.lower()), None)
    series = next((n for n in names if n != step and "loss" in n.lower()), None)
    if step is None or series is None:
        raise ValueError(
            f"reference={path} needs a column with `step` and one with `loss`: {names}"
        )
    points = {int(float(r[step])): {"ce": float(r[series])} for r in rows if r[step] and r[series]}
    return Curves(path.stem, points, {}, {})


def smooth(x: Float64[np.ndarray, " n"], width: int) -> Float64[np.ndarray, " n"]:
    """Means over windows of `width` neighbours; the ends repeat the outermost whole window."""
    means = np.convolve(x, np.full(width, 1 / width), "valid")
    return np.pad(means, ((width - 1) // 2, width // 2), "edge")


class Difference(NamedTuple):
    """Training loss of a run less that of the baseline at the steps that both have."""

    steps: Int64[np.ndarray, " n"]
    raw: Float64[np.ndarray, " n"]
    smoothed: Float64[np.ndarray, " n"]
    noise: float
    """Four standard errors of a smoothed point, from the scatter between neighbouring steps."""


def compare_losses(run: Curves, baseline: Curves) -> Difference | None:
    """The difference of two training losses, smoothed over a twentieth of the common steps."""
    steps = np.array(sorted(run.steps.keys() & baseline.steps.keys()), np.int64)
    if len(steps) < 2:
        return None
    raw = np.array([run.steps[s]["ce"] - baseline.steps[s]["ce"] for s in steps.tolist()])
    width = min(max(len(steps) // 20, 10), len(steps))
    noise = 4 * np.diff(raw).std() / math.sqrt(2 * width)  # a drift leaves the scatter alone
    return Difference(steps, raw, smooth(raw, width), float(noise))


def is_repeat(run: Curves, baseline: Curves) -> bool:
    """Whether a run is the baseline with another seed, and thus shows how far chance goes."""
    keys = run.config.keys() | baseline.config.keys()
    differ = {key for key in keys if run.config.get(key) != baseline.config.get(key)}
    return run is not baseline and "seed" in differ and differ <= {"seed", "run_dir"}


def judge(
    run: Curves, baseline: Curves, repeats: Sequence[Curves] = ()
) -> Iterator[tuple[str, str, str, str, str]]:
    """Per surface: its name, the run's difference, the largest, the noise floor, and a verdict.

    The noise floor is at least what `repeats` of the baseline with other seeds differ from it by.
    """

    def verdict(difference: float, noise: float) -> str:
        return "agrees" if abs(difference) <= noise else "lower" if difference < 0 else "higher"

    loss, last, floor = compare_losses(run, baseline), 0.0, math.inf
    if loss is not None:
        last, peak = loss.smoothed[-1], int(np.argmax(np.abs(loss.smoothed)))
        chance = [compare_losses(repeat, baseline) for repeat in repeats]
        floor = max([loss.noise, *(np.abs(x.smoothed).max() for x in chance if x is not None)])
        largest = f"{loss.smoothed[peak]:+.4f} at step {loss.steps[peak]}"
        word = verdict(loss.smoothed[peak], floor)
        yield "training loss", f"{last:+.4f}", largest, f"{floor:.4f}", word
    common = sorted(run.evals.keys() & baseline.evals.keys())
    for surface in dict.fromkeys(name for step in common for name in run.evals[step]):
        shared = [s for s in common if surface in run.evals[s] and surface in baseline.evals[s]]
        if not shared:
            continue
        pairs = [(run.evals[s][surface], baseline.evals[s][surface]) for s in shared]
        deltas, noise = [a[0] - b[0] for a, b in pairs], 2 * math.hypot(*(x[1] for x in pairs[-1]))
        for repeat in repeats:
            if surface in repeat.evals.get(shared[-1], {}):
                chance = repeat.evals[shared[-1]][surface][0] - pairs[-1][1][0]
                noise = max(noise, abs(chance))
        word, peak = verdict(deltas[-1], noise), int(np.argmax(np.abs(deltas)))
        behind = last < -floor and deltas[-1] - last > max(noise, floor)
        if surface == POOLED and behind:
            word += ": DOES NOT FOLLOW the training loss, look for repeated or leaked data"
        largest = f"{deltas[peak]:+.4f} at step {shared[peak]}"
        yield surface, f"{deltas[-1]:+.4f}", largest, f"{noise:.4f}", word
    known = [s for s in run.steps if "data_hash" in baseline.steps.get(s, {})]
    if known:
        same = sum(run.steps[s]["data_hash"] == baseline.steps[s]["data_hash"] for s in known)
        word = "agrees" if same == len(known) else "OTHER DATA"
        yield "data hash", f"{same} of {len(known)} steps equal", "", "exact", word


def draw_run(axes: Sequence[Any], run: Curves, baseline: Curves, number: int) -> None:
    """Adds a run to the six panels; `number` is its place and its color."""
    loss, delta, heldout, hashes, lr, norm = axes
    hue = "014569"[number % 6]  # of matplotlib's cycle, without red and green, which judge hashes
    color, steps = "#555555" if run is baseline else f"C{hue}", sorted(run.steps)
    thin = slice(None, None, -(-len(steps) // 1500) or 1)  # a million steps still make a small page

    def line(axis: Any, x: Sequence | np.ndarray, raw: np.ndarray, mean: np.ndarray) -> None:  # noqa: ANN401
        axis.plot(x[thin], raw[thin], color=color, alpha=0.2, lw=0.7)
        axis.plot(x[thin], mean[thin], color=color, lw=1.6, label=run.name)

    for axis, key in ((loss, "ce"), (lr, "lr"), (norm, "grad_norm")):
        x = [step for step in steps if key in run.steps[step]]
        if x:
            y = np.array([run.steps[step][key] for step in x], np.float64)
            line(axis, x, y, y if key == "lr" else smooth(y, max(len(y) // 100, 1)))
    points = [(s, *v[POOLED]) for s, v in sorted(run.evals.items()) if POOLED in v]
    if points:
        x, y, error = np.array(points).T
        heldout.errorbar(x, y, 2 * error, color=color, label=run.name, marker="o", ms=3)
    difference = None if run is baseline else compare_losses(run, baseline)
    if difference is not None:
        x, raw, mean, noise = difference
        line(delta, x, raw, mean)
        delta.fill_between(x[thin], -noise, noise, color=color, alpha=0.12, lw=0)
    known = [s for s in steps if "data_hash" in baseline.steps.get(s, {})][thin]
    equal = [run.steps[s].get("data_hash") == baseline.steps[s]["data_hash"] for s in known]
    colors = ["#2a9d4a" if same else "#d1342f" for same in equal]
    hashes.scatter(known, [number] * len(known), 30, colors, marker="|", rasterized=True)


def draw(curves: Sequence[Curves], baseline: Curves) -> str:
    """The six pictures of a comparison, as one SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    titles = ("Training loss (nats per token)", f"Training loss less that of {baseline.name}")
    titles += ("Held-out loss, pooled (± 2 standard errors)", f"Same data as {baseline.name}?")
    titles += ("Learning rate", "Gradient norm")
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False}
    style |= {"axes.grid": True, "grid.alpha": 0.25, "font.size": 9, "axes.titleweight": "bold"}
    style |= {"svg.hashsalt": "olmo3", "svg.fonttype": "none"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(3, 2, figsize=(11, 10), layout="constrained")
        for title, axis in zip(titles, axes.flat, strict=True):
            axis.set_title(title, loc="left")
            axis.set_xlabel("step")
        for number, run in enumerate(curves):
            draw_run(list(axes.flat), run, baseline, number)
        _, delta, _, hashes, _, _ = axes.flat
        delta.axhline(0, color="#555555", lw=1)
        hashes.set_yticks(range(len(curves)), [run.name for run in curves])
        hashes.set_ylim(len(curves) - 0.3, -0.7)
        for axis in list(axes.flat)[:3]:
            if axis.get_legend_handles_labels()[0]:
                axis.legend(frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return out.getvalue()[out.getvalue().index("<svg") :]


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, header, rows."""


def tables(curves: Sequence[Curves], baseline: Curves) -> Iterator[Table]:
    """The tables of a comparison: verdicts, surfaces at common steps, settings that differ."""
    header = ("run", "surface", "difference at the end", "largest", "noise floor", "verdict")
    others = [run for run in curves if run is not baseline]
    repeats = [run for run in others if is_repeat(run, baseline)]
    rows = [(run.name, *row) for run in others for row in judge(run, baseline, repeats)]
    yield f"Verdicts against {baseline.name}", header, rows
    with_evals = [run for run in curves if run.evals]
    if with_evals:
        common = sorted(set.intersection(*(set(run.evals) for run in with_evals)))
        picked = sorted({common[round(i)] for i in np.linspace(0, len(common) - 1, 8) if common})
        rows = [
            (str(step), surface, *(show(run.evals[step].get(surface)) for run in with_evals))
            for step in picked
            for surface in dict.fromkeys(name for run in with_evals for name in run.evals[step])
        ]
        names = [run.name for run in with_evals]
        yield "Evaluations at common checkpoints", ("step", "surface", *names), rows
    settings = [run for run in curves if run.config]
    keys = dict.fromkeys(key for run in settings for key in run.config)
    keys.pop("run_dir", None)
    rows = [(key, *(str(run.config.get(key, "")) for run in settings)) for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if rows:
        yield "Settings that differ", ("setting", *(run.name for run in settings)), rows


def show(value: tuple[float, float] | None) -> str:
    """A value with its standard error."""
    return "" if value is None else f"{value[0]:.4f} ± {value[1]:.4f}"


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1080px; padding: 0 1rem;
  color: #222 }} h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.1rem; margin-top: 2rem }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }}
td, th {{ padding: .35rem .8rem; border-bottom: 1px solid #ddd; text-align: left }}
th {{ border-bottom: 2px solid #888 }} svg {{ width: 100%; height: auto; margin-top: 1rem }}
.good {{ color: #1d7a37 }} .bad {{ color: #b3261e; font-weight: 600 }}</style><h1>{title}</h1>
{body}</html>
"""


METHOD = (
    "Training loss: differences are means over a twentieth of the common steps, at least ten; the"
    " noise floor is four standard errors of such a mean. Other surfaces: the last common step, and"
    " two standard errors of the difference, as if the documents had been drawn anew for each. A"
    " run that differs from the baseline in its seed alone raises the floor to what chance does."
)


def write_report(runs: Sequence[Curves], reference: Curves | None, out: Path) -> list[Table]:
    """Writes `out`.html, self-contained, and `out`.md with its picture `out`.svg."""
    baseline = reference or runs[0]
    curves = [*runs, reference] if reference else list(runs)
    others = ", ".join(run.name for run in curves if run is not baseline)
    title = f"{others} against {baseline.name}"
    picture, parts = draw(curves, baseline), list(tables(curves, baseline))
    page, text = [f"<p>{METHOD}</p>"], [f"# {title}\n", f"{METHOD}\n"]
    for heading, header, rows in parts:
        cells = "".join(f"<th>{html.escape(x)}</th>" for x in header)
        page.append(f"<h2>{html.escape(heading)}</h2><table><tr>{cells}</tr>")
        for row in rows:
            last = row[-1]
            kind = "good" if last == "agrees" else "bad" if re.search("[A-Z]{4}", last) else ""
            cells = "".join(f"<td>{html.escape(x)}</td>" for x in row[:-1])
            page.append(f'<tr>{cells}<td class="{kind}">{html.escape(last)}</td></tr>')
        page.append("</table>")
        text += [f"## {heading}\n", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        text += [f"| {' | '.join(row)} |" for row in rows] + [""]
    page.insert(1 + next(i for i, x in enumerate(page) if x == "</table>"), picture)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".svg").write_text(picture)
    out.with_suffix(".html").write_text(PAGE.format(title=html.escape(title), body="\n".join(page)))
    text.insert(2, f"![curves]({out.with_suffix('.svg').name})\n")
    out.with_suffix(".md").write_text("\n".join(text))
    return parts


@dataclass(frozen=True)
class Compare:
    """Overlays runs, judges every surface against its noise floor, and writes a page to show."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories; they are judged against the first, or against the reference."""
    reference: Path | None = None
    """A loss curve as CSV, exported from a Weights & Biases panel."""
    out: Path = Path("report")
    """Writes OUT.html, OUT.md and OUT.svg."""

    def run(self) -> None:
        if not self.runs or (len(self.runs) < 2 and self.reference is None):
            raise ValueError("compare needs two runs, or one and a --reference curve")
        curves = [read_run(folder) for folder in self.runs]
        reference = None if self.reference is None else read_reference(self.reference)
        _, header, rows = write_report(curves, reference, self.out)[0]
        for row in [header, *rows]:
            print("  ".join(f"{cell:24}" for cell in row).rstrip())
        print(f"{self.out.with_suffix('.html')}: open it in a browser")
