"""``python tools/lock.py [--upgrade]``: what the images install, each package by version and by the hashes of its wheels.

The versions are those of the environment that this runs in, so that what the tests ran on is what ships; ``--upgrade`` takes the newest
that the requirements allow. Three files in ``deploy/docker``:

    constraints.txt         all of the project: pyproject's dependencies
    constraints-tier.txt    a part of it: what ``tier.in`` names
    constraints-build.txt   what builds the project's own wheel

Resolved by uv for one platform, from wheels alone. A test compares the files with what they are made of (``inputs``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy/docker"

PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_36"
"""That of the images' base, Debian 12."""

TOOLKIT = ("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-nvvm")
COMPILER = "cuda-toolkit[cccl,nvcc]"
"""Kernels are compiled at run time. Something asks for nvcc without a version and gets one that refuses the headers of torch's CUDA; this
names the one that belongs to them."""

LEFT_OUT = ("torch", "nixl-cu12")
"""Requirements of packages in ``tier.in`` that are not used: NIXL runs on the host's memory without torch, and one of its two builds does."""

Locks = Mapping[str, tuple[str, tuple[str, ...]]]
"""name -> (version, sha256 of each wheel)"""


def inputs() -> dict[str, list[str]]:
    """What each file is made of, as requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (line.split("#")[0].strip() for line in (FOLDER / "tier.in").read_text().splitlines())
    return {
        "constraints.txt": [*project["project"]["dependencies"], COMPILER],
        "constraints-tier.txt": [line for line in lines if line],
        "constraints-build.txt": project["build-system"]["requires"],
    }


def digest(requirements: Sequence[str]) -> str:
    """Of what a file is made of; written into it."""
    return hashlib.sha256(json.dumps([sorted(requirements), PYTHON, PLATFORM, LEFT_OUT]).encode()).hexdigest()


def installed() -> dict[str, str]:
    """name -> version in this environment, but for what ``COMPILER`` decides."""
    found = {canonicalize_name(d.metadata["Name"]): d.version for d in distributions() if d.read_text("direct_url.json") is None}
    return {name: version for name, version in found.items() if name not in TOOLKIT}


def resolve(requirements: Iterable[str], versions: Mapping[str, str], without: Iterable[str] = ()) -> Locks:
    """The closure of ``requirements``, at ``versions`` where those name a package. Raises ``CalledProcessError``, after uv has said why."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, bounds, dropped, out = (Path(folder) / name for name in ("wanted.in", "bounds.txt", "dropped.txt", "pylock.toml"))
        wanted.write_text("\n".join(requirements))
        bounds.write_text("\n".join(f"{name}=={version}" for name, version in versions.items()))
        dropped.write_text("\n".join(f"{name}; python_version < '3'" for name in without))
        subprocess.run([sys.executable, "-m", "uv", "pip", "compile", wanted, "--constraints", bounds, "--overrides", dropped, "--python-version", PYTHON,
                        "--python-platform", PLATFORM, "--only-binary", ":all:", "--format", "pylock.toml", "--quiet", "--output-file", out],
                       check=True, stdout=subprocess.DEVNULL)
        packages = tomllib.loads(out.read_text())["packages"]
    return {p["name"]: (p["version"], tuple(sorted(w["hashes"]["sha256"] for w in p["wheels"]))) for p in packages}


def text(requirements: Sequence[str], locks: Locks) -> str:
    """The file."""
    head = [f"# Made by `python tools/lock.py`: CPython {PYTHON}, {PLATFORM}, wheels alone.", f"# inputs sha256:{digest(requirements)}"]
    body = [" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{value}" for value in hashes)]) for name, (version, hashes) in sorted(locks.items())]
    return "\n".join(head + body) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="the newest versions, not those of this environment")
    versions = {} if parser.parse_args().upgrade else installed()
    wanted = inputs()
    everything = resolve(wanted["constraints.txt"], versions)
    pinned = {name: version for name, (version, _) in everything.items()}
    made = {
        "constraints.txt": everything,
        "constraints-tier.txt": resolve(wanted["constraints-tier.txt"], pinned, LEFT_OUT),
        "constraints-build.txt": resolve(wanted["constraints-build.txt"], pinned),
    }
    for name, locks in made.items():
        (FOLDER / name).write_text(text(wanted[name], locks))
        print(f"{name}: {len(locks)} packages", file=sys.stderr)


if __name__ == "__main__":
    main()
