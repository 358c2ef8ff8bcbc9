"""Checkpoints: complete or invisible, checked bit by bit when read, the same on any mesh.

A checkpoint is a directory named by its step with items model, optimizer and config (config.json).
Orbax writes under a temporary name and renames when all is on disk, so what has a step's name is
complete. TensorStore does not notice a flipped bit of incompressible data, so each array's bits are
summed on the devices, and the sums travel in config.json.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, UInt32

import olmo3

S = TypeVar("S")


class Rollback(RuntimeError):
    """Several steps in a row were skipped: go back behind `good`, leave out batches up to `bad`."""

    def __init__(self, good: int, bad: int):
        super().__init__(f"steps {good + 1} to {bad} were skipped")
        self.good, self.bad = good, bad


def open_checkpoints(folder: Path, keep: Any = None) -> ocp.CheckpointManager:  # noqa: ANN401
    """Opens a folder of checkpoints, to read, or with `keep`, a train.RunConfig, to save as well.

    Opened to save, what dead saves left is removed.
    """
    options = ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=keep is not None,
        max_to_keep=keep.keep_last if keep else None,
        keep_period=keep.keep_every_steps if keep else None,
        read_only=keep is None,
    )
    handlers = {
        "model": ocp.StandardCheckpointHandler(),
        "optimizer": ocp.StandardCheckpointHandler(),
        "config": ocp.JsonCheckpointHandler(filename="config.json"),
    }
    return ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)


def find_checkpoint(path: Path) -> tuple[Path, int]:
    """Folder of checkpoints and step that a path means: a run, its checkpoints, or one of them."""
    for folder in (path / "checkpoints", path):
        names = (p.name for p in folder.glob("*") if (p / "model").is_dir())
        if steps := [int(name) for name in names if name.isdigit()]:
            return folder, max(steps)
    if path.name.isdigit() and (path / "model").is_dir():
        return path.parent, int(path.name)
    raise FileNotFoundError(
        f"{path}: no checkpoint there; give a run, its checkpoints folder or one step of it"
    )


def write_json(path: Path, value: dict) -> None:
    """Writes a file that is there whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def saved_config(folder: Path, step: int) -> dict:
    """The configuration that travelled with a checkpoint."""
    return json.loads((folder / str(step) / "config" / "config.json").read_text())


def model_config(saved: dict) -> olmo3.ModelConfig:
    """The model's configuration out of a saved one."""
    fields: dict[str, Any] = dict(saved["model"], windows=tuple(saved["model"]["windows"]))
    if fields["yarn"] is not None:
        fields["yarn"] = olmo3.YarnConfig(**fields["yarn"])
    return olmo3.ModelConfig(**fields)


@jax.jit
def leaf_sums(tree: Any) -> list[UInt32[Array, ""]]:  # noqa: ANN401 - any tree of arrays
    """Position-weighted sum of the bits of each leaf, modulo 2**32.

    Weights are odd, so that a single flipped bit always shows. Sums of integers do not depend on
    their order: another mesh finds the same numbers.
    """

    def bits(x: Array) -> UInt32[Array, ""]:
        place = jnp.zeros((), jnp.uint32)
        for axis, size in enumerate(x.shape):
            sharding = jax.typeof(x).sharding
            iota = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=sharding)
            place = place * jnp.uint32(size) + iota
        word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        values = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
        return jnp.sum(values * (2 * place + 1), dtype=jnp.uint32)

    return [bits(x) for x in jax.tree.leaves(tree)]


def host_sum(x: np.ndarray) -> int:
    """The same sum of an array in host memory."""
    values = x.view(f"uint{8 * x.dtype.itemsize}").astype(np.uint32).reshape(-1)
    weights = 2 * np.arange(values.size, dtype=np.uint32) + np.uint32(1)
    return int((values * weights).sum(dtype=np.uint32))


def leaf_names(tree: Any) -> list[str]:  # noqa: ANN401 - any tree of arrays
    """The path of each leaf."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def checksums(tree: Any) -> dict[str, int]:  # noqa: ANN401 - any tree of arrays
    """The sum of each leaf by its name."""
    return dict(zip(leaf_names(tree), map(int, leaf_sums(tree)), strict=True))


def save(manager: ocp.CheckpointManager, state: Any, step: int, about: dict) -> None:  # noqa: ANN401
    """Starts an asynchronous save of the whole state and of the JSON `about` it."""
    items = ocp.args.Composite(
        model=ocp.args.StandardSave(state.model),
        optimizer=ocp.args.StandardSave((state.optimizer, state.step)),
        config=ocp.args.JsonSave(about | {"checksums": checksums(state)}),
    )
    if not manager.save(step, args=items):
        raise RuntimeError(f"{manager.directory}: a checkpoint of step {step} or later is there")


def restore_item(manager: ocp.CheckpointManager, step: int, name: str, want: S) -> S:
    """Reads one item of a checkpoint into the shapes, dtypes and shardings of `want`."""
    return manager.restore(step, args=ocp.args.Composite(**{name: ocp.args.StandardRestore(want)}))[
        name
    ]


def verify(folder: Path, step: int, tree: Any, prefix: str = "") -> None:  # noqa: ANN401
    """Raises RuntimeError naming the arrays whose bits are not those that were saved.

    `prefix` is where the tree stands in the state; checkpoints without sums pass.
    """
    saved = saved_config(folder, step).get("checksums")
    if saved is None:
        return
    sums = {prefix + name: value for name, value in checksums(tree).items()}
    if wrong := [name for name, value in sums.items() if saved.get(name) != value]:
        raise RuntimeError(f"{folder / str(step)}: the data of {', '.join(wrong)} is damaged")


def restore(manager: ocp.CheckpointManager, want: Any, step: int) -> Any:  # noqa: ANN401
    """Reads the whole state onto the mesh of `want`, which may differ from the one it was saved on.

    Raises RuntimeError where it is damaged, and whatever Orbax raises.
    """
    model = restore_item(manager, step, "model", want.model)
    optimizer, count = restore_item(manager, step, "optimizer", (want.optimizer, want.step))
    state = dataclasses.replace(want, model=model, optimizer=optimizer, step=count)
    with jax.set_mesh(jax.tree.leaves(want)[0].sharding.mesh):
        verify(Path(manager.directory), step, state)
    if int(state.step) != step:
        raise RuntimeError(f"{manager.directory}: checkpoint {step} holds step {int(state.step)}")
    return state


def on_mesh(tree: Any, mesh: Mesh) -> Any:  # noqa: ANN401 - any tree of shapes
    """Shapes with their shardings tied to a real mesh; Orbax refuses abstract ones."""

    def pin(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec))

    return jax.tree.map(pin, tree)


def restore_model(path: Path, mesh: Mesh | None = None, **overrides: Any) -> olmo3.Olmo3:  # noqa: ANN401
    """Reads the weights of a checkpoint, and nothing else, onto a mesh (by default of all devices).

    `overrides` replace fields of the model's configuration that change no weight, such as
    compute_dtype. Raises RuntimeError where a weight is damaged.
    """
    folder, step = find_checkpoint(path)
    config = dataclasses.replace(model_config(saved_config(folder, step)), **overrides)
    mesh = olmo3.make_mesh() if mesh is None else mesh
    with jax.set_mesh(mesh), open_checkpoints(folder) as manager:
        want = jax.eval_shape(lambda: olmo3.Olmo3(config, jax.random.key(0)))
        model = restore_item(manager, step, "model", on_mesh(want, mesh))
        verify(folder, step, model, ".model")
    return model


class Store:
    """The checkpoints of a run: which to go on from, and what becomes of those that are no use."""

    def __init__(self, folder: Path, keep: Any):  # noqa: ANN401 - train.RunConfig
        self.folder = folder
        self.n_leftovers = len([*folder.glob("*.orbax-checkpoint-tmp*")])
        self.manager = open_checkpoints(folder, keep)
        self.unusable: dict[int, Exception] = {}
        """Steps that could not be loaded, or were rolled back, and why."""

    def newest(self) -> tuple[int, dict]:
        """The newest step not known to be of no use, and what it says about itself; 0 if none.

        Raises RuntimeError where all that there are have been damaged: a run never starts anew
        silently.
        """
        for step in sorted(set(self.manager.all_steps()) - set(self.unusable), reverse=True):
            try:
                return step, saved_config(self.folder, step)
            except (OSError, ValueError) as error:
                self.unusable[step] = error
        damaged = {k: v for k, v in self.unusable.items() if not isinstance(v, Rollback)}
        if damaged:
            reasons = "; ".join(f"{k}: {v!s:.300}" for k, v in damaged.items())
            raise RuntimeError(
                f"{self.folder}: no checkpoint can be loaded ({reasons}); none was touched: repair"
                " one, or start anew with another --run-dir"
            )
        return 0, {}

    def load(self, want: Any, step: int) -> Any:  # noqa: ANN401 - train.TrainState
        """The state of a step on the mesh of `want`; None where a process cannot load it."""
        state = None
        try:
            state = restore(self.manager, want, step)
        except jax.errors.JaxRuntimeError:  # out of memory and the like
            raise
        except Exception as error:  # Orbax raises anything, even Exception itself
            self.unusable[step] = error
        loaded = np.array(state is not None)
        if jax.process_count() > 1 and not multihost_utils.process_allgather(loaded).all():
            self.unusable.setdefault(step, RuntimeError("another process cannot load it"))
            state = None
        return state

    def put_aside(self) -> Iterator[tuple[int, str, Path]]:
        """Renames what is of no use, so that its numbers can be saved again; (step, why, new path).

        To be called once an older one has been loaded, and not before.
        """
        for step, error in self.unusable.items():
            why = "rolled-back" if isinstance(error, Rollback) else "damaged"
            path = self.folder / f"{step}.{why}-{int(time.time())}"
            if jax.process_index() == 0:
                (self.folder / str(step)).rename(path)
            yield step, str(error), path
        if self.unusable and jax.process_count() > 1:
            multihost_utils.sync_global_devices("unusable checkpoints are renamed")
        self.unusable = {}
        self.manager.reload()

    def save(self, state: Any, step: int, about: dict) -> bool:  # noqa: ANN401
        """Starts to save a step once the save before is complete; False if it is saved already."""
        if self.manager.latest_step() == step:
            return False
        with self.errors_named():
            save(self.manager, state, step, about)
        return True

    def check(self, wait: bool = False) -> None:
        """Raises what went wrong with saves in the background, or waits for the last to end."""
        with self.errors_named():
            if wait:
                self.manager.wait_until_finished()
            self.manager.check_for_errors()

    @contextlib.contextmanager
    def errors_named(self) -> Iterator[None]:
        """Gives the errors of saving the path, and says what is left."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            kept = sorted(int(p.name) for p in self.folder.glob("*") if p.name.isdigit())
            raise RuntimeError(
                f"{self.folder}: saving failed ({error}); the checkpoints {kept} are intact: make"
                " room or repair the disk, then the same command goes on"
            ) from error


def check_same_run(saved: dict, now: dict) -> list[str]:
    """Changes from a saved configuration that a resumed run may make, as "field: old -> new".

    Raises ValueError naming every field whose change would make it another model. What changes the
    order of the data is refused by `data.resumed`.
    """
    free = {"model.remat", "model.loss_chunk", "model.compute_dtype", "model.attention"}

    def flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    old, new = dict(flat(saved)), dict(flat(now))
    names = [key for key in new if key in old and not key.startswith("machine.")]
    changes = {k: f"{k}: {old[k]} -> {new[k]}" for k in names if old[k] != new[k]}
    if refused := [v for k, v in changes.items() if k.startswith("model.") and k not in free]:
        raise ValueError(
            f"the checkpoint is of another run ({'; '.join(refused)}); restore the old values, use"
            " a new --run-dir, or start from its weights with --init"
        )
    return list(changes.values())


def check_same_weights(saved: dict, now: dict) -> None:
    """Raises ValueError unless weights saved under one configuration have the shapes of another."""
    old, new = (dict(c["model"], windows=len(c["model"]["windows"])) for c in (saved, now))
    shape = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff")
    names = (*shape, "windows")  # of these the number decides which layers are stacked
    if wrong := [f"model.{k}: {old[k]} there, {new[k]} here" for k in names if old[k] != new[k]]:
        raise ValueError(f"init: the checkpoint is of another model ({'; '.join(wrong)})")
