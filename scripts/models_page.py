"""Writes the table of docs/models.md from the table of types in the package.

python scripts/models_page.py [--check]    # --check: fails if the page is not what it would write
"""

import sys
from pathlib import Path

from rhymeflow.models.families import FAMILIES, ModelFamily

PAGE = Path("docs/models.md")
BEGIN, END = "<!-- by scripts/models_page.py -->\n", "<!-- end -->"


def table() -> str:
    """The types, by whether the native engine runs them."""
    types: dict[str, list[str]] = {}
    for model_type, family in sorted(FAMILIES.items()):
        types.setdefault(native(family), []).append(f"`{model_type}`")
    rows = [f"| {said} | {', '.join(names)} |" for said, names in sorted(types.items())]
    return "\n".join(["| native engine | types |", "| --- | --- |", *reversed(rows)]) + "\n"


def native(family: ModelFamily) -> str:
    """Whether the native engine runs a type, and why not."""
    if family.not_native is not None:
        return f"no: it {family.not_native}"
    return "yes" if family.state is None else "no, if layers carry a state"


def page(text: str) -> str:
    """The page with the table of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if sys.argv[1:] == ["--check"]:
        assert new == old, "python scripts/models_page.py writes docs/models.md anew"
    else:
        PAGE.write_text(new, encoding="utf-8")
