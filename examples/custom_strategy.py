"""A routing rule of your own: each trajectory goes to the instance with the fewest tokens in cache.

    python examples/custom_strategy.py [--section.field VALUE ...]      # compare it, simulated
    rhymeflow train demo --schedule.routing examples/custom_strategy.py:route

A rule is a pure function of a read-only view of all instances. Whatever it proposes, the staleness
bound holds and no response is lost: the coordinator drops proposals that would break either.
docs/schedules.md describes the other kinds of rule, `rhymeflow/core/strategies/base.py` the view.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rhymeflow.config.load import read_config, split_overrides
from rhymeflow.core.strategies.base import Assignment, FleetView


def route(view: FleetView) -> Iterator[Assignment]:
    """Propose an instance for everything in the queue that one has room for."""
    tokens = {instance.name: instance.kv_tokens for instance in view.instances}
    room = {x.name: x.capacity - len(x.assigned) for x in view.instances if x.accepts}
    for trajectory in view.queue:
        able = [
            instance.name
            for instance in view.instances
            if room.get(instance.name, 0) > 0 and instance.version >= trajectory.min_version
        ]
        if able:
            chosen = min(able, key=tokens.__getitem__)
            tokens[chosen] += trajectory.tokens
            room[chosen] -= 1
            yield Assignment(trajectory.id, chosen)


def main() -> None:
    """Simulate a cluster with this rule and with the built-in ones."""
    # Here, because a training run that uses the rule needs no simulator.
    from rhymeflow.sim.simulate import run
    from rhymeflow.sim.workload import workload

    _, overrides = split_overrides(sys.argv[1:])
    fields = {"schedule.name": "staleflow", "rollout.num_instances": "12"}
    for routing in ("fewest_requests", "waterfall", f"{__file__}:route"):
        fields["schedule.routing"] = routing
        config = read_config("cluster", fields | {"learner.max_steps": "6"} | overrides)
        found = run(config, workload(config, None))
        name = routing.rpartition("/")[2]
        print(f"{name:24} {found.throughput:8,.0f} tokens/s, rollout idle {found.idle_rollout:.0%}")


if __name__ == "__main__":
    main()
