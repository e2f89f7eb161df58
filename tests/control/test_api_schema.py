"""The admin API against its own OpenAPI document: whatever a generator of requests thinks of."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    negative_data_rejection,
    positive_data_acceptance,
)

from nagara.control.control import Control, Ready  # noqa: E402
from nagara.testing.fake_node import FakeNode  # noqa: E402
from nagara.testing.pools import a_machine  # noqa: E402

APP = '[app.smol]\nimage = "host"\ncommand = ["x"]\n'
# For each operation, of requests that fit the document and of others.
_EXAMPLES = int(os.environ.get("NAGARA_EXAMPLES", "6"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and token of a control process on a thread of its own."""
    folder = tmp_path_factory.mktemp("control")
    ready: list[Ready] = []
    is_up, held = threading.Event(), []

    async def run() -> None:
        node = FakeNode()
        control = Control(folder / "state", node, a_machine(2))
        held.append((asyncio.get_running_loop(), control))

        def serves(found: Ready) -> None:
            ready.append(found)
            is_up.set()

        try:
            await control.run(serves, app_file=(APP, "app.toml"))
        finally:
            await node.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert is_up.wait(60)
    yield ready[0].url, (folder / "state/admin.token").read_text().strip()
    loop, control = held[0]
    loop.call_soon_threadsafe(control.stop)
    thread.join(60)


@pytest.fixture(scope="module")
def document(served: tuple[str, str]) -> dict[str, Any]:
    import requests

    url, token = served
    headers = {"Authorization": f"Bearer {token}"}
    answer = requests.get(f"{url}/api/openapi", headers=headers, timeout=20)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    # A stream has no end to wait for.
    found["paths"] = {path: v for path, v in found["paths"].items() if path != "/api/events"}
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_to_the_api_is_answered_wrongly(
    served: tuple[str, str], document: dict[str, Any]
) -> None:
    url, token = served
    schema = schemathesis.openapi.from_dict(document)
    tried = []
    for found in schema.get_all_operations():
        operation = found.ok()
        tried.append(operation.label)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _try(operation, mode, url, token)
    assert len(tried) == sum(len(methods) for methods in document["paths"].values())


def _try(operation: Any, mode: Any, url: str, token: str) -> None:
    @settings(
        max_examples=_EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30)
        # What is text to the schema may still be no app file: that it is refused is no fault.
        case.validate_response(
            response, excluded_checks=[positive_data_acceptance, negative_data_rejection]
        )
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            error = json.loads(response.content)["error"]
            assert error["message"]
            assert error["code"]
        stranger = case.call(base_url=url, headers={"Authorization": "Bearer x"}, timeout=30)
        assert stranger.status_code in (400, 401, 404, 405)

    check()
