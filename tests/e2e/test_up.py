"""``oasis up``: the OpenAI endpoint answers, and one signal leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

START_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60


class Up:
    """``oasis up`` as a process of its own, with a temporary directory of its own so that leftovers show."""

    def __init__(self, model: Path, run_dir: Path):
        # Short: the paths of unix sockets below it must stay under 108 bytes.
        self.temporary = Path(tempfile.mkdtemp(prefix="up-"))
        self._errors = open(run_dir / "stderr", "w+")  # noqa: SIM115  closed by close()
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "oasis_sglang.cli",
                "up",
                "--model",
                model,
                "--port",
                "0",
                "--run-dir",
                run_dir,
            ],
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def errors(self) -> str:
        return (self.run_dir / "stderr").read_text()

    def wait_ready(self) -> str:
        for line in self.process.stdout:
            if found := re.match(r"Ready: (\S+)", line):
                return found[1]
        raise AssertionError(f"oasis up ended without being ready:\n{self.errors()}")

    def wait_for_error_line(self, text: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while text not in self.errors():
            assert self.process.poll() is None and time.monotonic() < deadline, self.errors()
            time.sleep(0.1)

    def descendants(self) -> set[int]:
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
        found, queue = set(), [self.process.pid]
        while queue:
            found |= {*(new := children.get(queue.pop(), []))}
            queue += new
        return found

    def segments(self) -> set[str]:
        found = set()
        for pid in self.descendants():
            found |= set(re.findall(r"(/dev/shm/\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE))
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self._errors.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture
def up(models, tmp_path):
    running = Up(models.s4, tmp_path)
    yield running
    running.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def post(url: str, body: dict) -> str:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read().decode()


def chat(url: str, text: str, **options) -> str:
    message = {"role": "user", "content": text}
    body = {"model": "any", "messages": [message], "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return post(url + "/v1/chat/completions", body | options)


def streamed_text(answer: str) -> str:
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def assert_nothing_is_left(up: Up, pids: set[int], segments: set[str]) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while any(map(alive, pids)) or list(up.temporary.iterdir()):
        assert time.monotonic() < deadline, (list(filter(alive, pids)), list(up.temporary.rglob("*")))
        time.sleep(0.1)
    assert [segment for segment in segments if os.path.exists(segment)] == []
    up.temporary.rmdir()


def test_serves_openai_requests_and_stops_at_one_ctrl_c(up):
    url = up.wait_ready()
    plain = json.loads(chat(url, "Name three rivers."))
    assert plain["usage"]["completion_tokens"] == 24
    text = plain["choices"][0]["message"]["content"]
    assert streamed_text(chat(url, "Name three rivers.", stream=True)) == text

    questions = [f"Say something about the number {n}." for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = [
            json.loads(answer) for answer in pool.map(lambda question: chat(url, question), questions)
        ]
    assert [answer["usage"]["completion_tokens"] for answer in together] == [24] * 4

    pids, segments = up.descendants(), up.segments()
    assert len(pids) >= 8  # zygote, tier, router, and two workers with a scheduler and a detokenizer each
    os.kill(up.process.pid, signal.SIGINT)
    assert up.process.wait(STOP_TIMEOUT_S) == 0, up.errors()
    assert_nothing_is_left(up, pids, segments)
    with socket.socket() as connection:
        address = urllib.parse.urlsplit(url)
        assert connection.connect_ex((address.hostname, address.port)) != 0


def test_an_interrupt_during_the_import_is_heard_at_once(up):
    up.wait_for_error_line("importing SGLang")
    time.sleep(1)
    pids = up.descendants()
    os.kill(up.process.pid, signal.SIGTERM)
    start = time.monotonic()
    assert up.process.wait(STOP_TIMEOUT_S) == 130, up.errors()
    assert time.monotonic() - start < 15
    assert_nothing_is_left(up, pids, set())


def test_a_killed_owner_takes_everything_with_it(up):
    up.wait_for_error_line("starting decode")
    time.sleep(3)
    pids = up.descendants()
    assert len(pids) >= 4
    up.process.kill()
    assert_nothing_is_left(up, pids, set())
