"""Fixtures of the trainer's tests.

    pytest test --build-dir build

expects build/cpu-fp32/train_gpt2cpu and build/cpu-bf16/train_gpt2cpu.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

pytest.register_assert_rewrite("helpers")  # failing asserts there show their values, too
import helpers  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--build-dir",
        default=str(helpers.REPO_ROOT / "build"),
        help="folder with cpu-fp32/train_gpt2cpu and cpu-bf16/train_gpt2cpu",
    )


def find_trainer(config: pytest.Config, precision: str) -> helpers.Trainer:
    binary = Path(config.getoption("--build-dir")).resolve() / f"cpu-{precision}" / "train_gpt2cpu"
    if not binary.exists():
        pytest.fail(f"{binary} is missing; run: make train_gpt2cpu PRECISION={precision.upper()}")
    return helpers.Trainer(binary, precision)


@pytest.fixture(scope="session")
def fp32(pytestconfig: pytest.Config) -> helpers.Trainer:
    return find_trainer(pytestconfig, "fp32")


@pytest.fixture(scope="session")
def bf16(pytestconfig: pytest.Config) -> helpers.Trainer:
    return find_trainer(pytestconfig, "bf16")


@pytest.fixture(scope="session", params=["fp32", "bf16"])
def trainer(request: pytest.FixtureRequest) -> helpers.Trainer:
    """Both precisions, one after the other."""
    return find_trainer(request.config, request.param)


@pytest.fixture
def work(tmp_path: Path) -> helpers.Workplace:
    """A fresh folder with small training and validation files."""
    return helpers.Workplace(tmp_path)
