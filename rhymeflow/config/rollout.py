"""Sections `model`, `rollout` and `drafting`: the policy, and how it generates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rhymeflow.config.section import (
    Fraction,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Temperature,
)

OWN_GPU = 0.9
"""Share of a GPU's memory that a vLLM instance takes of a GPU of its own."""
SHARED_GPU = 0.4
"""Share that the vLLM instances take together of a GPU that the learner is on too."""


class LoraConfig(Section):
    """A low-rank adapter (LoRA, arXiv 2106.09685): the model's weights stay as they are; the
    product of two narrow matrices, trained in their place, is added to that of each layer."""

    rank: NonNegative = 0
    """Columns of the narrow matrices. 0: no adapter, all weights are trained."""
    alpha: PositiveFloat | None = None
    """The adapter's product is multiplied by this over `rank`; `None`: twice the rank."""
    use_rslora: bool = False
    """Divide `alpha` by the square root of `rank` instead (rsLoRA, arXiv 2312.03732)."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Linear layers that are adapted, by the end of their names, such as `q_proj`. `all-linear`:
    all but the output head."""
    modules_to_save: tuple[str, ...] = ()
    """Other modules, named likewise, whose parameters are trained whole."""
    adapter: str | None = None
    """Directory of an adapter in peft's format to start from, which replaces the other fields."""

    @property
    def is_used(self) -> bool:
        """Whether there is an adapter."""
        return self.rank > 0 or self.adapter is not None

    @model_validator(mode="after")
    def _has_one_shape(self) -> LoraConfig:
        given = self.model_dump(exclude_defaults=True, exclude={"adapter"})
        if self.adapter is not None and given:
            raise ValueError(f"{min(given)} is what the files in `adapter` say: leave it out")
        if not self.is_used and given:
            raise ValueError(f"{min(given)} has no effect without `rank`")
        if not self.target_modules:
            raise ValueError("target_modules should name at least one layer")
        return self


class ModelConfig(Section):
    """The policy."""

    by_name = "name"

    name: str = "recipe:demo"
    """A local directory, a Hugging Face hub name, `package:NAME` (weights that an installed Python
    package carries) or `recipe:NAME` (weights shipped with a recipe)."""
    tokenizer: str | None = None
    """Directory or hub name of the tokenizer; `None`: the model's own."""
    gguf_file: str | None = None
    """Name of the GGUF file in the directory or package, if the weights have that format."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute precision of engine and learner. `auto`: bfloat16 on CUDA and on CPUs with bfloat16
    arithmetic, float32 elsewhere and for models under 20 million parameters. The learner's master
    weights are float32 either way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of engine and learner. `auto`: CUDA if there is a GPU, else the CPU."""
    lora: LoraConfig = LoraConfig()
    quantization: Literal["nf4"] | None = None
    """Precision of the weights under an adapter (QLoRA, arXiv 2305.14314): `nf4` keeps those of
    linear layers, but the output head, in 4 bits, by bitsandbytes. `None`: in `dtype`."""

    @model_validator(mode="after")
    def _quantizes_under_an_adapter(self) -> ModelConfig:
        if self.quantization and not self.lora.is_used:
            raise ValueError("quantization has no effect without `lora`: all weights are trained")
        return self


class RolloutConfig(Section):
    """Generation."""

    engine: Literal["native", "vllm"] = "native"
    """The engine that generates: Rhymeflow's own, or vLLM (docs/vllm.md)."""
    python: str | None = None
    """Interpreter of the instances, such as `.venv-vllm/bin/python`; `None`: that of the run."""
    num_generations: Positive = 8
    """Responses to each prompt (the size of a group)."""
    max_completion_length: Positive = 512
    """Longest response in tokens; one that reaches it ends with reason `length`."""
    temperature: Temperature = 1.0
    """Sampling temperature. 0 is greedy, for `eval` and `generate` only: in training, all responses
    of a group would be the same."""
    top_p: Fraction = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegative = 0
    """Sample among the k likeliest tokens; 0 is off."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response beside the model's own stop tokens, such as `</answer>`. It ends
    with the token by which its text, without special tokens, has one of them in it."""
    skip_special_tokens: bool = True
    """Whether the text of responses that rewards and environments receive leaves out special
    tokens. `false` keeps them, such as `<answer>` or the token that ends a response; an agent's
    programs never get them."""
    rhyming_noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a group's responses that use the same sampling noise in every epoch. Far more of
    their tokens can be drafted from history. They are exact samples of weights that were not yet
    trained on that noise, so of the first epoch; later ones explore less (docs/drafting.md)."""
    num_instances: Positive = 1
    """Number of rollout instances; each is a process. If `cluster.nodes` and `learner.num_ranks`
    are given and this is not, it is as many as the GPUs that ranks leave have room for."""
    max_instances: Positive | None = None
    """With `runtime: ray`, the largest number of instances. A run begins with `num_instances`, and
    adds one whenever the cluster has room for it. When nodes leave, instances up to `num_instances`
    are replaced at once, further ones when there is room. `None`: it does not add any."""
    max_num_seqs: Positive = 64
    """Responses that one instance decodes at a time."""
    max_prefill_tokens: Positive = 4096
    """Most tokens that one iteration prefills."""
    kv_cache_on_pull: Literal["recompute", "keep"] = "recompute"
    """KV cache of a response that continues under new weights. `recompute`: computed anew. `keep`:
    old keys and values stay, which costs nothing, but the response's log-probabilities are then
    those of no single version."""
    max_kv_tokens: Positive | None = None
    """Tokens that an instance's KV cache holds: no responses are routed to it beyond, and those
    that started last wait while the others need the room; `None`: as many as `max_num_seqs` of the
    longest responses need."""
    num_threads: Positive | None = None
    """Threads of each process of an instance; `None` divides the machine's cores among the workers,
    or among its GPUs if it has more of these; on a Ray cluster without GPUs it is 1."""
    cpus: tuple[tuple[NonNegative, ...], ...] | None = None
    """Cores that instances are pinned to, a list for each instance; `None` pins nothing."""
    vllm_tensor_parallel_size: Positive = 1
    """Processes that share the model of one vLLM instance, on GPUs one for each GPU."""
    vllm_max_model_length: Positive | None = None
    """Longest prompt and response together in tokens; `None`: the model's limit."""
    vllm_kv_cache_gb: PositiveFloat = 2.0
    """On CPUs, GB that one vLLM instance reserves for its KV cache."""
    vllm_gpu_memory_utilization: Fraction | None = None
    """On GPUs, share of the memory that one vLLM instance takes for weights and KV cache. `None`:
    0.9 of a GPU of its own; of the only GPU of a machine, which all share, instances divide 0.4,
    or 0.9 if nothing is trained."""
    vllm_sleeps: bool = False
    """Under `schedule.name: synchronous`, on the only GPU of a machine: vLLM leaves its memory to
    the learner for each step. Its weights go to main memory and back, its cache is dropped. Its
    share may then be what the learner leaves between steps. On CPUs vLLM keeps its memory."""
    vllm_model_runner: Literal["v1", "v2"] | None = None
    """vLLM's model runner. `None`: its own choice, `v2` on GPUs and `v1` on CPUs."""
    vllm_head_dtype: Literal["model", "float32"] | None = None
    """Precision of the output head in vLLM. `float32`: as in the learner, which brings
    log-probabilities closer to the learner's (`off_policy/mismatch_kl`). `None`: `float32` on GPUs,
    where the product with the same weights returns it, and `model` on CPUs, where it costs time."""

    @property
    def memory_share(self) -> float:
        """`vllm_gpu_memory_utilization`, or that of an instance with GPUs of its own."""
        return self.vllm_gpu_memory_utilization or OWN_GPU


OF_VLLM = tuple(name for name in RolloutConfig.model_fields if name.startswith("vllm_"))
"""Fields of `RolloutConfig` that only vLLM uses."""


class DraftingConfig(Section):
    """Speculative decoding from history: drafts are taken from earlier responses to the same
    prompt, and the policy verifies them. Sampled tokens are the same as without drafts."""

    window: Literal["off", "aimd", "cost"] = "cost"
    """How many tokens are drafted. `aimd`: two more after a fully accepted draft, back to two after
    a rejection (RhymeRL). `cost`: for each response the number, perhaps none, that gives the most
    accepted tokens per second by the engine's measured iteration times. `off`: no drafts."""
    max_draft: Positive = 16
    """Most tokens that are drafted for one response in one iteration."""
    shape: Literal["linear", "tree"] | None = None
    """`linear` drafts one continuation, `tree` several where earlier responses differ. `None`:
    `tree` on GPUs and where one is emulated, since a drafted token costs little there; `linear` on
    CPUs and in vLLM."""
    history_tokens: Positive = 4_000_000
    """Tokens of history that are kept; the oldest are dropped first."""
    history_run: str | None = None
    """Directory of a previous run whose responses begin the history."""

    @property
    def history_responses(self) -> int:
        """Most responses in the history: as many of 64 tokens as `history_tokens` has room for."""
        return -(-self.history_tokens // 64)
