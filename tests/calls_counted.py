"""Counts the calls of functions of the package, and the files they are in.

`python tests/calls_counted.py` prints them for `KERAS_BACKEND`.
"""

import ast
import functools
import json
import pathlib
import sys
import tempfile
import tomllib
from typing import NamedTuple

import keras
import numpy as np

import keras_policy_ext as kpe

ROOT = pathlib.Path(kpe.__file__).parent


class Count(NamedTuple):
    """How many calls there were, and in how many files of the package."""

    calls: int
    files: int


def counted(function):
    """Call a function; return what it returns, and a `Count`."""
    root, calls, files = f"{ROOT}/", [0], set()

    def see(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(root):
            calls[0] += 1
            files.add(path)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return result, Count(calls[0], len(files))


def most_frames(function, first, last):
    """Call a function; return the most frames between two of the package.

    Args:
        function: Called without arguments.
        first: The name of the function of the outer frame.
        last: The names of the functions of the inner frame.

    Returns:
        How many frames of the package there are, both included; 0 if `last` is
        not called within `first`.
    """
    found = [0]

    def see(frame, event, argument):
        code, count = frame.f_code, 0
        in_package = code.co_filename.startswith(f"{ROOT}/")
        if event != "call" or not in_package or code.co_name not in last:
            return
        while frame is not None:
            count += frame.f_code.co_filename.startswith(f"{ROOT}/")
            if frame.f_code.co_name == first:
                found[0] = max(found[0], count)
                return
            frame = frame.f_back

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found[0]


@functools.cache
def floors():
    """Return the floor of each room by the order in `pyproject.toml`.

    What any room may import is on floor 0, and what the order leaves out on
    top.
    """
    config = pathlib.Path(__file__).parent.parent / "pyproject.toml"
    linter = tomllib.loads(config.read_text("utf8"))["tool"]["importlinter"]
    (rooms,) = (x for x in linter["contracts"] if x["id"] == "rooms")
    order = [line.strip("()").split(" | ") for line in rooms["layers"]]
    found = {
        name: len(order) - number
        for number, names in enumerate(order)
        for name in names
    }
    return {**dict.fromkeys(FOR_ALL, 0), **found}


FOR_ALL = ("_extensions", "_keras", "_types", "bases", "scopes", "user_code")


def floor_of(frame):
    """Return the floor of the room that the code of a frame is in."""
    place = pathlib.Path(frame.f_code.co_filename).relative_to(ROOT)
    return floors().get(place.parts[0].removesuffix(".py"), len(floors()))


def climbs(function):
    """Call a function; return how often a room was called from a lower one.

    Through Keras too: the caller is the nearest frame of the package.
    """
    root, count = f"{ROOT}/", [0]

    def see(frame, event, argument):
        if event != "call" or not frame.f_code.co_filename.startswith(root):
            return
        caller = frame.f_back
        while caller and not caller.f_code.co_filename.startswith(root):
            caller = caller.f_back
        count[0] += bool(caller) and floor_of(frame) > floor_of(caller)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count[0]


def climbs_of_loading():
    """Count the climbs of `load_model`, of a model that was trained."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        x = np.ones((4, 8), "float32")
        for _ in range(2):
            model = keras.Sequential(
                [keras.Input((8,))] + [keras.layers.Dense(8) for _ in "ab"]
            )
            kpe.convert(model, "float8")
            model.compile("adam", "mse")
            model.train_on_batch(x, x)
            model.save(path)
            found = climbs(functools.partial(kpe.load_model, path))
    return found


def size_of_package():
    """Return how many files the package has, and its core."""
    files = list(ROOT.rglob("*.py"))
    core = [x for x in files if x.relative_to(ROOT).parts[0] not in NO_CORE]
    return {"files": len(files), "core_files": len(core)}


NO_CORE = (
    "ext",
    "mixed_precision",
    "export",
    *("activations.py", "callbacks.py", "loops.py"),
    *("migration.py", "optimizers.py", "reference.py"),
)
"""Extensions, and the modules of their names."""


def share_of_any():
    """Return the share of parameters whose type has Any in it.

    Of those with a name and a type: neither `*args` nor `**kwargs`.
    """
    types = [
        ast.unparse(argument.annotation)
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.arguments)
        for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs)
        if argument.annotation
    ]
    return sum("Any" in each for each in types) / len(types)


def steady_step(policy):
    """Count the parts of a step of a Dense that has been called before.

    `new_slot` is of the second step: the first use of a slot other than 0.
    """
    layer = kpe.layers.Dense(16, dtype=policy)
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    layer.build(x.shape)
    step = globals()[f"_step_of_{keras.backend.backend()}"](layer, x)
    _, second, *_, last = (step() for _ in range(9))  # One more than slots.
    new_slot = {f"new_slot_{name}": count for name, count in second.items()}
    return {**last, **new_slot}


def frames_to_the_cast():
    """Count the frames from the call of a Dense to its cast, on PyTorch."""
    layer = kpe.layers.Dense(16, dtype="float8_from_float32")
    x = keras.ops.convert_to_tensor(np.ones((8, 16), "float32"))
    layer.build(x.shape)
    call = functools.partial(layer, x, training=True)
    return most_frames(call, "quantized_call", ("cast", "narrow_cast"))


def _step_of_torch(layer, x):
    x = keras.ops.convert_to_tensor(x)
    variables = layer.trainable_variables
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(variables)

    def step():
        outputs, forward = counted(lambda: layer(x, training=True))
        _, backward = counted((outputs**2).sum().backward)
        gradients = [each.value.grad for each in variables]
        _, update = counted(lambda: optimizer.apply(gradients, variables))
        layer.zero_grad()
        return {"forward": forward, "backward": backward, "update": update}

    return step


def _step_of_jax(layer, x):
    import jax

    def loss(weights, others):
        outputs, _ = layer.stateless_call(weights, others, x, training=True)
        return (outputs**2).sum()

    values = [v.value for v in layer.trainable_variables], []
    gradient = jax.grad(loss)

    def step():
        return {"gradient": counted(lambda: gradient(*values))[1]}

    return step


def _step_of_tensorflow(layer, x):
    import tensorflow as tf

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in layer.trainable_variables])

    def step():
        return {"gradient": counted(gradient)[1]}

    return step


def programs():
    """Count `convert` and `load_model`, each called a second time."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        for _ in range(2):
            model = keras.Sequential(
                [keras.Input((8,))] + [keras.layers.Dense(8) for _ in "ab"]
            )
            convert_it = functools.partial(kpe.convert, model)
            _, convert = counted(convert_it)
            model.save(path)
            _, load = counted(functools.partial(kpe.load_model, path))
    return {"convert": convert, "load_model": load}


def sample():
    """Count a sample of `watch`, as the monitor takes them, after two others.

    The model is that of `programs`, which have run before.
    """
    model = keras.Sequential(
        [keras.Input((8,))] + [keras.layers.Dense(8) for _ in "ab"]
    )
    kpe.convert(model)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    model.train_on_batch(x, x)
    watch = kpe.watch(model, every=1)
    for _ in range(2):
        watch.step((x, x))
    return {"sample": counted(lambda: watch.step((x, x)))[1]}


def all_counts():
    """Everything that is counted, as JSON types."""
    # First: delayed scaling, once used, is told of each layer that is built.
    climbs_counted = climbs_of_loading()
    default = steady_step("float8/current_from_float32")
    found = {
        **size_of_package(),
        **steady_step("float8_from_float32"),
        **{f"default_{name}": default[name] for name in default},
        **programs(),
    }
    if keras.backend.backend() == "torch":
        found["frames"] = frames_to_the_cast()
    return {**found, **sample(), "climbs": climbs_counted}


if __name__ == "__main__":
    print(json.dumps(all_counts()))
