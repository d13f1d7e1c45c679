"""Redis addresses as text: their forms, and how to write them without the password.

redis://USER@HOST:6379/0                             rediss://... with TLS: ?ssl_ca_certs=FILE&ssl_certfile=...
unix:///PATH                                         redis+sentinel://USER@HOST:26379,HOST:26379/SERVICE[/DB]
                                                     rediss+sentinel://... with TLS, to the sentinels too

URLs appear in configurations, command lines and logs; passwords must not. Pure functions that need no Redis library, so
that reading a configuration needs none.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit, urlunsplit

URL_VARIABLE = "STREAMRL_REDIS"  # stands in for --redis
# NAME_FILE names a file that holds the password, or NAME holds it.
PASSWORD = "STREAMRL_REDIS_PASSWORD"
SENTINEL_PASSWORD = "STREAMRL_SENTINEL_PASSWORD"
# The source of the address in errors. The configuration's URL is checked with the configuration; this is for others.
GIVEN_BY = "--redis (or STREAMRL_REDIS, or redis.url)"
SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")
FORMS = (
    "redis://host:port/0, rediss://host:port/0 (TLS), unix:///path or redis+sentinel://host:port,host:port/service; "
    "with a user: redis://user@host:port"
)

HIDDEN = "***"  # shown in place of a secret

_OF_URLS = re.compile(r"""(//[^/@:\s]*):[^\s'"]*@""")  # a password may contain any of / : @
_OF_QUERIES = re.compile(r"""([?&](?:\w*(?:password|secret|token)\w*|sig|api_?key)=)[^&\s'"]*""", re.IGNORECASE)
_OF_HUB = re.compile(r"\bhf_[A-Za-z0-9]{16,}")


def split_password(url: str) -> tuple[str, str | None]:
    """Split a URL into the URL without its password, and the password; of what is no URL nothing is a password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # an unclosed bracket
        return url, None
    userinfo, _, place = parts.netloc.rpartition("@")
    user, colon, password = userinfo.partition(":")
    if not colon:
        return url, None
    return urlunsplit(parts._replace(netloc=f"{user}@{place}" if user else place)), unquote(password)


def has_password_in_query(url: str) -> bool:
    return _OF_QUERIES.search(url) is not None


def has_secret(url: str) -> bool:
    return split_password(url)[1] is not None or masked(url) != url


def masked(text: str) -> str:
    """Replace every password in URLs in the text with stars, in query strings too, and every token of the hub."""
    shown = _OF_QUERIES.sub(rf"\1{HIDDEN}", _OF_URLS.sub(rf"\1:{HIDDEN}@", text))
    return _OF_HUB.sub(f"hf_{HIDDEN}", shown)
