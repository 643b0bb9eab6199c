"""Handlers hear of contractions and operations, and may replace them."""

import contextvars
import unittest.mock

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import contractions, seams
from keras_policy_ext._keras import products
from steps import numpy

BACKEND = keras.backend.backend()
POLICY = "float8/4_from_float32"
X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")


def dense(policy=POLICY):
    layer = kpe.layers.Dense(3, dtype=policy, name="dense")
    layer.build(X.shape)
    layer.bias.assign([1.0, 2.0, 3.0])
    return layer


def passing(seen, what=lambda call: call):
    def note(call):
        seen.append(what(call))
        return call.run()

    return note


def test_a_handler_gets_the_layer_the_weight_the_plan_and_the_operands():
    layer, seen = dense(), []
    expected = numpy(layer(X, training=False))
    with seams.on_contraction(passing(seen)):
        found = numpy(layer(X, training=False))
    (call,) = seen
    assert call.layer is layer and call.weight is layer.kernel
    assert (call.name, call.dtype) == ("kernel", "float32")
    assert call.contraction.equation == "ax,xy->ay"
    assert call.shapes == ((4, 8), (8, 3))
    plan, inputs, kernel, state, bias = call.planned
    assert plan.recipe == layer.float8_policy.recipe
    np.testing.assert_array_equal(numpy(inputs), X)
    np.testing.assert_array_equal(numpy(kernel), numpy(layer.kernel))
    np.testing.assert_array_equal(numpy(bias), [1, 2, 3])
    assert len(state) == 1
    np.testing.assert_array_equal(found, expected)


def test_the_result_of_a_handler_is_that_of_the_contraction():
    layer = dense()
    with seams.on_contraction(lambda call: ops.full((4, 3), 7.0)):
        assert (numpy(layer(X)) == 7.0).all()
    assert not (numpy(layer(X)) == 7.0).any()


def test_another_plan_and_other_operands_run_instead():
    layer = dense()

    def exact(call):
        plan = contractions.unrounded(call.planned.plan)
        inputs = call.planned.inputs * 2.0
        return call.run(
            call.planned._replace(plan=plan, inputs=inputs, state=())
        )

    with seams.on_contraction(exact):
        found = numpy(layer(X))
    expected = 2.0 * X @ numpy(layer.kernel) + [1, 2, 3]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_innermost_handler_goes_through_the_outer_ones():
    layer, seen = dense("float8/current_from_float32"), []

    def outer(call):
        seen.append(("outer", float(numpy(call.planned.bias)[0])))
        return call.run() * 2.0

    def inner(call):
        seen.append(("inner", float(numpy(call.planned.bias)[0])))
        changed = call.planned._replace(bias=call.planned.bias * 10.0)
        return call.run(changed) + 1.0

    plain, bias = numpy(layer(X)) - [1, 2, 3], np.array([10, 20, 30])
    with seams.on_contraction(outer), seams.on_contraction(inner):
        found = numpy(layer(X))
    assert seen == [("inner", 1.0), ("outer", 10.0)]
    np.testing.assert_allclose(found, 2 * (plain + bias) + 1, rtol=1e-5)


def test_an_error_in_a_block_ends_it():
    layer = dense()
    with pytest.raises(RuntimeError), seams.on_contraction(passing([])):
        raise RuntimeError
    assert seams.blocks.open_count == 0 and seams.handlers() == ()
    layer(X)


def test_a_call_that_does_not_run_counts_as_no_use_of_the_weight():
    layer = dense()
    (state,) = layer.float8_state.matrices
    before, plan = state.uses, layer.float8_state.last_call.plan
    with seams.on_contraction(lambda call: ops.zeros((4, 3))):
        layer(X, training=True)
    assert state.uses == before and layer.float8_state.last_call.plan is plan
    with seams.on_contraction(passing([], lambda call: call.planned)):
        layer(X, training=True)
    assert state.uses == before + 1


def test_the_products_of_attention_have_names():
    layer = kpe.layers.MultiHeadAttention(
        2, 4, dtype=POLICY, attention="float8"
    )
    x, seen = X[None], []
    expected = numpy(layer(x, x))
    with seams.on_contraction(passing(seen)):
        np.testing.assert_array_equal(numpy(layer(x, x)), expected)
    names = [call.name for call in seen]
    assert names[3:5] == [seams.SCORES, seams.WEIGHTED_SUM]
    assert [call.weight is None for call in seen] == [
        n in (3, 4) for n in range(6)
    ]
    assert all(ops.is_tensor(x) for x in seen[3].operands)


@pytest.mark.parametrize("activations", [None, "dynamic"])
def test_frozen_layers_are_heard_of(activations):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    kpe.convert(model, POLICY)
    kpe.freeze(model, activations=activations)
    layer, seen = model.layers[0], []
    expected = numpy(layer(X))
    with seams.on_contraction(passing(seen)):
        np.testing.assert_array_equal(numpy(layer(X)), expected)
    (call,) = seen
    assert call.planned.is_frozen and call.weight.name == "kernel"


def test_layers_that_follow_no_float8_are_not_heard_of():
    layer, seen = kpe.layers.Dense(3, dtype="float32"), []
    with seams.on_contraction(passing(seen)):
        layer(X)
    assert not seen


class ByOperation(keras.layers.Layer):
    """A layer of a class that has no float8 form, and a name of its own."""

    def build(self, shape):
        self.table = self.add_weight(shape=(3, shape[-1]), name="table")

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.table))


def test_a_layer_in_float8_by_operation_is_heard_of():
    model = keras.Sequential([keras.Input((8,)), ByOperation()])
    kpe.convert(model, POLICY)
    contracted, operations = [], []

    def note(layer, run, name, args, kwargs):
        operations.append(name)
        return run(*args, **kwargs)

    expected = numpy(model(X))
    names = {("transpose",): note, seams.PRODUCTS: note}
    with (
        seams.on_contraction(passing(contracted)),
        seams.on_operation(names),
    ):
        np.testing.assert_array_equal(numpy(model(X)), expected)
    (call,) = contracted
    assert (call.name, call.shapes) == ("table", ((4, 8), (8, 3)))
    assert operations[:2] == ["transpose", "matmul"]


def test_operations_go_through_the_handlers_of_all_blocks():
    layer, seen = keras.layers.Dense(3, use_bias=False), []
    layer.build(X.shape)

    def handler(word, factor):
        def note(layer, run, name, args, kwargs):
            seen.append((word, name))
            return run(*args, **kwargs) * factor

        return note

    plain = numpy(layer(X))
    with (
        seams.on_operation({seams.PRODUCTS: handler("outer", 2.0)}),
        seams.on_operation({("matmul", "add"): handler("inner", 3.0)}),
    ):
        found = numpy(layer(X))
        outside = numpy(ops.matmul(X, numpy(layer.kernel)))
    assert seen == [("inner", "matmul"), ("outer", "matmul")]
    np.testing.assert_allclose(found, 6 * plain, rtol=1e-6)
    np.testing.assert_allclose(outside, plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(numpy(layer(X)), plain)


class Products(keras.layers.Layer):
    """Multiplies a weight of its own by an operation of Keras."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")

    def call(self, x):
        return ops.matmul(x, self.kernel)


def test_what_a_handler_multiplies_itself_is_not_handled():
    """It would be recognised as the product of the layer, without end."""
    model = keras.Sequential([keras.Input(X.shape[1:]), Products()])
    kpe.convert(model, "float8/current_from_float32")
    seen = []

    def handler(call):
        seen.append(call.name)
        return ops.matmul(*call.operands)

    with seams.on_contraction(handler):
        found = numpy(model(X))
    assert seen == ["kernel"]
    expected = X @ numpy(model.layers[0].kernel)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_a_handler_of_operations_computes_is_not_handled():
    layer, seen = keras.layers.Dense(3, use_bias=False), []
    layer.build(X.shape)

    def twice(layer, run, name, args, kwargs):
        seen.append(name)
        return ops.matmul(args[0] * 2.0, args[1])

    with seams.on_operation({seams.PRODUCTS: twice}):
        found = numpy(layer(X))
    assert seen == ["matmul"]
    np.testing.assert_allclose(found, 2 * numpy(layer(X)), rtol=1e-6)


@pytest.mark.parametrize("seam", ["contractions", "operations"])
def test_layers_that_a_handler_calls_are_not_handled(seam):
    """The handler would be called for them again, without end."""
    layer, inner, seen = dense(), dense(), []

    def calling(call):
        seen.append(call.layer)
        inner(X)
        return call.run()

    def calling_in_an_operation(layer, run, name, args, kwargs):
        seen.append(layer)
        inner(X)
        return run(*args, **kwargs)

    block = {
        "contractions": lambda: seams.on_contraction(calling),
        "operations": lambda: seams.on_operation(
            {("cast", "convert_to_tensor"): calling_in_an_operation}
        ),
    }[seam]
    expected = numpy(layer(X))
    with block():
        found = numpy(layer(X))
    assert seen and all(each is layer for each in seen)
    np.testing.assert_array_equal(found, expected)


def test_a_handled_operation_still_calls_handlers_of_contractions():
    model = keras.Sequential([keras.Input(X.shape[1:]), Products()])
    kpe.convert(model, "float8/current_from_float32")
    seen = []

    def note(layer, run, name, args, kwargs):
        model(X)  # Computed by the handler: its contraction is not handled.
        return run(*args, **kwargs)

    with (
        seams.on_contraction(passing(seen)),
        seams.on_operation({seams.PRODUCTS: note}),
    ):
        model(X)
    assert [call.name for call in seen] == ["kernel"]


def contraction_block(seen, word):
    def note(call):
        seen.append(word)
        return call.run()

    return seams.on_contraction(note)


def operation_block(seen, word):
    def note(layer, run, name, args, kwargs):
        seen.append(word)
        return run(*args, **kwargs)

    return seams.on_operation({seams.PRODUCTS: note})


BLOCKS = pytest.mark.parametrize("block", [contraction_block, operation_block])


@BLOCKS
def test_blocks_may_end_in_another_order(block):
    """Two generators, each with a block, do so."""
    model = keras.Sequential([keras.Input(X.shape[1:]), Products()])
    kpe.convert(model, "float8/current_from_float32")
    seen = []
    first, second = block(seen, "first"), block(seen, "second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    model(X)
    assert seen == ["second"]
    second.__exit__(None, None, None)
    model(X)
    assert seen == ["second"]


@BLOCKS
def test_a_block_may_end_in_another_context(block):
    """As that of a generator does, if another thread or task closes it."""
    model = keras.Sequential([keras.Input(X.shape[1:]), Products()])
    kpe.convert(model, "float8/current_from_float32")
    seen = []
    opened = block(seen, "opened")
    opened.__enter__()
    contextvars.Context().run(opened.__exit__, None, None, None)
    model(X)
    assert not seen


@pytest.mark.parametrize(
    ("block", "error", "words"),
    [
        (lambda: seams.on_contraction(3), TypeError, "`handler` cannot be"),
        (
            lambda: seams.on_operation({"matmul": print}),
            TypeError,
            "not a dict of functions by tuples",
        ),
        (
            lambda: seams.on_operation({seams.PRODUCTS: 3}),
            TypeError,
            "not a dict of functions by tuples",
        ),
        (
            lambda: seams.on_operation({("matmull",): print}),
            ValueError,
            "No operation .* 'matmull'",
        ),
    ],
)
def test_handlers_that_would_never_be_called_are_refused(block, error, words):
    with pytest.raises(error, match=words), block():
        pass
    assert seams.blocks.open_count == 0


@pytest.mark.parametrize("follower", [seams.Follower, object(), print])
def test_what_is_no_follower_is_refused(follower):
    before = seams.followers()
    with pytest.raises(TypeError, match="Not a follower"):
        seams.register_follower(follower)
    assert seams.followers() == before


def test_a_block_that_has_ended_is_not_opened_by_another():
    layer = kpe.layers.Dense(3, dtype="float8/current_from_float32")
    plain, seen = keras.layers.Dense(3, use_bias=False), []
    layer.build(X.shape)
    plain.build(X.shape)

    def note(layer, run, name, args, kwargs):
        seen.append(name)
        return run(*args, **kwargs)

    def hear(call):
        seen.append(call.name)
        return call.run()

    with (
        seams.on_contraction(hear),
        seams.on_operation({seams.PRODUCTS: note}),
    ):
        there = contextvars.copy_context()
    with (
        seams.on_contraction(lambda call: call.run()),
        seams.on_operation({seams.MOVES: note}),
    ):
        there.run(layer, X)
        there.run(plain, X)
    assert seen == []


def test_an_operation_is_handled_once_after_the_patch_of_another():
    layer, seen = keras.layers.Dense(3, use_bias=False), []
    layer.build(X.shape)

    def note(layer, run, name, args, kwargs):
        seen.append(name)
        return run(*args, **kwargs)

    home = next(x for x in products.modules() if hasattr(x, "matmul"))
    with seams.on_operation({seams.PRODUCTS: note}):
        patch = unittest.mock.patch.object(home, "matmul", home.matmul)
        patch.start()
    patch.stop()
    with seams.on_operation({seams.PRODUCTS: note}):
        layer(X)
    assert seen == ["matmul"]


def test_an_operation_that_others_replace_is_wrapped_in_the_next_block():
    layer, seen = keras.layers.Dense(3, use_bias=False), []
    layer.build(X.shape)

    def note(layer, run, name, args, kwargs):
        seen.append(name)
        return run(*args, **kwargs)

    home = next(x for x in products.modules() if hasattr(x, "matmul"))
    with seams.on_operation({seams.PRODUCTS: note}):
        stock = home.matmul.float8_original

        def other(a, b):
            return stock(a, b)

        with (
            unittest.mock.patch.object(
                home, "matmul", lambda a, b: stock(a, b)
            ),
            seams.on_operation({seams.PRODUCTS: note}),
        ):
            layer(X)
        assert seen == ["matmul", "matmul"], "one of each block"
        layer(X)
    assert seen == ["matmul"] * 3


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch has torch.compile")
@pytest.mark.full
def test_a_block_of_another_thread_breaks_no_graph():
    import torch

    layer = kpe.layers.Dense(16, dtype="float8/current_from_float32")
    x = torch.ones(16, 16)
    layer(x)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    expected = numpy(compiled(x))
    with seams.on_contraction(lambda call: call.run() * 0):
        outside = contextvars.Context()
        found = outside.run(lambda: numpy(compiled(x)))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch has torch.compile")
@pytest.mark.full
def test_what_torch_compile_compiles_is_not_handled():
    """The documentation says so."""
    import torch

    layer = kpe.layers.Dense(16, dtype="float8/current_from_float32")
    x, seen = torch.ones(16, 16), []
    expected = numpy(layer(x))
    compiled = torch.compile(layer, backend="eager")
    with seams.on_contraction(passing(seen)):
        found = numpy(compiled(x))
    assert not seen
    np.testing.assert_array_equal(found, expected)
