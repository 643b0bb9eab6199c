"""JAX: which kernels are gathered, and the casts of shards.

The Pallas kernels run by the interpreter on 8 virtual CPUs. What a compiled
step moves is in `integration`.
"""

import json

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip(
        f"JAX's kernels; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from keras_policy_ext import backends
from keras_policy_ext.backends.jax.pallas_casts import PallasCasts
from processes import run


class Distribution:
    """Cuts every variable alike, on devices that are not there."""

    batch_dim_name = "batch"

    def __init__(self, sizes, *axes):
        mesh = AbstractMesh(sizes, ("batch", "model"))
        self.layout = NamedSharding(mesh, PartitionSpec(*axes))

    def get_variable_layout(self, variable):
        return self.layout


@pytest.fixture
def gathering(monkeypatch):
    kernel = keras.Variable("zeros", shape=(16, 16))

    def found(sizes, *axes):
        distribution = Distribution(sizes, *axes)
        monkeypatch.setattr(
            keras.distribution, "distribution", lambda: distribution
        )
        return backends.current.gathering_of(kernel)

    return found


@pytest.mark.parametrize(
    ("axes", "cut"),
    [
        (("batch", None), (("batch",), ())),
        (("batch",), (("batch",), ())),
        ((None, "batch"), ((), ("batch",))),
        (("model", "batch"), (("model",), ("batch",))),
        ((("model", "batch"), None), (("model", "batch"), ())),
    ],
)
def test_a_kernel_that_is_cut_like_the_batch_is_gathered(gathering, axes, cut):
    found = gathering((2, 4), *axes)
    assert (found.axes, found.batch) == (cut, "batch")
    assert found == gathering((2, 4), *axes)
    assert hash(found) == hash(gathering((2, 4), *axes))


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ((2, 4), ()),
        ((2, 4), (None, "model")),
        ((1, 8), ("batch", None)),  # one device has the batch
    ],
)
def test_any_other_kernel_is_multiplied_as_it_is_cut(gathering, sizes, axes):
    assert gathering(sizes, *axes) is None


def test_without_a_distribution_nothing_is_gathered():
    kernel = keras.Variable("zeros", shape=(16, 16))
    assert backends.current.gathering_of(kernel) is None
    assert backends.current.gathering_of(kernel.value) is None


ON_8_DEVICES = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import dataclasses, json, re
import jax, jax.numpy as jnp, keras, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras_policy_ext import backends, contractions, kernels, recipes
from keras_policy_ext.backends.both_layouts import ScaleHint, Wanted
from keras_policy_ext.backends.jax.pallas_casts import PallasCasts
from keras_policy_ext.backends.jax.rows import PallasRowCasts
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from keras_policy_ext.numerics.scale_sources import ScaleRule, source_of

whole, rows = PallasCasts(None, True), PallasRowCasts(None, True)
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("batch", "model"))
rng = np.random.default_rng(0)
rule = ScaleRule(by_multiplier=True)
e4m3, e5m2 = (
    recipes.Quantization(format=name)
    for name in ("float8_e4m3fn", "float8_e5m2")
)


def integers(*shape, least=-99):
    # Their sums are exact in any order.
    return jnp.asarray(rng.integers(least, 99, shape), "float32")


def inputs(x, cut):
    # What pads a shard would be the largest number.
    return 500.0 - cut_along(x, cut)


def cut_along(x, cut):
    if cut is None:
        return x
    sharding = NamedSharding(mesh, PartitionSpec(*cut))
    return jax.lax.with_sharding_constraint(x, sharding)


def by_tensor(scale, unseen, cut, x):
    known = ScaleHint(scale, unseen, rule)
    wanted = Wanted(True, column_sums=True)
    return whole.quantize(inputs(x, cut), e5m2, known, wanted)


def by_rows(cut, x):
    return rows.cast(inputs(x, cut), e4m3, e5m2, True)


def bits(x):
    # XLA for a CPU changes which NaN of float8 it is.
    x = np.asarray(x).astype("float32")
    return np.where(np.isnan(x), 0x7FC00000, x.view("uint32"))


def differing(function, cut, x):
    # The results that are not those of one device.
    one = jax.jit(lambda x: function(None, x))(x)
    several = jax.jit(lambda x: function(cut, x))(x)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(several), strict=True)
    return [i for i, (a, b) in enumerate(pairs) if (bits(a) != bits(b)).any()]


def with_scale(scale, unseen=None):
    scale = None if scale is None else jnp.float32(scale)
    unseen = None if unseen is None else jnp.asarray(unseen)
    return lambda cut, x: by_tensor(scale, unseen, cut, x)


# The last shard alone has the amax.
even, odd = (
    integers(*shape, least=2).at[-1, -1].set(1.0)
    for shape in ((128, 256), (130, 67))
)
bad = even.at[127, 255].set(jnp.nan).at[0, 0].set(jnp.inf)
both, one_axis = ("batch", "model"), (("batch", "model"), None)
CASES = {
    "known scale, not finite": (with_scale(0.3), both, bad),
    "never observed, uneven": (with_scale(0.0, True), one_axis, odd),
    "never observed, not cut": (with_scale(0.0, True), (None, None), odd),
    "current": (with_scale(None), both, even),
    "rows, uneven": (by_rows, ("model", "batch"), odd),
}
found = {name: differing(*case) for name, case in CASES.items()}
jax.config.update("jax_use_shardy_partitioner", False)
found["GSPMD"] = differing(with_scale(0.3, False), both, even)
found["GSPMD, rows"] = differing(by_rows, both, even)
jax.config.update("jax_use_shardy_partitioner", True)


def one_by_one(cut, x):
    # In `jax.vmap` XLA casts.
    apart = x.reshape(4, -1, x.shape[1])
    hint = ScaleHint(None, None, rule)
    cast = lambda x: whole.quantize(x, e4m3, hint, Wanted(True))
    return jax.vmap(cast)(cut_along(apart, cut))


found["vmap"] = differing(one_by_one, ("model", None, "batch"), even)
by_hand = lambda x: by_tensor(None, None, None, x)[:2]
by_hand = jax.shard_map(
    by_hand,
    mesh=mesh,
    in_specs=PartitionSpec(*both),
    out_specs=(PartitionSpec(*both), PartitionSpec("model", "batch")),
    check_vma=False,
)
alike = jnp.tile(integers(64, 64), (2, 4))
found["shard_map"] = differing(
    lambda cut, x: by_hand(x) if cut else by_tensor(None, None, None, x)[:2],
    both,
    alike,
)


function = lambda x, scale, unseen: by_tensor(scale, unseen, both, x)
known = even, jnp.float32(0.3), jnp.asarray(False)
steady = jax.jit(function).lower(*known).compile().as_text()
entry = steady[steady.index("ENTRY") :]
found["reduced"] = [
    re.findall(r"(\\w+)\\[[\\d,]*\\]\\S* all-reduce\\(", entry),
    len(re.findall(r"all-reduce\\(", steady)),
]


def step(cut_of_inputs, cut_of_kernel, name):
    recipe = recipes.get(name)
    shape = source_of(recipe).state_shape
    state = ()
    if shape is not None:
        state = (jnp.zeros(shape).at[:, 0].set(VALID_MARK),)
    plan = contractions.make_plan(
        contractions.Einsum("abc,cd->abd"), recipe, "float32", "float32", True
    )

    def run(x, w, g):
        x, g = (cut_along(each, cut_of_inputs) for each in (x, g))
        w = cut_along(w, cut_of_kernel)
        y, residuals = plan.bound.forward(x, w, state, True)
        leaves = residuals.leaves()
        residuals = plan.bound.residuals(leaves, residuals.shapes)
        grads = plan.bound.backward(residuals, g, state, bias_shape=(64,))
        return y, grads

    with kernels.prefer("native"):
        return jax.jit(run)(*STEP)


STEP = integers(8, 4, 32), integers(32, 64), integers(8, 4, 64)
backends.engine = dataclasses.replace(
    backends.engine, both_layouts=whole, row_casts=rows
)
CUT = {
    "delayed": [(None, "model"), ("model", None)],
    "current": [(None, "model")],
    "rowwise": [("model", None)],
}
found["steps"] = {}
for name in ("delayed", "current", "rowwise"):
    one = jax.tree.leaves(step(None, None, name))
    for cut in CUT[name]:
        several = jax.tree.leaves(step(("batch", None, None), cut, name))
        apart = [
            float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a)))
            for a, b in zip(one, several, strict=True)
        ]
        found["steps"][f"{name} {cut}"] = apart
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def on_8_devices():
    return json.loads(run("jax", ON_8_DEVICES).splitlines()[-1])


@pytest.mark.full
def test_casts_of_shards_have_the_bits_of_one_device(on_8_devices):
    cases = {k: v for k, v in on_8_devices.items() if isinstance(v, list)}
    cases.pop("reduced")
    assert len(cases) == 9
    assert not any(cases.values()), cases


@pytest.mark.full
def test_a_steady_step_waits_for_no_other_device(on_8_devices):
    """Only the amax for the state and the column sums are reduced."""
    steady, in_all = on_8_devices["reduced"]
    assert sorted(steady) == ["f32", "s32"]
    assert in_all == 3  # one in the branch of the first step


@pytest.mark.full
def test_steps_on_8_devices_are_those_of_one(on_8_devices):
    steps = on_8_devices["steps"]
    assert len(steps) == 4
    for name, apart in steps.items():
        assert max(apart) < 1e-6, name


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ((AxisType.Auto, AxisType.Auto), None),
        ((AxisType.Manual, AxisType.Manual), None),
        ((AxisType.Manual, AxisType.Auto), "partly manual"),
        ((AxisType.Explicit, AxisType.Explicit), "explicit"),
    ],
)
def test_which_meshes_have_casts_of_shards(kinds, why, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    mesh = AbstractMesh((2, 4), ("batch", "model"), kinds)
    like = jax.ShapeDtypeStruct((64, 64), "float32")
    casts = PallasCasts(lambda: None, interpreted=True)
    with jax.sharding.use_abstract_mesh(mesh):
        found = casts.supports(like, "float32", "float8_e4m3fn")
    assert found is None if why is None else why in found
