"""What one thread waits for: sockets with something to say, and a call from another thread."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable


class Listener:
    """Calls the handlers of sockets, in the thread that listens; `wake` may be called from any."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.handlers: dict[int, tuple] = {}
        self.wake_read, self.wake_write = socket.socketpair()
        for each in (self.wake_read, self.wake_write):
            each.setblocking(False)
        self.watch(self.wake_read, select.EPOLLIN, self._on_wake)

    def watch(self, source: socket.socket, mask: int, handler: Callable, *arguments: object) -> None:
        """Lets `handler(*arguments, mask)` be called when there is something."""
        self.handlers[source.fileno()] = (handler, arguments)
        self.epoll.register(source.fileno(), mask)

    def watches(self, source: socket.socket) -> bool:
        return source.fileno() in self.handlers

    def change(self, source: socket.socket, mask: int) -> None:
        self.epoll.modify(source.fileno(), mask)

    def forget(self, source: socket.socket) -> None:
        if self.handlers.pop(source.fileno(), None):
            self.epoll.unregister(source.fileno())

    def listen(self, seconds: float) -> None:
        """Handles what there is, or comes within so many seconds."""
        for fd, mask in self.epoll.poll(seconds):
            if fd in self.handlers:
                handler, arguments = self.handlers[fd]
                handler(*arguments, mask)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self.wake_write.send(b"x")

    def _on_wake(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.wake_read.recv(4096):
                pass

    def close(self) -> None:
        for each in (self.epoll, self.wake_read, self.wake_write):
            each.close()
