import threading

import pytest

from rhymeflow.cpu import threads


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_part_is_done_and_what_it_raises_is_raised(num_threads):
    done, names = [], set()

    def work(part: int) -> None:
        names.add(threading.current_thread().name)
        if part == 7:
            raise ValueError("seven")
        done.append(part)

    threads.run(work, range(5), num_threads)
    assert sorted(done) == list(range(5))
    assert (threading.current_thread().name in names) == (num_threads == 1)
    with pytest.raises(ValueError, match="seven"):
        threads.run(work, [7], num_threads)
