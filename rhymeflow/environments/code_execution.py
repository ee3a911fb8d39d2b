"""The built-in tool `code_execution`: the policy runs Python and reads what it prints."""

from __future__ import annotations

from rhymeflow.sandbox.programs import ProgramLimits, chosen, run

MOST_OUT, MOST_ERR = 4000, 2000
"""Characters that the policy reads: the first ones of the output, the last ones of the errors."""


class CodeExecution:
    """Has one tool. Arguments are those of the reward `code_execution`."""

    def __init__(
        self, timeout: float = 5.0, memory_limit_mb: int = 1024, least_walls: str = "limits"
    ) -> None:
        self._limits = ProgramLimits(timeout, 2 * timeout, memory_limit_mb, 100_000)
        self._walls = chosen(least_walls)

    def reset(self) -> None:
        """Begin an episode."""

    def code_execution(self, code: str) -> str:
        """Run a Python program and return what it prints, errors included. Each call begins anew.

        Args:
            code: The program."""
        [outcome] = run(code, [{"stdin": ""}], self._limits, self._walls)
        out, err = outcome.out, outcome.err
        if len(out) > MOST_OUT:
            out = f"{out[:MOST_OUT]}\n[cut: {MOST_OUT} of {len(out)} characters]"
        if len(err) > MOST_ERR:
            err = f"[cut: {MOST_ERR} of {len(err)} characters]\n{err[-MOST_ERR:]}"
        ended = f"[ended: {outcome.ended}]" if outcome.ended else ""
        parts = [each.rstrip("\n") for each in (out, err, ended)]
        return "\n".join(filter(None, parts)) or "[it printed nothing]"
