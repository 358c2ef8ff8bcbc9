"""Our own checkpoints as a source and as a target, a piece at a time: no tree is ever in memory.

The files of an item are those that Orbax's StandardSave writes and restores (0.12): Zarr 2 arrays
in one OCDBT store, and `_METADATA`, which describes the tree.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jaxtyping import Float32, Num

import convert
import olmo3
import train
from tools import checkpoints, shards


def dotted(path: tuple) -> str:
    """The name of a leaf in its item's store."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def open_store(folder: Path) -> ts.KvStore:
    """The store of an item; arrays that share it commit together."""
    spec = {"driver": "ocdbt", "base": f"file://{folder.absolute()}/"}
    return ts.KvStore.open(spec).result()


def open_array(store: ts.KvStore, name: str, **create: Any) -> ts.TensorStore:  # noqa: ANN401
    """One array of an item."""
    return ts.open({"driver": "zarr", **create}, kvstore=store / f"{name}/").result()


def create_array(store: ts.KvStore, name: str, leaf: jax.ShapeDtypeStruct) -> ts.TensorStore:
    """An array without numbers; no two layers of a stack share a chunk.

    The compressor sorts bits by place: float32 from bfloat16 takes a fifth of the time of Orbax's
    zstd, and 38 % of the size instead of 48 %.
    """
    stack = (1,) if ".blocks." in f".{name}" else ()
    inner = leaf.shape[len(stack) :]
    layout = {
        "shape": leaf.shape,
        "chunks": (*stack, convert.block_rows(inner), *inner[1:]) if inner else (),
        "dtype": np.dtype(leaf.dtype).str,
        "fill_value": 0,
        "compressor": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 2},
    }
    # Orbax takes a chunk that is missing for damage.
    options = {"create": True, "metadata": layout, "store_data_equal_to_fill_value": True}
    return open_array(store, name, **options)


def fill(array: ts.TensorStore, value: int = 0) -> None:
    """Writes one number everywhere, a chunk at a time, as what is written at once is in memory."""
    number = np.asarray(value, array.dtype.numpy_dtype)
    if not array.rank:
        array.write(number).result()
        return
    rows = (array.chunk_layout.write_chunk.shape or (1,))[0] or 1
    for start in range(0, array.shape[0], rows):
        array[start : min(start + rows, array.shape[0])].write(number).result()


def create_item(folder: Path, tree: Any) -> dict[str, ts.TensorStore]:  # noqa: ANN401
    """Makes the files of an item for a tree of shapes; returns its arrays, to be written all."""
    is_empty = lambda x: isinstance(x, tuple) and not x  # noqa: E731 - such as optax.EmptyState
    arrays, metadata, store = {}, {}, open_store(folder)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]:
        value: dict[str, Any] = {"value_type": "None", "skip_deserialize": True}
        if not is_empty(leaf):
            value = {"value_type": "jax.Array", "skip_deserialize": False}
            value["write_shape"] = leaf.shape
            arrays[dotted(path)] = create_array(store, dotted(path), leaf)
        keys = dotted(path).split(".")
        types = [1 if isinstance(key, jax.tree_util.SequenceKey) else 2 for key in path]
        pairs = [{"key": k, "key_type": t} for k, t in zip(keys, types, strict=True)]
        metadata[str(tuple(keys))] = {"key_metadata": pairs, "value_metadata": value}
    about = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    text = json.dumps({"tree_metadata": metadata, **about, "custom_metadata": None})
    (folder / "_METADATA").write_text(text)
    return arrays


def bit_sum(x: Num[np.ndarray, "..."], first: int) -> int:
    """The part of `checkpoints.leaf_sums` of four-byte numbers, contiguous in their leaf.

    `first` is the place of the first one. Number c of row r, of C, weighs 2 (first + r C + c) + 1:
    sums of rows and of columns are enough, and no array of weights is needed.
    """
    bits = x.view(np.uint32).reshape(-1, x.shape[-1])
    row, column = (np.arange(n, dtype=np.uint32) for n in bits.shape)
    row = np.uint32(2) * (np.uint32(first % 2**32) + row * np.uint32(bits.shape[1]))
    by_row = bits.sum(axis=1, dtype=np.uint32) * row
    by_column = bits.sum(axis=0, dtype=np.uint32) * (np.uint32(2) * column + np.uint32(1))
    return (int(by_row.sum(dtype=np.uint32)) + int(by_column.sum(dtype=np.uint32))) % 2**32


def write_about(folder: Path, items: Iterable[str], about: dict) -> None:
    """Writes what else a step's folder has: which items there are, and config.json."""
    kinds = dict.fromkeys(items, "standard_checkpoint_handler.StandardCheckpointHandler")
    kinds["config"] = "json_checkpoint_handler.JsonCheckpointHandler"
    handlers = {item: f"orbax.checkpoint._src.handlers.{kind}" for item, kind in kinds.items()}
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(about, indent=1))
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": handlers}))


def open_checkpoint(path: Path) -> convert.Source:
    """Opens our own checkpoint: a run, its folder of checkpoints (the newest), or a step."""
    folder, step = checkpoints.find_checkpoint(path)
    saved = checkpoints.saved_config(folder, step)
    config = checkpoints.model_config(saved)
    tensors, store = convert.tensors(config), open_store(folder / str(step) / "model")
    array = functools.cache(lambda leaf: open_array(store, leaf))
    problems, dtypes = [], set()
    for name, tensor in tensors.items():
        try:
            shape = array(tensor.leaf)[tensor.place].shape
            dtypes.add(array(tensor.leaf).dtype.numpy_dtype)
        except (ValueError, IndexError):
            shape = None
        if shape != tensor.ours:
            problems.append(f"{name}: {path} has {shape}, its config means {tensor.ours}")
    convert.refuse(problems)

    def read(name: str, rows: slice = slice(None)) -> Float32[np.ndarray, "..."]:
        start, stop, _ = rows.indices(tensors[name].ours[0])
        x = array(tensors[name].leaf)[tensors[name].place][start:stop].read().result()
        return x.astype(np.float32, copy=False)

    kept = saved.get("huggingface", {})
    if data := saved.get("data"):
        kept = {f"{key}_token_id": data[f"{key}_id"] for key in ("bos", "eos", "pad")}
        kept |= {} if config.yarn else {"max_position_embeddings": data["sequence_length"]}
    return convert.Source(config, shards.coarsest(dtypes), read, kept, folder / "huggingface")


class Adam(NamedTuple):
    """The optimizer's state to write beside a model."""

    updates: int = 0
    moments: tuple[convert.Source, ...] = ()  # first and second; none are zeros


def write_checkpoint(
    out: Path, source: convert.Source, about: dict, step: int = 0, adam: Adam | None = None
) -> None:
    """Writes a folder of checkpoints with one in it, as train.py saves them.

    `about` is what its config.json says beside the model and the sums of all bits.
    """
    config, folder = source.config, out / str(step)

    def fresh() -> train.TrainState:
        model: Any = olmo3.Olmo3(config, jax.random.key(0))
        optimizer: Any = train.make_optimizer(train.OptimConfig()).init(model)
        return train.TrainState(model, optimizer, jnp.zeros((), jnp.int32))

    with jax.set_mesh(olmo3.make_mesh(devices=jax.devices()[:1])):
        state = jax.eval_shape(fresh)
    items, sources, values = {"model": state.model}, {"model.": source}, {}
    if adam is not None:
        items["optimizer"] = (state.optimizer, state.step)
        values = {"optimizer.0.inner.0.count": adam.updates, "optimizer.1": step}
        for name, moment in zip(("mu", "nu"), adam.moments, strict=False):
            sources[f"optimizer.0.inner.0.{name}."] = moment
    arrays = {
        f"{item}.{name}": array
        for item, tree in items.items()
        for name, array in create_item(folder / item, tree).items()
    }
    sums: dict[str, int] = {}

    def write(
        prefix: str, tensor: convert.Tensor, start: int, x: Float32[np.ndarray, "..."]
    ) -> tuple[str, int]:
        name = prefix + tensor.leaf
        rows = arrays[name][tensor.place][start : start + len(x)]
        rows.write(x, can_reference_source_data_indefinitely=True).result()  # no copy of x
        first = (sum(tensor.place) * tensor.ours[0] + start) * math.prod(x.shape[1:])
        return name, bit_sum(x, first)

    for prefix, part in sources.items():
        for name, value in convert.stream(part, functools.partial(write, prefix)):
            sums[name] = (sums.get(name, 0) + value) % 2**32
    for name in arrays.keys() - sums:  # scalars, and what starts at zero
        sums[name] = values.get(name, 0)
        fill(arrays[name], sums[name])
    keys = checkpoints.leaf_names(state)  # in the items' order, of which the model is the first
    about = {"model": dataclasses.asdict(config), "huggingface": source.kept, **about}
    about["checksums"] = {key: sums[name] for key, name in zip(keys, arrays, strict=False)}
    write_about(folder, items, about)
    shards.copy_companions(source, out / "huggingface")
