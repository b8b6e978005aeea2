"""Channels to other services: one set of options for the whole mesh.

Guarantees: keepalive settings of both sides agree, since a client that pings more often than the server allows is
answered with GOAWAY, which kills every call in flight. gRPC ignores a misspelt option silently, so a test pins them.
"""

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A prompt of a million tokens takes 5 MB as packed ids; anything near this limit is a mistake."""

_KEEPALIVE_TIME_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 10_000
_MIN_PING_INTERVAL_MS = 10_000

ChannelOptions = list[tuple[str, int | str]]

MESSAGE_OPTIONS: ChannelOptions = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

CLIENT_OPTIONS: ChannelOptions = [
    *MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The links of the mesh have their own back-off (services.common.tasks); gRPC's must not add up to minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # In spite of its name, the time that one attempt has until the peer answers; a peer on a busy machine needs it, and
    # one that is gone is noticed at once.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Two channels to one address must not share a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: ChannelOptions = [
    *MESSAGE_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # A second server on the same port must fail, not share it.
    ("grpc.so_reuseport", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a channel to ``unix:PATH`` or ``HOST:PORT``; close it with ``async with``.

    Must be called inside the running event loop, which the channel is bound to for life.
    """
    return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
