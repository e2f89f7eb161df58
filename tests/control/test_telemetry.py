"""Figures, traces, logs: what control tells of requests, starts and reserved seconds."""

import asyncio
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from nagara.cli.json_lines import JsonLines
from nagara.control.metrics import Counter, Histogram, Metrics
from nagara.control.occupancy import Occupancy, Use, utilisation
from nagara.control.tracing import MAX_WAITING, Tracer
from nagara.testing.clock import JumpingClock

PAGE = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()


async def metrics(stand: Any) -> dict[str, float]:
    token = (stand.folder / "admin.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    async with stand.client.get("/metrics", headers=headers) as answer:
        assert answer.status == 200
        lines = (await answer.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_labels_are_escaped_and_buckets_cumulative() -> None:
    counter = Counter("n_total", "Help.", ("app",))
    counter.add('a"\\\n')
    assert list(counter.lines())[-1] == 'n_total{app="a\\"\\\\\\n"} 1'
    histogram = Histogram("t", "Help.", bounds=(1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        histogram.add(seconds=seconds)
    assert list(histogram.lines())[2:] == [
        't_bucket{le="1.0"} 2', 't_bucket{le="2.0"} 3', 't_bucket{le="+Inf"} 4',
        "t_sum 12", "t_count 4",
    ]  # fmt: skip


def test_every_reserved_second_has_one_use() -> None:
    accounts = Occupancy()
    accounts.begin("r1", "a", Use.STARTING, 10.0)
    accounts.begin("r2", "a", Use.STARTING, 10.0)
    accounts.turn("r1", Use.BUSY, 13.0)
    accounts.turn("r1", Use.KEEP_ALIVE, 20.0)
    accounts.end("r1", 25.0)
    accounts.turn("r1", Use.BUSY, 30.0)  # no longer reserved
    assert accounts.spent_s(30.0) == {
        "a": {Use.STARTING: 3.0 + 20.0, Use.BUSY: 7.0, Use.KEEP_ALIVE: 5.0}
    }
    assert utilisation(accounts.spent_s(30.0)["a"]) == 7.0 / 35.0
    assert utilisation({}) is None


@pytest.mark.parametrize("clock", [JumpingClock()])
async def test_a_requests_life_is_counted(stand: Any, text: Any, until: Any) -> None:
    await stand.up(text(scale='{idle = "20s"}'))
    assert (await stand.get("/smol/health"))[0] == 200
    assert (await stand.get("/smol/sleep"))[0] == 403
    waiting = asyncio.create_task(stand.get("/smol/wait"))
    await until(lambda: "GET /wait" in str(stand.replica().requests))
    await stand.clock.advance(7)
    found = await metrics(stand)
    assert found['nagara_requests_present{app="smol"}'] == 1
    assert found['nagara_replicas{app="smol",state="ready"}'] == 1
    stand.replica().let_go()
    await waiting
    await stand.clock.advance(40)
    found = await metrics(stand)
    assert found['nagara_requests_total{app="smol",status="200"}'] == 2
    assert found['nagara_request_seconds_count{app="smol"}'] == 2
    assert found['nagara_starts_total{app="smol",kind="plain"}'] == 1
    assert found['nagara_start_stage_seconds_count{stage="device",kind="plain"}'] == 1
    assert found["nagara_decision_seconds_count"] > 40
    usage = await stand.admin("GET", "/api/usage")
    seconds = usage["apps"]["smol"]["seconds"]
    assert seconds["busy"] == pytest.approx(7.0, abs=1.5)
    assert seconds["keep_alive"] == pytest.approx(20.0, abs=1.5)
    assert usage["all"] == usage["apps"]["smol"]
    assert 0.2 < usage["all"]["allocation_utilisation"] < 0.35


async def test_buffers_are_told_from_what_is_only_kept(stand: Any, text: Any, until: Any) -> None:
    await stand.up(text(scale="{min = 1, concurrency = 1}"))
    requests = [asyncio.create_task(stand.get("/smol/wait")) for _ in range(2)]
    await until(lambda: len(stand.node.live) == 2)
    for replica in list(stand.node.live.values()):
        replica.let_go()
    await asyncio.gather(*requests)

    async def both() -> bool:
        seconds = (await stand.admin("GET", "/api/usage"))["all"]["seconds"]
        return bool(seconds["buffer"] > 0 and seconds["keep_alive"] > 0)

    await until(both)


async def test_metrics_need_the_admin_token(stand: Any, text: Any) -> None:
    await stand.up(text())
    for path in ("/metrics", "/api/usage"):
        async with stand.client.get(path) as answer:  # with an app's key
            assert answer.status == 401


async def test_readyz_says_when_control_stops(stand: Any, text: Any) -> None:
    await stand.up(text())
    async with aiohttp.ClientSession(stand.url) as nobody, nobody.get("/readyz") as answer:
        assert answer.status == 200
        async with nobody.post("/readyz/x") as refused:
            assert refused.status == 401


def test_every_metric_is_documented() -> None:
    names = {one.name for one in vars(Metrics()).values()}
    source = (Path(__file__).parents[2] / "src/nagara/control/telemetry.py").read_text()
    names |= set(re.findall(r'"(?:# HELP )?(nagara_\w+)', source))
    assert {name for name in names if name not in PAGE} == set()


# -- traces --------------------------------------------------------------------------------


class Collector:
    """Takes spans as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.bodies: list[str] = []
        self.status = 200

    async def begin(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.text()
        if self.status == 200:
            self.bodies.append(body)
            for resource in json.loads(body)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    self.spans += scope["spans"]
        return web.Response(status=self.status)

    def named(self, name: str, trace: str) -> dict[str, Any]:
        (span,) = [s for s in self.spans if s["name"] == name and s["traceId"] == trace]
        return span


@pytest.fixture
async def collector() -> Any:
    one = Collector()
    one.url = await one.begin()  # type: ignore[attr-defined]
    yield one
    await one.runner.cleanup()


async def test_a_requests_trace_has_the_start_that_it_waited_for(
    stand: Any, text: Any, until: Any, collector: Any
) -> None:
    await stand.up(text(), otlp=collector.url)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    async with stand.client.get("/smol/echo?secret=1", headers=headers) as answer:
        echoed = await answer.json()
    await until(lambda: any(span["name"] == "request" for span in collector.spans))
    request = collector.named("request", trace)
    assert request["parentSpanId"] == parent
    assert request["kind"] == 2
    start = collector.named("start", trace)
    upstream = collector.named("upstream", trace)
    for part in ("queue", "start", "upstream"):
        assert collector.named(part, trace)["parentSpanId"] == request["spanId"]
    for stage in ("acquire", "files", "host", "device", "canary"):
        span = collector.named(stage, trace)
        assert span["parentSpanId"] == start["spanId"]
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    sent = {name.lower(): value for name, value in echoed["headers"]}
    assert sent["traceparent"] == f"00-{trace}-{upstream['spanId']}-01"
    whole = "".join(collector.bodies)
    assert "secret" not in whole
    assert stand.key not in whole


async def test_a_warm_request_has_no_start_and_begins_its_own_trace(
    stand: Any, text: Any, until: Any, collector: Any
) -> None:
    await stand.up(text(), otlp=collector.url)
    await stand.get("/smol/health")
    async with stand.client.get("/smol/echo", headers={"traceparent": "00-nonsense"}) as answer:
        await answer.read()
    async with stand.client.get(
        "/smol/health", headers={"traceparent": f"00-{'1' * 32}-{'2' * 16}-00"}
    ) as answer:
        await answer.read()
    await until(lambda: sum(span["name"] == "request" for span in collector.spans) == 2)
    paths = {}
    for span in collector.spans:
        if span["name"] == "request":  # the third one's client did not want a trace
            values = {one["key"]: one["value"] for one in span["attributes"]}
            paths[values["url.path"]["stringValue"]] = span["traceId"]
    names = {s["name"] for s in collector.spans if s["traceId"] == paths["/smol/echo"]}
    assert names == {"request", "queue", "upstream"}


async def test_a_collector_that_fails_costs_spans_and_nothing_else(
    stand: Any, text: Any, until: Any, collector: Any
) -> None:
    collector.status = 500
    await stand.up(text(), otlp=collector.url)
    assert (await stand.get("/smol/health"))[0] == 200

    async def are_dropped() -> bool:
        return (await metrics(stand))["nagara_spans_dropped_total"] > 0

    await until(are_dropped)
    assert (await stand.get("/smol/health"))[0] == 200


def test_waiting_spans_are_bounded() -> None:
    tracer = Tracer("http://127.0.0.1:9")
    for _ in range(MAX_WAITING + 5):
        tracer.end(tracer.request("request", None, 1))
    assert tracer.dropped == 5


# -- logs ----------------------------------------------------------------------------------


async def test_each_request_is_a_line_of_json(stand: Any, text: Any, caplog: Any) -> None:
    await stand.up(text())
    with caplog.at_level(logging.INFO, logger="nagara.access"):
        await stand.get("/smol/health?key=secret")
    (record,) = [one for one in caplog.records if one.name == "nagara.access"]
    line = json.loads(JsonLines().format(record))
    assert line["app"] == "smol"
    assert line["status"] == 200
    assert line["path"] == "/smol/health"
    assert line["replica"].startswith("smol-")
    assert line["level"] == "info"
    assert set(line) <= set(re.findall(r"`(\w+)`", PAGE))
    assert "secret" not in json.dumps(line)


def test_an_exception_is_one_line_too() -> None:
    try:
        raise ValueError("x\ny")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "m\n%s", ("1",), sys.exc_info())
    text = JsonLines().format(record)
    assert "\n" not in text
    assert "ValueError" in json.loads(text)["exception"]
