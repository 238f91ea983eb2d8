"""As much of Kubernetes as running a rendered pod takes: volumes as folders, an address of its own for each pod out of 127.0.0.0/8, init
containers in order, sidecars, probes, and the one list of pods that SGLang's router watches.

Containers have no root of their own here: what a container would see below a mount path it is told to find in the volume's folder, and
0.0.0.0 is its pod's address.
"""

from __future__ import annotations

import http.server
import json
import os
import random
import re
import signal
import stat
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from chart_rig import NAMESPACE, Pod

ENTRYPOINT = [sys.executable, "-P", "-m", "oasis_sglang.cli"]
"""`oasis`, which the images' entry point starts."""


def address() -> str:
    """One of this host's that hardly anybody else listens at."""
    return ".".join(["127", *(str(random.randint(2, 250)) for _ in range(3))])


def get(url: str, timeout: float = 10.0) -> tuple[int, str]:
    """(status, body); 0: nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            return reply.status, reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError:
        return 0, ""


class RunningPod:
    """``pod`` on this machine. ``folder``: of its volumes, short, since a socket lies there; ``secrets``: name -> {file: bytes}; ``claims``: name of a
    persistent volume claim -> folder; ``hosts``: names that stand for addresses; ``start(argv, env, name)`` -> a server."""

    def __init__(self, pod: Pod, name: str, *, folder: Path, secrets: dict[str, dict[str, bytes]], claims: dict[str, Path], hosts: dict[str, str],
                 start: Callable):
        self.pod, self.name, self.ip, self._start = pod, name, address(), start
        self.hosts, self.servers = hosts, {}
        self.deleted = False
        self._volumes = {volume["name"]: self._make(volume, folder / volume["name"], secrets, claims) for volume in pod.spec["volumes"]}

    @staticmethod
    def _make(volume: dict, folder: Path, secrets: dict, claims: dict) -> Path:
        if "persistentVolumeClaim" in volume:
            return claims[volume["persistentVolumeClaim"]["claimName"]]
        folder.mkdir(parents=True)
        if "secret" in volume:  # as the kubelet has it: links into a folder of that moment, readable by the group of volumes
            (folder / "..now").mkdir()
            for name, content in secrets[volume["secret"]["secretName"]].items():
                (folder / "..now" / name).write_bytes(content)
                os.chmod(folder / "..now" / name, volume["secret"]["defaultMode"] | 0o440)
                os.symlink(f"..now/{name}", folder / name)
        return folder

    def path(self, container: dict, inside: str) -> Path:
        """Where what a container calls ``inside`` is on this machine."""
        for mount in sorted(container["volumeMounts"], key=lambda mount: -len(mount["mountPath"])):
            if inside == mount["mountPath"] or inside.startswith(mount["mountPath"] + "/"):
                return self._volumes[mount["name"]] / inside[len(mount["mountPath"]) + 1:]
        raise KeyError(f"{container['name']} has nothing mounted at {inside}: the root is read only")

    def environment(self, container: dict) -> dict[str, str]:
        found = {"TMPDIR": str(self.path(container, "/tmp"))} if any(m["mountPath"] == "/tmp" for m in container["volumeMounts"]) else {}
        for one in container.get("env", ()):
            value = self.ip if "valueFrom" in one else self._filled(one["value"], found)
            found[one["name"]] = str(self.path(container, value)) if value.startswith("/") else value
        return found

    @staticmethod
    def _filled(text: str, variables: dict[str, str]) -> str:
        return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text)

    def command(self, container: dict) -> list[str]:
        """The words of its process."""
        variables, words = self.environment(container), []
        for word in container.get("args", ()):
            word = self._filled(word, variables).replace("0.0.0.0", self.ip)
            for name in sorted(self.hosts, key=len, reverse=True):  # some end like others
                word = word.replace(name, self.hosts[name])
            words.append(str(self.path(container, word)) if word.startswith("/") else word)
        command = [str(self.path(container, word)) if word.startswith("/") else word for word in container.get("command", ())]
        if command[:1] == ["python"]:
            command[:1] = [sys.executable, "-P"]
        return [*(command or ENTRYPOINT), *words]

    def run(self, container: dict):
        return self._start(self.command(container), self.environment(container), f"{self.name}-{container['name']}")

    def start(self, *, without: tuple[str, ...] = (), seconds: float = 240.0) -> None:
        """Init containers to their ends, sidecars until their startup probe is content, then the others. ``without``: containers to leave out."""
        for container in self.pod.containers:
            if container["name"] in without:
                continue
            process = self.run(container)
            if container in self.pod.servers:
                self.servers[container["name"]] = process
                if container.get("restartPolicy") == "Always":
                    self.wait(container, "startup", seconds)
            else:
                assert process.wait(seconds) == 0, f"{self.name}: {container['name']} ended with {process.code}\n{process.tail(200)}"

    def probe(self, container: dict, kind: str) -> int:
        """Status of what a probe asks for; 0: no answer."""
        ask = container[f"{kind}Probe"]["httpGet"]
        return get(self.url(container, ask["port"]) + ask["path"], container[f"{kind}Probe"]["timeoutSeconds"])[0]

    def url(self, container: dict, port: str) -> str:
        [number] = [one["containerPort"] for one in container["ports"] if one["name"] == port]
        return f"http://{self.ip}:{number}"

    def wait(self, container: dict, kind: str, seconds: float) -> None:
        deadline, process = time.monotonic() + seconds, self.servers[container["name"]]
        while self.probe(container, kind) != 200:
            assert process.poll() is None, f"{self.name}: {container['name']} ended with {process.code}\n{process.tail(60)}"
            assert time.monotonic() < deadline, f"{self.name}: no {kind} of {container['name']} within {seconds:g} s\n{process.tail(60)}"
            time.sleep(0.2)

    @property
    def ready(self) -> bool:
        return len(self.servers) == len(self.pod.servers) and all(self.probe(container, "readiness") == 200 for container in self.pod.servers)

    def terminate(self, name: str) -> None:
        """SIGTERM to the container's process alone."""
        self.servers[name].signal(signal.SIGTERM)

    def as_kubernetes_has_it(self, ready: bool) -> dict:
        meta = {"name": self.name, "namespace": NAMESPACE, "uid": self.name, "resourceVersion": "1", **self.pod.template["metadata"]}
        if self.deleted:
            meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": [{"name": "x", "image": "x"}]},
                "status": {"phase": "Running", "podIP": self.ip, "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}}


class PodList:
    """The Kubernetes API, as far as somebody who lists and watches pods of a namespace can tell. ``kubeconfig``: a file that leads to it."""

    def __init__(self, folder: Path):
        self._pods: dict[str, dict] = {}
        self._events: list[dict] = []
        self._changed = threading.Condition()
        self.asked: list[str] = []
        self._server = http.server.ThreadingHTTPServer((address(), 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.kubeconfig = folder / "kubeconfig"
        where = "http://{}:{}".format(*self._server.server_address)
        self.kubeconfig.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c", "clusters": [{"name": "c", "cluster": {"server": where}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}], "users": [{"name": "c", "user": {}}]}))

    def put(self, pod: RunningPod, ready: bool) -> None:
        with self._changed:
            kind = "MODIFIED" if pod.name in self._pods else "ADDED"
            self._pods[pod.name] = pod.as_kubernetes_has_it(ready)
            self._events.append({"type": kind, "object": self._pods[pod.name]})
            self._changed.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type:
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_) -> None:
                pass

            def do_GET(self) -> None:
                api.asked.append(self.path)
                with api._changed:
                    at, items = len(api._events), list(api._pods.values())
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                if "watch=true" in self.path:
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    return self._watch(int(re.search(r"resourceVersion=(\d+)", self.path)[1]))
                body = json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": str(at)}, "items": items}).encode()
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _watch(self, at: int) -> None:
                while True:
                    with api._changed:
                        api._changed.wait_for(lambda: len(api._events) > at)
                        event, at = api._events[at], at + 1
                    line = json.dumps(event).encode() + b"\n"
                    try:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    except OSError:
                        return

        return Handler


def owner_only(path: Path) -> bool:
    return not stat.S_IMODE(path.stat().st_mode) & 0o077
