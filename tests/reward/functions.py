"""Reward functions that behave and misbehave; loaded by the workers, never by the tests."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import neighbour  # the file beside this one


def length(completions, **kwargs):
    return [len(completion) for completion in completions]


def half(completions, **kwargs):
    return [neighbour.HALF for _ in completions]


def sees(prompts, completions, completion_ids, colour, **kwargs):
    told = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    Path(kwargs["report"][0]).write_text(
        repr(told | {"colour": colour, "step": kwargs["trainer_state"].global_step})
    )
    return [1] * len(completions)


def by_rank(completions, **kwargs):
    """Compare: 1 for the longest, 0 for the shortest, nothing for the rest."""
    by_length = sorted(completions, key=len)
    return [{0: 0.0, len(by_length) - 1: 1.0}.get(by_length.index(each)) for each in completions]


def spoils(prompts, completions, answers, **kwargs):
    """Append to what it is given; return how much that was before, and one more."""
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    for each in (*prompts, *answers):
        each.append("spoilt")
    prompts.clear()
    return lengths


async def patient(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [0.25 for _ in completions]


def not_mine(completions, **kwargs):
    return [None for _ in completions]


def by_order(completions, **kwargs):
    """Do what the completion says."""
    return ORDERS[completions[0]]()


def _raises():
    raise ValueError("the judge\nis ill")


def _hangs():
    time.sleep(3600)


def _hangs_in_c():
    ctypes.PyDLL(None).sleep(3600)  # holds the interpreter's lock: no signal handler, no thread


def _with_child(then, **options):
    def does():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], **options)
        Path(os.environ["CHILD_PID_FILE"]).write_text(str(child.pid))
        then()

    return does


def _waits_for_all_children():
    try:
        os.wait()
    except ChildProcessError:
        return [1.0]


ORDERS = {
    "fine": lambda: [1.0],
    "raise": _raises,
    "exit": lambda: sys.exit(3),
    "nan": lambda: [float("nan")],
    "hang": _hangs,
    "hang in C": _hangs_in_c,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "session": _with_child(_hangs, start_new_session=True),
    "die with a child": _with_child(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "hang in C with a child": _with_child(_hangs_in_c),
    "wait": _waits_for_all_children,
    "pid": lambda: [os.getpid()],
    "threads": lambda: [float(os.environ["OMP_NUM_THREADS"])],
    "fork": lambda: [__import__("multiprocessing").get_context("fork").Pool(1).apply(int, ("5",))],
    "surrogate": lambda: (_ for _ in ()).throw(ValueError("half \ud800")),
    "long": lambda: (_ for _ in ()).throw(ValueError("x" * 100_000)),
}


def flaky(completions, report, **kwargs):
    """Fail until the file exists."""
    path = Path(report[0])
    if path.exists():
        return [1.0]
    path.touch()
    raise OSError("not yet")


def flaky_death(completions, report, **kwargs):
    try:
        return flaky(completions, report)
    except OSError:
        os._exit(1)


def counted(completions, counter, **kwargs):
    with open(counter[0], "a") as file:
        file.write("x")
    return [0.5]


def logs(completions, log_metric, log_extra, **kwargs):
    """Say more than the rewards."""
    log_metric("distance", 0.5)
    log_metric("distance", len(completions))
    log_extra("parsed", [each.upper() for each in completions])
    return [1.0] * len(completions)


def logs_badly(completions, log_metric, **kwargs):
    log_metric("distance", float("nan"))
    return [1.0] * len(completions)
