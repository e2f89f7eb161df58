"""Reads an app file: TOML text in, frozen `App` values out, or every fault at once.

It knows the keys of the file and what may stand there. Keys nobody knows are refused with the
nearest names.
Pure: the caller reads the file.
"""

import difflib
import json
import re
import tomllib
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from nagara.base.errors import UsageError
from nagara.base.units import parse_duration_s, parse_size_bytes
from nagara.contract.replica import Canary, HookStep, Limits, SnapshotHooks, SnapshotRules
from nagara.control.app import App, Scale, Timeouts
from nagara.control.app_secrets import SECRET_NAME
from nagara.control.cron import Entry, parse_cron
from nagara.control.errors import AppFileError
from nagara.control.openai_server import default_canary, is_openai_path, recognise, with_logprobs
from nagara.control.presets import PRESETS, preset_of, with_weights

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEVICE = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*=[A-Za-z0-9][\w.:-]*")
_RESERVED = frozenset({"api", "v1", "nagara", "healthz", "readyz", "metrics"})
_IMAGES_AT_PATHS = ("dir:", "venv:", "oci:", "docker-archive:")
# Their images can say themselves what runs in them.
_IMAGES_WITH_COMMANDS = ("oci:", "docker-archive:", "registry:", "image:")
_IMAGES = ("host", *_IMAGES_AT_PATHS, "registry:", "image:")


def _problem(text: str) -> PydanticCustomError:
    return PydanticCustomError("nagara", "{text}", {"text": text})


def _duration(value: object) -> object:
    """`"10m"` → 600.0; anything else is left for the type check to refuse."""
    if not isinstance(value, str):
        raise _problem('a duration is text with a unit, such as "30s" or "10m"')
    try:
        seconds = parse_duration_s(value)
    except UsageError as error:
        raise _problem(f"{error.what}; {error.hint}") from error
    if seconds <= 0:
        raise _problem("a duration must be above zero")
    return seconds


def _duration_or_auto(value: object) -> object:
    return None if value == "auto" else _duration(value)


def _size(value: object) -> object:
    if not isinstance(value, str):
        raise _problem('a size is text with a unit, such as "512MiB" or "8GiB"')
    try:
        size_bytes = parse_size_bytes(value)
    except UsageError as error:
        raise _problem(f"{error.what}; {error.hint}") from error
    if size_bytes < 1:
        raise _problem("a size must be above zero")
    return size_bytes


def _image(value: str) -> str:
    if value == "host":
        return value
    kind, colon, place = value.partition(":")
    if kind + colon not in _IMAGES[1:] or not place:
        raise _problem(f'unknown image {value!r}; write "host" or one of '
                       + ", ".join(f'"{known}..."' for known in _IMAGES[1:]))  # fmt: skip
    if kind + colon in _IMAGES_AT_PATHS and not place.startswith("/"):
        raise _problem(f"the path {place!r} must begin with a slash: it is the machine's that "
                       "runs the app, whoever deploys it from where")  # fmt: skip
    if "\0" in place:
        raise _problem("an image's name contains a zero byte")
    return value


def _device(value: object) -> object:
    if value != "any":
        raise _problem('choosing a device is not supported yet; the one allowed value is "any"')
    return value


def _device_name(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise _problem(f"{value!r} names no device: VENDOR/CLASS=NAME, such as nvidia.com/gpu=0")
    return value


def _path(value: str) -> str:
    if not value.startswith("/") or any(ord(char) <= 32 or ord(char) > 126 for char in value):
        raise _problem('a path begins with "/" and has no spaces or control characters')
    return value


def _secret(value: str) -> str:
    if not SECRET_NAME.fullmatch(value):
        raise _problem(f"{value!r} is not a name of a secret, as of a variable: HF_TOKEN")
    return value


def _model(value: str) -> str:
    if not _MODEL.fullmatch(value):
        raise _problem(f"{value!r} is not a model name: letters, digits, '.', '_' and '-'")
    return value


Duration = Annotated[float, BeforeValidator(_duration)]
DurationOrAuto = Annotated[float | None, BeforeValidator(_duration_or_auto)]
Size = Annotated[int, BeforeValidator(_size)]
Path = Annotated[str, AfterValidator(_path)]
Word = Annotated[str, Field(min_length=1, max_length=32768)]


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _ScaleTable(_Table):
    min: int = Field(default=0, ge=0, le=1000)
    max: int = Field(default=4, ge=1, le=1000)
    buffer: int = Field(default=0, ge=0, le=1000)
    concurrency: int = Field(default=8, ge=1, le=10000)
    idle: DurationOrAuto = None

    @model_validator(mode="after")
    def _min_below_max(self) -> "_ScaleTable":
        if self.min > self.max:
            raise _problem(f"min = {self.min} is above max = {self.max}")
        return self


class _CanaryTable(_Table):
    path: Path
    body: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_greedy(self) -> "_CanaryTable":
        if is_openai_path(self.path):
            if self.body is None:
                raise _problem(f"a canary to {self.path} needs a body")
            if self.body.get("temperature") != 0 or self.body.get("stream"):
                raise _problem(
                    "a canary's answer must be the same each time: set temperature = 0 "
                    "and do not stream"
                )
        return self


class _StepTable(_Table):
    path: Path | None = None
    method: Literal["POST", "GET", "PUT"] = "POST"
    body: dict[str, Any] | None = None
    command: list[Word] = []

    @model_validator(mode="after")
    def _is_one_thing(self) -> "_StepTable":
        if (self.path is None) == (not self.command):
            raise _problem("a step has either a path or a command")
        return self

    def step(self) -> HookStep:
        body = None if self.body is None else json.dumps(self.body, sort_keys=True)
        return HookStep(self.path, self.method, body, tuple(self.command))


class _SnapshotTable(_Table):
    canary: _CanaryTable | None = None
    preset: Literal[
        "auto",
        "none",
        "python",
        "vllm",
        "vllm-deep",
        "sglang",
        "sglang-cache",
        "nagara",
        "nagara-carried",
    ] = "auto"
    weights: Literal["auto", "streamed", "carried"] = "auto"
    reach: Literal["same", "wide"] = "same"
    secrets: Literal["none", "allow"] = "none"
    before: list[_StepTable] = []
    after: list[_StepTable] = []
    communicators: Literal["none", "rebuilt"] = "none"

    def chosen(self, automatic: str) -> str | None:
        """The preset; None: the wanted way of the weights is not known of its server."""
        preset = automatic if self.preset == "auto" else self.preset
        return with_weights(preset, self.weights)

    def hooks(self, automatic: str) -> SnapshotHooks:
        preset = PRESETS[self.chosen(automatic) or "none"]
        before = tuple(table.step() for table in self.before)
        after = tuple(table.step() for table in self.after)
        return SnapshotHooks(
            before + preset.before,
            preset.after + after,
            preset.in_python,
            rebuilds_communicators=self.communicators == "rebuilt",
        )

    def rules(self) -> SnapshotRules:
        return SnapshotRules(is_wide=self.reach == "wide", with_secrets=self.secrets == "allow")


class _LimitsTable(_Table):
    # TOML writes whole cores as integers; strict mode would refuse them for a float.
    cpu: Annotated[float, Field(gt=0, le=4096, strict=False)] | None = None
    memory: Size | None = None
    disk: Size | None = None


def _cron(value: str) -> str:
    try:
        parse_cron(value)
    except UsageError as error:
        raise _problem(f"{error.what}; {error.hint}" if error.hint else error.what) from error
    return value


def _region(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_*?.\[\]-]{1,64}", value):
        raise _problem(f"{value!r} is not a region or a pattern such as eu-*")
    return value


class _ScheduleTable(_Table):
    cron: Annotated[str, AfterValidator(_cron)]
    warm: int = Field(ge=0, le=1000)


class _TimeoutsTable(_Table):
    start: Duration = 600.0
    request: Duration = 600.0
    queue: DurationOrAuto = None


class _AppTable(_Table):
    image: Annotated[str, AfterValidator(_image)]
    models: list[Annotated[str, AfterValidator(_model)]] = []
    command: Annotated[list[Word], Field(validate_default=True)] = []
    port: int = Field(default=8000, ge=1, le=65535)
    ready: Path = "/health"
    devices: list[Annotated[str, AfterValidator(_device_name)]] = []
    device: Annotated[Literal["any"], BeforeValidator(_device)] = "any"
    scale: _ScaleTable = _ScaleTable()
    snapshot: bool | _SnapshotTable = True
    env: dict[str, str] = {}
    secrets: list[Annotated[str, AfterValidator(_secret)]] = []
    limits: _LimitsTable = _LimitsTable()
    timeouts: _TimeoutsTable = _TimeoutsTable()
    network: Literal["none", "egress"] = "none"
    schedule: list[_ScheduleTable] = []
    priority: int = Field(default=0, ge=-1000, le=1000)
    regions: list[Annotated[str, AfterValidator(_region)]] = []

    @field_validator("command", mode="after")
    @classmethod
    def _somebody_names_a_command(cls, value: list[str], info: ValidationInfo) -> list[str]:
        image = info.data.get("image")
        if not value and not (image or "").startswith(_IMAGES_WITH_COMMANDS):
            raise _problem("this key is required, unless an image of others names a command")
        return value

    @model_validator(mode="after")
    def _weights_have_a_way(self) -> "_AppTable":
        kept, server = self.snapshot, recognise(self.command)
        if server is not None and server.kind == "nagara":  # maps them, or streams them
            return self
        if isinstance(kept, _SnapshotTable) and not kept.chosen(preset_of(self.command, self.env)):
            raise _problem(
                "snapshot.weights: of this server it is not known how to give its weights away; "
                'say so in before and after steps, with "auto"'
            )
        return self

    @model_validator(mode="after")
    def _env_names(self) -> "_AppTable":
        for name, value in self.env.items():
            if not _ENV.fullmatch(name):
                raise _problem(f"env: {name!r} is not a name of an environment variable")
            if "\0" in value:
                raise _problem(f"env: the value of {name} contains a zero byte")
        if both := sorted(self.env.keys() & set(self.secrets)):
            raise _problem(f"secrets: {both[0]} is in env as well")
        return self


# For each table: the keys to compare an unknown one with.
_TABLES: dict[str, type[_Table]] = {
    "app.*": _AppTable,
    "scale": _ScaleTable,
    "snapshot": _SnapshotTable,
    "canary": _CanaryTable,
    "before": _StepTable,
    "after": _StepTable,
    "limits": _LimitsTable,
    "timeouts": _TimeoutsTable,
    "schedule": _ScheduleTable,
}


def parse_apps(text: str, file: str) -> tuple[App, ...]:
    """The apps of an app file's text, in the file's order.

    Raises:
        AppFileError: naming `file` and every key at fault.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise AppFileError(file, (f"not TOML: {error}",)) from error
    problems = [
        f"{key}: unknown key; the file holds [app.NAME] tables only"
        for key in document
        if key != "app"
    ]
    tables = document.get("app", {})
    if not isinstance(tables, dict) or not tables:
        problems.append("no [app.NAME] table")
        tables = {}
    apps = []
    for name, table in tables.items():
        app, found = _parse_app(name, table)
        problems += found
        if app is not None:
            apps.append(app)
    if problems:
        raise AppFileError(file, tuple(problems))
    return tuple(apps)


def _parse_app(name: str, table: object) -> tuple[App | None, list[str]]:
    where = f"app.{name}"
    problems = []
    if not _NAME.fullmatch(name):
        problems.append(
            f"{where}: a name has at most 40 lower-case letters, digits and inner hyphens"
        )
    elif name in _RESERVED:
        problems.append(f"{where}: this name is one of the gateway's own paths")
    if not isinstance(table, dict):
        return None, [*problems, f"{where}: must be a table"]
    try:
        parsed = _AppTable.model_validate(table)
    except ValidationError as error:
        return None, problems + [_describe(where, detail) for detail in _merged(error)]
    return (_to_app(name, parsed) if not problems else None), problems


def _merged(error: ValidationError) -> list[ErrorDetails]:
    """The faults, without those of a union's branch that was not meant.

    `snapshot` may be a boolean or a table: pydantic reports both attempts.
    """
    kept = []
    for detail in error.errors():
        is_boolean_branch = detail["loc"] == ("snapshot", "bool")
        if is_boolean_branch and isinstance(detail["input"], dict):
            continue
        is_table_branch = detail["loc"] == ("snapshot", "_SnapshotTable")
        if is_table_branch:
            continue
        kept.append(detail)
    return kept


def _describe(app: str, detail: ErrorDetails) -> str:
    keys = [str(part) for part in detail["loc"] if part not in ("bool", "_SnapshotTable")]
    where = ".".join([app, *keys])
    if detail["type"] == "extra_forbidden":
        table = next((key for key in reversed(keys[:-1]) if not key.isdigit()), "app.*")
        return f"{where}: {_unknown_key(table, keys[-1])}"
    if detail["type"] == "missing":
        return f"{where}: this key is required"
    if detail["loc"][:1] == ("snapshot",) and detail["type"].startswith("bool"):
        return f"{where}: must be true, false or a table such as {{canary = {{path = ...}}}}"
    message = detail["msg"]
    return f"{where}: {message[:1].lower()}{message[1:]}"


def _unknown_key(table: str, key: str) -> str:
    allowed = list(_TABLES[table].model_fields) if table in _TABLES else []
    near = difflib.get_close_matches(key, allowed, n=2)
    names = f"nearest: {', '.join(near)}" if near else f"allowed: {', '.join(sorted(allowed))}"
    return f"unknown key; {names}"


def _to_app(name: str, table: _AppTable) -> App:
    server = recognise(table.command)
    canary = default_canary(server, table.ready)
    scale = table.scale
    kept = table.snapshot if isinstance(table.snapshot, _SnapshotTable) else _SnapshotTable()
    if (chosen := kept.canary) is not None:
        asked = with_logprobs(server, chosen.path, chosen.body)
        body = None if asked is None else json.dumps(asked, sort_keys=True)
        canary = Canary(chosen.path, body, is_openai=is_openai_path(chosen.path))
    return App(
        name=name,
        image=table.image,
        models=tuple(table.models),
        command=tuple(table.command),
        port=table.port,
        ready=table.ready,
        canary=canary,
        device=table.device,
        devices=tuple(table.devices),
        env=tuple(sorted(table.env.items())),
        secrets=tuple(dict.fromkeys(table.secrets)),
        limits=Limits(table.limits.cpu, table.limits.memory, table.limits.disk),
        scale=Scale(scale.min, scale.max, scale.concurrency, scale.idle, scale.buffer),
        timeouts=Timeouts(table.timeouts.start, table.timeouts.request, table.timeouts.queue),
        snapshot=table.snapshot is not False,
        schedule=tuple(Entry(entry.cron, entry.warm) for entry in table.schedule),
        priority=table.priority,
        regions=tuple(table.regions),
        network=table.network,
        hooks=kept.hooks(preset_of(table.command, table.env)),
        rules=kept.rules(),
        served_model=server.model if server is not None else None,
    )
