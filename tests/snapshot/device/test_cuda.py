"""The way to NVIDIA's driver: with the driver where there is one, else with what stands for it.

Without a device these show that time limits are kept whatever happens to the other side, and
that the driver's libraries are called as they are documented.
"""

import inspect
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from nagara.snapshot.device import cuda, cuda_worker
from nagara.snapshot.device.cuda import CudaDevice
from nagara.snapshot.device.cuda_worker import CudaCheckpoint, CudaCore, MissingError, Worker
from nagara.snapshot.device.errors import (
    DeviceBusyError,
    DeviceFullError,
    DeviceGoneError,
    DeviceLostError,
    DeviceMissingError,
    DeviceRefusedError,
    DeviceSilentError,
)
from nagara.snapshot.device.orders import DeviceOrders
from nagara.snapshot.errors import CaptureError
from nagara.snapshot.states import DeviceState
from nagara.testing.device_conformance import NO_PID, DeviceConformance

OLD, NEW = "GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002"
HOLDER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, device, memory = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_void_p()
assert not cuda.cuInit(0)
assert not cuda.cuDeviceGet(ctypes.byref(device), 0)
assert not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
assert not cuda.cuCtxSetCurrent(context)
assert not cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(3 << 30))
assert not cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(7), ctypes.c_size_t(3 << 30))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
class TestCuda(DeviceConformance):
    @pytest.fixture
    def device(self):
        device = CudaDevice()
        yield device
        device.close()

    @pytest.fixture
    def holder(self):
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout.readline() == b"held\n"
            yield process.pid
            process.kill()


@pytest.fixture
def answering(tmp_path):
    """Makes a device whose worker answers with a function `answer(request)` of the given text."""
    made = []

    def make(text):
        script = tmp_path / f"worker{len(made)}.py"
        script.write_text(
            "import json, os, sys, time\n"
            + textwrap.dedent(text)
            + "\nfor line in sys.stdin:\n"
            + "    print(json.dumps(answer(json.loads(line))), flush=True)\n"
        )
        made.append(CudaDevice((sys.executable, "-I", "-S", str(script))))
        return made[-1]

    yield make
    for device in made:
        device.close()


STATES = """
state = {state!r}
def answer(request):
    if request["do"] == "state":
        return {{"ok": state}}
    {rest}
"""


def test_a_driver_that_hangs_is_given_up_in_time(answering):
    device = answering(STATES.format(state="locked", rest="time.sleep(3600)"))
    with pytest.raises(DeviceSilentError, match="did not answer in"):
        device.checkpoint(os.getpid(), time_limit_s=0.2)
    assert device.state(os.getpid()) is DeviceState.LOCKED  # another worker answers


def test_a_call_that_takes_long_keeps_no_other_waiting(answering, tmp_path):
    device = answering(
        STATES.format(
            state="checkpointed",
            rest=f"""
    while not os.path.exists({str(tmp_path / "go")!r}):
        time.sleep(0.01)
    return {{"ok": None}}""",
        )
    )
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(device.restore, os.getpid(), {}, time_limit_s=60) for _ in range(2)]
        assert device.state(os.getpid()) is DeviceState.CHECKPOINTED  # by a third worker
        assert not any(call.done() for call in slow)
        (tmp_path / "go").touch()
        for call in slow:
            call.result()


def test_a_worker_that_the_driver_takes_along_is_replaced(answering):
    device = answering(STATES.format(state="checkpointed", rest="os._exit(1)"))
    with pytest.raises(DeviceLostError, match="has ended"):
        device.restore(os.getpid(), {}, time_limit_s=60)
    assert device.state(os.getpid()) is DeviceState.CHECKPOINTED


def test_one_worker_serves_one_call_after_the_other(answering):
    device = answering("def answer(request): return {'ok': {'pid': os.getpid()}}")
    assert device.free_bytes() == device.held_bytes(1)


@pytest.mark.parametrize(
    ("state", "kind"), [("running", DeviceBusyError), ("failed", DeviceLostError)]
)
def test_a_lock_that_fails_is_judged_by_the_state_it_leaves(answering, state, kind):
    device = answering(
        f"""
        states = ["running", {state!r}]
        def answer(request):
            if request["do"] == "state":
                return {{"ok": states.pop(0)}}
            return {{"error": "CUDAError: CUDA_ERROR_NOT_READY", "kind": "call"}}
        """
    )
    with pytest.raises(kind, match="NOT_READY"):
        device.lock(os.getpid(), time_limit_s=1)


def test_want_of_memory_is_told_from_other_failures(answering):
    for words, kind in (("CUDA_ERROR_OUT_OF_MEMORY", DeviceFullError), ("x", DeviceLostError)):
        rest = f'return {{"error": {words!r}, "kind": "call"}}'
        device = answering(STATES.format(state="checkpointed", rest=rest))
        with pytest.raises(kind) as caught:
            device.restore(os.getpid(), {}, time_limit_s=60)
        assert type(caught.value) is kind


def test_a_process_that_ended_is_told_from_one_that_is_lost(answering):
    device = answering('def answer(request): return {"error": "invalid", "kind": "call"}')
    with pytest.raises(DeviceGoneError):
        device.state(NO_PID)
    with pytest.raises(DeviceLostError):
        device.state(os.getpid())
    assert device.holders([NO_PID, os.getpid()]) == ()


def test_who_has_not_the_drivers_library_is_not_asked_about(answering, monkeypatch):
    device = answering('def answer(request): return {"error": "no cuda-core", "kind": "missing"}')
    assert DeviceOrders(device).save({os.getpid(): 1}) is None  # a replica on the CPU
    monkeypatch.setattr(cuda, "_has_library", lambda _pid: True)
    with pytest.raises(CaptureError, match="no cuda-core"):
        DeviceOrders(device).save({os.getpid(): 1})
    running = answering(STATES.format(state="running", rest="pass"))
    assert running.holders([os.getpid()]) == (os.getpid(),)


def test_what_has_no_place_is_not_asked_of_the_driver(answering):
    device = answering(STATES.format(state="running", rest="os._exit(1)"))
    for call in (device.checkpoint, device.unlock):
        with pytest.raises(DeviceRefusedError):
            call(os.getpid(), time_limit_s=60)
    with pytest.raises(DeviceRefusedError):
        device.restore(os.getpid(), {}, time_limit_s=60)


def test_a_state_of_a_newer_driver_is_no_crash(answering):
    device = answering(STATES.format(state="migrating", rest="pass"))
    with pytest.raises(DeviceLostError, match="migrating"):
        device.state(os.getpid())


def test_facts_say_what_the_driver_can_and_why_not(answering):
    device = answering(
        f"""
        facts = {{"driver": "550.1", "why_not": None, "can_map": False,
                  "devices": [{{"uuid": {OLD!r}, "name": "N", "total": 9, "free": 8}}]}}
        def answer(request): return {{"ok": facts}}
        """
    )
    facts = device.facts()
    assert facts.memory_bytes == {OLD: 9}
    assert facts.can_save
    assert not facts.can_map
    lacking = answering('def answer(request): return {"error": "no driver", "kind": "missing"}')
    with pytest.raises(DeviceMissingError, match="no driver"):
        lacking.facts()


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A `cuda-checkpoint` that notes what it is asked and says what it is told to."""
    program = tmp_path / "cuda-checkpoint"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n. {tmp_path}/say\n')
    program.chmod(0o755)
    (tmp_path / "say").write_text("echo running\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_the_command_is_called_as_it_documents(command):
    way = CudaCheckpoint()
    assert way.state(7) == "running"
    way.lock(7, 1500)
    way.checkpoint(7)
    way.restore(7, {})
    way.restore(7, {OLD: NEW})
    way.unlock(7)
    assert (command / "asked").read_text().splitlines() == [
        "--get-state --pid 7",
        "--action lock --pid 7 --timeout 1500",
        "--action checkpoint --pid 7",
        "--action restore --pid 7",
        f"--action restore --pid 7 --device-map {OLD}={NEW}",
        "--action unlock --pid 7",
    ]
    (command / "say").write_text("echo 'Could not lock: invalid argument' >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="invalid argument"):
        way.lock(7, 1)


class FakeProcess:
    """Stands for `cuda.core.checkpoint.Process`, with its signatures."""

    calls: list = []  # noqa: RUF012
    state = "running"

    def __init__(self, pid: int):
        self.pid = pid

    def lock(self, timeout_ms: int = 0) -> None:
        self.calls.append(("lock", self.pid, timeout_ms))

    def checkpoint(self) -> None:
        self.calls.append(("checkpoint", self.pid))

    def restore(self, gpu_mapping=None) -> None:
        self.calls.append(("restore", self.pid, gpu_mapping))

    def unlock(self) -> None:
        self.calls.append(("unlock", self.pid))


def test_cuda_core_has_what_is_called_of_it():
    checkpoint = pytest.importorskip("cuda.core.checkpoint", reason="needs cuda-core")
    for name in ("lock", "checkpoint", "restore", "unlock"):
        real = inspect.signature(getattr(checkpoint.Process, name))
        ours = inspect.signature(getattr(FakeProcess, name))
        assert list(real.parameters) == list(ours.parameters)


def test_cuda_core_gets_bare_uuids():
    way = CudaCore.__new__(CudaCore)
    way._process = FakeProcess
    FakeProcess.calls.clear()
    assert way.state(7) == "running"
    way.lock(7, 1500)
    way.restore(7, {OLD: NEW})
    way.restore(7, {})
    assert FakeProcess.calls == [
        ("lock", 7, 1500),
        ("restore", 7, {OLD.removeprefix("GPU-"): NEW.removeprefix("GPU-")}),
        ("restore", 7, None),
    ]


@pytest.mark.parametrize(
    ("driver", "can_map", "why_not"),
    [
        ("560.35.03", False, "570 or newer can"),
        ("570.86.10", False, None),
        ("580.12", True, None),
    ],
)
def test_the_worker_judges_by_the_drivers_version(command, monkeypatch, driver, can_map, why_not):
    class Memory:
        def driver(self):
            return driver

        def cuda(self):
            return "12.8"

        def devices(self):
            return [{"uuid": OLD, "name": "N", "total": 9, "free": 8}]

    def lacking(_self):
        raise MissingError("no cuda-core")

    monkeypatch.setattr(CudaCore, "__init__", lacking)
    worker = Worker()
    worker._nvml = Memory()
    facts = worker.answer({"do": "facts"})
    assert facts["can_map"] is can_map
    assert facts["why_not"] == why_not or why_not in facts["why_not"]
    assert facts["driver"] == f"{driver}, CUDA 12.8"
    assert facts["way"] == "CudaCheckpoint"


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a driver")  # noqa: PTH110
def test_without_a_driver_the_real_worker_says_so():
    device = CudaDevice()
    try:
        with pytest.raises(DeviceMissingError):
            device.facts()
    finally:
        device.close()


def test_the_worker_answers_whatever_it_is_asked():
    done = subprocess.run(
        [sys.executable, "-m", cuda_worker.__name__],
        input='{"do": "dance"}\nnonsense\n{}\n',
        capture_output=True,
        text=True,
        timeout=60,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["kind"] for answer in answers] == ["call"] * 3
