"""A machine's monitor: what it has found is told until it was heard."""

from pathlib import Path

from nagara.contract.machine import Outcome, Vitals
from nagara.pool.health import kernellog, nvidia
from nagara.pool.health.monitor import Monitor
from nagara.testing.fake_nvml import FakeNvml

HEAD = "6,{number},2,-;NVRM: Xid (PCI:0000:3b:00): {code}, a text\n"


class Host:
    """A kernel log that goes on, and monitors of it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.number, self.nvml = folder / "kmsg", 0, FakeNvml(1)
        self.path.write_text("")

    def xid(self, code: int) -> None:
        self.number += 1
        with self.path.open("a") as file:
            file.write(HEAD.format(number=self.number, code=code))

    def monitor(self, boot: str = "boot-1") -> Monitor:
        log = kernellog.KernelLog(str(self.path))
        return Monitor(log, lambda: nvidia.checks(self.nvml), boot)


def codes(vitals: Vitals) -> list[int]:
    return [one.code for one in vitals.events]


def test_a_monitor_reports_only_what_is_new(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.xid(48)
    monitor = host.monitor()
    monitor.round()
    first = monitor.take()
    assert (first.rounds, codes(first)) == (1, [])
    host.xid(94)
    host.nvml.change(0, temperature_c=99)
    monitor.round()
    second = monitor.take(first.mark)
    assert codes(second) == [94]
    assert Outcome.FAIL in {one.outcome for one in second.results}
    monitor.round()
    assert codes(monitor.take(second.mark)) == []


def test_events_of_an_answer_that_was_lost_are_told_again(tmp_path: Path) -> None:
    host = Host(tmp_path)
    monitor = host.monitor()
    monitor.round()
    host.xid(13)
    monitor.round()
    heard = monitor.take().mark
    host.xid(79)
    monitor.round()
    assert codes(monitor.take(heard)) == [79]  # lost on its way
    host.xid(94)
    monitor.round()
    assert codes(monitor.take(heard)) == [79, 94]


def test_a_monitor_that_was_started_anew_tells_what_its_predecessor_could_not(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path)
    host.xid(13)
    monitor = host.monitor()
    monitor.round()
    heard = monitor.take().mark
    host.xid(79)
    monitor.round()
    successor = host.monitor()
    successor.round()
    assert codes(successor.take(heard)) == [79]
    assert codes(host.monitor().take(heard)) == []  # nothing read yet: nothing is lost by asking
    again = host.monitor("boot-2")
    again.round()
    assert codes(again.take(heard)) == []


def test_a_log_that_cannot_be_read_is_said_and_loses_nothing(tmp_path: Path) -> None:
    host = Host(tmp_path)
    monitor = host.monitor()
    monitor.round()
    heard = monitor.take().mark
    kept = host.path.read_text()
    host.path.unlink()
    monitor.round()
    results = {one.name: one.outcome for one in monitor.take(heard).results}
    assert results["kernel log"] is Outcome.DID_NOT_RUN
    host.path.write_text(kept)
    host.xid(79)
    monitor.round()
    assert codes(monitor.take(heard)) == [79]
