"""``oasis bench``: the same requests through several systems, one after the other, counted and metered."""
