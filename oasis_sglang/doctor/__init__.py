"""``oasis doctor``: would a node of ours start and serve here?

``facts`` looks at the machine, and has ``probe`` and ``transfer`` try in processes of their own (``children``) what could crash, hang or
take an accelerator; ``checks``, ``host_checks`` and ``network_checks`` judge what was found and look at nothing; ``report`` prints it.
"""
