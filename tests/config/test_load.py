"""Settings: what is read, what is written back, and each mistake's message."""

# ruff: noqa: E501 (the table of mistakes reads best with one a line)
import json
import math
import re
import types
from operator import attrgetter
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rhymeflow.config import (
    Config,
    EnvironmentClass,
    LearnerConfig,
    RewardFunction,
    Section,
    fields,
    load,
    yaml,
)
from rhymeflow.config.fields import USUAL, field_paths, path_named, section_of
from rhymeflow.config.load import (
    build_config,
    dump_config,
    list_recipes,
    parse_config,
    read_config,
    split_overrides,
)
from tests.refused import refusal

# -- round trip -----------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        ["1e-5", "null", "~", "", "yes", "on", "0x1", "1_0", "2026-01-01", "- a", "#", ": "]
    ),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def values_of(annotation: Any, limits: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Valid values of a field's type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(
            args[0], limits + tuple(args[1].metadata if hasattr(args[1], "metadata") else args[1:])
        )
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(arg, limits) for arg in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is dict and args[0] is not str:
        return st.dictionaries(*map(values_of, args), max_size=3)
    if origin is dict:
        return st.dictionaries(TEXTS, JSON, max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return sections(annotation)
    if annotation is type(None):
        return st.none()
    if annotation in (int, float):
        limited = Annotated[annotation, *limits] if limits else annotation
        return st.from_type(limited).filter(math.isfinite)
    return {str: TEXTS, bool: st.booleans()}[annotation]


def sections(section: type[Section]) -> st.SearchStrategy[Any]:
    parts = {n: values_of(f.annotation, tuple(f.metadata)) for n, f in section.model_fields.items()}
    return st.fixed_dictionaries({}, optional=parts)


@settings(max_examples=50)
@given(sections(Config))
@example({"name": "\x85"})
@example({"data": {"options": {"": float("inf"), "a": [-float("inf")]}}})
@example({"name": "a\u2028b \u2029"})
def test_what_is_written_reads_back_equal(values):
    try:
        config = Config(**values)
    except ValidationError:
        assume(False)
    assert fields.validate(yaml.read(dump_config(config), "it")[1], fields.Origin("it")) == config


@given(TEXTS.filter(lambda text: text != "null"))
def test_a_text_field_gets_an_override_as_it_was_typed(text):
    assert parse_config("", {"data.system_prompt": text}).data.system_prompt == text


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "path", "expected"),
    [
        ("learner: {beta: 0.1}", {"learner.beta": "0.5"}, "learner.beta", 0.5),
        ("learner: {learning_rate: 1e-4}", {}, "learner.learning_rate", 1e-4),
        ("data: {options: {a: 1}}", {"data.options.b": "[1, x]"}, "data.options",
         {"a": 1, "b": [1, "x"]}),
        ("", {"rollout.cpus": "[[1]]"}, "rollout.cpus", ((1,),)),
        ("", {"data.options": "{foo: 1}"}, "data.options", {"foo": 1}),
        ("reward: {functions: [{function: a.b}]}", {"reward.functions.0.weight": "2"},
         "reward.functions", (RewardFunction(function="a.b", weight=2.0),)),
        ("reward: {functions: [length, a.b]}", {"reward.functions.1.weight": "2"},
         "reward.functions",
         (RewardFunction(function="length", per="response"),
          RewardFunction(function="a.b", weight=2.0))),
        # An alias of what is overridden stays.
        ("data: {options: &o {a: 1}}\nreward: {functions: [{function: f.g, options: *o}]}",
         {"data.options.a": "2"}, "reward.functions",
         (RewardFunction(function="f.g", options={"a": 1}),)),
        # An empty section means its defaults, and null takes text away.
        ("learner:\n  # beta: 1\n", {}, "learner", LearnerConfig()),
        ("data: {system_prompt: hello}", {"data.system_prompt": "null"}, "data.system_prompt", None),
        *(("", {"data.chat_template": text}, "data.chat_template", value)
          for text, value in {"true": True, "null": None, "a.jinja": "a.jinja"}.items()),
        # What is loaded may be named alone.
        *(("", {"environment.classes": text}, "environment.classes",
           (EnvironmentClass(environment="file.py:Class"),))
          for text in ("file.py:Class", "[file.py:Class]", "{environment: file.py:Class}")),
        # One Python by two names; a Python that is an option of something else.
        *((f"environment: {{agent: '{agent}', agent_python: /a/b/../b}}",
           {"data.source": source, "data.options": f"{{python: {python}}}"},
           "environment.agent_python", "/a/b/../b")
          for agent, source, python in [("verifiers", "verifiers:x", "/a/b"),
                                        ("verifiers", "x.jsonl", "/c"),
                                        ("x.py:f", "verifiers:x", "/c")]),
    ],
)  # fmt: skip
def test_what_is_read(text, overrides, path, expected):
    assert attrgetter(path)(parse_config(text, overrides)) == expected


def test_values_may_be_nested_to_fifty_levels():
    lists = "[" * 48 + "]" * 48
    read = parse_config(f"data: {{options: {{a: {lists}}}}}").data.options["a"]
    assert json.dumps(read) == lists


@pytest.mark.parametrize("text", ["on", "no", "y", "2026-01-01", "1_000", "012:30", "=", "0b1"])
def test_words_stay_words(text):
    assert parse_config(f"name: {text}").name == text


def test_one_value_is_a_list_of_one():
    """On the command line, in a file and from Python."""
    given = {"run.report_to": "wandb", "environment.tools": "x.py:f", "learner.cpus": "3"}
    for config in (
        parse_config("", given),
        parse_config("run: {report_to: wandb}\nenvironment: {tools: 'x.py:f'}\nlearner: {cpus: 3}"),
        build_config({"report_to": "wandb", "tools": "x.py:f", "learner.cpus": 3}, where="T"),
    ):
        assert config.run.report_to == ("wandb",)
        assert config.environment.tools == ("x.py:f",)
        assert config.learner.cpus == (3,)
        assert parse_config(dump_config(config)) == config
    cpus = {"rollout.cpus": "[0, 1]", "rollout.num_instances": "2"}
    assert parse_config("", cpus).rollout.cpus == ((0,), (1,))


def test_a_file_may_name_what_options_name():
    text = "model: models/tiny\ndata: sums.csv\nreward: judge.py:even\nschedule: partial"
    config = parse_config(text, {"data.size": "3"})
    assert (config.model.name, config.data.source, config.data.size) == (
        "models/tiny",
        "sums.csv",
        3,
    )
    assert [each.function for each in config.reward.functions] == ["judge.py:even"]
    assert config.schedule.name == "partial"
    for option, path in load.SHORT.items():
        if option not in ("history", "lora"):
            section = section_of(Config.model_fields[option].annotation)
            assert path == f"{option}.{section.by_name}"


def test_usual_names_are_those_of_fields():
    for name in USUAL:
        assert path_named(name) in field_paths()
    assert not USUAL.keys() & {path.rpartition(".")[2] for path in field_paths()}


def test_split_overrides():
    arguments = ["demo", "--learner.beta", "-1", "--dry-run", "--name=x", "--schedule=partial"]
    rest, overrides = split_overrides(arguments)
    assert rest == ["demo", "--dry-run"]
    assert overrides == {"learner.beta": "-1", "name": "x", "schedule.name": "partial"}


# -- mistakes -------------------------------------------------------------------------------------

MISTAKES = {
    # file text, overrides, what the message must hold
    "no reward": ("", {"reward.functions": "[]"}, ["reward.functions: given [], should name at least one function"]),
    "a list in itself": ("", {"data.options": "{a: &a [*a]}"}, ["--data.options:1:5: contains itself"]),
    "a mapping in itself": ("data:\n  options: &a {b: *a}", {}, ["f.yaml:2:12: contains itself"]),
    "lists without end": ("name: " + "[" * 5000, {}, ["f.yaml:1:", "nested more than 50 levels deep"]),
    "deep mappings": ("{a: " * 60 + "1" + "}" * 60, {}, ["f.yaml:1:202: nested more than 50 levels deep"]),
    "a number without end": ("", {"learner.max_steps": "9" * 6000}, ["--learner.max_steps:1:1: an integer of 6,000 characters"]),
    "one in hexadecimal": ("run: {seed: 0x" + "f" * 6000 + "}", {}, ["f.yaml:1:13: an integer of 6,002 characters"]),
    "more than a machine counts": ("", {"learner.max_steps": "9" * 60}, ["--learner.max_steps: ", "less than or equal to 9223372036854775807"]),
    "no count": ("", {"drafting.history_tokens": "1e15"}, ["--drafting.history_tokens: ", "an integer"]),
    "a number that is none": ("", {"learner.beta": ".nan"}, ["--learner.beta: given NaN, should be a finite number"]),
    "a weight that is none": ("reward: {functions: [{function: a.b, weight: .inf}]}", {}, ["f.yaml:1: reward.functions.0.weight: ", "finite"]),
    "unknown field": ("learner:\n  learning_rte: 3", {}, ["f.yaml:2: learner.learning_rte", "given 3", "did you mean learner.learning_rate?"]),
    "field of another section": ("learner: {num_generations: 3}", {}, ["f.yaml:1: ", "did you mean rollout.num_generations?"]),
    "unknown section": ("", {"learnr.beta": "1"}, ["--learnr.beta: ", "did you mean learner.beta?"]),
    "verl's fields": ("", {"actor_rollout_ref.actor.clip_ratio_high": "0.28", "algorithm.adv_estimator": "grpo"}, ["--actor_rollout_ref.actor.clip_ratio_high: there is no such field; did you mean learner.epsilon_high?; --algorithm.adv_estimator: there is no such field; did you mean learner.algorithm?"]),
    "AReaL's file": ("gconfig: {n_samples: 4}\nactor: {eps_clip: 0.4}", {}, ["f.yaml: is a configuration of AReaL (it has the section 'gconfig'); docs/from-others.md has the"]),
    "empty section that is none": ("learnr:\n  # beta: 1", {}, ["f.yaml:1: learnr", "did you mean learner?"]),
    "null in place of a name": ("name:\nruntime:", {}, ["f.yaml:1: name: given null"]),
    "field without its section": ("beta: 1", {}, ["f.yaml:1: beta", "did you mean learner.beta?"]),
    "wrong choice": ("", {"learner.kl_in": "lost"}, ['--learner.kl_in: given "lost"', "allowed: loss, reward", "did you mean loss?"]),
    "below float32": ("", {"rollout.temperature": "1e-40"}, ["--rollout.temperature: given 1e-40, should be 0 (greedy) or at least 1e-06"]),
    "below float32, a suite": ("eval: {suites: [{name: a, temperature: 1e-9}]}", {}, ["f.yaml:1: eval.suites.0.temperature: given 1e-09"]),
    "out of range": ("rollout:\n\n  top_p: 1.5", {}, ["f.yaml:3: rollout.top_p: given 1.5", "less than or equal to 1"]),
    "not a number": ("", {"learner.max_steps": "many"}, ['--learner.max_steps: given "many"', "an integer"]),
    "true is no number": ("", {"learner.max_steps": "true"}, ["--learner.max_steps: given true", "an integer"]),
    "half an integer": ("", {"learner.max_steps": "1.5"}, ["given 1.5", "an integer"]),
    "not a section": ("learner: 3", {}, ["f.yaml:1: learner: given 3", "a mapping of fields"]),
    "not a mapping": ("- 1", {}, ["f.yaml", "a mapping of sections"]),
    "in a list": ("run:\n  report_to:\n  - tensorbord", {}, ["f.yaml:3: run.report_to.0", "did you mean tensorboard?"]),
    "missing": ("reward: {functions: [{weight: 2}]}", {}, ["reward.functions.0.function: is missing"]),
    "no such index": ("reward: {functions: [{function: a.b}]}", {"reward.functions.3.weight": "1"}, ["--reward.functions.3.weight", "a list of 1"]),
    "below a scalar": ("", {"learner.beta": "1", "learner.beta.x": "2"}, ["--learner.beta.x"]),
    "fields that do not fit": ("", {"rollout.cpus": "[[0], [1]]"}, ["rollout.cpus names 2 sets", "rollout.num_instances = 1"]),
    "two mistakes": ("", {"learner.beta": "-1", "run.seed": "x"}, ["--learner.beta: given -1", "; ", '--run.seed: given "x"']),
    "syntax": ("learner:\n  beta: [1", {}, ["f.yaml:2:", "expected"]),
    "tab": ("learner:\n\tbeta: 1", {}, ["f.yaml:2:1: "]),
    "key twice": ("learner:\n  beta: 1\n  beta: 2", {}, ["f.yaml:3:3: 'beta' is given twice"]),
    "key is no name": ("data: {options: {1: 2}}", {}, ["f.yaml:1:18: the key 1 is not a name"]),
    "a tag that does not fit": ("learner: {max_steps: !!int x}", {}, ["f.yaml:1:22: 'x' is no int"]),
    "foreign tag": ("name: !!python/name:os.system", {}, ["f.yaml:1:7: "]),
    "two documents": ("name: a\n---\nname: b", {}, ["f.yaml:2:1: "]),
    "a mapping is no text": ("", {"data.options": "3"}, ["--data.options: given 3, should be a mapping"]),
    "ranks that are one": ("", {"learner.offload_optimizer": "true"}, ["needs learner.num_ranks of at least 2"]),
    "too few cores": ("", {"learner.num_ranks": "2", "learner.cpus": "[3]"}, ["learner.cpus = [3] is too few"]),
    "no rank": ("", {"learner.num_ranks": "0"}, ["learner.num_ranks: given 0, should be greater than 0"]),
    "constants are no settings": ("sft: {logging_steps: 5}", {"environment.max_concurrent": "2", "reward.start_timeout": "9"}, ["f.yaml:1: sft.logging_steps: there is no such field (given 5)", "--environment.max_concurrent: there is no such field", "--reward.start_timeout: there is no such field"]),
    "no YAML in an override": ("", {"learner.beta": "[1"}, ["--learner.beta:1:"]),
    "two that answer": ("environment: {agent: 'a.py:f', tools: 'x.py:f'}", {}, ["environment.agent: takes the place of environment.classes and environment.tools"]),
    "an agent writes its prompts": ("environment: {agent: [a, b]}", {"data.system_prompt": "be good"}, ["data.system_prompt: has no effect with environment.agent"]),
    "an agent cannot be cut": ("environment: {agent: a b}", {"schedule.on_stuck": "truncate"}, ["schedule.on_stuck = 'truncate': not with environment.agent yet"]),
    "an agent ends its own turns": ("environment: {agent: a b}", {"rollout.stop": "x"}, ["rollout.stop: not with an environment"]),
    "a text that all have": ("rollout: {stop: ['']}", {}, ["rollout.stop"]),
    "how long nothing takes": ("environment: {idle_timeout: 9}", {}, ["environment.idle_timeout: has no effect without environment.agent"]),
    "special tokens for nobody": ("environment: {agent: a b}", {"reward.functions": "[]", "rollout.skip_special_tokens": "false"}, ["rollout.skip_special_tokens: has no effect with environment.agent and without reward.functions"]),
    "an agent alone in its group": ("environment: {agent: a b}", {"reward.functions": "[]", "rollout.num_generations": "1"}, ["rollout.num_generations = 1 leaves no group to compare with"]),
    "an agent's own limits": ("environment: {agent: a b, timeout: 9}", {}, ["environment.timeout: has no effect with this environment.agent (agent_timeout and idle_timeout limit it)"]),
    "an agent is tried once": ("environment: {agent: a b, retries: 3}", {}, ["environment.retries: has no effect with this environment.agent"]),
    "an agent has tools of its own": ("environment: {agent: a b, on_tool_error: fail}", {}, ["environment.on_tool_error: has no effect with this environment.agent"]),
    "nothing is played": ("environment: {agent: classes}", {}, ["environment.agent = 'classes': there are no environment.classes"]),
    "played elsewhere": ("environment: {agent: classes, agent_python: /b, classes: 'a.py:B'}", {}, ["environment.agent_python: runs a function; the run's own Python plays classes"]),
    "a server is not played": ("environment: {agent: classes, tools: 'mcp:x'}", {}, ["environment.tools: mcp:x: not with environment.agent = 'classes' yet"]),
    "tasks of one Python, played by another": ("environment: {agent: verifiers, agent_python: /b}", {"data.source": "verifiers:x", "data.options": "{python: /a}"}, ["data: options: python is '/a' and environment.agent_python is '/b'; name one Python"]),
    "tasks of one Python, played by this": ("environment: {agent: verifiers}", {"data.source": "verifiers:x", "data.options": "{python: /a}"}, ["environment.agent_python is None"]),
    "a suite of another Python": ("environment: {agent: verifiers, agent_python: /a}", {"data.source": "verifiers:x", "data.options": "{python: /a}", "eval.suites": "[{name: y, source: 'verifiers:x', options: {python: /c}}]"}, ["eval.suites: y: options: python is '/c'"]),
    "an interpreter of nothing": ("", {"environment.agent_python": "python3"}, ["environment.agent_python: has no effect without environment.agent"]),
    "turns of nothing": ("environment: {max_turns: 3}", {}, ["f.yaml:1: environment.max_turns: has no effect without environment.classes, tools or agent"]),
    "failures that stop a run": ("", {"environment.tools": "a.py:f", "environment.max_consecutive_failures": "3"}, ["environment.max_consecutive_failures: has no effect without on_failure: drop"]),
    "rewards that stop a run": ("reward: {max_consecutive_failures: 3}", {}, ["reward.max_consecutive_failures: has no effect without on_failure: drop"]),
    "vLLM's, without it": ("", {"rollout.vllm_kv_cache_gb": "3"}, ["--rollout.vllm_kv_cache_gb: has no effect without rollout.engine: vllm"]),
    "a history of nothing": ("", {"drafting.history_run": "runs/a", "drafting.window": "off"}, ["drafting.history_run: has no effect without drafts"]),
    "nodes that are not there": ("cluster: {gpus_per_node: 4}", {}, ["cluster.gpus_per_node: has no effect without cluster.nodes"]),
    "answers between no turns": ("", {"simulation.workload.observation_tokens": "9"}, ["--simulation.workload.observation_tokens: has no effect without mean_turns above 1"]),
    "a checkpoint though nothing dies": ("simulation: {faults: {checkpoint_write_seconds: 9}}", {}, ["f.yaml:1: simulation.faults.checkpoint_write_seconds: has no effect without device_mtbf_hours"]),
    "who is back though nothing dies": ("simulation: {faults: {learner_seconds: 9}}", {}, ["f.yaml:1: simulation.faults.learner_seconds: has no effect without device_mtbf_hours"]),
    "a Ray that is not used": ("ray: {address: auto}", {}, ["ray.address: has no effect without runtime: ray"]),
}  # fmt: skip


def test_what_is_turned_off_keeps_its_fields():
    parse_config("drafting: {history_tokens: 9}", {"drafting.window": "off"})
    parse_config("environment: {max_turns: 3}\neval: {suites: [{name: a, environments: [a.B]}]}")
    of_vllm = "rollout: {engine: vllm, vllm_kv_cache_gb: 3}"
    assert parse_config(of_vllm, {"rollout.engine": "native"}).rollout.vllm_kv_cache_gb == 2


@pytest.mark.parametrize(("text", "overrides", "parts"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_line(text, overrides, parts):
    message = refusal(parse_config, text, overrides, where="f.yaml")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--learner.beta"], "--learner.beta: needs a value"),
        (["--learner.beta", "--dry-run"], "--learner.beta: needs a value"),
        (["--learner.beta", "1", "--learner.beta=2"], "--learner.beta: given twice"),
    ],
)
def test_a_mistaken_override_is_named(arguments, part):
    assert part in refusal(split_overrides, arguments)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "demo.yaml").write_text("# A demon-\n# stration.\n# Needs: no more.\nname: demo\n")
    monkeypatch.setattr(load, "RECIPES", recipes)
    assert list_recipes() == {"demo": "A demon- stration."}
    assert read_config("demo").name == "demo"
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    (tmp_path / "rl.toml").write_text("max_steps = 20\n[orchestrator]\nbatch_size = 128\n")
    for name, said in {
        "dmo": "did you mean demo? (recipes: demo)",
        str(tmp_path): "is a directory",
        str(tmp_path / "latin.yaml"): "latin.yaml: cannot be read",
        str(tmp_path / "rl.toml"): "is TOML, and a configuration is YAML; docs/from-others.md has",
        "learner.beta=1": "a field is given as --learner.beta VALUE",
        "trainer.save_freq=5": "a field is given as --trainer.save_freq VALUE; did you mean run.sa",
    }.items():
        assert said in refusal(read_config, name)


ITSELF: dict[str, Any] = {}
ITSELF["a"] = ITSELF


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"learning_rte": 1}, "did you mean learner.learning_rate"),
        ({"num_threads": 1}, "could be rollout.num_threads or learner.num_threads"),
        ({"beta": -1}, "T: learner.beta: given -1"),
        ({"learner.beta.x": 1}, "T: learner.beta.x: 0.0 has no part 'x'"),
        ({"reward.functions.3.weight": 1.0}, "'3' is not an index of a list of 1"),
        (
            {"beta": object()},
            "T: learner.beta: given <object.*>, a object, should be text, a number",
        ),
        ({"data.options": {1: 2}}, "T: data.options: the key 1 is not text"),
        ({"data.options": {"a": [{None: 2}]}}, "T: data.options.a.0: the key None is not text"),
        ({"data.options": {"a": {3}}}, r"T: data.options.a: given \{3\}, a set, should be text"),
        ({"data.options": ITSELF}, "T: data.options.a.a.*nested more than 50 levels deep"),
        ({"model.lora.alpha": 8.0}, "model.lora: alpha has no effect without `rank`"),
        ({"model.lora.adapter": "d", "model.lora.rank": 2}, "model.lora: rank is what the files"),
        (
            {"model.lora.rank": 2, "emulation.profile": "qwen3-8b-h800"},
            "model.lora: not with emulation.profile",
        ),
        (
            {"learner.optimizer": "muon", "num_ranks": 2},
            "learner.optimizer = 'muon': not with learner.num_ranks = 2 yet",
        ),
    ],
)
def test_build_names_mistakes(given, part):
    assert re.search(part, refusal(build_config, given, where="T"))


def test_names_alone_are_those_of_a_run():
    """Section `sft` has fields that are called as the learner's, and is no part of a run."""
    given = {"learning_rate": 1e-3, "max_steps": 7, "size": 5, "output_dir": "there"}
    config = build_config(given | {"rollout.num_threads": 2, "name": "mine"}, where="T")
    assert (config.learner.learning_rate, config.learner.max_steps) == (1e-3, 7)
    assert (config.data.size, config.run.output_dir) == (5, "there")
    assert (config.rollout.num_threads, config.name) == (2, "mine")
    assert config.sft == Config().sft
    config = build_config({"reward.functions.0.weight": 2.0}, where="T")
    assert config.reward.functions[0].weight == 2.0


@pytest.mark.parametrize(
    "made",
    [
        Config(sft={"max_steps": 5}),
        read_config("demo", {"sft.max_steps": "5"}),
        read_config("demo").changed(sft={"max_steps": 5}),
        build_config({"sft": {"max_steps": 5}}, where="T"),
    ],
)
def test_a_run_refuses_what_only_sft_reads_unless_a_file_has_it(made):
    said = "T: sft.max_steps: has no effect in a run; `rhymeflow sft` reads it"
    for each in (made, build_config({"beta": 0.1}, made, where="T")):
        assert refusal(fields.check_unread, each, "T") == said
    from_file = fields.as_written(made, "T")
    fields.check_unread(from_file, "T")
    assert from_file == made


def test_options_made_in_python_are_those_of_a_file():
    made = RewardFunction(function="a.b", options={"a": {1: 2}})
    config = Config(reward={"functions": (made,)})
    said = "T: reward.functions.0.options.a: the key 1 is not text"
    assert refusal(build_config, {"beta": 0.1}, config, where="T") == said
    assert refusal(fields.as_written, config, "T") == said


def test_a_mistake_of_the_command_line_is_not_put_down_to_the_file_alone():
    text, given = "model: {name: m}\ndata: {source: d}", {"model.quantization": "nf4"}
    said = refusal(parse_config, text, given, where="mine.yaml")
    assert said.startswith("mine.yaml:1 and --model.quantization: model: quantization has no effe")
