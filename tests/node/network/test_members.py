"""The files that make a process a member of a cluster."""

import subprocess

import pytest

from nagara.base.errors import UsageError
from nagara.node.network.address import split_address, tcp_address
from nagara.node.network.cluster_token import own_token, read_token
from nagara.node.network.membership import read_membership
from nagara.store.certificates import read_certificates
from nagara.testing.certificates import new_authority


def test_a_token_is_made_once_and_only_its_owner_may_read_it(tmp_path):
    file = tmp_path / "state" / "cluster-token"
    token = own_token(file)
    assert (file.stat().st_mode & 0o777) == 0o600
    assert own_token(file) == token == read_token(file)
    assert len(token.value) == 64
    assert token.value not in repr(token)
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("x" * 64, 0o644, "others may read"),
        ("short", 0o600, "32 or more"),
        ("two lines\n" + "x" * 64, 0o600, "on one line"),
        ("\u00e9" * 40, 0o600, "printable"),
        ("", 0o600, "32 or more"),
    ],
)
def test_a_token_file_that_will_not_do_is_named(tmp_path, text, mode, said):
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(UsageError, match=said) as caught:
        read_token(file)
    assert caught.value.where == str(file)
    assert caught.value.hint


def test_a_token_file_that_was_named_is_not_made(tmp_path):
    with pytest.raises(UsageError, match="cannot be read") as caught:
        read_membership(tmp_path, tmp_path / "absent", None)
    assert "openssl rand" in str(caught.value)
    assert read_membership(tmp_path, None, None).certificates is None


@pytest.fixture
def folder(tmp_path):
    return new_authority().member(tmp_path / "certificates")


def test_certificates_as_the_openssl_command_makes_them_will_do(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    new = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=nagara"
    for command in (
        f"{new} -x509 -days 3650 -keyout ca.key -out ca.pem",
        f"{new} -x509 -days 365 -CA ca.pem -CAkey ca.key -keyout key.pem -out cert.pem",
    ):
        subprocess.run(command.split(), cwd=made, check=True, capture_output=True)
    (made / "key.pem").chmod(0o600)
    assert read_certificates(made).folder == made


@pytest.mark.parametrize("name", ["ca.pem", "cert.pem", "key.pem"])
@pytest.mark.parametrize("fault", ["absent", "empty", "nonsense"])
def test_a_file_that_will_not_do_is_named(folder, name, fault):
    file = folder / name
    if fault == "absent":
        file.unlink()
    else:
        file.write_text("" if fault == "empty" else "-----BEGIN NONSENSE-----\n")
    with pytest.raises(UsageError) as caught:
        read_certificates(folder)
    assert caught.value.where == str(file)


def test_a_key_of_another_certificate_is_named(folder, tmp_path):
    other = new_authority().member(tmp_path / "other")
    (folder / "key.pem").write_bytes((other / "key.pem").read_bytes())
    with pytest.raises(UsageError, match=r"not the key of cert\.pem"):
        read_certificates(folder)


def test_a_key_with_a_passphrase_is_refused_without_a_question(folder):
    key = folder / "key.pem"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", key, "-out", folder / "locked", "-passout", "pass:x"],
        check=True,
    )
    (folder / "locked").replace(key)
    key.chmod(0o600)
    with pytest.raises(UsageError, match="passphrase") as caught:
        read_certificates(folder)
    assert caught.value.where == str(key)


def test_a_key_that_others_may_read_is_refused(folder):
    (folder / "key.pem").chmod(0o640)
    with pytest.raises(UsageError, match="others may read"):
        read_certificates(folder)


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        read_certificates(tmp_path / "absent")


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("tcp://host:9300", ("host", 9300)),
        ("10.0.0.7:9300", ("10.0.0.7", 9300)),
        ("tcp://[fd00::7]:9300", ("fd00::7", 9300)),
    ],
)
def test_addresses_are_taken_apart_and_put_together(address, parts):
    assert split_address(address) == parts
    assert split_address(tcp_address(*parts)) == parts


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        ":9300",
        "host:",
        "host:x",
        "host:0",
        "host:99999",
        "u@host:1",
        "host:1/x",
        "::1:1",
    ],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UsageError, match="no address"):
        split_address(address)


def test_an_agents_own_port_may_be_any():
    assert split_address("0.0.0.0:0", is_own=True) == ("0.0.0.0", 0)
