"""Functions by file and by dotted name, and what is said when there is none."""

import importlib
import sys
from pathlib import Path

import pytest

from rhymeflow.utils.user_modules import imported
from tests.refused import refusal


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def refused(spec: str) -> str:
    message = refusal(imported, spec, "here")
    assert message.startswith("here: ")
    return message


def file_with(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


def test_a_dotted_name():
    assert imported("os.path.join", "here") is __import__("os").path.join


def test_a_file_is_imported_once_and_finds_its_neighbours(tmp_path):
    (tmp_path / "a_neighbour_of_mine.py").write_text("VALUE = 7\n")
    path = file_with(
        tmp_path,
        "from a_neighbour_of_mine import VALUE\ncalls = []\ndef f(): return VALUE, calls\n",
    )
    first, again = imported(f"{path}:f", "here"), imported(f"{path}:f", "here")
    assert first is again
    assert first() == (7, [])
    assert sys.modules[first.__module__].f is first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def fn(): pass\n", "there is no 'f' in it; did you mean fn?"),
        ("f = 3\n", "is a int, not a function"),
        ("\nimport no_such\n", "ModuleNotFoundError: No module named 'no_such' (mine.py:2)"),
        ("raise ValueError('two\\nlines')\n", "raised ValueError: two lines (mine.py:1)"),
        ("def f(:\n", "importing it raised SyntaxError"),
        ("import sys\nsys.exit(3)\n", "importing it raised SystemExit: 3 (mine.py:2)"),
    ],
)  # fmt: skip
def test_a_file_that_gives_no_function(tmp_path, text, said):
    assert said in refused(file_with(tmp_path, text) + ":f")


def test_a_file_that_failed_is_tried_again(tmp_path):
    path = file_with(tmp_path, "1 / 0\n")
    assert "ZeroDivisionError" in refused(f"{path}:f")
    file_with(tmp_path, "def f(): return 5\n")
    assert imported(f"{path}:f", "here")() == 5


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no/such.py:f", "there is no file"),
        ("a/b.py", "name the function too, as in a/b.py:function"),
        ("a/b.py:", "name the function too, as in a/b.py:function"),
        ("no_such_module.f", "No module named 'no_such_module'"),
        ("os.path.jion", "there is no 'jion' in it; did you mean join?"),
        ("os.sep", "is a str, not a function"),
        ("name", "give path/to/file.py:function, or a dotted name"),
        ("folder/rewards.function", "give path/to/file.py:function, or a dotted name"),
    ],
)
def test_what_is_not_there(spec, said):
    assert said in refused(spec)


def test_files_of_one_name_are_modules_that_can_be_imported_again(tmp_path):
    found = []
    for number, folder in enumerate(("a_b", "a.b", "a-b ü")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my rewards.py").write_text(f"def f(): return {number}\n")
        found.append(imported(f"{tmp_path / folder / 'my rewards.py'}:f", "here"))
    assert [f() for f in found] == [0, 1, 2]
    for f in found:
        del sys.modules[f.__module__]
        assert importlib.import_module(f.__module__).f() == f()
