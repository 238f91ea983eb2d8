"""The tier over HTTP: is it alive, is it ready, what does it hold."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from transport.errors import ConfigError


async def serve_http(host: str, port: int, *, registry: CollectorRegistry, missing: Callable[[], str],
                     state: Callable[[], dict]) -> tuple[web.AppRunner, int]:
    """/healthz (the loop runs), /readyz (503 with what ``missing`` names, unless that is nothing), /metrics and /state. Returns the
    runner, to be cleaned up, and the port (0: any free one). Raises ``ConfigError``."""

    async def healthz(_):
        return web.Response(text="ok")

    async def readyz(_):
        what = missing()
        return web.Response(status=503, text=what) if what else web.Response(text="ready")

    async def metrics(_):
        return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def show_state(_):
        return web.json_response(state())

    app = web.Application()
    for path, answer in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics), ("/state", show_state)):
        app.router.add_get(path, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"--http {host}:{port}: {error.strerror}") from error
    return runner, site._server.sockets[0].getsockname()[1]
