"""A worker that says how many threads its torch would use."""

import torch

from rhymeflow.errors import UserError


def main(connection, name, config, run_dir):
    raise UserError(f"{torch.get_num_threads()} threads")
