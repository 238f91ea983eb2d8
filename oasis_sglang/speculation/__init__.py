"""Speculative decoding on a decode node: ``--speculative-algorithm OASIS_NGRAM``. Drafts are chains, accepted tokens are kept."""


def register() -> None:
    """Makes the algorithm known to SGLang in this process. Idempotent; imports SGLang."""
    from oasis_sglang.speculation.algorithm import register_algorithm

    register_algorithm()
