"""Several rewards with weights: a lambda, a closure that logs; callbacks, evaluation, resuming."""

import datetime
import sys

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from rhymeflow.trl import GRPOConfig, GRPOTrainer


class Stop(TrainerCallback):
    def __init__(self, at):
        self.at, self.events = at, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            control.should_training_stop = True
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.events.append(("log", state.global_step))
        assert {"reward", "eval_low_reward", "eval_high_reward", "train_runtime"} & set(logs)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.events.append(("evaluate", "eval_low_reward" in metrics))

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))


def near(length):
    def reward_near(prompts, completions, weights, day, trainer_state, log_metric, log_extra, **kw):
        assert isinstance(weights[0], list) and day[0].startswith("2026-")
        assert trainer_state.max_steps > 0
        log_metric("mean_distance", sum(abs(len(c) - length) for c in completions))
        log_extra("length", [len(each) for each in completions])
        return [-abs(len(each) - length) / 100 for each in completions]

    return reward_near


def main():
    name, output_dir = sys.argv[1:3]
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    before = next(iter(model.parameters())).detach().clone()
    rows = [
        {"prompt": f"a{n} b{n}?", "weights": np.ones(2), "day": datetime.date(2026, 1, 1 + n)}
        for n in range(8)
    ]
    args = GRPOConfig(
        output_dir, 8, max_steps=4, num_generations=4, max_completion_length=24,
        reward_weights=[0.1, 1.0], logging_steps=1, eval_strategy="steps",
        eval_steps=2, learning_rate=1e-3, save_steps=1, use_cpu=True, warmup_steps=0.0,
    )  # fmt: skip
    stop = Stop(at=2)
    trainer = GRPOTrainer(
        model,
        [lambda completions, **kw: [len(set(c)) / 9 for c in completions], near(20)],
        args,
        rows,
        {"low": rows[:2], "high": rows[5:]},
        tokenizer,
        callbacks=[stop],
    )
    trainer.train()
    assert trainer.state.global_step == 2, trainer.state.global_step
    assert ("save", 2) in stop.events or ("save", 1) in stop.events, stop.events
    assert {"eval_low_reward", "eval_high_reward"} <= set().union(*trainer.state.log_history)
    logged = [each for each in trainer.state.log_history if "loss" in each]
    names = {"loss", "grad_norm", "learning_rate", "reward", "reward_std"}
    assert {*names, "mean_distance", "rewards/lambda/mean"} <= set(logged[0]), logged[0]
    assert (before != next(iter(trainer.model.parameters()))).any()
    assert trainer.model is model
    assert trainer.train(resume_from_checkpoint=True).global_step == 4
    steps = [each["step"] for each in trainer.state.log_history if "loss" in each]
    assert steps == [1, 2, 3, 4], "those before it was stopped, too"
    metrics = trainer.evaluate()
    assert "eval_low_rewards/lambda/mean" in metrics, metrics
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    if trainer.accelerator.is_main_process and trainer.is_local_process_zero():
        trainer.create_model_card(dataset_name="sums", tags=["short"])
    trainer.accelerator.print("EVALUATED", metrics["eval_low_reward"])


if __name__ == "__main__":
    main()
