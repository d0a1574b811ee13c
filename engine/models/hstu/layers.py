"""The HSTU layer of the three families, without the attention between its two halves.

    meta      [U|V|Q|K] = LN(x) @ W + b;       U = SiLU(U)
              out = x + concat[U, a, U * LN(a)] @ W_o
    research  [U|V|Q|K] = SiLU(LN(x) @ W)      norms without affine parameters
              out = x + (U * LN(a)) @ W_o + b_o        or concat[U, LN(a), U * LN(a)]
    nvidia    [U|V|Q|K] = SiLU(LN(x) @ W + b)
              out = (U * LN(a)) @ W_o + x

Sources: facebookresearch/generative-recommenders (STU layer; research HSTU), NVIDIA
recsys-examples (HSTU layer). Legend: T rows, D hidden_size, H heads, A qk_dim, V v_dim,
P H*(2V+2A) projected columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from engine.models.base import Projected
from engine.models.config import HstuLayers
from engine.models.linear import Linear
from engine.models.silu import silu_


class HstuLayer:
    """Weights of one layer: linears in the model's dtype, norms and biases of q.k in float32.

    Attributes:
        input_norm, attn_norm: Weight and bias of each norm, None: without an affine part.
        uvqk, output_linear: The linear behind each norm.
        bias_tables: Position and time weights of a bias on q.k.
    """

    def __init__(
        self,
        config: HstuLayers,
        index: int,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        def find(name: str) -> torch.Tensor | None:
            return tensors.get(f"layers.{index}.{name}")

        def find_float(name: str) -> torch.Tensor | None:
            tensor = find(name)
            return None if tensor is None else tensor.float().contiguous()

        def linear(name: str) -> Linear:
            weight = tensors[f"layers.{index}.{name}.weight"].to(dtype)
            return Linear(weight, find(f"{name}.bias"))

        self._config = config
        self._dtype = dtype
        self._eps = norm_eps(config)
        self.uvqk = linear("uvqk")
        self.output_linear = linear("output")
        self.input_norm = (find_float("input_norm.weight"), find_float("input_norm.bias"))
        self.attn_norm = (find_float("attn_norm.weight"), find_float("attn_norm.bias"))
        position, time = find_float("bias.position"), find_float("bias.time")
        self.bias_tables = None if position is None or time is None else (position, time)

    def project(self, x_TD: torch.Tensor) -> Projected:
        """x -> u [T, H*V], q and k [T, H, A], v [T, H, V]; q, k, v are strided views."""
        config = self._config
        weight, bias = self.input_norm
        n_TD = functional.layer_norm(x_TD.float(), (config.hidden_size,), weight, bias, self._eps)
        uvqk_TP = self.uvqk(n_TD.to(self._dtype))
        if config.family != "meta":
            uvqk_TP = silu_(uvqk_TP)
        v_width, qk_width = config.num_heads * config.v_dim, config.num_heads * config.qk_dim
        u, v, q, k = torch.split(uvqk_TP, [v_width, v_width, qk_width, qk_width], dim=1)
        return Projected(
            u=silu_(u.contiguous()) if config.family == "meta" else u,
            q=q.view(len(x_TD), config.num_heads, config.qk_dim),
            k=k.view(len(x_TD), config.num_heads, config.qk_dim),
            v=v.view(len(x_TD), config.num_heads, config.v_dim),
        )

    def output(
        self, x_TD: torch.Tensor, u: torch.Tensor, attended_THV: torch.Tensor
    ) -> torch.Tensor:
        """Gate, norm, projection, residual. `attended` stays float32 up to the norm."""
        config = self._config
        width = config.num_heads * config.v_dim
        a = attended_THV.reshape(-1, width)
        normed = self._normed(attended_THV)
        if config.family == "meta" or config.concat_ua:
            y = torch.empty(len(x_TD), 3 * width, dtype=self._dtype, device=x_TD.device)
            y[:, :width] = u
            y[:, width : 2 * width] = a if config.family == "meta" else normed
            y[:, 2 * width :] = normed.mul_(u)
        else:
            y = normed.mul_(u).to(self._dtype)
        projected_TD = self.output_linear(y)
        return projected_TD.add_(x_TD) if config.residual else projected_TD

    def _normed(self, attended_THV: torch.Tensor) -> torch.Tensor:
        """LN(a) over all H*V values of a row, or over each head (group norm): float32 [T, H*V]."""
        config = self._config
        weight, bias = self.attn_norm
        width = config.num_heads * config.v_dim
        if not config.group_norm:
            a = attended_THV.reshape(-1, width)
            return functional.layer_norm(a, (width,), weight, bias, self._eps)
        assert weight is not None and bias is not None
        heads = functional.layer_norm(
            attended_THV.contiguous(), (config.v_dim,), None, None, self._eps
        )
        return (heads * weight[:, None] + bias[:, None]).reshape(-1, width)


def norm_eps(config: HstuLayers) -> float:
    """Epsilon of both norms of a layer."""
    if config.norm_eps is not None:
        return config.norm_eps
    return 1e-5 if config.family == "nvidia" else 1e-6
