"""The explore page's server: its numbers are those of `kronecell count --json`, and it answers nobody else."""

from __future__ import annotations

import http.client
import json
import shlex
import threading
import urllib.parse
from collections.abc import Iterator

import pytest

from kronecell.cli.main import main
from kronecell.errors import KronecellError
from kronecell.formats import FORMATS
from kronecell.report.explore import Server, answer, measured

BASE = {"kind": "kcp", "M": "57600", "N": "256", "m": "8x20x20x18", "n": "4x4x4x4", "K": "4", "CA": "4", "CB": "2"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    found = reply.status, dict(reply.getheaders()), reply.read()
    connection.close()
    return found


def ask(server: Server, path: str, **fields: str) -> tuple[int, dict[str, object]]:
    status, _, body = get(server, f"{path}?{urllib.parse.urlencode(fields)}")
    return status, json.loads(body)


def counted(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, object]:
    with pytest.raises(SystemExit):
        main(shlex.split(command)[1:])
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("shared", ["no", "paper", "A1"])
def test_the_counts_are_those_of_the_command(server: Server, capsys: pytest.CaptureFixture[str], shared: str) -> None:
    status, reply = ask(server, "/api/explore", **BASE, gates="4", rows="96", shared=shared)
    assert status == 200 and reply["count"] == counted(capsys, str(reply["command"]))


@pytest.mark.parametrize("kind", [*FORMATS])
def test_every_format_is_answered_with_modes_chosen(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    reply = answer({"kind": kind, "M": "4096", "N": "256", "r": "3", "K": "3", "CA": "3", "CB": "2", "rows": "8"})
    assert reply["count"] == counted(capsys, reply["command"])
    assert reply["drawing"].startswith("<svg") and sum(way["chosen"] for way in reply["predicted"]) == 1
    scope: dict[str, object] = {}
    exec(reply["python"], scope)
    assert str(scope["fmt"]) == reply["count"]["format"] and "rnn" in scope


def test_the_drawn_order_is_the_one_asked_for_or_the_default() -> None:
    assert answer(BASE | {"order": "algorithm1"})["order"] == "algorithm1"
    assert answer(BASE | {"order": "forward"})["order"] == "separable"


def test_latency_is_measured(server: Server) -> None:
    small = {"kind": "tt", "M": "256", "N": "64", "r": "2", "rows": "4"}
    status, reply = ask(server, "/api/measure", **small)
    assert status == 200 and float(str(reply["ms"])) > 0 and float(str(reply["dense_ms"])) > 0
    assert measured(BASE | {"rows": "1000000"})["ms"] is None
    assert measured({"kind": "dense", "M": "100000", "N": "1000", "rows": "1", "gates": "4"})["ms"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"M": "999999999999999999999"}, "M must be from 1 to 100,000,000"),
        ({"M": "100000000", "N": "100000000"}, "choose smaller sizes"),
        ({"M": "0"}, "M must be from 1"),
        ({"N": "-3"}, "N must be a whole number"),
        ({"N": "two"}, "N must be a whole number"),
        ({"rows": "10000000"}, "rows must be from 1"),
        ({"gates": "1000"}, "gates must be from 1"),
        ({"K": "99999999"}, "beyond 10,000"),
        ({"K": "many"}, "expected an integer"),
        ({"m": "8x20"}, "multiply to 160"),
        ({"m": "x".join(["2"] * 30)}, "at most 8"),
        ({"m": "9" * 500}, "characters"),
        ({"kind": "<script>"}, "unknown format"),
        ({"shared": "Q9"}, "choose at least one of"),
        ({"M": "57601", "m": "", "n": ""}, "no balanced modes"),
        ({"tie": "all", "M": "32", "N": "32", "m": "2x2x2x2x2", "n": "2x2x2x2x2"}, "at most 4 modes"),
    ],
)
def test_absurd_input_is_refused_with_a_message(server: Server, fields: dict[str, str], message: str) -> None:
    status, reply = ask(server, "/api/explore", **(BASE | fields))
    assert status == 400 and message in str(reply["error"])


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/explore?kind=tt", "/explore.js"])
def test_other_hosts_are_rejected_entirely(server: Server, headers: dict[str, str], path: str) -> None:
    status, _, body = get(server, path, **headers)
    assert status == 403 and b"own page" in body and len(body) < 200


def test_only_this_machine_can_connect(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_own_page_is_served_without_anything_from_elsewhere(server: Server) -> None:
    for path in ("/", "/explore.js", "/page.css"):
        status, headers, body = get(server, path, Host=f"localhost:{server.server_port}")
        assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"") and b"https://" not in body


def test_unknown_pages_and_methods_are_refused(server: Server) -> None:
    assert get(server, "/../../etc/passwd")[0] == 404
    assert get(server, "/" + "a" * 5000)[0] == 414
    assert get(server, "/", "POST")[0] == 501


def test_a_taken_port_is_an_error(server: Server) -> None:
    with pytest.raises(KronecellError, match="choose another --port"):
        Server(server.server_port)
