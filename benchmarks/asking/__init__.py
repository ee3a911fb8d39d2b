"""The dashboard in a process of its own, and all kinds of questions to it."""
