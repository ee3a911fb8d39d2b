"""The staleness protocol for a long time: `make nightly`, or

    python -m tests.core.nightly [--operations 1000000] [--seed 0]

Random runs of random sizes. In every run each operation is done by the fast protocol and by the
naive one, results and whole state are compared, and the laws are checked after each. Versions run
ahead of groups, finished and reserved groups are released at random, members start late, and one
operation in ten is tried on a group that is gone or already has what it asks for. A run favours
some operations over others, so that buffers are empty in some and full in others. What is refused
is checked as well, but does not count.
"""

import argparse
import random
import sys
import time
from collections import Counter

from tests.core.protocol.pair import Pair

STEPS = 400
"""Operations of one run, at most."""
OPERATIONS = ("reserve", "tighten", "occupy", "release", "consume")


def one_run(rng: random.Random, count: Counter) -> None:
    """One random run; counts what was done, what was refused and what became surplus."""
    pair = Pair(
        is_ordered=rng.random() < 0.5,
        groups_per_batch=rng.randint(1, 4),
        extra_groups=rng.choice((0, 0, 1, 2)),
        max_staleness=rng.randint(0, 4),
        num_batches=rng.choice((2, 8, 30)),
    )
    weights = [rng.choice((1, 3, 10)), rng.choice((0, 1, 3)), rng.choice((1, 3)), rng.random(), 1]
    ahead = rng.choice((0, 0, 2))
    for _ in range(STEPS):
        if pair.fast.first == pair.fast.num_batches:
            return
        (operation,) = rng.choices(OPERATIONS, weights)
        if rng.random() < 0.95:
            operation = possible(pair, operation)
        arguments = choose(rng, pair, operation, ahead)
        held = len(pair.held())
        result = pair.do(operation, *arguments)
        count["refused" if result is None or result is False else operation] += 1
        if operation in ("occupy", "release"):
            count["surplus"] += len(result or ())
            count["most groups at a time"] = max(count["most groups at a time"], held)


def possible(pair: Pair, operation: str) -> str:
    """The operation, or another in its stead that is more likely to be allowed now."""
    if operation == "consume" and not pair.fast.ready():
        operation = "occupy"
    if operation == "reserve" and not pair.fast.admissible(pair.fast.first):
        operation = "occupy"
    if operation in ("occupy", "tighten") and not pair.held("reserved"):
        operation = "consume" if pair.fast.ready() else "reserve"
    return operation


def choose(rng: random.Random, pair: Pair, operation: str, ahead: int) -> tuple[int, ...]:
    """Arguments for the operation, most of them sensible."""
    first, eta = pair.fast.first, pair.fast.max_staleness
    version = max(0, first + ahead - rng.randint(0, eta + 1 + ahead))
    if operation == "consume":
        return ()
    if operation == "reserve":
        pair.group_id += 1
        return pair.group_id - 1, version
    held = pair.held(None if operation == "release" else "reserved")
    if not held or rng.random() < 0.1:
        held = pair.ended[-5:] + pair.held("occupied") + [pair.group_id]
    group = rng.choice(held)
    return (group, version) if operation == "tighten" else (group,)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.core.nightly", description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    count: Counter = Counter()
    start, runs, told = time.perf_counter(), 0, 0.0
    while (done := sum(count[operation] for operation in OPERATIONS)) < args.operations:
        seed = f"{args.seed}/{runs}"
        try:
            one_run(random.Random(seed), count)
        except BaseException:
            print(f"in run {seed} after {done} operations", file=sys.stderr)
            raise
        runs += 1
        seconds = time.perf_counter() - start
        if seconds > told + 20:
            told = seconds
            print(f"  {done} operations, {runs} runs, {seconds:.0f} s", flush=True)
    print(f"{done} operations in {runs} runs agree with the naive model and keep the laws")
    print(", ".join(f"{name} {number}" for name, number in count.items()), end="")
    print(f"; {time.perf_counter() - start:.0f} s, seed {args.seed}")


if __name__ == "__main__":
    main()
