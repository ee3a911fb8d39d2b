"""How long an instance of vLLM stands still for new weights, whole and as changes.

SmolLM2 in bfloat16; each transport in a process of its own, in turn. Weights differ from the last
ones in the last bit of a share of their 16-bit units, spread evenly over all tensors, so that every
layer has to be packed again. What can be fetched while the instance generates is fetched before.
Seconds are the processor's, of one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
from contextlib import ExitStack, closing
from typing import Any

from benchmarks import harness
from benchmarks.peers.process import Peer

DRIVER = "benchmarks/peers/vllm_driver.py"
TRANSPORTS = ("shared_memory", "delta")
SHARES = (0.001, 0.01, 0.1)
COMPARED = 3
"""Pulls, the first of which are followed by a comparison with fresh layers."""


def pulls(args: argparse.Namespace) -> harness.Found:
    """Measure each share of changes."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        peers = {}
        for transport in TRANSPORTS:
            how = json.dumps({"engine": "ours", "max_num_seqs": 8, "transport": transport})
            peers[transport] = stack.enter_context(closing(Peer(args.vllm_python, [DRIVER, how])))
        for peer in peers.values():
            for _ in range(COMPARED):
                peer.ask({"change": SHARES[0]})
        for share in SHARES:
            sides = {name: functools.partial(_seconds, peer, share) for name, peer in peers.items()}
            values = harness.interleave(sides, args.passes + 1, f"{share:.1%} changed")
            rows += [
                {"part": "pulls", "changed": share, **harness.side_row(name, each, "s")}
                for name, each in values.items()
            ]
    return rows, []


def _seconds(peer: Peer, share: float) -> float:
    return float(peer.ask({"change": share})["seconds"])


__all__ = ["pulls"]
