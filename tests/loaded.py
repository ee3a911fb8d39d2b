"""What the server of these tests' workers imports, so that no worker has to: all that a run needs,
and compiled code. Programs of `tests/test_cli.py` import for themselves, as a user's do."""

import gc
import importlib

import torch

from rhymeflow.workers import precompile

if torch.backends.cuda.is_built():  # no process may have computed gradients when it is forked
    for _name in precompile.IMPORTED:
        importlib.import_module(_name)
else:
    precompile.main()
gc.freeze()  # in no worker's collections
