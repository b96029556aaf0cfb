"""The URL of the team's database: checked, and shown without its password wherever it is printed or stored."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from pygraphd.errors import UsageError

SCHEMES = ("postgresql+psycopg", "postgresql")
_EXAMPLE = "postgresql+psycopg://ROLE@HOST/DATABASE"
_HIDDEN = "***"
_SECRETS = frozenset({"password", "sslpassword"})
"""Parameters of libpq that are hidden too."""
_MAX_LENGTH = 2000


@dataclass(frozen=True, slots=True, repr=False)
class TeamUrl:
    """A PostgreSQL URL. Its text and representation have no password; `secret` is the URL itself. Empty: there is no team."""

    secret: str

    def __str__(self) -> str:
        if not self.secret:
            return ""
        parts = urlsplit(self.secret)
        given = parse_qsl(parts.query, keep_blank_values=True)
        query = urlencode(
            [(name, _HIDDEN if name in _SECRETS else value) for name, value in given], safe="*/"
        )
        # Not `geturl`, which leaves the "//" out where there is no host.
        place = f"{SCHEMES[0]}://{_without_password(parts)}{parts.path}"
        return f"{place}{f'?{query}' if query else ''}{f'#{parts.fragment}' if parts.fragment else ''}"

    def __repr__(self) -> str:
        return f"TeamUrl({str(self)!r})"

    def __bool__(self) -> bool:
        return bool(self.secret)

    def hidden_in(self, text: str) -> str:
        """Return a text, as an error of a library's, without the URL and its passwords."""
        parts = urlsplit(self.secret)
        found = [parts.password or "", *(value for name, value in parse_qsl(parts.query) if name in _SECRETS)]
        text = text.replace(self.secret, str(self)) if self.secret else text
        for secret in {*found, *map(unquote, found)} - {""}:
            text = text.replace(secret, _HIDDEN)
        return text


def read_team_url(text: str, origin: str) -> TeamUrl:
    """Return the URL in a text, "" for none; raises UsageError that names `origin` and quotes no part of the URL."""
    text = text.strip()
    if not text:
        return TeamUrl("")
    if len(text) > _MAX_LENGTH or not text.isprintable() or " " in text:
        raise UsageError(f"{origin}: is no URL: give {_EXAMPLE}")
    try:
        parts = urlsplit(text)
        _ = parts.port  # which raises for one that is none
    except ValueError as error:
        raise UsageError(f"{origin}: is no URL: give {_EXAMPLE}") from error
    if parts.scheme not in SCHEMES:
        raise UsageError(f"{origin}: expected a URL of PostgreSQL: {_EXAMPLE}")
    if not text[len(parts.scheme) :].startswith("://"):
        raise UsageError(f"{origin}: is no URL: give {_EXAMPLE}")
    if not (parts.hostname or dict(parse_qsl(parts.query)).get("host")):
        raise UsageError(f"{origin}: names no host: give {_EXAMPLE}")
    return TeamUrl(text)


def _without_password(parts: SplitResult) -> str:
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _password = user.partition(":")
    return f"{name}:{_HIDDEN}{at}{host}" if colon else parts.netloc
