"""The reference is made from the code, and fails on what is described nowhere."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import docs_test  # noqa: E402
import reference  # noqa: E402

from nagara.cli import command_examples  # noqa: E402
from nagara.cli.errors_list import Kind  # noqa: E402
from nagara.cli.main import COMMANDS, main  # noqa: E402
from nagara.control import appfile  # noqa: E402
from nagara.pool import figures  # noqa: E402


@pytest.mark.parametrize("name", reference.PAGES)
def test_each_page_can_be_made(name: str) -> None:
    text = reference.PAGES[name]()
    assert len(text) > 500
    for line in text.splitlines():
        if line.startswith("| "):
            assert not line.endswith("|  |") or name == "errors.md", line


def test_every_command_is_there() -> None:
    page = reference.cli_page()
    for name in COMMANDS:
        assert f"## nagara {name}" in page
    assert page.count("\n## nagara ") == len(command_examples.EXAMPLES)


def test_a_command_without_an_example_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = {key: one for key, one in command_examples.EXAMPLES.items() if key != "apps"}
    monkeypatch.setattr(reference, "EXAMPLES", examples)
    with pytest.raises(reference.MissingWordsError, match="nagara apps"):
        reference.cli_page()


def test_an_option_without_help_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    apps = main.get_command(click.Context(main, info_name="nagara"), "apps")
    assert apps is not None
    monkeypatch.setattr(apps, "params", [click.Option(["--silent"])])
    with pytest.raises(reference.MissingWordsError, match="--silent"):
        reference.cli_page()


def test_a_key_of_the_app_file_that_no_page_has_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Extended(appfile._AppTable):
        novelty: int = 0

    monkeypatch.setattr(appfile, "_AppTable", Extended)
    with pytest.raises(reference.MissingWordsError, match="novelty"):
        reference.app_file_page()


def test_a_variable_that_nobody_described_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {k: v for k, v in reference.VARIABLES.items() if k != "NAGARA_STATE"}
    monkeypatch.setattr(reference, "VARIABLES", variables)
    with pytest.raises(reference.MissingWordsError, match="NAGARA_STATE"):
        reference.settings_page()


def test_a_metric_without_words_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(reference.MissingWordsError, match="nagara_new"):
        list(reference.exposed("nagara_new 1\n"))
    monkeypatch.setattr(figures, "metrics", lambda moment: 'nagara_other{a="b"} 2\n')
    with pytest.raises(reference.MissingWordsError, match="nagara_other"):
        reference.metrics_page()


def test_a_route_without_words_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    document = reference.api_document()
    document["paths"]["/api/apps"]["get"]["description"] = ""
    monkeypatch.setattr(reference, "api_document", lambda: document)
    with pytest.raises(reference.MissingWordsError, match="GET /api/apps"):
        reference.api_page()


def test_an_error_without_words_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [Kind("NewError", "control", 1, "")]
    monkeypatch.setattr(reference, "all_kinds", lambda: kinds)
    with pytest.raises(reference.MissingWordsError, match="NewError"):
        reference.errors_page()


def test_the_api_is_an_openapi_document() -> None:
    document = json.loads(reference.PAGES["openapi.json"]())
    assert document["openapi"].startswith("3.1")
    logs = document["paths"]["/api/apps/{app}/logs"]["get"]
    assert {(one["name"], one["in"]) for one in logs["parameters"]} == {
        ("app", "path"), ("replica", "query"), ("tail_bytes", "query"),
    }  # fmt: skip
    names = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(names) == len(set(names))
    for path, methods in document["paths"].items():
        for operation in methods.values():
            inside = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert inside == set(re.findall(r"{(\w+)}", path))


def test_the_documents_are_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the package mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=170,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "reference" / "cli.html").exists()
    assert (tmp_path / "reference" / "openapi.json").exists()


PAGE = """
```console
$ first --option \\
    value
said
$ second   # a comment
```

<!-- run: no, needs a moon -->
```console
$ third
```

<!-- file: x.toml -->
```toml
[app.x]
```

<!-- run: background, until serves at -->
```console
$ fourth
```
"""


def test_commands_and_files_are_taken_from_a_page() -> None:
    found = list(docs_test.steps(PAGE))
    assert [step.text for step in found] == [
        "first --option \\\n    value", "second   # a comment", "third", "[app.x]\n", "fourth",
    ]  # fmt: skip
    assert found[2].skipped == "needs a moon"
    assert found[3].file == "x.toml"
    assert found[4].until == "serves at"


@pytest.mark.parametrize("mark", ["no", "later, because", "background"])
def test_a_mark_that_is_none_is_refused(mark: str) -> None:
    with pytest.raises(ValueError, match="no way to run"):
        list(docs_test.steps(f"<!-- run: {mark} -->\n```console\n$ x\n```\n"))


def test_a_script_stops_at_the_first_failure_and_ends_what_it_began(tmp_path: Path) -> None:
    page = """
<!-- run: background, until ready -->
```console
$ sh -c 'echo ready; echo $$ > pid; exec sleep 1000'   # for long
```

```console
$ test -s pid && echo one
$ false
$ echo two
```
"""
    text = docs_test.script(list(docs_test.steps(page)), tmp_path)
    done = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "\none\n" in done.stdout
    assert "two" not in done.stdout
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.parametrize("name", docs_test.PAGES)
def test_every_page_can_be_read_and_names_commands_that_there_are(name: str) -> None:
    for step in docs_test.steps((ROOT / name).read_text()):
        for call in re.findall(r"(?:^|\bsudo |\n)nagara ([a-z]+)", step.text):
            assert call in COMMANDS, step.text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
