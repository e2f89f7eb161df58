"""Restores that fail, for every reason, end in the plain start with that reason."""

import asyncio
import dataclasses
import os
import shutil

import pytest
import pytest_asyncio

from nagara.contract.replica import Canary, StartKind
from nagara.snapshot.errors import BadSnapshotError
from nagara.snapshot.facts import read_host_facts
from nagara.store.roots import read_list

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]


class App:
    """One app with a snapshot, and the files of that snapshot."""

    def __init__(self, yard, spec):
        self.yard, self.spec = yard, spec

    @property
    def root(self):
        (root,) = self.yard.roots(self.spec.app)
        return root

    def forge(self, **changes):
        self.yard.forge(self.root, **changes)

    async def start(self):
        """How a replica came to be; it is stopped again."""
        report = await self.yard.start(self.spec)
        answer = await self.yard.ask(report.replica)
        assert answer.body == b"ready"
        await self.yard.stop(report.replica)
        assert self.yard.leftovers() == []
        return report


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def saved(shared, tmp_path_factory):
    """One captured app, and a copy of its snapshot to put back."""
    spec = shared.spec(app="faulty", env={"FIRST": "os.mkdir('/srv/made')"})
    report = await shared.capture(spec)
    assert report.reason is None
    app = App(shared, spec)
    shelf = shared.shelf()
    listing = shelf.read(app.root.name).image.list
    names = [*read_list(shelf.store, listing), listing]
    copies = {shelf.local.path(name): shelf.local.path(name).read_bytes() for name in names}
    return app, {app.root: app.root.read_bytes()} | copies


@pytest_asyncio.fixture(loop_scope="module")
async def app(saved):
    """The captured app, its snapshot whole."""
    app, copies = saved
    for root in app.yard.roots("faulty"):
        root.unlink()
    for noted in app.yard.notes("faulty"):
        shutil.rmtree(noted)
    for path, content in copies.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
    return app


async def test_a_wrong_canary_answer_is_a_plain_start_and_twice_is_quarantine(app):
    app.forge(canary_answer="200 another song")
    first, second, third = [await app.start() for _ in range(3)]
    assert [report.kind for report in (first, second, third)] == [StartKind.PLAIN] * 3
    assert "the canary answered '200 the canary sings'" in first.fallback
    assert "another song" in second.fallback
    assert third.fallback == "its snapshot is in quarantine"
    assert [report.capture_wanted for report in (first, second, third)] == [False, False, True]
    (noted,) = app.yard.notes("faulty")
    assert (noted / "bad").stat().st_mode & 0o777 == 0o600


async def test_a_snapshot_in_quarantine_is_made_again_once_and_not_in_a_loop(app):
    first = app.root
    app.forge(canary_answer="200 another song")
    for _ in range(2):
        await app.start()
    assert (await app.yard.capture(app.spec)).reason is None
    assert app.root != first
    (noted,) = app.yard.notes("faulty")
    assert [path.name for path in noted.iterdir()] == ["bad"]
    assert (await app.start()).kind is StartKind.RESTORED
    app.forge(canary_answer="200 another song")
    for _ in range(2):
        await app.start()
    last = await app.start()
    assert (last.kind, last.capture_wanted) == (StartKind.PLAIN, False)
    assert "none is made any more" in last.fallback


# An OpenAI server which says the same words after a restore, with another certainty.
DRIFTING = """
import json
logprob = -1.5
def canary():
    choice = {"text": "Paris", "finish_reason": "stop"}
    choice["logprobs"] = {"token_logprobs": [logprob, -2.0]}
    return json.dumps({"choices": [choice]})
@hooks.after_restore
def drift():
    global logprob
    logprob += float(os.environ["DRIFT"])
"""


@pytest.mark.parametrize(
    ("drift", "kind"), [("0.001", StartKind.RESTORED), ("0.5", StartKind.PLAIN)]
)
async def test_the_same_words_with_another_certainty_are_another_answer(shared, drift, kind):
    """As weights that were not read again give them: fluent, and wrong."""
    env = {"HOOKS": "1", "FIRST": DRIFTING, "DRIFT": drift}
    spec = shared.spec(app="drifting", canary=Canary("/canary", is_openai=True), env=env)
    assert (await shared.capture(spec)).reason is None
    report = await shared.start(spec)
    await shared.stop(report.replica)
    assert report.kind is kind
    assert (report.fallback is None) == (kind is StartKind.RESTORED)


async def test_memory_that_was_changed_is_noticed_by_the_canary(shared):
    """Readiness alone would pass: the server answers, with what is not its own any more."""
    spec = shared.spec(app="forged", env={"CANARY": "MARK-" + "m" * 40})
    assert (await shared.capture(spec)).reason is None
    forged = App(shared, spec)
    # The file is what was "captured", so that only the canary can tell.
    changed = []
    for place, path in shared.objects(forged.root).items():
        content = path.read_bytes()
        if "pages-" in place and b"MARK-" + b"m" * 40 in content:
            content = content.replace(b"MARK-" + b"m" * 40, b"MARK-" + b"M" * 40)
            shared.replace_file(forged.root, place, content)
            changed.append(place)
    assert changed
    report = await forged.start()
    assert report.kind is StartKind.PLAIN
    assert "MMMM" in report.fallback


@pytest.mark.parametrize("which", ["pages-", "core-", "layer."])
async def test_a_flipped_byte_is_never_restored(app, which):
    objects = app.yard.objects(app.root)
    path = next(path for place, path in sorted(objects.items()) if which in place)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x10
    path.write_bytes(content)
    report = await app.start()
    assert report.kind is StartKind.PLAIN
    assert "does not have the content it was captured with" in report.fallback
    again = await app.start()
    assert (again.fallback, again.capture_wanted) == ("its snapshot is in quarantine", True)


async def test_what_the_store_cannot_say_is_a_plain_start(shared):
    """A tenant that cannot have a part of the store has no snapshots, and everything else."""
    spec = shared.spec(app="elsewhere", tenant="Not_For_Stores")
    report = await shared.start(spec)
    assert (report.kind, report.capture_wanted) == (StartKind.PLAIN, False)
    assert "'Not_For_Stores' cannot name a tenant" in report.fallback
    await shared.stop(report.replica)
    captured = await shared.capture(spec)
    assert "'Not_For_Stores' cannot name a tenant" in captured.reason
    await shared.node.forget_app("Not_For_Stores", "elsewhere")
    assert shared.leftovers() == []


async def test_a_missing_memory_file_is_a_plain_start(app):
    objects = app.yard.objects(app.root)
    next(path for place, path in objects.items() if "pages-" in place).unlink()
    report = await app.start()
    assert report.kind is StartKind.PLAIN
    assert "is incomplete" in report.fallback
    again = await app.start()  # what is no longer here is no fault of the next one
    assert (again.fallback, again.capture_wanted) == ("there is no snapshot yet", True)


async def test_damaged_metadata_is_as_if_there_were_no_snapshot(app):
    app.root.write_text('{"version": 1')
    report = await app.start()
    assert (report.kind, report.fallback) == (StartKind.PLAIN, "there is no snapshot yet")
    assert report.capture_wanted


async def test_what_the_tool_itself_refuses_counts_against_the_snapshot(app):
    """Its files are made to fit their digests, so that only the restore itself can fail."""
    app.yard.replace_file(app.root, "memory/inventory.img", b"nothing of the kind")
    first, second = [await app.start() for _ in range(2)]
    assert (first.kind, second.kind) == (StartKind.PLAIN, StartKind.PLAIN)
    assert "Magic" in first.fallback or "inventory" in first.fallback
    assert (await app.start()).fallback == "its snapshot is in quarantine"


async def test_a_changed_file_of_the_machine_is_a_plain_start_and_a_new_capture(app, tmp_path):
    library = tmp_path / "library.so"
    library.write_bytes(b"code")
    state = library.stat()
    marks = app.yard.about(app.root)["host_files"]
    app.forge(host_files=[*marks, f"4 {state.st_mtime_ns} {library}"])
    assert (await app.start()).kind is StartKind.RESTORED
    os.utime(library, ns=(0, state.st_mtime_ns + 1))
    report = await app.start()
    assert report.kind is StartKind.PLAIN
    assert report.fallback == f"{library} has changed since the snapshot was made"
    assert report.capture_wanted
    assert (await app.yard.capture(app.spec)).reason is None
    assert (await app.start()).kind is StartKind.RESTORED


@pytest.mark.parametrize(
    ("lack", "words"),
    [
        ({"cpu_flags": frozenset({"fpu"})}, "this CPU lacks"),
        ({"signal_frame_bytes": 1}, "extended registers"),
        ({"cache_line_bytes": 1}, "cache lines"),
    ],
    ids=["flags", "registers", "cache line"],
)
async def test_on_a_host_of_another_class_no_variant_fits(app, lack, words, monkeypatch):
    snapshots = app.yard.node._snapshots
    forged = dataclasses.replace(snapshots._facts, **lack)
    monkeypatch.setattr(snapshots, "_facts", forged)
    report = await app.start()
    assert report.kind is StartKind.PLAIN
    assert report.fallback.startswith("no variant fits: ")
    assert words in report.fallback
    assert report.capture_wanted


@pytest.mark.parametrize("part", ["kernel_class", "tools"])
async def test_another_kernel_or_tool_has_another_key(app, part, monkeypatch):
    snapshots = app.yard.node._snapshots
    other = ("runc 9",) if part == "tools" else "9.9"
    monkeypatch.setattr(snapshots, "_facts", dataclasses.replace(snapshots._facts, **{part: other}))
    report = await app.start()
    assert (report.kind, report.fallback) == (StartKind.PLAIN, "there is no snapshot yet")


async def test_facts_of_the_machine_are_those_the_node_uses(shared):
    facts = shared.node._snapshots._facts
    assert facts == read_host_facts(facts.tools)


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
async def test_a_restore_cancelled_at_any_moment_leaves_nothing(shared, after_s):
    spec = shared.spec(app="cancelled-restore", env={"FIRST": "hoard = b'x' * (100 << 20)"})
    if not shared.roots("cancelled-restore"):
        assert (await shared.capture(spec)).reason is None
    starting = asyncio.ensure_future(shared.start(spec))
    await asyncio.sleep(after_s)
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled():  # it was faster
        await shared.stop(starting.result().replica)
    assert shared.leftovers() == []
    assert await shared.node.replicas() == ()


async def test_a_snapshot_is_good_again_after_one_failure_and_one_success(app, monkeypatch):
    snapshots = app.yard.node._snapshots
    kept = snapshots.check_answer

    async def fails(*arguments):
        raise BadSnapshotError("once")

    for _ in range(2):
        monkeypatch.setattr(snapshots, "check_answer", fails)
        assert (await app.start()).kind is StartKind.PLAIN
        monkeypatch.setattr(snapshots, "check_answer", kept)
        assert (await app.start()).kind is StartKind.RESTORED


async def test_a_frozen_layer_that_lists_something_else_is_not_used(app):
    """The tool's exit code says nothing about closed files: the listing does."""
    await app.yard.node._snapshots._layers.unmount(app.root.name.rpartition(".")[2])
    app.forge(layer_digest="0" * 64)
    report = await app.start()
    assert report.kind is StartKind.PLAIN
    assert "the frozen layer is not what was frozen" in report.fallback
