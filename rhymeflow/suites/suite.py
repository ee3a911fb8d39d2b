"""Makes the configuration and the prompts of each evaluation suite of section `eval`.

Fields that a suite does not set are the run's, whose reward and environment workers serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rhymeflow.config import Config, EnvironmentConfig, EvalSuite, RewardFunction
from rhymeflow.core.types import HELD_OUT, SuiteName
from rhymeflow.data.encode import PromptEncoder, Tokenizer, Tools
from rhymeflow.data.files import read_rows
from rhymeflow.data.generators import derived_seed, generate, is_generator
from rhymeflow.data.load import EVAL_SIZE, GENERATED_COLUMN, load_prompts
from rhymeflow.data.prompts import Prompt, checked
from rhymeflow.errors import UserError, nearest
from rhymeflow.suites.figures import REWARD, ks_of_pass


@dataclass(frozen=True)
class Suite:
    """A suite: its entry in section `eval`, and the configuration that it is evaluated with."""

    section: EvalSuite
    config: Config

    @property
    def name(self) -> str:
        """The suite's name, as in metrics and `--suite`."""
        return self.section.name

    @property
    def n(self) -> int:
        """Number of answers to each prompt."""
        return self.section.n


@dataclass(frozen=True)
class SuitePrompts(Suite):
    """A suite with its prompts; `prompt_ids[i]` are the tokens of `prompts[i]`."""

    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    encoder: PromptEncoder


def prompts_of(suite: Suite, held_out: list[Prompt] | None = None) -> list[Prompt]:
    """Read or generate a suite's prompts, at least one. `held_out`: the run's held-out prompts, if
    loaded already. Raises `UserError` if the source, one of its rows or a size is wrong."""
    section, data, seed = suite.section, suite.config.data, suite.config.run.seed
    source, size, where = section.source, section.size, f"eval.suites: {suite.name}"
    is_of_run = source == data.source and section.options in ({}, data.options)
    if source is None or (is_generator(source) and is_of_run):
        prompts, source = _held_out_of_run(suite, held_out), "the held-out set"
    elif is_generator(source):
        count, own_seed = size or EVAL_SIZE, derived_seed("eval", seed)
        rows = generate(source, section.options, own_seed, 0, count, f"{where}: source")[1]
        prompts = checked(rows, GENERATED_COLUMN)
    else:
        if section.options:
            raise UserError(f"{where}: options are for generators, not for files")
        prompts = checked(read_rows(Path(source), f"{where}: source"), data.prompt_column)
    if size is not None and size > len(prompts):
        raise UserError(f"{where}: size = {size}, but {source} has {len(prompts)} rows")
    return prompts[:size]


def _held_out_of_run(suite: Suite, held_out: list[Prompt] | None) -> list[Prompt]:
    """Return the run's held-out prompts; of a generator, as many as the suite's `size` asks for. If
    the suite names the run's generator as its source, `data.eval_source` does not count."""
    data, seed, size = suite.config.data, suite.config.run.seed, suite.section.size
    if suite.section.source is not None and data.eval_source is not None:
        data, held_out = data.model_copy(update={"eval_source": None}), None
    prompts = load_prompts(data, seed)[1] if held_out is None else held_out
    if (size or 0) > len(prompts) and is_generator(data.eval_source or data.source):
        prompts = load_prompts(data.model_copy(update={"eval_size": size}), seed)[1]
    if not prompts:
        reason = "no prompts are held out (data.eval_size = 0); give a source"
        raise UserError(f"eval.suites: {suite.name}: {reason}")
    return prompts


def chosen(config: Config, names: Sequence[str]) -> list[Suite]:
    """Return the suites of section `eval`, or only those in `names`. Raises `UserError` if there is
    no such suite, or if one has neither reward functions nor environments."""
    suites = {suite.name: suite for suite in config.eval.suites}
    for name in names:
        if name not in suites:
            raise UserError(f"--suite {name}: there is no such suite{nearest(name, suites)}")
    wanted = dict.fromkeys(names) or suites
    return [Suite(suites[name], _configuration(config, suites[name])) for name in wanted]


def of_run(config: Config) -> list[Suite]:
    """Return the suites that a run of `config` evaluates: its held-out prompts first, then those of
    section `eval` that have `steps`; all of them if the run does not train. Raises `UserError` if
    one has neither reward functions nor environments."""
    suites = [suite for suite in config.eval.suites if suite.steps or not config.learner.is_used]
    if config.learner.is_used and config.data.eval_size != 0:
        suites.insert(0, EvalSuite(name=HELD_OUT))
    return [Suite(suite, _configuration(config, suite)) for suite in suites]


def _configuration(config: Config, suite: EvalSuite) -> Config:
    """The run's configuration, with the fields that the suite sets."""
    sampling = {
        name: value
        for name in ("temperature", "top_p", "top_k", "max_completion_length")
        if (value := getattr(suite, name)) is not None
    }
    if suite.n == 1:
        sampling = {"temperature": config.run.eval_temperature} | sampling
    changes: dict[str, dict[str, object]] = {"rollout": sampling}
    if suite.functions is not None:
        changes["reward"] = {"functions": suite.functions}
    if suite.environments is not None:
        changes["environment"] = {"classes": suite.environments, "tools": ()}
    changed = config.changed(**changes)
    if not changed.reward.functions and not changed.environment.judges:
        raise UserError(f"eval.suites: {suite.name}: neither functions nor environments reward it")
    return changed


def check_best_metric(config: Config) -> None:
    """Raise `UserError` unless a run of `config` has the metric `run.best_metric`. The default is
    accepted even if nothing is evaluated; then no checkpoint is the best."""
    metric, names = config.run.best_metric, [REWARD]
    for suite in of_run(config):
        figures = [f"avg@{suite.n}", *(f"pass@{k}" for k in ks_of_pass(suite.n))]
        figures += [f"maj@{suite.n}"] if suite.n > 1 else []
        names += [f"eval/{suite.name}/{figure}" for figure in figures]
    if metric not in names:
        raise UserError(
            f"run.best_metric: given {metric!r}, and this run has {', '.join(names)}"
            f"{nearest(metric, names)}"
        )


# -- a run and its suites --------------------------------------------------------------------------

RUN: SuiteName = ""
"""The run itself, in place of a suite's name. Its reward functions and environments also serve
suites that have none."""


def reward_sections(config: Config) -> dict[SuiteName, tuple[RewardFunction, ...]]:
    """Return the reward functions of the run (`RUN`), then of each suite that sets its own."""
    suites = [suite for suite in of_run(config) if suite.section.functions is not None]
    return {RUN: config.reward.functions} | {s.name: s.config.reward.functions for s in suites}


def functions_of(config: Config, suite: SuiteName) -> range:
    """Return the indices of a suite's functions in the concatenated `reward_sections`."""
    sections = reward_sections(config)
    wanted, first = suite if suite in sections else RUN, 0
    for name, functions in sections.items():
        if name == wanted:
            return range(first, first + len(functions))
        first += len(functions)
    raise AssertionError(wanted)


def environment_sections(config: Config) -> dict[SuiteName, EnvironmentConfig]:
    """Return section `environment` of the run, then of each suite that sets its own classes."""
    suites = [suite for suite in of_run(config) if suite.section.environments is not None]
    return {RUN: config.environment} | {suite.name: suite.config.environment for suite in suites}


def uses_environments(config: Config) -> bool:
    """Whether the run or one of its suites uses environments, so that responses have turns."""
    return any(section.is_used for section in environment_sections(config).values())


def load_suites(
    config: Config,
    held_out: list[Prompt] | None,
    tokenizer: Tokenizer,
    max_length: int,
    tools: Mapping[SuiteName, Tools],
) -> dict[SuiteName, SuitePrompts]:
    """Read and encode the prompts of the suites that a run of `config` evaluates, by suite name.

    `held_out`: the run's held-out prompts, if loaded already. `max_length`: the model's context, in
    tokens. `tools`: each suite's tools, for the chat template. Raises `UserError` if prompts cannot
    be read or generated, or do not fit the model's context."""
    loaded, suites = {}, of_run(config)
    if held_out is None and any(suite.section.source is None for suite in suites):
        held_out = load_prompts(config.data, config.run.seed)[1]
    for suite in suites:
        longest = suite.config.rollout.max_completion_length
        if longest >= max_length:
            raise UserError(
                f"suite {suite.name}: max_completion_length = {longest} leaves no room for a "
                f"prompt in the model's context of {max_length} tokens"
            )
        room = max_length - longest
        encoder = PromptEncoder(tokenizer, suite.config.data, room, tools.get(suite.name))
        prompts = prompts_of(suite, held_out)
        ids = [encoder.encode(prompt) for prompt in prompts]
        loaded[suite.name] = SuitePrompts(suite.section, suite.config, prompts, ids, encoder)
    return loaded
