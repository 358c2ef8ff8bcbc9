"""Held-out loss, divergence, tasks, sampling, and the comparison of runs.

    python eval.py loss CKPT --data FILES       cross-entropy, perplexity, bits per byte
    python eval.py kl A B --data FILES          how far B's next-token distribution is from A's
    python eval.py ppl A B --data FILES         perplexities of every document under both
    python eval.py tasks CKPT --tasks mmlu_stem_mc_5shot,arc_easy_rc_5shot,hellaswag_bpb
    python eval.py sample CKPT --prompt TEXT
    python eval.py compare RUN RUN --reference CURVE.csv --out report

CKPT, A and B are runs, checkpoints at any step, or Hugging Face folders. What scores text works on
token ids, batches rows of similar length in a handful of compiled shapes, and runs on the mesh in
force with the rows split over it. Training state is never touched.

Axis letters: as in olmo3.py (B rows, S query and T key positions, C loss chunk, L K H D V), and

    R documents or requests    I scored tokens before the last    A alternatives for the last

Sources: "spec 7" is OLMo-core after 2.5.0, eval/lm_evaluator.py.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from einops import rearrange
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32, Int64, Shaped

import data
import olmo3


class HeldOut(NamedTuple):
    """Documents to measure the loss on, one per row, in the order of their files."""

    labels: tuple[str, ...]
    """What each document counts under."""
    documents: tuple[Int32[np.ndarray, " n"], ...]
    """The first tokens of each, as many as fit."""
    n_bytes: Int64[np.ndarray, " R"] | None
    """Bytes of the text that each document's targets stand for; EOS stands for none."""

    def first(self, n: int | None) -> "HeldOut":
        """Only the first n documents, or all."""
        n_bytes = None if self.n_bytes is None else self.n_bytes[:n]
        return HeldOut(self.labels[:n], self.documents[:n], n_bytes)


def put_rows(x: Int32[np.ndarray, "B ..."]) -> Int32[Array, "B ..."]:
    """Splits the rows of a host array over every device of the mesh in force."""
    spec = P(("data", "fsdp"), *[None] * (x.ndim - 1))
    sharding = NamedSharding(jax.sharding.get_mesh(), spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def power_at_least(base: int, n: int) -> int:
    """The smallest power of `base` that is not below `n`."""
    power = 1
    while power < n:
        power *= base
    return power


def buckets(
    lengths: Sequence[int], batch_tokens: int, shortest: int = 128
) -> Iterator[tuple[int, int, list[int]]]:
    """Groups rows by length: yields rows per batch, padded length, and the indices of one batch.

    Padded lengths are powers of two, so a pass compiles a handful of shapes whatever the data; a
    batch holds about `batch_tokens` and divides over the mesh. Only lengths decide the order.
    """
    n_devices = jax.sharding.get_mesh().size
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(max(shortest, power_at_least(2, length)), []).append(index)
    for width, group in sorted(groups.items()):
        rows = min(max(batch_tokens // width, 1), power_at_least(4, len(group)))
        rows = -(-rows // n_devices) * n_devices
        for start in range(0, len(group), rows):
            yield rows, width, group[start : start + rows]


def embedded_token_bytes(vocab_size: int) -> Int64[np.ndarray, " V"]:
    """Bytes of every id of the byte vocabulary: one below 256, none for EOS and PAD."""
    return (np.arange(vocab_size) < 256).astype(np.int64)


def prepare_heldout(
    paths_by_label: Mapping[str, Sequence[str | os.PathLike]],
    config: data.DataConfig,
    token_bytes: Int64[np.ndarray, " V"] | None = None,
    prefix_id: int | None = None,
) -> HeldOut:
    """Reads the first `sequence_length` tokens of every document of token files, as spec 7 does.

    `prefix_id` goes before every document that does not begin with it; OLMo 3 trains with none.
    """
    labels, kept, n_bytes = [], [], []
    if token_bytes is None and config.source == "stdlib":
        token_bytes = embedded_token_bytes(config.vocab_size)
    for label, paths in paths_by_label.items():
        for document in data.documents([str(path) for path in paths], config):
            if prefix_id is not None and document[0] != prefix_id:
                document = np.append(np.int32(prefix_id), document)
            labels.append(label)
            kept.append(document[: config.sequence_length])
            if token_bytes is not None:
                n_bytes.append(int(token_bytes[kept[-1][1:]].sum()))
    if not kept:
        raise ValueError(
            f"data={dict(paths_by_label)} holds no document: none ends with eos_id={config.eos_id}"
        )
    sizes = np.array(n_bytes, np.int64) if token_bytes is not None else None
    return HeldOut(tuple(labels), tuple(kept), sizes)


def shared_files(train: Sequence[str], heldout: Sequence[str]) -> list[str]:
    """The held-out files that are also trained on: the same file, or equal size and first MiB."""

    def start_of(path: str) -> bytes:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(1 << 20)).digest()

    by_size: dict[int, list[str]] = {}
    for path in train:
        by_size.setdefault(os.path.getsize(path), []).append(path)
    return [
        path
        for path in heldout
        if any(
            os.path.samefile(path, other) or start_of(path) == start_of(other)
            for other in by_size.get(os.path.getsize(path), [])
        )
    ]


def over_chunks(
    function: Callable, config: olmo3.ModelConfig, *arrays: Shaped[Array, "B S ..."]
) -> tuple:
    """Maps `function` over chunks of positions, so that each device holds few logits at a time.

    At most `loss_chunk` positions in all, since rows here are many and short.
    """
    n_rows, n_positions = arrays[0].shape[:2]
    rows_per_device = -(-n_rows // jax.sharding.get_abstract_mesh().size)
    chunk = min(max(config.loss_chunk // rows_per_device, 1), n_positions)

    def split(x: Shaped[Array, "B S ..."]) -> Shaped[Array, "n B C ..."]:
        padding = [(0, 0), (0, -n_positions % chunk)] + [(0, 0)] * (x.ndim - 2)
        return rearrange(jnp.pad(x, padding), "B (n C) ... -> n B C ...", C=chunk)

    chunks = jax.lax.map(lambda xs: function(*xs), tuple(split(x) for x in arrays))
    return tuple(rearrange(x, "n B C -> B (n C)")[:, :n_positions] for x in chunks)


def token_scores(
    model: olmo3.Olmo3, hidden: Float[Array, "B S D"], targets: Int32[Array, "B S"]
) -> tuple[Float32[Array, "B S"], Bool[Array, "B S"]]:
    """Log-probability of every target, and whether it is the most likely token.

    Over the padded vocabulary, as in training and in OLMo-core; 0 and True where it is negative.
    """

    def chunk_scores(hidden: Float[Array, "B C D"], targets: Int32[Array, "B C"]) -> tuple:
        scores = olmo3.logits(model, hidden)
        picked = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        log_prob = picked - jax.nn.logsumexp(scores, axis=-1)
        none = targets < 0
        return jnp.where(none, 0.0, log_prob), none | (picked >= scores.max(axis=-1))

    return over_chunks(chunk_scores, model.config, hidden, targets)


@eqx.filter_jit
def row_losses(
    model: olmo3.Olmo3, tokens: Int32[Array, "B S"], targets: Int32[Array, "B S"]
) -> Float32[Array, " B"]:
    """Summed cross-entropy of every row in nats, on every device."""
    log_probs, _ = token_scores(model, model(tokens), targets)
    return reshard(-log_probs.sum(axis=1), P(None))


def document_losses(
    model: olmo3.Olmo3, rows: HeldOut, batch_tokens: int = 32_768, max_batches: int | None = None
) -> tuple[Float64[np.ndarray, " R"], int]:
    """Summed cross-entropy of each document, NaN beyond `max_batches`, and how many shapes it took.

    Every pass starts at the first document; rows of weight zero fill the last batch of a shape.
    """
    losses, shapes = np.full(len(rows.documents), np.nan), set()
    lengths = [len(document) for document in rows.documents]
    for n_rows, width, group in itertools.islice(buckets(lengths, batch_tokens), max_batches):
        tokens = np.zeros((n_rows, width), np.int32)
        targets = np.full((n_rows, width), -1, np.int32)
        for row, index in enumerate(group):
            document = rows.documents[index]
            tokens[row, : len(document)] = document
            targets[row, : len(document) - 1] = document[1:]
        losses[group] = np.asarray(row_losses(model, put_rows(tokens), put_rows(targets)))[
            : len(group)
        ]
        shapes.add((n_rows, width))
    return losses, len(shapes)


def summarise_losses(
    nats: Float64[np.ndarray, " R"],
    lengths: Int64[np.ndarray, " R"],
    n_bytes: Int64[np.ndarray, " R"] | None,
) -> dict[str, float | int]:
    """Means of documents' losses with closed-form standard errors, documents being independent.

    `ce` divides by the targets, one fewer than a document has tokens. `ce_olmo_core` divides by the
    tokens, which is what OLMo-core publishes: there the last position of every document counts as a
    zero (spec 7). `ce_document` is the mean of the documents' own means.
    """
    targets = lengths - 1
    scored = targets > 0
    n = max(int(scored.sum()), 1)
    ce = nats.sum() / max(targets.sum(), 1)
    own = nats[scored] / targets[scored]
    spread = n / max(n - 1, 1)
    core = nats.sum() / lengths.sum()
    out = {
        "ce": ce,
        "ce_se": math.sqrt(spread * ((nats - ce * targets) ** 2).sum()) / max(targets.sum(), 1),
        "ppl": math.exp(min(ce, 700.0)),
        "ce_olmo_core": core,
        "ppl_olmo_core": math.exp(min(core, 700.0)),
        "ce_document": own.mean() if len(own) else 0.0,
        "ce_document_se": own.std(ddof=1) / math.sqrt(n) if len(own) > 1 else 0.0,
        "n_tokens": int(targets.sum()),
        "n_documents": len(nats),
    }
    if n_bytes is not None and n_bytes.sum():
        out["bits_per_byte"] = nats.sum() / math.log(2) / n_bytes.sum()
        out["n_bytes"] = int(n_bytes.sum())
    return {key: value if isinstance(value, int) else float(value) for key, value in out.items()}


def evaluate_loss(
    model: olmo3.Olmo3, rows: HeldOut, batch_tokens: int = 32_768, max_batches: int | None = None
) -> dict[str, dict[str, float | int]]:
    """The losses of `rows` per label and, as "pooled", together; call it under the model's mesh."""
    nats, n_shapes = document_losses(model, rows, batch_tokens, max_batches)
    lengths = np.array([len(document) for document in rows.documents])
    labels, done = np.array(rows.labels), ~np.isnan(nats)
    out = {}
    for label in [*dict.fromkeys(rows.labels), "pooled"]:
        which = done & ((labels == label) | (label == "pooled"))
        if which.any():
            n_bytes = None if rows.n_bytes is None else rows.n_bytes[which]
            out[label] = summarise_losses(nats[which], lengths[which], n_bytes)
    out["pooled"]["n_shapes"] = n_shapes
    return out


@dataclass(frozen=True)
class Text:
    """Token files to measure on, one document per row."""

    source: Annotated[str, tyro.conf.arg(name="data", aliases=["--manifest"])] = ""
    """Files, glob or manifest, as in training; empty is what the model trained on."""
    base: str = ""
    """Where a manifest's paths start."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the token files; none is what the model was trained on."""
    sequence_length: int = 8192
    """Tokens of a document that are used; the rest of it is discarded."""
    prefix: Literal["none", "bos", "eos"] = "none"
    """What goes before every document that does not begin with it; OLMo 3 trains with none."""
    max_documents: int | None = None
    """Only the first so many."""
    tokenizer: Path | None = None
    """A tokenizer.json, for bits per byte; byte vocabularies need none."""


def load_model(path: Path, **overrides: Any) -> tuple[olmo3.Olmo3, data.DataConfig]:  # noqa: ANN401
    """Reads a model of either format onto the mesh in force, and what its text looks like."""
    config = path / "config.json"
    hf = json.loads(config.read_text()) if config.is_file() else {}
    if "model_type" in hf:
        import convert

        model = convert.load_hf(path, **overrides)
        eos, pad = hf["eos_token_id"], hf.get("pad_token_id") or hf["eos_token_id"]
        ids = {"eos_id": eos, "pad_id": pad, "bos_id": hf.get("bos_token_id")}
        return model, data.DataConfig(source="", vocab_size=model.config.tokenizer_size, **ids)
    from tools import checkpoints

    model = checkpoints.restore_model(path, jax.sharding.get_mesh(), **overrides)
    saved = checkpoints.saved_config(*checkpoints.find_checkpoint(path))
    default = {"source": "", "vocab_size": model.config.tokenizer_size}  # of a converted one
    fields = {field.name for field in dataclasses.fields(data.DataConfig)}
    known = {k: v for k, v in saved.get("data", default).items() if k in fields}
    return model, data.DataConfig(**known)


def read_text(text: Text, trained_on: data.DataConfig) -> HeldOut:
    """The documents to measure on; says which prefix they get, and if they were trained on."""
    config = dataclasses.replace(
        trained_on,
        source=text.source or trained_on.source,
        base=text.base,
        dtype=text.dtype or trained_on.dtype,
        sequence_length=text.sequence_length,
        max_target_sequence_length=None,
    )
    stdlib = config.source == "stdlib"
    paths = data.list_files(config, "heldout" if stdlib else "train")
    labels = ["heldout" if stdlib else Path(path).stem for path in paths]
    if config.source.endswith(".txt"):
        lines = Path(config.source).read_text().splitlines()
        labels = [x.split(",")[0].strip() for x in lines if x.strip() and x.strip()[0] != "#"]
    by_label: dict[str, list[str]] = {}
    for label, path in zip(labels, paths, strict=True):
        by_label.setdefault(label, []).append(path)
    prefix = {"none": None, "bos": config.bos_id, "eos": config.eos_id}[text.prefix]
    if text.prefix == "bos" and prefix is None:
        raise ValueError("prefix=bos, but the tokenizer has no BOS; choose none or eos")
    with contextlib.suppress(FileNotFoundError, ValueError):  # the training data may be elsewhere
        for path in shared_files(data.list_files(trained_on, "train"), paths):
            print(f"warning: {path} is in the training data: not held out", file=sys.stderr)
    n_bytes = None
    if text.tokenizer is not None:
        from tools import tasks

        n_bytes = tasks.count_token_bytes(tasks.read_tokenizer(text.tokenizer), config.vocab_size)
    elif config.vocab_size == data.EMBEDDED_VOCAB:
        n_bytes = embedded_token_bytes(config.vocab_size)
    rows = prepare_heldout(by_label, config, n_bytes, prefix).first(text.max_documents)
    first = rows.documents[0][:8].tolist()
    print(f"prefix of every document: {text.prefix}; the first is {first}", file=sys.stderr)
    return rows


def finish(
    result: dict, out: Path | None, record: Path | None = None, only_written: Sequence[str] = ()
) -> None:
    """Prints a result, writes it to `out`, and adds it to the run of checkpoint `record`."""
    if jax.process_index() > 0:
        return  # every process has the same result
    print(json.dumps({k: v for k, v in result.items() if k not in only_written}, indent=1))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    if record is not None:
        from tools import checkpoints

        folder, step = checkpoints.find_checkpoint(record)
        flat = {
            name: {"primary": values["primary"], **values["groups"]["all"]}
            if "groups" in values
            else values
            for name, values in result.items()
        }
        with (folder.parent / "evals.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "eval": flat}) + "\n")


Checkpoint = tyro.conf.Positional[Path]
TextFlags = tyro.conf.OmitArgPrefixes[Text]


@dataclass(frozen=True)
class Loss:
    """Cross-entropy, perplexity and bits per byte of documents, per label and pooled."""

    checkpoint: Checkpoint
    """Run, checkpoint or Hugging Face folder."""
    text: TextFlags
    batch_tokens: int = 32_768
    """Tokens of a batch over all devices."""
    out: Path | None = None
    """Also write the JSON here."""
    record: bool = False
    """Add the result to the checkpoint's run, for `compare`."""

    def run(self) -> None:
        model, trained_on = load_model(self.checkpoint)
        result = evaluate_loss(model, read_text(self.text, trained_on), self.batch_tokens)
        finish(result, self.out, self.checkpoint if self.record else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; what the user can mend exits 2, what failed on the way exits 1."""
    from tools.compare import Compare
    from tools.divergence import Kl, Ppl
    from tools.scoring import Sample
    from tools.tasks import Tasks

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns that it only reads
    commands: Any = (Loss, Kl, Ppl, Tasks, Sample, Compare)
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            {c.__name__.lower(): c for c in commands}, description=__doc__, args=arguments
        )
        with jax.set_mesh(olmo3.make_mesh()):
            command.run()
    except ModuleNotFoundError as error:
        extras = {"matplotlib": "plots", "tokenizers": "tasks", "pyarrow": "tasks"}
        extra = extras.get(error.name or "")
        hint = f"; pip install -e '.[{extra}]'" if extra else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        sys.exit(2)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
