"""What only loading SGLang, torch or NIXL can say, each in a child of the doctor's.

    python -P -m oasis_sglang.doctor.probe sglang|nixl

SGLang is loaded with its plugins, as every process of a server does it, so that the seam check is the one that would end a server.
UCX is asked by its public C interface (``ucp/api/ucp.h``) which devices there are, and which of them ``UCX_NET_DEVICES`` and
``UCX_TLS`` leave: the library that NIXL brings, with the variables that NIXL will have.
"""

from __future__ import annotations

import ctypes
import glob
import logging
import re
import sys
from importlib import metadata
from pathlib import Path

import msgspec

from oasis_sglang.doctor import children

UCP_PARAM_FIELD_FEATURES, UCP_FEATURE_RMA = 1, 2
PARAMS_BYTES = 1 << 10
"""Room for a ``ucp_params_t``, which has about 100: only the fields that are said to be set are read."""


class Gpu(msgspec.Struct, frozen=True):
    name: str
    memory: int


class SglangFound(msgspec.Struct, frozen=True):
    """``problems``: what would end a server, a line each; ``loaded``: whether SGLang took our plugin; ``torch``: its version, ``cuda`` what
    it was built for ("": nothing); ``gpus`` that torch sees, or ``gpu_error`` why it sees none. ``error``: why all of it is unknown."""

    version: str = ""
    loaded: bool = False
    problems: tuple[str, ...] = ()
    torch: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    error: str = ""


class Device(msgspec.Struct, frozen=True):
    """A network device of UCX (``eth0``, ``mlx5_0:1``), and its transports."""

    name: str
    transports: tuple[str, ...]

    @property
    def rdma(self) -> bool:
        return any(transport != "tcp" for transport in self.transports)


class NixlFound(msgspec.Struct, frozen=True):
    """``package`` that ``nixl`` is, and its version; ``ucx``: version of the library that it brings; ``devices`` for networks that UCX finds,
    ``chosen`` of them by its variables. ``ucx_error``: why these are unknown; ``error``: why all is."""

    package: str = ""
    version: str = ""
    ucx: str = ""
    devices: tuple[Device, ...] = ()
    chosen: tuple[Device, ...] = ()
    ucx_error: str = ""
    error: str = ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[: children.WORDS_KEPT]


# -- SGLang and torch ---------------------------------------------------------------------------------------------


class _Errors(logging.Handler):
    """Keeps what is logged as an error of ours: SGLang goes on without a plugin that failed."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "oasis" in (line := record.getMessage()):
            self.lines.append(f"{line} {record.exc_info[1]}" if record.exc_info else line)


def ask_sglang() -> SglangFound:
    import torch

    about = dict(torch=str(torch.__version__), cuda=torch.version.cuda or "")
    gpus, gpu_error = _gpus(torch) if about["cuda"] else ((), "this torch is built without CUDA")
    about |= dict(gpus=gpus, gpu_error=gpu_error)
    errors = _Errors()
    logging.getLogger("sglang.srt.plugins").addHandler(errors)
    try:
        import sglang
        from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
        from sglang.srt.plugins import load_plugins

        from oasis_sglang import plugin

        load_plugins()
    except Exception as error:  # whatever is wrong with the installation
        return SglangFound(**about, error=f"SGLang cannot be loaded: {_words(error)}")
    _, *drifted = plugin.refusal().splitlines()
    problems = [line.strip() for line in drifted if line.strip()]
    return SglangFound(version=sglang.__version__, loaded=plugin.BACKEND in DISAGG_TRANSFER_BACKEND_CHOICES, problems=(*problems, *errors.lines), **about)


def _gpus(torch) -> tuple[tuple[Gpu, ...], str]:
    try:
        torch.cuda.init()
        found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return tuple(Gpu(one.name, one.total_memory) for one in found), ""
    except Exception as error:  # of the driver's
        return (), _words(error)


# -- NIXL and UCX -------------------------------------------------------------------------------------------------


def ask_nixl() -> NixlFound:
    try:
        from nixl import _bindings
    except Exception as error:  # whatever is wrong with the installation
        return NixlFound(error=f"NIXL cannot be loaded: {_words(error)}")
    folder = Path(_bindings.__file__).parent
    found = dict(package=folder.name, version=metadata.version("nixl"))
    library = next(iter(glob.glob(f"{folder}.libs/libucp-*.so*")), "libucp.so.0")
    try:
        ucp = ctypes.CDLL(library)
    except OSError as error:
        return NixlFound(**found, ucx_error=str(error))
    version = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, version))
    found["ucx"] = ".".join(str(part.value) for part in version)
    try:
        return NixlFound(**found, devices=_devices(ucp, version, b"all"), chosen=_devices(ucp, version, None))
    except OSError as error:
        return NixlFound(**found, ucx_error=str(error))


def _devices(ucp: ctypes.CDLL, version: list[ctypes.c_uint], only: bytes | None) -> tuple[Device, ...]:
    """Those of a context made with the variables in the environment, with ``only`` in place of UCX_NET_DEVICES. Raises ``OSError``."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    params = (ctypes.c_uint64 * (PARAMS_BYTES // 8))(UCP_PARAM_FIELD_FEATURES, UCP_FEATURE_RMA)
    _require(ucp, ucp.ucp_config_read(None, None, ctypes.byref(config)))
    if only is not None:
        _require(ucp, ucp.ucp_config_modify(config, b"NET_DEVICES", only))
    _require(ucp, ucp.ucp_init_version(version[0], version[1], params, config, ctypes.byref(context)))
    text, length = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(length)))
    ucp.ucp_context_print_info(context, stream)
    libc.fclose(stream)
    return devices(text.value.decode())


def _require(ucp: ctypes.CDLL, status: int) -> None:
    code = ctypes.c_byte(status)  # the type is a byte; what else is in the register counts for nothing
    if code.value:
        ucp.ucs_status_string.restype = ctypes.c_char_p
        raise OSError(f"UCX cannot start: {ucp.ucs_status_string(code).decode()}")


def devices(printed: str) -> tuple[Device, ...]:
    """Of what ``ucp_context_print_info`` prints: a line ``resource 1 : md 1 dev 1 flags -- tcp/eth0`` for each transport over a device. Memory of
    this host is not a network."""
    found: dict[str, list[str]] = {}
    for transport, name in re.findall(r"^#\s+resource.*\s(\S+)/(\S+)\s*$", printed, re.MULTILINE):
        if name != "memory" and not transport.startswith(("cuda", "gdr", "rocm", "ze_")):
            found.setdefault(name, []).append(transport)
    return tuple(Device(name, tuple(transports)) for name, transports in found.items())


def main(what: str) -> None:
    pipe = children.quiet()
    children.speak({"sglang": ask_sglang, "nixl": ask_nixl}[what](), pipe)


if __name__ == "__main__":
    main(*sys.argv[1:])
