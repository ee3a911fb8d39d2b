"""What people ask a dashboard: of each kind of question many that differ.

Holds true: questions are drawn from what the run has, so none is wrong; the same `draw` gives the
same questions. Questions that have no parameters, as that for the overview, are all the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.asking.server import Dashboard, Question
from rhymeflow.dashboard.groups import FILTERS, ORDERS

CURVES = (
    *("reward", "eval/reward", "completions/mean_length", "staleness/mean", "staleness/max"),
    *("idle/rollout", "idle/learner", "draft/mean_acceptance_length", "entropy"),
    *("off_policy/mismatch_kl", "clip_ratio", "grad_norm", "step_time"),
)
"""Of the view of a run."""
SAMPLE = 20
"""Pages of groups that words are taken from."""


class Known(NamedTuple):
    """What a run has."""

    overview: dict[str, Any]
    groups: list[dict[str, Any]]
    """Some of them, from all over the run."""
    long: list[dict[str, Any]]
    """Those with the longest responses."""
    words: list[str]
    """Of prompts."""
    log: dict[str, Any]


def look(board: Dashboard, draw: random.Random) -> Known:
    """Ask for what questions are made of."""
    overview = board.ask()
    groups: list[dict[str, Any]] = []
    for _ in range(SAMPLE):
        offset = draw.randrange(max(overview["groups"] - 50, 1))
        groups += board.ask("/groups", offset=offset)["groups"]
    long = board.ask("/groups", sort="length", descending="true")["groups"]
    words = sorted({word for group in groups for word in group["prompt"].split()})
    return Known(overview, groups, long, words, board.ask("/log"))


def kinds(known: Known, draw: random.Random) -> Mapping[str, Callable[[], Question]]:
    """By name, what draws a question of that kind."""
    return {
        "run: overview": lambda: ("", {}),
        "run: its curves": lambda: ("/metrics", {"name": CURVES}),
        "run: all metrics": lambda: ("/metrics", {"name": known.overview["metrics"]}),
        "time: whole": lambda: ("/time", {}),
        "time: zoomed": lambda: ("/time", _window(known, draw)),
        **_of_groups(known, draw),
        "group": lambda: (f"/groups/{draw.randrange(known.overview['groups'])}", {}),
        "response": lambda: _response(draw.choice(known.groups), draw),
        "response: longest": lambda: _longest(draw.choice(known.long)),
        "drafts": lambda: ("/drafts", {}),
        **_of_log(known, draw),
    }


def _of_groups(known: Known, draw: random.Random) -> dict[str, Callable[[], Question]]:
    count = known.overview["groups"]

    def asked(**query: Callable[[], Any]) -> Callable[[], Question]:
        return lambda: ("/groups", {name: value() for name, value in query.items()})

    def step() -> int:
        return draw.randrange(known.overview["steps"]) + 1

    def offset() -> int:
        return draw.randrange(count)

    def direction() -> str:
        return draw.choice(("true", "false"))

    found = {
        "groups: of a step": asked(step=step),
        "groups: of a step, by spread": asked(step=step, sort=lambda: "spread"),
        "groups: of a row": asked(row=lambda: draw.choice(known.groups)["row"]),
        "groups: text, a word": asked(text=lambda: _word(known, draw)),
        "groups: text, two words": asked(text=lambda: _words(draw.choice(known.groups), draw)),
        "groups: text, two letters": asked(text=lambda: _word(known, draw)[:2]),
        "groups: text of all": asked(text=lambda: "question: "[draw.randrange(6) :]),
        "groups: text of none": asked(text=lambda: f"no{draw.random()}"),
        "groups: text, filter, by length": asked(
            text=lambda: _word(known, draw)[:3],
            filter=lambda: draw.choice(list(FILTERS)),
            sort=lambda: "length",
            descending=direction,
        ),
        "groups: three filters, by reward": asked(
            filter=lambda: draw.sample(list(FILTERS), 3),
            sort=lambda: "reward",
            descending=direction,
        ),
    }
    for name in ORDERS:
        found[f"groups: by {name}, any page"] = asked(
            sort=_always(name), descending=direction, offset=offset
        )
    for name in FILTERS:
        found[f"groups: {name}"] = asked(
            filter=_always(name),
            sort=lambda: draw.choice(list(ORDERS)),
            descending=direction,
            offset=lambda: 50 * draw.randrange(10),
        )
    return found


def _of_log(known: Known, draw: random.Random) -> dict[str, Callable[[], Question]]:
    seconds, events = known.overview["seconds"], known.log["events"]

    def asked(**query: Callable[[], Any]) -> Callable[[], Question]:
        return lambda: ("/log", {name: value() for name, value in query.items()})

    def kind() -> str:
        return str(draw.choice(known.log["kinds"]))

    def instance() -> str:
        return str(draw.choice(known.log["instances"]))

    def group() -> int:
        return draw.randrange(known.overview["groups"])

    def after() -> str:
        event = draw.randrange(events) + 1
        return f"{event},0,{event}"

    def text() -> str:
        group = known.groups[draw.randrange(len(known.groups))]["group"]
        return draw.choice((f"[{group},{draw.randrange(8)}]", "its process", "Boom", '"stop"'))

    return {
        "log: whole": asked(),
        "log: any page": asked(after=after),
        "log: from a time": asked(time=lambda: draw.uniform(0, seconds)),
        "log: of a kind": asked(kind=kind, after=after),
        "log: of an instance": asked(instance=instance, after=after),
        "log: of a group": asked(group=group),
        "log: text": asked(text=text, after=after),
        "log: kind and instance": asked(kind=kind, instance=instance, after=after),
        "log: kind and group": asked(kind=kind, group=group),
        "log: kind and text": asked(kind=kind, text=text, after=after),
        "log: kind, instance, time, text": asked(
            kind=kind, instance=instance, time=lambda: draw.uniform(0, seconds), text=text
        ),
    }


def _always(value: str) -> Callable[[], str]:
    return lambda: value


def _window(known: Known, draw: random.Random) -> dict[str, float]:
    seconds = known.overview["seconds"]
    width = seconds * 10 ** draw.uniform(-6, 0)
    start = draw.uniform(0, seconds - width)
    return {"from": start, "to": start + width}


def _response(group: dict[str, Any], draw: random.Random) -> Question:
    members = group["members"]
    return f"/trajectories/{group['group']}/{draw.choice(members)['member']}", {}


def _longest(group: dict[str, Any]) -> Question:
    member = max(group["members"], key=lambda each: each["length"])["member"]
    return f"/trajectories/{group['group']}/{member}", {}


def _word(known: Known, draw: random.Random) -> str:
    return draw.choice(known.words)


def _words(group: dict[str, Any], draw: random.Random) -> str:
    words = group["prompt"].split()
    place = draw.randrange(max(len(words) - 1, 1))
    return " ".join(words[place : place + 2])


__all__ = ["CURVES", "Known", "kinds", "look"]
