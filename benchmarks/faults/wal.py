"""Cuts the end off a write-ahead log, as a machine does that goes down before it is on the disk.

SQLite brings the log to the disk before it copies pages from it into the database: only what was
written since can be lost. Formats: https://sqlite.org/walformat.html (WAL-index) and
https://sqlite.org/fileformat2.html#walformat.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

LOG_HEADER, FRAME_HEADER = 32, 24
_PAGE_SIZE, _NUM_FRAMES, _SALT, _NUM_ATTEMPTED = 14, 16, 32, 128
"""Offsets in the index, in bytes."""


class Extent(NamedTuple):
    """Bytes of a log: what is copied to the database, or may be, ends before what is in use."""

    safe: int
    used: int
    salt: bytes
    """Another one each time that the log is begun anew."""


def extent(index: bytes) -> Extent:
    (page,) = struct.unpack_from("=H", index, _PAGE_SIZE)
    frame = FRAME_HEADER + (65536 if page == 1 else page)
    (frames,) = struct.unpack_from("=I", index, _NUM_FRAMES)
    (copied,) = struct.unpack_from("=I", index, _NUM_ATTEMPTED)
    salt = index[_SALT : _SALT + 8]
    return Extent(LOG_HEADER + copied * frame, LOG_HEADER + frames * frame, salt)


def flushed(database: Path) -> Extent | None:
    """How far the log is, all of which is on the disk now; None if there is none."""
    index = database.with_name(f"{database.name}-shm")
    return extent(index.read_bytes()) if index.is_file() else None


def cut(database: Path, num_bytes: int, durable: Extent | None = None) -> int:
    """Cut up to `num_bytes` off the log of a database that nobody has open; return how many.

    `durable`: what was `flushed` at the last commit that was to survive this; it stays.
    """
    log, index = (database.with_name(database.name + end) for end in ("-wal", "-shm"))
    if not log.is_file() or not index.is_file():
        return 0
    safe, used, salt = extent(index.read_bytes())
    if durable is not None and durable.salt == salt:
        safe = max(safe, durable.used)
    size = min(used, log.stat().st_size)
    left = max(safe, size - num_bytes)
    if left >= size:
        return 0
    os.truncate(log, left)
    return size - left
