"""A taskset of verifiers: sums, with a rubric, and if asked with a calculator of MCP."""

from sumtools.taskset import SumTaskset

__all__ = ["SumTaskset"]
