"""Workers measured together: their threads and cores, overlapping work, and what they die of."""

import os
import time
from pathlib import Path

import pytest

from rhymeflow.calibration.workers import Job, together
from rhymeflow.errors import UserError


class Settings:
    """Says what its process has."""

    def __init__(self, argument):
        self.argument = argument

    def measure(self):
        import torch

        return self.argument, torch.get_num_threads(), sorted(os.sched_getaffinity(0))

    def work(self):
        time.sleep(0.01)


class Timed:
    """Measures for as long as it is told; says when it worked."""

    def __init__(self, path):
        self.path, self.seconds = path, float(path.rpartition("-")[2])

    def measure(self):
        started = time.monotonic()
        time.sleep(self.seconds)
        return started, time.monotonic()

    def work(self):
        time.sleep(0.01)
        with open(self.path, "a") as file:
            file.write(f"{time.monotonic()}\n")


class Refuses(Settings):
    def __init__(self, argument):
        raise UserError(f"{argument}: no")


class RefusesLate(Settings):
    def measure(self):
        raise UserError(f"{self.argument}: not now")


class Dies(Settings):
    def measure(self):
        os._exit(7)


def test_each_has_its_threads_and_cores():
    core = min(os.sched_getaffinity(0))
    before = os.environ.get("OMP_NUM_THREADS")
    found = together([Job(Settings, "a", 1, (core,)), Job(Settings, "b", 2, None)])
    assert found == [("a", 1, [core]), ("b", 2, sorted(os.sched_getaffinity(0)))]
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_they_begin_together_and_the_first_to_be_done_goes_on(tmp_path):
    short, long = str(tmp_path / "a-0.1"), str(tmp_path / "b-0.8")
    one, two = together([Job(Timed, short, 1, None), Job(Timed, long, 1, None)])
    assert abs(one[0] - two[0]) < 0.4
    worked = [float(line) for line in Path(short).read_text().split()]
    assert worked[0] < two[1]
    assert max(worked) > two[1] - 0.4


@pytest.mark.parametrize(("make", "said"), [(Refuses, "a: no"), (RefusesLate, "a: not now")])
def test_what_the_user_is_to_read_is_raised_here(make, said):
    with pytest.raises(UserError, match=said):
        together([Job(Settings, "b", 1, None), Job(make, "a", 1, None)])


def test_one_that_dies_is_noticed():
    with pytest.raises(RuntimeError, match=r"died \(exit code 7\)"):
        together([Job(Dies, "a", 1, None), Job(Settings, "b", 1, None)])
