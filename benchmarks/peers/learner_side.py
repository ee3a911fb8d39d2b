"""The learner of a checkout, as a peer: `python learner_side.py CHECKOUT RECIPE DTYPE BATCHES N`.

`CHECKOUT` is the one that this file is in. Other checkouts call this file with the same arguments
and requests, so both stay as they are: for `{"batch": i}` it trains on that batch of the file and
answers with `tokens/s`; for `{"tokens": n}` on random responses of n tokens, in one micro-batch,
with `peak MB` over what the process had before it loaded the model, and `parameters`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    checkout, recipe, dtype, path, threads = sys.argv[1:]
    sys.path.insert(0, checkout)
    import torch

    import rhymeflow
    from benchmarks.ranks import Memory
    from benchmarks.rollouts.policy import random_batch
    from rhymeflow.config.load import read_config
    from rhymeflow.learner.learner import Learner
    from rhymeflow.learner.sample import Sample
    from rhymeflow.models.load import load_model, resolve_dtype
    from rhymeflow.utils.process import keep_freed_memory

    assert Path(rhymeflow.__file__).is_relative_to(checkout), rhymeflow.__file__
    torch.set_num_threads(int(threads))
    keep_freed_memory()  # as the worker does
    config = read_config(recipe, {"model.dtype": dtype, "model.device": "cpu"})
    device, memory = torch.device("cpu"), Memory()
    model = load_model(config.model, dtype=torch.float32, device=device)
    compute = resolve_dtype(config.model, device)
    learner = Learner(model, None, config.learner, config.rollout, compute)
    read = json.loads(Path(path).read_text(encoding="utf-8"))
    batches = [[Sample(**fields) for fields in batch] for batch in read]
    learner.train(batches[0], 1)

    def speed(batch: list[Sample]) -> dict[str, float]:
        started = time.perf_counter()
        learner.train(batch, 1)
        tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in batch)
        return {"tokens/s": tokens / (time.perf_counter() - started)}

    def peak(tokens: int) -> dict[str, float]:
        row: dict[str, float] = {}
        batch = random_batch(2, 4, 1, tokens // 8, model.config.vocab_size)
        memory.held()
        with memory.peak(row, "peak MB"):
            learner.train(batch, 1)
        return {**row, "parameters": learner.num_parameters}

    print("answer: {}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = speed(batches[asked["batch"]]) if "batch" in asked else peak(asked["tokens"])
        print("answer:", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
