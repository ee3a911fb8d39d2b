"""Sections `model`, `rollout` and `drafting`: the policy, and what it generates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rhymeflow.config.section import (
    Fraction,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Temperature,
)


class ModelConfig(Section):
    """The policy."""

    by_name = "name"

    name: str = "recipe:demo"
    """A local directory, a Hugging Face hub name, `package:NAME` (weights that an installed Python
    package carries) or `recipe:NAME` (weights shipped with a recipe)."""
    tokenizer: str | None = None
    """Where the tokenizer is, a directory or a hub name, if it is not the model's own."""
    gguf_file: str | None = None
    """The GGUF file inside the directory or package, if the weights are in that format."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute precision of engine and learner. `auto`: bfloat16 on CUDA and on CPUs with bfloat16
    arithmetic, float32 elsewhere and for models under 20 million parameters. The learner's master
    weights are float32 either way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""


class RolloutConfig(Section):
    """Generation."""

    engine: Literal["native", "vllm"] = "native"
    """What generates: the engine of this package, or vLLM (docs/vllm.md)."""
    python: str | None = None
    """The Python that instances run under, such as `.venv-vllm/bin/python`; `None`: the one that
    the run was started with."""
    num_generations: Positive = 8
    """Trajectories per prompt (a group)."""
    max_completion_length: Positive = 512
    """Longest response in tokens; one that reaches it ends with reason `length`."""
    temperature: Temperature = 1.0
    """0 is greedy, which is for `eval` and `generate`: in training all responses of a group would
    be the same."""
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
    max_instances: Positive | None = None
    """With `runtime: ray`: instances up to which the run grows whenever the cluster has room
    for another, such as a node that joined. Those of nodes that leave are replaced at once down to
    `num_instances`, which the run begins with, and else when there is room. `None`: it does not
    grow."""
    max_num_seqs: Positive = 64
    """Trajectories that one instance decodes at a time."""
    max_prefill_tokens: Positive = 4096
    """Prompt tokens that one iteration may prefill."""
    kv_cache_on_pull: Literal["recompute", "keep"] = "recompute"
    """What becomes of the KV cache of a response that goes on under new weights: `recompute`
    computes it anew; `keep` goes on with the old keys and values, which costs nothing and makes its
    log-probabilities belong to no one version."""
    max_kv_tokens: Positive | None = None
    """Tokens in the KV cache of one instance beyond which nothing more is routed to it; `None`: as
    many as `max_num_seqs` of the longest responses need."""
    num_threads: Positive | None = None
    """Threads of each instance; `None` shares the machine's cores between the workers."""
    cpus: tuple[tuple[NonNegative, ...], ...] | None = None
    """Cores each instance is pinned to, one tuple an instance; `None` pins nothing."""
    vllm_tensor_parallel_size: Positive = 1
    """Processes, on a machine with GPUs each on its own, that one vLLM instance's model is spread
    over."""
    vllm_max_model_length: Positive | None = None
    """Longest prompt and response together in tokens; `None`: what the model can."""
    vllm_kv_cache_gb: PositiveFloat = 2.0
    """On CPUs, GB that one vLLM instance sets aside for its KV cache."""
    vllm_gpu_memory_utilization: Fraction = 0.9
    """On GPUs, share of the memory that one vLLM instance takes for weights and KV cache."""
    vllm_model_runner: Literal["v1", "v2"] = "v1"
    """vLLM's model runner. `v2` is the newer one, for GPUs."""
    vllm_head_dtype: Literal["model", "float32"] = "model"
    """Precision of the output head in vLLM. `float32`: as the learner's, which brings
    log-probabilities closer to it (`off_policy/mismatch_kl`) and costs time."""


class DraftingConfig(Section):
    """Speculative decoding from history: what a prompt's earlier responses said is proposed, and
    the policy verifies it. What is sampled stays the same token for token."""

    window: Literal["off", "aimd", "cost"] = "cost"
    """How many tokens are drafted. `aimd`: two more after a draft that was accepted whole, back to
    two after a rejection (RhymeRL). `cost`: as many, and for those responses, as make the most
    accepted tokens a second by the iteration times the engine measures; none where drafts do not
    pay. `off`: no drafts."""
    max_draft: Positive = 16
    """Most tokens drafted for one response in one iteration."""
    shape: Literal["linear", "tree"] = "linear"
    """`tree` drafts several continuations at once where history disagrees."""
    ranking: Literal["reward", "frequency", "combined"] = "combined"
    """What makes one continuation likelier than another: the rewards of the responses it comes
    from, how many of them there are, or both."""
    history_tokens: Positive = 4_000_000
    """Tokens of history that are kept; the oldest go first."""
    history_run: str | None = None
    """Run directory of a previous run to begin the history with."""

    @property
    def history_responses(self) -> int:
        """Responses that are kept: of 64 tokens and more, as many as `history_tokens` holds."""
        return -(-self.history_tokens // 64)
