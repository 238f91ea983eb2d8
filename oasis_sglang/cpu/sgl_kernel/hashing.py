"""Operators that SGLang calls as ``torch.ops.sgl_kernel.*``.

``convert_weight_packed`` must never be defined here: SGLang takes its presence as "the AMX kernels
are available" and would send every layer to kernels that do not exist.
"""

import torch

_WORD = 0xFFFFFFFF


def _rotate_left(x, bits):
    return ((x << bits) | (x >> (32 - bits))) & _WORD


def _times(x, factor):
    return (x * factor) & _WORD  # int64 wraps, which leaves the low word right


def murmur_hash32_cpu(seed, positions, col_indices):
    """MurmurHash3 (x86, 32 bit) of seed low word, seed high word, position, column.

    seed, positions: int ``[rows]``; col_indices: int ``[cols]``. Returns uint32 ``[rows, cols]``.
    Public algorithm by Austin Appleby; same block order as SGLang's Triton kernel, so a seeded
    request samples alike on CPU and GPU.
    """
    seed = seed.to(torch.int64)[:, None]
    blocks = (seed, seed >> 32, positions.to(torch.int64)[:, None], col_indices.to(torch.int64)[None, :])
    h = torch.zeros_like(seed)
    for block in blocks:
        k = _times(block & _WORD, 0xCC9E2D51)
        k = _times(_rotate_left(k, 15), 0x1B873593)
        h = (_times(_rotate_left(h ^ k, 13), 5) + 0xE6546B64) & _WORD
    h = h ^ 16  # bytes hashed
    h = _times(h ^ (h >> 16), 0x85EBCA6B)
    h = _times(h ^ (h >> 13), 0xC2B2AE35)
    return (h ^ (h >> 16)).to(torch.uint32)


_library = None  # a torch Library unregisters its operators when it is collected


def register_torch_ops() -> None:
    global _library
    if _library is not None or hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        return
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    _library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    _library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
