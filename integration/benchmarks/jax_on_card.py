"""Training steps in float8 on the GPU of this machine, with JAX.

    python integration/benchmarks/jax_on_card.py [--limit 280] [--rows ...]
    python integration/benchmarks/jax_on_card.py --checks

Steps of a Dense layer, of an MLP, of a Llama block, and `fit` of a Llama of
KerasHub: each in float8 and in bfloat16, called in turn in one process, with
the flags that XLA has by default. A step is forward, backward and SGD. The
gradient of its outputs is twice their distance from a target, so that the
backward pass waits for the forward pass, as in training. Beside the wall-clock
time stand the time of the first step, with tracing and compiling, what the
compiled program calls, and the times of its kernels by JAX's profiler.

No row is started after `--limit` seconds, an error ends one row alone, and the
JSON file is written again after each. `--checks` compares numbers with the
reference in NumPy instead (`integration/gpu/step_checks.py`). `--on-cpu` runs
both with small sizes, to try the script.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.util
import json
import os
import pathlib
import sys
import time
import traceback
import warnings

START = time.perf_counter()
os.environ["KERAS_BACKEND"] = "jax"
# Models of `fit_on_card.py` live in processes of their own on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "--on-cpu" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
HERE = pathlib.Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "gpu"), str(HERE.parents[1])]

import fit_on_card  # noqa: E402
import jax  # noqa: E402
import keras  # noqa: E402
import measuring  # noqa: E402
import peers  # noqa: E402
import workloads  # noqa: E402
import xla_programs  # noqa: E402
from steps_of_layers import sgd  # noqa: E402

import keras_policy_ext as kpe  # noqa: E402

BASELINE = measuring.BASELINE
FLAX = "Flax Fp8DirectDotGeneralOp"
RECIPES = {
    "float8 delayed": "delayed",
    "float8 current": "current",
    "float8 rowwise": "rowwise",
}
ALL = (BASELINE, *RECIPES)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured in turn.

    Attributes:
        title: What a table calls it.
        shape: Of the inputs, and of the outputs.
        build: Returns the built model under the global policy.
        variants: The ways to compute it, in the order of their importance.
        given: Whether the gradient of the outputs is given, and does not
            follow from them.
    """

    title: str
    shape: tuple
    build: object
    variants: tuple
    given: bool = False


def cases(small):
    """All cases by name, in the order of their importance."""
    sizes = (32, 64, 16) if small else (4096, 8192, 2048)
    mlp = (32, 16, 48) if small else (8192, 4096, 14336)
    llama = (2, 8, 32, 48, 4, 2) if small else (2, 2048, 4096, 14336, 32, 8)
    mlp = workloads.MLP(*mlp, 1, "gelu")
    llama = workloads.Llama(*llama)

    def dense(size, variants, title="", given=False):
        build = functools.partial(workloads.dense, size)
        title = f"Dense {size}³{title}"
        return Case(title, (size, size), build, variants, given)

    others = (BASELINE, "float8 delayed", "stock float8", FLAX)
    title = ", its gradient given"
    return {
        "dense4096": dense(sizes[0], ALL),
        "mlp": Case(str(mlp), mlp.shape, mlp.model, ALL[:3]),
        "llama": Case(str(llama), llama.shape, llama.model, ALL[:3]),
        "others": dense(sizes[0], others, ", and others"),
        "dense8192": dense(sizes[1], ALL),
        "given": dense(sizes[0], ALL[:3], title, given=True),
        "dense2048": dense(sizes[2], ALL),
    }


FIT = "fit"


def rows_in_order(small):
    """The names of all rows."""
    first, second, third, *rest = cases(small)
    return [first, second, third, FIT, *rest]


# Programs


class Program:
    """A compiled training step with its state, which each call replaces.

    Args:
        step: Takes the parts of the state and the inputs and the target;
            returns outputs, the gradient of the inputs, and the new parts.
        state: A list of the parts, which are given away.
        data: The inputs and the target.

    Attributes:
        first_step_s: Seconds of tracing, compiling and one step.
        compile_s: Those of XLA among them.
        text: The compiled program.
        temporaries_mib: Memory that XLA plans for a step beyond its arguments.
    """

    def __init__(self, step, state, data):
        self.state, self.data = state, data
        donated = tuple(range(len(state)))
        start = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=donated).lower(*state, *data)
        traced = time.perf_counter()
        self.compiled = lowered.compile()
        self.compile_s = time.perf_counter() - traced
        measuring.finish(self())
        self.first_step_s = time.perf_counter() - start
        self.text = self.compiled.as_text()
        memory = self.compiled.memory_analysis()
        self.temporaries_mib = memory.temp_size_in_bytes / 2**20

    def __call__(self):
        y, x_grad, *self.state = self.compiled(*self.state, *self.data)
        return y, x_grad


def outputs_grad(y, target, given):
    """The gradient of the outputs, which is known only after them."""
    if given:
        return jax.lax.optimization_barrier((y, target.astype(y.dtype)))[1]
    return (y - target.astype(y.dtype)) * jax.numpy.asarray(2, y.dtype)


def keras_program(model, data, given):
    """The `Program` of a Keras model and SGD."""
    optimizer = sgd()
    optimizer.build(model.trainable_variables)

    def step(trainable, of_optimizer, others, x, target):
        def outputs(trainable, x):
            return model.stateless_call(trainable, others, x, training=True)

        y, backward, others = jax.vjp(outputs, trainable, x, has_aux=True)
        grads, x_grad = backward(outputs_grad(y, target, given))
        updated = optimizer.stateless_apply(of_optimizer, grads, trainable)
        return y, x_grad, *updated, others

    lists = (
        model.trainable_variables,
        optimizer.variables,
        model.non_trainable_variables,
    )
    # Copies, since the first step gives away what it is called with.
    state = [[jax.numpy.array(v.value) for v in each] for each in lists]
    return Program(step, state, data)


def flax_program(size, data, given):
    """The `Program` of Flax's Dense with its float8, and SGD."""
    kernel = workloads.normal((size, size), "float32", seed=2) / size**0.5
    layer = peers.Flax(kernel, *data)

    def step(variables, x, target):
        y, backward = jax.vjp(layer.dense.apply, variables, x)
        grads, x_grad = backward(outputs_grad(y, target, given))
        params = jax.tree.map(
            lambda w, g: w - peers.RATE * g,
            variables["params"],
            grads["params"],
        )
        state = {"params": params, layer.STATE: grads[layer.STATE]}
        return y, x_grad, state

    return Program(step, [layer.variables], data)


def program(case, variant, data):
    """The `Program` of a variant of a case, from the same random weights.

    Raises:
        ModuleNotFoundError: If Flax is asked for and is not installed.
    """
    if variant == FLAX:
        return flax_program(case.shape[-1], data, case.given)
    keras.utils.set_random_seed(0)
    with kpe.policy_scope("mixed_bfloat16"):
        model = case.build()
    if variant in RECIPES:
        kpe.convert(model, RECIPES[variant])
    elif variant == "stock float8":
        with warnings.catch_warnings(action="ignore"):  # of each other layer
            model.quantize("float8")
    return keras_program(model, data, case.given)


# Rows


class Run:
    """One run of the script: its clock, its rows, and its file.

    Args:
        asked: The parsed command line.

    Attributes:
        found: What the JSON file holds.
    """

    def __init__(self, asked):
        self.asked, self.kept, self.compiles = asked, {}, 0
        settings = {k: v for k, v in vars(asked).items() if k != "out"}
        self.found = {
            "benchmark": "jax_on_card",
            "environment": measuring.environment(),
            "settings": {
                **settings,
                "xla_flags": os.environ.get("XLA_FLAGS", ""),
            },
            "rows": [],
            "checks": [],
        }
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event, _, **__):
        self.compiles += event.endswith("backend_compile_duration")

    def left(self):
        """Seconds until the limit."""
        return self.asked.limit - (time.perf_counter() - START)

    def say(self, *words):
        """Print a line at once, with the time."""
        elapsed = time.perf_counter() - START
        print(f"[{elapsed:4.0f}s]", *words, flush=True)

    def add(self, part, row):
        """Add a row to a part of the file, and write it."""
        self.found[part].append(row)
        self.asked.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.found, indent=1, default=str) + "\n"
        self.asked.out.write_text(text, encoding="utf-8")

    def guarded(self, what, function, *args):
        """Call a function; say its error and return None if it has one."""
        try:
            return function(*args)
        except Exception as error:
            # The rows that follow say something without this one.
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{pathlib.Path(last.filename).name}:{last.lineno}"
            message = str(error).strip().replace("\n", " ")[:400]
            self.say(f"FAILED {what}: {type(error).__name__} {place} {message}")
            self.add(
                "rows", {"case": what, "error": f"{type(error)}: {message}"}
            )
            return None

    def programs(self, name, case):
        """The programs of a case, as far as time allows, by variant."""
        data = self.kept.get((name, "data"))
        if data is None:
            data = tuple(
                workloads.normal(case.shape, seed=seed) for seed in (0, 1)
            )
        made = {}
        for variant in case.variants:
            what = f"{case.title}, {variant}"
            known = self.kept.get((case.shape, case.given, variant))
            if known is not None:
                made[variant] = known
                continue
            if self.left() < 0:
                self.say(f"left out, as the time is over: {what}")
                continue
            if variant == FLAX and importlib.util.find_spec("flax") is None:
                self.say(f"left out, as Flax is not installed: {what}")
                continue
            one = self.guarded(what, program, case, variant, data)
            if one is not None:
                made[variant] = one
                self.say(
                    f"{what}: first step {one.first_step_s:.1f} s, "
                    f"{one.compile_s:.1f} s of it XLA's"
                )
        return made

    def measure(self, name, case):
        """Compile, time and trace the variants of a case."""
        programs = self.programs(name, case)
        if name == "dense4096":  # for `others`
            for variant, one in programs.items():
                self.kept[case.shape, case.given, variant] = one
        before = self.compiles
        took = measuring.interleaved(programs, self.asked.rounds)
        if self.compiles > before:
            self.say(f"{self.compiles - before} compilations while timing")
        for variant, one in programs.items():
            self.tell(self.row(case, variant, one, took))

    def row(self, case, variant, one, took):
        """The row of a variant."""
        row = {
            "case": case.title,
            "variant": variant,
            "first_step_s": measuring.rounded(one.first_step_s),
            "compile_s": measuring.rounded(one.compile_s),
            "temporaries_mib": measuring.rounded(one.temporaries_mib),
            **measuring.spread(took, variant),
            **xla_programs.calls(one.text),
        }
        if self.asked.kernels and self.left() > 0:
            what = f"{case.title}, {variant}, kernels"
            row |= self.guarded(what, self.traced, one) or {}
        return row

    def traced(self, one):
        """The kernels of a program; see `xla_programs.kernels`."""
        return xla_programs.kernels(one, top=self.asked.kernels)

    def fit(self):
        """Rows of `fit` of a Llama of KerasHub; see `fit_on_card.py`."""
        for row in fit_on_card.rows(self.asked, self.say, self.left):
            self.tell(row)

    def tell(self, row):
        """Add a row, and print it with its kernels."""
        self.add("rows", row)
        self.say(_line(row))
        for each in row.get("kernels", ()):
            took = f"{each['us']:8.1f} µs ×{each['times']:<4g}"
            print("       ", took, each["name"][:80], flush=True)


def _line(row):
    """A row in a line."""
    median, low, high = (
        row[f"{k}_us"] for k in ("median", "lowest", "highest")
    )
    words = [
        f"{row['case']}, {row['variant']}: {median:g} µs ({low:g}–{high:g})"
    ]
    if "against_bfloat16" in row:
        middle, low, high = row["against_bfloat16"]
        words.append(f"speed {middle:.2f} ({low:.2f}–{high:.2f})")
    if "tokens_per_s" in row:
        words.append(f"{row['tokens_per_s']:g} tokens/s")
        words.append(f"peak {row['peak_mib'] or '–'} MiB")
    if "kernels_us" in row:
        words.append(f"kernels {row['kernels_us']:g} µs")
    if "float8_matmuls" in row:
        results = row["float8_results"]
        words += [
            f"float8 matmuls {row['float8_matmuls']} {results or ''}".strip(),
            f"Triton gemms {row['triton_gemms']}",
            f"conditionals {row['conditionals']}",
            f"{row['temporaries_mib']:g} MiB for a time",
        ]
    return "; ".join(words)


COLUMNS = (
    ("µs", "median_us"),
    ("speed", "against_bfloat16"),
    ("kernels µs", "kernels_us"),
    ("first step s", "first_step_s"),
    ("float8", "float8_matmuls"),
    ("Triton", "triton_gemms"),
    ("cond.", "conditionals"),
    ("tokens/s", "tokens_per_s"),
    ("peak MiB", "peak_mib"),
)


def table(rows):
    """The rows that were measured as lines of text, in short columns."""
    cells, case = [["", *(head for head, _ in COLUMNS)]], None
    measured = [row for row in rows if "median_us" in row]
    order = list(dict.fromkeys(row["case"] for row in measured))
    measured.sort(
        key=lambda r: (order.index(r["case"]), r["variant"] != BASELINE)
    )
    for row in measured:
        if row["case"] != case:
            case = row["case"]
            cells.append([case])
        values = [_cell(row.get(key)) for _, key in COLUMNS]
        cells.append([f"  {row['variant']}", *values])
    lines = [line for line in cells if len(line) > 1]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in cells:
        first, *others = line
        yield "  ".join(
            [first.ljust(widths[0]) if others else first]
            + [c.rjust(w) for c, w in zip(others, widths[1:], strict=False)]
        ).rstrip()


def _cell(value):
    """A value of a row in few characters."""
    if isinstance(value, list):
        return f"{value[0]:.2f}"
    return "" if value is None else f"{value:g}"


def check(run):
    """Run the checks, and say what each saw.

    Returns:
        The exit status: 1 if one does not hold.
    """
    import gpu_suite
    import step_checks

    wrong = 0
    for each in step_checks.ALL:
        if run.asked.only and each.__name__ not in run.asked.only:
            continue
        if run.left() < 0:
            run.say(f"left out, as the time is over: {each.__name__}")
            continue
        outcome = gpu_suite.outcome(each)
        wrong += outcome["verdict"] != "holds"
        run.add("checks", outcome)
        seen = outcome["seen"]
        lines = seen.items() if isinstance(seen, dict) else [(seen,)]
        run.say(
            f"{outcome['verdict']} ({outcome['seconds']} s): {outcome['claim']}"
        )
        for line in lines:
            print("       ", *line, flush=True)
    run.say(f"{len(run.found['checks'])} checks, {wrong} do not hold")
    return int(wrong > 0)


def arguments():
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = rows_in_order(small=False)
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(","),
        default=names,
        help=f"separated by commas, in this order: {','.join(names)}",
    )
    parser.add_argument("--limit", type=float, default=280, help="seconds")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--kernels", type=int, default=8, help="are named; 0: no profile"
    )
    parser.add_argument("--checks", action="store_true")
    parser.add_argument(
        "--only", nargs="+", metavar="CHECK", help="of --checks"
    )
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("jax_on_card.json")
    )
    fit_on_card.add_arguments(parser, small="--on-cpu" in sys.argv)
    asked = parser.parse_args()
    if wrong := set(asked.rows) - set(names):
        parser.error(f"Unknown rows: {sorted(wrong)}. Allowed: {names}.")
    return asked


def main():
    asked = arguments()
    if not (measuring.on_gpu() or asked.on_cpu):
        print(
            "No GPU that JAX can see. Received: "
            f"{measuring.device()}. Allowed: a machine with a GPU and "
            "jax[cuda13]. To try the script on a CPU: --on-cpu.",
            file=sys.stderr,
        )
        return 2
    run = Run(asked)
    where = run.found["environment"]
    run.say(where["device"], where["versions"])
    run.say(f"XLA_FLAGS: {os.environ.get('XLA_FLAGS', 'none, the defaults')}")
    if asked.checks:
        return check(run)
    known = cases(asked.on_cpu)
    for name in asked.rows:
        if run.left() < 0:
            run.say(f"left out, as the time is over: {name}")
        elif name == FIT:
            run.guarded(name, run.fit)
        else:
            run.guarded(name, run.measure, name, known[name])
        gc.collect()
    print(*table(run.found["rows"]), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
