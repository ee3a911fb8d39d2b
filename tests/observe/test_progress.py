"""The display, rendered to text at several widths, and the plain lines."""

import io
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from rhymeflow.observe.limits import Limit
from rhymeflow.observe.printable import sparkline
from rhymeflow.observe.progress import Progress, ProgressState, Screen, ShownResponse, line


def busy_state() -> ProgressState:
    return ProgressState(
        name="demo", num_steps=60, max_staleness=1, step=12, elapsed=75.0, first_step_at=15.0,
        rewards=[0.1 * (i % 5) + 0.02 * i for i in range(12)],
        eval_rewards=[0.375, 0.484], eval_steps=[0, 10],
        latest={
            "staleness/mean": 0.42, "staleness/max": 1.0, "rollout/tokens_per_s": 3210.4,
            "draft/mean_acceptance_length": 2.345, "draft/acceptance_rate": 0.714,
            "draft/time_saved_share": 0.305, "idle/rollout": 0.031, "idle/learner": 0.12,
        },
        trained_tokens_per_s=2900.0, has_drafts=True,
        limit=Limit("bound", 0.4, 0.45, 8), running=64, waiting=12, message="training on batch 12",
    )  # fmt: skip


def drawn(state: ProgressState, width: int, height: int = 24) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )
    console.print(Screen(state))
    return console.file.getvalue().splitlines()


def test_everything_is_there_at_80_columns():
    text = "\n".join(drawn(busy_state(), 80))
    for part in (
        "demo", "step 12/60", "1:15 elapsed, 4:00 left", "reward     0.320",
        "0.375 before training, 0.484 now", "mean 0.42, max 1 (bound 1)",
        "rollout 3,210 tokens/s, trained 2,900 tokens/s", "64 running, 12 waiting",
        "drafts     acceptance length 2.35, 71% accepted, 30% time saved",
        "rollout 3%, learner 12%", "now        training on batch 12",
        "pace       limited by the staleness bound: instances idle 40%, learner 45%",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_that_matters_is_cut(width):
    state = busy_state()
    state.num_steps, state.step, state.elapsed = 20_000, 12_345, 1e5
    state.rewards = [0.1 * (i % 5) for i in range(100)]
    state.suites = {f"suite-{i} avg@16": 0.125 * i for i in range(6)}
    state.latest["rollout/tokens_per_s"] = state.trained_tokens_per_s = 1_234_567.0
    for verdict in VERDICTS:
        state.limit = Limit(verdict, 1.0, 1.0, 8)
        text = "\n".join(drawn(state, width))
        assert "…" not in text
        for part in (
            "12345/20000", "0.400  ", sparkline(state.rewards[-24:]), "0.484 now",
            "max 1 (bound 1)", "1,234,567", "2.35, 71% accepted", state.limit.said,
            *(f"suite-{i} avg@16 {0.125 * i:.3f}" for i in range(6)),
        ):  # fmt: skip
            assert part in text, part


VERDICTS = ("balanced", "learner", "rollout", "bound", "elsewhere")
LETTERS = st.text(st.characters(categories=["L", "N", "Z"]), max_size=200)
STATES = st.builds(
    ProgressState,
    name=st.text(st.characters(categories=["L", "N"]), max_size=100),
    num_steps=st.integers(1, 10**6), max_staleness=st.integers(0, 100),
    step=st.integers(0, 10**6), elapsed=st.floats(0, 1e6), running=st.integers(0, 10**6),
    first_step_at=st.none() | st.just(0.0), has_drafts=st.booleans(),
    rewards=st.lists(st.floats(-1e3, 1e3), max_size=100),
    eval_rewards=st.lists(st.floats(-1e3, 1e3), max_size=3),
    latest=st.fixed_dictionaries({"staleness/max": st.integers(0, 100)}, optional={
        "staleness/mean": st.floats(0, 100), "rollout/tokens_per_s": st.floats(0, 1e7),
        "draft/mean_acceptance_length": st.floats(0, 100), "draft/acceptance_rate": st.floats(0, 1),
        "draft/time_saved_share": st.floats(-100, 1), "idle/rollout": st.floats(0, 1),
    }),
    limit=st.none() | st.builds(
        Limit, st.sampled_from(VERDICTS), st.floats(0, 1), st.floats(0, 1), st.just(8)),
    message=LETTERS | st.just("word " * 60) | st.just("a\nb"),
    eval_steps=st.just([]),
)  # fmt: skip
RESPONSES = st.builds(
    ShownResponse, name=st.just("12.3"), step=st.integers(1, 10**6),
    reward=st.none() | st.floats(-9, 9),
    prompt=st.text(max_size=400), text=st.text(max_size=400) | st.just("so \u3053 " * 9_000),
)  # fmt: skip


@given(STATES, st.sampled_from([60, 80, 120, 200]))
def test_no_line_wraps_whatever_the_state(state, width):
    lines = drawn(state, width)
    assert len(lines) == 11 + state.has_drafts
    assert {cell_len(text) for text in lines} == {width}


@given(STATES, st.none() | RESPONSES, st.sampled_from([(100, 32), (120, 40), (200, 60)]))
def test_a_large_terminal_is_used_and_not_overrun(state, response, size):
    width, height = size
    state.response, state.eval_steps = response, [10 * i for i in range(len(state.eval_rewards))]
    lines = drawn(state, *size)
    text = "\n".join(lines)
    assert len(lines) <= height - 4
    assert {cell_len(text) for text in lines} == {width}
    assert ("╭─ reward by step ─" in text) == (len(state.rewards) > 1)
    held_out = len(state.rewards) > 1 and len(state.eval_rewards) > 1
    assert ("╭─ held-out reward by step ─" in text) == held_out
    assert ("╭─ response 12.3 of step" in text) == (response is not None)
    assert "\x1b" not in text


def test_a_response_is_shown_from_the_end_of_its_prompt_to_its_own_end():
    state = busy_state()
    prompt = "few shots\n" * 40 + "user: \x1b[31mwhat is 1 + 1?"
    state.response = ShownResponse(
        "7.1", 12, 0.25, prompt, "first\n" + "thinking " * 2_000 + "so 2"
    )
    text = "\n".join(drawn(state, 120, 40))
    place = 0
    for part in (
        "response 7.1 of step 12: reward 0.250", "...", "few shots",
        "user: \\x1b[31mwhat is 1 + 1?", "first", "thinking thinking", "...",
        "thinking thinking", "so 2",
    ):  # fmt: skip
        place = text.index(part, place)


def test_curves_are_drawn_once_a_step(monkeypatch):
    screen, drawn = Screen(state := busy_state()), []
    monkeypatch.setattr(
        "rhymeflow.observe.progress.curve", lambda *_: drawn.append(state.elapsed) or "curve"
    )
    console = Console(file=io.StringIO(), width=120, height=40, force_terminal=True)
    for step, elapsed in ((12, 75.0), (12, 76.0), (13, 77.0)):
        state.step, state.elapsed, state.eval_steps = step, elapsed, [0, 10]
        console.print(screen)
    assert drawn == [75.0, 75.0, 77.0, 77.0]


def test_unknown_numbers_show_as_such_and_markup_as_text():
    state = ProgressState(name="[red]run", num_steps=60, max_staleness=1, message="[bold]x[/bold]")
    text = "\n".join(drawn(state, 80))
    for part in ("0:00 elapsed, - left", "- (bound 1)", "[bold]x[/bold]", "[red]run"):
        assert part in text


def test_loading_is_not_part_of_the_pace():
    state = busy_state()
    assert state.left == (75 - 15) / 12 * 48
    state.resumed_at = 6  # this attempt made the other six
    assert state.left == (75 - 15) / 6 * 48
    state.resumed_at = 12
    assert state.left is None


def test_without_a_terminal_a_line_a_step():
    console = Console(file=io.StringIO(), width=40)
    state = ProgressState(name="demo", num_steps=2, max_staleness=1)
    with Progress(console) as progress:
        for message in ("loading", "loading", "starting"):
            state.message = message
            progress.update(state)
        for step in (1, 1, 2):
            state.step, state.first_step_at, state.elapsed = step, 1.0, 1.0 + step
            state.message = f"batch {step}"
            progress.update(state)
    printed = console.file.getvalue().splitlines()
    assert printed[:2] == ["loading", "starting"]
    assert [text.split("  ")[0] for text in printed[2:]] == ["step 1/2", "step 2/2"]
    assert printed[2].endswith("  0:01 left")


def test_the_plain_line():
    state = busy_state()
    state.latest |= {
        "completions/mean_length": 812.4, "completions/clipped_ratio": 0.07, "entropy": 0.3456,
        "frac_reward_zero_std": 0.31, "grad_norm": 0.1234, "kl": 0.00123,
    }  # fmt: skip
    learned = (
        "length 812  cut 7%  no spread 31%  entropy 0.346  grad 0.123  kl 0.0012  2,900 tokens/s  "
    )
    told = line(state, is_evaluated=False)
    assert told == f"step 12/60  reward 0.320  {learned}4:00 left"
    assert len(told) <= 125
    taught = replace(state, measure="from teacher", latest={"distillation/divergence": 0.1234})
    told = line(taught, is_evaluated=False)
    assert told == "step 12/60  from teacher 0.1234  2,900 tokens/s  4:00 left"
    large = "\n".join(drawn(taught, 120, 40))
    assert "╭─ from teacher by step ─" in large
    assert "│ from teacher  0.320" in large
    assert "│ reward" not in large
    resumed = ProgressState("demo", 4, 1, step=3, rewards=[0.25])
    assert line(resumed, is_evaluated=False) == "step 3/4  reward 0.250"
    assert line(state, is_evaluated=True, verbose=True) == (
        f"step 12/60  reward 0.320  held out 0.484  {learned}rollout 3,210 tokens/s  "
        "staleness 0.42 max 1  drafts acceptance length 2.35, 71% accepted, 30% time saved  "
        "idle rollout 3% learner 12%  limited by the staleness bound  1:15 elapsed, 4:00 left"
    )


def test_an_evaluation_is_told_once():
    console = Console(file=io.StringIO(), width=40)
    state = ProgressState(name="demo", num_steps=3, max_staleness=1)
    with Progress(console) as progress:
        for state.step, state.eval_rewards in ((1, [0.2]), (2, [0.2]), (3, [0.2, 0.4])):
            progress.update(state)
    printed = console.file.getvalue().splitlines()
    assert ["held out" in text for text in printed] == [True, False, True]


def test_on_a_terminal_redraws_are_few_and_every_step_is_drawn(monkeypatch):
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    state = busy_state()
    with Progress(console) as progress:
        draws = []
        monkeypatch.setattr(progress, "_draw", lambda _: draws.append(state.elapsed))
        for elapsed in (75.0, 75.1, 75.15, 75.25, 75.3):
            state.elapsed = elapsed
            progress.update(state)
        state.step += 1
        progress.update(state)
        assert draws == [75.0, 75.25, 75.3]
        state.elapsed = 75.31
    assert draws[3:] == [75.31], "the last state stays on the screen"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_warning_stays(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with Progress(console) as progress:
        progress.update(ProgressState(name="demo", num_steps=2, max_staleness=1, step=1))
        progress.warn("rollout-0 died [killed]")
        progress.update(ProgressState(name="demo", num_steps=2, max_staleness=1, step=2))
    assert "warning: rollout-0 died [killed]" in console.file.getvalue()


def test_in_a_notebook_one_output_is_redrawn(monkeypatch):
    shown = []

    def display(first, display_id):
        shown.append(first)
        return SimpleNamespace(update=shown.append)

    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    state = busy_state()
    with Progress(Console(file=io.StringIO(), force_jupyter=True)) as progress:
        progress.update(state)
        progress.update(state)
        state.step += 1
        progress.update(state)
    assert len(shown) == 4, "with the first, and the last again"
    assert "text/html" in shown[-1]._repr_mimebundle_([], [])
