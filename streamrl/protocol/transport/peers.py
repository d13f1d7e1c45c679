"""Coordination of hosts through Redis: who has which pieces of a blob, and who fetches which from the store.

    host ── its address, the pieces it has ─► Redis ─► some other hosts and theirs, and pieces to fetch from the store
    host ◄──────────────────── a piece, from one of these ────────────────────► host

Each piece is assigned to one host for `CLAIM_S`; after that the host counts as slow or dead, and the piece goes to the
next. All of it is a hint: keys expire, an address may be forged (`address_of_peer` decides which are used at all), and
data is checked against the manifest. So a false entry costs time and never corrupts weights. Blocks on Redis for
`_PATIENCE_S`, then raises TransportError.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis

from streamrl.errors import ConfigError, TransportError
from streamrl.process import parse_address
from streamrl.protocol.transport.connection import repeat
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.script import Call, run
from streamrl.protocol.transport.worker_scripts import guarded

HAVE = "x-have"  # response header: bitmap, in hex, of the pieces that the peer has
CLAIM_S = 5.0
KEPT_S = 900.0  # after the last update by any host
MOST_PEERS = 4096  # remembered per blob
_PEERS_PER_REPLY = 12  # chosen at random
_LOWEST_PORT = 1024
_PATIENCE_S = 2.0

# `have` is a bitmap, lowest bit first. Assigned pieces that the host has by now are released, those it still fetches
# are extended. Then it is assigned up to `most` others: first those never assigned, then those whose assignment
# expired.
EXCHANGE = guarded("""
local peers, claims, secret = unpack(KEYS)
local me, have, num, most, claim_ms, kept_ms, peers_per_reply, max_peers, new_secret = unpack(ARGV, 1, 9)
num, most = tonumber(num), tonumber(most)
local function has(piece)
  local byte = string.byte(have, math.floor(piece / 8) + 1) or 0
  return bit.band(byte, bit.lshift(1, piece % 8)) ~= 0
end
redis.call('SET', secret, new_secret, 'NX')
if redis.call('HEXISTS', peers, me) == 1 or redis.call('HLEN', peers) < tonumber(max_peers) then
  redis.call('HSET', peers, me, have)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local assigned, busy, first = {}, {}, tonumber(redis.call('HGET', claims, 'next') or 0)
local function claim(piece) redis.call('HSET', claims, piece, string.format('%d %s', now + claim_ms, me)) end
local function assign(piece)
  claim(piece)
  assigned[#assigned + 1] = piece
end
for i = 10, #ARGV do
  if has(tonumber(ARGV[i])) then redis.call('HDEL', claims, ARGV[i]) else claim(ARGV[i]) end
end
while #assigned < most and first < num do
  if not has(first) then assign(first) end
  first = first + 1
end
redis.call('HSET', claims, 'next', first)
local all = redis.call('HGETALL', claims)
for i = 1, #all, 2 do
  local piece = tonumber(all[i])
  local expires, host = string.match(all[i + 1], '^(%d+) (.*)$')
  if piece and expires and host ~= me and tonumber(expires) >= now then
    busy[#busy + 1] = piece
  elseif piece and expires and tonumber(expires) < now and #assigned < most and not has(piece) then
    assign(piece)
  end
end
redis.call('PEXPIRE', claims, kept_ms)
redis.call('PEXPIRE', peers, kept_ms)
local some = redis.call('HRANDFIELD', peers, peers_per_reply, 'WITHVALUES')
return {'OK', redis.call('GET', secret), redis.call('HLEN', peers), some, assigned, busy}
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersReply:
    secret: bytes
    num_peers: int
    peers: Mapping[str, bytes]  # some of them: address -> bitmap
    assigned: Sequence[int]  # pieces that this host is to fetch from the store
    busy: Collection[int]  # pieces that other hosts are fetching from the store


class Peers:
    def __init__(self, client: redis.Redis, keys: Keys, *, run_uid: str, address: str) -> None:
        self.run_uid, self.address = run_uid, address
        self._client, self._keys = client, keys

    def exchange(self, digest: str, *, have: bytes, num_pieces: int, taken: Collection[int], most: int) -> PeersReply:
        """Report, for one blob, the pieces this host has and those in progress, and take up to `most` more.

        Safe to retry: an assignment whose reply was lost expires.
        """
        keys = self._keys
        durations_ms = (int(1000 * CLAIM_S), int(1000 * KEPT_S))
        args = (self.address, have, num_pieces, most, *durations_ms, _PEERS_PER_REPLY, MOST_PEERS)
        call = Call(
            EXCHANGE,
            (keys.meta, keys.tombstone, keys.peers(digest), keys.claims(digest), keys.peers_secret),
            (self.run_uid, *args, secrets.token_hex(32), *taken),
        )
        reply: Any = repeat(
            self._client, "coordinate with peers", partial(run, self._client, call), give_up_after_s=_PATIENCE_S
        )
        if reply[0] != b"OK":
            raise TransportError(f"Redis has no run {keys.name!r}: could not coordinate with its other hosts")
        _, secret, num_peers, some, assigned, busy = reply
        addresses = [address.decode(errors="replace") for address in some[::2]]
        return PeersReply(
            secret=secret,
            num_peers=num_peers,
            peers={
                address: bitmap
                for address, bitmap in zip(addresses, some[1::2], strict=True)
                if address != self.address
            },
            assigned=[piece for piece in assigned if 0 <= piece < num_pieces],
            busy=set(busy),
        )


def token(secret: bytes, run_uid: str, address: str, path: str) -> str:
    """Return the token that a peer accepts; valid for one address and one piece only."""
    return hmac.new(secret, f"{run_uid}\n{address}\n{path}".encode(), hashlib.sha256).hexdigest()


def bitmap_of(pieces: Sequence[int], num_pieces: int) -> bytes:
    bits = bytearray(-(-num_pieces // 8))
    for piece in pieces:
        bits[piece // 8] |= 1 << piece % 8
    return bytes(bits)


def pieces_of(bitmap: bytes, num_pieces: int) -> set[int]:
    return {piece for piece in range(min(num_pieces, 8 * len(bitmap))) if bitmap[piece // 8] >> piece % 8 & 1}


def address_of_peer(text: str, *, own: str) -> tuple[str, int] | None:
    """Parse a peer's host and port; None if none of our workers can be there.

    An address from Redis must lead nowhere else: not to this host's loopback, to metadata services, to well-known
    ports, or from a private network to a public one.
    """
    try:
        host, port = parse_address(text, what="peer")
        ip = ipaddress.ip_address(host)
        ours = ipaddress.ip_address(parse_address(own, what="peer")[0])
    except (ConfigError, ValueError):
        return None
    is_unusable = ip.is_unspecified or ip.is_multicast or ip.is_link_local or ip.is_reserved or port < _LOWEST_PORT
    is_elsewhere = ip.version != ours.version or ip.is_loopback != ours.is_loopback or ip.is_global != ours.is_global
    return None if is_unusable or is_elsewhere or text == own else (host, port)
