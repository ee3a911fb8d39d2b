"""The learner of a checkout, as a peer: `python learner_side.py CHECKOUT RECIPE DTYPE BATCHES N`.

`CHECKOUT` goes before the installed package, whichever that is. For a request `{"batch": i}` it
trains on that batch of the file and answers with `tokens/s`.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    checkout, recipe, dtype, path, threads = sys.argv[1:]
    sys.path.insert(0, checkout)
    import torch

    import rhymeflow
    from rhymeflow.config.load import read_config
    from rhymeflow.learner.sample import Sample
    from rhymeflow.learner.single import Learner
    from rhymeflow.models.load import load_model, resolve_dtype

    assert Path(rhymeflow.__file__).is_relative_to(checkout), rhymeflow.__file__
    torch.set_num_threads(int(threads))
    if find_spec("rhymeflow.utils.allocator"):  # as the worker does, in checkouts that have it
        import_module("rhymeflow.utils.allocator").keep_freed_memory()
    config = read_config(recipe, {"model.dtype": dtype, "model.device": "cpu"})
    device = torch.device("cpu")
    model = load_model(config.model, dtype=torch.float32, device=device)
    compute = resolve_dtype(config.model, device)
    learner = Learner(model, None, config.learner, config.rollout, compute)
    read = json.loads(Path(path).read_text(encoding="utf-8"))
    batches = [[Sample(**fields) for fields in batch] for batch in read]
    learner.train(batches[0], 1)
    print("answer: {}", flush=True)
    for line in sys.stdin:
        batch = batches[json.loads(line)["batch"]]
        started = time.perf_counter()
        learner.train(batch, 1)
        seconds = time.perf_counter() - started
        tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in batch)
        print("answer:", json.dumps({"tokens/s": tokens / seconds}), flush=True)


if __name__ == "__main__":
    main()
