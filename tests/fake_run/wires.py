"""Pipes without a system: two ends in one process, with a transport between them that repeats.

Holds true: see `Transport`. Knows nothing of what is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from benchmarks.faults.messages import Transport
from tests.fake_run.world import World

DELAY_SECONDS = (0.1, 1.0)
"""Mean and most; long against a turn, short against what counts as a hang."""


class Wire:
    """One direction; `twice` and `late` as of `Transport`."""

    def __init__(self, world: World, twice: float, late: float) -> None:
        self._world = world
        self._transport = Transport(world.rng, twice=twice, late=late, seconds=DELAY_SECONDS)
        self._frames: deque[bytes] = deque()
        self._opens_at = 0.0

    def put(self, frame: bytes) -> None:
        """Send."""
        transport, before = self._transport, self._transport.num_twice
        if delay := transport.delay():
            self._opens_at = max(self._opens_at, self._world.now) + delay
            self._world.counts["messages late"] += 1
        self._frames += transport.deliver(frame)
        self._world.counts["messages twice"] += transport.num_twice - before

    @property
    def is_empty(self) -> bool:
        """Whether all that was sent has been taken."""
        return not self._frames

    @property
    def is_ready(self) -> bool:
        """Whether something has arrived."""
        return bool(self._frames) and self._world.now >= self._opens_at

    def take(self) -> bytes:
        """Receive what has arrived."""
        assert self.is_ready, "nothing is there"
        return self._frames.popleft()


class End:
    """One end of a pipe: what `workers.channel.Connection` asks for. It never waits."""

    def __init__(self, inbound: Wire, outbound: Wire, sending: Callable[[], None]) -> None:
        """`sending` is called before each message that is sent."""
        self.inbound, self._outbound, self._sending = inbound, outbound, sending

    def send_bytes(self, frame: bytes) -> None:
        """Send."""
        self._sending()
        self._outbound.put(frame)

    def recv_bytes(self) -> bytes:
        """Receive what has arrived."""
        return self.inbound.take()

    def poll(self, timeout: float) -> bool:
        """Whether something has arrived."""
        return self.inbound.is_ready

    def fileno(self) -> int:
        """None: there is no system."""
        raise AssertionError("a fake pipe has no descriptor")

    def close(self) -> None:
        """Nothing is kept."""
