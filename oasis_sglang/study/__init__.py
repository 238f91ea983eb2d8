"""The offline engine: what a working set costs in quality and bytes, on forced continuations, through the scorer and planner that serve."""
