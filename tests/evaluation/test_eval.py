"""`rhymeflow eval` from the command line, against a plain model, which gives one token at a time
without any engine, and a plain loop."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rhymeflow import cli, recipes
from rhymeflow.config.fields import as_written
from rhymeflow.config.load import parse_config, read_config
from rhymeflow.data.load import load_prompts
from rhymeflow.engine.base import NoiseKey
from rhymeflow.engine.native import noise
from rhymeflow.evaluation import evaluate
from rhymeflow.recipes.demo import task as demo
from rhymeflow.recipes.guess import task as guess
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.suites.suite import chosen

Capture = pytest.CaptureFixture[str]
Refused = Callable[..., str]

JUDGE = """
def short(completions, **columns):
    return [1.0 / len(text) for text in completions]

def several(completions, **columns):
    return [float(len(completions))] * len(completions)
"""


EVALUATION = 2**31 - 1  # the epoch of the noise of held-out answers


class Oracle:
    """The model of a recipe, in float32."""

    def __init__(self, recipe: str) -> None:
        directory = recipes.directory(recipe)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def turn(
        self, prompt: str, tokens: list[int], row: int, sample: int, temperature: float, most: int
    ) -> list[int]:
        """What comes after `tokens`, up to the end of the turn or `most` tokens in all."""
        made, stream = list(tokens), noise.stream(0, NoiseKey(row, EVALUATION, sample))
        while len(made) < most:
            ids = torch.tensor([self.ids(prompt) + made])
            with torch.no_grad():
                logits = self.model(ids).logits[0, -1]
            if temperature:
                keys = noise.row_keys([stream], [len(made)], torch.device("cpu"))
                gumbel = -noise.exponentials(keys, len(logits))[0].log()
                logits = (logits / temperature).double() + gumbel
            made.append(int(logits.argmax()))
            if made[-1] == self.tokenizer.eos_token_id:
                break
        return made[len(tokens) :]


def evaluated(capsys: Capture, *arguments: object) -> dict[str, Any]:
    """What `rhymeflow eval --json` says of each suite."""
    assert cli.main(["eval", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["suites"]
    assert all(suite.pop("seconds") > 0 for suite in found.values())
    return found


def held_out(recipe: str, count: int) -> list[Any]:
    config = read_config(recipe)
    return load_prompts(config.data, config.run.seed)[1][:count]


def test_the_demo_greedily_is_what_a_plain_model_says(capsys, tmp_path):
    oracle, rewards, lengths, cut = Oracle("demo"), [], [], []
    for prompt in held_out("demo", 4):
        tokens = oracle.turn(prompt.prompt, [], prompt.row, 0, 0.0, 100)
        answer = prompt.columns["answer"]
        rewards += demo.reward([prompt.prompt], [oracle.text(tokens)], [answer])
        lengths.append(len(tokens))
        cut.append(tokens[-1] != oracle.tokenizer.eos_token_id)
    run, short = tmp_path / "run", ("--rollout.max_completion_length", 100)
    arguments = ("recipe:demo", "--size", 4, *short, "--run.output_dir", run)
    found = evaluated(capsys, *arguments)["held_out"]
    assert found["prompts"] == 4
    assert found["avg@1"] == found["pass@1"] == sum(rewards) / 4
    assert found["mean_length"] == sum(lengths) / 4
    assert found["clipped_ratio"] == sum(cut) / 4
    assert not any(name.startswith("maj@") for name in found)
    # It was a run without a learner, and stays where it was named.
    logs = {each.stem for each in (run / "logs" / "attempt-1").iterdir()}
    assert logs == {"policy", "reward", "rollout-0"}
    assert not (run / "checkpoints").exists()
    with closing(TrajectoryReader(run / "events.db")) as reader:
        answers = reader.query("SELECT reward FROM evaluations ORDER BY row")
    assert [reward for (reward,) in answers] == rewards


def test_an_adapter_is_evaluated_as_peft_computes_it(capsys, tmp_path):
    oracle = Oracle("demo")
    torch.manual_seed(2)
    shape = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(oracle.model, shape)
    with torch.no_grad():
        for name, each in adapted.named_parameters():
            if "lora_B" in name:
                each *= 0.3  # as drawn, hardly a response ends
    adapted.save_pretrained(tmp_path / "adapter")
    plain, rewards, lengths = Oracle("demo"), [], []
    oracle.model, differ = adapted, 0
    for prompt in held_out("demo", 4):
        tokens, others = (
            each.turn(prompt.prompt, [], prompt.row, 0, 0.0, 100) for each in (oracle, plain)
        )
        differ += tokens != others
        text = oracle.text(tokens)
        rewards += demo.reward([prompt.prompt], [text], [prompt.columns["answer"]])
        lengths.append(len(tokens))
    assert differ > 0, "the test is of no use"
    short = ("--rollout.max_completion_length", 100)
    found = evaluated(capsys, tmp_path / "adapter", "demo", "--size", 4, *short)["held_out"]
    assert found["avg@1"] == sum(rewards) / 4
    assert found["mean_length"] == sum(lengths) / 4


@pytest.mark.slow
def test_a_game_with_turns_is_what_a_plain_loop_plays(capsys):
    oracle, rewards, lengths = Oracle("guess"), [], []
    for prompt in held_out("guess", 4):
        for sample in range(2):
            reward, length = played(oracle, prompt, sample)
            rewards.append(reward)
            lengths.append(length)
    assert 0 < sum(rewards) < 8, "the test is of no use"
    for more in ((), ("--rollout.max_num_seqs", 3, "--drafting.window", "off")):
        found = evaluated(capsys, "recipe:guess", "--size", 4, "--n", 2, *more)["held_out"]
        assert found["avg@2"] == sum(rewards) / 8
        assert found["mean_length"] == sum(lengths) / 8
        assert found["pass@2"] == sum(map(any, zip(rewards[::2], rewards[1::2], strict=True))) / 4


def played(oracle: Oracle, prompt: Any, sample: int) -> tuple[float, int]:
    """The reward of a game, and how many tokens were sampled in it."""
    game, tokens, messages, length = guess.Environment(), [], [], 0
    game.reset(**prompt.columns)
    while True:
        turn = oracle.turn(prompt.prompt, tokens, prompt.row, sample, 1.0, 32)
        tokens, length = tokens + turn, length + len(turn)
        if turn[-1] != oracle.tokenizer.eos_token_id:
            return game.reward(), length
        messages.append({"role": "assistant", "content": oracle.text(turn)})
        answer = game.step(messages)
        if answer is None:
            return game.reward(), length
        messages.append({"role": "user", "content": answer})
        tokens += oracle.ids(answer)


@pytest.mark.slow
def test_suites_differ_in_what_they_say_and_share_the_rest(capsys, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    rows = tmp_path / "sums.jsonl"
    problems = demo.problems(3, 17, max_terms=5)
    rows.write_text("".join(f"{json.dumps(each)}\n" for each in problems))
    suites = [
        {"name": "own", "size": 2},
        {"name": "others", "source": "recipe:demo", "options": {"max_terms": 6}, "size": 3},
        {"name": "file", "source": str(rows), "n": 2, "temperature": 0.5, "top_k": 3,
         "functions": [{"function": f"{judge}:several"}, {"function": "recipe:demo", "weight": 0}]},
        {"name": "strict", "size": 2, "pass_threshold": 2.0, "max_completion_length": 9},
        {"name": "left out", "source": str(tmp_path / "nowhere.jsonl")},
    ]  # fmt: skip
    config = tmp_path / "suites.yaml"
    values = json.loads(read_config("demo").model_dump_json()) | {"eval": {"suites": suites}}
    config.write_text(json.dumps(values))
    chosen = ("--suite", "own", "others", "file", "strict")
    found = evaluated(capsys, "recipe:demo", config, *chosen)
    assert list(found) == ["own", "others", "file", "strict"]
    assert {name: suite["prompts"] for name, suite in found.items()} == {
        "own": 2, "others": 3, "file": 3, "strict": 2,
    }  # fmt: skip
    assert (found["file"]["temperature"], found["file"]["top_k"]) == (0.5, 3)
    assert found["file"]["reward_several"] == 2.0
    assert "reward_several" not in found["own"]
    assert 0 <= found["file"]["reward_recipe:demo"] <= 1
    assert found["file"]["avg@2"] == 2.0  # the function is called with all answers to a prompt
    assert found["own"]["avg@1"] == found["own"]["pass@1"]
    assert found["strict"]["pass@1"] == 0.0
    assert found["strict"]["mean_length"] <= 9
    # Without a recipe, all rows of a file.
    task = ("--data", rows, "--reward", f"{judge}:short", "--rollout.max_completion_length", 20)
    found = evaluated(capsys, recipes.directory("demo"), *task)["data"]
    assert found["prompts"] == 3
    assert 0 < found["avg@1"] < 1
    assert evaluated(capsys, "recipe:demo", *task)["data"] == found, "as without a recipe"


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_as_its_run_evaluates(capsys, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-3"
    shutil.copytree(recipes.directory("demo"), checkpoint)
    suites = {"suites": [{"name": "mine", "size": 2, "answer_pattern": r"\d+$", "n": 3}]}
    values = json.loads(read_config("demo").model_dump_json()) | {"eval": suites}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(values))
    where = tmp_path / "made" / "eval.json"
    (checkpoint.parent / "step-2").mkdir()  # an earlier one
    assert cli.main(["eval", str(tmp_path / "run"), "--output", str(where)]) == 0
    out, err = capsys.readouterr()
    assert err == f"rhymeflow: {checkpoint}, the newest checkpoint\n"
    header, line = out.splitlines()
    assert header.split()[:3] == ["suite", "prompts", "k"]
    written = json.loads(where.read_text())
    assert written["model"] == str(checkpoint)
    suite = written["suites"]["mine"]
    figures = [f"{suite[name]:.4f}" for name in ("avg@3", "pass@3", "maj@3")]
    assert line.split()[:6] == ["mine", "2", "3", *figures]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["/nowhere"], "/nowhere: brings no task, as the checkpoint of a run does: give a recipe"),
        (["/nowhere", "demo"], "/nowhere"),
        (["recipe:demo", "dmeo"], "did you mean demo?"),
        (["recipe:demo", "--suite", "helt_out"], "did you mean held_out?"),
        (["recipe:demo", "--n", "0"], "--n"),
        (["recipe:demo", "--temperature", "hot"], "'hot'"),
        (["recipe:demo", "--temperature", "1e-40"], "'1e-40', should be 0 (greedy) or at least"),
        (["recipe:demo", "--model", "other"], "the model is 'recipe:demo' already"),
        (["recipe:demo", "--eval.suites", "[{name: a}, {name: a}]"], "two are named 'a'"),
        (["recipe:demo", "--eval.suites", "[{name: a//b}]"], "no part between"),
        (["recipe:demo", "--eval.suites", "[{name: a, answer_pattern: (}]"], "expression"),
        (["recipe:demo", "--eval.suites", "[{name: a, options: {x: 1}}]"], "options"),
        (["recipe:demo", "--eval.suites", "[{name: a, functions: []}]"], "a: neither functions"),
        (["recipe:demo", "--eval.suites", "[{name: a, source: /no.csv}]"], "/no.csv"),
        (["recipe:demo", "--data.eval_size", "0"], "no prompts are held out"),
        (["recipe:demo", "--rollout.max_completion_length", "768"], "no room for a prompt"),
        (["recipe:demo", "--output", "/proc/x/y"], "--output: /proc/x cannot be written: "),
        (["recipe:demo", "--output", "/"], "--output /: is a directory; give a file"),
        (["demo"], "its model is recipe:demo"),
        (["recipe:dmo"], "there is no such recipe; did you mean demo?"),
        (["recipe:demo", "--jsn"], "--jsn: there is no such argument; did you mean --json?"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, part, refused):
    assert part in refused("eval", *arguments)


@pytest.mark.slow
def test_what_becomes_of_a_failure_is_up_to_on_failure(capsys, refused, tmp_path):
    worlds = tmp_path / "worlds.py"
    worlds.write_text(
        "class Breaks:\n"
        "    def reset(self, hidden, **columns): self.breaks = hidden == hidden_of_first\n"
        "    def step(self, messages):\n"
        "        if self.breaks: raise ValueError('it broke')\n"
        "    def reward(self): return 1.0\n"
        f"hidden_of_first = {held_out('guess', 1)[0].columns['hidden']!r}\n"
    )
    arguments = ["recipe:guess", "--size", "2", "--environment.retries", "0"]
    arguments += ["--environment.classes", f"[{{environment: '{worlds}:Breaks'}}]"]
    message = refused("eval", *arguments)
    assert "environment of answer 0 to held-out row 0 at version 0 (group -1 in the log)" in message
    assert "it broke" in message
    found = evaluated(capsys, *arguments, "--environment.on_failure", "drop")["held_out"]
    assert (found["failed"], found["avg@1"], found["prompts"]) == (1.0, 1.0, 2)


def test_what_functions_print_is_said_to_be_where_it_stays(capsys):
    for is_kept, where in (
        (True, "/a/reward.log"),
        (False, "reward.log with --run.output_dir DIR"),
    ):
        progress = evaluate._ProgressLine(is_kept=is_kept)
        progress.printed("reward functions print: x", "/a/reward.log")
        said = capsys.readouterr().err
        assert said == f"warning: reward functions print: x (all of it is in {where})\n"


def test_the_run_of_an_evaluation_can_be_read_back():
    text = "runtime: ray\nray: {address: auto}\nenvironment: {max_turns: 3}\neval: {suites: "
    config = parse_config(text + "[{name: a, environments: [a.B]}, {name: b, size: 2}]}")
    for names in (("a",), ("b",), ()):
        run = evaluate._without_training(config, chosen(config, names))
        assert as_written(run, "T") == run
        assert run.environment.max_turns == (10 if names == ("b",) else 3)
