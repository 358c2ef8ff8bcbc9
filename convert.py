"""Published OLMo 3 checkpoints to ours and back: streamed, checked, averaged, described.

    python convert.py from-hf SRC OUT      Hugging Face folder or hub id -> our checkpoint
    python convert.py from-core SRC OUT    OLMo-core's own checkpoint, Adam state included -> ours
    python convert.py to-hf CKPT OUT       our checkpoint -> a folder that transformers loads
    python convert.py check A B            two models of either format, block by block, on real text
    python convert.py average A B --out D  the mean of several, as the 32B recipe takes it
    python convert.py info X               configuration, counts, and the norm of every tensor

A model on disk is a `Source`: a configuration and a function that reads one tensor, or rows of it.
Everything moves tensor by tensor, so memory does not grow with depth. Names are ours by layer:
`layers.5.attn.w_q` is `blocks[5 % period].attn.w_q` at 5 // period of a checkpoint and
`model.layers.5.self_attn.q_proj.weight` of a Hugging Face folder.

Axis letters: B sequences, S positions, P positions of all sequences; of weights as in olmo3.py.
Exit codes: 0 done; 1 a check or the machine failed; 2 the input is at fault, a line per fault.
A result has its name only when it is whole and checked; until then it is `OUT.partial`.

Sources: OLMo-core nn/hf/convert.py:183 (names), nn/hf/config.py:87 (config); transformers 5.24.0
configuration_olmo3.py, modeling_rope_utils.py; safetensors README; Orbax 0.12 (_METADATA).
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import pickle
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import tensorstore as ts
import tyro
from einops import rearrange
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Float64, Int32, Shaped

import olmo3
import train
from tools import checkpoints

# Our name -> Hugging Face's, OLMo-core's, their layout -> ours; linear layers are (out, in) there.
LAYER_TENSORS = {
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
}
OUTER_TENSORS = {
    "embed": ("model.embed_tokens", "embeddings", "V D -> V D"),
    "norm": ("model.norm", "lm_head.norm", "D -> D"),
    "unembed": ("lm_head", "lm_head.w_out", "V D -> V D"),
}
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
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}
FIXED = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
DTYPES = {"BF16": np.dtype(jnp.bfloat16), "F16": np.dtype("f2"), "F32": np.dtype("f4")}
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
COMPANIONS = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|chat_temp|generation).*"
)
BLOCK = 2**24  # numbers that move at a time where a tensor can be cut: 64 MiB


class CheckFailed(Exception):
    """Two models that should be one are not; one finding per line."""


class Source(NamedTuple):
    """A model on disk, in whatever format."""

    config: olmo3.ModelConfig
    dtype: str  # what the weights are stored in; the coarsest where they differ
    read: Callable[..., Float32[np.ndarray, "..."]]  # by our name, in our layout; a slice cuts rows
    kept: dict  # fields of a Hugging Face config.json that the model does not need, but others do
    companions: Path  # where tokenizer files lie, if there are any


def progress(items: Iterable[Any], what: str) -> Iterable[Any]:
    """The items, with a bar on a terminal."""
    console = rich.console.Console(stderr=True)
    return rich.progress.track(list(items), what, console=console, disable=not sys.stderr.isatty())


def refuse(problems: list[str]) -> None:
    """Raises ValueError with a problem per line, if there is one."""
    if problems:
        raise ValueError("\n".join(problems))


def read_json(file: Path) -> dict:
    """A JSON file; what is none is an error that names it."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); fetch it again") from error


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
        raise ValueError(
            f"rope_parameters.sliding_attention={sliding}: OLMo 3 does not scale sliding layers;"
            " keep the scaling in full_attention"
        )
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
        raise ValueError(
            f"layer_types={kinds}: num_hidden_layers={n} times full_ or sliding_attention"
        )
    if window is None and "sliding_attention" in kinds:
        raise ValueError(
            "sliding_window=null but layers slide: give it, or make layer_types all full"
        )
    windows = tuple(window if k == "sliding_attention" else None for k in kinds)
    return next(
        windows[:p] for p in range(1, n + 1) if n % p == 0 and windows[:p] * (n // p) == windows
    )


def config_from_hf(hf: dict) -> olmo3.ModelConfig:
    """Reads a Hugging Face config.json; raises ValueError with every reason why it cannot."""
    hf = {"num_key_value_heads": hf.get("num_attention_heads")} | hf
    fixed = {"clip_qkv": None, **FIXED}
    problems = [
        f"{key}={hf[key]!r}: OLMo 3 has {want!r}, and nothing else converts"
        for key, want in fixed.items()
        if hf.get(key, want) != want
    ]
    if hf.get("model_type") != "olmo3":
        problems.append(f"model_type={hf.get('model_type')!r}: only olmo3 converts")
    problems += [
        f"{key} is missing, and has no safe default" for key in SIZES if hf.get(key) is None
    ]
    refuse(problems)
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
        hf["rope_parameters"] = {
            "full_attention": {**plain, **(scaling or {})},
            "sliding_attention": plain,
        }
    return hf | dict.fromkeys(KEPT) | {"max_position_embeddings": context} | kept


def tensor_names(config: olmo3.ModelConfig) -> Iterator[str]:
    """Our name of every tensor, in the order of a forward pass."""
    yield "embed"
    for layer in range(config.n_layers):
        yield from (f"layers.{layer}.{below}" for below in LAYER_TENSORS)
    yield from ("norm", "unembed")


def split_name(name: str) -> tuple[int, str]:
    """Layer and name below it; -1 for what is in no layer."""
    if name in OUTER_TENSORS:
        return -1, name
    _, layer, below = name.split(".", 2)
    return int(layer), below


def in_hf(name: str) -> tuple[str, str]:
    """A tensor's Hugging Face name, and its layout there -> ours."""
    layer, below = split_name(name)
    theirs, _, layout = (LAYER_TENSORS | OUTER_TENSORS)[below]
    return f"model.layers.{layer}.{theirs}.weight" if layer >= 0 else f"{theirs}.weight", layout


def in_core(name: str) -> str:
    """A tensor's OLMo-core name."""
    layer, below = split_name(name)
    theirs = (LAYER_TENSORS | OUTER_TENSORS)[below][1]
    return f"blocks.{layer}.{theirs}.weight" if layer >= 0 else f"{theirs}.weight"


def in_checkpoint(config: olmo3.ModelConfig, name: str) -> tuple[str, tuple[int, ...]]:
    """The leaf of a checkpoint that holds a tensor, and the index of the tensor in it."""
    layer, below = split_name(name)
    repeat, place = divmod(layer, len(config.windows))
    return (below, ()) if layer < 0 else (f"blocks.{place}.{below}", (repeat,))


def axis_sizes(config: olmo3.ModelConfig, layout: str, vocab_size: int) -> dict[str, int]:
    """Length of the axis letters that a layout has."""
    sizes = {"D": config.d_model, "N": config.n_heads, "K": config.n_kv_heads, "H": config.d_head}
    sizes |= {"F": config.d_ff, "V": vocab_size}
    return {letter: size for letter, size in sizes.items() if letter in layout}


def our_shape(config: olmo3.ModelConfig, name: str) -> tuple[int, ...]:
    """Shape of one layer's tensor in our layout, vocabulary padded."""
    layout = in_hf(name)[1].split(" -> ")[1]
    sizes = axis_sizes(config, layout, config.vocab_size)
    return tuple(sizes[letter] for letter in layout.split())


def hf_shape(config: olmo3.ModelConfig, name: str) -> tuple[int, ...]:
    """Shape of a tensor in a Hugging Face folder, vocabulary not padded: `(N H) D` has two axes."""
    layout = in_hf(name)[1].split(" -> ")[0]
    sizes = axis_sizes(config, layout, config.tokenizer_size)
    groups = re.findall(r"\(.*?\)|\w", layout)
    return tuple(math.prod(sizes[letter] for letter in re.findall(r"\w", g)) for g in groups)


def block_rows(shape: tuple[int, ...]) -> int:
    """Rows of a tensor that make up one block."""
    return max(1, min(shape[0], BLOCK // math.prod(shape[1:])))


def pieces(source: Source) -> Iterator[tuple[str, int, Float32[np.ndarray, "..."]]]:
    """Every tensor as (name, first row, numbers), those with a row per token in blocks of rows.

    Raises ValueError at the end if numbers were not finite, naming all of their tensors.
    """
    bad: dict[str, int] = {}
    for name in progress(tensor_names(source.config), "tensors"):
        shape = our_shape(source.config, name)
        step = block_rows(shape) if name in OUTER_TENSORS else shape[0]
        for start in range(0, shape[0], step):
            x = source.read(name, slice(start, min(start + step, shape[0])))
            with np.errstate(invalid="ignore", over="ignore"):
                finite = np.isfinite(x.sum())  # a quarter of the time of looking at each number
            if not finite and (n := int((~np.isfinite(x)).sum())):
                bad[name] = bad.get(name, 0) + n
            yield name, start, x
    refuse([f"{in_hf(name)[0]}: {n} numbers are NaN or infinite" for name, n in bad.items()])


class Slot(NamedTuple):
    """Where the numbers of a tensor lie in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def rows(self, start: int, stop: int) -> Shaped[np.ndarray, "..."]:
        """Reads some rows; not a memory map, whose pages would count as ours."""
        shape, dtype = (max(0, stop - start), *self.shape[1:]), DTYPES[self.dtype]
        offset = self.offset + start * math.prod(shape[1:]) * dtype.itemsize
        return np.fromfile(self.file, dtype, math.prod(shape), offset=offset).reshape(shape)


def read_header(file: Path) -> dict[str, Slot]:
    """The tensors of a safetensors file, once it is sure that they tile it exactly.

    Eight bytes of little-endian length, that much JSON, then the numbers without gaps.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        n = int.from_bytes(f.read(8), "little")
        if n > size - 8:
            raise ValueError(f"{file}: {size} bytes, but its header needs {8 + n}; fetch it again")
        try:
            header = json.loads(f.read(n))
        except ValueError as error:
            raise ValueError(f"{file}: not a safetensors file, its header is no JSON") from error
    header.pop("__metadata__", None)
    slots, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (start, stop), dtype, shape = entry["data_offsets"], entry["dtype"], tuple(entry["shape"])
        if start != end:
            fault = "overlaps the tensor before" if start < end else "leaves a gap"
            raise ValueError(f"{file}: {name} starts at {start}, not {end}: it {fault}")
        if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{file}: {name} has {stop - start} bytes for {dtype} {list(shape)}")
        slots[name], end = Slot(file, dtype, shape, 8 + n + start), stop
    if size != 8 + n + end:
        raise ValueError(f"{file}: {size} bytes, its header promises {8 + n + end}; fetch it again")
    return slots


def list_tensors(folder: Path) -> dict[str, Slot]:
    """All tensors of a folder; raises with every fault of its files and of its index."""
    files = {f.name: f for f in sorted(folder.glob("*.safetensors"))}
    index = folder / "model.safetensors.index.json"
    wanted = read_json(index).get("weight_map", {}) if index.is_file() else {}
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors in it; other formats are not read")
    if len(files) > 1 and not wanted:
        raise ValueError(f"{folder}: {len(files)} safetensors files but no {index.name}; add it")
    shards = set(wanted.values()) or set(files)
    problems = [f"{index}: names {n}, which is not there" for n in sorted(shards - set(files))]
    problems += [f"{files[n]}: not in the index; remove it" for n in sorted(set(files) - shards)]
    slots: dict[str, Slot] = {}
    for file in files.values():
        try:
            new = read_header(file)
        except ValueError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{file}: {n} is in {slots[n].file} as well" for n in sorted(new.keys() & slots)
        ]
        slots |= new
        promised = {n for n, shard in wanted.items() if shard == file.name}
        problems += [f"{index}: {n} is not in {file.name}" for n in sorted(promised - new.keys())]
    refuse(problems)
    return slots


def contiguous(x: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """A row-major copy in strips of about 128 numbers: three times as fast as numpy's own."""
    if x.flags.c_contiguous:
        return x
    out, step = np.empty(x.shape, x.dtype), max(1, 128 // math.prod(x.shape[2:]))
    for i in range(0, x.shape[1], step):
        out[:, i : i + step] = x[:, i : i + step]
    return out


def coarsest(dtypes: Iterable[np.dtype]) -> str:
    """The name of the dtype with the largest rounding unit."""
    return max(dtypes, key=lambda d: float(jnp.finfo(d).eps)).name


def open_hf(folder: Path) -> Source:
    """Opens a Hugging Face folder; raises with every missing, unexpected or unfit tensor."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder}: no config.json; give a Hugging Face folder or a checkpoint"
        )
    hf = read_json(folder / "config.json")
    config = config_from_hf(hf)
    slots, names = list_tensors(folder), {in_hf(n)[0]: n for n in tensor_names(config)}
    problems = [f"{n}: missing from {folder}" for n in sorted(names.keys() - slots)]
    problems += [f"{n}: unexpected in {slots[n].file}" for n in sorted(slots.keys() - names)]
    for n in sorted(names.keys() & slots):
        want = hf_shape(config, names[n])
        if slots[n].shape != want:
            problems.append(f"{n}: {slots[n].file} has {slots[n].shape}, config.json means {want}")
        if slots[n].dtype not in DTYPES:
            problems.append(f"{n}: dtype {slots[n].dtype}; only {', '.join(DTYPES)} are read")
    refuse(problems)

    @functools.cache
    def mean_row(slot: Slot) -> Float32[np.ndarray, " D"]:
        # A padding row's logit is then the mean logit, so by Jensen's inequality padding has at
        # most its share of rows in probability (0.07 % of OLMo 3's), for any input. Zero rows, of
        # logit 0 beside a normaliser that z-loss keeps near 0, could have nearly all of it.
        n, step, total = slot.shape[0], block_rows(slot.shape), np.zeros(config.d_model)
        for i in range(0, n, step):
            total += slot.rows(i, min(i + step, n)).astype(np.float32).sum(axis=0, dtype=np.float64)
        return (total / n).astype(np.float32)

    def read(name: str, rows: slice = slice(None)) -> Float32[np.ndarray, "..."]:
        theirs, layout = in_hf(name)
        slot = slots[theirs]
        start, stop, _ = rows.indices(our_shape(config, name)[0])
        if "V" not in layout:
            sizes = axis_sizes(config, layout, 0)
            x = rearrange(slot.rows(0, slot.shape[0]), layout, **sizes)
            return contiguous(x)[start:stop].astype(np.float32)
        x = slot.rows(start, min(stop, slot.shape[0])).astype(np.float32)
        if len(x) == stop - start:
            return x
        return np.concatenate([x, np.tile(mean_row(slot), (stop - start - len(x), 1))])

    dtype = coarsest(DTYPES[s.dtype] for s in slots.values())
    return Source(config, dtype, read, {k: hf[k] for k in KEPT if k in hf}, folder)


class Stub:
    """Stands for any class or function of a pickle and keeps what it was given; runs nothing."""

    def __init__(self, *arguments: Any):  # noqa: ANN401
        self.arguments = arguments

    def __setstate__(self, state: dict | tuple) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class TorchPickle(pickle.Unpickler):
    """Reads torch's pickles without torch, and safely: whatever they name becomes a Stub."""

    def find_class(self, module: str, name: str) -> type:
        return tuple if (module, name) == ("torch", "Size") else type(name, (Stub,), {})

    def persistent_load(self, pid: tuple) -> tuple:
        return pid


class Chunk(NamedTuple):
    """One process's part of a tensor in a torch.distributed checkpoint."""

    file: Path
    offset: int
    length: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def read(self) -> Float32[np.ndarray, "..."]:
        """Reads the part, a torch.save archive in the middle of the file."""
        with self.file.open("rb") as f:
            f.seek(self.offset)
            archive = zipfile.ZipFile(io.BytesIO(f.read(self.length)))
        pickled = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        tensor: Any = TorchPickle(archive.open(pickled)).load()
        (_, storage, key, *_), offset, shape, stride = tensor.arguments[:4]  # _rebuild_tensor_v2
        if storage.__name__ != "FloatStorage":
            raise ValueError(f"{self.file}: holds {storage.__name__}; only float32 is read")
        raw = archive.read(pickled.replace("data.pkl", f"data/{key}"))
        strides = [4 * step for step in stride]
        return np.lib.stride_tricks.as_strided(np.frombuffer(raw, "<f4")[offset:], shape, strides)


def list_chunks(folder: Path) -> dict[str, list[Chunk]]:
    """The parts of every tensor of a torch.distributed checkpoint (spec 8.1), by its keys."""
    with (folder / ".metadata").open("rb") as f:
        about: Any = TorchPickle(f).load()
    shapes = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, tensor in about.state_dict_metadata.items()
        for chunk in getattr(tensor, "chunks", ())  # what is not a tensor has none
    }
    chunks: dict[str, list[Chunk]] = {}
    for index, at in about.storage_data.items():
        start = tuple(getattr(index, "offset", None) or ())
        file = folder / at.relative_path
        if (index.fqn, start) not in shapes:
            continue
        if not file.is_file() or file.stat().st_size < at.offset + at.length:
            raise ValueError(f"{file}: {index.fqn} needs {at.offset + at.length} bytes of it")
        chunk = Chunk(file, at.offset, at.length, start, shapes[index.fqn, start])
        chunks.setdefault(index.fqn, []).append(chunk)
    return chunks


def open_core(
    folder: Path, chunks: dict[str, list[Chunk]], hf: dict, kind: str = "model.{}"
) -> Source:
    """Opens the weights of OLMo-core's own checkpoint, or an Adam moment of them by its key's form.

    The configuration is that of a Hugging Face export; the tables here have their padding.
    """
    config, problems = config_from_hf(hf), []
    padded = dataclasses.replace(config, tokenizer_size=config.vocab_size)
    for name in tensor_names(config):
        key, shape = kind.format(in_core(name)), hf_shape(padded, name)
        parts = chunks.get(key, [])
        ends = zip(*(np.add(p.start, p.shape).tolist() for p in parts), strict=True)
        end = tuple(map(max, ends))
        if end != shape or sum(math.prod(p.shape) for p in parts) != math.prod(shape):
            problems.append(f"{key}: {len(parts)} parts up to {end} in {folder}, not {shape}")
    refuse(problems)

    def read(name: str, rows: slice = slice(None)) -> Float32[np.ndarray, "..."]:
        shape, layout = hf_shape(padded, name), in_hf(name)[1]
        wanted = rows if "V" in layout else slice(None)
        low, high, _ = wanted.indices(shape[0])
        out = np.empty((high - low, *shape[1:]), np.float32)
        for part in chunks[kind.format(in_core(name))]:
            first, last = part.start[0], part.start[0] + part.shape[0]
            a, b = max(first, low), min(last, high)
            if a < b:
                rest = (
                    slice(o, o + n) for o, n in zip(part.start[1:], part.shape[1:], strict=True)
                )
                out[(slice(a - low, b - low), *rest)] = part.read()[a - first : b - first]
        if "V" in layout:
            return out
        return contiguous(rearrange(out, layout, **axis_sizes(config, layout, 0)))[rows]

    return Source(config, "float32", read, {k: hf[k] for k in KEPT if k in hf}, folder)


def open_array(folder: Path, leaf: str, **create: Any) -> ts.TensorStore:  # noqa: ANN401
    """One array of an Orbax item, in Orbax's own format: Zarr 2 in an OCDBT store."""
    store = {"driver": "ocdbt", "base": f"file://{folder.absolute()}/", "path": f"{leaf}/"}
    return ts.open({"driver": "zarr", "kvstore": store, **create}).result()


def open_checkpoint(path: Path) -> Source:
    """Opens our own checkpoint: a run, its folder of checkpoints (the newest), or a step."""
    folder, step = checkpoints.find_checkpoint(path)
    saved = checkpoints.saved_config(folder, step)
    config = checkpoints.model_config(saved)
    array = functools.cache(lambda leaf: open_array(folder / str(step) / "model", leaf))
    problems, dtypes = [], set()
    for name in tensor_names(config):
        leaf, index = in_checkpoint(config, name)
        try:
            shape = array(leaf)[index].shape
            dtypes.add(array(leaf).dtype.numpy_dtype)
        except (ValueError, IndexError):
            shape = None
        if shape != our_shape(config, name):
            problems.append(
                f"{name}: {path} has {shape}, its config means {our_shape(config, name)}"
            )
    refuse(problems)

    def read(name: str, rows: slice = slice(None)) -> Float32[np.ndarray, "..."]:
        leaf, index = in_checkpoint(config, name)
        start, stop, _ = rows.indices(our_shape(config, name)[0])
        return array(leaf)[index][start:stop].read().result().astype(np.float32, copy=False)

    kept = saved.get("huggingface", {})
    if data := saved.get("data"):
        kept = {f"{key}_token_id": data[f"{key}_id"] for key in ("bos", "eos", "pad")}
        kept |= {} if config.yarn else {"max_position_embeddings": data["sequence_length"]}
    return Source(config, coarsest(dtypes), read, kept, folder / "huggingface")


def open_model(path: Path) -> Source:
    """Opens either format; a run has a config.json of its own, but checkpoints beside it."""
    is_hf = (path / "config.json").is_file() and not (path / "checkpoints").is_dir()
    return open_hf(path) if is_hf else open_checkpoint(path)


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


def write_item(
    folder: Path,
    tree: Any,  # noqa: ANN401
    numbers: Iterable[tuple] | None = None,
    values: dict[str, int] | None = None,
) -> None:
    """Writes a pytree of shapes in the files that Orbax's StandardSave makes, a piece at a time.

    `numbers` are (leaf, index of a layer in it, first row, values), `values` those of scalars.
    Vectors and scalars that get none are zero; without `numbers` all is. The next piece is read
    while one is written.
    """
    is_empty = lambda x: isinstance(x, tuple) and not x  # noqa: E731 - such as optax.EmptyState
    arrays, metadata = {}, {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]:
        keys = [str(getattr(k, "name", getattr(k, "idx", None))) for k in path]
        types = [1 if isinstance(k, jax.tree_util.SequenceKey) else 2 for k in path]
        value: dict[str, Any] = {"value_type": "None", "skip_deserialize": True}
        if not is_empty(leaf):
            value = {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": leaf.shape,
            }
            # No two layers share a chunk. The compressor sorts bits by place: float32 from bfloat16
            # takes a fifth of the time of Orbax's zstd, and 38 % of the size instead of 48 %.
            stack = (1,) if "blocks" in keys else ()
            inner = leaf.shape[len(stack) :]
            layout = {
                "shape": leaf.shape,
                "chunks": (*stack, block_rows(inner), *inner[1:]) if inner else (),
                "dtype": np.dtype(leaf.dtype).str,
                "fill_value": 0,
                "compressor": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 2},
            }
            name, options = ".".join(keys), {"store_data_equal_to_fill_value": True}
            arrays[name] = open_array(folder, name, create=True, metadata=layout, **options)
            if numbers is None or len(leaf.shape) < 2:
                fill = np.asarray((values or {}).get(name, 0), leaf.dtype)
                n, rows = (leaf.shape[0], layout["chunks"][0]) if inner else (0, 1)
                cuts = [slice(i, min(i + rows, n)) for i in range(0, n, rows)] or [...]
                for cut in cuts:  # what is written at once is in memory at once
                    arrays[name][cut].write(fill).result()
        pairs = [{"key": k, "key_type": t} for k, t in zip(keys, types, strict=True)]
        metadata[str(tuple(keys))] = {"key_metadata": pairs, "value_metadata": value}
    writing = []
    try:
        for leaf, index, start, x in numbers or ():
            while writing:
                writing.pop().result()
            writing.append(arrays[leaf][index][start : start + len(x)].write(x))
    finally:  # a write that goes on would bring back the files that a failure removes
        while writing:
            writing.pop().result()
    about = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    text = json.dumps({"tree_metadata": metadata, **about, "custom_metadata": None})
    (folder / "_METADATA").write_text(text)


class Adam(NamedTuple):
    """The optimizer's state to write beside a model."""

    updates: int = 0
    moments: tuple[Source, Source] | None = None  # first and second; None are zero


def write_checkpoint(
    out: Path, source: Source, origin: dict, step: int = 0, adam: Adam | None = None
) -> None:
    """Writes a folder of checkpoints with one in it, as train.py does."""
    config, folder = source.config, out / str(step)
    with jax.set_mesh(olmo3.make_mesh(devices=jax.devices()[:1])):
        model = jax.eval_shape(lambda: olmo3.Olmo3(config, jax.random.key(0)))
        state = jax.eval_shape(train.make_optimizer(train.OptimConfig()).init, model)

    def numbers(source: Source, prefix: str = "") -> Iterator[tuple]:
        for name, start, x in pieces(source):
            leaf, index = in_checkpoint(config, name)
            yield prefix + leaf, index, start, x

    write_item(folder / "model", model, numbers(source))
    handlers = {"model": "standard_checkpoint_handler.StandardCheckpointHandler"}
    if adam is not None:
        values, moments = {"1": step, "0.inner.0.count": adam.updates}, None
        if adam.moments is not None:
            mu, nu = adam.moments
            moments = itertools.chain(numbers(mu, "0.inner.0.mu."), numbers(nu, "0.inner.0.nu."))
        tree = (state, jax.ShapeDtypeStruct((), np.int32))
        write_item(folder / "optimizer", tree, moments, values)
        handlers["optimizer"] = handlers["model"]
    handlers["config"] = "json_checkpoint_handler.JsonCheckpointHandler"
    saved = {"model": dataclasses.asdict(config), "huggingface": source.kept, "converted": origin}
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(saved, indent=2))
    names = {item: f"orbax.checkpoint._src.handlers.{name}" for item, name in handlers.items()}
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": names}))
    copy_companions(source, out / "huggingface")


def copy_companions(source: Source, out: Path) -> None:
    """Copies tokenizer and generation files if there are any; no conversion needs them."""
    for file in sorted(source.companions.glob("*")):
        if COMPANIONS.fullmatch(file.name) and file.suffix in (".json", ".txt", ".jinja"):
            out.mkdir(exist_ok=True)
            shutil.copyfile(file, out / file.name)


def plan_files(out: Path, config: olmo3.ModelConfig, dtype: str, limit: int) -> dict[str, Slot]:
    """Makes safetensors files of at most `limit` bytes, all but the numbers, and their index."""
    tag = next(tag for tag, known in DTYPES.items() if known.name == dtype)
    files: list[dict[str, tuple]] = [{}]
    end = total = 0
    for name in tensor_names(config):
        shape = hf_shape(config, name)
        n_bytes = math.prod(shape) * DTYPES[tag].itemsize
        if end + n_bytes > limit and files[-1]:
            files.append({})
            end = 0
        files[-1][in_hf(name)[0]] = (shape, end, end + n_bytes)
        end, total = end + n_bytes, total + n_bytes
    slots: dict[str, Slot] = {}
    for i, tensors in enumerate(files, 1):
        part = "" if len(files) == 1 else f"-{i:05}-of-{len(files):05}"
        file = out / f"model{part}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, (shape, start, stop) in tensors.items():
            header[name] = {"dtype": tag, "shape": shape, "data_offsets": [start, stop]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the numbers start at a multiple of 8
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        for name, (shape, start, _) in tensors.items():
            slots[name] = Slot(file, tag, shape, 8 + len(text) + start)
    if len(files) > 1:
        weights = {name: slot.file.name for name, slot in slots.items()}
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2)
        (out / "model.safetensors.index.json").write_text(index)
    return slots


def write_hf(out: Path, source: Source, dtype: str, limit: int) -> None:
    """Writes a Hugging Face folder, the padding cut off the vocabulary."""
    config = source.config
    hf = config_to_hf(config, source.kept, dtype)
    (out / "config.json").write_text(json.dumps(hf, indent=2))
    ids = {k: v for k, v in hf.items() if k.endswith("token_id") and v is not None}
    (out / "generation_config.json").write_text(json.dumps(ids, indent=2))
    copy_companions(source, out)
    slots = plan_files(out, config, dtype, limit)
    for name, start, x in pieces(source):
        theirs, layout = in_hf(name)
        slot = slots[theirs]
        if "V" in layout:
            x = x[: max(0, config.tokenizer_size - start)]
        back = " -> ".join(reversed(layout.split(" -> ")))
        y = contiguous(rearrange(x.astype(DTYPES[slot.dtype]), back))
        with slot.file.open("r+b") as f:
            f.seek(slot.offset + start * math.prod(slot.shape[1:]) * y.itemsize)
            y.tofile(f)


def build_model(config: olmo3.ModelConfig, read: Callable) -> olmo3.Olmo3:
    """A model in memory, sharded for the mesh in force, from a function that reads one tensor."""
    wanted = jax.eval_shape(lambda: olmo3.Olmo3(config, jax.random.key(0)))
    period = len(config.windows)

    def leaf(path: tuple, want: jax.ShapeDtypeStruct) -> Array:
        name = ".".join(str(getattr(p, "name", getattr(p, "idx", ""))) for p in path)
        if name in OUTER_TENSORS:
            value = read(name)
        else:
            _, place, below = name.split(".", 2)
            layers = range(int(place), config.n_layers, period)
            value = np.stack([read(f"layers.{i}.{below}") for i in layers])
        assert want.sharding is not None
        return jax.device_put(value, NamedSharding(jax.sharding.get_mesh(), want.sharding.spec))

    return jax.tree_util.tree_map_with_path(leaf, wanted)


def load_hf(folder: Path, **overrides: Any) -> olmo3.Olmo3:  # noqa: ANN401
    """Reads a Hugging Face folder into memory; `overrides` replace fields of its configuration."""
    source = open_hf(folder)
    return build_model(dataclasses.replace(source.config, **overrides), source.read)


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
    step = block_rows((source.config.vocab_size, source.config.d_model))
    for block in np.unique(ids // step):
        here = ids // step == block
        rows = source.read("embed", slice(block * step, (block + 1) * step))
        out[here] = rows[ids[here] % step]
    return out


def head(source: Source, hidden: Float32[np.ndarray, "P D"], n: int) -> Float32[np.ndarray, "P V"]:
    """Logits of the first `n` ids, a block of the head at a time."""
    out, step = np.empty((len(hidden), n), np.float32), block_rows((n, source.config.d_model))
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
        refuse(found)
    return found


def compare(a: Source, b: Source, tokens: Int32[np.ndarray, "B S"]) -> Report:
    """Runs two models side by side in float32, one block of one of them in memory at a time."""
    config = config_differences(a.config, b.config)
    n_vocab = min(a.config.tokenizer_size, b.config.tokenizer_size)
    x, y = read_rows(a, tokens), read_rows(b, tokens)
    hidden, blocks = [x, y], [relative(x, y)]
    mesh = olmo3.make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        for layer in progress(range(a.config.n_layers), "checking"):
            new_x, hidden[0] = run_block(a, layer, x)
            new_y, hidden[1] = run_block(b, layer, y)
            blocks.append(relative(new_x - x, new_y - y))
            x, y = new_x, new_y
    targets, step = np.roll(tokens, -1, axis=1).reshape(-1), max(1, BLOCK // 2 // n_vocab)
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
    figures = (
        float(max_logit.max()),
        float(kl.mean()),
        float(kl.max()),
        int(same.sum()),
        same.size,
    )
    return Report(config, blocks, *figures, worst)


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
    verify(source, open_model(written), check_tokens(source.config, None, *sizes), dtype)


def locate(source: str, revision: str | None) -> Path:
    """A folder as it is; a hub id `owner/name` downloaded."""
    if Path(source).exists():
        if revision:
            raise ValueError(
                f"revision={revision}: {source} is a folder; only hub ids have revisions"
            )
        return Path(source)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise FileNotFoundError(f"{source}: no such folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"{source}: no such folder, and a hub id needs huggingface_hub; pip install -e '.[hub]'"
        ) from None
    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))


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
    model = open_hf(locate(source, revision))
    config = model.config
    print(f"windows {config.windows} repeat over {config.n_layers} layers")
    origin = {"from": source, "revision": revision, "dtype": model.dtype}
    origin |= {
        "padding_rows": [config.tokenizer_size, config.vocab_size],
        "padding": "mean of the others",
    }
    with new_folder(out) as partial:
        write_checkpoint(partial, model, origin, adam=Adam() if with_optimizer else None)
        if check:
            verify_written(model, partial, "float32")
    print(f"{out}: {olmo3.n_parameters(config):,} parameters in float32, from {model.dtype}")


def from_core(
    source: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    config: Path,
    check: bool = True,
) -> None:
    """Converts OLMo-core's own (torch.distributed) checkpoint, Adam state included, without torch.

    Args:
        source: The folder stepN, or the one in it with `.metadata`.
        out: New folder; `train.py --init` takes weights, moments and their counter from it.
        config: config.json of a Hugging Face export of the same model.
        check: Compares what was written with what was read.
    """
    folder = source if (source / ".metadata").is_file() else source / "model_and_optim"
    if not (folder / ".metadata").is_file() or not config.is_file():
        raise FileNotFoundError(f"{source}: no .metadata in it, or no file config={config}")
    hf = read_json(config)
    chunks, adam = list_chunks(folder), None
    model = open_core(folder, chunks, hf)
    steps = [key for key in chunks if re.fullmatch(r"optim\.state\..*\.step", key)]
    counts = {float(chunks[key][0].read()) for key in steps}
    if len(counts) > 1:
        raise ValueError(f"{folder}: Adam's counters differ between parameters: {sorted(counts)}")
    if counts:
        kinds = ("optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq")
        mu, nu = (open_core(folder, chunks, hf, kind) for kind in kinds)
        adam = Adam(int(counts.pop()), (mu, nu))
    step = int((re.findall(r"step(\d+)", str(folder.absolute())) or [0])[-1])
    with new_folder(out) as partial:
        write_checkpoint(partial, model, {"from": str(source)}, step, adam)
        if check:
            verify_written(model, partial, "float32")
    what = "no optimizer state" if adam is None else f"Adam after {adam.updates} updates"
    print(f"{out}: {olmo3.n_parameters(model.config):,} parameters of step {step}, {what}")


@dataclasses.dataclass(frozen=True)
class Export:
    """How a Hugging Face folder is written."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """What weights are stored in; fp32 is exact."""
    tokenizer: Path | None = None
    """Folder with tokenizer files to copy; by default those that came with the checkpoint."""
    max_shard_bytes: int = 5_000_000_000
    """Largest file; where more are needed there is an index."""
    check: bool = True
    """Compares what was written with the checkpoint."""


def to_hf(
    checkpoint: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    export: tyro.conf.OmitArgPrefixes[Export] = Export(),
) -> None:
    """Converts our checkpoint to a folder that transformers loads.

    Args:
        checkpoint: A run, its folder of checkpoints (the newest counts), or one step.
        out: New folder.
    """
    model = open_model(checkpoint)
    if export.tokenizer is not None:
        if not export.tokenizer.is_dir():
            raise FileNotFoundError(f"tokenizer={export.tokenizer}: no such folder")
        model = model._replace(companions=export.tokenizer)
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[export.dtype]
    with new_folder(out) as partial:
        write_hf(partial, model, dtype, export.max_shard_bytes)
        if export.check:
            verify_written(model, partial, dtype)
    print(f"{out}: {dtype}, vocabulary cut to {model.config.tokenizer_size}")
    if model.config.yarn is not None:
        print("long context: use transformers 4.57 or >= 5.13; 5.0 to 5.12 scale every layer")


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
    one, two = open_model(a), open_model(b)
    window = max((w for w in one.config.windows if w is not None), default=0)
    shape = shape or (4, max(512, window + 128) if window < 1024 else 512)
    if shape[1] <= window:
        print(f"note: {shape[1]} positions do not reach the window of {window}; see --shape")
    apart = coarsest(np.dtype(d) for d in (one.dtype, two.dtype))
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
    sources = [open_model(m) for m in models]
    for model, other in zip(models[1:], sources[1:], strict=True):
        differences = config_differences(sources[0].config, other.config, "tokenizer_size")
        refuse([f"{model}: {d}" for d in differences])

    def read(name: str, rows: slice = slice(None)) -> Float32[np.ndarray, "..."]:
        total = sources[0].read(name, rows).astype(np.float64)
        for source in sources[1:]:
            total += source.read(name, rows)
        return (total / len(sources)).astype(np.float32)

    with new_folder(out) as partial:
        mean = sources[0]._replace(read=read)
        write_checkpoint(partial, mean, {"mean of": [str(m) for m in models]})
    print(f"{out}: the mean of {len(models)} models")


def info(model: tyro.conf.Positional[Path]) -> None:
    """Prints a model's configuration, its parameters by group, and the L2 norm of every tensor."""
    source = open_model(model)
    square: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, _, x in pieces(source):
        below = split_name(name)[1]
        group = "norms" if below.endswith("norm") else below.split(".")[0]
        counts[group] = counts.get(group, 0) + x.size
        square[name] = square.get(name, 0.0) + float(np.square(x, dtype=np.float64).sum())
    for field, value in dataclasses.asdict(source.config).items():
        print(f"{field:16} {value}")
    print(f"{'stored as':16} {source.dtype}\n")
    for group, n in (counts | {"total": sum(counts.values())}).items():
        print(f"{group:16} {n:16,}")
    print("\nlayer" + "".join(f"{below.split('.')[-1]:>10}" for below in LAYER_TENSORS))
    for layer in range(source.config.n_layers):
        norms = (math.sqrt(square[f"layers.{layer}.{below}"]) for below in LAYER_TENSORS)
        print(f"{layer:5}" + "".join(f"{norm:10.4g}" for norm in norms))
    print("  ".join(f"{name} {math.sqrt(square[name]):.4g}" for name in OUTER_TENSORS))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    commands = {"from-hf": from_hf, "from-core": from_core, "to-hf": to_hf}
    commands |= {"check": check, "average": average, "info": info}
    about = (__doc__ or "").split("\n\nA model")[0]
    try:
        tyro.extras.subcommand_cli_from_dict(commands, args=arguments, description=about)
    except (ValueError, FileNotFoundError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
    except (CheckFailed, OSError) as error:
        print("\n".join(f"failed: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
