"""Oasis for SGLang: the plugin and the ``oasis`` command.

Import of this package stays free of torch and sglang: SGLang's platform entry point
loads it before either may be imported.
"""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.23"
