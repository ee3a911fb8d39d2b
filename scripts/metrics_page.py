"""Writes docs/metrics.md from the table of metrics in the package.

python scripts/metrics_page.py
"""

from pathlib import Path

from rhymeflow.observe.meanings import SECTIONS

INTRODUCTION = """# Metrics

Each row of `metrics.jsonl` has some of these by name, and so have trackers; `rhymeflow inspect RUN
--step S` shows those of a step, and the dashboard charts any. Names are TRL's where TRL has one. A
run says by itself what keeps it from learning: [troubleshooting](troubleshooting.md).

A metric that a reward function logs with `log_metric` has the name given there, with `eval/` before
it for held-out responses. This page is written from `rhymeflow/observe/meanings.py`.
"""


def page() -> str:
    """Return docs/metrics.md."""
    lines = [INTRODUCTION]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", "| metric | meaning | in a run that learns |"]
        lines += ["| --- | --- | --- |"]
        lines += [f"| `{name}` | {said} | {healthy} |" for name, said, healthy in section]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    Path("docs/metrics.md").write_text(page(), encoding="utf-8")
