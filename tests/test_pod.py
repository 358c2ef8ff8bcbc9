"""What a pod relies on: kernels, fused loss, recomputation, the compiled step, many processes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import olmo3

TINY = olmo3.ModelConfig(
    vocab_size=384,
    tokenizer_size=300,
    d_model=64,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    d_head=16,
    d_ff=96,
    windows=(8, None),
    compute_dtype="float32",
    remat="none",
    loss_chunk=16,
)


def rows(x):
    """An array split over the mesh by its first axis."""
    mesh = jax.sharding.get_mesh()
    return jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"))))


def heads(getkey, n_heads, n_kv_heads, d_head, length):
    """Random queries (already scaled by 1 / sqrt(H)), keys and values of 8 rows."""
    shapes = [(8, length, n, d_head) for n in (n_heads, n_kv_heads, n_kv_heads)]
    q, k, v = (rows(jax.random.normal(getkey(), shape)) for shape in shapes)
    return q * d_head**-0.5, k, v


@pytest.mark.slow
@pytest.mark.parametrize("d_head", [128, 256])
@pytest.mark.parametrize("window", [None, 96])
@pytest.mark.parametrize("packed", [False, True])
def test_splash_equals_xla_attention_forward_and_backward(getkey, d_head, window, packed):
    q, k, v = heads(getkey, 2, 1, d_head, 256)
    segments = rows(jnp.repeat(jnp.arange(8, dtype=jnp.int32), 32)[None] * jnp.ones((8, 1), int))
    segments = segments.astype(jnp.int32) // 3 if packed else None
    weight = rows(jax.random.normal(getkey(), q.shape))

    def run(backend, scale):
        config = dataclasses.replace(TINY, attention=backend)

        def value(q, k, v):
            y = olmo3.attention(config, (q * scale, k, v), window, segments)
            return jnp.sum(y * weight), y

        return jax.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))(q, k, v)

    (_, got), got_grads = run("splash", 1.0)
    (_, want), want_grads = run("xla", d_head**0.5)
    np.testing.assert_allclose(got, want, atol=2e-5)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5 * float(jnp.abs(b).max()))


def test_rotation_by_permutation_equals_complex_multiplication(getkey):
    x = np.asarray(jax.random.normal(getkey(), (1, 3, 5, 16)))
    angles = np.asarray(jax.random.normal(getkey(), (5, 8)))
    got = jax.jit(olmo3.rotate)(x, (np.cos(angles), np.sin(angles)))
    want = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles)
    np.testing.assert_allclose(got, np.concatenate([want.real, want.imag], -1), atol=1e-6)


def test_fused_loss_and_its_gradients_equal_those_of_whole_logits(getkey):
    model = jax.jit(lambda: olmo3.Olmo3(TINY, jax.random.key(0)))()
    hidden = rows(jax.random.normal(getkey(), (8, 40, 64)))
    targets = rows(jax.random.randint(getkey(), (8, 40), -1, 300, jnp.int32))

    def plain(unembed, hidden):
        scores = jnp.einsum("BSD,VD->BSV", hidden, olmo3.gather(unembed, jnp.dtype("float32")))
        normaliser = jax.nn.logsumexp(scores, axis=-1)
        chosen = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        seen = (targets >= 0).astype(jnp.float32)
        return jnp.sum((normaliser - chosen + 0.1 * normaliser**2) * seen)

    def fused(unembed, hidden):
        return olmo3.loss_of_head(unembed, hidden, targets, 0.1, 16)[0]

    for function in (plain, fused):
        value = jax.jit(jax.value_and_grad(function, (0, 1)))(model.unembed, hidden)
        if function is plain:
            want = value
    np.testing.assert_allclose(value[0], want[0], rtol=1e-6)
    for a, b in zip(value[1], want[1], strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("remat", ["light", "medium", "full"])
def test_recomputation_changes_no_gradient(getkey, remat):
    tokens = rows(jax.random.randint(getkey(), (8, 32), 0, 300, jnp.int32))

    def gradients(config):
        model = jax.jit(lambda: olmo3.Olmo3(config, jax.random.key(0)))()

        def loss(model):
            return olmo3.summed_loss(model, model(tokens), tokens, 1e-5)[0]

        return jax.tree.leaves(jax.jit(jax.grad(loss))(model))

    for a, b in zip(
        gradients(dataclasses.replace(TINY, remat=remat)), gradients(TINY), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()))
