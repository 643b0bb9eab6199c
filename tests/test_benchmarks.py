"""The page of benchmarks, and the sizes of a filter, are those of the JSON."""

import json

import benchmark_page
import break_even
import charts
import pytest
import xla_programs

pytestmark = pytest.mark.any_backend


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
    assert benchmark_page.PAGE.read_text("utf-8") == benchmark_page.page(), (
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
    other = step | {"variant": "Flax", "against_bfloat16": [1.3, 1.2, 1.4]}
    found |= {"rows": [other], "notes": ["Flax has a run of its own."]}
    path = folder / "jax_on_card_h100_others.json"
    path.write_text(json.dumps(found), "utf-8")


def test_what_was_measured_on_a_gpu_comes_first(tmp_path):
    on_card(tmp_path)
    page = benchmark_page.page(tmp_path)
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
    assert "|  | Flax | 650 µs | 1.30 (1.20–1.40) |" in page
    assert "\nFlax has a run of its own.\n" in page
    readme = benchmark_page.readme(tmp_path)
    assert "10,000 tokens/s | **12,500 tokens/s**, 1.25 times as" in readme
    assert "| 10,240 MiB | **8,192 MiB**, 0.80 of it |" in readme
    assert len(readme.splitlines()) <= 150


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


def test_speeds_that_were_measured_later_replace_earlier_ones(tmp_path):
    def row(variant, speed, size=4096):
        case = {"case": f"layer {size}", "size": size, "variant": variant}
        return case | {"speedup_over_bfloat16": speed}

    where = {"backend": "jax", "device": "NVIDIA H100 80GB", "date": "2026-1-1"}
    ways = "float8 delayed", "float8 rowwise", "stock float8"
    rows = [row(*pair) for pair in zip(ways, (0.9, 0.7, 0.8), strict=True)]
    result = {"environment": where, "rows": rows}
    path = tmp_path / "layer_jax_h100.json"
    path.write_text(json.dumps(result), "utf-8")
    result["environment"] = where | {"device": "CPU (2 cores)"}
    (tmp_path / "layer_jax_cpu.json").write_text(json.dumps(result), "utf-8")
    step = {"case": "Dense 4096³", "variant": "float8 delayed"}
    step |= {"against_bfloat16": [1.4, 1.3, 1.5]}
    others = step | {"case": "Dense 4096³, and others"}
    result["environment"] = where | {"date": "2026-1-2"}
    result["rows"] = [step, others, step | {"variant": "bfloat16"}]
    path = tmp_path / "jax_on_card_h100.json"
    path.write_text(json.dumps(result), "utf-8")
    found = [tuple(each.values()) for each in break_even.table(tmp_path)]
    assert found == [
        ("H100", "delayed", 4096, 1.4, "NVIDIA H100 80GB, JAX, 2026-1-2"),
        ("H100", "rowwise", 4096, 0.7, "NVIDIA H100 80GB, JAX, 2026-1-1"),
    ]


def test_the_page_says_what_is_missing(tmp_path):
    page = benchmark_page.page(tmp_path)
    assert "JAX, TensorFlow, PyTorch on a GPU" in page
