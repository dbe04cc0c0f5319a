"""What became of every rollout record, and the account of all their tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from evsys_jax.account import TokenAccount
from evsys_jax.ragged import RaggedRows

_OFF_CHAIN = ("empty_call", "quarantined", "off_chain")


@dataclass
class RolloutVerdict:
    """What became of one rollout record.

    Args:
      record: its number in the input, counted from 1 (the line number of a JSONL file).
      rollout_id: "" where the record has no usable one.
      task: `_ng_task_index`, None where the record has no usable one; it is then in no group.
      group: index of its group, None where it is in none.
      trajectory: its place in the group, None where it is in none.
      trains: its tokens yield rows.
      reason: "" or a short, stable word for why it doesn't train.
      detail: the particulars, for people.
      reward: None where it is absent or no finite number.
      turns: generated items.
      tokens: generated tokens, of all captured calls.
      turn_tokens: generated tokens of the turns alone.
    """

    record: int
    rollout_id: str = ""
    task: int | None = None
    group: int | None = None
    trajectory: int | None = None
    trains: bool = False
    reason: str = ""
    detail: str = ""
    reward: float | None = None
    turns: int = 0
    tokens: int = 0
    turn_tokens: int = 0


@dataclass
class CollectReport:
    """The verdict of every record, in order, and where their tokens went.

    Args:
      verdicts: one per record.
      account: tokens of all records; `trained` and `dropped` as rows of one turn each give them.
    """

    verdicts: list[RolloutVerdict] = field(default_factory=list)
    account: TokenAccount = field(default_factory=TokenAccount)

    @property
    def masked(self) -> Counter[str]:
        """Rollouts that don't train, by reason."""
        return Counter(verdict.reason for verdict in self.verdicts if not verdict.trains)

    def account_of(self, rows: RaggedRows | TokenAccount) -> TokenAccount:
        """Join the two ends: tokens captured and masked here; trained, dropped and masked later.

        Args:
          rows: what `ragged_rows` made of the groups that came with this report, or the account
            of all that `iter_ragged_rows` made of them.
        """
        later = rows if isinstance(rows, TokenAccount) else rows.account
        off_chain = {reason: self.account.dropped[reason] for reason in _OFF_CHAIN}
        turns = {reason: self.account.dropped_turns[reason] for reason in _OFF_CHAIN}
        known = Counter[str]()
        for verdict in self.verdicts:
            if not verdict.trains and verdict.group is not None:
                known[verdict.reason] += verdict.turn_tokens
        # What was masked after it had been collected: by the caller, or for its length.
        masked = self.account.masked.copy()
        masked.update(later.masked - known)
        return TokenAccount(
            captured=self.account.captured,
            trained=later.trained,
            masked=masked,
            dropped=+(later.dropped + Counter(off_chain)),
            dropped_turns=+(later.dropped_turns + Counter(turns)),
        )
