"""Addresses and headers: pure parts of the gateway."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from nagara.contract.replica import Canary
from nagara.control.app import App
from nagara.control.headers import request_headers, response_headers
from nagara.control.refusal import Refusal
from nagara.control.routing import app_of_host, app_of_model, check_path, target_of_path


def app(name: str, *models: str, served: str | None = None) -> App:
    return App(name, "host", ("x",), 80, "/", Canary("/"), models=models, served_model=served)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("smol.localhost", "smol"),
        ("SMOL.example.org:8080", "smol"),
        ("localhost", None),
        ("localhost:80", None),
        ("127.0.0.1:80", None),
        ("10.0.0.1", None),
        ("[::1]:80", None),
        ("", None),
        (None, None),
        (".x", None),
    ],
)
def test_the_first_label_of_a_host_name_is_an_app(host: str | None, name: str | None) -> None:
    assert app_of_host(host) == name


@pytest.mark.parametrize(
    ("path", "name", "rest"),
    [
        ("/smol", "smol", "/"),
        ("/smol/", "smol", "/"),
        ("/smol?a=/b", "smol", "/?a=/b"),
        ("/smol/v1/x?a=%2F&b", "smol", "/v1/x?a=%2F&b"),
        ("/smol//x", "smol", "//x"),
        ("/", "", "/"),
    ],
)
def test_the_first_segment_of_a_path_is_an_app(path: str, name: str, rest: str) -> None:
    target = target_of_path(path)
    assert (target.app, target.path, target.prefix) == (name, rest, f"/{name}")


@pytest.mark.parametrize("path", [
    "/a/../b", "/a/%2e%2E/b", "/a/.", "/a/..%2fb", "/a\\b", "a", "*", "/sleep#x", "/sleep?a#x",
])  # fmt: skip
def test_paths_that_mean_another_path_are_refused(path: str) -> None:
    with pytest.raises(Refusal) as caught:
        check_path(path)
    assert caught.value.status == 400


def test_an_apps_name_goes_before_a_models() -> None:
    apps = [app("one", "m"), app("m"), app("two", "n", served="/models/n"), app("three", "k", "n")]
    assert app_of_model("m", apps) is apps[1]
    assert app_of_model("/models/n", apps) is apps[2]
    assert app_of_model("z", apps) is None
    with pytest.raises(Refusal, match="ask for one of three, two"):
        app_of_model("n", apps)


def test_request_headers() -> None:
    given = CIMultiDictProxy(
        CIMultiDict(
            [
                ("Host", "h"), ("Connection", "close, X-A"), ("connection", "x-b"), ("X-A", "1"),
                ("X-B", "1"), ("Transfer-Encoding", "chunked"), ("Cookie", "a"), ("Cookie", "b"),
                ("X-Forwarded-For", "1.2.3.4"), ("Authorization", "Bearer own"),
                ("Content-Length", "5"), ("Expect", "100-continue"), ("Upgrade", "h2c"),
            ]
        )
    )  # fmt: skip
    made = request_headers(given, peer="::1", prefix="", is_key_ours=False, has_new_body=True)
    assert list(made.items()) == [
        ("Host", "h"), ("Cookie", "a"), ("Cookie", "b"), ("X-Forwarded-For", "1.2.3.4, ::1"),
        ("Authorization", "Bearer own"), ("X-Forwarded-Proto", "http"), ("X-Forwarded-Host", "h"),
    ]  # fmt: skip


def test_response_headers_cannot_pose_as_ours() -> None:
    given = CIMultiDictProxy(
        CIMultiDict(
            [("X-Nagara-Replica", "a"), ("Set-Cookie", "1"), ("Set-Cookie", "2"),
             ("Keep-Alive", "5")]
        )
    )  # fmt: skip
    made = response_headers(given, {"x-nagara-replica": "b"})
    assert sorted(made.items()) == [("Set-Cookie", "1"), ("Set-Cookie", "2"),
                                    ("x-nagara-replica", "b")]  # fmt: skip
