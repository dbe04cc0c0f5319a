"""The token account: captured = trained + masked + dropped, by reason, token by token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TokenAccount:
    """Where every token that the policy generated went.

    `captured` is counted where the tokens come in and the rest where they go, so that `balanced`
    says something.

    Args:
      captured: all generated tokens.
      trained: tokens that are live targets of some row.
      masked: reason to tokens of rollouts that do not train.
      dropped: reason to tokens that no row can hold, or that were left out on request.
      dropped_turns: reason to turns that yield no row.
    """

    captured: int = 0
    trained: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_turns: Counter[str] = field(default_factory=Counter)

    @property
    def balanced(self) -> bool:
        """Tell whether captured = trained + masked + dropped."""
        return self.captured == self.trained + self.masked.total() + self.dropped.total()

    def __add__(self, other: TokenAccount) -> TokenAccount:
        """Join the accounts of different tokens."""
        return TokenAccount(
            captured=self.captured + other.captured,
            trained=self.trained + other.trained,
            masked=self.masked + other.masked,
            dropped=self.dropped + other.dropped,
            dropped_turns=self.dropped_turns + other.dropped_turns,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the account as plain values, for JSON."""
        return {
            "captured": self.captured,
            "trained": self.trained,
            "masked": dict(sorted(self.masked.items())),
            "dropped": dict(sorted(self.dropped.items())),
            "dropped_turns": dict(sorted(self.dropped_turns.items())),
        }
