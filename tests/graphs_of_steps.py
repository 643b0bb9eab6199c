"""How many graphs PyTorch makes of Keras's steps, by its own counters."""

import contextlib

import keras
import numpy as np
import torch
import torch._dynamo as dynamo
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import TracingContext

WAITS = ("_local_scalar_dense", "aten.item", "nonzero")
"""Operations whose result the host waits for."""


class Recorded:
    """What was compiled since `clear`, graph by graph.

    Attributes:
        graphs: A dict for each graph that autograd made: how many of its
            inputs it changes, how many of these are not static, how many
            inputs are symbolic numbers, its devices, and how often the host
            waits.
    """

    def __init__(self):
        self.graphs = []

    def clear(self):
        """Forget all, and what the compiler has kept."""
        dynamo.reset()
        counters.clear()
        self.graphs.clear()

    @property
    def counts(self):
        """The numbers of graphs and of breaks."""
        breaks = sum(counters["graph_break"].values())
        return counters["stats"]["unique_graphs"], breaks

    def total(self, name):
        """A figure of all graphs."""
        return sum(graph[name] for graph in self.graphs)

    def note(self, module, _):
        """A compiler: record a graph, and run it as it is."""
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context else None
        static = set(getattr(metadata, "static_input_indices", None) or ())
        nodes = list(module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        calls = [node for node in nodes if node.op == "call_function"]
        changed = {
            inputs.index(node.args[0])
            for node in calls
            if "copy_" in str(node.target) and node.args[0] in inputs
        }
        values = [node.meta.get("val") for node in nodes]
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        self.graphs.append(
            {
                "changed": len(changed),
                "not static": len(changed - static),
                "symbolic": sum(
                    not isinstance(node.meta.get("val"), torch.Tensor)
                    for node in inputs
                ),
                "devices": len({str(x.device) for x in tensors}),
                "waits": sum(
                    any(name in str(node.target) for name in WAITS)
                    for node in calls
                ),
            }
        )
        return make_boxed_func(module.forward)


@contextlib.contextmanager
def recording():
    """In the block, what Keras compiles is recorded, and runs as it is."""
    recorded, stock = Recorded(), torch.compile
    compiler = aot_autograd(
        fw_compiler=recorded.note,
        bw_compiler=recorded.note,
        inference_compiler=recorded.note,
        keep_inference_input_mutations=True,
    )

    def compile(model=None, **kwargs):
        kwargs.pop("mode", None)
        return stock(model, **{**kwargs, "backend": compiler})

    torch.compile = compile
    was_enabled = keras.config.is_flash_attention_enabled()
    keras.config.disable_flash_attention()  # Dynamo cannot trace how it asks.
    recorded.clear()
    try:
        yield recorded
    finally:
        torch.compile = stock
        dynamo.reset()
        if was_enabled is not False:
            keras.config.enable_flash_attention()


def batches(model, count=3, size=8):
    """Inputs and targets for a model, and the size of a batch."""
    rng = np.random.default_rng(0)

    def array(x):
        shape = (count * size, *x.shape[1:])
        if "int" in str(x.dtype):
            return rng.integers(0, 8, shape).astype("int32")
        return rng.normal(size=shape).astype("float32")

    x = [array(each) for each in model.inputs]
    y = rng.normal(size=(count * size, *model.outputs[0].shape[1:]))
    return x if len(x) > 1 else x[0], y.astype("float32"), size


def fitted(model, compiled=True, epochs=4, **kwargs):
    """The losses of some epochs of `fit`.

    Args:
        model: A model that is compiled eagerly or not, with its optimizer.
        compiled: Whether to compile its steps.
        epochs: How many.
        **kwargs: Of `fit`.
    """
    model.jit_compile, model.run_eagerly = compiled, not compiled
    model.make_train_function(force=True)
    x, y, size = batches(model)
    how = {"batch_size": size, "shuffle": False, "verbose": 0, **kwargs}
    return model.fit(x, y, epochs=epochs, **how).history["loss"]
