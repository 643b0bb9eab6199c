"""Which layers `filter="auto"` leaves out, on this machine and on others."""

import dataclasses

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from conftest import visible_gpus
from keras_policy_ext import backends, contractions, kernels
from keras_policy_ext.backends import devices
from keras_policy_ext.ext.gain import auto, estimate
from keras_policy_ext.ext.gain.estimate import BreakEven
from keras_policy_ext.ext.gain.products import device_named
from keras_policy_ext.ext.inspect import doctor
from small_models import LITTLE, sequential

POLICY = "float8_from_float32"
NATIVE = kernels.Choice("native", "a pretence of this test")


@pytest.fixture
def gpu(monkeypatch):
    """Makes a GPU of this machine, with a break-even at some size."""

    def make(size, emulated=()):
        device = devices.of_nvidia((9, 0), "NVIDIA Pretence 9000")
        row = BreakEven("numpy", device.title, size, "measured in a dream")

        def choice_for(contraction):
            if isinstance(contraction, emulated):
                return kernels.Choice("emulated", "there is no such kernel")
            return NATIVE

        engine = dataclasses.replace(backends.engine, device=lambda: device)
        monkeypatch.setattr(backends, "engine", engine)
        monkeypatch.setattr(auto, "break_even", lambda *_: row)
        monkeypatch.setattr(auto, "choice_for", choice_for)
        return row

    return make


def dense(*widths):
    first, *others = widths
    layers = [keras.layers.Dense(width) for width in others]
    return keras.Sequential([keras.Input((first,)), *layers])


def reasons(report):
    return [entry.reason for entry in report.skipped]


@pytest.mark.skipif(visible_gpus() > 0, reason="a GPU is there: for CPUs only")
@pytest.mark.parametrize("preference", ["auto", "native"])
@pytest.mark.filterwarnings("ignore:None of the multiplications")
def test_on_a_cpu_nothing_gains_and_the_report_says_so(preference):
    with kernels.prefer(preference):
        report = kpe.convert(dense(2048, 1024), POLICY, filter="auto")
    assert not report.converted
    (reason,) = reasons(report)
    assert reason.startswith("float8 saves no time on this device: ")
    row = auto.here()
    assert row.size is None and row.origin in reason


@pytest.mark.filterwarnings("ignore:None of the multiplications")
def test_a_size_that_is_given_counts_on_every_device():
    model = dense(32, 64, 16)
    auto = kpe.filters.Auto(smallest=32)
    report = kpe.convert(model, POLICY, filter=auto)
    assert len(report.converted) == 1
    assert "64 and yields 16, one of them below 32" in reasons(report)[0]


def test_without_a_filter_all_that_can_be_are_converted():
    assert len(kpe.convert(dense(6, 5, 4), POLICY).converted) == 2


@pytest.mark.filterwarnings("ignore:None of the multiplications")
def test_on_a_gpu_the_row_of_the_device_says_what_gains(gpu):
    gpu(64)
    assert auto.here().origin == "measured in a dream"
    # 3 / (1/8192 + 1/64 + 1/64) = 95.6; and of 16 and 64: 38.3.
    report = kpe.convert(dense(64, 64, 16, 40), POLICY, filter="auto")
    assert len(report.converted) == 1
    small, odd = reasons(report)
    assert "gains as much as one of 38³; float8 pays from 64³" in small
    assert "not both multiples of 16" in odd


@pytest.mark.filterwarnings("ignore:None of the multiplications")
def test_few_rows_gain_less(gpu):
    gpu(64)
    few = kpe.filters.Auto(rows=32)  # 3 / (1/32 + 2/64) = 48
    report = kpe.convert(dense(64, 64), POLICY, filter=few)
    assert "with 32 rows gains as much as one of 48³" in reasons(report)[0]
    square = kpe.filters.Auto(rows=64)
    assert kpe.convert(dense(64, 64), POLICY, filter=square).converted


@pytest.mark.filterwarnings("ignore:None of the multiplications")
def test_what_would_be_emulated_stays(gpu):
    gpu(1, emulated=contractions.Conv)
    layers = [keras.layers.Conv1D(16, 1), keras.layers.Dense(16)]
    model = keras.Sequential([keras.Input((4, 16)), *layers])
    report = kpe.convert(model, POLICY, filter="auto")
    assert [entry.class_name for entry in report.converted] == ["Dense"]
    assert "emulated: there is no such kernel" in reasons(report)[0]


def test_where_matmuls_are_emulated_no_size_gains(gpu):
    gpu(64, emulated=contractions.Einsum)
    row = auto.here()
    assert (row.size, row.device) == (None, "NVIDIA Pretence 9000")
    assert row.origin == "matmuls are emulated: there is no such kernel"


def test_the_choice_is_that_of_a_compiled_step():
    """On TensorFlow too, where a model is converted before it is compiled."""
    matmul = contractions.Einsum("abc,cde->abde")
    with kernels.prefer("native"):
        assert auto.choice_for(matmul).native
    with kernels.prefer("emulated"):
        assert not auto.choice_for(matmul).native


@pytest.mark.any_backend
@pytest.mark.parametrize("name", ["h100", "rtx5090", "mi355x", "a10", "tpu7x"])
@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_a_size_is_known_for_every_device(backend, name):
    row = estimate.break_even(backend, device_named(name))
    assert row.origin.startswith(("measured", "estimated", "assumed")), row


def test_doctor_shows_the_table_with_the_row_of_this_machine_first(gpu):
    row = gpu(4096)
    first, *others = doctor.break_even_rows()
    name = "NVIDIA Pretence 9000 (here)"
    assert first == ("numpy", name, "4096³", row.origin)
    assert len(others) == len(estimate.break_evens())


@pytest.mark.filterwarnings(LITTLE)
@pytest.mark.parametrize(
    ("arguments", "converted", "reason"),
    [
        ({"smallest": 1}, [], "multiples of 16"),
        (
            {"multiple": 1, "smallest": 5},
            ["Conv1D"],
            "sums over 5 and yields 2, one of them below 5",
        ),
        (
            {"multiple": 1, "smallest": 1, "first": False},
            ["Dense"],
            "first layer",
        ),
        (
            {"multiple": 1, "smallest": 1, "last": False},
            ["Conv1D"],
            "last layer",
        ),
    ],
)
def test_what_is_left_out_says_why(arguments, converted, reason):
    filter = kpe.filters.Auto(**arguments)
    report = kpe.convert(sequential(), POLICY, filter=filter)
    assert [e.class_name for e in report.converted] == converted
    left = [e for e in report.skipped if "Norm" not in e.class_name]
    assert len(left) == 2 - len(converted)
    assert all(reason in entry.reason for entry in left)


@pytest.mark.parametrize("name", ["smallest", "multiple", "rows"])
def test_sizes_of_a_filter_are_checked(name):
    with pytest.raises(ValueError, match=name):
        kpe.filters.Auto(**{name: 0})
    for wrong in (True, "16", 1.5):
        with pytest.raises(TypeError, match=name):
            kpe.filters.Auto(**{name: wrong})
    assert kpe.filters.Auto(smallest=np.int64(16)).smallest == 16
