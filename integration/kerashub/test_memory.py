"""`kpe.memory` of backbones: as they are, and as `convert` makes them."""

import hub_models as hub
import pytest
from keras import ops

import keras_policy_ext as kpe


@pytest.mark.parametrize("name", hub.BACKBONES)
def test_what_a_converted_backbone_keeps_was_foretold(name):
    model = hub.BACKBONES[name]("mixed_bfloat16")
    inputs, _ = hub.data(name)
    if isinstance(inputs, dict):  # Some is for the head of a task.
        inputs = {each.name: inputs[each.name] for each in model.inputs}
    before = [ops.convert_to_numpy(v).tobytes() for v in model.variables]

    as_it_is, delayed = kpe.memory(model, inputs, "delayed").forms

    after = [ops.convert_to_numpy(v).tobytes() for v in model.variables]
    assert after == before
    assert 0 < as_it_is.kept != delayed.kept
    kpe.convert(model, "delayed")
    assert kpe.memory(model, inputs).forms[0].layers == delayed.layers
