"""`torch.compile` makes one graph of a float8 model, with eager's numbers."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.layers.stored_weights import is_state
from steps import weights_of

if keras.backend.backend() != "torch":
    pytest.skip(
        f"torch.compile; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import torch
import torch._dynamo as dynamo

from cases import needs_whole_graphs
from keras_policy_ext import contractions, recipes
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.torch import operators as torch_operators
from keras_policy_ext.numerics.scale_sources import source_of

pytestmark = needs_whole_graphs

POLICIES = ["float8_from_float32", "float8/current_from_mixed_bfloat16"]


@pytest.fixture(autouse=True)
def _clean_compiler():
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.fixture(autouse=True)
def _traceable_attention():
    """Keras asks PyTorch for flash attention by what dynamo cannot trace."""
    enabled = keras.config.is_flash_attention_enabled()
    keras.config.disable_flash_attention()
    yield
    if enabled is not False:
        keras.config.enable_flash_attention()


def built(layer, *shape):
    layer.build(shape)
    return layer, (*shape,)


def dense(policy):
    return built(kpe.layers.Dense(6, "relu", dtype=policy), 4, 8)


def einsum(policy):
    layer = kpe.layers.EinsumDense("abc,cde->abde", (None, 2, 4), dtype=policy)
    return built(layer, 2, 5, 8)


def convolution(policy):
    return built(kpe.layers.Conv2D(4, 3, dtype=policy), 2, 7, 7, 3)


def mlp(policy):
    layers = [kpe.layers.Dense(n, "gelu", dtype=policy) for n in (16, 4)]
    return keras.Sequential([keras.Input((8,)), *layers]), (4, 8)


def attention_block(policy, **kwargs):
    x = keras.Input((5, 8))
    attention = kpe.layers.MultiHeadAttention(2, 4, dtype=policy, **kwargs)
    y = keras.layers.LayerNormalization()(x + attention(x, x))
    return keras.Model(x, kpe.layers.Dense(8, dtype=policy)(y)), (2, 5, 8)


def float8_attention_block(policy):
    return attention_block(policy, attention="float8")


MODELS = [
    dense,
    einsum,
    convolution,
    mlp,
    attention_block,
    float8_attention_block,
]


def float8_states(model):
    return [v for v in model.trainable_variables if is_state(v)]


def loss_and_gradients(model, loss, x):
    """The loss, all gradients, and what was observed of the states."""
    states = float8_states(model)
    for variable in model.trainable_variables:
        variable.value.grad = None
    for state in states:
        state.uses = 0
    value = loss(x)
    value.backward()
    gradients = [v.value.grad for v in model.trainable_variables]
    observed = [state.observed.latest for state in states]
    found = [value.detach(), *gradients, *observed]
    return [each.float().numpy() for each in found]


@pytest.mark.full_except("float8/current_from_mixed_bfloat16-einsum")
@pytest.mark.nightly_except(
    "float8/current_from_mixed_bfloat16-einsum",
    "float8_from_float32-convolution",
    "float8_from_float32-float8_attention_block",
)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_training_step_is_one_graph_with_the_numbers_of_eager(make, policy):
    model, shape = make(policy)
    x = torch.tensor(np.random.default_rng(0).normal(size=shape)).float()

    def loss(x):
        return (model(x, training=True).float() ** 2).mean()

    eager = loss_and_gradients(model, loss, x)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    in_graph = loss_and_gradients(model, compiled, x)
    for one, other in zip(eager, in_graph, strict=True):
        # What is not ours in the graph may be split into other operations.
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_inductor_compiles_a_training_step_whole():
    model, shape = mlp("float8_from_float32")
    x = torch.tensor(np.random.default_rng(0).normal(size=shape)).float()

    def loss(x):
        return (model(x, training=True) ** 2).mean()

    eager = loss_and_gradients(model, loss, x)
    compiled = torch.compile(loss, fullgraph=True)
    in_graph = loss_and_gradients(model, compiled, x)
    for one, other in zip(eager, in_graph, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_steps_with_an_optimizer_compile_once():
    model, shape = mlp("float8_from_float32")
    x = torch.ones(shape)
    with torch.no_grad():
        model(x)  # Keras makes its store of scopes, which would be a change.
    weights = [v.value for v in weights_of(model)]
    optimizer = torch.optim.SGD(weights, 0.1)
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=counted)
    def loss(x):
        return (model(x, training=True) ** 2).mean()

    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(x)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert len(graphs) == 1
    assert losses == sorted(losses, reverse=True)
    operators = [node.target for node in graphs[0].graph.nodes]
    contraction = torch.ops.keras_policy_ext.contraction.default
    assert operators.count(contraction) == 2


# So few that one compilation for each layer would be too many.
@pytest.mark.nightly
@dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True)
def test_twelve_blocks_reach_no_limit_of_the_compiler():
    policy = "float8_from_float32"
    x = y = keras.Input((8,))
    for _ in range(12):
        wide = kpe.layers.Dense(16, "gelu", dtype=policy)(y)
        narrow = kpe.layers.Dense(8, dtype=policy)(wide)
        y = keras.layers.LayerNormalization()(y + narrow)
    model = keras.Model(x, y)
    model(torch.zeros(4, 8))
    step = torch.compile(
        lambda x: (model(x, training=True) ** 2).mean(),
        fullgraph=True,
        backend="aot_eager",
    )
    for size in (4, 4, 6, 7):
        step(torch.ones(size, 8)).backward()


@pytest.mark.full
def test_a_call_without_gradient_keeps_nothing():
    layer, shape = dense("float8_from_float32")
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.ones(shape)
    with torch.no_grad():
        outputs = call(x)
    assert not outputs.requires_grad
    np.testing.assert_array_equal(outputs, layer(x).detach())


def test_a_call_without_gradient_takes_no_slot():
    """A compiled step would be compiled anew, with another slot."""
    layer, shape = dense("float8_from_float32")
    (state,) = layer.float8_state.matrices
    with torch.no_grad():
        layer(torch.ones(shape))
    assert state.uses == 0
    layer(torch.ones(shape))
    assert state.uses == 1


def test_operators_of_a_compiled_step_do_not_ask_autograd():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in ("forward", "backward"):
        assert has(f"keras_policy_ext::{name}", "CompositeExplicitAutograd")
        assert not has(f"keras_policy_ext::{name}", "Autograd")


def test_operations_that_look_alike_keep_apart():
    def recipe(format_name):
        class Same(recipes.Recipe):
            def quantization(self, operand, matmul):
                return recipes.Quantization(format=format_name)

            def __repr__(self):
                return "Same()"

        return Same()

    contraction = contractions.Einsum("ab,bc->ac")
    plans = [
        contractions.Plan(contraction, recipe(name), "float32", "float32")
        for name in ("float8_e4m3fn", "float8_e4m3fn")
    ]
    found = [torch_operators._registered_name(plan) for plan in plans]
    assert found[0] != found[1]
    plans = [torch_operators._OPERATIONS[name] for name in found]
    assert {plan.contraction for plan in plans} == {contraction}
    assert plans[0] != plans[1]


SCALARS = "float32[3] bool[3] float32[] float32[]"

KEPT = {
    "delayed": "float8_e4m3fn[2,3,8] float32[1,1,1] "
    f"float8_e4m3fn[8,4] float32[1,1,1] {SCALARS}",
    "current": "float8_e4m3fn[2,3,8] float32[1,1,1] "
    "float8_e4m3fn[8,4] float32[1,1,1]",
    "rowwise": "float8_e4m3fn[1,6,8] float32[1,1,8] "
    "float8_e4m3fn[1,8,4] float32[1,8,1]",
    "block": "float8_e4m3fn[1,6,8] float32[1,1,8] "
    "float8_e4m3fn[1,8,4] float32[1,1,1]",
    "mxfp8": "float8_e4m3fn[1,6,8] uint8[1,1,8] "
    "float8_e4m3fn[1,8,4] uint8[1,8,1]",
    "nvfp4": "uint8[1,16,8] uint8[1,1,8] float32[] "
    "uint8[1,8,4] uint8[1,1,1] float32[] float32[] float32[]",
}


@pytest.mark.parametrize("name", KEPT)
def test_residuals_of_other_shapes_or_dtypes_need_another_name(name):
    """Or what Inductor has compiled before them asserts the shapes it knew."""
    recipe = recipes.get(name)
    source = source_of(recipe)
    states = [source.layout.never_observed()] if source.state_shape else []
    state = tuple(torch.tensor(matrix) for matrix in states)
    contraction = contractions.Einsum("abc,cd->abd")
    dtypes = "bfloat16", "float32"
    plan = contractions.make_plan(contraction, recipe, *dtypes, True)
    x, w = torch.ones(2, 3, 8, dtype=torch.bfloat16), torch.ones(8, 4)
    _, residuals = plan.bound.forward(x, w, state, True)
    found = [f"{x.dtype}{list(x.shape)}" for x in residuals.leaves()]
    written = " ".join(found).replace("torch.", "").replace(", ", ",")
    assert written == KEPT[name], "write it, and raise _RESIDUALS_VERSION"
    assert torch_operators._RESIDUALS_VERSION == 4


def test_operators_are_named_by_how_residuals_are_kept(monkeypatch):
    plan = contractions.make_plan(
        contractions.Einsum("ab,bc->ac"),
        recipes.CurrentScaling(),
        "float32",
        "float32",
        True,
    )
    before = torch_operators._registered_name(plan)
    monkeypatch.setattr(torch_operators, "_RESIDUALS_VERSION", 1)
    assert torch_operators._registered_name(plan) != before


def test_operators_are_named_by_their_kernels():
    """A disk may have a graph that was compiled for other kernels."""
    how = (
        contractions.Einsum("ab,bc->ac"),
        recipes.CurrentScaling(),
        "bfloat16",
        "float32",
    )
    plan = contractions.make_plan(*how, True)
    emulated = torch_operators._registered_name(plan)
    with devices.pretend("h200"):
        native = torch_operators._registered_name(plan)
    assert "scaled_mm on CUDA" in native
    assert native != emulated


def test_a_second_derivative_is_refused_in_a_graph_too():
    layer, shape = dense("float8/current_from_float32")
    x = torch.ones(shape, requires_grad=True)
    call = torch.compile(layer, fullgraph=True, backend="eager")
    (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated again"):
        gradient.sum().backward()
