"""Fields that scripts for earlier TRL and transformers give, and that TRL 1.16 has no more.

Holds true: none of them is a field of `GRPOConfig`; each has a sentence on what to do.
"""

from __future__ import annotations

from collections.abc import Mapping

_LOSS = "leave it out: logits are computed in chunks here too"

REMOVED: Mapping[str, str] = {
    "max_prompt_length": "give rhymeflow={'data.max_prompt_length': N}; a longer prompt is refused "
    "with its row, not cut",
    "warmup_ratio": "warmup_steps takes a share below 1, too",
    "evaluation_strategy": "it is eval_strategy now",
    "overwrite_output_dir": "leave it out: a second run gets a directory of its own",
    "logging_dir": "leave it out: TensorBoard's files are in the run directory",
    "use_liger_loss": _LOSS,
    "use_liger_kernel_loss": _LOSS,
    "torch_empty_cache": "leave it out: workers have their own memory",
    "per_gpu_train_batch_size": "it is per_device_train_batch_size now",
    "group_by_length": "leave it out: prompts are not grouped by length",
    "no_cuda": "it is use_cpu now",
    "use_mps_device": "leave it out: model.device is cpu or cuda",
    "torchdynamo": "leave it out: nothing is compiled by torch.compile",
    "half_precision_backend": "leave it out: model.dtype says the precision",
    "fp16_backend": "leave it out: model.dtype says the precision",
    "fp16_opt_level": "leave it out: model.dtype says the precision",
    "push_to_hub_model_id": "it is hub_model_id now",
    "push_to_hub_organization": "hub_model_id is ORGANISATION/NAME",
    "push_to_hub_token": "it is hub_token now",
    "vllm_guided_decoding_regex": "leave it out: reward the format instead",
    "vllm_device": "leave it out: a run places its instances itself",
    "vllm_dtype": "leave it out: model.dtype is that of the engine too",
    "vllm_max_model_len": "it is vllm_max_model_length now",
    "vllm_enable_prefix_caching": "leave it out: prompts of a group share their cache",
    "num_completions": "it is num_generations now",
    "wandb_log_unique_prompts": "it is log_unique_prompts now",
    "ref_model_init_kwargs": "leave it out: the reference is the policy the run started from",
    "reward_clip": "clip in the reward function",
}
"""What `GRPOConfig` says of a name that it knows from earlier versions."""
