"""Access control of the dashboard, based on the request alone, and security headers for browsers.

    Host       must be a name of this machine or an address: another site's name that resolves here (DNS rebinding) is
               refused
    browsers   requests from another site's page are refused: by Sec-Fetch-Site, or Origin if that is all there is
    token      required for everything that contains data; the page itself has none

Never blocks. Arbitrary bytes in a header lead to a refusal or none, never to an error.
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
    """`listens_on` is the host that the server is bound to, `names` are other names for it."""

    listens_on: str
    token: str | None = None
    names: Collection[str] = ()

    def refusal(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why the request is refused; None: it is allowed. `headers` have lower-case names."""
        host = headers.get("host", "")
        if not self._is_own(_host_in(host)):
            reason = "this host name is not allowed for this dashboard; `--allow-host NAME` allows it"
            return Refusal(status=421, reason=reason)
        if path != "/" and _is_of_another_site(headers, host):
            return Refusal(status=403, reason="requests from another site's page are refused")
        if path != "/" and not self._is_authorized(headers.get("authorization", "")):
            return Refusal(status=401, reason="a token is required: open the page with #token=...")
        return None

    def _is_own(self, host: str) -> bool:
        if host in LOOPBACK or host in self.names:
            return True
        # Beyond loopback, any address of the machine is fine, since a site's name is never an address.
        return self.listens_on not in LOOPBACK and (host == self.listens_on or _is_address(host))

    def _is_authorized(self, authorization: str) -> bool:
        given = authorization.removeprefix("Bearer ")
        return self.token is None or hmac.compare_digest(given.encode(), self.token.encode())


def _host_in(header: str) -> str:
    """Return the host without its port; empty if the header is malformed."""
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
        return site not in ("same-origin", "none")  # none: the user typed the address
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != host


def headers_for(page: str) -> dict[str, str]:
    """Return headers for each response: browsers run only the page's own scripts, and load nothing from elsewhere."""
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
