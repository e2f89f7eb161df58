from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nagara.sandbox.rights import CAP_SYS_RESOURCE, has_capability

from .foreign import SERVERS, ForeignServer

CLONES = 3


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_a_server_that_is_not_ours_is_saved_and_comes_back_several_times_at_once(
    up: Any, tools: object, server: ForeignServer
) -> None:
    if not server.is_there:
        pytest.skip(f"needs {server.program}")
    up.begin()
    user = "www-data" if has_capability(CAP_SYS_RESOURCE) else "root"
    up.deploy(server.app(most=CLONES, user=user))
    key = up.admin.add_key("test")
    assert up.get(f"/{server.name}/", key=key)[:2] == (200, b"ready")
    capture = up.admin.wait_for_capture(server.name, timeout_s=120)
    assert capture["state"] == "done", capture["reason"]
    up.admin.fold(server.name)

    def ask(path: str) -> tuple[int, bytes, str]:
        status, body, headers = up.get(f"/{server.name}{path}", key=key)
        return status, body, headers["x-nagara-replica"]

    with ThreadPoolExecutor(CLONES * 2) as pool:
        answers = list(pool.map(ask, ["/kept", "/file"] * CLONES))
    assert {(status, body) for status, body, _ in answers} == {answers[0][:2]}
    assert answers[0][0] == 200
    assert len(answers[0][1]) == 16  # made by random at the one start that was saved
    starts = {start["replica"]: start for start in up.admin.trace(server.name)["starts"]}
    served = {replica for _, _, replica in answers}
    assert {starts[replica]["kind"] for replica in served} == {"restored"}, up.log()


@pytest.mark.root
@pytest.mark.skipif(has_capability(CAP_SYS_RESOURCE), reason="needs to lack CAP_SYS_RESOURCE")
def test_a_server_of_another_user_that_cannot_be_saved_here_says_what_is_lacking(
    up: Any, tools: object
) -> None:
    nginx = SERVERS[0]
    if not nginx.is_there:
        pytest.skip("needs nginx")
    up.begin()
    up.deploy(nginx.app(user="www-data"))
    key = up.admin.add_key("test")
    assert up.get("/nginx/kept", key=key)[0] == 200
    capture = up.admin.wait_for_capture("nginx", timeout_s=120)
    assert capture["state"] == "off"
    assert "as user 33" in capture["reason"]
    assert "CAP_SYS_RESOURCE" in capture["reason"]
