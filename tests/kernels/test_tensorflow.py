"""What TensorFlow's graph optimizer does to the gradients of a contraction."""

import keras
import pytest

import keras_policy_ext as kpe

if keras.backend.backend() != "tensorflow":
    pytest.skip(
        f"TensorFlow's graphs; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context


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
