"""Wake: how other threads, native or not, rouse the core loop."""

from __future__ import annotations

import os
import select
import sys


class Wake:
    """A file descriptor that is readable from `set` until `clear`.

    `set` may be called by any thread. Native code sets it by writing the 8 bytes of a 64-bit 1 to
    `write_fd`; both descriptors are non-blocking, so a full pipe is as good as a written one.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            self._read_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._write_fd = self._read_fd
        else:
            self._read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._read_fd, False)
            os.set_blocking(self._write_fd, False)
        self._poll = select.poll()
        self._poll.register(self._read_fd, select.POLLIN)
        self._is_closed = False

    def fileno(self) -> int:
        """The descriptor to select on, together with sockets for example."""
        return self._read_fd

    @property
    def write_fd(self) -> int:
        return self._write_fd

    def set(self) -> None:
        """Make `wait` return. After `close` it does nothing."""
        if self._is_closed:
            return
        try:
            os.write(self._write_fd, (1).to_bytes(8, sys.byteorder))
        except BlockingIOError:
            return

    def clear(self) -> None:
        """Forget everything set so far. Look for work after this, not before.

        After `close` it does nothing.
        """
        while not self._is_closed:
            try:
                read = os.read(self._read_fd, 4096)
            except BlockingIOError:
                return
            if len(read) < 4096:
                return

    def wait(self, timeout_s: float | None) -> bool:
        """Block until set (True) or `timeout_s` seconds passed (False); None waits for ever.

        Does not clear. After `close` it returns True at once.
        """
        if self._is_closed:
            return True
        timeout_ms = None if timeout_s is None else max(0.0, timeout_s * 1000.0)
        return bool(self._poll.poll(timeout_ms))

    def close(self) -> None:
        """Close the descriptors. Whoever writes to `write_fd` must have stopped."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._read_fd)
        if self._write_fd != self._read_fd:
            os.close(self._write_fd)
