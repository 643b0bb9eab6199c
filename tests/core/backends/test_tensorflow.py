"""TensorFlow: what its graph optimizer does, and what XLA is given."""

import keras
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import backends, kernels

if keras.backend.backend() != "tensorflow":
    pytest.skip(
        f"TensorFlow's graphs; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from finer_scales import ANY_ROW, ROW, WHOLE, asked, matrix
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.tensorflow import engine as tensorflow_devices
from keras_policy_ext.backends.tensorflow import engine as tensorflow_kernels
from keras_policy_ext.numerics.quantized import quantize
from keras_policy_ext.recipes import Tile

ANY = asked(Tile(), scale_rounding="nearest")


def optimized_graph(function, *arguments):
    """The nodes by name of what runs for a function, once optimized."""
    function = tf.function(function)
    context.enable_run_metadata()
    try:
        function(*arguments)
        graphs = context.context().export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    largest = max(
        graphs, key=lambda each: len(each.pre_optimization_graph.node)
    )
    return {node.name: node for node in largest.post_optimization_graph.node}


def name_of(edge):
    return edge.lstrip("^").split(":")[0]


def before(nodes, node):
    """Names of all that runs before a node."""
    seen, waiting = set(), [node.name]
    while waiting:
        for edge in nodes[waiting.pop()].input:
            name = name_of(edge)
            if name in nodes and name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen


def unordered(nodes):
    """Pairs of a read and an update of a variable that may run either way."""
    touching = [n for n in nodes.values() if n.op.endswith("VariableOp")]
    earlier = {node.name: before(nodes, node) for node in touching}
    return [
        (read.name, update.name)
        for update in touching
        if update.op.startswith("Assign")
        for read in touching
        if read.op == "ReadVariableOp"
        and name_of(read.input[0]) == name_of(update.input[0])
        and read.name not in earlier[update.name]
        and update.name not in earlier[read.name]
    ]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["full", "activations", None])
def test_no_kernel_is_updated_before_it_was_read_for_its_gradient(mode):
    policy = kpe.Float8DTypePolicy("float32", amax_history_length=4)
    with keras.RematScope(mode=mode):
        # Without activations, whose gradients read the kernel in time.
        layers = [kpe.layers.Dense(n, dtype=policy) for n in (6, 5, 4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    x, y = np.ones((2, 8), "float32"), np.ones((2, 4), "float32")
    model.train_on_batch(x, y)
    nodes = optimized_graph(
        lambda x, y: model.train_step((x, y)), tf.constant(x), tf.constant(y)
    )
    assert sum(n.op.startswith("AssignSub") for n in nodes.values()) == 6
    assert unordered(nodes) == []


# What XLA is given


def gradients(layer, x, kind, xla=True):
    """Outputs and gradients of a layer, compiled, and the choice of kernel."""

    @tf.function(jit_compile=xla)
    def step(x):
        with kernels.prefer(kind), tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x, training=True)
            loss = tf.reduce_sum(outputs * tf.sin(outputs))
        return outputs, tape.gradient(loss, [x, layer.kernel])

    outputs, (inputs_grad, kernel_grad) = step(x)
    return step, [outputs, inputs_grad, kernel_grad], layer.kernel_choice


LAYERS = {
    "dense": lambda: kpe.layers.Dense(5, dtype="float8/4_from_float32"),
    "heads": lambda: kpe.layers.EinsumDense(
        "abc,cde->adbe", (3, None, 5), dtype="float8/current_from_float32"
    ),
    "shared axis": lambda: kpe.layers.EinsumDense(
        "abc,bdc->abd", (6, 5), dtype="float8/4_from_float32"
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_casts_for_xla_give_the_numbers_of_the_emulation(make):
    layer = make()
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 6, 8)), "float32")
    layer.build(x.shape)
    compiled, native, choice = gradients(layer, x, "native")
    assert choice.kind == "native"
    _, emulated, choice = gradients(layer, x, "emulated")
    assert choice == ("emulated", "asked for by kernels.prefer")
    for found, expected in zip(native, emulated, strict=True):
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < 1e-6
    program = compiled.experimental_get_compiler_ir(x)(stage="hlo")
    products = [line for line in program.splitlines() if " dot(" in line]
    exact = ["precision={highest,highest}" in line for line in products]
    # The gradients alone.
    assert sorted(exact) == [False, True, True]
    assert "f8e4m3fn" in program


@pytest.mark.full
def test_gradients_of_a_compiled_call_are_taken_outside_it():
    layer = LAYERS["dense"]()
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 8)), "float32")
    layer.build(x.shape)
    results = {}
    for kind in ("native", "emulated"):

        @tf.function(jit_compile=True)
        def call(x, kind=kind):
            with kernels.prefer(kind):
                return layer(x, training=True)

        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(call(x) ** 2)
        results[kind] = tape.gradient(loss, [x, layer.kernel])
    for found, expected in zip(*results.values(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_without_xla_every_matmul_is_emulated():
    layer = LAYERS["dense"]()
    x = tf.ones((4, 8))
    layer.build(x.shape)
    _, _, choice = gradients(layer, x, "native", xla=False)
    assert choice.kind == "emulated"
    assert "jit_compile=True" in choice.reason
    layer(x)
    with kernels.prefer("native"):
        layer(x)
    assert layer.kernel_choice == choice


def test_xla_does_not_compile_for_each_value_of_the_inputs():
    """It compiles for each value that the result of a graph has to be known.

    A size that the backward pass takes from the forward pass would be one.
    """
    layer = LAYERS["dense"]()
    layer.build((None, 8))

    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        return tape.gradient(loss, layer.kernel)

    graph = step.get_concrete_function(tf.TensorSpec((None, 8))).graph
    calls = [x for x in graph.get_operations() if "PartitionedCall" in x.type]
    assert len(calls) == 2  # forward and backward
    numbers = [x.op.type for x in calls[1].inputs if x.dtype == tf.int32]
    assert numbers.count("Const") == 1  # the slot, one number for a layer's use
    assert set(numbers) == {"Const", "StridedSlice"}


@pytest.mark.full_except("float8/current")
@pytest.mark.parametrize("policy", ["float8/4", "float8/current"])
def test_layers_of_a_size_are_traced_once(policy):
    """Tracing took as long as compiling, in a model of twelve blocks."""
    model = keras.Sequential([keras.Input((8,))])
    for _ in range(3):
        model.add(kpe.layers.Dense(8, dtype=f"{policy}_from_float32"))
    model.compile("sgd", "mse", jit_compile=True)
    x = tf.ones((4, 8))

    @tf.function
    def step(x):
        return model.train_step((x, x))

    step(x)
    graph = step.get_concrete_function(x).graph
    calls = [x for x in graph.get_operations() if "PartitionedCall" in x.type]
    functions = {x.get_attr("f").name for x in calls}
    # Forward, backward, and for each layer the state.
    states = 3 if policy == "float8/4" else 0
    assert len(calls) == 6 + states
    assert len(functions) == 2 + bool(states)


@pytest.mark.parametrize(
    ("capability", "kind"),
    [(None, "emulated"), ((8, 0), "emulated"), ((8, 9), "native")],
)
def test_a_gpu_with_float8_hardware_is_used_unasked(
    monkeypatch, capability, kind
):
    gpus = [] if capability is None else ["gpu"]
    details = {"compute_capability": capability}
    config = tf.config
    monkeypatch.setattr(config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(
        config.experimental, "get_device_details", lambda device: details
    )
    tensorflow_devices.found.cache_clear()
    try:
        choices = []

        @tf.function(jit_compile=True)
        def trace():
            choices.append(kernels.select("ab,bc->ac"))

        trace.get_concrete_function()
        choices.append(kernels.select("ab,bc->ac"))
    finally:
        tensorflow_devices.found.cache_clear()
    assert [choice.kind for choice in choices] == [kind, "emulated"]
    if kind == "native":
        assert "jit_compile=True" in choices[1].reason


@pytest.mark.parametrize(
    ("capabilities", "known"),
    [
        ([], "cpu"),
        ([(7, 5)], "t4"),
        ([(8, 0), (9, 0)], "h200"),
        ([None], None),
    ],
)
def test_the_gpu_that_is_best_at_float8_is_the_device(
    monkeypatch, capabilities, known
):
    config = tf.config
    monkeypatch.setattr(config, "list_physical_devices", lambda k: capabilities)
    monkeypatch.setattr(
        config.experimental,
        "get_device_details",
        lambda gpu: {"compute_capability": gpu, "device_name": "some GPU"},
    )
    tensorflow_devices.found.cache_clear()
    try:
        device = backends.engine.device()
    finally:
        tensorflow_devices.found.cache_clear()
    if known is None:
        assert "some GPU is not known" in device.lacking()
        assert device.multiplies_in == "float32"
        return
    for field in ("maker", "float8", "scales", "multiplies_in"):
        assert getattr(device, field) == getattr(devices.KNOWN[known], field)


@pytest.mark.full
def test_what_tensorflow_does_not_offer_is_done_without(monkeypatch):
    from keras_policy_ext.backends.tensorflow import backend as framework
    from keras_policy_ext.backends.tensorflow import engine

    layer = LAYERS["heads"]()
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 6, 8)), "float32")
    layer.build(x.shape)
    _, expected, _ = gradients(layer, x, "native")
    monkeypatch.setattr(engine, "xla", None)
    _, found, choice = gradients(layer, x, "native")
    assert choice.kind == "native"
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(framework, "control_flow_util", None)
    _, _, choice = gradients(layer, x, "native")
    assert choice.kind == "emulated"


def test_lists_of_tensorflow_still_cannot_hold_float8():
    """Else `_in_a_loop` and bfloat16 for what a loop keeps can go."""

    @tf.function
    def through_a_list(x):
        items = tf.raw_ops.EmptyTensorList(
            element_shape=[2], max_num_elements=-1, element_dtype=x.dtype
        )
        items = tf.raw_ops.TensorListPushBack(input_handle=items, tensor=x)
        return tf.raw_ops.TensorListPopBack(
            input_handle=items, element_shape=[2], element_dtype=x.dtype
        ).tensor

    narrow = tf.dtypes.experimental.float8_e4m3fn
    np.testing.assert_array_equal(through_a_list(tf.ones(2)), [1.0, 1.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="FLOAT8"):
        through_a_list(tf.cast(tf.ones(2), narrow))


@pytest.mark.full_except("pair1-17-False-bf16", "pair6-1-True-f32")
@pytest.mark.parametrize(
    ("pair", "rows", "fast", "written"),
    [
        ((ROW, ROW), 17, True, "bf16"),
        ((ROW, WHOLE), 17, False, "bf16"),
        ((ROW, ANY_ROW), 17, True, "f32"),
        ((WHOLE, WHOLE), 17, True, "bf16"),
        ((ANY, ANY), 17, True, "f32"),
        ((ANY, ANY), 4096, False, "bf16"),
        ((ROW, ROW), 1, True, "f32"),
    ],
)
def test_a_gpu_multiplies_float8_by_cublas_and_scales_the_product(
    pair, rows, fast, written
):
    """In bfloat16 where XLA scales in the matmul, or powers of two round not.

    XLA adds up the products of a single row in the dtype of the result.
    """
    pretending = devices.pretend("h200")
    columns = max(rows // 4, 7)
    matrices = [
        tf.constant(matrix(size, 64, seed))
        for seed, size in enumerate((rows, columns))
    ]

    @tf.function(jit_compile=True)
    def multiply(x, y):
        a, b = (
            quantize(each, how, cast=backends.engine.narrow_cast)[0]
            for each, how in zip((x, y), pair, strict=True)
        )
        kernel = tensorflow_kernels.XlaMatmul()
        with pretending:
            return kernel.multiply(a, b, "bfloat16", fast)

    program = multiply.experimental_get_compiler_ir(*matrices)(stage="hlo")
    (product,) = [x for x in program.splitlines() if " dot(" in x]
    assert f" = {written}[" in product
    read = "f32" if rows == 1 else "f8e4m3fn"
    assert product.partition(" dot(")[2].count(f"{read}[") == 2
    if rows == 1:
        return  # XLA casts it by way of float16 on a CPU (TF 2.21).
    end = "_fast_accum" if fast else ","
    assert f"algorithm=dot_any_f8_any_f8_f32{end}" in product
    a, b = (
        quantize(each, how)[0].dequantize()
        for each, how in zip(matrices, pair, strict=True)
    )
    exact = tf.matmul(a, b, transpose_b=True).numpy()
    found = tf.cast(multiply(*matrices), tf.float32).numpy()
    # Of what XLA scales in the matmul, a CPU rounds product and scale as well.
    roundings = 3 if rows == 4096 else 1
    allowed = np.abs(exact) * roundings * 2.0**-8
    allowed += np.abs(exact).max() * 2.0**-20
    assert (np.abs(found - exact) <= allowed).all()


@pytest.mark.full
def test_a_gpu_multiplies_float8_in_a_batch_of_unknown_size():
    layer = kpe.layers.Dense(5, dtype="float8_from_mixed_bfloat16")
    layer.build((None, 8))

    def call(x):
        return layer(x, training=True)

    unknown = tf.TensorSpec([None, 8], tf.float32)
    on_gpu = tf.function(call, [unknown], jit_compile=True)
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 8)), "float32")
    with devices.pretend("h200"):
        program = on_gpu.experimental_get_compiler_ir(x)(stage="hlo")
        found = on_gpu(x)
    assert "algorithm=dot_any_f8_any_f8_f32_fast_accum" in program
    expected = tf.function(call, jit_compile=True)(x)
    found, expected = (tf.cast(each, "float32") for each in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=2.0**-7)
