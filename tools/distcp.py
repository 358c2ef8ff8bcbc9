"""OLMo-core's own checkpoints (torch.distributed, `.distcp`) as a source, without torch.

A folder stepN has model_and_optim/ with all tensors, in parts of many processes, and train/ with
what each process remembered, the place in the data among it (spec 8.1). Pickles are read by an
unpickler that runs nothing.
"""

import dataclasses
import io
import math
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from jaxtyping import Float32

import convert
import data
import olmo3
from tools import leaves, parity, shards


class Stub:
    """Stands for any class or function of a pickle and keeps what it was given; runs nothing."""

    def __init__(self, *arguments: Any):  # noqa: ANN401
        self.arguments = arguments

    def __setstate__(self, state: dict | tuple) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        """What stands for a kind of dict or list is asked to take items."""

    def append(self, item: Any) -> None:  # noqa: ANN401
        """Likewise."""


class TorchPickle(pickle.Unpickler):
    """Reads torch's pickles without torch, and safely: whatever they name becomes a Stub."""

    def find_class(self, module: str, name: str) -> type:
        known = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}
        return known.get((module, name), type(name, (Stub,), {}))

    def persistent_load(self, pid: tuple) -> tuple:
        return pid


def unpickle(archive: zipfile.ZipFile) -> tuple[Any, str]:
    """What torch.save put into an archive, and where in it its storages are."""
    name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
    return TorchPickle(archive.open(name)).load(), name.removesuffix(".pkl")


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
        tensor, storages = unpickle(archive)
        (_, storage, key, *_), offset, shape, stride = tensor.arguments[:4]  # _rebuild_tensor_v2
        if storage.__name__ != "FloatStorage":
            raise ValueError(f"{self.file}: holds {storage.__name__}; only float32 is read")
        raw = archive.read(f"{storages}/{key}")
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
) -> convert.Source:
    """Opens the weights of OLMo-core's own checkpoint, or an Adam moment of them by its key's form.

    The configuration is that of a Hugging Face export; the tables here have their padding.
    """
    config, problems = convert.config_from_hf(hf), []
    for tensor in convert.tensors(config).values():
        key = kind.format(tensor.core)
        parts = chunks.get(key, [])
        ends = zip(*(np.add(p.start, p.shape).tolist() for p in parts), strict=True)
        end, n = tuple(map(max, ends)), sum(math.prod(p.shape) for p in parts)
        if end != tensor.theirs or n != math.prod(end):
            text = f"{len(parts)} parts up to {end} in {folder}, not {tensor.theirs}"
            problems.append(f"{key}: {text}")
    convert.refuse(problems)

    def read(name: str, rows: slice = slice(None)) -> Float32[np.ndarray, "..."]:
        tensor = convert.tensors(config)[name]
        low, high, _ = (rows if tensor.by_token else slice(None)).indices(tensor.theirs[0])
        out = np.empty((high - low, *tensor.theirs[1:]), np.float32)
        for part in chunks[kind.format(tensor.core)]:
            first, *others = part.start
            a, b = max(first, low), min(first + part.shape[0], high)
            if a < b:
                rest = (slice(o, o + n) for o, n in zip(others, part.shape[1:], strict=True))
                out[(slice(a - low, b - low), *rest)] = part.read()[a - first : b - first]
        return out if tensor.by_token else shards.from_theirs(tensor, out)[rows]

    kept = {k: hf[k] for k in convert.KEPT if k in hf}
    return convert.Source(config, "float32", read, kept, folder)


def place_in_data(file: Path) -> dict:
    """What train.py needs to go on behind a step, from train/rank0.pt (OLMo-core trainer.py:787).

    Empty where no batch was consumed. Their fingerprint of the data is ours, digit for digit.
    """
    with zipfile.ZipFile(file) as archive:
        state: Any = unpickle(archive)[0]
    loader = state["data_loader"]
    tokens, batches, length = (
        loader[key] for key in ("tokens_processed", "batches_processed", "sequence_length")
    )
    if not batches:
        return {}
    place = data.Cursor(
        fingerprint=loader["dataset_fingerprint"],
        seed=loader["seed"],
        sequence_length=length,
        batch_instances=tokens // (batches * length),
        step=state["global_step"],
        epoch=loader["epoch"],
        batches=batches,
    )
    seen = state["global_train_tokens_seen"]
    return {"cursor": dataclasses.asdict(place), "tokens_seen": seen}


def from_core(
    source: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    config: Path,
    check: bool = True,
) -> None:
    """Converts OLMo-core's own (torch.distributed) checkpoint, Adam state included, without torch.

    As RUN/checkpoints, `train.py --run-dir RUN` goes on behind its step, on the same data.

    Args:
        source: The folder stepN, or the one in it with `.metadata`.
        out: New folder; `train.py --init` takes weights, moments and their counter from it.
        config: config.json of a Hugging Face export of the same model.
        check: Compares what was written with what was read.
    """
    folder = source if (source / ".metadata").is_file() else source / "model_and_optim"
    if not (folder / ".metadata").is_file() or not config.is_file():
        raise FileNotFoundError(f"{source}: no .metadata in it, or no file config={config}")
    hf, chunks, adam = shards.read_json(config), list_chunks(folder), None
    model = open_core(folder, chunks, hf)
    steps = [key for key in chunks if re.fullmatch(r"optim\.state\..*\.step", key)]
    counts = {float(chunks[key][0].read()) for key in steps}
    if len(counts) > 1:
        raise ValueError(f"{folder}: Adam's counters differ between parameters: {sorted(counts)}")
    if counts:
        kinds = ("optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq")
        moments = tuple(open_core(folder, chunks, hf, kind) for kind in kinds)
        adam = leaves.Adam(int(counts.pop()), moments)
    trainer = folder.parent / "train" / "rank0.pt"
    about = place_in_data(trainer) if trainer.is_file() and adam is not None else {}
    named = int((re.findall(r"step(\d+)", str(folder.absolute())) or [0])[-1])
    step = about["cursor"]["step"] if about else named
    with convert.new_folder(out) as partial:
        about["converted"] = {"from": str(source), "dtype": "float32"}
        leaves.write_checkpoint(partial, model, about, step, adam)
        if check:
            parity.verify_written(model, partial, "float32")
    what = "no optimizer state" if adam is None else f"Adam after {adam.updates} updates"
    print(f"{out}: {olmo3.n_parameters(model.config):,} parameters of step {step}, {what}")
    if "cursor" not in about:
        print(f"no place in the data ({trainer}): for train.py --init, not to go on from")
