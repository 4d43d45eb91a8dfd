"""Every fault of either leg of a split request, in every phase, on mock engines behind a real gateway.

`python -m kvroute.loadtests.fault_matrix --out FILE.md` runs all cells and writes one table.
"""
