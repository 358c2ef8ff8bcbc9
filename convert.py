"""Published OLMo 3 checkpoints to ours and back: streamed, checked, averaged, described.

    python convert.py from-hf SRC OUT      Hugging Face folder or hub id -> our checkpoint
    python convert.py from-core SRC OUT    OLMo-core's own checkpoint, Adam state included -> ours
    python convert.py to-hf CKPT OUT       our checkpoint -> a folder that transformers loads
    python convert.py check A B            two models of either format, block by block, on real text
    python convert.py average A B --out D  the mean of several, as the 32B recipe takes it
    python convert.py info X               configuration, counts, and the norm of every tensor

A model on disk is a `Source`: a configuration and a function that reads one tensor, or rows of it.
Everything moves tensor by tensor, so memory does not grow with depth. Here are the spellings of a
configuration and the names and layouts of all tensors; tools/ has the formats (shards.py Hugging
Face's, leaves.py ours, distcp.py OLMo-core's) and what is asked of models (parity.py).

Axis letters: those of weights in olmo3.py.
Exit codes: 0 done; 1 a check or the machine failed; 2 the input is at fault, a line per fault.
A result has its name only when it is whole and checked; until then it is `OUT.partial`.

Sources: OLMo-core nn/hf/convert.py:183 (names), nn/hf/config.py:87 (config); transformers 5.24.0
configuration_olmo3.py, modeling_rope_utils.py.
"""

import contextlib
import dataclasses
import functools
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from jaxtyping import Float32
from rich import progress
from rich.console import Console

import olmo3

# Our name -> Hugging Face's, OLMo-core's, their layout -> ours; linear layers are (out, in) there.
TENSORS = {
    "embed": ("model.embed_tokens", "embeddings", "V D -> V D"),
    "attn.w_q": ("self_attn.q_proj", "attention.w_q", "(N H) D -> D N H"),
    "attn.w_k": ("self_attn.k_proj", "attention.w_k", "(K H) D -> D K H"),
    "attn.w_v": ("self_attn.v_proj", "attention.w_v", "(K H) D -> D K H"),
    "attn.w_o": ("self_attn.o_proj", "attention.w_out", "D (N H) -> D N H"),
    "attn.q_norm": ("self_attn.q_norm", "attention.q_norm", "(N H) -> N H"),
    "attn.k_norm": ("self_attn.k_norm", "attention.k_norm", "(K H) -> K H"),
    "ffn.w_gate": ("mlp.gate_proj", "feed_forward.w1", "F D -> D F"),
    "ffn.w_up": ("mlp.up_proj", "feed_forward.w3", "F D -> D F"),
    "ffn.w_down": ("mlp.down_proj", "feed_forward.w2", "D F -> D F"),
    "attn_norm": ("post_attention_layernorm", "attention_norm", "D -> D"),
    "ffn_norm": ("post_feedforward_layernorm", "feed_forward_norm", "D -> D"),
    "norm": ("model.norm", "lm_head.norm", "D -> D"),
    "unembed": ("lm_head", "lm_head.w_out", "V D -> V D"),
}
OUTER = ("embed", "norm", "unembed")  # those of no layer
# Their config.json -> ours, where only the name differs; and their rope_scaling -> YarnConfig.
SIZES = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
    "vocab_size": "tokenizer_size",
}
YARN = {name: name for name in ("factor", "beta_fast", "beta_slow", "attention_factor")}
YARN["original_max_position_embeddings"] = "original_context"
FIXED = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
BLOCK = 2**24  # numbers that move at a time where a tensor can be cut: 64 MiB
THREADS = 4  # that read, turn and write; each holds a tensor, of 180 MB in the 7B


class Source(NamedTuple):
    """A model on disk, in whatever format."""

    config: olmo3.ModelConfig
    dtype: str  # what the weights are stored in; the coarsest where they differ
    read: Callable[..., Float32[np.ndarray, "..."]]  # by our name, in our layout; a slice cuts rows
    kept: dict  # fields of a Hugging Face config.json that the model does not need, but others do
    companions: Path  # where tokenizer files lie, if there are any


def track(items: Iterable[Any], what: str, n: int | None = None) -> Iterable[Any]:
    """The items, with a bar on a terminal."""
    console = Console(stderr=True)
    return progress.track(items, what, n, console=console, disable=not console.is_terminal)


def refuse(problems: list[str]) -> None:
    """Raises ValueError with a problem per line, if there is one."""
    if problems:
        raise ValueError("\n".join(problems))


def read_yarn(rope: dict) -> olmo3.YarnConfig | None:
    """Reads one group of rotary settings, with transformers' own defaults for what is left out."""
    rope = {k: v for k, v in rope.items() if v is not None and k != "rope_theta"}
    kinds = {rope.pop("rope_type", None), rope.pop("type", None)} - {None}
    if kinds <= {"default"} and not rope:
        return None
    needed = {"factor", "original_max_position_embeddings"}
    known = needed | set(YARN) | {"truncate"}
    if kinds != {"yarn"} or not needed <= set(rope) <= known or not rope.pop("truncate", True):
        raise ValueError(
            f"rope_type={sorted(kinds)} with {rope}: OLMo 3 has YaRN or no scaling; YaRN needs"
            f" {sorted(needed)} and takes {sorted(known - needed)}; correct config.json"
        )
    scale = 0.1 * math.log(rope["factor"]) + 1
    rope = {"beta_fast": 32, "beta_slow": 1, "attention_factor": scale} | rope
    kinds = {ours: type(getattr(olmo3.YarnConfig, ours)) for ours in YARN.values()}
    return olmo3.YarnConfig(**{ours: kinds[ours](rope[key]) for key, ours in YARN.items()})


def read_rope(hf: dict) -> tuple[float, olmo3.YarnConfig | None]:
    """The rotary base and scaling from any published spelling; several must agree.

    `rope_theta` and `rope_scaling` at the top (transformers 4 and all published weights), or
    `rope_parameters`, flat or per kind of layer (transformers 5). In every spelling the scaling is
    for full-attention layers only: so the models were trained (OLMo-core
    nn/transformer/config.py:1958), and so transformers 4.57 and from 5.13 on run them; 5.0 to 5.12
    do not.
    """
    nested = hf.get("rope_parameters") or {}
    full, sliding = (nested.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    flat = {k: v for k, v in nested.items() if not k.endswith("_attention")}
    groups = [g for g in (hf.get("rope_scaling"), flat, full) if g]
    thetas = {g["rope_theta"] for g in (hf, sliding, *groups) if g.get("rope_theta") is not None}
    if len(thetas) != 1:
        raise ValueError(
            f"rope_theta={sorted(thetas) or None}: all layers have one base, at the top or in"
            " rope_parameters; there is no default (published models have 500000)"
        )
    if read_yarn(sliding) is not None:
        raise ValueError(f"sliding_attention={sliding}: OLMo 3 does not scale sliding layers")
    scalings = {read_yarn(g) for g in groups if set(g) != {"rope_theta"}}
    if len(scalings) > 1:
        raise ValueError(f"rope_scaling and rope_parameters contradict each other: {scalings}")
    return float(thetas.pop()), next(iter(scalings), None)


def read_windows(hf: dict) -> tuple[int | None, ...]:
    """The shortest window pattern that repeats over the depth, from `layer_types` if it is there.

    Without it every fourth layer is full. OLMo-core makes the last one full as well, transformers
    does not, so a depth that is no multiple of four is ambiguous and refused.
    """
    n, kinds, window = hf["num_hidden_layers"], hf.get("layer_types"), hf.get("sliding_window")
    if kinds is None and n % 4:
        raise ValueError(
            f"layer_types is missing and num_hidden_layers={n} is no multiple of 4: OLMo-core and"
            " transformers disagree about the last layers; write layer_types out"
        )
    kinds = kinds or (["sliding_attention"] * 3 + ["full_attention"]) * (n // 4)
    if len(kinds) != n or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types={kinds}: full_ or sliding_attention, num_hidden_layers={n}")
    if window is None and "sliding_attention" in kinds:
        raise ValueError("sliding_window=null but layers slide: give it, or make all of them full")
    windows = tuple(window if k == "sliding_attention" else None for k in kinds)
    return next(windows[:p] for p in range(1, n + 1) if windows[:p] * (n // p) == windows)


def config_from_hf(hf: dict) -> olmo3.ModelConfig:
    """Reads a Hugging Face config.json; raises ValueError with every reason why it cannot."""
    hf = {"model_type": None, "num_key_value_heads": hf.get("num_attention_heads")} | hf
    fixed = {"model_type": "olmo3", "clip_qkv": None, **FIXED}
    problems = [
        f"{key}={hf[key]!r}: OLMo 3 has {want!r}, and nothing else converts"
        for key, want in fixed.items()
        if hf.get(key, want) != want
    ]
    missing = [key for key in SIZES if hf.get(key) is None]
    refuse(problems + [f"{key} is missing, and has no safe default" for key in missing])
    found: list[Any] = []
    for reader in (read_rope, read_windows):
        try:
            found.append(reader(hf))
        except ValueError as error:
            problems.append(str(error))
    refuse(problems)
    (theta, yarn), windows = found
    return olmo3.ModelConfig(
        **{ours: hf[theirs] for theirs, ours in SIZES.items()},
        vocab_size=-(-hf["vocab_size"] // 128) * 128,
        d_head=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        windows=windows,
        rope_theta=theta,
        yarn=yarn,
    )


def config_to_hf(config: olmo3.ModelConfig, kept: dict, dtype: str) -> dict:
    """A config.json that transformers 4.57 and from 5.13 on read alike.

    Rotary settings are at the top, where both look: 4.57 takes base 10000 where it finds only the
    nested spelling. From 5.13 on a base at the top other than 500000 misses the sliding layers, so
    such a model has both spellings.
    """
    sizes = {w for w in config.windows if w is not None}
    if len(sizes) > 1:
        raise ValueError(f"windows={config.windows}: Hugging Face has one sliding_window; use one")
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    context, scaling, yarn = 8192, None, config.yarn
    if yarn is not None:
        context = int(yarn.factor * yarn.original_context)
        scaling = {"rope_type": "yarn", **{k: getattr(yarn, ours) for k, ours in YARN.items()}}
    hf = {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "dtype": dtype,
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        **FIXED,
        "attention_dropout": 0.0,
        "initializer_range": config.init_std,
        "sliding_window": next(iter(sizes), None),
        "layer_types": kinds * (config.n_layers // len(kinds)),
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "use_cache": True,
    }
    if config.n_heads * config.d_head != config.d_model:
        hf["head_dim"] = config.d_head
    if config.rope_theta != 500_000.0:
        plain = {"rope_type": "default", "rope_theta": config.rope_theta}
        full = plain | (scaling or {})
        hf["rope_parameters"] = {"full_attention": full, "sliding_attention": plain}
    return hf | dict.fromkeys(KEPT) | {"max_position_embeddings": context} | kept


def block_rows(shape: tuple[int, ...]) -> int:
    """Rows of an array that make up one block."""
    return max(1, min(shape[0], BLOCK // math.prod(shape[1:])))


class Tensor(NamedTuple):
    """A tensor of one layer, or of none: its names and its layouts."""

    name: str  # such as layers.5.ffn.w_up
    hf: str
    core: str
    leaf: str  # of our tree
    place: tuple[int, ...]  # of the layer in a leaf that stacks several
    layout: str  # their axes -> ours
    heads: dict[str, int]  # length of the axes that only ours has
    theirs: tuple[int, ...]  # shape there, and ours; both with the vocabulary's padding
    ours: tuple[int, ...]

    @property
    def by_token(self) -> bool:
        """Whether it has a row per token; all formats have the same rows, so it moves in blocks."""
        return "V" in self.layout

    def blocks(self) -> list[slice]:
        """The rows of its pieces, in order."""
        n = self.ours[0]
        step = block_rows(self.ours) if self.by_token else n
        return [slice(i, min(i + step, n)) for i in range(0, n, step)]


@functools.cache
def tensors(config: olmo3.ModelConfig) -> dict[str, Tensor]:
    """Every tensor by our name, in the order of a forward pass."""
    sizes = {"D": config.d_model, "N": config.n_heads, "K": config.n_kv_heads, "H": config.d_head}
    sizes |= {"F": config.d_ff, "V": config.vocab_size}

    def shape(axes: str) -> tuple[int, ...]:
        groups = re.findall(r"\(.*?\)|\w", axes)
        return tuple(math.prod(sizes[letter] for letter in re.findall(r"\w", g)) for g in groups)

    def tensor(below: str, layer: int | None = None) -> Tensor:
        hf, core, layout = TENSORS[below]
        name, leaf, place, parents = below, below, (), ("", "")
        if layer is not None:
            repeat, kind = divmod(layer, len(config.windows))
            name, leaf, place = f"layers.{layer}.{below}", f"blocks.{kind}.{below}", (repeat,)
            parents = f"model.layers.{layer}.", f"blocks.{layer}."
        theirs = (f"{parents[0]}{hf}.weight", f"{parents[1]}{core}.weight")
        heads = {letter: sizes[letter] for letter in "NKH" if letter in layout}
        return Tensor(name, *theirs, leaf, place, layout, heads, *map(shape, layout.split(" -> ")))

    inner = (tensor(b, i) for i in range(config.n_layers) for b in TENSORS if b not in OUTER)
    return {t.name: t for t in (tensor("embed"), *inner, tensor("norm"), tensor("unembed"))}


def stream(source: Source, use: Callable[[Tensor, int, np.ndarray], Any]) -> list:
    """Calls `use` with every piece (tensor, first row, float32 numbers), some at once; its results.

    Raises ValueError at the end if numbers were not finite, naming all of their tensors.
    """
    bad: dict[str, int] = {}

    def move(piece: tuple[Tensor, slice]) -> Any:  # noqa: ANN401 - whatever `use` returns
        tensor, rows = piece
        x = source.read(tensor.name, rows)
        with np.errstate(invalid="ignore", over="ignore"):
            finite = np.isfinite(x.sum())  # a quarter of the time of looking at each number
        if not finite and (n := int((~np.isfinite(x)).sum())):
            bad[tensor.hf] = bad.get(tensor.hf, 0) + n
        return use(tensor, rows.start, x)

    pieces = [(t, rows) for t in tensors(source.config).values() for rows in t.blocks()]
    with ThreadPoolExecutor(THREADS) as pool:
        results = list(track(pool.map(move, pieces), "tensors", len(pieces)))
    refuse([f"{name}: {n} numbers are NaN or infinite" for name, n in sorted(bad.items())])
    return results


def open_model(path: Path) -> Source:
    """Opens either format; a run has a config.json of its own, but checkpoints beside it."""
    from tools import leaves, shards

    is_hf = (path / "config.json").is_file() and not (path / "checkpoints").is_dir()
    return shards.open_hf(path) if is_hf else leaves.open_checkpoint(path)


def load_hf(folder: Path, **overrides: Any) -> olmo3.Olmo3:  # noqa: ANN401
    """Reads a Hugging Face folder into memory; `overrides` replace fields of its configuration."""
    from tools import parity, shards

    source = shards.open_hf(folder)
    return parity.build_model(dataclasses.replace(source.config, **overrides), source.read)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder under a temporary name, which takes its own when the body has succeeded."""
    if out.exists():
        raise ValueError(f"out={out} exists already; remove it or choose another name")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def from_hf(
    source: tyro.conf.Positional[str],
    out: tyro.conf.Positional[Path],
    revision: str | None = None,
    with_optimizer: bool = False,
    check: bool = True,
) -> None:
    """Converts a Hugging Face folder or hub id to a folder with our checkpoint, of step 0.

    Args:
        source: A folder, or owner/name on the hub.
        out: New folder; give it to `train.py --init`.
        revision: Branch or tag on the hub, such as stage1-step1000.
        with_optimizer: Adds a fresh Adam state, as a checkpoint of a run has one.
        check: Compares what was written with what was read.
    """
    from tools import leaves, parity, shards

    model = shards.open_hf(shards.locate(source, revision))
    config, adam = model.config, leaves.Adam() if with_optimizer else None
    print(f"windows {config.windows} repeat over {config.n_layers} layers")
    origin: dict[str, Any] = {"from": source, "revision": revision, "dtype": model.dtype}
    origin["padding_rows"] = [config.tokenizer_size, config.vocab_size]
    origin["padding"] = "mean of the others"
    with new_folder(out) as partial:
        leaves.write_checkpoint(partial, model, {"converted": origin}, adam=adam)
        if check:
            parity.verify_written(model, partial, "float32")
    print(f"{out}: {olmo3.n_parameters(config):,} parameters in float32, from {model.dtype}")


def to_hf(  # noqa: PLR0913 - one flag each
    checkpoint: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    dtype: Literal["bf16", "fp32"] = "bf16",
    tokenizer: Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    check: bool = True,
) -> None:
    """Converts our checkpoint to a folder that transformers loads.

    Args:
        checkpoint: A run, its folder of checkpoints (the newest counts), or one step.
        out: New folder.
        dtype: What weights are stored in; fp32 is exact.
        tokenizer: Folder with tokenizer files to copy; by default those the checkpoint came with.
        max_shard_bytes: Largest file; where more are needed there is an index.
        check: Compares what was written with the checkpoint.
    """
    from tools import parity, shards

    model, kind = open_model(checkpoint), {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    if tokenizer is not None and not tokenizer.is_dir():
        raise FileNotFoundError(f"tokenizer={tokenizer}: no such folder")
    model = model._replace(companions=tokenizer or model.companions)
    with new_folder(out) as partial:
        shards.write_hf(partial, model, kind, max_shard_bytes)
        if check:
            parity.verify_written(model, partial, kind)
    print(f"{out}: {kind}, vocabulary cut to {model.config.tokenizer_size}")
    if model.config.yarn is not None:
        print("long context: use transformers 4.57 or >= 5.13; 5.0 to 5.12 scale every layer")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    from tools import distcp, parity

    commands = {"from-hf": from_hf, "from-core": distcp.from_core, "to-hf": to_hf}
    commands |= {"check": parity.check, "average": parity.average, "info": parity.info}
    about = (__doc__ or "").split("\n\nA model")[0]
    try:
        tyro.extras.subcommand_cli_from_dict(commands, args=arguments, description=about)
    except (ValueError, OSError, parity.CheckFailed) as error:
        code = 2 if isinstance(error, (ValueError, FileNotFoundError)) else 1
        for line in str(error).splitlines():
            print(f"{'error' if code == 2 else 'failed'}: {line}", file=sys.stderr)
        return code
    return 0


if __name__ == "__main__":
    import convert  # as tools/ do: one copy of this module, not two

    sys.exit(convert.main())
