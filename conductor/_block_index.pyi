from kvroute.conductor.block_index import BlockIndex as BlockIndex
