"""Loads tokenizers.

Apart from `load.py`: a process that only encodes and decodes starts three seconds sooner.
"""

from __future__ import annotations

import json
import re
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from rhymeflow.config import Config, ModelConfig
from rhymeflow.errors import UserError
from rhymeflow.models.adapter_files import is_adapter
from rhymeflow.models.source import Source, explained, offline, readable


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with its chat template if it has one; a missing pad token becomes eos. An
    adapter may have one of its own.

    Its new attribute `num_embeddings` is the number of the model's embeddings, which bounds
    `TokenIds`. Raises `UserError` if it cannot be read.
    """
    name, folder = config.tokenizer, Path(config.name).expanduser()
    if name is None and is_adapter(folder) and (folder / "tokenizer_config.json").is_file():
        name = config.name
    source = readable(config) if name is None else _source_of(name)
    has_model = not source.is_hub and (Path(source.location) / "config.json").is_file()
    with explained(source, "the tokenizer"):
        options = _config_of(Path(source.location)) if has_model else {}
        options |= offline(source) | {"trust_remote_code": False}  # else it asks at the terminal
        tokenizer = AutoTokenizer.from_pretrained(source.location, **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.num_embeddings = _num_embeddings(config)
    return tokenizer


def _num_embeddings(config: ModelConfig) -> int | None:
    source = readable(config)
    if not source.is_hub and not (Path(source.location) / "config.json").is_file():
        return None
    with explained(source):
        fields, _ = PreTrainedConfig.get_config_dict(source.location, **offline(source))
    return fields.get("text_config", fields).get("vocab_size")


def max_length(config: ModelConfig) -> int:
    """Return the model's context: the most tokens of a prompt and its response together. Raises
    `UserError` if there is no such model, or its configuration does not say."""
    source = readable(config)
    with explained(source):
        # The file itself has it for Llama-like models; only others need their configuration class.
        fields, _ = PreTrainedConfig.get_config_dict(source.location, **offline(source))
        length: int | None = fields.get("max_position_embeddings")
        if length is None:
            hf_config = AutoConfig.from_pretrained(source.location, **offline(source))
            length = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise UserError(
            f"model.name = {source.name!r}: its config.json names no max_position_embeddings"
        )
    return length


def check_teacher(teacher: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` unless the teacher has all of the policy's tokens, by the same numbers."""
    known = load_tokenizer(teacher).get_vocab()
    other = {text: i for text, i in tokenizer.get_vocab().items() if known.get(text) != i}
    if other:
        text, number = min(other.items(), key=itemgetter(1))
        has = f"token {known[text]}" if text in known else "no token"
        more = f", and {len(other) - 1} others differ" if len(other) > 1 else ""
        raise UserError(
            f"{teacher.name!r}: {text!r} is token {number} of the policy and {has} of it{more}; a "
            "teacher needs the policy's vocabulary"
        )


_CONTROL = re.compile(
    r"<[|｜].*[|｜]>|</?s>|<(bos|cls|eos|mask|pad|sep|unk)>|.*(reserved|unused).*"
)
"""Matches control tokens, which stand for no text."""


def unseen_tokens(config: Config, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a note that names special tokens that stand for text, such as `<answer>`, or None.

    Decoding drops them, if the configuration says so. Tokens that begin, end or structure text do
    not count.
    """
    if not config.rollout.skip_special_tokens:
        return None
    special = {i: str(each) for i, each in tokenizer.added_tokens_decoder.items() if each.special}
    roles = ("bos", "cls", "eos", "mask", "pad", "sep", "unk")
    control = {getattr(tokenizer, f"{role}_token") for role in roles}
    template = str(tokenizer.chat_template or "")
    unseen = {
        i: text
        for i, text in special.items()
        if text not in control and text not in template and not _CONTROL.fullmatch(text)
    }
    if unseen:
        from rhymeflow.models.load import configured_stop_token_ids  # slow to import

        stops = configured_stop_token_ids(config.model, tokenizer)
        unseen = {i: text for i, text in unseen.items() if i not in stops}
    if not unseen:
        return None
    names = ", ".join(list(unseen.values())[:4])
    more = f" and {len(unseen) - 4} more" if len(unseen) > 4 else ""
    return (
        f"the tokenizer has {names}{more} as special tokens, which are missing from the text that "
        "rewards and environments receive; rollout.skip_special_tokens = false keeps them"
    )


def _source_of(tokenizer: str) -> Source:
    """Locate a tokenizer that is configured apart from the model; it may be in a bare directory."""
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        return Source(tokenizer, str(path))
    return readable(ModelConfig(name=tokenizer))


def _config_of(directory: Path) -> dict[str, Any]:
    """Return a plain model configuration for `AutoTokenizer`, with the fields that it reads.

    Otherwise it would import the model's configuration class, which takes longer than all else.
    Empty if it needs that class: the tokenizer does not name its own class, or has custom code.
    """
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(settings.get("tokenizer_class"), str) or "auto_map" in settings:
        return {}
    fields, _ = PreTrainedConfig.get_config_dict(directory)
    config = PreTrainedConfig.from_dict({"_name_or_path": str(directory)})
    vars(config).update({name: fields.get(name, "") for name in ("model_type", "model_name")})
    return {"config": config}
