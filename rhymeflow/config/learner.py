"""Sections `learner` and `sft`: RL training, and supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rhymeflow.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class LearnerConfig(Section):
    """Training."""

    max_steps: NonNegative = 100
    """Batches to train on; each makes one version of the weights. 0: no training; the model is
    evaluated on all suites of section `eval`, as by `rhymeflow eval`."""
    groups_per_batch: Positive = 16
    """Groups (prompts) per batch, each of `rollout.num_generations` trajectories."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from 0."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Norm to which the gradient is clipped; `None` does not clip."""
    max_skipped_steps: Positive = 4
    """Optimizer steps in a row with a non-finite gradient at which the run stops. Until then they
    are skipped: such a step consumes its batch, and its version has the previous weights."""
    num_iterations: Positive = 1
    """Training passes over each batch (GRPO's mu)."""
    num_minibatches: Positive = 1
    """Optimizer steps per pass, each on an equal number of whole groups."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """Normalisation of the loss, by TRL's names; micro-batches do not change it. `grpo`: mean over
    each response's tokens, then over responses. `bnpo`: mean over the optimizer step's tokens.
    `dapo`: sum over the step, divided by the mean number of tokens of the batch's steps (`bnpo` if
    there is one minibatch). `dr_grpo`: sum divided by responses times `max_completion_length`."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Responses whose rewards' standard deviation divides an advantage: those of its `group` or
    `batch`. `none`: it is not divided."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """How several rewards make an advantage. `sum_then_normalize`: sum them by their weights, and
    compare the sums in each group. `normalize_then_sum` (GDPO, arXiv 2601.05242): scale each to
    mean 0 and standard deviation 1 in its group, so that a large one does not hide the others, sum
    these by the weights, and divide the sums by the batch's standard deviation. `scale_rewards` is
    then not used."""
    epsilon: PositiveFloat = 0.2
    """The probability ratio is clipped below at 1 minus this."""
    epsilon_high: PositiveFloat | None = 0.28
    """The ratio is clipped above at 1 plus this (clip-higher, DAPO); `None` takes `epsilon`."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference, the model that the run started from; 0 keeps
    no reference. It is estimated per token by k3 times the probability ratio, as in TRL."""
    off_policy_correction: Literal["none", "tis", "decoupled"] = "tis"
    """Correction for tokens that an older policy mu sampled. `tis` and `decoupled` clip around
    pi_prox, the learner's policy before the batch's first optimizer step, and multiply each token's
    clipped objective by a constant weight, of u = pi_prox / mu. `tis` (token-level truncated
    importance sampling): the weight is min(u, cap). `decoupled` (decoupled PPO as AReaL runs it):
    the weight is u, or 0 if u is above the cap. `none`: no weight, and the clip is around mu. The
    KL term is not weighted."""
    importance_sampling_cap: PositiveFloat = 2.0
    """The cap of `off_policy_correction`; StaleFlow's authors use 2."""
    mask_truncated_completions: bool = False
    """Leave responses that `rollout.max_completion_length` or `schedule.on_stuck: truncate` cut out
    of the loss (DAPO's overlong filtering). Those that `environment.max_turns` ended stay in."""
    frozen_parameters: tuple[str, ...] = ()
    """Names of parameters that are not trained, or patterns with `*`, such as
    `model.embed_tokens.weight` or `model.layers.0.*`. `Trainer` adds the parameters of a model
    object whose `requires_grad` is false."""
    max_tokens_per_microbatch: Positive = 8192
    """Packed tokens per forward and backward pass; gradients accumulate over micro-batches."""
    logits_chunk_size: Positive = 1024
    """Tokens whose logits are in memory at one time."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention of the learner over packed rows. `auto`: on CPUs a compiled kernel over the packed
    row (float32 and bfloat16, head sizes that are multiples of 16), elsewhere `sdpa`. `sdpa`:
    PyTorch's `scaled_dot_product_attention` over sequences that are padded to one length, each with
    its own copy of a shared prompt. `flex`: PyTorch's FlexAttention over the packed row, on GPUs
    only; compiled at the first step."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, and about a third more time."""
    num_ranks: Positive = 1
    """Processes of the learner (FSDP2), on GPUs one for each GPU. Weights, gradients, AdamW's
    moments and each batch are sharded over them. If `cluster.nodes` and `rollout.num_instances` are
    given and this is not, ranks have all GPUs that these leave."""
    offload_optimizer: bool = False
    """With several ranks on GPUs: keep master weights, gradients and AdamW's moments in main
    memory, and do the optimizer step there. Without GPUs it changes nothing."""
    num_threads: Positive | None = None
    """Threads of each rank; `None`: as `rollout.num_threads`."""
    cpus: tuple[NonNegative, ...] | None = None
    """Cores that the learner is pinned to, divided among its ranks; `None` pins nothing."""

    @property
    def needs_whole_batch(self) -> str:
        """The setting that needs all groups of a batch before any gradient is computed, or ""."""
        needs = {
            f"learner.num_iterations = {self.num_iterations}": self.num_iterations > 1,
            f"learner.num_minibatches = {self.num_minibatches}": self.num_minibatches > 1,
            "learner.scale_rewards = 'batch'": self.scale_rewards == "batch",
            "learner.multi_objective_aggregation = 'normalize_then_sum'": (
                self.multi_objective_aggregation == "normalize_then_sum"
            ),
        }
        return next((setting for setting, is_on in needs.items() if is_on), "")

    @property
    def is_used(self) -> bool:
        """Whether the run trains."""
        return self.max_steps > 0

    @model_validator(mode="after")
    def _ranks_fit(self) -> LearnerConfig:
        if self.offload_optimizer and self.num_ranks == 1:
            raise ValueError(
                "learner.offload_optimizer needs learner.num_ranks of at least 2: a learner of "
                "one rank keeps its optimizer on the model's device"
            )
        if self.cpus and len(self.cpus) < self.num_ranks:
            raise ValueError(
                f"learner.cpus = {list(self.cpus)} is too few for learner.num_ranks = "
                f"{self.num_ranks}: each needs its own core"
            )
        return self


class SftConfig(Section):
    """Supervised fine-tuning by `rhymeflow sft`. It also uses sections `model` and `data`, and
    AdamW's constants, clipping, packing, attention and threads of section `learner`."""

    source: str | None = None
    """Training rows: a file as in `data.source`, or `warm_start:NAME` (the rows that a recipe's
    checkpoint was trained on). `None`: the rows of section `data`."""
    size: Positive | None = None
    """Number of training rows of `sft.source`. `None`: all rows of a file."""
    eval_size: NonNegative | None = None
    """Number of rows of `sft.source` that are held out for evaluating the loss; `None`: 64, but at
    most a tenth of a file."""
    completion_column: str = "completion"
    """Column with the completion of the prompt in `data.prompt_column`: a string, or a list of
    messages of which the assistant's are trained on."""
    messages_column: str = "messages"
    """Column with a whole conversation, in rows without a prompt; all turns of the assistant are
    trained on. Column `tools` may hold the conversation's tools, as a list of JSON schemas or as
    that list's JSON text; the chat template describes them as it does `environment.tools`."""
    init: Literal["weights", "config"] = "weights"
    """Initial weights. `weights`: the model's own. `config`: random ones, drawn from `run.seed`,
    for the architecture in the model's `config.json`."""
    max_steps: Positive = 100
    """Optimizer steps."""
    tokens_per_batch: Positive = 16_384
    """Tokens, prompts included, that the rows of one step have together."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from 0."""
    save_dtype: Literal["compute", "bfloat16"] = "compute"
    """Precision of the saved weights. `compute`: the precision of training."""
    output_dir: str | None = None
    """Directory for the checkpoint, which must not exist yet; `None`: `runs/NAME-sft`."""
