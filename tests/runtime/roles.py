"""Workers of tests: each is the `main` of a role."""

import time

from rhymeflow.errors import UserError
from rhymeflow.utils import shared_memory
from rhymeflow.workers.messages import Alive, send


def talkative(connection, name, config, run_dir):
    """Gives two signs of life and stays."""
    send(connection, Alive())
    send(connection, Alive())
    time.sleep(600)


def learner(connection, name, config, run_dir):
    """Says which GPUs it sees."""
    import os

    raise UserError(f"{name} sees {os.environ.get('CUDA_VISIBLE_DEVICES')}")


learner_rank = rollout = learner


def silent(connection, name, config, run_dir):
    """Hears nothing and says nothing."""
    time.sleep(600)


def busy(connection, name, config, run_dir):
    """Has shared memory, and listens to nobody, as one that compiles."""
    memory = shared_memory.new_name("rhymeflow-test")
    shared_memory.create(memory, 4096, what="a test", advice="none")
    (run_dir / "memory").write_text(memory)
    send(connection, Alive())
    while True:
        pass


def environment(connection, name, config, run_dir):
    """Says how many threads its torch would use, what a variable is, and if it collects garbage."""
    import gc
    import os

    import torch

    what = f"{torch.get_num_threads()} threads, {os.environ.get('SOMETHING')}, {gc.isenabled()}"
    raise UserError(what)
