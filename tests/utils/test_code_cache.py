"""Compiled code is kept somewhere, also where numba finds no place for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rhymeflow.utils import code_cache


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """Only the temporary directory can be written."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    monkeypatch.setattr(code_cache.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(code_cache.os, "access", lambda path, mode: False)
    return tmp_path


def test_it_goes_to_a_directory_of_ones_own(nowhere):
    code_cache.ensure()
    chosen = Path(os.environ["NUMBA_CACHE_DIR"])
    assert chosen.parent == nowhere
    assert chosen.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_write_is_not_trusted(nowhere):
    code_cache.ensure()
    first = Path(os.environ.pop("NUMBA_CACHE_DIR"))
    first.chmod(0o777)
    code_cache.ensure()
    second = Path(os.environ["NUMBA_CACHE_DIR"])
    assert second != first
    assert second.stat().st_mode & 0o777 == 0o700


def test_numbas_own_places_and_the_users_come_first(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(code_cache.os, "access", lambda path, mode: str(path) == str(tmp_path))
    code_cache.ensure(tmp_path / "not" / "there" / "yet")
    assert "NUMBA_CACHE_DIR" not in os.environ
    monkeypatch.setenv("NUMBA_CACHE_DIR", "mine")
    monkeypatch.setattr(code_cache.os, "access", lambda path, mode: False)
    code_cache.ensure()
    assert os.environ["NUMBA_CACHE_DIR"] == "mine"
