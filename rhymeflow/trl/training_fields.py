"""The fields that `GRPOConfig` inherits from transformers' `TrainingArguments`, in their order.

Holds true: names, types and defaults are those of TRL 1.16 with transformers 5.
"""

from __future__ import annotations

from typing import Any

from rhymeflow.trl.field import Field, no, over, to

DICT = dict[str, Any] | str | None

_STEPS = "learner.groups_per_batch, learner.num_minibatches"
_ONE_PROCESS = "there are no processes of torch.distributed that it could be about"
_RANKS = "a learner on many devices is learner.num_ranks (FSDP2); start the script once, by python"
_LOADER = "no DataLoader is used; prompts are read once and kept"
_CHECKPOINT = "a checkpoint has all that resuming needs"
_CONSOLE = "what is printed is the run's display; metrics are in metrics.jsonl, each step of them"
_PRECISION = "compute precision is bf16 or float32 (model.dtype), master weights are float32"
_COMPILE = "the learner's kernels are not compiled by torch.compile"
_ACTIVATIONS = "whole layers are computed again"
_METRICS = "evaluation is the mean reward of held-out prompts; no other metrics are computed in it"

TRAINING_FIELDS: tuple[Field, ...] = (
    to("output_dir", str | None, None, "run.output_dir"),
    to("per_device_train_batch_size", int, 8, _STEPS),
    to("num_train_epochs", float, 3.0, "learner.max_steps"),
    to("max_steps", int, -1, "learner.max_steps"),
    to("learning_rate", float, 1e-6, "learner.learning_rate"),
    to("lr_scheduler_type", str, "linear", "learner.lr_scheduler_type"),
    no("lr_scheduler_kwargs", DICT, None, "leave it out: the three schedules have none", {}),
    to("warmup_steps", float, 0, "learner.warmup_steps"),
    to("optim", str, "adamw_torch_fused", "AdamW, fused"),
    no("optim_args", str | None, None, "the optimizer is AdamW, whose arguments are adam_*", ""),
    to("weight_decay", float, 0.0, "learner.weight_decay"),
    to("adam_beta1", float, 0.9, "learner.adam_beta1"),
    to("adam_beta2", float, 0.999, "learner.adam_beta2"),
    to("adam_epsilon", float, 1e-8, "learner.adam_epsilon"),
    no("optim_target_modules", str | None, None, "all weights are trained by AdamW"),
    to("gradient_accumulation_steps", int, 1, _STEPS),
    over("average_tokens_across_devices", bool, True, _ONE_PROCESS),
    to("max_grad_norm", float, 1.0, "learner.max_grad_norm"),
    no("label_smoothing_factor", float, 0.0, "leave it out: TRL's GRPO has no use for it either"),
    to("bf16", bool | None, None, "model.dtype"),
    no("fp16", bool, False, f"use bf16: {_PRECISION}"),
    over("bf16_full_eval", bool, False, "evaluation has the precision of model.dtype"),
    over("fp16_full_eval", bool, False, "evaluation has the precision of model.dtype"),
    over("tf32", bool | None, None, "torch's own setting is left as the process has it"),
    to("activation_checkpointing", bool | None, None, "learner.gradient_checkpointing"),
    over("activation_checkpointing_kwargs", DICT, None, _ACTIVATIONS),
    to("gradient_checkpointing", bool, True, "learner.gradient_checkpointing"),
    over("gradient_checkpointing_kwargs", DICT, None, _ACTIVATIONS),
    over("torch_compile", bool, False, _COMPILE),
    over("torch_compile_backend", str | None, None, _COMPILE),
    over("torch_compile_mode", str | None, None, _COMPILE),
    over("use_liger_kernel", bool, False, "logits are computed in chunks here too"),
    over("liger_kernel_config", DICT, None, "logits are computed in chunks here too"),
    over("use_cache", bool, False, "engines have a cache of their own"),
    no("neftune_noise_alpha", float | None, None, "leave it out: embeddings get no noise"),
    over("torch_empty_cache_steps", int | None, None, "workers have their own memory"),
    no("auto_find_batch_size", bool, False, "leave it out, as in TRL; memory is bounded by "
       "learner.max_tokens_per_microbatch"),
    to("logging_strategy", str, "steps", "when callbacks' on_log is called"),
    to("logging_steps", float, 10, "when callbacks' on_log is called"),
    to("logging_first_step", bool, False, "when callbacks' on_log is called"),
    over("log_on_each_node", bool, True, _ONE_PROCESS),
    over("logging_nan_inf_filter", bool, True, "a step whose gradient is not finite is skipped"),
    over("include_num_input_tokens_seen", str, "no", "num_tokens is among the metrics", False),
    over("log_level", str, "passive", _CONSOLE),
    over("log_level_replica", str, "warning", _ONE_PROCESS),
    over("disable_tqdm", bool | None, None, _CONSOLE, False),
    to("report_to", None | str | list[str], "none", "run.report_to", [], ["none"]),
    to("run_name", str | None, None, "name"),
    over("project", str, "huggingface", "trackers call the project rhymeflow"),
    over("trackio_space_id", str | None, None, "trackio keeps its data on this machine", "trackio"),
    over("trackio_bucket_id", str | None, None, "trackio keeps its data on this machine"),
    over("trackio_static_space_id", str | None, None, "trackio keeps its data on this machine"),
    to("eval_strategy", str, "no", "run.eval_steps, data.eval_size"),
    to("eval_steps", float | None, None, "run.eval_steps"),
    over("eval_delay", float, 0, "evaluations are every eval_steps, and at the start and the end"),
    over("per_device_eval_batch_size", int, 8, "the engine batches held-out prompts itself"),
    over("prediction_loss_only", bool, False, _METRICS),
    over("eval_on_start", bool, False, "where there is evaluation, there always is one then"),
    over("eval_do_concat_batches", bool, True, _METRICS),
    over("eval_use_gather_object", bool, False, _ONE_PROCESS),
    over("eval_accumulation_steps", int | None, None, _METRICS),
    over("include_for_metrics", list[str], [], _METRICS),
    over("batch_eval_metrics", bool, False, _METRICS),
    over("save_only_model", bool, False, _CHECKPOINT),
    to("save_strategy", str, "steps", "run.save_steps"),
    to("save_steps", float, 500, "run.save_steps"),
    over("save_on_each_node", bool, False, _ONE_PROCESS),
    to("save_total_limit", int | None, None, "run.save_total_limit"),
    over("enable_jit_checkpoint", bool, False, "SIGTERM always saves a checkpoint"),
    to("push_to_hub", bool, False, "the model is pushed when train() is over"),
    to("hub_token", str | None, None, "with push_to_hub"),
    to("hub_private_repo", bool | None, None, "with push_to_hub"),
    to("hub_model_id", str | None, None, "with push_to_hub"),
    over("hub_strategy", str, "every_save", "the model is pushed when train() is over", "end"),
    over("hub_always_push", bool, False, "the model is pushed once, when train() is over"),
    to("hub_revision", str | None, None, "with push_to_hub"),
    to("load_best_model_at_end", bool, False, "which checkpoint is the model after train()"),
    to("metric_for_best_model", str | None, None, "run.best_metric", "reward",
       "eval_reward"),
    no("greater_is_better", bool | None, None, "leave it out: a greater reward is better", True),
    no("ignore_data_skip", bool, False, "leave it out: a resumed run goes on with the next prompt"),
    over("restore_callback_states_from_checkpoint", bool, False, "callbacks are those given"),
    over("full_determinism", bool, False, "which response ends first depends on time; "
         "rhymeflow={'schedule.name': 'synchronous'} does not wait on that"),
    to("seed", int, 42, "run.seed"),
    to("data_seed", int | None, None, "run.seed, if it is the same"),
    to("use_cpu", bool, False, "model.device"),
    over("accelerator_config", DICT, None, _ONE_PROCESS),
    no("parallelism_config", Any, None, _RANKS),
    over("dataloader_drop_last", bool, False, _LOADER),
    over("dataloader_num_workers", int, 0, _LOADER),
    over("dataloader_pin_memory", bool, True, _LOADER),
    over("dataloader_persistent_workers", bool, False, _LOADER),
    over("dataloader_prefetch_factor", int | None, None, _LOADER),
    over("dataloader_multiprocessing_context", str | None, None, _LOADER),
    over("dataloader_in_order", bool, True, _LOADER),
    over("remove_unused_columns", bool | None, False, "rewards are given all columns"),
    over("label_names", list[str] | None, None, "there are no labels"),
    no("train_sampling_strategy", str, "random", "shuffle_dataset=False keeps the dataset's order"),
    over("length_column_name", str, "length", "prompts are not grouped by length"),
    over("ddp_find_unused_parameters", bool | None, None, _ONE_PROCESS),
    over("ddp_bucket_cap_mb", int | None, None, _ONE_PROCESS),
    over("ddp_broadcast_buffers", bool | None, None, _ONE_PROCESS),
    over("ddp_static_graph", bool | None, None, _ONE_PROCESS),
    over("ddp_backend", str | None, None, _ONE_PROCESS),
    over("ddp_timeout", int, 1800, _ONE_PROCESS),
    no("fsdp", str | None, None, _RANKS, "", []),
    over("fsdp_config", DICT, None, "it does nothing without fsdp"),
    no("deepspeed", DICT, None, _RANKS),
    over("debug", str, "", "workers' logs are in the run directory", []),
    over("skip_memory_metrics", bool, True, "memory is not among the metrics"),
    over("do_train", bool, False, "scripts read it; the trainer does not, in TRL either", True),
    over("do_eval", bool, False, "scripts read it; the trainer does not, in TRL either", True),
    over("do_predict", bool, False, "scripts read it; the trainer does not, in TRL either", True),
    over("resume_from_checkpoint", str | None, None, "scripts read it: give it to train()"),
    over("local_rank", int, -1, _ONE_PROCESS, 0),
)  # fmt: skip
"""In the order of `GRPOConfig`'s positional arguments."""
