"""Programs of the doctor's own, each a child that prints one JSON object: native code that crashes or hangs there is a finding here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TypeVar

import msgspec

from oasis_sglang import config
from transport.planes.child import confine

Found = TypeVar("Found", bound=msgspec.Struct)
WORDS_KEPT = 400


class Child:
    """``python -m module words`` in a session of its own. Owner: whoever started it; ``result`` or ``end`` ends it."""

    def __init__(self, module: str, *words: str):
        environment = {name: value for name, value in os.environ.items() if name != config.ACTIVE_ENV}
        self._began = time.monotonic()
        self._log = open(os.memfd_create("oasis-doctor-log", os.MFD_CLOEXEC), "w+b")  # there may be no disk to write to
        self._process = subprocess.Popen([sys.executable, "-P", "-W", "ignore", "-m", module, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                         stderr=self._log, env=environment, start_new_session=True)

    def result(self, kind: type[Found], seconds: float) -> Found:
        """What it printed, within ``seconds`` of its start. ``kind`` has a field ``error``, which says why if it printed nothing of that kind."""
        try:
            raw, _ = self._process.communicate(timeout=max(0.0, self._began + seconds - time.monotonic()))
            return msgspec.json.decode(raw, type=kind)
        except subprocess.TimeoutExpired:
            return kind(error=f"it did not end within {seconds:g} s")
        except msgspec.MsgspecError:
            code, words = self._process.returncode, self._last_words()
            how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
            return kind(error=f"{how}: {words}" if words else how)
        finally:
            self.end()

    def end(self) -> None:
        """With all that it started. Idempotent."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _last_words(self) -> str:
        """Of what it and its libraries logged."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][-WORDS_KEPT:] if lines else ""


def quiet() -> int:
    """In a child: the descriptor that its result goes to. Standard output joins standard error, because libraries print there. The child
    ends with its parent, however that ends."""
    confine()
    pipe = os.dup(1)
    os.dup2(2, 1)
    return pipe


def speak(found: msgspec.Struct, pipe: int) -> None:
    """In a child: says ``found`` and ends at once, as native libraries may not end in good order. Does not return."""
    with open(pipe, "wb") as out:
        out.write(msgspec.json.encode(found))
    os._exit(0)
