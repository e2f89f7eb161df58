"""What runc and the checkpoint tool say, in our words."""

from pathlib import Path

import pytest

from nagara.sandbox.runc import Runc, RuncError, criu_complaint, criu_gave_up


def test_the_first_error_of_a_log_is_the_telling_one(tmp_path):
    log = tmp_path / "restore.log"
    log.write_text(
        "(00.000008) Error (criu/rlimit.c:1): RLIMIT_NOFILE: Operation not permitted\n"
        "(00.010000)     1: Error (criu/files-reg.c:2): File /a has bad size 3 (expect 4)\n"
        "(00.010001) Error (criu/cr-restore.c:3): 7 exited, status=1\n"
        "(00.010002) Error (criu/cr-restore.c:4): Restoring FAILED.\n"
    )
    assert criu_complaint(log) == "File /a has bad size 3 (expect 4)"
    assert criu_gave_up(log)


def test_a_log_that_breaks_off_is_of_a_tool_that_was_killed(tmp_path):
    log = tmp_path / "restore.log"
    log.write_text("(00.000008) Error (criu/rlimit.c:1): RLIMIT_NOFILE: Operation not permitted\n")
    assert criu_complaint(log) is None
    assert not criu_gave_up(log)
    assert not criu_gave_up(tmp_path / "none.log")


def test_a_log_that_ends_with_a_complaint_is_of_a_tool_that_gave_up(tmp_path):
    log = tmp_path / "restore.log"
    log.write_text("(00.05) Error (criu/image.c:563): Magic doesn't match for inventory.img\n")
    assert criu_gave_up(log)
    log.write_text(log.read_text() + "(00.06) Error (criu/cgroup.c:1): cgroupd: recv req error\n")
    assert not criu_gave_up(log)


def test_a_log_without_errors_or_that_is_missing_has_no_complaint(tmp_path):
    assert criu_complaint(tmp_path / "none.log") is None
    (tmp_path / "good.log").write_text("(00.1) Restore finished successfully.\n")
    assert criu_complaint(tmp_path / "good.log") is None


def test_a_failing_command_is_named_with_what_it_wrote(tmp_path):
    program = tmp_path / "runc"
    program.write_text("#!/bin/sh\necho the reason >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(RuncError, match=r"runc pause failed: the reason"):
        Runc(program, None, tmp_path).pause("c")


def test_of_runcs_own_log_lines_the_message_is_taken(tmp_path):
    program = tmp_path / "runc"
    program.write_text(
        "#!/bin/sh\n"
        """echo 'time="1" level=warning msg="something else"' >&2\n"""
        """echo 'time="2" level=error msg="container \\\\"x\\\\" is gone"' >&2\nexit 1\n"""
    )
    program.chmod(0o755)
    with pytest.raises(RuncError) as caught:
        Runc(program, None, tmp_path).delete("c")
    assert caught.value.what == 'runc delete failed: container \\"x\\" is gone'


def test_a_pause_that_fails_at_first_is_tried_again(tmp_path):
    program, tries = tmp_path / "runc", tmp_path / "tries"
    program.write_text(f"#!/bin/sh\necho x >> {tries}; [ $(wc -l < {tries}) = 3 ]\n")
    program.chmod(0o755)
    Runc(program, None, tmp_path).pause("c")
    assert tries.read_text() == "x\nx\nx\n"


def test_a_missing_program_is_named(tmp_path):
    with pytest.raises(RuncError, match="cannot be run"):
        Runc(tmp_path / "none", None, tmp_path).delete("c")


def test_containers_are_created_detached_below_the_own_state_folder():
    runc = Runc(Path("/runc"), Path("/criu"), Path("/state"))
    command = runc.run_command("c", Path("/bundle"), Path("/pid"))
    assert command[:5] == ["/runc", "--root", "/state", "--criu", "/criu"]
    assert "--detach" in command
    assert command[-1] == "c"
