"""How long answers are: a running prediction per model and tenant."""

from __future__ import annotations

from kvroute.types import PRIOR_OUTPUT_TOKENS

PRIOR_ANSWERS = 20.0
"""What is known of the level above counts like so many answers."""
FORGETTING = 0.998
"""Weight of an answer after the next: about the last 500 count."""
MAX_KEYS = 4096
MAX_EXPECTED_TOKENS = 32_768.0
"""No more is expected where nearly every answer was cut off."""


class _Mean:
    """A fading mean, drawn to its parent's where there is little to go by."""

    __slots__ = ("parent", "tokens", "value", "weight")

    def __init__(self, parent: _Mean | None) -> None:
        self.parent = parent
        self.tokens = 0.0
        self.weight = 0.0
        self.value: float = PRIOR_OUTPUT_TOKENS if parent is None else parent.value

    def add(self, tokens: float, weight: float) -> None:
        self.tokens = self.tokens * FORGETTING + tokens
        self.weight = self.weight * FORGETTING + weight
        prior = PRIOR_OUTPUT_TOKENS if self.parent is None else self.parent.value
        mean = (self.tokens + PRIOR_ANSWERS * prior) / (self.weight + PRIOR_ANSWERS)
        self.value = min(mean, MAX_EXPECTED_TOKENS)


class OutputLengths:
    """Means by (model, tenant), drawn to the model's, which is drawn to that of all; constant time.

    At most `max_keys` of each are kept, those that answered last.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, got {max_keys}")
        self._max_keys = max_keys
        self._all = _Mean(None)
        self._models: dict[str | None, _Mean] = {}
        self._tenants: dict[tuple[str | None, str], _Mean] = {}

    def __len__(self) -> int:
        """(model, tenant) pairs that are known."""
        return len(self._tenants)

    def expect(self, model: str | None, tenant: str = "", max_output_tokens: int | None = None) -> float:
        """Output tokens to expect; no more than the request's own limit."""
        mean = self._tenants.get((model, tenant)) or self._models.get(model) or self._all
        expected = mean.value
        if max_output_tokens is not None and max_output_tokens < expected:
            return float(max_output_tokens)
        return expected

    def observe(
        self, model: str | None, tenant: str, output_tokens: int, max_output_tokens: int | None = None
    ) -> None:
        """An answer came to its end after so many tokens.

        One that its limit cut off would have been longer: it adds its tokens and counts as no answer, which
        is the maximum likelihood of exponential lengths under censoring.
        """
        if output_tokens < 0:
            raise ValueError(f"output_tokens must not be negative, got {output_tokens}")
        weight = 0.0 if max_output_tokens is not None and output_tokens >= max_output_tokens else 1.0
        self._all.add(output_tokens, weight)
        by_model = self._models.pop(model, None) or _Mean(self._all)
        by_model.add(output_tokens, weight)
        self._models[model] = by_model
        key = (model, tenant)
        by_tenant = self._tenants.pop(key, None) or _Mean(by_model)
        by_tenant.parent = by_model
        by_tenant.add(output_tokens, weight)
        self._tenants[key] = by_tenant
        if len(self._models) > self._max_keys:
            del self._models[next(iter(self._models))]
        if len(self._tenants) > self._max_keys:
            del self._tenants[next(iter(self._tenants))]
