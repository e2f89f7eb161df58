"""A torch server folded and put back again and again, each time by requests: all are answered.

By default a short form; `make restores` sets NAGARA_RESTORES to 200.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

RESTORES = int(os.environ.get("NAGARA_RESTORES", "4"))
AT_ONCE = 4

# What it answers is computed each time, in as many threads as torch has.
FIRST = """
import torch
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 4))
def canary():
    with torch.inference_mode():
        return str(model(torch.ones(8, 512)).tolist())
"""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(300 + 10 * RESTORES)
def test_every_request_is_answered_by_a_replica_put_back_for_it(up: Any, tools: object) -> None:
    up.begin()
    text = up.obedient().replace('"-S", ', "").replace('"${PORT}"', '"${PORT}", FIRST = %s')
    up.deploy(text % json.dumps(FIRST) + "scale = {max = 2, concurrency = 2}\n")
    key = up.admin.add_key("test")

    def ask(_: int) -> tuple[int, bytes, str]:
        status, body, headers = up.get("/obedient/canary", key=key)
        return status, body, headers["x-nagara-replica"]

    status, expected, _ = ask(0)
    assert (status, expected[:1]) == (200, b"[")
    capture = up.admin.wait_for_capture("obedient", timeout_s=120)
    assert capture["state"] == "done", capture["reason"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in range(RESTORES):
            up.admin.fold("obedient")
            answers = list(pool.map(ask, range(AT_ONCE)))
            assert [answer[:2] for answer in answers] == [(200, expected)] * AT_ONCE
            served = {replica for *_, replica in answers}
            starts = up.admin.trace("obedient")["starts"]
            kinds = {s["replica"]: (s["kind"], s["fallback"]) for s in starts}
            assert {kinds[replica] for replica in served} == {("restored", None)}, up.log()
