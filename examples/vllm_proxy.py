"""A small router in front of vLLM prefill and decode servers that use ``KvxferConnector``.

    python examples/vllm_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Each request goes to a prefill server first, with one token to make; its ``kv_transfer_params`` go
on to a decode server unchanged, with the request, and what that answers goes back to the client as
it comes.  Where no prefill server answers, decode computes the prompt itself.

It needs aiohttp, which vLLM brings along.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
from aiohttp import web

logger = logging.getLogger("vllm_proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
PASSED_ON = ("Authorization", "X-Request-Id")
"""Headers of the client that both servers see."""
PREFILL_SECONDS = 300.0
"""For the whole answer of a prefill server, its queue included."""


class Proxy:
    """``prefill`` and ``decode`` are base URLs; each list is used in turns."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(self._open)
        for path in PATHS:
            app.router.add_post(path, self.serve)
        return app

    async def _open(self, _: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            yield

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        body["kv_transfer_params"] = await self._prefilled(request.path, body, headers)
        return await self._decoded(request, body, headers)

    async def _prefilled(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` of a prefill server; None if there are none."""
        first = {**body, "max_tokens": 1, "n": 1, "stream": False}
        first["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        for key in ("stream_options", "min_tokens"):
            first.pop(key, None)
        url = next(self._prefill) + path
        timeout = aiohttp.ClientTimeout(total=PREFILL_SECONDS)
        assert self._session is not None
        try:
            async with self._session.post(
                url, json=first, headers=headers, timeout=timeout
            ) as response:
                response.raise_for_status()
                params: dict[str, Any] | None = (await response.json()).get("kv_transfer_params")
                return params
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("decode prefills, because %s does not: %s", url, error)
            return None

    async def _decoded(
        self, request: web.Request, body: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        """What a decode server answers, passed on as it comes."""
        url = next(self._decode) + request.path
        assert self._session is not None
        try:
            answer = await self._session.post(url, json=body, headers=headers)
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": f"{url}: {error}"}}, status=502)
        async with answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    web.run_app(Proxy(options.prefill, options.decode).app(), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
