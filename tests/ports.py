"""Ports for processes that meet."""

import random
import socket

# Below those that Linux gives to connections (ip_local_port_range): a launcher may need seconds
# before it listens, and in these no connection takes the port meanwhile.
PORTS = range(10_000, 29_000)


def free_port() -> int:
    """A TCP port of loopback that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue  # somebody does
