"""OLMo 3: the model, its loss, and its parameter and FLOP counts.

Axis letters, the same in annotations, einsum and rearrange:

    B batch             N query heads              D d_model, the residual stream
    S query position    K key/value heads          F d_ff, the SwiGLU width
    T key position      G query heads per key head V padded vocabulary
    C loss chunk        H head dimension           L layers that share a place in the window pattern

Mesh axes: "data" replicates, "fsdp" shards. Every matrix is stored with its D (embeddings: V)
first, and that dimension is split over "fsdp"; norm gains are replicated; activations are split
over both by batch.

Sources: OLMo-core (src/olmo_core, June 2026, after 2.5.0) for arithmetic, cited at the line it
justifies; transformers 5.24.0 modeling_olmo3.py agrees with it.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import AxisType, Mesh, get_abstract_mesh, reshard
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Int32, Key


@dataclass(frozen=True)
class YarnConfig:
    """RoPE scaling of the long-context stage (YaRN, arXiv 2309.00071); full layers only."""

    factor: float = 8.0
    """How many times longer the context becomes."""
    original_context: int = 8192
    """Context length before scaling, in tokens."""
    beta_fast: float = 32.0
    """Dimensions that turn more often than this in the original context keep their frequency."""
    beta_slow: float = 1.0
    """Dimensions that turn less often than this are slowed by the whole factor."""
    attention_factor: float = 1.2079441541679836
    """Multiplies cos and sin, hence its square the scores; 0.1 ln(factor) + 1."""


@dataclass(frozen=True)
class ModelConfig:
    """One OLMo 3. The defaults are the 7B (OLMo-core nn/transformer/config.py:972)."""

    vocab_size: int = 100_352
    """Rows of both embeddings: the tokenizer's ids, padded to a multiple of 128."""
    tokenizer_size: int = 100_278
    """Ids the tokenizer can produce; the rest train as never-seen targets and are not exported."""
    d_model: int = 4096
    """Width of the residual stream."""
    n_layers: int = 32
    """Blocks; a multiple of the window pattern."""
    n_heads: int = 32
    """Query heads."""
    n_kv_heads: int = 32
    """Key/value heads; query head i reads key head i // (n_heads / n_kv_heads)."""
    d_head: int = 128
    """Width of one head."""
    d_ff: int = 11_008
    """Hidden width of the SwiGLU."""
    windows: tuple[int | None, ...] = (4096, 4096, 4096, None)
    """Attention window of each layer in turn, repeated; counts the query itself, None is full."""
    rope_theta: float = 500_000.0
    """Base of the rotary frequencies, the same in every layer."""
    yarn: YarnConfig | None = None
    """Scaling of the rotary frequencies in full-attention layers; None is none."""
    norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    init_std: float = 0.02
    """Deviation of every matrix before truncation at three of them."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of forward and backward; weights, norms, rotary, softmax and loss are float32 in any case."""
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"
    """Implementation of attention; auto is splash on TPU, cudnn on GPU, xla elsewhere."""
    remat: Literal["none", "light", "medium", "full"] = "full"
    """What the backward pass recomputes, from nothing to all of a group; see saved_activations."""
    loss_chunk: int = 1024
    """Positions of each sequence whose logits exist at a time."""

    def __post_init__(self) -> None:
        if self.n_layers % len(self.windows):
            raise ValueError(
                f"n_layers={self.n_layers} is not a multiple of the {len(self.windows)} layers of"
                f" windows={self.windows}; change the depth or give the pattern whole"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} does not divide over n_kv_heads={self.n_kv_heads};"
                " use a divisor of n_heads"
            )
        if self.d_head % 2:
            raise ValueError(f"d_head={self.d_head} must be even: rotary embedding turns pairs")
        if not 0 < self.tokenizer_size <= self.vocab_size:
            raise ValueError(
                f"tokenizer_size={self.tokenizer_size} must be in 1..vocab_size={self.vocab_size};"
                " pad the vocabulary up to a multiple of 128"
            )
        if any(w is not None and w < 1 for w in self.windows):
            raise ValueError(
                f"windows={self.windows}: a window holds at least one key; None is full"
            )

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype as a dtype."""
        return jnp.dtype(self.compute_dtype)


def make_mesh(n_data: int = 1, n_fsdp: int | None = None, devices: list | None = None) -> Mesh:
    """Makes the explicit ("data", "fsdp") mesh; the default shards over every device given.

    Slices of a multi-slice TPU job become rows of it, so that "fsdp" never leaves one.
    """
    devices = jax.devices() if devices is None else devices
    slices = [getattr(d, "slice_index", 0) if d.platform == "tpu" else 0 for d in devices]
    names, n_slices = sorted(set(slices)), len(set(slices))
    n_fsdp = len(devices) // n_data if n_fsdp is None else n_fsdp
    if n_data % n_slices:
        raise ValueError(
            f"replicas={n_data} is not a multiple of the job's {n_slices} slices, none of which may"
            f" share a copy of the state; pass --replicas {n_slices}"
        )
    kinds = (AxisType.Explicit,) * 2
    parts = [[d for d, s in zip(devices, slices, strict=True) if s == name] for name in names]
    shape = (n_data // n_slices, n_fsdp)
    grids = [jax.make_mesh(shape, ("data", "fsdp"), kinds, devices=p).devices for p in parts]
    return Mesh(np.concatenate(grids), ("data", "fsdp"), axis_types=kinds)


def init_matrix(key: Key[Array, ""], std: float, *shape: int) -> Float32[Array, "..."]:
    """Truncated normal, cut at three deviations, uncompensated (nn/transformer/init.py:30)."""
    spec = P("fsdp", *[None] * (len(shape) - 1))
    draw = jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32, out_sharding=spec)
    return draw * std


def init_gain(*shape: int) -> Float32[Array, "..."]:
    """Ones, replicated: norm gains are too small to shard."""
    return jnp.ones(shape, jnp.float32, out_sharding=P(*[None] * len(shape)))


def gather(w: Float[Array, "..."], dtype: jnp.dtype, flat: bool = False) -> Float[Array, "..."]:
    """All-gathers a sharded master weight for one matmul; all weights but the head's in the loss.

    `flat` merges the axes behind the first, which is how TPUs multiply them fastest.

    `reduced` promises that the cotangent may arrive unreduced, so the transpose is a
    reduce-scatter. Casting after the reshard keeps that reduction in float32, as the recipe's
    reduce_dtype asks (OLMo-3-1025-7B-pretrain-1.py:84); XLA moves the cast ahead, so the forward
    pass gathers bfloat16. Shards become an axis of their own on the way: where their rows are cut
    out of a matrix, the TPU compiler sums the whole gradient on every device instead of scattering.
    """
    n_shards = jax.typeof(w).sharding.mesh.shape["fsdp"]
    n_rows, width = w.shape[0], math.prod(w.shape[1:])
    shards = jax.lax.reshape(w, (n_shards, n_rows // n_shards, width), out_sharding=P("fsdp"))
    shape = (n_rows, width) if flat else w.shape
    # Backwards in this order: scattered within a replica first, so that only shards cross replicas.
    shards = reshard(shards, P("fsdp", reduced=frozenset({"data"})))
    reduced = P(reduced=frozenset({"data", "fsdp"}))
    whole = jax.lax.reshape(reshard(shards, reduced), shape, out_sharding=reduced)
    return whole.astype(dtype)


def platform() -> str:
    """Where the current mesh computes, even if its devices are absent: cpu, gpu or tpu."""
    device = get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def apart(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Ends a fusion on TPU, in the forward and the backward pass.

    The compiler likes to work a norm's sums into the neighbouring matmul, which then runs at half
    speed: by its own estimate 2.2 ms a layer and step of the 7B on tpu7x.
    """
    return jax.lax.optimization_barrier(x) if platform() == "tpu" else x


@jax.named_scope("norm")
def rms_norm(
    x: Float[Array, "*B S D"], gain: Float[Array, " D"], eps: float
) -> Float[Array, "*B S D"]:
    """Normalises the last axis; float32 inside, gain applied before the cast back.

    The gain is rounded to the compute dtype first, as the reference's mixed precision does (spec
    T10). Source: OLMo-core nn/layer_norm.py:210.
    """
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + eps)
    return (h * gain.astype(x.dtype).astype(jnp.float32)).astype(x.dtype)


def inverse_frequencies(config: ModelConfig, scaled: bool) -> Float32[np.ndarray, " half"]:
    """Radians per position of each pair of dimensions (OLMo-core nn/rope.py:48, YaRN at :249)."""
    exponent = np.arange(0, config.d_head, 2, dtype=np.float32) / np.float32(config.d_head)
    plain = np.float32(1.0) / np.power(np.float32(config.rope_theta), exponent)
    if config.yarn is None or not scaled:
        return plain
    yarn, half = config.yarn, config.d_head // 2

    def dimension(turns: float) -> float:
        ratio = yarn.original_context / (2 * math.pi * turns)
        return config.d_head * math.log(ratio) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), half - 1)
    ramp = (np.arange(half, dtype=np.float32) - low) / np.float32(max(high - low, 1e-3))
    ramp = np.clip(ramp, 0, 1)
    return (plain / np.float32(yarn.factor)) * ramp + plain * (1 - ramp)


def rope_table(
    config: ModelConfig, positions: Int32[Array, "*S"], scaled: bool
) -> tuple[Float32[Array, "*S half"], Float32[Array, "*S half"]]:
    """Cosines and sines of every position, float32: bfloat16 would round position 257 to 256."""
    angles = positions.astype(jnp.float32)[..., None] * inverse_frequencies(config, scaled)
    scale = config.yarn.attention_factor if config.yarn is not None and scaled else 1.0
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


@jax.custom_vjp
def rotate(
    x: Float[Array, "B N S H"], table: tuple[Float32[Array, "S half"], Float32[Array, "S half"]]
) -> Float[Array, "B N S H"]:
    """Turns the pairs (i, i + H/2) in float32 and rounds back (OLMo-core nn/rope.py:470-578).

    The partner of every number comes from a product with a signed permutation, which is exact and
    which TPUs fuse with the rest; half vectors would each fill half a register. The gradient is the
    inverse turn.
    """
    cos, sin = (jnp.concatenate([t, t], axis=-1) for t in table)
    half = x.shape[-1] // 2
    swap = np.zeros((2 * half, 2 * half), np.float32)
    swap[np.arange(half) + half, np.arange(half)] = -1  # -x2 into the first half
    swap[np.arange(half), np.arange(half) + half] = 1  # x1 into the second
    partner = jnp.einsum("BNSH,HI->BNSI", x, jnp.asarray(swap, x.dtype), precision="highest")
    return (x.astype(jnp.float32) * cos + partner.astype(jnp.float32) * sin).astype(x.dtype)


def rotate_forward(x: Array, table: tuple) -> tuple[Array, tuple]:
    """The turn, and what its gradient needs."""
    return rotate(x, table), table


def rotate_backward(table: tuple, ct: Array) -> tuple[Array, None]:
    """The gradient's turn; positions are not trained."""
    return rotate(ct, (table[0], -table[1])), None


rotate.defvjp(rotate_forward, rotate_backward)


def attention_mask(
    n_queries: int, window: int | None, segments: Int32[Array, "B S"] | None
) -> Bool[Array, "#B S T"]:
    """True where query S may read key T: not ahead, less than `window` back, same document."""
    back = jnp.arange(n_queries)[:, None] - jnp.arange(n_queries)[None, :]
    mask = (back >= 0) & (back < (n_queries if window is None else window))
    if segments is None:
        return mask[None]
    return mask[None] & (segments[:, :, None] == segments[:, None, :])


def attention_backend(config: ModelConfig, n_positions: int) -> str:
    """What "auto" means here; rows that do not divide into splash's tiles of 128 go through XLA."""
    if config.attention != "auto":
        return config.attention
    if platform() == "tpu" and n_positions % 128 == 0:
        return "splash"
    return "cudnn" if platform() == "gpu" and config.compute_dtype != "float32" else "xla"


def splash(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    window: int | None,
    segments: Int32[Array, "B S"] | None,
) -> Float[Array, "B S N H"]:
    """JAX's Pallas flash attention on one device's rows; `q` comes already scaled.

    Tiles of 1024 x 1024, keys taken 512 at a time, schedule to the fewest bundles of the sizes that
    benchmarks/splash.py tries on tpu7x and v5p: larger ones compute more of the mask's edge for
    nothing, smaller ones start over more often. Off TPU the kernel is interpreted.
    """
    n_positions, n_heads = q.shape[1:3]
    tile, inner = math.gcd(n_positions, 1024), math.gcd(n_positions, 512)
    sizes = splash_attention_kernel.BlockSizes(
        tile, tile, inner, tile, tile, inner, use_fused_bwd_kernel=True
    )
    shape = (n_positions, n_positions)
    mask = splash_attention_mask.CausalMask(shape)
    if window is not None and window < n_positions:
        mask = splash_attention_mask.LocalMask(shape, (window - 1, 0), 0)
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * n_heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="heads",
        interpret=platform() != "tpu",
    )
    ids = None if segments is None else splash_attention_kernel.SegmentIds(segments, segments)
    q, k, v = (rearrange(x, "B S N H -> B N S H") for x in (q, k, v))
    y: Any = jax.vmap(kernel)(q, k, v, ids)
    return rearrange(y, "B N S H -> B S N H")


def attention(
    config: ModelConfig,
    qkv: tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]],
    window: int | None,
    segments: Int32[Array, "B S"] | None,
) -> Float[Array, "B S N H"]:
    """Causal attention within `window` and `segments` by the platform's implementation.

    Kernels see one device's rows. Splash does not scale, so for it `q` comes scaled.
    """
    q, k, v = qkv
    backend = attention_backend(config, q.shape[1])
    if backend == "xla":
        y = attend(q, k, v, attention_mask(q.shape[1], window, segments))
        return checkpoint_name(y, "heads")
    if backend == "cudnn" and segments is not None:
        raise ValueError("attention=cudnn takes no segments; pass --model.attention xla")

    def local(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        if backend == "splash":
            return splash(q, k, v, window, segments)
        reach = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=reach, implementation="cudnn"
        )

    rows = P(jax.typeof(q).sharding.spec[0])
    with jax.named_scope("attention"):
        y = jax.shard_map(local, in_specs=rows, out_specs=rows, check_vma=False)(q, k, v, segments)
    return y if backend == "splash" else checkpoint_name(y, "heads")


@jax.named_scope("attention")
def attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    mask: Bool[Array, "#B S T"],
) -> Float[Array, "B S N H"]:
    """Softmax attention with scale 1/sqrt(H), rounded where flash attention rounds (spec 2).

    Scores, exponentials and sums are float32; the weights are rounded to the compute dtype before
    they are divided by their sum, not after.
    """
    q = rearrange(q, "B S (K G) H -> B S K G H", K=k.shape[2])
    scores = jnp.einsum("BSKGH,BTKH->BKGST", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = rearrange(jnp.sum(weights, axis=-1), "B K G S -> B S K G 1")
    weights = weights.astype(v.dtype)
    y = jnp.einsum("BKGST,BTKH->BSKGH", weights, v, preferred_element_type=jnp.float32)
    return rearrange((y / total).astype(v.dtype), "B S K G H -> B S (K G) H")


class Attention(eqx.Module):
    """Grouped-query attention; queries and keys are normalised whole, before they are heads."""

    w_q: Float32[Array, "D N H"]
    w_k: Float32[Array, "D K H"]
    w_v: Float32[Array, "D K H"]
    w_o: Float32[Array, "D N H"]
    q_norm: Float32[Array, "N H"]
    k_norm: Float32[Array, "K H"]

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        d, n, k, h = config.d_model, config.n_heads, config.n_kv_heads, config.d_head
        k_q, k_k, k_v, k_o = jax.random.split(key, 4)
        self.w_q = init_matrix(k_q, config.init_std, d, n, h)
        self.w_k = init_matrix(k_k, config.init_std, d, k, h)
        self.w_v = init_matrix(k_v, config.init_std, d, k, h)
        self.w_o = init_matrix(k_o, config.init_std, d, n, h)
        self.q_norm = init_gain(n, h)
        self.k_norm = init_gain(k, h)

    def project(
        self, x: Float[Array, "B S D"], table: tuple, eps: float, q_scale: float = 1.0
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Queries, keys and values, ready to attend (OLMo-core nn/attention/__init__.py:549).

        `q_scale` multiplies the queries before they are rounded, for kernels that do not scale.
        """
        q, k, v = (
            apart(checkpoint_name(jnp.einsum("BSD,DF->BSF", x, gather(w, x.dtype, True)), name))
            for w, name in ((self.w_q, "q"), (self.w_k, "k"), (self.w_v, "v"))
        )
        q = rms_norm(q, self.q_norm.reshape(-1), eps)
        k = rms_norm(k, self.k_norm.reshape(-1), eps)
        d_head = self.w_q.shape[-1]
        q, k, v = (rearrange(y, "B S (N H) -> B N S H", H=d_head) for y in (q, k, v))
        q, k = rotate(q, tuple(t * q_scale for t in table)), rotate(k, table)
        q, k, v = (rearrange(y, "B N S H -> B S N H") for y in (q, k, v))
        return q, k, v

    def output(self, y: Float[Array, "B S N H"]) -> Float[Array, "B S D"]:
        """Mixes the heads back into the residual width."""
        y = jnp.einsum("BSNH,DNH->BSD", y, gather(self.w_o, y.dtype))
        return checkpoint_name(y, "attn")


class FeedForward(eqx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (OLMo-core nn/feed_forward.py:171).

    The product is rounded once, as the reference's compiled blocks do (spec 2).
    """

    w_gate: Float32[Array, "D F"]
    w_up: Float32[Array, "D F"]
    w_down: Float32[Array, "D F"]

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        k_gate, k_up, k_down = jax.random.split(key, 3)
        self.w_gate = init_matrix(k_gate, config.init_std, config.d_model, config.d_ff)
        self.w_up = init_matrix(k_up, config.init_std, config.d_model, config.d_ff)
        self.w_down = init_matrix(k_down, config.init_std, config.d_model, config.d_ff)

    @jax.named_scope("ffn")
    def __call__(self, x: Float[Array, "B S D"], place: int = 0) -> Float[Array, "B S D"]:
        gate = jnp.einsum("BSD,DF->BSF", x, gather(self.w_gate, x.dtype))
        up = jnp.einsum("BSD,DF->BSF", x, gather(self.w_up, x.dtype))
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, f"up{place}")
        hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        y = jnp.einsum("BSF,DF->BSD", hidden.astype(x.dtype), gather(self.w_down, x.dtype))
        return checkpoint_name(y, "ffn")


class Block(eqx.Module):
    """Reordered norm: a sub-layer reads the raw residual, its output is normed (block.py:293)."""

    attn: Attention
    ffn: FeedForward
    attn_norm: Float32[Array, " D"]
    ffn_norm: Float32[Array, " D"]

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        k_attn, k_ffn = jax.random.split(key)
        self.attn = Attention(config, k_attn)
        self.ffn = FeedForward(config, k_ffn)
        self.attn_norm = init_gain(config.d_model)
        self.ffn_norm = init_gain(config.d_model)

    def add_attention(
        self, x: Float[Array, "B S D"], y: Float[Array, "B S N H"], eps: float
    ) -> Float[Array, "B S D"]:
        """The residual after attention, from what the heads read."""
        return apart(x + rms_norm(self.attn.output(y), self.attn_norm, eps))

    def add_ffn(
        self, x: Float[Array, "B S D"], eps: float, place: int = 0
    ) -> Float[Array, "B S D"]:
        """The residual after the feed-forward layer; `place` in the pattern names activations."""
        return apart(x + rms_norm(self.ffn(x, place), self.ffn_norm, eps))


class Olmo3(eqx.Module):
    """Embedding, blocks, final norm, untied head.

    `blocks[i]` holds the layers at place i of the window pattern, stacked: layer l of the network
    is `blocks[l % len(windows)]` at index l // len(windows) of every leaf's leading L axis.
    """

    embed: Float32[Array, "V D"]
    blocks: tuple[Block, ...]
    norm: Float32[Array, " D"]
    unembed: Float32[Array, "V D"]
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        period = len(config.windows)
        k_embed, k_unembed, k_blocks = jax.random.split(key, 3)
        keys = rearrange(
            jax.random.split(k_blocks, config.n_layers), "(L period) -> period L", period=period
        )
        self.embed = init_matrix(k_embed, config.init_std, config.vocab_size, config.d_model)
        self.blocks = tuple(
            eqx.filter_vmap(functools.partial(Block, config))(keys[i]) for i in range(period)
        )
        self.norm = init_gain(config.d_model)
        self.unembed = init_matrix(k_unembed, config.init_std, config.vocab_size, config.d_model)
        self.config = config

    def __call__(
        self, tokens: Int32[Array, "B S"], segments: Int32[Array, "B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """What the head reads: final states, normed; `segments` confines attention to documents."""
        return forward(self, tokens, segments)[0]


def saved_activations(config: ModelConfig) -> tuple[str, ...]:
    """Names of what the `remat` policy keeps for the backward pass; the rest is recomputed.

    "light" keeps every result of a matmul or kernel, so that only element-wise work is repeated.
    "medium" gives back an eighth of that memory for 4 % more matmul work: the values, and one of
    the feed-forward products of the last layer of each group.
    """
    ups = tuple(f"up{i}" for i in range(len(config.windows)))
    return {
        "none": (),
        "light": ("q", "k", "v", "heads", "attn", "gate", *ups, "ffn"),
        "medium": ("q", "k", "heads", "attn", "gate", *ups[:-1], "ffn"),
        "full": (),
    }[config.remat]


@jax.named_scope("embed")
def embed_tokens(model: Olmo3, tokens: Int32[Array, "B S"]) -> Float[Array, "B S D"]:
    """Rows of the embedding, one per token, split over the mesh like the tokens."""
    table = gather(model.embed, model.config.dtype)
    return table.at[tokens].get(out_sharding=P(*jax.typeof(tokens).sharding.spec, None))


def forward(
    model: Olmo3,
    tokens: Int32[Array, "B S"],
    segments: Int32[Array, "B S"] | None = None,
    keep_states: bool = False,
) -> tuple[Float[Array, "B S D"], tuple[Float[Array, "L B S D"], ...] | None]:
    """Runs the blocks, one scan step per repetition of the window pattern.

    Returns:
        hidden: the final states after the last norm.
        states: with `keep_states`, the residual after each block, laid out like `model.blocks`.
    """
    config, n_positions = model.config, tokens.shape[1]
    positions = jnp.arange(n_positions)
    tables = {scaled: rope_table(config, positions, scaled) for scaled in (False, True)}
    q_scale = config.d_head**-0.5 if attention_backend(config, n_positions) == "splash" else 1.0

    def group(
        x: Float[Array, "B S D"], blocks: tuple[Block, ...]
    ) -> tuple[Float[Array, "B S D"], tuple[Float[Array, "B S D"], ...] | None]:
        states = []
        # Left alone, TPUs keep the stream with positions innermost: 1.0 ms more a layer and step.
        x = with_layout_constraint(x, Layout((0, 1, 2)))
        for i, (block, window) in enumerate(zip(blocks, config.windows, strict=True)):
            qkv = block.attn.project(x, tables[window is None], config.norm_eps, q_scale)
            y = attention(config, qkv, window, segments)
            x = block.add_attention(x, y, config.norm_eps)
            x = block.add_ffn(x, config.norm_eps, i)
            states.append(x)
        return x, tuple(states) if keep_states else None

    if config.remat != "none":
        policy = jax.checkpoint_policies.save_only_these_names(*saved_activations(config))
        group = jax.checkpoint(group, policy=policy, prevent_cse=False)
    x, states = jax.lax.scan(group, embed_tokens(model, tokens), model.blocks)
    return rms_norm(x, model.norm, config.norm_eps), states


@jax.named_scope("unembed")
def logits(model: Olmo3, hidden: Float[Array, "B S D"]) -> Float32[Array, "B S V"]:
    """Scores of the next token: rounded to the compute dtype as in the reference, then float32."""
    head = gather(model.unembed, hidden.dtype)
    return jnp.einsum("BSD,VD->BSV", hidden, head).astype(jnp.float32)


def vocabulary_gradients(
    head: Float[Array, "V D"],
    hidden: Float[Array, "n C D"],
    targets: Int32[Array, "n C"],
    z_weight: float,
) -> tuple[Float32[Array, "2"], Float32[Array, "V D"], Float[Array, "n C D"]]:
    """Sums of cross-entropy and squared log-normaliser, and the gradients of ce + z_weight * z.

    Works through n chunks of C positions. The loss is linear in what it hands back, so both
    gradients come out of the forward pass: three products with the vocabulary instead of the four
    of recomputation, and no logits are kept. The head's gradient is summed in float32.
    """

    def step(carry: tuple, xs: tuple) -> tuple[tuple, Array]:
        sums, d_head = carry
        x, target = xs
        # Rounded to the compute dtype as the reference's matmul does, then float32 (spec T10).
        scores = jnp.einsum("CD,VD->CV", x, head)
        normaliser = jax.nn.logsumexp(scores.astype(jnp.float32), axis=-1)
        is_target = target >= 0
        chosen = jnp.maximum(target, 0)[:, None]
        target_score = jnp.take_along_axis(scores, chosen, axis=-1)[:, 0].astype(jnp.float32)
        ce = jnp.where(is_target, normaliser - target_score, 0.0)
        z = jnp.where(is_target, jnp.square(normaliser), 0.0)
        scale = jnp.where(is_target, 1.0 + 2.0 * z_weight * normaliser, 0.0)
        p = jnp.exp(scores.astype(jnp.float32) - normaliser[:, None]) * scale[:, None]
        hit = jnp.arange(head.shape[0])[None, :] == jnp.where(is_target, target, -1)[:, None]
        d_scores = (p - hit.astype(jnp.float32)).astype(head.dtype)
        d_x = jnp.einsum("CV,VD->CD", d_scores, head)
        d_head += jnp.einsum("CV,CD->VD", d_scores, x, preferred_element_type=jnp.float32)
        return (sums + jnp.stack([jnp.sum(ce), jnp.sum(z)]), d_head), d_x

    zeros = jnp.zeros(2, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    (sums, d_head), d_hidden = jax.lax.scan(step, zeros, (hidden, targets))
    return sums, d_head, d_hidden


def fused_loss(
    unembed: Float32[Array, "V D"],
    hidden: Float[Array, "B S D"],
    targets: Int32[Array, "B S"],
    z_weight: float,
    chunk: int,
) -> tuple[Float32[Array, "2"], tuple]:
    """Sums over all targets, and the gradients; each device works on its own rows.

    The head is gathered once, in the compute dtype, and its gradient is reduced once, in float32.
    """
    rows = jax.typeof(hidden).sharding.spec[0]
    axes = (rows,) if isinstance(rows, str) else rows or ()

    def local(unembed: Array, hidden: Array, targets: Array) -> tuple:
        head = jax.lax.all_gather(unembed.astype(hidden.dtype), "fsdp", tiled=True)
        size = min(chunk, hidden.shape[1]) * hidden.shape[0]
        flat = rearrange(hidden, "B S D -> (B S) D"), targets.reshape(-1)
        padding = -flat[1].size % size
        x = jnp.pad(flat[0], ((0, padding), (0, 0))).reshape(-1, size, hidden.shape[-1])
        y = jnp.pad(flat[1], (0, padding), constant_values=-1).reshape(-1, size)
        sums, d_head, d_hidden = vocabulary_gradients(head, x, y, z_weight)
        d_hidden = d_hidden.reshape(-1, hidden.shape[-1])[: flat[1].size].reshape(hidden.shape)
        if "fsdp" in axes:
            d_head = jax.lax.psum_scatter(d_head, "fsdp", tiled=True)
        others = tuple(a for a in axes if a != "fsdp")
        if others:
            d_head = jax.lax.psum(d_head, others)
        return jax.lax.psum(sums, axes), d_head, d_hidden

    sums, d_head, d_hidden = jax.shard_map(
        local,
        in_specs=(P("fsdp"), P(rows), P(rows)),
        out_specs=(P(), P("fsdp"), P(rows)),
        check_vma=False,
    )(unembed, hidden, targets)
    return sums, (d_head, d_hidden)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def loss_of_head(
    unembed: Float32[Array, "V D"],
    hidden: Float[Array, "B S D"],
    targets: Int32[Array, "B S"],
    z_weight: float,
    chunk: int,
) -> tuple[Float32[Array, ""], Float32[Array, "2"]]:
    """ce + z_weight * z, which is differentiated, and (ce, z), which are not."""
    sums, _ = fused_loss(unembed, hidden, targets, z_weight, chunk)
    return sums[0] + z_weight * sums[1], sums


def loss_of_head_forward(*args: Any) -> tuple[tuple, tuple]:  # noqa: ANN401
    """The loss, and its gradients already."""
    sums, gradients = fused_loss(*args)
    return (sums[0] + args[3] * sums[1], sums), gradients


def loss_of_head_backward(z_weight: float, chunk: int, gradients: tuple, ct: tuple) -> tuple:
    """Scales the gradients by the cotangent of the loss, which is 1 in training."""
    del z_weight, chunk
    d_head, d_hidden = gradients
    return ct[0] * d_head, (ct[0] * d_hidden.astype(jnp.float32)).astype(d_hidden.dtype), None


loss_of_head.defvjp(loss_of_head_forward, loss_of_head_backward)


@jax.named_scope("loss")
def summed_loss(
    model: Olmo3, hidden: Float[Array, "B S D"], targets: Int32[Array, "B S"], z_weight: float
) -> tuple[Float32[Array, ""], tuple[Float32[Array, ""], Float32[Array, ""]]]:
    """ce + z_weight * z summed over targets, for training, with the two sums beside it."""
    head = model.unembed.astype(jnp.float32)  # its gradient is; a no-op but for bfloat16 state
    # custom_vjp hides the type of what it returns.
    result: Any = loss_of_head(head, hidden, targets, z_weight, model.config.loss_chunk)
    loss, sums = result
    return loss, (sums[0], sums[1])


def n_parameters(config: ModelConfig) -> int:
    """All trained numbers (spec 1.4's "total params")."""
    d, n, k, h = config.d_model, config.n_heads, config.n_kv_heads, config.d_head
    block = 2 * d * n * h + 2 * d * k * h + n * h + k * h + 3 * d * config.d_ff + 2 * d
    return config.n_layers * block + 2 * config.vocab_size * d + d


def n_non_embedding_parameters(config: ModelConfig) -> int:
    """All but the input embedding; the head counts (OLMo-core nn/transformer/config.py:509)."""
    return n_parameters(config) - config.vocab_size * config.d_model


def flops_per_token(config: ModelConfig, n_positions: int, window_aware: bool = True) -> int:
    """Forward and backward FLOPs of one token, OLMo-core's count (nn/transformer/model.py:982).

    6 per weight, 12 N H per visible key and layer, no half for causality; input embedding and block
    norms are free. `window_aware=False` counts every layer as full attention, as published MFU
    figures do.
    """
    d, n, k, h = config.d_model, config.n_heads, config.n_kv_heads, config.d_head
    weights = 2 * d * n * h + 2 * d * k * h + n * h + k * h + 3 * d * config.d_ff
    reach = [
        n_positions if w is None or not window_aware else min(w, n_positions)
        for w in config.windows
    ]
    keys = sum(reach) * (config.n_layers // len(config.windows))
    return config.n_layers * 6 * weights + 12 * n * h * keys + 6 * (config.vocab_size + 1) * d
