"""Frozen models as modules of PyTorch: casts and `requires_grad_`."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from frozen_models import outputs_of
from keras_policy_ext.layers.stored_weights import StoredConstant
from steps import normal, observe_inputs

torch = pytest.importorskip("torch", reason="modules are of torch")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="modules are of PyTorch"
)

X = normal(3, 6)
CASTS = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
}


def stock():
    layers = [keras.layers.Dense(5), keras.layers.Dropout(0.5)]
    layers.append(keras.layers.Dense(3))
    return keras.Sequential([keras.Input((6,)), *layers])


def frozen(**options):
    model = stock()
    kpe.freeze(model, **options)
    return model


def test_integers_have_no_gradient_as_in_stock_keras():
    """Dropout has its seed in a parameter."""
    for model in (stock(), frozen()):
        with pytest.raises(RuntimeError, match="floating point"):
            model.requires_grad_(True)


def test_parameters_of_numbers_may_have_gradients():
    model = frozen()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    model(X).sum().backward()
    scales = [v for v in model.variables if isinstance(v, StoredConstant)]
    assert len(scales) == 2
    assert all(scale.value.grad is None for scale in scales)
    biases = [layer.bias.value.grad for layer in model.layers[::2]]
    assert all(torch.any(gradient != 0) for gradient in biases)


@pytest.mark.parametrize("activations", [None, "dynamic"])
def test_what_changes_no_number_changes_nothing(activations):
    model = frozen(activations=activations)
    before = outputs_of(model, X)
    model.requires_grad_(False).float().to(torch.float32).to("cpu")
    np.testing.assert_array_equal(outputs_of(model, X), before)
    for parameter in model.parameters():
        assert not parameter.requires_grad


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.extension("export")
def test_scales_that_were_cast_are_refused(cast, tmp_path):
    model = frozen()
    CASTS[cast](model)
    path = tmp_path / "model.keras"
    told = r"dense.*kernel_scale.*Received: (b?float\d+).*Allowed.*policy"
    for use in (
        lambda: model(X),
        lambda: model.save(path),
        lambda: kpe.thaw(model),
        lambda: kpe.export(model, tmp_path / "out", format="safetensors"),
    ):
        with pytest.raises(ValueError, match=told):
            use()


def test_the_scale_of_inputs_that_was_cast_is_refused():
    model = stock()
    kpe.convert(model, "float8/4_from_float32")
    observe_inputs(model, X)
    kpe.freeze(model, activations="static")
    scale = model.layers[0]._kernel.inputs_scale
    scale.value.data = scale.value.data.half()
    with pytest.raises(ValueError, match=r"inputs_scale.*float16"):
        model(X)


def test_casts_there_and_back_round_scales_and_none_sees_it():
    model = frozen()
    before = outputs_of(model, X)
    model.half().float()
    after = outputs_of(model, X)
    assert not np.array_equal(after, before)
    np.testing.assert_allclose(after, before, atol=2**-9 * abs(before).max())
