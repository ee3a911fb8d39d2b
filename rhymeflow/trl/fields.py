"""TRL's configurations with one more field, and the table of their fields in docs/from-trl.md.

A field that the table lacks is refused unless it has TRL's default.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import trl

from rhymeflow.errors import UserError, suggestion

REMOVED = {
    "max_prompt_length": "give rhymeflow={'data.max_prompt_length': N}; a longer prompt is refused "
    "with its row, not cut",
    "warmup_ratio": "warmup_steps takes a share below 1, too",
    "overwrite_output_dir": "leave it out; a second run goes to output_dir-2",
    "logging_dir": "leave it out; TensorBoard's files are in output_dir",
    "save_safetensors": "leave it out; weights are saved so",
}
"""Fields that TRL has removed, and what to do instead."""


@dataclasses.dataclass(init=False)
class _OwnFields:
    """A configuration of TRL; docs/from-trl.md says what each field does.

    The additional field `rhymeflow` maps Rhymeflow's fields to values, which win over TRL's:
    `{"schedule.name": "synchronous"}`.
    """

    rhymeflow: dict[str, Any] | str | None = None

    def __init__(self, *arguments: Any, rhymeflow: Any = None, **named: Any) -> None:
        known = [field.name for field in dataclasses.fields(self)]
        title = in_trl(type(self)).__name__
        for name in named:
            if name in known:
                continue
            if name in REMOVED:
                problem = f"{name}: TRL has no such field any more; {REMOVED[name]}"
                raise UserError(f"{title}: {problem}")
            raise UserError(f"{title}: there is no field {name!r}{suggestion(name, known)}")
        self.rhymeflow = rhymeflow
        super().__init__(*arguments, **named)

    def __post_init__(self) -> None:
        """Check the fields as TRL does, those of a script's subclass too."""
        check_one_process()
        if not torch.cuda.is_available():  # else TRL refuses a machine without a GPU
            self.use_cpu = True
        try:
            super().__post_init__()  # type: ignore[misc]
        except ValueError as error:
            title = in_trl(type(self)).__name__
            raise UserError(f"{title}: {' '.join(str(error).split())}") from None


@dataclasses.dataclass(init=False)
class GRPOConfig(_OwnFields, trl.GRPOConfig):  # type: ignore[misc]
    """TRL's `GRPOConfig` with the field `rhymeflow`."""


@dataclasses.dataclass(init=False)
class RLOOConfig(_OwnFields, trl.RLOOConfig):  # type: ignore[misc]
    """TRL's `RLOOConfig` with the field `rhymeflow`."""


@dataclasses.dataclass(init=False)
class TrlDistillationConfig(_OwnFields, trl.DistillationConfig):  # type: ignore[misc]
    """TRL's `DistillationConfig` with the field `rhymeflow`."""


def in_trl(kind: type) -> type:
    """Return TRL's configuration that this one is or extends."""
    return next((each for each in kind.__mro__ if each.__module__.startswith("trl.")), kind)


SAME: Mapping[str, str] = {
    "learner": "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon beta delta "
        "scale_rewards multi_objective_aggregation mask_truncated_completions "
        "use_bias_correction_kl off_policy_mask_threshold top_entropy_quantile entropy_coef "
        "sapo_temperature_pos sapo_temperature_neg",
    "rollout": "num_generations max_completion_length temperature top_p top_k",
    "run": "seed",
}  # fmt: skip
"""By section of Rhymeflow, fields that have the same name and values there."""

MAPPED: Mapping[str, str] = {
    "run.output_dir": "output_dir",
    "name": "run_name",
    "learner.groups_per_batch, learner.num_minibatches, learner.num_iterations":
        "per_device_train_batch_size gradient_accumulation_steps generation_batch_size "
        "steps_per_generation num_iterations",
    "learner.loss_type, learner.surrogate, learner.epsilon, learner.epsilon_high":
        "loss_type epsilon epsilon_high",
    "learner.ratio": "importance_sampling_level",
    "rollout.stop, by stop or stop_strings in it": "generation_kwargs",
    "learner.reward_clip": "reward_clip_range",
    "learner.distillation.teacher, if the trainer is given no teacher_model":
        "teacher_model_name_or_path",
    "learner.distillation.teacher is computed in the policy's precision":
        "teacher_model_init_kwargs",
    "learner.off_policy_correction, learner.off_policy_level, learner.importance_sampling_cap, "
    "learner.importance_sampling_floor, with use_vllm":
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_cap",
    "learner.max_steps": "num_train_epochs max_steps",
    "learner.lr_scheduler_type, learner.min_lr_rate, learner.warmup_steps":
        "lr_scheduler_type lr_scheduler_kwargs warmup_steps",
    "learner.optimizer": "optim",
    "learner.max_grad_norm": "max_grad_norm",
    "learner.gradient_checkpointing": "activation_checkpointing gradient_checkpointing",
    "model.dtype, model.quantization": "bf16 model_init_kwargs",
    "model.device": "use_cpu",
    "data.shuffle": "shuffle_dataset",
    "data.chat_template_kwargs": "chat_template_kwargs",
    "run.seed, if it is the same": "data_seed",
    "rollout.engine, rollout.vllm_gpu_memory_utilization, rollout.vllm_max_model_length, "
    "rollout.vllm_tensor_parallel_size; instances are the run's own, in both modes of TRL":
        "use_vllm vllm_mode vllm_gpu_memory_utilization vllm_max_model_length "
        "vllm_tensor_parallel_size",
    "weight of reward.functions": "reward_weights",
    "environment.max_turns": "max_tool_calling_iterations",
    "run.eval_steps, data.eval_size": "eval_strategy eval_steps",
    "run.save_steps, run.save_total_limit": "save_strategy save_steps save_total_limit",
    "run.best_metric; the best checkpoint is the model after train()":
        "load_best_model_at_end metric_for_best_model greater_is_better",
    "run.report_to": "report_to",
    "run.project, with a tracker in report_to that has one": "project",
    "when callbacks' on_log is called": "logging_strategy logging_steps logging_first_step",
    "the model is pushed when train() is over":
        "push_to_hub hub_token hub_private_repo hub_model_id hub_revision",
}  # fmt: skip
"""By what they set, fields with another name or meaning in Rhymeflow."""

PASSED_OVER: Mapping[str, str] = {
    "a run places and starts its processes itself, without torch.distributed":
        "average_tokens_across_devices log_on_each_node log_level_replica "
        "eval_use_gather_object save_on_each_node accelerator_config ddp_find_unused_parameters "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
        "local_rank vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
        "vllm_group_port ds3_gather_for_generation",
    "rhymeflow={'schedule.name': 'synchronous', 'rollout.vllm_sleeps': True} does it":
        "vllm_enable_sleep_mode",
    "how it is computed is the run's own, what is computed is the same":
        "bf16_full_eval fp16_full_eval tf32 activation_checkpointing_kwargs "
        "gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode "
        "use_liger_kernel liger_kernel_config use_cache cache_implementation "
        "torch_empty_cache_steps cast_lm_head_to_fp32 pad_to_multiple_of vllm_model_impl "
        "use_transformers_continuous_batching transformers_continuous_batching_config "
        "use_transformers_paged",
    "no DataLoader is used; prompts are read once and kept, with all columns":
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns "
        "label_names length_column_name",
    "what is printed is the run's display; all metrics and completions are in the run directory "
    "(`rhymeflow inspect`)":
        "include_num_input_tokens_seen log_level disable_tqdm debug skip_memory_metrics "
        "log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo "
        "log_multimodal",
    "trackio's data are on this machine":
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
    "held-out prompts are answered once each, every eval_steps, at the start and at the end, and "
    "their rewards are what is measured":
        "eval_delay eval_on_start per_device_eval_batch_size prediction_loss_only "
        "eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics "
        "num_generations_eval",
    "a checkpoint has all that resuming needs, and SIGTERM saves one":
        "save_only_model enable_jit_checkpoint restore_callback_states_from_checkpoint",
    "the model is pushed once, when train() is over": "hub_strategy hub_always_push",
    "scripts read it; the trainer does not, in TRL either":
        "do_train do_eval do_predict resume_from_checkpoint",
    "there is no dropout while training": "disable_dropout",
    "a step whose gradient is not finite is skipped": "logging_nan_inf_filter",
    "which response ends first depends on time; rhymeflow={'schedule.name': 'synchronous'} does "
    "not wait on that": "full_determinism",
    "it belongs to fsdp, sync_ref_model, use_adaptive_entropy or another loss_type, which are not "
    "supported": "fsdp_config ref_model_mixup_alpha ref_model_sync_steps entropy_coef_min "
        "entropy_coef_max entropy_coef_delta entropy_target vespo_k_pos "
        "vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
}  # fmt: skip
"""By reason, fields without effect on what is learned; if one is set, a notice says so."""

REFUSED: Mapping[str, str] = {
    "an optimizer's constants have fields of their own (adam_beta1, learner.muon_momentum)":
        "optim_args",
    "leave it out: learner.frozen_parameters names what is not trained": "optim_target_modules",
    "leave it out, as TRL's GRPO does; memory is bounded by learner.max_tokens_per_microbatch":
        "auto_find_batch_size label_smoothing_factor",
    "use bf16: compute precision is bf16 or float32 (model.dtype), master weights are float32":
        "fp16",
    "leave it out: embeddings get no noise": "neftune_noise_alpha",
    "leave it out: a resumed run goes on with the next prompt": "ignore_data_skip",
    "shuffle_dataset=False keeps the dataset's order": "train_sampling_strategy",
    "a learner on many devices is learner.num_ranks (FSDP2); start the script once, by python":
        "parallelism_config fsdp deepspeed",
    "models and tokenizers are those that transformers has": "trust_remote_code",
    "leave it out: responses are samples of the policy; temperature, top_p and top_k can be set":
        "min_p repetition_penalty",
    "reward the format instead": "vllm_structured_outputs_regex",
    "leave it out: the loss has no such term": "use_adaptive_entropy router_aux_loss_coef",
    "the reference is the policy the run started from (beta), or give beta=0": "sync_ref_model",
    "leave it out: rhymeflow={'learner.scale_rewards': 'batch'} divides by the deviation of the "
    "batch's rewards, not of its advantages": "normalize_advantages",
    "give the directory of that revision as the teacher": "teacher_model_revision",
}  # fmt: skip
"""By what to do instead, fields that are refused unless they have their default."""

_LIKE_DEFAULT: Mapping[str, tuple[Any, ...]] = {
    "disable_dropout": (True,), "disable_tqdm": (False,), "log_completions": (True,),
    "trackio_space_id": ("trackio",), "hub_strategy": ("end",), "local_rank": (0,),
    "do_train": (True,), "do_eval": (True,), "do_predict": (True,),
    "optim_args": ("",), "fsdp": ("", []), "min_p": (0.0,),
    "router_aux_loss_coef": (0.0,), "teacher_model_revision": ("main",),
}  # fmt: skip
"""By field, values that mean the same as TRL's default."""


def check_one_process() -> None:
    """Raise `UserError` in a script that `torchrun` or `accelerate launch` started."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "rhymeflow.trl: the script was started as several processes (WORLD_SIZE is "
            f"{os.environ['WORLD_SIZE']}); start it once, by python: a run starts its own, "
            "rhymeflow={'learner.num_ranks': N, 'rollout.num_instances': M}"
        )


MAPPINGS = (
    "chat_template_kwargs", "generation_kwargs", "lr_scheduler_kwargs", "model_init_kwargs",
    "teacher_model_init_kwargs",
)  # fmt: skip
"""Mapped fields that TRL passes on without looking at what they are."""

CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(trl.GRPOConfig, "activation_checkpointing")
    else "gradient_checkpointing"
)
"""Its name in the transformers that is installed; 5.19 has no other than the second."""
_NEW_KWARGS = "activation_checkpointing_kwargs"


def values_of(args: Any, kind: type[Any] = trl.GRPOConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a configuration of TRL's class `kind` by name, in plain types, and
    notices of those without effect.

    Raises:
        UserError: a field is refused.
    """
    title = kind.__name__
    if not isinstance(args, kind):
        raise UserError(
            f"{title}: args is a {type(args).__name__}, should be a {title} of rhymeflow.trl or of "
            "TRL"
        )
    why, instead, mapped = map(by_name, (PASSED_OVER, REFUSED, {**SAME, **MAPPED}))
    # TRL fills in some fields that depend on the machine.
    names = ("use_cpu", "bf16", CHECKPOINTING)
    filled_in = kind(**{name: getattr(args, name) for name in names})
    values = {f.name: _without_enums(getattr(args, f.name)) for f in dataclasses.fields(kind)}
    for name in MAPPINGS:
        if not isinstance(values.get(name), Mapping | None):
            raise UserError(f"{title}: {name} = {values[name]!r}, should be a mapping")
    notices = []
    for field in dataclasses.fields(kind):  # others are a script's own
        name, value = field.name, values[field.name]
        computed = _without_enums(getattr(filled_in, name, field.default))
        defaults = (_without_enums(field.default), computed, *_LIKE_DEFAULT.get(name, ()))
        is_default = any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in defaults
        )
        unread = _unread(name, values) if name in mapped else None
        if is_default or (name in mapped and unread is None):
            continue
        if name in mapped:
            notices.append(f"{name} = {value!r} has no effect {unread}")
            values[name] = computed  # or it would be refused where it is not read
            continue
        if name == "gradient_checkpointing_kwargs" and value == values.get(_NEW_KWARGS):
            continue  # transformers sets both; the notice is of the other
        if name in why:
            notices.append(f"{name} = {value!r} has no effect: {why[name]}")
            continue
        unknown = "is not known to this version of Rhymeflow, which knows the fields of TRL 1.16"
        problem = f"is not supported: {instead[name]}" if name in instead else unknown
        raise UserError(f"{title}: {name} = {value!r} {problem}")
    if getattr(args, "use_vllm", False) and args.vllm_mode != "colocate":
        if args.vllm_mode != "server":
            raise UserError(f"{title}: vllm_mode = {args.vllm_mode!r}: colocate or server")
        notices.append(
            "vllm_mode = 'server': no server is asked, stop yours; the run starts vLLM itself, "
            "rhymeflow={'rollout.num_instances': N} times, each with vllm_gpu_memory_utilization "
            f"= {args.vllm_gpu_memory_utilization} and vllm_tensor_parallel_size = "
            f"{args.vllm_tensor_parallel_size}"
        )
    return values, notices


def _unread(name: str, values: Mapping[str, Any]) -> str | None:
    """Return with or without what a mapped field has no effect, in TRL either, as other fields'
    values are; None if it has one."""
    loss, trackers = values.get("loss_type"), {*(values["report_to"] or ())}
    for names, is_unread, text in (
        ("epsilon delta", loss in ("cispo", "sapo"), f"with loss_type {loss}"),
        ("epsilon_high", loss == "sapo", "with loss_type sapo"),
        ("sapo_temperature_pos sapo_temperature_neg", loss != "sapo", "without loss_type sapo"),
        ("use_bias_correction_kl", not values["beta"], "without beta"),
        ("warmup_steps", values["lr_scheduler_type"] == "constant", "with a constant schedule"),
        ("eval_steps", values["eval_strategy"] != "steps", "without eval_strategy steps"),
        ("save_steps", values["save_strategy"] != "steps", "without save_strategy steps"),
        ("logging_steps", values["logging_strategy"] != "steps", "without logging_strategy steps"),
        ("project", trackers <= {"none", "tensorboard"}, "without a tracker that has projects"),
    ):
        if is_unread and name in names.split():
            return text
    is_off = name.startswith("vllm_") and not values["use_vllm"]
    return "without use_vllm" if is_off else None


def own_fields(args: Any) -> dict[str, Any]:
    """Return the value of the field `rhymeflow`, a mapping; text, from a command line, is JSON."""
    fields, title = getattr(args, "rhymeflow", None), in_trl(type(args)).__name__
    if isinstance(fields, str):
        try:
            fields = json.loads(fields)
        except ValueError as error:
            raise UserError(f"{title}: rhymeflow = {fields!r} is no JSON: {error}") from None
    if not isinstance(fields, dict | None):
        raise UserError(
            f"{title}: rhymeflow is a {type(fields).__name__}, should be a mapping of "
            "Rhymeflow's fields, such as {'schedule.name': 'synchronous'}"
        )
    return fields or {}


def _without_enums(value: Any) -> Any:
    """Return the value with enumeration members replaced by their values, also in lists."""
    if isinstance(value, enum.Enum):
        return value.value
    return [_without_enums(each) for each in value] if isinstance(value, list | tuple) else value


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Invert a part of the table: return the text for each field."""
    return {name: text for text, names in table.items() for name in names.split()}
