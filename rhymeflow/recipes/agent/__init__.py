"""The recipe `agent`: the task and the checkpoint of `tools`, played by a program at a URL."""
