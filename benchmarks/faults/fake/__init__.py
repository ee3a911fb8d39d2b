"""Whole runs in one process and in virtual time, under faults that a seed draws.

The controller, the coordinator, the store, the reward and learner and rollout workers, resuming and
the messages are the product's. Fake are what is slow or comes from outside: the model (`models.py`),
the reward functions, the disk's faults (`disk.py`), processes and pipes (`runtime.py`, `wires.py`),
and time (`world.py`).
"""
