"""A planted data bug, to see what `eval.py compare` says about it.

    python train.py --run-dir runs/good FLAGS
    python benchmarks/double_sharding.py --run-dir runs/double-sharded FLAGS
    python eval.py compare runs/good runs/double-sharded --out runs/report

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


if __name__ == "__main__":
    data.Loader = DoubleSharded
    sys.exit(train.main(sys.argv[1:]))
