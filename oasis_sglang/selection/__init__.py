"""Summaries, scores, votes and plans: torch and numpy only, importable by both nodes. Import of the package itself is free."""

SUMMARY_NAMES = ("mean_var_int8", "minmax_int8", "minmax_int4")
CONTROL_NAMES = ("control_keys", "control_random")
