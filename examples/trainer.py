"""Teach the demo's model short sums, with a reward function of your own."""

import random

from rhymeflow import Trainer


def correct(completions, answer, **columns):
    """1 for a response that ends in the right sum; the dataset's columns come by name."""
    return [float(text.endswith(f" ={right}")) for text, right in zip(completions, answer)]


def problem(digits):
    terms = " ".join(label + str(digit) for label, digit in zip("abcdefghi", digits))
    return {"prompt": terms + "?", "answer": sum(digits)}


if __name__ == "__main__":  # reward processes import this file
    rows = [problem(random.choices(range(10), k=random.randint(3, 9))) for _ in range(320)]
    trainer = Trainer(
        model="recipe:demo",
        reward_funcs=correct,
        train_dataset=rows[64:],
        eval_dataset=rows[:64],
        config={"max_steps": 20, "learning_rate": 2e-4, "max_completion_length": 128},
    )
    summary = trainer.train()
    print(summary.eval_reward_before, "->", summary.eval_reward_after, trainer.run_dir)
