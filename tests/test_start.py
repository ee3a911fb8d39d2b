"""The ten-minute page, walked from an empty directory with nothing but what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

PAGE = Path(__file__).parents[1] / "docs/start.md"
BLOCK = re.compile(r'```(console|python title="([^"]+)")\n(.*?)```', re.DOTALL)


@pytest.mark.slow
def test_it_can_be_followed_to_its_end(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed: dict[str, str] = {}
    for _, name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
            continue
        for line in text.splitlines():
            command = line.removeprefix("$ ")
            environment = {**os.environ, "PATH": path, "COLUMNS": "80"}
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, (command, done.stderr)
            printed[command] = done.stdout
    shown = printed["rhymeflow inspect first"]
    assert shown.index("held-out reward") < shown.index("Best of step 4: ")
    assert max(map(cell_len, shown.splitlines())) <= 80
    assert (tmp_path / "first.png").stat().st_size > 10_000
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["staleness_max"] <= 1
