"""App files: what is taken, what is refused and how that is said."""

import json
from dataclasses import replace

import pytest

from nagara.contract.replica import ModelMount, SnapshotHooks
from nagara.control.app_document import from_document, to_document
from nagara.control.appfile import parse_apps
from nagara.control.errors import AppFileError
from nagara.control.presets import PRESETS
from nagara.control.refusal import Refusal
from nagara.control.routing import check_path

SMOL = """
[app.smol]
image    = "host"
models   = ["smollm2"]
command  = ["nagara", "engine", "serve", "/models/smollm2", "--port", "${PORT}"]
port     = 8123
ready    = "/health"
device   = "any"
scale    = {min = 0, max = 4, buffer = 0, concurrency = 8, idle = "auto"}
snapshot = true
env      = {LOG_LEVEL = "info"}
limits   = {cpu = 2, memory = "8GiB"}
timeouts = {start = "10m", request = "90s", queue = "auto"}
"""


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(AppFileError) as caught:
        parse_apps(text, "app.toml")
    assert str(caught.value).startswith("app.toml: ")
    return caught.value.problems


def one(keys: str) -> str:
    return f'[app.a]\nimage = "host"\ncommand = ["x"]\n{keys}\n'


def test_the_example_of_the_design_is_read() -> None:
    (app,) = parse_apps(SMOL, "app.toml")
    assert app.port == 8123
    assert app.limits.memory_bytes == 8 * 2**30
    assert app.limits.cpu == 2.0
    assert app.timeouts.request_s == 90
    assert app.timeouts.queue_s is None
    assert app.scale.idle_s is None
    assert app.env == (("LOG_LEVEL", "info"),)
    spec = app.spec((ModelMount("smollm2", "d"),))
    assert spec.definition == app.definition
    assert spec.start_timeout_s == 600


def test_an_app_survives_the_journey_through_json() -> None:
    (app,) = parse_apps(SMOL, "app.toml")
    assert from_document(json.loads(json.dumps(to_document(app)))) == app


def test_only_what_makes_a_replica_changes_the_definition() -> None:
    (app,) = parse_apps(SMOL, "f")
    for old, new in (
        ("max = 4", "max = 5"),
        ("90s", "91s"),
        ("concurrency = 8", "concurrency = 1"),
    ):
        assert parse_apps(SMOL.replace(old, new), "f")[0].definition == app.definition
    for old, new in (("8123", "8124"), ('"info"', '"debug"'), ("8GiB", "9GiB"), ("smol]", "b]")):
        assert parse_apps(SMOL.replace(old, new), "f")[0].definition != app.definition


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("limits = {disk = 5}", "app.a.limits.disk: a size is text with a unit, such as"),
        ('network = "host"', "app.a.network: input should be 'none' or 'egress'"),
        ("scale = {buffer = -1}", "app.a.scale.buffer: input should be greater than or equal to 0"),
        ('device = {type = ["h100"]}', "app.a.device: choosing a device is not supported yet"),
        ('zzz = "1s"', "app.a.zzz: unknown key; allowed: command, device"),
        ("scale = {mx = 1}", "app.a.scale.mx: unknown key; nearest: max"),
        ("scale = {min = 3, max = 2}", "app.a.scale: min = 3 is above max = 2"),
        ("scale = {max = 0}", "app.a.scale.max: input should be greater than or equal to 1"),
        ("scale = {max = 1.0}", "app.a.scale.max: input should be a valid integer"),
        ("port = 70000", "app.a.port: input should be less than or equal to 65535"),
        ('scale = {idle = "5"}', "app.a.scale.idle: '5' is not a duration"),
        ('timeouts = {start = "0s"}', "app.a.timeouts.start: a duration must be above zero"),
        ("snapshot = 1", "app.a.snapshot: must be true, false or"),
        ('secrets = ["a b"]', "app.a.secrets.0: 'a b' is not a name of a secret"),
        ('secrets = ["T"]\nenv = {T = "1"}', "app.a: secrets: T is in env as well"),
        ("snapshot = {canary = {pth = 1}}", "app.a.snapshot.canary.path: this key is required"),
        (
            'snapshot = {before = [{pth = "/x"}]}',
            "app.a.snapshot.before.0.pth: unknown key; nearest",
        ),
        (
            "snapshot = {before = [{}]}",
            "app.a.snapshot.before.0: a step has either a path or a com",
        ),
        ('snapshot = {preset = "x"}', "app.a.snapshot.preset: input should be 'auto', 'none'"),
        (
            'snapshot = {weights = "streamed"}',
            "app.a: snapshot.weights: of this server it is not known",
        ),
        ('snapshot = {weights = "x"}', "app.a.snapshot.weights: input should be 'auto', 'str"),
        ('snapshot = {communicators = "x"}', "app.a.snapshot.communicators: input should be"),
        ('devices = ["gpu0"]', "app.a.devices.0: 'gpu0' names no device"),
        ('env = {"A=B" = "1"}', "app.a: env: 'A=B' is not a name"),
        ("env = {A = 1}", "app.a.env.A: input should be a valid string"),
        ('ready = "health"', "app.a.ready: a path begins with"),
        ('ready = "/a b"', "app.a.ready: a path begins with"),
        ('models = ["../x"]', "app.a.models.0: '../x' is not a model name"),
    ],
)
def test_a_fault_is_said_with_its_key(keys: str, said: str) -> None:
    assert any(problem.startswith(said) for problem in problems(one(keys))), problems(one(keys))


@pytest.mark.parametrize(
    "image",
    [
        "dir:/x",
        "venv:/srv/.venv",
        "oci:/x:v1",
        "docker-archive:/x.tar",
        "registry:h/n:1",
        "image:x",
    ],
)
def test_images_come_from_many_places(image: str) -> None:
    (app,) = parse_apps(one("").replace('"host"', f'"{image}"'), "f")
    assert app.image == image


@pytest.mark.parametrize("image", ["venv:.venv", "dir:x", "oci:./x"])
def test_an_images_path_is_the_machines(image: str) -> None:
    (problem,) = problems(one("").replace('"host"', f'"{image}"'))
    assert "must begin with a slash" in problem


@pytest.mark.parametrize("image", ["layer:/x", "dir:", "registry", "image", "ext4:/x", "host:"])
def test_an_unknown_kind_of_image_is_refused_with_the_known_ones(image: str) -> None:
    (problem,) = problems(one("").replace('"host"', f'"{image}"'))
    assert "unknown image" in problem
    assert "registry:" in problem


@pytest.mark.parametrize("image", ["oci:/x", "docker-archive:/x", "registry:h/n", "image:base"])
def test_an_image_of_others_may_name_the_command(image: str) -> None:
    text = one("").replace('"host"', f'"{image}"').replace('command = ["x"]\n', "")
    (app,) = parse_apps(text, "f")
    assert app.command == ()


@pytest.mark.parametrize("image", ["host", "dir:/x", "venv:/x"])
@pytest.mark.parametrize("command", ["", "command = []\n"])
def test_what_has_no_command_of_its_own_needs_one(image: str, command: str) -> None:
    text = one("").replace('"host"', f'"{image}"').replace('command = ["x"]\n', command)
    (problem,) = problems(text)
    assert problem.startswith("app.a.command: this key is required")


def test_another_tree_of_the_same_source_is_another_definition() -> None:
    (app,) = parse_apps(one("").replace('"host"', '"dir:/x"'), "f")
    first, second = replace(app, image_index="a.1"), replace(app, image_index="b.1")
    assert first.definition != second.definition
    assert first.spec(()).image_index == "a.1"
    assert from_document(json.loads(json.dumps(to_document(first)))) == first


def test_all_faults_of_a_file_are_shown_at_once() -> None:
    found = problems('x = 1\n[app.A]\nimage = "hots"\n[app.b]\nport = 0\nnetwork = 1\n')
    assert [problem.partition(":")[0] for problem in found] == [
        "x", "app.A", "app.A.image", "app.A.command",
        "app.b.image", "app.b.command", "app.b.port", "app.b.network",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["v1", "api", "healthz", "a_b", "a" * 41, "-a"])
def test_names_that_cannot_be_a_path_or_host_are_refused(name: str) -> None:
    assert problems(one("").replace("app.a", f'app."{name}"'))


@pytest.mark.parametrize("text", ["", "[app]\n", "app = 3\n", "[app\n", "app = [1]\n"])
def test_files_without_an_app_are_refused(text: str) -> None:
    assert problems(text)


def canary(command: str, keys: str = "") -> tuple[str, object, bool]:
    text = one(keys).replace('["x"]', command)
    found = parse_apps(text, "f")[0].canary
    return found.path, None if found.body is None else json.loads(found.body), found.is_openai


def test_a_known_openai_server_gets_a_greedy_completion_as_canary() -> None:
    path, body, is_openai = canary('["/usr/bin/nagara", "engine", "serve", "/models/m"]')
    assert (path, is_openai) == ("/v1/completions", True)
    assert isinstance(body, dict)
    assert (body["temperature"], body["max_tokens"], body["logprobs"]) == (0, 4, 1)
    assert body["model"] == "m"


@pytest.mark.parametrize(
    ("command", "model"),
    [
        ('["vllm", "serve", "/models/m"]', "/models/m"),
        ('["vllm", "serve", "/models/m", "--served-model-name", "n"]', "n"),
        ('["python3", "-m", "vllm.entrypoints.openai.api_server", "--model=q"]', "q"),
        ('["python", "-m", "sglang.launch_server", "--model-path", "q"]', "q"),
    ],
)
def test_servers_that_insist_on_a_model_are_named_one(command: str, model: str) -> None:
    _, body, is_openai = canary(command)
    assert is_openai
    assert isinstance(body, dict)
    assert body["model"] == model


def test_other_servers_are_asked_their_readiness_path() -> None:
    assert canary('["./serve"]', 'ready = "/up"') == ("/up", None, False)


def test_a_chosen_canary_must_be_greedy() -> None:
    keys = 'snapshot = {canary = {path = "/v1/completions", body = {prompt = "x"%s}}}'
    (problem,) = problems(one(keys % ""))
    assert "set temperature = 0" in problem
    assert canary('["x"]', keys % ", temperature = 0") == (
        "/v1/completions", {"prompt": "x", "temperature": 0}, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "own", "asked"),
    [
        ("/v1/completions", "", 1),
        ("/v1/completions", ", logprobs = 3", 3),
        ("/v1/chat/completions", "", True),
        ("/score", "", None),
    ],
)
def test_a_chosen_canary_asks_a_known_server_for_logprobs(path: str, own: str, asked: int) -> None:
    keys = f'snapshot = {{canary = {{path = "{path}", body = {{temperature = 0{own}}}}}}}'
    _, body, _ = canary('["vllm", "serve", "m"]', keys)
    assert isinstance(body, dict)
    assert body.get("logprobs") == asked
    _, body, _ = canary('["./serve"]', keys)  # may not have any, and then refuses the request
    assert isinstance(body, dict)
    assert ("logprobs" in body) == bool(own)


def test_the_reach_of_a_snapshot_is_part_of_what_the_app_is() -> None:
    same, also_same, wide = (
        parse_apps(one(keys), "f")[0]
        for keys in ("", 'snapshot = {reach = "same"}', 'snapshot = {reach = "wide"}')
    )
    assert (same.rules.is_wide, wide.rules.is_wide) == (False, True)
    assert same.definition == also_same.definition != wide.definition
    assert from_document(json.loads(json.dumps(to_document(wide)))) == wide
    older = {name: value for name, value in to_document(same).items() if name != "rules"}
    assert from_document(older) == same


def test_secrets_are_named_and_kept_out_of_snapshots_by_default() -> None:
    app, allowing, without = (
        parse_apps(one(keys), "f")[0]
        for keys in (
            'secrets = ["TOKEN", "KEY", "TOKEN"]',
            'secrets = ["TOKEN", "KEY"]\nsnapshot = {secrets = "allow"}',
            "",
        )
    )
    assert app.spec(()).secret_names == ("TOKEN", "KEY")
    assert app.spec(()).secrets == ()
    assert (app.rules.with_secrets, allowing.rules.with_secrets) == (False, True)
    assert len({one.definition for one in (app, allowing, without)}) == 3
    assert from_document(json.loads(json.dumps(to_document(app)))) == app


def hooks(command: str, keys: str = "") -> SnapshotHooks:
    app = parse_apps(one(keys).replace('["x"]', command), "f")[0]
    assert from_document(json.loads(json.dumps(to_document(app)))) == app
    return app.hooks


VLLM = '["vllm", "serve", "/models/m", "--enable-sleep-mode"]'


def test_a_vllm_that_can_sleep_is_put_to_sleep_before_it_is_saved() -> None:
    found = hooks(VLLM, 'env = {VLLM_SERVER_DEV_MODE = "1"}')
    assert [step.path for step in found.before] == ["/sleep?level=1"]
    assert [step.path for step in found.after] == ["/wake_up"]
    assert hooks(VLLM) == SnapshotHooks(in_python=True)  # its endpoints are not there


def test_deep_sleep_reads_the_weights_again_before_the_cache_is_made() -> None:
    found = hooks(VLLM, 'snapshot = {preset = "vllm-deep"}')
    assert [step.path for step in found.before] == ["/sleep?level=2"]
    paths = [(step.path or "").partition("?")[0] for step in found.after]
    assert paths == ["/wake_up", "/collective_rpc", "/wake_up"]


@pytest.mark.parametrize(
    ("command", "preset", "way", "before"),
    [
        (VLLM, "vllm", "streamed", ["/sleep?level=2"]),
        (VLLM, "vllm-deep", "carried", ["/sleep?level=1"]),
        ('["nagara", "engine", "serve", "/m", "--device", "cuda"]', "auto", "streamed",
         ["/sleep?weights=released"]),
        ('["nagara", "engine", "serve", "/m", "--device=cuda"]', "auto", "carried", ["/sleep"]),
        ('["nagara", "engine", "serve", "/m"]', "auto", "streamed", []),  # mapped
        ('["x"]', "auto", "carried", []),
    ],
)  # fmt: skip
def test_weights_go_the_way_that_is_wanted(
    command: str, preset: str, way: str, before: list[str]
) -> None:
    found = hooks(command, f'snapshot = {{preset = "{preset}", weights = "{way}"}}')
    assert [step.path for step in found.before] == before


def test_devices_and_rebuilt_communicators_reach_the_replica() -> None:
    keys = 'devices = ["nvidia.com/gpu=0"]\nsnapshot = {communicators = "rebuilt"}'
    app = parse_apps(one(keys), "f")[0]
    assert from_document(json.loads(json.dumps(to_document(app)))) == app
    spec = app.spec(())
    assert spec.devices == ("nvidia.com/gpu=0",)
    assert spec.hooks.rebuilds_communicators
    assert parse_apps(one(""), "f")[0].definition != app.definition


SGLANG = '["python", "-m", "sglang.launch_server", "--enable-memory-saver"{}]'


def test_a_sglang_without_a_copy_of_its_weights_releases_its_cache_alone() -> None:
    cache = hooks(SGLANG.format(""))
    assert [(step.path, step.body) for step in (*cache.before, *cache.after)] == [
        ("/release_memory_occupation", '{"tags": ["kv_cache"]}'),
        ("/resume_memory_occupation", '{"tags": ["kv_cache"]}'),
    ]
    whole = hooks(SGLANG.format(', "--enable-weights-cpu-backup"'))
    assert [step.body for step in (*whole.before, *whole.after)] == ["{}", "{}"]


def test_steps_of_the_file_stand_around_those_of_the_preset() -> None:
    keys = """snapshot = {preset = "sglang", before = [{path = "/drain", body = {now = true}}],
    after = [{command = ["touch", "/srv/back"]}]}""".replace("\n", "")
    found = hooks('["x"]', keys)
    assert [step.path for step in found.before] == ["/drain", "/release_memory_occupation"]
    assert found.before[0].body == '{"now": true}'
    assert [step.path for step in found.after] == ["/resume_memory_occupation", None]
    assert found.after[1].command == ("touch", "/srv/back")


def test_other_servers_are_asked_nothing_and_hooks_belong_to_the_definition() -> None:
    assert hooks('["x"]') == SnapshotHooks()
    plain, python = (
        parse_apps(one(keys), "f")[0].definition for keys in ("", 'snapshot = {preset = "python"}')
    )
    assert plain != python


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"none"}))
def test_no_client_reaches_the_paths_of_a_preset(preset: str) -> None:
    for step in (*PRESETS[preset].before, *PRESETS[preset].after):
        with pytest.raises(Refusal, match="control path"):
            check_path(step.path or "")
