"""In the shape of open-r1's script: options of its own, a recipe in YAML, an adapter, and all that
comes after training."""

import logging
import os
from dataclasses import dataclass, field
from functools import partial, update_wrapper

import datasets
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint

import rhymeflow.trl as trl
from rhymeflow.trl import (
    GRPOTrainer,
    ModelConfig,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from rhymeflow.trl.rewards import think_format_reward

logger = logging.getLogger(__name__)


@dataclass
class OwnConfig(trl.GRPOConfig):
    """Fields that the script reads, not the trainer, and another default of one of TRL's."""

    callbacks: list[str] = field(default_factory=list)
    chat_template: str | None = field(default=None)
    system_prompt: str | None = field(default=None)
    num_completions_to_print: int = field(default=0)


@dataclass
class OwnArguments(trl.ScriptArguments):
    reward_funcs: list[str] = field(default_factory=lambda: ["accuracy", "length"])
    longest: int = field(default=1000)


class Counting(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        here = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        print("SAVED", args.system_prompt, state.global_step, sorted(os.listdir(here))[0])


def accuracy(completions, answer, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(text.endswith(f" ={right}")) for text, right in zip(contents, answer)]


def short(completions, longest, **kwargs):
    return [1 - len(completion[0]["content"]) / longest for completion in completions]


def rewards(script_args):
    length = update_wrapper(partial(short, longest=script_args.longest), short)
    known = {"accuracy": accuracy, "length": length, "format": think_format_reward}
    return [known[name] for name in script_args.reward_funcs]


def main(script_args, training_args, model_args):
    set_seed(training_args.seed)
    level = training_args.get_process_log_level()
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    logger.warning("%s on %s", training_args.local_rank, training_args.device)
    last = None
    if os.path.isdir(training_args.output_dir):
        last = get_last_checkpoint(training_args.output_dir)
    dataset = datasets.load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    tokenizer.chat_template = training_args.chat_template

    def make_conversation(row):
        system = {"role": "system", "content": training_args.system_prompt}
        return {"prompt": [system, {"role": "user", "content": row["problem"]}]}

    dataset = dataset.map(make_conversation)
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
        use_cache=not training_args.gradient_checkpointing,
        quantization_config=get_quantization_config(model_args),
    )
    evaluates = training_args.eval_strategy != "no"
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards(script_args),
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        peft_config=get_peft_config(model_args),
        callbacks=[{"counting": Counting}[name]() for name in training_args.callbacks],
        processing_class=tokenizer,
    )
    checkpoint = training_args.resume_from_checkpoint or last
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    metrics["train_samples"] = len(dataset[script_args.dataset_train_split])
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.model.generation_config.eos_token_id = tokenizer.eos_token_id
    trainer.save_model(training_args.output_dir)
    about = {"dataset_name": script_args.dataset_name, "tags": ["own"]}
    if trainer.accelerator.is_main_process:
        trainer.create_model_card(**about)
        trainer.model.config.use_cache = True
        trainer.model.config.save_pretrained(training_args.output_dir)
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(dataset[script_args.dataset_test_split])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.push_to_hub:
        trainer.push_to_hub(**about)
    print("LAST", get_last_checkpoint(training_args.output_dir))


if __name__ == "__main__":
    parser = TrlParser((OwnArguments, OwnConfig, ModelConfig))
    main(*parser.parse_args_and_config())
