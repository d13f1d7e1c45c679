"""The address of a Redis as text: its forms, and how it is written down without its password.

redis://USER@HOST:6379/0                             rediss://... with TLS: ?ssl_ca_certs=FILE&ssl_certfile=...
unix:///PATH                                         redis+sentinel://USER@HOST:26379,HOST:26379/SERVICE[/DB]
                                                     rediss+sentinel://... with TLS, to the sentinels too

A URL is written down in configurations, command lines and logs; the password is not. Pure, and without the library:
who only reads a configuration needs none.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit, urlunsplit

# A file that holds the password is named by NAME_FILE, or the password stands in NAME.
PASSWORD = "STREAMRL_REDIS_PASSWORD"
SENTINEL_PASSWORD = "STREAMRL_SENTINEL_PASSWORD"
# Where people give it. What a configuration says is checked with the configuration; this is for all else.
GIVEN_BY = "--redis (or STREAMRL_REDIS, or redis.url)"
SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")
FORMS = (
    "redis://host:port/0, rediss://host:port/0 (TLS), unix:///path or redis+sentinel://host:port,host:port/service; "
    "with a user: redis://user@host:port"
)

_OF_URLS = re.compile(r"""(//[^/@:\s]*):[^\s'"]*@""")  # a password may have any of / : @ in it
_OF_QUERIES = re.compile(r"""([?&](?:\w*(?:password|secret|token)\w*|sig|api_?key)=)[^&\s'"]*""", re.IGNORECASE)


def split_password(url: str) -> tuple[str, str | None]:
    """The URL without its password, and the password."""
    parts = urlsplit(url)
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
    """For people and logs: stars in the place of every password in a URL, in its query too."""
    return _OF_QUERIES.sub(r"\1***", _OF_URLS.sub(r"\1:***@", text))
