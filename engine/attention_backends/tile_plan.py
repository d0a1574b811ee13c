"""The plan of a step for the `torch` backend: which 64 x 64 tiles are computed, in which order.

Query rows of one request are cut into *query tiles* of 64 rows; history positions into *key tiles*
at absolute positions [64 k, 64 k + 64). A query tile reads the key tiles from the first to the last
that any of its rows sees, in ascending order; *wave* w computes the w-th one of every query tile.
Query tiles are sorted by their number of key tiles, longest first, so the tiles active in a wave
are a prefix. They are worked off in *blocks*, so that what a wave touches stays in the cache, and
requests in *groups*, so that the keys gathered at once stay within a budget.

A key tile that a row does not see adds exactly zero to it, so a row's bits do not depend on which
other rows share its tile. A position that no row of its request sees may hold anything, NaN
included: its slot is replaced by one that some row sees, and masked.

Everything here is NumPy; nothing depends on the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention_backends.base import AttentionBatch
from engine.types import Int64Array

TILE = 64
_FAR = np.int64(1) << 40


class HiddenPairs(NamedTuple):
    """The partly visible tiles of a wave.

    tiles: a slice of the active query tiles, or their int64 indices. hidden: bool [n, 1, 64, 64],
    true where the row does not see the key.
    """

    tiles: slice | torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Block:
    """Up to `max_block_tiles` query tiles of one group, the longest first.

    Attributes:
        num_tiles: Query tiles, n.
        rows: int64 [n * 64], row of the step at each place; a tile's last row repeats.
        out_rows, out_places: int64 [m], where results go: row of the step, place in the block.
        active: Query tiles of each wave, descending.
        key_tiles: int64 [waves, n], index of the key tile within the group.
        first_position: int64 [waves, n], its first history position.
        requests: int64 [n].
        partial: Partly visible tiles of each wave; None where there are none.
    """

    num_tiles: int
    rows: torch.Tensor
    out_rows: torch.Tensor
    out_places: torch.Tensor
    active: list[int]
    key_tiles: torch.Tensor
    first_position: torch.Tensor
    requests: torch.Tensor
    partial: list[HiddenPairs | None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Group:
    """Requests whose key tiles are gathered together.

    page, offset: int64 [num_key_tiles, 64], the slot of each history position.
    """

    page: torch.Tensor
    offset: torch.Tensor
    blocks: list[Block]


class _QueryTiles(NamedTuple):
    """All query tiles of a step, in row order.

    rows [n, 64], num_rows [n], request [n], lo and hi [n, 64], first and stop: key tiles [n].
    """

    rows: Int64Array
    num_rows: Int64Array
    request: Int64Array
    lo: Int64Array
    hi: Int64Array
    first: Int64Array
    stop: Int64Array


class _KeyTiles(NamedTuple):
    """Per request: first key tile, number of them, and where they begin among all. [R] each."""

    first: Int64Array
    num_tiles: Int64Array
    base: Int64Array


def plan_step(
    batch: AttentionBatch, page_size: int, *, max_block_tiles: int, max_group_tiles: int
) -> list[Group]:
    """The groups of a step. A request with more than `max_group_tiles` is a group of its own."""
    queries = _query_tiles(batch)
    if not len(queries.request):
        return []
    keys = _key_tiles(queries, len(batch.block_table))
    position, request = _readable_positions(queries, keys)
    block_table = batch.block_table.numpy()
    page = block_table[request[:, None], position // page_size].astype(np.int64)
    offset = position % page_size
    groups = []
    for members in _group_requests(keys.num_tiles, max_group_tiles):
        tiles = np.flatnonzero(
            (queries.request >= members.start)
            & (queries.request < members.stop)
            & (queries.stop > queries.first)
        )
        if not len(tiles):
            continue
        base = int(keys.base[members.start])
        stop = base + int(keys.num_tiles[members.start : members.stop].sum())
        order = np.argsort(-(queries.stop - queries.first)[tiles], kind="stable")
        tiles = tiles[order]
        groups.append(
            Group(
                page=torch.from_numpy(page[base:stop]),
                offset=torch.from_numpy(offset[base:stop]),
                blocks=[
                    _block(queries, keys, tiles[start : start + max_block_tiles], base)
                    for start in range(0, len(tiles), max_block_tiles)
                ],
            )
        )
    return groups


def _query_tiles(batch: AttentionBatch) -> _QueryTiles:
    indptr = batch.row_indptr.numpy().astype(np.int64)
    num_tiles = -(-np.diff(indptr) // TILE)
    request = np.repeat(np.arange(len(num_tiles), dtype=np.int64), num_tiles)
    nth = np.arange(len(request)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    first_row = indptr[request] + TILE * nth
    num_rows = np.minimum(TILE, indptr[request + 1] - first_row)
    place = np.arange(TILE)
    rows = first_row[:, None] + np.minimum(place, num_rows[:, None] - 1)
    lo = batch.kv_lo.numpy().astype(np.int64)[rows]
    hi = batch.kv_hi.numpy().astype(np.int64)[rows]
    sees = lo < hi
    first = np.where(sees, lo, _FAR).min(1, initial=_FAR) // TILE
    stop = -(-np.where(sees, hi, 0).max(1, initial=0) // TILE)
    first = np.minimum(first, stop)
    return _QueryTiles(rows, num_rows, request, lo, hi, first, stop)


def _key_tiles(queries: _QueryTiles, num_requests: int) -> _KeyTiles:
    used = queries.stop > queries.first
    first = np.full(num_requests, _FAR)
    stop = np.zeros(num_requests, np.int64)
    np.minimum.at(first, queries.request[used], queries.first[used])
    np.maximum.at(stop, queries.request[used], queries.stop[used])
    first = np.minimum(first, stop)
    count = stop - first
    return _KeyTiles(first, count, np.cumsum(count) - count)


def _readable_positions(queries: _QueryTiles, keys: _KeyTiles) -> tuple[Int64Array, Int64Array]:
    """History position read at each place of each key tile [n, 64], and the tiles' requests [n].

    A place that no row sees takes the first position that some row of the request sees.
    """
    request = np.repeat(np.arange(len(keys.num_tiles), dtype=np.int64), keys.num_tiles)
    nth = np.arange(len(request)) - keys.base[request]
    position = ((keys.first[request] + nth) * TILE)[:, None] + np.arange(TILE)
    shift = ((keys.base - keys.first) * TILE)[queries.request][:, None]
    sees = queries.lo < queries.hi
    end = position.size + 1
    opened = np.bincount((queries.lo + shift)[sees], minlength=end)
    closed = np.bincount((queries.hi + shift)[sees], minlength=end)
    is_seen = (np.cumsum(opened - closed)[:-1] > 0).reshape(position.shape)
    lowest = np.full(len(keys.num_tiles), _FAR)
    np.minimum.at(lowest, queries.request, np.where(sees, queries.lo, _FAR).min(1, initial=_FAR))
    return np.where(is_seen, position, lowest[request][:, None]), request


def _group_requests(num_key_tiles: Int64Array, max_group_tiles: int) -> list[range]:
    groups, start, size = [], 0, 0
    for request, count in enumerate(num_key_tiles.tolist()):
        if size and size + count > max_group_tiles:
            groups.append(range(start, request))
            start, size = request, 0
        size += count
    return [*groups, range(start, len(num_key_tiles))]


def _block(queries: _QueryTiles, keys: _KeyTiles, tiles: Int64Array, base: int) -> Block:
    request, num_rows = queries.request[tiles], queries.num_rows[tiles]
    waves = (queries.stop - queries.first)[tiles]
    wave = np.arange(int(waves[0]))[:, None]
    key_tile = queries.first[tiles] + np.minimum(wave, waves - 1)
    place = np.arange(TILE)
    is_row = place < num_rows[:, None]
    return Block(
        num_tiles=len(tiles),
        rows=torch.from_numpy(queries.rows[tiles].reshape(-1)),
        out_rows=torch.from_numpy(queries.rows[tiles][is_row]),
        out_places=torch.from_numpy(np.flatnonzero(is_row)),
        active=[int(count) for count in (waves > wave).sum(1)],
        key_tiles=torch.from_numpy(key_tile - keys.first[request] + keys.base[request] - base),
        first_position=torch.from_numpy(key_tile * TILE),
        requests=torch.from_numpy(request),
        partial=_partial(queries, tiles, key_tile, waves),
    )


def _partial(
    queries: _QueryTiles, tiles: Int64Array, key_tile: Int64Array, waves: Int64Array
) -> list[HiddenPairs | None]:
    lo, hi = queries.lo[tiles], queries.hi[tiles]
    begin = key_tile * TILE
    whole = (lo.max(1) <= begin) & (hi.min(1) >= begin + TILE)
    num_waves = len(key_tile)
    is_partial = ~whole & (np.arange(num_waves)[:, None] < waves)
    wave, tile = np.nonzero(is_partial)
    position = begin[wave, tile][:, None, None] + np.arange(TILE)
    hidden = (position < lo[tile][:, :, None]) | (position >= hi[tile][:, :, None])
    ends = np.searchsorted(wave, np.arange(num_waves + 1))
    partial: list[HiddenPairs | None] = []
    for start, stop in pairwise(ends):
        if start == stop:
            partial.append(None)
            continue
        mask = torch.from_numpy(hidden[start:stop]).unsqueeze(1)
        partial.append(HiddenPairs(_as_slice(tile[start:stop]), mask))
    return partial


def _as_slice(ascending: NDArray[np.intp]) -> slice | torch.Tensor:
    first, last = int(ascending[0]), int(ascending[-1])
    if last - first + 1 == len(ascending):
        return slice(first, last + 1)
    return torch.from_numpy(ascending.astype(np.int64))
