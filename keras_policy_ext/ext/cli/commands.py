"""The command `keras-policy-ext`, on the backend that is loaded.

The module `keras_policy_ext_cli` chooses the backend before.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras

from keras_policy_ext import _output_files, stored_kernels
from keras_policy_ext._version import __version__
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.devices import KNOWN
from keras_policy_ext.export import FORMATS, export
from keras_policy_ext.ext import demo
from keras_policy_ext.reports import BaseReport
from keras_policy_ext.stored_kernels import GRANULARITIES, WEIGHTS
from keras_policy_ext_cli import BACKENDS, wrapped

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
        run = arguments.prepare(arguments)
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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="keras-policy-ext",
        description="Float8 dtype policies for Keras 3.",
        epilog="`keras-policy-ext COMMAND --help` tells the options of each.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {__version__}"
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=False
    )
    _add_demo(commands)
    here = "whether float8 is faster on this machine, and why"
    doctor = _add(commands, _doctor, here, _DOCTOR)
    doctor.add_argument(
        "--device",
        type=_device,
        metavar="NAME",
        help="what would run on one that is elsewhere, such as h100, rtx4090, "
        f"mi300x or v5p; or a kind of devices: {', '.join(KNOWN)}",
        default=argparse.SUPPRESS,
    )
    _add_page(doctor)
    _add_export(commands)
    _add_inspect(commands)
    _add_memory(commands)
    _add_migrate(commands)
    _add_replay(commands)
    _add_report(commands)
    _add_shrink(commands)
    return parser


def _add(
    commands: argparse._SubParsersAction[_Parser],
    prepare: Callable[[argparse.Namespace], Callable[[], object]],
    help: str,
    description: str,
) -> argparse.ArgumentParser:
    """Add a subcommand; `prepare` checks arguments and returns what runs it.

    `prepare` raises a ValueError if something is wrong, and returns a
    function that runs the command.
    """
    parser = commands.add_parser(
        prepare.__name__.removeprefix("_"),
        help=help,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--backend",
        choices=sorted(BACKENDS),
        help="framework; without it KERAS_BACKEND, and where that is not "
        f"set, the first installed of {', '.join(BACKENDS)}",
        default=argparse.SUPPRESS,
    )
    parser.set_defaults(parser=parser, prepare=prepare)
    return parser


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    what = "train in float32, bfloat16 and float8 and compare"
    demo.add_arguments(_add(commands, _demo, what, demo.DESCRIPTION))


def _add_export(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _add(
        commands,
        _export,
        "write a saved model with float8 kernels for other readers",
        _EXPORT,
    )
    parser.add_argument("file", metavar="FILE", help="a .keras file")
    parser.add_argument(
        "output", metavar="OUT", help="the folder or file to write"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="compressed-tensors",
        metavar="FORMAT",
        help=f"what the reader takes: {', '.join(FORMATS)}",
    )
    as_frozen = "without it, what the file has, or the format mostly has"
    for name, choices, what in (
        ("granularity", GRANULARITIES, "what has a scale"),
        ("weights", WEIGHTS, "the format of the numbers"),
        (
            "activations",
            ("none", "dynamic", "static"),
            "how inputs are quantized",
        ),
    ):
        parser.add_argument(
            f"--{name}",
            choices=choices,
            default=argparse.SUPPRESS,
            help=f"{what}; {as_frozen}",
        )
    parser.add_argument(
        "--exclude",
        metavar="PATTERN",
        action="append",
        default=argparse.SUPPRESS,
        help="layers to leave in floats, as a regular expression of their "
        "paths; may be given again",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of one file"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an earlier export",
    )


def _add_inspect(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _add(
        commands,
        _inspect,
        "what each layer of a saved model computes in",
        _INSPECT,
    )
    parser.add_argument("file", metavar="FILE", help="a .keras file")
    parser.add_argument(
        "--full",
        action="store_true",
        help="every layer with weights, with its amaxes and scales",
        default=argparse.SUPPRESS,
    )
    _add_page(parser)


def _add_memory(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _add(
        commands,
        _memory,
        "what a training step of a saved model keeps",
        _MEMORY,
    )
    parser.add_argument("file", metavar="FILE", help="a .keras file")
    parser.add_argument(
        "--batch",
        type=_sizes,
        required=True,
        metavar="SIZES",
        help="of a batch, such as 256; or all of its sizes, such as 256,128, "
        "where the model does not know the others",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=argparse.SUPPRESS,
        help="to compare with: a float8 policy or recipe, or a plain policy; "
        "may be given again. Without it, float8 with delayed scaling, and for "
        "a model in float8 what it would be without",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="every layer",
        default=argparse.SUPPRESS,
    )
    _add_page(parser)


def _add_migrate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _add(
        commands,
        _migrate,
        "make a Keras 3 file of one that tf_keras wrote",
        _MIGRATE,
    )
    parser.add_argument("input", metavar="IN", help="a .h5 or .keras file")
    parser.add_argument(
        "output", metavar="OUT", help="the .keras file to write"
    )
    parser.add_argument(
        "--on-loss-scale",
        choices=["drop", "keep", "error"],
        default="drop",
        help="with keep, loading OUT needs keras_policy_ext",
    )
    parser.add_argument(
        "--force", action="store_true", help="overwrite OUT if it exists"
    )


def _add_page(
    parser: argparse.ArgumentParser, without: str = "without it, none"
) -> None:
    parser.add_argument(
        "--page",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"the .html file to write the report to, in full; {without}",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        default=argparse.SUPPRESS,
        help="overwrite that file if it exists",
    )


def _add_replay(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _add(
        commands, _replay, "say where a bad step of training began", _REPLAY
    )
    parser.add_argument("file", metavar="FILE", help="the .zip file")
    parser.add_argument(
        "--steps",
        type=int,
        default=10,
        metavar="N",
        help="the last steps to judge, and to take under each recipe",
    )
    parser.add_argument(
        "--recipe",
        action="append",
        metavar="SPEC",
        default=argparse.SUPPRESS,
        help="a recipe to try; may be given again. Without it, all",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        metavar="MODULE",
        default=argparse.SUPPRESS,
        help="a module that registers classes of the model; may be given again",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="every step",
        default=argparse.SUPPRESS,
    )
    _add_page(parser)


def _add_report(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _add(
        commands, _report, "make a page of what a training run left", _REPORT
    )
    parser.add_argument(
        "run", metavar="RUN", help="the file, or a folder with one such file"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="every operand",
        default=argparse.SUPPRESS,
    )
    _add_page(parser, "without it, beside RUN with its name")


def _add_shrink(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = _add(
        commands, _shrink, "store the kernels of a saved model", _SHRINK
    )
    parser.add_argument("input", metavar="IN", help="a .keras file")
    parser.add_argument(
        "output", metavar="OUT", help="the .keras file to write"
    )
    parser.add_argument(
        "--granularity",
        choices=stored_kernels.GRANULARITIES,
        default="channel",
        help="what has a scale: an output, a kernel, or 128 by 128 of it",
    )
    parser.add_argument(
        "--activations",
        choices=["none", "dynamic", "static"],
        default="none",
        help="how inputs are quantized; static needs a model that was trained "
        "or calibrated under delayed scaling",
    )
    parser.add_argument(
        "--weights",
        choices=stored_kernels.WEIGHTS,
        default="float8_e4m3fn",
        help="the format of the numbers",
    )
    parser.add_argument(
        "--force",
        "--overwrite",
        action="store_true",
        help="overwrite OUT if it exists",
    )


def _device(text: str) -> str:
    """Return a device name; raise if it is unknown. For `type=` of argparse."""
    try:
        devices.get(text)
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


def _demo(arguments: argparse.Namespace) -> Callable[[], object]:
    prepared = demo.prepare(demo.settings_of(arguments))
    return lambda: demo.run(prepared)


def _doctor(arguments: argparse.Namespace) -> Callable[[], object]:
    from keras_policy_ext.ext.inspect import doctor

    device = getattr(arguments, "device", None)
    output = _page(arguments)
    title = f"Float8 on {device or 'this machine'}"
    return lambda: _show(doctor.report(device), title, output, every="")


def _export(arguments: argparse.Namespace) -> Callable[[], object]:
    options: dict[str, Any] = {
        name: value
        for name in ("granularity", "weights", "activations", "exclude")
        if (value := getattr(arguments, name, None)) is not None
    }
    if options.get("activations") == "none":
        options["activations"] = None
    try:
        report = export(
            _loaded(arguments.file),
            arguments.output,
            arguments.format,
            max_shard_size=arguments.max_shard_size,
            overwrite=arguments.force,
            **options,
        )
    except (ImportError, OSError, TypeError) as error:
        raise ValueError(str(error)) from error
    return lambda: print(report)


def _inspect(arguments: argparse.Namespace) -> Callable[[], object]:
    from keras_policy_ext.ext.inspect.inspection import inspect

    full = getattr(arguments, "full", False)
    output = _page(arguments)
    model = _loaded(arguments.file)
    title = pathlib.Path(arguments.file).name
    return lambda: _show(inspect(model), title, output, full)


def _loaded(path: str) -> keras.Model:
    from keras_policy_ext.saving import load_model

    try:
        return load_model(path, compile=False)
    except (OSError, TypeError) as error:
        raise ValueError(f"cannot load {path}: {error}") from error


def _memory(arguments: argparse.Namespace) -> Callable[[], object]:
    from keras_policy_ext.ext.memory.step_memory import memory

    output = _page(arguments)
    model = _loaded(arguments.file)
    policy = getattr(arguments, "policy", None)
    try:
        report = memory(model, arguments.batch, policy)
    except TypeError as error:
        raise ValueError(str(error)) from error
    full = getattr(arguments, "full", False)
    title = f"Memory of {pathlib.Path(arguments.file).name}"
    return lambda: _show(report, title, output, full)


def _migrate(arguments: argparse.Namespace) -> Callable[[], object]:
    from keras_policy_ext.ext.migration import command

    return command.prepare(
        arguments.input,
        arguments.output,
        on_loss_scale=arguments.on_loss_scale,
        force=arguments.force,
    ).run


def _page(arguments: argparse.Namespace) -> pathlib.Path | None:
    """Return the path of the page that is asked for, checked; None for none."""
    asked = getattr(arguments, "page", None)
    return None if asked is None else _free(arguments, pathlib.Path(asked))


def _free(arguments: argparse.Namespace, output: pathlib.Path) -> pathlib.Path:
    """Return the path of a page; raise if it cannot be written."""
    force = getattr(arguments, "force", False)
    _output_files.check_output(None, output, force, ".html")
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
        with _output_files.whole(output) as part:
            part.write_text(text, encoding="utf-8")
        print(f"written: {output}")


def _replay(arguments: argparse.Namespace) -> Callable[[], object]:
    from keras_policy_ext.ext.replay.replay import replay

    output = _page(arguments)
    modules = getattr(arguments, "modules", [])
    if modules:
        sys.path.insert(0, str(pathlib.Path.cwd()))
    try:
        for name in modules:
            importlib.import_module(name)
        report = replay(
            arguments.file,
            steps=arguments.steps,
            recipes=getattr(arguments, "recipe", None),
        )
    except (ImportError, OSError) as error:
        raise ValueError(f"cannot replay {arguments.file}: {error}") from error
    except TypeError as error:
        raise ValueError(
            f"cannot load the model of {arguments.file}: {error} Classes of "
            "your own need --import MODULE."
        ) from error
    title = f"Replay of {pathlib.Path(arguments.file).name}"
    full = getattr(arguments, "full", False)
    return lambda: _show(report, title, output, full, "Every step: --full")


def _report(arguments: argparse.Namespace) -> Callable[[], object]:
    from keras_policy_ext.ext.watch import run_files
    from keras_policy_ext.ext.watch.run_report import TITLE, RunReport

    file, samples, runs = run_files.read(arguments.run)
    output = _page(arguments) or _free(arguments, file.with_suffix(".html"))
    found, full = RunReport(samples), getattr(arguments, "full", False)

    def show() -> None:
        if runs > 1:
            print(f"{file} has {runs} runs; this is the last one.")
        _show(found, TITLE, output, full, "Every operand: --full")

    return show


def _shrink(arguments: argparse.Namespace) -> Callable[[], object]:
    from keras_policy_ext.saving import shrinking

    activations = arguments.activations
    return shrinking.prepare(
        arguments.input,
        arguments.output,
        arguments.force,
        granularity=arguments.granularity,
        activations=None if activations == "none" else activations,
        weights=arguments.weights,
    ).run
