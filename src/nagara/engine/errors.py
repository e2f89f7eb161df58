"""What can go wrong in the engine, drawn as one tree.

    EngineError
    ├── ModelFolderError     the folder given as a model is missing something or broken
    ├── UnsupportedError     the model, option or machine asks for something this engine lacks
    └── RequestError         one request is at fault; the others go on
        ├── ContextLengthError   it can never fit the context or the cache
        ├── UnknownModelError    it names a model that is not served here
        └── OverloadedError      too many wait already

This room installs alone, so the tree has a root of its own.
"""


class EngineError(Exception):
    """Root of the tree.

    Args:
        what: one sentence that names the fault.
        where: the file or option it concerns.
        hint: what to do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\nhint: {self.hint}" if self.hint else text


class ModelFolderError(EngineError):
    """A model folder lacks a file or holds a broken one; `where` names the file."""


class UnsupportedError(EngineError):
    """The model, the option or the machine asks for something this engine does not do."""


class RequestError(EngineError):
    """One request is wrong; `where` names the parameter.

    `status` is the HTTP status and `code` the short machine-readable reason for clients.
    """

    status = 400
    code: str | None = None


class ContextLengthError(RequestError):
    """The request can never fit: longer than the context or the whole cache."""

    code = "context_length_exceeded"


class OverloadedError(RequestError):
    """Too many requests wait already: the client should come back later."""

    status = 429
    code = "overloaded"


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"
