"""The live display of a run: renders a `ProgressState`, without a clock or a thread.

On a terminal of 60 columns or more no line wraps and no number is cut: what does not fit is said in
fewer words. A large terminal also gets curves of the rewards, and a response of the last batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rhymeflow.observe.learning import Verdict
from rhymeflow.observe.limits import Limit
from rhymeflow.observe.printable import (
    clock,
    curve,
    excerpt,
    means,
    number,
    printable,
    sparkline,
)

_REDRAW_SECONDS = 0.2
_SPARKLINE_STEPS = 24

_LARGE = (100, 32)  # columns and lines from which on a terminal has room for curves and a response
_KEPT_LINES = 4
"""Lines of a large terminal that are left for what was printed before: the last warnings."""
_CURVE_LINES = (9, 18)


class ShownResponse(NamedTuple):
    """A response of a batch."""

    name: str
    step: int
    reward: float | None
    prompt: str
    text: str


@dataclass
class ProgressState:
    """What is shown. `None`: not known yet; times are in seconds, shares from 0 to 1."""

    name: str
    num_steps: int
    max_staleness: int
    step: int = 0  # optimizer versions published so far
    elapsed: float = 0.0  # since the run began, loading included
    first_step_at: float | None = None
    """`elapsed` when training could begin, from which the time left is estimated."""
    resumed_at: int = 0  # `step` that earlier attempts at the run had reached
    measure: str = "reward"
    """What `rewards` are of each step: without rewards the divergence "from teacher"."""
    rewards: list[float] = field(default_factory=list)
    eval_rewards: list[float] = field(default_factory=list)
    """Held-out mean rewards, the first being of the untrained policy."""
    eval_steps: list[int] = field(default_factory=list)  # the step of each
    suites: dict[str, float] = field(default_factory=dict)
    """The last figures of the other suites, by label."""
    latest: dict[str, float] = field(default_factory=dict)
    """Metrics, each of the last step that had it."""
    trained_tokens_per_s: float | None = None
    has_drafts: bool = False
    limit: Limit | None = None
    verdicts: list[Verdict] = field(default_factory=list)  # on learning, those that hold now
    running: int = 0
    waiting: int = 0  # trajectories routed, but not being decoded
    message: str = ""
    response: ShownResponse | None = None
    emulated: str = ""  # what is emulated, if anything is: then times are of that cluster
    scale: float = 1.0  # seconds of the run in one second of this machine

    @property
    def left(self) -> float | None:
        """Seconds left at the pace of this attempt."""
        if self.first_step_at is None or self.step == self.resumed_at:
            return None
        pace = (self.elapsed - self.first_step_at) / (self.step - self.resumed_at)
        return pace * (self.num_steps - self.step)


class Progress:
    """Shows a run on a console within its `with` block: redrawn in place on a terminal and in a
    notebook, else as lines."""

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        """`verbose`: lines say also how the run goes, not only what is learned."""
        self._console, self._verbose = console, verbose
        self._draw: Callable[[RenderableType], object] | None = None
        self._shown_at = -_REDRAW_SECONDS
        self._shown_step = 0
        self._shown_message, self._shown_evaluations = "", 0
        self._screen = Screen()
        self._open = ExitStack()

    def __enter__(self) -> Progress:
        if self._console.is_jupyter:
            display = importlib.import_module("IPython.display").display
            self._draw = display(Text("loading"), display_id=True).update
        elif self._console.is_terminal:
            live = self._open.enter_context(Live(console=self._console, auto_refresh=False))
            self._draw = partial(live.update, refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._draw is not None and self._screen.state is not None:
            self._draw(self._screen)
        self._open.close()

    @property
    def shows_responses(self) -> bool:
        """Whether there is room for a response."""
        return self._draw is not None and _is_large(self._console)

    def update(self, state: ProgressState) -> None:
        """Show `state`, unless that was done a moment ago and no step has ended since."""
        self._screen.state = state
        is_new_step = state.step != self._shown_step
        if self._draw is None:
            self._print(state, is_new_step)
        elif is_new_step or state.elapsed - self._shown_at >= _REDRAW_SECONDS * state.scale:
            self._draw(self._screen)
            self._shown_at = state.elapsed
        self._shown_step = state.step

    def warn(self, message: str) -> None:
        """Print a line that stays on the screen."""
        self._say(f"warning: {printable(message)}")
        self._shown_message = message  # once is enough

    def printed(self, said: str, log: str) -> None:
        """Say what user code prints, and where all of it is."""
        self.warn(f"{said} (all of it is in {log})")

    def _print(self, state: ProgressState, is_new_step: bool) -> None:
        if is_new_step:
            is_evaluated = len(state.eval_rewards) > self._shown_evaluations
            self._shown_evaluations = len(state.eval_rewards)
            self._say(line(state, is_evaluated=is_evaluated, verbose=self._verbose))
        elif state.step == 0 and state.message != self._shown_message:
            self._shown_message = state.message
            self._say(state.message)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


_LEARNING = (
    ("length {:.0f}", "completions/mean_length"),
    ("cut {:.0%}", "completions/clipped_ratio"),
    ("no spread {:.0%}", "frac_reward_zero_std"),
    ("entropy {:.3f}", "entropy"),
    ("grad {:.3f}", "grad_norm"),
    ("kl {:.4f}", "kl"),
    ("from teacher {:.4f}", "distillation/divergence"),
)
"""Metrics of the line of a step, those that there are."""


def line(state: ProgressState, *, is_evaluated: bool, verbose: bool = False) -> str:
    """A step on one plain line: what is learned; with `verbose` also how the run goes."""
    parts = [f"step {state.step}/{state.num_steps}"]
    if state.rewards and state.measure == "reward":
        parts.append(f"reward {state.rewards[-1]:.3f}")
    if is_evaluated:
        parts += [f"held out {state.eval_rewards[-1]:.3f}", *_suites(state)]
    known = ((text, state.latest.get(name)) for text, name in _LEARNING)
    parts += [text.format(value) for text, value in known if value is not None]
    if state.trained_tokens_per_s is not None:  # a resumed run has trained on nothing yet
        parts.append(_rate(state.trained_tokens_per_s))
    if verbose:
        parts += _going(state)
    elif state.left is not None:
        parts.append(f"{_left(state)} left")
    return "  ".join(parts)


def _going(state: ProgressState) -> list[str]:
    """How the run goes."""
    parts = [f"rollout {_rate(state.latest.get('rollout/tokens_per_s'))}"]
    if "staleness/mean" in state.latest:
        mean, oldest = (state.latest[f"staleness/{name}"] for name in ("mean", "max"))
        parts.append(f"staleness {mean:.2f} max {oldest:.0f}")
    if state.has_drafts:
        parts.append(f"drafts {_drafts(state)}")
    parts.append("idle rollout {} learner {}".format(*_idle(state)))
    if state.limit is not None:
        parts.append(state.limit.said)
    return [*parts, _times(state)]


class Fitted:
    """The first form of a text that fits on the line, or the last, which is cut."""

    def __init__(self, *forms: str | Text) -> None:
        """`forms`: from the longest to the shortest."""
        self._forms = [Text(each) if isinstance(each, str) else each for each in forms]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield next((form for form in self._forms if form.cell_len <= width), self._forms[-1])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [form.cell_len for form in self._forms]
        return Measurement(min(widths), max(widths)).with_maximum(options.max_width)


def _is_large(console: Console) -> bool:
    columns, lines = _LARGE
    return console.is_terminal and console.width >= columns and console.height >= lines


class Screen(JupyterMixin):
    """The display of `state`: a panel of figures; on a large terminal below it the curves and the
    response, which are rendered again only when they change."""

    def __init__(self, state: ProgressState | None = None) -> None:
        self.state = state
        self._below: tuple[object, list[list[Segment]]] = None, []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        assert self.state is not None
        figures = _figures(self.state)
        if not _is_large(console):
            yield figures
            return
        lines = console.render_lines(figures, options, pad=False)
        room, state = console.height - _KEPT_LINES - len(lines), self.state
        key = state.step, len(state.eval_rewards), state.response, room, options.max_width
        if key != self._below[0]:
            below = Group(*_parts_below(state, console, options.max_width, room))
            self._below = key, console.render_lines(below, options, pad=False)
        for line in [*lines, *self._below[1]]:
            yield from line
            yield Segment.line()


def _parts_below(
    state: ProgressState, console: Console, width: int, room: int
) -> Iterator[RenderableType]:
    """What fits into `room` lines."""
    if len(state.rewards) > 1:
        height = min(max(_CURVE_LINES[0], room // 2), _CURVE_LINES[1])
        room -= height
        yield _curves(state, width, height)
    if state.response is not None and room > 5:
        yield _response(state.response, console, width, room)


def _curves(state: ProgressState, width: int, height: int) -> RenderableType:
    """The rewards of all steps, and beside them the held-out ones once there are several."""
    rewards = means(state.rewards, 2 * width)  # as many as there are columns of dots
    spacing = (len(state.rewards) - 1) / (len(rewards) - 1)
    points = [(state.step - i * spacing, y) for i, y in enumerate(reversed(rewards))]
    curves = [(f"{state.measure} by step", points[::-1], "green")]
    if len(state.eval_rewards) > 1:
        points = list(zip(state.eval_steps, state.eval_rewards, strict=True))
        curves.append(("held-out reward by step", points, "cyan"))
    inner = width // len(curves) - 4  # without borders and padding
    grid = Table.grid(expand=True)
    for _ in curves:
        grid.add_column(ratio=1)
    texts = ((title, curve(points, inner, height - 2, style)) for title, points, style in curves)
    grid.add_row(*(Panel(text, title=title, title_align="left") for title, text in texts))
    return grid


def _response(of: ShownResponse, console: Console, width: int, height: int) -> Panel:
    """The end of the prompt and the response, as far as there is room."""
    prompt = excerpt(of.prompt, console, width - 4, min(3, height // 3), head=0.0)
    for line in prompt:
        line.stylize("dim")
    text = excerpt(of.text, console, width - 4, height - 2 - len(prompt), head=0.6)
    title = Text(f"response {of.name} of step {of.step}: reward {number(of.reward, '.3f')}")
    return Panel(Group(*prompt, *text), title=title, title_align="left")


def _figures(state: ProgressState) -> Panel:
    """A progress bar, then labelled lines."""
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    head.add_row(
        Text(f"step {state.step}/{state.num_steps}", style="bold"),
        ProgressBar(total=state.num_steps, completed=state.step),
        Text(_times(state)),
    )
    body = Table.grid(expand=True, padding=(0, 2, 0, 0))
    body.add_column(no_wrap=True, style="dim")
    body.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for label, text in _lines(state):
        body.add_row(label, text)
    title = Text(f"{state.name} ({state.emulated})" if state.emulated else state.name)
    return Panel(Group(head, body), title=title, title_align="left", padding=(0, 1))


def _lines(state: ProgressState) -> list[tuple[str, RenderableType]]:
    lines: list[tuple[str, RenderableType]] = [
        (state.measure, _reward(state)),
        ("held out", _held_out(state)),
    ]
    if state.suites:
        lines.append(("suites", Columns(_suites(state), padding=(0, 2, 0, 0))))
    limit = state.limit
    lines += [
        ("staleness", _staleness(state)),
        ("speed", _speed(state)),
        ("idle", Text("rollout {}, learner {}".format(*_idle(state)))),
        ("pace", Fitted("-") if limit is None else Fitted(limit.line, limit.said)),
    ]
    if state.has_drafts:
        lines.append(("drafts", Fitted(_drafts(state), _drafts(state, shortly=True))))
    if state.verdicts:
        first = state.verdicts[0]
        more = f" (+{len(state.verdicts) - 1})" if state.verdicts[1:] else ""
        forms = (f"{first.line}{more}", f"{first.said}{more}", f"{first.name}{more}")
        lines.append(("learning", Fitted(*(Text(each, style="yellow") for each in forms))))
    lines.append(("in flight", Text(f"{state.running:,} running, {state.waiting:,} waiting")))
    lines.append(("now", Text(" ".join(state.message.split()))))
    return lines


def _drafts(state: ProgressState, *, shortly: bool = False) -> str:
    mean, rate, share = (
        state.latest.get(f"draft/{name}")
        for name in ("mean_acceptance_length", "acceptance_rate", "time_saved_share")
    )
    if mean is None:
        return "-"
    length, saved = ("length", "saved") if shortly else ("acceptance length", "time saved")
    return f"{length} {mean:.2f}, {number(rate, '.0%')} accepted, {number(share, '.0%')} {saved}"


def _idle(state: ProgressState) -> list[str]:
    return [number(state.latest.get(f"idle/{part}"), ".0%") for part in ("rollout", "learner")]


def _speed(state: ProgressState) -> Fitted:
    rates = state.latest.get("rollout/tokens_per_s"), state.trained_tokens_per_s
    rollout, trained = (number(rate, ",.0f") for rate in rates)
    return Fitted(
        f"rollout {_rate(rates[0])}, trained {_rate(rates[1])}",
        f"rollout {rollout}, trained {trained} tokens/s",
        f"{rollout} and {trained} tokens/s",
    )


def _reward(state: ProgressState) -> Text:
    if not state.rewards:
        return Text("-")
    recent = state.rewards[-_SPARKLINE_STEPS:]
    return Text.assemble((f"{state.rewards[-1]:.3f}", "bold"), "  ", (sparkline(recent), "green"))


def _held_out(state: ProgressState) -> Text:
    if not state.eval_rewards:
        return Text("-")
    first, last = state.eval_rewards[0], state.eval_rewards[-1]
    if len(state.eval_rewards) == 1:
        return Text(f"{first:.3f} before training")
    return Text.assemble(f"{first:.3f} before training, ", (f"{last:.3f}", "bold"), " now")


def _suites(state: ProgressState) -> list[str]:
    return [f"{name} {value:.3f}" for name, value in state.suites.items()]


def _staleness(state: ProgressState) -> Text:
    ages = "-"
    if "staleness/mean" in (row := state.latest):
        ages = f"mean {row['staleness/mean']:.2f}, max {row['staleness/max']:.0f}"
    return Text(f"{ages} (bound {state.max_staleness})")


def _times(state: ProgressState) -> str:
    here = ""
    if state.emulated and state.left is not None:
        here = f" ({clock(state.left / state.scale)} here)"
    return f"{clock(state.elapsed)} elapsed, {_left(state)} left{here}"


def _left(state: ProgressState) -> str:
    return "-" if state.left is None else clock(state.left)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} tokens/s"
