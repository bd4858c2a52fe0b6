"""The trainer's data order (llmc/permutation.h, llmc/dataloader.h) in Python, for one token file.

A comparison of losses means something only when both sides see the same tokens in the same order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

MASK32, MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
DATA_ORDER = 3  # RandomPurpose::kDataOrder
ROUNDS = 12
TOKEN_MAGIC = 20240520


def philox(seed: int, step: int, block: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011) with the trainer's key and counter."""
    c = [block & MASK32, block >> 32, step, DATA_ORDER]
    k = [seed & MASK32, seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK32, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK32]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c[0], c[1], c[2], c[3]


class KeyedPermutation:
    """A permutation of 0 ... n-1: Feistel rounds and cycle walking."""

    def __init__(self, n: int, seed: int, epoch: int, stream: int) -> None:
        self.n = n
        self.half_bits = 1
        while 1 << (2 * self.half_bits) < n:
            self.half_bits += 1
        lanes = philox(seed, stream, epoch)
        self.key = lanes[0] | lanes[1] << 32
        self.swap = lanes[2] & 1

    def _encrypt(self, value: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for round_number in range(ROUNDS):
            bits = philox(self.key, round_number, right)[0]
            left, right = right, left ^ (bits & mask)
        result = left << self.half_bits | right
        return result ^ 1 if self.swap and result < 2 else result

    def __getitem__(self, place: int) -> int:
        place = self._encrypt(place)
        while place >= self.n:
            place = self._encrypt(place)
        return place


class Windows:
    """Windows of T+1 tokens of one token file, in the trainer's order for `seed`."""

    def __init__(self, path: Path, T: int, seed: int = 1337) -> None:
        header = np.fromfile(path, dtype="<i4", count=256)
        if len(header) < 256 or header[0] != TOKEN_MAGIC:
            raise SystemExit(f"error: {path}: not a token file")
        self.tokens = np.fromfile(path, dtype="<u2", offset=1024)
        self.T, self.seed = T, seed
        self.count = (len(self.tokens) - 1) // T
        if self.count < 1:
            raise SystemExit(f"error: {path}: {len(self.tokens)} tokens, expected more than {T}")
        self.epoch = -1
        self.order: KeyedPermutation | None = None

    def window(self, q: int) -> np.ndarray:
        """Tokens of window number q of the endless sequence, (T+1,)."""
        epoch, place = divmod(q, self.count)
        if epoch != self.epoch or self.order is None:
            self.epoch, self.order = epoch, KeyedPermutation(self.count, self.seed, epoch, 0)
        start = self.order[place] * self.T
        return self.tokens[start : start + self.T + 1].astype(np.int64)

    def micro_batch(self, step: int, j: int, M: int, B: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets (B,T) of micro-batch j of a step of M."""
        first = (step * M + j) * B
        rows = np.stack([self.window(first + b) for b in range(B)])
        return rows[:, :-1], rows[:, 1:]
