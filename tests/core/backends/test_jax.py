"""JAX: which devices have a float8 matmul, and what XLA is asked for."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip(
        f"JAX's kernels; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import keras_policy_ext as kpe
from conftest import visible_gpus
from finer_scales import ANY_ROW, E4M3, MX, ROW, THIN, WHOLE, asked
from keras_policy_ext import kernels
from keras_policy_ext.backends import devices, emulated
from keras_policy_ext.backends.jax import engine
from keras_policy_ext.backends.jax.engine import ENGINE
from keras_policy_ext.backends.matmuls import Request
from keras_policy_ext.numerics.casting import (
    encode_scales,
    quantize_dequantize,
)
from keras_policy_ext.numerics.quantized import Quantized, quantize


class Device:
    device_kind = "some device"

    def __init__(self, capability):
        if capability is not None:
            self.compute_capability = capability


def on(monkeypatch, capability):
    """Run the test on this GPU."""
    # Looked up anew.
    monkeypatch.setattr(engine, "found", engine.found.__wrapped__)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device(capability)])


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        ("9.0", "native"),
        ("8.9", "native"),
        ("10.0", "native"),
        ("8.0", "emulated"),
        ("gfx942", "emulated"),
        (None, "emulated"),
    ],
)
def test_a_device_without_float8_hardware_emulates(
    monkeypatch, capability, kind
):
    on(monkeypatch, capability)
    choice = kernels.select("ab,bc->ac")
    assert choice.kind == kind
    if kind == "emulated":
        assert "some device" in choice.reason
    with kernels.prefer("native"):
        assert kernels.select("ab,bc->ac").kind == "native"


def products_of_a_step(rows, policy, platform):
    """The matmuls in a step's program, before XLA sees it."""
    layer = kpe.layers.Dense(5, dtype=policy)
    layer.build((rows, 8))
    weights = [v.value for v in layer.trainable_variables]

    def loss(weights, x):
        with kernels.prefer("native"):
            outputs, _ = layer.stateless_call(weights, [], x, training=True)
        return jnp.sum(outputs * jnp.sin(outputs))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    x = jnp.ones((rows, 8), layer.compute_dtype)
    traced = gradient.trace(weights, x)
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    products = [x for x in program.splitlines() if "dot_general" in x]
    assert len(products) == 3
    return products


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_only_the_forward_matmul_may_accumulate_fast(platform):
    products = products_of_a_step(4, "float8/4_from_float32", platform)
    words = {"cuda": "allow_imprecise_accumulation = false"}
    exact = [words.get(platform, "[HIGHEST, HIGHEST]") in x for x in products]
    assert sorted(exact) == [False, True, True]


@pytest.mark.parametrize("source", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("recipe", ["float8/4", "float8/current"])
def test_a_matmul_for_cuda_names_its_algorithm(recipe, source):
    """XLA then calls cuBLASLt. A small matmul is scaled in float32."""
    for product in products_of_a_step(4, f"{recipe}_from_{source}", "cuda"):
        operands, result = product.split(":")[-1].split("->")
        assert "algorithm = <" in product
        assert operands.count("xf8E") == 2
        assert "xf32>" in result


def test_a_large_matmul_for_cuda_writes_the_compute_dtype():
    """Its scales are products of no powers of two: cuBLASLt applies them."""

    def multiply(x, y, scale):
        a, b = (
            Quantized(
                values, scale, asked(WHOLE.tile, scale_rounding="nearest")
            )
            for values in (x, y)
        )
        return engine.Float8Dot().multiply(a, b, "bfloat16", fast=True)

    traced = jax.jit(multiply).trace(
        jax.ShapeDtypeStruct((1, 4096, 64), E4M3),
        jax.ShapeDtypeStruct((1, 1024, 64), E4M3),
        jax.ShapeDtypeStruct((1, 1, 1), "float32"),
    )
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    (product,) = [x for x in program.splitlines() if "dot_general" in x]
    assert product.rpartition("->")[2].strip().endswith("x1024xbf16>")
    assert "allow_imprecise_accumulation = true" in product


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_any_other_product_is_one_of_float8_values(platform):
    policy = "float8/4_from_mixed_bfloat16"
    for product in products_of_a_step(4, policy, platform):
        operands, result = product.split(":")[-1].split("->")
        assert operands.count("xf8E") == 2
        assert "xf32>" in result


@pytest.mark.parametrize(
    ("platform", "rounds"), [("cuda", True), ("tpu", True), ("cpu", False)]
)
def test_values_are_rounded_before_a_cast_that_xla_may_drop(platform, rounds):
    """A cast to float8 and back is nothing to XLA for a GPU."""

    def there_and_back(x):
        return quantize_dequantize(x, 1.0, "float8_e4m3fn")

    traced = jax.jit(there_and_back).trace(jnp.ones(4))
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("bitcast_convert" in program) == rounds


# Scales finer than a tensor


def select(a, b, prefer="auto"):
    return ENGINE.select(Request("forward", a, b, False, prefer, True))


@pytest.mark.parametrize(
    ("capability", "rows", "mx"),
    [
        ("8.0", "has no float8 matmul", "is no Blackwell that scales MX"),
        ("9.0", None, "capability 9.0) is no Blackwell that scales MX"),
        ("10.0", None, None),
        ("10.3", None, None),
        ("12.0", None, "is no Blackwell that scales MX"),
        ("gfx90a", "has no float8 matmul", "is no Blackwell that scales MX"),
        ("gfx942", "those named fnuz", "is no Blackwell that scales MX"),
        ("gfx950", None, "is no Blackwell that scales MX"),
    ],
)
def test_devices_have_their_finer_scales(monkeypatch, capability, rows, mx):
    on(monkeypatch, capability)
    for pair, why in (((ROW, WHOLE), rows), ((MX, MX), mx)):
        choice = select(*pair)[1]
        assert choice.native == (why is None)
        assert (why or "on float8 operands") in choice.reason
    blocks = select(THIN, THIN)[1]
    assert blocks.reason == "no float8 matmul of jax has scales of blocks"


def test_what_the_scaled_product_is_not_for(monkeypatch):
    on(monkeypatch, "10.0")
    nearest = asked(MX.tile, scale_rounding="nearest")
    assert "powers of two" in select(MX, nearest)[1].reason
    assert "kernels.prefer" in select(MX, MX, "emulated")[1].reason
    monkeypatch.delattr(jax.lax, "scaled_dot")
    assert "no scaled_dot" in select(MX, MX)[1].reason


@pytest.fixture
def unchecked():
    engine.failing.cache_clear()
    yield
    engine.failing.cache_clear()


def fails(*operands):
    raise RuntimeError("Unsupported instruction\nand more")


def wrong(a, a_scale, b, b_scale):
    return jnp.einsum("bmk,bnk->bmn", a.astype("float32"), b.astype("float32"))


@pytest.mark.parametrize(
    ("product", "why"),
    [
        (fails, "lax.scaled_dot fails here: RuntimeError: Unsupported inst"),
        (wrong, "does not multiply here as it should"),
    ],
)
def test_a_scaled_product_that_fails_is_not_used(
    monkeypatch, unchecked, product, why
):
    """It is tried once, also where a compiler traces a step."""
    monkeypatch.setattr(engine, "_scaled_product", product)
    choices = []

    @jax.jit
    def step(x):
        choices.extend(select(MX, MX, p)[1] for p in ("native", "auto"))
        return x

    step(1.0)
    native, auto = choices
    assert not native.native
    assert why in native.reason
    assert "instruction\n" not in native.reason
    assert "for a CPU" in auto.reason or visible_gpus()


def lowered(a, b, dtype, platform, terms=40, rows=6):
    """The program of a product, before XLA sees it."""

    def multiply(x, y, scales):
        first, second = (
            Quantized(values, scale, asked)
            for values, scale, asked in zip((x, y), scales, (a, b), strict=True)
        )
        kernel, _ = select(a, b, "native")
        return kernel.multiply(first, second, dtype, fast=False)

    def shaped(asked, rows):
        blocks = -(-terms // asked.tile.contracted) if asked is MX else 1
        shape = (1, 1 if asked is WHOLE else rows, blocks)
        values = jax.ShapeDtypeStruct((1, rows, terms), E4M3)
        return values, jax.ShapeDtypeStruct(shape, "float32")

    (x, scale), (y, other) = shaped(a, rows), shaped(b, 7)
    traced = jax.jit(multiply).trace(x, y, (scale, other))
    return traced.lower(lowering_platforms=(platform,)).as_text()


WRITTEN = [  # operands, result, platform, what the matmul writes
    ((ROW, ROW), "bfloat16", "cuda", "bf16"),
    ((ROW, WHOLE), "bfloat16", "cuda", "bf16"),
    ((ROW, ROW), "bfloat16", "cpu", "f32"),
    ((ROW, ANY_ROW), "bfloat16", "cuda", "f32"),
    ((ROW, ROW), "float16", "cuda", "f32"),
    ((ROW, ROW), "float32", "cuda", "f32"),
    ((MX, MX), "bfloat16", "cuda", "bf16"),
    ((MX, MX), "bfloat16", "cpu", "f32"),
    ((MX, MX), "float16", "cuda", "f32"),
]


@pytest.mark.parametrize(("pair", "dtype", "platform", "written"), WRITTEN)
def test_what_a_matmul_writes_that_is_scaled_after(
    pair, dtype, platform, written
):
    program = lowered(*pair, dtype, platform)
    (product,) = [x for x in program.splitlines() if "dot_general" in x]
    assert product.rpartition("->")[2].strip().endswith(f"7x{written}>")
    if pair[0] is ROW:
        assert product.rpartition("->")[0].count("xf8E4M3FN") == 2
        named = "allow_imprecise_accumulation = false"
        exact = named if platform == "cuda" else "[HIGHEST, HIGHEST]"
        assert exact in product


@pytest.mark.parametrize(("rows", "terms"), [(1, 40), (6, 1)])
def test_products_of_vectors_are_summed_in_float32(rows, terms):
    program = lowered(ROW, ROW, "bfloat16", "cuda", terms, rows)
    (product,) = [x for x in program.splitlines() if "dot_general" in x]
    operands, result = product.split(":")[-1].split("->")
    assert operands.count("xf32>") == 2
    assert result.endswith("7xf32>")


@pytest.mark.parametrize("terms", [1, 32, 128, 130])
def test_a_scaled_product_is_one_operation_over_128_terms(terms):
    """XLA fails to compile it for a B200 over 32 of them."""
    program = lowered(MX, MX, "bfloat16", "cuda", terms)
    (call,) = [x for x in program.splitlines() if '"xla.scaled_dot"' in x]
    padded = -(-terms // 128) * 128
    assert f"(tensor<1x6x{padded}xf8E4M3FN>, tensor<1x7x{padded}" in call
    assert f"tensor<1x6x{padded // 32}xf8E8M0FNU>" in call


NEAREST = asked(THIN.tile, scale_rounding="nearest")


@pytest.mark.parametrize(
    ("device", "platform", "pair", "read", "exact"),
    [
        ("a100", "cuda", (WHOLE, WHOLE), "bf16", False),
        ("t4", "cuda", (ROW, WHOLE), "f16", False),
        ("t4", "cuda", (MX, MX), "f32", False),
        ("v6e", "tpu", (MX, MX), "bf16", False),
        ("v6e", "tpu", (NEAREST, NEAREST), "f32", True),
        ("mi200", "rocm", (ROW, ROW), "bf16", False),
        ("mps", "cpu", (ROW, ROW), "f32", False),
    ],
)
def test_what_is_multiplied_where_float8_is_emulated(
    device, platform, pair, read, exact
):
    """XLA rounds float32 to fewer bits, unless the highest precision asks."""

    def multiply(x, y):
        a, b = (
            emulated.folded(quantize(each, asked)[0], False)
            for each, asked in zip((x, y), pair, strict=True)
        )
        return ENGINE.matmuls[-1].multiply(a, b, "bfloat16", False)

    arguments = [jax.ShapeDtypeStruct((1, n, 128), "float32") for n in (6, 7)]
    with devices.pretend(device):
        traced = jax.jit(multiply).trace(*arguments)
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    (product,) = [x for x in program.splitlines() if "dot_general" in x]
    operands, result = product.split(":")[-1].split("->")
    assert operands.count(f"x{read}>") == 2
    assert "xf32>" in result
    assert ("HIGHEST" in product) == exact


def test_powers_of_two_are_their_exponents():
    codes = np.arange(256).astype("uint8")
    powers = codes.view(ml_dtypes.float8_e8m0fnu).astype("float32")
    found = encode_scales(jnp.asarray(powers), "float8_e8m0fnu")
    np.testing.assert_array_equal(found, codes)
    assert encode_scales(jnp.float32(-np.nan), "float8_e8m0fnu") == 255


def test_powers_of_two_do_not_change_how_a_sum_is_rounded():
    """That is why a matmul for CUDA may write bfloat16 before its scales."""
    sums = np.random.default_rng(0).normal(size=10**4).astype("float32")
    for scale in (np.float32(2.0**k) for k in range(-90, 91, 9)):
        after = sums.astype(ml_dtypes.bfloat16).astype("float32") * scale
        before = (sums * scale).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(after.astype(ml_dtypes.bfloat16), before)
