"""The commands that take a configuration, such as train, simulate, sft, eval and generate.

A mistake in the configuration is reported before slow imports."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rhymeflow.cli.parser import Add, positive, temperature
from rhymeflow.config import Config, EvalConfig, EvalSuite, LoraConfig
from rhymeflow.config import help as pages
from rhymeflow.config.load import SHORT, list_recipes, parse_config, read_config
from rhymeflow.core.types import HELD_OUT
from rhymeflow.errors import UserError, nearest, within
from rhymeflow.utils.disk import check_writable

_TRAIN = """\
Trains a policy: a recipe (`rhymeflow recipes` lists them), a YAML file, or a
task of your own:

  rhymeflow train --model DIR_OR_HUB_NAME --data FILE --reward FILE.py:FUNCTION
"""


_SFT = """\
Fine-tunes a model on rows with the right answers (docs/sft.md), in one process:

  rhymeflow sft --model DIR_OR_HUB_NAME --data FILE --sft.output_dir DIR

A row is {prompt, completion}, or {messages}. DIR then holds the model.
"""

_EVAL = """\
Evaluates a model on suites (docs/evaluation.md): a checkpoint, a run directory,
a Hugging Face directory, a hub name, or recipe:NAME. It is a run that trains
nothing; --run.output_dir DIR keeps its directory.

  rhymeflow eval runs/RUN                          # its newest checkpoint
  rhymeflow eval runs/RUN/checkpoints/step-50      # as the run evaluates
  rhymeflow eval recipe:demo --n 8                 # as the recipe does
  rhymeflow eval MODEL demo                        # another model, likewise
  rhymeflow eval MODEL --data FILE --reward FILE.py:FUNCTION

Figures: mean reward (avg@k), the chance that one of k responses passes (pass@k),
reward of the majority's answer (maj@k), sampled tokens, share cut by length.
"""


_GENERATE = """\
Answers a prompt, or with --chat converses, and prints text as it is generated.
--section.field VALUE sets fields of the configuration, as in `train`.
"""

_RENDER = """\
Prints the first prompts as the policy reads them, tools included, with \u27e6 and \u27e7 around
special tokens. Without data, an example. If MODEL is a run, its configuration is used.
"""

_SHORT_HELP = {
    "model": ("M", "a local directory or a hub name"),
    "data": ("FILE", "CSV, JSON, JSONL or Parquet; text also compressed"),
    "reward": ("F", "file.py:function, or a built-in; several are added up"),
    "schedule": ("NAME", "how rollout and training overlap"),
    "history": ("RUN_DIR", "a run to draft from"),
    "lora": ("RANK", "train an adapter instead of all weights"),
}

_CALIBRATE = "Routing and `simulate` use the profile with --schedule.cost_model FILE.json."


def add_commands(add: Add) -> None:
    """Add the commands with their arguments."""
    _add_train(add)
    _add_resume(add)
    _add_simulated(add)
    what = "supervised fine-tuning: a checkpoint to begin from"
    sub = _add_configured(add, "sft", sft, help=what, description=_SFT)
    what = "read all rows, show the first as it is learnt and the whole configuration, and stop"
    sub.add_argument("--dry-run", action="store_true", help=what)
    _add_evaluation(add)


def _add_configured(
    add: Add, name: str, command: object, first: str | None = None, **options: Any
) -> argparse.ArgumentParser:
    """Add a command that takes a recipe or a file, and fields. `first`: an argument before them."""
    sub = add(
        name, command, takes_fields=True, formatter_class=pages.Page, add_help=False, **options
    )
    needs = "RECIPE_OR_FILE" if name == "simulate" else "[RECIPE_OR_FILE]"
    if first is not None:
        what = "a checkpoint, a run directory, a directory, a hub name or recipe:NAME"
        sub.add_argument(first.lower(), metavar=first, help=what)
        needs = f"{first} {needs}"
    break_at = "" if first is None else "\n" + " " * len(f"usage: rhymeflow {name}")
    sub.usage = f"rhymeflow {name} {needs} [OPTION ...]{break_at} [--section.field VALUE ...]"
    what, nargs = "a recipe's name or a YAML file", None if name == "simulate" else "?"
    sub.add_argument("recipe", nargs=nargs, metavar="RECIPE_OR_FILE", help=what)
    sub.add_argument(
        *("-h", "--help"),
        nargs="?",
        const="common",
        action=pages.Help,
        metavar="WHAT",
        help="this page; --help=all has every field, --help=SECTION those of a section",
    )
    return sub


def _add_train(add: Add) -> None:
    sub = _add_configured(add, "train", train, help="train a policy", description=_TRAIN)
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
    for option, (metavar, what) in _SHORT_HELP.items():
        sub.add_argument(f"--{option}", metavar=metavar, help=f"{what} ({SHORT[option]})")
    _add_shown(sub)


def _add_shown(sub: argparse.ArgumentParser) -> None:
    """Add how a run is shown."""
    what = "serve a dashboard of the run, in a terminal also after its end until Ctrl-C"
    sub.add_argument("--dashboard", action="store_true", help=what)
    what = "without a terminal, also staleness, speed, drafts and idle shares of each step"
    sub.add_argument("--verbose", action="store_true", help=what)


def _add_resume(add: Add) -> None:
    sub = add(
        "resume",
        resume,
        takes_fields=True,
        help="resume a run, however it ended",
        usage="rhymeflow resume RUN_DIR [--section.field VALUE ...]\n"
        "       rhymeflow resume BACKUP [--output_dir DIR] [--section.field VALUE ...]",
        epilog="Fields that do not affect responses in flight can be changed, such as "
        "`--learner.max_steps 200` for a run that is finished.",
    )
    sub.add_argument("run", metavar="RUN_DIR", help="or the backup of a run (run.backup)")
    what = "where to restore the run of a backup; by default where it was"
    sub.add_argument("--output_dir", metavar="DIR", type=Path, help=what)
    _add_shown(sub)


def _add_simulated(add: Add) -> None:
    what = "run a configuration on a simulated cluster"
    sub = _add_configured(add, "simulate", simulate, help=what)
    sub.add_argument("--output", metavar="DIR", type=Path, help="where the timeline goes")
    what = "response lengths from a real run"
    sub.add_argument("--workload", metavar="RUN_DIR", type=Path, help=what)
    what = "fit the cost model of this machine to the log of a run on it"
    sub = add("calibrate", calibrate, help=what, epilog=_CALIBRATE)
    what = "trained with --drafting.window off, 20 steps or more"
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path, help=what)
    sub.add_argument("--output", metavar="FILE.json", type=Path, help="where the profile goes")


def _add_evaluation(add: Add) -> None:
    what = "evaluate a model on suites: avg@k, pass@k, maj@k"
    sub = _add_configured(add, "eval", evaluate, first="MODEL", help=what, description=_EVAL)
    what = "only these of eval.suites"
    sub.add_argument("--suite", metavar="NAME", nargs="+", action="extend", help=what)
    what = "responses to each prompt, instead of the suites' own number; likewise the next two"
    sub.add_argument("--n", metavar="N", type=positive, help=what)
    sub.add_argument("--size", metavar="N", type=positive, help="prompts of each suite")
    sub.add_argument("--temperature", metavar="T", type=temperature, help="0 is greedy")
    sub.add_argument("--json", action="store_true", help="one JSON object on the last line")
    sub.add_argument("--output", metavar="FILE", type=Path, help="write the JSON there as well")
    sub = add(
        "generate",
        generate,
        takes_fields=True,
        help="answer a prompt, or converse, with a model",
        description=_GENERATE,
        formatter_class=pages.Page,
    )
    sub.usage = "rhymeflow generate MODEL [PROMPT] [OPTION ...] [--section.field VALUE]"
    what = "a checkpoint, a run directory (its newest), a directory or a hub name"
    sub.add_argument("model", metavar="MODEL", help=what)
    sub.add_argument("prompt", metavar="PROMPT", nargs="?", help="else read from standard input")
    sub.add_argument("--chat", action="store_true", help="converse; Ctrl-D or Ctrl-C ends it")
    sub.add_argument("--system", metavar="TEXT", help="a system message (data.system_prompt)")
    for option, metavar in (("temperature", "T"), ("max-tokens", "N"), ("seed", "N")):
        field = _GENERATE_FIELDS[option.replace("-", "_")]
        sub.add_argument(f"--{option}", metavar=metavar, help=f"{field}")
    what = "show prompts as the policy reads them"
    sub = _add_configured(add, "render", render, first="MODEL", help=what, description=_RENDER)
    what = "number of prompts (3)"
    sub.add_argument("--rows", metavar="N", type=positive, default=3, help=what)


def train(args: argparse.Namespace) -> None:
    """Train, or with `--dry-run` check and show what would be trained."""
    from rhymeflow import check, emulation

    config = emulation.resolved(read_config(args.recipe, args.overrides))
    if args.dry_run:
        from rhymeflow.cli.dry_run import dry_run

        dry_run(config, is_full=args.dry_run == "full")
        return
    check.before_start(config)
    if config.runtime == "local":
        from rhymeflow.runtime import processes

        processes.prepare()  # begins imports in another process, beside the one below
        with processes.ended_by_interrupt():
            import rhymeflow.runtime.train  # noqa: F401 - takes long
    from rhymeflow.runtime.train import train

    _to_its_end(partial(train, config), args)


def resume(args: argparse.Namespace) -> None:
    """Resume a run, or restore one from its backup and resume it."""
    from rhymeflow.runtime.resume_options import with_options
    from rhymeflow.runtime.train import resume

    def change(config: Config) -> Config:
        return with_options(config, args.overrides)

    run_dir = Path(args.run)
    if args.output_dir is not None or "://" in args.run or any(run_dir.glob("*/beginning.json")):
        from rhymeflow.store.backup import restore

        run_dir, said = restore(args.run, args.output_dir)
        print(*said, sep="\n", file=sys.stderr)
    _to_its_end(partial(resume, run_dir, change), args)


def _to_its_end(run: Callable[..., object], args: argparse.Namespace) -> None:
    """Call `run`, shown as the arguments say, beside a dashboard if one is wanted."""
    from rich.console import Console

    from rhymeflow.observe.progress import Progress

    with ExitStack() as stack:

        def begin(run_dir: Path) -> None:
            if args.dashboard:
                from rhymeflow.dashboard.serve import beside

                print(f"dashboard: {stack.enter_context(beside(run_dir))}", flush=True)

        run(begin=begin, progress=Progress(Console(), verbose=args.verbose))


def simulate(args: argparse.Namespace) -> None:
    """Run a configuration on a simulated cluster; plot its timeline and print a summary."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from rhymeflow.sim.simulate import simulate as run

    config = read_config(args.recipe, args.overrides)
    for name in args.overrides:
        if args.workload is not None and name.startswith("simulation.workload."):
            raise UserError(f"--{name}: has no effect with --workload, the run's own responses")
    output = args.output or Path("simulations") / config.name
    columns = "step", MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    is_off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_off) as bar:
        task = bar.add_task("", total=config.learner.max_steps)
        result = run(
            config,
            output=output,
            workload=args.workload,
            on_step=lambda step: bar.update(task, completed=step),
        )
    print(result.text(), f"timeline: {output / 'timeline.png'}", sep="\n\n")


def calibrate(args: argparse.Namespace) -> None:
    """Fit the cost model to a run's log; print how well it fits."""
    from rhymeflow.calibration import calibrate as fit

    print(fit(args.run_dir, output=args.output).text(args.output))


def sft(args: argparse.Namespace) -> None:
    """Fine-tune a model on rows, and print the loss."""
    config = read_config(args.recipe, args.overrides, needed=("model", "data"))
    if args.dry_run:
        from rhymeflow.cli.dry_run import sft_dry_run

        sft_dry_run(config)
        return
    from rhymeflow.sft.train import train  # loads torch; mistakes were reported before

    train(config, lambda line: print(line, flush=True))


# -- evaluating and generating ---------------------------------------------------------------------


def evaluate(args: argparse.Namespace) -> None:
    """Evaluate a model on suites; show a table or JSON."""
    if args.output is not None:
        check_writable(args.output.parent, "--output")
        if args.output.is_dir():
            raise UserError(f"--output {args.output}: is a directory; give a file")
    config = _evaluation_config(args)
    from rhymeflow.evaluation import evaluate as evaluation

    run_dir = args.overrides.get("run.output_dir")
    results = evaluation.evaluate(config, args.suite or (), run_dir and Path(run_dir))
    figures = evaluation.as_json(config, results)
    print(json.dumps(figures) if args.json else evaluation.table(results))
    if args.output is not None:
        evaluation.write(args.output, figures)


def _evaluation_config(args: argparse.Namespace) -> Config:
    """Return the configuration to evaluate a model with. By default a run's checkpoint is evaluated
    as the run evaluates, and a recipe's model as the recipe does; on data that is given, on all."""
    source, overrides = _source(args)
    if source is None and "eval.suites" in overrides:
        config = parse_config("", overrides, where="the command line")
    else:
        brings = source is not None or {"data.source", "reward.functions"} <= overrides.keys()
        where = f"{args.model}: brings no task, as the checkpoint of a run does"
        with nullcontext() if brings else within(where):
            config = read_config(source, overrides, needed=("data", "reward"))
    if not any(name.startswith("model.lora.") for name in overrides):  # what the run trained
        config = config.changed(model={"lora": LoraConfig(), "quantization": None})
    data, suites = config.data, config.eval.suites
    is_given = "data.source" in overrides and not overrides.keys() & _HOLD_OUT
    if not suites and source and not is_given:
        suites = (EvalSuite(name=HELD_OUT),)
    elif not suites:  # all rows of section `data`
        size = data.size
        suites = (EvalSuite(name="data", source=data.source, options=data.options, size=size),)
    given = {"n": args.n, "size": args.size, "temperature": args.temperature}
    changes = {name: value for name, value in given.items() if value is not None}
    changed = tuple(each.model_copy(update=changes) for each in suites)
    return config.model_copy(update={"eval": EvalConfig(suites=changed)})


_HOLD_OUT = {"data.eval_source", "data.eval_size"}


def _source(args: argparse.Namespace) -> tuple[str | None, dict[str, str]]:
    """Return the recipe or file to configure the model of `args` by, if there is one, and the
    overrides with that model."""
    if "model.name" in args.overrides:
        raise UserError(f"--model: the model is {args.model!r} already")
    model = _resolved_model(args.model)
    source = args.recipe or _own_configuration(args.model, model)
    return source, {**args.overrides, "model.name": model}


def _own_configuration(given: str, model: str) -> str | None:
    """The recipe or configuration file of the model that `given` means, if it has one."""
    kind, _, name = model.partition(":")
    if kind == "recipe":
        if name not in list_recipes():
            raise UserError(f"{model}: there is no such recipe{nearest(name, list_recipes())}")
        return name
    path, is_run = Path(given).expanduser(), given != model
    run_config = (path if is_run else path.parent.parent) / "config.yaml"
    is_found = (is_run or path.parent.name == "checkpoints") and run_config.is_file()
    return str(run_config) if is_found else None


def _resolved_model(given: str) -> str:
    """Return a run directory's newest checkpoint, and print its path; else return `given`. Raises
    `UserError` if the run has no checkpoint yet, or `given` is a recipe."""
    from rhymeflow.store.checkpoint_dirs import CHECKPOINTS, newest_of
    from rhymeflow.store.schema import EVENTS

    path = Path(given).expanduser()
    is_run = (path / CHECKPOINTS).exists() or (path / EVENTS).is_file()
    is_model = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
    if is_run and not is_model:  # else a model was saved there, too
        newest = newest_of(path)
        if newest is None:
            raise UserError(f"{given}: the run has no checkpoint yet")
        print(f"rhymeflow: {newest}, the newest checkpoint", file=sys.stderr)
        return str(newest)
    if not path.exists() and given in list_recipes():
        name = read_config(given).model.name
        raise UserError(f"{given}: is a recipe, not a model; its model is {name}")
    return given


_GENERATE_FIELDS = {
    "temperature": "rollout.temperature",
    "max_tokens": "rollout.max_completion_length",
    "seed": "run.seed",
    "system": "data.system_prompt",
}
"""The field that each option of `generate` sets."""


def generate(args: argparse.Namespace) -> None:
    """Answer a prompt, or converse, with a model."""
    if args.chat and args.prompt is not None:
        raise UserError("--chat: prompts are read from the terminal; leave PROMPT out")
    overrides = {"model.name": _resolved_model(args.model)}
    for option, field in _GENERATE_FIELDS.items():
        if (value := getattr(args, option)) is not None:
            overrides[field] = value
    if twice := overrides.keys() & args.overrides.keys():
        raise UserError(f"--{min(twice)}: given twice")
    overrides |= args.overrides
    config = parse_config("", overrides, where="the command line")
    prompt: str | None = args.prompt
    if prompt is None and not args.chat:
        prompt = _whole_input()
    from rhymeflow.evaluation import generate as chat  # loads torch

    try:
        generator = chat.Generator(config, must_fit="rollout.max_completion_length" in overrides)
        if prompt is None:
            chat.chat(generator, _lines(), _write)
        else:
            for piece in generator.answer(prompt):
                _write(piece)
            _write("\n")
    except KeyboardInterrupt:
        _write("\n")
        raise


def render(args: argparse.Namespace) -> None:
    """Show prompts as the policy reads them."""
    source, overrides = _source(args)
    if source is None:
        config = parse_config("", overrides, where="the command line")
    else:
        config = read_config(source, overrides)
    from rhymeflow.cli.render import render as show  # loads transformers

    show(config, args.rows, has_data=source is not None or "data.source" in overrides)


def _whole_input() -> str:
    """All of standard input as a prompt, without the last line end."""
    prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise UserError("generate: the prompt is empty; give it after the model, or on stdin")
    return prompt


def _lines() -> Iterator[str]:
    """The lines of standard input, until its end (Ctrl-D on a terminal)."""
    if not sys.stdin.isatty():
        # `input` loses an interrupt that comes while it flushes the output.
        while line := sys.stdin.readline():
            yield line.removesuffix("\n")
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


_write = partial(print, end="", flush=True)
