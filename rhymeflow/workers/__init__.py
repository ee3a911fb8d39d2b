"""What runs in worker processes or actors of any runtime, and the messages to and from them."""
