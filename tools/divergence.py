"""How far a model is from another on the same text: KL of every token, perplexity of documents."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32, Int64

import olmo3
from eval import (
    Checkpoint,
    HeldOut,
    TextFlags,
    buckets,
    document_losses,
    finish,
    load_model,
    over_chunks,
    put_rows,
    read_text,
)


@eqx.filter_jit
def row_divergences(
    a: olmo3.Olmo3, b: olmo3.Olmo3, tokens: Int32[Array, "B S"]
) -> tuple[Float32[Array, "B S"], Bool[Array, "B S"], Float32[Array, "B S"]]:
    """At every position: D_KL(a || b) in nats, equal first choice, share of a's best five in b's.

    Over the real vocabulary: both are cut to it before the softmax.
    """
    n_real = min(a.config.tokenizer_size, b.config.tokenizer_size)

    def compare(x: Float[Array, "B C D"], y: Float[Array, "B C D"]) -> tuple:
        p = jax.nn.log_softmax(olmo3.logits(a, x)[..., :n_real])
        q = jax.nn.log_softmax(olmo3.logits(b, y)[..., :n_real])
        best_p, best_q = jax.lax.top_k(p, 5)[1], jax.lax.top_k(q, 5)[1]
        shared = (best_p[..., :, None] == best_q[..., None, :]).any(axis=-1)
        kl = (jnp.exp(p) * (p - q)).sum(axis=-1)
        return kl, best_p[..., 0] == best_q[..., 0], shared.mean(axis=-1, dtype=jnp.float32)

    hidden = (a(tokens), b(tokens))
    return reshard(over_chunks(compare, a.config, *hidden), P(None, None))


def divergence(
    a: olmo3.Olmo3, b: olmo3.Olmo3, rows: HeldOut, batch_tokens: int = 32_768
) -> dict[str, Any]:
    """D_KL(a || b) over all positions of `rows` that have a target, and how often choices agree."""
    kept, shapes = [], set()
    lengths = [len(document) for document in rows.documents]
    for n_rows, width, group in buckets(lengths, batch_tokens):
        tokens = np.zeros((n_rows, width), np.int32)
        for row, index in enumerate(group):
            tokens[row, : lengths[index]] = rows.documents[index]
        out = [np.asarray(x) for x in row_divergences(a, b, put_rows(tokens))]
        shapes.add((n_rows, width))
        kept += [[x[row, : lengths[i] - 1] for x in out] for row, i in enumerate(group)]
    kl, top1, top5 = (np.concatenate(x).astype(np.float64) for x in zip(*kept, strict=True))
    return {
        "direction": "D_KL(A || B)",
        "vocabulary": min(a.config.tokenizer_size, b.config.tokenizer_size),
        "n_tokens": len(kl),
        "n_shapes": len(shapes),
        "kl_mean": float(kl.mean()),
        "kl_mean_se": float(kl.std() / math.sqrt(len(kl))),
        "kl_p50": float(np.quantile(kl, 0.5)),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "top1_agreement": float(top1.mean()),
        "top5_agreement": float(top5.mean()),
    }


def compare_perplexities(
    a: Float64[np.ndarray, " R"], b: Float64[np.ndarray, " R"], n_targets: Int64[np.ndarray, " R"]
) -> dict[str, Any]:
    """Perplexities of every document from its summed losses, and how closely they follow."""
    scored = n_targets > 0
    x, y = (nats[scored] / n_targets[scored] for nats in (a, b))
    series = {"ppl_a": np.exp(x), "ppl_b": np.exp(y), "log_ppl_difference": y - x}
    levels = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
    return {
        "n_documents": int(scored.sum()),
        "quantiles": {
            name: {key: float(np.quantile(values, level)) for key, level in levels.items()}
            for name, values in series.items()
        },
        "log_ppl_difference_mean": float((y - x).mean()),
        "log_ppl_difference_std": float((y - x).std()),
        "log_ppl_correlation": float(np.corrcoef(x, y)[0, 1]) if len(x) > 1 else 1.0,
        "ppl_a": series["ppl_a"].tolist(),
        "ppl_b": series["ppl_b"].tolist(),
    }


def scatter(result: dict[str, Any], names: tuple[str, str], out: Path) -> None:
    """Draws the perplexities of every document under both models, and where they would be equal."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    x, y = result["ppl_a"], result["ppl_b"]
    ends = [min(*x, *y), max(*x, *y)]
    figure, axis = pyplot.subplots(figsize=(5, 5), layout="constrained")
    axis.plot(ends, ends, color="0.7", linewidth=1)
    axis.scatter(x, y, s=10, alpha=0.5, linewidths=0)
    axis.set(xscale="log", yscale="log", aspect="equal")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        side.set_major_formatter("{x:g}")
        side.set_minor_formatter(ticker.NullFormatter())
    axis.set(xlabel=f"perplexity, {names[0]}", ylabel=f"perplexity, {names[1]}")
    correlation, shift = result["log_ppl_correlation"], result["log_ppl_difference_mean"]
    axis.set_title(f"{len(x)} documents, r = {correlation:.4f}, mean {shift:+.4f} nats", fontsize=9)
    figure.savefig(out)
    pyplot.close(figure)


@dataclass(frozen=True)
class Kl:
    """D_KL(A || B) per token over the real vocabulary, and how often their choices agree."""

    a: Checkpoint
    """The model whose probabilities weigh: the reference."""
    b: Checkpoint
    """The model that is compared with it."""
    text: TextFlags
    out: Path | None = None
    """Also write the JSON here."""

    def run(self) -> None:
        (a, trained_on), (b, _) = load_model(self.a), load_model(self.b)
        finish(divergence(a, b, read_text(self.text, trained_on)), self.out)


@dataclass(frozen=True)
class Ppl:
    """Perplexity of every document under A and B, and how closely they follow each other."""

    a: Checkpoint
    """Run, checkpoint or Hugging Face folder."""
    b: Checkpoint
    """Another."""
    text: TextFlags
    out: Path | None = None
    """Also write the JSON, with both perplexities of every document, here."""
    plot: Path | None = None
    """Draws them here, a dot for a document, as .svg, .png or .pdf."""

    def run(self) -> None:
        (a, trained_on), (b, _) = load_model(self.a), load_model(self.b)
        rows = read_text(self.text, trained_on)
        n_targets = np.array([len(document) - 1 for document in rows.documents])
        (x, n_shapes), (y, _) = document_losses(a, rows), document_losses(b, rows)
        result = {"n_shapes": n_shapes} | compare_perplexities(x, y, n_targets)
        if self.plot is not None:
            scatter(result, (str(self.a), str(self.b)), self.plot)
        finish(result, self.out, only_written=("ppl_a", "ppl_b"))
