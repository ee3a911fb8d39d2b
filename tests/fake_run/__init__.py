"""Whole runs in one process and in virtual time, under faults that a seed draws.

The controller, the coordinator, the store, the workers of all roles but history, resuming and the
messages are the product's. Fake are what is slow or comes from outside: the model and the reward
functions (`models.py`), the disk's faults (`disk.py`), processes and pipes (`runtime.py`), and time
(`world.py`)."""
