"""Names, options and the built-in functions, called in this process."""

from typing import Any

import pytest

from rhymeflow.config import DataConfig, RewardFunction
from rhymeflow.data.load import load_prompts
from rhymeflow.errors import UserError
from rhymeflow.reward.components import component_names
from rhymeflow.reward.functions import Judge, NotAReward
from tests.refused import refusal
from tests.reward import judged


def score(function: str, completion: str, columns: dict[str, Any], **options: Any) -> Any:
    [reward] = judged(function, [completion], columns, **options)
    return reward


def failure(function: str, completion: str, columns: dict[str, Any], **options: Any) -> str:
    with pytest.raises(NotAReward) as error:
        score(function, completion, columns, **options)
    return str(error.value)


def refused(function: str, **options: Any) -> str:
    message = refusal(Judge, RewardFunction(function=function, options=options))
    assert message.startswith(f"reward function {function}: ")
    return message


@pytest.mark.parametrize(
    ("completion", "columns", "options", "reward"),
    [
        (" 42\n", {"answer": "42"}, {}, 1),
        (" 42\n", {"answer": "42"}, {"strip": False}, 0),
        ("42", {"answer": 42}, {}, 1),
        ("42", {"ground_truth": "42"}, {}, 1),
        ("42", {"answer": "41", "ground_truth": "42"}, {}, 0),
        ("42", {"answer": "41", "truth": "42"}, {"column": "truth"}, 1),
        ("6*7 #### 41 #### 42", {"answer": "so #### 42"}, {"after": "####"}, 1),
        ("6*7 #### 42", {"answer": "42"}, {"after": "####"}, 1),
        ("42", {"answer": "42"}, {"after": "####"}, 0),
        ("", {"answer": "42"}, {}, 0),
        ("42", {"answer": "42", "strip": "x", "after": "y", "column": "z"}, {}, 1),
    ],
)
def test_exact_match(completion, columns, options, reward):
    assert score("exact_match", completion, columns, **options) == reward


def test_exact_match_without_a_right_answer_is_an_error():
    assert "no column 'answer' or 'ground_truth'" in failure("exact_match", "4", {"anser": "4"})
    assert "did you mean anser?" in failure("exact_match", "4", {"anser": "4"})
    assert "no column 'truth'" in failure("exact_match", "4", {"answer": "4"}, column="truth")
    assert "the right answer is None" in failure("exact_match", "4", {"answer": None})


@pytest.mark.parametrize(
    ("options", "reward"),
    [
        ({"pattern": "<b>.*</b>"}, 1),
        ({"pattern": "<b>.*</b>", "mode": "fullmatch"}, 0),
        ({"pattern": "a<b>.*</b>", "mode": "fullmatch"}, 1),
        ({"pattern": "c"}, 0),
    ],
)
def test_regex(options, reward):
    assert score("regex", "a<b>1\n2</b>", {"pattern": "a column"}, **options) == reward


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        (r"so it is $\frac{1}{2}$", "0.5", 1),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1),
        (r"\boxed{x+1}", "1+x", 1),
        ("the answer is 3", "0.5", 0),
        (r"\boxed{1}", "1+x", 0),
        (r"\boxed{(1,2)}", "(1, 2)", 1),
        (r"\boxed{5}", "so the answer is $5$", 1),
        ("no idea", "4", 0),
    ],
)
def test_math_verify(completion, truth, reward):
    assert score("math_verify", completion, {"answer": truth}) == reward


def test_math_verify_needs_a_right_answer_that_is_mathematics():
    assert "is no mathematics" in failure("math_verify", "4", {"answer": ""})


def test_reasoning_gym_scores_by_the_dataset():
    def columns_of(dataset: str) -> dict[str, Any]:
        config = DataConfig(source=f"reasoning_gym:{dataset}", size=1, eval_size=0)
        return load_prompts(config, 0)[0][0].columns

    columns = columns_of("arc_agi")
    answer = columns["answer"]

    def gym(completion: str, **options: Any) -> Any:
        return score("reasoning_gym", completion, columns, **options)

    assert gym(f"<answer>1</answer> no: <answer>\n{answer}\n</answer>.") == 1
    assert gym(answer) < 0.5
    assert gym(answer, extract="all") == 1
    assert gym("", extract="last_line") < 0.5
    assert "no column 'entry'" in failure("reasoning_gym", "4", {"answer": "4"})
    columns = columns_of("chain_sum")
    text = f"thinking 1 2 3\n{columns['answer']}\n"
    assert score("reasoning_gym", text, columns, extract="last_line") == 1


def test_a_recipe_gives_its_reward():
    assert score("recipe:demo", "a1+0=1 =1", {"answer": "1"}) == 1
    assert score("recipe:demo", "a1+0=1 =2", {"answer": "1"}) == 0


def narrow(completions: list[str], width: int = 1) -> list[float]:
    return [float(width) for _ in completions]


def test_mistakes_in_names_and_options():
    assert "no built-in has this name; did you mean exact_match?" in refused("exactmatch")
    assert "there is no file" in refused("no/such.py:f")
    assert "takes no option 'colunm'; did you mean column?" in refused("exact_match", colunm="x")
    assert "needs the option 'pattern'" in refused("regex")
    assert "is no regular expression" in refused("regex", pattern="(")
    assert "mode is 'x', should be 'search' or 'fullmatch'" in refused(
        "regex", pattern="a", mode="x"
    )
    assert "extract is 'x', should be one of" in refused("reasoning_gym", extract="x")
    own = "tests.reward.test_functions.narrow"
    assert "takes no option 'widht'; did you mean width?" in refused(own, widht=2)
    assert score(own, "x", {"other": 1}, width=2) == 2
    said = failure("tests.reward.test_functions._takes_no_more", "x", {"anser": "1"})
    assert "takes an argument 'answer', and there is no such column or option" in said
    assert "did you mean anser?" in said


@pytest.mark.parametrize(
    ("function", "extra", "package"),
    [("math_verify", "math", "math_verify"), ("reasoning_gym", "reasoning", "reasoning_gym")],
)
def test_an_absent_package_is_named_with_its_command(function, extra, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    said = refused(function)
    assert f"needs the package {package}: pip install -e '" in said
    assert f"[{extra}]'" in said


def test_built_ins_judge_responses_and_a_users_functions_groups():
    calls = dict.fromkeys(("exact_match", "regex", "recipe:demo"), "response")
    calls |= dict.fromkeys(("a/b.py:judge", "pkg.mod.judge", "llm_judge", "reward_model"), "group")
    for name, per in calls.items():
        assert RewardFunction(function=name).per == per
        for other in ("response", "group"):
            assert RewardFunction(function=name, per=other).per == other


def test_component_names():
    specs = ["exact_match", "a/b.py:judge", "pkg.mod.judge", "recipe:demo", "exact_match"]
    names = component_names(RewardFunction(function=spec) for spec in specs)
    assert names == ("exact_match", "judge", "judge#2", "recipe:demo", "exact_match#2")


def _takes_no_more(completions, answer): ...


def _takes_it(completions, log_metric): ...


def _takes_all(completions, **columns): ...


def _of_verl(data_source, solution_str, ground_truth, trainer_state=None): ...


@pytest.mark.parametrize(
    ("function", "column", "is_replaced"),
    [
        (_takes_no_more, "trainer_state", False),
        (_takes_it, "log_metric", True),
        (_takes_it, "trainer_state", False),
        (_takes_all, "trainer_state", True),
        (_takes_all, "log_extra", True),
        (_takes_all, "environments", False),
        (_of_verl, "solution_str", True),
        (_of_verl, "trainer_state", False),
        ("exact_match", "trainer_state", False),
    ],
)
def test_a_column_is_not_replaced_by_an_argument(function, column, is_replaced):
    name = function if isinstance(function, str) else f"{__name__}.{function.__name__}"
    judge, columns = Judge(RewardFunction(function=name)), {"answer": "2", column: "mine"}
    columns |= {"ground_truth": "2"}
    if not is_replaced:
        judge.check_columns(columns)
        return
    with pytest.raises(UserError, match=f"has a column '{column}', which is the name of an arg"):
        judge.check_columns(columns)
    with pytest.raises(NotAReward, match=f"column '{column}'"):
        judged(judge, ["a"], columns)


OF_VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):
    assert data_source in (None, "gsm")
    is_right = solution_str == ground_truth
    return {"score": factor * is_right, "acc": is_right, "pred": solution_str}


def known(solution_str, ground_truth, **kwargs):
    kwargs["extra_info"]["seen"] = kwargs["data_source"]
    return float(kwargs == {"data_source": "gsm", "extra_info": {"seen": "gsm"}})


async def later(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return float(solution_str == ground_truth) + (extra_info or {}).get("bonus", 0)
"""


def test_functions_with_verls_signature_work_by_name(tmp_path):
    (tmp_path / "score.py").write_text(OF_VERL)
    score, later = f"{tmp_path}/score.py:compute_score", f"{tmp_path}/score.py:later"
    columns = {"ground_truth": "4", "other": 3}
    assert judged(score, ["4", "5"], columns) == [1.0, 0.0]
    assert judged(score, ["4", "5"], columns | {"data_source": "gsm"}, factor=3.0) == [3, 0]
    more = {"ground_truth": "5", "extra_info": {"bonus": 2}}
    assert judged(later, ["4", "5"], more) == [2.0, 3.0]
    known = f"{tmp_path}/score.py:known"  # by `**` it is given what verl gives
    assert judged(known, ["4", "5"], columns | {"data_source": "gsm", "extra_info": None}) == [1, 1]
    judge = Judge(RewardFunction(function=score))
    assert judged(judge, ["4", "5"], columns) == [1.0, 0.0]
    assert judge.logged.metrics == [("acc", 1.0), ("acc", 0.0)]
    assert judge.logged.extra == {"acc": [True, False], "pred": ["4", "5"]}
    judge.check_columns(["ground_truth"])
    with pytest.raises(UserError, match="takes an argument 'ground_truth'"):
        judge.check_columns(["answer"])
    assert "no option 'fuctor'; did you mean factor" in refused(score, fuctor=1)
