"""What is known about users, as reports that leave the core."""

from __future__ import annotations

from engine.block_manager.manager import BlockManager
from engine.block_manager.user_state import UserKey
from engine.commands import DescribeUser, ListUsers, UserList, UserState, UserStatus
from engine.errors import InvalidRequest
from engine.weights.versions import Versions


def describe_user(
    command: DescribeUser, manager: BlockManager, versions: Versions, now_s: float
) -> UserStatus:
    """A user's states, the active version's first."""
    active = versions.active.name
    names = sorted((loaded.name for loaded in versions), key=lambda name: name != active)
    states = []
    for name in names:
        view = manager.user(UserKey(command.namespace, command.user_id, name))
        if view is None:
            continue
        states.append(
            UserState(
                namespace=command.namespace,
                user_id=command.user_id,
                weights_version=name,
                device_tokens=view.device_len,
                host_tokens=view.host_len,
                length=view.length,
                pages=view.num_pages,
                chunks=view.num_chunks,
                residency=view.residency.value,
                idle_s=max(0.0, now_s - view.last_used_s),
                fingerprint=f"{view.fingerprint:016x}",
            )
        )
    return UserStatus(states=tuple(states))


def list_users(command: ListUsers, manager: BlockManager, now_s: float) -> UserList:
    """The states used last; without fingerprints. Raises InvalidRequest for a negative limit."""
    if command.limit < 0:
        raise InvalidRequest(f"limit is {command.limit}: give 0 or more", value=command.limit)
    num_users = manager.usage().num_users
    summaries = manager.users(min(command.limit, num_users), tier=command.tier)
    states = [
        UserState(
            namespace=summary.namespace,
            user_id=summary.user_id,
            weights_version=summary.weights_version,
            device_tokens=summary.device_len,
            host_tokens=summary.host_len,
            length=max(summary.device_len, summary.host_len),
            pages=summary.num_pages,
            chunks=summary.num_chunks,
            residency=summary.residency.value,
            idle_s=max(0.0, now_s - summary.last_used_s),
        )
        for summary in summaries
    ]
    return UserList(states=tuple(states), total=num_users)
