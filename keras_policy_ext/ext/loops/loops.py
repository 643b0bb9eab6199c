"""Functions for training loops with optimizers other than Keras's."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from keras_policy_ext import backends
from keras_policy_ext._keras import versions
from keras_policy_ext._keras.walking import layers_within
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers import state_of
from keras_policy_ext.layers.stored_weights import StoredVariable
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import Quantization, matmuls_of


def is_state(variable: object) -> bool:
    """Return True if a variable is float8 state, which no optimizer may update.

    Args:
        variable: A variable of a model.

    Returns:
        True for the amax histories and scales of a float8 kernel.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.convert(model, "delayed")
        >>> [kpe.loops.is_state(v) for v in model.trainable_variables]
        [False, False, True]
    """
    return state_of.is_state(variable)


def weights(model: keras.Layer) -> list[keras.Variable]:
    """Return all weights of a model except the float8 state.

    They are the `model.weights` from before the conversion, in the same order.
    So they can be paired with the weights of a copy, in float8 or not. (The
    kernels of frozen layers are codes, and come after the other weights of
    their layer.)

    ```python
    for w, average in zip(
        kpe.loops.weights(model), kpe.loops.weights(ema_model), strict=True
    ):
        average.assign(0.999 * average + 0.001 * w)
    ```

    Args:
        model: See `parameters`.

    Returns:
        Keras variables.

    Raises:
        ValueError: If `model` is another object.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.convert(model, "delayed")
        >>> len(model.weights), len(kpe.loops.weights(model))
        (3, 2)
    """
    return [v for v in _variables(model, "weights") if not is_state(v)]


def parameters(model: keras.Layer) -> list[Tensor]:
    """Return the trainable tensors of a model, without float8 state.

    Args:
        model: A Keras model or layer. On PyTorch also a module with Keras
            layers in it, such as DistributedDataParallel.

    Returns:
        The backend's own parameters: `torch.nn.Parameter`, `tf.Variable`, or
        arrays on JAX. Only those that are trainable now.

    Raises:
        ValueError: If `model` is another object.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.convert(model, "delayed")
        >>> len(model.trainable_variables), len(kpe.loops.parameters(model))
        (3, 2)
    """
    variables = _trainable(model)
    if isinstance(model, keras.layers.Layer):
        return [v.value for v in variables if not is_state(v)]
    state = {id(v.value) for v in variables if is_state(v)}
    found = [p for p in model.parameters() if p.requires_grad]
    return [p for p in found if id(p) not in state]


def settle(
    model: keras.Layer, gradients: Sequence[Tensor] | None = None
) -> None:
    """Update a model's float8 state with the observations in its gradients.

    Call it once per optimizer step, before or after it. The state of
    unobserved operands is unchanged, and so is a history if an amax is not
    finite. A model without float8 state is unchanged.

    Args:
        model: See `parameters`.
        gradients: The gradients of `model.trainable_variables`, in that order;
            an entry may be None. Not needed on PyTorch, which stores them with
            the variables. There the gradients of the state are cleared, so
            that several backward passes before one call are one step.

    Raises:
        ValueError: If `gradients` do not fit the variables, or are missing
            on TensorFlow or JAX. Nothing is changed then.
    """
    variables = _trainable(model)
    if gradients is None:
        states = [v for v in variables if is_state(v)]
        if states:
            _settle_observed(states)
        return
    _check(variables, gradients, "gradients")
    for variable, gradient in zip(variables, gradients, strict=True):
        if is_state(variable) and gradient is not None:
            variable.assign(gradient)


def settled(
    model: keras.Layer, gradients: Sequence[Tensor], values: Sequence[Tensor]
) -> list[Tensor]:
    """Return a copy of `values` in which the float8 state is updated.

    It is `settle` for a compiled functional step.

    ```python
    labels = [
        "state" if kpe.loops.is_state(v) else "weight"
        for v in model.trainable_variables
    ]
    optimizer = optax.multi_transform(
        {"weight": optax.adamw(1e-3), "state": optax.set_to_zero()}, labels
    )
    ...
    updates, slots = optimizer.update(gradients, slots, values)
    values = optax.apply_updates(values, updates)
    values = kpe.loops.settled(model, gradients, values)
    ```

    Args:
        model: A Keras model or layer.
        gradients: The gradients of `model.trainable_variables`, in that order;
            an entry may be None.
        values: The values of these variables, in the same order, with the
            state from when the gradients were taken.

    Returns:
        `values`, with the observations entered into the float8 state.

    Raises:
        ValueError: If the gradients or values do not fit the variables.
    """
    variables = _trainable(model)
    _check(variables, gradients, "gradients")
    _check(variables, values, "values")
    return [
        _settled(*three)
        for three in zip(variables, gradients, values, strict=True)
    ]


def uncut(model: keras.Layer) -> set[Tensor]:
    """Return the parameters that PyTorch's `fully_shard` must ignore.

    Args:
        model: See `parameters`.

    Returns:
        The parameters of float8 state and of variables that are not
        trainable, for `ignored_params=`.
    """
    return {
        v.value
        for v in _variables(model, "variables")
        if is_state(v) or not v.trainable
    }


def gather_float8(model: keras.Layer) -> list[keras.Variable]:
    """Make PyTorch's `fully_shard` gather kernels of float8 layers as float8.

    Call it before `fully_shard`. Each process then quantizes its shard of a
    kernel before the shards are gathered. So a kernel is gathered in one byte
    per element, with the same bits as if float32 had been gathered.

    ```python
    kpe.loops.gather_float8(model)
    for layer in model.layers:
        fully_shard(layer, ignored_params=kpe.loops.uncut(model))
    kpe.loops.follow_shards(model)
    ```

    During a pass no other code can read these kernels. Changes of a kernel
    beside a step are not noticed any more.

    Args:
        model: See `parameters`.

    Returns:
        The kernels that are gathered as float8: trainable ones that have one
        scale. All other weights are gathered in their own dtype.

    Raises:
        ValueError: If the backend is not PyTorch, or if `fully_shard` has
            sharded a kernel already. Nothing is changed then.
    """
    layers = _layers(model)
    found = _gathered_as_float8(layers)
    _check_torch("gather_float8", "`ModelParallel` gathers float8 without it")
    # Here, since most programs have one process.
    from keras_policy_ext.ext.loops.torch import fully_shard

    fully_shard.prepare(found, layers)
    return [each.variable for each in found]


def follow_shards(model: keras.Layer) -> None:
    """Make a model's variables read the parameters that `fully_shard` made.

    Call it once, after `fully_shard` and before an optimizer is created. A
    Keras variable keeps the tensor that it was created with, and PyTorch puts
    other tensors into the modules. Without this call no weight of a Keras
    layer is trained.

    ```python
    for layer in model.layers:  # or fully_shard(model, ...)
        fully_shard(layer, ignored_params=kpe.loops.uncut(model))
    kpe.loops.follow_shards(model)
    optimizer = torch.optim.AdamW(kpe.loops.parameters(model))
    ```

    Args:
        model: See `parameters`.

    Raises:
        ValueError: If nothing is sharded, or something in a way that cannot be
            trained. Nothing is changed then.
    """
    variables = _variables(model, "variables")
    _check_torch("follow_shards", "use keras.distribution.ModelParallel")
    from keras_policy_ext.ext.loops.torch import fully_shard

    fully_shard.follow(variables, _layers(model))


@contextlib.contextmanager
def cuda_graphs(model: keras.Model) -> Iterator[None]:
    """In the block, `fit` runs compiled steps of a model as CUDA graphs.

    A GPU then gets a whole step at once, and does not wait for the host. Enter
    it before the first step of the model; steps that were compiled in it go on
    as CUDA graphs after it. Each size of a batch is a graph of its own, with
    memory of its own.

    ```python
    model.compile("adam", "mse", jit_compile=True)
    with kpe.loops.cuda_graphs(model):
        model.fit(x, y)
    ```

    Args:
        model: A compiled model on PyTorch, whose step is one graph.

    Raises:
        ValueError: If its step cannot be a CUDA graph here; it says why.
    """
    reason = _why_no_cuda_graph(model)
    if reason:
        raise ValueError(
            f"The steps of {model.name!r} cannot run as CUDA graphs. Received: "
            f"{reason}. Allowed: the `fit` of Keras 3.16 on PyTorch and an "
            "NVIDIA GPU, in one process, with jit_compile=True and an "
            "optimizer that does not branch. Train without the block: the "
            "numbers are the same."
        )
    from keras_policy_ext.ext.loops.torch import compiling_cuda_graphs

    with compiling_cuda_graphs():
        yield


def _why_no_cuda_graph(model: keras.Model) -> str | None:
    """Return why a model's step cannot be a CUDA graph; None if it can."""
    name = backends.current.name
    if name != "torch":
        return f"the backend {name!r}"
    from keras_policy_ext.ext.loops.torch import has_replicas

    if backends.engine.device().maker != "nvidia":
        return f"the device {backends.engine.device().title}"
    # What lies between two graphs would read memory that a replay overwrites.
    if (versions.number() or versions.NEWEST) < (3, 16):
        return f"Keras {keras.__version__}, which takes gradients outside"
    if type(model).train_step is not keras.Model.train_step:
        return "a model with a `train_step` of its own"
    if has_replicas():
        return "a process of several, which exchange gradients"
    if model.run_eagerly or not model.jit_compile:
        return "a model that is not compiled with jit_compile=True"
    if model.train_function is not None:
        return "a model whose step is compiled already"
    optimizer = model.optimizer
    branches = ("gradient_accumulation_steps", "ema_overwrite_frequency")
    stock_scaler = keras.optimizers.LossScaleOptimizer
    while optimizer is not None:
        # The scaler of this package has an `apply` of its own: no branch.
        scales = type(optimizer).apply is stock_scaler.apply
        if scales or any(getattr(optimizer, each, None) for each in branches):
            return "an optimizer that branches on numbers, which ends the graph"
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def _check_torch(function: str, instead: str) -> None:
    """Raise on another framework than PyTorch."""
    name = backends.current.name
    if name == "torch":
        return
    raise ValueError(
        "`fully_shard` works only on PyTorch. Received: the backend "
        f"{name!r}. Allowed: 'torch'. Do not call `{function}` "
        f"here; on JAX {instead}."
    )


def _layers(model: keras.Layer) -> list[Any]:
    """Return the layers of a model; of a torch module all its modules."""
    if isinstance(model, keras.layers.Layer):
        return list(layers_within(model))
    return list(model.modules())


def _settle_observed(states: list[keras.Variable]) -> None:
    """Update states with the observations that are stored for them."""
    name = backends.current.name
    if name != "torch":
        raise ValueError(
            f"On {name} gradients are not stored in the variables. "
            "Received: no gradients. Allowed: gradients for all of "
            "`model.trainable_variables`, from your training step. Pass them "
            "as the second argument."
        )
    from keras_policy_ext.ext.loops.torch import enter_observed

    enter_observed(states)


def _settled(
    variable: keras.Variable, gradient: Tensor | None, value: Tensor
) -> Tensor:
    if not is_state(variable) or gradient is None:
        return value
    return variable.settled(gradient, value)


def _trainable(model: keras.Layer) -> list[keras.Variable]:
    return _variables(model, "trainable_variables")


def _variables(model: keras.Layer, kind: str) -> list[keras.Variable]:
    """Return the list `kind`, such as `weights`, also of a torch module."""
    if isinstance(model, keras.layers.Layer):
        return list(getattr(model, kind))
    modules = getattr(model, "modules", None)
    if keras.backend.backend() != "torch" or not callable(modules):
        raise ValueError(
            "This object has no float8 state, since it is not a Keras model "
            f"or layer. Received: {model!r}. Allowed: a Keras model or layer, "
            "or on PyTorch a module that contains one. Pass the model itself."
        )
    layers = [m for m in modules() if isinstance(m, keras.layers.Layer)]
    found = {id(v): v for m in layers for v in getattr(m, kind)}
    return list(found.values())


def _check(
    variables: list[keras.Variable], tensors: Sequence[Tensor | None], what: str
) -> None:
    """Raise unless there is one tensor per variable, in the same order."""
    order = "Pass them in the order of `model.trainable_variables`."
    if len(tensors) != len(variables):
        raise ValueError(
            f"The {what} do not fit the model. Received: {len(tensors)}. "
            f"Allowed: {len(variables)}, one for each variable. {order}"
        )
    for variable, tensor in zip(variables, tensors, strict=True):
        if not is_state(variable) or tensor is None:
            continue
        if tuple(tensor.shape) != tuple(variable.shape):
            raise ValueError(
                f"The {what} do not fit the model. Received: shape "
                f"{tuple(tensor.shape)} for {variable.path!r}. Allowed: "
                f"{tuple(variable.shape)}. {order}"
            )


class _Gathered(NamedTuple):
    """A kernel that can be gathered as float8; its state may be None."""

    variable: keras.Variable
    quantization: Quantization
    source: Any
    state: Any


def _gathered_as_float8(layers: Iterable[keras.Layer]) -> list[_Gathered]:
    """Return the trainable kernels of one scale that one matmul reads."""
    kernels: list[tuple[Any, keras.Variable]] = [
        (layer, kernel)
        for layer in layers
        if hasattr(layer, "float8_controller") and layer.float8_policy
        for kernel in layer.float8_controller.contracted
    ]
    uses = Counter(id(kernel) for _, kernel in kernels)
    found = []
    for layer, kernel in kernels:
        is_dense = isinstance(
            layer, (keras.layers.Dense, keras.layers.EinsumDense)
        )
        is_weight = not isinstance(kernel, StoredVariable) and kernel.trainable
        if not (is_dense and is_weight) or uses[id(kernel)] > 1:
            continue
        recipe = layer.float8_policy.recipe
        asked = {recipe.quantization("kernel", m) for m in matmuls_of("kernel")}
        one = asked.pop()
        is_bank = layer.float8_bank_axis(layer, kernel) is not None
        if asked or one is None or not one.keeps_axes or is_bank:
            continue
        state = layer.float8_state.of(kernel)
        found.append(_Gathered(kernel, one, source_of(recipe), state))
    return found
