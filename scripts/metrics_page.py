"""Writes docs/metrics.md from the table of metrics in the package.

python scripts/metrics_page.py
"""

from pathlib import Path

from rhymeflow.observe.meanings import page

if __name__ == "__main__":
    Path("docs/metrics.md").write_text(page(), encoding="utf-8")
