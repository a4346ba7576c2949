"""How near a program is to the model it came from, text by text, and how near a preset promises to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from exporter.data import Spec

ERRORS = 2
"""So many standard errors above a promise is a broken one; within them it may be the text."""


class DomainScore(Spec):
    """A program beside the float model on one kind of text, at `positions` next tokens.

    `nll` is the float model's mean negative log-likelihood of the true next tokens and `nll_gap` what the program adds
    to it, `kl` the mean KL divergence of the program's distribution from the float model's, `kl_p99` its 99th
    percentile, all in nats. `..._error` is the standard error of a mean, `agreement` the share of equal first choices.
    """

    domain: str
    positions: int
    nll: float
    nll_gap: float
    nll_gap_error: float
    kl: float
    kl_error: float
    kl_p99: float
    agreement: float


class QualityPromise(Spec):
    """The most that a program may lose on the worst domain, in nats: of mean NLL, and of mean KL divergence."""

    nll: float
    kl: float

    def broken(self, scores: Sequence[DomainScore]) -> Iterator[str]:
        """What is above the promise by more than `ERRORS` standard errors, in words, the worst domain first."""
        for what, most, own in (
            ("mean KL divergence", self.kl, lambda one: (one.kl, one.kl_error)),
            ("NLL gap", self.nll, lambda one: (one.nll_gap, one.nll_gap_error)),
        ):
            above = [one for one in scores if not own(one)[0] - ERRORS * own(one)[1] <= most]  # NaN is above
            if above:
                worst = max(above, key=lambda one: own(one)[0])
                others = f" and in {len(above) - 1} more" if len(above) > 1 else ""
                value, error = own(worst)
                yield f"{what} {value:.4f} ± {error:.4f} nats in {worst.domain}{others}"


class Quality(Spec):
    """What was seen of one program at export.

    `preset` is the promise's: the preset of the config, or the nearest to its mapping. `accepted` says that the
    promise was broken and the config took the program all the same. Where a text of the user's calibrated, it has
    `calibration_sha256`, and `own_text` is a part of it that did not calibrate; no promise counts that.
    """

    preset: str
    promise: QualityPromise
    domains: tuple[DomainScore, ...]
    accepted: bool = False
    calibration_sha256: str | None = None
    own_text: DomainScore | None = None

    @property
    def broken(self) -> list[str]:
        """In which ways the promise is broken, in words; empty if it is kept."""
        return list(self.promise.broken(self.domains))

    @property
    def worst(self) -> DomainScore | None:
        """The domain of the largest mean KL divergence; None where the context was too short for any."""
        return max(self.domains, key=lambda one: one.kl, default=None)
