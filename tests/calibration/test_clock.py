"""Time that others took is not counted; time spent waiting for something is."""

import multiprocessing
import os
import time

import pytest

from rhymeflow.calibration import clock


def spin(core):
    os.sched_setaffinity(0, (core,))
    while True:
        pass


@pytest.mark.skipif(not os.path.exists(clock._COUNTS), reason="only Linux counts it")
def test_sharing_a_core_is_left_out():
    cores, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    other = multiprocessing.get_context("spawn").Process(target=spin, args=(core,), daemon=True)
    other.start()
    os.sched_setaffinity(0, (core,))
    try:
        time.sleep(1.0)  # until the other spins
        watch, began, passed, ran = (
            clock.Watch(),
            clock.now(),
            time.perf_counter(),
            time.thread_time(),
        )
        while time.perf_counter() - passed < 0.5:
            pass
        assert clock.now() - began == pytest.approx(time.thread_time() - ran, rel=0.2)
        assert watch.share_waited() > 0.2
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.join()


def test_sleeping_counts():
    began = clock.now()
    time.sleep(0.2)
    assert clock.now() - began > 0.15
