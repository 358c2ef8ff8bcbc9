"""A Hugging Face folder as a source and as a target: safetensors files and what lies beside them.

A file is eight bytes of little-endian length, that much JSON, then the numbers without gaps. All is
checked before a number is read. No library maps the files: pages of a map would count as ours.

Source: the format's description in the README of the safetensors library.
"""

import functools
import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Float32, Shaped

import convert
import olmo3

DTYPES = {"BF16": np.dtype(jnp.bfloat16), "F16": np.dtype("f2"), "F32": np.dtype("f4")}
COMPANIONS = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|chat_temp|generation).*"
)
INDEX = "model.safetensors.index.json"


def read_json(file: Path) -> dict:
    """A JSON file; what is none is an error that names it."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); fetch it again") from error


class Slot(NamedTuple):
    """Where the numbers of a tensor lie in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def place(self, row: int) -> int:
        """The byte at which a row starts."""
        return self.offset + row * math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def read(self, start: int, stop: int) -> Shaped[np.ndarray, "..."]:
        """Some rows, as many as there are."""
        shape = (max(0, min(stop, self.shape[0]) - start), *self.shape[1:])
        offset, count = self.place(start), math.prod(shape)
        return np.fromfile(self.file, DTYPES[self.dtype], count, offset=offset).reshape(shape)

    def write(self, start: int, x: Shaped[np.ndarray, "..."]) -> None:
        """Writes rows where they belong."""
        with self.file.open("r+b") as f:
            f.seek(self.place(start))
            x.tofile(f)


def read_header(file: Path) -> dict[str, Slot]:
    """The tensors of a file, once it is sure that they tile it exactly."""
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


def list_slots(folder: Path) -> dict[str, Slot]:
    """All tensors of a folder; raises with every fault of its files and of its index."""
    files = {f.name: f for f in sorted(folder.glob("*.safetensors"))}
    index = folder / INDEX
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
        twice = sorted(new.keys() & slots)
        promised = {n for n, shard in wanted.items() if shard == file.name}
        problems += [f"{file}: {n} is in {slots[n].file} as well" for n in twice]
        problems += [f"{index}: {n} is not in {file.name}" for n in sorted(promised - new.keys())]
        slots |= new
    convert.refuse(problems)
    return slots


def make_files(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, limit: int
) -> dict[str, Slot]:
    """Makes files of at most `limit` bytes of numbers, all but the numbers, and their index."""
    tag = next(tag for tag, known in DTYPES.items() if known.name == dtype)
    files: list[dict[str, Any]] = [{}]
    end = total = 0
    for name, shape in shapes.items():
        n_bytes = math.prod(shape) * DTYPES[tag].itemsize
        if end + n_bytes > limit and files[-1]:
            files.append({})
            end = 0
        offsets = [end, end + n_bytes]
        files[-1][name] = {"dtype": tag, "shape": shape, "data_offsets": offsets}
        end, total = end + n_bytes, total + n_bytes
    slots: dict[str, Slot] = {}
    for i, header in enumerate(files, 1):
        part = "" if len(files) == 1 else f"-{i:05}-of-{len(files):05}"
        file = folder / f"model{part}.safetensors"
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)  # the numbers start at a multiple of 8
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        for name, entry in header.items():
            start = 8 + len(text) + entry["data_offsets"][0]
            slots[name] = Slot(file, tag, entry["shape"], start)
    if len(files) > 1:
        weights = {name: slot.file.name for name, slot in slots.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    return slots


def coarsest(dtypes: Iterable[np.dtype]) -> str:
    """The name of the dtype with the largest rounding unit."""
    return max(dtypes, key=lambda d: float(jnp.finfo(d).eps)).name


def row_major(x: Shaped[np.ndarray, "..."], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """Casts and copies, in strips of some 128 numbers: three times as fast as numpy's own way."""
    if x.flags.c_contiguous:
        return x.astype(dtype, copy=False)
    out, step = np.empty(x.shape, dtype), max(1, 128 // math.prod(x.shape[2:]))
    for i in range(0, x.shape[1], step):
        out[:, i : i + step] = x[:, i : i + step]
    return out


def from_theirs(tensor: convert.Tensor, x: Shaped[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """A tensor in our layout."""
    return row_major(rearrange(x, tensor.layout, **tensor.heads), DTYPES["F32"])


def to_theirs(
    tensor: convert.Tensor, x: Float32[np.ndarray, "..."], dtype: np.dtype
) -> Shaped[np.ndarray, "..."]:
    """A tensor of ours in the layout of linear layers elsewhere."""
    return row_major(rearrange(x, " -> ".join(reversed(tensor.layout.split(" -> ")))), dtype)


def hf_shapes(config: olmo3.ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a Hugging Face folder's tensors by their names there: without padding."""
    cut = (config.tokenizer_size, config.d_model)
    return {t.hf: cut if t.by_token else t.theirs for t in convert.tensors(config).values()}


def open_hf(folder: Path) -> convert.Source:
    """Opens a Hugging Face folder; raises with every missing, unexpected or unfit tensor."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder}: no {file.name}; give a Hugging Face folder or a checkpoint"
        )
    hf = read_json(file)
    config = convert.config_from_hf(hf)
    slots, shapes = list_slots(folder), hf_shapes(config)
    problems = [f"{n}: missing from {folder}" for n in sorted(shapes.keys() - slots)]
    problems += [f"{n}: unexpected in {slots[n].file}" for n in sorted(slots.keys() - shapes)]
    for n in sorted(shapes.keys() & slots):
        if slots[n].shape != shapes[n]:
            problems.append(
                f"{n}: {slots[n].file} has {slots[n].shape}, config.json means {shapes[n]}"
            )
        if slots[n].dtype not in DTYPES:
            problems.append(f"{n}: dtype {slots[n].dtype}; only {', '.join(DTYPES)} are read")
    convert.refuse(problems)

    @functools.cache
    def mean_row(name: str) -> Float32[np.ndarray, " D"]:
        # A padding row's logit is then the mean logit, so by Jensen's inequality padding has at
        # most its share of rows in probability (0.07 % of OLMo 3's), for any input. Zero rows, of
        # logit 0 beside a normaliser that z-loss keeps near 0, could have nearly all of it.
        tensor, total = convert.tensors(config)[name], np.zeros(config.d_model)
        for rows in tensor.blocks():
            x = slots[tensor.hf].read(rows.start, rows.stop).astype(np.float32)
            total += x.sum(axis=0, dtype=np.float64)
        return (total / config.tokenizer_size).astype(np.float32)

    def read(name: str, rows: slice = slice(None)) -> Float32[np.ndarray, "..."]:
        tensor = convert.tensors(config)[name]
        slot, (start, stop, _) = slots[tensor.hf], rows.indices(tensor.ours[0])
        if not tensor.by_token:
            return from_theirs(tensor, slot.read(0, slot.shape[0]))[start:stop]
        x = slot.read(start, stop).astype(np.float32)
        n_padding = stop - start - len(x)
        return np.concatenate([x, np.tile(mean_row(name), (n_padding, 1))]) if n_padding else x

    dtype = coarsest(DTYPES[slot.dtype] for slot in slots.values())
    return convert.Source(config, dtype, read, {k: hf[k] for k in convert.KEPT if k in hf}, folder)


def locate(source: str, revision: str | None) -> Path:
    """A folder as it is; a hub id `owner/name` downloaded."""
    if Path(source).exists() and revision:
        raise ValueError(f"revision={revision}: {source} is a folder; only hub ids have revisions")
    if Path(source).exists():
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


def copy_companions(source: convert.Source, out: Path) -> None:
    """Copies tokenizer and generation files if there are any; no conversion needs them."""
    for file in sorted(source.companions.glob("*")):
        if COMPANIONS.fullmatch(file.name) and file.suffix in (".json", ".txt", ".jinja"):
            out.mkdir(exist_ok=True)
            shutil.copyfile(file, out / file.name)


def write_hf(out: Path, source: convert.Source, dtype: str, limit: int) -> None:
    """Writes a Hugging Face folder, the padding cut off the vocabulary."""
    hf = convert.config_to_hf(source.config, source.kept, dtype)
    (out / "config.json").write_text(json.dumps(hf, indent=2))
    ids = {k: v for k, v in hf.items() if k.endswith("token_id") and v is not None}
    (out / "generation_config.json").write_text(json.dumps(ids, indent=2))
    copy_companions(source, out)
    slots = make_files(out, hf_shapes(source.config), dtype, limit)

    def write(tensor: convert.Tensor, start: int, x: Float32[np.ndarray, "..."]) -> None:
        slot = slots[tensor.hf]
        if tensor.by_token:
            x = x[: max(0, slot.shape[0] - start)]
        slot.write(start, to_theirs(tensor, x, DTYPES[slot.dtype]))

    convert.stream(source, write)
