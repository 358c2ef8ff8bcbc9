"""What is asked of models on disk: whether two are the same, what is in one, the mean of several.

The check runs two models side by side, one block of one of them in memory at a time, on real text.

Axis letters: B sequences, S positions, P positions of all sequences; of weights as in olmo3.py.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import numpy as np
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Float64, Int32

import convert
import olmo3
from convert import Source
from tools import leaves, shards


class CheckFailed(Exception):
    """Two models that should be one are not; one finding per line."""


def build_model(config: olmo3.ModelConfig, read: Callable) -> olmo3.Olmo3:
    """A model in memory, sharded for the mesh in force, from a function that reads one tensor."""
    wanted = jax.eval_shape(lambda: olmo3.Olmo3(config, jax.random.key(0)))
    parts: dict[str, list[str]] = {}
    for name, tensor in convert.tensors(config).items():
        parts.setdefault(tensor.leaf, []).append(name)

    def leaf(path: tuple, want: jax.ShapeDtypeStruct) -> Array:
        values = [read(name) for name in parts[leaves.dotted(path)]]
        value = np.stack(values) if want.ndim > values[0].ndim else values[0]
        assert want.sharding is not None
        return jax.device_put(value, NamedSharding(jax.sharding.get_mesh(), want.sharding.spec))

    return jax.tree_util.tree_map_with_path(leaf, wanted)


@eqx.filter_jit
def one_block(
    model: olmo3.Olmo3, tokens: Int32[Array, "B S"]
) -> tuple[Float32[Array, "B S D"], Float32[Array, "B S D"]]:
    """The residual after a model's only block, and after the final norm as well."""
    hidden, states = olmo3.forward(model, tokens, keep_states=True)
    assert states is not None
    return states[0][0], hidden


def run_block(
    source: Source, layer: int, x: Float32[np.ndarray, "B S D"]
) -> tuple[Float32[np.ndarray, "B S D"], Float32[np.ndarray, "B S D"]]:
    """Pushes a residual through one block, nothing else of the model being in memory.

    This is the real forward pass, of a model of that block alone whose embedding table is the
    residual; every position looks itself up.
    """
    n, windows = x.shape[0] * x.shape[1], source.config.windows
    block = {"n_layers": 1, "windows": (windows[layer % len(windows)],)}
    table = {"vocab_size": n, "tokenizer_size": n, "compute_dtype": "float32", "remat": "none"}
    config = dataclasses.replace(source.config, **block, **table)

    def read(name: str) -> Float32[np.ndarray, "..."]:
        if name in ("embed", "unembed"):
            return x.reshape(n, -1)
        return source.read(name.replace("layers.0.", f"layers.{layer}."))

    tokens = np.arange(n, dtype=np.int32).reshape(x.shape[:2])
    tokens = jax.device_put(tokens, NamedSharding(jax.sharding.get_mesh(), P(None, None)))
    state, hidden = one_block(build_model(config, read), tokens)
    return np.asarray(state), np.asarray(hidden)


def read_rows(source: Source, ids: Int32[np.ndarray, "B S"]) -> Float32[np.ndarray, "B S D"]:
    """The embeddings of some tokens, from only those blocks of the table that they are in."""
    out = np.empty((*ids.shape, source.config.d_model), np.float32)
    step = convert.block_rows((source.config.vocab_size, source.config.d_model))
    for block in np.unique(ids // step):
        here = ids // step == block
        rows = source.read("embed", slice(block * step, (block + 1) * step))
        out[here] = rows[ids[here] % step]
    return out


def head(source: Source, hidden: Float32[np.ndarray, "P D"], n: int) -> Float32[np.ndarray, "P V"]:
    """Logits of the first `n` ids, a block of the head at a time."""
    out = np.empty((len(hidden), n), np.float32)
    step = convert.block_rows((n, source.config.d_model))
    for i in range(0, n, step):
        out[:, i : i + step] = hidden @ source.read("unembed", slice(i, min(i + step, n))).T
    return out


def divergence(
    a: Float[np.ndarray, "P V"], b: Float[np.ndarray, "P V"], targets: Int32[np.ndarray, " P"]
) -> Float64[np.ndarray, "4 P"]:
    """KL(A||B) in nats, largest logit difference, same top-1, and loss of B minus loss of A.

    In float64: a float32 log-softmax has no digits left for a divergence of 1e-9.
    """
    rows = [np.zeros(len(a)), np.abs(a - b).max(axis=1), a.argmax(axis=1) == b.argmax(axis=1)]
    p, q = (x - x.max(axis=1, keepdims=True) for x in (a.astype(np.float64), b.astype(np.float64)))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    rows[0] = (np.exp(p) * (p - q)).sum(axis=1)
    at = np.arange(len(a)), targets
    return np.stack([*rows, p[at] - q[at]]).astype(np.float64)


def relative(a: Float[np.ndarray, "..."], b: Float[np.ndarray, "..."]) -> float:
    """L2 distance as a share of the first one's length."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


# Limits on an update, mean KL, top-1, perplexity - 1. Float32 must be the same numbers. In a
# trained model (goldens train_fp32), rounding to bfloat16 moves an update by 0.010, KL by 9e-5
# and top-1 to 99.1 %; exchanging one layer's queries and keys moves its update by 0.13.
LIMITS = {
    "float32": (1e-4, 1e-9, 1.0, 1e-6),
    "float16": (1e-2, 1e-4, 0.98, 2e-3),
    "bfloat16": (5e-2, 1.5e-3, 0.97, 1e-2),
}


class Report(NamedTuple):
    """How far model B is from model A."""

    config: list[str]  # fields in which they differ
    blocks: list[float]  # relative difference of the embeddings, then of what each block adds
    max_logit: float
    kl_mean: float  # nats, over the real vocabulary
    kl_max: float
    n_same: int  # positions with the same most likely token
    n: int
    perplexity: float  # B / A in the sequence where it is furthest from 1

    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the top-1 agreement."""
        z, p, n = 1.96, self.n_same / self.n, self.n
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = (p + z * z / (2 * n) - half), (p + z * z / (2 * n) + half)
        return max(0.0, low / (1 + z * z / n)), min(1.0, high / (1 + z * z / n))

    def text(self) -> str:
        """All figures, a line each."""
        low, high = self.interval()
        return (
            f"updates          {max(self.blocks):.3g} largest relative difference over blocks\n"
            f"max |dlogit|     {self.max_logit:.3g}\n"
            f"KL(A||B)         {self.kl_mean:.3g} nats mean, {self.kl_max:.3g} max\n"
            f"top-1 agreement  {self.n_same / self.n:.3%}, n={self.n}, 95 % {low:.3%}..{high:.3%}\n"
            f"perplexity B/A   {self.perplexity:.8f} in the sequence furthest from 1"
        )

    def failures(self, dtype: str) -> list[str]:
        """What is beyond the limits of a dtype, a line each, with the first block that drifts."""
        block, kl, top1, perplexity = LIMITS[dtype]
        bad = list(self.config)
        first = next((i for i, d in enumerate(self.blocks) if not d <= block), None)
        if first is not None:
            name = f"block {first - 1}" if first else "the embedding"
            bad.append(f"{name} is the first to drift: {self.blocks[first]:.3g}, limit {block}")
        if not self.kl_mean <= kl:
            bad.append(f"mean KL {self.kl_mean:.3g} nats, limit {kl}")
        if self.n_same < self.n and self.interval()[1] < top1:
            bad.append(f"top-1 agreement {self.n_same} of {self.n}, limit {top1:.0%}")
        if not abs(self.perplexity - 1) <= perplexity:
            bad.append(f"perplexity ratio {self.perplexity:.6f}, limit 1 +- {perplexity}")
        return bad


def config_differences(a: olmo3.ModelConfig, b: olmo3.ModelConfig, *more: str) -> list[str]:
    """Fields that make two models different functions; raises if they cannot run side by side."""
    layers = [tuple(c.windows) * (c.n_layers // len(c.windows)) for c in (a, b)]
    found = [] if layers[0] == layers[1] else [f"windows={a.windows} in A, {b.windows} in B"]
    names = ("n_heads", "n_kv_heads", "d_head", "d_ff", "rope_theta", "yarn", "norm_eps")
    for name in ("d_model", "n_layers", *names, *more):
        if getattr(a, name) != getattr(b, name):
            found.append(f"{name}={getattr(a, name)} in A, {getattr(b, name)} in B")
    if a.d_model != b.d_model or a.n_layers != b.n_layers:
        convert.refuse(found)
    return found


def compare(a: Source, b: Source, tokens: Int32[np.ndarray, "B S"]) -> Report:
    """Runs two models side by side in float32, one block of one of them in memory at a time."""
    config = config_differences(a.config, b.config)
    n_vocab = min(a.config.tokenizer_size, b.config.tokenizer_size)
    x, y = read_rows(a, tokens), read_rows(b, tokens)
    hidden, blocks = [x, y], [relative(x, y)]
    mesh = olmo3.make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        for layer in convert.track(range(a.config.n_layers), "blocks"):
            new_x, hidden[0] = run_block(a, layer, x)
            new_y, hidden[1] = run_block(b, layer, y)
            blocks.append(relative(new_x - x, new_y - y))
            x, y = new_x, new_y
    targets, step = np.roll(tokens, -1, axis=1).reshape(-1), max(1, convert.BLOCK // 2 // n_vocab)
    found = []
    for i in range(0, targets.size, 1024):
        rows = [h.reshape(targets.size, -1)[i : i + 1024] for h in hidden]
        one, two = head(a, rows[0], n_vocab), head(b, rows[1], n_vocab)
        for j in range(0, len(one), step):
            part = slice(j, j + step)
            found.append(divergence(one[part], two[part], targets[i : i + 1024][part]))
    kl, max_logit, same, excess = np.concatenate(found, axis=1)
    excess = excess.reshape(tokens.shape)[:, :-1].mean(axis=1)  # the last position has no target
    worst = float(np.exp(excess[np.abs(excess).argmax()]))
    largest, mean, most = float(max_logit.max()), float(kl.mean()), float(kl.max())
    return Report(config, blocks, largest, mean, most, int(same.sum()), same.size, worst)


def check_tokens(
    config: olmo3.ModelConfig, file: Path | None, sequences: int, positions: int
) -> Int32[np.ndarray, "B S"]:
    """Rows of a token file, or of Python's help texts as bytes, each row from other documents.

    Bytes are how the embedded corpus is tokenised; in dolma2 the ids 0 to 255 are single bytes too.
    """
    from pydoc_data import topics

    if file is None:
        ids = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
        starts = np.linspace(0, len(ids) - positions, sequences).astype(int)
    else:
        ids = np.fromfile(file, "<u4", sequences * positions)
        starts = np.arange(len(ids) // positions) * positions
        if not len(starts) or ids.max() >= config.tokenizer_size:
            raise ValueError(
                f"tokens={file}: {len(ids)} ids up to {max(ids, default=0)}; {positions} below"
                f" {config.tokenizer_size} are needed, as headerless little-endian uint32"
            )
    rows = np.stack([ids[i : i + positions] for i in starts]).astype(np.int32)
    return rows % config.tokenizer_size


def verify(a: Source, b: Source, tokens: Int32[np.ndarray, "B S"], dtype: str) -> None:
    """Compares, prints the figures, raises CheckFailed beyond the limits of `dtype`."""
    report = compare(a, b, tokens)
    print(f"compared on {tokens.shape[0]} x {tokens.shape[1]} tokens, limits of {dtype}")
    print(report.text(), flush=True)
    if bad := report.failures(dtype):
        raise CheckFailed("\n".join(bad))


def verify_written(source: Source, written: Path, dtype: str) -> None:
    """The check after a conversion; small if the model is large, as any token uses every weight."""
    sizes = (2, 64) if olmo3.n_parameters(source.config) > 10**9 else (4, 512)
    verify(source, convert.open_model(written), check_tokens(source.config, None, *sizes), dtype)


def check(
    a: tyro.conf.Positional[Path],
    b: tyro.conf.Positional[Path],
    tokens: Path | None = None,
    shape: tuple[int, int] | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> None:
    """Compares two models of either format on real text; exits 1 if they are not the same.

    Args:
        a: The model that is right.
        b: The model to check.
        tokens: Headerless little-endian uint32 ids; by default Python's help texts as bytes.
        shape: Sequences and positions; by default 4 of 512, or longer than a window under 1024.
        dtype: Whose limits hold; by default float32, or the coarser if A and B are stored apart.
    """
    one, two = convert.open_model(a), convert.open_model(b)
    window = max((w for w in one.config.windows if w is not None), default=0)
    shape = shape or (4, max(512, window + 128) if window < 1024 else 512)
    if shape[1] <= window:
        print(f"note: {shape[1]} positions do not reach the window of {window}; see --shape")
    apart = shards.coarsest(np.dtype(d) for d in (one.dtype, two.dtype))
    rows = check_tokens(one.config, tokens, *shape)
    verify(one, two, rows, dtype or ("float32" if one.dtype == two.dtype else apart))


def average(models: tyro.conf.Positional[tuple[Path, ...]], out: Path) -> None:
    """Writes the mean of the weights of several models of either format as our checkpoint.

    Args:
        models: At least two, of one configuration.
        out: New folder.
    """
    if len(models) < 2:
        raise ValueError(f"average: {len(models)} model(s); name at least two")
    sources = [convert.open_model(m) for m in models]
    for model, other in zip(models[1:], sources[1:], strict=True):
        differences = config_differences(sources[0].config, other.config, "tokenizer_size")
        convert.refuse([f"{model}: {d}" for d in differences])

    def read(name: str, rows: slice = slice(None)) -> Float32[np.ndarray, "..."]:
        total = sources[0].read(name, rows).astype(np.float64)
        for source in sources[1:]:
            total += source.read(name, rows)
        return (total / len(sources)).astype(np.float32)

    with convert.new_folder(out) as partial:
        mean = sources[0]._replace(read=read)
        leaves.write_checkpoint(partial, mean, {"converted": {"mean of": [str(m) for m in models]}})
    print(f"{out}: the mean of {len(models)} models")


def info(model: tyro.conf.Positional[Path]) -> None:
    """Prints a model's configuration, its parameters by group, and the L2 norm of every tensor."""
    source = convert.open_model(model)

    def measure(tensor: convert.Tensor, _: int, x: Float32[np.ndarray, "..."]) -> tuple:
        below = tensor.name.split(".", 2)[-1]
        group = "norms" if below.endswith("norm") else below.split(".")[0]
        return tensor.name, group, x.size, float(np.square(x, dtype=np.float64).sum())

    square: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, group, size, total in convert.stream(source, measure):
        counts[group] += size
        square[name] += total
    for field, value in dataclasses.asdict(source.config).items():
        print(f"{field:16} {value}")
    print(f"{'stored as':16} {source.dtype}\n")
    for group, n in [*counts.items(), ("total", sum(counts.values()))]:
        print(f"{group:16} {n:16,}")
    inner = [below for below in convert.TENSORS if below not in convert.OUTER]
    print("\nlayer" + "".join(f"{below.split('.')[-1]:>10}" for below in inner))
    for layer in range(source.config.n_layers):
        norms = (math.sqrt(square[f"layers.{layer}.{below}"]) for below in inner)
        print(f"{layer:5}" + "".join(f"{norm:10.4g}" for norm in norms))
    print("  ".join(f"{name} {math.sqrt(square[name]):.4g}" for name in convert.OUTER))
