"""Sections `learner` and `sft`: RL training, and supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rhymeflow.config.algorithms import ALGORITHMS
from rhymeflow.config.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)

MaskName = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1",
    "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3", "veto",
]  # fmt: skip

_OF_CRITIC = "lam", "cliprange_value", "critic_learning_rate", "critic_warmup_steps"
_CLIPS, _BOUNDS = ("epsilon", "epsilon_high"), ("delta", "dual_clip")
_OF_SAPO = "sapo_temperature_pos", "sapo_temperature_neg"
_OF_KL = "kl_estimator", "use_bias_correction_kl"
_OF_WEIGHTS = (
    "importance_sampling_cap", "importance_sampling_floor", "off_policy_level",
    "normalize_importance_weights",
)  # fmt: skip
_OF_REWARD = "reward_clip", "overlong_buffer", "kl_in"
"""Fields of `LearnerConfig` that only some settings use."""
COMPARES = "group_mean", "leave_one_out", "length_weighted", "best_of_group"
"""What `LearnerConfig.advantage` may be that is 0 for a response alone in its group."""

OF_SERVER = ("server_model", "concurrency", "retries", "timeout", "api_key_variable")
"""Fields of `DistillationConfig` for a teacher on a server."""


class DistillationConfig(Section):
    """On-policy distillation: a teacher judges each token that the policy sampled
    (docs/distillation.md)."""

    by_name = "teacher"

    teacher: str | None = None
    """A model with the policy's vocabulary, named as in `model.name`; the policy itself, with its
    current weights (`policy`) or as the run started (`start`); or the URL of a server with OpenAI's
    interface, up to `/v1`, that returns vLLM's `prompt_logprobs`. `None`: there is no teacher."""
    prompt: str | None = None
    """What the teacher reads in place of the prompt, with `{prompt}` and columns of the data in
    braces, such as `{prompt} The answer is {answer}.` In a prompt of messages it replaces the text
    of the user's last one. `None`: the policy's prompt."""
    mode: Literal["sampled_token", "topk_logits", "full_logits"] = "sampled_token"
    """What is learnt, by TRL's names. `sampled_token`: log(pi_teacher / pi) of each sampled token
    is added to its advantage, which minimizes the reverse KL. Otherwise the loss has a divergence
    of each token's two distributions, over the teacher's `topk` likeliest tokens, or over all."""
    weight: PositiveFloat = 1.0
    """Factor of what is added to the advantage or the loss."""
    reward_weight: NonNegativeFloat = 1.0
    """Factor of the rewards' advantages. 0: rewards are measured only."""
    jsd_beta: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Which generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649): TRL's `beta`. 0 is the
    forward KL(teacher || policy), 1 the reverse KL(policy || teacher), 0.5 is symmetric."""
    topk: Positive = 100
    """Tokens that `topk_logits` compares."""
    add_tail: bool = True
    """`topk_logits` counts all other tokens as one more. `false`, for `jsd_beta` 0, leaves them
    out, as verl's `forward_kl_topk` does; the loss may then fall below 0."""
    server_model: str | None = None
    """Name of the teacher on its server, if that has several models."""
    concurrency: Positive = 16
    """Responses that a rank has a server judge at a time."""
    retries: NonNegative = 3
    """Further tries if a server is busy, gone, or silent for `timeout` seconds; after them the run
    ends with the error."""
    timeout: PositiveFloat = 60.0
    """Longest time for one answer of a server in seconds."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with a server's key; if it is empty, no key is sent."""

    @property
    def is_used(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher is not None

    @property
    def is_served(self) -> bool:
        """Whether the teacher is on a server."""
        return (self.teacher or "").startswith(("http://", "https://"))

    @property
    def is_divergence(self) -> bool:
        """Whether whole distributions are compared, in the loss."""
        return self.is_used and self.mode != "sampled_token"

    @model_validator(mode="after")
    def _has_an_effect(self) -> DistillationConfig:
        given = self.model_dump(exclude_defaults=True).keys() - {"teacher"}
        for needs, has, fields in (
            ("a teacher", self.is_used, given),
            ("a teacher on a server", self.is_served, {*OF_SERVER}),
            ("mode topk_logits", self.mode == "topk_logits", {"topk", "add_tail"}),
            ("mode topk_logits or full_logits", self.is_divergence, {"jsd_beta"}),
        ):
            if not has and (unused := given & fields):
                raise ValueError(f"{min(unused)} has no effect without {needs}")
        if self.is_served and self.is_divergence:
            raise ValueError(
                f"mode = {self.mode!r} needs the teacher's logits; a server returns "
                "log-probabilities for sampled_token"
            )
        if self.teacher == "policy" and self.prompt is None:
            raise ValueError("teacher = 'policy' needs a prompt: else it agrees with the policy")
        if not self.add_tail and self.jsd_beta > 0:
            raise ValueError(
                f"add_tail = false needs jsd_beta = 0, not {self.jsd_beta:g}: the loss would fall "
                "where the policy leaves the teacher's likeliest tokens"
            )
        return self


class LearnerConfig(Section):
    """Training."""

    max_steps: NonNegative = 100
    """Batches to train on; each makes one version of the weights. 0: no training; the model is
    evaluated on all suites of section `eval`, as by `rhymeflow eval`."""
    groups_per_batch: Positive = 16
    """Groups (prompts) per batch, each of `rollout.num_generations` trajectories."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """What steps the weights. `adamw_8bit`: AdamW with 2 bytes of moments a parameter, not 8.
    `muon`: Muon (arXiv 2502.16982) for the matrices of layers, at AdamW's learning rates, with one
    moment, and AdamW for embeddings, head, norms and biases; on one rank, without experts."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of the optimizer."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    min_lr_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """`cosine`: share of the peak at which it ends, as transformers' `cosine_with_min_lr` does."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from 0."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's decay of its moment."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, of matrices."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Norm to which the gradient is clipped; `None` does not clip."""
    max_skipped_steps: Positive = 4
    """Optimizer steps in a row with a non-finite gradient at which the run stops. Until then they
    are skipped: such a step consumes its batch, and its version has the previous weights."""
    num_iterations: Positive = 1
    """Training passes over each batch (GRPO's mu)."""
    num_minibatches: Positive = 1
    """Optimizer steps per pass, each on an equal number of whole groups."""
    algorithm: Literal[
        "grpo", "dr_grpo", "dapo", "bnpo", "gdpo", "rloo", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "ppo",
    ] = "dapo"  # fmt: skip
    """What is optimized (docs/algorithms.md). It is a combination of `advantage`, `scale_rewards`,
    `multi_objective_aggregation`, `ratio`, `surrogate`, `loss_type`, `epsilon` and `epsilon_high`:
    those of them that are not set have the values that were published with it. `--dry-run` prints
    them. The defaults below are those of `dapo`."""
    advantage: str = "group_mean"
    """How much better than others a response is: its reward minus the `group_mean`; minus the mean
    of the others in its group (`leave_one_out`, RLOO); minus the group's mean by tokens
    (`length_weighted`, OPO); the `reward` itself (REINFORCE++); or `best_of_group` (pass@k): the
    best response's lead over the second, and 0 for the others. Or your function of a group's
    rewards and lengths (arrays) that returns its advantages, `path/to/file.py:function`. `gae`
    (PPO) compares no responses: a critic, a second model that is trained beside the policy,
    estimates each token's advantage."""
    scale_rewards: Literal["group", "batch", "none", "tokens"] = "group"
    """Responses whose rewards' standard deviation divides an advantage: those of its `group` or
    `batch`. `none`: it is not divided. `tokens`: advantages are whitened, to mean 0 and standard
    deviation 1 over the batch's tokens (REINFORCE++)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """How several rewards make an advantage. `sum_then_normalize`: sum them by their weights, and
    compare the sums in each group. `normalize_then_sum` (GDPO, arXiv 2601.05242): scale each to
    mean 0 and standard deviation 1 in its group, so that a large one does not hide the others, sum
    these by the weights, and divide the sums by the batch's standard deviation. `advantage` is then
    `group_mean` and `scale_rewards` `group`."""
    ratio: str = "token"
    """What the probability ratio of the policy to the one that it is kept close to is of: the
    `token`; the `product` over the response's tokens; their geometric mean (`sequence`, GSPO), or
    with the gradient of each token its own (`sequence_token`, GSPO-token); their geometric mean
    after clipping each (`clipped_sequence`, GMPO). Or your function, `path/to/file.py:function`, of
    the tokens' log-ratios, their advantages, `Responses` and `LearnerConfig`. All but `token` need
    one more forward pass per optimizer step."""
    surrogate: str = "clip"
    """What is maximized: PPO's clipped ratio times the advantage (`clip`); the log-probability,
    weighted by the advantage and the clipped ratio without gradient (`weighted_log`, CISPO); a
    `sigmoid` of the ratio (SAPO); or ratio times advantage (`linear`). Or your function of the
    tokens' ratios, advantages, log-probabilities and `LearnerConfig` that returns their losses."""
    loss_type: str = "dapo"
    """Normalisation of the loss, by TRL's names; micro-batches do not change it. `grpo`: mean over
    each response's tokens, then over responses. `bnpo`: mean over the optimizer step's tokens.
    `dapo`: sum over the step, divided by the mean number of tokens of the batch's steps (`bnpo` if
    there is one minibatch). `dr_grpo`: sum divided by responses times `max_completion_length`. Or
    your function of a response's tokens in the loss and `max_completion_length` that returns the
    factor of each of these tokens and what the response adds to the step's divisor."""
    epsilon: PositiveFloat = 0.2
    """The probability ratio is clipped below at 1 minus this; GMPO's log-ratio at minus this."""
    epsilon_high: PositiveFloat | None = 0.28
    """The ratio is clipped above at 1 plus this (clip-higher, DAPO); `None` takes `epsilon`."""
    delta: PositiveFloat | None = None
    """`clip`: greatest ratio in the term that is not clipped (INTELLECT-2), above 1 plus
    `epsilon_high`; bounds the loss where the advantage is negative. `None`: no bound."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """`clip`: where the advantage is negative, the loss is at most minus this times it (dual-clip
    PPO; verl's default is 3), and carries no gradient past that. `None`: no bound."""
    gamma: Fraction = 1.0
    """`gae`, or `reward` with `scale_rewards: tokens`: discount of what follows a token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """`gae`: 0 takes what follows a token from the critic's value of the next one, which has bias;
    1 from the reward, which has variance."""
    cliprange_value: PositiveFloat | None = 0.2
    """`gae`: how far from a token's value before the step the critic may bring it, in units of the
    reward. `None`: any distance."""
    critic_learning_rate: PositiveFloat = 1e-5
    """`gae`: peak learning rate of the critic; its schedule is the policy's."""
    critic_warmup_steps: NonNegative = 0
    """`gae`: first steps of a run, which train the critic alone and leave the policy as it is."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """`sigmoid`: its steepness where the advantage is positive."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """`sigmoid`: its steepness elsewhere."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference, the model that the run started from, with
    `model.lora.adapter` with that adapter; 0 keeps no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where that KL term is: in each token's `loss`, or in the `reward`, from which its sum over
    the response, under the policy before the step, is subtracted."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """How it is estimated per token. With `+`, in the loss, the gradient is that of k2 (verl's
    straight-through estimators)."""
    use_bias_correction_kl: bool = True
    """In the loss, multiply the estimate by the probability ratio, as TRL and DeepSeek-V3.2 do."""
    distillation: DistillationConfig = DistillationConfig()
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the policy's entropy, which is maximized too, normalised as the loss is."""
    top_entropy_quantile: Fraction = 1.0
    """Share of the batch's tokens, those of highest entropy before the step, that have a part in
    the surrogate (arXiv 2506.01939); all count in the normalisation."""
    reward_clip: PositiveFloat | None = None
    """Bound of a reward, and negated the lower one, before advantages. `None`: no bound."""
    advantage_clip: PositiveFloat | None = None
    """Bound of an advantage, and negated the lower one. `None`: no bound."""
    overlong_buffer: NonNegative = 0
    """Soft overlong punishment (DAPO): over the last so many tokens before
    `rollout.max_completion_length` the reward falls by up to `overlong_penalty`. 0: none."""
    overlong_penalty: PositiveFloat = 1.0
    """What a response of the greatest length loses by `overlong_buffer`."""
    off_policy_correction: Literal["none", "proximal", "tis", "decoupled"] = "none"
    """Correction for tokens that an older policy mu sampled. `none`: no weight; the clip is around
    mu, so what staleness moved past it has no gradient (PPO; docs/off-policy.md says why this is
    the default). `tis` and `decoupled` clip around pi_prox, the learner's policy before the batch's
    first optimizer step, and multiply each token's clipped objective by a constant weight, of u =
    pi_prox / mu. `tis` (token-level truncated importance sampling): the weight is min(u, cap).
    `decoupled` (decoupled PPO as AReaL runs it): the weight is u, or 0 if u is above the cap.
    `proximal`: clips around pi_prox, without a weight (verl's way without a correction). The KL
    term is not weighted."""
    importance_sampling_cap: PositiveFloat = 2.0
    """The cap of `off_policy_correction`; StaleFlow's authors use 2."""
    importance_sampling_floor: PositiveFloat | None = None
    """A lower bound of u: `tis` raises u to it, `decoupled` gives weight 0 below it (IcePop)."""
    off_policy_level: Literal["token", "sequence", "geometric_mean"] = "token"
    """What u is of: the `token`; the whole response (`sequence`), the product over its tokens; or
    their `geometric_mean`. All but `token` need one more forward pass per batch."""
    normalize_importance_weights: bool = False
    """Divide the weights by their mean over the batch's tokens."""
    off_policy_masks: dict[MaskName, PositiveFloat] = {}
    """Tokens or whole responses to leave out where pi_prox is far from mu; they still count in the
    normalisation. By verl's names: the estimate k1, k2 or k3 of KL(mu || pi_prox), of each token
    (`token_k2`) or the sum, mean or maximum over the response (`seq_mean_k2`), may be at most the
    bound. With k1, mu / pi_prox (the product or geometric mean over the response) lies between the
    bound and its inverse. `veto`: the least u that a token of the response may have."""
    off_policy_mask_threshold: PositiveFloat | None = None
    """Leave out a response with a negative advantage if the mean over its tokens of log(mu / pi) is
    above this (DeepSeek-V3.2's off-policy sequence masking). `None`: leave none out."""
    mask_truncated_completions: bool = False
    """Leave responses that `rollout.max_completion_length` or `schedule.on_stuck: truncate` cut out
    of the loss (DAPO's overlong filtering). Those that `environment.max_turns` ended stay in."""
    frozen_parameters: tuple[str, ...] = ()
    """Names of parameters that are not trained, or patterns with `*`, such as
    `model.embed_tokens.weight` or `model.layers.0.*`. `Trainer` adds the parameters of a model
    object whose `requires_grad` is false. A critic is trained whole."""
    max_tokens_per_microbatch: Positive = 8192
    """Packed tokens per forward and backward pass; gradients accumulate over micro-batches."""
    logits_chunk_size: Positive = 1024
    """Tokens whose logits are in memory at one time."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention of the learner over packed rows. `auto`: on CPUs a compiled kernel over the packed
    row (float32 and bfloat16, head sizes that are multiples of 16), on GPUs `flex` if the model
    caps its scores (Gemma 2), elsewhere `sdpa`. `sdpa`: PyTorch's `scaled_dot_product_attention`
    over sequences that are padded to one length, each with its own copy of a shared prompt; capped
    scores are kept, which takes much memory. `flex`: PyTorch's FlexAttention over the packed row,
    on GPUs only; compiled at the first step."""
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
            f"learner.scale_rewards = '{self.scale_rewards}'": self.scale_rewards
            in ("batch", "tokens"),
            "learner.advantage = 'gae'": self.has_critic,
            "learner.kl_in = 'reward'": self.kl_in == "reward",
            f"learner.top_entropy_quantile = {self.top_entropy_quantile}": (
                self.top_entropy_quantile < 1.0
            ),
            "learner.normalize_importance_weights": self.normalize_importance_weights,
            "learner.multi_objective_aggregation = 'normalize_then_sum'": (
                self.multi_objective_aggregation == "normalize_then_sum"
            ),
        }
        return next((setting for setting, is_on in needs.items() if is_on), "")

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.advantage == "gae"

    @property
    def discounts(self) -> bool:
        """Whether a token's advantage is of the rewards that follow it: with a critic, or without
        any baseline but the batch's (REINFORCE++)."""
        return self.has_critic or (self.advantage == "reward" and self.scale_rewards == "tokens")

    @property
    def trains_on_all(self) -> bool:
        """Whether a response has a gradient even if all rewards of its group are equal."""
        has_terms = self.beta > 0.0 or self.entropy_coef > 0.0 or self.distillation.is_used
        return has_terms or self.advantage in ("gae", "reward") or self.scale_rewards == "tokens"

    @property
    def corrects(self) -> bool:
        """Whether tokens of another policy are weighted or masked."""
        has_masks = bool(self.off_policy_masks) or self.off_policy_mask_threshold is not None
        return self.off_policy_correction != "none" or has_masks

    @property
    def needs_whole_responses(self) -> bool:
        """Whether a token's loss depends on the other tokens of its response, which are then scored
        before it, without gradient."""
        return (
            self.ratio != "token"
            or self.off_policy_level != "token"
            or self.off_policy_mask_threshold is not None
            or any(not name.startswith("token") for name in self.off_policy_masks)
        )

    @property
    def needs_proximal(self) -> bool:
        """Whether a batch is scored by the policy before its first step in a pass of its own."""
        is_one_step = self.num_iterations == 1 and self.num_minibatches == 1
        of_batch = self.normalize_importance_weights or self.top_entropy_quantile < 1.0
        return of_batch or (self.corrects and not is_one_step)

    @property
    def kl_weight(self) -> float:
        """Weight of the KL term in the loss."""
        return self.beta if self.kl_in == "loss" else 0.0

    @property
    def needs_start(self) -> bool:
        """Whether the policy is kept as the run started."""
        return self.beta > 0.0 or self.distillation.teacher == "start"

    @property
    def is_used(self) -> bool:
        """Whether the run trains."""
        return self.max_steps > 0

    @property
    def clips(self) -> bool:
        """Whether something may bound a ratio by `epsilon`: a user's own part is given it."""
        of_ratio = self.ratio == "clipped_sequence" or self._has_own_part
        return of_ratio or self.surrogate in ("clip", "weighted_log")

    @property
    def bounds_without_effect(self) -> str:
        """A note on bounds of ratios that were set though all ratios are 1, or ""."""
        is_one_step = self.num_iterations == 1 and self.num_minibatches == 1
        names = [f"learner.{name}" for name in (*_CLIPS, *_BOUNDS, *_OF_SAPO) if self._sets(name)]
        is_one = is_one_step and self.off_policy_correction != "none" and not self._has_own_part
        if not names or not is_one:
            return ""
        return (
            f"{', '.join(names)}: without effect, since every ratio is 1: a batch makes one "
            "optimizer step (learner.num_minibatches, num_iterations), and "
            f"learner.off_policy_correction is {self.off_policy_correction}"
        )

    @property
    def _parts(self) -> Mapping[str, Any]:
        return ALGORITHMS[self.algorithm]

    @property
    def _has_own_part(self) -> bool:
        """Whether a ratio or surrogate is a user's, which is given the configuration."""
        parts = ((each["ratio"], each["surrogate"]) for each in ALGORITHMS.values())
        ratios, surrogates = map(set, zip(*parts, strict=True))
        return self.ratio not in ratios or self.surrogate not in surrogates

    def _sets(self, name: str) -> bool:
        """Whether a field has another value than it would have by itself."""
        default = self._parts.get(name, LearnerConfig.model_fields[name].default)
        value, takes_other = getattr(self, name), name == "epsilon_high"
        return value != default and not (takes_other and value is None)

    @model_validator(mode="after")
    def _parts_of_algorithm(self) -> LearnerConfig:
        parts = self._parts.items()
        # In place, since the fields count as not set: another algorithm may replace them.
        self.__dict__.update({k: v for k, v in parts if k not in self.model_fields_set})
        return self

    @model_validator(mode="after")
    def _critic_fits(self) -> LearnerConfig:
        for value in (self.scale_rewards, self.multi_objective_aggregation):
            if self.has_critic and value in ("group", "batch", "normalize_then_sum"):
                raise ValueError(
                    f"learner.advantage = 'gae' compares no rewards, as '{value}' does; give "
                    "learner.algorithm: ppo, or learner.scale_rewards 'tokens' or 'none' and "
                    "learner.multi_objective_aggregation 'sum_then_normalize'"
                )
        return self

    @model_validator(mode="after")
    def _has_an_effect(self) -> LearnerConfig:
        surrogate, schedule, is_own = self.surrogate, self.lr_scheduler_type, self._has_own_part
        weighs = self.off_policy_correction in ("tis", "decoupled")
        is_sum = self.multi_objective_aggregation == "sum_then_normalize"
        has_rewards = self.distillation.reward_weight > 0.0
        of_advantage = ("advantage", "scale_rewards", "advantage_clip", *_OF_REWARD)
        discounts = "learner.advantage: gae, or reward with learner.scale_rewards: tokens"
        for setting, is_on, names in (
            ("learner.advantage: gae", self.has_critic, _OF_CRITIC),
            (discounts, self.discounts, ("gamma",)),
            ("learner.surrogate: clip", is_own or surrogate == "clip", _BOUNDS),
            ("learner.surrogate: sigmoid", is_own or surrogate == "sigmoid", _OF_SAPO),
            ("a surrogate or ratio that clips", self.clips, _CLIPS),
            ("learner.beta above 0", self.beta > 0.0, ("kl_in", *_OF_KL)),
            ("learner.kl_in: loss", self.kl_in == "loss", ("use_bias_correction_kl",)),
            ("learner.overlong_buffer", self.overlong_buffer > 0, ("overlong_penalty",)),
            ("learner.off_policy_correction: tis or decoupled", weighs, _OF_WEIGHTS),
            ("learner.multi_objective_aggregation: sum_then_normalize", is_sum, _OF_REWARD),
            ("learner.distillation.reward_weight above 0", has_rewards, of_advantage),
            ("learner.optimizer: muon", self.optimizer == "muon", ("muon_momentum",)),
            ("learner.lr_scheduler_type: cosine", schedule == "cosine", ("min_lr_rate",)),
        ):
            for name in names:
                if not is_on and self._sets(name):
                    raise ValueError(f"learner.{name}: has no effect without {setting}")
        return self

    @model_validator(mode="after")
    def _bounds_fit(self) -> LearnerConfig:
        cap, floor = self.importance_sampling_cap, self.importance_sampling_floor
        high = 1.0 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        if self.multi_objective_aggregation == "normalize_then_sum":
            for name in ("advantage", "scale_rewards"):
                value, own = getattr(self, name), LearnerConfig.model_fields[name].default
                if value != own:
                    raise ValueError(
                        f"learner.{name} = {value!r}: has no effect with "
                        f"learner.multi_objective_aggregation = 'normalize_then_sum'; give {own!r}"
                    )
        if floor is not None and floor >= cap:
            raise ValueError(
                f"learner.importance_sampling_floor = {floor:g}: give less than "
                f"learner.importance_sampling_cap = {cap:g}"
            )
        if self.delta is not None and self.delta <= high:
            raise ValueError(
                f"learner.delta = {self.delta:g}: give more than {high:g}, 1 plus "
                "learner.epsilon_high, at which the other term is clipped"
            )
        if self.kl_in == "reward" and self.kl_estimator.endswith("+"):
            raise ValueError(
                f"learner.kl_estimator = {self.kl_estimator!r}: a KL in the reward has no "
                f"gradient; give {self.kl_estimator[:-1]!r}"
            )
        return self

    @model_validator(mode="after")
    def _ranks_fit(self) -> LearnerConfig:
        if self.offload_optimizer and self.num_ranks == 1:
            raise ValueError(
                "learner.offload_optimizer needs learner.num_ranks of at least 2: a learner of "
                "one rank keeps its optimizer on the model's device"
            )
        if self.optimizer == "muon" and self.num_ranks > 1:
            raise ValueError(
                f"learner.optimizer = 'muon': not with learner.num_ranks = {self.num_ranks} yet: "
                "it makes whole matrices orthogonal, and a rank has some rows of each"
            )
        if self.cpus and len(self.cpus) < self.num_ranks:
            raise ValueError(
                f"learner.cpus = {list(self.cpus)} is too few for learner.num_ranks = "
                f"{self.num_ranks}: each needs its own core"
            )
        return self


class SftConfig(Section):
    """Supervised fine-tuning by `rhymeflow sft`. It also uses sections `model` and `data`, and of
    section `learner` the optimizer with its constants, clipping, packing, attention and threads."""

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
    """Peak learning rate of the optimizer."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the learning rate after the warm-up."""
    min_lr_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """`cosine`: share of the peak at which it ends, as transformers' `cosine_with_min_lr` does."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from 0."""
    save_dtype: Literal["compute", "bfloat16"] = "compute"
    """Precision of the saved weights. `compute`: the precision of training."""
    output_dir: str | None = None
    """Directory for the checkpoint, which must not exist yet; `None`: `runs/NAME-sft`."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> SftConfig:
        if self.min_lr_rate and self.lr_scheduler_type != "cosine":
            raise ValueError("sft.min_lr_rate: has no effect without sft.lr_scheduler_type: cosine")
        return self
