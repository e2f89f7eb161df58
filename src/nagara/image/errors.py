"""What can go wrong with images, by what a caller does about it.

ImageError
├── UnknownImageError        no image of that name
├── UnrepresentableError     the source holds something that no mount could show; names it
├── BadArchiveError          an archive, layout or registry answer is malformed or hostile
├── BadIndexError            an index is malformed or hostile
├── BadTraceError            an access trace is malformed or hostile
└── SourceError              the source cannot be read, or changed meanwhile
"""

from nagara.base.errors import NagaraError


class ImageError(NagaraError):
    """An image cannot be made, found or used."""


class UnknownImageError(ImageError):
    """No image of that name."""

    exit_code = 2


class UnrepresentableError(ImageError):
    """The source holds something that cannot be shown as it is."""


class BadArchiveError(ImageError):
    """What should be an archive of files is something else."""


class BadIndexError(ImageError):
    """What should be an index is something else."""


class BadTraceError(ImageError):
    """What should be an access trace is something else."""


class SourceError(ImageError):
    """The source cannot be read."""
