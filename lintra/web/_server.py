"""One page on 127.0.0.1, for the browsers of this machine."""

import contextlib
import errno
import os
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ADDRESS = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """Answers `/` with a page until `shutdown`. port: 0 takes a free one, `address` says which.

    Raises OSError with the reason where the port is not available.
    """

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # on Windows a second program could take the port, too
    allow_reuse_port = False

    def __init__(self, page: str, port: int = 0):
        self.content = page.encode()
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
            raise OSError(
                f"port {port} of {ADDRESS} {reason}; another --port, or 0 for a free one"
            ) from error

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the page was closed while it loaded
            super().handle()

    def do_GET(self) -> None:
        # A request under another name comes not from the user, but from a page whose name resolves to here.
        if self.headers.get("Host", "").partition(":")[0].lower() not in (ADDRESS, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path.partition("?")[0] != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(self.server.content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(self.server.content)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Log nothing: the terminal shows the address."""
