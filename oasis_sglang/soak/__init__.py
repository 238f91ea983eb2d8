"""``oasis soak``: real servers under load for long, with faults in the middle, and everything counted at the end."""
