"""Attention of the conformance suite's problems, dense and row by row: no pages, no partials.

Each row attends in one go to the history rows of its interval and the suffix rows of its chain.
"""

from __future__ import annotations

import math

import torch

from engine.testing.attention_problem import Problem, RequestRows


def dense_attention(problem: Problem, dtype: torch.dtype) -> torch.Tensor:
    """Exact result of every computed row [rows, H, V], computed and returned in `dtype`."""
    case = problem.case
    out = torch.zeros(problem.num_rows, case.num_heads, case.v_dim, dtype=dtype)
    for request in problem.requests:
        first = request.shape.length - request.shape.new
        for row in range(first, request.shape.length + request.shape.suffix):
            out[request.first_row + row - first] = _row(problem, request, row, dtype)
    return out


def visible_rows(request: RequestRows, row: int) -> list[int]:
    """Rows of the request whose keys the row sees, history first, then its chain."""
    seen = list(range(int(request.lo[row]), int(request.hi[row])))
    suffix = row - request.shape.length
    chain: list[int] = []
    if suffix >= 0 and request.reads_self[suffix]:
        while suffix >= 0:
            chain.append(request.shape.length + suffix)
            suffix = int(request.parent[suffix])
    return seen + chain[::-1]


def _row(problem: Problem, request: RequestRows, row: int, dtype: torch.dtype) -> torch.Tensor:
    case = problem.case
    seen = visible_rows(request, row)
    if not seen:
        return torch.zeros(case.num_heads, case.v_dim, dtype=dtype)
    group = case.num_heads // case.num_kv_heads
    q_HA = request.q[row].to(dtype)
    k_NHA = request.k[seen].to(dtype).repeat_interleave(group, 1)
    v_NHV = request.v[seen].to(dtype).repeat_interleave(group, 1)
    scores_NH = torch.einsum("ha,nha->nh", q_HA, k_NHA) * case.qk_dim**-0.5
    if problem.bias is not None:
        biases = [_bias(problem, request, row, key) for key in seen]
        scores_NH += torch.tensor(biases, dtype=dtype)[:, None]
    if case.score == "silu":
        weights_NH = scores_NH * torch.sigmoid(scores_NH)
    else:
        weights_NH = torch.softmax(scores_NH, 0)
    return torch.einsum("nh,nhv->hv", weights_NH, v_NHV)


def _bias(problem: Problem, request: RequestRows, row: int, key: int) -> float:
    """The published formula, one pair at a time, its logarithm in float64."""
    assert problem.bias is not None
    position, time = problem.bias
    length = (len(position) + 1) // 2
    distance = int(request.position[key] - request.position[row])
    seconds = abs(int(request.next_time[row]) - int(request.time[key]))
    bucket = min(128, math.floor(math.log(max(1, seconds)) / 0.301))
    return float(position[length - 1 + distance]) + float(time[bucket])
