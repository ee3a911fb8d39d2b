"""The command line: one small function per command.

Holds true: 0 on success; 2 on bad input, with one line on stderr that says what and where; 1 if a
worker died or hangs, or the disk is full; 130 after Ctrl-C. A defect keeps its traceback. Knows
nothing of how a command is carried out; what a command needs is imported when it is called, so that
`rhymeflow --help` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from rhymeflow import __version__
from rhymeflow.cli_runs import add_commands, positive
from rhymeflow.config import Config, fields
from rhymeflow.config import help as pages
from rhymeflow.config.load import (
    SHORT,
    dump_config,
    list_recipes,
    parse_config,
    read_config,
    split_overrides,
)
from rhymeflow.errors import StorageError, UserError, suggestion


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"rhymeflow: {error}", file=sys.stderr)
        return 2
    except StorageError as error:
        print(f"rhymeflow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rhymeflow: interrupted", file=sys.stderr)
        return 130


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        return bench(arguments[1:])
    if arguments and arguments[0] in ("train", "simulate", "calibrate", "sft", "eval"):
        arguments = [_WITHOUT_VALUE.get(each, each) for each in arguments]
    rest, overrides = split_overrides(arguments)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(rest)
    configures = args.command in (train, resume, simulate, calibrate, sft, evaluate, generate)
    if unknown or (overrides and not configures):
        raise UserError(_no_such_argument(args, unknown, overrides))
    args.overrides = overrides
    result: int = args.command(args)
    return result


_WITHOUT_VALUE = {"--dry-run": "--dry-run=full", "--help": "--help=common", "-h": "--help=common"}
"""What an option means that may have a value: it is not to take what follows it for one."""


def _no_such_argument(
    args: argparse.Namespace, unknown: Sequence[str], overrides: Mapping[str, str]
) -> str:
    """Say which argument is none, and which one is nearest."""
    option = (unknown[0] if unknown else f"--{next(iter(overrides))}").partition("=")[0]
    if not option.startswith("-"):
        recipe = getattr(args, "recipe", None)
        hint = f"; {recipe!r} is the recipe or file already" if recipe else ""
    else:
        known = [*args.options, *(f"--{name}" for name in SHORT if unknown)]
        hint = suggestion(option, known)
        if args.command in (train, simulate, calibrate, sft, evaluate, generate) and not hint:
            hint = fields.nearest_field(option.lstrip("-")).replace("mean ", "mean --")
    return f"{option}: there is no such argument{hint}"


_TRAIN = """\
Trains a policy: a recipe (`rhymeflow recipes` lists them), a YAML file, or a
task of your own:

  rhymeflow train --model DIR_OR_HUB_NAME --data FILE --reward FILE.py:FUNCTION
"""


_SFT = """\
Fine-tunes a model on rows that say what is right (docs/sft.md), in one process:

  rhymeflow sft --model DIR_OR_HUB_NAME --data FILE --sft.output_dir DIR

A row is {prompt, completion}, or {messages}. DIR is then a model to train on.
"""


_EVAL = """\
Evaluates a model on suites (docs/evaluation.md), in one process: a checkpoint,
a Hugging Face directory, a hub name, or recipe:NAME.

  rhymeflow eval runs/RUN/checkpoints/step-50      # as the run evaluates
  rhymeflow eval recipe:demo --n 8                 # as the recipe does
  rhymeflow eval MODEL demo                        # another model, so too
  rhymeflow eval MODEL --data FILE --reward FILE.py:FUNCTION

Figures: mean reward (avg@k), the chance that one of k answers passes (pass@k),
reward of the majority's answer (maj@k), sampled tokens, share cut by length.
"""


_GENERATE = """\
Answers a prompt, or with --chat a conversation, by a model; text as it comes.
--section.field VALUE sets fields of the configuration, as in `train`.
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other mistake is said."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rhymeflow", description="Asynchronous RL post-training of language models."
    )
    parser.add_argument("--version", action="version", version=f"rhymeflow {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: object, **options: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, allow_abbrev=False, **options)
        sub.set_defaults(command=command, options=sub._option_string_actions)
        return sub

    def add_run(
        name: str, command: object, first: str | None = None, **options: Any
    ) -> argparse.ArgumentParser:
        sub = add(name, command, formatter_class=pages.Page, add_help=False, **options)
        needs = "RECIPE_OR_FILE" if name == "simulate" else "[RECIPE_OR_FILE]"
        if first is not None:
            what = "a checkpoint, a directory, a hub name or recipe:NAME"
            sub.add_argument(first.lower(), metavar=first, help=what)
            needs = f"{first} {needs}"
        break_at = "" if first is None else "\n" + " " * len(f"usage: rhymeflow {name}")
        sub.usage = f"rhymeflow {name} {needs} [OPTION ...]{break_at} [--section.field VALUE ...]"
        sub.add_argument(
            "recipe",
            nargs=None if name == "simulate" else "?",
            metavar="RECIPE_OR_FILE",
            help="a recipe's name or a YAML file",
        )
        sub.add_argument(
            *("-h", "--help"),
            nargs="?",
            const="common",
            action=pages.Help,
            metavar="WHAT",
            help="this page; --help=all has every field, --help=SECTION those of a section",
        )
        return sub

    sub = add_run("train", train, help="train a policy", description=_TRAIN)
    sub.add_argument(
        "--dry-run",
        nargs="?",
        const="full",
        choices=("full", "plan"),
        metavar="plan",
        dest="dry_run",
        help="load all but the weights, show the whole configuration and what it needs, and stop; "
        "=plan loads nothing: sizes, memory and placement only",
    )
    for option, help in pages.SHORT.items():
        sub.add_argument(f"--{option}", metavar=help[0], help=help[1])
    what = "serve pages over the run while it goes on, and print their address"
    sub.add_argument("--dashboard", action="store_true", help=what)
    sub = add(
        "resume",
        resume,
        help="go on with a run, however it ended",
        usage="rhymeflow resume RUN_DIR [--section.field VALUE ...]\n"
        "       rhymeflow resume MIRROR --output_dir DIR [--section.field VALUE ...]",
        epilog="Fields that have no part in what is in flight can be changed, such as "
        "`--learner.max_steps 200` for a run that is finished.",
    )
    sub.add_argument("run", metavar="RUN_DIR", help="or the mirror of a run (run.mirror)")
    sub.add_argument(
        "--output_dir",
        metavar="DIR",
        type=Path,
        help="a new run directory, to be rebuilt from the mirror",
    )
    sub.add_argument("--dashboard", action="store_true", help="as `train` has it")
    sub = add_run(
        "simulate",
        simulate,
        help="run a configuration on a simulated cluster",
    )
    sub.add_argument("--output", metavar="DIR", type=Path, help="where the timeline goes")
    sub.add_argument(
        "--workload", metavar="RUN_DIR", type=Path, help="lengths as a real run recorded them"
    )
    sub = add_run(
        "calibrate",
        calibrate,
        help="measure this machine's engine and learner, and fit the cost model",
    )
    sub.add_argument("--output", metavar="FILE.json", type=Path, help="where the profile goes")
    add_run(
        "sft",
        sft,
        help="supervised fine-tuning: a checkpoint to begin from",
        description=_SFT,
    )
    sub = add_run(
        "eval",
        evaluate,
        first="MODEL",
        help="evaluate a model on suites: avg@k, pass@k, maj@k",
        description=_EVAL,
    )
    sub.add_argument(
        "--suite", metavar="NAME", nargs="+", action="extend", help="only these of eval.suites"
    )
    what = "answers to each prompt, in place of what the suites say; and so the next two"
    sub.add_argument("--n", metavar="N", type=positive, help=what)
    sub.add_argument("--size", metavar="N", type=positive, help="prompts of each suite")
    sub.add_argument("--temperature", metavar="T", type=_not_negative, help="0 is greedy")
    sub.add_argument("--json", action="store_true", help="one JSON object on the last line")
    sub.add_argument("--output", metavar="FILE", type=Path, help="where the JSON goes too")
    sub = add(
        "generate",
        generate,
        help="answer a prompt, or converse, by a model",
        description=_GENERATE,
        formatter_class=pages.Page,
    )
    sub.usage = "rhymeflow generate MODEL [PROMPT] [OPTION ...] [--section.field VALUE]"
    sub.add_argument("model", metavar="MODEL", help="a checkpoint, a directory or a hub name")
    sub.add_argument("prompt", metavar="PROMPT", nargs="?", help="else read from standard input")
    sub.add_argument("--chat", action="store_true", help="converse; Ctrl-D or Ctrl-C ends it")
    sub.add_argument("--system", metavar="TEXT", help="a system message (data.system_prompt)")
    for option, metavar in (("temperature", "T"), ("max-tokens", "N"), ("seed", "N")):
        field = _OF_GENERATE[option.replace("-", "_")]
        sub.add_argument(f"--{option}", metavar=metavar, help=f"{field}")
    add_commands(add)
    add("recipes", recipes, help="list the ready configurations")
    add("doctor", doctor, help="what this machine can run, and what is missing")
    add("bench", bench, help="run a benchmark: `rhymeflow bench` lists them", add_help=False)
    return parser


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"given {text!r}, should be a number from 0 on")
    return value


def train(args: argparse.Namespace) -> int:
    """Train, or with `--dry-run` check and show what would be trained."""
    from rhymeflow import check

    config = read_config(args.recipe, args.overrides)
    if args.dry_run:
        from rhymeflow.runtime.run_dir import check_run_dir

        check_run_dir(config)
        longest = check.everything(config) if args.dry_run == "full" else None
        if config.cluster.nodes is not None:
            from rhymeflow.cluster import plan

            needs = plan.describe(config)
        else:
            from rhymeflow import sizes  # loads torch; mistakes are said without waiting for it

            needs = sizes.describe(config, longest)
        print(dump_config(config) + needs)
        return 0
    check.before_start(config)
    if config.runtime == "local":
        from rhymeflow.runtime import processes

        processes.prepare()  # its imports go on beside those that follow
    from rhymeflow.runtime.run_dir import choose_run_dir
    from rhymeflow.runtime.train import train

    run_dir = choose_run_dir(config)
    return _to_its_end(lambda: train(config, run_dir=run_dir), args.dashboard and run_dir)


def resume(args: argparse.Namespace) -> int:
    """Go on with a run."""
    from rhymeflow.runtime.resume_options import with_options
    from rhymeflow.runtime.train import resume

    def change(config: Config) -> Config:
        return with_options(config, args.overrides)

    if args.output_dir is not None:
        from rhymeflow.mirror.restore import restore

        for line in restore(args.run, args.output_dir):
            print(line, file=sys.stderr)
    elif "://" in args.run:
        raise UserError(f"resume {args.run}: give the new run directory with --output_dir")
    run_dir = args.output_dir or Path(args.run)
    return _to_its_end(lambda: resume(run_dir, change), args.dashboard and run_dir)


def _to_its_end(run: Callable[[], object], shown: Path | None) -> int:
    """Carry a run on, beside a dashboard of the run directory `shown` if there is one."""
    from rhymeflow.runtime.supervisor import WorkerDied

    try:
        if not shown:
            run()
        else:
            from rhymeflow.dashboard.beside import beside

            with beside(shown) as address:
                print(f"dashboard: {address}", flush=True)
                run()
    except WorkerDied as error:  # a traceback of the controller would say nothing about it
        print(f"rhymeflow: {error}", file=sys.stderr)
        return 1
    return 0


def simulate(args: argparse.Namespace) -> int:
    """Run a configuration on a simulated cluster, and plot what happened."""
    from rhymeflow.sim.simulate import simulate as run

    config = read_config(args.recipe, args.overrides)
    print(run(config, output=args.output, workload=args.workload).text())
    return 0


def calibrate(args: argparse.Namespace) -> int:
    """Measure this machine and fit the cost model to it."""
    from rhymeflow.calibration.calibrate import calibrate as run

    config = read_config(args.recipe, args.overrides, needed=("model", "data"))
    print(run(config, output=args.output).text())
    return 0


def sft(args: argparse.Namespace) -> int:
    """Fine-tune a model on rows, and say the loss."""
    config = read_config(args.recipe, args.overrides, needed=("model", "data"))
    from rhymeflow.sft.train import train  # loads torch; mistakes are said without waiting for it

    train(config, lambda line: print(line, flush=True))
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate a model on suites; show a table or JSON."""
    from rhymeflow.evaluation.given import configuration

    given = {"n": args.n, "size": args.size, "temperature": args.temperature}
    changes = {name: value for name, value in given.items() if value is not None}
    config = configuration(args.model, args.recipe, args.overrides, changes)
    from rhymeflow.evaluation import evaluate as found  # loads torch

    results = found.evaluate(config, args.suite or ())
    figures = found.as_json(config, results)
    print(json.dumps(figures) if args.json else found.table(results))
    if args.output is not None:
        found.write(args.output, figures)
    return 0


_OF_GENERATE = {
    "temperature": "rollout.temperature",
    "max_tokens": "rollout.max_completion_length",
    "seed": "run.seed",
    "system": "data.system_prompt",
}
"""Options of `generate`, by the fields that they stand for."""


def generate(args: argparse.Namespace) -> int:
    """Answer a prompt, or converse, by a model."""
    from rhymeflow.evaluation import terminal

    if args.chat and args.prompt is not None:
        raise UserError("--chat: what is said is read from the terminal, so PROMPT is not given")
    overrides = {"model.name": args.model}
    for option, field in _OF_GENERATE.items():
        if (value := getattr(args, option)) is not None:
            overrides[field] = value
    if twice := overrides.keys() & args.overrides.keys():
        raise UserError(f"--{min(twice)}: given twice")
    overrides |= args.overrides
    config = parse_config("", overrides, where="the command line")
    prompt: str | None = args.prompt
    if prompt is None and not args.chat:
        prompt = terminal.whole_input()
    from rhymeflow.evaluation import generate as found  # loads torch

    try:
        generator = found.Generator(config, must_fit="rollout.max_completion_length" in overrides)
        if prompt is None:
            found.chat(generator, terminal.lines(), terminal.write)
        else:
            found.answer_one(generator, prompt, terminal.write)
    except KeyboardInterrupt:
        terminal.write("\n")
        raise
    except BrokenPipeError:
        terminal.nobody_reads()
    return 0


def recipes(args: argparse.Namespace) -> int:
    """List the ready configurations."""
    found = list_recipes()
    width = max(map(len, found), default=0)
    for name, what in found.items():
        print(f"{name.ljust(width)}  {what}")
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Say what this machine can run, what is missing and how to get it."""
    from rhymeflow import doctor as surgery

    print(surgery.examine())
    return 0


_NO_BENCHMARKS = ("harness",)
"""Modules beside the benchmarks: what they share."""


def bench(arguments: list[str]) -> int:
    """Run `benchmarks/NAME.py`; without a name, list them."""
    benchmarks = _benchmarks()
    names = sorted(
        module.name
        for module in pkgutil.iter_modules(benchmarks.__path__)
        if not module.ispkg and module.name not in _NO_BENCHMARKS
    )
    parser = _Parser(prog="rhymeflow bench", allow_abbrev=False)
    if not arguments or arguments[0].startswith("-"):
        parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(names))
        parser.parse_args(arguments)
        print(f"benchmarks: {', '.join(names)} (rhymeflow bench NAME --help)")
        return 0
    name = arguments[0]
    if name not in names:
        hint = suggestion(name, names)
        raise UserError(f"bench {name}: there is no such benchmark ({', '.join(names)}){hint}")
    module = importlib.import_module(f"benchmarks.{name}")
    parser.prog += f" {name}"
    parser.description = (module.__doc__ or "").partition("\n")[0]
    importlib.import_module("benchmarks.harness").add_common_arguments(parser)
    module.add_arguments(parser)
    module.run(parser.parse_args(arguments[1:]))
    return 0


def _benchmarks() -> ModuleType:
    """Import the benchmarks of the checkout that this package runs from."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "benchmarks" / "harness.py").is_file():
        raise UserError(
            f"bench: the benchmarks are not beside the installed package ({root}); they are part "
            "of the source: clone it and install with `pip install -e .`"
        )
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks")
