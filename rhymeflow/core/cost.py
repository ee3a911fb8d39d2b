"""The cost model: seconds of decoding, prefill, training and weight transfer.

Strategies compare instances by it, and the simulator takes its times from it.

One decode iteration with n trajectories and K tokens in the KV cache takes

    k1 K + max(k2, k3 n + c) + k4   seconds

(StaleFlow, arXiv 2601.12784, section on the cost model): reading the cache, then the slower of
reading the weights and the arithmetic, then a constant. All other costs are linear.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """The coefficients of an instance's and the learner's times, in seconds."""

    k1: float
    k2: float
    k3: float
    c: float
    k4: float
    prefill_token: float  # per token of a prompt, or recomputed after a pull or a migration
    train_token: float  # per token, by the whole learner
    measure_token: float  # per token of a forward pass alone: of groups whose rewards are all equal
    train_step: float  # per step, whatever its size
    push: float  # to publish a version
    pull: float  # to load a version; the instance does nothing else meanwhile

    def iteration(self, n: float, kv_tokens: float) -> float:
        """Seconds of one decode iteration with `n` trajectories and `kv_tokens` in the cache."""
        return self.k1 * kv_tokens + max(self.k2, self.k3 * n + self.c) + self.k4

    def throughput(self, n: float, kv_tokens: float) -> float:
        """Tokens per second with `n` trajectories; 0 for none."""
        return n / self.iteration(n, kv_tokens) if n else 0.0

    def gain(self, n: float, kv_tokens: float, tokens: float) -> float:
        """Tokens per second gained by adding one trajectory of `tokens` tokens; can be negative."""
        # `throughput`, inlined: routing calls this for every instance.
        k1, k2, k3, c, k4 = self.k1, self.k2, self.k3, self.c, self.k4
        after = (n + 1) / (k1 * (kv_tokens + tokens) + max(k2, k3 * (n + 1) + c) + k4)
        return after - n / (k1 * kv_tokens + max(k2, k3 * n + c) + k4)
