"""The server of `kronecell explore`: the standard library's, on loopback, for this machine's browser only."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kronecell.errors import KronecellError
from kronecell.formats import FORMATS
from kronecell.report.explore.answers import answer, measured

LOOPBACK = "127.0.0.1"
LONGEST = 4000  # characters of a request's address
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"
FILES = {
    "/": ("explore.html", "text/html"),
    "/explore.js": ("explore.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


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
        address = urlsplit(self.path)
        if address.path in FILES:
            name, kind = FILES[address.path]
            self._send((resources.files("kronecell.report") / "assets" / name).read_bytes(), kind)
        elif address.path == "/api/formats":
            self._json({kind: cls.equation for kind, cls in FORMATS.items()})
        elif address.path in ("/api/explore", "/api/measure"):
            self._question(address.path, dict(parse_qsl(address.query, keep_blank_values=True, max_num_fields=30)))
        else:
            self._json({"error": "there is no such page"}, HTTPStatus.NOT_FOUND)

    def _question(self, path: str, fields: dict[str, str]) -> None:
        try:
            with self.server.working:
                result = answer(fields) if path == "/api/explore" else measured(fields)
        except (KronecellError, MemoryError) as error:
            self._json({"error": str(error) or "not enough memory"}, HTTPStatus.BAD_REQUEST)
            return
        self._json(result)

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

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the page shows its own errors."""
