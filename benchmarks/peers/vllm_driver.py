"""vLLM as a peer of the engine benchmark: starts and feeds the process of `vllm_side.py`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
from pathlib import Path


class Vllm:
    """vLLM in a process of its own, fed with one workload after the other.

    Its workers poll for work, so they are stopped while the other sides are measured.
    """

    def __init__(self, args: argparse.Namespace, checkpoint: Path) -> None:
        environment = dict(
            os.environ,
            VLLM_CPU_KVCACHE_SPACE="1",
            OMP_NUM_THREADS=str(args.threads),
            VLLM_LOGGING_LEVEL="WARNING",
        )
        script = Path(__file__).with_name("vllm_side.py")
        self.process = subprocess.Popen(
            [args.vllm_python, str(script), str(checkpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._answer("ready")
        self._signal(signal.SIGSTOP)

    def speed(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Useful tokens per second; the time is taken inside the other process."""
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps([prompts, lengths]) + "\n")
        self.process.stdin.flush()
        tokens, seconds = self._answer("done").split()
        self._signal(signal.SIGSTOP)
        assert int(tokens) == sum(lengths), "vLLM made another number of tokens"
        return sum(lengths) / float(seconds)

    def close(self) -> None:
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
