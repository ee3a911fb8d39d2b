"""The staleness protocol for a long time, about a million operations: `make nightly`, or

    python -m tests.core.nightly [EXAMPLES]

The state machines of `protocol/test_staleness.py`, with longer runs and many more of them.
"""

import sys

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.protocol.test_staleness import Ordered, Protocol


def main() -> None:
    examples = int(sys.argv[1]) if sys.argv[1:] else 6500
    longer = settings(
        max_examples=examples, stateful_step_count=200, deadline=None, database=None,
        print_blob=True, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for machine in (Protocol, Ordered):
        run_state_machine_as_test(machine, settings=longer)
        print(f"{machine.__name__}: {examples} runs agree with the naive model and keep the laws")


if __name__ == "__main__":
    main()
