"""The ten-minute page, walked from an empty directory with nothing but what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from rhymeflow import cli

PAGE = Path(__file__).parents[1] / "docs/start.md"
BLOCK = re.compile(r'```(console|python title="([^"]+)")\n(.*?)```', re.DOTALL)
BY_A_SHELL = "python ", "rhymeflow runs"
"""Others are called here, where all is imported already."""


def typed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints."""
    if not command.startswith(BY_A_SHELL):
        code = cli.main(shlex.split(command)[1:])
        out, err = capsys.readouterr()
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
        code, out, err = done.returncode, done.stdout, done.stderr
    assert code == 0, (command, err)
    return out


@pytest.mark.slow
def test_it_can_be_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    printed: dict[str, str] = {}
    for _, name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if name:
            Path(name).write_text(text, encoding="utf-8")
            continue
        for line in text.splitlines():
            command = line.removeprefix("$ ")
            printed[command] = typed(command, capsys)
    shown = printed["rhymeflow inspect first"]
    assert shown.index("held-out reward") < shown.index("Best of step 4: ")
    assert max(map(cell_len, shown.splitlines())) <= 80
    assert Path("first.png").stat().st_size > 10_000
    summary = json.loads(Path("mine/summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["staleness_max"] <= 1
