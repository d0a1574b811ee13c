"""Last histories of the users seen last, kept to compute them under new weights."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from engine.types import CacheMode, Request, Task


class Histories:
    """At most `max_users` of them; 0 keeps none. Owned by the core thread."""

    def __init__(self, max_users: int) -> None:
        self._max_users = max_users
        self._requests: OrderedDict[tuple[str, str], Request] = OrderedDict()

    def note(self, request: Request) -> None:
        """Keep the history of an admitted request, if it is whole and its user's state is kept."""
        if not self._max_users or request.history is None or request.is_delta:
            return
        if request.cache is CacheMode.BYPASS:
            return
        user = (request.namespace, request.user_id)
        self._requests[user] = msgspec.structs.replace(
            request,
            task=Task.PREFETCH,
            candidates=None,
            top_k=None,
            exclude_history=False,
            return_user_embedding=False,
            deadline_s=None,
            cache=CacheMode.USE,
        )
        self._requests.move_to_end(user)
        if len(self._requests) > self._max_users:
            self._requests.popitem(last=False)

    def forget(self, namespace: str, user_id: str) -> None:
        self._requests.pop((namespace, user_id), None)

    def clear(self) -> None:
        self._requests.clear()

    def newest_first(self) -> list[Request]:
        """Prefetches of the kept histories, the user seen last in front."""
        return list(reversed(self._requests.values()))
