"""Key files of nodes: made, passed on, listed. What they are for is in ``transport.security``.

    DIR/NAME.key_secret   of node NAME, readable by its owner alone; never leaves the node
    DIR/NAME.key          its public key, for the others
    DIR/allowed/*.key     the public keys of the nodes that this one trusts
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

from zmq.auth import create_certificates

from transport.errors import ConfigError
from transport.security import read_keys, show

ALLOWED = "allowed"


def create(folder: Path, name: str) -> tuple[Path, Path]:
    """Makes a pair of keys for ``name`` in ``folder``, which is made too; (public file, secret file). Raises ``ConfigError``: nothing is
    ever written over."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{name!r} is not a name for a node: letters, digits, dots and dashes")
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    for path in (secret, public):
        if path.exists():
            raise ConfigError(f"{path} exists; nodes that are to have new keys get a new name, and both are allowed until the old one is gone")
    with _told():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # pyzmq makes files as the umask says: nobody else may look into this folder while it does.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
            made = create_certificates(scratch, name)
            for path, target, mode in zip(made, (public, secret), (0o644, 0o600)):
                os.chmod(path, mode)
                os.link(path, target)
    return public, secret


def allow(folder: Path, publics: Iterable[Path]) -> list[Path]:
    """Puts public keys on the list of ``folder``, each as a whole: nodes read it while they run. Raises ``ConfigError``."""
    listed = []
    for path in publics:
        key, secret = _read(path)
        if secret is not None or path.suffix != ".key":
            raise ConfigError(f"{path} is not a public key file (NAME.key); a secret one stays where it was made")
        target = folder / ALLOWED / path.name
        if target.exists() and _read(target)[0] != key:
            raise ConfigError(f"{target} is another key of that name; remove it first, or rename the new one")
        with _told():
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = target.with_name(f".{path.name}-new")
            shutil.copyfile(path, fresh)
            os.replace(fresh, target)
        listed.append(target)
    return listed


def public_key(path: Path) -> str:
    """As addresses have it, 64 hexadecimal digits. Raises ``ConfigError``."""
    return show(_read(path)[0])


class Ring:
    """Keys of nodes of one machine that all trust each other; each gets its own when it is first asked for. Owner of ``folder``."""

    def __init__(self, folder: Path):
        self.folder = folder

    def flags(self, name: str, prefix: str = "--") -> list[str]:
        """Of the server ``name``."""
        self._ensure(name)
        return [f"{prefix}keys", str(self.folder / f"{name}.key_secret"), f"{prefix}allowed", str(self.folder / ALLOWED)]

    def mark(self, name: str) -> str:
        """What the address of the server ``name`` ends with."""
        self._ensure(name)
        return f"#{public_key(self.folder / f'{name}.key')}"

    def _ensure(self, name: str) -> None:
        if not (self.folder / f"{name}.key").exists():
            allow(self.folder, [create(self.folder, name)[0]])


def _read(path: Path) -> tuple[bytes, bytes | None]:
    with _told():
        return read_keys(path)


@contextmanager
def _told():
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from None
