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
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from random_tokens import whole_number

SIZES = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600)}
MODEL_MAGIC = 20240326


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="d12")
    parser.add_argument("--weights", type=Path, help="model file, shape and all; else at random")
    parser.add_argument("--data", type=Path, help="token file; else random tokens")
    parser.add_argument("--batch", type=whole_number(1), default=64,
                        help="sequences in a micro-batch")
    parser.add_argument("--seq", type=whole_number(1), default=1024)
    parser.add_argument("--total", type=whole_number(1), default=524288, help="tokens in a step")
    parser.add_argument("--steps", type=whole_number(1), default=20)
    parser.add_argument("--warmup", type=whole_number(0), default=5,
                        help="steps left out of the median")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument(
        "--warmup-steps", type=whole_number(0), default=0,
        help="steps over which the learning rate rises",
    )
    parser.add_argument("--cuda-graphs", action="store_true", help="replay each micro-batch")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: in fp32")
    parser.add_argument("--exact-vocab", action="store_true", help="no padding in the softmax")
    parser.add_argument("--json", type=Path, help="write figures and losses here")
    args = parser.parse_args()
    if args.total % (args.batch * args.seq) != 0 or args.steps <= args.warmup:
        parser.error("--total must be a multiple of --batch * --seq, --steps more than --warmup")
    for option, path in (("--weights", args.weights), ("--data", args.data)):
        if path is not None and not path.is_file():
            parser.error(f"{option} {path}: no such file")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: must be a file in a folder that is there")
    return args


# Before PyTorch is there: --help needs none, and a wrong argument does not wait for it.
arguments = parse_arguments() if __name__ == "__main__" else None

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from data_order import Windows
    from torch import nn
except ModuleNotFoundError as missing:
    raise SystemExit(f"error: Python package '{missing.name}' is missing; .venv/bin/pip install "
                     "numpy torch") from None


@dataclass(frozen=True)
class Config:
    """The shape of a model."""

    layers: int
    heads: int
    channels: int
    max_seq_len: int = 1024
    vocab: int = 50257
    padded_vocab: int = 50304


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
    """Returns the mean cross entropy of a batch, times `scale`."""

    def __init__(self, config: Config, exact_vocab: bool) -> None:
        super().__init__()
        C, layers = config.channels, config.layers
        self.wte = nn.Embedding(config.padded_vocab, C)
        self.wpe = nn.Embedding(config.max_seq_len, C)
        self.blocks = nn.ModuleList(Block(C, config.heads) for _ in range(layers))
        self.lnf = nn.LayerNorm(C)
        # Padded, all columns take part, as in llm.c's script: faster. Exact, to compare losses.
        self.columns = config.vocab if exact_vocab else config.padded_vocab
        for name, p in self.named_parameters():
            scale = 0.02 / math.sqrt(2 * layers) if "proj.weight" in name else 0.02
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, scale)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.lnf(h), self.wte.weight)[..., : self.columns]
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten()) * scale


def read_header(path: Path) -> np.ndarray:
    """The header of a model file of the trainer, fp32 or bf16."""
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) < 256 or header[0] != MODEL_MAGIC or header[1] not in (3, 5):
        raise SystemExit(f"error: {path}: not a model file")
    return header


def config_of(args: argparse.Namespace) -> Config:
    """As --weights has it, else --model."""
    if args.weights is None:
        return Config(*SIZES[args.model])
    max_seq_len, vocab, layers, heads, channels, padded = map(int, read_header(args.weights)[2:8])
    return Config(layers, heads, channels, max_seq_len, vocab, padded)


def load_model_file(model: GPT2, path: Path) -> None:
    """Weights from a model file of the trainer, fp32 or bf16."""
    if read_header(path)[1] == 3:
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


class MicroSteps:
    """Gradients of a step's micro-batches, added up in each parameter's .grad.

    Nothing is launched for a parameter alone: a compiled call makes all gradients of a micro-batch,
    and one fused addition for all of them follows, none after the first micro-batch.
    """

    def __init__(self, model: GPT2, args: argparse.Namespace, M: int) -> None:
        self.parameters = list(model.parameters())
        self.scale = 1.0 / M
        self.bf16 = args.device == "cuda"  # in fp32 on the CPU
        self.device = args.device
        self.forward = model if args.eager else torch.compile(model, dynamic=False)

    def gradients(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, tuple]:
        """The loss and all gradients of one micro-batch, in memory of their own."""
        # Without a cache: a graph must not hold on to casts of weights that change.
        with torch.autocast(
            self.device, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False
        ):
            loss = self.forward(x, y, self.scale)
        return loss.detach(), torch.autograd.grad(loss, self.parameters)

    def run(self, data: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """All micro-batches of a step; the step's loss, still on its way."""
        losses = []
        for j, (x, y) in enumerate(data):
            loss, gradients = self.gradients(x, y)
            losses.append(loss)
            if j == 0:
                for parameter, gradient in zip(self.parameters, gradients):
                    # The optimizer's fused kernel wants both laid out alike.
                    if gradient.stride() != parameter.stride():
                        gradient = torch.empty_like(parameter).copy_(gradient)
                    parameter.grad = gradient
            else:
                torch._foreach_add_([p.grad for p in self.parameters], list(gradients))
        return torch.stack(losses).sum()


class GraphedMicroSteps(MicroSteps):
    """The same from one CUDA graph, captured once and replayed for each micro-batch.

    The graph reads its batch from fixed places and adds to gradients and a loss outside its own
    memory. Captured by hand (PyTorch's notes on CUDA semantics, whole-network capture) rather than
    by torch.compile's reduce-overhead mode, whose gradients live in memory that the next replay
    overwrites. On the CPU, where there are no graphs, a replay calls the function.
    """

    def __init__(
        self, model: GPT2, args: argparse.Namespace, M: int,
        example: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        super().__init__(model, args, M)
        self.x, self.y = (tensor.clone() for tensor in example)
        self.loss = torch.zeros((), device=args.device)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.sums = [parameter.grad for parameter in self.parameters]
        if args.device == "cpu":
            self.replay = self.accumulate
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, and lets libraries set themselves up
                self.accumulate()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.accumulate()
        self.replay = graph.replay

    def accumulate(self) -> None:
        """What the graph holds."""
        loss, gradients = self.gradients(self.x, self.y)
        torch._foreach_add_(self.sums, list(gradients))
        self.loss.add_(loss)

    def run(self, data: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        torch._foreach_zero_([*self.sums, self.loss])
        for x, y in data:
            self.x.copy_(x)
            self.y.copy_(y)
            self.replay()
        return self.loss


def batches(args: argparse.Namespace, M: int, vocab: int) -> Callable[[int], list]:
    """A step's micro-batches, inputs and targets, on the device: a function of the step."""
    if args.data is None:
        generator = torch.Generator().manual_seed(1)
        shape = (M, 2, args.batch, args.seq)
        fixed = torch.randint(0, vocab, shape, generator=generator).to(args.device)
        return lambda step: [(x, y) for x, y in fixed]
    windows = Windows(args.data, args.seq)

    def of_step(step: int) -> list:
        micro = [np.stack(windows.micro_batch(step, j, M, args.batch)) for j in range(M)]
        return [(x, y) for x, y in torch.from_numpy(np.stack(micro)).to(args.device)]

    return of_step


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(args: argparse.Namespace) -> None:
    """Trains, prints a line a step and the median speed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device cuda: no GPU that PyTorch can use; --device cpu: in fp32")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = config_of(args)
    if args.seq > config.max_seq_len:
        raise SystemExit(f"error: --seq {args.seq}: the model takes {config.max_seq_len} at most")
    model = GPT2(config, args.exact_vocab)
    if args.weights:
        load_model_file(model, args.weights)
    model.to(args.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    M = args.total // (args.batch * args.seq)
    of_step = batches(args, M, config.vocab)
    data = of_step(0)
    if args.cuda_graphs:
        micro_steps = GraphedMicroSteps(model, args, M, data[0])
    else:
        micro_steps = MicroSteps(model, args, M)
    times, losses = [], []
    for step in range(args.steps):
        rate = args.lr * min(1.0, (step + 1) / max(1, args.warmup_steps))
        synchronize(args.device)
        start = time.perf_counter()
        optimizer.param_groups[0]["lr"] = rate
        loss = micro_steps.run(data)
        nn.utils.clip_grad_norm_(micro_steps.parameters, 1.0, foreach=True)
        optimizer.step()
        losses.append(loss.item())
        synchronize(args.device)
        times.append(time.perf_counter() - start)
        print(f"step {step + 1}/{args.steps} | loss {losses[-1]:.6f} | {times[-1] * 1e3:.2f} ms")
        data = of_step(step + 1)
    report(args, times, losses)


def report(args: argparse.Namespace, times: list[float], losses: list[float]) -> None:
    """The last line, and --json."""
    kept = times[args.warmup :]
    memory = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    speed = args.total / statistics.median(kept)
    print(
        f"torch {args.weights or args.model} B {args.batch} d {args.total}: {speed:.0f} tok/s, "
        f"{memory:.1f} GiB"
    )
    if args.json:
        result = {
            "tokens_per_second": speed,
            "median_ms": statistics.median(kept) * 1e3,
            "min_ms": min(kept) * 1e3,
            "max_ms": max(kept) * 1e3,
            "memory_gib": memory,
            "losses": losses,
            "torch": torch.__version__,
        }
        args.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(arguments)
