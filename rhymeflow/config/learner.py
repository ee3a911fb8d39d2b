"""Sections `learner` and `sft`: training, and supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rhymeflow.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class LearnerConfig(Section):
    """Training."""

    max_steps: NonNegative = 100
    """Optimizer versions to produce; the run ends after this many batches. 0: nothing is trained,
    and the model is evaluated on all suites of section `eval`, as by `rhymeflow eval`."""
    groups_per_batch: Positive = 16
    """Groups (prompts) consumed per step; times `num_generations` trajectories."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from 0."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first moment decay."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's second moment decay."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's denominator floor."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the gradient to this norm; `None` does not clip."""
    max_skipped_steps: Positive = 4
    """After so many steps in a row whose gradient is not finite the run ends. Until then they are
    skipped: such a step consumes its batch and makes a version, of the weights that were there."""
    num_iterations: Positive = 1
    """Optimizer passes over each batch (GRPO's mu)."""
    num_minibatches: Positive = 1
    """Optimizer steps each pass splits the batch into, by whole groups."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """Normalisation, TRL's names, exact for an optimizer step however it is cut into micro-batches:
    `grpo` mean over each response, then over responses; `bnpo` over the step's tokens; `dapo` over
    the mean tokens of the batch's steps (the same as `bnpo` with one minibatch); `dr_grpo` over
    responses times `max_completion_length`."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the advantage's standard deviation is taken over."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """With several rewards: `sum_then_normalize` sums them by their weights and compares the sums
    in each group. `normalize_then_sum` (GDPO, arXiv 2601.05242) brings each to mean 0 and standard
    deviation 1 in its group, so that none is drowned by another's size, sums these by the weights,
    and divides by the batch's standard deviation; `scale_rewards` is not used then."""
    epsilon: PositiveFloat = 0.2
    """Lower clip of the probability ratio."""
    epsilon_high: PositiveFloat | None = 0.28
    """Upper clip (clip-higher, DAPO); `None` takes `epsilon`."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL to the reference (the model the run started from), estimated per token by
    k3 times the probability ratio as in TRL; 0 keeps no reference."""
    off_policy_correction: Literal["none", "tis", "decoupled"] = "tis"
    """What is done about the behaviour policy mu, which sampled a token, not being the policy that
    is trained. `tis` and `decoupled` clip around pi_prox, the learner's policy before the batch's
    first optimizer step, and weigh each token's clipped objective by u = pi_prox / mu, a constant.
    `tis` (token-level truncated importance sampling): the weight is min(u, cap). `decoupled`
    (decoupled PPO as AReaL runs it): the weight is u, and 0 where u is past the cap. `none`: no
    weight, and the clip is around mu itself. The KL term is not weighted."""
    importance_sampling_cap: PositiveFloat = 2.0
    """Cap of u. StaleFlow is paired with truncation at 2."""
    mask_truncated_completions: bool = False
    """Leave responses that were cut, at `rollout.max_completion_length` or by `schedule.on_stuck:
    truncate`, out of the loss (DAPO's overlong filtering). One that had `environment.max_turns`
    turns was not."""
    frozen_parameters: tuple[str, ...] = ()
    """Parameters that are not trained, by the model's names for them or patterns with `*`, such as
    `model.embed_tokens.weight` or `model.layers.0.*`. `Trainer` adds those of a model object that
    have `requires_grad` false."""
    max_tokens_per_microbatch: Positive = 8192
    """Packed tokens per forward and backward; gradients accumulate over the batch."""
    logits_chunk_size: Positive = 1024
    """Rows of the head's output that exist at one time."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """How the learner attends within packed rows. `auto`: on CPUs by a compiled kernel over the row
    as it lies (float32 and bfloat16, heads of a multiple of 16), elsewhere as `sdpa`. `sdpa`:
    PyTorch's own, sequences gathered into padded rectangles, a shared prompt once for each. `flex`:
    PyTorch's FlexAttention over the row as it lies, on GPUs only; compiled at the first step."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, about a third more time."""
    num_ranks: Positive = 1
    """Processes that train as one (FSDP2): weights, gradients and AdamW's moments are spread over
    them, and so is each batch. On GPUs each has one of its own."""
    offload_optimizer: bool = False
    """With ranks on GPUs: keep master weights, gradients and AdamW's moments in main memory, and
    step there. On CPUs they are there anyway."""
    num_threads: Positive | None = None
    """Threads of each rank; `None` shares the machine's cores between the workers."""
    cpus: tuple[NonNegative, ...] | None = None
    """Cores to pin the learner to, which its ranks divide; `None` pins nothing."""

    @property
    def needs_whole_batch(self) -> str:
        """The setting by which no gradient of some groups of a batch can be computed before the
        others are known; empty: there is none."""
        found = {
            f"learner.num_iterations = {self.num_iterations}": self.num_iterations > 1,
            f"learner.num_minibatches = {self.num_minibatches}": self.num_minibatches > 1,
            "learner.scale_rewards = 'batch'": self.scale_rewards == "batch",
            "learner.multi_objective_aggregation = 'normalize_then_sum'": (
                self.multi_objective_aggregation == "normalize_then_sum"
            ),
        }
        return next((setting for setting, is_so in found.items() if is_so), "")

    @property
    def is_used(self) -> bool:
        """Whether anything is trained."""
        return self.max_steps > 0

    @model_validator(mode="after")
    def _ranks_fit(self) -> LearnerConfig:
        if self.offload_optimizer and self.num_ranks == 1:
            raise ValueError(
                "learner.offload_optimizer needs learner.num_ranks of at least 2: a learner of "
                "one rank keeps its optimizer beside its model"
            )
        if self.cpus and len(self.cpus) < self.num_ranks:
            raise ValueError(
                f"learner.cpus = {list(self.cpus)} is too few for learner.num_ranks = "
                f"{self.num_ranks}: each needs a core of its own"
            )
        return self


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
    save_dtype: Literal["compute", "bfloat16"] = "compute"
    """Precision of the saved weights: that which is computed in, or half the size of float32."""
    output_dir: str | None = None
    """Where the checkpoint goes, a directory that is not there yet; `None`: `runs/NAME-sft`."""
