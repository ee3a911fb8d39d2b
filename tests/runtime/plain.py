"""The plain synchronous loop that the runtime must equal at staleness 0: generate, judge, step.

One process, one sequence at a time, no cache, no packing, no store; transformers and torch only,
but for the prompt order, the prompt encoding and the sampling noise, which are definitions."""

import statistics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rhymeflow.config import Config
from rhymeflow.data.load import load_prompts
from rhymeflow.data.stream import PromptStream
from rhymeflow.engine.base import NoiseKey
from rhymeflow.engine.native import noise
from tests.runtime.even import even_digits


def respond(model, ids: list[int], key: NoiseKey, config: Config, eos: int) -> list[int]:
    made: list[int] = []
    while len(made) < config.rollout.max_completion_length and eos not in made:
        with torch.no_grad():
            logits = model(torch.tensor([ids + made])).logits[0, -1]
        row = noise.row_keys([noise.stream(config.run.seed, key)], [len(made)], logits.device)
        scores = logits.softmax(-1) / noise.exponentials(row, len(logits))[0]
        made.append(int(scores.argmax()))
    return made


def train(config: Config) -> list[dict]:
    """Return each step's reward, loss, gradient norm and responses."""
    learner, eos = config.learner, 1
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config.model.name)
    stream = PromptStream(load_prompts(config.data, config.run.seed)[0], config.run.seed, True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learner.learning_rate, weight_decay=0.0)
    steps = []
    for step in range(learner.max_steps):
        rows = []  # (prompt ids, response ids, reward, group)
        for group in range(step * learner.groups_per_batch, (step + 1) * learner.groups_per_batch):
            epoch, prompt = stream.at(group)
            ids = tokenizer(prompt.prompt)["input_ids"]
            for member in range(config.rollout.num_generations):
                made = respond(model, ids, NoiseKey(prompt.row, epoch, member), config, eos)
                text = tokenizer.decode(made, skip_special_tokens=True)
                rows.append((ids, made, even_digits([prompt.prompt], [text], [made])[0], group))
        total = sum(len(made) for _, made, _, _ in rows)
        loss = torch.zeros(())
        for ids, made, reward, group in rows:
            rewards = [r for _, _, r, g in rows if g == group]
            advantage = (reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)
            logits = model(torch.tensor([ids + made])).logits[0, len(ids) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(made)[:, None])[:, 0]
            ratio = (logprobs - logprobs.detach()).exp()
            loss = loss - (advantage * ratio).sum() / total
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), learner.max_grad_norm)
        optimizer.step()
        reward = statistics.mean(r for _, _, r, _ in rows)
        responses = [made for _, made, _, _ in rows]
        steps.append(
            {"reward": reward, "loss": loss.item(), "grad_norm": float(norm), "made": responses}
        )
    return steps
