"""What the server that workers are forked from imports: what most of them need and takes long.

The garbage collector, which would take a fifth of the time, is off until a worker enables it.
"""

from __future__ import annotations

import gc
import importlib
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's, also while this loads
gc.disable()
for _name in ("rhymeflow.workers.entry", "rhymeflow.models.load"):
    importlib.import_module(_name)
gc.freeze()  # in no worker's collections
