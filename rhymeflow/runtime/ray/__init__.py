"""Runs on a Ray cluster: workers are actors, messages are calls. All that imports Ray is here."""
