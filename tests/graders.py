"""Rewards and a tool that start processes, as graders of code do; also run as a `__main__`."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor


class Verdict:
    """What a process sends back: a class of this file."""

    def __init__(self, text):
        self.value = float(len(text))


def verdict(text):
    return Verdict(text)


def put(text, found):
    found.append(Verdict(text))


def in_processes(completions, **columns):
    with multiprocessing.Manager() as manager:
        found = manager.list()
        for text in completions:
            process = multiprocessing.Process(target=put, args=(text, found))
            process.start()
            process.join()
        return [each.value for each in found]


def in_pool(completions, **columns):
    with multiprocessing.Pool(1) as pool:
        return [each.value for each in pool.map(verdict, completions)]


def in_executor(completions, **columns):
    with ProcessPoolExecutor(1) as pool:
        return [each.value for each in pool.map(verdict, completions)]


def in_spawned(completions, **columns):
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return [each.value for each in pool.map(verdict, completions)]


def start_method(completions, **columns):
    method = multiprocessing.get_start_method()
    return [float(multiprocessing.get_all_start_methods().index(method))] * len(completions)


def run_code(text: str) -> str:
    """Run code.

    Args:
        text: the code."""
    return f"{in_processes([text])} {in_pool([text])} {in_executor([text])}"
