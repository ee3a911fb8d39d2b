"""Supervised fine-tuning on rows: `rhymeflow sft`."""
