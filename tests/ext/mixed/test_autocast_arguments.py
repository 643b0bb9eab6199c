"""Which arguments a layer with `AutocastMixin` casts."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from autocast_layers import Echo, Layer, dtype_of, dtypes_of, ones
from steps import numpy

ARGUMENTS = {
    "all": ({}, ["float16", "float16", "float16"]),
    "first": ({"autocast_args": "first"}, ["float16", "float32", "float32"]),
    "exclude": (
        {"autocast_exclude": ("second",)},
        ["float16", "float32", "float16"],
    ),
    "first and exclude": (
        {"autocast_args": "first", "autocast_exclude": "first"},
        ["float32", "float32", "float32"],
    ),
    "layer says no": ({"autocast": False}, ["float32", "float32", "float32"]),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_layer_says_which_arguments_are_cast(case):
    options, expected = ARGUMENTS[case]
    layer = Echo(dtype="mixed_float16", **options)
    x = ones(2)

    assert dtypes_of(layer(x, x, x)) == expected
    assert dtypes_of(layer(x, third=x, second=x)) == expected
    assert dtypes_of(layer(third=x, second=x, first=x)) == expected
    assert dtypes_of(layer(np.ones(2, "float32"), x, third=x)) == expected


def test_class_attributes_say_the_same():
    class Own(Echo):
        autocast_args = "first"
        autocast_exclude = ("first",)

    layer = Own(dtype="mixed_float16")
    assert dtypes_of(layer(ones(2), ones(2))) == ["float32", "float32"]
    other = Own(dtype="mixed_float16", autocast_args="all", autocast_exclude=())
    assert dtypes_of(other(ones(2), ones(2))) == ["float16", "float16"]


def test_floats_in_structures_are_cast_and_other_dtypes_kept():
    structure = {
        "floats": [ones(2), (ones(1, dtype="bfloat16"), np.ones(3, "f4"))],
        "ints": np.arange(3, dtype="int32"),
        "bools": ops.ones(2, "bool"),
    }
    expected = {
        "floats": ["float16", ("float16", "float16")],
        "ints": "int32",
        "bools": "bool",
    }
    layer = Echo(dtype="mixed_float16")
    assert dtypes_of(layer(structure)) == [expected]

    first = Echo(dtype="mixed_float16", autocast_args="first")
    kept = ["float32", ("bfloat16", "float32")]
    got = first(structure, structure)
    assert dtypes_of(got[0]) == expected
    assert dtypes_of(got[1]["floats"]) == kept


def test_starred_arguments_are_told_apart():
    class Star(Layer):
        def call(self, *xs, scale=None):
            return [*xs, scale]

    def dtypes(**options):
        layer = Star(dtype="mixed_float16", **options)
        return dtypes_of(layer(ones(1), ones(1), scale=ones(1)))

    assert dtypes(autocast_args="first") == ["float16", "float32", "float32"]
    assert dtypes(autocast_exclude="xs") == ["float32", "float32", "float16"]


@pytest.mark.parametrize("policy", ["int32", "uint8", "bool"])
def test_a_float_is_never_cast_to_an_integer(policy):
    for x in (np.float32([1.7]), ops.convert_to_tensor(np.float32([1.7]))):
        (y,) = Echo(dtype=policy)(x)
        assert dtype_of(y) == "float32"
        assert numpy(y)[0] == np.float32(1.7)


def test_symbolic_calls_cast_as_real_ones_do_and_make_no_nodes_of_it():
    class Sum(Layer):
        def call(self, a, b):
            return a, b

    first, second = keras.Input((3,)), keras.Input((3,))
    outputs = Sum(dtype="mixed_float16", autocast_args="first")(first, second)
    assert dtypes_of(outputs) == ("float16", "float32")
    model = keras.Model([first, second], outputs)
    assert [type(x).__name__ for x in model.operations] == [
        "InputLayer",
        "InputLayer",
        "Sum",
    ]
    real = model([ones(2, 3), ones(2, 3)])
    assert dtypes_of(tuple(real)) == ("float16", "float32")


def test_a_mask_survives_the_cast():
    class Masked(Layer):
        supports_masking = True

        def call(self, inputs, mask=None):
            self.mask = mask
            return inputs

    ids = np.array([[1, 2, 0]])
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(ids)
    assert dtype_of(embedded) == "float32"
    layer = Masked(dtype="mixed_float16")
    layer(embedded)
    np.testing.assert_array_equal(numpy(layer.mask), ids != 0)


def test_keras_layers_that_convert_nothing_still_do_not():
    class Lookup(kpe.layers.AutocastMixin, keras.layers.StringLookup):
        pass

    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras looks strings up with TensorFlow only")
    layer = Lookup(vocabulary=["a", "b"])
    assert not layer.converts_arguments
    assert numpy(layer(np.array(["b"]))).tolist() == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"autocast_args": "second"},
        {"autocast_args": True},
        {"autocast_exclude": ("secnd",)},
    ],
)
def test_a_wrong_choice_of_arguments_is_refused(options):
    with pytest.raises(ValueError, match=r"Received: .*Allowed: "):
        Echo(**options)


@pytest.mark.parametrize("exclude", [3, [1], [None]])
def test_exclusions_that_are_no_names_are_type_errors(exclude):
    with pytest.raises(TypeError, match="Received"):
        Echo(autocast_exclude=exclude)
