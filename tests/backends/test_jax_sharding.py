"""JAX: which kernels are gathered before they are multiplied.

What a compiled step then moves is in `integration`, on several devices.
"""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip(
        f"JAX's kernels; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from keras_policy_ext import backends


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
