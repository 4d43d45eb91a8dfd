"""From the engines' KV events to the index.

decode.py reads frames, stream.py puts batches in order (pure), apply.py brings them into the index,
trust.py says how far the result may be believed, subscriber.py owns the sockets; feed.py is what others use.
"""

from kvroute.conductor.events.actions import Watermark
from kvroute.conductor.events.feed import EventFeed
from kvroute.conductor.events.limits import FeedLimits
from kvroute.conductor.events.sources import EventSource, discovered_sources
from kvroute.conductor.events.trust import HolderHealth, WorkerHealth

__all__ = [
    "EventFeed",
    "EventSource",
    "FeedLimits",
    "HolderHealth",
    "Watermark",
    "WorkerHealth",
    "discovered_sources",
]
