"""SGLang's stock NIXL transfer between processes without a GPU."""

from functools import cache

PROGRESS_DELAY_US = 1000
"""NIXL's Python API hard-codes 0, with which the progress thread polls without pause and takes a
core per server. With a delay it blocks, and incoming data still wakes it."""


@cache
def host_memory_agent(api):
    """The ``nixl_agent`` class of module ``api`` for a machine whose KV cache lies in DRAM.

    SGLang names the memory kind "VRAM" in most of its calls, KV cache or not.
    """
    bindings = api.nixlBind
    plain_config = bindings.nixlAgentConfig

    class AgentConfig(plain_config):
        @property
        def pthrDelay(self):
            return super().pthrDelay

        @pthrDelay.setter
        def pthrDelay(self, delay_us):
            plain_config.pthrDelay.__set__(self, max(delay_us, PROGRESS_DELAY_US))

    class HostMemoryAgent(api.nixl_agent):
        def __init__(self, *args, **kwargs):
            # The base class takes the config class from this name and offers no argument for it.
            bindings.nixlAgentConfig = AgentConfig
            try:
                super().__init__(*args, **kwargs)
            finally:
                bindings.nixlAgentConfig = plain_config
            # Device kinds by name, "VRAM" and its old alias included, all mean host memory here.
            for name in ("VRAM", "cuda"):
                self.nixl_mems[name] = bindings.DRAM_SEG

    return HostMemoryAgent


def manager_init(original, self, *args, **kwargs):
    """Around ``NixlKVManager.__init__``, which imports the agent class when it runs.

    Only agents made there are affected, so that an agent of our own keeps its settings.
    """
    from nixl import _api as api

    plain = api.nixl_agent
    api.nixl_agent = host_memory_agent(api)
    try:
        original(self, *args, **kwargs)
    finally:
        api.nixl_agent = plain
