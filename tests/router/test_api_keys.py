"""Keys: what a file may hold, who is known, and that nothing of a key is ever said."""

import hashlib
import json

import pytest

from baton.core.errors import ConfigInvalid, InvalidRequest, Overloaded, Unauthenticated
from baton.core.handshakes import GRACE_S, SAY_EVERY_S, Handshakes
from baton.router.access.api_keys import ApiKeys, KeyEntry, Principal, digest_of, new_key, parse_keys, read_keys
from baton.router.access.authenticator import ANYBODY, Authenticator
from baton.router.access.quota import Quota
from baton.router.access.security import ClientLimits

pytestmark = pytest.mark.fast

SHA = "a" * 64


def line(**changes):
    entry = {"name": "ada", "tenant": "acme", "sha256": SHA, "expires": None} | changes
    return json.dumps({key: value for key, value in entry.items() if value != "left out"})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '"a"',
        "[" * 100_000,
        line(name=""),
        line(name="x" * 257),
        line(name="two\nlines"),
        line(name=3),
        line(name="left out"),
        line(tenant=""),
        line(tenant="left out"),
        line(sha256=SHA[1:]),
        line(sha256=SHA.upper()),
        line(sha256="g" * 64),
        line(sha256=None),
        line(expires="tomorrow"),
        line(expires="2030-01-01T00:00:00"),
        line(expires=17),
        line(key="baton-secret"),
        line() + "\n" + line(sha256="b" * 64),
        line() + "\n" + line(name="bob"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_line_and_not_quoted(text, tmp_path):
    with pytest.raises(ConfigInvalid, match=r"keys:?") as error:
        parse_keys("# a comment\n\n" + text, "keys")
    assert SHA[:32] not in error.value.to_wire() and "baton-secret" not in error.value.to_wire()


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "binary", "."):
        with pytest.raises(ConfigInvalid, match="api_keys_file"):
            read_keys(tmp_path / name)


def test_entries_are_read_as_they_were_written():
    entries = (
        KeyEntry(name="ada", tenant="äcme, Inc.", sha256=SHA, expires="2030-01-01T00:00:00+00:00"),
        KeyEntry(name="bob", tenant="b", sha256="b" * 64),
    )
    assert parse_keys("\n".join(entry.to_line() for entry in entries), "keys") == entries
    assert entries[0].expires_s == 1893456000.0 and entries[1].expires_s == float("inf")
    assert SHA not in repr(entries)


def test_keys_are_long_random_and_ascii():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("baton-") and len(key) >= 49 and key.isascii() for key in keys)
    assert digest_of("baton-x") == hashlib.sha256(b"baton-x").hexdigest()
    digest_of("\udcff")  # what no key can be is hashed like anything else


def test_a_key_is_good_until_the_moment_it_expires(tmp_path):
    path, now, key = tmp_path / "keys", [0.0], new_key()
    path.write_text(line(sha256=digest_of(key), expires="2030-01-01T00:00:00+00:00"))
    keys = ApiKeys(path, now_s=lambda: now[0])
    for header in (f"Bearer {key}", f"bearer {key}", f"  BEARER   {key}  "):
        assert keys.authenticate(header).tenant == "acme"
    now[0] = 1893456000.0
    with pytest.raises(Unauthenticated, match="expired") as error:
        keys.authenticate(f"Bearer {key}")
    assert error.value.http_status == 401 and error.value.grpc_code == "UNAUTHENTICATED"
    for header in (None, "", "Bearer", f"Basic {key}", key, f"Bearer {key}x", f"Bearer {key[:-1]}", f"Bearer {SHA}"):
        with pytest.raises(Unauthenticated) as error:
            keys.authenticate(header)
        assert key[:-1] not in error.value.to_wire()
    assert key not in repr(keys.__dict__)


def test_an_empty_file_admits_nobody_and_no_file_everybody(tmp_path):
    path = tmp_path / "keys"
    path.write_text("")
    with pytest.raises(Unauthenticated):
        Authenticator(path).authenticate(f"Bearer {new_key()}")
    assert Authenticator().authenticate(None) == ANYBODY
    assert Authenticator().tenant_of(ANYBODY, "whoever") == "whoever"


def test_a_file_that_loses_its_last_key_admits_nobody_from_then_on_and_says_so(tmp_path, caplog):
    path, key = tmp_path / "keys", new_key()
    path.write_text(line(sha256=digest_of(key)))
    keys = ApiKeys(path, check_s=0.0)
    assert keys.authenticate(f"Bearer {key}").name
    path.write_text("")
    with pytest.raises(Unauthenticated):
        keys.authenticate(f"Bearer {key}")
    (said,) = caplog.records
    assert (said.levelname, "0 in" in said.getMessage()) == ("WARNING", True)


def test_a_stream_gives_its_place_back_whatever_ends_it():
    authenticator = Authenticator(limits=ClientLimits(max_streams_per_tenant=2, max_streams_per_connection=1))
    with pytest.raises(ZeroDivisionError), authenticator.stream("a", "one"):
        raise ZeroDivisionError
    with (
        authenticator.stream("a", "one"),
        authenticator.stream("a", "two"),
        authenticator.stream("b"),
        authenticator.stream("b"),
    ):
        for tenant, connection in (("a", "three"), ("c", "one"), ("b", "")):
            with pytest.raises(Overloaded) as error, authenticator.stream(tenant, connection):
                pytest.fail("let in")
            assert error.value.http_status == 429 and error.value.fields["retry_after_s"] > 0
    with authenticator.stream("a", "one"), authenticator.stream("a", "two"):
        pass


def test_a_call_that_alone_exceeds_a_limit_is_not_told_to_try_again():
    limits = ClientLimits(max_streams_per_tenant=3, max_streams_per_connection=2)
    authenticator = Authenticator(limits=limits)
    for num, connection in ((4, ""), (4, "one"), (3, "one")):
        with pytest.raises(InvalidRequest, match=f"asks for {num} answers"), authenticator.stream("a", connection, num):
            pytest.fail("let in")
    with authenticator.stream("a", "one", 2), pytest.raises(Overloaded), authenticator.stream("a", "two", 2):
        pytest.fail("let in")


def test_header_bytes_of_calls_under_way_are_a_principals():
    authenticator = Authenticator(limits=ClientLimits(max_header_bytes_per_tenant=100))
    narrow = Principal("ada", "a", Quota(max_header_bytes=60))
    with authenticator.stream("a", num_header_bytes=70), authenticator.stream("b", num_header_bytes=100):
        with (
            pytest.raises(Overloaded, match="bytes of headers") as error,
            authenticator.stream("a", num_header_bytes=31),
        ):
            pytest.fail("let in")
        assert (error.value.fields["what"], error.value.fields["limit"]) == ("header_bytes", 100)
        with authenticator.stream("a", num_header_bytes=30):
            pass
    with pytest.raises(InvalidRequest, match="61 bytes"), authenticator.stream("a", "", 1, narrow, num_header_bytes=61):
        pytest.fail("let in")
    with authenticator.stream("a", num_header_bytes=100):
        pass
    assert not authenticator._accounts


def test_connections_of_a_principal_are_counted_over_both_ways_in():
    authenticator = Authenticator(limits=ClientLimits(max_connections_per_tenant=2))
    grpc = {"is_grpc": True}
    with (
        authenticator.stream("a", "one", **grpc),
        authenticator.stream("a", "one", **grpc),
    ):  # one connection, however many calls
        authenticator.connections.add("a", 2)  # over HTTP
        with pytest.raises(Overloaded) as error, authenticator.stream("a", "two", **grpc):
            pytest.fail("let in")
        assert (error.value.fields["what"], error.value.fields["limit"]) == ("connections", 2)
        with pytest.raises(Overloaded):
            authenticator.connections.add("a", 2)
        with (
            authenticator.stream("b", "three", **grpc),
            authenticator.stream("a", "four"),
        ):  # of HTTP: it was counted when it was made
            pass
        authenticator.connections.remove("a")
        with authenticator.stream("a", "two", **grpc):
            assert authenticator.connections.num_of("a") == 2
    assert (
        not authenticator.connections._num_of
        and not authenticator.connections._num_calls
        and not authenticator._accounts
    )


def test_handshakes_without_a_call_are_counted_and_said_now_and_then(caplog):
    now, lost = [0.0], []
    handshakes = Handshakes("public", lost.append, now_s=lambda: now[0])
    for _ in range(3):
        handshakes.begun()
    handshakes.called("peer 1")
    handshakes.called("peer 1")  # the same connection calls again
    handshakes.tick()
    assert lost == []
    now[0] = GRACE_S
    handshakes.tick()
    handshakes.tick()
    assert lost == [2] and caplog.text.count("2 connections to the public port") == 1
    handshakes.begun()
    now[0] += GRACE_S
    handshakes.tick()
    assert lost == [2, 1] and "1 connections" not in caplog.text
    now[0] += SAY_EVERY_S
    handshakes.tick()
    assert caplog.text.count("1 connections to the public port") == 1
