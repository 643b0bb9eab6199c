"""Layers with `AutocastMixin`, and the dtypes that they see."""

import keras
from keras import ops

import keras_policy_ext as kpe

MIXED = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
JIT = keras.backend.backend() == "jax"


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)


def dtypes_of(structure):
    return keras.tree.map_structure(dtype_of, structure)


def ones(*shape, dtype="float32"):
    return ops.ones(shape, dtype)


class Layer(kpe.layers.AutocastMixin, keras.layers.Layer):
    pass


class Echo(Layer):
    """Returns its arguments as it was given them."""

    def call(self, first, second=None, third=None):
        return [x for x in (first, second, third) if x is not None]


@keras.saving.register_keras_serializable("test_autocast")
class Scale(Layer):
    """A kernel, a counter, a variable of the user's; and what was seen."""

    def __init__(self, units=2, regularizer=None, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.regularizer = regularizer
        self.seen = []

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[-1], self.units),
            initializer="ones",
            regularizer=self.regularizer,
            name="kernel",
        )
        self.count = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="count"
        )
        self.user = keras.Variable(1.0, trainable=False, name="user")
        self.exact = self.add_weight(
            shape=(), initializer="ones", autocast=False, name="exact"
        )

    def call(self, inputs):
        for variable in (self.count, self.user):
            variable.assign_add(2.0**-14)
        return self.see(inputs)

    def see(self, inputs):
        product = ops.matmul(inputs, self.kernel)
        variables = (self.kernel, self.user, self.exact)
        self.seen.append(
            tuple(dtype_of(ops.convert_to_tensor(v)) for v in variables)
        )
        return product * ops.cast(self.exact, product.dtype)
