"""Where the time of starts went, as drawn for people."""

from typing import Any

from rich.console import Console

from nagara.cli.bench_coldstart import Kind
from nagara.cli.waterfall import waterfall

STAGES = {"acquire": 0.01, "files": 0.02, "host": 0.3, "device": 0.0, "canary": 0.1}
PARTS = {"tool": 0.05, "read": 0.125, "map": 0.01, "runtime": 0.06, "hooks": 0.035}
RESTORED = {
    "kind": "restored",
    "total_s": 0.44,
    "stages": {**STAGES, "unaccounted": 0.01},
    "host": {**PARTS, "unaccounted": 0.02},
}
PLAIN: dict[str, Any] = {**RESTORED, "kind": "plain", "host": None}


def drawn(*starts: dict[str, Any]) -> list[str]:
    console = Console(width=120, record=True, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(waterfall(starts))
    return capture.get().splitlines()


def test_the_parts_of_the_host_stage_stand_below_it() -> None:
    lines = drawn(PLAIN, RESTORED)
    (host,) = (number for number, line in enumerate(lines) if "█ host" in line)
    below = [line.split() for line in lines[host + 1 : host + 7]]
    assert below[1] == ["read", "125", "ms"]  # under the restored start; nothing under the plain
    assert [words[0] for words in below] == [*PARTS, "unaccounted"]
    assert lines[host + 1].index("50 ms") > lines[host].index("300 ms")


def test_a_start_of_which_no_parts_are_known_has_no_rows_of_them() -> None:
    assert not any("runtime" in line for line in drawn(PLAIN))


def test_weights_that_were_read_again_are_shown_with_their_speed() -> None:
    read = {"size_bytes": 16 * 10**9, "seconds": 2.0}
    files = {"way": "host", "kind": "host", "weights": read}
    assert any("weights 16 GB at 8.00 GB/s" in line for line in drawn({**RESTORED, "files": files}))


def test_a_measurement_gives_the_medians_of_the_parts() -> None:
    restored = Kind("restored_warm", "restored", "restored", is_cold=False)
    for read_s in (0.2, 0.1, 0.4):
        start = {**RESTORED, "host": {**PARTS, "read": read_s, "unaccounted": 0.0}}
        restored.starts.append(start)
        restored.first_token_s.append(1.0)
        restored.disk_bytes.append(0)
    assert restored.figures()["host"] == {**PARTS, "read": 0.2, "unaccounted": 0.0}
    plain = Kind("plain_warm", "plain", "plain", is_cold=False)
    plain.starts, plain.first_token_s, plain.disk_bytes = [PLAIN], [1.0], [0]
    assert plain.figures()["host"] is None
