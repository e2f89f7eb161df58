"""The admin API as an OpenAPI document, made from its table of routes. Pure.

A route's words are its handler's docstring: the first paragraph is the summary, `?name=` in it
names a parameter of the query.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from nagara import __version__

Route = tuple[str, re.Pattern[str], Callable[..., Any]]

_GROUP = re.compile(r"\(\?P<(\w+)>(?:[^()]|\([^()]*\))*\)")
_QUERY = re.compile(r"`\?(\w+)=")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "hint": {"type": ["string", "null"]},
            },
        }
    },
}


def path_of(pattern: re.Pattern[str]) -> str:
    """`/api/apps/(?P<app>[a-z]+)` → `/api/apps/{app}`."""
    return _GROUP.sub(lambda match: "{" + match[1] + "}", pattern.pattern).replace("\\", "")


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """OpenAPI 3.1 for the routes."""
    paths: dict[str, Any] = {}
    for method, pattern, handler in routes:
        path = path_of(pattern)
        paths.setdefault(path, {})[method.lower()] = _operation(method, pattern, handler)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "nagara's admin API",
            "version": __version__,
            "description": 'Errors are `{"error": {"message", "type", "param", "code"}}`.',
        },
        "security": [{"admin": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "admin": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The content of admin.token in the state folder.",
                }
            },
        },
    }


def _operation(
    method: str, pattern: re.Pattern[str], handler: Callable[..., Any]
) -> dict[str, Any]:
    words = " ".join((handler.__doc__ or "").split())
    inside = [{"name": name, "in": "path", "required": True} for name in pattern.groupindex]
    asked = [{"name": name, "in": "query", "required": False} for name in _QUERY.findall(words)]
    text = {"type": "string"}
    return {
        "operationId": method.lower() + re.sub(r"[^a-z]+", "_", path_of(pattern)).rstrip("_"),
        "description": words,
        "parameters": [{**one, "schema": text} for one in (*inside, *asked)],
        "responses": {
            "200": {"description": "Done, or what was asked for."},
            "401": _refusal("The admin token is missing or wrong."),
            "default": _refusal("It cannot be done; why is said."),
        },
    }


def _refusal(description: str) -> dict[str, Any]:
    """An answer in the shape of all errors."""
    shape = {"schema": {"$ref": "#/components/schemas/Error"}}
    return {"description": description, "content": {"application/json": shape}}
