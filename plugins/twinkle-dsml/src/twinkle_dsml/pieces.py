"""What layouts make: text in pieces, with who wrote them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """``turn``: index of the assistant's message that wrote it, where it is to be trained."""

    text: str
    turn: int | None = None
