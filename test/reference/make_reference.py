"""Writes the reference numbers that the trainer's tests compare with: GPT-2 in plain PyTorch.

    python3 test/reference/make_reference.py           write the files beside this script
    python3 test/reference/make_reference.py --check    compare them with a fresh computation

For each model of MODELS below, three files (integers and floats little endian):

    NAME_model.bin         weights, as -e reads them. 256 int32 (20240326, 3, maxT, V, L, NH, C, Vp,
                           zeros), then the 16 tensors of tensor_shapes() in fp32.
    NAME_debug_state.bin   256 int32 (20240327, 2, B, T, zeros), then x int32 (B,T), y int32 (B,T),
                           logits fp32 (B,T,V), loss fp32 (1), and the 16 gradients of that loss in
                           the order and shapes of the weights. The loss is the mean over B*T
                           positions; gradients are not clipped; padding rows of wte have
                           gradient 0.
    NAME_steps.json        ten AdamW steps on that one batch: per step the loss before the update,
                           the gradient norm before clipping and the learning rate.

x and y are cut from one run of B*T+1 tokens: y is x one place on, so that a token file of these
tokens gives a trainer without shuffling the same batch at every step.

Everything is computed in double precision from weights that are exact in fp32, and rounded once
when it is stored, so that the files do not depend on the machine to more than their last digit.
All weights are drawn, biases and LayerNorm's too, so that no gradient is trivially zero. (One is
all the same: the key bias shifts every score of a row alike, and softmax ignores that.)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent

MODEL_MAGIC, MODEL_VERSION_FP32 = 20240326, 3
DEBUG_MAGIC, DEBUG_VERSION = 20240327, 2
LAYER_NORM_EPS = 1e-5

STEPS = 10
LEARNING_RATE = 1e-3
BETA1, BETA2, ADAM_EPS = 0.9, 0.95, 1e-8
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Model:
    name: str
    seed: int
    max_seq_len: int
    vocab_size: int
    num_layers: int
    num_heads: int
    channels: int
    batch: int
    seq_len: int
    weight_scale: float  # standard deviation of the drawn weights
    repeated: float  # share of the positions that hold one and the same token

    @property
    def padded_vocab_size(self) -> int:
        return (self.vocab_size + 127) // 128 * 128


MODELS = (
    Model("tiny", 1, max_seq_len=64, vocab_size=257, num_layers=2, num_heads=2, channels=64,
          batch=2, seq_len=32, weight_scale=0.1, repeated=0.3),
    # Nothing here is a power of two: for loops that only work on round sizes. Its gradient norm
    # is above MAX_NORM at some steps and below it at others.
    Model("odd", 2, max_seq_len=24, vocab_size=200, num_layers=1, num_heads=3, channels=36,
          batch=3, seq_len=19, weight_scale=0.02, repeated=0.1),
)


def tensor_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The 16 tensors in the order of the model file; weights are stored (out, in)."""
    layers, c = model.num_layers, model.channels
    return {
        "wte": (model.padded_vocab_size, c),
        "wpe": (model.max_seq_len, c),
        "ln1w": (layers, c),
        "ln1b": (layers, c),
        "qkvw": (layers, 3 * c, c),
        "qkvb": (layers, 3 * c),
        "attprojw": (layers, c, c),
        "attprojb": (layers, c),
        "ln2w": (layers, c),
        "ln2b": (layers, c),
        "fcw": (layers, 4 * c, c),
        "fcb": (layers, 4 * c),
        "fcprojw": (layers, c, 4 * c),
        "fcprojb": (layers, c),
        "lnfw": (c,),
        "lnfb": (c,),
    }


DECAYED = {"wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"}


def draw_weights(model: Model, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Weights that are exact in fp32, as double tensors that want gradients."""
    weights = {}
    for name, shape in tensor_shapes(model).items():
        values = model.weight_scale * rng.standard_normal(shape)
        if name in ("ln1w", "ln2w", "lnfw"):
            values += 1.0
        if name == "wte":
            values[model.vocab_size :] = 0.0
        exact = values.astype(np.float32).astype(np.float64)
        weights[name] = torch.from_numpy(exact).requires_grad_()
    return weights


def draw_batch(model: Model, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y (B,T). One token comes up often, so that its row of wte gathers many gradients."""
    count = model.batch * model.seq_len + 1
    tokens = rng.integers(0, model.vocab_size, count)
    tokens[rng.random(count) < model.repeated] = 7
    tokens[0], tokens[-1] = model.vocab_size - 1, 0  # both ends of the vocabulary
    stream = torch.from_numpy(tokens)
    shape = (model.batch, model.seq_len)
    return stream[:-1].reshape(shape), stream[1:].reshape(shape)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + LAYER_NORM_EPS) * weight + bias


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The tanh form (Hendrycks and Gimpel 2016, section 2)."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def attention(qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Causal attention; qkv (B,T,3C) holds queries, keys and values of all heads in this order."""
    batch, seq_len, width = qkv.shape
    head_size = width // 3 // num_heads
    q, k, v = qkv.reshape(batch, seq_len, 3, num_heads, head_size).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(head_size)
    future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(batch, seq_len, width // 3)


def forward(model: Model, w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Logits (B,T,V) of GPT-2 (Radford et al. 2019, section 2.3); the head's weight is wte."""
    residual = w["wte"][x] + w["wpe"][: model.seq_len]
    for layer in range(model.num_layers):
        normed = layer_norm(residual, w["ln1w"][layer], w["ln1b"][layer])
        qkv = normed @ w["qkvw"][layer].T + w["qkvb"][layer]
        mixed = attention(qkv, model.num_heads)
        residual = residual + mixed @ w["attprojw"][layer].T + w["attprojb"][layer]
        normed = layer_norm(residual, w["ln2w"][layer], w["ln2b"][layer])
        hidden = gelu(normed @ w["fcw"][layer].T + w["fcb"][layer])
        residual = residual + hidden @ w["fcprojw"][layer].T + w["fcprojb"][layer]
    final = layer_norm(residual, w["lnfw"], w["lnfb"])
    return final @ w["wte"][: model.vocab_size].T


def mean_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def train(model: Model, weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict:
    """Ten steps of AdamW on one batch. Gradients longer than MAX_NORM are scaled to it."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [weights[n] for n in weights if n in DECAYED], "weight_decay": WEIGHT_DECAY},
            {"params": [weights[n] for n in weights if n not in DECAYED], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=(BETA1, BETA2),
        eps=ADAM_EPS,
    )
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(forward(model, weights, x), y)
        loss.backward()
        norm = math.sqrt(sum(float((w.grad**2).sum()) for w in weights.values()))
        if norm > MAX_NORM:
            for tensor in weights.values():
                tensor.grad *= MAX_NORM / norm
        optimizer.step()
        steps.append(
            {"step": step + 1, "loss": loss.item(), "norm": norm, "learning_rate": LEARNING_RATE}
        )
    return {
        "settings": {
            "learning_rate": LEARNING_RATE,
            "beta1": BETA1,
            "beta2": BETA2,
            "eps": ADAM_EPS,
            "weight_decay": WEIGHT_DECAY,
            "max_norm": MAX_NORM,
            "batch": model.batch,
            "seq_len": model.seq_len,
        },
        "steps": steps,
    }


def header(*values: int) -> bytes:
    ints = np.zeros(256, dtype="<i4")
    ints[: len(values)] = values
    return ints.tobytes()


def int32(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().astype("<i4").tobytes()


def fp32(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().astype("<f4").tobytes()


def to_json(result: dict) -> str:
    """JSON with one line a step."""
    lines = ",\n".join(f"  {json.dumps(step)}" for step in result["steps"])
    settings = json.dumps(result["settings"])
    return f'{{\n "settings": {settings},\n "steps": [\n{lines}\n ]\n}}\n'


def compute(model: Model) -> dict[str, bytes]:
    """The contents of a model's three files, by name."""
    rng = np.random.Generator(np.random.PCG64(model.seed))
    weights = draw_weights(model, rng)
    x, y = draw_batch(model, rng)

    model_file = header(
        MODEL_MAGIC,
        MODEL_VERSION_FP32,
        model.max_seq_len,
        model.vocab_size,
        model.num_layers,
        model.num_heads,
        model.channels,
        model.padded_vocab_size,
    ) + b"".join(fp32(tensor) for tensor in weights.values())

    logits = forward(model, weights, x)
    loss = mean_loss(logits, y)
    loss.backward()
    debug_state = header(DEBUG_MAGIC, DEBUG_VERSION, model.batch, model.seq_len)
    debug_state += int32(x) + int32(y) + fp32(logits) + fp32(loss.reshape(1))
    debug_state += b"".join(fp32(tensor.grad) for tensor in weights.values())

    steps = to_json(train(model, weights, x, y))
    return {
        f"{model.name}_model.bin": model_file,
        f"{model.name}_debug_state.bin": debug_state,
        f"{model.name}_steps.json": steps.encode(),
    }


def as_numbers(name: str, data: bytes) -> np.ndarray:
    """A file as one array of doubles. Token ids read as floats are tiny but compare exactly."""
    if name.endswith(".json"):
        steps = json.loads(data)["steps"]
        return np.array([[s["loss"], s["norm"], s["learning_rate"]] for s in steps])
    return np.frombuffer(data, dtype="<f4", offset=1024).astype(np.float64)


def check(name: str, expected: bytes) -> str | None:
    """What is wrong with the file beside this script, or None."""
    path = HERE / name
    if not path.exists():
        return f"{path}: missing"
    found = path.read_bytes()
    if not name.endswith(".json"):
        if len(found) != len(expected) or found[:1024] != expected[:1024]:
            return f"{path}: other size or header"
        if name.endswith("_debug_state.bin"):
            batch, seq_len = np.frombuffer(expected, dtype="<i4", count=4)[2:]
            end = 1024 + 2 * 4 * batch * seq_len
            if found[1024:end] != expected[1024:end]:
                return f"{path}: other tokens"
    a, b = as_numbers(name, found), as_numbers(name, expected)
    if a.shape != b.shape:
        return f"{path}: other number of steps"
    error = np.abs(a - b).max()
    if not error <= TOLERANCE:
        return f"{path}: differs by {error:.3g}, more than {TOLERANCE:g}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Reference numbers of a small GPT-2, in PyTorch.")
    parser.add_argument(
        "--check", action="store_true", help="compare the files with a fresh computation"
    )
    options = parser.parse_args()
    problems = []
    for model in MODELS:
        for name, data in compute(model).items():
            if options.check:
                problem = check(name, data)
                problems += [problem] if problem else []
            else:
                (HERE / name).write_bytes(data)
                print(f"wrote {HERE / name} ({len(data)} bytes)")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
