"""vLLM as a peer of benchmarks: starts and feeds the process of `vllm_side.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple


class Made(NamedTuple):
    """What a workload came to; the time is taken inside the other process."""

    tokens: list[list[int]]
    seconds: float


class Vllm:
    """vLLM in a process of its own, fed with one workload after the other.

    Its workers poll for work, so they are stopped while the other sides are measured. `options`
    are those of vLLM's `LLM`.
    """

    def __init__(self, python: str, threads: int, checkpoint: Path, **options: Any) -> None:
        environment = dict(
            os.environ,
            VLLM_CPU_KVCACHE_SPACE="1",
            OMP_NUM_THREADS=str(threads),
            VLLM_LOGGING_LEVEL="WARNING",
        )
        script = Path(__file__).with_name("vllm_side.py")
        self.process = subprocess.Popen(
            [python, str(script), str(checkpoint), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._answer("ready")
        self._signal(signal.SIGSTOP)

    def generate(
        self, prompts: list[list[int]], lengths: list[int], temperature: float = 1.0
    ) -> Made:
        """Responses of just these lengths; stop tokens do not end them."""
        self._signal(signal.SIGCONT)
        work = {"prompts": prompts, "lengths": lengths, "temperature": temperature}
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self._answer("done"))
        self._signal(signal.SIGSTOP)
        assert list(map(len, answer["tokens"])) == lengths, "vLLM made other numbers of tokens"
        return Made(answer["tokens"], answer["seconds"])

    def speed(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Useful tokens per second at temperature 1."""
        return sum(lengths) / self.generate(prompts, lengths).seconds

    def close(self) -> None:
        """End the process."""
        self._signal(signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def _answer(self, word: str) -> str:
        for line in self.process.stdout:
            if line.startswith(f"side:{word}"):
                return line.removeprefix(f"side:{word}").strip()
        raise RuntimeError("the vLLM process ended; its error is above")
