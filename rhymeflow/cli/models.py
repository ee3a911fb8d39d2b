"""The commands that ask a model: `eval`, `generate`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rhymeflow.cli.parser import Add, positive, temperature
from rhymeflow.cli.training import add_configured
from rhymeflow.config import help as pages
from rhymeflow.config.load import parse_config
from rhymeflow.errors import UserError
from rhymeflow.utils.disk import check_writable

_EVAL = """\
Evaluates a model on suites (docs/evaluation.md): a checkpoint, a run directory,
a Hugging Face directory, a hub name, or recipe:NAME. It is a run that trains
nothing; with --run.output_dir DIR it stays there.

  rhymeflow eval runs/RUN                          # its newest checkpoint
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


def add_commands(add: Add) -> None:
    """Add the commands with their arguments."""
    sub = add_configured(
        add,
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
    sub.add_argument("--temperature", metavar="T", type=temperature, help="0 is greedy")
    sub.add_argument("--json", action="store_true", help="one JSON object on the last line")
    sub.add_argument("--output", metavar="FILE", type=Path, help="where the JSON goes too")
    sub = add(
        "generate",
        generate,
        takes_fields=True,
        help="answer a prompt, or converse, by a model",
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
        field = _OF_GENERATE[option.replace("-", "_")]
        sub.add_argument(f"--{option}", metavar=metavar, help=f"{field}")


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate a model on suites; show a table or JSON."""
    from rhymeflow.evaluation.given import configuration

    if args.output is not None:
        check_writable(args.output.parent, "--output")
    given = {"n": args.n, "size": args.size, "temperature": args.temperature}
    changes = {name: value for name, value in given.items() if value is not None}
    config = configuration(_model(args.model), args.recipe, args.overrides, changes)
    from rhymeflow.evaluation import evaluate as found
    from rhymeflow.runtime.supervisor import WorkerDied

    named = args.overrides.get("run.output_dir")
    try:
        results = found.evaluate(config, args.suite or (), named and Path(named))
    except WorkerDied as error:
        print(f"rhymeflow: {error}", file=sys.stderr)
        return 1
    figures = found.as_json(config, results)
    print(json.dumps(figures) if args.json else found.table(results))
    if args.output is not None:
        found.write(args.output, figures)
    return 0


def _model(given: str) -> str:
    """The model that is meant, and a word if it is one of several."""
    from rhymeflow.evaluation.given import model_in

    if (model := model_in(given)) != given:
        print(f"rhymeflow: {model}, the newest checkpoint", file=sys.stderr)
    return model


_OF_GENERATE = {
    "temperature": "rollout.temperature",
    "max_tokens": "rollout.max_completion_length",
    "seed": "run.seed",
    "system": "data.system_prompt",
}
"""Options of `generate`, by the fields that they stand for."""


def generate(args: argparse.Namespace) -> int:
    """Answer a prompt, or converse, by a model."""
    if args.chat and args.prompt is not None:
        raise UserError("--chat: what is said is read from the terminal, so PROMPT is not given")
    overrides = {"model.name": _model(args.model)}
    for option, field in _OF_GENERATE.items():
        if (value := getattr(args, option)) is not None:
            overrides[field] = value
    if twice := overrides.keys() & args.overrides.keys():
        raise UserError(f"--{min(twice)}: given twice")
    overrides |= args.overrides
    config = parse_config("", overrides, where="the command line")
    prompt: str | None = args.prompt
    if prompt is None and not args.chat:
        prompt = _whole_input()
    from rhymeflow.evaluation import generate as found  # loads torch

    try:
        generator = found.Generator(config, must_fit="rollout.max_completion_length" in overrides)
        if prompt is None:
            found.chat(generator, _lines(), _write)
        else:
            found.answer_one(generator, prompt, _write)
    except KeyboardInterrupt:
        _write("\n")
        raise
    return 0


def _whole_input() -> str:
    """All of standard input as a prompt; the last end of a line is none of it."""
    prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise UserError("generate: the prompt is empty; give it after the model, or on stdin")
    return prompt


def _lines() -> Iterator[str]:
    """What is said, line by line, until the end of standard input (Ctrl-D on a terminal)."""
    if not sys.stdin.isatty():
        # Not by `input`, which loses an interrupt that comes while it flushes the output.
        while line := sys.stdin.readline():
            yield line.removesuffix("\n")
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


_write = partial(print, end="", flush=True)
