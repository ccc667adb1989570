"""The problems that `compression` learns: small models on real data, with samples held out for the accuracy.

    digits   a convolutional network on scikit-learn's images of digits
    text     a transformer that predicts each next character of Python's own documentation

Nothing is downloaded: the text is `pydoc_data.topics` of this Python, 0.5 to 0.7 MB.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from hvdlite.errors import HvdliteError

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Inputs, and a label for each row of the model's output."""
CHARACTERS, CONTEXT, WIDTH, HEADS, LAYERS, NEAR = 128, 32, 128, 4, 2, 4
BLOCK = 4096  # characters of text; every tenth block is held out
TESTED = 256  # held-out pieces of text


@dataclass(frozen=True)
class Problem:
    """A model and its data.

    Attributes:
        name: The name in tables.
        build: Makes the model.
        draw: Makes a batch for training from a generator.
        held_out: Samples that are never in a batch.
        steps: Steps of one training.
        rate: The learning rate after the warm-up.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    held_out: Batch
    steps: int
    rate: float


def digits() -> Problem:
    """1,797 images of 8 x 8 points (scikit-learn's copy of the UCI digits), every fifth one held out.

    Raises:
        HvdliteError: scikit-learn is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise HvdliteError("the digits are scikit-learn's: pip install scikit-learn, or say --problems text")
    path = Path(
        package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"
    )  # to import it takes seconds
    table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    images, labels = torch.from_numpy(table[:, :-1] / 16).view(-1, 1, 8, 8), torch.from_numpy(table[:, -1]).long()
    tested = torch.arange(len(labels)) % 5 == 4
    trained, answers = images[~tested], labels[~tested]

    def draw(generator: torch.Generator) -> Batch:
        picked = torch.randint(len(answers), (32,), generator=generator)
        return trained[picked], answers[picked]

    return Problem("digits, CNN", digits_cnn, draw, (images[tested], labels[tested]), 200, 0.05)


def digits_cnn() -> nn.Module:
    """Two convolutions and two linear layers, 71 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def text() -> Problem:
    """Python's documentation of its language, as `help()` shows it; every tenth block is held out."""
    from pydoc_data.topics import topics

    codes = np.frombuffer("".join(topics.values()).encode("ascii", "replace"), np.uint8)
    blocks = torch.from_numpy(codes[: len(codes) // BLOCK * BLOCK].astype(np.int64)).view(-1, BLOCK)
    tested = torch.arange(len(blocks)) % 10 == 9
    trained, others = blocks[~tested].flatten(), blocks[tested].flatten()

    def draw(generator: torch.Generator) -> Batch:
        return passages(trained, torch.randint(len(trained) - CONTEXT, (2,), generator=generator))

    held_out = passages(others, torch.linspace(0, len(others) - CONTEXT - 1, TESTED).long())
    return Problem("text, transformer", Reader, draw, held_out, 1500, 0.1)


def passages(characters: torch.Tensor, starts: torch.Tensor) -> Batch:
    """Passages of CONTEXT characters that begin at these places, and the character after each of theirs."""
    found = characters[starts[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:].flatten()


def layer() -> nn.Module:
    """One layer of `Reader`. What it adds is small at first, as in GPT-2, so that the first steps teach something."""
    made = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
    for last in (made.linear2, made.self_attn.out_proj):
        nn.init.normal_(last.weight, std=0.02 / math.sqrt(LAYERS))
    return made


class Reader(nn.Module):
    """A causal transformer over characters, 0.5 million parameters.

    A convolution over the last few characters comes before its layers, so that it learns spelling in few steps.

    Attributes:
        embedding: The characters' vectors.
        near: The convolution.
        places: A vector for each place in a passage.
        layers: The layers.
        head: The scores of all characters.
    """

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.near = nn.Conv1d(WIDTH, WIDTH, NEAR)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS), nn.Flatten(0, 1))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Scores of each next character, of shape (passages * CONTEXT, CHARACTERS)."""
        found = self.embedding(characters)
        before = nn.functional.pad(found.transpose(1, 2), (NEAR - 1, 0))
        found = found + self.near(before).transpose(1, 2) + self.places
        for layer in self.layers:
            found = layer(found, src_mask=self.mask, is_causal=True)
        scores: torch.Tensor = self.head(found)
        return scores


PROBLEMS: dict[str, Callable[[], Problem]] = {"digits": digits, "text": text}
