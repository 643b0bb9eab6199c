"""The benchmarks measure what they say, at sizes that take no time."""

import argparse
import functools
import json
import time

import keras
import layer
import llama_block
import measuring
import memory
import numpy as np
import pytest
import transformer_step
import variants
from steps_of_layers import forward_backward, numpy, sqnr_db, training_step
from workloads import Llama, dense, normal

import keras_policy_ext as kpe
from cases import SLOW

TINY = Llama(1, 4, 16, 32, 2, 1)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Layer .* does not have a `quantize`"
)


# Rounds


@pytest.mark.any_backend
def test_functions_are_called_in_turn_and_as_often_as_it_takes(monkeypatch):
    monkeypatch.setattr(measuring, "SAMPLE_SECONDS", 0.0)
    calls = []
    names = ("a", "b", "c")
    functions = {name: functools.partial(calls.append, name) for name in names}
    took = measuring.interleaved(functions, 3)
    assert "".join(calls) == "aabbcc" + "abc" + "bca" + "cab"
    assert {name: len(each) for name, each in took.items()} == dict.fromkeys(
        names, 3
    )


@pytest.mark.any_backend
def test_seconds_are_those_of_one_call():
    once = measuring.seconds(lambda: time.sleep(0.01), repeats=5)
    assert 0.01 <= once < 0.03


@pytest.mark.any_backend
def test_a_speedup_is_the_median_of_the_ratios_of_rounds():
    took = {  # The machine is slower in the second round.
        "bfloat16": np.array([1.0, 10.0, 3.0]),
        "float8": np.array([1.0, 5.0, 6.0]),
    }
    found = measuring.times(took)
    assert found["float8"] == {
        "median_ms": 5000.0,
        "speedup_over_bfloat16": 1.0,
        "quartiles": [0.75, 1.5],
    }


@pytest.mark.any_backend
def test_results_are_written_with_the_device_and_versions(tmp_path, capsys):
    asked = argparse.Namespace(rounds=3, out=tmp_path)
    path = measuring.write("layer", asked, [{"case": "a"}], tmp_path)
    found = json.loads(path.read_text())
    assert path.name.startswith(f"layer_{measuring.BACKEND}_")
    assert found["settings"] == {"rounds": 3}
    assert found["rows"] == [{"case": "a"}]
    assert found["environment"]["device"] == measuring.device()
    assert found["environment"]["versions"]["keras"] == keras.__version__
    assert "case: a" in capsys.readouterr().out


# What is measured


@pytest.mark.full
def test_a_step_updates_the_weights(monkeypatch):
    monkeypatch.setattr(
        "steps_of_layers.sgd", lambda: keras.optimizers.SGD(1.0)
    )
    x, g = normal((8, 16)), normal((8, 16), seed=1)
    models = variants.made(functools.partial(dense, 16), ["float8 delayed"])
    model = models["float8 delayed"]
    y, x_grad, _ = forward_backward(model)(x, g)
    step = training_step(model)
    first = [numpy(each) for each in step(x, g)]
    second = [numpy(each) for each in step(x, g)]
    for mine, other in zip(first, (y, x_grad), strict=True):
        np.testing.assert_allclose(mine, numpy(other), rtol=0.02, atol=0.02)
    assert np.abs(second[0] - first[0]).max() > 0.5


def test_all_variants_have_the_same_weights_and_compute_what_they_say():
    names = [*variants.VARIANTS, "float32"]
    models = variants.made(functools.partial(dense, 16), names)
    x = normal((8, 16))
    outputs = {name: numpy(model(x)) for name, model in models.items()}
    exact = outputs["float32"]
    quality = {name: sqnr_db(exact, each) for name, each in outputs.items()}
    assert quality["float32"] is None
    assert quality["bfloat16"] > 40
    for name in ("float8 delayed", "float8 current", "stock float8"):
        assert 20 < quality[name] < 35, quality
    kinds = {n: variants.kernels_of(m)["kernel"] for n, m in models.items()}
    ours = kpe.kernels.select("ab,bc->ac").kind
    assert {name for name, kind in kinds.items() if kind} == {*variants.OURS}
    assert kinds["float8 delayed"] == ours


@pytest.mark.full
@pytest.mark.slow_except()
def test_every_way_of_a_layer_has_its_time_and_its_quality():
    rows = [*layer.matmul_rows(32, 2), *layer.layer_rows(32, 2, False)]
    found = {row["case"]: [] for row in rows}
    for row in rows:
        found[row["case"]].append(row["variant"])
        assert row["median_ms"] > 0
        limit = 18 if "float8" in row["variant"] else 40
        assert all(x is None or x > limit for x in row["sqnr_db"].values()), row
    assert found["matmul 32"] == ["bfloat16", "float8"]
    assert set(found["layer 32"]) >= {*variants.VARIANTS, "bfloat16"}


SLOWLY = pytest.mark.parametrize("_", [pytest.param(0, marks=SLOW)])


@SLOWLY
def test_a_block_has_its_times_and_its_quality(_):
    rows = list(llama_block.rows(TINY, 2, False))
    assert [row["variant"] for row in rows] == [*variants.VARIANTS]
    quality = {row["variant"]: row["sqnr_db"]["outputs"] for row in rows}
    assert quality["bfloat16"] > 35 > quality["float8 delayed"] > 15


@SLOWLY
def test_steps_and_first_steps_are_measured(_):
    asked = argparse.Namespace(rounds=2, first_rounds=1)
    rows = list(transformer_step.rows(TINY, asked))
    cases = [row["case"].partition(":")[0] for row in rows]
    assert cases == ["step"] * 4 + ["first step"] * 4
    for step, first in zip(rows[:4], rows[4:], strict=True):
        assert step["variant"] == first["variant"]
        assert min(first["median_ms"], step["median_ms"]) > 0


@SLOWLY
def test_memory_is_that_of_a_step(_):
    rows = list(memory.rows(TINY))
    if not rows:
        pytest.skip("TensorFlow does not say what a step holds on a CPU")
    assert [row["variant"] for row in rows] == [*variants.VARIANTS]
    larger = list(memory.rows(Llama(4, 4, 16, 32, 2, 1)))
    for one, four in zip(rows, larger, strict=True):
        assert 0 < one["peak_mib"] < four["peak_mib"]


@pytest.mark.full
@pytest.mark.skipif(measuring.BACKEND != "torch", reason="a script of PyTorch")
def test_the_script_for_a_card_runs_to_its_end_on_a_cpu(tmp_path, capsys):
    import torch_on_card

    path = tmp_path / "card.json"
    torch_on_card.main(
        [
            *("--small", "--only", "Dense 32, eager", "Dense 32, CUDA graphs"),
            *("--limit-of-row", "100", "--out", str(path)),
        ]
    )
    found = json.loads(path.read_text())
    names = ("bfloat16", "delayed", "current", "rowwise")
    assert list(found["rows"]) == [f"Dense 32, eager, {n}" for n in names]
    for row in found["rows"].values():
        assert row["us"] > 0 and row["skips"] == 0
    # Nothing runs as a CUDA graph here, and each row says why.
    refused = [note for note in found["notes"] if "CUDA graphs" in note]
    assert len(refused) == 4
    assert all("Received: the device" in note for note in refused)
    assert "skips" in capsys.readouterr().out
    # What is left out is no row that failed.
    assert found["notes"] == refused
