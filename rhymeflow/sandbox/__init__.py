"""Runs programs that the policy wrote, behind walls: processes of their own that reach nothing."""
