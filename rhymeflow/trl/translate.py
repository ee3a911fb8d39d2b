"""Translates the fields of TRL's configurations into those of a run, and its steps into versions.

TRL generates `steps_per_generation` micro-batches at a time and passes over them `num_iterations`
times, with `gradient_accumulation_steps` of them in each optimizer step. Here a batch makes a
version: it has `num_minibatches` parts, each an optimizer step, and is passed over `num_iterations`
times. An optimizer step has as many responses as in TRL, and a version has the optimizer steps that
TRL takes on one generation batch (or the one step that spans several).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rhymeflow.errors import UserError
from rhymeflow.learner.algorithms.normalisations import NORMALISATIONS
from rhymeflow.observe.metrics import TRACKERS
from rhymeflow.trl.fields import CHECKPOINTING, SAME, by_name

Values = Mapping[str, Any]
"""Values of TRL's fields, by name."""

SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
SCHEDULES |= {name: name for name in ("constant", "linear", "cosine")}
"""Rhymeflow's learning rate schedules, by transformers' names."""

OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw")
OPTIMIZERS |= dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), "adamw_8bit")
"""Rhymeflow's optimizers, by transformers' names."""

CORRECTIONS = {
    f"{level}_{how}": (level, name)
    for level in ("token", "sequence")
    for how, name in (("truncate", "tis"), ("mask", "decoupled"))
}
"""Rhymeflow's `off_policy_level` and `off_policy_correction`, by TRL's modes with vLLM."""

UNBOUNDED = 1e9
"""For TRL's `vllm_importance_sampling_clip_max` of None; a ratio of ours is at most exp(20)."""

UNLIMITED_TURNS = 1_000_000
"""For TRL's default, which has no limit: `max_completion_length` ends every response."""


class Steps(NamedTuple):
    """The batch and the optimizer steps of a version."""

    groups_per_batch: int
    num_minibatches: int
    num_iterations: int
    generation_batches: int = 1
    """How many of TRL's generation batches make a batch."""

    @property
    def per_version(self) -> int:
        """Optimizer steps of a version; these are TRL's steps."""
        return self.num_minibatches * self.num_iterations

    def versions(self, optimizer_steps: float) -> int:
        """Return how many versions have that many optimizer steps, rounded up."""
        return max(1, math.ceil(optimizer_steps / self.per_version))


class RunLength(NamedTuple):
    """The length of a run: `max_steps` counts TRL's steps; `num_rows` is None if unknown."""

    steps: Steps
    max_steps: int
    num_rows: int | None


def steps_in(given: Values) -> Steps:
    """Translate TRL's batch and step sizes.

    Raises:
        UserError: a step would end within a group or a generation batch.
    """
    if "num_generations" not in given:  # a response for each prompt, and a step for each batch
        return Steps(
            given["per_device_train_batch_size"] * given["gradient_accumulation_steps"], 1, 1
        )
    group_size, num_iterations = given["num_generations"], given["num_iterations"]
    microbatch_size = given["per_device_train_batch_size"]
    microbatches_per_generation = given["steps_per_generation"]
    accumulation = given["gradient_accumulation_steps"]
    responses_per_generation = microbatch_size * microbatches_per_generation
    # TRL checks this too, but fields may have been changed since.
    if group_size < 2 or responses_per_generation % group_size:
        raise UserError(
            f"num_generations = {group_size}, must be at least 2 and divide the "
            f"{responses_per_generation} responses that are generated at a time "
            f"(per_device_train_batch_size times {microbatches_per_generation})"
        )
    smaller, larger = sorted((microbatches_per_generation, accumulation))
    if larger % smaller or (microbatches_per_generation < accumulation and num_iterations > 1):
        raise UserError(
            f"with steps_per_generation = {microbatches_per_generation}, "
            f"gradient_accumulation_steps = {accumulation} and num_iterations = {num_iterations} "
            "an optimizer step would take parts of several generations; let steps_per_generation "
            "be a multiple of gradient_accumulation_steps, or leave it out"
        )
    responses_per_step = microbatch_size * accumulation
    if microbatches_per_generation <= accumulation:  # a step takes one generation batch or more
        groups = responses_per_step // group_size
        return Steps(groups, 1, num_iterations, accumulation // microbatches_per_generation)
    if responses_per_step % group_size:
        raise UserError(
            f"an optimizer step has {responses_per_step} responses, which are no whole "
            f"groups of num_generations = {group_size}; raise gradient_accumulation_steps or lower "
            "steps_per_generation"
        )
    minibatches = microbatches_per_generation // accumulation
    return Steps(responses_per_generation // group_size, minibatches, num_iterations)


def steps_per_epoch(steps: Steps, num_rows: int) -> int:
    """Return TRL's optimizer steps in an epoch. Prompts too few for a generation batch are left
    out, as in TRL; a last step over fewer generation batches counts."""
    prompts_per_generation = steps.groups_per_batch // steps.generation_batches
    batches = math.ceil(num_rows // prompts_per_generation / steps.generation_batches)
    if not batches:
        raise UserError(
            f"train_dataset has {num_rows} rows, fewer than the "
            f"{prompts_per_generation} prompts that are generated for at a time "
            "(per_device_train_batch_size, gradient_accumulation_steps and steps_per_generation "
            "over num_generations)"
        )
    return batches * steps.per_version


def optimizer_steps(given: Values, steps: Steps, num_rows: int | None) -> int:
    """Return how many of TRL's steps the run has; `num_rows` is None if unknown."""
    if given["max_steps"] > 0:
        return int(given["max_steps"])
    if num_rows is None:
        raise UserError("max_steps is needed: the train_dataset does not say how many rows it has")
    epochs: float = given["num_train_epochs"]
    return math.ceil(epochs * steps_per_epoch(steps, num_rows))


def run_fields(given: Values, length: RunLength) -> dict[str, Any]:
    """Return the run's fields by path, without those of the objective. Where defaults differ, TRL's
    are set, such as a linear schedule and seed 42."""
    steps, same = length.steps, by_name(SAME)
    fields = {f"{same[name]}.{name}": value for name, value in given.items() if name in same}
    fields |= {
        "learner.groups_per_batch": steps.groups_per_batch,
        "learner.num_minibatches": steps.num_minibatches,
        "learner.num_iterations": steps.num_iterations,
        "learner.max_steps": steps.versions(length.max_steps),
        "data.shuffle": bool(given["shuffle_dataset"]),
        "data.chat_template": False,  # TRL does not apply it to text prompts
        "data.chat_template_kwargs": given["chat_template_kwargs"] or {},
        "run.eval_temperature": given["temperature"],
        "run.output_dir": str(given["output_dir"]),
    }
    if given["run_name"] is not None:
        fields["name"] = given["run_name"]
    fields |= _model(given) | _engine(given) | _stops(given)
    fields |= _optimization(given, length) | _saving(given, length)
    return fields


def grpo(given: Values) -> dict[str, Any]:
    """Return the fields of what TRL's `GRPOTrainer` optimizes."""
    loss_type, high = given["loss_type"], given["epsilon_high"]
    surrogates = {"cispo": "weighted_log", "sapo": "sigmoid"}
    normalisations = {"cispo": "dapo", "sapo": "grpo"}
    known = [*NORMALISATIONS, *normalisations]
    if loss_type not in known:
        raise UserError(
            f"loss_type = {loss_type!r} is not supported; give one of {', '.join(known)}"
        )
    fields = {
        "learner.loss_type": normalisations.get(loss_type, loss_type),
        "learner.surrogate": surrogates.get(loss_type, "clip"),
        "learner.ratio": given["importance_sampling_level"],
        "learner.epsilon": given["epsilon"],
        "learner.epsilon_high": high,
    }
    if loss_type == "cispo":  # its bound is that of the ratio itself, and there is none below
        if high is None or high <= 1.0:
            raise UserError(
                f"epsilon_high = {high!r}: with loss_type cispo it is the greatest "
                "ratio, which is above 1 (such as 5.0)"
            )
        fields |= {"learner.epsilon": 1.0, "learner.epsilon_high": high - 1.0}
    return fields | _correction(given)


def rloo(given: Values) -> dict[str, Any]:
    """Return the fields of what TRL's `RLOOTrainer` optimizes: a response is one action, and the
    KL is taken from its reward."""
    bounds = given["reward_clip_range"]
    if bounds is not None and (bounds[0] != -bounds[1] or bounds[1] <= 0):
        raise UserError(
            f"reward_clip_range = {bounds} is not supported: the bounds are negatives of each "
            "other, as in (-10, 10)"
        )
    of_kl = {"learner.kl_in": "reward", "learner.kl_estimator": "k1"} if given["beta"] else {}
    return {
        "learner.algorithm": "rloo",
        "learner.epsilon": given["epsilon"],
        "learner.epsilon_high": given["epsilon_high"],
        "learner.reward_clip": None if bounds is None else bounds[1],
        **of_kl,
    }


def distillation(given: Values) -> dict[str, Any]:
    """Return the fields of what TRL's `DistillationTrainer` minimizes: a divergence from the
    teacher of each token's whole distribution, in the mean over tokens."""
    options, own = (given[f"{whose}model_init_kwargs"] or {} for whose in ("teacher_", ""))
    dtype, of_policy = (
        _dtype("teacher_model_init_kwargs", options),
        _dtype("model_init_kwargs", own),
    )
    if dtype not in (None, "auto", of_policy):
        raise UserError(
            f"teacher_model_init_kwargs['dtype'] = {dtype!r} is not supported: the teacher is "
            f"computed in the policy's precision, model_init_kwargs['dtype'] = {of_policy!r}"
        )
    for name in ("eval_strategy", "load_best_model_at_end"):
        if given[name] not in ("no", False):
            raise UserError(
                f"{name} = {given[name]!r} is not supported: versions are compared by rewards, and "
                "a distillation has none"
            )
    return {
        "learner.beta": 0.0,
        "learner.distillation.teacher": "start",  # until the trainer has its own
        "learner.distillation.mode": "full_logits",
        "learner.distillation.jsd_beta": given["beta"],
        "rollout.num_generations": 1,
        "reward.functions": [],
    }


def _correction(given: Values) -> dict[str, Any]:
    """What TRL does with vLLM; without it, responses here are asynchronous all the same."""
    if not given["use_vllm"]:
        return {}
    if not given["vllm_importance_sampling_correction"]:
        return {"learner.off_policy_correction": "proximal"}
    mode = given["vllm_importance_sampling_mode"]
    if mode not in CORRECTIONS:
        raise UserError(
            f"vllm_importance_sampling_mode = {mode!r} is not supported; give one of "
            f"{', '.join(CORRECTIONS)}"
        )
    level, correction = CORRECTIONS[mode]
    most = given["vllm_importance_sampling_cap"] or given["vllm_importance_sampling_clip_max"]
    return {
        "learner.off_policy_correction": correction,
        "learner.off_policy_level": level,
        "learner.importance_sampling_cap": UNBOUNDED if most is None else most,
        "learner.importance_sampling_floor": given["vllm_importance_sampling_clip_min"],
    }


def _optimization(given: Values, length: RunLength) -> dict[str, Any]:
    if given["optim"] not in OPTIMIZERS:
        raise UserError(
            f"optim = {given['optim']!r} is not supported: the optimizer is "
            f"AdamW ({', '.join(OPTIMIZERS)}) or rhymeflow={{'learner.optimizer': 'muon'}}"
        )
    schedule = given["lr_scheduler_type"]
    if schedule not in SCHEDULES:
        raise UserError(
            f"lr_scheduler_type = {schedule!r} is not supported; give one of {', '.join(SCHEDULES)}"
        )
    warmup = given["warmup_steps"]
    warmup = math.ceil(length.max_steps * warmup) if 0 < warmup < 1 else int(warmup)
    warmup_versions = round(warmup / length.steps.per_version)
    if given["data_seed"] not in (None, given["seed"]):
        raise UserError("data_seed is not supported: seed orders the prompts too")
    norm = given["max_grad_norm"]
    return {
        "learner.optimizer": OPTIMIZERS[given["optim"]],
        "learner.lr_scheduler_type": SCHEDULES[schedule],
        "learner.min_lr_rate": _min_lr_rate(given),
        "learner.warmup_steps": warmup_versions,
        "learner.max_grad_norm": float(norm) if norm else None,
        "learner.gradient_checkpointing": bool(given[CHECKPOINTING]),
    }


def _min_lr_rate(given: Values) -> float:
    """Return the share of its peak at which the learning rate ends."""
    schedule, options = given["lr_scheduler_type"], given["lr_scheduler_kwargs"] or {}
    options = {name: value for name, value in options.items() if value is not None}
    if schedule != "cosine_with_min_lr" and not options:
        return 0.0
    peaks = {"min_lr": given["learning_rate"], "min_lr_rate": 1.0}
    if schedule != "cosine_with_min_lr" or len(options) != 1 or not options.keys() <= peaks.keys():
        raise UserError(
            f"lr_scheduler_kwargs = {options}: with cosine_with_min_lr it is min_lr or "
            f"min_lr_rate, and with the other schedules nothing"
        )
    ((name, least),) = options.items()
    return float(least / peaks[name])


def _model(given: Values) -> dict[str, Any]:
    """Without a dtype TRL uses bfloat16; so does `auto`, on devices that compute in it."""
    options = dict(given["model_init_kwargs"] or {})
    options.pop(QUANTIZATION, None)  # see `quantization_fields`
    dtype_name = _dtype("model_init_kwargs", options)
    if dtype_name is None:
        dtype_name = "float32" if given["bf16"] is False else "auto"
    return {"model.dtype": dtype_name, "model.device": "cpu" if given["use_cpu"] else "auto"}


def _dtype(field: str, given: Mapping[str, Any]) -> str | None:
    """Return the name of the dtype among arguments of `from_pretrained`."""
    options = dict(given)
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    dtype_name = str(dtype).removeprefix("torch.") if dtype is not None else None
    for name in ("attn_implementation", "device_map", "use_cache"):
        options.pop(name, None)  # they change how the model is computed, not its result
    # What TRL's scripts fill in from `ModelConfig`.
    usual = {"revision": "main", "trust_remote_code": False}
    options = {k: v for k, v in options.items() if v is not None and v != usual.get(k)}
    if dtype_name not in (None, "auto", "float32", "bfloat16"):
        raise UserError(f"{field}['dtype'] = {dtype_name!r}, should be bfloat16 or float32")
    if options:
        raise UserError(
            f"{field}: {', '.join(options)}: not supported; load the model, and give it as an "
            "object with its tokenizer"
        )
    return dtype_name


def _engine(given: Values) -> dict[str, Any]:
    if not given["use_vllm"]:
        return {}
    fields = {
        "rollout.engine": "vllm",
        "rollout.vllm_gpu_memory_utilization": given["vllm_gpu_memory_utilization"],
        "rollout.vllm_tensor_parallel_size": given["vllm_tensor_parallel_size"],
    }
    if given["vllm_max_model_length"] is not None:
        fields["rollout.vllm_max_model_length"] = given["vllm_max_model_length"]
    return fields


def _stops(given: Values) -> dict[str, Any]:
    """Stop strings, under vLLM's name or transformers'."""
    options = dict(given.get("generation_kwargs") or {})
    stops = [options.pop(name, None) or () for name in ("stop", "stop_strings")]
    if options:
        raise UserError(
            f"generation_kwargs: {', '.join(options)}: not supported; of it only stop (or "
            "stop_strings) is; temperature, top_p and top_k have fields of their own"
        )
    texts = [[each] if isinstance(each, str) else each for each in stops]
    return {"rollout.stop": [*texts[0], *texts[1]]} if any(texts) else {}


def _saving(given: Values, length: RunLength) -> dict[str, Any]:
    """When to evaluate, save and report, as in TRL: by default all checkpoints are kept."""
    evaluates = given["eval_strategy"], given["eval_steps"] or given["logging_steps"]
    saves = given["save_strategy"], given["save_steps"]
    if given["save_strategy"] == "best":
        saves = evaluates  # the best checkpoint is known after an evaluation
    trackers = [tracker for tracker in given["report_to"] or () if tracker != "none"]
    is_named = given["project"] != "huggingface"  # TRL's default
    uses_project = any(tracker != "tensorboard" for tracker in trackers)
    for tracker in trackers:
        if tracker not in TRACKERS:
            raise UserError(
                f"report_to = {tracker!r} is not supported; give one of "
                f"{', '.join(TRACKERS)}, or the tracker's TrainerCallback as a callback"
            )
    return {
        "run.eval_steps": _interval("eval_strategy", *evaluates, length),
        "run.save_steps": _interval("save_strategy", *saves, length),
        "run.save_seconds": 0.0,
        "run.save_total_limit": given["save_total_limit"] or 0,
        "run.best_metric": _best_metric(given),
        "run.report_to": trackers,
        "run.project": given["project"] if is_named and uses_project else None,
    }


def _best_metric(given: Values) -> str:
    metric = given["metric_for_best_model"] or "reward"
    name = metric.removeprefix("eval_")
    if name != "reward" and not name.endswith("_reward"):
        raise UserError(
            f"metric_for_best_model = {metric!r} is not supported; give eval_reward, "
            "or eval_NAME_reward for one of several eval sets"
        )
    if given["greater_is_better"] is False:
        raise UserError("greater_is_better = False is not supported: a greater reward is better")
    return "eval/reward" if name == "reward" else f"eval/{name.removesuffix('_reward')}/avg@1"


def _interval(field: str, strategy: str, every: float, length: RunLength) -> int:
    """Return how many versions lie between two evaluations or checkpoints; 0: there are none."""
    if strategy == "no":
        return 0
    if strategy == "epoch":
        if length.num_rows is None:
            raise UserError(f"{field} = 'epoch': train_dataset has no length")
        every = steps_per_epoch(length.steps, length.num_rows)
    elif strategy != "steps":
        raise UserError(f"{field} = {strategy!r} is not supported: no, steps or epoch")
    elif every < 1:  # a fraction of the run
        every = math.ceil(length.max_steps * every)
    return length.steps.versions(every)


_OF_ADAPTERS = {
    "r": "rank", "lora_alpha": "alpha", "use_rslora": "use_rslora",
    "target_modules": "target_modules", "modules_to_save": "modules_to_save",
}  # fmt: skip
"""Fields of peft's `LoraConfig`, and those of `model.lora`."""
_NOT_OF_TRAINING = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path",
    "revision", "inference_mode", "runtime_config",
}  # fmt: skip


def adapter_fields(peft_config: Any, notices: list[str]) -> dict[str, Any]:
    """Return the fields of an adapter that peft's `LoraConfig` describes; say what has no effect.
    Raises `UserError` for another kind of adapter, or a field with an effect that there is not."""
    kind = type(peft_config).__name__
    if kind != "LoraConfig":
        raise UserError(f"peft_config is a {kind}, should be peft's LoraConfig")
    usual = type(peft_config)().__dict__
    for name, value in peft_config.__dict__.items():
        if name == "lora_dropout" and value:
            notices.append(
                f"peft_config.lora_dropout = {value}: there is no dropout while training"
            )
        elif name not in {*_OF_ADAPTERS, *_NOT_OF_TRAINING} and value != usual.get(name, value):
            raise UserError(f"peft_config.{name} = {value!r} is not supported")
    targets = peft_config.target_modules
    if targets is None or (isinstance(targets, str) and targets != "all-linear"):
        raise UserError(
            f"peft_config.target_modules = {targets!r}: say 'all-linear', or a list "
            "of layers' names"
        )
    values = {own: getattr(peft_config, name) for name, own in _OF_ADAPTERS.items()}
    values["target_modules"] = [targets] if isinstance(targets, str) else sorted(targets)
    values["modules_to_save"] = list(values["modules_to_save"] or ())
    return {f"model.lora.{name}": value for name, value in values.items()}


QUANTIZATION = "quantization_config"
_QUANTIZED = {
    "load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False, "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0,
    "llm_int8_has_fp16_weight": False, "llm_int8_enable_fp32_cpu_offload": False,
}  # fmt: skip
"""Fields of transformers' `BitsAndBytesConfig`, as `model.quantization` has them."""


def quantization_fields(
    argument: Any, values: Values, fields: Mapping[str, Any], notices: list[str]
) -> dict[str, Any]:
    """Return the fields of weights that a `BitsAndBytesConfig` describes, the trainer's argument or
    among `values`; none without it. Raises `UserError` if it would compute something else."""
    own, dtype = (values["model_init_kwargs"] or {}).get(QUANTIZATION), fields["model.dtype"]
    if own is not None and argument is not None:
        raise UserError(f"{QUANTIZATION} is in args.model_init_kwargs too; give one")
    given = argument if own is None else own
    if given is None:
        return {}
    kind = type(given).__name__
    if kind != "BitsAndBytesConfig":
        raise UserError(f"{QUANTIZATION} is a {kind}, should be transformers' BitsAndBytesConfig")
    compute = str(given.bnb_4bit_compute_dtype).removeprefix("torch.")
    found = {name: getattr(given, name) for name in _QUANTIZED}
    due = _QUANTIZED | {"bnb_4bit_compute_dtype": compute if dtype == "auto" else dtype}
    for name, value in (found | {"bnb_4bit_compute_dtype": compute}).items():
        if value != due[name]:
            raise UserError(
                f"{QUANTIZATION}.{name} = {value!r} is not supported, should be {due[name]!r}"
            )
    if compute not in ("float32", "bfloat16"):
        raise UserError(
            f"{QUANTIZATION}.bnb_4bit_compute_dtype = {compute!r}, should be bfloat16 or float32"
        )
    storage = str(given.bnb_4bit_quant_storage).removeprefix("torch.")
    if storage != "uint8":
        notices.append(f"{QUANTIZATION}.bnb_4bit_quant_storage = {storage!r} changes no value")
    return {"model.quantization": "nf4", "model.dtype": compute}
