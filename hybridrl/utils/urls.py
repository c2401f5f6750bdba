"""Addresses of files, and the same without their credentials, as messages and files of a run have them."""

import re

MASK = "***"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_IN_TEXT = re.compile(rf"{_SCHEME.pattern}[^\s\"'<>]+")
_FILE = "file://"
_WEB = ("http", "https")


def scheme_of(text: str) -> str | None:
    """Return the scheme of an address in lower case; None of anything else, such as a path."""
    match = _SCHEME.match(text)
    return None if match is None else match[0].removesuffix("://").lower()


def is_remote(text: str) -> bool:
    """Return whether a text is an address of a file elsewhere. `file://` is a path of this machine."""
    return scheme_of(text) not in (None, "file")


def is_web(url: str) -> bool:
    """Return whether an address names a single file behind HTTP: it can be neither listed nor written."""
    return scheme_of(url) in _WEB


def without_file_scheme(text: str) -> str:
    """Return a path of this machine as a path: `file:///data/a.parquet` is `/data/a.parquet`."""
    return text[len(_FILE) :] if text[: len(_FILE)].lower() == _FILE else text


def masked(url: str) -> str:
    """Replace the credentials of an address by `***`: the password before the host, and the arguments after `?`.

    Any other text is returned as it is. In a pattern such as `s3://bucket/part-?.parquet`, `?` begins no arguments.
    """
    match = _SCHEME.match(url)
    if match is None:
        return url
    scheme, rest = match[0], url[match.end() :]
    end = min((rest.find(sign) for sign in "/?#" if sign in rest), default=len(rest))
    authority, rest = rest[:end], rest[end:]
    if "@" in authority:
        user, _, host = authority.rpartition("@")
        name, colon, _ = user.partition(":")
        user_info = MASK if is_web(url) else f"{name}:{MASK}" if colon else name
        authority = f"{user_info}@{host}"
    path, question, arguments = rest.partition("?")
    if question and (is_web(url) or "=" in arguments):
        rest = f"{path}?{MASK}"
    return f"{scheme}{authority}{rest}"


def masked_text(text: str) -> str:
    """Replace the credentials of all addresses in a text, see `masked`."""
    return _IN_TEXT.sub(lambda match: masked(match[0]), text)


def is_masked(url: str) -> bool:
    """Return whether an address was written by `masked`, so that its credentials are lost."""
    return masked(url) == url and (f"{MASK}@" in url or url.endswith(f"?{MASK}"))
