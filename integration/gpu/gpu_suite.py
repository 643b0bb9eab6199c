"""Says in ten minutes whether every promise holds on the GPU of this machine.

    tox run -e gpu-torch          (gpu-jax, gpu-tensorflow)

runs the checks of `device_checks.py` and short benchmarks, and writes what
it saw as JSON and as a page that can be sent in. The exit status is 0 if all
promises hold, 1 if one does not, and 2 if there is no GPU. `--on-cpu` runs
the same without one.
"""

import argparse
import json
import pathlib
import sys
import time
import traceback

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parent / "benchmarks"))

import device_checks  # noqa: E402
import device_report  # noqa: E402
import keras  # noqa: E402
import layer  # noqa: E402
import llama_block  # noqa: E402
import measuring  # noqa: E402
import promises  # noqa: E402
from workloads import Llama  # noqa: E402

INSTALL = {
    "jax": "pip install 'keras-policy-ext[jax-cuda]', which is jax[cuda12]",
    "tensorflow": "pip install 'keras-policy-ext[tensorflow-cuda]', which is "
    "tensorflow[and-cuda]",
    "torch": "pip install torch from an index that has its CUDA build, and "
    "not the one whose version ends in +cpu",
}


def no_gpu():
    """What to say where the backend sees no GPU."""
    backend = keras.backend.backend()
    versions = measuring.environment()["versions"]
    return (
        f"No GPU that {backend} can see. Received: {measuring.device()}, with "
        f"{backend} {versions[backend]}. Allowed: a machine on which "
        f"`nvidia-smi` lists a GPU, and a build of {backend} for it: "
        f"{INSTALL[backend]}. To run the checks on the CPU: --on-cpu."
    )


def outcome(check):
    """What became of a check, as a dict of JSON types."""
    start = time.perf_counter()
    try:
        verdict, seen = "holds", check()
    except promises.NotHere as reason:
        verdict, seen = "nothing to see", str(reason)
    except promises.Broken as reason:
        verdict, seen = "broken", str(reason)
    except Exception as error:
        # Whatever else happens is no reason to keep the rest from running.
        text = "".join(traceback.format_exception(error))
        verdict, seen = "error", text[-4000:]
    return {
        "check": check.__name__,
        "claim": check.__doc__.split("\n")[0],
        "verdict": verdict,
        "seen": seen,
        "seconds": round(time.perf_counter() - start, 1),
    }


def benchmarks(deadline):
    """Rows of short benchmarks, until the time is over."""
    sizes = (1024, 4096, 8192) if measuring.on_gpu() else (64,)
    llama = llama_block.ON_A_GPU if measuring.on_gpu() else (1, 8, 16, 32, 2, 1)
    compiled = measuring.on_gpu()
    parts = [
        *(lambda size=size: layer.matmul_rows(size, 5) for size in sizes),
        *(
            lambda size=size: layer.layer_rows(size, 5, compiled)
            for size in sizes
        ),
        lambda: llama_block.rows(Llama(*llama), 5, compiled),
    ]
    rows = []
    for part in parts:
        if time.monotonic() < deadline:
            rows += part()
    return rows


def run(checks=device_checks.ALL, minutes=10.0, with_benchmarks=True):
    """Run checks and benchmarks.

    Returns:
        What was seen, as a dict of JSON types.
    """
    deadline = time.monotonic() + 60 * minutes
    outcomes = []
    for check in checks:
        outcomes.append(outcome(check))
        last = outcomes[-1]
        print(f"{last['verdict']:>14}  {last['claim']}", flush=True)
    found = {"environment": measuring.environment(), "checks": outcomes}
    rows = []

    def measure():
        """Short benchmarks run to their end."""
        rows.extend(benchmarks(deadline))

    if with_benchmarks:
        measured = outcome(measure)
        if measured["verdict"] != "holds":
            found["benchmarks_ended"] = measured["seen"]
    return {**found, "benchmarks": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[each.__name__ for each in device_checks.ALL],
        metavar="CHECK",
        help="run these checks alone, and no benchmark: %(choices)s",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("gpu-report")
    )
    asked = parser.parse_args()
    if not measuring.on_gpu() and not asked.on_cpu:
        print(no_gpu(), file=sys.stderr)
        return 2
    checks = [
        each
        for each in device_checks.ALL
        if not asked.only or each.__name__ in asked.only
    ]
    found = run(checks, asked.minutes, with_benchmarks=not asked.only)
    asked.out.mkdir(parents=True, exist_ok=True)
    stem = asked.out / f"gpu_{keras.backend.backend()}"
    json_path, page_path = stem.with_suffix(".json"), stem.with_suffix(".md")
    json_path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    page_path.write_text(device_report.page(found), "utf-8")
    print(f"Written: {json_path} and {page_path}. Please send in both.")
    return 1 if device_report.broken(found) else 0


if __name__ == "__main__":
    sys.exit(main())
