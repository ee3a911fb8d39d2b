"""The whole configuration of a run: frozen, typed, every field documented where it stands.

Holds true: every default of Rhymeflow is in this file and nowhere else; a `Config` that exists is
valid; two runs with equal configurations are the same run. Knows nothing of files, torch or the
machine: `settings.py` reads YAML and the command line into a `Config`.

Fields carry TRL's names where TRL has the same thing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


FIXED_BOUNDS = {"synchronous": 0, "one_step": 1, "histopipe": 1}
"""The schedules whose staleness bound is theirs, and not `schedule.max_staleness`."""


class Section(BaseModel):
    """Base of every section: immutable, unknown fields refused, defaults validated."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, ser_json_inf_nan="constants"
    )


class ModelConfig(Section):
    """The policy."""

    name: str = "recipe:demo"
    """A local directory, a Hugging Face hub name, `package:NAME` (weights that an installed Python
    package carries) or `recipe:NAME` (weights shipped with a recipe)."""
    gguf_file: str | None = None
    """The GGUF file inside the directory or package, if the weights are in that format."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute precision of engine and learner. `auto`: bfloat16 on CUDA and on CPUs with bfloat16
    arithmetic, float32 elsewhere and for models under 20 million parameters. The learner's master
    weights are float32 either way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""


class DataConfig(Section):
    """Prompts to train on and to hold out."""

    source: str = "recipe:demo"
    """A JSONL or Parquet file, a directory saved by Hugging Face `datasets`, `reasoning_gym:NAME`,
    or `recipe:NAME` (the task of a recipe)."""
    options: dict[str, Any] = {}
    """Passed on to a task generator, such as `{min_terms: 2}` for reasoning_gym's `chain_sum`."""
    size: Positive | None = None
    """Number of training prompts; `None` takes all of a file. Generators need a number."""
    eval_source: str | None = None
    """Held-out prompts. `None`: a generator makes further, distinct problems; a file gives its last
    `eval_size` rows, which are then not trained on."""
    eval_size: NonNegative = 64
    """Number of held-out prompts; 0 switches evaluation off."""
    prompt_column: str = "prompt"
    """Column that holds the prompt: a string or a list of chat messages."""
    system_prompt: str | None = None
    """Put before every prompt as a system message (chat models only)."""
    assistant_prefix: str | None = None
    """Put after every prompt as the beginning of the answer. Part of the prompt: rewards see what
    the policy adds to it."""
    max_prompt_length: Positive | None = None
    """Longest prompt in tokens; a longer one is refused with its row, never cut silently."""
    shuffle: bool = True
    """A new order each epoch, from the run's seed."""
    chat_template: bool | None = None
    """Whether string prompts are wrapped as a user message. `None`: if the tokenizer has one."""


class RolloutConfig(Section):
    """Generation."""

    num_generations: Positive = 8
    """Trajectories per prompt (a group)."""
    max_completion_length: Positive = 512
    """Longest response in tokens; one that reaches it ends with reason `length`."""
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: Fraction = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegative = 0
    """Sample among the k likeliest; 0 is off."""
    rhyming_noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a group's responses whose sampling noise is that of the same response in every
    epoch. They are exact samples under weights that have not learnt from that noise, and drafted
    from history far better; the price is less fresh exploration (docs/drafting.md)."""
    num_instances: Positive = 1
    """Rollout instances, each a process of its own."""
    max_running: Positive = 64
    """Trajectories that one instance decodes at a time."""
    max_prefill_tokens: Positive = 4096
    """Prompt tokens that one iteration may take in."""
    kv_cache_on_pull: Literal["recompute", "keep"] = "recompute"
    """What becomes of the KV cache of a response that goes on under new weights: `recompute` takes
    its tokens in again; `keep` goes on with the old keys and values, which costs nothing and makes
    its log-probabilities belong to no one version."""
    max_kv_tokens: Positive | None = None
    """Tokens in the KV cache of one instance beyond which nothing more is routed to it; `None`: as
    many as `max_running` of the longest responses need."""
    num_threads: Positive | None = None
    """Threads of each instance; `None` shares the machine's cores between the workers."""
    cpus: tuple[tuple[NonNegative, ...], ...] | None = None
    """Cores each instance is pinned to, one tuple an instance; `None` pins nothing."""


class DraftingConfig(Section):
    """Speculative decoding from history: what a prompt's earlier responses said is proposed, and
    the policy verifies it. What is sampled stays the same token for token."""

    window: Literal["off", "aimd", "doubling", "cost"] = "cost"
    """How many tokens are drafted. `aimd`: two more after a draft that was accepted whole, back to
    two after a rejection (RhymeRL). `doubling`: twice, and half. `cost`: as many, and for those
    responses, as make the most accepted tokens a second by the iteration times the engine measures;
    none where drafts do not pay. `off`: no drafts."""
    max_draft: Positive = 16
    """Most tokens drafted for one response in one iteration."""
    shape: Literal["linear", "tree"] = "linear"
    """`tree` drafts several continuations at once where history disagrees."""
    ranking: Literal["reward", "frequency", "combined"] = "combined"
    """What makes one continuation likelier than another: the rewards of the responses it comes
    from, how many of them there are, or both."""
    history_tokens: Positive = 4_000_000
    """Tokens of history that are kept; the oldest go first."""
    history: str | None = None
    """Run directory of an earlier run to begin the history with."""

    @property
    def history_responses(self) -> int:
        """Responses that are kept: of 64 tokens and more, as many as `history_tokens` holds."""
        return -(-self.history_tokens // 64)


class RewardFunction(Section):
    """One reward function and its weight in the sum."""

    function: str
    """`path/to/file.py:function`, a dotted name, or a built-in: `exact_match`, `math_verify`,
    `regex`, `reasoning_gym`, `recipe:NAME`."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    options: dict[str, Any] = {}
    """Keyword arguments bound before the call, such as `{pattern: ...}` for `regex`."""


class RewardConfig(Section):
    """How a trajectory is judged."""

    functions: tuple[RewardFunction, ...] = (RewardFunction(function="exact_match"),)
    """The weighted sum of these is the reward."""
    num_workers: Positive = 1
    """Worker processes."""
    timeout: PositiveFloat = 60.0
    """Seconds one call may take before its worker is killed and the call counts as failed."""
    start_timeout: PositiveFloat = 120.0
    """Seconds a worker may take to import the functions."""
    retries: NonNegative = 1
    """Further tries after a call that raised, hung, or returned something that is no reward."""
    on_failure: Literal["stop", "drop"] = "stop"
    """After the last try: stop the run and show the error, or drop the group, counted under
    `endings/aborted`. A failure never becomes a reward."""


class LearnerConfig(Section):
    """Training."""

    max_steps: Positive = 100
    """Optimizer versions to produce; the run ends after this many batches."""
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
    epsilon: PositiveFloat = 0.2
    """Lower clip of the probability ratio."""
    epsilon_high: PositiveFloat | None = 0.28
    """Upper clip (clip-higher, DAPO); `None` takes `epsilon`."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL to the reference (the model the run started from), estimated per token by
    k3 times the probability ratio as in TRL; 0 keeps no reference."""
    off_policy_correction: Literal["none", "truncate", "decoupled"] = "truncate"
    """What is done about the behaviour policy mu, which sampled a token, not being the policy that
    is trained. `truncate` and `decoupled` clip around pi_prox, the learner's policy before the
    batch's first optimizer step, and weigh each token's clipped objective by u = pi_prox / mu, a
    constant. `truncate` (token-level TIS): the weight is min(u, cap). `decoupled` (decoupled PPO as
    AReaL runs it): the weight is u, and 0 where u is past the cap. `none`: no weight, and the clip
    is around mu itself. The KL term is not weighted."""
    importance_sampling_cap: PositiveFloat = 2.0
    """Cap of u. StaleFlow is paired with truncation at 2."""
    mask_truncated_completions: bool = False
    """Leave responses that hit the length limit out of the loss (DAPO's overlong filtering)."""
    max_tokens_per_microbatch: Positive = 8192
    """Packed tokens per forward and backward; gradients accumulate over the batch."""
    logits_chunk_size: Positive = 1024
    """Rows of the head's output that exist at one time."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, about a third more time."""
    num_threads: Positive | None = None
    """Threads; `None` shares the machine's cores between the workers."""
    cpus: tuple[NonNegative, ...] | None = None
    """Cores to pin the learner to; `None` pins nothing."""


class ScheduleConfig(Section):
    """When work is admitted, where it goes and when weights are pulled.

    `name` is a bundle of such rules; `routing`, `sync`, `migration` and `on_pull` replace one of
    them. Each takes a name or a function of your own, `path/to/file.py:function` or dotted.
    """

    name: Literal[
        "synchronous", "one_step", "bounded", "partial", "staleflow", "histopipe", "rhymeflow"
    ] = "rhymeflow"
    """`synchronous`: rollout and training take turns. `one_step`: the next batch is produced while
    one is trained on, batch by batch. `bounded`: no batches; as many groups are under way as the
    bound allows, and an instance pulls when it has finished what it runs. `partial`: responses go
    on across versions; an instance pulls whenever it lags. `staleflow`: responses also move between
    instances; routing by marginal throughput, migration, one batch's worth of groups at a time.
    `histopipe`: prompts are ranked by the lengths of their earlier responses and laid out over the
    instances step by step, long beside short. `rhymeflow`: as `staleflow`, but what is left of an
    old version is gathered on few instances, and what is about to end is not moved."""
    max_staleness: NonNegative | None = None
    """The bound: how many versions old a trajectory may be when trained on. `None`: 0 for
    `synchronous`, 1 for the others."""
    routing: str | None = None
    """`fewest_requests`, `waterfall` or `laid_out`; `None` as the schedule has it."""
    sync: str | None = None
    """When an instance pulls: `drained`, `greedy`, `status` or `consolidated`; `None` as the
    schedule has it."""
    migration: str | None = None
    """`none`, `rebalance`, `lasting` or `outliers`; `None` as the schedule has it."""
    on_pull: Literal["drain", "keep", "spread"] | None = None
    """What becomes of what runs on an instance that pulls: `drain` lets it finish first, `keep`
    goes on with it there, `spread` routes it anew; `None` as the schedule has it."""
    pace: PositiveFloat | None = None
    """Batches' worth of groups produced at a time: fewer leave the machine to the groups that the
    learner waits for, more fill it better. `None` as the schedule has it: 1 for `staleflow`, 1.5
    for `rhymeflow`, as many as the bound allows for the others."""
    cost_model: str = "demo-cpu"
    """What routing weighs with: a profile's name, or a file that `rhymeflow calibrate` wrote."""
    routing_gain: NonNegativeFloat = 0.0
    """StaleFlow's mu: an instance is taken if it gains at least this share of what an empty one
    would. Its authors take 0.2 to 0.3, which leaves caches half empty for fresher versions; in our
    measurements 0 trains more (docs/lab-log.md)."""
    kv_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of an instance's KV cache that `waterfall` leaves free, so that what runs can grow."""
    max_waiting: NonNegative = 3
    """With more than this many waiting on an instance, they are sent back to be routed anew."""
    throughput_ratio: Annotated[float, Field(gt=1)] | None = None
    """An instance gives work away to one that has this many times less of it. `None` as the
    schedule has it: 3 for `rhymeflow`, 5 (StaleFlow's) for the others."""
    crowding: Annotated[float, Field(gt=1)] | None = None
    """Sync rule `consolidated`: how many times slower than alone a response may be decoded among
    those that the last instances of an old version take over. `None`: 1 + (bound + 1) / 8."""
    tier_1: bool = True
    """`histopipe`: a step's layout runs against the one before it, and an instance begins the next
    step while others are at this one. `False`: every step waits for the one before."""
    tier_2: bool = True
    """`histopipe`: long responses get more instances, by search over completion times. `False`:
    every instance gets as many prompts."""
    growth: Annotated[float, Field(gt=1)] = 1.5
    """`histopipe`: a response among the last of its instance is moved elsewhere, or put off to the
    next step, when it has this many times the tokens that its prompt's history made expect."""
    urgency: Annotated[float, Field(ge=1)] = 1.0
    """What a token of a response that the next batch waits for is worth, in tokens of others, when
    drafts are chosen; 1: as much."""
    extra_groups: NonNegative = 0
    """Groups produced for each batch beyond `groups_per_batch`; the slowest are aborted."""
    extra_generations: NonNegative = 0
    """Trajectories produced for each group beyond `num_generations`; the slowest are aborted."""
    filter_zero_variance: bool = False
    """Train on no group whose rewards are all equal, but on another prompt (DAPO's dynamic
    sampling)."""
    max_filtered_batches: Positive = 4
    """How many batches' worth of groups may be filtered between two steps; then they pass."""
    on_stuck: Literal["wait", "retry", "truncate"] = "wait"
    """What is done when an idle learner waits for the last `stuck_threshold` groups of a batch:
    `retry` aborts them and draws their prompts again, `truncate` trains on what there is of
    them."""
    stuck_threshold: Positive = 1
    """Groups that may be missing for a batch to count as stuck."""
    max_retries: NonNegative = 2
    """Times a prompt is drawn again because of `on_stuck`; then it is waited for."""

    @property
    def bound(self) -> int:
        """The staleness bound."""
        if self.max_staleness is None:
            return FIXED_BOUNDS.get(self.name, 1)
        return self.max_staleness

    @model_validator(mode="after")
    def _bound_fits(self) -> ScheduleConfig:
        fixed = FIXED_BOUNDS.get(self.name)
        if fixed is not None and self.bound != fixed:
            raise ValueError(
                f"max_staleness = {self.max_staleness} does not fit the schedule "
                f"`{self.name}`, whose bound is {fixed}"
            )
        return self


class WorkloadConfig(Section):
    """How long the responses of a simulated run are. `--workload RUN_DIR` takes them from a run.

    Lengths follow `kind`, cut off at `rollout.max_completion_length`; each prompt has its own
    level, so that what it did before says something about what it will do.
    """

    kind: Literal["lognormal", "bimodal", "power_law"] = "lognormal"
    """`bimodal`: short responses and long ones, both lognormal; `power_law`: many short, and a tail
    that falls as a power of the length."""
    mean_length: PositiveFloat | None = None
    """Mean tokens of a response, after the cut-off; `None`: a quarter of
    `rollout.max_completion_length`."""
    sigma: PositiveFloat = 0.8
    """Standard deviation of the logarithm, of each mode where there are two."""
    long_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """`bimodal`: share of responses in the long mode."""
    long_ratio: Annotated[float, Field(gt=1)] = 6.0
    """`bimodal`: how many times the short mode's median the long mode's is."""
    tail_exponent: PositiveFloat = 1.5
    """`power_law`: a response is longer than x with probability x to the power of minus this."""
    prompt_tokens: Positive = 128
    """Tokens of each prompt."""
    num_prompts: Positive = 10_000
    """Prompts of an epoch."""
    prompt_variance_share: Annotated[float, Field(ge=0, le=1)] = 0.65
    """Share of the variance of lengths that the prompt explains within an epoch. 0.65 is what
    RhymeRL's authors report."""
    epoch_correlation: Annotated[float, Field(ge=0, le=1)] = 0.98
    """Correlation of a prompt's level between one epoch and the next; below 1 it drifts."""
    decided_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of prompts whose responses all get the same reward."""


class SimulationConfig(Section):
    """The cluster that `rhymeflow simulate` runs a configuration on, in virtual time."""

    profile: str | None = None
    """How fast the cluster is: a profile's name or file; `None`: that of `schedule.cost_model`,
    so that routing weighs with the truth."""
    num_devices: Positive | None = None
    """Devices in all. `None`: `rollout.num_instances` instances, and one device to train on."""
    rollout_devices: Positive | None = None
    """Those of them that instances run on, the rest trains; `None` takes half."""
    colocated: bool = False
    """All devices produce, then all of them train, in turn. Only where the schedule's bound is 0:
    else the two would go on at the same time on the same devices."""
    workload: WorkloadConfig = WorkloadConfig()
    skip_steps: NonNegative = 1
    """Steps at the beginning that throughput and idle shares leave out."""
    acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.7
    """Chance that a drafted token is accepted, given that those before it were, for a prompt that
    was answered in an earlier epoch. RhymeRL's authors report 65% to 79% of drafted tokens. Drafts
    follow `drafting.window` (`off`: none, else as many as pay) and `drafting.max_draft`."""
    first_acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """The same for a prompt that was not answered before: drafts come from siblings only."""
    share_prompts: bool = True
    """Of running members of a group one computes the prompt and the others copy it, as the engine
    does; `False` charges each of them."""
    kv_watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of the KV cache that an admission leaves free, so that what runs can grow."""
    tick_seconds: PositiveFloat = 0.01
    """The mind plans at most this often, and only when something has happened."""
    snapshot_seconds: PositiveFloat = 0.25
    """How often a busy instance says how it is, besides after commands."""
    command_seconds: NonNegativeFloat = 0.001
    """From the mind to an instance or the learner."""
    fact_seconds: NonNegativeFloat = 0.001
    """From an instance or the learner to the mind."""
    reward_seconds: NonNegativeFloat = 0.01
    """For judging a response; any number are judged at a time."""
    timeline_rows: Positive = 64
    """Instances that the timeline shows; of more, evenly chosen ones."""

    @model_validator(mode="after")
    def _devices_fit(self) -> SimulationConfig:
        if self.colocated and (self.num_devices is None or self.rollout_devices is not None):
            raise ValueError("colocated takes num_devices, all of them, and no rollout_devices")
        if self.rollout_devices is not None and (
            self.num_devices is None or self.rollout_devices >= self.num_devices
        ):
            raise ValueError(
                f"rollout_devices = {self.rollout_devices} leaves nothing to train on of "
                f"num_devices = {self.num_devices}"
            )
        return self


class RunConfig(Section):
    """The run as a whole."""

    seed: NonNegative = 0
    """Seeds data order, sampling noise and generators."""
    output_dir: str | None = None
    """The run directory; `None` makes `runs/NAME-DATE-TIME`."""
    eval_steps: NonNegative = 10
    """Evaluate on held-out prompts every so many versions, and at the start and the end; 0: only
    at the start and the end."""
    eval_temperature: NonNegativeFloat = 0.0
    """Temperature of held-out evaluation; 0 is greedy."""
    save_steps: NonNegative = 0
    """Checkpoint every so many steps, and at the end; 0: only at the end."""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Where metrics go besides `metrics.jsonl`."""
    worker_timeout: PositiveFloat = 300.0
    """Seconds a worker may be silent before it counts as hung."""
    instance_restarts: NonNegative = 3
    """Rollout instances, in all, that may die or hang and are replaced, while their responses go on
    elsewhere; one more, or the learner, stops the run. An error in one stops it at once."""


class Config(Section):
    """A run."""

    name: str = "run"
    """Used in the run directory's name."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    drafting: DraftingConfig = DraftingConfig()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    simulation: SimulationConfig = SimulationConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Config:
        rollout, learner = self.rollout, self.learner
        if rollout.cpus is not None and len(rollout.cpus) != rollout.num_instances:
            raise ValueError(
                f"rollout.cpus names {len(rollout.cpus)} sets of cores for "
                f"rollout.num_instances = {rollout.num_instances}"
            )
        if learner.groups_per_batch % learner.num_minibatches:
            raise ValueError(
                f"learner.num_minibatches = {learner.num_minibatches} does not divide "
                f"learner.groups_per_batch = {learner.groups_per_batch}"
            )
        if self.simulation.colocated and self.schedule.bound > 0:
            raise ValueError(
                f"simulation.colocated: with schedule.max_staleness = {self.schedule.bound} "
                "rollout and training go on at the same time, and need devices of their own"
            )
        if rollout.num_generations == 1 and learner.scale_rewards == "group":
            raise ValueError(
                "rollout.num_generations = 1 leaves no group to compare with: "
                "every advantage would be 0"
            )
        return self
