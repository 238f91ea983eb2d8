"""Switch SGLang to its CPU engine on a machine without an accelerator.

``prepare`` is an entry point of the group ``sglang.srt.platforms``. SGLang calls all of that group
when ``sglang.srt.utils.common`` first asks for ``current_platform``: in every process, before
``is_cpu()`` reads ``SGLANG_USE_CPU_ENGINE`` and before anything imports ``sgl_kernel``. An entry
point of ``sglang.srt.plugins`` runs after both and would be too late.

Nothing here may import torch or sglang: the caller is still importing both.
"""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import sys
from glob import glob
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

STAND_IN = Path(__file__).parent / "sgl_kernel"

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # A prefill, a decode and a router process share a small machine, and decode of a small model
    # loses more to thread hand-over than it gains. Takes effect in the processes SGLang starts.
    "OMP_NUM_THREADS": "1",
    # Compiling SGLang's small helpers costs seconds on first use and needs a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # /health would otherwise generate a token, at each probe, on the same core.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES, LARGEST_KEPT_BYTES = (1 << 31) - 1, 32 << 20
"""Free memory at the heap's top that goes back to the system, and the size from which an allocation is a mapping of its own (glibc takes no more)."""

# NVIDIA also as WSL (dxg) and Tegra (nvhost, nvgpu).
NVIDIA_NODES = ("/dev/nvidia*", "/dev/dxg", "/dev/nvhost*", "/dev/nvgpu*")
# ROCm, Ascend, Moore Threads: SGLang has platforms of its own for these.
OTHER_NODES = ("/dev/kfd", "/dev/davinci*", "/dev/mthreads*")


def prepare() -> None:
    """Set up CPU mode if this machine needs it. Idempotent.

    An explicit ``SGLANG_USE_CPU_ENGINE`` decides either way; other variables that the user has set
    are kept. Returns None, which tells SGLang "not a platform of mine": its own CPU platform stays
    in charge. (For the same reason ``SGLANG_PLATFORM`` must not name this entry point.)
    """
    if not wanted():
        return
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    keep_heap()
    if not installed_kernels_run_on_cpu():
        install_stand_in()


def keep_heap() -> None:
    """Attention without a GPU makes tensors of some MB in every layer. Where glibc gives their memory back each time, its pages are zeroed and mapped
    again for the next one; whether it does hangs on what lies above them in the heap. Decode of two requests of 6,000 tokens takes 0.28 s per step
    or 0.66 s. Now it never does. Other C libraries are left alone."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  raises AttributeError elsewhere
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def wanted() -> bool:
    explicit = os.environ.get("SGLANG_USE_CPU_ENGINE")
    if explicit is not None:
        return explicit == "1"
    return not accelerator_present()


def accelerator_present() -> bool:
    """Whether torch could find a device other than the CPU, judged without asking it."""
    if sys.platform == "darwin":  # Metal: SGLang decides
        return True
    if exists(NVIDIA_NODES) and not hidden("CUDA_VISIBLE_DEVICES") and loads("libcuda.so.1"):
        return True
    return exists(OTHER_NODES) or torch_build().endswith("+xpu")


def exists(patterns: tuple[str, ...]) -> bool:
    return any(glob(pattern) for pattern in patterns)


def hidden(variable: str) -> bool:
    """An empty list of visible devices, or one that begins with -1, hides all of them."""
    value = os.environ.get(variable)
    return value is not None and value.split(",")[0].strip() in ("", "-1")


def loads(library: str) -> bool:
    # Loading is harmless; initialising the driver would break it in processes forked later.
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def torch_build() -> str:
    """Version of the installed torch with its local part (``2.9.0+xpu``), read from metadata."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed_kernels_run_on_cpu() -> bool:
    """A CPU build of sgl_kernel keeps ``common_ops`` at its root; the CUDA wheel, in subfolders."""
    spec = PathFinder.find_spec("sgl_kernel")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    return any(True for root in roots for _ in Path(root).glob("common_ops*"))


class StandInFinder:
    """Answers ``import sgl_kernel``; its submodules follow from the package's path."""

    @staticmethod
    def find_spec(name, path=None, target=None) -> ModuleSpec | None:
        if name != "sgl_kernel":
            return None
        return importlib.util.spec_from_file_location(
            name, STAND_IN / "__init__.py", submodule_search_locations=[str(STAND_IN)]
        )


def install_stand_in() -> None:
    """Put the stand-in before any installed ``sgl_kernel``, whose import fails without libcuda."""
    if StandInFinder not in sys.meta_path:
        sys.meta_path.insert(0, StandInFinder)
