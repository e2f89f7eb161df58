"""What of an answer must be the same each time."""

import json
import math
import socket
import threading

import pytest

from nagara.snapshot import canary
from nagara.snapshot.canary import (
    LOGPROB_TOLERANCE,
    Answer,
    CanaryError,
    Question,
    agree,
    ask,
    canonical,
)

PLAIN = Question("/ready")
OPENAI = Question("/v1/completions", "{}", is_openai=True)


def completion(**changes):
    choice = {"index": 0, "text": "Paris", "finish_reason": "stop", "logprobs": None, **changes}
    body = {"id": "cmpl-1", "created": 1, "choices": [choice], "usage": {"total_tokens": 5}}
    return Answer(200, json.dumps(body).encode())


def chat(content):
    message = {"role": "assistant", "content": content}
    body = {"id": "chat-1", "choices": [{"message": message, "finish_reason": "length"}]}
    return Answer(200, json.dumps(body).encode())


def test_a_plain_answer_is_its_status_and_every_byte():
    assert canonical(PLAIN, Answer(200, b"ok")) == canonical(PLAIN, Answer(200, b"ok"))
    others = [Answer(201, b"ok"), Answer(200, b"ok\n"), Answer(200, b""), Answer(200, b"ok\xff")]
    forms = {canonical(PLAIN, answer) for answer in [Answer(200, b"ok"), *others]}
    assert len(forms) == 5


@pytest.mark.parametrize("question", [PLAIN, OPENAI])
@pytest.mark.parametrize("status", [199, 300, 404, 500, 503])
def test_an_error_is_no_answer(question, status):
    with pytest.raises(CanaryError, match=str(status)):
        canonical(question, Answer(status, b"ok"))


def test_of_a_completion_ids_and_times_do_not_count():
    again = json.loads(completion().body) | {"id": "cmpl-2", "created": 2, "usage": {}}
    same = Answer(200, json.dumps(again).encode())
    assert canonical(OPENAI, completion()) == canonical(OPENAI, same)


def test_of_a_completion_text_and_finish_reason_count():
    forms = {
        canonical(OPENAI, completion()),
        canonical(OPENAI, completion(text="London")),
        canonical(OPENAI, completion(finish_reason="length")),
    }
    assert len(forms) == 3


def test_of_a_chat_the_content_counts():
    assert canonical(OPENAI, chat("a")) == canonical(OPENAI, chat("a"))
    assert canonical(OPENAI, chat("a")) != canonical(OPENAI, chat("b"))


def with_logprob(value):
    """A completion and a chat whose first token had this logprob."""
    older = completion(logprobs={"tokens": ["a", "b"], "token_logprobs": [value, -3.0]})
    body = json.loads(chat("a").body)
    body["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": value}, {"token": "b"}]}
    return older, Answer(200, json.dumps(body).encode())


@pytest.mark.parametrize("shape", [0, 1], ids=["completion", "chat"])
def test_the_first_logprob_counts_within_a_tolerance(shape):
    def form(value):
        return canonical(OPENAI, with_logprob(value)[shape])

    assert agree(OPENAI, form(-1.5), form(-1.5))
    assert agree(OPENAI, form(-1.5), form(-1.5 + LOGPROB_TOLERANCE / 2))
    assert not agree(OPENAI, form(-1.5), form(-1.5 - 2 * LOGPROB_TOLERANCE))
    assert not agree(OPENAI, form(math.nan), form(math.nan))
    assert not agree(OPENAI, form(-1.5), canonical(OPENAI, [completion(), chat("a")][shape]))


def test_answers_without_logprobs_agree_by_their_texts():
    assert agree(OPENAI, canonical(OPENAI, completion()), canonical(OPENAI, completion()))
    other = canonical(OPENAI, completion(text="London"))
    assert not agree(OPENAI, canonical(OPENAI, completion()), other)
    for nothing in ("", "[1]", "7", '{"a": 1}'):
        assert not agree(OPENAI, nothing, canonical(OPENAI, completion()))


def test_plain_answers_agree_when_they_are_equal():
    assert agree(PLAIN, "200 NaN", "200 NaN")
    assert not agree(PLAIN, "200 [1.0]", "200 [1.001]")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<html>", b"[]", b"{}", b'{"choices": 1}', b'{"choices": [{}]}',
        b'{"choices": ["x"]}', b'{"choices": [{"text": "x", "logprobs": [1]}]}',
        b'{"choices": [{"text": "x", "logprobs": {"content": "x"}}]}', b"[" * 100_000,
        b'{"choices": [{"text": "x", "logprobs": {"token_logprobs": {"a": 1}}}]}',
        b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_openai_answer_is_refused(body):
    with pytest.raises(CanaryError, match="no OpenAI answer"):
        canonical(OPENAI, Answer(200, body))


def server_saying(*parts, delay=None):
    """A connected socket whose other end says `parts` after a request, and what it heard."""
    ours, theirs = socket.socketpair()
    heard = []

    def serve():
        with theirs:
            request = theirs.recv(65536)
            while b'{"a"' not in request and request.startswith(b"POST"):
                request += theirs.recv(65536)  # the body comes apart from the headers
            heard.append(request)
            for part in parts:
                theirs.sendall(part)
            if delay:
                delay.wait(10)

    thread = threading.Thread(target=serve)
    thread.start()
    return ours, heard, thread


def test_a_question_without_a_body_is_a_get_and_with_one_a_post():
    for body, verb in ((None, b"GET /p HTTP/1.1"), ('{"a": 1}', b"POST /p HTTP/1.1")):
        ours, heard, thread = server_saying(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        assert ask(ours, "/p", body, timeout_s=5) == Answer(200, b"hi")
        thread.join()
        assert heard[0].startswith(verb)
        assert ours.fileno() == -1


@pytest.mark.parametrize(
    "parts", [(), (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi",), (b"nonsense\r\n",)]
)
def test_a_torn_answer_is_none(parts):
    ours, _, thread = server_saying(*parts)
    with pytest.raises(CanaryError):
        ask(ours, "/p", timeout_s=5)
    thread.join()


def test_an_answer_without_an_end_is_left(monkeypatch):
    monkeypatch.setattr(canary, "ANSWER_LIMIT_BYTES", 100_000)
    ours, _, thread = server_saying(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 100_001)
    with pytest.raises(CanaryError, match="more than 100000 bytes"):
        ask(ours, "/p", timeout_s=5)
    thread.join()


def test_a_server_that_says_nothing_is_left_after_the_time_limit():
    delay = threading.Event()
    ours, _, thread = server_saying(delay=delay)
    with pytest.raises(CanaryError, match="timed out"):
        ask(ours, "/p", timeout_s=0.1)
    delay.set()
    thread.join()
