"""arctic-inference's suffix decoding, fed with recorded rollouts; run by its own python.

    python -m benchmarks.peers.arctic_side      # requests and answers: see `process.py`

Only the extension `suffix_decoding` is needed, in an environment of its own (torch is not):

    python -m venv VENV && VENV/bin/pip install numpy nanobind==2.9.2 cmake ninja
    pip download --no-deps --no-binary :all: --no-build-isolation arctic-inference==0.3.0
    tar xf arctic_inference-0.3.0.tar.gz && cd arctic_inference-0.3.0 && PATH=VENV/bin:$PATH
    cmake -S csrc/suffix_decoding -B build -DPython_EXECUTABLE=VENV/bin/python
    cmake --build build --config Release
    cp build/_C*.so arctic_inference/suffix_decoding/
    cp -r arctic_inference VENV/lib/python3.*/site-packages/

It is used as vLLM's `suffix` method uses it (`v1/spec_decode/suffix_decoding.py`): one cache for
all requests, the request's prompt in a tree of its own, the last `max_tree_depth` tokens as
context, new tokens added before the next draft is proposed, int32 arrays throughout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache

from benchmarks.rollouts.lockstep import replay
from benchmarks.rollouts.recorded import Rollout, load


class Suffix:
    """A `lockstep.Side` over `SuffixDecodingCache`.

    `depth`, `factor`, `least` are its `max_tree_depth`, `max_spec_factor`, `min_token_prob`.
    """

    def __init__(
        self, *, max_draft: int, tree: bool, depth: int, factor: float, least: float
    ) -> None:
        self.cache = SuffixDecodingCache(depth)
        self.max_draft, self.depth = max_draft, depth
        self.how = {"max_spec_factor": factor, "min_token_prob": least, "use_tree_spec": tree}
        self.base = 0
        self.texts: list[np.ndarray] = []
        self.lengths: list[int] = []

    def begin(self, rollouts: Sequence[Rollout], first: Sequence[list[int]]) -> None:
        """Start requests; texts lie in arrays that are written on, as an engine's do."""
        self.texts, self.lengths = [], []
        for sequence, (rollout, tokens) in enumerate(zip(rollouts, first, strict=True)):
            prompt = np.array(rollout.prompt, np.int32)
            text = np.empty(len(prompt) + len(rollout.tokens), np.int32)
            text[: len(prompt)] = prompt
            self.texts.append(text)
            self.lengths.append(len(prompt))
            self.cache.start_request(self.base + sequence, prompt)
            self._add(sequence, tokens)

    def propose(self, running: list[int], room: list[int]) -> list[tuple[list[int], list[int]]]:
        """One `speculate` a sequence."""
        drafts = []
        for sequence, most in zip(running, room, strict=True):
            length = self.lengths[sequence]
            context = self.texts[sequence][max(0, length - self.depth) : length]
            draft = self.cache.speculate(
                self.base + sequence,
                context,
                max_spec_tokens=min(self.max_draft, most),
                **self.how,
            )
            drafts.append((draft.token_ids, draft.parents))
        return drafts

    def extend(self, running: list[int], made: list[list[int]]) -> None:
        """Add what was made to the cache."""
        for sequence, tokens in zip(running, made, strict=True):
            self._add(sequence, tokens)

    def end(self, sequence: int) -> None:
        """Stop the request; its response stays cached."""
        self.cache.stop_request(self.base + sequence)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing knows rewards here."""
        self.base += len(rollouts)

    def num_bytes(self) -> int:
        """Memory of the shared tree, by its own estimate."""
        return self.cache._global_tree.estimate_memory()

    def _add(self, sequence: int, tokens: list[int]) -> None:
        length = self.lengths[sequence]
        end = self.lengths[sequence] = length + len(tokens)
        text = self.texts[sequence]
        text[length:end] = tokens
        self.cache.add_active_response(self.base + sequence, text[length:end])


def answer(request: dict) -> dict:
    """Replay a recording with `settings`; return the counts of each epoch, and the memory it took.

    With `running`, the last so many rollouts run for some iterations, and those before are history.
    """
    recording = load(Path(request["path"]))
    side = Suffix(**request["settings"])
    iterations, running = request.get("iterations"), request.get("running")
    batches = recording.batches(request["groups"]) if running is None else []
    if running is not None:
        history = recording.rollouts[:-running]
        side.begin(history, [rollout.tokens for rollout in history])
        for sequence in range(len(history)):
            side.end(sequence)
        side.finish(history)
        batches = [recording.rollouts[-running:]]
    counts = replay(side, batches, request["limit"], iterations)
    return {
        "counts": [asdict(count) for count in counts],
        "bytes_per_token": side.num_bytes() / recording.num_tokens,
    }


if __name__ == "__main__":
    print("answer:{}", flush=True)
    for line in sys.stdin:
        print("answer:" + json.dumps(answer(json.loads(line))), flush=True)
