"""Reading a text file that a person has named."""

from pathlib import Path

from nagara.base.errors import UsageError


def read_text_file(file: Path, hint: str | None = None) -> str:
    """Its text. Raises `UsageError` that says why there is none; `hint` where it is not there."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError("there is no such file", where=str(file), hint=hint) from error
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise UsageError(what, where=str(file)) from error
    except UnicodeDecodeError as error:
        raise UsageError("is no text: not UTF-8", where=str(file)) from error
