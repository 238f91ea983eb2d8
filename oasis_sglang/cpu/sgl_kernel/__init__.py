"""Plain-torch stand-in for the part of ``sgl_kernel`` that SGLang 0.5.23 uses on a CPU.

The published wheel is CUDA-only and cannot be imported without libcuda. On a CPU, SGLang calls only
the names below, all of them for speculative decoding or seeded sampling; plain serving merely
imports them. Any other name resolves to a callable that raises, so that a missing kernel is one
clear error at the call instead of an ImportError at start-up.

Signatures follow the wheel's Python wrappers (SGLang passes some arguments by keyword). All
tensors are CPU tensors; ``b`` is the batch size and ``n`` the number of draft tokens per request.
"""

from .cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .hashing import register_torch_ops
from .speculative import (
    build_tree_kernel_efficient_cpu,
    reconstruct_indices_from_tree_mask,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "reconstruct_indices_from_tree_mask",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
__version__ = "0.4.10+oasis.cpu"

register_torch_ops()


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: not part of Oasis's CPU stand-in")

    missing.__name__ = missing.__qualname__ = name
    return missing
