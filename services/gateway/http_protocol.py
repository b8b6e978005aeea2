"""HTTP/1.1 as the gateway speaks it: one exchange at a time on a connection.

Uvicorn queues a request that arrives while another is being answered, stops reading, and so no longer notices that the
client has left; the generation would run to its end for nobody. No client in use pipelines, so whoever does is cut off,
which cancels what runs.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class HttpProtocol(HttpToolsProtocol):
    """Uvicorn's protocol without pipelining."""

    def on_headers_complete(self) -> None:
        """Start an exchange, or end the connection if the last one still runs."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        super().on_headers_complete()
