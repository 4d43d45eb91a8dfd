"""Hit accounting: the founding definitions, by hand."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from kvroute.conductor.hits import OTHER_MODELS, HitAccount, HitFigures, PrefillCost
from kvroute.types import PrefixMatch


class Ticks:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def held(tokens: int, gpu: int = 0, cpu: int = 0, confirmed: int = 0) -> PrefixMatch:
    return PrefixMatch(tokens, gpu, cpu, confirmed)


def total(account: HitAccount, model: str | None = None) -> HitFigures:
    return account.report(model).total


def test_the_three_rates_differ_as_they_should() -> None:
    costs = {"small": PrefillCost(kv_bytes_per_token=10), "large": PrefillCost(kv_bytes_per_token=1000)}
    account = HitAccount(Ticks(), costs)
    account.observe("small", 100, held(96), 16, 96)
    account.observe("small", 100, held(0), 16, 0)
    account.observe("large", 100, held(48), 16, 48)
    account.observe("large", 700, held(0), 16, 0)
    figures = total(account)
    assert figures.request_hit_rate == 2 / 4
    assert figures.token_hit_rate == (96 + 48) / 1000
    assert figures.byte_hit_rate == (96 * 10 + 48 * 1000) / (200 * 10 + 800 * 1000)
    assert figures.skipped_tokens == 144
    assert total(account, "small").token_hit_rate == 96 / 200


def test_before_the_first_request_there_are_no_rates() -> None:
    figures = total(HitAccount(Ticks()))
    rates = (figures.request_hit_rate, figures.token_hit_rate, figures.byte_hit_rate)
    assert rates == (None, None, None)
    assert (figures.bias_tokens, figures.mean_absolute_error_tokens) == (None, None)


def test_seconds_saved_count_attention() -> None:
    """Saved is what the whole prompt would have taken less what the rest takes."""
    token_s, attention_s, prompt, hit = 2e-5, 8e-10, 4000, 3200
    account = HitAccount(Ticks(), {"m": PrefillCost(token_s, attention_s, gpus=4)})
    account.observe("m", prompt, held(hit), 16, hit)

    def prefill_s(new: int, before: int) -> float:
        return token_s * new + attention_s * new * (before + new / 2)

    saved_s = prefill_s(prompt, 0) - prefill_s(prompt - hit, hit)
    assert total(account).saved_gpu_s == pytest.approx(4 * saved_s)


@pytest.mark.parametrize(
    ("reported", "tiers"),
    [
        (0, (0, 0, 0, 0)),
        (16, (16, 0, 0, 0)),
        (48, (32, 16, 0, 0)),
        (80, (32, 32, 16, 0)),
        (112, (32, 32, 32, 16)),
        (None, (32, 32, 32, 16)),
    ],
)
def test_a_hit_is_told_by_tier_from_the_front(reported: int | None, tiers: tuple[int, ...]) -> None:
    account = HitAccount(Ticks())
    account.observe("m", 200, held(112, gpu=32, cpu=64, confirmed=96), 16, reported)
    figures = total(account)
    by_tier = (figures.gpu_tokens, figures.cpu_tokens, figures.disk_tokens, figures.unconfirmed_tokens)
    assert by_tier == tiers
    assert sum(tiers) == figures.skipped_tokens
    assert figures.unreported_requests == (reported is None)


def test_the_last_prompt_token_is_never_usable() -> None:
    account = HitAccount(Ticks())
    account.observe("m", 96, held(96, gpu=96), 16, 80)
    figures = total(account)
    assert (figures.usable_tokens, figures.over_predicted, figures.absolute_error_tokens) == (80, 0, 0)
    account.observe("m", 97, held(96), 16, 96)
    account.observe("m", 0, held(0), 16, 0)
    assert total(account).usable_tokens == 176


def test_prediction_is_compared_only_with_what_was_reported() -> None:
    account = HitAccount(Ticks())
    for predicted, reported in ((64, 64), (64, 32), (16, 48), (96, 0), (64, None)):
        account.observe("m", 100, held(predicted), 16, reported)
    figures = total(account)
    assert (figures.compared_requests, figures.over_predicted, figures.under_predicted) == (4, 2, 1)
    assert figures.bias_tokens == (0 + 32 - 32 + 96) / 4
    assert figures.mean_absolute_error_tokens == (0 + 32 + 32 + 96) / 4
    assert (figures.unreported_requests, figures.hit_requests) == (1, 4)


@pytest.mark.parametrize(("reported", "taken"), [(500, 100), (-3, 0)])
def test_a_report_that_cannot_be_is_cut_and_counted(reported: int, taken: int) -> None:
    account = HitAccount(Ticks())
    account.observe("m", 100, held(0), 16, reported)
    figures = total(account)
    assert (figures.skipped_tokens, figures.implausible_reports) == (taken, 1)


def test_the_window_forgets_and_the_total_does_not() -> None:
    clock = Ticks()
    account = HitAccount(clock, window_s=60.0, slices=6)
    for _ in range(12):
        account.observe("m", 100, held(0), 16, 0)
        clock.now_s += 10.0
    report = account.report()
    assert (report.total.requests, report.window.requests) == (12, 5)
    clock.now_s += 49.0
    assert account.report().window.requests == 1
    clock.now_s += 1.0
    assert account.report().window.requests == 0
    assert account.report("m").total.requests == 12


def test_models_are_bounded_and_none_is_lost() -> None:
    account = HitAccount(Ticks(), max_models=3)
    for name in range(50):
        account.observe(f"model-{name}", 100, held(0), 16, 16)
    assert account.models == ["model-0", "model-1", "model-2", OTHER_MODELS]
    assert total(account).requests == 50
    assert total(account, OTHER_MODELS).requests == 47
    assert total(account, "model-9").requests == 0


def test_a_report_is_a_snapshot() -> None:
    account = HitAccount(Ticks())
    account.observe("m", 100, held(0), 16, 16)
    before = account.report()
    kept = asdict(before.total), asdict(before.window)
    account.observe("m", 100, held(0), 16, 16)
    assert (asdict(before.total), asdict(before.window)) == kept


def test_memory_is_bounded_by_the_slices() -> None:
    clock = Ticks()
    account = HitAccount(clock, window_s=6.0, slices=6)
    for _ in range(500):
        clock.now_s += 0.7
        account.observe("m", 100, held(0), 16, 16)
    assert len(account._books["m"].recent) <= 6


def test_random_requests_against_plain_sums() -> None:
    seed = 29
    rng = random.Random(seed)
    clock = Ticks()
    account = HitAccount(clock, window_s=10.0, slices=5)
    seen = []
    for _ in range(2000):
        clock.now_s += rng.random()
        prompt = rng.randrange(1, 500)
        gpu, cpu, confirmed, tokens = sorted(rng.randrange(0, 500) for _ in range(4))
        reported = rng.choice([None, rng.randrange(0, prompt + 1)])
        account.observe(rng.choice("abc"), prompt, held(tokens, gpu, cpu, confirmed), 16, reported)
        usable = min(tokens, (prompt - 1) // 16 * 16)
        seen.append((int(clock.now_s / 2.0), prompt, usable if reported is None else reported))
    report = account.report()
    last = int(clock.now_s / 2.0) - 5
    for figures, some in ((report.total, seen), (report.window, [each for each in seen if each[0] > last])):
        assert figures.requests == len(some), f"seed {seed}"
        assert figures.prompt_tokens == sum(prompt for _, prompt, _ in some)
        assert figures.skipped_tokens == sum(skipped for _, _, skipped in some)
        assert figures.hit_requests == sum(skipped > 0 for _, _, skipped in some)
        tiers = figures.gpu_tokens + figures.cpu_tokens + figures.disk_tokens + figures.unconfirmed_tokens
        assert tiers == figures.skipped_tokens


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="window_s must be above 0"):
        HitAccount(Ticks(), window_s=0.0)


def test_where_the_index_was_not_asked_nothing_was_foretold_wrongly() -> None:
    account = HitAccount(Ticks())
    account.observe("m", 100, None, 16, 64)
    account.observe("m", 100, None, 16, None)
    figures = total(account)
    assert (figures.requests, figures.skipped_tokens, figures.unreported_requests) == (2, 64, 1)
    assert (figures.compared_requests, figures.under_predicted, figures.unconfirmed_tokens) == (0, 0, 64)
