"""All HSTU layers by native code: L + 1 calls for L layers.

One call does a layer from its keys to its residual, and the next layer's projections. So between
two calls stands only the wait for the next layer's pages. `layers.py` is the same in torch.

Legend: T rows, D hidden_size, W H*V attended columns, P H*(2V+2A) projected columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention_backends.base import AttentionBatch, LayerBias
from engine.attention_backends.native_step import NativeStep, padded_position
from engine.models.base import StepPages
from engine.models.config import HstuLayers
from engine.models.hstu.layers import HstuLayer, norm_eps

_Half = list[torch.Tensor | None]
"""A norm and the linear behind it: weight and bias of each."""


class NativeLayers:
    """A `LayerProgram`. Its buffers are kept from step to step: fresh memory costs page faults.

    Args:
        config: Of the layers.
        layers: Their weights, at least one.
        alpha: Factor on q.k.
        scale: Factor on the attention sum.
    """

    def __init__(
        self, config: HstuLayers, layers: Sequence[HstuLayer], alpha: float, scale: float
    ) -> None:
        v_width, qk_width = config.num_heads * config.v_dim, config.num_heads * config.qk_dim
        width = 2 * v_width + 2 * qk_width
        self._projected_TP = torch.empty(0, width, dtype=layers[0].uvqk.dtype)
        self._attended_TW = torch.empty(0, v_width)
        self._silu_width = v_width if config.family == "meta" else width
        self._form = "product"
        if config.family == "meta" or config.concat_ua:
            self._form = "attended" if config.family == "meta" else "normed"
        self._config = config
        self._alpha, self._scale = alpha, scale
        self._eps = norm_eps(config)
        self._is_packed = layers[0].uvqk.is_prepacked
        self._inputs: list[_Half] = [
            [*layer.input_norm, layer.uvqk.weight, layer.uvqk.bias] for layer in layers
        ]
        self._outputs: list[_Half] = [
            [*layer.attn_norm, layer.output_linear.weight, layer.output_linear.bias]
            for layer in layers
        ]
        self._biases = [_padded(layer.bias_tables) for layer in layers]

    def __call__(self, x: torch.Tensor, batch: AttentionBatch, pages: StepPages) -> torch.Tensor:
        num_rows = len(x)
        if num_rows > len(self._projected_TP):
            self._projected_TP = x.new_empty(num_rows, self._projected_TP.shape[1])
            self._attended_TW = torch.empty(num_rows, self._attended_TW.shape[1])
        projected_TP = self._projected_TP[:num_rows]
        attended_TW = self._attended_TW[:num_rows]
        step = NativeStep.from_batch(batch)
        x_TD = x.clone()
        torch.ops.engine.hstu_project(
            x_TD, self._inputs[0], self._is_packed, self._eps, self._silu_width, projected_TP
        )
        following: list[_Half] = [*self._inputs[1:], []]
        for layer, (output, next_input) in enumerate(zip(self._outputs, following, strict=True)):
            k_pages, v_pages = pages.layer(layer)
            torch.ops.engine.hstu_layer(
                x_TD,
                projected_TP,
                attended_TW,
                k_pages,
                v_pages,
                step.tensors,
                self._bias(layer, step),
                self._alpha,
                self._scale,
                output,
                self._form,
                self._config.group_norm,
                self._config.residual,
                next_input,
                self._is_packed,
                self._eps,
                self._silu_width,
            )
        return x_TD

    def _bias(self, layer: int, step: NativeStep) -> list[torch.Tensor]:
        """What the layer adds to q.k, empty: nothing."""
        tables, of_step = self._biases[layer], step.bias
        if tables is None or of_step is None:
            return []
        return [
            *tables,
            of_step.row_position,
            of_step.buckets,
            of_step.chain_buckets,
            of_step.chain_distance,
        ]


def _padded(tables: tuple[torch.Tensor, torch.Tensor] | None) -> list[torch.Tensor] | None:
    """Position and time weights as the kernel reads them."""
    if tables is None:
        return None
    bias = LayerBias(*tables)
    return [padded_position(bias), bias.time]
