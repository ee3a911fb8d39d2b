"""`rhymeflow inspect`: one question to a run, answered as text or JSON; nothing is written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError, counted
from rhymeflow.observe import metrics, query, summary
from rhymeflow.observe.printable import (
    clock,
    conversation,
    facts,
    means,
    number,
    printable,
    shortened,
    sparkline,
    table,
)
from rhymeflow.observe.query import Kind, Record, TokenTexts
from rhymeflow.store.damage import open_undamaged
from rhymeflow.store.previous_run import store_of
from rhymeflow.store.reader import TrajectoryReader
from rhymeflow.store.schema import GIVEN
from rhymeflow.suites.figures import headlines

MAX_GROUPS = 50  # groups of a step that are shown, those with the widest spread of rewards
_SCALE = (0.0, 1.0)  # bars of rewards span at least this range
_NUM_QUANTILES = 5
_FIGURES_WIDTH = 60  # columns left of the curves
_NAME_WIDTH = 20
_RESPONSE_LINES = 3
_BREAKS = 12  # columns that a line break between words may leave empty

_NOTHING = 1e-7  # below this a figure is rounding, as the KL of two equal policies is

# Label and name of each metric that is shown besides rewards.
_CURVES = (
    ("response tokens", "completions/mean_length"),
    ("cut at the limit", "completions/clipped_ratio"),
    ("entropy", "entropy"),
    ("kl", "kl"),
    ("from teacher", "distillation/divergence"),
    ("mismatch kl", "off_policy/mismatch_kl"),
    ("gradient norm", "grad_norm"),
)
# One row per quantile (from 1) of the lengths of all responses with tokens.
_QUANTILES = f"""
SELECT MIN(length) AS shortest, MAX(length) AS longest, COUNT(*) AS count, AVG(reward) AS reward,
    COALESCE(AVG(reason IN ('length', 'finished_early')), 0) AS cut,
    AVG(ending IS 'consumed') AS consumed, AVG(ending IS 'filtered') AS filtered,
    AVG(ending IS 'aborted') AS aborted, AVG(ending IS NULL) AS open
FROM (SELECT *, NTILE({_NUM_QUANTILES}) OVER (ORDER BY length, group_id, member) AS quantile
    FROM responses)
GROUP BY quantile ORDER BY quantile"""
_LEFT_OUT = """SELECT ending_reason, COUNT(*) FROM groups
    WHERE ending_reason IS NOT NULL AND suite IS NULL GROUP BY 1"""
_DELETED = """SELECT (SELECT COUNT(*) FROM (SELECT DISTINCT group_id, member FROM pruned)),
    (SELECT COUNT(*) FROM (SELECT DISTINCT group_id, member FROM segments WHERE +group_id >= 0))"""

Steps = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """What is asked about a run; the run itself, if nothing is given. Raises `UserError` if options
    do not go together or have wrong values."""

    trajectory: str | None = None
    group: int | None = None
    best: int | None = None  # this many responses, of `step` if that is given
    worst: int | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        for kind, count in self.numbers.items():
            if count < 1:
                raise UserError(f"--{kind} {count}: should be 1 or more")
        names = ["trajectory", "group", *list(self.numbers)[:1]]
        if self.trajectory is not None or self.group is not None:
            names.append("step")
        given = [(name, getattr(self, name)) for name in names]
        things = [f"--{name} {value}" for name, value in given if value is not None]
        if len(things) > 1:
            raise UserError(f"{' and '.join(things)}: do not go together")
        if self.trajectory is not None:
            parse(self.trajectory)

    @property
    def numbers(self) -> dict[Kind, int]:
        """How many of the best and of the worst."""
        given = {kind: getattr(self, kind) for kind in query.KINDS}
        return {kind: count for kind, count in given.items() if count is not None}


def parse(text: str) -> TrajectoryId:
    """Return the response named `group.member`. Raises `UserError` if the name has another form."""
    match = re.fullmatch(r"(-?\d+)\.(\d+)", text)
    if match is None:
        raise UserError(f"--trajectory {text}: is not GROUP.MEMBER, such as 12.3")
    return TrajectoryId(int(match[1]), int(match[2]))


def as_json(run_dir: Path, question: Question) -> str:
    """The answer as the text of one JSON document, of ASCII alone: nothing in it acts on a
    terminal. Numbers that JSON does not have are null. Raises `UserError` if no run there, no such
    thing in it, or the store is damaged."""
    with open_undamaged(store_of(run_dir)) as reader:
        found = _answer(run_dir, reader, question)
        if found is None:
            found = query.run(run_dir, reader, metrics.rows(run_dir))
            found["drafts"] = query.drafts_by_epoch(reader)
            found["by_length"] = reader.records(_QUANTILES)
        elif question.trajectory is not None:
            found["texts"] = found["tokens"] and TokenTexts().of(reader, found["tokens"])
    return json.dumps(json.loads(msgspec.json.encode(found)), indent=2)


def inspect(run_dir: Path, question: Question, console: Console) -> None:
    """Print the answer. Raises the same as `as_json`."""
    with open_undamaged(store_of(run_dir)) as reader:
        found = _answer(run_dir, reader, question)
        if found is None:
            _show_run(run_dir, reader, console)
        elif question.trajectory is not None:
            _show_trajectory(found, console)
        elif question.group is not None:
            _show_group(found, console)
        elif question.numbers:
            of = "the run" if question.step is None else f"step {question.step}"
            for kind, responses in found.items():
                _show_responses(f"{kind.capitalize()} responses of {of}", responses, console)
                if not responses:
                    console.print(Text(f"No response of {of} has a reward."))
        else:
            _show_step(found, console)


def _answer(run_dir: Path, reader: TrajectoryReader, question: Question) -> Record | None:
    """None: the question is about the run itself."""
    if question.trajectory is not None:
        return query.response(run_dir, reader, parse(question.trajectory))
    if question.group is not None:
        return query.group(reader, question.group)
    if question.numbers:
        return {
            kind: query.rewarded(reader, kind, count, question.step)
            for kind, count in question.numbers.items()
        }
    return None if question.step is None else query.step(run_dir, reader, question.step)


# -- the run: what it learned ----------------------------------------------------------------------


def _show_run(run_dir: Path, reader: TrajectoryReader, console: Console) -> None:
    rows = metrics.rows(run_dir)
    run, steps = query.run(run_dir, reader, rows), metrics.by_step(rows)
    console.print(Text(_headline(run, max(steps, default=0)), style="bold"), soft_wrap=False)
    for verdict in run["verdicts"]:
        said = Text(query.dated(verdict), style="bold yellow")
        console.print(said.append(f": {verdict['remedy']}", style="not bold"))
    _show_learned(run, steps, reader, console)
    console.print()
    _show_last_responses(steps, reader, console)
    console.print()
    ((gone, left),) = reader.query(_DELETED)
    limit = run["limit"]
    lines = {
        "pace": f"{limit['line']} (last {limit['steps']} steps)" if limit else "",
        "throughput": _throughput(steps, reader),
        **dict(summary.how_it_went(summary.summarize(run_dir, judges=False))),
        "left out": ", ".join(f"{n:,} ({reason})" for reason, n in reader.query(_LEFT_OUT)),
        "tokens": f"of {left:,} responses, those of {gone:,} were deleted" if gone else "",
    }
    console.print(facts((label, line) for label, line in lines.items() if line))
    more = "--worst N, --best N, --step S, --group G, --trajectory G.M; --json has all of it"
    console.print(Text(f"More: {more}", style="dim"))


def _show_learned(run: Record, steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    """Curves of the rewards and other metrics, once there are steps."""
    if any(step > 0 for step in steps):
        console.print(_curves(steps, min(max(20, console.width - _FIGURES_WIDTH), 40)))
        return
    ((finished, rewarded, mean),) = reader.query(
        f"SELECT COUNT(*), COUNT({GIVEN}), AVG({GIVEN}) FROM trajectories WHERE group_id >= 0"
    )
    text = f"So far: {run['groups']:,} prompts, {finished:,} finished responses, "
    text += f"{rewarded:,} rewarded" + (f", mean reward {_value(mean)}" if rewarded else "")
    console.print(Text(f"No step has been completed. {text}"))
    if run["held_out"]:
        before = _value(run["held_out"][0][1])
        console.print(Text(f"Held-out reward before training: {before}"))


def _headline(run: Record, step: int) -> str:
    config, planned = run["config"], run["max_steps"]
    what = ""
    if config:
        schedule = config.get("schedule", {}).get("name")
        what = f" (recipe {config.get('name')}, schedule {schedule})"
    of = f" of {planned}" if planned is not None else ""
    after = f" after {clock(run['seconds'])}" if run["events"] else ""
    whose = f" ({run['emulated']})" if run["emulated"] else ""
    return printable(f"{run['name']}{what}: {run['state']}, step {step}{of}{after}{whose}")


def _curves(steps: Steps, width: int) -> Table:
    """A row for each metric: first, last, highest, and its curve."""
    functions = [name for name in steps[max(steps)] if re.fullmatch("rewards/.*/mean", name)]
    suites = dict.fromkeys(name for row in steps.values() for name in headlines(row))
    lines = [("held-out reward", "eval/reward")]
    lines += [(name, f"eval/{'/'.join(name.rsplit(' ', 1))}") for name in suites]
    lines += [("training reward", "reward")]
    if len(functions) > 1:  # one alone is the reward
        lines += [(f"  {n.removeprefix('rewards/').removesuffix('/mean')}", n) for n in functions]
    lines += _CURVES
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    for _ in range(3):
        grid.add_column(justify="right", no_wrap=True)
    grid.add_row(*(Text(each, style="dim") for each in ("", "first", "last", "highest", "")))
    for label, name in lines:
        points = [(row[name], step) for step, row in steps.items() if row.get(name) is not None]
        if not points:
            continue
        values = [value for value, _ in points]
        best, at = max(points, key=lambda point: (point[0], -point[1]))  # the first of equal ones
        grid.add_row(
            Text(shortened(label, _NAME_WIDTH)),
            _value(values[0]),
            Text(_value(values[-1]), style="bold"),
            f"{_value(best)} at {at}",
            Text(sparkline(means(values, width))),
        )
    return grid


def _value(value: float) -> str:
    if abs(value) < _NOTHING:
        return "0.000"
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 else f"{value:.3g}"


def _show_last_responses(steps: Steps, reader: TrajectoryReader, console: Console) -> None:
    """The best and the worst response of the last batch, or of all if no batch is complete."""
    # A batch that is being trained on has no metrics yet.
    ((last,),) = reader.query(
        "SELECT MAX(trained) + 1 FROM trajectories WHERE trained < ?", max(steps, default=0)
    )
    of = "so far" if last is None else f"of step {last}"
    found = {kind: query.rewarded(reader, kind, 1, last) for kind in query.KINDS}
    if len({response["reward"] for each in found.values() for response in each}) == 1:
        del found["worst"]  # all rewards are equal
    for kind, responses in found.items():
        for response in responses:
            which = "Response" if response["reward"] is None else kind.capitalize()
            _show_response(response, console, f"{which} {of}: ", is_brief=True)


def _throughput(steps: Steps, reader: TrajectoryReader) -> str:
    rows = [row for row in steps.values() if row.get("step_time")]
    if not rows:
        return ""
    seconds, counts = sum(row["step_time"] for row in rows), query.trained(reader)
    trained = sum(counts.get(row["step"], 0) for row in rows)
    tokens = sum(
        counts.get(row["step"], 0) * (row.get("completions/mean_length") or 0.0) for row in rows
    )
    step = median(row["step_time"] for row in rows)
    responses = f"{trained / seconds:.1f} trained responses/s"
    return f"{responses}, {tokens / seconds:,.0f} of their tokens/s, median step {step:.2f} s"


# -- responses -------------------------------------------------------------------------------------


def _show_responses(title: str, responses: Sequence[Record], console: Console) -> None:
    """Print responses, each with its prompt if it has one, and its text."""
    if responses:
        console.print()
        console.print(Text(title, style="bold"))
    for each in responses:
        _show_response(each, console)


def _show_response(
    each: Record, console: Console, before: str = "", *, is_brief: bool = False
) -> None:
    # Two columns of indentation, nine of labels, and one that stays free.
    width = console.width - 12
    where = f"{each['group']}.{each['member']}"
    line = Text.assemble((before, "bold"), (where, "bold cyan"), f"  {_said_of(each)}")
    console.print(line, overflow="fold")
    parts, text = each["components"] or {}, each["text"]
    rows = {
        "rewards": "" if is_brief or len(parts) == 1 else _shares(parts),  # one is the reward
        "prompt": conversation(each["prompt"]) if "prompt" in each else "",
        "response": "(no text is stored)" if text is None else text or "(empty)",
        "columns": "" if is_brief else _columns(each.get("columns", {})),
    }
    grid = Table.grid(padding=0)
    grid.add_column(width=11, no_wrap=True, style="dim")
    grid.add_column(width=width, overflow="fold")
    longest = 2 * width - _BREAKS if is_brief else width * _RESPONSE_LINES
    for label, said in rows.items():
        room = longest if label == "response" else width
        if said:
            grid.add_row(f"  {label}", Text(shortened(said, room)))
    console.print(grid)


def _said_of(response: Record) -> str:
    """Reward, length and ending, on one line."""
    reason, ending, step = response["reason"], response["ending"], response["step"]
    tokens = counted(response["length"], "token")
    how = {"stop": "", "length": ", cut at the limit", None: " so far"}.get(reason, f", {reason}")
    end = {"consumed": "not needed", None: "waits"}.get(ending, str(ending))
    reward = "-" if response["reward"] is None else _value(response["reward"])
    said = f"reward {reward}, {tokens}{how}, {end if step is None else f'step {step}'}"
    if step is not None and "first_version" in response:
        said += f", staleness {step - 1 - response['first_version']}"
    return said


def _show_trajectory(response: Record, console: Console) -> None:
    reward, shares = response["reward"], _shares(response["components"] or {})
    without = "none yet" if response["components"] is None else "none"
    rows = [
        ("trajectory", f"{response['group']}.{response['member']}"),
        ("prompt", f"row {response['row']}, {_epoch(response)}"),
        ("columns", _columns(response["columns"]) or "none"),
        ("length", _length(response)),
        ("reward", without if reward is None else f"{reward:g}" + f" ({shares})" * bool(shares)),
        ("ending", _ending(response)),
    ]
    console.print(facts(rows))
    console.print(_panel("prompt", conversation(response["prompt"])))
    if response["text"] is not None:
        console.print(_panel("response", response["text"]))
    elif response["segments"] and response["tokens"] is None:
        console.print(Text("Tokens and text were deleted (run.keep_tokens)."))
    console.print(_segments(response))


def _length(response: Record) -> str:
    if response["length"] is None:
        length = sum(each["length"] for each in response["segments"])
        return f"{counted(length, 'token')} so far"
    return f"{counted(response['length'], 'token')}, ended by {response['reason']}"


def _ending(response: Record) -> str:
    if response["ending"] != "consumed":
        return _ended(response)
    if response["step"] is None:
        return "aborted: its group did not need it"
    age = response["step"] - 1 - min(each["version"] for each in response["segments"])
    return f"trained on in step {response['step']}, {counted(age, 'version')} old"


def _segments(response: Record) -> Table:
    logprobs, rows = response["logprobs"], []
    for each in response["segments"]:
        start, count, steps = each["start"], each["length"], each["steps"]
        mean = None
        if logprobs and not each["observed"]:
            mean = sum(logprobs[start : start + count]) / count
        figures = query.draft_figures(count, steps, each["drafted"]) if steps else {}
        rows.append([
            f"{start}-{start + count - 1}", str(each["version"]), each["instance"],
            number(mean, ".3f"), number(figures.get("acceptance_length"), ".2f"),
            number(figures.get("drafted"), ",d"), number(figures.get("acceptance_rate"), ".1%"),
        ])  # fmt: skip
    drafts = ("acceptance\nlength", "drafted", "accepted")
    return table("Segments", ("tokens", "version", "instance", "mean\nlogprob", *drafts), rows)


def _panel(title: str, text: str) -> Panel:
    return Panel(Text(printable(text)), title=title, title_align="left")


def _shares(components: Record) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in components.items())


def _columns(columns: Record) -> str:
    return ", ".join(f"{name} = {value}" for name, value in columns.items())


# -- a step and a group ----------------------------------------------------------------------------


def _show_step(step: Record, console: Console) -> None:
    ended = "" if step["time"] is None else f", over after {clock(step['time'])}"
    console.print(Text(f"Step {step['step']}{ended}", style="bold"))
    if not step["metrics"]:
        console.print("It has no metrics yet.")
    for name, value in step["metrics"].items():
        line = f"{name:<36} {_figure(value)}"
        console.print(Text(printable(line)), no_wrap=True, overflow="ellipsis")
    if not step["groups"]:
        console.print("No group belongs to it.")
        return
    rewards = [each["reward"] for group in step["groups"] for each in group["members"]]
    among = [*_SCALE, *(reward for reward in rewards if reward is not None)]
    bars = f"bars from {min(among):g} to {max(among):g}"
    shown = table(
        f"Groups: {step['count']:,}, by spread of reward; {bars}",
        ("group", "rewards", "mean", "tokens", "longest", "stale", "ending", "cut", "prompt"),
        [_group_row(group, among, console.width - 80) for group in step["groups"][:MAX_GROUPS]],
    )
    if step["count"] > MAX_GROUPS:
        shown.caption = f"{step['count'] - MAX_GROUPS} more with --json"
    console.print(shown)


def _group_row(group: Record, among: Sequence[float], room: int) -> list[str]:
    bars = (
        "·" if each["reward"] is None else sparkline([each["reward"]], among)
        for each in group["members"]
    )
    prompt = f"{group['row']}: {conversation(group['prompt'])}" if room > 10 else f"{group['row']}"
    return [
        str(group["group"]),
        "".join(bars),
        number(group["reward"], ".3f"),
        number(group["length"], ".0f"),
        number(group["length_max"], ""),
        number(group["staleness_max"], ""),
        str(group["ending"]),
        str(group["cut"]),
        shortened(prompt, max(room, 10)),
    ]


def _figure(value: Any) -> str:
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    is_count = abs(value) < 10**12 and float(value).is_integer()
    return f"{value:,.0f}" if is_count else f"{value:.4g}"


def _show_group(group: Record, console: Console) -> None:
    step = group["step"]
    ending = _ended(group) if step is None else f"trained on in step {step}"
    where = f"prompt {group['row']}, {_epoch(group)}, {ending}"
    console.print(Text(printable(f"Group {group['group']}: {where}"), style="bold"))
    console.print(_panel("prompt", conversation(group["prompt"])))
    if group["columns"]:
        console.print(Text(shortened(f"columns  {_columns(group['columns'])}", console.width - 1)))
    of_group = {"group": group["group"], "ending": group["ending"]}
    _show_responses("Responses", [each | of_group for each in group["members"]], console)
    if not group["members"]:
        console.print("No token of a response is stored.")
    epochs = [
        [str(each["group"]), number(each["epoch"], ""), number(each["step"], ""),
         number(each["reward"], ".3f"), number(each["length"], ".0f")]
        for each in group["epochs"]
    ]  # fmt: skip
    console.print(table("The same prompt", ("group", "epoch", "step", "reward", "tokens"), epochs))


def _epoch(of: Record) -> str:
    return "of a suite" if of["epoch"] is None else f"epoch {of['epoch']}"


def _ended(of: Record) -> str:
    """The ending of a group that was not trained on, and its reason."""
    return ": ".join(filter(None, (of["ending"], of["ending_reason"]))) or "open"
