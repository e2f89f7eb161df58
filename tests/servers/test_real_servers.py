"""Each server is started plainly by a request, saved, folded away and unfolded by requests."""

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from .conftest import environment
from .real_servers import SERVERS, Question, RealServer

CLONES = 2
ROUNDS = 2
ANSWER_S = 900


class Caller:
    """Requests to one app through the gateway."""

    def __init__(self, up: Any, app: str) -> None:
        self.admin = up.admin
        self._app = app
        self._address = urlsplit(self.admin.url).netloc
        self._key = self.admin.add_key("test")

    def __call__(self, question: Question) -> tuple[object, str]:
        """What of the answer must be equal, and the replica that gave it."""
        connection = http.client.HTTPConnection(self._address, timeout=ANSWER_S)
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        try:
            body = json.dumps(question.body) if question.body else None
            method = "POST" if body else "GET"
            connection.request(method, f"/{self._app}{question.path}", body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert answer.status == 200, content
        return question.essence(content), answer.headers["x-nagara-replica"]

    def kinds(self, replicas: set[str]) -> dict[str, tuple[str, str | None]]:
        """How these replicas were started, and why not otherwise."""
        starts = self.admin.trace(self._app)["starts"]
        return {
            s["replica"]: (s["kind"], s["fallback"]) for s in starts if s["replica"] in replicas
        }


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("server", SERVERS, ids=str)
def test_a_real_server_comes_back_with_the_same_answers(
    up: Any, tools: object, environments: Path, server: RealServer, request: pytest.FixtureRequest
) -> None:
    if server.name in ("engine", "vllm"):
        request.getfixturevalue("smollm2")
    folder = environment(environments, server.environment) if server.environment else environments
    up.begin()
    up.deploy(server.app(folder))
    ask = Caller(up, server.name)
    expected = {}
    for question in server.questions:
        expected[question.path], replica = ask(question)
    assert ask.kinds({replica})[replica][0] == "plain"
    capture = up.admin.wait_for_capture(server.name, timeout_s=server.capture_s)
    assert capture["state"] == "done", capture["reason"]
    if server.name in ("engine", "vllm"):  # known OpenAI servers: the canary asks for logprobs
        (shown,) = json.loads(up.run("snapshot", "show", server.name).stdout)
        assert json.loads(shown["canary_answer"])[0]["first_logprob"] < 0
    saved: dict[str, object] = {}
    for _ in range(ROUNDS):
        up.admin.fold(server.name)
        with ThreadPoolExecutor(CLONES) as pool:
            answers = list(pool.map(ask, server.questions * CLONES))
        replicas = {replica for _, replica in answers}
        kinds = ask.kinds(replicas)
        assert set(kinds.values()) == {("restored", None)}, (kinds, up.log())
        for question, (answer, _) in zip(server.questions * CLONES, answers, strict=True):
            if question.is_of_start:  # the same as in the start that was saved
                expected[question.path] = saved.setdefault(question.path, answer)
            assert answer == expected[question.path]


@pytest.mark.root
@pytest.mark.slow
def test_locks_databases_and_watches_go_on_in_a_clone(
    up: Any, tools: object, environments: Path
) -> None:
    (holding,) = (server for server in SERVERS if server.name == "holding")
    up.begin()
    up.deploy(holding.app(environments))
    ask = Caller(up, "holding")
    assert ask(Question("/event"))[0] != b""
    capture = up.admin.wait_for_capture("holding", timeout_s=120)
    assert capture["state"] == "done", capture["reason"]
    up.admin.fold("holding")
    assert ask(Question("/rows"))[0] == b"['before']"
    assert ask(Question("/other"))[0] == b"held"
    assert ask(Question("/event"))[0] == ask(Question("/event"))[0] != b""
    assert ask(Question("/release"))[0] == b"released"
    assert ask(Question("/other"))[0] == b"free"
    assert ask(Question("/write"))[0] == b"written"
    assert ask(Question("/rows"))[0] == b"['after', 'before']"
    served = ask(Question("/"))[1]
    assert ask.kinds({served})[served] == ("restored", None)
