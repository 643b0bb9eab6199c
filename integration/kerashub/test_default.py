"""`convert` adds no weights to a backbone, and no slots to its optimizer."""

import hub_families
import hub_models as hub
import keras
import keras_hub
import pytest
from test_routers import FAMILIES as MIXTURES

import keras_policy_ext as kpe

IMAGE = {"image_shape": (hub.SIDE, hub.SIDE, 3)}


def swin():
    """Keras registers the parameters of its layers with those of the model."""
    return keras_hub.models.SwinTransformerBackbone(
        image_shape=(32, 32, 3),
        patch_size=8,
        window_size=2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
    )


MAKERS = {
    "swin": swin,
    **{
        name: lambda name=name: hub_families.backbone(
            name, hub.SIZES, **(IMAGE if name in ("vit", "resnet") else {})
        )
        for name in hub_families.FAMILIES
    },
    **{f"{name} (experts)": make for name, make in MIXTURES.items()},
}


def found(name, is_converted):
    """What a backbone and its optimizer hold."""
    keras.backend.clear_session()
    model = MAKERS[name]()
    if is_converted:
        assert kpe.convert(model).converted
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    states = []
    if keras.backend.backend() == "torch":
        model._track_variables()  # Keras did before a backbone had any.
        states = [*model.state_dict()]
    return (
        model.count_params(),
        [(v.path, tuple(v.shape), v.dtype) for v in model.weights],
        [(v.path, tuple(v.shape), v.dtype) for v in optimizer.variables],
        states,
    )


@pytest.mark.parametrize("name", MAKERS)
def test_a_converted_backbone_holds_what_a_stock_one_does(name):
    assert found(name, True) == found(name, False)
