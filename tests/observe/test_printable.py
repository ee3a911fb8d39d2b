"""What a response says is shown as it is, and does nothing else; curves of braille characters."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from rhymeflow.observe.printable import (
    clock,
    conversation,
    curve,
    excerpt,
    printable,
    shortened,
    sparkline,
)


def test_what_does_not_print_is_escaped_and_line_ends_stay():
    assert printable("a\x1b[31mb\r\nc\td\u200e") == "a\\x1b[31mb\nc   d\\u200e"
    assert printable("\r\x07") == "\\r\\x07"
    assert printable("\u3053\U0001f600") == "\u3053\U0001f600"


@given(st.text(max_size=400), st.integers(20, 90))
def test_a_shortened_text_fits_and_what_fits_is_whole(text, width):
    line = shortened(text, width)
    assert "\n" not in line
    assert all(char.isprintable() for char in line)
    assert cell_len(line) <= width
    whole = printable(text).replace("\n", "\u23ce")
    if cell_len(whole) <= width and len(text) <= 4 * width:
        assert line == whole


def test_the_middle_is_left_out():
    line = shortened("begin " + "x" * 10_000 + " end", 40)
    assert line.startswith("begin xxx")
    assert line.endswith("xxx end")
    assert " ... " in line
    assert cell_len(line) == 40


def test_an_excerpt_keeps_both_ends():
    console, text = Console(), "\n".join(f"line {i}" for i in range(9))
    lines = excerpt(text, console, 10, 5, head=0.5)
    assert [*map(str, lines)] == ["line 0", "line 1", "...", "line 7", "line 8"]
    assert [*map(str, excerpt("  a word\x1b", console, 8, 2, head=0.5))] == ["  a ", "word\\x1b"]
    assert [*map(str, excerpt("x" * 10**6, console, 8, 2, head=0.0))] == ["...", "x" * 8]


def test_bars_and_times():
    values = ([1.0], [0.0, 0.0], [0.0, 1.0, 0.5], [-1, 0, 1])
    assert sparkline([0.1 + 0.2, 0.3]) == "▁▁", "they differ by rounding"
    assert [*map(sparkline, values)] == ["▁", "▁▁", "▁█▅", "▁▅█"]
    assert [*map(clock, (0, 59.9, 61, 3723))] == ["0:00", "0:59", "1:01", "1:02:03"]


def test_chat_messages_read_as_a_conversation():
    stored = '[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]'
    assert conversation(stored) == "system: be brief\nuser: hi"
    for other in ("plain", '[{"role": "user"}]', '[{"not json'):
        assert conversation(other) == other


POINTS = st.dictionaries(st.integers(0, 10**4), st.floats(-1e3, 1e3), min_size=1, max_size=50)


def test_a_curve_and_its_axes():
    assert curve([(1, 0.0), (4, 1.0), (7, 1.0)], 12, 6).plain.splitlines() == [
        "  1 ┤  ⢠⠋⠉⠉⠉",
        "0.5 ┤  ⡎    ",
        "    │ ⡜     ",
        "  0 ┤⡸      ",
        "    └───────",
        "     1     7",
    ]


@given(POINTS, st.integers(40, 120), st.integers(5, 20))
def test_it_has_its_size_and_is_joined_from_the_first_place_to_the_last(points, width, height):
    lines = curve(sorted(points.items()), width, height).plain.splitlines()
    assert len(lines) == height
    assert max(map(cell_len, lines)) <= width
    plots = [line[line.index("┤" if "┤" in line else "│") + 1 :] for line in lines[:-2]]
    columns = ["".join(column) for column in zip(*plots, strict=True)]
    drawn = [bool(column.strip()) for column in columns]
    assert all(drawn) if len(points) > 1 else drawn[0]
