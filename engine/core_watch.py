"""Signs of life: has somebody been silent for too long, and where do the threads stand."""

from __future__ import annotations

import sys
import threading
import traceback


class SilenceWatch:
    """Tells when signs of life have stopped, but not when the watcher itself was held up.

    `is_over` is to be called every `tick_s` seconds. A call that comes much later says that the
    watcher did not run (a busy event loop, a stopped machine): then signs that were given
    meanwhile may be unread, so it gives no verdict, and the next call that is on time does.
    """

    def __init__(self, limit_s: float, tick_s: float) -> None:
        self._limit_s = limit_s
        self._latest_tick_s = 2 * tick_s
        self._last_call_s: float | None = None

    def is_over(self, now_s: float, last_sign_s: float) -> bool:
        """Whether the last sign is older than the limit. Monotonic seconds, both."""
        last_call_s, self._last_call_s = self._last_call_s, now_s
        is_on_time = last_call_s is not None and now_s - last_call_s <= self._latest_tick_s
        return is_on_time and now_s - last_sign_s > self._limit_s


def thread_stacks() -> str:
    """Where every Python thread of this process stands, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, 'unknown to Python')} ({ident}):\n{stack}")
    return "\n".join(parts)
