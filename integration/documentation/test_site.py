"""The site as a browser shows it, on a telephone and on a desk."""

import pathlib
import re
import urllib.parse

import griffe
import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
WIDTHS = (390, 1280)
SETTLING = 150  # milliseconds: scripts wrap tables and load what they need

# Of these modules everything public is on an API page.
DOCUMENTED = ("", "layers", "loops", "migration", "mixed_precision", "numerics")


def pages_of(site):
    return sorted(
        path.relative_to(site).as_posix() for path in site.rglob("*.html")
    )


class Visits:
    """Pages opened at one width, and what was wrong with them."""

    def __init__(self, browser, address, width):
        self.address = address
        self.page = browser.new_page(viewport={"width": width, "height": 800})
        self.problems = []
        self.page.on("console", self.on_console)
        self.page.on("pageerror", lambda error: self.note(str(error)))
        self.page.on("request", self.on_request)

    def note(self, problem):
        path = urllib.parse.urlsplit(self.page.url).path
        self.problems.append(f"{path}: {problem}")

    def on_console(self, message):
        if message.type == "error":
            self.note(message.text)

    def on_request(self, request):
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.note(f"asks for {request.url}")

    def open(self, path):
        self.page.goto(f"{self.address}/{path}", wait_until="load")
        self.page.wait_for_timeout(SETTLING)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways_or_fails_or_asks_another_host(
    browser, address, site, width
):
    visits = Visits(browser, address, width)
    pages = [page for page in pages_of(site) if page != "404.html"]
    assert len(pages) > 30
    for path in pages:
        visits.open(path)
        wide = visits.page.evaluate(
            "document.scrollingElement.scrollWidth - window.innerWidth"
        )
        if wide > 0:
            visits.note(f"{wide} pixels wider than {width}")
    visits.page.close()
    assert not visits.problems


def test_the_search_finds_a_function(browser, address):
    visits = Visits(browser, address, 1280)
    visits.open("index.html")
    visits.page.locator("input.md-search__input").click()
    visits.page.keyboard.type("calibrate")
    # Results are pages, with the sections that were found below them.
    links = visits.page.locator(".md-search-result__link")
    result = links.filter(has_text="calibrate").first
    result.wait_for(timeout=10_000)
    visits.page.close()
    assert not visits.problems


def test_dark_and_light_are_chosen_by_a_button(browser, address):
    visits = Visits(browser, address, 1280)
    visits.open("index.html")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    before = visits.page.evaluate(scheme)
    visits.page.locator("label[for^='__palette']:visible").click()
    assert {before, visits.page.evaluate(scheme)} == {"default", "slate"}
    visits.page.close()


def test_code_is_highlighted(site):
    text = (site / "index.html").read_text("utf-8")
    assert '<span class="kn">import</span>' in text


def menu():
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    return yaml.safe_load(text)["nav"]


def targets(entries):
    for entry in entries:
        (value,) = entry.values()
        yield from targets(value) if isinstance(value, list) else [value]


def test_the_menu_has_at_most_eight_entries_at_the_top():
    assert len(menu()) <= 8


def test_every_public_name_is_on_a_page_of_the_menu(site):
    pages = [page for page in targets(menu()) if page.startswith("api/")]
    text = "".join(
        (site / page).with_suffix(".html").read_text("utf-8") for page in pages
    )
    shown = set(re.findall(r'id="keras_policy_ext\.[\w.]*?(\w+)"', text))
    package = griffe.load("keras_policy_ext", search_paths=[str(ROOT)])
    modules = [package[name] if name else package for name in DOCUMENTED]
    assert not {
        f"{module.path}.{name}"
        for module in modules
        for name in module.exports
        if not module[name].is_module
        and not module[name].is_attribute
        and name not in shown
    }
