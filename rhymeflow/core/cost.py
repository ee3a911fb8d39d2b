"""How long things take: the cost model that strategies weigh with and the simulator runs on.

One decode iteration with n trajectories and K tokens in the KV cache takes

    k1 K + max(k2, k3 n + c) + k4   seconds

(StaleFlow, arXiv 2601.12784, section on the cost model): reading the cache, then the weights or the
arithmetic, whichever is slower, then what an iteration costs in any case. The rest is linear.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds for what an instance and the learner do."""

    k1: float
    k2: float
    k3: float
    c: float
    k4: float
    prefill_token: float  # of a prompt, or of what is recomputed after a pull or a migration
    train_token: float  # by the whole learner
    measure_token: float  # the same of groups whose rewards are all equal: they move nothing
    train_step: float  # whatever its size
    push: float  # to publish a version
    pull: float  # to take a version, during which an instance does nothing else

    def iteration(self, n: float, kv_tokens: float) -> float:
        """Seconds of one decode iteration with `n` trajectories and `kv_tokens` in the cache."""
        return self.k1 * kv_tokens + max(self.k2, self.k3 * n + self.c) + self.k4

    def throughput(self, n: float, kv_tokens: float) -> float:
        """Tokens per second with `n` trajectories; 0 for none."""
        return n / self.iteration(n, kv_tokens) if n else 0.0

    def gain(self, n: float, kv_tokens: float, tokens: float) -> float:
        """Tokens per second won by adding one trajectory of `tokens` tokens (may be below 0)."""
        # `throughput`, written out: routing asks this of every instance.
        k1, k2, k3, c, k4 = self.k1, self.k2, self.k3, self.c, self.k4
        after = (n + 1) / (k1 * (kv_tokens + tokens) + max(k2, k3 * (n + 1) + c) + k4)
        return after - n / (k1 * kv_tokens + max(k2, k3 * n + c) + k4)
