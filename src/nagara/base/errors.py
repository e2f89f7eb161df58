"""The root of every error that nagara shows to a person.

A message answers three questions: what went wrong, where, and what to do about it. Each room
derives its own small tree from `NagaraError`; branches exist only where a caller acts
differently.
"""


class NagaraError(Exception):
    """Something went wrong that a person can act upon.

    Args:
        what: one sentence that names the fault.
        where: the file, key, host object or address it concerns.
        hint: what to do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\nhint: {self.hint}" if self.hint else text


class UsageError(NagaraError):
    """The request itself is wrong: an unknown key, a bad value, a missing file."""

    exit_code = 2
