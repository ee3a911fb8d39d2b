"""The tables in the docstrings of the protocol, against those that the code executes."""

from collections.abc import Iterable, Mapping
from types import ModuleType

from rhymeflow.core.commands import Abort
from rhymeflow.core.protocol import group, staleness
from rhymeflow.core.protocol.buffer import STATES
from rhymeflow.core.protocol.entries import OPERATIONS
from rhymeflow.core.protocol.group import TRANSITIONS, Member, MemberState

Row = tuple[str, ...]


def shown(module: ModuleType, head: str) -> list[Row]:
    """The rows below the table head that begins so."""
    assert module.__doc__ is not None
    lines = iter(module.__doc__.splitlines())
    assert any(line.startswith(f"| {head} |") for line in lines), f"there is no table of {head}"
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return rows


def rows(table: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """(what does it, from, to), the states that have the same end in one row."""
    return [
        (name, ", ".join(a for a, b in moves.items() if b == to), to)
        for name, moves in table.items()
        for to in dict.fromkeys(moves.values())
    ]


def check(found: Iterable[Row], expected: list[Row]) -> None:
    text = "\n".join(f"| {' | '.join(row)} |" for row in expected)
    assert list(found) == expected, f"the table is to be\n{text}"


def test_of_members():
    table = {
        cause.__name__: {a.name: b.name for a, b in moves.items()}
        for cause, moves in TRANSITIONS.items()
    }
    check(shown(group, "by"), rows(table))


def test_of_operations():
    check((row[:3] for row in shown(staleness, "operation")), rows(OPERATIONS))


def test_of_buffers():
    table = [
        (state, "at target" if met else "below target", "some" if has_empty else "none")
        for (met, has_empty), state in STATES.items()
    ]
    check((row[:3] for row in shown(staleness, "state of a buffer")), table)


def test_a_member_does_what_the_table_says_and_nothing_else():
    for cause, moves in TRANSITIONS.items():
        for state in MemberState:
            member = Member(state, instance="a" if state in group.ON_INSTANCE else None)
            assert member.apply(cause) is (state in moves)
            assert member.state is moves.get(state, state)
            if state in group.ON_INSTANCE:
                assert (member.instance == "a") is (member.state in group.ON_INSTANCE)
    ended = set(MemberState) - {state for moves in TRANSITIONS.values() for state in moves}
    assert ended == {MemberState.REWARDED, MemberState.ABORTED}
    assert set(TRANSITIONS[Abort]) == set(MemberState) - ended
