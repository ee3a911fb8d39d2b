"""`rhymeflow dashboard`: pages over runs, live and finished, read from their files."""
