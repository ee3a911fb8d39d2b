"""What the history of lengths is made of: evidence, records, predictions, and hindsight."""
