"""Modules of the user's files, by names that every process can import: the path stands in the name.

So what a file defines can be sent to processes that the user's code starts, however it starts them,
and files of one name in different folders stay apart. Modules of `.pickle` are what a trainer's
program defines (`utils/pickled.py`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location, spec_from_loader
from pathlib import Path
from types import ModuleType

__path__: list[str] = []
"""Says that this module has submodules; the finder below finds them."""


def name_of_file(path: Path) -> str:
    """The name to import an absolute path by."""
    escaped = re.sub("[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):x}_", str(path))
    return f"{__name__}.{escaped}"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        escaped = fullname.removeprefix(f"{__name__}.")
        file = Path(re.sub("_([0-9a-f]+)_", lambda found: chr(int(found[1], 16)), escaped))
        if file.suffix == ".pickle":
            return spec_from_loader(fullname, _PickleLoader(file))
        return spec_from_file_location(fullname, file)


class _PickleLoader(Loader):
    def __init__(self, path: Path) -> None:
        self._path = path

    def exec_module(self, module: ModuleType) -> None:
        from rhymeflow.utils.pickled import load_into

        load_into(module, self._path)


sys.meta_path.append(_Finder())
