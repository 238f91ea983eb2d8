"""``oasis bench``: the same requests through several systems, one after the other, counted and metered."""


class BenchError(Exception):
    """A measurement that failed; the message is for the user."""
