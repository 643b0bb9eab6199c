"""A step of PyTorch has as many graphs in float8 as without, task by task."""

import hub_families
import hub_models as hub
import keras
import pytest

import keras_policy_ext as kpe

if keras.backend.backend() != "torch":
    pytest.skip(
        f"graphs of PyTorch; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

from cases import FROM_3_16
from graphs_of_steps import recording

SIZES = hub.SIZES._replace(blocks=1)


def task(name):
    keras.utils.set_random_seed(0)
    options = hub.OPTIONS.get(name, {})
    backbone = hub_families.backbone(name, SIZES, **options)
    classes = {"num_classes": 4} if name in ("resnet", "vit") else {}
    return hub_families.task(name, backbone, **classes)


def trained(recorded, name, recipe=None, compiled=True):
    """The numbers of graphs and of breaks of some steps, and the losses."""
    model = hub.compiled(task(name))
    if recipe:
        assert kpe.convert(model, recipe, min_size=0).converted
    model.jit_compile, model.run_eagerly = compiled, not compiled
    model.make_train_function(force=True)
    recorded.clear()
    losses = hub.train(model, *hub.data(name), 4)
    return recorded.counts, losses


# Not BERT and ResNet, where Keras ends the graph by itself: at a warning about
# weights without a gradient, and in each BatchNormalization. What lies between
# is compiled function by function, of which float8 has more.
NAMES = (
    "gemma",
    "gemma3",
    "gpt2",
    "llama",
    "llama3",
    "mistral",
    "opt",
    "phi3",
    "qwen",
    "vit",
)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_a_task_has_the_graphs_of_stock(name):
    # Keras before 3.16 ends the graph at `backward`, before the update.
    more = 0 if FROM_3_16 else 2
    with recording() as recorded:
        stock, _ = trained(recorded, name)
        found, losses = trained(recorded, name, "delayed")
        static = recorded.total("not static") == 0
        _, eager = trained(recorded, name, "delayed", compiled=False)
    assert found[0] <= stock[0] + more
    assert found[1] <= stock[1] + more
    assert static or not FROM_3_16
    assert losses == eager
