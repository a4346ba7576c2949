"""A program's next-token distributions beside the float model's.

Letters: V vocab_size, n scored positions.
"""

from __future__ import annotations

import torch

from exporter.spec import DomainScore


class DomainScores:
    """Collects positions of one domain."""

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self._columns: list[torch.Tensor] = []

    def add(self, want: torch.Tensor, got: torch.Tensor, following: torch.Tensor) -> None:
        """Logits ``[n, V]`` of the float model and of the program, and the tokens int64 ``[n]`` that followed."""
        logp, logq = (torch.log_softmax(rows.float(), -1) for rows in (want, got))
        nll, own = (-rows.gather(1, following[:, None])[:, 0].double() for rows in (logp, logq))
        kl = (logp.exp() * (logp - logq)).sum(1, dtype=torch.float64)
        agreed = (want.argmax(1) == got.argmax(1)).double()
        self._columns.append(torch.stack([nll, own - nll, kl, agreed]))

    def score(self) -> DomainScore:
        """The summary of two positions or more."""
        nll, gap, kl, agreed = torch.cat(self._columns, 1)
        count = len(nll)
        errors = [float(values.std() / count**0.5) for values in (gap, kl)]
        return DomainScore(
            domain=self.domain, positions=count, nll=float(nll.mean()), nll_gap=float(gap.mean()),
            nll_gap_error=errors[0], kl=float(kl.mean()), kl_error=errors[1], kl_p99=float(kl.quantile(0.99)),
            agreement=float(agreed.mean()),
        )  # fmt: skip
