"""Opens a file whose name may end in `.gz`, `.bz2`, `.xz` or `.zst`, and reads all of it.

Holds true: what cannot be read is a `UserError` that names the file. Knows nothing of what the
bytes mean.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import zlib
from pathlib import Path
from typing import Any

from rhymeflow.errors import UserError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def inner_suffix(path: Path) -> str:
    """Return the kind of a file, in lower case: `.jsonl` for `a.jsonl` and for `A.JSONL.gz`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def read_bytes(path: Path, field: str) -> bytes:
    """Return the file's contents, decompressed as its name says.

    Raises:
        UserError: it cannot be read, or is not what its name says.
    """
    suffix = path.suffix.lower()
    try:
        if suffix not in COMPRESSIONS:
            return path.read_bytes()
        with _opener(suffix, path, field)(path) as file:
            contents: bytes = file.read()
            return contents
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{field}: {path} cannot be read: {what}") from None


def _opener(suffix: str, path: Path, field: str) -> Any:
    if suffix != ".zst":
        return {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[suffix]
    for module in ("compression.zstd", "zstandard"):  # Python 3.14 has the first
        try:
            return importlib.import_module(module).open
        except ModuleNotFoundError:
            continue
    try:
        pyarrow = importlib.import_module("pyarrow")
    except ModuleNotFoundError:
        raise UserError(
            f"{field}: {path}: reading .zst needs a package: pip install zstandard, or "
            "'rhymeflow[data]'; or compress it with gzip"
        ) from None
    return lambda each: pyarrow.CompressedInputStream(pyarrow.OSFile(str(each)), "zstd")
