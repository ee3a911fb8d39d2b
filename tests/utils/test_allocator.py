import subprocess
import sys

import pytest

COUNT = """
import resource, sys
import numpy as np
from rhymeflow.utils.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    np.ones(100_000_000, np.uint8)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_is_freed_is_there_for_the_next_step():
    def faults(how: str) -> int:
        return int(subprocess.check_output([sys.executable, "-c", COUNT, how]))

    assert faults("kept") < faults("given back") / 10
