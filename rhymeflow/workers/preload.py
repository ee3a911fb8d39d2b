"""Imports that the fork server does for its workers: slow ones that most workers need.

The garbage collector, which would take a fifth of the time, is off until a worker enables it."""

from __future__ import annotations

import gc
import importlib
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
gc.disable()
for _name in ("rhymeflow.workers.entry", "rhymeflow.models.load"):
    importlib.import_module(_name)
gc.freeze()  # garbage collections of workers skip what is loaded by now
