"""GPUs by their data sheets, and the time that a step takes on a GPU, for `memory`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# Assumed share of a data sheet's FLOP/s and bytes/s that a run sustains.
SUSTAINED = 0.6
# Seconds per layer and token that a GPU waits for `generate` of transformers: 0.69 ms on one core
# of a server, for models of 24 and 48 layers whose GEMMs take no time.
HOST_SECONDS = 7e-4


class Card(NamedTuple):
    """A GPU by its data sheet."""

    gib: float
    tflops: float  # of dense GEMMs in bf16 or fp16 with sums in fp32
    tflops_fp32: float
    gb_per_s: float  # of its memory


# NVIDIA's figures from public tables, for SXM cards if there are several kinds. Error correction
# takes a sixteenth of the memory of T4, L4, A10G and L40S.
CARDS = {
    "t4": Card(15, 65, 8.1, 320),
    "l4": Card(22.5, 121, 30.3, 300),
    "a10g": Card(22.5, 70, 35, 600),
    "3090": Card(24, 71, 35.6, 936),
    "4090": Card(24, 165, 82.6, 1008),
    "5090": Card(32, 209, 104.8, 1792),
    "l40s": Card(45, 362, 91.6, 864),
    "a6000": Card(48, 155, 38.7, 768),
    "a100": Card(80, 312, 19.5, 2039),
    "h100": Card(80, 989, 67, 3350),
    "h200": Card(140, 989, 67, 4800),
    "b200": Card(179, 2250, 80, 8000),
}


@dataclass(frozen=True)
class Work:
    """Operations of a step in one process, and its time on the host."""

    updates: Mapping[str, int]  # FLOPs of GEMMs, by part
    sampling: int  # FLOPs of GEMMs
    reads: int  # bytes, while sampling
    host_seconds: float  # while sampling
    half: bool  # whether GEMMs have 16 bits

    def seconds(self, card: Card) -> dict[str, float]:
        """Returns the seconds of a step on the card, by part."""
        rate = SUSTAINED * 1e12 * (card.tflops if self.half else card.tflops_fp32)
        by_memory = self.reads / (SUSTAINED * 1e9 * card.gb_per_s)
        return {
            **{name: count / rate for name, count in self.updates.items()},
            "sampling": max(self.sampling / rate, by_memory) + self.host_seconds,
        }

    def table(self, steps: int, card: Card | None = None) -> str:
        """The FLOPs of a step, one figure per line, and on a card the time of all steps."""
        seconds = {} if card is None else self.seconds(card)
        lines = [
            f"{name:28}{count / 1e12:9.2f} TFLOP" + (f"{seconds[name]:9.2f} s" if seconds else "")
            for name, count in {**self.updates, "sampling": self.sampling}.items()
            if count
        ]
        if seconds:
            total, sampling = (steps * x / 60 for x in (sum(seconds.values()), seconds["sampling"]))
            lines.append(
                f"\nPredicted, never measured: {steps:,} steps take at least {total:.3g} min, "
                f"{sampling:.3g} of them for sampling,\nif every prompt and completion is as long "
                f"as it may be and the GPU sustains {SUSTAINED:.0%} of its data sheet."
            )
        return "\n".join(lines)
