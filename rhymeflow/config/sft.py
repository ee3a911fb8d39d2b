"""Section `sft`: supervised fine-tuning, `rhymeflow sft`."""

from __future__ import annotations

from typing import Literal

from rhymeflow.config.section import NonNegative, Positive, PositiveFloat, Section


class SftConfig(Section):
    """Supervised fine-tuning by `rhymeflow sft`. What is not here is as in RL: the model, the
    files of `data`, and of `learner` AdamW's constants, clipping, packing, attention, threads."""

    source: str | None = None
    """Rows to learn from: a file as in `data.source`, or `warm_start:NAME` (the rows that a
    recipe's checkpoint was made from). `None`: those of section `data`."""
    size: Positive | None = None
    """Number of rows of `sft.source` to learn from; `None` takes all of a file."""
    eval_size: NonNegative | None = None
    """Number of rows of `sft.source` that are held out, for the loss on them; `None`: 64, but of a
    file at most a tenth."""
    completion_column: str = "completion"
    """Column that holds what is to be learnt, beside `data.prompt_column`: a string, or a list of
    messages of which the assistant's are learnt."""
    messages_column: str = "messages"
    """Column that holds a whole conversation, in rows that have no prompt: all turns of the
    assistant are learnt. Column `tools` holds their tools: a list of JSON schemas, or JSON text of
    one. The chat template tells of them, as it does in training with `environment.tools`."""
    init: Literal["weights", "config"] = "weights"
    """What is trained: the model's weights, or random ones, by `run.seed`, of the model that its
    `config.json` describes."""
    max_steps: Positive = 100
    """Optimizer steps."""
    tokens_per_batch: Positive = 16_384
    """A step takes rows until they have so many tokens, prompts included."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from 0."""
    logging_steps: Positive = 10
    """Print the loss every so many steps."""
    save_dtype: Literal["compute", "bfloat16"] = "compute"
    """Precision of the saved weights: that which is computed in, or half the size of float32."""
    output_dir: str | None = None
    """Where the checkpoint goes, a directory that is not there yet; `None`: `runs/NAME-sft`."""
