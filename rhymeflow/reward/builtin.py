"""The built-in reward functions: factories that check their options and return a function with
TRL's signature, so that a column of the data is never taken for an option.

They return 1.0 for right and 0.0 for wrong, except `reasoning_gym`, which also returns fractions,
and `reward_model`. A response without an answer is wrong; a row without one is an error."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, Literal

from rhymeflow.data.generators import reasoning_gym as import_gym
from rhymeflow.errors import UserError, nearest
from rhymeflow.utils.extras import extra

Scorer = Callable[..., list[float]]

TRUTH_COLUMNS = ("answer", "ground_truth")
"""Columns with the right answer if none is named; the first that exists is used."""


def exact_match(column: str | None = None, strip: bool = True, after: str | None = None) -> Scorer:
    """Compare the response with the right answer, character by character.

    Args:
        column: the column with the right answer: text, or a number, which is compared as text.
        strip: ignore white space around response and answer.
        after: compare only what follows the last occurrence of this text (as GSM8K's `####`) in
            the response, and in the right answer if it is there."""

    def _same(response: str, truth: str) -> bool:
        if after is not None:
            _, separator, response = response.rpartition(after)
            if not separator:
                return False
            truth = truth.rpartition(after)[2]
        return response.strip() == truth.strip() if strip else response == truth

    return _by_truth(_same, column)


def regex(pattern: str, mode: Literal["search", "fullmatch"] = "search") -> Scorer:
    """Search the response for a regular expression (`.` also matches line ends).

    Args:
        pattern: in Python's syntax.
        mode: `search` finds it anywhere; `fullmatch` must match the whole response."""
    if mode not in ("search", "fullmatch"):
        raise UserError(f"mode is {mode!r}, should be 'search' or 'fullmatch'")
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"pattern {pattern!r} is no regular expression: {error}") from None
    match = getattr(compiled, mode)

    def score(completions: list[Any], **_: Any) -> list[float]:
        return [float(match(content(completion)) is not None) for completion in completions]

    return score


def math_verify(column: str | None = None) -> Scorer:
    r"""Compare as mathematics, with the package math-verify: `\frac{1}{2}` equals `0.5`.

    A response that math-verify cannot read within its limit of five seconds is wrong.

    Args:
        column: the column with the right answer: a formula, or text with a formula marked in it
            (`$...$`, `\boxed{...}`).
    """
    package = extra("math_verify", "the reward math_verify", "math")

    def _equal(response: str, truth: str) -> bool:
        # In bare text only the first number is read (`1 + x` is 1), so it is marked as a formula.
        is_marked = any(mark in truth for mark in ("$", r"\boxed", r"\(", r"\["))
        gold = package.parse(truth if is_marked else f"${truth}$")
        if not gold:
            raise ValueError(f"the right answer {truth!r} is no mathematics")
        return bool(package.verify(gold, package.parse(response)))

    return _by_truth(_equal, column)


def reasoning_gym(extract: Literal["all", "answer_tag", "last_line"] = "answer_tag") -> Scorer:
    """Score with reasoning-gym's scorer for the problem's dataset.

    Args:
        extract: the part of the response that is the answer: the content of the last pair of
            `<answer>` tags, the last line that is not empty, or all of it."""
    if extract not in _EXTRACTORS:
        raise UserError(f"extract is {extract!r}, should be one of {', '.join(_EXTRACTORS)}")
    gym = import_gym("the reward reasoning_gym")
    extracted = _EXTRACTORS[extract]
    scorers: dict[str, Callable[[str | None, dict[str, Any]], float]] = {}

    def _score(response: str, text: str) -> float:
        entry = ast.literal_eval(text)
        name = entry["metadata"]["source_dataset"]
        if name not in scorers:
            scorers[name] = gym.get_score_answer_fn(name)
        return scorers[name](extracted(response), entry)

    def score(
        completions: list[Any], entry: list[str] | None = None, **columns: Any
    ) -> list[float]:
        if entry is None:
            raise KeyError("no column 'entry': data.source is not reasoning_gym:NAME")
        return [
            _score(content(completion), item)
            for completion, item in zip(completions, entry, strict=True)
        ]

    return score


def reward_model(
    model: str, device: Literal["auto", "cpu", "cuda"] = "cpu"
) -> Callable[..., list[float]]:
    """Score prompt and response by the first logit of a sequence classification model, as in TRL.

    One pass scores all responses of a call. If the policy's prompt went through a chat template,
    the model's own chat template writes prompt and response.

    Args:
        model: directory or hub name of the model and its tokenizer.
        device: `auto` is CUDA if there is a GPU, which it shares with rollout and training."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        classifier, found = AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{model!r} is no reward model that can be loaded: {text}") from None
    # transformers draws what is missing.
    lacking = [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
    if lacking:
        raise UserError(
            f"{model!r} is no reward model: {min(lacking)!r} is missing, or not for one number"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    classifier.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    has_gpu = device != "cpu" and torch.cuda.is_available()
    classifier = classifier.to("cuda" if has_gpu else "cpu").eval()

    def score(
        prompts: list[Any],
        completions: list[Any],
        seen: dict[str, list[Any]] | None = None,
        **_: Any,
    ) -> list[float]:
        if seen is not None and tokenizer.chat_template:
            prompts, completions = seen["prompts"], seen["completions"]
        texts = [
            prompt + _joined(completion)
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt + completion, tokenize=False)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        inputs = tokenizer(
            text=texts,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        ).to(classifier.device)
        with torch.inference_mode():
            rewards: list[float] = classifier(**inputs).logits[:, 0].float().tolist()
        return rewards

    return score


def _joined(completion: str | list[dict[str, Any]]) -> str:
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)


def content(completion: str | list[dict[str, Any]]) -> str:
    """Return a response that is a string, or the content of the last message of one that is a
    list."""
    if isinstance(completion, str):
        return completion
    text = completion[-1]["content"]
    assert isinstance(text, str)
    return text


def _by_truth(is_right: Callable[[str, str], bool], column: str | None) -> Scorer:
    """Return a function that compares each response with the right answer in `column`."""

    def score(completions: list[Any], **columns: Any) -> list[float]:
        truths = _truths(column, columns)
        return [
            float(is_right(content(completion), _as_text(truth)))
            for completion, truth in zip(completions, truths, strict=True)
        ]

    return score


def _answer_tag(response: str) -> str | None:
    _, opening, rest = response.rpartition("<answer>")
    answer, closing, _ = rest.partition("</answer>")
    return answer.strip() if opening and closing else None


def _last_line(response: str) -> str | None:
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else None


_EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "answer_tag": _answer_tag,
    "last_line": _last_line,
    "all": str.strip,
}


def _truths(column: str | None, columns: dict[str, Any]) -> list[Any]:
    if column is not None and column not in columns:
        raise KeyError(f"no column {column!r}{nearest(column, columns)}")
    for name in TRUTH_COLUMNS if column is None else (column,):
        if name in columns:
            return list(columns[name])
    raise KeyError(
        f"no column 'answer' or 'ground_truth'{nearest('answer', columns)} (option `column`)"
    )


def _as_text(truth: Any) -> str:
    if isinstance(truth, str):
        return truth
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        return str(truth)
    raise TypeError(f"the right answer is {truth!r}, should be text or a number")


SCORERS: dict[str, Callable[..., Scorer]] = {
    "exact_match": exact_match,
    "regex": regex,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "reward_model": reward_model,
}
