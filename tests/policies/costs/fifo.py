"""A worker in virtual time that prefills one prompt after the other, priced by the books a gateway keeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvroute.load import WorkerLoad
from kvroute.policies.costs.calibration import Calibration
from kvroute.policies.costs.pace import Pace
from kvroute.policies.costs.speeds import PRESETS
from kvroute.types import Outcome, Prediction, Worker

WORKER = Worker(id="w", url="http://w")


@dataclass(frozen=True)
class Truth:
    """What the worker really takes, by the preset's seconds."""

    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    overhead_s: float = 0.0156
    noise: float = 0.2
    """Standard deviation of the logarithm of every time."""
    outliers: float = 0.0
    """Share of answers that take fifty times as long to arrive."""


class FifoWorker:
    """Arrivals are Poisson; `utilisation` is of the true prefill time."""

    def __init__(
        self, calibration: Calibration, key: str, truth: Truth, rng: random.Random, utilisation: float
    ) -> None:
        self.pace = Pace(PRESETS["qwen3-32b-h200-tp2"])
        self.calibration, self.key, self.truth, self.rng = calibration, key, truth, rng
        calibration.start(key, self.pace, "class")
        mean_s = sum(self._prefill_s(self._prompt()) for _ in range(2000)) / 2000
        self.gap_s = mean_s * truth.prefill_scale / utilisation
        self.load = WorkerLoad()
        self.now_s = self.free_s = 0.0
        self.answers: list[tuple[float, int, Callable[[float], None]]] = []

    def _prompt(self) -> int:
        return min(max(int(self.rng.lognormvariate(8.0, 1.0)), 16), 60_000)

    def _prefill_s(self, prompt_tokens: int) -> float:
        return self.pace.speed.prefill_s(prompt_tokens)

    def _noisy(self, time_s: float) -> float:
        return time_s * self.rng.lognormvariate(0.0, self.truth.noise)

    def run(self, requests: int) -> None:
        """So many more answers."""
        waiting = requests
        while waiting or self.answers:
            arrival_s = self.now_s + self.rng.expovariate(1 / self.gap_s) if waiting else float("inf")
            while self.answers and self.answers[0][0] <= arrival_s:
                at_s, _, answer = self.answers.pop(0)
                answer(at_s)
                self.now_s = at_s
            if waiting:
                self.now_s = arrival_s
                self._arrive(waiting)
                waiting -= 1

    def _arrive(self, number: int) -> None:
        pace, truth, now_s = self.pace, self.truth, self.now_s
        prompt = self._prompt()
        raw_s = self._prefill_s(prompt)
        scale = pace.prefill_scale
        ahead_s = self.load.ahead_s(now_s, scale) / scale + raw_s
        step_s = pace.speed.decode_s(1 + number % 8, 8000.0)
        prediction = Prediction(
            pace.overhead_s + scale * ahead_s, pace.decode_scale * step_s, ahead_s, step_s
        )
        charge = self.load.charge(now_s, prefill_s=raw_s, prompt_tokens=prompt, uncached_tokens=prompt)
        self.free_s = max(now_s, self.free_s) + self._noisy(truth.prefill_scale * raw_s)
        first_s = self.free_s + self._noisy(truth.overhead_s)
        itl_s = self._noisy(truth.decode_scale * step_s)
        ttft_s = first_s - now_s
        if self.rng.random() < truth.outliers:
            ttft_s, itl_s = 50 * ttft_s, 50 * itl_s
        outcome = Outcome(WORKER, 200, ttft_s=ttft_s, itl_s=itl_s, prediction=prediction)

        def answer(at_s: float) -> None:
            charge.first_byte(at_s)
            charge.release(at_s)
            self.calibration.observe(self.key, pace, outcome, "class", now_s=at_s, charge=charge)

        self.answers.append((first_s, number, answer))
        self.answers.sort(key=lambda each: each[0])
