"""A TCP relay whose connections can go silent without being closed, as behind a firewall that forgot them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Relay:
    """Listens on 127.0.0.1:`port` and passes everything on to 127.0.0.1:`target`."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._flows: set[asyncio.Event] = set()  # one a connection; set: it is silent
        self._loop = asyncio.new_event_loop()

    def silence(self) -> int:
        """From now on the connections that there are say nothing more, in either direction; new ones work. How many."""
        done = asyncio.run_coroutine_threadsafe(self._silence(), self._loop)
        return done.result(10)

    async def _silence(self) -> int:
        for silent in self._flows:
            silent.set()
        return len(self._flows)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent = asyncio.Event()
        self._flows.add(silent)
        writers = [writer]
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(other_writer)
            await asyncio.gather(_pass(reader, other_writer, silent), _pass(other_reader, writer, silent))
        except OSError:  # one of them has hung up
            pass
        finally:
            self._flows.discard(silent)
            for each in writers:
                each.close()

    async def serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await server.serve_forever()

    def run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self.serve(ready))
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(asyncio.sleep(0))  # lets transports close
            self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent: asyncio.Event) -> None:
    while data := await reader.read(1 << 16):
        if silent.is_set():
            await asyncio.Event().wait()  # for ever: nobody is told
        writer.write(data)
        await writer.drain()
    writer.write_eof()


@contextmanager
def relay(target: int) -> Iterator[Relay]:
    made, ready = Relay(target), threading.Event()
    thread = threading.Thread(target=made.run, args=(ready,), name="relay")
    thread.start()
    assert ready.wait(10)
    try:
        yield made
    finally:
        made.stop()
        thread.join(10)
