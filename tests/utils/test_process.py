"""What a process leaves out of others, and which commit it runs."""

import subprocess
import sys
from types import ModuleType

import pytest

from rhymeflow.utils import child, source_version


def test_in_the_block_there_is_no_file_to_import():
    main = sys.modules["__main__"]
    with child.without_main_file():
        assert sys.modules["__main__"] is not main
        assert not hasattr(sys.modules["__main__"], "__file__")
        with child.without_main_file():  # by another start in the same thread
            pass
    assert sys.modules["__main__"] is main


@pytest.mark.parametrize(
    ("text", "is_guarded"),
    [
        ("if __name__ == '__main__':\n    train()", True),
        ("if '__main__' == __name__: train()", True),
        ("def f(): ...\nif __name__ == '__main__':\n    def g(): ...", True),
        ("if __name__ == '__main__':\n    x = 1\n    def f(): ...", False),
        ("train()", False),
        ("if __name__ == 'other': train()", False),
        ("def f():\n    if __name__ == '__main__': pass\ntrain()", False),
        ("no python (", False),
    ],
)
def test_whether_importing_a_script_only_defines_a_name(tmp_path, monkeypatch, text, is_guarded):
    script, main = tmp_path / "script.py", ModuleType("__main__")
    script.write_text(text)
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert child.guarded_file("f") == (script if is_guarded else None)


def test_the_commit_of_a_clone_and_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(source_version, "ROOT", tmp_path)
    found = source_version.source_version.__wrapped__
    assert found() == "0.1.0"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert found() == "0.1.0", "nothing is committed yet"
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)
    assert found() == f"0.1.0, commit {head[:7]}"
