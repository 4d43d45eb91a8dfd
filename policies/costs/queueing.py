"""How much is in flight in a steady state, and when there is none to speak of.

Little's law, L = lambda W, holds for any arrivals, service and order of a stable system, over means. It says
nothing of the 99th percentile, and nothing of a queue that grows: there the functions raise `Overload`.
"""

from __future__ import annotations


class Overload(ValueError):
    """No steady state: work arrives at least as fast as it is done. `utilisation` says how much faster."""

    def __init__(self, utilisation: float) -> None:
        super().__init__(
            f"utilisation {utilisation:.2f} is not below 1: the queue grows without end, so no figure of a "
            f"steady state is true; lower the rate or the service time, or add servers"
        )
        self.utilisation = utilisation


def utilisation(rate_per_s: float, service_s: float, servers: int = 1) -> float:
    """Share of time each of `servers` works, if above 1 the load it cannot do. ValueError for no servers."""
    if servers < 1:
        raise ValueError(f"servers: {servers} is not above 0; 1 or more is expected")
    return rate_per_s * service_s / servers


def steady_utilisation(rate_per_s: float, service_s: float, servers: int = 1) -> float:
    """`utilisation`, or Overload."""
    busy = utilisation(rate_per_s, service_s, servers)
    if busy >= 1:
        raise Overload(busy)
    return busy


def in_flight(rate_per_s: float, stay_s: float) -> float:
    """Mean number inside a stable system, L = lambda W: `stay_s` from entry to exit, all waiting included."""
    return rate_per_s * stay_s


def mg1_wait_s(rate_per_s: float, service_s: float, service_cv2: float) -> float:
    """An estimate: mean wait at one server with Poisson arrivals in order of arrival (Pollaczek-Khinchine).

        W_q = rho s (1 + cv2) / (2 (1 - rho))

    `service_cv2` is the variance of the service time over its squared mean: 0 constant, 1 exponential, more
    for long-tailed prompts. Real arrivals are burstier, so real waits are longer. Overload if there is no
    steady state.
    """
    busy = steady_utilisation(rate_per_s, service_s)
    return busy * service_s * (1 + service_cv2) / (2 * (1 - busy))
