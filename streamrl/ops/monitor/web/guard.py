"""Who gets an answer of the dashboard, by what stands in a request and nothing else; and what browsers are told to do.

    Host       a name of this machine's, or an address: another site's name that leads here (DNS rebinding) is refused
    browsers   what another site's page asks for is refused: Sec-Fetch-Site, or Origin where a browser sends only that
    token      whatever holds data wants it; the page itself holds none

Nothing here waits. Any bytes in a header are a refusal or none, never an error.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from streamrl.process import LOOPBACK

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """`listens_on` is the host that it is bound to, `names` are further ones that lead to it."""

    listens_on: str
    token: str | None = None
    names: Collection[str] = ()

    def refusal(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """None: it is answered. `headers` by their names in small letters."""
        asked = headers.get("host", "")
        if not self._is_own(_host_in(asked)):
            reason = "this dashboard answers to names of its own only; `--allow-host NAME` adds one"
            return Refusal(status=421, reason=reason)
        if path != "/" and _is_of_another_site(headers, asked):
            return Refusal(status=403, reason="another site's page asks for this, and may not have it")
        if path != "/" and not self._is_let_in(headers.get("authorization", "")):
            return Refusal(status=401, reason="a token is needed: open the page with #token=...")
        return None

    def _is_own(self, host: str) -> bool:
        if host in LOOPBACK or host in self.names:
            return True
        # Who listens beyond loopback is reached by any address of the machine, and no site's name is an address.
        return self.listens_on not in LOOPBACK and (host == self.listens_on or _is_address(host))

    def _is_let_in(self, authorization: str) -> bool:
        given = authorization.removeprefix("Bearer ")
        return self.token is None or hmac.compare_digest(given.encode(), self.token.encode())


def _host_in(header: str) -> str:
    """Without its port; empty where it is none."""
    found = _HOST.fullmatch(header)
    return found[1].strip("[]").lower() if found else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_of_another_site(headers: Mapping[str, str], host: str) -> bool:
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in ("same-origin", "none")  # none: who typed the address
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != host


def headers_for(page: str) -> dict[str, str]:
    """What goes out with each answer: browsers run the page's own scripts and no others, and load nothing elsewhere."""
    digests = [hashlib.sha256(script.encode()).digest() for script in _SCRIPT.findall(page)]
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return {
        "Content-Security-Policy": f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
