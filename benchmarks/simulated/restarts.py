"""What failures cost a system that restarts the whole job, from the steps of a run without them.

What is modelled is a synchronous system that keeps nothing but checkpoints, as verl
(`trainer.save_freq`, `trainer.resume_mode`): whatever device dies, all processes are started again,
the newest checkpoint is loaded, and the steps since are done once more, rollouts included; a
checkpoint costs nothing, which is more than such a system gets. No simulation is needed for it: a
step that is done again is taken to last as long as the first time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def seconds_with_restarts(
    steps: Sequence[float], failures: Iterable[float], *, away: float, save_steps: int
) -> float:
    """Seconds that a run of these steps takes.

    Args:
        steps: how long each lasts.
        failures: when a device dies, in order, without end.
        away: seconds from a failure until the job goes on; one that comes meanwhile begins it anew.
        save_steps: a checkpoint is written every so many steps.
    """
    coming = iter(failures)
    failure = next(coming)
    now, done = 0.0, 0
    while done < len(steps):
        if failure < now + steps[done]:
            now = failure + away
            done -= done % save_steps
            while failure < now:
                failure = next(coming)
                if failure < now:
                    now = failure + away
        else:
            now += steps[done]
            done += 1
    return now
