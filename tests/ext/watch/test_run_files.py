"""What a run leaves: files of figures, the report and the page of them."""

import csv
import json
import tracemalloc

import pytest

from command_lines import error_of
from keras_policy_ext.ext.cli import commands as cli
from keras_policy_ext.ext.sampling.samples import (
    COLUMNS,
    FIGURES,
    Measured,
    Samples,
)
from keras_policy_ext.ext.watch import run_files
from keras_policy_ext.ext.watch.run_report import RunReport
from refusals import refused

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("environment_is_restored"),
]

NAN = float("nan")


def figures(sqnr=30.0):
    known = dict.fromkeys(FIGURES, 0.25)
    known |= {"sqnr_db": sqnr, "peak_amax": NAN, "nonfinite": 0.0}
    return [known[name] for name in FIGURES]


def of_steps(*steps):
    """The rows of some steps, two operands and a layer without figures."""
    found, rows = Samples(), []
    for step in steps:
        operands = {
            ("up", "kernel", "inputs"): Measured(figures(step), 1, ""),
            ("down", "kernel", "kernel"): Measured(figures(), 2, "frozen"),
        }
        found.add(step, operands, {"lost": "the model did not call it"})
        rows.append(found.last_of_layers())
    return found, rows


@pytest.fixture(params=[".jsonl", ".csv"])
def written(request, tmp_path):
    """The path of a file of three samples, and the samples."""
    path = tmp_path / f"run{request.param}"
    found, rows = of_steps(1, 5, 9)
    for each in rows:
        run_files.RowFile(path).append(each)
    return path, found


def test_a_file_is_read_back(written):
    path, found = written
    file, read, runs = run_files.read(path.parent)
    assert (file, runs, read.last_step, len(read)) == (path, 1, 9, 3)
    assert read.history() == found.history()
    assert read.unexamined == {"lost": "the model did not call it"}


def test_other_programs_read_the_files(written):
    path, found = written
    with path.open(newline="") as file:
        if path.suffix == ".csv":
            rows = list(csv.DictReader(file))
            assert rows[0]["peak_amax"] == "" and rows[0]["sqnr_db"] == "1.0"
        else:
            rows = list(map(json.loads, file))
            assert rows[:2] == found.history()[:2]
    assert len(rows) == 9 and tuple(rows[0]) == COLUMNS
    assert rows[2]["note"] == "the model did not call it"


def test_a_line_that_was_not_written_to_its_end_is_left_out(written):
    path, found = written
    text = path.read_text().rstrip()
    path.write_text(text[: text.rindex("\n") + 5])
    (_, read, _) = run_files.read(path)
    assert read.history() == found.history() and read.unexamined == {}


def test_the_last_of_several_runs_is_read(written):
    path, _ = written
    _, rows = of_steps(1, 3)
    for each in rows:
        run_files.RowFile(path).append(each)
    _, read, runs = run_files.read(path)
    assert (runs, read.last_step, len(read)) == (2, 3, 2)


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_run_goes_on_after_one_that_ended_in_a_line(written, cut):
    path, _ = written
    path.write_bytes(path.read_bytes()[:-cut])
    file = run_files.RowFile(path)
    for each in of_steps(1, 3)[1]:
        file.append(each)
    _, read, runs = run_files.read(path)
    assert (runs, read.last_step, len(read)) == (2, 3, 2)


def test_a_cut_header_is_written_anew(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text(",".join(COLUMNS))
    run_files.RowFile(path).append(of_steps(1)[1][0])
    assert len(run_files.read(path)[1]) == 1


def test_a_line_of_csv_that_is_too_long_is_refused(written):
    path, _ = written
    if path.suffix == ".csv":
        with path.open("a") as file:
            file.write("x" * 200_000 + "\r\n")
        with pytest.raises(ValueError, match="is no text: field larger than"):
            run_files.read(path)


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("run.jsonl", '"step": 5', '"stop": 5'),
        ("run.jsonl", '"sqnr_db": 5.0', '"sqnr_db": "many"'),
        ("run.jsonl", '"sqnr_db": 5.0', '"sqnr_db": NaN'),
        ("run.jsonl", '{"step": 5', '["step": 5'),
        ("run.csv", "5,up,kernel", "five,up,kernel"),
        ("run.csv", "5,up,kernel,inputs,", "5,up,kernel,inputs\n"),
    ],
)
def test_a_damaged_line_is_named(name, old, new, tmp_path):
    path = tmp_path / name
    for each in of_steps(1, 5)[1]:
        run_files.RowFile(path).append(each)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    number = text[: text.index(old)].count("\n") + 1
    with refused(ValueError, f"line {number} of", "layer", "step, layer"):
        run_files.read(path)


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    with refused(ValueError, "suffix", "run.txt", "'.csv'"):
        run_files.RowFile(tmp_path / "run.txt")
    with refused(ValueError, "cannot be written", "none", "a folder that"):
        run_files.RowFile(tmp_path / "none" / "run.csv")
    other = tmp_path / "other.csv"
    other.write_text("time,loss\n1,2\n")
    with refused(ValueError, "other columns", "time, loss", "step, layer"):
        run_files.RowFile(other)
    assert other.read_text() == "time,loss\n1,2\n"


@pytest.mark.full
def test_a_run_takes_less_than_a_megabyte():
    """100 layers and 10,000 steps, of which it samples each 50th."""
    operands = [
        (f"model/block_{n}/dense_{n}", "kernel", operand)
        for n in range(100)
        for operand in ("inputs", "kernel", "outputs_grad")
    ]
    sample = {key: Measured(figures(), 1, "") for key in operands}
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    found = Samples()
    for step in range(1, 10_001, 50):
        found.add(step, sample, {})
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 100_000 < taken < 1_000_000
    assert len({row["step"] for row in found.history()}) > 32


# The command


def test_the_report_prints_a_table_and_writes_a_page(
    written, capsys, monkeypatch
):
    path, _ = written
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["report", str(path.parent)]) == 0
    printed = capsys.readouterr().out
    assert "2 operands of float8 layers at step 9; 3 samples." in printed
    assert printed.index("up") < printed.index("down")  # the lower SQNR
    for word in ("frozen, 2 uses", "did not call it", "run.html"):
        assert word in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80
    page = path.with_suffix(".html").read_text("utf-8")
    assert page.count("<polyline") == 4 and "http" not in page
    assert "exists" in error_of(capsys, "report", str(path))
    assert cli.main(["report", str(path), "--force", "--full"]) == 0


def test_what_left_no_run_is_refused_in_one_line(tmp_path, capsys):
    assert "no file" in error_of(capsys, "report", str(tmp_path / "run.csv"))
    assert "none" in error_of(capsys, "report", str(tmp_path))
    (tmp_path / "run.jsonl").write_text("")
    assert "no sample" in error_of(capsys, "report", str(tmp_path))
    (tmp_path / "run.jsonl").write_bytes(b"\xff\n")
    assert "no text" in error_of(capsys, "report", str(tmp_path))
    assert ".html" in error_of(capsys, "doctor", "--page", "doctor.txt")


def test_doctor_and_the_run_share_the_look_of_their_pages(tmp_path, capsys):
    path = tmp_path / "doctor.html"
    arguments = ["doctor", "--device", "h100", "--page", str(path)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.endswith(f"written: {path}\n")
    page = path.read_text("utf-8")
    style = page[page.index("<style>") : page.index("</style>")]
    assert style in RunReport(of_steps(1)[0]).page()
    assert "<h1>Float8 on h100</h1>" in page and page.count("<table>") == 4


def test_a_page_escapes_names():
    found = Samples()
    key = "<script>", "kernel", "inputs"
    found.add(1, {key: Measured(figures(), 1, "")}, {"<b>": "<i>"})
    page = RunReport(found).page()
    assert "<script" not in page and "<b>" not in page and "<i>" not in page
