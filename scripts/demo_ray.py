"""Trains on a Ray of three logical nodes of this machine, and kills a node on the way.

    python scripts/demo_ray.py [RECIPE_OR_FILE] [--steps N]

Two learner ranks on the first node, an instance on each other one, weights as differences between
them. When a third of the steps are done, all processes of a node that has an instance are killed,
and later a new node joins; the run goes on with what there is. It ends with the summary and the
audit of the run's log; exit code 0 if both are as they should be. All listens on the loopback only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="demo", metavar="RECIPE_OR_FILE")
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from rhymeflow.config.load import read_config
    from rhymeflow.runtime.start import choose_run_dir
    from rhymeflow.runtime.train import train
    from tests.ray.nodes import logical_nodes

    with logical_nodes(2, 1, 1) as nodes:
        overrides = {
            "runtime": "ray",
            "ray.address": nodes.address,
            "rollout.num_instances": "1",
            "rollout.max_instances": "2",
            "rollout.num_threads": "1",
            "learner.num_ranks": "2",
            "learner.num_threads": "1",
            "learner.max_steps": str(args.steps),
            "weights.transport": "delta",
        }
        config = read_config(args.recipe, overrides)
        run_dir = choose_run_dir(config)
        strike = threading.Thread(
            target=kill_and_add, args=(nodes, run_dir, args.steps // 3), daemon=True
        )
        strike.start()
        summary = train(config, run_dir=run_dir)
        strike.join(timeout=120)
    lost = count(run_dir, "InstanceLeft")
    print(f"{summary.steps} steps, {lost} instance(s) lost with their node; the audit:", flush=True)
    audit = [sys.executable, str(ROOT / "examples" / "audit_run.py"), str(run_dir)]
    is_right = lost >= 1 and summary.steps == args.steps
    return subprocess.call(audit) or int(not is_right)


def kill_and_add(nodes: Any, run_dir: Path, after: int) -> None:
    """Kill a node that has an instance, when so many steps are done; have another one join."""
    import ray

    while not (run_dir / "metrics.jsonl").exists():
        time.sleep(0.1)
    while count(run_dir, "VersionPublished") < after or count(run_dir, "InstanceJoined") < 2:
        time.sleep(0.1)
    own = ray.get_runtime_context().get_node_id()
    victim = next(node for node in nodes.others if node != own)
    print(f"killing a node after {count(run_dir, 'VersionPublished')} steps", flush=True)
    nodes.kill(victim)
    print("another node joins", flush=True)
    nodes.add()


def count(run_dir: Path, kind: str) -> int:
    """How many events of this kind there are."""
    from rhymeflow.store.reader import TrajectoryReader

    with closing(TrajectoryReader(run_dir / "events.db")) as reader:
        ((found,),) = reader.query("SELECT COUNT(*) FROM events WHERE kind = ?", kind)
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
