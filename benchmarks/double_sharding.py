"""A planted data bug, and what `eval.py compare` says about it.

    python benchmarks/double_sharding.py        trains three runs, writes runs/report.{html,md,svg}
    python benchmarks/double_sharding.py --run-dir runs/mine FLAGS      train.py with the bug

The dataset deals the instances out to its hosts, and each host's loader, not knowing, deals its
share out once more. Of H hosts' data a run then sees one part in H, H times as often. Nothing
crashes, the data hash agrees with the order that the loader believes in, and the training loss
looks better than it should. Only the held-out loss tells.
"""

import sys
from pathlib import Path

import numpy as np
from jaxtyping import UInt32

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data
import eval as evaluation
import train

N_HOSTS = 512
"""Large, so that a run of minutes repeats its share as often as a run of months would with few."""


class DoubleSharded(data.Loader):
    """A loader whose epochs are made of one host's share of the instances, over and over."""

    def order(self, epoch: int) -> UInt32[np.ndarray, " N"]:
        n = len(super().order(epoch))
        share = np.arange(0, n, N_HOSTS, dtype=np.uint32)
        passes = [share[data.shuffled(len(share), 1, epoch * N_HOSTS + i)] for i in range(N_HOSTS)]
        return np.concatenate(passes)[:n]


RUNS = {"good": [], "good-seed-1": ["--seed", "1"], "double-sharded": []}
FLAGS = [
    *("--steps", "300", "--eval-every-steps", "30", "--batch-instances", "16"),
    *("--sequences-per-device", "16", "--model.n-layers", "4", "--model.d-model", "128"),
    *("--model.n-heads", "4", "--model.n-kv-heads", "4", "--model.d-ff", "256"),
]


def main(arguments: list[str]) -> int:
    """Trains with the bug, or without arguments two good runs as well, and compares them."""
    honest, names = data.Loader, [] if arguments else [*RUNS]
    for name in names:
        data.Loader = DoubleSharded if name == "double-sharded" else honest
        code = train.main(["--run-dir", f"runs/{name}", *FLAGS, *RUNS[name]])
        if code:
            return code
    if not arguments:
        evaluation.main(["compare", *(f"runs/{name}" for name in names), "--out", "runs/report"])
        return 0
    data.Loader = DoubleSharded
    return train.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
