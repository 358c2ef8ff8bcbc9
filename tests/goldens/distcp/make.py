"""Makes the checkpoint beside this file as OLMo-core saves one (spec 8.1): torch DCP, 2 processes.

    torchrun --nproc-per-node 2 make.py       torch 2.13.0, gloo, float32

Keys and layouts are OLMo-core's: `model.FQN`, `optim.state.FQN.{step,exp_avg,exp_avg_sq}`, every
tensor sharded over its first axis by DTensor. The numbers count up from a start that its key gives.
train/rank0.pt is what the trainer of process 0 saves (trainer.py:787).
"""

import random
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

D, F, V, LAYERS = 16, 24, 128, 4


def shapes():
    attention = {f"w_{x}.weight": (D, D) for x in ("q", "k", "v", "out")}
    attention |= {"q_norm.weight": (D,), "k_norm.weight": (D,)}
    mlp = {"w1.weight": (F, D), "w2.weight": (D, F), "w3.weight": (F, D)}
    yield "embeddings.weight", (V, D)
    for i in range(LAYERS):
        yield from ((f"blocks.{i}.attention.{n}", s) for n, s in attention.items())
        yield from ((f"blocks.{i}.feed_forward.{n}", s) for n, s in mlp.items())
        yield f"blocks.{i}.attention_norm.weight", (D,)
        yield f"blocks.{i}.feed_forward_norm.weight", (D,)
    yield "lm_head.norm.weight", (D,)
    yield "lm_head.w_out.weight", (V, D)


def trainer_state():
    """Nine batches of 4 sequences of 32 tokens, in the second epoch since the sixth."""
    loader = {"dataset_type": "fsl", "dataset_fingerprint_version": "v2.0"}
    loader |= {"dataset_fingerprint": "0123abcd", "seed": 34521, "epoch": 2}
    loader |= {"batches_processed": 3, "tokens_processed": 3 * 4 * 32}
    loader |= {"sequence_length": 32, "max_target_sequence_length": 32}
    rng = {"python": random.getstate(), "numpy": np.random.get_state()}
    rng |= {"torch": torch.random.get_rng_state(), "cuda": None}
    counts = {"global_step": 9, "global_train_tokens_seen": 9 * 4 * 32, "max_steps": 20}
    rest = {"epoch": 2, "world_size": 2, "callbacks": OrderedDict(checkpointer={"last": 5})}
    return counts | {"data_loader": loader, "rng": rng} | rest


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    folder = Path(__file__).parent / "step9" / "model_and_optim"
    state = {}
    for name, shape in shapes():
        for kind in ("model.{}", "optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq"):
            key = kind.format(name)
            n = int.from_bytes(key.encode()[-7:], "little") % 1000 + len(key)
            x = torch.arange(n, n + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
            state[key] = distribute_tensor(x / 1024, mesh, [Shard(0)])
        state[f"optim.state.{name}.step"] = torch.tensor(10.0)
        state[f"optim.param_groups.{name}.lr"] = 3e-4
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        train = folder.parent / "train"
        train.mkdir(exist_ok=True)
        torch.save(trainer_state(), train / "rank0.pt")
    dist.barrier()
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
