"""Wake: set from anywhere, seen once, cleared by its owner."""

from __future__ import annotations

import os
import selectors
import sys
import threading

import pytest

from engine.platforms.wake import Wake


@pytest.fixture(params=["linux", "pipe"])
def wake(request, monkeypatch):
    if request.param == "pipe":
        monkeypatch.setattr(sys, "platform", "other")
    elif sys.platform != "linux":
        pytest.skip("eventfd is Linux's")
    wake = Wake()
    monkeypatch.undo()
    yield wake
    wake.close()


def test_it_is_not_set_at_first(wake):
    assert not wake.wait(0)


def test_set_is_seen_until_cleared(wake):
    wake.set()
    wake.set()
    assert wake.wait(0)
    assert wake.wait(60)
    wake.clear()
    assert not wake.wait(0)


def test_clear_without_set_returns_at_once(wake):
    wake.clear()
    assert not wake.wait(0)


def test_many_sets_never_block(wake):
    for _ in range(20_000):
        wake.set()
    assert wake.wait(0)
    wake.clear()
    assert not wake.wait(0)


def test_another_thread_ends_the_wait(wake):
    thread = threading.Thread(target=wake.set)
    thread.start()
    assert wake.wait(60)
    thread.join()


def test_eight_bytes_written_natively_set_it(wake):
    os.write(wake.write_fd, (1).to_bytes(8, sys.byteorder))
    assert wake.wait(0)


def test_it_can_be_selected_on(wake):
    with selectors.DefaultSelector() as selector:
        selector.register(wake, selectors.EVENT_READ)
        assert selector.select(0) == []
        wake.set()
        assert [key.fileobj for key, _ in selector.select(60)] == [wake]


def test_set_after_close_does_nothing(wake):
    wake.close()
    wake.close()
    wake.set()
