"""Measures what HTTP and tokenizing in the step loop's own process cost it.

The server and the step loop share this process, as they do in `nagara engine serve`. In turn:

    alone       `Engine.generate` with the fixed work
    http        the same work asked for by as many streaming clients, in a process of their own
    posted      alone, while another process posts long texts to `/tokenize`
    elsewhere   alone, while another process tokenizes the same texts for itself

`posted` against `elsewhere` is what sharing costs: the processor time is spent in both.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from nagara.engine.bench_engine import NEW_TOKENS, Note, make_prompts
from nagara.engine.engine import Engine
from nagara.engine.errors import EngineError
from nagara.engine.request import SamplingParams
from nagara.engine.server import ModelServer, ServeSettings
from nagara.engine.settings import EngineSettings

CLIENTS = (sys.executable, "-m", "nagara.engine.bench_clients")
KINDS = ("alone", "http", "posted", "elsewhere")


def run_http(folder: Path, settings: EngineSettings, runs: int, note: Note) -> dict[str, Any]:
    """Ratios of the step loop's speed beside HTTP and tokenizing to its speed alone.

    Raises:
        EngineError: the model cannot be run, or a client failed.
    """
    return asyncio.run(_run(folder, settings, runs, note))


async def _run(folder: Path, settings: EngineSettings, runs: int, note: Note) -> dict[str, Any]:
    server = ModelServer(ServeSettings(folder, 0, model_name="bench", engine=settings))
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        await server.load()
        bench = _HttpBench(server.engine, port, folder)
        await bench.alone()
        found: dict[str, list[_Phase]] = {kind: [] for kind in KINDS}
        for i in range(runs):
            for kind in KINDS:
                found[kind].append(await bench.measure(getattr(bench, kind)))
                note(f"{kind} {i + 1}/{runs}: {found[kind][-1].wall_s:.1f} s")
    finally:
        await runner.cleanup()
        await asyncio.to_thread(server.close)
    return {
        "http_ratio": _ratio(found["alone"], found["http"]),
        "tokenize_ratio": _ratio(found["elsewhere"], found["posted"]),
        "by_kind": {kind: _figures(phases) for kind, phases in found.items()},
    }


class _Phase:
    """One measured stretch of the step loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began_s = time.perf_counter()
        self._before = engine.stats()

    def end(self) -> "_Phase":
        after, before = self._engine.stats(), self._before
        self.wall_s = time.perf_counter() - self._began_s
        self.steps = max(1, after.steps - before.steps)
        host_ms = after.host_ms_per_step * after.steps - before.host_ms_per_step * before.steps
        self.host_ms_per_step = host_ms / self.steps
        return self


class _HttpBench:
    def __init__(self, engine: Engine, port: int, folder: Path) -> None:
        self._engine, self._port, self._folder = engine, port, folder
        self._prompts = make_prompts(engine.config.vocab)
        text = "the quick brown fox jumps over the lazy dog "
        self._text = text * ((1 << 20) // len(text))

    async def measure(self, work: Callable[[], Awaitable[None]]) -> _Phase:
        phase = _Phase(self._engine)
        await work()
        return phase.end()

    async def alone(self) -> None:
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        await asyncio.to_thread(self._engine.generate, self._prompts, params)

    async def http(self) -> None:
        fixed = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        bodies = [
            {**fixed, "prompt": prompt, "stream_options": {"include_usage": True}}
            for prompt in self._prompts
        ]
        client = await asyncio.create_subprocess_exec(*CLIENTS, "ask", stdin=-1, stdout=-1)
        asked = json.dumps({"port": self._port, "bodies": bodies}).encode()
        out, _ = await client.communicate(asked)
        if client.returncode or json.loads(out)["tokens"] != [NEW_TOKENS] * len(bodies):
            raise EngineError("the clients did not get their answers", where="http")

    async def posted(self) -> None:
        await self._beside("post", {"port": self._port, "text": self._text})

    async def elsewhere(self) -> None:
        await self._beside("tokenize", {"folder": str(self._folder), "text": self._text})

    async def _beside(self, command: str, asked: dict[str, Any]) -> None:
        other = await asyncio.create_subprocess_exec(*CLIENTS, command, stdin=-1, stdout=-1)
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            other.stdin.write(json.dumps(asked).encode() + b"\n")
            await other.stdin.drain()
            if not await other.stdout.readline():  # it has begun
                raise EngineError("the other process failed", where=command)
            await self.alone()
        finally:
            if other.returncode is None:
                other.kill()
            await other.communicate()


def _ratio(base: Sequence[_Phase], beside: Sequence[_Phase]) -> float:
    """How fast the second is against the first, in the middle of the runs."""
    return statistics.median(a.wall_s / b.wall_s for a, b in zip(base, beside, strict=True))


def _figures(phases: Sequence[_Phase]) -> dict[str, float]:
    return {
        "wall_s": statistics.median(phase.wall_s for phase in phases),
        "step_ms": statistics.median(phase.wall_s / phase.steps * 1e3 for phase in phases),
        "host_ms_per_step": statistics.median(phase.host_ms_per_step for phase in phases),
    }
