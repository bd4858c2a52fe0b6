"""dev/bench/data_order.py gives the trainer's data order to programs that it is compared with."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from helpers import REPO_ROOT, SHAPE, Trainer, Workplace, write_tokens

sys.path.insert(0, str(REPO_ROOT / "dev" / "bench"))

from data_order import KeyedPermutation, Windows  # noqa: E402

SEED = 1337

# The first elements for this seed, epoch 2 and stream 0, as llmc/permutation.h has them.
KNOWN = {
    1: [0],
    2: [0, 1],
    7: [1, 4, 5, 6, 3, 0, 2],
    298: [147, 118, 210, 159, 93, 26, 191, 120],
    5000: [228, 504, 3530, 4756, 2542, 606, 2492, 1835],
}


@pytest.mark.parametrize("n", KNOWN)
def test_permutation_is_the_trainers(n: int) -> None:
    permutation = KeyedPermutation(n, SEED, 2, 0)
    elements = [permutation[place] for place in range(n)]
    assert elements[: len(KNOWN[n])] == KNOWN[n]
    assert sorted(elements) == list(range(n)), "not a permutation"


def test_windows_come_in_the_trainers_order(fp32: Trainer, work: Workplace) -> None:
    """At learning rate 0 a step's loss tells which of two texts its window holds.

    Three files of 7 windows: in file k, window w holds the second text where w's bit k is set, so
    that the three runs name each window. The texts begin alike: a window's last target is the same
    whatever window follows.
    """
    T, count, epochs = SHAPE.max_seq_len, 7, 3
    rng = np.random.default_rng(0)
    texts = rng.integers(0, SHAPE.vocab_size, (2, T))
    texts[:, 0] = 1
    for bit in range(3):
        tokens = np.concatenate([*(texts[w >> bit & 1] for w in range(count)), [1]])
        path = write_tokens(work.folder / f"bit{bit}.bin", tokens)
        windows = Windows(path, T, SEED)
        assert windows.count == count
        expected = []
        for step in range(epochs * count):
            inputs, targets = windows.micro_batch(step, 0, 1, 1)
            assert (inputs[0, 1:] == targets[0, :-1]).all()
            expected.append(int((inputs[0] == texts[1]).all()))
        run = fp32.train(work.args({"-i": path, "-b": 1, "-t": T, "-d": T, "-l": 0, "-v": 0,
                                    "-x": epochs * count, "-rs": SEED}))
        losses = [step.loss for step in run.steps]
        # The second text is in three of seven windows, so its loss is the one seen less often.
        assert len(set(losses)) == 2, losses
        second = min(set(losses), key=losses.count)
        assert [int(loss == second) for loss in losses] == expected
