"""The learner of a checkout, as a peer: `python learner_side.py CHECKOUT RECIPE DTYPE BATCHES N`.

`CHECKOUT` is the one that this file is in. Other checkouts call this file with the same arguments
and requests, so both stay as they are: for `{"batch": i}` it trains on that batch of the file and
answers with `tokens/s`.
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
    from rhymeflow.config.load import read_config
    from rhymeflow.learner.learner import Learner
    from rhymeflow.learner.sample import Sample
    from rhymeflow.models.load import load_model, resolve_dtype
    from rhymeflow.utils.process import keep_freed_memory

    assert Path(rhymeflow.__file__).is_relative_to(checkout), rhymeflow.__file__
    torch.set_num_threads(int(threads))
    keep_freed_memory()  # as the worker does
    config = read_config(recipe, {"model.dtype": dtype, "model.device": "cpu"})
    device = torch.device("cpu")
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

    print("answer: {}", flush=True)
    for line in sys.stdin:
        print("answer:", json.dumps(speed(batches[json.loads(line)["batch"]])), flush=True)


if __name__ == "__main__":
    main()
