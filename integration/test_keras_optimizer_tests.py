"""Keras's own tests of its optimizers pass with one-byte state."""

import pathlib
import re

import pytest

from processes import BACKENDS, is_installed, run

TESTS = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import keras, pytest

folder = pathlib.Path(keras.__file__).parent / "src" / "optimizers"
files = sorted(map(str, folder.glob("*_test.py")))
if not files:
    print("no tests in this build of Keras")
    sys.exit(0)
options = ["-q", "-p", "no:cacheprovider", "-p", "keras_tests_in_one_byte"]
# Keras may be installed below a folder with a configuration, such as this one.
config = pathlib.Path(sys.argv[2], "pytest.ini")
config.write_text("[pytest]")
options += ["-W", "ignore", "--tb=short", "-c", str(config)]
options += [f"--rootdir={sys.argv[2]}"]
code = pytest.main([*options, *files])
sys.exit(0 if code in (0, 1) else code)
"""


PLUGIN = pathlib.Path(__file__).parent / "keras_optimizers"


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(each, marks=() if each == "torch" else pytest.mark.slow)
        for each in BACKENDS
    ],
)
def test_keras_tests_pass_with_one_byte_state(backend, tmp_path):
    if not is_installed(backend):
        pytest.skip(f"{backend} is not installed")
    printed = run(backend, TESTS, PLUGIN, tmp_path)
    if printed.startswith("no tests"):
        pytest.skip(printed.strip())
    assert " failed" not in printed, printed
    counted = {
        what: int(count)
        for count, what in re.findall(r"(\d+) (passed|in one byte)", printed)
    }
    assert counted["passed"] > 150 and counted["in one byte"] > 80, printed
