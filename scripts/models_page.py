"""Writes the tables of docs/models.md: types of the package, and what `bench families` recorded.

python scripts/models_page.py [--check]    # --check: fails if the page is not what it would write
"""

import json
import sys
from pathlib import Path

from rhymeflow.models.families import FAMILIES, ModelFamily

PAGE, RECORD = Path("docs/models.md"), Path("benchmarks/results/families.json")
MEASURED = "mismatch_kl, bfloat16"
COLUMNS = 4


def supported() -> str:
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


def mismatches() -> str:
    """What was recorded, some types to a row."""
    found = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    cells = [cell for row in found for cell in (f"`{row['model']}`", f"{row[MEASURED]:.1g}")]
    cells += [""] * (-len(cells) % (2 * COLUMNS))
    rows = [["model", "KL"] * COLUMNS, ["---"] * 2 * COLUMNS]
    rows += [cells[n : n + 2 * COLUMNS] for n in range(0, len(cells), 2 * COLUMNS)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


TABLES = {"supported": supported, "mismatches": mismatches}


def page(text: str) -> str:
    """The page with the tables of now."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}, by scripts/models_page.py -->\n", "<!-- end -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + table() + end + after
    return text


if __name__ == "__main__":
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if sys.argv[1:] == ["--check"]:
        assert new == old, "python scripts/models_page.py writes docs/models.md anew"
    else:
        PAGE.write_text(new, encoding="utf-8")
