"""Tasks of verifiers, and the program that has the policy play one: `environment.agent: verifiers`.

It runs by its path, in any Python that has verifiers 0.4, and imports the standard library beside.
As a script, it prints the rows of `data.source: verifiers:NAME`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

if sys.path[:1] == [os.path.dirname(os.path.abspath(__file__))]:
    del sys.path[0]  # its neighbours are no modules of a taskset
# Harnesses run uv, which pip installs beside the interpreter.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])

import verifiers.v1 as vf

COLUMN = "verifiers"


def main() -> None:
    """Print the first tasks of a taskset. Arguments: its name, how many, and options as JSON."""
    name, count, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    try:
        with contextlib.redirect_stdout(sys.stderr):
            section = env_section(name, options)
            taskset = vf.load_environment(vf.resolve_env_config(section)).taskset
            rows = [row_of(task.data, section) for task in taskset.take(count)]
    except Exception as error:  # noqa: BLE001 - a taskset may raise anything
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    for row in rows:
        print(json.dumps(row))


def env_section(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return section `env` of verifiers' configuration. What plays the tasks of a taskset that
    brings no harness is a chat with its tools, on this machine."""
    section = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
    if issubclass(vf.env_config_type(name, section.get("id", "")), vf.SingleAgentEnvConfig):
        section["agent"] = agent = {"runtime": {"type": "subprocess"}, **section.get("agent", {})}
        if (
            vf.default_harness_id(name) == "bash"
        ):  # without walls it would be a shell on this machine
            agent.setdefault("harness", {"id": "null"})
    return section


def row_of(data: Any, section: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a task: what is asked, for people, and what `solve` needs."""
    asked = data.prompt_text or data.description or data.name or f"task {data.idx}"
    task = {"env": section, "task": data.model_dump(mode="json")}
    return {"prompt": asked, COLUMN: task}


async def solve(base_url: str, row: dict[str, Any]) -> float:
    """Have the policy play the row's task; return the reward."""
    if COLUMN not in row:
        raise ValueError("environment.agent: verifiers plays rows of data.source: verifiers:NAME")
    env = vf.load_environment(vf.resolve_env_config(row[COLUMN]["env"]))
    kind = type(env.taskset).task_type()
    data = kind.data_type().model_validate(row[COLUMN]["task"])
    [slot] = env.slots(kind(data, env.config.taskset.task))
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="RHYMEFLOW_NEEDS_NO_KEY")
    async with env.serving():
        episode = await env.run_slot(slot, vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{each.type}: {each.message}" for each in errors))
    if len(episode.traces) != 1:
        raise ValueError(f"{len(episode.traces)} agents played, and a response has one reward")
    return float(episode.traces[0].reward)


if __name__ == "__main__":
    main()
