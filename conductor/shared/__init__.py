"""Redis or Valkey between several gateways: predictions, loads, decisions about workers, index snapshots.

Three streams under one prefix, each bounded in length and expiring when nobody writes to it:

    PREFIX:routed    what was sent where; a fresh replica reads back `warm_s` of it
    PREFIX:loads     each replica's requests in flight per worker; counts until it is 3 s old
    PREFIX:workers   decisions of operators, repeated by every replica, merged by version

and `PREFIX:snapshot:NAME` with its chunks. Confirmed entries are not shared: every replica hears the
engines' own events.
"""

from kvroute.conductor.shared.host import Host, LocalWorker, OthersLoad
from kvroute.conductor.shared.messages import Intent, SharedWorker
from kvroute.conductor.shared.options import SharedOptions
from kvroute.conductor.shared.snapshots import Snapshot
from kvroute.conductor.shared.state import SharedState
from kvroute.conductor.shared.stats import Dropped, Ignored, Lost, SharedStats, SnapshotFailure

__all__ = [
    "Dropped",
    "Host",
    "Ignored",
    "Intent",
    "LocalWorker",
    "Lost",
    "OthersLoad",
    "SharedOptions",
    "SharedState",
    "SharedStats",
    "SharedWorker",
    "Snapshot",
    "SnapshotFailure",
]
