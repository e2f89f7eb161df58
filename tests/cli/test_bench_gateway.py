"""What the gateway's measurements count, on little load."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from nagara.cli.bench_apps import highest
from nagara.cli.bench_load import Load
from nagara.cli.main import main


@pytest.fixture
def upstream() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "nagara.cli.bench_upstream", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.wait()
    process.stdout.close()


def load(**job: object) -> dict[str, list[float]]:
    return asyncio.run(Load(job).run())


def test_every_request_of_the_rate_is_timed_from_the_moment_it_was_due(upstream: str) -> None:
    found = load(url=upstream, path="/wait", rate=50, seconds=1)
    assert found["errors"] == 0
    assert len(found["latencies_ms"]) == 50
    assert min(found["latencies_ms"]) >= 20.0


def test_every_event_of_a_stream_is_timed(upstream: str) -> None:
    found = load(url=upstream, path="/stream", streams=2, seconds=0.1)
    assert found["errors"] == 0
    assert len(found["delays_ms"]) == 2 * 50
    assert min(found["delays_ms"]) > 0.0


def test_what_does_not_answer_is_an_error_and_no_latency() -> None:
    found = load(url="http://127.0.0.1:9", path="/wait", rate=10, seconds=0.3)
    assert (found["errors"], found["latencies_ms"]) == (3, [])


def test_the_slowest_of_new_rounds_is_told_by_its_bin() -> None:
    before = {0.1: 5, 1.0: 6, float("inf"): 6}
    assert highest(before, {0.1: 9, 1.0: 10, float("inf"): 10}) == 0.1
    assert highest(before, {0.1: 9, 1.0: 11, float("inf"): 11}) == 1.0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_the_commands_print_the_agreed_names() -> None:
    arguments = ["bench", "gateway", "--rounds", "1", "--seconds", "1", "--json"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    names = {
        "added_p50_ms", "added_p99_ms", "requests_per_s", "token_delay_p50_ms",
        "from_zero_extra_ms", "errors",
    }  # fmt: skip
    document = json.loads(result.stdout)
    assert names <= set(document)
    assert document["errors"] == document["stream_errors"] == 0
    assert document["requests_per_s"] > 0

    arguments = ["bench", "apps", "--count", "30", "--seconds", "3", "--json"]
    document = json.loads(CliRunner().invoke(main, arguments, catch_exceptions=False).stdout)
    assert document["apps"] == 30
    assert document["decisions"] >= 1
    assert document["rss_bytes"] > 10e6
