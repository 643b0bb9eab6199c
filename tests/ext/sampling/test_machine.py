"""What `doctor` says of the machine."""

import importlib.metadata
import sys

import pytest

from keras_policy_ext.ext.sampling import machine


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package where Python looks first, as an installer does."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(package, distribution=None, version="1.2.3", files=None):
        folder = tmp_path / package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("raise ImportError('too heavy')")
        if distribution is None:
            return
        files = files or [f"{package}/__init__.py"]
        stem = distribution.replace("-", "_")
        info = tmp_path / f"{stem}-{version}.dist-info"
        info.mkdir()
        header = "Metadata-Version: 2.1\n"
        names = f"Name: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(header + names)
        record = [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"]
        (info / "RECORD").write_text("".join(f"{x},,\n" for x in record))

    return install


@pytest.mark.parametrize(
    ("distribution", "shown"),
    [
        ("framework_of_tests", "1.2.3"),
        ("framework-of-tests", "1.2.3"),
        ("framework-of-tests-cpu", "1.2.3 (framework-of-tests-cpu)"),
        ("nightly", "1.2.3 (nightly)"),
        (None, "installed, of unknown version"),
    ],
)
def test_a_package_is_found_under_any_name_of_its_distribution(
    distribution, shown, install
):
    install("framework_of_tests", distribution)
    assert machine.installed("framework_of_tests") == shown
    assert "framework_of_tests" not in sys.modules


def test_what_puts_something_into_a_package_is_not_taken_for_it(install):
    package = "framework_of_tests"
    install(package, "a-plugin", "0.1", [f"{package}/plugins/one.py"])
    install(package, "tests-cpu", "2.0")
    assert machine.installed(package) == "2.0 (tests-cpu)"


def test_what_is_missing_is_not_installed():
    assert machine.installed("framework_of_nobody") == "not installed"


def test_the_frameworks_here_have_their_versions():
    facts = machine.facts()
    backend = facts["backend"]
    names = importlib.metadata.packages_distributions()[backend]
    assert facts[backend].split()[0] in map(importlib.metadata.version, names)
