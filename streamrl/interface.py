"""Chooses the network interface by which this host's ranks reach those of other hosts.

gloo uses the interface of the host's own name, which on hosts with several is often a different one, or the loopback.
The route to the rendezvous endpoint is one that leads to the others. On the host of that endpoint there is none if its
/etc/hosts maps its own name to the loopback (Debian: 127.0.1.1); there the way out to any other network is taken. NCCL
finds its own.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

GLOO = "GLOO_SOCKET_IFNAME"
_FAR = ("192.0.2.1", 9)  # on no network (RFC 5737), so by the default route
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 256
_INET6 = Path("/proc/net/if_inet6")


def gloo_towards(endpoint: str, environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return the variable for ranks that meet at HOST:PORT; empty if an operator has set it, or there is no route."""
    if GLOO in environment:
        return {}
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        own_address = _address_towards(host, int(port))
        if own_address.is_loopback and not _is_the_loopback(host):
            own_address = _address_towards(*_FAR)
    except OSError:  # no such host, or no route, which the learner reports itself
        return {}
    return gloo_from(str(own_address), environment)


def gloo_from(own: str, environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return the variable for ranks on hosts that reach each other through this address of ours."""
    own_address = ipaddress.ip_address(own.partition("%")[0])
    name = None if GLOO in environment or own_address.is_loopback else interface_of(own_address)
    return {} if name is None else {GLOO: name}


def interface_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """Return the interface with this address as its first."""
    if address.version == 6:
        rows = [line.split() for line in _INET6.read_text().splitlines()] if _INET6.exists() else []
        return next((row[-1] for row in rows if int(row[0], 16) == int(address)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack(f"{_NAME_BYTES}s", name.encode()))
            except OSError:  # it has no address
                continue
            if answer[20:24] == address.packed:
                return name
    return None


def _is_the_loopback(host: str) -> bool:
    """Return whether this means the loopback on every host: all ranks are here."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address_towards(host: str, port: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return our address on the route to the host; sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)
        return ipaddress.ip_address(way.getsockname()[0].partition("%")[0])
