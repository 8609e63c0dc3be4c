"""What a run came to: the object that `train --json` prints, and the lines for a person."""

from __future__ import annotations

import json
from dataclasses import dataclass

from heptad.trace import Transfer


@dataclass(frozen=True, slots=True)
class Outcome:
    """Losses are means over targets in nats, None where nothing was evaluated or trained; `steps`: the last one done.

    tokens_per_s: tokens of the global batches over the time inside steps, the first step of this start left out.
    transfers, predicted: what one step sent and what the formulas say (with `ledger`; None for an engine without any).
    resume_with: how to go on after a stop, else None. pictures: their files (rank 0's outcome only).
    """

    run_dir: str
    first_val_loss: float | None
    val_loss: float | None
    train_loss: float | None
    steps: int
    tokens: int
    targets: int
    tokens_per_s: float | None
    sample: str
    stopped: bool
    resume_with: str | None
    transfers: tuple[Transfer, ...] = ()
    predicted: tuple[Transfer, ...] | None = None
    pictures: tuple[str, ...] = ()

    def json(self) -> str:
        """One object on one line."""
        names = ("run_dir", "first_val_loss", "val_loss", "steps", "tokens_per_s")
        return json.dumps({name: getattr(self, name) for name in names})

    def text(self) -> str:
        """The same for a person: losses, rate, sample, folder, and after a stop how to go on."""
        lines = [f"{'stopped after' if self.stopped else 'done:'} step {self.steps}"]
        if self.train_loss is not None:
            lines.append(f"train loss       {self.train_loss:.4f}")
        if self.val_loss is not None:
            change = ""
            if self.first_val_loss:
                change = f"  (first {self.first_val_loss:.4f}, {self.val_loss / self.first_val_loss - 1:+.1%})"
            lines.append(f"validation loss  {self.val_loss:.4f}{change}")
        lines.append(f"tokens           {self.tokens:,} ({self.targets:,} supervised)")
        if self.tokens_per_s is not None:
            lines.append(f"tokens/s         {self.tokens_per_s:,.0f}")
        if self.sample:
            lines += ["sample:", *(f"    {line}" for line in self.sample.splitlines())]
        lines.append(f"run folder       {self.run_dir}")
        lines += [f"{'pictures' if number == 0 else '':<17}{path}" for number, path in enumerate(self.pictures)]
        if self.resume_with is not None:
            lines.append(self.resume_with)
        return "\n".join(lines)
