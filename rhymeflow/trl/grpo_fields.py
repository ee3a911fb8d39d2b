"""The fields that TRL's `GRPOConfig` adds to `TrainingArguments`, in their order.

Holds true: names, types and defaults are those of TRL 1.16.
"""

from __future__ import annotations

from rhymeflow.trl.field import Field, no, over, to
from rhymeflow.trl.training_fields import DICT

_ENTROPY = "leave it out: the loss has no entropy term"
_REF = "the reference is the policy the run started from (beta), or give beta=0"
_LOSS = "loss_type is grpo, bnpo, dr_grpo or dapo"
_BATCHING = "the engine always batches continuously"
_SERVER = "no server is asked: a run starts its own instances (rollout.num_instances)"
_CORRECTION = "learner.off_policy_correction (tis) corrects every token, whatever engine sampled it"
_TABLE = "all completions are in events.db: `rhymeflow inspect RUN_DIR` shows them"

GRPO_FIELDS: tuple[Field, ...] = (
    to("model_init_kwargs", DICT, None, "model.dtype", {}),
    no("trust_remote_code", bool, False, "models and tokenizers are those that transformers has"),
    no("router_aux_loss_coef", float | None, None, "leave it out: there is no router loss", 0.0),
    over("disable_dropout", bool, False, "there is no dropout while training", True),
    over("cast_lm_head_to_fp32", bool, False, "log-probabilities are computed in float32"),
    to("num_generations", int | None, 8, "rollout.num_generations"),
    over("num_generations_eval", int | None, None, "each held-out prompt is answered once"),
    to("max_completion_length", int | None, 512, "rollout.max_completion_length"),
    over("ds3_gather_for_generation", bool, True, "engines have weights of their own"),
    to("shuffle_dataset", bool | None, True, "data.shuffle"),
    over("pad_to_multiple_of", int | str | None, "auto", "rows are packed, not padded", None),
    to("generation_batch_size", int | None, None,
       "learner.groups_per_batch, learner.num_minibatches"),
    to("steps_per_generation", int | None, None,
       "learner.groups_per_batch, learner.num_minibatches"),
    to("temperature", float, 1.0, "rollout.temperature"),
    to("top_p", float, 1.0, "rollout.top_p"),
    to("top_k", int, 0, "rollout.top_k"),
    no("min_p", float | None, None, "use top_p or top_k", 0.0),
    no("generation_kwargs", DICT, None, "temperature, top_p and top_k are what can be set", {}),
    to("chat_template_kwargs", DICT, None, "data.chat_template_kwargs"),
    no("repetition_penalty", float, 1.0, "leave it out: responses are samples of the policy"),
    over("cache_implementation", str | None, None, "the engine has a paged cache of its own"),
    to("use_vllm", bool, False, "rollout.engine"),
    to("vllm_mode", str, "colocate", "instances are the run's own, in both modes of TRL", "server"),
    over("vllm_model_impl", str, "vllm", "vLLM's own implementation is used"),
    over("vllm_enable_sleep_mode", bool, False, "rollout goes on while training does"),
    no("vllm_structured_outputs_regex", str | None, None, "reward the format instead"),
    over("vllm_server_base_url", str | None, None, _SERVER),
    over("vllm_server_host", str, "0.0.0.0", _SERVER),
    over("vllm_server_port", int, 8000, _SERVER),
    over("vllm_server_timeout", float, 240.0, _SERVER),
    over("vllm_group_port", int, 51216, _SERVER),
    to("vllm_gpu_memory_utilization", float, 0.3, "rollout.vllm_gpu_memory_utilization"),
    to("vllm_max_model_length", int | None, None, "rollout.vllm_max_model_length"),
    to("vllm_tensor_parallel_size", int, 1, "rollout.vllm_tensor_parallel_size"),
    to("beta", float, 0.0, "learner.beta"),
    to("num_iterations", int, 1, "learner.num_iterations"),
    to("epsilon", float, 0.2, "learner.epsilon"),
    no("delta", float | None, None, "leave it out: the ratio is clipped from one side"),
    to("epsilon_high", float | None, None, "learner.epsilon_high"),
    over("sapo_temperature_neg", float, 1.05, f"is of loss_type sapo; {_LOSS}"),
    over("sapo_temperature_pos", float, 1.0, f"is of loss_type sapo; {_LOSS}"),
    over("vespo_k_pos", float, 2.0, f"is of loss_type vespo; {_LOSS}"),
    over("vespo_lambda_pos", float, 3.0, f"is of loss_type vespo; {_LOSS}"),
    over("vespo_k_neg", float, 3.0, f"is of loss_type vespo; {_LOSS}"),
    over("vespo_lambda_neg", float, 2.0, f"is of loss_type vespo; {_LOSS}"),
    no("importance_sampling_level", str, "token", "ratios are those of tokens"),
    to("reward_weights", list[float] | None, None, "weight of reward.functions"),
    to("multi_objective_aggregation", str, "sum_then_normalize",
       "learner.multi_objective_aggregation"),
    to("scale_rewards", str, "group", "learner.scale_rewards"),
    to("loss_type", str, "dapo", "learner.loss_type"),
    to("mask_truncated_completions", bool, False, "learner.mask_truncated_completions"),
    no("sync_ref_model", bool, False, _REF),
    over("ref_model_mixup_alpha", float, 0.6, "does nothing without sync_ref_model"),
    over("ref_model_sync_steps", int, 512, "does nothing without sync_ref_model"),
    no("top_entropy_quantile", float, 1.0, "leave it out: every token is in the loss"),
    no("entropy_coef", float, 0.0, _ENTROPY),
    no("use_adaptive_entropy", bool, False, _ENTROPY),
    over("entropy_coef_min", float, 0.0, "does nothing without use_adaptive_entropy"),
    over("entropy_coef_max", float, 1.0, "does nothing without use_adaptive_entropy"),
    over("entropy_coef_delta", float, 0.005, "does nothing without use_adaptive_entropy"),
    over("entropy_target", float, 0.2, "does nothing without use_adaptive_entropy"),
    to("max_tool_calling_iterations", int | None, None, "environment.max_turns"),
    over("vllm_importance_sampling_correction", bool, True, _CORRECTION),
    over("vllm_importance_sampling_mode", str, "sequence_mask", _CORRECTION),
    over("vllm_importance_sampling_clip_max", float | None, 3.0, _CORRECTION),
    over("vllm_importance_sampling_clip_min", float | None, None, _CORRECTION),
    no("off_policy_mask_threshold", float | None, None,
       "schedule.max_staleness bounds how old responses are"),
    no("use_bias_correction_kl", bool, True, "leave it out: k3 is always weighted by the ratio"),
    over("log_completions", bool, False, _TABLE, True),
    over("log_multimodal", bool, True, "there are no images"),
    over("num_completions_to_print", int | None, None, _TABLE),
    over("log_unique_prompts", bool, False, _TABLE),
    over("log_completions_hub_repo", str | None, None, _TABLE),
    over("use_transformers_continuous_batching", bool, False, _BATCHING),
    over("transformers_continuous_batching_config", DICT, None, _BATCHING),
    over("use_transformers_paged", bool, False, _BATCHING),
    over("vllm_importance_sampling_cap", float | None, None, _CORRECTION),
)  # fmt: skip
"""In the order of `GRPOConfig`'s positional arguments, after those it inherits."""
