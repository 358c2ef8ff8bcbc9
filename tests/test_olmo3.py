"""The model against definitions: masks, loops, formulas and the published counts."""

import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import olmo3

CONFIG = olmo3.ModelConfig(
    vocab_size=64,
    tokenizer_size=60,
    d_model=32,
    n_layers=8,
    n_heads=4,
    n_kv_heads=2,
    d_head=8,
    d_ff=48,
    windows=(4, 4, 4, None),
    compute_dtype="float32",
    remat="none",
)
ROWS = P(("data", "fsdp"), None)


@functools.cache
def build(config=CONFIG, seed=0):
    """A model on the session's mesh; made once per configuration, since compiling is what costs."""
    return jax.jit(lambda key: olmo3.Olmo3(config, key))(jax.random.key(seed))


def tokens_of(shape, seed=1, vocab=60):
    ids = jax.random.randint(jax.random.key(seed), shape, 0, vocab, jnp.int32)
    return jax.device_put(ids, ROWS)


@jax.jit
def all_logits(model, tokens, segments=None):
    return olmo3.logits(model, model(tokens, segments))


# Spec 1.4, as OLMo-core counts them: d, L, heads, kv, head dim, H -> total, non-embedding, FLOPs.
SIZES = {
    "190M": (768, 12, 12, 12, 64, 3072, 267_424_512, 190_354_176, 1_708_245_504),
    "1B": (2048, 16, 16, 16, 128, 8192, 1_484_916_736, 1_279_395_840, 9_689_247_744),
    "7B": (4096, 32, 32, 32, 128, 11008, 7_298_617_344, 6_887_575_552, 49_376_944_128),
    "13B": (5120, 40, 40, 40, 128, 13824, 13_716_198_400, 13_202_396_160, 91_794_831_360),
    "32B": (5120, 64, 40, 8, 128, 27648, 32_234_279_936, 31_720_477_696, 210_451_593_216),
}


@pytest.mark.parametrize("name", SIZES)
def test_counts_reproduce_the_published_table(name):
    d, n_layers, n, k, h, f, total, non_embedding, flops = SIZES[name]
    config = olmo3.ModelConfig(
        d_model=d, n_layers=n_layers, n_heads=n, n_kv_heads=k, d_head=h, d_ff=f
    )
    assert olmo3.n_parameters(config) == total
    assert olmo3.n_non_embedding_parameters(config) == non_embedding
    assert olmo3.flops_per_token(config, 8192) == flops


def test_flops_at_other_lengths_and_with_full_attention_everywhere():
    config = olmo3.ModelConfig()
    assert olmo3.flops_per_token(config, 4096) == 47_766_331_392
    assert olmo3.flops_per_token(config, 65_536) == 71_925_522_432
    extra = 24 * 12 * 32 * 128 * (8192 - 4096)  # 24 window layers read twice as many keys
    full = olmo3.flops_per_token(config, 8192, window_aware=False)
    assert full == olmo3.flops_per_token(config, 8192) + extra


def test_parameter_count_is_what_is_allocated():
    leaves = jax.tree.leaves(build())
    assert sum(x.size for x in leaves) == olmo3.n_parameters(CONFIG)
    assert {x.dtype for x in leaves} == {jnp.dtype("float32")}


def test_weights_are_truncated_normals_and_gains_are_ones():
    config = dataclasses.replace(CONFIG, d_model=128, d_ff=256)
    for path, leaf in jax.tree_util.tree_leaves_with_path(build(config)):
        x = np.asarray(leaf)
        if "norm" in jax.tree_util.keystr(path):
            assert (x == 1).all()
        else:
            assert np.abs(x).max() <= 0.06
            # A normal cut at three deviations has 0.98658 of the uncut one's.
            assert x.std() == pytest.approx(0.02 * 0.98658, rel=0.05)
            assert abs(x.mean()) < 0.02 * 5 / math.sqrt(x.size)


def test_every_matrix_has_its_own_key_and_no_two_layers_are_equal():
    matrices = [
        np.asarray(x[i]) if x.ndim > 2 else np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(build())
        if "norm" not in jax.tree_util.keystr(path)
        for i in range(x.shape[0] if x.ndim > 2 else 1)
    ]
    starts = {tuple(m.reshape(-1)[:4].tolist()) for m in matrices}
    assert len(starts) == len(matrices) == 2 + 8 * 7


def test_weights_do_not_depend_on_the_number_of_devices():
    eight = jax.tree.map(np.asarray, build())
    with jax.set_mesh(olmo3.make_mesh(devices=jax.devices()[:1])):
        one = jax.tree.map(np.asarray, build.__wrapped__())
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), eight, one))


def test_mask_matches_its_definition():
    segments = jnp.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2]], jnp.int32)
    for window in (1, 4, None):
        mask = np.asarray(olmo3.attention_mask(10, window, segments))[0]
        for i in range(10):
            for j in range(10):
                near = window is None or i - j < window
                assert mask[i, j] == (j <= i and near and segments[0, i] == segments[0, j])
    assert np.flatnonzero(olmo3.attention_mask(10, 4, None)[0][7]).tolist() == [4, 5, 6, 7]


def test_attention_equals_a_loop(getkey):
    q = jax.random.normal(getkey(), (8, 6, 4, 8))
    k, v = (jax.random.normal(getkey(), (8, 6, 2, 8)) for _ in range(2))
    mask = olmo3.attention_mask(6, 3, None)
    got = np.asarray(jax.jit(olmo3.attend)(q, k, v, mask))
    q, k, v = (np.asarray(x) for x in (q, k, v))
    for b in range(8):
        for s in range(6):
            for n in range(4):
                keys = range(max(0, s - 2), s + 1)
                scores = [float(q[b, s, n] @ k[b, t, n // 2]) / math.sqrt(8) for t in keys]
                weights = np.exp(scores) / np.exp(scores).sum()
                want = sum(
                    w * np.asarray(v[b, t, n // 2]) for w, t in zip(weights, keys, strict=True)
                )
                np.testing.assert_allclose(got[b, s, n], want, atol=2e-6)


def test_rotation_equals_complex_multiplication(getkey):
    config = dataclasses.replace(CONFIG, d_head=8)
    x = jax.random.normal(getkey(), (1, 1, 5, 8))  # B N S H
    table = olmo3.rope_table(config, jnp.arange(5), scaled=False)
    got = np.asarray(olmo3.rotate(x, table))[0, 0]
    pairs = np.asarray(x)[0, 0, :, :4] + 1j * np.asarray(x)[0, 0, :, 4:]
    angle = np.arange(5)[:, None] * 500_000.0 ** (-np.arange(4) / 4)
    want = pairs * np.exp(1j * angle)
    np.testing.assert_allclose(got, np.concatenate([want.real, want.imag], -1), atol=1e-6)


def test_yarn_frequencies_equal_the_reference_s_at_the_7b_geometry():
    config = olmo3.ModelConfig(yarn=olmo3.YarnConfig())
    plain, yarn = (olmo3.inverse_frequencies(config, scaled) for scaled in (False, True))
    want = {  # spec 12, run with OLMo-core
        1: (0.8146172166, 0.8146172166),
        18: (0.02495540865, 0.02495540865),
        19: (0.02032910474, 0.01928275451),
        27: (0.003942275886, 0.002116074320),
        34: (9.384738514e-4, 1.656130335e-4),
        35: (7.644967e-4, 9.556212e-5),
        63: (2.455140702e-6, 3.068925878e-7),
    }
    for i, (p, y) in want.items():
        assert plain[i] == pytest.approx(p, rel=1e-6)
        assert yarn[i] == pytest.approx(y, rel=1e-6)


def test_yarn_changes_full_layers_only():
    config = dataclasses.replace(CONFIG, yarn=olmo3.YarnConfig(original_context=8))
    model, plain = build(config), build()
    tokens = tokens_of((8, 16))
    states = jax.jit(functools.partial(olmo3.forward, keep_states=True))
    (_, scaled), (_, unscaled) = states(model, tokens), states(plain, tokens)
    for place in range(3):  # the sliding layers of the first group
        assert (np.asarray(scaled[place])[0] == np.asarray(unscaled[place])[0]).all()
    assert (np.asarray(scaled[3])[0] != np.asarray(unscaled[3])[0]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unreachable_tokens_change_no_bit_of_a_logit(dtype):
    config = dataclasses.replace(CONFIG, compute_dtype=dtype, windows=(4,), n_layers=2)
    model, tokens = build(config), np.asarray(tokens_of((8, 16)))
    base = np.asarray(all_logits(model, jax.device_put(tokens, ROWS)))

    def changed(position):
        other = tokens.copy()
        other[:, position] = (other[:, position] + 1) % 60
        return np.asarray(all_logits(model, jax.device_put(other, ROWS)))

    far, near, future = changed(8), changed(9), changed(15)
    # Two layers of window 4 reach back six positions: 15 sees 9, and not 8.
    assert (far[:, 15] == base[:, 15]).all()
    assert (near[:, 15] != base[:, 15]).any()
    assert (future[:, :15] == base[:, :15]).all()


def test_tokens_of_another_document_change_no_bit_of_a_logit():
    model, tokens = build(), np.asarray(tokens_of((8, 16)))
    segments = jax.device_put(np.tile(np.repeat([0, 1], 8).astype(np.int32), (8, 1)), ROWS)
    other = tokens.copy()
    other[:, :8] = (other[:, :8] + 1) % 60
    a, b = (
        np.asarray(all_logits(model, jax.device_put(t, ROWS), segments)) for t in (tokens, other)
    )
    assert (a[:, 8:] == b[:, 8:]).all()
    assert (a[:, :8] != b[:, :8]).any()


@pytest.mark.parametrize("chunk", [1, 5, 16, 24, 1000])
def test_chunked_loss_and_gradient_equal_the_unchunked_definition(chunk):
    config = dataclasses.replace(CONFIG, loss_chunk=chunk)
    model, tokens = build(config), tokens_of((8, 24))
    targets = jnp.where(tokens % 5 == 0, -1, tokens)

    def chunked(model, hidden):
        return olmo3.summed_loss(model, hidden, targets, 1e-2)[0]

    def plain(model, hidden):
        scores = olmo3.logits(model, hidden)
        log_sum = jax.nn.logsumexp(scores, axis=-1)
        target = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(targets >= 0, log_sum - target + 1e-2 * log_sum**2, 0.0))

    hidden = jax.jit(lambda m: m(tokens))(model)
    got, got_grads = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(model, hidden)
    want, want_grads = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(model, hidden)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1e-9, float(jnp.abs(b).max())))


def test_loss_of_a_uniform_model_is_the_log_of_the_padded_vocabulary():
    model = eqx.tree_at(lambda m: m.unembed, build(), jnp.zeros_like(build().unembed))
    targets = tokens_of((8, 16)).at[:, -1].set(-1)
    hidden = jax.jit(lambda m: m(tokens_of((8, 16))))(model)
    _, (ce, z) = jax.jit(olmo3.summed_loss, static_argnums=3)(model, hidden, targets, 0.0)
    assert float(ce) == pytest.approx(8 * 15 * math.log(64), rel=1e-6)
    assert float(z) == pytest.approx(8 * 15 * math.log(64) ** 2, rel=1e-6)


def primitives(jaxpr):
    """Every equation of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


def test_every_weight_is_gathered_once_and_every_gradient_reduced_in_float32():
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    tokens = tokens_of((8, 16))

    def loss(model):
        return olmo3.summed_loss(model, model(tokens), tokens, 1e-5)[0]

    shapes = jax.eval_shape(lambda: olmo3.Olmo3(config, jax.random.key(0)))
    equations = [*primitives(jax.make_jaxpr(jax.grad(loss))(shapes).jaxpr)]
    names = ("reshard", "all_gather", "reduce_scatter")
    moving = [e for e in equations if e.primitive.name in names]
    types = [(e.primitive.name, str(e.invars[0].aval), str(e.outvars[0].aval)) for e in moving]
    moves = [(here, there) for name, here, there in types if name == "reshard"]
    gathered = [there for here, there in moves if "@fsdp" in here and "{R:(data,fsdp)}" in there]
    reduced = [here for here, there in moves if "{U:(data,fsdp)}" in here and "@fsdp" in there]
    n_matrices = 1 + 4 * 7  # embedding, and q k v o gate up down at each place of the pattern
    assert len(gathered) == len(reduced) == n_matrices
    assert all(x.startswith("float32") for x in reduced)
    head = [(name, here) for name, here, _ in types if name != "reshard"]
    assert [(name, here.partition("[")[0]) for name, here in head] == [
        ("all_gather", "bfloat16"),
        ("reduce_scatter", "float32"),
    ]
    # What a float32 weight becomes is cast before the gather moves it: XLA commutes the two, which
    # the ahead-of-time report shows; what is used is bfloat16 in any case.
    dots = [e for e in primitives(jax.make_jaxpr(loss)(shapes).jaxpr) if "dot" in e.primitive.name]
    assert {str(v.aval.dtype) for e in dots for v in e.invars} == {"bfloat16"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layers": 6}, "n_layers=6"),
        ({"n_kv_heads": 3}, "n_kv_heads=3"),
        ({"d_head": 7}, "d_head=7"),
        ({"tokenizer_size": 65}, "tokenizer_size=65"),
        ({"windows": (4, 0)}, "windows"),
    ],
)
def test_impossible_configurations_are_refused_with_field_and_value(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **changes)
