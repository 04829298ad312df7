"""Requests to a local API server with the administrator's certificate, by the standard library alone."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any


class ApiError(OSError):
    """The API server answered, but not with success; `status` is the HTTP status."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body.decode(errors='replace')[:500]}")
        self.status = status


class Client:
    """One connection a request. Raises OSError where nothing answers and ApiError where the answer is an error."""

    def __init__(self, address: str, port: int, pki: Path) -> None:
        self._address, self._port = address, port
        self._context = ssl.create_default_context(cafile=pki / "ca.crt")
        self._context.load_cert_chain(pki / "admin.crt", pki / "admin.key")

    def get(self, path: str) -> Any:
        return json.loads(self.request("GET", path))

    def post(self, path: str, body: object) -> None:
        self.request("POST", path, json.dumps(body).encode())

    def delete(self, path: str) -> None:
        self.request("DELETE", path)

    def succeeds(self, path: str) -> bool:
        """Whether a GET is answered with success, now."""
        try:
            self.request("GET", path)
        except OSError:
            return False
        return True

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPSConnection(self._address, self._port, timeout=5.0, context=self._context)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = connection.getresponse()
            content = answer.read()
        except http.client.HTTPException as error:  # the server went away in the middle of its answer
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise ApiError(answer.status, content)
        return content
