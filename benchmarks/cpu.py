"""Training speed on CPU, ours and transformers', same shapes, type and cores.

    python benchmarks/cpu.py                    float32 and bfloat16
    python benchmarks/cpu.py --peer             also transformers' Olmo3 on torch, if installed

The shapes are those MaxText was measured at (1,680 tokens/s in float32 and 1,871 in bfloat16 on two
quiet cores): 4 layers, width 256, 4 heads of 64, MLP 704, vocabulary 8192, window 256, 8 sequences
of 512. Ours is train.train_step, optimizer and all; the peer does forward, backward and AdamW.
Rounds of the two alternate, so that other work on the machine slows both; the median round counts.
"""

import argparse
import dataclasses
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
import olmo3
import train

ROWS, LENGTH, VOCABULARY = 8, 512, 8192


def our_step(dtype: str) -> Callable[[], None]:
    """A function that takes one optimizer step on random tokens."""
    model = olmo3.ModelConfig(
        vocab_size=VOCABULARY,
        tokenizer_size=VOCABULARY,
        d_model=256,
        n_layers=4,
        n_heads=4,
        n_kv_heads=4,
        d_head=64,
        d_ff=704,
        windows=(256, 256, 256, None),
        compute_dtype=dtype,  # pyright: ignore[reportArgumentType] - from the command line
        remat="none",
        loss_chunk=256,
    )
    config = dataclasses.replace(train.PRESETS["tiny"][1], model=model, batch_instances=ROWS)
    mesh = olmo3.make_mesh(devices=jax.devices()[:1])
    jax.set_mesh(mesh)
    state = jax.jit(functools.partial(train.init_state, config))(jax.random.key(0))
    step = jax.jit(functools.partial(train.train_step, config), donate_argnums=0)
    rng = np.random.default_rng(0)
    place = NamedSharding(mesh, P(None, ("data", "fsdp")))
    shape = (1, ROWS, LENGTH)
    tokens, targets = (
        jax.device_put(rng.integers(0, VOCABULARY, shape, np.int32), place) for _ in range(2)
    )
    ids = jax.device_put(np.arange(ROWS, dtype=np.uint32)[None], place)
    batch = data.DeviceBatch(tokens, targets, None, ids)

    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch, jnp.float32(1e-4))
        jax.block_until_ready(metrics)

    return run


def peer_step(dtype: str) -> Callable[[], None]:
    """The same of transformers' Olmo3ForCausalLM under torch's AdamW."""
    import torch  # pyright: ignore[reportMissingImports] - a peer
    import transformers  # pyright: ignore[reportMissingImports]

    config = transformers.Olmo3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=704,
        sliding_window=256,
        max_position_embeddings=LENGTH,
    )
    model = transformers.Olmo3ForCausalLM(config).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))

    def run() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def first_step_seconds() -> float:
    """Wall time from `python train.py` to its first row of metrics; the run is then ended."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        command = [sys.executable, "train.py", "--run-dir", folder, "--steps", "1000"]
        run = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stderr=subprocess.DEVNULL)
        metrics = Path(folder) / "metrics.jsonl"
        while not metrics.exists() or '"loss"' not in metrics.read_text():
            if run.poll() is not None:
                raise RuntimeError(f"train.py ended with exit code {run.returncode}")
            time.sleep(0.05)
        seconds = time.perf_counter() - begun
        run.kill()
        run.wait()
    return seconds


def main() -> None:
    """Prints tokens per second and the time to the first step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="transformers and torch as well")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    a = parser.parse_args()
    for dtype in a.dtypes:
        steps = {"ours": our_step(dtype)} | ({"transformers": peer_step(dtype)} if a.peer else {})
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            step()  # compiles
        for _ in range(a.rounds):
            for name, step in steps.items():
                begun = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - begun)
        for name, times in seconds.items():
            median = statistics.median(times)
            speed = ROWS * LENGTH / median
            print(f"{dtype} {name}: {median:.3f} s a step, {speed:,.0f} tokens/s", flush=True)
    print(f"python train.py to its first step: {first_step_seconds():.1f} s")


if __name__ == "__main__":
    main()
