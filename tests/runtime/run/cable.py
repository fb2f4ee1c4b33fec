"""A TCP proxy between a run and a server on this machine, which a test can cut like a cable."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"


@dataclass
class Cable:
    """Forwards `port` to `server`. While it is cut, connections are closed at once."""

    server: int
    listening: socket.socket
    is_cut: bool = False
    num_cuts: int = 0
    _left: int | None = None  # bytes that may still be sent before it is cut
    _ends: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def port(self) -> int:
        port: int = self.listening.getsockname()[1]
        return port

    def cut_after(self, num_bytes: int) -> None:
        """Cut it in the middle of a transfer, after `num_bytes` more bytes to the server."""
        with self._lock:
            self._left = num_bytes

    def mend(self) -> None:
        self.is_cut = False

    def _cut(self) -> None:
        self.is_cut, self._left, self.num_cuts = True, None, self.num_cuts + 1
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept(self) -> None:
        with suppress(OSError):  # the test is over
            while True:
                client = self.listening.accept()[0]
                try:
                    server = socket.create_connection((LOOPBACK, self.server))
                except OSError:
                    client.close()
                    continue
                with self._lock:
                    self._ends |= {client, server}
                    if self.is_cut:
                        for end in (client, server):
                            end.close()
                        continue
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, to: socket.socket, is_up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 12):
                with self._lock:
                    if is_up and self._left is not None:
                        self._left -= len(data)
                        if self._left < 0:
                            self._cut()
                            return
                to.sendall(data)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cable(server: int) -> Iterator[Cable]:
    """A cable to a port on this machine."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        link = Cable(server, listening)
        threading.Thread(target=link.accept, daemon=True).start()
        yield link
        listening.shutdown(socket.SHUT_RDWR)
