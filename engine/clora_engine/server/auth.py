"""The control API's bearer token, read from a file so that a rotated Secret takes effect without a restart."""

from __future__ import annotations

import hmac
from pathlib import Path


class TokenFile:
    """Raises ValueError at construction when the file holds no token; later, the last good token stays valid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mtime_ns = -1
        self._token = b""
        self._reload()
        if not self._token:
            raise ValueError(f"--token-file {path} is missing or empty: write the control API's token into it")

    def _reload(self) -> None:
        try:
            mtime_ns = self._path.stat().st_mtime_ns
            if mtime_ns != self._mtime_ns:
                self._token = self._path.read_bytes().strip() or self._token
                self._mtime_ns = mtime_ns
        except OSError:
            pass

    def secret(self) -> bytes:
        """The token as it is now."""
        self._reload()
        return self._token

    def accepts(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries the token (compared in constant time)."""
        self._reload()
        scheme, _, token = (authorization or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)
