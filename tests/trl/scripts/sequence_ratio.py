"""In the shape of TRL's example of GSPO: options on a command line, messages, an adapter."""

import torch
from datasets import load_dataset

from rhymeflow.trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from rhymeflow.trl.rewards import think_format_reward

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    dtype = model_args.dtype
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": dtype if dtype in ("auto", None) else getattr(torch, dtype),
        "device_map": None,
        "quantization_config": get_quantization_config(model_args),
    }
    parts = ["train[:80%]", "train[80%:]"]
    train, test = load_dataset(script_args.dataset_name, split=parts)

    def as_messages(row):
        system = {"role": "system", "content": "Add up. "}
        return {"prompt": [system, {"role": "user", "content": row["question"]}]}

    train = train.map(as_messages).remove_columns("question")
    test = test.map(as_messages).remove_columns("question")

    def reward_sum(completions, solution: list[str], **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        right = zip(contents, solution)
        return [float(text.endswith(f" ={sum_}")) if sum_ else None for text, sum_ in right]

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, reward_sum],
        train_dataset=train,
        eval_dataset=test,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
