"""Which files of the machine a container has mapped."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nagara.snapshot.device.cpu import CpuDevice
from nagara.snapshot.device.simulated import SimulatedDevice
from nagara.snapshot.facts import read_host_facts
from nagara.snapshot.processes import host_files, processes_of


@pytest.mark.root
def test_the_processes_of_a_namespace_are_found_and_no_others():
    child = subprocess.Popen(
        ["unshare", "--pid", "--fork", "sh", "-c", "sleep 70 & sleep 71 & echo up; wait"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert child.stdout.readline() == b"up\n"
        listing = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        first = int(listing[0])
        found = processes_of(first)
        assert first in found
        assert len(found) == 3
        assert os.getpid() not in found
    finally:
        os.killpg(child.pid, 9)
        child.wait()
        child.stdout.close()


def test_mapped_files_are_marked_with_size_and_time(tmp_path):
    path = tmp_path / "library.so"
    path.write_bytes(b"x" * 5000)
    code = f"""
import mmap
file = open({str(path)!r}, "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("mapped", flush=True)
input()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        marks = {mark.path: mark for mark in host_files(child.pid, {})}
        assert marks[str(path)].size_bytes == 5000
        assert marks[str(path)].is_unchanged()
        path.write_bytes(b"x" * 5001)
        assert not marks[str(path)].is_unchanged()
    finally:
        child.communicate(b"\n")


def test_a_file_shown_elsewhere_inside_is_marked_where_it_lies(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"w" * 4096)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        marks = host_files(os.getpid(), {tmp_path: tmp_path})
    assert str(path) in {mark.path for mark in marks}


def test_devices_are_told_by_driver_and_kind_and_not_by_number():
    two, one = (SimulatedDevice({f"gpu-{n}": 1 << 30 for n in range(count)}) for count in (2, 1))
    facts = read_host_facts((), two)
    assert facts.devices == read_host_facts((), one).devices
    assert facts.devices == (f"simulated driver {two.facts().driver}", "simulated device")
    assert read_host_facts((), CpuDevice()).devices == read_host_facts(()).devices == ()


def test_facts_of_this_host_are_plausible():
    facts = read_host_facts(("runc 1.1.5",))
    assert len(facts.cpu_flags) > 5
    assert facts.signal_frame_bytes == 0 or facts.signal_frame_bytes > 500
    assert facts.cache_line_bytes in (32, 64, 128, 256)
    assert facts.kernel_class.count(".") == 1
    assert facts.tools == ("runc 1.1.5",)
