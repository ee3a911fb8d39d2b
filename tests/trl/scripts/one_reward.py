"""A script in the shape of TRL's first example: a model's name, a dataset, one reward; no guard."""

import sys

from datasets import Dataset

from rhymeflow.trl import GRPOConfig, GRPOTrainer

MODEL, OUTPUT = sys.argv[1:3]
dataset = Dataset.from_list([{"prompt": f"a{n} b{n}?", "answer": 2 * n} for n in range(10)])


def reward_right_sum(completions, answer, **kwargs):
    return [float(text.endswith(f" ={right}")) for text, right in zip(completions, answer)]


training_args = GRPOConfig(
    output_dir=OUTPUT,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=48,
    max_steps=2,
    learning_rate=1e-4,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
)
trainer = GRPOTrainer(
    model=MODEL, reward_funcs=reward_right_sum, args=training_args, train_dataset=dataset
)
result = trainer.train()
print("STEPS", result.global_step, len(trainer.state.log_history))
trainer.save_model(training_args.output_dir)
