"""The command `keras-policy-ext`, on the backend that is loaded.

The module `keras_policy_ext_cli` chooses the backend before.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import keras

from keras_policy_ext import recipes
from keras_policy_ext._version import __version__
from keras_policy_ext.backends.devices import KNOWN
from keras_policy_ext.export import FORMATS, export
from keras_policy_ext.ext import demo, output_files
from keras_policy_ext.ext.gain.products import device_named
from keras_policy_ext.reports import BaseReport
from keras_policy_ext.stored_kernels import GRANULARITIES, WEIGHTS
from keras_policy_ext_cli import BACKENDS, wrapped

_BENCH = """\
Measure here how fast a training step of one Dense layer is in float8. The
layer has as many inputs as outputs, in mixed_bfloat16, and SGD updates it.
Steps with and without float8 are timed in turn. `keras_policy_ext.bench`
measures a model of yours.
"""

_DEMO = """\
Train a small transformer for next-character prediction three times, in
float32, mixed_bfloat16 and float8, from the same weights on the same batches;
with --compare in float8 under every recipe. Prints a table of the validation
losses, and writes a plot of them.
"""

_DOCTOR = """\
Say whether training in float8 is faster here, which backend, versions and
device are in use, which contractions run natively in float8 or are emulated,
and why, and from which size on float8 gains. With --device for another device.
"""

_EXPORT = """\
Write the model of a .keras file with float8 kernels, one byte a number, for a
reader without Keras: vLLM, transformers, onnxruntime. Kernels that are frozen
are written with the bytes that they have, others are quantized. Code in the
file is not run.
"""

_INSPECT = """\
Load a .keras file and print which share of the model is in float8, and for
the layers of each class their policy and whether they run natively in float8
or are emulated; with --full for each layer, with its amaxes and scales. Code
in the file is not run.
"""

_MEMORY = """\
Load a .keras file and print what a training step of the model keeps in memory,
for the layers of each class, as it is and under the policies that are asked
for; with --full for each layer. Nothing is trained, and code in the file is
not run.
"""

_MIGRATE = """\
Write a .keras file of Keras 3 from a .h5 or .keras file of tf_keras (Keras 2):
the model, its weights, and how it was compiled. The input is only read, and
code in it is not run.
"""

_REPLAY = """\
Take the steps of a recording again, which keras_policy_ext.record or the
callback FlightRecorder wrote when a loss was not finite or jumped. Say in which
layer and operand it began, and which recipes would have survived. --backend
chooses the framework, which may be another one. Code in the file is not run;
modules of --import are.
"""

_REPORT = """\
Make a page with figures and plots of what a training run left: the .jsonl or
.csv file that keras_policy_ext.watch or the callback Float8Monitor wrote by
`path=`. Print the last figures, the lowest SQNR first; with --full of each
operand. The page is one file that needs no network.
"""

_SHRINK = """\
Write a .keras file with float8 kernels, one byte a number, of a .keras file:
load, freeze, save. It loads with keras_policy_ext.load_model. Kernels take a
quarter of the bytes of float32, and the optimizer is left out. The input is
only read, and code in it is not run.
"""


class _Parser(argparse.ArgumentParser):
    """An argparse parser that prints errors in one line, without the usage.

    In a terminal the line is wrapped at blanks.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, wrapped(f"{self.prog}: error: {message}") + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `keras-policy-ext`; return the exit status.

    Args:
        argv: The arguments; None for those of the process.

    Returns:
        The exit status: 0, or 130 after an interrupt.

    Raises:
        SystemExit: With status 2 and one line on stderr, if an argument is
            wrong or the machine does not support the request; with 0 after
            `--help` and `--version`.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "prepare"):
        parser.error(
            "a command is missing. `keras-policy-ext --help` lists them."
        )
    try:
        _check_backend(getattr(arguments, "backend", None))
        run = arguments.prepare(vars(arguments))
    except ValueError as error:
        arguments.parser.error(str(error))
    try:
        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _check_backend(asked: str | None) -> None:
    running = keras.backend.backend()
    if asked not in (None, running):
        raise ValueError(
            f"Keras already runs on {running!r} in this process; start "
            f"another one for {asked!r}"
        )


Given = Mapping[str, Any]
"""The arguments of a command by name; those that were not given are absent."""


class _Command(NamedTuple):
    """A subcommand.

    `prepare` checks the arguments and returns what runs the command. It raises
    a ValueError if something is wrong.
    """

    prepare: Callable[[Given], Callable[[], object]]
    description: str
    help: str
    options: Sequence[_Option | list[_Option]]  # a list: only one of them


class _Option(NamedTuple):
    """The arguments of argparse's `add_argument`."""

    names: Sequence[str]
    settings: Mapping[str, Any]

    def add(self, add_argument: Callable[..., object]) -> None:
        # A default of its own is one that the help names.
        settings = {"default": argparse.SUPPRESS, **self.settings}
        add_argument(*self.names, **settings)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="keras-policy-ext",
        description="Float8 dtype policies for Keras 3.",
        epilog="`keras-policy-ext COMMAND --help` tells the options of each.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {__version__}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _commands():
        each = commands.add_parser(
            command.prepare.__name__.removeprefix("_"),
            help=command.help,
            description=command.description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        each.set_defaults(parser=each, prepare=command.prepare)
        for option in (_backend(), *command.options):
            if isinstance(option, list):
                group = each.add_mutually_exclusive_group()
                for one in option:
                    one.add(group.add_argument)
            else:
                option.add(each.add_argument)
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers of at least `least`. For `type=`."""

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"an integer of {least} or more is needed, not {text!r}"
            )
        return int(text)

    return integer


def _recipe(text: str) -> str:
    """Return the text of a recipe; raise if it cannot train. For `type=`."""
    try:
        recipe = recipes.parse(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not recipe.trains:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a recipe to train with. Allowed: "
            f"{', '.join(recipes.names())}"
        )
    return text


def _device(text: str) -> str:
    """Return a device name; raise if it is unknown. For `type=` of argparse."""
    try:
        device_named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _sizes(text: str) -> int | tuple[int, ...]:
    """Parse "256" to 256 and "256,128" to a tuple. For `type=` of argparse."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size. Allowed: a size such as 256, or several "
            "such as 256,128."
        )
    first, *rest = map(int, text.split(","))
    return (first, *rest) if rest else first


def _bench(given: Given) -> Callable[[], object]:
    from keras_policy_ext.ext.bench import bench

    sizes = given.get("size", bench.usual_sizes())
    rows, chosen = (
        given.get("rows"),
        given.get("recipe", ["current", "delayed"]),
    )

    def run() -> None:
        for size in sizes:
            report = bench.bench_dense(
                size, rows or size, chosen, given["rounds"], "compile" in given
            )
            print(f"Dense {size} × {size}, {rows or size} rows")
            print(report.table(full=True))

    return run


def _demo(given: Given) -> Callable[[], object]:
    every = "compare" in given
    settings = demo.Settings(
        steps=given["steps"],
        seed=given["seed"],
        recipes=recipes.names() if every else (given["recipe"],),
        text=given.get("text"),
        out=given["out"],
    )
    return demo.prepare(settings)


def _doctor(given: Given) -> Callable[[], object]:
    from keras_policy_ext.ext.inspect import doctor

    device = given.get("device")
    output = _page(given)
    title = f"Float8 on {device or 'this machine'}"
    return lambda: _show(doctor.report(device), title, output, every="")


def _export(given: Given) -> Callable[[], object]:
    options: dict[str, Any] = {
        name: value
        for name in ("granularity", "weights", "activations", "exclude")
        if (value := given.get(name)) is not None
    }
    if options.get("activations") == "none":
        options["activations"] = None
    try:
        report = export(
            _loaded(given["file"]),
            given["output"],
            given["format"],
            max_shard_size=given["max_shard_size"],
            overwrite=given["force"],
            **options,
        )
    except (ImportError, OSError, TypeError) as error:
        raise ValueError(str(error)) from error
    return lambda: print(report)


def _inspect(given: Given) -> Callable[[], object]:
    from keras_policy_ext.ext.inspect.inspection import inspect

    full = "full" in given
    output = _page(given)
    model = _loaded(given["file"])
    title = pathlib.Path(given["file"]).name
    return lambda: _show(inspect(model), title, output, full)


def _loaded(path: str) -> keras.Model:
    from keras_policy_ext.saving import load_model

    try:
        return load_model(path, compile=False)
    except (OSError, TypeError) as error:
        raise ValueError(f"cannot load {path}: {error}") from error


def _memory(given: Given) -> Callable[[], object]:
    from keras_policy_ext.ext.memory.step_memory import memory

    output = _page(given)
    model = _loaded(given["file"])
    policy = given.get("policy")
    try:
        report = memory(model, given["batch"], policy)
    except TypeError as error:
        raise ValueError(str(error)) from error
    full = "full" in given
    title = f"Memory of {pathlib.Path(given['file']).name}"
    return lambda: _show(report, title, output, full)


def _migrate(given: Given) -> Callable[[], object]:
    from keras_policy_ext.ext.migration import command

    return command.prepare(
        given["input"],
        given["output"],
        on_loss_scale=given["on_loss_scale"],
        force=given["force"],
    ).run


def _page(
    given: Given, usual: pathlib.Path | None = None
) -> pathlib.Path | None:
    """Return the path of the page, checked; None if there will be none."""
    asked = given.get("page", usual)
    if asked is None:
        return None
    output, force = pathlib.Path(asked), given.get("force", False)
    output_files.check_output(None, output, force, ".html")
    return output


def _show(
    report: BaseReport,
    title: str,
    output: pathlib.Path | None,
    full: bool = False,
    every: str = "Every layer: --full",
) -> None:
    """Print a report, and write it to a page if there is a path for it."""
    from keras_policy_ext.ext.sampling.page import page

    print(report.table(full, every))
    if output is not None:
        text = page(title, report.html(full=True))
        with output_files.whole(output) as part:
            part.write_text(text, encoding="utf-8")
        print(f"written: {output}")


def _replay(given: Given) -> Callable[[], object]:
    from keras_policy_ext.ext.replay.replay import replay

    output = _page(given)
    modules = given.get("modules", [])
    if modules:
        sys.path.insert(0, str(pathlib.Path.cwd()))
    try:
        for name in modules:
            importlib.import_module(name)
        report = replay(
            given["file"],
            steps=given["steps"],
            recipes=given.get("recipe"),
        )
    except (ImportError, OSError) as error:
        raise ValueError(f"cannot replay {given['file']}: {error}") from error
    except TypeError as error:
        raise ValueError(
            f"cannot load the model of {given['file']}: {error} Classes of "
            "your own need --import MODULE."
        ) from error
    title = f"Replay of {pathlib.Path(given['file']).name}"
    full = "full" in given
    return lambda: _show(report, title, output, full, "Every step: --full")


def _report(given: Given) -> Callable[[], object]:
    from keras_policy_ext.ext.watch import run_files
    from keras_policy_ext.ext.watch.run_report import TITLE, RunReport

    file, samples, runs = run_files.read(given["run"])
    output = _page(given, file.with_suffix(".html"))
    found, full = RunReport(samples), "full" in given

    def show() -> None:
        if runs > 1:
            print(f"{file} has {runs} runs; this is the last one.")
        _show(found, TITLE, output, full, "Every operand: --full")

    return show


def _shrink(given: Given) -> Callable[[], object]:
    from keras_policy_ext.ext.cli import shrinking

    activations = given["activations"]
    return shrinking.prepare(
        given["input"],
        given["output"],
        given["force"],
        granularity=given.get("granularity"),
        activations=None if activations == "none" else activations,
        weights=given.get("weights"),
    ).run


def _option(name: str, metavar: str, help: str, **settings: Any) -> _Option:
    return _Option((name,), {"metavar": metavar, "help": help, **settings})


def _flag(name: str, help: str, *names: str, **settings: Any) -> _Option:
    settings = {"action": "store_true", "help": help, **settings}
    return _Option((name, *names), settings)


def _choice(
    name: str, choices: Sequence[str], help: str, **settings: Any
) -> _Option:
    return _Option((name,), {"choices": choices, "help": help, **settings})


def _repeated(name: str, metavar: str, help: str, **settings: Any) -> _Option:
    return _option(name, metavar, help, action="append", **settings)


def _page_options(without: str = "without it, none") -> tuple[_Option, ...]:
    what = f"the .html file to write the report to, in full; {without}"
    force = "overwrite that file if it exists"
    return _option("--page", "FILE", what), _flag("--force", force)


def _backend() -> _Option:
    return _choice(
        "--backend",
        sorted(BACKENDS),
        "framework; without it KERAS_BACKEND, and where that is not set, the "
        f"first installed of {', '.join(BACKENDS)}",
    )


_FILE = _option("file", "FILE", "a .keras file")
_OUTPUT = _option("output", "OUT", "the .keras file to write")
_ACTIVATIONS = ("none", "dynamic", "static")
_GRANULARITIES, _WEIGHTS = ", ".join(GRANULARITIES), ", ".join(WEIGHTS)
_AS_FROZEN = "without it, what the file has, or the format mostly has"
_AS_TRAINED = "Without it, what a kernel was trained for; else"
_OVERWRITES = "overwrite OUT if it exists"


def _commands() -> tuple[_Command, ...]:
    """Return all commands; the help lists them in this order."""
    # A table: a line or two for each option.
    # fmt: off
    return (
        _Command(_bench, _BENCH,
                 "measure whether a layer is faster in float8 here", (
            _repeated("--size", "N", "inputs and outputs of the layer; may be "
                      "given again. Without it, 4096 and 8192, on a CPU 1024",
                      type=_at_least(1)),
            _option("--rows", "N", "examples in a batch; without it, as many "
                    "as inputs", type=_at_least(1)),
            _repeated("--recipe", "SPEC", "a recipe to measure; may be given "
                      "again. Without it, current and delayed", type=_recipe),
            _option("--rounds", "N", "times that each is measured",
                    type=_at_least(1), default=20),
            _flag("--compile", "on PyTorch compile the steps, and print how "
                  "many graphs they are"),
        )),
        _Command(_demo, _DEMO,
                 "train in float32, bfloat16 and float8 and compare", (
            _option("--text", "FILE", "UTF-8 text to learn from; without it "
                    "the topics of Python's own pydoc"),
            _option("--steps", "N", "training steps in each precision",
                    type=_at_least(1), default=demo.Settings().steps),
            _option("--seed", "N", "of the weights and the batches",
                    type=_at_least(0), default=0),
            [
                _option("--recipe", "SPEC", "how numbers are scaled: "
                        f"{', '.join(recipes.names())}, or one with arguments, "
                        "such as 'nvfp4(hadamard=False)'",
                        type=_recipe, default=recipes.DEFAULT),
                _flag("--compare", "train under every recipe"),
            ],
            _option("--out", "DIR", "folder for the plot; made if missing",
                    default=demo.Settings().out),
        )),
        _Command(_doctor, _DOCTOR,
                 "whether float8 is faster on this machine, and why", (
            _option("--device", "NAME", "what would run on one that is "
                    "elsewhere, such as h100, rtx4090, mi300x or v5p; or a "
                    f"kind of devices: {', '.join(KNOWN)}",
                    type=_device),
            *_page_options(),
        )),
        _Command(_export, _EXPORT,
                 "write a saved model with float8 kernels for other readers", (
            _FILE,
            _option("output", "OUT", "the folder or file to write"),
            _option("--format", "FORMAT", "what the reader takes: "
                    f"{', '.join(FORMATS)}",
                    choices=FORMATS, default="compressed-tensors"),
            _choice("--granularity", GRANULARITIES, metavar="PART",
                    help=f"what has a scale, {_GRANULARITIES}; {_AS_FROZEN}"),
            _choice("--weights", WEIGHTS, metavar="FORMAT",
                    help=f"of the numbers, {_WEIGHTS}; {_AS_FROZEN}"),
            _choice("--activations", _ACTIVATIONS,
                    f"how inputs are quantized; {_AS_FROZEN}"),
            _repeated("--exclude", "PATTERN", "layers to leave in floats, as a "
                      "regular expression of their paths; may be given again"),
            _option("--max-shard-size", "SIZE", "of one file", default="5GB"),
            _flag("--force", "replace an earlier export", default=False),
        )),
        _Command(_inspect, _INSPECT,
                 "what each layer of a saved model computes in", (
            _FILE,
            _flag("--full",
                  "every layer with weights, with its amaxes and scales"),
            *_page_options(),
        )),
        _Command(_memory, _MEMORY,
                 "what a training step of a saved model keeps", (
            _FILE,
            _option("--batch", "SIZES", "of a batch, such as 256; or all of "
                    "its sizes, such as 256,128, where the model does not know "
                    "the others", type=_sizes, required=True),
            _repeated("--policy", "POLICY", "to compare with: a float8 policy "
                      "or recipe, or a plain policy; may be given again. "
                      "Without it, float8 with current scaling, and for a "
                      "model in float8 what it would be without"),
            _flag("--full", "every layer"),
            *_page_options(),
        )),
        _Command(_migrate, _MIGRATE,
                 "make a Keras 3 file of one that tf_keras wrote", (
            _option("input", "IN", "a .h5 or .keras file"),
            _OUTPUT,
            _choice("--on-loss-scale", ["drop", "keep", "error"],
                    "with keep, loading OUT needs keras_policy_ext",
                    default="drop"),
            _flag("--force", _OVERWRITES, default=False),
        )),
        _Command(_replay, _REPLAY,
                 "say where a bad step of training began", (
            _option("file", "FILE", "the .zip file"),
            _option("--steps", "N", "the last steps to judge, and to take "
                    "under each recipe", type=int, default=10),
            _repeated("--recipe", "SPEC",
                      "a recipe to try; may be given again. Without it, all"),
            _repeated("--import", "MODULE", "a module that registers classes "
                      "of the model; may be given again", dest="modules"),
            _flag("--full", "every step"),
            *_page_options(),
        )),
        _Command(_report, _REPORT,
                 "make a page of what a training run left", (
            _option("run", "RUN", "the file, or a folder with one such file"),
            _flag("--full", "every operand"),
            *_page_options("without it, beside RUN with its name"),
        )),
        _Command(_shrink, _SHRINK,
                 "store the kernels of a saved model", (
            _option("input", "IN", "a .keras file"),
            _OUTPUT,
            _choice("--granularity", GRANULARITIES, metavar="PART",
                    help=f"what has a scale, {_GRANULARITIES}: an output, a "
                    "kernel, 128 by 128 of it, or so many that a matmul sums. "
                    f"{_AS_TRAINED} channel"),
            _choice("--activations", _ACTIVATIONS, "how inputs are quantized; "
                    "static needs a model that was trained or calibrated under "
                    "delayed scaling", default="none"),
            _choice("--weights", WEIGHTS, metavar="FORMAT",
                    help=f"of the numbers, {_WEIGHTS}. {_AS_TRAINED} "
                    "float8_e4m3fn"),
            _flag("--force", _OVERWRITES, "--overwrite", default=False),
        )),
    )
    # fmt: on
