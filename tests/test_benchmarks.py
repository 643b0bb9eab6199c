"""The page of benchmarks, and the sizes of a filter, are those of the JSON."""

import json

import benchmark_page
import bounds
import break_even
import charts
import counts
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


@pytest.mark.any_backend
@pytest.mark.parametrize("chart", charts.charts(), ids=lambda c: c.name)
def test_a_chart_is_that_of_the_committed_results(chart):
    found = (charts.IMAGES / f"{chart.name}.svg").read_text("utf-8")
    assert found == charts.svg(chart), (
        "run python integration/benchmarks/charts.py"
    )
    pages = benchmark_page.HEAD + benchmark_page.TABLES_HEAD
    assert f"images/{chart.name}.svg" in pages


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


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (benchmark_page.PAGE, benchmark_page.page),
        (benchmark_page.TABLES, benchmark_page.tables),
    ],
    ids=["page", "tables"],
)
def test_a_page_is_that_of_the_committed_results(path, text):
    assert path.read_text("utf-8") == text(), (
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
    assert "10,000 | **12,500**, 1.25 times as many |" in readme
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
    assert counts.read_counts(path) == [*new, other]
    with pytest.raises(SystemExit, match="no counts of bfloat16"):
        list(counts.rows([json.dumps(faster)], "jax"))
    path.write_text(json.dumps([{"backend": "jax"}]))
    with pytest.raises(ValueError, match="other fields"):
        counts.read_counts(path)
    eager = {"recipe": "delayed", "triton": False, "large_kernels": 5}
    eager |= {"small_kernels": 3, "bytes_per_element": 10.0}
    eager |= {"float8_matmuls": 3}
    plain = eager | {"recipe": "bfloat16", "float8_matmuls": 0}
    _, found = counts.rows([json.dumps(e) for e in (plain, eager)], "torch")
    assert found["variant"] == "float8 delayed, without Triton"
    assert found["estimated_speedup_over_bfloat16"] is None


def test_what_bounds_a_step_is_what_was_counted():
    counted = {
        (row["device"], row["variant"]): row["bytes_per_element"]
        for row in counts.read_counts()
        if (row["backend"], row["case"]) == ("jax", "dense")
    }
    for program, passes in bounds.PROGRAMS.items():
        assert counted[program] == pytest.approx(sum(passes) / 3, abs=0.01)


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
    nothing = benchmark_page.tables(tmp_path, tmp_path / "counts.json")
    assert "Nothing yet." in nothing
    assert "No counts are committed yet." in nothing
    page = benchmark_page.page(tmp_path)
    assert "JAX, TensorFlow, PyTorch on a GPU" in page
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([PLAIN, FLOAT8]))
    counted = benchmark_page.tables(tmp_path, path)
    assert "| JAX | H200 | dense | float8 delayed | 12.0 | 8 |" in counted
