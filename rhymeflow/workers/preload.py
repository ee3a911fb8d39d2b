"""What the server that workers are forked from imports: all that takes long and most of them need.

Nothing is computed, so there is one thread, and no GPU was touched. The garbage collector sleeps
until a worker wakes it: it finds nothing among what is imported and takes a fifth of the time.
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
