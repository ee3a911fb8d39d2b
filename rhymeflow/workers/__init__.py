"""What runs in worker processes or actors, and the messages that workers and controller exchange.

The same code serves every runtime: it is given a connection and does not know what is behind it.
"""
