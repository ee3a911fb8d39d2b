"""What all tests share."""

from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile("rhymeflow", deadline=None)
settings.load_profile("rhymeflow")
