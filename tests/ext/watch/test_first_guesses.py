"""What people try first, and what they are then told."""

import keras
import pytest
from keras import layers, ops

import keras_policy_ext as kpe
from steps import normal

X, Y = normal(8, 6), normal(8, 3, seed=1)


def model_of(layer, compiled=True):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layer, layers.Dense(3)])
    if compiled:
        model.compile("sgd", "mse")
    return model


def test_what_if_of_inputs_alone_shows_the_forward_pass():
    model = model_of(layers.Dense(4))
    report = kpe.what_if(model, X, "current")
    both = kpe.what_if(model, (X, Y), "current")
    for one, other in zip(report.entries, both.entries, strict=True):
        if one.operand == "outputs_grad":
            assert one.sqnr_db is None and one.note == "no gradient"
        else:
            assert one.sqnr_db == other.sqnr_db
    assert "no targets" in str(report)


def test_a_list_of_tuples_is_batches():
    model = model_of(layers.Dense(4))
    report = kpe.what_if(model, [(X, Y), (X * 2, Y)], "current")
    alone = kpe.what_if(model, (X, Y), "current")
    assert report.as_dict() == alone.as_dict()


@pytest.mark.parametrize("device", ["8xh100", ["h100", "h100"], "2 x b200"])
def test_a_plan_is_for_one_device(device):
    with pytest.raises(ValueError, match="for one device"):
        kpe.plan(model_of(layers.Dense(4)), 8, device)


class Own(layers.Layer):
    """Multiplies with its weight as a function says."""

    def __init__(self, function, columns):
        super().__init__(name="own")
        self.function, self.columns = function, columns

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(shape[-1], self.columns))

    def call(self, x):
        return self.function(x, self.w)


def in_three(x, w):
    query, key, value = (ops.matmul(x, each) for each in ops.split(w, 3, 1))
    return query * key + value


def summed(x, w):
    return ops.associative_scan(ops.add, ops.matmul(x, w), axis=1)


NO_SCAN = pytest.mark.skipif(
    keras.backend.backend() == "tensorflow",
    reason="Keras on TensorFlow infers no shape of a scan",
)


def in_a_scan(x, w):
    return ops.vectorized_map(lambda row: ops.matmul(row[None], w)[0], x)


@pytest.mark.parametrize(
    ("function", "columns", "multiplications"),
    [
        (in_three, 12, 6 * 12),
        pytest.param(summed, 4, 6 * 4, marks=NO_SCAN),
    ],
)
def test_products_beside_other_operations_are_in_float8(
    function, columns, multiplications
):
    model = model_of(Own(function, columns))
    before = model(X)
    report = kpe.convert(model, "current")
    (entry,) = [e for e in report.converted if e.path.endswith("own")]
    assert entry.multiplications == multiplications
    assert not entry.plain_multiplications
    error = ops.max(ops.abs(model(X) - before)) / ops.max(ops.abs(before))
    assert 0 < float(error) < 0.3
    model.train_on_batch(X, Y)


def test_products_in_functions_of_the_caller_stay_in_floats():
    report = kpe.convert(model_of(Own(in_a_scan, 4)))
    (entry,) = [e for e in report.skipped if e.path.endswith("own")]
    assert "vectorized_map" in entry.reason


class Decoder(layers.Layer):
    """Multiplies with the kernel of another layer, and has a bias."""

    def __init__(self, encoder):
        super().__init__(name="decoder")
        self.encoder = encoder

    def build(self, shape):
        self.bias = self.add_weight(name="bias", shape=(6,))

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.encoder.kernel)) + self.bias


def test_a_tied_decoder_is_told_that_the_kernel_is_not_its_own():
    encoder = layers.Dense(4)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, Decoder(encoder)(encoder(inputs)))
    (entry,) = kpe.convert(model).skipped
    assert entry.reason == "it has no kernel of its own to multiply with"


def test_a_recording_with_a_lambda_of_ones_own_is_replayed(tmp_path):
    model = model_of(layers.Lambda(lambda x: x * 2))
    recorder = kpe.record(model, tmp_path / "run.zip")
    broken = X * float("nan")
    recorder.step((broken, Y), model.train_on_batch(broken, Y))
    with pytest.raises(ValueError, match="safe_mode"):
        kpe.replay(tmp_path / "run.zip", recipes=[])
    report = kpe.replay(tmp_path / "run.zip", recipes=[], safe_mode=False)
    assert report.origin.operand == "inputs"
