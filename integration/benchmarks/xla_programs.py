"""What a program of XLA calls on a GPU, and how long its kernels take."""

import collections
import pathlib
import re
import tempfile

import measuring

FLOAT8_MATMUL = "__cublas$lt$matmul$f8"


def calls(text):
    """What stands in the text of a compiled program.

    Args:
        text: As `as_text()` of a compiled function of JAX returns it.

    Returns:
        A dict: `float8_matmuls`, how many matmuls of cuBLASLt read float8;
        `float8_results`, how many of these write each dtype, such as
        `{"bf16": 3}`; `triton_gemms`, how many matmuls are Triton's;
        `conditionals`, how many branches the device takes; and
        `custom_calls`, how often each other library or kernel is called.
    """
    # A result stands alone, or in a tuple with the memory that it is given.
    results = re.findall(
        r"= \(?(\w+)\[[^\n]*custom_call_target=\"" + re.escape(FLOAT8_MATMUL),
        text,
    )
    targets = re.findall(r'custom_call_target="([^"]+)"', text)
    others = [each for each in targets if each != FLOAT8_MATMUL]
    return {
        "float8_matmuls": len(results),
        "float8_results": dict(collections.Counter(results)),
        "triton_gemms": len(re.findall(r"__triton(?:_nested)?_gemm", text)),
        "conditionals": text.count(" conditional("),
        "custom_calls": dict(collections.Counter(others)),
    }


def kernels(function, repeats=3, top=8, steps=1):
    """Trace some calls by JAX's profiler, and add up the times of kernels.

    Args:
        function: Takes steps and returns their results.
        repeats: How many calls are traced.
        top: How many kernels are named, those that take longest.
        steps: How many steps a call takes.

    Returns:
        A dict of one step: `kernels_us`, microseconds of all its kernels and
        copies; `kernel_count`; and `kernels`, a list of dicts with `name`,
        `times` and `us`. None if the trace has no GPU.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    measuring.finish(function())
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for _ in range(repeats):
                results = function()
            measuring.finish(results)
        finally:
            jax.profiler.stop_trace()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        found = _events(jax.profiler.ProfileData.from_file(str(path)))
    if not found:
        return None
    repeats *= steps
    longest = sorted(found.items(), key=lambda item: -item[1][1])
    times, nanoseconds = map(sum, zip(*found.values(), strict=True))
    return {
        "kernels_us": measuring.rounded(nanoseconds / repeats / 1e3),
        "kernel_count": measuring.rounded(times / repeats),
        "kernels": [
            {
                "name": name[:120],
                "times": measuring.rounded(count / repeats),
                "us": measuring.rounded(took / repeats / 1e3),
            }
            for name, (count, took) in longest[:top]
        ],
    }


def _events(profile):
    """How often each kernel of a GPU ran, and its nanoseconds, by name."""
    found = {}
    for plane in profile.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                count, took = found.get(event.name, (0, 0.0))
                found[event.name] = count + 1, took + event.duration_ns
    return found
