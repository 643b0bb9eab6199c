"""One suite for every backend; KERAS_BACKEND says which one runs it."""

import gc
import importlib.metadata
import importlib.util
import os
import re
import sys

import pytest

BACKENDS = ("jax", "torch", "tensorflow")

if "KERAS_BACKEND" not in os.environ:
    for _name in BACKENDS:
        if importlib.util.find_spec(_name):
            os.environ["KERAS_BACKEND"] = _name
            break

try:
    import hypothesis
except ImportError:  # a single test file can be run without it
    pass
else:
    # Tracing and compilation make the first example slow: no deadline. Runs
    # are reproducible; `--hypothesis-seed=random` explores.
    hypothesis.settings.register_profile(
        "default", deadline=None, derandomize=True, database=None
    )
    hypothesis.settings.load_profile("default")


def visible_gpus():
    """Number of GPUs that the backend in use can see."""
    backend = os.environ["KERAS_BACKEND"]
    if backend == "torch":
        import torch

        return torch.cuda.device_count()
    if backend == "jax":
        import jax

        return sum(d.platform == "gpu" for d in jax.devices())
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def pytest_report_header(config):
    # A module may come from a distribution of another name: keras-nightly.
    distributions = importlib.metadata.packages_distributions()
    versions = [
        f"{distribution} {importlib.metadata.version(distribution)}"
        for name in ("keras", *BACKENDS, "numpy", "ml_dtypes")
        for distribution in sorted(set(distributions.get(name, ())))
    ]
    return [
        f"backend: {os.environ.get('KERAS_BACKEND')}",
        f"versions: {', '.join(versions)}",
    ]


# First, since `-m` goes by the marks that a test has by then.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    mark_all_except_named_cases(config, items)
    skip_without_extensions(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not visible_gpus():
        reason = f"no GPU that {os.environ['KERAS_BACKEND']} can see"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def is_core_alone():
    """Whether the package has no extensions but the judge."""
    there = importlib.util.find_spec("keras_policy_ext.ext")
    # No origin: a folder without its `__init__.py`.
    return not (there and there.origin)


def pytest_ignore_collect(collection_path):
    """Leave out files that import an extension, in the core alone."""
    if collection_path.suffix == ".py" and is_core_alone():
        text = collection_path.read_text(encoding="utf-8")
        homes = re.findall(r"^from keras_policy_ext\.ext\.(\w+)", text, re.M)
        if set(homes) - {"reference"}:
            return True
    return None


ASKS_FOR_AN_EXTENSION = re.compile(
    r"without `keras_policy_ext\.ext`"
    r"|No module named 'keras_policy_ext\.ext\."
    r"|'(delayed|nvfp4)\b[^']*' is not a recipe"
    r"|cannot import name '\w+' from 'keras_policy_ext\.(recipes|numerics)'"
)
WITHOUT_IT = "Skipped: it asks for an extension, such as delayed scaling"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skip a file that asks for an extension, in the core alone."""
    report = yield
    asked = report.failed and ASKS_FOR_AN_EXTENSION.search(str(report.longrepr))
    if asked and is_core_alone():
        report.outcome = "skipped"
        report.longrepr = str(collector.path), 0, WITHOUT_IT
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip a test that asks for an extension, in the core alone."""
    report = yield
    asked = call.excinfo and ASKS_FOR_AN_EXTENSION.search(
        str(call.excinfo.getrepr())
    )
    if asked and report.failed and is_core_alone():
        report.outcome = "skipped"
        path, line, _ = item.location
        report.longrepr = path, line, WITHOUT_IT
    return report


def skip_without_extensions(items):
    """Skip tests of the core that also use an extension, in the core alone."""
    if not is_core_alone():
        return
    for item in items:
        for mark in item.iter_markers("extension"):
            reason = f"needs {', '.join(mark.args)} of keras_policy_ext.ext"
            item.add_marker(pytest.mark.skip(reason=reason))


def mark_all_except_named_cases(config, items):
    """Mark cases `full` or otherwise, unless their test names them.

    `full_except`, `nightly_except` and `any_backend_except` mark the others
    `full`, `nightly` and `any_backend`. `slow_except` marks the others `slow`
    where they are compiled, on JAX and TensorFlow; those that `full_except`
    names are not.

    Raises:
        pytest.UsageError: Of whole files, no case has a name that is given.
    """
    absent = {}
    is_compiled = os.environ["KERAS_BACKEND"] != "torch"
    for item in items:
        case = item.callspec.id if hasattr(item, "callspec") else ""
        quick = item.get_closest_marker("full_except")
        compiled = item.get_closest_marker("slow_except")
        kept = [name for m in (quick, compiled) if m for name in m.args]
        if compiled and is_compiled and case not in kept:
            item.add_marker(pytest.mark.slow)
        named = set(kept)
        for mark in ("full", "nightly", "any_backend"):
            other = item.get_closest_marker(f"{mark}_except")
            if other and case not in other.args:
                item.add_marker(mark)
            named.update(other.args if other else ())
        if named:
            test = item.nodeid.removesuffix(f"[{case}]")
            absent.setdefault(test, named).discard(case)
    of_whole_files = not any("::" in argument for argument in config.args)
    for test, names in absent.items():
        if names and of_whole_files:
            raise pytest.UsageError(
                f"A mark such as full_except names cases that are not there. "
                f"Received: {sorted(names)} in {test}. "
                f"Allowed: ids that `pytest --collect-only` lists."
            )


def pytest_collection_finish(session):
    """What is imported by now stays: see `pass_over_what_lives`."""
    pass_over_what_lives()


def pass_over_what_lives():
    """Let collections of garbage look only at what is made from now on.

    Keras collects whenever a session is cleared or a layer is quantized, and
    a framework is up to a million objects: a fifth of the time of a run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def global_dtype_policy_is_restored():
    """A test that sets the global policy cannot change the next test's."""
    before = global_policy_state()
    yield
    after = global_policy_state()
    if after != before:
        from keras.src.backend.common import global_state

        policy, floatx = before
        sys.modules["keras"].config.set_floatx(floatx)
        global_state.set_global_attribute("dtype_policy", policy)


def global_policy_state():
    """The policy that was set (None: never) and floatx."""
    if "keras" not in sys.modules:
        return None, "float32"
    from keras.src.backend.common import global_state

    return (
        global_state.get_global_attribute("dtype_policy"),
        sys.modules["keras"].config.floatx(),
    )


@pytest.fixture
def environment_is_restored(monkeypatch):
    """The command writes into the environment; the next test must not see."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture
def registry():
    """A recipe that a test defines is unknown to the next test."""
    from keras_policy_ext import recipes

    before = dict(recipes.REGISTRY)
    yield
    recipes.REGISTRY.clear()
    recipes.REGISTRY.update(before)


@pytest.fixture(autouse=True)
def random_numbers_are_seeded():
    """Every test sees the same random numbers, whatever ran before it."""
    import random

    import numpy as np

    random.seed(0)
    np.random.seed(0)
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(0)


def resident_bytes():
    """Resident memory of this process in bytes; infinity without /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return float("inf")


@pytest.fixture(autouse=True, scope="module")
def keras_session_ends_with_the_module():
    """Layer names start over in every test file, and memory is freed."""
    yield
    if "keras" in sys.modules:
        sys.modules["keras"].utils.clear_session(free_memory=False)
    if "jax" in sys.modules and resident_bytes() > 4e9:
        # The programs of a whole run are some gigabytes.
        sys.modules["jax"].clear_caches()
    pass_over_what_lives()
