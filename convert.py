"""Hugging Face Olmo3 folders to our model and back.

The map between names is one table, `LAYER_TENSORS`; Hugging Face stores matrices (out, in), ours have D first.

Sources: OLMo-core nn/hf/convert.py:183 (names), nn/hf/config.py:87 (config).
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Float
from safetensors import safe_open

import olmo3

# Our leaf -> (Hugging Face name below `model.layers.N.`, whether the stored matrix is transposed).
LAYER_TENSORS = {
    "attn.w_q": ("self_attn.q_proj", True),
    "attn.w_k": ("self_attn.k_proj", True),
    "attn.w_v": ("self_attn.v_proj", True),
    "attn.w_o": ("self_attn.o_proj", False),
    "attn.q_norm": ("self_attn.q_norm", False),
    "attn.k_norm": ("self_attn.k_norm", False),
    "ffn.w_gate": ("mlp.gate_proj", True),
    "ffn.w_up": ("mlp.up_proj", True),
    "ffn.w_down": ("mlp.down_proj", False),
    "attn_norm": ("post_attention_layernorm", False),
    "ffn_norm": ("post_feedforward_layernorm", False),
}
OUTER_TENSORS = {"embed": "model.embed_tokens", "norm": "model.norm", "unembed": "lm_head"}


def config_from_hf(hf: dict) -> olmo3.ModelConfig:
    """Reads a Hugging Face config.json, every published spelling of the rotary settings included."""
    kinds = hf["layer_types"]
    period = 4 if len(kinds) % 4 == 0 else len(kinds)
    windows = tuple(hf["sliding_window"] if k == "sliding_attention" else None for k in kinds)
    rope = hf.get("rope_parameters") or {}
    full = rope.get("full_attention", rope) or hf.get("rope_scaling") or {}
    yarn = None
    if full.get("rope_type", "default") == "yarn":
        yarn = olmo3.YarnConfig(
            factor=full["factor"],
            original_context=full["original_max_position_embeddings"],
            beta_fast=full["beta_fast"],
            beta_slow=full["beta_slow"],
            attention_factor=full["attention_factor"],
        )
    return olmo3.ModelConfig(
        vocab_size=hf["vocab_size"],
        tokenizer_size=hf["vocab_size"],
        d_model=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=hf["num_attention_heads"],
        n_kv_heads=hf["num_key_value_heads"],
        d_head=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        d_ff=hf["intermediate_size"],
        windows=windows[:period],
        rope_theta=float(full.get("rope_theta") or hf["rope_theta"]),
        yarn=yarn,
        norm_eps=hf["rms_norm_eps"],
    )


def model_from_tensors(
    config: olmo3.ModelConfig, tensor: dict[str, Float[np.ndarray, "..."]]
) -> olmo3.Olmo3:
    """Builds a model from arrays under Hugging Face names, sharded for the mesh in force."""
    wanted = jax.eval_shape(lambda: olmo3.Olmo3(config, jax.random.key(0)))
    period = len(config.windows)

    def leaf(path: tuple, want: jax.ShapeDtypeStruct) -> jax.Array:
        name = ".".join(getattr(p, "name", str(getattr(p, "idx", ""))) for p in path)
        if name in OUTER_TENSORS:
            value = tensor[OUTER_TENSORS[name] + ".weight"]
        else:
            _, place, below = name.split(".", 2)
            hf_name, transposed = LAYER_TENSORS[below]
            layers = range(int(place), config.n_layers, period)
            per_layer = [tensor[f"model.layers.{i}.{hf_name}.weight"] for i in layers]
            value = np.stack([x.T if transposed else x for x in per_layer])
        value = np.asarray(value, np.float32).reshape(want.shape)
        return jax.device_put(
            jnp.asarray(value), jax.NamedSharding(jax.sharding.get_mesh(), spec(want))
        )

    def spec(want: jax.ShapeDtypeStruct) -> P:
        return want.sharding.spec if want.sharding is not None else P()

    return jax.tree_util.tree_map_with_path(leaf, wanted)


def load_hf(folder: Path, **overrides: object) -> olmo3.Olmo3:
    """Reads a Hugging Face folder into a model; `overrides` replace fields of its config."""
    import dataclasses

    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    config = dataclasses.replace(config, **overrides)
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "flax") as f:
            tensors |= {name: np.asarray(f.get_tensor(name), np.float32) for name in f.keys()}
    return model_from_tensors(config, tensors)
