"""The tools of a chat request: which are offered, and whether one must be called.

Pure. A call that must be made is a grammar of the answer: the form that Hermes and Qwen models
write, with a name and arguments that fit one of the tools.
"""

import json
from typing import Any

from nagara.engine.errors import RequestError
from nagara.engine.request import Guide
from nagara.engine.tools import CLOSE, OPEN

Tools = list[dict[str, Any]]


def parse_tools(tools: object, choice: object) -> tuple[Tools | None, Guide | None]:
    """What the chat template is shown, and the form the answer must have.

    Raises:
        RequestError: no list of functions, or the choice names none of them.
    """
    offered = _checked(tools)
    if choice in (None, "auto"):
        return offered or None, None
    if choice == "none":
        return None, None
    if choice == "required":
        if not offered:
            raise RequestError("tool_choice required needs tools", where="tool_choice")
        return offered, _call_of(offered)
    name = _named(choice)
    chosen = [tool for tool in offered if tool["function"]["name"] == name]
    if not chosen:
        raise RequestError(f"tool_choice names {name!r}, which is no tool", where="tool_choice")
    return offered, _call_of(chosen)


def _checked(tools: object) -> Tools:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError("tools must be a list", where="tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("each tool must be a function with a name", where="tools")
        if not isinstance(function.get("parameters", {}), dict):
            raise RequestError("the parameters of a tool must be a JSON schema", where="tools")
    return tools


def _named(choice: object) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            "tool_choice must be auto, none, required, or name a function", where="tool_choice"
        )
    return name


def _call_of(tools: Tools) -> Guide:
    """One call of one of the tools, as a grammar in llguidance's variant of Lark."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": {"type": "object", **tool["function"].get("parameters", {})},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    form = json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})
    begin, end = json.dumps(OPEN + "\n"), json.dumps("\n" + CLOSE)
    return Guide("lark", f"start: {begin} call {end}\ncall: %json {form}\n")
