"""A reward by a reward model: the built-in `reward_model`, a classifier with one output.

All responses of a call are scored in one pass, as text that the model's chat template writes where
the policy was given messages, or a text was made one. The reward is the first logit, as in TRL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from rhymeflow.errors import UserError


def reward_model(
    model: str, device: Literal["auto", "cpu", "cuda"] = "cpu"
) -> Callable[..., list[float]]:
    """Score prompt and response by a sequence classification model.

    Args:
        model: a directory or a hub name; its tokenizer is there too.
        device: `auto` is CUDA where there is one, which it shares with rollout and training.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{model!r} is no reward model that can be loaded: {text}") from None
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
            prompt + _said(completion)
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


def _said(completion: str | list[dict[str, Any]]) -> str:
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)
