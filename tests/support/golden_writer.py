"""Golden files of any size: the published formulas in float64, dense, one user at a time.

Written from the formulas, not from the engine: masks are matrices here, nothing is cached.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file


class GoldenWriter:
    """One model of a family with random weights; writes files of several kinds.

    sizes: layers, D, H, A, V. options: c (contextual rows), window, group, n (N), group_norm,
    concat_ua, use_timestamps, residual, alpha.
    """

    def __init__(self, family, seed, *, layers=2, d=20, h=2, a=8, v=12, n=64, **options):
        self.rng = np.random.default_rng(seed)
        self.family, self.layers, self.d, self.h, self.a, self.v = family, layers, d, h, a, v
        if family == "nvidia":
            self.v = a
        self.n, self.options = n, options
        self.weights = [self._layer(index) for index in range(layers)]

    def draw(self, *shape, scale=1.0):
        return (self.rng.normal(size=shape) * scale).astype(np.float32)

    def _layer(self, index):
        width, out = 2 * self.h * (self.v + self.a), self.h * self.v
        uvqk = self.draw(self.d, width, scale=self.d**-0.5)
        if self.family == "meta_research":
            parts = 3 if self.options.get("concat_ua") else 1
            return {
                "_uvqk": uvqk,
                "_o.weight": self.draw(self.d, parts * out, scale=out**-0.5),
                "_o.bias": self.draw(self.d, scale=0.1),
                "_rel_attn_bias._pos_w": self.draw(2 * self.n - 1, scale=0.3),
                "_rel_attn_bias._ts_w": self.draw(129, scale=0.3),
            }
        norm_width = self.h if self.options.get("group_norm") else out
        norms = []
        for size in (self.d, norm_width):
            norms += [1 + self.draw(size, scale=0.1), self.draw(size, scale=0.1)]
        bias = self.draw(width, scale=0.1)
        if self.family == "nvidia":
            names = ("_input_layernorm_weight", "_input_layernorm_bias",
                     "_output_layernorm_weight", "_output_layernorm_bias")  # fmt: skip
            proj = self.draw(out, self.d, scale=out**-0.5)
            rest = {"_linear_uvqk_weight": uvqk, "_linear_uvqk_bias": bias,
                    "_linear_proj_weight": proj}  # fmt: skip
        else:
            names = ("_input_norm_weight", "_input_norm_bias",
                     "_output_norm_weight", "_output_norm_bias")  # fmt: skip
            rest = {"_uvqk_weight": uvqk, "_uvqk_beta": bias,
                    "_output_weight": self.draw(3 * out, self.d, scale=out**-0.5)}  # fmt: skip
        return {**dict(zip(names, norms, strict=True)), **rest}

    def mask(self, length, targets):
        """allowed [length, length], by ranks."""
        c, window = self.options.get("c", 0), self.options.get("window", 0)
        group = self.options.get("group", 1)
        i = np.arange(length)
        rank = i if c == 0 else np.maximum(0, i - c + 1)
        first = length - targets
        top = first if c == 0 else first + 1 - c
        is_target = i >= first
        seen_rank = np.minimum(rank, top) if self.family != "nvidia" else rank
        allowed = seen_rank[:, None] > seen_rank[None, :]
        if window:
            allowed &= seen_rank[:, None] - seen_rank[None, :] <= window
        both = is_target[:, None] & is_target[None, :]
        nth = (i - first) // group
        same_group = nth[:, None] == nth[None, :]
        allowed &= ~both | (same_group & (self.family == "nvidia"))
        if c:
            allowed |= (seen_rank[:, None] == 0) & (seen_rank[None, :] < top) & ~is_target[None, :]
        return allowed | np.eye(length, dtype=bool)

    def bias(self, weights, times, length):
        """times [>= length + 1]."""
        i = np.arange(length)
        dt = np.abs(times[i + 1][:, None] - times[i][None, :]).astype(np.float64)
        bucket = np.minimum(128, np.floor(np.log(np.maximum(1, dt)) / 0.301)).astype(int)
        position = weights["_rel_attn_bias._pos_w"][self.n - 1 + i[None, :] - i[:, None]]
        return position.astype(np.float64) + weights["_rel_attn_bias._ts_w"][bucket]

    def forward(self, x, targets, times=None):
        """One user's rows [L, D] -> (out [L, D], K [layers][L, H, A], V)."""
        x, keys, values = x.astype(np.float64), [], []
        allowed = self.mask(len(x), targets)
        for weights in self.weights:
            x, k, v = self._forward_layer(weights, x, allowed, times)
            keys.append(k)
            values.append(v)
        return x, keys, values

    def _forward_layer(self, weights, x, allowed, times):
        w = {name: value.astype(np.float64) for name, value in weights.items()}
        h, a, v, length = self.h, self.a, self.v, len(x)
        research, nvidia = self.family == "meta_research", self.family == "nvidia"
        eps = 1e-5 if nvidia else 1e-6
        prefix = "_input_layernorm" if nvidia else "_input_norm"
        normed = _layer_norm(x, eps)
        if not research:
            normed = normed * w[f"{prefix}_weight"] + w[f"{prefix}_bias"]
        if research:
            uvqk = _silu(normed @ w["_uvqk"])
        elif nvidia:
            uvqk = _silu(normed @ w["_linear_uvqk_weight"] + w["_linear_uvqk_bias"])
        else:
            uvqk = normed @ w["_uvqk_weight"] + w["_uvqk_beta"]
        u, val, q, k = np.split(uvqk, np.cumsum([h * v, h * v, h * a]), axis=1)
        u = u if research or nvidia else _silu(u)
        q, k, val = (t.reshape(length, h, -1) for t in (q, k, val))
        alpha = 1.0 if research else self.options.get("alpha", a**-0.5)
        scores = np.einsum("ihd,jhd->hij", q, k) * alpha
        if research and self.options.get("use_timestamps"):
            scores = scores + self.bias(weights, times, length)
        attended = np.einsum("hij,jhv->ihv", _silu(scores) / self.n * allowed, val)
        flat = attended.reshape(length, -1)
        if research:
            middle = _layer_norm(flat, eps)
            y = u * middle
            if self.options.get("concat_ua"):
                y = np.concatenate((u, middle, y), axis=1)
            out = x + y @ w["_o.weight"].T + w["_o.bias"]
        elif nvidia:
            normed = _layer_norm(flat, eps)
            normed = normed * w["_output_layernorm_weight"] + w["_output_layernorm_bias"]
            out = (u * normed) @ w["_linear_proj_weight"]
            out = out + x if self.options.get("residual", True) else out
        else:
            if self.options.get("group_norm"):
                normed = _layer_norm(attended, eps) * w["_output_norm_weight"][:, None]
                normed = (normed + w["_output_norm_bias"][:, None]).reshape(length, -1)
            else:
                normed = _layer_norm(flat, eps)
                normed = normed * w["_output_norm_weight"] + w["_output_norm_bias"]
            out = x + np.concatenate((u, flat, u * normed), axis=1) @ w["_output_weight"]
        return out, k, val

    def config(self, kind, **entries):
        get = self.options.get
        common = {"kind": kind, "num_layers": self.layers, "num_heads": self.h,
                  "dtype": "float32"}  # fmt: skip
        if self.family == "nvidia":
            sizes = {"hidden_size": self.d, "head_dim": self.a, "layernorm_epsilon": 1e-5,
                     "alpha": get("alpha", self.a**-0.5), "num_contextuals": get("c"),
                     "scaling_seqlen": get("scaling_seqlen", self.n),
                     "target_group_size": get("group", 1),
                     "residual": get("residual", True)}  # fmt: skip
        else:
            sizes = {"embedding_dim": self.d, "attention_dim": self.a, "norm_eps": 1e-6}
            if self.family == "meta_stu":
                sizes |= {"hidden_dim": self.v, "attn_alpha": get("alpha", self.a**-0.5),
                          "scale_N": self.n, "contextual_seq_len": get("c", 0),
                          "max_attn_len": get("window", 0),
                          "group_norm": get("group_norm", False)}  # fmt: skip
            else:
                sizes |= {"linear_dim": self.v, "scale_n": self.n,
                          "concat_ua": get("concat_ua", False),
                          "use_timestamps": get("use_timestamps", False)}  # fmt: skip
        return {"family": self.family, **common, **sizes, **entries}

    def save(self, path: Path, config, tensors):
        """Write the file; numpy float64 becomes float32."""
        layer = "_attention_layers" if self.family == "meta_research" else "layers"
        named = {
            f"{layer}.{index}.{name}": value
            for index, weights in enumerate(self.weights)
            for name, value in weights.items()
        }
        stored = {}
        for name, value in {**named, **tensors}.items():
            value = np.asarray(value)
            dtype = np.int64 if value.dtype.kind in "iu" else np.float32
            stored[name] = torch.from_numpy(np.ascontiguousarray(value.astype(dtype)))
        save_file(stored, path, {"config": json.dumps(config)})

    def targets_key(self):
        return "num_candidates" if self.family == "nvidia" else "num_targets"


def _layer_norm(x, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


def _silu(x):
    return x / (1 + np.exp(-x))


def write_full(writer: GoldenWriter, path, lengths, targets=None):
    """Kind full."""
    counts = targets or [0] * len(lengths)
    x = writer.draw(sum(lengths), writer.d)
    times = _timestamps(writer, lengths)
    ends = np.cumsum(lengths)
    results = [
        writer.forward(
            part, count, None if times is None else np.append(times[user], times[user][-1])
        )
        for user, (part, count) in enumerate(zip(np.split(x, ends[:-1]), counts, strict=True))
    ]
    tensors = {"x": x, "lengths": lengths, "out": np.concatenate([r[0] for r in results])}
    if times is not None:
        tensors["timestamps"] = times
    if writer.family == "nvidia":
        for layer in range(writer.layers):
            tensors[f"k.{layer}"] = np.concatenate([r[1][layer] for r in results])
            tensors[f"v.{layer}"] = np.concatenate([r[2][layer] for r in results])
    config = writer.config(
        "full", lengths=list(lengths), max_seqlen=max(lengths), **{writer.targets_key(): targets}
    )
    writer.save(path, config, tensors)


def write_cached(writer: GoldenWriter, path, cached, new, targets):
    """Kind cached, for models whose history may be appended (or without new history)."""
    lengths = [c + new + t for c, t in zip(cached, targets, strict=True)]
    x = writer.draw(sum(lengths), writer.d)
    parts = np.split(x, np.cumsum(lengths)[:-1])
    whole = [writer.forward(part, t)[0] for part, t in zip(parts, targets, strict=True)]
    primed = [writer.forward(part[:c], 0) for part, c in zip(parts, cached, strict=True)]
    tensors = {
        "x": x,
        "lengths": lengths,
        "hist_lengths": cached,
        "hist_x": np.concatenate([p[:c] for p, c in zip(parts, cached, strict=True)]),
        "hist_out": np.concatenate([result[0] for result in primed]),
        "delta_x": np.concatenate([p[c:] for p, c in zip(parts, cached, strict=True)]),
        "delta_out": np.concatenate([o[c:] for o, c in zip(whole, cached, strict=True)]),
        "full_out": np.concatenate(whole),
    }
    for layer in range(writer.layers):
        tensors[f"k_cache.{layer}"] = np.concatenate([r[1][layer] for r in primed])
        tensors[f"v_cache.{layer}"] = np.concatenate([r[2][layer] for r in primed])
    config = writer.config(
        "cached", lengths=lengths, hist_lengths=cached, new_history=new, max_seqlen=max(lengths),
        **{writer.targets_key(): targets},
    )  # fmt: skip
    writer.save(path, config, tensors)


def write_incremental(writer: GoldenWriter, path, cached, new, targets, rounds):
    """Kind incremental."""
    histories = [writer.draw(c + new * rounds, writer.d) for c in cached]
    tensors, current = {}, list(cached)
    tensors["r0.hist_x"] = np.concatenate([h[:c] for h, c in zip(histories, current, strict=True)])
    tensors["r0.hist_lengths"] = current
    for number in range(1, rounds + 1):
        full, delta, out = [], [], []
        for history, c in zip(histories, current, strict=True):
            x = np.concatenate((history[: c + new], writer.draw(targets, writer.d)))
            full.append(x)
            delta.append(x[c:])
            out.append(writer.forward(x, targets)[0])
        name = f"r{number}."
        tensors[name + "delta_x"] = np.concatenate(delta)
        tensors[name + "full_x"] = np.concatenate(full)
        tensors[name + "full_out"] = np.concatenate(out)
        tensors[name + "full_lengths"] = [len(x) for x in full]
        tensors[name + "delta_out"] = np.concatenate(
            [o[c:] for o, c in zip(out, current, strict=True)]
        )
        current = [c + new for c in current]
        tensors[name + "hist_lengths"] = current
    finals = [writer.forward(history, 0) for history in histories]
    tensors["final_hist_x"] = np.concatenate(histories)
    tensors["final_hist_out"] = np.concatenate([result[0] for result in finals])
    for layer in range(writer.layers):
        tensors[f"final_k_cache.{layer}"] = np.concatenate([r[1][layer] for r in finals])
        tensors[f"final_v_cache.{layer}"] = np.concatenate([r[2][layer] for r in finals])
    config = writer.config(
        "incremental", lengths=current, new_history=new, targets=targets, rounds=rounds,
        num_targets=[targets] * len(cached),
    )  # fmt: skip
    writer.save(path, config, tensors)


def write_mfalcon(writer: GoldenWriter, path, cached, candidates, microbatch):
    """Kind mfalcon."""
    histories = [writer.draw(c, writer.d) for c in cached]
    cand = writer.draw(len(cached), candidates, writer.d)
    out = [
        writer.forward(np.concatenate((history, rows)), candidates)[0][len(history) :]
        for history, rows in zip(histories, cand, strict=True)
    ]
    tensors = {
        "hist_x": np.concatenate(histories),
        "hist_lengths": cached,
        "cand_x": cand,
        "cand_out": np.stack(out),
        "cand_out_microbatched": np.stack(out),
    }
    config = writer.config(
        "mfalcon", lengths=[c + candidates for c in cached], hist_lengths=cached,
        microbatch=microbatch, num_targets=[candidates] * len(cached),
    )  # fmt: skip
    writer.save(path, config, tensors)


def write_delta(writer: GoldenWriter, path, lengths):
    """Kind delta: the last row of each user replaced."""
    base = writer.draw(sum(lengths), writer.d)
    times = _timestamps(writer, lengths)
    last = np.cumsum(lengths) - 1
    new = base.copy()
    new[last] = writer.draw(len(lengths), writer.d)
    out = np.concatenate(
        [
            writer.forward(part, 0, np.append(times[user], times[user][-1]))[0]
            for user, part in enumerate(np.split(new, np.cumsum(lengths)[:-1]))
        ]
    )
    tensors = {"x_base": base, "x_new": new, "out_delta": out, "out_full": out,
               "delta_pos": [length - 1 for length in lengths], "delta_flat_index": last,
               "lengths": lengths, "timestamps": times}  # fmt: skip
    writer.save(path, writer.config("delta", lengths=list(lengths)), tensors)


def _timestamps(writer: GoldenWriter, lengths):
    """[U, n], zero beyond the query time; None for models that read none."""
    if not writer.options.get("use_timestamps"):
        return None
    times = np.zeros((len(lengths), writer.n), np.int64)
    for user, length in enumerate(lengths):
        steps = writer.rng.integers(0, 10 ** writer.rng.integers(1, 7, size=length + 1))
        values = 1_500_000_000 + np.cumsum(steps)
        stored = values[: writer.n]
        times[user, : len(stored)] = stored
    return times
