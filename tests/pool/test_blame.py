"""Which failures of replicas speak against their machine."""

import pytest

from nagara.pool.health.blame import FAILURES, WINDOW_S, Blame, names_machine


@pytest.mark.parametrize(
    "reason",
    [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "OSError: [Errno 5] Input/output error: '/models/m/weights'",
        "torch.AcceleratorError: no CUDA-capable device is detected",
        "the machine failed: Read-only file system",
    ],
)
def test_words_that_apps_do_not_write_of_themselves_are_the_machines(reason: str) -> None:
    assert names_machine(reason)
    assert Blame().failed("m", "a", reason, 0.0)


@pytest.mark.parametrize(
    "reason",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "ModuleNotFoundError: No module named 'x'",
        "its command ended with exit code 1 before it was ready",
    ],
)
def test_an_apps_own_faults_are_not(reason: str) -> None:
    assert names_machine(reason) is None


def test_one_app_that_fails_again_and_again_says_nothing_of_its_machine() -> None:
    blame = Blame()
    assert not any(blame.failed("m", "a", "exit code 1", n) for n in range(10 * FAILURES))


def test_failures_of_several_apps_on_one_machine_do() -> None:
    blame = Blame()
    assert blame.failed("m", "a", "exit code 1", 0.0) is None
    assert blame.failed("n", "b", "exit code 1", 1.0) is None
    assert blame.failed("m", "b", "exit code 1", 2.0) is None
    assert blame.failed("m", "a", "exit code 1", 3.0) == "3 replicas of a, b failed there"


def test_old_failures_and_those_before_a_success_are_forgotten() -> None:
    blame = Blame()
    for app in ("a", "b"):
        blame.failed("m", app, "exit code 1", 0.0)
    assert blame.failed("m", "c", "exit code 1", WINDOW_S + 1) is None
    blame.served("m")
    assert blame.failed("m", "d", "exit code 1", WINDOW_S + 2) is None
    assert blame.failed("m", "e", "exit code 1", WINDOW_S + 3) is None
