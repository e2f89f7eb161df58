"""What the checkpoint tool's log tells of where its time went."""

import pytest

from nagara.snapshot.restore_times import RestoreTimes, restore_times

ONE = b"""\
(00.000000) Version: 4.2.1
(00.010000)      1: Opened local page read 1 (parent 0)
(00.011000)      1: nr_restored_pages: 56355
(00.011100)      1: Create fd for 0
(00.020000) pie: 1: Switched to the restorer 1
(00.024000) pie: 1: Preadv 0x55905d504000:4096... (211 iovs)
(00.124000) pie: 1: `- returned 230830080
(00.124100) pie: 1:    `- skip pagemap
(00.125000) pie: 1: Restoring scheduler params 0.10.0
(00.150000) Restore finished successfully. Tasks resumed.
(00.160000) \tRPC
"""

# The parent reads what it shares with its child; both then read their own at the same time.
TWO = b"""\
(00.010000)      1: Opened local page read 1 (parent 0)
(00.012000)      1: \tpremap 0x1000-0x2000 -> 0x7000
(00.015000)      1: Read piov iovs 1, from 0, len 8192, first 0x7000
(00.045000)      1: nr_restored_pages: 2
(00.050000)      9: Opened local page read 2 (parent 0)
(00.053000)      9: \tpr9-2 Read page from self 1000/0
(00.053100)      9: \tpr9-2 Read page from self 2000/1000
(00.063000)      9: nr_restored_pages: 2
(00.070000) pie: 1: Switched to the restorer 1
(00.071000) pie: 9: Switched to the restorer 9
(00.072000) pie: 9: Preadv 0x5000:4096... (3 iovs)
(00.074000) pie: 1: Preadv 0x6000:4096... (3 iovs)
(00.092000) pie: 1: `- returned 12288
(00.102000) pie: 9: `- returned 12288
(00.110000) Restore finished successfully. Tasks resumed.
"""


def assert_close(times: RestoreTimes, total_s: float, read_s: float, map_s: float) -> None:
    found = (times.total_s, times.read_s, times.map_s)
    assert found == pytest.approx((total_s, read_s, map_s), abs=1e-9)


def test_reading_and_mapping_are_told_apart() -> None:
    assert_close(restore_times(ONE), 0.160, 0.100, 0.001 + 0.004)


def test_what_processes_do_at_the_same_time_counts_once() -> None:
    read_s = 0.030 + 0.010 + 0.030
    assert_close(restore_times(TWO), 0.110, read_s, 0.005 + 0.003 + 0.002)


def test_a_process_with_nothing_of_its_own_to_read_maps_only() -> None:
    log = b"""\
(00.020000) pie: 1: Switched to the restorer 1
(00.023000) pie: 1: Restoring scheduler params 0.10.0
"""
    assert_close(restore_times(log), 0.023, 0.0, 0.003)


@pytest.mark.parametrize("log", [b"", b"something else\n", b"(00.1\n"])
def test_a_log_that_tells_nothing_gives_zeros(log: bytes) -> None:
    assert restore_times(log) == RestoreTimes(0.0, 0.0, 0.0)


def test_a_log_that_was_cut_off_tells_what_it_has() -> None:
    times = restore_times(ONE[: ONE.index(b"`- returned")])
    assert_close(times, 0.124, 0.0, 0.005)
