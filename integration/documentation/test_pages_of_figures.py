"""Pages of figures as a browser shows them, on a telephone and on a desk."""

import math

import pytest

from keras_policy_ext.ext.inspect import doctor
from keras_policy_ext.ext.sampling.page import page
from keras_policy_ext.ext.sampling.samples import FIGURES, Measured, Samples
from keras_policy_ext.ext.watch.run_report import RunReport


def run():
    """A run of layers with long names, one of them without figures."""
    samples = Samples()
    layer = "model/decoder_block_with_a_long_name_0/feed_forward_up"
    for step in range(1, 30):
        figures = dict.fromkeys(FIGURES, 1.234567e-9 * step)
        figures |= {"sqnr_db": 30 + math.sin(step), "nonfinite": 3.0}
        measured = Measured([figures[n] for n in FIGURES], 12, "no gradient")
        operands = ("inputs", "kernel", "outputs_grad")
        found = {(layer, "kernel", each): measured for each in operands}
        samples.add(step, found, {f"{layer}_2": "the model did not call it"})
    return RunReport(samples).page()


PAGES = {
    "run": run,
    "doctor": lambda: page("doctor", doctor.report("h100").html(full=True)),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_asks_no_host(name, width, scheme, browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](), encoding="utf-8")
    size = {"width": width, "height": 800}
    view = browser.new_page(viewport=size, color_scheme=scheme)
    asked, said = [], []
    view.on("request", lambda request: asked.append(request.url))
    view.on("console", lambda message: said.append(message.text))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.goto(path.as_uri(), wait_until="load")
    wide = "document.scrollingElement.scrollWidth - window.innerWidth"
    assert view.evaluate(wide) <= 0
    assert asked == [path.as_uri()] and not said
    colours = view.evaluate(
        "['color', 'backgroundColor'].map("
        "name => getComputedStyle(document.querySelector('.figures tbody th')"
        " ?? document.body)[name])"
    )
    assert len(set(colours)) == 2
    if name == "run":  # the plot of the SQNR, without scrolling
        box = view.locator("svg").first.bounding_box()
        assert box["x"] + box["width"] <= width
    view.close()
