"""From a request's address to an app and the path its replica sees. Pure.

Three ways in: by host (`APP.anything`), by path (`/APP/...`), by model (`/v1/...` with the model
in the JSON body). Paths by which a replica is controlled are denied on each of them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from nagara.control.app import App
from nagara.control.refusal import Refusal, bad_request

# Sleep, wake, weights and development endpoints of the known servers, and nagara's own hooks.
_DENIED = re.compile(
    r"/(?:sleep|wake|wake_up|is_sleeping|collective_rpc|reset_prefix_cache|reset_mm_cache"
    r"|reset_encoder_cache|release_kv_cache_memory|server_info"
    r"|release_memory_occupation|resume_memory_occupation|update_weights_from_\w+"
    r"|nagara(?:/.*)?)/?",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"\[.*|.*\.\d+")


@dataclass(frozen=True, slots=True)
class Target:
    """`app` by name, the path and query its replica sees, and the prefix that was taken off."""

    app: str
    path: str
    prefix: str


def app_of_host(host: str | None) -> str | None:
    """`smol.example.org:8080` → `smol`; None for addresses and single labels."""
    if not host:
        return None
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    label, _, rest = name.partition(".")
    return label.lower() if label and rest and not _ADDRESS.fullmatch(name) else None


def target_of_path(raw_path: str) -> Target:
    """`/smol/v1/x?y` → app `smol`, path `/v1/x?y`, prefix `/smol`."""
    path, mark, query = raw_path.partition("?")
    _, _, rest = path.partition("/")
    app, slash, below = rest.partition("/")
    return Target(app, f"{slash or '/'}{below}{mark}{query}", f"/{app}")


def check_path(raw_path: str) -> None:
    """Refuses paths that mean something else to the replica than to us, and control paths.

    Raises:
        Refusal: 400 for a path with `.`, `..` or a fragment in it, 403 for a control path.
    """
    path = unquote(raw_path.partition("?")[0])
    if not raw_path.startswith("/"):
        raise bad_request("the request's target must be a path")
    if "#" in raw_path:  # on the way to the replica it would be cut off, and the path another one
        raise bad_request("'#' may not be in a path; write %23")
    segments = path.split("/")
    if "." in segments or ".." in segments or "\\" in path:
        raise bad_request("'.' and '..' may not be in a path")
    plain = "/" + "/".join(segment for segment in segments if segment)
    if _DENIED.fullmatch(plain):
        raise Refusal(403, f"{plain} is a control path of replicas", code="control_path")


def app_of_model(model: str, apps: Iterable[App]) -> App | None:
    """The app an OpenAI client means by `model`: an app's name goes before a model's.

    Raises:
        Refusal: several apps serve that model.
    """
    serving = []
    for app in apps:
        if app.name == model:
            return app
        if model in app.model_names:
            serving.append(app)
    if len(serving) > 1:
        names = ", ".join(sorted(app.name for app in serving))
        raise bad_request(f"several apps serve the model {model!r}: ask for one of {names}")
    return serving[0] if serving else None
