"""The straight path: the bits of the general one, with little asked."""

import dataclasses
import importlib.util

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch" or not importlib.util.find_spec("triton"):
    pytest.skip(
        "needs PyTorch and Triton: run `tox run -e triton`",
        allow_module_level=True,
    )

import torch
import torch._dynamo as dynamo

import keras_policy_ext as kpe
from fake_gpus import fake
from keras_policy_ext import backends, contractions, kernels
from keras_policy_ext.backends.torch import backend as torch_backend
from keras_policy_ext.backends.torch import triton_casts
from keras_policy_ext.backends.torch.backend import BACKEND
from keras_policy_ext.backends.torch.casts import TritonCasts
from keras_policy_ext.contractions import plan as plans
from keras_policy_ext.ext.delayed import frameworks
from keras_policy_ext.ext.delayed.observations import UNIT, UNSEEN, VALID_MARK
from keras_policy_ext.ext.delayed.torch import observations, triton_states
from keras_policy_ext.ext.delayed.torch.kernels import TritonStates

POLICIES = [
    "float8_from_mixed_bfloat16",
    "float8_from_float32",
    "float8/delayed(initial_scale=1.0)_from_mixed_bfloat16",
    "float8/current_from_mixed_bfloat16",
    "float8/rowwise_from_mixed_bfloat16",
]
EINSUM = "abc,cde->abde"
LAYERS = {
    "Dense": (lambda dtype: kpe.layers.Dense(48, dtype=dtype), (32, 64)),
    "no bias, odd tiles": (
        lambda dtype: kpe.layers.Dense(80, use_bias=False, dtype=dtype),
        (144, 96),
    ),
    "two axes of columns": (
        lambda dtype: kpe.layers.EinsumDense(
            EINSUM, (None, 4, 16), bias_axes="de", dtype=dtype
        ),
        (2, 16, 64),
    ),
    "a bias of one of them": (
        lambda dtype: kpe.layers.EinsumDense(
            EINSUM, (None, 4, 16), bias_axes="e", dtype=dtype
        ),
        (2, 16, 64),
    ),
}


@pytest.fixture
def engine(monkeypatch):
    """An engine whose kernels are interpreted, as on a GPU."""
    # Where a flag could be read only by waiting for it.
    monkeypatch.setattr(BACKEND, "known_any", lambda flags: None)
    found = dataclasses.replace(
        backends.engine,
        both_layouts=TritonCasts(interpreted=True),
    )
    interpreted = (TritonStates(interpreted=True),)
    monkeypatch.setattr(frameworks.current, "kernels", interpreted)
    monkeypatch.setattr(backends, "engine", found)
    return found


@pytest.fixture
def general(engine):
    """The same engine without straight paths."""
    return dataclasses.replace(engine, straight=lambda bound: None)


def layer_of(make, policy, shape):
    keras.utils.set_random_seed(0)
    layer = make(policy)
    layer.build(shape)
    if layer.bias is not None:
        layer.bias.assign(
            np.random.default_rng(1).normal(size=layer.bias.shape)
        )
    return layer


def operands(shape, seed):
    x = np.random.default_rng(seed).normal(size=shape).astype("float32")
    return torch.tensor(x).bfloat16().requires_grad_()


def step(layer, call, shape, seed):
    """Outputs, all gradients and observations of a step."""
    x = operands(shape, seed)
    with kernels.prefer("native"):
        y = call(x)
        g = torch.tensor(np.random.default_rng(9).normal(size=y.shape))
        y.backward(g.to(y.dtype))
    found = [y.detach(), x.grad]
    found += [v.value.grad.clone() for v in kpe.loops.weights(layer)]
    states = layer.float8_state.matrices
    return found + [state.observed.latest.clone() for state in states]


def steps(layer, shape, count=3):
    """The same of some steps, with the states after each of them."""
    found = []
    for seed in range(count):
        found += step(layer, lambda x: layer(x, training=True), shape, seed)
        kpe.loops.settle(layer)
        layer.zero_grad()
        states = layer.float8_state.matrices
        found += [state.value.detach().clone() for state in states]
    return found


def straight_of(layer):
    return layer.float8_state.last_call.plan.bound.straight


def assert_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_array_equal(one.float(), other.float())


def needs_rows(policy):
    if "rowwise" in policy and not torch_backend.scales_rows(
        torch.device("cpu")
    ):
        pytest.skip(f"torch {torch.__version__} scales no rows on a CPU")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_have_the_bits_of_the_general_path(
    monkeypatch, general, policy, name
):
    needs_rows(policy)
    make, shape = LAYERS[name]
    layer = layer_of(make, policy, shape)
    found = steps(layer, shape)
    assert straight_of(layer).of(shape, layer.kernel.shape, torch.device("cpu"))
    monkeypatch.setattr(backends, "engine", general)
    layer = layer_of(make, policy, shape)
    assert_equal(found, steps(layer, shape))
    assert straight_of(layer) is None


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "policy", [POLICIES[0], POLICIES[3], POLICIES[4]], ids=str
)
def test_a_graph_has_the_bits_of_eager(engine, policy, name):
    needs_rows(policy)
    make, shape = LAYERS[name]
    layer = layer_of(make, policy, shape)
    eager = step(layer, lambda x: layer(x, training=True), shape, 0)
    layer = layer_of(make, policy, shape)
    dynamo.reset()
    call = torch.compile(
        lambda x: layer(x, training=True), backend="aot_eager", fullgraph=True
    )
    assert_equal(eager, step(layer, call, shape, 0))


def test_a_graph_trains_a_bias_alone(engine):
    make, shape = LAYERS["Dense"]
    layer = layer_of(make, POLICIES[3], shape)
    layer.kernel.value.requires_grad_(False)
    dynamo.reset()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with kernels.prefer("native"):
        y = call(operands(shape, 0).detach())
        y.backward(torch.ones_like(y))
    rows = torch.full_like(layer.bias.value, shape[0])
    assert_equal([layer.bias.value.grad], [rows])


@pytest.mark.parametrize(
    "shape", [(32, 24), (8, 64), (3, 64), (0, 64)], ids=str
)
def test_other_sizes_take_the_general_path(engine, shape):
    layer = layer_of(
        lambda dtype: kpe.layers.Dense(48, dtype=dtype), POLICIES[0], shape
    )
    steps(layer, shape, 1)
    sizes = shape, layer.kernel.shape, torch.device("cpu")
    assert straight_of(layer).of(*sizes) is None


def test_gradients_can_be_differentiated(monkeypatch, general):
    def penalty():
        make, shape = LAYERS["Dense"]
        layer = layer_of(make, POLICIES[0], shape)
        x = operands(shape, 0)
        with kernels.prefer("native"):
            y = layer(x, training=True)
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (g.float() ** 2).sum().backward()
        return [g.detach(), layer.kernel.value.grad]

    straight = penalty()
    monkeypatch.setattr(backends, "engine", general)
    assert_equal(straight, penalty())


def test_each_slot_has_a_launch_of_its_own(engine, monkeypatch):
    """Triton compiles a column of 1 in, and a launch keeps its first kernel."""
    columns, start = {}, triton_casts.Launch.__call__

    def noted(launch, *arguments):
        if launch._kernel is triton_states.observation_kernel:
            columns.setdefault(id(launch), set()).add(arguments[-1])
        start(launch, *arguments)

    monkeypatch.setattr(triton_casts.Launch, "__call__", noted)
    make, shape = LAYERS["Dense"]
    layer = layer_of(make, POLICIES[0], shape)
    for seed in range(3):
        step(layer, lambda x: layer(x, training=True), shape, seed)
    assert sorted(map(sorted, columns.values())) == [[1], [2], [3]]


@pytest.mark.parametrize("policy", POLICIES)
def test_autocast_changes_no_gradient(engine, policy):
    needs_rows(policy)
    make, shape = LAYERS["Dense"]
    found = []
    for enabled in (False, True):
        layer = layer_of(make, policy, shape)
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            found.append(step(layer, layer, shape, 0))
        assert straight_of(layer) is not None
    assert_equal(*found)


def test_operands_at_odd_addresses_are_copied(engine):
    make, shape = LAYERS["Dense"]
    layer = layer_of(make, POLICIES[3], shape)
    x = operands(shape, 0).detach()
    odd = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(shape)
    odd.copy_(x)
    assert odd.data_ptr() % 16
    with kernels.prefer("native"):
        first, second = (layer(each, training=True) for each in (x, odd))
    assert_equal([first.detach()], [second.detach()])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_report_of_memory_starts_no_kernel(engine, policy):
    """Its tensors have no data: a kernel on a GPU would end the process."""
    needs_rows(policy)
    make, shape = LAYERS["Dense"]
    layer = layer_of(make, policy, shape)
    step(layer, lambda x: layer(x, training=True), shape, 0)
    model = keras.Sequential([keras.Input(shape[1:]), layer])
    model.compile("sgd", "mse")
    with kernels.prefer("native"):
        found = str(kpe.memory(model, np.zeros(shape, "float32")))
    assert "without numbers" in found
    assert "of a forward pass" not in found


LAUNCHES = {
    "delayed": ["history", "cast", "cast", "cast", "observation", "sums"],
    "current": ["amax", "cast"] * 3 + ["sums"],
    "rowwise": ["edges", "cast_rows"] * 3 + ["sums"],
}


@pytest.mark.parametrize("recipe", LAUNCHES)
def test_a_steady_step_starts_few_kernels(engine, monkeypatch, recipe):
    policy = f"float8/{recipe}_from_mixed_bfloat16"
    needs_rows(policy)
    started = []

    class Noting:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel
            self.arg_names = kernel.arg_names

        def __getitem__(self, grid):
            started.append(self.name)
            return self.kernel[grid]

    for module in (triton_casts, triton_states):
        for name, kernel in [*vars(module).items()]:
            if name.endswith("_kernel"):
                noting = Noting(name.removesuffix("_kernel"), kernel)
                monkeypatch.setattr(module, name, noting)
    make, shape = LAYERS["Dense"]
    layer = layer_of(make, policy, shape)
    steps(layer, shape, 2)
    started.clear()
    step(layer, lambda x: layer(x, training=True), shape, 2)
    assert started == LAUNCHES[recipe]
    started.clear()
    kpe.loops.settle(layer)
    assert started == (["settle"] if recipe == "delayed" else [])


def test_a_steady_step_binds_no_plan_and_asks_for_the_device_once(
    monkeypatch, engine
):
    """On a GPU each question goes to CUDA."""
    fake(monkeypatch, (9, 0))
    make, shape = LAYERS["Dense"]
    layer = layer_of(make, POLICIES[0], shape)
    asked, bound, here = [], [], torch_backend.here

    def counted_here():
        asked.append(1)
        return here()

    class Counted(contractions.bound_plan.BoundPlan):
        def __init__(self, *args):
            bound.append(1)
            super().__init__(*args)

    monkeypatch.setattr(torch_backend, "here", counted_here)
    counted = dataclasses.replace(engine, device=counted_here)
    monkeypatch.setattr(backends, "engine", counted)
    monkeypatch.setattr(plans, "BoundPlan", Counted)
    steps(layer, shape, 2)
    assert bound
    del asked[:], bound[:]
    steps(layer, shape, 1)
    assert not bound
    assert len(asked) <= 2


def rows_of_observations():
    """Values and observations that meet in a state."""
    rng = np.random.default_rng(0)
    layer = layer_of(LAYERS["Dense"][0], POLICIES[0], (32, 64))
    (state,) = layer.float8_state.matrices
    shape = tuple(state.shape)
    empty = torch.zeros(shape)

    def observation(*slots):
        found = empty.clone()
        found[:, 0] = UNIT * len(slots)
        for slot in slots:
            found[:, 1 + slot] = torch.tensor(rng.random(3)) * UNIT
        return found

    bad = observation(1)
    bad[1, 2] = torch.nan
    settled = empty.clone()
    settled[:, 0] = torch.tensor([VALID_MARK, UNSEEN, VALID_MARK])
    values = [empty, observation(0), observation(0, 2), bad, settled]
    found = [[], [observation(0)], [observation(1), observation(1, 3)], [bad]]
    return state, [(value, each) for value in values for each in found]


def test_observations_are_merged_in_one_kernel_as_in_many(engine):
    state, pairs = rows_of_observations()
    settle = state.settling
    source = contractions.plan.source_of(state.recipe)
    for value, found in pairs:
        merged = observations.merged(value, found)
        before = state.value.detach().clone()
        expected = settle(merged, before)
        matrix, version = before.clone(), before._version
        frameworks.current.kernels[0].merge(source, value, found, matrix)
        np.testing.assert_array_equal(matrix, expected)
        assert matrix._version > version
        state.value.data.copy_(torch.nan_to_num(expected))
