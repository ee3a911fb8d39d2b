"""Checks a configuration before a run begins. Nothing is written.

`before_start` takes milliseconds: it runs no reward function, reads no weights and loads no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from rhymeflow import build, environments, placement
from rhymeflow.config import Config, LearnerConfig, LoraConfig, RewardFunction
from rhymeflow.config.algorithms import ALGORITHMS
from rhymeflow.data.encode import Tokenizer
from rhymeflow.data.files import check_source
from rhymeflow.data.generators import is_generator
from rhymeflow.data.load import RunPrompts, check_sources
from rhymeflow.data.prompts import Prompt, told
from rhymeflow.engine.vllm.installed import ADAPTER_RANKS, check_installed
from rhymeflow.environments.template import template_in
from rhymeflow.errors import UserError, within
from rhymeflow.models.adapter_files import ALL_LINEAR, adapter_for, check_trained, lost_dropout
from rhymeflow.models.source import check_files, other_base
from rhymeflow.reward.functions import BUILT_IN, Judge
from rhymeflow.reward.trial import tried
from rhymeflow.sandbox import programs
from rhymeflow.store import previous_run
from rhymeflow.suites.suite import (
    RUN,
    SuitePrompts,
    check_best_metric,
    environment_sections,
    load_suites,
    reward_sections,
)
from rhymeflow.utils.cores import can_stay_on
from rhymeflow.utils.user_modules import check_file, names_file

LEAST_PROCESS = 200_000_000
"""Least bytes of an instance's or a rank's process: Python and torch alone."""
LEAST_SEQUENCE = 1_000
"""Least bytes that an instance reserves per response that it may decode at a time."""
LEAST_HISTORY = 58
"""Least bytes of the history index per token."""


class Checked(NamedTuple):
    """The inputs that a run would load."""

    tokenizer: Tokenizer
    prompts: RunPrompts
    suites: dict[str, SuitePrompts]
    longest_prompt: int  # tokens
    rewards: list[str]
    """For each reward function, suites' included, a line with the result of a trial call."""
    notes: list[str]
    """What a user should know before the run, one line each."""


def before_start(config: Config) -> None:
    """Raise `UserError` unless everything exists that the configuration names: files, functions,
    the cost model and the strategies."""
    if config.runtime == "ray" and config.rollout.python is not None:
        raise UserError(
            "rollout.python: with runtime = 'ray' an instance runs under the Python of its node"
        )
    previous_run.check(config.drafting.history_run, "drafting.history_run")
    check_files(config.model)
    if config.teacher_model is not None:
        with within("learner.distillation.teacher"):
            check_files(config.teacher_model)
    if isinstance(config.data.chat_template, str):
        template_in(config.data.chat_template)
    check_adapter(config)
    if config.learner.is_used:
        check_sources(config.data)
    check_best_metric(config)
    _check_own_parts(config.learner, config.rollout.max_completion_length)
    for suite in config.eval.suites:
        if suite.steps and suite.source is not None and not is_generator(suite.source):
            check_source(Path(suite.source), f"eval.suites: {suite.name}: source")
    for function in chain.from_iterable(reward_sections(config).values()):
        _check_name(function)
    environments.check_names(config)
    build.schedule(config)
    if config.runtime == "local":
        check_machine(config)
    check_workers_here(config)


def _check_own_parts(learner: LearnerConfig, longest: int) -> None:
    """Raise `UserError` if a part of the algorithm that no named one has cannot be used."""
    names = "advantage", "ratio", "surrogate", "loss_type"
    usual = {(name, parts[name]) for parts in ALGORITHMS.values() for name in names}
    if not usual.issuperset((name, getattr(learner, name)) for name in names):
        from rhymeflow.learner.algorithms.losses import check_parts  # loads torch

        check_parts(learner, longest)


def check_adapter(config: Config) -> None:
    """Raise `UserError` if the adapter's files are not there, or it cannot be used in this way."""
    model = config.model
    if config.learner.is_used:
        check_trained(model)
    adapter = adapter_for(model)
    if adapter is None:
        return
    if adapter.modules_to_save and config.learner.is_used and config.learner.needs_start:
        raise UserError(
            f"learner.beta > 0 or teacher start: not with {adapter.modules_to_save[0]!r}, which "
            "model.lora trains whole (modules_to_save): what it was at the start is not kept"
        )
    if config.rollout.engine != "vllm":
        return
    if adapter.quantization:
        raise UserError("rollout.engine = 'vllm': not with model.quantization; 'native' is")
    if adapter.modules_to_save:
        raise UserError(
            f"rollout.engine = 'vllm': has no place for {adapter.modules_to_save[0]!r}, which the "
            "adapter trains whole (modules_to_save); rollout.engine = 'native' does"
        )
    if adapter.rank > ADAPTER_RANKS[-1]:
        raise UserError(
            f"rollout.engine = 'vllm': the adapter has rank {adapter.rank}; at most "
            f"{ADAPTER_RANKS[-1]} is possible"
        )


def walls_note(config: Config) -> str | None:
    """Return a sentence about the walls around programs of the policy, if the run has any."""
    names = [each.function for part in reward_sections(config).values() for each in part]
    for section in environment_sections(config).values():
        names += [*section.tools, *(each.environment for each in section.classes)]
    return programs.described() if any("code_execution" in each for each in names) else None


def check_workers_here(config: Config) -> None:
    """Raise `UserError` if workers run on this machine, and it has too few GPUs or no vLLM."""
    if not is_elsewhere(config):
        placement.gpus_here(config)
        check_installed(config)


def is_elsewhere(config: Config) -> bool:
    """Whether workers run on the nodes of a cluster, which this machine need not be like; a Ray
    without `ray.address` is of this machine alone."""
    return config.runtime == "ray" and config.ray.address is not None


def as_here(config: Config) -> Config:
    """Return `config` for what this machine computes itself, which may have no GPU though the
    nodes of the cluster have."""
    if not is_elsewhere(config):
        return config
    return config.changed(model={"device": "auto"}, learner={"attention": "auto"})


def everything(config: Config) -> Checked:
    """Load all inputs of a run except the weights; `before_start` must have passed. Raises
    `UserError` if the run would not start."""
    if not config.learner.is_used:
        raise UserError("learner.max_steps = 0: nothing is trained, and `rhymeflow eval` evaluates")
    from rhymeflow.environments.agents import check_program
    from rhymeflow.environments.episodes import Episodes
    from rhymeflow.environments.template import load_settled
    from rhymeflow.learner.policy import check_attention  # loads torch, so not before
    from rhymeflow.models.load import check_end, check_engine
    from rhymeflow.models.precision import resolve_device
    from rhymeflow.models.tokenizer import max_length, unseen_tokens

    here = as_here(config)
    check_attention(here.learner, resolve_device(here.model))
    check_engine(config)
    tokenizer, settled = load_settled(config)
    notes = [settled]
    check_end(config.model, tokenizer)
    if config.rollout.engine == "vllm" and not is_elsewhere(config):
        from rhymeflow.engine.vllm.supported import ask, check_supported

        check_supported(config, ask(config))
    prove(here, has_engine=config.rollout.engine == "native")
    _check_frozen(config)
    # Output of the user's files must not mix with the configuration on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        tools = environments.all_tool_schemas(config)
        longest = max_length(config.model)
        prompts = RunPrompts.load(config, tokenizer, longest, tools[RUN])
        suites = load_suites(config, prompts.held_out, tokenizer, longest, tools)
        _check_teacher(here, tokenizer, prompts.train)
        if config.environment.agent is None:
            Episodes(config, environment_sections(config), tokenizer)
        else:
            check_program(config, tokenizer)
        sources = {RUN: (config, prompts.train)}
        sources |= {name: (suite.config, suite.prompts) for name, suite in suites.items()}
        for name, (section, rows) in sources.items():
            _check_rows(section, rows)
            notes.append(environments.check_calls(config, tokenizer, rows, tools[name]))
    lengths = [len(prompts.encoder.encode(each)) for each in prompts.train]
    lengths += [len(ids) for suite in suites.values() for ids in suite.prompt_ids]
    rewards: list[str] = []
    encode = partial(tokenizer.encode, add_special_tokens=False)
    for name, functions in reward_sections(config).items():
        first = sources[name][1][0]
        rewards += tried(config, functions, first, encode, partial(print, file=sys.stderr, end=""))
    notes += [unseen_tokens(config, tokenizer), other_base(config.model), walls_note(config)]
    notes += [lost_dropout(config.model), config.learner.bounds_without_effect]
    said = list(dict.fromkeys(filter(None, notes)))
    return Checked(tokenizer, prompts, suites, max(lengths), rewards, said)


def prove(config: Config, *, has_engine: bool) -> None:
    """Compare the learner, and a native engine, with a small random model of this architecture,
    and with an adapter of all its layers if it has one. Raises `UserError` if their results differ
    from the model's."""
    from rhymeflow.engine.native.engine import Engine
    from rhymeflow.learner.policy import proved_scorer
    from rhymeflow.models.load import small_model
    from rhymeflow.models.lora import attach, draw_adapter, quantize, resolved_adapter
    from rhymeflow.models.precision import resolve_device
    from rhymeflow.models.rope import fix_longrope

    model = fix_longrope(small_model(config.model, device=resolve_device(config.model)), config)
    if (adapter := resolved_adapter(config.model)) is not None:
        everywhere = replace(adapter, target_modules=(ALL_LINEAR,), modules_to_save=())
        if adapter.quantization:
            quantize(model, everywhere)
        draw_adapter(attach(model, replace(everywhere, directory=None)))
    if has_engine:
        Engine(
            model, seed=0, max_num_seqs=4, max_prefill_tokens=64, instance="check", version=0
        ).prove()
    proved_scorer(model, config.rollout, config.learner)


def _check_frozen(config: Config) -> None:
    """Raise `UserError` if a pattern of `learner.frozen_parameters` fits no parameter that is
    trained, or then none is."""
    from rhymeflow.learner.optimizer import freeze
    from rhymeflow.models.load import load_config, shapes_of
    from rhymeflow.models.lora import attach

    if patterns := config.learner.frozen_parameters:
        model = shapes_of(load_config(config.model))
        if (adapter := adapter_for(config.model)) is not None:
            attach(model, adapter)
        freeze(model, patterns)


def _check_teacher(config: Config, tokenizer: Tokenizer, prompts: list[Prompt]) -> None:
    """Raise `UserError` unless the teacher is a model that is supported, with the policy's tokens,
    and rows have the columns of its prompt."""
    from rhymeflow.models.tokenizer import check_teacher  # loads transformers

    if (model := config.teacher_model) is not None:
        with within("learner.distillation.teacher"):
            check_teacher(model, tokenizer)
            own = {"name": model.name, "lora": LoraConfig()}
            prove(config.changed(model=own), has_engine=False)
    if (template := config.learner.distillation.prompt) is not None:
        for each in prompts:
            told(each, template)


def check_machine(config: Config) -> None:
    """Raise `UserError` if this machine cannot have the cores, processes, `max_num_seqs` or history
    asked for, each by itself. A dry run shows whether they fit together."""
    rollout, ranks = config.rollout, config.learner.num_ranks
    if config.learner.cpus is not None:
        can_stay_on(config.learner.cpus, "learner.cpus")
    for number, cpus in enumerate(rollout.cpus or ()):
        can_stay_on(cpus, f"rollout.cpus.{number}")
    tokens = config.drafting.history_tokens if config.drafting.window != "off" else 0
    for field, count, what, bytes_each in (
        ("learner.num_ranks", ranks, "so many processes take", LEAST_PROCESS),
        ("rollout.num_instances", rollout.num_instances, "so many processes take", LEAST_PROCESS),
        ("rollout.max_num_seqs", rollout.max_num_seqs, "so many responses take", LEAST_SEQUENCE),
        ("drafting.history_tokens", tokens, "their index takes", LEAST_HISTORY),
    ):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        needed = count * bytes_each
        if needed > available:
            raise UserError(
                f"{field} = {count:,}: {what} at least {needed / 1e9:,.0f} GB, and this machine "
                f"has {available / 1e9:,.0f} GB of memory"
            )


def _check_name(function: RewardFunction) -> None:
    spec = function.function
    if names_file(spec):
        check_file(spec, f"reward function {spec}")
    elif spec not in BUILT_IN and "." not in spec.strip("."):
        Judge(function)  # raises if the name is not a recipe's either


def _check_rows(config: Config, prompts: list[Prompt]) -> None:
    """Raise `UserError` unless each row has the columns that environments and rewards need."""
    environments.check_rows(config, prompts)
    for judge in map(Judge, config.reward.functions):
        for each in prompts:
            with within(each.where):
                judge.check_columns(each.columns)
