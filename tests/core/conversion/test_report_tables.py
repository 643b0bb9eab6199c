"""How a report looks: on one screen, in any width, and in a notebook."""

import html
import re

import keras
import pytest
from keras import layers

import keras_policy_ext as kpe
from keras_policy_ext import reports
from keras_policy_ext.conversion import (
    Converted,
    Report,
    Skipped,
)
from report_models import POLICY, WIDTHS, made_up, model_of_many_kinds

pytestmark = pytest.mark.any_backend


# One screen


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.extension("inspect")
def test_a_hundred_layers_fit_on_one_screen(large, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    model, report = large
    assert len(report.converted) + len(report.skipped) == 101
    for short in (str(report), str(kpe.inspect(model))):
        lines = short.splitlines()
        assert len(lines) <= reports.LINES
        assert max(map(len, lines)) <= max(width, 55)
    rows = report.table(full=True)
    assert all(
        entry.path in rows for entry in (*report.converted, *report.skipped)
    )


@pytest.fixture(scope="module")
def large():
    """As a convnet is built; `integration/` has known ones."""
    model = keras.Sequential([keras.Input((4, 4, 8))])
    for _ in range(25):
        model.add(layers.Conv2D(8, 1, use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.DepthwiseConv2D(3, padding="same"))
        model.add(layers.BatchNormalization())
    model.add(layers.Flatten())
    model.add(layers.Dense(10))
    return model, kpe.convert(model)


@pytest.mark.parametrize("width", WIDTHS)
def test_more_rows_than_fit_are_left_out_and_counted(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    report = made_up(classes=60)
    lines = str(report).splitlines()
    assert len(lines) <= reports.LINES
    # The largest are there.
    assert all(f"SomeLayer{n}" in str(report) for n in (58, 59))
    (number,) = re.findall(r"and (\d+) more, with", str(report))
    shown = sum("SomeLayer" in line for line in lines)
    assert int(number) + shown == 60
    assert report.table(full=True).count("/dense") == 240


def test_rows_in_float8_come_first_those_with_most_work_before_others():
    text = str(made_up(classes=4))
    assert re.findall(r"SomeLayer\d", text) == [
        f"SomeLayer{number}" for number in (2, 0, 3, 1)
    ]


def test_a_cell_that_is_too_long_ends_in_an_ellipsis():
    reason = "such a class has no form, " * 9
    table = reports.Table([reports.Column("why", wraps=True)], [[reason]])
    whole, cut = table.text(30), table.text(30, most=2)
    assert len(whole) > len(cut) == 4
    assert cut[:3] == whole[:3]
    assert cut[3].endswith("…") and len(cut[3]) <= 30
    assert whole[3].startswith(cut[3].rstrip("…"))


def test_reasons_that_differ_in_numbers_only_are_one_row(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = str(made_up(classes=2))
    (row,) = (line for line in text.splitlines() if "SomeLayer1" in line)
    assert row.split()[0] == "4"
    assert "– e.g. its kernel has 101 entries, fewer than 10000" in row


@pytest.mark.extension("recurrent")
def test_other_reasons_are_rows_of_their_own():
    model = model_of_many_kinds()
    report = kpe.convert(model, POLICY, exclude=["head"], min_size=90)
    reasons = [group[0].outcome for group in report.groups]
    assert len(reasons) == 4
    assert sum("`exclude`" in reason for reason in reasons) == 1
    assert sum("fewer than" in reason for reason in reasons) == 1


# Widths


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("full", [False, True])
def test_no_word_is_ever_cut(full, width, monkeypatch):
    report = made_up()
    monkeypatch.setenv("COLUMNS", "10000")
    whole = set(words(report.table(full=full)))
    monkeypatch.setenv("COLUMNS", str(width))
    text = report.table(full=full)
    assert {word.rstrip("…") for word in words(text)} <= whole | {"─" * 9}
    assert full or "…" in text or words(text) == words(text.replace("…", ""))


def words(text):
    """What stands between blanks, slashes and ends of lines; one rule.

    Names of policies are two words, the second that of the source policy.
    """
    text = re.sub("─+", "─" * 9, text)
    return [word for word in re.split(r"[\s/]+|(?<=_from_)", text) if word]


@pytest.mark.parametrize("name", ["Dense", "ReversibleEmbedding"])
def test_long_reasons_and_policies_stand_in_a_column(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    policy = "float8/rowwise_from_mixed_bfloat16"
    reason = "a long reason that says what it is of that layer, " * 3
    report = Report(
        (Converted("a", name, policy, multiplications=5),),
        (Skipped("b", name, reason, multiplications=5),),
    )
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    start = next(line for line in lines if "policy / reason" in line)
    column = start.index("policy")
    rows = [line for line in lines if name in line]
    assert [row[column:].split("_")[0] for row in rows] == [
        "float8/rowwise",
        rows[1][column:],
    ]
    assert rows[1][column:].startswith("– a long reason")


def test_a_column_that_is_too_narrow_goes_below_its_rows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = str(made_up())
    assert "\nlayers  class " in text
    assert "\n    policy / reason not converted\n───" in text
    assert text.count("\n    float8_from_mixed_bfloat16\n") == 2


@pytest.mark.parametrize("width", [60, 80, 132])
def test_paths_stand_on_one_line_where_one_is_long_enough(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    report = made_up()
    lines = report.table(full=True).splitlines()
    for entry in (*report.converted, *report.skipped):
        assert sum(entry.path in line for line in lines) == 1
    assert max(map(len, lines)) <= max(width, 67)


def test_long_paths_break_after_a_slash(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    lines = made_up().table(full=True).splitlines()
    start = lines.index("a_rather_long_model_name/")
    assert lines[start + 1] == "stage_0/block_number_0/dense"


def test_without_a_terminal_there_are_eighty_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    lines = str(made_up()).splitlines()
    assert 60 < max(map(len, lines)) <= 80


# Shells and notebooks


def a_model(name="model"):
    return keras.Sequential(
        [keras.Input((32,)), layers.Dense(32), layers.Dense(4)], name=name
    )


def all_reports(folder):
    """A report of each kind, of a model whose name is a tag."""
    model = a_model("a&lt<b>")
    reports = [
        kpe.convert(model),
        kpe.inspect(model),
        kpe.memory(model, 8),
        kpe.revert(model),
        kpe.revert(model),
        kpe.freeze(model),
        kpe.export(model, folder / "<i>.safetensors", "safetensors"),
        kpe.inspect(model),
        kpe.thaw(model),
    ]
    return reports


@pytest.mark.extension("inspect")
def test_in_a_shell_a_report_is_its_table(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for report in all_reports(tmp_path):
        assert repr(report) == str(report) == report.table()
        assert max(map(len, repr(report).splitlines())) <= 90


@pytest.mark.extension("inspect")
def test_in_a_notebook_every_report_is_html_that_is_escaped(tmp_path):
    for report in all_reports(tmp_path):
        page = report._repr_html_()
        tags = set(re.findall("<(/?[a-z]+)", page))
        assert {"p", "/p"} <= tags
        allowed = ("p", "table", "thead", "tbody", "tr", "th", "td")
        assert tags <= {f"{end}{tag}" for end in ("", "/") for tag in allowed}
        words = re.sub("<[^>]*>", " ", page)
        assert "<" not in words
        for line in str(report).splitlines()[:1]:
            assert line.split()[0] in html.unescape(words)


def test_reverting_what_is_not_in_float8_says_so():
    report = kpe.revert(a_model())
    assert str(report) == "No layer was in float8; there is nothing to revert"


@pytest.mark.parametrize("change", [None, kpe.convert], ids=["plain", "float8"])
def test_thawing_what_is_not_frozen_says_so(change):
    model = a_model()
    if change is not None:
        change(model)
    report = kpe.thaw(model)
    assert str(report) == "No layer was frozen; there is nothing to thaw"


def test_notebooks_get_a_table_in_which_everything_is_escaped():
    report = Report(
        (Converted("a", "<b>Dense</b>", "float8_from_float32"),),
        (Skipped("b", "Own", "<script> & 'so'", multiplications=5),),
    )
    page = report._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 1
    assert page.count("<tr>") == 3
    assert "&lt;b&gt;Dense&lt;/b&gt;" in page
    assert "&lt;script&gt; &amp; &#x27;so&#x27;" in page
    assert "<b>" not in page and "<script>" not in page


def test_names_do_not_steer_the_terminal():
    done = Converted("model/\x1b[2Jdense\n", "Dense", "float8_from_float32")
    left = Skipped("b", "Own", "`exclude`: '\x1b]0;x\x07'", multiplications=5)
    report = Report((done,), (left,))
    for text in (str(report), report.table(full=True)):
        assert "\x1b" not in text and "\x07" not in text


@pytest.mark.parametrize("width", [0, 1, 5, 12])
def test_a_terminal_may_be_too_narrow_for_anything(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for full in (False, True):
        assert "float8_from_" in made_up().table(full=full)


def test_names_are_no_markup_and_wide_signs_are_aligned(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = "a/[bold]x[/bold]:smile:"
    report = Report(
        (Converted(path, "Dense", "float8_from_float32", multiplications=5),),
        (Skipped("b", "層の名前", "because", multiplications=5),),
    )
    assert path in report.table(full=True)
    text = str(report)
    assert "\x1b" not in text
    first, second = (x for x in text.splitlines() if "50.0 %  " in x)
    # Each of the four signs takes two columns of the terminal.
    assert first.index("50.0 %") == second.index("50.0 %") + 4
