"""Curves of braille characters: dots where the values are."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from rhymeflow.observe.curve import curve

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
