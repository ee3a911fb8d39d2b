"""The parts of `rhymeflow bench gpu`."""
