"""`free_port`: a port of this machine that nobody listens on."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port that is free now, on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
