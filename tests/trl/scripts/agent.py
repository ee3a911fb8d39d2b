"""An environment with tools, judged by a reward function that is handed the environments."""

import sys

from datasets import Dataset

from rhymeflow.trl import GRPOConfig, GRPOTrainer

MODEL, OUTPUT = sys.argv[1:3]


class Counter:
    def reset(self, **kwargs) -> str:
        self.total = 0
        return ""

    def add(self, number: int) -> str:
        """
        Add a number to the total.

        Args:
            number: What is added.
        """
        self.total += number
        return str(self.total)


def reward_total(environments, goal, **kwargs):
    return [float(each.total == right) for each, right in zip(environments, goal)]


trainer = GRPOTrainer(
    model=MODEL,
    train_dataset=Dataset.from_dict({"prompt": ["1+1"] * 4, "goal": [2] * 4}),
    reward_funcs=reward_total,
    args=GRPOConfig(
        OUTPUT,
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=1,
        max_completion_length=24,
        use_cpu=True,
        max_tool_calling_iterations=2,
        logging_steps=1,
    ),
    environment_factory=Counter,
)
trainer.train()
print("REWARDS", [each for each in trainer.state.log_history[0] if each.startswith("rewards/")])
