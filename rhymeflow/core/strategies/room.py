"""Room on an instance, and the sizes at which instances are compared.

Knows nothing of the queue or of other instances.
"""

from __future__ import annotations

from rhymeflow.core.strategies.base import InstanceView, Settings


def has_room(instance: InstanceView) -> bool:
    """Whether anything at all may be routed to it."""
    return (
        instance.accepts
        and len(instance.assigned) < instance.capacity
        and instance.kv_tokens < instance.kv_capacity
    )


def fits(kv_tokens: int, tokens: int, instance: InstanceView, settings: Settings) -> bool:
    """Whether so many tokens fit beside so many, with headroom."""
    return kv_tokens + tokens <= (1 - settings.kv_headroom) * instance.kv_capacity


def weighed(tokens: int) -> int:
    """The number of tokens that instances are compared at: a power of two (or 0), at most a factor
    of two below."""
    return 1 << tokens.bit_length() >> 1
