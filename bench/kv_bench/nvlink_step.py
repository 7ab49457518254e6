"""A decode step of an 8B model's shape at batch 64, as one CUDA graph, to measure how much a push slows it down.

All weights and all KV of a step are read, by torch's matmuls and a paged attention kernel; the numbers are random.

Shapes: B sequences, G query heads of a KV head, T positions of a tile, D head size.
"""

import torch
import triton
import triton.language as tl

from baton.bench.kv_bench.nvlink_shape import BATCH, CONTEXT_LEN, DECODE_BLOCKS, NUM_LAYERS

HIDDEN, INTERMEDIATE, VOCAB = 4096, 12288, 151936
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
_PUBLISH = tl.constexpr("""{
    .reg .pred p;
    .reg .u32 t;
    mov.u32 t, %tid.x;
    setp.eq.u32 p, t, 0;
    @p fence.acq_rel.sys;
    @p st.relaxed.sys.global.u64 [$1], $2;
    mov.u32 $0, t;
}""")


@triton.jit(do_not_specialize=["word"])
def mark(address: tl.int64, word: tl.int64) -> None:
    """Write a word to host memory: the end of what came before in the stream."""
    tl.inline_asm_elementwise(_PUBLISH, "=r,l,l", [address, word], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _attention(
    query,  # noqa: ANN001
    layer,  # noqa: ANN001
    blocks,  # noqa: ANN001
    out,  # noqa: ANN001
    CONTEXT: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
) -> None:
    """One program for a sequence and a KV head; the layer is [N, H, 2, S, D]."""
    sequence, head = tl.program_id(0) // H, tl.program_id(0) % H
    group_G, dim_D, step_T = tl.arange(0, 16), tl.arange(0, D), tl.arange(0, T)
    rows = query + (sequence * H * G + head * G + group_G[:, None]) * D + dim_D[None, :]
    query_GD = tl.load(rows, mask=(group_G < G)[:, None], other=0)
    peak_G = tl.full([16], -1e30, dtype=tl.float32)
    weight_G = tl.zeros([16], dtype=tl.float32)
    sum_GD = tl.zeros([16, D], dtype=tl.float32)
    for start in range(0, CONTEXT, T):
        position_T = start + step_T
        block_T = tl.load(blocks + sequence * (CONTEXT // S) + position_T // S).to(tl.int64)
        row_T = (block_T * H + head) * 2 * S + position_T % S
        key_TD = tl.load(layer + row_T[:, None] * D + dim_D[None, :])
        value_TD = tl.load(layer + (row_T + S)[:, None] * D + dim_D[None, :])
        score_GT = tl.dot(query_GD, tl.trans(key_TD)) * 0.088
        new_G = tl.maximum(peak_G, tl.max(score_GT, 1))
        share_GT = tl.exp(score_GT - new_G[:, None])
        fade_G = tl.exp(peak_G - new_G)
        weight_G = weight_G * fade_G + tl.sum(share_GT, 1)
        sum_GD = sum_GD * fade_G[:, None] + tl.dot(share_GT.to(tl.bfloat16), value_TD)
        peak_G = new_G
    rows = out + (sequence * H * G + head * G + group_G[:, None]) * D + dim_D[None, :]
    tl.store(rows, (sum_GD / weight_G[:, None]).to(tl.bfloat16), mask=(group_G < G)[:, None])


class DecodeStep:
    """A step, captured when constructed; `replay` runs it on `stream`.

    Args:
        pool: bytes of the KV pool; blocks below `DECODE_BLOCKS` are read.
        layer_bytes: bytes of one layer in it.
    """

    def __init__(self, pool: torch.Tensor, layer_bytes: int) -> None:
        device = pool.device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._layers = [pool[layer * layer_bytes : (layer + 1) * layer_bytes] for layer in range(NUM_LAYERS)]
        for layer in self._layers:
            layer.view(torch.bfloat16)[: DECODE_BLOCKS * 32768].normal_()
        order = torch.randperm(DECODE_BLOCKS, device=device)
        self._blocks = order.to(torch.int32).view(BATCH, CONTEXT_LEN // 16)
        sizes = ((6144, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
        self._weights = [[_weight(*size, device) for size in sizes] for _ in range(NUM_LAYERS)]
        self._head = _weight(VOCAB, HIDDEN, device)
        self._input = torch.randn(BATCH, HIDDEN, device=device, dtype=torch.bfloat16)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._run()
        self.stream.synchronize()
        with torch.cuda.graph(self._graph, stream=self.stream):
            self._out = self._run()
        self.replay()
        torch.cuda.synchronize()
        assert self._out.isfinite().all()

    def replay(self) -> None:
        """Run it once."""
        with torch.cuda.stream(self.stream):
            self._graph.replay()

    def _run(self) -> torch.Tensor:
        hidden = self._input
        for layer, (qkv, out, gate_up, down) in enumerate(self._weights):
            query = (_norm(hidden) @ qkv.T)[:, :HIDDEN].contiguous()
            attended = torch.empty_like(query)
            _attention[(BATCH * KV_HEADS,)](
                query,
                self._layers[layer].view(torch.bfloat16),
                self._blocks,
                attended,
                CONTEXT=CONTEXT_LEN,
                H=KV_HEADS,
                G=QUERY_HEADS // KV_HEADS,
                S=16,
                D=HEAD_DIM,
                T=64,
                num_warps=4,
            )
            hidden = hidden + attended @ out.T
            gate, up = (_norm(hidden) @ gate_up.T).chunk(2, dim=-1)
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ down.T
        return _norm(hidden) @ self._head.T


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden, (HIDDEN,))


def _weight(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.empty(rows, columns, device=device, dtype=torch.bfloat16).normal_(std=columns**-0.5)
