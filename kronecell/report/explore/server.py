"""The server of `kronecell explore`: the standard library's, on loopback, for this machine's browser only."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import unquote_plus

from kronecell.errors import KronecellError, on_one_line
from kronecell.formats import FORMATS
from kronecell.report.explore.answers import answer, measured

LOOPBACK = "127.0.0.1"
LONGEST = 4000  # characters of a request's address
MOST_FIELDS = 30
PATIENCE = 20.0  # seconds that a question waits for those before it
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"
FILES = {
    "/": ("explore.html", "text/html"),
    "/explore.js": ("explore.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


def fields_of(query: str) -> dict[str, str]:
    """The fields of a query string; any text is one, except one with too many fields."""
    pieces = [piece for piece in query.split("&", MOST_FIELDS) if piece]
    if len(pieces) > MOST_FIELDS:
        raise KronecellError(f"more than {MOST_FIELDS} fields")
    pairs = (piece.partition("=") for piece in pieces)
    return {unquote_plus(name): unquote_plus(value) for name, _, value in pairs}


class Server(ThreadingHTTPServer):
    """Listens on a port of 127.0.0.1 (0: a free one); `url` is where."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            raise KronecellError(
                f"cannot listen on {LOOPBACK}:{port}: {error.strerror or error}; "
                "choose another --port, or 0 for a free one"
            ) from None
        self.working = threading.Lock()  # one answer at a time: measured times would disturb each other

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def hosts(self) -> set[str]:
        """Host names of this machine; a foreign page whose name resolves to this machine sends another."""
        return {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}


class Handler(BaseHTTPRequestHandler):
    """Page, script, style, and the two requests of the page."""

    server: Server
    server_version = "kronecell"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer, or say why not."""
        if not self._from_here():
            return
        if len(self.path) > LONGEST:
            self._json({"error": f"the address has more than {LONGEST} characters"}, HTTPStatus.REQUEST_URI_TOO_LONG)
            return
        path, _, query = self.path.partition("#")[0].partition("?")
        if path in FILES:
            name, kind = FILES[path]
            self._send((resources.files("kronecell.report") / "assets" / name).read_bytes(), kind)
        elif path == "/api/formats":
            self._json({kind: cls.equation for kind, cls in FORMATS.items()})
        elif path in ("/api/explore", "/api/measure"):
            self._question(path, query)
        else:
            self._json({"error": "there is no such page"}, HTTPStatus.NOT_FOUND)

    def _question(self, path: str, query: str) -> None:
        if not self.server.working.acquire(timeout=PATIENCE):
            self._json({"error": "busy with other questions; ask again"}, HTTPStatus.SERVICE_UNAVAILABLE)
            return
        try:
            fields = fields_of(query)
            result = answer(fields) if path == "/api/explore" else measured(fields)
        except (KronecellError, MemoryError) as error:
            self._json({"error": str(error) or "not enough memory"}, HTTPStatus.BAD_REQUEST)
        except Exception as error:  # a mistake of ours must not end in an empty reply and a traceback
            self._json({"error": f"{type(error).__name__} in the library"}, HTTPStatus.INTERNAL_SERVER_ERROR)
        else:
            self._json(result)
        finally:
            self.server.working.release()

    def _from_here(self) -> bool:
        """Whether the request is of this server's own page: the right Host, and no other site behind it."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        site = self.headers.get("Sec-Fetch-Site", "none")
        allowed = self.server.hosts()
        good = host in allowed and site in ("none", "same-origin")
        good = good and (origin is None or origin.removeprefix("http://") in allowed)
        if not good:
            self._json({"error": "kronecell explore answers its own page on this machine only"}, HTTPStatus.FORBIDDEN)
        return good

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(json.dumps(value).encode(), "application/json", status)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):  # the browser sent a new request before this was ready
            self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses, in the same form as everything else."""
        self.close_connection = True
        self.request_version = "HTTP/1.1"  # otherwise a request that it could not read gets an answer without a head
        self._json({"error": on_one_line(message or "refused", 200)}, HTTPStatus(code))

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the page shows its own errors."""
