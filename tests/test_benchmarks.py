"""The page of benchmarks, and the sizes of a filter, are those of the JSON."""

import json

import benchmark_page
import bounds
import break_even
import charts
import counts
import estimates
import pytest
import xla_programs

pytestmark = pytest.mark.any_backend


def row(variant, moved, large, float8_matmuls, **kwargs):
    return {
        "backend": "jax",
        "device": "H200",
        "case": "dense",
        "variant": variant,
        "bytes_per_element": moved,
        "large_kernels": large,
        "small_kernels": 0,
        "transposes": 0,
        "float8_matmuls": float8_matmuls,
        "temporaries_of_bfloat16": None,
        "estimated_speedup_over_bfloat16": 1.0,
        **kwargs,
    }


PLAIN = row("bfloat16", 6.0, 3, 0)
FLOAT8 = row("float8 delayed", 12.0, 8, 3)
PLACE = ("tensorflow", "H200")


@pytest.mark.any_backend
@pytest.mark.parametrize("chart", charts.charts(), ids=lambda c: c.name)
def test_a_chart_is_that_of_the_committed_results(chart):
    found = (charts.IMAGES / f"{chart.name}.svg").read_text("utf-8")
    assert found == charts.svg(chart), (
        "run python integration/benchmarks/charts.py"
    )
    assert f"images/{chart.name}.svg" in benchmark_page.HEAD


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        (5000, "5 s"),
        (13700, "13.7 s"),
        (999.9, "1 s"),
        (18.6, "18.6 ms"),
        (0.571, "571 µs"),
        (0.9999, "1 ms"),
    ],
)
def test_times_are_in_the_unit_that_a_person_says(milliseconds, words):
    assert benchmark_page.duration(milliseconds) == words


def test_the_page_is_that_of_the_committed_results():
    found = benchmark_page.PAGE.read_text("utf-8")
    assert found == benchmark_page.page(), (
        "run python integration/benchmarks/benchmark_page.py"
    )


def test_the_readme_has_the_table_of_the_committed_results():
    assert benchmark_page.README.read_text("utf-8") == benchmark_page.readme()


def on_card(folder):
    """A file as `jax_on_card.py` writes it."""
    first = {"case": "KerasHub Llama in fit", "variant": "float8 delayed"}
    first |= {"median_us": 80.0, "against_bfloat16": [1.25, 1.2, 1.3]}
    first |= {"tokens_per_s": 12500, "peak_mib": 8192, "first_step_s": 20.5}
    plain = first | {"variant": "bfloat16", "against_bfloat16": [1.0] * 3}
    plain |= {"tokens_per_s": 10000, "peak_mib": 10240}
    step = {"case": "Dense 8³", "variant": "bfloat16", "median_us": 650.0}
    step |= {"kernels_us": 640.0, "float8_matmuls": 0}
    wrong = {"case": "Dense 4³", "error": "no memory"}
    where = {"backend": "jax", "device": "NVIDIA H100", "date": "2026-12-01"}
    where["versions"] = {"jax": "0.11.2"}
    rows = [first, plain, step, wrong]
    found = {"benchmark": "jax_on_card", "environment": where, "rows": rows}
    path = folder / "jax_on_card_h100.json"
    path.write_text(json.dumps(found), "utf-8")


def test_what_was_measured_on_a_gpu_comes_first(tmp_path):
    on_card(tmp_path)
    page = benchmark_page.page(tmp_path, tmp_path / "counts.json")
    measured = page.index("## Measured on an NVIDIA H100")
    assert measured < page.index("## Memory of a step")
    plain, float8 = (
        "| KerasHub Llama | bfloat16 | 80 µs | 10,000 | 1.00 (1.00–1.00) "
        "| 10,240 | 20.5 |",
        "|  | float8 delayed | 80 µs | 12,500 | 1.25 (1.20–1.30) "
        "| 8,192 | 20.5 |",
    )
    assert f"{plain}\n{float8}" in page
    assert "| Dense 8³ | bfloat16 | 650 µs |  | 640 µs |  | 0 |" in page
    assert "Dense 4³" not in page
    readme = benchmark_page.readme(tmp_path)
    assert "10,000 | **12,500**, 1.25 times the speed |" in readme
    assert "| 10.0 GiB | **8.0 GiB**, 0.80 of it |" in readme


def test_calls_are_counted_in_the_text_of_a_program():
    target = 'custom_call_target="__cublas$lt$matmul$f8"'
    text = f"""
      %a = (bf16[8,8]{{1,0}}, s8[32]{{0}}) custom-call(%x, %y), {target}
      %b = f32[8,8]{{1,0}} custom-call(%x, %y), {target}
      %c = bf16[8]{{0}} custom-call(%b), custom_call_target="other"
      %d = f32[8] fusion(%c), backend_config={{"kind":"__triton_nested_gemm"}}
      %e = f32[8] conditional(%p, %d, %d), branch_computations={{%f, %g}}
    """
    assert xla_programs.calls(text) == {
        "float8_matmuls": 2,
        "float8_results": {"bf16": 1, "f32": 1},
        "triton_gemms": 1,
        "conditionals": 1,
        "custom_calls": {"other": 1},
    }


def test_the_table_of_sizes_is_that_of_the_committed_results():
    found = json.loads(break_even.TABLE.read_text("utf-8"))
    assert found == break_even.table(), (
        "run python integration/benchmarks/break_even.py"
    )


def test_every_figure_stands_beside_its_kernel_and_its_quality():
    results = benchmark_page.read()
    rows = [
        row for all in results.values() for each in all for row in each["rows"]
    ]
    assert len(rows) > 50
    for each in rows:
        assert {"case", "variant", "kernel", "reason"} <= set(each)
        assert {"sqnr_db", "peak_mib", "float8_matmuls"} & set(each)
        assert each["variant"] not in break_even.OURS or each["kernel"]


def test_an_estimate_is_by_the_model_that_the_page_states():
    # 3 products of 2 · 4096³ operations, 18 B for each place, 6 kernels.
    expected = (
        6 * 4096**3 / (0.72 * 989e12) + 18 * 4096**2 / (0.8 * 4.8e12) + 6 * 2e-6
    )
    assert estimates.seconds(PLAIN, 4096) == pytest.approx(expected)
    float8 = (
        2 * 4096**3 / (0.72 * 1979e12) * (1 + 2 / 0.85)
        + 36 * 4096**2 / (0.8 * 4.8e12)
        + 11 * 2e-6
    )
    assert estimates.seconds(FLOAT8, 4096) == pytest.approx(float8)


def test_from_the_break_even_on_an_estimate_is_faster():
    size = estimates.break_even(FLOAT8, PLAIN)

    def gains(size):
        return estimates.seconds(FLOAT8, size) < estimates.seconds(PLAIN, size)

    assert 512 < size < 4096
    assert gains(size) and not gains(size - 64)
    hopeless = row("float8 delayed", 1000.0, 8, 3)
    assert estimates.break_even(hopeless, PLAIN) is None


def test_counts_that_are_added_replace_those_of_their_place(tmp_path):
    line = {"gpu": "H200", "step": "dense", "way": "bfloat16", "seconds": 2.0}
    line |= {"large": 3, "small": 1, "transposes": 0, "float8": 0}
    line |= {"bytes an element": 6.001, "temporaries": 200}
    faster = line | {"way": "delayed", "seconds": 1.5, "float8": 3}
    faster["temporaries"] = 150
    printed = ["a kernel", json.dumps(line), json.dumps(faster)]
    new = list(counts.rows(printed, "jax"))
    speedups = [each["estimated_speedup_over_bfloat16"] for each in new]
    assert speedups == [1.0, 1.333]
    held = [each["temporaries_of_bfloat16"] for each in new]
    assert held == [1.0, 0.75]
    path = tmp_path / "counts.json"
    other = row("bfloat16", 1.0, 1, 0, backend="tensorflow")
    path.write_text(json.dumps(counts.merged([PLAIN, FLOAT8, other], new)))
    assert estimates.read_counts(path) == [*new, other]
    with pytest.raises(SystemExit, match="no counts of bfloat16"):
        list(counts.rows([json.dumps(faster)], "jax"))
    path.write_text(json.dumps([{"backend": "jax"}]))
    with pytest.raises(ValueError, match="other fields"):
        estimates.read_counts(path)


def test_counts_of_pytorch_are_estimated_here():
    line = {"recipe": "bfloat16", "triton": False, "large_kernels": 5}
    line |= {"small_kernels": 3, "bytes_per_element": 10.0}
    line |= {"float8_matmuls": 0}
    fused = line | {"recipe": "delayed", "triton": True, "float8_matmuls": 3}
    printed = [json.dumps(each) for each in (line, fused)]
    plain, delayed = counts.rows(printed, "torch")
    assert (plain["variant"], delayed["variant"]) == (
        "bfloat16",
        "float8 delayed",
    )
    expected = estimates.seconds(plain, 4096) / estimates.seconds(delayed, 4096)
    found = delayed["estimated_speedup_over_bfloat16"]
    assert found == pytest.approx(expected, abs=1e-3)
    printed.append(json.dumps(fused | {"triton": False}))
    *_, slow = counts.rows(printed, "torch")
    assert slow["variant"] == "float8 delayed, without Triton"


def test_what_bounds_a_step_is_what_was_counted():
    counted = {
        (row["device"], row["variant"]): row["bytes_per_element"]
        for row in estimates.read_counts()
        if (row["backend"], row["case"]) == ("jax", "dense")
    }
    for program, passes in bounds.PROGRAMS.items():
        assert counted[program] == pytest.approx(sum(passes) / 3, abs=0.01)


def result(device, times):
    rows = [
        {"case": f"layer {n}", "size": n, "variant": v, "median_ms": ms}
        for (n, v), ms in times.items()
    ]
    where = {"backend": "torch", "device": device}
    return {"environment": where, "rows": rows}


def test_a_measured_size_is_the_one_from_which_all_gain():
    times = {}
    for size, delayed in {512: 0.9, 1024: 1.1, 2048: 0.9, 4096: 0.5}.items():
        times |= {(size, "bfloat16"): 1.0, (size, "float8 delayed"): delayed}
        times |= {(size, "float8 current"): 0.4}
    found = break_even.measured(result("NVIDIA H200", times))
    # As in the name of a simulated device.
    assert (found["device"], found["size"]) == ("H200", 2048)
    assert "512³ to 4096³ under delayed and current" in found["origin"]
    assert "at 0.91 to 2.00" in found["origin"]
    # What is not float8 may be faster in float32, as on a CPU.
    times |= {(size, "float32"): 0.3 for size in (512, 1024, 2048, 4096)}
    found = break_even.measured(result("CPU (this one)", times))
    assert (found["device"], found["size"]) == ("cpu", None)


def matmul(variant, milliseconds, speedup):
    return {
        "case": "matmul 8192",
        "size": 8192,
        "variant": variant,
        "kernel": "native",
        "median_ms": milliseconds,
        "speedup_over_bfloat16": speedup,
    }


@pytest.mark.parametrize(
    ("host", "speedup", "size"),
    [(8.0, 2.0, 10368), (3.0, 2.0, 8192), (8.0, 0.9, None)],
)
def test_steps_that_the_host_bounds_gain_where_bfloat16_takes_longer(
    host, speedup, size
):
    """Three matmuls of 8192 take 4 ms; of 10321 they would take 8 ms."""
    times = {(4096, "bfloat16"): 2.0, (4096, "float8 delayed"): host}
    found = result("NVIDIA H200", times)
    found["rows"].append(matmul("bfloat16", 4 / 3, 1.0))
    found["rows"].append(matmul("float8", 4 / 3 / speedup, speedup))
    row = break_even.measured(found)
    assert row["size"] == size
    told = f"the host takes {host} ms" in row["origin"]
    assert told == (size is not None)


@pytest.mark.parametrize(
    ("step", "size"), [(7.0, 8192), (9.0, 16384), (8.0, 12288)]
)
def test_steps_with_longer_casts_gain_where_matmuls_are_larger(step, size):
    """Matmuls of 8192 take 4 ms, or 2 in float8; all else 3, or `step - 2`."""
    times = {(8192, "bfloat16"): 7.0, (8192, "float8 delayed"): step}
    found = result("NVIDIA H200", times)
    found["rows"].append(matmul("bfloat16", 4 / 3, 1.0))
    found["rows"].append(matmul("float8", 2 / 3, 2.0))
    row = break_even.measured(found)
    assert row["size"] == size
    assert "grows with its cube" in row["origin"]


def test_what_is_measured_comes_before_what_is_estimated(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([PLAIN, FLOAT8]))
    times = {(64, "bfloat16"): 1.0}
    times |= {(64, name): 2.0 for name in break_even.OURS}
    file = tmp_path / "layer_torch_h200.json"
    file.write_text(json.dumps(result("NVIDIA H200", times)))
    rows = break_even.table(tmp_path, path)
    origins = [row["origin"].split()[0] for row in rows]
    kinds = [*["measured"] * 2, *["estimated"] * 2, "there", "assumed,"]
    assert origins == kinds
    assert [row["device"] for row in rows[:4]] == ["H200", "H100"] * 2
    h200 = estimates.break_even(FLOAT8, PLAIN)
    # The memory of an H100 is slower, and the matmuls are not.
    h100 = estimates.break_even(FLOAT8, PLAIN, "H100")
    assert [row["size"] for row in rows[:4]] == [None, None, h200, h100]
    assert h200 < h100
    # Of the same framework and device only what is measured.
    of_torch = [each | {"backend": "torch"} for each in (PLAIN, FLOAT8)]
    path.write_text(json.dumps(of_torch))
    assert len(break_even.table(tmp_path, path)) == 4
    # XLA compiles for TensorFlow what it compiles for JAX.
    of_jax = result("NVIDIA H200", times)
    of_jax["environment"]["backend"] = "jax"
    (tmp_path / "layer_jax_h200.json").write_text(json.dumps(of_jax))
    counted = [each | {"backend": "tensorflow"} for each in (PLAIN, FLOAT8)]
    path.write_text(json.dumps(counted))
    rows = break_even.table(tmp_path, path)
    (of_tensorflow,) = (
        row for row in rows if (row["backend"], row["device"]) == PLACE
    )
    assert of_tensorflow["size"] is None
    assert "assumed to be as with JAX" in of_tensorflow["origin"]


def test_other_gpus_are_taken_to_be_as_the_worst_of_those_known(tmp_path):
    path = tmp_path / "counts.json"
    nothing = break_even.table(tmp_path, path)
    assert nothing == [break_even.CPU, break_even.OTHERS]
    path.write_text(json.dumps([PLAIN, FLOAT8]))
    *known, _, others = break_even.table(tmp_path, path)
    assert others["size"] == max(row["size"] for row in known)
    assert others["origin"].startswith("assumed")


def test_the_page_says_what_is_missing(tmp_path):
    nothing = benchmark_page.page(tmp_path, tmp_path / "counts.json")
    assert "Nothing yet." in nothing
    assert "No counts are committed yet." in nothing
    assert "JAX, TensorFlow, PyTorch on a GPU" in nothing
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([PLAIN, FLOAT8]))
    counted = benchmark_page.page(tmp_path, path)
    assert "| JAX | H200 | dense | float8 delayed | 12.0 | 8 |" in counted
