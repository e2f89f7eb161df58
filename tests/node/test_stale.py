"""Snapshots of apps whose files on the machine have changed since."""

import compileall
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nagara.contract.replica import StartKind

pytestmark = pytest.mark.root


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A folder that replicas see: temporary ones are hidden from them."""
    folder = Path(tempfile.mkdtemp(dir="/var/lib", prefix="nagara-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


APP = """
import http.server, os, sys
sys.path.insert(0, os.path.dirname(__file__))
import answers
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answers.text().encode())
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


def _edit_script(folder: Path) -> None:
    (folder / "app.py").write_text(APP + "# edited\n")


def _edit_module(folder: Path) -> None:
    (folder / "answers.py").write_text("def text(): return 'new'\n")


def _edit_data(folder: Path) -> None:
    (folder / "words.txt").write_text("new")


@pytest.mark.parametrize("edit", [_edit_script, _edit_module, _edit_data])
@pytest.mark.parametrize("is_compiled", [False, True])
async def test_an_edited_file_makes_the_snapshot_stale(
    yard: Any, source: Path, edit: Callable[[Path], None], is_compiled: bool
) -> None:
    (source / "app.py").write_text(APP)
    (source / "words.txt").write_text("old")
    (source / "answers.py").write_text(
        "import os\nWORDS = open(os.path.dirname(__file__) + '/words.txt').read()\n"
        "def text(): return WORDS\n"
    )
    (source / "unused.py").write_text("")
    if is_compiled:  # then sources are looked at, not opened
        compileall.compile_dir(source, quiet=1)
    spec = yard.spec(command=("python", "-S", str(source / "app.py")))
    assert (await yard.capture(spec)).reason is None
    (source / "unused.py").write_text("x = 1")
    first = await yard.start(spec)
    assert first.kind is StartKind.RESTORED
    edit(source)
    second = await yard.start(spec)
    assert second.kind is StartKind.PLAIN
    assert second.capture_wanted
    assert "has changed since the snapshot was made" in second.fallback
    assert str(source) in second.fallback
    await yard.stop(first.replica, second.replica)
