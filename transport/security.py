"""Who may talk to whom over ZeroMQ: this node's CURVE keys, the list of the nodes that it trusts, and what may go in plaintext.

CURVE is ZeroMQ's own encryption and authentication (RFC 26); a handshake asks pyzmq's authenticator (ZAP, RFC 27) whether the
peer's key is on the list. Both ends have keys, and both look the other one's up: a client must know the server's key beforehand, so
an address that is told to somebody carries it, ``tcp://host:port#KEY`` with 64 hexadecimal digits, and is worth nothing unless that
key is on the reader's own list. Whoever can make a node believe another address cannot make it talk to another node.

Without keys a node speaks plaintext, with loopback only unless it is told otherwise.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
import time
from binascii import Error as NotHex
from binascii import unhexlify
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth import Authenticator, load_certificate
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from transport.errors import AccessDenied, ConfigError, ProtocolError

log = logging.getLogger("oasis.security")

DOMAIN = "oasis"
KEY_BYTES = 32
MAX_FILE_BYTES = 1 << 16
RECHECK_SECONDS = 1.0
"""How much longer at most a node is heard whose key was taken off the list while it is connected."""
TELL_SECONDS = 10.0
"""Refused handshakes are logged once in this time: how many there are is up to whoever makes them."""

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
BROKEN_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Events of a socket's monitor: a handshake that the peer refused, and one that just ended."""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_key(address: str) -> tuple[str, str]:
    """(address as ZeroMQ takes it, public key as 64 hexadecimal digits, "": it has none). Raises ``ProtocolError``."""
    plain, mark, key = address.partition("#")
    if mark:
        _z85(key)
    return plain, key


def refusal(event: int) -> str:
    """What one of ``REFUSED`` or ``BROKEN_OFF`` says."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "it refused our key: it is not on its allow list"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "it does not protect its connections as we do: one side has keys, the other has none"
    return "it broke the handshake off: it holds another key than its address says, or has none"


def show(key: bytes) -> str:
    """A public key (Z85, as in key files) as addresses and messages have it."""
    return z85.decode(key).hex()


def read_keys(path: Path) -> tuple[bytes, bytes | None]:
    """Public and secret key (Z85; None: it holds none) of a file as pyzmq writes it. Raises ``OSError``, ``ValueError`` with what is wrong."""
    at = os.stat(path)
    if not stat.S_ISREG(at.st_mode) or at.st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} is no key file")
    public, secret = load_certificate(path)
    for key in (public,) if secret is None else (public, secret):
        try:
            sound = len(key) * 4 // 5 == len(z85.decode(key)) == KEY_BYTES
        except Exception:  # whatever its characters led to
            sound = False
        if not sound:
            raise ValueError(f"{path} holds a malformed key")
    if secret is not None and zmq.curve_public(secret) != public:
        raise ValueError(f"{path} holds two keys that do not belong together")
    return public, secret


@dataclass(frozen=True)
class Keys:
    """One node's pair, Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, path: str, option: str) -> Keys:
        """Raises ``ConfigError`` naming ``option`` for a file that is missing, malformed or readable by others than its owner."""
        try:
            mode = os.stat(path).st_mode
            if stat.S_ISREG(mode) and mode & 0o077:
                raise ConfigError(f"{option} {path} is open to others than its owner (mode {mode & 0o777:04o}): chmod 600 it, and make other keys "
                                  "if anybody else has an account there")
            public, secret = read_keys(Path(path))
        except OSError as error:
            raise ConfigError(f"{option} {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigError(f"{option} {path}: {error}") from None
        if secret is None:
            raise ConfigError(f"{option} {path} holds no secret key: it wants the .key_secret file that `oasis keys create` has made")
        return cls(public, secret)


class AllowList:
    """The nodes that may connect, and be connected to: the public keys in a folder's ``*.key`` files, read again when those change.

    A file that becomes unreadable counts for nobody, and so does the folder. May be used from any thread.
    """

    def __init__(self, folder: str, option: str = "--allowed"):
        """Raises ``ConfigError`` naming ``option`` for a folder that is missing, holds a malformed key, or none."""
        self.folder = Path(folder)
        self._keys: frozenset[bytes] = frozenset()
        self._seen: tuple | None = None
        self._look_at = self._tell_at = 0.0
        self._refused = 0
        try:
            self._seen = self._stamp()
            self._keys = frozenset(read_keys(self.folder / name)[0] for name, *_ in self._seen)
        except OSError as error:
            raise ConfigError(f"{option} {folder}: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigError(f"{option} {error}") from None
        if not self._keys:
            raise ConfigError(f"{option} {folder} holds no public key (*.key): nobody could connect")

    def __contains__(self, key: bytes) -> bool:
        """Whether ``key`` (Z85) is on the list as the folder has it now."""
        self._refresh()
        return key in self._keys

    def still(self, key: bytes) -> bool:
        """The same of a key that was on it, as the folder had it ``RECHECK_SECONDS`` ago at worst: for every message."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + RECHECK_SECONDS
            self._refresh()
        return key in self._keys

    def callback(self, domain: str, key: bytes) -> bool:
        """For pyzmq's authenticator, once per handshake."""
        if key in self:
            return True
        self._refused, now = self._refused + 1, time.monotonic()
        if now >= self._tell_at:
            log.warning("%d handshakes refused, the last for key %s: it is not in %s", self._refused, show(key), self.folder)
            self._refused, self._tell_at = 0, now + TELL_SECONDS
        return False

    def _refresh(self) -> None:
        try:
            stamp = self._stamp()
        except OSError as error:
            stamp = None
            if self._seen is not None:
                log.error("nobody is allowed any more: %s: %s", self.folder, error.strerror or error)
        if stamp == self._seen:
            return
        keys = set()
        for name, *_ in stamp or ():
            try:
                keys.add(read_keys(self.folder / name)[0])
            except (OSError, ValueError) as error:
                log.error("a key that counts for nobody: %s", error)
        self._keys, self._seen = frozenset(keys), stamp
        log.info("%d nodes are allowed by %s", len(keys), self.folder)

    def _stamp(self) -> tuple:
        """What changes when a file does. Raises ``OSError``."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".key"):
                    with suppress(FileNotFoundError):  # it is being replaced, or a link to nowhere
                        at = entry.stat()
                        found.append((entry.name, at.st_ino, at.st_mtime_ns, at.st_size))
        return tuple(sorted(found))


class Security:
    """How one process protects its ZeroMQ sockets. ``keys`` None: not at all; plaintext then reaches loopback only, or everybody with
    ``allow_plaintext``. ``files``: what the keys and the list were read from, for a child process that shall have them too."""

    def __init__(self, keys: Keys | None = None, allowed: AllowList | None = None, *, allow_plaintext: bool = False, files: tuple[str, str] = ("", "")):
        self.keys, self.allowed, self.allow_plaintext, self.files = keys, allowed, allow_plaintext, files

    @classmethod
    def load(cls, keys: str, allowed: str, allow_plaintext: bool, *, prefix: str = "--") -> Security:
        """``keys``: a secret key file, ``allowed``: a folder, both or neither. Raises ``ConfigError`` naming the option, with its ``prefix``."""
        if bool(keys) != bool(allowed):
            raise ConfigError(f"{prefix}keys and {prefix}allowed go together: who this node is, and whom it trusts")
        if not keys:
            return cls(allow_plaintext=allow_plaintext)
        if allow_plaintext:
            raise ConfigError(f"{prefix}allow-plaintext contradicts {prefix}keys: with keys nothing goes in plaintext")
        return cls(Keys.load(keys, f"{prefix}keys"), AllowList(allowed, f"{prefix}allowed"), files=(keys, allowed))

    def told(self, address: str) -> str:
        """An own address as others are told it: with our public key."""
        return address if self.keys is None else f"{address}#{show(self.keys.public)}"

    # -- the end that binds -------------------------------------------------------------------------------------

    def guard(self, context: zmq.Context) -> Authenticator | None:
        """Starts what decides over the handshakes of the sockets of ``context`` (None without keys); the caller stops it before the
        context ends. While there is none, nobody is let in."""
        if self.keys is None:
            return None
        make = AsyncioAuthenticator if isinstance(context, zmq.asyncio.Context) else ThreadAuthenticator
        authenticator = make(context)
        authenticator.configure_curve_callback(DOMAIN, self.allowed)
        authenticator.start()
        return authenticator

    def serve(self, socket: zmq.Socket) -> None:
        """Before ``socket`` binds."""
        if self.keys is None:
            return
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret
        # Otherwise ZeroMQ lets everybody in while there is no authenticator.
        socket.zap_domain = DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def hears(self, frame: zmq.Frame) -> bool:
        """Whether the sender of a message may still talk to us."""
        return self.keys is None or self.allowed.still(_sender(frame))

    def sent_by(self, frame: zmq.Frame, address: str) -> bool:
        """Whether the sender of a message holds the key that ``address`` carries; without keys nobody can tell, and anybody may."""
        return self.keys is None or split_key(address)[1] == show(_sender(frame))

    # -- the end that connects ----------------------------------------------------------------------------------

    def require(self, address: str, peer: str) -> None:
        """Raises ``AccessDenied`` naming ``peer`` unless this node may connect to ``address``, ``ProtocolError`` for one that is malformed."""
        plain, key = split_key(address)
        if self.keys is None and key:
            raise AccessDenied("it wants to be connected to with keys, this node has none", peer=peer, limit=f"key {key}")
        if self.keys is None and not (self.allow_plaintext or _stays_here(plain)):
            raise AccessDenied("it is on another host and would be talked to in plaintext: give this node keys, or on a trusted network allow plaintext",
                               peer=peer)
        if self.keys is not None and not key:
            raise AccessDenied("its address carries no key, and this node connects to none without", peer=peer)
        if self.keys is not None and _z85(key) not in self.allowed:
            raise AccessDenied("its key is not on this node's allow list", peer=peer, limit=f"key {key}")

    def dial(self, socket: zmq.Socket, address: str, peer: str) -> str:
        """Before ``socket`` connects; returns the address for ZeroMQ. Raises as ``require``."""
        self.require(address, peer)
        plain, key = split_key(address)
        if self.keys is not None:
            socket.curve_serverkey = _z85(key)
            socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret
        return plain

    def trusts(self, address: str) -> bool:
        """Whether an address that was connected to may still be talked to."""
        return self.keys is None or self.allowed.still(_z85(split_key(address)[1]))


def _sender(frame: zmq.Frame) -> bytes:
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:  # of a connection without an identity, which nobody lets in
        return b""


def _stays_here(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    if ";" in rest or "%" in rest:  # ZeroMQ's source;destination, and scopes, which may hold anything
        return False
    return scheme in ("inproc", "ipc") or (scheme == "tcp" and is_loopback(rest.rpartition(":")[0].strip("[]")))


def _z85(key: str) -> bytes:
    """Z85 of 64 hexadecimal digits. Raises ``ProtocolError``."""
    try:
        raw = unhexlify(key)
    except (NotHex, ValueError):
        raw = b""
    if len(raw) != KEY_BYTES:
        raise ProtocolError("an address with a malformed key", limit=f"{2 * KEY_BYTES} hexadecimal digits")
    return z85.encode(raw)
