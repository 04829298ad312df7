"""GET requests to a local API server with a client certificate, by the standard library: enough to wait for it."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path


def get(address: str, port: int, pki: Path, path: str) -> tuple[int, bytes]:
    """Status and body of the answer; raises OSError where nothing answers yet."""
    context = ssl.create_default_context(cafile=pki / "ca.crt")
    context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    connection = http.client.HTTPSConnection(address, port, timeout=5.0, context=context)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as error:  # the server went away in the middle of its answer
        raise ConnectionError(str(error)) from error
    finally:
        connection.close()
