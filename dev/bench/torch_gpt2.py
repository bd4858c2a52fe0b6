"""GPT-2 training in PyTorch as fast as PyTorch makes it: the peer that the trainer is timed beside.

torch.compile, flash attention, bf16 autocast over fp32 weights, fused AdamW, vocabulary padded to a
multiple of 128, gradient clipping. Reads the trainer's model files and, for the same seed, the same
tokens in the same order.

    python3 dev/bench/torch_gpt2.py --model d12 --batch 64 --total 524288 --steps 20
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from data_order import Windows
from torch import nn

SIZES = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600)}
MAX_T, VOCAB, PADDED_VOCAB = 1024, 50257, 50304
MODEL_MAGIC = 20240326


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, C: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Returns the mean cross entropy of a batch."""

    def __init__(self, layers: int, heads: int, C: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(PADDED_VOCAB, C), nn.Embedding(MAX_T, C)
        self.blocks = nn.ModuleList(Block(C, heads) for _ in range(layers))
        self.lnf = nn.LayerNorm(C)
        for name, p in self.named_parameters():
            scale = 0.02 / math.sqrt(2 * layers) if "proj.weight" in name else 0.02
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, scale)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.lnf(h), self.wte.weight)
        if self.training_vocab < PADDED_VOCAB:
            logits = logits[..., : self.training_vocab]
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), y.view(-1))

    # Padded, all columns take part, as in llm.c's script: faster. Set to VOCAB to compare losses.
    training_vocab = PADDED_VOCAB


def load_model_file(model: GPT2, path: Path) -> None:
    """Weights from a model file of the trainer, fp32 or bf16."""
    header = np.fromfile(path, dtype="<i4", count=256)
    if header[0] != MODEL_MAGIC or header[1] not in (3, 5):
        raise SystemExit(f"error: {path}: not a model file")
    if header[1] == 3:
        flat = torch.from_numpy(np.fromfile(path, dtype="<f4", offset=1024))
    else:
        raw = np.fromfile(path, dtype="<i2", offset=1024)
        flat = torch.from_numpy(raw).view(torch.bfloat16).float()
    blocks = model.blocks
    order: list[list[torch.Tensor]] = [[model.wte.weight], [model.wpe.weight]]
    for layer in ("ln1", "qkv", "attproj", "ln2", "fc", "fcproj"):
        for kind in ("weight", "bias"):
            order.append([getattr(getattr(block, layer), kind) for block in blocks])
    order += [[model.lnf.weight], [model.lnf.bias]]
    at = 0
    with torch.no_grad():
        for tensors in order:
            for tensor in tensors:
                tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
                at += tensor.numel()
    if at != len(flat):
        raise SystemExit(f"error: {path}: {len(flat)} weights, expected {at}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="d12")
    parser.add_argument("--weights", type=Path, help="model file; else drawn at random")
    parser.add_argument("--data", type=Path, help="token file; else random tokens")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a micro-batch")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--total", type=int, default=524288, help="tokens in a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5, help="steps left out of the median")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--exact-vocab", action="store_true", help="no padding in the softmax")
    parser.add_argument("--json", type=Path, help="write figures and losses here")
    args = parser.parse_args()
    if args.total % (args.batch * args.seq) != 0 or args.steps <= args.warmup:
        parser.error("--total must be a multiple of --batch * --seq, --steps more than --warmup")
    return args


def batches(args: argparse.Namespace, M: int) -> list:
    """One step's micro-batches at a time: a function of the step."""
    if args.data is None:
        generator = torch.Generator().manual_seed(1)
        shape = (M, 2, args.batch, args.seq)
        fixed = torch.randint(0, VOCAB, shape, generator=generator).cuda()
        return lambda step: fixed
    windows = Windows(args.data, args.seq)

    def of_step(step: int) -> torch.Tensor:
        micro = [np.stack(windows.micro_batch(step, j, M, args.batch)) for j in range(M)]
        return torch.from_numpy(np.stack(micro)).cuda(non_blocking=True)

    return of_step


def main() -> None:
    """Trains, prints a line a step and the median speed."""
    args = parse_arguments()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    layers, heads, C = SIZES[args.model]
    model = GPT2(layers, heads, C)
    if args.weights:
        load_model_file(model, args.weights)
    if args.exact_vocab:
        model.training_vocab = VOCAB
    model.cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    compiled = torch.compile(model)
    M = args.total // (args.batch * args.seq)
    of_step = batches(args, M)
    times, losses = [], []
    data = of_step(0)
    for step in range(args.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        total = torch.zeros((), device="cuda")
        for x, y in data:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = compiled(x, y) / M
            total += loss.detach()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        print(f"step {step + 1}/{args.steps} | loss {losses[-1]:.6f} | {times[-1] * 1e3:.2f} ms")
        data = of_step(step + 1)
    median = statistics.median(times[args.warmup :])
    memory = torch.cuda.max_memory_allocated() / 2**30
    speed = args.total / median
    print(f"torch {args.model} B {args.batch} d {args.total}: {speed:.0f} tok/s, {memory:.1f} GiB")
    if args.json:
        result = {
            "tokens_per_second": speed,
            "median_ms": median * 1e3,
            "memory_gib": memory,
            "losses": losses,
            "torch": torch.__version__,
        }
        args.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
