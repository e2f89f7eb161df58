"""What makes a process a member of a cluster: the shared token, and maybe certificates."""

from dataclasses import dataclass
from pathlib import Path

from nagara.node.network.cluster_token import FILE_NAME, ClusterToken, own_token, read_token
from nagara.store.certificates import Certificates, read_certificates


@dataclass(frozen=True, slots=True)
class Membership:
    """`certificates` None: connections are neither secret nor safe from being changed."""

    token: ClusterToken
    certificates: Certificates | None = None


def read_membership(state: Path, token_file: Path | None, certificates: Path | None) -> Membership:
    """From the files given; without a token's the state folder has one, made at need.

    Raises:
        UsageError: naming the file that is absent, unfit or readable by others.
    """
    token = read_token(token_file) if token_file is not None else own_token(state / FILE_NAME)
    return Membership(token, None if certificates is None else read_certificates(certificates))
