"""Compiled code is kept in a directory that is another one when the sources are."""

import os
import re
from pathlib import Path

import pytest

from rhymeflow.utils import code_cache


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    monkeypatch.setattr(code_cache.tempfile, "tempdir", str(tmp_path))
    return tmp_path / "home" / ".cache"


def chosen(package: Path = code_cache.PACKAGE) -> Path:
    code_cache.ensure(package)
    return Path(os.environ.pop("NUMBA_CACHE_DIR"))


def test_another_source_is_another_directory(cache, tmp_path):
    source = tmp_path / "package" / code_cache.ROOMS[-1] / "kernels.py"
    source.parent.mkdir(parents=True)
    found = []
    for text in ("a", "b", "a"):
        source.write_text(text)
        found.append(chosen(tmp_path / "package"))
    assert found[0].parent == cache / "rhymeflow"
    assert found[0] == found[2] != found[1]


def test_it_is_inside_the_users_own_directory_once(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    code_cache.ensure()
    assert Path(os.environ["NUMBA_CACHE_DIR"]).parent == tmp_path
    code_cache.ensure()  # as a worker does that inherits it
    assert Path(os.environ["NUMBA_CACHE_DIR"]).parent == tmp_path


def test_without_a_cache_it_is_where_nobody_else_can_write(monkeypatch, tmp_path):
    monkeypatch.setattr(code_cache.os, "access", lambda path, mode: False)
    first = chosen().parent
    assert first.parent == tmp_path
    first.chmod(0o777)
    second = chosen().parent
    assert second != first
    assert second.stat().st_mode & 0o777 == 0o700


def test_all_compiled_code_is_in_the_rooms():
    decorated = re.compile(r"^(@|from numba|import numba)", re.MULTILINE)
    for file in code_cache.PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "numba import" in text and decorated.search(text):
            place = file.relative_to(code_cache.PACKAGE).as_posix()
            assert place.startswith(code_cache.ROOMS), place
